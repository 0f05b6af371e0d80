"""
What qwen36.py promises before it writes golden files: config.json and names, numbers that were computed apart, finite
differences, and in float32 what must hold to the bit. NumPy and the standard library only, but for the last section.

    python dev/ref/qwen36_checks.py        hold the model against transformers, in float64 and in float32
    python dev/ref/qwen36_checks.py --probe-with ./train_qwen36    a trainer with MTP, which check_hf.py does not have

That needs torch and transformers; without them it says "skipped". The truth is Qwen3_5MoeForCausalLM in float64, its
own casts to float32 switched off; the error of a tensor is |x - truth| / |truth| in the L2 norm.
"""
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import replace

import numpy as np

import exact
import gated_delta_checks
import qwen36
import trainer
from exact import F4, F8, tree_sum
from gated_delta import STEPS, delta_forward
from moe_checks import close, same_bits
from ops import router_backward, router_forward
from qwen36 import backward, count, forward, numbers, parameter_table, read_config

TINY = {"model_type": "qwen3_5_moe_text", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
        "router_aux_loss_coef": 0.01, "output_router_logits": False, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                            "mrope_interleaved": True, "mrope_section": [2, 1, 1]}}
SMALL = {**TINY, "vocab_size": 47, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 12,
         "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 5, "linear_value_head_dim": 7,
         "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3, "num_experts": 5, "num_experts_per_tok": 3,
         "moe_intermediate_size": 6, "shared_expert_intermediate_size": 9, "rms_norm_eps": 1e-5,
         "rope_parameters": {**TINY["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}}
PUBLISHED = {**TINY, "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "layer_types": None,
             "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
             "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 256,
             "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}


def tiny_case(hf, B, T, spread=0.8, **changes):
    """A config, parameters, inputs and targets, of which some are not counted"""
    cfg = replace(read_config(hf, "case", B, T), steps=1, **changes)
    p = trainer.draw_parameters(parameter_table(cfg), matrix_spread=spread, vector_spread=0.6)
    inputs, targets = (x[0, 0] for x in trainer.draw_data(cfg))
    trainer.ignore_targets(targets)
    targets[0, 0] = targets[-1, -1] = 3
    return cfg, p, inputs, targets


def wide(p):
    return {name: x.astype(F8) for name, x in p.items()}


def config_promises():
    def size(cfg):
        table = parameter_table(cfg)
        return (sum(math.prod(row.shape) for row in table), sum(len(row.numbers) * len(row.parts) for row in table))
    big = read_config(PUBLISHED, "", 1, 1)
    with_mtp = size(replace(big, mtp=True))
    tiny = replace(read_config(TINY, "", 1, 1), fused_experts=False)
    return [
        ("config: parameters and tensors of the published model", size(big) == (34660610688, 693)),
        ("config: and of its MTP module", with_mtp == (34660610688 + 844640768, 693 + 19)),
        ("config: tensors of the tiny model, fused and not", (size(replace(tiny, fused_experts=True))[1],
                                                              size(tiny)[1]) == (72, 160)),
        ("config: every fourth layer is full", big.full == tuple(range(3, 40, 4))),
        ("config: axes of mrope", [tuple(np.flatnonzero(qwen36.axes_of(replace(big, rotary=64, sections=(11, 11, 10)))
                                                        == axis)) for axis in (1, 2)] ==
         [tuple(range(1, 32, 3)), tuple(range(2, 30, 3))]),
        ("config: there and back", all(replace(read_config(qwen36.config_json(cfg), "", 1, 1), **{
            key: getattr(cfg, key) for key in trainer.Run.__dataclass_fields__}) == cfg
            for cfg in [run()[0] for run in qwen36.RUNS.values()])),
    ]


def number_promises():
    """A norm and a router, computed apart"""
    x, w, dy = np.array([[1, -2, .5, 3]]), np.array([.1, -.2, 0, .5]), np.array([[1, .5, -1, .25]])
    y, rstd = qwen36.zero_norm(x, w, 1e-6)
    dx, _ = qwen36.zero_norm_backward(dy, x, w, rstd)
    z, dw = np.array([[1, .2, -.5, .8]]), np.array([[.3, -1.2]])
    p, _, experts, weights = router_forward(z, 2, True)
    dz = router_backward(dw, p, None, experts, weights, True, None, 0, 0)
    return [
        ("zero-centred norm: numbers computed apart",
         close(y, [[.5827942, -.8477006, .2649064, 2.3841579]], 0, 6e-8) and
         close(dx, [[.5484028, .2807079, -.5470085, .0955058]], 0, 6e-8)),
        ("router: numbers computed apart", close(weights, [[.549833997, .450166003]], 0, 6e-10) and
         close(dz, [[.371274859, 0, 0, -.371274859]], 0, 6e-10)),
    ]


def slope_promises():
    """All gradients of the model with MTP, balance and documents, against differences of the loss"""
    out = []
    begins = [[0, 0, 1, 0, 0, 0, 1, 1, 0]] * 2
    for name, starts, tied in (("one document", None, False), ("documents, tied head", begins, True)):
        hf = {**SMALL, "output_router_logits": True, "mtp_weight": 0.3, "tie_word_embeddings": tied}
        cfg, p, inputs, targets = tiny_case(hf, 2, 9)
        starts, p = None if starts is None else np.array(starts), wide(p)
        c = count(inputs, targets, cfg, starts)

        def loss(p):
            return numbers([forward(p, inputs, targets, cfg, starts)], c, cfg)["loss"]
        g = backward(p, forward(p, inputs, targets, cfg, starts), inputs, targets, c, cfg, starts)
        rng, worst = np.random.default_rng(4), 0.0
        for key in p:
            direction = rng.normal(size=p[key].shape)
            ends = [loss({**p, key: p[key] + h * direction}) for h in (1e-6, -1e-6)]
            norm = np.linalg.norm(g[key]) * np.linalg.norm(direction)
            worst = max(worst, abs((ends[0] - ends[1]) / 2e-6 - (g[key] * direction).sum()) / norm)
        out.append((f"{name}: gradients agree with differences of the loss, {worst:.0e}", worst < 2e-7))
    return out


def packing_promises():
    """A packed row has the bits of its documents, and so have sums of gradients where one document is alone in having
    counted targets"""
    cfg, p, inputs, targets = tiny_case({**SMALL, "mtp_weight": 0.3}, 1, 83)
    starts, cuts = np.zeros((1, 83), int), [(0, 11), (11, 81), (81, 83)]
    starts[0, [11, 81]] = 1
    packed, kept = forward(p, inputs, targets, cfg, starts), []
    for first, end in cuts:
        own, at = replace(cfg, seq_len=end - first), slice(first, end)
        alone = forward(p, inputs[:, at], targets[:, at], own)
        kept += [same_bits(packed[name][:, at], alone[name]) for name in ("logits", "losses", "norm")]
        kept += [same_bits(packed["mtp_losses"][:, first:max(end - 2, first)],
                           alone["mtp_losses"][:, :max(end - first - 2, 0)])]
    only = np.full_like(targets, -1)
    only[:, 11:81] = targets[:, 11:81]
    plain = replace(cfg, mtp=False)
    q = {row.name: p[row.name] for row in parameter_table(plain)}
    c = count(inputs, only, plain)
    packed = backward(q, forward(q, inputs, only, plain, starts), inputs, only, c, plain, starts)
    at = slice(11, 81)
    alone = backward(q, forward(q, inputs[:, at], only[:, at], plain), inputs[:, at], only[:, at], c, plain)
    return [("documents: a packed row has their bits", all(kept)),
            ("documents: and those of one that has all targets, its gradients",
             all(np.array_equal(packed[name], x) for name, x in alone.items()))]


def generation_promises():
    """A token at a time, by steps and carried state, against the chunks of the whole row"""
    cfg, p, inputs, targets = tiny_case(SMALL, 1, 80)
    out = []
    for dtype, limit in ((F8, 1e-12), (F4, 2e-5)):
        q = {name: x.astype(dtype) for name, x in p.items()}
        whole = forward(q, inputs, targets, cfg)
        a = whole["blocks"][0]
        by_steps, state = delta_forward(*(a[name] for name in ("unit_q", "unit_k", "delta_v", "g", "beta")), law=STEPS)
        error = np.linalg.norm(by_steps - a["o"]) / np.linalg.norm(a["o"])
        again = forward_by_steps(q, inputs, targets, cfg)
        errors = [np.linalg.norm(again[name] - whole[name]) / np.linalg.norm(whole[name])
                  for name in ("norm", "logits")]
        worst = max(error, *errors, np.abs(state - a["state"]).max() / np.abs(state).max())
        out.append((f"generation: {np.dtype(dtype)} within {worst:.0e} of the chunks", worst < limit))
    return out


def forward_by_steps(p, inputs, targets, cfg):
    chunks = qwen36.delta_forward
    try:
        qwen36.delta_forward = lambda *args: chunks(*args, law=STEPS)
        return forward(p, inputs, targets, cfg)
    finally:
        qwen36.delta_forward = chunks


def mtp_promises():
    """The MTP module written again, position by position, from section 2.7"""
    cfg, p, inputs, targets = tiny_case({**SMALL, "mtp_weight": 0.3}, 2, 9)
    next_token, target = qwen36.mtp_batch(inputs, targets, None)
    starts = np.zeros_like(inputs)
    starts[:, 4] = 1
    cut = qwen36.mtp_batch(inputs, targets, starts)[1]
    return [
        ("MTP: targets", np.array_equal(target[:, :-1], np.where(targets[:, 1:] < 0, -1, targets[:, 1:])) and
         (target[:, -1] == -1).all() and np.array_equal(next_token[:, :-1], inputs[:, 1:])),
        ("MTP: targets do not cross into another document", (cut[:, 2:4] == -1).all() and
         np.array_equal(np.delete(cut, [2, 3], axis=1), np.delete(target, [2, 3], axis=1))),
    ]


def file_promises():
    """Both layouts of the experts, both prefixes, convolutions of (C, 1, K) and (C, K)"""
    cfg, p, _, _ = tiny_case({**SMALL, "mtp_weight": 0.3}, 1, 4)
    kept = []
    for fused in (False, True):
        for prefix in ("model.", "model.language_model."):
            disk = trainer.to_disk(qwen36.MODEL, p, replace(cfg, fused_experts=fused, prefix=prefix))
            found, tensors = qwen36.fit(cfg, disk)
            kept.append((found.fused_experts, found.prefix) == (fused, prefix))
            flat = {name: x[:, 0] if name.endswith("conv1d.weight") else x for name, x in tensors.items()}
            for tensors in (tensors, flat):
                again = trainer.from_disk(qwen36.MODEL, tensors, found)
                kept += [same_bits(again[name], x) for name, x in p.items()]
    return [("files: to disk and back in every layout", all(kept))]


def promises():
    return (gated_delta_checks.promises() + config_promises() + file_promises() + number_promises() +
            slope_promises() + packing_promises() + generation_promises() + mtp_promises())


# ---------------------------------------------------------------------------------------------------------------------
# transformers.
# ---------------------------------------------------------------------------------------------------------------------
class Truth:
    """Qwen3_5MoeForCausalLM in float64, without its casts to float32"""

    def __init__(self):
        import torch
        import hf_models
        self.torch, self.kind, self.lifted = torch, hf_models.Qwen36, hf_models.lifted
        torch.set_num_threads(1)

    def load(self, folder):
        model, _ = self.kind.load(folder)
        return model

    def probe(self, folder, inputs, targets, positions=None):
        """logits, loss and gradients by name on disk, as arrays"""
        torch, model = self.torch, self.load(folder)
        more = {} if positions is None else {"position_ids": torch.tensor(positions)}
        logits = self.kind.logits(model, torch.tensor(inputs), **more)
        labels = torch.tensor(np.where(targets < 0, -100, targets)).long()
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        loss = loss + self.kind.more_loss(model)
        loss.backward()
        found = {"logits": logits.detach().numpy(), "loss": loss.detach().numpy().reshape(1)}
        found.update({"grad." + name: (torch.zeros_like(x) if x.grad is None else x.grad).numpy()
                      for name, x in model.named_parameters()})
        return found

    def mtp_probe(self, folder, cfg, p, inputs, targets):
        """The same of main loss + mtp_weight * MTP's, composed of transformers' parts as section 2.7 has it"""
        from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as parts
        torch = self.torch
        model = self.kind.wide(self.load(folder))
        config = model.config
        config.layer_types = [*config.layer_types, "full_attention"]
        layer = parts.Qwen3_5MoeDecoderLayer(config, len(config.layer_types) - 1).double()
        norms = {name: parts.Qwen3_5MoeRMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps).double()
                 for name in ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")}
        fc = torch.nn.Linear(2 * cfg.hidden_size, cfg.hidden_size, bias=False).double()
        modules = {"mtp.layers.0": layer, "mtp.fc": fc, **norms}
        named = {f"{name}.{key}": x for name, module in modules.items() for key, x in module.named_parameters()}
        disk = trainer.to_disk(qwen36.MODEL, p, cfg)
        with torch.no_grad():
            for name, x in named.items():
                x.copy_(torch.tensor(disk[name]))
        with self.lifted():
            tokens = torch.tensor(inputs).long()
            hidden = model.model(tokens, use_cache=False).last_hidden_state
            e = norms["mtp.pre_fc_norm_embedding"](model.model.embed_tokens(tokens[:, 1:]))
            x = fc(torch.cat([e, norms["mtp.pre_fc_norm_hidden"](hidden[:, :-1])], dim=-1))
            n = x.shape[1]
            mask = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)[None, None]
            tables = model.model.rotary_emb(x, torch.arange(n).expand(3, len(x), n))
            y = layer(x, position_embeddings=tables, attention_mask=mask)
            y = norms["mtp.norm"](y[0] if isinstance(y, tuple) else y)
            labels = torch.tensor(np.where(targets < 0, -100, targets)).long()
            logits, after = model.lm_head(hidden), model.lm_head(y)
            V = logits.shape[-1]
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, V), labels.reshape(-1))
            more = torch.nn.functional.cross_entropy(after.reshape(-1, V), labels[:, 1:].reshape(-1))
            loss = loss + cfg.mtp_weight * more
            loss.backward()
        found = {"logits": logits.detach().numpy(), "loss": loss.detach().numpy().reshape(1)}
        found.update({"grad." + name: x.grad.numpy() for name, x in [*model.named_parameters(), *named.items()]})
        return found


def ours(cfg, p, inputs, targets, positions=None):
    c = count(inputs, targets, cfg)
    acts = forward(p, inputs, targets, cfg, None, positions)
    g = backward(p, acts, inputs, targets, c, cfg, None, positions)
    found = {"logits": acts["logits"], "loss": numbers([acts], c, cfg)["loss"].reshape(1)}
    found.update({"grad." + name: x for name, x in trainer.to_disk(qwen36.MODEL, g, cfg).items()})
    return found


VARIANTS = {
    "tiny": {}, "linear only": {"layer_types": ["linear_attention"] * 4},
    "full only": {"layer_types": ["full_attention"] * 4}, "as many heads": {"linear_num_value_heads": 2},
    "balance": {"output_router_logits": True}, "tied": {"tie_word_embeddings": True},
    "small": SMALL, "small, 3 axes": SMALL, "MTP": {"mtp_weight": 0.3},
    "small, MTP, tied": {**SMALL, "mtp_weight": 0.3, "tie_word_embeddings": True},
}


def said_by(program, folder, inputs, targets):
    """--probe of a trainer, as arrays"""
    with tempfile.TemporaryDirectory() as own:
        probe, out = os.path.join(own, "in.safetensors"), os.path.join(own, "out.safetensors")
        exact.write_safetensors(probe, {"inputs": inputs, "targets": targets}, {})
        subprocess.run([*program, "--from", folder, "--probe", probe, "--probe-out", out], check=True,
                       stdout=subprocess.DEVNULL)
        found = exact.read_safetensors(out)
    found.pop("cross_entropy")
    return found


def compare(program=None):
    """The reference; with a program this one, of which check_hf.py knows all but MTP"""
    try:
        truth = Truth()
    except ImportError as error:
        print(f"skipped: {error}")
        return 0
    out = []
    for name, changes in VARIANTS.items():
        if program and "MTP" not in name:
            continue
        for T in (1, 3, 63, 64, 65, 130) if name in ("tiny", "small") else (3, 70) if "MTP" in name else (1, 70):
            hf = {**TINY, **changes}
            cfg, p, inputs, targets = tiny_case(hf, 2 if T < 100 else 1, T, 0.4)
            positions = None
            if "axes" in name:
                positions = np.random.default_rng(6).integers(0, 50, size=(3, *inputs.shape))
            with tempfile.TemporaryDirectory() as folder:
                for fused in (True, False):
                    save(folder, replace(cfg, fused_experts=fused), p)
                    if cfg.mtp:
                        expected = truth.mtp_probe(folder, cfg, p, inputs, targets)
                    else:
                        expected = truth.probe(folder, inputs, targets, positions)
                    if program and fused:
                        said = said_by(program, folder, inputs, targets)
                    if fused:
                        first = expected
                    elif any(not np.array_equal(first[key], x) for key, x in expected.items()):
                        out.append((f"{name}, T {T}: both layouts of the experts", False))
            line = []
            for dtype, limits in ((F8, (1e-12, 1e-12, 1e-11)), (F4, (2e-5, 2e-5, 1e-4)))[program is not None:]:
                found = said if program else ours(cfg, {key: x.astype(dtype) for key, x in p.items()}, inputs, targets,
                                                  positions)
                assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
                errors = {key: np.linalg.norm(found[key] - x) / max(np.linalg.norm(x), 1e-30 if x.any() else 1.0)
                          for key, x in expected.items()}
                worst = max((e, key) for key, e in errors.items() if key.startswith("grad."))
                good = errors["logits"] <= limits[0] and errors["loss"] <= limits[1] and worst[0] <= limits[2]
                line.append(f"{np.dtype(dtype)} {errors['logits']:.0e} {errors['loss']:.0e} {worst[0]:.0e}"
                            + ("" if good else f" ({worst[1]})"))
                out.append((f"{name}, T {T}: logits, loss, gradients {line[-1]}", good))
    return exact.report(out)


def save(folder, cfg, p):
    import json
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(qwen36.config_json(cfg), file)
    exact.write_safetensors(os.path.join(folder, "model.safetensors"), trainer.to_disk(qwen36.MODEL, p, cfg), {})
    add_format(os.path.join(folder, "model.safetensors"))


def add_format(path):
    """transformers wants __metadata__["format"]"""
    from safetensors.numpy import load_file, save_file
    save_file(load_file(path), path, {"format": "pt"})


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(compare(sys.argv[2:] if sys.argv[1:2] == ["--probe-with"] else None))
