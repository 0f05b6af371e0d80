/*
What dev/simt promises: every part of CUDA that llmc/ uses gives the known answer, and every fault planted here is found.
    make build/simt-exact/test_simt && build/simt-exact/test_simt     on the CPU
    nvcc -x cu -std=c++17 -arch=sm_90 -I. dev/simt/test_simt.cu       the same answers from a GPU, without the planted faults and wgmma
*/
#include "llmc/core/kernel.h"  // WARP, ALL_LANES, bf16
#include "llmc/core/mma.h"     // mma_m16n8k16, ldmatrix_x4, stmatrix_x4_trans, cp_async_16
#include "llmc/core/wgmma.h"   // wgmma_ss, wgmma_rs, smem_descriptor
#include "llmc/test/test.h"    // check, check_exit, to_device, from_device
#include <cuda_fp8.h>

static const unsigned FULL = ALL_LANES;

static int* zero_ints(size_t n) { return (int*)device_alloc(sizeof(int) * n, "ints"); }  // zeros on the device

static void ints_back(int* x, int* d, size_t n) {
    cudaCheck(cudaMemcpy(x, d, sizeof(int) * n, cudaMemcpyDeviceToHost));
    device_release(d, sizeof(int) * n);
}

static int check_ints(Test* t, const char* what, const int* got, const int* want, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (got[i] != want[i]) { return check(t, 0, "%s: [%zu] found %d, expected %d", what, i, got[i], want[i]); }
    }
    return 1;
}

// ---- indices and launches ----

// counts visits, each thread at the place that its six indices give
__global__ void visit_kernel(int* visits) {
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    visits[block * (blockDim.x * blockDim.y * blockDim.z) + thread] += 1 + (int)thread % warpSize;
}

template <typename A, int N>
__global__ void fill_kernel(A* out, A value, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) { out[i] = value * (A)N; }
}

static void test_indices(Test* t) {
    enum { N = 2 * 3 * 4 * 5 * 3 * 2 };
    int got[N], want[N];
    int* d = zero_ints(N);
    visit_kernel<<<dim3(2, 3, 4), dim3(5, 3, 2)>>>(d);
    ints_back(got, d, N);
    for (int i = 0; i < N; i++) { want[i] = 1 + i % 30; }
    check_ints(t, "visits", got, want, N);
}

static int next_value(int* calls) { return ++*calls; }

static void test_launch_arguments(Test* t) {
    int got[100], want[100], calls = 0;
    for (int i = 0; i < 100; i++) { want[i] = 3; }
    int* d = zero_ints(100);
    fill_kernel<int,
                3><<<(int)ceil_div(100, 64),  // a comment with >>> and a comma,
                     32, 0>>>(d, next_value(&calls),
                              100);
    cudaCheck(cudaGetLastError());
    ints_back(got, d, 100);
    check_ints(t, "filled", got, want, 100);
    check(t, calls == 1, "an argument was evaluated %d times", calls);
}

__global__ void dynamic_kernel(int* out, int n) {
    extern __shared__ __align__(16) int line_buffer[];
    line_buffer[threadIdx.x] = (int)threadIdx.x;
    __syncthreads();
    if (threadIdx.x < (unsigned)n) { out[threadIdx.x] = line_buffer[n - 1 - (int)threadIdx.x]; }
}

static void test_refused_launches(Test* t) {
    int got[64], want[64];
    for (int i = 0; i < 64; i++) { want[i] = 63 - i; }
    int* d = zero_ints(64);
    dynamic_kernel<<<1, 1025, 8192>>>(d, 64);
    check(t, cudaGetLastError() == cudaErrorInvalidConfiguration, "1025 threads were not refused");
    dynamic_kernel<<<0, 64, 256>>>(d, 64);
    check(t, cudaGetLastError() == cudaErrorInvalidConfiguration, "a grid of 0 blocks was not refused");
    dynamic_kernel<<<1, 64, 100 << 10>>>(d, 64);
    check(t, cudaGetLastError() == cudaErrorInvalidValue, "100 KiB of shared memory were not refused");
    check(t, cudaGetLastError() == cudaSuccess, "an error was reported twice");
    cudaCheck(cudaFuncSetAttribute(dynamic_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10));
    dynamic_kernel<<<1, 64, 100 << 10>>>(d, 64);
    check(t, cudaGetLastError() == cudaSuccess, "100 KiB were refused in spite of the attribute");
    ints_back(got, d, 64);
    check_ints(t, "reversed", got, want, 64);
}

// ---- warps ----

template <typename A>
__global__ void shuffle_kernel(A* out) {
    int lane = threadIdx.x;
    A x = (A)lane + (A)100;
    out[lane] = __shfl_sync(FULL, x, 5);
    out[32 + lane] = __shfl_sync(FULL, x, lane + 1, 8);      // within groups of 8, the last asks for the first
    out[64 + lane] = __shfl_xor_sync(FULL, x, 3);
    out[96 + lane] = __shfl_up_sync(FULL, x, 2, 16);
    out[128 + lane] = __shfl_down_sync(FULL, x, 4);
    out[160 + lane] = lane < 16 ? __shfl_xor_sync(0x0000ffff, x, 1) : __shfl_sync(0xffff0000, x, 31);
}

template <typename A>
static void check_shuffles(Test* t, const char* type) {
    A got[192], *d = (A*)device_alloc(sizeof got, "shuffles");
    shuffle_kernel<<<1, 32>>>(d);
    cudaCheck(cudaMemcpy(got, d, sizeof got, cudaMemcpyDeviceToHost));
    device_release(d, sizeof got);
    for (int l = 0; l < 32; l++) {
        int want[6] = {5, (l & ~7) + (l + 1) % 8, l ^ 3, l % 16 < 2 ? l : l - 2, l + 4 < 32 ? l + 4 : l, l < 16 ? l ^ 1 : 31};
        for (int i = 0; i < 6; i++) {
            check(t, got[32 * i + l] == (A)(want[i] + 100), "%s: shuffle %d, lane %d: expected lane %d", type, i, l, want[i]);
        }
    }
}

static void test_shuffles(Test* t) {
    check_shuffles<int>(t, "int");
    check_shuffles<unsigned>(t, "unsigned");
    check_shuffles<float>(t, "float");
    check_shuffles<double>(t, "double");
    check_shuffles<long long>(t, "long long");
    check_shuffles<unsigned long long>(t, "unsigned long long");
}

__global__ void vote_kernel(int* out) {
    int lane = threadIdx.x;
    out[lane] = (int)__ballot_sync(FULL, lane % 3 == 0);
    out[32 + lane] = __any_sync(FULL, lane == 40) + 2 * __any_sync(FULL, lane == 31);
    out[64 + lane] = __all_sync(FULL, lane < 31) + 2 * __all_sync(FULL, lane < 32);
    if (lane < 8) { out[96 + lane] = (int)__ballot_sync(0xff, lane != 2); }
    __syncwarp();
    if (lane == 0) { out[96 + 8] = out[96 + 7]; }
    const int distance = (lane - 20) * (lane - 20), least = __reduce_min_sync(FULL, distance - 5);
    out[105 + lane] = least * 1000 + __reduce_max_sync(FULL, distance);
}

static void test_votes(Test* t) {
    int got[137], want[137], *d = zero_ints(137);
    vote_kernel<<<1, 32>>>(d);
    ints_back(got, d, 137);
    for (int l = 0; l < 32; l++) { want[l] = 0x49249249; want[32 + l] = 2; want[64 + l] = 2; want[105 + l] = -5 * 1000 + 400; }
    for (int l = 0; l < 9; l++) { want[96 + l] = 0xfb; }
    check_ints(t, "votes", got, want, 137);
}

// ---- blocks ----

