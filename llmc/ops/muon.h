/*
Muon: one step for one matrix p (rows, columns). What is added has the singular vectors of its averaged gradient, and
singular values of about 1: all directions in which a gradient has pointed count alike.
    p, m (rows, columns)  parameters and moment, updated in place   g gradient   x direction
    g' = g * grad_scale                               m = momentum * m + g'
    x  = momentum * m + g'  (Nesterov)                x /= |x|, the Frobenius norm; a matrix of zeros stays one
    ten times:  A = x x^T     P = (b A + c (A A)) + a 1     x = P x         (Newton-Schulz)
                a, b, c: 8 times 3.4445, -4.7750, 2.0315, which make small singular values large, then twice 2, -1.5,
                0.5, which take them to 1: a singular value s becomes a s + b s^3 + c s^5
    p -= lr * (size * x + weight_decay * p)           size = 0.18 sqrt(max(rows, columns)): x then has a root mean
                square of 0.18, about that of AdamW's, whose learning rates it takes
A matrix with more rows than columns is turned for it, and its direction turned back: A is of the smaller side.
    muon_momentum    m, and x before it is divided
    muon_direction   x made of that, in `room` (muon_room_bytes), where it stays until it is used again
    muon_descend_stored  p, or n elements of it
Stored as X (CUDA: bf16 too): as in adamw.h, with its noise and its masters. There x, A and P are stored as X as well.
Cost:   10 (4 s^2 l + 2 s^3) flops, s and l the smaller and the larger side, compute bound; what is moved beside counts
        where s is small. In C of the symmetric products little more than the half below the diagonal is computed: an
        update of 512 x 2048, 24.2 GFLOP, takes 266 ms, as if at 91 GFLOP/s, 340 without that; the product P x alone
        reaches 72 (processor time of one thread, AVX-512, gcc 12, AMD EPYC shared with others, the smallest of 5).
        One thread takes a small matrix alone (MUON_ALONE), for threads meet 70 times in a direction.
        Kernels have at most 30 registers, without spills, by ptxas of CUDA 13.0 for sm_90; not measured on a GPU yet.
Error:  float: x is within 1e-5 of that of double, at (6, 17). Of singular values from 1.2e-4 of the norm of x on
        the polynomials make 1 to 1.0006, down to 2.7e-5 1 to 1.0021, of smaller ones less than 1.
Order:  element by element, parentheses as they stand; the norm has no order (global_norm.h); products are chains over
        ascending indices from 0. A and A A are symmetric, bit for bit, so that a turned matrix has the turned
        direction (but for a square one), with no turning done. Fast CUDA builds: by gemm_cublas.h.
Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; DeepSeek-AI 2026,
        arXiv:2606.19348 (polynomials, size, decay); doc/muon.md
*/
#ifndef LLMC_MUON_H
#define LLMC_MUON_H
#include "adamw.h"        // adamw_round_
#include "gemm_cublas.h"  // gemm_cublas
#include "global_norm.h"  // NormSum, norm_see, norm_add, norm_value
#include "thin_gemm.h"    // thin_gemm, gemm, gemm_matrix, gemm_transposed

enum { MUON_STEPS = 10, MUON_FAST_STEPS = 8 };
#define MUON_ALONE 6e7  // flops of a direction that one thread computes: about 1 ms, and 70 times threads would meet

typedef struct { float lr, momentum, grad_scale; } Muon;

typedef struct { float a, b, c; } MuonPolynomial;

static inline MuonPolynomial muon_polynomial(int step) {
    const MuonPolynomial fast = {3.4445f, -4.7750f, 2.0315f}, settled = {2.0f, -1.5f, 0.5f};
    return step < MUON_FAST_STEPS ? fast : settled;
}

static inline float muon_size(int rows, int columns) {
    return (float)(0.18 * sqrt((double)(rows > columns ? rows : columns)));
}

// ---- room: x twice, A and P, each at a multiple of 64 bytes, and what is known of the norm ----

static inline size_t muon_line_(size_t n) { return (n + 15) / 16 * 16; }

static inline size_t muon_room_bytes(int rows, int columns) {
    const size_t n = (size_t)rows * (size_t)columns, s = (size_t)(rows < columns ? rows : columns);
    return sizeof(float) * (2 * muon_line_(n) + 2 * muon_line_(s * s)) + sizeof(NormSum);
}

// ---- plain C: read this first; it defines every bit ----

