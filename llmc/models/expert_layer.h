/*
A mixture of experts in place of an MLP, as a layer of a model has it: a router chooses k of E experts for every
position, each of these computes (silu(x Wgate^T) o (x Wup^T)) Wdown^T, and what they say is weighed and added up. Parts
of the forward and backward pass of a layer, and lines for the tables of activations:
    ExpertTensors, ExpertStatistics   what a pass leaves behind; a trainer has both in its own structs
    expert_tensor_rows, expert_statistic_rows   their lines
    expert_most_positions  of a pass, whose rows an int can count
    expert_layers_layout, expert_layers_open, expert_layers_close   what all layers share: rows sorted by expert, what
                           travels to experts of other ranks (--ep)
    ExpertPass             one layer: where its parameters and activations are
    expert_choose          the router's choice, or with `replay` the rows of a choice that was made before
    expert_gather          which rows the experts of this rank compute, and what they read
    expert_gate_up, expert_down   the two products; out (N, D) is what the experts of a position say, weighed
    expert_backward        from dout (N, D) to the gradients of all parameters and of inp, dinp (N, D), written
    expert_backward_router, expert_backward_rows   its two halves, where what else reads inp has its say between them:
                           dinp goes on from the router's outputs through others
    routing_read           what the routers of all layers have counted in an update
    expert_level_bias      after an update: the bias by which a router chooses, by what it has counted
With --tp ranks have the same positions: each has the router choose for all of them, brings its part of the rows, and
        what the experts say of them is gathered. With --cp each has other positions of a micro-batch, and its routers'
        numbers are those of the whole micro-batch: means over the ranks.
Widths: inp (N, D) is what router and experts read. A position with one of its experts is a row (expert_rows.h).
Order:  dinp chains over the router's outputs from 0; rows of the position's experts are added, ascending.
Source: Shazeer et al. 2017, arXiv:1701.06538; the weight's gradient without the expert's output: doc/moe.md
*/
#ifndef LLMC_EXPERT_LAYER_H
#define LLMC_EXPERT_LAYER_H
#include "../core/tensor_arena.h"  // TensorArena
#include "../ops/cast.h"           // cast
#include "../ops/router.h"         // RouterShape, router_forward, router_statistics, router_backward
#include "../ops/swiglu.h"         // swiglu_forward, swiglu_backward
#include "../ranks/context_parallel.h"  // RankGroup, cp_gather_floats
#include "../ranks/model.h"        // Model, dp_sums
#include "experts.h"               // ExpertParallel, experts_forward, experts_backward_input, experts_backward_weight

// from `drows` on the gradients on their way back
typedef struct {
    floatX *received, *expert_gate_up, *expert_hidden, *computed, *expert_out, *drows, *dreceived, *dhidden, *drouter;
} ExpertTensors;

// what must not lose digits, always float
typedef struct {
    float *router_logits, *scores, *lse, *weights, *row_weights, *drow_weights, *received_weights, *dreceived_weights,
        *dweights, *drouter_logits, *sequences;
} ExpertStatistics;

typedef struct {
    int D, F;              // channels; of an expert
    RouterShape router;
    EpOptions ep;          // which ranks have which experts
    int L;                 // layers of the model; of these those of a kind "E" have experts
    const char* kinds;     // NULL: all have
    const RankGroup* cp;   // with --cp, in training: who has which positions; NULL: a rank has all of a micro-batch
    size_t adapter;        // elements of the largest A or B of an expert; 0: there is none
    float limit;           // of gates and ups (swiglu.h); 0: none
    int sequences;         // rows of a micro-batch, each of which has a balance of its own; 0: all of it has one
} ExpertSizes;

// what all layers of a model share
typedef struct {
    ExpertSizes size;
    ExpertRows rows;     // of the layer that is computed now
    ExpertParallel ep;   // those that the experts of this rank compute
    TensorArena choices; // experts (L, N, k), ascending
    float* scratch;      // of experts_backward_weight and experts_backward_adapters
    size_t n_scratch;
    float* counted;      // with cp: what the router of a layer has counted on each rank
} ExpertLayers;

// each of k experts; 0: there are none
static inline int expert_most_positions(int k) { return INT_MAX / (k > 0 ? k : 1); }

// ---- tables ----

// in generation all ranks have the same positions, and bring none
static inline int expert_positions_(const ExpertSizes* s, int N, Purpose purpose) {
    return purpose == TO_GENERATE ? N : experts_positions(&s->ep, N);
}

