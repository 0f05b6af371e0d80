#!/usr/bin/env python3
"""
Questions about this repository, to fine-tune a small model on: which header has what? The answers are those of the
tables in llmc/README.md. No network, nothing but the standard library beside common.py.

    python dev/data/header_questions.py --out build/questions
        train.jsonl      conversations: every fact in four wordings, but for five facts, which are asked in three
        prompts.jsonl    ten questions with their answers: five that stand in train.jsonl, then the five that do not
    python dev/data/header_questions.py --show build/questions/prompts.jsonl before.jsonl after.jsonl
        two files of answers (--generate-file) side by side, and how many are right

A row of a table is a fact if its left cell is one header and its right cell begins with the name of a thing, not a clause.
The five questions that are held out are new sentences about known facts: no model can know what it was never told.
"""
import argparse
import json
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import InputError, Parser, run  # noqa: E402  (found by the line above)

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
WORDINGS = ("Which header has {}?", "Where do I find {}?", "What is the file of {}?", "I look for {}.")
N_ASKED = 5            # prompts of each kind
MOST_CHARACTERS = 48   # of what a fact is about: answers shall fit a short row


def facts(table):
    """(what, header) of every row that names one thing, in the order of the page"""
    out = {}
    for row in re.findall(r"^\| (\[.*) \| (.*) \|$", table, re.MULTILINE):
        header = re.fullmatch(r"\[(\w+\.h)\]\([^)]*\)", row[0])
        what = re.split(r"[;:]|, ", row[1])[0]
        is_clause = re.search(r"\b(is|are|becomes?|mixes|made)\b", what) and not re.match("(what|where|how)\\b", what)
        if header and len(what) <= MOST_CHARACTERS and not is_clause and not re.match("which", what) and not re.search(r"[\[\]`?]", what):
            out.setdefault(what, header[1])
    return list(out.items())


def conversation(fact, wording):
    what, header = fact
    turns = (("user", wording.format(what)), ("assistant", header))
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})


def questions(all_facts):
    """(lines of train.jsonl, lines of prompts.jsonl)"""
    if len(all_facts) < 4 * N_ASKED:
        raise InputError(f"llmc/README.md: expected tables with at least {4 * N_ASKED} headers, found {len(all_facts)}")
    step = len(all_facts) // (2 * N_ASKED)
    asked = [all_facts[step * i] for i in range(2 * N_ASKED)]  # from every part of the page
    seen = [conversation(fact, WORDINGS[i % 4]) for i, fact in enumerate(asked[::2])]
    held_out = [conversation(fact, WORDINGS[i % 4]) for i, fact in enumerate(asked[1::2])]
    lines = [conversation(fact, wording) for wording in WORDINGS for fact in all_facts]
    return [line for line in lines if line not in held_out], seen + held_out


def write_lines(path, lines):
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
    os.rename(path + ".tmp", path)


def read_lines(path):
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except ValueError as error:
        raise InputError(f"{path}: expected a JSON object in each line: {error}") from None


def in_one_line(answer, width):
    text = " ".join(answer.split()) or "(blanks)"
    return (text if len(text) <= width else text[:width - 3] + "...").ljust(width)


def show(prompts_path, before_path, after_path):
    prompts, before, after = map(read_lines, (prompts_path, before_path, after_path))
    if not len(prompts) == len(before) == len(after):
        raise InputError(f"{before_path} and {after_path}: expected {len(prompts)} answers each, found {len(before)} and {len(after)}")
    for first, title in ((0, "questions that it was trained on"), (N_ASKED, "questions that it has never seen")):
        part = range(first, min(first + N_ASKED, len(prompts)))
        right = sum(after[i]["answer"] == prompts[i]["messages"][1]["content"] for i in part)
        print(f"\n{title.ljust(62)} {'before'.ljust(20)} after: {right} of {len(part)} right")
        for i in part:
            asked, answer = (prompts[i]["messages"][k]["content"] for k in (0, 1))
            wrong = "" if after[i]["answer"] == answer else f"  (it is {answer})"
            print(f"{in_one_line(asked, 62)} {in_one_line(before[i]['answer'], 20)} {in_one_line(after[i]['answer'], 20)}{wrong}".rstrip())


def main(arguments):
    parser = Parser(description=__doc__.strip(), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="data/header_questions", metavar="DIR", help="folder of the result (default data/header_questions)")
    parser.add_argument("--show", nargs=3, metavar=("PROMPTS", "BEFORE", "AFTER"), help="compare two files of answers")
    arguments = parser.parse_args(arguments)
    if arguments.show:
        show(*arguments.show)
        return
    with open(os.path.join(ROOT, "llmc", "README.md"), encoding="utf-8") as file:
        train, prompts = questions(facts(file.read()))
    os.makedirs(arguments.out, exist_ok=True)
    write_lines(os.path.join(arguments.out, "train.jsonl"), train)
    write_lines(os.path.join(arguments.out, "prompts.jsonl"), prompts)
    print(f"{arguments.out}: {len(train)} questions to learn, {len(prompts)} to ask")


if __name__ == "__main__":
    run("header_questions", main)
