/*
The input of --probe (doc/files.md): one batch that somebody wants computed, everything visible.
    IN.safetensors   inputs, targets  I32 (B, T), already shifted; a negative target is not counted
                     pixel_values F32 (P, columns), image_grid_thw (n, 3), I32, I64 or F32   of a model that reads
                     images, or absent; pixel_values_videos, video_grid_thw: the same of videos
What comes out (tasks.h): logits, loss and grad.<name> of every tensor, under its name and shape on disk. Where a model
adds a loss of its own to that of the targets, the latter too, under the name that its trainer gives it; and others that
it names (OtherLoss), whose gradients are among the others.
*/
#ifndef LLMC_PROBE_H
#define LLMC_PROBE_H
#include "../files/safetensors.h"  // SafeFile, safetensors_find
#include "../files/tensorfile.h"   // shape_text_

typedef struct {
    int B, T, counted;      // counted: targets that are not negative
    int *inputs, *targets;  // (B, T), on the heap
    int n_images, P, columns;  // images, 0: none; their patches, and numbers of each
    int n_frames;              // so many of them, the last, are frames of videos
    int* grids;                // (n_images, 3)
    float* pixels;             // (P, columns)
} ProbeBatch;

enum { PROBE_MOST_SIDE = 1 << 14 };  // patches

struct Run;

// a loss of n numbers, as of so many layers: number i once a leaf is summed
typedef struct {
    const char* name;
    int n;
    float (*number)(const struct Run* r, int i);
} OtherLoss;

enum { MAX_OTHER_LOSSES = 4 };

// a number of a grid; some programs write it as a float
static inline int probe_grid_(const SafeFile* file, const SafeTensor* grids, const char* name, size_t i) {
    const size_t n_bytes = dtype_size(grids->dtype);
    int32_t narrow;
    int64_t wide;
    float real;
    memcpy(grids->dtype == DTYPE_I32 ? (void*)&narrow : grids->dtype == DTYPE_I64 ? (void*)&wide : (void*)&real,
           (const char*)grids->data + n_bytes * i, n_bytes);
    const double x = grids->dtype == DTYPE_I32 ? narrow : grids->dtype == DTYPE_I64 ? (double)wide : (double)real;
    if (!(x >= 1.0 && x <= (double)PROBE_MOST_SIDE && x == floor(x))) {
        fail_input("%s: %s[%zu]: expected a number 1..%d, found %g", file->path, name, i, PROBE_MOST_SIDE, x);
    }
    return (int)x;
}

static inline void probe_check_images_(const SafeFile* file, const SafeTensor* pixels, const char* pixels_name,
                                       const SafeTensor* grids, const char* grids_name) {
    const Dtype dtype = grids ? grids->dtype : DTYPE_U8;
    const int is_number = dtype == DTYPE_I32 || dtype == DTYPE_I64 || dtype == DTYPE_F32;
    if (!pixels || pixels->dtype != DTYPE_F32 || pixels->n_dims != 2 || pixels->n == 0 || pixels->n > INT32_MAX) {
        fail_input("%s: expected a tensor \"%s\", F32 of shape (patches, numbers)", file->path, pixels_name);
    }
    if (!is_number || grids->n_dims != 2 || grids->n == 0 || grids->n > INT32_MAX || grids->shape[1] != 3) {
        fail_input("%s: expected a tensor \"%s\", I32 of shape (images, 3)", file->path, grids_name);
    }
    for (size_t i = 0; i < pixels->n; i++) {
        float value;
        memcpy(&value, (const char*)pixels->data + sizeof value * i, sizeof value);
        if (!isfinite(value)) {
            fail_input("%s: %s[%zu]: expected a finite number, found %g", file->path, pixels_name, i, (double)value);
        }
    }
}

// a grid more; of a video each frame is an image by itself
static inline void probe_add_grid_(ProbeBatch* batch, const int grid[3], int is_video) {
    const int n = is_video ? grid[0] : 1, frames = is_video ? 1 : grid[0];
    batch->grids = (int*)realloc_check(batch->grids, sizeof(int) * 3 * ((size_t)batch->n_images + (size_t)n),
                                       "grids of images");
    for (int i = 0; i < n; i++, batch->n_images++) {
        int* g = batch->grids + 3 * batch->n_images;
        g[0] = frames, g[1] = grid[1], g[2] = grid[2];
    }
    batch->n_frames += is_video ? n : 0;
}

// images or videos, behind those that are there; or none
static inline void probe_images_(ProbeBatch* batch, const SafeFile* file, const char* pixels_name,
                                 const char* grids_name, int is_video) {
    const SafeTensor* pixels = safetensors_find(file, pixels_name);
    const SafeTensor* grids = safetensors_find(file, grids_name);
    if (!pixels && !grids) { return; }
    probe_check_images_(file, pixels, pixels_name, grids, grids_name);
    const int columns = (int)pixels->shape[1];
    const size_t before = (size_t)batch->P * (size_t)columns;
    if (batch->P > 0 && columns != batch->columns) {
        fail_input("%s: %s: expected %d numbers for each patch, as of the images, found %d", file->path, pixels_name,
                   batch->columns, columns);
    }
    for (size_t i = 0; i < grids->n; i += 3) {
        int grid[3];
        for (size_t side = 0; side < 3; side++) { grid[side] = probe_grid_(file, grids, grids_name, i + side); }
        probe_add_grid_(batch, grid, is_video);
    }
    batch->columns = columns;
    batch->P += (int)pixels->shape[0];
    batch->pixels = (float*)realloc_check(batch->pixels, sizeof(float) * before + pixels->n_bytes, "pixels");
    memcpy(batch->pixels + before, pixels->data, pixels->n_bytes);
}

