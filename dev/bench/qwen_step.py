"""Qwen3-0.6B side by side: ours and transformers with PEFT, on the CPU: a step of full training, a step of LoRA, generation.

    make build/gcc-native-O3/train_qwen3
    python dev/bench/qwen_step.py --rounds 5 --json qwen.json          # a Python that has torch, transformers and peft
    python dev/bench/qwen_step.py --small                              # seconds: does everything run?

The shape is Qwen3-0.6B's, the weights are random. A step is forward, backward, clip to norm 1 and AdamW, in float32, at B 1 and T 256;
LoRA has adapters of rank 16 on all seven linears of every layer. Both programs start from one Hugging Face folder and read the same
rows of random tokens in the same order. Rounds, warm-up and what must be equal before any time is printed are those of
mamba_step.py; adapters start at random numbers of each program's own, so of LoRA the first loss must be equal, when they add nothing.
Generation is greedy, 64 tokens after 32, with weights as floats and as bf16: of ours the second half, by when its tokens come out of
the pipe. Its fastest tenth stands beside what a loop that only reads had at its best before and after: that is the limit.
Limit of ours: as in moe_step.py. FLOPs of a step: for each weight of a product and token 2 forward, 2 for the gradient of what goes
in, and 2 for its own where it learns; and attention.
"""
import copy
import json
import os
import re
import subprocess
import tempfile
import time

import numpy as np
from moe_step import build_meters, print_table, run_rounds, write_json
from qwen_shape import shape_of, write_tokenizer
from safetensors.numpy import save_file
from side_by_side import Program, compare_losses, our_program, print_load, run, step_fields, step_options, step_parser, write_tokens

# {binary} {batch} {seq} {threads} {steps} {lr} {rank} {model} {tokens} {run} are filled in
OURS = ("{binary} --from {model} --train {tokens} --seq-len {seq} --batch-size {batch} --steps {steps} --threads {threads} --shuffle 0 "
        "--lr {lr} --schedule constant --warmup 0 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --eps 1e-8 --clip 1 "
        "--eval-every 0 --save-every 0 --async-save 0 --sample-every 0 --run {run}")
PYTORCH = ("{python} {here}/pytorch_qwen.py {task} --from {model} --tokens {tokens} --seq {seq} --batch {batch} --steps {steps} "
           "--threads {threads} --lr {lr} --rank {rank}")
TASKS = {  # ours, and the name of the other program
    "full": (OURS, "transformers"),
    "lora": (OURS + " --lora-rank {rank}", "transformers + PEFT"),
}
OURS_GENERATES = "{binary} --from {model} --weights {dtype} --generate {prompt} --temperature 0 --max-new-tokens {new} --threads {threads}"
PYTORCH_GENERATES = ("{python} {here}/pytorch_qwen.py generate --from {model} --dtype {dtype} --prompt 32 --new {new} --rounds 1 "
                     "--threads {threads}")


# ---- the model ----


def linears_of(c):
    """Of the seven linears of a layer name, outputs and inputs."""
    D, F = c["hidden_size"], c["intermediate_size"]
    HQ, HK = (c["head_dim"] * c[key] for key in ("num_attention_heads", "num_key_value_heads"))
    return [("self_attn.q_proj", HQ, D), ("self_attn.k_proj", HK, D), ("self_attn.v_proj", HK, D), ("self_attn.o_proj", D, HQ),
            ("mlp.gate_proj", F, D), ("mlp.up_proj", F, D), ("mlp.down_proj", D, F)]


def write_model(folder, c, seed=1):
    """A Hugging Face folder of floats; returns its number of parameters."""
    rng, ones = np.random.default_rng(seed), lambda n: np.ones(n, np.float32)

    def normal(rows, columns):
        return np.float32(0.02) * rng.standard_normal((rows, columns), dtype=np.float32)

    D, HS = c["hidden_size"], c["head_dim"]
    tensors = {"model.embed_tokens.weight": normal(c["vocab_size"], D), "model.norm.weight": ones(D)}
    for i in range(c["num_hidden_layers"]):
        layer = {"input_layernorm": ones(D), "post_attention_layernorm": ones(D), "self_attn.q_norm": ones(HS), "self_attn.k_norm": ones(HS)}
        layer.update({name: normal(rows, columns) for name, rows, columns in linears_of(c)})
        tensors.update({f"model.layers.{i}.{name}.weight": value for name, value in layer.items()})
    os.makedirs(folder)
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(dict(c, torch_dtype="float32"), file, indent=1)
    write_tokenizer(os.path.join(folder, "tokenizer.json"), c["vocab_size"])
    return sum(value.size for value in tensors.values())


def flop_of(c, task, rank, B, T):
    """of the products of a step"""
    L, linears = c["num_hidden_layers"], linears_of(c)
    layers, head = L * sum(rows * columns for _, rows, columns in linears), c["vocab_size"] * c["hidden_size"]
    adapters = L * adapter_size(c, rank) if task == "lora" else 0
    attention = 6 * L * c["num_attention_heads"] * c["head_dim"] * T
    return B * T * ((6 if task == "full" else 4) * (layers + head) + 6 * adapters + attention)


def adapter_size(c, rank):
    """of a layer"""
    return rank * sum(rows + columns for _, rows, columns in linears_of(c))


