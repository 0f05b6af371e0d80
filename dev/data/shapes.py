#!/usr/bin/env python3
"""
Images of shapes and what they are, to train a model with eyes on: the data of `make run-shapes`. NumPy and nothing else.

    python dev/data/shapes.py --out build/shapes
        images/*.png     one shape each, of a random colour and size, near the middle, on grey noise
        train.jsonl      a conversation about each of them; val.jsonl: about others
        prompts.jsonl    the first --asked of val.jsonl, to be answered
        tokenizer.json   bytes, the words that are said, and the special tokens of Qwen3.6
        config.json, preprocessor_config.json      a small Qwen3.6 with a tower, and how images become its patches
    python dev/data/shapes.py --show build/shapes/prompts.jsonl answers.jsonl --picture answers.png
        how many answers (--generate-file) are right, and a picture of the first ones

The answer is two words, "red circle". A tenth of the pairs of colour and shape are never trained on: --show counts them by
themselves, for who has learnt the words and not the pairs names these too. The same --seed gives the same files.
"""
import argparse
import json
import os
import struct
import sys
import zlib

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import InputError, Parser, run  # noqa: E402  (found by the line above)

SHAPES = ("circle", "square", "triangle", "cross", "ring")
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40),
           "white": (245, 245, 245), "black": (15, 15, 15)}
HELD_OUT = (("red", "ring"), ("blue", "triangle"), ("yellow", "circle"))
QUESTION = "What is it?"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>", "<think>", "</think>")
WORDS = ("user", "assistant", "What", " is", " it", "\n\n", *COLOURS, *(" " + shape for shape in SHAPES))  # a token each
PATCH, MERGE, SIDES = 4, 2, (32, 40)  # pixels of a patch; patches of a token's side; sides of images


# ---- images ----
def mask(shape, size, x, y, radius):
    """Where the shape is, in an image of size (height, width)"""
    row, column = np.mgrid[:size[0], :size[1]]
    dy, dx = row - y, column - x
    far = np.hypot(dy, dx)
    if shape == "circle":
        return far <= radius
    if shape == "ring":
        return (far <= radius) & (far >= 0.55 * radius)
    if shape == "square":
        return np.maximum(abs(dx), abs(dy)) <= 0.85 * radius
    if shape == "cross":
        return (np.minimum(abs(dx), abs(dy)) <= 0.3 * radius) & (np.maximum(abs(dx), abs(dy)) <= radius)
    return (dy <= 0.7 * radius) & (dy >= -radius + 1.6 * abs(dx))


def draw(random, colour, shape):
    size = random.choice(SIDES, 2)
    radius = random.uniform(0.34, 0.46) * min(size)
    x, y = (side * random.uniform(0.44, 0.56) for side in (size[1], size[0]))
    image = random.normal(random.uniform(110, 140), 6, (*size, 1)).repeat(3, axis=2)
    where = mask(shape, size, x, y, radius)
    image[where] = np.array(COLOURS[colour]) + random.normal(0, 8, (where.sum(), 3))
    return image.clip(0, 255).round().astype(np.uint8)


def write_png(path, image):
    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    h, w, _ = image.shape
    rows = np.concatenate([np.zeros((h, 1), np.uint8), image.reshape(h, 3 * w)], axis=1)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, 8, 2, 0, 0, 0))
                   + chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)) + chunk(b"IEND", b""))


def read_png(path):
    """One that write_png has written"""
    with open(path, "rb") as file:
        data = file.read()
    w, h = struct.unpack(">II", data[16:24])
    n = struct.unpack(">I", data[33:37])[0]
    return np.frombuffer(zlib.decompress(data[41:41 + n]), np.uint8).reshape(h, 1 + 3 * w)[:, 1:].reshape(h, w, 3)


# ---- the model and its tokenizer ----
def bytes_as_letters():
    """The letter that stands for each byte in byte-level tokenizers, as GPT-2 has it"""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) if b in plain else chr(256 + others.index(b)) for b in range(256)]


def byte_pairs():
    """(vocabulary, merges): the bytes, and what each word is put together from, letter by letter"""
    letters = bytes_as_letters()
    vocab, merges = {letter: b for b, letter in enumerate(letters)}, []
    for word in WORDS:
        spelt = [letters[b] for b in word.encode()]
        for i in range(1, len(spelt)):
            pair = ("".join(spelt[:i]), spelt[i])
            if "".join(pair) not in vocab:
                vocab["".join(pair)] = len(vocab)
                merges.append(list(pair))
    return vocab, merges


def special_tokens():
    """The number of each, behind all others"""
    return {name: len(byte_pairs()[0]) + i for i, name in enumerate(SPECIAL)}


def tokenizer_json():
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": name, **flags, "special": not name.endswith("think>")}
             for name, i in special_tokens().items()]
    vocab, merges = byte_pairs()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": level, "post_processor": None, "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": vocab, "merges": merges}}


