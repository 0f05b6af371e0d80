/*
Images of conversations, as files beside the text: where they lie, how many placeholders stand for each, in which rows.
    ImageMeasure      how many placeholders a model has for an image file, which the model says
    image_path        a path of a conversation, from the folder of the file that it is in; addresses are refused
    ImageFiles        each file once, with what it was when it was measured; image_files_sum of all their bytes
    TokenImages       those of the rows of a TokenData (dataloader.h), in the order of their positions
    token_images_in   those of the positions from one to another
    token_images_changed, token_images_touched   as tokens_changed and tokens_touched have it; a file that is gone or
                      has another in its place is changed too, for an image is read again each time that its row comes
    token_images_stamps      of sizes and times of change: the same stamps are the same files
    token_images_checksum    of the bytes of all, which tells where stamps are other ones
Paths are relative to the folder of the JSON Lines; file:// in front goes, with %20 as a blank. What lies in the network
(http://, s3://) or in the line itself (data:) is not read.
Checksums: XXH3 (64 bits, seed 0) of the checksums of the files in the order in which rows have them. No names: files
that were moved are the same.
Cost:   a file is measured once, whoever has it; to notice changes is a stat of each file, a microsecond where the
        kernel knows it; token_images_checksum reads them all.
Errors: 0 with the reason.
*/
#ifndef LLMC_ROW_IMAGES_H
#define LLMC_ROW_IMAGES_H
#include "../core/outfile.h"  // PATH_BYTES
#include "../core/print.h"    // progress
#include <ctype.h>
#include <xxhash.h>

typedef struct {
    void* of;
    int (*tokens)(void* of, const char* path, ErrorText* error);  // placeholders of an image; 0 with the reason
    int pad;                                                      // the token that is a placeholder
    int most_pixels;                                              // an option's bound, 0: none, which a run's log has
} ImageMeasure;

// ---- 1. Files ----

typedef struct {
    char* path;
    int n_tokens;        // placeholders
    struct stat opened;  // as it was before it was measured
} ImageFile;

typedef struct {
    ImageFile* of;
    int* slots;          // (n_slots) a hash table: index of a file, -1: free
    int n, n_slots;      // n_slots: a power of two, more than 2 n; 0: none yet
    int looks_again;     // a file that is another when it is asked for again is measured anew, as in a chat
} ImageFiles;

static inline void image_files_free(ImageFiles* files) {
    for (int i = 0; i < files->n; i++) { free(files->of[i].path); }
    free(files->of);
    free(files->slots);
    memset(files, 0, sizeof *files);
}

static inline int image_hex_(char c) {
    const char* digits = "0123456789abcdef";
    const char* at = c ? strchr(digits, tolower((unsigned char)c)) : NULL;
    return at ? (int)(at - digits) : -1;
}

// in place: %20 is a blank. %00 is not
static inline void image_unescape_(char* text) {
    char* out = text;
    for (const char* at = text; *at; at++) {
        const int high = *at == '%' ? image_hex_(at[1]) : -1, low = high >= 0 ? image_hex_(at[2]) : -1;
        const int is_escape = low >= 0 && 16 * high + low > 0;
        *out++ = is_escape ? (char)(16 * high + low) : *at;
        at += is_escape ? 2 : 0;
    }
    *out = '\0';
}

// does it begin as an address, with letters and "://"?
static inline int image_is_address_(const char* text) {
    size_t n = 0;
    while (isalnum((unsigned char)text[n]) || (n > 0 && text[n] && strchr("+-.", text[n]))) { n++; }
    return n > 1 && strncmp(text + n, "://", 3) == 0;
}

// text: as a conversation has it; folder: of the file with that conversation
static inline int image_path(char path[PATH_BYTES], const char* folder, const char* text, ErrorText* error) {
    char plain[PATH_BYTES];
    const int is_file = strncasecmp(text, "file://", 7) == 0;
    if (strncasecmp(text, "data:", 5) == 0) {
        return error_set(error, "expected the path of an image, found its bytes in the line: write it to a file");
    }
    if (!is_file && image_is_address_(text)) {
        return error_set(error, "%.200s: expected the path of an image, found an address: fetch it first", text);
    }
    text += is_file ? strncasecmp(text, "file://localhost/", 17) == 0 ? 16 : 7 : 0;
    if (!*text) { return error_set(error, "expected the path of an image, found an empty one"); }
    if (snprintf(plain, sizeof plain, "%s", text) >= (int)sizeof plain) {
        return error_set(error, "%.200s...: this path is too long", text);
    }
    if (is_file) { image_unescape_(plain); }
    const int is_whole = *plain == '/';
    if (snprintf(path, PATH_BYTES, "%s%s%s", is_whole ? "" : folder, is_whole ? "" : "/", plain) >= PATH_BYTES) {
        return error_set(error, "%.200s...: this path is too long", plain);
    }
    return 1;
}

