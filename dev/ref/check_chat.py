"""
Holds llmc/text/chat_render.h against transformers' apply_chat_template, which is right by definition: random
conversations through both; text, token ids and which tokens are learned compared.

    python dev/ref/check_chat.py TEMPLATES                        2,000 conversations for each template
    python dev/ref/check_chat.py TEMPLATES --conversations 50000 --seed 7      more of them, others
    python dev/ref/check_chat.py TEMPLATES --write-fixtures       write dev/golden/chat.jsonl anew

TEMPLATES is a folder with published chat templates: NAME.jinja, or the chat_template of a NAME/tokenizer_config.json or
NAME.json. They are not ours to keep here. What the C code recognises is compared, by its own reading of the file; what
it does not is named as refused. A template of the same kind as one before is compared as well.
Learned is what a template marks by {% generation %}. Published templates have no such marks, so they are put in here,
and each conversation is rendered with and without them: the texts must be equal too.
A conversation that one side refuses the other must refuse as well: Mistral's have an order of turns, a tenth of the
conversations break it.
dev/golden/chat.jsonl holds made conversations with the texts, ids and masks that transformers gives; they test the C
code where transformers and the templates are not (test_chat_template.c).
Status: 0 all equal, 1 not. Needs the packages transformers and jinja2.
"""
import argparse
import ctypes
import glob
import json
import os
import random
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOKENIZERS = os.path.join(ROOT, "dev", "golden", "tokenizers")
FIXTURES = os.path.join(ROOT, "dev", "golden", "chat.jsonl")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

try:
    from jinja2.exceptions import TemplateError
    from tokenizers import Tokenizer  # check_tokenizer.py ends without it
    from transformers import PreTrainedTokenizerFast
except ImportError as missing:
    print(f"skipped: {missing}")
    print("0 passed, 0 failed, 1 skipped")
    raise SystemExit(0)
import check_tokenizer

ASKS, NO_THINKING, KEEPS_THOUGHTS, THINKING = 1, 2, 4, 8
OF_QWEN3_5 = ("qwen3.5", "qwen3.5-small", "qwen3.6")
SHOWN = 3
OF_CHATML, OF_MISTRAL = ("qwen2", "gpt2", "bytes"), ("mistral-v0.1", "mistral-v0.3")
OF_QWEN3_5_TOKENS = ("qwen3.5", "gpt2", "bytes")


# ---- the C side ----

def build_wrapper(folder):
    library = check_tokenizer.build_wrapper(ROOT, "", folder, "chat_shared.c")
    library.shared_chat_open.restype = ctypes.c_void_p
    library.shared_chat_open.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]
    library.shared_chat_render.restype = ctypes.c_void_p
    library.shared_chat_render.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_size_t)]
    library.shared_chat_reason.restype = ctypes.c_char_p
    library.shared_chat_reason.argtypes = [ctypes.c_void_p]
    library.shared_chat_encode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.POINTER(ctypes.c_int)),
                                           ctypes.POINTER(ctypes.POINTER(ctypes.c_ubyte))]
    library.shared_chat_spans.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.POINTER(ctypes.c_size_t))]
    library.shared_chat_begin()
    return library


class Ours:
    """A template as the C code recognises it; kind is None where it does not."""

    def __init__(self, library, template):
        name = ctypes.create_string_buffer(32)
        self.library, text = library, template.encode()
        self.chat = library.shared_chat_open(text, len(text), name)
        self.kind = name.value.decode() if self.chat else None

    def text(self, conversation, choices):
        """None: refused."""
        n = ctypes.c_size_t()
        at = self.library.shared_chat_render(self.chat, json.dumps(conversation).encode(), choices, ctypes.byref(n))
        return ctypes.string_at(at, n.value).decode() if at else None

    def reason(self): return self.library.shared_chat_reason(self.chat).decode()

    def tokens(self, tokenizer):
        """Ids and mask of the text that was asked for last."""
        ids, learned = ctypes.POINTER(ctypes.c_int)(), ctypes.POINTER(ctypes.c_ubyte)()
        n = self.library.shared_chat_encode(self.chat, tokenizer.t, ctypes.byref(ids), ctypes.byref(learned))
        return ids[:n], list(learned[:n])

    def spans(self):
        spans = ctypes.POINTER(ctypes.c_size_t)()
        n = self.library.shared_chat_spans(self.chat, ctypes.byref(spans))
        return [[spans[2 * i], spans[2 * i + 1]] for i in range(n)]


