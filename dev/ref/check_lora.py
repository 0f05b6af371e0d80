"""
Holds adapters of train_qwen3, train_qwen36, train_deepseek_v4 or train_glm5 against PEFT, file by file and number by
number. The reference has been held against PEFT by qwen_checks.py; this is the program that people run, from and to
folders on disk.

    make train_qwen3 train_qwen36 train_deepseek_v4 train_glm5 CPU=1
    python dev/ref/check_lora.py [./train_qwen3]
    python dev/ref/check_lora.py ./train_qwen36
    python dev/ref/check_lora.py ./train_deepseek_v4
    python dev/ref/check_lora.py ./train_glm5

For each adapter of its family below, made by PEFT and random in both matrices:
    logits, loss, grad   --probe with --lora, the folder that PEFT has saved; the truth is PEFT in float64
    merged               --export-hf --merge: every weight as merge_and_unload leaves it in float32, to the bit where
                         the model has no experts; loaded by transformers, PEFT's logits
    exported             --export-lora: the same tensors, and read by PEFT the same logits
For each of `ours`, which the program has begun and trained by options alone: PEFT reads --export-lora and has the logits of
our --probe, the folder of --merge too. Errors are |x - truth| / |truth| in the L2 norm of a tensor, and the worst of
every kind is printed. Needs torch, transformers and peft, without which it says "skipped"; nothing is downloaded.
"""
import copy
import os
import subprocess
import sys
import tempfile
import warnings
from collections import namedtuple
from contextlib import contextmanager

import numpy as np

import deepseek_v4_checks
import exact
import glm5_checks
import glm5_truth
import lora
import qwen
import qwen36_checks
import qwen_checks
import trainer
from qwen_checks import ADAPTERS, BOTH, EXPERT, MODELS, QWEN3, SMALL

LIMIT = 2e-5  # of logits and losses; of gradients see Family
MIXED = MODELS["Qwen3-MoE, layer 0 without experts, balance"]
MORE = {
    "Qwen2, all-linear, rslora": (MODELS["Qwen2, untied, a head for each of k and v"], dict(
        target_modules="all-linear", r=4, lora_alpha=5, use_rslora=True)),
    "Qwen2, windows, q and v": (MODELS["Qwen2, window 5 from layer 1 on"], dict(
        target_modules=["q_proj", "v_proj"], r=8, lora_alpha=16)),
    "Qwen3, biases, all-linear, patterns": (MODELS["Qwen3, untied, one head of k and v, biases"], dict(
        target_modules="all-linear", r=4, lora_alpha=4, rank_pattern={r"layers\.1\..*": 2, "up_proj": 6},
        alpha_pattern={"self_attn.q_proj": 11, r"mlp\.\w+": 2})),
    "Qwen3, windows, layers 0 and 2": (MODELS["Qwen3, windows by layer"], dict(
        target_modules=["k_proj", "gate_proj"], layers_to_transform=[0, 2], r=3, lora_alpha=2)),
    "Mistral, an expression": (MODELS["Mistral, no window"], dict(
        target_modules=r".*layers\.1\..*(up|down|o)_proj", r=5, lora_alpha=10)),
    "Qwen3-MoE, all-linear, as PEFT rewrites it": (EXPERT, dict(target_modules="all-linear", r=2, lora_alpha=3)),
    "Qwen3-MoE, everything, rslora": (MIXED, dict(
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=[*BOTH, "mlp.gate.weight"], r=3,
        lora_alpha=3, use_rslora=True)),
    "Qwen3-MoE, scores as weights": (MODELS["Qwen3-MoE, scores as weights, balance"], dict(
        target_modules=["o_proj"], target_parameters=BOTH, r=4, lora_alpha=2)),
}
OLD = "Qwen3-MoE, matrices of each expert"
OURS = {  # a model, and options
    "begun by us: Qwen2, all-linear": (dict(SMALL, model_type="qwen2", tie_word_embeddings=True), []),
    "begun by us: Qwen3, patterns, rslora": (QWEN3, [
        "--lora-targets", "q_proj,up_proj,down_proj", "--lora-rslora", "1", "--lora-alpha", "5", "--lora-rank-pattern",
        r"layers\.0\..*=2,up_proj=5", "--lora-alpha-pattern", "q_proj=3"]),
    "begun by us: Mistral, an expression": (MODELS["Mistral, window 5"], [
        "--lora-targets", r"model\.layers\.1\..*_proj", "--lora-dropout", "0.2"]),
    "begun by us: Qwen3-MoE, experts and routers": (MIXED, [
        "--lora-targets", "all-linear", "--lora-parameters", ",".join([*BOTH, "mlp.gate.weight"])]),
    "begun by us: Qwen3-MoE, down_proj alone": (EXPERT, ["--lora-parameters", BOTH[1]]),
}