template <typename X>
__global__ void reverse_kernel(X* out, const X* in) {
    __shared__ X tile[2][96], sum;
    __shared__ int n_seen;
    int i = threadIdx.x;
    tile[0][i] = in[blockIdx.x * 96 + i];
    if (i == 0) { n_seen = 0; }
    __syncthreads();
    tile[1][95 - i] = tile[0][i];
    atomicAdd(&n_seen, 1);
    __syncthreads();
    if (i == 95) { sum = (X)(float)n_seen; }
    __syncthreads();
    out[blockIdx.x * 96 + i] = (X)((float)tile[1][i] + (float)sum);
}

static void test_shared(Test* t) {
    float in[3 * 96], got[3 * 96];
    Device dev = test_device(1);
    for (int i = 0; i < 3 * 96; i++) { in[i] = (float)(i % 96); }
    for (int bf16 = 0; bf16 < 2; bf16++) {
        if (bf16) {
            __nv_bfloat16* d = to_device_as<__nv_bfloat16>(in, 3 * 96, &dev);
            __nv_bfloat16* out = to_device_as<__nv_bfloat16>(in, 3 * 96, &dev);
            reverse_kernel<<<3, 96, 0, dev.stream>>>(out, d);
            from_device_as(got, out, 3 * 96, &dev);
            device_drop(d);
        } else {
            float *d = to_device(in, 3 * 96, &dev), *out = to_device(in, 3 * 96, &dev);
            reverse_kernel<<<3, 96, 0, dev.stream>>>(out, d);
            from_device(got, out, 3 * 96, &dev);
            device_drop(d);
        }
        for (int i = 0; i < 3 * 96; i++) { check(t, (int)got[i] == 95 - i % 96 + 96, "bf16 %d: [%d] is %g", bf16, i, (double)got[i]); }
    }
    device_free(&dev);
}

// threads from 70 on have returned when the others meet: a barrier waits only for those that live
__global__ void block_vote_kernel(int* out) {
    int i = threadIdx.x;
    if (i >= 70) { return; }
    int n = __syncthreads_count(i % 7 == 0);
    int any = __syncthreads_or(i == 69), none = __syncthreads_or(i == 70);
    int all = __syncthreads_and(i < 70), not_all = __syncthreads_and(i > 0);
    out[i] = n + 100 * (any != 0) + 1000 * (none != 0) + 10000 * (all != 0) + 100000 * (not_all != 0);
}

static void test_block_votes(Test* t) {
    int got[96], want[96] = {0}, *d = zero_ints(96);
    block_vote_kernel<<<1, 96>>>(d);
    ints_back(got, d, 96);
    for (int i = 0; i < 70; i++) { want[i] = 10 + 100 + 10000; }
    check_ints(t, "votes of a block", got, want, 96);
}

__global__ void atomic_kernel(int* out, unsigned long long* wide) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&out[0], i);
    atomicMax(&out[1], i ^ 21);
    atomicMin(&out[2], -i);
    atomicOr((unsigned*)&out[3], 1u << i % 13);
    atomicAdd(wide, 1ULL << 33);
    for (int seen = out[4], old = ~seen; old != seen; seen = old) {  // add 2 by compare and swap
        old = atomicCAS(&out[4], seen, seen + 2);
        if (old == seen) { break; }
    }
}

static void test_atomics(Test* t) {
    int got[7], want[5] = {127 * 128 / 2, 127, -127, (1 << 13) - 1, 256}, *d = zero_ints(8);
    atomic_kernel<<<2, 64>>>(d, (unsigned long long*)(d + 6));
    int wide[8];
    ints_back(wide, d, 8);
    memcpy(got, wide, sizeof got);
    check_ints(t, "atomics", got, want, 5);
    check(t, wide[6] == 0 && wide[7] == 256, "64 bit sum is %08x%08x", (unsigned)wide[7], (unsigned)wide[6]);
}

// ---- functions ----

__global__ void bits_kernel(int* out) {
    out[0] = __popc(0xf0f0);
    out[1] = __clz(1);
    out[2] = __clz(0);
    out[3] = __ffs(8);
    out[4] = __ffs(0);
    out[5] = (int)__brev(3);
    out[6] = (int)__umulhi(0x80000000u, 6);
    out[7] = __float_as_int(-2.0f);
    out[8] = (int)__int_as_float(0x40a00000);
    out[9] = min(3, -4) + max(7u, 9u) == 5u;
    out[10] = (int)fmaf(3.0f, 4.0f, 5.0f);
    out[11] = __float2int_rn(2.5f) + 10 * __float2int_rn(3.5f);
    out[12] = __float_as_int(__fmaf_rn(0x1.000004p0f, 0x1.000004p0f, -1.0f));  // the product is not rounded
    out[13] = __float_as_int(__fmul_rn(0x1.000004p0f, 0x1.000004p0f) - 1.0f);
    out[14] = (int)(rsqrtf(0.0625f) + 0.5f);
}

static void test_bits(Test* t) {
    int got[15], *d = zero_ints(15);
    const int want[15] = {8, 31, 32, 4, 0, (int)0xc0000000, 3, (int)0xc0000000, 5, 1, 17, 42, 0x35000001, 0x35000000, 4};
    bits_kernel<<<1, 1>>>(d);
    ints_back(got, d, 15);
    check_ints(t, "bit functions", got, want, 15);
}

// all 2^16 bf16: as float; back again; and a float a quarter, half and three quarters of the way to the next
__global__ void bf16_kernel(float* value, int* rounded) {
    int u = blockIdx.x * blockDim.x + threadIdx.x;
    value[u] = __bfloat162float(__ushort_as_bfloat16((unsigned short)u));
    for (unsigned part = 0; part < 4; part++) {
        float x = __uint_as_float((unsigned)u << 16 | part << 14);
        rounded[4 * u + part] = __bfloat16_as_ushort(__float2bfloat16_rn(x));
    }
}

static void test_bf16(Test* t) {
    enum { N = 1 << 16 };
    static float value[N];
    static int rounded[4 * N];
    Device dev = test_device(1);
    float* d_value = to_device(value, N, &dev);
    int* d_rounded = zero_ints(4 * N);
    bf16_kernel<<<N / 256, 256, 0, dev.stream>>>(d_value, d_rounded);
    from_device(value, d_value, N, &dev);
    ints_back(rounded, d_rounded, 4 * N);
    for (int u = 0; u < N; u++) {
        int nan = (u & 0x7fff) > 0x7f80;
        check(t, nan ? isnan(value[u]) : float_bits(value[u]) == (uint32_t)u << 16, "bf16 %04x is %g", (unsigned)u, (double)value[u]);
        for (int part = 0; part < 4; part++) {
            int up = part == 3 || (part == 2 && u % 2 == 1);  // half way: to the even one
            int want = nan || ((u & 0x7fff) == 0x7f80 && part > 0) ? 0x7fff : u + up;
            check(t, rounded[4 * u + part] == want, "%04x and %d quarters: rounded to %04x, expected %04x", (unsigned)u, part,
                  (unsigned)rounded[4 * u + part], (unsigned)want);
        }
    }
    device_free(&dev);
}

__global__ void fp8_kernel(float* value, const float* x, int* rounded, int n) {
    __nv_fp8_e4m3 a;
    __nv_fp8_e5m2 b;
    a.__x = b.__x = (unsigned char)threadIdx.x;
    value[threadIdx.x] = (float)a;
    value[256 + threadIdx.x] = (float)b;
    for (int i = threadIdx.x; i < n; i += 256) {
        rounded[i] = __nv_fp8_e4m3(x[i]).__x;
        rounded[n + i] = __nv_fp8_e5m2(x[i]).__x;
    }
}

