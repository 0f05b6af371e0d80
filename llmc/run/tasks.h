/*
What a run may do with a model beside training it.
    task_evaluate   loss on the validation data, and answers to the examples of --hellaswag
    task_open_generator   before any text: task_sample and task_answer, while training; task_generate, --generate,
                          --generate-file or --chat
    task_probe      --probe: one batch, everything visible
*/
#ifndef LLMC_TASKS_H
#define LLMC_TASKS_H
#include "../ops/entry_windows.h"  // entries_counted
#include "../ops/mtp_tokens.h"  // mtp_counted
#include "../files/tensorfile.h"     // tensors_put
#include "../ranks/context_ranks.h"  // cp_bring
#include "../text/escape.h"          // text_escape
#include "chat.h"                    // chat
#include "folder.h"                  // run_show_sample, run_open_answers
#include "trainer.h"                 // Run

// ---- what a pass has left on the device, on the host until the next call ----

static inline float* task_host_(Run* r, size_t n) {
    if (r->n_host >= n) { return r->host; }
    free(r->host);
    r->host = (float*)malloc_check(sizeof(float) * n, "losses or logits");
    r->n_host = n;
    return r->host;
}

// BatchImages of evaluate.h
static inline void task_images_(void* run, const DataLoader* rows, int64_t first, const int* inputs, const int* targets,
                                int B, int T) {
    Run* r = (Run*)run;
    r->trainer->images_of_rows(r, rows, first, inputs, targets, B, T);
}

// BatchLosses of evaluate.h
static inline const float* task_losses_(void* run, const int* inputs, const int* targets, int B, int T) {
    Run* r = (Run*)run;
    const size_t N = (size_t)B * (size_t)T;
    float* host = task_host_(r, N);  // of stages the last one has losses, and logits
    r->trainer->forward(r, TO_EVALUATE, inputs, targets, B, T, 0);
    if (model_has_head(r->model)) {
        const size_t n_own = N / (size_t)r->model->cp.size;
        device_download(host, r->trainer->losses(r, targets, B * T), sizeof(float) * n_own, &r->dev);
        cp_bring(host, B, T, &r->model->cp);
    }
    pp_tell(&r->model->pp, host, N);
    return host;
}

// the logits of position n of the last pass
static inline const float* task_logits_(Run* r, Purpose purpose, int n) {
    const size_t V = (size_t)r->classes;
    float* host = task_host_(r, V);
    if (model_has_head(r->model)) { floatx_download(host, r->trainer->logits(r, purpose, n), V, &r->dev); }
    pp_tell(&r->model->pp, host, V);
    return host;
}

// NextLogits of generate.h
static inline const float* task_next_logits_(void* run, const int* tokens, int n_cached, int n) {
    Run* r = (Run*)run;
    r->trainer->forward(r, TO_GENERATE, tokens, NULL, 1, n, n_cached);
    return task_logits_(r, TO_GENERATE, n - n_cached - 1);
}

// NextOfEach
static inline const float* task_next_of_each_(void* run, const CachedText* texts, int n_texts) {
    Run* r = (Run*)run;
    const size_t V = (size_t)r->classes;
    size_t row;
    const floatX* logits = r->trainer->next_of_each(r, texts, n_texts, &row);
    float* host = task_host_(r, V * (size_t)n_texts);
    for (size_t i = 0; i < (size_t)n_texts && logits; i++) {
        floatx_download(host + V * i, logits + row * i, V, &r->dev);
    }
    pp_tell(&r->model->pp, host, V * (size_t)n_texts);
    return host;
}

// ShareText
static inline void task_share_text_(void* run, int to, int from, int n) {
    Run* r = (Run*)run;
    r->trainer->share_text(r, to, from, n);
}

// ---- validation ----

