"""
tokenizer.json files for dev/ref/check_tokenizer.py, made from those of the six styles: what other people's files hold,
what makes an error visible, and what has to be refused.
"""
import copy
import json
import os
import random
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data"))
import train_tokenizer as training


def added(content, **flags):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False, **flags}
    return {"content": content, **flags}


AWKWARD_ADDED = [
    added("<left>", lstrip=True), added("<right>", rstrip=True, special=True),
    added("<both>", lstrip=True, rstrip=True), added("word", single_word=True),
    added("Wort", single_word=True, normalized=True), added("w w", single_word=True, lstrip=True), added("<|im"),
    added("<|im_start|>system"), added("<|im_start|>\n", rstrip=True), added("<le"), added("<left><right>"),
    added("\u00E9", normalized=True), added("e\u0301x", normalized=True), added("e\u0301y"),
    added("\u212B", normalized=True, special=True), added("\u00E8"), added(" spaced "), added("\n\n"),
    added("\t", lstrip=True), added("日本", single_word=True), added("'s"), added("12", normalized=True),
    added("▁▁the", normalized=True), added(" of", normalized=True), added("the", normalized=True), added("▁a▁"),
    added("a b", normalized=True), added("_x_", single_word=True, rstrip=True), added("\u0301"), added("Ġ"),
    added("🇩🇪", rstrip=True, normalized=True), added("<0x41>x"), added("."), added(" ", single_word=True),
    added("\u1100\u1161", normalized=True), added("aa"), added("aaa", normalized=True)
]


def with_added(file):
    """Every flag, contents that overlap, begin each other, change when normalised or are an entry of the vocabulary."""
    file = copy.deepcopy(file)
    vocab = file["model"]["vocab"]
    taken = {token["content"] for token in file["added_tokens"]}
    next_id = max(max(vocab.values()), max(token["id"] for token in file["added_tokens"])) + 1
    for token in AWKWARD_ADDED:
        if token["content"] in taken:
            continue
        id = vocab.get(token["content"], next_id)
        next_id += id == next_id
        file["added_tokens"].append({"id": id, **token})
    file["added_tokens"].sort(key=lambda token: token["id"])
    return file


def changed(file, **sections):
    return {**copy.deepcopy(file), **sections}


def model_changed(file, **entries):
    file = copy.deepcopy(file)
    file["model"].update(entries)
    return file


def with_pairs(file):
    return model_changed(file, merges=[merge.split(" ", 1) for merge in file["model"]["merges"]])


def with_whole_words(file, words):
    """ignore_merges: entries that no merge makes; added tokens that stood after the vocabulary move up."""
    file = model_changed(file, ignore_merges=True)
    vocab = file["model"]["vocab"]
    n_before = len(vocab)
    for word in words:
        vocab.setdefault(word, len(vocab))
    for token in file["added_tokens"]:
        token["id"] += len(vocab) - n_before if token["id"] >= n_before else 0
    return file


def with_all_pairs(file):
    """Byte-level; every two bytes have a merge, ranks in random order: nearly every wrong cut of the text shows."""
    letters = [char for char, _ in sorted(file["model"]["vocab"].items(), key=lambda entry: entry[1]) if len(char) == 1]
    pairs = [(a, b) for a in letters for b in letters]
    random.Random(0).shuffle(pairs)
    vocab = {token: id for id, token in enumerate(letters + [a + b for a, b in pairs])}
    added = [{**token, "id": len(vocab) + i} for i, token in enumerate(file["added_tokens"])]
    model = {**file["model"], "vocab": vocab, "merges": [f"{a} {b}" for a, b in pairs]}
    return changed(file, model=model, added_tokens=added)


def without_bytes(file, fuse):
    """no byte fallback: <unk> for what is not in the vocabulary"""
    return model_changed(file, byte_fallback=False, fuse_unk=fuse)


