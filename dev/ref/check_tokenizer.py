"""
Holds llmc/tokenizer.h against Hugging Face tokenizers, which is right by definition: adversarial strings through both,
token ids and decoded text compared.

    python dev/ref/check_tokenizer.py                      5,000 strings for each of about 40 tokenizers
    python dev/ref/check_tokenizer.py --strings 100000     more of them
    python dev/ref/check_tokenizer.py --style qwen2 --seed 7     only tokenizers whose names begin so; other strings
    python dev/ref/check_tokenizer.py --write-fixtures     write dev/golden/tokenizers anew

The tokenizers are those of dev/golden/tokenizers (six styles, trained on sample.txt there) and variants of them: other
vocabulary sizes, merges as pairs, every kind of added token, other post-processors, decoders, regular expressions, no byte
fallback. A difference is shrunk to the shortest string that still shows it. A tokenizer runs in a process of its own, so
a crash or an endless loop is one failure and names its string. Files that must be refused are tried too.
dev/golden/tokenizers/STYLE.expected.jsonl holds strings with the ids and decoded text (special tokens not skipped) that
the library gives; they test the C code where the library is not installed, and are compared with the library here.
Status: 0 all equal, 1 not. Needs the package tokenizers; without it the last line says "1 skipped".
"""
import argparse
import copy
import ctypes
import functools
import json
import mmap
import multiprocessing
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections import defaultdict, namedtuple
from multiprocessing.connection import wait

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are forked
os.environ["RUST_BACKTRACE"] = "0"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FIXTURES = os.path.join(ROOT, "dev", "golden", "tokenizers")
sys.path.insert(0, os.path.join(ROOT, "dev", "data"))

try:
    from tokenizers import Tokenizer
except ImportError as missing:
    print(f"skipped: {missing}")
    print("0 passed, 0 failed, 1 skipped")
    raise SystemExit(0)
import train_tokenizer as training

STYLES = training.STYLES
N_FIXTURE = 300        # strings in an expected.jsonl
FIXTURE_VOCAB = 800
SHOWN = 3              # differences shown of each kind and tokenizer
SHRINK_TRIES = 3000


# ---- characters and strings that tokenizers have been wrong about ----

def points(*items):
    """Characters from code points and (first, last) ranges."""
    out = []
    for item in items:
        first, last = item if isinstance(item, tuple) else (item, item)
        out += [chr(c) for c in range(first, last + 1)]
    return out