// the nearest finite number of a format, ties to the even one: by search
static int fp8_nearest(const float* value, float x) {
    int best = 0;
    for (int u = 0; u < 128; u++) {
        if (!isfinite(value[u])) { continue; }
        double apart = fabs((double)value[u] - fabs((double)x)), least = fabs((double)value[best] - fabs((double)x));
        if (apart < least || (apart == least && u % 2 == 0)) { best = u; }
    }
    return best | (signbit(x) ? 0x80 : 0);
}

static void test_fp8(Test* t) {
    enum { N = 4096 };
    Device dev = test_device(1);
    float value[512] = {0};
    static float x[N];
    static int rounded[2 * N];
    float* random = random_array(N, 1.0f, 5);
    for (int i = 0; i < N; i++) { x[i] = i < 512 ? (float)(i - 256) * 0x1p-11f : ldexpf(random[i], i % 40 - 22); }
    float *d_value = to_device(value, 512, &dev), *d_x = to_device(x, N, &dev);
    int* d_rounded = zero_ints(2 * N);
    fp8_kernel<<<1, 256, 0, dev.stream>>>(d_value, d_x, d_rounded, N);
    from_device(value, d_value, 512, &dev);
    ints_back(rounded, d_rounded, 2 * N);
    device_drop(d_x);
    free(random);
    check(t, value[0x7e] == 448.0f && value[0x08] == 0x1p-6f && value[0x01] == 0x1p-9f && isnan(value[0x7f]), "e4m3: landmarks");
    check(t, value[256 + 0x7b] == 57344.0f && value[256 + 0x04] == 0x1p-14f && value[256 + 0x01] == 0x1p-16f &&
             isinf(value[256 + 0x7c]) && isnan(value[256 + 0x7d]), "e5m2: landmarks");
    for (int u = 1; u < 0x7c; u++) {
        check(t, value[u] > value[u - 1] && value[256 + u] > value[256 + u - 1], "fp8 %02x is not larger than the one before", (unsigned)u);
        check(t, value[128 + u] == -value[u] && value[256 + 128 + u] == -value[256 + u], "fp8 %02x: the sign is not bit 7", (unsigned)u);
    }
    for (int i = 0; i < N; i++) {
        for (int f = 0; f < 2; f++) {
            int want = fp8_nearest(value + 256 * f, x[i]);
            check(t, rounded[f * N + i] == want, "%s of %g: %02x, expected %02x", f ? "e5m2" : "e4m3", (double)x[i],
                  (unsigned)rounded[f * N + i], (unsigned)want);
        }
    }
    device_free(&dev);
}

// ---- tensor cores ----

// d (16, 8) = a (16, 16) * b (8, 16)^T, b as a weight, or b (16, 8) where transposed; fragments by ldmatrix
__global__ void mma_kernel(float* d, const __nv_bfloat16* a, const __nv_bfloat16* b, int transposed) {
    __shared__ __align__(16) __nv_bfloat16 a_tile[16][24], b_tile[16][24];  // 48 bytes a row: multiples of 16, other banks
    int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    int n_cols = transposed ? 8 : 16;
    for (int i = lane; i < 256; i += 32) { a_tile[i / 16][i % 16] = a[i]; }
    for (int i = lane; i < 128; i += 32) { b_tile[i / n_cols][i % n_cols] = b[i]; }
    __syncthreads();
    unsigned a_frag[4], b_frag[4], b_pair[2];
    float c[4] = {1.0f, 2.0f, 3.0f, 4.0f}, sum[4];
    ldmatrix_x4(a_frag, &a_tile[lane % 16][lane / 16 * 8]);
    if (transposed) {
        ldmatrix_x4_trans(b_frag, &b_tile[lane % 16][0]);
    } else {
        ldmatrix_x4(b_frag, &b_tile[lane % 8][lane / 8 % 2 * 8]);
    }
    b_pair[0] = b_frag[0];
    b_pair[1] = b_frag[1];
    mma_m16n8k16(sum, a_frag, b_pair, c);
    for (int i = 0; i < 4; i++) { d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i]; }
}

static void test_mma(Test* t) {
    Device dev = test_device(1);
    float *a = random_array(256, 1.0f, 1), *b = random_array(128, 1.0f, 2), d[128];
    for (int i = 0; i < 256; i++) { a[i] = float_from_bits(float_bits(a[i]) & 0xffff0000); }
    for (int i = 0; i < 128; i++) { b[i] = float_from_bits(float_bits(b[i]) & 0xffff0000); }
    for (int transposed = 0; transposed < 2; transposed++) {
        __nv_bfloat16 *d_a = to_device_as<__nv_bfloat16>(a, 256, &dev), *d_b = to_device_as<__nv_bfloat16>(b, 128, &dev);
        float* d_d = to_device(a, 128, &dev);
        mma_kernel<<<1, 32, 0, dev.stream>>>(d_d, d_a, d_b, transposed);
        from_device(d, d_d, 128, &dev);
        device_drop(d_a);
        device_drop(d_b);
        double want[128];
        for (int m = 0; m < 16; m++) {
            for (int n = 0; n < 8; n++) {
                double sum = 1 + n % 2 + m / 8 * 2;  // what c holds there
                for (int k = 0; k < 16; k++) { sum += (double)a[m * 16 + k] * (double)b[transposed ? k * 8 + n : n * 16 + k]; }
                want[m * 8 + n] = sum;
            }
        }
        check_close(t, transposed ? "b (16, 8)" : "b (8, 16)", d, want, 128, 17 * 20 * 0x1p-24);  // 17 roundings below 20
    }
    free(a);
    free(b);
    device_free(&dev);
}

// ---- products of a warpgroup ----

#if defined(SIMT) || defined(WGMMA)
typedef enum {
    RIGHT, NO_FENCE, NO_PROXY_FENCE, NO_COMMIT, NO_WAIT, EARLY_READ, EARLY_WRITE, EARLY_OPERAND, EARLY_COPY, SECOND_ROW, BEYOND,
    ONE_WARP_LESS
} WgmmaFault;

// rows of 64 elements into a tile of 128-byte rows, chunk c of row r at c ^ (r % 8)
__device__ static void copy_tile(bf16* tile, const bf16* x, int rows, int stride) {
    for (int i = threadIdx.x; i < rows * 8; i += WARPGROUP) {
        int row = i / 8, chunk = i % 8;
        cp_async_16(tile + row * 64 + (chunk ^ row % 8) * 8, x + row * stride + chunk * 8);
    }
    cp_async_commit();
}