def template(before, after, ids):
    """<special> tokens before and after the text; ids of each name."""
    def special(names):
        return [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]

    steps = special(before) + [{"Sequence": {"id": "A", "type_id": 0}}] + special(after)
    tokens = {name: {"id": name, "ids": ids[name], "tokens": [name] * len(ids[name])} for name in before + after}
    return {"type": "TemplateProcessing", "single": steps, "special_tokens": tokens,
            "pair": steps + [{"Sequence": {"id": "B", "type_id": 1}}]}


def regex_of(file, regex):
    file = copy.deepcopy(file)
    file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = regex
    return file


def metaspace(file, scheme, split=False):
    return changed(file, pre_tokenizer={**file["pre_tokenizer"], "prepend_scheme": scheme, "split": split})


def with_random_merges(file, letters, first_merged):
    """Tokens of tokens in any order: parts younger than the whole, several merges with one result, stale pairs.

    The first entries of the vocabulary stay. Merges as pairs, for a letter may be a space."""
    rng = random.Random(len(letters))
    file = copy.deepcopy(file)
    vocab = {token: id for token, id in file["model"]["vocab"].items() if id < first_merged or len(token) == 1}
    vocab = {token: i for i, token in enumerate(sorted(vocab, key=vocab.get))}
    for letter in letters:
        vocab.setdefault(letter, len(vocab))
    tokens, merges = list(letters), []
    while len(merges) < 400:
        a, b = rng.choice(tokens), rng.choice(tokens)
        if len(a + b) <= 12 and [a, b] not in merges:
            merges.append([a, b])
            tokens += [a + b] if a + b not in vocab else []
            vocab.setdefault(a + b, len(vocab))
    rng.shuffle(merges)
    file["model"].update(vocab=vocab, merges=merges)
    for i, token in enumerate(file["added_tokens"]):
        if token["content"] not in vocab:
            token["id"] = len(vocab) + i
        else:
            token["id"] = vocab[token["content"]]
    return file


def with_splits(file, *regexes):
    file = copy.deepcopy(file)
    split, last = file["pre_tokenizer"]["pretokenizers"]
    file["pre_tokenizer"]["pretokenizers"] = [{**split, "pattern": {"Regex": regex}} for regex in regexes] + [last]
    return file


def decoded_by(file, *steps):
    return changed(file, decoder={"type": "Sequence", "decoders": list(steps)})


def reversed_keys(content):
    """The same file with every object's keys the other way round."""
    if isinstance(content, dict):
        return {key: reversed_keys(content[key]) for key in reversed(content)}
    return [reversed_keys(item) for item in content] if isinstance(content, list) else content


MAY_BE_REFUSED = ("mistral-v0.1, decoder without Fuse", "mistral-v0.1, Strip of two and one",
                  "mistral-v0.1, Strip before the bytes", "qwen2, NUL in an added token")
FOREIGN_REGEX = ("qwen2, numbers of 1 to 3", "qwen2, another regex", "qwen2, DeepSeek's splits",
                 "qwen2, GPT-2's regex in a Split", "qwen2, GPT-4o's regex")
