/*
What trainers of decoders with RoPE tell a run in the same words, whether their MLPs are experts or not.
    Decoder                  a member of the trainer's own struct: the activations, and functions of the model
                             (decoder_passes.h), which must outlive the run
    decoder_trainer          a Trainer whose passes are these: a micro-batch, with --pp its halves; without gradients
                             forward, logits, losses, texts side by side; the memory for them. The rest is the trainer's
    decoder_open, decoder_close, decoder_activation_bytes, decoder_forward, decoder_next_of_each, decoder_share_text
                             of these, for a trainer that does more and then calls them: the memory, passes without
                             gradients, texts
    decoder_of, decoder_activations   of a run
    decoder_recomputes       are whole blocks computed again on the way back?
    decoder_options          rows of the options that all decoders have: what is kept, graphs, which ranks have what;
                             DECODER_RECOMPUTE: what --help says of --recompute
    decoder_tied_option, decoder_choose_tied   --tied: a row; in Trainer.choose, what was typed instead of what a preset
                             says. config.json says it itself
    decoder_balance_option   --aux-alpha of routers with one balance (pooled_routers.h), a row
    DecoderSizes, decoder_sizes, decoder_begin_ranks   in Trainer.choose, once the model has its layout: its layers,
                             matrices, positions and experts are divided as --pp, --tp, --cp and --ep say
    decoder_check            in Trainer.check, behind the trainer's own: do rows and micro-batches fit that?
    decoder_attention_flops  of a token in a layer, forward and backward
    decoder_flops            of a token's products with the matrices of the model, forward and backward
    decoder_workspace_bytes  the largest scratch that a product asks for
    decoder_attention_bytes  ... that attention does
    decoder_ranks_box        rows of the box: how ranks divide it
    decoder_active_box       a row of the box: parameters that a token uses
    decoder_count            parameters of some rows of the table
    decoder_freezes_all      does --freeze keep all of these, of a model that learns?
*/
#ifndef LLMC_DECODER_RUN_H
#define LLMC_DECODER_RUN_H
#include "../ops/attention.h"  // attention_bytes
#include "../ops/gemm.h"       // gemm_workspace_bytes
#include "../run/cp_option.h"  // cp_option, cp_begin, cp_check, cp_box
#include "../run/graph_option.h"  // graph_option, graph_check
#include "../run/pipeline.h"   // pp_option, pp_begin_between, pp_check_batches, pp_slots, pp_box
#include "../run/tp_option.h"  // tp_option, tp_begin, tp_box
#include "../run/trainer.h"    // Run, run_add_options
#include "decoder_passes.h"    // DecoderPasses, decoder_passes_forward, Activations, LmHead
#include "experts_run.h"       // experts_begin_ep, experts_check, experts_obstacle, experts_sent_bytes
#include "other_losses.h"      // mtp_loss, index_loss
#include "sent_run.h"          // sent_parts, sent_keys

// the sizes by which ranks divide the model, and by which a run counts
typedef struct {
    int Vp, D;           // of the output matrix
    size_t embedding;    // its field of the table
    int is_tied;         // it is the output matrix, too
    int C;               // channels of the stream from layer to layer
    int E, k;            // experts of a layer, of which a position takes k; E 0: there are none
    int says_again;      // --recompute 3 computes what experts say, too
    const char* starts;  // (layers) before which a stage may begin, until decoder_begin_ranks is back; NULL: all
    int cp_unit;         // with --cp: a chunk of a row has a multiple of so many positions
    int by_documents;    // with --doc-reset the launches of a micro-batch follow from its documents
} DecoderSizes;

typedef struct {
    Activations acts, cache;  // of a batch; of the texts that are generated
    Tradeoffs how;            // options
    int graph, pp, pp_chunks, tp, cp;  // --graph, --pp, --pp-chunks, --tp, --cp
    int has_cp_by, cp_by;              // may it be typed? --cp-by
    int cp_chunks;            // of a row on each rank of --cp: CP_CHUNKS of attention alone, 1 of what goes along a row
    const DecoderPasses* passes;
    Dropout (*dropout)(const Run* r, int k, int B, int T);  // or NULL: of the k-th micro-batch
    DecoderSizes sizes;
} Decoder;

