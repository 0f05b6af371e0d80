"""
The page of dev/gpu_check.sh, from the files that its stages left: python3 dev/gpu_report.py RESULTS... >PAGE. Standard library.
Several folders are stages of one commit on one card, run one after the other.

machine.txt   key, value                                    build.tsv      precision, program, verdict
tests.tsv     precision, program, passed, failed, skipped, seconds, why
sanitizer.tsv tool, precision, program, verdict, detail     stages.tsv     stage, verdict, seconds
ops.tsv       program, case, ms, bytes, flops (ours alone); the shortest of the repetitions counts. "ncu CASE", kernel, and what
              Nsight Compute counted of it, by METRICS: `gpu_report.py --ncu CASE` makes these lines of its CSV. "launch", kernel,
              microseconds, in their order, of one training step: `gpu_report.py --step`
steps.tsv     program, case, ms (the median of a run; the lower of two runs counts); "loss PROGRAM", step, loss; and "text MODEL" as case:
              ms of a token that train_moe writes. Lines with # are notes: the card's clock and power, --verify-every
trainers.tsv  program, "MODEL B b T t", ms of a step, parameters, first and last loss; as notes, what fell back to slow kernels
qwen.tsv      of Qwen3-0.6B: program, "full B b T t" or "lora ..." or "write", ms (of a step, of a token); "loss TASK PROGRAM", step, loss
Fields are separated by tabs. A file that is missing is a stage that did not run, and the page says so.
"""
import csv
import os
import re
import sys

import roofline

STAGES = ["build", "tests", "sanitizer", "ops", "profile", "steps", "trainers", "qwen"]
# ncu's names, and ours
METRICS = {"Duration": "us", "Compute (SM) Throughput": "compute %", "Issue Slots Busy": "issue %", "Memory Throughput": "memory %",
           "L2 Cache Throughput": "L2 %", "DRAM Throughput": "DRAM %", "Achieved Occupancy": "occupancy %", "Registers Per Thread": "registers"}
# parameters that a token of train_moe reads, with the 257 tokens of bytes: "active" of its box, but for the embedding's other rows
TEXT_PARAMETERS = {"tiny": 250816 - 257 * 64, "small": 10567424 - 257 * 256, "6.9b": 1737841920 - 257 * 768}
FLOPS_124M = 6 * (12 * 12 * 768 * 768 + 50304 * 768)  # per token, of the matrix products; attention adds 6 L C T

# Qwen3-0.6B: a layer's matrices, of all layers; the embedding, which is the output matrix; adapters of rank 16 on all of the former
QWEN_LAYERS, QWEN_HEAD, QWEN_ADAPTERS = 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072), 151936 * 1024, 28 * 16 * 22528
QWEN_FLOPS = {"full": 6 * (QWEN_LAYERS + QWEN_HEAD), "lora": 4 * (QWEN_LAYERS + QWEN_HEAD) + 6 * QWEN_ADAPTERS}  # per token, without attention


def lines_of(folders, name):
    for folder in folders:
        try:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                yield from (line for line in file.read().splitlines() if line)
        except FileNotFoundError:
            pass


def rows(folders, name):
    """Lists of fields, of all folders; comments left out."""
    return [line.split("\t") for line in lines_of(folders, name) if not line.startswith("#")]


def comments(folders, name):
    return list(dict.fromkeys(line[1:].strip() for line in lines_of(folders, name) if line.startswith("#")))


