/*
The staircase of hyper-connections (hyper_connections.h): 4 streams of D channels in the place of one, in bf16, and 24
numbers of each position that say how they mix, from products of all its channels with fn. Each step changes one thing;
main checks every step against the plain loops and, on a GPU, times it at N 4096, D 4096: X is 134 MB.

    site              what it changes                                                KB a position   on an H200
    1 threads         a thread has a number of a position, then one all of its Sinkhorn    1,600   not measured
                      iterations, then one a channel of y. Neighbouring threads read rows
                      of fn, 64 KB apart: each load asks for 24 lines
    2 warps           a warp has a number: it reads neighbouring channels                   2,300   not measured
    3 lanes           a warp has a position's Sinkhorn, a lane an element of the square      2,300   not measured
    4 shared rows     a warp has 3 rows of fn and 8 positions: a number that is read serves    490   not measured
                      8 sums, or 3. Lives in llmc/ops/hyper_kernels.h
    backward          4's: da, then dX with fn read once for 8 positions, then dfn             400   not measured

    expand
    1 one by one      a thread has a number of out and reads all streams for it                190   not measured
    2 together        a thread has 8 channels of all streams                                    72   not measured
                      Lives in llmc/ops/hyper_kernels.h

    expand's backward
    1 one by one      a thread for each number of df and dX, a warp for each dpost and dcomb   520   not measured
    2 together        a warp has a position: what it reads serves all of these                 110   not measured
                      Lives in llmc/ops/hyper_kernels.h

KB are counted, not measured: 1024 bytes that loads and stores ask caches or memory for; what lanes of a warp read
together counts once. fn, 1.6 MB of floats, stays in the second-level cache; X does not: it is 32 KB a position, so the
fewest bytes are 40 of a site forward, 176 backward (with X read three times), 72 and 112 of expand, and the limit on an
H200 4.8 TB/s: 0.034, 0.15, 0.062 and 0.096 ms.
    make build/nvcc-sm_90-bf16/cuda/hyper_connections && build/nvcc-sm_90-bf16/cuda/hyper_connections
    under dev/simt (build/simt-fast/cuda/hyper_connections): only the checks
*/
#include "llmc/ops/hyper_connections.h"  // hyper_site_forward, hyper_expand_forward, ..., the plain loops
#include "llmc/test/test.h"              // bf16_array, to_device_as, check_close, rounding_walk

enum { HC = 4, NUMBERS = (2 + HC) * HC, SQUARE = HC * HC };

// on the device. r, z, pre, post, comb: of the site
typedef struct {
    HyperShape s;
    bf16 *x, *f, *dout, *y, *out, *df, *dX;
    float *fn, *base, *scale, *r, *z, *pre, *post, *comb, *dpost, *dcomb, *dfn, *dbase, *dscale;
} Layer;

// ---- site 1: the formula, a thread for each number of z, for each position, for each channel of y ----

// block is (32, 4): a lane has a number of a position
__global__ void thread_products_kernel(float* z, float* r, const bf16* x, const float* fn, float eps, int N, int n) {
    const int t = blockIdx.x * 4 + threadIdx.y, m = threadIdx.x;
    if (t >= N || m >= NUMBERS) { return; }
    const bf16* u = x + (size_t)t * n;
    float sum = 0.0f, squares = 0.0f;
    for (int c = 0; c < n; c++) {
        sum += fn[(size_t)m * n + c] * to_float(u[c]);
        squares += to_float(u[c]) * to_float(u[c]);
    }
    const float inverse = 1.0f / sqrtf(squares / n + eps);
    z[(size_t)t * NUMBERS + m] = inverse * sum;
    if (m == 0) { r[t] = inverse; }
}

// what each row, or column, of the square is divided by
__device__ inline void divide(float (&P)[HC][HC], int by_row, float eps) {
    for (int i = 0; i < HC; i++) {
        float sum = 0.0f;
        for (int k = 0; k < HC; k++) { sum += by_row ? P[i][k] : P[k][i]; }
        for (int k = 0; k < HC; k++) { (by_row ? P[i][k] : P[k][i]) /= sum + eps; }
    }
}

