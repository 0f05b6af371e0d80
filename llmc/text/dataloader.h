/*
Token data and the rows a model learns from.
TokenData is one split: token shards or examples mapped from disk, or text turned into tokens in memory. A path can be
    a file that ends in .bin or begins with a shard's magic number: a shard (below)
    a file that ends in .safetensors or begins as one: examples, rows with targets of their own (examples.h)
    a file that ends in .jsonl, in small letters or capitals: JSON Lines, each a document (jsonlines.h), wherever it
    stands; with other content it is refused, for raw JSON would be trained on otherwise, and nothing would say so
    any other file: text in UTF-8, one document
    a pattern (*, ?, []): the files it matches, names in byte order, all of one kind
    a folder, walked as filelist.h says: text, unless every file found in it ends in .bin (shards) or .safetensors
    (examples)
    several of these, separated by commas: sources. Each is of one kind; text and shards may stand together where their
    tokens take as many bytes. Weights, books.txt:3,code/:1, make a mixture of them (below)
In a folder, empty files and binary ones (a NUL or invalid UTF-8 in the first 64 KiB) are passed over.
Each document is preceded by end of text. Named directly, a binary or empty file is refused.
tokens_open_numbers reads a file of decimal numbers (numbers.h), or all with one extension of a folder, each a shard.
    offset   size    meaning of a shard (llm.c), little-endian
    0        4       magic 20240520 (GPT-2, uint16 tokens) or 20240801 (Llama 3, uint32 tokens); one kind per data set
    4        4       version 1 (GPT-2) or 7 (Llama 3)
    8        4       number of tokens n
    12       1012    0
    1024     2n, 4n  tokens; the file ends with the last
Tokens of text take 2 bytes each, or 4 where the tokenizer has more than 65536 of them; those of numbers 2 where all
fit.
Opening reads every token once and finds vocab_size_needed, so that an id outside the model is refused before step one.
DataLoader cuts rows of T inputs and T targets (the inputs shifted by one): row r is the tokens r*T .. r*T+T of a shard,
the next row begins with the last target (stride T), or with the token after it (stride T+1). An example is a row as it
is.
Rows never cross a shard, nor a source; they do cross documents (documents.h). Which row has which index:
    ORDER_FILE      as they lie in the files
    ORDER_ROWS      permute_index(key, epoch, index in the epoch, rows): another order in each epoch
    ORDER_SHARDS    shards in the order permute_index(key, epoch, place, shards), rows of a shard as they lie in it
    ORDER_STREAMS   n_streams rows side by side, for a state that is carried from row to row: the rows are cut into
                    n_streams contiguous parts, and index i is row i / n_streams of part i % n_streams; rows that remain
                    are left out
Without weights an epoch has every row of every source once. With weights w an epoch has as many rows, N in all, but a
weight is the share of them that its source gives: of the places 0..N-1 of an epoch, source s has those from
floor(N*(w_0+..+w_(s-1))/W + 1/2) on, W the sum of all, which are q_s places. ORDER_ROWS permutes the places as if they
were rows, ORDER_FILE takes them as they are. Place p of epoch e is draw e*q_s + p - (its first place) of its source,
and draw d of a source with n_s rows is its row permute_index(splitmix64(key, s), d / n_s, d % n_s, n_s), with
ORDER_FILE row d % n_s. So a source with more weight than rows is repeated, each time in another order; one with less
goes on in the next epoch where it stopped, and each of its rows has come once before one comes again.
All of it is a pure function of (key, index): any rank of any number of ranks can ask for any row, and resuming needs
only the index.
Cost:   opening is one pass at the speed of memory or disk; a row is O(T + shards), with ORDER_SHARDS one permute_index
        for each shard before it: 5 us a row with 30 shards, 50 us with 3000; no array of row numbers exists. Weights:
        one permute_index more.
        prefetch.h has rows read from disk while something else is computed.
Errors: fail_input for all that a file, folder or option can get wrong; fail_run when a shard changes while in use.
Source: shard formats of karpathy/llm.c; cycle walking: Black & Rogaway 2002, Ciphers with Arbitrary Finite Domains.
*/
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H
#include "../core/fail.h"
#include "../core/print.h"    // progress
#include "../core/mapfile.h"  // MappedFile, file_map, file_unmap, file_looks_like, ErrorText, error_set
#include "../core/rng.h"      // splitmix64
#include "examples.h"         // Examples, examples_parse, examples_is_file_
#include "filelist.h"         // FileList, file_list_make
#include "jsonlines.h"        // JsonLines, json_lines_next
#include "numbers.h"          // Numbers, numbers_parse, numbers_take
#include "pathlist.h"         // PathList, path_list_make
#include "row_images.h"       // TokenImages, token_images_in
#include "tokenizer.h"        // Tokenizer, tokenizer_encode_to; utf8_decode
#include <assert.h>
#include <xxhash.h>

typedef struct {
    const char* path;     // file or folder, for messages
    const void* tokens;   // n_tokens of TokenData's token_bytes each
    int64_t n_tokens;
    int mapped;           // they lie in a mapped file, which may not be in memory yet
    const void* targets;  // of examples, n_tokens int32, not aligned; NULL: the targets are the tokens one further
} TokenShard;

typedef struct {
    char* path;                  // file, pattern or folder
    double weight;               // beside those of the other sources; 0: there are no weights
    int first_shard, n_shards;   // its shards lie together
    int64_t n_tokens, n_documents;
} TokenSource;

typedef struct {
    char* path;             // as the user gave it
    TokenSource* sources;   // one for each path in it
    int n_sources;
    TokenShard* shards;     // the text of a source is one shard
    int n_shards;
    int token_bytes;        // 2: uint16, 4: uint32
    int64_t n_tokens;       // in all shards; of examples, their positions
    int64_t n_documents;    // text: files read; else 0, the files do not say
    int examples_T;         // positions of an example; 0: no examples, rows are as long as one likes
    int vocab_size_needed;  // 1 + largest token id, of examples the largest input
    int classes_needed;     // 1 + largest target: for tokens vocab_size_needed
    MappedFile* files;      // the mapped shards; n_files is 0 for text and for the second half of a split
    int n_files;
    int replaced_said;      // the warning that one of them has another file in its place
    void* text;             // tokens of text, token_bytes each, or NULL
    int64_t n_text, text_capacity;  // tokens in it, and for which there is room
    void* numbers;          // tokens of numbers, token_bytes each, or NULL
    FileList number_files;  // the shards show its names
    TokenImages images;     // of conversations, in their rows; of other data there are none
    int64_t n_bytes_read, n_bytes_total;  // of the files, while opening: for the progress bar
} TokenData;