static inline int expert_rows_here_(const ExpertSizes* s, int N, Purpose purpose) {
    return purpose == TO_GENERATE ? N * s->router.k : experts_rows_most(&s->ep, s->router.E, s->router.k, N);
}

// a line for the layers that have experts, or with `layers` 0 for all of them in turn
static inline Tensor expert_row_(const ExpertSizes* s, const char* name, size_t field, int layers, int rows,
                                 int columns) {
    return kind_activation(s->kinds, "E", name, field, layers, rows, columns);
}

// Lines of N positions behind t; `at` is the offset of ExpertTensors in the struct of all. L_gate_up: as many layers as
// keep it for backward. Returns the end
static inline Tensor* expert_tensor_rows(Tensor* t, size_t at, const ExpertSizes* s, int N, int L_gate_up,
                                         Purpose purpose) {
    const int trains = purpose == TO_TRAIN, travels = s->ep.size > 1, k = s->router.k;
    const int here = expert_rows_here_(s, N, purpose), sent = purpose == TO_GENERATE ? 0 : here;
    const int R = expert_positions_(s, N, purpose) * k;
#define FIELD(name) #name, at + offsetof(ExpertTensors, name)
    *t++ = expert_row_(s, FIELD(received),       0, travels * sent, s->D);  // rows of inp, for the experts of this rank
    *t++ = expert_row_(s, FIELD(expert_gate_up), L_gate_up, here, 2 * s->F);  // then its gradient
    *t++ = expert_row_(s, FIELD(expert_hidden),  0, here, s->F);            // silu(gate) o up
    *t++ = expert_row_(s, FIELD(computed),       0, travels * here, s->D);  // what goes back to other ranks
    *t++ = expert_row_(s, FIELD(expert_out),     0, R, s->D);
    *t++ = expert_row_(s, FIELD(drows),          0, trains * R, s->D);  // gradient of inp, in rows of experts
    *t++ = expert_row_(s, FIELD(dreceived),      0, trains * travels * here, s->D);
    *t++ = expert_row_(s, FIELD(dhidden),        0, trains * here, s->F);   // where the weight is 1: t of swiglu.h
    *t++ = expert_row_(s, FIELD(drouter),        0, trains * N, s->router.E);  // drouter_logits as products read them
#undef FIELD
    return t;
}

// L_kept: as many layers as keep their choice's weights for backward
static inline Tensor* expert_statistic_rows(Tensor* t, size_t at, const ExpertSizes* s, int N, int L_kept,
                                            Purpose purpose) {
    const int trains = purpose == TO_TRAIN, k = s->router.k, E = s->router.E;
    const int received = trains && s->ep.size > 1 ? expert_rows_here_(s, N, purpose) : 0;
    const int R = expert_positions_(s, N, purpose) * k;
#define FIELD(name) #name, at + offsetof(ExpertStatistics, name)
    const int L_logits = s->router.score == ROUTER_SQRT_SOFTPLUS ? L_kept : 0;  // whose slope asks for them
    *t++ = expert_row_(s, FIELD(router_logits),     L_logits, N, E);
    *t++ = expert_row_(s, FIELD(scores),            L_kept, N, E);  // of the router's logits, by RouterShape.score
    const int is_softmax = s->router.score == ROUTER_SOFTMAX;
    *t++ = expert_row_(s, FIELD(lse),               L_kept, is_softmax * N, 1);  // log of the sum of their exponentials
    *t++ = expert_row_(s, FIELD(weights),           L_kept, N, k);  // of the chosen experts
    const int n_sequences = trains * s->sequences;  // of all layers: what is computed again is not counted again
    *t++ = expert_row_(s, FIELD(sequences),         n_sequences > 0 ? s->L : 0, n_sequences,
                       (int)router_statistics_length(E));
    *t++ = expert_row_(s, FIELD(row_weights),       0, trains * R, 1);  // weights, of rows of experts
    *t++ = expert_row_(s, FIELD(drow_weights),      0, trains * R, 1);
    *t++ = expert_row_(s, FIELD(received_weights),  0, received, 1);
    *t++ = expert_row_(s, FIELD(dreceived_weights), 0, received, 1);
    *t++ = expert_row_(s, FIELD(dweights),          0, trains * N, k);
    *t++ = expert_row_(s, FIELD(drouter_logits),    0, trains * N, E);
#undef FIELD
    return t;
}

