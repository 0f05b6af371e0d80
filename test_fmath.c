/*
Tests of llmc/core/fmath.h without MPFR. dev/fmath/prove.c has shown the functions right on all 2^32 inputs; here a
fixed sample and the hardest inputs must give the bits of that proof, whatever compiler and flags built this program.
    cc -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp test_fmath.c -o build/t -lm
With -DSYSTEM_LIBM the functions are the C library's, and -ffp-contract=fast costs last bits: what need not hold then is
skipped.
*/
#include "llmc/test/test.h"  // Test, Promise, check, check_bits, float_bits
#include "llmc/core/fmath.h"

// ---- the functions under test ----

// no `omp simd`: both compilers turn these loops into vector code at -O3, and clang warns where a pragma cannot be
// obeyed
#define LOOP(name)                                             \
    static void name##_loop(float* y, const float* x, int n) { \
        for (int i = 0; i < n; i++) { y[i] = fm_##name(x[i]); } \
    }
LOOP(exp) LOOP(exp2) LOOP(expm1) LOOP(log) LOOP(log2) LOOP(log1p) LOOP(tanh) LOOP(cosh) LOOP(sinh) LOOP(sin) LOOP(cos)
LOOP(erf)

typedef struct {
    const char* name;
    float (*call)(float x);
    void (*loop)(float* y, const float* x, int n);
    double (*library)(double x);
    char symmetry;      // 'o'dd, 'e'ven or '-'
    char rises;         // 'r' where a larger input never gives a smaller result
    uint64_t hash;      // of the results over the sample below, recorded from the proven build
} Function;

static const Function functions[] = {
    {"exp", fm_exp, exp_loop, exp, '-', 'r', 0xa1add4fbee5c927eu},
    {"exp2", fm_exp2, exp2_loop, exp2, '-', 'r', 0xe490e5f7e55f7422u},
    {"expm1", fm_expm1, expm1_loop, expm1, '-', 'r', 0x109aa8870741e981u},
    {"log", fm_log, log_loop, log, '-', 'r', 0x9f86c2b7696a3d5au},
    {"log2", fm_log2, log2_loop, log2, '-', 'r', 0xbe44c70e603341c3u},
    {"log1p", fm_log1p, log1p_loop, log1p, '-', 'r', 0xbed73fa97c0cd386u},
    {"tanh", fm_tanh, tanh_loop, tanh, 'o', 'r', 0xa639d35b831e0ad3u},
    {"cosh", fm_cosh, cosh_loop, cosh, 'e', '-', 0x36aa5280b47cc730u},
    {"sinh", fm_sinh, sinh_loop, sinh, 'o', 'r', 0x1ca5eb077ffd36ffu},
    {"sin", fm_sin, sin_loop, sin, 'o', '-', 0xa19a6ef82ced70e6u},
    {"cos", fm_cos, cos_loop, cos, 'e', '-', 0x467d8a89e3330415u},
    {"erf", fm_erf, erf_loop, erf, 'o', 'r', 0x52d2c4b1c251e0e7u},
};
enum { N_FUNCTIONS = sizeof functions / sizeof functions[0], N_SAMPLE = 1 << 20, BLOCK = 1024 };

static const Function* function(const char* name) {
    int k = 0;
    while (strcmp(functions[k].name, name) != 0) { k++; }
    return &functions[k];
}

// input i of the sample. Even i: one from each stretch of 8192 neighbouring floats, so every exponent, both signs,
// infinities, NaNs. Odd i: one from each stretch of 704 floats in 2^-14 <= |x| < 2^8, where most functions have their
// shape
static float sample(uint32_t i) {
    uint32_t h = i * 0x9e3779b1u >> 16, j = i >> 1;  // h: somewhere in the stretch
    if (i & 1) { return float_from_bits(((j >> 18) << 31 | 0x38800000u) + (j & 0x3ffff) * 704 + h % 704); }
    return float_from_bits(j << 13 | (h & 8191));
}

// ---- promises of the exact build ----

// does the compiler fuse a * b + c? The square of 1 + 2^-30 is 1 + 2^-29 + 2^-60; rounded, it loses the last term
static int is_contracted(void) {
    volatile double v = 1.0 + 0x1p-30;
    double a = v, b = v;
    return a * b - (1.0 + 0x1p-29) != 0.0;
}

static const char FUSED[] = "this build fuses multiply and add";

// why results need not be correctly rounded here, or NULL
static const char* inexact(void) {
#ifdef SYSTEM_LIBM
    return "this build calls the C library's functions";
#else
    return is_contracted() ? FUSED : NULL;
#endif
}

