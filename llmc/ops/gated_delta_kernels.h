/*
CUDA kernels of the gated delta rule (gated_delta.h) for any sizes and types: the sums of the plain loops in their
order, so that EXACT builds have their bits. A block has a head and goes from chunk to chunk; its threads share the
outputs of each rule. What lies between rules (DeltaChunk_) is in global memory, and so is S. Other builds take
flash_delta.h where it fits.
    delta_steps_forward, delta_chunks_forward, delta_chunks_backward   as in C; o, q, k, v and their gradients are X
Cost:   forward one block for each row and value head, backward for each row and key head: few of them for so many
        multiprocessors, and chains. For parity and learning.
*/
#ifndef LLMC_GATED_DELTA_KERNELS_H
#define LLMC_GATED_DELTA_KERNELS_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // to_float, from_float
#include "flash_delta.h"     // flash_delta_forward, flash_delta_backward
#include "gated_delta.h"     // DeltaShape, DeltaChunk_ and its rules

enum { DELTA_THREADS = 256 };

// the outputs of a block, dealt out: i goes over 0 .. n - 1
#define DELTA_EACH_(i, n) int i = (int)threadIdx.x; i < (n); i += (int)blockDim.x

// ---- steps: a thread has a column of S ----

template <typename X>
__global__ void delta_steps_kernel(X* o, float* states, DeltaInputsOf<X> in, DeltaShape s) {
    const int bh = (int)blockIdx.x, b = bh / s.Hv, h = bh % s.Hv, x = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    if (x >= s.DV) { return; }
    float* S = states + bh * delta_state_floats_(&s) + x;
    for (int t = 0; t < s.T; t++) {
        const size_t at_g = delta_g_(&s, b, t, h), at_v = delta_v_(&s, b, t, h) + x;
        const X *q = in.q + delta_qk_(&s, b, t, h), *k = in.k + delta_qk_(&s, b, t, h);
        const float a = fm_exp(in.g[at_g]);
        float u = to_float(in.v[at_v]), sum = 0.0f;
        if (delta_starts_(&s, b, t)) {
            for (int d = 0; d < s.DK; d++) { S[(size_t)d * s.DV] = 0.0f; }
        }
        for (int d = 0; d < s.DK; d++) { u = madd(-to_float(k[d]), a * S[(size_t)d * s.DV], u); }
        const float delta = in.beta[at_g] * u;
        for (int d = 0; d < s.DK; d++) {
            const float after = madd(to_float(k[d]), delta, a * S[(size_t)d * s.DV]);
            S[(size_t)d * s.DV] = after;
            sum = madd(after, to_float(q[d]), sum);
        }
        o[at_v] = from_float<X>(sum);
    }
}

template <typename X>
static inline void delta_steps_forward(X* o, float* state, DeltaInputsOf<X> in, const DeltaShape* s,
                                       const Device* dev) {
    const size_t n_bytes = sizeof(float) * (size_t)s->B * (size_t)s->Hv * delta_state_floats_(s);
    if (!state) {
        state = device_workspace(dev, n_bytes);
        device_zero(state, n_bytes, dev);
    }
    dim3 grid((unsigned)(s->B * s->Hv), (unsigned)ceil_div(s->DV, WARP));
    delta_steps_kernel<<<grid, WARP, 0, dev->stream>>>(o, state, in, *s);
    cudaCheck(cudaGetLastError());
}

// ---- chunks: the rules of the plain loops, each with its outputs shared among the threads of the block ----

// of x (n, C), every `stride` elements, to floats side by side
template <typename X>
__device__ inline void delta_load_rows_(float* to, const X* x, size_t stride, int n, int C) {
    for (DELTA_EACH_(i, n * C)) { to[i] = to_float(x[(size_t)(i / C) * stride + i % C]); }
}

