/*
Attention of DeepSeek V4, as a layer of a model has it: queries through a narrow layer, one head of keys that are values
as well, a window of these, and in most layers entries that stand for several tokens each; outputs through two matrices,
the first of them in groups of heads. Parts of the forward and backward pass of a layer, and lines of the tables of
activations. With x (N, D) the normed stream, of a position t of a document:
    q        norm(Wq_b norm(Wq_a x)) of each head, then RoPE         kv   norm(Wkv x), then RoPE: key and value
    entries  of r tokens each: pooled Wkv' x, weighed by a softmax of Wgate' x + ape (window_pool.h), norm, then RoPE at
             the window's first token
    chosen   CSA_LAYER: the topk entries of largest score (indexer.h), by queries of Wq_b' norm(Wq_a x) and entries of
             their own. Where a row has no more than topk, all are, and only an indexer that learns has scores
    o        attention over window and entries with a sink (sparse_attention.h), turned back by RoPE at t
    out      Wo_b (Wo_a of each group of heads)
    EntryTensors, EntryStatistics   what a pass leaves behind; a trainer has both in its own structs
    entry_tensor_rows, entry_statistic_rows   their lines
    EntryPass                 one layer: where its parameters and activations are
    entry_attention_forward   out (N, D) of inp (N, D); in generation caches are read and go on
    entry_attention_again     what --recompute leaves out that is a norm
    entry_attention_backward  from dout to the gradients of all parameters and of inp, dinp (N, D), written
The indexer learns by a loss of its own (EntrySizes.indexer): its gradients stop at x and norm(Wq_a x).
With --tp a rank has some of the heads, with their rows of Wq_b and sinks, and the groups of Wo_a that these are, with
their columns of Wo_b: H and G are its own. All else every rank has, and computes. Two sums over heads go on from rank
to rank, as a vocabulary's (tensor_parallel.h): those of the gradients of keys and entries, and what an indexer learns
by.
    entry_attention_sends   bytes that a rank sends because of these, of a layer's batch
Caches  kv (rows, room, d), which share_text copies position by position; entries (rows, room / r, d) and tokens whose
        entry is still to come, states of a text as a whole (entry_places.h).
With --cp a rank has its own positions of each row, and queries meet keys and entries of other ranks (entry_ranks.h).
    entry_attention_bring   ... entries of all ranks once more, before a backward pass without `again`
Order:  dinp is one chain through the outputs of Wq_a, Wkv, then the compressor's Wkv', Wgate'.
Source: DeepSeek-AI 2026, arXiv:2606.19348; doc/deepseek_v4.md "Formula", "RoPE", "Entries"
*/
#ifndef LLMC_ENTRY_ATTENTION_H
#define LLMC_ENTRY_ATTENTION_H
#include "../core/tensor.h"         // Tensor, activation
#include "../ops/cast.h"            // cast_scaled
#include "../ops/crossentropy.h"    // crossentropy_losses_sum
#include "../ops/indexer.h"         // index_choose, index_loss_forward, index_loss_backward
#include "../ops/rmsnorm.h"         // rmsnorm_forward, rmsnorm_backward
#include "../ops/rope.h"            // RopeTable, rope_forward, rope_backward
#include "../ops/sparse_attention.h"  // sparse_attention_forward, sparse_attention_mass, sparse_backward_begin, ...
#include "../ops/window_pool.h"     // window_pool_forward, window_pool_backward
#include "activations.h"            // cached_activation
#include "entry_ranks.h"            // EntryRanks: keys and entries of other ranks (--cp)
#include "linear.h"                 // Linear, linear_forward, linear_backward, linear_blocks_forward, tp_chain_pass

// which entries a layer has: Config.kinds of the model; the numbers are those of EntryPlaces
enum { WINDOW_LAYER = 'W', CSA_LAYER = 'C', HCA_LAYER = 'H' };
enum { CSA_ENTRIES, HCA_ENTRIES };

typedef struct {
    int D, H, d, rotated;  // channels; heads; of each; of which the last ones turn
    int qr, G, R;          // channels between the matrices of q; groups of the outputs, and channels of each in between
    int window, csa, hca;  // keys that a position sees; tokens of an entry
    int nI, dI, topk;      // of the indexer
    float eps;             // of all norms
    int indexer;           // IndexerTraining; INDEXER_DENSE: all entries are chosen while it learns
    int L;                 // layers that a pass goes through
    const char* kinds;     // of each
    const RankGroup* cp;   // with --cp: who has which positions; NULL: a rank has whole rows
} EntrySizes;

// what makes entries. new_v, new_g: in generation of the new tokens; with --cp of this rank's own, then their
// gradients. From waiting_v on, in generation: of those that wait, and the entries of all texts
typedef struct { floatX *v, *g, *pool, *entries, *new_v, *new_g, *waiting_v, *waiting_g, *cache; } CompressorTensors;

// from `dlow` on the gradients on their way back, one buffer each for all layers
typedef struct {
    floatX *q_low, *q_low_norm, *q_proj, *q, *kv_proj, *kv, *new_kv, *attention, *out_low, *index_q;
    CompressorTensors csa, hca, index;
    floatX *all_entries, *all_index, *ranks;  // with --cp: entries of all ranks; room
    floatX *dlow, *dattention, *dq, *dheads, *dq_low, *dkv, *dentries, *dpool, *dv, *dg, *dindex_q, *dindex_proj;
} EntryTensors;

// what must not lose digits, always float, and which entries are chosen
typedef struct {
    float *q_low_rstd, *q_rstd, *kv_rstd, *att_max, *att_inv, *csa_pool_rstd, *hca_pool_rstd, *index_pool_rstd,
        *index_proj, *index_weights, *index_mass, *index_losses, *dindex_weights;
    int* chosen;  // (N, entry_chosen): rows of entries, ascending; -1: no more
} EntryStatistics;

