/*
CUDA graphs: the launches of a leaf, one micro-batch forward and backward, are recorded once and then given to the GPU
as one. A leaf has hundreds, and each takes the host its time: where kernels are shorter than that, the GPU waits.
    if (graph_begin(&graph, place, dloss, B, T, dev)) {  // 0: a graph has done it, and nothing is left to do
        ...                                              // work for dev->stream alone
        graph_end(&graph, dev);
    }
A graph repeats its launches with the arguments of the recording, so it serves a leaf that would have the same.
What differs from leaf to leaf says graph_begin: where the gradients go (place; NULL: this leaf is no graph's), and the
scale of the loss; the sizes; and the workspace and the room of a matrix that is widened, which an op between two leaves
may have replaced by larger ones. All else that changes must lie at a fixed address: tokens and targets are uploaded
before, weights stay where they are.
And the launches themselves must not follow from the data: runs whose counted targets vary are refused, and those whose
documents do in models whose launches follow from these (run/graph_option.h); and the head takes all positions, counted
or not (TokenBatch.counts_all).
The first leaf of a kind runs as it comes: the workspace grows, cuBLASLt chooses its algorithms, kernels are loaded. The
second is recorded, and from then on it is a graph. Nothing between the two calls may wait for the GPU, allocate or
download: that is an error, which names the call.
Same kernels, same arguments, same order: the same bits as without. Where graph.is_on is 0, and in a C build, all runs
as it comes.
Memory: GRAPH_KINDS graphs at most; the one that was asked for the longest time goes first.
Source: CUDA programming guide, "CUDA Graphs"; explained in doc/kernels.md
*/
#ifndef LLMC_GRAPH_H
#define LLMC_GRAPH_H
#include "device.h"  // Device, cudaCheck

enum { GRAPH_KINDS = 32 };  // a leaf tree of 2^31 leaves has so many places

// what launches of a leaf depend on; two leaves with the same are of one kind
typedef struct {
    const void *place, *workspace;
    size_t n_workspace;
    const void* widened;  // device_widened
    float dloss;
    int B, T;
} GraphKind;

#ifdef __CUDACC__
// a kind that was seen; executable: NULL until its second leaf
typedef struct {
    GraphKind kind;
    cudaGraphExec_t executable;
    int64_t last_asked;
} GraphKept;
#endif

typedef struct {
    int is_on;
    int64_t n_leaves, n_launched;  // leaves so far; of them launched as a graph
    size_t n_nodes;                // launches, copies and fills in the graph that was recorded last
#ifdef __CUDACC__
    GraphKept kept[GRAPH_KINDS];
    GraphKept* now;                // the leaf that goes on is of this kind; NULL: of none
    int is_recording;
#endif
} Graph;

#ifdef __CUDACC__
static inline GraphKind graph_kind_(const void* place, float dloss, int B, int T, const Device* dev) {
    const GraphKind kind = {place, dev->workspace->memory, dev->workspace->n_bytes,
                            dev->widened->memory, dloss, B, T};
    return kind;
}

static inline int graph_kinds_equal_(const GraphKind* a, const GraphKind* b) {
    return a->place == b->place && a->workspace == b->workspace && a->n_workspace == b->n_workspace &&
           a->widened == b->widened && a->dloss == b->dloss && a->B == b->B && a->T == b->T;
}

static inline void graph_drop_(GraphKept* kept) {
    if (kept->executable) { cudaCheck(cudaGraphExecDestroy(kept->executable)); }
    memset(kept, 0, sizeof *kept);
}

// its place among those that are kept, or in the place of the oldest a new one
static inline GraphKept* graph_find_(Graph* g, const GraphKind* kind) {
    GraphKept* oldest = g->kept;
    for (GraphKept* kept = g->kept; kept < g->kept + GRAPH_KINDS; kept++) {
        if (kept->last_asked > 0 && graph_kinds_equal_(&kept->kind, kind)) { return kept; }
        if (kept->last_asked < oldest->last_asked) { oldest = kept; }
    }
    graph_drop_(oldest);
    oldest->kind = *kind;
    return oldest;
}

// 1: the caller is to launch the leaf, and then to call graph_end
static inline int graph_begin(Graph* g, const void* place, float dloss, int B, int T, const Device* dev) {
    const GraphKind kind = graph_kind_(place, dloss, B, T, dev);
    g->n_leaves++;
    g->now = NULL;
    if (!g->is_on || !place) { return 1; }
    g->now = graph_find_(g, &kind);
    const int is_known = g->now->last_asked > 0;
    g->now->last_asked = g->n_leaves;
    if (g->now->executable) {
        g->n_launched++;
        cudaCheck(cudaGraphLaunch(g->now->executable, dev->stream));
        return 0;
    }
    g->is_recording = is_known;
    if (is_known) { cudaCheck(cudaStreamBeginCapture(dev->stream, cudaStreamCaptureModeThreadLocal)); }
    return 1;
}

// what was recorded becomes a graph, and runs
static inline void graph_end(Graph* g, const Device* dev) {
    cudaGraph_t recorded;
    if (!g->now) { return; }
    if (!g->is_recording) {  // the workspace may have grown
        const GraphKind* first = &g->now->kind;
        g->now->kind = graph_kind_(first->place, first->dloss, first->B, first->T, dev);
        return;
    }
    g->is_recording = 0;
    cudaCheck(cudaStreamEndCapture(dev->stream, &recorded));
    cudaCheck(cudaGraphGetNodes(recorded, NULL, &g->n_nodes));
    cudaCheck(cudaGraphInstantiate(&g->now->executable, recorded, 0));
    cudaCheck(cudaGraphDestroy(recorded));
    g->n_launched++;
    cudaCheck(cudaGraphLaunch(g->now->executable, dev->stream));
}

static inline void graph_free(Graph* g) {
    for (int i = 0; i < GRAPH_KINDS; i++) { graph_drop_(&g->kept[i]); }
}

#else  // ---- no GPU: a launch is a call ----

static inline int graph_begin(Graph* g, const void* place, float dloss, int B, int T, const Device* dev) {
    (void)place, (void)dloss, (void)B, (void)T, (void)dev;
    g->n_leaves++;
    return 1;
}

static inline void graph_end(Graph* g, const Device* dev) { (void)g, (void)dev; }
static inline void graph_free(Graph* g) { (void)g; }
#endif
#endif  // LLMC_GRAPH_H