// ---- 1. Shards and examples ----

static inline int tokens_is_shard_(const unsigned char* bytes, size_t n_bytes) {
    int32_t magic = 0;
    if (n_bytes >= 4) { memcpy(&magic, bytes, 4); }
    return magic == 20240520 || magic == 20240801;
}

// by memcpy, for examples may lie at any address
static inline uint32_t tokens_at_(const void* tokens, int token_bytes, int64_t i) {
    uint16_t narrow;
    uint32_t wide;
    if (token_bytes == 4) { return *(uint32_t*)memcpy(&wide, (const char*)tokens + 4 * i, 4); }
    return *(uint16_t*)memcpy(&narrow, (const char*)tokens + 2 * i, 2);
}

// 1 + the largest id, 0 when there are no tokens; 0.2 ns per token
static inline int64_t tokens_vocab_needed_(const void* tokens, int token_bytes, int64_t n_tokens) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n_tokens; i++) {
        uint32_t token = tokens_at_(tokens, token_bytes, i);
        largest = token > largest ? token : largest;
    }
    return n_tokens > 0 ? (int64_t)largest + 1 : 0;
}

// position of the first token >= limit; there is one
static inline int64_t tokens_first_beyond_(const void* tokens, int token_bytes, int64_t limit) {
    int64_t i = 0;
    while (tokens_at_(tokens, token_bytes, i) < limit) { i++; }
    return i;
}

// A shard's bytes (4-aligned), without an exit: 1 with shard, token_bytes and vocab_size set, or 0 with the reason.
static inline int tokens_parse_shard_(TokenShard* shard, int* token_bytes, int* vocab_size, const unsigned char* bytes,
                                      size_t n_bytes, ErrorText* error) {
    int32_t header[3];  // magic, version, number of tokens
    if (n_bytes < 1024 || !tokens_is_shard_(bytes, n_bytes)) {
        const char* other = file_looks_like(bytes, n_bytes);
        if (other) { return error_set(error, "expected a token shard, found %s", other); }
        if (n_bytes < 1024) {
            return error_set(error, "expected a token shard, a header of 1024 bytes, found a file of %zu bytes",
                             n_bytes);
        }
        memcpy(header, bytes, 4);
        return error_set(error, "expected a token shard, magic number 20240520 (GPT-2) or 20240801 (Llama 3), found %d",
                         header[0]);
    }
    memcpy(header, bytes, sizeof header);
    int version = header[0] == 20240520 ? 1 : 7;
    *token_bytes = header[0] == 20240520 ? 2 : 4;
    if (header[1] != version) {
        return error_set(error, "expected version %d of token shards, found %d", version, header[1]);
    }
    if (header[2] < 0) {
        return error_set(error, "expected a number of tokens below 2^31 at offset 8, found %d", header[2]);
    }
    size_t expected = 1024 + (size_t)header[2] * (size_t)*token_bytes;
    if (n_bytes != expected) {
        return error_set(error,
                         "expected %zu bytes for the header's %d tokens, found a file of %zu: copy or download it "
                         "again, or make it anew", expected, header[2], n_bytes);
    }
    shard->tokens = bytes + 1024;
    shard->n_tokens = header[2];
    int64_t needed = tokens_vocab_needed_(shard->tokens, *token_bytes, shard->n_tokens);
    if (needed > INT_MAX) {
        int64_t at = tokens_first_beyond_(shard->tokens, *token_bytes, INT_MAX);
        return error_set(error, "expected token ids below 2^31 - 1, found %u at offset %lld",
                         tokens_at_(shard->tokens, *token_bytes, at), (long long)(1024 + at * *token_bytes));
    }
    *vocab_size = (int)needed;
    return 1;
}

static inline TokenShard* tokens_add_shard_(TokenData* d, const TokenShard* shard) {
    d->shards = (TokenShard*)realloc_check(d->shards, (size_t)(d->n_shards + 1) * sizeof(TokenShard), "list of shards");
    d->shards[d->n_shards] = *shard;
    return &d->shards[d->n_shards++];
}

// those of the source that was added last are the shards that follow
static inline TokenSource* tokens_add_source_(TokenData* d, const char* path, double weight) {
    TokenSource source = {string_copy(path), weight, d->n_shards, 0, 0, 0};
    d->sources = (TokenSource*)realloc_check(d->sources, (size_t)(d->n_sources + 1) * sizeof source, "list of sources");
    d->sources[d->n_sources] = source;
    return &d->sources[d->n_sources++];
}

// counts the shards of the source that was added last
static inline void tokens_end_source_(TokenData* d) {
    TokenSource* s = &d->sources[d->n_sources - 1];
    s->n_shards = d->n_shards - s->first_shard;
    for (int i = s->first_shard; i < d->n_shards; i++) { s->n_tokens += d->shards[i].n_tokens; }
}

static inline void tokens_keep_file_(TokenData* d, const MappedFile* file) {
    d->files = (MappedFile*)realloc_check(d->files, (size_t)(d->n_files + 1) * sizeof(MappedFile), "list of shards");
    d->files[d->n_files++] = *file;
}

static inline void tokens_open_shard_(TokenData* d, const MappedFile* file) {
    ErrorText error;
    int token_bytes = 0, vocab_size = 0;
    tokens_keep_file_(d, file);
    TokenShard shard = {file->path, NULL, 0, 1, NULL};
    if (!tokens_parse_shard_(&shard, &token_bytes, &vocab_size, file->bytes, file->n_bytes, &error)) {
        fail_input("%s: %s", file->path, error.text);
    }
    tokens_add_shard_(d, &shard);
    if (d->token_bytes != 0 && token_bytes != d->token_bytes) {
        fail_input("%s: expected %d-byte tokens as in %s, found %d-byte tokens: use one tokenizer's shards", file->path,
                   d->token_bytes, d->shards[0].path, token_bytes);
    }
    d->token_bytes = token_bytes;
    d->n_tokens += shard.n_tokens;
    if (vocab_size > d->vocab_size_needed) { d->vocab_size_needed = d->classes_needed = vocab_size; }
}

