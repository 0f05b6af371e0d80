/*
Golden files: what an independent NumPy program (dev/ref) has computed of a small model, in dev/golden. A test makes its
model from such a file, has it compute the same, and compares bit by bit.
    Golden g;
    golden_open(&g, "dev/golden/gpt2_base.safetensors");
    Config c = config_make(golden_int(&g, "n_positions"), ...);           // the file says of which sizes the model is
    golden_load(&g, "param.", table, n_table, params);
    GoldenRun run = {table, n_table, n, &dp, weights, &dev, &model, leaf, NULL, NULL, "2 threads", GOLDEN_BITS};
    golden_check_training(t, &g, &run);                                   // losses, norms, gradients, parameters
    golden_close(&g);
What a file has: metadata "config", JSON, with sizes, batch, seq_len, leaves, steps, optimizer settings; and tensors
    inputs, targets (steps, leaves, batch, seq_len), int32    loss, norm, lr (steps)
    param.NAME   at the start      grad.NAME   of step 0      step1.NAME, step10.NAME   after 1 and 10 updates
    act.NAME     activations of leaf 0 of step 0
A file without batches (schedules.safetensors) has a config and tensors only.
Errors: a tensor or a value that is missing ends the test program, and the message names it.
*/
#ifndef LLMC_GOLDEN_H
#define LLMC_GOLDEN_H
#include "../files/tensorfile.h"     // SafeSet, tensors_load, NAME_BYTES
#include "../ops/dropout.h"          // Dropout, dropout_key
#include "../ranks/data_parallel.h"  // DataParallel, dp_reduce, dp_norm, dp_update
#include "../core/choice.h"          // choice_find
#include "../run/schedule.h"         // schedule_lr, SCHEDULE_NAMES
#include "test.h"                    // check, check_bits

// ---- 1. The file. Tensors stay in its memory: nobody frees them, and they are gone with golden_close ----

typedef struct {
    SafeSet set;
    json_t* config;
    int B, T, n_leaves;  // a step has n_leaves batches of B rows, T positions each
} Golden;

static inline int golden_int(const Golden* g, const char* key) {
    return (int)json_need_int(g->config, g->set.path, key, 0, 1 << 24);
}

static inline float golden_float(const Golden* g, const char* key) {
    const json_t* value = json_object_get(g->config, key);
    if (!json_is_number(value)) { fail_run("%s: \"%s\": expected a number: make golden", g->set.path, key); }
    return (float)json_number_value(value);
}

static inline const SafeTensor* golden_tensor(const Golden* g, const char* name, Dtype dtype) {
    const SafeTensor* t = safetensors_find(g->set.files, name);
    if (!t || t->dtype != dtype) { fail_run("%s: %s: missing, or of another dtype: make golden", g->set.path, name); }
    if ((uintptr_t)t->data % 4 != 0) { fail_run("%s: %s: not aligned to 4 bytes: make golden", g->set.path, name); }
    return t;
}

static inline const float* golden_floats(const Golden* g, const char* name) {
    return (const float*)golden_tensor(g, name, DTYPE_F32)->data;
}

// "inputs" or "targets" of one leaf; those of the step's further leaves lie behind it
static inline const int* golden_batch(const Golden* g, const char* name, int step, int leaf) {
    return (const int*)golden_tensor(g, name, DTYPE_I32)->data + ((size_t)step * g->n_leaves + leaf) * g->B * g->T;
}

// the k-th leaf since the beginning; a file without "dropout" leaves nothing out. C: channels
static inline Dropout golden_dropout(const Golden* g, int k, int C) {
    Dropout d = {0.0f, 0, 0};
    if (!json_object_get(g->config, "dropout")) { return d; }
    d.p = golden_float(g, "dropout");
    d.key = dropout_key((uint64_t)golden_int(g, "seed"), (uint64_t)(k / g->n_leaves));
    d.first = (uint64_t)(k % g->n_leaves) * (uint64_t)g->B * (uint64_t)g->T * (uint64_t)C;
    return d;
}

static inline void golden_open(Golden* g, const char* path) {
    memset(g, 0, sizeof *g);
    safeset_open(&g->set, path);
    g->config = json_loads(safetensors_meta(g->set.files, "config"), 0, NULL);
    if (!g->config) { fail_run("%s: expected a JSON \"config\" in its metadata: make golden", path); }
    if (safetensors_find(g->set.files, "inputs")) {
        g->B = golden_int(g, "batch");
        g->T = golden_int(g, "seq_len");
        g->n_leaves = golden_int(g, "leaves");
    }
}

static inline void golden_close(Golden* g) {
    json_decref(g->config);
    safeset_close(&g->set);
}

// the rate of a step, from the settings of the file
static inline float golden_lr(const Golden* g, Schedule schedule, int step) {
    return schedule_lr(schedule, step, golden_int(g, "steps"), golden_int(g, "warmup"), (double)golden_float(g, "lr"),
                       (double)golden_float(g, "final_lr"));
}

