/*
Text to tokens and back, with the trainers' own tokenizer:
    make tools
    dev/tools/tokenize --tokenizer qwen/ --out data.bin book.txt corpus/    token shard: what --train of a trainer reads
    dev/tools/tokenize --out data/book --val-fraction 0.1 book.txt    data/book_train_000001.bin, book_val_000000.bin
    echo "Hello world" | dev/tools/tokenize --tokenizer qwen/               9707 1879 198
    echo "9707 1879" | dev/tools/tokenize --tokenizer qwen/ --decode        Hello world
    dev/tools/tokenize --tokenizer qwen/ --chat data.jsonl                  what of conversations is learned
A shard is that of llm.c: uint16 when the vocabulary has at most 65,536 tokens, else uint32 (format: llmc/text/dataloader.h).
End of text stands before each document; a document is a file, or a line of JSON Lines. Files, folders and patterns are
taken as by --train.
With --shard-tokens N or --val-fraction F --out is the beginning of the names that llm.c gives its shards:
_train_000001.bin, _train_000002.bin, ... and _val_000000.bin, ..., each of N tokens but for the last. For validation
stands aside what the trainers' own --val-fraction takes: of each word on the command line the last floor(F * n) of its
n tokens, wherever documents end. All shards are written under their names + ".tmp" and get the names once the last is
whole. Shards that are there are not replaced, for those of two runs would be taken for one data set. Of two processes that
write to one name, one is refused (status 1).
With --chat the first samples of conversations (llmc/text/conversations.h) are printed as the model's chat template has
them, what is learned in colour, or between [[ and ]] where that is no terminal; then how many there are, and why others
are left out. With --seq-len also how they fill rows.
*/
#include "../../llmc/text/pack.h"        // pack_rows; conversations.h
#include "../../llmc/text/dataloader.h"  // file_list_make, tokens_check_text_, JsonLines, file_map; tokenizer.h
#include "../../llmc/files/checkpoint.h"   // checkpoint_newest, checkpoint_folder
#include "../../llmc/core/jsonfile.h"    // json_never_null
#include "../../llmc/core/print.h"       // progress, seconds_now
#include "../../llmc/core/options.h"     // options_parse_words
#include "../../llmc/core/outfile.h"     // temporary_begin, temporary_publish
#include <sys/resource.h>

typedef struct {
    const char *tokenizer, *out, *chat_template;
    int shard_tokens, decode, skip_special, added, use_template;
    int chat, show, max_length, truncate, seq_len, seed;
    float val_fraction;
} Settings;

// ---- names of shards, and what an exit leaves of them ----

typedef struct {
    Temporary* file;  // ours alone until it has its name
    FILE* stream;     // on its descriptor
    int64_t n_tokens;
} Shard;

static void stop(int signal_number) {
    temporaries_remove();
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static void remove_temporaries_at_signals(void) {
    const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    for (int i = 0; i < 3; i++) {
        if (signal(signals[i], stop) == SIG_IGN) { signal(signals[i], SIG_IGN); }  // nohup's wish
    }
}

// ---- a stream of tokens, cut into shards ----

enum { MAX_SHARDS = 999999 };  // six digits: byte order is the order of numbers

typedef struct {
    const char* kind;   // "train" or "val"; "": one shard, under the name that --out gives
    int first_number;
    Shard** shards;
    int n_shards;
    int64_t n_tokens;
} Stream;

typedef struct {
    const Settings* o;
    const OptionWords* inputs;
    int token_bytes;
    int64_t shard_tokens;  // in a shard at most
    Stream train, val;
    int64_t n_bytes, n_documents, n_skipped;
} Output;

static int is_series(const Settings* o) { return o->shard_tokens > 0 || o->val_fraction > 0.0f; }

static void shard_name(char path[PATH_BYTES], const Settings* o, const Stream* s, int i) {
    int n = (int)strlen(o->out);
    if (ends_with(o->out, ".bin")) { n -= 4; }
    const int used = *s->kind ? snprintf(path, PATH_BYTES, "%.*s_%s_%06d.bin", n, o->out, s->kind, s->first_number + i)
                              : snprintf(path, PATH_BYTES, "%s", o->out);
    if (used >= PATH_BYTES) { fail_input("--out: %.40s...: this path is too long", o->out); }
}

// each shard is open until it has its name
static void allow_many_files(void) {
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) { return; }
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
}

