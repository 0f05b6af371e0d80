"""
Qwen3.6 with its vision tower in NumPy (Hugging Face's Qwen3_5MoeForConditionalGeneration): the reference that the
trainer must equal bit for bit. The text is qwen36.py's. NumPy and the standard library only.

An image is a grid of patches, each a row of pixel values; a transformer over the patches, in which each sees all of its
frame, gives one row for each block of merge x merge patches, and these rows stand in the text in place of the
embeddings of placeholders. Dosovitskiy et al. 2020, arXiv:2010.11929; Qwen Team 2025, "Qwen3-VL", arXiv:2511.21631.

    python dev/ref/qwen36_vision.py [--out DIR]   check the reference, then write the golden file (default: dev/golden)
    python dev/ref/qwen36_vision.py --check       check only (qwen36_vision_checks.py, which by itself compares with
                                                  transformers)
    python dev/ref/qwen36_vision.py --from DIR --probe IN --probe-out OUT
                                                  the probe of a folder; IN has pixel_values, image_grid_thw, too

IN of a probe may have videos, too, pixel_values_videos and video_grid_thw.

The golden file has the layout that trainer.py describes, and
    pixel_values F32 (steps, leaves, P, K), image_grid_thw I32 (steps, leaves, n, 3)   frames, height, width, in patches
    act.vision_*   of the tower, (P, ...): patch (behind its matrix), encoded (with its position); of its blocks
                   (L, P, ...): norm1, norm1_mean, norm1_rstd, qkv, q and k (after RoPE), v, att_max, att_inv (heads, P),
                   attention, residual2, norm2, norm2_mean, norm2_rstd, fc1, gelu, residual3
    act.merger_*   norm, norm_mean, norm_rstd (P, ...), fc1, gelu, out (P / merge^2, ...)
and act.encoded is what the first layer of the text reads.

How a number comes about: as in qwen36.py and gpt2.py. Where more than one order would do:
    position    of a patch at row r of h: at = (r * (side - 1)) / max(h - 1, 1), each step rounded; taps at floor(at) and
                the next, at most side - 1, weights 1 - |at - floor(at) - 0 or 1|; of rows times of columns, rounded. The
                embedding is one chain of madd from 0 over (y0, x0), (y0, x1), (y1, x0), (y1, x1), added to the patch.
                Backward: each row of the table one chain from 0 over the patches ascending, in each over its taps
    RoPE        of whole heads in halves; pair i of the first half of the pairs turns by row * f_i, of the second by
                column * f_i, f_i = 1 / 10000^(2 i / (HS / 2))
    attention   of each frame by itself, the law of ops.py over all keys of the frame, ascending
    GELU        of blocks: gpt2.py's; of the merger: (0.5 x) * (1 + erf(x / sqrt(2))), its slope 0.5 * (1 + erf) +
                x * (exp((-0.5 x) x) * (1 / sqrt(2 pi)))
    qkv         one matrix: the gradient of norm1 is one chain over the outputs as they lie, q, k, v
    splice      the gradient of a placeholder's row goes to the tower alone, that of all others to the embedding
"""
import json
import math
import os
import sys
from dataclasses import dataclass, fields, replace

import numpy as np

import exact
import qwen36
import trainer
from exact import F4, chain_matmul, chain_sum, madd
from gpt2 import GELU_CUBE, GELU_K
from ops import (attention_scale, embedding_forward, layernorm_backward, layernorm_forward, linear_backward,
                 linear_forward, rope, rope_backward)
from trainer import Row

EPS = 1e-6    # of LayerNorm, whatever config.json says of other norms
THETA = 1e4   # of RoPE


@dataclass(frozen=True)
class Vision:
    """The keys of vision_config, under their names there"""
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int
    out_hidden_size: int

    @property
    def side(self):
        return math.isqrt(self.num_position_embeddings)

    @property
    def columns(self):
        """Pixel values of a patch"""
        return self.in_channels * self.temporal_patch_size * self.patch_size ** 2

    @property
    def head(self):
        return self.hidden_size // self.num_heads

    @property
    def block(self):
        return self.spatial_merge_size ** 2


