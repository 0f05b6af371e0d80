"""
Holds glm5.py, or a program with --probe, against Hugging Face transformers: python dev/ref/glm5_checks.py. Needs torch
and transformers 5.23 or later; without them it says "skipped".

The truth is GlmMoeDsaForCausalLM in float64, its own casts to float32 switched off; the error of a tensor is max |x -
truth| / max |truth|. What it does not have, MTP and the loss of the indexer, is made of its parts and of automatic
differentiation. Where the indexer's pairs are halves, it turns as DeepSeek V3.2's does. Models are "A" to "G" of the
specification that this project was written from, which is not in the repository, and so are the numbers of traps.
"""
import json
import os
import re
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import numpy as np

import deepseek_v4_checks
import exact
import experts
import fp8
import glm5
import latent_attention as latent
import ops
import qwen36_checks
import sparse_attention as sparse
import trainer
from exact import F4, F8
from glm5 import backward, count, forward, numbers
from glm5_checks import A, case
from glm5_config import config_json, fit, read_config
from moe_checks import same_bits

os.environ["HF_HUB_OFFLINE"] = "1"  # everything is made here


class Truth(deepseek_v4_checks.Truth):
    """GlmMoeDsaForCausalLM in float64, without its casts to float32"""

    def __init__(self):
        import torch
        import hf_models
        from transformers import GlmMoeDsaForCausalLM
        from transformers.models.deepseek_v32 import modeling_deepseek_v32
        from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as parts
        self.torch, self.lifted, self.kind, self.parts = torch, hf_models.lifted, GlmMoeDsaForCausalLM, parts
        self.halves = modeling_deepseek_v32.apply_rotary_pos_emb
        torch.set_num_threads(1)

    def layouts(self, cfg):
        """Where the indexer's pairs are halves, it turns as that of DeepSeek V3.2, which alone has heads on axis 2"""
        neighbours = self.parts.apply_rotary_pos_emb_interleave

        def turn(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
            own = self.halves if unsqueeze_dim == 2 and not cfg.indexer_rope_interleave else neighbours
            return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return mock.patch.object(self.parts, "apply_rotary_pos_emb_interleave", turn)

    def tables_of(self, model, positions, dtype):
        """cos and sin in float64; with F4 they are those of float32, as all programs have them"""
        x = self.torch.zeros(1, dtype=self.torch.float32 if dtype == F4 else self.torch.float64)
        if dtype == F4:
            return [y.double() for y in self.parts.GlmMoeDsaRotaryEmbedding(model.config)(x, positions)]
        with self.lifted():
            return self.parts.GlmMoeDsaRotaryEmbedding(model.config)(x, positions)

    def watch(self, layers):
        """Where the next forward leaves what each layer says: choices, attention, what an indexer reads"""
        seen = [{} for _ in layers]
        for said, layer in zip(seen, layers):
            def attention(module, inputs, out, said=said):
                said["att"], said["keys"] = out[1].detach(), out[2]

            def indexer(module, inputs, said=said):
                said["indexer"] = module, [x.detach() for x in inputs[:2]]

            def router(module, inputs, out, said=said):
                said["experts"] = np.sort(out[2].numpy(), axis=-1)
            layer.self_attn.register_forward_hook(attention)
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.register_forward_pre_hook(indexer)
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(router)
        return seen

    def index_loss(self, seen, cfg, tables):
        """3.7: for each full layer the mean over positions of KL(p || pi), p the mean attention of the layers that it
        chooses for"""
        torch, losses = self.torch, []
        groups = [[l for l, said in enumerate(seen) if self.source(seen, l) == full] for full, said in enumerate(seen)
                  if "indexer" in said]
        for group in groups:
            module, (x, low) = seen[group[0]]["indexer"]
            taught_by = group if cfg.indexer_kl_target == "group_average" else group[:1]
            p = sum(seen[l]["att"].mean(dim=1) for l in taught_by) / len(taught_by)
            support = torch.zeros(p.shape, dtype=torch.bool).scatter(-1, seen[group[0]]["keys"].long(), True).tril()
            q = module.wq_b(low).view(*x.shape[:2], cfg.index_n_heads, -1)
            k = module.k_norm(module.wk(x))[:, :, None]
            n = cfg.qk_rope_head_dim
            now = [y[:, :x.shape[1]] for y in tables]
            turned = self.parts.apply_rotary_pos_emb_interleave(q[..., :n], k[..., :n], *now, unsqueeze_dim=2)
            q, k = (torch.cat([a, b[..., n:]], dim=-1) for a, b in zip(turned, (q, k)))
            raw = torch.einsum("bthd,bsd->bths", q, k[:, :, 0]) * cfg.index_head_dim ** -0.5
            w = module.weights_proj(x) * cfg.index_n_heads ** -0.5
            score = torch.einsum("bth,bths->bts", w, raw.relu())
            log_pi = score.masked_fill(~support, -torch.inf).log_softmax(dim=-1)
            terms = torch.where(support & (p > 0), p * (p.clamp(min=1e-300).log() - log_pi), 0)
            assert torch.allclose(p.sum(-1), torch.ones(1, dtype=p.dtype))
            losses.append(terms.sum() / (p.shape[0] * x.shape[1]))
        return losses

    @staticmethod
    def source(seen, l):
        return max(full for full in range(l + 1) if "indexer" in seen[full])

    def mtp_modules(self, config, p, cfg):
        """By their names on disk, with our parameters: the layer, the projection, three norms"""
        torch, parts, D = self.torch, self.parts, cfg.hidden_size
        config.indexer_types, config.mlp_layer_types = ([*getattr(config, key), kind] for key, kind in (
            ("indexer_types", "full"), ("mlp_layer_types", "sparse")))
        modules = {"": parts.GlmMoeDsaDecoderLayer(config, cfg.num_hidden_layers),
                   "eh_proj.": torch.nn.Linear(2 * D, D, bias=False)}
        modules.update({name + ".": parts.GlmMoeDsaRMSNorm(D, eps=cfg.rms_norm_eps)
                        for name in ("enorm", "hnorm", "shared_head.norm")})
        disk, named = trainer.to_disk(glm5.MODEL, p, replace(cfg, fused_experts=True)), []
        for prefix, module in modules.items():
            module.double().eval()
            for name, x in [*module.named_parameters(), *module.named_buffers()]:
                name = f"model.layers.{cfg.num_hidden_layers}.{prefix}{name}"
                with torch.no_grad():
                    x.copy_(torch.tensor(disk[name]))
                named += [(name, x)] if isinstance(x, torch.nn.Parameter) else []
        return modules, named

    def probe(self, folder, cfg, p, inputs, targets, dtype, positions=None):
        """logits, loss, losses of indexers and gradients by name on disk, as arrays; and what layers said"""
        torch, model = self.torch, self.load(folder).double()
        eps = {layer.self_attn.q_a_layernorm.variance_epsilon for layer in model.model.layers}
        assert eps == {cfg.latent_norm_eps}, "transformers has another eps of latents now: see 0.3"
        tokens, layers = torch.tensor(inputs).long(), list(model.model.layers)
        positions = torch.arange(tokens.shape[1])[None] if positions is None else torch.tensor(positions)
        tables = self.tables_of(model, positions, dtype)
        model.model.rotary_emb.forward = lambda x, position_ids: tables
        named, modules = list(model.named_parameters()), None
        if cfg.mtp:
            modules, own = self.mtp_modules(model.config, p, cfg)
            named, layers = named + own, [*layers, modules[""]]
        seen, found = self.watch(layers), {}
        with self.lifted(), self.layouts(cfg):
            hidden = model.model(tokens, position_ids=positions, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden)
            loss = self.cross_entropy(logits, targets)
            if cfg.mtp:
                e = modules["enorm."](model.model.embed_tokens(tokens[:, 1:]))
                x = modules["eh_proj."](torch.cat([e, modules["hnorm."](hidden[:, :-1])], dim=-1))
                n = x.shape[1]
                short, mask = [y[:, :n] for y in tables], torch.full((n, n), -torch.inf, dtype=x.dtype).triu(1)
                mask = mask.expand(len(x), 1, n, n)
                x = modules[""](x, position_embeddings=short, attention_mask=mask)[0]
                after = model.lm_head(modules["shared_head.norm."](x))
                loss = loss + cfg.mtp_weight * self.cross_entropy(after, targets[:, 1:])
            assert logits.dtype == torch.float64
            loss.backward()
            if cfg.indexer_train != "off":
                losses = self.index_loss(seen, cfg, tables)
                (cfg.indexer_kl_coeff * sum(losses)).backward()
                found["index_loss"] = torch.stack(losses).detach().numpy()
        found.update(logits=logits.detach().numpy(), loss=loss.detach().numpy().reshape(1))
        for name, x in named:
            found["grad." + name] = (torch.zeros_like(x) if x.grad is None else x.grad).numpy()
        return found, seen


def ours(cfg, p, inputs, targets, positions=None):
    c = count(inputs, targets, cfg)
    acts = forward(p, inputs, targets, cfg, None, positions)
    g = backward(p, acts, inputs, targets, c, cfg, None, positions)
    said = numbers([acts], c, cfg)
    found = {"logits": acts["logits"], "loss": said["loss"].reshape(1)}
    found.update({"index_loss": said["index_loss"]} if "index_loss" in said else {})
    g = trainer.to_disk(glm5.MODEL, g, replace(cfg, fused_experts=True))
    found.update({"grad." + name: x for name, x in g.items() if not name.endswith("e_score_correction_bias")})
    return found, acts


def choices_differ(cfg, acts, seen):
    """Layers whose choices are not those of transformers: of keys those that are seen, as sets; of experts"""
    wrong = []
    for l, (a, said) in enumerate(zip(acts["blocks"], seen)):
        if "keys" in said:
            T = said["keys"].shape[1]
            theirs = sparse.chosen_of(said["keys"].numpy(), T) & np.tril(np.ones((T, T), bool))
            mine = acts["blocks"][cfg.source(l)]["index_chosen"]
            wrong += [f"keys of layer {l}"] if not np.array_equal(theirs, sparse.chosen_of(mine, T)) else []
        if "experts" in said and not np.array_equal(a["experts"].reshape(said["experts"].shape), said["experts"]):
            wrong.append(f"experts of layer {l}")
    return wrong


def gap_of(cfg, acts, p):
    """The smallest distance of what is chosen from what is not, of keys and of experts, relative to the former"""
    gaps = [np.inf]
    for l, a in enumerate(acts["blocks"]):
        if "index_scores" in a and cfg.indexer_train != "dense":
            for t in range(cfg.index_topk, a["index_scores"].shape[1]):
                x = np.sort(a["index_scores"][:, t, :t + 1].astype(F8), axis=-1)[:, ::-1]
                last, next_one = x[:, cfg.index_topk - 1], x[:, cfg.index_topk]
                gaps.append(((last - next_one) / np.abs(last)).min())
        if "router_logits" in a:
            c = a["scores"] + p["selection_bias"][cfg.moe_layers.index(l)]
            if cfg.router.groups > 1:
                c = np.where(experts.staying(c.reshape(-1, c.shape[-1]), cfg.router).reshape(c.shape), c, -np.inf)
            x = np.sort(c.astype(F8), axis=-1)[..., ::-1]
            gaps.append((x[..., cfg.router.k - 1] - x[..., cfg.router.k]).min())
    return min(gaps)


KEPT = "embed_tokens|lm_head|mlp.gate.weight|weights_proj"  # matrices that are not in fp8


def rounded(p, cfg):
    """The matrices as numbers of e4m3 times scales of blocks of 128 x 128; each matrix has some that are smaller"""
    rng, disk = np.random.default_rng(5), trainer.to_disk(glm5.MODEL, p, cfg)
    for name, x in disk.items():
        if x.ndim == 2 and not re.search(KEPT, name):
            assert any(n % fp8.BLOCK for n in x.shape), name
            disk[name] = fp8.release_matrix(x, "F32", rng)[2]
    return trainer.from_disk(glm5.MODEL, disk, cfg)


def save_own(folder, cfg, p):
    """As a trainer has it: with MTP and keys of our own"""
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config_json(cfg), file)
    exact.write_safetensors(os.path.join(folder, "model.safetensors"), trainer.to_disk(glm5.MODEL, p, cfg), {})


