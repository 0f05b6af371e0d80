/*
The vision tower of Qwen3-VL and Qwen3.6: a transformer over the patches of images, in which each patch sees all of its
frame, gives one row for each block of merge x merge patches; these rows stand in the text in place of placeholders.
    x = pixels Wpatch^T + b + position     grid_embedding.h: sampled from a table, whatever the image's shape
    x = x + attention(norm1(x))            RoPE turns whole heads, half by the row of a patch, half by its column
    x = x + fc2(gelu(fc1(norm2(x))))
    out = fc2(gelu_erf(fc1([norm(x) of the patches of a block])))
All norms are LayerNorm, eps 1e-6; all matrices have biases.
    VisionConfig, vision_config_parse, vision_config_json   its sizes, from "vision_config" and back into one
    VisionParameters, vision_rows   fields and lines of the table of parameters
    ImageRows, image_rows_check   images as the host has them: do grids and pixels agree?
    VisionTower, vision_tower_init, vision_tower_free
    vision_tower_store      after model_store_frozen: what is read as the build has it
    vision_tower_learns     does anything of it?
    vision_tower_bytes      of room for so many patches
    vision_tower_room       made before the first pass; more is made when more patches come
    vision_tower_take       images come to the device, with where their patches are
    vision_tower_forward    out (tokens, D) comes back; vision_tower_out is where it stays
    vision_tower_backward   from dout, the gradients of all parameters that learn, written
    vision_tower_nothing    of a batch without images: they are 0
    vision_tower_flops      of a patch, forward and backward
Backward stops at the lowest block that learns. Of a tower of which nothing learns no activation is kept, of others all
but the GELU outputs of blocks.
Attention of a frame of n patches is attention.h's of n queries behind n keys, so that each sees all.
Order:  as the ops say. The gradient of norm1 is one chain over the outputs of qkv as they lie; frames are apart.
Source: Qwen Team 2025, "Qwen3-VL", arXiv:2511.21631; Dosovitskiy et al. 2020, arXiv:2010.11929; doc/qwen36.md "Images"
*/
#ifndef LLMC_VISION_TOWER_H
#define LLMC_VISION_TOWER_H
#include "../core/floatx.h"         // floatX
#include "../core/jsonfile.h"       // json_ints, json_agrees
#include "../core/tensor_arena.h"   // TensorArena
#include "../ops/attention.h"       // grouped_attention_forward, grouped_attention_backward
#include "../ops/cast.h"            // cast
#include "../ops/gelu.h"            // gelu_forward, gelu_backward
#include "../ops/gelu_erf.h"        // gelu_erf_forward, gelu_erf_backward
#include "../ops/grid_embedding.h"  // grid_taps, grid_entries, grid_embedding_forward
#include "../ops/layernorm.h"       // layernorm_forward, layernorm_backward
#include "../ops/residual.h"        // residual_forward
#include "../ops/rope.h"            // RopeTable, rope_table_at, rope_forward, rope_backward
#include "linear.h"                 // model_linear, linear_forward, linear_backward

#define VISION_EPS 1e-6f
#define VISION_THETA 1e4
enum { VISION_MOST_LAYERS = 256, VISION_MOST_PATCHES = 1 << 24 };

// ---- 1. Sizes and parameters ----

typedef struct {
    int depth, C, F, NH;          // blocks, 27; channels, 1152; width of an MLP, 4304; heads, 16
    int channels, patch, temporal, merge;  // of a pixel, 3; pixels of a side, 16; frames, 2; patches of a side of a
                                           // token's block, 2
    int positions;                // rows of the table of positions, a square, 2304
    int D;                        // channels of what comes out, 2048
} VisionConfig;

static inline int vision_columns(const VisionConfig* c) { return c->channels * c->temporal * c->patch * c->patch; }
static inline int vision_block(const VisionConfig* c) { return c->merge * c->merge; }
static inline int vision_side(const VisionConfig* c) { return (int)lround(sqrt((double)c->positions)); }

// D: channels of the text
static inline int vision_config_parse(VisionConfig* c, const json_t* json, int D, ErrorText* error) {
    const JsonInt sizes[] = {
        {"depth", &c->depth, 1, VISION_MOST_LAYERS}, {"hidden_size", &c->C, 4, 1 << 16},
        {"intermediate_size", &c->F, 1, 1 << 20}, {"num_heads", &c->NH, 1, 1 << 12},
        {"in_channels", &c->channels, 1, 16}, {"patch_size", &c->patch, 1, 256},
        {"temporal_patch_size", &c->temporal, 1, 16},
        {"spatial_merge_size", &c->merge, 1, 16}, {"num_position_embeddings", &c->positions, 1, 1 << 24},
        {"out_hidden_size", &c->D, 1, 1 << 20}};
    if (!json_is_object(json)) { return json_refuse_value(error, "vision_config", "an object", json); }
    if (!json_ints(json, sizes, sizeof sizes / sizeof sizes[0], error)) { return 0; }
    const json_t* deep = json_object_get(json, "deepstack_visual_indexes");
    if (c->C % (4 * c->NH) != 0) {
        return error_set(error, "\"hidden_size\" %d: expected four channels in each of \"num_heads\" %d, or a multiple",
                         c->C, c->NH);
    }
    if (vision_side(c) * vision_side(c) != c->positions) {
        return error_set(error, "\"num_position_embeddings\" %d: expected a square", c->positions);
    }
    if (c->D != D) { return error_set(error, "\"out_hidden_size\": expected %d, the text's, found %d", D, c->D); }
    if (deep && !json_is_null(deep) && json_array_size(deep) > 0) {
        return error_set(error, "\"deepstack_visual_indexes\": this trainer computes none, found %zu",
                         json_array_size(deep));
    }
    return json_agrees(json, json_pack("{s:s}", "hidden_act", "gelu_pytorch_tanh"), error);
}

