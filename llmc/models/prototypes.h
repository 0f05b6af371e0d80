/*
Where the prototypes of hpn.h stand: V unit rows of C channels, as far apart as they can be, chosen before training.
    prototypes_init(p, placement, V, C, seed, dev)     placement is the value of --proto-init:
        simplex     V <= C + 1: every pair at cosine -1/(V-1), which no placement can be below
        orthoplex   V <= 2C: the axes +e_0, +e_1, ..., then -e_0, ...: no cosine above 0, which is the best where
                    V > C + 1; V <= C: orthonormal
        random      normal numbers, rows scaled to length 1: for V far above C
        optimize    from there, each step moves rows and their nearest neighbours apart; where C is 2, equal angles
        FILE        safetensors with one F32 tensor (V, C); its rows are scaled to length 1
    prototypes_separation(dp, p, beta, V, C, dev)      for learned prototypes, which would drift together:
        loss = beta * mean over i of max over j != i of p_i . p_j, returned;  nearest(i) = that j, the lowest of equals
        dp_i += beta/V * p_nearest(i),  dp_nearest(i) += beta/V * p_i      (V, C)  added; NULL: only the loss is wanted
        p are unit rows; unit_backward takes dp on to what they were made from
    prototypes_check_name, prototypes_check_fit        is there such a placement, and has it room?
    prototypes_check(p, V, C, from)                    no two rows may coincide: their tokens would have one direction
Cost:   separation V*V*C multiply-adds and 256*V floats of memory. optimize: 1000 steps of min(V, 1024)*V*C
        multiply-adds; on two cores 0.3 s for 256 x 64 and 50 s for 8000 x 128. The others are linear in V*C.
Error:  optimize ends within 0.0005 of the best known largest cosine at V = 6 and 10, C = 5, and V = 12 and 24, C = 3.
Order:  cosines chain over c from 0, nearest neighbours are the lowest of equals, gradients add rows i ascending, the
        loss is a chain over i in double: no thread count changes a bit. Random numbers are functions of seed, row and
        step.
Errors: fail_input where V does not fit C, a file is not of that shape, or rows coincide.
Source: Mettes, van der Pol & Snoek 2019, arXiv:1901.10514 (the loss); Kasarla et al. 2022, arXiv:2206.08704 (the
        simplex); doc/hpn.md
*/
#ifndef LLMC_PROTOTYPES_H
#define LLMC_PROTOTYPES_H
#include "../core/choice.h"        // choice_find
#include "../ops/hpn.h"            // unit_forward, hpn_dot_ref
#include "../ops/matmul.h"         // matmul_forward
#include "../ops/residual.h"       // residual_forward
#include "../core/rng.h"           // normal_fill, noise_u32, splitmix64
#include "../files/safetensors.h"  // safetensors_open, safetensors_to_f32

// what --proto-init can name; anything else is a file
#define PROTO_INIT_NAMES "simplex|orthoplex|random|optimize"
typedef enum {
    PROTO_INIT_FILE = -1, PROTO_INIT_SIMPLEX, PROTO_INIT_ORTHOPLEX, PROTO_INIT_RANDOM, PROTO_INIT_OPTIMIZE
} ProtoInit;

// ---- closed forms ----

// Row v is the recursion of Kasarla et al. multiplied out: with s_c^2 = V (V-c-1) / ((V-1) (V-c)),
// p[v] = (-s_0/(V-1), -s_1/(V-2), ..., then s_v at column v, then zeros)
static inline void prototypes_simplex(float* p, int V, int C) {
    memset(p, 0, sizeof(float) * (size_t)V * (size_t)C);
    if (V == 1) { p[0] = 1.0f; }
    for (int c = 0; c < V - 1; c++) {
        double s = sqrt((double)V * (V - c - 1) / ((double)(V - 1) * (V - c)));
        p[(size_t)c * C + c] = (float)s;
        for (int v = c + 1; v < V; v++) { p[(size_t)v * C + c] = (float)(-s / (V - 1 - c)); }
    }
}

static inline void prototypes_orthoplex(float* p, int V, int C) {
    memset(p, 0, sizeof(float) * (size_t)V * (size_t)C);
    for (int v = 0; v < V; v++) { p[(size_t)v * C + v % C] = v < C ? 1.0f : -1.0f; }
}

