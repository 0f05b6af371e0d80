/*
The tensor table: everything anyone asks about a parameter or an activation stands on its line. Allocation, start
values, weight decay, checkpoints, gradients, ranks and tests loop over the table; no code says "tensor number 6".
    tensor, activation, input_activation   a line of the table. What only some tensors have is said by a function below
                           the line:
    tensor_in_layers       it exists in every so many layers only; tensor_in_kinds: in layers of these kinds, of which
                           there are so many: tensor_kinds; kind_activation: a line of activations that does
    tensor_under           what its name begins with, such as "model.layers.%d."
    tensor_named_from      the numbers in its names begin at a later layer, as those of a second stack do
    tensor_again           the same tensor in one more layer behind all others, whose names begin otherwise
    tensor_experts         E matrices in each layer, as one tensor of the file or each as its own; tensor_hold_experts:
                           some of them, as a rank of expert parallelism has them
    tensor_hold_layers     some of its layers are in memory, as a rank of pipeline parallelism has them;
                           tensor_hold_none: nothing of it
    tensor_dims            more dimensions on disk
    tensor_split           how ranks of tensor parallelism share it; tensor_cut_units: more of them than units are;
                           tensor_hold_part: the row of what one of them has;
                           tensor_part, tensor_take_rows, tensor_take_scales: this of a slice, however it is stored
    tensor_blocks          a linear layer in groups, whose blocks alone are stored
    tensor_stored          in which type releases have it
    tensor_whole_numbers   its elements are numbers below a bound, integers on disk: a table of choices, which never
                           learns
    tensor_counted         its numbers follow counts, such as how often a router has chosen: frozen ones may move
    tensor_adaptable       where adapters (LoRA) may be put beside it; tensor_closed: of a linear layer that takes none;
                           tensor_modules_under: what their names begin with
A *slice* is the matrix of a layer, of one of its experts, or a part of one that has a name of its own on disk. There
each is a tensor, but for experts that are one tensor together, in which slices of one name follow each other
(tensor_joined). A tensor of the table holds its slices one after the other, row-major: (layers that have it, experts,
rows, columns);
tensors start at multiples of 64 bytes. So slice and layer number are two things: tensor_slice, tensor_slice_layer.
Layers are numbered in the order of the forward pass, through all stacks of a model.
Slices that are not in memory are counted all the same, and have names: they have no place (tensor_is_held), and the
others move up.
Names   "h.%d.w" of layer 3 is "h.3.w"; a second %d is the expert. {gate,up} is for rows that lie together in memory and
        are two tensors, or more, of equal size on disk: "mlp.{gate,up}_proj.weight", gate's rows first.
The same table lays out every arena of the same shape: parameters, gradients, both moments.
Cost:   a row owns nothing; what is asked layer by layer is counted anew, for models have a hundred layers.
*/
#ifndef LLMC_TENSOR_H
#define LLMC_TENSOR_H
#include "rng.h"     // Mt19937, normal_fill
#include "stored.h"  // Stored, stored_matrix, stored_bytes, stored_cut
#include <assert.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

// NONE: the trainer's, left alone. CHOICES: in each row different whole numbers (tensor_whole_numbers)
typedef enum { INIT_ZEROS, INIT_ONES, INIT_NORMAL, INIT_UNIFORM, INIT_LOG_UNIFORM, INIT_CHOICES, INIT_NONE } Init;
typedef enum { NO_DECAY, DECAY } Decay;
// TRANSPOSED: (columns, rows), as GPT-2's Conv1D; VECTOR: (columns); CONV: (rows, 1, columns), a convolution of each
// channel by itself
typedef enum { AS_IS, TRANSPOSED, VECTOR, CONV } OnDisk;
// one tensor (E, rows, columns) in each layer; E tensors, whose name has a second %d; one matrix (E rows, columns), the
// experts below each other; one matrix (rows, columns E), of which column c of expert e is number c E + e
typedef enum { FUSED, APART, STACKED, WOVEN } ExpertsOnDisk;
// How ranks of tensor parallelism share a matrix (out, in): each has all of it; some of its rows, and so some outputs;
// some of its columns, and so some inputs (linear.h gathers them, nothing is added); some rows of a vocabulary
typedef enum { SPLIT_NONE, SPLIT_ROWS, SPLIT_COLUMNS, SPLIT_VOCABULARY } Split;
enum { SECTIONS_MAX = NUMBERS_CUTS + 1, DISK_DIMS_MAX = 6 };
#define INIT_LOG_LEAST 0.01f

#define TENSOR_NO_FIELD SIZE_MAX  // the field of a row to which no struct points, such as an adapter's