// block is 32: a thread has a position
__global__ void thread_mix_kernel(float* pre, float* post, float* comb, const float* z, const float* base,
                                  const float* scale, HyperShape s) {
    const int t = blockIdx.x * 32 + threadIdx.x;
    if (t >= s.N) { return; }
    const float* of = z + (size_t)t * NUMBERS;
    float P[HC][HC];
    for (int j = 0; j < HC; j++) {
        pre[t * HC + j] = sigmoid_one(of[j] * scale[0] + base[j]) + s.eps_h;
        post[t * HC + j] = 2.0f * sigmoid_one(of[HC + j] * scale[1] + base[HC + j]);
    }
    for (int j = 0; j < HC; j++) {
        float largest = -INFINITY, sum = 0.0f;
        for (int k = 0; k < HC; k++) {
            const int m = (2 + j) * HC + k;
            P[j][k] = of[m] * scale[2] + base[m];
            largest = fmaxf(largest, P[j][k]);
        }
        for (int k = 0; k < HC; k++) { sum += P[j][k] = expf(P[j][k] - largest); }
        for (int k = 0; k < HC; k++) { P[j][k] = P[j][k] / sum + s.eps_h; }
    }
    divide(P, 0, s.eps_h);
    for (int i = 1; i < s.iters; i++) { divide(P, 1, s.eps_h), divide(P, 0, s.eps_h); }
    for (int e = 0; e < SQUARE; e++) { comb[(size_t)t * SQUARE + e] = P[e / HC][e % HC]; }
}

static void thread_products(const Layer* l, const Device* dev) {
    thread_products_kernel<<<(unsigned)ceil_div(l->s.N, 4), dim3(32, 4), 0, dev->stream>>>(l->z, l->r, l->x, l->fn,
                                                                                          l->s.eps_n, l->s.N,
                                                                                          HC * l->s.D);
}
static void thread_mix(const Layer* l, const Device* dev) {
    thread_mix_kernel<<<(unsigned)ceil_div(l->s.N, 32), 32, 0, dev->stream>>>(l->pre, l->post, l->comb, l->z, l->base,
                                                                              l->scale, l->s);
}
static void collapse(const Layer* l, const Device* dev) {
    const size_t n = (size_t)l->s.N * l->s.D;
    hyper_collapse_kernel<1><<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(l->y, l->x, l->pre, n, HC, l->s.D);
}

static void site_threads(const Layer* l, const Device* dev) {
    thread_products(l, dev), thread_mix(l, dev), collapse(l, dev);
}

// ---- 2: a warp for each number of z ----

// block is (32, 4), grid (N, NUMBERS / 4)
__global__ void warp_products_kernel(float* z, float* r, const bf16* x, const float* fn, float eps, int n) {
    const int t = blockIdx.x, m = blockIdx.y * 4 + threadIdx.y;
    const bf16* u = x + (size_t)t * n;
    float sum = 0.0f, squares = 0.0f;
    for (int c = threadIdx.x; c < n; c += WARP) {
        sum += fn[(size_t)m * n + c] * to_float(u[c]);
        squares += to_float(u[c]) * to_float(u[c]);
    }
    const float inverse = 1.0f / sqrtf(lane_sum(squares) / n + eps), dot = lane_sum(sum);
    if (threadIdx.x > 0) { return; }
    z[(size_t)t * NUMBERS + m] = inverse * dot;
    if (m == 0) { r[t] = inverse; }
}

static void warp_products(const Layer* l, const Device* dev) {
    const dim3 grid((unsigned)l->s.N, NUMBERS / 4), block(32, 4);
    warp_products_kernel<<<grid, block, 0, dev->stream>>>(l->z, l->r, l->x, l->fn, l->s.eps_n, HC * l->s.D);
}

