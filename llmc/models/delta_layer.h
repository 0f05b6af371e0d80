/*
Linear attention by the gated delta rule, as a layer of Qwen3.6 has it in place of attention: every head carries a state
from position to position, so a text costs the same for each position, however long it is. Parts of the forward and
backward pass of a layer, and lines for the tables of activations:
    (q, k, v) = silu(conv1d(inp Wqkv^T))     q, k to length 1 (l2norm.h), q / sqrt(DK)
    beta, g = gates of inp Wb^T, inp Wa^T (delta_gates.h)     o = the rule's outputs (gated_delta.h)
    out = (rmsnorm(o) silu(inp Wz^T)) Wout^T, the norm head by head
    DeltaTensors, DeltaStatistics   what a pass leaves behind; a trainer has both in its own structs
    delta_tensor_rows, delta_statistic_rows   their lines
    DeltaPass              one layer: where its parameters and activations are
    delta_layer_forward    from inp (N, D) to out (N, D)
    delta_layer_again      before backward: what forward has not kept for it
    delta_layer_backward   from dout (N, D) to the gradients of all parameters and of inp, dinp (N, D), written
    delta_layer_flops      what the rule costs; delta_room_elements: scratch of --tp
    delta_layer_hands_on   bytes that a rank of --cp sends to the next in a layer, and as many back but for the halo
Kept for backward are the products with inp, o, and the state before each chunk; convolution, norms and gates, which
cost little, are computed again. In generation a text keeps its state and the last K - 1 inputs of the convolution, and
goes by steps: a text has the same bits in whatever pieces it comes, which are not quite those of the chunks.
With --cp a rank has one chunk of each row, a multiple of DELTA_CHUNK positions (context_ranks.h): the last K - 1 inputs
of the convolution, a halo, and the state at its end go to the next rank, and what is asked of them comes back. A rank
waits for them where it needs them: before its convolution and before its rule, not before its products.
Cost:   the products, and what gated_delta.h says of the rule; all else is bound by memory: in a training step of 512
        channels on a CPU (dev/bench/qwen36_step.py) the rule takes 4% of the time, the convolutions 2%.
Order:  dinp chains over the outputs of Wqkv, goes on over those of Wz, Wb, Wa.
Error:  of texts against whole rows: the rounding of two forms of the rule (gated_delta.h), which the norm of o enlarges
        where heads say little; test_qwen36.c bounds it for two such layers. With --cp forward has the bits of one rank,
        but for documents whose chunks a rank's end cuts.
Source: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464; doc/qwen36.md "Formula"
*/
#ifndef LLMC_DELTA_LAYER_H
#define LLMC_DELTA_LAYER_H
#include "../core/floatx.h"         // floatX
#include "../core/tensor.h"         // Tensor, activation
#include "../ops/causal_conv1d.h"   // conv1d_forward, conv1d_backward, conv1d_history
#include "../ops/delta_gates.h"     // delta_gates_forward, delta_gates_backward
#ifdef __CUDACC__
#include "../ops/gated_delta_kernels.h"  // delta_chunks_forward, delta_steps_forward
#else
#include "../ops/gated_delta.h"     // delta_chunks_forward, delta_chunks_backward, delta_steps_forward
#endif
#include "../ops/l2norm.h"          // l2norm_forward, l2norm_backward
#include "../ops/rmsnorm.h"         // rmsnorm_forward, rmsnorm_backward
#include "../ops/silu.h"            // gate_forward, gate_backward
#include "../ranks/carried_line.h"  // CarriedLine, carried_bring, carried_hand
#include "activations.h"            // state_activation
#include "gathered.h"               // heads_gather, heads_take
#include "linear.h"                 // Linear, linear_chain
#include "token_batch.h"            // TokenBatch, token_batch_starts

#define DELTA_NORM_EPS 1e-6f  // of l2norm.h, whatever the model's other norms have

// from `dvalues` on the gradients on their way back
typedef struct {
    floatX *qkv, *z, *b, *a, *conv_q, *conv_k, *conv_v, *delta_q, *delta_k, *delta_v, *unit_q, *unit_k, *o, *o_norm,
        *gated, *history_q, *history_k, *history_v, *halo, *next_halo, *dvalues, *d_o, *dq, *dk, *db, *da;
} DeltaTensors;