static inline void muon_momentum_ref(float* x, float* m, const float* g, size_t n, const Muon* u) {
    for (size_t i = 0; i < n; i++) {
        const float grad = g[i] * u->grad_scale;
        m[i] = u->momentum * m[i] + grad;
        x[i] = u->momentum * m[i] + grad;
    }
}

// to (s, l) = P x, of x (s, l), s <= l. A, P (s, s)
static inline void muon_step_ref(float* to, float* A, float* P, const float* x, size_t s, size_t l, MuonPolynomial f) {
    for (size_t i = 0; i < s * s; i++) {
        float sum = 0.0f;
        for (size_t k = 0; k < l; k++) { sum = madd(x[i / s * l + k], x[i % s * l + k], sum); }
        A[i] = sum;
    }
    for (size_t i = 0; i < s * s; i++) {
        float sum = 0.0f;
        for (size_t k = 0; k < s; k++) { sum = madd(A[i / s * s + k], A[k * s + i % s], sum); }
        P[i] = f.b * A[i] + f.c * sum;
        if (i / s == i % s) { P[i] += f.a; }
    }
    for (size_t i = 0; i < s * l; i++) {
        float sum = 0.0f;
        for (size_t k = 0; k < s; k++) { sum = madd(P[i / l * s + k], x[k * l + i % l], sum); }
        to[i] = sum;
    }
}

// x becomes its direction
static inline void muon_direction_ref(float* x, int rows, int columns, float* room) {
    const int is_tall = rows > columns;
    const size_t s = (size_t)(is_tall ? columns : rows), l = (size_t)(is_tall ? rows : columns);
    float *here = room, *there = here + s * l, *A = there + s * l, *P = A + s * s;
    NormSum sum = norm_sum_init();
    norm_see_ref(&sum, x, s * l);
    norm_add_ref(&sum, x, s * l);
    const float norm = (float)sqrt(norm_value(&sum)), divisor = norm == 0.0f ? 1.0f : norm;
    for (size_t i = 0; i < s * l; i++) { here[i] = x[is_tall ? i % l * s + i / l : i] / divisor; }
    for (int step = 0; step < MUON_STEPS; step += 2) {
        muon_step_ref(there, A, P, here, s, l, muon_polynomial(step));
        muon_step_ref(here, A, P, there, s, l, muon_polynomial(step + 1));
    }
    for (size_t i = 0; i < s * l; i++) { x[is_tall ? i % l * s + i / l : i] = here[i]; }
}

static inline void muon_update_ref(float* p, float* m, const float* g, int rows, int columns, float weight_decay,
                                   const Muon* u, float* x, float* room) {
    const size_t n = (size_t)rows * (size_t)columns;
    const float size = muon_size(rows, columns);
    muon_momentum_ref(x, m, g, n, u);
    muon_direction_ref(x, rows, columns, room);
    for (size_t i = 0; i < n; i++) { p[i] -= u->lr * (size * x[i] + weight_decay * p[i]); }
}

// the same lines for one element
FM_FUNCTION float muon_element_(float p, float x, float size, float lr, float weight_decay) {
    return p - lr * (size * x + weight_decay * p);
}

#ifndef __CUDACC__  // ---- fast C: threads take blocks, lanes take elements ----

typedef float MuonX;
#define MUON_STORED  // in CUDA MuonX is float or bf16

// x may be g
static inline void muon_momentum(float* x, float* m, const float* g, size_t n, const Muon* step, const Device* dev) {
    const Muon u = *step;
    (void)dev;
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        const float grad = g[i] * u.grad_scale, moment = u.momentum * m[i] + grad;
        m[i] = moment;
        x[i] = u.momentum * moment + grad;
    }
}

// to = x / its norm
static inline void muon_divide_(float* to, const float* x, size_t n, NormSum* room, const Device* dev) {
    NormSum sum = norm_sum_init();
    (void)room;
    norm_see(&sum, x, n, dev);
    norm_add(&sum, x, n, dev);
    const float norm = (float)sqrt(norm_value(&sum)), divisor = norm == 0.0f ? 1.0f : norm;
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) { to[i] = x[i] / divisor; }
}

// P (s, s), which is A A, becomes the polynomial
static inline void muon_combine_(float* P, const float* A, int s, MuonPolynomial f, const Device* dev) {
    (void)dev;
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < s; i++) {
        float* row = P + (size_t)i * s;
        const float* of_A = A + (size_t)i * s;
        #pragma omp simd
        for (int j = 0; j < s; j++) { row[j] = f.b * of_A[j] + f.c * row[j]; }
        row[i] += f.a;
    }
}

