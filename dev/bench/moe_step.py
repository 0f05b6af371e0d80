"""One training step of a mixture of experts (55M parameters) side by side: ours and transformers' Mixtral, float32 on the CPU.

    make build/gcc-native-O3/train_moe
    .venv/bin/python dev/bench/moe_step.py --rounds 5 --skip batched_mm --json moe.json
    .venv/bin/python dev/bench/moe_step.py --small                      # seconds: does everything run?

A step is forward, backward, clip to norm 1 and AdamW. All programs start from one Hugging Face folder (the sizes of train_moe
--model small: 6 layers, width 256, 4 heads on one of keys and values, 2 of 8 experts of width 1024, vocabulary 32000) and read
the same rows of random tokens in the same order; routers add no loss, which transformers sums up otherwise. Rounds, warm-up and
what must be equal before any time is printed are those of mamba_step.py. transformers runs with each of its
experts_implementations. batched_mm copies the weights of every row's expert and keeps them for backward: where memory does not
suffice, it ends itself.
Limit of ours: the FLOPs of all products at the best rate of dev/bench/gemm.c on this machine, plus the 28 bytes that AdamW moves
for each parameter at the rate of dev/bench/bandwidth.c. FLOPs: 6 per weight and token, of experts k / E, and attention.
"""
import json
import os
import re
import tempfile

import numpy as np
from safetensors.numpy import save_file
from side_by_side import Program, compare_losses, our_program, print_load, run, step_fields, step_options, step_parser, write_tokens

# {binary} {batch} {seq} {threads} {steps} {lr} {model} {tokens} {run} are filled in
OURS = ("{binary} --from {model} --train {tokens} --seq-len {seq} --batch-size {batch} --steps {steps} --threads {threads} --balance none "
        "--shuffle 0 --lr {lr} --schedule constant --warmup 0 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --eps 1e-8 --clip 1 "
        "--eval-every 0 --save-every 0 --async-save 0 --sample-every 0 --run {run}")
PYTORCH = ("{python} {here}/pytorch_moe.py {peer} --from {model} --tokens {tokens} --seq {seq} --batch {batch} --steps {steps} "
           "--threads {threads} --lr {lr}")
BUILD = "gcc -std=gnu11 -D_GNU_SOURCE -O3 -march=native -mprefer-vector-width=512 -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp "
NAMES = {"ours": "ours", "eager": "transformers, eager", "grouped_mm": "transformers, grouped_mm", "batched_mm": "transformers, batched_mm"}


