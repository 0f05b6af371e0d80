/*
Conversations as the data of a run: --train and --val of a trainer that takes them (Trainer.takes_conversations).
    chat_data_is     are these paths conversations? --learn says it, or with "auto" the first line of each that is an
                     object: "text" is a document, "messages", "conversations" or "instruction" a conversation. A
                     line with both is refused: nothing is guessed; so is a .json file that is a list of objects
    chat_data_open   the chat template, of the folder of the tokenizer or by name
    chat_data_read   samples (conversations.h) become rows of T positions (pack.h), with the images in them, where the
                     model says how many placeholders an image has
    chat_data_box, chat_data_say, chat_data_to_json   what was read, and what was left out
The rows are a pure function of files, tokenizer, template, --learn, --truncate, --pack, --preserve-thinking, T and
--seed. chat_data_to_json has all but the files: same_data.h says which of them is another when a run goes on.
Errors: fail_input, before anything is computed.
*/
#ifndef LLMC_CHAT_DATA_H
#define LLMC_CHAT_DATA_H
#include "../text/conversations.h"  // Conversations
#include "../text/pack.h"           // pack_rows
#include "chat_options.h"           // ChatOptions, chat_options_template

// the samples of one split, and the rows that they fill
typedef struct {
    int64_t n, n_tokens, n_learned;
    int64_t n_images, n_placeholders;  // the latter are tokens too
    double padding;  // share of the positions
} ChatSamples;

typedef struct {
    const ChatOptions* o;  // NULL: of a trainer that takes no conversations
    int is_open;           // the data are conversations, read
    ChatTemplate t;
    Conversations from_train, from_val;  // counts and messages alone, once the rows are made
    ChatSamples train, val;
    int most_pixels;  // of an image, by an option; 0: none was given
    int is_longest;   // the model has no more positions than a row
} ChatData;

// ---- what is it? ----

typedef enum { LINES_UNKNOWN, LINES_OF_TEXT, LINES_OF_TURNS } LinesKind;

// by its keys
static inline LinesKind chat_data_line_kind_(const json_t* row, const char* path, long long number) {
    static const char* keys[] = {"messages", "conversations", "instruction"};
    const int is_text = json_object_get(row, "text") != NULL;
    for (int i = 0; i < 3; i++) {
        if (!json_object_get(row, keys[i])) { continue; }
        if (!is_text) { return LINES_OF_TURNS; }
        fail_input("%s:%lld: has \"text\" and \"%s\": say by --learn text or --learn answers which of them is learned",
                   path, number, keys[i]);
    }
    return is_text ? LINES_OF_TEXT : LINES_UNKNOWN;
}

// by its first line that says it; what is no JSON there, its reader refuses
static inline LinesKind chat_data_file_kind_(const char* path) {
    PlainFile file;
    ErrorText error;
    LinesKind kind = LINES_UNKNOWN;
    int found;
    plain_file_open(&file, path);
    JsonLines lines = {file.bytes, file.n_bytes, 0, 0, NULL};
    while (kind == LINES_UNKNOWN && (found = json_lines_row(&lines, "{\"messages\": [...]}", &error)) != 0) {
        if (found > 0) { kind = chat_data_line_kind_(lines.row, path, lines.number); }
    }
    json_lines_close(&lines);
    plain_file_close(&file);
    return kind;
}

// alpaca_data.json and others are one list of conversations, which would be learned as a text, brackets and all
static inline void chat_data_refuse_list_(const char* path) {
    PlainFile file;
    size_t at = 0;
    if (!ends_with(path, ".json")) { return; }
    plain_file_open(&file, path);
    for (char next = '['; at < file.n_bytes && (isspace(file.bytes[at]) || file.bytes[at] == next); at++) {
        if (file.bytes[at] == next) { next = '\0'; }
    }
    const int is_list = at > 0 && at < file.n_bytes && file.bytes[at] == '{' && memchr(file.bytes, '[', at);
    plain_file_close(&file);
    if (!is_list) { return; }
    fail_input("%s: expected JSON Lines, found a list in JSON: for conversations make lines of it, jq -c '.[]' in.json "
               "> out.jsonl; as a text it is learned with --learn text", path);
}

// the first file behind a path that is JSON Lines by its name
static inline LinesKind chat_data_path_kind_(const char* path) {
    LinesKind kind = LINES_UNKNOWN;
    FileList list;
    file_list_make(&list, path);
    for (int i = 0; i < list.n && kind == LINES_UNKNOWN; i++) {
        if (conversations_is_file_(list.paths[i])) { kind = chat_data_file_kind_(list.paths[i]); }
        else if (!list.in_folder) { chat_data_refuse_list_(list.paths[i]); }
    }
    file_list_free(&list);
    return kind;
}

// option --name has these paths
static inline int chat_data_is(const ChatOptions* o, const char* name, const char* text) {
    PathList paths;
    if (!o || o->learn == LEARN_TEXT) { return 0; }
    if (o->learn != LEARN_AUTO) { return 1; }
    path_list_make(&paths, text);
    const LinesKind first = chat_data_path_kind_(paths.of[0].path);
    for (int i = 1; i < paths.n; i++) {
        const LinesKind kind = chat_data_path_kind_(paths.of[i].path);
        if ((kind == LINES_OF_TURNS) == (first == LINES_OF_TURNS)) { continue; }
        options_fail(name, "expected conversations or texts, found both: %s and %s", paths.of[0].path,
                     paths.of[i].path);
    }
    path_list_free(&paths);
    return first == LINES_OF_TURNS;
}

