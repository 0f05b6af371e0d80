/*
Attention of GLM-5, as a layer of a model has it (MLA): queries through a narrow layer, keys and values of all heads
from one short vector a token, and the choice of an indexer, which layers without one take from the last before them
that has one. Parts of the forward and backward pass of a layer, and lines of the tables of activations. With x (N, D)
the normed stream, of a position t of a document:
    q        Wq_b norm(Wq_a x), of each head dn channels, then dr that RoPE turns
    c, k_r   Wkv_a x: r channels with a norm, then dr that RoPE turns, the same for all heads
    kv       Wkv_b c: of each head dn channels of its key, which ends in k_r, then its value of dv channels
    chosen   of a layer with an indexer the topk positions of largest score (indexer.h, every position an entry), by
             queries of norm(Wq_a x) and a LayerNorm of Wk x. Rows with no more than topk positions: all
    out      Wo attention(q, kv, chosen) (latent_attention.h)
    LatentTensors, LatentStatistics   what a pass leaves behind; a trainer has both in its own structs
    latent_tensor_rows, latent_statistic_rows   their lines
    LatentPass               one layer: where its parameters and activations are, and those of the layer that has chosen
    latent_layer_forward     out (N, D) of inp (N, D); in generation caches are read and go on
    latent_index_loss        behind the last layer that an indexer has chosen for: what it loses
    latent_layer_again       what --recompute leaves out that is a norm
    latent_layer_backward    from dout to the gradients of all parameters and of inp, dinp (N, D), written
    latent_layer_workspace_bytes   scratch of all this, for the account of memory
With --tp a rank has some of the heads, with their rows of Wq_b and Wkv_b and their columns of Wo. All compute both
short vectors and the choice. What sums over heads goes on from rank to rank: the gradient of what turns for all of
them, and what teaches an indexer.
    latent_layer_sends       bytes of this that a rank sends
With --cp a rank has the queries of its own positions. It makes their short vectors, which all ranks get, and of these
the keys and values of whole rows, which one buffer has for all layers: backward makes them again. Lists say whom a
position sees, however few there are. What is asked of a short vector, of what turns, and of an indexer's key comes back
to the rank that has made it.
    latent_layer_bring       keys and values of all ranks, before backward goes through the layer
    latent_keys_sent         bytes of all this that the first rank sends
The indexer learns by a loss of its own (LatentSizes.indexer): its gradients stop at x and norm(Wq_a x). What all layers
that see a choice look at teaches it, or its own layer alone (LatentSizes.by_source).
Caches  kv, k_rope and index_k, position by position: keys and values of all heads. Where a pass absorbs, `keys` in
        place of kv and k_rope: the short vector behind its norm and what turns, r + dr numbers for H (dn + dv) + dr.
        What a head asks of a key, q . (U c), is (U^T q) . c, and what it makes of a value, V c, it makes of the sum:
            q'    U^T q of each head, with U the dn rows of Wkv_b that make its key: r channels, then those that turn
            z     attention of q' over the keys, which all heads share, as DeepSeek V4 has it (sparse_attention.h): the
                  sums of att * c
            out   Wo (V z), with V the dv rows that make its value
        The same number by another order of sums, so other bits: of scores a sum of dn products of sums of r in place
        of one of r products of sums of dn. One position's step reads Wkv_b twice, not once: H (dn + dv) r numbers
        more, for which the shorter cache makes up from H (dn + dv) r / (H (dn + dv) - r) = about r positions on.
Order:  dinp is one chain through the outputs of Wq_a, then Wkv_a.
Source: DeepSeek-AI 2024, arXiv:2405.04434 (MLA); 2025, arXiv:2512.02556 (the choice); arXiv:2603.12201 (shared choices)
*/
#ifndef LLMC_LATENT_LAYER_H
#define LLMC_LATENT_LAYER_H
#include "../core/tensor.h"         // Tensor, activation
#include "../ops/cast.h"            // cast_scaled
#include "../ops/crossentropy.h"    // crossentropy_losses_sum
#include "../ops/indexer.h"         // index_choose, index_loss_forward, index_loss_backward
#include "../ops/latent_attention.h"  // latent_attention_forward, latent_attention_mass, latent_backward_begin, ...
#include "../ops/layernorm.h"       // layernorm_forward, layernorm_backward
#include "../ops/rmsnorm.h"         // rmsnorm_forward, rmsnorm_backward
#include "../ops/rope.h"            // RopeTable, rope_forward, rope_backward
#include "../ops/sparse_attention.h"  // sparse_attention_forward
#include "activations.h"            // activation rows
#include "entry_ranks.h"            // EntryRanks, entry_ranks_gather, entry_ranks_sum (--cp)
#include "linear.h"                 // Linear, linear_forward, linear_backward, linear_blocks_forward, tp_chain_pass

#define LATENT_INDEX_EPS 1e-6f  // of the LayerNorm of an indexer's keys
enum { LATENT_PLACES = 0 };     // the kind of EntryPlaces whose entries are positions
enum { FULL_INDEXER = 'F', SHARED_INDEXER = 'S' };  // a layer chooses keys; it sees what the last full one has chosen