// rules 1 and 4
template <typename X>
__device__ inline void delta_load_block_(DeltaChunk_* c, const DeltaInputsOf<X>& in, const X* dout, const DeltaShape& s,
                                         int b, int h, int t) {
    __shared__ float G[DELTA_CHUNK];
    const int n = delta_chunk_length_(&s, b, t), C = DELTA_CHUNK;
    const size_t qk = delta_qk_(&s, b, t, h), v = delta_v_(&s, b, t, h), g = delta_g_(&s, b, t, h);
    const size_t k_row = (size_t)s.Hk * s.DK, v_row = (size_t)s.Hv * s.DV;
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int i = 0; i < n; i++) { G[i] = sum += in.g[g + (size_t)i * s.Hv]; }
        c->n = n;
    }
    delta_load_rows_(c->q, in.q + qk, k_row, n, s.DK);
    delta_load_rows_(c->k, in.k + qk, k_row, n, s.DK);
    delta_load_rows_(c->v, in.v + v, v_row, n, s.DV);
    if (dout) { delta_load_rows_(c->dout, dout + v, v_row, n, s.DV); }
    __syncthreads();
    for (DELTA_EACH_(i, n)) {
        c->eG[i] = fm_exp(G[i]);
        c->fG[i] = fm_exp(G[n - 1] - G[i]);
        c->beta[i] = in.beta[g + (size_t)i * s.Hv];
    }
    for (DELTA_EACH_(ij, n * n)) {
        const int i = ij / n, j = ij % n;
        if (j <= i) { c->decay[i * C + j] = j < i ? fm_exp(G[i] - G[j]) : 1.0f; }
    }
    __syncthreads();
    for (DELTA_EACH_(id, n * s.DK)) {
        c->qg[id] = c->q[id] * c->eG[id / s.DK];
        c->kg[id] = -(c->k[id] * c->eG[id / s.DK]);
        c->kf[id] = c->k[id] * c->fG[id / s.DK];
    }
    __syncthreads();
}

// rules 2, 3, 5, 6
__device__ inline void delta_outputs_block_(DeltaChunk_* c, const float* S) {
    const int DK = c->DK, DV = c->DV, C = DELTA_CHUNK, n = c->n;
    for (DELTA_EACH_(ij, n * n)) {
        const int i = ij / n, j = ij % n, at = i * C + j;
        const float* k_j = c->k + j * DK;
        if (j <= i) { c->P[at] = delta_dot_ref_(0.0f, c->q + i * DK, 1, k_j, 1, DK) * c->decay[at]; }
        if (j < i) { c->A[at] = delta_dot_ref_(0.0f, c->k + i * DK, 1, k_j, 1, DK) * c->decay[at]; }
    }
    for (DELTA_EACH_(ix, n * DV)) {
        const int i = ix / DV, x = ix % DV;
        c->u[ix] = delta_dot_ref_(c->v[ix], c->kg + i * DK, 1, S + x, (size_t)DV, DK);
        c->o[ix] = delta_dot_ref_(0.0f, c->qg + i * DK, 1, S + x, (size_t)DV, DK);
    }
    for (int j = 0; j < n; j++) {
        __syncthreads();  // u_j is whole: all that come later go on with its delta
        for (DELTA_EACH_(ix, (n - j) * DV)) {
            const int i = j + ix / DV, x = ix % DV;
            const float delta = c->beta[j] * c->u[j * DV + x];
            if (i == j) { c->D[j * DV + x] = delta; }
            else { c->u[i * DV + x] = madd(-c->A[i * C + j], delta, c->u[i * DV + x]); }
        }
    }
    __syncthreads();
    for (DELTA_EACH_(ix, n * DV)) {
        const int i = ix / DV;
        c->o[ix] = delta_dot_ref_(c->o[ix], c->P + i * C, 1, c->D + ix % DV, (size_t)DV, i + 1);
    }
    __syncthreads();
}

// rule 7
__device__ inline void delta_state_block_(float* S, const DeltaChunk_* c) {
    for (DELTA_EACH_(dx, c->DK * c->DV)) {
        const int d = dx / c->DV, x = dx % c->DV;
        S[dx] = delta_dot_ref_(c->eG[c->n - 1] * S[dx], c->kf + d, (size_t)c->DK, c->D + x, (size_t)c->DV, c->n);
    }
    __syncthreads();
}

