/*
Text to tokens and back, with the trainers' own tokenizer:
    make tools
    dev/tools/tokenize --tokenizer qwen/ --out data.bin book.txt corpus/    token shard: what --train of a trainer reads
    echo "Hello world" | dev/tools/tokenize --tokenizer qwen/               9707 1879 198
    echo "9707 1879" | dev/tools/tokenize --tokenizer qwen/ --decode        Hello world
A shard is that of llm.c: uint16 when the vocabulary has at most 65,536 tokens, else uint32 (format: llmc/text/dataloader.h).
End of text stands before each document; a document is a file. Files, folders and patterns are taken as by --train.
*/
#include "../../llmc/text/dataloader.h"  // file_list_make, tokens_check_text_, tokens_is_json_lines_, file_map; tokenizer.h
#include "../../llmc/core/print.h"       // progress, seconds_now
#include "../../llmc/core/options.h"     // options_parse_words
#include "../../llmc/core/outfile.h"     // temporary_path, file_publish

typedef struct {
    const char *tokenizer, *out;
    int decode, skip_special, added, use_template;
} Settings;

// ---- files to a shard ----

typedef struct {
    FILE* file;  // NULL: only count
    const char* path;
    int token_bytes;
    int64_t n_tokens, n_bytes, n_documents, n_skipped;
} Shard;

static char temporary[PATH_BYTES];  // of the shard that is being written, "" before and after; an exit in between removes it
static void remove_temporary(void) {
    if (*temporary) { remove(temporary); }
}

static void shard_begin(Shard* s, const char* path, int n_vocabulary) {
    const unsigned char header[1024] = {0};
    memset(s, 0, sizeof *s);
    s->path = path;
    s->token_bytes = n_vocabulary <= 65536 ? 2 : 4;
    if (!*path) { return; }
    char name[PATH_BYTES];
    s->file = fopen(temporary_path(name, path), "wb");
    if (!s->file) { fail_run("%s: cannot be created: %s", name, strerror(errno)); }
    strcpy(temporary, name);
    atexit(remove_temporary);
    fwrite(header, 1, sizeof header, s->file);  // room; an error is seen by shard_end
}

static void shard_append(Shard* s, const int* tokens, int n) {
    s->n_tokens += n;
    if (s->n_tokens > INT32_MAX) {
        fail_input("%s: more than 2^31 - 1 tokens do not fit in one shard: give fewer files at a time", s->path);
    }
    for (int from = 0; s->file && from < n; from += 4096) {
        uint16_t narrow[4096];
        int m = n - from < 4096 ? n - from : 4096;
        for (int i = 0; i < m; i++) { narrow[i] = (uint16_t)tokens[from + i]; }
        const void* from_tokens = s->token_bytes == 2 ? (const void*)narrow : (const void*)(tokens + from);
        fwrite(from_tokens, (size_t)s->token_bytes, (size_t)m, s->file);
    }
}

static void shard_end(Shard* s) {
    if (!s->file) { return; }
    int32_t header[3] = {s->token_bytes == 2 ? 20240520 : 20240801, s->token_bytes == 2 ? 1 : 7, (int32_t)s->n_tokens};
    int failed = fseek(s->file, 0, SEEK_SET) != 0 || fwrite(header, 4, 3, s->file) != 3 || ferror(s->file) ||
                 fflush(s->file) != 0 || fsync(fileno(s->file)) != 0;
    int number = errno;
    failed = fclose(s->file) != 0 || failed;
    if (failed) { fail_run("%s: cannot be written: %s", s->path, strerror(number)); }
    file_publish(temporary, s->path);
    *temporary = '\0';
}

static void add_document(Shard* s, const Tokenizer* t, TokenizerWork* w, const Settings* o, const MappedFile* file) {
    int eot = tokenizer_need_eot(t), choices = o->added ? TOKENIZER_ADDED : 0;
    shard_append(s, &eot, 1);
    int n = tokenizer_encode_with(t, w, (const char*)file->bytes, file->n_bytes, choices);
    shard_append(s, w->tokens, n);
    s->n_documents++;
    s->n_bytes += (int64_t)file->n_bytes;
}

// one file, folder or pattern
static void add_path(Shard* s, const Tokenizer* t, TokenizerWork* w, const Settings* o, const char* path) {
    FileList list;
    file_list_make(&list, path);
    for (int i = 0; i < list.n; i++) {
        MappedFile file;
        ErrorText error;
        progress(path, i, list.n);
        file_map(&file, list.paths[i]);
        int is_text = tokens_check_text_(file.bytes, file.n_bytes, &error);
        if (is_text && !list.in_folder && tokens_is_json_lines_(file.path, file.bytes, file.n_bytes)) {
            is_text = error_set(&error, "expected text, found JSON Lines: convert it to text, one file for each document");
        }
        if (!is_text && !list.in_folder) { fail_input("%s: %s", file.path, error.text); }
        if (is_text) { add_document(s, t, w, o, &file); }
        s->n_skipped += !is_text;
        file_unmap(&file);
    }
    progress(path, list.n, list.n);
    file_list_free(&list);
}

