/*
Promises of the tensor table (llmc/core/tensor.h, layers.h, llmc/files/tensorfile.h) for models that are to come.
First an invented one that has everything: layers of two kinds, tensors in some layers only, experts apart and fused, a
stack of its own behind the others. Then the tables of the specifications: parameters and tensors are the stated numbers,
to the last unit. Sizes only, nothing is allocated. These are the tables that the trainers begin from: there a row also
has the offset of its field and its start value.
*/
#include "llmc/core/layers.h"
#include "llmc/core/tensor.h"
#include "llmc/files/tensorfile.h"
#include "llmc/test/test.h"
#include "llmc/test/testfiles.h"
#include <stddef.h>

// ---- an invented model: 5 layers, 3 experts ----

typedef struct {
    float *embedding, *norm, *mix, *index, *gate_up, *down, *head, *next;
} Invented;

enum { N_INVENTED = 9, INVENTED_L = 5, INVENTED_E = 3, N_INVENTED_SLICES = 1 + 5 + 3 + 2 + 2 + 24 + 12 + 1 + 1 };

// Layers 0, 1 and 3 have a mix of 3 rows, 2 and 4 one of 2; layers 1 and 3 an index; layers from 1 on experts
static size_t invented_table(Tensor table[N_INVENTED]) {
#define FIELD(name) offsetof(Invented, name)
    const int L = INVENTED_L;
    Tensor* t = table;
    *t++ = tensor("embedding",                 FIELD(embedding), 0, 6, 4, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    *t++ = tensor("norm.weight",               FIELD(norm),      L, 1, 4, INIT_ONES,   0.0f,  NO_DECAY, VECTOR);
    *t++ = tensor("mix.weight",                FIELD(mix),       L, 3, 4, INIT_NORMAL, 0.1f,  DECAY, AS_IS);
    tensor_in_kinds(&t[-1], "LLFLF", "L");
    *t++ = tensor("mix.weight",                FIELD(mix),       L, 2, 4, INIT_NORMAL, 0.2f,  DECAY, TRANSPOSED);
    tensor_in_kinds(&t[-1], "LLFLF", "F");
    *t++ = tensor("index.weight",              FIELD(index),     L, 2, 6, INIT_NORMAL, 0.3f,  DECAY, AS_IS);
    tensor_in_layers(&t[-1], 1, 2);
    tensor_dims(&t[-1], 3, 2, 0, 0);
    *t++ = tensor("experts.%d.{gate,up}_proj", FIELD(gate_up),   L, 4, 4, INIT_NORMAL, 0.4f,  DECAY, AS_IS);
    tensor_in_layers(&t[-1], 1, 1);
    tensor_experts(&t[-1], INVENTED_E, APART);
    *t++ = tensor("experts.down_proj",         FIELD(down),      L, 4, 2, INIT_UNIFORM, 0.5f, DECAY, TRANSPOSED);
    tensor_in_layers(&t[-1], 1, 1);
    tensor_experts(&t[-1], INVENTED_E, FUSED);
    for (Tensor* x = table + 1; x < t; x++) { tensor_under(x, "layers.%d."); }
    *t++ = tensor("head",                      FIELD(head),      0, 6, 4, INIT_ZEROS,  0.0f,  DECAY, AS_IS);
    *t++ = tensor_again(&table[2], L, "next.%d.");
    return tensors_layout(table, N_INVENTED);
#undef FIELD
}

static void test_slices(Test* t) {
    const int slices[N_INVENTED] = {1, 5, 3, 2, 2, 24, 12, 1, 1};
    const size_t each[N_INVENTED] = {24, 4, 12, 8, 12, 8, 8, 24, 12};
    const int first[N_INVENTED][INVENTED_L + 1] = {
        {0, 0, 0, 0, 0, 0}, {0, 1, 2, 3, 4, -1}, {0, 1, -1, 2, -1, -1}, {-1, -1, 0, -1, 1, -1}, {-1, 0, -1, 1, -1, -1},
        {-1, 0, 6, 12, 18, -1}, {-1, 0, 3, 6, 9, -1}, {0, 0, 0, 0, 0, 0}, {-1, -1, -1, -1, -1, 0}};
    Tensor table[N_INVENTED];
    size_t offset = 0, count = 0;
    check(t, invented_table(table) == 32 + 32 + 48 + 16 + 32 + 192 + 96 + 32 + 16, "elements of an arena");
    check(t, tensors_layers(table, N_INVENTED) == INVENTED_L + 1, "layers: %d", tensors_layers(table, N_INVENTED));
    for (int i = 0; i < N_INVENTED; i++) {
        const Tensor* x = &table[i];
        check(t, x->offset == offset, "%s: begins at %zu", x->name, x->offset);
        check(t, tensor_slices(x) == slices[i] && tensor_slice_elements(x) == each[i], "%s: %d slices of %zu", x->name,
              tensor_slices(x),
              tensor_slice_elements(x));
        for (int l = 0; l <= INVENTED_L; l++) {
            const int k = tensor_slice(x, l);
            check(t, k == first[i][l], "%s: layer %d begins with slice %d", x->name, l, k);
            const int last = k + tensor_layer_slices(x) - 1;
            check(t, k < 0 || x->layers == 0 || tensor_slice_layer(x, last) == l, "%s: back from layer %d", x->name, l);
        }
        count += (size_t)slices[i] * each[i];
        offset += ((size_t)slices[i] * each[i] + 15) / 16 * 16;
    }
    check(t, tensors_count(table, N_INVENTED) == count, "elements without gaps");
}

static void test_point(Test* t) {
    float own = 1.0f;
    Tensor table[N_INVENTED];
    float* arena = filled_array(invented_table(table), 0.0f);
    Invented p = {&own, &own, &own, &own, &own, &own, &own, &own};
    tensors_point(&p, table, N_INVENTED, arena, 0);
    check(t, p.index == NULL && p.gate_up == NULL && p.down == NULL, "layer 0 has no index and no experts");
    check(t, p.next == &own, "a field that no row has is left alone");
    check(t, p.embedding == arena && p.head == arena + table[7].offset, "tensors of no layer");
    tensors_point(&p, table, N_INVENTED, arena, 2);
    check(t, p.mix == arena + table[3].offset, "layer 2 is the first with a mix of 2 rows");
    tensors_point(&p, table, N_INVENTED, arena, 3);
    check(t, p.mix == arena + table[2].offset + 2 * 12, "layer 3 is the third with a mix of 3 rows");
    check(t, p.index == arena + table[4].offset + 12, "and the second with an index");
    check(t, p.gate_up == arena + table[5].offset + 2 * INVENTED_E * 16, "there is the first of its experts");
    check(t, tensor_matrix_elements(&table[5]) == 16 && tensor_matrix_elements(&table[6]) == 8,
          "the way to the next expert");
    check(t, p.down == arena + table[6].offset + 2 * INVENTED_E * 8, "also where they are one tensor on disk");
    tensors_point(&p, table, N_INVENTED, arena, INVENTED_L);
    check(t, p.mix == arena + table[8].offset && p.norm == NULL, "the last layer is a stack of its own");
    free(arena);
}

static void test_names(Test* t) {
    const struct { int row, slice; const char* name; } cases[] = {
        {0, 0, "embedding"}, {1, 4, "layers.4.norm.weight"}, {2, 2, "layers.3.mix.weight"},
        {3, 0, "layers.2.mix.weight"}, {3, 1, "layers.4.mix.weight"}, {4, 1, "layers.3.index.weight"},
        {5, 0, "layers.1.experts.0.gate_proj"}, {5, 1, "layers.1.experts.0.up_proj"},
        {5, 2, "layers.1.experts.1.gate_proj"}, {5, 23, "layers.4.experts.2.up_proj"},
        {6, 3, "layers.2.experts.down_proj"},
        {6, 11, "layers.4.experts.down_proj"}, {7, 0, "head"}, {8, 0, "next.0.mix.weight"}};
    Tensor table[N_INVENTED];
    char name[64];
    invented_table(table);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tensor_slice_name(name, sizeof name, &table[cases[i].row], cases[i].slice);
        check(t, strcmp(name, cases[i].name) == 0, "found %s, expected %s", name, cases[i].name);
    }
    tensor_slice_name(name, 12, &table[5], 0);
    check(t, strcmp(name, "layers.1.ex") == 0, "cut to the room that there is: %s", name);
    check(t, strcmp(tensor_name(name, sizeof name, &table[5]), "layers.%d.experts.%d.{gate,up}_proj") == 0,
          "of all: %s", name);
    check(t, strcmp(tensor_name_of(name, sizeof name, &table[5], 1), "layers.%d.experts.%d.up_proj") == 0,
          "of all whose second name it is: %s", name);
    check(t, strcmp(tensor_name_of(name, sizeof name, &table[7], 0), "head") == 0, "without names in {}: %s", name);
}

// the draws come layer by layer, in table order within it, expert by expert
static void test_draws(Test* t) {
    Tensor table[N_INVENTED];
    Mt19937 mt;
    const size_t n = invented_table(table);
    float *found = filled_array(n, NAN), *want = filled_array(n, NAN);
    tensors_init(table, N_INVENTED, found, 7);
    mt19937_init(&mt, 7);
    memset(want, 0, sizeof(float) * n);
    normal_fill(&mt, want, 24, 0.0f, 0.02f);
    for (int l = 0; l <= INVENTED_L; l++) {
        for (int i = 1; i < N_INVENTED; i++) {
            const int first = i == 7 ? -1 : tensor_slice(&table[i], l);
            for (int k = 0; k < tensor_layer_slices(&table[i]) && first >= 0; k++) {
                float* x = want + table[i].offset + (size_t)(first + k) * tensor_slice_elements(&table[i]);
                const size_t n_slice = tensor_slice_elements(&table[i]);
                if (i == 1) { x[0] = x[1] = x[2] = x[3] = 1.0f; }
                else if (i == 6) { uniform_fill(&mt, x, n_slice, -0.5f, 0.5f); }
                else { normal_fill(&mt, x, n_slice, 0.0f, table[i].std); }
            }
        }
    }
    for (int i = 0; i < N_INVENTED; i++) {
        check_bits(t, table[i].name, found + table[i].offset, want + table[i].offset, tensor_elements(&table[i]));
    }
    free(found), free(want);
}

