#!/usr/bin/env python3
"""
The tables of doc/plan.md against the plans that the trainers print:    check_plans.py FOLDER

FOLDER has the trainers as built for GPUs in bf16 (build/nvcc-sm_90-bf16); planning needs no GPU. A table's command is the
indented one before it; a row changes it by what stands in its first cells: cards, `--options`, what learns. Of each row memory
and times are compared as the page rounds them. A line for each row, then "N passed, N failed".
"""
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "doc", "plan.md")
GIB = {"KiB": 2.0 ** -20, "MiB": 2.0 ** -10, "GiB": 1.0, "TiB": 1024.0}
LINES = {"memory": "memory", "products": "products", "wait": "stages wait", "gradients": "gradients",
         "streams": "streams", "rows": "rows of experts", "keys and values": "keys and values",
         "parts of matrices": "parts of matrices", "an update": "an update", "tokens/s of a card": "tokens a second"}


def tables(text):
    """(heading, command, header cells, rows) of each table behind a command with --plan"""
    heading, command, found = "", None, []
    lines = text.split("\n")
    i = 0
    while i < len(lines):
        if lines[i].startswith("## "):
            heading = lines[i][3:]
        if re.match(r" {4}\./train_.*--plan-card", lines[i]):
            command = lines[i].strip()
            while command.endswith("\\"):
                i += 1
                command = command[:-1] + lines[i].strip()
        if command and lines[i].startswith("| ") and lines[i + 1].startswith("|---") and "memory" in lines[i]:
            header, rows = cells(lines[i]), []
            i += 2
            while i < len(lines) and lines[i].startswith("|"):
                rows.append(cells(lines[i]))
                i += 1
            found.append((heading, command, header, rows))
        i += 1
    return found


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def options_of(heading, command, header, row, learns):
    """the words of the plan of a row; learns "all": without the command's adapter"""
    words = command.split()
    head, said = header[:header.index("memory")], " ".join(row[:header.index("memory")])
    options = {words[i]: words[i + 1] for i in range(1, len(words), 2)}
    cards = {"cards": r"^(\d+)", "model, cards": r", (\d+)$"}.get(head[0])
    n = int(re.search(cards, row[0]).group(1)) if cards else int(options["--plan"])
    if head[0] == "rows of":
        options["--seq-len"] = row[0]
        more = re.search(r"(\d+) cards", row[1])
        n = int(more.group(1)) if more else n
    if head[0] == "row":
        options["--seq-len"] = row[0]
    if "Pro," in row[0]:
        options["--model"] = "deepseek-v4-pro"
    if learns == "all":
        options.pop("--lora-rank", None)
        options["--zero"] = "2"
    if head[0] != "cards" or "pp" not in header[1]:
        for grid in ("--ep", "--pp"):
            options.pop(grid, None)
    if heading.startswith("Qwen3.6"):
        options["--ep"] = str(min(n, 8))
    columns = [h for h in head if h.startswith("`--")]
    for h in columns:  # "`--pp`, `--recompute`": numbers alone
        for name, value in zip(re.findall(r"--[a-z-]+", h), re.findall(r"\d+", row[head.index(h)])):
            options[name] = value
    for name, value in re.findall(r"(--[a-z-]+) (\d+)", said):
        options[name] = value
    recompute = re.search(r", ([0-3])$", row[1])
    if head[0] == "row" and recompute:
        options["--recompute"] = recompute.group(1)
    rows_at_once = int((re.search(r"of (\d+) rows", said) or [0, 1])[1])
    options["--batch-size"] = str(rows_at_once)
    if head[0] == "rows of":  # 262,144 positions an update
        options["--grad-accum"] = str(262144 // int(row[0]))
    else:
        per_update = int(options["--grad-accum"]) // int(dict(zip(words[1::2], words[2::2]))["--plan"])
        options["--grad-accum"] = str(per_update * n // rows_at_once)
    options["--plan"] = str(n)
    return [words[0]] + [word for pair in options.items() for word in pair]


def planned(folder, words):
    """{label: text} of the boxes"""
    program = subprocess.Popen(["stdbuf", "-oL", os.path.join(folder, words[0][2:])] + words[1:], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    box, label = {}, ""
    for line in program.stdout:
        m = re.match(r"\| (.{21}) \| (.*?) *\|$", line.rstrip("\n"))
        if not m:
            continue
        if m.group(1).strip():
            label = m.group(1).strip()
            box[label] = m.group(2)
        else:
            box[label] += " " + m.group(2)
        if label == "tokens a second":  # what follows where it does not fit are remedies, seconds of work
            program.kill()
            return box, ""
    return box, (program.stderr.read().strip().split("\n") or [""])[-1]



def numbers(text):
    """[(value, unit, least digit)] of a cell or of a line; commas in numbers belong to them"""
    found = []
    for number, unit in re.findall(r"(\d+(?:,\d{3})*(?:\.\d+)?) ?(KiB|MiB|GiB|TiB|s\b|k\b)", text):
        plain = number.replace(",", "")
        digit = 10.0 ** -len(plain.partition(".")[2])
        scale = GIB.get(unit, 1.0)
        found.append((float(plain) * scale, "GiB" if unit in GIB else unit, digit * scale))
    return found


def differs(name, cell, line):
    """what of a cell the plan does not say, or None"""
    have = numbers(line)
    if name == "tokens/s of a card":  # "13.1k, 817 with each card"
        of_card = re.search(r"([\d.]+)(k?) with each card", line)
        have = [(float(of_card[1]) / (1.0 if of_card[2] else 1000.0), "k", 0.001)] if of_card else []
    for value, unit, digit in numbers(cell):
        if not any(u == unit and abs(v - value) <= digit + d for v, u, d in have):
            return f"{name}: the page has {cell!r}, the plan {line!r}"
    if name == "memory" and ("does not fit" in cell) != ("not fit" in line):
        return f"memory: the page has {cell!r}, the plan {line!r}"
    return None


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    n_good = n_bad = 0
    with open(PAGE, encoding="utf-8") as file:
        text = file.read()
    for heading, command, header, rows in tables(text):
        learns = ""
        for row in rows:
            said = " ".join(row[:2])
            learns = "all" if row[1].startswith("all") else "" if row[1].startswith("an adapter") else learns  # "the same"
            if "131072" in said or "1, 2, 4" in row[0]:  # of a config.json of its own; three plans in a row
                continue
            words = options_of(heading, command, header, row, learns)
            box, error = planned(sys.argv[1], words)
            wrong = [d for name, cell in zip(header, row) if name in LINES
                     for d in [differs(name, cell, box.get(LINES[name], ""))] if d] if box else [error]
            label = f"{heading}: {row[0]}, {row[1]}"
            if wrong:
                n_bad += 1
                print(f"FAIL  {label}\n      " + "\n      ".join(wrong) + "\n      " + " ".join(words))
            else:
                n_good += 1
                print(f"ok    {label}")
    print(f"{n_good} passed, {n_bad} failed")
    return 1 if n_bad else 0


if __name__ == "__main__":
    sys.exit(main())
