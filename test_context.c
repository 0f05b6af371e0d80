/*
Promises of llmc/models/segment_attention.h with --cp: whichever way queries meet the keys of other ranks, each rank has
for its own positions, two chunks of a row or one, what one rank alone computes. And of llmc/ranks/halo.h: rows of the
ranks before, and what is asked of them. Ranks are forked processes (llmc/test/ranks.h).
*/
#include "llmc/core/choice.h"  // choice_name
#include "llmc/models/segment_attention.h"
#include "llmc/ranks/halo.h"
#include "llmc/test/ranks.h"

// what is compared, in the order of their arrays
enum { OUT, DQ, DK, DV, N_MADE };
static const char* const MADE[N_MADE] = {"out", "dq", "dk", "dv"};

typedef struct {
    int n_ranks, B, T, NH, NKV, HS, window;
    int document;  // tokens from one document to the next; 0: rows are whole
} Case;

static const Case cases[] = {
    {2, 1, 8, 2, 2, 4, 0, 0},    {2, 3, 16, 4, 4, 6, 0, 0},   {2, 2, 64, 4, 2, 8, 0, 0},    {2, 2, 24, 4, 1, 5, 0, 0},
    {4, 2, 32, 4, 4, 6, 0, 0},   {4, 1, 64, 8, 2, 16, 0, 0},  {4, 2, 48, 8, 4, 4, 0, 0},    {2, 2, 48, 4, 2, 8, 5, 0},
    {4, 2, 64, 8, 2, 6, 20, 0},  {2, 3, 40, 4, 2, 8, 0, 7},   {4, 2, 64, 4, 4, 6, 0, 13},   {4, 2, 64, 4, 2, 6, 6, 19},
    {2, 1, 400, 2, 1, 24, 0, 0}, {4, 1, 512, 4, 2, 64, 0, 0}, {4, 1, 256, 4, 4, 16, 33, 0}, {2, 2, 200, 4, 2, 8, 0, 90},
};

// rows of k and v are longer than their heads, as those of packed q, k and v
typedef struct {
    size_t q_row, kv_row;
    int N;  // positions
    float *q, *k, *v, *dout, *max, *inv, *made[N_MADE];
} Arrays;

static size_t made_row(const Arrays* a, const Case* c, int i) {
    return i == OUT ? (size_t)(c->NH * c->HS) : i == DQ ? a->q_row : a->kv_row;
}

static Arrays arrays_of(const Case* c, int N) {
    Arrays a;
    a.N = N;
    a.q_row = (size_t)(c->NH * c->HS) + 3, a.kv_row = (size_t)(c->NKV * c->HS) + 2;
    const size_t n = (size_t)N;
    a.q = random_array(n * a.q_row, 2.0f, 1), a.k = random_array(n * a.kv_row, 2.0f, 2);
    a.v = random_array(n * a.kv_row, 1.0f, 3), a.dout = random_array(n * (size_t)(c->NH * c->HS), 1.0f, 4);
    a.max = filled_array(n * (size_t)c->NH, NAN), a.inv = filled_array(n * (size_t)c->NH, NAN);
    for (int i = 0; i < N_MADE; i++) { a.made[i] = filled_array(n * made_row(&a, c, i), NAN); }
    return a;
}

static void arrays_free(Arrays* a) {
    free(a->q), free(a->k), free(a->v), free(a->dout), free(a->max), free(a->inv);
    for (int i = 0; i < N_MADE; i++) { free(a->made[i]); }
}

// forward and backward; room NULL: one rank
static void run_attention(Arrays* a, const Case* c, const RankGroup* cp, float* room, const Segments* segments,
                          const CpRows* rows, const Device* dev) {
    const SegmentAttention x = {c->NH, c->NKV, c->HS, c->window, a->q_row, a->kv_row, a->q, a->k, a->v, a->made[OUT],
                                a->max, a->inv, cp, room, NULL, NULL};
    segment_attention_forward(&x, segments, rows, dev);
    segment_attention_backward(a->made[DQ], a->made[DK], a->made[DV], a->dout, &x, segments, rows, dev);
}

// the rows of `from` that `at` lists
static void take_rows(float* to, const float* from, size_t row, const int* at, int n) {
    for (int i = 0; i < n; i++) { memcpy(to + (size_t)i * row, from + (size_t)at[i] * row, sizeof(float) * row); }
}

// largest difference, relative to the largest number
static double off(const float* got, const float* want, size_t n) {
    double most = 0.0, worst = 0.0;
    for (size_t i = 0; i < n; i++) {
        const double d = fabs((double)got[i] - (double)want[i]);
        most = fmax(most, fabs((double)want[i]));
        worst = d > worst || isnan(d) ? d : worst;
        if (isnan(d)) { return d; }
    }
    return worst / most;
}

// has this way the bits of one rank?
static int is_exact(const Case* c, int by, int i) {
    if (by == CP_BY_GATHER) { return i == OUT || i == DQ; }
    return by == CP_BY_HEADS && (i == OUT || i == DQ || c->NKV >= c->n_ranks);
}