typedef struct {
    int D, H, rq, r;            // channels; heads; of the vectors that queries are made of, and keys and values
    int dn, dr, dv;             // of a head: of its key that do not turn, and that do; of its value
    int nI, dI, topk;           // of the indexer
    float eps;                  // of the norms of both vectors
    int halves;                 // how the indexer's channels turn (ROPE_HALVES)
    int indexer, by_source;     // IndexerTraining; it is taught by its own layer alone
    int absorbs;                // in generation: short vectors are the cache
    int L;                      // layers that a pass goes through
    const char* indexers;       // of each: FULL_INDEXER or SHARED_INDEXER
    const RankGroup* cp;        // with --cp: who has which positions; NULL: a rank has whole rows
} LatentSizes;

// from `latent` on room, and gradients on their way back, one buffer each for all layers
typedef struct {
    floatX *q_low, *q_low_norm, *q, *kv_low, *kv_low_norm, *k_rope, *kv, *attention, *index_low, *index_k, *index_q;
    floatX *new_kv, *new_k_rope, *new_index_k;  // in generation on their way to the caches
    floatX *keys, *new_keys, *asked, *mixed, *by_head;  // ... that absorbs
    floatX *all_latent, *all_rope, *all_index, *ranks;  // with --cp: of all ranks; room
    floatX *latent, *dattention, *dq, *dkv, *dk_rope, *dq_low, *dlatent, *dkv_low, *dindex_q, *dindex_k, *dindex_low,
        *dindex_proj;
} LatentTensors;

// what must not lose digits, always float, and which positions are chosen
typedef struct {
    float *q_low_rstd, *kv_low_rstd, *att_max, *att_inv, *no_sinks, *index_mean, *index_rstd, *index_proj,
        *index_weights, *index_mass, *index_losses, *dindex_weights;
    int* chosen;  // (N, latent_chosen): rows of positions, ascending; -1: no more
} LatentStatistics;

// how many positions a list has room for where rows have T
static inline int latent_chosen(const LatentSizes* s, int T) {
    return s->indexer == INDEXER_DENSE || T < s->topk ? T : s->topk;
}

static inline int latent_learns(const LatentSizes* s, Purpose purpose) {
    return s->indexer != INDEXER_OFF && purpose == TO_TRAIN;
}

// do indexers compute scores?
static inline int latent_scores(const LatentSizes* s, int T, Purpose purpose) {
    return T > s->topk || latent_learns(s, purpose);
}

// are there lists? With --cp of all positions, too
static inline int latent_has_lists(const LatentSizes* s, int T, Purpose purpose) {
    return latent_scores(s, T, purpose) || s->cp;
}

// ---- lines of the tables ----

typedef struct {
    int B, T, N;             // rows, positions of each, of a pass
    int L_norms, L_block;    // layers that keep what --recompute 1 and 3 leave out
    Purpose purpose;
} LatentRows;

// a line for the layers with an indexer
static inline Tensor latent_index_row_(const LatentSizes* s, const char* name, size_t field, int layers, int rows,
                                       int columns) {
    return kind_activation(s->indexers, "F", name, field, layers, rows, columns);
}

// rows of keys that a pass meets
static inline int latent_rows_of_keys_(const LatentSizes* s, const LatentRows* x) { return s->cp ? x->B * x->T : x->N; }

// with --cp
static inline Tensor* latent_ranks_rows_(Tensor* t, size_t at, const LatentSizes* s, const LatentRows* x) {
    const int rows = latent_rows_of_keys_(s, x), wide = s->r > s->dr ? s->r : s->dr;
    const int widest = wide > s->dI ? wide : s->dI;
    const size_t room = entry_ranks_room_elements(x->B, 0, 0, rows, widest);
#define FIELD(name) #name, at + offsetof(LatentTensors, name)
    *t++ = activation(FIELD(all_latent), 0, rows, s->r);
    *t++ = activation(FIELD(all_rope),   0, rows, s->dr);
    *t++ = activation(FIELD(all_index),  0, latent_scores(s, x->T, x->purpose) ? rows : 0, s->dI);
    *t++ = activation(FIELD(ranks),      0, (int)ceil_div((int64_t)room, 64), 64);
#undef FIELD
    return t;
}