// what must not lose digits, always float
typedef struct {
    float *q_r, *k_r, *g, *beta, *o_rstd, *states, *state, *given, *next_state, *dg, *dbeta, *ahead, *next_ahead,
        *dstate;
} DeltaStatistics;

typedef struct {
    int Hk, Hv, DK, DV, K;  // heads of keys, of values; channels of each; taps of the convolution
    float eps;              // of the norm of o
    int L;                  // layers of the model; those of kind "L" are such
    const char* kinds;
    const RankGroup* cp;    // with --cp: who has which positions; NULL: a rank has whole rows
} DeltaSizes;

// ---- tables ----

static inline int delta_keys_(const DeltaSizes* s) { return s->Hk * s->DK; }
static inline int delta_values_(const DeltaSizes* s) { return s->Hv * s->DV; }
// of a row: the last inputs of the convolution; the states of all heads
static inline int delta_halo_(const DeltaSizes* s) { return (s->K - 1) * (2 * delta_keys_(s) + delta_values_(s)); }
static inline int delta_state_(const DeltaSizes* s) { return s->Hv * s->DK * s->DV; }

// a line for the linear layers, or with `layers` 0 for all of them in turn
static inline Tensor delta_layer_row_(const DeltaSizes* s, const char* name, size_t field, int layers, int rows,
                                int columns) {
    return kind_activation(s->kinds, "L", name, field, layers, rows, columns);
}

// what a text keeps; B of them
static inline Tensor delta_layer_state_(const DeltaSizes* s, const char* name, size_t field, int B, int columns) {
    Tensor t = state_activation(name, field, s->L, B, columns);
    tensor_in_kinds(&t, s->kinds, "L");
    return t;
}

// Lines of N positions behind t; `at` is the offset of DeltaTensors in the struct of all. L_kept: as many layers as
// keep what backward needs. Returns the end
static inline Tensor* delta_tensor_rows(Tensor* t, size_t at, const DeltaSizes* s, int B, int N, int L_kept,
                                        Purpose purpose) {
    const int keys = delta_keys_(s), values = delta_values_(s), K1 = s->K - 1;
    const int N_train = purpose == TO_TRAIN ? N : 0, N_texts = purpose == TO_GENERATE ? B : 0;
    const int B_line = s->cp ? B : 0, L_line = purpose == TO_TRAIN ? s->L : 0;
#define FIELD(name) #name, at + offsetof(DeltaTensors, name)
    *t++ = delta_layer_row_(s, FIELD(qkv),     L_kept, N, 2 * keys + values);  // to be convolved; then its gradient
    *t++ = delta_layer_row_(s, FIELD(z),       L_kept, N, values);             // then its gradient
    *t++ = delta_layer_row_(s, FIELD(b),       L_kept, N, s->Hv);
    *t++ = delta_layer_row_(s, FIELD(a),       L_kept, N, s->Hv);
    *t++ = delta_layer_row_(s, FIELD(conv_q),  0, N, keys);    // before silu
    *t++ = delta_layer_row_(s, FIELD(conv_k),  0, N, keys);
    *t++ = delta_layer_row_(s, FIELD(conv_v),  0, N, values);
    *t++ = delta_layer_row_(s, FIELD(delta_q), 0, N, keys);    // behind it
    *t++ = delta_layer_row_(s, FIELD(delta_k), 0, N, keys);
    *t++ = delta_layer_row_(s, FIELD(delta_v), 0, N, values);
    *t++ = delta_layer_row_(s, FIELD(unit_q),  0, N, keys);    // of length 1 / sqrt(DK)
    *t++ = delta_layer_row_(s, FIELD(unit_k),  0, N, keys);    // of length 1
    *t++ = delta_layer_row_(s, FIELD(o),       L_kept, N, values);
    *t++ = delta_layer_row_(s, FIELD(o_norm),  0, N, values);
    *t++ = delta_layer_row_(s, FIELD(gated),   0, N, values);
    if (N_texts > 0) {
        *t++ = delta_layer_state_(s, FIELD(history_q), B, K1 * keys);
        *t++ = delta_layer_state_(s, FIELD(history_k), B, K1 * keys);
        *t++ = delta_layer_state_(s, FIELD(history_v), B, K1 * values);
    }
    *t++ = delta_layer_row_(s, FIELD(halo),    L_line, B_line, delta_halo_(s));  // what stands before these positions,
    *t++ = delta_layer_row_(s, FIELD(next_halo), 0, B_line, delta_halo_(s));     // and before those of the next rank
    *t++ = delta_layer_row_(s, FIELD(dvalues), 0, N_train, values);  // of gated, of o_norm, then of delta_v
    *t++ = delta_layer_row_(s, FIELD(d_o),     0, N_train, values);  // of o
    *t++ = delta_layer_row_(s, FIELD(dq),      0, N_train, keys);
    *t++ = delta_layer_row_(s, FIELD(dk),      0, N_train, keys);
    *t++ = delta_layer_row_(s, FIELD(db),      0, N_train, s->Hv);
    *t++ = delta_layer_row_(s, FIELD(da),      0, N_train, s->Hv);
#undef FIELD
    return t;
}

