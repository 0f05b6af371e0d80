/*
The smallest trainer: a bigram model, one row of logits for each token. doc/your_own_trainer.md walks through it; every
option, checkpoints, ranks, --probe, --generate and exports come with llmc/run/.
    make train_bigram && ./train_bigram --model tiny --train book.txt --steps 500 --lr 0.1
*/
#include "llmc/ops/crossentropy.h"  // crossentropy_forward, crossentropy_backward, crossentropy_losses_sum
#include "llmc/ops/embedding.h"     // token_embedding_forward, token_embedding_backward
#include "llmc/run/main.h"          // Run, Trainer, run_main

// ---- 1. Tensors: a struct of pointers, and one line for each tensor ----

typedef struct { float* table; } Parameters;

static int parameter_table(Tensor* t, int V) {  // (V, V): row a has the logits of what follows token a
    *t++ = tensor("bigram.weight", offsetof(Parameters, table), 0, V, V, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    return 1;
}

typedef struct {
    Model model;             // the first member: a run finds parameters, gradients and moments here
    int V;                   // vocabulary
    float *logits, *losses;  // (N, V) and (N), of a batch: one arena
    size_t n_bytes;          // of it
    float* next;             // (V), of the text that is being generated
} Bigram;

static Bigram* bigram_of(const Run* r) { return (Bigram*)r->model; }

// ---- 2. The model ----

// logits[n] = table[tokens[n]]
static void bigram_forward(const Bigram* b, float* logits, const int* tokens, int N, const Device* dev) {
    Parameters p;
    model_point(&b->model, &p, 0);
    token_embedding_forward(logits, tokens, p.table, N, b->V, dev);
}

// One micro-batch is one leaf: its loss and its gradient are written, and join those of others. dloss = 1 / targets of
// the update
static void bigram_leaf(Run* r, int k, const int* tokens, const int* targets, float dloss, int B, int T) {
    (void)k;
    Bigram* b = bigram_of(r);
    DataParallel* dp = &b->model.dp;
    const int N = B * T, V = b->V;
    Parameters d;
    dp_point(dp, &d, 0);
    bigram_forward(b, b->logits, tokens, N, &r->dev);
    crossentropy_forward(b->losses, b->logits, b->logits, targets, N, V, V, &r->dev);  // logits become probabilities
    crossentropy_losses_sum(dp_loss(dp), b->losses, N, &r->dev);
    crossentropy_backward(b->logits, b->logits, targets, dloss, N, V, V, &r->dev);
    if (d.table) { device_zero(d.table, sizeof(float) * (size_t)V * (size_t)V, &r->dev); }  // NULL: it is frozen
    token_embedding_backward(d.table, b->logits, tokens, N, V, &r->dev);
    dp_leaf_done(dp, &r->dev);
}

// ---- 3. What a run asks of it: llmc/run/trainer.h ----

static void bigram_choose(Run* r) {
    Bigram* b = bigram_of(r);
    int V = run_new_vocabulary(r);
    if (*r->o.model && strcmp(r->o.model, "tiny") != 0) {
        options_fail("model", "expected tiny, found %s", r->o.model);
    }
    if (*r->weights && !*r->config) { fail_input("%s: expected a bigram model with its config.json", r->o.from); }
    if (*r->config) {
        json_t* json = json_read(r->config);
        V = (int)json_need_int(json, r->config, "vocab_size", 1, 65536);
        json_decref(json);
    }
    b->V = r->V = r->classes = V;
    r->max_T = 1 << 20;
    model_layout(&b->model, parameter_table(b->model.table, V));
}

static json_t* bigram_config(const Run* r, int eot, const char* dtype) {
    return json_pack("{s:s, s:s, s:s, s:i, s:i}", "written_by", HF_WRITTEN_BY, "model_type", "llmc-bigram", "torch_dtype",
                     dtype, "vocab_size", r->V, "eos_token_id", eot);
}

static void bigram_box(const Run* r) { box_row("model", "a row of logits for each of %d tokens", r->V); }
static double bigram_flops(const Run* r) { return 6.0 * r->V; }

static double bigram_bytes(const Run* r, Purpose purpose, int B, int T, int sparing) {
    (void)sparing;
    return purpose == TO_GENERATE ? 4.0 * r->V : 4.0 * B * T * (r->V + 1.0);
}

static void bigram_open(Run* r, Purpose purpose, int B, int T) {
    Bigram* b = bigram_of(r);
    const size_t n_bytes = (size_t)bigram_bytes(r, purpose, B, T, 0);
    float* arena = (float*)device_alloc(n_bytes, "logits");
    if (purpose == TO_GENERATE) { b->next = arena; return; }
    b->n_bytes = n_bytes;
    b->logits = arena;
    b->losses = arena + (size_t)B * (size_t)T * (size_t)b->V;
}

// of a text a bigram looks at the last token only
static void bigram_pass(Run* r, Purpose purpose, const int* tokens, const int* targets, int B, int T, int t0) {
    Bigram* b = bigram_of(r);
    (void)targets, (void)t0;
    if (purpose == TO_GENERATE) { bigram_forward(b, b->next, tokens + T - 1, 1, &r->dev); }
    else { bigram_forward(b, b->logits, tokens, B * T, &r->dev); }
}

static const float* bigram_logits(Run* r, Purpose purpose, int n) {
    return purpose == TO_GENERATE ? bigram_of(r)->next : bigram_of(r)->logits + (size_t)r->V * (size_t)n;
}

static const float* bigram_losses(Run* r, const int* targets, int N) {
    Bigram* b = bigram_of(r);
    crossentropy_forward(b->losses, b->logits, b->logits, targets, N, b->V, b->V, &r->dev);
    return b->losses;
}

static void bigram_close(Run* r) {
    device_release(bigram_of(r)->logits, bigram_of(r)->n_bytes);
    device_release(bigram_of(r)->next, sizeof(float) * (size_t)r->V);
}

int main(int argc, char** argv) {
    static Bigram bigram;  // all zero
    Trainer t;
    memset(&t, 0, sizeof t);
    t.name = "train_bigram";
    t.about = "Trains a bigram model: the example of doc/your_own_trainer.md.";
    t.presets = "random start from a preset: tiny";
    t.stored_bytes = sizeof(float);
    t.usual_T = 256;
    t.choose = bigram_choose;
    t.config_json = bigram_config;
    t.box = bigram_box;
    t.flops_per_token = bigram_flops;
    t.activation_bytes = bigram_bytes;
    t.open = bigram_open;
    t.leaf = bigram_leaf;
    t.forward = bigram_pass;
    t.logits = bigram_logits;
    t.losses = bigram_losses;
    t.close = bigram_close;
    return run_main(&t, &bigram.model, argc, argv);
}
