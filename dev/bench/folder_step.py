"""Shared by qwen36_step.py, deepseek_v4_step.py and glm5_step.py: one training step of ours and of transformers, float32 on the CPU, of a
model whose Hugging Face folder ours writes, with start values of its own. run_folder_step(doc, trainer, peers, shape_of, flop_of):
    doc, trainer     the script's docstring; the name of our program
    peers            experts_implementations of transformers
    shape_of(small)  config.json
    flop_of(c, B, T) floating-point operations of a step
    everything(T)    what to change in config.json so that losses can be compared, in runs of their own; None: nothing
"""
import json
import os
import shutil
import tempfile

from moe_step import NAMES, PYTORCH, build_meters, print_table, run_rounds, write_json
from qwen_shape import write_tokenizer
from side_by_side import Program, compare_losses, our_program, print_load, run, step_fields, step_options, step_parser, write_tokens

# {binary} {batch} {seq} {threads} {steps} {lr} {model} {tokens} {run} are filled in
OURS = ("{binary} --from {model} --train {tokens} --seq-len {seq} --batch-size {batch} --steps {steps} --threads {threads} "
        "--shuffle 0 --lr {lr} --schedule constant --warmup 0 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --eps 1e-8 --clip 1 "
        "--eval-every 0 --save-every 0 --async-save 0 --sample-every 0 --run {run}")


def write_model(fields, c):
    """A Hugging Face folder of start values, by our program; returns its number of parameters"""
    work = os.path.dirname(fields["model"])
    config, tokenizer = (os.path.join(work, name) for name in ("config.json", "tokenizer.json"))
    with open(config, "w", encoding="utf-8") as file:
        json.dump(c, file)
    write_tokenizer(tokenizer, c["vocab_size"])
    run("{binary} --config " + config + " --tokenizer " + tokenizer + " --export-hf {model}", fields)
    with open(os.path.join(fields["model"], "model.safetensors"), "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return max(ends) // 4


def same_training(programs, options, fields, changes):
    """The same model with changes to config.json; prints losses, ends where they differ"""
    other = dict(fields, model=fields["model"] + "_same")
    shutil.copytree(fields["model"], other["model"])
    path = os.path.join(other["model"], "config.json")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(dict(config, **changes), file)
    again = [Program(p.key, p.name, p.command, options.steps, options.warmup, p.problem) for p in programs]
    for program in again:
        program.measure(other)
    compare_losses(again)


def parse_options(doc, trainer, peers):
    parser = step_parser(doc, trainer, room=1, steps=8, warmup=2, batch=1, seq=512, threads=2, rounds=3)
    parser.add_argument("--skip", default="", metavar="A,B", help=f"leave these out, of {','.join(peers)}")
    return step_options(parser)


def run_folder_step(doc, trainer, peers, shape_of, flop_of, everything=None):
    options = parse_options(doc, trainer, peers)
    shape, programs = shape_of(options.small), [our_program(NAMES["ours"], OURS, options)]
    programs += [Program(key, NAMES[key], PYTORCH, options.steps, options.warmup) for key in peers if key not in options.skip.split(",")]
    print_load()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        fields = step_fields(options, work)
        n_parameters = write_model(fields, shape)
        print(f"{n_parameters:,} numbers in the file", flush=True)
        write_tokens(fields["tokens"], options.steps, options.batch * options.seq, shape["vocab_size"])
        build_meters(fields)
        check = [lambda ran: same_training(ran, options, fields, everything(options.seq))] if everything else []
        machine = run_rounds(programs, options, fields, *check)
    limit = print_table(programs, options, flop_of(shape, options.batch, options.seq), n_parameters, machine)
    if options.json:
        write_json(options.json, programs, options, machine, limit)