// instead of tokens the file has a tensor of this name that is none of them, or NULL
__attribute__((noreturn))
static inline void probe_fail_tokens_(const SafeFile* file, const char* name, const SafeTensor* found) {
    char names[80] = "no tensor";
    size_t used = 0;
    if (found) {
        fail_input("%s: expected a tensor \"%s\", I32 of shape (B, T), found %s of shape %s", file->path, name,
                   dtype_name(found->dtype), shape_text_(found->shape, found->n_dims).s);
    }
    for (int i = 0; i < file->n_tensors && used < sizeof names - 1; i++) {
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i > 0 ? ", " : "", file->by_name[i]->name);
    }
    fail_input("%s: expected a tensor \"%s\", I32 of shape (B, T), found none of that name: the file has %s",
               file->path, name, format_text(names).s);
}

static inline int* probe_tokens_(const SafeFile* file, const char* name, ProbeBatch* batch, int low, int V) {
    const SafeTensor* t = safetensors_find(file, name);
    if (!t || t->dtype != DTYPE_I32 || t->n_dims != 2 || t->n == 0 || t->n > INT32_MAX) {
        probe_fail_tokens_(file, name, t);
    }
    if (batch->B > 0 && (t->shape[0] != batch->B || t->shape[1] != batch->T)) {
        fail_input("%s: expected targets of the shape of inputs, (%d, %d), found (%lld, %lld)", file->path, batch->B,
                   batch->T, (long long)t->shape[0], (long long)t->shape[1]);
    }
    batch->B = (int)t->shape[0];
    batch->T = (int)t->shape[1];
    int* tokens = (int*)malloc_check(t->n_bytes, "tokens of the probe");
    memcpy(tokens, t->data, t->n_bytes);
    for (size_t i = 0; i < t->n; i++) {
        if (tokens[i] < low || tokens[i] >= V) {
            fail_input("%s: %s[%zu]: expected a token 0..%d%s, found %d", file->path, name, i, V - 1,
                       low < 0 ? " (negative: not counted)" : "", tokens[i]);
        }
    }
    return tokens;
}

// inputs in 0..V-1, targets in 0..classes-1 or negative
static inline void probe_read(ProbeBatch* batch, const char* path, int V, int classes, int max_T) {
    SafeFile file;
    memset(batch, 0, sizeof *batch);
    safetensors_open(&file, path);
    batch->inputs = probe_tokens_(&file, "inputs", batch, 0, V);
    batch->targets = probe_tokens_(&file, "targets", batch, INT_MIN, classes);
    for (int n = 0; n < batch->B * batch->T; n++) { batch->counted += batch->targets[n] >= 0; }
    if (batch->T > max_T) {
        fail_input("%s: expected at most the model's %d positions, found %d", path, max_T, batch->T);
    }
    if (batch->counted == 0) { fail_input("%s: all targets are negative: there is no loss", path); }
    probe_images_(batch, &file, "pixel_values", "image_grid_thw", 0);
    probe_images_(batch, &file, "pixel_values_videos", "video_grid_thw", 1);
    safetensors_close(&file);
}

// before it is computed: may the result take this name?
static inline void probe_check_out(const char* path) {
    static const char* const names[] = {"logits", "loss", NULL};
    safetensors_check_out("probe-out", path, "the result of a probe", names);
}

// What the file of the result begins with: logits, loss, the loss named `without_more` unless that is NULL, n_others
// others
static inline void probe_declare(SafeWriter* out, const ProbeBatch* batch, int V, const char* without_more,
                                 const OtherLoss* others, int n_others) {
    const int64_t logits_shape[] = {batch->B, batch->T, V}, loss_shape[] = {1};
    safewriter_init(out);
    safewriter_declare(out, "logits", DTYPE_F32, 3, logits_shape);
    safewriter_declare(out, "loss", DTYPE_F32, 1, loss_shape);
    if (without_more) { safewriter_declare(out, without_more, DTYPE_F32, 1, loss_shape); }
    for (int i = 0; i < n_others; i++) {
        const int64_t shape[] = {others[i].n};
        safewriter_declare(out, others[i].name, DTYPE_F32, 1, shape);
    }
}

// part: the loss without what the model adds to it; part_name NULL: it has none
static inline void probe_print(const ProbeBatch* batch, float loss, const char* part_name, float part,
                               const char* path) {
    printf("probe: %d rows of %d positions, %d targets counted, loss %.6f", batch->B, batch->T, batch->counted,
           (double)loss);
    if (part_name) { printf(" (%s %.6f)", part_name, (double)part); }
    printf(", written to %s\n", path);
}

static inline void probe_free(ProbeBatch* batch) {
    free(batch->inputs);
    free(batch->targets);
    free(batch->grids);
    free(batch->pixels);
}
#endif  // LLMC_PROBE_H
