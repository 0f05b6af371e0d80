"""
Adversarial strings for dev/ref/check_tokenizer.py: characters and strings that tokenizers have been wrong about, the
cases that the specification names, and random mixtures of them all.
"""
import functools
import random
import unicodedata
from collections import defaultdict


def points(*items):
    """Characters from code points and (first, last) ranges."""
    out = []
    for item in items:
        first, last = item if isinstance(item, tuple) else (item, item)
        out += [chr(c) for c in range(first, last + 1)]
    return out


SPACES = points((0x09, 0x0D), 0x20, 0x85, 0xA0, 0x1680, (0x2000, 0x200A), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
ALMOST_SPACES = points(
    (0x1C, 0x1F), 0x180E, (0x200B, 0x200F), 0x2060, 0xFEFF, 0x00AD, 0x2422, 0x2423, 0x2581, 0x2800, 0x3164
)
CONTROLS = points(
    (0x00, 0x1F), 0x7F, (0x80, 0x9F), 0x061C, (0x202A, 0x202E), (0x2061, 0x206F), (0xFFF9, 0xFFFD), 0xFFFE, 0xFFFF
)
PLANE_ENDS = points(*[(plane + 0xFFFE, plane + 0xFFFF) for plane in range(0, 0x110000, 0x10000)], 0xFDD0, 0xFDEF,
                    0xD7FF, 0xE000, 0xF8FF, 0xF0000, 0x100000, 0x7F, 0x80, 0x7FF, 0x800, 0x10000, 0x2FF, 0x300, 0xE0001,
                    0xE0100, 0xE01EF)
# assigned in Unicode 10 to 16, so absent from some library's tables; after that 17, absent from ours
NEW_POINTS = points(
    (0x0860, 0x088E), (0x0897, 0x089F), (0x08B3, 0x08D3), 0x09FE, 0x0C3C, 0x0CF3, 0x0CDD, 0x0D04, 0x0EBA, 0x0ECE,
    0x1715, 0x171F, (0x1ABF, 0x1ACE), (0x1C89, 0x1C8A), (0x1C90, 0x1CBF), (0x1DF6, 0x1DFA), 0x2C2F, 0x2C5F, 0x2FFC,
    0x31BB, 0x31EF, 0x32FF, 0x4DBF, 0x9FFC, (0xA7B8, 0xA7CD), (0xA7D0, 0xA7DC), (0xA7F2, 0xA7F4), (0xAB66, 0xAB6B),
    (0x10570, 0x105BC), (0x105C0, 0x105F3), (0x10780, 0x107BA), (0x10A34, 0x10A35), (0x10D00, 0x10D39),
    (0x10D40, 0x10D8F), (0x10E80, 0x10EB1), (0x10EC2, 0x10EC4), (0x10EFC, 0x10F27), (0x10F30, 0x10F59),
    (0x10F70, 0x10F89), (0x10FB0, 0x10FCB), (0x11070, 0x11075), (0x11144, 0x11147), (0x11380, 0x113D5),
    (0x1145A, 0x11461), 0x116B8, (0x116D0, 0x116E3), 0x1171A, (0x11740, 0x11746), (0x11800, 0x1183B),
    (0x11900, 0x11946), (0x11950, 0x11959), (0x119A0, 0x119E4), (0x11A00, 0x11A9D), (0x11AB0, 0x11ABF),
    (0x11BC0, 0x11BF9), (0x11D60, 0x11DA9), (0x11EE0, 0x11EF8), (0x11F00, 0x11F5A), 0x11FB0, (0x11FC0, 0x11FD4),
    (0x12F90, 0x12FF2), (0x13430, 0x13480), 0x143FA, (0x16100, 0x16139), (0x16A70, 0x16AC9), (0x16D40, 0x16D79),
    (0x16E40, 0x16E96), (0x16FE2, 0x16FF1), (0x187ED, 0x187F7), (0x18AF3, 0x18D08), (0x1AFF0, 0x1AFFE),
    (0x1B11F, 0x1B122), (0x1B132, 0x1B167), (0x1CC00, 0x1CCF9), (0x1D2C0, 0x1D2F3), (0x1DF00, 0x1DF2A),
    (0x1E030, 0x1E08F), (0x1E100, 0x1E149), (0x1E290, 0x1E2F9), (0x1E4D0, 0x1E4F9), (0x1E5D0, 0x1E5FA),
    (0x1E7E0, 0x1E7FE), (0x1EC71, 0x1ECB4), (0x1F8B2, 0x1F8BB), (0x1FA70, 0x1FAE9), (0x1FBF0, 0x1FBF9),
    (0x2A6DD, 0x2A6DF), (0x2B739, 0x2B73A), 0x2EBF0, 0x2EE5D, 0x30000, 0x3134A, 0x31350, 0x323AF, (0x088F, 0x0890),
    0x0C5C, 0x0CDC, 0xA7CE, 0xA7D2, (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x11B60, 0x11B67), (0x11DB0, 0x11DE9),
    (0x16EA0, 0x16ED3), (0x18D80, 0x18DF2), (0x1E6C0, 0x1E6FF), 0x2B73F, 0x323B0, 0x33479
)
# marks that have a combining class today but not in Unicode 9, whose tables the library's NFC has
CLASS_TRAPS = points(
    0x07FD, (0x0897, 0x089F), (0x08CA, 0x08D3), 0x09FE, 0x0C3C, (0x0D3B, 0x0D3C), 0x0EBA, 0x1715, (0x1ABF, 0x1ACE),
    (0x1DF6, 0x1DFA), 0xA82C, (0x10D24, 0x10D27), (0x10D69, 0x10D6D), (0x10EAB, 0x10EAC), (0x10EFA, 0x10EFF),
    (0x10F46, 0x10F50), (0x10F82, 0x10F85), 0x11070, 0x1133B, 0x1145E, (0x11839, 0x1183A), (0x1193D, 0x1193E),
    0x11943, 0x119E0, 0x11A34, 0x11A47, 0x11A99, 0x11D42, (0x11D44, 0x11D45), 0x11D97, (0x16FF0, 0x16FF1), 0x1E08F,
    (0x1E130, 0x1E136), 0x1E2AE, (0x1E2EC, 0x1E2EF), (0x1E4EC, 0x1E4EF), (0x1E5EE, 0x1E5EF), (0x113CE, 0x113D0),
    0x11F41, 0x11F42, 0x1612F
)
NEW_POINTS_SET = frozenset(NEW_POINTS + CLASS_TRAPS)
# composites younger than Unicode 9, and their halves
NEW_PAIRS = [
    (0x11935, 0x11930), (0x105D2, 0x0307), (0x105DA, 0x0307), (0x11382, 0x113C9), (0x11384, 0x113BB),
    (0x1138B, 0x113C2), (0x11390, 0x113C9), (0x113C2, 0x113C2), (0x113C2, 0x113B8), (0x113C2, 0x113C9),
    (0x1611E, 0x1611E), (0x1611E, 0x11629), (0x1611E, 0x1611F), (0x16121, 0x1611F), (0x16D67, 0x16D67),
    (0x16D63, 0x16D67), (0x16D69, 0x16D67)
]
NEW_COMPOSITES = [chr(first) + chr(second) for first, second in NEW_PAIRS]
NEW_COMPOSITES += points(0x11938, 0x105C9, 0x105E4, 0x11383, 0x11385, 0x1138E, 0x11391, (0x113C5, 0x113C8),
                         (0x16121, 0x16128), (0x16D68, 0x16D6A))
EXCLUSIONS = points(
    (0x0958, 0x095F), 0x09DC, 0x09DD, 0x09DF, 0x0A33, 0x0A36, 0x0A59, 0x0A5E, 0x0B5C, 0x0B5D, 0x0F43, 0x0F69, 0x0F73,
    0x0F75, 0x0F76, 0x0F78, 0x0F81, 0x2ADC, 0xFB1D, 0xFB1F, (0xFB2A, 0xFB4E), (0x1D15E, 0x1D164), (0x1D1BB, 0x1D1C0),
    0x0340, 0x0341, 0x0343, 0x0344, 0x0374, 0x037E, 0x0387, 0x1F71, 0x1FBE, 0x1FEF, 0x1FFD, 0x2000, 0x2001, 0x2126,
    0x212A, 0x212B, 0x2329, 0x232A, 0xF900, 0xFA10, 0xFAD9, 0x2F800, 0x2FA1D
)
HANGUL = points(
    0x10FF, 0x1100, 0x1101, 0x1112, 0x1113, 0x115F, 0x1160, 0x1161, 0x1175, 0x1176, 0x11A7, 0x11A8, 0x11C2, 0x11C3,
    0xAC00, 0xAC01, 0xAC1B, 0xAC1C, 0xD7A3, 0xD7A4, 0xA960, 0xD7B0, 0xD7CB
)
APOSTROPHES = ["'", "'", "'", "'", "’", "‘", "ʼ", "`", "＇", "´"]
SUFFIXES = [
    "s", "t", "re", "ve", "m", "ll", "d", "S", "T", "RE", "Re", "rE", "VE", "vE", "M", "LL", "lL", "D", "ſ", "ſt",
    "st", "ß", "ẞ", "ﬅ", "ﬆ", "r", "l", "v", "ld", "ts", "\u212A", "İ", "ı", "sS", "ⅿ", "ｓ"
]
# of each kind that a regular expression may or may not take for \w, for what stands beside a single_word token
NEIGHBOURS = "a_1é.\u0301\u200D\u200CⅧ²ⓐ‿٣日\u00AA\u00B7\u0345\u20DD\u093E\u0E33\uFE0F\u2040\uFF3F\u203F-"
EMOJI = ["👨‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "❤️", "🇩🇪🇫🇷", "1️⃣", "🤷‍♀️", "😀", "\u200D", "\uFE0F", "🏿", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "☺", "🫠"]
NUMBERS = list("0123456789²³¹½¾⅛ⅧⅫↈ①⑳⒈㊿㍘〇〡一二三十万億１２３٠١٢۴५६௧௲๑༣႑៥᠓᧑０９𝟎𝟗𝟘𐄇𒐀🄀🯰፩፼Ⅲ㋿𐹠")
ASCII_PUNCTUATION = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
WORDS = (
    "the of and to in is it's don't I'LL WE'VE model token Hello world int return for if x i = == += -> // /* */ {} () "
    "[] ; naïve café été über straße 语言 模型 日本語 テスト 한국어 привет мир שלום مرحبا नमस्ते สวัสดี ▁ ▁▁ Ġ Ċ Ã© <0x0A> <0xE2> "
    "<0xZZ> _a a_ 1_ foo_bar http://x.y/z?q=1 C:\\x").split()

# what the specification names, and what has to be among the fixtures whatever the seed
CASES = [
    "", " ", "  ", "\n", "\r", "\t", "\n\n ", "a  b", "a  ", "  a", " a", "a ", "don't DON'T", "１２３", "é", "e\u0301",
    "👨‍👩‍👧‍👦", "深度学习需要大量数据", "\r\n\r\n x", "\tif (x) {\n\t\treturn 1;\n\t}\n", "a\u00A0b", "\u00A0a",
    "text<|im_end|>", "<|im_end|>", "a<|im_end|>b", "a <|im_end|> b", "Hello world's 123  tests\n\n  x", "a'b",
    "I'LL", "foo(bar)", "x = 1;\n", "\t\tif", "  \n", " \n x", "!!!\n\ny", "it\u2019s", "it'\u017F",
    "it'\u017Fs 'T 'lL 'Re 've 'M 'D", "a</s>b", "</s>a", " </s> a", "<s>", "<s>a</s>", "a<s>", "</s></s>",
    "</s> </s>", "[INST] hi [/INST] ho</s>", "<s>[INST] a[/INST] b</s>[INST] c[/INST]", "<unk>", "a<unk>b",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<think>\n\n</think>\n\n", "<|endoftext|>",
    "a<|endoftext|>b", " <|endoftext|> ", "<|endoftext", "<|endoftext|", "<|endoftext|>>", "<<|endoftext|>",
    "<|im_start|", "<|im_<|im_end|>", "<think", "<think></think><tool_call>", "▁", "▁▁", "▁a", " ▁a", "▁ a", "a▁b",
    "a ▁b", "\u0000", "a\u0000b", "\u0001\u007F\u0080\u009F", "\uFFFD", "\uFFFE\uFFFF", "\uFEFFa", "\u180Ea",
    "a\u200Bb", " \u200B ", "a\u2028b\u2029c", "a\u0085b", "\u0085\u0085", "\u3000あ", "\u2003\u2003a",
    "\u001C \u001D", " \u180E a", "Å Å Å", "\u212B", "A\u030A", "\u1E9B\u0323", "q\u0307\u0323", "\u0344", "\u0958",
    "\u0915\u093C", "\u2126\u212A", "\uF900", "\u1100\u1161\u11A8", "\uAC00\u11A8", "\uAC00\u11A7",
    "\u1100\u1161\u0301\u11A8", "\uAC01\u11A8", "\u0B47\u0300\u0B3E", "\u1100\u0300\u1161",
    "a\u0300\u0301\u0323\u0327", "a\u0323\u0301", "\U00011935\U00011930", "\U00011938", "\U000105D2\u0307",
    "\U00011099\U000110BA", "\U0001D15E", "a\u0315\u0897\u0300", "a\u07FD\u0301", "a\u1ABF\u0301\u0323",
    "\u0CC6\u0CC2\u0CD5", "नमस्ते दुनिया", "สวัสดีชาวโลก", "בְּרֵאשִׁית", "مُحَمَّد", "안녕하세요", "カ\u3099",
    "caf\u0065\u0301s", "a\u0301b 1\u0301 \u0301", "\u0301", " \u0301", "\n\u0301a", "😀😀", "🇩🇪", "👍🏽!", "a👍", "👍 a",
    "1️⃣", "𝟏𝟐𝟑", "²³½Ⅷ", "1234567890", "1,234.5e-6", "٣٤٥", "a1b2", "１a", "\U0001E5F1\U00011BF0",
    "\U000105C0\U00010D50", "\U00031350\U0002EBF0", "\U000323B0", "\uE000\U000F0000\U0010FFFD", "\U0010FFFF",
    "\u0378\U000E0080", "\U0001F600" * 5, "a" * 100, " " * 40, "\n" * 40, "\r\n" * 10, " \n" * 10, "ab" * 40,
    "é" * 30, "e\u0301" * 30, "a\u0301" + "\u0323\u0301" * 15, "가" * 20, "-" * 50, "0" * 50, "'s" * 10, "'ll've're",
    "''s", "'''", "' s", "'\ns", "\"'s\"", "x'S", "1's", "\n's", " 's", "<0x41>", "<0xE2><0x82><0xAC>", "a<0x0A>b",
    "ĠHello", "ÃĠ", "\\n\\t", "{\"a\": [1, 2]}", "https://example.org/a?b=c&d=%20", "x_y __init__ a.b",
    "#include <stdio.h>\n", "\r", "\r\r\n", "a\rb", "a\r\nb", "a \r\n b", "!\r\n", " !\n", "  !", "!  ", " \u00A0!",
    "\u00A0\u00A0a", "\t\u00A0\ta", "\u000B\u000Ca", "a\u000Bb", "\u2007 \u202F1", "a\n b", "a\n  b", "a \n", "\n a",
    "ﬁ ﬀ ſ ẞ ŉ ǆ", "İstanbul ıI", "ΑΣ ας", "Ⅷⅷ", "𐐀𐐨", "ᏣᏥ ꭰ", "ა Ა", "ⓐ Ⓐ", "ª º", "ʰ ˆ", "々〆〇", "ー・",
    "\u2E80\u2F00", "\u309A", "か\u309Aき", "\u20DD", "a\u20DDb", "\u0903a\u0903"
]


def old_points(text):
    """Without what a PCRE2 of Unicode 14 may not know: it cuts the text for regular expressions that are not ours."""
    return "".join(char for char in text
                   if char < "\u0860" or not (char in NEW_POINTS_SET or "\U0002EBF0" <= char <= "\U0002F7FF"
                                              or char >= "\U00030000" or unicodedata.category(char) == "Cn"))


@functools.cache
def character_tables():
    """Lists: characters of each general category; with a combining class; with a canonical decomposition."""
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

    def __init__(self, seed, tokenizer, sample, old_only=False):
        self.rng = random.Random(seed)
        self.old_only = old_only
        self.sample = sample
        self.added = [token.content for token in tokenizer.get_added_tokens_decoder().values()] or ["<none>"]
        self.tokens = [text for text in (tokenizer.decode([id], skip_special_tokens=False)
                                         for id in range(tokenizer.get_vocab_size())) if text and "\uFFFD" not in text]
        self.categories, self.marks, self.composites = character_tables()
        self.pieces = [  # (weight, a function that makes a piece)
            (14, self.spaces), (8, self.newlines), (10, self.contraction), (10, self.word), (8, self.slice_of_sample),
            (8, self.token), (6, self.letters), (6, self.numbers), (6, self.punctuation), (8, self.combining),
            (6, self.composite), (3, self.hangul), (6, self.of_category), (6, self.new_point), (3, self.any_point),
            (3, self.edge), (3, self.emoji), (3, self.control), (8, self.added_token), (4, self.broken_added_token),
            (2, self.case), (2, self.almost_space), (3, self.few_letters)
        ]
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
    def few_letters(self): return self.some("aaab \u00E9", 20)
    def control(self): return self.some(CONTROLS, 3)
    def case(self): return self.rng.choice(CASES)
    def almost_space(self): return self.some(ALMOST_SPACES, 3)

    def added_token(self):
        return self.rng.choice(["", "", " ", "\n"]) + self.rng.choice(self.added) + self.rng.choice(["", "", " "])

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
        base = self.rng.choice(["a", "o", "A", " ", "1", "", "\u00E9", "\u0928", "\u05D0"])
        marks = self.rng.choice([self.marks, CLASS_TRAPS, "\u0301\u0300\u0323\u0327\u0308\u0304\u0338\u0345"])
        return self.rng.choice([base, self.rng.choice(self.composites)]) + self.some(marks, 5)

    def composite(self):
        """a character with a canonical decomposition: as it is, decomposed, with something in between"""
        char = self.rng.choice(self.rng.choice([self.composites, EXCLUSIONS, NEW_COMPOSITES]))
        parts = list(unicodedata.normalize("NFD", char))
        if self.rng.random() < 0.3:
            parts.insert(self.rng.randint(0, len(parts)), self.rng.choice(self.marks + ["\u0301"] * 99))
        if self.rng.random() < 0.3:
            self.rng.shuffle(parts)
        return self.rng.choice([char, "".join(parts), "".join(parts) + self.rng.choice(self.marks)])

    def neighbour(self): return self.rng.choice([*NEIGHBOURS, self.of_category()])

    def broken_added_token(self):
        content = self.rng.choice(self.added)
        where = self.rng.randrange(len(content) + 1)
        return self.rng.choice([
            content[:where], content[where:],
            content[:where] + self.rng.choice(["", " ", "x", "\u0301", "<"]) + content[where:],
            content[:where] + content,
            content.swapcase(), content + content[:where],
            unicodedata.normalize("NFD", content),
            unicodedata.normalize("NFC", content),
            self.neighbour() + content,
            content + self.neighbour(),
            self.neighbour() + content + self.neighbour()
        ])

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
        return old_points(text) if self.old_only else text

    def id_sequence(self, texts_ids, n_ids):
        """ids below n_ids as nothing would encode them: halves of characters, byte tokens in any order"""
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


def long_strings():
    """What takes for ever with a quadratic algorithm."""
    return [
        "a" * 100000, " " * 100000, "\n" * 100000, "😀" * 20000, "a" + "\u0301" * 20000, "a" + "\u0301\u0323" * 10000,
        "e\u0301" * 20000, "ab " * 30000, "\u1100\u1161\u11A8" * 10000, "é日 " * 10000, "<|im_end|>" * 3000,
        "<|im_end" * 5000, "\x00" * 20000, "!" * 50000 + "\n" * 9, "1" * 50000, "'" * 20000, " \n" * 20000, "▁" * 20000
    ]


def strings_of_every_character(at_once=1000):
    """Lists of strings, one for each character: beside letters, numbers, spaces, marks, and a single_word token."""
    characters = [chr(c) for c in (*range(0xD800), *range(0xE000, 0x110000))]
    for begin in range(0, len(characters), at_once):
        yield [f"a{c}a {c}{c} 1{c}\n{c}!{c}'{c} word{c} {c}word {c}\u0301\u0323{c}\u0301a\u0301{c}"
               for c in characters[begin:begin + at_once]]