static void site_warps(const Layer* l, const Device* dev) {
    warp_products(l, dev), thread_mix(l, dev), collapse(l, dev);
}

// ---- 3: Sinkhorn by a warp, in shared memory ----

static void site_lanes(const Layer* l, const Device* dev) {
    const dim3 block(WARP, HYPER_MIX_WARPS);
    warp_products(l, dev);
    hyper_mix_kernel<<<(unsigned)ceil_div(l->s.N, HYPER_MIX_WARPS), block, 0, dev->stream>>>(
        l->pre, l->post, l->comb, l->z, l->base, l->scale, l->s.N, NUMBERS, HC, l->s.iters, l->s.eps_h);
    collapse(l, dev);
}

// ---- 4: what the trainer calls ----

static void site_shared_rows(const Layer* l, const Device* dev) {
    hyper_site_forward(l->y, l->r, l->z, l->pre, l->post, l->comb, l->x, l->fn, l->base, l->scale, &l->s, dev);
}

// ---- expand ----

// a thread has number i of out (N, HC, D)
__global__ void one_by_one_kernel(bf16* out, const bf16* x, const bf16* f, const float* post, const float* comb,
                                  size_t n, int D) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, t = i / D / HC, k = i / D % HC, d = i % D;
    if (i >= n) { return; }
    float sum = post[t * HC + k] * to_float(f[t * D + d]);
    for (int j = 0; j < HC; j++) { sum += comb[(t * HC + j) * HC + k] * to_float(x[(t * HC + j) * D + d]); }
    out[i] = from_float<bf16>(sum);
}

static void expand_one_by_one(const Layer* l, const Device* dev) {
    const size_t n = (size_t)l->s.N * HC * l->s.D;
    one_by_one_kernel<<<(unsigned)ceil_div((int64_t)n, 256), 256, 0, dev->stream>>>(l->out, l->x, l->f, l->post,
                                                                                   l->comb, n, l->s.D);
}

static void expand_together(const Layer* l, const Device* dev) {
    hyper_expand_forward(l->out, l->x, l->f, l->post, l->comb, &l->s, dev);
}

// ---- its backward ----

// a thread has number i of df, then of dX: (N, 1 + HC, D)
__global__ void back_one_by_one_kernel(bf16* df, bf16* dX, const bf16* dout, const float* post, const float* comb,
                                       size_t n, int D) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, t = i / D / (1 + HC), d = i % D;
    const int j = (int)(i / D % (1 + HC)) - 1;  // -1: df
    if (i >= n) { return; }
    float sum = 0.0f;
    for (int k = 0; k < HC; k++) {
        sum += (j < 0 ? post[t * HC + k] : comb[(t * HC + j) * HC + k]) * to_float(dout[(t * HC + k) * D + d]);
    }
    (j < 0 ? df[t * D + d] : dX[(t * HC + j) * D + d]) = from_float<bf16>(sum);
}

// a warp has a product of rows: dpost[k], then dcomb[j][k]. block is (32), grid (N, HC + SQUARE)
__global__ void dots_kernel(float* dpost, float* dcomb, const bf16* dout, const bf16* x, const bf16* f, int D) {
    const size_t t = blockIdx.x;
    const int i = (int)blockIdx.y - HC, j = i / HC, k = (i + HC) % HC;
    const bf16 *a = i < 0 ? f + t * D : x + (t * HC + j) * D, *b = dout + (t * HC + k) * D;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < D; c += WARP) { sum += to_float(a[c]) * to_float(b[c]); }
    sum = lane_sum(sum);
    if (threadIdx.x == 0) { (i < 0 ? dpost[t * HC + k] : dcomb[t * SQUARE + i]) = sum; }
}

