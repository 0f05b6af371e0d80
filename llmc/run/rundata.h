/*
The data of a run: what it trains on, what it validates with, and the examples it answers.
    data_open    opens --train and --val, or takes --val-fraction of the training data for validation
    data_options, data_open_more   its further options, and data_open for them, where a trainer also reads numbers and
                                   examples (examples.h) or carries its state from row to row
    data_seq_len the positions of a row: --seq-len, or what the examples have
    data_is_chat, data_read_chat   are the data conversations (chat_data.h)? Their rows, once the positions are known
    data_separator        the token with which documents begin, or -1 where the model does not look at them
    data_tokenizer_fits   is the tokenizer the model's?
    data_check_tokenizer  refuses text for a model whose tokenizer nobody named
    data_check_documents  refuses --doc-reset and --doc-sep for data in which no document begins
    data_sums             what the tokens are when a run begins, for data_changed and --resume
    data_changed          a file of theirs that somebody has written to since it was opened, or NULL
    data_plan    checks them against the model; rows of T positions, and the number of steps where --steps is 0
Errors: fail_input, before anything is computed.
*/
#ifndef LLMC_RUNDATA_H
#define LLMC_RUNDATA_H
#include "../text/dataloader.h"  // TokenData, DataLoader
#include "../text/hellaswag.h"   // HellaSwag
#include "chat_data.h"           // ChatData
#include "run_options.h"         // RunOptions, run_plan_steps

// ---- options of a trainer that takes more than token shards and text ----

typedef struct {
    const char *token_file, *token_dir, *val_token_file, *val_token_dir, *shard_ext;
    int shuffle_shards, packed_sequences, carry_state, doc_sep;
    int prefetch_workers, prefetch_buffer;  // for prefetch.h
} RunDataOptions;

// appends the rows to the n of a table; returns how many there are now
static inline int data_options(Option* t, int n, RunDataOptions* x) {
    const Option rows[] = {
        {"more data", "token-file", "", OPTION_TEXT, &x->token_file, "", 0, 0, "FILE",
         "instead of --train: token ids as decimal numbers with blanks between (or one token shard)",
         OPTION_READS | OPTION_TRAINS},
        {"more data", "token-dir", "", OPTION_TEXT, &x->token_dir, "", 0, 0, "DIR",
         "instead of --train: all files of this folder that end in --shard-ext, each like --token-file",
         OPTION_READS | OPTION_FOLDER | OPTION_TRAINS},
        {"more data", "val-token-file", "", OPTION_TEXT, &x->val_token_file, "", 0, 0, "FILE",
         "the same instead of --val", OPTION_READS | OPTION_VALIDATES},
        {"more data", "val-token-dir", "", OPTION_TEXT, &x->val_token_dir, "", 0, 0, "DIR",
         "the same instead of --val", OPTION_READS | OPTION_FOLDER | OPTION_VALIDATES},
        {"more data", "shard-ext", "", OPTION_TEXT, &x->shard_ext, "txt", 0, 0, "EXT",
         "how the names of --token-dir and --val-token-dir end, after the last dot", 0},
        {"more data", "shuffle-shards", "", OPTION_SWITCH, &x->shuffle_shards, "0", 0, 0, "0|1",
         "shards in random order, another in each epoch, the rows of a shard as they lie in it; 0: --shuffle "
         "decides", 0},
        {"more data", "packed-sequences", "", OPTION_SWITCH, &x->packed_sequences, "1", 0, 0, "0|1",
         "a row begins with the last target of the row before; 0: with the token after it", 0},
        {"more data", "carry-state", "", OPTION_SWITCH, &x->carry_state, "0", 0, 0, "0|1",
         "the state goes on from row to row: as many parts of the data are read side by side, in file order, as an"
         " update has rows; on one rank only", 0},
        {"more data", "doc-sep", "", OPTION_INT, &x->doc_sep, "-1", -1, INT_MAX - 1, "ID",
         "the state starts anew at this token; -1: nowhere, unless --doc-reset says so", 0},
        {"more data", "prefetch-workers", "", OPTION_INT, &x->prefetch_workers, "0", 0, 256, "N",
         "threads that make batches ahead; 0: each is made when it is needed. The batches do not depend on it", 0},
        {"more data", "prefetch-buffer", "", OPTION_INT, &x->prefetch_buffer, "16", 1, 65536, "N",
         "micro-batches that they make ahead", 0},
    };
    return options_append(t, n, rows, (int)(sizeof rows / sizeof rows[0]));
}

