/*
The sizes of hyper-connections (hyper_connections.h), and which number stands where.
*/
#ifndef LLMC_HYPER_SHAPE_H
#define LLMC_HYPER_SHAPE_H
#ifdef __CUDACC__
#define HYPER_FUNCTION static inline __host__ __device__
#else
#define HYPER_FUNCTION static inline
#endif

enum {  // at most
    HYPER_STREAMS = 8,
    HYPER_SQUARE = HYPER_STREAMS * HYPER_STREAMS,
    HYPER_MOST = HYPER_SQUARE + 2 * HYPER_STREAMS  // numbers of a site
};

typedef struct {
    int N, hc, D;        // positions, streams, channels of a stream
    int iters;           // Sinkhorn's, at least 1
    float eps_h, eps_n;  // of Sinkhorn and pre; of r
} HyperShape;

// M of a site
static inline int hyper_numbers(const HyperShape* s) { return (2 + s->hc) * s->hc; }

// which scale number m has
HYPER_FUNCTION int hyper_part_(int m, int hc) { return m < hc ? 0 : m < 2 * hc ? 1 : 2; }

// number k of row i or, with by_row 0, of column i
HYPER_FUNCTION int hyper_at_(int by_row, int i, int k, int hc) { return by_row ? i * hc + k : k * hc + i; }
#endif  // LLMC_HYPER_SHAPE_H
