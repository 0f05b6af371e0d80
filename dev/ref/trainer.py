"""
What the reference trainers have in common: settings of a run, the parameter table, updates, golden files, the probe and
the command line. A model brings its own config, table, forward and backward. NumPy and the standard library only.

The golden files are safetensors with these tensors (L layers; names and shapes are those of the files on disk;
__metadata__["config"] is a JSON object with every number of the run):
    inputs, targets     I32 (steps, leaves, B, T)   a negative target is not counted
    param.<name>        start values
    act.<name>          step 0, leaf 0, every activation: (L, B, T, ...) in layers, (B, T, ...) outside
    grad.<name>         step 0, after the sum over leaves and before the clip
    loss, norm, lr      F32 (steps), and other numbers of an update that the model has, (steps, ...)
    step1.<name>, step10.<name>   parameters after 1 and 10 updates
"""
import argparse
import json
import math
import os
from dataclasses import asdict, dataclass, fields
from types import SimpleNamespace
from typing import Callable

import numpy as np

import exact
from exact import F4, chain_sum, tree_sum

HERE = os.path.dirname(os.path.abspath(__file__))


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of a run; a model's Config is derived from it."""
    batch: int                 # B, rows of one micro-batch (leaf)
    seq_len: int               # T
    leaves: int = 1            # micro-batches of one update
    steps: int = 10
    lr: float = 1e-3           # peak
    schedule: str = "constant"
    warmup: int = 0
    final_lr: float = 0.0      # fraction of the peak
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_all: bool = False    # also decay what the table does not
    clip: float = 0.0          # 0: no clipping


def metadata(cfg):
    """All numbers of a Config, the model's before the run's."""
    values = asdict(cfg)
    run = {field.name: values.pop(field.name) for field in fields(Run)}
    return {**values, **run}


@dataclass(frozen=True)
class Row:
    """One tensor of a model, all layers in one array."""
    name: str
    shape: tuple               # (L, ...) when there is one per layer
    kind: str                  # decides the start values, the decay and the form on disk
    disk: str                  # name on disk, {} for the layer
    parts: tuple = ("",)       # ends of that name: on disk a layer's tensor is cut into so many, along its leading axes
    layers: tuple = ()         # numbers of the layers that have one, where others have none

    @property
    def numbers(self):
        """What stands for {} in the name, for each of the leading axis"""
        return (self.layers or tuple(range(self.shape[0]))) if "{}" in self.disk else (0,)

    @property
    def is_decayed(self):
        return self.kind in ("embedding", "linear")

    def cut(self, x):
        """One layer's tensor, or the only one, as its parts on disk"""
        return [x] if len(self.parts) == 1 else x.reshape(len(self.parts), -1, x.shape[-1])

    def join(self, parts):
        """The inverse of cut"""
        shape = self.shape[1:] if "{}" in self.disk else self.shape
        return parts[0] if len(parts) == 1 else np.stack(parts).reshape(shape)


def layer_rows(table, l):
    """The rows that layer l has, and its place in each"""
    return [(row, row.numbers.index(l)) for row in table if "{}" in row.disk and l in row.numbers]


def as_it_is(row, x, cfg):
    """The form on disk of a model whose tensors lie in memory as Hugging Face has them; the inverse too"""
    return x


def plain_numbers(acts, count, cfg):
    return {"loss": loss_of([leaf["losses"] for leaf in acts], count)}


@dataclass(frozen=True)
class Model:
    """An architecture, as the functions below need it."""
    table: Callable            # cfg -> rows, in the order in which the gradient norm adds them
    forward: Callable          # p, inputs, targets, cfg -> activations, those of the layers in acts["blocks"][l]
    backward: Callable         # p, activations, inputs, targets, count, cfg -> gradients
    read_config: Callable      # config.json as a dict, where it is, B, T -> cfg
    metadata: Callable = metadata
    to_file: Callable = as_it_is    # row, one layer's tensor, cfg -> its form on disk
    from_file: Callable = as_it_is  # the inverse
    at: Callable = lambda cfg, step, leaf: cfg  # what a leaf of an update sees of cfg
    numbers: Callable = plain_numbers  # activations of the leaves, count, cfg -> loss of the update and other numbers
    after_update: Callable = lambda p, numbers, cfg: p  # parameters that change by another rule than AdamW
    fit: Callable = lambda cfg, tensors: (cfg, tensors)  # what a file's tensors say that config.json does not
    count: Callable = lambda inputs, targets, cfg: int((targets >= 0).sum())  # counted targets of an update
    losses: tuple = ("loss",)  # of `numbers`, what a probe has; one that is not there is the same as "loss"
    other_losses: tuple = ()   # ... and what it has where they are there
    choices: Callable = lambda acts, cfg: {}  # what layers choose, as a probe has it