// ---- the data ----

typedef struct {
    TokenData train, val;  // without shards where there is none
    DataLoader train_rows, val_rows;
    ChatData chat;         // of conversations
    HellaSwag examples;    // of --hellaswag
    const RunDataOptions* more;  // NULL: of a trainer without them
    int is_chat;           // train and val are conversations
    RowOrder order;        // of the training data
    int has_sums;
    uint64_t train_sum, val_sum;  // checksums of the tokens, as they were opened
    int has_image_sums;           // rank 0, while training:
    uint64_t train_images, val_images;  // checksums of the images of conversations (same_data.h), 0: there are none
} RunData;

static inline int has_data(const TokenData* d) { return d->path != NULL; }

// conversations: their rows are not made before the model has said how many positions it has
static inline int data_is_chat(const RunData* d) { return d->is_chat; }

static inline void data_refuse_examples_(const TokenData* d) {
    if (has_data(d) && d->examples_T > 0) {
        fail_input("%s: expected text or token shards, found examples, rows with targets of their own: this trainer "
                   "has no use "
                   "for them",
                   d->path);
    }
}

// train is open, and val if it has a source of its own
static inline void data_split_(RunData* d, const RunOptions* o) {
    if (has_data(&d->train) && !has_data(&d->val) && o->val_fraction > 0.0f) {
        tokens_split(&d->train, &d->val, o->val_fraction);
    }
}

// option --name names several paths: may they have weights?
static inline void data_refuse_weights_(const char* name, const char* text, const char* why) {
    PathList paths;
    path_list_make(&paths, text);
    if (paths.of[0].weight > 0.0) { options_fail(name, "expected paths without weights, found %s: %s", text, why); }
    path_list_free(&paths);
}

// option --name; of conversations the path alone
static inline void data_open_path_(RunData* d, TokenData* data, const char* name, const char* path,
                                   const Tokenizer* tokenizer) {
    if (!*path) { return; }
    if (chat_data_is(d->chat.o, name, path)) {
        d->is_chat = 1;
        data->path = string_copy(path);
        return;
    }
    tokens_open(data, path, tokenizer);
    if (d->is_chat) {
        options_fail(name, "expected conversations as in %s, found texts or tokens in %s", d->train.path, path);
    }
}

static inline void data_open(RunData* d, const RunOptions* o, const Tokenizer* tokenizer) {
    data_refuse_weights_("val", o->val, "validation takes all of each source, once");
    data_open_path_(d, &d->train, "train", o->train, tokenizer);
    const int is_text = has_data(&d->train) && !d->is_chat;
    data_open_path_(d, &d->val, "val", o->val, tokenizer);
    if (is_text && d->is_chat) {
        options_fail("val", "expected texts or tokens as in %s, found conversations in %s", o->train, o->val);
    }
    d->order = o->shuffle ? ORDER_ROWS : ORDER_FILE;
    if (d->is_chat) { return; }
    data_refuse_examples_(&d->train);
    data_refuse_examples_(&d->val);
    data_split_(d, o);
}