typedef struct {
    const char* name;    // on disk; %d stands for the layer, a second one for the expert
    const char* prefix;  // what stands before the name; NULL: nothing
    size_t field;        // offsetof the pointer in the struct that names the tensors
    int layers;          // of the model, as far as this tensor may exist; 0: it belongs to no layer
    int rows, columns;   // of one matrix; a vector has 1 row
    int disk_rows;       // rows that a file holds; the padding up to `rows` is zero and stays zero
    Init init;
    float std;           // of INIT_NORMAL; of INIT_UNIFORM the bound: from -std to std; INIT_LOG_UNIFORM: the logarithm
                         // of a number between INIT_LOG_LEAST and std
    Decay decay;
    OnDisk on_disk;
    int frozen;          // all of its slices are (freeze_slices of layers.h)
    int is_cache;        // of activations: what generation keeps of each position (activations.h),
    int is_state;        // of each text
    int is_input;        // of activations: layers read it again in backward, as those that have layers (tensor_waits)
    size_t offset;       // first element in an arena; set by tensors_layout
    int first_layer, layer_step;     // tensor_in_layers
    const char *kinds, *of_kinds;    // tensor_in_kinds; NULL: all
    int named_from;                  // the layer whose name has number 0
    int is_before, is_behind;        // tensor_before, tensor_again
    int experts, first_expert;       // 0: none; the first of them has this number in names
    int all_experts;                 // of a layer on all ranks; 0: these are all (tensor_hold_experts)
    const char* held;                // of each layer, whether it is in memory (tensor_hold_layers); NULL: all are
    int is_elsewhere;                // nothing of it is in memory (tensor_hold_none)
    int is_copy;                     // another rank of its group has it, too, and counts it (tensor_hold_part)
    size_t number;                   // of the whole tensor's first element in the model
    ElementNumbers numbers;          // of its elements in the whole tensor; all 0: as they lie (tensor_numbers)
    ExpertsOnDisk experts_on_disk;
    int dims[DISK_DIMS_MAX];         // on disk in place of the columns, up to the first 0
    Split split;
    int units;                       // heads, groups: what a rank has whole, of each section's rows or of the columns
    int cuts_units;                  // tensor_cut_units: of fewer units than ranks each has a part of one
    int sections[SECTIONS_MAX];      // rows of which each rank has its share, as those of Q, K and V; 0: all are one,
                                     // or those of each name in {}
    int blocks;                      // groups of rows with columns of their own (tensor_blocks); 0: all have the same
    Stored stored;
    int block_rows, block_columns;   // as fp8, that share a scale: FP8_BLOCK, but of a part of a matrix (tensor_part)
    size_t stored_at, stored_bytes;  // first byte in an arena of stored parameters; of an element, 0 where two share a
                                     // byte: tensors_store
    int whole_below;                 // tensor_whole_numbers; 0: any numbers
    int is_counted;                  // tensor_counted
    const char *module, *parameter;  // tensor_adaptable; both NULL: it takes no adapter
    const char* modules_under;       // tensor_modules_under; NULL: what the name begins with
    int called_as_experts;           // tensor_called_as_experts
    const char* closed;              // tensor_closed; NULL: it is adaptable, or no linear layer
} Tensor;

static inline Tensor tensor(const char* name, size_t field, int layers, int rows, int columns, Init init, float std,
                            Decay decay, OnDisk on_disk) {
    Tensor t;
    memset(&t, 0, sizeof t);
    t.name = name;
    t.field = field;
    t.layers = layers;
    t.rows = t.disk_rows = rows;
    t.columns = columns;
    t.init = init;
    t.std = std;
    t.decay = decay;
    t.on_disk = on_disk;
    t.layer_step = 1;
    t.block_rows = t.block_columns = FP8_BLOCK;
    return t;
}

// a row of an activation table: nothing is drawn, saved or decayed
static inline Tensor activation(const char* name, size_t field, int layers, int rows, int columns) {
    return tensor(name, field, layers, rows, columns, INIT_ZEROS, 0.0f, NO_DECAY, AS_IS);
}

// one that belongs to no layer, but which backward needs as forward has left it
static inline Tensor input_activation(const char* name, size_t field, int rows, int columns) {
    Tensor t = activation(name, field, 0, rows, columns);
    t.is_input = 1;
    return t;
}

// of activations: does it wait for backward while other micro-batches go by?
static inline int tensor_waits(const Tensor* t) { return t->layers > 0 || t->is_input; }

// ---- what is said of a row below its line ----

// only in the layers first, first + step, ...
static inline void tensor_in_layers(Tensor* t, int first, int step) {
    assert(first >= 0 && step > 0);
    t->first_layer = first;
    t->layer_step = step;
}

// Only in layers of a kind that is among of_kinds. kinds: a letter for each of the layers, "LLLFLLLF"; it must outlive
// the table. Rows of the same field may exist in different layers, such as a matrix that is smaller in some
static inline void tensor_in_kinds(Tensor* t, const char* kinds, const char* of_kinds) {
    assert((int)strlen(kinds) >= t->layers);
    t->kinds = kinds;
    t->of_kinds = of_kinds;
}

// a row of an activation table for layers of such kinds, or with `layers` 0 for all of them in turn; kinds NULL: all
// layers are of one
static inline Tensor kind_activation(const char* kinds, const char* of_kinds, const char* name, size_t field,
                                     int layers, int rows, int columns) {
    Tensor t = activation(name, field, layers, rows, columns);
    if (layers > 0 && kinds) { tensor_in_kinds(&t, kinds, of_kinds); }
    return t;
}

// layers of a kind among first .. end - 1
static inline int tensor_kinds(const char* kinds, int first, int end, char kind) {
    int n = 0;
    for (int l = first; l < end; l++) { n += kinds[l] == kind; }
    return n;
}

static inline void tensor_under(Tensor* t, const char* prefix) { t->prefix = prefix; }

// of a stack whose output goes into layer 0, though it stands behind in the table: a tower that reads images
static inline void tensor_before(Tensor* t) { t->is_before = 1; }

// the name of layer l has the number l - layer
static inline void tensor_named_from(Tensor* t, int layer) { t->named_from = layer; }

// does it belong to the model itself, not to a stack beside it, whose names count its layers anew?
static inline int tensor_is_of_model(const Tensor* t) { return t->named_from == 0 && !t->is_before; }

// the row for a layer behind all others, number 0 of a stack of its own, such as the block that predicts the token
// after next
static inline Tensor tensor_again(const Tensor* t, int layer, const char* prefix) {
    Tensor again = *t;
    again.layers = layer + 1;
    again.is_behind = 1;
    again.kinds = again.of_kinds = NULL;
    tensor_in_layers(&again, layer, 1);
    tensor_named_from(&again, layer);
    tensor_under(&again, prefix);
    return again;
}

// E matrices of this size in each layer. The file has each by itself, under a name with a second %d and perhaps several
// {names}, or all in one tensor. In memory both are the same; tensor_is_in of tensorfile.h asks what a file has
static inline void tensor_experts(Tensor* t, int E, ExpertsOnDisk on_disk) {
    assert(E > 0);
    t->experts = E;
    t->experts_on_disk = on_disk;
}

