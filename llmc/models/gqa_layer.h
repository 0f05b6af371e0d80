/*
Attention of query heads in groups that read the same key and value (GQA), as a layer of a model has it. Lines of the
tables of activations, and parts of the forward and backward pass of a layer. With x (N, D) the normed stream:
    q, k, v    Wq x, Wk x, Wv x (bias beside each where the model has it): NH, NKV and NKV heads of HS channels
    q, k       each head with a norm where the model has one (Qwen3), then turned by RoPE (rotary_attention.h)
    out        Wo (attention(q, k, v) o sigmoid(gate)): Wq gives the gates beside the queries (head_gate.h); or Wo
               attention(q, k, v) where there are none
    GqaTensors, GqaStatistics   what a pass leaves behind; a trainer has both in its own structs
    gqa_tensor_rows, gqa_statistic_rows   their lines
    gqa_room_elements, gqa_keys_elements  scratch of Activations: of parallel, of keys
    GqaPass, layer_gqa   one layer: where its parameters and activations are
    gqa_layer_forward    out (N, D) of inp (N, D); in generation keys and values go to the cache
    gqa_layer_again      what is never kept, before backward
    gqa_layer_backward   from dout (N, D) to the gradients of all parameters and of inp: dinp, written
    gqa_layer_sends      with --tp: bytes that a rank sends beside what its products do
dinp has room for N rows of the larger of D and NH*HS: the gradient of what attention gives lies there first.
With --tp a rank has some of the heads; with more ranks than heads of keys they share these (shared_keys.h).
Order:  dinp is one chain through the outputs of Wq, then Wk, then Wv.
Source: Ainslie et al. 2023, arXiv:2305.13245
*/
#ifndef LLMC_GQA_LAYER_H
#define LLMC_GQA_LAYER_H
#include "../ops/head_gate.h"  // head_gate_split, head_gate_forward, head_gate_backward, head_gate_join
#include "layer.h"             // layer_linear_biased, layer_rmsnorm_forward, layer_heads_backward
#include "rotary_attention.h"  // RotaryAttention, rotary_attention_pass, rotary_attention_backward
#include "shared_keys.h"       // keys_forward, keys_own, shared_keys_elements, shared_keys_sends

typedef struct {
    int NH, NKV, HS;       // heads of queries, of keys; channels of each
    int rotated;           // channels of a head that turn
    int norms, gates;      // heads of queries and keys have a norm; then those of what attention gives may have a gate
    const char *kinds, *kind;  // of each layer its kind, and that of those with this attention; NULL: all have it
} GqaSizes;

// of the trainer's table; a bias may be NO_BIAS
typedef struct { size_t wq, bq, wk, bk, wv, bv, wo, bo, q_norm, k_norm; } GqaFields;

// from `key_part` on one buffer each for all layers
typedef struct {
    floatX *q_proj, *k_proj;         // before the norm of heads; with gates of each head q, then its gate
    floatX *q, *k, *v, *attention;   // turned; the output before gate and projection
    floatX *key_part;                // of keys that ranks share, of values, of their gradients
    floatX *heads, *gated_attention; // q before its norm; attention behind its gate
    floatX *new_k, *new_v;           // in generation on their way to the cache
    floatX *dq, *dk, *dv, *dheads;   // dheads: of q or k before the norm of heads
} GqaTensors;

// what must not lose digits, always float; max and inv (B, NH, T)
typedef struct { float *q_rstd, *k_rstd, *att_max, *att_inv; } GqaStatistics;

// ---- lines of the tables, scratch ----

static inline Tensor gqa_row_(const GqaSizes* s, const char* name, size_t field, int layers, int rows, int columns) {
    return kind_activation(s->kinds, s->kind, name, field, layers, rows, columns);
}