// T: positions of a row; folder: of the tokenizer, "" where it has none; measure: of images, or NULL
static inline void data_read_chat(RunData* d, const RunOptions* o, const Tokenizer* tokenizer,
                                  const ImageMeasure* measure, int T, const char* folder) {
    const int splits = has_data(&d->train) && !has_data(&d->val);
    if (!d->is_chat) { return; }
    options_refuse(o->doc_reset, "doc-reset", "is for documents: each conversation begins anew without it");
    chat_data_open(&d->chat, folder);
    if (has_data(&d->val)) { chat_data_read(&d->chat, &d->val, NULL, 0.0f, tokenizer, measure, T, o->seed, 1); }
    if (has_data(&d->train)) {
        const float fraction = splits ? o->val_fraction : 0.0f;
        chat_data_read(&d->chat, &d->train, &d->val, fraction, tokenizer, measure, T, o->seed, 0);
    }
}

// Which option names the data (purpose: OPTION_TRAINS or OPTION_VALIDATES): one that is typed wins over what a
// checkpoint brought back. NULL: none.
static inline const Option* data_source_(const Option* table, int n, int purpose) {
    const Option* source = NULL;
    int n_typed = 0;
    for (int i = 0; i < n; i++) { n_typed += *option_path(&table[i], purpose) && table[i].flags & OPTION_TYPED; }
    for (int i = 0; i < n; i++) {
        const Option* row = &table[i];
        if (!*option_path(row, purpose) || (n_typed > 0 && !(row->flags & OPTION_TYPED))) { continue; }
        if (source) {
            options_fail(row->name, "expected one source of data, found --%s too: give one of them", source->name);
        }
        source = row;
    }
    return source;
}

// a list is of texts and token shards, a file or folder of numbers
static inline void data_open_source_(TokenData* d, const Option* source, const char* extension,
                                     const Tokenizer* tokenizer) {
    if (!source) { return; }
    const char* path = option_path(source, OPTION_READS);
    if (source->flags & OPTION_LIST) { tokens_open(d, path, tokenizer); }
    else { tokens_open_numbers(d, path, source->flags & OPTION_FOLDER ? extension : NULL); }
}

// --shuffle 1 is the default: only a typed one contradicts
static inline RowOrder data_order_(const Option* table, int n, const RunOptions* o, const RunDataOptions* x) {
    const int is_shuffled = o->shuffle && options_given(table, n, "shuffle") == 1;
    if (x->carry_state && (is_shuffled || x->shuffle_shards)) {
        options_fail("carry-state", "needs rows in file order, found --%s", is_shuffled ? "shuffle" : "shuffle-shards");
    }
    if (x->carry_state && !x->packed_sequences) {
        options_fail(
            "carry-state",
            "needs rows that go on where the one before ended, found --packed-sequences 0, which leaves a token out");
    }
    if (x->shuffle_shards && is_shuffled) {
        options_fail("shuffle-shards", "expected one order, found --shuffle too: rows or shards");
    }
    return x->carry_state ? ORDER_STREAMS : x->shuffle_shards ? ORDER_SHARDS : o->shuffle ? ORDER_ROWS : ORDER_FILE;
}

// both are tokens, or both are examples of the same length
static inline void data_check_kinds_(const RunData* d) {
    const TokenData *train = &d->train, *val = &d->val;
    const int is_examples = train->examples_T > 0;
    if (!has_data(train) || !has_data(val) || train->examples_T == val->examples_T) { return; }
    if (is_examples != (val->examples_T > 0)) {
        fail_input("%s: expected %s as in %s, found %s", val->path, is_examples ? "examples" : "tokens", train->path,
                   is_examples ? "tokens" : "examples");
    }
    fail_input("%s: expected examples of %d positions as in %s, found %d", val->path, train->examples_T, train->path,
               val->examples_T);
}

