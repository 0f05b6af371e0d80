/*
Proves llmc/core/fmath.h: every function, all 2^32 inputs, against MPFR.
    gcc -std=gnu11 -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp \
        dev/fmath/prove.c -o build/prove -lmpfr -lgmp -lm
    build/prove [function ...] [--sample N] [--table N]
        function    exp, log, tanh_cosh.tanh, ...; without one, all of them
        --sample N  inputs per function that go to MPFR whatever their value (default 2^22)
        --table N   prints for each function the N hardest inputs and their results, as rows for test_fmath.c
Exit status 1 if one input is misrounded, 2 for a wrong command line.

MPFR on 2^32 inputs would take days, so the proof has two steps. For each input x, d is f(x) by the C library in double.
    1. If d (1 - 2^-44) and d (1 + 2^-44) round to the same float, that float is the correctly rounded f(x), provided
       the library's d is within 2^-44 relative. glibc documents 1 or 2 units in the last place (2^-52, 2^-51) for these
       functions: a margin of more than 100 (manual, "Known Maximum Errors in Math Functions", x86_64).
    2. Otherwise (about 1 input in 2^20) MPFR computes the float directly: 24 bits, the exponent range of float32, and
       mpfr_subnormalize with the ternary value, so that a subnormal result too is rounded once.
MPFR also computes special inputs (zeros, infinities, NaN, the ends of the normal and subnormal ranges, 1) and a fixed
pseudo-random sample, where the float of step 1 must agree too: a check of the library, whose d that step believes.
The functions run as in the trainers: in a loop that the compiler turns into vector instructions.
*/
#include "../../llmc/core/fail.h"
#include "../../llmc/core/fmath.h"
#include <gnu/libc-version.h>
#include <mpfr.h>
#include <time.h>

enum { BLOCK = 4096, MAX_CLOSE = 1 << 16 };
static const double MARGIN = 0x1p-44;  // relative, around the library's double

// ---- the functions: our loop, the C library in double, MPFR ----

typedef struct {
    const char* name;
    void (*loop)(float* y, const float* x, int n);
    double (*library)(double x);
    int (*mpfr)(mpfr_ptr y, mpfr_srcptr x, mpfr_rnd_t round);
} Function;

#define LOOP(name)                                             \
    static void name##_loop(float* y, const float* x, int n) { \
        for (int i = 0; i < n; i++) { y[i] = fm_##name(x[i]); } \
    }
LOOP(exp) LOOP(exp2) LOOP(expm1) LOOP(log) LOOP(log2) LOOP(log1p) LOOP(tanh) LOOP(cosh) LOOP(sinh) LOOP(sin) LOOP(cos)
LOOP(erf)

static void pair_tanh_loop(float* y, const float* x, int n) {
    float other[BLOCK];
    for (int i = 0; i < n; i++) { fm_tanh_cosh(x[i], &y[i], &other[i]); }
}

static void pair_cosh_loop(float* y, const float* x, int n) {
    float other[BLOCK];
    for (int i = 0; i < n; i++) { fm_tanh_cosh(x[i], &other[i], &y[i]); }
}

static const Function functions[] = {
    {"exp", exp_loop, exp, mpfr_exp},
    {"exp2", exp2_loop, exp2, mpfr_exp2},
    {"expm1", expm1_loop, expm1, mpfr_expm1},
    {"log", log_loop, log, mpfr_log},
    {"log2", log2_loop, log2, mpfr_log2},
    {"log1p", log1p_loop, log1p, mpfr_log1p},
    {"tanh", tanh_loop, tanh, mpfr_tanh},
    {"cosh", cosh_loop, cosh, mpfr_cosh},
    {"sinh", sinh_loop, sinh, mpfr_sinh},
    {"sin", sin_loop, sin, mpfr_sin},
    {"cos", cos_loop, cos, mpfr_cos},
    {"erf", erf_loop, erf, mpfr_erf},
    {"tanh_cosh.tanh", pair_tanh_loop, tanh, mpfr_tanh},
    {"tanh_cosh.cosh", pair_cosh_loop, cosh, mpfr_cosh},
};
enum { N_FUNCTIONS = sizeof functions / sizeof functions[0] };

// ---- floats ----

static uint32_t float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float float_from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static int same(float a, float b) { return float_bits(a) == float_bits(b) || (isnan(a) && isnan(b)); }

