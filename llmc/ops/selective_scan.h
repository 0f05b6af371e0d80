/*
Selective scan, the recurrence of a Mamba layer. Each of C channels has NS states h, with A = -exp(A_log):
    h_t[n] = exp(delta_t * A[n]) * h_(t-1)[n] + (delta_t * u_t) * ssm_B_t[n]
    y_t    = D * u_t + sum over n of ssm_C_t[n] * h_t[n]
    u, delta, y (B, T, C)   A_log (C, NS)   D (C)
    ssm_B, ssm_C (B, T, NS)   shared by all channels, rows `stride` floats apart
    starts (B, T)   1 where a document begins: h before it is 0. NULL: nowhere
    state (B, C, NS)   h before the first position, and afterwards h after the last one; NULL: 0 before each row
    states  h before each chunk of `chunk` positions, for backward: scan_states_floats(...) floats. NULL where none
            follows
Backward (derived in doc/selective_scan.md) walks down in time. It makes the h of a chunk once more from `states`, so
that h is kept at every chunk, not at every position. lambda is what later positions ask of h_t, 0 at the end of a
document:
    dstate (B, C, NS)   lambda at the last position, what positions behind it ask of the state there, and afterwards
            what these positions ask of the state before the first one: so a row may come in parts, the last one first.
            NULL: nobody asks; a state that came in is a constant then
    G = lambda + dy * ssm_C[n]      lambda = a * G      W = lambda * h_before[n]      S = sum over n of G * ssm_B[n]
    du = D * dy + delta * S         ddelta = u * S + sum over n of A[n] * W           written
    dA_log = A * sum over positions of delta * W         dD = sum of dy * u           written, one call is one leaf
    dssm_B = sum over channels of G * (delta * u)      dssm_C = sum of dy * h      written, rows `dstride` floats apart
    NULL for any of the six: nobody asks for it, and what it alone needs is left out; lambda all of them share.
Cost:   bound by exponentials: one per position, channel and state forward, one more backward. ns for each of these, one
        thread, C 1536, NS 16, T 256, best of many runs on a busy machine (Intel Sapphire Rapids class), gcc 12
        (dev/bench/scan.c):
                        AVX-512   AVX2   SSE2
            forward        0.56   0.95   2.44
            backward       0.92   1.70   3.55
            fm_exp alone   0.47   0.79   2.21
        So exponentials are about 85% of forward, half of backward. A call with T = 1 takes two of them per state, one
        of A_log: 44 us for these sizes. Threads share groups: B * C / SCAN_GROUP of them.
        Memory: scan_states_floats, and scan_workspace_bytes of scratch: for each thread 2 * chunk * NS * SCAN_GROUP
        floats. No bit depends on `chunk`, and little time: backward takes 2% more with 16 than with 32, 1% with 64, 4%
        with 128, 8% with 8.
Order:  h = madd(a, h_before, x * ssm_B), G = madd(dy, ssm_C, lambda), and all chains take products by madd. y, S and
        the sum in ddelta chain over n. dA_log and dD chain over t descending in a row, then over rows ascending. dssm_B
        and dssm_C: groups of SCAN_GROUP channels; in a group 16 lanes, lane l chains over its channels l, l + 16, ...;
        lanes in a tree, l += l + 8, then 4, 2, 1; then a chain over groups. Every chain starts from 0, y from D * u.
        Chunks, threads and vectors share outputs, so none of them changes a bit.
Source: Gu & Dao 2023, arXiv:2312.00752, section 3 and algorithm 2
*/
#ifndef LLMC_SELECTIVE_SCAN_H
#define LLMC_SELECTIVE_SCAN_H
#include "../core/device.h"  // Device, device_workspace, thread_number, ceil_div
#include "../core/fmath.h"   // fm_exp
#include "../core/vec.h"     // vfloat, v_load, v_load_columns, v_store, v_fill, v_transpose

enum { SCAN_GROUP = 64 };        // channels whose parts of dssm_B and dssm_C are added before other groups' are
enum { SCAN_LANES = 16 };        // sums of a group
enum { SCAN_CHUNK = 32 };        // a good `chunk`: at NS 16 `states` has half a float per position and channel,
                                 // and scratch 256 KB
enum { SCAN_MAX_STATES = 256 };  // NS is 1..256

// ---- plain C: read this first; it defines every bit ----

