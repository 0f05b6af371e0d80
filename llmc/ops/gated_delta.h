/*
Gated delta rule, the recurrence of Qwen3.6's linear attention (Gated DeltaNet). Each of Hv value heads has a state S, a
table (DK, DV) that answers a key with a value. With q and k already normalised (l2norm.h):
    S~ = exp(g_t) S_(t-1)      delta = beta_t (v_t - S~' k_t)      S_t = S~ + k_t delta'      o_t = S_t' q_t
    q, k (B, T, Hk, DK)   v, o (B, T, Hv, DV)   g, beta (B, T, Hv)   value head h has key head h / (Hv / Hk)
    state (B, Hv, DK, DV)   S before the first position, and afterwards S after the last; NULL: 0 before each row
    starts (B, T)   1 where a document begins: S before it is 0. NULL: nowhere. g is finite, and at most 0
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
Cost:   flops for each position and value head, C = DELTA_CHUNK: forward 6 DK DV + C (4 DK + 2 DV), backward
        14 DK DV + C (7 DK + 7 DV), whole squares counted for products of keys. Memory: `states` keeps S before each
        chunk: DK DV / C floats for each position and value head; backward makes all else again.
Order:  every sum is a chain of madd and terms outside the stated range do not exist. Chunks (the reference's rule
        numbers): G by adding. 2, 3: over DK from 0; A and P: times decay. 4: qg = q * exp(G), kg = k * exp(G), kf = k *
        exp(G_last - G) are rounded. 5: u_i from v_i over DK of -kg * S, goes on over j ascending of -A_ij * D_j. 6: o_i
        from 0 over DK of qg * S, goes on over j ascending. 7: from exp(G_last) * S over i ascending. 8: dD_j from 0
        over DK of kf * dS+, goes on over i ascending of P_ij * do_i, goes on over i DESCENDING of -A_ij * du_i; dbeta
        over DV. 9: dS from exp(G_last) * dS+ over i of qg * do, goes on over i of -kg * du. 10, 11: over DV from 0. 12:
        dq from exp(G_i) * B_i. 13: dk from exp(G_last - G_i) * Z_i, madd(-exp(G_i), X_i, .), goes on over j != i
        ascending of N, goes on over j >= i of M. 14: as written from the left, see the loop; s = <S, dS+> over DK for
        each column, these added over DV. 15: descending from 0. 16: value heads of a key head are added from 0.
        Steps: St = exp(g) * S; u from v over DK of -k * St; S = madd(k, D, St); o over DK from 0. Their backward: dS =
        madd(q, do, dS); dq over DV; dk over DV of dS * D, goes on over DV of St * -dv; dD over DK; dbeta over DV; dg
        over DV, these added over DK. Threads share heads, lanes columns: neither changes a bit.
Error:  fp32 against fp64 at DK 12, DV 7, T 130, |v| < 1, unit keys: |o| and |S| within 8e-6, gradients 4e-5, in both
        forms. Strong decay costs the chunks more: exp(G_i - G_j) has |G_i| 2^-24 of relative error, 2.4e-5 where G falls
        to -400 in a chunk; steps have no such term.
Source: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464; spec qwen36.md 2.3, 4.1 (steps), 4.2 and 4.3 (chunks)
*/
#ifndef LLMC_GATED_DELTA_H
#define LLMC_GATED_DELTA_H
#include "../core/device.h"  // Device, device_workspace, thread_number, ceil_div
#include "../core/fmath.h"   // fm_exp
#include "../core/madd.h"    // madd
#include <string.h>

enum { DELTA_CHUNK = 64 };

typedef struct {
    int B, T, Hk, Hv, DK, DV;
    const unsigned char* starts;
} DeltaShape;

// what both passes read
typedef struct {
    const float *q, *k, *v, *g, *beta;
} DeltaInputs;

// what backward is asked for; NULL: nobody asks
typedef struct {
    float *dq, *dk, *dv, *dg, *dbeta;
} DeltaGradients;