// before a shard is made: it takes the place of no file that is read, nor of a shard of another run
static void check_shard_name(const Output* out, const char* path) {
    for (int i = 0; i < out->inputs->n; i++) {
        options_refuse(path_overwrites(path, out->inputs->words[i]), "out",
                       "is a file that is read: give another name");
    }
    if (is_series(out->o) && path_exists(path)) {
        options_fail("out", "%s is there already: give another name, or remove the shards of this one", path);
    }
    outfile_check_kind("out", path, "a token shard");
}

static void stream_failed(const Shard* s) { fail_run("%s: cannot be written: %s", s->file->name, strerror(errno)); }

// the last shard is written as far as it goes
static void stream_flush(Stream* s) {
    const Shard* last = s->n_shards > 0 ? s->shards[s->n_shards - 1] : NULL;
    if (last && (ferror(last->stream) || fflush(last->stream) != 0)) { stream_failed(last); }
}

static void stream_begin_shard(Stream* s, const Output* out) {
    const unsigned char header[1024] = {0};
    char path[PATH_BYTES], parent[PATH_BYTES];
    Shard* shard = (Shard*)malloc_check(sizeof *shard, "shard");
    stream_flush(s);
    if (s->n_shards == MAX_SHARDS) { options_fail("shard-tokens", "%d shards are not enough: give more", MAX_SHARDS); }
    shard_name(path, out->o, s, s->n_shards);
    check_shard_name(out, path);
    make_folder(path_parent(parent, path));
    shard->file = temporary_begin(path);
    shard->stream = fdopen(shard->file->fd, "wb");
    shard->n_tokens = 0;
    if (!shard->stream) { stream_failed(shard); }
    if ((s->n_shards & (s->n_shards - 1)) == 0) {  // a power of two: full
        const size_t n_grown = s->n_shards ? 2 * (size_t)s->n_shards : 1;
        s->shards = (Shard**)realloc_check(s->shards, n_grown * sizeof(Shard*), "list of shards");
    }
    s->shards[s->n_shards++] = shard;
    fwrite(header, 1, sizeof header, shard->stream);  // room; an error is seen by stream_flush
}

// of token_bytes each, as they stand in a shard
static void stream_append(Stream* s, const Output* out, const char* tokens, int64_t n) {
    s->n_tokens += n;
    if (*out->o->out && !*s->kind && s->n_tokens > INT32_MAX) {
        fail_input("%s: more than 2^31 - 1 tokens do not fit in one shard: give --shard-tokens", out->o->out);
    }
    while (*out->o->out && n > 0) {
        const int is_full = s->n_shards > 0 && s->shards[s->n_shards - 1]->n_tokens == out->shard_tokens;
        if (s->n_shards == 0 || is_full) { stream_begin_shard(s, out); }
        Shard* last = s->shards[s->n_shards - 1];
        const int64_t room = out->shard_tokens - last->n_tokens, now = n < room ? n : room;
        fwrite(tokens, (size_t)out->token_bytes, (size_t)now, last->stream);
        last->n_tokens += now;
        tokens += now * out->token_bytes;
        n -= now;
    }
}

static void append_tokens(void* output, const int* tokens, size_t n) {
    Output* out = (Output*)output;
    for (size_t from = 0; from < n; from += 4096) {
        uint16_t narrow[4096];
        const size_t m = n - from < 4096 ? n - from : 4096;
        for (size_t i = 0; i < m; i++) { narrow[i] = (uint16_t)tokens[from + i]; }
        stream_append(&out->train, out, out->token_bytes == 2 ? (const char*)narrow : (const char*)(tokens + from),
                      (int64_t)m);
    }
}

// tokens of a shard from `first` on, to the end of another stream
static void copy_tokens(Stream* to, const Output* out, const Shard* from, int64_t first) {
    char piece[65536];
    const int64_t room = (int64_t)sizeof piece / out->token_bytes;
    for (int64_t at = first, n; at < from->n_tokens; at += n) {
        n = from->n_tokens - at < room ? from->n_tokens - at : room;
        const ssize_t n_bytes = (ssize_t)(n * out->token_bytes);
        if (pread(from->file->fd, piece, (size_t)n_bytes, (off_t)(1024 + at * out->token_bytes)) != n_bytes) {
            fail_run("%s: cannot be read again: %s", from->file->name, strerror(errno));
        }
        stream_append(to, out, piece, n);
    }
}

