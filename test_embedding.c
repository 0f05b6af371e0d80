/*
Promises of llmc/ops/embedding.h, llmc/ops/residual.h and llmc/ops/cast.h, which follow from the tables (llmc/test/op.h):
sums of two rows forward, sums over positions in ascending order backward, added to what the gradient already held. Fast
builds for GPUs may cut a long sum over positions in pieces.
*/
#include "llmc/ops/cast.h"
#include "llmc/ops/embedding.h"
#include "llmc/ops/residual.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_check, op_main

// ---- embedding; V and M are larger than what is reached, so that rows nobody asked for can be watched ----

enum { TOKENS, WTE, WPE, OUT, DOUT, DWTE, DWPE };

static void embedding_ref(float* const* a, const int* d) {
    embedding_forward_ref(a[OUT], (int*)a[TOKENS], a[WTE], a[WPE], d['B'], d['T'], d['C'], d['t']);
}

OP_STORED(X)
static void embedding_fast(X* const* x, float* const* a, const int* d, const Device* dev) {
    embedding_forward(x[OUT], (int*)a[TOKENS], x[WTE], x[WPE], d['B'], d['T'], d['C'], d['t'], dev);
}

static void gradients_ref(float* const* a, const int* d) {
    embedding_backward_ref(a[DWTE], a[DWPE], a[DOUT], (int*)a[TOKENS], d['B'], d['T'], d['C']);
}

OP_STORED(X)
static void gradients_fast(X* const* x, float* const* a, const int* d, const Device* dev) {
    embedding_backward(a[DWTE], a[DWPE], x[DOUT], (int*)a[TOKENS], d['B'], d['T'], d['C'], dev);
}

static void embedding_double(double* const* a, const int* d) {
    for (int i = 0, C = d['C']; i < d['B'] * d['T'] * C; i++) {
        a[OUT][i] = a[WTE][(int)a[TOKENS][i / C] * C + i % C] + a[WPE][(d['t'] + i / C % d['T']) * C + i % C];
    }
}

static double embedding_error(int array, const int* d) {
    switch (array) {
        case OUT: return 0x1p-24;  // one rounding of a number below 2
        case DWTE: return rounding_walk(d['B'] * d['T'], 8.0);  // at most B*T sums below 8
        default: return rounding_walk(d['B'], 4.0);             // B sums below 4
    }
}

// one sum of two in every build; any order of n sums is off by at most n * 2^-24 * the sum of their sizes
static double embedding_apart(const OpProblem* p, int array, size_t i) {
    int n_terms = array == OUT ? 0 : array == DWTE ? p->d['B'] * p->d['T'] : p->d['B'];
    return n_terms * 0x1p-23 * (double)p->sizes[array][i];
}

static const int shapes[][OP_DIMS] = {  // B, T, C, V, M, t0: few tokens, so that most come again
    {1, 1, 1, 1, 10, 0}, {1, 7, 33, 3, 16, 9}, {3, 33, 7, 5, 42, 0}, {2, 31, 64, 7, 40, 9}, {2, 9, 65, 2, 18, 0},
    {4, 16, 257, 97, 25, 9}, {257, 1, 3, 4, 10, 0}, {1, 257, 129, 11, 266, 9}, {2, 65, 64, 3, 74, 0},
    {2, 129, 24, 3, 138, 9}, {4, 16, 264, 97, 25, 9}, {1, 1, 1, 1, 10, 9}, {3, 33, 7, 5, 42, 9}, {1, 7, 33, 3, 16, 0},
    {2, 31, 64, 7, 40, 0}, {2, 9, 65, 2, 18, 9}, {4, 16, 257, 97, 25, 0}, {257, 1, 3, 4, 10, 9},
    {1, 257, 129, 11, 266, 0}, {0},
};

static const Op embedding = {
    .name = "embedding", .dims = "BTCVMt",
    .arrays = {
        {.number = TOKENS, .name = "tokens", .extents = "BT", .role = GIVEN | INDEX, .needed = "dwte", .below = 'V'},
        {WTE, "wte", "VC", GIVEN, 1.0f, ""},
        {WPE, "wpe", "MC", GIVEN, 1.0f, ""},
        {OUT, "out", "BTC", MADE, 0.0f, ""},
        {DOUT, "dout", "BTC", GIVEN, 1.0f, "dwte dwpe"},
        {DWTE, "dwte", "VC", GRADIENT | ADDED | ASKED | FLOAT, 1.0f},
        {DWPE, "dwpe", "MC", GRADIENT | ADDED | ASKED | FLOAT, 1.0f},
    },
    .shapes = shapes, .traits = ANYWHERE | SPECIAL_KERNELS,
    .forward_ref = embedding_ref, .forward = OP_FAST(embedding_fast),
    .backward_ref = gradients_ref, .backward = OP_FAST(gradients_fast),
    .in_double = embedding_double, .error = embedding_error, .judged = {{3, 7, 5, 4, 16, 0}}, .apart = embedding_apart,
};

