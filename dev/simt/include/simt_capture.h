/*
Streams, and what may happen between cudaStreamBeginCapture and cudaStreamEndCapture: kernels, copies, fills and products are
recorded with their arguments of that moment, and do not run. A graph is the list; it runs whenever it is launched.
    simt_submit(stream, what, work)   work(stream) now, or recorded; every call that gives the device something to do ends here
    simt_forbids()                    a call that no capture allows: it ends this thread's capture, as the driver would
Strict where a driver is silent: work for a stream that has not joined the capture would run at once, out of order, and
here ends the program. Streams cannot join: events in a capture are not modelled, and end it too.
*/
#ifndef SIMT_CAPTURE_H
#define SIMT_CAPTURE_H
#include "simt_memory.h"
#include <functional>

struct SimtStream;
struct SimtGraph {
    std::vector<std::function<void(SimtStream*)>> nodes;
};

struct SimtStream {
    int non_blocking;
    SimtGraph* capture;  // NULL: work runs when it comes
    int is_invalid;      // the capture: something that it forbids was called
};

inline thread_local SimtStream* simt_capturing;  // by this thread
inline int simt_n_blocking;                      // captures of streams that wait for the default stream, of all threads
inline uint64_t simt_n_submitted;                // calls that gave the device something to do
inline int simt_n_executable;                    // graphs that can be launched and were not destroyed

// numbers of cudaError_t
enum { SIMT_UNSUPPORTED = 900, SIMT_INVALIDATED = 901, SIMT_IMPLICIT = 906 };

static inline int simt_forbids() {
    if (!simt_capturing) { return 0; }
    simt_capturing->is_invalid = 1;
    return SIMT_UNSUPPORTED;
}

// the default stream waits for the one that is captured, which a graph cannot promise
static inline int simt_forbids_default_() {
    if (simt_n_blocking == 0) { return 0; }
    if (simt_capturing) { simt_capturing->is_invalid = 1; }
    return SIMT_IMPLICIT;
}

template <typename Work>
static inline int simt_submit(SimtStream* stream, const char* what, const Work& work) {
    if (!stream && simt_n_blocking > 0) { return simt_forbids_default_(); }
    if (stream && stream->capture) {
        if (stream != simt_capturing) { simt_fail("%s: another thread captures this stream", what); }
        if (stream->is_invalid) { return SIMT_INVALIDATED; }
        stream->capture->nodes.push_back(work);
        return 0;
    }
    if (simt_capturing) { simt_fail("%s: its stream has not joined the capture that goes on: it would run now", what); }
    __atomic_fetch_add(&simt_n_submitted, 1, __ATOMIC_RELAXED);
    work(stream);
    return 0;
}

// on_exit: a program that ends well has destroyed its graphs. SIMT_COUNT=1: it says how many calls it has submitted
static inline void simt_report_work_(int status, void*) {
    const char* asked = getenv("SIMT_COUNT");
    fflush(stdout);
    if (asked && *asked) {
        fprintf(stderr, "%s: simt: %llu calls gave the device something to do\n", program_invocation_short_name,
                (unsigned long long)simt_n_submitted);
    }
    if (status != 0 || simt_n_executable == 0) { return; }
    fprintf(stderr, "%s: simt: %d graphs were never destroyed\n", program_invocation_short_name, simt_n_executable);
    _exit(1);
}
inline int simt_reports_work_ = on_exit(simt_report_work_, NULL);
#endif  // SIMT_CAPTURE_H