def shape_of(small):
    L, D, F, V, T = (2, 64, 256, 512, 256) if small else (6, 256, 1024, 32000, 2048)
    return {"vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": 4, "num_key_value_heads": 1,
            "head_dim": D // 4, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": T, "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0}


def write_model(folder, c, seed=1):
    """A Hugging Face folder with the start values of train_moe; returns its number of parameters."""
    rng = np.random.default_rng(seed)
    D, F, L, E = (c[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_local_experts"))
    HQ, HK = (c["head_dim"] * c[key] for key in ("num_attention_heads", "num_key_value_heads"))

    def normal(rows, columns, std=0.02):
        return (std * rng.standard_normal((rows, columns))).astype(np.float32)

    scaled = 0.02 / (2 * L) ** 0.5
    tensors = {"model.embed_tokens.weight": normal(c["vocab_size"], D), "model.norm.weight": np.ones(D, np.float32),
               "lm_head.weight": normal(c["vocab_size"], D)}
    for i in range(L):
        layer = {"input_layernorm.weight": np.ones(D, np.float32), "post_attention_layernorm.weight": np.ones(D, np.float32),
                 "self_attn.q_proj.weight": normal(HQ, D), "self_attn.k_proj.weight": normal(HK, D),
                 "self_attn.v_proj.weight": normal(HK, D), "self_attn.o_proj.weight": normal(D, HQ, scaled),
                 "block_sparse_moe.gate.weight": normal(E, D)}
        for e in range(E):
            layer.update({f"block_sparse_moe.experts.{e}.w1.weight": normal(F, D), f"block_sparse_moe.experts.{e}.w3.weight": normal(F, D),
                          f"block_sparse_moe.experts.{e}.w2.weight": normal(D, F, scaled)})
        tensors.update({f"model.layers.{i}.{name}": value for name, value in layer.items()})
    os.makedirs(folder)
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    config = dict(c, model_type="mixtral", architectures=["MixtralForCausalLM"], hidden_act="silu", tie_word_embeddings=False,
                  sliding_window=None, attention_dropout=0.0, router_aux_loss_coef=0.0, output_router_logits=False)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=1)
    return sum(value.size for value in tensors.values())


def make_programs(options):
    programs = [our_program(NAMES["ours"], OURS, options)]
    programs += [Program(key, NAMES[key], PYTORCH, options.steps, options.warmup) for key in NAMES if key != "ours"]
    return [program for program in programs if program.key not in options.skip.split(",")]


# ---- the limit ----


def flop_of(c, B, T):
    """of the products of a step: what train_moe counts"""
    D, F, L, V = (c[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
    E, k, HS, NH, NKV = (c[key] for key in ("num_local_experts", "num_experts_per_tok", "head_dim", "num_attention_heads", "num_key_value_heads"))
    layer = 2 * NH * HS * D + 2 * NKV * HS * D + E * D + k * 3 * F * D
    return B * T * (6 * (L * layer + V * D) + 6 * L * NH * HS * T)


def build_meters(fields):
    run(BUILD + "{here}/gemm.c -ldl -lm -o {work}/gemm", fields)
    run(BUILD + "{here}/bandwidth.c -lm -o {work}/bandwidth", fields)


def measure_machine(fields):
    """(GFLOP/s of our best product, GB/s of an update)"""
    rates = re.findall(r"^ *\d+ x \d+ x \d+ +([0-9.]+)", run("{work}/gemm {threads}", fields)[0], re.M)
    return max(float(rate) for rate in rates), float(re.search(r"update ([0-9.]+)", run("{work}/bandwidth {threads}", fields)[0]).group(1))


def run_rounds(programs, options, fields, compare=compare_losses, what=""):
    """All programs in turn; compare(programs) after the first round. Returns what the machine had, before and after."""
    machine = (0.0, 0.0)
    for i in range(options.rounds):
        if i in (0, options.rounds - 1):
            machine = tuple(map(max, machine, measure_machine(fields)))
        for program in programs:
            program.measure(fields)
            print(f"{what}round {i + 1} of {options.rounds}: {program.name}: {program.problem or f'{program.best():.0f} ms so far'}", flush=True)
        if i == 0:
            compare(programs)
    return machine


# ---- reports ----


def print_table(programs, options, flop, n_parameters, machine):
    tokens = options.batch * options.seq
    limit = 1e-6 * (flop / machine[0] + 28 * n_parameters / machine[1])
    ours = next((p.best() for p in programs if p.key == "ours" and not p.problem), None)
    print(f"\nB {options.batch}, T {options.seq}, {options.threads} threads, {options.rounds} rounds: {flop / 1e9:.4g} GFLOP in matrix products, "
          f"{28e-9 * n_parameters:.3g} GB moved by AdamW; load now {os.getloadavg()[0]:.2f}")
    print("\n| | shortest | median of n | / ours | tokens/s | forward + backward + update | peak memory |\n|---|---|---|---|---|---|---|")
    for p in programs:
        if p.problem:
            print(f"| {p.name} | not measured: {p.problem} | | | | | |")
            continue
        fastest = min(p.steps, key=lambda record: record["ms"])
        parts = " + ".join(f"{fastest[key]:.0f}" for key in ("forward_ms", "backward_ms", "update_ms")) if "forward_ms" in fastest else ""
        print(f"| {p.name} | {p.best():.0f} ms | {p.median():.0f} ms of {len(p.steps)} | {f'{p.best() / ours:.2f}' if ours else '-'} | "
              f"{1e3 * tokens / p.best():.0f} | {parts} | {p.memory / 1024:.2f} GB |")
    print(f"| limit of ours | {limit:.0f} ms | | {f'{limit / ours:.2f}' if ours else '-'} | {1e3 * tokens / limit:.0f} | "
          f"products at {machine[0]:.0f} GFLOP/s, AdamW at {machine[1]:.1f} GB/s | |")
    others = [p.best() for p in programs if p.key != "ours" and not p.problem]
    if ours and others:
        print(f"\nthe fastest other program takes {min(others) / ours:.2f} times as long as ours, ours {ours / limit:.2f} times as long as its limit")
    return limit


def write_json(path, programs, options, machine, limit):
    summary = {p.key: {"problem": p.problem} if p.problem else
               {"ms": p.best(), "median_ms": p.median(), "all_ms": [record["ms"] for record in p.steps], "losses": p.losses, "memory_mb": p.memory}
               for p in programs}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"options": vars(options), "programs": summary, "gflops": machine[0], "gb_per_s": machine[1], "limit_ms": limit}, file, indent=1)


def parse_options():
    parser = step_parser(__doc__, "train_moe", room=1, steps=8, warmup=2, batch=4, seq=256, threads=2, rounds=3)
    parser.add_argument("--skip", default="", metavar="A,B", help=f"leave these out, of {','.join(NAMES)}")
    return step_options(parser)


def main():
    options = parse_options()
    shape, programs = shape_of(options.small), make_programs(options)
    print_load()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        fields = step_fields(options, work)
        n_parameters = write_model(fields["model"], shape)
        print(f"{n_parameters:,} parameters", flush=True)
        write_tokens(fields["tokens"], options.steps, options.batch * options.seq, shape["vocab_size"])
        build_meters(fields)
        machine = run_rounds(programs, options, fields)
    limit = print_table(programs, options, flop_of(shape, options.batch, options.seq), n_parameters, machine)
    if options.json:
        write_json(options.json, programs, options, machine, limit)


if __name__ == "__main__":
    main()
