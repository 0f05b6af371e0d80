"""
What qwen36_vision.py promises before it writes its golden file: numbers computed apart, where patches are, finite
differences. NumPy and the standard library only, but for the last section.

    python dev/ref/qwen36_vision_checks.py        hold the model against transformers, in float64 and in float32

That needs torch and transformers; without them it says "skipped". The truth is Qwen3_5MoeForConditionalGeneration in
float64, its own casts to float32 switched off; the error of a tensor is |x - truth| / |truth| in the L2 norm.
"""
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import replace

import numpy as np

import exact
import qwen36_vision as vlm
import trainer
from exact import F4, F8
from qwen36_checks import SMALL, add_format
from qwen36_vision import GRIDS, HF, VISION, at, backward, forward, parameter_table, read_config

BIG = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3, "patch_size": 16,
       "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304, "out_hidden_size": 2048}


def case_of(hf, rows, T, grids, videos=(), clips=(), seed=0):
    """
    cfg, p, inputs, targets, batch; rows: of each row the first positions of its images' placeholders. clips: grids of
    videos; videos: of each row the first positions of their frames' placeholders
    """
    cfg = read_config(hf, "case", len(rows), T)
    random = np.random.default_rng(seed)
    p = {}
    for row in parameter_table(cfg):
        spread = 0.3 if row.is_decayed else 0.2
        p[row.name] = (random.normal(0, spread, row.shape) + (row.kind == "gain")).astype(F4)
    inputs = random.integers(0, cfg.image_token_id - 1, (len(rows), T)).astype(np.int32)
    images = iter([t * h * w // cfg.vision.block for t, h, w in grids])
    frames = iter([h * w // cfg.vision.block for t, h, w in clips for _ in range(t)])
    for runs, sizes, token in ((rows, images, cfg.image_token_id), (videos, frames, cfg.video_token_id)):
        for b, firsts in enumerate(runs):
            for first in firsts:
                inputs[b, first:first + next(sizes)] = token
    targets = np.concatenate([inputs[:, 1:], inputs[:, -1:]], axis=1)
    is_image = (targets == cfg.image_token_id) | (targets == cfg.video_token_id)
    targets[is_image | (random.random(targets.shape) < 0.1)] = -100
    batch = {}
    for of_these, names in ((grids, ("pixel_values", "image_grid_thw")),
                            (clips, ("pixel_values_videos", "video_grid_thw"))):
        if of_these:
            shape = (sum(math.prod(grid) for grid in of_these), cfg.vision.columns)
            batch.update(zip(names, (random.uniform(-1, 1, shape).astype(F4), np.array(of_these, np.int32))))
    return vlm.with_images(cfg, batch), p, inputs, targets, batch


def ours(cfg, p, inputs, targets, dtype):
    p = {name: x.astype(dtype) for name, x in p.items()}
    cfg = replace(cfg, images=(cfg.images[0].astype(dtype), cfg.images[1]))
    count = vlm.qwen36.count(inputs, targets, cfg)
    acts = forward(p, inputs, targets, cfg)
    g = backward(p, acts, inputs, targets, count, cfg)
    found = {"logits": acts["logits"], "loss": vlm.qwen36.numbers([acts], count, cfg)["loss"].reshape(1)}
    found.update({"grad." + name: x for name, x in trainer.to_disk(vlm.MODEL, g, cfg).items()})
    return found


def place_promises():
    v = vlm.Vision(**{**BIG})
    rows = vlm.vision_table(v)
    taps, weights = vlm.position_taps([(1, 48, 48)], v, np.dtype(F4))
    r, c, _, _ = vlm.places([(1, 48, 48)], v)
    small = vlm.Vision(**VISION)
    return [
        ("the tower of Qwen3.6-35B-A3B has 446,571,248 parameters, in 333 tensors",
         (sum(np.prod(row.shape) for row in rows), sum(len(row.numbers) for row in rows)) == (446571248, 333)),
        ("a grid as large as the table reads each row once",
         np.array_equal(taps[:, 0], r * 48 + c) and (weights[:, 0] == 1).all()),
        ("weights add up to 1", np.allclose(vlm.position_taps([(2, 6, 10)], small, np.dtype(F4))[1].sum(axis=1), 1)),
        ("blocks of 2 x 2 stand together", vlm.places([(1, 4, 4)], small)[:2, :5].T.tolist() ==
         [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2]]),
    ]


def slope_promises():
    """All gradients against differences of the loss, where a token takes all experts: none changes its choice"""
    text = {**HF["text_config"], "num_experts": 3, "num_experts_per_tok": 3}
    cfg, p, inputs, targets, _ = case_of({**HF, "text_config": text}, [[1, 7], [2]], 12, GRIDS)
    p = {name: x.astype(F8) for name, x in p.items()}
    cfg = replace(cfg, images=(cfg.images[0].astype(F8), cfg.images[1]))
    count = vlm.qwen36.count(inputs, targets, cfg)

    def loss(p):
        return vlm.qwen36.numbers([forward(p, inputs, targets, cfg)], count, cfg)["loss"]
    g = backward(p, forward(p, inputs, targets, cfg), inputs, targets, count, cfg)
    random, out, h = np.random.default_rng(1), [], 1e-5
    for name in [row.name for row in vlm.vision_table(cfg.vision)] + ["embed_tokens", "norm"]:
        d = random.normal(size=p[name].shape)
        up, down = ({**p, name: p[name] + sign * h * d} for sign in (1, -1))
        slope, want = (loss(up) - loss(down)) / (2 * h), (g[name] * d).sum()
        out.append((f"slope along {name}", abs(slope - want) <= 2e-6 * abs(want) + 1e-9))
    return out


def promises():
    return place_promises() + slope_promises()


# ---------------------------------------------------------------------------------------------------------------------
# transformers.
# ---------------------------------------------------------------------------------------------------------------------
def save(folder, cfg, p):
    import json
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(vlm.config_json(cfg), file)
    exact.write_safetensors(os.path.join(folder, "model.safetensors"), trainer.to_disk(vlm.MODEL, p, cfg), {})
    add_format(os.path.join(folder, "model.safetensors"))


def truth_of(folder, cfg, inputs, targets, batch):
    import torch
    from hf_models import Qwen, Qwen36, lifted
    from transformers import Qwen3_5MoeForConditionalGeneration
    model = Qwen3_5MoeForConditionalGeneration.from_pretrained(folder, **Qwen.plain("qwen3_moe")).double().eval()
    text, tower = model.model.language_model, model.model.visual
    for rotary, n, theta in ((text.rotary_emb, cfg.rotary, cfg.rope_theta),
                             (tower.rotary_pos_emb, cfg.vision.head // 2, vlm.THETA)):
        rotary.inv_freq = 1.0 / theta ** (torch.arange(0, n, 2, dtype=torch.float64) / n)
    tokens = torch.tensor(inputs).long()
    images = {key: torch.tensor(x).double() if key.startswith("pixel") else torch.tensor(x).long()
              for key, x in batch.items()}
    positions = torch.tensor(vlm.text_places(inputs, cfg.images[1], cfg)[0])
    labels = torch.tensor(np.where(targets < 0, -100, targets)).long()
    with lifted():
        out = model(input_ids=tokens, **images, position_ids=positions, use_cache=False)
        V = out.logits.shape[-1]
        loss = torch.nn.functional.cross_entropy(out.logits.reshape(-1, V), labels.reshape(-1))
        loss = loss + Qwen36.more_loss(model) if cfg.router_aux_loss_coef else loss
        loss.backward()
    kinds = torch.tensor((inputs == cfg.image_token_id) + 2 * (inputs == cfg.video_token_id))
    grids = {key: x for key, x in images.items() if key.endswith("thw")}
    own, _ = model.model.get_rope_index(tokens, mm_token_type_ids=kinds, **grids)
    found = {"logits": out.logits.detach().numpy(), "loss": loss.detach().numpy().reshape(1)}
    found.update({"grad." + name: (torch.zeros_like(x) if x.grad is None else x.grad).numpy()
                  for name, x in model.named_parameters()})
    return found, np.array_equal(own.numpy(), positions.numpy())


PLAIN = {**SMALL, "output_router_logits": False, "model_type": "qwen3_5_moe_text"}
SQUARE = {**VISION, "out_hidden_size": SMALL["hidden_size"]}
CASES = {
    "two images and one": (PLAIN, SQUARE, [[1, 7], [2]], 12, GRIDS),
    "a wide one": (PLAIN, {**SQUARE, "num_position_embeddings": 16}, [[3]], 15, [(1, 2, 18)]),
    "a large square": (PLAIN, {**SQUARE, "hidden_size": 24, "num_heads": 3, "depth": 3}, [[0]], 20, [(1, 8, 8)]),
    "patches of 3 pixels, one channel": (PLAIN, {**SQUARE, "patch_size": 3, "in_channels": 1}, [[5]], 11, [(1, 4, 4)]),
    "tied": ({**PLAIN, "tie_word_embeddings": True}, SQUARE, [[1, 7], [2]], 12, GRIDS),
    "an image of three frames": (PLAIN, SQUARE, [[2], [1]], 16, [(3, 4, 4), (1, 2, 6)]),
    "a video": (PLAIN, SQUARE, [[], []], 14, [], [[1, 6], [3]], [(2, 4, 4), (1, 2, 6)]),
    "images and videos": (PLAIN, SQUARE, [[1, 11], []], 20, [(1, 4, 4), (1, 2, 2)], [[6, 13], [2, 9]],
                          [(3, 2, 6), (1, 4, 2)]),
}


def said_by(program, folder, inputs, targets, batch):
    """--probe of a trainer, as arrays"""
    with tempfile.TemporaryDirectory() as own:
        probe, out = os.path.join(own, "in.safetensors"), os.path.join(own, "out.safetensors")
        exact.write_safetensors(probe, {"inputs": inputs, "targets": targets, **batch}, {})
        subprocess.run([*program, "--from", folder, "--probe", probe, "--probe-out", out], check=True,
                       stdout=subprocess.DEVNULL)
        found = exact.read_safetensors(out)
        found.pop("cross_entropy")
        return found


def compare(program=None):
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        print(f"skipped: {error}")
        return 0
    out = []
    for name, (text, vision, *of_case) in CASES.items():
        hf = {"model_type": "qwen3_5_moe", "image_token_id": text["vocab_size"] - 1,
              "video_token_id": text["vocab_size"] - 2, "text_config": text,
              "vision_config": vision, "tie_word_embeddings": text.get("tie_word_embeddings", False)}
        cfg, p, inputs, targets, batch = case_of(hf, *of_case)
        with tempfile.TemporaryDirectory() as folder:
            save(folder, cfg, p)
            expected, same_positions = truth_of(folder, cfg, inputs, targets, batch)
            said = said_by(program, folder, inputs, targets, batch) if program else None
        out.append((f"{name}: positions on three axes", same_positions))
        line = []
        for dtype, limits in ((F8, (1e-12, 1e-12, 1e-11)), (F4, (2e-5, 2e-5, 1e-4)))[program is not None:]:
            found = said if program else ours(cfg, p, inputs, targets, dtype)
            assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
            errors = {key: np.linalg.norm(found[key] - x) / max(np.linalg.norm(x), 1e-30 if x.any() else 1.0)
                      for key, x in expected.items()}
            worst = max((e, key) for key, e in errors.items() if key.startswith("grad."))
            good = errors["logits"] <= limits[0] and errors["loss"] <= limits[1] and worst[0] <= limits[2]
            line.append(f"{np.dtype(dtype)} {errors['logits']:.0e} {errors['loss']:.0e} {worst[0]:.1e}"
                        + ("" if good else f" ({worst[1]})"))
            out.append((f"{name}: logits, loss, gradients {line[-1]}", good))
    return exact.report(out)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(compare(sys.argv[2:] if sys.argv[1:2] == ["--probe-with"] else None))