def save(folder, cfg, p):
    """As transformers has it"""
    from safetensors.numpy import save_file
    plain = replace(cfg, mtp=False)
    tensors = trainer.to_disk(glm5.MODEL, p, plain)
    hf = config_json(plain)
    if cfg.indexer_train == "dense":
        hf["index_topk"] = hf["max_position_embeddings"]
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(hf, file)
    tensors = {name: x.copy() for name, x in tensors.items()}
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})


def without(hf, *keys):
    return {key: x for key, x in hf.items() if key not in keys}


LENGTHS = (9, 20, 21, 64, 100)
B_ = {**A, "n_group": 4, "topk_group": 2, "n_routed_experts": 16, "n_shared_experts": 2}
C_ = {**A, "hidden_size": 192, "q_lora_rank": 160, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 96,
      "v_head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 136,
      "index_head_dim": 64, "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
      "indexer_types": ["full", "shared", "full"]}
D_ = without(A, "indexer_types", "index_topk_freq", "index_skip_topk_offset")
G_ = {**A, "rope_parameters": {"rope_type": "default", "rope_theta": 8e6}}
SHORT = {**A, "num_hidden_layers": 4, "mlp_layer_types": ["dense"] + ["sparse"] * 3,
         "indexer_types": ["full", "shared", "full", "shared"]}