def table(header, body, left=1):
    """Markdown; the first `left` columns are text, the rest numbers."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    lines = [header, rule] + body
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def shortest(lines):
    """{(program, case): (ms, bytes, flops)}, the line with the least ms of each."""
    best = {}
    for line in lines:
        try:
            ms, n_bytes, flops = float(line[2]), float(line[3]) if len(line) > 3 else 0.0, float(line[4]) if len(line) > 4 else 0.0
        except (IndexError, ValueError):
            continue
        if (line[0], line[1]) not in best or ms < best[line[0], line[1]][0]:
            best[line[0], line[1]] = (ms, n_bytes, flops)
    return best


def number(x, digits=3):
    return "-" if x is None else f"{x:.{digits}g}" if x < 10 ** digits else f"{x:,.0f}"


def ratio(theirs, ours):
    return f"{theirs / ours:.2f}" if theirs and ours else "-"


# ---- sections: each takes the folders and returns markdown ----

def machine(folders):
    values = {}
    for key, value in rows(folders, "machine.txt"):
        values.setdefault(key, []).append(value)
    return table(["", ""], [[key, "; ".join(dict.fromkeys(found))] for key, found in values.items() if key not in ("kind", "date")], left=2)


def stages(folders):
    found = {line[0]: line for line in rows(folders, "stages.tsv")}  # the last of each
    body = [[name] + (found[name][1:3] if name in found else ["did not run", ""]) for name in STAGES]
    return table(["stage", "result", "seconds"], body, left=2)


def tests(folders):
    broken = dict.fromkeys(f"- {precision} {name}: does not build" for precision, name, verdict in rows(folders, "build.tsv") if verdict != "ok")
    lines = rows(folders, "tests.tsv")
    passed, failed, skipped = (sum(int(line[i]) for line in lines) for i in (2, 3, 4))
    text = "\n".join(broken) + "\n\n" if broken else ""
    if not lines:
        return text + "No results.\n"
    text += f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else "") + " on the GPU.\n\n"
    cells = {(line[1], line[0]): f"{line[2]} passed, {line[3]} failed" for line in lines}
    precisions = sorted({line[0] for line in lines})
    body = [[name] + [cells.get((name, precision), "-") for precision in precisions] for name in sorted({line[1] for line in lines})]
    text += table(["program"] + precisions, body, left=1 + len(precisions))
    why = [f"- {line[0]} {line[1]}: {line[6]}" for line in lines if int(line[3])]
    return text + ("\n" + "\n".join(why) + "\n" if why else "")


def sanitizer(folders):
    lines = rows(folders, "sanitizer.tsv")
    if not lines:
        return "No results.\n"
    columns = sorted({(line[1], line[0]) for line in lines})
    cells = {(line[2], line[1], line[0]): line[3] for line in lines}
    body = [[name] + [cells.get((name,) + column, "-") for column in columns] for name in sorted({line[2] for line in lines})]
    text = table(["program"] + [f"{tool}, {precision}" for precision, tool in columns], body, left=1 + len(columns))
    why = [f"- {line[0]}, {line[1]} {line[2]}: {line[4] if len(line) > 4 else ''}" for line in lines if line[3] != "clean"]
    return text + ("\n" + "\n".join(why) + "\n" if why else "")


def losses(lines):
    """What the programs' losses say: they began with the same weights and saw the same batch."""
    curves = {}
    for line in lines:
        if line[0].startswith("loss ") and len(line) > 2:
            curves.setdefault(line[0][5:], {})[int(line[1])] = float(line[2])
    if "ours" not in curves or len(curves) < 2:
        return "Losses were not compared: only one program printed them.\n"
    graph = "--graph 1 has other losses" if any(curves[name] != curves.get(name.replace(", --graph 1", "")) for name in curves) else ""
    curves = {name: curve for name, curve in curves.items() if not name.endswith(" row")}
    last = max(curves["ours"])
    text = table(["loss, from the same weights on the same batch"] + list(curves),
                 [[f"step {step}"] + [f"{curve[step]:.4f}" if step in curve else "-" for curve in curves.values()] for step in (1, last)])
    apart = max(abs(curve[1] - curves["ours"][1]) for curve in curves.values() if 1 in curve)
    verdict = "the same within what bf16 rounds" if apart < 0.02 else "**not the same**: the times below do not compare equal work"
    return text + f"\nAt step 1 they are {apart:.1g} apart: {verdict}." + (f" **{graph}**." if graph else "") + "\n"


def steps(folders):
    lines = rows(folders, "steps.tsv")
    best = shortest([line for line in lines if not line[0].startswith("loss ")])
    if not any(case.startswith("step ") for _, case in best):
        return "No results.\n"
    cases = sorted({case for _, case in best if case.startswith("step ")})
    body, text = [], losses(lines) + "\n"
    for case in cases:
        B, T = (int(n) for n in re.findall(r"\d+", case)[:2])
        ours = best.get(("ours", case), (None,))[0]
        for (program, its_case), (ms, _, _) in sorted(best.items(), key=lambda item: item[1][0]):
            if its_case == case:
                flops = (FLOPS_124M + 6 * 12 * 768 * T) * B * T
                body.append([program, case[5:], number(ms, 4), f"{1e3 * B * T / ms:,.0f}", number(flops / ms / 1e9), ratio(ms, ours)])
    notes = "".join(f"\n- {note}" for note in comments(folders, "steps.tsv"))
    notes += f"\n- expected of ours on an H200, B {roofline.B}, T {roofline.T}: {roofline.step_ms():.0f} ms ([row by row](step.md))"
    return text + "\n" + table(["program", "batch", "ms", "tok/s", "TFLOP/s", "time / ours"], body, left=2) + notes + "\n"


