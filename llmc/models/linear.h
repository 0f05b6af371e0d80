/*
Linear layers as a trainer meets them: what a layer of the model's table has of a product, in one struct. The calls are
those of ops/matmul.h, ops/embedding.h and ops/grouped_matmul.h.
    model_linear            the weight of a field of the table at a layer, and its bias
    model_linear_gradients  where their gradients go; NULL where they do not learn
    linear_forward          out (N, OC) = inp (N, C) * weight^T + bias
    linear_forward_on       out goes on from what it holds; of a weight that is floatX, without bias and adapters
    linear_backward         of dout (N, OC): gradients of weight and bias are written, dinp (N, C) = dout * weight; with
                            add 1 it goes on from what dinp holds; NULL: nobody asks
    linear_backward_input, linear_backward_weight   dinp alone; gradients of weight and bias alone
    linear_gelu_backward    linear_backward of a layer whose inputs are gelu(pre): dpre (N, C) is written
    linear_chain, linear_chain_backward, linear_chain_end   linear_backward of several products with one input
    linear_rows             out (N, C) = the rows of the weight that belong to tokens, as an embedding has them
    linear_grouped_forward, linear_grouped_backward_input   of experts: weight (E, OC, C)
    linear_blocks_forward, linear_blocks_backward   in G groups: inputs (N, G C), weight (OC, C), of which OC / G rows
                            are a group's; dinp is written
    linear_blocks_backward_input   dinp alone
    linear_room_elements, linear_blocks_room, linear_sends, linear_layer_sends   of --tp: scratch,
                            and what travels
    linear_rounded_elements   of --act-fp8: scratch
    linear_adapt, linear_adapt_gradients   adapters (LoRA) beside the weight, whose places adapters.h knows: all of the
                            calls above go on with them, but for linear_rows
Weights are stored as floatX or, where they do not learn, as bf16, fp8 or fp4 (core/stored.h): the bits are those of the
same numbers stored as floatX. With --tp they travel as they are stored, and become floats in the
product. With --act-fp8 the inputs of a weight in fp8 or fp4 become fp8, too (ops/fp8_matmul.h), those of experts as
well; what adapters read, gradients, and layers in groups, whose inputs DeepSeek does not round either, know nothing of
it.
With --tp a matrix of which each rank has some rows gives each its own outputs (N, OC), and takes whole inputs; one of
which each has some columns takes each one's own inputs and gives whole outputs. C and OC are those of this rank. Its
adapter is shared with it: of split rows each rank has B's own, of split columns A's; A and B are small, and whole where
a sum needs them. In groups a rank has whole ones, and G is its own. All ranks call (tensor_parallel.h). Of a
vocabulary's rows all of this is the rank's own (vocabulary.h).
*/
#ifndef LLMC_LINEAR_H
#define LLMC_LINEAR_H
#include "../core/floatx.h"    // floatX
#include "../ops/block_lora.h"    // block_lora_forward, block_lora_backward
#include "../ops/block_matmul.h"  // block_matmul_forward_stored, block_matmul_backward_weight, ...
#include "../ops/lora.h"       // lora_forward, lora_backward, LoraShape, LoraExperts
#include "../ops/embedding.h"  // token_embedding_forward_stored
#include "../ops/fp8_matmul.h"  // fp8_matmul_forward, fp8_matmul_bytes, fp8_rows_forward
#include "../ops/gelu.h"       // gelu_backward
#include "../ops/grouped_matmul.h"  // grouped_matmul_forward_stored, ...
#include "../ops/matmul.h"     // matmul_forward_stored, matmul_gelu_backward_input, ...
#include "../ranks/model_gradients.h"  // Model, model_pointer, model_gradient_of
#include "../ranks/tensor_parallel.h"  // tp_gather, tp_to_columns, tp_to_rows
#include "adapters.h"          // Adapters, AdapterPlace, adapter_find

#define NO_BIAS SIZE_MAX  // in place of the field of a bias

enum { LINEAR_PARTS = 2 };  // of outputs, each with an adapter of its own: gate and up

// of outputs first, first + 1, ...; experts have an A and a B each
typedef struct {
    LoraShape shape;      // but for N
    int first;
    const floatX *A, *B;
} LinearAdapter;

typedef struct {
    StoredMatrix weight;  // (OC, C), of experts (E, OC, C); in a CUDA build F32 are floatX
    const floatX* bias;   // (OC) or NULL
    int C, OC;
    int n_adapters;
    LinearAdapter adapter[LINEAR_PARTS];
    floatX* scratch;      // of adapters: adapter_scratch_elements
    Split split;          // of --tp; SPLIT_NONE: this rank has all of it
    TpSections sections;  // of its rows, those of all ranks
    const RankGroup* tp;
    floatX* room;         // of --tp: linear_room_elements
    floatX* rounded;      // of --act-fp8: linear_rounded_elements; NULL: inputs stay as they are
} Linear;

// NULL: does not learn
typedef struct { float *weight, *bias, *A[LINEAR_PARTS], *B[LINEAR_PARTS]; } LinearGradients;