VARIANTS = {  # the model; lengths in float64, and in float32; settings of draw, and where positions begin
    "A": (A, LENGTHS, LENGTHS, {}),
    "A, small latents": (A, (45,), (45,), {"shrink": True}),
    "A, types by the rule": (without(A, "indexer_types"), (45,), (), {}),
    "A, a token that fills": ({**A, "pad_token_id": 7}, (21, 64), (21,), {}),
    "A, the indexer's pairs are halves": ({**A, "indexer_rope_interleave": False}, LENGTHS, (64,), {}),
    "B": (B_, LENGTHS, (21, 64), {}),
    "B, scores below 0": (B_, (64,), (64,), {"below": True}),
    "C": (C_, LENGTHS, (21, 64), {"rounded": True}),
    "D": (D_, LENGTHS, (21, 64), {}),
    "E": ({**A, "norm_topk_prob": False}, LENGTHS, (21, 64), {}),
    "F": ({**A, "attention_bias": True}, LENGTHS, (21, 64), {}),
    "G": (G_, LENGTHS, (21, 64), {"offset": 1000}),
    "G, far": (G_, (45,), (45,), {"offset": 999900}),
    "MTP": ({**SHORT, "mtp_weight": 0.3}, (9, 45), (45,), {}),
    "MTP, the indexer's loss": ({**SHORT, "mtp_weight": 0.3, "indexer_train": "kl"}, (9, 45), (45,), {}),
    "the indexer's loss": ({**SHORT, "indexer_train": "kl"}, (9, 20, 21, 64), (64,), {}),
    "the indexer's loss, by one layer": ({**SHORT, "indexer_train": "kl", "indexer_kl_target": "source_layer",
                                          "indexer_kl_coeff": 0.5}, (21, 64), (64,), {}),
    "the indexer's loss, dense": ({**SHORT, "indexer_train": "dense"}, (9, 45), (45,), {}),
    "the indexer's loss, halves, all full": ({**D_, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"],
                                              "indexer_rope_interleave": False, "indexer_train": "kl"}, (64,), (), {}),
}
LIMITS = {F8: (1e-12, 1e-12, 1e-11), F4: (2e-5, 2e-6, 2e-5)}  # of logits, losses, gradients


