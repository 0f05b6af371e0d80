"""One training step of Mamba-1 130m side by side: ours, transformers, mamba.py and a plain PyTorch loop, float32 on the CPU.

    make build/gcc-native-O3/train_mamba_hpn
    .venv/bin/python dev/bench/mamba_step.py --seq 256 --rounds 5 --json step_256.json
    .venv/bin/python dev/bench/mamba_step.py --seq 1024 --rounds 2 --skip hf,mambapy-loop     # their backward is quadratic in T
    .venv/bin/python dev/bench/mamba_step.py --small                                          # seconds: does everything run?

A step is forward, backward, clip to norm 1 and AdamW. All programs start from one Hugging Face folder with mamba_ssm's start
values and read the same rows of one token shard in the same order. In every round each program runs once, as a process of its
own, so that all see the same neighbours and the same clock. The losses of the first round are compared step by step before any
time is printed; where two differ by more than 1e-4 of their size, there is no table. Of the steps after the warm-up the shortest
and the median count. Memory is VmHWM, PyTorch's libraries included. A program that does not fit into what memory is left fails.
FLOPs are those of matrix products: 6 per weight and token, (3 E M + E (R + 2 NS) + R E) weights per layer, V M in the head.
The limit of ours is the time of these at the rate of dev/bench/gemm.c plus the elementary functions at that of dev/fmath/bench.c:
per layer and token 2 E NS exponentials of the scan (forward, recomputed in backward) and 7 E in SiLU and softplus, and V in the head.
"""
import json
import os
import re
import tempfile

import numpy as np
from safetensors.numpy import save_file
from side_by_side import Program, compare_losses, our_program, print_load, run, step_fields, step_options, step_parser, write_tokens

# {binary} {batch} {seq} {threads} {steps} {lr} {model} {tokens} {run} are filled in
OURS = ("{binary} --from {model} --train {tokens} --seq-len {seq} --batch-size {batch} --head ce --steps {steps} --threads {threads} "
        "--shuffle 0 --lr {lr} --schedule constant --warmup 0 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --eps 1e-8 --clip 1 "
        "--eval-every 0 --save-every 0 --async-save 0 --sample-every 0 --run {run}")
PYTORCH = ("{python} {here}/pytorch_mamba.py {peer} --from {model} --tokens {tokens} --seq {seq} --batch {batch} --steps {steps} "
           "--threads {threads} --lr {lr}")
BUILD = "gcc -std=gnu11 -D_GNU_SOURCE -O3 -march=native -mprefer-vector-width=512 -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp "

NAMES = {"ours": "ours", "eager": "PyTorch, loop over unbound steps",
         "eager-compiled": "the same, torch.compile", "hf-mambapy": "transformers, use_mambapy", "mambapy": "mamba.py, pscan",
         "mambapy-loop": "mamba.py, pscan=False", "hf": "transformers, slow path"}
SLOW = ("hf", "mambapy-loop")  # quadratic in T


# ---- the start values and the tokens ----