static void check_disk_shape(Test* t, SafeSet* set, const char* name, const char* expected) {
    const SafeTensor* found = safeset_find(set, name);
    if (!check(t, found != NULL, "%s is missing", name)) { return; }
    const ShortText text = shape_text_(found->shape, found->n_dims);
    check(t, strcmp(text.s, expected) == 0, "%s: shape %s, expected %s", name, text.s, expected);
}

// saved, in one file and in shards, and loaded again
static void test_files(Test* t) {
    Tensor table[N_INVENTED];
    const size_t n = invented_table(table), limits[] = {SIZE_MAX, 200};
    float *params = filled_array(n, 0.0f), *back = filled_array(n, 0.0f);
    tensors_init(table, N_INVENTED, params, 3);
    for (int i = 0; i < 2; i++) {
        TempPath folder = temp_folder(), path = temp_path(&folder, i == 0 ? HF_WEIGHTS : HF_INDEX);
        SavedFiles files;
        SafeSet set;
        files.n = 0;
        tensors_save_folder(folder.s, table, N_INVENTED, params, DTYPE_F32, limits[i], &files);
        safeset_open(&set, path.s);
        check_disk_shape(t, &set, "layers.3.mix.weight", "(3, 4)");
        check_disk_shape(t, &set, "layers.4.mix.weight", "(4, 2)");
        check_disk_shape(t, &set, "layers.3.index.weight", "(2, 3, 2)");
        check_disk_shape(t, &set, "layers.2.experts.1.up_proj", "(2, 4)");
        check_disk_shape(t, &set, "layers.2.experts.down_proj", "(3, 2, 4)");
        check_disk_shape(t, &set, "next.0.mix.weight", "(3, 4)");
        check(t, !safeset_find(&set, "layers.0.experts.0.up_proj"), "layer 0 has no experts");
        memset(back, 0, sizeof(float) * n);
        tensors_load(&set, table, N_INVENTED, "", back);
        check_bits(t, "what comes back", back, params, n);
        const SafeTensor* up = safeset_find(&set, "layers.2.experts.1.up_proj");
        const SafeTensor* down = safeset_find(&set, "layers.2.experts.down_proj");
        const float* matrix = params + table[5].offset + (1 * INVENTED_E + 1) * 16;
        check(t, memcmp(up->data, matrix + 8, 32) == 0, "up is the second half of the rows");
        const float *e2 = params + table[6].offset + (1 * INVENTED_E + 2) * 8, *turned = (const float*)down->data + 2 * 8;
        for (int k = 0; k < 8; k++) {
            check(t, turned[k % 2 * 4 + k / 2] == e2[k], "expert 2 of layer 2, turned, element %d", k);
        }
        safeset_close(&set);
        temp_remove(&folder);
    }
    TensorSlices sorted = tensors_sorted(table, N_INVENTED);
    check(t, sorted.n == N_INVENTED_SLICES, "%d slices", sorted.n);
    for (int k = 1; k < sorted.n; k++) {
        const TensorSlice *a = &sorted.slice[k - 1], *b = &sorted.slice[k];
        const int order = strcmp(a->name, b->name), is_next = a->tensor == b->tensor && a->k + 1 == b->k;
        check(t, order < 0 || (order == 0 && is_next && b->k % tensor_joined(b->tensor) > 0), "order of %s", b->name);
    }
    free(sorted.slice);
    free(params), free(back);
}

// the same model from a file that has its experts the other way
static void test_experts_on_disk(Test* t) {
    Tensor apart = tensor("h.%d.experts.%d.{gate,up}_proj", 0, 2, 4, 3, INIT_NORMAL, 1.0f, DECAY, AS_IS);
    Tensor fused = tensor("h.%d.experts.gate_up_proj", 0, 2, 4, 3, INIT_NORMAL, 1.0f, DECAY, AS_IS);
    tensor_experts(&apart, 5, APART);
    tensor_experts(&fused, 5, FUSED);
    const size_t n = tensors_layout(&apart, 1);
    check(t, tensors_layout(&fused, 1) == n, "both lie alike in memory");
    float *params = filled_array(n, 0.0f), *back = filled_array(n, 0.0f);
    tensors_init(&apart, 1, params, 5);
    for (int i = 0; i < 2; i++) {
        TempPath folder = temp_folder(), path = temp_path(&folder, HF_WEIGHTS);
        const Tensor* x = i == 0 ? &apart : &fused;
        SavedFiles files;
        SafeSet set;
        files.n = 0;
        tensors_save_folder(folder.s, x, 1, params, DTYPE_F32, SIZE_MAX, &files);
        safeset_open(&set, path.s);
        check(t, tensor_is_in(&set, &apart, "") == (i == 0) && tensor_is_in(&set, &fused, "") == (i == 1),
              "what the file has");
        memset(back, 0, sizeof(float) * n);
        tensors_load(&set, tensor_is_in(&set, &fused, "") ? &fused : &apart, 1, "", back);
        check_bits(t, "parameters", back, params, n);
        safeset_close(&set);
        temp_remove(&folder);
    }
    free(params), free(back);
}

// Two adapters of experts as PEFT has them: A, of which row e r + j is rank j of expert e, and B, of which column
// j E + e is
static void test_experts_woven(Test* t) {
    enum { L = 2, E = 5, R = 3, IN = 7, OUT = 4 };
    Tensor table[2] = {tensor("h.%d.lora_A", TENSOR_NO_FIELD, L, R, IN, INIT_NORMAL, 1.0f, DECAY, AS_IS),
                       tensor("h.%d.lora_B", TENSOR_NO_FIELD, L, OUT, R, INIT_NORMAL, 1.0f, DECAY, AS_IS)};
    tensor_experts(&table[0], E, STACKED);
    tensor_experts(&table[1], E, WOVEN);
    const size_t n = tensors_layout(table, 2);
    float *params = filled_array(n, 0.0f), *back = filled_array(n, 0.0f);
    tensors_init(table, 2, params, 5);
    TempPath folder = temp_folder(), path = temp_path(&folder, HF_WEIGHTS);
    SafeSet set;
    tensors_save(path.s, table, 2, params);
    safeset_open(&set, path.s);
    check_disk_shape(t, &set, "h.1.lora_A", "(15, 7)");
    check_disk_shape(t, &set, "h.1.lora_B", "(4, 15)");
    const float* disk_A = (const float*)safeset_find(&set, "h.1.lora_A")->data;
    const float* disk_B = (const float*)safeset_find(&set, "h.1.lora_B")->data;
    const float *A = params + table[0].offset + E * R * IN, *B = params + table[1].offset + E * OUT * R;
    for (int e = 0; e < E; e++) {
        for (int i = 0; i < R * IN; i++) {
            check(t, disk_A[(e * R + i / IN) * IN + i % IN] == A[e * R * IN + i], "A, expert %d, element %d", e, i);
        }
        for (int i = 0; i < OUT * R; i++) {
            check(t, disk_B[i / R * R * E + i % R * E + e] == B[e * OUT * R + i], "B, expert %d, element %d", e, i);
        }
    }
    tensors_load(&set, table, 2, "", back);
    check_bits(t, "what comes back", back, params, n);
    float* pointer = params;
    tensors_point(&pointer, table, 2, params, 0);
    check(t, pointer == params, "no field of a struct is theirs");
    safeset_close(&set);
    temp_remove(&folder);
    free(params), free(back);
}

// an fp8 matrix of 130 x 129 with scales of one kind; the row's name has the ending that goes with it
static void check_fp8(Test* t, Dtype scale_dtype, const char* scale_name) {
    enum { R = 130, C = 129 };
    const int64_t shape[2] = {R, C}, blocks[2] = {2, 2};
    const float scales[4] = {0.5f, 2.0f, 0.25f, 4.0f};
    const unsigned char exponents[4] = {126, 128, 125, 129};  // the same, as e8m0
    static unsigned char codes[R * C];
    static float found[R * C];
    Tensor row = tensor("w.weight", 0, 0, R, C, INIT_NONE, 0.0f, DECAY, AS_IS);
    TempPath folder = temp_folder(), path = temp_path(&folder, HF_WEIGHTS);
    SafeWriter w;
    SafeSet set;
    for (int i = 0; i < R * C; i++) { codes[i] = (unsigned char)(i * 7 % 127 + i % 2 * 128); }  // no NaN
    safewriter_init(&w);
    if (scale_dtype == DTYPE_F32) { safewriter_declare(&w, scale_name, DTYPE_F32, 2, blocks); }
    safewriter_declare(&w, "w.weight", DTYPE_F8_E4M3, 2, shape);
    if (scale_dtype != DTYPE_F32) { safewriter_declare(&w, scale_name, scale_dtype, 2, blocks); }
    safewriter_open(&w, path.s);
    if (scale_dtype == DTYPE_F32) { safewriter_put(&w, scales, sizeof scales); }
    safewriter_put(&w, codes, sizeof codes);
    if (scale_dtype != DTYPE_F32) { safewriter_put(&w, exponents, sizeof exponents); }
    safewriter_close(&w);
    tensor_stored(&row, STORED_FP8);
    tensors_layout(&row, 1);
    safeset_open(&set, path.s);
    tensors_load(&set, &row, 1, "", found);
    for (int i = 0; i < R * C; i++) {
        const int e = codes[i] >> 3 & 15, m = codes[i] & 7;
        const double x = (codes[i] & 128 ? -1.0 : 1.0) * (e ? (1.0 + m / 8.0) * pow(2.0, e - 7) : m * pow(2.0, -9));
        const double want = x * (double)scales[i / C / 128 * 2 + i % C / 128];
        check(t, (double)found[i] == want, "%s: element (%d, %d): found %g, expected %g", scale_name, i / C, i % C,
              (double)found[i], want);
    }
    safeset_close(&set);
    temp_remove(&folder);
}