// x must stay where it is: data_plan looks into it
static inline void data_open_more(RunData* d, const RunOptions* o, const RunDataOptions* x, const Option* table, int n,
                                  const Tokenizer* tokenizer) {
    const Option *train = data_source_(table, n, OPTION_TRAINS), *val = data_source_(table, n, OPTION_VALIDATES);
    const char* extension = x->shard_ext + (*x->shard_ext == '.');
    if (!*extension || strpbrk(extension, "./")) {
        options_fail("shard-ext", "expected the end of a name, such as txt, found \"%s\"", x->shard_ext);
    }
    d->more = x;
    d->order = data_order_(table, n, o, x);
    if (d->order == ORDER_SHARDS || d->order == ORDER_STREAMS) {
        data_refuse_weights_("train", o->train, x->carry_state ? "--carry-state reads on from row to row"
                                                               : "--shuffle-shards takes each shard once");
    }
    data_refuse_weights_("val", o->val, "validation takes all of each source, once");
    data_open_source_(&d->train, train, extension, tokenizer);
    data_open_source_(&d->val, val, extension, tokenizer);
    data_check_kinds_(d);
    data_split_(d, o);
    if (d->train.examples_T > 0 && (x->carry_state || !x->packed_sequences)) {
        options_fail(x->carry_state ? "carry-state" : "packed-sequences",
                     "is for tokens, found examples in %s: each is a row by itself", d->train.path);
    }
}

// the positions of an example; 0: the data are tokens, or there is none
static inline int data_examples_T(const RunData* d) {
    return d->train.examples_T > 0 ? d->train.examples_T : d->val.examples_T;
}

// the positions of a row; `usual` where neither --seq-len nor examples say
static inline int data_seq_len(const RunData* d, const RunOptions* o, const Option* table, int n, int usual) {
    const int T = data_examples_T(d);
    if (T > 0 && o->seq_len > 0 && o->seq_len != T && options_given(table, n, "seq-len") == 1) {
        options_fail("seq-len", "expected the %d positions of the examples in %s, found %d", T,
                     has_data(&d->train) ? d->train.path : d->val.path, o->seq_len);
    }
    return T > 0 ? T : o->seq_len > 0 ? o->seq_len : usual;
}

// eot: the tokenizer's end of text
static inline int data_separator(const RunData* d, const RunOptions* o, int eot) {
    if (d->more && d->more->doc_sep >= 0) { return d->more->doc_sep; }
    return o->doc_reset ? eot : -1;
}

// 1 + the largest token id in it
static inline int data_vocabulary(const RunData* d) {
    return d->train.vocab_size_needed > d->val.vocab_size_needed ? d->train.vocab_size_needed
                                                                 : d->val.vocab_size_needed;
}

// 1 + the largest target
static inline int data_classes(const RunData* d) {
    return d->train.classes_needed > d->val.classes_needed ? d->train.classes_needed : d->val.classes_needed;
}

// Is the tokenizer the model's? It has as many tokens, or fewer (a model's vocabulary may be padded) and either came
// with the model or goes with the data that it is trained on.
static inline int data_tokenizer_fits(const RunData* d, const Tokenizer* t, int V, const Option* table, int n) {
    int is_used = options_given(table, n, "tokenizer") != 1 || has_data(&d->train);
    return t->n_tokens == V || (t->json && is_used && t->n_tokens < V);
}

// Text for a model that is trained already: with another tokenizer than its own it would be gibberish to it
static inline void data_check_tokenizer(const RunData* d, const RunOptions* o, const Tokenizer* t, int V, int fits) {
    const int is_text = d->train.text != NULL || d->val.text != NULL;
    if (is_text && (*o->from || o->resume) && !fits) {
        options_fail("tokenizer", "the model has %d tokens, %s has %d: give the model's tokenizer, or token shards", V,
                     *o->tokenizer ? o->tokenizer : "bytes", t->n_tokens);
    }
}

// eot: the token with which documents begin. Shards of another tokenizer than --tokenizer lack it, and --doc-reset
// would do nothing without a word.
static inline void data_check_documents(const RunData* d, const RunOptions* o, int eot) {
    const TokenData* data = has_data(&d->train) ? &d->train : &d->val;
    const int is_chosen = d->more && d->more->doc_sep >= 0;
    if (!has_data(data) || !(is_chosen || o->doc_reset)) { return; }
    const char* lacks = tokens_lack(data, is_chosen ? d->more->doc_sep : eot);
    if (lacks && is_chosen) {
        options_fail("doc-sep", "expected documents that begin with token %d, found none in %s", d->more->doc_sep,
                     lacks);
    }
    if (lacks) {
        options_fail(
            "doc-reset",
            "expected documents that begin with token %d, end of text, found none in %s: give --tokenizer the one that "
            "made these tokens",
            eot, lacks);
    }
}