@dataclass(frozen=True)
class Config(qwen36.Config):
    vision: Vision = None
    image_token_id: int = -1
    video_token_id: int = -1
    n_frames: int = 0        # so many of a leaf's grids, the last, are frames of videos
    images: tuple = ()       # all of the run, pixel_values (steps, leaves, P, K) and grids; of a leaf, in `at`


def read_config(hf, path, batch, seq_len):
    text = qwen36.read_config(hf, path, batch, seq_len)
    values = {field.name: getattr(text, field.name) for field in fields(qwen36.Config)}
    vision = Vision(**{field.name: hf["vision_config"][field.name] for field in fields(Vision)})
    if hf["vision_config"].get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise SystemExit(f"{path}: expected a hidden_act of gelu_pytorch_tanh")
    return Config(**{**values, "prefix": "model.language_model."}, vision=vision, image_token_id=hf["image_token_id"],
                  video_token_id=hf.get("video_token_id", -1))


def config_json(cfg):
    text = qwen36.config_json(cfg)
    text["model_type"] = "qwen3_5_moe_text"
    vision = {field.name: getattr(cfg.vision, field.name) for field in fields(Vision)}
    videos = {"video_token_id": cfg.video_token_id} if cfg.video_token_id >= 0 else {}
    return {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
            "tie_word_embeddings": cfg.tie_word_embeddings, "image_token_id": cfg.image_token_id, **videos,
            "text_config": text, "dtype": "float32",
            "vision_config": {"model_type": "qwen3_5_moe_vision", "hidden_act": "gelu_pytorch_tanh",
                              "deepstack_visual_indexes": [], **vision}}


def metadata(cfg):
    run = trainer.metadata(replace(cfg, images=()))
    return {**config_json(cfg), **{key: run[key] for key in trainer.Run.__dataclass_fields__}}


# ---------------------------------------------------------------------------------------------------------------------
# Parameters.
# ---------------------------------------------------------------------------------------------------------------------
def vision_table(v):
    """The rows of the tower, behind those of the text"""
    L, C, F, B = v.depth, v.hidden_size, v.intermediate_size, v.block
    rows = [Row("vision_patch_w", (C, v.columns), "linear", "model.visual.patch_embed.proj.weight"),
            Row("vision_patch_b", (C,), "zero", "model.visual.patch_embed.proj.bias"),
            Row("vision_position_w", (v.num_position_embeddings, C), "embedding", "model.visual.pos_embed.weight")]
    for name, shape, kind, disk in (
            ("norm1_w", (C,), "gain", "norm1.weight"), ("norm1_b", (C,), "zero", "norm1.bias"),
            ("qkv_w", (3 * C, C), "linear", "attn.qkv.weight"), ("qkv_b", (3 * C,), "zero", "attn.qkv.bias"),
            ("proj_w", (C, C), "linear", "attn.proj.weight"), ("proj_b", (C,), "zero", "attn.proj.bias"),
            ("norm2_w", (C,), "gain", "norm2.weight"), ("norm2_b", (C,), "zero", "norm2.bias"),
            ("fc1_w", (F, C), "linear", "mlp.linear_fc1.weight"), ("fc1_b", (F,), "zero", "mlp.linear_fc1.bias"),
            ("fc2_w", (C, F), "linear", "mlp.linear_fc2.weight"), ("fc2_b", (C,), "zero", "mlp.linear_fc2.bias")):
        rows.append(Row("vision_" + name, (L, *shape), kind, "model.visual.blocks.{}." + disk))
    for name, shape, kind, disk in (
            ("norm_w", (C,), "gain", "norm.weight"), ("norm_b", (C,), "zero", "norm.bias"),
            ("fc1_w", (B * C, B * C), "linear", "linear_fc1.weight"), ("fc1_b", (B * C,), "zero", "linear_fc1.bias"),
            ("fc2_w", (v.out_hidden_size, B * C), "linear", "linear_fc2.weight"),
            ("fc2_b", (v.out_hidden_size,), "zero", "linear_fc2.bias")):
        rows.append(Row("merger_" + name, shape, kind, "model.visual.merger." + disk))
    return rows