def shape_of(options):
    M = options.d_model
    return {"vocab_size": options.vocab, "hidden_size": M, "state_size": options.d_state, "num_hidden_layers": options.layers,
            "conv_kernel": 4, "expand": 2, "intermediate_size": 2 * M, "time_step_rank": -(-M // 16), "layer_norm_epsilon": 1e-5}


def write_model(folder, c, seed=1):
    """A Hugging Face folder with the start values of mamba_ssm (modules/mamba_simple.py, models/mixer_seq_simple.py)."""
    rng = np.random.default_rng(seed)
    M, E, NS, R, K, L = (c[key] for key in ("hidden_size", "intermediate_size", "state_size", "time_step_rank", "conv_kernel",
                                            "num_hidden_layers"))

    def uniform(bound, *shape):
        return rng.uniform(-bound, bound, shape).astype(np.float32)

    tensors = {"backbone.embeddings.weight": (0.02 * rng.standard_normal((c["vocab_size"], M))).astype(np.float32),
               "backbone.norm_f.weight": np.ones(M, np.float32)}
    for i in range(L):
        step = np.maximum(np.exp(rng.uniform(np.log(0.001), np.log(0.1), E)), 1e-4)  # softplus(dt_proj.bias)
        layer = {"norm.weight": np.ones(M, np.float32), "mixer.in_proj.weight": uniform(M**-0.5, 2 * E, M),
                 "mixer.conv1d.weight": uniform(K**-0.5, E, 1, K), "mixer.conv1d.bias": uniform(K**-0.5, E),
                 "mixer.x_proj.weight": uniform(E**-0.5, R + 2 * NS, E), "mixer.dt_proj.weight": uniform(R**-0.5, E, R),
                 "mixer.dt_proj.bias": (step + np.log(-np.expm1(-step))).astype(np.float32),
                 "mixer.A_log": np.tile(np.log(np.arange(1, NS + 1, dtype=np.float32)), (E, 1)), "mixer.D": np.ones(E, np.float32),
                 "mixer.out_proj.weight": uniform(E**-0.5, M, E) / np.float32(L**0.5)}
        tensors.update({f"backbone.layers.{i}.{name}": value for name, value in layer.items()})
    os.makedirs(folder)
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    config = dict(c, model_type="mamba", architectures=["MambaForCausalLM"], use_bias=False, use_conv_bias=True, hidden_act="silu",
                  residual_in_fp32=True, tie_word_embeddings=True, initializer_range=0.02)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=1)
    return sum(value.size for value in tensors.values())


# ---- the programs ----


def make_programs(options):
    programs = [our_program(NAMES["ours"], OURS, options)]
    for key in ("eager", "eager-compiled", "hf-mambapy", "mambapy", "mambapy-loop", "hf"):
        is_slow = key in SLOW and not options.small
        programs.append(Program(key, NAMES[key], PYTORCH, options.slow_steps if is_slow else options.steps, 1 if is_slow else options.warmup))
    if options.only:
        return [program for program in programs if program.key in options.only.split(",")]
    return [program for program in programs if program.key not in options.skip.split(",")]


# ---- what the machine can do ----


def build_meters(fields):
    run(BUILD + "{here}/gemm.c -ldl -lm -o {work}/gemm", fields)
    run(BUILD + "{root}/dev/fmath/bench.c -lm -o {work}/exp", fields)


def measure_machine(fields):
    """(GFLOP/s of a layer's product, of the head's product, ns of an exponential on one thread) of our code"""
    table = run("{work}/gemm {threads}", fields)[0]
    rates = [float(re.search(rf"{shape} +([0-9.]+)", table).group(1)) for shape in ("256 x 3072 x 768", "256 x 50304 x 768")]
    return rates[0], rates[1], float(re.search(r"^exp +([0-9.]+)", run("{work}/exp", fields)[0], re.M).group(1))


def work_of(c, N):
    """(FLOP of the layers' products, of the head's, elementary functions) of a step of N tokens"""
    M, E, NS, R, L = (c[key] for key in ("hidden_size", "intermediate_size", "state_size", "time_step_rank", "num_hidden_layers"))
    layer = 3 * E * M + E * (R + 2 * NS) + R * E
    return 6 * N * L * layer, 6 * N * c["vocab_size"] * M, N * (L * (2 * E * NS + 7 * E) + c["vocab_size"])


def limit_of(machine, work, n_threads):
    """shortest time in ms of a step that waits for nothing but its products and exponentials"""
    layer_rate, head_rate, ns = machine
    return 1e-6 * (work[0] / layer_rate + work[1] / head_rate + work[2] * ns / n_threads)


# ---- reports ----


def print_table(programs, options, work, mm_rates, limit):
    flop, tokens = work[0] + work[1], options.batch * options.seq
    print(f"\nM {options.d_model}, {options.layers} layers, V {options.vocab}, B {options.batch}, T {options.seq}, "
          f"{options.threads} thread{'s' * (options.threads > 1)}, {options.rounds} round{'s' * (options.rounds > 1)}: "
          f"{flop / 1e9:.3g} GFLOP in matrix products, {work[2] / 1e6:.3g} M elementary functions per step; "
          f"torch.mm {min(mm_rates):.0f} to {max(mm_rates):.0f} GFLOP/s")
    print("\n| | shortest | median of n | / ours | tokens/s | forward + backward + update | GFLOP/s | peak memory |")
    print("|---|---|---|---|---|---|---|---|")
    ours = next((p.best() for p in programs if p.key == "ours" and not p.problem), None)
    for p in programs:
        if p.problem:
            print(f"| {p.name} | not measured: {p.problem} | | | | | | |")
            continue
        ms = p.best()
        fastest = min(p.steps, key=lambda record: record["ms"])
        parts = " + ".join(f"{fastest[key]:.0f}" for key in ("forward_ms", "backward_ms", "update_ms")) if "forward_ms" in fastest else ""
        digits = 0 if ms > 100 else 2
        print(f"| {p.name} | {ms:.{digits}f} ms | {p.median():.{digits}f} ms of {len(p.steps)} | {f'{ms / ours:.2f}' if ours else '-'} | "
              f"{1e3 * tokens / ms:.1f} | {parts} | {flop / ms / 1e6:.1f} | {p.memory / 1024:.2f} GB |")
    if limit:
        machine, ms = limit
        print(f"| limit of ours | {ms:.0f} ms | | | {1e3 * tokens / ms:.1f} | products at {machine[0]:.0f} (layers) and "
              f"{machine[1]:.0f} (head) GFLOP/s, {machine[2]:.2f} ns per function and thread | | |")


def write_json(path, programs, options, work, mm_rates, limit):
    def summary(p):
        if p.problem:
            return {"problem": p.problem}
        return {"ms": p.best(), "median_ms": p.median(), "all_ms": [record["ms"] for record in p.steps], "losses": p.losses,
                "norms": p.norms, "memory_mb": p.memory}

    result = {"options": vars(options), "torch_mm_gflops": mm_rates, "layer_flop": work[0], "head_flop": work[1], "functions": work[2],
              "programs": {p.key: summary(p) for p in programs},
              "limit": dict(zip(("layer_gflops", "head_gflops", "exp_ns", "ms"), (*limit[0], limit[1]))) if limit else None}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)


