"""
The numbers of deepseek_v4_numbers.py through a trainer, run as its user runs it: the tiny model in a folder with
official names, probes of six lengths, MTP's loss, the indexer's and the balance of sequences, five updates, an adapter.
Beside the printed numbers stand all gradients of the reference in float64, which has been held against all of them.
NumPy and the standard library only.

    python dev/ref/deepseek_v4_checks.py --probe-with ./train_deepseek_v4
"""
import json
import math
import os
import struct
import subprocess
import tempfile
from dataclasses import replace

import numpy as np

import deepseek_v4 as v4
import deepseek_v4_numbers as spec
import exact
import trainer
from deepseek_v4 import backward, count, forward, numbers
from deepseek_v4_config import tables_to_disk
from deepseek_v4_numbers import LORA, NOISY, TINY, Tiny, norm, norms_by_name, unit
from exact import F4, F8

LOSS, LOGITS, GRADIENT = 2e-6, 5e-6, 3e-5  # the first relative, the others over the largest element of a tensor


class Program:
    """A trainer, and the folder that it works in"""

    def __init__(self, words, folder):
        self.words, self.folder, self.n_models = [os.path.abspath(words[0]), *words[1:]], folder, 0

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def run(self, *options):
        run = subprocess.run([*self.words, *options], capture_output=True, text=True, cwd=self.folder)
        if run.returncode != 0:
            raise SystemExit(f"status {run.returncode}: {' '.join(options)}: {run.stderr.strip()}")
        return run.stdout

    def save(self, p, cfg, **knobs):
        """A new folder of these parameters, rounded to float; its name"""
        self.n_models += 1
        name = f"model{self.n_models}"
        os.mkdir(self.path(name))
        with open(self.path(name, "config.json"), "w") as file:
            json.dump({**TINY, **knobs, "num_nextn_predict_layers": int(cfg.mtp)}, file)
        disk = trainer.to_disk(v4.MODEL, {key: x.astype(F4) for key, x in p.items()}, cfg)
        exact.write_safetensors(self.path(name, "model.safetensors"), {**disk, **tables_to_disk(cfg)}, {})
        return name

    def probe(self, name, inputs, targets, *options):
        """logits, loss and gradients of a folder, by their names there"""
        exact.write_safetensors(self.path("in"), {"inputs": inputs, "targets": targets}, {})
        self.run("--from", name, "--probe", "in", "--probe-out", "out", *options)
        return exact.read_safetensors(self.path("out"))


def gradients_of(found):
    return {name[len("grad."):]: x for name, x in found.items() if name.startswith("grad.")}


def close(found, expected, limit):
    return abs(found / expected - 1) <= limit


def near(found, text, limit):
    """A printed number; its last digit is rounded, or was a zero that is gone"""
    expected = float(text)
    digits = max(0.51 * unit(text), 0.51 * 10.0 ** (math.floor(math.log10(abs(expected))) - 5))
    return abs(found - expected) <= digits + limit * abs(expected)


def limit_of(name):
    """Of a gradient, by its name on disk or in a table: those that cancel are less exact"""
    end = name.replace("layers.", "").replace("mtp.0.", "").split(".")[-1]
    return NOISY.get(end, GRADIENT)


def worst_gradient(found, truth):
    """The largest error over its limit, and whose; before layer 0 all streams are alike, and what mixes them has no
    gradient but noise"""
    assert found.keys() >= truth.keys(), found.keys() ^ truth.keys()
    worst = (0.0, "")
    for name, x in truth.items():
        if name.startswith("layers.0.hc_attn_"):
            continue
        error = np.abs(found[name] - x).max()
        size = np.abs(x).max()
        worst = max(worst, (error / size / limit_of(name) if size > 0 else float(error > 0), name))
    return worst


class Case:
    """One length and some knobs: what the program says, and the reference in float64"""

    def __init__(self, program, S, **knobs):
        self.tiny = Tiny(S, **knobs)
        cfg = self.tiny.cfg
        self.found = program.probe(program.save(self.tiny.p, cfg, **knobs), self.tiny.inputs, self.tiny.targets)
        self.acts = self.tiny.forward()
        self.numbers = self.tiny.numbers(self.acts)
        self.truth = trainer.to_disk(v4.MODEL, self.tiny.backward(self.acts), cfg)
        self.grads = gradients_of(self.found)

    def promises(self, name):
        logits, truth = self.found["logits"], self.acts["logits"]
        error = np.abs(logits - truth).max() / np.abs(truth).max()
        losses = [abs(float(self.found[key][0]) / self.numbers[key] - 1) for key in ("loss", "cross_entropy")]
        worst, of = worst_gradient(self.grads, self.truth)
        return [(f"{name}: losses within {max(losses):.0e}, logits within {error:.0e}", max(losses) <= LOSS and
                 error <= LOGITS),
                (f"{name}: {len(self.truth)} gradients, the worst at {worst:.2f} of its limit ({of})", worst <= 1.0)]


