/*
The lightning indexer: which entries (entry_windows.h) a position's attention looks at. Heads of its own give each entry
that the position sees a score; attention gets the topk of the largest. And the loss that teaches it what attention
found worth looking at. t, r, first_entry: of entry_windows.h; a position sees entries 0 .. ENTRIES_SEEN(t, r) - 1 of
its document, which are the rows first_entry + 0, 1, ... of k.
    q (N, heads*dI)   k (rows of entries, dI)   a (N, heads) float, weights of heads, scaled already
    score(n, e) = sum over h of a_nh max(q_nh k_e, 0)
index_choose
    chosen (N, topk)  rows of the min(topk, seen) entries of largest score, ascending; -1 behind the last one. Of two
                      equal scores the lower entry; a NaN counts as -Inf. A position that sees no more than topk takes
                      them all, and no score is computed
    scores            NULL, or (N, n_columns) float: column i is entry i of the document; those of seen entries are
                      written, those of others stay
    n_columns         the most entries that a position may see, or more; without scores, too: it sizes the room
The loss of a position, over the entries it has chosen: KL(p || pi) of the teacher p = mass / (sum of mass), where it
looked, and the student pi = softmax of the scores.
    mass (N, topk) float   how much all attention heads together looked at each chosen entry
    losses (N) float       written; 0 where nothing is chosen, and where the mass is 0 everywhere
        p > 0: p (log p - ((score - max) - log total)), total the sum of exp(score - max)
Backward, everything written; dloss is of every position (weight / count):
    dscore = (pi - p) dloss, 0 where no p is above 0
    da     = sum over chosen entries of dscore max(q k, 0)       (N, heads) float
    d      = a dscore where q k > 0, else 0
    dq     = sum over chosen entries of d k                      (N, heads*dI)
    dk     = sum over heads and positions that chose it of d q   (n_entries, dI)
index_workspace_bytes   scratch of all of this in a training step, for the account of memory
Cost:   2 heads dI flops for a position and an entry: in index_choose one it sees, in the loss one it chose, forward
        once, backward three times. C, one thread, AVX2, AMD EPYC (Zen 4), CPU time, the smallest of 20 calls on a busy
        machine, where gemm.h had 78 GFLOP/s (512, 960, 512):
            N, heads, dI, topk; r 4          index_choose         forward              backward
            4096,  8,  64, 128             36 ms, 58 GFLOP/s    14 ms, 37 GFLOP/s    53 ms, 29 GFLOP/s
            2048, 64, 128, 256             97 ms, 66            135 ms, 48           614 ms, 31
        Room: scores of 32 positions for each thread, of 2^24 / n_columns positions on a GPU; backward 3 N topk words
        and as many bits as heads for each of the N topk. Kernels of the loss run on the CUDA cores; none are measured.
Error:  a score is within (dI + heads) 2^-24 of the sum of |a q k|, a logarithm of pi within twice that. Scores that
        are closer may be chosen in another order by fast kernels, which sum along trees. bf16 rounds what is stored.
Order:  q k is a chain over channels; a score one over heads; everything else over chosen entries, ascending; dk one
        chain over heads and in each over positions. All from 0, products by madd. Fast kernels sum masses, exp and
        losses along trees of 32 lanes, and scores of index_choose on tensor cores (flash_index.h).
Source: DeepSeek-AI 2025, arXiv:2512.02556, eq. 1 to 4; doc/deepseek_v4.md "Entries"
*/
#ifndef LLMC_INDEXER_H
#define LLMC_INDEXER_H
#include "../core/device.h"  // Device, device_workspace, ceil_div
#include "../core/fmath.h"   // fm_exp, fm_log, FM_FUNCTION
#include "../core/madd.h"    // madd
#include "entry_windows.h"   // Places, EntryWindows, ENTRIES_SEEN
#include "inverse_lists.h"   // inverse_lists
#include "gemm.h"            // gemm_tile_, gemm_pack_a_tile_, gemm_pack_b_panel_, TILE_M, TILE_N

// how the indexers of a model learn: not at all; by what attention thinks of what they choose; by what it thinks of
// all, which all are chosen meanwhile
#define INDEXER_NAMES "off|kl|dense"
typedef enum { INDEXER_OFF, INDEXER_KL, INDEXER_DENSE } IndexerTraining;

typedef struct {
    int N, heads, dI, topk;  // positions; heads and their channels; most entries of a position
} IndexShape;

static inline void index_check_(const IndexShape* s) {
    if (s->heads < 1 || s->dI < 1 || s->topk < 1) {
        fail_run("indexer: %d heads of %d channels, %d entries: expected 1 or more", s->heads, s->dI, s->topk);
    }
}

// ---- one number ----

// max(x, 0); NaN stays, and so does -0
FM_FUNCTION float index_relu_one(float x) { return x < 0.0f ? 0.0f : x; }

// what scores are compared by: no NaN, no -0
FM_FUNCTION float index_rank_one(float score) { return score == score ? score + 0.0f : -INFINITY; }

FM_FUNCTION float index_teacher_one(float mass, float total) { return total == 0.0f ? 0.0f : mass / total; }

// what p is multiplied by in the loss; distance = score - max
FM_FUNCTION float index_apart_one(float p, float distance, float log_total) {
    return p > 0.0f ? fm_log(p) - (distance - log_total) : 0.0f;
}