// d (64, N) = a (64, 64) b (64, N). Transposed: a holds (k, m), b holds (k, n); else (m, k) and (n, k)
template <int A_TRANSPOSED, int B_TRANSPOSED, int REGISTERS, int N>
__global__ void wgmma_kernel(float* d, const bf16* a, const bf16* b, WgmmaFault fault) {
    extern __shared__ __align__(1024) bf16 wgmma_tiles[];
    bf16 *a_tile = wgmma_tiles, *b_tile = a_tile + 64 * 64;
    int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 + lane / 4;
    unsigned operands[4][4];
    for (int i = 0; i < 16; i++) {
        int m = row + i % 2 * 8, k = 16 * (i / 4) + lane % 4 * 2 + i / 2 % 2 * 8;
        operands[i / 4][i % 4] = *(const unsigned*)(a + m * 64 + k);
    }
    copy_tile(a_tile, a, 64, 64);
    for (int n = 0; n < N; n += 64) {
        copy_tile(b_tile + n * 64, b + (B_TRANSPOSED ? n : n * 64), N < 64 ? N : 64, B_TRANSPOSED ? N : 64);
    }
    cp_async_wait<0>();
    if (fault != NO_PROXY_FENCE || threadIdx.x != 77) { fence_proxy_async(); }
    __syncthreads();
    if (fault == ONE_WARP_LESS && threadIdx.x < WARP) { return; }
    uint64_t a_matrix = smem_descriptor(a_tile + (fault == SECOND_ROW ? 64 : 0)),
             b_matrix = smem_descriptor(b_tile + (fault == BEYOND ? 64 * 64 : 0), 64 * 64 * 2);
    float sums[1][N / 8][4];
    if (fault != NO_FENCE) { wgmma_fence(); }
    #pragma unroll
    for (int k = 0; k < 4; k++) {
        const uint64_t b_now = b_matrix + k * (B_TRANSPOSED ? 2048 : 32) / 16;
        if (REGISTERS) {
            wgmma_rs<B_TRANSPOSED>(sums, operands[k], b_now, k > 0);
        } else {
            wgmma_ss<A_TRANSPOSED, B_TRANSPOSED>(sums, a_matrix + k * (A_TRANSPOSED ? 2048 : 32) / 16, b_now, k > 0);
        }
    }
    if (fault != NO_COMMIT) { wgmma_commit(); }
    if (fault == EARLY_COPY) {
        __syncthreads();
        copy_tile(b_tile, a, 64, 64);
    }
    if (fault == EARLY_READ) { d[threadIdx.x] = sums[0][0][0]; }
    if (fault == EARLY_WRITE) { sums[0][3][1] = 0.0f; }
    if (fault == EARLY_OPERAND) { operands[3][2] = 0; }
    if (fault != NO_WAIT) { wgmma_wait<0>(); }
    wgmma_keep(sums);
    cp_async_wait<0>();
    for (int i = 0; i < N / 2; i++) {
        if (fault == EARLY_READ) { break; }
        d[(row + i % 4 / 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[0][i / 4][i % 4];
    }
}

template <int N>
static size_t wgmma_bytes() { return (64 + N) * 64 * sizeof(bf16); }

template <int A_TRANSPOSED, int B_TRANSPOSED, int REGISTERS, int N>
static void check_wgmma(Test* t, const char* what) {
    Device dev = test_device(1);
    static float a[64 * 64], b[64 * N], d[64 * N];
    for (int i = 0; i < 64 * 64; i++) { a[i] = (float)(i * 37 % 11 - 5); }  // small integers: every sum is exact
    for (int i = 0; i < 64 * N; i++) { b[i] = (float)(i * 29 % 13 - 6); }
    bf16 *d_a = to_device_as<bf16>(a, 64 * 64, &dev), *d_b = to_device_as<bf16>(b, 64 * N, &dev);
    float* d_d = to_device(d, 64 * N, &dev);
    wgmma_kernel<A_TRANSPOSED, B_TRANSPOSED, REGISTERS, N><<<1, WARPGROUP, wgmma_bytes<N>(), dev.stream>>>(d_d, d_a, d_b, RIGHT);
    from_device(d, d_d, 64 * N, &dev);
    device_drop(d_a), device_drop(d_b);
    int n_wrong = 0;
    for (int m = 0; m < 64; m++) {
        for (int n = 0; n < N; n++) {
            float want = 0.0f;
            for (int k = 0; k < 64; k++) { want += a[A_TRANSPOSED ? k * 64 + m : m * 64 + k] * b[B_TRANSPOSED ? k * N + n : n * 64 + k]; }
            n_wrong += d[m * N + n] != want;
        }
    }
    check(t, n_wrong == 0, "%s: %d of %d sums are wrong", what, n_wrong, 64 * N);
    device_free(&dev);
}

template <int N>
static void check_wgmmas_turned(Test* t) {  // rows of b are columns, of which there may be fewer than 64
    check_wgmma<0, 0, 0, N>(t, "a (m, k), b (n, k)");
    check_wgmma<1, 0, 0, N>(t, "a (k, m), b (n, k)");
    check_wgmma<0, 0, 1, N>(t, "a in registers, b (n, k)");
}

template <int N>
static void check_wgmmas(Test* t) {
    check_wgmmas_turned<N>(t);
    check_wgmma<0, 1, 0, N>(t, "a (m, k), b (k, n)");
    check_wgmma<1, 1, 0, N>(t, "a (k, m), b (k, n)");
    check_wgmma<0, 1, 1, N>(t, "a in registers, b (k, n)");
}

static void test_wgmma(Test* t) {
    check_wgmmas_turned<32>(t);
    check_wgmmas_turned<48>(t);
    check_wgmmas<64>(t);
    check_wgmmas<128>(t);
    check_wgmmas<192>(t);
    check_wgmmas<256>(t);
}

// four matrices in fragments, of which each element says whose it is
__global__ void stmatrix_kernel(unsigned short* out) {
    __shared__ __align__(16) unsigned short tile[4][8][8];
    int lane = threadIdx.x;
    unsigned r[4];
    for (int j = 0; j < 4; j++) { r[j] = (unsigned)(8 * lane + 2 * j) | (unsigned)(8 * lane + 2 * j + 1) << 16; }
    stmatrix_x4_trans(tile[lane / 8][lane % 8], r);
    __syncwarp();
    for (int i = lane; i < 4 * 8 * 8; i += 32) { out[i] = tile[i / 64][i / 8 % 8][i % 8]; }
}

// lane 4g + t has rows 2t and 2t + 1 of column g of each matrix
static void test_stmatrix(Test* t) {
    Device dev = test_device(1);
    unsigned short found[4][8][8], *out = (unsigned short*)device_alloc(sizeof found, "out");
    stmatrix_kernel<<<1, WARP, 0, dev.stream>>>(out);
    device_download(found, out, sizeof found, &dev);
    device_sync(&dev);
    for (int j = 0; j < 4; j++) {
        for (int row = 0; row < 8; row++) {
            for (int g = 0; g < 8; g++) {
                int want = 8 * (4 * g + row / 2) + 2 * j + row % 2;
                check(t, found[j][row][g] == want, "matrix %d, row %d, column %d: %d, expected %d", j, row, g, found[j][row][g], want);
            }
        }
    }
    device_release(out, sizeof found);
    device_free(&dev);
}
#else
static void test_wgmma(Test* t) { skip(t, "not built for sm_90a"); }
static void test_stmatrix(Test* t) { skip(t, "not built for sm_90a"); }
#endif

// ---- asynchronous copies ----

// sums rows of 32 floats, each lane 16 bytes of a piece of 4 rows; while one piece is added, the next is on its way
__global__ void pipeline_kernel(float* out, const float* in, int n_pieces, int n_floats) {
    __shared__ __align__(16) float stage[2][128];
    int lane = threadIdx.x;
    float sum = 0.0f;
    for (int piece = 0; piece <= n_pieces; piece++) {
        if (piece < n_pieces) {
            int at = piece * 128 + lane * 4, n_valid = n_floats - at < 0 ? 0 : n_floats - at < 4 ? n_floats - at : 4;
            cp_async_16_zfill(&stage[piece % 2][lane * 4], in + (n_valid ? at : 0), 4 * n_valid);
        }
        cp_async_commit();
        if (piece == 0) { continue; }
        cp_async_wait<1>();  // all but the newest group: the piece before this one
        __syncthreads();
        for (int row = 0; row < 4; row++) { sum += stage[(piece - 1) % 2][row * 32 + lane]; }
        __syncthreads();
    }
    cp_async_wait<0>();
    out[lane] = sum;
}

static void test_async(Test* t) {
    enum { N = 3 * 128 + 50 };
    float in[N + 2], got[32], want[32] = {0};
    for (int i = 0; i < N; i++) { in[i] = (float)(i % 101); want[i % 32] += in[i]; }
    in[N] = in[N + 1] = NAN;
    Device dev = test_device(1);
    float *d_in = to_device(in, N + 2, &dev), *d_out = to_device(in, 32, &dev);
    pipeline_kernel<<<1, 32, 0, dev.stream>>>(d_out, d_in, 4, N);
    from_device(got, d_out, 32, &dev);
    device_drop(d_in);
    check_bits(t, "sums", got, want, 32);
    device_free(&dev);
}

// ---- the host's side ----

static void test_host(Test* t) {
    float x[8] = {0, 1, 2, 3, 4, 5, 6, 7}, y[8] = {0}, ms = -1.0f, *d, *e, *pinned;
    int n = 0, sms = 0;
    size_t n_free = 0, n_total = 0;
    cudaStream_t stream;
    cudaEvent_t start, stop;
    cudaCheck(cudaStreamCreate(&stream));
    cudaCheck(cudaEventCreate(&start));
    cudaCheck(cudaEventCreate(&stop));
    cudaCheck(cudaMalloc((void**)&d, sizeof x));
    cudaCheck(cudaMalloc((void**)&e, sizeof x));
    cudaCheck(cudaMallocHost((void**)&pinned, sizeof x));
    cudaCheck(cudaEventRecord(start, stream));
    cudaCheck(cudaMemcpyAsync(d, x, sizeof x, cudaMemcpyHostToDevice, stream));
    cudaCheck(cudaMemcpyAsync(e, d, sizeof x, cudaMemcpyDeviceToDevice, stream));
    cudaCheck(cudaMemsetAsync(e + 2, 0, 4, stream));
    fill_kernel<float, 2><<<1, 32, 0, stream>>>(d, 1.5f, 8);
    cudaCheck(cudaMemcpyAsync(pinned, e, sizeof x, cudaMemcpyDeviceToHost, stream));
    cudaCheck(cudaEventRecord(stop, stream));
    cudaCheck(cudaStreamSynchronize(stream));
    cudaCheck(cudaEventElapsedTime(&ms, start, stop));
    cudaCheck(cudaMemcpy(y, d, sizeof y, cudaMemcpyDeviceToHost));
    check(t, pinned[1] == 1.0f && pinned[2] == 0.0f && pinned[7] == 7.0f && y[7] == 3.0f, "copies: %g %g %g %g", (double)pinned[1],
          (double)pinned[2], (double)pinned[7], (double)y[7]);
    check(t, ms >= 0.0f, "elapsed time %g ms", (double)ms);
    cudaCheck(cudaGetDeviceCount(&n));
    cudaCheck(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    cudaCheck(cudaMemGetInfo(&n_free, &n_total));
    check(t, n >= 1 && sms >= 1 && n_free < n_total, "%d devices, %d multiprocessors, %zu of %zu bytes free", n, sms, n_free, n_total);
    cudaCheck(cudaFreeHost(pinned));
    cudaCheck(cudaFree(e));
    cudaCheck(cudaFree(d));
    cudaCheck(cudaEventDestroy(stop));
    cudaCheck(cudaEventDestroy(start));
    cudaCheck(cudaStreamDestroy(stream));
}

#ifdef SIMT
// ---- planted faults: each kernel is wrong in one place ----

__global__ void missing_barrier_kernel(float* out) {
    __shared__ float tile[64];
    tile[threadIdx.x] = (float)threadIdx.x;
    out[threadIdx.x] = tile[63 - threadIdx.x];  // of the other warp
}

__global__ void missing_syncwarp_kernel(float* out) {
    __shared__ float tile[32];
    tile[threadIdx.x] = (float)threadIdx.x;
    out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

// the first barrier is there, but not the one that lets the tile be written again
__global__ void missing_second_barrier_kernel(float* out) {
    __shared__ float tile[64];
    float sum = 0.0f;
    for (int round = 0; round < 2; round++) {
        tile[threadIdx.x] = (float)(threadIdx.x + 100 * round);
        __syncthreads();
        sum += tile[63 - threadIdx.x];
    }
    out[threadIdx.x] = sum;
}

__global__ void in_place_kernel(float* out) {
    float x = out[63 - threadIdx.x];
    out[threadIdx.x] = x + 1.0f;
}

// floats added in the order in which threads draw an integer ticket
__global__ void ticket_kernel(float* out, int* tickets) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int ticket = atomicAdd(&tickets[0], 1);
    out[0] += ticket % 2 ? 1e8f * (float)(i + 1) : 0.1f;
}

__global__ void blocks_kernel(float* out) { out[0] = out[0] * 0.5f + (float)blockIdx.x; }

__global__ void uninitialised_kernel(float* out) {
    __shared__ float tile[64];
    if (threadIdx.x < 63) { tile[threadIdx.x] = 1.0f; }
    __syncthreads();
    out[threadIdx.x] = fmaxf(tile[threadIdx.x], 0.0f);  // fmaxf turns a NaN into 0
}

__global__ void missing_wait_kernel(float* out, const float* in) {
    __shared__ __align__(16) float stage[128];
    cp_async_16(&stage[threadIdx.x * 4], in);
    cp_async_commit();
    cp_async_wait<1>();  // all but the newest group, and there is only that one
    __syncthreads();
    out[threadIdx.x] = stage[threadIdx.x];
    cp_async_wait<0>();
}

__global__ void no_wait_at_all_kernel(float* out, const float* in) {
    __shared__ __align__(16) float stage[128];
    cp_async_16(&stage[threadIdx.x * 4], in);
    out[threadIdx.x] = 0.0f;
}

// the next piece may arrive from its issue on, not only at the wait
__global__ void overwritten_kernel(float* out, const float* in) {
    __shared__ __align__(16) float stage[128];
    cp_async_16(&stage[threadIdx.x * 4], in);
    cp_async_commit();
    cp_async_wait<0>();
    cp_async_16(&stage[threadIdx.x * 4], in + 4);
    cp_async_commit();
    __syncthreads();
    out[threadIdx.x] = stage[127 - threadIdx.x * 4];  // of the first copy, the writer hopes
    __syncthreads();
    cp_async_wait<0>();
}

// memory that only one order writes at all
__global__ void late_write_kernel(float* out, int* tickets) {
    int ticket = atomicAdd(&tickets[0], 1);
    if (ticket == 0 && threadIdx.x == 63) { out[0] = -1.0f; }
}

__global__ void divergent_barrier_kernel(float* out) {
    if (threadIdx.x < 32) {
        __syncthreads();
        out[threadIdx.x] = 1.0f;
    } else {
        out[threadIdx.x] = 2.0f;
        __syncthreads();
    }
}

__global__ void half_a_warp_kernel(float* out) {
    float x = (float)threadIdx.x;
    if (threadIdx.x < 16) { x = __shfl_xor_sync(FULL, x, 1); }  // the mask names all lanes
    __syncthreads();
    out[threadIdx.x] = x;
}

__global__ void outside_mask_kernel(float* out) { out[threadIdx.x] = __shfl_xor_sync(0x0000ffff, (float)threadIdx.x, 1); }

__global__ void source_outside_mask_kernel(float* out) {
    if (threadIdx.x < 16) { out[threadIdx.x] = __shfl_sync(0x0000ffff, (float)threadIdx.x, 20); }
}

__global__ void returned_lane_kernel(float* out, int n) {
    if ((int)threadIdx.x >= n) { return; }
    out[threadIdx.x] = __shfl_xor_sync(FULL, (float)threadIdx.x, 1);
}

__global__ void two_places_kernel(float* out) {
    float x = (float)threadIdx.x;
    if (threadIdx.x % 2 == 0) {
        x = __shfl_xor_sync(FULL, x, 1);
    } else {
        x = __shfl_xor_sync(FULL, x, 2);
    }
    out[threadIdx.x] = x;
}

__global__ void beyond_static_kernel(float* out, int n) {
    __shared__ float tile[64];
    tile[threadIdx.x] = 1.0f;
    __syncthreads();
    const float* p = tile;
    out[threadIdx.x] = p[threadIdx.x + (unsigned)n];
}

__global__ void beyond_dynamic_kernel(float* out, int n) {
    extern __shared__ float beyond_buffer[];
    beyond_buffer[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = beyond_buffer[threadIdx.x + (unsigned)n];
}

__global__ void beyond_global_kernel(float* out, int n) { out[threadIdx.x] = out[threadIdx.x + (unsigned)n]; }

__global__ void misaligned_kernel(float* out) { *(float4*)(out + 1) = make_float4(1, 2, 3, 4); }

// runs one of them on 64 threads in 1 block, or as its line says
static void plant(void* arg) {
    const char* fault = (const char*)arg;
    float x[256], *d, *e, *pinned;
    for (int i = 0; i < 256; i++) { x[i] = (float)i; }
    int* tickets = zero_ints(1);
    cudaCheck(cudaMalloc((void**)&d, 64 * sizeof(float)));
    cudaCheck(cudaMalloc((void**)&e, 64 * sizeof(float)));
    cudaCheck(cudaMemcpy(d, x, 64 * sizeof(float), cudaMemcpyHostToDevice));
    cudaCheck(cudaMemcpy(e, x, 64 * sizeof(float), cudaMemcpyHostToDevice));
    if (!strcmp(fault, "missing barrier")) { missing_barrier_kernel<<<1, 64>>>(d); }
    if (!strcmp(fault, "missing second barrier")) { missing_second_barrier_kernel<<<1, 64>>>(d); }
    if (!strcmp(fault, "missing syncwarp")) { missing_syncwarp_kernel<<<1, 32>>>(d); }
    if (!strcmp(fault, "in place")) { in_place_kernel<<<1, 64>>>(d); }
    if (!strcmp(fault, "ticket")) { ticket_kernel<<<1, 64>>>(d, tickets); }
    if (!strcmp(fault, "late write")) { late_write_kernel<<<1, 64>>>(d, tickets); }
    if (!strcmp(fault, "blocks")) { blocks_kernel<<<3, 1>>>(d); }
    if (!strcmp(fault, "uninitialised")) { uninitialised_kernel<<<1, 64>>>(d); }
    if (!strcmp(fault, "missing wait")) { missing_wait_kernel<<<1, 32>>>(d, e); }
    if (!strcmp(fault, "no wait at all")) { no_wait_at_all_kernel<<<1, 32>>>(d, e); }
    if (!strcmp(fault, "overwritten")) { overwritten_kernel<<<1, 32>>>(d, e); }
    if (!strcmp(fault, "divergent barrier")) { divergent_barrier_kernel<<<1, 64>>>(d); }
    if (!strcmp(fault, "half a warp")) { half_a_warp_kernel<<<1, 32>>>(d); }
    if (!strcmp(fault, "outside mask")) { outside_mask_kernel<<<1, 32>>>(d); }
    if (!strcmp(fault, "source outside mask")) { source_outside_mask_kernel<<<1, 32>>>(d); }
    if (!strcmp(fault, "returned lane")) { returned_lane_kernel<<<1, 32>>>(d, 31); }
    if (!strcmp(fault, "short warp")) { returned_lane_kernel<<<1, 48>>>(d, 48); }
    if (!strcmp(fault, "two places")) { two_places_kernel<<<1, 32>>>(d); }
    if (!strcmp(fault, "beyond static")) { beyond_static_kernel<<<1, 64>>>(d, 1); }
    if (!strcmp(fault, "beyond dynamic")) { beyond_dynamic_kernel<<<1, 64, 64 * sizeof(float)>>>(d, 1); }
    if (!strcmp(fault, "beyond global")) { beyond_global_kernel<<<1, 64>>>(d, 1); }
    if (!strcmp(fault, "misaligned")) { misaligned_kernel<<<1, 1>>>(d); }
    if (!strcmp(fault, "host reads")) { x[0] = d[3]; }
    if (!strcmp(fault, "wrong direction")) { cudaMemcpy(x, d, 4, cudaMemcpyHostToDevice); }
    if (!strcmp(fault, "host source")) { cudaMemcpy(d, x, 4, cudaMemcpyDeviceToDevice); }
    if (!strcmp(fault, "copy too long")) { cudaMemcpy(d + 32, x, 64 * sizeof(float), cudaMemcpyHostToDevice); }
    if (!strcmp(fault, "source changed")) {
        cudaCheck(cudaMallocHost((void**)&pinned, sizeof x));
        pinned[0] = 1.0f;
        cudaMemcpyAsync(d, pinned, 64 * sizeof(float), cudaMemcpyHostToDevice, NULL);
        pinned[0] = 2.0f;
        cudaDeviceSynchronize();
    }
    cudaStream_t stream, other;
    cudaEvent_t event;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaCheck(cudaStreamCreate(&stream));
    cudaCheck(cudaStreamCreate(&other));
    cudaCheck(cudaEventCreate(&event));
    if (!strncmp(fault, "capture", 7)) { cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)); }
    if (!strcmp(fault, "capture, another stream")) { returned_lane_kernel<<<1, 32, 0, other>>>(d, 32); }
    if (!strcmp(fault, "capture, event")) { cudaEventRecord(event, stream); }
    if (!strcmp(fault, "capture, graph leaked")) {
        cudaCheck(cudaStreamEndCapture(stream, &graph));
        cudaCheck(cudaGraphInstantiate(&executable, graph, 0));
        cudaFree(d), cudaFree(e), cudaFree(tickets);
        fflush(stdout);
        exit(0);
    }
    if (!strcmp(fault, "freed twice")) { cudaFree(e); cudaFree(e); }
    if (!strcmp(fault, "leak")) { fflush(stdout); exit(0); }
}

// one of the products of a warpgroup, wrong in one thing
static void plant_wgmma(void* arg) {
    float *d;
    bf16* x;
    cudaCheck(cudaMalloc((void**)&d, 64 * 128 * sizeof(float)));
    cudaCheck(cudaMalloc((void**)&x, 64 * 128 * sizeof(bf16)));
    cudaCheck(cudaMemset(x, 0, 64 * 128 * sizeof(bf16)));
    WgmmaFault fault = *(const WgmmaFault*)arg;
    if (fault == EARLY_OPERAND) {
        cudaCheck(cudaMemset(x, 1, 64 * 128 * sizeof(bf16)));
        wgmma_kernel<0, 0, 1, 128><<<1, WARPGROUP, wgmma_bytes<128>()>>>(d, x, x, fault);
    } else {
        wgmma_kernel<0, 0, 0, 128><<<1, WARPGROUP, wgmma_bytes<128>()>>>(d, x, x, fault);
    }
    float first;
    cudaCheck(cudaMemcpy(&first, d, sizeof first, cudaMemcpyDeviceToHost));
    fprintf(stderr, "the first sum is %g\n", (double)first);
    fflush(stdout);
    _exit(first == 0.0f ? 0 : 1);
}

static void test_wgmma_faults(Test* t) {
    if (simt_orders() < 2) { skip(t, "one order asked for"); return; }
    const struct {
        WgmmaFault fault;
        const char* text;
    } faults[] = {
        {NO_FENCE, "no wgmma.fence since the last wait"},
        {NO_PROXY_FENCE, "reads what thread 77 copied without fence.proxy.async"},
        {NO_COMMIT, "returned with 4 wgmma that it never waited for"},
        {NO_WAIT, "returned with 4 wgmma that it never waited for"},
        {EARLY_READ, "the first sum is nan"},
        {EARLY_WRITE, "its sums were written before the wait at llmc/core/wgmma.h"},
        {EARLY_OPERAND, "its operand a was written before the wait at llmc/core/wgmma.h"},
        {EARLY_COPY, "race: kernel wgmma_kernel"},
        {SECOND_ROW, "the matrix begins at byte 1152, which is no first row of eight"},
        {BEYOND, "reads bytes 17408..33791, the block has 1024..25599"},
        {ONE_WARP_LESS, "warp 1 issued 4 wgmma, warp 0 of its warpgroup 0"},
    };
    for (const auto& p : faults) { check_exit(t, p.text, plant_wgmma, (void*)&p.fault, 1, p.text); }
}

typedef struct { const char *fault, *text; } Planted;

static void test_races(Test* t) {
    if (simt_orders() < 2) { skip(t, "one order asked for"); return; }
    const Planted faults[] = {
        {"missing barrier", "race: kernel missing_barrier_kernel<<<(1,1,1), (64,1,1)>>>"},
        {"missing second barrier", "race: kernel missing_second_barrier_kernel"},
        {"missing syncwarp", "race: kernel missing_syncwarp_kernel"},
        {"in place", "race: kernel in_place_kernel"},
        {"ticket", "race: kernel ticket_kernel"},
        {"late write", "race: kernel late_write_kernel"},
        {"blocks", "race: kernel blocks_kernel"},
        {"uninitialised", "race: kernel uninitialised_kernel"},
        {"missing wait", "race: kernel missing_wait_kernel"},
        {"overwritten", "race: kernel overwritten_kernel"},
    };
    for (const Planted& p : faults) { check_exit(t, p.fault, plant, (void*)p.fault, 1, p.text); }
}

static void test_misuse(Test* t) {
    const Planted faults[] = {
        {"divergent barrier", "divergent barrier: this thread is at dev/simt/test_simt.cu:"},
        {"half a warp", "deadlock; threads 0..15 wait at dev/simt/test_simt.cu:"},
        {"outside mask", "lane 16 is not in its own mask 0000ffff"},
        {"source outside mask", "asks for lane 20, which is not in the mask"},
        {"returned lane", "lane 31 has returned, but lane 0 waits for it at dev/simt/test_simt.cu:"},
        {"short warp", "does not exist: the block has 48 threads"},
        {"two places", "divergent warp: lane 31 is at dev/simt/test_simt.cu:"},
        {"no wait at all", "thread (0,0,0): returned with 1 cp.async that it never waited for"},
        {"wrong direction", "cudaMemcpy: destination "},
        {"host source", "is no device memory"},
        {"copy too long", "destination of 256 bytes ends 128 bytes behind allocation "},
        {"source changed", "its pinned source was changed before the copy was waited for"},
        {"capture, another stream", "kernel: its stream has not joined the capture that goes on"},
        {"capture, event", "cudaEventRecord: events in a capture are not modelled"},
        {"capture, graph leaked", "1 graphs were never destroyed"},
        {"freed twice", "is no start of an allocation of cudaMalloc"},
        {"leak", "3 allocations were never freed, among them number "},
    };
    for (const Planted& p : faults) { check_exit(t, p.fault, plant, (void*)p.fault, 1, p.text); }
}

#if defined(__SANITIZE_ADDRESS__)
// what the sanitizers report takes many lines: the child must fail and say `text` in one of them
static void check_report(Test* t, const Planted* p) {
    static char report[1 << 16];
    FILE* file = tmpfile();
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(fileno(file), 2);
        plant((void*)p->fault);
        _exit(0);
    }
    int state = 0;
    waitpid(child, &state, 0);
    rewind(file);
    report[fread(report, 1, sizeof report - 1, file)] = 0;
    fclose(file);
    check(t, state != 0 && strstr(report, p->text), "%s: expected a report with \"%s\", found %.300s", p->fault, p->text, report);
}

static void test_sanitizers(Test* t) {
    const Planted faults[] = {
        {"beyond static", "kernel beyond_static_kernel, block (0,0,0), thread (63,0,0): invalid memory access"},
        {"beyond dynamic", "kernel beyond_dynamic_kernel, block (0,0,0), thread (63,0,0): invalid memory access"},
        {"beyond global", "kernel beyond_global_kernel, block (0,0,0), thread (63,0,0): invalid memory access"},
        {"misaligned", "misaligned address"},
        {"host reads", "use-after-poison"},
    };
    for (const Planted& p : faults) { check_report(t, &p); }
}
#else
static void test_sanitizers(Test* t) { skip(t, "built without sanitizers"); }
#endif
#endif  // SIMT

// ---- graphs ----

// d = 2 * d + add, element by element: where it runs a second time, or with another argument, one sees it
__global__ void double_kernel(float* d, float add, int n) {
    if ((int)threadIdx.x < n) { d[threadIdx.x] = 2.0f * d[threadIdx.x] + add; }
}

// what is captured below: an upload, a fill, a kernel, a copy; the argument of the kernel changes right after its launch
static void record(float* d, float* e, const float* pinned, cudaStream_t stream) {
    float add = 1.0f;
    cudaCheck(cudaMemcpyAsync(e, pinned, 4 * sizeof(float), cudaMemcpyHostToDevice, stream));
    cudaCheck(cudaMemsetAsync(e + 3, 0, sizeof(float), stream));
    double_kernel<<<1, 32, 0, stream>>>(d, add, 4);
    cudaCheck(cudaGetLastError());
    add = 100.0f;
    double_kernel<<<1, 32, 0, stream>>>(e, add - 99.0f, 4);
    cudaCheck(cudaMemcpyAsync(e + 4, d, 4 * sizeof(float), cudaMemcpyDeviceToDevice, stream));
}

static cudaGraphExec_t capture(float* d, float* e, const float* pinned, cudaStream_t stream, size_t* n_nodes) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    record(d, e, pinned, stream);
    cudaCheck(cudaStreamEndCapture(stream, &graph));
    cudaCheck(cudaGraphGetNodes(graph, NULL, n_nodes));
    cudaCheck(cudaGraphInstantiate(&executable, graph, 0));
    cudaCheck(cudaGraphDestroy(graph));
    return executable;
}