def tables_promise(name, case, table, place):
    """Norms of gradients as printed"""
    norms, wrong, n = norms_by_name(case.grads), [], 0
    for line in table.strip().split("\n"):
        short, *cells = line.split()
        for key, cell in zip([0, 1, 2, 3, 4, 5, "mtp"], cells):
            n += cell != "-"
            if cell != "-" and not near(norms[short][key], cell, 2 * limit_of(short)):
                wrong.append(f"{short} {key}: {norms[short][key]:.6g} {cell}")
    for key, texts in spec.OTHERS.items():
        disk = {"embed": "embed.weight", "head": "head.weight", "norm": "norm.weight"}.get(key, key)
        if not near(norm(case.grads[disk]), texts[place], 2 * limit_of(key)):
            wrong.append(f"{key}: {norm(case.grads[disk])} {texts[place]}")
    return [(f"{name}: {n + len(spec.OTHERS)} norms of gradients as printed" + "".join(f"; {x}" for x in wrong[:3]),
             not wrong)]


def length_promises(program):
    out = []
    for S, text in spec.SHORTER.items():
        case = Case(program, S)
        out += [(f"S {S}: cross entropy {float(case.found['loss'][0]):.7f}, {text}",
                 near(float(case.found["loss"][0]), text, LOSS)), *case.promises(f"S {S}")]
        if S != 70:
            continue
        logits, grads = case.found["logits"], case.grads
        out += [("S 70: logits as printed", all(near(x, y, 2e-5) for x, y in zip(
                    [*logits[0, 0, :3].tolist(), *logits[1, 69, 125:].tolist()],
                    "0.546342049 0.393632229 1.214017788 0.261612158 0.740629678 1.221427098".split()))),
                ("S 70: norm of all gradients", near(math.sqrt(sum(norm(x) ** 2 for x in grads.values())),
                                                     "3.698539211", GRADIENT)),
                ("S 70: elements of gradients", all(element_is(grads, key, text) for key, text in spec.SINGLE.items())),
                ("S 70: the indexer's and those of biases are 0", not any(
                    x.any() for key, x in grads.items() if ".indexer." in key or key.endswith("gate.bias"))),
                *tables_promise("S 70", case, spec.CE_NORMS, 0)]
    return out


def element_is(grads, key, text):
    name, *at = key
    x, values = grads[name], [float(y) for y in text.split()]
    found = x[tuple(at)] if at else x
    return np.abs(np.reshape(found, -1) - values).max() <= 2 * limit_of(name) * np.abs(x).max()


def loss_promises(program):
    """MTP, the indexer's loss, the balance of sequences, all three, and the indexer dense"""
    case = Case(program, 70, mtp_weight=0.3)
    own = {key: norm(case.grads[f"mtp.0.{key}" + ("" if key.startswith("hc_") else ".weight")]) for key in spec.MTP_NORMS}
    out = [("MTP: the sum of losses, 7.119808429743", near(float(case.found["loss"][0]), "7.119808429743", LOSS)),
           *case.promises("MTP"), *tables_promise("MTP", case, spec.TOTAL_NORMS, 1),
           ("MTP: norms of what it alone has", all(near(own[key], text, 2 * limit_of(key))
                                                   for key, text in spec.MTP_NORMS.items()))]
    case = Case(program, 70, indexer_train="kl")
    for l, text in spec.INDEX.items():
        names = [f"compressor.{x}" for x in ("wkv.weight", "wgate.weight", "ape", "norm.weight")]
        names += ["wq_b.weight", "weights_proj.weight"]
        out.append((f"the indexer's loss: norms of its gradients in layer {l}", all(
            near(norm(case.grads[f"layers.{l}.attn.indexer.{name}"]), y, 2 * GRADIENT)
            for name, y in zip(names, text.split()[1:]))))
    out += case.promises("the indexer's loss")
    for name, S, knobs in (("balance of sequences", 70, {"seq_balance_coef": 0.5}),
                           ("the indexer dense", 70, {"indexer_train": "dense"}),
                           ("all of them", 33, {"seq_balance_coef": 0.1, "indexer_train": "kl", "mtp_weight": 0.7})):
        out += Case(program, S, **knobs).promises(name)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Updates.
