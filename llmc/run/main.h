/*
A run, from the command line to the last file: what every trainer does beside its model. A trainer fills in a Trainer
(trainer.h), one function for each thing that only it knows, and its main is one call:
    int main(int argc, char** argv) {
        static Bigram bigram;  // begins with a Model; all zero
        Trainer t;             // its functions, one after the other: t.open = bigram_open; ...
        return run_main(&t, &bigram.model, argc, argv);
    }
dev/examples/train_bigram.c is the smallest, and doc/your_own_trainer.md walks through it.
*/
#ifndef LLMC_MAIN_H
#define LLMC_MAIN_H
#include "../core/memory.h"  // stack_check
#include "start.h"  // start_open, start_device, start_training
#include "train.h"  // train

static inline void main_close_(Run* r) {
    log_close(&r->log);
    tensorboard_close(&r->board);
    prefetch_stop(&r->prefetch);
    json_decref(r->recorded);
    data_close(&r->data);
    tokenizer_free(&r->tokenizer);
    companions_free(&r->companions);
    probe_free(&r->probe);
    generator_free(&r->generator);
    free(r->host);
    prompts_free(&r->prompts);
    questions_free(&r->questions);
    asker_free(&r->asker);
    stop_texts_free(&r->stop);
    snapshot_free(&r->snapshot);
    verify_free(&r->verify);
    if (r->read.path) { safeset_close(&r->read); }
    free(r->moved);
    arena_free(r->loaded, sizeof(float) * r->model->n);
    pp_rooms_close(r);
    r->trainer->close(r);
    choices_free(r->choices, r->n_choices, r->probe.B, r->probe.T);
    model_free(r->model);
    device_free(&r->dev);
    comm_free(r->comm);
    free(r->slice_updates);
    free(r->inputs);
    free(r->targets);
    options_free(r->table, r->n_options);
}

// what was printed has arrived; where terminal or reader are gone (SIGHUP, SIGPIPE) nothing does
static inline int main_flush_(void) {
    if (*stop_flag() == SIGHUP || *stop_flag() == SIGPIPE) { return 0; }
    if (fflush(stdout) != 0 || ferror(stdout)) { fail_run("standard output: cannot be written: %s", strerror(errno)); }
    return 0;
}

static inline int run_main(const Trainer* trainer, Model* model, int argc, char** argv) {
    static Run run;  // all zero
    Run* r = &run;
    standard_files_open();
    stack_check();
    r->trainer = trainer;
    r->model = model;
    start_open(r, argc, argv);
    start_device(r);
    if (r->o.dry_run) { return main_flush_(); }
    save_open_model(r);
    if (run_is_generating(r)) { task_generate(r); }
    else if (*r->o.probe) { task_probe(r); }
    else if (r->o.eval_only) { start_batch(r, TO_EVALUATE); task_evaluate(r, 0); save_check_data(r); }
    else if (has_data(&r->data.train)) { start_training(r, argc, argv); train(r); }
    save_exports(r);
    if (r->comm->rank == 0) { device_say_fallbacks(&r->dev, stdout); }
    main_close_(r);
    return main_flush_();
}
#endif  // LLMC_MAIN_H
