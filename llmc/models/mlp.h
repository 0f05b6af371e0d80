/*
A gated MLP of a layer, alone or beside experts that a token chooses: out = hidden Wdown^T, hidden = silu(gate) o up,
(gate, up) = inp Wgate_up^T.
    layer_mlp     its operands at layer l, by the fields of the two matrices; the caller says where its activations lie
    mlp_up        gate and up, which are kept for backward
    mlp_down      and from there on
    mlp_backward  gate_up becomes its own gradient, hidden is computed again beside it
Shapes: inp, out, dinp, dout (N, D); gate_up (N, 2F), hidden, dhidden (N, F). limit, 0: none (swiglu.h). add: dinp +=.
Cost, order of sums: those of linear.h and swiglu.h.
*/
#ifndef LLMC_MLP_H
#define LLMC_MLP_H
#include "../ops/swiglu.h"  // swiglu_forward, swiglu_backward
#include "layer.h"          // layer_linear, layer_gradients

typedef struct {
    Linear up, down;
    LinearGradients dup, ddown;  // where training writes them
    floatX *gate_up, *hidden, *dhidden;
    float limit;
    int F, N;
} MlpPass;

static inline MlpPass layer_mlp(const Activations* acts, size_t gate_up, size_t down, int F, int l, int N) {
    MlpPass p;
    memset(&p, 0, sizeof p);
    p.up = layer_linear(acts, gate_up, l), p.down = layer_linear(acts, down, l);
    if (acts->purpose == TO_TRAIN) {
        p.dup = layer_gradients(acts, gate_up, l), p.ddown = layer_gradients(acts, down, l);
    }
    p.F = F, p.N = N;
    return p;
}

static inline void mlp_up(const MlpPass* p, const floatX* inp, const Device* dev) {
    linear_forward(p->gate_up, inp, p->up, p->N, dev);
}

static inline void mlp_down(const MlpPass* p, floatX* out, const Device* dev) {
    swiglu_forward(p->hidden, p->gate_up, p->limit, p->N, p->F, dev);
    linear_forward(out, p->hidden, p->down, p->N, dev);
}

static inline void mlp_backward(const MlpPass* p, floatX* dinp, const floatX* dout, const floatX* inp, int add,
                                const Device* dev) {
    linear_backward_input(p->dhidden, dout, p->down, 0, p->N, dev);
    swiglu_backward(p->gate_up, p->hidden, NULL, p->dhidden, p->gate_up, NULL, p->limit, p->N, p->F, dev);
    linear_backward_weight(dout, p->hidden, p->down, p->ddown, p->N, dev);
    linear_backward(dinp, p->gate_up, inp, p->up, p->dup, add, p->N, dev);
}
#endif  // LLMC_MLP_H