def config_json():
    token = special_tokens()
    text = {"model_type": "qwen3_5_moe_text", "max_position_embeddings": 512, "vocab_size": max(token.values()) + 1,
            "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5,
                                "mrope_section": [2, 1, 1], "mrope_interleaved": True},
            "output_router_logits": True, "router_aux_loss_coef": 0.005}
    vision = {"model_type": "qwen3_5_moe_vision", "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4,
              "in_channels": 3, "patch_size": PATCH, "temporal_patch_size": 2, "spatial_merge_size": MERGE,
              "num_position_embeddings": 64, "out_hidden_size": 64}
    return {"model_type": "qwen3_5_moe", "tie_word_embeddings": True, "image_token_id": token["<|image_pad|>"],
            "video_token_id": token["<|video_pad|>"], "vision_start_token_id": token["<|vision_start|>"],
            "vision_end_token_id": token["<|vision_end|>"], "text_config": text, "vision_config": vision}


def preprocessor_json():
    side = PATCH * MERGE
    return {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "temporal_patch_size": 2,
            "merge_size": MERGE, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
            "size": {"shortest_edge": side * side, "longest_edge": 64 * side * side}}


# ---- conversations ----
def conversation(path, answer):
    content = [{"type": "image", "image": path}, {"type": "text", "text": QUESTION}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w") as file:
        json.dump(value, file)


def write_lines(folder, name, rows):
    with open(os.path.join(folder, name), "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def make(folder, n_train, n_val, n_asked, seed):
    random = np.random.Generator(np.random.PCG64(seed))
    pairs = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    os.makedirs(os.path.join(folder, "images"), exist_ok=True)
    for name, n, allowed in (("train", n_train, [p for p in pairs if p not in HELD_OUT]), ("val", n_val, pairs)):
        rows = []
        for i in range(n):
            colour, shape = allowed[random.integers(len(allowed))]
            path = f"images/{name}_{i:05d}.png"
            write_png(os.path.join(folder, path), draw(random, colour, shape))
            rows.append(conversation(path, f"{colour} {shape}"))
        write_lines(folder, name + ".jsonl", rows)
    write_lines(folder, "prompts.jsonl", rows[:n_asked])
    for name, value in (("tokenizer.json", tokenizer_json()), ("config.json", config_json()),
                        ("preprocessor_config.json", preprocessor_json())):
        write_json(folder, name, value)
    print(f"{folder}: {n_train} images to train, {n_val} to validate, of {len(pairs)} kinds, {len(HELD_OUT)} of which "
          f"are never trained on")


# ---- answers ----
def read_lines(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def show(prompts_path, answers_path, picture):
    prompts, answers = read_lines(prompts_path), read_lines(answers_path)
    if len(prompts) != len(answers):
        raise InputError(f"{answers_path}: expected {len(prompts)} answers, found {len(answers)}")
    expected = [row["messages"][-1]["content"] for row in prompts]
    said = [row["answer"].strip() for row in answers]
    right = np.array([a == b for a, b in zip(expected, said)])
    new = np.array([tuple(answer.split()) in HELD_OUT for answer in expected])
    print(f"right: {right[~new].sum()} of {(~new).sum()} pairs of colour and shape that were trained on, "
          f"{right[new].sum()} of {new.sum()} of others")
    if picture:
        draw_answers(prompts, os.path.dirname(prompts_path), expected, said, picture)


def draw_answers(prompts, folder, expected, said, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    rows, columns = 3, 8
    figure, axes = pyplot.subplots(rows, columns, figsize=(10, 4.6))
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, row, wanted, found in zip(axes.flat, prompts, expected, said):
        axis.imshow(read_png(os.path.join(folder, row["messages"][0]["content"][0]["image"])))
        axis.set_title(found if found == wanted else f"{found}\n(a {wanted})", fontsize=9,
                       color="black" if found == wanted else "crimson")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"picture: {path}")


def main(arguments):
    parser = Parser(description=__doc__.strip(), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="data/shapes", metavar="DIR", help="folder of the result (default data/shapes)")
    parser.add_argument("--train", type=int, default=6000, metavar="N", help="images to train (default 6000)")
    parser.add_argument("--val", type=int, default=400, metavar="N", help="images to validate (default 400)")
    parser.add_argument("--asked", type=int, default=200, metavar="N", help="of these in prompts.jsonl (default 200)")
    parser.add_argument("--seed", type=int, default=1, help="(default 1)")
    parser.add_argument("--show", nargs=2, metavar="FILE", help="prompts.jsonl and the answers to it")
    parser.add_argument("--picture", metavar="PNG", help="with --show: the first images with their answers")
    arguments = parser.parse_args(arguments)
    if arguments.show:
        show(*arguments.show, arguments.picture)
        return
    for name, value in (("train", arguments.train), ("val", arguments.val), ("asked", arguments.asked),
                        ("seed", arguments.seed)):
        if value < (name != "seed"):
            raise InputError(f"--{name}: expected an integer of {int(name != 'seed')} or more, found {value}")
    make(arguments.out, arguments.train, arguments.val, min(arguments.asked, arguments.val), arguments.seed)


if __name__ == "__main__":
    run("shapes", main)
