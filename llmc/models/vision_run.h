/*
What a run does beside a model that reads images (vision_tower.h): their files become the patches of a batch.
    vision_options      --image-max-pixels
    vision_run_init     how images become patches: preprocessor_config.json beside the model, or of a new one what
                        Qwen3.6 has; and Trainer.image_measure, placeholders that a file needs. It is read whole, so
                        that what is damaged is found before anything is computed
    vision_run_patches  the most that B rows of the data have
    vision_run_bytes    of host memory for so many patches, and for files that threads decode
    vision_run_share    of the positions, that are placeholders
    vision_run_rows     the images of a batch, read again from their files, as the tower takes them; they stay until the
                        next batch. A rank without the tower (--pp) asks for their grids alone
    vision_run_file     the same of one file
    vision_run_save     preprocessor_config.json for checkpoints and exports, where none has come along with weights
Cost:   files are decoded on all threads, one image each; pixel values take 4 bytes each on the host, of a patch of
        16 x 16 in 2 frames 6 KB.
Errors: fail_input for a processor whose patches are not the tower's, or for the first image where weights have come
        without one; fail_run for a file that is another than when the run began.
*/
#ifndef LLMC_VISION_RUN_H
#define LLMC_VISION_RUN_H
#include "../run/trainer.h"   // Run
#include "image_patches.h"    // image_patches_read, ImageProcessor
#include "vision_tower.h"     // ImageRows, VisionConfig

typedef struct {
    ImageProcessor processor;
    ImageMeasure measure;
    int max_pixels;        // --image-max-pixels; 0: as the processor has it
    int grids_alone;       // this rank has no tower, and pixels are of no use
    int* grids;            // (n, 3), of the batch at hand
    float* pixels;
    size_t grids_room, pixels_room;
    const char* lacks_processor;  // the config.json of weights that have come without; NULL: they have one
    const Run* run;
    size_t most_decoded;   // pixels of the largest file of the data, before it is resized
} VisionRun;

static inline void vision_options(Run* r, VisionRun* v) {
    const Option rows[] = {
        {"data", "image-max-pixels", "", OPTION_INT, &v->max_pixels, "0", 0, PROCESSOR_MOST_PIXELS, "N",
         "images of conversations are scaled down to at most so many pixels; 0: as preprocessor_config.json has it", 0},
    };
    run_add_options(r, rows, sizeof rows);
}

// of the folder of config.json; "": it says nothing of images
static inline const char* vision_processor_path_(char path[PATH_BYTES], const Run* r) {
    const char* names[] = {"preprocessor_config.json", "processor_config.json"};
    char folder[PATH_BYTES];
    for (int i = 0; i < 2 && *r->config; i++) {
        if (path_exists(path_join(path, path_parent(folder, r->config), names[i]))) { return path; }
    }
    *path = '\0';
    return path;
}

// of a model whose files say nothing of it: as many tokens an image as Qwen3.6 has, 64 to 16384
static inline ImageProcessor vision_processor_(const VisionConfig* c) {
    ImageProcessor p = image_processor_qwen36(0);
    const double side = (double)c->patch * c->merge / (p.patch * p.merge);
    p.patch = c->patch, p.temporal = c->temporal, p.merge = c->merge;
    p.min_pixels = (int)fmax(1.0, p.min_pixels * side * side);
    p.max_pixels = (int)fmin((double)PROCESSOR_MOST_PIXELS, p.max_pixels * side * side);
    return p;
}

static inline int vision_run_measure_(void* of, const char* path, ErrorText* error) {
    VisionRun* v = (VisionRun*)of;
    Patches patches;
    if (v->lacks_processor) {
        fail_input("%s: expected preprocessor_config.json beside it, which says how images become patches",
                   v->lacks_processor);
    }
    if (!image_patches_read(&patches, &v->processor, path, error)) { return 0; }
    const int n = (int)image_processor_tokens(&v->processor, patches.grid);
    if (patches.n_decoded > v->most_decoded) { v->most_decoded = patches.n_decoded; }
    patches_free(&patches);
    return n;
}