// of the E experts only n from number `first` on: the row of a table for what lies in memory
static inline void tensor_hold_experts(Tensor* t, int first, int n) {
    assert(first >= 0 && n > 0 && first + n <= t->experts);
    const size_t matrix = (size_t)t->rows * (size_t)t->columns;
    t->numbers = numbers_by(matrix * (size_t)first, matrix * (size_t)n, matrix * (size_t)t->experts);
    t->all_experts = t->experts;
    t->first_expert += first;
    t->experts = n;
}

#define LAYER_HELD '+'

// Of its layers only those whose letter in `held` is LAYER_HELD are in memory; it must outlive the table
static inline void tensor_hold_layers(Tensor* t, const char* held) {
    assert((int)strlen(held) >= t->layers);
    t->held = held;
}

// of what belongs to no layer: another rank has it
static inline void tensor_hold_none(Tensor* t) { t->is_elsewhere = 1; }

// dimensions on disk in place of the columns, such as channels, frames, height and width of a patch; the last may be 0
static inline void tensor_dims(Tensor* t, int a, int b, int c, int d) {
    const int dims[DISK_DIMS_MAX] = {a, b, c, d};
    memcpy(t->dims, dims, sizeof dims);
}

// is it a factor of products, neither a vector nor the taps of a convolution nor a table of choices?
static inline int tensor_is_matrix(const Tensor* t) {
    return t->on_disk != VECTOR && t->on_disk != CONV && t->whole_below == 0;
}

// rows of its output: a vector has one for each element
static inline int tensor_outputs(const Tensor* t) { return t->on_disk == VECTOR ? t->columns : t->rows; }

// units: 0 where the ranks may cut between any two rows or columns. The rows of a vector are its elements
static inline void tensor_split(Tensor* t, Split split, int units) {
    t->split = split;
    t->units = units;
}

// where there are more ranks than units, as heads of keys, neighbours share one: each has some of its rows
static inline void tensor_cut_units(Tensor* t) {
    assert(t->split == SPLIT_ROWS && t->units > 0 && t->sections[0] == 0);
    t->cuts_units = 1;
}

// rows of each section; c and d may be 0
static inline void tensor_sections(Tensor* t, int a, int b, int c, int d) {
    const int sections[SECTIONS_MAX] = {a, b, c, d};
    assert(a + b + c + d == tensor_outputs(t));
    memcpy(t->sections, sections, sizeof sections);
}

// G groups of rows with inputs of their own: the columns are those of one group (block_matmul.h)
static inline void tensor_blocks(Tensor* t, int G) {
    assert(G > 0 && t->rows % G == 0);
    t->blocks = G;
}

static inline void tensor_stored(Tensor* t, Stored stored) { t->stored = stored; }

// 0 .. below - 1, floats in memory whatever the build
static inline void tensor_whole_numbers(Tensor* t, int below) {
    assert(below > 0 && below <= 1 << 24);
    t->whole_below = below;
    tensor_stored(t, STORED_F32);
}

// of what moves in an update without a gradient, as biases of routers do
static inline void tensor_counted(Tensor* t) { t->is_counted = 1; }

// The weight of a linear layer, beside which adapters may learn, under the names that PEFT has for it, without the
// prefix: of the module, as "self_attn.q_proj"; of what is no module there but a parameter, as "mlp.gate.weight". A
// part in {} of a module is a place of its own. Experts that are one parameter may be modules in older files, with a
// second %d in their name
static inline void tensor_adaptable(Tensor* t, const char* module, const char* parameter) {
    assert(t->layers > 0 && t->on_disk == AS_IS && (module || parameter));
    t->module = module;
    t->parameter = parameter;
}

// beside experts, as the shared one: PEFT takes its module for one of theirs, and does not load its adapter
static inline void tensor_called_as_experts(Tensor* t) {
    assert(t->module);
    t->called_as_experts = 1;
}

// A linear layer that takes no adapter here, under PEFT's name for it, which puts one there if it is asked for
static inline void tensor_closed(Tensor* t, const char* module) {
    assert(t->layers > 0 && !t->module && !t->parameter);
    t->closed = module;
}

// of files whose names are not those of the modules
static inline void tensor_modules_under(Tensor* t, const char* prefix) { t->modules_under = prefix; }

// ---- slices and layers ----

// is layer l of a kind that has it? A plan asks this of every slice of a model of hundreds of experts
static inline int tensor_in_kind_(const Tensor* t, int l) {
    const char* kind = t->of_kinds;
    while (*kind != '\0' && *kind != t->kinds[l]) { kind++; }
    return *kind != '\0';
}

// of a tensor that belongs to no layer: is it there? Always
static inline int tensor_has_layer(const Tensor* t, int layer) {
    if (t->layers == 0) { return 1; }
    if (layer < t->first_layer || layer >= t->layers || (layer - t->first_layer) % t->layer_step != 0) { return 0; }
    return !t->kinds || tensor_in_kind_(t, layer);
}

// how many of the layers below `end` have it
static inline int tensor_layers_below(const Tensor* t, int end) {
    const int stop = end < t->layers ? end : t->layers;
    int n = 0;
    if (!t->kinds) { return stop > t->first_layer ? (stop - t->first_layer - 1) / t->layer_step + 1 : 0; }
    for (int l = t->first_layer; l < stop; l += t->layer_step) { n += tensor_in_kind_(t, l); }
    return n;
}

// how many tensors of the file a matrix is: 1, or as many as there are names in {}
static inline int tensor_names(const Tensor* t) {
    int n = 1;
    const char* brace = t->name ? strchr(t->name, '{') : NULL;
    for (const char* c = brace; c && *c && *c != '}'; c++) { n += *c == ','; }
    return n;
}

// does each expert have slices of its own?
static inline int tensor_experts_are_slices(const Tensor* t) {
    return t->experts > 0 && (t->experts_on_disk == APART || t->experts_on_disk == FUSED);
}

// so many slices, one after the other, are one tensor on disk
static inline int tensor_joined(const Tensor* t) {
    return t->experts > 0 && t->experts_on_disk == FUSED ? t->experts : 1;
}

// of one layer, or of a tensor that belongs to none
static inline int tensor_layer_slices(const Tensor* t) {
    return tensor_names(t) * (tensor_experts_are_slices(t) ? t->experts : 1);
}

