/*
Attention of GLM-5 (MLA, with the choice of an indexer): what a head sees of a token is made of one short vector, by
which its key, but for the channels that turn, and its value are products that lie side by side; the channels that turn
are the same for all heads. A position sees the tokens on its list, or all up to itself.
    q (N, H*(dn + dr))                  of a head dn channels that do not turn, then dr that do
    kv (rows of keys, H*(dn + dv))      of a head dn channels of its key, then its value
    k_rope (rows of keys, dr)           the last channels of the key of every head
    out (N, H*dv)   max, inv (N, H) float, kept
    chosen (N, topk)   rows of keys, ascending, -1 behind the last; a list is read up to its first -1. NULL: position n
                       sees rows first_key[n] .. first_key[n] + t[n] of its document (Places of entry_windows.h)
    score = (q . key) * scale    max = the largest of -10000 and the scores    e = exp(score - max)
    inv = 1 / (sum over keys of e)    att = e * inv    out = sum over keys of att * value
With all keys on every list it is attention.h's to the last bit.
Backward, in training alone, where n_keys rows have keys: without lists as many as positions, of which row n is that of
position n. Everything is written:
    datt = dout . value    D = sum over keys of att * datt    ds = att * (datt - D) * scale
    (tensor cores in bf16 take dout . out for D: out is given, and nothing else reads it)
    dq   = sum over keys of ds * key                                          (N, H*(dn + dr))
    dkv  = of each head the sums over positions of ds * q, and of att * dout  (n_keys, H*(dn + dv))
    dk_rope  = sum over heads of what the sum over positions of ds * q has of it   (n_keys, dr)
latent_attention_mass: the sum over heads of att of each key on a list, 0 behind the last: what teaches an indexer.
goes_on: from what mass holds, where several layers teach one, or several ranks have the heads (--tp).
latent_backward_begin, latent_backward_k_rope, latent_backward_end: latent_attention_backward in three calls, between
which dk_rope may go on from other ranks' heads: it is LatentBackward.k_rope, floats (n_keys, dr), rows first ..
end - 1 at a time.
latent_most_channels: dn + dr + dv that backward has room for on this device; a CPU has for all.
Cost:   2*(dn + dr + dv) flops for each head, position and key it sees, backward 2.5 times that, with the scores made
        again.
        In C TILE_N neighbours are computed together, and a key that any of them sees costs as one of all: what they
        have chosen should overlap. An Inf or NaN sends its strip through the plain loop. Memory beside the tensors:
        twice (N, 4 (dn + dr + dv)) floats for each thread, dr for each head and position, 12 bytes for each key of
        each strip.
        C, one thread, AVX-512, gcc 12, AMD EPYC (Zen 5), its own time, the smallest of 5 on a busy machine, ms forward
        and backward; attention.h of N 512, H 8, HS 64 took 2.6 and 6.3 beside it:
            N 512, H 8, dn 48, dr 16, dv 64     all keys 2.3, 7.2    256 at random 2.4, 7.4
            N 2048, the same                    all keys 31, 101     256 at random 33, 102
            N 512, H 8, dn 192, dr 64, dv 256   all keys 7.5, 28
        CUDA: latent_attention_kernels.h, and flash_latent.h for bf16; not measured on a GPU.
Order:  sums over channels, keys, positions and heads chain ascending from 0, products by madd; the score is its
        finished chain times the scale.
Source: DeepSeek-AI 2024, arXiv:2405.04434 (MLA); 2025, arXiv:2512.02556 (the choice)
*/
#ifndef LLMC_LATENT_ATTENTION_H
#define LLMC_LATENT_ATTENTION_H
#include "../core/device.h"  // Device, device_workspace, ceil_div, thread_number
#include "../core/fmath.h"   // fm_exp
#include "../core/madd.h"    // madd
#include "latent_shape.h"    // LatentShape, Places, latent_keys, latent_key
#include "latent_attention_kernels.h"  // CUDA: the op's functions
#include "latent_strips.h"   // the fast C: strips of positions

