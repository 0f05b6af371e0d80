/*
A stand-in for CUDA's header: kernels run on the CPU (dev/simt/README.md). What is here is what llmc/ uses; another call does not compile.
    simt_types.h    __global__, dim3, float4             simt_memory.h   device memory, who may touch it
    simt_fiber.h    functions that stop and go on        simt_block.h    threads, warps, barriers, shared memory
    simt_launch.h   orders and the race check            simt_device.h   what kernels call
    simt_capture.h  streams, and work that is recorded   this file       what the host calls
Streams run at once, in the order of the calls; only what the host sees in pinned memory waits for a synchronisation.
*/
#ifndef SIMT_CUDA_RUNTIME_H
#define SIMT_CUDA_RUNTIME_H
#include "simt_device.h"
#define CUDART_VERSION 13000
#define CUDART_INF_F INFINITY

typedef enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorIllegalState = 401,
    cudaErrorNotReady = 600,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureUnsupported = SIMT_UNSUPPORTED,
    cudaErrorStreamCaptureInvalidated = SIMT_INVALIDATED,
    cudaErrorStreamCaptureImplicit = SIMT_IMPLICIT
} cudaError_t;

static inline const char* cudaGetErrorName(cudaError_t e) {
    switch (e) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorIllegalState: return "cudaErrorIllegalState";
        case cudaErrorNotReady: return "cudaErrorNotReady";
        case cudaErrorNotSupported: return "cudaErrorNotSupported";
        case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
        case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
    }
    return "unrecognized error code";
}
static inline const char* cudaGetErrorString(cudaError_t e) {
    switch (e) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorIllegalState: return "the operation cannot be performed in the present state";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorNotSupported: return "operation not supported";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        case cudaErrorStreamCaptureImplicit: return "operation would make the legacy stream depend on a capturing blocking stream";
    }
    return "unrecognized error code";
}

// an error is kept until it is asked for
static inline cudaError_t simt_return_(cudaError_t e) {
    if (e != cudaSuccess) { simt_last_error = e; }
    return e;
}
static inline cudaError_t cudaPeekAtLastError() { return (cudaError_t)simt_last_error; }
static inline cudaError_t cudaGetLastError() {
    cudaError_t e = (cudaError_t)simt_last_error;
    simt_last_error = cudaSuccess;
    return e;
}

// ---- the device ----

typedef struct {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor, regsPerBlock, l2CacheSize;
    int memoryBusWidth, ECCEnabled, pciBusID, pciDeviceID, pciDomainID;
} cudaDeviceProp;

enum { SIMT_MULTIPROCESSORS = 3 };  // few and odd: a loop over the grid has to wrap around

// a process has the memory of one device; which number it goes by is its choice, so that each rank of a machine has its own
enum { SIMT_DEVICES = 16 };
inline int simt_device;

static inline cudaError_t cudaGetDeviceCount(int* n) { *n = SIMT_DEVICES; return cudaSuccess; }
static inline cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= SIMT_DEVICES) { return simt_return_(cudaErrorInvalidDevice); }
    simt_device = device;
    return cudaSuccess;
}
static inline cudaError_t cudaGetDevice(int* device) { *device = simt_device; return cudaSuccess; }
static inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    if (device < 0 || device >= SIMT_DEVICES) { return simt_return_(cudaErrorInvalidDevice); }
    memset(p, 0, sizeof *p);
    strcpy(p->name, "simt");
    p->totalGlobalMem = SIMT_MEMORY;
    p->sharedMemPerBlock = SIMT_STATIC_SHARED;
    p->sharedMemPerBlockOptin = SIMT_MAX_SHARED;
    p->sharedMemPerMultiprocessor = SIMT_MAX_SHARED + 1024;
    p->major = 9;
    p->multiProcessorCount = SIMT_MULTIPROCESSORS;
    p->warpSize = SIMT_WARP;
    p->maxThreadsPerBlock = SIMT_MAX_THREADS;
    p->maxThreadsPerMultiProcessor = 2048;
    p->regsPerBlock = 65536;
    p->l2CacheSize = 50 << 20;
    return cudaSuccess;
}