SPACES = points((0x09, 0x0D), 0x20, 0x85, 0xA0, 0x1680, (0x2000, 0x200A), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
ALMOST_SPACES = points((0x1C, 0x1F), 0x180E, (0x200B, 0x200F), 0x2060, 0xFEFF, 0x00AD, 0x2422, 0x2423, 0x2581, 0x2800, 0x3164)
CONTROLS = points((0x00, 0x1F), 0x7F, (0x80, 0x9F), 0x061C, (0x202A, 0x202E), (0x2061, 0x206F), (0xFFF9, 0xFFFD), 0xFFFE, 0xFFFF)
PLANE_ENDS = points(*[(plane + 0xFFFE, plane + 0xFFFF) for plane in range(0, 0x110000, 0x10000)], 0xFDD0, 0xFDEF, 0xD7FF, 0xE000,
                    0xF8FF, 0xF0000, 0x100000, 0x7F, 0x80, 0x7FF, 0x800, 0x10000, 0x2FF, 0x300, 0xE0001, 0xE0100, 0xE01EF)
# assigned in Unicode 10 to 16, so absent from some library's tables; after that 17, absent from ours
NEW_POINTS = points(
    (0x0860, 0x088E), (0x0897, 0x089F), (0x08B3, 0x08D3), 0x09FE, 0x0C3C, 0x0CF3, 0x0CDD, 0x0D04, 0x0EBA, 0x0ECE, 0x1715,
    0x171F, (0x1ABF, 0x1ACE), (0x1C89, 0x1C8A), (0x1C90, 0x1CBF), (0x1DF6, 0x1DFA), 0x2C2F, 0x2C5F, 0x2FFC, 0x31BB, 0x31EF, 0x32FF,
    0x4DBF, 0x9FFC, (0xA7B8, 0xA7CD), (0xA7D0, 0xA7DC), (0xA7F2, 0xA7F4), (0xAB66, 0xAB6B), (0x10570, 0x105BC), (0x105C0, 0x105F3),
    (0x10780, 0x107BA), (0x10A34, 0x10A35), (0x10D00, 0x10D39), (0x10D40, 0x10D8F), (0x10E80, 0x10EB1), (0x10EC2, 0x10EC4),
    (0x10EFC, 0x10F27), (0x10F30, 0x10F59), (0x10F70, 0x10F89), (0x10FB0, 0x10FCB), (0x11070, 0x11075), (0x11144, 0x11147),
    (0x11380, 0x113D5), (0x1145A, 0x11461), 0x116B8, (0x116D0, 0x116E3), 0x1171A, (0x11740, 0x11746), (0x11800, 0x1183B),
    (0x11900, 0x11946), (0x11950, 0x11959), (0x119A0, 0x119E4), (0x11A00, 0x11A9D), (0x11AB0, 0x11ABF), (0x11BC0, 0x11BF9),
    (0x11D60, 0x11DA9), (0x11EE0, 0x11EF8), (0x11F00, 0x11F5A), 0x11FB0, (0x11FC0, 0x11FD4), (0x12F90, 0x12FF2), (0x13430, 0x13480),
    0x143FA, (0x16100, 0x16139), (0x16A70, 0x16AC9), (0x16D40, 0x16D79), (0x16E40, 0x16E96), (0x16FE2, 0x16FF1), (0x187ED, 0x187F7),
    (0x18AF3, 0x18D08), (0x1AFF0, 0x1AFFE), (0x1B11F, 0x1B122), (0x1B132, 0x1B167), (0x1CC00, 0x1CCF9), (0x1D2C0, 0x1D2F3),
    (0x1DF00, 0x1DF2A), (0x1E030, 0x1E08F), (0x1E100, 0x1E149), (0x1E290, 0x1E2F9), (0x1E4D0, 0x1E4F9), (0x1E5D0, 0x1E5FA),
    (0x1E7E0, 0x1E7FE), (0x1EC71, 0x1ECB4), (0x1F8B2, 0x1F8BB), (0x1FA70, 0x1FAE9), (0x1FBF0, 0x1FBF9), (0x2A6DD, 0x2A6DF),
    (0x2B739, 0x2B73A), 0x2EBF0, 0x2EE5D, 0x30000, 0x3134A, 0x31350, 0x323AF,
    (0x088F, 0x0890), 0x0C5C, 0x0CDC, 0xA7CE, 0xA7D2, (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x11B60, 0x11B67), (0x11DB0, 0x11DE9),
    (0x16EA0, 0x16ED3), (0x18D80, 0x18DF2), (0x1E6C0, 0x1E6FF), 0x2B73F, 0x323B0, 0x33479)
# marks that have a combining class today but not in Unicode 9, whose tables the library's NFC has
CLASS_TRAPS = points(
    0x07FD, (0x0897, 0x089F), (0x08CA, 0x08D3), 0x09FE, 0x0C3C, (0x0D3B, 0x0D3C), 0x0EBA, 0x1715, (0x1ABF, 0x1ACE), (0x1DF6, 0x1DFA),
    0xA82C, (0x10D24, 0x10D27), (0x10D69, 0x10D6D), (0x10EAB, 0x10EAC), (0x10EFA, 0x10EFF), (0x10F46, 0x10F50), (0x10F82, 0x10F85),
    0x11070, 0x1133B, 0x1145E, (0x11839, 0x1183A), (0x1193D, 0x1193E), 0x11943, 0x119E0, 0x11A34, 0x11A47, 0x11A99, 0x11D42,
    (0x11D44, 0x11D45), 0x11D97, (0x16FF0, 0x16FF1), 0x1E08F, (0x1E130, 0x1E136), 0x1E2AE, (0x1E2EC, 0x1E2EF), (0x1E4EC, 0x1E4EF),
    (0x1E5EE, 0x1E5EF), (0x113CE, 0x113D0), 0x11F41, 0x11F42, 0x1612F)
# composites younger than Unicode 9, and their halves
NEW_COMPOSITES = [chr(c) + chr(d) for c, d in [
    (0x11935, 0x11930), (0x105D2, 0x0307), (0x105DA, 0x0307), (0x11382, 0x113C9), (0x11384, 0x113BB), (0x1138B, 0x113C2),
    (0x11390, 0x113C9), (0x113C2, 0x113C2), (0x113C2, 0x113B8), (0x113C2, 0x113C9), (0x1611E, 0x1611E), (0x1611E, 0x11629),
    (0x1611E, 0x1611F), (0x16121, 0x1611F), (0x16D67, 0x16D67), (0x16D63, 0x16D67), (0x16D69, 0x16D67)]]
NEW_COMPOSITES += points(0x11938, 0x105C9, 0x105E4, 0x11383, 0x11385, 0x1138E, 0x11391, (0x113C5, 0x113C8), (0x16121, 0x16128),
                         (0x16D68, 0x16D6A))
EXCLUSIONS = points((0x0958, 0x095F), 0x09DC, 0x09DD, 0x09DF, 0x0A33, 0x0A36, 0x0A59, 0x0A5E, 0x0B5C, 0x0B5D, 0x0F43, 0x0F69, 0x0F73,
                    0x0F75, 0x0F76, 0x0F78, 0x0F81, 0x2ADC, 0xFB1D, 0xFB1F, (0xFB2A, 0xFB4E), (0x1D15E, 0x1D164), (0x1D1BB, 0x1D1C0),
                    0x0340, 0x0341, 0x0343, 0x0344, 0x0374, 0x037E, 0x0387, 0x1F71, 0x1FBE, 0x1FEF, 0x1FFD, 0x2000, 0x2001, 0x2126, 0x212A,
                    0x212B, 0x2329, 0x232A, 0xF900, 0xFA10, 0xFAD9, 0x2F800, 0x2FA1D)
HANGUL = points(0x10FF, 0x1100, 0x1101, 0x1112, 0x1113, 0x115F, 0x1160, 0x1161, 0x1175, 0x1176, 0x11A7, 0x11A8, 0x11C2, 0x11C3, 0xAC00,
                0xAC01, 0xAC1B, 0xAC1C, 0xD7A3, 0xD7A4, 0xA960, 0xD7B0, 0xD7CB)
APOSTROPHES = ["'", "'", "'", "'", "’", "‘", "ʼ", "`", "＇", "´"]
SUFFIXES = ["s", "t", "re", "ve", "m", "ll", "d", "S", "T", "RE", "Re", "rE", "VE", "vE", "M", "LL", "lL", "D", "ſ", "ſt", "st", "ß", "ẞ",
            "ﬅ", "ﬆ", "r", "l", "v", "ld", "ts", "K", "İ", "ı", "sS", "ⅿ", "ｓ"]
EMOJI = ["👨‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "❤️", "🇩🇪🇫🇷", "1️⃣", "🤷‍♀️", "😀", "‍", "️", "🏿", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "☺", "🫠"]
NUMBERS = list("0123456789²³¹½¾⅛ⅧⅫↈ①⑳⒈㊿㍘〇〡一二三十万億１２３٠١٢۴५६௧௲๑༣႑៥᠓᧑０９𝟎𝟗𝟘𐄇𒐀🄀🯰፩፼Ⅲ㋿𐹠")
ASCII_PUNCTUATION = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
WORDS = ("the of and to in is it's don't I'LL WE'VE model token Hello world int return for if x i = == += -> // /* */ {} () [] ; "
         "naïve café été über straße 语言 模型 日本語 テスト 한국어 привет мир שלום مرحبا नमस्ते สวัสดี ▁ ▁▁ Ġ Ċ Ã© <0x0A> <0xE2> <0xZZ> "
         "_a a_ 1_ foo_bar http://x.y/z?q=1 C:\\x").split()

# what the specification names, and what has to be among the fixtures whatever the seed
CASES = [
    "", " ", "  ", "\n", "\r", "\t", "\n\n ", "a  b", "a  ", "  a", " a", "a ", "don't DON'T", "１２３", "é", "e\u0301", "👨‍👩‍👧‍👦", "深度学习需要大量数据",
    "\r\n\r\n x", "\tif (x) {\n\t\treturn 1;\n\t}\n", "a\u00A0b", "\u00A0a", "text<|im_end|>", "<|im_end|>", "a<|im_end|>b", "a <|im_end|> b",
    "Hello world's 123  tests\n\n  x", "a'b", "I'LL", "foo(bar)", "x = 1;\n", "\t\tif", "  \n", " \n x", "!!!\n\ny", "it\u2019s", "it'\u017F",
    "it'\u017Fs 'T 'lL 'Re 've 'M 'D", "a</s>b", "</s>a", " </s> a", "<s>", "<s>a</s>", "a<s>", "</s></s>", "</s> </s>", "[INST] hi [/INST] ho</s>",
    "<s>[INST] a[/INST] b</s>[INST] c[/INST]", "<unk>", "a<unk>b", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<think>\n\n</think>\n\n",
    "<|endoftext|>", "a<|endoftext|>b", " <|endoftext|> ", "<|endoftext", "<|endoftext|", "<|endoftext|>>", "<<|endoftext|>", "<|im_start|", "<|im_<|im_end|>",
    "<think", "<think></think><tool_call>", "▁", "▁▁", "▁a", " ▁a", "▁ a", "a▁b", "a ▁b", "\u0000", "a\u0000b", "\u0001\u007F\u0080\u009F", "\uFFFD", "\uFFFE\uFFFF",
    "\uFEFFa", "\u180Ea", "a\u200Bb", " \u200B ", "a\u2028b\u2029c", "a\u0085b", "\u0085\u0085", "\u3000あ", "\u2003\u2003a", "\u001C \u001D", " \u180E a",
    "Å Å Å", "\u212B", "A\u030A", "\u1E9B\u0323", "q\u0307\u0323", "\u0344", "\u0958", "\u0915\u093C", "\u2126\u212A", "\uF900", "\u1100\u1161\u11A8", "\uAC00\u11A8", "\uAC00\u11A7",
    "\u1100\u1161\u0301\u11A8", "\uAC01\u11A8", "\u0B47\u0300\u0B3E", "\u1100\u0300\u1161", "a\u0300\u0301\u0323\u0327", "a\u0323\u0301", "\U00011935\U00011930", "\U00011938",
    "\U000105D2\u0307", "\U00011099\U000110BA", "\U0001D15E", "a\u0315\u0897\u0300", "a\u07FD\u0301", "a\u1ABF\u0301\u0323", "\u0CC6\u0CC2\u0CD5",
    "नमस्ते दुनिया", "สวัสดีชาวโลก", "בְּרֵאשִׁית", "مُحَمَّد", "안녕하세요", "カ\u3099", "caf\u0065\u0301s", "a\u0301b 1\u0301 \u0301", "\u0301", " \u0301", "\n\u0301a",
    "😀😀", "🇩🇪", "👍🏽!", "a👍", "👍 a", "1️⃣", "𝟏𝟐𝟑", "²³½Ⅷ", "1234567890", "1,234.5e-6", "٣٤٥", "a1b2", "１a", "\U0001E5F1\U00011BF0", "\U000105C0\U00010D50", "\U00031350\U0002EBF0",
    "\U000323B0", "\uE000\U000F0000\U0010FFFD", "\U0010FFFF", "\u0378\U000E0080", "\U0001F600" * 5, "a" * 100, " " * 40, "\n" * 40, "\r\n" * 10, " \n" * 10, "ab" * 40, "é" * 30,
    "e\u0301" * 30, "a\u0301" + "\u0323\u0301" * 15, "가" * 20, "-" * 50, "0" * 50, "'s" * 10, "'ll've're", "''s", "'''", "' s", "'\ns", "\"'s\"", "x'S", "1's", "\n's", " 's",
    "<0x41>", "<0xE2><0x82><0xAC>", "a<0x0A>b", "ĠHello", "ÃĠ", "\\n\\t", "{\"a\": [1, 2]}", "https://example.org/a?b=c&d=%20", "x_y __init__ a.b", "#include <stdio.h>\n",
    "\r", "\r\r\n", "a\rb", "a\r\nb", "a \r\n b", "!\r\n", " !\n", "  !", "!  ", " \u00A0!", "\u00A0\u00A0a", "\t\u00A0\ta", "\u000B\u000Ca", "a\u000Bb", "\u2007 \u202F1", "a\n b", "a\n  b", "a \n", "\n a",
    "ﬁ ﬀ ſ ẞ ŉ ǆ", "İstanbul ıI", "ΑΣ ας", "Ⅷⅷ", "𐐀𐐨", "ᏣᏥ ꭰ", "ა Ა", "ⓐ Ⓐ", "ª º", "ʰ ˆ", "々〆〇", "ー・", "\u2E80\u2F00", "\u309A", "か\u309Aき", "\u20DD", "a\u20DDb", "\u0903a\u0903",
]


@functools.cache
def character_tables():
    """Lists: the characters of each general category; those with a combining class; those with a canonical decomposition."""
    categories, marks, composites = defaultdict(list), list(CLASS_TRAPS), []
    for char in map(chr, (*range(0xD800), *range(0xE000, 0x110000))):
        categories[unicodedata.category(char)[0]].append(char)
        if unicodedata.combining(char):
            marks.append(char)
        decomposition = unicodedata.decomposition(char)
        if decomposition and decomposition[0] != "<":
            composites.append(char)
    return list(categories.values()), marks, composites


class Strings:
    """Random strings, mixtures of all of the above, for one tokenizer; the same seed gives the same strings."""

    def __init__(self, seed, tokenizer, sample):
        self.rng = random.Random(seed)
        self.sample = sample
        self.added = [token.content for token in tokenizer.get_added_tokens_decoder().values()] or ["<none>"]
        self.tokens = [text for text in (tokenizer.decode([id], skip_special_tokens=False)
                                         for id in range(tokenizer.get_vocab_size())) if text and "\uFFFD" not in text]
        self.categories, self.marks, self.composites = character_tables()
        self.pieces = [  # (weight, a function that makes a piece)
            (14, self.spaces), (8, self.newlines), (10, self.contraction), (10, self.word), (8, self.slice_of_sample), (8, self.token),
            (6, self.letters), (6, self.numbers), (6, self.punctuation), (8, self.combining), (6, self.composite), (3, self.hangul),
            (6, self.of_category), (6, self.new_point), (3, self.any_point), (3, self.edge), (3, self.emoji), (3, self.control),
            (8, self.added_token), (4, self.broken_added_token), (2, self.case), (2, self.almost_space)]
        self.weights = [weight for weight, make in self.pieces]
        self.makers = [make for weight, make in self.pieces]

    def some(self, pool, most):
        return "".join(self.rng.choices(pool, k=self.rng.randint(1, most)))

    def spaces(self):
        return self.rng.choice([" ", " ", " " * self.rng.randint(1, 6), self.some(SPACES, 4), self.some(" \t\n", 5)])

    def newlines(self): return self.some(["\n", "\r", "\r\n", " ", "\n\n", "\t", "\u0085", "\u2028"], 5)
    def contraction(self): return self.rng.choice(APOSTROPHES) + self.rng.choice(SUFFIXES)
    def word(self): return self.rng.choice(WORDS)
    def token(self): return self.rng.choice(self.tokens)
    def letters(self): return self.some("abcdefghijklmnopqrstuvwxyzABCSTDLMRV", 6)
    def numbers(self): return self.some(NUMBERS, 5)
    def punctuation(self): return self.some(ASCII_PUNCTUATION, 4)
    def hangul(self): return self.some(HANGUL + [chr(self.rng.randint(0xAC00, 0xD7A3))], 5)
    def of_category(self): return self.some(self.rng.choice(self.categories), 3)
    def new_point(self): return self.some(NEW_POINTS, 3)
    def edge(self): return self.some(PLANE_ENDS, 2)
    def emoji(self): return self.some(EMOJI, 3)
    def control(self): return self.some(CONTROLS, 3)
    def case(self): return self.rng.choice(CASES)
    def almost_space(self): return self.some(ALMOST_SPACES, 3)
    def added_token(self): return self.rng.choice(["", "", " ", "\n"]) + self.rng.choice(self.added) + self.rng.choice(["", "", " "])

    def slice_of_sample(self):
        begin = self.rng.randrange(len(self.sample))
        return self.sample[begin:begin + self.rng.randint(1, 30)]

    def any_point(self):
        top = self.rng.choice([0x300, 0x3000, 0x10000, 0x20000, 0x110000])
        out = ""
        for _ in range(self.rng.randint(1, 4)):
            c = self.rng.randrange(top)
            out += "\uFFFD" if 0xD800 <= c < 0xE000 else chr(c)
        return out

    def combining(self):
        """a base and marks of many classes in any order"""
        base = self.rng.choice(["a", "o", "A", " ", "1", "", "\u00E9", "\u0928", "\u05D0", self.rng.choice(self.composites)])
        return base + self.some(self.rng.choice([self.marks, CLASS_TRAPS, "\u0301\u0300\u0323\u0327\u0308\u0304\u0338\u0345"]), 5)

    def composite(self):
        """a character with a canonical decomposition: as it is, decomposed, with something in between"""
        char = self.rng.choice([self.rng.choice(self.composites), self.rng.choice(EXCLUSIONS), self.rng.choice(NEW_COMPOSITES)])
        parts = list(unicodedata.normalize("NFD", char))
        if self.rng.random() < 0.3:
            parts.insert(self.rng.randint(0, len(parts)), self.rng.choice(self.marks + ["\u0301"] * 99))
        if self.rng.random() < 0.3:
            self.rng.shuffle(parts)
        return self.rng.choice([char, "".join(parts), "".join(parts) + self.rng.choice(self.marks)])

    def broken_added_token(self):
        content = self.rng.choice(self.added)
        where = self.rng.randrange(len(content) + 1)
        return self.rng.choice([
            content[:where], content[where:], content[:where] + self.rng.choice(["", " ", "x", "\u0301", "<"]) + content[where:],
            content[:where] + content, content.swapcase(), content + content[:where], unicodedata.normalize("NFD", content),
            unicodedata.normalize("NFC", content), self.rng.choice("a_1é.") + content, content + self.rng.choice("a_1é.\u0301")])

    def string(self):
        kind = self.rng.random()
        n = self.rng.choice([1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 14, 20])
        if kind < 0.15:  # only two kinds of pieces
            makers = self.rng.choices(self.makers, self.weights, k=2)
            text = "".join(self.rng.choice(makers)() for _ in range(n))
        else:
            text = "".join(make() for make in self.rng.choices(self.makers, self.weights, k=n))
        if kind > 0.99:  # a run
            text = text[:self.rng.randint(1, 4)] * self.rng.randint(2, 300)
        if self.rng.random() < 0.05:
            text = unicodedata.normalize(self.rng.choice(["NFD", "NFC"]), text)
        return text

    def id_sequence(self, texts_ids, n_ids):
        """ids as nothing would encode them: halves of characters, byte tokens in any order"""
        out = []
        for _ in range(self.rng.randint(1, 4)):
            how = self.rng.random()
            if how < 0.5 and texts_ids:
                ids = self.rng.choice(texts_ids)
                begin = self.rng.randrange(len(ids) + 1)
                out += ids[begin:begin + self.rng.randint(1, 12)]
            elif how < 0.75:
                out += [self.rng.randrange(n_ids) for _ in range(self.rng.randint(1, 6))]
            else:  # single bytes, in byte-level and byte-fallback vocabularies
                out += [self.rng.randrange(min(n_ids, 270)) for _ in range(self.rng.randint(1, 8))]
        if self.rng.random() < 0.2:
            self.rng.shuffle(out)
        return out


# ---- the C side ----

def build_wrapper(headers, flags, folder):
    """Compiles dev/ref/tokenizer_shared.c against the headers of a tree, and loads it."""
    path = os.path.join(folder, "tokenizer_shared.so")
    with open(os.path.join(headers, "Makefile"), encoding="utf-8") as file:
        libraries = re.search(r"^LIBS *=(.*)$", file.read(), re.MULTILINE).group(1)
    command = [os.environ.get("CC", "cc"), "-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g", "-fopenmp", "-fPIC", "-shared", *shlex.split(flags),
               "-I" + headers, os.path.join(ROOT, "dev", "ref", "tokenizer_shared.c"), "-o", path, *libraries.split()]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        print(run.stderr)
        raise SystemExit("check_tokenizer.py: the C tokenizer does not compile: " + shlex.join(command))
    library = ctypes.CDLL(path)
    library.shared_open.restype = library.shared_decode.restype = ctypes.c_void_p
    library.shared_open.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    library.shared_encode.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(ctypes.POINTER(ctypes.c_int))]
    library.shared_decode.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int,
                                      ctypes.POINTER(ctypes.c_size_t)]
    library.shared_close.argtypes = library.shared_free.argtypes = [ctypes.c_void_p]
    return library


