"""
The text of --generate against transformers, for check_hf.py: a folder that a trainer has written is opened as users do,
by AutoTokenizer and AutoModelForCausalLM, and greedily continues the same prompts. --generate puts end of text before a
prompt, as training data has it, so that goes in front here too. Needs torch and transformers.
"""
import contextlib
import json
import logging
import os
import shutil

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig,
                          PreTrainedTokenizerFast)

HERE = os.path.dirname(os.path.abspath(__file__))
STYLES = ("bytes", "gpt2", "qwen2", "mistral-v0.1", "mistral-v0.3")  # of dev/golden/tokenizers, but for bytes
HAVE_TEMPLATE = ("mistral-v0.1", "mistral-v0.3")                     # tokenizer(text) begins with <s>
PROMPTS = ["The plain loop", "a", "if (x) {\n\t\treturn 12345;", "déjà vu: 日本 and 👍 are", "\n"]
N_NEW = 24


def end_of_text(folder):
    """Of the tokenizer.json in a folder: its name and id."""
    tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    name = next(name for name in ("<|endoftext|>", "</s>") if tokenizer.token_to_id(name) is not None)
    return name, tokenizer.token_to_id(name)


def write_model(kind, style, folder):
    """A random model of transformers with a tokenizer.json and nothing else beside it; none for bytes."""
    source = os.path.join(HERE, "..", "golden", "tokenizers", style + ".json")
    V, eot = 257, 256
    if style != "bytes":
        os.mkdir(folder)
        shutil.copy(source, os.path.join(folder, "tokenizer.json"))
        V, eot = Tokenizer.from_file(source).get_vocab_size(), end_of_text(folder)[1]
    model = kind.make_model(kind.text_case(V))
    model.config.bos_token_id = model.config.eos_token_id = eot
    model.save_pretrained(folder)
    os.remove(os.path.join(folder, "generation_config.json"))


@contextlib.contextmanager
def warnings_of_transformers():
    """What it complains about; that it computes without other people's kernels is none."""
    lines, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    handler.addFilter(lambda record: "is falling back to its reference" not in record.getMessage())
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def printed(text):
    """As --generate shows it: without control characters that are no white space."""
    def is_shown(c): return not (c < " " and c not in "\t\n\v\f\r" or "\x7f" <= c < "\xa0")
    return "".join(filter(is_shown, text)).encode()


def printed_bytes(ids):
    """The same of a byte model, which writes byte by byte, whether they make characters or not."""
    return bytes(id for id in ids if 9 <= id <= 13 or id >= 32 and id != 127)


class Reader:
    """A folder in transformers."""

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.name, self.eot = end_of_text(folder)
        self.file = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        self.is_bytes = self.file.get_vocab_size() == 257

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def same_ids(self, style):
        """AutoTokenizer is the tokenizer of the file, and a text's tokens are those of the text."""
        t = self.tokenizer
        for text in [*PROMPTS, " a  b", "a" + self.name + "b", "".join(map(chr, range(1, 0x250)))]:
            plain, whole = self.ids(text), t(text).input_ids
            if plain != self.file.encode(text, add_special_tokens=False).ids or whole != self.file.encode(text).ids:
                return False
            if style not in HAVE_TEMPLATE and (whole != plain or t(t.eos_token + text).input_ids != [self.eot, *plain]):
                return False
            if style == "bytes" and self.name not in text and plain != list(text.encode()):
                return False
        return t.eos_token == self.name and t.eos_token_id == self.eot and t.pad_token_id is not None

    def texts(self, prompts):
        """What --generate should print for each, continued together: the short ones are filled up on the left."""
        ids = [[self.eot, *self.ids(prompt)] for prompt in prompts]
        batch = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        out = self.model.generate(**batch, max_new_tokens=N_NEW, do_sample=False)[:, batch.input_ids.shape[1]:]
        return [self.text(prompt, new.tolist()) for prompt, new in zip(prompts, out)]

    def text(self, prompt, new):
        """A prompt as it was typed, and what its tokens and the new ones say beyond its own."""
        new = new[:new.index(self.eot)] if self.eot in new else new
        if self.is_bytes:
            return prompt.encode() + printed_bytes(new) + b"\n"
        ids = self.ids(prompt)
        before, whole = (self.tokenizer.decode(x, skip_special_tokens=True) for x in (ids, ids + new))
        assert whole.startswith(before)
        return prompt.encode() + printed(whole[len(before):]) + b"\n"