// of a pass; `at`: offset of LatentTensors in the struct of all. Returns the end
static inline Tensor* latent_tensor_rows(Tensor* t, size_t at, const LatentSizes* s, const LatentRows* x) {
    const int N = x->N, L = x->L_block, N_train = x->purpose == TO_TRAIN ? N : 0, Q = s->H * (s->dn + s->dr);
    const int learns = latent_learns(s, x->purpose), L_index = learns ? s->L : 0, N_learn = learns ? N : 0;
    const int generates = x->purpose == TO_GENERATE, N_new = generates ? N : 0, KV = s->H * (s->dn + s->dv);
    const int L_keys = generates ? s->L : L, N_keys = generates ? x->B * x->T : N;
    const int all = latent_rows_of_keys_(s, x), all_train = N_train > 0 ? all : 0, all_learn = N_learn > 0 ? all : 0;
    const int N_heads = s->absorbs ? 0 : N_keys, N_short = s->absorbs ? N_keys : 0, N_absorbed = s->absorbs ? N : 0;
#define FIELD(name) #name, at + offsetof(LatentTensors, name)
    *t++ = activation(FIELD(q_low),       L, N, s->rq);
    *t++ = activation(FIELD(q_low_norm),  x->L_norms, N, s->rq);
    *t++ = activation(FIELD(q),           L, N, Q);                       // turned by RoPE, as k_rope
    *t++ = activation(FIELD(kv_low),      L, N, s->r + s->dr);            // before norm and RoPE
    *t++ = activation(FIELD(kv_low_norm), x->L_norms, N, s->r);
    *t++ = cached_activation(FIELD(k_rope), L_keys, N_heads, s->dr);
    if (s->cp) { *t++ = activation(FIELD(kv), 0, all, KV); }
    else { *t++ = cached_activation(FIELD(kv), L_keys, N_heads, KV); }
    if (s->cp) { t = latent_ranks_rows_(t, at, s, x); }
    *t++ = cached_activation(FIELD(keys), L_keys, N_short, s->r + s->dr);
    *t++ = activation(FIELD(new_k_rope),  0, N_new, s->dr);
    *t++ = activation(FIELD(new_kv),      0, N_new, KV);                  // absorbed: queries, then values
    *t++ = activation(FIELD(new_keys),    0, N_absorbed, s->r + s->dr);
    *t++ = activation(FIELD(asked),       0, N_absorbed, s->H * (s->r + s->dr));  // q'
    *t++ = activation(FIELD(mixed),       0, N_absorbed, s->H * (s->r + s->dr));  // z, then what turns, unused
    *t++ = activation(FIELD(by_head),     0, N_absorbed, s->H * s->r);
    *t++ = activation(FIELD(attention),   L, N, s->H * s->dv);
    if (latent_scores(s, x->T, x->purpose)) {
        *t++ = latent_index_row_(s, FIELD(index_low), L_index, N, s->dI); // before the norm
        *t++ = latent_index_row_(s, FIELD(index_k),   generates ? s->L : L_index, N_keys, s->dI);
        t[-1].is_cache = 1;
        *t++ = activation(FIELD(new_index_k), 0, N_new, s->dI);
        *t++ = latent_index_row_(s, FIELD(index_q),   L_index, N, s->nI * s->dI);
    }
    *t++ = activation(FIELD(latent),      0, N, s->r);                    // of kv_low what has a norm
    *t++ = activation(FIELD(dattention),  0, N_train, s->H * s->dv);
    *t++ = activation(FIELD(dq),          0, N_train, Q);
    *t++ = activation(FIELD(dkv),         0, all_train, KV);
    *t++ = activation(FIELD(dk_rope),    0, all_train, s->dr);
    *t++ = activation(FIELD(dq_low),      0, N_train, s->rq);
    *t++ = activation(FIELD(dlatent),     0, all_train, s->r);
    *t++ = activation(FIELD(dkv_low),     0, N_train, s->r + s->dr);
    *t++ = activation(FIELD(dindex_q),    0, N_learn, s->nI * s->dI);
    *t++ = activation(FIELD(dindex_k),    0, all_learn, s->dI);
    *t++ = activation(FIELD(dindex_low),  0, N_learn, s->dI);
    *t++ = activation(FIELD(dindex_proj), 0, N_learn, s->nI);
#undef FIELD
    return t;
}

static inline Tensor* latent_statistic_rows(Tensor* t, size_t at, const LatentSizes* s, const LatentRows* x) {
    const int N = x->N, L = x->L_block, learns = latent_learns(s, x->purpose), L_index = learns ? s->L : 0;
    const int K = latent_chosen(s, x->T), N_learn = learns ? N : 0;
#define FIELD(name) #name, at + offsetof(LatentStatistics, name)
    *t++ = activation(FIELD(q_low_rstd),  L, N, 1);
    *t++ = activation(FIELD(kv_low_rstd), L, N, 1);
    *t++ = activation("attention_max", at + offsetof(LatentStatistics, att_max), L, N, s->H);
    *t++ = activation("attention_inv", at + offsetof(LatentStatistics, att_inv), L, N, s->H);
    *t++ = activation(FIELD(no_sinks),    0, s->absorbs, s->H);
    if (latent_has_lists(s, x->T, x->purpose)) {
        *t++ = latent_index_row_(s, FIELD(chosen),        s->L, N, K);     // layers behind it see it, backward, too
    }
    if (latent_scores(s, x->T, x->purpose)) {
        *t++ = latent_index_row_(s, FIELD(index_mean),    L_index, N, 1);
        *t++ = latent_index_row_(s, FIELD(index_rstd),    L_index, N, 1);
        *t++ = latent_index_row_(s, FIELD(index_proj),    L_index, N, s->nI);
        *t++ = latent_index_row_(s, FIELD(index_weights), L_index, N, s->nI);
        *t++ = latent_index_row_(s, FIELD(index_mass),    L_index, N_learn, K);
        *t++ = latent_index_row_(s, FIELD(index_losses),  L_index, N_learn, 1);
    }
    *t++ = activation(FIELD(dindex_weights), 0, N_learn, s->nI);
#undef FIELD
    return t;
}