static int is_special(uint32_t u) {
    const uint32_t centres[] = {0, 0x00800000, 0x3f800000, 0x7f800000, 0x7fc00000};
    for (int i = 0; i < 5; i++) {
        if ((u & 0x7fffffff) + 2 - centres[i] <= 4) { return 1; }
    }
    return 0;
}

// a bijection of 32-bit words (the finaliser of MurmurHash3): {u: mixed(u) < N} is a fixed sample of N inputs
static uint32_t mixed(uint32_t u) {
    u ^= u >> 16;
    u *= 0x85ebca6bu;
    u ^= u >> 13;
    u *= 0xc2b2ae35u;
    return u ^ (u >> 16);
}

// ---- one input in MPFR ----

typedef struct {
    mpfr_t x, y;         // 24 bits
    mpfr_t wide, bound;  // 120 bits, for distances
} Reference;

// the exponent range is a property of the thread: float32 in MPFR's convention 0.1xxx * 2^e
static void reference_init(Reference* r) {
    mpfr_set_emin(-148);
    mpfr_set_emax(128);
    mpfr_inits2(24, r->x, r->y, (mpfr_ptr)0);
    mpfr_inits2(120, r->wide, r->bound, (mpfr_ptr)0);
}

static void reference_free(Reference* r) {
    mpfr_clears(r->x, r->y, r->wide, r->bound, (mpfr_ptr)0);
    mpfr_free_cache();
}

static float reference(Reference* r, const Function* f, float x) {
    mpfr_set_flt(r->x, x, MPFR_RNDN);
    int ternary = f->mpfr(r->y, r->x, MPFR_RNDN);
    mpfr_subnormalize(r->y, ternary, MPFR_RNDN);
    return mpfr_get_flt(r->y, MPFR_RNDN);
}

// distance of f(x) to the nearer boundary between two roundings, relative to f(x); y is the correct result
static double distance(Reference* r, const Function* f, float x, float y) {
    double best = 1.0, d = y;
    double bounds[] = {0.5 * (d + (double)nextafterf(y, INFINITY)), 0.5 * (d + (double)nextafterf(y, -INFINITY))};
    mpfr_set_emin(-1000);  // boundaries lie between the floats, also below the smallest
    mpfr_set_flt(r->x, x, MPFR_RNDN);
    f->mpfr(r->wide, r->x, MPFR_RNDN);
    for (int i = 0; i < 2 && isfinite(bounds[i]); i++) {
        mpfr_sub_d(r->bound, r->wide, bounds[i], MPFR_RNDN);
        mpfr_div(r->bound, r->bound, r->wide, MPFR_RNDN);
        best = fmin(best, fabs(mpfr_get_d(r->bound, MPFR_RNDN)));
    }
    mpfr_set_emin(-148);
    return best;
}

// ---- one function over all inputs ----

typedef struct {
    float x, y;       // input, correct result
    double distance;  // of the exact value to a rounding boundary, relative
} Close;

typedef struct {
    uint64_t n_checked, n_close, n_sampled, n_wrong;
    Close* close;     // (MAX_CLOSE) inputs that step 1 could not decide
} Proof;

// adds one input to `p`; d is the library's value, y ours
static void check_input(Proof* p, Reference* r, const Function* f, uint32_t sample, float x, double d, float y) {
    float low = (float)(d * (1.0 - MARGIN)), high = (float)(d * (1.0 + MARGIN));
    uint32_t u = float_bits(x);
    int is_close = !same(low, high), is_sampled = is_special(u) || mixed(u) < sample;
    float expected = low;
    if (is_close || is_sampled) {
        expected = reference(r, f, x);
        if (!is_close && !same(expected, low)) {
            fail_run("%s(%a): the C library's double rounds to %a, MPFR to %a", f->name, (double)x, (double)low,
                     (double)expected);
        }
    }
    if (is_close && p->n_close < MAX_CLOSE) {
        Close c = {x, expected, distance(r, f, x, expected)};
        p->close[p->n_close] = c;
    }
    p->n_checked++;
    p->n_close += is_close;
    p->n_sampled += is_sampled;
    if (!same(y, expected)) {
        if (p->n_wrong++ < 20) {
            printf("%s(%a): found %a, correctly rounded %a\n", f->name, (double)x, (double)y, (double)expected);
        }
    }
}

static int by_distance(const void* a, const void* b) {
    double da = ((const Close*)a)->distance, db = ((const Close*)b)->distance;
    return (da > db) - (da < db);
}