// where the path is, or would be
static inline int* image_files_slot_(const ImageFiles* files, const char* path) {
    const size_t mask = (size_t)files->n_slots - 1;
    size_t i = (size_t)XXH3_64bits(path, strlen(path)) & mask;
    while (files->slots[i] >= 0 && strcmp(files->of[files->slots[i]].path, path) != 0) { i = (i + 1) & mask; }
    return &files->slots[i];
}

// room for one more
static inline void image_files_grow_(ImageFiles* files) {
    if (files->n_slots > 2 * (files->n + 1)) { return; }
    const int n_slots = files->n_slots ? 2 * files->n_slots : 64;
    files->of = (ImageFile*)realloc_check(files->of, (size_t)(n_slots / 2) * sizeof(ImageFile), "list of images");
    files->slots = (int*)realloc_check(files->slots, (size_t)n_slots * sizeof(int), "list of images");
    files->n_slots = n_slots;
    for (int i = 0; i < n_slots; i++) { files->slots[i] = -1; }
    for (int i = 0; i < files->n; i++) { *image_files_slot_(files, files->of[i].path) = i; }
}

static inline int image_measure_(ImageFile* file, const char* path, const ImageMeasure* measure, ErrorText* error) {
    ErrorText why = {""};
    if (stat(path, &file->opened) != 0) {
        return error_set(error, "%s: cannot be opened: %s", path, strerror(errno));
    }
    if (!S_ISREG(file->opened.st_mode)) {
        return error_set(error, "%s: expected a file, found a %s", path,
                         S_ISDIR(file->opened.st_mode) ? "folder" : "pipe or device");
    }
    file->n_tokens = measure->tokens(measure->of, path, &why);
    return file->n_tokens > 0 ? 1 : error_set(error, "%s: %s", path, why.text);
}

// has somebody written to it, or taken it away?
static inline int image_file_changed_(const ImageFile* file) {
    struct stat now;
    return stat(file->path, &now) != 0 || now.st_size != file->opened.st_size ||
           file_times_differ_(now.st_mtim, file->opened.st_mtim);
}

// one number for its size and time of change
static inline uint64_t image_file_stamp(const ImageFile* file) {
    const int64_t stamp[3] = {(int64_t)file->opened.st_size, (int64_t)file->opened.st_mtim.tv_sec,
                              (int64_t)file->opened.st_mtim.tv_nsec};
    return XXH3_64bits(stamp, sizeof stamp);
}

// the index of a file, which is measured where it is new; -1 with the reason
static inline int image_files_find(ImageFiles* files, const char* path, const ImageMeasure* measure, ErrorText* error) {
    ImageFile file;
    image_files_grow_(files);
    int* slot = image_files_slot_(files, path);
    if (*slot >= 0 && !(files->looks_again && image_file_changed_(&files->of[*slot]))) { return *slot; }
    if (*slot >= 0) { return image_measure_(&files->of[*slot], path, measure, error) ? *slot : -1; }
    if (!image_measure_(&file, path, measure, error)) { return -1; }
    file.path = string_copy(path);
    files->of[files->n] = file;
    return *slot = files->n++;
}

// of one that is gone, 0
static inline uint64_t image_checksum_(const char* path) {
    MappedFile file;
    ErrorText error;
    if (!file_map_or_not(&file, path, &error)) { return 0; }
    const uint64_t sum = XXH3_64bits(file.bytes, file.n_bytes);
    file_unmap(&file);
    return sum;
}

// of their bytes, and of how many placeholders each has
static inline uint64_t image_files_sum(const ImageFiles* files) {
    uint64_t sum = 0;
    for (int i = 0; i < files->n; i++) {
        const uint64_t one[3] = {sum, image_checksum_(files->of[i].path), (uint64_t)files->of[i].n_tokens};
        sum = XXH3_64bits(one, sizeof one);
    }
    return sum;
}

// ---- 2. Of rows ----

typedef struct {
    int64_t position;  // of its first placeholder: row * T + column
    int n;             // placeholders, one behind the other in that row
    const char* path;
} RowImage;

typedef struct {
    RowImage* of;      // in the order of their positions
    int64_t n;
    ImageFile* files;  // each once, in the order in which rows have them first; theirs are the paths
    int n_files;
} TokenImages;

static inline void token_images_free(TokenImages* images) {
    for (int i = 0; i < images->n_files; i++) { free(images->files[i].path); }
    free(images->files);
    free(images->of);
    memset(images, 0, sizeof *images);
}

static inline int row_image_compare_(const void* a, const void* b) {
    const int64_t x = ((const RowImage*)a)->position, y = ((const RowImage*)b)->position;
    return (x > y) - (x < y);
}