// ---- rows ----

// folder: of the tokenizer, "" where it has none
static inline void chat_data_open(ChatData* d, const char* folder) {
    chat_options_template(&d->t, d->o, folder);
    d->is_open = 1;
}

// samples first .. first + n - 1 of c as rows
static inline void chat_data_pack_(const ChatData* d, ChatSamples* samples, TokenData* rows, const Conversations* c,
                                   int64_t first, int64_t n, const char* path, int T, int seed) {
    const int64_t begin = c->starts[first], end = c->starts[first + n];
    samples->n = n;
    samples->n_tokens = end - begin;
    samples->n_learned = 0;
    for (int64_t i = begin; i < end; i++) { samples->n_learned += c->tokens[i] >= 0; }
    samples->padding = pack_rows(rows, c, first, n, path, T, 0, (uint64_t)seed, d->o->pack);
    samples->n_images = rows->images.n;
    samples->n_placeholders = token_images_placeholders(&rows->images);
    rows->n_documents = rows->sources[0].n_documents = n;
}

// The samples of a path become rows of T positions in `rows`, but the last floor(fraction * n) of them, which go to
// `rest`. rows: has its path; measure: of images, NULL: samples with images are left out
static inline void chat_data_read(ChatData* d, TokenData* rows, TokenData* rest, float fraction, const Tokenizer* k,
                                  const ImageMeasure* measure, int T, int seed, int validates) {
    Conversations* c = validates ? &d->from_val : &d->from_train;
    char* path = rows->path;
    conversations_init(c, &d->t, k, T + 1, (Truncate)d->o->truncate);
    c->limit_option = d->is_longest ? NULL : "--seq-len";
    c->last_only = d->o->learn == LEARN_LAST;
    c->choices = chat_options_choices(d->o);
    c->measure = measure;
    d->most_pixels = measure ? measure->most_pixels : 0;
    conversations_read(c, path);
    const int64_t n_rest = (int64_t)((double)fraction * (double)c->n), n = c->n - n_rest;
    if (fraction > 0.0f && n_rest == 0) {
        fail_input("%s, the part of --val-fraction: of %lld conversations none is left for it: give more, or another "
                   "--val-fraction", path, (long long)c->n);
    }
    chat_data_pack_(d, validates ? &d->val : &d->train, rows, c, 0, n, path, T, seed);
    if (n_rest > 0) { chat_data_pack_(d, &d->val, rest, c, n, n_rest, path, T, seed); }
    conversations_drop_tokens(c);
    free(path);
}

static inline void chat_data_close(ChatData* d) {
    if (!d->is_open) { return; }
    conversations_free(&d->from_train);
    conversations_free(&d->from_val);
    chat_template_free(&d->t);
}

// ---- what was read ----

// c: what the samples were read from
static inline void chat_data_box(const ChatData* d, const char* name, const ChatSamples* samples,
                                 const Conversations* c, int64_t n_rows, int T) {
    const int64_t n_out = c->n_lines - c->n;
    box_row(name, "%lld conversation%s in %lld row%s of %d, %.1f%% padding", (long long)samples->n,
            samples->n == 1 ? "" : "s", (long long)n_rows, n_rows == 1 ? "" : "s", T, 100.0 * samples->padding);
    box_row("  learned", "%lld of %lld tokens (%.1f%%), %s", (long long)samples->n_learned,
            (long long)samples->n_tokens, 100.0 * (double)samples->n_learned / (double)samples->n_tokens,
            d->o->learn == LEARN_LAST ? "last answers" : "answers");
    if (samples->n_images > 0) {
        box_row("  images", "%lld, %lld placeholders", (long long)samples->n_images,
                (long long)samples->n_placeholders);
    }
    if (n_out > 0) { box_row("  left out", "%lld of %lld samples", (long long)n_out, (long long)c->n_lines); }
    if (c->n_cut > 0) { box_row("  cut", "%lld samples lost their end", (long long)c->n_cut); }
}

// a row for both splits
static inline void chat_data_box_template(const ChatData* d) {
    const char* typed = strcmp(d->o->chat_template, CHAT_AUTO) == 0 ? "" : " (--chat-template)";
    box_row("chat template", "%s%s", choice_name(CHAT_NAMES, d->t.kind).s,
            d->o->is_recalled ? " (as it was trained)" : typed);
}

// below the box: why samples were left out, by name the first ones
static inline void chat_data_say(const ChatData* d) {
    const Conversations* of[] = {&d->from_train, &d->from_val};
    for (int i = 0; i < 2; i++) {
        if (of[i]->n_lines > of[i]->n) { conversations_say(of[i], stdout); }
    }
}

// what the rows follow from beside the files, by the names of options; null: they are no conversations
static inline json_t* chat_data_to_json(const ChatData* d, const ChatSamples* samples, int T, int seed) {
    if (!d->is_open || samples->n == 0) { return json_null(); }
    return json_pack("{s:I, s:I, s:f, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i}", "samples", (json_int_t)samples->n,
                     "learned", (json_int_t)samples->n_learned, "padding", samples->padding, "chat-template",
                     choice_name(CHAT_NAMES, d->t.kind).s, "learn",
                     d->o->learn == LEARN_LAST ? "last" : "answers", "truncate",
                     choice_name(TRUNCATE_NAMES, d->o->truncate).s, "pack", d->o->pack, "preserve-thinking",
                     d->o->preserve_thinking, "seq-len", T, "seed", seed, "image-max-pixels", d->most_pixels);
}
#endif  // LLMC_CHAT_DATA_H