// inputs are the tokens of a shard
static inline void tokens_open_examples_(TokenData* d, const MappedFile* file) {
    ErrorText error;
    Examples e;
    tokens_keep_file_(d, file);
    if (!examples_parse(&e, file->bytes, file->n_bytes, &error)) { fail_input("%s: %s", file->path, error.text); }
    if (d->examples_T > 0 && d->examples_T != e.T) {
        fail_input("%s: expected rows of %d positions as in %s, found %d", file->path, d->examples_T, d->shards[0].path,
                   e.T);
    }
    TokenShard shard = {file->path, e.inputs, e.n * e.T, 1, e.targets};
    tokens_add_shard_(d, &shard);
    d->token_bytes = 4;
    d->examples_T = e.T;
    d->n_tokens += shard.n_tokens;
    if (e.vocab_size_needed > d->vocab_size_needed) { d->vocab_size_needed = e.vocab_size_needed; }
    if (e.classes_needed > d->classes_needed) { d->classes_needed = e.classes_needed; }
}

// ---- 2. Text ----

// 1 for UTF-8 text without NUL, judged by its first 64 KiB; 0 with the reason for anything else
static inline int tokens_check_text_(const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    size_t n = n_bytes < 65536 ? n_bytes : 65536, at = 0;
    if (n_bytes == 0) { return error_set(error, "expected text, found an empty file"); }
    const char* other = file_looks_like(bytes, n_bytes);
    if (other && strstr(other, "Git LFS")) { return error_set(error, "expected text, found %s", other); }
    while (at < n) {
        uint32_t code;
        int cut, length = utf8_decode(bytes + at, n - at, &code, &cut), is_text = length > 0 && code != 0;
        if (cut && n < n_bytes) { break; }  // a character across the 64 KiB line
        if (!is_text && other) { return error_set(error, "expected text, found %s", other); }
        if (!is_text) {
            return error_set(error,
                             "expected UTF-8 text, found byte 0x%02x at offset %zu: binary, or text in another "
                             "encoding (convert it with iconv)", bytes[at], at);
        }
        at += (size_t)length;
    }
    return 1;
}

// By its name alone: a file that says it is JSON Lines and is not would else be learned, brackets and all
static inline int tokens_is_json_lines(const char* path) {
    const size_t n = strlen(path);
    return n >= 6 && strcasecmp(path + n - 6, ".jsonl") == 0;
}

static inline void tokens_reserve_text_(TokenData* d, int64_t n_more) {
    if (n_more <= d->text_capacity - d->n_text) { return; }
    int64_t grown = d->text_capacity + d->text_capacity / 2, needed = d->n_text + n_more;
    d->text_capacity = grown > needed ? grown : needed;
    memory_need((size_t)(d->text_capacity - d->n_text) * (size_t)d->token_bytes, "tokens of the text");
    d->text = realloc_check(d->text, (size_t)d->text_capacity * (size_t)d->token_bytes, "tokens of the text");
}

static inline void tokens_append_text_(void* data, const int* tokens, size_t n) {
    TokenData* d = (TokenData*)data;
    tokens_reserve_text_(d, (int64_t)n);
    for (size_t i = 0; i < n; i++) {
        int64_t at = d->n_text++;
        if (d->token_bytes == 2) { ((uint16_t*)d->text)[at] = (uint16_t)tokens[i]; }
        else { ((uint32_t*)d->text)[at] = (uint32_t)tokens[i]; }
    }
}

// one document: end of text, then its tokens, which are never all together in memory as ints. n_left: bytes of its file
// from its beginning on
static inline void tokens_add_text_(TokenData* d, const char* text, size_t n_text, size_t n_left,
                                    const Tokenizer* tokenizer) {
    size_t piece = tokenizer->cut_anywhere ? 1 << 20 : n_text;
    TokenizerWork work;
    tokenizer_work_init(&work, tokenizer, n_text);
    tokens_append_text_(d, &tokenizer->eot, 1);
    for (size_t at = 0; at < n_text; at += piece) {
        size_t n_bytes = n_text - at < piece ? n_text - at : piece;
        progress("tokenising text", d->n_bytes_read - (int64_t)(n_left - at), d->n_bytes_total);
        tokenizer_encode_to(tokenizer, &work, text + at, n_bytes, TOKENIZER_ADDED, tokens_append_text_, d);
    }
    tokenizer_work_free(&work);
    d->n_documents++;
}

// after its last byte was read: what became tokens may be half old and half new
static inline void tokens_check_read_(const MappedFile* file) {
    if (file_changed(file)) {
        fail_run("%s: changed while it was being read: wait until its writer is done, then start again", file->path);
    }
}

static inline void tokens_add_lines_(TokenData* d, const MappedFile* file, const Tokenizer* tokenizer) {
    JsonLines lines = {file->bytes, file->n_bytes, 0, 0, NULL};
    ErrorText error;
    const char* text;
    size_t n_text;
    int found;
    while ((found = json_lines_next(&lines, &text, &n_text, &error)) > 0) {
        tokens_add_text_(d, text, n_text, file->n_bytes - lines.at + n_text, tokenizer);
    }
    if (found < 0) { fail_input("%s:%s", file->path, error.text); }
}

static inline void tokens_open_text_(TokenData* d, const MappedFile* file, const Tokenizer* tokenizer, int in_folder) {
    ErrorText error;
    assert(tokenizer);
    if (tokens_check_text_(file->bytes, file->n_bytes, &error)) {
        if (tokenizer->eot < 0) {
            fail_input("%s: text needs a tokenizer with an end of text, which stands before each document: this one "
                       "(%s) has none; use token shards, or another --tokenizer", file->path, tokenizer->kind);
        }
        const int token_bytes = tokenizer->n_tokens > 65536 ? 4 : 2;
        if (d->token_bytes != 0 && token_bytes != d->token_bytes) {
            fail_input("%s: expected text whose tokens take %d bytes as those of %s, found %d with this tokenizer "
                       "(%s): use one tokenizer for all", file->path, d->token_bytes, d->shards[0].path, token_bytes,
                       tokenizer->kind);
        }
        d->token_bytes = token_bytes;
        if (tokens_is_json_lines(file->path)) { tokens_add_lines_(d, file, tokenizer); }
        else { tokens_add_text_(d, (const char*)file->bytes, file->n_bytes, file->n_bytes, tokenizer); }
    } else if (!in_folder) {
        fail_input("%s: %s", file->path, error.text);
    }
}