FM_FUNCTION float index_dscore_one(float p, float distance, float total, float dloss, int taught) {
    return taught ? (fm_exp(distance) / total - p) * dloss : 0.0f;
}

FM_FUNCTION float index_slope_one(float product, float a, float dscore) { return product > 0.0f ? a * dscore : 0.0f; }

// ---- plain C: read this first; it defines every bit ----

static inline float index_product_ref(const float* q, const float* k, int dI) {
    float product = 0.0f;
    for (int c = 0; c < dI; c++) { product = madd(q[c], k[c], product); }
    return product;
}

static inline float index_score_ref(const float* q, const float* k, const float* a, const IndexShape* s) {
    float score = 0.0f;
    for (int h = 0; h < s->heads; h++) {
        score = madd(a[h], index_relu_one(index_product_ref(q + (size_t)h * s->dI, k, s->dI)), score);
    }
    return score;
}

// row: room for the scores of a position
static inline void index_choose_ref(int* chosen, float* scores, int n_columns, const float* q, const float* k,
                                    const float* a, const IndexShape* s, const Places* places, const EntryWindows* w,
                                    float* row) {
    for (size_t n = 0; n < (size_t)s->N; n++) {
        const int seen = ENTRIES_SEEN(places->t[n], w->r), first = w->first_entry[n];
        int n_chosen = 0;
        for (int e = 0; e < seen; e++) {
            row[e] = index_score_ref(q + n * s->heads * s->dI, k + (size_t)(first + e) * s->dI, a + n * s->heads, s);
            if (scores) { scores[n * n_columns + e] = row[e]; }
        }
        for (int e = 0; e < seen; e++) {
            int before = 0;  // entries that are chosen rather than e
            for (int i = 0; i < seen; i++) {
                const float x = index_rank_one(row[i]), y = index_rank_one(row[e]);
                before += x > y || (x == y && i < e);
            }
            if (before < s->topk) { chosen[n * s->topk + n_chosen++] = first + e; }
        }
        for (int j = n_chosen; j < s->topk; j++) { chosen[n * s->topk + j] = -1; }
    }
}

static inline int index_count_ref(const int* chosen, int topk) {
    int n = 0;
    while (n < topk && chosen[n] >= 0) { n++; }
    return n;
}

// teacher and student of n chosen entries
typedef struct {
    float mass;            // sum of the teacher's
    float largest, total;  // of the scores, and the sum of exp(score - largest)
    int taught;            // is there a p above 0?
} IndexRow;

static inline IndexRow index_row_ref(const float* scores, const float* mass, int n) {
    IndexRow row = {0.0f, -INFINITY, 0.0f, 0};
    for (int j = 0; j < n; j++) { row.mass += mass[j]; }
    for (int j = 0; j < n; j++) { row.largest = scores[j] > row.largest ? scores[j] : row.largest; }
    for (int j = 0; j < n; j++) { row.total += fm_exp(scores[j] - row.largest); }
    for (int j = 0; j < n; j++) { row.taught |= index_teacher_one(mass[j], row.mass) > 0.0f; }
    return row;
}

// scores: room for those of a position
static inline void index_loss_forward_ref(float* losses, const float* mass, const int* chosen, const float* q,
                                          const float* k, const float* a, const IndexShape* s, float* scores) {
    for (size_t n = 0; n < (size_t)s->N; n++, mass += s->topk, chosen += s->topk) {
        const int n_chosen = index_count_ref(chosen, s->topk);
        for (int j = 0; j < n_chosen; j++) {
            scores[j] = index_score_ref(q + n * s->heads * s->dI, k + (size_t)chosen[j] * s->dI, a + n * s->heads, s);
        }
        const IndexRow row = index_row_ref(scores, mass, n_chosen);
        losses[n] = 0.0f;
        for (int j = 0; j < n_chosen; j++) {
            const float p = index_teacher_one(mass[j], row.mass);
            losses[n] = madd(p, index_apart_one(p, scores[j] - row.largest, fm_log(row.total)), losses[n]);
        }
    }
}

// dscores (N, topk) of what is chosen
static inline void index_dscores_ref(float* dscores, float dloss, const float* mass, const int* chosen, const float* q,
                                     const float* k, const float* a, const IndexShape* s) {
    for (size_t n = 0; n < (size_t)s->N; n++, mass += s->topk, chosen += s->topk, dscores += s->topk) {
        const int n_chosen = index_count_ref(chosen, s->topk);
        for (int j = 0; j < n_chosen; j++) {
            dscores[j] = index_score_ref(q + n * s->heads * s->dI, k + (size_t)chosen[j] * s->dI, a + n * s->heads, s);
        }
        const IndexRow row = index_row_ref(dscores, mass, n_chosen);
        for (int j = 0; j < n_chosen; j++) {
            const float p = index_teacher_one(mass[j], row.mass);
            dscores[j] = index_dscore_one(p, dscores[j] - row.largest, row.total, dloss, row.taught);
        }
    }
}