static inline int tensor_slices(const Tensor* t) {
    return tensor_layer_slices(t) * (t->layers > 0 ? tensor_layers_below(t, t->layers) : 1);
}

// of the first n tensors of a table; so table[n] begins with this slice of all
static inline int tensors_slices(const Tensor* table, int n) {
    int n_slices = 0;
    for (int i = 0; i < n; i++) { n_slices += tensor_slices(&table[i]); }
    return n_slices;
}

// frozen: of every slice of a table, in order, whether it stays as it is; NULL: none does
static inline int slice_is_frozen(const int* frozen, int slice) { return frozen && frozen[slice]; }

// does any of n slices learn?
static inline int slices_learn(const int* frozen, int first, int n) {
    for (int k = first; k < first + n; k++) {
        if (!slice_is_frozen(frozen, k)) { return 1; }
    }
    return 0;
}

// the first slice of a layer, -1 where that has none; of a tensor that belongs to no layer: 0
static inline int tensor_slice(const Tensor* t, int layer) {
    if (t->layers == 0) { return 0; }
    return tensor_has_layer(t, layer) ? tensor_layer_slices(t) * tensor_layers_below(t, layer) : -1;
}

// the layer of a slice; -1: of none
static inline int tensor_slice_layer(const Tensor* t, int slice) {
    int left = slice / tensor_layer_slices(t), l = t->first_layer;
    if (t->layers == 0) { return -1; }
    if (!t->kinds) { l += left * t->layer_step; }
    else { while (l < t->layers && (!tensor_in_kind_(t, l) || left-- > 0)) { l += t->layer_step; } }
    if (l < t->layers) { return l; }
    assert(0);  // it has no such slice
    return -1;
}

// ---- matrices that Muon updates (ops/muon.h): what has a name of its own, of a layer in groups a group's ----

static inline int tensor_muon_rows(const Tensor* t) {
    return t->rows / tensor_names(t) / (t->blocks > 0 ? t->blocks : 1);
}

// The weight of a linear layer, or of experts; not embeddings and heads, which belong to no layer, and no vector
static inline int tensor_takes_muon(const Tensor* t) {
    const int is_weight = t->layers > 0 && tensor_is_matrix(t) && t->decay == DECAY && t->split != SPLIT_VOCABULARY;
    return is_weight && tensor_muon_rows(t) > 1 && t->columns > 1;
}

// of one matrix: the way from an expert to the next
static inline size_t tensor_matrix_elements(const Tensor* t) { return (size_t)t->rows * (size_t)t->columns; }

static inline size_t tensor_layer_elements(const Tensor* t) {
    return tensor_matrix_elements(t) * (size_t)(t->experts > 0 ? t->experts : 1);
}

static inline size_t tensor_slice_elements(const Tensor* t) {
    return tensor_layer_elements(t) / (size_t)tensor_layer_slices(t);
}

static inline size_t tensor_elements(const Tensor* t) { return tensor_slice_elements(t) * (size_t)tensor_slices(t); }

// ---- what of it is in memory ----

// the slices of layer l? Of what belongs to no layer: it
static inline int tensor_is_held(const Tensor* t, int layer) {
    return !t->is_elsewhere && (t->layers == 0 || !t->held || t->held[layer] == LAYER_HELD);
}

// how many slices before number `slice` are in memory; tensor_slices: of them all
static inline int tensor_held_before_(const Tensor* t, int slice) {
    const int each = tensor_layer_slices(t);
    int n = 0, left = slice / each;  // layers that have it
    if (t->is_elsewhere) { return 0; }
    if (t->layers == 0 || !t->held) { return slice; }
    for (int l = t->first_layer; l < t->layers && left > 0; l += t->layer_step) {
        if (!tensor_has_layer(t, l)) { continue; }
        n += tensor_is_held(t, l);
        left--;
    }
    return n * each + slice % each;
}

// those that are in memory
static inline int tensor_held_slices(const Tensor* t) { return tensor_held_before_(t, tensor_slices(t)); }
static inline size_t tensor_held_elements(const Tensor* t) {
    return tensor_slice_elements(t) * (size_t)tensor_held_slices(t);
}

// elements of one slice that a file holds
static inline size_t tensor_disk_elements(const Tensor* t) {
    return t->disk_rows == t->rows ? tensor_slice_elements(t) : (size_t)t->disk_rows * (size_t)t->columns;
}

// what a row may not ask for
static inline void tensor_check_(const Tensor* t) {
    const int names = tensor_names(t);
    assert(t->rows % names == 0);
    assert(t->disk_rows == t->rows || (names == 1 && t->experts == 0));
    assert(names == 1 || t->experts == 0 || t->experts_on_disk == APART);
    assert(t->experts == 0 || t->on_disk == AS_IS || tensor_experts_are_slices(t));
    assert(t->on_disk != VECTOR || t->rows == names);
    (void)names, (void)t;
}

// ---- fp8: blocks of 128 x 128 of what has a name on disk. A row of blocks is a *band* ----

// rows of a matrix whose blocks begin anew: those that have a name of their own, as gate's and up's have
static inline int tensor_part_rows(const Tensor* t) { return t->rows / tensor_names(t); }

// bands of a whole slice, which is one part: experts that are no slices are adapters, and these are never fp8
static inline int tensor_bands(const Tensor* t) {
    assert(tensor_slice_elements(t) == (size_t)tensor_part_rows(t) * (size_t)t->columns);
    return fp8_blocks(tensor_part_rows(t));
}

// the first row of a band of a slice, and how many it has
static inline size_t tensor_band(const Tensor* t, int band, int* n_rows) {
    const int first = band * FP8_BLOCK, left = tensor_part_rows(t) - first;
    *n_rows = left < FP8_BLOCK ? left : FP8_BLOCK;
    return (size_t)first;
}

// scales of a slice as fp8
static inline size_t tensor_scales(const Tensor* t) {
    return (size_t)stored_blocks(tensor_part_rows(t), t->block_rows) *
           (size_t)stored_blocks(t->columns, t->block_columns);
}