// does a layer teach the indexer that has chosen for it?
static inline int latent_teaches_(const LatentSizes* s, int is_full) { return is_full || !s->by_source; }

// scratch of a layer's attention and indexer, for N positions in rows of T of which no text is made; n_keys: rows of
// keys that they meet
static inline double latent_layer_workspace_bytes(const LatentSizes* s, int N, int n_keys, int T, Purpose purpose,
                                                  const Device* dev) {
    const int topk = latent_has_lists(s, T, purpose) ? latent_chosen(s, T) : 0;
    const LatentShape shape = {N, s->H, s->dn, s->dr, s->dv, topk, 1.0f};
    const IndexShape index = {N, s->nI, s->dI, latent_chosen(s, T)};
    const double of_attention = latent_workspace_bytes(&shape, n_keys, T, purpose == TO_TRAIN, dev);
    if (!latent_scores(s, T, purpose)) { return of_attention; }
    return fmax(of_attention, index_workspace_bytes(&index, n_keys, T, latent_learns(s, purpose), dev));
}

// with --tp, of layer l in training, for N positions in rows of T; is_back: backward goes through it
static inline double latent_layer_sends(const LatentSizes* s, int l, int is_back, int N, int T, const RankGroup* tp) {
    const int teaches = latent_learns(s, TO_TRAIN) && latent_teaches_(s, s->indexers[l] == FULL_INDEXER);
    const int64_t keys = (int64_t)N * (s->cp ? s->cp->size : 1);
    return (is_back ? tp_chain_sends(keys, sizeof(float) * (double)s->dr, tp) : 0.0) +
           (teaches ? tp_chain_sends(N, sizeof(float) * (double)latent_chosen(s, T), tp) : 0.0);
}

// with --cp, of layer l in training, for B rows of T positions; is_back as before; again: what it needs has to be
// brought once more
static inline double latent_keys_sent(const LatentSizes* s, int l, int is_back, int again, int B, int T) {
    const int is_full = s->indexers[l] == FULL_INDEXER, learns = is_full && latent_learns(s, TO_TRAIN);
    const int scores = is_full && latent_scores(s, T, TO_TRAIN);
    const double short_vectors = cp_sends(s->cp, B, T, sizeof(floatX) * (double)(s->r + s->dr));
    const double index = cp_sends(s->cp, B, T, sizeof(floatX) * (double)s->dI);
    return (1 + is_back + again) * short_vectors +
           (scores + learns * (1 + is_back + again)) * index;  // choose, lose, sum, bring
}

// ---- a layer ----

// the gradients are needed in backward alone; what is of an indexer in layers that have one
typedef struct {
    LatentSizes size;
    int is_full, is_mtp;                      // it has an indexer of its own; it is the MTP module's
    LatentTensors a;
    LatentStatistics s;
    int* chosen;                              // of the layer that has chosen for this one
    float* mass;                              // ... what it learns from
    const int* given;                         // (N, latent_chosen) what an indexer is told to choose; NULL: nobody says
    const floatX* inp;                        // (N, D)
    Linear q_a, q_b, kv_a, kv_b, o, index_q, index_k, index_proj;
    LinearGradients dq_a, dq_b, dkv_a, dkv_b, d_o, dindex_q, dindex_k, dindex_proj;
    const floatX *q_norm, *kv_norm, *index_norm, *index_norm_bias;
    float *dq_norm, *dkv_norm, *dindex_norm, *dindex_norm_bias;  // NULL: do not learn
    const RopeTable* turn;
    const TokenBatch* batch;
    const RankGroup* tp;                      // of whose heads this rank has some
    int T, N;                                 // positions of a row, of which there is room; of the pass
    Purpose purpose;
    float* index_number;                      // where the sum of the indexer's losses goes; NULL: nobody asks
    float index_dloss;
} LatentPass;

static inline int latent_pass_lists_(const LatentPass* p) { return latent_has_lists(&p->size, p->T, p->purpose); }

static inline LatentShape latent_shape_(const LatentPass* p) {
    const LatentSizes* s = &p->size;
    const LatentShape shape = {p->N, s->H, s->dn, s->dr, s->dv, latent_chosen(s, p->T),
                               1.0f / sqrtf((float)(s->dn + s->dr))};
    return shape;
}

static inline IndexShape latent_index_shape_(const LatentPass* p) {
    const IndexShape s = {p->N, p->size.nI, p->size.dI, latent_chosen(&p->size, p->T)};
    return s;
}

static inline int latent_n_keys_(const LatentPass* p) { return p->size.cp ? p->batch->rows.B * p->T : p->N; }

static inline const floatX* latent_rope_(const LatentPass* p) { return p->size.cp ? p->a.all_rope : p->a.k_rope; }
static inline const floatX* latent_keys_of_index_(const LatentPass* p) {
    return p->size.cp ? p->a.all_index : p->a.index_k;
}