// the shards of text, which say where they begin once all of it is read
static inline void tokens_finish_text_(TokenData* d) {
    // no spare room
    d->text = realloc_check(d->text, (size_t)d->n_text * (size_t)d->token_bytes, "tokens of the text");
    d->text_capacity = d->n_text;
    const char* tokens = (const char*)d->text;
    for (int i = 0; i < d->n_shards; i++) {
        if (d->shards[i].tokens) { continue; }
        d->shards[i].tokens = tokens;
        tokens += d->shards[i].n_tokens * d->token_bytes;
    }
    const int vocab_size = (int)tokens_vocab_needed_(d->text, d->token_bytes, d->n_text);
    if (vocab_size > d->vocab_size_needed) { d->vocab_size_needed = d->classes_needed = vocab_size; }
}

// ---- 3. Numbers ----

// the files directly in `folder` whose names end in a dot and `extension`, in byte order
static inline void tokens_list_extension_(FileList* list, const char* folder, const char* extension) {
    struct dirent** entries;
    memset(list, 0, sizeof *list);
    int n = scandir(folder, &entries, NULL, file_list_compare_);
    if (n < 0) { fail_input("%s: cannot be listed: %s", folder, strerror(errno)); }
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name, *dot = strrchr(name, '.');
        if (dot && name[0] != '.' && strcmp(dot + 1, extension) == 0) {
            char* path = path_joined(folder, name);
            file_list_add_(list, path);
            free(path);
        }
        free(entries[i]);
    }
    free(entries);
    if (list->n == 0) { fail_input("%s: expected files that end in .%s, found none", folder, extension); }
}

// the tokens of one file; its shard says where they begin once all files are read
static inline void tokens_add_numbers_(TokenData* d, const MappedFile* file, Numbers* list, const char* path) {
    ErrorText error;
    TokenShard shard = {path, NULL, -list->n, 0, NULL};
    if (!numbers_parse(list, file->bytes, file->n_bytes, &error)) { fail_input("%s:%s", file->path, error.text); }
    shard.n_tokens += list->n;
    if (shard.n_tokens == 0) { fail_input("%s: expected token ids in decimal, found an empty file", file->path); }
    tokens_add_shard_(d, &shard);
}

static inline void tokens_finish_numbers_(TokenData* d, Numbers* list) {
    d->n_tokens = list->n;
    d->vocab_size_needed = d->classes_needed = (int)list->largest + 1;
    d->numbers = numbers_take(list, &d->token_bytes);
    const char* tokens = (const char*)d->numbers;
    for (int i = 0; i < d->n_shards; i++) {
        d->shards[i].tokens = tokens;
        tokens += d->shards[i].n_tokens * d->token_bytes;
    }
}

// ---- 4. TokenData ----

typedef enum { TEXT_FILE, SHARD_FILE, EXAMPLES_FILE } TokenFileKind;

static inline TokenFileKind tokens_file_kind_(const MappedFile* file) {
    if (ends_with(file->path, ".bin") || tokens_is_shard_(file->bytes, file->n_bytes)) { return SHARD_FILE; }
    int is_examples = ends_with(file->path, ".safetensors") || examples_is_file_(file->bytes, file->n_bytes);
    return is_examples ? EXAMPLES_FILE : TEXT_FILE;
}

// of a folder's files, by their names alone: a binary file in a folder of text is passed over
static inline TokenFileKind tokens_folder_kind_(const FileList* list) {
    int n_shards = 0, n_examples = 0;
    for (int i = 0; i < list->n; i++) {
        n_shards += ends_with(list->paths[i], ".bin");
        n_examples += ends_with(list->paths[i], ".safetensors");
    }
    return n_shards == list->n ? SHARD_FILE : n_examples == list->n ? EXAMPLES_FILE : TEXT_FILE;
}

static inline void tokens_refuse_mixed_(const char* path, TokenFileKind found, TokenFileKind first) {
    const char *one[] = {"text", "a token shard", "examples"}, *many[] = {"text", "shards", "examples"};
    if (found == first) { return; }
    fail_input("%s: expected %s like the files before, found %s: give %s or %s, not both", path, one[first], one[found],
               many[found < first ? found : first], many[found < first ? first : found]);
}

static inline int64_t tokens_bytes_of_files_(const FileList* list) {
    int64_t n_bytes = 0;
    for (int i = 0; i < list->n; i++) {
        struct stat status;
        n_bytes += stat(list->paths[i], &status) == 0 ? status.st_size : 0;  // file_map says what is wrong
    }
    return n_bytes;
}

// examples stand beside examples only
static inline void tokens_refuse_source_(const TokenData* d, const char* path, TokenFileKind kind) {
    const int is_first = d->n_sources == 1, has_examples = d->examples_T > 0;
    if (is_first || (kind == EXAMPLES_FILE) == has_examples) { return; }
    tokens_refuse_mixed_(path, kind, has_examples ? EXAMPLES_FILE : d->n_text > 0 ? TEXT_FILE : SHARD_FILE);
}

// the files of one source, which stand in `list`
static inline void tokens_open_source_(TokenData* d, const WeightedPath* path, const FileList* list,
                                       const Tokenizer* tokenizer) {
    const TokenFileKind of_folder = tokens_folder_kind_(list);
    const int64_t n_text = d->n_text, n_documents = d->n_documents;
    TokenSource* source = tokens_add_source_(d, path->path, path->weight);
    TokenFileKind first = TEXT_FILE;
    for (int i = 0; i < list->n; i++) {
        MappedFile file;
        file_map(&file, list->paths[i]);
        TokenFileKind kind = list->in_folder ? of_folder : tokens_file_kind_(&file);
        first = i == 0 ? kind : first;
        tokens_refuse_mixed_(file.path, kind, first);
        if (i == 0) { tokens_refuse_source_(d, file.path, kind); }
        d->n_bytes_read += (int64_t)file.n_bytes;
        if (kind == TEXT_FILE) {
            tokens_open_text_(d, &file, tokenizer, list->in_folder);
            tokens_check_read_(&file);
            file_unmap(&file);
            continue;
        }
        // the shards keep the mapping
        if (kind == SHARD_FILE) { tokens_open_shard_(d, &file); } else { tokens_open_examples_(d, &file); }
        progress("reading tokens", d->n_bytes_read, d->n_bytes_total);
    }
    source->n_documents = d->n_documents - n_documents;
    if (d->n_text > n_text) {
        TokenShard shard = {source->path, NULL, d->n_text - n_text, 0, NULL};
        d->n_tokens += tokens_add_shard_(d, &shard)->n_tokens;
    }
    tokens_end_source_(d);
    if (source->n_shards > 0) { return; }
    if (list->n == 0) {
        fail_input("%s: expected text or token shards, found a folder without a file that counts (doc/data.md)",
                   path->path);
    }
    fail_input("%s: expected text or token shards, found %d file%s, all empty or binary", path->path, list->n,
               list->n > 1 ? "s" : "");
}

