/*
What stands where in layer l of a pass: operands of a trainer's forward and backward, by a field of its table of
parameters. Each call takes the Activations of the pass, which know their model, its adapters and the scratch that its
layers share; what is no layer's, as the embedding, stands at layer 0.
    layer_linear, layer_linear_biased   a matrix, or a matrix and its bias, as linear.h multiplies by it: with adapters
    layer_gradients, layer_gradients_biased   where gradients of these are to be written; NULL where they do not learn
    layer_vector, layer_vector_gradient   the same of a vector, such as the gain of a norm
    layer_floats     what is stored as floats in every build
    layer_rmsnorm_forward, layer_residual_rmsnorm_forward, layer_rmsnorm_backward   a norm (rmsnorm.h) of N rows of as
                     many channels as its weight has, behind the sum of two streams or alone, with the epsilon of acts
    layer_heads_backward   of heads, which ranks may share
    ExpertFields, layer_experts, layer_experts_back   its router and experts (expert_layer.h), without gradients; and
                     where these go
    layer_numbers    what the i-th router of the model counts in this leaf; NULL: nobody asks
    layer_head       the output matrix, behind all layers (lm_head.h)
    layer_keep       last in a layer's forward: its two streams (stream.h) are kept for backward
    layer_is_fresh   is what layers share (one buffer for all, scratch, rows of experts) still that of layer l?
    layer_stream     in backward, before a stream is read: it is whole
A trainer's own structs of pointers, its activations and statistics, are filled by tensor_arena_point.
*/
#ifndef LLMC_LAYER_H
#define LLMC_LAYER_H
#include "../ops/rmsnorm.h"  // rmsnorm_forward, residual_rmsnorm_forward, rmsnorm_backward
#include "activations.h"  // Activations, ExpertPass
#include "gathered.h"     // heads_gather, heads_take
#include "linear.h"       // Linear, LinearGradients, linear_adapt, linear_adapt_gradients
#include "lm_head.h"      // LmHead
#include "stream.h"       // Stream, stream_keep, stream_bring

static inline Linear layer_linear_biased(const Activations* acts, size_t weight, size_t bias, int l) {
    const AdapterPass pass = {acts->dropout, acts->adapter.at};
    Linear w = model_linear(acts->model, weight, bias, l);
    linear_adapt(&w, acts->model, acts->adapters, pass, weight, l);
    w.room = acts->parallel.at;
    w.rounded = acts->rounded.n > 0 ? acts->rounded.at : NULL;
    return w;
}

static inline Linear layer_linear(const Activations* acts, size_t weight, int l) {
    return layer_linear_biased(acts, weight, NO_BIAS, l);
}

static inline LinearGradients layer_gradients_biased(const Activations* acts, size_t weight, size_t bias, int l) {
    LinearGradients d = model_linear_gradients(acts->model, weight, bias, l);
    linear_adapt_gradients(&d, acts->model, acts->adapters, weight, l);
    return d;
}

static inline LinearGradients layer_gradients(const Activations* acts, size_t weight, int l) {
    return layer_gradients_biased(acts, weight, NO_BIAS, l);
}

static inline const floatX* layer_vector(const Activations* acts, size_t field, int l) {
    return (const floatX*)model_vector(acts->model, field, l);
}

static inline float* layer_vector_gradient(const Activations* acts, size_t field, int l) {
    return model_vector_gradient(acts->model, field, l);
}

static inline float* layer_floats(const Activations* acts, size_t field, int l) {
    return (float*)model_pointer(acts->model, model_row(acts->model, field, l), l);
}

// ---- norms ----

// channels of the norm whose weight is a field of the table
static inline int layer_channels_(const Activations* acts, size_t field, int l) {
    return (int)tensor_slice_elements(&acts->model->held[model_row(acts->model, field, l)]);
}

// of a norm whose gain is 1 + its weight, which is computed next
static inline const float* layer_gain_(const Activations* acts, size_t field, int l, int C, const Device* dev) {
    rmsnorm_gain(acts->gain, layer_vector(acts, field, l), C, dev);
    return acts->gain;
}

static inline void layer_rmsnorm_forward(const Activations* acts, floatX* out, float* rstd, const floatX* inp,
                                         size_t field, int l, int N, const Device* dev) {
    const int C = layer_channels_(acts, field, l);
    if (acts->centred > 0) {
        rmsnorm_forward(out, rstd, inp, layer_gain_(acts, field, l, C, dev), acts->eps, N, C, dev);
    } else {
        rmsnorm_forward(out, rstd, inp, layer_vector(acts, field, l), acts->eps, N, C, dev);
    }
}

