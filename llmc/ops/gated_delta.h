/*
Gated delta rule, the recurrence of Qwen3.6's linear attention (Gated DeltaNet). Each of Hv value heads has a state S, a
table (DK, DV) that answers a key with a value. With q and k already normalised (l2norm.h):
    S~ = exp(g_t) S_(t-1)      delta = beta_t (v_t - S~' k_t)      S_t = S~ + k_t delta'      o_t = S_t' q_t
    q, k (B, T, Hk, DK)   v, o (B, T, Hv, DV)   g, beta (B, T, Hv)   value head h has key head h / (Hv / Hk)
    state (B, Hv, DK, DV)   S before the first position, and afterwards S after the last; NULL: 0 before each row
    starts (B, T)   1 where a document begins: S before it is 0. NULL: nowhere. g <= 0, its sum in a chunk finite
Two forms, equal but for rounding (test_gated_delta.c bounds it):
    delta_steps_*   position by position: the law of generation. A row may be cut anywhere, `state` joins the windows
    delta_chunks_*  DELTA_CHUNK positions at once as matrix products: the law of training. Chunks are counted from the
                    start of each document, so a document has the same bits wherever it lies in a row, and a row may be
                    cut at multiples of DELTA_CHUNK
A chunk of n positions, S before it, with G_i = g_0 + ... + g_i, decay_ij = exp(G_i - G_j) for j < i and 1 for j = i:
    A_ij = (k_i . k_j) decay_ij, j < i         P_ij = (q_i . k_j) decay_ij, j <= i
    u_i  = v_i - exp(G_i) S' k_i - sum over j < i of A_ij D_j        D_i = beta_i u_i, the delta of position i
    o_i  = exp(G_i) S' q_i + sum over j <= i of P_ij D_j
    S+   = exp(G_last) S + sum of exp(G_last - G_i) k_i D_i'
So one triangular system with one right-hand side is solved, not the two of the WY form; no exponent is above 0.
Backward, with dS+ what later chunks ask of S+:
    dD_j = exp(G_last - G_j) dS+' k_j + sum over i >= j of P_ij do_i - sum over i > j of A_ij du_i
    du_j = beta_j dD_j     dv_j = du_j     dbeta_j = dD_j . u_j
    dS   = exp(G_last) dS+ + sum of exp(G_i) q_i do_i' - sum of exp(G_i) k_i du_i'
    dP_ij = do_i . D_j, M_ij = dP_ij decay_ij, j <= i       dA_ij = -du_i . D_j, N_ij = dA_ij decay_ij, j < i
    B_i = S do_i     X_i = S du_i     Z_i = dS+ D_i
    dq_i = exp(G_i) B_i + sum over j <= i of M_ij k_j
    dk_i = exp(G_last - G_i) Z_i - exp(G_i) X_i + sum over j < i of N_ij k_j + over j > i of N_ji k_j
           + sum over j >= i of M_ji q_j
    dG_i = exp(G_i) (q_i . B_i - k_i . X_i) + sum over j < i of (dP P + dA A)_ij
           - sum over j > i of (dP P + dA A)_ji - z_i
           with z_i = exp(G_last - G_i) k_i . Z_i; dG_last also + sum of z + exp(G_last) <S, dS+>
    dg_i = sum over i' >= i in the chunk of dG_i'
    dq, dk, dv, dg, dbeta: written; NULL: nobody asks. dstate: dS+ at the end of the row, afterwards dS before its
    beginning, 0 where that begins a document; NULL: 0, and nobody asks
Cost:   flops for each position and value head, C = DELTA_CHUNK, triangles counted half but for products of keys and
        values, which are whole squares: forward 6 DK DV + C (4 DK + 2 DV), backward, with u and o made again, 16 DK DV
        + C (7 DK + 8 DV). T 4096, 16 heads of 128 x 128, two threads of a busy AMD EPYC with AVX-512, gcc 12, the
        smallest of 6: forward 72 ms, backward 195 ms, 134 and 129 GFLOP/s; the fallback in PyTorch of transformers
        5.23, in turn with it, 316 and 4354 ms (dev/bench/pytorch_gated_delta.py). With others at work: 150 and 390 ms.
        CUDA: gated_delta_kernels.h, flash_delta.h (bf16); not measured on a GPU yet. Slower: dev/cuda/gated_delta.cu
        Memory: `states` keeps S before each chunk: DK DV / C floats for each position and value head; backward makes
        all else again.
Order:  every sum is a chain of madd and terms outside the stated range do not exist. Chunks, by rules with a number: 1:
        G by adding. 2, 3: over DK from 0; A and P: times decay. 4: qg = q * exp(G), kg = k * exp(G), kf = k *
        exp(G_last - G) are rounded. 5: u_i from v_i over DK of -kg * S, goes on over j ascending of -A_ij * D_j. 6: o_i
        from 0 over DK of qg * S, goes on over j ascending. 7: from exp(G_last) * S over i ascending. 8: dD_j from 0
        over DK of kf * dS+, goes on over i ascending of P_ij * do_i, goes on over i DESCENDING of -A_ij * du_i; dbeta
        over DV. 9: dS from exp(G_last) * dS+ over i of qg * do, goes on over i of -kg * du. 10, 11: over DV from 0. 12:
        dq from exp(G_i) * B_i. 13: dk from exp(G_last - G_i) * Z_i, madd(-exp(G_i), X_i, .), goes on over j != i
        ascending of N, goes on over j >= i of M. 14: as written from the left, see the loop; s = <S, dS+> over DK for
        each column, these added over DV. 15: descending from 0. 16: value heads of a key head are added from 0.
        Steps: St = exp(g) * S; u from v over DK of -k * St; S = madd(k, D, St); o over DK from 0. Their backward: dS =
        madd(q, do, dS); dq over DV; dk over DV of dS * D, goes on over DV of St * -dv; dD over DK; dbeta over DV; dg
        over DK for each column, these added over DV. Threads share heads, lanes columns: neither changes a bit.
Error:  fp32 against fp64 at DK 12, DV 7, T 130, |v| < 1, unit keys: |o| and |S| within 8e-6, gradients 4e-5, in both
        forms. Strong decay costs the chunks more: exp(G_i - G_j) has |G_i| 2^-24 of relative error, 2.4e-5 where G
        falls to -400 in a chunk; steps have no such term.
Source: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464; derived in doc/gated_delta.md "Formula", "Chunks", "Derivative"
*/
#ifndef LLMC_GATED_DELTA_H
#define LLMC_GATED_DELTA_H
#include "../core/device.h"  // Device, device_workspace, thread_number, ceil_div
#include "../core/fmath.h"   // fm_exp
#include "../core/madd.h"    // madd
#include "delta_shape.h"     // DeltaShape, DeltaInputs, DELTA_CHUNK
#include <string.h>
#ifndef __CUDACC__
#include "gemm.h"  // gemm_pack_a_tile_, gemm_pack_b_panel_, gemm_panel_, gemm_tile_
#endif