// ---- what all layers share ----

// with cp, floats of `counted`: of the router and, where sequences have a balance, twice of each of these
static inline size_t expert_counted_(const ExpertSizes* s) {
    const size_t n = (size_t)(1 > 2 * s->sequences ? 1 : 2 * s->sequences) * router_statistics_length(s->router.E);
    return s->cp ? (size_t)s->cp->size * n : 0;
}

// Sizes only: bytes that expert_layers_open will take on the device. slots: of the arena of choices
static inline double expert_layers_layout(ExpertLayers* x, const ExpertSizes* s, int N, Purpose purpose,
                                          const ArenaSlots* slots) {
    memset(x, 0, sizeof *x);
    x->size = *s;
    const size_t matrix = 2 * (size_t)s->F * (size_t)s->D, widest = matrix > s->adapter ? matrix : s->adapter;
    x->n_scratch = purpose == TO_TRAIN ? experts_scratch_floats(&s->ep, s->router.E, widest) : 0;
    x->choices.table[0] = expert_row_(s, "experts", 0, s->L, N, s->router.k);
    tensor_arena_layout(&x->choices, 1, sizeof(int));
    return tensor_arena_divide(&x->choices, slots) + (double)expert_rows_bytes(N, s->router.k, s->router.E) +
           sizeof(float) * (double)(x->n_scratch + expert_counted_(s));
}

// after expert_layers_layout; ranks: those that share the experts of the model
static inline void expert_layers_open(ExpertLayers* x, const ExpertRanks* ranks, int N, Purpose purpose) {
    const RouterShape* router = &x->size.router;
    tensor_arena_open(&x->choices, "chosen experts");
    expert_rows_init(&x->rows, N, router->k, router->E);
    ep_open(&x->ep, ranks, router->E, expert_rows_here_(&x->size, N, purpose),
            (double)experts_positions(&x->size.ep, N) * router->k, purpose == TO_GENERATE);
    if (x->n_scratch > 0) { x->scratch = (float*)device_alloc(sizeof(float) * x->n_scratch, "gradients of experts"); }
    if (x->size.cp) {
        x->counted = (float*)device_alloc(sizeof(float) * expert_counted_(&x->size), "what routers count");
    }
}

static inline void expert_layers_close(ExpertLayers* x) {
    tensor_arena_close(&x->choices);
    expert_rows_free(&x->rows);
    if (x->ep.ranks) { ep_close(&x->ep); }
    device_release(x->scratch, sizeof(float) * x->n_scratch);
    if (x->counted) { device_release(x->counted, sizeof(float) * expert_counted_(&x->size)); }
}

// ---- a layer ----

// the gradients are needed in backward alone
typedef struct {
    ExpertLayers* all;
    ExpertTensors a;
    ExpertStatistics s;
    int* experts;               // (N, k)
    const floatX* inp;          // (N, D)
    Linear router, gate_up, down;
    const float* bias;          // of the router: for its choice alone, or NULL
    LinearGradients drouter, dgate_up, ddown;
    float* numbers;             // router_statistics_length: what the router counts; NULL: nobody asks
    int N;
    const int* given;           // (N, k) experts that the token decides on (token_choice.h); NULL: the router chooses
} ExpertPass;

// the positions whose rows this rank brings, first .. first + n - 1
typedef struct { int first, n; } ExpertPositions;

static inline ExpertPositions expert_own_(const ExpertPass* p) {
    const ExpertParallel* ep = &p->all->ep;
    const int parts = ep->parts, place = parts > 1 ? ep->ranks->tp->place : 0;
    const int first = (int)comm_share(p->N, place, parts), end = (int)comm_share(p->N, place + 1, parts);
    const ExpertPositions own = {first, end - first};
    return own;
}

// what each rank has of its positions; width: bytes of one
static inline void expert_gather_positions_(const ExpertPass* p, void* x, size_t width, const Device* dev) {
    const ExpertParallel* ep = &p->all->ep;
    if (ep->parts > 1) { tp_gather_rows(x, p->N, width, ep->ranks->tp, dev); }
}

static inline int* expert_choices(const ExpertLayers* x, int l) {
    int* experts;
    tensor_arena_point(&x->choices, &experts, l);
    return experts;
}