// ---- 2. Comparing. GOLDEN_BITS: every bit; another tolerance: the relative distance, of kernels that round otherwise

#define GOLDEN_BITS 0.0

// |a - b| / |b|
static inline double relative_distance(const float* a, const float* b, size_t n) {
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < n; i++) {
        difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    return size > 0.0 ? sqrt(difference / size) : difference > 0.0;
}

static inline int golden_compare(Test* t, const char* what, const float* found, const float* expected, size_t n,
                                 double tolerance) {
    if (tolerance == GOLDEN_BITS) { return check_bits(t, what, found, expected, n); }
    const double distance = relative_distance(found, expected, n);
    return check(t, distance < tolerance, "%s: relative distance %.2g, expected below %g", what, distance, tolerance);
}

// n floats are those of the named tensor, which has no more
static inline void golden_check(Test* t, const Golden* g, const char* name, const float* found, size_t n) {
    const SafeTensor* expected = golden_tensor(g, name, DTYPE_F32);
    if (check(t, expected->n == n, "%s: %s: expected %zu elements, found %zu", g->set.path, name, expected->n, n)) {
        check_bits(t, name, found, golden_floats(g, name), n);
    }
}

// n_rows rows of which the tensor has the first `columns` elements: rows in memory are padded
static inline void golden_check_rows(Test* t, const Golden* g, const char* name, const float* found, size_t n_rows,
                                     size_t columns, size_t padded_columns) {
    const SafeTensor* expected = golden_tensor(g, name, DTYPE_F32);
    if (!check(t, expected->n == n_rows * columns, "%s: %s: another shape", g->set.path, name)) { return; }
    for (size_t n = 0; n < n_rows; n++) {
        check_bits(t, name, found + n * padded_columns, golden_floats(g, name) + n * columns, columns);
    }
}

// is there a row of this name?
static inline int golden_has_row_(const Tensor* table, int n_table, const char* name) {
    for (int i = 0; i < n_table; i++) {
        if (strcmp(table[i].name, name) == 0) { return 1; }
    }
    return 0;
}

// The activations that a model keeps under the names of its own table, but for `logits`, which the loss overwrites.
// A buffer that all layers use in turn holds what the last of them has left there. Of an MTP module the file has what
// its layer keeps as "act.mtp_NAME"; in memory that is the last layer of NAME, unless there is a row mtp_NAME
static inline void golden_check_activations(Test* t, const Golden* g, const Tensor* table, int n_table,
                                            const float* arena, int n_expected) {
    int n_found = 0;
    for (int i = 0; i < n_table; i++) {
        size_t n = tensor_elements(&table[i]);
        const float* found = arena + table[i].offset;
        char name[NAME_BYTES], of_mtp[NAME_BYTES];
        snprintf(name, sizeof name, "act.%s", table[i].name);
        snprintf(of_mtp, sizeof of_mtp, "act.mtp_%s", table[i].name);
        const SafeTensor *expected = safetensors_find(g->set.files, name);
        const int is_own = golden_has_row_(table, n_table, of_mtp + 4);
        const SafeTensor* mtp = is_own ? NULL : safetensors_find(g->set.files, of_mtp);
        if (!expected || strcmp(table[i].name, "logits") == 0) { continue; }
        n_found++;
        if (mtp && check(t, mtp->n <= n, "%s: another shape", of_mtp)) {
            n -= mtp->n;
            check_bits(t, of_mtp, found + n, golden_floats(g, of_mtp), mtp->n);
        }
        if (mtp && table[i].layers == 0) { continue; }
        if (table[i].layers == 0 && expected->n > n) {
            check_bits(t, name, found, golden_floats(g, name) + expected->n - n, n);
        } else {
            golden_check(t, g, name, found, n);
        }
    }
    check(t, n_found == n_expected, "expected %d activations in %s, found %d", n_expected, g->set.path, n_found);
}

// ---- 3. Training: every step of the file, on a model of the test's ----

typedef struct {
    const Tensor* table;  // of the parameters
    int n_table;
    size_t n;             // elements of an arena of them
    DataParallel* dp;     // open, with the file's number of leaves
    Weights weights;
    const Device* dev;
    void* model;          // the test's own, for the two calls
    void (*leaf)(void* model, const int* inputs, const int* targets, float dloss);  // forward and backward of one batch
    void (*updated)(void* model);  // what the trainer does after an update, or NULL
    float (*more_loss)(void* model);  // what it adds to the loss, or NULL
    const char* how;      // this way of computing, for messages: "3 threads"
    double numbers, gradients, parameters;  // tolerances of loss and norm, gradients, parameters
} GoldenRun;

// the tensors with this prefix ("param.") into an arena on the host
static inline void golden_load(Golden* g, const char* prefix, const Tensor* table, int n_table, float* arena) {
    tensors_load(&g->set, table, n_table, prefix, arena);
}

