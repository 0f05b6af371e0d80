/*
Promises of llmc/ops/hyper_connections.h, which follow from the tables (llmc/test/op.h), and others of its own. Fast
builds for GPUs keep tolerances.
*/
#include "llmc/ops/hyper_connections.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_main

// two epsilons that nobody takes for one another, and large enough that everybody sees them
static const float EPS_H = 0.01f, EPS_N = 0.05f;

// dims of all tables: N positions, S streams, D channels, M numbers of a site, P scales, I iterations
static HyperShape shape_of(const int* d) {
    const HyperShape s = {d['N'], d['S'], d['D'], d['I'] ? d['I'] : 1, EPS_H, EPS_N};
    return s;
}

// ---- a site ----

enum { X, FN, BASE, SCALE, Y, R, Z, PRE, POST, COMB, DY, DPOST, DCOMB, DX, DFN, DBASE, DSCALE };

static void site_forward_ref(float* const* a, const int* d) {
    const HyperShape s = shape_of(d);
    hyper_site_forward_ref(a[Y], a[R], a[Z], a[PRE], a[POST], a[COMB], a[X], a[FN], a[BASE], a[SCALE], &s);
}

OP_STORED(T)
static void site_forward(T* const* x, float* const* a, const int* d, const Device* dev) {
    const HyperShape s = shape_of(d);
    hyper_site_forward(x[Y], a[R], a[Z], a[PRE], a[POST], a[COMB], x[X], a[FN], a[BASE], a[SCALE], &s, dev);
}

static void site_backward_ref(float* const* a, const int* d) {
    const HyperShape s = shape_of(d);
    hyper_site_backward_ref(a[DX], a[DFN], a[DBASE], a[DSCALE], a[DY], a[DPOST], a[DCOMB], a[X], a[R], a[Z], a[PRE],
                            a[POST], a[FN], a[BASE], a[SCALE], &s);
}

OP_STORED(T)
static void site_backward(T* const* x, float* const* a, const int* d, const Device* dev) {
    const HyperShape s = shape_of(d);
    hyper_site_backward(x[DX], a[DFN], a[DBASE], a[DSCALE], x[DY], a[DPOST], a[DCOMB], x[X], a[R], a[Z], a[PRE],
                        a[POST], a[FN], a[BASE], a[SCALE], &s, dev);
}

// r and z of one position
static double mix_in_double(double* z, const double* u, const double* fn, int n, int M) {
    double squares = 0.0;
    for (int i = 0; i < n; i++) { squares += u[i] * u[i]; }
    const double r = 1.0 / sqrt(squares / n + (double)EPS_N);
    for (int m = 0; m < M; m++) {
        z[m] = 0.0;
        for (int i = 0; i < n; i++) { z[m] += r * u[i] * fn[(size_t)m * n + i]; }
    }
    return r;
}

static double sigmoid_in_double(double x) { return 1.0 / (1.0 + exp(-x)); }

// rows or columns, stride apart, each divided by its sum + eps
static void divide_in_double(double* P, int hc, int line, int step, double eps) {
    for (int i = 0; i < hc; i++) {
        double sum = eps;
        for (int k = 0; k < hc; k++) { sum += P[i * line + k * step]; }
        for (int k = 0; k < hc; k++) { P[i * line + k * step] /= sum; }
    }
}

static void sinkhorn_in_double(double* P, int hc, int iters, double eps) {
    for (int e = 0; e < hc * hc; e++) { P[e] = exp(P[e]); }
    divide_in_double(P, hc, hc, 1, 0.0);
    for (int e = 0; e < hc * hc; e++) { P[e] += eps; }
    for (int i = 0; i < iters; i++) {
        if (i > 0) { divide_in_double(P, hc, hc, 1, eps); }
        divide_in_double(P, hc, 1, hc, eps);
    }
}

static void collapse_in_double(double* y, const double* pre, const double* x, int hc, int D) {
    for (int d = 0; d < D; d++) {
        y[d] = 0.0;
        for (int j = 0; j < hc; j++) { y[d] += pre[j] * x[(size_t)j * D + d]; }
    }
}

static void site_in_double(double* const* a, const int* d) {
    const int hc = d['S'], D = d['D'], M = d['M'], n = hc * D;
    for (int t = 0; t < d['N']; t++) {
        double *z = a[Z] + t * M, *comb = a[COMB] + t * hc * hc;
        a[R][t] = mix_in_double(z, a[X] + t * n, a[FN], n, M);
        for (int j = 0; j < hc; j++) {
            a[PRE][t * hc + j] = sigmoid_in_double(z[j] * a[SCALE][0] + a[BASE][j]) + (double)EPS_H;
            a[POST][t * hc + j] = 2.0 * sigmoid_in_double(z[hc + j] * a[SCALE][1] + a[BASE][hc + j]);
        }
        for (int e = 0; e < hc * hc; e++) { comb[e] = z[2 * hc + e] * a[SCALE][2] + a[BASE][2 * hc + e]; }
        sinkhorn_in_double(comb, hc, d['I'], (double)EPS_H);
        collapse_in_double(a[Y] + t * D, a[PRE] + t * hc, a[X] + t * n, hc, D);
    }
}

