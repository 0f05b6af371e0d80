"""
Holds a program against Hugging Face transformers: bit-exactness says that our programs compute the same thing, this says
that it is the right thing. --model gpt2 (default), mamba, moe, qwen, qwen36, deepseek_v4 or glm5; what
differs is in hf_models.py.

    python dev/ref/check_hf.py                             the NumPy reference, dev/ref/gpt2.py
    python dev/ref/check_hf.py --probe-with ./train_gpt2   a trainer, run with --from DIR --probe IN --probe-out OUT
    python dev/ref/check_hf.py --files-with ./train_gpt2   its files: every folder it writes loads in transformers, every
                                                           form of folder that transformers writes loads in it, and
                                                           AutoTokenizer and AutoModelForCausalLM write the text of
                                                           --generate, byte by byte tokens and BPE (hf_text.py)
    python dev/ref/check_hf.py --from DIR --probe IN --probe-out OUT       one probe output that exists already

The truth is the model of transformers in float64. The first two modes make tiny models with awkward sizes, gains that are
not 1, biases that are not 0 and some targets that are not counted. The error is |x - truth| / |truth| in the L2 norm of
each tensor; one line per class of tensors (layers.* is any layer) gives the worst over configs and layers. Where layers
choose, the choices of a probe are compared, too, and the smallest gap between scores is shown; of models in which a gap
is less than the error of a float a trainer takes transformers' choices (--inject).
--files-with compares logits: those of --probe on a folder with those of transformers on the same folder, in float64.
Needs torch and transformers; without them it says "skipped" and exits with 0.
"""
import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import namedtuple
from functools import partial
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
os.environ["HF_HUB_OFFLINE"] = "1"  # everything is made here; nothing is downloaded

try:
    import torch
    from safetensors.torch import load_file, save_file
    from hf_models import MODELS
    from hf_text import check_heads, check_text, check_tuned
except ImportError as error:
    print(f"skipped: {error}")
    raise SystemExit(0)

Limits = namedtuple("Limits", "logits loss cross_entropy grad")
REFERENCE_LIMITS = Limits(1e-5, 1e-5, 1e-5, 1e-4)
PROBE_LIMITS = Limits(2e-5, 2e-5, 2e-5, 2e-5)

def make_batch(case):
    """inputs, targets (B, T) int32; about a fifth of the targets is negative, never all of them"""
    inputs = torch.randint(case.V, (case.B, case.T), dtype=torch.int32)
    targets = torch.randint(case.V, (case.B, case.T), dtype=torch.int32)
    targets[torch.rand(case.B, case.T) < 0.2] = -100
    targets[0, 0] = -1
    targets[-1, -1] = case.V - 1
    return inputs, targets


def truth_of(kind, model, inputs, targets):
    """What a probe output must hold, in float64."""
    model.zero_grad()
    logits = kind.logits(model, inputs)
    labels = targets.long().clamp(min=-1).reshape(-1)
    cross_entropy = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels, ignore_index=-1)
    loss = cross_entropy + kind.more_loss(model)
    loss.backward()
    losses = (loss, cross_entropy)
    out = {"logits": logits.detach(), **{name: x.detach().reshape(1) for name, x in zip(kind.LOSSES, losses)}}
    out.update({f"grad.{name}": gradient for name, gradient in kind.tensors(model, lambda p: p.grad).items()})
    choices, model.gap = kind.choices(model, inputs)
    return {**out, **choices}


def relative_error(x, truth):
    difference = (x.double() - truth).norm()
    return (difference / truth.norm()).item() if truth.norm() > 0 else difference.item()


def tensor_class(name):
    """grad.transformer.h.3.ln_1.bias -> grad.transformer.h.*.ln_1.bias"""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


