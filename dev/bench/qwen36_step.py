"""One training step of a small Qwen3.6 (71M parameters) side by side: ours and transformers, float32 on the CPU.

    make build/gcc-native-O3/train_qwen36
    .venv/bin/python dev/bench/qwen36_step.py --rounds 5 --json qwen36.json
    .venv/bin/python dev/bench/qwen36_step.py --small                   # seconds: does everything run?

A step is forward, backward, clip to norm 1 and AdamW, at B 1 and T 512: 8 layers of 512 channels, six with the gated delta rule (8
heads of 64 channels for 4 of keys), two with attention, 4 of 16 experts 256 wide and a shared one, vocabulary 8192. Both programs
start from one Hugging Face folder, which ours writes, and read the same rows of random tokens in the same order; routers add no
loss. transformers computes the delta rule by its PyTorch fallback, as it does wherever its CUDA kernels are not, and experts by
grouped_mm, the fastest that it has; eager rounds otherwise, and routers that are near ties at the start choose others. Rounds, warm-up and what must be equal before any time is printed are those of
mamba_step.py. Limit of ours: as in moe_step.py. FLOPs: 6 per weight and token, of experts k / E, attention, and the delta rule
(delta_layer_flops), which is no product of large matrices: of it the limit has the FLOPs at the same rate.
"""
from folder_step import run_folder_step


def shape_of(small):
    L, D, V = (4, 64, 512) if small else (8, 512, 8192)
    return {"model_type": "qwen3_5_moe_text", "vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "max_position_embeddings": 1024,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": D // 8, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
            "linear_key_head_dim": D // 8, "linear_value_head_dim": D // 8, "linear_conv_kernel_dim": 4, "num_experts": 16,
            "num_experts_per_tok": 4, "moe_intermediate_size": D // 2, "shared_expert_intermediate_size": D // 2,
            "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                                                              "mrope_section": [D // 64, D // 64, D // 32 - 2 * (D // 64)]}}


def flop_of(c, B, T):
    """of a step"""
    D, V, L = (c[key] for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    HQ, HK = (c["head_dim"] * c[key] for key in ("num_attention_heads", "num_key_value_heads"))
    DK, DV, Hv = (c["linear_" + key] for key in ("key_head_dim", "value_head_dim", "num_value_heads"))
    keys, values, full = c["linear_num_key_heads"] * DK, Hv * DV, L // 4
    linear = D * (2 * keys + 3 * values + 2 * Hv)
    experts = 3 * D * (c["num_experts_per_tok"] * c["moe_intermediate_size"] + c["shared_expert_intermediate_size"]) + D * c["num_experts"]
    weights = (L - full) * linear + full * (3 * HQ + 2 * HK) * D + L * experts + V * D
    rule = (L - full) * Hv * (22 * DK * DV + 64 * (11 * DK + 10 * DV))
    return B * T * (6 * weights + full * 6 * HQ * T + rule)


if __name__ == "__main__":
    run_folder_step(__doc__, "train_qwen36", ("grouped_mm",), shape_of, flop_of)
