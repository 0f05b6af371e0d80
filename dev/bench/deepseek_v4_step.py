"""One training step of a small DeepSeek V4 (68M parameters) side by side: ours and transformers, float32 on the CPU.

    make build/gcc-native-O3/train_deepseek_v4
    .venv/bin/python dev/bench/deepseek_v4_step.py --rounds 5 --json deepseek_v4.json
    .venv/bin/python dev/bench/deepseek_v4_step.py --small                   # seconds: does everything run?

A step is forward, backward, clip to norm 1 and AdamW, at B 1 and T 512: the preset `small` with a vocabulary of 8192. 8 layers of 4
streams of 512 channels, 20 iterations of Sinkhorn; 8 heads of 64 channels, a window of 128; two layers with a window alone, three with
entries of 4 tokens, of which an indexer of 8 heads chooses 32 of 128, three with entries of 32; 4 of 16 experts 256 wide and a shared
one, in the first two layers by tables. Both programs start from one Hugging Face folder, which ours writes, and read the same rows of
random tokens in the same order; nothing is added to the loss and indexers stay as they are. transformers has eager attention alone; its
experts run by grouped_mm, the fastest that it has, or eager. Rounds, warm-up and what must be equal before any time is printed are those
of mamba_step.py; but losses are compared in runs of their own, whose indexers choose all entries: many scores of a new indexer are 0, and
each program has its own way to choose among equals. On a machine that others use, too: OMP_WAIT_POLICY=passive. Limit of ours: as in
moe_step.py. FLOPs: 6 per weight and token, of experts k / E, of indexers 2; 12 per channel of a head and key that a query sees, window
and entries; the indexer's scores, and the mixing of streams, which is no product of large matrices: of it the limit has the FLOPs at the
same rate.
"""
from folder_step import run_folder_step

KINDS = {"W": "sliding_attention", "C": "compressed_sparse_attention", "H": "heavily_compressed_attention"}


def shape_of(small):
    layers, D, V = ("WCH", 64, 512) if small else ("WWCHCHCH", 512, 8192)
    return {"model_type": "deepseek_v4", "vocab_size": V, "hidden_size": D, "num_hidden_layers": len(layers), "max_position_embeddings": 4096,
            "num_attention_heads": 8, "head_dim": D // 8, "qk_rope_head_dim": D // 32, "q_lora_rank": 3 * D // 8, "o_groups": 2,
            "o_lora_rank": 3 * D // 8, "sliding_window": D // 4, "index_n_heads": 8, "index_head_dim": 32, "index_topk": D // 16,
            "hc_mult": 4, "hc_sinkhorn_iters": 20, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": D // 2,
            "layer_types": [KINDS[x] for x in layers], "mlp_layer_types": ["hash_moe" if l < 2 else "moe" for l in range(len(layers))],
            "compress_rates": {KINDS["C"]: 4, KINDS["H"]: 32}, "num_nextn_predict_layers": 0}


def keys_of(c, kind, T):
    """that a query sees, and entries that an indexer weighs, on average"""
    rate = c["compress_rates"].get(kind, 0)
    entries = [(t + 1) // rate if rate else 0 for t in range(T)]
    chosen = [min(n, c["index_topk"]) for n in entries] if kind == KINDS["C"] else entries
    window = sum(min(t + 1, c["sliding_window"]) for t in range(T))
    return (window + sum(chosen)) / T, sum(entries) / T if kind == KINDS["C"] else 0


def flop_of(c, B, T):
    """of a step"""
    D, V, hc, qr = (c[key] for key in ("hidden_size", "vocab_size", "hc_mult", "q_lora_rank"))
    H, d, R, F, E = (c[key] for key in ("num_attention_heads", "head_dim", "o_lora_rank", "moe_intermediate_size", "n_routed_experts"))
    out, nI, dI, S = c["o_groups"] * R, c["index_n_heads"], c["index_head_dim"], hc * D
    of_token = 6 * V * D + 6 * (hc * S + S)
    for kind in c["layer_types"]:
        keys, weighed = keys_of(c, kind, T)
        weights = D * qr + qr * H * d + D * d + H * d * R + out * D
        weights += {KINDS["C"]: 4, KINDS["H"]: 2}.get(kind, 0) * d * D
        weights += 3 * D * F * (c["num_experts_per_tok"] + 1) + D * E + 2 * ((2 + hc) * hc * S + 2 * S + hc * S)
        indexer = (qr * nI * dI + D * nI + 4 * dI * D) if kind == KINDS["C"] else 0
        of_token += 6 * weights + 2 * indexer + 12 * H * d * keys + 2 * nI * (dI + 1) * weighed
    return B * T * of_token


if __name__ == "__main__":
    run_folder_step(__doc__, "train_deepseek_v4", ("grouped_mm", "eager"), shape_of, flop_of, lambda T: {"index_topk": T})