def our_text(files, folder, prompt):
    greedy = ("--temperature", "0", "--max-new-tokens", str(N_NEW))
    return files.run("--from", folder, "--generate", prompt, *greedy).stdout


def errors_of_folder(files, style, folder):
    """0.0 or inf for each promise about a folder."""
    with warnings_of_transformers() as lines:
        reader = Reader(files.path(folder))
        alone = [reader.texts([prompt])[0] for prompt in PROMPTS]
        together = reader.texts(PROMPTS) if files.kind.FILLS else None
    same_ids = reader.same_ids(style)
    ours = [our_text(files, folder, prompt) for prompt in PROMPTS]
    for theirs, found in zip(alone, ours):
        if theirs != found:
            print(f"     {style}, {folder}: expected {theirs!r}, found {found!r}")
    for line in lines:
        print(f"     {style}, {folder}: {line}")
    promises = {
        "AutoTokenizer is the tokenizer of the file": same_ids,
        "the text of --generate": alone == ours,
        "the same in a batch, filled up on the left": together in (ours, None),
        "transformers warns of nothing": not lines,
    }
    return {f"text, {style}: {name}": 0.0 if kept else float("inf") for name, kept in promises.items()}


def head_text(folder, prompt):
    """A head of prototypes, which transformers does not know: its features, and the prototype nearest to them"""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    prototypes = torch.nn.functional.normalize(tensors["hpn.prototypes"], dim=-1)
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(prompt).input_ids]])
    n_prompt = ids.shape[1]
    for _ in range(N_NEW):
        features = model(input_ids=ids, use_cache=False).last_hidden_state[:, -1]
        if "hpn.proj.weight" in tensors:
            features = features @ tensors["hpn.proj.weight"].T
        token = (torch.nn.functional.normalize(features, dim=-1) @ prototypes.T).argmax(-1, keepdim=True)
        if token == tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, token], 1)
    return prompt.encode() + printed_bytes(ids[0, n_prompt:].tolist()) + b"\n"


def train(files, *options):
    with open(files.path("text.txt"), "w") as file:
        file.write("A line of text to train on, and another one.\n" * 40)
    files.run("--train", "text.txt", "--seq-len", "16", "--sample-every", "0", *options)


def check_text(files, kind, style):
    """An export and a checkpoint of a model with this tokenizer."""
    write_model(kind, style, files.path("hf"))
    files.run("--from", "hf", "--export-hf", "out")
    train(files, "--from", "hf", "--steps", "2", "--lr", "1e-4", "--run", "run")
    errors = {}
    for folder in ("out", "run/step_000002"):
        for name, error in errors_of_folder(files, style, folder).items():
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


def check_tuned(files, kind):
    """A model for chats, as transformers saves it, keeps its template, special tokens and way to generate."""
    write_model(kind, "qwen2", files.path("hf"))
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_file=files.path("hf", "tokenizer.json"), eos_token="<|im_end|>", unk_token="!",
                            pad_token="<|endoftext|>", chat_template=template).save_pretrained(files.path("hf"))
    GenerationConfig(eos_token_id=[5, 6], top_k=7, do_sample=True).save_pretrained(files.path("hf"))
    train(files, "--from", "hf", "--steps", "1", "--run", "run", "--export-hf", "out")
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "déjà vu"}]

    def seen(folder):
        tokenizer = AutoTokenizer.from_pretrained(files.path(folder))
        options = GenerationConfig.from_pretrained(files.path(folder)).to_dict()
        return tokenizer.apply_chat_template(chat)["input_ids"], tokenizer.special_tokens_map, options

    before = seen("hf")
    return {f"a model for chats, {name}: what transformers saved": 0.0 if seen(folder) == before else float("inf")
            for name, folder in (("trained", "out"), ("a checkpoint", "run/step_000001"))}


def check_heads(files, kind):
    """Heads of prototypes, with and without a projection."""
    errors = {}
    with open(files.path("config.json"), "w") as file:
        json.dump(kind.TINY, file)
    for number, head in enumerate([*kind.HEADS, *(f"{head} --proto-dim 11" for head in kind.HEADS)]):
        folder = f"head{number}"
        train(files, "--config", "config.json", "--head", *head.split(), "--steps", "9", "--lr", "1e-2", "--run",
              f"run{number}", "--export-hf", folder)
        same = all(head_text(files.path(folder), prompt) == our_text(files, folder, prompt) for prompt in PROMPTS)
        errors[f"text, --head {head}: AutoModel and the nearest prototype"] = 0.0 if same else float("inf")
    return errors