static inline void delta_zero_(float* x, size_t n) {
    for (size_t i = 0; i < n; i++) { x[i] = 0.0f; }
}
// a value head's share of the gradient of its key head
static inline void delta_add_head_(float* dx, const float* x, const DeltaShape* s, int h, int n) {
    for (int d = 0; d < n; d++) { dx[d] = (h % (s->Hv / s->Hk) == 0 ? 0.0f : dx[d]) + x[d]; }
}

// ---- plain C: read this first; it defines every bit ----

DELTA_FUNCTION float delta_dot_ref_(float sum, const float* a, size_t a_step, const float* b, size_t b_step, int n) {
    for (int i = 0; i < n; i++) { sum = madd(a[i * a_step], b[i * b_step], sum); }
    return sum;
}

// One position of one head. S is turned from that before into that after it; decayed (DK, DV) and u, delta (DV) stay
static inline void delta_step_ref_(float* o, float* S, float* decayed, float* u, float* delta, const float* q,
                                   const float* k, const float* v, float g, float beta, int DK, int DV) {
    const float a = fm_exp(g);
    for (int i = 0; i < DK * DV; i++) { decayed[i] = a * S[i]; }
    for (int c = 0; c < DV; c++) {
        u[c] = v[c];
        for (int d = 0; d < DK; d++) { u[c] = madd(-k[d], decayed[d * DV + c], u[c]); }
        delta[c] = beta * u[c];
        for (int d = 0; d < DK; d++) { S[d * DV + c] = madd(k[d], delta[c], decayed[d * DV + c]); }
        o[c] = delta_dot_ref_(0.0f, S + c, (size_t)DV, q, 1, DK);
    }
}

static inline void delta_steps_forward_ref(float* o, float* state, DeltaInputs in, const DeltaShape* s) {
    const size_t n_state = delta_state_floats_(s);
    float* S = (float*)malloc_check(sizeof(float) * (2 * n_state + 2 * (size_t)s->DV), "state of a head");
    float *decayed = S + n_state, *u = decayed + n_state, *delta = u + s->DV;
    for (int b = 0; b < s->B; b++) {
        for (int h = 0; h < s->Hv; h++) {
            float* state_h = state ? state + ((size_t)b * s->Hv + h) * n_state : NULL;
            for (size_t i = 0; i < n_state; i++) { S[i] = state_h ? state_h[i] : 0.0f; }
            for (int t = 0; t < s->T; t++) {
                const size_t qk = delta_qk_(s, b, t, h), v = delta_v_(s, b, t, h), g = delta_g_(s, b, t, h);
                if (delta_starts_(s, b, t)) { delta_zero_(S, n_state); }
                delta_step_ref_(o + v, S, decayed, u, delta, in.q + qk, in.k + qk, in.v + v, in.g[g], in.beta[g],
                                s->DK, s->DV);
            }
            if (state_h) { memcpy(state_h, S, sizeof(float) * n_state); }
        }
    }
    free(S);
}

// one position of one head backward. S: after it; D: what is asked of the state after it, then of that before it
static inline void delta_step_backward_ref_(float* dq, float* dk, float* dv, float* dg, float* dbeta, float* D,
                                            const float* dout, const float* S, const float* decayed, const float* u,
                                            const float* delta, const float* q, const float* k, float g, float beta,
                                            int DK, int DV) {
    const float a = fm_exp(g);
    for (int d = 0; d < DK; d++) {
        for (int c = 0; c < DV; c++) { D[d * DV + c] = madd(q[d], dout[c], D[d * DV + c]); }
        dq[d] = delta_dot_ref_(0.0f, S + d * DV, 1, dout, 1, DV);
        dk[d] = delta_dot_ref_(0.0f, D + d * DV, 1, delta, 1, DV);
    }
    *dbeta = 0.0f;
    for (int c = 0; c < DV; c++) {
        const float ddelta = delta_dot_ref_(0.0f, D + c, (size_t)DV, k, 1, DK);
        *dbeta = madd(ddelta, u[c], *dbeta);
        dv[c] = beta * ddelta;
    }
    for (int d = 0; d < DK; d++) {
        for (int c = 0; c < DV; c++) {
            dk[d] = madd(decayed[d * DV + c], -dv[c], dk[d]);
            D[d * DV + c] = madd(k[d], -dv[c], D[d * DV + c]);
        }
    }
    *dg = 0.0f;
    for (int c = 0; c < DV; c++) { *dg += delta_dot_ref_(0.0f, D + c, (size_t)DV, decayed + c, (size_t)DV, DK); }
    for (int i = 0; i < DK * DV; i++) { D[i] = a * D[i]; }
}

// state (B, Hv, DK, DV): S before the first position, or NULL. Keeps the states of all positions of a head: for tests
static inline void delta_steps_backward_ref(DeltaGradients d, float* dstate, const float* dout, const float* state,
                                            DeltaInputs in, const DeltaShape* s) {
    const size_t n_state = delta_state_floats_(s), T = (size_t)s->T, DK = (size_t)s->DK, DV = (size_t)s->DV;
    float* S = (float*)malloc_check(sizeof(float) * ((T + 2) * n_state + T * (n_state + 2 * DV) + 2 * DK + 2 * DV),
                                    "states of a head");
    float *D = S + (T + 1) * n_state, *decayed = D + n_state, *u = decayed + T * n_state, *delta = u + T * DV;
    float *dq = delta + T * DV, *dk = dq + DK, *dv = dk + DK, *o = dv + DV, dg, dbeta;
    for (int bh = 0; bh < s->B * s->Hv; bh++) {
        const int b = bh / s->Hv, h = bh % s->Hv;
        float* dstate_h = dstate ? dstate + bh * n_state : NULL;
        for (size_t i = 0; i < n_state; i++) { S[i] = state ? state[bh * n_state + i] : 0.0f; }
        for (size_t i = 0; i < n_state; i++) { D[i] = dstate_h ? dstate_h[i] : 0.0f; }
        for (int t = 0; t < s->T; t++) {
            const size_t qk = delta_qk_(s, b, t, h), v = delta_v_(s, b, t, h), g = delta_g_(s, b, t, h);
            float* S_t = S + (t + 1) * n_state;
            memcpy(S_t, S_t - n_state, sizeof(float) * n_state);
            if (delta_starts_(s, b, t)) { delta_zero_(S_t, n_state); }
            delta_step_ref_(o, S_t, decayed + t * n_state, u + t * DV, delta + t * DV, in.q + qk, in.k + qk, in.v + v,
                            in.g[g], in.beta[g], s->DK, s->DV);
        }
        for (int t = s->T - 1; t >= 0; t--) {
            const size_t qk = delta_qk_(s, b, t, h), v = delta_v_(s, b, t, h), g = delta_g_(s, b, t, h);
            delta_step_backward_ref_(dq, dk, dv, &dg, &dbeta, D, dout + v, S + (t + 1) * n_state, decayed + t * n_state,
                                     u + t * DV, delta + t * DV, in.q + qk, in.k + qk, in.g[g], in.beta[g], s->DK,
                                     s->DV);
            if (delta_starts_(s, b, t)) { delta_zero_(D, n_state); }
            if (d.dq) { delta_add_head_(d.dq + qk, dq, s, h, s->DK); }
            if (d.dk) { delta_add_head_(d.dk + qk, dk, s, h, s->DK); }
            if (d.dv) { memcpy(d.dv + v, dv, sizeof(float) * DV); }
            if (d.dg) { d.dg[g] = dg; }
            if (d.dbeta) { d.dbeta[g] = dbeta; }
        }
        if (dstate_h) { memcpy(dstate_h, D, sizeof(float) * n_state); }
    }
    free(S);
}