# where a query is almost orthogonal to all keys, the gated norm blows up the error of a float: its epsilon bounds that
QWEN36 = {**qwen36_checks.TINY, "rms_norm_eps": 1e-4}
OF_QWEN36 = {
    "all-linear, patterns": (QWEN36, dict(
        target_modules="all-linear", r=4, lora_alpha=4, rank_pattern={"shared_expert_gate": 1, "in_proj_qkv": 6},
        alpha_pattern={"self_attn.q_proj": 11, r"linear_attn\.\w+": 2})),
    "the linear layers, rslora": (QWEN36, dict(
        target_modules=["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"], r=3, lora_alpha=2,
        use_rslora=True)),
    "full attention alone, sizes that divide nothing": (qwen36_checks.SMALL, dict(
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], r=2, lora_alpha=3)),
    "experts and routers, balance": (dict(QWEN36, output_router_logits=True), dict(
        target_modules=["o_proj"], target_parameters=[*BOTH, "mlp.gate.weight"], r=2, lora_alpha=3)),
    "shared expert, tied": (dict(QWEN36, tie_word_embeddings=True), dict(
        target_modules=r".*shared_expert\.(gate|up|down)_proj", r=5, lora_alpha=10)),
}
OURS_QWEN36 = {
    "begun by us: as it comes": (QWEN36, []),
    "begun by us: experts and routers": (QWEN36, [
        "--lora-targets", "all-linear", "--lora-rank-pattern", "shared_expert_gate=1", "--lora-parameters",
        ",".join([*BOTH, "mlp.gate.weight"])]),
}


# PEFT has an adapter of o_a_proj only where there is one group of heads (several: deepseek_v4_program.py). Its names of
# targets are whole, as compressors have a kv_proj, too
ONE_GROUP = deepseek_v4_checks.some("SCH", 1, vocab_size=257, o_groups=1, o_lora_rank=12)
ODD = deepseek_v4_checks.some("CHS", 1, vocab_size=257)
ATTENTION = r".*\.layers\.\d+\.self_attn\.(q_a_proj|q_b_proj|kv_proj|o_b_proj"
OF_DEEPSEEK = {
    "attention, one group": (ONE_GROUP, dict(target_modules=ATTENTION + "|o_a_proj)", r=4, lora_alpha=8)),
    "attention, three groups, patterns, rslora": (ODD, dict(
        target_modules=ATTENTION + ")", r=3, lora_alpha=2, use_rslora=True, rank_pattern={"q_b_proj": 5},
        alpha_pattern={r"self_attn\.kv_proj": 7})),
    "shared experts of two layers": (ODD, dict(
        target_modules=r".*\.layers\.[02]\.mlp\.shared_experts\.(gate|up|down)_proj", r=5, lora_alpha=10)),
    "experts and routers": (ODD, dict(
        target_modules=r".*\.self_attn\.o_b_proj", target_parameters=[*BOTH, "mlp.gate.weight"], r=2, lora_alpha=3)),
}
OURS_DEEPSEEK = {
    "begun by us: as it comes": (ONE_GROUP, []),
    "begun by us: three groups, as it comes": (ODD, []),
    "begun by us: experts and routers": (ODD, [
        "--lora-targets", ATTENTION + ")", "--lora-parameters", ",".join([*BOTH, "mlp.gate.weight"])]),
}