static inline Decoder* decoder_of(const Run* r) { return (Decoder*)((char*)r->model + r->trainer->decoder); }

static inline Activations* decoder_activations(const Run* r, Purpose purpose) {
    Decoder* d = decoder_of(r);
    return purpose == TO_GENERATE ? &d->cache : &d->acts;
}

static inline int decoder_recomputes(const Run* r) {
    return decoder_of(r)->how.recompute == RECOMPUTE_BLOCKS;
}

// ---- options ----

// what --help says of --recompute; products: those of level 2, a text
#define DECODER_RECOMPUTE(products)                                                                                   \
    "compute again in backward instead of keeping: 1 norms, 2 " products ", 3 whole blocks. Saves memory, changes no " \
    "bit"

// recompute: DECODER_RECOMPUTE; head_rows: the default. cp_chunks: Decoder's. has_cp_by: attention can meet the keys of
// other ranks in several ways. What else a trainer's --cp hands on is for it to say (options_reword)
static inline void decoder_options(Run* r, const char* recompute, const char* head_rows, int cp_chunks, int has_cp_by) {
    Decoder* d = decoder_of(r);
    const Option own[] = {
        {"machine", "recompute", "", OPTION_INT, &d->how.recompute, "1", 0, 3, "0|1|2|3", recompute, 0},
        {"machine", "head-rows", "", OPTION_INT, &d->how.head_rows, head_rows, 1, INT_MAX, "N",
         "positions whose logits are in memory at once", 0},
        graph_option(&d->graph),
        pp_option(&d->pp),
        pp_chunks_option(&d->pp_chunks),
        tp_option(&d->tp),
        cp_option(&d->cp, cp_chunks),
    };
    const Option by[] = {cp_by_option(&d->cp_by)};
    d->cp_chunks = cp_chunks;
    d->has_cp_by = has_cp_by;
    run_add_options(r, own, sizeof own);
    if (has_cp_by) { run_add_options(r, by, sizeof by); }
}

static inline Option decoder_tied_option(int* tied, const char* usual) {
    const Option row = {"model", "tied", "", OPTION_SWITCH, tied, usual, 0, 0, "0|1",
                        "with --model: the embedding is the output matrix too; config.json says it as "
                        "tie_word_embeddings", 0};
    return row;
}

// typed: of the option; tied: of the Config, as the preset or config.json has it, then as the run does
static inline void decoder_choose_tied(Run* r, int typed, int* tied) {
    const int from_preset = !*r->config;
    if (from_preset && run_is_chosen(r, "tied")) { *tied = typed; }
    options_refuse(!from_preset && run_is_typed(r, "tied") && typed != *tied, "tied",
                   "is for --model; config.json says it as tie_word_embeddings");
}

static inline Option decoder_balance_option(float* weight) {
    const Option row = {"experts", "aux-alpha", "", OPTION_FLOAT, weight, "0", 0, 1e3, "F",
                        "weight of the balance loss of experts (router_aux_loss_coef); 0: none. Where it is not typed, "
                        "config.json's, if output_router_logits is true there", 0};
    return row;
}

// ---- which ranks have what ----

// the output matrix, the field of the embedding, experts; what else a model has to say is for the caller to set
static inline DecoderSizes decoder_sizes(int Vp, int D, size_t embedding, int is_tied, int E, int k) {
    DecoderSizes x;
    memset(&x, 0, sizeof x);
    x.Vp = Vp, x.D = x.C = D;
    x.embedding = embedding, x.is_tied = is_tied;
    x.E = E, x.k = k;
    x.cp_unit = 1;
    return x;
}