// path: or several, with weights or without; tokenizer: for text, NULL where only shards can come
static inline void tokens_open(TokenData* d, const char* path, const Tokenizer* tokenizer) {
    PathList paths;
    FileList lists[MAX_PATHS];
    memset(d, 0, sizeof *d);
    d->path = string_copy(path);
    path_list_make(&paths, path);
    for (int i = 0; i < paths.n; i++) {  // what is not there is missed before the first is read
        file_list_make(&lists[i], paths.of[i].path);
        d->n_bytes_total += tokens_bytes_of_files_(&lists[i]);
    }
    for (int i = 0; i < paths.n; i++) { tokens_open_source_(d, &paths.of[i], &lists[i], tokenizer); }
    progress("", d->n_bytes_total, d->n_bytes_total);
    if (d->n_text > 0) { tokens_finish_text_(d); }
    for (int i = 0; i < paths.n; i++) { file_list_free(&lists[i]); }
    path_list_free(&paths);
}

// Token ids as decimal numbers: one file, or with an extension ("txt") all files of a folder that have it, in byte
// order, each a shard. Files that begin as token shards are opened as such.
static inline void tokens_open_numbers(TokenData* d, const char* path, const char* extension) {
    Numbers numbers;
    TokenFileKind first = TEXT_FILE;
    memset(d, 0, sizeof *d);
    FileList* list = &d->number_files;
    memset(&numbers, 0, sizeof numbers);
    d->path = string_copy(path);
    if (extension) { tokens_list_extension_(list, path, extension); } else { file_list_add_(list, path); }
    numbers.n_bytes_total = tokens_bytes_of_files_(list);
    tokens_add_source_(d, path, 0.0);
    for (int i = 0; i < list->n; i++) {
        MappedFile file;
        file_map(&file, list->paths[i]);
        TokenFileKind kind = tokens_is_shard_(file.bytes, file.n_bytes) ? SHARD_FILE : TEXT_FILE;
        first = i == 0 ? kind : first;
        tokens_refuse_mixed_(file.path, kind, first);
        if (kind == SHARD_FILE) {
            tokens_open_shard_(d, &file);
        } else {
            tokens_add_numbers_(d, &file, &numbers, list->paths[i]);
            tokens_check_read_(&file);
            file_unmap(&file);
        }
    }
    progress("", 1, 1);
    if (first == TEXT_FILE) { tokens_finish_numbers_(d, &numbers); }
    tokens_end_source_(d);
}

// the first mapped file that somebody has written to since, or NULL; a warning for each that another has replaced
static inline const char* tokens_changed(TokenData* d) {
    for (int i = 0; i < d->n_files; i++) {
        if (file_changed(&d->files[i])) { return d->files[i].path; }
        if (d->replaced_said || !file_replaced(&d->files[i])) { continue; }
        d->replaced_said = 1;
        warn_line("%s: removed, or replaced by another file: this run goes on with what it opened, --resume will not",
                  d->files[i].path);
    }
    return NULL;
}

// was a mapped file touched since it was opened, or since the last question? Asked when none of them is changed
static inline int tokens_touched(TokenData* d) {
    int touched = 0;
    for (int i = 0; i < d->n_files; i++) { touched |= file_touched(&d->files[i]); }
    return touched;
}

// Of a split, close val before train: it looks into train's storage.
static inline void tokens_close(TokenData* d) {
    for (int i = 0; i < d->n_files; i++) { file_unmap(&d->files[i]); }
    for (int i = 0; i < d->n_sources; i++) { free(d->sources[i].path); }
    free(d->sources);
    free(d->files);
    free(d->shards);
    free(d->text);
    free(d->numbers);
    file_list_free(&d->number_files);
    token_images_free(&d->images);
    free(d->path);
    memset(d, 0, sizeof *d);
}

// of one source: train keeps its first n_train tokens, as shards from n_kept on, and val takes the others
static inline void tokens_split_source_(TokenData* train, TokenData* val, TokenSource* source, int64_t n_train,
                                        int n_kept) {
    const int first = source->first_shard, end = first + source->n_shards;
    int64_t n_seen = 0;
    source->first_shard = n_kept;
    for (int i = first; i < end; i++) {
        TokenShard whole = train->shards[i];
        int64_t left = n_train - n_seen;  // what train may still keep
        int64_t keep = left < 0 ? 0 : left < whole.n_tokens ? left : whole.n_tokens;
        n_seen += whole.n_tokens;
        if (keep < whole.n_tokens) {
            TokenShard* rest = tokens_add_shard_(val, &whole);
            rest->tokens = (const char*)whole.tokens + keep * train->token_bytes;
            rest->targets = whole.targets ? (const char*)whole.targets + 4 * keep : NULL;
            rest->n_tokens -= keep;
        }
        whole.n_tokens = keep;
        if (keep > 0) { train->shards[n_kept++] = whole; }
    }
    source->n_shards = n_kept - source->first_shard;
    source->n_tokens = n_train;
}

// Of each source val takes the last floor(fraction * n) of its n tokens or examples, train keeps the others; no token
// is copied. val has no weights: it is all of it, once.
static inline void tokens_split(TokenData* train, TokenData* val, float fraction) {
    if (!(fraction >= 0.0f && fraction < 1.0f)) {
        fail_input("--val-fraction: expected a number from 0 to below 1, found %g", (double)fraction);
    }
    const int64_t unit = train->examples_T > 0 ? train->examples_T : 1;
    int n_kept = 0;
    memset(val, 0, sizeof *val);
    val->path = string_copy(train->path);
    val->token_bytes = train->token_bytes;
    val->examples_T = train->examples_T;
    val->vocab_size_needed = train->vocab_size_needed;
    val->classes_needed = train->classes_needed;
    for (int i = 0; i < train->n_sources; i++) {
        TokenSource* source = &train->sources[i];
        const int64_t n_units = source->n_tokens / unit, n_val = (int64_t)((double)fraction * (double)n_units);
        tokens_add_source_(val, source->path, 0.0);
        tokens_split_source_(train, val, source, unit * (n_units - n_val), n_kept);
        tokens_end_source_(val);
        n_kept += source->n_shards;
        val->n_tokens += unit * n_val;
    }
    train->n_shards = n_kept;
    train->n_tokens -= val->n_tokens;
}