// whose states are kept, of B rows of T positions
static inline int delta_most_chunks(int B, int T, Purpose purpose) {
    return purpose == TO_TRAIN ? B * (int)ceil_div(T, DELTA_CHUNK) : 0;
}

// B rows of T positions, which this rank has
static inline Tensor* delta_statistic_rows(Tensor* t, size_t at, const DeltaSizes* s, int B, int T, int N, int L_kept,
                                           Purpose purpose) {
    const int N_train = purpose == TO_TRAIN ? N : 0, state = delta_state_(s);
    const int chunks = delta_most_chunks(B, T, purpose);
    const int B_line = s->cp ? B : 0, B_asked = purpose == TO_TRAIN ? B_line : 0;
    const int L_line = purpose == TO_TRAIN && L_kept == 0 ? s->L : 0;  // forward comes twice
#define FIELD(name) #name, at + offsetof(DeltaStatistics, name)
    *t++ = delta_layer_row_(s, FIELD(q_r),    0, N, s->Hk);
    *t++ = delta_layer_row_(s, FIELD(k_r),    0, N, s->Hk);
    *t++ = delta_layer_row_(s, FIELD(g),      0, N, s->Hv);
    *t++ = delta_layer_row_(s, FIELD(beta),   0, N, s->Hv);
    *t++ = delta_layer_row_(s, FIELD(o_rstd), 0, N, s->Hv);
    *t++ = delta_layer_row_(s, FIELD(states), L_kept, chunks, state);  // before each chunk
    if (purpose == TO_GENERATE) { *t++ = delta_layer_state_(s, FIELD(state), B, state); }
    *t++ = delta_layer_row_(s, FIELD(given),      L_line, B_line, state);  // at the end of the rank before
    *t++ = delta_layer_row_(s, FIELD(next_state), 0, B_line, state);
    *t++ = delta_layer_row_(s, FIELD(dg),     0, N_train, s->Hv);
    *t++ = delta_layer_row_(s, FIELD(dbeta),  0, N_train, s->Hv);
    *t++ = delta_layer_row_(s, FIELD(ahead),      0, B_asked, delta_halo_(s));  // the next rank's, of its halo,
    *t++ = delta_layer_row_(s, FIELD(next_ahead), 0, B_asked, delta_halo_(s));  // and this one's
    *t++ = delta_layer_row_(s, FIELD(dstate),     0, B_asked, state);
#undef FIELD
    return t;
}

// with --tp, of N positions: scratch of the norm of o. Hv: value heads of all ranks
static inline size_t delta_room_elements(int N, int Hv, int DV, const RankGroup* x) {
    return heads_room_elements(N, Hv, DV, x);
}

// of a position, forward and backward: the rule of gated_delta.h, whose backward makes the forward again
static inline double delta_layer_flops(int Hv, int DK, int DV) {
    const double C = DELTA_CHUNK, keys = DK, values = DV;
    return Hv * (22.0 * keys * values + C * (11.0 * keys + 10.0 * values));
}

// of B rows; asked: back
static inline double delta_layer_hands_on(const DeltaSizes* s, int B, int asked) {
    const double halo = (asked ? sizeof(float) : sizeof(floatX)) * (double)delta_halo_(s);
    return B * (halo + sizeof(float) * (double)delta_state_(s));
}

// ---- a layer ----