// dscores: room (N, topk)
static inline void index_loss_backward_ref(float* dq, float* dk, float* da, float dloss, const float* mass,
                                           const int* chosen, const float* q, const float* k, const float* a,
                                           int n_entries, const IndexShape* s, float* dscores) {
    const size_t dI = (size_t)s->dI;
    index_dscores_ref(dscores, dloss, mass, chosen, q, k, a, s);
    for (size_t i = 0; i < n_entries * dI; i++) { dk[i] = 0.0f; }
    for (int h = 0; h < s->heads; h++) {
        for (size_t n = 0; n < (size_t)s->N; n++) {
            const size_t i = n * s->heads + h, row = n * s->topk;
            da[i] = 0.0f;
            for (size_t c = 0; c < dI; c++) { dq[i * dI + c] = 0.0f; }
            for (int j = 0; j < s->topk && chosen[row + j] >= 0; j++) {
                const size_t e = (size_t)chosen[row + j] * dI;
                const float product = index_product_ref(q + i * dI, k + e, s->dI);
                const float d = index_slope_one(product, a[i], dscores[row + j]);
                da[i] = madd(dscores[row + j], index_relu_one(product), da[i]);
                for (size_t c = 0; c < dI; c++) { dq[i * dI + c] = madd(d, k[e + c], dq[i * dI + c]); }
                for (size_t c = 0; c < dI; c++) { dk[e + c] = madd(d, q[i * dI + c], dk[e + c]); }
            }
        }
    }
}

#ifndef __CUDACC__  // ---- fast C ----

enum {
    INDEX_POSITIONS = 32,   // scored together, at most...
    INDEX_FLOATS = 1 << 16  // ...with as many numbers of q, about: they stay in the second cache
};

static inline int index_least_(int a, int b) { return a < b ? a : b; }
static inline size_t index_whole_(size_t n, size_t of) { return (n + of - 1) / of * of; }

static inline vfloat index_relu_(vfloat x) {
    const vfloat zero = {0};
    return (vfloat)((vint)x & ~(vint)(x < zero));
}

// every chosen entry is written: `first` + 0 .. n - 1
static inline void index_take_all_(int* chosen, int first, int n, int topk) {
    for (int j = 0; j < topk; j++) { chosen[j] = j < n ? first + j : -1; }
}

// ---- the topk of a row ----

// numbers in the order of what scores are compared by
static inline vint index_keys_(vfloat scores) {
    const vfloat zero = {0};
    const vint is_number = (vint)(scores == scores);
    const vint bits = ((vint)(scores + zero) & is_number) | ((vint)v_fill(-INFINITY) & ~is_number);
    return bits ^ (vint)((vuint)(bits >> 31) >> 1);
}

// how many of n_vectors * VLANES keys are `least` or more
static inline int index_count_(const vint* keys, int n_vectors, int least) {
    const vint zero = {0}, limit = zero + least;
    vint counts = zero;
    int count = 0;
    for (int i = 0; i < n_vectors; i++) { counts -= (vint)(keys[i] >= limit); }
    for (int lane = 0; lane < VLANES; lane++) { count += counts[lane]; }
    return count;
}

// the largest key that topk keys or more reach: its bits are found one by one, from the highest
static inline int index_limit_(const vint* keys, int n_vectors, int topk) {
    const uint32_t sign = 0x80000000u;  // turns the order of whole numbers into that of unsigned ones
    uint32_t limit = 0;
    for (uint32_t bit = sign; bit > 0; bit >>= 1) {
        const int count = index_count_(keys, n_vectors, (int)((limit | bit) ^ sign));
        if (count >= topk) { limit |= bit; }
        if (count == topk) { break; }  // what is above and what is not are known
    }
    return (int)(limit ^ sign);
}

// scores (whole vectors) become keys. seen > topk
static inline void index_choose_row_(int* chosen, float* scores, int first, int seen, int topk) {
    const int n_vectors = (int)ceil_div(seen, VLANES);
    vint* keys = (vint*)(void*)scores;
    for (int i = 0; i < n_vectors; i++) { keys[i] = index_keys_(v_load(scores + i * VLANES)); }
    for (int i = seen; i < n_vectors * VLANES; i++) { keys[i / VLANES][i % VLANES] = INT32_MIN; }
    const int limit = index_limit_(keys, n_vectors, topk);
    int equals = topk - index_count_(keys, n_vectors, limit + 1), n = 0;  // of the limit itself so many are taken
    for (int e = 0; n < topk; e++) {
        const int key = keys[e / VLANES][e % VLANES], equal = key == limit && equals > 0;
        chosen[n] = first + e;
        n += key > limit || equal;
        equals -= equal;
    }
}

// ---- scores of all that is seen: products of all heads of a few positions with the entries, tile by tile ----

// positions n .. n + P - 1, whose documents begin at the same entry
typedef struct {
    int n, P, first, most;  // most entries that one of them sees
} IndexBlock;

typedef struct {
    float *a_packed, *b_packed, *scores;
    size_t stride;          // of scores
} IndexRoom;

// scores of a tile's rows, each a head of a position, go on
static inline void index_add_heads_(IndexRoom room, const float* tile, const float* a, int row, int M, int heads,
                                    int column) {
    for (int m = 0; m < M; m++) {
        const int p = (row + m) / heads, h = (row + m) % heads;
        float* score = room.scores + (size_t)p * room.stride + column;
        const vfloat weight = v_fill(a[row + m]);
        for (int v = 0; v < TILE_N; v += VLANES) {
            const vfloat before = h > 0 ? v_load(score + v) : v_fill(0.0f);
            v_store(score + v, v_madd(weight, index_relu_(v_load(tile + m * TILE_N + v)), before));
        }
    }
}