// the loss of the averaged weights, in the record of the validation that follows
static inline float task_evaluate_average_(Run* r, const Evaluator* e) {
    Model* m = r->model;
    double bits_per_byte;
    model_exchange_average(m, 0, r->state.updates, &r->dev);
    const float loss = evaluate_loss(e, &r->data.val_rows, &bits_per_byte);
    model_exchange_average(m, 1, r->state.updates, &r->dev);
    log_extra(&r->log, json_pack("{s:o}", "val_loss_ema", json_finite((double)loss)));
    tensorboard_average(&r->board, r->state.step, loss);
    return loss;
}

// while training: is it the best so far?
static inline void task_evaluate(Run* r, int training) {
    const Trainer* t = r->trainer;
    double bits_per_byte, scores[MAX_SCORES];
    char line[256] = "";
    const Tokenizer* tokenizer = run_has_text(r) ? &r->tokenizer : NULL;
    Comm* dealing = model_dealing(r->model, r->comm);  // a line of stages computes one batch
    const RankGroup* cp = &r->model->cp;
    // of what goes along rows there is room for those of a batch
    const int cp_most_rows = model_has_cp(r->model) && cp->chunks == 1 ? r->o.batch_size : 0;
    const Evaluator e = {&r->o,     dealing,     tokenizer, r->T,   r->inputs, r->targets, task_losses_, r,
                         t->images_of_rows ? task_images_ : NULL, t->scores, t->n_scores, scores,
                         cp_multiple(cp), cp_most_rows, model_has_ep(r->model), r->comm->rank == 0};
    const int step = r->state.step;
    if (has_data(&r->data.val)) {
        float loss = evaluate_loss(&e, &r->data.val_rows, &bits_per_byte);
        if (t->validated) { t->validated(r, loss, scores, &bits_per_byte, line); }
        tensorboard_validation(&r->board, step, loss, bits_per_byte);
        const int averaged = training && r->model->average && r->state.averaged > 0;
        const float averaged_loss = averaged ? task_evaluate_average_(r, &e) : NAN;
        log_validation(&r->log, step, loss, bits_per_byte, training && run_state_validated(&r->state, &r->o, loss));
        if (!r->log.json_lines) { fputs(line, stdout); }
        if (averaged && !r->log.json_lines) {
            printf("step %d | val loss %.4f of averaged weights\n", step, (double)averaged_loss);
        }
    }
    if (*r->o.hellaswag) {
        int n, correct = evaluate_answers(&e, &r->data.examples, &n);
        log_accuracy(&r->log, step, "HellaSwag", correct, n, hellaswag_standard_error(correct, n));
    }
}

// ---- text ----

// the model's text in and out, or status 2 at an option that needs it
static inline void task_need_text(const Run* r, const char* option) {
    if (run_has_text(r)) { return; }
    options_fail(option, "the model has %d tokens, --tokenizer %s has %d: give the model's tokenizer", r->V,
                 *r->o.tokenizer ? r->o.tokenizer : r->tokenizer.kind, r->tokenizer.n_tokens);
}

// room: positions for prompt and text
static inline void task_open_generator(Run* r, int room) {
    r->trainer->open(r, TO_GENERATE, r->n_rows, room);
    Generator* g = &r->generator;
    g->o = &r->o;
    g->tokenizer = run_has_text(r) ? &r->tokenizer : NULL;
    g->stop = &r->stop;
    g->next_logits = task_next_logits_;
    g->next_of_each = r->trainer->next_of_each ? task_next_of_each_ : NULL;
    g->share_text = task_share_text_;
    g->has_states = r->trainer->has_states;
    g->model = r;
    g->V = r->V;
    g->room = room;
    g->piece = CACHED_TEXT_PIECE;
    g->n_rows = r->n_rows;
    g->eot = run_end_of_text(r);
    generator_init(g);
}

// one sample, to the terminal and to samples.txt; which: "" or ", prompt 1 of 2: ..."
static inline void task_sample_one_(Run* r, const Prompt* p, const char* which) {
    char* text;
    size_t n_bytes;
    FILE* memory = open_memstream(&text, &n_bytes);
    if (!memory) { fail_run("sample: no memory"); }
    text_print_safe(p->text, p->n_bytes, memory);
    generate(&r->generator, &r->state.sampler, p, memory);
    fclose(memory);
    if (r->comm->rank == 0) { run_show_sample(&r->o, r->state.step, which, text); }
    free(text);
}