// what the router has counted in this rank's positions becomes that of the micro-batch
static inline void expert_pool_(const ExpertPass* p, const Device* dev) {
    const RouterShape* shape = &p->all->size.router;
    const RankGroup* cp = p->all->size.cp;
    if (!cp) { return; }
    cp_gather_floats(p->all->counted, p->numbers, router_statistics_length(shape->E), cp, dev);
    router_pool(p->numbers, p->all->counted, cp->size, shape, p->N, dev);
}

// What the router has counted in this rank's positions of each sequence becomes that of the sequence
static inline void expert_pool_sequences_(const ExpertPass* p, const Device* dev) {
    const RouterShape* shape = &p->all->size.router;
    const RankGroup* cp = p->all->size.cp;
    const int B = p->all->size.sequences;
    const size_t n = router_statistics_length(shape->E), width = sizeof(float) * n;
    if (!cp) { return; }
    float *of_ranks = p->all->counted, *of_rows = of_ranks + (size_t)cp->size * (size_t)B * n;
    cp_gather_floats(of_ranks, p->s.sequences, (size_t)B * n, cp, dev);
    for (int r = 0; r < cp->size; r++) {
        const float* of_rank = of_ranks + (size_t)r * (size_t)B * n;
        device_copy_strips(of_rows + (size_t)r * n, width * (size_t)cp->size, of_rank, width, width, B, dev);
    }
    for (int b = 0; b < B; b++) {
        router_pool(p->s.sequences + (size_t)b * n, of_rows + (size_t)b * (size_t)cp->size * n, cp->size, shape,
                    p->N / B, dev);
    }
}

// the rows of the micro-batch one after the other; their balance becomes the mean of theirs
static inline void expert_count_sequences_(const ExpertPass* p, const Device* dev) {
    const RouterShape* shape = &p->all->size.router;
    const int B = p->all->size.sequences, T = p->N / B;
    const ExpertStatistics* s = &p->s;
    for (int b = 0; b < B; b++) {
        const size_t first = (size_t)b * (size_t)T;
        router_statistics(s->sequences + (size_t)b * router_statistics_length(shape->E),
                          p->experts + first * (size_t)shape->k, s->weights + first * (size_t)shape->k,
                          s->scores + first * (size_t)shape->E, NULL, shape, T, dev);
    }
    expert_pool_sequences_(p, dev);
    router_mean_balance(p->numbers, s->sequences, B, shape->E, dev);
}

// replay: these positions have chosen their experts
static inline void expert_choose(const ExpertPass* p, int replay, const Device* dev) {
    const RouterShape* shape = &p->all->size.router;
    const ExpertStatistics* s = &p->s;
    linear_forward(s->router_logits, p->inp, p->router, p->N, dev);
    float* lse = shape->score == ROUTER_SOFTMAX ? s->lse : NULL;
    router_forward(p->experts, s->weights, s->scores, lse, s->router_logits, p->bias, replay ? p->experts : p->given,
                   shape, p->N, dev);
    if (p->numbers && !replay) {
        router_statistics(p->numbers, p->experts, s->weights, s->scores, lse, shape, p->N, dev);
        expert_pool_(p, dev);
        if (p->all->size.sequences > 0) { expert_count_sequences_(p, dev); }
    }
}

static inline void expert_gather(const ExpertPass* p, const Device* dev) {
    ExpertLayers* x = p->all;
    const ExpertPositions own = expert_own_(p);
    const size_t D = (size_t)x->size.D;
    expert_rows_find(&x->rows, p->experts + own.first * x->size.router.k, own.n, dev);
    ep_find(&x->ep, &x->rows, dev);
    if (!ep_sends(&x->ep)) { return; }
    expert_rows_copy(p->a.expert_out, p->inp + (size_t)own.first * D, &x->rows, (int)D, dev);
    ep_send(&x->ep, p->a.received, p->a.expert_out, sizeof(floatX) * D, dev);
}

// what the experts of this rank read: a row's lies with its position
static inline const floatX* expert_inputs_(const ExpertPass* p) {
    return ep_sends(&p->all->ep) ? p->a.received : p->inp;
}

static inline void expert_gate_up(const ExpertPass* p, const Device* dev) {
    experts_forward(&p->all->ep, p->a.expert_gate_up, expert_inputs_(p), BY_TOKEN, p->gate_up, dev);
}