static inline void data_rows_(DataLoader* rows, const TokenData* d, int T, int V, int classes, int stride,
                              RowOrder order, int n_streams, int seed) {
    if (!has_data(d)) { return; }
    tokens_check_vocab(d, V, "the model");
    tokens_check_classes(d, classes, "the model");
    dataloader_init_rows(rows, d, T, stride, order, n_streams, (uint64_t)seed);
}

// V: ids that inputs may have; classes: targets, which for tokens is the same
static inline void data_plan(RunData* d, RunOptions* o, int T, int V, int classes, int n_leaves) {
    if (o->early_stop > 0 && (!has_data(&d->val) || o->eval_every == 0)) {
        options_fail("early-stop", "needs validation: --val or --val-fraction, and --eval-every above 0");
    }
    if (o->eval_only && !has_data(&d->val) && !*o->hellaswag) {
        options_fail("eval-only", "needs --val, --train with --val-fraction, or --hellaswag");
    }
    const int stride = d->more && !d->more->packed_sequences ? T + 1 : T;
    data_rows_(&d->train_rows, &d->train, T, V, classes, stride, d->order, n_leaves * o->batch_size, o->seed);
    // of several sources --eval-batches are a sample of all, always the same one; so are they of conversations, whose
    // first rows have the shorter ones
    const RowOrder of_val = d->val.n_sources > 1 || d->is_chat ? ORDER_ROWS : ORDER_FILE;
    data_rows_(&d->val_rows, &d->val, T, V, classes, stride, of_val, 1, 0);
    const int64_t n_val = d->val_rows.n_rows, most = (int64_t)o->eval_batches * o->batch_size;
    if (has_data(&d->val) && dataloader_counted(&d->val_rows, 0, n_val < most ? n_val : most) == 0) {
        fail_input("%s: all targets of the rows for validation are negative: none counts", d->val.path);
    }
    if (has_data(&d->train)) { run_plan_steps(o, d->train_rows.n_rows, n_leaves); }
    if (*o->hellaswag) {
        hellaswag_open(&d->examples, o->hellaswag);
        hellaswag_check_vocab(&d->examples, V, "the model");
    }
}

// one pass over all tokens, once
static inline void data_sums(RunData* d) {
    if (d->has_sums) { return; }
    d->train_sum = tokens_checksum(&d->train);
    d->val_sum = tokens_checksum(&d->val);
    d->has_sums = 1;
}

// the same of images: a part of --val-fraction has a list of its own
static inline const char* data_touched_images_(RunData* d) {
    TokenImages *train = &d->train.images, *val = &d->val.images;
    const int of_train = token_images_touched(train), of_val = token_images_touched(val);
    if (!d->has_image_sums) { return NULL; }
    if (of_train && token_images_checksum(train) != d->train_images) { return train->files[0].path; }
    return of_val && token_images_checksum(val) != d->val_images ? val->files[0].path : NULL;
}

// Are the bytes of files that were touched still those of the start? The path of what is another, or NULL
static inline const char* data_touched_(RunData* d) {
    const int tokens = tokens_touched(&d->train) | tokens_touched(&d->val);  // a part of --val-fraction lies in train's
    const int examples = d->examples.n > 0 && file_touched(&d->examples.file);
    const MappedFile* answers = &d->examples.file;
    if (tokens && tokens_checksum(&d->train) != d->train_sum) { return d->train.path; }
    if (tokens && tokens_checksum(&d->val) != d->val_sum) { return d->val.path; }
    return examples && XXH3_64bits(answers->bytes, answers->n_bytes) != d->examples.xxh3 ? answers->path : NULL;
}