// ---- plain C: read this first; it defines every bit ----

// kv: of the head
static inline float latent_score_ref(const float* q, const float* kv, const float* k_rope, const LatentShape* s) {
    float dot = 0.0f;
    for (int c = 0; c < s->dn; c++) { dot = madd(q[c], kv[c], dot); }
    for (int c = 0; c < s->dr; c++) { dot = madd(q[s->dn + c], k_rope[c], dot); }
    return dot * s->scale;
}

// head h of position n
static inline void latent_forward_row_ref_(float* out, float* max, float* inv, size_t n, size_t h, const float* q,
                                           const float* kv, const float* k_rope, const int* chosen,
                                           const LatentShape* s, const Places* places) {
    const size_t KV = latent_kv_(s), H = (size_t)s->H, i = n * H + h;
    const int n_keys = latent_keys(s, places, chosen, n);
    float top = -10000.0f, total = 0.0f;
    q += i * latent_q_(s), out += i * s->dv;
    for (int k = 0; k < n_keys; k++) {
        const size_t row = latent_key(s, places, chosen, n, k);
        const float score = latent_score_ref(q, kv + (row * H + h) * KV, k_rope + row * s->dr, s);
        top = score > top ? score : top;
    }
    for (int k = 0; k < n_keys; k++) {
        const size_t row = latent_key(s, places, chosen, n, k);
        total += fm_exp(latent_score_ref(q, kv + (row * H + h) * KV, k_rope + row * s->dr, s) - top);
    }
    max[i] = top, inv[i] = total == 0.0f ? 0.0f : 1.0f / total;
    for (int c = 0; c < s->dv; c++) { out[c] = 0.0f; }
    for (int k = 0; k < n_keys; k++) {
        const size_t row = latent_key(s, places, chosen, n, k);
        const float* head = kv + (row * H + h) * KV;
        const float att = fm_exp(latent_score_ref(q, head, k_rope + row * s->dr, s) - top) * inv[i];
        for (int c = 0; c < s->dv; c++) { out[c] = madd(att, head[s->dn + c], out[c]); }
    }
}

static inline void latent_attention_forward_ref(float* out, float* max, float* inv, const float* q, const float* kv,
                                                const float* k_rope, const int* chosen, const LatentShape* s,
                                                const Places* places) {
    for (size_t i = 0; i < (size_t)s->N * s->H; i++) {
        latent_forward_row_ref_(out, max, inv, i / s->H, i % s->H, q, kv, k_rope, chosen, s, places);
    }
}

// head h of position n; dk (n_keys, dn + dr) and dv (n_keys, dv) of the head go on from the positions before
static inline void latent_backward_row_ref_(float* dq, float* dk, float* dv, size_t n, size_t h, const float* dout,
                                            const float* q, const float* kv, const float* k_rope, const float* max,
                                            const float* inv, const int* chosen, const LatentShape* s,
                                            const Places* places) {
    const size_t Q = latent_q_(s), KV = latent_kv_(s), H = (size_t)s->H, i = n * H + h;
    const int n_keys = latent_keys(s, places, chosen, n);
    float D = 0.0f;
    dq += i * Q, q += i * Q, dout += i * s->dv;
    for (size_t c = 0; c < Q; c++) { dq[c] = 0.0f; }
    for (int pass = 0; pass < 2; pass++) {  // D, then what needs it
        for (int k = 0; k < n_keys; k++) {
            const size_t row = latent_key(s, places, chosen, n, k);
            const float *head = kv + (row * H + h) * KV, *turns = k_rope + row * s->dr;
            const float att = fm_exp(latent_score_ref(q, head, turns, s) - max[i]) * inv[i];
            float datt = 0.0f;
            for (int c = 0; c < s->dv; c++) { datt = madd(dout[c], head[s->dn + c], datt); }
            if (pass == 0) {
                D = madd(att, datt, D);
                continue;
            }
            const float ds = att * (datt - D) * s->scale;
            for (int c = 0; c < (int)Q; c++) {
                dq[c] = madd(ds, c < s->dn ? head[c] : turns[c - s->dn], dq[c]);
                dk[row * Q + c] = madd(ds, q[c], dk[row * Q + c]);
            }
            for (int c = 0; c < s->dv; c++) { dv[row * s->dv + c] = madd(att, dout[c], dv[row * s->dv + c]); }
        }
    }
}