typedef struct {
    const char* name;
    float x, y;  // input, result
} Case;

static const Case hard_cases[] = {
    // dev/fmath/prove --table 16: f(x) lies next to the middle between two floats. The exceptions of fmath.h are among
    // them
    {"exp", -0x1.d2259ap+3f, 0x1.fa6636p-22f}, {"exp", -0x1.e1dbe2p-8f, 0x1.fc3fd2p-1f},
    {"exp", -0x1.c1c4b8p-10f, 0x1.ff1f4ep-1f}, {"exp", -0x1p-25f, 0x1p+0f}, {"exp", 0x1.fdff02p-17f, 0x1.0001p+0f},
    {"exp", 0x1.62b666p+1f, 0x1.ff48fap+3f}, {"exp", 0x1.036492p+1f, 0x1.e59a28p+2f},
    {"exp", 0x1.8d7cb6p-12f, 0x1.0018dap+0f}, {"exp", 0x1.cd3982p-14f, 0x1.000734p+0f},
    {"exp", 0x1.747de2p-15f, 0x1.0002eap+0f}, {"exp", -0x1.548c34p-7f, 0x1.fab4dcp-1f},
    {"exp", 0x1.344e9cp-5f, 0x1.09d174p+0f}, {"exp", 0x1.112856p+6f, 0x1.6f498ap+98f},
    {"exp", -0x1.6e1ddp-8f, 0x1.fd25dp-1f}, {"exp", 0x1.cce332p+0f, 0x1.834f4cp+2f},
    {"exp", -0x1.7acc62p+3f, 0x1.e51c66p-18f},
    {"exp2", -0x1.2cp+7f, 0x0p+0f}, {"exp2", -0x1.5a3f34p-21f, 0x1.fffffp-1f},
    {"exp2", -0x1.e7526ep-6f, 0x1.f58d62p-1f}, {"exp2", -0x1.a7a04cp-14f, 0x1.fff6d2p-1f},
    {"exp2", 0x1.853a6ep-9f, 0x1.00870ap+0f}, {"exp2", -0x1.d8568p-10f, 0x1.ff5c68p-1f},
    {"exp2", 0x1.0f0af8p-11f, 0x1.00177cp+0f}, {"exp2", -0x1.3e53bcp-3f, 0x1.cbb4acp-1f},
    {"exp2", 0x1.05535ap-7f, 0x1.016b46p+0f}, {"exp2", 0x1.0f39eep-18f, 0x1.00003p+0f},
    {"exp2", -0x1.cda996p-23f, 0x1.fffffcp-1f}, {"exp2", -0x1.715476p-25f, 0x1p+0f},
    {"exp2", -0x1.77a744p-14f, 0x1.fff7dcp-1f}, {"exp2", 0x1.715476p-24f, 0x1.000002p+0f},
    {"exp2", -0x1.2c14a4p-21f, 0x1.fffff2p-1f}, {"exp2", 0x1.9357c4p-4f, 0x1.12156ap+0f},
    {"expm1", 0x1.84a5bap-4f, 0x1.97aed6p-4f}, {"expm1", 0x1.94c582p-22f, 0x1.94c586p-22f},
    {"expm1", -0x1.eb97f8p-19f, -0x1.eb97bep-19f}, {"expm1", 0x1.4a9cf4p-11f, 0x1.4ab7a6p-11f},
    {"expm1", 0x1.6a09e6p-24f, 0x1.6a09e6p-24f}, {"expm1", -0x1.f676d8p-9f, -0x1.f5809cp-9f},
    {"expm1", 0x1.645636p-19f, 0x1.645654p-19f}, {"expm1", -0x1p-24f, -0x1p-24f},
    {"expm1", 0x1.62b666p+1f, 0x1.df48fap+3f}, {"expm1", 0x1.036492p+1f, 0x1.a59a28p+2f},
    {"expm1", 0x1.c87e36p-9f, 0x1.c949f4p-9f}, {"expm1", -0x1.d3dc32p+3f, -0x1.fffffp-1f},
    {"expm1", 0x1.6c270ap-16f, 0x1.6c280ep-16f}, {"expm1", 0x1.112856p+6f, 0x1.6f498ap+98f},
    {"expm1", 0x1.8a85bcp-20f, 0x1.8a85dp-20f}, {"expm1", 0x1.469ca6p-9f, 0x1.4704e8p-9f},
    {"log", 0x1.b121a6p+76f, 0x1.a9a3f2p+5f}, {"log", 0x1.bacb4ap+25f, 0x1.1e0696p+4f},
    {"log", 0x1.c09d7cp+27f, 0x1.346a58p+4f}, {"log", 0x1.5190cp+78f, 0x1.b2bc8cp+5f},
    {"log", 0x1.22d57p-65f, -0x1.676a7cp+5f}, {"log", 0x1.2f1fd6p+3f, 0x1.1fcbcep+1f},
    {"log", 0x1.827a74p-7f, -0x1.1c2b1ep+2f}, {"log", 0x1.6351d8p+95f, 0x1.08b512p+6f},
    {"log", 0x1.b97c7p-14f, -0x1.251748p+3f}, {"log", 0x1.d1309cp+62f, 0x1.5c9442p+5f},
    {"log", 0x1.cb534cp+13f, 0x1.330e4ap+3f}, {"log", 0x1.f0ddep-8f, -0x1.38733cp+2f},
    {"log", 0x1.cfd86ep+116f, 0x1.43ff6ep+6f}, {"log", 0x1.98496ep-39f, -0x1.a90e2p+4f},
    {"log", 0x1.917748p-100f, -0x1.137588p+6f}, {"log", 0x1.088d96p-74f, -0x1.9a148ap+5f},
    {"log2", 0x1.40f572p-2f, -0x1.ac7b44p+0f}, {"log2", 0x1.22952p-128f, -0x1.ff44dp+6f},
    {"log2", 0x1.22952p+127f, 0x1.fcbb3p+6f}, {"log2", 0x1.22952p-127f, -0x1.fb44dp+6f},
    {"log2", 0x1.22952p+126f, 0x1.f8bb3p+6f}, {"log2", 0x1.22952p-126f, -0x1.f744dp+6f},
    {"log2", 0x1.22952p+125f, 0x1.f4bb3p+6f}, {"log2", 0x1.22952p-125f, -0x1.f344dp+6f},
    {"log2", 0x1.22952p+124f, 0x1.f0bb3p+6f}, {"log2", 0x1.22952p-124f, -0x1.ef44dp+6f},
    {"log2", 0x1.22952p+123f, 0x1.ecbb3p+6f}, {"log2", 0x1.22952p-123f, -0x1.eb44dp+6f},
    {"log2", 0x1.22952p+122f, 0x1.e8bb3p+6f}, {"log2", 0x1.22952p-122f, -0x1.e744dp+6f},
    {"log2", 0x1.22952p+121f, 0x1.e4bb3p+6f}, {"log2", 0x1.22952p-121f, -0x1.e344dp+6f},
    {"log1p", 0x1.800006p-21f, 0x1.7ffffep-21f}, {"log1p", -0x1.7ffffap-21f, -0x1.800002p-21f},
    {"log1p", 0x1.b121a6p+76f, 0x1.a9a3f2p+5f}, {"log1p", 0x1.fb035ap-2f, 0x1.9bddc2p-2f},
    {"log1p", 0x1.30bf04p+43f, 0x1.dfac9p+4f}, {"log1p", 0x1.200036p-17f, 0x1.1fffe6p-17f},
    {"log1p", -0x1.1fffcap-17f, -0x1.20001ap-17f}, {"log1p", 0x1.5190cp+78f, 0x1.b2bc8cp+5f},
    {"log1p", 0x1.0f1fd6p+3f, 0x1.1fcbcep+1f}, {"log1p", -0x1.1d9188p-9f, -0x1.1de14ap-9f},
    {"log1p", 0x1.e00096p-17f, 0x1.dfffb6p-17f}, {"log1p", -0x1.dfff6ap-17f, -0x1.e0004ap-17f},
    {"log1p", 0x1.6351d8p+95f, 0x1.08b512p+6f}, {"log1p", 0x1.d1309cp+62f, 0x1.5c9442p+5f},
    {"log1p", 0x1.cb4b4cp+13f, 0x1.330e4ap+3f}, {"log1p", 0x1.cfd86ep+116f, 0x1.43ff6ep+6f},
    {"tanh", 0x1.86fbc4p-10f, 0x1.86fbb2p-10f}, {"tanh", -0x1.86fbc4p-10f, -0x1.86fbb2p-10f},
    {"tanh", 0x1.dc0accp-2f, 0x1.bc797cp-2f}, {"tanh", -0x1.dc0accp-2f, -0x1.bc797cp-2f},
    {"tanh", 0x1.5969ap+2f, 0x1.fffaap-1f}, {"tanh", -0x1.5969ap+2f, -0x1.fffaap-1f},
    {"tanh", 0x1.a83722p-6f, 0x1.a81eep-6f}, {"tanh", -0x1.a83722p-6f, -0x1.a81eep-6f},
    {"tanh", 0x1.8bd194p+2f, 0x1.fffee2p-1f}, {"tanh", -0x1.8bd194p+2f, -0x1.fffee2p-1f},
    {"tanh", 0x1.f860aap-5f, 0x1.f7bdc2p-5f}, {"tanh", -0x1.f860aap-5f, -0x1.f7bdc2p-5f},
    {"tanh", 0x1.4ddf04p+2f, 0x1.fff84ap-1f}, {"tanh", -0x1.4ddf04p+2f, -0x1.fff84ap-1f},
    {"tanh", 0x1.f178fcp+0f, 0x1.eb69bep-1f}, {"tanh", -0x1.f178fcp+0f, -0x1.eb69bep-1f},
    {"cosh", 0x1.deeeap-11f, 0x1.000008p+0f}, {"cosh", -0x1.deeeap-11f, 0x1.000008p+0f},
    {"cosh", 0x1.c12a5p-5f, 0x1.00628ap+0f}, {"cosh", -0x1.c12a5p-5f, 0x1.00628ap+0f},
    {"cosh", 0x1.0f876cp-10f, 0x1.000008p+0f}, {"cosh", -0x1.0f876cp-10f, 0x1.000008p+0f},
    {"cosh", 0x1.87eb1p-9f, 0x1.00004cp+0f}, {"cosh", -0x1.87eb1p-9f, 0x1.00004cp+0f},
    {"cosh", 0x1.112856p+6f, 0x1.6f498ap+97f}, {"cosh", -0x1.112856p+6f, 0x1.6f498ap+97f},
    {"cosh", 0x1.6a09e6p-12f, 0x1p+0f}, {"cosh", -0x1.6a09e6p-12f, 0x1p+0f}, {"cosh", 0x1.f7f8a8p+2f, 0x1.48b04p+10f},
    {"cosh", -0x1.f7f8a8p+2f, 0x1.48b04p+10f}, {"cosh", 0x1.97f0f6p+4f, 0x1.b8a17cp+35f},
    {"cosh", -0x1.97f0f6p+4f, 0x1.b8a17cp+35f},
    {"sinh", 0x1.250bfep-11f, 0x1.250bfep-11f}, {"sinh", -0x1.250bfep-11f, -0x1.250bfep-11f},
    {"sinh", 0x1.6d543ep-9f, 0x1.6d545ep-9f}, {"sinh", -0x1.6d543ep-9f, -0x1.6d545ep-9f},
    {"sinh", 0x1.fbe4bp-1f, 0x1.29b154p+0f}, {"sinh", -0x1.fbe4bp-1f, -0x1.29b154p+0f},
    {"sinh", 0x1.322898p+0f, 0x1.808a24p+0f}, {"sinh", -0x1.322898p+0f, -0x1.808a24p+0f},
    {"sinh", 0x1.112856p+6f, 0x1.6f498ap+97f}, {"sinh", -0x1.112856p+6f, -0x1.6f498ap+97f},
    {"sinh", 0x1.1389bp-5f, 0x1.1396fep-5f}, {"sinh", -0x1.1389bp-5f, -0x1.1396fep-5f},
    {"sinh", 0x1.97f0f6p+4f, 0x1.b8a17cp+35f}, {"sinh", -0x1.97f0f6p+4f, -0x1.b8a17cp+35f},
    {"sinh", 0x1.3d5f58p-2f, 0x1.427a5cp-2f}, {"sinh", -0x1.3d5f58p-2f, -0x1.427a5cp-2f},
    {"sin", 0x1.487e0cp+103f, 0x1.287508p-2f}, {"sin", -0x1.487e0cp+103f, -0x1.287508p-2f},
    {"sin", 0x1.33333p+13f, -0x1.63f4bap-2f}, {"sin", -0x1.33333p+13f, 0x1.63f4bap-2f},
    {"sin", 0x1.95f654p+44f, -0x1.fcf42ep-1f}, {"sin", -0x1.95f654p+44f, 0x1.fcf42ep-1f},
    {"sin", 0x1.524856p+80f, -0x1.ff5702p-1f}, {"sin", -0x1.524856p+80f, 0x1.ff5702p-1f},
    {"sin", 0x1.e35bc6p+7f, 0x1.c5b4acp-3f}, {"sin", -0x1.e35bc6p+7f, -0x1.c5b4acp-3f},
    {"sin", 0x1.a3eda6p+116f, -0x1.f511dcp-1f}, {"sin", -0x1.a3eda6p+116f, 0x1.f511dcp-1f},
    {"sin", 0x1.8d9d8p+73f, -0x1.d32b7ap-1f}, {"sin", -0x1.8d9d8p+73f, 0x1.d32b7ap-1f},
    {"sin", 0x1.b559b6p+117f, 0x1.b50776p-2f}, {"sin", -0x1.b559b6p+117f, -0x1.b50776p-2f},
    {"cos", 0x1.2b9622p+67f, 0x1.f0285ep-1f}, {"cos", -0x1.2b9622p+67f, 0x1.f0285ep-1f},
    {"cos", 0x1.3170fp+63f, 0x1.fe2976p-1f}, {"cos", -0x1.3170fp+63f, 0x1.fe2976p-1f},
    {"cos", 0x1.887814p+51f, 0x1.84bec4p-1f}, {"cos", -0x1.887814p+51f, 0x1.84bec4p-1f},
    {"cos", 0x1.96344ep+117f, 0x1.f8a9b4p-1f}, {"cos", -0x1.96344ep+117f, 0x1.f8a9b4p-1f},
    {"cos", 0x1.119ae6p+115f, 0x1.f3176ap-1f}, {"cos", -0x1.119ae6p+115f, 0x1.f3176ap-1f},
    {"cos", 0x1.20ffccp-7f, 0x1.fffae8p-1f}, {"cos", -0x1.20ffccp-7f, 0x1.fffae8p-1f},
    {"cos", 0x1.e072ecp+67f, 0x1.b598acp-2f}, {"cos", -0x1.e072ecp+67f, 0x1.b598acp-2f},
    {"cos", 0x1.4555p+51f, 0x1.115d7ep-1f}, {"cos", -0x1.4555p+51f, 0x1.115d7ep-1f},
    {"erf", 0x1.81d5acp-13f, 0x1.b35e28p-13f}, {"erf", -0x1.81d5acp-13f, -0x1.b35e28p-13f},
    {"erf", 0x1.800afap-12f, 0x1.b15892p-12f}, {"erf", -0x1.800afap-12f, -0x1.b15892p-12f},
    {"erf", 0x1.5d48ccp-18f, 0x1.8a200ep-18f}, {"erf", -0x1.5d48ccp-18f, -0x1.8a200ep-18f},
    {"erf", 0x1.1d3a5ap-20f, 0x1.41d864p-20f}, {"erf", -0x1.1d3a5ap-20f, -0x1.41d864p-20f},
    {"erf", 0x1.546418p-126f, 0x1.80171p-126f}, {"erf", -0x1.546418p-126f, -0x1.80171p-126f},
    {"erf", 0x1.546418p-125f, 0x1.80171p-125f}, {"erf", -0x1.546418p-125f, -0x1.80171p-125f},
    {"erf", 0x1.546418p-124f, 0x1.80171p-124f}, {"erf", -0x1.546418p-124f, -0x1.80171p-124f},
    {"erf", 0x1.546418p-123f, 0x1.80171p-123f}, {"erf", -0x1.546418p-123f, -0x1.80171p-123f},
    // sine and cosine nearest to zero, where the reduction of the argument cancels most
    {"sin", 0x1.f37c8ap+96f, -0x1.bbdd52p-29f}, {"sin", 0x1.47d0fep+35f, -0x1.149dbp-28f},
    {"sin", 0x1.f37c8ap+97f, 0x1.bbdd52p-28f}, {"sin", 0x1.47d0fep+36f, 0x1.149dbp-27f},
    {"sin", 0x1.f9cbe2p+8f, -0x1.1fa3bcp-27f}, {"sin", 0x1.f37c8ap+98f, 0x1.bbdd52p-27f},
    {"sin", 0x1.32ede2p+86f, -0x1.bc77bep-27f}, {"sin", 0x1.628d4cp+41f, 0x1.db49e4p-27f},
    {"cos", 0x1.f37c8ap+95f, -0x1.bbdd52p-30f}, {"cos", 0x1.47d0fep+34f, -0x1.149dbp-29f},
    {"cos", 0x1.f9cbe2p+7f, -0x1.1fa3bcp-28f}, {"cos", 0x1.32ede2p+85f, -0x1.bc77bep-28f},
    {"cos", 0x1.628d4cp+40f, -0x1.db49e4p-28f}, {"cos", 0x1.13093p+76f, -0x1.f7e04cp-28f},
    {"cos", 0x1.b08c4ap+111f, -0x1.5f52eap-27f}, {"cos", 0x1.4665d2p+25f, 0x1.927bccp-27f},
    // results below the smallest normal number, 0x1p-126, and at the ends of the range
    {"exp", -0x1.65cf3p+6f, 0x1.edb9cp-130f}, {"exp", -0x1.64fbb2p+6f, 0x1.2f7efp-129f},
    {"exp", -0x1.687f6ep+6f, 0x1.f838cp-131f}, {"exp", -0x1.5f0462p+6f, 0x1.512bbp-127f},
    {"exp", -0x1.638066p+6f, 0x1.b78f7p-129f}, {"exp", -0x1.6f3f0ap+6f, 0x1.753ap-133f},
    {"exp", -0x1.62313ep+6f, 0x1.30e21p-128f}, {"exp", -0x1.68c5ccp+6f, 0x1.d6bc4p-131f},
    {"exp", -0x1.5d744ap+6f, 0x1.f25a04p-127f}, {"exp", -0x1.5ee174p+6f, 0x1.5cdedp-127f},
    {"exp2", -0x1.2cp+7f, 0x0p+0f}, {"exp2", -0x1.f9914p+6f, 0x1.86390cp-127f},
    {"exp2", -0x1.f9029p+6f, 0x1.adcaf4p-127f}, {"exp2", -0x1.fb3b84p+6f, 0x1.246a8cp-127f},
    {"exp2", -0x1.f8b8p+6f, 0x1.c40ab4p-127f}, {"exp2", -0x1.fbb5b6p+6f, 0x1.0d33d4p-127f},
    {"exp2", -0x1.f82258p+6f, 0x1.f43c14p-127f}, {"exp2", -0x1.ff330ap+6f, 0x1.26195p-128f},
    {"erf", 0x1.c1abf8p-127f, 0x1.fb6678p-127f}, {"erf", 0x1.afe4ep-127f, 0x1.e7571cp-127f},
    {"erf", 0x1.9e1dc8p-127f, 0x1.d347cp-127f}, {"erf", 0x1.8c56bp-127f, 0x1.bf3864p-127f},
    {"erf", 0x1.7a8f98p-127f, 0x1.ab2908p-127f}, {"erf", 0x1.68c88p-127f, 0x1.9719acp-127f},
    {"erf", -0x1.c1abf8p-127f, -0x1.fb6678p-127f}, {"erf", -0x1.afe4ep-127f, -0x1.e7571cp-127f},
    {"exp", -0x1.5d589ep+6f, 0x1.00004cp-126f}, {"exp", -0x1.5d58ap+6f, 0x1.ffff98p-127f},
    {"exp", -0x1.9fe368p+6f, 0x1p-149f}, {"exp", -0x1.9fe36ap+6f, 0x0p+0f}, {"exp", -0x1.9d1d9ep+6f, 0x1p-149f},
    {"exp", -0x1.9d1dap+6f, 0x1p-149f}, {"exp", 0x1.62e42ep+6f, 0x1.ffff08p+127f}, {"exp", 0x1.62e43p+6f, INFINITY},
    {"cosh", 0x1.65a9f8p+6f, 0x1.ffffd8p+127f}, {"sinh", 0x1.65a9f8p+6f, 0x1.ffffd8p+127f},
    {"cosh", 0x1.65a9fap+6f, INFINITY}, {"sinh", 0x1.65a9fap+6f, INFINITY},
};

