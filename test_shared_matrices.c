/*
Promises of llmc/models/linear.h about matrices that ranks share (--tp), and so of the turns of ranks/tensor_parallel.h:
2 to 4 forked ranks find what a rank finds that has all of the matrix, to the last bit, and send what the plan has for
it. Matrices of floats and, in C, of bf16, fp8 and fp4, whose blocks the ranks cut.
*/
#include "llmc/models/linear.h"  // linear_forward, linear_backward_input, linear_sends
#include "llmc/test/ranks.h"     // run_ranks

#if !defined(__CUDACC__) || defined(EXACT)
enum { OC = 240, C = 384, N = 5, MOST = C > OC ? C : OC };  // rows in sections of 96, 72 and 72

#ifdef __CUDACC__
static const Stored kinds[] = {STORED_F32};
#else
static const Stored kinds[] = {STORED_F32, STORED_BF16, STORED_FP8, STORED_FP4};
#endif
enum { N_KINDS = sizeof kinds / sizeof *kinds };

// any numbers but NaN; of fp8 each block has another scale, of fp4 each group
static StoredMatrix matrix_of(Stored kind) {
    const size_t n = (size_t)OC * C, n_scales = (size_t)fp8_blocks(OC) * (size_t)fp8_blocks(C);
    float *data = random_array(n, 1.0f, 1), *scales = random_array(n, 0.01f, 2);
    uint8_t *bytes = (uint8_t*)data, *exponents = (uint8_t*)scales;
    for (size_t i = 0; i < n && kind == STORED_BF16; i++) { ((uint16_t*)(void*)bytes)[i] = bf16_nearest(data[i]); }
    for (size_t i = 0; i < n && kind >= STORED_FP8; i++) { bytes[i] = (uint8_t)(i * 7 % 127 + i / 19 % 2 * 128); }
    for (size_t i = 0; i < n_scales && kind == STORED_FP8; i++) { scales[i] = 0.001f * (float)(i + 1); }
    for (size_t i = 0; i < n / 32 && kind == STORED_FP4; i++) { exponents[i] = (uint8_t)(115 + i * 5 % 11); }
    return stored_matrix(data, kind, OC, C, OC, scales);
}

static void matrix_free(StoredMatrix m) { free((void*)m.data), free((void*)m.scales); }

// what a rank has of it
static StoredMatrix part_of(const StoredMatrix* m, const Tensor* row, const Tensor* held, int place, int size) {
    const TensorPart part = tensor_part(row, place, size);
    StoredMatrix own = tensor_as_stored(held);
    float *data = filled_array((size_t)OC * C, NAN), *scales = filled_array((size_t)OC * C, NAN);
    const int each = m->kind == STORED_FP4 ? 2 : 1;
    tensor_take_rows(data, m->data, &part, C, each, stored_bytes(m->kind, (size_t)each), 0, OC);
    if (m->kind == STORED_FP8) { tensor_take_scales(scales, (const float*)m->scales, &part, C, 0, OC); }
    if (m->kind == STORED_FP4) { tensor_take_rows(scales, m->scales, &part, C, FP4_GROUP, 1, 0, OC); }
    own.kind = m->kind, own.data = data, own.scales = scales;
    return own;
}

// a row of a table, what a rank has of it, and all else that products ask of a model
static void model_of(Model* m, Split split, Stored kind, const RankGroup* group) {
    Tensor* row = &m->table[0];
    memset(m, 0, sizeof *m);
    *row = tensor("w.%d", 0, 1, OC, C, INIT_NONE, 0.0f, DECAY, AS_IS);
    tensor_split(row, split, 0);
    if (split == SPLIT_ROWS) { tensor_sections(row, 96, 72, 72, 0); }
    if (kind != STORED_F32) { tensor_stored(row, kind); }
    m->n_table = 1;
    m->tp = *group;
    m->held = m->local;
    m->local[0] = *row;
    tensor_hold_part(&m->local[0], group->place, group->size);
}

typedef struct { float out[N * OC], dinp[N * C], more[N * C]; } Found;  // more: dinp that goes on

// inp, dout and what dinp goes on from are this rank's, as out and dinp are
static Found* find(const Model* m, const StoredMatrix* matrix, const float* bias, const float* inp, const float* dout,
                   const float* before, uint64_t sent[2], const Device* dev) {
    Found* f = (Found*)new_array(1, sizeof(Found));
    const int is_float = matrix->kind == STORED_F32, size = m->tp.size;
    const size_t room_n = linear_room_elements(m, N) + 1;
    float* nothing = filled_array(room_n + (size_t)N * MOST, NAN);
    Linear w;
    memset(&w, 0, sizeof w);
    w.weight = *matrix, w.OC = matrix->rows, w.C = matrix->columns, w.tp = &m->tp;
    w.split = size > 1 ? m->table[0].split : SPLIT_NONE;
    w.sections = linear_sections_(&m->table[0]);
    const size_t n_out = (size_t)N * (size_t)(w.split == SPLIT_COLUMNS ? OC : w.OC);
    const size_t n_inp = (size_t)N * (size_t)(w.split == SPLIT_ROWS ? C : w.C);
    float *data = is_float ? to_device((const float*)matrix->data, (size_t)w.OC * (size_t)w.C, dev) : NULL;
    float *biases = to_device(bias, (size_t)(w.split == SPLIT_COLUMNS ? OC : w.OC), dev),
          *x = to_device(inp, n_inp, dev), *d = to_device(dout, n_out, dev), *out = to_device(nothing, n_out, dev),
          *dinp = to_device(nothing, n_inp, dev), *more = to_device(before, n_inp, dev);
    w.room = to_device(nothing, room_n, dev);
    w.bias = biases;
    if (is_float) { w.weight.data = data, w.weight.scales = NULL; }
    if (matrix->kind == STORED_BF16) { w.weight.scales = NULL; }
    const uint64_t begin = m->tp.group ? m->tp.group->link->bytes_sent : 0;
    linear_forward(out, x, w, N, dev);
    sent[0] = m->tp.group ? m->tp.group->link->bytes_sent - begin : 0;
    linear_backward_input(dinp, d, w, 0, N, dev);
    sent[1] = m->tp.group ? m->tp.group->link->bytes_sent - begin - sent[0] : 0;
    linear_backward_input(more, d, w, 1, N, dev);
    from_device(f->out, out, n_out, dev);
    from_device(f->dinp, dinp, n_inp, dev), from_device(f->more, more, n_inp, dev);
    device_drop(w.room), device_drop(biases), device_drop(x), device_drop(d);
    if (data) { device_drop(data); }
    free(nothing);
    return f;
}

