/*
The parity run (run.h) made by upstream llm.c: its train_gpt2.c is included as it stands, its own main left out by TESTING.
    gcc -O3 -ffp-contract=off -fopenmp -DTESTING -DUPSTREAM='"/path/to/llm.c/train_gpt2.c"' upstream.c -lm -o upstream
    ./upstream steps=20 out=upstream.f32
Prints upstream's own `num_activations:` line and then one line per step; check.sh reads the lines that begin with "step".
*/
#include "run.h"
#define malloc_check upstream_malloc_check  // upstream has functions of these names with other arguments
#define normal_fill upstream_normal_fill
#include UPSTREAM  // GPT2, gpt2_forward, gpt2_zero_grad, gpt2_backward, gpt2_update, gpt2_free
#undef malloc_check
#undef normal_fill

static void build(GPT2* model, const ParityRun* run) {
    memset(model, 0, sizeof *model);
    model->config.max_seq_len = run->maxT;
    model->config.vocab_size = run->V;
    model->config.padded_vocab_size = run->Vp;
    model->config.num_layers = run->L;
    model->config.num_heads = run->NH;
    model->config.channels = run->C;
    model->num_parameters = parity_sizes(model->param_sizes, run);
    model->params_memory = malloc_and_point_parameters(&model->params, model->param_sizes);
    parity_parameters(model->params_memory, run);
}

int main(int argc, char** argv) {
    ParityRun run = parity_options(argc, argv);
    GPT2 model;
    build(&model, &run);
    int* inputs = (int*)malloc_check(sizeof(int) * run.B * run.T, "inputs");
    int* targets = (int*)malloc_check(sizeof(int) * run.B * run.T, "targets");
    uint64_t data_state = run.data_seed;
    for (int step = 0; step < run.steps; step++) {
        parity_batch(inputs, targets, &data_state, &run);
        gpt2_forward(&model, inputs, targets, run.B, run.T);
        gpt2_zero_grad(&model);
        gpt2_backward(&model);
        gpt2_update(&model, run.lr, 0.9f, 0.999f, 1e-8f, run.weight_decay, step + 1);
        parity_report(step, model.mean_loss, model.params_memory, model.num_parameters);
    }
    parity_write(&run, model.params_memory, model.num_parameters);
    gpt2_free(&model);
    free(inputs);
    free(targets);
    return 0;
}
