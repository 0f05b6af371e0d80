/*
The option --graph of trainers that also run on GPUs: a micro-batch becomes one launch (core/graph.h).
    graph_option   its row in a trainer's table
    graph_check    refuses it where no micro-batch, or none but a few, could be a graph, and says why. A run that has
                   kept it from another machine or number of ranks goes on without: it changes no bit
*/
#ifndef LLMC_GRAPH_OPTION_H
#define LLMC_GRAPH_OPTION_H
#include "trainer.h"  // Run, run_is_typed

static inline Option graph_option(int* is_on) {
    const Option row = {"machine", "graph", "", OPTION_SWITCH, is_on, "0", 0, 0, "0|1",
                        "on a GPU: record the launches of a micro-batch once, and make them one (CUDA graph). For "
                        "models so small that the GPU waits for the host; changes no bit", 0};
    return row;
}

#ifdef __CUDACC__

// varies: why micro-batches of this trainer differ in more than their tokens, or NULL. documents_vary: its launches
// follow from where documents begin
static inline const char* graph_obstacle_(const Run* r, const char* varies, int documents_vary) {
    const int P = r->comm->size;
    if (model_has_pp(r->model)) { return "is not for --pp: a micro-batch is computed in two parts"; }
    if (model_has_tp(r->model)) { return "is not for --tp: a micro-batch waits for other ranks while it is computed"; }
    if (model_has_cp(r->model)) { return "is not for --cp: a micro-batch waits for other ranks while it is computed"; }
    if (varies) { return varies; }
    if (data_is_chat(&r->data)) { return "is not for conversations: in every micro-batch they begin elsewhere"; }
    if (r->data.train.examples_T > 0) { return "is for tokens: of examples other targets count in every update"; }
    if (r->o.doc_reset && documents_vary) {
        return "is not for --doc-reset: in every micro-batch documents begin elsewhere";
    }
    if (P > 1 && r->o.zero == 2) { return "is not for --zero 2: each micro-batch sends its layers while it computes"; }
    if (P > 1 && r->n_leaves < 2 * P) {
        return "a rank sends its last micro-batch while it computes it, which is then no graph: expected two or more "
               "micro-batches on each rank (--grad-accum)";
    }
    return NULL;
}

#endif

static inline void graph_check(Run* r, int* is_on, const char* varies, int documents_vary) {
    const int is_typed = run_is_typed(r, "graph");
    if (!*is_on) { return; }
#ifdef __CUDACC__
    const char* obstacle = graph_obstacle_(r, varies, documents_vary);
    if (!obstacle) { return; }
    options_refuse(is_typed, "graph", obstacle);
#else
    (void)varies, (void)documents_vary;
    if (is_typed) {
        options_fail("graph", "is for GPUs, and this program was built for a CPU: make setup-cuda && make %s",
                     r->trainer->on_gpus);
    }
#endif
    options_set(r->table, r->n_options, "graph", "0");
}
#endif  // LLMC_GRAPH_OPTION_H
