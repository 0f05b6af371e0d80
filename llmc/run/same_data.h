/*
Is what a run reads still what it was? A checkpoint's manifest.json says what that was, under "data"; settings.json has
it too, of the last start.
    data_to_json   what is read: checksums, rows, the lengths of the shards that they are cut from, sources with weights
    data_sum_images   adds checksums of the images of conversations to that
    data_check     on --resume: what is another now must have been named anew; 1: the validation data is, so that the
                   best loss so far says nothing about it
Errors: fail_input, which names the file, before anything is written.
*/
#ifndef LLMC_SAME_DATA_H
#define LLMC_SAME_DATA_H
#include "checkpoints.h"  // checkpoint_path, json_read, RunOptions, run_continues
#include "rundata.h"      // RunData

// ---- what it is ----

// of several sources each, and how many of its rows an epoch has
static inline json_t* sources_to_json_(const DataLoader* rows) {
    const TokenData* d = rows->data;
    json_t* sources = json_array();
    for (int s = 0; s < d->n_sources; s++) {
        const TokenSource* source = &d->sources[s];
        const RowSource* of = &rows->sources[s];
        json_array_append_new(
            sources, json_pack("{s:s, s:o, s:I, s:I, s:I, s:I, s:s}", "path", source->path, "weight",
                               rows->is_weighted ? json_real(source->weight) : json_null(), "tokens",
                               (json_int_t)source->n_tokens, "documents", (json_int_t)source->n_documents, "rows",
                               (json_int_t)of->n_rows, "rows_per_epoch",
                               (json_int_t)(rows->is_weighted ? of->n_places : of->n_rows), "xxh3",
                               hex_text(tokens_checksum_source(d, source)).s));
    }
    return sources;
}

// images of conversations: files, their bytes and stamps; data_sum_images adds their checksum
static inline json_t* images_to_json_(const TokenImages* images) {
    return json_pack("{s:i, s:I, s:s}", "files", images->n_files, "bytes", (json_int_t)token_images_bytes(images),
                     "stamps_xxh3", hex_text(token_images_stamps(images, 1)).s);
}

// rows of data that is not there are all zero. chat: of chat_data_to_json; takes the reference
static inline json_t* tokens_to_json_(const DataLoader* rows, uint64_t xxh3, json_t* chat) {
    const TokenData* d = rows->data;
    if (!d) { return json_null(); }
    json_t* json = json_pack("{s:s, s:I, s:I, s:I, s:i, s:s, s:s}", "path", d->path, "tokens",
                             (json_int_t)d->n_tokens, "documents", (json_int_t)d->n_documents, "rows",
                             (json_int_t)rows->n_rows, "shards", d->n_shards, "shards_xxh3",
                             hex_text(tokens_checksum_lengths(d)).s, "xxh3", hex_text(xxh3).s);
    if (d->n_sources > 1 || rows->is_weighted) { json_object_set_new(json, "sources", sources_to_json_(rows)); }
    if (json_is_object(chat)) { json_object_set(json, "conversations", chat); }
    if (d->images.n > 0) { json_object_set_new(json, "images", images_to_json_(&d->images)); }
    json_decref(chat);
    return json;
}

static inline json_t* answers_to_json_(const HellaSwag* h) {
    if (h->n == 0) { return json_null(); }
    return json_pack("{s:s, s:i, s:s}", "path", h->file.path, "examples", h->n, "xxh3", hex_text(h->xxh3).s);
}

// null: there is none. prompts: of prompts_to_json; takes the reference
static inline json_t* data_to_json(const RunData* d, int seed, json_t* prompts) {
    json_t* train = chat_data_to_json(&d->chat, &d->chat.train, d->train_rows.T, seed);
    json_t* val = chat_data_to_json(&d->chat, &d->chat.val, d->val_rows.T, seed);
    return json_pack("{s:o, s:o, s:o, s:o}", "train", tokens_to_json_(&d->train_rows, d->train_sum, train), "val",
                     tokens_to_json_(&d->val_rows, d->val_sum, val), "hellaswag", answers_to_json_(&d->examples),
                     "sample_prompts", prompts);
}

// ---- is it what it was? ----

