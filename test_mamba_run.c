/*
train_mamba_hpn.c as a run: what needs more than the model. States that are carried from step to step, checkpoints that
hold them, heads, classifiers, and options that may not stand together. Whole runs are processes of their own. The model
alone is in test_mamba_hpn.c, every option in dev/test_mamba.sh.
*/
#define main trainer_main  // this test has a main of its own
#include "train_mamba_hpn.c"
#undef main
#include "llmc/test/test.h"       // check, check_exit, test_main
#include "llmc/test/testfiles.h"  // temp_folder, temp_path

static TempPath folder;

// ---- command lines ----

typedef struct { char text[2048], *argv[64]; int argc; } Command;

// words of a line, with blanks between them; W/ stands for the test's folder
static void command_split(Command* c, const char* options) {
    const char* from = options;
    char* to = c->text;
    c->argv[0] = (char*)"train_mamba_hpn";
    c->argc = 1;
    while (*from && to < c->text + sizeof c->text - sizeof folder.s) {
        const int is_folder = strncmp(from, "W/", 2) == 0;
        if (is_folder) { to = stpcpy(to, folder.s); } else { *to++ = *from; }
        from++;  // of W/ the slash is still to come
    }
    *to = '\0';
    for (char *rest = c->text, *word; (word = strsep(&rest, " "));) { c->argv[c->argc++] = word; }
}

// the trainer's own main; one thread, for a child has no others
static void run_trainer(void* options) {
    static Command c;
    command_split(&c, (const char*)options);
    if (!freopen("/dev/null", "w", stdout)) { fail_run("/dev/null: %s", strerror(errno)); }
    trainer_main(c.argc, c.argv);
}

#define START "--threads 1 --model tiny --d-model 8 --d-state 2 --base-layers 2 --batch-size 2 "
#define TOKENS START "--seq-len 8 --token-file W/tokens "
#define CLASSES START "--task cls --train W/rows --steps 1 "
static void check_trains(Test* t, const char* options) { check_exit(t, options, run_trainer, (void*)options, 0, ""); }
static void check_refused(Test* t, const char* options, const char* text) {
    check_exit(t, options, run_trainer, (void*)options, 2, text);
}

// tokens: numbers 0..6. rows: 12 examples of 5 positions, tokens 0..256 and a class 0..2 at the last position
static void write_data(void) {
    int inputs[12][5], targets[12][5];
    const int64_t shape[] = {12, 5};
    uint64_t random = 7;
    char text[2 * 600 + 1];
    SafeWriter rows;
    for (int i = 0; i < 600; i++) { snprintf(text + 2 * i, 3, "%u ", xorshift_u32(&random) % 7); }
    temp_file(&folder, "tokens", text, sizeof text - 1);
    for (int i = 0; i < 60; i++) {
        inputs[i / 5][i % 5] = i == 0 ? 256 : (int)(xorshift_u32(&random) % 256);
        targets[i / 5][i % 5] = i % 5 < 4 ? -1 : i / 5 % 3;
    }
    safewriter_init(&rows);
    safewriter_declare(&rows, "inputs", DTYPE_I32, 2, shape);
    safewriter_declare(&rows, "targets", DTYPE_I32, 2, shape);
    safewriter_open(&rows, temp_path(&folder, "rows").s);
    safewriter_put(&rows, inputs, sizeof inputs);
    safewriter_put(&rows, targets, sizeof targets);
    safewriter_close(&rows);
}

// ---- states that are carried from step to step ----

// a run as run_main would have it before its first step
static void start(Run* r, Workplace* place, const char* options) {
    static Command c;
    static Trainer trainer;
    trainer = mamba_trainer();
    command_split(&c, options);
    memset(r, 0, sizeof *r);
    memset(place, 0, sizeof *place);
    r->trainer = &trainer;
    r->model = &place->mamba.model;
    start_open(r, c.argc, c.argv);
    device_init(&r->dev, r->o.threads);
    r->peak = 1.0;
    save_open_model(r);
    start_training(r, c.argc, c.argv);
}

// logits of the first batch, behind the states of micro-batch k or, with k -1, behind nothing
static float* logits_behind(Run* r, int k) {
    Workplace* w = workplace(r);
    const Config* c = config_of(r);
    const int B = r->o.batch_size, N = B * r->T;
    dataloader_batch(&r->data.train_rows, 0, B, r->inputs, r->targets);
    carry_nothing(&w->acts);
    if (k >= 0) { w->acts.carried = carried_batch(&w->carried, k); }
    mamba_forward(&w->mamba, &w->acts, r->inputs, B, r->T, &r->dev);
    return copied_array(mamba_logits(&w->mamba, &w->acts, 0, N, &r->dev), (size_t)N * c->head.classes);
}