# ---- main ----


def parse_options():
    parser = step_parser(__doc__, "train_mamba_hpn", room=3, steps=6, warmup=2, batch=1, seq=256, threads=2, rounds=3,
                         d_model=768, layers=24, vocab=50280, d_state=16)
    parser.add_argument("--slow-steps", type=int, default=3, help=f"the same for {' and '.join(SLOW)}, with one step of warm-up")
    parser.add_argument("--skip", default="", metavar="A,B", help=f"leave these out, of {','.join(NAMES)}")
    parser.add_argument("--only", default="", metavar="A,B", help="leave all others out")
    parser.add_argument("--no-limit", action="store_true", help="do not measure what the machine can do")
    options = step_options(parser)
    if options.small:
        options.d_model, options.layers, options.vocab, options.steps, options.lr = 64, 2, 512, 20, 3e-3
    unknown = [key for key in (options.skip + "," + options.only).split(",") if key and key not in NAMES]
    if unknown or options.slow_steps < 2 or options.vocab > 65536:
        parser.error(f"--skip, --only: {unknown} is none of {','.join(NAMES)}" if unknown else "steps must exceed the warm-up, vocab be at most 65536")
    return options


def main():
    options = parse_options()
    shape, programs = shape_of(options), make_programs(options)
    print_load()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        fields = step_fields(options, work)
        print(f"{write_model(fields['model'], shape):,} parameters", flush=True)
        write_tokens(fields["tokens"], max(options.steps, options.slow_steps), options.batch * options.seq, options.vocab)
        limit, mm_rates, amount = None, [], work_of(shape, options.batch * options.seq)
        if not options.no_limit:
            build_meters(fields)
        for i in range(options.rounds):
            mm_rates.append(json.loads(run("{python} {here}/pytorch_mamba.py mm --threads {threads}", fields)[0])["torch_mm_gflops"])
            for program in programs:
                program.measure(fields)
                print(f"round {i + 1} of {options.rounds}: {program.name}: {program.problem or 'done'}", flush=True)
            if i == 0:
                compare_losses(programs)
        if not options.no_limit:
            machine = measure_machine(fields)
            limit = machine, limit_of(machine, amount, options.threads)
    print_table(programs, options, amount, mm_rates, limit)
    if options.json:
        write_json(options.json, programs, options, amount, mm_rates, limit)


if __name__ == "__main__":
    main()