static inline float latent_index_scale_(const LatentSizes* s) { return 1.0f / sqrtf((float)(s->dI * s->nI)); }

static inline const EntryWindows* latent_windows_(const LatentPass* p) {
    return &p->batch->entries.windows[LATENT_PLACES];
}

// whom positions see, by rows of keys of all ranks
static inline Places latent_places_(const LatentPass* p) {
    Places places = p->batch->entries.places;
    places.first_key = latent_windows_(p)->first_entry;
    return places;
}

// of N rows of `heads` heads of `width` channels dr turn, from channel `first` of each on
static inline void latent_turn_(floatX* x, const LatentPass* p, int heads, int width, int first, int pairs, int back,
                                const Device* dev) {
    RopeShape shape = rope_shape(1, p->N, 0, heads, width, pairs);
    shape.rotated = p->size.dr, shape.table_row = (size_t)p->size.dr / 2, shape.places = p->batch->entries.places.t;
    if (back) { rope_backward(x + first, p->turn->cosines, p->turn->sines, &shape, dev); }
    else { rope_forward(x + first, p->turn->cosines, p->turn->sines, &shape, dev); }
}

static inline int latent_index_pairs_(const LatentPass* p) { return p->size.halves ? ROPE_HALVES : ROPE_INTERLEAVED; }

// `n` channels of rows of N, from channel `first` of kv_low (N, r + dr) on, and back
static inline void latent_take_part_(floatX* to, const floatX* kv_low, int first, int n, const LatentPass* p,
                                     const Device* dev) {
    const size_t width = sizeof(floatX) * (size_t)n, row = sizeof(floatX) * (size_t)(p->size.r + p->size.dr);
    device_copy_strips(to, width, kv_low + first, row, width, p->N, dev);
}
static inline void latent_put_part_(floatX* kv_low, const floatX* from, int first, int n, const LatentPass* p,
                                    const Device* dev) {
    const size_t width = sizeof(floatX) * (size_t)n, row = sizeof(floatX) * (size_t)(p->size.r + p->size.dr);
    device_copy_strips(kv_low + first, row, from, width, width, p->N, dev);
}

// ---- forward ----

static inline int latent_generates_(const LatentPass* p) { return p->purpose == TO_GENERATE; }

// new rows of `width` channels go to a cache
static inline void latent_keep_(floatX* cache, const floatX* from, int width, const LatentPass* p, const Device* dev) {
    for (int i = 0; i < p->batch->n_texts && latent_generates_(p); i++) {
        const CachedText* text = &p->batch->texts[i];
        const size_t n = (size_t)(text->n - text->n_cached), W = (size_t)width;
        const size_t at = (size_t)text->row * (size_t)p->T + (size_t)text->n_cached;
        device_copy(cache + at * W, from, sizeof(floatX) * n * W, dev);
        from += n * W;
    }
}

// ---- with --cp ----

// all (rows, d) of own rows, or the sums of what all ranks ask of own rows in the first of them
static inline void latent_gather_rows_(const LatentPass* p, floatX* all, const floatX* own, int d,
                                       const Device* dev) {
    const EntryRanks ranks = entry_ranks(p->batch, p->a.ranks);
    entry_ranks_gather(&ranks, all, own, 1, d, dev);
}
static inline void latent_sum_rows_(const LatentPass* p, floatX* all, int d, const Device* dev) {
    const EntryRanks ranks = entry_ranks(p->batch, p->a.ranks);
    if (p->size.cp) { entry_ranks_sum(&ranks, all, 1, d, dev); }
}

static inline void latent_gather_keys_(const LatentPass* p, const Device* dev) {
    latent_gather_rows_(p, p->a.all_latent, p->a.kv_low_norm, p->size.r, dev);
    latent_gather_rows_(p, p->a.all_rope, p->a.k_rope, p->size.dr, dev);
    linear_forward(p->a.kv, p->a.all_latent, p->kv_b, latent_n_keys_(p), dev);
}

static inline void latent_gather_index_(const LatentPass* p, const Device* dev) {
    if (p->size.cp) { latent_gather_rows_(p, p->a.all_index, p->a.index_k, p->size.dI, dev); }
}

static inline void latent_layer_bring(const LatentPass* p, const Device* dev) {
    if (!p->size.cp) { return; }
    latent_gather_keys_(p, dev);
    if (p->is_full && latent_learns(&p->size, p->purpose)) { latent_gather_index_(p, dev); }
}

// what the indexer's scores are made of
static inline void latent_index_forward_(const LatentPass* p, const Device* dev) {
    const LatentSizes* s = &p->size;
    const LatentTensors* a = &p->a;
    const int N = p->N, pairs = latent_index_pairs_(p);
    floatX* k = latent_generates_(p) ? a->new_index_k : a->index_k;
    linear_forward(a->index_low, p->inp, p->index_k, N, dev);
    layernorm_forward(k, p->s.index_mean, p->s.index_rstd, a->index_low, p->index_norm, p->index_norm_bias,
                      LATENT_INDEX_EPS, N, s->dI, dev);
    latent_turn_(k, p, 1, s->dI, 0, pairs, 0, dev);
    latent_keep_(a->index_k, k, s->dI, p, dev);
    latent_gather_index_(p, dev);
    linear_forward(a->index_q, a->q_low_norm, p->index_q, N, dev);
    latent_turn_(a->index_q, p, s->nI, s->dI, 0, pairs, 0, dev);
    linear_forward(p->s.index_proj, p->inp, p->index_proj, N, dev);
    cast_scaled(p->s.index_weights, (const float*)p->s.index_proj, latent_index_scale_(s), (size_t)N * (size_t)s->nI,
                dev);
}

