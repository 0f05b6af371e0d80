/*
What trainers tell a run whose model may be the frozen base of an adapter (LoRA), kept as bf16, fp8 or fp4: everything
that does not depend on the architecture. adapters_run.h has the parts; here they are the calls of a Trainer.
    Adapted, adapted_init     a member of the trainer's own struct: its Decoder, and options; which adapters are its
    adapted_trainer           a Trainer like decoder_trainer's that knows adapters
    adapted_options           rows of the table: --weights (--base-dtype), --act-fp8, --lora-rank and what goes with it;
                              --from
    adapted_base              in Trainer.choose: of the files, what their numbers add up to
    adapted_choose            ... the adapter that is asked for, if any; files in fp8 or fp4 stay so, unless --weights
                              is typed; an adapter of a run has what it had there
    adapted_store             in Trainer.choose, after the layout: matrices as --weights says. Files in fp8 or fp4 are
                              never rounded again: with --weights fp8 each of their matrices is in memory what it is
                              there
    adapted_check             in Trainer.check
    adapted_varies            why no two micro-batches are the same (decoder_check), or NULL
    adapted_load              in Trainer.load: A's and B's; then the rows of the base are the trainer's to load
    adapted_box               rows of the box
*/
#ifndef LLMC_ADAPTED_RUN_H
#define LLMC_ADAPTED_RUN_H
#include "adapters_run.h"  // adapters_choose, adapters_load
#include "decoder_run.h"   // Decoder, decoder_trainer

#define BASE_DTYPE_NAMES "fp32|bf16|fp8"
typedef enum { BASE_FP32, BASE_BF16, BASE_FP8 } BaseDtype;  // --base-dtype
// as all else is stored; a bf16 build that goes on with a run of floats takes fp32 for this
enum { BASE_OF_BUILD = FLOATX_IS_FLOAT ? BASE_FP32 : BASE_BF16 };

typedef struct {
    Decoder decoder;      // first: decoder_of finds it
    AdapterOptions lora;
    int weights;          // BaseDtype
    int act_fp8;          // inputs of matrices in fp8 or fp4 become fp8, too
    int is_bf16;          // the files' matrices are
    int has_scaled;       // some of them are in fp8 or fp4
    int has_fp4;          // some in fp4
    int64_t base_sum;     // of an adapter's base: of its files (safeset_sum), or of how it began at random
    Adapters* adapters;   // of the trainer's model
    const char* targets;
} Adapted;

static inline Adapted* adapted_of(const Run* r) { return (Adapted*)decoder_of(r); }

// of a micro-batch
static inline Dropout adapted_dropout_(const Run* r, int k, int B, int T) {
    return adapters_dropout(r, adapted_of(r)->adapters, k, B, T);
}

// adapters: of the trainer's model, all zero; targets: those of a new adapter where --lora-targets says nothing, NULL:
// all-linear
static inline void adapted_init(Adapted* x, const DecoderPasses* passes, Adapters* adapters,
                                const char* targets) {
    x->decoder.passes = passes;
    x->decoder.dropout = adapted_dropout_;
    x->adapters = adapters;
    x->targets = targets;
}

// the first row of the base
static inline Tensor* adapted_base_rows_(const Run* r) { return r->model->table + adapted_of(r)->adapters->n_table; }

static inline void adapted_options(Run* r, Adapted* x) {
    const Option own[] = {
        {"model", "weights", "--base-dtype", OPTION_CHOICE, &x->weights, FLOATX_NAME, 0, 0, BASE_DTYPE_NAMES,
         "how matrices are kept that do not learn (beside an adapter, or in --generate and --eval-only): bf16 in half "
         "the memory, and files in bf16 lose nothing by it; fp8 in a quarter, rounded to e4m3 with a scale for each "
         "block of 128 x 128, but embedding, routers and other gates are bf16. Of files in fp8 or fp4 fp8 is the "
         "default and rounds nothing: each matrix stays in its own type, fp4 and bf16 ones too; beside --lora RUN it "
         "is what that run had. A build for GPUs that stores bf16 has no fp32", OPTION_BEGINS},
        {"model", "act-fp8", "", OPTION_SWITCH, &x->act_fp8, "0", 0, 0, "0|1",
         "round the inputs of matrices in fp8 or fp4 to fp8, each 128 of a row with a scale of their own, as who "
         "serves such a model does. A build for GPUs that stores bf16 multiplies linear layers in fp8 on a Hopper. "
         "Gradients pass the rounding as if it were not there", OPTION_BEGINS},
    };
    run_add_options(r, own, sizeof own);
    r->n_options = adapter_options(r->table, r->n_options, &x->lora);
    options_reword(r->table, r->n_options, "from", "parameters to start from: a Hugging Face folder, a run folder or "
                   "checkpoint, or a .safetensors file with config.json beside it");
}

