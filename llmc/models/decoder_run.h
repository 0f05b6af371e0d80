/*
What trainers of decoders with RoPE tell a run in the same words, whether their MLPs are experts or not.
    Decoder, decoder_init    a member of the trainer's own struct: the activations, and three functions of the model
    decoder_trainer          a Trainer whose passes without gradients are these: forward, logits, losses, texts side by
                             side, the memory for them; the rest is the trainer's
    decoder_of, decoder_activations   of a run
    decoder_attention_flops  of a token in a layer, forward and backward
    decoder_flops            of a token's products with the matrices of the model, forward and backward
    decoder_workspace_bytes  the largest scratch that an op asks for
    decoder_active           parameters that a token uses
*/
#ifndef LLMC_DECODER_RUN_H
#define LLMC_DECODER_RUN_H
#include "../ops/attention.h"  // attention_bytes
#include "../ops/gemm.h"       // gemm_workspace_bytes
#include "../run/trainer.h"    // Run
#include "activations.h"       // Activations, Tradeoffs, ExpertSizes
#include "lm_head.h"           // LmHead

// of a pass: sizes only, returning what activations_open will take; N positions that the batch of acts has, up to the
// last norm; and from there to logits
typedef double PassBytes(const Model* m, Activations* acts, int B, int T, Purpose purpose, Tradeoffs how);
typedef void PassForward(const Model* m, Activations* acts, int N, const Device* dev);
typedef LmHead PassHead(const Model* m, const Activations* acts);

typedef struct {
    Activations acts, cache;  // of a batch; of the texts that are generated
    Tradeoffs how;            // options
    int graph;                // --graph
    PassBytes* bytes;
    PassForward* forward;
    PassHead* head;
    int recompute_most;       // the level of --recompute that keeps least
} Decoder;

static inline void decoder_init(Decoder* d, PassBytes* bytes, PassForward* forward, PassHead* head,
                                int recompute_most) {
    d->bytes = bytes;
    d->forward = forward;
    d->head = head;
    d->recompute_most = recompute_most;
}

static inline Decoder* decoder_of(const Run* r) { return (Decoder*)((char*)r->model + r->trainer->decoder); }

static inline Activations* decoder_activations(const Run* r, Purpose purpose) {
    Decoder* d = decoder_of(r);
    return purpose == TO_GENERATE ? &d->cache : &d->acts;
}

// ---- memory ----

// Memory of a CPU is taken where it is written: rows that do not come cost nothing, and as many are expected as when
// all experts are equally busy
static inline double decoder_activation_bytes_(const Run* r, Purpose purpose, int B, int T, int sparing) {
    const Decoder* d = decoder_of(r);
    Activations acts;
    Tradeoffs how = d->how;
    if (DEVICE_IS_SHARED && how.ep.room == 0.0f) { how.ep.room = 1.0f; }
    if (sparing) { how.recompute = d->recompute_most; }
    return d->bytes(r->model, &acts, B, T, purpose, how);
}

static inline void decoder_open_(Run* r, Purpose purpose, int B, int T) {
    const Decoder* d = decoder_of(r);
    Activations* acts = decoder_activations(r, purpose);
    d->bytes(r->model, acts, B, T, purpose, d->how);
    activations_open(acts, &r->model->ranks, &r->dev);
    acts->graph.is_on = acts->batch.counts_all = d->graph;
    acts->batch.segments.document_start = run_document_start(r, purpose);
}

static inline void decoder_close_(Run* r) {
    activations_free(&decoder_of(r)->acts);
    activations_free(&decoder_of(r)->cache);
}

// ---- passes without gradients ----

// the new positions of texts, and how many they are
static inline int decoder_texts_(Run* r, const CachedText* texts, int n_texts) {
    Decoder* d = decoder_of(r);
    const int N = token_batch_texts(&d->cache.batch, texts, n_texts, &r->dev);
    d->forward(r->model, &d->cache, N, &r->dev);
    return N;
}

// TO_GENERATE: of the text in row 0 of the cache
static inline void decoder_forward_(Run* r, Purpose purpose, const int* tokens, const int* targets, int B, int T,
                                    int t0) {
    Decoder* d = decoder_of(r);
    const CachedText text = {tokens, 0, t0, T};
    if (purpose == TO_GENERATE) {
        decoder_texts_(r, &text, 1);
        return;
    }
    token_batch_inputs(&d->acts.batch, tokens, targets, B, T, 0, &r->dev);
    d->forward(r->model, &d->acts, B * T, &r->dev);
}