static inline void scan_forward_ref(float* y, float* state, const float* u, const float* delta, const float* A_log,
                                    const float* ssm_B, const float* ssm_C, size_t stride, const float* D,
                                    const unsigned char* starts, int B, int T, int C, int NS) {
    for (int b = 0; b < B; b++) {
        for (int c = 0; c < C; c++) {
            float h[SCAN_MAX_STATES], A[SCAN_MAX_STATES];
            for (int n = 0; n < NS; n++) {
                h[n] = state ? state[((size_t)b * C + c) * NS + n] : 0.0f;
                A[n] = -fm_exp(A_log[(size_t)c * NS + n]);
            }
            for (size_t bt = (size_t)b * T; bt < (size_t)(b + 1) * T; bt++) {
                float d = delta[bt * C + c], x = d * u[bt * C + c], sum = D[c] * u[bt * C + c];
                for (int n = 0; n < NS; n++) {
                    float before = starts && starts[bt] ? 0.0f : h[n];
                    h[n] = madd(fm_exp(d * A[n]), before, x * ssm_B[bt * stride + n]);
                    sum = madd(ssm_C[bt * stride + n], h[n], sum);
                }
                y[bt * C + c] = sum;
            }
            for (int n = 0; state && n < NS; n++) { state[((size_t)b * C + c) * NS + n] = h[n]; }
        }
    }
}

// the order of sums over channels, of a[c] * b[c]
static inline float scan_channel_sum_ref(const float* a, const float* b, int C) {
    float total = 0.0f;
    for (int group = 0; group < C; group += SCAN_GROUP) {
        float lanes[SCAN_LANES] = {0.0f};
        for (int c = group; c < C && c < group + SCAN_GROUP; c++) {
            lanes[c % SCAN_LANES] = madd(a[c], b[c], lanes[c % SCAN_LANES]);
        }
        for (int half = SCAN_LANES / 2; half >= 1; half /= 2) {
            for (int l = 0; l < half; l++) { lanes[l] += lanes[l + half]; }
        }
        total += lanes[0];
    }
    return total;
}

// One channel of one row, all pointers at its first position. h (T+1, NS): the states before and after every position.
// all_G, all_h (T, NS, C), at this channel: factors of the terms of dssm_B and dssm_C. dA (NS) and dD: of this row.
// lambda (NS): dstate of this channel
static inline void scan_backward_channel_ref(float* du, float* ddelta, float* dA, float* dD, float* lambda,
                                             float* all_G, float* all_h, const float* dy, const float* h,
                                             const float* u, const float* delta, const float* A_log,
                                             const float* ssm_B, const float* ssm_C, size_t stride, float D,
                                             const unsigned char* starts, int T, int C, int NS) {
    float A[SCAN_MAX_STATES];
    *dD = 0.0f;
    for (int n = 0; n < NS; n++) {
        dA[n] = 0.0f;
        A[n] = -fm_exp(A_log[n]);
    }
    for (int t = T - 1; t >= 0; t--) {
        size_t at = (size_t)t * C;
        int first = starts && starts[t];
        float S = 0.0f, aw = 0.0f;
        for (int n = 0; n < NS; n++) {
            size_t tn = (size_t)t * NS + n;
            float G = madd(dy[at], ssm_C[t * stride + n], lambda[n]);
            float ag = fm_exp(delta[at] * A[n]) * G, W = ag * (first ? 0.0f : h[tn]);
            S = madd(G, ssm_B[t * stride + n], S);
            aw = madd(A[n], W, aw);
            dA[n] = madd(delta[at], W, dA[n]);
            all_G[tn * C] = G;
            all_h[tn * C] = h[tn + NS];
            lambda[n] = first ? 0.0f : ag;
        }
        if (du) { du[at] = D * dy[at] + delta[at] * S; }
        if (ddelta) { ddelta[at] = u[at] * S + aw; }
        *dD = madd(dy[at], u[at], *dD);
    }
}