// In the one order that is lawful: stages divide all ranks (--pp), those of a stage share matrices (--tp), the groups
// that these make share positions (--cp), and ranks of a stage share experts, in groups that hold those of --tp (--ep).
// A module that predicts the token after the next costs the last stage the head once more and what joins that token to
// the stream; and it reads the embedding
static inline void decoder_begin_ranks(Run* r, const DecoderSizes* x) {
    Decoder* d = decoder_of(r);
    Model* m = r->model;
    const double head = (double)x->Vp * x->D, behind = m->learns_mtp ? head + 2.0 * x->D * x->D : 0.0;
    const double active = x->E > 0 ? (double)x->k / x->E : 1.0;
    const size_t shared = x->is_tied || m->learns_mtp ? x->embedding : TENSOR_NO_FIELD;
    d->sizes = *x;
    pp_begin_between(r, &d->pp, &d->pp_chunks, head + behind, x->C, active, shared, x->starts);
    d->sizes.starts = NULL;  // the caller's
    tp_begin(r, &d->tp);
    cp_begin(r, &d->cp, d->cp_chunks);
    if (model_has_cp(m)) { m->cp.unit = x->cp_unit; }
    if (x->E > 0) { experts_begin_ep(r, &d->how.ep, x->E); }
    else { experts_refuse(r, &d->how.ep); }
}

// varies: what is left out of each micro-batch, in the words of graph_check; NULL: nothing. NH, NKV: heads that this
// rank has, for --cp-by, which says how keys of other ranks are met. --graph comes last:
// experts_check may give up an --ep, beside which there is none. The number of targets that MTP counts comes with the
// documents, too
static inline void decoder_check(Run* r, const char* varies, int NH, int NKV) {
    Decoder* d = decoder_of(r);
    r->has_masters = !FLOATX_IS_FLOAT;
    pp_check_batches(r);
    cp_check(r, &d->cp, varies != NULL);
    if (d->has_cp_by) { cp_check_by(r, d->cp_by, NH, NKV); }
    if (d->sizes.E > 0) { experts_check(r, &d->how.ep, d->sizes.k); }
    graph_check(r, &d->graph, varies ? varies : experts_obstacle(r), d->sizes.by_documents || r->model->learns_mtp);
}

// where attention meets keys in one way alone, ranks hand on halos
static inline void decoder_ranks_box(const Run* r) {
    pp_box(r);
    tp_box(r);
    if (decoder_of(r)->has_cp_by) { cp_box(r); }
    else { cp_halo_box(r); }
}

// ---- what ranks send each other in an update: sent_run.h ----

static inline int decoder_says_again_(const Run* r) { return decoder_recomputes(r) && decoder_of(r)->sizes.says_again; }

static inline double decoder_rows_sent_(const Run* r) {
    const DecoderSizes* x = &decoder_of(r)->sizes;
    return experts_sent_bytes(r, x->E, x->D, x->k, decoder_says_again_(r));
}

static inline double decoder_parts_sent_(const Run* r) {
    const DecoderSizes* x = &decoder_of(r)->sizes;
    return sent_parts(r, decoder_recomputes(r), x->C, x->D) +
           experts_parts_sent(r, x->D, x->k, decoder_says_again_(r)) * pp_own_batches(r);
}

// ---- memory ----

static inline Tradeoffs decoder_how_(const Run* r, Purpose purpose) {
    Tradeoffs how = decoder_of(r)->how;
    how.slots = pp_slots(r, purpose);
    how.cp = model_has_cp(r->model) && purpose != TO_GENERATE ? &r->model->cp : NULL;
    how.numbers = model_has_pp(r->model) ? r->model->n_numbers : 0;
    return how;
}

// Memory of a CPU is taken where it is written: rows that do not come cost nothing, and as many are expected as when
// all experts are equally busy
static inline double decoder_activation_bytes(const Run* r, Purpose purpose, int B, int T, int sparing) {
    const Decoder* d = decoder_of(r);
    Activations acts;
    Tradeoffs how = decoder_how_(r, purpose);
    if (DEVICE_IS_SHARED && how.ep.room == 0.0f) { how.ep.room = 1.0f; }
    if (sparing) { how.recompute = RECOMPUTE_BLOCKS; }
    return d->passes->layout(r->model, &acts, B, T, purpose, how);
}

static inline void decoder_open(Run* r, Purpose purpose, int B, int T) {
    const Decoder* d = decoder_of(r);
    Activations* acts = decoder_activations(r, purpose);
    d->passes->layout(r->model, acts, B, T, purpose, decoder_how_(r, purpose));
    activations_open(acts, r->model, &r->dev);
    acts->graph.is_on = acts->batch.counts_all = d->graph;
    acts->batch.segments.document_start = run_document_start(r, purpose);
}