# ---- steps ----


def same_losses(task, programs):
    copies = [copy.copy(program) for program in programs]
    for program in copies:
        if task == "lora":
            program.losses, program.norms = program.losses[:1], program.norms[:1]
    compare_losses(copies)


def measure_steps(task, options, fields, shape, n_parameters):
    """Prints the table of a task."""
    command, other = TASKS[task]
    programs = [our_program("ours", command, options),
                Program("pytorch", other, PYTORCH.replace("{task}", task), options.steps, options.warmup)]
    machine = run_rounds(programs, options, fields, lambda ran: same_losses(task, ran), f"{task}, ")
    n_learning = shape["num_hidden_layers"] * adapter_size(shape, options.rank) if task == "lora" else n_parameters
    print(f"\n{task}: {n_learning:,} parameters learn")
    limit = print_table(programs, options, flop_of(shape, task, options.rank, options.batch, options.seq), n_learning, machine)
    if options.json:
        write_json(f"{os.path.splitext(options.json)[0]}_{task}.json", programs, options, machine, limit)


# ---- generation ----


def ours_generates(fields):
    """(tokens/s of the second half, by when its tokens came; seconds of a token in its fastest tenth; MB)"""
    words = [word.format(**fields) for word in OURS_GENERATES.split()]
    environment = dict(os.environ, OMP_NUM_THREADS=str(fields["threads"]))
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    times = []
    while os.read(child.stdout.fileno(), 4096):
        times.append(time.monotonic())
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    half = len(times) // 2
    if child.returncode != 0 or half < 2:
        raise RuntimeError(f"{os.path.basename(words[0])} ended with status {child.returncode} after {len(times)} tokens")
    fastest = sorted(b - a for a, b in zip(times[half:], times[half + 1:]))[(len(times) - half) // 10]
    return (len(times) - 1 - half) / (times[-1] - times[half]), fastest, usage.ru_maxrss / 1024


def read_rate(fields):
    """GB/s of this machine now, the best of some passes"""
    return float(re.search(r"read ([0-9.]+)", run("{work}/bandwidth {threads} 0.5", fields)[0]).group(1))


def rate_of_ours(fields, rounds, n_bytes):
    """Best tokens/s, MB, and the rates at which weights were read, best against best: tokens of the fastest tenth, and
    what the machine had before and after"""
    rates, shares, memory = [], [], 0.0
    for _ in range(rounds):
        before = read_rate(fields)
        rate, fastest, used = ours_generates(fields)
        rates, memory = [*rates, rate], max(memory, used)
        shares.append((1e-9 * n_bytes / fastest, before, read_rate(fields)))
    of = "; ".join(f"{own:.1f} of {before:.1f} and {after:.1f}" for own, before, after in shares)
    return max(rates), memory, f"weights at GB/s, fastest tenth: {of}"


def pytorch_generates(fields):
    text, memory = run(PYTORCH_GENERATES, fields, keep_memory=not fields["plain_malloc"])
    return float(re.search(r'"tokens_per_s": ([0-9.e+]+)', text).group(1)), memory


def rate_of_pytorch(fields, rounds, n_bytes):
    found = [pytorch_generates(fields) for _ in range(rounds)]
    return max(rate for rate, _ in found), max(memory for _, memory in found), ""


def measure_generation(options, fields, n_parameters):
    print("\n| | weights | tokens/s, best | peak memory | |\n|---|---|---|---|---|")
    fields = dict(fields, new=64, prompt="x" * 31)  # end of text stands in front of it
    for dtype in ("fp32", "bf16"):
        for name, generates in (("ours", rate_of_ours), ("transformers", rate_of_pytorch)):
            try:
                n_bytes = n_parameters * (2 if dtype == "bf16" else 4)
                rate, memory, remark = generates(dict(fields, dtype=dtype), options.rounds, n_bytes)
                print(f"| {name} | {dtype} | {rate:.1f} | {memory / 1024:.2f} GB | {remark} |", flush=True)
            except RuntimeError as error:
                print(f"| {name} | {dtype} | not measured: {error} | | |", flush=True)


def parse_options():
    parser = step_parser(__doc__, "train_qwen3", room=10, steps=5, warmup=1, batch=1, seq=256, threads=2, rounds=3, rank=16)
    parser.add_argument("--tasks", default="full,lora,generate", metavar="A,B",
                        help="some of full, lora, generate (all); --json writes FILE_full.json, FILE_lora.json")
    options = step_options(parser)
    unknown = set(options.tasks.split(",")) - {*TASKS, "generate"}
    if unknown:
        parser.error(f"--tasks: expected some of full, lora, generate, found {', '.join(sorted(unknown))}")
    return options


def main():
    options = parse_options()
    shape = shape_of(options.small)
    print_load()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        fields = step_fields(options, work)
        n_parameters = write_model(fields["model"], shape)
        print(f"{n_parameters:,} parameters", flush=True)
        write_tokens(fields["tokens"], options.steps, options.batch * options.seq, min(shape["vocab_size"], 1 << 16))  # uint16
        build_meters(fields)
        for task in options.tasks.split(","):
            if task == "generate":
                measure_generation(options, fields, n_parameters)
            else:
                measure_steps(task, options, fields, shape, n_parameters)


if __name__ == "__main__":
    main()