// state (B, C, NS): h before the first position, or NULL
static inline void scan_backward_ref(float* du, float* ddelta, float* dA_log, float* dssm_B, float* dssm_C,
                                     size_t dstride, float* dD, float* dstate, const float* dy, const float* state,
                                     const float* u, const float* delta, const float* A_log, const float* ssm_B,
                                     const float* ssm_C, size_t stride, const float* D, const unsigned char* starts,
                                     int B, int T, int C, int NS) {
    size_t n_terms = (size_t)T * NS * C;
    float* all_G = (float*)malloc_check(sizeof(float) * (2 * n_terms + (size_t)C), "terms of dssm_B and dssm_C");
    float *all_h = all_G + n_terms, *x = all_h + n_terms,
          *h = (float*)malloc_check(sizeof(float) * (size_t)(T + 1) * NS, "states of a channel");
    float dA_row[SCAN_MAX_STATES], nobody[SCAN_MAX_STATES], dD_row, y;
    for (size_t i = 0; dA_log && i < (size_t)C * NS; i++) { dA_log[i] = 0.0f; }
    for (int c = 0; dD && c < C; c++) { dD[c] = 0.0f; }
    for (int b = 0; b < B; b++) {
        size_t row = (size_t)b * T;
        const float *row_B = ssm_B + row * stride, *row_C = ssm_C + row * stride;
        const unsigned char* row_starts = starts ? starts + row : NULL;
        for (int c = 0; c < C; c++) {
            size_t at = row * C + c;
            const float* A_c = A_log + (size_t)c * NS;
            for (int n = 0; n < NS; n++) { h[n] = state ? state[((size_t)b * C + c) * NS + n] : 0.0f; }
            for (int t = 0; t < T; t++) {  // one position of one channel at a time
                float* after = h + (size_t)(t + 1) * NS;
                size_t bt = at + (size_t)t * C;
                memcpy(after, after - NS, sizeof(float) * NS);
                scan_forward_ref(&y, after, u + bt, delta + bt, A_c, row_B + t * stride, row_C + t * stride, stride,
                                 D + c, row_starts ? row_starts + t : NULL, 1, 1, 1, NS);
            }
            float* lambda = dstate ? dstate + ((size_t)b * C + c) * NS : nobody;
            for (int n = 0; n < NS && !dstate; n++) { nobody[n] = 0.0f; }
            scan_backward_channel_ref(du ? du + at : NULL, ddelta ? ddelta + at : NULL, dA_row, &dD_row, lambda,
                                      all_G + c, all_h + c, dy + at, h, u + at, delta + at, A_c, row_B, row_C, stride,
                                      D[c], row_starts, T, C, NS);
            for (int n = 0; dA_log && n < NS; n++) { dA_log[(size_t)c * NS + n] += dA_row[n]; }
            if (dD) { dD[c] += dD_row; }
        }
        for (size_t tn = 0; tn < (size_t)T * NS; tn++) {
            size_t bt = row + tn / NS, to = bt * dstride + tn % NS;
            for (int c = 0; c < C && dssm_B; c++) { x[c] = delta[bt * C + c] * u[bt * C + c]; }
            if (dssm_B) { dssm_B[to] = scan_channel_sum_ref(all_G + tn * C, x, C); }
            if (dssm_C) { dssm_C[to] = scan_channel_sum_ref(dy + bt * C, all_h + tn * C, C); }
        }
    }
    for (size_t i = 0; dA_log && i < (size_t)C * NS; i++) { dA_log[i] *= -fm_exp(A_log[i]); }
    free(all_G);
    free(h);
}

// ---- fast C: a group of SCAN_GROUP channels at a time, one channel in each lane ----
// A tile is (rows, SCAN_GROUP): a row is one number of each channel of a group, say one state of each. Where C is no
// multiple of SCAN_GROUP the last group has lanes without a channel: they compute with zeros, and nobody looks.

enum { SCAN_VECTORS_ = SCAN_GROUP / VLANES };      // of a row of a tile
enum { SCAN_SUM_VECTORS_ = SCAN_LANES / VLANES };  // of the sums of a group

typedef int vbits_ __attribute__((vector_size(4 * VLANES)));

// what both passes read
typedef struct {
    const float *u, *delta, *A_log, *ssm_B, *ssm_C, *D;
    const unsigned char* starts;
    size_t stride;
    int B, T, C, NS, chunk;
} Scan_;

static inline size_t scan_tile_floats_(const Scan_* s) { return (size_t)s->NS * SCAN_GROUP; }
static inline int scan_groups_(const Scan_* s) { return (int)ceil_div(s->C, SCAN_GROUP); }
static inline int scan_chunks_(const Scan_* s) { return (int)ceil_div(s->T, s->chunk); }
// how many channels the group has that begins with channel c
static inline int scan_channels_(const Scan_* s, int c) { return c + SCAN_GROUP <= s->C ? SCAN_GROUP : s->C - c; }

static inline size_t scan_states_floats(int B, int T, int C, int NS, int chunk) {
    return (size_t)B * (size_t)ceil_div(T, chunk) * (size_t)ceil_div(C, SCAN_GROUP) * SCAN_GROUP * (size_t)NS;
}

// where `states` has the tile of a group
static inline size_t scan_slot_(const Scan_* s, int b, int chunk, int group) {
    return (((size_t)b * scan_chunks_(s) + chunk) * scan_groups_(s) + group) * scan_tile_floats_(s);
}

static inline void scan_zero_(float* x, size_t n) {
    for (size_t i = 0; i < n; i++) { x[i] = 0.0f; }
}

// ---- rows and tiles ----

// a row of a tile from x, one number of each channel
static inline void scan_load_(vfloat* row, const float* x, int channels) {
    float padded[SCAN_GROUP];
    if (channels < SCAN_GROUP) {
        for (int l = 0; l < SCAN_GROUP; l++) { padded[l] = l < channels ? x[l] : 0.0f; }
        x = padded;
    }
    for (int i = 0; i < SCAN_VECTORS_; i++) { row[i] = v_load(x + i * VLANES); }
}

// the CPU is asked for what a group has at position bt of x (B*T, C), if there is such a position. Rows lie far apart,
// so that no CPU guesses which cache lines come next
static inline void scan_prefetch_(const float* x, size_t bt, int c, const Scan_* s) {
    for (int l = 0; bt < (size_t)s->B * s->T && l < scan_channels_(s, c); l += 16) {
        __builtin_prefetch(x + bt * s->C + c + l);
    }
}