// of a pass of N positions, B rows of T; `at`: offset of GqaTensors in the struct of all; L: layers; L_block: those
// that keep what --recompute 3 leaves out. Returns the end
static inline Tensor* gqa_tensor_rows(Tensor* t, size_t at, const GqaSizes* s, const Model* m, int B, int T, int N,
                                      int L, int L_block, Purpose purpose) {
    const int HQ = s->NH * s->HS, HK = s->NKV * s->HS, generates = purpose == TO_GENERATE;
    const int L_cache = generates ? L : L_block, N_keys = generates ? B * T : N, N_new = generates ? N : 0;
    const int N_train = purpose == TO_TRAIN ? N : 0;
#define FIELD(name) #name, at + offsetof(GqaTensors, name)
    *t++ = gqa_row_(s, FIELD(q_proj),    L_block, N, s->gates ? 2 * HQ : s->norms * HQ);  // then its gradient
    *t++ = gqa_row_(s, FIELD(k_proj),    L_block, N, s->norms * HK);
    *t++ = gqa_row_(s, FIELD(q),         L_block, N, HQ);
    *t++ = gqa_row_(s, FIELD(k),         L_cache, N_keys, HK);  // in generation k and v are kept for what comes
    t[-1].is_cache = 1;
    *t++ = gqa_row_(s, FIELD(v),         L_cache, N_keys, HK);
    t[-1].is_cache = 1;
    *t++ = gqa_row_(s, FIELD(attention), L_block, N, HQ);
    *t++ = activation(FIELD(key_part),   0, N, keys_part(m, s->HS));
    *t++ = activation(FIELD(heads),      0, N, s->gates * HQ);
    *t++ = activation(FIELD(gated_attention), 0, N, s->gates * HQ);
    *t++ = activation(FIELD(new_k),      0, N_new, HK);
    *t++ = activation(FIELD(new_v),      0, N_new, HK);
    *t++ = activation(FIELD(dq),         0, N_train, HQ);
    *t++ = activation(FIELD(dk),         0, N_train, HK);
    *t++ = activation(FIELD(dv),         0, N_train, HK);
    *t++ = activation(FIELD(dheads),     0, N_train, s->norms * HQ);
#undef FIELD
    return t;
}

static inline Tensor* gqa_statistic_rows(Tensor* t, size_t at, const GqaSizes* s, int N, int L_block) {
#define FIELD(name) #name, at + offsetof(GqaStatistics, name)
    *t++ = gqa_row_(s, FIELD(q_rstd),  L_block, N, s->norms * s->NH);
    *t++ = gqa_row_(s, FIELD(k_rstd),  L_block, N, s->norms * s->NKV);
    *t++ = gqa_row_(s, FIELD(att_max), L_block, N, s->NH);
    *t++ = gqa_row_(s, FIELD(att_inv), L_block, N, s->NH);
#undef FIELD
    return t;
}

// with --tp: of keys that ranks share, and of norms of heads
static inline size_t gqa_room_elements(const GqaSizes* s, const Model* m, int N, int trains) {
    const size_t norms = trains && s->norms ? heads_room_elements(N, s->NH * m->tp.size, s->HS, &m->tp) : 0;
    return tp_larger(shared_keys_elements(m, s->NH, s->HS, N, trains), norms);
}

// with --cp, for rows of n_positions in all
static inline size_t gqa_keys_elements(const GqaSizes* s, const Model* m, int n_positions, int trains,
                                       const RankGroup* cp) {
    return segment_room_elements(n_positions, s->NH * m->keys.size, s->NKV, s->HS, trains, cp);
}

// forward: how often the layer is computed; is_back: backward goes through it
static inline double gqa_layer_sends(const GqaSizes* s, GqaFields fields, const Model* m, int l, int forward,
                                     int is_back, int N) {
    const RankGroup key_heads = model_key_heads(m);
    const double of_keys = shared_keys_sends(m, s->NH, s->HS, N, forward, is_back);
    if (!is_back || !s->norms) { return of_keys; }
    return of_keys + heads_sends(m, fields.q_norm, l, s->NH * m->tp.size, s->HS, &m->tp, N) +
           heads_sends(m, fields.k_norm, l, s->NKV * key_heads.size, s->HS, &key_heads, N);
}