typedef enum {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrClockRate = 13,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrMemoryClockRate = 36,
    cudaDevAttrGlobalMemoryBusWidth = 37,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
} cudaDeviceAttr;
static inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    if (device < 0 || device >= SIMT_DEVICES) { return simt_return_(cudaErrorInvalidDevice); }
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = SIMT_MAX_THREADS; return cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = SIMT_STATIC_SHARED; return cudaSuccess;
        case cudaDevAttrClockRate: *value = 1000000; return cudaSuccess;        // kHz
        case cudaDevAttrMultiProcessorCount: *value = SIMT_MULTIPROCESSORS; return cudaSuccess;
        case cudaDevAttrMemoryClockRate: *value = 1000000; return cudaSuccess;  // kHz
        case cudaDevAttrGlobalMemoryBusWidth: *value = 64; return cudaSuccess;  // bits
        case cudaDevAttrL2CacheSize: *value = 50 << 20; return cudaSuccess;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; return cudaSuccess;
        case cudaDevAttrComputeCapabilityMajor: *value = 9; return cudaSuccess;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = SIMT_MAX_SHARED + 1024; return cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SIMT_MAX_SHARED; return cudaSuccess;
    }
    return simt_return_(cudaErrorInvalidValue);
}
static inline cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
static inline cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
static inline cudaError_t cudaDeviceReset() { return cudaSuccess; }
static inline cudaError_t cudaMemGetInfo(size_t* n_free, size_t* n_total) {
    *n_total = SIMT_MEMORY;
    *n_free = simt_memory.n_bytes < SIMT_MEMORY ? SIMT_MEMORY - simt_memory.n_bytes : 0;
    return cudaSuccess;
}

// ---- kernels ----

typedef enum {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
} cudaFuncAttribute;

// the attribute belongs to the kernel's name, which the launch also knows: all instances of a template share it
template <typename Kernel>
static inline cudaError_t simt_set_attribute_(const char* text, Kernel kernel, cudaFuncAttribute attribute, int value) {
    (void)kernel;
    const char* start = text + strspn(text, "&( ");
    if (strncmp(start, "const void*)", 12) == 0) { start += 12; }
    if (strncmp(start, "void*)", 6) == 0) { start += 6; }
    start += strspn(start, "&( ");
    std::string name(start, strcspn(start, "<, )"));
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) { return cudaSuccess; }
    if (value < 0 || value > SIMT_MAX_SHARED) { return simt_return_(cudaErrorInvalidValue); }
    simt_shared_limits[name] = value;
    return cudaSuccess;
}
#define cudaFuncSetAttribute(...) simt_set_attribute_(#__VA_ARGS__, __VA_ARGS__)

template <typename Kernel>
static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, Kernel, int block, size_t n_shared) {
    int by_threads = 2048 / block, by_shared = n_shared ? (int)(SIMT_MAX_SHARED / n_shared) : 32;
    *n = by_threads < by_shared ? by_threads : by_shared;
    return cudaSuccess;
}

// ---- memory ----

enum { cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, cudaHostRegisterDefault = 0 };

template <typename T>
static inline cudaError_t cudaMalloc(T** p, size_t n_bytes, SIMT_SITE) {
    *p = NULL;
    if (int error = simt_forbids()) { return simt_return_((cudaError_t)error); }
    if (simt_memory.n_bytes + n_bytes > SIMT_MEMORY) { return simt_return_(cudaErrorMemoryAllocation); }
    if (n_bytes) { *p = (T*)simt_allocate(n_bytes, 0, file, line); }
    return simt_return_(*p || !n_bytes ? cudaSuccess : cudaErrorMemoryAllocation);
}
static inline cudaError_t cudaFree(void* p) {
    if (int error = simt_forbids()) { return simt_return_((cudaError_t)error); }
    simt_free(p, 0, "cudaFree");
    return cudaSuccess;
}
template <typename T>
static inline cudaError_t cudaMallocHost(T** p, size_t n_bytes, unsigned flags = 0, SIMT_SITE) {
    (void)flags;
    if (int error = simt_forbids()) { return simt_return_((cudaError_t)error); }
    *p = (T*)simt_allocate(n_bytes, 1, file, line);
    return simt_return_(*p ? cudaSuccess : cudaErrorMemoryAllocation);
}
template <typename T>
static inline cudaError_t cudaHostAlloc(T** p, size_t n_bytes, unsigned flags, SIMT_SITE) { return cudaMallocHost(p, n_bytes, flags, file, line); }

