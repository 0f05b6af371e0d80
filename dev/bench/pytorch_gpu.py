"""PyTorch on the same GPU as ours, for dev/gpu_check.sh: single ops, attention back ends, training steps of GPT-2.

    pytorch_gpu.py versions                        what is installed, one line
    pytorch_gpu.py ops                             ops of GPT-2 124M as eager PyTorch runs them, B 16, T 1024
    pytorch_gpu.py attention                       F.scaled_dot_product_attention, back end by back end
    pytorch_gpu.py model FOLDER --batch B --seq T  random weights of GPT-2 124M as Hugging Face has them, and tokens of one batch
    pytorch_gpu.py step FOLDER --mode eager        training steps from these: bf16 autocast, fused AdamW; or --mode compiled
    pytorch_gpu.py qwen FOLDER --task full         training steps of Qwen3-0.6B from FOLDER; or --task lora (pytorch_gpu_qwen.py)
    pytorch_gpu.py qwen-text FOLDER                greedy generation of the same, --tokens N
Options: --rounds N repetitions of which the shortest counts; of steps it is the median of the second half; --small makes everything tiny, for a rehearsal on a CPU.

A measured line is PROGRAM tab CASE tab MILLISECONDS, the form of dev/bench/gpu_ops.cu, whose cases have the same names.
Ops take turns over several sets of inputs, together larger than the second-level cache, so that all come from memory.
Every step of `step` sees the same batch, so the losses tell whether two programs compute the same: lines `loss STEP VALUE`.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import struct
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
CACHE = 256 << 20  # bytes: several times the second-level cache of any card
# V: a multiple of 128 that everyone counts in full, so that all do the same work and get the same loss
CONFIG = dict(L=12, C=768, NH=12, V=50304, maxT=1024)
SMALL = dict(L=2, C=32, NH=2, V=256, maxT=64)


# ---- timing ----

def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def milliseconds(run, sets, rounds):
    """Shortest mean time of run(set), each round going over all sets of inputs, at least 20 ms a round on a GPU."""
    for inputs in sets:  # load modules, choose kernels
        run(inputs)
    synchronize()
    begin = time.perf_counter()
    for inputs in sets:
        run(inputs)
    synchronize()
    one_pass = time.perf_counter() - begin
    passes = max(1, math.ceil(0.020 / one_pass)) if CUDA else 1
    best = float("inf")
    for _ in range(rounds):
        if CUDA:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
        start = time.perf_counter()
        for _ in range(passes):
            for inputs in sets:
                run(inputs)
        if CUDA:
            end.record()
            torch.cuda.synchronize()
            ms = begin.elapsed_time(end)
        else:
            ms = 1e3 * (time.perf_counter() - start)
        best = min(best, ms / passes / len(sets))
    return best


def report(program, case, ms):
    print(f"{program}\t{case}\t{ms:.6f}", flush=True)


def random_sets(shapes, options, gradient=()):
    """Lists of bf16 tensors of these shapes, as many lists as it takes to leave the cache; `gradient`: those that want one."""
    n_bytes = 2 * sum(math.prod(shape) for shape in shapes)
    n_sets = 1 if options.small else max(1, math.ceil(CACHE / n_bytes))
    sets = []
    for _ in range(n_sets):
        tensors = [torch.randn(shape, device=DEVICE).to(torch.bfloat16) for shape in shapes]
        sets.append([t.requires_grad_(i in gradient) for i, t in enumerate(tensors)])
    return sets


def measure(program, case, forward, shapes, options, gradient, backward_case=None):
    """forward(*tensors) alone without a graph; then, for backward_case, the backward pass alone over a kept graph."""
    sets = random_sets(shapes, options, gradient)

    def run_forward(inputs):
        with torch.no_grad():
            forward(*inputs)

    report(program, case, milliseconds(run_forward, sets, options.rounds))
    if backward_case:
        graphs = []
        for inputs in sets:
            out = forward(*inputs)
            graphs.append((out, [t for t in inputs if t.requires_grad], torch.randn_like(out)))

        def run_backward(graph):
            torch.autograd.grad(graph[0], graph[1], graph[2], retain_graph=True)

        report(program, backward_case, milliseconds(run_backward, graphs, options.rounds))


# ---- ops ----

def linear_cases(C, V):
    return [("qkv", C, 3 * C), ("attproj", C, C), ("fc", C, 4 * C), ("fcproj", 4 * C, C), ("logits", C, V)]


def ops(options):
    config = SMALL if options.small else CONFIG
    B, T = (2, 16) if options.small else (16, 1024)
    N, C, V = B * T, config["C"], config["V"]
    side = 64 if options.small else 8192
    program = "PyTorch"
    copies = [torch.empty(1 << 20 if options.small else 1 << 30, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    report(program, "copy", milliseconds(lambda _: copies[0].copy_(copies[1]), [None], options.rounds))
    del copies
    measure(program, f"matmul {side}", F.linear, [(side, side), (side, side)], options, ())
    for name, IC, OC in linear_cases(C, V):
        bias = [] if name == "logits" else [(OC,)]
        measure(program, f"matmul_forward {name}", F.linear, [(N, IC), (OC, IC)] + bias, options, range(3), f"matmul_backward {name}")
    measure(program, "layernorm_forward", lambda x, w, b: F.layer_norm(x, (C,), w, b), [(N, C), (C,), (C,)], options, range(3),
            "layernorm_backward")
    measure(program, "residual_forward", torch.add, [(N, C), (N, C)], options, ())
    measure(program, "gelu_forward", lambda x: F.gelu(x, approximate="tanh"), [(N, 4 * C)], options, [0], "gelu_backward")
    crossentropy(program, "crossentropy", N, V, options)
    crossentropy(program, "crossentropy wide", *((4, 1000) if options.small else (4096, 256000)), options)
    adamw(program, options)


def crossentropy(program, case, N, V, options):
    targets = torch.randint(V, (N,), device=DEVICE)

    def both(logits):
        loss = F.cross_entropy(logits[0], targets)
        torch.autograd.grad(loss, logits[0])

    report(program, case, milliseconds(both, random_sets([(N, V)], options, [0]), options.rounds))


def adamw(program, options):
    n = 1 << 10 if options.small else 124_475_904
    p = torch.randn(n, device=DEVICE, requires_grad=True)
    p.grad = torch.randn(n, device=DEVICE)
    optimizer = torch.optim.AdamW([p], lr=1e-4, fused=CUDA)
    report(program, "adamw_update", milliseconds(lambda _: optimizer.step(), [None], options.rounds))


# ---- attention ----

def attention(options):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    backends = [("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION),
                ("efficient", SDPBackend.EFFICIENT_ATTENTION), ("math", SDPBackend.MATH)]
    sizes = [(8, 1024), (8, 4096), (1, 32768)]
    shapes = [(1, 16, 2, 16)] if options.small else [(B, T, NH, HS) for NH, HS in [(12, 64), (16, 128)] for B, T in sizes]
    for B, T, NH, HS in shapes:
        case = f"B {B} T {T} NH {NH} HS {HS}"
        for name, backend in backends:
            if name == "math" and T > 4096:  # it stores the square
                continue
            try:
                with sdpa_kernel(backend):
                    measure(f"PyTorch {name}", f"attention_forward {case}",
                            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                            [(B, NH, T, HS)] * 3, options, range(3), f"attention_backward {case}")
            except RuntimeError as error:  # not on this card, or no memory
                print(f"# PyTorch {name} {case}: {(str(error).splitlines() or ['?'])[0][:100]}", flush=True)
            if CUDA:
                torch.cuda.empty_cache()


# ---- a training step ----

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        C = c["C"]
        self.NH = c["NH"]
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.c_attn, self.attn_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.c_fc, self.mlp_proj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):  # (B, T, C)
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.NH, C // self.NH).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.attn_proj(y)
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c["V"], c["C"]), nn.Embedding(c["maxT"], c["C"])
        self.h = nn.ModuleList(Block(c) for _ in range(c["L"]))
        self.ln_f = nn.LayerNorm(c["C"])

    def forward(self, tokens, targets):  # both (B, T)
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def hugging_face_tensors(c):
    """(name, shape, our module's name, transposed) in Hugging Face's order; its Conv1D has (in, out)."""
    C = c["C"]
    yield "wte.weight", (c["V"], C), "wte.weight", False
    yield "wpe.weight", (c["maxT"], C), "wpe.weight", False
    for i in range(c["L"]):
        for name, ours, shape in [("ln_1", "ln_1", (C,)), ("attn.c_attn", "c_attn", (C, 3 * C)), ("attn.c_proj", "attn_proj", (C, C)),
                                  ("ln_2", "ln_2", (C,)), ("mlp.c_fc", "c_fc", (C, 4 * C)), ("mlp.c_proj", "mlp_proj", (4 * C, C))]:
            yield f"h.{i}.{name}.weight", shape, f"h.{i}.{ours}.weight", len(shape) == 2
            yield f"h.{i}.{name}.bias", shape[-1:], f"h.{i}.{ours}.bias", False
    yield "ln_f.weight", (C,), "ln_f.weight", False
    yield "ln_f.bias", (C,), "ln_f.bias", False


def write_model(options):
    """FOLDER/config.json and model.safetensors, FOLDER/tokens.bin: a shard of one batch, B*T + 1 random tokens."""
    c = SMALL if options.small else CONFIG
    torch.manual_seed(1)
    os.makedirs(options.folder, exist_ok=True)
    header, blobs, at = {}, [], 0
    for name, shape, _, _ in hugging_face_tensors(c):
        tensor = torch.randn(shape) * 0.02 + (1.0 if "ln_" in name and name.endswith("weight") else 0.0)
        blobs.append(tensor.float().numpy().tobytes())
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + len(blobs[-1])]}
        at += len(blobs[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(options.folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(blobs)
    with open(os.path.join(options.folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": c["maxT"], "vocab_size": c["V"],
                   "n_layer": c["L"], "n_head": c["NH"], "n_embd": c["C"], "layer_norm_epsilon": 1e-5,
                   "activation_function": "gelu_new"}, file)
    tokens = torch.randint(c["V"], (options.batch * options.seq + 1,), dtype=torch.int32)
    with open(os.path.join(options.folder, "tokens.bin"), "wb") as file:
        file.write(struct.pack("<3i", 20240520, 1, len(tokens)).ljust(1024, b"\0") + tokens.numpy().astype("uint16").tobytes())


def read_model(options, c):
    model = GPT2(c)
    with open(os.path.join(options.folder, "model.safetensors"), "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    state = dict(model.named_parameters())
    with torch.no_grad():
        for name, shape, ours, transposed in hugging_face_tensors(c):
            begin, end = header[name]["data_offsets"]
            tensor = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32).view(shape)
            state[ours].copy_(tensor.T if transposed else tensor)
    with open(os.path.join(options.folder, "tokens.bin"), "rb") as file:
        file.seek(1024)
        ids = torch.frombuffer(bytearray(file.read()), dtype=torch.int16).to(torch.int64) & 0xffff
    B, T = options.batch, options.seq
    return model.to(DEVICE), ids[:-1].view(B, T).to(DEVICE), ids[1:].view(B, T).to(DEVICE)


def step(options):
    c = SMALL if options.small else CONFIG
    torch.set_float32_matmul_precision("high")
    model, tokens, targets = read_model(options, c)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=options.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    program = torch.compile(model) if options.mode == "compiled" else model
    times = []
    for i in range(options.steps):
        synchronize()
        begin = time.perf_counter()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = program(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        value = loss.item()  # what a training loop prints
        synchronize()
        if i >= options.steps // 2:  # the first ones compile, choose kernels and take memory
            times.append(1e3 * (time.perf_counter() - begin))
        print(f"loss\t{i + 1}\t{value:.6f}", flush=True)
    report(f"PyTorch {options.mode}", f"step B {options.batch} T {options.seq}", statistics.median_low(times))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["versions", "ops", "attention", "model", "step", "qwen", "qwen-text"])
    parser.add_argument("folder", nargs="?", help="of `model`, `step`, `qwen` and `qwen-text`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    parser.add_argument("--task", choices=["full", "lora"], default="full", help="of `qwen`")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(1)
    if options.what == "versions":
        from importlib import metadata
        others = "".join(f", {name} {metadata.version(name)}" for name in ("transformers", "peft") if importlib.util.find_spec(name))
        print(f"torch {torch.__version__}{others}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version() if CUDA else 'not used'}")
    elif options.what.startswith("qwen"):
        import pytorch_gpu_qwen
        (pytorch_gpu_qwen.step if options.what == "qwen" else pytorch_gpu_qwen.text)(options)
    else:
        {"ops": ops, "attention": attention, "model": write_model, "step": step}[options.what](options)


if __name__ == "__main__":
    main()