// two channels: equal angles
static inline void prototypes_circle(float* p, int V) {
    const double pi = 3.14159265358979323846;
    for (int v = 0; v < V; v++) {
        float angle = (float)(2.0 * pi * v / V);
        p[2 * v] = fm_cos(angle);
        p[2 * v + 1] = fm_sin(angle);
    }
}

// ---- separation: the plain loop ----

// Index of the largest of row i's V cosines, other than its own, the lowest of equals. NaN is passed over; where there
// is nothing else, any other row, so that the NaN comes out in the loss.
static inline int prototypes_nearest_ref(const float* cosines, int i, int V) {
    int best = i == 0;
    float most = -INFINITY;
    for (int j = 0; j < V; j++) {
        if (j != i && cosines[j] > most) { most = cosines[j], best = j; }
    }
    return best;
}

static inline double prototypes_separation_ref(float* dprototypes, const float* prototypes, float beta, int V, int C) {
    double sum = 0.0;
    float share = beta / (float)V;
    float* cosines = (float*)malloc_check(sizeof(float) * (size_t)V, "cosines of a prototype");
    for (int i = 0; V > 1 && i < V; i++) {
        for (int j = 0; j < V; j++) {
            cosines[j] = hpn_dot_ref(prototypes + (size_t)i * C, prototypes + (size_t)j * C, C);
        }
        size_t near = (size_t)prototypes_nearest_ref(cosines, i, V), row_i = (size_t)i * C, row_j = near * C;
        for (int c = 0; dprototypes && c < C; c++) {
            dprototypes[row_i + c] = madd(share, prototypes[row_j + c], dprototypes[row_i + c]);
            dprototypes[row_j + c] = madd(share, prototypes[row_i + c], dprototypes[row_j + c]);
        }
        sum += (double)cosines[near];
    }
    free(cosines);
    return (double)beta * sum / V;
}

// ---- rows that coincide ----

typedef struct { double along; int row; } PrototypesRow_;

static inline int prototypes_order_(const void* a, const void* b) {
    const PrototypesRow_ *x = (const PrototypesRow_*)a, *y = (const PrototypesRow_*)b;
    return x->along != y->along ? (x->along < y->along ? -1 : 1) : x->row - y->row;
}

static inline double prototypes_distance2_(const float* a, const float* b, int C) {
    double sum = 0.0;
    for (int c = 0; c < C; c++) { sum += ((double)a[c] - (double)b[c]) * ((double)a[c] - (double)b[c]); }
    return sum;
}

#define PROTOTYPES_APART 1e-5  // nearer than this, unit rows of floats are one

// A pair nearer than PROTOTYPES_APART, or 0. Rows that coincide have the same projection on any line, so only
// neighbours on one line, along a fixed random vector, are compared: no V*V products.
static inline int prototypes_coincide(int* a, int* b, const float* p, int V, int C) {
    PrototypesRow_* rows = (PrototypesRow_*)malloc_check(sizeof(PrototypesRow_) * (size_t)V,
                                                         "projections of prototypes");
    double length2 = 0.0, window;
    int found = 0;
    for (int v = 0; v < V; v++) { rows[v].row = v, rows[v].along = 0.0; }
    for (int c = 0; c < C; c++) {
        double direction = (double)splitmix64(0, (uint64_t)c) * 0x1p-63 - 1.0;
        length2 += direction * direction;
        for (int v = 0; v < V; v++) { rows[v].along += direction * (double)p[(size_t)v * C + c]; }
    }
    window = sqrt(length2) * PROTOTYPES_APART;
    qsort(rows, (size_t)V, sizeof *rows, prototypes_order_);
    for (int i = 0; i < V && !found; i++) {
        for (int j = i + 1; j < V && rows[j].along - rows[i].along <= window && !found; j++) {
            const float *a_row = p + (size_t)rows[i].row * C, *b_row = p + (size_t)rows[j].row * C;
            found = prototypes_distance2_(a_row, b_row, C) < PROTOTYPES_APART * PROTOTYPES_APART;
            *a = rows[i].row < rows[j].row ? rows[i].row : rows[j].row;
            *b = rows[i].row < rows[j].row ? rows[j].row : rows[i].row;
        }
    }
    free(rows);
    return found;
}