static inline int entry_ratio_(const EntrySizes* s, char kind) {
    return kind == CSA_LAYER ? s->csa : kind == HCA_LAYER ? s->hca : 0;
}

static inline int entry_has_(const EntrySizes* s, char kind) {
    for (int l = 0; l < s->L; l++) {
        if (s->kinds[l] == kind) { return 1; }
    }
    return 0;
}

// how many entries a list has room for where rows have T positions
static inline int entry_chosen(const EntrySizes* s, int T) {
    const int all = T / s->csa;
    return s->indexer == INDEXER_DENSE || all < s->topk ? all : s->topk;
}

// do indexers learn from rows of T positions?
static inline int entry_learns(const EntrySizes* s, int T, Purpose purpose) {
    return s->indexer != INDEXER_OFF && purpose == TO_TRAIN && entry_has_(s, CSA_LAYER) && T >= s->csa;
}

// are scores computed?
static inline int entry_scores(const EntrySizes* s, int T, Purpose purpose) {
    return (entry_has_(s, CSA_LAYER) && T / s->csa > s->topk) || entry_learns(s, T, purpose);
}

// ---- lines of the tables ----

typedef struct {
    int B, T, N;             // rows; positions of each; of a pass, those of this rank
    int L_norms, L_block;    // layers that keep what --recompute 1 and 3 leave out
    Purpose purpose;
} EntryRows;

// a line for the layers of a kind
static inline Tensor entry_row_(const EntrySizes* s, const char* kinds, const char* name, size_t field, int layers,
                                int rows, int columns) {
    return kind_activation(s->kinds, kinds, name, field, layers, rows, columns);
}

static inline Tensor entry_state_(const EntrySizes* s, const char* kinds, const char* name, size_t field, int rows,
                                  int columns) {
    Tensor t = entry_row_(s, kinds, name, field, s->L, rows, columns);
    t.is_state = 1;
    return t;
}

// entries of r tokens that a pass makes
static inline int entry_made_(const EntrySizes* s, const EntryRows* x, int r) {
    if (x->purpose == TO_GENERATE) { return x->N / r + x->B; }
    return x->B * (x->T / r) / (s->cp ? s->cp->size : 1);
}

// rows of a halo, with --cp
static inline int entry_attention_before(const EntrySizes* s, int T) {
    const int csa = entry_has_(s, CSA_LAYER) ? entry_tokens_before(s->csa, 1) : 0;
    const int hca = entry_has_(s, HCA_LAYER) ? entry_tokens_before(s->hca, 0) : 0, of_entries = csa > hca ? csa : hca;
    return entry_before(s->window - 1 > of_entries ? s->window - 1 : of_entries, T, s->cp);
}

// rows of keys and tokens of a pass that is no generation
static inline int entry_token_rows_(const EntrySizes* s, const EntryRows* x) {
    return x->N + x->B * entry_attention_before(s, x->T);
}

// of entries of r tokens and d channels, whose layers have C; L: layers that keep them for backward
static inline Tensor* compressor_tensor_rows_(Tensor* t, const char* const names[4], size_t at, const EntrySizes* s,
                                              const EntryRows* x, const char* kinds, int r, int C, int d, int L) {
    const int generates = x->purpose == TO_GENERATE, overlap = C > d, most = entry_most_tokens(r, overlap);
    const int W = entry_made_(s, x, r), waiting = generates ? x->B * most : 0;
    const int rows = generates ? x->N + waiting : entry_token_rows_(s, x), moves = generates || s->cp;
#define FIELD(name) #name, at + offsetof(CompressorTensors, name)
    *t++ = entry_row_(s, kinds, names[0], at + offsetof(CompressorTensors, v),       L, rows, C);
    *t++ = entry_row_(s, kinds, names[1], at + offsetof(CompressorTensors, g),       L, rows, C);
    *t++ = entry_row_(s, kinds, names[2], at + offsetof(CompressorTensors, pool),    L, W, d);
    *t++ = entry_row_(s, kinds, names[3], at + offsetof(CompressorTensors, entries), L, W, d);
    *t++ = entry_row_(s, kinds, FIELD(new_v),   0, moves ? x->N : 0, C);
    *t++ = entry_row_(s, kinds, FIELD(new_g),   0, moves ? x->N : 0, C);
    if (!generates) { return t; }
    *t++ = entry_state_(s, kinds, FIELD(waiting_v), waiting, C);
    *t++ = entry_state_(s, kinds, FIELD(waiting_g), waiting, C);
    *t++ = entry_state_(s, kinds, FIELD(cache),     x->B * (x->T / r), d);
#undef FIELD
    return t;
}

// channels of the widest entry of any kind
static inline int entry_widest_(const EntrySizes* s) {
    return s->d > s->dI || s->indexer == INDEXER_OFF ? s->d : s->dI;
}

// most entries of a batch, of any kind
static inline int entry_most_(const EntrySizes* s, const EntryRows* x) {
    const int csa = entry_has_(s, CSA_LAYER) ? x->T / s->csa : 0, hca = entry_has_(s, HCA_LAYER) ? x->T / s->hca : 0;
    return x->B * (csa > hca ? csa : hca);
}

// with --cp
static inline Tensor* entry_ranks_rows_(Tensor* t, size_t at, const EntrySizes* s, const EntryRows* x) {
    const int entries = entry_most_(s, x), before = entry_attention_before(s, x->T), has_csa = entry_has_(s, CSA_LAYER);
    const int indexed = entry_scores(s, x->T, x->purpose) ? x->B * (x->T / s->csa) : 0;
    const int widest = has_csa && s->dI > s->d ? s->dI : s->d;
    const size_t room = entry_ranks_room_elements(x->B, before, has_csa ? 2 * widest : widest, entries, widest);
#define FIELD(name) #name, at + offsetof(EntryTensors, name)
    *t++ = activation(FIELD(all_entries), 0, entries, s->d);
    *t++ = activation(FIELD(all_index),   0, indexed, s->dI);
    *t++ = activation(FIELD(ranks),       0, (int)ceil_div((int64_t)room, 64), 64);
#undef FIELD
    return t;
}