static inline size_t delta_state_floats_(const DeltaShape* s) { return (size_t)s->DK * (size_t)s->DV; }
// floats of `states`
static inline size_t delta_states_floats(const DeltaShape* s) {
    return (size_t)s->B * (size_t)ceil_div(s->T, DELTA_CHUNK) * (size_t)s->Hv * delta_state_floats_(s);
}
// where position t of row b begins in q and k, v and o, g and beta, at this value head
static inline size_t delta_qk_(const DeltaShape* s, int b, int t, int h) {
    return (((size_t)b * s->T + t) * s->Hk + h / (s->Hv / s->Hk)) * s->DK;
}
static inline size_t delta_v_(const DeltaShape* s, int b, int t, int h) {
    return (((size_t)b * s->T + t) * s->Hv + h) * s->DV;
}
static inline size_t delta_g_(const DeltaShape* s, int b, int t, int h) { return ((size_t)b * s->T + t) * s->Hv + h; }
static inline int delta_starts_(const DeltaShape* s, int b, int t) {
    return s->starts && s->starts[(size_t)b * s->T + t];
}
// how many positions the chunk has that begins at t
static inline int delta_chunk_length_(const DeltaShape* s, int b, int t) {
    int n = 1;
    while (n < DELTA_CHUNK && t + n < s->T && !delta_starts_(s, b, t + n)) { n++; }
    return n;
}
// Where `states` has S before the chunk that begins at t. A chunk that goes on follows a whole one of its document, so
// no two of them begin in the same DELTA_CHUNK positions; one that begins a document needs no place
static inline size_t delta_slot_(const DeltaShape* s, int b, int t, int h) {
    return (((size_t)b * ceil_div(s->T, DELTA_CHUNK) + t / DELTA_CHUNK) * s->Hv + h) * delta_state_floats_(s);
}
static inline void delta_zero_(float* x, size_t n) {
    for (size_t i = 0; i < n; i++) { x[i] = 0.0f; }
}
// a value head's share of the gradient of its key head
static inline void delta_add_head_(float* dx, const float* x, const DeltaShape* s, int h, int n) {
    for (int d = 0; d < n; d++) { dx[d] = (h % (s->Hv / s->Hk) == 0 ? 0.0f : dx[d]) + x[d]; }
}

// ---- plain C: read this first; it defines every bit ----

static inline float delta_dot_ref_(float sum, const float* a, size_t a_step, const float* b, size_t b_step, int n) {
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
    *dg = 0.0f;
    for (int d = 0; d < DK; d++) {
        float sum = 0.0f;
        for (int c = 0; c < DV; c++) {
            const int i = d * DV + c;
            dk[d] = madd(decayed[i], -dv[c], dk[d]);
            D[i] = madd(k[d], -dv[c], D[i]);
            sum = madd(D[i], decayed[i], sum);
            D[i] = a * D[i];
        }
        *dg += sum;
    }
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
    float *q, *k, *qg, *kg, *kf;        // (n, DK)
    float *B, *X, *Z, *dq, *dk;         // (n, DK)
    float *v, *u, *D, *o, *dout, *du;   // (n, DV)
} DeltaChunk_;

enum { DELTA_K_ARRAYS_ = 10, DELTA_V_ARRAYS_ = 6 };

static inline size_t delta_chunk_floats_(const DeltaShape* s) {
    return (size_t)DELTA_CHUNK * (size_t)(DELTA_K_ARRAYS_ * s->DK + DELTA_V_ARRAYS_ * s->DV);
}