def texts(folders):
    best = {case[5:]: value for (_, case), value in shortest(rows(folders, "steps.tsv")).items() if case.startswith("text ")}
    if not best:
        return "No results.\n"
    gbps, _ = ceilings(shortest(rows(folders, "ops.tsv")))
    body = []
    for model, (ms, _, _) in best.items():
        speed = 2.0 * TEXT_PARAMETERS[model] / ms / 1e6 if ms > 0 else None
        body.append([model, number(ms), f"{1e3 / ms:,.0f}" if ms > 0 else "-", number(speed), share(speed, gbps)])
    return table(["train_moe, one text", "ms of a token", "tok/s", "GB/s of weights", "% of copy"], body)


def trainers(folders):
    body = []
    for program, case, ms, parameters, curve in rows(folders, "trainers.tsv"):
        if not ms:
            continue  # too few steps
        B, T = (int(n) for n in re.findall(r"\d+", case)[-2:])
        body.append([program, case, parameters, number(float(ms), 4), f"{1e3 * B * T / float(ms):,.0f}", " to ".join(f"{float(x):.3f}" for x in curve.split())])
    text = table(["trainer", "model and batch", "parameters", "ms", "tok/s", "loss, first and last step"], body, left=2) if body else "No results.\n"
    return text + "".join(f"\n- {note}" for note in comments(folders, "trainers.tsv")) + "\n"


def qwen(folders):
    """Steps of all parameters and of LoRA, and tokens of a text; the losses of the first step say whether it is the same model."""
    lines = rows(folders, "qwen.tsv")
    best = shortest([line for line in lines if not line[0].startswith("loss ")])
    if not best:
        return "No results.\n"
    body, text = [], ""
    for task, name in (("full", "all parameters"), ("lora", "LoRA of rank 16")):
        first = {line[0].split(" ", 2)[2]: float(line[2]) for line in lines if line[0].startswith(f"loss {task} ") and line[1] == "1"}
        found = {program: (case, ms) for (program, case), (ms, _, _) in best.items() if case.startswith(task + " ")}
        for program, (case, ms) in sorted(found.items(), key=lambda item: item[1][1]):
            B, T = (int(n) for n in re.findall(r"\d+", case)[:2])
            flops = (QWEN_FLOPS[task] + 6 * 28 * 2048 * T) * B * T
            body.append([program, name, case[5:], number(ms, 4), f"{1e3 * B * T / ms:,.0f}", number(flops / ms / 1e9), ratio(ms, found.get("ours", (0, 0))[1])])
        if len(first) > 1:
            apart = max(first.values()) - min(first.values())
            text += f"First losses, {name}: " + ", ".join(f"{program} {loss:.4f}" for program, loss in first.items())
            text += ".\n" if apart < 0.02 else ": **not the same**, the times do not compare equal work.\n"
    text += "\n" + table(["program", "learns", "batch", "ms", "tok/s", "TFLOP/s", "time / ours"], body, left=3)
    gbps, _ = ceilings(shortest(rows(folders, "ops.tsv")))
    written = [(program, ms) for (program, case), (ms, _, _) in best.items() if case == "write" and ms > 0]
    speeds = [(program, ms, 2.0 * (QWEN_LAYERS + QWEN_HEAD) / ms / 1e6) for program, ms in written]
    return text + "\n" + table(["one text, greedy", "ms of a token", "tok/s", "GB/s of weights", "% of copy"],
                                [[program, number(ms), f"{1e3 / ms:,.0f}", number(speed), share(speed, gbps)] for program, ms, speed in speeds])


def ceilings(best):
    """The card's own: GB/s of a copy and TFLOP/s of a large product, whoever reached more. None where nobody measured it."""
    copy = [(n_bytes, ms) for (program, case), (ms, n_bytes, _) in best.items() if case == "copy" and program == "ours"]
    product = [(case, ms) for (_, case), (ms, _, _) in best.items() if re.fullmatch(r"matmul \d+", case)]
    gbps = max((n / ms / 1e6 for n, ms in copy), default=None)
    tflops = max((2.0 * int(case.split()[1]) ** 3 / ms / 1e9 for case, ms in product), default=None)
    return gbps, tflops