static inline void index_score_block_(IndexRoom room, const float* q, const float* k, const float* a,
                                      const IndexBlock* block, const IndexShape* s) {
    static const float zeros[TILE_N] = {0};
    const int rows = block->P * s->heads, dI = s->dI;
    const size_t head = (size_t)block->n * s->heads;
    float tile[TILE_M * TILE_N];
    for (int m = 0; m < rows; m += TILE_M) {
        gemm_pack_a_tile_(room.a_packed + (size_t)m * dI, gemm_matrix(q + (head + m) * dI, dI), rows - m, dI);
    }
    for (int e = 0; e < block->most; e += TILE_N) {
        const Matrix entries = gemm_transposed(k + (size_t)(block->first + e) * dI, dI);
        gemm_pack_b_panel_(room.b_packed, entries, index_least_(TILE_N, block->most - e), dI);
        for (int m = 0; m < rows; m += TILE_M) {
            gemm_tile_(tile, TILE_N, zeros, 0, room.a_packed + (size_t)m * dI, room.b_packed, TILE_N, dI, NULL, 0);
            index_add_heads_(room, tile, a + head, m, index_least_(TILE_M, rows - m), s->heads, e);
        }
    }
}

// how many positions from n on may be a block: as many as need scores, and have the first entry in common
static inline IndexBlock index_block_(int n, int end, int all, const IndexShape* s, const Places* places,
                                      const EntryWindows* w) {
    IndexBlock block = {n, 0, w->first_entry[n], 0};
    for (; n < end && w->first_entry[n] == block.first; n++, block.P++) {
        const int seen = ENTRIES_SEEN(places->t[n], w->r);
        if (seen <= s->topk && (!all || seen == 0)) { break; }
        block.most = seen > block.most ? seen : block.most;
    }
    return block;
}

static inline void index_choose_block_(int* chosen, float* scores, int n_columns, IndexRoom room,
                                       const IndexBlock* block, const IndexShape* s, const Places* places,
                                       const EntryWindows* w) {
    for (int p = 0; p < block->P; p++) {
        const size_t n = (size_t)(block->n + p);
        const int seen = ENTRIES_SEEN(places->t[n], w->r);
        float* row = room.scores + (size_t)p * room.stride;
        if (scores) { memcpy(scores + n * n_columns, row, sizeof(float) * (size_t)seen); }
        if (seen > s->topk) { index_choose_row_(chosen + n * s->topk, row, block->first, seen, s->topk); }
        else { index_take_all_(chosen + n * s->topk, block->first, seen, s->topk); }
    }
}

static inline int index_choose_at_once_(const IndexShape* s) {
    return index_least_(INDEX_POSITIONS, 1 + INDEX_FLOATS / (s->heads * s->dI));
}

// scratch of a thread where a position sees `most` entries
static inline size_t index_choose_floats_(const IndexShape* s, int most) {
    const size_t at_once = (size_t)index_choose_at_once_(s), dI = index_whole_((size_t)s->dI, GEMM_LINE);
    const size_t queries = index_whole_(at_once * (size_t)s->heads, TILE_M) * dI, entries = TILE_N * dI;
    return index_whole_(queries + entries + at_once * index_whole_((size_t)most, TILE_N), GEMM_LINE);
}

static inline void index_choose(int* chosen, float* scores, int n_columns, const float* q, const float* k,
                                const float* a, const IndexShape* s, const Places* places, const EntryWindows* w,
                                const Device* dev) {
    index_check_(s);
    int most = 0;
    for (int n = 0; n < s->N; n++) {
        const int seen = ENTRIES_SEEN(places->t[n], w->r);
        most = seen > most ? seen : most;
    }
    if (most > n_columns) { fail_run("indexer: %d entries are seen: expected %d at most", most, n_columns); }
    const int at_once = index_choose_at_once_(s);
    const size_t stride = index_whole_((size_t)most, TILE_N), n_floats = index_choose_floats_(s, most);
    const size_t b_floats = TILE_N * index_whole_((size_t)s->dI, GEMM_LINE);
    float* rooms = device_workspace(dev, sizeof(float) * n_floats * (size_t)dev->n_threads);
    #pragma omp parallel for schedule(dynamic)
    for (int first = 0; first < s->N; first += at_once) {
        const int end = index_least_(first + at_once, s->N);
        float* mine = rooms + n_floats * (size_t)thread_number();
        const IndexRoom room = {mine + b_floats + at_once * stride, mine, mine + b_floats, stride};
        for (int n = first; n < end;) {
            const IndexBlock block = index_block_(n, end, scores != NULL, s, places, w);
            if (block.P > 0) {
                index_score_block_(room, q, k, a, &block, s);
                index_choose_block_(chosen, scores, n_columns, room, &block, s, places, w);
                n += block.P;
            } else {
                const int seen = ENTRIES_SEEN(places->t[n], w->r);
                index_take_all_(chosen + (size_t)n * s->topk, w->first_entry[n], seen, s->topk);
                n++;
            }
        }
    }
}

