/*
train_gpt2.c in its parity build (SYSTEM_LIBM, whatever the variables of make say) against upstream llm.c: losses and
parameter hashes that upstream's functions gave, built with -O3 -ffp-contract=off, in a run that needs no file. They
hold for the C library of glibc 2.36 on x86-64; another one rounds expf, logf, tanhf, coshf or powf differently
somewhere, so the library is looked at first. dev/parity/check.sh compares with upstream's code itself, at any shape.
*/
#undef SYSTEM_LIBM
#define SYSTEM_LIBM 1
#define PARITY_TEST
#include "dev/parity/ours.c"
#include "llmc/test/test.h"

static const struct { int step; uint32_t loss; uint64_t parameters; } recorded[] = {
    {0, 0x40990aa9, 0xfa60f63cc0590a75}, {1, 0x409788b1, 0xc1f8f7ee65385c55},  {2, 0x4094bb51, 0x827ff46bb29f5e7d},
    {3, 0x40957dcc, 0x8f02a8a213a66b88}, {4, 0x40953165, 0x275962bd3abeeb2a},  {9, 0x40956d0d, 0x815f6be84059319e},
    {14, 0x40953822, 0x357381d3a8ad1057}, {19, 0x409197f6, 0xd3805a375ff9f25c},
};

static Test* current;    // of the promise that runs now, for compare_step
static int n_compared;

static void compare_step(int step, float loss, const float* params, size_t n) {
    uint64_t hash = fnv1a(params, n * sizeof(float));
    for (size_t i = 0; i < sizeof recorded / sizeof recorded[0]; i++) {
        if (recorded[i].step != step) { continue; }
        check(current, float_bits(loss) == recorded[i].loss, "step %d: loss %08x, expected %08x", step, float_bits(loss), recorded[i].loss);
        check(current, hash == recorded[i].parameters, "step %d: parameters %016llx, expected %016llx", step, (unsigned long long)hash,
              (unsigned long long)recorded[i].parameters);
        n_compared++;
    }
}

// the library's functions at some thousand points, in one number
static uint64_t library_hash(void) {
    float results[5 * 2048];
    for (int i = 0; i < 2048; i++) {
        volatile float x = (float)(i - 1024) / 64.0f, p = (float)(i + 1) / 2048.0f, t = (float)i;  // volatile: the library, not the compiler
        results[5 * i] = expf(x);
        results[5 * i + 1] = tanhf(x);
        results[5 * i + 2] = coshf(x);
        results[5 * i + 3] = logf(p);
        results[5 * i + 4] = powf(0.999f, t);
    }
    return fnv1a(results, sizeof results);
}

static int library_is_known(Test* t) {
    if (library_hash() == 0xa0e3685bb6bc5f14) { return 1; }
    skip(t, "another C library than glibc 2.36");
    return 0;
}

static void test_recorded(Test* t) {
    const int n_threads[] = {1, 2, 3, 8};
    current = t;
    if (!library_is_known(t)) { return; }
    for (int i = 0; i < 4; i++) {
        ParityRun run = parity_options(0, NULL);
        n_compared = 0;
        parity_train(&run, n_threads[i], compare_step);
        check(t, n_compared == 8, "expected 8 recorded steps, found %d", n_compared);
    }
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"parity with llm.c", "losses and all parameters over 20 steps, 1, 2, 3 and 8 threads", test_recorded},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