static inline json_t* vision_config_json(const VisionConfig* c) {
    return json_pack("{s:s, s:s, s:[], s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "model_type",
                     "qwen3_5_moe_vision", "hidden_act", "gelu_pytorch_tanh", "deepstack_visual_indexes", "depth",
                     c->depth, "hidden_size", c->C, "intermediate_size", c->F, "num_heads", c->NH, "in_channels",
                     c->channels, "patch_size", c->patch, "temporal_patch_size", c->temporal, "spatial_merge_size",
                     c->merge, "num_position_embeddings", c->positions, "out_hidden_size", c->D);
}

// what a field of the table is called
typedef struct {
    float *patch, *patch_b, *position, *norm1, *norm1_b, *qkv, *qkv_b, *proj, *proj_b, *norm2, *norm2_b, *fc1, *fc1_b,
        *fc2, *fc2_b, *merger_norm, *merger_norm_b, *merger_fc1, *merger_fc1_b, *merger_fc2, *merger_fc2_b;
} VisionParameters;

enum { VISION_ROWS = 21 };
#define VISION_NAMES "model.visual."

// Lines behind t; at: the offset of VisionParameters in the struct of all; blocks are layers from number `first` on.
// Returns the end
static inline Tensor* vision_rows(Tensor* t, size_t at, const VisionConfig* c, int first) {
    const int L = first + c->depth, C = c->C, F = c->F, M = vision_block(c) * C;
    Tensor *blocks, *begin = t;
#define FIELD(name) at + offsetof(VisionParameters, name)
#define IN VISION_NAMES "merger."
    *t++ = tensor(VISION_NAMES "patch_embed.proj.weight", FIELD(patch), 0, C, vision_columns(c), INIT_NORMAL, 0.02f,
                  DECAY, AS_IS);
    tensor_dims(&t[-1], c->channels, c->temporal, c->patch, c->patch);
    *t++ = tensor(VISION_NAMES "patch_embed.proj.bias", FIELD(patch_b), 0, 1, C, INIT_ZEROS, 0.0f, NO_DECAY, VECTOR);
    *t++ = tensor(VISION_NAMES "pos_embed.weight", FIELD(position), 0, c->positions, C, INIT_NORMAL, 0.02f, DECAY,
                  AS_IS);
    blocks = t;
    *t++ = tensor("norm1.weight",           FIELD(norm1),   L, 1,     C, INIT_ONES,   0.0f,  NO_DECAY, VECTOR);
    *t++ = tensor("norm1.bias",             FIELD(norm1_b), L, 1,     C, INIT_ZEROS,  0.0f,  NO_DECAY, VECTOR);
    *t++ = tensor("attn.qkv.weight",        FIELD(qkv),     L, 3 * C, C, INIT_NORMAL, 0.02f, DECAY,    AS_IS);
    *t++ = tensor("attn.qkv.bias",          FIELD(qkv_b),   L, 1, 3 * C, INIT_ZEROS,  0.0f,  NO_DECAY, VECTOR);
    *t++ = tensor("attn.proj.weight",       FIELD(proj),    L, C,     C, INIT_NORMAL, 0.02f, DECAY,    AS_IS);
    *t++ = tensor("attn.proj.bias",         FIELD(proj_b),  L, 1,     C, INIT_ZEROS,  0.0f,  NO_DECAY, VECTOR);
    *t++ = tensor("norm2.weight",           FIELD(norm2),   L, 1,     C, INIT_ONES,   0.0f,  NO_DECAY, VECTOR);
    *t++ = tensor("norm2.bias",             FIELD(norm2_b), L, 1,     C, INIT_ZEROS,  0.0f,  NO_DECAY, VECTOR);
    *t++ = tensor("mlp.linear_fc1.weight",  FIELD(fc1),     L, F,     C, INIT_NORMAL, 0.02f, DECAY,    AS_IS);
    *t++ = tensor("mlp.linear_fc1.bias",    FIELD(fc1_b),   L, 1,     F, INIT_ZEROS,  0.0f,  NO_DECAY, VECTOR);
    *t++ = tensor("mlp.linear_fc2.weight",  FIELD(fc2),     L, C,     F, INIT_NORMAL, 0.02f, DECAY,    AS_IS);
    *t++ = tensor("mlp.linear_fc2.bias",    FIELD(fc2_b),   L, 1,     C, INIT_ZEROS,  0.0f,  NO_DECAY, VECTOR);
    for (; blocks < t; blocks++) {
        tensor_in_layers(blocks, first, 1);
        tensor_named_from(blocks, first);
        tensor_under(blocks, VISION_NAMES "blocks.%d.");
    }
    *t++ = tensor(IN "norm.weight",         FIELD(merger_norm),   0, 1, C, INIT_ONES,  0.0f,  NO_DECAY, VECTOR);
    *t++ = tensor(IN "norm.bias",           FIELD(merger_norm_b), 0, 1, C, INIT_ZEROS, 0.0f,  NO_DECAY, VECTOR);
    *t++ = tensor(IN "linear_fc1.weight",   FIELD(merger_fc1),   0, M,  M, INIT_NORMAL, 0.02f, DECAY,   AS_IS);
    *t++ = tensor(IN "linear_fc1.bias",     FIELD(merger_fc1_b), 0, 1,  M, INIT_ZEROS, 0.0f,  NO_DECAY, VECTOR);
    *t++ = tensor(IN "linear_fc2.weight",   FIELD(merger_fc2), 0, c->D, M, INIT_NORMAL, 0.02f, DECAY,   AS_IS);
    *t++ = tensor(IN "linear_fc2.bias",     FIELD(merger_fc2_b), 0, 1, c->D, INIT_ZEROS, 0.0f, NO_DECAY, VECTOR);
#undef IN
#undef FIELD
    for (; begin < t; begin++) { tensor_before(begin); }
    return t;
}