# Rows of 16 tokens, of which an indexer chooses 5. PEFT takes MLPs and shared experts for experts, so there is no
# adapter of theirs. Alphas are small: where attention sees one token alone, gradients of float32 are nothing but errors,
# transformers' own more than ours
GLM5 = {**glm5_checks.A, "index_topk": 5}
GROUPS = {**glm5_truth.B_, "index_topk": 5}
OF_GLM5 = {
    "attention": (GLM5, dict(
        target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], r=5, lora_alpha=2)),
    "attention with biases, patterns, rslora": ({**GLM5, "attention_bias": True}, dict(
        target_modules=r".*\.self_attn\.(q_a|q_b|kv_b|o)_proj", r=3, lora_alpha=1, use_rslora=True,
        rank_pattern={"q_b_proj": 7}, alpha_pattern={r"self_attn\.kv_b_proj": 3})),
    "of some layers what makes keys, values and outputs": (GLM5, dict(
        target_modules=["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], layers_to_transform=[1, 2, 6], r=4,
        lora_alpha=10)),
    "experts and routers, in groups": (GROUPS, dict(
        target_modules=["kv_b_proj"], target_parameters=[*BOTH, "mlp.gate.weight"], r=2, lora_alpha=3)),
}
OURS_GLM5 = {
    "begun by us: what it comes with": (GLM5, ["--lora-alpha", "0.5"]),
    "begun by us: all linear layers, biases": ({**GLM5, "attention_bias": True}, [
        "--lora-alpha", "0.5", "--lora-targets", "all-linear"]),
    "begun by us: experts and routers, in groups": (GROUPS, [
        "--lora-alpha", "2", "--lora-targets", "o_proj,kv_b_proj", "--lora-parameters", ",".join([*BOTH, "mlp.gate.weight"])]),
}


class Truth36:
    """What qwen_checks.Truth is, of Qwen3_5MoeForCausalLM"""

    def __init__(self):
        import hf_models
        import torch
        self.torch, self.kind, self.lifted = torch, hf_models.Qwen36, hf_models.lifted
        torch.manual_seed(1)

    def load(self, folder):
        return self.kind.load(folder)[0].eval()

    def probe(self, model, inputs, targets, tensors):
        torch = self.torch
        self.kind.wide(model.get_base_model() if hasattr(model, "get_base_model") else model)
        model.double().zero_grad()
        with self.lifted():
            out = model(input_ids=torch.from_numpy(inputs).long(), use_cache=False)
        labels = torch.from_numpy(np.where(targets < 0, -100, targets)).long()
        model.aux_loss = out.aux_loss
        loss = torch.nn.functional.cross_entropy(out.logits.reshape(-1, out.logits.shape[-1]), labels.reshape(-1))
        loss = loss + self.kind.more_loss(model)
        loss.backward()
        assert out.logits.dtype == torch.float64
        found = {"logits": out.logits, "loss": loss.reshape(1)}
        found.update({f"grad.{name}": x for name, x in tensors(model).items()})
        return {name: x.detach().numpy() for name, x in found.items()}


class TruthV4(Truth36):
    """... of DeepseekV4ForCausalLM"""

    def __init__(self):
        super().__init__()
        import hf_models
        self.kind = hf_models.DeepseekV4

    @contextmanager
    def wide(self, model, T):
        self.kind.wide(model)
        with self.lifted():
            yield

    def probe(self, model, inputs, targets, tensors):
        torch = self.torch
        model.double().zero_grad()
        with self.wide(model.get_base_model() if hasattr(model, "get_base_model") else model, inputs.shape[1]):
            logits = model(input_ids=torch.from_numpy(inputs).long(), use_cache=False).logits
        labels = torch.from_numpy(np.where(targets < 0, -100, targets)).long()
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        loss.backward()
        assert logits.dtype == torch.float64
        found = {"logits": logits, "loss": loss.reshape(1)}
        found.update({f"grad.{name}": x for name, x in tensors(model).items()})
        return {name: x.detach().numpy() for name, x in found.items()}


class TruthGlm5(TruthV4):
    """... of GlmMoeDsaForCausalLM"""

    def __init__(self):
        super().__init__()
        import hf_models
        self.kind = hf_models.Glm5

    def wide(self, model, T):
        return self.kind.wide(model, T)


def save_deepseek_v4(folder, cfg, p):
    os.mkdir(folder)
    deepseek_v4_checks.save(folder, cfg, p)


def save_glm5(folder, cfg, p):
    os.mkdir(folder)
    glm5_truth.save(folder, cfg, p)


def save_qwen36(folder, cfg, p):
    os.mkdir(folder)
    qwen36_checks.save(folder, cfg, p)


