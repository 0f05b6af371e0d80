"""Writes llmc/text/unicode_tables.h: what the tokenizers need to know of Unicode, as lists of ranges.
    python3.11 -m venv /tmp/v && /tmp/v/bin/pip install unicodedata2==16.0.0 regex==2024.11.6
    /tmp/v/bin/python dev/tools/unicode.py > llmc/text/unicode_tables.h
Classes (letter, number, mark, white space, word) are of Unicode 16.0, as in Hugging Face tokenizers 0.23. Its NFC is of
Unicode 9.0: decompositions never change once published, so the data of 16.0 without the characters that came after 9.0
is the same. What came after: NEWER (10.0 to 14.0), and all that Python 3.11's own tables, 14.0, do not know.
"""
import unicodedata

import regex
import unicodedata2

assert (unicodedata.unidata_version, unicodedata2.unidata_version) == ("14.0.0", "16.0.0")
NEWER = """07FD 0898-089F 08CA-08D3 09FE 0C3C 0D3B-0D3C 0EBA 1715 1ABF-1ACE 1DF6-1DFA A82C 10D24-10D27 10EAB-10EAC 10F46-10F50
10F82-10F85 11070 1133B 1145E 11839-1183A 11938 1193D-1193E 11943 119E0 11A34 11A47 11A99 11D42 11D44-11D45 11D97 16FF0-16FF1
1E130-1E136 1E2AE 1E2EC-1E2EF"""  # with a combining class or a decomposition; 1DF6-1DF9, A82C ... are of 10.0
newer = set()
for item in NEWER.split():
    ends = [int(x, 16) for x in item.split("-")]
    newer.update(range(ends[0], ends[-1] + 1))

CODES = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
CLASSES = {"L": r"\p{L}", "N": r"\p{N}", "M": r"\p{M}", "SPACE": r"\p{White_Space}",
           "WORD": r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]"}
BITS = {"L": 1, "N": 2, "M": 4, "SPACE": 8, "WORD": 16}
COMPOSES = 1 << 31


def in_nfc(c):
    return c not in newer and unicodedata.category(chr(c)) != "Cn"


def ranges(value_of):
    """(first, last, value) of all runs of code points with the same value other than 0"""
    rows = []
    for c in CODES:
        value = value_of(c)
        if value and rows and rows[-1][1] == c - 1 and rows[-1][2] == value:
            rows[-1][1] = c
        elif value:
            rows.append([c, c, value])
    return rows


def flags():
    matchers = {bit: regex.compile(CLASSES[name]) for name, bit in BITS.items()}
    return ranges(lambda c: sum(bit for bit, m in matchers.items() if m.fullmatch(chr(c))))


def decompositions():
    """(code, first, second): second is 0 for a single character, and has the bit COMPOSES where NFC goes back to code"""
    rows = []
    for c in CODES:
        parts = unicodedata2.decomposition(chr(c))
        if not parts or parts.startswith("<") or not in_nfc(c):
            continue
        parts = [int(x, 16) for x in parts.split()] + [0]
        back = parts[1] and unicodedata2.normalize("NFC", chr(parts[0]) + chr(parts[1])) == chr(c)
        rows.append([c, parts[0], parts[1] | (COMPOSES if back else 0)])
    return rows


def table(name, about, rows):
    print(f"\n// {about}\nstatic inline const UnicodeRow* {name}(int* n) {{\n    static const UnicodeRow rows[] = {{")
    line = "       "
    for row in rows:
        item = " {" + ", ".join(f"0x{x:x}" if x > 9 else str(x) for x in row) + "},"
        if len(line + item) > 118:
            print(line)
            line = "       "
        line += item
    print(f"{line}\n    }};\n    *n = {len(rows)};\n    return rows;\n}}")


print("""/*
Tables of Unicode for llmc/text/unicode.h, written by dev/tools/unicode.py from the Unicode Character Database: do not edit.
    unicode_class_ranges_    16.0: {first, last, flags}: 1 letter \\p{L}, 2 number \\p{N}, 4 mark \\p{M}, 8 white space, 16 word
    unicode_marks_           9.0: {first, last, canonical combining class}
    unicode_decompositions_  9.0: {code, first, second}: canonical; second 0: a single character; its bit 31: NFC composes
                             the two to code again. Hangul is arithmetic and not listed.
*/
#ifndef LLMC_UNICODE_TABLES_H
#define LLMC_UNICODE_TABLES_H
#include <stdint.h>

typedef struct { uint32_t a, b, c; } UnicodeRow;""")
table("unicode_class_ranges_", "by first code point", flags())
table("unicode_marks_", "by first code point", ranges(lambda c: unicodedata2.combining(chr(c)) if in_nfc(c) else 0))
table("unicode_decompositions_", "by code", decompositions())
print("#endif  // LLMC_UNICODE_TABLES_H")