// ---- plain C: chunks ----

enum { DELTA_SQUARE_ = DELTA_CHUNK * DELTA_CHUNK };

// what belongs to a chunk of n positions of one head. Row i of a square is i * DELTA_CHUNK floats on
typedef struct {
    int n, DK, DV;
    float eG[DELTA_CHUNK], fG[DELTA_CHUNK], dG[DELTA_CHUNK], dbeta[DELTA_CHUNK], beta[DELTA_CHUNK];
    float decay[DELTA_SQUARE_], A[DELTA_SQUARE_], P[DELTA_SQUARE_], dA[DELTA_SQUARE_], dP[DELTA_SQUARE_];
    float *q, *k, *qg, *kg, *kf;        // (n, DK); kg has the minus of its rules
    float *B, *X, *Z, *dq, *dk;         // (n, DK)
    float *v, *u, *D, *o, *dout, *du;   // (n, DV)
} DeltaChunk_;

enum { DELTA_K_ARRAYS_ = 10, DELTA_V_ARRAYS_ = 6 };

DELTA_FUNCTION size_t delta_chunk_floats_(const DeltaShape* s) {
    return (size_t)DELTA_CHUNK * (size_t)(DELTA_K_ARRAYS_ * s->DK + DELTA_V_ARRAYS_ * s->DV);
}

DELTA_FUNCTION void delta_chunk_init_(DeltaChunk_* c, float* memory, const DeltaShape* s) {
    float** of_k[] = {&c->q, &c->k, &c->qg, &c->kg, &c->kf, &c->B, &c->X, &c->Z, &c->dq, &c->dk};
    float** of_v[] = {&c->v, &c->u, &c->D, &c->o, &c->dout, &c->du};
    c->DK = s->DK, c->DV = s->DV;
    for (int i = 0; i < DELTA_K_ARRAYS_; i++, memory += DELTA_CHUNK * s->DK) { *of_k[i] = memory; }
    for (int i = 0; i < DELTA_V_ARRAYS_; i++, memory += DELTA_CHUNK * s->DV) { *of_v[i] = memory; }
}

// rules 1 and 4, and the positions of the chunk that begins at t side by side. dout: or NULL
static inline void delta_chunk_load_(DeltaChunk_* c, DeltaInputs in, const float* dout, const DeltaShape* s, int b,
                                     int h, int t) {
    float G[DELTA_CHUNK], sum = 0.0f;
    const int n = c->n = delta_chunk_length_(s, b, t);
    const size_t bytes_k = sizeof(float) * (size_t)s->DK, bytes_v = sizeof(float) * (size_t)s->DV;
    for (int i = 0; i < n; i++) {
        const size_t qk = delta_qk_(s, b, t + i, h), v = delta_v_(s, b, t + i, h), g = delta_g_(s, b, t + i, h);
        memcpy(c->q + i * s->DK, in.q + qk, bytes_k);
        memcpy(c->k + i * s->DK, in.k + qk, bytes_k);
        memcpy(c->v + i * s->DV, in.v + v, bytes_v);
        if (dout) { memcpy(c->dout + i * s->DV, dout + v, bytes_v); }
        sum += in.g[g];
        G[i] = sum;
        c->beta[i] = in.beta[g];
    }
    for (int i = 0; i < n; i++) {
        c->eG[i] = fm_exp(G[i]);
        c->fG[i] = fm_exp(G[n - 1] - G[i]);
        #pragma omp simd
        for (int j = 0; j < i; j++) { c->decay[i * DELTA_CHUNK + j] = fm_exp(G[i] - G[j]); }
        c->decay[i * DELTA_CHUNK + i] = 1.0f;
        for (int d = 0; d < s->DK; d++) {
            const int id = i * s->DK + d;
            c->qg[id] = c->q[id] * c->eG[i];
            c->kg[id] = -(c->k[id] * c->eG[i]);
            c->kf[id] = c->k[id] * c->fG[i];
        }
    }
}

// rules 2, 3, 5, 6: A, P, u, D, o
static inline void delta_chunk_outputs_ref_(DeltaChunk_* c, const float* S) {
    const int DK = c->DK, DV = c->DV, C = DELTA_CHUNK;
    for (int i = 0; i < c->n; i++) {
        for (int j = 0; j <= i; j++) {
            const float* k_j = c->k + j * DK;
            c->P[i * C + j] = delta_dot_ref_(0.0f, c->q + i * DK, 1, k_j, 1, DK) * c->decay[i * C + j];
            if (j < i) { c->A[i * C + j] = delta_dot_ref_(0.0f, c->k + i * DK, 1, k_j, 1, DK) * c->decay[i * C + j]; }
        }
        for (int x = 0; x < DV; x++) {
            float u = c->v[i * DV + x], o = 0.0f;
            for (int d = 0; d < DK; d++) { u = madd(c->kg[i * DK + d], S[d * DV + x], u); }
            for (int j = 0; j < i; j++) { u = madd(-c->A[i * C + j], c->D[j * DV + x], u); }
            c->u[i * DV + x] = u;
            c->D[i * DV + x] = c->beta[i] * u;
            for (int d = 0; d < DK; d++) { o = madd(c->qg[i * DK + d], S[d * DV + x], o); }
            c->o[i * DV + x] = delta_dot_ref_(o, c->P + i * C, 1, c->D + x, (size_t)DV, i + 1);
        }
    }
}

// rule 7: S becomes S+
static inline void delta_chunk_state_ref_(float* S, const DeltaChunk_* c) {
    for (int d = 0; d < c->DK; d++) {
        for (int x = 0; x < c->DV; x++) {
            float* s = S + d * c->DV + x;
            *s = delta_dot_ref_(c->eG[c->n - 1] * *s, c->kf + d, (size_t)c->DK, c->D + x, (size_t)c->DV, c->n);
        }
    }
}

