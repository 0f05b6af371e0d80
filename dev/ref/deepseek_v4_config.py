"""
Config of DeepSeek V4, its parameter table and names: what deepseek_v4.py knows of files: doc/deepseek_v4.md
"Files". NumPy and the standard library only.
"""
import re
from collections import namedtuple
from dataclasses import dataclass, replace

import numpy as np

import hyper_connections as hyper
import trainer
from experts import SQRT_SOFTPLUS, Router
from qwen import need
from qwen36 import ONE, Layer
from trainer import Row


# ---------------------------------------------------------------------------------------------------------------------
# Config, from a config.json and back.
# ---------------------------------------------------------------------------------------------------------------------
Yarn = namedtuple("Yarn", "factor original beta_fast beta_slow")


@dataclass(frozen=True)
class Config(trainer.Run):
    vocab_size: int                 # V
    hidden_size: int                # D
    num_hidden_layers: int          # L
    num_attention_heads: int        # H
    head_dim: int                   # d, of which the last `rotary` channels turn
    rotary: int
    q_lora_rank: int
    o_groups: int                   # G
    o_lora_rank: int                # Ro, of each group
    sliding_window: int             # keys that a position sees, itself included
    kinds: tuple                    # of each layer: SLIDING, CSA or HCA
    csa_ratio: int                  # tokens of an entry
    hca_ratio: int
    index_n_heads: int              # nI
    index_head_dim: int             # dI
    index_topk: int                 # entries that a position sees
    hc_mult: int                    # hc, streams
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    n_routed_experts: int           # E
    num_experts_per_tok: int        # k
    moe_intermediate_size: int      # F
    hash_layers: tuple              # layers whose experts the token decides
    routed_scaling_factor: float
    swiglu_limit: float
    rope_theta: float               # of layers without entries and of MTP
    compress_rope_theta: float      # of the others
    yarn: Yarn                      # of these; None: none
    max_position_embeddings: int
    mtp: bool = False               # is the MTP module trained? config.json then has our key mtp_weight
    mtp_weight: float = 0.0         # of its loss
    indexer_train: str = "off"      # or kl: by its loss, of the entries that it chooses; dense: all are chosen
    seq_balance_coef: float = 0.0
    bias_update_rate: float = 0.0
    tid2eid: tuple = ()             # for each hash layer k experts of each token

    @property
    def moe_layers(self):
        return tuple(range(self.num_hidden_layers))

    @property
    def bias_layers(self):
        return tuple(l for l in self.moe_layers if l not in self.hash_layers)

    def of_kind(self, kind):
        return tuple(l for l in self.moe_layers if self.kinds[l] == kind)

    @property
    def router(self):
        return Router(SQRT_SOFTPLUS, self.num_experts_per_tok, self.routed_scaling_factor)

    @property
    def hyper(self):
        return hyper.Shape(self.hc_sinkhorn_iters, self.hc_eps, self.rms_norm_eps)


SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
LABELS = {0: SLIDING, 4: CSA, 128: HCA}  # of compress_ratios
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank",
          "o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk",
          "num_experts_per_tok")
USUAL = {"hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "routed_scaling_factor": 1.5,
         "swiglu_limit": 10.0, "max_position_embeddings": 1048576, "mtp_weight": 0.0, "indexer_train": "off",
         "seq_balance_coef": 0.0, "bias_update_rate": 0.0}


def read_kinds(hf, path):
    """kinds, tokens of an entry of CSA and of HCA"""
    L, found = hf["num_hidden_layers"], hf.get("layer_types")
    if found is None:
        labels = need(hf, path, ["compress_ratios"])["compress_ratios"][:L]
        if len(labels) < L or not set(labels) <= set(LABELS):
            raise SystemExit(f"{path}: expected {L} compress_ratios of 0, 4 or 128, found {labels}")
        found = [LABELS[x] for x in labels]
    if len(found) != L or not set(found) <= set(LABELS.values()):
        raise SystemExit(f"{path}: expected {L} layer_types of {', '.join(LABELS.values())}, found {found}")
    rates = hf.get("compress_rates") or {}
    return (tuple(found), hf.get("compress_rate_csa") or rates.get(CSA, 4),
            hf.get("compress_rate_hca") or rates.get(HCA, 128))