static void test_hard_cases(Test* t) {
    if (inexact()) { skip(t, inexact()); return; }
    for (size_t i = 0; i < sizeof hard_cases / sizeof hard_cases[0]; i++) {
        const Case* c = &hard_cases[i];
        float y = function(c->name)->call(c->x);
        check(t, float_bits(y) == float_bits(c->y), "%s(%a): found %a, expected %a", c->name, (double)c->x, (double)y,
              (double)c->y);
    }
}

static void test_hash(Test* t) {
    if (inexact()) { skip(t, inexact()); return; }
    for (int k = 0; k < N_FUNCTIONS; k++) {
        uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a over 32-bit words
        float x[BLOCK], y[BLOCK];
        for (uint32_t i = 0; i < N_SAMPLE; i += BLOCK) {
            for (uint32_t j = 0; j < BLOCK; j++) { x[j] = sample(i + j); }
            functions[k].loop(y, x, BLOCK);
            for (uint32_t j = 0; j < BLOCK; j++) {
                uint32_t bits = isnan(y[j]) ? 0x7fc00000u : float_bits(y[j]);
                hash = (hash ^ bits) * 0x100000001b3u;
            }
        }
        check(t, hash == functions[k].hash, "%s: found hash 0x%016llx, expected 0x%016llx", functions[k].name,
              (unsigned long long)hash, (unsigned long long)functions[k].hash);
    }
}

