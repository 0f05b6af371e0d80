"""Long contexts on the CPU: a step of train_deepseek_v4 whose attention sees a window and entries, beside one that sees everything.

    make build/gcc-native-O3/train_deepseek_v4
    python3 dev/bench/deepseek_v4_long.py                       # T 4096 and 16384
    python3 dev/bench/deepseek_v4_long.py --seq 512 --rounds 1   # seconds: does everything run?

Four models that differ in their attention alone, all layers of one kind: a window of 128; CSA, a window and 32 entries of 4 tokens that
an indexer chooses; HCA, a window and all entries of 128 tokens; and a window of T, which is full attention. Each has 4 layers of 64
channels, 4 heads of 32, 2 streams, 4 experts 32 wide of which a token takes 1, and a vocabulary of 257: little stands beside attention. A
step is forward, backward and AdamW, at B 1; --recompute is as it comes. Programs take turns, and the shortest step counts; memory is the
largest resident memory of the process (VmHWM). On a machine that others use, too: --threads 1.
"""
import json
import os
import tempfile

from side_by_side import our_program, print_load, step_fields, step_options, step_parser, write_tokens

# {binary} {model} {tokens} ... are filled in
OURS = ("{binary} --config {work}/%s.json --tokenizer bytes --train {tokens} --seq-len {seq} --batch-size 1 --steps {steps} --threads {threads} "
        "--shuffle 0 --schedule constant --warmup 0 --clip 1 --eval-every 0 --save-every 0 --async-save 0 --sample-every 0 --run {run}")
KINDS = {"window 128": ("sliding_attention", 128), "CSA": ("compressed_sparse_attention", 128),
         "HCA": ("heavily_compressed_attention", 128), "full": ("sliding_attention", 0)}


def write_configs(work, T):
    """A config.json of each kind"""
    for name, (kind, window) in KINDS.items():
        config = {"model_type": "deepseek_v4", "vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 4, "max_position_embeddings": T,
                  "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 32,
                  "sliding_window": window or T, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 32, "hc_mult": 2,
                  "hc_sinkhorn_iters": 4, "n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32,
                  "layer_types": [kind] * 4, "mlp_layer_types": ["moe"] * 4}
        with open(os.path.join(work, file_name(name) + ".json"), "w", encoding="utf-8") as file:
            json.dump(config, file)


def file_name(name):
    return name.replace(" ", "_")


def measure(options, T):
    """A row of the table for each kind"""
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        fields = dict(step_fields(options, work), seq=T)
        write_configs(work, T)
        write_tokens(fields["tokens"], options.steps, T, 257)
        programs = [our_program(name, OURS % file_name(name), options) for name in KINDS]
        for i in range(options.rounds):
            for program in programs:
                program.measure(fields)
                print(f"T {T}, round {i + 1} of {options.rounds}: {program.name}: {program.problem or f'{program.best():.0f} ms so far'}", flush=True)
    return programs


def parse_options():
    parser = step_parser(__doc__, "train_deepseek_v4", room=1, steps=3, warmup=1, threads=2, rounds=2)
    parser.add_argument("--seq", type=int, nargs="+", default=[4096, 16384])
    return step_options(parser)


def main():
    options = parse_options()
    print_load()
    rows = {T: measure(options, T) for T in ([40] if options.small else options.seq)}
    print("\n| T | attention | ms a step | us a token | / full | memory |\n|---|---|---|---|---|---|")
    for T, programs in rows.items():
        full = next((p.best() for p in programs if p.name == "full" and not p.problem), None)
        for p in programs:
            if p.problem:
                print(f"| {T} | {p.name} | not measured: {p.problem} | | | |")
            else:
                print(f"| {T} | {p.name} | {p.best():.0f} | {1e3 * p.best() / T:.0f} | {f'{p.best() / full:.2f}' if full else '-'} | "
                      f"{p.memory / 1024:.2f} GB |")


if __name__ == "__main__":
    main()