static void proof_add(Proof* sum, const Proof* part) {
    for (uint64_t i = 0; i < part->n_close && sum->n_close + i < MAX_CLOSE; i++) {
        sum->close[sum->n_close + i] = part->close[i];
    }
    sum->n_checked += part->n_checked;
    sum->n_close += part->n_close;
    sum->n_sampled += part->n_sampled;
    sum->n_wrong += part->n_wrong;
}

static Proof prove(const Function* f, uint32_t sample) {
    Proof sum = {0, 0, 0, 0, (Close*)malloc_check(MAX_CLOSE * sizeof(Close), "close inputs")};
    #pragma omp parallel
    {
        Proof part = {0, 0, 0, 0, (Close*)malloc_check(MAX_CLOSE * sizeof(Close), "close inputs")};
        Reference r;
        reference_init(&r);
        float x[BLOCK], y[BLOCK];
        #pragma omp for schedule(dynamic, 64)
        for (uint32_t block = 0; block < (1u << 20); block++) {
            for (uint32_t i = 0; i < BLOCK; i++) { x[i] = float_from_bits(block * BLOCK + i); }
            f->loop(y, x, BLOCK);
            for (int i = 0; i < BLOCK; i++) { check_input(&part, &r, f, sample, x[i], f->library((double)x[i]), y[i]); }
        }
        reference_free(&r);
        #pragma omp critical
        proof_add(&sum, &part);
        free(part.close);
    }
    qsort(sum.close, sum.n_close < MAX_CLOSE ? sum.n_close : (size_t)MAX_CLOSE, sizeof(Close), by_distance);
    return sum;
}

// ---- command line ----

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint32_t count_argument(int argc, char** argv, int i, uint32_t max) {
    char* end = NULL;
    unsigned long long v = i + 1 < argc ? strtoull(argv[i + 1], &end, 10) : 0;
    if (!end || *end || end == argv[i + 1] || v > max) { fail_input("%s: expected a count 0..%u", argv[i], max); }
    return (uint32_t)v;
}

static int wanted(const char* name, int argc, char** argv) {
    int n_named = 0;
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-') { i++; continue; }
        n_named++;
        if (strcmp(argv[i], name) == 0) { return 1; }
    }
    return n_named == 0;
}

static void check_names(int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-') { i++; continue; }
        int known = 0;
        for (int k = 0; k < N_FUNCTIONS; k++) { known |= strcmp(argv[i], functions[k].name) == 0; }
        if (!known) { fail_input("no function \"%s\": expected exp, tanh_cosh.tanh, ... as prove.c lists", argv[i]); }
    }
}

int main(int argc, char** argv) {
    uint32_t sample = 1u << 22, n_table = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--sample") == 0) { sample = count_argument(argc, argv, i++, UINT32_MAX); }
        else if (strcmp(argv[i], "--table") == 0) { n_table = count_argument(argc, argv, i++, 1000); }
        else if (argv[i][0] == '-') { fail_input("%s: expected --sample N or --table N", argv[i]); }
    }
    check_names(argc, argv);
    printf("llmc/core/fmath.h, compiler %s, glibc %s, MPFR %s\n", __VERSION__, gnu_get_libc_version(), mpfr_get_version());
    printf("%-15s %11s %8s %9s %10s   hardest input: distance of f(x) to a rounding boundary, relative\n", "function",
           "inputs", "close", "sampled", "misrounded");
    uint64_t n_wrong = 0;
    for (int k = 0; k < N_FUNCTIONS; k++) {
        const Function* f = &functions[k];
        if (!wanted(f->name, argc, argv)) { continue; }
        double start = seconds();
        Proof p = prove(f, sample);
        printf("%-15s %11llu %8llu %9llu %10llu   %15a: 2^%.2f   %.0f s\n", f->name, (unsigned long long)p.n_checked,
               (unsigned long long)p.n_close, (unsigned long long)p.n_sampled, (unsigned long long)p.n_wrong,
               (double)p.close[0].x, log2(p.close[0].distance), seconds() - start);
        for (uint32_t i = 0; i < n_table && i < p.n_close && i < MAX_CLOSE; i++) {
            printf("    {\"%s\", %af, %af},\n", f->name, (double)p.close[i].x, (double)p.close[i].y);
        }
        fflush(stdout);
        n_wrong += p.n_wrong;
        free(p.close);
    }
    printf("%s\n", n_wrong ? "MISROUNDED" : "all correctly rounded");
    return n_wrong > 0;
}
