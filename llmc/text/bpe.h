/*
Byte-pair encoding: a word, given as its smallest tokens, becomes larger ones. Of all neighbours that have a merge, the
pair with the lowest rank is merged first, the leftmost of equals; until no neighbours have one.
    BpeTable   (left, right) -> (rank, merged id): a hash table of at most half its slots, read by any number of threads
    BpeWork    what one caller needs while it merges: the cache of words and the lists of long ones. One per thread
    bpe_merge  ids[0..n) in place, returns how many are left
Short words: the ranks of all neighbours stand in an array that is searched for the smallest each time, 16 at once.
Long words:  a heap of (rank, position) and a doubly linked list; an entry whose pair has changed since is passed over.
Cost:   n^2 / 16 for n <= BPE_SHORT, n log n beyond, 28 bytes per symbol: ten million times the same letter is no
        attack. More than is free is not taken: fail_run says how much a word needs.
Cache:  a word of at most 15 bytes and its at most 11 ids fill one cache line; the place is given by the word's hash,
        and the newer word wins. The answer never depends on it.
Source: Sennrich et al. 2016, arXiv:1508.07909; the order of merges is that of Hugging Face tokenizers.
*/
#ifndef LLMC_BPE_H
#define LLMC_BPE_H
#include "../core/memory.h"  // memory_need
#include <stdint.h>

enum { BPE_SHORT = 64, BPE_CACHED_BYTES = 15, BPE_CACHED_IDS = 11 };
#define BPE_NO_MERGE UINT64_MAX

typedef struct {
    uint64_t pair;    // left << 32 | right
    uint64_t merged;  // rank << 32 | id; BPE_NO_MERGE: an empty slot
} BpeSlot;

typedef struct {
    BpeSlot* slots;
    uint32_t n_merges;
    int shift;  // 64 - log2 of the number of slots
} BpeTable;

typedef struct {   // 64 bytes
    uint64_t word[2];  // its bytes, then zeros; the last byte is their number
    uint32_t n;
    int32_t ids[BPE_CACHED_IDS];
} BpeCacheLine;

typedef struct {
    BpeCacheLine* lines;
    int shift;
    uint64_t* heap;              // rank << 32 | position, the smallest on top
    uint32_t *next, *previous;   // (capacity) positions
    size_t capacity;
    int32_t* ids;                // (ids_capacity) of the word in work
    size_t ids_capacity;
} BpeWork;

// ---- the table ----

static inline uint64_t bpe_hash_(uint64_t key, int shift) {
    return (key ^ key >> 29) * 0x9e3779b97f4a7c15u >> shift;  // 2^64 / golden ratio
}

// slots for n items in a table that stays at most half full, as 64 - log2
static inline int bpe_table_shift_(size_t n) {
    int shift = 60;
    while ((size_t)1 << (64 - shift) < 2 * n) { shift--; }
    return shift;
}

static inline void bpe_table_init(BpeTable* t, size_t n_merges) {
    t->shift = bpe_table_shift_(n_merges);
    t->n_merges = 0;
    size_t n_bytes = ((size_t)1 << (64 - t->shift)) * sizeof(BpeSlot);
    t->slots = (BpeSlot*)memset(malloc_check(n_bytes, "merges"), 0xff, n_bytes);
}

static inline BpeSlot* bpe_slot_(const BpeTable* t, uint64_t pair) {
    uint64_t mask = ~(uint64_t)0 >> t->shift, i = bpe_hash_(pair, t->shift);
    while (t->slots[i].merged != BPE_NO_MERGE && t->slots[i].pair != pair) { i = (i + 1) & mask; }
    return &t->slots[i];
}

// the next merge of the list; 0 when the pair has one already
static inline int bpe_table_add(BpeTable* t, int left, int right, int id) {
    uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    BpeSlot* slot = bpe_slot_(t, pair);
    if (slot->merged != BPE_NO_MERGE) { return 0; }
    slot->pair = pair;
    slot->merged = (uint64_t)t->n_merges++ << 32 | (uint32_t)id;
    return 1;
}

// rank << 32 | id, or BPE_NO_MERGE
static inline uint64_t bpe_find_(const BpeTable* t, int32_t left, int32_t right) {
    return bpe_slot_(t, (uint64_t)(uint32_t)left << 32 | (uint32_t)right)->merged;
}

// ---- short words ----