// the same in bytes, as fp8 or fp4 has them; of anything else none
static inline size_t tensor_scale_bytes(const Tensor* t, Stored kind) {
    if (kind == STORED_FP4) { return stored_exponents(tensor_part_rows(t), t->columns); }
    return kind == STORED_FP8 ? sizeof(float) * tensor_scales(t) : 0;
}
static inline int tensor_has_scales(const Tensor* t) { return t->stored == STORED_FP8 || t->stored == STORED_FP4; }

// bytes of n elements as they are stored
static inline size_t tensor_stored_size(const Tensor* t, size_t n) {
    return t->stored == STORED_FP4 ? stored_bytes(STORED_FP4, n) : t->stored_bytes * n;
}

// the byte with which the scales of a slice begin in an arena of stored elements: behind the elements of all slices
static inline size_t tensor_scales_place(const Tensor* t, int slice) {
    return t->stored_at + (tensor_stored_size(t, tensor_held_elements(t)) + 63) / 64 * 64 +
           tensor_scale_bytes(t, t->stored) * (size_t)tensor_held_before_(t, slice);
}

// Fill in where the tensors lie as they are stored, one after the other like those of tensors_layout; the arena's size
// in bytes comes back. build_bytes: of an element of floatX
static inline size_t tensors_store(Tensor* table, int n, size_t build_bytes) {
    size_t at = 0;
    for (int i = 0; i < n; i++) {
        Tensor* t = &table[i];
        t->stored_bytes = t->stored == STORED_F32 ? 4 : t->stored == STORED_BF16 ? 2 : build_bytes;
        t->stored_bytes = t->stored == STORED_FP8 ? 1 : t->stored == STORED_FP4 ? 0 : t->stored_bytes;
        t->stored_at = at;
        at += tensor_stored_size(t, (tensor_held_elements(t) + 15) / 16 * 16);
        if (tensor_has_scales(t)) { at = (tensor_scales_place(t, tensor_slices(t)) + 63) / 64 * 64; }
    }
    return at;
}

// the numbers of an element and those behind it in the whole model, whoever holds them, as the noise with which bf16 is
// rounded goes by them
static inline ElementNumbers tensor_numbers(const Tensor* t, size_t element) {
    ElementNumbers x = t->numbers;
    x.first += t->number;
    x.begin = element;
    return x;
}

// fill in the offsets; the arena's size in elements comes back
static inline size_t tensors_layout(Tensor* table, int n) {
    size_t offset = 0;
    for (int i = 0; i < n; i++) {
        tensor_check_(&table[i]);
        table[i].offset = table[i].number = offset;
        table[i].stored_bytes = sizeof(float);  // until tensors_store says otherwise
        table[i].stored_at = sizeof(float) * offset;
        offset += (tensor_elements(&table[i]) + 15) / 16 * 16;
    }
    return offset;
}

// elements of all tensors, without the gaps between them
static inline size_t tensors_count(const Tensor* table, int n) {
    size_t count = 0;
    for (int i = 0; i < n; i++) { count += tensor_elements(&table[i]); }
    return count;
}

// elements that files hold: without what pads a vocabulary
static inline size_t tensors_disk_count(const Tensor* table, int n) {
    size_t count = 0;
    for (int i = 0; i < n; i++) {
        if (table[i].whole_below > 0) { continue; }  // no parameters
        count += tensor_disk_elements(&table[i]) * (size_t)tensor_slices(&table[i]);
    }
    return count;
}

// layers of the model
static inline int tensors_layers(const Tensor* table, int n) {
    int layers = 0;
    for (int i = 0; i < n; i++) { layers = table[i].layers > layers ? table[i].layers : layers; }
    return layers;
}

// without those of stacks before layer 0 (tensor_before); with_behind 0: nor what stands behind all (tensor_again)
static inline int tensors_layers_between(const Tensor* table, int n, int with_behind) {
    int layers = 0;
    for (int i = 0; i < n; i++) {
        const int counts = !table[i].is_before && (with_behind || !table[i].is_behind);
        layers = counts && table[i].layers > layers ? table[i].layers : layers;
    }
    return layers;
}

static inline void tensor_set_field_(void* pointers, const Tensor* t, const void* first) {
    if (t->field == TENSOR_NO_FIELD) { return; }
    memcpy((char*)pointers + t->field, &first, sizeof first);
}

// the byte with which this element begins in an arena of stored elements; its slice is in memory
static inline size_t tensor_stored_place(const Tensor* t, size_t element) {
    const size_t n = tensor_slice_elements(t);
    if (!t->held || n == 0) { return t->stored_at + tensor_stored_size(t, element); }
    const size_t before = (size_t)tensor_held_before_(t, (int)(element / n));
    return t->stored_at + tensor_stored_size(t, before * n + element % n);
}

// Let the fields of `pointers` point into an arena of stored elements: at layer `layer` of those tensors that have
// layers, and there at the first of its experts; NULL where the layer lacks the tensor or is not in memory. A field
// whose tensor this model's table lacks keeps what it holds: NULL, where the trainer has put it
static inline void tensors_point(void* pointers, const Tensor* table, int n, void* arena, int layer) {
    for (int i = 0; i < n; i++) { tensor_set_field_(pointers, &table[i], NULL); }
    for (int i = 0; i < n; i++) {
        const Tensor* t = &table[i];
        const int slice = tensor_slice(t, layer);
        if (slice < 0 || !tensor_is_held(t, layer)) { continue; }  // another row of this field may have the layer
        const size_t element = (size_t)slice * tensor_slice_elements(t);
        tensor_set_field_(pointers, t, (char*)arena + tensor_stored_place(t, element));
    }
}

// ---- names ----

// n characters of `text` behind what is in the buffer
static inline void tensor_name_add_(char* buffer, size_t n_bytes, const char* text, int n) {
    const size_t used = strlen(buffer);
    snprintf(buffer + used, n_bytes - used, "%.*s", n, text);
}

