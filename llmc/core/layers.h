/*
Which layers an option means, in items separated by commas. Layers count from 0, in the order of the forward pass.
    freeze_slices   --freeze: names of tensors as patterns, "backbone.layers.3.*", or of all layers at once,
                    "*.norm.weight"; first:N, the first N layers (more than there are: all); indices:A,B,..., these
                    layers, or none: those of the model, not of a stack beside it, whose names count anew. An expert
                    that has a name of its own in the file is frozen by itself
    learning_from   the lowest layer that learns, at which backward may stop
    placement_map   --placement: where the new layers of a model that grows from `base` to `target` layers stand
                        append, prepend   behind or before the old ones
                        insert:N          together, the first as layer N, at most behind all old ones
                        specific:A,B,...  as layers A, B, ... of the larger model, all of them named
                    The old layers fill the other places in their order.
Errors: options_fail, one line that names the item: a pattern or a layer without any tensor, no number, no
        such layer, twice, too few.
Source: patterns are those of a shell (fnmatch); placements those of github.com/neuromamba/rust_trainer
*/
#ifndef LLMC_LAYERS_H
#define LLMC_LAYERS_H
#include "options.h"  // options_fail, format_text
#include "tensor.h"   // Tensor, tensor_slice_name
#include <fnmatch.h>

static inline int is_digits_(const char* text) { return *text && !text[strspn(text, "0123456789")]; }

// a number low..high out of an item
static inline int item_number_(const char* option, const char* what, const char* text, int low, int high) {
    const long long x = is_digits_(text) && strlen(text) < 10 ? atoll(text) : -1;
    if (x < low || x > high) {
        options_fail(option, "expected %s %d..%d, found \"%s\"", what, low, high, format_text(text).s);
    }
    return (int)x;
}

// what follows `start` at the beginning of an item, or NULL
static inline const char* item_after_(const char* item, const char* start) {
    const size_t n = strlen(start);
    return strncmp(item, start, n) == 0 ? item + n : NULL;
}

// ---- --freeze ----

// how many layers first:N and indices: may mean
static inline int freeze_most_layers_(const Tensor* table, int n) {
    int most = 0;
    for (int i = 0; i < n; i++) {
        if (tensor_is_of_model(&table[i]) && table[i].layers > most) { most = table[i].layers; }
    }
    return most;
}

// how many slices these layers have
static inline int freeze_layers_(int* frozen, const Tensor* table, int n, int first, int end) {
    int n_found = 0;
    for (int i = 0, slice = 0; i < n; slice += tensor_slices(&table[i++])) {
        const int n_each = tensor_layer_slices(&table[i]);
        for (int l = first; l < end && l < table[i].layers && tensor_is_of_model(&table[i]); l++) {
            const int begin = tensor_slice(&table[i], l);
            for (int k = 0; k < n_each && begin >= 0; k++, n_found++) { frozen[slice + begin + k] = 1; }
        }
    }
    return n_found;
}

// how patterns may look: the first name of a layer's tensor, or of any, with a star for numbers
static inline const char* freeze_example_(char* buffer, size_t n_bytes, const Tensor* table, int n) {
    int i = 0;
    while (i < n && table[i].layers == 0) { i++; }
    tensor_name(buffer, n_bytes, &table[i < n ? i : 0]);
    for (char* number; (number = strstr(buffer, "%d"));) {
        *number = '*';
        memmove(number + 1, number + 2, strlen(number + 2) + 1);
    }
    return buffer;
}

__attribute__((noreturn))
static inline void freeze_fail_(const Tensor* table, int n, const char* item, const char* what) {
    char example[256];
    options_fail("freeze", "\"%s\" matches no %s (of all layers at once: '%s')", format_text(item).s, what,
                 freeze_example_(example, sizeof example, table, n));
}

// how many slices it matches; a pattern may also be of the name in the table, in which %d stands for all layers
static inline int freeze_pattern_(int* frozen, const Tensor* table, int n, const char* pattern) {
    int n_found = 0;
    for (int i = 0, slice = 0; i < n; i++) {
        const Tensor* t = &table[i];
        for (int k = 0, n_slices = tensor_slices(t); k < n_slices; k++, slice++) {
            char one[256], all[256];
            tensor_slice_name(one, sizeof one, t, k);
            tensor_name_of(all, sizeof all, t, k % tensor_names(t));
            if (fnmatch(pattern, one, 0) != 0 && fnmatch(pattern, all, 0) != 0) { continue; }
            frozen[slice] = 1;
            n_found++;
        }
    }
    return n_found;
}