static const LinearGradients NO_GRADIENTS = {NULL, NULL, {NULL, NULL}, {NULL, NULL}};

static inline TpSections linear_sections_(const Tensor* t) {
    TpSections s = {tensor_sections_count(t), {0}};
    for (int k = 0; k < s.n; k++) { s.of[k] = tensor_section(t, k); }
    return s;
}

static inline Linear model_linear(const Model* m, size_t weight, size_t bias, int layer) {
    Linear w;
    const int i = model_row(m, weight, layer), b = bias == NO_BIAS ? -1 : model_row(m, bias, layer);
    memset(&w, 0, sizeof w);
    if (i < 0) { return w; }
    w.weight = model_matrix(m, i, layer);
    w.bias = b < 0 ? NULL : (const floatX*)model_pointer(m, b, layer);
    w.C = m->held[i].columns;
    w.OC = m->held[i].rows;
    w.split = model_row_has_tp(m, i) ? m->held[i].split : SPLIT_NONE;
    w.sections = linear_sections_(&m->table[i]);
    w.tp = &m->tp;
    return w;
}

static inline LinearGradients model_linear_gradients(Model* m, size_t weight, size_t bias, int layer) {
    const int i = model_row(m, weight, layer), b = bias == NO_BIAS ? -1 : model_row(m, bias, layer);
    LinearGradients d;
    memset(&d, 0, sizeof d);
    d.weight = i < 0 ? NULL : model_gradient_of(m, i, layer);
    d.bias = b < 0 ? NULL : model_gradient_of(m, b, layer);
    return d;
}

// ---- adapters: rows in front of the model's table ----

// what adapters need in training: the key of the update, the number of the leaf's first row in it, and room. p is not
// that of a place; 0: nothing is left out
typedef struct {
    Dropout dropout;
    floatX* scratch;
} AdapterPass;

// room for an A or a B of which ranks have parts, whole; what comes from the others takes as much
static inline size_t adapter_whole_elements_(const LoraShape* s) {
    return ((size_t)s->r * tp_larger((size_t)s->C, (size_t)s->n_out) + 15) / 16 * 16;
}

// of N rows and, for experts, R: the most that a place needs, elements
static inline size_t adapter_scratch_elements(const Adapters* x, const Model* m, int N, int R) {
    size_t most = 0;
    for (int i = 0; i < x->n_places; i++) {
        const AdapterPlace* p = &x->places[i];
        const Tensor* t = &m->table[x->n_table + p->row];
        const int rows = t->experts > 0 ? R : t->blocks > 0 ? N * t->blocks : N;
        LoraShape s = {rows, t->columns, p->n, p->rank, 0, 0.0f, {p->dropout, 0, 0}, 0, {0, 0, 0}, 0};
        const int is_shared = model_row_has_tp(m, x->n_table + p->row);
        const size_t n = lora_scratch_elements(&s, t->experts > 0) + (is_shared ? 2 * adapter_whole_elements_(&s) : 0);
        most = n > most ? n : most;
    }
    return most;
}

// the adapters of the weight of a field at a layer; x NULL: there are none
static inline void linear_adapt(Linear* w, const Model* m, const Adapters* x, AdapterPass pass, size_t field,
                                int layer) {
    const int row = x ? model_row(m, field, layer) : -1;
    w->scratch = pass.scratch;
    for (int part = 0; row >= 0 && part < LINEAR_PARTS; part++) {
        const AdapterPlace* p = adapter_find(x, row - x->n_table, layer, part);
        if (!p) { continue; }
        LinearAdapter* a = &w->adapter[w->n_adapters++];
        const int C = m->table[row].columns;
        const uint64_t first = pass.dropout.first * (uint64_t)C;
        const Dropout dropout = {p->dropout, pass.dropout.key, first}, none = {0.0f, 0, 0};
        const LoraShape shape = {0, C, p->n, p->rank, (size_t)m->table[row].rows, p->scale,
                                 pass.dropout.p > 0.0f ? dropout : none, (int)(p - x->places), {0, 0, 0}, 0};
        a->shape = shape;
        a->first = p->first;
        a->A = (const floatX*)model_pointer(m, p->a, layer);
        a->B = (const floatX*)model_pointer(m, p->b, layer);
    }
}

static inline void linear_adapt_gradients(LinearGradients* d, Model* m, const Adapters* x, size_t field, int layer) {
    const int row = x ? model_row(m, field, layer) : -1;
    for (int part = 0, n = 0; row >= 0 && part < LINEAR_PARTS; part++) {
        const AdapterPlace* p = adapter_find(x, row - x->n_table, layer, part);
        if (!p) { continue; }
        d->A[n] = model_gradient_of(m, p->a, layer);
        d->B[n++] = model_gradient_of(m, p->b, layer);
    }
}