// where the gain is the weight
static inline void layer_residual_rmsnorm_forward(const Activations* acts, floatX* residual, floatX* out, float* rstd,
                                                  const floatX* left, const floatX* right, size_t field, int l, int N,
                                                  const Device* dev) {
    assert(acts->centred == 0);
    residual_rmsnorm_forward(residual, out, rstd, left, right, layer_vector(acts, field, l), acts->eps, N,
                             layer_channels_(acts, field, l), dev);
}

// add: the gradient of inp goes on from what dinp holds
static inline void layer_rmsnorm_backward(const Activations* acts, floatX* dinp, const floatX* dout, const floatX* inp,
                                          const float* rstd, size_t field, int l, int add, int N, const Device* dev) {
    float* dgain = layer_vector_gradient(acts, field, l);
    const int C = layer_channels_(acts, field, l);
    if (acts->centred > 0) {
        rmsnorm_backward(dinp, dgain, dout, inp, layer_gain_(acts, field, l, C, dev), rstd, add, N, C, dev);
    } else {
        rmsnorm_backward(dinp, dgain, dout, inp, layer_vector(acts, field, l), rstd, add, N, C, dev);
    }
}

// N rows of `heads`, those of this rank, of which x has all
static inline void layer_heads_backward(const Activations* acts, floatX* dinp, const floatX* dout, const floatX* inp,
                                        const float* rstd, size_t field, int l, int heads, const RankGroup* x, int N,
                                        const Device* dev) {
    const int HS = layer_channels_(acts, field, l), is_asked = layer_vector_gradient(acts, field, l) != NULL;
    const HeadRows h = heads_gather(dinp, dout, inp, rstd, heads, N, HS, is_asked, acts->parallel.at, x, dev);
    layer_rmsnorm_backward(acts, h.dinp, h.dout, h.inp, h.rstd, field, l, 0, N * h.heads, dev);
    heads_take(dinp, &h, N, HS, x, dev);
}

// ---- experts, the head, streams ----

// of the trainer's table
typedef struct { size_t router, gate_up, down; } ExpertFields;

// a, s: of this layer; inp: what it reads. The router's bias, what it counts and choices that are given: the caller's
static inline ExpertPass layer_experts(Activations* acts, ExpertFields fields, const ExpertTensors* a,
                                       const ExpertStatistics* s, const floatX* inp, int l, int N) {
    ExpertPass p;
    memset(&p, 0, sizeof p);
    p.all = &acts->experts;
    p.a = *a, p.s = *s;
    p.experts = expert_choices(&acts->experts, l);
    p.inp = inp;
    p.router = layer_linear(acts, fields.router, l);
    p.gate_up = layer_linear(acts, fields.gate_up, l), p.down = layer_linear(acts, fields.down, l);
    p.N = N;
    return p;
}

static inline void layer_experts_back(ExpertPass* p, const Activations* acts, ExpertFields fields, int l) {
    p->drouter = layer_gradients(acts, fields.router, l);
    p->dgate_up = layer_gradients(acts, fields.gate_up, l), p->ddown = layer_gradients(acts, fields.down, l);
}

static inline float* layer_numbers(const Activations* acts, int i, int E) {
    return acts->numbers ? acts->numbers + (size_t)i * router_statistics_length(E) : NULL;
}

// of V tokens: from `norm`, what the last norm gives, to logits and losses, and back to its gradient, dnorm
static inline LmHead layer_head(const Activations* acts, size_t field, floatX* norm, floatX* dnorm, floatX* logits,
                                float* losses, int V) {
    const LmHead head = {layer_linear(acts, field, 0), norm, dnorm, logits, losses, acts->how.head_rows, V, 0, field};
    return head;
}

// C channels. Only training has a way back
static inline void layer_keep(Activations* acts, int l, Stream between, Stream behind, int N, int C,
                              const Device* dev) {
    acts->fresh = l;
    if (acts->purpose != TO_TRAIN) { return; }
    stream_keep(between, N, C, &acts->model->tp, dev);
    stream_keep(behind, N, C, &acts->model->tp, dev);
}

static inline int layer_is_fresh(const Activations* acts, int l) { return acts->fresh == l; }

// s: a stream of layer l; of the last one it is still there
static inline const floatX* layer_stream(const Activations* acts, Stream s, int l, int N, int C, const Device* dev) {
    return layer_is_fresh(acts, l) ? s.x : stream_bring(s, N, C, &acts->model->tp, dev);
}
#endif  // LLMC_LAYER_H