// stop unless every token id is below vocab_size; `what` says whose that is ("the model", "--tokenizer bytes")
static inline void tokens_check_vocab(const TokenData* d, int vocab_size, const char* what) {
    for (int i = 0; i < d->n_shards && d->vocab_size_needed > vocab_size; i++) {
        const TokenShard* s = &d->shards[i];
        if (tokens_vocab_needed_(s->tokens, d->token_bytes, s->n_tokens) > vocab_size) {
            int64_t at = tokens_first_beyond_(s->tokens, d->token_bytes, vocab_size);
            fail_input("%s: expected token ids below %d, the vocabulary of %s, found %u at token %lld", s->path,
                       vocab_size, what, tokens_at_(s->tokens, d->token_bytes, at), (long long)at);
        }
    }
}

// the same for the targets of examples: classes below n_classes
static inline void tokens_check_classes(const TokenData* d, int n_classes, const char* what) {
    for (int i = 0; i < d->n_shards && d->examples_T > 0 && d->classes_needed > n_classes; i++) {
        const TokenShard* s = &d->shards[i];
        int64_t at = 0;
        while (at < s->n_tokens && examples_id_(s->targets, at) < n_classes) { at++; }
        if (at < s->n_tokens) {
            fail_input("%s: expected targets below %d, the classes of %s, found %d at position %lld of example %lld",
                       s->path, n_classes, what, examples_id_(s->targets, at), (long long)(at % d->examples_T),
                       (long long)(at / d->examples_T));
        }
    }
}

static inline int tokens_source_contains_(const TokenData* d, const TokenSource* source, int token) {
    for (int i = 0; i < source->n_shards; i++) {
        const TokenShard* s = &d->shards[source->first_shard + i];
        for (int64_t at = 0; at < s->n_tokens; at++) {
            if (tokens_at_(s->tokens, d->token_bytes, at) == (uint32_t)token) { return 1; }
        }
    }
    return 0;
}

// the first source without this token, or NULL; reads of each up to the first one, everything when there is none
static inline const char* tokens_lack(const TokenData* d, int token) {
    for (int i = 0; i < d->n_sources; i++) {
        if (!tokens_source_contains_(d, &d->sources[i], token)) { return d->sources[i].path; }
    }
    return NULL;
}

// bytes of memory that the tokens of text and numbers take; what is mapped takes none
static inline double tokens_memory(const TokenData* d) {
    return (double)(d->numbers ? d->n_tokens : d->text_capacity) * d->token_bytes;
}

static inline void tokens_checksum_add_(XXH3_state_t* state, const void* ids, int64_t n_bytes, int64_t* n_done,
                                        int64_t n_total) {
    const int64_t piece = 1 << 26;  // bytes between two looks at the clock
    for (int64_t at = 0; at < n_bytes; at += piece) {
        int64_t n = n_bytes - at < piece ? n_bytes - at : piece;
        XXH3_64bits_update(state, (const char*)ids + at, (size_t)n);
        progress("checksum of the tokens", *n_done += n, n_total);
    }
}

static inline uint64_t tokens_checksum_shards_(const TokenData* d, const TokenShard* shards, int n_shards) {
    int64_t n_done = 0, n_total = 0;
    XXH3_state_t* state = XXH3_createState();
    if (!state || XXH3_64bits_reset(state) != XXH_OK) { fail_run("checksum of the tokens: no memory"); }
    for (int i = 0; i < n_shards; i++) { n_total += shards[i].n_tokens * (d->examples_T > 0 ? 8 : d->token_bytes); }
    for (int i = 0; i < n_shards; i++) {
        tokens_checksum_add_(state, shards[i].tokens, shards[i].n_tokens * d->token_bytes, &n_done, n_total);
    }
    for (int i = 0; i < n_shards && d->examples_T > 0; i++) {
        tokens_checksum_add_(state, shards[i].targets, shards[i].n_tokens * 4, &n_done, n_total);
    }
    uint64_t hash = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return hash;
}

// XXH3 (64 bits, seed 0) of the tokens alone as stored, little-endian, 2 or 4 bytes each, in the order of the shards:
// no headers, no names, and where one shard ends and the next begins does not matter. Of examples all inputs, then all
// targets. At the speed of memory.
static inline uint64_t tokens_checksum(const TokenData* d) {
    return tokens_checksum_shards_(d, d->shards, d->n_shards);
}

// XXH3 of what rows are cut from, for they never cross a shard: the positions of an example, 0 for tokens, and the
// length of each shard, as int64
static inline uint64_t tokens_checksum_lengths(const TokenData* d) {
    int64_t* lengths = (int64_t*)malloc_check(sizeof(int64_t) * ((size_t)d->n_shards + 1), "lengths of shards");
    lengths[0] = d->examples_T;
    for (int i = 0; i < d->n_shards; i++) { lengths[i + 1] = d->shards[i].n_tokens; }
    const uint64_t sum = XXH3_64bits(lengths, sizeof(int64_t) * ((size_t)d->n_shards + 1));
    free(lengths);
    return sum;
}

// tokens_checksum of one source
static inline uint64_t tokens_checksum_source(const TokenData* d, const TokenSource* source) {
    return tokens_checksum_shards_(d, d->shards + source->first_shard, source->n_shards);
}

// ---- 5. Order: a keyed permutation that is computed, not stored ----

