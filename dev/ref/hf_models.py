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
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM
from transformers.models.mamba import modeling_mamba
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


def tensors_of(model):
    return {name: p.detach().contiguous() for name, p in model.named_parameters()}


class GPT2:
    REFERENCE = "gpt2.py"
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
    """MambaRMSNorm.forward without its casts to float32"""
    return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))


class Mamba:
    REFERENCE = "mamba_hpn.py"
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


MODELS = {"gpt2": GPT2, "mamba": Mamba}