# ---- marks of what is learned ----

def replaced(text, old, new):
    if text.count(old) != 1:
        raise SystemExit(f"check_chat.py: a template has {text.count(old)} times, not once: {old}")
    return text.replace(old, new)


def marked_turn(template, whole, content):
    """`whole` writes a turn of any role: what is learned of an assistant's is its content and the end."""
    return replaced(template, whole, (
        "{{- '<|im_start|>' + message.role + '\\n' }}{%- if message.role == 'assistant' %}{%- generation %}"
        "{{- " + content + " + '<|im_end|>' }}{%- endgeneration %}{%- else %}{{- " + content +
        " + '<|im_end|>' }}{%- endif %}{{- '\\n' }}"))


END_OF_CALLS = "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}"
MARKED_END = "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}\n    {%- elif message.role == \"tool\" %}"


def marked_qwen2_5(template):
    template = marked_turn(template, "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}",
                           "message.content")
    template = replaced(template, "{{- '<|im_start|>' + message.role }}",
                        "{{- '<|im_start|>' + message.role + '\\n' }}{%- generation %}")
    template = replaced(template, "{{- '\\n' + message.content }}", "{{- message.content }}")
    template = replaced(template, "{{- '\\n<tool_call>\\n{\"name\": \"' }}",
                        "{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}{{- '<tool_call>\\n{\"name\": \"' }}")
    return replaced(template, END_OF_CALLS, MARKED_END)


def marked_qwen3(template):
    """What an answer begins with is put into a variable, for a mark cannot begin in one branch and end behind it."""
    template = replaced(template, "{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + "
                        "'\\n</think>\\n\\n' + content.lstrip('\\n') }}",
                        "{%- set begin = '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + "
                        "content.lstrip('\\n') %}")
    template = template.replace("{{- '<|im_start|>' + message.role + '\\n' + content }}", "{%- set begin = content %}")
    template = replaced(template, "{%- if message.tool_calls %}",
                        "{{- '<|im_start|>' + message.role + '\\n' }}{%- generation %}{{- begin }}{%- if message.tool_calls %}")
    return replaced(template, END_OF_CALLS, MARKED_END)


def marked_qwen3_2507(template):
    template = replaced(template, "{{- '<|im_start|>' + message.role + '\\n' + content }}",
                        "{{- '<|im_start|>' + message.role + '\\n' }}{%- generation %}{{- content }}")
    return replaced(template, END_OF_CALLS, MARKED_END)


def marked_qwen3_5(template):
    """Not learned is what a prompt begins an answer with: all of an empty think block, of another its first line."""
    thinks = ("{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content + "
              "'\\n</think>\\n\\n' + content }}")
    plain = "{{- '<|im_start|>' + message.role + '\\n' + content }}"
    template = replaced(template, thinks, (
        "{%- set ns.head = '<think>\\n' if reasoning_content else '<think>\\n\\n</think>\\n\\n' %}"
        "{%- set ns.begin = reasoning_content + '\\n</think>\\n\\n' + content if reasoning_content else content %}"))
    template = replaced(template, plain, "{%- set ns.head = '' %}{%- set ns.begin = content %}")
    calls = "{%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}"
    template = replaced(template, calls, (
        "{{- '<|im_start|>' + message.role + '\\n' + ns.head }}{%- generation %}{{- ns.begin }}" + calls))
    return replaced(template, END_OF_CALLS, MARKED_END)


def marked_mistral_v3(template):
    template = replaced(template, '{{- "[TOOL_CALLS] [" }}', '{%- generation %}{{- "[TOOL_CALLS] [" }}')
    template = replaced(template, '{%- elif message["role"] == "assistant" %}',
                        '{%- endgeneration %}{%- elif message["role"] == "assistant" %}')
    for trim in ("", "|trim"):
        answer = '{{- " " + message["content"]' + trim + " + eos_token}}"
        template = template.replace(answer, "{%- generation %}" + answer + "{%- endgeneration %}")
    return template


def marked_chatml(template):
    return marked_turn(template, "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}",
                       "message.content")


def marked_answer(answer, rest=""):
    return lambda template: replaced(template, answer + rest + " }}" if rest else answer + "}}",
                                     "{% generation %}" + answer + "}}{% endgeneration %}" + ("{{ ' ' }}" if rest else ""))