// the k-th name in {}, of which `text` is the first character
static inline void tensor_name_choose_(char* buffer, size_t n_bytes, const char* text, int k) {
    for (; k > 0; k--) { text = strchr(text, ',') + 1; }
    tensor_name_add_(buffer, n_bytes, text, (int)strcspn(text, ",}"));
}

// `text` with its marks replaced: by the next of the numbers, and by the name of number `choice`
static inline void tensor_name_expand_(char* buffer, size_t n_bytes, const char* text, const int** number, int choice) {
    while (*text) {
        char digits[16];
        if (*text == '{') {
            tensor_name_choose_(buffer, n_bytes, text + 1, choice);
            text = strchr(text, '}') + 1;
        } else if (text[0] == '%' && text[1] == 'd') {
            tensor_name_add_(buffer, n_bytes, digits, snprintf(digits, sizeof digits, "%d", *(*number)++));
            text += 2;
        } else {
            const int n = 1 + (int)strcspn(text + 1, "%{");
            tensor_name_add_(buffer, n_bytes, text, n);
            text += n;
        }
    }
}

// the name of one slice: "transformer.h.%d.ln_1.weight" of layer 3 is "transformer.h.3.ln_1.weight"
static inline const char* tensor_slice_name(char* buffer, size_t n_bytes, const Tensor* t, int slice) {
    const int names = tensor_names(t), expert = tensor_experts_are_slices(t) ? slice / names % t->experts : 0;
    const int layer = tensor_slice_layer(t, slice) - t->named_from;
    const int numbers[2] = {layer, t->first_expert + expert}, *number = numbers;
    assert(n_bytes > 0);
    *buffer = '\0';
    tensor_name_expand_(buffer, n_bytes, t->prefix ? t->prefix : "", &number, 0);
    tensor_name_expand_(buffer, n_bytes, t->name, &number, slice % names);
    return buffer;
}

// the name as the table has it, for all of its slices
static inline const char* tensor_name(char* buffer, size_t n_bytes, const Tensor* t) {
    snprintf(buffer, n_bytes, "%s%s", t->prefix ? t->prefix : "", t->name);
    return buffer;
}

// that name with one choice in {}: of the slices k for which k modulo tensor_names is `choice`
static inline const char* tensor_name_of(char* buffer, size_t n_bytes, const Tensor* t, int choice) {
    const size_t n_before = strcspn(t->name, "{");
    snprintf(buffer, n_bytes, "%s%.*s", t->prefix ? t->prefix : "", (int)n_before, t->name);
    if (!t->name[n_before]) { return buffer; }
    tensor_name_choose_(buffer, n_bytes, t->name + n_before + 1, choice);
    const char* rest = strchr(t->name, '}') + 1;
    tensor_name_add_(buffer, n_bytes, rest, (int)strlen(rest));
    return buffer;
}

// ---- shares of ranks, and what is stored ----

// of so many ranks does each have whole units, or, where these may be cut, a part of one? Without units it may
static inline int tensor_units_divide(const Tensor* t, int size) {
    return t->units == 0 || t->units % size == 0 || (t->cuts_units && size % t->units == 0);
}

// of `size` ranks, one has elements first .. first + n - 1 of an axis of `length`. 0: it cannot be shared so
static inline int tensor_share_(const Tensor* t, int length, int rank, int size, int* first, int* n) {
    const int units = t->units > 0 ? t->units : length;
    if (length % units != 0 || length % size != 0 || !tensor_units_divide(t, size)) { return 0; }
    *n = length / size;
    *first = rank * *n;
    return 1;
}

// rows of a section, counted from 0; 0: there is none such
static inline int tensor_section(const Tensor* t, int section) {
    const int names = tensor_names(t);
    if (t->sections[0] > 0) { return section < SECTIONS_MAX ? t->sections[section] : 0; }
    return section >= names ? 0 : t->on_disk == VECTOR ? t->columns : t->rows / names;
}

static inline int tensor_sections_count(const Tensor* t) {
    int n = 0;
    while (tensor_section(t, n) > 0) { n++; }
    return n;
}

// Rank `rank` of `size` has rows, or with SPLIT_COLUMNS columns, first .. first + n - 1 of a matrix, from each of its
// sections: `section` counts from 0. Returns 0 where it cannot be shared so, and for a section that there is not
static inline int tensor_share(const Tensor* t, int section, int rank, int size, int* first, int* n) {
    const int length = tensor_section(t, section);
    int begin = 0;
    for (int k = 0; k < section; k++) { begin += tensor_section(t, k); }
    if (t->split == SPLIT_COLUMNS) { return section == 0 && tensor_share_(t, t->columns, rank, size, first, n); }
    if (length == 0) { return 0; }
    *first = 0, *n = length;
    if (t->split != SPLIT_NONE && !tensor_share_(t, length, rank, size, first, n)) { return 0; }
    *first += begin;
    return 1;
}

// the numbers of its rows, n in all; from section to section those of other ranks come between
static inline ElementNumbers tensor_part_numbers_(const Tensor* t, int rank, int size, int n) {
    const size_t C = t->on_disk == VECTOR ? 1 : (size_t)t->columns;
    int first = 0, each = 0, sum = 0, skipped = 0;
    tensor_share(t, 0, rank, size, &first, &each);
    ElementNumbers x = numbers_by((size_t)first * C, (size_t)n * C, (size_t)tensor_outputs(t) * C);
    for (int k = 0, begin = first; tensor_share(t, k, rank, size, &first, &each); k++, sum += each) {
        const int gap = first - begin - sum;
        if (k > 0) { x.cut[k - 1] = (size_t)sum * C, x.jump[k - 1] = (size_t)(gap - skipped) * C; }
        skipped = gap;
    }
    return x;
}

// rows and columns of a slice; the rows of a vector are its elements
typedef struct { int row, n_rows, column, n_columns; } TensorWindow;

// What a rank has of a slice, one window after the other; as fp8 in these blocks
typedef struct {
    int n;
    TensorWindow of[SECTIONS_MAX];
    int block_rows, block_columns;
} TensorPart;