// of a pass; `at`: offset of EntryTensors in the struct of all. Returns the end
static inline Tensor* entry_tensor_rows(Tensor* t, size_t at, const EntrySizes* s, const EntryRows* x) {
    static const char* const csa[] = {"csa_v", "csa_g", "csa_pool", "csa_entries"};
    static const char* const hca[] = {"hca_v", "hca_g", "hca_pool", "hca_entries"};
    static const char* const index[] = {"index_v", "index_g", "index_pool", "index_k"};
    const int N = x->N, HQ = s->H * s->d, trains = x->purpose == TO_TRAIN, L = x->L_block;
    const int generates = x->purpose == TO_GENERATE, N_train = trains ? N : 0;
    const int learns = entry_learns(s, x->T, x->purpose), scores = entry_scores(s, x->T, x->purpose);
    const int N_learn = learns ? N : 0, rows = entry_token_rows_(s, x), rows_train = trains ? rows : 0;
#define FIELD(name) #name, at + offsetof(EntryTensors, name)
    *t++ = activation(FIELD(q_low),      L, N, s->qr);
    *t++ = activation(FIELD(q_low_norm), x->L_norms, N, s->qr);
    *t++ = activation(FIELD(q_proj),     L, N, HQ);   // before the norm of its heads
    *t++ = activation(FIELD(q),          L, N, HQ);   // turned by RoPE, as kv
    *t++ = activation(FIELD(kv_proj),    L, N, s->d);
    *t++ = cached_activation(FIELD(kv), generates ? s->L : L, generates ? x->B * x->T : rows, s->d);
    *t++ = activation(FIELD(new_kv),     0, generates || s->cp ? N : 0, s->d);  // on its way there
    *t++ = activation(FIELD(attention),  L, N, HQ);   // turned back; on a GPU backward turns it again
    *t++ = activation(FIELD(out_low),    L, N, s->G * s->R);
    if (entry_has_(s, CSA_LAYER)) {
        t = compressor_tensor_rows_(t, csa, at + offsetof(EntryTensors, csa), s, x, "C", s->csa, 2 * s->d, s->d, L);
    }
    if (entry_has_(s, HCA_LAYER)) {
        t = compressor_tensor_rows_(t, hca, at + offsetof(EntryTensors, hca), s, x, "H", s->hca, s->d, s->d, L);
    }
    if (scores) {
        const int L_index = learns ? L : 0;
        t = compressor_tensor_rows_(t, index, at + offsetof(EntryTensors, index), s, x, "C", s->csa, 2 * s->dI, s->dI,
                                    L_index);
        *t++ = entry_row_(s, "C", FIELD(index_q), L_index, N, s->nI * s->dI);
    }
    if (s->cp) { t = entry_ranks_rows_(t, at, s, x); }
    *t++ = activation(FIELD(dlow),       0, N_train, s->G * s->R);
    *t++ = activation(FIELD(dattention), 0, N_train, HQ);
    *t++ = activation(FIELD(dq),         0, N_train, HQ);
    *t++ = activation(FIELD(dheads),     0, N_train, HQ);  // of q_proj
    *t++ = activation(FIELD(dq_low),     0, N_train, s->qr);  // of q_low_norm; then of q_low in its place
    *t++ = activation(FIELD(dkv),        0, rows_train, s->d);
    *t++ = activation(FIELD(dentries),   0, trains * entry_most_(s, x), entry_widest_(s));
    *t++ = activation(FIELD(dpool),      0, trains * entry_most_(s, x), entry_widest_(s));
    *t++ = activation(FIELD(dv),         0, rows_train, 2 * entry_widest_(s));
    *t++ = activation(FIELD(dg),         0, rows_train, 2 * entry_widest_(s));
    *t++ = activation(FIELD(dindex_q),   0, N_learn, s->nI * s->dI);
    *t++ = activation(FIELD(dindex_proj), 0, N_learn, s->nI);
#undef FIELD
    return t;
}

static inline Tensor* entry_statistic_rows(Tensor* t, size_t at, const EntrySizes* s, const EntryRows* x) {
    const int N = x->N, L = x->L_block, trains = x->purpose == TO_TRAIN;
    const int learns = entry_learns(s, x->T, x->purpose), scores = entry_scores(s, x->T, x->purpose);
    const int K = entry_chosen(s, x->T), L_index = learns ? L : 0, N_learn = learns ? N : 0;
#define FIELD(name) #name, at + offsetof(EntryStatistics, name)
#define ENTRIES(r) entry_made_(s, x, r)
    *t++ = activation(FIELD(q_low_rstd), L, N, 1);
    *t++ = activation(FIELD(q_rstd),     L, N, s->H);
    *t++ = activation(FIELD(kv_rstd),    L, N, 1);
    *t++ = activation("attention_max", at + offsetof(EntryStatistics, att_max), L, N, s->H);
    *t++ = activation("attention_inv", at + offsetof(EntryStatistics, att_inv), L, N, s->H);
    if (entry_has_(s, CSA_LAYER)) { *t++ = entry_row_(s, "C", FIELD(csa_pool_rstd), L, ENTRIES(s->csa), 1); }
    if (entry_has_(s, HCA_LAYER)) { *t++ = entry_row_(s, "H", FIELD(hca_pool_rstd), L, ENTRIES(s->hca), 1); }
    if (scores) {
        *t++ = entry_row_(s, "C", FIELD(index_pool_rstd), L_index, ENTRIES(s->csa), 1);
        *t++ = entry_row_(s, "C", FIELD(index_proj),    0, N, s->nI);
        *t++ = entry_row_(s, "C", FIELD(index_weights), L_index, N, s->nI);
        *t++ = entry_row_(s, "C", FIELD(chosen),        trains ? s->L : 0, N, K);  // never chosen again
    }
    *t++ = activation(FIELD(index_mass),     0, N_learn, K);
    *t++ = activation(FIELD(index_losses),   0, N_learn, 1);
    *t++ = activation(FIELD(dindex_weights), 0, N_learn, s->nI);
#undef ENTRIES
#undef FIELD
    return t;
}