// look the pair up that begins at i
static inline void bpe_set_pair_(const BpeTable* t, const int32_t* ids, const uint8_t* next, size_t n, size_t i,
                                 uint32_t* keys, int32_t* merged) {
    uint64_t found = next[i] < n ? bpe_find_(t, ids[i], ids[next[i]]) : BPE_NO_MERGE;
    keys[i] = found == BPE_NO_MERGE ? UINT32_MAX : (uint32_t)(found >> 32) * BPE_SHORT + (uint32_t)i;
    merged[i] = (int32_t)(uint32_t)found;
}

// Nothing is moved while merging: links lead from neighbour to neighbour. A key is rank * BPE_SHORT + position, so that
// the smallest key names the pair to merge.
static inline size_t bpe_merge_short_(const BpeTable* t, int32_t* ids, size_t n) {
    uint32_t keys[BPE_SHORT];      // of the pair that begins at i; UINT32_MAX: it has no merge, or i was swallowed
    int32_t merged[BPE_SHORT];     // what that pair becomes
    uint8_t next[BPE_SHORT + 1], previous[BPE_SHORT + 1];  // n: the end, which has a place as well
    size_t n_left = 0;
    for (size_t i = 0; i < n; i++) {
        next[i] = (uint8_t)(i + 1);
        previous[i + 1] = (uint8_t)i;
        bpe_set_pair_(t, ids, next, n, i, keys, merged);
    }
    for (;;) {
        uint32_t lowest = UINT32_MAX;
        for (size_t i = 0; i < n; i++) { lowest = keys[i] < lowest ? keys[i] : lowest; }
        if (lowest == UINT32_MAX) { break; }
        size_t at = lowest % BPE_SHORT, right = next[at];
        ids[at] = merged[at];
        ids[right] = -1;
        keys[right] = UINT32_MAX;
        next[at] = next[right];
        previous[next[at]] = (uint8_t)at;
        bpe_set_pair_(t, ids, next, n, at, keys, merged);
        if (at > 0) { bpe_set_pair_(t, ids, next, n, previous[at], keys, merged); }
    }
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= 0) { ids[n_left++] = ids[i]; }
    }
    return n_left;
}

// ---- long words ----

static inline void bpe_heap_down_(uint64_t* heap, size_t n, size_t at) {
    uint64_t moved = heap[at];
    for (size_t child; (child = 2 * at + 1) < n; at = child) {
        child += child + 1 < n && heap[child + 1] < heap[child];
        if (heap[child] >= moved) { break; }
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

static inline void bpe_heap_up_(uint64_t* heap, size_t at) {
    uint64_t moved = heap[at];
    for (; at > 0 && heap[(at - 1) / 2] > moved; at = (at - 1) / 2) { heap[at] = heap[(at - 1) / 2]; }
    heap[at] = moved;
}

static inline void bpe_reserve_(BpeWork* w, size_t n) {
    if (n <= w->capacity) { return; }
    free(w->heap);
    free(w->next);
    free(w->previous);
    w->capacity = n + n / 8;  // a word that is longer yet comes seldom
    memory_need(24 * w->capacity, "a word of many million characters without a cut");
    w->heap = (uint64_t*)malloc_check(2 * w->capacity * sizeof(uint64_t), "heap of merges");  // a merge takes 1, adds 2
    w->next = (uint32_t*)malloc_check(w->capacity * sizeof(uint32_t), "list of symbols");
    w->previous = (uint32_t*)malloc_check(w->capacity * sizeof(uint32_t), "list of symbols");
}

// put the pair that begins at `at` on the heap, if it has a merge
static inline size_t bpe_push_(const BpeTable* t, BpeWork* w, const int32_t* ids, size_t n_heap, uint32_t at) {
    uint64_t merged = bpe_find_(t, ids[at], ids[w->next[at]]);
    if (merged == BPE_NO_MERGE) { return n_heap; }
    w->heap[n_heap] = (merged & 0xffffffff00000000u) | at;
    return n_heap + 1;
}

static inline size_t bpe_merge_long_(const BpeTable* t, BpeWork* w, int32_t* ids, size_t n) {
    const uint32_t none = UINT32_MAX;
    size_t n_heap = 0, n_left = 0;
    bpe_reserve_(w, n);
    for (size_t i = 0; i < n; i++) {
        w->next[i] = i + 1 < n ? (uint32_t)i + 1 : none;
        w->previous[i] = i > 0 ? (uint32_t)i - 1 : none;
        if (i + 1 < n) { n_heap = bpe_push_(t, w, ids, n_heap, (uint32_t)i); }
    }
    for (size_t i = n_heap / 2; i-- > 0;) { bpe_heap_down_(w->heap, n_heap, i); }
    while (n_heap > 0) {
        uint64_t top = w->heap[0];
        w->heap[0] = w->heap[--n_heap];
        bpe_heap_down_(w->heap, n_heap, 0);
        uint32_t at = (uint32_t)top, right = w->next[at];
        if (ids[at] < 0 || right == none) { continue; }  // swallowed by its left neighbour, or the last now
        uint64_t merged = bpe_find_(t, ids[at], ids[right]);
        if (merged == BPE_NO_MERGE || merged >> 32 != top >> 32) { continue; }  // another pair stands there now
        ids[at] = (int32_t)(uint32_t)merged;
        ids[right] = -1;
        w->next[at] = w->next[right];
        size_t before = n_heap;
        if (w->next[at] != none) {
            w->previous[w->next[at]] = at;
            n_heap = bpe_push_(t, w, ids, n_heap, at);
            if (n_heap > before) { bpe_heap_up_(w->heap, n_heap - 1); }
        }
        before = n_heap;
        if (w->previous[at] != none) {
            n_heap = bpe_push_(t, w, ids, n_heap, w->previous[at]);
            if (n_heap > before) { bpe_heap_up_(w->heap, n_heap - 1); }
        }
    }
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= 0) { ids[n_left++] = ids[i]; }
    }
    return n_left;
}

