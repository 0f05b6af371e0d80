/*
Steps of backward, beside products, that sum over what ranks of --tp share. Such a sum is one chain over all of it, so
what it goes over is gathered, and every rank computes the whole step. Alone, or where nobody asks for the sum, a rank
computes its own part with what it has.
    heads_gather       a norm of each head, such as RMSNorm of queries: its gain is that of all heads, and the gain's
                       gradient chains over the heads of all ranks. What its backward reads, of the heads that are
                       returned
    heads_take         ... and from its dinp to that of this rank's heads
    swiglu_backward_gathered   swiglu_backward (ops/swiglu.h), whose dweight chains over the channels of all ranks
    heads_room_elements, swiglu_room_elements   scratch
    heads_sends, swiglu_sends   bytes that a rank sends: of a norm of heads, where its weight learns
heads, F: of this rank; but in the last four lines of all ranks together.
Cost:   a rank sends (T-1)/T of the gradient, the input and a float for each head; of t and gate_up.
*/
#ifndef LLMC_GATHERED_H
#define LLMC_GATHERED_H
#include "../core/floatx.h"            // floatX
#include "../ops/swiglu.h"             // swiglu_backward
#include "../ranks/model.h"            // Model, model_field_learns
#include "../ranks/tensor_parallel.h"  // tp_gather, tp_gather_floats, tp_take

// N rows of so many heads
typedef struct {
    floatX* dinp;
    const floatX *dout, *inp;
    const float* rstd;
    int heads;
} HeadRows;

// elements of an array in the room
static inline size_t gathered_aligned_(size_t n) { return (n + 15) / 16 * 16; }

// a float may be two floatX
static inline size_t heads_room_elements(int N, int heads, int HS, const RankGroup* x) {
    return x->size == 1 ? 0 : (size_t)N * (size_t)heads * (size_t)(4 * HS + 4) + 5 * 16;
}

static inline size_t swiglu_room_elements(int N, int F, const RankGroup* x) {
    return x->size == 1 ? 0 : (size_t)N * (size_t)(5 * F) + 3 * 16;
}

static inline double heads_sends(const Model* m, size_t field, int l, int heads, int HS, const RankGroup* x, int N) {
    if (!model_field_learns(m, field, l)) { return 0.0; }
    return (x->size - 1.0) / x->size * (double)N * heads * (sizeof(floatX) * 2.0 * HS + sizeof(float));
}

static inline double swiglu_sends(int N, int F, const RankGroup* x) {
    return (x->size - 1.0) / x->size * sizeof(floatX) * (double)N * 3 * F;
}

// is_asked: somebody wants the gradient of the gain
static inline HeadRows heads_gather(floatX* dinp, const floatX* dout, const floatX* inp, const float* rstd, int heads,
                                    int N, int HS, int is_asked, floatX* room, const RankGroup* x, const Device* dev) {
    const HeadRows own = {dinp, dout, inp, rstd, heads};
    const int all = heads * x->size;
    const size_t n = gathered_aligned_((size_t)N * (size_t)all * (size_t)HS);
    if (x->size == 1 || !is_asked) { return own; }
    floatX *douts = room + n, *inps = room + 2 * n, *landing = room + 3 * n;
    float *rstds = (float*)(room + 4 * n), *rstd_landing = rstds + (size_t)N * (size_t)all;
    tp_gather(douts, dout, landing, N, tp_one(all * HS), x, dev);
    tp_gather(inps, inp, landing, N, tp_one(all * HS), x, dev);
    tp_gather_floats(rstds, rstd, rstd_landing, N, all, x, dev);
    const HeadRows whole = {room, douts, inps, rstds, all};
    return whole;
}

static inline void heads_take(floatX* dinp, const HeadRows* rows, int N, int HS, const RankGroup* x,
                              const Device* dev) {
    if (rows->dinp != dinp) { tp_take(dinp, rows->dinp, N, tp_one(rows->heads * HS), x, dev); }
}

// weighted may be t, dgate_up may be gate_up
static inline void swiglu_backward_gathered(floatX* dgate_up, floatX* weighted, float* dweight, const floatX* t,
                                            const floatX* gate_up, const float* weight, int N, int F, floatX* room,
                                            const RankGroup* x, const Device* dev) {
    const int all = F * x->size;
    const TpSections both = {2, {all, all, 0, 0}};
    const size_t n = gathered_aligned_((size_t)N * (size_t)all);
    if (x->size == 1) {
        swiglu_backward(dgate_up, weighted, dweight, t, gate_up, weight, 0.0f, N, F, dev);
        return;
    }
    floatX *ts = room, *gate_ups = room + n, *landing = gate_ups + 2 * n;
    tp_gather(ts, t, landing, N, tp_one(all), x, dev);
    tp_gather(gate_ups, gate_up, landing, N, both, x, dev);
    swiglu_backward(gate_ups, ts, dweight, ts, gate_ups, weight, 0.0f, N, all, dev);
    tp_take(dgate_up, gate_ups, N, both, x, dev);
    tp_take(weighted, ts, N, tp_one(all), x, dev);
}
#endif  // LLMC_GATHERED_H