static inline void muon_product_(float* out, size_t out_row, Matrix a, Matrix b, int M, int N, int K,
                                 const Device* dev) {
    thin_gemm(out, out_row, NULL, 0, a, b, M, N, K, dev);
}

enum { MUON_STRIP = 16 * TILE_M, MUON_SQUARE = 16 };

// element (i, j) above the diagonal is that of (j, i), square by square
static inline void muon_mirror_(float* x, int s) {
    #pragma omp parallel for schedule(dynamic)
    for (int i0 = 0; i0 < s; i0 += MUON_SQUARE) {
        for (int j0 = i0; j0 < s; j0 += MUON_SQUARE) {
            const int i_end = gemm_min_(i0 + MUON_SQUARE, s), j_end = gemm_min_(j0 + MUON_SQUARE, s);
            for (int i = i0; i < i_end; i++) {
                for (int j = j0 > i ? j0 : i + 1; j < j_end; j++) { x[(size_t)i * s + j] = x[(size_t)j * s + i]; }
            }
        }
    }
}

// out (s, s) = a b, which is symmetric: strips of rows up to the diagonal, and the rest from these
static inline void muon_symmetric_(float* out, Matrix a, Matrix b, int s, int K, const Device* dev) {
    for (int m = 0; m < s; m += MUON_STRIP) {
        const int rows = gemm_min_(MUON_STRIP, s - m);
        muon_product_(out + (size_t)m * s, (size_t)s, gemm_from_(a, m, 0), b, rows, m + rows, K, dev);
    }
    muon_mirror_(out, s);
}

// n elements of a matrix (rows, columns), from wherever the pointers stand
static inline void muon_descend_stored(float* stored, float* master, const float* x, size_t n, int rows, int columns,
                                       float weight_decay, const Muon* u, uint32_t noise_key, ElementNumbers numbers,
                                       const Device* dev) {
    float* p = master ? master : stored;
    const float size = muon_size(rows, columns), lr = u->lr;
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) { p[i] = muon_element_(p[i], x[i], size, lr, weight_decay); }
    if (master) { adamw_round_stored(stored, master, n, noise_key, numbers, dev); }
}

#else  // ---- CUDA ----

#define MUON_STORED template <typename MuonX>

static __global__ void muon_momentum_kernel(float* x, float* m, const float* g, size_t n, Muon u) {
    for (size_t i = grid_first<1>(); i < n; i += grid_step<1>()) {
        const float grad = g[i] * u.grad_scale, moment = u.momentum * m[i] + grad;
        m[i] = moment;
        x[i] = u.momentum * moment + grad;
    }
}

// x may be g
static inline void muon_momentum(float* x, float* m, const float* g, size_t n, const Muon* u, const Device* dev) {
    if (n == 0) { return; }
    muon_momentum_kernel<<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(x, m, g, n, *u);
    cudaCheck(cudaGetLastError());
}

template <typename X>
__global__ void muon_divide_kernel(X* to, const float* x, size_t n, const NormSum* sum) {
    const float norm = (float)sqrt(norm_value(sum)), divisor = norm == 0.0f ? 1.0f : norm;
    for (size_t i = grid_first<1>(); i < n; i += grid_step<1>()) { to[i] = from_float<X>(x[i] / divisor); }
}

// to = x / its norm
template <typename X>
static inline void muon_divide_(X* to, const float* x, size_t n, NormSum* sum, const Device* dev) {
    device_zero(sum, sizeof *sum, dev);
    norm_see(sum, x, n, dev);
    norm_add(sum, x, n, dev);
    muon_divide_kernel<<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(to, x, n, sum);
    cudaCheck(cudaGetLastError());
}

template <typename X>
__global__ void muon_combine_kernel(X* P, const X* A, int s, MuonPolynomial f) {
    const size_t n = (size_t)s * s;
    for (size_t i = grid_first<1>(); i < n; i += grid_step<1>()) {
        float sum = f.b * to_float(A[i]) + f.c * to_float(P[i]);
        if (i / s == i % s) { sum += f.a; }
        P[i] = from_float<X>(sum);
    }
}