static inline void scan_store_(float* x, const vfloat* row, int channels) {
    float padded[SCAN_GROUP], *to = channels < SCAN_GROUP ? padded : x;
    for (int i = 0; i < SCAN_VECTORS_; i++) { v_store(to + i * VLANES, row[i]); }
    for (int l = 0; to == padded && l < channels; l++) { x[l] = padded[l]; }
}

// VLANES columns of a tile from rows of NS floats, one row of each channel; where there is no channel, zeros
static inline void scan_tile_columns_(float* tile, const float* rows, int channels, int NS) {
    int n = 0;
    for (; channels >= VLANES && n + VLANES <= NS; n += VLANES) {
        vfloat square[VLANES];
        v_load_columns(square, rows + n, (size_t)NS);
        for (int i = 0; i < VLANES; i++) { v_store(tile + (size_t)(n + i) * SCAN_GROUP, square[i]); }
    }
    for (; n < NS; n++) {
        for (int l = 0; l < VLANES; l++) {
            tile[(size_t)n * SCAN_GROUP + l] = l < channels ? rows[(size_t)l * NS + n] : 0.0f;
        }
    }
}

// columns of a tile go back to rows of NS floats
static inline void scan_untile_columns_(float* rows, const float* tile, int channels, int NS) {
    int n = 0;
    for (; channels >= VLANES && n + VLANES <= NS; n += VLANES) {
        vfloat square[VLANES];
        for (int i = 0; i < VLANES; i++) { square[i] = v_load(tile + (size_t)(n + i) * SCAN_GROUP); }
        v_transpose(square);
        for (int l = 0; l < VLANES; l++) { v_store(rows + (size_t)l * NS + n, square[l]); }
    }
    for (; n < NS; n++) {
        for (int l = 0; l < VLANES && l < channels; l++) {
            rows[(size_t)l * NS + n] = tile[(size_t)n * SCAN_GROUP + l];
        }
    }
}

static inline void scan_tile_(float* tile, const float* rows, int channels, int NS) {
    for (int l = 0; l < SCAN_GROUP; l += VLANES) {
        scan_tile_columns_(tile + l, rows + (size_t)l * NS, channels - l, NS);
    }
}

static inline void scan_untile_(float* rows, const float* tile, int channels, int NS) {
    for (int l = 0; l < channels; l += VLANES) {
        scan_untile_columns_(rows + (size_t)l * NS, tile + l, channels - l, NS);
    }
}

// A of a group, a tile (NS, SCAN_GROUP)
static inline void scan_rates_(float* A, int c, const Scan_* s) {
    scan_tile_(A, s->A_log + (size_t)c * s->NS, scan_channels_(s, c), s->NS);
    for (int i = 0; i < s->NS * SCAN_GROUP; i++) { A[i] = -fm_exp(A[i]); }
}

// a = exp(delta * A): nearly all of the time passes in the second loop, which compilers vectorise
static inline void scan_decays_(float* a, const float* A, const vfloat* delta, int NS) {
    for (int n = 0; n < NS; n++) {
        for (int i = 0; i < SCAN_VECTORS_; i++) {
            size_t at = (size_t)n * SCAN_GROUP + i * VLANES;
            v_store(a + at, delta[i] * v_load(A + at));
        }
    }
    for (int i = 0; i < NS * SCAN_GROUP; i++) { a[i] = fm_exp(a[i]); }
}

// ---- forward ----

// scratch of a thread: A, a and h
static inline size_t scan_forward_floats_(const Scan_* s) { return 3 * scan_tile_floats_(s); }

// one position of a group: y, and h goes on
static inline void scan_step_(float* y, float* h, float* a, const float* A, const vfloat* D, size_t bt, int c,
                              const Scan_* s) {
    const float *ssm_B = s->ssm_B + bt * s->stride, *ssm_C = s->ssm_C + bt * s->stride;
    int channels = scan_channels_(s, c);
    vfloat u[SCAN_VECTORS_], delta[SCAN_VECTORS_], x[SCAN_VECTORS_], sum[SCAN_VECTORS_];
    scan_load_(u, s->u + bt * s->C + c, channels);
    scan_load_(delta, s->delta + bt * s->C + c, channels);
    scan_prefetch_(s->u, bt + 1, c, s), scan_prefetch_(s->delta, bt + 1, c, s), scan_prefetch_(y, bt + 1, c, s);
    scan_decays_(a, A, delta, s->NS);
    for (int i = 0; i < SCAN_VECTORS_; i++) { x[i] = delta[i] * u[i], sum[i] = D[i] * u[i]; }
    for (int n = 0; n < s->NS; n++) {
        for (int i = 0; i < SCAN_VECTORS_; i++) {
            size_t at = (size_t)n * SCAN_GROUP + i * VLANES;
            vfloat h_n = v_madd(v_load(a + at), v_load(h + at), x[i] * v_fill(ssm_B[n]));
            v_store(h + at, h_n);
            sum[i] = v_madd(v_fill(ssm_C[n]), h_n, sum[i]);
        }
    }
    scan_store_(y + bt * s->C + c, sum, channels);
}