def share(value, ceiling):
    return f"{100 * value / ceiling:.0f}" if value and ceiling else "-"


EXPECTED = ["expected, ms", "expected / ours"]


def is_by_wgmma(folders):
    """Was it built for sm_90a?"""
    return any(line[0] == "built in" and "sm_90a" in line[1] for line in rows(folders, "machine.txt") if len(line) > 1)


def beside_expected(case, ms, n_bytes, flops, by_wgmma):
    """What roofline.py expects of an H200, and the share of it that was reached; bold where an assumption failed."""
    expected = roofline.expected(case, n_bytes, flops, by_wgmma)
    reached = ratio(expected, ms)
    return [number(expected), f"**{reached}**" if expected and expected < 0.85 * ms else reached]


def ncu_lines(case, text):
    """Lines for ops.tsv from what `ncu --csv --page details` printed: one for each kernel, in the order of launches."""
    start = text.find('"ID"')
    found = {}
    for line in csv.DictReader(text[start:].splitlines()) if start >= 0 else []:
        kernel = re.sub(r"^void |\(.*", "", line["Kernel Name"])
        value = float(line["Metric Value"].replace(",", "")) if line["Metric Name"] in METRICS else None
        if value is not None:
            scale = {"nsecond": 1e-3, "ns": 1e-3, "msecond": 1e3, "ms": 1e3}.get(line["Metric Unit"], 1.0)
            found.setdefault((line["ID"], kernel), {})[line["Metric Name"]] = value * scale
    return ["\t".join([f"ncu {case}", kernel] + [f"{values[name]:.6g}" if name in values else "-" for name in METRICS])
            for (_, kernel), values in found.items()]


def step_lines(text):
    """Lines for ops.tsv: the launches of the last whole step in what `ncu --csv --metrics gpu__time_duration.sum` printed; AdamW ends one."""
    start = text.find('"ID"')
    launches = [(re.sub(r"^void |\(.*", "", line["Kernel Name"]), float(line["Metric Value"].replace(",", "")) * (1.0 if line["Metric Unit"] == "us" else 1e-3))
                for line in csv.DictReader(text[start:].splitlines()) if start >= 0 and line["Metric Name"] == "gpu__time_duration.sum"]
    ends = [i + 1 for i, (name, _) in enumerate(launches) if "adamw" in name and not any("adamw" in other for other, _ in launches[i + 1:i + 2])]
    return [f"launch\t{name}\t{us:.3f}" for name, us in (launches[ends[-2]:ends[-1]] if len(ends) > 1 else [])]


def kernels(folders):
    """Where a step's time goes: its kernels by their sums; those below a hundredth together."""
    sums = {}
    for line in rows(folders, "ops.tsv"):
        if line[0] == "launch":
            count, us = sums.get(line[1], (0, 0.0))
            sums[line[1]] = (count + 1, us + float(line[2]))
    lines = [(name, count, us) for name, (count, us) in sorted(sums.items(), key=lambda item: -item[1][1])]
    whole = sum(us for _, _, us in lines)
    shown = [line for line in lines if line[2] >= 0.01 * whole]
    rest = [line for line in lines if line[2] < 0.01 * whole]
    if rest:
        shown.append((f"{len(rest)} more", sum(count for _, count, _ in rest), sum(us for _, _, us in rest)))
    body = [[f"`{name[:72]}`" if name[0].isalpha() else name, count, f"{us / count:,.1f}", f"{us / 1e3:.2f}", f"{100 * us / whole:.1f}"] for name, count, us in shown]
    if not body:
        return "No results.\n"
    body.append(["**all**", sum(count for _, count, _ in lines), "", f"{whole / 1e3:.2f}", ""])
    return "One step of GPT-2 124M, each kernel alone, as Nsight Compute times it: no power limit and no gap has a part in this.\n\n" + table(
        ["kernel", "launches", "us of one", "ms", "%"], body)