// Scratch of sparse_attention_backward on CPUs, N positions in rows of T, without that of single threads
static inline double entry_attention_scratch_(const EntrySizes* s, double N, int T) {
    const double csa = entry_has_(s, CSA_LAYER) ? entry_chosen(s, T) : 0;
    const double hca = entry_has_(s, HCA_LAYER) ? T / s->hca : 0;
    const double keys = (s->window < T ? s->window : T) + (csa > hca ? csa : hca);
    const double of_head = 2.0 * sizeof(float) * N * (keys + 32.0), all = of_head * s->H;
    const double kept = all < (double)SPARSE_KEPT ? all : fmax((double)SPARSE_KEPT, 16.0 * of_head);
    return fmin(all, kept) + sizeof(float) * N * (s->H + 2.0 * s->d + 2.0 * csa);
}

// the largest scratch that attention or the indexer of a layer asks for: n_rows rows of T positions, of which no text
// is made, of which this rank has N
static inline double entry_workspace_bytes(const EntrySizes* s, int N, int n_rows, int T, Purpose purpose,
                                           const Device* dev) {
    const int goes_back = DEVICE_IS_SHARED && purpose == TO_TRAIN;
    const double of_attention = goes_back ? entry_attention_scratch_(s, N, T) : 0.0;
    if (!entry_has_(s, CSA_LAYER) || !entry_scores(s, T, purpose)) { return of_attention; }
    const IndexShape index = {N, s->nI, s->dI, entry_chosen(s, T)};
    const int entries = T / s->csa, learns = entry_learns(s, T, purpose);
    return fmax(of_attention, index_workspace_bytes(&index, n_rows * entries, entries, learns, dev));
}

// with --tp, of a layer of this kind in training, for B rows of T positions; is_back: backward goes through it
static inline double entry_attention_sends(const EntrySizes* s, char kind, int is_back, int B, int T,
                                           const RankGroup* tp) {
    const int r = entry_ratio_(s, kind), learns = kind == CSA_LAYER && entry_learns(s, T, TO_TRAIN);
    const int64_t N = (int64_t)B * T / (s->cp ? s->cp->size : 1), keys = N + (int64_t)B * entry_attention_before(s, T);
    const double mass = sizeof(float) * (double)entry_chosen(s, T), width = 2.0 * sizeof(float) * s->d;
    const double of_entries = tp_chain_sends(r > 0 ? (int64_t)B * (T / r) : 0, width, tp);
    const double sums = is_back ? tp_chain_sends(keys, width, tp) + of_entries : 0.0;
    return sums + (learns ? (1.0 + is_back) * tp_chain_sends(N, mass, tp) : 0.0);
}

// ---- a layer ----

typedef struct {
    Linear wkv, wgate;
    LinearGradients dwkv, dwgate;
    const float* ape;    // (r, C)
    const floatX* norm;  // (d)
    float *dape, *dnorm; // NULL: do not learn
} Compressor;

// the gradients are needed in backward alone
typedef struct {
    EntrySizes size;
    char kind;
    EntryTensors a;
    EntryStatistics s;
    const floatX* inp;                        // (N, D)
    Linear wq_a, wq_b, wkv, wo_a, wo_b, index_wq_b, index_proj;
    LinearGradients dwq_a, dwq_b, dwkv, dwo_a, dwo_b, dindex_wq_b, dindex_proj;
    const floatX *q_norm, *kv_norm;
    const float* sinks;
    float *dq_norm, *dkv_norm, *dsinks;       // NULL: do not learn
    Compressor entries, index;                // of layers that have some
    const RopeTable* turn;                    // of this kind of layer
    const TokenBatch* batch;
    const RankGroup* tp;                      // of whose heads this rank has some
    int T, N;                                 // positions of a row, of which there is room; of the pass
    Purpose purpose;
    float* index_number;                      // where the sum of the indexer's losses goes; NULL: nobody asks
    float index_dloss;                        // 1 / positions that have such a loss, in the whole update
} EntryPass;

static inline int entry_pass_kind_(const EntryPass* p) { return p->kind == CSA_LAYER ? CSA_ENTRIES : HCA_ENTRIES; }
static inline const EntryWindows* entry_pass_windows_(const EntryPass* p) {
    return p->kind == WINDOW_LAYER ? NULL : &p->batch->entries.windows[entry_pass_kind_(p)];
}

static inline int entry_pass_generates_(const EntryPass* p) { return p->batch->n_texts > 0; }

// have keys and tokens rows of their own, to which they go from where they are computed?
static inline int entry_pass_moves_(const EntryPass* p) { return p->size.cp || entry_pass_generates_(p); }

static inline EntryRanks entry_pass_ranks_(const EntryPass* p) { return entry_ranks(p->batch, p->a.ranks); }

// entries of all ranks, in training
static inline const floatX* entry_pass_entries_(const EntryPass* p) {
    if (p->kind == WINDOW_LAYER) { return NULL; }
    return p->size.cp ? p->a.all_entries : p->kind == CSA_LAYER ? p->a.csa.entries : p->a.hca.entries;
}

static inline const floatX* entry_pass_index_(const EntryPass* p) {
    return p->size.cp ? p->a.all_index : p->a.index.entries;
}

// how many these are
static inline int entry_pass_n_entries_(const EntryPass* p) {
    const EntryWindows* w = entry_pass_windows_(p);
    return w ? p->batch->rows.B * (p->batch->rows.T / w->r) : 0;
}

static inline int entry_pass_scores_(const EntryPass* p) {
    return p->kind == CSA_LAYER && entry_scores(&p->size, p->T, p->purpose);
}