// outputs (N, OC) go on; experts NULL: those of all rows are one. Where ranks share the rows of the matrix, they share
// those of B
static inline void linear_adapters_forward_(floatX* out, const floatX* inp, const Linear* w, int N,
                                            const LoraExperts* experts, const Device* dev) {
    for (int i = 0; i < w->n_adapters; i++) {
        const LinearAdapter* a = &w->adapter[i];
        const int size = w->split == SPLIT_ROWS ? w->tp->size : 1;
        LoraShape shape = a->shape;
        shape.N = N;
        shape.n_out /= size;
        shape.out_row /= (size_t)size;
        lora_forward(out + a->first / size, inp, a->A, a->B, &shape, experts, w->scratch, dev);
    }
}

// dinp (N, C) goes on; d NULL: its gradient alone. Of a matrix that this rank has whole
static inline void linear_adapters_backward_(floatX* dinp, const LinearGradients* d, const floatX* dout,
                                             const floatX* inp, const Linear* w, int N, const LoraExperts* experts,
                                             const Device* dev) {
    for (int i = 0; i < w->n_adapters; i++) {
        const LinearAdapter* a = &w->adapter[i];
        LoraShape shape = a->shape;
        shape.N = N;
        lora_backward(dinp, d ? d->A[i] : NULL, d ? d->B[i] : NULL, dout + a->first, inp, a->A, a->B, &shape, experts,
                      w->scratch, dev);
    }
}

// ---- with --tp ----

// scratch of products of N positions with the matrices of the model; 0: none is split
static inline size_t linear_room_elements(const Model* m, int N) {
    size_t most = 0;
    for (int i = 0; i < m->n_table && model_has_tp(m); i++) {
        const Tensor* t = &m->table[i];
        if (t->split == SPLIT_NONE || t->split == SPLIT_VOCABULARY || !tensor_is_matrix(t) || t->blocks) { continue; }
        const size_t part_bytes = tensor_matrix_bytes(&m->held[i], sizeof(floatX));
        most = tp_larger(most, tp_room_elements(N, t->columns, t->rows, part_bytes, m->tp.size));
    }
    return most;
}

// ... with adapters in groups: their A sums over the inputs and outputs of all of these
static inline size_t linear_blocks_room(const Model* m, const Adapters* x, int N) {
    size_t most = 0;
    for (int i = 0; i < x->n_places; i++) {
        const Tensor* t = &m->table[x->n_table + x->places[i].row];
        const size_t inputs = (size_t)N * (size_t)t->columns * (size_t)t->blocks, outputs = (size_t)N * (size_t)t->rows;
        if (!t->blocks || !model_row_has_tp(m, x->n_table + x->places[i].row)) { continue; }
        most = tp_larger(most, inputs + outputs + tp_larger(inputs, outputs) + 3 * 16);
    }
    return most;
}

// scratch of products with matrices in fp8 or fp4, of N positions or R rows of experts; 0: inputs stay as they are
static inline size_t linear_rounded_elements(const Model* m, int N, int R) {
    size_t most = 0;
    for (int i = 0; i < m->n_table && m->rounds_inputs; i++) {
        const Tensor* t = &m->table[i];
        if (!tensor_has_scales(t) || !tensor_is_matrix(t)) { continue; }
        most = tp_larger(most, fp8_matmul_bytes(sizeof(floatX), t->experts > 0 ? R : N, t->columns, t->rows));
    }
    return (most + sizeof(floatX) - 1) / sizeof(floatX);
}

// Bytes that a rank sends for N positions and one layer of row i: forward where its columns are split, on
// the way back where its rows are. Activations, and its part of the matrix as that is stored
static inline double linear_sends(const Model* m, int i, int N) {
    const double T = m->tp.size;
    if (!model_row_has_tp(m, i) || m->table[i].blocks) { return 0.0; }
    const double C = m->table[i].columns, OC = m->table[i].rows;
    const double part = (double)tensor_matrix_bytes(&m->held[i], sizeof(floatX));
    return (T - 1.0) / T * (sizeof(floatX) * (double)N * (C + OC) + part);
}

// ... and because of its adapters at layer l: where rows are split B is brought together on the way back, and in groups
// inputs and outputs; where columns are, A is forward and twice on the way back, where it goes along with the inputs
static inline double linear_adapter_sends_(const Model* m, const Adapters* x, int i, int l, int forward, int is_back,
                                           int N) {
    const double others = sizeof(floatX) * (m->tp.size - 1.0) / m->tp.size;
    double n = 0.0;
    for (int part = 0; x && model_row_has_tp(m, i) && part < LINEAR_PARTS; part++) {
        const AdapterPlace* p = adapter_find(x, i - x->n_table, l, part);
        const double C = m->table[i].columns, of_groups = m->table[i].blocks * C + m->table[i].rows;
        if (!p) { continue; }
        if (m->table[i].split == SPLIT_ROWS) { n += others * is_back * p->rank * p->n; }
        if (m->table[i].blocks) { n += others * is_back * (double)N * of_groups; }
        if (m->table[i].split == SPLIT_COLUMNS) {
            n += others * ((forward + 2.0 * is_back) * p->rank * C + is_back * (double)N * C);
        }
    }
    return n;
}