// one of each prompt; without any, one from end of text on
static inline void task_sample(Run* r) {
    const Prompts* prompts = &r->prompts;
    const Prompt none = {NULL, 0, &r->generator.eot, 1, {NULL, 0}};
    generator_forget(&r->generator);
    if (prompts->n == 0) { task_sample_one_(r, &none, ""); }
    for (int i = 0; i < prompts->n; i++) {
        const Prompt* p = &prompts->list[i];
        char which[512], *line = text_escape(p->text, p->n_bytes, 60);
        snprintf(which, sizeof which, ", prompt %d of %d: \"%s\"", i + 1, prompts->n, line);
        task_sample_one_(r, p, which);
        free(line);
    }
}

// --eval-generate: an answer to each prompt, into answers.jsonl
static inline void task_answer(Run* r) {
    FILE* out = r->comm->rank == 0 ? run_open_answers(&r->o) : NULL;
    generator_forget(&r->generator);
    questions_answer(&r->generator, &r->asker, &r->questions, 0, r->questions.n, 1, r->state.step, out, RUN_ANSWERS);
    if (out) { run_close_answers(out, r->state.step, r->questions.n); }
}

static inline void task_chat_(Run* r) {
    Chat c;
    task_open_generator(r, run_chat_room(r));
    chat_init(&c, &r->generator, &r->asker, &r->state.sampler, stdin, stdout, isatty(STDIN_FILENO));
    chat(&c);
    chat_free(&c);
}

static inline void task_generate_text_(Run* r) {
    Prompt prompt = generate_prompt(&r->o, &r->tokenizer);
    if (prompt.n > r->max_T) {
        warn_line("--generate: of the prompt's %d tokens the model reads the last %d, its positions", prompt.n,
                  r->max_T);
    }
    task_open_generator(r, generator_room(&r->o, prompt.n, r->max_T));
    generate_texts(&r->generator, r->state.sampler, &prompt);
    prompt_free(&prompt);
}

// a sum of the tensors in a file, and of the JSON beside it; "": there is none
static inline HexText task_file_sum_(const char* weights, const char* config) {
    MappedFile file;
    ErrorText reason;
    uint64_t sum = 0;
    if (*weights) {
        SafeSet set;
        safeset_open(&set, weights);
        sum = safeset_sum(&set, 16);
        safeset_close(&set);
    }
    if (*config && file_map_or_not(&file, config, &reason)) {
        sum = XXH3_64bits_withSeed(file.bytes, file.n_bytes, sum);
        file_unmap(&file);
    }
    return hex_text(sum);
}

// what answers depend on beside their prompts (answers_check)
static inline json_t* task_answers_settings_(const Run* r) {
    static const char* const names[] = {"model", "weights", "seed", "chat-template", "think",
                                        "preserve-thinking", "prompt-eot", "max-new-tokens", "stop", "temperature",
                                        "top-k", "top-p", "min-p", "repetition-penalty", "samples",
                                        "image-max-pixels"};
    char folder[PATH_BYTES], adapter[PATH_BYTES] = "";
    if (*r->adapter_weights) { path_join(adapter, path_parent(folder, r->adapter_weights), HF_ADAPTER_CONFIG); }
    const Tokenizer* t = &r->tokenizer;
    const uint64_t tokens = t->json ? XXH3_64bits(t->json, t->n_json) : XXH3_64bits(t->bytes, t->starts[t->n_tokens]);
    json_t* options = options_to_json(r->table, r->n_options);
    json_t* made_with = json_pack("{s:s, s:s, s:s}", "model_xxh3", task_file_sum_(r->weights, r->config).s,
                                  "adapter_xxh3", task_file_sum_(r->adapter_weights, adapter).s, "tokenizer_xxh3",
                                  hex_text(tokens).s);
    const ImageFiles* files = &r->asker.c.files;
    if (files->n > 0) { json_object_set_new(made_with, "images", json_string(hex_text(image_files_sum(files)).s)); }
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        json_t* value = json_object_get(options, names[i]);
        if (value) { json_object_set(made_with, names[i], value); }
    }
    return json_pack("{s:o, s:o}", "made_with", made_with, "options", options);
}