static void test_fp8(Test* t) {
    check_fp8(t, DTYPE_F32, "w.weight_scale_inv");
    check_fp8(t, DTYPE_F8_E8M0, "w.scale");
    const struct { unsigned char byte; float x; } known[] = {  // deepseek_v4.md 5.2
        {0x01, 0.001953125f}, {0x08, 0.015625f}, {0x38, 1.0f}, {0x7e, 448.0f}, {0xb8, -1.0f}};
    for (int i = 0; i < 5; i++) {
        check(t, fp8_widen(known[i].byte) == known[i].x, "byte %02x is %g", known[i].byte, (double)known[i].x);
    }
    check(t, isnan(fp8_widen(0xff)) && isnan(fp8_widen(0x7f)), "bytes that are no number");
}

// which slices are frozen, as their numbers "1,5,6"
static const char* frozen_slices(const char* pattern, Tensor table[N_INVENTED]) {
    static char out[256];
    size_t used = 0;
    out[0] = '\0';
    invented_table(table);
    int* frozen = freeze_slices(pattern, table, N_INVENTED, "tensor");
    for (int i = 0; i < N_INVENTED_SLICES; i++) {
        if (frozen[i]) { used += (size_t)snprintf(out + used, sizeof out - used, "%s%d", used ? "," : "", i); }
    }
    free(frozen);
    return out;
}