// what lies between the rows of gradients is nobody's: NAN before and behind
static void compare(Test* t, const char* title, const Case* c, int by, const Arrays* got, const Arrays* alone,
                    const int* at) {
    for (int i = 0; i < N_MADE; i++) {
        const size_t row = made_row(got, c, i), width = i == OUT || i == DQ ? (size_t)(c->NH * c->HS)
                                                                             : (size_t)(c->NKV * c->HS);
        const size_t n = (size_t)got->N * width;
        float *mine = filled_array(n, 0.0f), *theirs = filled_array(n, 0.0f);
        for (int k = 0; k < got->N; k++) {
            memcpy(mine + (size_t)k * width, got->made[i] + (size_t)k * row, sizeof(float) * width);
            memcpy(theirs + (size_t)k * width, alone->made[i] + (size_t)at[k] * row, sizeof(float) * width);
            for (size_t j = width; j < row; j++) {
                check(t, isnan(got->made[i][(size_t)k * row + j]), "%s: %s writes behind its row", title, MADE[i]);
            }
        }
        if (is_exact(c, by, i)) { check_bits(t, MADE[i], mine, theirs, n); }
        const double worst = off(mine, theirs, n);
        check(t, worst <= 1e-5, "%s: %s is off by %.2g", title, MADE[i], worst);
        free(mine), free(theirs);
    }
}

static Segments segments_of(const Case* c) {
    Segments s;
    int* tokens = (int*)new_array((size_t)(c->B * c->T), sizeof(int));
    for (int i = 0; i < c->B * c->T; i++) { tokens[i] = c->document > 0 && i % c->document == 3; }
    segments_init(&s, c->B, c->T);
    s.document_start = c->document > 0 ? 1 : NO_RESET;
    segments_find(&s, tokens, c->B, c->T);
    free(tokens);
    return s;
}

// bytes that went, by the formula
static void check_sent(Test* t, const char* title, const Case* c, const RankGroup* cp, uint64_t before) {
    const double want = cp_attention_sends(cp, c->NH, c->NKV, c->HS, 0, c->B, c->T) +
                        cp_attention_sends(cp, c->NH, c->NKV, c->HS, 1, c->B, c->T);
    const double found = (double)(cp->group->link->bytes_sent - before);
    check(t, fabs(found / want - 1.0) < 0.01, "%s: %.0f bytes were sent, %.0f planned", title, found, want);
}

static void ranks_case(Test* t, Comm* comm, int number) {
    const Case* c = &cases[number / 8];
    const int by = number % 4, chunks = number & 4 ? 1 : CP_CHUNKS;  // of a row on each rank
    Device dev = test_device(1);
    RankGroup cp = rank_group_init(comm, c->n_ranks);
    cp.chunks = chunks, cp.by = by;
    const CpRows rows = cp_rows(c->B, c->T, &cp), whole = cp_rows_whole(c->B, c->T);
    const int N = c->B * c->T, n_own = cp_positions(&rows);
    int *all = (int*)new_array((size_t)N, sizeof(int)), *at = (int*)new_array((size_t)n_own, sizeof(int));
    for (int i = 0; i < N; i++) { all[i] = i; }
    cp_take(at, all, &rows);
    Segments segments = segments_of(c);
    Arrays alone = arrays_of(c, N), own = arrays_of(c, n_own), again = arrays_of(c, n_own);
    const size_t n_room = segment_room_elements(N, c->NH, c->NKV, c->HS, 1, &cp);
    float* room = filled_array(n_room + 1, NAN);
    char title[256];
    snprintf(title, sizeof title, "case %d by %s, chunks %d, rank %d", number / 8, choice_name(CP_BY_NAMES, by).s,
             chunks, comm->rank);
    run_attention(&alone, c, NULL, NULL, &segments, &whole, &dev);
    for (int k = 0; k < 2; k++) {
        Arrays* a = k == 0 ? &own : &again;
        take_rows(a->q, alone.q, a->q_row, at, n_own), take_rows(a->k, alone.k, a->kv_row, at, n_own);
        take_rows(a->v, alone.v, a->kv_row, at, n_own);
        take_rows(a->dout, alone.dout, (size_t)(c->NH * c->HS), at, n_own);
        const uint64_t before = cp.group->link->bytes_sent;
        run_attention(a, c, &cp, room, &segments, &rows, &dev);
        check_sent(t, title, c, &cp, before);
        check(t, isnan(room[n_room]), "%s: room is too small", title);
    }
    compare(t, title, c, by, &own, &alone, at);
    for (int i = 0; i < N_MADE; i++) {
        const size_t n_bytes = sizeof(float) * (size_t)n_own * made_row(&own, c, i);
        check(t, memcmp(own.made[i], again.made[i], n_bytes) == 0, "%s: %s of a second run differs", title, MADE[i]);
    }
    arrays_free(&alone), arrays_free(&own), arrays_free(&again);
    free(all), free(at), free(room), free(segments.at);
    rank_group_free(&cp);
    device_free(&dev);
}