// ---- 2. Images on the host ----

typedef struct {
    int n;                // images
    const int* grids;     // (n, 3): frames, rows and columns of patches
    const float* pixels;  // (P, columns), the patches of all, image by image
    int P;
    int n_frames;         // so many of them, the last, are frames of videos
} ImageRows;

// grids and pixels of a file agree, and are of this tower; 0 with the reason
static inline int image_rows_check(const ImageRows* x, const VisionConfig* c, ErrorText* error) {
    int64_t P = 0;
    for (int i = 0; i < x->n; i++) {
        const int *g = x->grids + 3 * i, m = c->merge;
        if (g[0] < 1 || g[1] < 1 || g[2] < 1 || g[1] % m != 0 || g[2] % m != 0) {
            return error_set(error, "grid %d: expected frames, and rows and columns that are multiples of %d, found %d "
                             "%d %d", i, m, g[0], g[1], g[2]);
        }
        P += (int64_t)g[0] * g[1] * g[2];
    }
    return P == x->P || error_set(error, "expected pixel values of %lld patches, as the grids say, found %d",
                                  (long long)P, x->P);
}

// ---- 3. A pass ----

// from `dresidual` on the gradients on their way back, one buffer each for all blocks
typedef struct {
    floatX *pixels, *encoded, *norm1, *qkv, *attention, *residual2, *norm2, *fc1, *gelu, *residual3, *branch, *norm,
        *merger_fc1, *merger_gelu, *out, *dresidual, *dbranch, *dqkv, *dfc1, *dmerger;
} VisionTensors;

typedef struct {
    float *norm1_mean, *norm1_rstd, *max, *inv, *norm2_mean, *norm2_rstd, *norm_mean, *norm_rstd, *weights, *values;
} VisionStatistics;

// frames of as many patches that follow each other
typedef struct { int first, n_frames, n; } VisionFrames;

typedef struct {
    VisionConfig c;
    Model* m;
    size_t at;                // offset of VisionParameters in the struct of the model's parameters
    int first;                // the layer that is block 0
    int evaluates;            // no backward will come
    int keeps;                // blocks whose activations are kept: all, or none where nothing learns
    int lowest;               // the block at which backward may stop; depth: the merger alone learns
    int P, most;              // patches at hand; room
    TensorArena tensors, statistics;
    RopeTable rope;
    int *taps, *entry, *rows; // on the device: grid_embedding.h; rows: where the entries of each row begin
    VisionFrames* frames;     // on the host
    int n_frames;
} VisionTower;

static inline void vision_tower_init(VisionTower* t, const VisionConfig* c, Model* m, size_t at, int first) {
    memset(t, 0, sizeof *t);
    t->c = *c, t->m = m, t->at = at, t->first = first;
}

// the table of positions is no matrix of a product
static inline void vision_tower_store(VisionTower* t) {
    const size_t field = t->at + offsetof(VisionParameters, position);
    tensor_stored(&t->m->table[model_row(t->m, field, 0)], STORED_BY_BUILD);
}

