/*
RoPE, rotary position embedding: channels in pairs, each turned by an angle that grows with the position, in place. The
product of a query and a key that are turned so depends on how far apart they are, not on where.
    (a, b) becomes (a * cos - b * sin, a * sin + b * cos), with cos and sin of angle[t][i] for pair i at position t
    pairs   ROPE_INTERLEAVED: (x[2i], x[2i+1])     ROPE_HALVES: (x[i], x[i + rotated/2]), as in Hugging Face's files
Backward turns back: (da, db) = (dy_a * cos + dy_b * sin, dy_b * cos - dy_a * sin), in place. Neither needs the other's
arrays. Who wants an output turned back (DeepSeek V4) calls rope_backward forward, and rope_forward backward.
x begins at the first channel that turns, of position t0 of the first sequence and its first head: RopeShape says what
lies how far apart. Other channels of a head are not touched. Query and key heads side by side in a row are one call.
Table:  cos, sin (T, rotated/2), float also where x is bf16, made on the host. With e_i = 2i / rotated:
            x_i = base^e_i     frequency_i = 1 / x_i     angle[t][i] = t * frequency_i
        each rounded to float, x_i and then cos and sin correctly (rope_power_, fmath.h): Hugging Face's table, where
        its C library's functions round so too. NTK scaling only changes the base: rope_scaled_base. Other frequencies
        are another array for rope_table_init: those of YaRN are rope_yarn_frequencies'. Other positions (of patches,
        several axes) are rope_table_at's.
Places: (B, T-t0), ints on the device: which row of the table each position of x has. Those with a negative one, entries
        that do not exist, are left as they are. NULL: a position has the row of its number.
Cost:   memory bound, 2 elements moved for each; the table stays in the cache. One thread, AMD EPYC (Zen 4), head size
        64, ns per element: 0.08 in halves, 0.10
        interleaved, where memcpy has 0.08. A table of 2^18 positions and 32 pairs takes 0.1 to 0.4 s.
Error:  an angle is rounded twice: within t * 2^-23 of the exact one, 0.03 at t = 2^18. Then 2 roundings of |a| + |b|.
Order:  two products, each rounded, then their difference or sum.
Source: Su et al. 2021, arXiv:2104.09864, section 3.4.2; NTK scaling: bloc97 2023, "NTK-aware scaled RoPE"; YaRN: Peng
        et al. 2023, arXiv:2309.00071, section 3.2, doc/deepseek_v4.md "RoPE"
*/
#ifndef LLMC_ROPE_H
#define LLMC_ROPE_H
#include "../core/device.h"  // Device, device_alloc, device_upload
#include "../core/fmath.h"   // fm_cos, fm_sin, FM_FUNCTION
#include "../core/kernel.h"  // load_floats, store_floats, pack_aligned
#ifndef __CUDACC__
#include "../core/vec.h"  // vfloat, v_interleave_low, v_interleave_high
#endif

enum { ROPE_INTERLEAVED, ROPE_HALVES };

typedef struct {
    int B, T, t0;                 // sequences; positions t0..T-1 are turned, t0 is 0 in training
    int heads, rotated;           // heads of a position; channels of a head that turn, an even number
    int pairs;                    // ROPE_INTERLEAVED or ROPE_HALVES
    size_t row, seq, head;        // elements of x from one position, sequence, head to the next
    size_t table_row, table_seq;  // of cos and sin: rotated/2, more where positions are further apart; 0: one for all
    const int* places;            // (B, T-t0) row of the table of each position; NULL: its number
} RopeShape;

// x (B, T-t0, heads, HS), all channels turn
static inline RopeShape rope_shape(int B, int T, int t0, int heads, int HS, int pairs) {
    RopeShape s;
    s.B = B, s.T = T, s.t0 = t0;
    s.heads = heads, s.rotated = HS, s.pairs = pairs;
    s.head = (size_t)HS, s.row = heads * s.head, s.seq = (T - t0) * s.row;
    s.table_row = (size_t)HS / 2, s.table_seq = 0, s.places = NULL;
    return s;
}