// a group of channels in row b, all positions
static inline void scan_forward_group_(float* y, float* states, float* state, float* scratch, int b, int group,
                                       const Scan_* s) {
    size_t tile = scan_tile_floats_(s);
    int c = group * SCAN_GROUP, channels = scan_channels_(s, c);
    float *A = scratch, *a = A + tile, *h = a + tile, *state_bc = state ? state + ((size_t)b * s->C + c) * s->NS : NULL;
    vfloat D[SCAN_VECTORS_];
    scan_rates_(A, c, s);
    scan_load_(D, s->D + c, channels);
    if (state) { scan_tile_(h, state_bc, channels, s->NS); } else { scan_zero_(h, tile); }
    for (int t = 0; t < s->T; t++) {
        size_t bt = (size_t)b * s->T + t;
        if (states && t % s->chunk == 0) {
            memcpy(states + scan_slot_(s, b, t / s->chunk, group), h, sizeof(float) * tile);
        }
        if (s->starts && s->starts[bt]) { scan_zero_(h, tile); }
        scan_step_(y, h, a, A, D, bt, c, s);
    }
    if (state) { scan_untile_(state_bc, h, channels, s->NS); }
}

static inline void scan_forward(float* y, float* states, float* state, const float* u, const float* delta,
                                const float* A_log, const float* ssm_B, const float* ssm_C, size_t stride,
                                const float* D, const unsigned char* starts, int B, int T, int C, int NS, int chunk,
                                const Device* dev) {
    Scan_ s = {u, delta, A_log, ssm_B, ssm_C, D, starts, stride, B, T, C, NS, chunk};
    size_t n_floats = scan_forward_floats_(&s);
    float* workspace = device_workspace(dev, sizeof(float) * n_floats * dev->n_threads);
    int groups = scan_groups_(&s);
    #pragma omp parallel for
    for (int task = 0; task < B * groups; task++) {
        scan_forward_group_(y, states, state, workspace + n_floats * thread_number(), task / groups, task % groups, &s);
    }
}

// ---- backward ----

// tiles of a thread, for the group of channels it works on
typedef struct {
    float *A, *lambda, *dA, *zeros;  // (NS, SCAN_GROUP)
    float *a, *h;                    // of a chunk: (chunk, NS, SCAN_GROUP); h has one row more, before all others
    float *sums_B, *sums_C;          // of a position: (NS, SCAN_LANES)
} ScanScratch_;

// what a call is asked for; NULL: nobody asks
typedef struct {
    float *du, *ddelta, *dA_log, *dssm_B, *dssm_C, *dD, *dstate;
    size_t dstride;
} ScanGradients_;

// what groups and rows leave to be added up
typedef struct {
    float* dssm;  // (B*T, groups, 2*NS): dssm_B, then dssm_C
    float* dA;    // (B, groups, NS, SCAN_GROUP)
    float* dD;    // (B, groups, SCAN_GROUP)
} ScanParts_;

// the next n_floats of `memory`, NULL where only their number is asked for; each array begins with a cache line
static inline float* scan_take_(float* memory, size_t* n_taken, size_t n_floats) {
    size_t at = *n_taken;
    *n_taken += (n_floats + 15) / 16 * 16;
    return memory ? memory + at : NULL;
}

// the arrays of a thread in `memory`; returns how many floats they are
static inline size_t scan_scratch_(ScanScratch_* k, float* memory, const Scan_* s) {
    size_t n = 0, tile = scan_tile_floats_(s), chunk = (size_t)(s->chunk < s->T ? s->chunk : s->T);
    k->A = scan_take_(memory, &n, tile);
    k->lambda = scan_take_(memory, &n, tile);
    k->dA = scan_take_(memory, &n, tile);
    k->zeros = scan_take_(memory, &n, tile);
    k->a = scan_take_(memory, &n, chunk * tile);
    k->h = scan_take_(memory, &n, (chunk + 1) * tile);
    k->sums_B = scan_take_(memory, &n, (size_t)s->NS * SCAN_LANES);
    k->sums_C = scan_take_(memory, &n, (size_t)s->NS * SCAN_LANES);
    return n;
}

static inline size_t scan_parts_(ScanParts_* p, float* memory, const Scan_* s) {
    size_t n = 0, B = (size_t)s->B, groups = (size_t)scan_groups_(s);
    p->dssm = scan_take_(memory, &n, B * (size_t)s->T * groups * 2 * (size_t)s->NS);
    p->dA = scan_take_(memory, &n, B * groups * scan_tile_floats_(s));
    p->dD = scan_take_(memory, &n, B * groups * SCAN_GROUP);
    return n;
}