MARKED = {
    "chatml": marked_chatml, "qwen2": marked_chatml, "qwen2.5": marked_qwen2_5, "qwen3": marked_qwen3,
    "qwen3-2507": marked_qwen3_2507,
    "qwen3.5": marked_qwen3_5, "qwen3.5-small": marked_qwen3_5, "qwen3.6": marked_qwen3_5,
    "mistral-v0.1": marked_answer("{{ message['content'] + eos_token", " + ' '"),
    "mistral-v0.2": marked_answer("{{ message['content'] + eos_token"),
    "mistral-v1": marked_answer("{{- ' ' + message['content'] + eos_token"),
    "mistral-v3": marked_mistral_v3,
}


# ---- conversations ----

WORDS = ("Hello", " world", "a", "the plain loop", "déjà vu", "e\u0301", "\u0301", "A\u030a", "日本語", "👩‍👩‍👧", "İ", "ﬁ",
         "12 345", "x = 1;", "don't", "\"quoted\"", "\\", "<b>&amp;</b>", "{}", "[1, 2]", "\u00a0", "\u2028", "\x1f", "\t",
         "\r\n", " ", "  ", "\n", "\n\n", "\n\n\n", "None", "null", "<", ">", "|", "assistant", "user\n", "[/INST", "INST]")
THINK = ("<think>", "</think>", "<think>\n", "\n</think>\n\n", "<think>\nWell\n</think>\n\n", "<think>\n\n</think>\n\n")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
NUMBERS = (0, -1, 7, 2**53 + 1, -(2**63), 2**63 - 1, 0.5, -0.0, 1.0, 1e16, 1e15, 123456789012345680.0, 1e-4, 1e-5, 1.5e-7,
           0.1 + 0.2, 1e22, 1e308, 5e-324, 3.14159, 100000.0, True, False, None)