// ---- base^e, as two doubles whose sum is within 2^-95 of it, relative: enough to round it to float as if it were
// known exactly. The C library's pow differs from one library to the next in the last bit of a double ----

typedef struct {
    double high, low;  // |low| is at most half a unit in the last place of high
} RopeDouble;

static inline RopeDouble rope_sum_(double a, double b) {
    double sum = a + b, of_b = sum - a;
    RopeDouble x = {sum, (a - (sum - of_b)) + (b - of_b)};
    return x;
}

static inline RopeDouble rope_add_(RopeDouble x, RopeDouble y) {
    RopeDouble sum = rope_sum_(x.high, y.high);
    return rope_sum_(sum.high, sum.low + (x.low + y.low));
}

static inline RopeDouble rope_mul_(RopeDouble x, RopeDouble y) {
    double product = x.high * y.high, rest = fma(x.high, y.high, -product);
    return rope_sum_(product, rest + (x.high * y.low + x.low * y.high));
}

static inline RopeDouble rope_div_(RopeDouble x, double y) {
    double quotient = x.high / y, rest = fma(-quotient, y, x.high);
    return rope_sum_(quotient, (rest + x.low) / y);
}

static inline RopeDouble rope_ln2_(void) {
    RopeDouble x = {0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56};
    return x;
}

// x = 2^k m with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(t) = 2 t (1 + t^2/3 + t^4/5 + ...), t = (m - 1) / (m + 1)
static inline RopeDouble rope_log_(double x) {
    int k;
    double m = frexp(x, &k);
    if (m < 0.70710678118654752) { m *= 2.0, k--; }
    const RopeDouble zero = {0.0, 0.0}, one = {1.0, 0.0}, n = {(double)k, 0.0}, below = rope_sum_(m, 1.0);
    RopeDouble t = rope_div_(rope_sum_(m, -1.0), below.high), sum = zero;
    // 1 / (high + low) = (1 - low / high) / high, nearly: low / high is below 2^-53
    t = rope_mul_(t, rope_sum_(1.0, -below.low / below.high));
    const RopeDouble z = rope_mul_(t, t);
    for (int j = 45; j > 0; j -= 2) { sum = rope_add_(rope_div_(one, j), rope_mul_(z, sum)); }  // z < 0.03
    t.high *= 2.0, t.low *= 2.0;
    return rope_add_(rope_mul_(n, rope_ln2_()), rope_mul_(t, sum));
}

// e^x = 2^k e^r, |r| < 0.35: e^r = 1 + r/1 (1 + r/2 (1 + r/3 (...)))
static inline RopeDouble rope_exp_(RopeDouble x) {
    const double k = rint(x.high / rope_ln2_().high);
    const RopeDouble one = {1.0, 0.0}, minus_k = {-k, 0.0}, r = rope_add_(x, rope_mul_(minus_k, rope_ln2_()));
    RopeDouble sum = one;
    for (int n = 26; n > 0; n--) { sum = rope_add_(one, rope_div_(rope_mul_(r, sum), n)); }
    sum.high = ldexp(sum.high, (int)k), sum.low = ldexp(sum.low, (int)k);
    return sum;
}

static inline RopeDouble rope_power_(double base, double e) {
    const RopeDouble exponent = {e, 0.0}, one = {1.0, 0.0};
    return e == 0.0 ? one : rope_exp_(rope_mul_(exponent, rope_log_(base)));
}

// rounded once: an odd last bit of the double says that something follows, so that it is no middle of two floats
static inline float rope_float_(RopeDouble x) {
    uint64_t bits;
    memcpy(&bits, &x.high, sizeof bits);
    if (x.low != 0.0 && !(bits & 1)) { x.high = nextafter(x.high, x.low > 0.0 ? INFINITY : -INFINITY); }
    return (float)x.high;
}