static void test_rises(Test* t) {
    if (inexact()) { skip(t, inexact()); return; }
    for (int k = 0; k < N_FUNCTIONS; k++) {
        if (functions[k].rises == '-') { continue; }
        for (uint32_t i = 0; i < N_SAMPLE; i += 37) {
            float x = sample(i), before = functions[k].call(x);
            for (int j = 0; j < 16; j++) {
                float next = nextafterf(x, INFINITY), y = functions[k].call(next);
                check(t, isnan(before) || y >= before, "%s falls from %a at %a to %a at %a", functions[k].name,
                      (double)before, (double)x, (double)y, (double)next);
                x = next;
                before = y;
            }
        }
    }
}

// ---- promises of every build ----

// the C library's double decides the rounding unless it is within 2^-44 of the middle between two floats; a build that
// does not round correctly is allowed 2 units in the last place
static void test_library_double(Test* t) {
    const int64_t allowed = inexact() ? 2 : 0;
    for (int k = 0; k < N_FUNCTIONS; k++) {
        for (uint32_t i = 0; i < N_SAMPLE; i++) {
            float x = sample(i), y = functions[k].call(x);
            double d = functions[k].library((double)x);
            float low = (float)(d * (1.0 - 0x1p-44)), high = (float)(d * (1.0 + 0x1p-44));
            int ok = isnan(d) ? isnan(y) : (float_bits(low) != float_bits(high) || float_ulps(y, low) <= allowed);
            check(t, ok, "%s(%a): found %a, expected %a", functions[k].name, (double)x, (double)y, (double)low);
        }
    }
}

