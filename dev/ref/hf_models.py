"""
The models of Hugging Face transformers that check_hf.py compares with: tiny random ones, their logits in float64, and the
forms in which their folders occur. One class per architecture, used as it stands. Needs torch and transformers.
"""
import json
import os
import shutil
from collections import namedtuple
from unittest import mock

import torch
from safetensors.torch import save_file
from transformers import (GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM, MixtralConfig,
                          MixtralForCausalLM)
from transformers.models.mamba import modeling_mamba
from transformers.models.mixtral import modeling_mixtral
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


def copy_folder(parent, name, tensors, **changes):
    """A folder beside parent/hf with these tensors and its config.json with changes; None takes a key out."""
    folder = os.path.join(parent, name)
    shutil.copytree(os.path.join(parent, "hf"), folder)
    save_file(tensors, os.path.join(folder, "model.safetensors"))
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = {**json.load(file), **changes}
    with open(path, "w") as file:
        json.dump({key: value for key, value in config.items() if value is not None}, file)
    return name


def parameter(p):
    return p.detach().contiguous()


def tensors_of(model, of=parameter):
    """Every parameter, or what `of` takes from it (its gradient), by its name on disk"""
    return {name: of(p) for name, p in model.named_parameters()}


class GPT2:
    tensors = staticmethod(tensors_of)
    REFERENCE = "gpt2.py"
    LOSSES = ("loss",)         # names of the loss in a probe
    HAS_BIN = True             # its trainer has --export-bin
    HEADS = ()                 # and no --head
    TINY = dict(model_type="gpt2", n_positions=20, vocab_size=257, n_layer=2, n_head=2, n_embd=24)

    # vocabulary, positions, layers, heads, channels; rows and positions of the batch; spread of the matrices
    Case = namedtuple("Case", "V maxT L NH C B T spread")
    CASES = [
        Case(97, 32, 2, 2, 32, 4, 16, 0.1),   # the sizes of the golden run
        Case(131, 19, 3, 3, 33, 3, 13, 0.3),  # sizes that divide nothing, peaked attention
        Case(257, 7, 1, 1, 5, 2, 7, 0.3),     # one head, V one above a multiple of 128, T = maxT
        Case(128, 40, 2, 5, 40, 1, 33, 0.2),  # a vocabulary that needs no padding, one row
        Case(11, 3, 4, 2, 14, 5, 1, 0.3),     # one position: softmax of one element
    ]

    @classmethod
    def text_case(cls, V):
        """Sizes of a model that writes text."""
        return cls.Case(V, 96, 2, 2, 32, 1, 1, 0.2)

    @staticmethod
    def make_model(case):
        """A random model in float32."""
        config = GPT2Config(vocab_size=case.V, n_positions=case.maxT, n_embd=case.C, n_layer=case.L, n_head=case.NH,
                            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
                            attn_implementation="eager")
        model = GPT2LMHeadModel(config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.normal_(0.0, case.spread)
                if ".ln_" in name and name.endswith("weight"):
                    p.add_(1.0)
        return model

    @staticmethod
    def load(folder):
        """The model of a folder, and the report of what was missing or too much."""
        return GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32,
                                               output_loading_info=True)

    @staticmethod
    def logits(model, inputs):
        """In float64, which the model becomes."""
        return model.double().eval()(input_ids=inputs.long()).logits

    @staticmethod
    def write_variants(parent, model):
        """The same parameters in other forms that transformers or its older versions leave behind: (what, folder)."""
        tensors = tensors_of(model)
        variants = {
            "names without transformer.": {name.removeprefix("transformer."): x for name, x in tensors.items()},
            "lm_head.weight a second time": {**tensors, "lm_head.weight": tensors["transformer.wte.weight"].clone()},
            "attention masks of old versions": {**tensors,
                                                "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
                                                "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)},
        }
        for number, (name, variant) in enumerate(variants.items()):
            yield name, copy_folder(parent, f"variant{number}", variant)


def rms_norm(norm, x):
    """The forward of MambaRMSNorm and MixtralRMSNorm without their casts to float32"""
    return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))