// states: S before each chunk that goes on, delta_states_floats(s) floats; NULL: no backward follows
static inline void delta_chunks_forward_ref(float* o, float* states, float* state, DeltaInputs in,
                                            const DeltaShape* s) {
    const size_t n_state = delta_state_floats_(s);
    float* S = (float*)malloc_check(sizeof(float) * (n_state + delta_chunk_floats_(s)), "state and chunk of a head");
    DeltaChunk_* c = (DeltaChunk_*)malloc_check(sizeof(DeltaChunk_), "a chunk");
    delta_chunk_init_(c, S + n_state, s);
    for (int bh = 0; bh < s->B * s->Hv; bh++) {
        const int b = bh / s->Hv, h = bh % s->Hv;
        float* state_h = state ? state + bh * n_state : NULL;
        for (size_t i = 0; i < n_state; i++) { S[i] = state_h ? state_h[i] : 0.0f; }
        for (int t = 0; t < s->T; t += c->n) {
            if (delta_starts_(s, b, t)) {
                delta_zero_(S, n_state);
            } else if (states) {
                memcpy(states + delta_slot_(s, b, t, h), S, sizeof(float) * n_state);
            }
            delta_chunk_load_(c, in, NULL, s, b, h, t);
            delta_chunk_outputs_ref_(c, S);
            for (int i = 0; i < c->n; i++) {
                memcpy(o + delta_v_(s, b, t + i, h), c->o + i * s->DV, sizeof(float) * (size_t)s->DV);
            }
            delta_chunk_state_ref_(S, c);
        }
        if (state_h) { memcpy(state_h, S, sizeof(float) * n_state); }
    }
    free(S);
    free(c);
}

// rule 8: du and dbeta
static inline void delta_chunk_du_ref_(DeltaChunk_* c, const float* dS) {
    const int DK = c->DK, DV = c->DV, C = DELTA_CHUNK, n = c->n;
    for (int j = n - 1; j >= 0; j--) {
        c->dbeta[j] = 0.0f;
        for (int x = 0; x < DV; x++) {
            float dD = delta_dot_ref_(0.0f, c->kf + j * DK, 1, dS + x, (size_t)DV, DK);
            for (int i = j; i < n; i++) { dD = madd(c->P[i * C + j], c->dout[i * DV + x], dD); }
            for (int i = n - 1; i > j; i--) { dD = madd(-c->A[i * C + j], c->du[i * DV + x], dD); }
            c->du[j * DV + x] = c->beta[j] * dD;
            c->dbeta[j] = madd(dD, c->u[j * DV + x], c->dbeta[j]);
        }
    }
}

// rule 10, of positions j <= i
DELTA_FUNCTION void delta_chunk_pair_ref_(DeltaChunk_* c, int i, int j) {
    const int DV = c->DV, at = i * DELTA_CHUNK + j;
    const float* D_j = c->D + j * DV;
    float dA = 0.0f;
    for (int x = 0; x < DV && j < i; x++) { dA = madd(-c->du[i * DV + x], D_j[x], dA); }
    c->dA[at] = dA;
    c->dP[at] = delta_dot_ref_(0.0f, c->dout + i * DV, 1, D_j, 1, DV);
}

// rule 11, of channel d of position i
DELTA_FUNCTION void delta_chunk_states_ref_(DeltaChunk_* c, const float* S, const float* dS, int i, int d) {
    const int DV = c->DV, id = i * c->DK + d;
    c->B[id] = delta_dot_ref_(0.0f, S + d * DV, 1, c->dout + i * DV, 1, DV);
    c->X[id] = delta_dot_ref_(0.0f, S + d * DV, 1, c->du + i * DV, 1, DV);
    c->Z[id] = delta_dot_ref_(0.0f, dS + d * DV, 1, c->D + i * DV, 1, DV);
}

// rules 12 and 13, of channel d of position i
DELTA_FUNCTION void delta_chunk_key_ref_(DeltaChunk_* c, int i, int d) {
    const int DK = c->DK, C = DELTA_CHUNK, n = c->n, id = i * DK + d;
    float dq = c->eG[i] * c->B[id], dk = madd(-c->eG[i], c->X[id], c->fG[i] * c->Z[id]);
    for (int j = 0; j <= i; j++) { dq = madd(c->dP[i * C + j] * c->decay[i * C + j], c->k[j * DK + d], dq); }
    for (int j = 0; j < i; j++) { dk = madd(c->dA[i * C + j] * c->decay[i * C + j], c->k[j * DK + d], dk); }
    for (int j = i + 1; j < n; j++) { dk = madd(c->dA[j * C + i] * c->decay[j * C + i], c->k[j * DK + d], dk); }
    for (int j = i; j < n; j++) { dk = madd(c->dP[j * C + i] * c->decay[j * C + i], c->q[j * DK + d], dk); }
    c->dq[id] = dq, c->dk[id] = dk;
}

static inline void delta_chunk_keys_ref_(DeltaChunk_* c, const float* S, const float* dS) {
    for (int i = 0; i < c->n; i++) {
        for (int j = 0; j <= i; j++) { delta_chunk_pair_ref_(c, i, j); }
        for (int d = 0; d < c->DK; d++) { delta_chunk_states_ref_(c, S, dS, i, d); }
    }
    for (int i = 0; i < c->n; i++) {
        for (int d = 0; d < c->DK; d++) { delta_chunk_key_ref_(c, i, d); }
    }
}

// rule 14, of position i, but for what the last one has besides; z_i comes back
DELTA_FUNCTION float delta_chunk_position_ref_(DeltaChunk_* c, int i) {
    const int DK = c->DK, C = DELTA_CHUNK, n = c->n, at = i * DK;
    float a = c->eG[i] * delta_dot_ref_(0.0f, c->q + at, 1, c->B + at, 1, DK);
    a = a - c->eG[i] * delta_dot_ref_(0.0f, c->k + at, 1, c->X + at, 1, DK);
    for (int j = 0; j < i; j++) {
        a = madd(c->dP[i * C + j], c->P[i * C + j], a);
        a = madd(c->dA[i * C + j], c->A[i * C + j], a);
    }
    for (int j = i + 1; j < n; j++) {
        a = madd(-c->dP[j * C + i], c->P[j * C + i], a);
        a = madd(-c->dA[j * C + i], c->A[j * C + i], a);
    }
    const float z = c->fG[i] * delta_dot_ref_(0.0f, c->k + at, 1, c->Z + at, 1, DK);
    c->dG[i] = a - z;
    return z;
}