static void test_freeze(Test* t) {
    // 0 embedding | 1..5 norm | 6..8 mix of layers 0, 1, 3; 9, 10 of 2, 4 | 11, 12 index of 1, 3 | 13..36 experts of 1..4,
    // six each | 37..48 down of 1..4, three each | 49 head | 50 next
    const struct { const char *text, *slices; } cases[] = {
        {"layers.3.mix.*", "8"}, {"layers.*.mix.weight", "6,7,8,9,10"}, {"*.experts.1.*", "15,16,21,22,27,28,33,34"},
        {"layers.2.experts.0.up_proj", "20"}, {"*down_proj", "37,38,39,40,41,42,43,44,45,46,47,48"}, {"first:1", "1,6"},
        {"indices:2", "3,9,19,20,21,22,23,24,40,41,42"}, {"next.*,head", "49,50"},
        {"first:9", "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35,36,"
         "37,38,39,40,41,42,43,44,45,46,47,48"},
        {"layers.%d.index.weight", "11,12"}, {"*up*", "14,16,18,20,22,24,26,28,30,32,34,36"},
        {"layers.%d.experts.%d.gate_proj", "13,15,17,19,21,23,25,27,29,31,33,35"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Tensor table[N_INVENTED];
        const char* found = frozen_slices(cases[i].text, table);
        check(t, strcmp(found, cases[i].slices) == 0, "\"%s\": found %s, expected %s", cases[i].text, found,
              cases[i].slices);
    }
}

// where backward may stop
static void test_learning_from(Test* t) {
    const struct { const char* frozen; int layer, below; } cases[] = {
        {"", 0, 1}, {"embedding", 0, 0}, {"first:2", 2, 1}, {"first:2,embedding", 2, 0}, {"first:5,head", 5, 1},
        {"layers.0.*", 1, 1}, {"layers.0.*,layers.1.*,layers.2.norm.*", 2, 1}, {"*", 6, 0}, {"layers.*,next.*", 6, 1},
        {"layers.*,next.*,embedding", 6, 0},
        {"first:4,layers.4.[mn]*,layers.4.experts.*.gate_proj,*down_proj,embedding", 4, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Tensor table[N_INVENTED];
        int below = -1;
        invented_table(table);
        int* frozen = freeze_slices(cases[i].frozen, table, N_INVENTED, "tensor");
        const int layer = learning_from(table, N_INVENTED, frozen, &below);
        check(t, layer == cases[i].layer && below == cases[i].below, "\"%s\": layer %d, below %d", cases[i].frozen,
              layer, below);
        free(frozen);
    }
    Tensor table[N_INVENTED];
    int below = -1;
    invented_table(table);
    check(t, learning_from(table, N_INVENTED, NULL, &below) == 0 && below == 1, "nothing is frozen");
}

static void check_share(Test* t, const Tensor* x, int section, int rank, int size, int first, int n) {
    int found_first = -1, found_n = -1;
    const int has = tensor_share(x, section, rank, size, &found_first, &found_n);
    check(t, has == (n > 0) && (!has || (found_first == first && found_n == n)),
          "section %d, rank %d of %d: %d and %d more, expected %d and %d",
          section, rank, size, found_first, found_n, first, n);
}

static void test_shares(Test* t) {
    // four heads of 2, and two of keys and of values
    Tensor qkv = tensor("qkv", 0, 0, 8 + 4 + 4, 8, INIT_NONE, 0.0f, DECAY, AS_IS);
    Tensor out = tensor("out", 0, 0, 8, 8, INIT_NONE, 0.0f, DECAY, AS_IS), norm = out;
    Tensor gain = tensor("k", 0, 0, 1, 4, INIT_ONES, 0.0f, NO_DECAY, VECTOR);
    tensor_split(&qkv, SPLIT_ROWS, 2);
    tensor_sections(&qkv, 8, 4, 4, 0);
    tensor_split(&out, SPLIT_COLUMNS, 4);
    tensor_split(&gain, SPLIT_ROWS, 2);
    check_share(t, &qkv, 0, 1, 2, 4, 4);
    check_share(t, &qkv, 1, 1, 2, 8 + 2, 2);
    check_share(t, &qkv, 2, 0, 2, 12, 2);
    check_share(t, &qkv, 2, 3, 4, 0, 0);       // more ranks than units
    tensor_cut_units(&gain);
    check_share(t, &gain, 0, 3, 4, 3, 1);      // ... of which each may have a part: units 0 0 1 1
    check_share(t, &gain, 0, 1, 3, 0, 0);      // not of two
    check_share(t, &qkv, 3, 0, 2, 0, 0);
    check_share(t, &qkv, 0, 0, 3, 0, 0);       // refused
    check_share(t, &out, 0, 3, 4, 6, 2);
    check_share(t, &norm, 0, 3, 4, 0, 8);      // each rank has all
    check_share(t, &gain, 0, 1, 2, 2, 2);      // elements of a vector
}

static void test_bytes(Test* t) {
    Tensor x = tensor("x", 0, 0, 130, 129, INIT_NONE, 0.0f, DECAY, AS_IS);
    check(t, tensor_matrix_bytes(&x, 2) == 2 * 130 * 129, "as the build says");
    const size_t want[] = {4 * 130 * 129, 2 * 130 * 129, 130 * 129 + 4 * 2 * 2, 130 * (65 + 5)};
    for (int k = 0; k < 4; k++) {
        tensor_stored(&x, (Stored)(STORED_F32 + k));
        check(t, tensor_matrix_bytes(&x, 2) == want[k], "kind %d: %zu bytes", k, tensor_matrix_bytes(&x, 2));
    }
}

// gate and up of three experts in two layers: 12 slices of 200 rows, each with a whole band and one of 72 rows, or 6 of
// 400 rows and 4 bands where all of a layer are one tensor
static void test_bands(Test* t) {
    const char* names[] = {"experts.%d.{gate,up}.weight", "experts.gate_up"};
    const int bands[] = {2, 4}, first[2][2] = {{0, 128}, {0, 384}}, n_rows[2][2] = {{128, 72}, {128, 16}};
    for (int k = 0; k < 2; k++) {
        Tensor table[2] = {tensor(names[k], 0, 2, 400, 130, INIT_NONE, 0.0f, DECAY, AS_IS),
                           tensor("next", 0, 0, 1, 3, INIT_NONE, 0.0f, NO_DECAY, VECTOR)}, *x = table;
        const int at[] = {0, 1 + 2 * k};
        tensor_experts(x, 3, k ? FUSED : APART);
        tensor_stored(x, STORED_FP8);
        tensors_layout(table, 2);
        const size_t n_bytes = tensors_store(table, 2, sizeof(float)), n = 2 * 3 * 400 * 130, n_scales = 2 * 3 * 4 * 2;
        check(t, tensor_bands(x) == bands[k], "%s: %d bands", names[k], tensor_bands(x));
        for (int i = 0; i < 2; i++) {
            int rows = -1;
            const size_t row = tensor_band(x, at[i], &rows);
            check(t, row == (size_t)first[k][i] && rows == n_rows[k][i], "%s: band %d: row %zu, %d rows", names[k], at[i],
                  row, rows);
        }
        check(t, x->stored_bytes == 1 && tensor_stored_place(x, n) == n, "%s: a byte each", names[k]);
        const size_t begin = (n + 63) / 64 * 64, end = begin + sizeof(float) * n_scales;
        check(t, tensor_scales_place(x, 0) == begin && tensor_scales_place(x, tensor_slices(x)) == end,
              "%s: scales from byte %zu to %zu", names[k], tensor_scales_place(x, 0),
              tensor_scales_place(x, tensor_slices(x)));
        check(t, table[1].stored_at == (end + 63) / 64 * 64 && n_bytes == table[1].stored_at + 16 * sizeof(float),
              "%s: what follows begins at %zu of %zu", names[k], table[1].stored_at, n_bytes);
        check(t, 6 * tensor_matrix_bytes(x, 4) == n + sizeof(float) * n_scales, "%s: bytes of a matrix", names[k]);
    }
}

// fp4: half a byte each, then bytes of scales
static void test_fp4(Test* t) {
    Tensor table[2] = {tensor("experts.%d.{gate,up}.weight", 0, 2, 6, 96, INIT_NONE, 0.0f, DECAY, AS_IS),
                       tensor("next", 0, 0, 1, 3, INIT_NONE, 0.0f, NO_DECAY, VECTOR)}, *x = table;
    tensor_experts(x, 5, APART);
    tensor_stored(x, STORED_FP4);
    tensors_layout(table, 2);
    const size_t n_bytes = tensors_store(table, 2, sizeof(float)), n = 2 * 5 * 6 * 96 / 2, begin = (n + 63) / 64 * 64;
    check(t, tensor_stored_place(x, 96 * 3) == 144 && tensor_stored_place(x, 2 * n) == n, "half a byte each");
    check(t, tensor_scales_place(x, 0) == begin && tensor_scales_place(x, 3) == begin + 3 * 9, "9 scales of a slice");
    check(t, table[1].stored_at == (begin + 20 * 9 + 63) / 64 * 64 && n_bytes == table[1].stored_at + 64, "what follows");
    check(t, 10 * tensor_matrix_bytes(x, 4) == n + 20 * 9, "bytes of a matrix");
}

// ---- the tables of the specifications ----

enum { ROWS_MAX = 96 };

// (out, in), stored as the build says
static Tensor matrix(const char* name, int layers, int rows, int columns, Split split, int units) {
    Tensor t = tensor(name, 0, layers, rows, columns, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    tensor_split(&t, split, units);
    return t;
}

// a matrix that releases have in fp8
static Tensor linear(const char* name, int layers, int rows, int columns, Split split, int units) {
    Tensor t = matrix(name, layers, rows, columns, split, units);
    tensor_stored(&t, STORED_FP8);
    return t;
}

// E matrices in each layer, each by itself on disk
static Tensor experts(const char* name, int layers, int E, int rows, int columns) {
    Tensor t = matrix(name, layers, rows, columns, SPLIT_NONE, 0);
    tensor_experts(&t, E, APART);
    return t;
}

// the gain of a norm
static Tensor gain(const char* name, int layers, int n) {
    return tensor(name, 0, layers, 1, n, INIT_ONES, 0.0f, NO_DECAY, VECTOR);
}

static Tensor bias(const char* name, int layers, int n, Split split, int units) {
    Tensor t = tensor(name, 0, layers, 1, n, INIT_ZEROS, 0.0f, NO_DECAY, VECTOR);
    tensor_split(&t, split, units);
    return t;
}

// what stays in float: norms of a router, gates, mixing of streams
static Tensor in_float(Tensor t) {
    tensor_stored(&t, STORED_F32);
    return t;
}

// these rows exist in layers of these kinds
static void in_kinds(Tensor* t, const Tensor* end, const char* kinds, const char* of_kinds) {
    for (; t < end; t++) { tensor_in_kinds(t, kinds, of_kinds); }
}

static void under(Tensor* t, const Tensor* end, const char* prefix, int named_from) {
    for (; t < end; t++) {
        tensor_under(t, prefix);
        tensor_named_from(t, named_from);
    }
}

// ---- what is asked of a table ----

// tensors of a file, without the scales of fp8
static size_t n_tensors(const Tensor* table, int n) {
    size_t sum = 0;
    for (int i = 0; i < n; i++) { sum += (size_t)(tensor_slices(&table[i]) / tensor_joined(&table[i])); }
    return sum;
}

// parameters that one token meets: k of the experts of each layer
static size_t n_active(const Tensor* table, int n, int k) {
    size_t sum = 0;
    for (int i = 0; i < n; i++) {
        const size_t all = tensor_elements(&table[i]);
        sum += table[i].experts > 0 ? all / (size_t)table[i].experts * (size_t)k : all;
    }
    return sum;
}

static size_t n_experts(const Tensor* table, int n) {
    size_t sum = 0;
    for (int i = 0; i < n; i++) { sum += table[i].experts > 0 ? tensor_elements(&table[i]) : 0; }
    return sum;
}

static int is_named(const Tensor* t, const char* text) {
    char name[256];
    return strstr(tensor_name(name, sizeof name, t), text) != NULL;
}

// those whose names contain a text, of one layer
static size_t n_of_layer(const Tensor* table, int n, int layer, const char* text) {
    size_t sum = 0;
    for (int i = 0; i < n; i++) {
        const int is_there = table[i].layers > 0 && tensor_slice(&table[i], layer) >= 0;
        if (is_there && is_named(&table[i], text)) { sum += tensor_layer_elements(&table[i]); }
    }
    return sum;
}

// the same of all
static size_t n_named(const Tensor* table, int n, const char* text) {
    size_t sum = 0;
    for (int i = 0; i < n; i++) { sum += is_named(&table[i], text) ? tensor_elements(&table[i]) : 0; }
    return sum;
}

// rows before the block that predicts the token after next
static int n_trunk_rows(const Tensor* table, int n) {
    int i = 0;
    while (i < n && !is_named(&table[i], "mtp.")) { i++; }
    return i;
}

static void expect(Test* t, const char* what, size_t found, size_t expected) {
    check(t, found == expected, "%s: found %zu, expected %zu", what, found, expected);
}

// "284.332 B" of a specification is right to half of its last digit
static void expect_about(Test* t, const char* what, size_t found, double expected, double unit) {
    check(t, fabs((double)found - expected) <= 0.5 * unit, "%s: found %zu, expected %.0f", what, found, expected);
}

static void expect_name(Test* t, const Tensor* table, int n, const char* expected) {
    int found = 0;
    for (int i = 0; i < n && !found; i++) {
        for (int k = 0, n_slices = tensor_slices(&table[i]); k < n_slices && !found; k++) {
            char name[256];
            found = strcmp(tensor_slice_name(name, sizeof name, &table[i], k), expected) == 0;
        }
    }
    check(t, found, "no tensor has the name %s", expected);
}

// ---- a mixture of experts: Mixtral with one head of keys and values ----

typedef struct {
    int V, D, L, H, KV, d, E, F;
} MoeConfig;

static int moe_table(Tensor* table, MoeConfig c) {
    const int D = c.D, L = c.L;
    Tensor* t = table;
    *t++ = matrix("model.embed_tokens.weight",                                 0, c.V, D,        SPLIT_VOCABULARY, 0);
    Tensor* block = t;
    *t++ = gain("input_layernorm.weight",                                      L, D);
    *t++ = linear("self_attn.q_proj.weight",                                   L, c.H * c.d, D,  SPLIT_ROWS, c.H);
    *t++ = linear("self_attn.k_proj.weight",                                   L, c.KV * c.d, D, SPLIT_ROWS, c.KV);
    *t++ = linear("self_attn.v_proj.weight",                                   L, c.KV * c.d, D, SPLIT_ROWS, c.KV);
    *t++ = linear("self_attn.o_proj.weight",                                   L, D, c.H * c.d,  SPLIT_COLUMNS, c.H);
    *t++ = gain("post_attention_layernorm.weight",                             L, D);
    *t++ = in_float(matrix("block_sparse_moe.gate.weight",                     L, c.E, D,        SPLIT_NONE, 0));
    *t++ = experts("block_sparse_moe.experts.%d.{w1,w3}.weight",               L, c.E, 2 * c.F, D);  // gate and up
    *t++ = experts("block_sparse_moe.experts.%d.w2.weight",                    L, c.E, D, c.F);      // down
    under(block, t, "model.layers.%d.", 0);
    *t++ = gain("model.norm.weight",                                           0, D);
    *t++ = matrix("lm_head.weight",                                            0, c.V, D,        SPLIT_VOCABULARY, 0);
    return (int)(t - table);
}

static void test_moe(Test* t) {
    const MoeConfig full = {32000, 768, 30, 12, 1, 64, 16, 6144};
    const struct { const char* name; MoeConfig c; int k; size_t total, active; } small[] = {
        {"tiny", {1000, 64, 2, 4, 1, 16, 4, 256}, 2, 542528, 345920},
        {"micro", {100, 32, 1, 4, 1, 8, 2, 64}, 1, 21408, 15264},
        {"golden", {100, 32, 2, 4, 1, 8, 4, 64}, 2, 61088, 36512},
        {"small", {32000, 256, 6, 4, 1, 64, 8, 1024}, 2, 55131392, 26819840},
    };
    Tensor table[ROWS_MAX];
    const int n = moe_table(table, full);
    const size_t head = tensor_elements(&table[n - 1]);
    expect(t, "total", tensors_count(table, n), 6882678528u);
    expect(t, "active, 4 of 16 experts", n_active(table, n, 4), 1786599168u);
    expect(t, "active without the embedding", n_active(table, n, 4) - head, 1762023168u);
    expect(t, "tied", tensors_count(table, n) - head, 6858102528u);
    expect(t, "a layer", n_of_layer(table, n, 17, ""), 227784192u);
    expect(t, "an expert", n_experts(table, n) / (30 * 16), 14155776u);
    expect(t, "attention", n_named(table, n, "self_attn") / 30, 1277952u);
    expect_name(t, table, n, "model.layers.29.block_sparse_moe.experts.15.w3.weight");
    for (int i = 0; i < 4; i++) {
        const int n_small = moe_table(table, small[i].c);
        expect(t, small[i].name, tensors_count(table, n_small), small[i].total);
        expect(t, small[i].name, n_active(table, n_small, small[i].k), small[i].active);
    }
}

// ---- Qwen2.5, Qwen3, Qwen3-30B-A3B, Mistral 7B ----

typedef struct {
    int V, D, L, Hq, Hkv, d, I, E, Fe;  // I: width of the MLP; E, Fe: experts and their width, 0: none
    int qkv_bias, qk_norm, tied;
} QwenConfig;

static int qwen_table(Tensor* table, QwenConfig c) {
    const int D = c.D, L = c.L, NQ = c.Hq * c.d, NKV = c.Hkv * c.d;
    Tensor* t = table;
    *t++ = matrix("model.embed_tokens.weight",              0, c.V, D,     SPLIT_VOCABULARY, 0);
    Tensor* block = t;
    *t++ = gain("input_layernorm.weight",                   L, D);
    *t++ = linear("self_attn.q_proj.weight",                L, NQ, D,      SPLIT_ROWS, c.Hq);
    *t++ = linear("self_attn.k_proj.weight",                L, NKV, D,     SPLIT_ROWS, c.Hkv);
    *t++ = linear("self_attn.v_proj.weight",                L, NKV, D,     SPLIT_ROWS, c.Hkv);
    *t++ = linear("self_attn.o_proj.weight",                L, D, NQ,      SPLIT_COLUMNS, c.Hq);
    if (c.qkv_bias) {  // Qwen2.5
        *t++ = bias("self_attn.q_proj.bias",                L, NQ,         SPLIT_ROWS, c.Hq);
        *t++ = bias("self_attn.k_proj.bias",                L, NKV,        SPLIT_ROWS, c.Hkv);
        *t++ = bias("self_attn.v_proj.bias",                L, NKV,        SPLIT_ROWS, c.Hkv);
    }
    if (c.qk_norm) {  // Qwen3
        *t++ = gain("self_attn.q_norm.weight",              L, c.d);
        *t++ = gain("self_attn.k_norm.weight",              L, c.d);
    }
    *t++ = gain("post_attention_layernorm.weight",          L, D);
    if (c.E > 0) {
        *t++ = matrix("mlp.gate.weight",                    L, c.E, D,     SPLIT_NONE, 0);
        *t++ = experts("mlp.experts.%d.{gate,up}_proj.weight", L, c.E, 2 * c.Fe, D);
        *t++ = experts("mlp.experts.%d.down_proj.weight",   L, c.E, D, c.Fe);
    } else {
        *t++ = linear("mlp.{gate,up}_proj.weight",          L, 2 * c.I, D, SPLIT_ROWS, 0);
        tensor_sections(&t[-1], c.I, c.I, 0, 0);
        *t++ = linear("mlp.down_proj.weight",               L, D, c.I,     SPLIT_COLUMNS, 0);
    }
    under(block, t, "model.layers.%d.", 0);
    *t++ = gain("model.norm.weight",                        0, D);
    if (!c.tied) { *t++ = matrix("lm_head.weight",          0, c.V, D,     SPLIT_VOCABULARY, 0); }
    return (int)(t - table);
}

static const QwenConfig qwen3_30b = {151936, 2048, 48, 32, 4, 128, 6144, 128, 768, 0, 1, 0};

static void test_qwen_dense(Test* t) {
    const struct { const char* name; QwenConfig c; size_t parameters, tensors; } models[] = {
        {"Qwen2.5-0.5B", {151936, 896, 24, 14, 2, 64, 4864, 0, 0, 1, 0, 1}, 494032768u, 290},
        {"Qwen3-0.6B", {151936, 1024, 28, 16, 8, 128, 3072, 0, 0, 0, 1, 1}, 596049920u, 310},
        {"Qwen3-0.6B with its lm_head", {151936, 1024, 28, 16, 8, 128, 3072, 0, 0, 0, 1, 0}, 751632384u, 311},
        {"Qwen3-8B", {151936, 4096, 36, 32, 8, 128, 12288, 0, 0, 0, 1, 0}, 8190735360u, 36 * 11 + 3},
        {"Qwen3-30B-A3B", qwen3_30b, 30532122624u, 18867},
        {"Mistral-7B-v0.1", {32000, 4096, 32, 32, 8, 128, 14336, 0, 0, 0, 0, 0}, 7241732096u, 32 * 9 + 3},
        {"dense, 0.5M", {512, 128, 2, 4, 1, 32, 352, 0, 0, 0, 0, 0}, 483968, 2 * 9 + 3},
        {"dense, 19M", {32000, 256, 4, 8, 2, 32, 704, 0, 0, 0, 0, 0}, 19204352, 4 * 9 + 3},
    };
    Tensor table[ROWS_MAX];
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        const int n = qwen_table(table, models[i].c);
        expect(t, models[i].name, tensors_count(table, n), models[i].parameters);
        expect(t, models[i].name, n_tensors(table, n), models[i].tensors);
    }
    const int n = qwen_table(table, qwen3_30b);
    expect_about(t, "Qwen3-30B-A3B active", n_active(table, n, 8), 3.3e9,
                 0.2e9);  // 3.35 with the embedding, 3.04 without
    expect_name(t, table, n, "model.layers.47.mlp.experts.127.up_proj.weight");
    qwen_table(table, models[0].c);
    expect_name(t, table, n, "model.layers.23.self_attn.v_proj.bias");
}

// ---- Qwen3.6-35B-A3B: qwen36.md ----

enum { VISION_LAYERS = 27, TEXT_LAYERS = 40, ALL_LAYERS = VISION_LAYERS + TEXT_LAYERS + 1 };

// the blocks of the vision tower are the first layers, 'V'; then the text's, three of linear attention, 'L', to one of
// full, 'F'; the last predicts the token after next, 'M'
static void qwen36_kinds(char kinds[ALL_LAYERS + 1]) {
    memset(kinds, 'V', VISION_LAYERS);
    for (int l = 0; l < TEXT_LAYERS; l++) { kinds[VISION_LAYERS + l] = (l + 1) % 4 == 0 ? 'F' : 'L'; }
    strcpy(kinds + VISION_LAYERS + TEXT_LAYERS, "M");
}

// one more dimension between channels and their inputs
static Tensor convolution(const char* name, int layers, int channels, int width) {
    return tensor(name, 0, layers, channels, width, INIT_NORMAL, 0.02f, DECAY, CONV);
}

static Tensor* qwen36_vision(Tensor* t) {
    const int L = VISION_LAYERS, C = 1152, H = 16, I = 4304, merged = 4 * C;
    Tensor* block;
    *t++ = matrix("model.visual.patch_embed.proj.weight",         0, C, 3 * 2 * 16 * 16, SPLIT_NONE, 0);
    tensor_dims(&t[-1], 3, 2, 16, 16);
    *t++ = bias("model.visual.patch_embed.proj.bias",             0, C,           SPLIT_NONE, 0);
    *t++ = matrix("model.visual.pos_embed.weight",                0, 48 * 48, C,  SPLIT_NONE, 0);
    block = t;
    *t++ = gain("norm1.weight",                                   L, C);
    *t++ = bias("norm1.bias",                                     L, C,           SPLIT_NONE, 0);
    *t++ = linear("attn.qkv.weight",                              L, 3 * C, C,    SPLIT_ROWS, H);
    tensor_sections(&t[-1], C, C, C, 0);
    *t++ = bias("attn.qkv.bias",                                  L, 3 * C,       SPLIT_ROWS, H);
    tensor_sections(&t[-1], C, C, C, 0);
    *t++ = linear("attn.proj.weight",                             L, C, C,        SPLIT_COLUMNS, H);
    *t++ = bias("attn.proj.bias",                                 L, C,           SPLIT_NONE, 0);
    *t++ = gain("norm2.weight",                                   L, C);
    *t++ = bias("norm2.bias",                                     L, C,           SPLIT_NONE, 0);
    *t++ = linear("mlp.linear_fc1.weight",                        L, I, C,        SPLIT_ROWS, 0);
    *t++ = bias("mlp.linear_fc1.bias",                            L, I,           SPLIT_ROWS, 0);
    *t++ = linear("mlp.linear_fc2.weight",                        L, C, I,        SPLIT_COLUMNS, 0);
    *t++ = bias("mlp.linear_fc2.bias",                            L, C,           SPLIT_NONE, 0);
    under(block, t, "model.visual.blocks.%d.", 0);
    *t++ = gain("model.visual.merger.norm.weight",                0, C);
    *t++ = bias("model.visual.merger.norm.bias",                  0, C,           SPLIT_NONE, 0);
    *t++ = matrix("model.visual.merger.linear_fc1.weight",        0, merged, merged, SPLIT_NONE, 0);
    *t++ = bias("model.visual.merger.linear_fc1.bias",            0, merged,      SPLIT_NONE, 0);
    *t++ = matrix("model.visual.merger.linear_fc2.weight",        0, 2048, merged, SPLIT_NONE, 0);
    *t++ = bias("model.visual.merger.linear_fc2.bias",            0, 2048,        SPLIT_NONE, 0);
    return t;
}

// gated delta rule: the convolution's channels are those of Q, K and V
static Tensor* qwen36_linear_attention(Tensor* t, int L, int D) {
    const int Hk = 16, Hv = 32, dk = 128, dv = 128, QK = Hk * dk, NV = Hv * dv;
    *t++ = linear("linear_attn.in_proj_qkv.weight",               L, 2 * QK + NV, D, SPLIT_ROWS, Hk);
    tensor_sections(&t[-1], QK, QK, NV, 0);
    *t++ = linear("linear_attn.in_proj_z.weight",                 L, NV, D,       SPLIT_ROWS, Hk);
    *t++ = linear("linear_attn.in_proj_b.weight",                 L, Hv, D,       SPLIT_ROWS, Hk);
    *t++ = linear("linear_attn.in_proj_a.weight",                 L, Hv, D,       SPLIT_ROWS, Hk);
    *t++ = convolution("linear_attn.conv1d.weight",               L, 2 * QK + NV, 4);
    tensor_split(&t[-1], SPLIT_ROWS, Hk);
    tensor_sections(&t[-1], QK, QK, NV, 0);
    *t++ = in_float(bias("linear_attn.A_log",                     L, Hv,          SPLIT_ROWS, Hk));
    *t++ = in_float(bias("linear_attn.dt_bias",                   L, Hv,          SPLIT_ROWS, Hk));
    *t++ = gain("linear_attn.norm.weight",                        L, dv);
    *t++ = linear("linear_attn.out_proj.weight",                  L, D, NV,       SPLIT_COLUMNS, Hk);
    return t;
}

// each head of q_proj has its query and its output gate
static Tensor* qwen36_full_attention(Tensor* t, int L, int D) {
    const int Hq = 16, Hkv = 2, d = 256;
    *t++ = linear("self_attn.q_proj.weight",                      L, Hq * 2 * d, D, SPLIT_ROWS, Hq);
    *t++ = linear("self_attn.k_proj.weight",                      L, Hkv * d, D,  SPLIT_ROWS, Hkv);
    *t++ = linear("self_attn.v_proj.weight",                      L, Hkv * d, D,  SPLIT_ROWS, Hkv);
    *t++ = linear("self_attn.o_proj.weight",                      L, D, Hq * d,   SPLIT_COLUMNS, Hq);
    *t++ = gain("self_attn.q_norm.weight",                        L, d);
    *t++ = gain("self_attn.k_norm.weight",                        L, d);
    return t;
}

static Tensor* qwen36_experts(Tensor* t, int L, int D, ExpertsOnDisk on_disk) {
    const int E = 256, F = 512;
    const int is_apart = on_disk == APART;
    *t++ = in_float(matrix("mlp.gate.weight",                     L, E, D,        SPLIT_NONE, 0));
    *t++ = matrix(is_apart ? "mlp.experts.%d.{gate,up}_proj.weight" : "mlp.experts.gate_up_proj", L, 2 * F, D,
                  SPLIT_ROWS, 0);
    tensor_sections(&t[-1], F, F, 0, 0);
    tensor_experts(&t[-1], E, on_disk);
    *t++ = matrix(is_apart ? "mlp.experts.%d.down_proj.weight" : "mlp.experts.down_proj", L, D, F, SPLIT_COLUMNS, 0);
    tensor_experts(&t[-1], E, on_disk);
    *t++ = linear("mlp.shared_expert.gate_proj.weight",           L, F, D,        SPLIT_ROWS, 0);
    *t++ = linear("mlp.shared_expert.up_proj.weight",             L, F, D,        SPLIT_ROWS, 0);
    *t++ = linear("mlp.shared_expert.down_proj.weight",           L, D, F,        SPLIT_COLUMNS, 0);
    *t++ = matrix("mlp.shared_expert_gate.weight",                L, 1, D,        SPLIT_NONE, 0);
    return t;
}

// on_disk: of the experts; kinds: of qwen36_kinds
static int qwen36_table(Tensor* table, const char* kinds, ExpertsOnDisk on_disk) {
    const int V = 248320, D = 2048, L = VISION_LAYERS + TEXT_LAYERS, mtp = L;
    Tensor* t = qwen36_vision(table);
    *t++ = matrix("model.language_model.embed_tokens.weight",     0, V, D,        SPLIT_VOCABULARY, 0);
    Tensor *block = t, *part;
    *t++ = gain("input_layernorm.weight",                         L, D);
    t = qwen36_linear_attention(part = t, L, D);
    in_kinds(part, t, kinds, "L");
    t = qwen36_full_attention(part = t, L, D);
    in_kinds(part, t, kinds, "F");
    *t++ = gain("post_attention_layernorm.weight",                L, D);
    t = qwen36_experts(t, L, D, on_disk);
    for (Tensor* x = block; x < t; x++) {
        if (!x->kinds) { tensor_in_kinds(x, kinds, "LF"); }
    }
    under(block, t, "model.language_model.layers.%d.", VISION_LAYERS);
    const Tensor* end = t;
    *t++ = gain("model.language_model.norm.weight",               0, D);
    *t++ = matrix("lm_head.weight",                               0, V, D,        SPLIT_VOCABULARY, 0);
    *t++ = matrix("mtp.fc.weight",                                0, D, 2 * D,    SPLIT_NONE, 0);
    *t++ = gain("mtp.norm.weight",                                0, D);
    *t++ = gain("mtp.pre_fc_norm_embedding.weight",               0, D);
    *t++ = gain("mtp.pre_fc_norm_hidden.weight",                  0, D);
    for (const Tensor* x = block; x < end; x++) {  // a layer of full attention
        if (strchr(x->of_kinds, 'F')) { *t++ = tensor_again(x, mtp, "mtp.layers.%d."); }
    }
    return (int)(t - table);
}

static void test_qwen36(Test* t) {
    char kinds[ALL_LAYERS + 1];
    Tensor table[ROWS_MAX];
    qwen36_kinds(kinds);
    const int n = qwen36_table(table, kinds, FUSED), full = VISION_LAYERS + 3;
    const size_t all = tensors_count(table, n), vision = n_named(table, n, "visual"), mtp = n_named(table, n, "mtp.");
    expect(t, "all", all, 35951822704u);
    expect(t, "tensors", n_tensors(table, n), 1045);
    expect(t, "vision", vision, 446571248u);
    expect(t, "prediction of the token after next", mtp, 844640768u);
    expect(t, "text", all - vision - mtp, 34660610688u);
    expect(t, "embedding", n_named(table, n, "embed_tokens"), 508559360u);
    expect(t, "linear attention, a layer", n_named(table, n, "linear_attn") / 30, 33718464u);
    expect(t, "full attention, a layer", n_of_layer(table, n, full, "self_attn"), 27263488u);
    expect(t, "experts and router, a layer", n_of_layer(table, n, full, ".mlp."), 808978432u);
    expect(t, "experts of a layer", n_experts(table, n) / 41, 805306368u);
    expect(t, "bytes, in bf16", 2 * all, 71903645408u);
    expect_about(t, "active without embedding, vision and prediction",
                 n_active(table, n_trunk_rows(table, n), 8) - vision - 508559360u, 2.95e9, 0.01e9);
    expect_name(t, table, n, "model.visual.blocks.26.attn.qkv.bias");
    expect_name(t, table, n, "model.language_model.layers.39.self_attn.q_proj.weight");
    expect_name(t, table, n, "mtp.layers.0.mlp.experts.gate_up_proj");
    const int n_apart = qwen36_table(table, kinds, APART);
    expect(t, "all, with experts apart", tensors_count(table, n_apart), all);
    expect(t, "tensors, with experts apart", n_tensors(table, n_apart), 1045 + 41 * (3 * 256 - 2));
    expect_name(t, table, n, "model.language_model.layers.0.mlp.experts.255.down_proj.weight");
}

// ---- DeepSeek V4, Flash and Pro: deepseek_v4.md ----

typedef struct {
    int D, L, H, qr, G, E, I;
    const char* kinds;  // of attention: 'W' of a window only, 'C' with entries of 4 tokens, 'H' of 128
} V4Config;

enum { V4_V = 129280, V4_d = 512, V4_R = 1024, V4_nI = 64, V4_dI = 128, V4_hc = 4, V4_M = 24, V4_m = 4, V4_m128 = 128,
      V4_HASH_LAYERS = 3 };

// the mixing of the residual streams, in float
static Tensor* v4_streams(Tensor* t, int L, int D) {
    *t++ = in_float(matrix("hc_{attn,ffn}_fn",                    L, 2 * V4_M, V4_hc * D, SPLIT_NONE, 0));
    *t++ = in_float(tensor("hc_{attn,ffn}_base",  0,              L, 2, V4_M, INIT_ZEROS, 0.0f, NO_DECAY, VECTOR));
    *t++ = in_float(tensor("hc_{attn,ffn}_scale", 0,              L, 2, 3, INIT_ZEROS, 0.0f, NO_DECAY, VECTOR));
    return t;
}

static Tensor* v4_attention(Tensor* t, V4Config c) {
    const int L = c.L, d = V4_d, R = V4_R;
    *t++ = linear("attn.wq_a.weight",                             L, c.qr, c.D,   SPLIT_NONE, 0);
    *t++ = gain("attn.q_norm.weight",                             L, c.qr);
    *t++ = linear("attn.wq_b.weight",                             L, c.H * d, c.qr, SPLIT_ROWS, c.H);
    *t++ = linear("attn.wkv.weight",                              L, d, c.D,      SPLIT_NONE, 0);
    *t++ = gain("attn.kv_norm.weight",                            L, d);
    *t++ = linear("attn.wo_a.weight",                             L, c.G * R, c.H * d / c.G, SPLIT_ROWS, c.G);
    *t++ = linear("attn.wo_b.weight",                             L, c.D, c.G * R, SPLIT_COLUMNS, c.G);
    *t++ = in_float(bias("attn.attn_sink",                        L, c.H,         SPLIT_ROWS, c.H));
    return t;
}

// entries of several tokens, whose sizes differ in layers of 4 and of 128
static Tensor* v4_compressor(Tensor* t, V4Config c) {
    const int L = c.L, D = c.D, d = V4_d, dI = V4_dI;
    *t++ = matrix("attn.compressor.{wkv,wgate}.weight",           L, 2 * 2 * d, D, SPLIT_NONE, 0);
    tensor_in_kinds(&t[-1], c.kinds, "C");
    *t++ = matrix("attn.compressor.{wkv,wgate}.weight",           L, 2 * d, D,    SPLIT_NONE, 0);
    tensor_in_kinds(&t[-1], c.kinds, "H");
    *t++ = in_float(matrix("attn.compressor.ape",                 L, V4_m, 2 * d, SPLIT_NONE, 0));
    tensor_in_kinds(&t[-1], c.kinds, "C");
    *t++ = in_float(matrix("attn.compressor.ape",                 L, V4_m128, d,  SPLIT_NONE, 0));
    tensor_in_kinds(&t[-1], c.kinds, "H");
    *t++ = gain("attn.compressor.norm.weight",                    L, d);
    tensor_in_kinds(&t[-1], c.kinds, "CH");
    Tensor* indexer = t;
    *t++ = linear("attn.indexer.wq_b.weight",                     L, V4_nI * dI, c.qr, SPLIT_NONE, 0);
    *t++ = matrix("attn.indexer.weights_proj.weight",             L, V4_nI, D,    SPLIT_NONE, 0);
    *t++ = matrix("attn.indexer.compressor.{wkv,wgate}.weight",   L, 2 * 2 * dI, D, SPLIT_NONE, 0);
    *t++ = in_float(matrix("attn.indexer.compressor.ape",         L, V4_m, 2 * dI, SPLIT_NONE, 0));
    *t++ = gain("attn.indexer.compressor.norm.weight",            L, dI);
    in_kinds(indexer, t, c.kinds, "C");
    return t;
}

// gate.tid2eid of the first layers holds integers, and is no parameter
static Tensor* v4_experts(Tensor* t, V4Config c) {
    const int L = c.L, D = c.D, I = c.I;
    *t++ = matrix("ffn.gate.weight",                              L, c.E, D,      SPLIT_NONE, 0);
    *t++ = in_float(bias("ffn.gate.bias",                         L, c.E,         SPLIT_NONE, 0));  // no gradient
    tensor_in_layers(&t[-1], V4_HASH_LAYERS, 1);
    *t++ = linear("ffn.shared_experts.{w1,w3}.weight",            L, 2 * I, D,    SPLIT_ROWS, 0);
    tensor_sections(&t[-1], I, I, 0, 0);
    *t++ = linear("ffn.shared_experts.w2.weight",                 L, D, I,        SPLIT_COLUMNS, 0);
    *t++ = experts("ffn.experts.%d.{w1,w3}.weight",               L, c.E, 2 * I, D);
    tensor_stored(&t[-1], STORED_FP4);
    *t++ = experts("ffn.experts.%d.w2.weight",                    L, c.E, D, I);
    tensor_stored(&t[-1], STORED_FP4);
    return t;
}

// the last collapse of the streams: of the trunk, and of the block that predicts the token after next
static Tensor* v4_collapse(Tensor* t, int D, const char* prefix) {
    Tensor* first = t;
    *t++ = gain("norm.weight",                                    0, D);
    *t++ = in_float(matrix("hc_head_fn",                          0, V4_hc, V4_hc * D, SPLIT_NONE, 0));
    *t++ = in_float(bias("hc_head_base",                          0, V4_hc,       SPLIT_NONE, 0));
    *t++ = in_float(bias("hc_head_scale",                         0, 1,           SPLIT_NONE, 0));
    under(first, t, prefix, 0);
    return t;
}

static int v4_table(Tensor* table, V4Config c) {
    const int L = c.L, D = c.D, mtp = L;
    Tensor* t = table;
    *t++ = matrix("embed.weight",                                 0, V4_V, D,     SPLIT_VOCABULARY, 0);
    const Tensor* block = t;
    *t++ = gain("attn_norm.weight",                               L, D);
    *t++ = gain("ffn_norm.weight",                                L, D);
    t = v4_streams(t, L, D);
    t = v4_attention(t, c);
    t = v4_compressor(t, c);
    t = v4_experts(t, c);
    under(table + 1, t, "layers.%d.", 0);
    const Tensor* end = t;
    t = v4_collapse(t, D, NULL);
    *t++ = matrix("head.weight",                                  0, V4_V, D,     SPLIT_VOCABULARY, 0);
    for (const Tensor* x = block; x < end; x++) {  // a layer of a window only
        if (!x->kinds) { *t++ = tensor_again(x, mtp, "mtp.%d."); }
    }
    *t++ = linear("mtp.0.{e_proj,h_proj}.weight",                 0, 2 * D, D,    SPLIT_NONE, 0);
    *t++ = gain("mtp.0.enorm.weight",                             0, D);
    *t++ = gain("mtp.0.hnorm.weight",                             0, D);
    t = v4_collapse(t, D, "mtp.0.");
    return (int)(t - table);
}

// the trunk by the formulas of deepseek_v4.md 7.1
static size_t v4_trunk(V4Config c) {
    const size_t D = (size_t)c.D, qr = (size_t)c.qr, H = (size_t)c.H, G = (size_t)c.G, E = (size_t)c.E, I = (size_t)c.I;
    const size_t d = V4_d, R = V4_R, nI = V4_nI, dI = V4_dI, hc = V4_hc, M = V4_M, m = V4_m, m128 = V4_m128, V = V4_V;
    const size_t swa = D * qr + qr + qr * H * d + D * d + d + H * d * R + G * R * D + H;
    const size_t csa = 4 * d * D + 2 * d * m + d + qr * nI * dI + D * nI + 4 * dI * D + 2 * dI * m + dI;
    const size_t hca = 2 * d * D + m128 * d + d, streams = 2 * (M * hc * D + M + 3), moe = 3 * D * I * (E + 1) + E * D;
    size_t sum = 2 * V * D + D + hc * hc * D + hc + 1;
    for (int l = 0; l < c.L; l++) {
        sum += swa + streams + 2 * D + moe + (l >= V4_HASH_LAYERS ? E : 0);
        sum += c.kinds[l] == 'C' ? csa : c.kinds[l] == 'H' ? hca : 0;
    }
    return sum;
}

// what the specification says of a size, in millions: attention in layers of a window, of 4, of 128; mixing; experts
// with router; trunk; prediction of the token after next; all; active
typedef struct {
    double window, of_4, of_128, mixing, experts, trunk, next, all, active;
} V4Figures;

static void check_v4(Test* t, V4Config c, V4Figures want) {
    Tensor table[ROWS_MAX];
    const int n = v4_table(table, c), L = c.L, n_trunk = n_trunk_rows(table, n);
    const size_t all = tensors_count(table, n), next = n_named(table, n, "mtp.");
    const size_t trunk = all - next;
    expect(t, "trunk by the formulas", trunk, v4_trunk(c));
    expect_about(t, "attention, window", n_of_layer(table, n, L, ".attn."), 1e6 * want.window, 1e3);
    expect_about(t, "attention, of 4", n_of_layer(table, n, L - 1, ".attn."), 1e6 * want.of_4, 1e3);
    expect_about(t, "attention, of 128", n_of_layer(table, n, L - 2, ".attn."), 1e6 * want.of_128, 1e3);
    expect_about(t, "mixing", n_of_layer(table, n, 0, ".hc_"), 1e6 * want.mixing, 1e3);
    expect_about(t, "experts", n_of_layer(table, n, 5, ".ffn."), 1e6 * want.experts, want.experts > 1e4 ? 1e6 : 1e5);
    expect_about(t, "trunk", trunk, 1e6 * want.trunk, 1e6);
    expect_about(t, "prediction of the token after next", next, 1e6 * want.next, 1e6);
    expect_about(t, "all", all, 1e6 * want.all, 1e6);
    expect_about(t, "active", n_active(table, n_trunk, 6) - tensor_elements(&table[0]), 1e6 * want.active, 1e6);
    expect_name(t, table, n, "layers.3.ffn.gate.bias");
    expect_name(t, table, n, "layers.42.attn.indexer.compressor.wgate.weight");
    expect_name(t, table, n, "mtp.0.ffn.experts.255.w3.weight");
    expect_name(t, table, n, "mtp.0.h_proj.weight");
}

static void test_deepseek_v4(Test* t) {
    char flash_kinds[44] = "WW", pro_kinds[62] = "HH";
    for (int l = 2; l < 43; l++) { flash_kinds[l] = l % 2 == 0 ? 'C' : 'H'; }
    for (int l = 2; l < 61; l++) { pro_kinds[l] = l % 2 == 0 ? 'C' : 'H'; }
    const V4Config flash = {4096, 43, 64, 1024, 8, 256, 2048, flash_kinds};
    const V4Config pro = {7168, 61, 128, 1536, 16, 384, 3072, pro_kinds};
    const V4Figures of_flash = {106.956, 126.099, 111.217, 0.786, 6468.7, 284332.0, 6610.0, 290942.0, 13270.0};
    const V4Figures of_pro = {299.895, 331.292, 307.301, 1.376, 25436.0, 1572997.0, 25840.0, 1598837.0, 48852.0};
    check_v4(t, flash, of_flash);
    check_v4(t, pro, of_pro);
}

// ---- GLM-5.2: glm5.md ----

enum { GLM_L = 78, GLM_LAYERS = GLM_L + 1, GLM_DENSE = 3 };  // the last layer predicts the token after next

// 'I': an indexer of its own; 's': the selection of the last layer that has one
static void glm_kinds(char kinds[GLM_LAYERS + 1]) {
    for (int l = 0; l < GLM_LAYERS; l++) { kinds[l] = l < 3 || (l - 2) % 4 == 0 ? 'I' : 's'; }
    kinds[GLM_LAYERS] = '\0';
}

static Tensor* glm_attention(Tensor* t, int L, int D, const char* kinds) {
    const int H = 64, rq = 2048, r = 512, dn = 192, dr = 64, dv = 256, HI = 32, dI = 128;
    *t++ = linear("self_attn.q_a_proj.weight",                    L, rq, D,       SPLIT_NONE, 0);
    *t++ = gain("self_attn.q_a_layernorm.weight",                 L, rq);
    *t++ = linear("self_attn.q_b_proj.weight",                    L, H * (dn + dr), rq, SPLIT_ROWS, H);
    *t++ = linear("self_attn.kv_a_proj_with_mqa.weight",          L, r + dr, D,   SPLIT_NONE, 0);
    *t++ = gain("self_attn.kv_a_layernorm.weight",                L, r);
    *t++ = linear("self_attn.kv_b_proj.weight",                   L, H * (dn + dv), r, SPLIT_ROWS, H);
    *t++ = linear("self_attn.o_proj.weight",                      L, D, H * dv,   SPLIT_COLUMNS, H);
    Tensor* indexer = t;
    *t++ = linear("self_attn.indexer.wq_b.weight",                L, HI * dI, rq, SPLIT_NONE, 0);
    *t++ = linear("self_attn.indexer.wk.weight",                  L, dI, D,       SPLIT_NONE, 0);
    *t++ = gain("self_attn.indexer.k_norm.weight",                L, dI);
    *t++ = bias("self_attn.indexer.k_norm.bias",                  L, dI,          SPLIT_NONE, 0);
    *t++ = matrix("self_attn.indexer.weights_proj.weight",        L, HI, D,       SPLIT_NONE, 0);
    in_kinds(indexer, t, kinds, "I");
    return t;
}

static Tensor* glm_mlp(Tensor* t, int L, int D) {
    const int If = 12288, Im = 2048, E = 256;
    *t++ = linear("mlp.{gate,up}_proj.weight",                    GLM_DENSE, 2 * If, D, SPLIT_ROWS, 0);
    tensor_sections(&t[-1], If, If, 0, 0);
    *t++ = linear("mlp.down_proj.weight",                         GLM_DENSE, D, If, SPLIT_COLUMNS, 0);
    Tensor* sparse = t;
    *t++ = matrix("mlp.gate.weight",                              L, E, D,        SPLIT_NONE, 0);
    *t++ = in_float(bias("mlp.gate.e_score_correction_bias",      L, E,           SPLIT_NONE, 0));  // no gradient
    *t++ = experts("mlp.experts.%d.{gate,up}_proj.weight",        L, E, 2 * Im, D);
    tensor_stored(&t[-1], STORED_FP8);
    *t++ = experts("mlp.experts.%d.down_proj.weight",             L, E, D, Im);
    tensor_stored(&t[-1], STORED_FP8);
    *t++ = linear("mlp.shared_experts.{gate,up}_proj.weight",     L, 2 * Im, D,   SPLIT_ROWS, 0);
    tensor_sections(&t[-1], Im, Im, 0, 0);
    *t++ = linear("mlp.shared_experts.down_proj.weight",          L, D, Im,       SPLIT_COLUMNS, 0);
    for (; sparse < t; sparse++) { tensor_in_layers(sparse, GLM_DENSE, 1); }
    return t;
}

static int glm_table(Tensor* table, const char* kinds) {
    const int V = 154880, D = 6144, L = GLM_LAYERS;
    Tensor *t = table, *block, *mtp;
    *t++ = matrix("model.embed_tokens.weight",                    0, V, D,        SPLIT_VOCABULARY, 0);
    block = t;
    *t++ = gain("input_layernorm.weight",                         L, D);
    t = glm_attention(t, L, D, kinds);
    *t++ = gain("post_attention_layernorm.weight",                L, D);
    t = glm_mlp(t, L, D);
    mtp = t;
    *t++ = gain("enorm.weight",                                   L, D);
    *t++ = gain("hnorm.weight",                                   L, D);
    *t++ = matrix("eh_proj.weight",                               L, D, 2 * D,    SPLIT_NONE, 0);
    *t++ = gain("shared_head.norm.weight",                        L, D);
    for (; mtp < t; mtp++) { tensor_in_layers(mtp, GLM_L, 1); }
    under(block, t, "model.layers.%d.", 0);
    *t++ = gain("model.norm.weight",                              0, D);
    *t++ = matrix("lm_head.weight",                               0, V, D,        SPLIT_VOCABULARY, 0);
    return (int)(t - table);
}

// tensors of the file that are stored in fp8, and the bytes of all as the release stores them
static size_t n_fp8(const Tensor* table, int n, double* n_bytes) {
    size_t sum = 0;
    *n_bytes = 0.0;
    for (int i = 0; i < n; i++) {
        const size_t n_slices = (size_t)tensor_slices(&table[i]);
        const size_t matrices = tensor_elements(&table[i]) / tensor_matrix_elements(&table[i]);
        sum += table[i].stored == STORED_FP8 ? n_slices : 0;
        *n_bytes += (double)matrices * (double)tensor_matrix_bytes(&table[i], 2);
    }
    return sum;
}

static void test_glm(Test* t) {
    char kinds[GLM_LAYERS + 1];
    double n_bytes;
    Tensor table[ROWS_MAX];
    glm_kinds(kinds);
    const int n = glm_table(table, kinds);
    const size_t all = tensors_count(table, n), mtp = n_of_layer(table, n, GLM_L, "");
    const size_t biases = 75 * 256, expert = 37748736;
    expect(t, "all", all, 753329940480u);
    expect(t, "layer 78", mtp, 9952920576u);
    expect(t, "trunk without the routers' biases", all - mtp - biases, 743377000704u);
    expect(t, "experts of the trunk", n_experts(table, n) / 76 * 75, 724775731200u);
    expect(t, "attention, a layer", (n_named(table, n, "self_attn") - n_named(table, n, "indexer")) / 79, 165022208u);
    expect(t, "indexers: 21 in the trunk and one", n_named(table, n, "indexer"), 22 * (size_t)9371904);
    expect(t, "a dense layer's MLP", n_named(table, n, "layers.%d.mlp.{gate") + n_named(table, n, "layers.%d.mlp.down"),
           3 * (size_t)226492416);
    expect(t, "tensors", n_tensors(table, n), 59585);
    expect(t, "tensors in fp8", n_fp8(table, n, &n_bytes), 59044);
    // the specification says about 755.7e9; the headers of so many names are 0.01e9 of it
    check(t, fabs(n_bytes - 755.62e9) < 0.01e9, "bytes of the fp8 release: found %.0f, expected about 755.62e9",
          n_bytes);
    const size_t active = n_active(table, n, 8) - (mtp - 248 * expert) - biases - 951582720u;
    expect(t, "active without the embedding", active, 40298928384u);
    expect_name(t, table, n, "model.layers.78.shared_head.norm.weight");
    expect_name(t, table, n, "model.layers.74.self_attn.indexer.k_norm.bias");
    expect_name(t, table, n, "model.layers.3.mlp.experts.255.up_proj.weight");
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"slices", "slice and layer are two things: kinds of layers, every second, from the second on, experts",
         test_slices},
        {"point", "at a layer's first expert; NULL where the layer lacks the tensor", test_point},
        {"names", "layer, expert and {one,other} are filled in", test_names},
        {"draws", "start values come layer by layer, expert by expert", test_draws},
        {"files", "a file or shards give the same bits back, under the names and shapes of the table", test_files},
        {"experts on disk", "fused or apart: the same parameters", test_experts_on_disk},
        {"experts woven", "ranks of A by expert, of B by rank, as PEFT has adapters", test_experts_woven},
        {"fp8", "a matrix of e4m3 is its numbers times the scales of its blocks, F32 or E8M0", test_fp8},
        {"freeze", "patterns of names with both numbers; first:N and indices mean layers", test_freeze},
        {"learning from", "the lowest layer that learns, and whether something below it does", test_learning_from},
        {"shares", "rows and columns of ranks of tensor parallelism: sections, heads, fewer heads than ranks",
         test_shares},
        {"bytes", "of a matrix as it is stored, with its scales", test_bytes},
        {"bands", "of fp8: places of bytes and scales; they begin anew with parts and experts", test_bands},
        {"fp4", "half a byte and a byte of scale for 32 columns each, slice by slice", test_fp4},
        {"table of moe", "the 6.9B mixture of experts and its small sisters: all, active, a layer, an expert",
         test_moe},
        {"table of qwen dense", "Qwen2.5, Qwen3, Qwen3-30B-A3B, Mistral 7B: parameters and tensors", test_qwen_dense},
        {"table of qwen3.6", "35B-A3B: text, vision, prediction, each part; experts fused and apart", test_qwen36},
        {"table of deepseek v4", "Flash and Pro: the specification's formulas and figures", test_deepseek_v4},
        {"table of glm-5.2", "trunk, prediction, experts, indexers; tensors and bytes of the fp8 release", test_glm},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