// the gradients are needed in backward alone
typedef struct {
    DeltaSizes size;
    DeltaTensors a;
    DeltaStatistics s;
    const floatX* inp;  // (N, D)
    Linear qkv, z, b, alpha, out;
    const floatX *conv, *A_log, *dt_bias, *o_norm;
    LinearGradients dqkv, dz, db, dalpha, dout;
    float *dconv, *dA_log, *ddt_bias, *do_norm;
    const RankGroup* tp;  // with --tp heads, and all sizes, are those of this rank
    floatX* room;         // of --tp: delta_room_elements
    const TokenBatch* batch;
    CarriedLine line; // with --cp: whom halo and state come from and go to; a layer that is computed again has them
    int most_chunks;  // whose states there is room for; 0: no backward follows
    int N;
} DeltaPass;

#ifdef __CUDACC__
typedef DeltaInputsOf<floatX> DeltaLayerInputs_;
typedef DeltaGradientsOf<floatX> DeltaLayerGradients_;
#else
typedef DeltaInputs DeltaLayerInputs_;
typedef DeltaGradients DeltaLayerGradients_;
#endif

// T positions of each of B rows, from position `first` of the pass on
typedef struct {
    size_t first;
    int B, T;
    const unsigned char* starts;
} DeltaRows_;

// of a batch; its rows are what begins and ends, with --cp this rank's piece of them
static inline DeltaRows_ delta_batch_rows_(const DeltaPass* p) {
    const DeltaRows_ rows = {0, p->batch->rows.B, p->batch->rows.n, token_batch_starts(p->batch, 0)};
    assert(p->batch->rows.n_chunks == 1);
    return rows;
}

// are there positions of other ranks before, or behind?
static inline int delta_goes_on_(const DeltaPass* p) { return p->size.cp && p->size.cp->place > 0; }
static inline int delta_is_gone_on_(const DeltaPass* p) {
    return p->size.cp && p->size.cp->place + 1 < p->size.cp->size;
}

static inline DeltaShape delta_rows_shape_(const DeltaPass* p, DeltaRows_ rows) {
    const DeltaSizes* sizes = &p->size;
    const DeltaShape shape = {rows.B, rows.T, sizes->Hk, sizes->Hv, sizes->DK, sizes->DV, rows.starts};
    return shape;
}

static inline DeltaLayerInputs_ delta_layer_inputs_(const DeltaPass* p, size_t first) {
    const size_t keys = first * (size_t)delta_keys_(&p->size), heads = first * (size_t)p->size.Hv;
    const DeltaLayerInputs_ in = {p->a.unit_q + keys, p->a.unit_k + keys, p->a.delta_v + heads * (size_t)p->size.DV,
                                  p->s.g + heads, p->s.beta + heads};
    return in;
}

// Channels of the convolution: queries, keys or values. Of one array of weights and one of inputs each has its part
typedef struct {
    size_t at;   // channels before these
    int C;
    floatX *conv, *out, *history, *dout;
} DeltaChannels_;

enum { DELTA_PARTS_ = 3 };

static inline DeltaChannels_ delta_channels_(const DeltaPass* p, int part) {
    const DeltaTensors* a = &p->a;
    const int keys = delta_keys_(&p->size), values = delta_values_(&p->size);
    const DeltaChannels_ all[DELTA_PARTS_] = {
        {0, keys, a->conv_q, a->delta_q, a->history_q, a->dq},
        {(size_t)keys, keys, a->conv_k, a->delta_k, a->history_k, a->dk},
        {2 * (size_t)keys, values, a->conv_v, a->delta_v, a->history_v, a->dvalues},
    };
    return all[part];
}

static inline size_t delta_qkv_row_(const DeltaPass* p) {
    return 2 * (size_t)delta_keys_(&p->size) + (size_t)delta_values_(&p->size);
}

// where a halo of so many rows, or what is asked of it, has these channels
static inline size_t delta_halo_at_(const DeltaPass* p, const DeltaChannels_* c, int B) {
    return (size_t)B * (size_t)(p->size.K - 1) * c->at;
}

// what stands before these rows: of a text, or text -1, of a batch; NULL: nothing
static inline floatX* delta_before_(const DeltaPass* p, const DeltaChannels_* c, DeltaRows_ rows, int text) {
    if (text >= 0) { return c->history + (size_t)text * (size_t)(p->size.K - 1) * (size_t)c->C; }
    return delta_goes_on_(p) ? p->a.halo + delta_halo_at_(p, c, rows.B) : NULL;
}