// |X| < 2, |fn| < 1/4, |base|, |scale| < 1, the gradients of what is made < 1. n products, each below 1/2, walk to at
// most 1.2 sqrt(n) in these problems; r < 4.5 is near 1, for the squares' mean is 4/3
static double z_most(const int* d) { return 1.2 * sqrt((double)(d['S'] * d['D'])); }
static double z_error(const int* d) {
    const int n = d['S'] * d['D'];
    return rounding_walk(n, z_most(d)) + (n + 8) * 0x1p-25 * z_most(d);  // the products; then r
}
static double a_error(const int* d) { return z_error(d) + (2 * z_most(d) + 2) * 0x1p-24; }
// a step's sum has hc roundings, its quotient one; what is off is off for all that follows, but does not grow
static double comb_error(const int* d) { return 2 * a_error(d) + 2 * d['I'] * (d['S'] + 2) * 0x1p-24; }
// backward, of numbers below 4
static double dcomb_error(const int* d) { return 8 * a_error(d) + 2 * d['I'] * (d['S'] + 4) * 4 * 0x1p-23; }
static double dpre_error(const int* d) { return rounding_walk(d['D'], 4.0 * sqrt((double)d['D'])); }
static double da_error(const int* d) {
    const double pre = dpre_error(d) / 4 + 2 * (double)d['D'] * (a_error(d) + 5 * 0x1p-24);
    return fmax(pre, dcomb_error(d));
}
// du: M products of dz, which are below 4 but for those of pre, and numbers of fn; r is near 1
static double dx_error(const int* d) {
    const double dz_most = fmax(4.0, sqrt((double)d['D']) * 2), z = z_most(d), M = d['M'];
    const double dot = M * (da_error(d) * z + z_error(d) * dz_most);
    const double rest = 8 * 0x1p-24 * (4 + M * dz_most / 4);
    return M * (da_error(d) / 4 + dz_most * 0x1p-24) + 2 * dot / (d['S'] * d['D']) + rest;
}

static double site_error(int array, const int* d) {
    const double N = d['N'], da_most = fmax(4.0, sqrt((double)d['D']) * 2), z = z_most(d);
    switch (array) {
        case Y: return d['S'] * (2 * (a_error(d) / 4 + 4 * 0x1p-24) + 4 * 0x1p-24);
        case R: return (d['S'] * d['D'] + 8) * 0x1p-25;
        case Z: return z_error(d);
        case PRE: return a_error(d) / 4 + 4 * 0x1p-24;
        case POST: return a_error(d) / 2 + 6 * 0x1p-24;
        case COMB: return comb_error(d);
        case DX: return dx_error(d);
        case DFN: return N * 2 * (da_error(d) + 4 * da_most * 0x1p-24) + rounding_walk((int)N, 2 * da_most * N);
        case DBASE: return N * da_error(d) + rounding_walk((int)N, da_most * N);
        case DSCALE: return N * d['M'] * (da_error(d) * z + z_error(d) * da_most + da_most * z * 0x1p-24);
        default: return -1.0;
    }
}

static double site_apart(const OpProblem* p, int array, size_t i) { return 2.0 * site_error(array, p->d); }

static const int site_shapes[][OP_DIMS] = {
    {1, 1, 1, 3, 3, 1}, {1, 4, 7, 24, 3, 20}, {7, 2, 5, 8, 3, 3}, {3, 3, 11, 15, 3, 5}, {5, 4, 8, 24, 3, 2},
    {2, 8, 9, 80, 3, 4}, {33, 1, 33, 3, 3, 2},
#if defined __CUDACC__ && !defined EXACT
    {40, 4, 24, 24, 3, 20}, {70, 4, 8, 24, 3, 2},
#elif defined __CUDACC__
    {9, 4, 16, 24, 3, 2},
#else
    {17, 4, 16, 24, 3, 20}, {16, 5, 13, 35, 3, 3}, {19, 6, 16, 48, 3, 2}, {9, 7, 3, 63, 3, 3},
    {65, 4, 67, 24, 3, 20}, {130, 4, 70, 24, 3, 3}, {8, 4, 257, 24, 3, 1},
#endif
    {0},
};