// `from` is what a message names: "--proto-init random" or a file
static inline void prototypes_check(const float* p, int V, int C, const char* from) {
    int a = -1, b = -1;
    if (prototypes_coincide(&a, &b, p, V, C)) {
        fail_input("%s: expected %d different directions, found prototypes %d and %d to be the same: their tokens "
                   "could not be told apart; more channels (--proto-dim, here %d) give more room", from, V, a, b, C);
    }
}

// ---- what --proto-init may say ----

static inline void prototypes_check_name(const char* placement) {
    if (choice_find(PROTO_INIT_NAMES, placement) == PROTO_INIT_FILE && access(placement, F_OK) != 0) {
        fail_input("--proto-init: expected simplex, orthoplex, optimize, random or a safetensors file, found \"%s\"",
                   placement);
    }
}

// a file of one tensor, F32 (V, C), which is returned; the caller closes it
static inline const SafeTensor* prototypes_file_open_(SafeFile* f, const char* path, int V, int C) {
    safetensors_open(f, path);
    if (f->n_tensors != 1) {
        fail_input("%s: expected one tensor, F32 of shape (%d, %d), found %d tensors", path, V, C, f->n_tensors);
    }
    const SafeTensor* t = f->tensors;
    if (t->dtype != DTYPE_F32 || t->n_dims != 2) {
        fail_input("%s: tensor \"%.80s\": expected F32 of shape (%d, %d), found %s of %d dimensions", path, t->name, V,
                   C, dtype_name(t->dtype), t->n_dims);
    }
    if (t->shape[0] != V || t->shape[1] != C) {
        fail_input("%s: tensor \"%.80s\": expected shape (%d, %d), tokens by --proto-dim, found (%lld, %lld)", path,
                   t->name, V, C, (long long)t->shape[0], (long long)t->shape[1]);
    }
    return t;
}

// V prototypes of C channels, a placement that needs so many channels
static inline void prototypes_check_room_(const char* placement, int V, int C, int channels) {
    if (C < channels) {
        fail_input("--proto-init %s: %d prototypes need at least %d channels, found %d: raise --proto-dim, or take "
                   "optimize or random", placement, V, channels, C);
    }
}

static inline void prototypes_check_fit(const char* placement, int V, int C) {
    SafeFile f;
    prototypes_check_name(placement);
    switch (choice_find(PROTO_INIT_NAMES, placement)) {
        case PROTO_INIT_SIMPLEX: prototypes_check_room_("simplex", V, C, V - 1); break;
        case PROTO_INIT_ORTHOPLEX: prototypes_check_room_("orthoplex", V, C, (V + 1) / 2); break;
        case PROTO_INIT_FILE:
            prototypes_file_open_(&f, placement, V, C);
            safetensors_close(&f);
            break;
        default: break;  // random and optimize fit everywhere
    }
}

#ifndef __CUDACC__  // ---- fast C: neighbours by matrix products, gradients by channels ----

enum { PROTOTYPES_ROWS = 256 };  // rows whose cosines are in memory at a time

// prototypes_nearest_ref in two passes that vectorise: the largest, then where it is. It overwrites cosines[i].
static inline int prototypes_nearest_(float* cosines, int i, int V) {
    float lane[16], most = -INFINITY;
    int j = 0;
    cosines[i] = -INFINITY;
    for (int k = 0; k < 16; k++) { lane[k] = -INFINITY; }
    for (; j + 16 <= V; j += 16) {
        #pragma omp simd
        for (int k = 0; k < 16; k++) { lane[k] = cosines[j + k] > lane[k] ? cosines[j + k] : lane[k]; }
    }
    for (int k = 0; k < 16; k++) { most = lane[k] > most ? lane[k] : most; }
    for (; j < V; j++) { most = cosines[j] > most ? cosines[j] : most; }
    for (j = 0; j < V && most > -INFINITY; j++) {
        if (cosines[j] == most) { return j; }
    }
    return i == 0;
}