// The same of all products of a layer, forward and, as far down as that comes, backward. x: adapters, or NULL. again:
// the field of one that backward computes once more, TENSOR_NO_FIELD: none. n_chained: products whose inputs' gradient,
// of C channels, is one chain
static inline double linear_layer_sends(const Model* m, const Adapters* x, int l, size_t again, int n_chained, int C,
                                        int N) {
    const double T = m->tp.size;
    const int is_back = l >= m->lowest;
    double n = is_back ? -(T - 1.0) * sizeof(floatX) * (double)N * C / T * (n_chained - 1) : 0.0;
    for (int i = x ? x->n_table : 0; i < m->n_table && model_has_tp(m); i++) {
        const Tensor* t = &m->table[i];
        if (t->layers == 0 || !tensor_is_matrix(t) || tensor_slice(t, l) < 0) { continue; }
        const int forward = 1 + (is_back && t->field == again);
        n += (t->split == SPLIT_COLUMNS ? forward : is_back) * linear_sends(m, i, N);
        n += linear_adapter_sends_(m, x, i, l, forward, is_back, N);
    }
    return n;
}

// of N positions: scratch, and how large the whole matrix is
static inline TpRoom linear_room_(const Linear* w, int N) {
    const int T = w->tp->size;
    const int C = w->split == SPLIT_COLUMNS ? w->C * T : w->C, OC = w->split == SPLIT_ROWS ? w->OC * T : w->OC;
    StoredMatrix part = w->weight;
    if (part.kind == STORED_F32) { part.kind = STORED_BY_BUILD; }
    return tp_room(w->room, N, C, OC, stored_size(&part, sizeof(floatX)), T);
}

// of so many columns of a row, bytes; and those of their scales, which so many rows have together
static inline size_t linear_row_bytes_(const StoredMatrix* m, int columns) {
    return m->kind == STORED_F32 ? sizeof(floatX) * (size_t)columns : stored_bytes(m->kind, (size_t)columns);
}
static inline size_t linear_scale_bytes_(const StoredMatrix* m, int columns) {
    return m->kind == STORED_FP4 ? (size_t)(columns / FP4_GROUP) : sizeof(float) * (size_t)(columns / m->block_columns);
}
static inline int linear_scale_rows_(const StoredMatrix* m) { return m->kind == STORED_FP4 ? 1 : m->block_rows; }

// behind the data of a turned matrix
static inline char* linear_room_scales_(const StoredMatrix* m, const TpRoom* room) {
    const size_t n_bytes = linear_row_bytes_(m, m->columns) * (size_t)m->rows;  // a part has as many, turned or not
    return (char*)room->weight + (n_bytes + 15) / 16 * 16;
}

// w with the turned matrix in `room`, and another bias. Whatever had blocks of its own, all blocks are whole
static inline Linear linear_of_(const Linear* w, const TpRoom* room, const floatX* bias, int OC, int C) {
    Linear own = *w;
    own.weight.data = room->weight;
    own.weight.scales = w->weight.scales ? linear_room_scales_(&w->weight, room) : NULL;
    own.weight.rows = own.weight.part_rows = own.OC = OC;
    own.weight.columns = own.C = C;
    own.bias = bias;
    return own;
}

// some rows of a matrix of which this rank has some columns: those of its outputs, whose whole inputs it needs
static inline Linear linear_turned_(const Linear* w, const TpRoom* room, const Device* dev) {
    const RankGroup* x = w->tp;
    const StoredMatrix* m = &w->weight;
    const int OC = w->OC / x->size;
    tp_to_rows(room->weight, m->data, room, w->OC, linear_row_bytes_(m, w->C), x, dev);
    if (m->scales) {
        tp_to_rows(linear_room_scales_(m, room), m->scales, room, w->OC / linear_scale_rows_(m),
                   linear_scale_bytes_(m, w->C), x, dev);
    }
    return linear_of_(w, room, w->bias ? w->bias + x->place * OC : NULL, OC, w->C * x->size);
}

// some columns of a matrix of which this rank has some rows: those of the gradient of its inputs
static inline Linear linear_turned_rows_(const Linear* w, const TpRoom* room, const Device* dev) {
    const RankGroup* x = w->tp;
    const StoredMatrix* m = &w->weight;
    const int C = w->C / x->size;
    TpSections blocks = w->sections;
    tp_to_columns(room->weight, m->data, room, w->sections, linear_row_bytes_(m, C), x, dev);
    for (int s = 0; s < blocks.n && m->scales; s++) { blocks.of[s] /= linear_scale_rows_(m); }
    if (m->scales) {
        tp_to_columns(linear_room_scales_(m, room), m->scales, room, blocks, linear_scale_bytes_(m, C), x, dev);
    }
    return linear_of_(w, room, NULL, w->OC * x->size, C);
}

// ---- the products ----