static inline void latent_attention_backward_ref(float* dq, float* dkv, float* dk_rope, const float* dout,
                                                 const float* q, const float* kv, const float* k_rope,
                                                 const float* max, const float* inv, const int* chosen, int n_keys,
                                                 const LatentShape* s, const Places* places) {
    const size_t Q = latent_q_(s), KV = latent_kv_(s), H = (size_t)s->H, V = (size_t)s->dv, rows = (size_t)n_keys;
    float* dk = (float*)malloc_check(sizeof(float) * rows * (Q + V), "gradients of keys and values");
    float* dv = dk + rows * Q;
    memset(dk_rope, 0, sizeof(float) * rows * (size_t)s->dr);
    for (size_t h = 0; h < H; h++) {
        memset(dk, 0, sizeof(float) * rows * (Q + V));
        for (size_t n = 0; n < (size_t)s->N; n++) {
            latent_backward_row_ref_(dq, dk, dv, n, h, dout, q, kv, k_rope, max, inv, chosen, s, places);
        }
        for (size_t u = 0; u < rows; u++) {
            memcpy(dkv + (u * H + h) * KV, dk + u * Q, sizeof(float) * (size_t)s->dn);
            memcpy(dkv + (u * H + h) * KV + s->dn, dv + u * V, sizeof(float) * V);
            for (int c = 0; c < s->dr; c++) { dk_rope[u * s->dr + c] += dk[u * Q + s->dn + c]; }
        }
    }
    free(dk);
}

static inline void latent_attention_mass_ref(float* mass, const float* q, const float* kv, const float* k_rope,
                                             const float* max, const float* inv, const int* chosen, int goes_on,
                                             const LatentShape* s) {
    const size_t Q = latent_q_(s), KV = latent_kv_(s), H = (size_t)s->H;
    for (size_t i = 0; i < (size_t)s->N * s->topk; i++) {
        const size_t n = i / s->topk, row = (size_t)chosen[i];
        float sum = goes_on ? mass[i] : 0.0f;
        if (chosen[i] < 0) {  // all behind it are, too
            mass[i] = 0.0f;
            continue;
        }
        for (size_t h = 0; h < H; h++) {
            const float* key = kv + (row * H + h) * KV;
            const float score = latent_score_ref(q + (n * H + h) * Q, key, k_rope + row * s->dr, s);
            sum += fm_exp(score - max[n * H + h]) * inv[n * H + h];
        }
        mass[i] = sum;
    }
}

#ifndef __CUDACC__  // ---- fast C: a head a task, strip after strip ----

// head h of a strip; is the value of a key it sees no number, by the plain loop
static inline void latent_strip_forward_(LatentStrip_* x, float* out, float* max, float* inv, const float* q,
                                         const float* kv, const float* k_rope, const int* chosen, int n_rows, int h,
                                         const LatentShape* s, const Places* places) {
    const size_t at = (size_t)x->keys.first * s->H + h, stride = (size_t)s->H * latent_kv_(s);
    const float* value = latent_of_head_(kv, h, s->dn, s);
    const LatentKeys_* k = &x->keys;
    if (!latent_keys_are_finite_(value, stride, k, s->dv)) {
        for (int n = k->first; n < k->first + k->n; n++) {
            latent_forward_row_ref_(out, max, inv, (size_t)n, (size_t)h, q, kv, k_rope, chosen, s, places);
        }
        return;
    }
    const LatentPacked_ packed = latent_strip_packed_(x, kv, k_rope, n_rows, h, s);
    latent_scores_(x, packed.k_by_u, q, h, s);
    latent_softmax_(x, max + at, inv + at, s->H);
    latent_gather_(out + at * s->dv, (size_t)s->H * s->dv, x, x->att, packed.v_by_i, packed.depth, value, stride,
                   s->dv);
}