// the nearest other row, and its cosine, of each of the n rows first, first + 1, ...; after V - 1 comes 0
static inline void prototypes_nearest_rows_(int* nearest, float* nearest_cosines, const float* p, int first, int n,
                                            int V, int C, const Device* dev) {
    float* cosines = (float*)malloc_check(sizeof(float) * PROTOTYPES_ROWS * (size_t)V, "cosines of prototypes");
    for (int done = 0, n_rows; done < n; done += n_rows) {
        int start = (int)(((int64_t)first + done) % V), left = n - done < V - start ? n - done : V - start;
        n_rows = left < PROTOTYPES_ROWS ? left : PROTOTYPES_ROWS;
        matmul_forward(cosines, p + (size_t)start * C, p, NULL, n_rows, C, V, dev);
        #pragma omp parallel for
        for (int r = 0; r < n_rows; r++) {
            float* row = cosines + (size_t)r * V;
            nearest[done + r] = prototypes_nearest_(row, start + r, V);
            nearest_cosines[done + r] = row[nearest[done + r]];
        }
    }
    free(cosines);
}

// dp += weights[s] * the gradient of the cosine of row first + s and its neighbour, s < n;
// threads split channels, rows ascend
static inline void prototypes_nearest_backward_(float* dp, const float* p, const int* nearest, const float* weights,
                                                int first, int n, int V, int C) {
    const int width = 16;
    #pragma omp parallel for
    for (int c0 = 0; c0 < C; c0 += width) {
        int c1 = c0 + width < C ? c0 + width : C;
        for (int s = 0; s < n; s++) {
            size_t i = (size_t)(((int64_t)first + s) % V) * C, j = (size_t)nearest[s] * C;
            #pragma omp simd
            for (int c = c0; c < c1; c++) {  // i and j are different rows
                dp[i + c] = madd(weights[s], p[j + c], dp[i + c]);
                dp[j + c] = madd(weights[s], p[i + c], dp[j + c]);
            }
        }
    }
}

static inline double prototypes_separation(float* dprototypes, const float* prototypes, float beta, int V, int C,
                                           const Device* dev) {
    double sum = 0.0;
    if (V < 2) { return 0.0; }
    int* nearest = (int*)malloc_check(sizeof(int) * (size_t)V, "nearest prototypes");
    float* cosines = (float*)malloc_check(sizeof(float) * (size_t)V, "nearest prototypes");
    float* weights = (float*)malloc_check(sizeof(float) * (size_t)V, "nearest prototypes");
    prototypes_nearest_rows_(nearest, cosines, prototypes, 0, V, V, C, dev);
    for (int i = 0; i < V; i++) {
        sum += (double)cosines[i];
        weights[i] = beta / (float)V;
    }
    if (dprototypes) { prototypes_nearest_backward_(dprototypes, prototypes, nearest, weights, 0, V, V, C); }
    free(nearest);
    free(cosines);
    free(weights);
    return (double)beta * sum / V;
}

// ---- random, and made better by gradient steps ----

static inline void prototypes_unit_(float* p, int V, int C, const Device* dev) {
    float* norms = (float*)malloc_check(sizeof(float) * (size_t)V, "norms of prototypes");
    unit_forward(p, norms, p, V, C, dev);
    free(norms);
}

static inline void prototypes_random(float* p, int V, int C, uint32_t seed, const Device* dev) {
    Mt19937 mt;
    mt19937_init(&mt, seed);
    normal_fill(&mt, p, (size_t)V * (size_t)C, 0.0f, 1.0f);
    prototypes_unit_(p, V, C, dev);
}

enum { PROTOTYPES_STEPS = 1000, PROTOTYPES_STEP_ROWS = 1024 };  // a step looks at so many rows, in turn

// Rows at one place would stay, for neither has a direction to go. A row much nearer to its neighbour than rows are on
// average, by gap = 1 - cosine, jumps, a little and anywhere; of two that are each other's neighbours, the later one.
static inline void prototypes_jump_(float* p, const int* nearest, const float* cosines, int first, int n, int V, int C,
                                  uint32_t seed, int step) {
    double gaps = 0.0;
    for (int s = 0; s < n; s++) { gaps += 1.0 - (double)cosines[s]; }
    for (int s = 0; s < n; s++) {
        int v = (int)(((int64_t)first + s) % V);
        if (1.0 - (double)cosines[s] > 0.01 * gaps / n || v < nearest[s]) { continue; }
        uint32_t key = noise_key_of(seed, (uint64_t)step, (uint64_t)v);
        for (int c = 0; c < C; c++) {
            p[(size_t)v * C + c] += 0.1f * ((float)noise_u32(key, (uint64_t)c) * 0x1p-31f - 1.0f);
        }
    }
}