// of: n of them in any order, on the heap, which `images` takes; their paths are those of `files`, which are copied
static inline void token_images_init(TokenImages* images, RowImage* of, int64_t n, const ImageFiles* files) {
    memset(images, 0, sizeof *images);
    if (n == 0) {
        free(of);
        return;
    }
    images->of = of;
    images->n = n;
    int* places = (int*)malloc_check((size_t)files->n * sizeof(int), "list of images");
    images->files = (ImageFile*)malloc_check((size_t)files->n * sizeof(ImageFile), "list of images");
    for (int i = 0; i < files->n; i++) { places[i] = -1; }
    qsort(of, (size_t)n, sizeof *of, row_image_compare_);
    for (int64_t i = 0; i < n; i++) {
        int* place = &places[*image_files_slot_(files, of[i].path)];
        if (*place < 0) {
            *place = images->n_files++;
            images->files[*place] = files->of[place - places];
            images->files[*place].path = string_copy(of[i].path);
        }
        of[i].path = images->files[*place].path;
    }
    free(places);
}

// those that begin at positions first .. end - 1: n of them
static inline const RowImage* token_images_in(const TokenImages* images, int64_t first, int64_t end, int64_t* n) {
    int64_t low = 0, high = images->n;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (images->of[middle].position < first) { low = middle + 1; }
        else { high = middle; }
    }
    for (*n = 0; low + *n < images->n && images->of[low + *n].position < end; ++*n) {}
    return *n > 0 ? images->of + low : NULL;
}

static inline int64_t token_images_placeholders(const TokenImages* images) {
    int64_t n = 0;
    for (int64_t i = 0; i < images->n; i++) { n += images->of[i].n; }
    return n;
}

// ---- 3. Are they what they were? ----

// the first that somebody has written to, or taken away; NULL: none
static inline const char* token_images_changed(const TokenImages* images) {
    for (int i = 0; i < images->n_files; i++) {
        if (image_file_changed_(&images->files[i])) { return images->files[i].path; }
    }
    return NULL;
}

// What the kernel knows of a file is another than at the last question: a link, its mode, or bytes of which the time
// was put back. Asked when none is changed
static inline int token_images_touched(TokenImages* images) {
    struct stat now;
    int touched = 0;
    for (int i = 0; i < images->n_files; i++) {
        ImageFile* file = &images->files[i];
        if (stat(file->path, &now) != 0) { continue; }
        touched |= now.st_dev != file->opened.st_dev || now.st_ino != file->opened.st_ino ||
                   file_times_differ_(now.st_ctim, file->opened.st_ctim);
        file->opened = now;  // of before the bytes are read: a later write is another event
    }
    return touched;
}

static inline int64_t token_images_bytes(const TokenImages* images) {
    int64_t n_bytes = 0;
    for (int i = 0; i < images->n_files; i++) { n_bytes += images->files[i].opened.st_size; }
    return n_bytes;
}

// the file with the latest time of change; "": there is none
static inline const char* token_images_newest(const TokenImages* images) {
    int newest = 0;
    for (int i = 1; i < images->n_files; i++) {
        const struct timespec a = images->files[i].opened.st_mtim, b = images->files[newest].opened.st_mtim;
        if (a.tv_sec > b.tv_sec || (a.tv_sec == b.tv_sec && a.tv_nsec > b.tv_nsec)) { newest = i; }
    }
    return images->n_files > 0 ? images->files[newest].path : "";
}

// times: with the times of change. Without them for ranks, whose disks may have copies
static inline uint64_t token_images_stamps(const TokenImages* images, int times) {
    int64_t* stamps = (int64_t*)malloc_check(sizeof(int64_t) * (3 * (size_t)images->n_files + 1), "stamps of images");
    size_t n = 0;
    for (int i = 0; i < images->n_files; i++) {
        const struct stat* opened = &images->files[i].opened;
        stamps[n++] = (int64_t)opened->st_size;
        if (!times) { continue; }
        stamps[n++] = (int64_t)opened->st_mtim.tv_sec;
        stamps[n++] = (int64_t)opened->st_mtim.tv_nsec;
    }
    const uint64_t sum = XXH3_64bits(stamps, sizeof(int64_t) * n);
    free(stamps);
    return sum;
}

// of the bytes of all; several are read side by side, for a disk in the network takes its time with each
static inline uint64_t token_images_checksum(const TokenImages* images) {
    const int piece = 256;  // files between two looks at the clock
    uint64_t* sums = (uint64_t*)malloc_check(sizeof(uint64_t) * ((size_t)images->n_files + 1), "checksums of images");
    for (int first = 0; first < images->n_files; first += piece) {
        const int end = first + piece < images->n_files ? first + piece : images->n_files;
        #pragma omp parallel for schedule(dynamic) if (end - first > 16)
        for (int i = first; i < end; i++) { sums[i] = image_checksum_(images->files[i].path); }
        progress("checksum of the images", end, images->n_files);
    }
    const uint64_t sum = XXH3_64bits(sums, sizeof(uint64_t) * (size_t)images->n_files);
    free(sums);
    return sum;
}
#endif  // LLMC_ROW_IMAGES_H