static const Op site = {
    .name = "site", .dims = "NSDMPI",
    .arrays = {
        {X, "X", "NSD", GIVEN, 2.0f},
        {FN, "fn", "MSD", GIVEN | FLOAT, 0.25f},
        {BASE, "base", "M", GIVEN | FLOAT, 1.0f},
        {SCALE, "scale", "P", GIVEN | FLOAT, 1.0f},
        {Y, "y", "ND", MADE},
        {R, "r", "N", MADE | FLOAT},
        {Z, "z", "NM", MADE | FLOAT},
        {PRE, "pre", "NS", MADE | FLOAT},
        {POST, "post", "NS", MADE | FLOAT},
        {COMB, "comb", "NSS", MADE | FLOAT},
        {DY, "dy", "ND", GIVEN, 1.0f},
        {DPOST, "dpost", "NS", GIVEN | FLOAT, 1.0f},
        {DCOMB, "dcomb", "NSS", GIVEN | FLOAT, 1.0f},
        {DX, "dX", "NSD", GRADIENT | ADDED, 1.0f},
        {DFN, "dfn", "MSD", GRADIENT | ASKED | FLOAT},
        {DBASE, "dbase", "M", GRADIENT | ASKED | FLOAT},
        {DSCALE, "dscale", "P", GRADIENT | ASKED | FLOAT},
    },
    .shapes = site_shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = site_forward_ref, .forward = OP_FAST(site_forward),
    .backward_ref = site_backward_ref, .backward = OP_FAST(site_backward),
    .in_double = site_in_double, .error = site_error,
    .judged = {{3, 3, 11, 15, 3, 5}, {5, 4, 8, 24, 3, 20}, {4, 2, 5, 8, 3, 1}}, .apart = site_apart,
};

// ---- the head ----

enum { HX, HFN, HBASE, HSCALE, HY, HR, HZ, HPRE, HDY, HDX, HDFN, HDBASE, HDSCALE };

static void head_forward_ref(float* const* a, const int* d) {
    const HyperShape s = shape_of(d);
    hyper_head_forward_ref(a[HY], a[HR], a[HZ], a[HPRE], a[HX], a[HFN], a[HBASE], a[HSCALE], &s);
}

OP_STORED(T)
static void head_forward(T* const* x, float* const* a, const int* d, const Device* dev) {
    const HyperShape s = shape_of(d);
    hyper_head_forward(x[HY], a[HR], a[HZ], a[HPRE], x[HX], a[HFN], a[HBASE], a[HSCALE], &s, dev);
}

static void head_backward_ref(float* const* a, const int* d) {
    const HyperShape s = shape_of(d);
    hyper_head_backward_ref(a[HDX], a[HDFN], a[HDBASE], a[HDSCALE], a[HDY], a[HX], a[HR], a[HZ], a[HPRE], a[HFN],
                            a[HBASE], a[HSCALE], &s);
}

OP_STORED(T)
static void head_backward(T* const* x, float* const* a, const int* d, const Device* dev) {
    const HyperShape s = shape_of(d);
    hyper_head_backward(x[HDX], a[HDFN], a[HDBASE], a[HDSCALE], x[HDY], x[HX], a[HR], a[HZ], a[HPRE], a[HFN],
                        a[HBASE], a[HSCALE], &s, dev);
}

static void head_in_double(double* const* a, const int* d) {
    const int hc = d['S'], D = d['D'], n = hc * D;
    for (int t = 0; t < d['N']; t++) {
        double* z = a[HZ] + t * hc;
        a[HR][t] = mix_in_double(z, a[HX] + t * n, a[HFN], n, hc);
        for (int j = 0; j < hc; j++) {
            a[HPRE][t * hc + j] = sigmoid_in_double(z[j] * a[HSCALE][0] + a[HBASE][j]) + (double)EPS_H;
        }
        collapse_in_double(a[HY] + t * D, a[HPRE] + t * hc, a[HX] + t * n, hc, D);
    }
}

// as a site's, whose numbers are larger and more
static double head_error(int array, const int* d) {
    static const int of_site[] = {X, FN, BASE, SCALE, Y, R, Z, PRE, DY, DX, DFN, DBASE, DSCALE};
    int as_site[128];
    memcpy(as_site, d, sizeof as_site);
    as_site['M'] = d['S'], as_site['I'] = 0;
    return site_error(of_site[array], as_site);
}

static double head_apart(const OpProblem* p, int array, size_t i) { return 2.0 * head_error(array, p->d); }