static inline int linear_rounds_(const Linear* w) {
    return w->rounded && (w->weight.kind == STORED_FP8 || w->weight.kind == STORED_FP4);
}

static inline void linear_product_(floatX* out, const floatX* inp, const Linear* w, int N, const Device* dev) {
    if (linear_rounds_(w)) { fp8_matmul_forward(out, inp, w->weight, w->bias, w->rounded, N, dev); }
    else { matmul_forward_stored(out, inp, w->weight, w->bias, N, dev); }
}

static inline void linear_product_back_(floatX* dinp, const floatX* dout, const Linear* w, int add, int N,
                                        const Device* dev) {
    matmul_backward_input_stored(dinp, dout, w->weight, add, N, dev);
}

static inline void linear_blocks_product_(floatX* out, const floatX* inp, const Linear* w, int G, int N,
                                          const Device* dev) {
    block_matmul_forward_stored(out, inp, w->weight, N, G, dev);
}

static inline void linear_blocks_product_back_(floatX* dinp, const floatX* dout, const Linear* w, int G, int N,
                                               const Device* dev) {
    block_matmul_backward_input_stored(dinp, dout, w->weight, N, G, dev);
}

static inline void linear_rows(floatX* out, const int* tokens, const Linear* w, int N, const Device* dev) {
    token_embedding_forward_stored(out, tokens, w->weight, N, dev);
}

static inline void linear_grouped_product_(floatX* out, const floatX* inp, const int* index, const Linear* w,
                                           const int* offsets, int E, int R, const Device* dev) {
    if (linear_rounds_(w)) { fp8_rows_forward(w->rounded, inp, index, R, w->C, dev); }
    const floatX* x = linear_rounds_(w) ? w->rounded : inp;
    grouped_matmul_forward_stored(out, x, linear_rounds_(w) ? NULL : index, w->weight, offsets, E, R, dev);
}

static inline void linear_grouped_product_back_(floatX* dinp, const floatX* dout, const int* index, const Linear* w,
                                                const int* offsets, int E, int R, const Device* dev) {
    grouped_matmul_backward_input_stored(dinp, dout, index, w->weight, offsets, E, R, dev);
}

#if defined(__CUDACC__) && !defined(EXACT) && !defined(FP32)
// to floats, as a router's logits are; without bias and adapters
static inline void linear_forward(float* out, const floatX* inp, Linear w, int N, const Device* dev) {
    assert(!w.bias && w.n_adapters == 0);
    if (linear_rounds_(&w)) { fp8_matmul_forward(out, inp, w.weight, NULL, w.rounded, N, dev); }
    else { matmul_forward_stored(out, inp, w.weight, NULL, N, dev); }
}
#endif

// ---- adapters of a matrix that ranks share: what sums over all of A or B gets it whole ----

// lora.h's own scratch
static inline floatX* linear_adapter_scratch_(const Linear* w, const LinearAdapter* a) {
    return w->scratch + 2 * adapter_whole_elements_(&a->shape);
}

// (r, C), of which each rank has some columns
static inline const floatX* linear_whole_A_(const Linear* w, const LinearAdapter* a, const Device* dev) {
    floatX *whole = w->scratch, *landing = whole + adapter_whole_elements_(&a->shape);
    tp_gather(whole, a->A, landing, a->shape.r, tp_one(a->shape.C), w->tp, dev);
    return whole;
}

// (n_out, r), of which each rank has some rows of each of the weight's sections
static inline const floatX* linear_whole_B_(const Linear* w, const LinearAdapter* a, const Device* dev) {
    floatX *whole = w->scratch, *landing = whole + adapter_whole_elements_(&a->shape);
    TpSections rows = {0, {0}};
    for (int s = 0, at = 0; s < w->sections.n; at += w->sections.of[s++]) {
        if (at >= a->first && at < a->first + a->shape.n_out) { rows.of[rows.n++] = w->sections.of[s] * a->shape.r; }
    }
    tp_gather(whole, a->B, landing, 1, rows, w->tp, dev);
    return whole;
}

static inline LoraColumns linear_own_columns_(const Linear* w, const LinearAdapter* a, int learns) {
    const int n = a->shape.C / w->tp->size;
    const LoraColumns own = {w->tp->place * n, n, learns};
    return own;
}

// Of a matrix whose columns are split: this rank's outputs, part (N, OC / size), of inputs of all ranks
static inline void linear_adapters_turned_(floatX* part, const floatX* whole, const Linear* w, int N,
                                           const Device* dev) {
    for (int i = 0; i < w->n_adapters; i++) {
        const LinearAdapter* a = &w->adapter[i];
        const int n = w->OC / w->tp->size;
        LoraShape shape = a->shape;
        assert(a->first == 0 && shape.n_out == w->OC);
        shape.N = N;
        shape.n_out = n;
        shape.out_row = (size_t)n;
        lora_forward(part, whole, linear_whole_A_(w, a, dev), a->B + (size_t)(w->tp->place * n) * (size_t)shape.r,
                     &shape, NULL, linear_adapter_scratch_(w, a), dev);
    }
}