// scratch that scan_forward and scan_backward ask device_workspace for
static inline size_t scan_workspace_bytes(int B, int T, int C, int NS, int chunk, int n_threads) {
    Scan_ s = {NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, B, T, C, NS, chunk};
    ScanScratch_ scratch;
    ScanParts_ parts;
    size_t forward = scan_forward_floats_(&s) * (size_t)n_threads;
    size_t backward = scan_parts_(&parts, NULL, &s) + scan_scratch_(&scratch, NULL, &s) * (size_t)n_threads;
    return sizeof(float) * (forward > backward ? forward : backward);
}

// the states before position t of the chunk, bt of the batch
static inline const float* scan_before_(const ScanScratch_* k, int t, size_t bt, const Scan_* s) {
    return s->starts && s->starts[bt] ? k->zeros : k->h + t * scan_tile_floats_(s);
}

// a and h of position t of a chunk, bt of the batch, once more
static inline void scan_recompute_(const ScanScratch_* k, int t, size_t bt, int c, const Scan_* s) {
    size_t tile = scan_tile_floats_(s);
    const float *ssm_B = s->ssm_B + bt * s->stride, *before = scan_before_(k, t, bt, s);
    float *a = k->a + t * tile, *after = k->h + (t + 1) * tile;
    int channels = scan_channels_(s, c);
    vfloat u[SCAN_VECTORS_], delta[SCAN_VECTORS_];
    scan_load_(u, s->u + bt * s->C + c, channels);
    scan_load_(delta, s->delta + bt * s->C + c, channels);
    scan_prefetch_(s->u, bt + 1, c, s), scan_prefetch_(s->delta, bt + 1, c, s);
    scan_decays_(a, k->A, delta, s->NS);
    for (int i = 0; i < SCAN_VECTORS_; i++) { u[i] *= delta[i]; }
    for (int n = 0; n < s->NS; n++) {
        for (int i = 0; i < SCAN_VECTORS_; i++) {
            size_t at = (size_t)n * SCAN_GROUP + i * VLANES;
            v_store(after + at, v_madd(v_load(a + at), v_load(before + at), u[i] * v_fill(ssm_B[n])));
        }
    }
}

// mask: all bits in lanes with a channel, none in others: there Inf and NaN of ssm_B or ssm_C must not enter the sums
static inline void scan_mask_(vbits_* mask, int channels) {
    for (int l = 0; l < SCAN_GROUP; l++) { mask[l / VLANES][l % VLANES] = l < channels ? -1 : 0; }
}

static inline vfloat scan_masked_(vfloat x, vbits_ mask) { return (vfloat)((vbits_)x & mask); }

// S and aw are the sums of the contract. The sums over channels begin a lane's chain in the first vectors that hold it
static inline void scan_adjoint_states_(vfloat* S, vfloat* aw, const ScanGradients_* g, const ScanScratch_* k,
                                        const float* a, const float* h, const float* before, const vfloat* x,
                                        const vfloat* delta, const vfloat* dy, const vbits_* mask, const float* ssm_B,
                                        const float* ssm_C, int NS) {
    // stores could change k, for all a compiler knows
    float *lambda = k->lambda, *dA = k->dA, *to_B = k->sums_B, *to_C = k->sums_C;
    const float* A = k->A;
    const int with_A = g->dA_log != NULL, with_B = g->dssm_B != NULL, with_C = g->dssm_C != NULL;
    for (int n = 0; n < NS; n++, to_B += SCAN_LANES, to_C += SCAN_LANES) {
        vfloat sums_B[SCAN_SUM_VECTORS_], sums_C[SCAN_SUM_VECTORS_];
        for (int i = 0; i < SCAN_SUM_VECTORS_; i++) { sums_B[i] = sums_C[i] = v_fill(0.0f); }
        for (int i = 0; i < SCAN_VECTORS_; i++) {
            size_t at = (size_t)n * SCAN_GROUP + i * VLANES;
            vfloat G = v_madd(dy[i], v_fill(ssm_C[n]), v_load(lambda + at));
            vfloat ag = v_load(a + at) * G, W = ag * v_load(before + at);
            v_store(lambda + at, ag);
            if (with_A) { v_store(dA + at, v_madd(delta[i], W, v_load(dA + at))); }
            S[i] = v_madd(G, v_fill(ssm_B[n]), S[i]);
            aw[i] = v_madd(v_load(A + at), W, aw[i]);
            vfloat *to_B_i = &sums_B[i % SCAN_SUM_VECTORS_], *to_C_i = &sums_C[i % SCAN_SUM_VECTORS_];
            if (with_B) { *to_B_i = v_madd(scan_masked_(G, mask[i]), x[i], *to_B_i); }
            if (with_C) { *to_C_i = v_madd(dy[i], scan_masked_(v_load(h + at), mask[i]), *to_C_i); }
        }
        for (int i = 0; i < SCAN_SUM_VECTORS_; i++) {
            v_store(to_B + i * VLANES, sums_B[i]);
            v_store(to_C + i * VLANES, sums_C[i]);
        }
    }
}