// what the last position has besides, and rule 15: dG becomes dg. z_sum: of z; product: <S, dS+>
DELTA_FUNCTION void delta_chunk_dg_ref_(DeltaChunk_* c, float z_sum, float product) {
    const int last = c->n - 1;
    float dg = 0.0f;
    c->dG[last] = c->dG[last] + z_sum;
    c->dG[last] = c->dG[last] + c->eG[last] * product;
    for (int i = last; i >= 0; i--) {
        dg += c->dG[i];
        c->dG[i] = dg;
    }
}

static inline void delta_chunk_decay_ref_(DeltaChunk_* c, const float* S, const float* dS) {
    const size_t DV = (size_t)c->DV;
    float z_sum = 0.0f, product = 0.0f;
    for (int i = 0; i < c->n; i++) { z_sum += delta_chunk_position_ref_(c, i); }
    for (int x = 0; x < c->DV; x++) { product += delta_dot_ref_(0.0f, S + x, DV, dS + x, DV, c->DK); }
    delta_chunk_dg_ref_(c, z_sum, product);
}

// rule 9: dS+ becomes dS
static inline void delta_chunk_dstate_ref_(float* dS, const DeltaChunk_* c) {
    for (int d = 0; d < c->DK; d++) {
        for (int x = 0; x < c->DV; x++) {
            float* s = dS + d * c->DV + x;
            float sum = c->eG[c->n - 1] * *s;
            sum = delta_dot_ref_(sum, c->qg + d, (size_t)c->DK, c->dout + x, (size_t)c->DV, c->n);
            for (int i = 0; i < c->n; i++) { sum = madd(c->kg[i * c->DK + d], c->du[i * c->DV + x], sum); }
            *s = sum;
        }
    }
}

static inline void delta_chunk_store_(DeltaGradients d, const DeltaChunk_* c, const DeltaShape* s, int b, int h,
                                      int t) {
    for (int i = 0; i < c->n; i++) {
        const size_t qk = delta_qk_(s, b, t + i, h), v = delta_v_(s, b, t + i, h), g = delta_g_(s, b, t + i, h);
        if (d.dq) { delta_add_head_(d.dq + qk, c->dq + i * s->DK, s, h, s->DK); }
        if (d.dk) { delta_add_head_(d.dk + qk, c->dk + i * s->DK, s, h, s->DK); }
        if (d.dv) { memcpy(d.dv + v, c->du + i * s->DV, sizeof(float) * (size_t)s->DV); }
        if (d.dg) { d.dg[g] = c->dG[i]; }
        if (d.dbeta) { d.dbeta[g] = c->dbeta[i]; }
    }
}

// where the chunk begins that ends before `end`: documents are walked from their start
static inline int delta_chunk_before_(const DeltaShape* s, int b, int end) {
    int start = end - 1;
    while (start > 0 && !delta_starts_(s, b, start)) { start--; }
    return start + (end - 1 - start) / DELTA_CHUNK * DELTA_CHUNK;
}

// states: of forward
static inline void delta_chunks_backward_ref(DeltaGradients d, float* dstate, const float* dout, const float* states,
                                             DeltaInputs in, const DeltaShape* s) {
    const size_t n_state = delta_state_floats_(s);
    float* S = (float*)malloc_check(sizeof(float) * (2 * n_state + delta_chunk_floats_(s)), "states of a head");
    float* dS = S + n_state;
    DeltaChunk_* c = (DeltaChunk_*)malloc_check(sizeof(DeltaChunk_), "a chunk");
    delta_chunk_init_(c, dS + n_state, s);
    for (int bh = 0; bh < s->B * s->Hv; bh++) {
        const int b = bh / s->Hv, h = bh % s->Hv;
        float* dstate_h = dstate ? dstate + bh * n_state : NULL;
        for (size_t i = 0; i < n_state; i++) { dS[i] = dstate_h ? dstate_h[i] : 0.0f; }
        for (int end = s->T, t; end > 0; end = t) {
            t = delta_chunk_before_(s, b, end);
            const int fresh = delta_starts_(s, b, t);
            if (fresh) { delta_zero_(S, n_state); }
            else { memcpy(S, states + delta_slot_(s, b, t, h), sizeof(float) * n_state); }
            delta_chunk_load_(c, in, dout, s, b, h, t);
            delta_chunk_outputs_ref_(c, S);
            delta_chunk_du_ref_(c, dS);
            delta_chunk_keys_ref_(c, S, dS);
            delta_chunk_decay_ref_(c, S, dS);
            delta_chunk_store_(d, c, s, b, h, t);
            delta_chunk_dstate_ref_(dS, c);
            if (fresh) { delta_zero_(dS, n_state); }
        }
        if (dstate_h) { memcpy(dstate_h, dS, sizeof(float) * n_state); }
    }
    free(S);
    free(c);
}

#ifndef __CUDACC__  // ---- fast C: a chunk, products by gemm.h's tiles ----

static inline size_t delta_line_(size_t n_floats) { return (n_floats + GEMM_LINE - 1) / GEMM_LINE * GEMM_LINE; }

// floats of packed operands: of a product whose sizes are at most `most`
static inline size_t delta_pack_floats_(const DeltaShape* s) {
    size_t most = DELTA_CHUNK;
    most = s->DK > (int)most ? (size_t)s->DK : most;
    most = s->DV > (int)most ? (size_t)s->DV : most;
    return delta_line_((most + TILE_M) * most) + most * TILE_N;
}

// out (M, N) = start + a b; start NULL: 0
static inline void delta_product_(float* out, size_t out_stride, const float* start, size_t start_stride, Matrix a,
                                  Matrix b, int M, int N, int K, float* pack) {
    static const float zeros[TILE_N] = {0};
    float* b_packed = pack + delta_line_((size_t)ceil_div(M, TILE_M) * TILE_M * K);
    for (int m = 0; m < M; m += TILE_M) { gemm_pack_a_tile_(pack + (size_t)m * K, gemm_from_(a, m, 0), M - m, K); }
    for (int x = 0; x < N; x += TILE_N) {
        const int n = gemm_min_(TILE_N, N - x);
        gemm_pack_b_panel_(b_packed, gemm_from_(b, 0, x), n, K);
        gemm_panel_(out + x, out_stride, start ? start + x : zeros, start ? start_stride : 0, pack, b_packed, 0, M, n,
                    K, NULL);
    }
}

// rows of a chunk in a panel TILE_N wide; those beyond n, up to a whole tile, and columns beyond N are 0
typedef struct {
    float row[DELTA_CHUNK + TILE_M][TILE_N];
} DeltaPanel_;

static inline void delta_panel_load_(DeltaPanel_* p, const float* x, size_t stride, int n, int N, int reversed) {
    memset(p, 0, sizeof *p);
    for (int i = 0; i < n; i++) { memcpy(p->row[i], x + (reversed ? n - 1 - i : i) * stride, sizeof(float) * N); }
}
static inline void delta_panel_store_(float* x, size_t stride, const DeltaPanel_* p, int n, int N, int reversed) {
    for (int i = 0; i < n; i++) { memcpy(x + (reversed ? n - 1 - i : i) * stride, p->row[i], sizeof(float) * N); }
}