typedef enum {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
} cudaMemcpyKind;
typedef SimtStream* cudaStream_t;
struct SimtEvent {
    double ms;
    cudaStream_t stream;
    uint64_t n_copies;  // issued when it was recorded
};
typedef SimtEvent* cudaEvent_t;

// ---- asynchronous copies between the device and pinned memory are under way until the host waits for them ----
// Device memory takes part at once, as streams run at once. Pinned memory that is copied to holds garbage until a synchronisation
// brings the data; pinned memory that is copied from must still hold the same bytes then.

struct SimtUnderWay {
    uint64_t number;                    // counted from 1 in order of issue
    std::vector<cudaStream_t> streams;  // that of the copy, and those that wait for an event behind it
    char* host;
    std::vector<char> data;
    int to_host;
    const char* file;
    int line;
};
inline std::vector<SimtUnderWay>& simt_under_way = *new std::vector<SimtUnderWay>();
inline uint64_t simt_n_copies;

static inline int simt_in_stream_(const SimtUnderWay& c, cudaStream_t stream) {
    for (cudaStream_t s : c.streams) {
        if (s == stream) { return 1; }
        if (!stream && !s->non_blocking) { return 1; }  // the default stream waits for all that are not non-blocking
    }
    return 0;
}

static inline void simt_finish_(const SimtUnderWay& c) {
    if (c.to_host) {
        memcpy(c.host, c.data.data(), c.data.size());
    } else if (memcmp(c.host, c.data.data(), c.data.size()) != 0) {
        simt_fail("cudaMemcpyAsync at %s:%d: its pinned source was changed before the copy was waited for", c.file, c.line);
    }
}

// the host has waited for `stream` up to copy `number`; every: for all streams
static inline cudaError_t simt_synchronise_(cudaStream_t stream, uint64_t number, int every) {
    SimtAccess access;
    std::vector<SimtUnderWay> rest;
    for (SimtUnderWay& c : simt_under_way) {
        if (c.number <= number && (every || simt_in_stream_(c, stream))) { simt_finish_(c); } else { rest.push_back(c); }
    }
    simt_under_way.swap(rest);
    return cudaSuccess;
}

static inline cudaError_t cudaFreeHost(void* p) {
    if (!p) { return cudaErrorInvalidValue; }  // the manual promises nothing
    if (int error = simt_forbids()) { return simt_return_((cudaError_t)error); }
    simt_synchronise_(NULL, simt_n_copies, 1);
    simt_free(p, 1, "cudaFreeHost");
    return cudaSuccess;
}

// ---- copies ----

