"""Qwen3-0.6B side by side: ours and transformers with PEFT, on the CPU: a step of full training, a step of LoRA, generation.

    make build/gcc-native-O3/train_qwen3
    python dev/bench/qwen_step.py --rounds 5 --json qwen.json          # a Python that has torch, transformers and peft
    python dev/bench/qwen_step.py --small                              # seconds: does everything run?

The shape is Qwen3-0.6B's, the weights are random. A step is forward, backward, clip to norm 1 and AdamW, in float32, at B 1 and T 256;
LoRA has adapters of rank 16 on all seven linears of every layer. Both programs start from one Hugging Face folder and read the same
rows of random tokens in the same order. Rounds, warm-up and what must be equal before any time is printed are those of
mamba_step.py; adapters start at random numbers of each program's own, so of LoRA the first loss must be equal, when they add nothing.
Generation is greedy, 64 tokens after 32, with weights as floats and as bf16: the second half of ours, by the difference of two
runs, so that loading does not count.
Limit of ours: as in moe_step.py. FLOPs of a step: for each weight of a product and token 2 forward, 2 for the gradient of what goes
in, and 2 for its own where it learns; and attention.
"""
import copy
import json
import os
import re
import tempfile
import time

import numpy as np
from moe_step import build_meters, measure_machine, print_table, write_json
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
    machine = (0.0, 0.0)
    for i in range(options.rounds):
        if i in (0, options.rounds - 1):
            machine = tuple(map(max, machine, measure_machine(fields)))
        for program in programs:
            program.measure(fields)
            print(f"{task}, round {i + 1} of {options.rounds}: {program.name}: {program.problem or f'{program.best():.0f} ms so far'}", flush=True)
        if i == 0:
            same_losses(task, programs)
    n_learning = shape["num_hidden_layers"] * adapter_size(shape, options.rank) if task == "lora" else n_parameters
    print(f"\n{task}: {n_learning:,} parameters learn")
    limit = print_table(programs, options, flop_of(shape, task, options.rank, options.batch, options.seq), n_learning, machine)
    if options.json:
        write_json(f"{os.path.splitext(options.json)[0]}_{task}.json", programs, options, machine, limit)


# ---- generation ----


def ours_generates(fields):
    """(seconds of half of the tokens, seconds of all, MB)"""
    seconds = []
    for new in (fields["new"] // 2, fields["new"]):
        begin = time.monotonic()
        memory = run(OURS_GENERATES, dict(fields, new=new))[1]
        seconds.append(time.monotonic() - begin)
    return *seconds, memory


def rate_of_ours(fields, rounds):
    """Tokens/s of the second half, by the shortest of both lengths: a first run reads the files from the disk; MB"""
    half, whole, memory = zip(*(ours_generates(fields) for _ in range(rounds)))
    if min(whole) <= min(half):
        raise RuntimeError("too fast to be told from loading")
    return (fields["new"] - fields["new"] // 2) / (min(whole) - min(half)), max(memory)


def pytorch_generates(fields):
    text, memory = run(PYTORCH_GENERATES, fields, keep_memory=not fields["plain_malloc"])
    return float(re.search(r'"tokens_per_s": ([0-9.e+]+)', text).group(1)), memory


def rate_of_pytorch(fields, rounds):
    found = [pytorch_generates(fields) for _ in range(rounds)]
    return max(rate for rate, _ in found), max(memory for _, memory in found)


def measure_generation(options, fields):
    print("\n| | weights | tokens/s, best | peak memory |\n|---|---|---|---|")
    fields = dict(fields, new=64, prompt="x" * 31)  # end of text stands in front of it
    for dtype in ("fp32", "bf16"):
        for name, generates in (("ours", rate_of_ours), ("transformers", rate_of_pytorch)):
            try:
                rate, memory = generates(dict(fields, dtype=dtype), options.rounds)
                print(f"| {name} | {dtype} | {rate:.1f} | {memory / 1024:.2f} GB |", flush=True)
            except RuntimeError as error:
                print(f"| {name} | {dtype} | not measured: {error} | |", flush=True)


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
                measure_generation(options, fields)
            else:
                measure_steps(task, options, fields, shape, n_parameters)


if __name__ == "__main__":
    main()