// coefficients of TILE_M rows for every column: tile m / TILE_M is m * DELTA_CHUNK floats on
static inline void delta_coefficients_(float* packed, const float* square, int n) {
    for (int m = 0; m < n; m += TILE_M) {
        for (int j = 0; j < n; j++) {
            for (int i = 0; i < TILE_M; i++) {
                *packed++ = m + i < n ? square[(m + i) * DELTA_CHUNK + j] : 0.0f;
            }
        }
        packed += (DELTA_CHUNK - n) * TILE_M;
    }
}

// row += factor * x
static inline __attribute__((always_inline)) void delta_row_(float* row, float factor, const float* x) {
    for (int v = 0; v < TILE_N; v += VLANES) {
        v_store(row + v, v_madd(v_fill(factor), v_load(x + v), v_load(row + v)));
    }
}

// out_i goes on over j ascending of square_ij * x_j: those below the diagonal, on it, above it
static inline void delta_triangle_(float* out, const float* square, const float* x, int n, int N, int below, int on,
                                   int above, float* pack) {
    DeltaPanel_ o, panel;
    delta_coefficients_(pack, square, n);
    for (int c = 0; c < N; c += TILE_N) {
        const int width = gemm_min_(TILE_N, N - c);
        delta_panel_load_(&o, out + c, (size_t)N, n, width, 0);
        delta_panel_load_(&panel, x + c, (size_t)N, n, width, 0);
        for (int m = 0; m < n; m += TILE_M) {
            float *tile = o.row[m], *a = pack + m * DELTA_CHUNK;
            const int end = gemm_min_(m + TILE_M, n);
            if (below) { gemm_tile_(tile, TILE_N, tile, TILE_N, a, panel.row[0], width, m, NULL, 0); }
            for (int i = m; i < end; i++) {
                for (int j = m; j < end; j++) {
                    const int exists = j < i ? below : j == i ? on : above;
                    if (exists) { delta_row_(o.row[i], square[i * DELTA_CHUNK + j], panel.row[j]); }
                }
            }
            if (above && end < n) {
                gemm_tile_(tile, TILE_N, tile, TILE_N, a + end * TILE_M, panel.row[end], width, n - end, NULL, 0);
            }
        }
        delta_panel_store_(out + c, (size_t)N, &o, n, width, 0);
    }
}

// u_i goes on over j < i of square_ij * D_j, and D_i = beta_i * u_i. reversed: row 0 of the square is the last position
static inline void delta_solve_(float* u, float* D, const float* square, const float* beta, int n, int N, int reversed,
                                float* pack) {
    DeltaPanel_ o, panel;
    delta_coefficients_(pack, square, n);
    for (int c = 0; c < N; c += TILE_N) {
        const int width = gemm_min_(TILE_N, N - c);
        delta_panel_load_(&o, u + c, (size_t)N, n, width, reversed);
        memset(&panel, 0, sizeof panel);
        for (int m = 0; m < n; m += TILE_M) {
            float* tile = o.row[m];
            gemm_tile_(tile, TILE_N, tile, TILE_N, pack + m * DELTA_CHUNK, panel.row[0], width, m, NULL, 0);
            for (int i = m; i < gemm_min_(m + TILE_M, n); i++) {
                const float b = beta[reversed ? n - 1 - i : i];
                for (int j = m; j < i; j++) { delta_row_(o.row[i], square[i * DELTA_CHUNK + j], panel.row[j]); }
                for (int x = 0; x < width; x++) { panel.row[i][x] = b * o.row[i][x]; }
            }
        }
        delta_panel_store_(u + c, (size_t)N, &o, n, width, reversed);
        delta_panel_store_(D + c, (size_t)N, &panel, n, width, reversed);
    }
}

// out[i] = row i of a . row i of b, the chains of VLANES rows side by side
static inline void delta_row_dots_(float* out, const float* a, const float* b, int n, int C) {
    vfloat a_columns[VLANES], b_columns[VLANES];
    const int whole = C / VLANES * VLANES;
    for (int i = 0; i < n; i++) {
        out[i] = 0.0f;
        if (i % VLANES == 0 && i + VLANES <= n) {
            vfloat sum = v_fill(0.0f);
            for (int x = 0; x < whole; x += VLANES) {
                v_load_columns(a_columns, a + (size_t)i * C + x, (size_t)C);
                v_load_columns(b_columns, b + (size_t)i * C + x, (size_t)C);
                for (int l = 0; l < VLANES; l++) { sum = v_madd(a_columns[l], b_columns[l], sum); }
            }
            v_store(out + i, sum);
            i += VLANES - 1;
        }
    }
    for (int i = 0; i < n; i++) {
        const int from = i / VLANES * VLANES + VLANES <= n ? whole : 0;
        for (int x = from; x < C; x++) { out[i] = madd(a[(size_t)i * C + x], b[(size_t)i * C + x], out[i]); }
    }
}

static inline void delta_scale_(float* x, float factor, size_t n) {
    for (size_t i = 0; i < n; i++) { x[i] = factor * x[i]; }
}

static inline void delta_chunk_outputs_(DeltaChunk_* c, const float* S, float* pack) {
    const int n = c->n, DK = c->DK, DV = c->DV, C = DELTA_CHUNK;
    float square[DELTA_SQUARE_] = {0};
    const Matrix keys = gemm_transposed(c->k, (size_t)DK), state = gemm_matrix(S, (size_t)DV);
    delta_product_(c->P, (size_t)C, NULL, 0, gemm_matrix(c->q, (size_t)DK), keys, n, n, DK, pack);
    delta_product_(c->A, (size_t)C, NULL, 0, gemm_matrix(c->k, (size_t)DK), keys, n, n, DK, pack);
    for (int i = 0; i < n; i++) {
        for (int j = 0; j <= i; j++) {
            c->P[i * C + j] *= c->decay[i * C + j];
            c->A[i * C + j] *= c->decay[i * C + j];
            square[i * C + j] = -c->A[i * C + j];
        }
        for (int j = i + 1; j < n; j++) { square[i * C + j] = 0.0f; }
    }
    delta_product_(c->u, (size_t)DV, c->v, (size_t)DV, gemm_matrix(c->kg, (size_t)DK), state, n, DV, DK, pack);
    delta_solve_(c->u, c->D, square, c->beta, n, DV, 0, pack);
    delta_product_(c->o, (size_t)DV, NULL, 0, gemm_matrix(c->qg, (size_t)DK), state, n, DV, DK, pack);
    delta_triangle_(c->o, c->P, c->D, n, DV, 1, 1, 0, pack);
}

