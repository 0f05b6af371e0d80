"""
LoRA in NumPy, for the models of qwen.py: the reference that adapters of train_qwen3 must equal bit for bit. NumPy and
the standard library only.

Hu et al. 2021, "LoRA", arXiv:2106.09685: a linear layer y = W x becomes y = W x + s B A x, where only A (r, in) and B
(out, r) learn; s = alpha / r, with rslora alpha / sqrt(r), divided in float64 and rounded once. Files and their meaning
are PEFT's: adapter_model.safetensors and adapter_config.json.

    python dev/ref/lora.py [--out DIR]     check the reference, then write the golden files (default: dev/golden)
    python dev/ref/lora.py --from DIR --lora DIR --probe IN --probe-out OUT [--act-fp8]
                                           logits, loss and gradients of A and B of one batch, named as in the file.
                                           --act-fp8: products read their inputs in fp8 (fp8_rows.py)
    python dev/ref/lora.py --from DIR --lora DIR --merge DIR
                                           W + s B A in a Hugging Face folder

The golden files have the layout that trainer.py describes, with the adapter as what learns: param, grad, step1 and
step10 have the names of its file. Beside them stand
    base.<name>         the frozen parameters
    merged.<name>       those that have adapters, with the adapter of the start merged
and __metadata__["config"]["lora"], an adapter_config.json. There is no dropout.

What may have an adapter: the modules q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj of a layer, and
of a layer with experts the parameters mlp.experts.gate_up_proj, mlp.experts.down_proj and mlp.gate.weight, the router.
The experts of a layer share two tensors in a file: A (E r, in), row e r + j is rank j of expert e, and B (out, r E),
column j E + e. Here and in the norm they are A (E, r, in) and B (E, out, r). Older files have an A and a B for each
expert and projection. PEFT 0.21 has no adapters of the MLP in layers without experts where others have experts.

How a number comes about: as in qwen.py, and
    forward     u = s * (A x), chains from 0 and then one product; the chain of W x, which began at the bias, goes on
                over j: y = madd(u[j], B[o][j], y). Gate and up are one product; each goes on with its own A and B
    backward    dB: chains over rows of dy * u. du = s * (B^T dy), chains over o from 0 and then one product. dA: chains
                over rows of du * x. dx: the chain of W^T dy goes on over j of du * A; of gate, then of up
    experts     rows are those of the expert. After down_proj a row has the router's weight: dy and du are without it,
                it multiplies u in dB and x in dA
    merge       W + s * (B A): chains over j from 0, one product, one sum
    update      all A's of a row of the table, a part of it and a rank are one tensor, and all B's; all are decayed.
                Order, the norm's: the rows of the table; in each its parts, gate before up; there the ranks by the
                first layer that has them; A before B; in each its layers
"""
import argparse
import json
import math
import os
import re
import sys
from dataclasses import dataclass, replace

import numpy as np

import exact
import qwen
import trainer
from exact import F4, chain_matmul
from ops import Adapter
from trainer import Row

HERE = os.path.dirname(os.path.abspath(__file__))


# ---------------------------------------------------------------------------------------------------------------------
# Places: which linear layers of a model may have an adapter, and under what names.
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """A linear layer, or a part of the outputs of one"""
    path: str                  # of the module, or of the parameter
    row: str                   # of the table of parameters
    layer: int
    is_parameter: bool = False
    part: int = 0              # number of its outputs among so many equal parts
    n_parts: int = 1
    n_experts: int = 0         # 0: one weight
    is_cut: bool = False       # on disk each expert has an A and a B
    key: str = ""              # path in the file
    rank: int = 0
    scale: float = 0.0


def all_places(cfg):
    """In the order of the table, the parts of a row, its layers"""
    modules = {"q_proj": ["self_attn.q_proj"], "k_proj": ["self_attn.k_proj"], "v_proj": ["self_attn.v_proj"],
               "o_proj": ["self_attn.o_proj"], "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"]}
    parameters = {"router": "mlp.gate.weight", "expert_gate_up": "mlp.experts.gate_up_proj",
                  "expert_down": "mlp.experts.down_proj"}
    out = []
    for row in qwen.parameter_table(cfg):
        paths = modules.get(row.name, [parameters.get(row.name)])
        n_experts = cfg.num_experts if row.name.startswith("expert_") else 0
        out += [Place(f"model.layers.{l}.{path}", row.name, l, row.name in parameters, part, len(paths), n_experts)
                for part, path in enumerate(paths) if path for l in row.numbers]
    return out


def in_order(cfg, places):
    """As all_places has them"""
    rows = [row.name for row in qwen.parameter_table(cfg)]
    return sorted(places, key=lambda place: (rows.index(place.row), place.part, place.layer))