// ---- the loss: each position has entries of its own, so lanes hold heads, and rows of k are read where they lie ----

enum {
    INDEX_WHOLE = VLANES > 8 ? VLANES : 8,  // heads and entries of a list are filled up to a multiple of this
    INDEX_ROWS = 8,                         // entries or heads of a tile
    INDEX_PAIR = VLANES == 16 ? 2 : 1,      // vectors of its other side, at most
    INDEX_WORD = 32,                        // heads of a word of bits
    INDEX_SLOPES = 64                       // slopes that are found together
};

// of one position: n entries, filled up with the first one to n_rows
typedef struct {
    int n, n_rows, Hp;      // Hp: heads, filled up
    const float** rows;     // (n_rows) of k
    float *a, *q_turned;    // (Hp), (dI, Hp)
    float* products;        // (n_rows, Hp) q k, then slopes
    float *scores, *e, *p;  // (n_rows) score, then score - max, then dscore; exp(score - max); teacher
} IndexList;

static inline size_t index_list_floats_(const IndexShape* s) {
    const size_t Hp = index_whole_((size_t)s->heads, INDEX_WHOLE), n_rows = index_whole_((size_t)s->topk, INDEX_WHOLE);
    return index_whole_(Hp * (1 + (size_t)s->dI) + n_rows * (Hp + 5), GEMM_LINE);  // a pointer: two floats
}

static inline IndexList index_list_(float* room, const IndexShape* s) {
    const size_t Hp = index_whole_((size_t)s->heads, INDEX_WHOLE), n_rows = index_whole_((size_t)s->topk, INDEX_WHOLE);
    float *a = room, *q_turned = a + Hp, *products = q_turned + Hp * s->dI, *scores = products + n_rows * Hp;
    float* rows = scores + 3 * n_rows;
    IndexList l = {0, 0, (int)Hp, (const float**)(void*)rows, a, q_turned, products, scores, scores + n_rows,
                   scores + 2 * n_rows};
    return l;
}

// to (dI, Hp) from (heads, dI), zeros behind the last head
static inline void index_turn_(float* to, const float* q, int heads, int dI, int Hp) {
    const int whole = dI / VLANES * VLANES;
    vfloat rows[VLANES];
    for (int h = 0; h < Hp; h += VLANES) {
        for (int c = 0; c < whole; c += VLANES) {
            for (int i = 0; i < VLANES; i++) {
                rows[i] = h + i < heads ? v_load(q + (size_t)(h + i) * dI + c) : v_fill(0.0f);
            }
            v_transpose(rows);
            for (int i = 0; i < VLANES; i++) { v_store(to + (size_t)(c + i) * Hp + h, rows[i]); }
        }
        for (int c = whole; c < dI; c++) {
            for (int i = h; i < h + VLANES; i++) { to[(size_t)c * Hp + i] = i < heads ? q[(size_t)i * dI + c] : 0.0f; }
        }
    }
}

// INDEX_ROWS entries and V vectors of heads
static inline __attribute__((always_inline)) void index_products_tile_(float* products, const float* const* rows,
                                                                       const float* q_turned, int dI, int Hp, int V) {
    vfloat sum[INDEX_ROWS][INDEX_PAIR];
    for (int m = 0; m < INDEX_ROWS; m++) {
        for (int v = 0; v < V; v++) { sum[m][v] = v_fill(0.0f); }
    }
    #pragma GCC unroll 4
    for (int c = 0; c < dI; c++) {
        #pragma GCC unroll 8
        for (int m = 0; m < INDEX_ROWS; m++) {
            const vfloat k = v_fill(rows[m][c]);
            #pragma GCC unroll 2
            for (int v = 0; v < V; v++) {
                sum[m][v] = v_madd(v_load(q_turned + (size_t)c * Hp + v * VLANES), k, sum[m][v]);
            }
        }
    }
    for (int m = 0; m < INDEX_ROWS; m++) {
        for (int v = 0; v < V; v++) { v_store(products + (size_t)m * Hp + v * VLANES, sum[m][v]); }
    }
}

// scores of n_rows entries, each a chain over heads
static inline void index_list_scores_(const IndexList* l, int heads) {
    for (int j = 0; j < l->n_rows; j += VLANES) {
        vfloat score = v_fill(0.0f), columns[VLANES];
        for (int h = 0; h < heads; h += VLANES) {
            v_load_columns(columns, l->products + (size_t)j * l->Hp + h, (size_t)l->Hp);
            for (int i = 0; i < VLANES && h + i < heads; i++) {
                score = v_madd(v_fill(l->a[h + i]), index_relu_(columns[i]), score);
            }
        }
        v_store(l->scores + j, score);
    }
}