class Mamba:
    tensors = staticmethod(tensors_of)
    REFERENCE = "mamba_hpn.py"
    LOSSES = ("loss",)
    HAS_BIN = False
    HEADS = ("hpn", "hpn-softmax")  # that transformers does not know
    TINY = dict(model_type="mamba", vocab_size=257, num_hidden_layers=2, hidden_size=24, state_size=4, conv_kernel=4)

    # vocabulary, layers, channels, expand, states, taps, rank of dt, biases of conv1d and of in_proj and out_proj, tied
    # embeddings, epsilon of the norms; rows and positions of the batch; spread of the matrices
    Case = namedtuple("Case", "V L M expand NS K R conv_bias bias tied eps B T spread")
    CASES = [
        Case(61, 2, 20, 2, 4, 4, "auto", True, False, True, 1e-5, 2, 11, 0.2),   # the sizes of a golden run
        Case(131, 3, 33, 2, 5, 3, "auto", False, True, True, 1e-3, 3, 13, 0.3),  # sizes that divide nothing
        Case(257, 1, 19, 3, 1, 2, 5, True, True, False, 1e-5, 2, 7, 0.3),        # one state, a head of its own
        Case(128, 5, 40, 1, 16, 5, 1, True, False, False, 1e-3, 1, 33, 0.2),     # no expansion, 1 row, more taps
        Case(11, 4, 18, 2, 3, 4, 2, False, False, True, 1e-5, 5, 1, 0.3),        # one position: one tap of each channel
    ]

    @classmethod
    def text_case(cls, V):
        """Sizes of a model that writes text; no bias in in_proj, with which transformers' padding is not nothing."""
        return cls.Case(V, 2, 24, 2, 4, 4, "auto", True, False, True, 1e-5, 1, 1, 0.2)

    @staticmethod
    def make_model(case):
        """A random model in float32: A, delta and D around their usual start values."""
        config = MambaConfig(vocab_size=case.V, num_hidden_layers=case.L, hidden_size=case.M, expand=case.expand,
                             state_size=case.NS, conv_kernel=case.K, time_step_rank=case.R, use_conv_bias=case.conv_bias,
                             use_bias=case.bias, tie_word_embeddings=case.tied, layer_norm_epsilon=case.eps)
        model = MambaForCausalLM(config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.normal_(0.0, case.spread)
                if name.endswith(("norm.weight", "norm_f.weight", ".D")):
                    p.add_(1.0)
                elif name.endswith("A_log"):
                    p.add_(torch.arange(1.0, case.NS + 1).log())
                elif name.endswith("dt_proj.bias"):
                    p.sub_(1.5)
        return model

    @staticmethod
    def load(folder):
        """The model of a folder, and the report of what was missing or too much."""
        return MambaForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)

    @staticmethod
    def logits(model, inputs):
        """In float64, which the model becomes; transformers' own casts to float32 are switched off."""
        model = model.double().eval()
        for layer in model.backbone.layers:
            layer.residual_in_fp32 = False
        with (mock.patch.object(torch.Tensor, "float", lambda x: x),
              mock.patch.object(modeling_mamba.MambaRMSNorm, "forward", rms_norm)):
            logits = model(input_ids=inputs.long(), use_cache=False).logits
        assert logits.dtype == torch.float64
        return logits

    @staticmethod
    def write_variants(parent, model):
        """The same parameters as transformers' older versions and converted files have them: (what, folder)."""
        tensors, M, rank = tensors_of(model), model.config.hidden_size, model.config.time_step_rank
        embedding = "backbone.embeddings.weight"
        renamed = {name.replace("embeddings", "embedding"): x for name, x in tensors.items()}
        yield "backbone.embedding.weight, mamba_ssm's name", copy_folder(parent, "renamed", renamed)
        if model.config.tie_word_embeddings:
            twice = {**tensors, "lm_head.weight": tensors[embedding].clone()}
            yield "lm_head.weight a second time", copy_folder(parent, "twice", twice)
        yield "config.json of the published models: more keys", copy_folder(
            parent, "published", tensors, d_model=M, d_inner=model.config.intermediate_size, rms_norm=True, ssm_cfg={},
            n_layer=model.config.num_hidden_layers, fused_add_norm=True, pad_vocab_size_multiple=8)
        yield "config.json without intermediate_size", copy_folder(parent, "no_size", tensors, intermediate_size=None)
        if rank == -(-M // 16):
            yield "config.json with time_step_rank auto", copy_folder(parent, "auto", tensors, time_step_rank="auto")


def mixtral_tensors(model, of=parameter):
    """By their names on disk, where each expert has tensors of its own; save_pretrained cuts them so, too."""
    out = {}
    for name, x in tensors_of(model, of).items():
        name = name.replace(".mlp.", ".block_sparse_moe.")
        experts = name.rpartition(".")[0]
        if name.endswith("gate_up_proj"):
            out.update({f"{experts}.{e}.{w}.weight": part.contiguous() for e, both in enumerate(x)
                        for w, part in zip(("w1", "w3"), both.chunk(2))})
        elif name.endswith("down_proj"):
            out.update({f"{experts}.{e}.w2.weight": part.contiguous() for e, part in enumerate(x)})
        else:
            out[name] = x
    return out


def rotary_embedding(rotary, x, position_ids):
    """MixtralRotaryEmbedding.forward in float64"""
    config = rotary.config
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = position_ids[..., None] / config.rope_parameters["rope_theta"] ** exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class Mixtral:
    tensors = staticmethod(mixtral_tensors)
    REFERENCE = "moe.py"
    LOSSES = ("loss", "cross_entropy")  # the same: these folders ask for no loss of routers
    HAS_BIN = False
    HEADS = ()
    TINY = dict(model_type="mixtral", vocab_size=257, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=6, intermediate_size=20, num_local_experts=4, num_experts_per_tok=2,
                max_position_embeddings=64)

    # vocabulary, channels, layers, heads, heads of k and v, channels of a head, width of an expert, experts, those of a
    # position (not 1: its weight is 1 in transformers, in ours the score), tied embeddings, epsilon of the norms, base
    # and alpha of RoPE; rows and positions of the batch; spread of the matrices
    Case = namedtuple("Case", "V D L H KV HS F E k tied eps base alpha B T spread")
    CASES = [
        Case(67, 32, 2, 4, 1, 8, 12, 4, 2, False, 1e-6, 1e4, 1, 2, 8, 0.2),    # the sizes of a golden run
        Case(131, 20, 3, 6, 2, 10, 17, 5, 3, True, 1e-3, 1e4, 8, 3, 13, 0.3),  # sizes that divide nothing, scaled RoPE
        Case(257, 19, 1, 3, 3, 4, 33, 7, 4, False, 1e-5, 500.0, 2.5, 2, 7, 0.3),  # a head for each of k and v
        Case(128, 24, 4, 4, 2, 2, 8, 3, 3, True, 1e-5, 1e6, 1, 1, 33, 0.2),    # one pair in a head, all experts, 1 row
        Case(11, 14, 2, 2, 1, 14, 5, 16, 2, False, 1e-3, 1e4, 1, 2, 2, 0.3),   # 4 positions for 16 experts
    ]

    @classmethod
    def text_case(cls, V):
        """Sizes of a model that writes text."""
        return cls.Case(V, 24, 2, 4, 2, 6, 20, 4, 2, True, 1e-5, 1e4, 1, 1, 1, 0.2)

    @staticmethod
    def make_model(case):
        """A random model in float32."""
        theta = case.base * case.alpha ** (case.HS / (case.HS - 2)) if case.alpha != 1 else case.base
        config = MixtralConfig(vocab_size=case.V, hidden_size=case.D, num_hidden_layers=case.L,
                               num_attention_heads=case.H, num_key_value_heads=case.KV, head_dim=case.HS,
                               intermediate_size=case.F, num_local_experts=case.E, num_experts_per_tok=case.k,
                               tie_word_embeddings=case.tied, rms_norm_eps=case.eps, max_position_embeddings=96,
                               bos_token_id=0, eos_token_id=0,
                               rope_parameters={"rope_type": "default", "rope_theta": theta},
                               experts_implementation="eager")
        model = MixtralForCausalLM(config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.normal_(0.0, case.spread)
                if name.endswith("norm.weight"):
                    p.add_(1.0)
        return model

    @staticmethod
    def load(folder):
        """The model of a folder, and the report of what was missing or too much."""
        return MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager",
                                                  output_loading_info=True)

    @staticmethod
    def logits(model, inputs):
        """In float64, which the model becomes; transformers' own casts to float32 are switched off."""
        model = model.double().eval()
        with (mock.patch.object(torch.Tensor, "float", lambda x: x),
              mock.patch.object(modeling_mixtral.MixtralRMSNorm, "forward", rms_norm),
              mock.patch.object(modeling_mixtral.MixtralRotaryEmbedding, "forward", rotary_embedding)):
            logits = model(input_ids=inputs.long(), use_cache=False).logits
        assert logits.dtype == torch.float64
        return logits

    @staticmethod
    def write_variants(parent, model):
        """The same parameters as transformers' older versions and others have them: (what, folder)."""
        tensors, config = mixtral_tensors(model), model.config
        yield "config.json with rope_theta outside rope_parameters", copy_folder(
            parent, "theta", tensors, rope_parameters=None, rope_theta=config.rope_parameters["rope_theta"])
        if config.head_dim * config.num_attention_heads == config.hidden_size:
            yield "config.json without head_dim", copy_folder(parent, "no_size", tensors, head_dim=None)
        if config.tie_word_embeddings:
            twice = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
            yield "lm_head.weight a second time", copy_folder(parent, "twice", twice)


MODELS = {"gpt2": GPT2, "mamba": Mamba, "moe": Mixtral}