static void check_both(Test* t, const OpProblem* p) {
    Device dev = test_device(2);
    op_check(t, p, 0, &dev);
    op_check(t, p, 1, &dev);
    device_free(&dev);
}

// more positions than one block sorts, one token in every third place, and one that has its lower 16 bits
static void test_many(Test* t) {
    const int shape[] = {5, 501, 8, 70001, 510, 0};
    OpProblem p = op_problem(&embedding, shape, EASY, 0);
    for (int n = 0; n < 5 * 501; n += 3) { ((int*)p.a[TOKENS])[n] = n % 2 ? 66051 : 66051 - 65536; }
    op_solve(&p);
    check_both(t, &p);
    op_problem_free(&p);
}

static void test_obvious(Test* t) {
    const int shape[] = {2, 2, 2, 2, 3, 1}, tokens[] = {1, 1, 0, 1};  // positions 1 and 2
    const float wte[] = {1, 2, 10, 20}, wpe[] = {100, 200, 300, 400, 500, 600}, dout[] = {1, 2, 3, 4, 5, 6, 7, 8};
    const float want[] = {310, 420, 510, 620, 301, 402, 510, 620}, want_dwte[] = {5, 6, 11, 14},
                want_dwpe[] = {6, 8, 10, 12, 0, 0};
    OpProblem p = op_problem(&embedding, shape, EASY, 0);
    Device dev = test_device(2);
    memcpy(p.a[TOKENS], tokens, sizeof tokens), memcpy(p.a[WTE], wte, sizeof wte), memcpy(p.a[WPE], wpe, sizeof wpe);
    memcpy(p.a[DOUT], dout, sizeof dout);
    memset(p.before[DWTE], 0, sizeof wte), memset(p.before[DWPE], 0, sizeof wpe);
    op_answer(t, &p, &dev);
    check_bits(t, "out", p.a[OUT], want, 8);
    check_bits(t, "dwte", p.a[DWTE], want_dwte, 4);
    check_bits(t, "dwpe", p.a[DWPE], want_dwpe, 6);
    device_free(&dev);
    op_problem_free(&p);
}

// 2^24 + 1 rounds back, 1 + 1 + 2^24 does not: positions must come in ascending order, after what was there
static void test_order(Test* t) {
    const int shape[] = {1, 3, 1, 1, 3, 0};
    const float ascending[] = {1, 1, 16777216}, reversed[] = {16777216, 1, 1};
    OpProblem p = op_problem(&embedding, shape, EASY, 0);
    Device dev = test_device(2);
    p.before[DWTE][0] = 0.0f;
    memcpy(p.a[DOUT], ascending, sizeof ascending);
    op_answer(t, &p, &dev);
    check(t, p.a[DWTE][0] == 16777218.0f, "1 + 1 + 2^24: found %.1f", (double)p.a[DWTE][0]);
    memcpy(p.a[DOUT], reversed, sizeof reversed);
    op_answer(t, &p, &dev);
    check(t, p.a[DWTE][0] == 16777216.0f, "2^24 + 1 + 1: found %.1f", (double)p.a[DWTE][0]);
    device_free(&dev);
    op_problem_free(&p);
}