// products and scores of what position n has chosen
static inline void index_list_find_(IndexList* l, size_t n, const int* chosen, const float* q, const float* k,
                                    const float* a, const IndexShape* s) {
    l->n = index_count_ref(chosen, s->topk);
    l->n_rows = (int)index_whole_((size_t)l->n, INDEX_WHOLE);
    for (int j = 0; j < l->n_rows; j++) { l->rows[j] = k + (size_t)chosen[j < l->n ? j : 0] * s->dI; }
    for (int h = 0; h < l->Hp; h++) { l->a[h] = h < s->heads ? a[n * s->heads + h] : 0.0f; }
    index_turn_(l->q_turned, q + n * s->heads * s->dI, s->heads, s->dI, l->Hp);
    for (int j = 0; j < l->n_rows; j += INDEX_ROWS) {
        float* products = l->products + (size_t)j * l->Hp;
        int h = 0;
        for (; h + INDEX_PAIR * VLANES <= l->Hp; h += INDEX_PAIR * VLANES) {
            index_products_tile_(products + h, l->rows + j, l->q_turned + h, s->dI, l->Hp, INDEX_PAIR);
        }
        for (; h < l->Hp; h += VLANES) {
            index_products_tile_(products + h, l->rows + j, l->q_turned + h, s->dI, l->Hp, 1);
        }
    }
    index_list_scores_(l, s->heads);
}

// teacher and student
static inline IndexRow index_list_row_(const IndexList* l, const float* mass) {
    IndexRow row = {0.0f, -INFINITY, 0.0f, 0};
    for (int j = 0; j < l->n; j++) {
        row.mass += mass[j];
        row.largest = l->scores[j] > row.largest ? l->scores[j] : row.largest;
    }
    #pragma omp simd
    for (int j = 0; j < l->n; j++) {
        l->scores[j] = l->scores[j] - row.largest;
        l->e[j] = fm_exp(l->scores[j]);
        l->p[j] = index_teacher_one(mass[j], row.mass);
    }
    for (int j = 0; j < l->n; j++) {
        row.total += l->e[j];
        row.taught |= l->p[j] > 0.0f;
    }
    return row;
}

// The last position of a document teaches nothing: of what it does not know nobody asks (mass (N, topk))
static inline void index_forget_last(float* mass, const int* is_last, int N, int topk, const Device* dev) {
    (void)dev;
    for (int n = 0; n < N; n++) {
        if (is_last[n]) { memset(mass + (size_t)n * topk, 0, sizeof(float) * (size_t)topk); }
    }
}

static inline void index_loss_forward(float* losses, const float* mass, const int* chosen, const float* q,
                                      const float* k, const float* a, const IndexShape* s, const EntryWindows* w,
                                      const Device* dev) {
    const size_t n_floats = index_list_floats_(s);
    float* rooms = device_workspace(dev, sizeof(float) * n_floats * (size_t)dev->n_threads);
    (void)w;
    index_check_(s);
    #pragma omp parallel for schedule(dynamic, 8)
    for (int n = 0; n < s->N; n++) {
        const size_t first = (size_t)n * s->topk;
        IndexList l = index_list_(rooms + n_floats * (size_t)thread_number(), s);
        float loss = 0.0f;
        index_list_find_(&l, (size_t)n, chosen + first, q, k, a, s);
        const IndexRow row = index_list_row_(&l, mass + first);
        const float log_total = fm_log(row.total);
        #pragma omp simd
        for (int j = 0; j < l.n; j++) { l.e[j] = index_apart_one(l.p[j], l.scores[j], log_total); }
        for (int j = 0; j < l.n; j++) { loss = madd(l.p[j], l.e[j], loss); }
        losses[n] = loss;
    }
}

// ---- backward: da and dq position by position, which leave for dk what is open, and then dk entry by entry ----

// of every entry, one place for each position that chose it (inverse_lists.h)
typedef struct {
    int *offsets, *positions;
    int* place;       // (N, topk): where the entry's list has a pair...
    float* dscores;   // ...and there: its dscore,
    uint32_t* open;   // (places, words): which heads have q k > 0, as bits
    int words;
    float* a_turned;  // (heads, N)
} IndexLists;

// da of the heads of a word; products become slopes
static inline void index_list_slopes_(const IndexList* l, float* da, const IndexLists* lists, const int* place,
                                      int word, int heads) {
    enum { VECTORS = INDEX_WORD / VLANES };
    const int first = word * INDEX_WORD, n_vectors = index_least_(VECTORS, (l->Hp - first) / VLANES);
    const vfloat zero = {0};
    float sums[INDEX_WORD];
    vfloat sum[VECTORS];
    for (int v = 0; v < VECTORS; v++) { sum[v] = zero; }
    for (int j = 0; j < l->n; j++) {
        const vfloat dscore = v_fill(l->scores[j]);
        float* products = l->products + (size_t)j * l->Hp + first;
        uint32_t open = 0;
        for (int v = 0; v < n_vectors; v++) {
            const vfloat x = v_load(products + v * VLANES), a = v_load(l->a + first + v * VLANES);
            const vint is_open = (vint)(x > zero);
            sum[v] = v_madd(dscore, index_relu_(x), sum[v]);
            v_store(products + v * VLANES, (vfloat)((vint)(a * dscore) & is_open));
            open |= v_mask_bits(is_open) << (v * VLANES);
        }
        lists->open[(size_t)place[j] * lists->words + word] = open;
    }
    for (int v = 0; v < VECTORS; v++) { v_store(sums + v * VLANES, sum[v]); }
    memcpy(da + first, sums, sizeof(float) * (size_t)index_least_(INDEX_WORD, heads - first));
}

