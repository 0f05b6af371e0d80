/*
What the routers of a model have counted in an update (Routing of expert_layer.h), for the log and for summary.json.
    router_log_step      the keys of a step's line; their meanings: router_log_keys, of routers that have no z-loss
                         router_log_levelled_keys
    router_log_summary   when training has ended: how often the last update took each expert, a line for each layer
*/
#ifndef LLMC_ROUTER_LOG_H
#define LLMC_ROUTER_LOG_H
#include "../run/trainer.h"  // Run, log_extra
#include "expert_layer.h"    // RouterLoad, router_load, router_statistics_length

// what metrics.jsonl has beside the common keys
static inline void router_log_levelled_keys(Run* r) {
    log_add_key(&r->log, "cross_entropy", "training loss of the targets alone");
    log_add_key(&r->log, "balance", "mean over layers, before its weight: 1 if experts are equally busy, less if busy "
                "ones score low");
    log_add_key(&r->log, "load", "busiest expert of all layers, as a multiple of its layer's mean");
    log_add_key(&r->log, "idle_experts", "experts that no token took");
}

static inline void router_log_keys(Run* r) {
    router_log_levelled_keys(r);
    log_add_key(&r->log, "z", "mean over layers of the z-loss before its weight");
}

// balance and *z: means over layers; z NULL: the routers have no such loss
static inline void router_log_step(Run* r, float balance, const float* z, float load, int idle) {
    log_note(&r->log, "load %.2f", (double)load);
    log_extra(&r->log, json_pack("{s:o, s:o, s:o*, s:o, s:i}", "cross_entropy", json_finite((double)r->targets_loss),
                                 "balance", json_finite((double)balance), "z", z ? json_finite((double)*z) : NULL,
                                 "load", json_finite((double)load), "idle_experts", idle));
}

// loads: of the experts of layer l, as many as the line has room for, below each other from layer to layer
static inline void router_log_loads_(int l, int L, const RouterLoad* all, const json_t* loads) {
    const int terminal = terminal_columns(), end = terminal > 0 ? terminal : 80, E = (int)json_array_size(loads);
    const int of_layer = snprintf(NULL, 0, "%d", L - 1), of_idle = snprintf(NULL, 0, "%d", E - 1);
    int e = 0, column = printf("layer %*d | load %.2f | %*d idle |", of_layer, l, (double)all->busiest, of_idle,
                               all->dead);
    for (; e < E; e++) {
        const double load = json_real_value(json_array_get(loads, (size_t)e));
        const int dots = e + 1 < E ? 4 : 0;
        if (column + snprintf(NULL, 0, " %.2f", load) + dots > end) { break; }
        column += printf(" %.2f", load);
    }
    printf("%s\n", e < E ? " ..." : "");
}

// Loads are multiples of their layer's mean; "loads" of summary.json, which neither a run without an update has nor a
// model without experts. Of L layers those of a kind have some; kinds NULL: all have
static inline json_t* router_log_summary(const Run* r, const char* kinds, char kind, int L, int E) {
    if (r->state.step <= r->first_step) { return json_object(); }
    const float* counts = dp_sums(&r->model->dp);
    json_t* layers = json_array();
    for (int l = 0; l < L; l++) {
        if (kinds && kinds[l] != kind) { continue; }
        const RouterLoad all = router_load(counts, E);
        json_t* loads = json_array();
        float sum = 0.0f;
        for (int e = 0; e < E; e++) { sum += counts[e]; }
        for (int e = 0; e < E; e++) {
            json_array_append_new(loads, json_finite((double)(counts[e] / (sum / (float)E))));
        }
        if (!r->log.json_lines) { router_log_loads_(l, L, &all, loads); }
        json_array_append_new(layers, loads);
        counts += router_statistics_length(E);
    }
    if (json_array_size(layers) > 0) { return json_pack("{s:o}", "loads", layers); }
    json_decref(layers);
    return json_object();
}
#endif  // LLMC_ROUTER_LOG_H