// what the indexer chooses
static inline void latent_choose_(const LatentPass* p, const Device* dev) {
    const IndexShape shape = latent_index_shape_(p);
    if (latent_scores(&p->size, p->T, p->purpose)) { latent_index_forward_(p, dev); }
    if (p->given) {
        device_copy(p->chosen, p->given, sizeof(int) * (size_t)p->N * (size_t)shape.topk, dev);
        return;
    }
    index_choose(p->chosen, NULL, p->T, p->a.index_q, latent_keys_of_index_(p), p->s.index_weights, &shape,
                 &p->batch->entries.places, latent_windows_(p), dev);
}

// queries, and the cache of heads or what it is made of
static inline void latent_queries_(const LatentPass* p, const Device* dev) {
    const LatentSizes* s = &p->size;
    const LatentTensors* a = &p->a;
    const int N = p->N, generates = latent_generates_(p);
    floatX *k_rope = generates ? a->new_k_rope : a->k_rope, *kv = generates ? a->new_kv : a->kv;
    linear_forward(a->q_low, p->inp, p->q_a, N, dev);
    rmsnorm_forward(a->q_low_norm, p->s.q_low_rstd, a->q_low, p->q_norm, s->eps, N, s->rq, dev);
    linear_forward(a->q, a->q_low_norm, p->q_b, N, dev);
    latent_turn_(a->q, p, s->H, s->dn + s->dr, s->dn, ROPE_INTERLEAVED, 0, dev);
    linear_forward(a->kv_low, p->inp, p->kv_a, N, dev);
    latent_take_part_(a->latent, a->kv_low, 0, s->r, p, dev);
    rmsnorm_forward(a->kv_low_norm, p->s.kv_low_rstd, a->latent, p->kv_norm, s->eps, N, s->r, dev);
    latent_take_part_(k_rope, a->kv_low, s->r, s->dr, p, dev);
    latent_turn_(k_rope, p, 1, s->dr, 0, ROPE_INTERLEAVED, 0, dev);
    if (s->absorbs) { return; }
    if (s->cp) {
        latent_gather_keys_(p, dev);
        return;
    }
    linear_forward(kv, a->kv_low_norm, p->kv_b, N, dev);
    latent_keep_(a->k_rope, k_rope, s->dr, p, dev);
    latent_keep_(a->kv, kv, s->H * (s->dn + s->dv), p, dev);
}

// n rows of `width` channels between rows of other widths
static inline void latent_move_(floatX* to, int to_row, const floatX* from, int from_row, int width, int n,
                                const Device* dev) {
    const size_t size = sizeof(floatX);
    device_copy_strips(to, size * (size_t)to_row, from, size * (size_t)from_row, size * (size_t)width, n, dev);
}

// queries of short vectors, and these into their cache
static inline void latent_absorb_(const LatentPass* p, const Device* dev) {
    const LatentSizes* s = &p->size;
    const LatentTensors* a = &p->a;
    const int N = p->N, Q = s->dn + s->dr, KV = s->dn + s->dv, R = s->r + s->dr;
    const int NH = N * s->H;
    device_zero(a->new_kv, sizeof(floatX) * (size_t)NH * (size_t)KV, dev);  // no head asks for a value
    latent_move_(a->new_kv, KV, a->q, Q, s->dn, NH, dev);
    linear_blocks_backward_input(a->by_head, a->new_kv, p->kv_b, s->H, N, dev);
    latent_move_(a->asked, R, a->by_head, s->r, s->r, NH, dev);
    latent_move_(a->asked + s->r, R, a->q + s->dn, Q, s->dr, NH, dev);
    latent_move_(a->new_keys, R, a->kv_low_norm, s->r, s->r, N, dev);
    latent_move_(a->new_keys + s->r, R, a->new_k_rope, s->dr, s->dr, N, dev);
    latent_keep_(a->keys, a->new_keys, R, p, dev);
}

// Heads have no sinks, where the operation asks for some. They stay: it is done where a text begins
static inline void latent_no_sinks_(const LatentPass* p, const Device* dev) {
    const int H = p->size.H;
    int begins = 0;
    for (int i = 0; i < p->batch->n_texts; i++) { begins |= p->batch->texts[i].n_cached == 0; }
    if (!begins) { return; }
    float* none = (float*)malloc_check(sizeof(float) * (size_t)H, "sinks");
    for (int h = 0; h < H; h++) { none[h] = -INFINITY; }
    device_upload(p->s.no_sinks, none, sizeof(float) * (size_t)H, dev);
    free(none);
}