// one position backward: position t of the chunk, bt of the batch. Leaves the sums over channels in k
static inline void scan_adjoint_(const ScanGradients_* g, vfloat* dD, const ScanScratch_* k, const float* dy,
                                 const vfloat* D, const vbits_* mask, int t, size_t bt, int c, const Scan_* s) {
    size_t tile = scan_tile_floats_(s), at = bt * s->C + c;
    int channels = scan_channels_(s, c);
    vfloat u[SCAN_VECTORS_], delta[SCAN_VECTORS_], d[SCAN_VECTORS_], x[SCAN_VECTORS_], S[SCAN_VECTORS_],
        aw[SCAN_VECTORS_];
    scan_load_(u, s->u + at, channels), scan_load_(delta, s->delta + at, channels), scan_load_(d, dy + at, channels);
    for (int i = 0; i < SCAN_VECTORS_; i++) { x[i] = delta[i] * u[i], S[i] = aw[i] = v_fill(0.0f); }
    scan_prefetch_(dy, bt - 1, c, s);
    if (g->du) { scan_prefetch_(g->du, bt - 1, c, s); }
    if (g->ddelta) { scan_prefetch_(g->ddelta, bt - 1, c, s); }
    scan_adjoint_states_(S, aw, g, k, k->a + t * tile, k->h + (t + 1) * tile, scan_before_(k, t, bt, s), x, delta, d,
                         mask, s->ssm_B + bt * s->stride, s->ssm_C + bt * s->stride, s->NS);
    if (s->starts && s->starts[bt]) { scan_zero_(k->lambda, tile); }
    for (int i = 0; i < SCAN_VECTORS_; i++) {
        dD[i] = v_madd(d[i], u[i], dD[i]);
        x[i] = D[i] * d[i] + delta[i] * S[i];
        aw[i] = u[i] * S[i] + aw[i];
    }
    if (g->du) { scan_store_(g->du + at, x, channels); }
    if (g->ddelta) { scan_store_(g->ddelta + at, aw, channels); }
}

// the first steps of the tree: SCAN_LANES sums become VLANES
static inline vfloat scan_fold_(const float* sums) {
    vfloat part[SCAN_SUM_VECTORS_];
    for (int i = 0; i < SCAN_SUM_VECTORS_; i++) { part[i] = v_load(sums + i * VLANES); }
    for (int half = SCAN_SUM_VECTORS_ / 2; half >= 1; half /= 2) {
        for (int i = 0; i < half; i++) { part[i] += part[i + half]; }
    }
    return part[0];
}

// out[n] = the tree over sums (NS, SCAN_LANES), VLANES trees side by side
static inline void scan_trees_(float* out, const float* sums, int NS) {
    for (int first = 0; first < NS; first += VLANES) {
        int n_trees = first + VLANES <= NS ? VLANES : NS - first;
        vfloat rows[VLANES];
        for (int i = 0; i < VLANES; i++) {
            rows[i] = scan_fold_(sums + (size_t)(first + (i < n_trees ? i : 0)) * SCAN_LANES);
        }
        v_transpose(rows);
        for (int half = VLANES / 2; half >= 1; half /= 2) {
            for (int i = 0; i < half; i++) { rows[i] += rows[i + half]; }
        }
        for (int i = 0; i < n_trees; i++) { out[first + i] = rows[0][i]; }
    }
}