// ... and back, dinp (N, C) of this rank's inputs. NULL: nobody asks
static inline void linear_adapters_of_columns_(floatX* dinp, const LinearGradients* d, const floatX* dout,
                                               const floatX* inp, const Linear* w, int N, const Device* dev) {
    const TpRoom room = linear_room_(w, N);
    if (w->n_adapters == 0) { return; }
    if (d) { tp_gather(room.whole, inp, room.landing, N, tp_one(w->C * w->tp->size), w->tp, dev); }
    for (int i = 0; i < w->n_adapters; i++) {
        const LinearAdapter* a = &w->adapter[i];
        LoraShape shape = a->shape;
        shape.N = N;
        shape.own = linear_own_columns_(w, a, 1);
        lora_backward(dinp, d ? d->A[i] : NULL, d ? d->B[i] : NULL, dout + a->first, room.whole,
                      linear_whole_A_(w, a, dev), a->B, &shape, NULL, linear_adapter_scratch_(w, a), dev);
    }
}

// Of one whose rows are split; dout, and `whole` that of all ranks. columns (N, C / size): this rank's of dinp, or NULL
static inline void linear_adapters_of_rows_(floatX* columns, const LinearGradients* d, const floatX* dout,
                                            const floatX* whole, const floatX* inp, const Linear* w, int N,
                                            const Device* dev) {
    for (int i = 0; i < w->n_adapters; i++) {
        const LinearAdapter* a = &w->adapter[i];
        const int size = w->tp->size;
        floatX* scratch = linear_adapter_scratch_(w, a);
        float *dA = d ? d->A[i] : NULL, *dB = d ? d->B[i] : NULL;
        LoraShape shape = a->shape, rows = a->shape;
        shape.N = rows.N = N;
        rows.n_out /= size;
        rows.out_row /= (size_t)size;
        shape.own = linear_own_columns_(w, a, 0);
        if (dB) {
            lora_backward((floatX*)NULL, (float*)NULL, dB, dout + a->first / size, inp, a->A, a->B, &rows, NULL,
                          scratch, dev);
        }
        if (dA || columns) {
            lora_backward(columns, dA, NULL, whole + a->first, inp, a->A, linear_whole_B_(w, a, dev), &shape, NULL,
                          scratch, dev);
        }
    }
}

static inline void linear_forward(floatX* out, const floatX* inp, Linear w, int N, const Device* dev) {
    if (w.split == SPLIT_COLUMNS) {
        const TpRoom room = linear_room_(&w, N);
        const Linear turned = linear_turned_(&w, &room, dev);
        tp_gather(room.whole, inp, room.landing, N, tp_one(turned.C), w.tp, dev);
        linear_product_(room.part, room.whole, &turned, N, dev);
        linear_adapters_turned_(room.part, room.whole, &w, N, dev);
        tp_gather(out, room.part, room.landing, N, tp_one(turned.OC * w.tp->size), w.tp, dev);
        return;
    }
    linear_product_(out, inp, &w, N, dev);
    linear_adapters_forward_(out, inp, &w, N, NULL, dev);
}

static inline void linear_forward_on(floatX* out, const floatX* inp, Linear w, int N, const Device* dev) {
    assert(!w.bias && w.n_adapters == 0 && w.weight.kind == STORED_F32 && w.split == SPLIT_NONE);
    matmul_forward_on(out, inp, (const floatX*)w.weight.data, N, w.C, w.OC, dev);
}

// Of a matrix of which this rank has some rows all but the gradients of these: dout of all ranks comes together, and
// with a turned matrix each computes its columns (N, C / size) of dinp; NULL: nobody asks
static inline void linear_rows_back_(floatX* columns, const floatX* dout, const floatX* inp, const Linear* w,
                                     const LinearGradients* d, int add, int N, const Device* dev) {
    const TpRoom room = linear_room_(w, N);
    if (!columns && w->n_adapters == 0) { return; }
    tp_gather(room.whole, dout, room.landing, N, w->sections, w->tp, dev);
    if (columns) {
        const Linear turned = linear_turned_rows_(w, &room, dev);
        linear_product_back_(columns, room.whole, &turned, add, N, dev);
    }
    linear_adapters_of_rows_(columns, d, dout, room.whole, inp, w, N, dev);
}

// all but the gradients of weight and bias; d NULL: no adapter's either
static inline void linear_back_(floatX* dinp, const floatX* dout, const floatX* inp, const Linear* w,
                                const LinearGradients* d, int add, int N, const Device* dev) {
    if (w->split == SPLIT_ROWS) {
        const TpRoom room = linear_room_(w, N);
        if (dinp && add) { tp_take(room.part, dinp, N, tp_one(w->C), w->tp, dev); }
        linear_rows_back_(dinp ? room.part : NULL, dout, inp, w, d, add, N, dev);
        if (dinp) { tp_gather(dinp, room.part, room.landing, N, tp_one(w->C), w->tp, dev); }
        return;
    }
    linear_product_back_(dinp, dout, w, add, N, dev);
    if (w->split != SPLIT_COLUMNS) { linear_adapters_backward_(dinp, d, dout, inp, w, N, NULL, dev); return; }
    if (d) { linear_adapters_of_columns_(NULL, d, dout, inp, w, N, dev); }
    if (dinp) { linear_adapters_of_columns_(dinp, NULL, dout, NULL, w, N, dev); }
}