static void test_symmetry(Test* t) {
    for (int k = 0; k < N_FUNCTIONS; k++) {
        if (functions[k].symmetry == '-') { continue; }
        for (uint32_t i = 0; i < N_SAMPLE; i++) {
            float x = sample(i), plus = functions[k].call(x), minus = functions[k].call(-x);
            uint32_t expected = float_bits(plus) ^ (functions[k].symmetry == 'o' ? 0x80000000u : 0);
            check(t, isnan(x) || isnan(plus) || float_bits(minus) == expected, "%s(%a): found %a, but %a for -x",
                  functions[k].name, (double)x, (double)plus, (double)minus);
        }
    }
}

static void test_special(Test* t) {
    const float inf = INFINITY, nan = NAN, tiny = 0x1p-149f, big = 0x1.fffffep+127f;
    const Case cases[] = {
        {"exp", 0.0f, 1.0f}, {"exp", -0.0f, 1.0f}, {"exp", inf, inf}, {"exp", -inf, 0.0f}, {"exp", big, inf},
        {"exp", -big, 0.0f}, {"exp2", inf, inf}, {"exp2", -inf, 0.0f}, {"exp2", 127.0f, 0x1p127f},
        {"exp2", 128.0f, inf}, {"exp2", -149.0f, tiny}, {"exp2", -150.0f, 0.0f}, {"exp2", 3.0f, 8.0f},
        {"expm1", -0.0f, -0.0f}, {"expm1", tiny, tiny}, {"expm1", -inf, -1.0f}, {"expm1", inf, inf},
        {"log", 1.0f, 0.0f}, {"log", 0.0f, -inf}, {"log", -0.0f, -inf}, {"log", inf, inf}, {"log", -1.0f, nan},
        {"log", -inf, nan}, {"log2", tiny, -149.0f}, {"log2", 0x1p100f, 100.0f}, {"log2", 0.0f, -inf},
        {"log2", -tiny, nan}, {"log2", inf, inf}, {"log1p", -1.0f, -inf}, {"log1p", -0.0f, -0.0f},
        {"log1p", -tiny, -tiny}, {"log1p", -2.0f, nan}, {"log1p", inf, inf}, {"log1p", -inf, nan},
        {"tanh", inf, 1.0f}, {"tanh", -inf, -1.0f}, {"tanh", -0.0f, -0.0f}, {"tanh", -tiny, -tiny},
        {"cosh", 0.0f, 1.0f}, {"cosh", -inf, inf}, {"cosh", -big, inf}, {"sinh", -0.0f, -0.0f}, {"sinh", -inf, -inf},
        {"sinh", tiny, tiny}, {"sin", -0.0f, -0.0f}, {"sin", tiny, tiny}, {"sin", inf, nan}, {"cos", -inf, nan},
        {"cos", 0.0f, 1.0f}, {"cos", tiny, 1.0f}, {"erf", -0.0f, -0.0f}, {"erf", inf, 1.0f}, {"erf", -inf, -1.0f},
        {"erf", 0x1p-148f, 0x1p-148f},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        float y = function(cases[i].name)->call(cases[i].x);
        char what[64];
        snprintf(what, sizeof what, "%s(%a)", cases[i].name, (double)cases[i].x);
        check_bits(t, what, &y, &cases[i].y, 1);
    }
    for (int k = 0; k < N_FUNCTIONS; k++) {
        check(t, isnan(functions[k].call(nan)), "%s(NaN): found %a", functions[k].name, (double)functions[k].call(nan));
    }
}