static void back_one_by_one(const Layer* l, const Device* dev) {
    const size_t n = (size_t)l->s.N * (1 + HC) * l->s.D;
    const dim3 grid((unsigned)l->s.N, HC + SQUARE);
    back_one_by_one_kernel<<<(unsigned)ceil_div((int64_t)n, 256), 256, 0, dev->stream>>>(l->df, l->dX, l->dout, l->post,
                                                                                        l->comb, n, l->s.D);
    dots_kernel<<<grid, WARP, 0, dev->stream>>>(l->dpost, l->dcomb, l->dout, l->x, l->f, l->s.D);
}

static void back_together(const Layer* l, const Device* dev) {
    hyper_expand_backward(l->df, l->dX, l->dpost, l->dcomb, l->dout, l->x, l->f, l->post, l->comb, &l->s, dev);
}

#ifndef SIMT
// after the others: dX is added to, y is what came from above; test_hyper_connections.c checks it
static void site_backward(const Layer* l, const Device* dev) {
    hyper_site_backward(l->dX, l->dfn, l->dbase, l->dscale, (const bf16*)l->y, l->dpost, l->dcomb, (const bf16*)l->x,
                        l->r, l->z, l->pre, l->post, l->fn, l->base, l->scale, &l->s, dev);
}
#endif

// ---- check and time ----

enum { SITE, EXPAND, BACKWARD };

typedef struct {
    const char* name;
    void (*run)(const Layer* l, const Device* dev);
    int of;
} Step;

static const Step steps[] = {
    {"site 1 threads", site_threads, SITE},
    {"site 2 warps", site_warps, SITE},
    {"site 3 lanes", site_lanes, SITE},
    {"site 4 shared rows", site_shared_rows, SITE},
    {"expand 1 one by one", expand_one_by_one, EXPAND},
    {"expand 2 together", expand_together, EXPAND},
    {"its backward 1 one by one", back_one_by_one, BACKWARD},
    {"its backward 2 together", back_together, BACKWARD},
};
enum { N_STEPS = sizeof steps / sizeof *steps };

// what a layer begins with, and the plain loops' answers
typedef struct {
    HyperShape s;
    float *x, *f, *dout, *fn, *base, *scale;
    float *y, *r, *z, *pre, *post, *comb, *out, *df, *dX, *dpost, *dcomb;
} Numbers;

static Numbers numbers(int N, int D) {
    Numbers a;
    const size_t n = (size_t)N * D, n_x = HC * n, n_fn = (size_t)NUMBERS * HC * D;
    a.s = HyperShape{N, HC, D, 20, 1e-6f, 1e-6f};
    a.x = bf16_array(n_x, 1.0f, 1), a.f = bf16_array(n, 1.0f, 2), a.dout = bf16_array(n_x, 1.0f, 3);
    a.fn = random_array(n_fn, 1.0f / sqrtf((float)HC * D), 4), a.base = random_array(NUMBERS, 1.0f, 5);
    a.scale = random_array(3, 1.0f, 6);
    a.y = filled_array(n, NAN), a.df = filled_array(n, NAN), a.out = filled_array(n_x, NAN);
    a.dX = filled_array(n_x, NAN), a.r = filled_array((size_t)N, NAN), a.z = filled_array((size_t)N * NUMBERS, NAN);
    a.pre = filled_array((size_t)N * HC, NAN), a.post = filled_array((size_t)N * HC, NAN);
    a.comb = filled_array((size_t)N * SQUARE, NAN), a.dpost = filled_array((size_t)N * HC, NAN);
    a.dcomb = filled_array((size_t)N * SQUARE, NAN);
    return a;
}

static void numbers_free(Numbers* a) {
    float* all[] = {a->x, a->f, a->dout, a->fn,   a->base, a->scale, a->y,  a->r,    a->z,
                    a->pre, a->post, a->comb, a->out, a->df,   a->dX,    a->dpost, a->dcomb};
    for (float* p : all) { free(p); }
}

static float* floats(size_t n) { return (float*)device_alloc(sizeof(float) * n, "numbers of positions"); }
static bf16* stored(size_t n) { return (bf16*)device_alloc(sizeof(bf16) * n, "streams"); }