// Each step moves every row and its nearest neighbour apart, by a rate that falls from 0.1 to 0.0001. The cosine's
// gradient alone would fade as two rows meet, and others would push them together; divided by their distance,
// sqrt(2 - 2 cosine), it is that of the distance, and of the same strength everywhere. Making rows unit again takes
// off what a step added along them.
static inline void prototypes_improve(float* p, int V, int C, int n_steps, uint32_t seed, const Device* dev) {
    int S = V < PROTOTYPES_STEP_ROWS ? V : PROTOTYPES_STEP_ROWS;
    int* nearest = (int*)malloc_check(sizeof(int) * (size_t)S, "nearest prototypes");
    float* cosines = (float*)malloc_check(sizeof(float) * (size_t)S, "nearest prototypes");
    float* weights = (float*)malloc_check(sizeof(float) * (size_t)S, "nearest prototypes");
    float* moves = (float*)malloc_check(sizeof(float) * (size_t)V * (size_t)C, "moves of prototypes");
    for (int step = 0; V > 1 && step < n_steps; step++) {
        int first = (int)((int64_t)step * S % V);
        float rate = 0.1f * fm_exp(-6.9077554f * (float)step / (float)n_steps);  // log(1000)
        prototypes_nearest_rows_(nearest, cosines, p, first, S, V, C, dev);
        memset(moves, 0, sizeof(float) * (size_t)V * (size_t)C);
        prototypes_jump_(p, nearest, cosines, first, S, V, C, seed, step);
        for (int s = 0; s < S; s++) {
            weights[s] = -rate / sqrtf(2.0f - 2.0f * (cosines[s] < 0.9999f ? cosines[s] : 0.9999f));
        }
        prototypes_nearest_backward_(moves, p, nearest, weights, first, S, V, C);
        residual_forward(p, p, moves, (size_t)V * (size_t)C, dev);
        prototypes_unit_(p, V, C, dev);
    }
    free(nearest);
    free(cosines);
    free(weights);
    free(moves);
}

static inline void prototypes_optimize(float* p, int V, int C, uint32_t seed, const Device* dev) {
    if (C == 2) {
        prototypes_circle(p, V);
        return;
    }
    prototypes_random(p, V, C, seed, dev);
    prototypes_improve(p, V, C, PROTOTYPES_STEPS, seed, dev);
}

// ---- by name ----

static inline void prototypes_from_file_(float* p, const char* path, int V, int C, const Device* dev) {
    SafeFile f;
    safetensors_to_f32(p, prototypes_file_open_(&f, path, V, C), 0, (size_t)V * (size_t)C);
    safetensors_close(&f);
    prototypes_unit_(p, V, C, dev);
    for (int v = 0; v < V; v++) {
        float length = sqrtf(hpn_dot_ref(p + (size_t)v * C, p + (size_t)v * C, C));
        if (!(length > 0.5f && length < 2.0f)) {  // 0, NaN, or squares that leave the range of floats
            fail_input("%s: row %d has no direction: its length is 0, not finite, or too far from 1", path, v);
        }
    }
}

static inline void prototypes_init(float* p, const char* placement, int V, int C, uint32_t seed, const Device* dev) {
    char from[4200];
    snprintf(from, sizeof from, "--proto-init %s", placement);
    prototypes_check_fit(placement, V, C);
    switch (choice_find(PROTO_INIT_NAMES, placement)) {
        case PROTO_INIT_SIMPLEX: prototypes_simplex(p, V, C); break;
        case PROTO_INIT_ORTHOPLEX: prototypes_orthoplex(p, V, C); break;
        case PROTO_INIT_RANDOM: prototypes_random(p, V, C, seed, dev); break;
        case PROTO_INIT_OPTIMIZE: prototypes_optimize(p, V, C, seed, dev); break;
        default: prototypes_from_file_(p, placement, V, C, dev); break;
    }
    prototypes_check(p, V, C, from);
}
#endif
#endif  // LLMC_PROTOTYPES_H