// 1 for each slice without updates, in table order; a tensor whose slices are all frozen is marked in the table. what:
// the rows are, for messages, "tensor". On the heap
static inline int* freeze_slices(const char* text, Tensor* table, int n, const char* what) {
    int in_indices = 0;
    const int n_layers = freeze_most_layers_(table, n);
    const size_t n_bytes = sizeof(int) * (size_t)tensors_slices(table, n);
    int* frozen = (int*)memset(malloc_check(n_bytes, "frozen slices"), 0, n_bytes);
    char *copy = string_copy(text), *rest = copy;
    for (char* item; *text && (item = strsep(&rest, ","));) {
        const char *count = item_after_(item, "first:"), *index = item_after_(item, "indices:");
        const char* layer = index ? index : in_indices && is_digits_(item) ? item : NULL;
        in_indices = layer != NULL;
        int n_found = 1;  // "indices:" and "first:0" name none
        if (count) {
            const int end = item_number_("freeze", "a number of layers", count, 0, 999999999);
            n_found = freeze_layers_(frozen, table, n, 0, end) > 0 || end == 0;
        } else if (layer && (layer == item || *layer)) {
            const int l = item_number_("freeze", "a layer", layer, 0, n_layers - 1);
            n_found = freeze_layers_(frozen, table, n, l, l + 1);
        } else if (!layer) {
            n_found = freeze_pattern_(frozen, table, n, item);
        }
        if (n_found == 0) { freeze_fail_(table, n, item, what); }
    }
    free(copy);
    for (int i = 0, slice = 0; i < n; i++) {
        const int n_of_it = tensor_slices(&table[i]);
        table[i].frozen = !slices_learn(frozen, slice, n_of_it);
        slice += n_of_it;
    }
    return frozen;
}

// The lowest layer in which a slice learns; the number of layers where none does. Backward has to come down to it, and
// where *below is 1 through the layers under it: then something learns that belongs to no layer and stands in the table
// before those that do, as embeddings, or to a stack before layer 0 (tensor_before). frozen: of each slice in table
// order, NULL: none
static inline int learning_from(const Tensor* table, int n, const int* frozen, int* below) {
    const int n_layers = tensors_layers(table, n);
    int lowest = n_layers, has_layers = 0;
    *below = 0;
    for (int i = 0, slice = 0; i < n; slice += tensor_slices(&table[i++])) {
        const int n_each = tensor_layer_slices(&table[i]);
        if (table[i].is_before) {
            *below |= slices_learn(frozen, slice, tensor_slices(&table[i]));
            continue;
        }
        has_layers |= table[i].layers > 0;
        if (!has_layers) { *below |= slices_learn(frozen, slice, n_each); }
        for (int l = 0; l < lowest && l < table[i].layers; l++) {
            const int first = tensor_slice(&table[i], l);
            if (first >= 0 && slices_learn(frozen, slice + first, n_each)) { lowest = l; }
        }
    }
    return lowest;
}

// ---- --placement ----

// marks the layers of a list as new
static inline void placement_list_(int* old_layer, const char* list, int n_new, int target) {
    int n_found = 0;
    char *copy = string_copy(list), *rest = copy;
    for (char* item; (item = strsep(&rest, ",")); n_found++) {
        const int l = item_number_("placement", "a layer", item, 0, target - 1);
        if (old_layer[l] < 0) {
            options_fail("placement", "layer %d is there twice: specific:%s", l, format_text(list).s);
        }
        old_layer[l] = -1;
    }
    free(copy);
    if (n_found != n_new) {
        options_fail("placement", "expected the %d new of %d layers, found %d: specific:%s", n_new, target, n_found,
                     format_text(list).s);
    }
}

// old_layer (target): of each layer of the larger model the layer that it was, or -1 for a new one; 0 <= base <= target
static inline void placement_map(int* old_layer, const char* text, int base, int target) {
    const int n_new = target - base;
    const char *at = item_after_(text, "insert:"), *list = item_after_(text, "specific:");
    int first = base;
    assert(0 <= base && base <= target);
    memset(old_layer, 0, sizeof(int) * (size_t)target);
    if (at) { first = item_number_("placement", "insert: and a layer", at, 0, 999999999); }
    else if (strcmp(text, "prepend") == 0) { first = 0; }
    else if (strcmp(text, "append") != 0 && !list) {
        options_fail("placement", "expected append, prepend, insert:N or specific:A,B,..., found \"%s\"",
                     format_text(text).s);
    }
    first = first < base ? first : base;
    if (list) { placement_list_(old_layer, list, n_new, target); }
    for (int l = first; l < first + n_new && !list; l++) { old_layer[l] = -1; }
    for (int l = 0, next = 0; l < target; l++) { old_layer[l] = old_layer[l] < 0 ? -1 : next++; }
}
#endif  // LLMC_LAYERS_H
