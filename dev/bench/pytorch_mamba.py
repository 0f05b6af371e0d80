"""Training steps of Mamba-1 in PyTorch, float32, on the CPU: forward, backward, clip, AdamW. dev/bench/mamba_step.py runs it.

    python pytorch_mamba.py PEER --from DIR --tokens FILE --seq 256 [--batch 1 --threads 2 --steps 5 --lr 1e-4]
    python pytorch_mamba.py mm [--threads 2]        GFLOP/s of torch.mm at 2048 x 2048 x 2048, best of ten

DIR is a Hugging Face folder (config.json, model.safetensors), FILE a token shard of llm.c (uint16), read row by row in file
order. PEER is one of
    hf              transformers' MambaForCausalLM: a loop over time that indexes three (B, E, T, NS) arrays
    hf-mambapy      the same with use_mambapy: mamba.py's parallel scan
    mambapy         mamba.py's own blocks with pscan=True
    mambapy-loop    mamba.py's own blocks with pscan=False: a loop that indexes, as hf has it
    eager           the loop below over unbound time steps: nothing of size (B, T, E, NS) is computed ahead
    eager-compiled  the same loop, torch.compile'd in pieces of 16 time steps
All have tied embeddings, the mean cross-entropy over all positions and the same fused AdamW. A line of JSON per step: step,
loss, norm of the gradients before clipping, ms, and of ms the parts forward_ms, backward_ms, update_ms. hf-mambapy and mambapy
stop if the parallel scan was not called.
"""
import argparse
import json
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

NO_DECAY = (".A_log", ".D", ".bias", "norm.weight", "norm_f.weight")  # ends of names


# ---- the eager model; names of parameters as in a Hugging Face folder, without "backbone." ----


def scan(u, delta, A, B, C):
    """h_t = exp(delta_t A) h_(t-1) + delta_t u_t B_t;  y_t = C_t h_t.  u, delta (batch, T, E); A (E, NS); B, C (batch, T, NS)."""
    h = u.new_zeros(u.shape[0], A.shape[1], A.shape[0])  # (batch, NS, E): neighbours in memory are channels
    At, states = A.t().contiguous(), []
    for delta_t, x_t, B_t in zip(delta.unbind(1), (delta * u).unbind(1), B.unbind(1)):
        h = torch.addcmul(torch.exp(delta_t[:, None] * At) * h, B_t[:, :, None], x_t[:, None])
        states.append(h)
    return (C[:, :, None] @ torch.stack(states, 1))[:, :, 0]  # one product for all steps


def compiled_scan(u, delta, A, B, C, piece=16):
    """scan, compiled: a graph of all T steps would take minutes to compile, and one of 32 steps is no faster than this."""
    h, At, ys = u.new_zeros(u.shape[0], A.shape[1], A.shape[0]), A.t().contiguous(), []
    for parts in zip(u.split(piece, 1), delta.split(piece, 1), B.split(piece, 1), C.split(piece, 1)):
        y, h = compiled_piece(h, parts[0], parts[1], At, parts[2], parts[3])
        ys.append(y)
    return torch.cat(ys, 1)


def piece_to_compile(h, u, delta, At, B, C):
    ys = []
    for delta_t, x_t, B_t, C_t in zip(delta.unbind(1), (delta * u).unbind(1), B.unbind(1), C.unbind(1)):
        h = torch.exp(delta_t[:, None] * At) * h + B_t[:, :, None] * x_t[:, None]
        ys.append((C_t[:, :, None] * h).sum(1))  # fused with the line above, unlike a matrix product
    return torch.stack(ys, 1), h


compiled_piece = torch.compile(piece_to_compile, dynamic=False)


class Mixer(nn.Module):
    def __init__(self, c, scan):
        super().__init__()
        M, E, NS, R, K = c["hidden_size"], c["intermediate_size"], c["state_size"], c["time_step_rank"], c["conv_kernel"]
        self.split, self.scan = [R, NS, NS], scan
        self.in_proj = nn.Linear(M, 2 * E, bias=False)
        self.conv1d = nn.Conv1d(E, E, K, groups=E, padding=K - 1)
        self.x_proj = nn.Linear(E, R + 2 * NS, bias=False)
        self.dt_proj = nn.Linear(R, E)
        self.A_log = nn.Parameter(torch.empty(E, NS))
        self.D = nn.Parameter(torch.empty(E))
        self.out_proj = nn.Linear(E, M, bias=False)

    def forward(self, n):  # (batch, T, M)
        x, z = self.in_proj(n).chunk(2, -1)
        u = F.silu(self.conv1d(x.transpose(1, 2))[:, :, : n.shape[1]].transpose(1, 2))
        dt, B, C = self.x_proj(u).split(self.split, -1)
        y = self.scan(u, F.softplus(self.dt_proj(dt)), -torch.exp(self.A_log), B, C)
        return self.out_proj((y + self.D * u) * F.silu(z))


class Layer(nn.Module):
    def __init__(self, c, scan):
        super().__init__()
        self.norm = nn.RMSNorm(c["hidden_size"], eps=c["layer_norm_epsilon"])
        self.mixer = Mixer(c, scan)

    def forward(self, r):
        return r + self.mixer(self.norm(r))