// What the checkpoint of this step was made with; settings.json has it of those from before manifests did. NULL: nobody
// knows
static inline json_t* data_before_(const RunOptions* o, int step) {
    char path[PATH_BYTES];
    json_t* manifest = json_read(checkpoint_path(path, o->run, step, "manifest.json"));
    json_t* data = json_incref(json_object_get(manifest, "data"));
    json_decref(manifest);
    if (data) { return data; }
    return path_exists(path_join(path, o->run, "settings.json")) ? json_read(path) : NULL;
}

// Was it named anew? Not with --continue, which comes with all options of the start
static inline int option_is_new_(const Option* table, int n, const RunOptions* o, const char* name) {
    return options_given(table, n, name) == 1 && !run_continues(table, n, o);
}

// the same of data: purpose OPTION_TRAINS or OPTION_VALIDATES
static inline int data_is_new_(const Option* table, int n, const RunOptions* o, int purpose) {
    for (int i = 0; i < n && !run_continues(table, n, o); i++) {
        if (table[i].flags & purpose && table[i].flags & OPTION_TYPED) { return 1; }
    }
    return 0;
}

// is it another? What nobody has noted is not. Of a weight 9 digits are
static inline int data_differs_(const json_t* before, const json_t* now, const char* key) {
    const json_t *was = json_object_get(before, key), *is = json_object_get(now, key);
    if (json_is_real(was) && json_is_real(is)) {
        return fabs(json_real_value(was) - json_real_value(is)) > 1e-8 * fabs(json_real_value(was));
    }
    return was && !json_equal(was, is);
}

// the first source that is another one than before; NULL: all are the same, or there were fewer or more of them
static inline const char* data_changed_source_(const json_t* before, const json_t* now, const char* key) {
    const json_t *old = json_object_get(before, "sources"), *current = json_object_get(now, "sources");
    const size_t n = json_array_size(old) == json_array_size(current) ? json_array_size(old) : 0;
    for (size_t i = 0; i < n; i++) {
        const json_t *a = json_array_get(old, i), *b = json_array_get(current, i);
        if (data_differs_(a, b, key)) { return json_string_value(json_object_get(b, "path")); }
    }
    return NULL;
}

// The option that makes other rows of conversations than before; NULL: none does, or there were none
static inline const char* data_changed_option_(const json_t* before, const json_t* now) {
    static const char* options[] = {"chat-template", "learn", "truncate", "pack", "preserve-thinking", "seq-len",
                                    "seed", "image-max-pixels"};
    const json_t *was = json_object_get(before, "conversations"), *is = json_object_get(now, "conversations");
    for (int i = 0; i < 8 && was && is; i++) {
        if (data_differs_(was, is, options[i])) { return options[i]; }
    }
    return NULL;
}

// Going on with other data would be another run under the old name: the order of the rows depends on their number. That
// follows from --seq-len too, which may be another if one likes, so not the rows are compared but what they are cut
// from. 0: the same; else why it is not, but for "since the run began" and the remedy
static inline int data_is_other_(const json_t* before, const json_t* now, const char* what, ErrorText* why) {
    const char *path = json_string_value(json_object_get(now, "path")), *source;
    const size_t n_before = json_array_size(json_object_get(before, "sources")),
                 n_now = json_array_size(json_object_get(now, "sources"));
    if (!json_is_object(before)) { return 0; }
    if (!path) { return !error_set(why, "the %s data is missing that was there", what); }
    const char* option = data_differs_(before, now, "xxh3") ? data_changed_option_(before, now) : NULL;
    if (option) {
        return !error_set(why, "%s: --%s has changed and so have the rows of the %s data,", path, option, what);
    }
    source = data_changed_source_(before, now, "xxh3");
    if (source || data_differs_(before, now, "xxh3")) {
        return !error_set(why, "%s: the %s data has changed", source ? source : path, what);
    }
    const json_t *old_images = json_object_get(before, "images"), *images = json_object_get(now, "images");
    if (data_differs_(old_images, images, "xxh3")) {
        return !error_set(why, "%s: images of the %s data have changed, the last of them %s,", path, what,
                          json_string_value(json_object_get(images, "newest")));
    }
    if ((source = data_changed_source_(before, now, "weight"))) {
        return !error_set(why, "%s: its weight has changed", source);
    }
    if (n_before != n_now) {
        return !error_set(why, "%s: the %s data has other sources, or weights where there were none or none where "
                          "there were,", path, what);
    }
    if (data_differs_(before, now, "shards_xxh3")) {
        return !error_set(why, "%s: the %s data is cut into other shards, so into other rows,", path, what);
    }
    return 0;
}