static void write_shard(const Tokenizer* t, const Settings* o, const OptionWords* files) {
    Shard shard;
    TokenizerWork w;
    double start = seconds_now(CLOCK_MONOTONIC);
    tokenizer_need_eot(t);
    tokenizer_work_init(&w, t, 1 << 24);
    shard_begin(&shard, o->out, t->n_tokens);
    for (int i = 0; i < files->n; i++) { add_path(&shard, t, &w, o, files->words[i]); }
    if (shard.n_documents == 0) {
        fail_input("%s: expected text, found only files that are empty or binary", files->words[0]);
    }
    shard_end(&shard);
    double seconds = seconds_now(CLOCK_MONOTONIC) - start;
    printf("%lld documents, %lld bytes, %lld tokens with end of text, %.3f bytes per token, %.1f MB/s", (long long)shard.n_documents,
           (long long)shard.n_bytes, (long long)shard.n_tokens, (double)shard.n_bytes / (double)(shard.n_tokens - shard.n_documents),
           1e-6 * (double)shard.n_bytes / seconds);
    if (shard.n_skipped) { printf(", %lld files left out: empty or binary", (long long)shard.n_skipped); }
    if (*o->out) { printf(", %s: uint%d", o->out, 8 * shard.token_bytes); }
    printf("\n");
    tokenizer_work_free(&w);
}

// ---- standard input to standard output ----

static void read_input(ByteBuffer* text) {
    for (size_t n = 1; n > 0; text->n += n) {
        buffer_reserve(text, 65536);
        n = fread(text->bytes + text->n, 1, text->capacity - text->n, stdin);
    }
    if (ferror(stdin)) { fail_run("standard input: %s", strerror(errno)); }
}

static void print_ids(const Tokenizer* t, const Settings* o, const ByteBuffer* text) {
    TokenizerWork w;
    tokenizer_work_init(&w, t, text->n);
    int choices = (o->added ? TOKENIZER_ADDED : 0) | (o->use_template ? TOKENIZER_TEMPLATE : 0);
    int n = tokenizer_encode_with(t, &w, (const char*)text->bytes, text->n, choices);
    for (int i = 0; i < n; i++) { printf(i > 0 ? " %d" : "%d", w.tokens[i]); }
    printf("\n");
    tokenizer_work_free(&w);
}

// ids with white space between them to text, as it becomes certain
static void print_text(const Tokenizer* t, const Settings* o, ByteBuffer* text) {
    TokenStream stream;
    size_t n_bytes;
    buffer_append(text, "", 1);  // a 0 at the end
    token_stream_init(&stream, t, o->skip_special);
    char *at = (char*)text->bytes, *end = at + text->n - 1;
    for (;;) {
        while (at < end && isspace((unsigned char)*at)) { at++; }
        if (at == end) { break; }
        char* next;
        errno = 0;
        long id = strtol(at, &next, 10);
        if (next == at || (next < end && !isspace((unsigned char)*next)) || errno || id < 0 || id >= t->n_tokens) {
            fail_input("--decode: expected ids 0..%d, found \"%.*s\" at byte %td", t->n_tokens - 1, (int)fmin(40, (double)strcspn(at, " \t\r\n")),
                       at, at - (char*)text->bytes);
        }
        at = next;
        const char* more = token_stream_put(&stream, (int)id, &n_bytes);
        fwrite(more, 1, n_bytes, stdout);
    }
    const char* more = token_stream_end(&stream, &n_bytes);
    fwrite(more, 1, n_bytes, stdout);
    token_stream_free(&stream);
}

int main(int argc, char** argv) {
    standard_files_open();
    Settings o;
    Tokenizer tokenizer;
    Option table[] = {
        {"tokenizer", "tokenizer", "-t", OPTION_TEXT, &o.tokenizer, "bytes", 0, 0, "bytes|FILE|DIR",
         "bytes, a tokenizer.json or the folder it is in; to decode also llm.c's gpt2_tokenizer.bin", 0},
        {"files to a token shard", "out", "-o", OPTION_TEXT, &o.out, "", 0, 0, "FILE", "the shard; none: only count", 0},
        {"encoding", "added-tokens", "", OPTION_SWITCH, &o.added, "1", 0, 0, "0|1",
         "cut out special tokens that stand in the text; 0: they are text like any other", 0},
        {"encoding", "template", "", OPTION_SWITCH, &o.use_template, "1", 0, 0, "0|1",
         "of standard input: put the tokens around it that the file asks for (<s>)", 0},
        {"decoding", "decode", "-d", OPTION_SWITCH, &o.decode, "0", 0, 0, "", "ids on standard input to text", 0},
        {"decoding", "skip-special", "", OPTION_SWITCH, &o.skip_special, "0", 0, 0, "", "leave out special tokens", 0},
    };
    const int n = sizeof table / sizeof table[0];
    memset(&o, 0, sizeof o);
    OptionWords files = {"[FILE|FOLDER|PATTERN]...", (const char**)malloc_check((size_t)argc * sizeof(char*), "arguments"), 0};
    options_parse_words(table, n, &files, argc, argv,
                        "Text to token ids and back. With files: writes a token shard. Without: encodes standard input and prints "
                        "its ids on one line, or with --decode the text of ids.");
    if (o.decode && files.n > 0) { options_fail("decode", "expected ids on standard input and no files, found %s", files.words[0]); }
    if (*o.out && files.n == 0) { options_fail("out", "expected files to read, found none"); }
    for (int i = 0; i < files.n; i++) {
        options_refuse(path_overwrites(o.out, files.words[i]), "out", "is a file that is read: give another name");
    }
    tokenizer_open(&tokenizer, o.tokenizer);
    if (files.n > 0) {
        write_shard(&tokenizer, &o, &files);
    } else {
        ByteBuffer text = {NULL, 0, 0};
        read_input(&text);
        if (o.decode) { print_text(&tokenizer, &o, &text); } else { print_ids(&tokenizer, &o, &text); }
        buffer_free(&text);
    }
    if (fflush(stdout) != 0 || ferror(stdout)) { fail_run("standard output: %s", strerror(errno)); }
    tokenizer_free(&tokenizer);
    options_free(table, n);
    free(files.words);
    return 0;
}