class Table:
    """Worst error of each class of tensors, and what is wrong with it otherwise."""

    def __init__(self, limits):
        self.limits, self.worst, self.faults, self.by_case = limits, {}, {}, {}

    def fault(self, name, text):
        self.worst.setdefault(tensor_class(name), 0.0)
        self.faults.setdefault(tensor_class(name), text)

    def compare(self, found, truth, case=None, gap=None):
        """case: a name by which a line has its worst errors, and the smallest gap, or None"""
        of_case = self.by_case.setdefault(case, {})
        if gap is not None:
            of_case["gap"] = min(of_case.get("gap", gap), gap)
        for name in truth.keys() | found.keys():
            if name not in found:
                self.fault(name, f"{name} is missing")
            elif name not in truth:
                self.fault(name, f"{name} is not a tensor of the model")
            elif found[name].shape != truth[name].shape or found[name].dtype != torch.float32:
                self.fault(name, f"{name} is {found[name].dtype} {tuple(found[name].shape)}, expected float32 "
                                 f"{tuple(truth[name].shape)}")
            else:
                error = relative_error(found[name], truth[name])
                if not error < float("inf"):
                    self.fault(name, f"{name} is not finite")
                for worst, key in ((self.worst, tensor_class(name)), (of_case, name.split(".")[0])):
                    worst[key] = max(worst.get(key, 0.0), error)

    def report(self):
        """Print a line per class; return the exit status."""
        failed = 0
        for name in sorted(self.worst, key=lambda key: (key.startswith("grad."), key)):
            error, limit = self.worst[name], getattr(self.limits, name.split(".")[0], 0.0)
            fault = self.faults.get(name, "" if error <= limit else "too large")
            failed += bool(fault)
            print(f"{'FAIL' if fault else 'ok  '} {name:<44} worst {error:.1e}  limit {limit:.0e}  {fault}".rstrip())
        for case, worst in self.by_case.items():
            if case is not None:
                print(f"     {case}: " + ", ".join(f"{name} {error:.1e}" for name, error in sorted(worst.items())))
        print(f"{len(self.worst) - failed} passed, {failed} failed")
        return int(failed > 0 or not self.worst)


def check_program(kind, program, limits, near=()):
    """Run the program on every case; in those that are near it takes transformers' choices, by --inject"""
    table = Table(limits)
    for number, case in enumerate([*kind.CASES, *near]):
        torch.manual_seed(number)
        model, (inputs, targets) = kind.make_model(case), make_batch(case)
        with tempfile.TemporaryDirectory() as folder:
            model_path, batch_path, out_path = (os.path.join(folder, x) for x in ("model", "in.safetensors",
                                                                                  "out.safetensors"))
            model.save_pretrained(model_path)
            save_file({"inputs": inputs, "targets": targets}, batch_path)
            truth, options = truth_of(kind, model, inputs, targets), []
            if case in near:
                options = ["--inject", os.path.join(folder, "choices")]
                save_file({name: x.int() for name, x in truth.items() if name.startswith("choice.")}, options[1])
            run = subprocess.run([*program, "--from", model_path, "--probe", batch_path, "--probe-out", out_path, *options],
                                 capture_output=True, text=True)
            if run.returncode != 0 or not os.path.exists(out_path):
                print(f"{case}: exit status {run.returncode}\n{run.stdout}{run.stderr}".rstrip())
                table.fault("logits", "the program failed")
                continue
            name = getattr(case, "name", None)
            table.compare(kind.one_by_one(load_file(out_path)), truth, f"{name}, choices given" if options else name,
                          model.gap)
    return table.report()