// every bit of the result depends on every bit of x, and no two x share a result (Stafford's mix 13, of splitmix64)
static inline uint64_t permute_mix_(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// Where index i of 0..n-1 goes in this epoch: a bijection of [0, n), another for each (key, epoch).
// A Feistel network of 8 rounds permutes the 4^k numbers of 2k bits, 4^k >= n, at least 2^8; a number that lands at n
// or beyond is sent through again until it lands below (its cycle does, at the latest at i itself).
// Cost: about 4^k / n walks, below 4 for n > 64.
static inline int64_t permute_index(uint64_t key, uint64_t epoch, int64_t i, int64_t n) {
    const uint64_t golden = 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio, splitmix64's step
    assert(i >= 0 && i < n);
    int half = 4;  // k
    while (half < 32 && (uint64_t)1 << (2 * half) < (uint64_t)n) { half++; }
    uint64_t mask = ((uint64_t)1 << half) - 1, epoch_key = permute_mix_(permute_mix_(key + golden) + epoch),
             x = (uint64_t)i;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 1; round <= 8; round++) {
            uint64_t mixed = left ^ (permute_mix_((epoch_key + round * golden) ^ right) & mask);
            left = right;
            right = mixed;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

// ---- 6. Rows ----

typedef enum { ORDER_FILE, ORDER_ROWS, ORDER_SHARDS, ORDER_STREAMS } RowOrder;

// the rows of a source among all, and with weights its places in an epoch
typedef struct {
    int64_t first_row, n_rows;
    int64_t first_place, n_places;
} RowSource;

typedef struct {
    const TokenData* data;
    int T;
    int stride;      // tokens from the start of a row to the start of the next one: T, or T+1
    RowOrder order;
    int n_streams;   // 1 unless ORDER_STREAMS
    uint64_t key;
    int64_t n_rows;  // per epoch
    int is_weighted;
    RowSource sources[MAX_PATHS];  // as many as the data has
} DataLoader;

// an example needs T tokens, a row of others one more, its last target
static inline int64_t dataloader_shard_rows_(const DataLoader* l, const TokenShard* shard) {
    int needed = shard->targets ? l->T : l->T + 1;
    return shard->n_tokens < needed ? 0 : (shard->n_tokens - needed) / l->stride + 1;
}

// is it the second half of a split?
static inline int tokens_is_part(const TokenData* d) { return !d->text && !d->numbers && d->n_files == 0; }

// all data, or one source
static inline void dataloader_too_short_(const DataLoader* l, const char* path, int first_shard, int n_shards) {
    const TokenData* d = l->data;
    int64_t longest = 0;
    for (int i = first_shard; i < first_shard + n_shards; i++) {
        longest = d->shards[i].n_tokens > longest ? d->shards[i].n_tokens : longest;
    }
    const char* part = tokens_is_part(d) ? ", the part of --val-fraction" : "";
    if (d->examples_T > 0) {
        fail_input("%s%s: no examples are left for it: give more, or another --val-fraction", path, part);
    }
    fail_input("%s%s: too short: a row of --seq-len %d needs %lld tokens in one piece, the longest piece has %lld: "
               "give more text or a smaller --seq-len", path, part, l->T, (long long)l->T + 1, (long long)longest);
}

// the rows of each source; one without any would be left out without a word, unless it is the part of a small source
static inline void dataloader_count_sources_(DataLoader* l) {
    const TokenData* d = l->data;
    int64_t n_rows = 0;
    for (int s = 0; s < d->n_sources; s++) {
        const TokenSource* source = &d->sources[s];
        RowSource* rows = &l->sources[s];
        memset(rows, 0, sizeof *rows);
        rows->first_row = n_rows;
        for (int i = 0; i < source->n_shards; i++) {
            rows->n_rows += dataloader_shard_rows_(l, &d->shards[source->first_shard + i]);
        }
        n_rows += rows->n_rows;
        if (rows->n_rows == 0 && !tokens_is_part(d)) {
            dataloader_too_short_(l, source->path, source->first_shard, source->n_shards);
        }
    }
}

// the places of each source in an epoch
static inline void dataloader_weigh_(DataLoader* l) {
    const TokenData* d = l->data;
    double sum = 0.0, before = 0.0;
    int64_t place = 0;
    for (int s = 0; s < d->n_sources; s++) { sum += d->sources[s].weight; }
    for (int s = 0; s < d->n_sources; s++) {
        const double weight = d->sources[s].weight;
        before += weight;
        int64_t end = s == d->n_sources - 1 ? l->n_rows : (int64_t)floor((double)l->n_rows * before / sum + 0.5);
        l->sources[s].first_place = place;
        l->sources[s].n_places = end - place;
        if (end == place) {
            fail_input("%s: its weight %g of %g gives it none of the %lld rows of an epoch: give it more, or leave it "
                       "out", d->sources[s].path, weight, sum, (long long)l->n_rows);
        }
        place = end;
    }
}

// stride: T or T+1, of examples T. T must be that of examples. n_streams: for ORDER_STREAMS
static inline void dataloader_init_rows(DataLoader* l, const TokenData* d, int T, int stride, RowOrder order,
                                        int n_streams, uint64_t key) {
    assert(T > 0 && n_streams > 0 && (stride == T || (stride == T + 1 && d->examples_T == 0)));
    if (d->examples_T > 0 && d->examples_T != T) {
        fail_input("%s: expected examples of %d positions, found %d", d->path, T, d->examples_T);
    }
    l->data = d;
    l->T = T;
    l->stride = stride;
    l->order = order;
    l->n_streams = order == ORDER_STREAMS ? n_streams : 1;
    l->key = key;
    l->n_rows = 0;
    for (int i = 0; i < d->n_shards; i++) { l->n_rows += dataloader_shard_rows_(l, &d->shards[i]); }
    if (l->n_rows == 0) { dataloader_too_short_(l, d->path, 0, d->n_shards); }
    dataloader_count_sources_(l);
    l->is_weighted = d->n_sources > 0 && d->sources[0].weight > 0.0;
    assert(!l->is_weighted || order == ORDER_ROWS || order == ORDER_FILE);
    if (l->is_weighted) { dataloader_weigh_(l); }
    if (l->n_rows < l->n_streams) {
        fail_input("%s: too short: %d streams side by side need %d rows of --seq-len %d, found %lld: give more text or "
                   "a smaller --batch-size or --seq-len", d->path, l->n_streams, l->n_streams, T, (long long)l->n_rows);
    }
    l->n_rows -= l->n_rows % l->n_streams;
}

static inline void dataloader_init(DataLoader* l, const TokenData* d, int T, RowOrder order, uint64_t key) {
    dataloader_init_rows(l, d, T, T, order, 1, key);
}

// the row at a place of an epoch, where sources have weights
static inline int64_t dataloader_mixed_row_(const DataLoader* l, int64_t epoch, int64_t place) {
    int s = 0;
    while (place >= l->sources[s].first_place + l->sources[s].n_places) { s++; }
    const RowSource* source = &l->sources[s];
    const int64_t n = source->n_rows, draw = epoch * source->n_places + place - source->first_place;
    const int64_t row = l->order == ORDER_FILE
                            ? draw % n
                            : permute_index(splitmix64(l->key, (uint64_t)s), (uint64_t)(draw / n), draw % n, n);
    return source->first_row + row;
}

// where row `index`, counted through all epochs, begins: its shard and its first token there
static inline const TokenShard* dataloader_find_(const DataLoader* l, int64_t index, int64_t* first) {
    assert(index >= 0);
    const TokenData* d = l->data;
    int64_t epoch = index / l->n_rows, row = index % l->n_rows;
    if (l->order == ORDER_ROWS) { row = permute_index(l->key, (uint64_t)epoch, row, l->n_rows); }
    if (l->is_weighted) { row = dataloader_mixed_row_(l, epoch, row); }
    if (l->order == ORDER_STREAMS) { row = row % l->n_streams * (l->n_rows / l->n_streams) + row / l->n_streams; }
    for (int64_t place = 0;; place++) {
        int64_t i = l->order == ORDER_SHARDS ? permute_index(l->key, (uint64_t)epoch, place, d->n_shards) : place;
        int64_t n_rows = dataloader_shard_rows_(l, &d->shards[i]);
        if (row < n_rows) {
            *first = row * l->stride;
            return &d->shards[i];
        }
        row -= n_rows;
    }
}

// Does nothing come before row `index`, so that a carried state must be zero? With streams only their first row in each
// epoch.
static inline int dataloader_stream_begins(const DataLoader* l, int64_t index) {
    return l->order != ORDER_STREAMS || index % l->n_rows < l->n_streams;
}

// every id was seen at the start
static inline void dataloader_check_(const TokenShard* shard, uint32_t largest, int limit, const char* what) {
    if (largest >= (uint32_t)limit) {
        fail_run("%s: changed while in use: %s %u after a check that found ids below %d", shard->path, what, largest,
                 limit);
    }
}

static inline void dataloader_example_(const DataLoader* l, const TokenShard* shard, int64_t first, int* inputs,
                                       int* targets) {
    uint32_t largest_input = 0, largest_target = 0;
    memcpy(inputs, (const char*)shard->tokens + 4 * first, sizeof(int) * (size_t)l->T);
    memcpy(targets, (const char*)shard->targets + 4 * first, sizeof(int) * (size_t)l->T);
    for (int t = 0; t < l->T; t++) {
        uint32_t input = (uint32_t)inputs[t], target = targets[t] >= 0 ? (uint32_t)targets[t] : 0;
        largest_input = input > largest_input ? input : largest_input;
        largest_target = target > largest_target ? target : largest_target;
    }
    dataloader_check_(shard, largest_input, l->data->vocab_size_needed, "token");
    dataloader_check_(shard, largest_target, l->data->classes_needed, "target");
}

// Row `index`, counted through all epochs: T inputs, and as targets the token after each, or an example's own. Pure in
// (key, index).
static inline void dataloader_row(const DataLoader* l, int64_t index, int* inputs, int* targets) {
    const TokenData* d = l->data;
    int64_t first;
    const TokenShard* shard = dataloader_find_(l, index, &first);
    uint32_t largest = 0;
    if (shard->targets) {
        dataloader_example_(l, shard, first, inputs, targets);
        return;
    }
    for (int t = 0; t <= l->T; t++) {
        uint32_t token = tokens_at_(shard->tokens, d->token_bytes, first + t);
        largest = token > largest ? token : largest;
        if (t < l->T) { inputs[t] = (int)token; }
        if (t > 0) { targets[t - 1] = (int)token; }
    }
    dataloader_check_(shard, largest, d->vocab_size_needed, "token");
}

// The images in row `index`, counted through all epochs: *n of them; the placeholders of each begin in the column
// position - *first. Of packed conversations, which lie in one shard
static inline const RowImage* dataloader_images(const DataLoader* l, int64_t index, int64_t* first, int64_t* n) {
    dataloader_find_(l, index, first);
    return token_images_in(&l->data->images, *first, *first + l->T, n);
}

// rows first..first+B-1 as a batch: inputs, targets (B, T)
static inline void dataloader_batch(const DataLoader* l, int64_t first, int B, int* inputs, int* targets) {
    for (int b = 0; b < B; b++) { dataloader_row(l, first + b, inputs + (size_t)b * l->T, targets + (size_t)b * l->T); }
}

// Targets in rows first..first+n_rows-1 that count, those of examples that are not negative: so that every rank knows
// the divisor of an update. O(1) for tokens, else O(n_rows * T).
static inline int64_t dataloader_counted(const DataLoader* l, int64_t first, int64_t n_rows) {
    int64_t n_counted = 0, begin;
    if (l->data->examples_T == 0) { return n_rows * l->T; }
    for (int64_t index = first; index < first + n_rows; index++) {
        const TokenShard* shard = dataloader_find_(l, index, &begin);
        for (int t = 0; t < l->T; t++) { n_counted += examples_id_(shard->targets, begin + t) >= 0; }
    }
    return n_counted;
}

typedef struct {
    char* begin;  // of a page
    size_t n_bytes;
} PageRange;

static inline PageRange dataloader_page_range_(const char* begin, size_t n_bytes, size_t page) {
    size_t before = (uintptr_t)begin % page;
    PageRange pages = {(char*)begin - before, (before + n_bytes + page - 1) / page * page};
    return pages;
}

// The pages of row `index`, and of its targets if it is an example; returns how many ranges, 0 for text and numbers,
// which are in memory. A mapping begins and ends with a page, so these lie in it.
static inline int dataloader_pages_(const DataLoader* l, int64_t index, size_t page, PageRange pages[2]) {
    int64_t first;
    const TokenShard* shard = dataloader_find_(l, index, &first);
    const size_t token_bytes = (size_t)l->data->token_bytes, T = (size_t)l->T;
    if (!shard->mapped) { return 0; }
    const char* begin = (const char*)shard->tokens + first * l->data->token_bytes;
    pages[0] = dataloader_page_range_(begin, (shard->targets ? T : T + 1) * token_bytes, page);
    if (!shard->targets) { return 1; }
    pages[1] = dataloader_page_range_((const char*)shard->targets + 4 * first, 4 * T, page);
    return 2;
}

// For prefetch.h: rows first..first+B-1 are read from disk now, and nobody waits. About a microsecond a row when all is
// in memory. It is a wish: nothing depends on it.
static inline void dataloader_ask_pages_(const DataLoader* l, int64_t first, int B) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int b = 0; b < B; b++) {
        PageRange pages[2];
        int n = dataloader_pages_(l, first + b, page, pages);
        for (int i = 0; i < n; i++) { madvise(pages[i].begin, pages[i].n_bytes, MADV_WILLNEED); }
    }
}
#endif  // LLMC_DATALOADER_H
