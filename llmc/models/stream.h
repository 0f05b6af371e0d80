/*
The residual stream between halves of a block, where backward asks for it again. Alone a rank keeps it for every layer.
With --tp the ranks that compute a micro-batch together have the same stream, of which each keeps its part of the
positions for every layer (tp_gather_rows), and one buffer serves all layers.
    Stream          a field of a trainer's ActivationTensors
    stream_rows     its lines of the table
    stream_keep     once forward has written it, in training: this rank's rows of this layer
    stream_bring    before backward reads it: whole again; alone it is
    stream_sends    bytes that a rank sends for that
*/
#ifndef LLMC_STREAM_H
#define LLMC_STREAM_H
#include "../core/floatx.h"            // floatX
#include "../core/tensor.h"            // Tensor, activation
#include "../ranks/model.h"            // Purpose
#include "../ranks/tensor_parallel.h"  // tp_gather_rows

typedef struct {
    floatX* x;     // (N, C)
    floatX* kept;   // with --tp, of a layer the rows of this rank
} Stream;

// behind t; at: the offset of the field. layers: those that keep it for backward. Returns the end
static inline Tensor* stream_rows(Tensor* t, const char* name, size_t at, int layers, int N, int C, Purpose purpose,
                                  const RankGroup* x) {
    const int is_divided = x->size > 1 && purpose == TO_TRAIN;
    *t++ = activation(name, at + offsetof(Stream, x), is_divided ? 0 : layers, N, C);
    if (is_divided) { *t++ = activation(name, at + offsetof(Stream, kept), layers, (N + x->size - 1) / x->size, C); }
    return t;
}

// where this rank's rows begin, elements, and how many these are
static inline size_t stream_own_(int N, int C, const RankGroup* x, size_t* begin) {
    *begin = (size_t)C * (size_t)comm_share(N, x->place, x->size);
    return (size_t)C * (size_t)comm_share(N, x->place + 1, x->size) - *begin;
}

static inline void stream_keep(Stream s, int N, int C, const RankGroup* x, const Device* dev) {
    size_t begin, n = stream_own_(N, C, x, &begin);
    if (x->size > 1) { device_copy(s.kept, s.x + begin, sizeof(floatX) * n, dev); }
}

static inline const floatX* stream_bring(Stream s, int N, int C, const RankGroup* x, const Device* dev) {
    size_t begin, n = stream_own_(N, C, x, &begin);
    if (x->size == 1) { return s.x; }
    device_copy(s.x + begin, s.kept, sizeof(floatX) * n, dev);
    tp_gather_rows(s.x, N, sizeof(floatX) * (size_t)C, x, dev);
    return s.x;
}

static inline double stream_sends(int N, int C, const RankGroup* x) {
    return (x->size - 1.0) * tp_own_rows(N, x) * sizeof(floatX) * C;
}
#endif  // LLMC_STREAM_H