// the last n tokens for training become tokens for validation, and the next for training follow those before them
static void set_aside(Output* out, int64_t n) {
    Stream* train = &out->train;
    if (n == 0) { return; }
    stream_flush(train);
    int i = train->n_shards - 1;
    int64_t first = train->shards[i]->n_tokens - n;  // in shard i
    while (first < 0) { first += train->shards[--i]->n_tokens; }
    for (int k = i; k < train->n_shards; k++) { copy_tokens(&out->val, out, train->shards[k], k == i ? first : 0); }
    for (; train->n_shards > i + (first > 0); train->n_shards--) {
        Shard* none = train->shards[train->n_shards - 1];
        temporary_drop(none->file);
        fclose(none->stream);
    }
    train->n_tokens -= n;
    if (train->n_shards == 0) { return; }
    Shard* last = train->shards[train->n_shards - 1];
    last->n_tokens = first > 0 ? first : last->n_tokens;
    const off_t end = (off_t)(1024 + last->n_tokens * out->token_bytes);
    if (ftruncate(last->file->fd, end) != 0 || fseeko(last->stream, end, SEEK_SET) != 0) { stream_failed(last); }
}

// headers: now the numbers of tokens are known; then the disk has it
static void stream_finish(Stream* s, const Output* out) {
    stream_flush(s);
    for (int i = 0; i < s->n_shards; i++) {
        const Shard* shard = s->shards[i];
        const int narrow = out->token_bytes == 2;
        const int32_t header[3] = {narrow ? 20240520 : 20240801, narrow ? 1 : 7, (int32_t)shard->n_tokens};
        const int fd = shard->file->fd;
        if (pwrite(fd, header, sizeof header, 0) != sizeof header || fsync(fd) != 0) { stream_failed(shard); }
    }
}

static void stream_publish(Stream* s) {
    for (int i = 0; i < s->n_shards; i++) {
        temporary_publish(s->shards[i]->file);
        fclose(s->shards[i]->stream);
    }
}

// ---- files to shards ----

static void add_document(Output* out, const Tokenizer* t, TokenizerWork* w, const char* text, size_t n_bytes) {
    int eot = tokenizer_need_eot(t), choices = out->o->added ? TOKENIZER_ADDED : 0;
    append_tokens(out, &eot, 1);
    tokenizer_encode_to(t, w, text, n_bytes, choices, append_tokens, out);
    out->n_documents++;
    out->n_bytes += (int64_t)n_bytes;
}

static void add_lines(Output* out, const Tokenizer* t, TokenizerWork* w, const MappedFile* file) {
    JsonLines lines = {file->bytes, file->n_bytes, 0, 0, NULL};
    ErrorText error;
    const char* text;
    size_t n_bytes;
    int found;
    while ((found = json_lines_next(&lines, &text, &n_bytes, &error)) > 0) { add_document(out, t, w, text, n_bytes); }
    if (found < 0) { fail_input("%s:%s", file->path, error.text); }
}

// one file, folder or pattern
static void add_path(Output* out, const Tokenizer* t, TokenizerWork* w, const char* path) {
    FileList list;
    const int64_t n_before = out->train.n_tokens;
    file_list_make(&list, path);
    for (int i = 0; i < list.n; i++) {
        MappedFile file;
        ErrorText error;
        progress(path, i, list.n);
        file_map(&file, list.paths[i]);
        int is_text = tokens_check_text_(file.bytes, file.n_bytes, &error);
        int is_lines = tokens_is_json_lines(file.path);
        if (!is_text && !list.in_folder) { fail_input("%s: %s", file.path, error.text); }
        if (is_text && is_lines) { add_lines(out, t, w, &file); }
        else if (is_text) { add_document(out, t, w, (const char*)file.bytes, file.n_bytes); }
        out->n_skipped += !is_text;
        file_unmap(&file);
    }
    progress(path, list.n, list.n);
    file_list_free(&list);
    const int64_t n = out->train.n_tokens - n_before;
    set_aside(out, (int64_t)((double)out->o->val_fraction * (double)n));  // as tokens_split counts
}

