/*
What goes from stage to stage, with --pp: the residual stream behind the last layer of a stage, (positions, channels),
which the first layer of the next one reads; on the way back the gradient of it. What the routers of earlier layers have
counted goes along, for the last stage adds it up, and with gradients comes back.
    PpStreams             where a stage has these
    pp_receive, pp_send   of a pass without gradients: before its layers, and behind them
    pp_swap               with one neighbour: something goes there, something else comes from there, or neither
    pp_wait               it has come and gone
    pp_swap_rows          n_bytes from the first stage to the last one, or back; the host waits
    pp_tell               what the last stage knows, on the host, to all
Order:  messages of a pair are swapped in the order in which both ask for them. `pp_swap` is one call for both
        directions, for neither of two ranks may wait for the other to receive first.
Cost:   n_bytes and n_number_bytes for each micro-batch, pair and direction.
*/
#ifndef LLMC_PIPELINE_LINK_H
#define LLMC_PIPELINE_LINK_H
#include "pipeline_ranks.h"  // PpRanks, rank_pair_exchange

typedef struct {
    void *in, *out;   // the stream before the first layer of this stage, and behind its last
    void* gradient;   // of the stream behind it, then of that before it
    void *numbers, *returned;  // what routers have counted so far; what all of them have, as it comes back
    size_t n_bytes, n_number_bytes;  // of in, out and gradient; of numbers and returned, 0: there are none
} PpStreams;

// without what routers count
static inline PpStreams pp_streams(void* in, void* out, void* gradient, size_t n_bytes) {
    const PpStreams e = {in, out, gradient, NULL, NULL, n_bytes, 0};
    return e;
}

typedef struct {
    Comm* pair;  // NULL: there was none
    CommTicket stream, numbers;
} PpSwap;

// NULL: nothing goes, or comes. The buffers belong to it until pp_wait
static inline PpSwap pp_swap(Comm* pair, const void* send, const void* numbers_out, void* recv,
                             void* numbers_in, const PpStreams* e, const Device* dev) {
    PpSwap s = {pair, {0}, {0}};
    s.stream = rank_pair_exchange(pair, send, recv, e->n_bytes, dev);
    if (e->n_number_bytes > 0) {
        s.numbers = rank_pair_exchange(pair, numbers_out, numbers_in, e->n_number_bytes, dev);
    }
    return s;
}

// of one that never was, too, and as often as you like
static inline void pp_wait(const PpSwap* s, const PpStreams* e, const Device* dev) {
    if (!s->pair) { return; }
    comm_wait_device(s->pair, s->stream, dev);
    if (e->n_number_bytes > 0) { comm_wait_device(s->pair, s->numbers, dev); }
}

// here: sent or received, as `sends` says; on the first and the last stage
static inline void pp_swap_rows(const PpRanks* x, void* here, int sends, size_t n_bytes, const Device* dev) {
    const CommTicket ticket = rank_pair_exchange(x->tie, sends ? here : NULL, sends ? NULL : here, n_bytes, dev);
    comm_wait_device(x->tie, ticket, dev);
}

// ---- a pass without gradients ----

static inline void pp_receive(const PpRanks* x, const PpStreams* e, const Device* dev) {
    if (x->n_stages == 1 || pp_is_first(x)) { return; }
    const PpSwap s = pp_swap(x->previous, NULL, NULL, e->in, e->numbers, e, dev);
    pp_wait(&s, e, dev);
}

static inline void pp_send(const PpRanks* x, const PpStreams* e, const Device* dev) {
    if (x->n_stages == 1 || pp_is_last(x)) { return; }
    const PpSwap s = pp_swap(x->next, e->out, e->numbers, NULL, NULL, e, dev);
    pp_wait(&s, e, dev);
}

// n floats on the host
static inline void pp_tell(const PpRanks* x, float* values, size_t n) {
    if (x->n_stages == 1) { return; }
    comm_wait(x->line, comm_broadcast(x->line, values, n, DT_F32, x->size - 1, HERE));
}
#endif  // LLMC_PIPELINE_LINK_H