// lengths that leave every remainder of a vector; the single calls go through a pointer, so they stay scalar
static void test_loop(Test* t) {
    if (is_contracted()) { skip(t, FUSED); return; }
    enum { MAX = 133 };
    for (int k = 0; k < N_FUNCTIONS; k++) {
        for (int n = 1; n <= MAX; n++) {
            float x[MAX], y[MAX + 1], expected[MAX + 1];
            for (int i = 0; i < n; i++) {
                x[i] = sample((uint32_t)(n * 7919 + i * 6007) % N_SAMPLE);
                expected[i] = functions[k].call(x[i]);
            }
            y[n] = expected[n] = 12345.0f;  // not to be written
            functions[k].loop(y, x, n);
            check_bits(t, functions[k].name, y, expected, (size_t)n + 1);
        }
    }
}

static void test_tanh_cosh(Test* t) {
    if (is_contracted()) { skip(t, FUSED); return; }
    float x[BLOCK], tanh_x[BLOCK], cosh_x[BLOCK], tanh_alone[BLOCK], cosh_alone[BLOCK];
    for (uint32_t i = 0; i < N_SAMPLE; i += BLOCK) {
        for (uint32_t j = 0; j < BLOCK; j++) { x[j] = sample(i + j); }
        for (int j = 0; j < BLOCK; j++) { fm_tanh_cosh(x[j], &tanh_x[j], &cosh_x[j]); }
        tanh_loop(tanh_alone, x, BLOCK);
        cosh_loop(cosh_alone, x, BLOCK);
        check_bits(t, "tanh of the pair", tanh_x, tanh_alone, BLOCK);
        check_bits(t, "cosh of the pair", cosh_x, cosh_alone, BLOCK);
    }
    for (size_t i = 0; i < sizeof hard_cases / sizeof hard_cases[0]; i++) {
        float x1 = hard_cases[i].x, both[2], alone[2] = {fm_tanh(x1), fm_cosh(x1)};
        fm_tanh_cosh(x1, &both[0], &both[1]);
        check_bits(t, "the pair at a hard case", both, alone, 2);
    }
}