// ---- the table ----

// base' = base * alpha^(HS / (HS - 2)): the slowest frequency is divided by alpha, the fastest stays 1
static inline double rope_scaled_base(double base, double alpha, int HS) {
    if (alpha == 1.0 || HS <= 2) { return base; }
    return base * rope_power_(alpha, (double)HS / (double)(HS - 2)).high;
}

static inline void rope_frequencies(float* frequencies, double base, int rotated) {
    for (int i = 0; i < rotated / 2; i++) {
        float e = (float)(2 * i) / (float)rotated, x = rope_float_(rope_power_(base, (double)e));
        frequencies[i] = 1.0f / x;
    }
}

typedef struct {
    float factor;                // so many times as long texts
    int original;                // positions that the model was trained with first
    float beta_fast, beta_slow;  // turns within these: a pair with more keeps its frequency, one with fewer is slowed
} RopeYarn;

// the pair that turns so often within the original positions, as a real number
static inline double rope_yarn_pair_(double base, int rotated, int original, double turns) {
    const double angle = 6.283185307179586 * turns;
    return rotated * rope_log_(original / angle).high / (2.0 * rope_log_(base).high);
}

// Below pair `low` frequencies stay, from `high` on they are divided by the factor, and between the two mixed
static inline void rope_yarn_frequencies(float* frequencies, double base, int rotated, const RopeYarn* yarn) {
    double low = floor(rope_yarn_pair_(base, rotated, yarn->original, (double)yarn->beta_fast));
    double high = ceil(rope_yarn_pair_(base, rotated, yarn->original, (double)yarn->beta_slow));
    low = low > 0.0 ? low : 0.0;
    high = high < rotated - 1 ? high : rotated - 1;
    high = low == high ? high + 0.001 : high;
    rope_frequencies(frequencies, base, rotated);
    for (int i = 0; i < rotated / 2; i++) {
        const float ramp = ((float)i - (float)low) / (float)(high - low);
        const float fast = 1.0f - (ramp < 0.0f ? 0.0f : ramp > 1.0f ? 1.0f : ramp), slow = 1.0f - fast;
        frequencies[i] = frequencies[i] / yarn->factor * slow + frequencies[i] * fast;
    }
}

static inline void rope_table_ref(float* cosines, float* sines, const float* frequencies, int T, int rotated) {
    for (size_t t = 0; t < (size_t)T; t++) {
        for (int i = 0; i < rotated / 2; i++) {
            float angle = (float)t * frequencies[i];
            cosines[t * (rotated / 2) + i] = fm_cos(angle);
            sines[t * (rotated / 2) + i] = fm_sin(angle);
        }
    }
}

typedef struct {
    float *cosines, *sines;  // (T, rotated/2), on the device; one allocation
    size_t n_bytes;
} RopeTable;

static inline size_t rope_table_bytes(int T, int rotated) { return sizeof(float) * 2 * (size_t)T * (rotated / 2); }

// room for N positions
static inline void rope_table_room(RopeTable* table, int N, int rotated) {
    table->n_bytes = rope_table_bytes(N, rotated);
    table->cosines = (float*)device_alloc(table->n_bytes, "cos and sin of RoPE");
    table->sines = table->cosines + (size_t)N * (size_t)(rotated / 2);
}

// Of N positions with several axes, positions (axes, N) on the host: pair i turns by frequencies[i] and the position on
// axis[i]. table: has room for them, or for more
static inline void rope_table_at(RopeTable* table, const float* frequencies, const int* positions, const int* axis,
                                 int N, int rotated, const Device* dev) {
    const size_t half = (size_t)rotated / 2, n = (size_t)N * half;
    float* made = (float*)device_pinned(2 * sizeof(float) * n, "cos and sin of RoPE");
    #pragma omp parallel for
    for (size_t t = 0; t < (size_t)N; t++) {
        for (size_t i = 0; i < half; i++) {
            const float angle = (float)positions[(size_t)axis[i] * (size_t)N + t] * frequencies[i];
            made[t * half + i] = fm_cos(angle);
            made[n + t * half + i] = fm_sin(angle);
        }
    }
    device_upload(table->cosines, made, sizeof(float) * n, dev);
    device_upload(table->sines, made + n, sizeof(float) * n, dev);
    device_sync(dev);
    device_pinned_free(made);
}