static inline void adapted_base(Run* r, const SafeSet* set) {
    Adapted* x = adapted_of(r);
    x->is_bf16 = safeset_is_bf16(set);
    x->has_fp4 = safeset_has(set, DTYPE_I8);  // two in a byte
    x->has_scaled = x->has_fp4 || safeset_has(set, DTYPE_F8_E4M3);
    if (adapter_is_asked(&x->lora)) { x->base_sum = (int64_t)safeset_sum(set, 16); }
}

// where the model learns it is floats
static inline void adapted_keep_scaled_(Run* r, int is_adapter) {
    const Adapted* x = adapted_of(r);
    const int measures = r->o.dry_run && !run_is_generating(r) && !r->o.eval_only;
    const int learns = !is_adapter && (run_will_train(r) || *r->o.probe || measures);
    if (!x->has_scaled || learns || options_given(r->table, r->n_options, "weights")) { return; }
    options_set(r->table, r->n_options, "weights", "fp8");
}

// An adapter of a run stands beside matrices that are rounded as they were when it learnt, unless --weights is typed.
// 0: they were not, or nobody knows. That they are the same, adapters_choose has seen to
static inline int adapted_recall_weights_(Run* r) {
    char folder[PATH_BYTES];
    if (r->o.resume || !*r->adapter_weights || options_given(r->table, r->n_options, "weights")) { return 0; }
    char* name = checkpoint_option(path_parent(folder, r->adapter_weights), "weights");
    const int was = name ? choice_find(BASE_DTYPE_NAMES, name) : -1, is_rounded = was > BASE_OF_BUILD;
    if (is_rounded) { options_set(r->table, r->n_options, "weights", name); }
    free(name);
    if (is_rounded && *r->o.export_hf && !adapted_of(r)->has_scaled && r->comm->rank == 0) {
        warn_line("--weights %s, beside which the adapter has learnt: with --weights %s --merge adds it to the "
                  "numbers of the files", choice_name(BASE_DTYPE_NAMES, was).s, FLOATX_NAME);
    }
    return is_rounded;
}

// ... and so do their inputs, where they are in fp8
static inline void adapted_recall_rounding_(Run* r) {
    char folder[PATH_BYTES];
    if (r->o.resume || !*r->adapter_weights || options_given(r->table, r->n_options, "act-fp8")) { return; }
    const int was = checkpoint_number(path_parent(folder, r->adapter_weights), "act-fp8", 0);
    if (was && adapted_of(r)->weights == BASE_FP8) {
        options_set(r->table, r->n_options, "act-fp8", "1");
    } else if (was && r->comm->rank == 0) {
        warn_line("--act-fp8 1, with which the adapter has learnt, is for --weights fp8: inputs are not rounded");
    }
}

// base: the n rows of the model's table. 0: no adapter is asked for
static inline int adapted_choose(Run* r, Adapters* adapters, const Tensor* base, int n) {
    Adapted* x = adapted_of(r);
    if (x->targets && x->lora.rank > 0 && !*x->lora.targets && !*x->lora.parameters) {
        options_set(r->table, r->n_options, "lora-targets", x->targets);
    }
    if (!*r->weights) { x->base_sum = adapters_random_base(base, n, r->o.seed); }
    const int is_adapter = adapters_choose(r, adapters, &x->lora, base, n, x->base_sum);
    if (!adapted_recall_weights_(r)) { adapted_keep_scaled_(r, is_adapter); }
    adapted_recall_rounding_(r);
    return is_adapter;
}