static inline void decoder_close(Run* r) {
    activations_free(&decoder_of(r)->acts);
    activations_free(&decoder_of(r)->cache);
}

// ---- micro-batches; with --pp those that wait (pipeline.h) ----

static inline void decoder_turn_(Run* r, int slot) { activations_turn(&decoder_of(r)->acts, slot); }

// what routers count goes with the stream in training alone
static inline PpStreams decoder_streams_(const Run* r, int N) {
    const Decoder* d = decoder_of(r);
    PpStreams e = decoder_passes_streams(d->passes, r->model, &d->acts, N);
    e.numbers = activations_counted(&d->acts);
    e.returned = d->acts.returned;
    e.n_number_bytes = sizeof(float) * (size_t)d->acts.how.numbers;
    return e;
}

// leaves nothing out but in training
static inline void decoder_dropout_(Run* r, int k, int B, int T) {
    const Decoder* d = decoder_of(r);
    if (d->dropout) { decoder_of(r)->acts.dropout = d->dropout(r, k, B, T); }
}

static inline void decoder_no_dropout_(Run* r) {
    memset(&decoder_of(r)->acts.dropout, 0, sizeof decoder_of(r)->acts.dropout);
}

static inline void decoder_leaf_(Run* r, int k, const int* inputs, const int* targets, float dloss, int B, int T) {
    Decoder* d = decoder_of(r);
    decoder_dropout_(r, k, B, T);
    decoder_leaf(d->passes, r->model, &d->acts, inputs, targets, dloss, B, T, &r->dev);
    decoder_no_dropout_(r);
}

static inline void decoder_forward_leaf_(Run* r, int k, const int* inputs, const int* targets, int B, int T) {
    Decoder* d = decoder_of(r);
    decoder_dropout_(r, k, B, T);
    activations_take(&d->acts, inputs, targets, activations_counted(&d->acts), B, T, &r->dev);
    decoder_passes_forward(d->passes, r->model, &d->acts, d->acts.batch.n, &r->dev);
    decoder_no_dropout_(r);
}

static inline void decoder_backward_leaf_(Run* r, int k, const int* inputs, const int* targets, float dloss, int B,
                                          int T) {
    Decoder* d = decoder_of(r);
    Model* m = r->model;
    (void)inputs, (void)targets;  // they are on the device
    decoder_dropout_(r, k, B, T);
    d->acts.numbers = activations_returned(&d->acts, dp_numbers(&m->dp), model_has_head(m), &r->dev);
    decoder_passes_backward(d->passes, m, &d->acts, dloss, d->acts.batch.n, &r->dev);
    d->acts.numbers = NULL;
    model_leaf_done(m, &r->dev);
    decoder_no_dropout_(r);
}

// ---- passes without gradients ----

// N positions through the layers of this rank, stage by stage
static inline void decoder_pass_(Run* r, Activations* acts, int N) {
    const Decoder* d = decoder_of(r);
    for (int c = 0; c < r->model->pp.n_chunks; c++) {
        model_turn_to(r->model, c);
        activations_turn_to_chunk(acts, c);
        const PpStreams e = decoder_passes_streams(d->passes, r->model, acts, N);
        pp_receive(&r->model->pp, &e, &r->dev);
        decoder_passes_forward(d->passes, r->model, acts, N, &r->dev);
        pp_send(&r->model->pp, &e, &r->dev);
    }
}

// the new positions of texts, and how many they are
static inline int decoder_texts_(Run* r, const CachedText* texts, int n_texts) {
    Decoder* d = decoder_of(r);
    const int N = token_batch_texts(&d->cache.batch, texts, n_texts, &r->dev);
    decoder_pass_(r, &d->cache, N);
    return N;
}