def read_yarn(turn, path):
    kind = turn.get("rope_type", turn.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn" or turn.get("attention_factor", 1.0) != 1.0:
        raise SystemExit(f"{path}: expected RoPE of type default or yarn, attention_factor 1, found {turn}")
    return Yarn(float(turn["factor"]), turn["original_max_position_embeddings"], turn.get("beta_fast", 32),
                turn.get("beta_slow", 1))


def read_config(hf, path, batch, seq_len):
    """The Config of a config.json, of transformers or of the published models"""
    if hf.get("model_type") != "deepseek_v4":
        raise SystemExit(f"{path}: expected model_type deepseek_v4, found {hf.get('model_type')}")
    settings = {"scoring_func": "sqrtsoftplus", "hidden_act": "silu", "num_key_value_heads": 1, "attention_bias": False,
                "mlp_bias": False, "n_shared_experts": 1, "tie_word_embeddings": False, "attention_dropout": 0.0,
                "output_router_logits": False}
    wrong = {key: hf[key] for key, value in settings.items() if hf.get(key, value) != value}
    if wrong:
        raise SystemExit(f"{path}: expected {({key: settings[key] for key in wrong})}, found {wrong}")
    sizes, L = need(hf, path, NEEDED), hf["num_hidden_layers"]
    sizes.update({key: hf.get(key, value) for key, value in USUAL.items()})
    kinds, csa_ratio, hca_ratio = read_kinds(hf, path)
    hashed = hf.get("mlp_layer_types") or ["hash_moe"] * hf.get("num_hash_layers", 3)
    turn = hf.get("rope_parameters") or {}
    main, others = turn.get("main", {}), turn.get("compress", hf.get("rope_scaling") or turn)
    rotary = hf.get("qk_rope_head_dim") or int(hf["head_dim"] * hf["partial_rotary_factor"])
    return Config(**sizes, rotary=rotary, kinds=kinds, csa_ratio=csa_ratio, hca_ratio=hca_ratio,
                  n_routed_experts=hf.get("n_routed_experts") or hf["num_local_experts"],
                  moe_intermediate_size=hf.get("moe_intermediate_size") or hf["intermediate_size"],
                  hash_layers=tuple(l for l, kind in enumerate(hashed[:L]) if kind == "hash_moe"),
                  rope_theta=float(main.get("rope_theta", hf.get("rope_theta", 1e4))),
                  compress_rope_theta=float(turn.get("compress", {}).get("rope_theta",
                                                                         hf.get("compress_rope_theta", 1.6e5))),
                  yarn=read_yarn(others, path), mtp="mtp_weight" in hf, batch=batch, seq_len=seq_len)


def config_json(cfg):
    """The inverse of read_config, as transformers writes it"""
    out = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_act": "silu",
           "num_key_value_heads": 1, "n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
           "attention_bias": False, "tie_word_embeddings": False, "dtype": "float32",
           "num_nextn_predict_layers": int(cfg.mtp)}
    keys = [key for key in NEEDED + tuple(USUAL) if key != "mtp_weight" or cfg.mtp]
    out.update({key: getattr(cfg, key) for key in (*keys, "n_routed_experts", "moe_intermediate_size")})
    out.update({"layer_types": list(cfg.kinds), "compress_rates": {CSA: cfg.csa_ratio, HCA: cfg.hca_ratio},
                "mlp_layer_types": ["hash_moe" if l in cfg.hash_layers else "moe" for l in cfg.moe_layers],
                "rope_theta": cfg.rope_theta, "compress_rope_theta": cfg.compress_rope_theta})
    part = cfg.rotary / cfg.head_dim
    compress = {"rope_type": "default", "rope_theta": cfg.compress_rope_theta, "partial_rotary_factor": part}
    if cfg.yarn:
        compress.update({"rope_type": "yarn", "factor": cfg.yarn.factor, "beta_fast": cfg.yarn.beta_fast,
                         "beta_slow": cfg.yarn.beta_slow, "attention_factor": 1.0,
                         "original_max_position_embeddings": cfg.yarn.original})
    out.update({"partial_rotary_factor": part, "qk_rope_head_dim": cfg.rotary, "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": cfg.rope_theta, "partial_rotary_factor": part},
        "compress": compress}})
    return out


def metadata(cfg):
    run = trainer.metadata(replace(cfg, tid2eid=()))
    return {**config_json(cfg), **{key: run[key] for key in trainer.Run.__dataclass_fields__}}