// inp: what forward read
static inline void linear_backward_weight(const floatX* dout, const floatX* inp, Linear w, LinearGradients d, int N,
                                          const Device* dev) {
    matmul_backward_weight(d.weight, dout, inp, 0, N, w.C, w.OC, dev);
    matmul_backward_bias(d.bias, dout, N, w.OC, dev);
    linear_back_(NULL, dout, inp, &w, &d, 0, N, dev);
}

static inline void linear_backward_input(floatX* dinp, const floatX* dout, Linear w, int add, int N,
                                         const Device* dev) {
    linear_back_(dinp, dout, NULL, &w, NULL, add, N, dev);
}

static inline void linear_backward(floatX* dinp, const floatX* dout, const floatX* inp, Linear w, LinearGradients d,
                                   int add, int N, const Device* dev) {
    matmul_backward_weight(d.weight, dout, inp, 0, N, w.C, w.OC, dev);
    matmul_backward_bias(d.bias, dout, N, w.OC, dev);
    linear_back_(dinp, dout, inp, &w, &d, add, N, dev);
}

// fused 1: in one product where this rank has the outputs of all rows of a floatX weight, without adapters
static inline void linear_gelu_backward(floatX* dpre, const floatX* dout, const floatX* inp, const floatX* pre,
                                        Linear w, LinearGradients d, int fused, int N, const Device* dev) {
    if (!fused || w.split == SPLIT_ROWS || w.n_adapters > 0 || w.weight.kind != STORED_F32) {
        linear_backward(dpre, dout, inp, w, d, 0, N, dev);
        gelu_backward(dpre, pre, dpre, (size_t)N * (size_t)w.C, dev);
        return;
    }
    matmul_backward_weight(d.weight, dout, inp, 0, N, w.C, w.OC, dev);
    matmul_backward_bias(d.bias, dout, N, w.OC, dev);
    matmul_gelu_backward_input(dpre, dout, (const floatX*)w.weight.data, pre, 1, N, w.C, w.OC, dev);
}

// ---- several products with one input, as Q, K and V: its gradient is one chain through the outputs of all ----

typedef struct {
    floatX* dinp;  // (N, C) at the end; with --tp until then this rank's columns, (N, C / size)
    int n;         // products so far
    Linear last;
} LinearChain;

static inline LinearChain linear_chain(floatX* dinp) {
    LinearChain chain;
    memset(&chain, 0, sizeof chain);
    chain.dinp = dinp;
    return chain;
}

// as linear_backward
static inline void linear_chain_backward(LinearChain* chain, const floatX* dout, const floatX* inp, Linear w,
                                         LinearGradients d, int N, const Device* dev) {
    const int add = chain->n++ > 0;
    assert(!add || chain->last.split == w.split);  // dinp holds all columns so far, or this rank's: not both in turn
    chain->last = w;
    if (w.split != SPLIT_ROWS) { linear_backward(chain->dinp, dout, inp, w, d, add, N, dev); return; }
    matmul_backward_weight(d.weight, dout, inp, 0, N, w.C, w.OC, dev);
    matmul_backward_bias(d.bias, dout, N, w.OC, dev);
    linear_rows_back_(chain->dinp, dout, inp, &w, &d, add, N, dev);
}

static inline void linear_chain_end(LinearChain* chain, int N, const Device* dev) {
    const Linear* w = &chain->last;
    if (w->split != SPLIT_ROWS) { return; }
    const TpRoom room = linear_room_(w, N);
    device_copy(room.part, chain->dinp, sizeof(floatX) * (size_t)N * (size_t)(w->C / w->tp->size), dev);
    tp_gather(chain->dinp, room.part, room.landing, N, tp_one(w->C), w->tp, dev);
}

// ---- of experts: R rows, of which row s is row index[s] of inp or dout (NULL: s), sorted by expert (offsets) ----

static inline void linear_grouped_forward(floatX* out, const floatX* inp, const int* index, Linear w,
                                          const int* offsets, int E, int R, const Device* dev) {
    const LoraExperts experts = {E, offsets, index, NULL, NULL, NULL};
    linear_grouped_product_(out, inp, index, &w, offsets, E, R, dev);
    linear_adapters_forward_(out, inp, &w, R, &experts, dev);
}

static inline void linear_grouped_backward_input(floatX* dinp, const floatX* dout, const int* index, Linear w,
                                                 const int* offsets, int E, int R, const Device* dev) {
    const LoraExperts experts = {E, offsets, NULL, index, NULL, NULL};
    linear_grouped_product_back_(dinp, dout, index, &w, offsets, E, R, dev);
    linear_adapters_backward_(dinp, NULL, dout, NULL, &w, R, &experts, dev);
}