// dq of INDEX_ROWS heads, M of which exist, and V vectors of channels from c on; d (n, Hp): slopes of these heads
static inline __attribute__((always_inline)) void index_dq_tile_(float* dq, const IndexList* l, const float* d, int c,
                                                                 int M, int dI, int V) {
    vfloat sum[INDEX_ROWS][INDEX_PAIR];
    for (int m = 0; m < INDEX_ROWS; m++) {
        for (int v = 0; v < V; v++) { sum[m][v] = v_fill(0.0f); }
    }
    for (int j = 0; j < l->n; j++, d += l->Hp) {
        #pragma GCC unroll 8
        for (int m = 0; m < INDEX_ROWS; m++) {
            const vfloat slope = v_fill(d[m]);
            #pragma GCC unroll 2
            for (int v = 0; v < V; v++) { sum[m][v] = v_madd(slope, v_load(l->rows[j] + c + v * VLANES), sum[m][v]); }
        }
    }
    for (int m = 0; m < M; m++) {
        for (int v = 0; v < V; v++) { v_store(dq + (size_t)m * dI + c + v * VLANES, sum[m][v]); }
    }
}

static inline void index_list_dq_(float* dq, const IndexList* l, const IndexShape* s) {
    for (int h = 0; h < s->heads; h += INDEX_ROWS) {
        const int M = index_least_(INDEX_ROWS, s->heads - h), dI = s->dI;
        float* to = dq + (size_t)h * dI;
        int c = 0;
        for (; c + INDEX_PAIR * VLANES <= dI; c += INDEX_PAIR * VLANES) {
            index_dq_tile_(to, l, l->products + h, c, M, dI, INDEX_PAIR);
        }
        for (; c + VLANES <= dI; c += VLANES) { index_dq_tile_(to, l, l->products + h, c, M, dI, 1); }
        for (; c < dI; c++) {
            for (int m = 0; m < M; m++) {
                float sum = 0.0f;
                for (int j = 0; j < l->n; j++) {
                    sum = madd(l->products[(size_t)j * l->Hp + h + m], l->rows[j][c], sum);
                }
                to[(size_t)m * dI + c] = sum;
            }
        }
    }
}

// n terms of V vectors of channels from c on: d q, the q of term i is rows[i]
static inline __attribute__((always_inline)) void index_dk_channels_(float* dk, const float* const* rows,
                                                                     const float* d, int n, int c, int V) {
    vfloat sum[8];
    for (int v = 0; v < V; v++) { sum[v] = v_load(dk + c + v * VLANES); }
    for (int i = 0; i < n; i++) {
        const float* row = rows[i] + c;
        const vfloat slope = v_fill(d[i]);
        #pragma GCC unroll 8
        for (int v = 0; v < V; v++) { sum[v] = v_madd(slope, v_load(row + v * VLANES), sum[v]); }
    }
    for (int v = 0; v < V; v++) { v_store(dk + c + v * VLANES, sum[v]); }
}

// dk of an entry goes on with places first .. last - 1 of its list, for head h. q: of that head, from position n on
static inline void index_dk_terms_(float* dk, const float* q, const IndexLists* lists, int first, int last, int h,
                                   int n, const IndexShape* s) {
    const float* a = lists->a_turned + (size_t)h * s->N;
    float d[INDEX_SLOPES];
    const float* rows[INDEX_SLOPES];
    for (; first < last; first += INDEX_SLOPES) {
        const int n_terms = index_least_(INDEX_SLOPES, last - first), *positions = lists->positions + first;
        const uint32_t* open = lists->open + (size_t)first * lists->words + h / INDEX_WORD;
        for (int i = 0; i < n_terms; i++) {
            const float slope = a[positions[i]] * lists->dscores[first + i];
            d[i] = open[(size_t)i * lists->words] >> (h % INDEX_WORD) & 1 ? slope : 0.0f;
            rows[i] = q + (size_t)(positions[i] - n) * s->dI;
        }
        int c = 0;
        for (; c + 8 * VLANES <= s->dI; c += 8 * VLANES) { index_dk_channels_(dk, rows, d, n_terms, c, 8); }
        for (; c + 4 * VLANES <= s->dI; c += 4 * VLANES) { index_dk_channels_(dk, rows, d, n_terms, c, 4); }
        for (; c + VLANES <= s->dI; c += VLANES) { index_dk_channels_(dk, rows, d, n_terms, c, 1); }
        for (; c < s->dI; c++) {
            for (int i = 0; i < n_terms; i++) { dk[c] = madd(d[i], rows[i][c], dk[c]); }
        }
    }
}

// positions whose q of a head stays in the cache
static inline int index_stretch_(const IndexShape* s) { return 1 + INDEX_FLOATS / 2 / s->dI; }