static inline void latent_attention_forward(float* out, float* max, float* inv, const float* q, const float* kv,
                                            const float* k_rope, const int* chosen, const LatentShape* s,
                                            const Places* places, const Device* dev) {
    const int n_rows = latent_rows_(s, places), n_strips = (int)ceil_div(s->N, TILE_N);
    const size_t each = latent_floats_(s, n_rows, 0), of_keys = latent_all_keys_floats_(chosen, s, places);
    float* room = device_workspace(dev, sizeof(float) * (of_keys + each * (size_t)dev->n_threads));
    float* workspace = room + of_keys;
    const LatentKeys_* keys = latent_all_keys_(room, chosen, s, places);
    #pragma omp parallel for schedule(dynamic)
    for (int h = 0; h < s->H; h++) {
        LatentStrip_ x = latent_scratch_(workspace + each * (size_t)thread_number(), s, n_rows, 0);
        for (int i = 0; i < n_strips; i++) {
            x.keys = keys[i];
            latent_strip_forward_(&x, out, max, inv, q, kv, k_rope, chosen, n_rows, h, s, places);
        }
    }
}

// where the sums of a strip, (keys, TILE_N), begin: at what its lists hold
static inline void latent_take_mass_(float* sums, const LatentStrip_* x, const float* mass, int topk) {
    for (int j = 0; j < x->keys.n; j++) {
        const float* from = mass + (size_t)(x->keys.first + j) * topk;
        for (int u = 0; u < x->keys.n_keys; u++) {
            if (x->keys.seen[u] >> j & 1) { sums[(size_t)u * TILE_N + j] = *from++; }
        }
    }
}

// ... and back to the places of its lists
static inline void latent_spread_mass_(float* mass, const LatentStrip_* x, const float* sums, int topk) {
    for (int j = 0; j < x->keys.n; j++) {
        float* to = mass + (size_t)(x->keys.first + j) * topk;
        int k = 0;
        for (int u = 0; u < x->keys.n_keys; u++) {
            if (x->keys.seen[u] >> j & 1) { to[k++] = sums[(size_t)u * TILE_N + j]; }
        }
        for (; k < topk; k++) { to[k] = 0.0f; }
    }
}

// a strip a task: its sums are chains over heads
static inline void latent_attention_mass(float* mass, const float* q, const float* kv, const float* k_rope,
                                         const float* max, const float* inv, const int* chosen, int goes_on,
                                         const LatentShape* s, const Places* places, const Device* dev) {
    const int n_rows = latent_rows_(s, places), n_strips = (int)ceil_div(s->N, TILE_N), H = s->H;
    const size_t each = latent_floats_(s, n_rows, 0), of_keys = latent_all_keys_floats_(chosen, s, places);
    float* room = device_workspace(dev, sizeof(float) * (of_keys + each * (size_t)dev->n_threads));
    float* workspace = room + of_keys;
    const LatentKeys_* keys = latent_all_keys_(room, chosen, s, places);
    #pragma omp parallel for schedule(dynamic)
    for (int strip = n_strips - 1; strip >= 0; strip--) {  // the longest first
        LatentStrip_ x = latent_scratch_(workspace + each * (size_t)thread_number(), s, n_rows, 0);
        const LatentKeys_ k = x.keys = keys[strip];
        const size_t n_sums = (size_t)k.n_keys * TILE_N;
        memset(x.ds, 0, sizeof(float) * n_sums);
        if (goes_on) { latent_take_mass_(x.ds, &x, mass, s->topk); }
        for (int h = 0; h < H; h++) {
            const size_t at = (size_t)k.first * H + h, low = k.rows ? 0 : (size_t)k.low;
            const float *from = latent_of_head_(kv, h, 0, s) + low * H * latent_kv_(s), *turns = k_rope + low * s->dr;
            latent_pack_keys_(x.own.k_by_u, k.rows, k.n_keys, from, s->dn, turns, s);
            latent_scores_(&x, x.own.k_by_u, q, h, s);
            latent_weights_(&x, max + at, inv + at, H);
            for (size_t i = 0; i < n_sums; i++) { x.ds[i] += x.att[i]; }
        }
        latent_spread_mass_(mass, &x, x.ds, s->topk);
    }
}