// with text >= 0: that row of the cache has what came before
static inline void delta_convolve_(const DeltaPass* p, DeltaRows_ rows, int text, const Device* dev) {
    const size_t stride = delta_qkv_row_(p);
    const int K = p->size.K;
    for (int part = 0; part < DELTA_PARTS_; part++) {
        const DeltaChannels_ c = delta_channels_(p, part);
        const size_t at = rows.first * (size_t)c.C;
        const floatX* inp = p->a.qkv + rows.first * stride + c.at;
        floatX* history = delta_before_(p, &c, rows, text);
        conv1d_forward(c.conv + at, c.out + at, inp, stride, p->conv + c.at * (size_t)K, (const floatX*)NULL,
                       (const floatX*)history, rows.starts, rows.B, rows.T, c.C, K, dev);
        if (text >= 0) { conv1d_history(history, inp, stride, rows.starts, rows.B, rows.T, c.C, K, dev); }
    }
}

// With --cp, once qkv is there. Rows are longer than what the taps reach: none waits for what the rank before is given
static inline void delta_exchange_halo_(const DeltaPass* p, const Device* dev) {
    const DeltaRows_ rows = delta_batch_rows_(p);
    const size_t n_bytes = sizeof(floatX) * (size_t)rows.B * (size_t)delta_halo_(&p->size);
    assert(rows.T >= p->size.K - 1 || !p->size.cp);
    for (int part = 0; part < DELTA_PARTS_ && p->line.behind; part++) {
        const DeltaChannels_ c = delta_channels_(p, part);
        conv1d_history(p->a.next_halo + delta_halo_at_(p, &c, rows.B), p->a.qkv + c.at, delta_qkv_row_(p), rows.starts,
                       rows.B, rows.T, c.C, p->size.K, dev);
    }
    carried_hand(p->a.next_halo, p->line.behind, n_bytes, dev);
    carried_bring(p->a.halo, p->line.before, n_bytes, dev);
}

// behind the convolution: all that the rule reads, position by position
static inline void delta_prepare_(const DeltaPass* p, const Device* dev) {
    const DeltaSizes* sizes = &p->size;
    const int heads = p->N * sizes->Hk, DK = sizes->DK;
    l2norm_forward(p->a.unit_q, p->s.q_r, p->a.delta_q, 1.0f / sqrtf((float)DK), DELTA_NORM_EPS, heads, DK, dev);
    l2norm_forward(p->a.unit_k, p->s.k_r, p->a.delta_k, 1.0f, DELTA_NORM_EPS, heads, DK, dev);
    delta_gates_forward(p->s.g, p->s.beta, p->a.a, p->a.b, p->A_log, p->dt_bias, p->N, sizes->Hv, dev);
}

// a validation may have other rows than those that are trained on, of which no backward follows
static inline int delta_keeps_states_(const DeltaPass* p, DeltaRows_ rows) {
    return rows.B * (int)ceil_div(rows.T, DELTA_CHUNK) <= p->most_chunks;
}

static inline size_t delta_state_bytes_(const DeltaPass* p, DeltaRows_ rows) {
    return sizeof(float) * (size_t)rows.B * (size_t)delta_state_(&p->size);
}

// with --cp: the state that these rows go on from, where the rule turns it into that at their end; NULL: of whole rows
static inline float* delta_take_state_(const DeltaPass* p, DeltaRows_ rows, const Device* dev) {
    const size_t n_bytes = delta_state_bytes_(p, rows);
    if (!p->size.cp) { return NULL; }
    carried_bring(p->s.given, p->line.before, n_bytes, dev);
    if (delta_goes_on_(p)) { device_copy(p->s.next_state, p->s.given, n_bytes, dev); }
    else { device_zero(p->s.next_state, n_bytes, dev); }
    return p->s.next_state;
}

// the rule over whole rows, or with --cp over this rank's piece of them
static inline void delta_rule_(const DeltaPass* p, DeltaRows_ rows, const Device* dev) {
    const DeltaShape shape = delta_rows_shape_(p, rows);
    float *states = delta_keeps_states_(p, rows) ? p->s.states : NULL, *state = delta_take_state_(p, rows, dev);
    delta_chunks_forward(p->a.o, states, state, delta_layer_inputs_(p, 0), &shape, dev);
    carried_hand(state, p->line.behind, delta_state_bytes_(p, rows), dev);
}

