/*
An op as a table, from which its promises follow (op_promises.h). Dims are letters, an array is a row, and rows
have the numbers of an enum that is this table's alone:
    enum { INP, WEIGHT, OUT, RSTD, DOUT, DINP, DWEIGHT };
    static const Op rmsnorm = {
        .name = "rmsnorm", .dims = "NC",
        .arrays = {
            {INP, "inp", "NC", GIVEN, 2.0f, "dinp dweight"},  // random in -2 .. 2; needed for one of these gradients
            {WEIGHT, "weight", "C", GIVEN, 1.5f, "dinp"},
            {OUT, "out", "NC", MADE},
            {RSTD, "rstd", "N", MADE | FLOAT, 0.0f, "dinp dweight"},
            {DOUT, "dout", "NC", GIVEN, 1.0f, "dinp dweight"},
            {DINP, "dinp", "NC", GRADIENT | ADDED | ASKED, 1.0f},
            {DWEIGHT, "dweight", "C", GRADIENT | ASKED | FLOAT},
        },
        .shapes = shapes, .traits = ROWS,
        .forward_ref = forward_ref, .forward = OP_FAST(forward),
        .backward_ref = backward_ref, .backward = OP_FAST(backward),
        .in_double = in_double, .error = error, .judged = {{7, 33}, {7, 257}},
    };
dx is the gradient of x; where x is MADE and dx is GIVEN, the loss is the sum of x * dx.
What is special to an op stays a function beside its table: op_problem makes arrays to put certain numbers in,
op_solve or op_answer fills in what follows from them, op_check compares.
*/
#ifndef LLMC_OP_H
#define LLMC_OP_H
#include "test.h"  // Test, arrays, devices
#pragma GCC diagnostic ignored "-Wunused-parameter"  // the functions of a table need not use all that they are given

enum { OP_ARRAYS = 20, OP_DIMS = 10, OP_JUDGED = 16 };  // at most

enum {             // what an array is
    GIVEN = 1,     // forward and backward read it
    MADE = 2,      // forward writes it, backward reads it
    GRADIENT = 4,  // backward writes it
    ADDED = 8,     // it starts with numbers, and is added to
    PARTLY = 16,   // it starts with numbers, those of the first array that it may be, and those between its rows stay
    ASKED = 32,    // a gradient that is NULL where nobody asks for it
    FLOAT = 64,    // float, also where others are stored as bf16
    INDEX = 128,   // int
};

typedef struct {
    int number;           // of the row, from the enum
    const char* name;
    const char* extents;  // dims, multiplied
    int role;
    float scale;          // of the random numbers that it starts with
    const char* needed;   // of what backward reads: the ASKED gradients that need it; left out: it is always there
    const char* may_be;   // of what is written: arrays whose place it may take, where they are as long
    char below;           // of what is GIVEN | INDEX: the dim that its numbers are below, from 0
} OpArray;

enum {                   // what else is so of an op
    ROWS = 1,            // in arrays that begin with the first dim, its rows do not touch each other
    ANYWHERE = 2,        // arrays may begin at any element: between the packs of kernels, each elsewhere in one
    SPECIAL_KERNELS = 4  // `apart` holds for hard numbers, Inf and NaN too
};

// A plain loop finds its arrays in a, its dims as d['N']. A fast op finds those that are stored as X in x, FLOAT and
// INDEX ones in a; where X is float, and in C it is, both have all. Tests with kernels write it as
//     OP_STORED(X)
//     static void forward(X* const* x, float* const* a, const int* d, const Device* dev) { ... }
#if defined(__CUDACC__) && !defined(EXACT)
typedef __nv_bfloat16 OpBf16;
#define OP_FAST(function) {function<float>, function<OpBf16>}
#else
typedef float OpBf16;  // nothing is stored as bf16
#define OP_FAST(function) {function}
#endif
#ifdef __CUDACC__
#define OP_STORED(X) template <typename X>
#else
#define OP_STORED(X) typedef float X;
#endif
typedef void (*OpPlain)(float* const* a, const int* d);
typedef struct {
    void (*as_float)(float* const* x, float* const* a, const int* d, const Device* dev);
    void (*as_bf16)(OpBf16* const* x, float* const* a, const int* d, const Device* dev);
} OpFast;

typedef struct OpProblem OpProblem;