def worst_errors(found, truth):
    """Of logits, losses, gradients: max |x - truth| / max |truth|, and whose"""
    assert found.keys() >= truth.keys(), truth.keys() - found.keys()
    errors = {"logits": (0.0, ""), "loss": (0.0, ""), "grad": (0.0, "")}
    for name, x in truth.items():
        kind = {"index_loss": "loss"}.get(name, name.partition(".")[0])
        size = np.abs(x).max()
        error = np.abs(found[name].astype(F8) - x).max()
        errors[kind] = max(errors[kind], (error / size if size else float(error), name))
    return list(errors.values())


class Case:
    """One length of a variant: our model and what transformers says of it"""

    def __init__(self, truth, hf, T, dtype, options):
        self.dtype = dtype
        self.cfg, self.p, self.inputs, self.targets = case(hf, 2, T, options.get("shrink", False))
        if options.get("below"):
            self.p["selection_bias"] = self.p["selection_bias"] - F4(5)
        if options.get("rounded"):
            self.p = rounded(self.p, self.cfg)
        self.positions = np.arange(T)[None] + options["offset"] if "offset" in options else None
        with tempfile.TemporaryDirectory() as folder:
            save(folder, self.cfg, self.p)
            self.expected, self.seen = truth.probe(folder, self.cfg, self.p, self.inputs, self.targets, dtype,
                                                   self.positions)

    def compare(self, cfg=None, p=None):
        """Errors, what was chosen otherwise, the smallest gap"""
        cfg, p = cfg or self.cfg, {key: x.astype(self.dtype) for key, x in (p or self.p).items()}
        found, acts = ours(cfg, p, self.inputs, self.targets, self.positions)
        return worst_errors(found, self.expected), choices_differ(cfg, acts, self.seen), gap_of(cfg, acts, p)

    def compare_program(self, program):
        """Errors of a trainer's --probe"""
        with tempfile.TemporaryDirectory() as folder:
            save_own(folder, self.cfg, self.p)
            found = qwen36_checks.said_by(program, folder, self.inputs, self.targets)
        g = {name[len("grad."):]: x for name, x in found.items() if name.startswith("grad.")}
        g = trainer.from_disk(glm5.MODEL, g, self.cfg)
        g = trainer.to_disk(glm5.MODEL, g, replace(self.cfg, fused_experts=True))
        found.update({"grad." + name: x for name, x in g.items()})
        return worst_errors(found, self.expected)

    def is_good(self, errors, wrong):
        return not wrong and all(e <= limit for (e, _), limit in zip(errors, LIMITS[self.dtype]))