static inline size_t bpe_merge(const BpeTable* t, BpeWork* w, int32_t* ids, size_t n) {
    int is_short = n <= BPE_SHORT && t->n_merges < UINT32_MAX / BPE_SHORT;  // all keys fit
    return is_short ? bpe_merge_short_(t, ids, n) : bpe_merge_long_(t, w, ids, n);
}

// ---- the workspace and its cache ----

// n_lines: about how many different words are worth keeping; a power of two of them is kept
static inline void bpe_work_init(BpeWork* w, size_t n_lines) {
    memset(w, 0, sizeof *w);
    w->shift = bpe_table_shift_(n_lines / 2);
    size_t n_bytes = ((size_t)1 << (64 - w->shift)) * sizeof(BpeCacheLine);
    w->lines = (BpeCacheLine*)aligned_alloc(64, n_bytes);
    if (!w->lines) { fail_run("cache of words: no memory for %zu bytes", n_bytes); }
    memset(w->lines, 0, n_bytes);  // no word has 0 bytes, so no line is found before it is written
}

static inline void bpe_work_free(BpeWork* w) {
    free(w->lines);
    free(w->heap);
    free(w->next);
    free(w->previous);
    free(w->ids);
    memset(w, 0, sizeof *w);
}

// Where a word of 1..15 bytes is, or will be, kept; key becomes its first 16 bytes. n_readable bytes may be read at
// `word`.
static inline BpeCacheLine* bpe_cache_line(const BpeWork* w, const unsigned char* word, size_t n, size_t n_readable,
                                           uint64_t key[2]) {
    if (n_readable >= 16) {  // two loads, then zeros over what follows the word
        memcpy(key, word, 16);
        uint64_t low = n >= 8 ? ~(uint64_t)0 : ((uint64_t)1 << 8 * n) - 1;
        uint64_t high = n <= 8 ? 0 : ((uint64_t)1 << 8 * (n - 8)) - 1;
        key[0] &= low;
        key[1] &= high;
    } else {
        key[0] = key[1] = 0;
        memcpy(key, word, n);
    }
    key[1] |= (uint64_t)n << 56;
    return &w->lines[bpe_hash_(key[0] ^ (key[1] * 0xff51afd7ed558ccdu), w->shift)];
}

static inline void bpe_reserve_ids(BpeWork* w, size_t n) {
    if (n <= w->ids_capacity) { return; }
    w->ids_capacity = n + n / 8;
    memory_need(w->ids_capacity * sizeof(int32_t), "a word of many million characters without a cut");
    w->ids = (int32_t*)realloc_check(w->ids, w->ids_capacity * sizeof(int32_t), "symbols");
}
#endif  // LLMC_BPE_H