// the parameters as floats, on the device: the masters, where there are some
static inline const float* golden_parameters_(const GoldenRun* run) {
    const Weights* w = &run->weights;
    if (!w->master && w->stored_bytes != sizeof(float)) { fail_run("golden: bf16 parameters need masters"); }
    return w->master ? w->master : (const float*)w->stored;
}

// every tensor with this prefix that may learn equals that of an arena on the device
static inline void golden_check_arena(Test* t, Golden* g, const GoldenRun* run, const char* prefix, const float* arena,
                                      double tolerance) {
    const size_t n_bytes = sizeof(float) * run->n;
    float *found = (float*)arena_alloc(n_bytes, "found"), *expected = (float*)arena_alloc(n_bytes, prefix);
    device_download(found, arena, n_bytes, run->dev);
    for (int i = 0; i < run->n_table; i++) {
        const Tensor* p = &run->table[i];
        if (p->whole_below > 0) { continue; }  // has no gradient, and stays
        golden_load(g, prefix, p, 1, expected);
        char what[2 * NAME_BYTES];
        snprintf(what, sizeof what, "%s: %s%s, %s", g->set.path, prefix, p->name, run->how);
        golden_compare(t, what, found + p->offset, expected + p->offset, tensor_elements(p), tolerance);
    }
    arena_free(found, n_bytes);
    arena_free(expected, n_bytes);
}

static inline void golden_check_parameters(Test* t, Golden* g, const GoldenRun* run, const char* prefix) {
    golden_check_arena(t, g, run, prefix, golden_parameters_(run), run->parameters);
}

// all leaves of a step; the gradient comes back, on the device
static inline float* golden_gradients(const Golden* g, const GoldenRun* run, int step, float* loss, float* norm) {
    const size_t n = (size_t)g->B * (size_t)g->T;
    const int* targets = golden_batch(g, "targets", step, 0);
    int counted = 0;
    for (size_t i = 0; i < n * (size_t)g->n_leaves; i++) { counted += targets[i] >= 0; }
    for (int leaf = 0; leaf < g->n_leaves; leaf++) {
        run->leaf(run->model, golden_batch(g, "inputs", step, leaf), targets + n * (size_t)leaf, 1.0f / (float)counted);
    }
    float loss_sum, *grads = dp_reduce(run->dp, &loss_sum, run->dev);
    *loss = loss_sum / (float)counted;
    if (run->more_loss) { *loss += run->more_loss(run->model); }
    *norm = dp_norm(run->dp, grads, run->dev);
    return grads;
}

// the learning rate comes back
static inline float golden_update(const Golden* g, const GoldenRun* run, int step, float* grads, float norm) {
    const char* schedule = json_string_value(json_object_get(g->config, "schedule"));
    const float lr = golden_lr(g, (Schedule)choice_find(SCHEDULE_NAMES, schedule), step);
    const Optimizer o = {lr, golden_float(g, "beta1"), golden_float(g, "beta2"), golden_float(g, "eps"),
                         golden_float(g, "weight_decay"), golden_float(g, "clip"), 0, NULL, NULL, 0.0f, NULL};
    dp_update(run->dp, &run->weights, grads, norm, &o, step + 1, run->dev);
    if (run->updated) { run->updated(run->model); }
    return lr;
}

// n_steps updates, for tests of two ways that must give equal bits: the parameters, on the host, and all losses
static inline float* golden_trained(const Golden* g, const GoldenRun* run, int n_steps, float* losses) {
    float norm, *params = (float*)malloc_check(sizeof(float) * run->n, "parameters");
    for (int step = 0; step < n_steps; step++) {
        float* grads = golden_gradients(g, run, step, &losses[step], &norm);
        golden_update(g, run, step, grads, norm);
    }
    device_download(params, golden_parameters_(run), sizeof(float) * run->n, run->dev);
    return params;
}

static inline void golden_check_training(Test* t, Golden* g, const GoldenRun* run) {
    const float *losses = golden_floats(g, "loss"), *norms = golden_floats(g, "norm"), *rates = golden_floats(g, "lr");
    const int n_steps = golden_int(g, "steps");
    for (int step = 0; step < n_steps; step++) {
        float loss, norm, *grads = golden_gradients(g, run, step, &loss, &norm);
        golden_compare(t, "loss", &loss, &losses[step], 1, run->numbers);
        golden_compare(t, "norm", &norm, &norms[step], 1, run->numbers);
        if (step == 0) { golden_check_arena(t, g, run, "grad.", grads, run->gradients); }
        const float lr = golden_update(g, run, step, grads, norm);
        check_bits(t, "lr", &lr, &rates[step], 1);
        if (step == 0) { golden_check_parameters(t, g, run, "step1."); }
    }
    golden_check_parameters(t, g, run, "step10.");
}
#endif  // LLMC_GOLDEN_H