// what an op lacks is left out of its initialiser; C++ wants the others in this order
typedef struct {
    const char *name, *dims;
    OpArray arrays[OP_ARRAYS];
    const int (*shapes)[OP_DIMS];                              // rows of dims; behind the last comes {0}
    int traits;
    void (*fill)(float* const* a, const int* d);               // what GIVEN arrays must hold beside random numbers
    OpPlain forward_ref;
    OpPlain forward_bf16_ref;                                  // of two ops in one, where the first stores bf16
    OpFast forward;
    OpPlain backward_ref;
    OpFast backward;
    void (*in_double)(double* const* a, const int* d);         // writes what is MADE, or what of it `error` judges
    double (*error)(int array, const int* d);                  // of the plain loop, with its reason; < 0: not judged
    int judged[OP_JUDGED][OP_DIMS];                            // the shapes that are judged in double
    double (*apart)(const OpProblem* p, int array, size_t i);  // of fast kernels and plain loop; 0: bits must be equal
} Op;

enum { EASY, HARD, FEW_SPECIALS, MANY_SPECIALS };  // the kinds of numbers: hard_array, then with Inf and NaN

// arrays and the plain loops' answers
struct OpProblem {
    const Op* op;
    int n, d[128], as_bf16;                   // n arrays; dims, by their letters; is what is stored bf16?
    float *a[OP_ARRAYS], *before[OP_ARRAYS];  // before: what ADDED and PARTLY ones start with
    float* sizes[OP_ARRAYS];                  // for `apart`: the plain loops' answers to the absolute values
};

typedef struct {
    int backward, plain;
    int place, over;  // array `place` takes the place of array `over`; -1: each has its own
    int null;         // bit i: array i is NULL
    int shift;        // 1: arrays begin one element behind 16 bytes; 2 + i: array i three behind, the others at them
} OpRun;

static inline OpRun op_run_of_(int backward, int plain) {
    OpRun r = {backward, plain, -1, -1, 0, 0};
    return r;
}

// ---- tables ----

static inline int op_n_arrays_(const Op* op) {
    int n = 0;
    while (n < OP_ARRAYS && op->arrays[n].name) { n++; }
    return n;
}

// is `name` one of these words?
static inline int op_listed_(const char* words, const char* name) {
    size_t length = strlen(name);
    for (const char* w = words; w && (w = strstr(w, name)); w += length) {
        if ((w == words || w[-1] == ' ') && (w[length] == ' ' || !w[length])) { return 1; }
    }
    return 0;
}

// each word must be the name of an array that has one of those roles
static inline void op_check_words_(const Op* op, const char* row, const char* words, int role, const char* what) {
    int n = 0;  // words that name nothing
    for (const char* w = words; w && *w; w++) { n += *w != ' ' && (w == words || w[-1] == ' '); }
    for (int i = 0; i < OP_ARRAYS; i++) { n -= op->arrays[i].role & role && op_listed_(words, op->arrays[i].name); }
    if (n != 0) { fail_run("%s: the row of %s: \"%s\" must name %s of the table", op->name, row, words, what); }
}

// stops where a table contradicts itself: its promises would crash, or promise nothing
static inline void op_check_table_(const Op* op) {
    for (int i = 0; i < op_n_arrays_(op); i++) {
        const OpArray* r = &op->arrays[i];
        const char *row = r->name, *unknown = r->extents + strspn(r->extents, op->dims);
        int unwritten = (r->role & MADE && !op->forward_ref) || (r->role & GRADIENT && !op->backward_ref);
        int needs_below = r->role & INDEX && r->role & GIVEN, has_below = r->below && strchr(op->dims, r->below);
        if (r->number != i) { fail_run("%s: %s is row %d, but number %d of its enum", op->name, row, i, r->number); }
        if (unwritten) { fail_run("%s: no plain loop writes %s", op->name, row); }
        if (*unknown || needs_below != has_below) { fail_run("%s: %s needs dims of \"%s\"", op->name, row, op->dims); }
        op_check_words_(op, row, r->needed, ASKED, "ASKED gradients");
        op_check_words_(op, row, r->may_be, GIVEN | MADE | GRADIENT, "arrays");
    }
}

static inline int op_is_(const OpProblem* p, int i, int role) { return (p->op->arrays[i].role & role) != 0; }

static inline size_t op_length(const OpProblem* p, int i) {
    size_t n = 1;
    for (const char* c = p->op->arrays[i].extents; *c; c++) { n *= (size_t)p->d[(int)*c]; }
    return n;
}

static inline int op_may_be_(const OpProblem* p, int i, int j) {
    return op_listed_(p->op->arrays[i].may_be, p->op->arrays[j].name) && op_length(p, i) == op_length(p, j);
}