// a group of channels in row b, all positions
static inline void scan_backward_group_(const ScanGradients_* g, const ScanParts_* parts, const ScanScratch_* k,
                                        const float* dy, const float* states, int b, int group, const Scan_* s) {
    size_t tile = scan_tile_floats_(s), row = (size_t)b * s->T, task = (size_t)b * scan_groups_(s) + group;
    int c = group * SCAN_GROUP, NS = s->NS;
    vfloat D[SCAN_VECTORS_], dD[SCAN_VECTORS_];
    vbits_ mask[SCAN_VECTORS_];
    scan_rates_(k->A, c, s);
    scan_load_(D, s->D + c, scan_channels_(s, c));
    scan_mask_(mask, scan_channels_(s, c));
    scan_zero_(k->lambda, tile), scan_zero_(k->dA, tile), scan_zero_(k->zeros, tile);
    float* dstate = g->dstate ? g->dstate + ((size_t)b * s->C + c) * NS : NULL;
    if (dstate) { scan_tile_(k->lambda, dstate, scan_channels_(s, c), NS); }
    for (int i = 0; i < SCAN_VECTORS_; i++) { dD[i] = v_fill(0.0f); }
    for (int chunk = scan_chunks_(s) - 1; chunk >= 0; chunk--) {
        int t0 = chunk * s->chunk, n_positions = t0 + s->chunk < s->T ? s->chunk : s->T - t0;
        memcpy(k->h, states + scan_slot_(s, b, chunk, group), sizeof(float) * tile);
        for (int t = 0; t < n_positions; t++) { scan_recompute_(k, t, row + t0 + t, c, s); }
        for (int t = n_positions - 1; t >= 0; t--) {
            size_t bt = row + t0 + t;
            float* sums = parts->dssm + (bt * scan_groups_(s) + group) * 2 * NS;
            scan_adjoint_(g, dD, k, dy, D, mask, t, bt, c, s);
            if (g->dssm_B) { scan_trees_(sums, k->sums_B, NS); }
            if (g->dssm_C) { scan_trees_(sums + NS, k->sums_C, NS); }
        }
    }
    if (dstate) { scan_untile_(dstate, k->lambda, scan_channels_(s, c), NS); }
    memcpy(parts->dA + task * tile, k->dA, sizeof(float) * tile);
    scan_store_(parts->dD + task * SCAN_GROUP, dD, SCAN_GROUP);
}

// sum (n) = chain from 0 over n_parts arrays, `step` floats apart
static inline void scan_chain_(float* sum, const float* parts, size_t step, int n_parts, size_t n) {
    scan_zero_(sum, n);
    for (int p = 0; p < n_parts; p++, parts += step) {
        for (size_t i = 0; i < n; i++) { sum[i] += parts[i]; }
    }
}

// dA_log and dD of a group, over rows
static inline void scan_total_group_(const ScanGradients_* g, const ScanParts_* parts, const ScanScratch_* k, int group,
                                     const Scan_* s) {
    size_t tile = scan_tile_floats_(s), groups = (size_t)scan_groups_(s);
    int c = group * SCAN_GROUP, channels = scan_channels_(s, c);
    if (g->dA_log) {
        scan_rates_(k->A, c, s);
        scan_chain_(k->dA, parts->dA + group * tile, groups * tile, s->B, tile);
        for (size_t i = 0; i < tile; i++) { k->dA[i] *= k->A[i]; }
        scan_untile_(g->dA_log + (size_t)c * s->NS, k->dA, channels, s->NS);
    }
    if (g->dD) {
        scan_chain_(g->dD + c, parts->dD + (size_t)group * SCAN_GROUP, groups * SCAN_GROUP, s->B, (size_t)channels);
    }
}

static inline void scan_backward(float* du, float* ddelta, float* dA_log, float* dssm_B, float* dssm_C, size_t dstride,
                                 float* dD, float* dstate, const float* dy, const float* states, const float* u,
                                 const float* delta, const float* A_log, const float* ssm_B, const float* ssm_C,
                                 size_t stride, const float* D, const unsigned char* starts, int B, int T, int C,
                                 int NS, int chunk, const Device* dev) {
    if (!du && !ddelta && !dA_log && !dssm_B && !dssm_C && !dD && !dstate) { return; }
    Scan_ s = {u, delta, A_log, ssm_B, ssm_C, D, starts, stride, B, T, C, NS, chunk};
    ScanGradients_ g = {du, ddelta, dA_log, dssm_B, dssm_C, dD, dstate, dstride};
    ScanParts_ parts;
    ScanScratch_ sizes;
    float* workspace = device_workspace(dev, scan_workspace_bytes(B, T, C, NS, chunk, dev->n_threads));
    float* scratch = workspace + scan_parts_(&parts, workspace, &s);
    size_t n_floats = scan_scratch_(&sizes, NULL, &s);
    int groups = scan_groups_(&s);
    #pragma omp parallel for
    for (int task = 0; task < B * groups; task++) {
        ScanScratch_ mine;
        scan_scratch_(&mine, scratch + n_floats * thread_number(), &s);
        scan_backward_group_(&g, &parts, &mine, dy, states, task / groups, task % groups, &s);
    }
    #pragma omp parallel for
    for (int group = 0; group < groups; group++) {
        ScanScratch_ mine;
        scan_scratch_(&mine, scratch + n_floats * thread_number(), &s);
        scan_total_group_(&g, &parts, &mine, group, &s);
    }
    #pragma omp parallel for
    for (int64_t bt = 0; bt < (int64_t)B * T; bt++) {
        const float* of_groups = parts.dssm + (size_t)bt * groups * 2 * NS;
        if (dssm_B) { scan_chain_(dssm_B + bt * dstride, of_groups, 2 * (size_t)NS, groups, (size_t)NS); }
        if (dssm_C) { scan_chain_(dssm_C + bt * dstride, of_groups + NS, 2 * (size_t)NS, groups, (size_t)NS); }
    }
}
#endif  // LLMC_SELECTIVE_SCAN_H