class Conversations:
    """Random ones for a kind of template; what it cannot take is left out."""

    def __init__(self, kind, seed):
        self.kind, self.rng = kind, random.Random(f"{kind} {seed}")
        self.mistral = kind.startswith("mistral")
        self.images = kind in OF_QWEN3_5
        self.tools = self.images or kind in ("qwen2.5", "qwen3", "qwen3-2507", "mistral-v3")

    def text(self, most=6, think=True):
        pieces = WORDS + (THINK + MARKS if think and self.rng.random() < 0.4 else ())
        return "".join(self.rng.choice(pieces) for _ in range(self.rng.randint(0, most)))

    def value(self, depth=0):
        r = self.rng.random()
        if depth < 3 and r < 0.2:
            return {self.text(2, False): self.value(depth + 1) for _ in range(self.rng.randint(0, 3))}
        if depth < 3 and r < 0.35:
            return [self.value(depth + 1) for _ in range(self.rng.randint(0, 3))]
        if r < 0.6:
            return self.rng.choice(NUMBERS) if r < 0.5 else self.rng.uniform(-1, 1) * 10.0**self.rng.randint(-12, 20)
        return self.text(3)

    def arguments(self):
        whole = {f"arg{i}": self.value() for i in range(self.rng.randint(0, 3))}
        return json.dumps(whole) if self.rng.random() < 0.2 and not self.images else whole  # qwen3.5 stops at a text

    def tool(self):
        function = {"name": f"f{self.rng.randint(0, 99)}", "description": self.text(4),
                    "parameters": {"type": "object", "properties": {"x": {"type": "string", "default": self.value()}}}}
        if self.rng.random() < 0.2:
            function["return"] = {"type": "string"}
        return {"type": "function", "function": function}

    def id(self): return "".join(self.rng.choice("abcXYZ019é") for _ in range(9))

    def call(self):
        call = {"name": f"f{self.rng.randint(0, 99)}", "arguments": self.arguments()}
        if self.mistral:
            return {"id": self.id(), "type": "function", "function": call}
        return {"type": "function", "function": call} if self.rng.random() < 0.6 else call

    def answer(self):
        message = {"role": "assistant", "content": self.text()}
        if (self.images or self.kind == "qwen3") and self.rng.random() < 0.5:
            name = self.rng.choice(("reasoning_content", "reasoning_content", "thinking", "reasoning"))
            message[name] = self.rng.choice(("", "\n", self.text()))
        return message

    def calls(self):
        """An answer that calls tools, and their results."""
        message = self.answer()
        message["tool_calls"] = [self.call() for _ in range(self.rng.randint(1, 3))]
        if self.rng.random() < 0.3:
            message["content"] = self.rng.choice(("", None))
        if message["content"] is None and self.kind == "qwen3":
            message["content"] = ""  # its first spelling cannot read none
        results = [{"role": "tool", "content": self.text(), "tool_call_id": self.id()}
                   for _ in range(self.rng.randint(0 if not self.mistral else 1, 3))]
        return [message, *results]

    def turns(self):
        messages = []
        for _ in range(self.rng.randint(1, 4)):
            question = self.text()
            if self.rng.random() < 0.1:
                question = "<tool_response>" + question + "</tool_response>"
            messages.append({"role": "user", "content": question})
            for _ in range(self.rng.randint(0, 2) if self.tools and self.rng.random() < 0.5 else 0):
                messages += self.calls()
            if not self.mistral and self.rng.random() < 0.05:
                messages.append({"role": "system", "content": self.text()})
            messages.append(self.answer())
        return messages

    def image(self, images):
        """One with its path, in each of its forms, or the next of the list."""
        path = self.rng.choice(("a.png", "folder/b.jpg", "/c d.png", "file:///e.png", "日本.webp"))
        form = self.rng.randrange(6)
        if form > 3:
            images.append(path if form == 4 else {"path": path})
            return {"type": "image"}
        return ({"type": "image", "image": path}, {"type": "image_url", "image_url": {"url": path}},
                {"type": "image_url", "image_url": path}, {"type": "image", "path": path})[form]

    def with_images(self, messages):
        """Contents become lists of texts and images; the paths of those that have none beside them."""
        images = []
        for message in messages:
            if self.rng.random() < 0.5 or not isinstance(message["content"], str):
                continue
            parts = [{"type": "text", "text": message["content"]}]
            for _ in range(self.rng.randint(0, 3) if message["role"] != "system" or self.rng.random() < 0.1 else 0):
                parts.insert(self.rng.randint(0, len(parts)), self.image(images))
                if self.rng.random() < 0.3:
                    parts.insert(self.rng.randint(0, len(parts)), {"type": "text", "text": self.text()})
            message["content"] = parts
        return images

    def next(self):
        messages = self.turns()
        has_system = self.kind not in ("mistral-v0.1", "mistral-v0.2")
        if has_system and self.rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": self.text()})
        if self.rng.random() < 0.2:
            messages.pop()
        if self.rng.random() < 0.1 and self.mistral:
            messages.insert(self.rng.randrange(len(messages) + 1), self.rng.choice(messages))
        if not self.mistral and self.rng.random() < 0.1:
            self.rng.shuffle(messages)
        conversation = {"messages": messages or [{"role": "user", "content": "Hi"}]}
        if self.tools and self.rng.random() < 0.5:
            conversation["tools"] = [self.tool() for _ in range(self.rng.randint(1, 3))]
        if self.images and self.rng.random() < 0.5:
            conversation["images"] = self.with_images(conversation["messages"])
        return conversation


# ---- transformers ----

def said_of(choices):
    said = {"enable_thinking": not choices & NO_THINKING} if choices & (NO_THINKING | THINKING) else {}
    return {**said, **({"preserve_thinking": True} if choices & KEEPS_THOUGHTS else {})}


class Theirs:
    """A tokenizer of dev/golden with a published template, and with the same template and marks."""

    def __init__(self, path, template, marked):
        is_mistral = "mistral" in os.path.basename(path)
        names = {"bos_token": "<s>", "eos_token": "</s>"} if is_mistral else {}
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=path, **names)
        self.template, self.marked = template, marked

    def text(self, conversation, choices):
        """None: refused."""
        try:
            return self.tokenizer.apply_chat_template(
                conversation["messages"], tools=conversation.get("tools"), chat_template=self.template, tokenize=False,
                add_generation_prompt=bool(choices & ASKS), **said_of(choices))
        except TemplateError:
            return None

    def tokens(self, conversation, choices=0):
        out = self.tokenizer.apply_chat_template(
            conversation["messages"], tools=conversation.get("tools"), chat_template=self.marked, return_dict=True,
            return_assistant_tokens_mask=True, **said_of(choices))
        return out["input_ids"], out["assistant_masks"]

    def marked_text(self, conversation, choices):
        return self.tokenizer.apply_chat_template(conversation["messages"], tools=conversation.get("tools"),
                                                  chat_template=self.marked, tokenize=False, **said_of(choices))


# ---- comparing ----

