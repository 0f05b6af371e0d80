/*
The training run that both parity drivers make: its options, start values, data and what it reports. The drivers
(ours.c, upstream.c) differ only in whose functions they call in between, so a difference of one bit is a difference there.
    parity_options     name=value arguments, below with their defaults; anything else ends the program with status 2
    parity_parameters  start values, tensor by tensor in the order of llm.c's files: r = draw - 0.5 of one xorshift* stream,
                       LayerNorm weights 1 + r/8, biases r/8, the rest r/4; the rows of wte past V are 0 and draw nothing
    parity_batch       B*T + 1 fresh tokens of a second stream: inputs are the first B*T, targets the last B*T
    parity_report      one line: step, loss (bits and decimal), 64-bit FNV-1a hash of all parameters after the update
    parity_write       the parameters as raw float32, for cmp
The defaults are the small model whose losses and hashes check.sh lists. AdamW: beta1 0.9, beta2 0.999, eps 1e-8, t = step + 1.
*/
#ifndef PARITY_RUN_H
#define PARITY_RUN_H
#include "../../llmc/core/fail.h"  // fail_input, fail_run
#include "../../llmc/core/rng.h"   // xorshift_u32, xorshift_float
#include <limits.h>
#include <stdint.h>

enum { PARITY_TENSORS = 16 };

typedef struct {
    int V, Vp, maxT, L, NH, C;        // 97, 128, 32, 2, 2, 32   vocabulary, padded, positions, layers, heads, channels
    int B, T, steps;                  // 4, 16, 20
    uint64_t param_seed, data_seed;   // 1337, 42
    float lr, weight_decay;           // 1e-3, 0.1
    const char* out;                  // file for the parameters after the last step; NULL: none is written
} ParityRun;

// ---- options ----

static inline int parity_int_(const char* name, const char* text) {
    char* end;
    errno = 0;
    long n = strtol(text, &end, 10);
    if (end == text || *end || errno || n < 1 || n > INT_MAX) {
        fail_input("%s: expected an integer 1..%d, found \"%s\"", name, INT_MAX, text);
    }
    return (int)n;
}

static inline uint64_t parity_seed_(const char* name, const char* text) {
    char* end;
    errno = 0;
    unsigned long long n = strtoull(text, &end, 10);
    if (end == text || *end || errno || n == 0) { fail_input("%s: expected an integer above 0, found \"%s\"", name, text); }
    return n;
}

static inline float parity_float_(const char* name, const char* text) {
    char* end;
    float x = strtof(text, &end);
    if (end == text || *end || !(x >= 0.0f && x <= 1.0f)) { fail_input("%s: expected a number 0..1, found \"%s\"", name, text); }
    return x;
}

static inline void parity_check_(const ParityRun* run) {
    if (run->Vp < run->V) { fail_input("Vp: expected at least V = %d, found %d", run->V, run->Vp); }
    if (run->maxT < run->T) { fail_input("maxT: expected at least T = %d, found %d", run->T, run->maxT); }
    if (run->C % run->NH) { fail_input("C: expected a multiple of NH = %d, found %d", run->NH, run->C); }
}

static inline ParityRun parity_options(int argc, char** argv) {
    ParityRun run = {97, 128, 32, 2, 2, 32, 4, 16, 20, 1337, 42, 1e-3f, 0.1f, NULL};
    struct { const char* name; int* value; } ints[] = {
        {"V", &run.V}, {"Vp", &run.Vp}, {"maxT", &run.maxT}, {"L", &run.L}, {"NH", &run.NH},
        {"C", &run.C}, {"B", &run.B},   {"T", &run.T},       {"steps", &run.steps},
    };
    for (int i = 1; i < argc; i++) {
        char* value = strchr(argv[i], '=');
        if (!value) { fail_input("expected name=value, found \"%s\"", argv[i]); }
        *value++ = '\0';
        const char* name = argv[i];
        int* integer = NULL;
        for (size_t k = 0; k < sizeof ints / sizeof ints[0]; k++) {
            if (strcmp(name, ints[k].name) == 0) { integer = ints[k].value; }
        }
        if (integer) { *integer = parity_int_(name, value); }
        else if (strcmp(name, "param_seed") == 0) { run.param_seed = parity_seed_(name, value); }
        else if (strcmp(name, "data_seed") == 0) { run.data_seed = parity_seed_(name, value); }
        else if (strcmp(name, "lr") == 0) { run.lr = parity_float_(name, value); }
        else if (strcmp(name, "weight_decay") == 0) { run.weight_decay = parity_float_(name, value); }
        else if (strcmp(name, "out") == 0) { run.out = value; }
        else { fail_input("no option \"%s\": V Vp maxT L NH C B T steps param_seed data_seed lr weight_decay out", name); }
    }
    parity_check_(&run);
    return run;
}