static void test_powi(Test* t) {
    check(t, fm_powi(0.9, 0) == 1.0 && fm_powi(0.9, 1) == 0.9, "powers 0 and 1: found %a and %a", fm_powi(0.9, 0),
          fm_powi(0.9, 1));
    check(t, fm_powi(2.0, 1000) == 0x1p1000 && fm_powi(-0.5, 31) == -0x1p-31, "powers of two are not exact");
    check(t, fm_powi(0.5, 2147483647) == 0.0, "0.5^(2^31-1): found %a", fm_powi(0.5, 2147483647));
    for (int n = 1; n <= 100000; n = n * 3 + 1) {
        double found = fm_powi(0.999, n), expected = pow(0.999, n);
        double allowed = expected * n * 0x1p-52;  // the rounding of the first square is raised to n / 2, and so on
        check(t, fabs(found - expected) <= allowed, "0.999^%d: found %a, expected %a", n, found, expected);
    }
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"hard cases", "the inputs that are hardest to round, or have tiny results, give the proven floats",
         test_hard_cases},
        {"hash", "the results over 2^20 inputs per function are those of the proven build", test_hash},
        {"monotonic", "functions that rise never fall from one float to the next", test_rises},
        {"sample", "agrees with the C library's double wherever that decides the rounding", test_library_double},
        {"symmetry", "odd and even functions are so to the last bit", test_symmetry},
        {"special values", "zeros, infinities, NaN and the ends of the range give what C's Annex F says", test_special},
        {"loop", "vector loops of 1 to 133 elements give the bits of single calls", test_loop},
        {"tanh_cosh", "gives the bits of tanh and cosh", test_tanh_cosh},
        {"powi", "integer powers agree with pow, exactly for powers of two", test_powi},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