class LanguageModel(nn.Module):
    def __init__(self, c, layers):
        super().__init__()
        self.embeddings = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = layers
        self.norm_f = nn.RMSNorm(c["hidden_size"], eps=c["layer_norm_epsilon"])

    def forward(self, tokens):
        r = self.embeddings(tokens)
        for layer in self.layers:
            r = layer(r)
        return self.norm_f(r) @ self.embeddings.weight.t()


# ---- the peers: (function from tokens to logits, named parameters) ----


class CallCounter:
    """Stands in for mamba.py's pscan: proof that it ran."""

    def __init__(self, function):
        self.function, self.n_calls = function, 0

    def __call__(self, *arguments):
        self.n_calls += 1
        return self.function(*arguments)


def make_hf(folder, use_mambapy):
    from transformers import MambaForCausalLM

    model = MambaForCausalLM.from_pretrained(folder, dtype=torch.float32, use_mambapy=use_mambapy)
    model.train()
    return lambda tokens: model(input_ids=tokens, use_cache=False).logits, model


def mambapy_layers(c, pscan):
    from mambapy.mamba import Mamba, MambaConfig

    config = MambaConfig(d_model=c["hidden_size"], n_layers=c["num_hidden_layers"], dt_rank=c["time_step_rank"], d_state=c["state_size"],
                         expand_factor=c["expand"], d_conv=c["conv_kernel"], rms_norm_eps=c["layer_norm_epsilon"], pscan=pscan)
    return Mamba(config).layers


def make_ours(folder, layers_of):
    from safetensors.torch import load_file

    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        c = json.load(file)
    model = LanguageModel(c, layers_of(c))
    weights = load_file(os.path.join(folder, "model.safetensors"))
    model.load_state_dict({name.removeprefix("backbone."): value for name, value in weights.items()})
    return model, model


def make_peer(peer, folder):
    """(logits of tokens, model, counter of pscan's calls or None)"""
    counter = None
    if peer in ("hf-mambapy", "mambapy"):
        import mambapy.mamba
        import mambapy.pscan

        counter = CallCounter(mambapy.pscan.pscan)
        mambapy.pscan.pscan = mambapy.mamba.pscan = counter  # transformers imports it anew in every call
    if peer in ("hf", "hf-mambapy"):
        logits, model = make_hf(folder, peer == "hf-mambapy")
    elif peer in ("mambapy", "mambapy-loop"):
        logits, model = make_ours(folder, lambda c: mambapy_layers(c, peer == "mambapy"))
    else:
        chosen = compiled_scan if peer == "eager-compiled" else scan
        logits, model = make_ours(folder, lambda c: nn.ModuleList(Layer(c, chosen) for _ in range(c["num_hidden_layers"])))
    return logits, model, counter


def make_adamw(model, lr, no_decay):
    groups = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[not name.endswith(no_decay)].append(parameter)
    return torch.optim.AdamW([{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}], lr=lr,
                             betas=(0.9, 0.95), eps=1e-8, fused=True)


# ---- the steps ----


def read_rows(path, n_rows, T):
    """Rows of T+1 tokens as our data loader cuts them with --shuffle 0: row r is tokens r*T .. r*T+T."""
    tokens = np.fromfile(path, dtype="<u2", offset=1024)
    return torch.from_numpy(np.stack([tokens[r * T : r * T + T + 1] for r in range(n_rows)]).astype(np.int64))


def train_steps(logits_of, model, optimizer, rows, n_steps, B, after_step=lambda step: None):
    for step in range(1, n_steps + 1):
        batch = rows[(step - 1) * B : step * B]
        times = [time.perf_counter()]
        logits = logits_of(batch[:, :-1])
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter())
        forward, backward, update = (1e3 * (after - before) for before, after in zip(times, times[1:]))
        after_step(step)
        print(json.dumps({"step": step, "loss": loss.item(), "norm": norm.item(), "ms": forward + backward + update,
                          "forward_ms": forward, "backward_ms": backward, "update_ms": update}), flush=True)


def train(options):
    logits_of, model, counter = make_peer(options.peer, options.folder)
    rows = read_rows(options.tokens, options.steps * options.batch, options.seq)
    n_layers = sum(name.endswith("A_log") for name, _ in model.named_parameters())

    def check_scans(step):
        if counter and counter.n_calls != n_layers * step:
            raise SystemExit(f"{options.peer}: pscan was called {counter.n_calls} times in {step} steps of {n_layers} layers")

    train_steps(logits_of, model, make_adamw(model, options.lr, NO_DECAY), rows, options.steps, options.batch, check_scans)


def measure_mm(n=2048):
    a, b = torch.rand(n, n), torch.rand(n, n)
    best = float("inf")
    for _ in range(11):  # the first one wakes the threads
        begin = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begin)
    print(json.dumps({"torch_mm_gflops": 2e-9 * n**3 / best}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=["hf", "hf-mambapy", "mambapy", "mambapy-loop", "eager", "eager-compiled", "mm"])
    parser.add_argument("--from", dest="folder", metavar="DIR")
    parser.add_argument("--tokens", metavar="FILE")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-4)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peer == "mm":
        measure_mm()
    else:
        train(options)


if __name__ == "__main__":
    main()