// L: blocks whose activations are kept
static inline int vision_tensor_table_(Tensor* table, const VisionConfig* c, int P, int L) {
    const int C = c->C, N = P / vision_block(c), M = vision_block(c) * C, P_learn = L > 0 ? P : 0;
    Tensor* t = table;
#define FIELD(name) "vision_" #name, offsetof(VisionTensors, name)
    *t++ = activation(FIELD(pixels),     0, P, vision_columns(c));
    *t++ = activation(FIELD(encoded),    0, P, C);
    *t++ = activation(FIELD(norm1),      L, P, C);
    *t++ = activation("vision_turned", offsetof(VisionTensors, qkv), L, P, 3 * C);  // q and k behind RoPE
    *t++ = activation(FIELD(attention),  L, P, C);
    *t++ = activation(FIELD(residual2),  L, P, C);
    *t++ = activation(FIELD(norm2),      L, P, C);
    *t++ = activation(FIELD(fc1),        L, P, c->F);
    *t++ = activation(FIELD(gelu),       0, P, c->F);
    *t++ = activation(FIELD(residual3),  L, P, C);
    *t++ = activation("vision_branch", offsetof(VisionTensors, branch), 0, P, C);
    *t++ = activation("merger_norm", offsetof(VisionTensors, norm), 0, P, C);
    *t++ = activation("merger_fc1", offsetof(VisionTensors, merger_fc1), 0, N, M);
    *t++ = activation("merger_gelu", offsetof(VisionTensors, merger_gelu), 0, N, M);
    *t++ = activation("merger_out", offsetof(VisionTensors, out), 0, N, c->D);
    *t++ = activation(FIELD(dresidual),  0, P_learn, C);
    *t++ = activation(FIELD(dbranch),    0, P_learn, C);
    *t++ = activation(FIELD(dqkv),       0, P_learn, 3 * C);
    *t++ = activation(FIELD(dfc1),       0, P_learn, c->F);
    *t++ = activation(FIELD(dmerger),    0, P_learn / vision_block(c), M);
#undef FIELD
    return (int)(t - table);
}

static inline int vision_statistic_table_(Tensor* table, const VisionConfig* c, int P, int L) {
    Tensor* t = table;
#define FIELD(name) "vision_" #name, offsetof(VisionStatistics, name)
    *t++ = activation(FIELD(norm1_mean), L, P, 1);
    *t++ = activation(FIELD(norm1_rstd), L, P, 1);
    *t++ = activation(FIELD(max),        L, P, c->NH);
    *t++ = activation(FIELD(inv),        L, P, c->NH);
    *t++ = activation(FIELD(norm2_mean), L, P, 1);
    *t++ = activation(FIELD(norm2_rstd), L, P, 1);
    *t++ = activation("merger_norm_mean", offsetof(VisionStatistics, norm_mean), 0, P, 1);
    *t++ = activation("merger_norm_rstd", offsetof(VisionStatistics, norm_rstd), 0, P, 1);
    *t++ = activation(FIELD(weights),    0, P, GRID_TAPS);
    *t++ = activation(FIELD(values),     0, P, vision_columns(c));  // pixels as they come
#undef FIELD
    return (int)(t - table);
}

static inline VisionTensors vision_tensors_(const VisionTower* t, int l) {
    VisionTensors a;
    tensor_arena_point(&t->tensors, &a, l);
    return a;
}

static inline VisionStatistics vision_statistics_(const VisionTower* t, int l) {
    VisionStatistics s;
    tensor_arena_point(&t->statistics, &s, l);
    return s;
}

static inline size_t vision_index_bytes_(const VisionTower* t) { return sizeof(int) * GRID_TAPS * (size_t)t->most; }
static inline size_t vision_row_bytes_(const VisionTower* t) { return sizeof(int) * ((size_t)t->c.positions + 1); }

static inline void vision_tower_free(VisionTower* t) {
    if (t->most == 0) { return; }
    tensor_arena_close(&t->tensors);
    tensor_arena_close(&t->statistics);
    rope_table_free(&t->rope);
    device_release(t->taps, vision_index_bytes_(t));
    device_release(t->entry, vision_index_bytes_(t));
    device_release(t->rows, vision_row_bytes_(t));
    free(t->frames);
    t->most = 0;
}

static inline int vision_is_row_(const VisionTower* t, const Tensor* row) {
    return row->field >= t->at && row->field < t->at + sizeof(VisionParameters);
}

// Does a row of it learn, at layer l, or at any with l < 0? Those of no layer are the patches', but for the merger's
static inline int vision_row_learns_(const VisionTower* t, int i, int l) {
    const Tensor* row = &t->m->table[i];
    const int slice = tensors_slices(t->m->table, i), n = tensor_slices(row);
    if (!vision_is_row_(t, row)) { return 0; }
    if (l < 0 || row->layers == 0) { return slices_learn(t->m->frozen, slice, n); }
    return slices_learn(t->m->frozen, slice + tensor_slice(row, l), tensor_layer_slices(row));
}

