/*
Promises of llmc/run/slow_ranks.h: which ranks are slow, by the seconds of each in a window. That a run names one: dev/test_ranks.sh.
    cc -std=gnu11 -D_GNU_SOURCE -O2 -ffp-contract=off -I. test_slow_ranks.c -o build/test_slow_ranks -ljansson -lxxhash -lm
*/
#include "llmc/run/slow_ranks.h"
#include "llmc/test/test.h"  // check, test_main

static void test_windows(Test* t) {
    SlowRanks x = slow_ranks_init(4);
    const double late[] = {1.0, 1.0, 1.2, 0.9}, even[] = {1.0, 1.1, 0.9, 1.0};
    for (int i = 1; i <= 6; i++) {
        const double median = slow_ranks_add(&x, late);
        check(t, median == 1.0, "the median is %g", median);
        check(t, x.slow[2] == i, "window %d: rank 2 has been slow in %d", i, x.slow[2]);
        check(t, x.slow[0] + x.slow[1] + x.slow[3] == 0, "window %d: another rank is slow", i);
    }
    slow_ranks_add(&x, even);
    check(t, x.slow[2] == 0, "it got well, and has been slow in %d", x.slow[2]);
    slow_ranks_free(&x);
}

static void test_bounds(Test* t) {
    SlowRanks x = slow_ranks_init(2);
    const struct {
        double seconds[2];
        int slow[2];
    } cases[] = {{{2.0, 1.0}, {1, 0}}, {{1.0, 1.15}, {0, 1}}, {{1.0, 1.1499}, {0, 0}}, {{0.1, 0.19}, {0, 0}}, {{0.1, 0.2}, {0, 1}}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        x.slow[0] = x.slow[1] = 0;
        slow_ranks_add(&x, cases[i].seconds);
        for (int k = 0; k < 2; k++) { check(t, x.slow[k] == cases[i].slow[k], "case %zu: rank %d: %d", i, k, x.slow[k]); }
    }
    slow_ranks_free(&x);
}

static void test_idle(Test* t) {
    SlowRanks x = slow_ranks_init(4);
    const double two[] = {0.0, 1.2, 0.0, 1.0}, none[] = {0.0, 0.0, 0.0, 0.0};
    const double median = slow_ranks_add(&x, two);
    check(t, median == 1.0, "the median is %g", median);
    check(t, x.slow[1] == 1 && x.slow[0] + x.slow[2] + x.slow[3] == 0, "of two that have work the slower one");
    slow_ranks_add(&x, none);
    check(t, x.slow[0] + x.slow[1] + x.slow[2] + x.slow[3] == 0, "a rank without work is slow");
    slow_ranks_free(&x);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"slow ranks", "a window that is well ends the count", test_windows},
        {"slow ranks", "of two the slower one, from 1.15 times and 0.1 s on", test_bounds},
        {"slow ranks", "ranks without work are no measure, and never slow", test_idle},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