// pad: the token that is a placeholder
static inline void vision_run_init(VisionRun* v, const Run* r, const VisionConfig* c, int pad) {
    char path[PATH_BYTES];
    v->lacks_processor = *r->weights && !*vision_processor_path_(path, r) ? r->config : NULL;
    v->processor = *vision_processor_path_(path, r) ? image_processor_load(path, 0) : vision_processor_(c);
    ImageProcessor* p = &v->processor;
    const struct { const char* key; int found, expected; } sizes[] = {
        {"patch_size", p->patch, c->patch}, {"temporal_patch_size", p->temporal, c->temporal},
        {"merge_size", p->merge, c->merge}};
    if (c->channels != 3) {
        fail_input("%s: \"in_channels\": expected 3, for images are red, green and blue, found %d", r->config,
                   c->channels);
    }
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].found == sizes[i].expected) { continue; }
        fail_input("%s: %s: expected %d as in config.json, found %d", *path ? path : r->config, sizes[i].key,
                   sizes[i].expected, sizes[i].found);
    }
    if (v->max_pixels > 0) {
        p->max_pixels = v->max_pixels < p->max_pixels ? v->max_pixels : p->max_pixels;
        p->min_pixels = p->min_pixels < p->max_pixels ? p->min_pixels : p->max_pixels;
    }
    v->run = r;
    v->measure.of = v;
    v->measure.tokens = vision_run_measure_;
    v->measure.pad = pad;
    v->measure.most_pixels = v->max_pixels;
}

static inline void vision_run_save(Run* r, const VisionConfig* c) {
    char path[PATH_BYTES];
    const Companions* have = &r->companions;
    if (companions_have(have, "preprocessor_config.json") || companions_have(have, "processor_config.json")) { return; }
    const int is_there = *vision_processor_path_(path, r) != '\0';  // beside the config.json of a new model
    if (!is_there && c->channels != 3) { return; }
    const ImageProcessor p = is_there ? image_processor_load(path, 0) : vision_processor_(c);
    char* text = json_text_doubles(image_processor_json(&p), "preprocessor_config.json");
    companions_put(&r->companions, "preprocessor_config.json", text);
    free(text);
}

static inline void vision_run_free(VisionRun* v) {
    free(v->grids);
    free(v->pixels);
    v->grids = NULL, v->pixels = NULL;
}

// ---- of the data ----

static inline int64_t vision_most_tokens_(const TokenImages* images, int T) {
    int64_t most = 0, row = -1, n = 0;
    for (int64_t i = 0; i < images->n; i++) {
        n = images->of[i].position / T == row ? n + images->of[i].n : images->of[i].n;
        row = images->of[i].position / T;
        most = n > most ? n : most;
    }
    return most;
}

static inline double vision_run_patches(const Run* r, const VisionConfig* c, int B) {
    const int64_t train = vision_most_tokens_(&r->data.train.images, r->T);
    const int64_t val = vision_most_tokens_(&r->data.val.images, r->T);
    return (double)B * (double)(train > val ? train : val) * vision_block(c);
}

// On the host, of a batch with so many patches, which are in memory twice, and of the largest file on each thread
static inline double vision_run_bytes(const VisionRun* v, const VisionConfig* c, double patches) {
    const double decoding = (double)(device_threads(0) * IMAGE_PIXEL_BYTES) * (double)v->most_decoded;
    const double times = v->grids_alone ? 1.0 : 2.0;
    return DEVICE_IS_SHARED ? times * sizeof(float) * patches * vision_columns(c) + decoding : 0.0;
}

// share of all positions of the training data that are placeholders
static inline double vision_run_share(const Run* r) {
    const double n = (double)r->data.train.n_tokens;
    return n > 0.0 ? (double)token_images_placeholders(&r->data.train.images) / n : 0.0;
}