// Scratch of N positions in rows of T, for the account of memory; trains: of backward, too. A strip sees keys of its
// row and, where a row ends in it, of the next: with all keys at hand as many as it has positions there, else all of
// them
static inline double latent_workspace_bytes(const LatentShape* s, int n_keys, int T, int trains, const Device* dev) {
    const int cp = n_keys / s->N, beyond = cp == 1 ? TILE_N : T * (int)ceil_div((int64_t)TILE_N * cp, T);
    const int64_t most = (int64_t)T + beyond + TILE_M, span = most < n_keys ? most : n_keys;
    const size_t of_keys = latent_keys_floats_(s, (size_t)(ceil_div(s->N, TILE_N) * span));
    const double k_rope = trains ? (double)s->H * n_keys * s->dr + 64.0 : 0.0;
    const size_t each = latent_floats_(s, n_keys, trains);
    return sizeof(float) * (k_rope + (double)of_keys + (double)each * dev->n_threads);
}

// what 0 is multiplied by in the gradients of a strip
static inline int latent_backward_is_finite_(const LatentStrip_* x, const float* dout, const float* q, const float* kv,
                                             const float* k_rope, int h, const LatentShape* s) {
    const size_t Q = latent_q_(s), H = (size_t)s->H, at = (size_t)x->keys.first * H + h;
    const LatentKeys_* k = &x->keys;
    return latent_keys_are_finite_(latent_of_head_(kv, h, 0, s), H * latent_kv_(s), k, s->dn) &&
           latent_keys_are_finite_(k_rope, (size_t)s->dr, k, s->dr) &&
           latent_is_finite_(q + at * Q, H * Q, NULL, k->n, (int)Q) &&
           latent_is_finite_(dout + at * s->dv, H * s->dv, NULL, k->n, s->dv);
}

// head h of a strip: dq is written; what x has of the head's keys and values goes on
static inline void latent_strip_backward_(LatentStrip_* x, float* dq, const float* dout, const float* q,
                                          const float* kv, const float* k_rope, const float* max, const float* inv,
                                          int h, int n_keys, const LatentShape* s) {
    static const float zeros[TILE_N] = {0};
    const int H = s->H, Q = (int)latent_q_(s);
    const size_t stride = (size_t)H * latent_kv_(s), at = (size_t)x->keys.first * H + h, q_stride = (size_t)H * Q;
    const float *key = latent_of_head_(kv, h, 0, s), *d = dout + at * s->dv;
    const LatentPacked_ packed = latent_strip_packed_(x, kv, k_rope, n_keys, h, s);
    latent_scores_(x, packed.k_by_u, q, h, s);
    latent_weights_(x, max + at, inv + at, H);
    gemm_pack_(x->dout, d, (size_t)H * s->dv, 1, TILE_N, x->keys.n, s->dv);
    gemm_panel_(x->ds, TILE_N, zeros, 0, packed.v_by_u, x->dout, 0, x->keys.n_keys, TILE_N, s->dv,
                NULL);  // datt
    latent_dscores_(x, s->scale);
    latent_gather_(dq + at * Q, q_stride, x, x->ds, packed.k_by_i, packed.depth, key, stride, s->dn);
    latent_gather_(dq + at * Q + s->dn, q_stride, x, x->ds, packed.k_rope_by_i, packed.depth, k_rope, (size_t)s->dr,
                   s->dr);
    latent_scatter_(x->dk, Q, x, x->ds, q + at * Q, q_stride);
    latent_scatter_(x->dv, s->dv, x, x->att, d, (size_t)H * s->dv);
}