static inline int vision_tower_learns(const VisionTower* t) {
    int learns = 0;
    for (int i = 0; i < t->m->n_table; i++) { learns |= vision_row_learns_(t, i, -1); }
    return learns;
}

// the block at which backward may stop
static inline int vision_find_lowest_(const VisionTower* t) {
    const size_t merger = t->at + offsetof(VisionParameters, merger_norm);
    int lowest = t->c.depth;
    for (int i = 0; i < t->m->n_table; i++) {
        const Tensor* row = &t->m->table[i];
        if (row->layers == 0 && row->field < merger && vision_row_learns_(t, i, -1)) { return 0; }
        for (int b = 0; b < lowest && row->layers > 0; b++) {
            if (vision_row_learns_(t, i, t->first + b)) { lowest = b; }
        }
    }
    return lowest;
}

// sizes only; what is frozen is known
static inline void vision_tower_layout_(VisionTower* t, int P) {
    const int keeps = !t->evaluates && vision_tower_learns(t) ? t->c.depth : 0;
    t->most = P;
    t->keeps = keeps;
    t->lowest = vision_find_lowest_(t);
    memset(&t->tensors, 0, sizeof t->tensors);
    memset(&t->statistics, 0, sizeof t->statistics);
    tensor_arena_layout(&t->tensors, vision_tensor_table_(t->tensors.table, &t->c, P, keeps), sizeof(floatX));
    tensor_arena_layout(&t->statistics, vision_statistic_table_(t->statistics.table, &t->c, P, keeps), sizeof(float));
}

static inline double vision_tower_bytes(const VisionTower* t, double P) {
    VisionTower x = *t;
    if (P == 0.0) { return 0.0; }
    if (P > (double)VISION_MOST_PATCHES) { return INFINITY; }
    vision_tower_layout_(&x, (int)P);
    const size_t angles = rope_table_bytes(x.most, x.c.C / x.c.NH);
    const size_t places = angles + 2 * vision_index_bytes_(&x) + vision_row_bytes_(&x);
    return (double)(x.tensors.n_bytes + x.statistics.n_bytes + places);
}

static inline void vision_tower_room(VisionTower* t, int P) {
    if (P <= t->most) { return; }
    vision_tower_free(t);
    vision_tower_layout_(t, P);
    tensor_arena_open(&t->tensors, "activations of images");
    tensor_arena_open(&t->statistics, "statistics of images");
    rope_table_room(&t->rope, P, t->c.C / t->c.NH);
    t->taps = (int*)device_alloc(vision_index_bytes_(t), "positions of patches");
    t->entry = (int*)device_alloc(vision_index_bytes_(t), "positions of patches");
    t->rows = (int*)device_alloc(vision_row_bytes_(t), "positions of patches");
    t->frames = (VisionFrames*)malloc_check(sizeof(VisionFrames) * (size_t)P, "frames of images");
}

// ---- where patches are, on the host, then on the device ----

// the first half of the pairs turns by rows, the other by columns, each with the frequencies of half a head
static inline void vision_take_angles_(VisionTower* t, const ImageRows* x, const Device* dev) {
    const int HS = t->c.C / t->c.NH, half = HS / 2, quarter = HS / 4, P = x->P;
    int* places = (int*)malloc_check(sizeof(int) * (2 * (size_t)P + (size_t)half), "places of patches");
    int* axis = places + 2 * (size_t)P;
    float* frequencies = (float*)malloc_check(sizeof(float) * (size_t)half, "frequencies of patches");
    rope_frequencies(frequencies, VISION_THETA, half);
    for (int k = 0; k < half; k++) {
        axis[k] = k / quarter;
        frequencies[k] = frequencies[k % quarter];
    }
    for (int i = 0, first = 0; i < x->n; i++) {
        const int *g = x->grids + 3 * i, n_frame = g[1] * g[2], n = g[0] * n_frame;
        for (int p = 0; p < n; p++) {
            patch_place(&places[first + p], &places[P + first + p], p % n_frame, g[2], t->c.merge);
        }
        first += n;
    }
    rope_table_at(&t->rope, frequencies, places, axis, P, HS, dev);
    free(frequencies);
    free(places);
}

static inline void vision_take_positions_(VisionTower* t, const ImageRows* x, const Device* dev) {
    const size_t n = GRID_TAPS * (size_t)x->P;
    int* taps = (int*)malloc_check(sizeof(int) * (2 * n + (size_t)t->c.positions + 1), "positions of patches");
    float* weights = (float*)malloc_check(sizeof(float) * n, "positions of patches");
    int *entry = taps + n, *rows = entry + n;
    size_t first = 0;
    for (int i = 0; i < x->n; i++) {
        const int* g = x->grids + 3 * i;
        grid_taps(taps + GRID_TAPS * first, weights + GRID_TAPS * first, g[0], g[1], g[2], t->c.merge,
                  vision_side(&t->c));
        first += (size_t)(g[0] * g[1] * g[2]);
    }
    grid_entries(rows, entry, taps, x->P, t->c.positions);
    device_upload(t->taps, taps, sizeof(int) * n, dev);
    device_upload(t->entry, entry, sizeof(int) * n, dev);
    device_upload(t->rows, rows, vision_row_bytes_(t), dev);
    device_upload(vision_statistics_(t, 0).weights, weights, sizeof(float) * n, dev);
    device_sync(dev);
    free(taps);
    free(weights);
}