// as the files have them
static inline void adapted_store_as_read_(Run* r) {
    Model* m = r->model;
    SafeSet set;
    safeset_open(&set, r->weights);
    for (Tensor* t = adapted_base_rows_(r); t < m->table + m->n_table; t++) {
        if (tensor_is_matrix(t) && t->stored != STORED_F32) { tensor_stored(t, tensor_stored_in(&set, t, "")); }
    }
    safeset_close(&set);
}

// Of n fields of the base's table nothing is rounded to fp8. The embedding: as a table each of its rows is read alone,
// and where it is the output matrix too, what it loses is in every logit. Routers choose by small differences and are a
// thousandth of the model
static inline void adapted_store(Run* r, const size_t* fields, int n) {
    const int weights = adapted_of(r)->weights, as_read = weights == BASE_FP8 && adapted_of(r)->has_scaled;
    Model* m = r->model;
    m->rounds_inputs = adapted_of(r)->act_fp8;
    if (weights <= BASE_OF_BUILD) { return; }
    model_store_frozen(m, weights == BASE_FP8 ? STORED_FP8 : STORED_BF16);
    if (as_read) { adapted_store_as_read_(r); }
    for (Tensor* t = adapted_base_rows_(r); t < m->table + m->n_table && weights == BASE_FP8; t++) {
        for (int k = 0; k < n && !as_read; k++) {
            if (t->field == fields[k]) { tensor_stored(t, STORED_BF16); }
        }
    }
}

// places that are experts' or those of parameters, such as a router
static inline int adapted_parameters_(const Run* r) {
    const Adapters* x = adapted_of(r)->adapters;
    int n = 0;
    for (int i = 0; i < x->n_places; i++) {
        n += x->places[i].is_parameter || adapted_base_rows_(r)[x->places[i].row].experts > 0;
    }
    return n;
}

// matrices of the base, or tables, that are stored so
static inline int adapted_stored_(const Run* r, Stored kind) {
    int n = 0;
    for (const Tensor* t = adapted_base_rows_(r); t < r->model->table + r->model->n_table; t++) {
        n += tensor_is_matrix(t) && t->stored == kind ? tensor_slices(t) : 0;
    }
    return n;
}

// of which --act-fp8 rounds the inputs
static inline int adapted_has_fp8_(const Run* r) {
    return adapted_stored_(r, STORED_FP8) + adapted_stored_(r, STORED_FP4) > 0;
}

// no matrix is in fp8 or fp4: why, and what to do
__attribute__((noreturn))
static inline void adapted_fail_rounding_(const Run* r, int learns) {
    if (learns && !model_is_adapter(r->model)) {
        options_fail("act-fp8", "is for matrices in fp8 or fp4, and what learns is %s, here the whole model: leave it "
                     "out, or train an adapter beside such matrices (--lora-rank N%s)", FLOATX_NAME,
                     adapted_of(r)->has_scaled ? "" : " --weights fp8");
    }
    options_fail("act-fp8", "is for matrices in fp8 or fp4, and here %s: --weights fp8 rounds them to fp8",
                 adapted_of(r)->weights == BASE_FP8 ? "none is so in all its layers" : "all are bf16 or fp32");
}

static inline void adapted_check(Run* r) {
    const int learns = run_is_training(r) || *r->o.probe;
    options_refuse(run_is_typed(r, "weights") && adapted_of(r)->weights < BASE_OF_BUILD, "weights",
                   "this build stores bf16: PRECISION=fp32 makes one of floats");
    options_refuse(learns && adapted_of(r)->weights > BASE_OF_BUILD && !model_is_adapter(r->model), "weights",
                   "bf16 and fp8 are for what does not learn: an adapter's base (--lora-rank), --generate, "
                   "--eval-only");
    if (adapted_of(r)->act_fp8 && !adapted_has_fp8_(r)) { adapted_fail_rounding_(r, learns); }
    if (!FLOATX_IS_FLOAT && adapted_parameters_(r)) {
        options_fail("lora-parameters", "a bf16 build has no adapters of experts and routers: PRECISION=fp32");
    }
}

