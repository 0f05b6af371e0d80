/*
The data of a run: what it trains on, what it validates with, and the examples it answers.
    data_open    opens --train and --val, or takes --val-fraction of the training data for validation
    data_tokenizer_fits   is the tokenizer the model's?
    data_check_tokenizer  refuses text for a model whose tokenizer nobody named
    data_check_documents  refuses --doc-reset for data in which no document begins
    data_plan    checks them against the model; rows of T positions, and the number of steps where --steps is 0
Errors: fail_input, before anything is computed.
*/
#ifndef LLMC_RUNDATA_H
#define LLMC_RUNDATA_H
#include "dataloader.h"  // TokenData, DataLoader
#include "hellaswag.h"   // HellaSwag
#include "run.h"         // RunOptions, run_plan_steps

typedef struct {
    TokenData train, val;  // without shards where there is none
    DataLoader train_rows, val_rows;
    HellaSwag examples;    // of --hellaswag
} RunData;

static inline int has_data(const TokenData* d) { return d->path != NULL; }

static inline void data_open(RunData* d, const RunOptions* o, const Tokenizer* tokenizer) {
    if (*o->train) { tokens_open(&d->train, o->train, tokenizer); }
    if (*o->val) { tokens_open(&d->val, o->val, tokenizer); }
    else if (has_data(&d->train) && o->val_fraction > 0.0f) { tokens_split(&d->train, &d->val, o->val_fraction); }
}

// 1 + the largest token id in it
static inline int data_vocabulary(const RunData* d) {
    return d->train.vocab_size_needed > d->val.vocab_size_needed ? d->train.vocab_size_needed : d->val.vocab_size_needed;
}

// Is the tokenizer the model's? It has as many tokens, or fewer (a model's vocabulary may be padded) and either came with the
// model or goes with the data that it is trained on.
static inline int data_tokenizer_fits(const RunData* d, const Tokenizer* t, int V, const Option* table, int n) {
    int is_used = options_given(table, n, "tokenizer") != 1 || has_data(&d->train);
    return t->n_tokens == V || (t->json && is_used && t->n_tokens < V);
}

// Text for a model that others trained, and nobody said with which tokenizer: as bytes it would be gibberish to it.
static inline void data_check_tokenizer(const RunData* d, const RunOptions* o, int V, int fits) {
    int is_text = d->train.text != NULL || d->val.text != NULL;
    if (is_text && *o->from && !fits) {
        options_fail("tokenizer", "%s has %d tokens and no tokenizer.json of that size: give the model's tokenizer, or token shards", o->from, V);
    }
}

// eot: the token with which documents begin. Shards of another tokenizer than --tokenizer lack it, and --doc-reset would
// do nothing without a word.
static inline void data_check_documents(const RunData* d, const RunOptions* o, int eot) {
    const TokenData* data = has_data(&d->train) ? &d->train : &d->val;
    if (o->doc_reset && has_data(data) && !tokens_contain(data, eot)) {
        options_fail("doc-reset", "expected documents that begin with token %d, end of text, found none in %s: give --tokenizer the one that "
                     "made these tokens", eot, data->path);
    }
}

static inline void data_rows_(DataLoader* rows, const TokenData* d, int T, int V, int shuffle, int seed) {
    if (!has_data(d)) { return; }
    tokens_check_vocab(d, V, "the model");
    dataloader_init(rows, d, T, shuffle, (uint64_t)seed);
}

static inline void data_plan(RunData* d, RunOptions* o, int T, int V, int n_leaves) {
    if (o->early_stop > 0 && (!has_data(&d->val) || o->eval_every == 0)) {
        options_fail("early-stop", "needs validation: --val or --val-fraction, and --eval-every above 0");
    }
    if (o->eval_only && !has_data(&d->val) && !*o->hellaswag) {
        options_fail("eval-only", "needs --val, --train with --val-fraction, or --hellaswag");
    }
    data_rows_(&d->train_rows, &d->train, T, V, o->shuffle, o->seed);
    data_rows_(&d->val_rows, &d->val, T, V, 0, 0);
    if (has_data(&d->train)) { run_plan_steps(o, d->train_rows.n_rows, n_leaves); }
    if (*o->hellaswag) {
        hellaswag_open(&d->examples, o->hellaswag);
        hellaswag_check_vocab(&d->examples, V, "the model");
    }
}

// bytes of tokens that are in memory, not mapped
static inline double data_memory(const RunData* d) { return tokens_memory(&d->train) + tokens_memory(&d->val); }

static inline void data_box_(const char* name, const TokenData* d, const DataLoader* rows) {
    if (has_data(d)) { box_row(name, "%lld tokens, %lld rows of %d", (long long)d->n_tokens, (long long)rows->n_rows, rows->T); }
}

static inline void data_box(const RunData* d) {
    data_box_("training data", &d->train, &d->train_rows);
    data_box_("validation data", &d->val, &d->val_rows);
    if (d->examples.n > 0) { box_row("examples", "%d, the longest has %d positions", d->examples.n, d->examples.longest); }
}

static inline void data_close(RunData* d) {
    if (has_data(&d->val)) { tokens_close(&d->val); }  // first: it may look into train's storage
    if (has_data(&d->train)) { tokens_close(&d->train); }
    if (d->examples.n > 0) { hellaswag_close(&d->examples); }
}
#endif  // LLMC_RUNDATA_H
