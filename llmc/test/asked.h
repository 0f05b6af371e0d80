/*
NULL for a gradient means that nobody asks for it. check_asked tries every choice of the gradients of a backward: those that are
asked for must have the bits that they have when all are. The call under test gets an array of the host for each gradient, or
NULL. It should pass NULL for every input that only gradients need that nobody asks for: work that is not left out reads it.
*/
#ifndef LLMC_ASKED_H
#define LLMC_ASKED_H
#include "test.h"  // Test, check_bits, to_device

typedef struct {
    const char* name;
    size_t n;
    const float* before;  // what it holds before the call, where it is added to; NULL: it is written
} AskedGradient;

typedef void (*AskedBackward)(float* const* d, const void* problem, const Device* dev);

enum { ASKED_MOST = 8 };  // gradients of a call

// one call: d[i] becomes gradient i where its bit is set in `mask`, else NULL
static inline void asked_run_(float** d, const AskedGradient* g, int n, int mask, AskedBackward backward, const void* problem,
                              const Device* dev) {
    for (int i = 0; i < n; i++) {
        d[i] = !(mask >> i & 1) ? NULL : g[i].before ? copied_array(g[i].before, g[i].n) : filled_array(g[i].n, NAN);
    }
    backward(d, problem, dev);
}

static inline void asked_free_(float** d, int n) {
    for (int i = 0; i < n; i++) { free(d[i]); }
}

static inline void check_asked(Test* t, const char* what, const AskedGradient* g, int n, AskedBackward backward,
                               const void* problem, const Device* dev) {
    float *all[ASKED_MOST] = {NULL}, *some[ASKED_MOST] = {NULL};
    int mask = (1 << n) - 1;  // bit i: gradient i is asked for
    asked_run_(all, g, n, mask, backward, problem, dev);
    while (--mask >= 0) {
        asked_run_(some, g, n, mask, backward, problem, dev);
        for (int i = 0; i < n; i++) {
            char title[128];
            snprintf(title, sizeof title, "%s, gradients asked for %x: %s", what, mask, g[i].name);
            if (some[i]) { check_bits(t, title, some[i], all[i], g[i].n); }
        }
        asked_free_(some, n);
    }
    asked_free_(all, n);
}

// ---- for calls under test: arrays of the device where there are some ----

static inline float* asked_to_device(const float* x, size_t n, const Device* dev) { return x ? to_device(x, n, dev) : NULL; }

static inline void asked_from_device(float* x, float* d, size_t n, const Device* dev) {
    if (d) { from_device(x, d, n, dev); }
}
#endif  // LLMC_ASKED_H