def parameter_table(cfg):
    return qwen36.parameter_table(cfg) + vision_table(cfg.vision)


def to_file(row, x, cfg):
    v = cfg.vision
    if row.name == "vision_patch_w":
        return x.reshape(-1, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
    return qwen36.to_file(row, x, cfg)


def from_file(row, x, cfg):
    return x.reshape(x.shape[0], -1) if row.name == "vision_patch_w" else qwen36.from_file(row, x, cfg)


# ---------------------------------------------------------------------------------------------------------------------
# Where patches are.
# ---------------------------------------------------------------------------------------------------------------------
def places(grids, v):
    """Row, column, height and width of the frame, of each patch: block by block, frame by frame, image by image"""
    out, m = [], v.spatial_merge_size
    for t, h, w in grids:
        r, c = np.mgrid[:h, :w]
        order = [x.reshape(h // m, m, w // m, m).swapaxes(1, 2).reshape(-1) for x in (r, c)]
        out += [np.stack([*order, np.full(h * w, h), np.full(h * w, w)])] * t
    return np.concatenate(out, axis=1)


def frames(grids):
    """(first, end) of each frame's patches"""
    sizes = [h * w for t, h, w in grids for _ in range(t)]
    ends = np.cumsum(sizes)
    return [(end - size, end) for end, size in zip(ends, sizes)]


def axis_taps(i, n, side, dtype):
    """Two rows of the table (2, P), and what they weigh"""
    at = (i.astype(dtype) * dtype.type(side - 1)) / np.maximum(n - 1, 1).astype(dtype)
    before, one = np.floor(at), dtype.type(1)
    taps = np.stack([np.minimum(before.astype(int) + k, side - 1) for k in (0, 1)])
    return taps, np.stack([one - np.abs((at - before) - dtype.type(k)) for k in (0, 1)])


def position_taps(grids, v, dtype):
    """Rows of the table (P, 4) and their weights"""
    r, c, h, w = places(grids, v)
    (y, wy), (x, wx) = axis_taps(r, h, v.side, dtype), axis_taps(c, w, v.side, dtype)
    pairs = [(a, b) for a in (0, 1) for b in (0, 1)]
    return (np.stack([y[a] * v.side + x[b] for a, b in pairs], axis=-1),
            np.stack([wy[a] * wx[b] for a, b in pairs], axis=-1))


def rope_tables(grids, v, dtype):
    """cos, sin (P, HS / 2)"""
    n = v.head // 4
    frequency = dtype.type(1) / exact.power(THETA, (2 * np.arange(n)).astype(dtype) / dtype.type(2 * n))
    r, c, _, _ = places(grids, v)
    angle = np.concatenate([x.astype(dtype)[:, None] * frequency for x in (r, c)], axis=-1)
    return exact.cos(angle), exact.sin(angle)


def text_places(inputs, grids, cfg):
    """
    positions (3, B, T) on the axes of time, height and width, and where each row of the tower's output stands (flat).
    Images have a run of placeholders each, all of its frames one behind the other; the last cfg.n_frames grids are
    frames of videos, each with a run of the other placeholder
    """
    positions, m = np.zeros((3, *inputs.shape), int), cfg.vision.spatial_merge_size
    sizes = [(t, h // m, w // m) for t, h, w in grids]
    n, first = len(sizes) - cfg.n_frames, np.cumsum([0] + [math.prod(size) for size in sizes])
    stands = np.zeros(first[-1], int)
    waiting = {cfg.image_token_id: iter(range(n)), cfg.video_token_id: iter(range(n, len(sizes)))}
    for b, row in enumerate(inputs):
        i = now = 0
        while i < len(row):
            if row[i] not in waiting:
                positions[:, b, i] = now
                i, now = i + 1, now + 1
                continue
            k = next(waiting[row[i]], None)
            size = (0, 0, 0) if k is None else sizes[k]
            end = i + math.prod(size)
            if end == i or end > len(row) or (row[i:end] != row[i]).any():
                raise SystemExit("placeholders: expected as many as the images have tokens")
            positions[:, b, i:end] = now + np.indices(size).reshape(3, -1)
            stands[first[k]:first[k + 1]] = b * len(row) + np.arange(i, end)
            i, now = end, now + max(size[1:])
    if any(next(rest, None) is not None for rest in waiting.values()):
        raise SystemExit("placeholders: expected as many as the images have tokens")
    return positions, stands


# ---------------------------------------------------------------------------------------------------------------------
# The tower.
# ---------------------------------------------------------------------------------------------------------------------
def of(x, value):
    """A constant as the arrays have numbers: float32 has gpt2.py's, rounded, float64 the value"""
    return x.dtype.type(value)


def gelu_constants(x):
    return (GELU_K, GELU_CUBE) if x.dtype == F4 else (math.sqrt(2 / math.pi), 0.044715)


def gelu_tanh(x):
    k, cube = gelu_constants(x)
    return (of(x, 0.5) * x) * (of(x, 1) + exact.tanh(k * (x + ((cube * x) * x) * x)))


def gelu_tanh_slope(x):
    k, cube = gelu_constants(x)
    u = k * (x + ((cube * x) * x) * x)
    cosh_u = exact.cosh(u)
    sech2 = of(x, 1) / (cosh_u * cosh_u)
    slope = of(x, 1) + ((of(x, 3) * cube) * x) * x
    return of(x, 0.5) * (of(x, 1) + exact.tanh(u)) + (((x * of(x, 0.5)) * sech2) * k) * slope


def gelu_erf(x):
    return (of(x, 0.5) * x) * (of(x, 1) + exact.erf(x * of(x, math.sqrt(0.5))))


def gelu_erf_slope(x):
    density = exact.exp((of(x, -0.5) * x) * x) * of(x, 1 / math.sqrt(2 * math.pi))
    return of(x, 0.5) * (of(x, 1) + exact.erf(x * of(x, math.sqrt(0.5)))) + x * density


def full_attention(q, k, v):
    """att (H, n, n), the largest scores and 1 / sums (H, n), out (H, n, HS); every position sees all"""
    zero, one = q.dtype.type(0), q.dtype.type(1)
    scores = chain_matmul(np.zeros(q.shape[:2] + q.shape[1:2], q.dtype), q, k.swapaxes(1, 2)) * attention_scale(q)
    largest = np.max(scores, axis=-1, initial=q.dtype.type(-10000))
    e = exact.exp(scores - largest[..., None])
    total = chain_sum(e)
    inverse = np.where(total == 0, zero, one / total)
    att = e * inverse[..., None]
    return att, largest, inverse, chain_matmul(np.zeros_like(q), att, v)


def full_attention_backward(dout, q, k, v, att):
    datt = chain_matmul(np.zeros_like(att), dout, v.swapaxes(1, 2))
    D = exact.chain_dot(att, datt)
    ds = (att * (datt - D[..., None])) * attention_scale(q)
    zeros = np.zeros_like(q)
    return (chain_matmul(zeros, ds, k), chain_matmul(zeros, ds.swapaxes(1, 2), q),
            chain_matmul(zeros, att.swapaxes(1, 2), dout))


def heads(x, v):
    """(n, C) -> (heads, n, HS)"""
    return x.reshape(len(x), v.num_heads, v.head).swapaxes(0, 1)


def flat(x):
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def turned(x, v, tables, function=rope):
    return flat(function(heads(x, v), *tables))


def block_forward(x, w, v, where, a):
    """One block of the tower; adds to the activations a"""
    C = v.hidden_size
    a["norm1"], a["norm1_mean"], a["norm1_rstd"] = layernorm_forward(x, w["norm1_w"], w["norm1_b"], EPS)
    a["qkv"] = linear_forward(a["norm1"], w["qkv_w"], w["qkv_b"])
    q, k, a["v"] = np.split(a["qkv"], [C, 2 * C], axis=-1)
    a["q"], a["k"] = (turned(y, v, where["tables"]) for y in (q, k))
    a["att_max"], a["att_inv"] = (np.zeros((v.num_heads, len(x)), x.dtype) for _ in range(2))
    a["attention"] = np.zeros_like(x)
    for first, end in where["frames"]:
        own = slice(first, end)
        _, a["att_max"][:, own], a["att_inv"][:, own], out = full_attention(*(heads(a[n][own], v) for n in "qkv"))
        a["attention"][own] = flat(out)
    a["residual2"] = x + linear_forward(a["attention"], w["proj_w"], w["proj_b"])
    a["norm2"], a["norm2_mean"], a["norm2_rstd"] = layernorm_forward(a["residual2"], w["norm2_w"], w["norm2_b"], EPS)
    a["fc1"] = linear_forward(a["norm2"], w["fc1_w"], w["fc1_b"])
    a["gelu"] = gelu_tanh(a["fc1"])
    a["residual3"] = a["residual2"] + linear_forward(a["gelu"], w["fc2_w"], w["fc2_b"])


def block_backward(dout, x, w, v, where, a, g):
    """The gradient of x; those of the parameters go into g"""
    def back(name, d, inp):
        dinp, g[name + "_w"], g[name + "_b"] = linear_backward(d, inp, w[name + "_w"])
        return dinp
    dnorm2 = back("fc1", back("fc2", dout, a["gelu"]) * gelu_tanh_slope(a["fc1"]), a["norm2"])
    dx, g["norm2_w"], g["norm2_b"] = layernorm_backward(dnorm2, a["residual2"], w["norm2_w"], a["norm2_mean"],
                                                        a["norm2_rstd"])
    dout = dout + dx
    datt = back("proj", dout, a["attention"])
    parts = [np.zeros_like(x) for _ in range(3)]
    for first, end in where["frames"]:
        own = slice(first, end)
        q, k, value = (heads(a[n][own], v) for n in "qkv")
        att = full_attention(q, k, value)[0]
        for part, d in zip(parts, full_attention_backward(heads(datt[own], v), q, k, value, att)):
            part[own] = flat(d)
    parts[:2] = [turned(d, v, where["tables"], rope_backward) for d in parts[:2]]
    dnorm1 = back("qkv", np.concatenate(parts, axis=-1), a["norm1"])
    dx, g["norm1_w"], g["norm1_b"] = layernorm_backward(dnorm1, x, w["norm1_w"], a["norm1_mean"], a["norm1_rstd"])
    return dout + dx


def block_weights(p, l):
    return {name[7:]: x[l] for name, x in p.items() if name.startswith("vision_") and name[7:] not in (
        "patch_w", "patch_b", "position_w")}


def tower_forward(p, pixels, grids, v):
    """Activations; "out" (P / merge^2, D) is what the text gets"""
    dtype = pixels.dtype
    where = {"frames": frames(grids), "tables": rope_tables(grids, v, dtype)}
    taps, weights = position_taps(grids, v, dtype)
    acts = {"where": where, "patch": linear_forward(pixels, p["vision_patch_w"], p["vision_patch_b"])}
    position = np.zeros_like(acts["patch"])
    for i in range(4):
        position = madd(weights[:, i, None], p["vision_position_w"][taps[:, i]], position)
    x = acts["encoded"] = acts["patch"] + position
    acts["blocks"] = []
    for l in range(v.depth):
        a = {}
        block_forward(x, block_weights(p, l), v, where, a)
        acts["blocks"].append(a)
        x = a["residual3"]
    m = acts["merger"] = {}
    m["norm"], m["norm_mean"], m["norm_rstd"] = layernorm_forward(x, p["merger_norm_w"], p["merger_norm_b"], EPS)
    m["fc1"] = linear_forward(m["norm"].reshape(-1, v.block * v.hidden_size), p["merger_fc1_w"], p["merger_fc1_b"])
    m["gelu"] = gelu_erf(m["fc1"])
    m["out"] = linear_forward(m["gelu"], p["merger_fc2_w"], p["merger_fc2_b"])
    return acts


def tower_backward(dout, p, g, acts, pixels, grids, v):
    """Gradients of the tower's parameters, into g"""
    m, blocks = acts["merger"], acts["blocks"]
    d, g["merger_fc2_w"], g["merger_fc2_b"] = linear_backward(dout, m["gelu"], p["merger_fc2_w"])
    merged = m["norm"].reshape(-1, v.block * v.hidden_size)
    d, g["merger_fc1_w"], g["merger_fc1_b"] = linear_backward(d * gelu_erf_slope(m["fc1"]), merged, p["merger_fc1_w"])
    last = blocks[-1]["residual3"]
    dx, g["merger_norm_w"], g["merger_norm_b"] = layernorm_backward(d.reshape(last.shape), last, p["merger_norm_w"],
                                                                    m["norm_mean"], m["norm_rstd"])
    dx = np.zeros_like(dx) + dx
    for l in reversed(range(v.depth)):
        x, of_block = blocks[l - 1]["residual3"] if l > 0 else acts["encoded"], {}
        dx = block_backward(dx, x, block_weights(p, l), v, acts["where"], blocks[l], of_block)
        for name, value in of_block.items():
            g["vision_" + name][l] = value
    taps, weights = position_taps(grids, v, pixels.dtype)
    for n in range(len(pixels)):
        for i in range(4):
            row = taps[n, i]
            g["vision_position_w"][row] = madd(weights[n, i], dx[n], g["vision_position_w"][row])
    _, g["vision_patch_w"], g["vision_patch_b"] = linear_backward(dx, pixels, p["vision_patch_w"])


# ---------------------------------------------------------------------------------------------------------------------
# The model: the tower, then the text.
# ---------------------------------------------------------------------------------------------------------------------
def forward(p, inputs, targets, cfg):
    pixels, grids = cfg.images
    vision = tower_forward(p, pixels, grids, cfg.vision)
    encoded = embedding_forward(p["embed_tokens"], None, inputs)
    positions, stands = text_places(inputs, grids, cfg)
    encoded.reshape(-1, encoded.shape[-1])[stands] = vision["merger"]["out"]
    acts = qwen36.forward(p, inputs, targets, cfg, None, positions, encoded)
    acts["vision"] = vision
    return acts


def backward(p, acts, inputs, targets, count, cfg):
    pixels, grids = cfg.images
    positions, stands = text_places(inputs, grids, cfg)
    is_text = np.ones(inputs.shape, bool)
    is_text.reshape(-1)[stands] = False
    g = {row.name: np.zeros_like(p[row.name]) for row in parameter_table(cfg)}
    text = qwen36.backward(p, acts, inputs, targets, count, cfg, None, positions, is_text)
    dencoded = text.pop("encoded")
    g.update(text)
    tower_backward(dencoded.reshape(-1, dencoded.shape[-1])[stands], p, g, acts["vision"], pixels, grids, cfg.vision)
    return g


def at(cfg, step, leaf):
    """cfg with the images of a leaf"""
    pixels, grids = cfg.images
    return replace(cfg, images=(pixels[step, leaf], grids[step, leaf]))


def vision_activations(vision):
    """act.<name> of the tower"""
    out = {"act.vision_" + name: vision[name] for name in ("patch", "encoded")}
    out.update({"act.vision_" + key: np.stack([a[key] for a in vision["blocks"]]) for key in vision["blocks"][0]})
    out.update({"act.merger_" + key: x for key, x in vision["merger"].items()})
    return out


MODEL = trainer.Model(parameter_table, forward, backward, read_config, metadata, to_file, from_file, at=at,
                      numbers=qwen36.numbers, fit=qwen36.fit, losses=("loss", "cross_entropy"), count=qwen36.count)

# ---------------------------------------------------------------------------------------------------------------------
# The golden run: a text with two images of different shapes in one row and a third in the other; tied head, balance of
# the routers, a position embedding that is sampled between its rows, a merger of 2 x 2.
# ---------------------------------------------------------------------------------------------------------------------
TEXT = {**qwen36.MTP, "vocab_size": 31}
VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 10, "num_heads": 2, "in_channels": 3, "patch_size": 2,
          "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 9, "out_hidden_size": 14}
HF = {"model_type": "qwen3_5_moe", "image_token_id": 30, "tie_word_embeddings": True, "text_config": TEXT,
      "vision_config": VISION}
GRIDS = [(1, 4, 4), (1, 2, 6), (1, 2, 2)]
PLACEHOLDERS = [((2, 6), (8, 11)), ((4, 5),)]  # of each row: first and end of the run of each image


def place_images(inputs, cfg):
    """Placeholders in inputs (..., B, T), in place; no other token is one"""
    inputs[inputs == cfg.image_token_id] = 0
    for b, runs in enumerate(PLACEHOLDERS):
        for first, end in runs:
            inputs[..., b, first:end] = cfg.image_token_id


def vision_run():
    cfg = replace(read_config(HF, "HF", 2, 13), leaves=2, lr=2e-3, clip=1.0)
    p = trainer.draw_parameters(parameter_table(cfg), matrix_spread=1.0, vector_spread=0.5)
    inputs, targets = trainer.draw_data(cfg)
    trainer.ignore_targets(targets)
    place_images(inputs, cfg)
    targets[targets == cfg.image_token_id] = -100
    grids = np.array(GRIDS, np.int32)
    P = int(grids.prod(axis=1).sum())
    shape = (cfg.steps, cfg.leaves, P, cfg.vision.columns)
    pixels = exact.Xorshift(5).floats(math.prod(shape)).reshape(shape) * F4(2) - F4(1)
    grids = np.broadcast_to(grids, (cfg.steps, cfg.leaves, *grids.shape)).copy()
    return replace(cfg, images=(pixels, grids)), p, inputs, targets


def write_golden(folder):
    cfg, p, inputs, targets = vision_run()
    acts = forward(p, inputs[0, 0], targets[0, 0], at(cfg, 0, 0))
    model = replace(MODEL, forward=lambda *of_leaf: without_tower(forward(*of_leaf)), backward=again_backward)
    tensors = trainer.golden_tensors(model, cfg, p, inputs, targets)
    tensors.update({"pixel_values": cfg.images[0], "image_grid_thw": cfg.images[1],
                    **vision_activations(acts["vision"])})
    trainer.write_file(folder, "qwen36_vision", tensors, metadata(cfg))


def without_tower(acts):
    """Without what golden_tensors would take for activations of the text"""
    acts.pop("vision")
    return acts


def again_backward(p, acts, inputs, targets, count, cfg):
    vision = tower_forward(p, *cfg.images, cfg.vision)
    return backward(p, {**acts, "vision": vision}, inputs, targets, count, cfg)


def with_images(cfg, batch):
    """cfg with the images of a batch, and behind them its videos, each frame of which is an image"""
    kinds = [(batch[a], batch[b]) for a, b in (("pixel_values", "image_grid_thw"),
                                               ("pixel_values_videos", "video_grid_thw")) if a in batch]
    frames = [[1, h, w] for t, h, w in batch.get("video_grid_thw", []) for _ in range(t)]
    grids = np.array([*batch.get("image_grid_thw", np.zeros((0, 3), np.int32)).tolist(), *frames], np.int32)
    return replace(cfg, images=(np.concatenate([pixels for pixels, _ in kinds]), grids), n_frames=len(frames))


def probe(folder, batch_path, out_path):
    with open(os.path.join(folder, "config.json")) as file:
        hf = json.load(file)
    batch = exact.read_safetensors(batch_path)
    cfg = read_config(hf, folder, *batch["inputs"].shape)
    cfg, tensors = qwen36.fit(cfg, exact.read_safetensors(os.path.join(folder, "model.safetensors")))
    cfg = with_images(cfg, batch)
    trainer.write_probe(MODEL, cfg, trainer.from_disk(MODEL, tensors, cfg), batch["inputs"], batch["targets"], out_path)


if __name__ == "__main__":
    import qwen36_vision_checks
    trainer.probe = lambda model, *paths: probe(*paths)
    sys.exit(trainer.main(MODEL, "Qwen3.6 with vision", qwen36_vision_checks.promises, write_golden,
                          ("--check", "check the reference and write nothing",
                           lambda: exact.report(qwen36_vision_checks.promises()))))