// T below 2^24: a float has every position
static inline void rope_table_init(RopeTable* table, const float* frequencies, int T, int rotated, const Device* dev) {
    const size_t half = (size_t)rotated / 2, n = T * half;
    rope_table_room(table, T, rotated);
    float* made = (float*)device_pinned(table->n_bytes, "cos and sin of RoPE");
    #pragma omp parallel for
    for (int t = 0; t < T; t++) {
        #pragma omp simd
        for (size_t i = 0; i < half; i++) { made[t * half + i] = fm_cos((float)t * frequencies[i]); }
        #pragma omp simd
        for (size_t i = 0; i < half; i++) { made[n + t * half + i] = fm_sin((float)t * frequencies[i]); }
    }
    device_upload(table->cosines, made, table->n_bytes, dev);
    device_sync(dev);
    device_pinned_free(made);
}

// of the frequencies that a base has
static inline void rope_table_open(RopeTable* table, double base, int T, int rotated, const Device* dev) {
    float* frequencies = (float*)malloc_check(sizeof(float) * (size_t)rotated, "frequencies of RoPE");
    rope_frequencies(frequencies, base, rotated);
    rope_table_init(table, frequencies, T, rotated, dev);
    free(frequencies);
}

static inline void rope_table_free(RopeTable* table) {
    device_release(table->cosines, table->n_bytes);
    table->cosines = table->sines = NULL;
}

// ---- plain C: read this first; it defines every bit ----

// where pair i of a head has its two channels
static inline int rope_first_(const RopeShape* s, int i) { return s->pairs == ROPE_HALVES ? i : 2 * i; }
static inline int rope_second_(const RopeShape* s, int i) {
    return rope_first_(s, i) + (s->pairs == ROPE_HALVES ? s->rotated / 2 : 1);
}

// row of the table of position t of sequence b, t0 being its first; negative: it does not turn
FM_FUNCTION int64_t rope_row_(const RopeShape* s, size_t b, size_t t) {
    return s->places ? s->places[b * (s->T - s->t0) + t] : (int64_t)(s->t0 + t);
}

static inline void rope_forward_ref(float* x, const float* cosines, const float* sines, const RopeShape* s) {
    for (size_t b = 0; b < (size_t)s->B; b++) {
        for (size_t t = 0; t < (size_t)(s->T - s->t0); t++) {
            const int64_t row = rope_row_(s, b, t);
            if (row < 0) { continue; }
            const size_t at = b * s->table_seq + (size_t)row * s->table_row;
            const float *c = cosines + at, *n = sines + at;
            for (size_t h = 0; h < (size_t)s->heads; h++) {
                float* y = x + b * s->seq + t * s->row + h * s->head;
                for (int i = 0; i < s->rotated / 2; i++) {
                    float *first = y + rope_first_(s, i), *second = y + rope_second_(s, i), a = *first, z = *second;
                    *first = a * c[i] - z * n[i];
                    *second = a * n[i] + z * c[i];
                }
            }
        }
    }
}