// Of fp8: blocks that lie in blocks of the whole, as large on all ranks, and that a turned part has, too (linear.h):
// its columns of all rows, or the other way
static inline void tensor_cut_blocks_(TensorPart* part, const Tensor* t, int size) {
    const int is_columns = t->split == SPLIT_COLUMNS;
    for (int k = 0; k < part->n && !is_columns; k++) {
        part->block_rows = stored_cut(part->block_rows, part->of[k].n_rows);
    }
    if (is_columns) { part->block_rows = stored_cut(stored_cut(FP8_BLOCK, t->rows / size), tensor_part_rows(t)); }
    if (t->split != SPLIT_VOCABULARY && !t->blocks) { part->block_columns = stored_cut(FP8_BLOCK, t->columns / size); }
}

// rank `rank` of `size`, which can share it
static inline TensorPart tensor_part(const Tensor* t, int rank, int size) {
    const int is_vector = t->on_disk == VECTOR, C = is_vector ? 1 : t->columns;
    const int rows = (int)(tensor_slice_elements(t) / (size_t)C), is_columns = t->split == SPLIT_COLUMNS;
    TensorPart part = {1, {{0, rows, 0, C}}, FP8_BLOCK, FP8_BLOCK};
    if (t->split == SPLIT_NONE || size == 1) { return part; }
    part.n = is_columns || tensor_names(t) > 1 ? 1 : tensor_sections_count(t);
    for (int k = 0; k < part.n; k++) {
        int first = 0, n = 0;
        tensor_share(t, k, rank, size, &first, &n);
        const TensorWindow columns = {0, rows, first, n}, some_rows = {first, n, 0, C};
        part.of[k] = is_columns ? columns : some_rows;
    }
    tensor_cut_blocks_(&part, t, size);
    return part;
}

// Of every slice the part of rank `rank` of `size`: the row of a table for what lies in memory, no longer for files
static inline void tensor_hold_part(Tensor* t, int rank, int size) {
    int first = 0, n = 0, sum = 0;
    t->is_copy = t->split == SPLIT_NONE && rank > 0;
    if (t->split == SPLIT_NONE) { return; }
    for (int k = 0; tensor_share(t, k, rank, size, &first, &n); k++) { sum += n; }
    assert(sum > 0 && t->experts == 0);
    const TensorPart part = tensor_part(t, rank, size);
    t->block_rows = part.block_rows, t->block_columns = part.block_columns;
    t->numbers = t->split == SPLIT_COLUMNS ? numbers_by((size_t)first, (size_t)n, (size_t)t->columns)
                                           : tensor_part_numbers_(t, rank, size, sum);
    if (t->split == SPLIT_COLUMNS || t->on_disk == VECTOR) { t->columns = sum; } else { t->rows = t->disk_rows = sum; }
    for (int k = 0; k < SECTIONS_MAX; k++) { t->sections[k] /= size; }
    t->blocks /= size;
}

// has a part some of the rows first .. first + n?
static inline int tensor_part_meets(const TensorPart* part, int first, int n) {
    int meets = 0;
    for (int k = 0; k < part->n; k++) {
        meets |= part->of[k].row < first + n && first < part->of[k].row + part->of[k].n_rows;
    }
    return meets;
}

// Of rows first .. first + n of a slice of C columns, which `rows` has, a part's own to their places in it or, with
// puts, back. So many columns each, as the two of fp4 in a byte, are n_bytes
static inline void tensor_move_rows_(char* own, char* rows, const TensorPart* part, int C, int each, size_t n_bytes,
                                     int first, int n, int puts) {
    const size_t row_bytes = n_bytes * (size_t)(C / each);
    for (int k = 0; k < part->n; k++) {
        const TensorWindow* w = &part->of[k];
        const size_t width = n_bytes * (size_t)(w->n_columns / each), at = n_bytes * (size_t)(w->column / each);
        const int begin = w->row > first ? w->row : first;
        for (int r = begin; r < w->row + w->n_rows && r < first + n; r++) {
            char *mine = own + width * (size_t)(r - w->row), *all = rows + row_bytes * (size_t)(r - first) + at;
            if (puts) { memcpy(all, mine, width); } else { memmove(mine, all, width); }
        }
        own += width * (size_t)w->n_rows;
    }
}

static inline void tensor_take_rows(void* own, const void* rows, const TensorPart* part, int C, int each,
                                    size_t n_bytes, int first, int n) {
    tensor_move_rows_((char*)own, (char*)rows, part, C, each, n_bytes, first, n, 0);
}

// the same of scales of fp8: `rows` has those of whole bands, of which the first begins with row `first`
static inline void tensor_take_scales(float* own, const float* rows, const TensorPart* part, int C, int first, int n) {
    for (int k = 0; k < part->n; k++) {
        const TensorWindow* w = &part->of[k];
        const int n_blocks = stored_blocks(w->n_columns, part->block_columns);
        const int begin = w->row > first ? w->row : first;
        for (int r = begin; r < w->row + w->n_rows && r < first + n; r += part->block_rows) {
            float* mine = own + (size_t)((r - w->row) / part->block_rows) * (size_t)n_blocks;
            const float* all = rows + (size_t)((r - first) / FP8_BLOCK) * (size_t)fp8_blocks(C);
            for (int b = 0; b < n_blocks; b++) { mine[b] = all[(w->column + b * part->block_columns) / FP8_BLOCK]; }
        }
        own += (size_t)stored_blocks(w->n_rows, part->block_rows) * (size_t)n_blocks;
    }
}

// of the slices of t, a row of the whole table: floats of a whole one, and of the part that rank `rank` of `size` has
static inline void tensor_move_part_(float* part, float* whole, const Tensor* t, int rank, int size, int puts) {
    const TensorPart of = tensor_part(t, rank, size);
    const int C = t->on_disk == VECTOR ? 1 : t->columns, rows = (int)(tensor_slice_elements(t) / (size_t)C);
    tensor_move_rows_((char*)part, (char*)whole, &of, C, 1, sizeof(float), 0, rows, puts);
}

