/*
What layers choose in a probe: the positions that an indexer has attention look at, the experts of a router. --probe
writes it, and --inject takes it from such a file, of this program or of another, in place of the model's own choice: so
two that compute alike can be compared where scores tie, or nearly.
    choice.<module>   I32 (B, T, n), by the name that transformers has for the module
        model.layers.3.self_attn.indexer   positions of its row, 0 .. t at position t: as many of these as the indexer
                                           may choose, or all; -1 behind the last one
        model.layers.3.mlp.gate            experts
    Choice            one layer's
    choices_read      --inject: what a file has of them; a layer that it does not have chooses for itself
    choice_upload     ... on the device, where ops take it
    choices_declare, choices_put   into the file of a probe, ascending
    choices_free
Read: in any order, as I32 or I64. Of an indexer -1 and positions behind t may stand anywhere and count for nothing, as
the mask of transformers has it, whose lists may be injected as they are. Whatever else is in the file is not looked at.
Errors: fail_input names the file, the tensor, row and position, what was expected and what was found.
*/
#ifndef LLMC_CHOICES_H
#define LLMC_CHOICES_H
#include "../core/device.h"        // Device, device_download, malloc_check
#include "../core/print.h"         // format_text
#include "../files/safetensors.h"   // SafeFile, SafeWriter
#include "../files/tensorfile.h"   // shape_text_

enum { CHOICE_NAME_BYTES = 96 };
#define CHOICE_PREFIX "choice."

typedef struct {
    char name[CHOICE_NAME_BYTES];
    int layer, width;   // numbers of a position
    int n_experts;      // of which a router chooses; 0: an indexer's, of positions
    int* given;         // (N, width) as ops take them, positions by their number in the batch; NULL: nobody says
    int* taken;         // given, on the device
    const int* chosen;  // the same on the device, of the last pass; NULL: all positions, and there is no list
} Choice;

static inline size_t choice_bytes_(const Choice* c, int B, int T) {
    return sizeof(int) * (size_t)B * (size_t)T * (size_t)c->width;
}

static inline int choice_compare_(const void* a, const void* b) {
    const int x = *(const int*)a, y = *(const int*)b;
    return (x > y) - (x < y);
}

static inline int64_t choice_number_(const SafeTensor* t, size_t i) {
    int32_t narrow;
    int64_t wide;
    if (t->dtype == DTYPE_I32) {
        memcpy(&narrow, (const char*)t->data + sizeof narrow * i, sizeof narrow);
        return narrow;
    }
    memcpy(&wide, (const char*)t->data + sizeof wide * i, sizeof wide);
    return wide;
}

// how many numbers position t of a row has
static inline int choice_count_(const Choice* c, int t) {
    return c->n_experts > 0 || t + 1 > c->width ? c->width : t + 1;
}

// Position t of row b: its numbers, ascending, which are all different; behind them -1. row: (b T + t) of what was read
static inline void choice_take_(const Choice* c, const SafeFile* file, const SafeTensor* found, int b, int t,
                                int first) {
    const int n = (int)found->shape[2], expected = choice_count_(c, t);
    const int end = c->n_experts > 0 ? c->n_experts : (int)found->shape[1], below = c->n_experts > 0 ? end : t + 1;
    const size_t row = (size_t)first + (size_t)t;
    int *numbers = (int*)malloc_check(sizeof(int) * (size_t)n, "choices"), n_taken = 0, n_different = 0;
    for (int i = 0; i < n; i++) {
        const int64_t x = choice_number_(found, row * (size_t)n + (size_t)i);
        if (x < (c->n_experts > 0 ? 0 : -1) || x >= end) {
            fail_input("%s: %s[%d, %d]: expected numbers 0..%d, found %lld", file->path, c->name, b, t, end - 1,
                       (long long)x);
        }
        if (x >= 0 && x < below) { numbers[n_taken++] = (int)x; }
    }
    qsort(numbers, (size_t)n_taken, sizeof(int), choice_compare_);
    for (int i = 0; i < n_taken; i++) { n_different += i == 0 || numbers[i] != numbers[i - 1]; }
    if (n_taken != expected || n_different != expected) {
        fail_input("%s: %s[%d, %d]: expected %d different numbers 0..%d, found %d", file->path, c->name, b, t,
                   expected, below - 1, n_different);
    }
    for (int i = 0; i < c->width; i++) {
        const int at = c->n_experts > 0 ? 0 : first;
        c->given[row * (size_t)c->width + (size_t)i] = i < expected ? at + numbers[i] : -1;
    }
    free(numbers);
}