static inline void rope_backward_ref(float* dx, const float* cosines, const float* sines, const RopeShape* s) {
    for (size_t b = 0; b < (size_t)s->B; b++) {
        for (size_t t = 0; t < (size_t)(s->T - s->t0); t++) {
            const int64_t row = rope_row_(s, b, t);
            if (row < 0) { continue; }
            const size_t at = b * s->table_seq + (size_t)row * s->table_row;
            const float *c = cosines + at, *n = sines + at;
            for (size_t h = 0; h < (size_t)s->heads; h++) {
                float* y = dx + b * s->seq + t * s->row + h * s->head;
                for (int i = 0; i < s->rotated / 2; i++) {
                    float *first = y + rope_first_(s, i), *second = y + rope_second_(s, i), da = *first, dz = *second;
                    *first = da * c[i] + dz * n[i];
                    *second = dz * c[i] - da * n[i];
                }
            }
        }
    }
}

// Both directions are one function: sign -1 turns back. A product with -sin is minus that with sin, so no bit changes
#ifndef __CUDACC__  // ---- fast C: positions over threads, pairs over lanes ----

static inline void rope_halves_(float* a, float* z, const float* c, const float* n, float sign, int half) {
    #pragma omp simd
    for (int i = 0; i < half; i++) {
        float first = a[i], second = z[i], sine = sign * n[i];
        a[i] = first * c[i] - second * sine;
        z[i] = first * sine + second * c[i];
    }
}

// VLANES pairs at a time are dealt into their first and second channels, and back
static inline void rope_interleaved_(float* x, const float* c, const float* n, float sign, int half) {
    int i = 0;
    for (; i + VLANES <= half; i += VLANES, x += 2 * VLANES) {
        vfloat low = v_load(x), high = v_load(x + VLANES), a = v_even(low, high), z = v_odd(low, high);
        vfloat cosine = v_load(c + i), sine = v_fill(sign) * v_load(n + i);
        vfloat first = a * cosine - z * sine, second = a * sine + z * cosine;
        v_store(x, v_interleave_low(first, second));
        v_store(x + VLANES, v_interleave_high(first, second));
    }
    for (; i < half; i++, x += 2) {
        float a = x[0], z = x[1], sine = sign * n[i];
        x[0] = a * c[i] - z * sine;
        x[1] = a * sine + z * c[i];
    }
}

static inline void rope_turn_(float* x, const float* cosines, const float* sines, const RopeShape* s, float sign) {
    const int positions = s->T - s->t0, half = s->rotated / 2;
    #pragma omp parallel for
    for (size_t n = 0; n < (size_t)s->B * positions; n++) {
        const size_t b = n / positions, t = n % positions;
        const int64_t row = rope_row_(s, b, t);
        if (row < 0) { continue; }
        const size_t at = b * s->table_seq + (size_t)row * s->table_row;
        float* y = x + b * s->seq + t * s->row;
        for (int h = 0; h < s->heads; h++, y += s->head) {
            if (s->pairs == ROPE_HALVES) {
                rope_halves_(y, y + half, cosines + at, sines + at, sign, half);
            } else {
                rope_interleaved_(y, cosines + at, sines + at, sign, half);
            }
        }
    }
}

static inline void rope_forward(float* x, const float* cosines, const float* sines, const RopeShape* s,
                                const Device* dev) {
    (void)dev;
    rope_turn_(x, cosines, sines, s, 1.0f);
}

static inline void rope_backward(float* dx, const float* cosines, const float* sines, const RopeShape* s,
                                 const Device* dev) {
    (void)dev;
    rope_turn_(dx, cosines, sines, s, -1.0f);
}
#else  // ---- CUDA: a thread has P pairs of a head; one source for both builds ----

// P pairs of a head, the first at a and z: apart, or (a, z) of one pair after the other and P more than 1
template <int APART, int P, typename X>
__device__ inline void rope_pairs_(X* a, X* z, const Pack<float, P>& c, const Pack<float, P>& n, float sign) {
    Pack<float, 2 * P> x;
    if (APART) {
        Pack<float, P> first = load_floats<P>(a), second = load_floats<P>(z);
        for (int k = 0; k < P; k++) { x.x[2 * k] = first.x[k], x.x[2 * k + 1] = second.x[k]; }
    } else {
        x = load_floats<2 * P>(a);
    }
    Pack<float, P> first, second;
    for (int k = 0; k < P; k++) {
        float sine = sign * n.x[k];
        first.x[k] = x.x[2 * k] * c.x[k] - x.x[2 * k + 1] * sine;
        second.x[k] = x.x[2 * k] * sine + x.x[2 * k + 1] * c.x[k];
    }
    if (APART) {
        store_floats(a, first);
        store_floats(z, second);
        return;
    }
    for (int k = 0; k < P; k++) { x.x[2 * k] = first.x[k], x.x[2 * k + 1] = second.x[k]; }
    store_floats(a, x);
}