// images that image_rows_check has seen, at least one
static inline void vision_tower_take(VisionTower* t, const ImageRows* x, const Device* dev) {
    const size_t n = (size_t)x->P * (size_t)vision_columns(&t->c);
    vision_tower_room(t, x->P);
    t->P = x->P;
    t->n_frames = 0;
    for (int i = 0, first = 0; i < x->n; i++) {
        const int *g = x->grids + 3 * i, size = g[1] * g[2];
        VisionFrames* last = t->n_frames > 0 ? &t->frames[t->n_frames - 1] : NULL;
        const VisionFrames frames = {first, g[0], size};
        if (last && last->n == size) { last->n_frames += g[0]; } else { t->frames[t->n_frames++] = frames; }
        first += g[0] * size;
    }
    vision_take_angles_(t, x, dev);
    vision_take_positions_(t, x, dev);
    device_upload(vision_statistics_(t, 0).values, x->pixels, sizeof(float) * n, dev);
    cast(vision_tensors_(t, 0).pixels, (const float*)vision_statistics_(t, 0).values, n, dev);
}

// ---- blocks ----

#define VISION_FIELD(name) (t->at + offsetof(VisionParameters, name))

static inline const floatX* vision_vector_(const VisionTower* t, size_t field, int l) {
    return (const floatX*)model_vector(t->m, field, l);
}

static inline float* vision_gradient_(VisionTower* t, size_t field, int l) {
    return model_vector_gradient(t->m, field, l);
}

// q and k of all patches, where they lie in qkv; or their gradients, back
static inline void vision_turn_(const VisionTower* t, floatX* qkv, int back, const Device* dev) {
    const int HS = t->c.C / t->c.NH;
    RopeShape shape = rope_shape(1, t->P, 0, 2 * t->c.NH, HS, ROPE_HALVES);
    shape.row = 3 * (size_t)t->c.C;
    if (back) { rope_backward(qkv, t->rope.cosines, t->rope.sines, &shape, dev); }
    else { rope_forward(qkv, t->rope.cosines, t->rope.sines, &shape, dev); }
}

// n queries, numbers n .. 2n - 1, see the keys 0 .. n - 1, which are all there are
static inline AttentionShape vision_attention_shape_(const VisionTower* t, const VisionFrames* f) {
    AttentionShape s = attention_packed_shape(f->n_frames, f->n, t->c.C, t->c.NH, 0);
    s.T = 2 * f->n, s.t0 = f->n, s.keys = f->n;
    return s;
}

static inline void vision_attend_(const VisionTower* t, int l, const Device* dev) {
    const VisionTensors a = vision_tensors_(t, l);
    const VisionStatistics s = vision_statistics_(t, l);
    const size_t C = (size_t)t->c.C;
    for (int i = 0; i < t->n_frames; i++) {
        const VisionFrames* f = &t->frames[i];
        const AttentionShape shape = vision_attention_shape_(t, f);
        const size_t first = (size_t)f->first, heads = first * (size_t)t->c.NH;
        const floatX* qkv = a.qkv + 3 * C * first;
        grouped_attention_forward(a.attention + C * first, s.max + heads, s.inv + heads, qkv, qkv + C, qkv + 2 * C,
                                  &shape, dev);
    }
}

static inline void vision_attend_backward_(const VisionTower* t, int l, const floatX* dout, const Device* dev) {
    const VisionTensors a = vision_tensors_(t, l);
    const VisionStatistics s = vision_statistics_(t, l);
    const size_t C = (size_t)t->c.C;
    for (int i = 0; i < t->n_frames; i++) {
        const VisionFrames* f = &t->frames[i];
        const AttentionShape shape = vision_attention_shape_(t, f);
        const size_t first = (size_t)f->first, heads = first * (size_t)t->c.NH;
        const floatX* qkv = a.qkv + 3 * C * first;
        floatX* d = a.dqkv + 3 * C * first;
        grouped_attention_backward(d, d + C, d + 2 * C, dout + C * first, a.attention + C * first, s.max + heads,
                                   s.inv + heads, qkv, qkv + C, qkv + 2 * C, &shape, dev);
    }
}

static inline void vision_norm_(const VisionTower* t, floatX* out, float* mean, float* rstd, const floatX* inp,
                                size_t weight, size_t bias, int l, const Device* dev) {
    layernorm_forward(out, mean, rstd, inp, vision_vector_(t, weight, l), vision_vector_(t, bias, l), VISION_EPS, t->P,
                      t->c.C, dev);
}