class Count:
    def __init__(self):
        self.n = self.n_refused = self.n_tokens = self.n_learned = 0
        self.wrong = {"text": 0, "ids": 0, "mask": 0, "refusal": 0}

    def differs(self, what, conversation, theirs, ours):
        self.wrong[what] += 1
        if sum(self.wrong.values()) <= SHOWN:
            print(f"{what}: {json.dumps(conversation)}\n    theirs {theirs!r}\n    ours   {ours!r}")

    def bad(self): return sum(self.wrong.values())


def compare_conversation(count, ours, sides, conversation, choices):
    count.n += 1
    theirs = sides[0][0].text(conversation, choices)
    text = ours.text(conversation, choices)
    if text is None or theirs is None:
        count.n_refused += 1
        if (text is None) != (theirs is None):
            count.differs("refusal", conversation, theirs, text if text is not None else ours.reason())
        return
    if text != theirs:
        count.differs("text", conversation, theirs, text)
    keeps = choices & KEEPS_THOUGHTS
    if choices & ASKS:
        ours.text(conversation, keeps)
    else:
        assert sides[0][0].marked_text(conversation, keeps) == theirs, "the marks change the text"
    for side, tokenizer in sides:
        ids, mask = side.tokens(conversation, keeps)
        our_ids, our_mask = ours.tokens(tokenizer)
        count.n_tokens += len(ids)
        count.n_learned += sum(mask)
        if our_ids != ids:
            count.differs("ids", conversation, ids, our_ids)
        elif our_mask != mask:
            count.differs("mask", conversation, mask, our_mask)


def styles_of(kind):
    return OF_MISTRAL if kind.startswith("mistral") else OF_QWEN3_5_TOKENS if kind in OF_QWEN3_5 else OF_CHATML


def tokenizer_paths(kind, folder):
    return [os.path.join(folder if style == "bytes" else TOKENIZERS, "tokenizer.json" if style == "bytes" else f"{style}.json")
            for style in styles_of(kind)]


def open_sides(library, kind, template, folder):
    sides = []
    for path in tokenizer_paths(kind, folder):
        with open(path, "rb") as file:
            sides.append((Theirs(path, template, MARKED[kind](template)), check_tokenizer.CTokenizer(library, file.read())))
    return sides