static inline cudaError_t simt_copy_(const char* call, void* to, const void* from, size_t n_bytes, cudaMemcpyKind kind) {
    if (n_bytes == 0) { return cudaSuccess; }
    SimtAccess access;
    if (kind != cudaMemcpyDefault) {
        simt_check_range(call, "destination", to, n_bytes, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice);
        simt_check_range(call, "source", from, n_bytes, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
    }
    memmove(to, from, n_bytes);
    return cudaSuccess;
}
static inline cudaError_t simt_set_(const char* call, void* p, int value, size_t n_bytes) {
    if (n_bytes == 0) { return cudaSuccess; }
    SimtAccess access;
    simt_check_range(call, "destination", p, n_bytes, 1);
    memset(p, value, n_bytes);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpy(void* to, const void* from, size_t n_bytes, cudaMemcpyKind kind) {
    if (int error = simt_forbids_default_()) { return simt_return_((cudaError_t)error); }
    if (int error = simt_forbids()) { return simt_return_((cudaError_t)error); }
    __atomic_fetch_add(&simt_n_submitted, 1, __ATOMIC_RELAXED);
    simt_synchronise_(NULL, simt_n_copies, 0);
    return simt_copy_("cudaMemcpy", to, from, n_bytes, kind);
}
static inline void simt_copy_async_(void* to, const void* from, size_t n_bytes, cudaMemcpyKind kind, cudaStream_t stream,
                                    const char* file, int line) {
    SimtAccess access;
    simt_copy_("cudaMemcpyAsync", to, from, n_bytes, kind);
    int to_host = kind == cudaMemcpyDeviceToHost;
    char *host = to_host ? (char*)to : (char*)from, *start = NULL;
    if (n_bytes == 0 || (!to_host && kind != cudaMemcpyHostToDevice) || !simt_find(host, &start)) { return; }
    simt_under_way.push_back(SimtUnderWay{++simt_n_copies, {stream}, host, std::vector<char>(host, host + n_bytes), to_host, file, line});
    if (to_host) { memset(host, 0xff, n_bytes); }
}
// memory that is not pinned is copied by the host itself, which a graph cannot do
static inline int simt_is_pageable_(const void* p) {
    SimtAccess access;
    char* start = NULL;
    return !simt_find(p, &start);
}
static inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n_bytes, cudaMemcpyKind kind, cudaStream_t stream = NULL,
                                          SIMT_SITE) {
    if (stream && stream->capture && (simt_is_pageable_(to) || simt_is_pageable_(from))) {
        return simt_return_((cudaError_t)simt_forbids());
    }
    return simt_return_((cudaError_t)simt_submit(stream, "cudaMemcpyAsync", [=](cudaStream_t s) {
        simt_copy_async_(to, from, n_bytes, kind, s, file, line);
    }));
}
// strips of `width` bytes, between arenas of the device
static inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_stride, const void* from, size_t from_stride, size_t width, size_t n,
                                            cudaMemcpyKind kind, cudaStream_t stream = NULL) {
    if (kind != cudaMemcpyDeviceToDevice || width > to_stride || width > from_stride) { return simt_return_(cudaErrorInvalidValue); }
    return simt_return_((cudaError_t)simt_submit(stream, "cudaMemcpy2DAsync", [=](cudaStream_t) {
        for (size_t i = 0; i < n; i++) {
            simt_copy_("cudaMemcpy2DAsync", (char*)to + i * to_stride, (const char*)from + i * from_stride, width, kind);
        }
    }));
}
static inline cudaError_t cudaMemsetAsync(void* p, int value, size_t n_bytes, cudaStream_t stream = NULL) {
    return simt_return_((cudaError_t)simt_submit(stream, "cudaMemsetAsync", [=](cudaStream_t) {
        simt_set_("cudaMemsetAsync", p, value, n_bytes);
    }));
}
static inline cudaError_t cudaMemset(void* p, int value, size_t n_bytes) { return cudaMemsetAsync(p, value, n_bytes, NULL); }

// ---- streams and events ----

enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };

static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
    *s = new SimtStream{(flags & cudaStreamNonBlocking) != 0, NULL, 0};
    return cudaSuccess;
}
static inline cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithFlags(s, cudaStreamDefault); }
static inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int) { return cudaStreamCreateWithFlags(s, flags); }