def profile(folders):
    body = [[line[0][4:], f"`{line[1]}`"] + line[2:] for line in rows(folders, "ops.tsv") if line[0].startswith("ncu ")]
    notes = [note for note in comments(folders, "ops.tsv") if note.startswith("ncu")]
    text = table(["case", "kernel"] + list(METRICS.values()), body, left=2) if body else "No results.\n"
    return text + ("\n" + "\n".join(f"- {note}" for note in notes) + "\n" if notes else "")


def ops(folders):
    best = shortest(line for line in rows(folders, "ops.tsv") if not line[0].startswith(("ncu ", "launch")))
    if not best:
        return "No results.\n"
    gbps, tflops = ceilings(best)
    body, by_wgmma = [], is_by_wgmma(folders)
    for (program, case), (ms, n_bytes, flops) in best.items():  # in the order of the program
        if program != "ours" or case.startswith("attention"):
            continue
        theirs = best.get(("PyTorch", case), (None,))[0]
        body.append([case, number(ms), number(n_bytes / ms / 1e6), share(n_bytes / ms / 1e6, gbps), number(flops / ms / 1e9) if flops else "-",
                     share(flops / ms / 1e9, tflops), number(theirs), ratio(theirs, ms)] + beside_expected(case, ms, n_bytes, flops, by_wgmma))
    text = f"A copy moves {number(gbps)} GB/s, bytes read and written; the large product reaches {number(tflops)} TFLOP/s"
    text += "".join(f"; {note}" for note in comments(folders, "ops.tsv") if note.startswith("clocks")) + ".\n\n"
    header = ["op, bf16; without sizes: of GPT-2 124M, B 16, T 1024", "ms", "GB/s", "% of copy", "TFLOP/s", "% of product", "PyTorch eager, ms", "PyTorch / ours"] + EXPECTED
    return text + table(header, body)


def attention(folders):
    lines = [line for line in rows(folders, "ops.tsv") if not line[0].startswith(("ncu ", "launch"))]
    best = {key: value for key, value in shortest(lines).items() if key[1].startswith("attention")}
    if not best:
        return "No results.\n"
    programs = ["ours"] + [f"PyTorch {name}" for name in ("flash", "cudnn", "efficient", "math")]
    body, by_wgmma = [], is_by_wgmma(folders)
    for case in dict.fromkeys(case for _, case in best):
        ours, n_bytes, flops = best.get(("ours", case), (None, 0, 0))
        cells = [best.get((program, case), (None,))[0] for program in programs]
        fastest = min((ms for ms in cells[1:] if ms), default=None)
        shown = [f"{ms:.3g} ({flops / ms / 1e9:.3g})" if ms else "-" for ms in cells]
        body.append([case.replace("attention_", "")] + shown + [ratio(fastest, cells[0])] + (beside_expected(case, ours, n_bytes, flops, by_wgmma) if ours else ["-", "-"]))
    text = table(["ms (TFLOP/s)"] + programs + ["fastest of PyTorch / ours"] + EXPECTED, body)
    notes = [note for note in comments(folders, "ops.tsv") if not note.startswith(("clocks", "ncu"))]
    return text + ("\n" + "\n".join(f"- {note}" for note in notes) + "\n" if notes else "")


def main():
    if sys.argv[1] == "--ncu":
        print("\n".join(ncu_lines(sys.argv[2], sys.stdin.read())))
        return
    if sys.argv[1] == "--step":
        print("\n".join(step_lines(sys.stdin.read())))
        return
    folders = sys.argv[1:]
    values = {line[0]: line[1] for line in rows(folders, "machine.txt") if len(line) > 1}
    print(f"# {values.get('card', 'unknown card')}, {values.get('date', 'unknown date')}\n")
    if values.get("kind") == "rehearsal":
        print("**A rehearsal: no GPU had a part in this, and no number below means anything.**\n")
    print("Written by `dev/gpu_check.sh` ([how to read it](README.md)); an op's time is the shortest of several repetitions, taken in turn, a step's the median of a run.\n")
    for title, section in [("Machine", machine), ("Stages", stages), ("Tests", tests), ("compute-sanitizer", sanitizer),
                           ("A training step of GPT-2 124M", steps), ("Where the step's time goes", kernels), ("Writing text", texts), ("The other trainers", trainers), ("Qwen3-0.6B", qwen),
                           ("Ops", ops), ("Causal attention", attention), ("What ncu counts", profile)]:
        print(f"## {title}\n\n{section(folders)}")


if __name__ == "__main__":
    main()