static inline int entry_pass_learns_(const EntryPass* p) {
    return p->kind == CSA_LAYER && entry_learns(&p->size, p->T, p->purpose);
}

// n rows of `heads` heads of `width` channels, of which the last ones turn; places (n): which row of the table each has
static inline void entry_turn_(floatX* x, const EntryPass* p, const int* places, int n, int heads, int width, int back,
                               const Device* dev) {
    RopeShape shape = rope_shape(1, n, 0, heads, width, ROPE_INTERLEAVED);
    shape.rotated = p->size.rotated, shape.table_row = (size_t)p->size.rotated / 2, shape.places = places;
    floatX* first = x + (width - p->size.rotated);
    if (back) { rope_backward(first, p->turn->cosines, p->turn->sines, &shape, dev); }
    else { rope_forward(first, p->turn->cosines, p->turn->sines, &shape, dev); }
}

static inline SparseShape entry_attention_shape_(const EntryPass* p) {
    SparseShape s;
    memset(&s, 0, sizeof s);
    s.N = p->N, s.H = p->size.H, s.d = p->size.d, s.window = p->size.window;
    s.topk = entry_chosen(&p->size, p->T);
    s.scale = 1.0f / sqrtf((float)p->size.d);
    s.n_rows = p->batch->entries.tokens.N;
    return s;
}

static inline IndexShape entry_index_shape_(const EntryPass* p) {
    const IndexShape s = {p->N, p->size.nI, p->size.dI, entry_chosen(&p->size, p->T)};
    return s;
}

static inline float entry_index_scale_(const EntrySizes* s) { return 1.0f / sqrtf((float)(s->dI * s->nI)); }

// ---- forward ----

// In generation: tokens that waited, then the new ones, text by text, come together in `to`; `width`: channels of a row
static inline void entry_gather_tokens_(floatX* to, const floatX* fresh, const floatX* waiting, int width, int r,
                                        int overlap, const TokenBatch* batch, const Device* dev) {
    const size_t C = (size_t)width, most = (size_t)entry_most_tokens(r, overlap) * C;
    for (int i = 0; i < batch->n_texts; i++) {
        const CachedText* text = &batch->texts[i];
        const size_t n_waiting = (size_t)(text->n_cached - entry_first_token(text->n_cached, r, overlap));
        const size_t n_new = (size_t)(text->n - text->n_cached);
        device_copy(to, waiting + (size_t)text->row * most, sizeof(floatX) * n_waiting * C, dev);
        device_copy(to + n_waiting * C, fresh, sizeof(floatX) * n_new * C, dev);
        to += (n_waiting + n_new) * C, fresh += n_new * C;
    }
}

// ... and those that wait from now on go back
static inline void entry_keep_tokens_(floatX* waiting, const floatX* from, int width, int r, int overlap,
                                      const TokenBatch* batch, const Device* dev) {
    const size_t C = (size_t)width, most = (size_t)entry_most_tokens(r, overlap) * C;
    for (int i = 0; i < batch->n_texts; i++) {
        const CachedText* text = &batch->texts[i];
        const int first = entry_first_token(text->n_cached, r, overlap), next = entry_first_token(text->n, r, overlap);
        device_copy(waiting + (size_t)text->row * most, from + (size_t)(next - first) * C,
                    sizeof(floatX) * (size_t)(text->n - next) * C, dev);
        from += (size_t)(text->n - first) * C;
    }
}

// new entries of all texts go to their rows of the cache
static inline void entry_keep_entries_(floatX* cache, const floatX* from, int width, int r, int room,
                                       const TokenBatch* batch, const Device* dev) {
    for (int i = 0; i < batch->n_texts; i++) {
        const CachedText* text = &batch->texts[i];
        const size_t first = (size_t)(text->n_cached / r), n = (size_t)(text->n / r) - first, C = (size_t)width;
        device_copy(cache + ((size_t)text->row * (size_t)(room / r) + first) * C, from, sizeof(floatX) * n * C, dev);
        from += n * C;
    }
}

// with --cp: v and g of C channels get their halos
static inline void entry_spread_tokens_(const EntryPass* p, const CompressorTensors* a, int C, const Device* dev) {
    const EntryWindows* w = entry_pass_windows_(p);
    const EntryRanks ranks = entry_pass_ranks_(p);
    const int before = entry_tokens_before(w->r, w->overlap);
    entry_ranks_spread(&ranks, a->v, a->new_v, before, C, dev);
    entry_ranks_spread(&ranks, a->g, a->new_g, before, C, dev);
}

// with --cp: entries of all ranks, all_entries or all_index, from own ones
static inline const floatX* entry_gather_(const EntryPass* p, floatX* all, const floatX* own, int d,
                                          const Device* dev) {
    const EntryRanks ranks = entry_pass_ranks_(p);
    entry_ranks_gather(&ranks, all, own, entry_pass_windows_(p)->r, d, dev);
    return all;
}

// entries of d channels; returns where all of them are
static inline const floatX* entry_compress_(const EntryPass* p, const Compressor* x, const CompressorTensors* a,
                                            float* rstd, int d, const Device* dev) {
    const int i = entry_pass_kind_(p), C = x->wkv.OC, generates = entry_pass_generates_(p);
    const int moves = entry_pass_moves_(p);
    const EntryWindows* w = &p->batch->entries.windows[i];
    linear_forward(moves ? a->new_v : a->v, p->inp, x->wkv, p->N, dev);
    linear_forward(moves ? a->new_g : a->g, p->inp, x->wgate, p->N, dev);
    if (p->size.cp) { entry_spread_tokens_(p, a, C, dev); }
    if (generates) {
        entry_gather_tokens_(a->v, a->new_v, a->waiting_v, C, w->r, w->overlap, p->batch, dev);
        entry_gather_tokens_(a->g, a->new_g, a->waiting_g, C, w->r, w->overlap, p->batch, dev);
    }
    if (w->W > 0) {  // most new tokens complete no entry
        window_pool_forward(a->pool, a->v, a->g, x->ape, w, d, dev);
        rmsnorm_forward(a->entries, rstd, a->pool, x->norm, p->size.eps, w->W, d, dev);
        entry_turn_(a->entries, p, p->batch->entries.turns[i], w->W, 1, d, 0, dev);
    }
    floatX* all = x == &p->index ? p->a.all_index : p->a.all_entries;
    if (p->size.cp) { return entry_gather_(p, all, a->entries, d, dev); }
    if (!generates) { return a->entries; }
    entry_keep_tokens_(a->waiting_v, a->v, C, w->r, w->overlap, p->batch, dev);
    entry_keep_tokens_(a->waiting_g, a->g, C, w->r, w->overlap, p->batch, dev);
    entry_keep_entries_(a->cache, a->entries, d, w->r, p->T, p->batch, dev);
    return a->cache;
}

