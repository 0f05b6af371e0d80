/*
Training steps of upstream llm.c on GPT-2 124M, timed: forward, zero_grad, backward, update, as its own main calls them, on
random weights and tokens instead of files. Upstream's train_gpt2.c is included as it stands, its main left out by TESTING.
    gcc -Ofast -march=native -fopenmp -DTESTING -DUPSTREAM='"/path/to/llm.c/train_gpt2.c"' upstream_step.c -lm -o upstream_step
    OMP_NUM_THREADS=2 ./upstream_step B T STEPS
Prints one line per step: "step 3 | 512.4 ms". The weights are uniform in +-0.04 (GPT-2's deviation 0.02 within 15%), LayerNorm
weights 1, biases 0: only their size matters, so that no number becomes subnormal or infinite.
*/
#include <stdint.h>
#include UPSTREAM  // GPT2, gpt2_forward, gpt2_zero_grad, gpt2_backward, gpt2_update

static uint32_t random_next(uint32_t* state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;  // 24 bits
}

static void build_124m(GPT2* model) {
    uint32_t state = 1;
    memset(model, 0, sizeof *model);
    model->config = (GPT2Config){.max_seq_len = 1024, .vocab_size = 50257, .padded_vocab_size = 50304,
                                 .num_layers = 12, .num_heads = 12, .channels = 768};
    fill_in_parameter_sizes(model->param_sizes, model->config);
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++) { model->num_parameters += model->param_sizes[i]; }
    model->params_memory = malloc_and_point_parameters(&model->params, model->param_sizes);
    float* p = model->params_memory;
    for (int tensor = 0; tensor < NUM_PARAMETER_TENSORS; tensor++) {
        int is_norm_weight = tensor == 2 || tensor == 8 || tensor == 14;
        int is_bias = tensor > 1 && tensor % 2 == 1;
        for (size_t i = 0; i < model->param_sizes[tensor]; i++) {
            *p++ = is_norm_weight ? 1.0f : is_bias ? 0.0f : ((float)random_next(&state) / 16777216.0f - 0.5f) * 0.08f;
        }
    }
}

int main(int argc, char** argv) {
    if (argc != 4) { fprintf(stderr, "upstream_step: expected three arguments: B T STEPS\n"); return 2; }
    int B = atoi(argv[1]), T = atoi(argv[2]), n_steps = atoi(argv[3]);
    uint32_t state = 2;
    int* tokens = (int*)mallocCheck(sizeof(int) * (B * T + 1));
    GPT2 model;
    build_124m(&model);
    for (int step = 0; step < n_steps; step++) {
        struct timespec begin, end;
        for (int i = 0; i <= B * T; i++) { tokens[i] = (int)(random_next(&state) % 50257); }
        clock_gettime(CLOCK_MONOTONIC, &begin);
        gpt2_forward(&model, tokens, tokens + 1, B, T);
        gpt2_zero_grad(&model);
        gpt2_backward(&model);
        gpt2_update(&model, 1e-4f, 0.9f, 0.999f, 1e-8f, 0.0f, step + 1);
        clock_gettime(CLOCK_MONOTONIC, &end);
        printf("step %d | %.1f ms\n", step, 1e3 * (double)(end.tv_sec - begin.tv_sec) + 1e-6 * (double)(end.tv_nsec - begin.tv_nsec));
        fflush(stdout);
    }
    return 0;
}