static inline void delta_chunk_state_(float* S, const DeltaChunk_* c, float* pack) {
    const int DK = c->DK, DV = c->DV;
    delta_scale_(S, c->eG[c->n - 1], (size_t)DK * DV);
    delta_product_(S, (size_t)DV, S, (size_t)DV, gemm_transposed(c->kf, (size_t)DK), gemm_matrix(c->D, (size_t)DV), DK,
                   DV, c->n, pack);
}

static inline void delta_chunk_backward_(DeltaChunk_* c, const float* S, float* dS, float* pack) {
    const int n = c->n, DK = c->DK, DV = c->DV, C = DELTA_CHUNK;
    const size_t k = (size_t)DK, v = (size_t)DV;
    float square[DELTA_SQUARE_] = {0}, symmetric[DELTA_SQUARE_] = {0}, dots[3][DELTA_CHUNK];
    float product = 0.0f, z_sum = 0.0f;
    float *dD = c->v, *minus_du = c->o;  // both have been used
    // rule 8
    delta_product_(dD, v, NULL, 0, gemm_matrix(c->kf, k), gemm_matrix(dS, v), n, DV, DK, pack);
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < n; j++) {
            square[i * C + j] = j >= i ? c->P[j * C + i] : 0.0f;
            symmetric[i * C + j] = j < i ? -c->A[(n - 1 - j) * C + n - 1 - i] : 0.0f;  // reversed
        }
    }
    delta_triangle_(dD, square, c->dout, n, DV, 0, 1, 1, pack);
    delta_solve_(dD, c->du, symmetric, c->beta, n, DV, 1, pack);
    delta_row_dots_(c->dbeta, dD, c->u, n, DV);
    for (int i = 0; i < n * DV; i++) { minus_du[i] = -c->du[i]; }
    // 10, 11
    const Matrix D = gemm_transposed(c->D, v), S_turned = gemm_transposed(S, v), dS_turned = gemm_transposed(dS, v);
    delta_product_(c->dP, (size_t)C, NULL, 0, gemm_matrix(c->dout, v), D, n, n, DV, pack);
    delta_product_(c->dA, (size_t)C, NULL, 0, gemm_matrix(minus_du, v), D, n, n, DV, pack);
    delta_product_(c->B, k, NULL, 0, gemm_matrix(c->dout, v), S_turned, n, DK, DV, pack);
    delta_product_(c->X, k, NULL, 0, gemm_matrix(c->du, v), S_turned, n, DK, DV, pack);
    delta_product_(c->Z, k, NULL, 0, gemm_matrix(c->D, v), dS_turned, n, DK, DV, pack);
    // 12, 13
    for (int i = 0; i < n; i++) {
        for (int d = 0; d < DK; d++) {
            const int id = i * DK + d;
            c->dq[id] = c->eG[i] * c->B[id];
            c->dk[id] = madd(-c->eG[i], c->X[id], c->fG[i] * c->Z[id]);
        }
        for (int j = 0; j <= i; j++) {
            square[i * C + j] = c->dP[i * C + j] * c->decay[i * C + j];
            symmetric[i * C + j] = symmetric[j * C + i] = c->dA[i * C + j] * c->decay[i * C + j];
        }
    }
    delta_triangle_(c->dq, square, c->k, n, DK, 1, 1, 0, pack);
    delta_triangle_(c->dk, symmetric, c->k, n, DK, 1, 0, 1, pack);
    for (int i = 0; i < n; i++) {
        for (int j = 0; j <= i; j++) { symmetric[j * C + i] = square[i * C + j]; }
    }
    delta_triangle_(c->dk, symmetric, c->q, n, DK, 0, 1, 1, pack);
    // 14, 15
    delta_row_dots_(dots[0], c->q, c->B, n, DK);
    delta_row_dots_(dots[1], c->k, c->X, n, DK);
    delta_row_dots_(dots[2], c->k, c->Z, n, DK);
    for (int i = 0; i < n; i++) {
        float a = c->eG[i] * dots[0][i];
        c->dG[i] = a - c->eG[i] * dots[1][i];
    }
    for (int j = 0; j < n; j++) {  // the chains of all i side by side: lanes are positions
        for (int i = 0; i < j; i++) {
            const int ji = j * C + i;
            c->dG[i] = madd(-c->dA[ji], c->A[ji], madd(-c->dP[ji], c->P[ji], c->dG[i]));
        }
        for (int i = j + 1; i < n; i++) {
            const int ij = i * C + j;
            c->dG[i] = madd(c->dA[ij], c->A[ij], madd(c->dP[ij], c->P[ij], c->dG[i]));
        }
    }
    for (int i = 0; i < n; i++) {
        const float z = c->fG[i] * dots[2][i];
        c->dG[i] = c->dG[i] - z;
        z_sum += z;
    }
    float columns[VLANES];
    for (int x = 0; x < DV; x += VLANES) {
        const int width = gemm_min_(VLANES, DV - x);
        vfloat sum = v_fill(0.0f);
        for (int d = 0; d < DK && width == VLANES; d++) {
            sum = v_madd(v_load(S + d * DV + x), v_load(dS + d * DV + x), sum);
        }
        v_store(columns, sum);
        for (int l = 0; l < width && width < VLANES; l++) {
            columns[l] = delta_dot_ref_(0.0f, S + x + l, v, dS + x + l, v, DK);
        }
        for (int l = 0; l < width; l++) { product += columns[l]; }
    }
    delta_chunk_dg_ref_(c, z_sum, product);
    // 9
    delta_scale_(dS, c->eG[n - 1], k * v);
    delta_product_(dS, v, dS, v, gemm_transposed(c->qg, k), gemm_matrix(c->dout, v), DK, DV, n, pack);
    delta_product_(dS, v, dS, v, gemm_transposed(c->kg, k), gemm_matrix(c->du, v), DK, DV, n, pack);
}

// ---- fast C: steps. Lanes are columns, threads heads ----

// as delta_step_ref_; u (DV): room
static inline void delta_step_(float* o, float* S, float* u, const float* q, const float* k, const float* v, float g,
                               float beta, int DK, int DV) {
    const float a = fm_exp(g);
    for (int x = 0; x < DV; x++) { u[x] = v[x], o[x] = 0.0f; }
    for (int d = 0; d < DK; d++) {
        const float *row = S + (size_t)d * DV, minus_k = -k[d];
        #pragma omp simd
        for (int x = 0; x < DV; x++) { u[x] = madd(minus_k, a * row[x], u[x]); }
    }
    for (int x = 0; x < DV; x++) { u[x] = beta * u[x]; }
    for (int d = 0; d < DK; d++) {
        float *row = S + (size_t)d * DV, k_d = k[d], q_d = q[d];
        #pragma omp simd
        for (int x = 0; x < DV; x++) {
            row[x] = madd(k_d, u[x], a * row[x]);
            o[x] = madd(row[x], q_d, o[x]);
        }
    }
}