// TO_GENERATE: of the text in row 0 of the cache
static inline void decoder_forward(Run* r, Purpose purpose, const int* tokens, const int* targets, int B, int T,
                                    int t0) {
    Decoder* d = decoder_of(r);
    const CachedText text = {tokens, 0, t0, T, NULL};
    if (purpose == TO_GENERATE) {
        decoder_texts_(r, &text, 1);
        return;
    }
    token_batch_inputs(&d->acts.batch, tokens, targets, B, T, 0, &r->dev);
    decoder_pass_(r, &d->acts, d->acts.batch.n);
}

static inline const floatX* decoder_logits_(Run* r, Purpose purpose, int n) {
    const LmHead head = decoder_of(r)->passes->head(r->model, decoder_activations(r, purpose));
    return lm_head_logits(&head, n, 1, &r->dev);
}

// cross entropy alone: what routers add is of no interest for a text
static inline const float* decoder_losses_(Run* r, const int* targets, int N) {
    Decoder* d = decoder_of(r);
    const LmHead head = d->passes->head(r->model, &d->acts);
    return lm_head_evaluate(&head, &d->acts.batch, targets, N, &r->dev);
}

static inline const floatX* decoder_next_of_each(Run* r, const CachedText* texts, int n_texts, size_t* row) {
    Decoder* d = decoder_of(r);
    const int N = decoder_texts_(r, texts, n_texts);
    if (!model_has_head(r->model)) { return NULL; }
    const LmHead head = d->passes->head(r->model, &d->cache);
    *row = (size_t)vocabulary_padded(&head.weight);
    return lm_head_logits(&head, N - n_texts, n_texts, &r->dev);
}

static inline void decoder_share_text(Run* r, int to, int from, int n) {
    activations_share_text(&decoder_of(r)->cache, to, from, n, &r->dev);
}

static inline float decoder_probed_mtp_(const Run* r, int i) {
    (void)i;
    return mtp_loss(r->model);
}

static inline float decoder_probed_index_(const Run* r, int i) { return index_loss(r->model, i); }

// which a probe writes beside that of the next token
static inline int decoder_other_losses_(const Run* r, OtherLoss* others) {
    const OtherLoss of_mtp = {"mtp_loss", 1, decoder_probed_mtp_};
    const OtherLoss of_indexers = {"index_loss", index_losses(r->model), decoder_probed_index_};
    int n = 0;
    if (r->model->learns_mtp) { others[n++] = of_mtp; }
    if (r->model->learns_index) { others[n++] = of_indexers; }
    return n;
}

// decoder: offsetof the Decoder in the trainer's struct
static inline Trainer decoder_trainer(size_t decoder) {
    Trainer t;
    memset(&t, 0, sizeof t);
    t.decoder = decoder;
    t.sparing = "--recompute 3";
    t.without_more = "cross_entropy";
    t.stored_bytes = sizeof(floatX);
    t.usual_T = 1024;
    t.takes_conversations = 1;
    t.activation_bytes = decoder_activation_bytes;
    t.rows_sent = decoder_rows_sent_;
    t.parts_sent = decoder_parts_sent_;
    t.keys_sent = sent_keys;
    t.open = decoder_open;
    t.forward = decoder_forward;
    t.logits = decoder_logits_;
    t.losses = decoder_losses_;
    t.other_losses = decoder_other_losses_;
    t.next_of_each = decoder_next_of_each;
    t.share_text = decoder_share_text;
    t.leaf = decoder_leaf_;
    t.turn = decoder_turn_;
    t.streams = decoder_streams_;
    t.forward_leaf = decoder_forward_leaf_;
    t.backward_leaf = decoder_backward_leaf_;
    t.close = decoder_close;
    return t;
}

// ---- of the model's table ----

// Of HQ channels in all heads: a position sees itself and all before it in its row, or a window of W; 0: no window
static inline double decoder_attention_flops(int HQ, int W, int T) {
    const double keys = W > 0 && W < T ? W - 0.5 * W * W / T : 0.5 * T;  // on average
    return 12.0 * HQ * keys;
}

// of the experts of a row those that a token computes
static inline double decoder_share_(const Run* r, const Tensor* t) {
    const DecoderSizes* x = &decoder_of(r)->sizes;
    return t->experts > 0 ? (double)x->k / x->E : 1.0;
}

