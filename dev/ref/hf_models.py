"""
The models of Hugging Face transformers that check_hf.py compares with: tiny random ones, their logits in float64, and the
forms in which their folders occur. One class per architecture, used as it stands. Needs torch and transformers.
"""
import contextlib
import json
import os
import re
import shutil
from collections import namedtuple
from itertools import product, starmap
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (AutoConfig, AutoModelForCausalLM, DeepseekV4Config, DeepseekV4ForCausalLM, GlmMoeDsaConfig,
                          GlmMoeDsaForCausalLM, GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM,
                          MixtralConfig, MixtralForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig)
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa
from transformers.models.llama import modeling_llama
from transformers.models.mamba import modeling_mamba
from transformers.models.mistral import modeling_mistral
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.utils import logging

import fp8
import glm5
import glm5_checks
import glm5_truth
import qwen36_checks
import trainer
from deepseek_v4_checks import MIDDLE, ODD, PLAIN, RATES, some
from deepseek_v4_config import CSA, HCA, official_tensors
from deepseek_v4_numbers import TINY as V4_TINY
from hf_text import STYLES

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


class Architecture:
    """What most of them have in common"""
    tensors = staticmethod(tensors_of)
    one_by_one = staticmethod(dict)  # tensors of a file or a probe by the names that `tensors` gives them
    LOSSES = ("loss",)               # names in a probe: the loss, and the cross entropy in it
    HAS_BIN = False                  # has its trainer --export-bin?
    HEADS = ()                       # and --head?
    STYLES = STYLES                  # of tokenizers that AutoTokenizer has for this model_type
    NEAR = ()                        # cases in which scores nearly tie: a trainer is told what transformers chooses
    FILLS = True                     # do texts of a batch that are filled up on the left say what each says alone?

    @staticmethod
    def more_loss(model):
        """What the last forward of the model adds to the cross entropy"""
        return 0.0

    @staticmethod
    def choices(model, inputs):
        """What its layers choose, as a probe has it; and the smallest gap between what is chosen and what is not, or None"""
        return {}, None

    @staticmethod
    def halve(model, dtype):
        """The model in bf16 or half, with what stays in float32 as published files have it"""
        return model.to(dtype)

    @staticmethod
    def write_others(parent, model):
        """Folders that hold another model than this one, or the same by other names: (what, folder)"""
        return ()


class GPT2(Architecture):
    REFERENCE = "gpt2.py"
    HAS_BIN = True
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
    """The forward of MambaRMSNorm, MixtralRMSNorm and all like them without their casts to float32"""
    return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))


class Mamba(Architecture):
    REFERENCE = "mamba_hpn.py"
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


def split_experts(tensors, gate, up, down):
    """Tensors that hold all experts of a layer cut into tensors of their own, as save_pretrained does"""
    out = {}
    for name, x in tensors.items():
        experts, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            out.update({f"{experts}.{e}.{w}.weight": part.contiguous() for e, both in enumerate(x)
                        for w, part in zip((gate, up), both.chunk(2))})
        elif last == "down_proj":
            out.update({f"{experts}.{e}.{down}.weight": part.contiguous() for e, part in enumerate(x)})
        else:
            out[name] = x
    return out


def mixtral_tensors(model, of=parameter):
    """By their names on disk"""
    tensors = {name.replace(".mlp.", ".block_sparse_moe."): x for name, x in tensors_of(model, of).items()}
    return split_experts(tensors, "w1", "w3", "w2")


def rotary_embedding(rotary, x, position_ids):
    """MixtralRotaryEmbedding.forward, and that of all like it, in float64"""
    config = rotary.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    angles = position_ids[..., None] / config.rope_parameters["rope_theta"] ** exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class Mixtral(Architecture):
    tensors = staticmethod(mixtral_tensors)
    REFERENCE = "moe.py"
    LOSSES = ("loss", "cross_entropy")  # the same: these folders ask for no loss of routers
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


def softmax(x, dim, dtype=None):
    """torch.nn.functional.softmax without the cast"""
    return torch.softmax(x, dim)


def real(x):
    """torch.Tensor.float without the cast: counts become float64"""
    return x if x.is_floating_point() else x.double()


def split_qwen_experts(tensors):
    return split_experts(tensors, "gate_proj", "up_proj", "down_proj")