static inline void latent_attend_absorbed_(const LatentPass* p, const int* chosen, const Device* dev) {
    const LatentSizes* s = &p->size;
    const LatentTensors* a = &p->a;
    const LatentShape by_heads = latent_shape_(p);
    const int N = p->N, KV = s->dn + s->dv, R = s->r + s->dr;
    const SparseShape shape = {N, s->H, R, 0, by_heads.topk, by_heads.scale, 0};
    const int NH = N * s->H;
    latent_absorb_(p, dev);
    latent_no_sinks_(p, dev);
    sparse_attention_forward(a->mixed, p->s.att_max, p->s.att_inv, a->asked, a->keys, a->keys, p->s.no_sinks, chosen,
                             &shape, &p->batch->entries.places, latent_windows_(p), dev);
    latent_move_(a->by_head, s->r, a->mixed, R, s->r, NH, dev);
    linear_blocks_forward(a->new_kv, a->by_head, p->kv_b, s->H, N, dev);
    latent_move_(a->attention, s->dv, a->new_kv + s->dn, KV, s->dv, NH, dev);
}

// The weights that all heads have for what is chosen, behind those of the layers before
static inline void latent_teach_(const LatentPass* p, const Device* dev) {
    const LatentTensors* a = &p->a;
    const RankGroup* x = p->tp;
    LatentShape shape = latent_shape_(p);
    const size_t K = (size_t)shape.topk, Q = (size_t)(shape.H * (shape.dn + shape.dr)), H = (size_t)shape.H;
    for (int step = 0; step < tp_chain_steps(x); step++) {
        const int piece = tp_chain_piece(step, x);
        if (piece >= 0) {
            const size_t first = (size_t)comm_share(p->N, piece, x->size);
            const size_t end = (size_t)comm_share(p->N, piece + 1, x->size);
            const Places whole = latent_places_(p), places = places_between(&whole, (int)first, (int)end);
            shape.N = places.N;
            latent_attention_mass(p->mass + first * K, a->q + first * Q, a->kv, latent_rope_(p),
                                  p->s.att_max + first * H, p->s.att_inv + first * H, p->chosen + first * K,
                                  x->place > 0 || !p->is_full, &shape, &places, dev);
        }
        tp_chain_pass(p->mass, p->N, sizeof(float) * K, step, x, dev);
    }
    tp_chain_end(p->mass, p->N, sizeof(float) * K, x, dev);
    if (p->is_mtp) { index_forget_last(p->mass, p->batch->entries.is_last, p->N, shape.topk, dev); }
}

// replay: these positions have been here before, and have chosen
static inline void latent_layer_forward(const LatentPass* p, floatX* out, int replay, const Device* dev) {
    const LatentTensors* a = &p->a;
    const LatentShape shape = latent_shape_(p);
    const Places places = latent_places_(p);
    const int has_lists = latent_pass_lists_(p), teaches = latent_teaches_(&p->size, p->is_full);
    latent_queries_(p, dev);
    if (p->is_full && has_lists && !replay) { latent_choose_(p, dev); }
    if (replay && p->is_full && latent_learns(&p->size, p->purpose)) { latent_gather_index_(p, dev); }
    const int* chosen = has_lists ? p->chosen : NULL;
    if (p->size.absorbs) {
        latent_attend_absorbed_(p, chosen, dev);
    } else {
        latent_attention_forward(a->attention, p->s.att_max, p->s.att_inv, a->q, a->kv, latent_rope_(p), chosen,
                                 &shape, &places, dev);
    }
    if (latent_learns(&p->size, p->purpose) && teaches && !replay) { latent_teach_(p, dev); }
    linear_forward(out, a->attention, p->o, p->N, dev);
}

// p: of the layer with the indexer
static inline void latent_index_loss(const LatentPass* p, const Device* dev) {
    const IndexShape shape = latent_index_shape_(p);
    latent_gather_index_(p, dev);
    index_loss_forward(p->s.index_losses, p->mass, p->chosen, p->a.index_q, latent_keys_of_index_(p),
                       p->s.index_weights, &shape, latent_windows_(p), dev);
    if (p->index_number) { crossentropy_losses_sum(p->index_number, p->s.index_losses, p->N, dev); }
}

// the norms that --recompute 1 leaves out
static inline void latent_layer_again(const LatentPass* p, const Device* dev) {
    const LatentSizes* s = &p->size;
    const LatentTensors* a = &p->a;
    rmsnorm_forward(a->q_low_norm, p->s.q_low_rstd, a->q_low, p->q_norm, s->eps, p->N, s->rq, dev);
    latent_take_part_(a->latent, a->kv_low, 0, s->r, p, dev);
    rmsnorm_forward(a->kv_low_norm, p->s.kv_low_rstd, a->latent, p->kv_norm, s->eps, p->N, s->r, dev);
}

// ---- backward ----