static Layer layer(const Numbers* a, const Device* dev) {
    const size_t N = (size_t)a->s.N, n = N * a->s.D, n_x = HC * n, n_fn = (size_t)NUMBERS * HC * a->s.D;
    Layer l;
    l.s = a->s;
    l.x = to_device_as<bf16>(a->x, n_x, dev), l.f = to_device_as<bf16>(a->f, n, dev);
    l.dout = to_device_as<bf16>(a->dout, n_x, dev), l.fn = to_device(a->fn, n_fn, dev);
    l.base = to_device(a->base, NUMBERS, dev), l.scale = to_device(a->scale, 3, dev);
    l.y = stored(n), l.df = stored(n), l.out = stored(n_x), l.dX = stored(n_x);
    l.r = floats(N), l.z = floats(N * NUMBERS), l.pre = floats(N * HC), l.post = floats(N * HC);
    l.comb = floats(N * SQUARE), l.dpost = floats(N * HC), l.dcomb = floats(N * SQUARE);
    l.dfn = floats(n_fn), l.dbase = floats(NUMBERS), l.dscale = floats(3);
    return l;
}

static void layer_free(Layer* l) {
    void* all[] = {l->x,   l->f,    l->dout, l->y,     l->out,   l->df,  l->dX,    l->fn,    l->base,  l->scale,
                   l->r,   l->z,    l->pre,  l->post,  l->comb,  l->dpost, l->dcomb, l->dfn, l->dbase, l->dscale};
    for (void* p : all) { device_drop(p); }
}

static void check_array(Test* t, const char* step, const char* name, float* got, const float* want, size_t n,
                        double error) {
    char what[96];
    double* wanted = double_array(want, n);
    snprintf(what, sizeof what, "%s: %s", step, name);
    check_close(t, what, got, wanted, n, error);
    free(wanted), free(got);
}

static float* down(const float* x, size_t n, const Device* dev) {
    float* got = filled_array(n, NAN);
    device_download(got, x, sizeof(float) * n, dev);
    return got;
}

static float* down(const bf16* x, size_t n, const Device* dev) {
    float* got = filled_array(n, NAN);
    bf16* as_stored = (bf16*)new_array(n, sizeof(bf16));
    device_download(as_stored, x, sizeof(bf16) * n, dev);
    for (size_t i = 0; i < n; i++) { got[i] = (float)as_stored[i]; }
    free(as_stored);
    return got;
}

// X, f, dout and what scale and base make of z are below 1 each, comb's rows and columns sum to 1, post is below 2.
// bf16 rounds by 2^-8 of a result at most; z is a sum of 4 D products, which are below 1 / sqrt(4 D)
static void check_step(Test* t, const Step* step, const Numbers* a, const Layer* l, const Device* dev) {
    const size_t N = (size_t)a->s.N, n = N * a->s.D;
    const double numbers_error = 4.0 * rounding_walk(HC * a->s.D, sqrt(HC * a->s.D)) + 0x1p-18;
    const double dots_error = 2.0 * rounding_walk(a->s.D, a->s.D);
    if (step->of == SITE) {
        check_array(t, step->name, "z", down(l->z, N * NUMBERS, dev), a->z, N * NUMBERS, numbers_error);
        check_array(t, step->name, "post", down(l->post, N * HC, dev), a->post, N * HC, 2.0 * numbers_error);
        check_array(t, step->name, "comb", down(l->comb, N * SQUARE, dev), a->comb, N * SQUARE, 2.0 * numbers_error);
        check_array(t, step->name, "y", down(l->y, n, dev), a->y, n, HC * (0x1p-8 + numbers_error));
    } else if (step->of == EXPAND) {
        check_array(t, step->name, "out", down(l->out, HC * n, dev), a->out, HC * n, 3.0 * (0x1p-8 + numbers_error));
    } else {
        check_array(t, step->name, "df", down(l->df, n, dev), a->df, n, 2.0 * HC * (0x1p-8 + numbers_error));
        check_array(t, step->name, "dX", down(l->dX, HC * n, dev), a->dX, HC * n, 2.0 * (0x1p-8 + numbers_error));
        check_array(t, step->name, "dpost", down(l->dpost, N * HC, dev), a->dpost, N * HC, dots_error);
        check_array(t, step->name, "dcomb", down(l->dcomb, N * SQUARE, dev), a->dcomb, N * SQUARE, dots_error);
    }
}