def cut_places(place):
    """Those of the same outputs where each expert has matrices of its own"""
    module = place.path.rpartition(".")[0]
    names = ("gate_proj", "up_proj") if place.row == "expert_gate_up" else ("down_proj",)
    return [replace(place, path=f"{module}.{{}}.{name}", key=f"{module}.{{}}.{name}", is_cut=True, part=part,
                    n_parts=len(names)) for part, name in enumerate(names)]


def with_keys(places):
    """Modules have their path in the file. Parameters have that of their module, in PEFT the outer of two wrappers is
    down_proj's: gate_up_proj of the same layer is then inside."""
    paths, out = {place.path for place in places}, []
    for place in places:
        module, _, name = place.path.rpartition(".")
        is_inside = name == "gate_up_proj" and f"{module}.down_proj" in paths
        parameter_key = module + ".base_layer" if is_inside else module
        out.append(replace(place, key=place.key or (parameter_key if place.is_parameter else place.path)))
    return out


def with_ranks(places, settings):
    """r and alpha of a place: of the first pattern that its path ends with, else those of all"""
    def of(patterns, path, default):
        matches = (value for key, value in (patterns or {}).items() if re.fullmatch(rf"(.*\.)?({key})", path))
        return next(matches, default)
    out = []
    for place in places:
        path = place.path.format(0)
        rank = of(settings.get("rank_pattern"), path, settings["r"])
        alpha = of(settings.get("alpha_pattern"), path, settings["lora_alpha"])
        out.append(replace(place, rank=rank, scale=alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)))
    return out


def chosen_places(cfg, settings):
    """Where an adapter_config.json wants a new adapter: target_modules is a list of ends of paths, a regular expression
    or all-linear, target_parameters a list of ends. all-linear leaves out what PEFT cannot load: the MLP in layers
    without experts where others have experts."""
    def is_wanted(place):
        wanted = settings.get("target_parameters" if place.is_parameter else "target_modules") or []
        if isinstance(wanted, str):
            is_lost = cfg.moe_layers and place.row in ("gate_up", "down")
            return not is_lost if wanted == "all-linear" else bool(re.fullmatch(wanted, place.path))
        return any(("." + place.path).endswith("." + end) for end in wanted)
    return with_ranks(with_keys([place for place in all_places(cfg) if is_wanted(place)]), settings)


KNOWN = {"peft_type", "task_type", "base_model_name_or_path", "revision", "r", "lora_alpha", "inference_mode",
         "init_lora_weights", "use_rslora", "target_modules", "target_parameters", "layers_to_transform",
         "layers_pattern", "rank_pattern", "alpha_pattern", "auto_mapping", "exclude_modules", "megatron_core",
         "peft_version", "qalora_group_size", "lora_dropout"}


def refuse_others(settings):
    """Another method, and any setting that changes what A and B mean, which is one that is unknown and not empty"""
    other = [key for key, value in settings.items() if key not in KNOWN and value not in (None, False, [], {}, "none")]
    if settings.get("peft_type") != "LORA" or other:
        raise SystemExit(f"adapter_config.json: expected LORA without {', '.join(other) or 'another peft_type'}")


def places_of_file(cfg, settings, tensors):
    """Where a file has adapters: its keys say it, and target_parameters where a module of experts has one only."""
    refuse_others(settings)
    end, wanted, found = ".lora_A.weight", settings.get("target_parameters") or [], []
    keys = {name.removeprefix(PREFIX).removesuffix(end) for name in tensors if name.endswith(end)}
    for place in all_places(cfg):
        module, _, name = place.path.rpartition(".")
        if place.n_experts and module not in keys:
            found += [cut for cut in cut_places(place) if cut.key.format(0) in keys]
        elif place.n_experts and module + ".base_layer" not in keys:
            found += [place] if any(path.endswith(name) for path in wanted) else []
        elif (module if place.is_parameter else place.path) in keys:
            found.append(place)
    places = with_ranks(with_keys(in_order(cfg, found)), settings)
    names = {name for row in adapter_table(cfg, places) for name in names_of(row)}
    if names != set(tensors):
        raise SystemExit(f"adapter: {min(names ^ set(tensors))} stands in its file or in its config only")
    return places


# ---------------------------------------------------------------------------------------------------------------------
# The table of an adapter's tensors, and the files.
# ---------------------------------------------------------------------------------------------------------------------
PREFIX = "base_model.model."


def stacks(places):
    """The places whose A's, and B's, lie in one tensor: those of a row, a part, a rank and a form in the file"""
    out = {}
    for place in places:
        name = place.path.replace(f"layers.{place.layer}.", "layers.*.", 1)
        key = place.key.replace(f"layers.{place.layer}.", "layers.{}.", 1)
        out.setdefault((name, place.rank, key), []).append(place)
    return {f"{name} r={rank} in {key}": stack for (name, rank, key), stack in out.items()}