// the end of a noun behind a number
static const char* plural(int64_t n) { return n == 1 ? "" : "s"; }

static void print_stream(const Stream* s, const Output* out) {
    if (s->n_shards == 0) { return; }
    printf(", %s", s->shards[0]->file->path);
    if (s->n_shards > 1) { printf(" to %06d", s->first_number + s->n_shards - 1); }
    if (out->val.n_shards > 0) { printf(" (%lld token%s)", (long long)s->n_tokens, plural(s->n_tokens)); }
}

static void print_summary(const Output* out, double seconds) {
    const int64_t n_tokens = out->train.n_tokens + out->val.n_tokens;
    printf("%lld document%s, %lld byte%s, %lld token%s with end of text, %.3f bytes per token, %.1f MB/s",
           (long long)out->n_documents, plural(out->n_documents), (long long)out->n_bytes, plural(out->n_bytes),
           (long long)n_tokens, plural(n_tokens),
           (double)out->n_bytes / (double)(n_tokens - out->n_documents), 1e-6 * (double)out->n_bytes / seconds);
    if (out->n_skipped) {
        printf(", %lld file%s left out: empty or binary", (long long)out->n_skipped, plural(out->n_skipped));
    }
    print_stream(&out->train, out);
    print_stream(&out->val, out);
    if (*out->o->out) { printf(": uint%d", 8 * out->token_bytes); }
    printf("\n");
}