static inline void vision_linear_(const VisionTower* t, floatX* out, const floatX* inp, size_t weight, size_t bias,
                                  int l, int N, const Device* dev) {
    linear_forward(out, inp, model_linear(t->m, weight, bias, l), N, dev);
}

static inline void vision_linear_backward_(VisionTower* t, floatX* dinp, const floatX* dout, const floatX* inp,
                                           size_t weight, size_t bias, int l, int N, const Device* dev) {
    linear_backward(dinp, dout, inp, model_linear(t->m, weight, bias, l),
                    model_linear_gradients(t->m, weight, bias, l), 0, N, dev);
}

static inline void vision_block_forward_(const VisionTower* t, int b, const floatX* residual, const Device* dev) {
    const int l = t->first + b, C = t->c.C;
    const size_t n = (size_t)t->P * (size_t)C;
    const VisionTensors a = vision_tensors_(t, b);
    const VisionStatistics s = vision_statistics_(t, b);
    vision_norm_(t, a.norm1, s.norm1_mean, s.norm1_rstd, residual, VISION_FIELD(norm1), VISION_FIELD(norm1_b), l, dev);
    vision_linear_(t, a.qkv, a.norm1, VISION_FIELD(qkv), VISION_FIELD(qkv_b), l, t->P, dev);
    vision_turn_(t, a.qkv, 0, dev);
    vision_attend_(t, b, dev);
    vision_linear_(t, a.branch, a.attention, VISION_FIELD(proj), VISION_FIELD(proj_b), l, t->P, dev);
    residual_forward(a.residual2, residual, a.branch, n, dev);
    vision_norm_(t, a.norm2, s.norm2_mean, s.norm2_rstd, a.residual2, VISION_FIELD(norm2), VISION_FIELD(norm2_b), l,
                 dev);
    vision_linear_(t, a.fc1, a.norm2, VISION_FIELD(fc1), VISION_FIELD(fc1_b), l, t->P, dev);
    gelu_forward(a.gelu, a.fc1, (size_t)t->P * (size_t)t->c.F, dev);
    vision_linear_(t, a.branch, a.gelu, VISION_FIELD(fc2), VISION_FIELD(fc2_b), l, t->P, dev);
    residual_forward(a.residual3, a.residual2, a.branch, n, dev);
}

// dresidual goes from behind block b to before it
static inline void vision_block_backward_(VisionTower* t, int b, const floatX* residual, const Device* dev) {
    const int l = t->first + b, P = t->P, C = t->c.C;
    const size_t n_gelu = (size_t)P * (size_t)t->c.F;
    const VisionTensors a = vision_tensors_(t, b);
    const VisionStatistics s = vision_statistics_(t, b);
    gelu_forward(a.gelu, a.fc1, n_gelu, dev);
    vision_linear_backward_(t, a.dfc1, a.dresidual, a.gelu, VISION_FIELD(fc2), VISION_FIELD(fc2_b), l, P, dev);
    gelu_backward(a.dfc1, a.fc1, a.dfc1, n_gelu, dev);
    vision_linear_backward_(t, a.dbranch, a.dfc1, a.norm2, VISION_FIELD(fc1), VISION_FIELD(fc1_b), l, P, dev);
    layernorm_backward(a.dresidual, vision_gradient_(t, VISION_FIELD(norm2), l),
                       vision_gradient_(t, VISION_FIELD(norm2_b), l), a.dbranch, a.residual2,
                       vision_vector_(t, VISION_FIELD(norm2), l), s.norm2_mean, s.norm2_rstd, P, C, dev);
    vision_linear_backward_(t, a.dbranch, a.dresidual, a.attention, VISION_FIELD(proj), VISION_FIELD(proj_b), l, P,
                            dev);
    vision_attend_backward_(t, b, a.dbranch, dev);
    vision_turn_(t, a.dqkv, 1, dev);
    vision_linear_backward_(t, a.dbranch, a.dqkv, a.norm1, VISION_FIELD(qkv), VISION_FIELD(qkv_b), l, P, dev);
    layernorm_backward(a.dresidual, vision_gradient_(t, VISION_FIELD(norm1), l),
                       vision_gradient_(t, VISION_FIELD(norm1_b), l), a.dbranch, residual,
                       vision_vector_(t, VISION_FIELD(norm1), l), s.norm1_mean, s.norm1_rstd, P, C, dev);
    model_layer_done(t->m, l, dev);
}

// ---- the whole ----

// what vision_tower_forward has made last
static inline const floatX* vision_tower_out(const VisionTower* t) { return vision_tensors_(t, 0).out; }