// does the run write it?
static inline int op_writes_(const OpProblem* p, int i, const OpRun* r) {
    return op_is_(p, i, r->backward ? GRADIENT : MADE);
}

// ---- one call ----

// to bf16 and back
static inline void op_store_bf16(float* x, size_t n) {
#ifdef __CUDACC__
    for (size_t i = 0; i < n; i++) { x[i] = (float)(__nv_bfloat16)x[i]; }
#endif
}

#ifdef __CUDACC__
template <typename X>
static inline X* op_up_(X*, const float* x, size_t n, const Device* dev) { return to_device_as<X>(x, n, dev); }
template <typename X>
static inline void op_down_(float* x, X* d, size_t n, const Device* dev) { from_device_as<X>(x, d, n, dev); }
#else
static inline float* op_up_(const float* type, const float* x, size_t n, const Device* dev) {
    (void)type;
    return to_device(x, n, dev);
}
static inline void op_down_(float* x, float* d, size_t n, const Device* dev) { from_device(x, d, n, dev); }
#endif

// a workspace of n elements as `type` has them, full of NaN: what an op reads of it before it writes there shows
OP_STORED(OpScratch)
static inline OpScratch* op_scratch(OpScratch* type, size_t n, const Device* dev) {
    float* nan = filled_array(n, NAN);
    OpScratch* scratch = op_up_(type, nan, n, dev);
    free(nan);
    return scratch;
}

// the fast op on copies of `got`; what it leaves comes back. Around shifted arrays lies 77, and there it must stay
OP_STORED(OpX)
static inline void op_on_device_(Test* t, float** got, const OpProblem* p, const OpRun* r,
                                 void (*call)(OpX* const*, float* const*, const int*, const Device*),
                                 const Device* dev) {
    OpX* x[OP_ARRAYS] = {NULL};
    float* a[OP_ARRAYS] = {NULL};
    size_t first[OP_ARRAYS], after = r->shift ? 3 : 0;
    for (int i = 0; i < p->n; i++) {
        size_t n = op_length(p, i);
        first[i] = r->shift == 1 ? 1 : r->shift == i + 2 ? 3 : 0;
        if (!got[i]) { continue; }
        float* wide = filled_array(first[i] + n + after, 77.0f);
        memcpy(wide + first[i], got[i], sizeof(float) * n);
        if (op_is_(p, i, FLOAT | INDEX)) {
            a[i] = to_device(wide, first[i] + n + after, dev) + first[i], x[i] = (OpX*)a[i];
        } else {
            x[i] = op_up_(x[i], wide, first[i] + n + after, dev) + first[i], a[i] = (float*)x[i];
        }
        free(wide);
    }
    if (r->place >= 0) { x[r->place] = x[r->over], a[r->place] = a[r->over]; }
    call(x, a, p->d, dev);
    for (int i = 0; i < p->n; i++) {
        size_t n = op_length(p, i), n_wide = first[i] + n + after;
        if (!got[i]) { continue; }
        float* wide = filled_array(n_wide, 0.0f);
        if (op_is_(p, i, FLOAT | INDEX)) {
            from_device(wide, a[i] - first[i], n_wide, dev);
        } else {
            op_down_(wide, x[i] - first[i], n_wide, dev);
        }
        memcpy(got[i], wide + first[i], sizeof(float) * n);
        for (size_t j = 0; j < first[i] + after; j++) {
            check(t, wide[j < first[i] ? j : n + j] == 77.0f, "written beside %s", p->op->arrays[i].name);
        }
        free(wide);
    }
}

// what each array holds afterwards; NULL: it had no place of its own, or forward does not know it
static inline void op_run_(Test* t, float** got, const OpProblem* p, const OpRun* r, const Device* dev) {
    const OpFast* fast = r->backward ? &p->op->backward : &p->op->forward;
    for (int i = 0; i < p->n; i++) {
        size_t n = op_length(p, i);
        int none = r->null >> i & 1 || i == r->place || (!r->backward && op_is_(p, i, GRADIENT));
        const float* start = op_writes_(p, i, r) ? p->before[i] : p->a[i];
        got[i] = none ? NULL : start ? copied_array(start, n) : filled_array(n, r->plain ? 77.0f : NAN);
    }
    if (r->plain) {
        OpPlain forward_ref = p->as_bf16 && p->op->forward_bf16_ref ? p->op->forward_bf16_ref : p->op->forward_ref;
        (r->backward ? p->op->backward_ref : forward_ref)(got, p->d);
        return;
    }
    if (p->as_bf16) {
        op_on_device_(t, got, p, r, fast->as_bf16, dev);
    } else {
        op_on_device_(t, got, p, r, fast->as_float, dev);
    }
    if (r->place >= 0) { got[r->place] = got[r->over], got[r->over] = NULL; }
}