// Gradients of adapters alone. weight: what row weight_index[s] is multiplied by in all that comes after; NULL: nothing
static inline void linear_grouped_backward_adapters(const LinearGradients* d, const floatX* dout, const int* dout_index,
                                                    const floatX* inp, const int* inp_index, const float* weight,
                                                    const int* weight_index, Linear w, const int* offsets, int E,
                                                    int R, const Device* dev) {
    const LoraExperts experts = {E, offsets, inp_index, dout_index, weight, weight_index};
    linear_adapters_backward_(NULL, d, dout, inp, &w, R, &experts, dev);
}

// ---- in G groups: each has C of the inputs (N, G C) and OC / G of the outputs (N, OC); without bias ----

// With --tp G groups are this rank's own, as are their rows of B: what is theirs is computed here, and nothing travels
// forward. Of A every rank has all, and its gradient sums over the groups of all
static inline int linear_blocks_ranks_(const Linear* w) { return w->split == SPLIT_ROWS ? w->tp->size : 1; }

static inline LoraShape linear_blocks_adapter_(const Linear* w, int G, int N) {
    const int size = linear_blocks_ranks_(w);
    LoraShape shape = w->adapter[0].shape;
    assert(w->n_adapters == 1 && w->adapter[0].first == 0 && shape.n_out == w->OC * size);
    shape.N = N, shape.n_out = w->OC, shape.out_row = (size_t)w->OC;
    shape.all_groups = G * size;
    shape.own.first = size > 1 ? w->tp->place * G * w->C : 0;
    shape.dropout.first *= (uint64_t)shape.all_groups;  // a position has the inputs of all groups
    return shape;
}

static inline void linear_blocks_A_(float* dA, const floatX* dout, const floatX* inp, const Linear* w, LoraShape shape,
                                    int N, const Device* dev) {
    const LinearAdapter* a = &w->adapter[0];
    const int size = w->tp->size, C = shape.all_groups * w->C, OC = w->OC * size;
    floatX *inps = w->room, *douts = inps + ((size_t)N * (size_t)C + 15) / 16 * 16;
    floatX* landing = douts + ((size_t)N * (size_t)OC + 15) / 16 * 16;
    tp_gather(inps, inp, landing, N, tp_one(C), w->tp, dev);
    tp_gather(douts, dout, landing, N, tp_one(OC), w->tp, dev);
    shape.n_out = OC, shape.out_row = (size_t)OC, shape.own.first = 0;
    block_lora_backward((floatX*)NULL, dA, NULL, douts, inps, a->A, linear_whole_B_(w, a, dev), &shape,
                        shape.all_groups, linear_adapter_scratch_(w, a), dev);
}

static inline void linear_blocks_forward(floatX* out, const floatX* inp, Linear w, int G, int N, const Device* dev) {
    assert(!w.bias && w.split != SPLIT_COLUMNS);
    linear_blocks_product_(out, inp, &w, G, N, dev);
    if (w.n_adapters == 0) { return; }
    const LoraShape shape = linear_blocks_adapter_(&w, G, N);
    block_lora_forward(out, inp, w.adapter[0].A, w.adapter[0].B, &shape, G, w.scratch, dev);
}

// d NULL: no adapter's gradient
static inline void linear_blocks_back_(floatX* dinp, const LinearGradients* d, const floatX* dout, const floatX* inp,
                                       const Linear* w, int G, int N, const Device* dev) {
    linear_blocks_product_back_(dinp, dout, w, G, N, dev);
    if (w->n_adapters == 0) { return; }
    const LoraShape shape = linear_blocks_adapter_(w, G, N);
    const int is_shared = linear_blocks_ranks_(w) > 1;
    float *dA = d ? d->A[0] : NULL, *dB = d ? d->B[0] : NULL;
    block_lora_backward(dinp, is_shared ? NULL : dA, dB, dout, inp, w->adapter[0].A, w->adapter[0].B, &shape, G,
                        w->scratch, dev);
    if (is_shared && dA) { linear_blocks_A_(dA, dout, inp, w, shape, N, dev); }
}

static inline void linear_blocks_backward(floatX* dinp, const floatX* dout, const floatX* inp, Linear w,
                                          LinearGradients d, int G, int N, const Device* dev) {
    assert(!w.bias && w.split != SPLIT_COLUMNS);
    block_matmul_backward_weight(d.weight, dout, inp, N, G * w.C, w.OC, G, dev);
    linear_blocks_back_(dinp, &d, dout, inp, &w, G, N, dev);
}

static inline void linear_blocks_backward_input(floatX* dinp, const floatX* dout, Linear w, int G, int N,
                                                const Device* dev) {
    assert(!w.bias && w.split != SPLIT_COLUMNS);
    linear_blocks_back_(dinp, NULL, dout, NULL, &w, G, N, dev);
}
#endif  // LLMC_LINEAR_H