# ---------------------------------------------------------------------------------------------------------------------
# Parameters on disk.
# ---------------------------------------------------------------------------------------------------------------------
def to_disk(model, p, cfg):
    """Our tensors by their names on disk, one per layer."""
    out = {}
    for row in model.table(cfg):
        layers = p[row.name] if "{}" in row.disk else [p[row.name]]
        for l, layer in zip(row.numbers, layers):
            named = zip(row.parts, row.cut(layer))
            out.update({row.disk.format(l) + part: model.to_file(row, x, cfg) for part, x in named})
    return out


def from_disk(model, tensors, cfg):
    """The inverse of to_disk."""
    p = {}
    for row in model.table(cfg):
        layers = [row.join([model.from_file(row, tensors[row.disk.format(l) + part], cfg) for part in row.parts])
                  for l in row.numbers]
        p[row.name] = np.stack(layers) if "{}" in row.disk else np.array(layers[0])
        if p[row.name].shape != row.shape:
            raise SystemExit(f"{row.disk}: expected {row.shape} in all layers, found {p[row.name].shape}")
    return p


def draw_parameters(table, matrix_spread, vector_spread):
    """Start values from one xorshift* stream, tensors in order: spread * (u - 1/2), plus 1 for gains."""
    stream, p = exact.Xorshift(1337), {}
    for row in table:
        noise = stream.floats(math.prod(row.shape)).reshape(row.shape) - F4(0.5)
        noise = noise * F4(matrix_spread if row.is_decayed else vector_spread)
        p[row.name] = F4(1) + noise if row.kind == "gain" else noise
    return p


# ---------------------------------------------------------------------------------------------------------------------
# Updates.
# ---------------------------------------------------------------------------------------------------------------------
def loss_of(losses, count):
    """Mean loss of an update from the (B, T) losses of its leaves."""
    return tree_sum([chain_sum(leaf.reshape(-1)) for leaf in losses]) / losses[0].dtype.type(count)


def total(cross_entropy, more):
    """The loss that is trained: others are added up first"""
    return cross_entropy + sum(more[1:], more[0]) if more else cross_entropy


def train(model, cfg, p, inputs, targets, bias_corrections=exact.bias_corrections):
    """Yields one record per update. inputs, targets (steps, leaves, B, T)"""
    m = {name: np.zeros_like(x) for name, x in p.items()}
    v = {name: np.zeros_like(x) for name, x in p.items()}
    for step in range(cfg.steps):
        count = model.count(inputs[step], targets[step], cfg)
        acts, grads = [], []
        for leaf, (leaf_inputs, leaf_targets) in enumerate(zip(inputs[step], targets[step])):
            leaf_cfg = model.at(cfg, step, leaf)
            acts.append(model.forward(p, leaf_inputs, leaf_targets, leaf_cfg))
            grads.append(model.backward(p, acts[-1], leaf_inputs, leaf_targets, count, leaf_cfg))
        g = {name: tree_sum([leaf[name] for leaf in grads]) for name in p}
        norm = exact.global_norm(g.values())
        scale = exact.clip_scale(norm, cfg.clip)
        lr = exact.learning_rate(cfg.schedule, step, cfg.steps, cfg.lr, cfg.warmup, cfg.final_lr)
        corrections = bias_corrections(cfg.beta1, cfg.beta2, step + 1)
        p = dict(p)
        for row in model.table(cfg):
            name, decay = row.name, cfg.weight_decay if row.is_decayed or cfg.decay_all else 0.0
            p[name], m[name], v[name] = exact.adamw(p[name], g[name] * scale, m[name], v[name], lr, cfg.beta1,
                                                    cfg.beta2, cfg.eps, decay, corrections)
        numbers = model.numbers(acts, count, cfg)
        p = model.after_update(p, numbers, cfg)
        yield SimpleNamespace(step=step, acts=acts[0], grads=g, loss=numbers["loss"], norm=norm, lr=lr, params=p,
                              numbers=numbers)


# ---------------------------------------------------------------------------------------------------------------------
# Golden files.
# ---------------------------------------------------------------------------------------------------------------------
def draw_data(cfg):
    """inputs, targets (steps, leaves, B, T): each leaf draws B*T + 1 tokens, a target is the token after its input."""
    N = cfg.batch * cfg.seq_len
    stream = exact.Xorshift(42)
    tokens = np.array([stream.u32() % cfg.vocab_size for _ in range(cfg.steps * cfg.leaves * (N + 1))], np.int32)
    tokens = tokens.reshape(cfg.steps, cfg.leaves, N + 1)
    shape = (cfg.steps, cfg.leaves, cfg.batch, cfg.seq_len)
    return tokens[..., :-1].reshape(shape).copy(), tokens[..., 1:].reshape(shape).copy()  # copies: targets change later