static inline void op_free_(float** got) {
    for (int i = 0; i < OP_ARRAYS; i++) { free(got[i]); }
}

// ---- problems ----

// answers of the plain loops or of the fast ops take their places in p->a; the rest must be as it was
static inline void op_take_answers_(Test* t, OpProblem* p, int plain, const Device* dev) {
    for (int backward = 0; backward < 2; backward++) {
        OpRun r = op_run_of_(backward, plain);
        float* got[OP_ARRAYS] = {NULL};
        if (!(backward ? p->op->backward_ref : p->op->forward_ref)) { continue; }
        op_run_(t, got, p, &r, dev);
        for (int i = 0; i < p->n; i++) {
            if (!got[i]) { continue; }
            if (op_writes_(p, i, &r)) {
                free(p->a[i]), p->a[i] = got[i];
                if (p->as_bf16 && !op_is_(p, i, FLOAT | INDEX | GRADIENT)) { op_store_bf16(got[i], op_length(p, i)); }
                continue;
            }
            if (memcmp(got[i], p->a[i], sizeof(float) * op_length(p, i)) != 0) {
                fail_run("%s writes %s, which is only given", p->op->name, p->op->arrays[i].name);
            }
            free(got[i]);
        }
    }
}

static inline void op_answer(Test* t, OpProblem* p, const Device* dev) { op_take_answers_(t, p, 0, dev); }

static inline void op_take_sizes_(OpProblem* p) {
    OpProblem absolute = *p;
    for (int i = 0; i < p->n; i++) {
        const float* x = op_is_(p, i, GIVEN) ? p->a[i] : p->before[i];
        float* sizes = x ? copied_array(x, op_length(p, i)) : NULL;
        for (size_t j = 0; x && !op_is_(p, i, INDEX) && j < op_length(p, i); j++) { sizes[j] = fabsf(sizes[j]); }
        absolute.a[i] = op_is_(p, i, GIVEN) ? sizes : NULL;
        absolute.before[i] = op_is_(p, i, GIVEN) ? NULL : sizes;
    }
    op_take_answers_(NULL, &absolute, 1, NULL);
    for (int i = 0; i < p->n; i++) {
        free(p->sizes[i]), free(absolute.before[i]);
        p->sizes[i] = absolute.a[i];
    }
}

// the plain loops' answers to what p->a and p->before hold now
static inline void op_solve(OpProblem* p) {
    if (FAST_KERNELS && p->op->apart) { op_take_sizes_(p); }
    op_take_answers_(NULL, p, 1, NULL);
}

static inline float* op_numbers_(const OpProblem* p, int i, int kind) {
    size_t n = op_length(p, i);
    uint64_t seed = (uint64_t)i + 1, s = seeded_stream(seed);
    float* x = kind ? hard_array(n, seed) : random_array(n, p->op->arrays[i].scale, seed);
    for (size_t j = 0; op_is_(p, i, INDEX) && j < n; j++) {
        ((int*)x)[j] = (int)(xorshift_u32(&s) % (uint32_t)p->d[(int)p->op->arrays[i].below]);
    }
    if (kind >= FEW_SPECIALS && op_is_(p, i, GIVEN) && !op_is_(p, i, INDEX)) {
        sprinkle(x, n, kind == FEW_SPECIALS ? (uint32_t)(n / 3 + 20) : 20, seed + 100);
    }
    return x;
}

// all arrays, of as many numbers as they must have
static inline OpProblem op_problem(const Op* op, const int* shape, int kind, int as_bf16) {
    OpProblem p;
    memset(&p, 0, sizeof p);
    p.op = op, p.n = op_n_arrays_(op), p.as_bf16 = as_bf16;
    for (int i = 0; op->dims[i]; i++) { p.d[(int)op->dims[i]] = shape[i]; }
    for (int i = 0; i < p.n; i++) {
        if (op_is_(&p, i, GIVEN)) { p.a[i] = op_numbers_(&p, i, kind); }
        if (op_is_(&p, i, ADDED | PARTLY)) { p.before[i] = op_numbers_(&p, i, kind); }
    }
    if (op->fill) { op->fill(p.a, p.d); }
    for (int i = 0; i < p.n; i++) {
        float* x = p.a[i] ? p.a[i] : p.before[i];
        for (int j = p.n - 1; j >= 0 && op_is_(&p, i, PARTLY); j--) {
            if (op_may_be_(&p, i, j)) { memcpy(x, p.a[j], sizeof(float) * op_length(&p, i)); }
        }
        if (as_bf16 && x && !op_is_(&p, i, FLOAT | INDEX)) { op_store_bf16(x, op_length(&p, i)); }
    }
    op_solve(&p);
    return p;
}