// by the threads of the enclosing parallel region, which meet for each head and stretch of positions: there they bring
// q together, into `room`, and it serves all entries. at (n_entries): how far the list of an entry has been summed
static inline void index_dk_(float* dk, float* room, int* at, const float* q, const IndexLists* lists, int n_entries,
                             const IndexShape* s) {
    const int stretch = index_stretch_(s);
    const size_t dI = (size_t)s->dI;
    #pragma omp for
    for (int e = 0; e < n_entries; e++) { memset(dk + e * dI, 0, sizeof(float) * dI); }
    for (int h = 0; h < s->heads; h++) {
        for (int n = 0; n < s->N; n += stretch) {
            const int n_end = index_least_(n + stretch, s->N);
            #pragma omp for
            for (int i = n; i < n_end; i++) {
                memcpy(room + (size_t)(i - n) * dI, q + ((size_t)i * s->heads + h) * dI, sizeof(float) * dI);
            }
            #pragma omp for schedule(static, 8)
            for (int e = 0; e < n_entries; e++) {
                const int begin = n > 0 ? at[e] : lists->offsets[e];
                int end = begin;
                while (end < lists->offsets[e + 1] && lists->positions[end] < n_end) { end++; }
                index_dk_terms_(dk + e * dI, room, lists, begin, end, h, n, s);
                at[e] = end;
            }
        }
    }
}

// da, dq and what dk needs
static inline void index_backward_positions_(float* dq, float* da, float dloss, const float* mass, const int* chosen,
                                             const float* q, const float* k, const float* a, const IndexLists* lists,
                                             float* rooms, const IndexShape* s) {
    const size_t n_floats = index_list_floats_(s), width = (size_t)s->heads * s->dI;
    #pragma omp parallel for schedule(dynamic, 8)
    for (int n = 0; n < s->N; n++) {
        const size_t first = (size_t)n * s->topk, head = (size_t)n * s->heads;
        IndexList l = index_list_(rooms + n_floats * (size_t)thread_number(), s);
        index_list_find_(&l, (size_t)n, chosen + first, q, k, a, s);
        const IndexRow row = index_list_row_(&l, mass + first);
        #pragma omp simd
        for (int j = 0; j < l.n; j++) { l.scores[j] = row.taught ? (l.e[j] / row.total - l.p[j]) * dloss : 0.0f; }
        for (int j = 0; j < l.n; j++) { lists->dscores[lists->place[first + j]] = l.scores[j]; }
        for (int word = 0; word < lists->words; word++) {
            index_list_slopes_(&l, da + head, lists, lists->place + first, word, s->heads);
        }
        index_list_dq_(dq + n * width, &l, s);
        for (int h = 0; h < s->heads; h++) { lists->a_turned[(size_t)h * s->N + n] = a[head + h]; }
    }
}

// scratch of backward, in words of 4 bytes
typedef struct {
    size_t stretch, rooms, turned, offsets, pairs, words, scratch, all;
} IndexScratch_;

static inline IndexScratch_ index_scratch_(const IndexShape* s, int n_entries, const Device* dev) {
    IndexScratch_ n;
    n.stretch = index_whole_((size_t)index_stretch_(s) * s->dI, GEMM_LINE);
    n.rooms = index_list_floats_(s) * (size_t)dev->n_threads + n.stretch;
    n.turned = index_whole_((size_t)s->N * s->heads, GEMM_LINE);
    n.offsets = index_whole_((size_t)n_entries + 1, GEMM_LINE);
    n.pairs = index_whole_((size_t)s->N * s->topk, GEMM_LINE);
    n.words = (size_t)ceil_div(s->heads, INDEX_WORD);
    n.scratch = index_whole_(inverse_lists_scratch(n_entries, dev), GEMM_LINE);  // n_entries or more
    n.all = n.rooms + n.turned + n.offsets + n.pairs * (3 + n.words) + n.scratch;
    return n;
}

// most: entries that a position sees; learns: forward and backward of the loss, too
static inline double index_workspace_bytes(const IndexShape* s, int n_entries, int most, int learns,
                                           const Device* dev) {
    const size_t choose = index_choose_floats_(s, most) * (size_t)dev->n_threads;
    const size_t loss = learns ? index_scratch_(s, n_entries, dev).all : 0;
    return sizeof(float) * (double)(choose > loss ? choose : loss);
}

static inline void index_loss_backward(float* dq, float* dk, float* da, float dloss, const float* mass,
                                       const int* chosen, const float* q, const float* k, const float* a,
                                       int n_entries, const IndexShape* s, const Places* places, const EntryWindows* w,
                                       const Device* dev) {
    (void)places, (void)w;
    index_check_(s);
    const IndexScratch_ n = index_scratch_(s, n_entries, dev);
    float *rooms = device_workspace(dev, sizeof(float) * n.all), *a_turned = rooms + n.rooms;
    int *offsets = (int*)(void*)(a_turned + n.turned), *positions = offsets + n.offsets;
    int *place = positions + n.pairs, *order = place + n.pairs, *open = order + n.pairs;
    int* scratch = open + n.pairs * n.words;
    IndexLists lists = {offsets, positions, place, (float*)(void*)order, (uint32_t*)open, (int)n.words, a_turned};
    inverse_lists(offsets, positions, order, scratch, chosen, s->N, s->topk, n_entries, dev);
    #pragma omp parallel for
    for (int i = 0; i < offsets[n_entries]; i++) { place[order[i]] = i; }  // dscores take order's place
    index_backward_positions_(dq, da, dloss, mass, chosen, q, k, a, &lists, rooms, s);
    #pragma omp parallel
    index_dk_(dk, rooms + n.rooms - n.stretch, scratch, q, &lists, n_entries, s);
}
#endif  // __CUDACC__
#include "indexer_kernels.h"  // the same names in CUDA
#endif  // LLMC_INDEXER_H
