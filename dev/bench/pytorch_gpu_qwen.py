"""Qwen3-0.6B in PyTorch on a GPU: training steps, all parameters or LoRA, and generation. pytorch_gpu.py runs it.

Where transformers (and for LoRA PEFT) are installed it is theirs, else the same model in torch alone; generation is transformers'
only. All parameters: floats under bf16 autocast. LoRA: the base in bf16, adapters of rank 16 on all seven linears of each layer as
floats. Then clipping to norm 1 and fused AdamW, as pytorch_gpu.py's step. Both begin with the weights of one folder.
"""

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
from pytorch_gpu import DEVICE, report, synchronize

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def is_installed(*names):
    return all(importlib.util.find_spec(name) for name in names)


# ---- the model in torch alone; names of modules are those of transformers ----

class LoraLinear(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.NH, self.NKV, self.HS = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        D, eps = c["hidden_size"], c["rms_norm_eps"]
        self.q_proj = nn.Linear(D, self.NH * self.HS, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(D, self.NKV * self.HS, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(self.NH * self.HS, D, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(self.HS, eps), nn.RMSNorm(self.HS, eps)

    def forward(self, x, cosines, sines):  # (B, T, D); (T, HS)
        B, T, _ = x.shape

        def heads(y, n):
            return y.view(B, T, n, self.HS)

        def turn(y):
            first, second = y.chunk(2, dim=-1)
            return (y * cosines + torch.cat([-second, first], dim=-1) * sines).to(y.dtype)

        q = turn(self.q_norm(heads(self.q_proj(x), self.NH)).transpose(1, 2))
        k = turn(self.k_norm(heads(self.k_proj(x), self.NKV)).transpose(1, 2))
        v = heads(self.v_proj(x), self.NKV).transpose(1, 2)
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        D, wide = c["hidden_size"], c["intermediate_size"]
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(*size, bias=False) for size in ((D, wide), (D, wide), (wide, D)))

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"]) for _ in range(2))

    def forward(self, x, cosines, sines):
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])  # tied
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, tokens):  # (B, T)
        half = torch.arange(0, self.config["head_dim"], 2, device=tokens.device) / self.config["head_dim"]
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), self.config["rope_theta"] ** -half)
        angles = torch.cat([angles, angles], dim=-1)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return F.linear(self.norm(x), self.embed_tokens.weight)


def read_tensors(folder):
    """{name: float tensor} of the folder's one file, of floats."""
    with open(os.path.join(folder, "model.safetensors"), "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    return {name: torch.frombuffer(data, dtype=torch.float32, count=math.prod(x["shape"]), offset=x["data_offsets"][0]).view(x["shape"])
            for name, x in header.items()}


def plain_model(folder, dtype, rank):
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        model = Qwen3(json.load(file))
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in read_tensors(folder).items()})
    model = model.to(dtype)
    if rank:
        model.requires_grad_(False)
        for module in [x for x in model.modules() if isinstance(x, (Attention, Mlp))]:
            for name in [name for name in LINEARS if hasattr(module, name)]:
                setattr(module, name, LoraLinear(getattr(module, name), rank, 2 * rank))
    return model


# ---- steps and text ----

def make_model(folder, task, rank):
    """(program, model, its logits of tokens)"""
    dtype = torch.bfloat16 if task == "lora" else torch.float32
    if is_installed("transformers", *(["peft"] if task == "lora" else [])):
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(DEVICE)
        if task == "lora":
            from peft import LoraConfig, get_peft_model
            model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LINEARS, lora_dropout=0.0))
        name = "transformers + PEFT" if task == "lora" else "transformers"
        return name, model.train(), lambda tokens: model(input_ids=tokens, use_cache=False).logits
    model = plain_model(folder, dtype, rank if task == "lora" else 0).to(DEVICE)
    return "PyTorch alone", model, model


def read_batch(options):
    with open(os.path.join(options.folder, "tokens.bin"), "rb") as file:
        file.seek(1024)
        ids = torch.frombuffer(bytearray(file.read()), dtype=torch.int16).to(torch.int64) & 0xffff
    return (x.view(options.batch, options.seq).to(DEVICE) for x in (ids[:-1], ids[1:]))


def step(options):
    torch.set_float32_matmul_precision("high")
    program, model, logits = make_model(options.folder, options.task, options.rank)
    tokens, targets = read_batch(options)
    learning = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in learning if p.dim() == 2], "weight_decay": 0.1},
              {"params": [p for p in learning if p.dim() != 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=options.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    times = []
    for i in range(options.steps):
        synchronize()
        begin = time.perf_counter()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(logits(tokens).flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0, foreach=True)
        optimizer.step()
        value = loss.item()
        synchronize()
        if i >= options.steps // 2:  # the first ones choose kernels and take memory
            times.append(1e3 * (time.perf_counter() - begin))
        print(f"loss {program}\t{i + 1}\t{value:.6f}", flush=True)
    report(program, f"{options.task} B {options.batch} T {options.seq}", statistics.median_low(times))


def text(options):
    """Milliseconds of a token after the first 16, greedy, one text."""
    if not is_installed("transformers"):
        print("# transformers is not installed: no generation beside ours", flush=True)
        return
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(DEVICE).eval()
    prompt = torch.tensor([[ord(letter) for letter in "The"]], device=DEVICE)

    def seconds(n_new):
        synchronize()
        begin = time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n_new, min_new_tokens=n_new, do_sample=False,
                       use_cache=True, pad_token_id=0)
        synchronize()
        return time.perf_counter() - begin

    with torch.inference_mode():
        seconds(16)
        best = min(seconds(16 + options.tokens) - seconds(16) for _ in range(options.rounds))
    report("transformers", "write", 1e3 * best / options.tokens)