def adapter_table(cfg, places):
    """A and B of each stack, in their order"""
    shapes, out = {row.name: row.shape for row in qwen.parameter_table(cfg)}, []
    for name, stack in stacks(places).items():
        place, layers = stack[0], tuple(place.layer for place in stack)
        n_out, n_in = shapes[place.row][-2:]
        experts, key = (place.n_experts,) if place.n_experts else (), name.rpartition(" in ")[2]
        for end, shape in (("lora_A", (place.rank, n_in)), ("lora_B", (n_out // place.n_parts, place.rank))):
            disk, parts = PREFIX + key + f".{end}.weight", ("",)
            if place.is_cut:
                disk, _, part = disk.rpartition("{}")
                parts = tuple(f"{e}{part}" for e in range(place.n_experts))
            out.append(Row(f"{name}.{end}", (len(stack), *experts, *shape), "linear", disk, parts, layers))
    return out


def names_of(row):
    return [row.disk.format(l) + part for l in row.numbers for part in row.parts]


def to_file(row, x, cfg):
    """One tensor as PEFT has it: experts side by side, rows of A by (expert, rank), columns of B by (rank, expert)"""
    if x.ndim == 2:
        return x
    return x.reshape(-1, x.shape[-1]) if row.name.endswith("lora_A") else x.transpose(1, 2, 0).reshape(x.shape[1], -1)


def from_file(row, x, cfg):
    """The inverse of to_file"""
    if len(row.shape) == 3 or len(row.parts) > 1:
        return x
    E, rows, columns = row.shape[1:]
    is_A = row.name.endswith("lora_A")
    return x.reshape(E, rows, columns) if is_A else x.reshape(rows, columns, E).transpose(2, 0, 1)


def adapters_of(places, p):
    """The adapters of each layer, as qwen.py takes them"""
    out = {}
    for name, stack in stacks(places).items():
        for place, A, B in zip(stack, p[name + ".lora_A"], p[name + ".lora_B"]):
            n = B.shape[-2]
            adapter = Adapter(place.path, slice(place.part * n, (place.part + 1) * n), A, B, place.scale)
            out.setdefault((place.row, place.layer), []).append(adapter)
    return out


def stacked(places, g):
    """The gradients of each place as those of the stacks"""
    return {name + end: np.stack([g[place.path + end] for place in stack])
            for name, stack in stacks(places).items() for end in (".lora_A", ".lora_B")}


def model_of(base, places, settings):
    """What learns is the adapter; base are the parameters of qwen.py."""
    def forward(p, inputs, targets, cfg):
        return qwen.forward(base, inputs, targets, cfg, adapters_of(places, p))

    def backward(p, acts, inputs, targets, count, cfg):
        return stacked(places, qwen.backward(base, acts, inputs, targets, count, cfg, adapters_of(places, p)))
    return trainer.Model(lambda cfg: adapter_table(cfg, places), forward, backward, qwen.read_config,
                         lambda cfg: {**qwen.metadata(cfg), "lora": settings}, to_file, from_file, numbers=qwen.numbers,
                         losses=qwen.LOSSES)


def load(folder, cfg, base):
    """The adapter of a folder of PEFT's: its model, and its parameters"""
    with open(os.path.join(folder, "adapter_config.json")) as file:
        settings = json.load(file)
    tensors = exact.read_safetensors(os.path.join(folder, "adapter_model.safetensors"))
    places = places_of_file(cfg, settings, tensors)
    model = model_of(base, places, settings)
    return model, places, trainer.from_disk(model, tensors, cfg)


def save(folder, model, cfg, p):
    """The inverse of load"""
    os.makedirs(folder, exist_ok=True)
    settings = model.metadata(cfg)["lora"]
    with open(os.path.join(folder, "adapter_config.json"), "w") as file:
        json.dump(settings, file, indent=2)
    exact.write_safetensors(os.path.join(folder, "adapter_model.safetensors"), trainer.to_disk(model, p, cfg), settings)


def merged_weight(w, a):
    product = chain_matmul(np.zeros_like(w), a.B, a.A)
    return w + product * w.dtype.type(a.scale)


def merge(cfg, base, places, p):
    """The base's parameters with the adapter in them"""
    out = {name: x.copy() for name, x in base.items()}
    for (name, l), adapters in adapters_of(places, p).items():
        w = out[name][next(row for row in qwen.parameter_table(cfg) if row.name == name).numbers.index(l)]
        for a in adapters:
            w[..., a.outputs, :] = merged_weight(w[..., a.outputs, :], a)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The golden runs: an adapter on all seven linear layers of a layer, with biases, a window, several ranks and scales;
# one on attention, experts and router, with rslora, the balance in the loss and a layer without experts.
# ---------------------------------------------------------------------------------------------------------------------
DENSE = {**qwen.WINDOW, "num_hidden_layers": 2}
MOE = {**qwen.MOE, "num_hidden_layers": 2, "mlp_only_layers": [0], "attention_bias": True, "norm_topk_prob": False,
       "num_experts_per_tok": 2}
SHARED = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_dropout": 0.0, "bias": "none"}
ALL_SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_DENSE = {**SHARED, "r": 4, "lora_alpha": 6, "target_modules": ALL_SEVEN, "alpha_pattern": {"v_proj": 1},
              "rank_pattern": {"up_proj": 3, r"layers\.1\.self_attn\.[qk]_proj": 5}}
LORA_MOE = {**SHARED, "r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": r".*\.self_attn\.[qo]_proj",
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
            "rank_pattern": {"mlp.experts.down_proj": 2}, "alpha_pattern": {"mlp.experts.gate_up_proj": 7}}


def draw_adapter(cfg, places, spread):
    """Start values from one xorshift* stream, tensors in order: spread * (u - 1/2), of B, too"""
    stream, p = exact.Xorshift(4242), {}
    for row in adapter_table(cfg, places):
        p[row.name] = (stream.floats(math.prod(row.shape)).reshape(row.shape) - F4(0.5)) * F4(spread)
    return p


def golden_run(hf, settings, T):
    """Config, base, places, adapter, batches"""
    cfg = replace(qwen.read_config(hf, "lora.py", 2, T), leaves=2, lr=5e-3, schedule="linear", warmup=2, clip=1.0,
                  weight_decay=0.02)
    inputs, targets = trainer.draw_data(cfg)
    trainer.ignore_targets(targets)
    base = trainer.draw_parameters(qwen.parameter_table(cfg), matrix_spread=1.0, vector_spread=0.5)
    places = chosen_places(cfg, settings)
    return cfg, base, places, draw_adapter(cfg, places, 0.5), inputs, targets


RUNS = {"qwen_lora": (DENSE, LORA_DENSE, 8), "qwen_lora_moe": (MOE, LORA_MOE, 6)}


def write_golden(folder):
    for name, (hf, settings, T) in RUNS.items():
        cfg, base, places, p, inputs, targets = golden_run(hf, settings, T)
        model = model_of(base, places, settings)
        on_disk, merged = (trainer.to_disk(qwen.MODEL, x, cfg) for x in (base, merge(cfg, base, places, p)))
        tensors = {f"base.{key}": x for key, x in on_disk.items()}
        tensors.update(trainer.golden_tensors(model, cfg, p, inputs, targets))
        tensors.update({f"merged.{key}": x for key, x in merged.items() if x.tobytes() != on_disk[key].tobytes()})
        trainer.write_file(folder, name, tensors, model.metadata(cfg))


# ---------------------------------------------------------------------------------------------------------------------
# The command line.
# ---------------------------------------------------------------------------------------------------------------------
def probe_or_merge(args):
    batch = exact.read_safetensors(args.probe) if args.probe else {"inputs": np.zeros((1, 1), np.int32)}
    cfg, base = qwen.load(args.folder, *batch["inputs"].shape)
    cfg = replace(cfg, act_fp8=args.act_fp8)
    model, places, p = load(args.lora, cfg, base)
    if args.merge:
        qwen.save(args.merge, cfg, merge(cfg, base, places, p))
    if args.probe:
        trainer.write_probe(model, cfg, p, batch["inputs"], batch["targets"], args.probe_out)
    return 0


def main():
    parser = argparse.ArgumentParser(description="LoRA in NumPy; without options it writes the golden files.")
    parser.add_argument("--out", metavar="DIR", default=os.path.join(HERE, "..", "golden"), help="for the golden files")
    parser.add_argument("--from", metavar="DIR", dest="folder", help="Hugging Face folder")
    parser.add_argument("--lora", metavar="DIR", help="folder of an adapter")
    parser.add_argument("--probe", metavar="IN", help="safetensors file with inputs and targets, I32 (B, T)")
    parser.add_argument("--probe-out", metavar="OUT", help="file for logits, loss and gradients")
    parser.add_argument("--merge", metavar="DIR", help="folder for the merged model")
    parser.add_argument("--act-fp8", action="store_true", help="round what products read to fp8")
    args = parser.parse_args()
    if args.probe or args.merge:
        if not args.folder or not args.lora or bool(args.probe) != bool(args.probe_out):
            parser.error("--probe and --merge need --from and --lora, --probe needs --probe-out")
        return probe_or_merge(args)
    import qwen_checks
    if exact.report(exact.self_check() + qwen_checks.lora_promises()):
        return 1
    os.makedirs(args.out, exist_ok=True)
    write_golden(os.path.normpath(args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
