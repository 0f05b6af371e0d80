"""torch.mm for gemm.c, which starts this as a child and lets it take turns with the other products.

    reads lines "THREADS M N K", answers each with the seconds of one inp (M, K) times weight (N, K)^T; "missing" without torch
"""

import sys
import time


def seconds(torch, threads, M, N, K, matrices={}):
    torch.set_num_threads(threads)
    if (M, N, K) not in matrices:
        matrices.clear()
        matrices[M, N, K] = torch.rand(M, K), torch.rand(N, K)
    inp, weight = matrices[M, N, K]
    torch.mm(inp[:256, :256], weight[:256, :256].t())  # wakes the threads
    begin = time.perf_counter()
    torch.mm(inp, weight.t())
    return time.perf_counter() - begin


def main():
    try:
        import torch
    except ImportError:
        torch = None
    for line in sys.stdin:
        threads, M, N, K = map(int, line.split())
        print(seconds(torch, threads, M, N, K) if torch else "missing", flush=True)


if __name__ == "__main__":
    main()