def ignore_targets(targets):
    """About a ninth of the targets, in place: those are not counted."""
    stream = exact.Xorshift(7)
    for i in np.ndindex(targets.shape):
        targets[i] = -100 if stream.u32() % 9 == 0 else targets[i]


def named_activations(acts, V):
    """The activations as act.<name>, those of the layers stacked, rows of the vocabulary without their padding."""
    out = {}
    for name, value in acts.items():
        if name == "blocks":
            keys = dict.fromkeys(key for a in value for key in a)  # some have only some layers
            out.update({f"act.{key}": np.stack([a[key] for a in value if key in a]) for key in keys})
        else:
            out[f"act.{name}"] = value[..., :V] if name in ("logits", "probs") else value
    return out


def golden_tensors(model, cfg, p, inputs, targets):
    def named(prefix, tensors):
        return {f"{prefix}.{name}": x for name, x in to_disk(model, tensors, cfg).items()}
    records = list(train(model, cfg, p, inputs, targets))
    out = {"inputs": inputs, "targets": targets, **named("param", p)}
    out.update(named_activations(records[0].acts, cfg.vocab_size))
    out.update(named("grad", records[0].grads))
    out.update({key: np.array([getattr(r, key) for r in records], F4) for key in ("loss", "norm", "lr")})
    out.update({key: np.stack([r.numbers[key] for r in records]) for key in records[0].numbers if key != "loss"})
    out.update(named("step1", records[0].params))
    out.update(named("step10", records[9].params))
    return out


def write_golden(folder, name, model, cfg, p, inputs, targets):
    write_file(folder, name, golden_tensors(model, cfg, p, inputs, targets), model.metadata(cfg))


def write_file(folder, name, tensors, config):
    path = os.path.join(folder, name + ".safetensors")
    exact.write_safetensors(path, tensors, config)
    print(f"{path}  {len(tensors)} tensors, {os.path.getsize(path)} bytes")


# ---------------------------------------------------------------------------------------------------------------------
# Probe: one batch, everything visible (the same options as the trainers').
# ---------------------------------------------------------------------------------------------------------------------
def probe(model, folder, batch_path, out_path):
    config_path = os.path.join(folder, "config.json")
    with open(config_path) as file:
        hf = json.load(file)
    batch = exact.read_safetensors(batch_path)
    inputs, targets = batch["inputs"], batch["targets"]
    cfg = model.read_config(hf, config_path, *inputs.shape)
    cfg, tensors = model.fit(cfg, exact.read_safetensors(os.path.join(folder, "model.safetensors")))
    write_probe(model, cfg, from_disk(model, tensors, cfg), inputs, targets, out_path)


def write_probe(model, cfg, p, inputs, targets, out_path):
    count = model.count(inputs, targets, cfg)
    acts = model.forward(p, inputs, targets, cfg)
    grads = model.backward(p, acts, inputs, targets, count, cfg)
    out = {name: acts[name][..., :cfg.vocab_size] for name in ("logits", "cosines") if name in acts}
    numbers = model.numbers([acts], count, cfg)
    out.update({name: numbers.get(name, numbers["loss"]).reshape(1) for name in model.losses})
    out.update({name: numbers[name].reshape(-1) for name in model.other_losses if name in numbers})
    out.update({f"choice.{name}": x for name, x in model.choices(acts, cfg).items()})
    out.update({f"grad.{name}": x for name, x in to_disk(model, grads, cfg).items()})
    exact.write_safetensors(out_path, out, model.metadata(cfg))


def main(model, title, promises, golden, mode=None):
    """The command line. promises() and golden(folder) are the model's; mode is one more (option, help, function)."""
    parser = argparse.ArgumentParser(description=f"{title} in NumPy; without options it writes the golden files.")
    parser.add_argument("--out", metavar="DIR", default=os.path.join(HERE, "..", "golden"), help="for the golden files")
    if mode:
        parser.add_argument(mode[0], action="store_const", const=mode[2], dest="mode", help=mode[1])
    parser.add_argument("--from", metavar="DIR", dest="folder", help="Hugging Face folder for --probe")
    parser.add_argument("--probe", metavar="IN", help="safetensors file with inputs and targets, I32 (B, T)")
    parser.add_argument("--probe-out", metavar="OUT", help="file for logits, loss and gradients")
    args = parser.parse_args()
    if args.probe:
        if not args.folder or not args.probe_out:
            parser.error("--probe needs --from and --probe-out")
        probe(model, args.folder, args.probe, args.probe_out)
        return 0
    if mode and args.mode:
        return args.mode()
    if exact.report(exact.self_check() + promises()):
        return 1
    os.makedirs(args.out, exist_ok=True)
    golden(os.path.normpath(args.out))
    return 0