static inline void delta_steps_forward(float* o, float* state, DeltaInputs in, const DeltaShape* s,
                                       const Device* dev) {
    const size_t n_state = delta_state_floats_(s), n_thread = delta_line_(n_state) + delta_line_((size_t)s->DV);
    float* workspace = (float*)device_workspace(dev, sizeof(float) * n_thread * (size_t)dev->n_threads);
    #pragma omp parallel for
    for (int bh = 0; bh < s->B * s->Hv; bh++) {
        float* S = workspace + n_thread * (size_t)thread_number(), *u = S + delta_line_(n_state);
        const int b = bh / s->Hv, h = bh % s->Hv;
        if (state) { S = state + bh * n_state; } else { delta_zero_(S, n_state); }
        for (int t = 0; t < s->T; t++) {
            const size_t qk = delta_qk_(s, b, t, h), v = delta_v_(s, b, t, h), g = delta_g_(s, b, t, h);
            if (delta_starts_(s, b, t)) { delta_zero_(S, n_state); }
            delta_step_(o + v, S, u, in.q + qk, in.k + qk, in.v + v, in.g[g], in.beta[g], s->DK, s->DV);
        }
    }
}

// ---- fast C: chunks, whole rows ----

// floats of a thread: a chunk, S and dS, packed operands
static inline size_t delta_struct_floats_(void) { return delta_line_(sizeof(DeltaChunk_) / sizeof(float) + 1); }
static inline size_t delta_thread_floats_(const DeltaShape* s) {
    return delta_struct_floats_() + delta_line_(delta_chunk_floats_(s)) + 2 * delta_line_(delta_state_floats_(s)) +
           delta_line_(delta_pack_floats_(s));
}
// scratch that delta_chunks_forward and delta_chunks_backward ask device_workspace for
static inline size_t delta_workspace_bytes(const DeltaShape* s, int n_threads) {
    return sizeof(float) * delta_thread_floats_(s) * (size_t)n_threads;
}

typedef struct {
    DeltaChunk_* c;
    float *S, *dS, *pack;
} DeltaThread_;

static inline DeltaThread_ delta_thread_(float* workspace, const DeltaShape* s) {
    DeltaThread_ t;
    float* memory = workspace + delta_thread_floats_(s) * (size_t)thread_number();
    t.c = (DeltaChunk_*)(void*)memory;
    delta_chunk_init_(t.c, memory + delta_struct_floats_(), s);
    t.S = memory + delta_struct_floats_() + delta_line_(delta_chunk_floats_(s));
    t.dS = t.S + delta_line_(delta_state_floats_(s));
    t.pack = t.dS + delta_line_(delta_state_floats_(s));
    return t;
}

static inline void delta_forward_head_(float* o, float* states, float* state, DeltaInputs in, const DeltaThread_* w,
                                       const DeltaShape* s, int b, int h) {
    const size_t n_state = delta_state_floats_(s);
    float* state_h = state ? state + ((size_t)b * s->Hv + h) * n_state : NULL;
    if (state_h) { memcpy(w->S, state_h, sizeof(float) * n_state); } else { delta_zero_(w->S, n_state); }
    for (int t = 0; t < s->T; t += w->c->n) {
        if (delta_starts_(s, b, t)) {
            delta_zero_(w->S, n_state);
        } else if (states) {
            memcpy(states + delta_slot_(s, b, t, h), w->S, sizeof(float) * n_state);
        }
        delta_chunk_load_(w->c, in, NULL, s, b, h, t);
        delta_chunk_outputs_(w->c, w->S, w->pack);
        for (int i = 0; i < w->c->n; i++) {
            memcpy(o + delta_v_(s, b, t + i, h), w->c->o + i * s->DV, sizeof(float) * (size_t)s->DV);
        }
        delta_chunk_state_(w->S, w->c, w->pack);
    }
    if (state_h) { memcpy(state_h, w->S, sizeof(float) * n_state); }
}

static inline void delta_chunks_forward(float* o, float* states, float* state, DeltaInputs in, const DeltaShape* s,
                                        const Device* dev) {
    float* workspace = (float*)device_workspace(dev, delta_workspace_bytes(s, dev->n_threads));
    #pragma omp parallel for schedule(dynamic)
    for (int bh = 0; bh < s->B * s->Hv; bh++) {
        const DeltaThread_ w = delta_thread_(workspace, s);
        delta_forward_head_(o, states, state, in, &w, s, bh / s->Hv, bh % s->Hv);
    }
}

static inline void delta_backward_head_(DeltaGradients d, float* dstate, const float* dout, const float* states,
                                        DeltaInputs in, const DeltaThread_* w, const DeltaShape* s, int b, int h) {
    const size_t n_state = delta_state_floats_(s);
    float* dstate_h = dstate ? dstate + ((size_t)b * s->Hv + h) * n_state : NULL;
    if (dstate_h) { memcpy(w->dS, dstate_h, sizeof(float) * n_state); } else { delta_zero_(w->dS, n_state); }
    for (int end = s->T, t; end > 0; end = t) {
        t = delta_chunk_before_(s, b, end);
        const int fresh = delta_starts_(s, b, t);
        if (fresh) { delta_zero_(w->S, n_state); }
        const float* S = fresh ? w->S : states + delta_slot_(s, b, t, h);
        delta_chunk_load_(w->c, in, dout, s, b, h, t);
        delta_chunk_outputs_(w->c, S, w->pack);
        delta_chunk_backward_(w->c, S, w->dS, w->pack);
        delta_chunk_store_(d, w->c, s, b, h, t);
        if (fresh) { delta_zero_(w->dS, n_state); }
    }
    if (dstate_h) { memcpy(dstate_h, w->dS, sizeof(float) * n_state); }
}

static inline void delta_chunks_backward(DeltaGradients d, float* dstate, const float* dout, const float* states,
                                         DeltaInputs in, const DeltaShape* s, const Device* dev) {
    float* workspace = (float*)device_workspace(dev, delta_workspace_bytes(s, dev->n_threads));
    #pragma omp parallel for schedule(dynamic)
    for (int bk = 0; bk < s->B * s->Hk; bk++) {
        const DeltaThread_ w = delta_thread_(workspace, s);
        const int R = s->Hv / s->Hk;
        for (int r = 0; r < R; r++) {
            delta_backward_head_(d, dstate, dout, states, in, &w, s, bk / s->Hk, bk % s->Hk * R + r);
        }
    }
}
#else
#include "gated_delta_kernels.h"
#endif  // __CUDACC__
#endif  // LLMC_GATED_DELTA_H