// a table in parts, with some rows of -0: forward from the part that has a token, gradients of each part's own rows,
// are the bits of the whole table
static void test_parts(Test* t) {
    enum { N = 301, V = 60, C = 9 };
    float *wte = random_array(V * C, 1.0f, 1), *dout = random_array(N * C, 1.0f, 2), *want = filled_array(N * C, NAN),
          *want_dwte = random_array(V * C, 1.0f, 3), *out = filled_array(N * C, NAN);
    int* tokens = (int*)new_array(N, sizeof(int));
    Device dev = test_device(2);
    for (int n = 0; n < N; n++) { tokens[n] = n * n % 7 == 0 ? 30 : (n * 37 + n / 5) % V; }
    for (int c = 0; c < 5 * C; c++) { wte[30 * C + c] = -0.0f; }
    for (int P = 1; P <= 5; P++) {
        const int R = V / P;
        float *dwte = copied_array(want_dwte, V * C), *whole = copied_array(want_dwte, V * C),
              *nothing = filled_array((size_t)(P * N * C), NAN);
        float* parts = to_device(nothing, (size_t)(P * N * C), &dev);
        float *d_dout = to_device(dout, N * C, &dev), *d_out = to_device(out, N * C, &dev);
        int *d_tokens = ints_to_device(tokens, N, &dev), *own = ints_to_device(tokens, N, &dev);
        token_embedding_forward_ref(want, tokens, wte, N, C);
        token_embedding_backward_ref(whole, dout, tokens, N, C);
        for (int p = 0; p < P; p++) {
            float *rows = to_device(wte + p * R * C, (size_t)(R * C), &dev),
                  *drows = to_device(dwte + p * R * C, (size_t)(R * C), &dev);
            embedding_own(own, d_tokens, p * R, R, N, &dev);
            token_embedding_forward(parts + p * N * C, own, rows, N, C, &dev);
            token_embedding_backward(drows, d_dout, own, N, C, &dev);
            from_device(dwte + p * R * C, drows, (size_t)(R * C), &dev), device_drop(rows);
        }
        embedding_owned(d_out, parts, d_tokens, R, N, C, &dev);
        from_device(out, d_out, N * C, &dev);
        check_bits(t, "out", out, want, N * C);
        for (int i = 0; i < V * C && FAST_KERNELS; i++) {
            check(t, fabs((double)(dwte[i] - whole[i])) <= N * 0x1p-23 * N, "dwte[%d] of %d parts", i, P);
        }
        if (!FAST_KERNELS) { check_bits(t, "dwte", dwte, whole, V * C); }
        device_drop(parts), device_drop(d_dout), device_drop(d_tokens), device_drop(own);
        free(dwte), free(whole), free(nothing);
    }
    device_free(&dev);
    free(wte), free(dout), free(want), free(want_dwte), free(out), free(tokens);
}

#ifndef __CUDACC__
// a table of bf16 or fp8 gives its values
static void test_stored(Test* t) {
    const int tokens[] = {2, 0, 2};
    const uint16_t table[] = {0x3f80, 0xbf80, 0x0001, 0x8000, 0x7f80, 0x4049};  // (3, 2)
    const uint32_t want[] = {0x7f800000, 0x40490000, 0x3f800000, 0xbf800000, 0x7f800000, 0x40490000};
    float got[6];
    Device dev = test_device(2);
    token_embedding_forward_stored(got, tokens, stored_matrix(table, STORED_BF16, 3, 2, 3, NULL), 3, &dev);
    for (int i = 0; i < 6; i++) { check(t, float_bits(got[i]) == want[i], "number %d: %08x", i, float_bits(got[i])); }
    const uint8_t bytes[] = {0x38, 0xb8, 0x01, 0x80, 0x7e, 0x44};  // 1, -1; 2^-9, -0; 448, 3
    const float scale = 0.5f, values[] = {224.0f, 1.5f, 0.5f, -0.5f, 224.0f, 1.5f};
    const StoredMatrix fp8 = stored_matrix(bytes, STORED_FP8, 3, 2, 3, &scale);
    token_embedding_forward_stored(got, tokens, fp8, 3, &dev);
    check_bits(t, "fp8", got, values, 6);
    device_free(&dev);
}
#endif

// ---- each token with a position of its own ----

enum { PLACED_TOKENS, PLACES, PLACED_WTE, PLACED_WPE, PLACED_OUT, DPLACED_OUT, DPLACED_WTE, DPLACED_WPE };

static void placed_ref(float* const* a, const int* d) {
    placed_embedding_forward_ref(a[PLACED_OUT], (int*)a[PLACED_TOKENS], (int*)a[PLACES], a[PLACED_WTE], a[PLACED_WPE],
                                 d['N'], d['C']);
}

OP_STORED(X)
static void placed_fast(X* const* x, float* const* a, const int* d, const Device* dev) {
    placed_embedding_forward(x[PLACED_OUT], (int*)a[PLACED_TOKENS], (int*)a[PLACES], (const X*)x[PLACED_WTE],
                             (const X*)x[PLACED_WPE], d['N'], d['C'], dev);
}

static void placed_gradients_ref(float* const* a, const int* d) {
    placed_embedding_backward_ref(a[DPLACED_WTE], a[DPLACED_WPE], a[DPLACED_OUT], (int*)a[PLACED_TOKENS],
                                  (int*)a[PLACES], d['N'], d['C']);
}

OP_STORED(X)
static void placed_gradients_fast(X* const* x, float* const* a, const int* d, const Device* dev) {
    placed_embedding_backward(a[DPLACED_WTE], a[DPLACED_WPE], x[DPLACED_OUT], (int*)a[PLACED_TOKENS], (int*)a[PLACES],
                              d['N'], d['C'], dev);
}