// rule 8. dD takes the place of v
__device__ inline void delta_du_block_(DeltaChunk_* c, const float* dS) {
    const int DK = c->DK, DV = c->DV, C = DELTA_CHUNK, n = c->n;
    float* dD = c->v;
    for (DELTA_EACH_(jx, n * DV)) {
        const int j = jx / DV, x = jx % DV;
        const float sum = delta_dot_ref_(0.0f, c->kf + j * DK, 1, dS + x, (size_t)DV, DK);
        dD[jx] = delta_dot_ref_(sum, c->P + j * C + j, (size_t)C, c->dout + jx, (size_t)DV, n - j);
    }
    for (int i = n - 1; i >= 0; i--) {
        __syncthreads();
        for (DELTA_EACH_(jx, (i + 1) * DV)) {
            const int j = jx / DV, x = jx % DV;
            const float du = c->beta[i] * dD[i * DV + x];
            if (j == i) { c->du[jx] = du; }
            else { dD[jx] = madd(-c->A[i * C + j], du, dD[jx]); }
        }
    }
    __syncthreads();
    for (DELTA_EACH_(j, n)) { c->dbeta[j] = delta_dot_ref_(0.0f, dD + j * DV, 1, c->u + j * DV, 1, DV); }
}

// rules 10 to 13
__device__ inline void delta_keys_block_(DeltaChunk_* c, const float* S, const float* dS) {
    const int DK = c->DK, n = c->n;
    for (DELTA_EACH_(ij, n * n)) {
        if (ij % n <= ij / n) { delta_chunk_pair_ref_(c, ij / n, ij % n); }
    }
    for (DELTA_EACH_(id, n * DK)) { delta_chunk_states_ref_(c, S, dS, id / DK, id % DK); }
    __syncthreads();
    for (DELTA_EACH_(id, n * DK)) { delta_chunk_key_ref_(c, id / DK, id % DK); }
}

// rules 14 and 15. The products of S and dS+ by column take the place of v
__device__ inline void delta_decay_block_(DeltaChunk_* c, const float* S, const float* dS) {
    __shared__ float z[DELTA_CHUNK];
    const int DK = c->DK, DV = c->DV, n = c->n;
    for (DELTA_EACH_(i, n)) { z[i] = delta_chunk_position_ref_(c, i); }
    for (DELTA_EACH_(x, DV)) { c->v[x] = delta_dot_ref_(0.0f, S + x, (size_t)DV, dS + x, (size_t)DV, DK); }
    __syncthreads();
    if (threadIdx.x == 0) {
        float z_sum = 0.0f, product = 0.0f;
        for (int i = 0; i < n; i++) { z_sum += z[i]; }
        for (int x = 0; x < DV; x++) { product += c->v[x]; }
        delta_chunk_dg_ref_(c, z_sum, product);
    }
    __syncthreads();
}

// rule 9
__device__ inline void delta_dstate_block_(float* dS, const DeltaChunk_* c) {
    const int DK = c->DK, DV = c->DV, n = c->n;
    for (DELTA_EACH_(dx, DK * DV)) {
        const int d = dx / DV, x = dx % DV;
        const float sum = delta_dot_ref_(c->eG[n - 1] * dS[dx], c->qg + d, (size_t)DK, c->dout + x, (size_t)DV, n);
        dS[dx] = delta_dot_ref_(sum, c->kg + d, (size_t)DK, c->du + x, (size_t)DV, n);
    }
    __syncthreads();
}

// ---- scratch of a block ----

DELTA_FUNCTION size_t delta_head_floats_(void) { return (sizeof(DeltaChunk_) + 15) / 16 * 4; }

// states: of so many value heads S or dS; sums of dq and dk; where the chunks of a row begin
DELTA_FUNCTION size_t delta_block_floats_(const DeltaShape* s, int states) {
    const size_t sums = 2 * (size_t)DELTA_CHUNK * (size_t)s->DK;
    const size_t n = delta_head_floats_() + delta_chunk_floats_(s) + states * delta_state_floats_(s) + sums + s->T;
    return (n + 3) / 4 * 4;
}

struct DeltaBlock_ {
    DeltaChunk_* c;
    float *S, *dq, *dk;
    int* begins;
};