static inline void* vision_room_(void* at, size_t* room, size_t n_bytes, const char* what) {
    if (n_bytes <= *room) { return at; }
    *room = n_bytes;
    return realloc_check(at, n_bytes, what);
}

// the images of B rows, one behind the other
static inline const RowImage** vision_list_(int* n_all, const DataLoader* rows, int64_t first, int B) {
    const RowImage** list = NULL;
    *n_all = 0;
    for (int b = 0; b < B; b++) {
        int64_t at, n;
        const RowImage* of_row = dataloader_images(rows, first + b, &at, &n);
        list = (const RowImage**)realloc_check(list, sizeof *list * ((size_t)*n_all + (size_t)n + 1), "images");
        for (int64_t i = 0; i < n; i++) { list[(*n_all)++] = &of_row[i]; }
    }
    return list;
}

// a file is no longer what it was
__attribute__((noreturn))
static inline void vision_run_fail_(const VisionRun* v, const char* path, const char* why) {
    const char* run = v->run->o.run;
    const int is_saved = *run && checkpoint_newest(run, -1) >= 0;
    const char* next = is_saved ? "--resume goes on from the newest checkpoint"
                                : "the command again: there is no checkpoint yet";
    fail_run("%s: changed since the run began: %s; give the old file back, and %s", path, why, next);
}

static inline void vision_run_read_(VisionRun* v, ImageRows* x, const RowImage* const* list, int n) {
    Patches* patches = (Patches*)malloc_check(sizeof(Patches) * ((size_t)n + 1), "images of a batch");
    ErrorText* errors = (ErrorText*)malloc_check(sizeof(ErrorText) * ((size_t)n + 1), "images of a batch");
    #pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < n; i++) {
        errors[i].text[0] = '\0';
        const int good = image_patches_read(&patches[i], &v->processor, list[i]->path, &errors[i]);
        const int tokens = good ? (int)image_processor_tokens(&v->processor, patches[i].grid) : list[i]->n;
        if (tokens != list[i]->n) { error_set(&errors[i], "expected %d tokens, found %d", list[i]->n, tokens); }
    }
    memset(x, 0, sizeof *x);
    for (int i = 0; i < n; i++) {
        if (*errors[i].text) { vision_run_fail_(v, list[i]->path, errors[i].text); }
        x->P += (int)patches[i].rows;
    }
    const size_t columns = n > 0 ? patches[0].columns : 0;
    v->grids = (int*)vision_room_(v->grids, &v->grids_room, 3 * sizeof(int) * (size_t)n, "grids of images");
    const size_t n_bytes = v->grids_alone ? 0 : sizeof(float) * columns * (size_t)x->P;
    v->pixels = (float*)vision_room_(v->pixels, &v->pixels_room, n_bytes, "pixels");
    float* at = v->pixels;
    for (int i = 0; i < n; i++) {
        const PatchGrid g = patches[i].grid;
        v->grids[3 * i] = g.t, v->grids[3 * i + 1] = g.h, v->grids[3 * i + 2] = g.w;
        if (!v->grids_alone) {
            memcpy(at, patches[i].values, sizeof(float) * columns * patches[i].rows);
            at += columns * patches[i].rows;
        }
        patches_free(&patches[i]);
    }
    x->n = n, x->grids = v->grids, x->pixels = v->pixels;
    free(errors);
    free(patches);
}

// the images of rows first .. first + B - 1; returns their number
static inline int vision_run_rows(VisionRun* v, ImageRows* x, const DataLoader* rows, int64_t first, int B) {
    int n;
    const RowImage** list = vision_list_(&n, rows, first, B);
    if (n > 0) { vision_run_read_(v, x, list, n); }
    free(list);
    return n;
}

static inline void vision_run_file(VisionRun* v, ImageRows* x, const TextImage* image) {
    const RowImage one = {0, image->n, image->path}, *list[1] = {&one};
    vision_run_read_(v, x, list, 1);
}
#endif  // LLMC_VISION_RUN_H