// plain: three runs one by one; else a graph, launched three times. What it uploads changes in between
static void run_three_times(Test* t, int plain, float out[12]) {
    float *d, *e, *pinned;
    size_t n_nodes = 0;
    cudaStream_t stream;
    cudaGraphExec_t executable = NULL;
    cudaCheck(cudaStreamCreate(&stream));
    cudaCheck(cudaMalloc((void**)&d, 4 * sizeof(float)));
    cudaCheck(cudaMalloc((void**)&e, 8 * sizeof(float)));
    cudaCheck(cudaMallocHost((void**)&pinned, 4 * sizeof(float)));
    cudaCheck(cudaMemset(d, 0, 4 * sizeof(float)));
    cudaCheck(cudaMemset(e, 0, 8 * sizeof(float)));
    if (!plain) {
        executable = capture(d, e, pinned, stream, &n_nodes);
        cudaCheck(cudaMemcpy(out, d, 4 * sizeof(float), cudaMemcpyDeviceToHost));
        check(t, n_nodes == 5 && out[0] == 0.0f, "%zu nodes, expected 5; d[0] is %g before any launch", n_nodes, (double)out[0]);
    }
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < 4; k++) { pinned[k] = (float)(10 * i + k); }
        if (plain) { record(d, e, pinned, stream); } else { cudaCheck(cudaGraphLaunch(executable, stream)); }
        cudaCheck(cudaStreamSynchronize(stream));
    }
    cudaCheck(cudaMemcpy(out, d, 4 * sizeof(float), cudaMemcpyDeviceToHost));
    cudaCheck(cudaMemcpy(out + 4, e, 8 * sizeof(float), cudaMemcpyDeviceToHost));
    if (!plain) { cudaCheck(cudaGraphExecDestroy(executable)); }
    cudaCheck(cudaFreeHost(pinned));
    cudaCheck(cudaFree(e));
    cudaCheck(cudaFree(d));
    cudaCheck(cudaStreamDestroy(stream));
}