class Qwen(Architecture):
    """Five architectures: those of train_qwen3"""
    one_by_one = staticmethod(split_qwen_experts)
    REFERENCE = "qwen.py"
    TINY = dict(model_type="qwen3_moe", vocab_size=257, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, head_dim=10, intermediate_size=20, num_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=12, mlp_only_layers=[1], max_position_embeddings=64)
    MODULES = {"qwen2": (modeling_qwen2, "Qwen2"), "qwen3": (modeling_qwen3, "Qwen3"),
               "qwen3_moe": (modeling_qwen3_moe, "Qwen3Moe"), "mistral": (modeling_mistral, "Mistral"),
               "llama": (modeling_llama, "Llama")}
    LOSSES = ("loss", "cross_entropy")

    # model_type, vocabulary, channels, layers, heads, heads of k and v, channels of a head, width of an MLP; rows and
    # positions of the batch; spread of the matrices; other keys of config.json
    Case = namedtuple("Case", "type V D L H KV HS F B T spread more")
    CASES = [
        Case("qwen2", 67, 32, 2, 4, 2, 8, 48, 2, 8, 0.2, {"tie_word_embeddings": True}),
        Case("qwen2", 131, 33, 3, 3, 3, 10, 41, 3, 13, 0.2, {"rms_norm_eps": 1e-3}),  # sizes that divide nothing
        Case("qwen2", 61, 24, 3, 4, 2, 6, 17, 2, 16, 0.2,                             # layers 1 and 2 slide
             {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        Case("qwen2", 61, 24, 2, 4, 2, 6, 17, 1, 9, 0.2,                              # a window that nothing sees
             {"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0}),
        Case("qwen3", 97, 20, 2, 4, 2, 16, 31, 2, 11, 0.2,                            # heads wider than the stream
             {"tie_word_embeddings": True}),
        Case("qwen3", 257, 19, 3, 6, 1, 6, 23, 2, 7, 0.3, {"attention_bias": True}),  # one head for k and v
        Case("qwen3", 128, 16, 3, 3, 3, 4, 33, 1, 33, 0.2,                            # layers 0 and 2 slide
             {"use_sliding_window": True, "sliding_window": 3, "rope_parameters": {"rope_type": "default",
              "rope_theta": 1e6}, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
        Case("qwen3", 11, 14, 2, 2, 1, 128, 9, 5, 1, 0.2, {}),       # one position; a head as wide as the class has it
        Case("qwen3_moe", 67, 32, 2, 4, 2, 8, 20, 2, 8, 0.2,         # the loss of the routers in the loss
             {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True,
              "output_router_logits": True, "router_aux_loss_coef": 0.05}),
        Case("qwen3_moe", 131, 21, 3, 3, 1, 10, 17, 3, 13, 0.3,      # weights that do not add up to 1; an MLP
             {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 7, "norm_topk_prob": False,
              "mlp_only_layers": [0], "attention_bias": True}),
        Case("qwen3_moe", 61, 24, 5, 4, 2, 6, 19, 2, 16, 0.2,        # experts in layers 1 and 3, windows in all
             {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 13, "norm_topk_prob": True,
              "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 4, "output_router_logits": True,
              "router_aux_loss_coef": 0.5}),
        Case("qwen3_moe", 29, 14, 2, 2, 2, 14, 5, 2, 3, 0.3,         # one expert a position, weighed by its score
             {"num_experts": 7, "num_experts_per_tok": 1, "moe_intermediate_size": 9, "tie_word_embeddings": True}),
        Case("qwen3_moe", 29, 14, 2, 4, 1, 6, 11, 3, 5, 0.3,         # every expert; every layer but the last
             {"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 9, "norm_topk_prob": True,
              "mlp_only_layers": [1]}),
        Case("qwen3_moe", 29, 14, 2, 4, 1, 6, 11, 3, 5, 0.2,         # MLPs alone
             {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 9, "decoder_sparse_step": 2,
              "mlp_only_layers": [1]}),
        Case("mistral", 67, 24, 2, 4, 2, 6, 33, 2, 1, 0.2, {"sliding_window": 5}),
        Case("mistral", 67, 24, 2, 4, 2, 6, 33, 2, 7, 0.2, {"sliding_window": 5}),   # its window is crossed
        Case("mistral", 67, 24, 2, 4, 2, 6, 33, 2, 16, 0.2, {"sliding_window": 5}),
        Case("mistral", 67, 24, 2, 4, 2, 6, 33, 2, 33, 0.2, {"sliding_window": 5}),
        Case("mistral", 128, 22, 2, 6, 3, 8, 33, 1, 21, 0.2, {"sliding_window": None, "tie_word_embeddings": True}),
        Case("llama", 131, 30, 3, 6, 2, 4, 41, 3, 13, 0.2, {"rms_norm_eps": 1e-5}),
        Case("llama", 67, 28, 2, 4, 4, 10, 19, 2, 17, 0.2, {"tie_word_embeddings": True, "attention_bias": True}),
    ]

    @classmethod
    def text_case(cls, V):
        """Sizes of a model that writes text, longer than its window"""
        return cls.Case("mistral", V, 24, 2, 4, 2, 6, 20, 1, 1, 0.2, {"sliding_window": 5})

    @classmethod
    def make_model(cls, case):
        """A random model in float32."""
        more = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **case.more}
        config = AutoConfig.for_model(case.type, vocab_size=case.V, hidden_size=case.D, num_hidden_layers=case.L,
                                      num_attention_heads=case.H, num_key_value_heads=case.KV, head_dim=case.HS,
                                      intermediate_size=case.F, max_position_embeddings=96, bos_token_id=0,
                                      eos_token_id=0, **more)
        model = AutoModelForCausalLM.from_config(config, **cls.plain(case.type))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.normal_(0.0, case.spread)
                if name.endswith("norm.weight"):
                    p.add_(1.0)
        return model

    @staticmethod
    def plain(model_type):
        """Options for the plain loops, which are exact in float64"""
        experts = {"experts_implementation": "eager"} if model_type == "qwen3_moe" else {}
        return {"attn_implementation": "eager", "dtype": torch.float32, **experts}

    @classmethod
    def load(cls, folder):
        """The model of a folder, and the report of what was missing or too much."""
        model_type = AutoConfig.from_pretrained(folder).model_type
        return AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **cls.plain(model_type))

    @staticmethod
    def tensors(model, of=parameter):
        """By their names on disk, where each expert has tensors of its own"""
        tensors = tensors_of(model, of)
        return split_qwen_experts(tensors) if model.config.model_type == "qwen3_moe" else tensors

    @classmethod
    def logits(cls, model, inputs):
        """In float64, which the model becomes; transformers' own casts to float32 are switched off."""
        module, name = cls.MODULES[model.config.model_type]
        model = model.double().eval()
        with (mock.patch.object(torch.Tensor, "float", real),
              mock.patch.object(torch.nn.functional, "softmax", softmax),
              mock.patch.object(getattr(module, name + "RMSNorm"), "forward", rms_norm),
              mock.patch.object(getattr(module, name + "RotaryEmbedding"), "forward", rotary_embedding)):
            out = model(input_ids=inputs.long(), use_cache=False)
        assert out.logits.dtype == torch.float64
        model.aux_loss = getattr(out, "aux_loss", None)
        return out.logits

    @staticmethod
    def more_loss(model):
        return 0.0 if model.aux_loss is None else model.config.router_aux_loss_coef * model.aux_loss

    @classmethod
    def write_variants(cls, parent, model):
        """The same parameters as other versions, other programs and published files have them: (what, folder)."""
        tensors, config = cls.tensors(model), model.config
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        yield "config.json with rope_theta outside rope_parameters", copy_folder(
            parent, "theta", tensors, rope_parameters=None, rope_theta=config.rope_parameters["rope_theta"])
        yield "names without model.", copy_folder(
            parent, "short", {name.removeprefix("model."): x for name, x in tensors.items()})
        yield "rotary_emb.inv_freq of old versions", copy_folder(
            parent, "inv_freq", {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)})
        usual = 128 if config.model_type == "qwen3" else config.hidden_size // config.num_attention_heads
        if config.head_dim == usual:
            yield "config.json without head_dim", copy_folder(parent, "no_size", tensors, head_dim=None)
        if config.tie_word_embeddings:
            twice = {**tensors, head: tensors[embedding].clone()}
            yield "lm_head.weight a second time", copy_folder(parent, "twice", twice)
            alone = {name: x for name, x in twice.items() if name != embedding}
            yield "lm_head.weight alone", copy_folder(parent, "alone", alone)
        if config.model_type in ("qwen2", "qwen3") and not config.use_sliding_window:
            yield "config.json with windows that are not used", copy_folder(
                parent, "inert", tensors, sliding_window=2, max_window_layers=1, layer_types=None)
        if config.model_type == "qwen3_moe":
            yield "experts of a layer as one tensor", copy_folder(parent, "fused", tensors_of(model))
            yield "config.json with num_local_experts", copy_folder(
                parent, "local", tensors, num_experts=None, num_local_experts=config.num_experts)
            yield "config.json with num_experts", copy_folder(
                parent, "published", tensors, num_experts=config.num_experts, num_local_experts=None)

    @classmethod
    def write_others(cls, parent, model):
        if model.config.model_type == "qwen3_moe":
            yield "experts of a layer as one tensor, read by both", copy_folder(parent, "both", tensors_of(model))
        if model.config.tie_word_embeddings:
            tensors = cls.tensors(model)
            other = {**tensors, "lm_head.weight": 2.0 * tensors["model.embed_tokens.weight"].flip(0)}
            yield "tied by config.json, with another lm_head.weight", copy_folder(parent, "other", other)


@contextlib.contextmanager
def lifted():
    """float32 is float64 as long as this lasts, and a cast to it none"""
    histc, single = torch.histc, torch.float32
    with (mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
          mock.patch.object(torch, "histc", lambda x, **options: histc(x.to(single), **options).double()),
          mock.patch.object(torch, "float32", torch.float64), mock.patch.object(torch, "float", torch.float64)):
        yield


class Qwen36(Architecture):
    """Layers with a delta rule and layers with gated attention, each with experts of which one sees every position"""
    more_loss = staticmethod(Qwen.more_loss)
    STYLES = ("bytes", "qwen2")
    REFERENCE = "qwen36.py"
    LOSSES = ("loss", "cross_entropy")
    TINY = {**qwen36_checks.SMALL, "vocab_size": 257}

    # vocabulary; rows and positions of the batch; spread of the matrices, and of the embedding; seed; changes to the
    # text model of qwen36_checks.py, whose value heads are twice as many as its key heads. Seeds, and in long rows
    # epsilons of the norms, are such that float is exact enough: where a query is almost orthogonal to all keys, the
    # gated norm blows the error up. All gradients of the reference are within 1e-5.
    Case = namedtuple("Case", "V B T spread embedding seed more")
    CASES = [
        Case(256, 3, 1, 0.15, 1.0, 1, {}),    # one position: nothing that fades, one tap, a softmax of one element
        Case(256, 2, 3, 0.15, 1.0, 0, {}),    # fewer positions than taps
        Case(256, 1, 63, 0.15, 1.0, 0, {"rms_norm_eps": 1e-5}),  # around a chunk of the delta rule
        Case(256, 1, 64, 0.15, 1.0, 4, {"rms_norm_eps": 1e-5}),
        Case(256, 1, 65, 0.15, 1.0, 12, {}),
        Case(256, 1, 130, 0.15, 1.0, 4, {"rms_norm_eps": 1e-5}),  # three chunks
        Case(131, 1, 70, 0.15, 1.0, 1, {"layer_types": ["linear_attention"] * 4, "rms_norm_eps": 1e-4}),
        Case(131, 2, 33, 0.15, 0.2, 0, {"layer_types": ["full_attention"] * 4}),
        Case(67, 2, 9, 0.15, 1.0, 0, {"linear_num_value_heads": 2}),
        Case(67, 1, 66, 0.15, 1.0, 4, {       # three value heads of a key head; half of a head turns, slower
            "linear_num_value_heads": 6, "layer_types": ["full_attention", *["linear_attention"] * 3],
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5,
                                "mrope_interleaved": True, "mrope_section": [3, 3, 2]}}),
        Case(67, 2, 12, 0.15, 1.0, 1, {"output_router_logits": True}),  # the loss of the routers in the loss
        Case(128, 2, 11, 0.15, 0.3, 11, {"tie_word_embeddings": True}),
        Case(47, 3, 13, 0.2, 0.2, 0, qwen36_checks.SMALL),              # sizes that divide nothing
        Case(29, 1, 67, 0.2, 0.2, 1, {**qwen36_checks.SMALL, "tie_word_embeddings": True, "output_router_logits": True,
                                      "router_aux_loss_coef": 0.5}),
        Case(11, 1, 4, 0.2, 0.2, 1, {**qwen36_checks.SMALL, "num_experts": 16}),  # experts that nobody chooses
        Case(11, 2, 5, 0.2, 0.2, 0, {**qwen36_checks.SMALL, "num_experts": 3}),   # all experts
        Case(256, 2, 20, 0.02, 0.02, 0, {}),    # where transformers starts: epsilon rules the gated norm...
        Case(256, 1, 9, 0.005, 0.02, 0, {}),    # ...and the l2norm
    ]

    @classmethod
    def text_case(cls, V):
        """Sizes of a model that writes text: with those of SMALL transformers' fast experts refuse to run."""
        return cls.Case(V, 1, 1, 0.2, 0.2, 0, {"tie_word_embeddings": True})

    @classmethod
    def make_model(cls, case):
        """A random model in float32: no gain is 1, no bias and no decay what it starts with."""
        config = Qwen3_5MoeTextConfig(**{**qwen36_checks.TINY, **case.more, "vocab_size": case.V}, bos_token_id=0,
                                      eos_token_id=0)
        model = Qwen3_5MoeForCausalLM._from_config(config, **Qwen.plain("qwen3_moe"))
        torch.manual_seed(case.seed)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.normal_(0.0, case.embedding if "embed_tokens" in name else case.spread if p.dim() > 1 else 0.2)
                if name.endswith(("linear_attn.norm.weight", "dt_bias")):
                    p.add_(1.0)
        return model

    @staticmethod
    def load(folder):
        """The model of a folder, and the report of what was missing or too much."""
        return Qwen3_5MoeForCausalLM.from_pretrained(folder, output_loading_info=True, **Qwen.plain("qwen3_moe"))

    @staticmethod
    def wide(model):
        """In float64, with frequencies of RoPE that were never rounded"""
        model = model.double().eval()
        rotary = model.model.rotary_emb
        n = 2 * len(rotary.inv_freq)
        exponents = torch.arange(0, n, 2, dtype=torch.float64) / n
        rotary.inv_freq = 1.0 / model.config.rope_parameters["rope_theta"] ** exponents
        return model

    @classmethod
    def logits(cls, model, inputs, **more):
        """In float64, which the model becomes; transformers' own casts to float32 are switched off."""
        model = cls.wide(model)
        with lifted():
            out = model(input_ids=inputs.long(), use_cache=False, **more)
        assert out.logits.dtype == torch.float64
        model.aux_loss = out.aux_loss
        return out.logits


    @staticmethod
    def tensors(model, of=parameter):
        """By their names on disk, where each expert has tensors of its own"""
        return split_qwen_experts(tensors_of(model, of))

    @staticmethod
    def one_by_one(tensors):
        """Each expert apart, no name of a model with vision, convolutions (C, 1, K)"""
        named = {name.replace("model.language_model.", "model."): x for name, x in tensors.items()}
        return {name: x[:, None] if name.endswith("conv1d.weight") and x.dim() == 2 else x
                for name, x in split_qwen_experts(named).items()}

    @classmethod
    def write_variants(cls, parent, model):
        """The same parameters as other versions, other programs and published files have them: (what, folder)."""
        tensors, config = cls.tensors(model), model.config
        yield "experts of a layer as one tensor", copy_folder(parent, "fused", tensors_of(model))
        yield "names and config.json of a model with vision", cls.write_nested(parent, "nested", tensors)
        yield "conv1d.weight of two axes", copy_folder(
            parent, "flat", {name: x.flatten(1) if "conv1d" in name else x for name, x in tensors.items()})
        turn = config.rope_parameters
        yield "config.json with rope_theta, partial_rotary_factor outside rope_parameters", copy_folder(
            parent, "theta", tensors, rope_parameters=None, rope_theta=turn["rope_theta"],
            partial_rotary_factor=turn["partial_rotary_factor"])
        full = [l for l, kind in enumerate(config.layer_types) if kind == "full_attention"]
        interval = full[0] + 1 if full else config.num_hidden_layers + 1
        if full == list(range(interval - 1, config.num_hidden_layers, interval)):
            yield "config.json with full_attention_interval, without layer_types", copy_folder(
                parent, "interval", tensors, layer_types=None, full_attention_interval=interval)
        if full == list(range(3, config.num_hidden_layers, 4)):
            yield "config.json without full_attention_interval and layer_types", copy_folder(
                parent, "no_interval", tensors, layer_types=None)
        if config.tie_word_embeddings:
            twice = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
            yield "lm_head.weight a second time", copy_folder(parent, "twice", twice)

    @staticmethod
    def write_nested(parent, name, tensors):
        """The text of a model with vision"""
        with open(os.path.join(parent, "hf", "config.json")) as file:
            text = json.load(file)
        top = {**dict.fromkeys(text), "architectures": ["Qwen3_5MoeForConditionalGeneration"],
               "model_type": "qwen3_5_moe", "text_config": text,
               "tie_word_embeddings": text.get("tie_word_embeddings", False)}
        named = {key.replace("model.", "model.language_model.", 1): x for key, x in tensors.items()}
        return copy_folder(parent, name, named, **top)

    @classmethod
    def write_others(cls, parent, model):
        fused = tensors_of(model)
        yield "experts of a layer as one tensor, read by both", copy_folder(parent, "both", fused)
        yield "names and config.json of a model with vision, read by both", cls.write_nested(parent, "vision", fused)


SITES = ("_hc.fn", "_hc.base", "_hc.scale", "hc_head.hc_fn", "hc_head.hc_base", "hc_head.hc_scale")


class DeepseekV4(Architecture):
    """Several streams, attention over windows and entries, experts of which a table decides in some layers"""
    STYLES = ("bytes", "qwen2")
    FILLS = False  # entries are of tokens in places that filling shifts
    REFERENCE = "deepseek_v4.py"
    LOSSES = ("loss", "cross_entropy")
    TINY = {**some("SCH", 1), "vocab_size": 257}

    # Layers, S with a window, C with entries that an indexer chooses, H with all entries, and how many of them go by
    # tables; none: the model of deepseek_v4_numbers.py. Vocabulary; rows and positions of the batch; spread of the
    # matrices; seed; changes to ODD. Seeds are such that no choice and no bound of a SwiGLU is near: choices are 5e-5
    # from others, gates and ups 4e-6 from their bounds, and all gradients of the reference within 1.7e-5
    Case = namedtuple("Case", "layers hashed V B T spread seed more")
    CASES = [
        Case("", 0, 128, 2, 70, 0.25, 5, {}),            # that model, every length beyond its entries
        Case("", 0, 128, 2, 17, 0.25, 4, {}),            # one entry of 16, four of 4, all chosen
        Case("", 0, 128, 3, 3, 0.25, 5, {}),             # no entries
        Case("SS", 1, 37, 2, 25, 0.3, 0, {}),            # windows alone, crossed
        Case("SS", 0, 37, 3, 1, 0.3, 0, {}),             # one position
        Case("CC", 1, 37, 2, 17, 0.3, 0, MIDDLE),        # one entry more than are chosen, a frequency between the two
        Case("CC", 2, 37, 1, 40, 0.3, 0, MIDDLE),
        Case("HH", 0, 37, 2, 33, 0.3, 1, PLAIN),         # no YaRN
        Case("HHCHC", 0, 61, 2, 41, 0.3, 2, {"hc_mult": 2, "hc_sinkhorn_iters": 7, **RATES, **MIDDLE}),
        Case("CSCH", 4, 37, 1, 33, 0.3, 0, {"hc_mult": 3, "hc_sinkhorn_iters": 3, **RATES}),  # all by tables
        Case("SCH", 1, 131, 2, 30, 0.3, 0, {"hc_mult": 3, "hc_sinkhorn_iters": 1, "compress_rates": {CSA: 2, HCA: 8},
                                            "sliding_window": 3, **MIDDLE}),
        Case("CH", 1, 37, 2, 19, 0.3, 8, {"hc_mult": 1, "o_groups": 1, "num_experts_per_tok": 2}),  # one stream, one group
        Case("SC", 0, 37, 1, 4, 0.3, 0, {"n_routed_experts": 16}),          # experts that nobody chooses
        Case("HS", 1, 37, 2, 18, 0.3, 0, {"n_routed_experts": 3}),          # all experts
        Case("CHC", 1, 37, 1, 45, 0.3, 0, {"index_topk": 50, "sliding_window": 64}),  # all entries, a window that is wider
    ]

    @classmethod
    def text_case(cls, V):
        """Sizes of a model that writes text: with those of ODD transformers' fast experts refuse to run."""
        return cls.Case("SCH", 1, V, 1, 1, 0.25, 0, {"hidden_size": 24, "moe_intermediate_size": 8})

    @staticmethod
    def config_of(case):
        """As a dictionary"""
        hf = some(case.layers, case.hashed, **case.more) if case.layers else V4_TINY
        hf = {**hf, "vocab_size": case.V, "bos_token_id": 0, "eos_token_id": 0}
        return {key: x for key, x in hf.items() if key not in ("compress", "torch_dtype")}

    @classmethod
    def make_model(cls, case):
        """A random model in float32: also what is no parameter, tables and biases of routers"""
        config = DeepseekV4Config(**cls.config_of(case))
        model = DeepseekV4ForCausalLM._from_config(config, **Qwen.plain("qwen3_moe"))
        torch.manual_seed(case.seed)
        with torch.no_grad():
            for name, x in [*model.named_parameters(), *cls.buffers(model)]:
                if name.endswith("tid2eid"):
                    x.copy_(torch.randint(config.n_routed_experts, x.shape))
                elif "embed_tokens" in name:
                    x.normal_()
                elif name.endswith("e_score_correction_bias"):
                    x.normal_(0.0, 0.1)
                else:
                    x.normal_(0.0, case.spread if x.dim() > 1 else 0.25)
                if name.endswith(("norm.weight", "layernorm.weight", "scale")):
                    x.add_(1.0)
        return model

    @staticmethod
    def buffers(model):
        """What a file has beside parameters: tables and biases of routers"""
        return [(name, x) for name, x in model.named_buffers() if name.endswith(("tid2eid", "e_score_correction_bias"))]

    @staticmethod
    def load(folder):
        """The model of a folder, and the report of what was missing or too much."""
        return DeepseekV4ForCausalLM.from_pretrained(folder, output_loading_info=True, **Qwen.plain("qwen3_moe"))

    @staticmethod
    def wide(model):
        """In float64, with frequencies of RoPE that were never rounded"""
        model = model.double().eval()
        with lifted():
            for module in model.modules():
                if isinstance(module, modeling_deepseek_v4.DeepseekV4RotaryEmbedding):
                    for name, x in type(module)(model.config).named_buffers():
                        setattr(module, name, x)
        return model

    @classmethod
    def logits(cls, model, inputs):
        """In float64, which the model becomes; transformers' own casts to float32 are switched off."""
        model = cls.wide(model)
        with lifted():
            logits = model(input_ids=inputs.long(), use_cache=False).logits
        assert logits.dtype == torch.float64
        return logits

    @staticmethod
    def tensors(model, of=parameter):
        """By official names, each expert apart; an indexer, whose choices have no gradient, has zeros"""
        found = {name: (of(p), p) for name, p in model.named_parameters()}
        return official_tensors({name: torch.zeros_like(p) if x is None else x for name, (x, p) in found.items()})

    @staticmethod
    def one_by_one(tensors):
        """By official names, each expert apart, without the gradients of biases of routers, which are 0"""
        plain = {name: x for name, x in tensors.items() if not name.startswith("grad.")}
        named = official_tensors({name[len("grad."):]: x for name, x in tensors.items() if name not in plain})
        gradients = {f"grad.{name}": x for name, x in named.items() if not name.endswith("gate.bias") or x.any()}
        return {**plain, **gradients}

    @classmethod
    def halve(cls, model, dtype):
        """But for sites, sinks, position biases and biases of routers, which are F32 in published files"""
        for name, x in [*model.named_parameters(), *cls.buffers(model)]:
            if not name.endswith((*SITES, "sinks", "position_bias", "e_score_correction_bias", "tid2eid")):
                x.data = x.data.to(dtype)
        return model

    @classmethod
    def stored(cls, model):
        """All tensors of a file, by the names of transformers in memory"""
        return {name: parameter(x) for name, x in [*model.named_parameters(), *cls.buffers(model)]}

    @classmethod
    def write_variants(cls, parent, model):
        """The same parameters as published files and other versions have them: (what, folder)."""
        tensors, config = cls.stored(model), model.config
        official = official_tensors(tensors)
        yield "official names", copy_folder(parent, "official", official)
        yield "names of transformers in memory, experts of a layer as one tensor", copy_folder(parent, "fused", tensors)
        yield "... those of its older versions", copy_folder(
            parent, "older", {name.replace("indexer.scorer.", "indexer."): x for name, x in tensors.items()})
        yield "tables of int32", copy_folder(
            parent, "int32", {name: x.int() if name.endswith("tid2eid") else x for name, x in official.items()})
        hashed = [kind == "hash_moe" for kind in config.mlp_layer_types]
        if hashed == sorted(hashed, reverse=True):
            yield "config.json of the published models", cls.write_published(parent, official, sum(hashed))
        more = cls.module_behind(config)
        yield "a module for drafts that this model does not have", copy_folder(
            parent, "drafts", {**official, **{name.replace("mtp.0.", "mtp.1."): x for name, x in more.items()}})

    @staticmethod
    def write_published(parent, tensors, n_hashed):
        """A label for each layer, one more for MTP's; RoPE's settings of layers with entries"""
        with open(os.path.join(parent, "hf", "config.json")) as file:
            hf = json.load(file)
        labels = {CSA: 4, HCA: 128}
        turn = hf["rope_parameters"]["compress"]
        keys = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
        scaling = {"type": "yarn", **{key: turn[key] for key in keys}} if turn["rope_type"] == "yarn" else None
        return copy_folder(
            parent, "published", tensors, layer_types=None, mlp_layer_types=None, compress_rates=None,
            rope_parameters=None, partial_rotary_factor=None, num_hash_layers=n_hashed,
            compress_ratios=[labels.get(kind, 0) for kind in hf["layer_types"]] + [0],
            compress_rate_csa=hf["compress_rates"][CSA], compress_rate_hca=hf["compress_rates"][HCA],
            qk_rope_head_dim=int(hf["head_dim"] * turn["partial_rotary_factor"]),
            rope_theta=hf["rope_parameters"]["main"]["rope_theta"], compress_rope_theta=turn["rope_theta"],
            rope_scaling=scaling)

    @staticmethod
    def module_behind(config):
        """The tensors of an MTP module, random"""
        D, H, d, hc = config.hidden_size, config.num_attention_heads, config.head_dim, config.hc_mult
        qr, out, E, F = config.q_lora_rank, config.o_groups * config.o_lora_rank, config.n_routed_experts, 0
        F, M = config.moe_intermediate_size, (2 + hc) * hc
        shapes = {"e_proj.weight": (D, D), "h_proj.weight": (D, D), "attn.wq_a.weight": (qr, D),
                  "attn.wq_b.weight": (H * d, qr), "attn.wkv.weight": (d, D), "attn.attn_sink": (H,),
                  "attn.wo_a.weight": (out, H * d // config.o_groups), "attn.wo_b.weight": (D, out),
                  "attn.q_norm.weight": (qr,), "attn.kv_norm.weight": (d,), "ffn.gate.weight": (E, D),
                  "ffn.gate.bias": (E,), "hc_head_fn": (hc, hc * D), "hc_head_base": (hc,), "hc_head_scale": (1,)}
        shapes.update({f"{name}.weight": (D,) for name in ("enorm", "hnorm", "norm", "attn_norm", "ffn_norm")})
        for site in ("hc_attn", "hc_ffn"):
            shapes.update({site + "_fn": (M, hc * D), site + "_base": (M,), site + "_scale": (3,)})
        for expert in ("shared_experts", *(f"experts.{e}" for e in range(E))):
            shapes.update({f"ffn.{expert}.w1.weight": (F, D), f"ffn.{expert}.w3.weight": (F, D),
                           f"ffn.{expert}.w2.weight": (D, F)})
        return {f"mtp.0.{name}": torch.randn(shape) for name, shape in shapes.items()}

    @classmethod
    def write_others(cls, parent, model):
        tensors = cls.stored(model)
        official = official_tensors(tensors)
        yield "official names, read by both", copy_folder(parent, "both", official)
        yield "names of transformers in memory, read by both", copy_folder(parent, "memory", tensors)
        yield "an MTP module", copy_folder(parent, "mtp", {**official, **cls.module_behind(model.config)},
                                           num_nextn_predict_layers=1)


class Glm5(Architecture):
    """Attention over chosen tokens by short vectors, choices that layers share, experts"""
    STYLES = ("bytes", "qwen2")
    FILLS = False  # tokens that fill take places among those that are chosen
    REFERENCE = "glm5.py"
    LOSSES = ("loss", "cross_entropy")  # the same: these folders ask for no loss of experts
    TINY = {**glm5.TEXT, "vocab_size": 257, "pad_token_id": None, "index_topk": 20}  # all: of a model that has hardly
                                                                                    # learnt many scores are 0, ties

    # The models A to G of glm5_truth.py, with fewer tokens than an indexer chooses, as many, one more, and far more.
    # Vocabulary; rows and positions of the batch; seed; changes. Seeds are such that no choice is near
    Case = namedtuple("Case", "name V B T seed more")
    VARIANTS = {"A": glm5_truth.A, "B": glm5_truth.B_, "C": glm5_truth.C_, "D": glm5_truth.D_,
                "E": {**glm5_truth.A, "norm_topk_prob": False}, "F": {**glm5_truth.A, "attention_bias": True},
                "G": glm5_truth.G_}
    CASES = [*starmap(Case, product("AE", [320], [2], glm5_truth.LENGTHS, [3], [{}])),
             *starmap(Case, product("BCDFG", [320], [2], glm5_truth.LENGTHS, [0], [{}]))]
    NEAR = [Case("D", 320, 2, 64, 3, {}), Case("D", 320, 2, 100, 3, {})]  # a gap of 2.3e-8

    @classmethod
    def text_case(cls, V):
        """Sizes of a model that writes text: with those of A transformers' fast experts refuse to run."""
        return cls.Case("A", V, 1, 1, 0, {"moe_intermediate_size": 48})

    @classmethod
    def make_model(cls, case):
        """A random model in float32 whose scores and weights differ. Of C matrices are numbers of fp8; `released` has
        their bytes and scales"""
        hf = {**cls.VARIANTS[case.name], **case.more, "vocab_size": case.V, "bos_token_id": 0, "eos_token_id": 0}
        config = GlmMoeDsaConfig(**{key: x for key, x in hf.items() if key not in ("dtype", "use_cache")})
        model = GlmMoeDsaForCausalLM._from_config(config, **Qwen.plain("qwen3_moe"))
        torch.manual_seed(case.seed)
        with torch.no_grad():
            for name, x in cls.stored(model).items():
                x.normal_()
                if name.endswith("norm.weight"):
                    x.mul_(0.2).add_(1.0)
                elif name.endswith("bias"):
                    x.mul_(0.1 if "correction" in name else 0.3)
                elif "embed_tokens" not in name:
                    x.div_(x.shape[-1] ** 0.5)
        model.released = cls.release(model) if case.name == "C" else {}
        return model

    @classmethod
    def release(cls, model):
        """Rounds the matrices that published folders have in fp8; their bytes and scales, each expert's by themselves"""
        out, rng = {}, np.random.default_rng(7)
        for name, x in cls.tensors(model).items():
            if x.dim() == 2 and not re.search(glm5_truth.KEPT, name):
                assert any(n % fp8.BLOCK for n in x.shape), name
                codes, scales, floats = fp8.release_matrix(x.numpy(), "F32", rng)
                x.copy_(torch.tensor(floats))
                out[name] = torch.tensor(codes).view(torch.float8_e4m3fn)
                out[name + "_scale_inv"] = torch.tensor(scales)
        return out

    @classmethod
    def load(cls, folder):
        """The model of a folder, and the report of what was missing or too much, but for an MTP module, one layer more"""
        model, report = GlmMoeDsaForCausalLM.from_pretrained(folder, output_loading_info=True, **Qwen.plain("qwen3_moe"))
        behind = f"model.layers.{model.config.num_hidden_layers}."
        report["unexpected_keys"] = [name for name in report["unexpected_keys"] if not name.startswith(behind)]
        return model, report

    @staticmethod
    @contextlib.contextmanager
    def wide(model, T):
        """The model, of rows of T positions, in float64 while transformers' own casts to float32 are switched off; but
        cosines and sines are those of float32, as all programs have them"""
        rotary, positions = model.double().eval().model.rotary_emb, torch.arange(T)[None]
        tables = [x.double() for x in type(rotary)(model.config)(torch.zeros(1), positions)]
        with lifted(), mock.patch.object(rotary, "forward", lambda x, position_ids: tables):
            yield model

    @classmethod
    def logits(cls, model, inputs):
        """In float64, which the model becomes."""
        with cls.wide(model, inputs.shape[1]):
            logits = model(input_ids=inputs.long(), use_cache=False).logits
        assert logits.dtype == torch.float64
        return logits

    @staticmethod
    def tensors(model, of=parameter):
        """By their names on disk, each expert apart; an indexer, whose choices have no gradient, has zeros"""
        found = {name: (of(p), p) for name, p in model.named_parameters()}
        return split_qwen_experts({name: torch.zeros_like(p) if x is None else x for name, (x, p) in found.items()})

    @classmethod
    def choices(cls, model, inputs):
        """Of indexers and routers. A gap is relative to the smallest score that is chosen"""
        chosen, gaps, topk = {}, [], torch.topk

        def indexer(name, out):
            x = torch.where(out <= torch.arange(out.shape[1])[:, None], out, inputs.shape[1]).sort().values
            chosen[f"choice.{name}"] = torch.where(x < inputs.shape[1], x, -1)

        def router(name, out):
            chosen[f"choice.{name}"] = out[2].view(*inputs.shape, -1).sort().values

        def watched(x, k, dim=-1, **how):
            if x.shape[-1] > k and (k > 2 or x.dim() == 2):  # not the two best of each group, which are added up
                last, other = topk(x, k + 1, dim=-1).values[..., -2:].unbind(-1)
                gaps.append(((last - other) / last.abs())[other > -1e30].reshape(-1))
            return topk(x, k, dim=dim, **how)

        hooks = [module.register_forward_hook(lambda module, inputs, out, name=name, take=take: take(name, out))
                 for kind, take in ((modeling_glm_moe_dsa.GlmMoeDsaIndexer, indexer),
                                    (modeling_glm_moe_dsa.GlmMoeDsaTopkRouter, router))
                 for name, module in model.named_modules() if isinstance(module, kind)]
        with (torch.no_grad(), mock.patch.object(torch, "topk", watched), mock.patch.object(torch.Tensor, "topk", watched)):
            cls.logits(model, inputs)
        for hook in hooks:
            hook.remove()
        return {name: x.double() for name, x in chosen.items()}, torch.cat(gaps).min().item()

    @staticmethod
    def one_by_one(tensors):
        """Each expert apart, without the gradients of biases of routers, which are 0; choices as floats"""
        return {name: x.float() for name, x in split_qwen_experts(tensors).items()
                if not name.startswith("grad.") or not name.endswith("e_score_correction_bias") or x.any()}

    @staticmethod
    def buffers(model):
        """What a file has beside parameters: biases of routers"""
        return {name: x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")}

    @classmethod
    def stored(cls, model):
        """All tensors of a file, by the names of transformers in memory"""
        return {**tensors_of(model), **cls.buffers(model)}

    @classmethod
    def halve(cls, model, dtype):
        """But for biases of routers"""
        for p in model.parameters():
            p.data = p.data.to(dtype)
        for x in cls.buffers(model).values():
            x.data = x.data.float()
        return model

    @classmethod
    def write_variants(cls, parent, model):
        """The same parameters as published files and other versions have them: (what, folder)."""
        tensors, config = {**cls.tensors(model), **cls.buffers(model)}, model.config
        yield "experts of a layer as one tensor", copy_folder(parent, "fused", cls.stored(model))
        yield "config.json with rope_theta outside rope_parameters", copy_folder(
            parent, "theta", tensors, rope_parameters=None, rope_theta=config.rope_parameters["rope_theta"])
        yield "config.json with num_local_experts", copy_folder(
            parent, "local", tensors, n_routed_experts=None, num_local_experts=config.n_routed_experts)
        yield "config.json of the published models", copy_folder(
            parent, "published", tensors, head_dim=config.qk_nope_head_dim, layer_types=None, num_nextn_predict_layers=1,
            moe_router_dtype="float32", ep_size=1, pretraining_tp=1)
        kinds, dense = config.indexer_types, config.mlp_layer_types.count("dense")
        if kinds == ["full", "full", "shared", "shared", "shared", "full", "shared"]:  # as freq 4, offset 2 make them
            yield "config.json with a rule for indexers, and how many layers have MLPs", copy_folder(
                parent, "rule", tensors, indexer_types=None, mlp_layer_types=None, first_k_dense_replace=dense)
        yield "config.json with a pattern of indexers", copy_folder(
            parent, "pattern", tensors, indexer_types=None, index_topk_pattern="".join(kind[0].upper() for kind in kinds))
        if model.released:
            yield "matrices in fp8, none of whole blocks", copy_folder(
                parent, "released", {**tensors, **model.released},
                quantization_config={"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                     "weight_block_size": [fp8.BLOCK, fp8.BLOCK], "modules_to_not_convert": []})

    @classmethod
    def write_others(cls, parent, model):
        tensors = {**cls.tensors(model), **cls.buffers(model)}
        yield "experts of a layer as one tensor, read by both", copy_folder(parent, "both", cls.stored(model))
        cfg = glm5_checks.read_config({**model.config.to_dict(), "mtp_weight": 0.1}, parent, 1, 1)
        behind = f"model.layers.{cfg.num_hidden_layers}."
        more = trainer.to_disk(glm5.MODEL, glm5_checks.draw(cfg, False), cfg)
        more = {name: torch.tensor(x) for name, x in more.items() if name.startswith(behind)}
        yield "an MTP module", copy_folder(parent, "mtp", {**tensors, **more}, num_nextn_predict_layers=1)


MODELS = {"gpt2": GPT2, "mamba": Mamba, "moe": Mixtral, "qwen": Qwen, "qwen36": Qwen36, "deepseek_v4": DeepseekV4,
          "glm5": Glm5}