static inline const char* adapted_varies(const Run* r) {
    return adapted_of(r)->adapters->settings.dropout > 0.0f
               ? "is not for --lora-dropout: each micro-batch leaves out other elements" : NULL;
}

static inline void adapted_load(Run* r, const SliceSink* sink) {
    if (model_is_adapter(r->model)) { adapters_load(r, &adapted_of(r)->lora, sink); }
}

// of a folder in fp8 each matrix keeps its own type
static inline void adapted_box_kinds_(const Run* r) {
    const int n_build = adapted_stored_(r, STORED_BY_BUILD), in_floats = FLOATX_IS_FLOAT ? n_build : 0;
    const struct { const char* name; int n; } kinds[] = {
        {"fp8", adapted_stored_(r, STORED_FP8)}, {"fp4", adapted_stored_(r, STORED_FP4)},
        {"bf16", adapted_stored_(r, STORED_BF16) + n_build - in_floats},
        {"fp32", adapted_stored_(r, STORED_F32) + in_floats}};
    char text[128] = "";
    for (size_t i = 0, used = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (kinds[i].n == 0) { continue; }
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%d %s", used > 0 ? ", " : "", kinds[i].n,
                                 kinds[i].name);
    }
    box_row("  each in its type", "%s: --weights fp8 rounds none of them", text);
}

// tied: the head is the embedding
static inline void adapted_box(const Run* r, int tied) {
    const Adapted* x = adapted_of(r);
    if (x->weights == BASE_FP8 && x->has_scaled) {
        box_row("matrices", "%s and all else as in the files", x->has_fp4 ? "fp8, fp4" : "fp8");
        adapted_box_kinds_(r);
    } else if (x->weights == BASE_FP8) {
        box_row("matrices", "rounded to fp8, %s%s", tied ? "but the embedding" : "the head too",
                x->lora.merge ? "; so are those that --merge writes" : "");
    }
    if (x->act_fp8) { box_row(x->has_fp4 ? "  inputs of fp8, fp4" : "  inputs of fp8", "rounded to fp8"); }
    adapters_box(r, x->adapters, &x->lora, x->is_bf16);
}

// ---- files ----

static inline void adapted_write_(const Run* r, const float* params, const char* folder, SavedFiles* files) {
    const Adapters* x = adapted_of(r)->adapters;
    adapter_save(folder, x, adapted_base_rows_(r), r->model->n_table - x->n_table, r->o.from, params, files);
}

static inline void adapted_merge_(const Run* r, const float* params, int i, int k, float* slice) {
    const Adapters* x = adapted_of(r)->adapters;
    adapter_merge_slice(x, params, adapted_base_rows_(r), i - x->n_table, k, slice);
}

static inline int adapted_changes_(const Run* r, int i, int k) {
    const Adapters* x = adapted_of(r)->adapters;
    return adapter_changes_slice(x, adapted_base_rows_(r), i - x->n_table, k);
}

// an adapter's checkpoint says beside which model it has learnt
static inline int adapted_extras_(const Run* r, Extra* extras) {
    const Extra base = {"base", DTYPE_I64, &adapted_of(r)->base_sum, 1};
    extras[0] = base;
    return model_is_adapter(r->model);
}

static inline void adapted_load_extras_(Run* r, const char* path) {
    (void)r, (void)path;  // adapters_choose has compared it
}

// adapted: offsetof the Adapted in the trainer's struct
static inline Trainer adapted_trainer(size_t adapted) {
    Trainer t = decoder_trainer(adapted);
    t.extras = adapted_extras_;
    t.load_extras = adapted_load_extras_;
    t.write_adapter = adapted_write_;
    t.merge_adapter = adapted_merge_;
    t.adapter_changes = adapted_changes_;
    return t;
}
#endif  // LLMC_ADAPTED_RUN_H