# ---------------------------------------------------------------------------------------------------------------------
# Traps: mistakes of others, each made in our model on purpose. Where none is seen, comparing is worth nothing.
# ---------------------------------------------------------------------------------------------------------------------
def halves_last(x, tables, function=ops.rope):
    n = x.shape[-1] - 2 * tables[0].shape[-1]
    return np.concatenate([x[..., :n], function(x[..., n:], *tables)], axis=-1)


def with_raw_latent(x, layer, cfg, a, where, forward=glm5.indexer_forward):
    normed, a["q_low_norm"] = a["q_low_norm"], a["q_low"]
    forward(x, layer, cfg, a, where)
    a["q_low_norm"] = normed


def without_relu(q, k, a):
    return exact.chain_dot(a.swapaxes(1, 2)[..., None], sparse.index_products(q, k), axis=1)


def with_bias_in_weights(z, router, bias=None, given=None):
    s = experts.scores_of(z, router) + bias
    taken = experts.choose(s, router)
    chosen = np.take_along_axis(s, taken, axis=-1)
    return s, taken.astype(np.int32), chosen / experts.below(chosen) * router.factor


def with_zeros_for_groups(c, router):
    return experts.largest(np.where(experts.staying(c, router), c, 0), router.k)


def turned_last(x, n_heads, cfg, where, function=ops.rope):
    return ops.turn_heads(x, n_heads, where.tables, function)


