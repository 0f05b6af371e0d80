/*
Promises of llmc/ops/indexer.h and of llmc/ops/inverse_lists.h. Fast builds for GPUs keep tolerances.
*/
#include "llmc/ops/inverse_lists.h"
#include "llmc/test/test.h"  // Test, check, check_bits, random_array

// ---- inverse lists ----

// N rows of up to topk entries, ascending; those of a row are drawn from the n_entries, or none
static int* drawn_lists(int N, int topk, int n_entries, uint64_t seed) {
    int* chosen = (int*)new_array((size_t)N * topk, sizeof(int));
    uint64_t s = seeded_stream(seed);
    for (int n = 0; n < N; n++) {
        const int wanted = (int)(xorshift_u32(&s) % (uint32_t)(topk + 1));
        int left = wanted < n_entries ? wanted : n_entries, j = 0;
        for (int e = 0; e < n_entries; e++) {
            if ((int)(xorshift_u32(&s) % (uint32_t)(n_entries - e)) < left) { chosen[n * topk + j++] = e, left--; }
        }
        for (; j < topk; j++) { chosen[n * topk + j] = -1; }
    }
    return chosen;
}

static void check_lists(Test* t, const int* chosen, int N, int topk, int n_entries, int n_threads, int asked) {
    const size_t most = (size_t)N * topk, n = (size_t)n_entries + 1 + 2 * most;
    int *want = (int*)new_array(n, sizeof(int)), *got = (int*)new_array(n, sizeof(int));
    for (size_t i = 0; i < n; i++) { want[i] = got[i] = -77; }
    Device dev = test_device(n_threads);
    const size_t room = inverse_lists_scratch(n_entries, &dev);
    int *on_device = ints_to_device(chosen, most, &dev), *lists = ints_to_device(got, n, &dev);
    int* scratch = (int*)device_alloc(sizeof(int) * room, "scratch");
    int *positions = lists + n_entries + 1, *pairs = positions + most;
    inverse_lists(lists, asked & 1 ? positions : NULL, asked & 2 ? pairs : NULL, scratch, on_device, N, topk, n_entries,
                  &dev);
    inverse_lists_ref(want, asked & 1 ? want + n_entries + 1 : NULL, asked & 2 ? want + n_entries + 1 + most : NULL,
                      chosen, N, topk, n_entries);
    device_download(got, lists, sizeof(int) * n, &dev);
    check(t, memcmp(got, want, sizeof(int) * n) == 0, "N %d, topk %d, %d entries, %d threads, asked %d", N, topk,
          n_entries, n_threads, asked);
    device_drop(on_device), device_drop(lists);
    device_release(scratch, sizeof(int) * room);
    device_free(&dev);
    free(want), free(got);
}

static void test_lists(Test* t) {
    const int cases[][3] = {{1, 1, 1},   {1, 7, 3},    {7, 1, 33},   {33, 7, 5},    {40, 33, 33}, {64, 5, 64},
                            {513, 4, 31}, {700, 9, 65}, {0, 3, 4},   {1030, 3, 100}, {5, 3, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int N = cases[i][0], topk = cases[i][1], n_entries = cases[i][2];
        int* chosen = drawn_lists(N, topk, n_entries, i);
        for (int asked = 0; asked < 4; asked++) {
            for (int j = 0; j < N_TEST_THREADS; j++) {
                check_lists(t, chosen, N, topk, n_entries, test_threads(j), asked);
            }
        }
        free(chosen);
    }
}

static void test_obvious_lists(Test* t) {
    const int chosen[] = {0, 2, -1, -1, 2, 3}, offsets[] = {0, 1, 1, 3, 4}, positions[] = {0, 0, 2, 2},
              pairs[] = {0, 1, 4, 5};
    int got[4 + 1 + 12];
    Device dev = test_device(2);
    int *on_device = ints_to_device(chosen, 6, &dev);
    int* lists = (int*)device_alloc(sizeof got, "lists");
    int* scratch = (int*)device_alloc(sizeof(int) * inverse_lists_scratch(4, &dev), "scratch");
    inverse_lists(lists, lists + 5, lists + 11, scratch, on_device, 3, 2, 4, &dev);
    device_download(got, lists, sizeof got, &dev);
    check(t, memcmp(got, offsets, sizeof offsets) == 0, "offsets");
    check(t, memcmp(got + 5, positions, sizeof positions) == 0, "positions");
    check(t, memcmp(got + 11, pairs, sizeof pairs) == 0, "pairs");
    device_drop(on_device);
    device_release(lists, sizeof got), device_release(scratch, sizeof(int) * inverse_lists_scratch(4, &dev));
    device_free(&dev);
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"lists obvious", "three lists that can be turned round by hand", test_obvious_lists},
        {"lists random", "the plain loop's, for every number of threads; NULL for what nobody asks for", test_lists},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof *promises);
}