__device__ inline DeltaBlock_ delta_block_(float* scratch, const DeltaShape& s, int states) {
    float* memory = scratch + blockIdx.x * delta_block_floats_(&s, states);
    DeltaBlock_ x;
    x.c = (DeltaChunk_*)(void*)memory;
    memory += delta_head_floats_();
    if (threadIdx.x == 0) { delta_chunk_init_(x.c, memory, &s); }
    x.S = memory + delta_chunk_floats_(&s);
    x.dq = x.S + states * delta_state_floats_(&s);
    x.dk = x.dq + (size_t)DELTA_CHUNK * s.DK;
    x.begins = (int*)(x.dk + (size_t)DELTA_CHUNK * s.DK);
    __syncthreads();
    return x;
}

// from: NULL: zeros
__device__ inline void delta_copy_block_(float* to, const float* from, size_t n) {
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) { to[i] = from ? from[i] : 0.0f; }
    __syncthreads();
}

// ---- both passes ----

template <typename X>
__global__ void __launch_bounds__(DELTA_THREADS)
    delta_forward_kernel(X* o, float* states, float* state, DeltaInputsOf<X> in, float* scratch, DeltaShape s) {
    const int b = (int)blockIdx.x / s.Hv, h = (int)blockIdx.x % s.Hv;
    const size_t n_state = delta_state_floats_(&s);
    const DeltaBlock_ w = delta_block_(scratch, s, 1);
    float* state_h = state ? state + blockIdx.x * n_state : NULL;
    delta_copy_block_(w.S, state_h, n_state);
    for (int t = 0; t < s.T;) {
        if (delta_starts_(&s, b, t)) { delta_copy_block_(w.S, NULL, n_state); }
        else if (states) { delta_copy_block_(states + delta_slot_(&s, b, t, h), w.S, n_state); }
        delta_load_block_(w.c, in, (const X*)NULL, s, b, h, t);
        delta_outputs_block_(w.c, w.S);
        const int n = w.c->n;
        X* to = o + delta_v_(&s, b, t, h);
        for (DELTA_EACH_(ix, n * s.DV)) {
            to[(size_t)(ix / s.DV) * s.Hv * s.DV + ix % s.DV] = from_float<X>(w.c->o[ix]);
        }
        delta_state_block_(w.S, w.c);
        t += n;
    }
    if (state_h) { delta_copy_block_(state_h, w.S, n_state); }
}

// the gradients of the chunk that begins at t; those of its key head when all its value heads have added theirs
template <typename X>
__device__ inline void delta_store_block_(const DeltaGradientsOf<X>& d, const DeltaBlock_& w, const DeltaShape& s,
                                          int b, int h, int t) {
    const DeltaChunk_* c = w.c;
    const int R = s.Hv / s.Hk, is_first = h % R == 0, is_last = h % R == R - 1;
    const size_t qk = delta_qk_(&s, b, t, h), v = delta_v_(&s, b, t, h), g = delta_g_(&s, b, t, h);
    for (DELTA_EACH_(id, c->n * s.DK)) {
        const size_t at = qk + (size_t)(id / s.DK) * s.Hk * s.DK + id % s.DK;
        w.dq[id] = (is_first ? 0.0f : w.dq[id]) + c->dq[id];
        w.dk[id] = (is_first ? 0.0f : w.dk[id]) + c->dk[id];
        if (is_last && d.dq) { d.dq[at] = from_float<X>(w.dq[id]); }
        if (is_last && d.dk) { d.dk[at] = from_float<X>(w.dk[id]); }
    }
    for (DELTA_EACH_(ix, c->n * s.DV)) {
        if (d.dv) { d.dv[v + (size_t)(ix / s.DV) * s.Hv * s.DV + ix % s.DV] = from_float<X>(c->du[ix]); }
    }
    for (DELTA_EACH_(i, c->n)) {
        if (d.dg) { d.dg[g + (size_t)i * s.Hv] = c->dG[i]; }
        if (d.dbeta) { d.dbeta[g + (size_t)i * s.Hv] = c->dbeta[i]; }
    }
}