static const int head_shapes[][OP_DIMS] = {
    {1, 1, 1, 1}, {1, 4, 7, 1}, {7, 2, 5, 1}, {3, 3, 11, 1}, {17, 4, 16, 1}, {2, 8, 9, 1}, {33, 1, 33, 1},
#ifndef __CUDACC__
    {65, 4, 67, 1}, {8, 4, 257, 1}, {16, 5, 13, 1},
#endif
    {0},
};

static const Op head = {
    .name = "head", .dims = "NSDP",
    .arrays = {
        {HX, "X", "NSD", GIVEN, 2.0f},
        {HFN, "fn", "SSD", GIVEN | FLOAT, 0.25f},
        {HBASE, "base", "S", GIVEN | FLOAT, 1.0f},
        {HSCALE, "scale", "P", GIVEN | FLOAT, 1.0f},
        {HY, "y", "ND", MADE},
        {HR, "r", "N", MADE | FLOAT},
        {HZ, "z", "NS", MADE | FLOAT},
        {HPRE, "pre", "NS", MADE | FLOAT},
        {HDY, "dy", "ND", GIVEN, 1.0f},
        {HDX, "dX", "NSD", GRADIENT},
        {HDFN, "dfn", "SSD", GRADIENT | ASKED | FLOAT},
        {HDBASE, "dbase", "S", GRADIENT | ASKED | FLOAT},
        {HDSCALE, "dscale", "P", GRADIENT | ASKED | FLOAT},
    },
    .shapes = head_shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = head_forward_ref, .forward = OP_FAST(head_forward),
    .backward_ref = head_backward_ref, .backward = OP_FAST(head_backward),
    .in_double = head_in_double, .error = head_error, .judged = {{3, 3, 11, 1}, {5, 4, 8, 1}}, .apart = head_apart,
};

// ---- a site's y again ----

enum { CX, CPRE, CY };

static void collapse_ref(float* const* a, const int* d) {
    const HyperShape s = shape_of(d);
    hyper_collapse_forward_ref(a[CY], a[CX], a[CPRE], &s);
}

OP_STORED(T)
static void collapse_again(T* const* x, float* const* a, const int* d, const Device* dev) {
    const HyperShape s = shape_of(d);
    hyper_collapse_forward(x[CY], x[CX], a[CPRE], &s, dev);
}

// |X| < 2, |pre| < 1
static double collapse_apart(const OpProblem* p, int array, size_t i) {
    return array == CY ? 2.0 * rounding_walk(p->d['S'], 2 * p->d['S']) : 0.0;
}

static const int collapse_shapes[][OP_DIMS] = {
    {1, 1, 1}, {1, 4, 7}, {7, 2, 5}, {3, 3, 11}, {17, 4, 16}, {2, 8, 9}, {33, 1, 33}, {2, 4, 257}, {0},
};

static const Op collapse = {
    .name = "collapse", .dims = "NSD",
    .arrays = {
        {CX, "X", "NSD", GIVEN, 2.0f},
        {CPRE, "pre", "NS", GIVEN | FLOAT, 1.0f},
        {CY, "y", "ND", MADE},
    },
    .shapes = collapse_shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = collapse_ref, .forward = OP_FAST(collapse_again), .apart = collapse_apart,
};

// ---- expand ----

enum { EX, EF, EPOST, ECOMB, EOUT, EDOUT, EDF, EDX, EDPOST, EDCOMB };

static void expand_forward_ref(float* const* a, const int* d) {
    const HyperShape s = shape_of(d);
    hyper_expand_forward_ref(a[EOUT], a[EX], a[EF], a[EPOST], a[ECOMB], &s);
}

OP_STORED(T)
static void expand_forward(T* const* x, float* const* a, const int* d, const Device* dev) {
    const HyperShape s = shape_of(d);
    hyper_expand_forward(x[EOUT], x[EX], x[EF], a[EPOST], a[ECOMB], &s, dev);
}

static void expand_backward_ref(float* const* a, const int* d) {
    const HyperShape s = shape_of(d);
    hyper_expand_backward_ref(a[EDF], a[EDX], a[EDPOST], a[EDCOMB], a[EDOUT], a[EX], a[EF], a[EPOST], a[ECOMB], &s);
}

OP_STORED(T)
static void expand_backward(T* const* x, float* const* a, const int* d, const Device* dev) {
    const HyperShape s = shape_of(d);
    hyper_expand_backward(x[EDF], x[EDX], a[EDPOST], a[EDCOMB], x[EDOUT], x[EX], x[EF], a[EPOST], a[ECOMB], &s, dev);
}