// a step whose embedding, and so its loss, is not a number; the parameters are then what they were
static void step_not_finite(Test* t, Run* r) {
    float* params = model_floats(r->model);
    float* before = copied_array(params, r->model->n);
    Step step = {0.0f, 0.0f, 1e-3f, 0, &r->model->dp, NULL};
    for (size_t i = 0; i < tensor_elements(&r->model->table[0]); i++) { params[i] = NAN; }
    mamba_step(r, &step);
    mamba_stepped(r, &step);
    check(t, step.skipped && isnan(step.loss), "expected a loss that is not a number, found %g", (double)step.loss);
    memcpy(params, before, sizeof(float) * r->model->n);
    free(before);
}

static void test_forgotten(Test* t) {
    static Run r;
    static Workplace place;
    start(&r, &place, TOKENS "--carry-state 1 --grad-accum 3 --steps 9 --log-every 1000 --run W/forgotten");
    const size_t n = (size_t)r.o.batch_size * r.T * r.classes;
    train_step(&r);
    float* expected = logits_behind(&r, -1);
    for (int k = 0; k < r.n_leaves; k++) {
        float* found = logits_behind(&r, k);
        check(t, memcmp(found, expected, sizeof(float) * n) != 0, "the states of micro-batch %d say nothing", k);
        free(found);
    }
    step_not_finite(t, &r);
    for (int k = 0; k < r.n_leaves; k++) {
        float* found = logits_behind(&r, k);
        check_bits(t, "logits behind forgotten states", found, expected, n);
        free(found);
    }
    free(expected);
}

static int same_file(const char* name, const char* other) {
    MappedFile a, b;
    file_map(&a, temp_path(&folder, name).s);
    file_map(&b, temp_path(&folder, other).s);
    const int same = a.n_bytes == b.n_bytes && memcmp(a.bytes, b.bytes, a.n_bytes) == 0;
    file_unmap(&a);
    file_unmap(&b);
    return same;
}

static void test_carried(Test* t) {
    check_trains(t, TOKENS "--val-token-file W/tokens --eval-every 0 --head hpn --carry-state --grad-accum 4 --steps 2 "
                 "--run W/carried --embeddings-out W/after");
    check_trains(t, "--threads 1 --from W/carried --eval-only --val-token-file W/tokens --seq-len 8 --batch-size 2 "
                 "--embeddings-out W/later");
    check(t, same_file("after", "later"), "embeddings behind a state that training has carried");
    check_refused(t, "--resume --run W/carried --steps 3 --batch-size 4 --grad-accum 2",
                  "the checkpoint carries states of 4 micro-batches of an update, found 2");
    check_refused(t, "--resume --run W/carried --steps 3 --head ce", "a run that goes on keeps it");
}

// ---- what is refused ----

static void test_heads(Test* t) {
    check_refused(t, TOKENS "--dry-run --gradient-surgery-method mgda",
                  ": expected none|pcgrad|cagrad,cagradstep|gradnorm|orthograd, found \"mgda\"");
    check_refused(t, TOKENS "--dry-run --head ce --proto-init simplx",
                  "random or a safetensors file, found \"simplx\"");
    check_refused(t, TOKENS "--dry-run --head hpn --proto-dim 5 --proto-init simplex",
                  "7 prototypes need at least 6 channels, found 5");
    check_refused(t, TOKENS "--dry-run --head hpn --proto-init W/rows",
                  "expected one tensor, F32 of shape (7, 8), found 2 tensors");
}

static void test_classifiers(Test* t) {
    check_trains(t, CLASSES "--run W/classes");
    check_refused(t, "--from W/classes --generate x", "--generate: a classifier has no text");
    check_refused(t, "--from W/classes --token-file W/tokens --seq-len 8", "the model chooses from 3 classes");
    check_refused(t, CLASSES "--sample-every 1", "--sample-every: a classifier has no text");
}

static void test_sizes(Test* t) {
    check_refused(t, START "--token-file W/tokens --seq-len 8 --grad-accum 1048576 --batch-size 65536",
                  "are more than 2147483647 rows");
    check_refused(t, START "--token-file W/tokens --seq-len 16384 --grad-accum 1 --batch-size 65536", "are more than");
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"forgotten states", "after a loss that is not finite every stream begins anew", test_forgotten},
        {"carried states", "leave no trace in validation; a run goes on with those of its checkpoint, or is refused",
         test_carried},
        {"heads", "a surgery or a place of prototypes that makes no sense is refused", test_heads},
        {"classifiers", "train on examples, and have no text", test_classifiers},
        {"sizes", "of an update that no int counts are refused", test_sizes},
    };
    folder = temp_folder();
    write_data();
    const int status = test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
    temp_remove(&folder);
    return status;
}
