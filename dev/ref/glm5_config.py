"""
Config of GLM-5, GLM-5.1 and GLM-5.2, their parameter table and names: what glm5.py knows of files. NumPy and the
standard library only.
"""
from dataclasses import dataclass, replace

import trainer
from experts import SIGMOID, Router
from qwen import need
from qwen36 import ONE, Layer
from trainer import Row


# ---------------------------------------------------------------------------------------------------------------------
# Config, from a config.json and back.
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config(trainer.Run):
    vocab_size: int                  # V
    hidden_size: int                 # D
    num_hidden_layers: int           # L
    num_attention_heads: int         # H
    q_lora_rank: int                 # rq
    kv_lora_rank: int                # r
    qk_nope_head_dim: int            # dn
    qk_rope_head_dim: int            # dr, even
    v_head_dim: int                  # dv
    index_n_heads: int               # nI
    index_head_dim: int              # dI
    index_topk: int                  # K, keys that a position sees
    intermediate_size: int           # of layers without experts
    moe_intermediate_size: int       # F
    n_routed_experts: int            # E
    num_experts_per_tok: int         # k
    n_shared_experts: int            # the shared one's width is so many F
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    latent_norm_eps: float           # of the norms of q_a_proj's and kv_a_proj's outputs
    rope_theta: float
    indexer_rope_interleave: bool    # False: pairs of the indexer are (x[i], x[i + half]), as in DeepSeek V3.2
    attention_bias: bool             # of q_a_proj, kv_a_proj and o_proj
    full_layers: tuple               # numbers of those that have an indexer; others see what the last one has chosen
    moe_layers: tuple                # numbers of those that have experts
    max_position_embeddings: int
    pad_token_id: int = None         # its row of the embedding does not learn, as in transformers
    mtp: bool = False                # is the MTP module trained? config.json then has our key mtp_weight
    mtp_weight: float = 0.0          # of its loss
    mtp_detach: bool = False         # its loss reaches its own parameters alone
    indexer_train: str = "off"       # or kl: by its loss, of the keys that it chooses; dense: all are chosen
    indexer_kl_coeff: float = 1.0    # of that loss in the gradient
    indexer_kl_target: str = "group_average"  # of all layers that see the choice; or source_layer: of its own alone
    seq_balance_coef: float = 0.0
    bias_update_rate: float = 0.0
    fused_experts: bool = False      # on disk the experts of a layer are one tensor

    swiglu_limit = 0.0               # none

    @property
    def router(self):
        return Router(SIGMOID, self.num_experts_per_tok, self.routed_scaling_factor, self.norm_topk_prob, self.n_group,
                      self.topk_group)

    @property
    def every_layer(self):
        return tuple(range(self.num_hidden_layers))

    def source(self, l):
        """The layer that has chosen what layer l sees"""
        return max(full for full in self.full_layers if full <= l)

    @property
    def dense_layers(self):
        return tuple(l for l in self.every_layer if l not in self.moe_layers)


NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
          "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim", "index_topk",
          "intermediate_size", "moe_intermediate_size", "num_experts_per_tok")
USUAL = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
         "rms_norm_eps": 1e-5, "indexer_rope_interleave": True, "attention_bias": False, "pad_token_id": None,
         "max_position_embeddings": 202752, "mtp_weight": 0.0, "mtp_detach": False, "indexer_train": "off",
         "indexer_kl_coeff": 1.0, "indexer_kl_target": "group_average", "seq_balance_coef": 0.0,
         "bias_update_rate": 0.0}
SETTINGS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu", "mlp_bias": False,
            "attention_dropout": 0.0, "tie_word_embeddings": False, "rope_interleave": True, "moe_layer_freq": 1,
            "rope_scaling": None, "output_router_logits": False}
OPTIONS = {"indexer_train": ("off", "kl", "dense"), "indexer_kl_target": ("group_average", "source_layer")}


def numbers_of(hf, path, key, kinds, usual):
    """Of a list of two kinds, one for each layer, the numbers of the layers of the first kind"""
    found, L = hf.get(key) or usual, hf["num_hidden_layers"]
    if len(found) != L or not set(found) <= set(kinds):
        raise SystemExit(f"{path}: {key}: expected {L} of {', '.join(kinds)}, found {found}")
    return tuple(l for l in range(L) if found[l] == kinds[0])


def indexer_types(hf):
    """Where there is no list: a pattern, or the rule"""
    pattern, L = hf.get("index_topk_pattern"), hf["num_hidden_layers"]
    if pattern is not None:
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    freq, offset = max(hf.get("index_topk_freq", 1), 1), hf.get("index_skip_topk_offset", 2)
    return ["shared" if max(l - offset + 1, 0) % freq else "full" for l in range(L)]