static inline void choice_read_(Choice* c, const SafeFile* file, const SafeTensor* found, int B, int T) {
    const int is_number = found->dtype == DTYPE_I32 || found->dtype == DTYPE_I64;
    const int64_t shape[] = {B, T, c->width};
    const int fits = is_number && found->n_dims == 3 && found->shape[0] == B && found->shape[1] == T;
    if (!fits || (c->n_experts > 0 ? found->shape[2] != c->width : found->shape[2] < c->width || found->shape[2] > T)) {
        fail_input("%s: %s: expected I32 or I64 of shape %s, found %s of shape %s", file->path, c->name,
                   shape_text_(shape, 3).s, dtype_name(found->dtype), shape_text_(found->shape, found->n_dims).s);
    }
    c->given = (int*)malloc_check(choice_bytes_(c, B, T), "choices");
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) { choice_take_(c, file, found, b, t, b * T); }
    }
}

// of the n layers that choose, for a batch (B, T)
static inline void choices_read(Choice* list, int n, const char* path, int B, int T) {
    SafeFile file;
    int n_found = 0;
    safetensors_open(&file, path);
    for (int i = 0; i < file.n_tensors; i++) {
        const SafeTensor* found = file.by_name[i];
        int k = 0;
        if (strncmp(found->name, CHOICE_PREFIX, strlen(CHOICE_PREFIX)) != 0) { continue; }
        while (k < n && strcmp(list[k].name, found->name) != 0) { k++; }
        if (k == n) {
            fail_input("%s: expected a tensor for each module of this model that chooses, such as %s, found %s: leave "
                       "it out", path, n > 0 ? list[n - 1].name : "none", format_text(found->name).s);
        }
        choice_read_(&list[k], &file, found, B, T);
        n_found++;
    }
    if (n_found == 0) {
        fail_input("%s: expected tensors " CHOICE_PREFIX "<module>, as --probe writes them, found none", path);
    }
    safetensors_close(&file);
}

// NULL: nobody says
static inline int* choice_upload(Choice* c, int B, int T, const Device* dev) {
    if (!c->given) { return NULL; }
    c->taken = (int*)device_alloc(choice_bytes_(c, B, T), "choices");
    device_upload(c->taken, c->given, choice_bytes_(c, B, T), dev);
    device_sync(dev);
    return c->taken;
}

static inline void choices_declare(SafeWriter* out, const Choice* list, int n, int B, int T) {
    for (int i = 0; i < n; i++) {
        const int64_t shape[] = {B, T, list[i].width};
        safewriter_declare(out, list[i].name, DTYPE_I32, 3, shape);
    }
}

// positions by their number in the row
static inline void choices_put(SafeWriter* out, const Choice* list, int n, int B, int T, const Device* dev) {
    for (int i = 0; i < n; i++) {
        const Choice* c = &list[i];
        const size_t W = (size_t)c->width, n_bytes = choice_bytes_(c, B, T);
        int* x = (int*)malloc_check(n_bytes, "choices");
        if (c->chosen) { device_download(x, c->chosen, n_bytes, dev); }
        for (size_t j = 0; j < n_bytes / sizeof(int) && c->n_experts == 0; j++) {
            const int t = (int)(j / W) % T, first = (int)(j / W) - t;
            const int number = c->chosen ? x[j] - first : (int)(j % W);
            x[j] = (int)(j % W) < choice_count_(c, t) ? number : -1;
        }
        safewriter_put(out, x, n_bytes);
        free(x);
    }
}

static inline void choices_free(Choice* list, int n, int B, int T) {
    for (int i = 0; i < n; i++) {
        if (list[i].taken) { device_release(list[i].taken, choice_bytes_(&list[i], B, T)); }
        free(list[i].given);
    }
    free(list);
}
#endif  // LLMC_CHOICES_H
