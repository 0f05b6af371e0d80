/*
The parity run (run.h) made by our train_gpt2.c, built with SYSTEM_LIBM: the C library's functions and llm.c's order.
Same options and output as upstream.c; check.sh builds both and compares.
*/
#define TESTING
#include "../../train_gpt2.c"
#include "run.h"

// our arena has gaps between tensors; llm.c's file has none
static void gather(float* packed, const GPT2* model) {
    for (int i = 0; i < N_PARAMETERS; i++) {
        const Tensor* t = &model->model.table[i];
        memcpy(packed, model_floats(&model->model) + t->offset, sizeof(float) * tensor_elements(t));
        packed += tensor_elements(t);
    }
}

static void scatter(GPT2* model, const float* packed) {
    for (int i = 0; i < N_PARAMETERS; i++) {
        const Tensor* t = &model->model.table[i];
        memcpy(model_floats(&model->model) + t->offset, packed, sizeof(float) * tensor_elements(t));
        packed += tensor_elements(t);
    }
}

// the whole run; every step is reported to `report`
static void parity_train(const ParityRun* run, int n_threads, void (*report)(int step, float loss, const float* params, size_t n)) {
    Config c = config_make(run->maxT, run->V, run->L, run->NH, run->C);
    c.Vp = run->Vp;
    GPT2 model;
    Activations acts;
    Device dev;
    const int N = run->B * run->T;
    gpt2_init(&model, c, sizeof(float));
    activations_init(&acts, c, run->B, run->T, TO_TRAIN, &(ArenaSlots){0});
    device_init(&dev, n_threads);
    model_init_training(&model.model, NULL, 1, 0, 0);
    size_t n = tensors_count(model.model.table, N_PARAMETERS), n_int_bytes = sizeof(int) * (size_t)N;
    float* packed = (float*)malloc_check(sizeof(float) * n, "parameters");
    int *inputs = (int*)malloc_check(n_int_bytes, "inputs"), *targets = (int*)malloc_check(n_int_bytes, "targets");
    parity_parameters(packed, run);
    scatter(&model, packed);
    uint64_t data_state = run->data_seed;
    for (int step = 0; step < run->steps; step++) {
        parity_batch(inputs, targets, &data_state, run);
        gpt2_leaf(&model, &acts, inputs, targets, 1.0f / (float)N, run->B, run->T, &dev);
        float loss_sum, *grads = dp_reduce(&model.model.dp, &loss_sum, &dev);
        Optimizer o = {run->lr, 0.9f, 0.999f, 1e-8f, run->weight_decay, 0.0f, 1, NULL, NULL, 0.0f, NULL};
        dp_update(&model.model.dp, &model.model.w, grads, 0.0f, &o, step + 1, &dev);
        gather(packed, &model);
        report(step, loss_sum / (float)N, packed, n);
    }
    parity_write(run, packed, n);
    free(packed);
    free(inputs);
    free(targets);
    model_free(&model.model);
    activations_free(&acts);
    device_free(&dev);
}

#ifndef PARITY_TEST
int main(int argc, char** argv) {
    ParityRun run = parity_options(argc, argv);
    parity_train(&run, device_threads(0), parity_report);
    return 0;
}
#endif