static void all_cases(Test* t, int by) {
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        if (by == CP_BY_HEADS && cp_heads_obstacle(cases[i].NH, cases[i].NKV, cases[i].n_ranks)) { continue; }
        for (int chunks = CP_CHUNKS; chunks > 0; chunks--) {
            run_ranks(t, cases[i].n_ranks, ranks_case, i * 8 + (chunks == 1) * 4 + by);
        }
    }
}

// ---- halos: B rows, of each of which a rank has N positions, of C channels, and the `deep` before them ----

enum { HALO_B = 2, HALO_N = 3, HALO_C = 2, HALO_BEFORE = 8, HALO_ROW = HALO_BEFORE + HALO_N };

static float halo_number(int b, int p, int c) { return (float)(100 * b + 10 * p + c + 1); }

// each rank asks 1 of all that it has: a position is asked for by its own rank and by those that have it in a halo
static float halo_asked(const RankGroup* cp, int p, int deep) {
    int n = 1;
    for (int place = cp->place + 1; place < cp->size; place++) { n += p >= place * HALO_N - deep; }
    return (float)n;
}

static void halo_case(Test* t, Comm* comm, int deep) {
    RankGroup cp = rank_group_init(comm, comm->size);
    Device dev = test_device(1);
    const int first = cp.place * HALO_N;
    const size_t n_room = halo_room_elements(HALO_B, HALO_BEFORE, HALO_C);
    float *room = filled_array(n_room + 1, NAN), *x = filled_array(HALO_B * HALO_ROW * HALO_C, NAN);
    float own[HALO_B * HALO_N * HALO_C];
    const Halo h = {&cp, HALO_B, HALO_N, HALO_BEFORE, room};
    for (int i = 0; i < HALO_B * HALO_N * HALO_C; i++) {
        own[i] = halo_number(i / HALO_C / HALO_N, first + i / HALO_C % HALO_N, i % HALO_C);
    }
    const uint64_t sent = cp.group->link->bytes_sent;
    halo_spread(&h, x, own, deep, HALO_C, &dev);
    const double n_sent = (double)(cp.group->link->bytes_sent - sent) / sizeof(float) / HALO_C;
    const int as_planned = n_sent == halo_sends(HALO_B, HALO_N, deep, 1.0, &cp);
    check(t, cp.place > 0 || as_planned, "the first of %d ranks has sent %g rows, %d deep", cp.size, n_sent, deep);
    for (int i = 0; i < HALO_B * HALO_ROW * HALO_C; i++) {
        const int b = i / HALO_C / HALO_ROW, p = first - HALO_BEFORE + i / HALO_C % HALO_ROW, comes = p >= first - deep;
        const int is_one = p >= 0 && comes, good = is_one ? x[i] == halo_number(b, p, i % HALO_C) : isnan(x[i]);
        check(t, good, "%d ranks, %d deep: place %d has %g of row %d, position %d", cp.size, deep, cp.place,
              (double)x[i], b, p);
        x[i] = is_one ? 1.0f : NAN;
    }
    halo_collect(&h, own, x, deep, HALO_C, &dev);
    for (int i = 0; i < HALO_B * HALO_N * HALO_C; i++) {
        const int p = first + i / HALO_C % HALO_N;
        const int good = own[i] == halo_asked(&cp, p, deep);
        check(t, good, "%d ranks, %d deep: %g asked of position %d", cp.size, deep, (double)own[i], p);
    }
    check(t, isnan(room[n_room]), "room is too small");
    free(room), free(x);
    rank_group_free(&cp);
    device_free(&dev);
}

// chunks that are longer than a halo, and shorter: then it is that of several ranks
static void test_halo(Test* t) {
    for (int size = 2; size <= 4; size++) {
        for (int deep = 0; deep <= HALO_BEFORE; deep += 2) { run_ranks(t, size, halo_case, deep); }
    }
}

static void test_gather(Test* t) { all_cases(t, CP_BY_GATHER); }
static void test_ring(Test* t) { all_cases(t, CP_BY_RING); }
static void test_heads(Test* t) { all_cases(t, CP_BY_HEADS); }

static void test_obstacle(Test* t) {
    check(t, !cp_heads_obstacle(8, 2, 4) && !cp_heads_obstacle(8, 4, 2), "heads that can be shared");
    check(t, cp_heads_obstacle(6, 3, 4) != NULL, "6 heads of queries by 4 ranks");
    check(t, cp_heads_obstacle(6, 3, 2) != NULL, "3 heads of keys by 2 ranks");
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"gather", "out and dq have the bits of one rank, dk and dv are within 1e-5; bytes as planned", test_gather},
        {"ring", "all are within 1e-5 of one rank, and the same again; bytes as planned", test_ring},
        {"heads", "all have the bits of one rank, dk and dv where no head of keys is shared", test_heads},
        {"halo", "rows of the ranks before, however many these are, and sums of what is asked of them", test_halo},
        {"heads obstacle", "heads that ranks cannot share are found", test_obstacle},
    };
    unsetenv("COMM_CHECK");  // it sends besides
    setenv("OMP_NUM_THREADS", "1", 1);
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