# ---------------------------------------------------------------------------------------------------------------------
ADAMW = ("--lr", "1e-3", "--schedule", "constant", "--warmup", "0", "--beta1", "0.9", "--beta2", "0.999", "--eps", "1e-8",
         "--weight-decay", "0", "--clip", "0", "--steps", "5", "--save-every", "0", "--eval-every", "0", "--sample-every",
         "0", "--shuffle", "0")


def adamw(p, g, m, v, step):
    corrections = [1 - beta ** (step + 1) for beta in (0.9, 0.999)]
    for key in p:
        p[key], m[key], v[key] = exact.adamw(p[key], g[key], m[key], v[key], 1e-3, 0.9, 0.999, 1e-8, 0.0, corrections)


def zeros(p):
    return {key: np.zeros_like(x) for key, x in p.items()}


def step_promises(program):
    """As printed: the gradients are the program's, of parameters that are floats, the updates are made here"""
    tiny, out = Tiny(), []
    for name, expected in (("SGD", spec.SGD), ("AdamW", spec.ADAMW)):
        p, losses = dict(tiny.p), []
        m, v = zeros(p), zeros(p)
        for step in range(5):
            found = program.probe(program.save(p, tiny.cfg), tiny.inputs, tiny.targets)
            g = trainer.from_disk(v4.MODEL, {key: x.astype(F8) for key, x in gradients_of(found).items()}, tiny.cfg)
            losses.append(float(found["loss"][0]))
            if name == "SGD":
                p = {key: x - 0.1 * g[key] for key, x in p.items()}
            else:
                adamw(p, g, m, v, step)
        errors = [abs(x / float(y) - 1) for x, y in zip(losses, expected.split())]
        out.append((f"five losses with {name}, by the program's gradients: within {max(errors):.0e}",
                    max(errors) <= 2e-5))
    return out


def records_of(program, run):
    with open(program.path(run, "metrics.jsonl"), encoding="utf-8") as file:
        records = [json.loads(line) for line in file if line.startswith("{")]
    return [x for x in records if x.get("loss") is not None]


def trained(tiny, inputs, targets):
    """What five updates with AdamW say, and the parameters behind them, in float64"""
    p, said = dict(tiny.p), []
    m, v = zeros(p), zeros(p)
    for step in range(5):
        c = count(inputs, targets, tiny.cfg)
        acts = forward(p, inputs, targets, tiny.cfg)
        said.append(numbers([acts], c, tiny.cfg))
        adamw(p, backward(p, acts, inputs, targets, c, tiny.cfg), m, v, step)
    return said, p


def trained_by_floats(tiny, inputs, targets):
    """The same in float32, every operation as the program has it"""
    cfg = replace(tiny.cfg, lr=1e-3, weight_decay=0.0, steps=5)
    p = {key: x.astype(F4) for key, x in tiny.p.items()}
    records = list(trainer.train(v4.MODEL, cfg, p, *(np.stack([x[None]] * 5) for x in (inputs, targets))))
    return [x.numbers for x in records], records[-1].params


KEYS = ("loss", "cross_entropy", "mtp_loss", "index_loss")


def run_program(program, tiny, **knobs):
    """Its own five updates, of the batch as a file of tokens: targets, records, parameters behind them"""
    tokens = np.concatenate([tiny.inputs.reshape(-1)] * 5 + [tiny.inputs[0, :1]])
    with open(program.path("tokens.bin"), "wb") as file:
        file.write(struct.pack("<3i", 20240520, 1, len(tokens)).ljust(1024, b"\0") + tokens.astype("<u2").tobytes())
    folder = program.save(tiny.p, tiny.cfg, **knobs)
    program.run("--from", folder, "--train", "tokens.bin", "--seq-len", "70", "--batch-size", "2", *ADAMW, "--run",
                folder + "_run", "--export-hf", folder + "_after")
    after = exact.read_safetensors(program.path(folder + "_after", "model.safetensors"))
    return tokens[1:141].reshape(2, 70).astype(np.int32), records_of(program, folder + "_run"), after