static inline void expert_down(const ExpertPass* p, floatX* out, const Device* dev) {
    const ExpertParallel* ep = &p->all->ep;
    const int D = p->all->size.D, k = p->all->size.router.k, is_alone = ep->ranks->ep.size == 1;
    const size_t width = sizeof(floatX) * (size_t)D;
    const ExpertPositions own = expert_own_(p);
    const ExpertTensors* a = &p->a;
    swiglu_forward(a->expert_hidden, a->expert_gate_up, p->all->size.limit, ep->n_rows,
                   p->all->size.F, dev);
    experts_forward(ep, is_alone ? a->expert_out : a->computed, a->expert_hidden, ROW_BY_ROW, p->down, dev);
    if (!is_alone) { ep_return(ep, a->expert_out, a->computed, width, dev); }
    expert_rows_combine(out + (size_t)own.first * (size_t)D, a->expert_out, p->s.weights + own.first * k,
                        &p->all->rows, D, dev);
    expert_gather_positions_(p, out, width, dev);
}

// The experts of this rank, for all rows that they compute: from dout to the gradients of their inputs, drows, and of
// the weight that each has in its position, drow_weights. The latter needs no output of the expert: it is
// (dout Wdown) . hidden (doc/moe.md).
static inline void expert_products_backward_(const ExpertPass* p, const floatX* dout, const Device* dev) {
    const ExpertLayers* x = p->all;
    const ExpertParallel* ep = &x->ep;
    const ExpertTensors* a = &p->a;
    const ExpertStatistics* s = &p->s;
    const int D = x->size.D, F = x->size.F, k = x->size.router.k, sends = ep_sends(ep);
    const size_t width = sizeof(floatX) * (size_t)D;
    const ExpertPositions own = expert_own_(p);
    const float* weights = sends ? s->received_weights : s->row_weights;
    float* dweights = sends ? s->dreceived_weights : s->drow_weights;
    floatX* drows = sends ? a->computed : a->drows;
    expert_rows_weights(s->row_weights, s->weights + own.first * k, &x->rows, dev);
    if (sends) {
        expert_rows_copy(a->drows, dout + (size_t)own.first * (size_t)D, &x->rows, D, dev);
        ep_send(ep, a->dreceived, a->drows, width, dev);
        ep_send(ep, s->received_weights, s->row_weights, sizeof(float), dev);
        dout = a->dreceived;
    }
    experts_backward_input(ep, a->dhidden, dout, BY_TOKEN, p->down, dev);
    if (p->down.n_adapters > 0) {  // they read what swiglu_backward is about to weigh
        swiglu_forward(a->expert_hidden, a->expert_gate_up, x->size.limit, ep->n_rows, F, dev);
        experts_backward_adapters(ep, &p->ddown, dout, BY_TOKEN, a->expert_hidden, ROW_BY_ROW, weights, p->down,
                                  x->scratch, dev);
    }
    swiglu_backward(a->expert_gate_up, a->expert_hidden, dweights, a->dhidden, a->expert_gate_up,
                    weights, x->size.limit, ep->n_rows, F, dev);
    experts_backward_weight(ep, p->ddown.weight, dout, BY_TOKEN, a->expert_hidden, ROW_BY_ROW, x->scratch, F, D, dev);
    experts_backward_weight(ep, p->dgate_up.weight, a->expert_gate_up, ROW_BY_ROW, expert_inputs_(p), BY_TOKEN,
                            x->scratch, D, 2 * F, dev);
    experts_backward_adapters(ep, &p->dgate_up, a->expert_gate_up, ROW_BY_ROW, expert_inputs_(p), BY_TOKEN, NULL,
                              p->gate_up, x->scratch, dev);
    experts_backward_input(ep, drows, a->expert_gate_up, ROW_BY_ROW, p->gate_up, dev);
    if (sends) {
        ep_return(ep, a->drows, drows, width, dev);
        ep_return(ep, s->drow_weights, dweights, sizeof(float), dev);
    }
}

// of each row of the micro-batch by itself
static inline void expert_router_back_sequences_(const ExpertPass* p, float balance, const Device* dev) {
    const RouterShape* shape = &p->all->size.router;
    const ExpertStatistics* s = &p->s;
    const int B = p->all->size.sequences, T = p->N / B;
    const size_t k = (size_t)shape->k, E = (size_t)shape->E;
    for (int b = 0; b < B; b++) {
        const size_t first = (size_t)b * (size_t)T;
        router_backward(s->drouter_logits + first * E, s->dweights + first * k, p->experts + first * k,
                        s->weights + first * k, s->scores + first * E, NULL, s->router_logits + first * E,
                        s->sequences + (size_t)b * router_statistics_length(shape->E), balance, 0.0f, shape, T, dev);
    }
}