// of --hellaswag and --sample-prompts: a file, which may also be given up
static inline void data_check_file_(const Option* table, int n, const RunOptions* o, const json_t* before,
                                    const json_t* now, const char* what, const char* option) {
    if (!json_is_object(now) || option_is_new_(table, n, o, option)) { return; }
    if (!data_differs_(before, now, "xxh3")) { return; }
    fail_input("%s: the %s have changed since the run began: give the old file back, or name the new with --%s",
               json_string_value(json_object_get(now, "path")), what, option);
}

// before, now: of data_to_json
static inline int data_check_(const Option* table, int n, const RunOptions* o, const RunData* d, const json_t* before,
                              const json_t* now) {
    ErrorText why;
    const char* anew = run_continues(table, n, o) ? "--resume with the new" : "name the new with";
    const int is_new = data_is_new_(table, n, o, OPTION_TRAINS);
    if (!is_new && data_is_other_(json_object_get(before, "train"), json_object_get(now, "train"), "training", &why)) {
        fail_input("%s since the run began: give the old data back, or %s --train", why.text, anew);
    }
    data_check_file_(table, n, o, json_object_get(before, "hellaswag"), json_object_get(now, "hellaswag"), "examples",
                     "hellaswag");
    data_check_file_(table, n, o, json_object_get(before, "sample_prompts"), json_object_get(now, "sample_prompts"),
                     "prompts", "sample-prompts");
    data_check_file_(table, n, o, json_object_get(before, "eval_prompts"), json_object_get(now, "eval_prompts"),
                     "prompts", "eval-generate");
    if (!data_is_other_(json_object_get(before, "val"), json_object_get(now, "val"), "validation", &why)) { return 0; }
    // what is a part of the training data changes with that
    const int is_part = has_data(&d->val) && (data_is_chat(d) ? !*o->val : tokens_is_part(&d->val));
    const int val_is_new = data_is_new_(table, n, o, OPTION_VALIDATES) || option_is_new_(table, n, o, "val-fraction");
    if (!val_is_new && !(is_new && is_part)) {
        fail_input("%s since the run began: give the old data back, or %s --val", why.text, anew);
    }
    return 1;
}

// The checksum of the images of one split. Where no stamp is another than before, it is what it was: none is read
static inline uint64_t data_sum_images_(const TokenImages* images, const json_t* before, json_t* now) {
    const json_t* was = json_object_get(before, "images");
    json_t* is = json_object_get(now, "images");
    const char* known = json_string_value(json_object_get(was, "xxh3"));
    uint64_t sum = 0;
    if (images->n == 0) { return 0; }
    if (!known || data_differs_(was, is, "stamps_xxh3")) { sum = token_images_checksum(images); }
    else { sum = strtoull(known, NULL, 16); }
    json_object_set_new(is, "xxh3", json_string(hex_text(sum).s));
    json_object_set_new(is, "newest", json_string(token_images_newest(images)));
    return sum;
}

// on rank 0; now: of data_to_json; step: of the checkpoint with which the run goes on, -1: it begins
static inline void data_sum_images(RunData* d, const RunOptions* o, int step, json_t* now) {
    json_t* before = step >= 0 ? data_before_(o, step) : NULL;
    json_t *train = json_object_get(now, "train"), *val = json_object_get(now, "val");
    d->train_images = data_sum_images_(&d->train.images, json_object_get(before, "train"), train);
    d->val_images = data_sum_images_(&d->val.images, json_object_get(before, "val"), val);
    d->has_image_sums = 1;
    json_decref(before);
}

static inline int data_check(const RunOptions* o, int step, const Option* table, int n, const RunData* d,
                             const json_t* now) {
    json_t* before = data_before_(o, step);
    const int val_is_new = data_check_(table, n, o, d, before, now);
    json_decref(before);
    return val_is_new;
}
#endif  // LLMC_SAME_DATA_H