static inline void op_problem_free(OpProblem* p) { op_free_(p->a), op_free_(p->before), op_free_(p->sizes); }

// ---- comparisons ----

// "layernorm dinp, N 7, C 33, 3 threads, NULL 0, shift 0, dinp in the place of inp"
static inline const char* op_title_(char title[256], const OpProblem* p, int i, const OpRun* r, const Device* dev) {
    size_t n = (size_t)snprintf(title, 256, "%s %s", p->op->name, p->op->arrays[i].name);
    for (const char* c = p->op->dims; *c; c++) {
        n += (size_t)snprintf(title + n, 256 - n, ", %c %d", *c, p->d[(int)*c]);
    }
    n += (size_t)snprintf(title + n, 256 - n, ", %d threads, NULL %x, shift %d", dev->n_threads, (unsigned)r->null,
                          r->shift);
    if (r->place >= 0) {
        snprintf(title + n, 256 - n, ", %s in the place of %s", p->op->arrays[r->place].name,
                 p->op->arrays[r->over].name);
    }
    return title;
}

// bits; of a fast kernel what `apart` and the rounding of what is stored allow, Inf and NaN where they belong
static inline void op_check_array_(Test* t, const char* what, const OpProblem* p, int i, const float* got) {
    const float* want = p->a[i];
    double rounding = p->as_bf16 && !op_is_(p, i, FLOAT) ? 0x1p-8 : 0.0;
    if (!op_is_(p, i, GRADIENT)) { rounding *= 2.0; }  // the answer is rounded, too (op_take_answers_)
    if (op_is_(p, i, INDEX)) {
        check(t, memcmp(got, want, sizeof(int) * op_length(p, i)) == 0, "%s: other numbers", what);
        return;
    }
    if (!FAST_KERNELS) {
        check_bits(t, what, got, want, op_length(p, i));
        return;
    }
    for (size_t j = 0; j < op_length(p, i); j++) {
        double apart = p->op->apart ? p->op->apart(p, i, j) : 0.0, allowed = apart + rounding * fabs((double)want[j]);
        float stored = want[j];
        if (rounding > 0.0) { op_store_bf16(&stored, 1); }
        int same = apart > 0.0 && isfinite(want[j]) ? fabs((double)got[j] - (double)want[j]) <= allowed
                                                    : float_bits(got[j]) == float_bits(stored);
        check(t, same || (isnan(got[j]) && isnan(want[j])), "%s: [%zu] found %.9g, expected %.9g, allowed %.3g", what,
              j, (double)got[j], (double)want[j], allowed);
    }
}

static inline void op_check_run_(Test* t, const OpProblem* p, const OpRun* r, const Device* dev) {
    float* got[OP_ARRAYS] = {NULL};
    char title[256];
    op_run_(t, got, p, r, dev);
    for (int i = 0; i < p->n; i++) {
        if (!got[i]) { continue; }
        op_title_(title, p, i, r, dev);
        if (op_writes_(p, i, r)) {
            op_check_array_(t, title, p, i, got[i]);
        } else {
            int as_it_was = memcmp(got[i], p->a[i], sizeof(float) * op_length(p, i)) == 0;
            check(t, as_it_was, "%s: only given, but written", title);
        }
    }
    op_free_(got);
}

// forward or backward: each array in a place of its own, then in every place that it may take
static inline void op_check(Test* t, const OpProblem* p, int backward, const Device* dev) {
    OpRun r = op_run_of_(backward, 0);
    op_check_run_(t, p, &r, dev);
    for (r.place = 0; r.place < p->n; r.place++) {
        for (r.over = 0; r.over < p->n && op_writes_(p, r.place, &r); r.over++) {
            if (op_may_be_(p, r.place, r.over)) { op_check_run_(t, p, &r, dev); }
        }
    }
}
#endif  // LLMC_OP_H