class Refused(Exception):
    """The C side does not accept a tokenizer.json; its reason."""


class CTokenizer:
    def __init__(self, library, text):
        reason = ctypes.create_string_buffer(1000)
        self.library = library
        self.t = library.shared_open(text, len(text), reason, len(reason))
        if not self.t:
            raise Refused(reason.value.decode(errors="replace"))

    def encode(self, text):
        """The ids of a string or of bytes."""
        text = text if isinstance(text, bytes) else text.encode()
        ids = ctypes.POINTER(ctypes.c_int)()
        n = self.library.shared_encode(self.t, text, len(text), ctypes.byref(ids))
        out = ids[:n] if n > 0 else []
        self.library.shared_free(ids)
        return out

    def decode(self, ids, skip_special):
        """Bytes, for they need not be UTF-8 if the C side is wrong."""
        n_bytes = ctypes.c_size_t()
        p = self.library.shared_decode(self.t, (ctypes.c_int * len(ids))(*ids), len(ids), skip_special, ctypes.byref(n_bytes))
        out = ctypes.string_at(p, n_bytes.value)
        self.library.shared_free(p)
        return out


# ---- variants: what other tokenizer.json files hold ----

def added(content, **flags):
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False, **flags}


AWKWARD_ADDED = [
    added("<left>", lstrip=True), added("<right>", rstrip=True, special=True), added("<both>", lstrip=True, rstrip=True),
    added("word", single_word=True), added("Wort", single_word=True, normalized=True), added("w w", single_word=True, lstrip=True),
    added("<|im"), added("<|im_start|>system"), added("<|im_start|>\n", rstrip=True), added("<le"), added("<left><right>"),
    added("\u00E9", normalized=True), added("e\u0301x", normalized=True), added("e\u0301y"), added("\u212B", normalized=True, special=True),
    added("\u00E8"), added(" spaced "), added("\n\n"), added("\t", lstrip=True), added("日本", single_word=True), added("'s"), added("12", normalized=True),
    added("▁▁the", normalized=True), added(" of", normalized=True), added("the", normalized=True), added("▁a▁"), added("a b", normalized=True),
    added("_x_", single_word=True, rstrip=True), added("\u0301"), added("Ġ"), added("🇩🇪", rstrip=True, normalized=True), added("<0x41>x"), added("."),
    added(" ", single_word=True), added("\u1100\u1161", normalized=True), added("ab\u0000c"), added("aa"), added("aaa", normalized=True)]


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
    """Byte-level, every two bytes have a merge, in a random order of ranks: nearly every wrong cut of the text shows."""
    letters = [char for char, _ in sorted(file["model"]["vocab"].items(), key=lambda entry: entry[1]) if len(char) == 1]
    pairs = [(a, b) for a in letters for b in letters]
    random.Random(0).shuffle(pairs)
    vocab = {token: id for id, token in enumerate(letters + [a + b for a, b in pairs])}
    added = [{**token, "id": len(vocab) + i} for i, token in enumerate(file["added_tokens"])]
    return changed(file, model={**file["model"], "vocab": vocab, "merges": [f"{a} {b}" for a, b in pairs]}, added_tokens=added)