# of a trainer: transformers in float64, a random model and its folder, adapters of PEFT's and begun by us, the largest
# error of gradients. Those of Qwen3.6 are harder for a float: transformers' own in float32 are up to 1.2e-5 away.
Family = namedtuple("Family", "truth random_model save adapters ours limit")
FAMILIES = {
    "train_qwen3": Family(qwen_checks.Truth, lambda hf: qwen_checks.random_model(hf, 16), qwen.save,
                          {**ADAPTERS, **MORE, OLD: (EXPERT, None)}, OURS, LIMIT),
    "train_qwen36": Family(Truth36, lambda hf: qwen36_checks.tiny_case(hf, 3, 16, 0.15)[:2], save_qwen36, OF_QWEN36,
                           OURS_QWEN36, 5e-5),
    "train_deepseek_v4": Family(TruthV4, lambda hf: deepseek_v4_checks.case(hf, 3, 16, 0.6)[:2], save_deepseek_v4,
                                OF_DEEPSEEK, OURS_DEEPSEEK, 5e-5),
    "train_glm5": Family(TruthGlm5, lambda hf: glm5_checks.case(hf, 3, 16)[:2], save_glm5, OF_GLM5, OURS_GLM5, LIMIT)}


class Case:
    """A base model in a folder, a batch, and the program"""

    def __init__(self, program, folder, family, hf):
        self.program, self.folder, self.limits = program, folder, (LIMIT, LIMIT, family.limit)
        self.cfg, self.base = family.random_model(hf)
        self.has_experts = bool(getattr(self.cfg, "moe_layers", True))
        self.inputs, self.targets = qwen_checks.make_batch(self.cfg.vocab_size, 16, 5)
        family.save(self.path("base"), self.cfg, self.base)
        exact.write_safetensors(self.path("in"), {"inputs": self.inputs, "targets": self.targets}, {})

    def path(self, name):
        return os.path.join(self.folder, name)

    def run(self, *options):
        run = subprocess.run([self.program, *options], capture_output=True, text=True, cwd=self.folder)
        if run.returncode != 0:
            raise RuntimeError(f"status {run.returncode}: {' '.join(options)}: {run.stderr.strip()}")

    def probe(self, *options):
        self.run(*options, "--probe", "in", "--probe-out", "out")
        found = exact.read_safetensors(self.path("out"))
        return {name: x for name, x in found.items() if name != "cross_entropy" and not name.startswith("choice.")}

    def logits(self, truth, model):
        return truth.probe(model, self.inputs, self.targets, lambda model: {})["logits"]


def relative(x, truth):
    return np.linalg.norm(x.astype(np.float64) - truth) / np.linalg.norm(truth)


def is_same(found, expected):
    """Two adapters as PEFT names their tensors"""
    return found.keys() == expected.keys() and all(found[key].equal(x) for key, x in expected.items())


def state_of(model):
    import peft
    return peft.get_peft_model_state_dict(model.float())


def read_adapter(truth, case, folder):
    """PEFT's model of base and adapter; it must find there what it looks for"""
    import peft
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys")  # of which PEFT only warns
        return peft.PeftModel.from_pretrained(truth.load(case.path("base")), case.path(folder),
                                              is_trainable=True).eval()


def made_by_peft(truth, case, settings):
    """Saves a random adapter as theirs/; returns its model"""
    import peft
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", **copy.deepcopy(settings)})  # PEFT changes its patterns
    model = peft.get_peft_model(truth.load(case.path("base")), config)
    with truth.torch.no_grad():
        for p in filter(lambda p: p.requires_grad, model.parameters()):
            p.normal_(0.0, 0.3)
    model.save_pretrained(case.path("theirs"))
    return model


def made_as_of_old(truth, case):
    """The same of an adapter with two matrices for each expert and projection, which PEFT only reads"""
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 3,
                "target_modules": ["gate_proj", "up_proj", "down_proj"]}
    cut = [cut for place in lora.all_places(case.cfg) if place.n_experts for cut in lora.cut_places(place)]
    places = lora.with_ranks(lora.in_order(case.cfg, cut), settings)
    lora.save(case.path("theirs"), lora.model_of(case.base, places, settings), case.cfg,
              lora.draw_adapter(case.cfg, places, 1.0))
    return read_adapter(truth, case, "theirs")


def merge_errors(truth, case, model, expected):
    """Of merged/ against PEFT's own merged model: logits; elements that differ, and by how much at most"""
    ours = truth.load(case.path("merged")).state_dict()
    theirs = model.float().merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys()
    n = sum(int((ours[key] != x).sum()) for key, x in theirs.items())
    most = max(float((ours[key] - x).abs().max()) for key, x in theirs.items())
    return relative(case.logits(truth, truth.load(case.path("merged"))), expected), n, most


