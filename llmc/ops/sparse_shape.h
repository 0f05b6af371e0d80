/*
Which keys and entries a position sees, for sparse_attention.h and what it is made of.
    keys of the window   sparse_window_keys of them, neighbouring rows of kv from sparse_first_key on
    entries behind them  sparse_entries of them, entry i is row sparse_entry; sparse_list_length of those on a list
    rows of kv           in training sparse_rows of them, where sparse_own_key says which one is a position's own
In training places has `behind`, and a document's rows of kv follow each other as its positions do; there may be more
rows than positions, which other ranks have. In generation places point into caches.
*/
#ifndef LLMC_SPARSE_SHAPE_H
#define LLMC_SPARSE_SHAPE_H
#include "../core/device.h"  // in a CUDA build, what __host__ means
#include "../core/fmath.h"   // FM_FUNCTION: for the host and, in a CUDA build, for kernels
#include "entry_windows.h"   // Places, EntryWindows, ENTRIES_SEEN

typedef struct {
    int N, H, d;       // positions, heads of queries, channels of a head
    int window, topk;  // keys that a position sees at most; length of its list
    float scale;       // of the scores, above 0
    int n_rows;        // of kv, in training; 0: N, one for each position
} SparseShape;

FM_FUNCTION int sparse_rows(const SparseShape* s) { return s->n_rows > 0 ? s->n_rows : s->N; }
FM_FUNCTION int sparse_own_key(const Places* places, int n) { return places->first_key[n] + places->t[n]; }
// is no position of n's document before it in this pass?
FM_FUNCTION int sparse_is_first(const Places* places, int n) { return n == 0 || places->behind[n - 1] == n; }

// how many keys of the window position n sees, and which row is the first
FM_FUNCTION int sparse_window_keys(const SparseShape* s, const Places* places, int n) {
    return places->t[n] + 1 < s->window ? places->t[n] + 1 : s->window;
}
FM_FUNCTION int sparse_first_key(const SparseShape* s, const Places* places, int n) {
    return sparse_own_key(places, n) + 1 - sparse_window_keys(s, places, n);
}

// entries of a list (topk), behind the last of which stands -1
FM_FUNCTION int sparse_list_length(const int* list, int topk) {
    int low = 0, high = topk;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (list[middle] >= 0) { low = middle + 1; } else { high = middle; }
    }
    return low;
}

// how many entries
FM_FUNCTION int sparse_entries(const SparseShape* s, const Places* places, const EntryWindows* w, const int* chosen,
                               int n) {
    if (!w) { return 0; }
    return chosen ? sparse_list_length(chosen + (size_t)n * s->topk, s->topk) : ENTRIES_SEEN(places->t[n], w->r);
}

// the row of the i-th of them
FM_FUNCTION int sparse_entry(const SparseShape* s, const EntryWindows* w, const int* chosen, int n, int i) {
    return chosen ? chosen[(size_t)n * s->topk + i] : w->first_entry[n] + i;
}
#endif  // LLMC_SPARSE_SHAPE_H