static void write_shards(const Tokenizer* t, const Settings* o, const OptionWords* files) {
    Output out;
    TokenizerWork w;
    char first_for_validation[PATH_BYTES];
    double start = seconds_now(CLOCK_MONOTONIC);
    tokenizer_need_eot(t);
    tokenizer_work_init(&w, t, 1 << 24);
    memset(&out, 0, sizeof out);
    out.o = o;
    out.inputs = files;
    out.token_bytes = t->n_tokens <= 65536 ? 2 : 4;
    out.shard_tokens = o->shard_tokens > 0 ? o->shard_tokens : INT32_MAX;
    out.train.kind = is_series(o) ? "train" : "";
    out.train.first_number = 1;
    out.val.kind = "val";
    shard_name(first_for_validation, o, &out.val, 0);
    if (o->val_fraction > 0.0f) { check_shard_name(&out, first_for_validation); }
    remove_temporaries_at_signals();
    allow_many_files();
    for (int i = 0; i < files->n; i++) { add_path(&out, t, &w, files->words[i]); }
    if (out.n_documents == 0) {
        fail_input("%s: expected text, found only files that are empty or binary", files->words[0]);
    }
    if (o->val_fraction > 0.0f && (out.train.n_tokens == 0 || out.val.n_tokens == 0)) {
        options_fail("val-fraction", "of %lld tokens none are left for %s: give more text, or another fraction",
                     (long long)(out.train.n_tokens + out.val.n_tokens),
                     out.train.n_tokens == 0 ? "training" : "validation");
    }
    stream_finish(&out.train, &out);
    stream_finish(&out.val, &out);
    stream_publish(&out.train);
    stream_publish(&out.val);
    print_summary(&out, seconds_now(CLOCK_MONOTONIC) - start);
    free(out.train.shards);
    free(out.val.shards);
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

// ---- conversations, and what of them is learned ----

static void print_sample(const Conversations* c, int64_t i, const char* begin, const char* end) {
    TokenStream stream;
    SafeText safe = {stdout, 0};
    size_t n_bytes;
    int n, n_learned = 0, was_learned = 0;
    const int* tokens = conversations_sample(c, i, &n);
    for (int k = 0; k < n; k++) { n_learned += tokens[k] >= 0; }
    printf("sample %lld: %d tokens, %d learned\n", (long long)i + 1, n, n_learned);
    token_stream_init(&stream, c->k, 0);
    for (int k = 0; k < n; k++) {
        const int is_learned = tokens[k] >= 0;
        if (is_learned != was_learned) { printf("%s", is_learned ? begin : end); }
        const char* text = token_stream_put(&stream, conversations_id(tokens[k]), &n_bytes);
        text_print_safe_piece(&safe, text, n_bytes);
        was_learned = is_learned;
    }
    const char* text = token_stream_end(&stream, &n_bytes);
    text_print_safe_piece(&safe, text, n_bytes);
    text_print_safe_end(&safe);
    printf("%s\n\n", was_learned ? end : "");
    token_stream_free(&stream);
}

static void print_rows(const Conversations* c, const Settings* o) {
    TokenData d;
    const double filled = pack_rows(&d, c, 0, c->n, "conversations", o->seq_len, 0, (uint64_t)o->seed, 1);
    const int64_t n_rows = d.n_tokens / o->seq_len;
    printf("in rows of %d positions: %lld row%s, %.3g samples a row, %.1f%% padding\n", o->seq_len, (long long)n_rows,
           plural(n_rows), (double)c->n / (double)n_rows, 100.0 * filled);
    tokens_close(&d);
}

// how many placeholders an image has, only a model knows
static int one_placeholder(void* of, const char* path, ErrorText* error) {
    (void)of, (void)path, (void)error;
    return 1;
}

static void print_chat(const Tokenizer* k, const Settings* o, const OptionWords* files) {
    ChatTemplate t;
    Conversations c;
    char folder[PATH_BYTES];
    const int most = o->max_length > 0 ? o->max_length : o->seq_len > 0 ? o->seq_len + 1 : 0;
    const int colour = isatty(STDOUT_FILENO);
    tokenizer_folder(folder, o->tokenizer);
    const char* trained = *o->chat_template || !*folder ? NULL : checkpoint_option(folder, "chat-template");
    chat_template_open(&t, folder, trained && strcmp(trained, "auto") != 0 ? trained : o->chat_template);
    conversations_init(&c, &t, k, most, (Truncate)o->truncate);
    ImageMeasure measure = {NULL, one_placeholder, 0, 0};
    if (tokenizer_encode_with(k, &c.work, CHAT_IMAGE_PAD, strlen(CHAT_IMAGE_PAD), TOKENIZER_ADDED) == 1) {
        measure.pad = c.work.tokens[0];
        c.measure = &measure;
    }
    for (int i = 0; i < files->n; i++) { conversations_read(&c, files->words[i]); }
    for (int64_t i = 0; i < o->show && i < c.n; i++) {
        print_sample(&c, i, colour ? "\033[1;32m" : "[[", colour ? "\033[0m" : "]]");
    }
    printf("chat template %s%s\n", choice_name(CHAT_NAMES, t.kind).s,
           chat_end(&t, k, &c.work) >= 0 ? "" : ", whose markers are several tokens each to this tokenizer");
    conversations_say(&c, stdout);
    if (c.n_images > 0) {
        printf("%lld image%s, here of one placeholder each: a model has as many as their sizes ask for\n",
               (long long)c.n_images, plural(c.n_images));
    }
    if (o->seq_len > 0) { print_rows(&c, o); }
    conversations_free(&c);
    chat_template_free(&t);
}

// a run has its tokenizer in each checkpoint; what is no run is what it was
static const char* newest_of_run(char folder[PATH_BYTES], const char* name) {
    char file[PATH_BYTES];
    if (!path_is_folder(name) || path_exists(path_join(file, name, "tokenizer.json"))) { return name; }
    const int step = checkpoint_newest(name, -1);
    return step < 0 ? name : checkpoint_folder(folder, name, step);
}

int main(int argc, char** argv) {
    standard_files_open();
    json_never_null();
    Settings o;
    Tokenizer tokenizer;
    char newest[PATH_BYTES];
    Option table[] = {
        {"tokenizer", "tokenizer", "-t", OPTION_TEXT, &o.tokenizer, "bytes", 0, 0, "bytes|FILE|DIR",
         "bytes, a tokenizer.json or the folder it is in, or a run; to decode also llm.c's gpt2_tokenizer.bin", 0},
        {"files to a token shard", "out", "-o", OPTION_TEXT, &o.out, "", 0, 0, "FILE",
         "the shard; none: only count. Its folder is made if need be", 0},
        {"files to a token shard", "shard-tokens", "", OPTION_INT, &o.shard_tokens, "0", 0, INT32_MAX, "N",
         "several shards of at most N tokens: --out x makes x_train_000001.bin, ...; 0: one", 0},
        {"files to a token shard", "val-fraction", "", OPTION_FLOAT, &o.val_fraction, "0", 0, 0.9, "F",
         "the last part of each FILE, FOLDER or PATTERN, as the trainers take it: --out x makes x_train_000001.bin "
         "and x_val_000000.bin", 0},
        {"encoding", "added-tokens", "", OPTION_SWITCH, &o.added, "1", 0, 0, "0|1",
         "cut out special tokens that stand in the text; 0: they are text like any other", 0},
        {"encoding", "template", "", OPTION_SWITCH, &o.use_template, "1", 0, 0, "0|1",
         "of standard input: put the tokens around it that the file asks for (<s>)", 0},
        {"decoding", "decode", "-d", OPTION_SWITCH, &o.decode, "0", 0, 0, "", "ids on standard input to text", 0},
        {"decoding", "skip-special", "", OPTION_SWITCH, &o.skip_special, "0", 0, 0, "", "leave out special tokens", 0},
        {"conversations", "chat", "", OPTION_SWITCH, &o.chat, "0", 0, 0, "",
         "FILEs are conversations: what of them is learned, and which cannot be used", 0},
        {"conversations", "chat-template", "", OPTION_TEXT, &o.chat_template, "", 0, 0, CHAT_NAMES,
         "the chat template; none: that of --tokenizer's folder, or with which its run was trained", 0},
        {"conversations", "show", "", OPTION_INT, &o.show, "1", 0, INT32_MAX, "N", "samples that are printed", 0},
        {"conversations", "max-length", "", OPTION_INT, &o.max_length, "0", 0, INT32_MAX, "N",
         "tokens of a sample at most; 0: one more than --seq-len, or any number", 0},
        {"conversations", "truncate", "", OPTION_CHOICE, &o.truncate, "drop", 0, 0, TRUNCATE_NAMES,
         "of a longer sample: drop it, or its end", 0},
        {"conversations", "seq-len", "", OPTION_INT, &o.seq_len, "0", 0, EXAMPLES_MAX_T, "T",
         "also put them into rows of T positions, several in a row; 0: do not", 0},
        {"conversations", "seed", "", OPTION_INT, &o.seed, "0", 0, INT32_MAX, "N", "of the order in which rows are filled",
         0},
    };
    const int n = sizeof table / sizeof table[0];
    memset(&o, 0, sizeof o);
    OptionWords files = {"[FILE|FOLDER|PATTERN]...", (const char**)malloc_check((size_t)argc * sizeof(char*), "arguments"), 0};
    options_parse_words(table, n, &files, argc, argv,
                        "Text to token ids and back. With files: writes a token shard. Without: encodes standard input and prints "
                        "its ids on one line, or with --decode the text of ids. With --chat: conversations, and what is "
                        "learned of them.");
    const char* of_chat[] = {"chat-template", "show", "max-length", "truncate", "seq-len", "seed"};
    for (int i = 0; i < 6; i++) {
        options_refuse(!o.chat && options_given(table, n, of_chat[i]) == 1, of_chat[i], "is for conversations: give --chat");
    }
    options_refuse(o.chat && files.n == 0, "chat", "expected files of conversations, found none");
    options_refuse(o.chat && (*o.out || o.decode), "chat", "prints what is learned, and is no way to write shards or text");
    if (o.decode && files.n > 0) { options_fail("decode", "expected ids on standard input and no files, found %s", files.words[0]); }
    if (*o.out && files.n == 0) { options_fail("out", "expected files to read, found none"); }
    if (is_series(&o) && !*o.out) {
        options_fail(o.shard_tokens > 0 ? "shard-tokens" : "val-fraction",
                     "needs --out, the beginning of the shards' names");
    }
    for (int i = 0; i < files.n; i++) {
        options_refuse(path_overwrites(o.out, files.words[i]), "out", "is a file that is read: give another name");
    }
    options_refuse(ends_with(o.out, "/") || (*o.out && path_is_folder(o.out) && !is_series(&o)), "out",
                   "expected the name of a shard, found that of a folder");
    o.tokenizer = newest_of_run(newest, o.tokenizer);
    tokenizer_open(&tokenizer, o.tokenizer);
    if (o.chat) {
        print_chat(&tokenizer, &o, &files);
    } else if (files.n > 0) {
        write_shards(&tokenizer, &o, &files);
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