// what is new of text i, from position `first` of the pass on
static inline DeltaRows_ delta_text_rows_(const DeltaPass* p, int i, size_t first) {
    const CachedText* x = &p->batch->texts[i];
    const DeltaRows_ rows = {first, 1, x->n - x->n_cached, token_batch_starts(p->batch, first)};
    return rows;
}

// convolution and rule of texts, each from where it ended
static inline void delta_texts_(const DeltaPass* p, const Device* dev) {
    const DeltaSizes* sizes = &p->size;
    const size_t state = (size_t)sizes->Hv * (size_t)sizes->DK * (size_t)sizes->DV;
    size_t first = 0;
    for (int i = 0; i < p->batch->n_texts; i++) {
        const DeltaRows_ rows = delta_text_rows_(p, i, first);
        delta_convolve_(p, rows, p->batch->texts[i].row, dev);
        first += (size_t)rows.T;
    }
    delta_prepare_(p, dev);
    first = 0;
    for (int i = 0; i < p->batch->n_texts; i++) {
        const DeltaRows_ rows = delta_text_rows_(p, i, first);
        const DeltaShape shape = delta_rows_shape_(p, rows);
        delta_steps_forward(p->a.o + first * (size_t)delta_values_(sizes),
                            p->s.state + (size_t)p->batch->texts[i].row * state, delta_layer_inputs_(p, first), &shape,
                            dev);
        first += (size_t)rows.T;
    }
}

// from o to gated
static inline void delta_gate_(const DeltaPass* p, const Device* dev) {
    const int values = delta_values_(&p->size);
    rmsnorm_forward(p->a.o_norm, p->s.o_rstd, p->a.o, p->o_norm, p->size.eps, p->N * p->size.Hv, p->size.DV, dev);
    gate_forward(p->a.gated, p->a.o_norm, p->a.z, (size_t)values, p->N, values, dev);
}

static inline void delta_layer_forward(const DeltaPass* p, floatX* out, const Device* dev) {
    linear_forward(p->a.qkv, p->inp, p->qkv, p->N, dev);
    linear_forward(p->a.z, p->inp, p->z, p->N, dev);
    linear_forward(p->a.b, p->inp, p->b, p->N, dev);
    linear_forward(p->a.a, p->inp, p->alpha, p->N, dev);
    if (p->batch->n_texts > 0) {
        delta_texts_(p, dev);
    } else {
        delta_exchange_halo_(p, dev);
        delta_convolve_(p, delta_batch_rows_(p), -1, dev);
        delta_prepare_(p, dev);
        delta_rule_(p, delta_batch_rows_(p), dev);
    }
    delta_gate_(p, dev);
    linear_forward(out, p->a.gated, p->out, p->N, dev);
}

static inline void delta_layer_again(const DeltaPass* p, const Device* dev) {
    delta_convolve_(p, delta_batch_rows_(p), -1, dev);
    delta_prepare_(p, dev);
    delta_gate_(p, dev);
}

// with --cp: what the positions behind ask of the state at the end of these; NULL: of whole rows
static inline float* delta_take_dstate_(const DeltaPass* p, DeltaRows_ rows, const Device* dev) {
    if (!p->size.cp) { return NULL; }
    if (!delta_is_gone_on_(p)) { device_zero(p->s.dstate, delta_state_bytes_(p, rows), dev); }
    carried_bring(p->s.dstate, p->line.behind, delta_state_bytes_(p, rows), dev);
    return p->s.dstate;
}

// from dvalues, the gradient of gated, to dq, dk, dvalues, of what the rule has read, and dg, dbeta; that of z in z
static inline void delta_rule_backward_(const DeltaPass* p, const Device* dev) {
    const DeltaTensors* a = &p->a;
    const DeltaSizes* sizes = &p->size;
    const int values = delta_values_(sizes);
    const DeltaRows_ rows = delta_batch_rows_(p);
    const DeltaShape shape = delta_rows_shape_(p, rows);
    const DeltaLayerGradients_ d = {a->dq, a->dk, a->dvalues, p->s.dg, p->s.dbeta};
    assert(delta_keeps_states_(p, rows));
    gate_backward(a->dvalues, a->z, (size_t)values, a->dvalues, a->o_norm, a->z, (size_t)values, p->N, values, dev);
    const HeadRows o = heads_gather(a->d_o, a->dvalues, a->o, p->s.o_rstd, sizes->Hv, p->N, sizes->DV,
                                    p->do_norm != NULL, p->room, p->tp, dev);
    rmsnorm_backward(o.dinp, p->do_norm, o.dout, o.inp, p->o_norm, o.rstd, 0, p->N * o.heads, sizes->DV, dev);
    heads_take(a->d_o, &o, p->N, sizes->DV, p->tp, dev);
    float* dstate = delta_take_dstate_(p, rows, dev);
    delta_chunks_backward(d, dstate, a->d_o, p->s.states, delta_layer_inputs_(p, 0), &shape, dev);
    carried_hand(dstate, p->line.before, delta_state_bytes_(p, rows), dev);
}

