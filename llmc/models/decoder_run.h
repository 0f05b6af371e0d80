/*
What trainers of decoders with RoPE tell a run in the same words, whether their MLPs are experts or not.
    decoder_flops            of a token's products with the matrices of the model, forward and backward
    decoder_workspace_bytes  the largest scratch that an op asks for
    decoder_expected         Tradeoffs as memory is planned
    decoder_active           parameters that a token uses
*/
#ifndef LLMC_DECODER_RUN_H
#define LLMC_DECODER_RUN_H
#include "../ops/attention.h"  // attention_bytes
#include "../ops/gemm.h"       // gemm_workspace_bytes
#include "../run/trainer.h"    // Run
#include "activations.h"       // Tradeoffs, ExpertSizes

// Of E experts a token computes k. looked_up: the row of the table whose matrix is no factor, for a token only takes a
// row of it; -1: none
static inline double decoder_flops(const Run* r, int looked_up, int k, int E) {
    double n = 0.0;
    for (int i = 0; i < r->model->n_table; i++) {
        const Tensor* t = &r->model->table[i];
        if (t->rows == 1 || i == looked_up) { continue; }
        n += model_flops(r->model, i) * (t->experts > 0 ? (double)k / E : 1.0);
    }
    return n;
}

// The same of parameters, the embedding included; adapters are not counted
static inline size_t decoder_active(const Model* m, int k) {
    size_t active = 0;
    for (int i = model_is_adapter(m) ? m->n_saved : 0; i < m->n_table; i++) {
        const Tensor* t = &m->table[i];
        const size_t n = tensors_disk_count(t, 1);
        active += t->experts > 0 ? n / (size_t)t->experts * (size_t)k : n;
    }
    return active;
}

// Products of the head, of layers whose widest output is `wide`, of experts (k 0: there are none), or attention of NH
// heads with HQ channels in all
static inline double decoder_workspace_bytes(const Run* r, int B, int head_rows, int Vp, int wide, int HQ, int NH,
                                             const ExpertSizes* experts) {
    const int n = r->dev.n_threads, E = experts->router.E, k = experts->router.k;
    if ((double)B * r->T > expert_most_positions(k)) { return INFINITY; }
    const int N = B * r->T, n_head = N < head_rows ? N : head_rows;
    double most = fmax((double)gemm_workspace_bytes(n_head, Vp, n), (double)gemm_workspace_bytes(Vp, n_head, n));
    most = fmax(most, (double)gemm_workspace_bytes(N, wide, n));
    most = fmax(most, (double)gemm_workspace_bytes(wide, N, n));
    if (k > 0) { most = fmax(most, (double)grouped_matmul_workspace_bytes(E, N * k, experts->D, 2 * experts->F, n)); }
    return fmax(most, (double)attention_bytes(r->trainer->stored_bytes, B, r->T, HQ, NH, &r->dev));
}

// Memory of a CPU is taken where it is written: rows that do not come cost nothing, and as many are expected as when
// all experts are equally busy
static inline Tradeoffs decoder_expected(Tradeoffs how) {
    if (DEVICE_IS_SHARED && how.shared.room == 0.0f) { how.shared.room = 1.0f; }
    return how;
}
#endif  // LLMC_DECODER_RUN_H
