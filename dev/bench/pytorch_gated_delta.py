"""
The gated delta rule by chunks beside transformers' own fallback of it in PyTorch, float32, the same sizes, calls in turn; prints
the smallest milliseconds of each: python dev/bench/pytorch_gated_delta.py BENCH [threads 2] [rounds 3] [T 4096] [heads 16]
BENCH is dev/bench/gated_delta.cu, built as it says. Needs torch and transformers (measured: 2.13.0, 5.23.0).
"""
import subprocess
import sys
import time

import torch
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule as rule

bench = sys.argv[1]
threads, rounds, T, heads = [int(x) for x in sys.argv[2:]] + [2, 3, 4096, 16][len(sys.argv) - 2:]
torch.set_num_threads(threads)
torch.manual_seed(0)
unit = lambda: torch.nn.functional.normalize(torch.randn(1, T, heads, 128), dim=-1).requires_grad_()
q, k, v = unit(), unit(), torch.randn(1, T, heads, 128, requires_grad=True)
g, beta = (-0.2 * torch.rand(1, T, heads)).requires_grad_(), torch.rand(1, T, heads, requires_grad=True)
dout = torch.randn(1, T, heads, 128)
best = [1e30] * 4
for _ in range(rounds):
    start = time.perf_counter()
    o = rule(q, k, v, g=g, beta=beta)[0]
    middle = time.perf_counter()
    o.backward(dout)
    end = time.perf_counter()
    del o
    command = [bench, "--threads", str(threads), "--rounds", "2", "--T", str(T), "--heads", str(heads)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ours = [float(line.split("\t")[2]) for line in out.splitlines()]
    best = [min(x) for x in zip(best, [1e3 * (middle - start), 1e3 * (end - middle)] + ours)]
print(f"torch {torch.__version__}: forward {best[0]:.0f} ms, backward {best[1]:.0f} ms")
print(f"ours: forward {best[2]:.0f} ms, backward {best[3]:.0f} ms; {(best[0] + best[1]) / (best[2] + best[3]):.2f} times as fast")