static void expand_in_double(double* const* a, const int* d) {
    const int hc = d['S'], D = d['D'];
    for (int i = 0; i < d['N'] * hc * D; i++) {
        const int t = i / D / hc, k = i / D % hc, c = i % D;
        a[EOUT][i] = a[EPOST][t * hc + k] * a[EF][t * D + c];
        for (int j = 0; j < hc; j++) { a[EOUT][i] += a[ECOMB][(t * hc + j) * hc + k] * a[EX][(t * hc + j) * D + c]; }
    }
}

// |X|, |f|, |post| < 2, |comb|, |dout| < 1
static double expand_error(int array, const int* d) {
    switch (array) {
        case EOUT: return rounding_walk(d['S'] + 1, 4 + 2 * d['S']);
        case EDF: return rounding_walk(d['S'], 2 * d['S']);
        case EDX: return rounding_walk(d['S'], d['S']);
        case EDPOST: case EDCOMB: return rounding_walk(d['D'], 2 * d['D']);
        default: return -1.0;
    }
}

static double expand_apart(const OpProblem* p, int array, size_t i) { return 2.0 * expand_error(array, p->d); }

static const int expand_shapes[][OP_DIMS] = {
    {1, 1, 1}, {1, 4, 7}, {7, 2, 5}, {3, 3, 11}, {17, 4, 16}, {2, 8, 9}, {33, 1, 33}, {5, 4, 64}, {2, 4, 257},
#ifndef __CUDACC__
    {16, 5, 13}, {19, 6, 16}, {9, 7, 3}, {65, 4, 67}, {130, 4, 70}, {8, 4, 530},
#endif
    {0},
};

static const Op expand = {
    .name = "expand", .dims = "NSD",
    .arrays = {
        {EX, "X", "NSD", GIVEN, 2.0f},
        {EF, "f", "ND", GIVEN, 2.0f},
        {EPOST, "post", "NS", GIVEN | FLOAT, 2.0f},
        {ECOMB, "comb", "NSS", GIVEN | FLOAT, 1.0f},
        {EOUT, "out", "NSD", MADE},
        {EDOUT, "dout", "NSD", GIVEN, 1.0f},
        {EDF, "df", "ND", GRADIENT},
        {EDX, "dX", "NSD", GRADIENT, 0.0f, NULL, "dout"},
        {EDPOST, "dpost", "NS", GRADIENT | FLOAT},
        {EDCOMB, "dcomb", "NSS", GRADIENT | FLOAT},
    },
    .shapes = expand_shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = expand_forward_ref, .forward = OP_FAST(expand_forward),
    .backward_ref = expand_backward_ref, .backward = OP_FAST(expand_backward),
    .in_double = expand_in_double, .error = expand_error, .judged = {{3, 3, 11}, {5, 4, 8}}, .apart = expand_apart,
};

// ---- spread ----

enum { SENCODED, SX, SDX, SDENCODED };

static void spread_forward_ref(float* const* a, const int* d) {
    hyper_spread_forward_ref(a[SX], a[SENCODED], d['N'], d['S'], d['D']);
}

OP_STORED(T)
static void spread_forward(T* const* x, float* const* a, const int* d, const Device* dev) {
    hyper_spread_forward(x[SX], x[SENCODED], d['N'], d['S'], d['D'], dev);
}

static void spread_backward_ref(float* const* a, const int* d) {
    hyper_spread_backward_ref(a[SDENCODED], a[SDX], d['N'], d['S'], d['D']);
}

OP_STORED(T)
static void spread_backward(T* const* x, float* const* a, const int* d, const Device* dev) {
    hyper_spread_backward(x[SDENCODED], x[SDX], d['N'], d['S'], d['D'], dev);
}

static double spread_apart(const OpProblem* p, int array, size_t i) {
    return array == SDENCODED ? rounding_walk(p->d['S'], p->d['S']) : 0.0;
}

static const Op spread = {
    .name = "spread", .dims = "NSD",
    .arrays = {
        {SENCODED, "encoded", "ND", GIVEN, 2.0f},
        {SX, "X", "NSD", MADE},
        {SDX, "dX", "NSD", GIVEN, 1.0f},
        {SDENCODED, "dencoded", "ND", GRADIENT},
    },
    .shapes = expand_shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = spread_forward_ref, .forward = OP_FAST(spread_forward),
    .backward_ref = spread_backward_ref, .backward = OP_FAST(spread_backward), .apart = spread_apart,
};

// ---- promises of its own ----