// what a step writes becomes NaN before it
static void forget(const Layer* l, int of) {
    const size_t N = (size_t)l->s.N, n = sizeof(bf16) * N * l->s.D, n_dots = sizeof(float) * N * HC;
    if (of == EXPAND) { cudaCheck(cudaMemset(l->out, 0xff, HC * n)); }
    if (of == SITE) {
        cudaCheck(cudaMemset(l->y, 0xff, n)), cudaCheck(cudaMemset(l->z, 0xff, sizeof(float) * N * NUMBERS));
        cudaCheck(cudaMemset(l->post, 0xff, n_dots)), cudaCheck(cudaMemset(l->comb, 0xff, HC * n_dots));
    }
    if (of == BACKWARD) {
        cudaCheck(cudaMemset(l->df, 0xff, n)), cudaCheck(cudaMemset(l->dX, 0xff, HC * n));
        cudaCheck(cudaMemset(l->dpost, 0xff, n_dots)), cudaCheck(cudaMemset(l->dcomb, 0xff, HC * n_dots));
    }
}

static void check_steps(Test* t, int N, int D, const Device* dev) {
    Numbers a = numbers(N, D);
    hyper_site_forward_ref(a.y, a.r, a.z, a.pre, a.post, a.comb, a.x, a.fn, a.base, a.scale, &a.s);
    hyper_expand_forward_ref(a.out, a.x, a.f, a.post, a.comb, &a.s);
    hyper_expand_backward_ref(a.df, a.dX, a.dpost, a.dcomb, a.dout, a.x, a.f, a.post, a.comb, &a.s);
    Layer l = layer(&a, dev);
    for (int i = 0; i < N_STEPS; i++) {
        forget(&l, steps[i].of);
        steps[i].run(&l, dev);
        cudaCheck(cudaGetLastError());
        check_step(t, &steps[i], &a, &l, dev);
    }
    layer_free(&l), numbers_free(&a);
}

#ifndef SIMT
// n_bytes: the fewest
static void time_step(const char* name, void (*run)(const Layer* l, const Device* dev), const Layer* l, double n_bytes,
                      const Device* dev) {
    const double ms = device_milliseconds(20, dev, [&]() { run(l, dev); });
    printf("%-26s %8.3f ms %7.1f GB/s\n", name, ms, 1e-6 * n_bytes / ms);
}

static void time_steps(int N, int D, const Device* dev) {
    Numbers a = numbers(N, D);
    Layer l = layer(&a, dev);
    const double tensor = 2.0 * N * D, fewest[] = {(HC + 1) * tensor, (2 * HC + 1) * tensor, (3 * HC + 2) * tensor};
    for (int i = 0; i < N_STEPS; i++) { time_step(steps[i].name, steps[i].run, &l, fewest[steps[i].of], dev); }
    time_step("site's backward", site_backward, &l, (5 * HC + 2) * tensor, dev);
    layer_free(&l), numbers_free(&a);
}
#endif

int main(void) {
    Test t = {0, NULL};
    Device dev;
    device_choose(0);
    device_init(&dev, 0);
    check_steps(&t, 1, 8, &dev);
    check_steps(&t, 9, 33, &dev);
    check_steps(&t, 35, 72, &dev);
    printf("%d steps, %d wrong\n", N_STEPS, t.n_failures);
#ifndef SIMT
    if (!t.n_failures) { time_steps(4096, 4096, &dev); }
#endif
    device_free(&dev);
    return t.n_failures > 0;
}