def run_promises(program):
    """Rows of a file of tokens have a last target, which the printed numbers lack. Choices may differ from those of
    float64 once parameters have moved; they never differ from those of the reference in float32"""
    tiny, out = Tiny(), []
    targets, found, after = run_program(program, tiny)
    expected, p = trained(tiny, tiny.inputs, targets)
    errors = [abs(x[key] / y[key] - 1) for x, y in zip(found, expected) for key in ("loss", "cross_entropy")]
    out.append((f"five updates with AdamW: losses of float64 within {max(errors):.0e}", len(found) == 5 and
                max(errors) <= LOSS))
    for name, knobs in (("AdamW", {}), ("AdamW, MTP, the indexer's loss, balance", {
            "mtp_weight": 0.3, "indexer_train": "kl", "seq_balance_coef": 0.1})):
        tiny = Tiny(**knobs)
        targets, found, after = run_program(program, tiny, **knobs)
        expected, p = trained_by_floats(tiny, tiny.inputs, targets)
        wrong = [f"step {step + 1}, {key}: {x[key]} {np.mean(y[key])}" for step, (x, y) in enumerate(zip(found, expected))
                 for key in KEYS if key in y and not is_float(x[key], y[key])]
        disk = trainer.to_disk(v4.MODEL, p, tiny.cfg)
        other = [key for key, x in disk.items() if not np.array_equal(after[key], x)]
        out += [(f"five updates with {name}: the losses of the reference in float32" + "".join(f"; {x}" for x in wrong[:2]),
                 not wrong and len(found) == 5),
                (f"five updates with {name}: the bits of its {len(disk)} tensors" + "".join(f"; {x}" for x in other[:3]),
                 not other)]
    return out


def is_float(found, expected):
    """As printed in metrics.jsonl; of several layers the program says the mean, which is no float"""
    if np.ndim(expected):
        return abs(found / np.mean(expected.astype(F8)) - 1) < 1e-7
    return F4(found) == expected


# ---------------------------------------------------------------------------------------------------------------------
# An adapter.
# ---------------------------------------------------------------------------------------------------------------------
MODULES = {"wq_a": "q_a_proj", "wq_b": "q_b_proj", "wkv": "kv_proj", "wo_a": "o_a_proj", "wo_b": "o_b_proj"}


def lora_promises(program):
    """wo_a has two groups of heads: PEFT has no adapter for that. The definition is that of the merged matrix"""
    tiny, tensors = Tiny(), {}
    p, pairs = spec.merged_model(tiny)
    for name, (A, B) in pairs.items():
        for l in range(6):
            where = f"base_model.model.model.layers.{l}.self_attn.{MODULES[name]}"
            tensors.update({where + ".lora_A.weight": A[l].astype(F4), where + ".lora_B.weight": B[l].astype(F4)})
    os.mkdir(program.path("adapter"))
    exact.write_safetensors(program.path("adapter", "adapter_model.safetensors"), tensors, {})
    with open(program.path("adapter", "adapter_config.json"), "w") as file:
        json.dump({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none", "lora_dropout": 0.0,
                   "target_modules": r".*\.self_attn\.(q_a_proj|q_b_proj|kv_proj|o_a_proj|o_b_proj)"}, file)
    folder = program.save(tiny.p, tiny.cfg)
    found = program.probe(folder, tiny.inputs, tiny.targets, "--lora", "adapter")
    truth, grads = spec.lora_gradients(tiny, p, pairs), gradients_of(found)
    loss = tiny.numbers(tiny.forward(p))["loss"]
    worst, wrong, squares = (0.0, ""), [], 0.0
    for l in range(6):
        cells = LORA[l].split() if l in LORA else [None] * 10
        for i, (name, both) in enumerate(truth.items()):
            for k, part in enumerate("AB"):
                key = f"base_model.model.model.layers.{l}.self_attn.{MODULES[name]}.lora_{part}.weight"
                x, y = grads[key], both[k][l]
                worst = max(worst, (np.abs(x - y).max() / np.abs(y).max(), key))
                squares += norm(x) ** 2
                if cells[2 * i + k] and not near(norm(x), "0" + cells[2 * i + k], GRADIENT):
                    wrong.append(key)
    program.run("--from", folder, "--lora", "adapter", "--merge", "1", "--export-hf", "merged")
    merged = exact.read_safetensors(program.path("merged", "model.safetensors"))
    expected = trainer.to_disk(v4.MODEL, p, replace(tiny.cfg))
    error = max(np.abs(merged[key] - x).max() / np.abs(x).max() for key, x in expected.items())
    return [("LoRA: cross entropy 5.606511973355", near(float(found["loss"][0]), "5.606511973355", LOSS) and
             close(float(found["loss"][0]), loss, LOSS)),
            (f"LoRA: gradients of A and B, 60 as defined, within {worst[0]:.0e}", worst[0] <= GRADIENT and len(grads) == 60),
            ("LoRA: their norms as printed, and that of all", not wrong and
             near(math.sqrt(squares), "2.370998422", GRADIENT)),
            (f"LoRA: merged, all matrices within {error:.0e}", error <= 2e-7)]


def promises(words):
    with tempfile.TemporaryDirectory() as folder:
        program = Program(words, folder)
        return [x for part in (length_promises, loss_promises, step_promises, run_promises, lora_promises)
                for x in part(program)]