class Files:
    """A trainer's files against transformers, in both directions. Each promise is one line; worst() is its error."""

    def __init__(self, kind, program, folder):
        self.kind, self.program, self.folder, self.n_passed, self.n_failed = kind, program, folder, 0, 0

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def run(self, *options):
        run = subprocess.run([*self.program, *options], capture_output=True, cwd=self.folder)
        if run.returncode != 0:
            raise RuntimeError(f"status {run.returncode}: {' '.join(options)}: {run.stderr.decode().strip()}")
        return run

    def promise(self, name, error, limit):
        good = error <= limit
        self.n_passed, self.n_failed = self.n_passed + good, self.n_failed + (not good)
        print(f"{'ok  ' if good else 'FAIL'} {name:<66} worst {error:.1e}  limit {limit:.0e}")

    def differ(self, one, other, name):
        """0.0: the file has the same bytes in both folders."""
        found, expected = (open(self.path(folder, name), "rb").read() for folder in (one, other))
        return float(found != expected)

    def probe(self, folder):
        """Everything that --probe says about a folder and this case's batch."""
        self.run("--from", folder, "--probe", "in.safetensors", "--probe-out", "out.safetensors")
        return load_file(self.path("out.safetensors"))

    def logits_error(self, folder, inputs):
        """Our logits of a folder against those of transformers, which must find every tensor where it looks for it."""
        model, report = self.kind.load(self.path(folder))
        if report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"]:
            print(f"     {folder}: {report}")
            return float("inf")
        with torch.no_grad():
            truth = self.kind.logits(model, inputs)
        return relative_error(self.probe(folder)["logits"], truth)

    def check_case(self, case):
        """Folders of transformers into the trainer, and its own out of it."""
        model, (inputs, targets) = self.kind.make_model(case), make_batch(case)
        save_file({"inputs": inputs, "targets": targets}, self.path("in.safetensors"))
        model.save_pretrained(self.path("hf"))
        want = self.kind.one_by_one(self.probe("hf"))
        truth = truth_of(self.kind, model, inputs, targets)["logits"]
        errors = {"one file, from transformers": relative_error(want["logits"], truth)}
        model.float()
        model.save_pretrained(self.path("shards"), max_shard_size="5KB")
        for name, folder in [("shards", "shards"), *self.kind.write_variants(self.folder, model)]:
            found = self.kind.one_by_one(self.probe(folder))
            same = found.keys() == want.keys() and all(torch.equal(found[key], want[key]) for key in want)
            errors[f"{name}, from transformers: the same probe"] = 0.0 if same else float("inf")
        for name, folder in self.kind.write_others(self.folder, model):
            errors[f"{name}, from transformers"] = self.logits_error(folder, inputs)
            self.run("--from", folder, "--export-hf", folder + "_exported")
            errors[f"{name}, exported"] = self.logits_error(folder + "_exported", inputs)
        for half in (torch.bfloat16, torch.float16):
            self.kind.halve(model, half).save_pretrained(self.path(str(half)))
            errors[f"{half}, from transformers"] = self.logits_error(str(half), inputs)
        for name, source in (("from floats", "hf"), ("from bf16", "torch.bfloat16")):
            self.run("--from", source, "--export-hf", "half", "--export-dtype", "bf16")
            found, want = (open(self.path(folder, "model.safetensors"), "rb").read() for folder in ("half", "torch.bfloat16"))
            errors[f"exported as bf16, {name}: byte by byte the file of save_pretrained"] = float(found != want)
            with open(self.path("half", "config.json"), encoding="utf-8") as file:
                config = json.load(file)
            dtype = config.get("dtype", config.get("torch_dtype"))  # as newer models have it, and older ones
            errors["exported as bf16: config.json says so"] = float(dtype != "bfloat16")
            errors[f"exported as bf16, {name}"] = self.logits_error("half", inputs)
        self.run("--from", "hf", "--export-hf", "one")
        self.run("--from", "one", "--export-hf", "again")
        self.run("--from", "hf", "--export-hf", "many", "--shard-gb", "0.000004")
        exports = [("exported, one file", "one"), ("exported in shards", "many")]
        if self.kind.HAS_BIN:
            self.run("--from", "many", "--export-bin", "model.bin")
            self.run("--from", "model.bin", "--export-hf", "from_bin")
            exports.append(("exported from a .bin", "from_bin"))
        for name, folder in exports:
            errors[name] = self.logits_error(folder, inputs)
        errors["exported: byte by byte the file of save_pretrained"] = self.differ("hf", "one", "model.safetensors")
        errors["exported again: the same model.safetensors"] = self.differ("one", "again", "model.safetensors")
        errors["exported again: the same config.json"] = self.differ("one", "again", "config.json")
        hf_count = len([name for name in os.listdir(self.path("many")) if name.startswith("model-")])
        errors["exported in shards: more than one"] = float(hf_count < 2)
        return errors

    def check_checkpoint(self):
        """A checkpoint's folder as it is, and the run that holds it."""
        with open(self.path("text.txt"), "w") as file:
            file.write("A line of text to train on, and another one.\n" * 40)
        with open(self.path("config.json"), "w") as file:
            json.dump(self.kind.TINY, file)
        self.run("--config", "config.json", "--train", "text.txt", "--seq-len", "20", "--steps", "3", "--run", "run",
                 "--export-hf", "after")
        batch = make_batch(SimpleNamespace(V=257, B=3, T=20))
        save_file({"inputs": batch[0], "targets": batch[1]}, self.path("in.safetensors"))
        errors = {"a checkpoint's folder": self.logits_error("run/step_000003", batch[0])}
        errors["the export of the same run"] = self.logits_error("after", batch[0])
        return errors