// the host waits, which a capture forbids: nothing of it is under way
static inline cudaError_t simt_wait_(cudaStream_t stream, uint64_t number, int every) {
    if (int error = simt_forbids()) { return simt_return_((cudaError_t)error); }
    return simt_synchronise_(stream, number, every);
}
static inline cudaError_t cudaStreamSynchronize(cudaStream_t s) { return simt_wait_(s, simt_n_copies, 0); }
static inline cudaError_t cudaStreamQuery(cudaStream_t s) { return cudaStreamSynchronize(s); }
static inline cudaError_t cudaStreamDestroy(cudaStream_t s) {
    if (s->capture) { simt_fail("cudaStreamDestroy: the stream is being captured"); }
    simt_synchronise_(s, simt_n_copies, 0);
    delete s;
    return cudaSuccess;
}
static inline cudaError_t cudaDeviceSynchronize() { return simt_wait_(NULL, simt_n_copies, 1); }
static inline cudaError_t cudaEventCreate(cudaEvent_t* e) { *e = new SimtEvent(); return cudaSuccess; }
static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
static inline cudaError_t cudaEventDestroy(cudaEvent_t e) { delete e; return cudaSuccess; }
static inline void simt_outside_capture_(const char* call, cudaStream_t stream) {
    if (simt_capturing || (stream && stream->capture)) { simt_fail("%s: events in a capture are not modelled", call); }
}
static inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream = NULL) {
    simt_outside_capture_("cudaEventRecord", stream);
    *e = SimtEvent{(double)clock64() / 1e6, stream, simt_n_copies};
    return cudaSuccess;
}
static inline cudaError_t cudaEventSynchronize(cudaEvent_t e) { return simt_wait_(e->stream, e->n_copies, 0); }
static inline cudaError_t cudaEventQuery(cudaEvent_t e) { return cudaEventSynchronize(e); }
static inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t e, unsigned = 0) {
    simt_outside_capture_("cudaStreamWaitEvent", stream);
    SimtAccess access;
    for (SimtUnderWay& c : simt_under_way) {
        if (c.number <= e->n_copies && simt_in_stream_(c, e->stream)) { c.streams.push_back(stream); }
    }
    return cudaSuccess;
}
static inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t stop) {
    *ms = (float)(stop->ms - start->ms);
    return cudaSuccess;
}

// ---- graphs: simt_capture.h. A graph and one that can be launched are the same list here ----

typedef enum { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeThreadLocal = 1, cudaStreamCaptureModeRelaxed = 2 } cudaStreamCaptureMode;
typedef SimtGraph* cudaGraph_t;
struct SimtExecutable {
    SimtGraph graph;
};
typedef SimtExecutable* cudaGraphExec_t;
typedef struct SimtGraphNode* cudaGraphNode_t;

// every mode is as strict as ThreadLocal
static inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (!stream) { return simt_return_(cudaErrorStreamCaptureUnsupported); }
    if (stream->capture || simt_capturing) { return simt_return_(cudaErrorIllegalState); }
    stream->capture = new SimtGraph();
    stream->is_invalid = 0;
    simt_capturing = stream;
    simt_n_blocking += !stream->non_blocking;
    return cudaSuccess;
}
static inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    *graph = NULL;
    if (!stream || !stream->capture || stream != simt_capturing) { return simt_return_(cudaErrorIllegalState); }
    SimtGraph* captured = stream->capture;
    stream->capture = NULL;
    simt_capturing = NULL;
    simt_n_blocking -= !stream->non_blocking;
    if (stream->is_invalid) {
        delete captured;
        return simt_return_(cudaErrorStreamCaptureInvalidated);
    }
    *graph = captured;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* n) {
    if (nodes) { simt_fail("cudaGraphGetNodes: only the number of nodes is known here: expected NULL"); }
    *n = graph->nodes.size();
    return cudaSuccess;
}
static inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { delete graph; return cudaSuccess; }
static inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long = 0) {
    *executable = new SimtExecutable{*graph};
    simt_n_executable++;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete executable;
    simt_n_executable--;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    if (simt_capturing) { simt_fail("cudaGraphLaunch: a graph in a graph is not modelled"); }
    return simt_return_((cudaError_t)simt_submit(stream, "cudaGraphLaunch", [=](cudaStream_t s) {
        for (const auto& node : executable->graph.nodes) { node(s); }
    }));
}
#endif  // SIMT_CUDA_RUNTIME_H