static inline void delta_chunk_init_(DeltaChunk_* c, float* memory, const DeltaShape* s) {
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
        for (int j = 0; j < i; j++) { c->decay[i * DELTA_CHUNK + j] = fm_exp(G[i] - G[j]); }
        c->decay[i * DELTA_CHUNK + i] = 1.0f;
        for (int d = 0; d < s->DK; d++) {
            const int id = i * s->DK + d;
            c->qg[id] = c->q[id] * c->eG[i];
            c->kg[id] = c->k[id] * c->eG[i];
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
            for (int d = 0; d < DK; d++) { u = madd(-c->kg[i * DK + d], S[d * DV + x], u); }
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

// rules 10 to 13
static inline void delta_chunk_keys_ref_(DeltaChunk_* c, const float* S, const float* dS) {
    const int DK = c->DK, DV = c->DV, C = DELTA_CHUNK, n = c->n;
    for (int i = 0; i < n; i++) {
        for (int j = 0; j <= i; j++) {
            const float* D_j = c->D + j * DV;
            float dA = 0.0f;
            for (int x = 0; x < DV && j < i; x++) { dA = madd(-c->du[i * DV + x], D_j[x], dA); }
            c->dA[i * C + j] = dA;
            c->dP[i * C + j] = delta_dot_ref_(0.0f, c->dout + i * DV, 1, D_j, 1, DV);
        }
        for (int d = 0; d < DK; d++) {
            c->B[i * DK + d] = delta_dot_ref_(0.0f, S + d * DV, 1, c->dout + i * DV, 1, DV);
            c->X[i * DK + d] = delta_dot_ref_(0.0f, S + d * DV, 1, c->du + i * DV, 1, DV);
            c->Z[i * DK + d] = delta_dot_ref_(0.0f, dS + d * DV, 1, c->D + i * DV, 1, DV);
        }
    }
    for (int i = 0; i < n; i++) {
        for (int d = 0; d < DK; d++) {
            const int id = i * DK + d;
            float dq = c->eG[i] * c->B[id], dk = madd(-c->eG[i], c->X[id], c->fG[i] * c->Z[id]);
            for (int j = 0; j <= i; j++) { dq = madd(c->dP[i * C + j] * c->decay[i * C + j], c->k[j * DK + d], dq); }
            for (int j = 0; j < i; j++) { dk = madd(c->dA[i * C + j] * c->decay[i * C + j], c->k[j * DK + d], dk); }
            for (int j = i + 1; j < n; j++) { dk = madd(c->dA[j * C + i] * c->decay[j * C + i], c->k[j * DK + d], dk); }
            for (int j = i; j < n; j++) { dk = madd(c->dP[j * C + i] * c->decay[j * C + i], c->q[j * DK + d], dk); }
            c->dq[id] = dq, c->dk[id] = dk;
        }
    }
}

// rules 14 and 15, by S and dS+: dG becomes dg
static inline void delta_chunk_decay_ref_(DeltaChunk_* c, const float* S, const float* dS) {
    const int DK = c->DK, DV = c->DV, C = DELTA_CHUNK, n = c->n;
    float z_sum = 0.0f, product = 0.0f;
    for (int i = 0; i < n; i++) {
        const size_t at = (size_t)i * DK;
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
        z_sum += z;
    }
    for (int x = 0; x < DV; x++) { product += delta_dot_ref_(0.0f, S + x, (size_t)DV, dS + x, (size_t)DV, DK); }
    c->dG[n - 1] = c->dG[n - 1] + z_sum;
    c->dG[n - 1] = c->dG[n - 1] + c->eG[n - 1] * product;
    float dg = 0.0f;
    for (int i = n - 1; i >= 0; i--) {
        dg += c->dG[i];
        c->dG[i] = dg;
    }
}

// rule 9: dS+ becomes dS
static inline void delta_chunk_dstate_ref_(float* dS, const DeltaChunk_* c) {
    for (int d = 0; d < c->DK; d++) {
        for (int x = 0; x < c->DV; x++) {
            float* s = dS + d * c->DV + x;
            float sum = c->eG[c->n - 1] * *s;
            sum = delta_dot_ref_(sum, c->qg + d, (size_t)c->DK, c->dout + x, (size_t)c->DV, c->n);
            for (int i = 0; i < c->n; i++) { sum = madd(-c->kg[i * c->DK + d], c->du[i * c->DV + x], sum); }
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
#endif  // LLMC_GATED_DELTA_H
