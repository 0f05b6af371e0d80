"""
A tiny DeepSeek V4 and its numbers, as printed in the specification that this project was written from, which is not in
the repository. In float64 transformers' DeepseekV4ForCausalLM gives those of forward, gradients, updates and LoRA to
the last digit; units and the indexer's loss were held against automatic differentiation. deepseek_v4.py must give all
of them, to the last digit printed. NumPy and the standard library only.
Numbers such as "6.3" in the names of promises are that specification's sections: 2.3 YaRN, 3.1 what has no gradient,
5.3 names, 6.1 the config, 6.2 the weights, 6.3 forward, 6.4 units, 6.5 gradients, updates and LoRA, 7.1 counts.
"""
import math
from dataclasses import replace

import numpy as np

import deepseek_v4 as v4
import exact
import hyper_connections as hyper
import trainer
from deepseek_v4 import backward, count, forward, numbers
from deepseek_v4_config import CSA, HCA, SLIDING, parameter_table, read_config
from exact import F4, F8

TINY = {  # 6.1, in transformers' form
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "float32",
    "vocab_size": 128, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "partial_rotary_factor": 0.25,
    "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.0, "layer_types": [SLIDING, CSA, HCA, CSA, HCA, SLIDING],
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe", "moe"], "compress_rates": {CSA: 4, HCA: 16},
    "sliding_window": 8, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 4, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-06, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0, "max_position_embeddings": 256, "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "compress": {"rope_type": "yarn", "rope_theta": 160000.0, "partial_rotary_factor": 0.25, "factor": 4.0,
                     "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0}},
    "num_nextn_predict_layers": 0, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "attention_dropout": 0.0, "initializer_range": 0.02, "tie_word_embeddings": False, "pad_token_id": None,
    "bos_token_id": 0, "eos_token_id": 1, "use_cache": False}
FORM_B = {**{key: x for key, x in TINY.items() if key not in ("layer_types", "compress_rates", "mlp_layer_types",
                                                              "partial_rotary_factor", "rope_parameters")},
          "compress_ratios": [0, 4, 128, 4, 128, 0], "compress_rate_hca": 16, "num_hash_layers": 2,
          "qk_rope_head_dim": 8, "rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "beta_fast": 32,
                                                  "beta_slow": 1, "original_max_position_embeddings": 64}}
FLASH = {"model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43,
         "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
         "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128,
         "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0], "index_n_heads": 64, "index_head_dim": 128,
         "index_topk": 512, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
         "moe_intermediate_size": 2048, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5,
         "num_hash_layers": 3, "rope_theta": 10000, "compress_rope_theta": 160000,
         "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32,
                          "beta_slow": 1}}
PRO = {**FLASH, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536,
       "o_groups": 16, "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0], "index_topk": 1024,
       "n_routed_experts": 384, "moe_intermediate_size": 3072, "routed_scaling_factor": 2.5}