static void placed_double(double* const* a, const int* d) {
    for (int i = 0, C = d['C']; i < d['N'] * C; i++) {
        const int n = i / C, c = i % C;
        a[PLACED_OUT][i] = a[PLACED_WTE][(int)a[PLACED_TOKENS][n] * C + c] + a[PLACED_WPE][(int)a[PLACES][n] * C + c];
    }
}

static double placed_error(int array, const int* d) {
    return array == PLACED_OUT ? 0x1p-24 : rounding_walk(d['N'], 8.0);  // as embedding's, at most N sums below 8
}

static double placed_apart(const OpProblem* p, int array, size_t i) {
    return array == PLACED_OUT ? 0.0 : p->d['N'] * 0x1p-23 * (double)p->sizes[array][i];
}

static const int placed_shapes[][OP_DIMS] = {  // N, C, V, M
    {1, 1, 1, 1}, {7, 33, 3, 4}, {99, 64, 5, 40}, {257, 24, 11, 3}, {0},
};

static const Op placed_embedding = {
    .name = "placed embedding", .dims = "NCVM",
    .arrays = {
        {.number = PLACED_TOKENS, .name = "placed_tokens", .extents = "N", .role = GIVEN | INDEX, .below = 'V'},
        {.number = PLACES, .name = "places", .extents = "N", .role = GIVEN | INDEX, .below = 'M'},
        {PLACED_WTE, "placed_wte", "VC", GIVEN, 1.0f},
        {PLACED_WPE, "placed_wpe", "MC", GIVEN, 1.0f},
        {PLACED_OUT, "placed_out", "NC", MADE},
        {DPLACED_OUT, "dplaced_out", "NC", GIVEN, 1.0f},
        {DPLACED_WTE, "dplaced_wte", "VC", GRADIENT | ADDED | FLOAT, 1.0f},
        {DPLACED_WPE, "dplaced_wpe", "MC", GRADIENT | ADDED | FLOAT, 1.0f},
    },
    .shapes = placed_shapes, .traits = ANYWHERE | SPECIAL_KERNELS,
    .forward_ref = placed_ref, .forward = OP_FAST(placed_fast),
    .backward_ref = placed_gradients_ref, .backward = OP_FAST(placed_gradients_fast),
    .in_double = placed_double, .error = placed_error, .judged = {{21, 5, 4, 6}}, .apart = placed_apart,
};

// ---- without positions ----

enum { TOKEN_IDS, TOKEN_WTE, TOKEN_OUT, DTOKEN_OUT, DTOKEN_WTE };

static void token_ref(float* const* a, const int* d) {
    token_embedding_forward_ref(a[TOKEN_OUT], (int*)a[TOKEN_IDS], a[TOKEN_WTE], d['N'], d['C']);
}

OP_STORED(X)
static void token_fast(X* const* x, float* const* a, const int* d, const Device* dev) {
    token_embedding_forward(x[TOKEN_OUT], (int*)a[TOKEN_IDS], (const X*)x[TOKEN_WTE], d['N'], d['C'], dev);
}

static void token_gradient_ref(float* const* a, const int* d) {
    token_embedding_backward_ref(a[DTOKEN_WTE], a[DTOKEN_OUT], (int*)a[TOKEN_IDS], d['N'], d['C']);
}

OP_STORED(X)
static void token_gradient_fast(X* const* x, float* const* a, const int* d, const Device* dev) {
    token_embedding_backward(a[DTOKEN_WTE], x[DTOKEN_OUT], (int*)a[TOKEN_IDS], d['N'], d['C'], dev);
}

static void token_double(double* const* a, const int* d) {
    for (int i = 0, C = d['C']; i < d['N'] * C; i++) {
        a[TOKEN_OUT][i] = a[TOKEN_WTE][(int)a[TOKEN_IDS][i / C] * C + i % C];
    }
}

static double token_error(int array, const int* d) {
    return array == TOKEN_OUT ? 0.0 : rounding_walk(d['N'], 8.0);  // a copy; at most N sums below 8
}

static double token_apart(const OpProblem* p, int array, size_t i) {
    return array == TOKEN_OUT ? 0.0 : p->d['N'] * 0x1p-23 * (double)p->sizes[array][i];
}

static const int token_shapes[][OP_DIMS] = {{1, 1, 1}, {7, 33, 3}, {99, 65, 5}, {257, 129, 11}, {0}};  // N, C, V