// of (n_rows, columns) the columns that a rank has where ranks share `of` rows of the matrix, or its columns
static float* columns_of(const float* x, const TensorPart* part, int is_rows, int n_rows, int columns) {
    float *own = (float*)new_array((size_t)n_rows * (size_t)columns, sizeof(float)), *to = own;
    for (int r = 0; r < n_rows; r++) {
        for (int k = 0; k < part->n; k++) {
            const TensorWindow* w = &part->of[k];
            const int first = is_rows ? w->row : w->column, n = is_rows ? w->n_rows : w->n_columns;
            memcpy(to, x + (size_t)r * (size_t)columns + first, sizeof(float) * (size_t)n);
            to += n;
        }
    }
    return own;
}

static void ranks_share(Test* t, Comm* c, int sends) {
    RankGroup group = rank_group_init(c, c->size), alone = rank_group_init(NULL, 1);
    Device dev = rank_device(c);
    float *inp = random_array(N * C, 1.0f, 3), *dout = random_array(N * OC, 1.0f, 4), *bias = random_array(OC, 1.0f, 5),
          *before = random_array(N * C, 1.0f, 6);
    comm_device_open(c);
    for (int i = 0; i < 2 * N_KINDS; i++) {
        static Model m, one;
        const Stored kind = kinds[i / 2];
        const int is_rows = i % 2 == 0;
        uint64_t sent[2], none[2];
        model_of(&m, is_rows ? SPLIT_ROWS : SPLIT_COLUMNS, kind, &group);
        model_of(&one, SPLIT_NONE, kind, &alone);
        const TensorPart part = tensor_part(&m.table[0], group.place, group.size);
        StoredMatrix matrix = matrix_of(kind);
        StoredMatrix own = part_of(&matrix, &m.table[0], &m.held[0], group.place, group.size);
        Found* whole = find(&one, &matrix, bias, inp, dout, before, none, &dev);
        float *x = is_rows ? inp : columns_of(inp, &part, 0, N, C);
        float *on = is_rows ? before : columns_of(before, &part, 0, N, C);
        float *d = is_rows ? columns_of(dout, &part, 1, N, OC) : dout;
        float *b = is_rows ? columns_of(bias, &part, 1, 1, OC) : bias;
        float *out = is_rows ? columns_of(whole->out, &part, 1, N, OC) : copied_array(whole->out, N * OC);
        float *dinp = is_rows ? copied_array(whole->dinp, N * C) : columns_of(whole->dinp, &part, 0, N, C);
        float *more = is_rows ? copied_array(whole->more, N * C) : columns_of(whole->more, &part, 0, N, C);
        Found* found = find(&m, &own, b, x, d, on, sent, &dev);
        const size_t n_out = (size_t)(N * OC) / (size_t)(is_rows ? c->size : 1);
        const size_t n_inp = (size_t)(N * C) / (size_t)(is_rows ? 1 : c->size);
        check_bits(t, is_rows ? "rows: out" : "columns: out", found->out, out, n_out);
        check_bits(t, is_rows ? "rows: dinp" : "columns: dinp", found->dinp, dinp, n_inp);
        check_bits(t, is_rows ? "rows: dinp goes on" : "columns: dinp goes on", found->more, more, n_inp);
        const double planned = linear_sends(&m, 0, N), was = (double)sent[is_rows];
        check(t, !sends || (fabs(was - planned) < 0.5 && sent[!is_rows] == 0),
              "%d ranks, kind %d, %s: sent %.0f bytes, planned %.0f", c->size, kind, is_rows ? "rows" : "columns", was,
              planned);
        if (is_rows) { free(d), free(b); } else { free(x), free(on); }
        free(out), free(dinp), free(more), free(whole), free(found);
        matrix_free(matrix), matrix_free(own);
    }
    free(inp), free(dout), free(bias), free(before);
    device_free(&dev);
    rank_group_free(&group);
}

static void test_shared(Test* t) {
    const int most = device_ranks(t, 4);
    for (int size = 2; size <= most; size++) { run_ranks(t, size, ranks_share, 0); }
}

static void test_sent(Test* t) {
    const int most = device_ranks(t, 4);
    setenv("COMM_CHECK", "0", 1);  // it sends, too
    for (int size = 2; size <= most; size++) { run_ranks(t, size, ranks_share, 1); }
    setenv("COMM_CHECK", "1", 1);
}
#else
static void test_shared(Test* t) { skip(t, "for builds with the bits of the plain loops"); }
static void test_sent(Test* t) { skip(t, "the same"); }
#endif

int main(int argc, char** argv) {
    Promise promises[] = {
        {"shared", "the bits of one rank on 2 to 4 that have some rows or columns of floats, bf16, fp8 or fp4",
         test_shared},
        {"sent", "each sends the bytes that the plan has for it, of a matrix those that store it", test_sent},
    };
    setenv("COMM_CHECK", "1", 1);
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
