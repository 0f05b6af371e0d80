/*
Promises of llmc/core/carried.h, with two kinds of state, two batches of three rows and four layers: each has a place of
its own, what a pass hands on is what the next one reads, and rows that begin anew leave the others alone.
*/
#include "llmc/core/carried.h"
#include "llmc/test/test.h"

enum { L = 4, B = 3, KINDS = 2, BATCHES = 2 };
static const size_t SIZES[KINDS] = {5, 2};
static const float NOTHING[KINDS] = {-1.0f, 0.0f};

static Carried carried(void) {
    Carried s = carried_none(L, B);
    for (int kind = 0; kind < KINDS; kind++) { carried_add(&s, SIZES[kind], NOTHING[kind]); }
    return s;
}

// a number for each element of all that a batch carries, which says where it is
static float mark(int batch, int kind, int l, size_t i) { return (float)(1000 * batch + 300 * kind + 20 * l + (int)i); }

static void fill(const Carried* s, float* states, int batch) {
    for (int kind = 0; kind < KINDS; kind++) {
        for (int l = 0; l < L; l++) {
            float* part = carried_part(s, states, kind, l);
            for (size_t i = 0; i < carried_layer_floats(s, kind); i++) { part[i] = mark(batch, kind, l, i); }
        }
    }
}

// rows first..end-1 have begun anew
static void check_marks(Test* t, const char* what, const Carried* s, float* states, int batch, int first, int end) {
    for (int kind = 0; kind < KINDS; kind++) {
        for (int l = 0; l < L; l++) {
            const float* part = carried_part(s, states, kind, l);
            for (size_t i = 0; i < carried_layer_floats(s, kind); i++) {
                const int row = (int)(i / SIZES[kind]);
                const float want = row >= first && row < end ? NOTHING[kind] : mark(batch, kind, l, i);
                check(t, part[i] == want, "%s: batch %d, kind %d, layer %d, [%zu]: expected %g, found %g", what, batch,
                      kind, l, i, (double)want, (double)part[i]);
            }
        }
    }
}

static void test_places(Test* t) {
    Carried all = carried();
    carried_open(&all, BATCHES);
    check(t, carried_bytes(&all, BATCHES) == sizeof(float) * BATCHES * L * B * (5 + 2), "%zu bytes",
          carried_bytes(&all, BATCHES));
    for (int k = 0; k < BATCHES; k++) {
        const Carried one = carried_batch(&all, k);
        fill(&one, one.now, k);
        fill(&one, one.next, k + BATCHES);
    }
    for (int k = 0; k < BATCHES; k++) {
        const Carried one = carried_batch(&all, k);
        check_marks(t, "now", &one, one.now, k, 0, 0);
        check_marks(t, "next", &one, one.next, k + BATCHES, 0, 0);
    }
    carried_close(&all);
    carried_close(&all);  // also of what is closed
}

static void test_passes(Test* t) {
    Carried s = carried();
    Device dev = test_device(1);
    carried_open(&s, 1);
    fill(&s, s.now, 0);
    for (int l = 0; l < L; l++) { carried_begin(&s, l, &dev); }
    check_marks(t, "begun", &s, s.next, 0, 0, 0);
    fill(&s, s.next, 1);
    carried_swap(&s);
    check_marks(t, "what the next pass reads", &s, s.now, 1, 0, 0);
    carried_close(&s);
    device_free(&dev);
}

static void test_clear(Test* t) {
    Carried all = carried();
    Device dev = test_device(1);
    carried_open(&all, BATCHES);
    for (int k = 0; k < BATCHES; k++) {
        const Carried one = carried_batch(&all, k);
        fill(&one, one.now, k);
    }
    const Carried last = carried_batch(&all, 1), first = carried_batch(&all, 0);
    carried_clear(&last, 1, 2, &dev);
    check_marks(t, "cleared", &last, last.now, 1, 1, 2);
    check_marks(t, "another batch", &first, first.now, 0, 0, 0);
    carried_close(&all);
    device_free(&dev);
}

// a model that carries nothing
static void test_nothing(Test* t) {
    Carried s = carried_none(L, B);
    Device dev = test_device(1);
    carried_begin(&s, 0, &dev);
    const Carried one = carried_batch(&s, 1);
    check(t, !carried_part(&one, one.now, 0, 1), "something is carried");
    carried_swap(&s);
    carried_close(&s);
    device_free(&dev);
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"places", "each batch, kind and layer has floats of its own", test_places},
        {"passes", "a pass begins with what it was given, and the next one reads what it wrote", test_passes},
        {"clear", "rows begin anew, the others and other batches stay", test_clear},
        {"nothing", "without memory every call does nothing", test_nothing},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