# ---------------------------------------------------------------------------------------------------------------------
# Section 6.2: the weights.
# ---------------------------------------------------------------------------------------------------------------------
def noise(key, n):
    """h(key, i), i < n, uint64"""
    z = np.arange(n, dtype=np.uint64) + np.uint64((key << 32) + 0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def value(key, shape, amp, off):
    h = noise(key, math.prod(shape))
    return ((2 * ((h >> np.uint64(40)).astype(F8) * 2.0 ** -24) - 1) * amp + off).reshape(shape)


GLOBALS = {"embed": (1, 1, 0), "head": (2, .25, 0), "norm": (3, .25, 1), "hc_head_fn": (4, .125, 0),
           "hc_head_base": (5, .5, 0), "hc_head_scale": (6, .5, 1)}
OF_LAYER = {"wq_a": (1, .25, 0), "q_norm": (2, .25, 1), "wq_b": (3, .25, 0), "wkv": (4, .25, 0), "kv_norm": (5, .25, 1),
            "wo_a": (6, .25, 0), "wo_b": (7, .25, 0), "attn_sink": (8, 1, 0), "index_wq_b": (24, .25, 0),
            "index_proj": (25, .5, 0), "router": (30, .5, 0), "selection_bias": (31, .125, 0),
            "expert_down": (37, .25, 0), "shared_down": (34, .25, 0), "attn_norm": (46, .25, 1), "ffn_norm": (47, .25, 1)}
for start, name in ((10, "csa"), (10, "hca"), (20, "index")):
    for number, (part, amp, off) in enumerate((("wkv", .25, 0), ("wgate", .5, 0), ("ape", 1, 0), ("norm", .25, 1))):
        OF_LAYER[f"{name}_{part}"] = (start + number, amp, off)
for start, name in ((40, "hc_attn"), (43, "hc_ffn")):
    for number, (part, amp, off) in enumerate((("fn", .125, 0), ("base", .5, 0), ("scale", .5, 1))):
        OF_LAYER[f"{name}_{part}"] = (start + number, amp, off)
OF_MTP = {"e_proj": (50, .25, 0), "h_proj": (51, .25, 0), "enorm": (52, .25, 1), "hnorm": (53, .25, 1),
          "norm": (54, .25, 1), "hc_head_fn": (55, .125, 0), "hc_head_base": (56, .5, 0), "hc_head_scale": (57, .5, 1)}


def tensor_of(name, base, shape):
    """Of a layer; w1 and w3 have numbers of their own"""
    pair = {"shared_gate_up": (33, 35), "expert_gate_up": (36, 38)}.get(name)
    if pair:
        half = (*shape[:-2], shape[-2] // 2, shape[-1])
        return np.concatenate([value(base + key, half, .25, 0) for key in pair], axis=-2)
    key, amp, off = OF_LAYER[name]
    return value(base + key, shape, amp, off)


def specified_model(cfg):
    """Parameters in float64, cfg with the tables"""
    p = {}
    for row in parameter_table(cfg):
        short = row.name.removeprefix("mtp_")
        if row.name in GLOBALS:
            key, amp, off = GLOBALS[row.name]
            p[row.name] = value(key, row.shape, amp, off)
        elif short in OF_MTP and row.name.startswith("mtp_"):
            key, amp, off = OF_MTP[short]
            p[row.name] = value(700 + key, row.shape, amp, off)
        elif row.name.startswith("mtp_"):
            p[row.name] = tensor_of(short, 700, row.shape)
        else:
            p[row.name] = np.stack([tensor_of(row.name, 100 * (l + 1), row.shape[1:]) for l in row.numbers])
    tables = []
    for l in cfg.hash_layers:
        e0, e1 = (noise(100 * (l + 1) + key, cfg.vocab_size) % np.uint64(n) for key, n in ((32, 8), (39, 7)))
        tables.append(tuple(zip(e0.tolist(), ((e0 + np.uint64(1) + e1) % np.uint64(8)).tolist())))
    return p, replace(cfg, tid2eid=tuple(tables))


def specified_batch(S):
    """The first S tokens of each row: inputs, and targets of which the last are not counted"""
    ids = (noise(1013, 140) % np.uint64(128)).astype(np.int32).reshape(2, 70)[:, :S]
    return ids, np.concatenate([ids[:, 1:], np.full((2, 1), -100, np.int32)], axis=1)


# ---------------------------------------------------------------------------------------------------------------------
# How far numbers agree.
# ---------------------------------------------------------------------------------------------------------------------
def unit(text):
    """One in the last place of a number as it is printed"""
    mantissa, _, exponent = text.partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def as_printed(found, text):
    """Are these the numbers of a text, rounded to the digits that it has?"""
    expected = text.replace("|", " ").split()
    found = np.reshape(found, -1)
    return len(found) == len(expected) and all(
        abs(x - float(y)) <= 0.51 * unit(y) for x, y in zip(found.tolist(), expected))


def six_digits(found, text):
    """The same of a number that lost its last zeros"""
    expected = float(text)
    return abs(found - expected) <= 0.51 * 10.0 ** (math.floor(math.log10(expected)) - 5)


# ---------------------------------------------------------------------------------------------------------------------
# Section 6.3: forward.
# ---------------------------------------------------------------------------------------------------------------------
RMS = "0.5836594926 0.8725029238 1.0306581666 1.2166132509 1.3707652283 1.4803991552 1.5975214913"
ELEMENTS = "-0.3075647354 -0.5498693101 -0.5185409067 0.1872909769 0.8059047476 0.7269714697 0.5900615985"
SHORTER = {3: "5.151269384107", 5: "5.257438302196", 16: "5.289097962434", 17: "5.388067109845", 64: "5.519643071112",
           70: "5.488589623845"}
POST = "0.78632027 1.28151073 1.49097599 1.75068706"
COMB = """0.34841123 0.16369219 0.15900292 0.32889267 | 0.20493869 0.28594098 0.23412696 0.27499237 |
          0.28737341 0.25683692 0.18958357 0.26620509 | 0.15927567 0.29352890 0.41728555 0.12990888"""
SCORES = """-0.246701 4.527332 2.487205 2.820124 1.064683 2.919168 5.448565 0.963644 2.669763 6.351377 3.649074
            -0.050452 -3.282742 -0.857894 2.425415 3.703650 1.562118"""


class Tiny:
    """The tiny model in float64, its batch, one forward and backward"""

    def __init__(self, S=70, dtype=F8, **knobs):
        p, self.cfg = specified_model(read_config({**TINY, **knobs}, "TINY", 2, S))
        self.p = {name: x.astype(dtype) for name, x in p.items()}
        self.inputs, self.targets = specified_batch(S)
        self.count = count(self.inputs, self.targets, self.cfg)

    def forward(self, p=None):
        return forward(self.p if p is None else p, self.inputs, self.targets, self.cfg)

    def numbers(self, acts):
        return numbers([acts], self.count, self.cfg)

    def backward(self, acts, p=None):
        return backward(self.p if p is None else p, acts, self.inputs, self.targets, self.count, self.cfg)


def score_gap(acts, p, cfg):
    """The smallest distance of a selected score from one that is not, of routers and of indexers"""
    gaps = []

    def look(c, n):
        c = np.sort(c)[..., ::-1]
        gaps.append((c[..., n - 1] - c[..., n]).min())
    for l, a in enumerate(acts["blocks"]):
        if l in cfg.bias_layers:
            look(a["scores"] + p["selection_bias"][cfg.bias_layers.index(l)], cfg.num_experts_per_tok)
        if "index_scores" in a:
            for t in range(cfg.seq_len):
                n = (t + 1) // cfg.csa_ratio
                if n > cfg.index_topk:
                    look(a["index_scores"][:, t, :n], cfg.index_topk)
    if cfg.mtp:  # which section 6.3 has no last position of
        look(acts["mtp_scores"][:, :-1] + p["mtp_selection_bias"], cfg.num_experts_per_tok)
    return min(gaps)


def clamp_distance(acts, cfg):
    """Of all gates and ups from their bounds, the smallest"""
    def of(pre):
        gate, up = np.split(pre, 2, axis=-1)
        return min(np.abs(gate - cfg.swiglu_limit).min(), np.abs(np.abs(up) - cfg.swiglu_limit).min())
    return min(of(a[name]) for a in acts["blocks"] for name in ("expert_gate_up", "shared_gate_up"))


def forward_promises():
    tiny = Tiny(mtp_weight=0.3)
    p, cfg, acts = tiny.p, tiny.cfg, tiny.forward()
    found, blocks = tiny.numbers(acts), acts["blocks"]
    streams = [v4.streams_before(acts, cfg, l) for l in range(7)]
    a, gate_up = blocks[0], blocks[0]["shared_gate_up"]
    gate, up = np.split(gate_up, 2, axis=-1)
    by_expert = dict(zip(blocks[2]["experts"][1, 69].tolist(), blocks[2]["weights"][1, 69]))
    lengths = {S: Tiny(S) for S in SHORTER}
    where = v4.frequencies(8, 1e4, None, np.dtype(F8)), v4.frequencies(8, 1.6e5, cfg.yarn, np.dtype(F8))
    return [
        ("6.2: tokens", tiny.inputs[0, :10].tolist() == [5, 17, 89, 0, 53, 45, 10, 66, 13, 42] and
         tiny.inputs[1, 65:].tolist() == [76, 65, 53, 45, 66]),
        ("6.2: weights", as_printed(p["embed"][0, :3], "0.5326035023 -0.7479380369 0.4018623829") and
         as_printed(p["wq_a"][0, 0, :3], "-0.1291373074 -0.0341888666 -0.1759540737")),
        ("6.2: the table of layer 0", cfg.tid2eid[0][5] == (7, 6)),
        ("6.3: RMS of the streams", as_printed([np.sqrt((X * X).mean()) for X in streams], RMS)),
        ("6.3: an element of the streams", as_printed([X[1, 69, 2, 5] for X in streams], ELEMENTS)),
        ("6.3: logits", as_printed(acts["logits"][0, 0, :3], "0.546342049 0.393632229 1.214017788") and
         as_printed(acts["logits"][1, 69, 125:], "0.261612158 0.740629678 1.221427098")),
        ("6.3: cross entropy at six lengths", all(
            as_printed(x.numbers(x.forward())["loss"], SHORTER[S]) for S, x in lengths.items())),
        ("6.3: MTP and the sum", as_printed([found["mtp_loss"], found["loss"]], "5.437396019661 7.119808429743")),
        ("6.3: the smallest gap of scores", as_printed(score_gap(acts, p, cfg), "8e-4")),
        ("6.3: attention of layers 0, 1, 2",
         as_printed(blocks[0]["attention_out"][0, 0, :3], "0.010587241 0.516076129 0.236784358") and
         as_printed(blocks[1]["attention_out"][1, 69, :3], "0.487147391 0.215011259 0.050141966") and
         as_printed(blocks[2]["attention_out"][1, 69, :3], "0.807372005 0.107129927 -0.430518485")),
        ("6.3: a site", as_printed(a["hc_attn_post"][0, 0], POST) and as_printed(a["hc_attn_comb"][0, 0], COMB)),
        ("6.3: the indexer", as_printed(blocks[1]["index_scores"][0, 69], SCORES) and
         blocks[1]["index_chosen"][0, 69].tolist() == [1, 6, 9, 15]),
        ("6.3: the router", sorted(by_expert) == [3, 5] and
         as_printed([by_expert[5], by_expert[3]], "0.82782554 0.67217446")),
        ("6.3: clamped gates and ups", as_printed([(gate > 1).mean(), (np.abs(up) > 1).mean()], "0.215 0.400")),
        ("6.3: frequencies", np.allclose(where[0], [1, 1e-1, 1e-2, 1e-3], 1e-14) and
         np.allclose(where[1], [1, 1.25e-2, 6.25e-4, 3.125e-5], 1e-14)),
        ("6.5: the value nearest to its bound", as_printed(clamp_distance(acts, cfg), "1.5e-6")),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Sections 6.4 and 2.3: units.
# ---------------------------------------------------------------------------------------------------------------------
SINKHORN = """0.03986878 0.13913609 0.47564095 0.34535319 | 0.34926263 0.16496115 0.07632097 0.40945424 |
              0.02685832 0.42006806 0.32042138 0.23265124 | 0.58400927 0.27583369 0.12761570 0.01254033"""
DA = """-0.013178513 0.049471645 -0.010186359 -0.026106772 | -0.026618084 -0.064348617 0.017776802 0.073189900 |
        0.014141663 0.089337336 -0.052647866 -0.050831133 | 0.025655046 -0.074459958 0.045056815 0.003748097"""
FLASH_INV = """1 6.876560219e-01 3.635538584e-03 2.265625000e-03 2.969777783e-04 1.953125000e-05 5.372312671e-06
               5.680529037e-07"""


def unit_promises():
    A = np.array([[0, 1, 2, 3], [1, 0, -1, 2], [-2, .5, 0, 1], [3, 2, 1, 0]])
    dC = np.array([[((3 * j + 5 * k) % 7) / 7 for k in range(4)] for j in range(4)])
    flash = read_config(FLASH, "FLASH", 1, 1)
    frequency = v4.frequencies(64, 1.6e5, flash.yarn, np.dtype(F8))[[0, 1, 15, 16, 20, 24, 25, 31]]
    return [
        ("6.4: Sinkhorn", as_printed(hyper.sinkhorn_forward(A, 20, 1e-6), SINKHORN)),
        ("6.4: one iteration", as_printed(hyper.sinkhorn_forward(A, 1, 1e-6)[0],
                                          "0.03419849 0.12259889 0.44044231 0.35498643")),
        ("6.4: backward", as_printed(hyper.sinkhorn_backward(dC, A, 20, 1e-6), DA)),
        ("6.4: backward of one iteration", as_printed(hyper.sinkhorn_backward(dC, A, 1, 1e-6)[0],
                                                      "-0.010593981 0.046757989 -0.006022028 -0.030141980")),
        ("2.3: YaRN of the published model", v4.yarn_range(flash.yarn, 1.6e5, 64) == (15, 25) and
         all(abs(x / float(y) - 1) < 1e-9 for x, y in zip(frequency, FLASH_INV.split()))),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Section 6.5: gradients.
# ---------------------------------------------------------------------------------------------------------------------
CE_NORMS = """
    wq_a              0.776527 0.377939 0.307606 0.247567 0.161593 0.131901
    q_norm            0.116126 0.0582225 0.0410931 0.028811 0.0183089 0.0186896
    wq_b              0.782726 0.409138 0.305379 0.235304 0.163352 0.12173
    wkv               1.29632 0.595103 0.555791 0.334908 0.285993 0.246797
    kv_norm           0.214333 0.101051 0.0981911 0.0447607 0.0501442 0.032275
    wo_a              1.05974 0.569229 0.550485 0.330578 0.26328 0.237698
    wo_b              1.09944 0.586094 0.563612 0.326468 0.273745 0.226525
    attn_sink         0.0244564 0.00948223 0.00695678 0.00243146 0.00704745 0.00653246
    compressor.wkv    - 0.355711 0.214216 0.202747 0.110203 -
    compressor.wgate  - 0.180451 0.135965 0.0946095 0.0485135 -
    compressor.ape    - 0.0201282 0.0171489 0.0136179 0.00608266 -
    compressor.norm   - 0.0441457 0.0362864 0.0323715 0.0188022 -
    gate.weight       0.108057 0.0680565 0.0294708 0.0241106 0.0183806 0.0195353
    shared.w1         0.502394 0.322609 0.232991 0.19457 0.154305 0.129882
    shared.w2         0.421587 0.293308 0.193121 0.170276 0.11617 0.110452
    shared.w3         0.493083 0.317158 0.214611 0.199247 0.148758 0.128144
    experts.w1        0.596342 0.379919 0.243003 0.221315 0.153934 0.138626
    experts.w2        0.488731 0.321543 0.194794 0.179499 0.123366 0.115121
    experts.w3        0.59863 0.387146 0.219521 0.212564 0.156329 0.141751
    hc_attn_fn        0.442301 0.362649 0.216975 0.129164 0.0754002 0.130078
    hc_attn_base      0.0552365 0.0206028 0.0139048 0.00259721 0.00703758 0.00273152
    hc_attn_scale     0.0319014 0.0148363 0.000720291 0.0133842 0.00547925 0.00199528
    hc_ffn_fn         0.421365 0.236371 0.114871 0.104706 0.0600216 0.0644016
    hc_ffn_base       0.0169496 0.0135384 0.00650241 0.00944361 0.00814857 0.00432385
    hc_ffn_scale      0.0194555 0.00773527 0.0142142 0.00178021 0.00599859 0.00595691
    attn_norm         0.216108 0.113112 0.097791 0.0632608 0.0464433 0.0339311
    ffn_norm          0.179783 0.116183 0.0748157 0.0599957 0.0463056 0.0356975
"""
TOTAL_NORMS = """
    wq_a              0.793267 0.395243 0.322928 0.247784 0.170944 0.13505 0.0457325
    q_norm            0.111876 0.0563987 0.0421344 0.0314331 0.0193112 0.0176401 0.00634328
    wq_b              0.805198 0.418813 0.32124 0.237592 0.171578 0.123289 0.0462024
    wkv               1.34235 0.606094 0.564749 0.351848 0.29676 0.255275 0.0859088
    kv_norm           0.22161 0.101677 0.100138 0.0454566 0.0498877 0.031911 0.0138333
    wo_a              1.09579 0.588831 0.55565 0.3393 0.272655 0.242692 0.0727906
    wo_b              1.13367 0.598593 0.571052 0.332201 0.279846 0.233977 0.0765234
    attn_sink         0.0208629 0.00917861 0.00743653 0.00194754 0.00708748 0.0067168 0.000359792
    compressor.wkv    - 0.372164 0.218571 0.207918 0.109469 - -
    compressor.wgate  - 0.190498 0.138501 0.0965691 0.0501757 - -
    compressor.ape    - 0.0213385 0.0172779 0.0137991 0.0064155 - -
    compressor.norm   - 0.0436954 0.0352408 0.0316527 0.0176027 - -
    gate.weight       0.106971 0.0676373 0.0305603 0.0247063 0.0198872 0.0202252 0.00452308
    shared.w1         0.520371 0.33403 0.240816 0.197681 0.159926 0.134902 0.0317793
    shared.w2         0.432777 0.299129 0.197638 0.177067 0.120723 0.11364 0.0263931
    shared.w3         0.512535 0.330156 0.22207 0.202061 0.155103 0.131069 0.0314267
    experts.w1        0.616942 0.395085 0.247078 0.229812 0.158453 0.143001 0.0348599
    experts.w2        0.503934 0.330757 0.199923 0.18451 0.126137 0.11733 0.0280971
    experts.w3        0.614223 0.401524 0.225582 0.219581 0.159482 0.145407 0.0340367
    hc_attn_fn        0.456707 0.357118 0.219768 0.129431 0.0763094 0.124803 0.0296791
    hc_attn_base      0.0534772 0.0208997 0.0185591 0.00421961 0.00659981 0.00396687 0.0017226
    hc_attn_scale     0.0224813 0.0127542 0.00143086 0.0142593 0.00831997 0.00250931 0.000911022
    hc_ffn_fn         0.425801 0.258565 0.119743 0.104014 0.0653486 0.0634692 0.01958
    hc_ffn_base       0.0171288 0.0184283 0.00730942 0.0091909 0.00903332 0.00382124 0.00122403
    hc_ffn_scale      0.0213637 0.0112309 0.0141745 0.000897621 0.00737268 0.00525412 0.00291351
    attn_norm         0.226081 0.117956 0.0994426 0.0687051 0.0470271 0.0362396 0.0158647
    ffn_norm          0.188743 0.120435 0.0762084 0.0614597 0.0465088 0.0379585 0.00980469
"""
OTHERS = {  # of the cross entropy, and of the sum
    "embed": ("0.492867664", "0.507750516"), "head": ("0.722376976", "0.763922005"), "norm": ("0.189831727",) * 2,
    "hc_head_fn": ("0.0319535883",) * 2, "hc_head_base": ("0.00178486194",) * 2,
    "hc_head_scale": ("0.00114000192",) * 2}
MTP_NORMS = {"e_proj": "0.170227385", "h_proj": "0.176193455", "enorm": "0.0232827014", "hnorm": "0.0256270532",
             "norm": "0.0569595848", "hc_head_fn": "0.00497663473", "hc_head_base": "0.000347166209",
             "hc_head_scale": "0.000535119164"}
SINGLE = {  # by names on disk
    ("layers.2.hc_ffn_scale",): "1.251113632e-03 1.415813311e-02 -1.612720545e-04",
    ("layers.0.attn.attn_sink",): "8.405664607e-03 1.115149837e-03 -1.398649777e-02 -1.818227195e-02",
    ("layers.1.attn.attn_sink",): "-2.178866812e-03 -3.726478845e-03 1.921614103e-03 8.221069315e-03",
    ("hc_head_base",): "-2.297415572e-04 1.054523472e-03 -1.421490408e-03 -1.721085419e-05",
    ("embed.weight", 5, 0): "-6.065062631e-03", ("layers.0.attn.wkv.weight", 31, 0): "3.928086997e-03",
    ("layers.1.attn.compressor.ape", 0, 0): "5.775251101e-04",
    ("layers.1.attn.compressor.ape", 3, 63): "4.374795379e-04",
    ("layers.1.attn.compressor.wgate.weight", 0, 0): "-1.258067119e-03",
    ("layers.1.attn.compressor.wkv.weight", 40, 7): "4.888313725e-03",
    ("layers.2.attn.compressor.ape", 15, 31): "5.552606746e-04",
    ("layers.2.ffn.gate.weight", 3, 10): "1.220119635e-03",
    ("layers.0.ffn.experts.7.w1.weight", 0, 0): "-5.603261652e-03",
    ("layers.3.attn.wo_a.weight", 17, 5): "4.298638672e-03"}
INDEX = {  # loss; norms of the gradients of the compressor's wkv, wgate, ape and norm, of wq_b and weights_proj
    1: "0.2829336119 0.364674111 0.161933668 0.0228733299 0.104047124 0.355923449 0.174052287",
    3: "0.2828412218 0.363039411 0.128559819 0.0179737615 0.111091406 0.337638389 0.161157800"}


def norm(x):
    return math.sqrt((x.astype(F8) ** 2).sum())


def norms_by_name(tensors):
    """Norms by the short names of the tables: {name: {layer, or mtp: norm}}, experts of a layer together"""
    squares = {}
    for name, x in tensors.items():
        where, _, short = name.removeprefix("layers.").removeprefix("mtp.").partition(".")
        if name.startswith(("layers.", "mtp.")) and ".indexer." not in name:
            parts = [part for part in short.split(".") if part not in ("attn", "ffn") and not part.isdigit()]
            short = ".".join(parts).replace("shared_experts", "shared")
            short = short if short == "gate.weight" else short.removesuffix(".weight")
            of = squares.setdefault(short, {})
            key = "mtp" if name.startswith("mtp.") else int(where)
            of[key] = of.get(key, 0.0) + norm(x) ** 2
    return {name: {key: math.sqrt(x) for key, x in of.items()} for name, of in squares.items()}


def table_agrees(text, found):
    kept = []
    for line in text.strip().split("\n"):
        name, *cells = line.split()
        layers = [0, 1, 2, 3, 4, 5, "mtp"]
        kept += [six_digits(found[name][key], cell) if cell != "-" else key not in found[name]
                 for key, cell in zip(layers, cells)]
    return all(kept), len(kept)


def gradient_promises():
    out = []
    for place, (name, table, knobs) in enumerate((("cross entropy", CE_NORMS, {}),
                                                  ("with MTP", TOTAL_NORMS, {"mtp_weight": 0.3}))):
        tiny = Tiny(**knobs)
        g = tiny.backward(tiny.forward())
        disk = trainer.to_disk(v4.MODEL, g, tiny.cfg)
        agrees, n = table_agrees(table, norms_by_name(disk))
        out += [(f"6.5, {name}: {n} norms of gradients", agrees),
                (f"6.5, {name}: norms outside the layers",
                 all(as_printed(norm(g[key]), texts[place]) for key, texts in OTHERS.items())),
                (f"6.5, {name}: the indexer's gradients are 0",
                 not any(x.any() for key, x in disk.items() if ".indexer." in key or key.endswith("gate.bias")))]
        if place:
            out.append(("6.5: norms of what MTP alone has",
                        all(as_printed(norm(g["mtp_" + key]), text) for key, text in MTP_NORMS.items())))
            continue
        noise_of = disk["layers.0.hc_attn_scale"]
        out += [("6.5: elements", all(as_printed(disk[name][tuple(at)] if at else disk[name], text)
                                      for (name, *at), text in SINGLE.items()) and
                 as_printed(noise_of[1], "-3.190143737e-02") and np.abs(noise_of[[0, 2]]).max() < 1e-12),
                ("6.5: norm of all", as_printed(math.sqrt(sum(norm(x) ** 2 for x in g.values())), "3.698539211"))]
    return out + index_promises() + float_promises()


def index_promises():
    tiny = Tiny(indexer_train="kl")
    acts = tiny.forward()
    g, losses, kept = tiny.backward(acts), tiny.numbers(acts)["index_loss"], []
    for i, l in enumerate((1, 3)):
        names = ("wkv", "wgate", "ape", "norm", "wq_b", "proj")
        kept.append(as_printed([losses[i]] + [norm(g["index_" + name][i]) for name in names], INDEX[l]))
    return [("6.5: loss of the indexer and its gradients", all(kept) and tiny.count.index == 134)]


# Gradients of float against those of float64: the largest error over the largest entry. Limits: those of section 6.5
NOISY = {"hc_head_scale": 1e-2, "hc_attn_scale": 8e-4, "hc_ffn_scale": 1e-4, "attn_sink": 6e-5, "hc_attn_base": 6e-5,
         "hc_ffn_base": 6e-5, "hc_head_base": 6e-5}


def float_promises():
    exactly, rounded = Tiny(mtp_weight=0.3), Tiny(mtp_weight=0.3, dtype=F4)
    acts, again = exactly.forward(), rounded.forward()
    truth, g = exactly.backward(acts), rounded.backward(again)
    same = all(np.array_equal(a[key], b[key]) for a, b in zip(acts["blocks"], again["blocks"])
               for key in ("experts", "index_chosen") if key in a)
    error = np.abs(again["logits"] - acts["logits"]).max() / np.abs(acts["logits"]).max()
    worst = 0.0
    for name, x in truth.items():
        layers = list(zip(x, g[name])) if x.ndim > 1 and "embed" != name else [(x, g[name])]
        limit = NOISY.get(name.removeprefix("mtp_"), 3e-5)
        for l, (a, b) in enumerate(layers):
            if a.any() and not (l == 0 and name.startswith("hc_attn_")):  # 3.1: noise by symmetry
                worst = max(worst, np.abs(b - a).max() / np.abs(a).max() / limit)
    return [(f"6.5: float selects as float64 does, logits within {error:.0e}", same and error < 5e-6),
            (f"6.5: gradients of float within {worst:.2f} of the limits", worst < 1)]


# ---------------------------------------------------------------------------------------------------------------------
# Section 6.5: training and LoRA.
# ---------------------------------------------------------------------------------------------------------------------
SGD = "5.4885896238 4.6427862607 4.1293325066 3.7468961689 3.3869494461"
ADAMW = "5.4885896238 4.5385751458 3.8522402116 3.3130156425 2.9305731610"
LORA_NAMES = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
LORA = {
    0: ".447350035 .485896286 .468779719 .450058242 .681105996 .695519246 .552915158 .726873914 .683262691 .730896838",
    1: ".241916476 .227221302 .283625807 .268101705 .315757748 .405989298 .341143986 .272667517 .267151014 .282965134",
    5: ".058239643 .064651743 .064789062 .059909279 .133829226 .117411957 .122820442 .107759074 .101337032 .095583880"}


def training_promises():
    tiny, out = Tiny(), []
    for name, expected in (("SGD", SGD), ("AdamW", ADAMW)):
        p, losses, gaps = dict(tiny.p), [], []
        m, v = ({key: np.zeros_like(x) for key, x in p.items()} for _ in range(2))
        for step in range(5):
            acts = tiny.forward(p)
            losses.append(tiny.numbers(acts)["loss"])
            g = tiny.backward(acts, p)
            gaps.append(score_gap(acts, p, tiny.cfg))
            for key in p:
                if name == "SGD":
                    p[key] = p[key] - 0.1 * g[key]
                else:
                    corrections = [1 - beta ** (step + 1) for beta in (0.9, 0.999)]
                    p[key], m[key], v[key] = exact.adamw(p[key], g[key], m[key], v[key], 1e-3, 0.9, 0.999, 1e-8, 0.0,
                                                         corrections)
        out.append((f"6.5: five losses with {name}", as_printed(losses, expected)))
    return out + [("6.5: the smallest gap of scores on the way, with AdamW",
                   min(gaps) == gaps[2] and as_printed(gaps[2], "4e-5"))]


def merged_model(tiny):
    """Parameters W + 2 B A, and A, B of each matrix that has an adapter, all layers'"""
    p, pairs = dict(tiny.p), {}
    for k, name in enumerate(LORA_NAMES):
        shape = p[name].shape[1:]
        A, B = (np.stack([value(100 * (l + 1) + 60 + 2 * k + b, size, .25, 0) for l in range(6)])
                for b, size in ((0, (4, shape[1])), (1, (shape[0], 4))))
        pairs[name], p[name] = (A, B), p[name] + 2 * B @ A
    return p, pairs


def lora_gradients(tiny, p, pairs):
    """By those of the merged weights: W + 2 B A gives dA = 2 B^T dW, dB = 2 dW A^T"""
    g = tiny.backward(tiny.forward(p), p)
    return {name: (2 * B.swapaxes(1, 2) @ g[name], 2 * g[name] @ A.swapaxes(1, 2)) for name, (A, B) in pairs.items()}


def lora_promises():
    tiny = Tiny()
    p, pairs = merged_model(tiny)
    acts = tiny.forward(p)
    norms = {l: [] for l in range(6)}
    for both in lora_gradients(tiny, p, pairs).values():
        for l in range(6):
            norms[l] += [norm(x[l]) for x in both]
    total = math.sqrt(sum(x * x for of in norms.values() for x in of))
    return [("6.5: LoRA", as_printed([tiny.numbers(acts)["loss"], total], "5.606511973355 2.370998422") and
             all(as_printed(norms[l], text) for l, text in LORA.items()))]


# ---------------------------------------------------------------------------------------------------------------------
# Section 7.1: counts.
# ---------------------------------------------------------------------------------------------------------------------
def sizes(hf):
    """Attention of a layer of each kind, both sites, the experts of a layer, those active, the trunk, MTP, what is
    active of the trunk"""
    cfg = read_config({**hf, "mtp_weight": 0.0}, "", 1, 1)
    table = parameter_table(cfg)

    def of_layer(l, take):
        rows = [row for row in table if "{}" in row.disk and l in row.numbers and take(row.disk)]
        return sum(math.prod(row.shape[1:]) for row in rows)
    attention = [of_layer(cfg.of_kind(kind)[0], lambda disk: ".attn." in disk) if cfg.of_kind(kind) else None
                 for kind in (SLIDING, CSA, HCA)]
    trunk = sum(math.prod(row.shape) for row in table if not row.name.startswith("mtp_"))
    mtp = sum(math.prod(row.shape) for row in table if row.name.startswith("mtp_"))
    last = cfg.num_hidden_layers - 1
    idle = 3 * cfg.hidden_size * cfg.moe_intermediate_size * (cfg.n_routed_experts - cfg.num_experts_per_tok)
    experts = of_layer(last, lambda disk: ".ffn." in disk)
    active = trunk - cfg.vocab_size * cfg.hidden_size - cfg.num_hidden_layers * idle
    return attention, of_layer(last, lambda disk: ".hc_" in disk), experts, experts - idle, trunk, mtp, active


def count_promises():
    out = []
    for name, hf, texts in (("Flash", FLASH, "106.956 126.099 111.217 0.786 6.4687 177.2 284.332 6.610 290.942 13.270"),
                            ("Pro", PRO, "- 331.292 307.301 1.376 25.436 465.2 1572.997 25.840 1598.837 48.852")):
        attention, sites, experts, active_experts, trunk, mtp, active = sizes(hf)
        billions = (x / 1e3 for x in (trunk, mtp, trunk + mtp, active))
        found = [*attention, sites, experts / 1e3, active_experts, *billions]
        kept = [text == "-" or as_printed(x / 1e6, text) for x, text in zip(found, texts.split())]
        out.append((f"7.1: parameters of {name}", all(kept)))
    tiny = parameter_table(read_config(TINY, "", 1, 1))
    n_tensors = sum(len(row.numbers) * len(row.parts) for row in tiny)
    return out + [("7.1: parameters of the tiny model", sum(math.prod(row.shape) for row in tiny) == 545249),
                  ("5.3: its tensors, with two tables", n_tensors + 2 == 304)]


def promises():
    return (unit_promises() + forward_promises() + gradient_promises() + training_promises() + lora_promises() +
            count_promises())


if __name__ == "__main__":
    raise SystemExit(exact.report(promises()))