// Asked before each checkpoint, after data_sums. A time of change is enough to stop, without a look at the bytes: what
// was computed since the last checkpoint is lost, and --resume, which compares checksums, goes on where they are what
// they were. Where a file was only touched, as by a backup that makes hard links, a run of weeks shall not end: all
// bytes are read once more.
static inline const char* data_changed(RunData* d) {
    const char *train = tokens_changed(&d->train), *val = tokens_changed(&d->val);
    const char* examples = d->examples.n > 0 && file_changed(&d->examples.file) ? d->examples.file.path : NULL;
    const char *of_train = token_images_changed(&d->train.images), *of_val = token_images_changed(&d->val.images);
    const char* found = train ? train : val ? val : examples ? examples : of_train ? of_train : of_val;
    if (!found) { found = data_touched_(d); }
    return found ? found : data_touched_images_(d);
}

// bytes of tokens that are in memory, not mapped
static inline double data_memory(const RunData* d) { return tokens_memory(&d->train) + tokens_memory(&d->val); }

// of several sources each: its share of the rows, and how often an epoch takes them
static inline void data_box_sources_(const TokenData* d, const DataLoader* rows) {
    for (int s = 0; s < d->n_sources && (d->n_sources > 1 || rows->is_weighted); s++) {
        const RowSource* source = &rows->sources[s];
        const double n = (double)(rows->is_weighted ? source->n_places : source->n_rows);
        char share[32], times[48] = "";
        snprintf(share, sizeof share, "  %.3g%% of the rows", 100.0 * n / (double)rows->n_rows);
        if (rows->is_weighted) { snprintf(times, sizeof times, ", %.3g times", n / (double)source->n_rows); }
        if (d->examples_T > 0) {
            box_row(share, "%s: %lld examples%s", d->sources[s].path, (long long)source->n_rows, times);
            continue;
        }
        box_row(share, "%s: %lld tokens, %lld rows%s", d->sources[s].path, (long long)d->sources[s].n_tokens,
                (long long)source->n_rows, times);
    }
}

static inline void data_box_(const char* name, const TokenData* d, const DataLoader* rows) {
    if (!has_data(d)) { return; }
    if (d->examples_T > 0) {
        box_row(name, "%lld examples of %d, %d classes", (long long)rows->n_rows, rows->T, d->classes_needed);
    } else {
        box_row(name, "%lld tokens, %lld rows of %d", (long long)d->n_tokens, (long long)rows->n_rows, rows->T);
    }
    data_box_sources_(d, rows);
    if (rows->order == ORDER_SHARDS) { box_row("", "%d shards in random order", d->n_shards); }
    if (rows->order == ORDER_STREAMS) {
        box_row("", "in %d streams of %lld rows", rows->n_streams, (long long)(rows->n_rows / rows->n_streams));
    }
}

static inline void data_box_chat_(const RunData* d) {
    const ChatData* chat = &d->chat;
    if (has_data(&d->train)) {
        chat_data_box(chat, "training data", &chat->train, &chat->from_train, d->train_rows.n_rows, d->train_rows.T);
    }
    if (has_data(&d->val)) {
        chat_data_box(chat, "validation data", &chat->val, &chat->from_val, d->val_rows.n_rows, d->val_rows.T);
    }
    chat_data_box_template(chat);
}

static inline void data_box(const RunData* d) {
    if (d->is_chat) { data_box_chat_(d); }
    else {
        data_box_("training data", &d->train, &d->train_rows);
        data_box_("validation data", &d->val, &d->val_rows);
    }
    if (d->examples.n > 0) {
        box_row("examples", "%d, the longest has %d positions", d->examples.n, d->examples.longest);
    }
}

static inline void data_close(RunData* d) {
    chat_data_close(&d->chat);
    if (has_data(&d->val)) { tokens_close(&d->val); }  // first: it may look into train's storage
    if (has_data(&d->train)) { tokens_close(&d->train); }
    if (d->examples.n > 0) { hellaswag_close(&d->examples); }
}
#endif  // LLMC_RUNDATA_H
