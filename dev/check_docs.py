"""
Holds README.md, llmc/README.md, doc/*.md and doc/gpu/*.md to what they say. Standard library only; the examples need NumPy.

    python dev/check_docs.py          check; ends with "N passed, N failed", status 1 if one failed
    python dev/check_docs.py --fix    first move line numbers to where the quoted code stands now

It promises that
  - a reference to code tells the truth. A reference is a link [`llmc/ops/gelu.h:22`](../llmc/ops/gelu.h#L22) with the code behind
    it, in backticks or as a fenced block: a part of that line, or all lines of [`llmc/ops/gelu.h:20-23`](...), indented alike;
  - every relative link leads to a file, and to a heading where it names one;
  - what comments of the sources cite as doc/gelu.md "Formula" are headings of that page;
  - llmc/README.md links every header of llmc/ once;
  - doc/gpu/step.md is what dev/roofline.py writes, and pages from whose tables it reads times of ops have them;
  - every ```python block in doc/ runs, in a namespace of its own, and asserts something.
"""
import argparse
import contextlib
import glob
import importlib.util
import io
import os
import re
import textwrap
import traceback

import roofline

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MAP = "llmc/README.md"

REFERENCE = re.compile(r"\[`(?P<path>[^`:\s]+):(?P<first>\d+)(?:-(?P<last>\d+))?`\]\((?P<url>[^)\s]*)\)")
UNLINKED = re.compile(r"(?<!\[)`[\w/.-]+\.\w+:\d+(?:-\d+)?`")
QUOTE = re.compile(r"\s*:?\s*(?:^[ \t]*```\w*\n(?P<block>.*?)^[ \t]*```|`(?P<piece>[^`\n]+)`)", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^[ \t]*```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)|\b(?:src|href)=\"(?P<attribute>[^\"]+)\"")
CITATION = re.compile(r'\bdoc/(?P<page>[\w/]+\.md)(?P<titles>(?:,?\s+"[A-Z][^"]{2,60}")+)')
SOURCES = ("llmc/*/*.h", "train_*.c*", "test_*.c", "dev/ref/*.py")


class Report:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0

    def count(self, where, problem):
        """One promise: kept where `problem` is None, else broken for that reason."""
        if problem is None:
            self.passed += 1
        else:
            self.failed += 1
            print(f"FAIL  {where}: {problem}")

    def last_line(self):
        return f"{self.passed} passed, {self.failed} failed" + (f", {self.skipped} skipped" if self.skipped else "")


def documents():
    """Paths from the root: README.md, llmc/README.md, then doc/*.md and doc/gpu/*.md."""
    pages = [f"{folder}/{name}" for folder in ("doc", "doc/gpu") for name in sorted(os.listdir(os.path.join(ROOT, folder))) if name.endswith(".md")]
    return [page for page in ["README.md", MAP] + pages if os.path.exists(os.path.join(ROOT, page))]


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def place(page, text, offset):
    return f"{page}:{text.count(chr(10), 0, offset) + 1}"


# ---------------------------------------------------------------------------------------------------------------------
# References to code.
# ---------------------------------------------------------------------------------------------------------------------
def code_lines(text):
    """Lines without their common indentation and without spaces at their ends."""
    return [line.rstrip() for line in textwrap.dedent(text).splitlines()]


def find(quote, source):
    """Ranges (first, last) of line numbers at which the quoted code stands in `source`, a list of lines."""
    if quote["piece"] is not None:
        return [(i, i) for i, line in enumerate(source, 1) if quote["piece"].strip() in line]
    block = code_lines(quote["block"])
    starts = range(len(source) - len(block) + 1) if block else []
    return [(i + 1, i + len(block)) for i in starts if code_lines("\n".join(source[i:i + len(block)])) == block]


def reference_text(page, path, first, last):
    """The one spelling of a reference from `page` to lines of `path`."""
    url = os.path.relpath(path, os.path.dirname(page) or ".").replace(os.sep, "/")
    lines, anchor = (f"{first}-{last}", f"L{first}-L{last}") if last > first else (f"{first}", f"L{first}")
    return f"[`{path}:{lines}`]({url}#{anchor})"


def check_reference(page, text, reference, fix):
    """(what is wrong or None, what the reference should say)"""
    path, first, last = reference["path"], int(reference["first"]), int(reference["last"] or reference["first"])
    quote = QUOTE.match(text, reference.end())
    if not os.path.isfile(os.path.join(ROOT, path)):
        return f"{path}: no such file", None
    if quote is None:
        return f"{reference.group()}: expected the code of that line behind it, in backticks or a fenced block", None
    places = find(quote, read(path).splitlines())
    is_there = (first, last) in places or (quote["piece"] is not None and any(first <= i <= last for i, _ in places))
    if not is_there and not (fix and len(places) == 1):
        found = "not in the file" if not places else "found at " + ", ".join(f"{i}-{j}" if j > i else f"{i}" for i, j in places)
        return f"{path}:{first}" + (f"-{last}" if last > first else "") + f": the quoted code is {found}", None
    expected = reference_text(page, path, *((first, last) if is_there else places[0]))
    if reference.group() != expected and not fix:
        return f"expected {expected}, found {reference.group()}", None
    return None, expected


def check_references(page, fix, report):
    text = read(page)
    for match in UNLINKED.finditer(FENCED.sub(blank, text)):
        report.count(place(page, text, match.start()), f"{match.group()}: a line number needs a link and the code behind it")
    fixed, end = "", 0
    for reference in REFERENCE.finditer(text):
        problem, expected = check_reference(page, text, reference, fix)
        report.count(place(page, text, reference.start()), problem)
        fixed += text[end:reference.start()] + (expected or reference.group())
        end = reference.end()
    fixed += text[end:]
    if fixed != text:
        with open(os.path.join(ROOT, page), "w", encoding="utf-8") as file:
            file.write(fixed)
        print(f"fixed {page}")


# ---------------------------------------------------------------------------------------------------------------------
# Links.
# ---------------------------------------------------------------------------------------------------------------------
def blank(match):
    """As many lines without text: what is behind keeps its line number."""
    return "\n" * match.group().count("\n")


def titles(path):
    return re.findall(r"^#+ +(.*?) *$", FENCED.sub(blank, read(path)), re.MULTILINE)


def headings(path):
    """Anchors that GitHub gives to the headings of a page."""
    return [re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in titles(path)]


def link_problem(page, target):
    file, _, anchor = target.partition("#")
    path = os.path.normpath(os.path.join(os.path.dirname(page), file)) if file else page
    if path.startswith("..") or os.path.isabs(path) or not os.path.exists(os.path.join(ROOT, path)):
        return f"link to {target}: no such file in the repository"
    if anchor and path.endswith(".md") and anchor not in headings(path):
        return f"link to {target}: no such heading"
    if anchor and not path.endswith(".md"):
        return f"link to {target}: a line number needs the code behind it"
    return None


def check_links(page, report):
    prose = FENCED.sub(blank, read(page))
    prose = re.sub(r"`[^`\n]*`", "``", REFERENCE.sub("", prose))  # references have their own check; code has no links
    for match in LINK.finditer(prose):
        target = match["target"] or match["attribute"]
        if not re.match(r"[a-z]+:", target):
            report.count(place(page, prose, match.start()), link_problem(page, target))


def check_citations(source, report):
    text = read(source)
    for match in CITATION.finditer(text):
        path = f"doc/{match['page']}"
        there = titles(path) if os.path.exists(os.path.join(ROOT, path)) else []
        for cited in re.findall(r'"([^"]*)"', match["titles"]):
            title = re.sub(r"\s*\n\s*", " ", cited)  # comments break lines
            report.count(place(source, text, match.start()), None if title in there else f'{path} has no heading "{title}"')


def check_map(report):
    text = read(MAP)
    for header in sorted(glob.glob("*/*.h", root_dir=os.path.join(ROOT, "llmc"))):
        n = text.count(f"]({header})")
        report.count(MAP, None if n == 1 else f"expected one link to {header}, found {n}")


# ---------------------------------------------------------------------------------------------------------------------
# Examples.
# ---------------------------------------------------------------------------------------------------------------------
def run(code, name):
    """What is wrong with a piece of Python, or None. Asserts count even under python -O."""
    if not re.search(r"^\s*assert\b", code, re.MULTILINE):
        return "the example asserts nothing"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, name, "exec", optimize=0), {"__name__": "__main__"})
    except (Exception, SystemExit) as error:
        line = next((frame.lineno for frame in reversed(traceback.extract_tb(error.__traceback__)) if frame.filename == name), None)
        line = line or getattr(error, "lineno", None) or 0  # a syntax error has no frame of its own
        return f"line {line}: {type(error).__name__}{': ' if str(error) else ''}{error}: {(code.splitlines() + [''])[line - 1].strip()}"
    return None


def check_examples(page, report):
    text = read(page)
    for block in FENCED.finditer(text):
        if block["language"] != "python":
            continue
        if importlib.util.find_spec("numpy") is None:
            report.skipped += 1
            continue
        offset = text.count("\n", 0, block.start("code"))  # so that a message names the line of the page
        report.count(place(page, text, block.start()), run("\n" * offset + textwrap.dedent(block["code"]), page))


def main():
    parser = argparse.ArgumentParser(description="check the references, links and examples of README.md, llmc/README.md and doc/*.md")
    parser.add_argument("--fix", action="store_true", help="move line numbers to where the quoted code stands now")
    fix = parser.parse_args().fix
    report = Report()
    for page in documents():
        check_references(page, fix, report)
        check_links(page, report)
        if page.startswith("doc/"):
            check_examples(page, report)
    for pattern in SOURCES:
        for source in sorted(glob.glob(pattern, root_dir=ROOT)):
            check_citations(source, report)
    check_map(report)
    report.count(roofline.PAGE, roofline.problem())
    if report.skipped:
        print("skipped: the examples need NumPy (dev/setup.sh)")
    print(report.last_line())
    return int(report.failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