DEEPSEEK_REGEXES = (
    r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+")
GPT4O_REGEX = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def variants(files, sample):
    """Pairs (name, tokenizer.json as an object or as bytes) from those of the six styles."""
    gpt2, qwen2, qwen35 = files["gpt2"], files["qwen2"], files["qwen3.5"]
    v01, v03 = files["mistral-v0.1"], files["mistral-v0.3"]
    ids = {token["content"]: token["id"] for token in qwen2["added_tokens"]}
    level = gpt2["decoder"]
    chat = template(["<|im_start|>"], ["<|im_end|>", "<|endoftext|>"], {
        "<|im_start|>": [ids["<|im_start|>"]], "<|im_end|>": [ids["<|im_end|>"], ids["<think>"]],
        "<|endoftext|>": [ids["<|endoftext|>"]]})
    replace, fallback = v01["decoder"]["decoders"][:2]

    def strip(start, stop):
        return {"type": "Strip", "content": " ", "start": start, "stop": stop}

    cl100k = training.QWEN2_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|")
    return [*files.items()] + [
        *[(f"{style}, all pairs", with_all_pairs(files[style])) for style in training.STYLES[:4]],
        ("gpt2, added tokens", with_added(gpt2)),
        ("gpt2, merges as pairs", with_pairs(gpt2)),
        ("gpt2, no regex", changed(gpt2, pre_tokenizer={**gpt2["pre_tokenizer"], "use_regex": False})),
        ("gpt2, all in Sequences",
         changed(gpt2,
                 normalizer={"type": "Sequence", "normalizers": []},
                 post_processor={"type": "Sequence", "processors": [level]},
                 pre_tokenizer={"type": "Sequence", "pretokenizers": [gpt2["pre_tokenizer"]]},
                 decoder={"type": "Sequence", "decoders": [level]})),
        ("gpt2, no post-processor", changed(gpt2, post_processor=None)),
        ("gpt2, no decoder", changed(gpt2, decoder=None)),
        ("gpt2, 280 tokens", training.train([sample], "gpt2", 280)),
        ("gpt2-prefix, added tokens", with_added(files["gpt2-prefix"])),
        ("qwen2, added tokens", with_added(qwen2)),
        ("qwen2, merges as pairs", with_pairs(qwen2)),
        ("qwen2, ignore_merges",
         with_whole_words(qwen2, "Ġbackward Ġtokenizer softmax ĠĠ ĠMAX ä¸Ģ ÃĹ Ġ123 <0x41> Ċ ĊĊ 日本 a日".split())),
        ("qwen2, 290 tokens", training.train([sample], "qwen2", 290)),
        ("qwen2, 2000 tokens", training.train([sample], "qwen2", 2000)),
        ("qwen2, template", changed(qwen2, post_processor={"type": "Sequence", "processors": [level, chat]})),
        ("qwen2, no normaliser", changed(qwen2, normalizer=None)),
        ("qwen2, NFC in a Sequence", changed(qwen2, normalizer={"type": "Sequence", "normalizers": [
            {"type": "NFC"}, {"type": "Replace", "pattern": {"String": "''"}, "content": "\""},
            {"type": "Replace", "pattern": {"String": "\u0301"}, "content": ""}]})),
        ("qwen2, numbers of 1 to 3", regex_of(with_all_pairs(qwen2), cl100k)),
        ("qwen2, DeepSeek's splits", with_splits(with_all_pairs(qwen2), *DEEPSEEK_REGEXES)),
        ("qwen2, GPT-4o's regex", regex_of(with_all_pairs(qwen2), GPT4O_REGEX)),
        ("qwen2, GPT-2's regex in a Split", regex_of(with_all_pairs(qwen2), GPT2_REGEX)),
        ("qwen2, random merges", with_random_merges(qwen2, "abĠÃ©", 256)),
        ("qwen2, NUL in an added token",
         changed(qwen2, added_tokens=qwen2["added_tokens"] + [{"id": max(ids.values()) + 1, **added("ab\u0000c")}])),
        ("qwen2, no added tokens", changed(qwen2, added_tokens=[])),
        ("qwen2, keys reversed, indented, escaped", json.dumps(reversed_keys(qwen2), indent=3).encode()),
        ("qwen2, another regex",
         regex_of(with_all_pairs(qwen2), r"\p{Lu}?\p{Ll}+|\p{N}{2}|\s*\n|[^\S\n]+(?=\S)|[\p{P}\p{S}]+")),
        ("qwen3.5, added tokens", with_added(qwen35)),
        ("qwen3.5, merges as pairs", with_pairs(qwen35)),
        ("mistral-v0.1, added tokens", with_added(v01)),
        ("mistral-v0.1, merges as pairs", with_pairs(v01)),
        ("mistral-v0.1, unk fused", without_bytes(v01, True)),
        ("mistral-v0.1, unk not fused", without_bytes(v01, False)),
        ("mistral-v0.1, no decoder", changed(v01, decoder=None)),
        ("mistral-v0.1, spaces in merges", with_random_merges(changed(v01, normalizer=None), "ab é", 259)),
        ("mistral-v0.1, random merges", with_random_merges(v01, "ab▁é", 259)),
        ("mistral-v0.1, decoder without Fuse", decoded_by(v01, replace, fallback, strip(1, 0))),
        ("mistral-v0.1, Strip of two and one", decoded_by(v01, replace, fallback, {"type": "Fuse"}, strip(2, 1))),
        ("mistral-v0.1, Strip before the bytes", decoded_by(v01, strip(1, 0), fallback, replace)),
        ("mistral-v0.1, ignore_merges", with_whole_words(v01, ["▁the▁model", "▁a▁b", "é", "▁é", "▁1"])),
        ("mistral-v0.1, ends with </s>",
         changed(v01, post_processor=template(["<s>"], ["</s>"], {"<s>": [1], "</s>": [2]}))),
        ("mistral-v0.3, added tokens", with_added(v03)),
        ("mistral-v0.3, always", metaspace(v03, "always")),
        ("mistral-v0.3, never", metaspace(v03, "never")),
        ("mistral-v0.3, split", metaspace(v03, "first", split=True)),
        ("mistral-v0.3, split, random merges", with_random_merges(metaspace(v03, "always", split=True), "ab▁é", 266)),
        ("mistral-v0.3, always, added tokens", with_added(metaspace(v03, "always"))),
        ("mistral-v0.3, unk fused, added tokens", with_added(without_bytes(v03, True))),
    ]


def must_be_refused(files):
    """Pairs (name, bytes) of files that no one should tokenize with."""
    qwen2, v01 = files["qwen2"], files["mistral-v0.1"]

    def without(file, token):
        vocab = {key: id for key, id in file["model"]["vocab"].items() if key != token}
        return model_changed(file, vocab=vocab, merges=[])

    def gap(file):
        file = copy.deepcopy(file)
        file["added_tokens"][-1]["id"] += 5
        return file

    files = [("dropout", model_changed(qwen2, dropout=0.1)), ("WordPiece", model_changed(qwen2, type="WordPiece")),
             ("Unigram", model_changed(qwen2, type="Unigram")),
             ("subword prefix", model_changed(qwen2, continuing_subword_prefix="##")),
             ("word suffix", model_changed(qwen2, end_of_word_suffix="</w>")),
             ("Lowercase", changed(qwen2, normalizer={"type": "Lowercase"})),
             ("unknown normaliser", changed(qwen2, normalizer={"type": "Nonsense"})),
             ("unknown pre-tokenizer", changed(qwen2, pre_tokenizer={"type": "Nonsense"})),
             ("unknown decoder", changed(qwen2, decoder={"type": "Nonsense"})),
             ("unknown post-processor", changed(qwen2, post_processor={"type": "Nonsense"})),
             ("merge of what is not there", model_changed(qwen2, merges=["a nonsense"])),
             ("merge that makes what is not there", model_changed(qwen2, merges=["Ġ Ġ", "Ġ ÿ"])),
             ("merge of one", model_changed(qwen2, merges=["ab"])),
             ("merge of three", model_changed(qwen2, merges=[["a", "b", "c"]])),
             ("a byte is missing", without(qwen2, "Ġ")), ("a byte token is missing", without(v01, "<0x41>")),
             ("gap in the ids", gap(qwen2)), ("no vocabulary", changed(qwen2, model={"type": "BPE", "merges": []})),
             ("no model", changed(qwen2, model=None)), ("bad regex", regex_of(qwen2, "(")), ("a list", []),
             ("a number", 7)]
    files = [(name, json.dumps(content).encode()) for name, content in files]
    whole = json.dumps(qwen2).encode()
    return files + [("empty", b""), ("cut", whole[:-2]), ("cut in half", whole[:len(whole) // 2]),
                    ("not JSON", b"\x00" * 64)]
