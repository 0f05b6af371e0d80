/*
How long a GPU takes: between two events of a stream, which its clock dates.
    device_time    of n calls of run(), in milliseconds
*/
#ifndef LLMC_DEVICE_TIME_H
#define LLMC_DEVICE_TIME_H
#ifdef __CUDACC__
#include "../core/device.h"  // Device, cudaCheck

template <typename Run>
static inline double device_time(int n, const Device* dev, Run run) {
    float ms = 0.0f;
    cudaEvent_t start, stop;
    cudaCheck(cudaEventCreate(&start));
    cudaCheck(cudaEventCreate(&stop));
    cudaCheck(cudaEventRecord(start, dev->stream));
    for (int i = 0; i < n; i++) { run(); }
    cudaCheck(cudaEventRecord(stop, dev->stream));
    cudaCheck(cudaEventSynchronize(stop));
    cudaCheck(cudaEventElapsedTime(&ms, start, stop));
    cudaCheck(cudaEventDestroy(start));
    cudaCheck(cudaEventDestroy(stop));
    return (double)ms;
}
#endif
#endif  // LLMC_DEVICE_TIME_H
