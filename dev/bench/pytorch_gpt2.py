"""Training steps of GPT-2 124M in PyTorch, timed: float32, on the CPU.

    python pytorch_gpt2.py --batch 4 --seq 64 --threads 2 --steps 10 [--attention sdpa|matmul] [--compile]

The model as one writes it with torch.nn: Linear with biases, tanh GELU, LayerNorm, tied token embedding and output
projection (vocabulary padded to 50304 like every program of this comparison), cross entropy, AdamW with fused=True. Random
tokens, since only time counts. Prints one line per step: "step 3 | 512.4 ms".
"""

import argparse
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, POSITIONS, LAYERS, HEADS, CHANNELS = 50304, 1024, 12, 12, 768


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.proj = nn.Linear(CHANNELS, CHANNELS)
        self.kind = kind

    def forward(self, x):  # (B, T, C)
        B, T, C = x.shape
        q, k, v = (y.view(B, T, HEADS, C // HEADS).transpose(1, 2) for y in self.qkv(x).split(C, dim=2))  # (B, NH, T, hs)
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(2, 3) / math.sqrt(C // HEADS)
            future = torch.ones(T, T, dtype=torch.bool).triu(1)
            y = scores.masked_fill(future, float("-inf")).softmax(dim=3) @ v
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.ln1 = nn.LayerNorm(CHANNELS)
        self.attention = Attention(attention)
        self.ln2 = nn.LayerNorm(CHANNELS)
        self.fc = nn.Linear(CHANNELS, 4 * CHANNELS)
        self.fcproj = nn.Linear(4 * CHANNELS, CHANNELS)

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, CHANNELS)
        self.wpe = nn.Embedding(POSITIONS, CHANNELS)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(LAYERS))
        self.lnf = nn.LayerNorm(CHANNELS)
        self.head = nn.Linear(CHANNELS, VOCAB, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        self.head.weight = self.wte.weight

    def forward(self, tokens, targets):  # both (B, T)
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.lnf(x))
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--attention", choices=["sdpa", "matmul"], default="sdpa")
    parser.add_argument("--compile", action="store_true", help="the model goes through torch.compile, in the first step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    model = GPT2(options.attention)
    forward = torch.compile(model) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    for step in range(options.steps):
        tokens = torch.randint(50257, (options.batch, options.seq + 1))
        begin = time.perf_counter()
        loss = forward(tokens[:, :-1], tokens[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()  # what a training loop prints; on a CPU it costs nothing
        print(f"step {step} | {1e3 * (time.perf_counter() - begin):.1f} ms", flush=True)


if __name__ == "__main__":
    main()