static void test_graph(Test* t) {
    float plain[12], graph[12];
    run_three_times(t, 1, plain);
    run_three_times(t, 0, graph);
    check(t, plain[0] == 7.0f && plain[5] == 43.0f && plain[7] == 1.0f && plain[8] == 7.0f, "plain: %g %g %g %g",
          (double)plain[0], (double)plain[5], (double)plain[7], (double)plain[8]);
    check_bits(t, "a graph launched three times", graph, plain, 12);
}

typedef enum {
    CALL_MALLOC, CALL_FREE, CALL_SYNC, CALL_QUERY,
#ifdef SIMT  // of pageable memory the manual says little: here it is refused
    CALL_DOWNLOAD, CALL_PAGEABLE,
#endif
    CALL_PLAIN_COPY, CALL_DEFAULT_STREAM, N_CALLS
} Call;

static cudaError_t forbidden_call(Call call, float* d, cudaStream_t stream) {
    float x[4] = {0}, *new_memory;
    switch (call) {
        case CALL_MALLOC: return cudaMalloc((void**)&new_memory, 16);
        case CALL_FREE: return cudaFree(d);
        case CALL_SYNC: return cudaStreamSynchronize(stream);
        case CALL_QUERY: return cudaStreamQuery(stream);
#ifdef SIMT
        case CALL_DOWNLOAD: return cudaMemcpyAsync(x, d, sizeof x, cudaMemcpyDeviceToHost, stream);
        case CALL_PAGEABLE: return cudaMemcpyAsync(d, x, sizeof x, cudaMemcpyHostToDevice, stream);
#endif
        case CALL_PLAIN_COPY: return cudaMemcpy(x, d, sizeof x, cudaMemcpyDeviceToHost);
        case CALL_DEFAULT_STREAM: double_kernel<<<1, 32>>>(d, 1.0f, 4); return cudaGetLastError();
        case N_CALLS: break;
    }
    return cudaSuccess;
}