static const Op token_embedding = {
    .name = "token embedding", .dims = "NCV",
    .arrays = {
        {.number = TOKEN_IDS, .name = "token_ids", .extents = "N", .role = GIVEN | INDEX, .below = 'V'},
        {TOKEN_WTE, "token_wte", "VC", GIVEN, 1.0f},
        {TOKEN_OUT, "token_out", "NC", MADE},
        {DTOKEN_OUT, "dtoken_out", "NC", GIVEN, 1.0f},
        {DTOKEN_WTE, "dtoken_wte", "VC", GRADIENT | ADDED | FLOAT, 1.0f},
    },
    .shapes = token_shapes, .traits = ANYWHERE | SPECIAL_KERNELS,
    .forward_ref = token_ref, .forward = OP_FAST(token_fast),
    .backward_ref = token_gradient_ref, .backward = OP_FAST(token_gradient_fast),
    .in_double = token_double, .error = token_error, .judged = {{21, 5, 4}}, .apart = token_apart,
};

// ---- residual ----

enum { LEFT, RIGHT, SUM };

static void residual_ref(float* const* a, const int* d) {
    residual_forward_ref(a[SUM], a[LEFT], a[RIGHT], (size_t)d['n']);
}

OP_STORED(X)
static void residual_fast(X* const* x, float* const* a, const int* d, const Device* dev) {
    residual_forward(x[SUM], x[LEFT], x[RIGHT], (size_t)d['n'], dev);
}

static void residual_double(double* const* a, const int* d) {
    for (int i = 0; i < d['n']; i++) { a[SUM][i] = a[LEFT][i] + a[RIGHT][i]; }
}

static double residual_error(int array, const int* d) {
    (void)array, (void)d;
    return 0x1p-24;  // one rounding of a number below 2
}

static const int lengths[][OP_DIMS] = {{1}, {7}, {8}, {33}, {257}, {4096}, {10007}, {0}};

// one sum of two in every build, so kernels need no `apart`
static const Op residual = {
    .name = "residual", .dims = "n",
    .arrays = {
        {LEFT, "left", "n", GIVEN, 1.0f},
        {RIGHT, "right", "n", GIVEN, 1.0f},
        {SUM, "sum", "n", MADE, 0.0f, NULL, "left right"},
    },
    .shapes = lengths, .traits = ANYWHERE | ROWS | SPECIAL_KERNELS,
    .forward_ref = residual_ref, .forward = OP_FAST(residual_fast),
    .in_double = residual_double, .error = residual_error, .judged = {{257}},
};

// ---- cast: of floats to what is stored, and back ----

enum { FLOATS, STORED, FLOATS_AGAIN };

static void cast_both_ref(float* const* a, const int* d) {
    cast_ref(a[STORED], a[FLOATS], (size_t)d['n']);
    cast_ref(a[FLOATS_AGAIN], a[STORED], (size_t)d['n']);
}

OP_STORED(X)
static void cast_both(X* const* x, float* const* a, const int* d, const Device* dev) {
    cast(x[STORED], (const float*)a[FLOATS], (size_t)d['n'], dev);
    cast(a[FLOATS_AGAIN], (const X*)x[STORED], (size_t)d['n'], dev);
}

static double cast_apart(const OpProblem* p, int array, size_t i) {
    return array == FLOATS_AGAIN && p->as_bf16 ? 0x1p-8 * (double)p->sizes[array][i] : 0.0;
}

static const Op casts = {
    .name = "cast", .dims = "n",
    .arrays = {
        {FLOATS, "floats", "n", GIVEN | FLOAT, 1.0f},
        {STORED, "stored", "n", MADE},
        {FLOATS_AGAIN, "floats_again", "n", MADE | FLOAT},
    },
    .shapes = lengths, .traits = ANYWHERE,
    .forward_ref = cast_both_ref, .forward = OP_FAST(cast_both), .apart = cast_apart,
};

int main(int argc, char** argv) {
    const Op* ops[] = {
        &embedding, &placed_embedding, &token_embedding, &residual, &casts,
    };
    const Promise promises[] = {
        {"embedding many", "2505 positions and 70001 tokens, of which two fill every third place", test_many},
        {"embedding obvious", "a sum that can be done by hand", test_obvious},
        {"embedding parts", "a table whose rows lie in 1 to 5 parts: the bits of the whole one", test_parts},
        {"embedding order", "positions are added in ascending order", test_order},
#ifndef __CUDACC__
        {"embedding stored", "a table stored as bf16 or fp8 gives its values", test_stored},
#endif
    };
    return op_main(argc, argv, ops, sizeof ops / sizeof *ops, promises, sizeof promises / sizeof *promises);
}