# ---------------------------------------------------------------------------------------------------------------------
# The parameter table. Everything about a parameter is on its line.
# ---------------------------------------------------------------------------------------------------------------------
def block_rows(cfg, layers, indexer):
    """(name, shape, kind, name on disk, parts, layers) of what a layer has"""
    D, H, d, qr, hc = cfg.hidden_size, cfg.num_attention_heads, cfg.head_dim, cfg.q_lora_rank, cfg.hc_mult
    E, F, nI, dI = cfg.n_routed_experts, cfg.moe_intermediate_size, cfg.index_n_heads, cfg.index_head_dim
    out, M, csa, hca = cfg.o_groups * cfg.o_lora_rank, (2 + hc) * hc, layers(CSA), layers(HCA)
    every, biased = layers(None), layers("bias")
    gates = tuple(f"{e}.{part}.weight" for e in range(E) for part in ("w1", "w3"))
    downs = tuple(f"{e}.w2.weight" for e in range(E))

    def site(name):
        return [(name + "_fn", (M, hc * D), "linear", name + "_fn", ONE, every),
                (name + "_base", (M,), "zero", name + "_base", ONE, every),
                (name + "_scale", (3,), "gain", name + "_scale", ONE, every)]

    def compressor(name, disk, kind, channels, norm, r, where):
        return [(name + "_wkv", (channels, D), kind, disk + "compressor.wkv.weight", ONE, where),
                (name + "_wgate", (channels, D), kind, disk + "compressor.wgate.weight", ONE, where),
                (name + "_ape", (r, channels), "zero", disk + "compressor.ape", ONE, where),
                (name + "_norm", (norm,), "gain", disk + "compressor.norm.weight", ONE, where)]
    return [
        *site("hc_attn"),
        ("attn_norm",      (D,),               "gain",      "attn_norm.weight", ONE, every),
        ("wq_a",           (qr, D),            "linear",    "attn.wq_a.weight", ONE, every),
        ("q_norm",         (qr,),              "gain",      "attn.q_norm.weight", ONE, every),
        ("wq_b",           (H * d, qr),        "linear",    "attn.wq_b.weight", ONE, every),
        ("wkv",            (d, D),             "linear",    "attn.wkv.weight", ONE, every),
        ("kv_norm",        (d,),               "gain",      "attn.kv_norm.weight", ONE, every),
        ("attn_sink",      (H,),               "zero",      "attn.attn_sink", ONE, every),
        ("wo_a",           (out, H * d // cfg.o_groups), "linear", "attn.wo_a.weight", ONE, every),
        ("wo_b",           (D, out),           "linear",    "attn.wo_b.weight", ONE, every),
        *compressor("csa", "attn.", "linear", 2 * d, d, cfg.csa_ratio, csa),
        *compressor("hca", "attn.", "linear", d, d, cfg.hca_ratio, hca),
        *compressor("index", "attn.indexer.", indexer, 2 * dI, dI, cfg.csa_ratio, csa),
        ("index_wq_b",     (nI * dI, qr),      indexer,     "attn.indexer.wq_b.weight", ONE, csa),
        ("index_proj",     (nI, D),            indexer,     "attn.indexer.weights_proj.weight", ONE, csa),
        *site("hc_ffn"),
        ("ffn_norm",       (D,),               "gain",      "ffn_norm.weight", ONE, every),
        ("router",         (E, D),             "linear",    "ffn.gate.weight", ONE, every),
        ("selection_bias", (E,),               "selection", "ffn.gate.bias", ONE, biased),
        ("expert_gate_up", (E, 2 * F, D),      "linear",    "ffn.experts.", gates, every),
        ("expert_down",    (E, D, F),          "linear",    "ffn.experts.", downs, every),
        ("shared_gate_up", (2 * F, D),         "linear",    "ffn.shared_experts.", ("w1.weight", "w3.weight"), every),
        ("shared_down",    (D, F),             "linear",    "ffn.shared_experts.w2.weight", ONE, every),
    ]


def parameter_table(cfg):
    """Kinds: embeddings and linear layers are decayed; gains start around 1, the rest around 0. selection: no gradient
    reaches it; frozen: matrices that only the indexer's loss reaches, where there is none."""
    V, D, hc = cfg.vocab_size, cfg.hidden_size, cfg.hc_mult
    indexer = "frozen" if cfg.indexer_train == "off" else "linear"

    def layers_of(kind):
        return cfg.moe_layers if kind is None else cfg.bias_layers if kind == "bias" else cfg.of_kind(kind)

    def head(prefix, disk):
        return [Row(prefix + "hc_head_fn", (hc, hc * D), "linear", disk + "hc_head_fn"),
                Row(prefix + "hc_head_base", (hc,), "zero", disk + "hc_head_base"),
                Row(prefix + "hc_head_scale", (1,), "gain", disk + "hc_head_scale"),
                Row(prefix + "norm", (D,), "gain", disk + "norm.weight")]
    table = [Row("embed", (V, D), "embedding", "embed.weight")]
    table += [Row(name, (len(layers), *shape), kind, "layers.{}." + disk, parts, layers)
              for name, shape, kind, disk, parts, layers in block_rows(cfg, layers_of, indexer) if layers]
    table += [*head("", ""), Row("head", (V, D), "linear", "head.weight")]
    if cfg.mtp:
        table += [Row("mtp_e_proj", (D, D), "linear", "mtp.0.e_proj.weight"),
                  Row("mtp_h_proj", (D, D), "linear", "mtp.0.h_proj.weight"),
                  Row("mtp_enorm", (D,), "gain", "mtp.0.enorm.weight"),
                  Row("mtp_hnorm", (D,), "gain", "mtp.0.hnorm.weight")]
        table += [Row("mtp_" + name, shape, kind, "mtp.0." + disk, parts) for name, shape, kind, disk, parts, layers in
                  block_rows(cfg, lambda kind: kind in (None, "bias"), indexer) if layers]
        table += head("mtp_", "mtp.0.")
    return table


MTP_OWN = ("mtp_e_proj", "mtp_h_proj", "mtp_enorm", "mtp_hnorm", "mtp_norm", "mtp_hc_head_fn", "mtp_hc_head_base",
           "mtp_hc_head_scale")


def mtp_layer(p):
    """The parameters of its layer, under the names that layers of the trunk have"""
    return Layer({name[4:]: x for name, x in p.items() if name.startswith("mtp_") and name not in MTP_OWN})


OFFICIAL = [  # what names of transformers have, in memory and in files that it writes, and the official ones instead
    (r"^model\.", ""), (r"^lm_head\.", "head."), (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_(fn|base|scale)$", r"hc_head_\1"),
    (r"\.input_layernorm\.", ".attn_norm."), (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"), (r"\.self_attn\.", ".attn."), (r"\.mlp\.", ".ffn."),
    (r"\.compressor\.indexer\.(q_b_proj|scorer|weights_proj)", r".indexer.\1"),
    (r"\.compressor\.indexer\.", ".indexer.compressor."), (r"\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.kv_proj\.", ".compressor.wkv."), (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.compressor\.position_bias$", ".compressor.ape"), (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.q_a_norm\.", ".q_norm."), (r"\.attn\.norm\.", ".attn.kv_norm."), (r"\.attn\.sinks$", ".attn.attn_sink"),
    (r"\.q_a_proj\.", ".wq_a."), (r"\.q_b_proj\.", ".wq_b."), (r"\.kv_proj\.", ".wkv."), (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."), (r"\.e_score_correction_bias$", ".bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."), (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
]


def official_name(name):
    for pattern, new in OFFICIAL:
        name = re.sub(pattern, new, name)
    return name


def official_tensors(tensors):
    """The same by official names, each expert apart; arrays of NumPy or of torch"""
    out = {}
    for name, x in tensors.items():
        name = official_name(name)
        experts, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            half = x.shape[1] // 2
            out.update({f"{experts}.{e}.{w}.weight": part for e, both in enumerate(x)
                        for w, part in (("w1", both[:half]), ("w3", both[half:]))})
        elif last == "down_proj":
            out.update({f"{experts}.{e}.w2.weight": part for e, part in enumerate(x)})
        else:
            out[name] = x
    return out


def fit(cfg, tensors):
    """Official names, and the tables of layers where the token decides"""
    tensors = official_tensors(tensors)
    tables = [tensors[f"layers.{l}.ffn.gate.tid2eid"].tolist() for l in cfg.hash_layers]
    return replace(cfg, tid2eid=tuple(tuple(map(tuple, table)) for table in tables)), tensors


def tables_to_disk(cfg):
    return {f"layers.{l}.ffn.gate.tid2eid": np.array(table, np.int32) for l, table in zip(cfg.hash_layers, cfg.tid2eid)}