static inline void task_generate(Run* r) {
    if (run_is_chatting(r)) {
        task_chat_(r);
    } else if (run_answers_file(r)) {
        task_open_generator(r, generator_room(&r->o, r->questions.longest, r->max_T));
        if (*r->chat.generate_out) { r->questions.settings = task_answers_settings_(r); }
        questions_answer_file(&r->generator, &r->asker, &r->questions, r->chat.generate_out);
    } else {
        task_generate_text_(r);
    }
}

// ---- --probe ----

// logits, losses and the gradient of every tensor, under its name and shape on disk
static inline void task_probe(Run* r) {
    const ProbeBatch x = r->probe;
    const int N = x.B * x.T;
    Model* m = r->model;
    SafeWriter out;
    OtherLoss others[MAX_OTHER_LOSSES];
    const int n_others = r->trainer->other_losses ? r->trainer->other_losses(r, others) : 0;
    probe_check_out(r->o.probe_out);
    free(m->frozen);  // every gradient is asked for
    m->frozen = NULL;
    model_freeze_base(m);
    model_init_training(m, NULL, 1, 0, 0);
    r->trainer->open(r, TO_TRAIN, x.B, x.T);
    probe_declare(&out, &x, r->classes, r->trainer->without_more, others, n_others);
    choices_declare(&out, r->choices, r->n_choices, x.B, x.T);
    tensors_declare(&out, m->table, m->n_saved, "grad.");
    safewriter_open(&out, r->o.probe_out);

    if (r->trainer->images) { r->trainer->images(r, &x); }
    else if (x.n_images > 0) { fail_input("%s: this model reads no images", r->o.probe); }
    r->trainer->forward(r, TO_TRAIN, x.inputs, NULL, x.B, x.T, 0);
    for (int n = 0; n < N; n++) {
        safewriter_put(&out, task_logits_(r, TO_TRAIN, n), sizeof(float) * (size_t)r->classes);
    }

    const size_t n_bytes = sizeof(float) * m->n;
    m->mtp_counted = model_counted(mtp_counted(x.inputs, x.targets, NO_RESET, x.B, x.T));
    if (m->learns_index) {
        m->index_counted = model_counted(entries_counted(x.inputs, x.targets, NO_RESET, m->index_ratio, x.B, x.T));
        m->mtp_index_counted = model_counted(entries_counted(x.inputs, x.targets, NO_RESET, 2, x.B, x.T));
    }
    r->trainer->leaf(r, 0, x.inputs, x.targets, 1.0f / (float)x.counted, x.B, x.T);
    float loss, *grads = model_reduce(m, &loss, &r->dev);
    float* host = (float*)arena_alloc(n_bytes, "gradients on the host");
    loss = loss / (float)x.counted;
    const float of_targets = loss;
    if (r->trainer->more_loss) { loss += r->trainer->more_loss(r, grads); }
    device_download(host, grads, n_bytes, &r->dev);
    safewriter_put(&out, &loss, sizeof loss);
    if (r->trainer->without_more) { safewriter_put(&out, &of_targets, sizeof of_targets); }
    for (int k = 0; k < n_others; k++) {
        for (int i = 0; i < others[k].n; i++) {
            const float number = others[k].number(r, i);
            safewriter_put(&out, &number, sizeof number);
        }
    }
    choices_put(&out, r->choices, r->n_choices, x.B, x.T, &r->dev);
    tensors_put(&out, m->table, m->n_saved, host);
    safewriter_close(&out);
    probe_print(&x, loss, r->trainer->without_more, of_targets, r->o.probe_out);
    arena_free(host, n_bytes);
}
#endif  // LLMC_TASKS_H