def choices_of(i, kind):
    """Every fourth conversation ends where an answer begins."""
    keeps = KEEPS_THOUGHTS if kind == "qwen3.6" and i % 3 == 0 else 0
    if i % 4:
        return keeps
    if kind in OF_QWEN3_5:
        return keeps | ASKS | (0, NO_THINKING, THINKING)[i // 4 % 3]
    return ASKS | NO_THINKING if kind == "qwen3" and i % 8 else ASKS


def compare_template(library, name, template, folder, options):
    ours = Ours(library, template)
    if not ours.kind:
        print(f"refused  {name}")
        return None
    sides, made, count = open_sides(library, ours.kind, template, folder), Conversations(ours.kind, options.seed), Count()
    for i in range(options.conversations):
        compare_conversation(count, ours, sides, made.next(), choices_of(i, ours.kind))
    print(f"{'FAIL' if count.bad() else 'ok  '}  {name} is {ours.kind}: {count.n} conversations with {len(sides)} tokenizers, "
          f"{count.n_refused} refused by both, {count.n_tokens} tokens, {count.n_learned} learned; differ: "
          + ", ".join(f"{n} {what}" for what, n in count.wrong.items()), flush=True)
    return ours.kind, count


def read_templates(folder):
    """name -> text"""
    found = {}
    for path in sorted(glob.glob(os.path.join(folder, "*"))):
        inside = os.path.join(path, "tokenizer_config.json")
        if path.endswith(".jinja"):
            with open(path, encoding="utf-8", newline="") as file:
                found[os.path.basename(path)] = file.read()
        elif path.endswith(".json") or os.path.exists(inside):
            with open(path if path.endswith(".json") else inside, encoding="utf-8") as file:
                found[os.path.basename(path)] = json.load(file)["chat_template"]
    if not found:
        raise SystemExit(f"check_chat.py: {folder}: expected chat templates, NAME.jinja or NAME/tokenizer_config.json, found none")
    return found


# ---- fixtures ----

N_FIXTURE, N_WITH_TOOLS = 10, 2  # random conversations of each kind; and those among them that have tools
FIXTURE_BYTES, FIXTURE_BYTES_TOOLS, FIXTURE_BYTES_FUNCTIONS = 400, 1300, 2300  # of a conversation's text


def made_conversations(kind):
    """Two that a reader can follow."""
    plain = {"messages": [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"},
                          {"role": "user", "content": "And 3+3?"}, {"role": "assistant", "content": "6"}]}
    thinks = [{"role": "user", "content": "Is 7 prime?"},
              {"role": "assistant", "content": "<think>\nIt has no divisor.\n</think>\n\nYes."}]
    if kind in OF_QWEN3_5:
        asked = [{"type": "image"}, {"type": "text", "text": " Which one is it? "}]
        return [plain, {"messages": [{"role": "user", "content": asked}, thinks[1]], "images": ["seven.png"]}]
    return [plain, {"messages": thinks if kind == "qwen3" else [*plain["messages"][2:]]}]


def short_conversations(kind, side):
    """Random ones whose texts are short, and some that are refused."""
    made, wanted = Conversations(kind, "fixture"), {False: N_FIXTURE, True: 0}
    if made.tools:
        wanted = {False: N_FIXTURE - N_WITH_TOOLS, True: N_WITH_TOOLS}
    most = FIXTURE_BYTES_FUNCTIONS if made.images else FIXTURE_BYTES_TOOLS
    while sum(wanted.values()):
        conversation = made.next()
        text = side.text(conversation, 0) or ""
        has_tools = "tools" in conversation
        if wanted[has_tools] and len(text.encode()) < (most if has_tools else FIXTURE_BYTES):
            wanted[has_tools] -= 1
            yield conversation


def runs(mask):
    """[[first, behind the last], ...] of the ones"""
    edges = [i for i, (before, one) in enumerate(zip([0, *mask], [*mask, 0])) if before != one]
    return [list(pair) for pair in zip(edges[::2], edges[1::2])]


def fixtures_of(library, kind, template, folder):
    ours = Ours(library, template)
    which = 1 if kind == "mistral-v3" else 0
    style = styles_of(kind)[which]
    side, tokenizer = open_sides(library, kind, template, folder)[which]
    for i, conversation in enumerate([*made_conversations(kind), *short_conversations(kind, side)]):
        choices = choices_of(i + 1, kind)
        text = side.text(conversation, choices)
        row = {"template": kind, "conversation": conversation, "choices": choices, "text": text}
        if text is not None and not choices & ASKS:
            ids, mask = side.tokens(conversation, choices)
            row["tokenizer"], row["ids"], row["learned"] = style, ids, runs(mask)
            ours.text(conversation, choices)
            if ours.tokens(tokenizer) != (ids, mask):
                raise SystemExit("check_chat.py: compare first: what would be written is not what the C code gives")
        yield row


def write_fixtures(library, templates, folder):
    """Those of kinds that the folder lacks stay as they are."""
    rows, seen = [], set()
    for template in templates.values():
        kind = Ours(library, template).kind
        if kind and kind not in seen:
            seen.add(kind)
            rows += fixtures_of(library, kind, template, folder)
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows]
    with open(FIXTURES, encoding="utf-8") as file:
        kept = [line for line in file if json.loads(line)["template"] not in seen]
    with open(FIXTURES, "w", encoding="utf-8") as file:
        file.writelines(kept + lines)
    print(f"{FIXTURES}: {len(rows)} conversations of {len(seen)} templates, {len(kept)} of others stay")


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("templates", metavar="TEMPLATES", help="folder of published templates")
    parser.add_argument("--conversations", type=int, default=2000, metavar="N", help="for each template (2000)")
    parser.add_argument("--seed", type=int, default=1, metavar="K", help="other conversations (1)")
    parser.add_argument("--write-fixtures", action="store_true", help="write dev/golden/chat.jsonl anew, check nothing")
    options = parser.parse_args()
    templates = read_templates(options.templates)
    with tempfile.TemporaryDirectory() as folder:
        library = build_wrapper(folder)
        library.shared_save_bytes(folder.encode())
        if options.write_fixtures:
            write_fixtures(library, templates, folder)
            return 0
        results = [compare_template(library, name, text, folder, options) for name, text in templates.items()]
    compared = [result for result in results if result]
    for kind in sorted(set(MARKED) - {kind for kind, _ in compared}):
        print(f"skip  {kind}: no template of this kind in {options.templates}")
    bad = sum(count.bad() > 0 for _, count in compared)
    print(f"{len(compared) - bad} passed, {bad} failed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