// (tokens, D)
static inline const floatX* vision_tower_forward(const VisionTower* t, const Device* dev) {
    const VisionConfig* c = &t->c;
    const int N = t->P / vision_block(c);
    const VisionTensors a = vision_tensors_(t, 0);
    const VisionStatistics s = vision_statistics_(t, 0);
    vision_linear_(t, a.encoded, a.pixels, VISION_FIELD(patch), VISION_FIELD(patch_b), 0, t->P, dev);
    grid_embedding_forward(a.encoded, vision_vector_(t, VISION_FIELD(position), 0), t->taps, s.weights, t->P, c->C,
                           dev);
    const floatX* residual = a.encoded;
    for (int b = 0; b < c->depth; b++) {
        vision_block_forward_(t, b, residual, dev);
        residual = vision_tensors_(t, b).residual3;
    }
    vision_norm_(t, a.norm, s.norm_mean, s.norm_rstd, residual, VISION_FIELD(merger_norm), VISION_FIELD(merger_norm_b),
                 0, dev);
    vision_linear_(t, a.merger_fc1, a.norm, VISION_FIELD(merger_fc1), VISION_FIELD(merger_fc1_b), 0, N, dev);
    gelu_erf_forward(a.merger_gelu, a.merger_fc1, (size_t)t->P * (size_t)c->C, dev);
    vision_linear_(t, a.out, a.merger_gelu, VISION_FIELD(merger_fc2), VISION_FIELD(merger_fc2_b), 0, N, dev);
    return a.out;
}

// dout (tokens, D)
static inline void vision_tower_backward(VisionTower* t, const floatX* dout, const Device* dev) {
    const VisionConfig* c = &t->c;
    const int N = t->P / vision_block(c);
    const size_t n = (size_t)t->P * (size_t)c->C;
    const VisionTensors a = vision_tensors_(t, 0);
    const VisionStatistics s = vision_statistics_(t, 0);
    vision_linear_backward_(t, a.dmerger, dout, a.merger_gelu, VISION_FIELD(merger_fc2), VISION_FIELD(merger_fc2_b), 0,
                            N, dev);
    gelu_erf_backward(a.dmerger, a.merger_fc1, a.dmerger, n, dev);
    vision_linear_backward_(t, a.dbranch, a.dmerger, a.norm, VISION_FIELD(merger_fc1), VISION_FIELD(merger_fc1_b), 0, N,
                            dev);
    device_zero(a.dresidual, sizeof(floatX) * n, dev);
    layernorm_backward(a.dresidual, vision_gradient_(t, VISION_FIELD(merger_norm), 0),
                       vision_gradient_(t, VISION_FIELD(merger_norm_b), 0), a.dbranch,
                       vision_tensors_(t, c->depth - 1).residual3, vision_vector_(t, VISION_FIELD(merger_norm), 0),
                       s.norm_mean, s.norm_rstd, t->P, c->C, dev);
    for (int b = c->depth - 1; b >= t->lowest; b--) {
        vision_block_backward_(t, b, b > 0 ? vision_tensors_(t, b - 1).residual3 : a.encoded, dev);
    }
    if (t->lowest > 0) { return; }
    grid_embedding_backward(vision_gradient_(t, VISION_FIELD(position), 0), a.dresidual, t->rows, t->entry, s.weights,
                            c->positions, c->C, dev);
    linear_backward_weight(a.dresidual, a.pixels, model_linear(t->m, VISION_FIELD(patch), VISION_FIELD(patch_b), 0),
                           model_linear_gradients(t->m, VISION_FIELD(patch), VISION_FIELD(patch_b), 0), t->P, dev);
}

// of a batch without images
static inline void vision_tower_nothing(VisionTower* t, const Device* dev) {
    for (int i = 0; i < t->m->n_table; i++) {
        const Tensor* row = &t->m->table[i];
        if (!vision_is_row_(t, row)) { continue; }
        for (int l = 0; l < (row->layers > 0 ? t->c.depth : 1); l++) {
            float* d = model_vector_gradient(t->m, row->field, row->layers > 0 ? t->first + l : 0);
            if (d) { device_zero(d, sizeof(float) * tensor_slice_elements(row), dev); }
        }
    }
    for (int b = t->c.depth - 1; b >= 0; b--) { model_layer_done(t->m, t->first + b, dev); }
}

// of products and attention over images of so many patches on average
static inline double vision_tower_flops(const VisionTower* t, double patches) {
    const VisionConfig* c = &t->c;
    const size_t merger = t->at + offsetof(VisionParameters, merger_norm);
    const int passes = vision_tower_learns(t) ? 3 : 1;
    double n = 4.0 * patches * c->C * c->depth;
    for (int i = 0; i < t->m->n_table; i++) {
        const Tensor* row = &t->m->table[i];
        const int is_product = vision_is_row_(t, row) && row->on_disk != VECTOR &&
                               row->field != t->at + offsetof(VisionParameters, position);
        const double of_patch = row->field >= merger ? 1.0 / vision_block(c) : 1.0;
        if (is_product) { n += 2.0 * of_patch * (double)tensor_slices(row) * (double)tensor_slice_elements(row); }
    }
    return passes * n;
}
#undef VISION_FIELD
#endif  // LLMC_VISION_TOWER_H
