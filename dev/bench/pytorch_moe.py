"""Training steps of a mixture of experts in transformers, float32, on the CPU: forward, backward, clip, AdamW. moe_step.py and
folder_step.py run it.

    python pytorch_moe.py EXPERTS --from DIR --tokens FILE --seq 256 [--batch 4 --threads 2 --steps 5 --lr 3e-4]

DIR is a Hugging Face folder, FILE a token shard of llm.c (uint16), read row by row in file order. EXPERTS is one of transformers'
experts_implementation: eager, batched_mm or grouped_mm. Attention is its default, sdpa where the model has it. The loss is the
mean cross-entropy over all positions, without the routers' losses; AdamW is fused. A line of JSON per step, as pytorch_mamba.py
prints it.
"""
import argparse

import torch
from pytorch_mamba import make_adamw, read_rows, train_steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experts", choices=["eager", "batched_mm", "grouped_mm"])
    parser.add_argument("--from", dest="folder", metavar="DIR")
    parser.add_argument("--tokens", metavar="FILE")
    for name, default in (("batch", 4), ("seq", 256), ("threads", 2), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-4)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32, experts_implementation=options.experts)
    if model.config._experts_implementation != options.experts:
        raise SystemExit(f"transformers took {model.config._experts_implementation} for {options.experts}")
    model.train()
    no_decay = ("norm.weight", "layernorm.weight", "sinks", "position_bias", ".base", ".scale", ".hc_base", ".hc_scale")
    rows = read_rows(options.tokens, options.steps * options.batch, options.seq)
    train_steps(lambda tokens: model(input_ids=tokens, use_cache=False).logits, model, make_adamw(model, options.lr, no_decay), rows,
                options.steps, options.batch)


if __name__ == "__main__":
    main()