def adapter_promises(truth, case, name, settings):
    """An adapter of PEFT's, read by the program"""
    is_old = name == OLD
    model = made_as_of_old(truth, case) if is_old else made_by_peft(truth, case, settings)
    had = {key: x.clone() for key, x in state_of(model).items()}
    expected = truth.probe(model.eval(), case.inputs, case.targets, qwen_checks.adapter_gradients)
    found = case.probe("--from", "base", "--lora", "theirs")
    if is_old:  # which PEFT computes as adapters of doubled rank: their gradients are no tensors of the file
        keep = ("logits", "loss")
        found, expected = ({key: x[key] for key in keep} for x in (found, expected))
    worst = qwen_checks.worst_errors(found, expected)
    case.run("--from", "base", "--lora", "theirs", "--export-lora", "ours")
    exported = read_adapter(truth, case, "ours")
    of_export = relative(case.logits(truth, exported), expected["logits"])
    same = is_same(state_of(exported), had)
    case.run("--from", "base", "--lora", "theirs", "--export-hf", "merged", "--merge", "1")
    of_merged, n, most = merge_errors(truth, case, model, expected["logits"])
    return [
        *((f"{name}: {kind} within {error:.1e}", error <= limit)
          for kind, error, limit in zip(("logits", "loss", "gradients of A and B"), worst, case.limits)),
        (f"{name}: exported, read by PEFT: the same tensors, logits within {of_export:.1e}", same and of_export <= 1e-12),
        (f"{name}: merged, read by transformers: PEFT's logits within {of_merged:.1e}", of_merged <= LIMIT),
        (f"{name}: merged weights, {n} differ, at most by {most:.1e}",
         most < 1e-6 if case.has_experts else n == 0)]


def our_promises(truth, case, name, options):
    """An adapter of the program's, read by PEFT"""
    with open(case.path("text.txt"), "w", encoding="utf-8") as file:
        file.write("A line of text to train on, and another one.\n" * 40)
    case.run("--from", "base", "--lora-rank", "4", *options, "--train", "text.txt", "--tokenizer", "bytes", "--seq-len", "16",
             "--lr", "0.1", "--steps", "4", "--run", "run", "--export-lora", "ours")
    found = case.probe("--from", "base", "--lora", "run")
    model = read_adapter(truth, case, "ours")
    expected = truth.probe(model, case.inputs, case.targets, qwen_checks.adapter_gradients)
    worst = qwen_checks.worst_errors(found, expected)
    case.run("--from", "base", "--lora", "run", "--export-hf", "merged", "--merge", "1")
    of_merged, n, most = merge_errors(truth, case, model, expected["logits"])
    moved = relative(expected["logits"], case.logits(truth, truth.load(case.path("base"))))
    return [
        *((f"{name}: {kind} within {error:.1e}", error <= limit)
          for kind, error, limit in zip(("logits", "loss", "gradients of A and B"), worst, case.limits)),
        (f"{name}: training has moved the logits, by {moved:.0%}", moved > 0.01),
        (f"{name}: merged, read by transformers: PEFT's logits within {of_merged:.1e}", of_merged <= LIMIT),
        (f"{name}: merged weights, {n} differ, at most by {most:.1e}",
         most < 1e-6 if case.has_experts else n == 0)]


def main():
    program = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else
                              os.path.join(os.path.dirname(__file__), "../../train_qwen3"))
    family = FAMILIES.get(os.path.basename(program))
    if not family:
        raise SystemExit(f"check_lora.py: {program}: expected one of {', '.join(FAMILIES)}")
    try:
        import peft  # noqa: F401
        truth = family.truth()
    except ImportError as error:
        print(f"skipped: {error}")
        return 0
    out = []
    for name, (hf, given) in {**family.adapters, **family.ours}.items():
        is_ours = name in family.ours
        check = our_promises if is_ours else adapter_promises
        with tempfile.TemporaryDirectory() as folder:
            try:
                case = Case(program, folder, family, dict(hf, vocab_size=257) if is_ours else hf)
                promises = check(truth, case, name, given)
            except RuntimeError as error:
                promises = [(f"{name}: {error}", False)]
        out += promises
    return exact.report(out)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    sys.exit(main())