def read_config(hf, path, batch, seq_len):
    """The Config of a config.json, of transformers or of the published models"""
    if hf.get("model_type") != "glm_moe_dsa":
        raise SystemExit(f"{path}: expected model_type glm_moe_dsa, found {hf.get('model_type')}")
    turn = hf.get("rope_parameters") or {}
    found = {**hf, "rope_type": turn.get("rope_type", "default")}
    settings = {**SETTINGS, "rope_type": "default", "num_key_value_heads": hf.get("num_attention_heads")}
    wrong = {key: found[key] for key, value in settings.items() if found.get(key, value) != value}
    if wrong:
        raise SystemExit(f"{path}: expected {({key: settings[key] for key in wrong})}, found {wrong}")
    for key, values in OPTIONS.items():
        if hf.get(key, values[0]) not in values:
            raise SystemExit(f"{path}: expected {key} of {', '.join(values)}, found {hf[key]}")
    sizes, L = need(hf, path, NEEDED), hf["num_hidden_layers"]
    sizes.update({key: hf.get(key, value) for key, value in USUAL.items()})
    n_dense = min(hf.get("first_k_dense_replace", 3), L)
    full = numbers_of(hf, path, "indexer_types", ("full", "shared"), indexer_types(hf))
    if 0 not in full:
        raise SystemExit(f"{path}: expected a full indexer in the first layer, found a shared one")
    theta = turn.get("rope_theta", hf.get("rope_theta"))
    if theta is None:
        raise SystemExit(f"{path}: expected rope_theta in rope_parameters")
    return Config(**sizes, latent_norm_eps=hf.get("latent_norm_eps", sizes["rms_norm_eps"]), rope_theta=float(theta),
                  n_routed_experts=hf.get("num_experts") or hf.get("n_routed_experts") or hf["num_local_experts"],
                  full_layers=full, mtp="mtp_weight" in hf, batch=batch, seq_len=seq_len,
                  moe_layers=numbers_of(hf, path, "mlp_layer_types", ("sparse", "dense"),
                                        ["dense"] * n_dense + ["sparse"] * (L - n_dense)))


def config_json(cfg):
    """The inverse of read_config, as transformers writes it"""
    out = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "float32",
           "num_key_value_heads": cfg.num_attention_heads, "head_dim": cfg.qk_rope_head_dim,
           "qk_head_dim": cfg.qk_nope_head_dim + cfg.qk_rope_head_dim, **SETTINGS}
    keys = [key for key in NEEDED + tuple(USUAL) if key != "mtp_weight" or cfg.mtp]
    out.update({key: getattr(cfg, key) for key in (*keys, "n_routed_experts", "latent_norm_eps")})
    out["rope_parameters"] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    out["indexer_types"] = ["full" if l in cfg.full_layers else "shared" for l in cfg.every_layer]
    out["mlp_layer_types"] = ["sparse" if l in cfg.moe_layers else "dense" for l in cfg.every_layer]
    out["layer_types"] = ["indexed_attention"] * cfg.num_hidden_layers
    out["num_nextn_predict_layers"] = int(cfg.mtp)
    return out


def metadata(cfg):
    run = trainer.metadata(cfg)
    return {**config_json(cfg), **{key: run[key] for key in trainer.Run.__dataclass_fields__}}