// scores and choice; replay: the choice has been made
static inline void entry_choose_(const EntryPass* p, int replay, const Device* dev) {
    const EntryTensors* a = &p->a;
    const EntryPlaces* places = &p->batch->entries;
    const IndexShape shape = entry_index_shape_(p);
    if (replay && !entry_pass_learns_(p)) { return; }
    const floatX* k = entry_compress_(p, &p->index, &a->index, p->s.index_pool_rstd, p->size.dI, dev);
    linear_forward(a->index_q, a->q_low_norm, p->index_wq_b, p->N, dev);
    entry_turn_(a->index_q, p, places->places.t, p->N, p->size.nI, p->size.dI, 0, dev);
    linear_forward(p->s.index_proj, p->inp, p->index_proj, p->N, dev);
    cast_scaled(p->s.index_weights, (const float*)p->s.index_proj, entry_index_scale_(&p->size),
                (size_t)p->N * (size_t)p->size.nI, dev);
    if (replay) { return; }
    index_choose(p->s.chosen, NULL, p->T / p->size.csa, a->index_q, k, p->s.index_weights, &shape, &places->places,
                 &places->windows[CSA_ENTRIES], dev);
}

// new keys go to the cache
static inline void entry_keep_keys_(const EntryPass* p, const Device* dev) {
    const size_t d = (size_t)p->size.d;
    const floatX* from = p->a.new_kv;
    for (int i = 0; i < p->batch->n_texts; i++) {
        const CachedText* text = &p->batch->texts[i];
        const size_t n = (size_t)(text->n - text->n_cached);
        const size_t at = (size_t)text->row * (size_t)p->T + (size_t)text->n_cached;
        device_copy(p->a.kv + at * d, from, sizeof(floatX) * n * d, dev);
        from += n * d;
    }
}

// queries and keys, normed and turned
static inline void entry_queries_(const EntryPass* p, const Device* dev) {
    const EntrySizes* s = &p->size;
    const EntryTensors* a = &p->a;
    const int N = p->N, *t = p->batch->entries.places.t;
    floatX* kv = entry_pass_moves_(p) ? a->new_kv : a->kv;
    linear_forward(a->q_low, p->inp, p->wq_a, N, dev);
    rmsnorm_forward(a->q_low_norm, p->s.q_low_rstd, a->q_low, p->q_norm, s->eps, N, s->qr, dev);
    linear_forward(a->q_proj, a->q_low_norm, p->wq_b, N, dev);
    rmsnorm_forward(a->q, p->s.q_rstd, a->q_proj, (const floatX*)NULL, s->eps, N * s->H, s->d, dev);
    entry_turn_(a->q, p, t, N, s->H, s->d, 0, dev);
    linear_forward(a->kv_proj, p->inp, p->wkv, N, dev);
    rmsnorm_forward(kv, p->s.kv_rstd, a->kv_proj, p->kv_norm, s->eps, N, s->d, dev);
    entry_turn_(kv, p, t, N, 1, s->d, 0, dev);
    if (entry_pass_generates_(p)) { entry_keep_keys_(p, dev); }
    if (s->cp) {
        const EntryRanks ranks = entry_pass_ranks_(p);
        entry_ranks_spread(&ranks, a->kv, kv, s->window - 1, s->d, dev);
    }
}

// The sum of all heads' weights of each entry that is chosen
static inline void entry_mass_(const EntryPass* p, const floatX* entries, const Device* dev) {
    const SparseShape shape = entry_attention_shape_(p);
    const RankGroup* x = p->tp;
    const size_t K = (size_t)shape.topk, H = (size_t)shape.H;
    for (int step = 0; step < tp_chain_steps(x); step++) {
        const int piece = tp_chain_piece(step, x);
        if (piece >= 0) {
            const size_t first = (size_t)comm_share(p->N, piece, x->size);
            SparseShape turn = shape;
            turn.N = (int)((size_t)comm_share(p->N, piece + 1, x->size) - first);
            sparse_attention_mass(p->s.index_mass + first * K, p->a.q + first * H * (size_t)shape.d, entries,
                                  p->s.att_max + first * H, p->s.att_inv + first * H, p->s.chosen + first * K,
                                  x->place > 0, &turn, entry_pass_windows_(p), dev);
        }
        tp_chain_pass(p->s.index_mass, p->N, sizeof(float) * K, step, x, dev);
    }
    tp_chain_end(p->s.index_mass, p->N, sizeof(float) * K, x, dev);
}

// what the indexer loses by its choice
static inline void entry_index_loss_(const EntryPass* p, const floatX* entries, const Device* dev) {
    const IndexShape index = entry_index_shape_(p);
    const EntryWindows* w = entry_pass_windows_(p);
    entry_mass_(p, entries, dev);
    index_loss_forward(p->s.index_losses, p->s.index_mass, p->s.chosen, p->a.index_q, entry_pass_index_(p),
                       p->s.index_weights, &index, w, dev);
    crossentropy_losses_sum(p->index_number, p->s.index_losses, p->N, dev);
}