// each is refused, ends the capture, and leaves the stream as it was before
static void test_forbidden(Test* t) {
    float *d, x[4];
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaCheck(cudaStreamCreate(&stream));
    cudaCheck(cudaMalloc((void**)&d, sizeof x));
    cudaCheck(cudaMemset(d, 0, sizeof x));
    for (int call = 0; call < N_CALLS; call++) {
        const cudaError_t expected = call < CALL_PLAIN_COPY ? cudaErrorStreamCaptureUnsupported : cudaErrorStreamCaptureImplicit;
        cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        const cudaError_t said = forbidden_call((Call)call, d, stream);
        check(t, said == expected, "call %d: %s", call, cudaGetErrorString(said));
        double_kernel<<<1, 32, 0, stream>>>(d, 1.0f, 4);
        check(t, cudaGetLastError() == cudaErrorStreamCaptureInvalidated, "call %d: work is still recorded", call);
        check(t, cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated && !graph, "call %d: there is a graph", call);
        cudaGetLastError();
    }
    check(t, cudaStreamEndCapture(stream, &graph) == cudaErrorIllegalState, "a capture that never began has ended");
    cudaGetLastError();
    double_kernel<<<1, 32, 0, stream>>>(d, 1.0f, 4);
    cudaCheck(cudaStreamSynchronize(stream));
    cudaCheck(cudaMemcpy(x, d, sizeof x, cudaMemcpyDeviceToHost));
    check(t, x[0] == 1.0f, "after captures without a graph: %g, expected 1", (double)x[0]);
    cudaCheck(cudaFree(d));
    cudaCheck(cudaStreamDestroy(stream));
}

