"""Qwen3 in transformers, on the CPU: steps of full training, steps of LoRA through PEFT, and generation. qwen_step.py runs it.

    python pytorch_qwen.py full|lora --config FILE --tokens FILE [--seq 256 --batch 1 --threads 2 --steps 5 --lr 3e-4 --rank 16]
    python pytorch_qwen.py generate --config FILE [--dtype fp32|bf16 --prompt 32 --new 64 --rounds 3 --threads 2]

--config builds the model of a config.json with random weights, --from DIR reads a Hugging Face folder instead. Without either the
shape is Qwen3-0.6B. Attention is sdpa. Training is float32 without dropout: forward, backward, clip to norm 1, fused AdamW, with the
mean cross-entropy over all positions; FILE is a token shard of llm.c (uint16), read row by row in file order, without one the
tokens are random. LoRA puts adapters on all seven linears of every layer, the base is frozen. Generation is greedy, with a cache of keys and values.
A line of JSON per step as pytorch_mamba.py prints it, or per round: prompt_ms until the first token, tokens_per_s of those after
it. The last line has memory_mb, the largest resident memory.
"""
import argparse
import json
import os
import resource
import time

import numpy as np
import torch
from pytorch_mamba import make_adamw, read_rows, train_steps
from qwen_shape import QWEN3_06B

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NO_DECAY = ("norm.weight", "layernorm.weight")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_model(options, dtype):
    from transformers import AutoConfig, AutoModelForCausalLM

    if options.folder:
        return AutoModelForCausalLM.from_pretrained(options.folder, dtype=dtype, attn_implementation="sdpa")
    settings = QWEN3_06B
    if options.config:
        with open(options.config, encoding="utf-8") as file:
            settings = json.load(file)
    torch.manual_seed(1)
    config = AutoConfig.for_model(**settings)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def with_adapters(model, rank):
    from peft import LoraConfig, get_peft_model

    n_layers, config = model.config.num_hidden_layers, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LINEARS, lora_dropout=0.0)
    model = get_peft_model(model, config)
    n_adapters = sum(name.endswith("lora_A.default.weight") for name, x in model.named_parameters() if x.requires_grad)
    if n_adapters != len(LINEARS) * n_layers:
        raise SystemExit(f"expected {len(LINEARS)} adapters in each of {n_layers} layers, found {n_adapters}")
    return model


def train(options):
    model = make_model(options, torch.float32)
    if options.task == "lora":
        model = with_adapters(model, options.rank)
    model.train()
    n_rows = options.steps * options.batch
    if options.tokens:
        rows = read_rows(options.tokens, n_rows, options.seq)
    else:
        rows = torch.randint(model.config.vocab_size, (n_rows, options.seq + 1), generator=torch.Generator().manual_seed(2))
    # what does not learn has no gradient, and AdamW passes over it
    train_steps(lambda tokens: model(input_ids=tokens, use_cache=False).logits, model, make_adamw(model, options.lr, NO_DECAY), rows,
                options.steps, options.batch)


def generate(options):
    model = make_model(options, DTYPES[options.dtype]).eval()
    prompt = torch.from_numpy(np.random.default_rng(3).integers(256, size=(1, options.prompt)))

    def seconds(n_new):
        begin = time.perf_counter()
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n_new, min_new_tokens=n_new, do_sample=False,
                             use_cache=True, pad_token_id=0)
        if ids.shape[1] != options.prompt + n_new:
            raise SystemExit(f"expected {n_new} new tokens, found {ids.shape[1] - options.prompt}")
        return time.perf_counter() - begin

    with torch.inference_mode():
        for _ in range(options.rounds):
            first, all_tokens = seconds(1), seconds(options.new)
            print(json.dumps({"prompt_ms": 1e3 * first, "tokens_per_s": (options.new - 1) / (all_tokens - first)}), flush=True)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["full", "lora", "generate"])
    parser.add_argument("--from", dest="folder", metavar="DIR")
    parser.add_argument("--config", metavar="FILE")
    parser.add_argument("--tokens", metavar="FILE")
    for name, default in (("batch", 1), ("seq", 256), ("threads", 2), ("steps", 5), ("rank", 16), ("prompt", 32), ("new", 64), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="of generation")
    parser.add_argument("--lr", type=float, default=3e-4)
    return parser.parse_args()


def main():
    options = parse_options()
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is made here; nothing is downloaded
    torch.set_num_threads(options.threads)
    if options.task == "generate":
        generate(options)
    else:
        train(options)
    print(json.dumps({"memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


if __name__ == "__main__":
    main()