// replay: these positions have been here before, and have chosen their entries
static inline void entry_attention_forward(const EntryPass* p, floatX* out, int replay, const Device* dev) {
    const EntrySizes* s = &p->size;
    const EntryTensors* a = &p->a;
    const SparseShape shape = entry_attention_shape_(p);
    const EntryWindows* w = entry_pass_windows_(p);
    const Places* places = &p->batch->entries.places;
    const floatX* entries = NULL;
    const int scores = entry_pass_scores_(p);
    entry_queries_(p, dev);
    if (p->kind == CSA_LAYER) { entries = entry_compress_(p, &p->entries, &a->csa, p->s.csa_pool_rstd, s->d, dev); }
    if (p->kind == HCA_LAYER) { entries = entry_compress_(p, &p->entries, &a->hca, p->s.hca_pool_rstd, s->d, dev); }
    if (scores) { entry_choose_(p, replay, dev); }
    sparse_attention_forward(a->attention, p->s.att_max, p->s.att_inv, a->q, a->kv, entries, p->sinks,
                             scores ? p->s.chosen : NULL, &shape, places, w, dev);
    if (entry_pass_learns_(p) && p->index_number && !replay) { entry_index_loss_(p, entries, dev); }
    entry_turn_(a->attention, p, places->t, p->N, s->H, s->d, 1, dev);
    linear_blocks_forward(a->out_low, a->attention, p->wo_a, s->G, p->N, dev);
    linear_forward(out, a->out_low, p->wo_b, p->N, dev);
}

// the norm that --recompute 1 leaves out
static inline void entry_attention_again(const EntryPass* p, const Device* dev) {
    rmsnorm_forward(p->a.q_low_norm, p->s.q_low_rstd, p->a.q_low, p->q_norm, p->size.eps, p->N, p->size.qr, dev);
}

static inline void entry_attention_bring(const EntryPass* p, const Device* dev) {
    const EntryTensors* a = &p->a;
    if (!p->size.cp || p->kind == WINDOW_LAYER) { return; }
    entry_gather_(p, a->all_entries, p->kind == CSA_LAYER ? a->csa.entries : a->hca.entries, p->size.d, dev);
    if (entry_pass_learns_(p)) { entry_gather_(p, a->all_index, a->index.entries, p->size.dI, dev); }
}

// ---- backward ----

// of v and g of this rank's tokens
typedef struct { floatX *dv, *dg; } TokenGradients;

// with --cp, of C channels: what has been asked of tokens in halos goes to their ranks
static inline TokenGradients entry_collect_tokens_(const EntryPass* p, const CompressorTensors* a, int C,
                                                   const Device* dev) {
    const TokenGradients own = {p->a.dv, p->a.dg}, collected = {a->new_v, a->new_g};
    const EntryWindows* w = entry_pass_windows_(p);
    const EntryRanks ranks = entry_pass_ranks_(p);
    const int before = entry_tokens_before(w->r, w->overlap);
    if (!p->size.cp) { return own; }
    entry_ranks_collect(&ranks, a->new_v, p->a.dv, before, C, dev);
    entry_ranks_collect(&ranks, a->new_g, p->a.dg, before, C, dev);
    return collected;
}

// from dentries, of all entries of d channels, to the gradients of tokens
static inline TokenGradients entry_compress_back_(const EntryPass* p, const Compressor* x, const CompressorTensors* a,
                                                  const float* rstd, int d, const Device* dev) {
    const int i = entry_pass_kind_(p), C = x->wkv.OC;
    const EntryPlaces* places = &p->batch->entries;
    const EntryWindows* w = &places->windows[i];
    if (p->size.cp) {
        const EntryRanks ranks = entry_pass_ranks_(p);
        entry_ranks_sum(&ranks, p->a.dentries, w->r, d, dev);
        halo_clear(&ranks.halo, p->a.dv, C, dev);
        halo_clear(&ranks.halo, p->a.dg, C, dev);
    }
    if (w->W > 0) {
        entry_turn_(p->a.dentries, p, places->turns[i], w->W, 1, d, 1, dev);
        rmsnorm_backward(p->a.dpool, x->dnorm, p->a.dentries, a->pool, x->norm, rstd, 0, w->W, d, dev);
    } else if (x->dnorm) {
        device_zero(x->dnorm, sizeof(float) * (size_t)d, dev);
    }
    window_pool_backward(p->a.dv, p->a.dg, x->dape, p->a.dpool, a->v, a->g, x->ape, a->pool, w, &places->tokens,
                         places->tokens.N, d, dev);
    return entry_collect_tokens_(p, a, C, dev);
}

// the indexer's own gradients, which reach nothing else
static inline void entry_index_backward_(const EntryPass* p, const floatX* entries, const Device* dev) {
    const EntrySizes* s = &p->size;
    const EntryTensors* a = &p->a;
    const EntryPlaces* places = &p->batch->entries;
    const IndexShape index = entry_index_shape_(p);
    const EntryWindows* w = entry_pass_windows_(p);
    const int N = p->N;
    entry_mass_(p, entries, dev);
    index_loss_backward(a->dindex_q, a->dentries, p->s.dindex_weights, p->index_dloss, p->s.index_mass, p->s.chosen,
                        a->index_q, entry_pass_index_(p), p->s.index_weights, entry_pass_n_entries_(p), &index,
                        &places->places, w, dev);
    entry_turn_(a->dindex_q, p, places->places.t, N, s->nI, s->dI, 1, dev);
    linear_backward_weight(a->dindex_q, a->q_low_norm, p->index_wq_b, p->dindex_wq_b, N, dev);
    cast_scaled(a->dindex_proj, (const float*)p->s.dindex_weights, entry_index_scale_(s), (size_t)N * (size_t)s->nI,
                dev);
    linear_backward_weight(a->dindex_proj, p->inp, p->index_proj, p->dindex_proj, N, dev);
    const TokenGradients d = entry_compress_back_(p, &p->index, &a->index, p->s.index_pool_rstd, s->dI, dev);
    linear_backward_weight(d.dv, p->inp, p->index.wkv, p->index.dwkv, N, dev);
    linear_backward_weight(d.dg, p->inp, p->index.wgate, p->index.dwgate, N, dev);
}