// with --cp: what these positions ask of their halo goes to the rank before, what is asked of theirs comes
static inline void delta_exchange_ahead_(const DeltaPass* p, const Device* dev) {
    const DeltaRows_ rows = delta_batch_rows_(p);
    const size_t n_bytes = sizeof(float) * (size_t)rows.B * (size_t)delta_halo_(&p->size);
    for (int part = 0; part < DELTA_PARTS_ && p->line.before; part++) {
        const DeltaChannels_ c = delta_channels_(p, part);
        conv1d_ahead(p->s.next_ahead + delta_halo_at_(p, &c, rows.B), (const floatX*)c.dout, (const floatX*)c.conv,
                     rows.starts, rows.B, rows.T, c.C, p->size.K, dev);
    }
    carried_hand(p->s.next_ahead, p->line.before, n_bytes, dev);
    carried_bring(p->s.ahead, p->line.behind, n_bytes, dev);
}

// to the gradient of qkv, in its place
static inline void delta_convolve_backward_(const DeltaPass* p, const Device* dev) {
    const DeltaRows_ rows = delta_batch_rows_(p);
    const size_t stride = delta_qkv_row_(p), K = (size_t)p->size.K;
    for (int part = 0; part < DELTA_PARTS_; part++) {
        const DeltaChannels_ c = delta_channels_(p, part);
        floatX *qkv = p->a.qkv + c.at, *history = delta_before_(p, &c, rows, -1);
        const float* ahead = delta_is_gone_on_(p) ? p->s.ahead + delta_halo_at_(p, &c, rows.B) : NULL;
        conv1d_backward(qkv, stride, p->dconv ? p->dconv + c.at * K : NULL, NULL, c.dout, c.conv, qkv, stride,
                        p->conv + c.at * K, history, ahead, rows.starts, rows.B, rows.T, c.C, (int)K, dev);
    }
}

// after delta_layer_again
static inline void delta_layer_backward(const DeltaPass* p, floatX* dinp, const floatX* dout, const Device* dev) {
    const DeltaTensors* a = &p->a;
    const DeltaSizes* sizes = &p->size;
    const int heads = p->N * sizes->Hk;
    linear_backward(a->dvalues, dout, a->gated, p->out, p->dout, 0, p->N, dev);
    delta_rule_backward_(p, dev);
    l2norm_backward(a->dq, a->dq, a->delta_q, p->s.q_r, 1.0f / sqrtf((float)sizes->DK), heads, sizes->DK, dev);
    l2norm_backward(a->dk, a->dk, a->delta_k, p->s.k_r, 1.0f, heads, sizes->DK, dev);
    delta_gates_backward(a->da, a->db, p->dA_log, p->ddt_bias, p->s.dg, p->s.dbeta, a->a, p->s.g, p->s.beta, p->A_log,
                         p->dt_bias, p->N, sizes->Hv, dev);
    delta_exchange_ahead_(p, dev);
    delta_convolve_backward_(p, dev);
    LinearChain chain = linear_chain(dinp);
    linear_chain_backward(&chain, a->qkv, p->inp, p->qkv, p->dqkv, p->N, dev);
    linear_chain_backward(&chain, a->z, p->inp, p->z, p->dz, p->N, dev);
    linear_chain_backward(&chain, a->db, p->inp, p->b, p->db, p->N, dev);
    linear_chain_backward(&chain, a->da, p->inp, p->alpha, p->dalpha, p->N, dev);
    linear_chain_end(&chain, p->N, dev);
}
#endif  // LLMC_DELTA_LAYER_H