// comb, and dbase for this dcomb, of one position whose logits are A: fn is 0, and the fast op computes them
static void sinkhorn_of(float comb[16], float dA[16], const float A[16], const float dcomb[16], int iters) {
    const HyperShape s = {1, 4, 1, iters, 1e-6f, 1e-6f};
    Device dev = test_device(1);
    float x[4] = {1, 2, 3, 4}, zeros[96] = {0}, base[24] = {0}, ones[3] = {1, 1, 1}, dbase[24];
    memcpy(base + 8, A, sizeof(float) * 16);
    float *dX = to_device(x, 4, &dev), *dfn = to_device(zeros, 96, &dev), *dbases = to_device(base, 24, &dev);
    float *dones = to_device(ones, 3, &dev), *y = to_device(zeros, 1, &dev), *r = to_device(zeros, 1, &dev);
    float *z = to_device(zeros, 24, &dev), *pre = to_device(zeros, 4, &dev), *post = to_device(zeros, 4, &dev);
    float *combs = to_device(zeros, 16, &dev), *dcombs = to_device(dcomb, 16, &dev), *dsum = to_device(zeros, 24, &dev);
    float *dpost = to_device(zeros, 4, &dev), *dx = to_device(zeros, 4, &dev), *dy = to_device(zeros, 1, &dev);
    hyper_site_forward(y, r, z, pre, post, combs, dX, dfn, dbases, dones, &s, &dev);
    hyper_site_backward(dx, (float*)NULL, dsum, (float*)NULL, dy, dpost, dcombs, dX, r, z, pre, post, dfn, dbases,
                        dones, &s, &dev);
    from_device(comb, combs, 16, &dev), from_device(dbase, dsum, 24, &dev);
    memcpy(dA, dbase + 8, sizeof(float) * 16);
    float* const left[] = {dX, dfn, dbases, dones, y, r, z, pre, post, dcombs, dpost, dx, dy};
    for (size_t i = 0; i < sizeof left / sizeof left[0]; i++) { device_drop(left[i]); }
    device_free(&dev);
}

// computed in float64 by the code of the model's authors (deepseek-ai/TileKernels)
static void test_sinkhorn(Test* t) {
    static const float A[16] = {0, 1, 2, 3, 1, 0, -1, 2, -2, 0.5f, 0, 1, 3, 2, 1, 0};
    static const double comb20[16] = {0.03986878, 0.13913609, 0.47564095, 0.34535319, 0.34926263, 0.16496115,
                                      0.07632097, 0.40945424, 0.02685832, 0.42006806, 0.32042138, 0.23265124,
                                      0.58400927, 0.27583369, 0.12761570, 0.01254033};
    static const double dA20[16] = {-0.013178513, 0.049471645,  -0.010186359, -0.026106772, -0.026618084, -0.064348617,
                                    0.017776802,  0.073189900,  0.014141663,  0.089337336,  -0.052647866, -0.050831133,
                                    0.025655046,  -0.074459958, 0.045056815,  0.003748097};
    static const double comb1[4] = {0.03419849, 0.12259889, 0.44044231, 0.35498643};
    static const double dA1[4] = {-0.010593981, 0.046757989, -0.006022028, -0.030141980};
    float dcomb[16], comb[16], dA[16];
    for (int e = 0; e < 16; e++) { dcomb[e] = (float)((3 * (e / 4) + 5 * (e % 4)) % 7) / 7.0f; }
    sinkhorn_of(comb, dA, A, dcomb, 20);
    check_close(t, "comb", comb, comb20, 16, 5e-7);  // 39 steps, each off by a few 2^-25 of numbers below 0.6
    check_close(t, "dA", dA, dA20, 16, 1e-6);
    sinkhorn_of(comb, dA, A, dcomb, 1);
    check_close(t, "comb of one iteration", comb, comb1, 4, 1e-7);
    check_close(t, "its dA", dA, dA1, 4, 2e-7);
}

// What dev/ref/hyper_connections.py gives for such numbers, as hashes of the bits: N 5, hc 4, D 6, 20 iterations, then
// N 6, hc 3, D 7, 5 iterations. number i of array a is ((37 i + 11 a) % 101 - 50) / unit
static float* fixed_numbers(int a, size_t n, float unit) {
    float* x = filled_array(n, 0.0f);
    for (size_t i = 0; i < n; i++) { x[i] = (float)((int)((37 * i + 11 * (size_t)a) % 101) - 50) / unit; }
    return x;
}