// ---- a layer ----

typedef struct {
    GqaSizes size;
    GqaFields fields;
    GqaTensors a;
    GqaStatistics s;
    const floatX* inp;           // (N, D)
    RotaryAttention attention;   // a caller may give it a window, or places of its own
    const Activations* acts;
    int l, N;
} GqaPass;

static inline GqaPass layer_gqa(const Activations* acts, GqaFields fields, const GqaSizes* size, const GqaTensors* a,
                                const GqaStatistics* s, const floatX* inp, int l, int N) {
    GqaPass p = {*size, fields, *a, *s, inp,
                 rotary_attention_init(size->NH, size->NKV, size->HS, size->rotated, &acts->rope, acts->how.cp,
                                       acts->keys.at, &acts->model->keys, acts->parallel.at),
                 acts, l, N};
    assert(size->norms || !size->gates);
    p.attention.of.q = a->q, p.attention.of.k = a->k, p.attention.of.v = a->v, p.attention.of.out = a->attention;
    p.attention.of.max = s->att_max, p.attention.of.inv = s->att_inv;
    return p;
}

static inline Linear gqa_linear_(const GqaPass* p, size_t weight, size_t bias) {
    return layer_linear_biased(p->acts, weight, bias, p->l);
}

// heads of queries as RoPE will turn them, but for their norm
static inline floatX* gqa_heads_(const GqaPass* p) {
    return p->size.gates ? p->a.heads : p->size.norms ? p->a.q_proj : p->a.q;
}

static inline void gqa_queries_forward_(const GqaPass* p, const Device* dev) {
    const GqaSizes* s = &p->size;
    floatX* heads = gqa_heads_(p);
    linear_forward(s->gates ? p->a.q_proj : heads, p->inp, gqa_linear_(p, p->fields.wq, p->fields.bq), p->N, dev);
    if (s->gates) { head_gate_split(heads, p->a.q_proj, p->N, s->NH, s->HS, dev); }
    if (s->norms) {
        layer_rmsnorm_forward(p->acts, p->a.q, p->s.q_rstd, heads, p->fields.q_norm, p->l, p->N * s->NH, dev);
    }
}

static inline void gqa_keys_forward_(const GqaPass* p, floatX* k, floatX* v, const Device* dev) {
    const Model* m = p->acts->model;
    floatX* heads = p->size.norms ? p->a.k_proj : k;
    keys_forward(heads, p->a.key_part, p->inp, gqa_linear_(p, p->fields.wk, p->fields.bk), m, p->N, dev);
    if (p->size.norms) {
        layer_rmsnorm_forward(p->acts, k, p->s.k_rstd, heads, p->fields.k_norm, p->l, p->N * p->size.NKV, dev);
    }
    keys_forward(v, p->a.key_part, p->inp, gqa_linear_(p, p->fields.wv, p->fields.bv), m, p->N, dev);
}

static inline void gqa_gate_forward_(const GqaPass* p, const Device* dev) {
    head_gate_forward(p->a.gated_attention, p->a.attention, p->a.q_proj, p->N, p->size.NH, p->size.HS, dev);
}

static inline const floatX* gqa_gated_(const GqaPass* p) {
    return p->size.gates ? p->a.gated_attention : p->a.attention;
}

static inline void gqa_layer_forward(const GqaPass* p, floatX* out, const Device* dev) {
    const TokenBatch* batch = &p->acts->batch;
    floatX *k = batch->n_texts > 0 ? p->a.new_k : p->a.k, *v = batch->n_texts > 0 ? p->a.new_v : p->a.v;
    gqa_queries_forward_(p, dev);
    gqa_keys_forward_(p, k, v, dev);
    rotary_attention_pass(&p->attention, k, v, batch, p->acts->T, dev);
    if (p->size.gates) { gqa_gate_forward_(p, dev); }
    linear_forward(out, gqa_gated_(p), gqa_linear_(p, p->fields.wo, p->fields.bo), p->N, dev);
}