static inline const floatX* decoder_logits_(Run* r, Purpose purpose, int n) {
    const LmHead head = decoder_of(r)->head(r->model, decoder_activations(r, purpose));
    return lm_head_logits(&head, n, 1, &r->dev);
}

// cross entropy alone: what routers add is of no interest for a text
static inline const float* decoder_losses_(Run* r, const int* targets, int N) {
    Decoder* d = decoder_of(r);
    const LmHead head = d->head(r->model, &d->acts);
    return lm_head_evaluate(&head, &d->acts.batch, targets, N, &r->dev);
}

static inline const floatX* decoder_next_of_each_(Run* r, const CachedText* texts, int n_texts, size_t* row) {
    Decoder* d = decoder_of(r);
    const int N = decoder_texts_(r, texts, n_texts);
    const LmHead head = d->head(r->model, &d->cache);
    *row = (size_t)head.weight.OC;
    return lm_head_logits(&head, N - n_texts, n_texts, &r->dev);
}

static inline void decoder_share_text_(Run* r, int to, int from, int n) {
    activations_share_text(&decoder_of(r)->cache, to, from, n, &r->dev);
}

// decoder: offsetof the Decoder in the trainer's struct
static inline Trainer decoder_trainer(size_t decoder) {
    Trainer t;
    memset(&t, 0, sizeof t);
    t.decoder = decoder;
    t.sparing = "--recompute 3";
    t.stored_bytes = sizeof(floatX);
    t.usual_T = 1024;
    t.takes_conversations = 1;
    t.activation_bytes = decoder_activation_bytes_;
    t.open = decoder_open_;
    t.forward = decoder_forward_;
    t.logits = decoder_logits_;
    t.losses = decoder_losses_;
    t.next_of_each = decoder_next_of_each_;
    t.share_text = decoder_share_text_;
    t.close = decoder_close_;
    return t;
}

// ---- of the model's table ----

// Of HQ channels in all heads: a position sees itself and all before it in its row, or a window of W; 0: no window
static inline double decoder_attention_flops(int HQ, int W, int T) {
    const double keys = W > 0 && W < T ? W - 0.5 * W * W / T : 0.5 * T;  // on average
    return 12.0 * HQ * keys;
}

// Of E experts a token computes k. looked_up: the row of the table whose matrix is no factor, for a token only takes a
// row of it; -1: none
static inline double decoder_flops(const Run* r, int looked_up, int k, int E) {
    double n = 0.0;
    for (int i = 0; i < r->model->n_table; i++) {
        const Tensor* t = &r->model->table[i];
        if (t->on_disk == VECTOR || i == looked_up) { continue; }
        n += model_flops(r->model, i) * (t->experts > 0 ? (double)k / E : 1.0);
    }
    return n;
}

// The same of parameters, the embedding included; adapters are not counted
static inline size_t decoder_active(const Model* m, int k) {
    size_t active = 0;
    for (int i = model_is_adapter(m) ? m->n_saved : 0; i < m->n_table; i++) {
        const Tensor* t = &m->table[i];
        const size_t n = tensors_disk_count(t, 1);
        active += t->experts > 0 ? n / (size_t)t->experts * (size_t)k : n;
    }
    return active;
}

// Products of the head, of layers whose widest output is `wide`, of experts (k 0: there are none), or attention of NH
// heads with HQ channels in all
static inline double decoder_workspace_bytes(const Run* r, int B, int head_rows, int Vp, int wide, int HQ, int NH,
                                             const ExpertSizes* experts) {
    const int n = r->dev.n_threads, E = experts->router.E, k = experts->router.k;
    if ((double)B * r->T > expert_most_positions(k)) { return INFINITY; }
    const int N = B * r->T, n_head = N < head_rows ? N : head_rows;
    double most = fmax((double)gemm_workspace_bytes(n_head, Vp, n), (double)gemm_workspace_bytes(Vp, n_head, n));
    most = fmax(most, (double)gemm_workspace_bytes(N, wide, n));
    most = fmax(most, (double)gemm_workspace_bytes(wide, N, n));
    if (k > 0) { most = fmax(most, (double)grouped_matmul_workspace_bytes(E, N * k, experts->D, 2 * experts->F, n)); }
    return fmax(most, (double)attention_bytes(r->trainer->stored_bytes, B, r->T, HQ, NH, &r->dev));
}
#endif  // LLMC_DECODER_RUN_H