def check_files(kind, program):
    """Every form of folder, every case; a line gives the worst error over the cases."""
    worst = {}
    program[0] = os.path.abspath(program[0])
    with tempfile.TemporaryDirectory() as parent:
        files = Files(kind, program, parent)
        checks = [partial(files.check_case, case) for case in kind.CASES] + [files.check_checkpoint]
        checks += [partial(check_text, files, kind, style) for style in kind.STYLES]
        checks += [partial(check_tuned, files, kind)]
        checks += [partial(check_heads, files, kind)] if kind.HEADS else []
        for number, check in enumerate(checks):
            torch.manual_seed(number)
            files.folder = os.path.join(parent, str(number))
            os.mkdir(files.folder)
            try:
                errors = check()
            except RuntimeError as error:
                errors = {f"case {number}: {error}": float("inf")}
            for name, error in errors.items():
                worst[name] = max(worst.get(name, 0.0), error)
    for name, error in worst.items():
        files.promise(name, error, PROBE_LIMITS.logits if "same probe" not in name and ":" not in name else 0.0)
    print(f"{files.n_passed} passed, {files.n_failed} failed")
    return int(files.n_failed > 0)


def check_output(kind, folder, batch_path, out_path):
    """Compare one probe output with what it should be."""
    model, _ = kind.load(folder)
    batch = load_file(batch_path)
    table = Table(PROBE_LIMITS)
    table.compare(kind.one_by_one(load_file(out_path)), truth_of(kind, model, batch["inputs"], batch["targets"]))
    return table.report()


def main():
    parser = argparse.ArgumentParser(description="Compare a program with Hugging Face transformers.")
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt2")
    parser.add_argument("--probe-with", metavar="PROGRAM", help="a trainer, with its own arguments")
    parser.add_argument("--files-with", metavar="PROGRAM", help="a trainer, to check its files")
    parser.add_argument("--from", metavar="DIR", dest="folder", help="Hugging Face folder of an existing probe")
    parser.add_argument("--probe", metavar="IN", help="its batch")
    parser.add_argument("--probe-out", metavar="OUT", help="its output")
    args = parser.parse_args()
    kind = MODELS[args.model]
    if args.folder or args.probe or args.probe_out:
        if not (args.folder and args.probe and args.probe_out) or args.probe_with:
            parser.error("--from, --probe and --probe-out go together, without --probe-with")
        return check_output(kind, args.folder, args.probe, args.probe_out)
    if args.files_with:
        return check_files(kind, shlex.split(args.files_with))
    if args.probe_with:
        return check_program(kind, shlex.split(args.probe_with), PROBE_LIMITS, kind.NEAR)
    return check_program(kind, [sys.executable, os.path.join(HERE, kind.REFERENCE)], REFERENCE_LIMITS)


if __name__ == "__main__":
    sys.exit(main())