// The rows of this layer have been found, its first product is there. counts (E): what the router's balance loss sees,
// NULL without one; balance, z: weights of the router's losses.
// Sequences with a balance of their own know their counts
static inline void expert_backward_router(const ExpertPass* p, floatX* dinp, const floatX* dout, const float* counts,
                                          float balance, float z, const Device* dev) {
    const RouterShape* shape = &p->all->size.router;
    const ExpertStatistics* s = &p->s;
    const ExpertPositions own = expert_own_(p);
    const size_t k = (size_t)shape->k;
    expert_products_backward_(p, dout, dev);
    expert_rows_dweights(s->dweights + (size_t)own.first * k, s->drow_weights, &p->all->rows, dev);
    expert_gather_positions_(p, s->dweights, sizeof(float) * k, dev);
    if (p->all->size.sequences > 0 && balance != 0.0f) {
        expert_router_back_sequences_(p, balance, dev);
    } else {
        router_backward(s->drouter_logits, s->dweights, p->experts, s->weights, s->scores,
                        shape->score == ROUTER_SOFTMAX ? s->lse : NULL, s->router_logits, counts, balance, z, shape,
                        p->N, dev);
    }
    cast(p->a.drouter, (const float*)s->drouter_logits, (size_t)p->N * (size_t)shape->E, dev);
    linear_backward(dinp, p->a.drouter, p->inp, p->router, p->drouter, 0, p->N, dev);
}

static inline void expert_backward_rows(const ExpertPass* p, floatX* dinp, const Device* dev) {
    const size_t D = (size_t)p->all->size.D;
    const ExpertPositions own = expert_own_(p);
    expert_rows_add(dinp + (size_t)own.first * D, p->a.drows, &p->all->rows, (int)D, dev);
    expert_gather_positions_(p, dinp, sizeof(floatX) * D, dev);
}

static inline void expert_backward(const ExpertPass* p, floatX* dinp, const floatX* dout, const float* counts,
                                   float balance, float z, const Device* dev) {
    expert_backward_router(p, dinp, dout, counts, balance, z, dev);
    expert_backward_rows(p, dinp, dev);
}

// ---- what routers have counted in an update, once model_reduce is back ----

typedef struct {
    float balance, z;  // sums over layers of the means over leaves; balance is 1 a layer where experts are equally busy
    float load;        // of the busiest expert of all layers, as a multiple of its layer's mean
    int idle;          // experts of all layers that no token took
} Routing;

// of the first `layers` routers of the model
static inline Routing routing_read(const Model* m, int layers, int E) {
    const float *numbers = dp_sums(&m->dp), n_leaves = (float)m->dp.n_leaves;
    Routing sum = {0.0f, 0.0f, 0.0f, 0};
    for (int l = 0; l < layers; l++, numbers += router_statistics_length(E)) {
        const RouterLoad load = router_load(numbers, E);
        sum.balance += numbers[2 * E + ROUTER_BALANCE] / n_leaves;
        sum.z += numbers[2 * E + ROUTER_Z] / n_leaves;
        sum.load = load.busiest > sum.load ? load.busiest : sum.load;
        sum.idle += load.dead;
    }
    return sum;
}

// An expert that has had more than its share becomes harder to choose. bias (E) of layer l on the device; counts: of
// its router; rate, centred: as router_bias_update has them
static inline void expert_level_bias(float* bias, const float* counts, float rate, int centred, int E, int l,
                                     const Device* dev) {
    const size_t n_bytes = sizeof(float) * (size_t)E;
    float* x = (float*)malloc_check(n_bytes, "biases of a router");
    device_download(x, bias, n_bytes, dev);
    router_bias_update(x, counts, rate, centred, E);
    for (int e = 0; e < E; e++) {  // neither the loss nor a gradient would show it
        if (!isfinite(x[e])) { fail_run("layer %d: the bias of expert %d is %g", l, e, (double)x[e]); }
    }
    device_upload(bias, x, n_bytes, dev);
    device_sync(dev);
    free(x);
}
#endif  // LLMC_EXPERT_LAYER_H