// ---- start values and data ----

// elements of each tensor, in the order of llm.c's files; returns their sum
static inline size_t parity_sizes(size_t sizes[PARITY_TENSORS], const ParityRun* run) {
    size_t C = run->C, L = run->L;
    const size_t s[PARITY_TENSORS] = {
        run->Vp * C,   run->maxT * C,          // wte, wpe
        L * C,         L * C,                  // ln1w, ln1b
        L * 3 * C * C, L * 3 * C,              // qkvw, qkvb
        L * C * C,     L * C,                  // attprojw, attprojb
        L * C,         L * C,                  // ln2w, ln2b
        L * 4 * C * C, L * 4 * C,              // fcw, fcb
        L * C * 4 * C, L * C,                  // fcprojw, fcprojb
        C,             C,                      // lnfw, lnfb
    };
    size_t n = 0;
    for (int i = 0; i < PARITY_TENSORS; i++) { n += sizes[i] = s[i]; }
    return n;
}

static inline void parity_parameters(float* params, const ParityRun* run) {
    const float start[PARITY_TENSORS] = {0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0};
    const float scale[PARITY_TENSORS] = {0.25f,  0.25f,  0.125f, 0.125f, 0.25f,  0.125f, 0.25f,  0.125f,
                                         0.125f, 0.125f, 0.25f,  0.125f, 0.25f,  0.125f, 0.125f, 0.125f};
    size_t sizes[PARITY_TENSORS], n_drawn = (size_t)run->V * run->C;  // of wte; all of every other tensor
    uint64_t state = run->param_seed;
    parity_sizes(sizes, run);
    for (int tensor = 0; tensor < PARITY_TENSORS; tensor++) {
        for (size_t i = 0; i < sizes[tensor]; i++) {
            int is_padding = tensor == 0 && i >= n_drawn;
            params[i] = is_padding ? 0.0f : start[tensor] + (xorshift_float(&state) - 0.5f) * scale[tensor];
        }
        params += sizes[tensor];
    }
}

// the next batch of the stream `state`, which starts at run->data_seed; inputs and targets (B*T)
static inline void parity_batch(int* inputs, int* targets, uint64_t* state, const ParityRun* run) {
    int n = run->B * run->T;
    for (int i = 0; i <= n; i++) {
        int token = (int)(xorshift_u32(state) % (uint32_t)run->V);
        if (i < n) { inputs[i] = token; }
        if (i > 0) { targets[i - 1] = token; }
    }
}

// ---- results ----

static inline uint64_t fnv1a(const void* data, size_t n_bytes) {
    const unsigned char* p = (const unsigned char*)data;
    uint64_t hash = 1469598103934665603ull;
    for (size_t i = 0; i < n_bytes; i++) { hash = (hash ^ p[i]) * 1099511628211ull; }
    return hash;
}

static inline void parity_report(int step, float loss, const float* params, size_t n) {
    uint32_t bits;
    memcpy(&bits, &loss, sizeof bits);
    printf("step %d loss %08x %.6f parameters %016llx\n", step, bits, (double)loss,
           (unsigned long long)fnv1a(params, n * sizeof(float)));
    fflush(stdout);
}

static inline void parity_write(const ParityRun* run, const float* params, size_t n) {
    if (!run->out) { return; }
    FILE* f = fopen(run->out, "wb");
    if (!f || fwrite(params, sizeof(float), n, f) != n || fclose(f) != 0) { fail_run("%s: %s", run->out, strerror(errno)); }
}
#endif  // PARITY_RUN_H