def without_bytes(file, fuse):
    """no byte fallback: <unk> for what is not in the vocabulary"""
    return model_changed(file, byte_fallback=False, fuse_unk=fuse)


def template(before, after, ids):
    steps = [{"SpecialToken": {"id": name, "type_id": 0}} for name in before] + [{"Sequence": {"id": "A", "type_id": 0}}]
    steps += [{"SpecialToken": {"id": name, "type_id": 0}} for name in after]
    return {"type": "TemplateProcessing", "single": steps, "pair": steps + [{"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {name: {"id": name, "ids": ids[name], "tokens": [name] * len(ids[name])} for name in before + after}}


def regex_of(file, regex):
    file = copy.deepcopy(file)
    file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = regex
    return file


def metaspace(file, scheme):
    file = copy.deepcopy(file)
    file["pre_tokenizer"]["prepend_scheme"] = scheme
    return file


def variants(files):
    """Pairs (name, content of a tokenizer.json) from those of the six styles."""
    gpt2, qwen2, qwen35 = files["gpt2"], files["qwen2"], files["qwen3.5"]
    v01, v03 = files["mistral-v0.1"], files["mistral-v0.3"]
    sample = Sample.text
    ids = {token["content"]: token["id"] for token in qwen2["added_tokens"]}
    level = gpt2["decoder"]
    cl100k = training.QWEN2_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|")
    return [*files.items()] + [
        *[(f"{style}, all pairs", with_all_pairs(files[style])) for style in STYLES[:4]],
        ("gpt2, added tokens", with_added(gpt2)),
        ("gpt2, merges as pairs", with_pairs(gpt2)),
        ("gpt2, no regex", changed(gpt2, pre_tokenizer={**gpt2["pre_tokenizer"], "use_regex": False})),
        ("gpt2, no decoder", changed(gpt2, decoder=None)),
        ("gpt2, 280 tokens", training.train([sample], "gpt2", 280)),
        ("gpt2-prefix, added tokens", with_added(files["gpt2-prefix"])),
        ("qwen2, added tokens", with_added(qwen2)),
        ("qwen2, merges as pairs", with_pairs(qwen2)),
        ("qwen2, ignore_merges", with_whole_words(qwen2, "Ġbackward Ġtokenizer softmax ĠĠ ĠMAX ä¸Ģ ÃĹ Ġ123 <0x41> Ċ ĊĊ".split())),
        ("qwen2, 290 tokens", training.train([sample], "qwen2", 290)),
        ("qwen2, 2000 tokens", training.train([sample], "qwen2", 2000)),
        ("qwen2, template", changed(qwen2, post_processor={"type": "Sequence", "processors": [
            level, template(["<|im_start|>"], ["<|im_end|>", "<|endoftext|>"],
                            {"<|im_start|>": [ids["<|im_start|>"]], "<|im_end|>": [ids["<|im_end|>"], ids["<think>"]],
                             "<|endoftext|>": [ids["<|endoftext|>"]]})]})),
        ("qwen2, no normaliser", changed(qwen2, normalizer=None)),
        ("qwen2, NFC in a Sequence", changed(qwen2, normalizer={"type": "Sequence", "normalizers": [
            {"type": "NFC"}, {"type": "Replace", "pattern": {"String": "''"}, "content": "\""},
            {"type": "Replace", "pattern": {"String": "\u0301"}, "content": ""}]})),
        ("qwen2, numbers of 1 to 3", regex_of(with_all_pairs(qwen2), cl100k)),
        ("qwen2, another regex", regex_of(with_all_pairs(qwen2), r"\p{Lu}?\p{Ll}+|\p{N}{2}|\s*\n|[^\S\n]+(?=\S)|[\p{P}\p{S}]+")),
        ("qwen3.5, added tokens", with_added(qwen35)),
        ("qwen3.5, merges as pairs", with_pairs(qwen35)),
        ("mistral-v0.1, added tokens", with_added(v01)),
        ("mistral-v0.1, merges as pairs", with_pairs(v01)),
        ("mistral-v0.1, unk fused", without_bytes(v01, True)),
        ("mistral-v0.1, unk not fused", without_bytes(v01, False)),
        ("mistral-v0.1, no decoder", changed(v01, decoder=None)),
        ("mistral-v0.1, ignore_merges", with_whole_words(v01, ["▁the▁model", "▁a▁b", "é", "▁é", "▁1"])),
        ("mistral-v0.1, ends with </s>", changed(v01, post_processor=template(["<s>"], ["</s>"], {"<s>": [1], "</s>": [2]}))),
        ("mistral-v0.3, added tokens", with_added(v03)),
        ("mistral-v0.3, always", metaspace(v03, "always")),
        ("mistral-v0.3, never", metaspace(v03, "never")),
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

    files = [
        ("dropout", model_changed(qwen2, dropout=0.1)), ("WordPiece", model_changed(qwen2, type="WordPiece")),
        ("Unigram", model_changed(qwen2, type="Unigram")), ("subword prefix", model_changed(qwen2, continuing_subword_prefix="##")),
        ("word suffix", model_changed(qwen2, end_of_word_suffix="</w>")), ("Lowercase", changed(qwen2, normalizer={"type": "Lowercase"})),
        ("unknown normaliser", changed(qwen2, normalizer={"type": "Nonsense"})),
        ("unknown pre-tokenizer", changed(qwen2, pre_tokenizer={"type": "Nonsense"})),
        ("unknown decoder", changed(qwen2, decoder={"type": "Nonsense"})),
        ("unknown post-processor", changed(qwen2, post_processor={"type": "Nonsense"})),
        ("merge of what is not there", model_changed(qwen2, merges=["a nonsense"])),
        ("merge that makes what is not there", model_changed(qwen2, merges=["Ġ Ġ", "Ġ ÿ"])),
        ("merge of one", model_changed(qwen2, merges=["ab"])), ("merge of three", model_changed(qwen2, merges=[["a", "b", "c"]])),
        ("a byte is missing", without(qwen2, "Ġ")), ("a byte token is missing", without(v01, "<0x41>")),
        ("gap in the ids", gap(qwen2)), ("no vocabulary", changed(qwen2, model={"type": "BPE", "merges": []})),
        ("no model", changed(qwen2, model=None)), ("bad regex", regex_of(qwen2, "(")), ("a list", []), ("a number", 7)]
    files = [(name, json.dumps(content).encode()) for name, content in files]
    whole = json.dumps(qwen2).encode()
    return files + [("empty", b""), ("cut", whole[:-2]), ("cut in half", whole[:len(whole) // 2]), ("not JSON", b"\x00" * 64)]


# ---- comparing ----

class Sample:
    text = ""


Difference = namedtuple("Difference", "what input theirs ours")


class Pair:
    """The library's and our tokenizer of one file."""

    def __init__(self, library, text):
        self.theirs = Tokenizer.from_str(text.decode())
        self.ours = CTokenizer(library, text)
        self.n_ids = self.theirs.get_vocab_size()

    def their_ids(self, text):
        """None where the library itself panics: white space claimed by an rstrip and an lstrip token, or by two."""
        try:
            return self.theirs.encode(text).ids
        except BaseException as error:  # a panic is not an Exception
            if "PanicException" not in type(error).__name__:
                raise
            return None

    def their_batch(self, texts):
        try:
            return [encoding.ids for encoding in self.theirs.encode_batch_fast(texts)]
        except BaseException as error:
            if "PanicException" not in type(error).__name__:
                raise
            return [self.their_ids(text) for text in texts]

    def encoded(self, text):
        """Both; equal where there is no truth."""
        theirs, ours = self.their_ids(text), self.ours.encode(text)
        return (ours if theirs is None else theirs), ours

    def decoded(self, ids, skip):
        return self.theirs.decode(ids, skip_special_tokens=bool(skip)).encode(), self.ours.decode(ids, skip)


def shrink(items, differs):
    """The shortest part of a list that still differs, then with simpler items; a list of characters or ids."""
    tries, size = 0, max(1, len(items) // 2)
    while size and tries < SHRINK_TRIES:
        begin, smaller = 0, False
        while begin < len(items) and tries < SHRINK_TRIES:
            tries += 1
            shorter = items[:begin] + items[begin + size:]
            if differs(shorter):
                items, smaller = shorter, True
            else:
                begin += size
        if size > 1 or not smaller:
            size = size // 2
    for i in range(len(items)):
        for simple in ("a", " ") if items and isinstance(items[0], str) else ():
            if items[i] not in "a " and differs(items[:i] + [simple] + items[i + 1:]):
                items = items[:i] + [simple] + items[i + 1:]
    return items


def shown_text(text):
    """ASCII only, long ones cut"""
    text = ascii(text)
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-100:]} ({len(text)} characters)"


def named(tokenizer, ids):
    ids = list(ids)
    words = [f"{id}={ascii(tokenizer.id_to_token(id))}" for id in ids[:30]]
    return " ".join(words) + (f" ... ({len(ids)} ids)" if len(ids) > 30 else "") or "(none)"


def encode_difference(pair, text):
    def differs(chars):
        theirs, ours = pair.encoded("".join(chars))
        return theirs != ours

    text = "".join(shrink(list(text), differs))
    theirs, ours = pair.encoded(text)
    return Difference("encode", shown_text(text), named(pair.theirs, theirs), named(pair.theirs, ours))


def decode_difference(pair, ids, skip):
    def differs(some):
        theirs, ours = pair.decoded(some, skip)
        return theirs != ours

    ids = shrink(list(ids), differs)
    theirs, ours = pair.decoded(ids, skip)
    return Difference(f"decode, special tokens {'skipped' if skip else 'kept'}", named(pair.theirs, ids), repr(theirs), repr(ours))


class Note:
    """Shared memory that says which string a process is at, for whoever finds it dead."""

    SIZE = 1 << 16

    def __init__(self):
        self.memory = mmap.mmap(-1, self.SIZE)

    def write(self, what, value):
        text = (what + " " + (shown_text(value) if isinstance(value, (str, bytes)) else str(value)[:2000])).encode()[:self.SIZE - 8]
        self.memory[:8] = len(text).to_bytes(8, "little")
        self.memory[8:8 + len(text)] = text

    def read(self):
        return self.memory[8:8 + int.from_bytes(self.memory[:8], "little")].decode(errors="replace")


def long_strings():
    """What takes for ever with a quadratic algorithm."""
    return ["a" * 100000, " " * 100000, "\n" * 100000, "😀" * 20000, "a" + "\u0301" * 20000, "a" + "\u0301\u0323" * 10000, "e\u0301" * 20000,
            "ab " * 30000, "\u1100\u1161\u11A8" * 10000, "é日 " * 10000, "<|im_end|>" * 3000, "<|im_end" * 5000, "\x00" * 20000, "!" * 50000 + "\n" * 9,
            "1" * 50000, "'" * 20000, " \n" * 20000, "▁" * 20000]


class Comparison:
    """Counts of one tokenizer, and the first differences of each kind."""

    def __init__(self, pair, note):
        self.pair, self.note = pair, note
        self.n_strings = self.n_without_truth = self.n_differ = 0
        self.differences = []
        self.n_kind = defaultdict(int)

    def differ(self, kind, make):
        self.n_kind[kind] += 1
        if self.n_kind[kind] <= 10 * SHOWN and sum(d.what.startswith(kind) for d in self.differences) < SHOWN:
            difference = make()
            if difference not in self.differences:
                self.differences.append(difference)

    def strings(self, texts):
        """Compares ids; then both decodings of them. Returns the ids."""
        all_ids = self.pair.their_batch(texts)
        for text, ids in zip(texts, all_ids):
            self.note.write("encode", text)
            ours = self.pair.ours.encode(text)
            if ids is None:
                self.n_without_truth += 1
                continue
            self.n_strings += 1
            if ours != ids:
                self.n_differ += 1
                self.differ("encode", lambda: encode_difference(self.pair, text))
        all_ids = [ids for ids in all_ids if ids is not None]
        self.sequences(all_ids)
        return all_ids

    def sequences(self, all_ids):
        for skip in (0, 1):
            decoded = self.pair.theirs.decode_batch(all_ids, skip_special_tokens=bool(skip))
            for ids, theirs in zip(all_ids, decoded):
                self.note.write("decode", ids)
                if self.pair.ours.decode(ids, skip) != theirs.encode():
                    self.n_differ += 1
                    self.differ("decode", lambda: decode_difference(self.pair, ids, skip))

    def broken_bytes(self, strings, n):
        """Not UTF-8: either nothing, or as if U+FFFD stood there; above all, no crash."""
        for _ in range(n):
            text = bytearray(strings.string().encode())
            for _ in range(strings.rng.randint(1, 3)):
                text.insert(strings.rng.randint(0, len(text)), strings.rng.choice([0x80, 0xBF, 0xC0, 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0xF8, 0xFF]))
            text = bytes(text[:strings.rng.randint(1, len(text))])
            self.note.write("encode bytes", text)
            ours = self.pair.ours.encode(text)
            theirs = self.pair.their_ids(text.decode(errors="replace"))
            if ours and theirs is not None and ours != theirs:
                self.n_differ += 1
                self.differ("bytes", lambda: Difference("bytes that are not UTF-8", shown_text(text), named(self.pair.theirs, theirs),
                                                        named(self.pair.theirs, ours)))


def compare(library, name, text, options, note, out):
    """One tokenizer, in a process of its own."""
    note.write("open", name)
    try:
        pair = Pair(library, text)
    except Refused as refused:
        out.send((0, 0, [Difference("open", name, "accepts the file", f"refuses: {refused}")], 0))
        return
    comparison = Comparison(pair, note)
    strings = Strings(f"{options.seed} {name}", pair.theirs, Sample.text)
    comparison.strings(CASES)
    if name in STYLES:
        comparison.strings(long_strings())
    while comparison.n_strings + comparison.n_without_truth < options.strings:
        n = min(1000, options.strings - comparison.n_strings)
        all_ids = comparison.strings([strings.string() for _ in range(n)])
        comparison.sequences([strings.id_sequence(all_ids, pair.n_ids) for _ in range(n)])
    comparison.broken_bytes(strings, max(100, options.strings // 50))
    out.send((comparison.n_strings, comparison.n_differ, comparison.differences, comparison.n_without_truth))


def refuse(library, name, text, options, note, out):
    note.write("open", name)
    try:
        CTokenizer(library, text)
    except Refused as refused:
        reason = str(refused)
        fault = "" if reason and "\n" not in reason else "refused without a reason in one line"
        out.send((1, bool(fault), [Difference("open", name, "one line", fault)] if fault else [], 0))
        return
    out.send((1, 1, [Difference("open", name, "refuses the file", "accepts it")], 0))


# ---- running ----

Job = namedtuple("Job", "name process note out messages started")


def with_messages_to(messages, work, *arguments):
    """What is written on stderr matters only if the process dies: the library's panics would fill the screen."""
    os.dup2(messages.fileno(), 2)
    work(*arguments)


def start(context, work, library, name, text, options):
    note, (receiver, sender), messages = Note(), context.Pipe(False), tempfile.TemporaryFile()
    process = context.Process(target=with_messages_to, args=(messages, work, library, name, text, options, note, sender))
    process.start()
    sender.close()
    return Job(name, process, note, receiver, messages, time.monotonic())


def finish(job, limit):
    """(strings, differing, differences, strings without truth) of a process that ended, or that has to."""
    try:
        if job.out.poll(max(0.0, job.started + limit - time.monotonic())):
            result = job.out.recv()
            job.process.join()
            return result
        what = f"no answer in {limit} s"
        job.process.kill()
    except EOFError:
        what = "the process died"
    job.process.join()
    if job.process.exitcode != -9:
        job.messages.seek(0)
        what += f", status {job.process.exitcode}; its last words:\n" + job.messages.read()[-3000:].decode(errors="replace")
    return 0, 1, [Difference("crash", job.note.read(), "an answer", what)], 0


def run_all(work, library, tasks, options, limit):
    """Yields (name, result) of every task, two or more at a time, in order."""
    context = multiprocessing.get_context("fork")
    jobs, tasks = [], list(tasks)
    while jobs or tasks:
        while tasks and len(jobs) < (os.cpu_count() or 1):
            jobs.append(start(context, work, library, *tasks.pop(0), options))
        left = max(0.0, jobs[0].started + limit - time.monotonic())
        wait([jobs[0].out], timeout=left)
        job = jobs.pop(0)
        yield job.name, finish(job, limit)


def show(differences):
    for difference in differences:
        print(f"    {difference.what}: {difference.input}\n        expected {difference.theirs}\n        found    {difference.ours}")


# ---- fixtures ----

def fixture_path(style, suffix): return os.path.join(FIXTURES, style + suffix)


def as_bytes(content): return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def fixture_texts(style, tokenizer):
    """The cases, and random strings for the rest, short enough to be looked at."""
    strings = Strings(f"fixtures {style}", tokenizer, Sample.text)
    texts = list(dict.fromkeys(CASES))
    while len(texts) < N_FIXTURE:
        text = strings.string()
        if len(text) <= 60 and text not in texts:
            texts.append(text)
    return texts


def expected_line(tokenizer, text):
    ids = tokenizer.encode(text).ids
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    return json.dumps({"text": text, "ids": ids, "decoded": decoded}, separators=(",", ":")) + "\n"  # ASCII: nothing invisible


def write_fixtures():
    for style in STYLES:
        training.write_json(training.train([Sample.text], style, FIXTURE_VOCAB), fixture_path(style, ".json"))
        tokenizer = Tokenizer.from_file(fixture_path(style, ".json"))
        texts = fixture_texts(style, tokenizer)
        with open(fixture_path(style, ".expected.jsonl"), "w", encoding="ascii") as file:
            file.writelines(expected_line(tokenizer, text) for text in texts)
        print(f"dev/golden/tokenizers/{style}.json: {tokenizer.get_vocab_size()} tokens, {len(texts)} strings")


def fixtures_differ(style):
    """Lines of expected.jsonl that the library does not write today."""
    tokenizer = Tokenizer.from_file(fixture_path(style, ".json"))
    with open(fixture_path(style, ".expected.jsonl"), encoding="ascii") as file:
        lines = file.readlines()
    return len(lines), sum(expected_line(tokenizer, json.loads(line)["text"]) != line for line in lines)


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--strings", type=int, default=5000, metavar="N", help="strings for each tokenizer (5000)")
    parser.add_argument("--style", action="append", metavar="S", help="only tokenizers whose names begin so; may be repeated")
    parser.add_argument("--seed", type=int, default=1, metavar="K", help="other strings (1)")
    parser.add_argument("--headers", default=ROOT, metavar="DIR", help="the tree whose llmc/tokenizer.h is checked (this one)")
    parser.add_argument("--flags", default="", help="more flags for the compiler, in one argument")
    parser.add_argument("--write-fixtures", action="store_true", help="write dev/golden/tokenizers anew; nothing is checked")
    options = parser.parse_args()
    with open(os.path.join(FIXTURES, "sample.txt"), encoding="utf-8", newline="") as file:
        Sample.text = file.read()
    if options.write_fixtures:
        write_fixtures()
        return 0

    passed = failed = 0
    wanted = tuple(options.style or [""])
    for style in STYLES:
        if style.startswith(wanted):
            n, n_differ = fixtures_differ(style)
            print(f"fixtures of {style}: {n} strings, {n_differ} differ")
            passed, failed = passed + (n_differ == 0), failed + (n_differ != 0)
    files = {}
    for style in STYLES:
        with open(fixture_path(style, ".json"), encoding="utf-8") as file:
            files[style] = json.load(file)
    with tempfile.TemporaryDirectory() as folder:
        character_tables()  # before the processes part
        library = build_wrapper(os.path.abspath(options.headers), options.flags, folder)
        tasks = [(name, as_bytes(content)) for name, content in variants(files) if name.startswith(wanted)]
        for name, (n, n_differ, differences, n_panics) in run_all(compare, library, tasks, options, 60 + options.strings * 0.02):
            good = not differences and n_differ == 0
            print(f"{name}: {n} strings, {n_differ} differ" + (f" ({n_panics} more: the library panics)" if n_panics else ""), flush=True)
            show(differences)
            passed, failed = passed + good, failed + (not good)
        if not options.style:
            for name, (_, _, differences, _) in run_all(refuse, library, must_be_refused(files), options, 30):
                if differences:
                    print(f"refusal, {name}:")
                    show(differences)
                passed, failed = passed + (not differences), failed + bool(differences)
    print(f"{passed} passed, {failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