// the indexer's own gradients, which reach nothing else
static inline void latent_index_backward_(const LatentPass* p, const Device* dev) {
    const LatentSizes* s = &p->size;
    const LatentTensors* a = &p->a;
    const IndexShape shape = latent_index_shape_(p);
    const int N = p->N, pairs = latent_index_pairs_(p);
    index_loss_backward(a->dindex_q, a->dindex_k, p->s.dindex_weights, p->index_dloss, p->mass, p->chosen, a->index_q,
                        latent_keys_of_index_(p), p->s.index_weights, latent_n_keys_(p), &shape,
                        &p->batch->entries.places, latent_windows_(p), dev);
    latent_sum_rows_(p, a->dindex_k, s->dI, dev);
    latent_turn_(a->dindex_q, p, s->nI, s->dI, 0, pairs, 1, dev);
    linear_backward_weight(a->dindex_q, a->q_low_norm, p->index_q, p->dindex_q, N, dev);
    latent_turn_(a->dindex_k, p, 1, s->dI, 0, pairs, 1, dev);
    device_zero(a->dindex_low, sizeof(floatX) * (size_t)N * (size_t)s->dI, dev);
    layernorm_backward(a->dindex_low, p->dindex_norm, p->dindex_norm_bias, a->dindex_k, a->index_low, p->index_norm,
                       p->s.index_mean, p->s.index_rstd, N, s->dI, dev);
    linear_backward_weight(a->dindex_low, p->inp, p->index_k, p->dindex_k, N, dev);
    cast_scaled(a->dindex_proj, (const float*)p->s.dindex_weights, latent_index_scale_(s), (size_t)N * (size_t)s->nI,
                dev);
    linear_backward_weight(a->dindex_proj, p->inp, p->index_proj, p->dindex_proj, N, dev);
}

// from the gradient of the outputs of all heads to those of queries, keys and values
static inline void latent_heads_backward_(const LatentPass* p, const Device* dev) {
    const LatentTensors* a = &p->a;
    const RankGroup* x = p->tp;
    const LatentShape shape = latent_shape_(p);
    const size_t width = sizeof(float) * (size_t)p->size.dr;
    const Places places = latent_places_(p);
    const int n = latent_n_keys_(p);
    LatentBackward b = latent_backward_begin(a->dq, a->dkv, a->dk_rope, a->dattention, a->attention, a->q, a->kv,
                                             latent_rope_(p), p->s.att_max, p->s.att_inv,
                                             latent_pass_lists_(p) ? p->chosen : NULL, n, &shape, &places, dev);
    for (int step = 0; step < tp_chain_steps(x); step++) {
        const int piece = tp_chain_piece(step, x);
        if (piece >= 0) {
            const int first = (int)comm_share(n, piece, x->size), end = (int)comm_share(n, piece + 1, x->size);
            latent_backward_k_rope(&b, first, end, x->place > 0, dev);
        }
        tp_chain_pass(b.k_rope, n, width, step, x, dev);
    }
    tp_chain_end(b.k_rope, n, width, x, dev);
    latent_backward_end(a->dk_rope, &b, dev);
    latent_sum_rows_(p, a->dk_rope, p->size.dr, dev);
}

// dinp is written; room for N rows of the wider of rq and r in `room`
static inline void latent_layer_backward(const LatentPass* p, floatX* dinp, const floatX* dout, floatX* room,
                                         const Device* dev) {
    const LatentSizes* s = &p->size;
    const LatentTensors* a = &p->a;
    const int N = p->N;
    linear_backward(a->dattention, dout, a->attention, p->o, p->d_o, 0, N, dev);
    latent_heads_backward_(p, dev);
    latent_turn_(a->dq, p, s->H, s->dn + s->dr, s->dn, ROPE_INTERLEAVED, 1, dev);
    linear_backward(a->dq_low, a->dq, a->q_low_norm, p->q_b, p->dq_b, 0, N, dev);
    rmsnorm_backward(room, p->dq_norm, a->dq_low, a->q_low, p->q_norm, p->s.q_low_rstd, 0, N, s->rq, dev);
    LinearChain chain = linear_chain(dinp);
    linear_chain_backward(&chain, room, p->inp, p->q_a, p->dq_a, N, dev);
    linear_backward(a->dlatent, a->dkv, s->cp ? a->all_latent : a->kv_low_norm, p->kv_b, p->dkv_b, 0, latent_n_keys_(p),
                    dev);
    latent_sum_rows_(p, a->dlatent, s->r, dev);
    latent_take_part_(a->latent, a->kv_low, 0, s->r, p, dev);
    rmsnorm_backward(room, p->dkv_norm, a->dlatent, a->latent, p->kv_norm, p->s.kv_low_rstd, 0, N, s->r, dev);
    latent_put_part_(a->dkv_low, room, 0, s->r, p, dev);
    latent_turn_(a->dk_rope, p, 1, s->dr, 0, ROPE_INTERLEAVED, 1, dev);
    latent_put_part_(a->dkv_low, a->dk_rope, s->r, s->dr, p, dev);
    linear_chain_backward(&chain, a->dkv_low, p->inp, p->kv_a, p->dkv_a, N, dev);
    linear_chain_end(&chain, N, dev);
    if (p->is_full && latent_learns(s, p->purpose)) { latent_index_backward_(p, dev); }
}
#endif  // LLMC_LATENT_LAYER_H