static const struct {
    const char* name;
    uint64_t hash[2];
} fixed_hashes[] = {
    {"y", {0x14811ecd3081bd13u, 0x2e77e1b921b20875u}},
    {"r", {0xe1bbbedf2f3278f5u, 0xb1faa695a58059ddu}},
    {"z", {0x69b51b04f678b9bcu, 0x9681e9dc9f97b216u}},
    {"pre", {0x783bcb9036c9bfacu, 0x43fdf18f9c3c7a50u}},
    {"post", {0x27e3bc6fe1a62dfau, 0xec33c26e2194f32fu}},
    {"comb", {0x96b8cb8646ddc430u, 0x46d2f58002eca98eu}},
    {"out", {0x82ae68077f696197u, 0x55f4bc0ede55b832u}},
    {"df", {0x6945a03a2f51cf98u, 0xc0841b90a2d858f4u}},
    {"expand dX", {0x9437313519437077u, 0xd4dda6bbea4437f9u}},
    {"dpost", {0xf2f83ca03970c189u, 0xf615cfd5e9fdce40u}},
    {"dcomb", {0xe4b858eb51dd40b6u, 0x82b763ed203ba123u}},
    {"dX", {0x7681cb74db54c01au, 0x9058d43ea1405c4au}},
    {"dfn", {0x3222d9193e9005f8u, 0x98428c8a9df104d3u}},
    {"dbase", {0xe21500f3699f3d7fu, 0xffb0b83d64096116u}},
    {"dscale", {0x87503e4c07314593u, 0xb66e4a633c007ed0u}},
    {"head y", {0x14811ecd3081bd13u, 0x2e77e1b921b20875u}},
    {"head r", {0xe1bbbedf2f3278f5u, 0xb1faa695a58059ddu}},
    {"head z", {0xc152d947e07c2513u, 0x8a1eb05e5c446e7bu}},
    {"head pre", {0x783bcb9036c9bfacu, 0x43fdf18f9c3c7a50u}},
    {"head dX", {0x153b0cd5912413aau, 0xc1b8373fcfc8fc89u}},
    {"head dfn", {0x92ba524c732dd15bu, 0xbe6c107259f91f28u}},
    {"head dbase", {0xef21c92b25f5bbefu, 0x1998b96608d219a6u}},
    {"head dscale", {0xde18e7cd645f8ff0u, 0x02ba85cf559e2f6au}},
};

static void check_hash(Test* t, int number, int i, const float* x, size_t n) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t k = 0; k < n; k++) { hash = (hash ^ float_bits(x[k])) * 0x100000001b3u; }
    check(t, hash == fixed_hashes[i].hash[number], "%s: hash 0x%016llx, first %.9g", fixed_hashes[i].name,
          (unsigned long long)hash, (double)x[0]);
}

static void check_fixed(Test* t, int number, const HyperShape* s) {
    const size_t N = (size_t)s->N, hc = (size_t)s->hc, D = (size_t)s->D, M = (2 + hc) * hc, n = hc * D;
    float *x = fixed_numbers(0, N * n, 29), *fn = fixed_numbers(1, M * n, 251), *base = fixed_numbers(2, M, 61);
    float *scale = fixed_numbers(3, 3, 31), *f = fixed_numbers(4, N * D, 27), *dout = fixed_numbers(5, N * n, 59);
    float* dy = fixed_numbers(6, N * D, 53);
    const size_t lengths[] = {N * D, N,     N * M,   N * hc, N * hc,      N * hc * hc, N * n, N * D,
                              N * n, N * hc, N * hc * hc, N * n, M * n, M, 3,
                              N * D, N, N * hc, N * hc, N * n, hc * n, hc, 1};
    float* a[sizeof lengths / sizeof lengths[0]];
    const int n_arrays = (int)(sizeof lengths / sizeof lengths[0]);
    for (int i = 0; i < n_arrays; i++) { a[i] = filled_array(lengths[i], NAN); }
    hyper_site_forward_ref(a[0], a[1], a[2], a[3], a[4], a[5], x, fn, base, scale, s);
    hyper_expand_forward_ref(a[6], x, f, a[4], a[5], s);
    hyper_expand_backward_ref(a[7], a[8], a[9], a[10], dout, x, f, a[4], a[5], s);
    memcpy(a[11], a[8], sizeof(float) * N * n);
    hyper_site_backward_ref(a[11], a[12], a[13], a[14], dy, a[9], a[10], x, a[1], a[2], a[3], a[4], fn, base, scale, s);
    hyper_head_forward_ref(a[15], a[16], a[17], a[18], x, fn, base, scale, s);
    hyper_head_backward_ref(a[19], a[20], a[21], a[22], dy, x, a[16], a[17], a[18], fn, base, scale, s);
    for (int i = 0; i < n_arrays; i++) { check_hash(t, number, i, a[i], lengths[i]), free(a[i]); }
    free(x), free(fn), free(base), free(scale), free(f), free(dout), free(dy);
}

static void test_reference(Test* t) {
#ifdef SYSTEM_LIBM
    skip(t, "with the C library's functions and without fused products the bits are others");
    return;
#endif
    const HyperShape wide = {5, 4, 6, 20, 1e-6f, 1e-6f}, narrow = {6, 3, 7, 5, 1e-6f, 1e-6f};
    check_fixed(t, 0, &wide);
    check_fixed(t, 1, &narrow);
}