static inline void gqa_layer_again(const GqaPass* p, const Device* dev) {
    if (!p->size.gates) { return; }
    head_gate_split(p->a.heads, p->a.q_proj, p->N, p->size.NH, p->size.HS, dev);
    gqa_gate_forward_(p, dev);
}

// dheads goes on into the chain, through a matrix that reads inp
static inline void gqa_chain_(const GqaPass* p, LinearChain* chain, const floatX* dheads, size_t weight, size_t bias,
                              const Device* dev) {
    linear_chain_backward(chain, dheads, p->inp, gqa_linear_(p, weight, bias),
                          layer_gradients_biased(p->acts, weight, bias, p->l), p->N, dev);
}

// From the gradient of q or k, turned back, to that of what stood before the norm of its heads, of which x has all;
// returns where it lies: in dheads, or, where heads have no norm, in dout
static inline const floatX* gqa_norm_backward_(const GqaPass* p, const floatX* dout, const floatX* inp,
                                               const float* rstd, size_t field, int heads, const RankGroup* x,
                                               const Device* dev) {
    if (!p->size.norms) { return dout; }
    layer_heads_backward(p->acts, p->a.dheads, dout, inp, rstd, field, p->l, heads, x, p->N, dev);
    return p->a.dheads;
}

static inline void gqa_queries_backward_(const GqaPass* p, LinearChain* chain, const Device* dev) {
    const GqaSizes* s = &p->size;
    const floatX* dq = gqa_norm_backward_(p, p->a.dq, gqa_heads_(p), p->s.q_rstd, p->fields.q_norm, s->NH,
                                          &p->acts->model->tp, dev);
    if (s->gates) { head_gate_join(p->a.q_proj, dq, p->N, s->NH, s->HS, dev); }
    gqa_chain_(p, chain, s->gates ? p->a.q_proj : dq, p->fields.wq, p->fields.bq, dev);
}

static inline void gqa_keys_backward_(const GqaPass* p, LinearChain* chain, const Device* dev) {
    const Model* m = p->acts->model;
    const RankGroup key_heads = model_key_heads(m);
    const int NKV = p->size.NKV, HK = NKV * p->size.HS;
    const floatX* dk =
        gqa_norm_backward_(p, p->a.dk, p->a.k_proj, p->s.k_rstd, p->fields.k_norm, NKV, &key_heads, dev);
    gqa_chain_(p, chain, keys_own(p->a.key_part, dk, m, HK, p->N, dev), p->fields.wk, p->fields.bk, dev);
    gqa_chain_(p, chain, keys_own(p->a.key_part, p->a.dv, m, HK, p->N, dev), p->fields.wv, p->fields.bv, dev);
}

static inline void gqa_layer_backward(const GqaPass* p, floatX* dinp, const floatX* dout, const Device* dev) {
    const TokenBatch* batch = &p->acts->batch;
    const GqaSizes* s = &p->size;
    floatX* dattention = dinp;
    linear_backward(dattention, dout, gqa_gated_(p), gqa_linear_(p, p->fields.wo, p->fields.bo),
                    layer_gradients_biased(p->acts, p->fields.wo, p->fields.bo, p->l), 0, p->N, dev);
    if (s->gates) {
        head_gate_backward(dattention, p->a.q_proj, dattention, p->a.attention, p->a.q_proj, p->N, s->NH, s->HS, dev);
    }
    rotary_attention_backward(p->a.dq, p->a.dk, p->a.dv, dattention, &p->attention, &batch->segments, &batch->rows,
                              dev);
    LinearChain chain = linear_chain(dinp);  // through all three
    gqa_queries_backward_(p, &chain, dev);
    gqa_keys_backward_(p, &chain, dev);
    linear_chain_end(&chain, p->N, dev);
}
#endif  // LLMC_GQA_LAYER_H