// part may be where whole is
static inline void tensor_take_part(float* part, float* whole, const Tensor* t, int rank, int size) {
    tensor_move_part_(part, whole, t, rank, size, 0);
}
static inline void tensor_put_part(float* whole, float* part, const Tensor* t, int rank, int size) {
    tensor_move_part_(part, whole, t, rank, size, 1);
}

// a matrix of this row, without its elements
static inline StoredMatrix tensor_as_stored(const Tensor* t) {
    StoredMatrix m = stored_matrix(NULL, t->stored, t->rows, t->columns, tensor_part_rows(t), NULL);
    m.block_rows = t->block_rows, m.block_columns = t->block_columns;
    return m;
}

// bytes of one matrix as it is stored, with its scales; build_bytes: of an element of floatX
static inline size_t tensor_matrix_bytes(const Tensor* t, size_t build_bytes) {
    const StoredMatrix m = tensor_as_stored(t);
    return stored_size(&m, build_bytes);
}

// ---- where slices go as they are drawn or read, one after the other: into an arena, or to a device ----

typedef struct {
    float* (*room)(void* to, const Tensor* t, int k);  // for slice k of t: the arena's own, or zeros
    void (*done)(void* to, const Tensor* t, int k);    // slice k is there; NULL: nobody waits for it
    void* to;
    // Room for the slice as bf16, or for the part of it that `part` says, where it is stored so; NULL: it goes through
    // `room`. is_exact: its file has bf16 too, else the nearest are written. No function: nothing is
    uint16_t* (*halves)(void* to, const Tensor* t, int k, int is_exact);
    // A slice that is stored as fp8 may come as floats by bands, n from number `band` on: x is theirs, and done() comes
    // behind the last. takes_bands: 0: it goes through `room`. No functions: all slices do
    int (*takes_bands)(void* to, const Tensor* t, int k);
    void (*bands)(void* to, const Tensor* t, int k, int band, int n, const float* x);
    // does anybody here need slice k? One that nobody needs is not read. No function: all are needed
    int (*needs)(void* to, const Tensor* t, int k);
    // Room for the bytes and scales of a slice, or of that part, which its file has in fp8 or fp4, as `kind` says,
    // where it is stored so; NULL: it goes through `room`. No function: all do
    uint8_t* (*scaled)(void* to, const Tensor* t, int k, Stored kind, void** scales);
    // what of slice k goes where those two say. No function: all
    TensorPart (*part)(void* to, const Tensor* t, int k);
} SliceSink;

static inline float* slice_in_arena_(void* arena, const Tensor* t, int k) {
    return (float*)arena + t->offset + (size_t)k * tensor_slice_elements(t);
}

static inline SliceSink slice_sink(float* arena) {
    SliceSink sink = {slice_in_arena_, NULL, arena, NULL, NULL, NULL, NULL, NULL, NULL};
    return sink;
}

static inline TensorPart slice_sink_part(const SliceSink* sink, const Tensor* t, int k) {
    return sink->part ? sink->part(sink->to, t, k) : tensor_part(t, 0, 1);
}

static inline int slice_sink_needs(const SliceSink* sink, const Tensor* t, int k) {
    return !sink->needs || sink->needs(sink->to, t, k);
}

static inline void slice_sink_done(const SliceSink* sink, const Tensor* t, int k) {
    if (sink->done) { sink->done(sink->to, t, k); }
}

// rows of `columns` numbers below `below`, those of a row different as long as there are enough
static inline void choices_fill_(Mt19937* mt, float* x, size_t n, int columns, int below) {
    for (size_t i = 0; i < n; i++) {
        const size_t c = i % (size_t)columns;
        int is_there = 1;
        while (is_there) {
            x[i] = (float)(mt19937_u32(mt) % (uint32_t)below);
            is_there = 0;
            for (size_t k = i - c; k < i && c < (size_t)below; k++) { is_there |= x[k] == x[i]; }
        }
    }
}

// start values: layer by layer, in table order within a layer, so that the draws come as PyTorch makes the same
// network; a tensor without layers is drawn with layer 0. Each slice is a draw of its own
static inline void tensors_init_into(const SliceSink* sink, const Tensor* table, int n, uint32_t seed) {
    const int n_layers = tensors_layers(table, n) > 1 ? tensors_layers(table, n) : 1;
    Mt19937 mt;
    mt19937_init(&mt, seed);
    for (int l = 0; l < n_layers; l++) {
        for (int i = 0; i < n; i++) {
            const Tensor* t = &table[i];
            const size_t n_disk = tensor_disk_elements(t);
            const int first = t->layers == 0 && l > 0 ? -1 : tensor_slice(t, l);
            if (first < 0 || t->init == INIT_NONE) { continue; }
            for (int k = first; k < first + tensor_layer_slices(t); k++) {
                float* x = (float*)memset(sink->room(sink->to, t, k), 0, sizeof(float) * tensor_slice_elements(t));
                if (t->init == INIT_NORMAL) { normal_fill(&mt, x, n_disk, 0.0f, t->std); }
                if (t->init == INIT_UNIFORM) { uniform_fill(&mt, x, n_disk, -t->std, t->std); }
                if (t->init == INIT_LOG_UNIFORM) { uniform_fill(&mt, x, n_disk, INIT_LOG_LEAST, t->std); }
                for (size_t j = 0; t->init == INIT_LOG_UNIFORM && j < n_disk; j++) { x[j] = fm_log(x[j]); }
                for (size_t j = 0; t->init == INIT_ONES && j < n_disk; j++) { x[j] = 1.0f; }
                if (t->init == INIT_CHOICES) { choices_fill_(&mt, x, n_disk, t->columns, t->whole_below); }
                slice_sink_done(sink, t, k);
            }
        }
    }
}

static inline void tensors_init(const Tensor* table, int n, float* arena, uint32_t seed) {
    const SliceSink sink = slice_sink(arena);
    tensors_init_into(&sink, table, n, seed);
}
#endif  // LLMC_TENSOR_H