// S of forward, once more; w.S: dS of each value head of the key head, and one more for zeros
template <typename X>
__global__ void __launch_bounds__(DELTA_THREADS)
    delta_backward_kernel(DeltaGradientsOf<X> d, float* dstate, const X* dout, const float* states, DeltaInputsOf<X> in,
                          float* scratch, DeltaShape s) {
    const int R = s.Hv / s.Hk, b = (int)blockIdx.x / s.Hk, first = (int)blockIdx.x % s.Hk * R;
    const size_t n_state = delta_state_floats_(&s);
    const DeltaBlock_ w = delta_block_(scratch, s, R + 1);
    float *dstate_h = dstate ? dstate + ((size_t)b * s.Hv + first) * n_state : NULL, *zeros = w.S + R * n_state;
    __shared__ int n_chunks;
    if (threadIdx.x == 0) {
        n_chunks = 0;
        for (int t = 0; t < s.T; t += delta_chunk_length_(&s, b, t)) { w.begins[n_chunks++] = t; }
    }
    delta_copy_block_(w.S, dstate_h, R * n_state);
    delta_copy_block_(zeros, NULL, n_state);
    for (int chunk = n_chunks - 1; chunk >= 0; chunk--) {
        const int t = w.begins[chunk], fresh = delta_starts_(&s, b, t);
        for (int h = first; h < first + R; h++) {
            const float* S = fresh ? zeros : states + delta_slot_(&s, b, t, h);
            float* dS = w.S + (h - first) * n_state;
            delta_load_block_(w.c, in, dout, s, b, h, t);
            delta_outputs_block_(w.c, S);
            delta_du_block_(w.c, dS);
            delta_keys_block_(w.c, S, dS);
            __syncthreads();
            delta_decay_block_(w.c, S, dS);
            delta_store_block_(d, w, s, b, h, t);
            delta_dstate_block_(dS, w.c);
            if (fresh) { delta_copy_block_(dS, NULL, n_state); }
        }
    }
    if (dstate_h) { delta_copy_block_(dstate_h, w.S, R * n_state); }
}

// scratch of these kernels
static inline size_t delta_blocks_bytes_(const DeltaShape* s) {
    const int R = s->Hv / s->Hk;
    const size_t forward = (size_t)s->B * (size_t)s->Hv * delta_block_floats_(s, 1);
    const size_t backward = (size_t)s->B * (size_t)s->Hk * delta_block_floats_(s, R + 1);
    return sizeof(float) * (forward > backward ? forward : backward);
}

// the most that delta_chunks_forward and delta_chunks_backward ask device_workspace for, by whichever kernels
static inline size_t delta_workspace_bytes(const DeltaShape* s, int n_threads) {
    FlashDelta x;
    const size_t blocks = delta_blocks_bytes_(s), flash = flash_delta_scratch(&x, NULL, s, 1);
    (void)n_threads;
    return blocks > flash ? blocks : flash;
}

template <typename X>
static inline void delta_chunks_forward(X* o, float* states, float* state, DeltaInputsOf<X> in, const DeltaShape* s,
                                        const Device* dev) {
#ifndef EXACT
    if (flash_delta_forward(o, states, state, in, s, dev)) { return; }
#endif
    float* scratch = device_workspace(dev, delta_blocks_bytes_(s));
    delta_forward_kernel<<<(unsigned)(s->B * s->Hv), DELTA_THREADS, 0, dev->stream>>>(o, states, state, in, scratch,
                                                                                     *s);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void delta_chunks_backward(DeltaGradientsOf<X> d, float* dstate, const X* dout, const float* states,
                                         DeltaInputsOf<X> in, const DeltaShape* s, const Device* dev) {
#ifndef EXACT
    if (flash_delta_backward(d, dstate, dout, states, in, s, dev)) { return; }
#endif
    float* scratch = device_workspace(dev, delta_blocks_bytes_(s));
    delta_backward_kernel<<<(unsigned)(s->B * s->Hk), DELTA_THREADS, 0, dev->stream>>>(d, dstate, dout, states, in,
                                                                                      scratch, *s);
    cudaCheck(cudaGetLastError());
}
#undef DELTA_EACH_
#endif  // __CUDACC__
#endif  // LLMC_GATED_DELTA_KERNELS_H