// Of the first n_rows of the table. The matrix of an embedding that is not tied is no factor: a token takes a row of it
static inline double decoder_flops(const Run* r, int n_rows) {
    const DecoderSizes* x = &decoder_of(r)->sizes;
    const int looked_up = x->is_tied ? -1 : model_row(r->model, x->embedding, 0);
    double n = 0.0;
    for (int i = 0; i < n_rows; i++) {
        const Tensor* t = &r->model->table[i];
        if (t->on_disk == VECTOR || t->whole_below > 0 || i == looked_up) { continue; }
        n += model_flops(r->model, i) * decoder_share_(r, t);
    }
    return n;
}

// a row of the box: the same of parameters, the embedding included; adapters are not counted
static inline void decoder_active_box(const Run* r, int n_rows) {
    const Model* m = r->model;
    double active = 0.0;
    for (int i = model_is_adapter(m) ? m->n_saved : 0; i < n_rows; i++) {
        active += (double)tensors_disk_count(&m->table[i], 1) * decoder_share_(r, &m->table[i]);
    }
    box_row("active", "%s = %.0f parameters of a token", format_count(active).s, active);
}

static inline double decoder_count(const Model* m, int (*is_one)(const Tensor* t)) {
    double n = 0.0;
    for (int i = 0; i < m->n_table; i++) {
        if (is_one(&m->table[i])) { n += (double)tensors_disk_count(&m->table[i], 1); }
    }
    return n;
}

// of a training, in Trainer.freeze; where nothing else learns either, the run says that
static inline int decoder_freezes_all(const Run* r, int (*is_one)(const Tensor* t)) {
    const Model* m = r->model;
    int learns = 0;
    for (int i = 0, slice = 0; i < m->n_table; slice += tensor_slices(&m->table[i++])) {
        learns |= is_one(&m->table[i]) && slices_learn(m->frozen, slice, tensor_slices(&m->table[i]));
    }
    return run_is_training(r) && model_learns(m) && !learns;
}

// of all layers the widest input or output of a matrix, but for those of experts and of a stack before layer 0
static inline int decoder_widest_(const Model* m) {
    int wide = 0;
    for (int i = 0; i < m->n_table; i++) {
        const Tensor* t = &m->table[i];
        const int most = t->rows > t->columns ? t->rows : t->columns;
        if (!tensor_is_matrix(t) || t->experts > 0 || t->is_before || t->split == SPLIT_VOCABULARY) { continue; }
        wide = most > wide ? most : wide;
    }
    return wide;
}

// Scratch of products: of the head, of layers, of experts. Those of gradients of matrices are what a pass without
// gradients has not
static inline double decoder_workspace_bytes(const Run* r, int B) {
    const Decoder* d = decoder_of(r);
    const DecoderSizes* x = &d->sizes;
    const int n = r->dev.n_threads, wide = decoder_widest_(r->model), Vp = x->Vp / r->model->tp.size;
    if ((double)B * r->T > expert_most_positions(x->k)) { return INFINITY; }
    const int N = B * r->T, n_head = N < d->how.head_rows ? N : d->how.head_rows;
    double most = (double)gemm_workspace_bytes(N, wide, n);
    if (run_purpose(r) == TO_TRAIN) {
        most = fmax(most, (double)gemm_workspace_bytes(wide, N, n));
        most = fmax(most, (double)gemm_workspace_bytes(n_head, Vp, n));
        most = fmax(most, (double)gemm_workspace_bytes(Vp, n_head, n));
    }
    for (int i = 0; i < r->model->n_table; i++) {
        const Tensor* t = &r->model->table[i];
        if (t->experts == 0 || !tensor_is_matrix(t)) { continue; }
        most = fmax(most, (double)grouped_matmul_workspace_bytes(x->E, N * x->k, t->columns, t->rows, n));
    }
    return most;
}

// ... of attention of NH heads with HQ channels in all
static inline double decoder_attention_bytes(const Run* r, int B, int HQ, int NH) {
    return (double)attention_bytes(r->trainer->stored_bytes, B, r->T, HQ, NH, &r->dev);
}
#endif  // LLMC_DECODER_RUN_H