// blocks (threads, positions): the threads walk over the heads of a position, those of a head side by side
template <int HALVES, int P, typename X>
__global__ void rope_kernel(X* x, const float* cosines, const float* sines, RopeShape s, float sign) {
    const int positions = s.T - s.t0, half = s.rotated / 2, parts = half / P;
    const int64_t n = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= (int64_t)s.B * positions) { return; }
    const size_t b = (size_t)(n / positions), t = (size_t)(n % positions);
    const int64_t row = rope_row_(&s, b, t);
    if (row < 0) { return; }
    const size_t at = b * s.table_seq + (size_t)row * s.table_row;
    X* y = x + b * s.seq + t * s.row;
    for (int j = threadIdx.x; j < s.heads * parts; j += blockDim.x) {
        const int h = j / parts, i = j % parts * P;
        X* a = y + h * s.head + (HALVES ? i : 2 * i);
        rope_pairs_<HALVES || P == 1>(a, a + (HALVES ? half : 1), load_floats<P>(cosines + at + i),
                                      load_floats<P>(sines + at + i), sign);
    }
}

template <int HALVES, int P, typename X>
static inline void rope_launch_(X* x, const float* cosines, const float* sines, const RopeShape* s, float sign,
                                const Device* dev) {
    const int64_t positions = (int64_t)s->B * (s->T - s->t0), parts = (int64_t)s->heads * (s->rotated / 2 / P);
    const unsigned threads = (unsigned)(parts < GRID_BLOCK ? parts : GRID_BLOCK);
    if (positions == 0 || parts == 0) { return; }
    dim3 block(threads, GRID_BLOCK / threads);
    rope_kernel<HALVES, P><<<(unsigned)ceil_div(positions, block.y), block, 0, dev->stream>>>(x, cosines, sines, *s,
                                                                                              sign);
    cudaCheck(cudaGetLastError());
}

// P: 16 bytes of x, in halves twice that, where all that a thread loads lies between packs
template <typename X>
static inline void rope_turn_(X* x, const float* cosines, const float* sines, const RopeShape* s, float sign,
                              const Device* dev) {
    constexpr int W = pack_width<X>();
    const int packs = pack_aligned(x, cosines, sines) && (s->row | s->seq | s->head) % W == 0 &&
                      (s->table_row | s->table_seq) % W == 0 && s->rotated / 2 % W == 0;
    if (s->pairs == ROPE_HALVES && packs) {
        rope_launch_<1, W>(x, cosines, sines, s, sign, dev);
    } else if (s->pairs == ROPE_HALVES) {
        rope_launch_<1, 1>(x, cosines, sines, s, sign, dev);
    } else if (packs) {
        rope_launch_<0, W / 2>(x, cosines, sines, s, sign, dev);
    } else {
        rope_launch_<0, 1>(x, cosines, sines, s, sign, dev);
    }
}

template <typename X>
static inline void rope_forward(X* x, const float* cosines, const float* sines, const RopeShape* s, const Device* dev) {
    rope_turn_(x, cosines, sines, s, 1.0f, dev);
}

template <typename X>
static inline void rope_backward(X* dx, const float* cosines, const float* sines, const RopeShape* s,
                                 const Device* dev) {
    rope_turn_(dx, cosines, sines, s, -1.0f, dev);
}
#endif
#endif  // LLMC_ROPE_H