# ---------------------------------------------------------------------------------------------------------------------
# The parameter table. Everything about a parameter is on its line.
# ---------------------------------------------------------------------------------------------------------------------
def block_rows(cfg, every, full, dense, moe):
    """(name, shape, kind, name on disk, parts, layers) of what a layer has; every ... moe: which layers have it"""
    D, H, rq, r, dr = (cfg.hidden_size, cfg.num_attention_heads, cfg.q_lora_rank, cfg.kv_lora_rank,
                       cfg.qk_rope_head_dim)
    dn, dv, nI, dI = cfg.qk_nope_head_dim, cfg.v_head_dim, cfg.index_n_heads, cfg.index_head_dim
    E, F, Fd, Fs = (cfg.n_routed_experts, cfg.moe_intermediate_size, cfg.intermediate_size,
                    cfg.n_shared_experts * cfg.moe_intermediate_size)
    both, indexer = ("gate_proj.weight", "up_proj.weight"), "frozen" if cfg.indexer_train == "off" else "linear"
    gates = ("gate_up_proj",) if cfg.fused_experts else tuple(f"{e}.{part}" for e in range(E) for part in both)
    downs = ("down_proj",) if cfg.fused_experts else tuple(f"{e}.down_proj.weight" for e in range(E))
    biased = every if cfg.attention_bias else ()
    return [
        ("input_layernorm",          (D,),              "gain",      "input_layernorm.weight", ONE, every),
        ("q_a_proj",                 (rq, D),           "linear",    "self_attn.q_a_proj.weight", ONE, every),
        ("q_a_proj_bias",            (rq,),             "bias",      "self_attn.q_a_proj.bias", ONE, biased),
        ("q_a_layernorm",            (rq,),             "gain",      "self_attn.q_a_layernorm.weight", ONE, every),
        ("q_b_proj",                 (H * (dn + dr), rq), "linear",  "self_attn.q_b_proj.weight", ONE, every),
        ("kv_a_proj",                (r + dr, D),       "linear",   "self_attn.kv_a_proj_with_mqa.weight", ONE, every),
        ("kv_a_proj_bias",           (r + dr,),         "bias",     "self_attn.kv_a_proj_with_mqa.bias", ONE, biased),
        ("kv_a_layernorm",           (r,),              "gain",      "self_attn.kv_a_layernorm.weight", ONE, every),
        ("kv_b_proj",                (H * (dn + dv), r), "linear",   "self_attn.kv_b_proj.weight", ONE, every),
        ("o_proj",                   (D, H * dv),       "linear",    "self_attn.o_proj.weight", ONE, every),
        ("o_proj_bias",              (D,),              "bias",      "self_attn.o_proj.bias", ONE, biased),
        ("index_wq_b",               (nI * dI, rq),     indexer,     "self_attn.indexer.wq_b.weight", ONE, full),
        ("index_wk",                 (dI, D),           indexer,     "self_attn.indexer.wk.weight", ONE, full),
        ("index_norm",               (dI,),             "gain",      "self_attn.indexer.k_norm.weight", ONE, full),
        ("index_norm_bias",          (dI,),             "bias",      "self_attn.indexer.k_norm.bias", ONE, full),
        ("index_proj",               (nI, D),           indexer,    "self_attn.indexer.weights_proj.weight", ONE, full),
        ("post_attention_layernorm", (D,),              "gain",      "post_attention_layernorm.weight", ONE, every),
        ("gate_up",                  (2 * Fd, D),       "linear",    "mlp.", both, dense),
        ("down",                     (D, Fd),           "linear",    "mlp.down_proj.weight", ONE, dense),
        ("router",                   (E, D),            "linear",    "mlp.gate.weight", ONE, moe),
        ("selection_bias",           (E,),              "selection", "mlp.gate.e_score_correction_bias", ONE, moe),
        ("expert_gate_up",           (E, 2 * F, D),     "linear",    "mlp.experts.", gates, moe),
        ("expert_down",              (E, D, F),         "linear",    "mlp.experts.", downs, moe),
        ("shared_gate_up",           (2 * Fs, D),       "linear",    "mlp.shared_experts.", both, moe),
        ("shared_down",              (D, Fs),           "linear",    "mlp.shared_experts.down_proj.weight", ONE, moe),
    ]


MTP_OWN = ("mtp_enorm", "mtp_hnorm", "mtp_eh_proj", "mtp_norm")


def parameter_table(cfg):
    """Kinds: embeddings and linear layers are decayed; gains start around 1, the rest around 0. selection: no gradient
    reaches it; frozen: matrices that only the indexer's loss reaches, where there is none. On disk MTP is one more
    layer."""
    V, D, behind = cfg.vocab_size, cfg.hidden_size, f"model.layers.{cfg.num_hidden_layers}."
    table = [Row("embed_tokens", (V, D), "embedding", "model.embed_tokens.weight")]
    table += [Row(name, (len(layers), *shape), kind, "model.layers.{}." + disk, parts, layers)
              for name, shape, kind, disk, parts, layers in
              block_rows(cfg, cfg.every_layer, cfg.full_layers, cfg.dense_layers, cfg.moe_layers) if layers]
    table += [Row("norm", (D,), "gain", "model.norm.weight"), Row("lm_head", (V, D), "linear", "lm_head.weight")]
    if cfg.mtp:
        table += [Row("mtp_enorm", (D,), "gain", behind + "enorm.weight"),
                  Row("mtp_hnorm", (D,), "gain", behind + "hnorm.weight"),
                  Row("mtp_eh_proj", (D, 2 * D), "linear", behind + "eh_proj.weight")]
        table += [Row("mtp_" + name, shape, kind, behind + disk, parts)
                  for name, shape, kind, disk, parts, has in block_rows(cfg, True, True, False, True) if has]
        table += [Row("mtp_norm", (D,), "gain", behind + "shared_head.norm.weight")]
    return table


def layer_of(p, cfg, l):
    return Layer({row.name: p[row.name][i] for row, i in trainer.layer_rows(parameter_table(cfg), l)})


def mtp_layer(p):
    """The parameters of its layer, under the names that layers of the trunk have"""
    return Layer({name[4:]: x for name, x in p.items() if name.startswith("mtp_") and name not in MTP_OWN})


def fit(cfg, tensors):
    """A file's names say whether experts are fused"""
    fused = any(name.endswith("experts.gate_up_proj") for name in tensors)
    return replace(cfg, fused_experts=fused), tensors
