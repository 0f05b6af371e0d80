"""One training step of a small GLM-5 (50M parameters) side by side: ours and transformers, float32 on the CPU.

    make build/gcc-native-O3/train_glm5
    .venv/bin/python dev/bench/glm5_step.py --rounds 5 --json glm5.json
    .venv/bin/python dev/bench/glm5_step.py --small                   # seconds: does everything run?

A step is forward, backward, clip to norm 1 and AdamW, at B 1 and T 512, vocabulary 8192. 7 layers of 512 channels; 8 heads whose keys
have 48 channels and 16 that turn and whose values have 64, made of 128 numbers a token; three indexers of 16 heads choose 256 positions
for themselves and the four layers behind them; two layers with an MLP of 1024, five with 4 of 16 experts 256 wide and a shared one.
Norms of the vectors that heads are made of have an epsilon of 1e-6, which transformers has built in. Both programs start from one
Hugging Face folder, which ours writes, and read the same rows of random tokens in the same order; nothing is added to the loss and
indexers stay as they are. transformers computes attention over all positions, with a mask, by its default; experts by grouped_mm or
eager. Rounds, warm-up and what must be equal before any time is printed are those of mamba_step.py; but losses are compared in runs of
their own, whose indexers choose all positions: scores of a new indexer may be equal, and each program has its own way to choose among
equals. On a machine that others use, too: OMP_WAIT_POLICY=passive. Limit of ours: as in moe_step.py. FLOPs: 6 per weight and token, of
experts k / E, of indexers 2; 6 per channel of a head's key and value and position that it sees; the indexer's scores.
"""
from folder_step import run_folder_step


def shape_of(small):
    D, V = (64, 512) if small else (512, 8192)
    kinds = ["full", "full", "shared", "shared", "shared", "full", "shared"]
    return {"model_type": "glm_moe_dsa", "vocab_size": V, "hidden_size": D, "num_hidden_layers": len(kinds), "max_position_embeddings": 4096,
            "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": D // 2, "kv_lora_rank": D // 4, "qk_nope_head_dim": 3 * D // 32,
            "qk_rope_head_dim": D // 32, "qk_head_dim": D // 8, "v_head_dim": D // 8, "head_dim": D // 32, "intermediate_size": 2 * D,
            "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": D // 2, "n_group": 1,
            "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "index_topk": D // 2, "index_head_dim": 32,
            "index_n_heads": 16, "indexer_types": kinds, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 5, "rms_norm_eps": 1e-5, "latent_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "attention_bias": False, "tie_word_embeddings": False,
            "num_nextn_predict_layers": 0}


def flop_of(c, B, T):
    """of a step"""
    D, H, rq, r = (c[key] for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    dn, dr, dv = (c[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    nI, dI, K, F = (c[key] for key in ("index_n_heads", "index_head_dim", "index_topk", "moe_intermediate_size"))
    seen = sum(min(t + 1, K) for t in range(T)) / T
    attention = D * rq + rq * H * (dn + dr) + D * (r + dr) + r * H * (dn + dv) + H * dv * D
    dense, experts = 3 * D * c["intermediate_size"], 3 * D * F * (c["num_experts_per_tok"] + 1) + D * c["n_routed_experts"]
    kinds, full = c["mlp_layer_types"], c["indexer_types"].count("full")
    weights = len(kinds) * attention + kinds.count("dense") * dense + kinds.count("sparse") * experts + D * c["vocab_size"]
    of_token = 6 * weights + len(kinds) * 6 * H * (dn + dr + dv) * seen
    if T > K:
        of_token += full * (2 * (rq * nI * dI + D * dI + D * nI) + 2 * nI * (dI + 1) * (T + 1) / 2)
    return B * T * of_token


if __name__ == "__main__":
    run_folder_step(__doc__, "train_glm5", ("grouped_mm", "eager"), shape_of, flop_of, lambda T: {"index_topk": T})