// all but dk_rope. The device's workspace stays as it is up to latent_backward_end
static inline LatentBackward latent_backward_begin(float* dq, float* dkv, float* dk_rope, const float* dout,
                                                   const float* out, const float* q, const float* kv,
                                                   const float* k_rope, const float* max, const float* inv,
                                                   const int* chosen, int n_keys, const LatentShape* s,
                                                   const Places* places, const Device* dev) {
    (void)out;  // of tensor cores
    const size_t Q = latent_q_(s), KV = latent_kv_(s), H = (size_t)s->H, M = (size_t)n_keys, R = (size_t)s->dr;
    const size_t each = latent_floats_(s, n_keys, 1), of_keys = latent_all_keys_floats_(chosen, s, places);
    const size_t n_k_rope = latent_round_(H * M * R), n_all = of_keys + n_k_rope + each * (size_t)dev->n_threads;
    float *room = device_workspace(dev, sizeof(float) * n_all), *heads = room + of_keys;
    float* workspace = heads + n_k_rope;
    const LatentKeys_* keys = latent_all_keys_(room, chosen, s, places);
    #pragma omp parallel for schedule(dynamic)
    for (int h = 0; h < s->H; h++) {
        LatentStrip_ x = latent_scratch_(workspace + each * (size_t)thread_number(), s, n_keys, 1);
        memset(x.dk, 0, sizeof(float) * M * Q);
        memset(x.dv, 0, sizeof(float) * M * (size_t)s->dv);
        for (int i = 0; i < (int)ceil_div(s->N, TILE_N); i++) {
            x.keys = keys[i];
            if (latent_backward_is_finite_(&x, dout, q, kv, k_rope, h, s)) {
                latent_strip_backward_(&x, dq, dout, q, kv, k_rope, max, inv, h, n_keys, s);
                continue;
            }
            for (int n = x.keys.first; n < x.keys.first + x.keys.n; n++) {
                latent_backward_row_ref_(dq, x.dk, x.dv, (size_t)n, (size_t)h, dout, q, kv, k_rope, max, inv, chosen,
                                         s, places);
            }
        }
        for (size_t u = 0; u < M; u++) {
            float* to = dkv + (u * H + (size_t)h) * KV;
            memcpy(to, x.dk + u * Q, sizeof(float) * (size_t)s->dn);
            memcpy(to + s->dn, x.dv + u * (size_t)s->dv, sizeof(float) * (size_t)s->dv);
            memcpy(heads + ((size_t)h * M + u) * R, x.dk + u * Q + s->dn, sizeof(float) * R);
        }
    }
    const LatentBackward b = {dk_rope, heads, s->H, n_keys, s->dr};
    return b;
}

// goes_on: from the heads before
static inline void latent_backward_k_rope(LatentBackward* b, int first, int end, int goes_on, const Device* dev) {
    const int64_t each = (int64_t)b->n_keys * b->dr, stop = (int64_t)end * b->dr;
    (void)dev;
    #pragma omp parallel for
    for (int64_t i = (int64_t)first * b->dr; i < stop; i++) {
        float sum = goes_on ? b->k_rope[i] : 0.0f;
        for (int h = 0; h < b->H; h++) { sum += b->heads[h * each + i]; }
        b->k_rope[i] = sum;
    }
}

static inline int latent_most_channels(const Device* dev) { return (void)dev, INT_MAX; }

// they are there already
static inline void latent_backward_end(float* dk_rope, const LatentBackward* b, const Device* dev) {
    (void)dk_rope, (void)b, (void)dev;
}

static inline void latent_attention_backward(float* dq, float* dkv, float* dk_rope, const float* dout,
                                             const float* out, const float* q, const float* kv, const float* k_rope,
                                             const float* max, const float* inv, const int* chosen, int n_keys,
                                             const LatentShape* s, const Places* places, const Device* dev) {
    LatentBackward b = latent_backward_begin(dq, dkv, dk_rope, dout, out, q, kv, k_rope, max, inv, chosen, n_keys, s,
                                             places, dev);
    latent_backward_k_rope(&b, 0, n_keys, 0, dev);
    latent_backward_end(dk_rope, &b, dev);
}
#endif
#endif  // LLMC_LATENT_ATTENTION_H