// logits so far apart that most of exp is 0 (unsloth-zoo 859 had Inf there)
static void test_peaked(Test* t) {
    float A[16], dcomb[16], comb[16], dA[16];
    for (int e = 0; e < 16; e++) { A[e] = (float)((e * 7 + 3) % 16) * 50.0f - 400.0f, dcomb[e] = e % 3 ? 1.0f : -1.0f; }
    sinkhorn_of(comb, dA, A, dcomb, 20);
    for (int k = 0; k < 4; k++) {
        const float sum = comb[k] + comb[4 + k] + comb[8 + k] + comb[12 + k];
        check(t, fabsf(sum - 1.0f) < 1e-5f, "column %d sums to %.9g", k, (double)sum);  // eps_h and a few roundings
    }
    for (int e = 0; e < 16; e++) { check(t, isfinite(dA[e]), "dA[%d] is %.9g", e, (double)dA[e]); }
}

// only stream 0 goes on, as stream 1, and f goes into stream 2
static void test_obvious(Test* t) {
    const int shape[] = {1, 3, 2};
    const float x[] = {1, 2, 3, 4, 5, 6}, f[] = {7, 8}, dout[] = {10, 20, 30, 40, 50, 60};
    OpProblem p = op_problem(&expand, shape, EASY, 0);
    Device dev = test_device(1);
    memcpy(p.a[EX], x, sizeof x), memcpy(p.a[EF], f, sizeof f), memcpy(p.a[EDOUT], dout, sizeof dout);
    memset(p.a[EPOST], 0, sizeof(float) * 3), memset(p.a[ECOMB], 0, sizeof(float) * 9);
    p.a[EPOST][2] = 1.0f, p.a[ECOMB][0 * 3 + 1] = 1.0f;
    op_answer(t, &p, &dev);
    const float out[] = {0, 0, 1, 2, 7, 8}, df[] = {50, 60}, dX[] = {30, 40, 0, 0, 0, 0};
    const float dpost[] = {230, 530, 830}, dcomb[] = {50, 110, 170, 110, 250, 390, 170, 390, 610};
    check_bits(t, "out", p.a[EOUT], out, 6);
    check_bits(t, "df", p.a[EDF], df, 2);
    check_bits(t, "dX", p.a[EDX], dX, 6);
    check_bits(t, "dpost", p.a[EDPOST], dpost, 3);
    check_bits(t, "dcomb", p.a[EDCOMB], dcomb, 9);
    device_free(&dev);
    op_problem_free(&p);
}

// no positions: sums of nothing are 0, and the rest is not touched
static void test_nothing(Test* t) {
    const HyperShape s = {0, 2, 3, 2, EPS_H, EPS_N};
    Device dev = test_device(1);
    float *ones = filled_array(48, 1.0f), *sums = filled_array(59, 7.0f), *none = NULL;
    float *p = to_device(ones, 48, &dev), *dsums = to_device(sums, 59, &dev);
    hyper_site_forward(none, none, none, none, none, none, none, p, p, p, &s, &dev);
    hyper_expand_forward(none, none, none, none, none, &s, &dev);
    hyper_expand_backward(none, none, none, none, none, none, none, none, none, &s, &dev);
    hyper_site_backward(none, dsums, dsums + 48, dsums + 56, none, none, none, none, none, none, none, none, p, p, p,
                        &s, &dev);
    hyper_spread_forward(none, none, 0, 2, 3, &dev);
    hyper_spread_backward(none, none, 0, 2, 3, &dev);
    from_device(sums, dsums, 59, &dev);
    device_drop(p);
    for (int i = 0; i < 59; i++) { check(t, float_bits(sums[i]) == 0, "[%d]: found %.9g", i, (double)sums[i]); }
    free(ones), free(sums);
    device_free(&dev);
}

int main(int argc, char** argv) {
    const Op* ops[] = {&site, &head, &collapse, &expand, &spread};
    const Promise promises[] = {
        {"reference", "the plain loops have the bits of the NumPy reference", test_reference},
        {"sinkhorn", "the numbers of the authors' code, forward and backward", test_sinkhorn},
        {"peaked", "logits hundreds apart: columns sum to 1, gradients are finite", test_peaked},
        {"obvious", "comb is contracted over its first index: stream 0 goes on as 1, f as 2", test_obvious},
        {"nothing", "N = 0: the sums are 0", test_nothing},
    };
    return op_main(argc, argv, ops, 5, promises, 5);
}
