/*
What a run may do with a model beside training it.
    task_evaluate   loss on the validation data, and answers to the examples of --hellaswag
    task_open_generator   before any text: task_sample, samples while training; task_generate, --generate
    task_probe      --probe: one batch, everything visible
*/
#ifndef LLMC_TASKS_H
#define LLMC_TASKS_H
#include "../files/tensorfile.h"  // tensors_put
#include "../text/escape.h"       // text_escape
#include "folder.h"               // run_show_sample
#include "trainer.h"              // Run

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
    const Evaluator e = {&r->o,     r->comm,   tokenizer,   r->T,   r->inputs, r->targets, t->losses, r,
                         t->scores, t->n_scores, scores, model_is_shared(r->model)};
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

// the model's text in and out, or status 2 at an option that needs it
static inline void task_need_text(const Run* r, const char* option) {
    if (run_has_text(r)) { return; }
    options_fail(option, "the model has %d tokens, --tokenizer %s has %d: give the model's tokenizer", r->V,
                 r->o.tokenizer, r->tokenizer.n_tokens);
}

// n_prompt: tokens of the longest prompt
static inline void task_open_generator(Run* r, int n_prompt) {
    const int room = generator_room(&r->o, n_prompt, r->max_T);
    r->trainer->open(r, TO_GENERATE, 1, room);
    Generator* g = &r->generator;
    g->o = &r->o;
    g->tokenizer = run_has_text(r) ? &r->tokenizer : NULL;
    g->stop = &r->stop;
    g->next_logits = r->trainer->next_logits;
    g->model = r;
    g->V = r->V;
    g->room = room;
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
    const Prompt none = {NULL, 0, &r->generator.eot, 1};
    r->generator.n_cached = 0;  // the parameters have changed since
    if (prompts->n == 0) { task_sample_one_(r, &none, ""); }
    for (int i = 0; i < prompts->n; i++) {
        const Prompt* p = &prompts->list[i];
        char which[512], *line = text_escape(p->text, p->n_bytes, 60);
        snprintf(which, sizeof which, ", prompt %d of %d: \"%s\"", i + 1, prompts->n, line);
        task_sample_one_(r, p, which);
        free(line);
    }
}

static inline void task_generate(Run* r) {
    task_need_text(r, "generate");
    Prompt prompt = generate_prompt(&r->o, &r->tokenizer);
    task_open_generator(r, prompt.n);
    generate_texts(&r->generator, &r->state.sampler, &prompt);
    prompt_free(&prompt);
}

// logits, losses and the gradient of every tensor, under its name and shape on disk
static inline void task_probe(Run* r) {
    enum { ROWS = 64 };  // whose logits are on the host at once
    const ProbeBatch x = r->probe;
    const int N = x.B * x.T;
    Model* m = r->model;
    SafeWriter out;
    outfile_check("probe-out", r->o.probe_out, "a safetensors file");
    free(m->frozen);  // every gradient is asked for
    m->frozen = NULL;
    model_init_training(m, NULL, 1, 0, 0);
    r->trainer->open(r, TO_TRAIN, x.B, x.T);
    probe_open(&out, r->o.probe_out, &x, r->classes, r->trainer->without_more, m->table, m->n_table);

    float* logits = (float*)malloc_check(sizeof(float) * ROWS * (size_t)r->classes, "logits");
    r->trainer->forward(r, x.inputs, x.B, x.T);
    for (int first = 0; first < N; first += ROWS) {
        const int n = N - first < ROWS ? N - first : ROWS;
        r->trainer->logits(r, logits, first, n);
        safewriter_put(&out, logits, sizeof(float) * (size_t)n * (size_t)r->classes);
    }
    free(logits);

    const size_t n_bytes = sizeof(float) * m->n;
    r->trainer->leaf(r, 0, x.inputs, x.targets, 1.0f / (float)x.counted, x.B, x.T);
    float loss, *grads = model_reduce(m, &loss, &r->dev);
    float* host = (float*)arena_alloc(n_bytes, "gradients on the host");
    loss = loss / (float)x.counted;
    const float of_targets = loss;
    if (r->trainer->more_loss) { loss += r->trainer->more_loss(r, grads); }
    device_download(host, grads, n_bytes, &r->dev);
    safewriter_put(&out, &loss, sizeof loss);
    if (r->trainer->without_more) { safewriter_put(&out, &of_targets, sizeof of_targets); }
    tensors_put(&out, m->table, m->n_table, host);
    safewriter_close(&out);
    probe_print(&x, loss, r->trainer->without_more, of_targets, r->o.probe_out);
    arena_free(host, n_bytes);
}
#endif  // LLMC_TASKS_H