def turned_first(x, n_heads, tables, function, turn=ops.turn_first):
    return ops.turn_heads(x, n_heads, tables, function, turn)


def in_halves(x, n_heads, tables, function, turn=halves_last):
    return ops.turn_heads(x, n_heads, tables, function, turn)


def rms_with_bias(x, w, b, eps):
    out, rstd = ops.rmsnorm_forward(x, w, eps)
    return out + b, np.zeros_like(rstd), rstd


def as_if_full(cfg, p):
    """Every layer has an indexer, its weights those of the layer that chooses for it"""
    place = [cfg.full_layers.index(cfg.source(l)) for l in cfg.every_layer]
    borrowed = {key: x[place] for key, x in p.items() if key.startswith("index_")}
    return replace(cfg, full_layers=cfg.every_layer), {**p, **borrowed}


def changed(**changes):
    return lambda cfg, p: (replace(cfg, **changes), p)


def with_bias_in_bf16(cfg, p):
    return cfg, {**p, "selection_bias": fp8.to_bf16(p["selection_bias"])}


def scaled(name, factor):
    return lambda cfg, p: (cfg, {**p, name: factor * p[name]})


def patched(*patches):
    return [mock.patch.object(*patch) for patch in patches]


def softmax(z, router):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def whole_head(n, theta, dtype):
    return ops.rope_frequencies(40, theta, dtype)[:n // 2]


def seen_by_nobody_yet(scores, visible, topk):
    return sparse_choose(scores, np.ones_like(visible), topk)


sparse_choose = sparse.choose
TRAPS = {  # the number of section 6; the variant; a change of config and parameters, or patches
    "1: the indexer's pairs are halves": ("A", changed(indexer_rope_interleave=False)),
    "2: pairs of attention are halves": ("A", patched((glm5, "turn_heads", in_halves),
                                                      (glm5, "turn_last", halves_last))),
    "2, 23: no ReLU in the indexer": ("A", patched((sparse, "index_forward", without_relu))),
    "3: another eps of latents": ("A, small latents", changed(latent_norm_eps=1e-5)),
    "4: another eps of the indexer's keys": ("A, small latents", patched((glm5, "INDEX_NORM_EPS", 1e-5))),
    "4: RMSNorm of the indexer's keys": ("A", patched((glm5, "layernorm_forward", rms_with_bias))),
    "5: the indexer reads the raw latent": ("A", patched((glm5, "indexer_forward", with_raw_latent))),
    "6: the last channels of the indexer turn": ("A", patched((glm5, "index_turn", turned_last))),
    "6: the first channels of queries turn": ("A", patched((glm5, "turn_heads", turned_first))),
    "7: frequencies of a whole head": ("A", patched((glm5, "rope_frequencies", whole_head))),
    "8: theta 1e4": ("G", changed(rope_theta=1e4)),
    "9: scores divided by the root of the latent's size": ("A", patched(
        (latent, "attention_scale", lambda q: q.dtype.type(60) ** -0.5),
        (latent, "seen_weights", lambda q, k, seen: ops.seen_weights(q, k, seen, scale=q.dtype.type(60) ** -0.5)))),
    "10: shared layers choose for themselves": ("A", as_if_full),
    "12: the bias in the weights": ("A", patched((experts, "router_forward", with_bias_in_weights))),
    "12: no factor": ("A", changed(routed_scaling_factor=1.0)),
    "12: the factor on the shared expert": ("A", scaled("shared_down", F4(2.5))),
    "12: softmax for sigmoid": ("A", patched((experts, "scores_of", softmax))),
    "12: no bias at all": ("A", scaled("selection_bias", F4(0))),
    "13: the bias in bf16": ("B, scores below 0", with_bias_in_bf16),
    "17: the row of the token that fills learns": ("A, a token that fills", changed(pad_token_id=None)),
    "21: keys that are not there yet": ("A", patched((sparse, "choose", seen_by_nobody_yet))),
    "groups that do not stay have 0": ("B, scores below 0", patched((experts, "choose", with_zeros_for_groups))),
    "the weights are not renormalised": ("A", changed(norm_topk_prob=False)),
    "the loss of the indexer is taught by one layer": ("the indexer's loss", changed(indexer_kl_target="source_layer")),
}


def trap_promises(truth):
    """In float64, 64 positions: an error a million times that of the right model, or another choice"""
    out, cases = [], {}
    for name, (variant, mistake) in TRAPS.items():
        hf, _, _, options = VARIANTS[variant]
        if variant not in cases:
            cases[variant] = Case(truth, hf, 64, F8, options)
        one = cases[variant]
        with ExitStack() as stack:
            cfg, p = one.cfg, one.p
            if callable(mistake):
                cfg, p = mistake(cfg, p)
            else:
                for patch in mistake:
                    stack.enter_context(patch)
            errors, wrong, _ = one.compare(cfg, p)
        worst = max(e for e, _ in errors)
        out.append((f"trap {name}: seen, {worst:.0e}{', another choice' if wrong else ''}", worst > 1e-6))
    right = [one.is_good(*one.compare()[:2]) for one in cases.values()]
    return out + [("traps: and without them all is right", all(right))]


def truth_files(truth):
    """What transformers writes is what we wrote"""
    out = []
    for name in ("A", "F", "A, a token that fills"):
        cfg, p, *_ = case(VARIANTS[name][0], 2, 3)
        with tempfile.TemporaryDirectory() as folder:
            save(folder, cfg, p)
            theirs = os.path.join(folder, "theirs")
            truth.load(folder).save_pretrained(theirs)
            with open(os.path.join(theirs, "config.json")) as file:
                found = read_config(json.load(file), theirs, cfg.batch, cfg.seq_len)
            found, tensors = fit(found, exact.read_safetensors(os.path.join(theirs, "model.safetensors")))
            again = trainer.from_disk(glm5.MODEL, tensors, found)
            kept = [replace(found, steps=cfg.steps) == cfg] + [same_bits(again[key], x) for key, x in p.items()]
        out.append((f"{name}: the file that transformers writes", all(kept)))
    return out


def promise_of(title, one, errors, wrong):
    text = " ".join(f"{e:.0e}" for e, _ in errors)
    good = one.is_good(errors, wrong)
    return f"{title}: logits, losses, gradients within {text}" + ("" if good else f" {errors[2][1]} {wrong}"), good


def compare(program=None):
    """The reference; or a program, in float32"""
    try:
        truth = Truth()
    except ImportError as error:
        print(f"skipped: {error}")
        return 0
    out = []
    for name, (hf, lengths, rounded, options) in VARIANTS.items():
        for T, dtype in [(T, F8) for T in lengths] + [(T, F4) for T in rounded]:
            title = f"{name}, T {T}, {np.dtype(dtype)}"
            if program and dtype == F4 and "offset" not in options:
                one = Case(truth, hf, T, dtype, options)
                out.append(promise_of(title, one, one.compare_program(program), []))
            elif not program:
                one = Case(truth, hf, T, dtype, options)
                errors, wrong, gap = one.compare()
                out.append(promise_of(f"{title}, gap {gap:.0e}", one, errors, wrong))
    return exact.report(out + ([] if program else trap_promises(truth) + truth_files(truth)))