// P (s, s), which is A A, becomes the polynomial
template <typename X>
static inline void muon_combine_(X* P, const X* A, int s, MuonPolynomial f, const Device* dev) {
    muon_combine_kernel<<<grid_blocks((size_t)s * s, 1, dev), GRID_BLOCK, 0, dev->stream>>>(P, A, s, f);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void muon_product_(X* out, size_t out_row, MatrixOf<X> a, MatrixOf<X> b, int M, int N, int K,
                                 const Device* dev) {
#ifndef EXACT
    if (gemm_cublas(out, out_row, NULL, NULL, 1.0f, 0, a, b, M, N, K, dev)) { return; }
#endif
    gemm(out, out_row, (const X*)NULL, 0, a, b, M, N, K, dev);
}

// out (s, s) = a b, which is symmetric
template <typename X>
static inline void muon_symmetric_(X* out, MatrixOf<X> a, MatrixOf<X> b, int s, int K, const Device* dev) {
    muon_product_(out, (size_t)s, a, b, s, s, K, dev);
}

template <typename X>
__global__ void muon_descend_kernel(X* stored, float* master, const X* x, size_t n, float size, float lr,
                                    float weight_decay, uint32_t noise_key, ElementNumbers numbers) {
    for (size_t i = grid_first<1>(); i < n; i += grid_step<1>()) {
        const float p = master ? master[i] : to_float(stored[i]);
        const float next = muon_element_(p, to_float(x[i]), size, lr, weight_decay);
        stored[i] = adamw_round_<X>(next, noise_key, element_number(numbers, i));
        if (master) { master[i] = next; }
    }
}

// n elements of a matrix (rows, columns), from wherever the pointers stand
template <typename X>
static inline void muon_descend_stored(X* stored, float* master, const X* x, size_t n, int rows, int columns,
                                       float weight_decay, const Muon* u, uint32_t noise_key, ElementNumbers numbers,
                                       const Device* dev) {
    if (n == 0) { return; }
    muon_descend_kernel<<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(
        stored, master, x, n, muon_size(rows, columns), u->lr, weight_decay, noise_key, numbers);
    cudaCheck(cudaGetLastError());
}
#endif  // __CUDACC__

// ---- both ----

// to = P x, of x (rows, columns); A, P are of the smaller side
MUON_STORED
static inline void muon_step_(MuonX* to, MuonX* A, MuonX* P, const MuonX* x, int rows, int columns, MuonPolynomial f,
                              const Device* dev) {
    const int is_tall = rows > columns, s = is_tall ? columns : rows, l = is_tall ? rows : columns;
    const size_t row = (size_t)columns, square = (size_t)s;
    if (is_tall) { muon_symmetric_(A, gemm_transposed(x, row), gemm_matrix(x, row), s, l, dev); }
    else { muon_symmetric_(A, gemm_matrix(x, row), gemm_transposed(x, row), s, l, dev); }
    muon_symmetric_(P, gemm_matrix((const MuonX*)A, square), gemm_matrix((const MuonX*)A, square), s, s, dev);
    muon_combine_(P, (const MuonX*)A, s, f, dev);
    if (is_tall) {
        muon_product_(to, row, gemm_matrix(x, row), gemm_matrix((const MuonX*)P, square), l, s, s, dev);
    } else {
        muon_product_(to, row, gemm_matrix((const MuonX*)P, square), gemm_matrix(x, row), s, l, s, dev);
    }
}

// of x (rows, columns), which stays as it is, the direction: it comes back, in `room`. `type` says as what it is stored
MUON_STORED
static inline const MuonX* muon_direction(const float* x, int rows, int columns, void* room, const MuonX* type,
                                          const Device* dev) {
    const size_t n = (size_t)rows * (size_t)columns, s = (size_t)(rows < columns ? rows : columns);
    float *here = (float*)room, *there = here + muon_line_(n), *A = there + muon_line_(n), *P = A + muon_line_(s * s);
    MuonX *at = (MuonX*)here, *next = (MuonX*)there;
    const int is_small = 10.0 * (4.0 * (double)(s * n) + 2.0 * (double)(s * s * s)) < MUON_ALONE;  // MUON_STEPS of them
    (void)type;
    if (is_small) { device_team(1); }
    muon_divide_(at, x, n, (NormSum*)(P + muon_line_(s * s)), dev);
    for (int step = 0; step < MUON_STEPS; step += 2) {
        muon_step_(next, (MuonX*)A, (MuonX*)P, (const MuonX*)at, rows, columns, muon_polynomial(step), dev);
        muon_step_(at, (MuonX*)A, (MuonX*)P, (const MuonX*)next, rows, columns, muon_polynomial(step + 1), dev);
    }
    if (is_small) { device_team(dev->n_threads); }
    return at;
}

#undef MUON_STORED
#endif  // LLMC_MUON_H