#ifdef SIMT
// what a copy to pinned memory brings is there after a synchronisation with it, and not before
static void test_pinned(Test* t) {
    float x[4] = {1, 2, 3, 4}, *d, *pinned;
    cudaStream_t streams[2];
    cudaEvent_t event;
    cudaCheck(cudaMalloc((void**)&d, sizeof x));
    cudaCheck(cudaMallocHost((void**)&pinned, sizeof x));
    cudaCheck(cudaMemcpy(d, x, sizeof x, cudaMemcpyHostToDevice));
    cudaCheck(cudaEventCreate(&event));
    for (int i = 0; i < 2; i++) { cudaCheck(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking)); }
    for (int how = 0; how < 5; how++) {
        if (how >= 3) { cudaCheck(cudaEventRecord(event, streams[0])); }  // before the copy
        cudaCheck(cudaMemcpyAsync(pinned, d, sizeof x, cudaMemcpyDeviceToHost, streams[0]));
        if (how < 3) { cudaCheck(cudaEventRecord(event, streams[0])); }
        check(t, isnan(pinned[0]), "%d: the data was there before any synchronisation", how);
        if (how == 0) { cudaCheck(cudaStreamSynchronize(streams[0])); }
        if (how == 1) { cudaCheck(cudaEventSynchronize(event)); }
        if (how == 2 || how == 3) { cudaCheck(cudaStreamWaitEvent(streams[1], event, 0)); cudaCheck(cudaStreamSynchronize(streams[1])); }
        if (how == 4) { cudaCheck(cudaEventSynchronize(event)); }
        check(t, how < 3 ? pinned[3] == 4.0f : isnan(pinned[3]), "%d: found %g", how, (double)pinned[3]);
        cudaCheck(cudaDeviceSynchronize());
        check(t, pinned[3] == 4.0f, "%d: not there at the end", how);
    }
    for (int i = 0; i < 2; i++) { cudaCheck(cudaStreamDestroy(streams[i])); }
    cudaCheck(cudaEventDestroy(event));
    cudaCheck(cudaFreeHost(pinned));
    cudaCheck(cudaFree(d));
}
#endif

int main(int argc, char** argv) {
    Promise promises[] = {
        {"indices", "every thread of a grid with three dimensions runs once, with its own indices", test_indices},
        {"launch", "arguments are evaluated once; template arguments, comments, several lines", test_launch_arguments},
        {"refused", "too many threads, no blocks, too much shared memory: the error of CUDA, once", test_refused_launches},
        {"shuffles", "lane by lane, in groups and parts of a warp, for six types", test_shuffles},
        {"votes", "ballot, any and all see the lanes of their mask", test_votes},
        {"shared memory", "a block has its own, in several declarations and types", test_shared},
        {"block votes", "barriers count predicates and wait only for threads that live", test_block_votes},
        {"atomics", "integers of 32 and 64 bits: add, max, min, or, compare and swap", test_atomics},
        {"bit functions", "known answers", test_bits},
        {"bf16", "all 2^16 to float and back; rounding between each and the next, ties to even", test_bf16},
        {"fp8", "all 256 values of both formats; rounding is the nearest by search, and saturates", test_fp8},
        {"mma", "the fragments of the manual give the plain product, b in either layout", test_mma},
        {"wgmma", "a warpgroup's product is the plain one, each operand in either layout", test_wgmma},
        {"stmatrix", "each element of the fragments goes where the manual says, transposed", test_stmatrix},
        {"async copies", "two stages, with zeros beyond the end", test_async},
        {"host calls", "copies, fills, streams, events, device properties", test_host},
        {"graphs", "launched three times, a graph leaves the bits of three plain runs; recording runs nothing", test_graph},
        {"captures", "memory, waiting, pageable memory, the default stream: refused, and there is no graph", test_forbidden},
#ifdef SIMT
        {"pinned memory", "holds the data of a copy after a synchronisation with it, and not before", test_pinned},
        {"races", "each planted race is found by running in two orders", test_races},
        {"wgmma faults", "fences, waits and descriptors that are wrong are found", test_wgmma_faults},
        {"misuse", "barriers, masks, copies and allocations: one line says what and where", test_misuse},
        {"sanitizers", "reads beyond shared, dynamic and device memory are reported with kernel and thread", test_sanitizers},
#endif
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