#ifdef __CUDACC__
typedef SparseBackwardOf<floatX> EntryBackward_;
#else
typedef SparseBackward EntryBackward_;
#endif

// the sums that keys and entries have over the heads of all ranks, piece by piece
static inline void entry_sums_(EntryBackward_* b, int n_keys, int n_entries, int d, const RankGroup* x,
                               const Device* dev) {
    const int n_sums = n_entries > 0 ? SPARSE_CHAINS : SPARSE_CHAINS / 2;
    const size_t width = sizeof(float) * (size_t)d;
    SparseSums sums[SPARSE_CHAINS];
    sparse_backward_sums(sums, b);
    for (int step = 0; step < tp_chain_steps(x); step++) {
        const int p = tp_chain_piece(step, x), size = x->size;
        if (p >= 0) {
            const SparsePart keys = {(int)comm_share(n_keys, p, size), (int)comm_share(n_keys, p + 1, size)};
            const SparsePart entries = {(int)comm_share(n_entries, p, size), (int)comm_share(n_entries, p + 1, size)};
            sparse_backward_keys(b, keys, entries, dev);
        }
        for (int i = 0; i < n_sums; i++) { tp_chain_pass(sums[i].rows, sums[i].n, width, step, x, dev); }
    }
    for (int i = 0; i < n_sums; i++) { tp_chain_end(sums[i].rows, sums[i].n, width, x, dev); }
}

// from the gradient of the outputs of all heads to those of the keys, which is returned, of entries and of q_proj
static inline floatX* entry_keys_backward_(const EntryPass* p, const floatX* entries, const Device* dev) {
    const EntrySizes* s = &p->size;
    const EntryTensors* a = &p->a;
    const Places* places = &p->batch->entries.places;
    const EntryWindows* w = entry_pass_windows_(p);
    const SparseShape shape = entry_attention_shape_(p);
    const int N = p->N, n_entries = entry_pass_n_entries_(p);
    entry_turn_(a->dattention, p, places->t, N, s->H, s->d, 0, dev);
    // out, too, becomes what sparse_attention wrote, but for rounding: Wo_a has been through with it
    if (!DEVICE_IS_SHARED) { entry_turn_(a->attention, p, places->t, N, s->H, s->d, 0, dev); }
    EntryBackward_ b = sparse_backward_begin(a->dq, a->dkv, a->dentries, p->dsinks, a->dattention, a->attention, a->q,
                                             a->kv, entries, p->s.att_max, p->s.att_inv, p->sinks,
                                             entry_pass_scores_(p) ? p->s.chosen : NULL, n_entries, &shape, places, w,
                                             dev);
    entry_sums_(&b, sparse_rows(&shape), n_entries, s->d, p->tp, dev);
    sparse_backward_end(&b, dev);
    entry_turn_(a->dq, p, places->t, N, s->H, s->d, 1, dev);
    rmsnorm_backward(a->dheads, (float*)NULL, a->dq, a->q_proj, (const floatX*)NULL, p->s.q_rstd, 0, N * s->H, s->d,
                     dev);
    if (s->cp) {
        const EntryRanks ranks = entry_pass_ranks_(p);
        entry_ranks_collect(&ranks, a->new_kv, a->dkv, s->window - 1, s->d, dev);
    }
    floatX* dkv = s->cp ? a->new_kv : a->dkv;
    entry_turn_(dkv, p, places->t, N, 1, s->d, 1, dev);
    return dkv;
}

// dinp is written; room for N rows of the widest of D, qr and d in `room`
static inline void entry_attention_backward(const EntryPass* p, floatX* dinp, const floatX* dout, floatX* room,
                                            const Device* dev) {
    const EntrySizes* s = &p->size;
    const EntryTensors* a = &p->a;
    const int N = p->N;
    const floatX* entries = entry_pass_entries_(p);
    linear_backward(a->dlow, dout, a->out_low, p->wo_b, p->dwo_b, 0, N, dev);
    linear_blocks_backward(a->dattention, a->dlow, a->attention, p->wo_a, p->dwo_a, s->G, N, dev);
    floatX* dkv = entry_keys_backward_(p, entries, dev);
    linear_backward(a->dq_low, a->dheads, a->q_low_norm, p->wq_b, p->dwq_b, 0, N, dev);
    rmsnorm_backward(room, p->dq_norm, a->dq_low, a->q_low, p->q_norm, p->s.q_low_rstd, 0, N, s->qr, dev);
    LinearChain chain = linear_chain(dinp);
    linear_chain_backward(&chain, room, p->inp, p->wq_a, p->dwq_a, N, dev);
    rmsnorm_backward(room, p->dkv_norm, dkv, a->kv_proj, p->kv_norm, p->s.kv_rstd, 0, N, s->d, dev);
    linear_chain_backward(&chain, room, p->inp, p->wkv, p->dwkv, N, dev);
    if (p->kind != WINDOW_LAYER) {
        const int is_csa = p->kind == CSA_LAYER;
        const TokenGradients d = entry_compress_back_(p, &p->entries, is_csa ? &a->csa : &a->hca,
                                                      is_csa ? p->s.csa_pool_rstd : p->s.hca_pool_rstd, s->d, dev);
        linear_chain_backward(&chain, d.dv, p->inp, p->entries.wkv, p->entries.dwkv, N, dev);
        linear_chain_backward(&chain, d.dg, p->inp, p->entries.wgate, p->entries.dwgate, N, dev);
    }
    linear_chain_end(&chain, N, dev);
    if (entry_pass_learns_(p)) { entry_index_backward_(p, entries, dev); }
}
#endif  // LLMC_ENTRY_ATTENTION_H
