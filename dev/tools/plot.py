#!/usr/bin/env python3
"""
Draws how a run went: python dev/tools/plot.py RUNDIR     (make plot RUN=RUNDIR)

Reads RUNDIR/metrics.jsonl (its format: llmc/log.h) and writes
    RUNDIR/loss.png   loss with validation, learning rate, gradient norm, speed; needs matplotlib
    RUNDIR/loss.html  the same to look into: point at a step to read its numbers; one file, no network, needs nothing
                      but Python; shows the settings of RUNDIR/settings.json too, if that is there
A run may go on while it is drawn, so a last line without its end is left out with a note.
Exit status: 0 drawn (without matplotlib a line says that the PNG is not), 1 cannot write, 2 wrong input, in one line.
"""
import html
import json
import math
import os
import string
import sys

KEYS = ("step", "loss", "norm", "lr", "ms", "tokens", "tok_per_s", "peak", "skipped", "val_loss", "val_bpb", "time")
TRAIN_COLOR, VALIDATION_COLOR, SKIPPED_COLOR = "#2563eb", "#ea580c", "#dc2626"
FEW = 2  # up to so many steps are drawn as points too: a line through one is nothing
MARGIN_LEFT, MARGIN_RIGHT = 52, 14  # of a diagram in the page, in its own units


class InputError(Exception):
    """What is wrong with the input, in one line."""


# ---- reading ----


def parse_record(line, where):
    """One line of metrics.jsonl as a dict of KEYS; non-finite numbers count as null, as they are for the writer."""
    try:
        record = json.loads(line)
    except ValueError:  # of which broken UTF-8 is one
        raise InputError(f"{where}: expected a JSON object, found {line[:60].decode(errors='replace')!r}") from None
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected a JSON object, found {str(record)[:60]!r}")
    if "schema" in record:
        return None
    for key in KEYS:
        value = record.get(key, "nothing")
        if not (value is None or isinstance(value, (int, float))):
            raise InputError(f"{where}: {key}: expected a number or null, found {str(value)[:60]!r}")
        if isinstance(value, float) and not math.isfinite(value):
            record[key] = None
    if type(record["step"]) is not int or record["step"] < 0:
        raise InputError(f"{where}: step: expected an integer of at least 0, found {record['step']!r}")
    return record


def read_metrics(path):
    """The records of updates and those of validations, each in the order of their steps."""
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(parse_record(line, f"{path}:{number}") if line.strip() else None)
        except InputError:
            if number < len(lines):
                raise
            print(f"{path}:{number}: the last line is not complete (a run was stopped, or still writes): left out")
    records = sorted(filter(None, records), key=lambda record: record["step"])
    if not records:
        raise InputError(f"{path}: no steps are recorded yet")
    updates = [record for record in records if record["tokens"] is not None]
    validations = [record for record in records if record["tokens"] is None]
    return updates, validations


def read_settings(path):
    """Rows (name, value) of settings.json, names of inner objects joined by dots; none if there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        print(f"{path}: left out: {error}")
        return []
    rows = []

    def flatten(name, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                flatten(f"{name}.{key}" if name else key, inner)
        else:
            rows.append((name, value if isinstance(value, str) else json.dumps(value)))

    flatten("", settings)
    return rows


# ---- what is drawn: the same panels for both files ----


def smooth(values):
    """Mean over the fiftieth of all steps around each one, so that the curve does not lag; None where no value is."""
    half = len(values) // 100
    sums, counts = [0.0], [0]
    for value in values:
        sums.append(sums[-1] + (value or 0.0))
        counts.append(counts[-1] + (value is not None))
    means = []
    for i in range(len(values)):
        first, end = max(0, i - half), min(len(values), i + half + 1)
        n = counts[end] - counts[first]
        means.append((sums[end] - sums[first]) / n if n else None)
    return means


class Panel:
    """One diagram over the steps: `raw` values faint, `line` on top; (step, value) of validations as `dots`, of skipped
    updates as `crosses`."""

    def __init__(self, name, unit, steps, raw, line):
        self.name, self.unit, self.steps, self.raw, self.line = name, unit, steps, raw, line
        self.dots, self.crosses = [], []
        self.log = False

    def values(self):
        every = self.raw + [value for _, value in self.dots]
        return [value for value in every if value is not None]

    def limits(self):
        values = self.values() or [0.0, 1.0]
        low, high = min(values), max(values)
        if self.log:
            return low / 1.2, high * 1.2
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return (low - margin if low - margin > 0 or low < 0 else 0.0), high + margin


def make_panels(updates, validations):
    steps = [record["step"] for record in updates]

    def panel(name, unit, key):
        made = [None if record["skipped"] else record[key] for record in updates]  # outliers would bend the line
        return Panel(name, unit, steps, [record[key] for record in updates], smooth(made))

    loss = panel("loss", "nats per target", "loss")
    loss.dots = [(record["step"], record["val_loss"]) for record in validations if record["val_loss"] is not None]
    rates = [record["lr"] for record in updates]
    rate = Panel("learning rate", "", steps, rates, rates)
    norm = panel("gradient norm", "", "norm")
    norm.crosses = [(record["step"], record["norm"]) for record in updates if record["skipped"]]
    norm.log = min(norm.values(), default=0) > 0 and max(norm.values()) > 10 * min(norm.values())
    return [loss, rate, norm, panel("speed", "tokens/s", "tok_per_s")]


def short(n):
    """25000 -> 25k, 1200000 -> 1.2M; small numbers with the digits they need."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size:
            return f"{n / size:.4g}{letter}"
    return f"{n:.4g}"


def summary(updates, validations):
    """(name, value) pairs: where the run stands."""
    pairs = []
    if updates:
        last = updates[-1]
        recent = [record["loss"] for record in updates[-max(1, len(updates) // 50):] if record["loss"] is not None]
        pairs.append(("step", str(last["step"])))
        pairs.append(("recent loss", f"{sum(recent) / len(recent):.4f}" if recent else "not finite"))
    checked = [record for record in validations if record["val_loss"] is not None]
    if checked:
        best = min(checked, key=lambda record: record["val_loss"])
        pairs.append(("validation loss", f"{checked[-1]['val_loss']:.4f}"))
        pairs.append((f"best at {short(best['step'])}", f"{best['val_loss']:.4f}"))
        if checked[-1]["val_bpb"] is not None:
            pairs.append(("bits per byte", f"{checked[-1]['val_bpb']:.3f}"))
    if updates:
        pairs.append(("tokens", short(last["tokens"])))
        if last["tok_per_s"] is not None:
            pairs.append(("tokens/s", short(last["tok_per_s"])))
        n_skipped = sum(1 for record in updates if record["skipped"])
        if n_skipped:
            pairs.append(("skipped", str(n_skipped)))
    return pairs


# ---- PNG ----


def draw_axes(axes, panel):
    nan = float("nan")
    gaps = [[nan if value is None else value for value in values] for values in (panel.raw, panel.line)]
    marker = "o" if len(panel.steps) <= FEW else None
    if panel.line is not panel.raw:
        axes.plot(panel.steps, gaps[0], color=TRAIN_COLOR, alpha=0.22, linewidth=0.8)
    label = "training (faint: each step)" if panel.dots else None
    axes.plot(panel.steps, gaps[1], color=TRAIN_COLOR, linewidth=1.6, label=label, marker=marker, markersize=4)
    if panel.dots:
        axes.plot(*zip(*panel.dots), "o-", color=VALIDATION_COLOR, linewidth=1.2, markersize=4, label="validation")
    axes.set_yscale("log" if panel.log else "linear")
    axes.set_ylim(*panel.limits())
    if panel.crosses:
        low = panel.limits()[0]
        xs, ys = zip(*((step, low if value is None else value) for step, value in panel.crosses))
        axes.plot(xs, ys, "x", color=SKIPPED_COLOR, markersize=6, label="skipped", clip_on=False)
    if panel.dots or panel.crosses:
        axes.legend(frameon=False, fontsize=9)
    axes.set_title(panel.name, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel(panel.unit or panel.name, fontsize=9)
    axes.set_xlabel("step", fontsize=9)


def write_png(path, name, panels, steps, pairs):
    """False if there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")  # a file, also where there is no screen
    from matplotlib import pyplot, ticker

    figure = pyplot.figure(figsize=(12, 7.6), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=(1.75, 1))
    places = (grid[0, :], grid[1, 0], grid[1, 1], grid[1, 2])
    for panel, place in zip(panels, places):
        axes = figure.add_subplot(place)
        draw_axes(axes, panel)
        axes.grid(color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
        margin = 0.01 * (steps[1] - steps[0])
        axes.set_xlim(steps[0] - margin, steps[1] + margin)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(lambda step, _: short(step))
        if panel.log:
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(ticker.NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: short(value))
    title = f"{name}:  " + "  |  ".join(f"{key} {value}" for key, value in pairs)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


# ---- HTML: SVG written by hand, a little script for the pointer ----


def ticks(low, high, log):
    """Round numbers inside the range: 1, 2, 5 times a power of ten."""
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
        every = [factor * 10.0**power for power in powers for factor in factors]
    else:
        size = 10.0 ** math.floor(math.log10((high - low) / 5))
        size *= next(factor for factor in (1, 2, 5, 10) if factor * size * 5 >= high - low)
        every = [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]
    return [value for value in every if low <= value <= high]


def thin(steps, values, width):
    """Where steps are closer than pixels, the lowest and the highest of each stretch: looks the same, stays small."""
    size = math.ceil(len(steps) / width)
    if size < 2:
        return list(zip(steps, values))
    points = []
    for first in range(0, len(steps), size):
        stretch = [(value, i) for i, value in enumerate(values[first:first + size], first) if value is not None]
        chosen = sorted({min(stretch)[1], max(stretch)[1]}) if stretch else [first]
        points += [(steps[i], values[i]) for i in chosen]
    return points


class Scale:
    """Steps and values to the pixels of one SVG."""

    def __init__(self, panel, steps, width, height):
        self.left, self.right, self.top, self.bottom = MARGIN_LEFT, width - MARGIN_RIGHT, 10, height - 34
        self.steps, (self.low, self.high), self.log = steps, panel.limits(), panel.log

    def x(self, step):
        first, last = self.steps
        return self.left + (step - first) / (last - first) * (self.right - self.left)

    def y(self, value):
        low, high, v = (math.log(n) if self.log else n for n in (self.low, self.high, value))
        return self.bottom - (v - low) / (high - low) * (self.bottom - self.top)

    def path(self, points):
        """The d of an SVG path; a missing value lifts the pen."""
        parts, pen = [], "M"
        for step, value in points:
            if value is None:
                pen = "M"
            else:
                parts.append(f"{pen}{self.x(step):.1f} {self.y(value):.1f}")
                pen = "L"
        return "".join(parts)

    def circle(self, kind, step, value):
        return f'<circle class="{kind}" cx="{self.x(step):.1f}" cy="{self.y(value):.1f}" r="3"/>'


def svg_panel(panel, steps, width, height):
    scale = Scale(panel, steps, width, height)
    out = [f'<svg viewBox="0 0 {width} {height}" data-panel="{panel.name}">']
    for value in ticks(scale.low, scale.high, scale.log):
        y = scale.y(value)
        out.append(f'<path class="grid" d="M{scale.left} {y:.1f}H{scale.right}"/>')
        out.append(f'<text class="y" x="{scale.left - 7}" y="{y + 4:.1f}">{short(value)}</text>')
    for step in ticks(*steps, False):
        if step == int(step):
            out.append(f'<text class="x" x="{scale.x(step):.1f}" y="{scale.bottom + 17}">{short(step)}</text>')
    out.append(f'<path class="axis" d="M{scale.left} {scale.bottom}H{scale.right}"/>')
    out.append(f'<text class="x" x="{(scale.left + scale.right) / 2}" y="{height - 3}">step</text>')
    if panel.line is not panel.raw:
        out.append(f'<path class="raw" d="{scale.path(thin(panel.steps, panel.raw, width))}"/>')
    out.append(f'<path class="line" d="{scale.path(thin(panel.steps, panel.line, width))}"/>')
    if len(panel.steps) <= FEW:
        out += [scale.circle("line", step, value) for step, value in zip(panel.steps, panel.line) if value is not None]
    if panel.dots:
        out.append(f'<path class="validation" d="{scale.path(panel.dots)}"/>')
        out += [scale.circle("validation", step, value) for step, value in panel.dots]
    for step, value in panel.crosses:
        x, y = scale.x(step), scale.bottom if value is None else scale.y(value)
        out.append(f'<path class="skipped" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8"/>')
    out.append(f'<path class="cursor" d="M0 {scale.top}V{scale.bottom}"/></svg>')
    return "\n".join(out)


PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$name</title>
<style>
:root {
  --back: #fff; --card: #f8fafc; --text: #0f172a; --quiet: #64748b; --rule: #e2e8f0;
  --train: $train; --validation: $validation; --skipped: $skipped;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #0f172a; --card: #1e293b; --text: #f1f5f9; --quiet: #94a3b8; --rule: #334155;
    --train: #60a5fa; --validation: #fb923c; --skipped: #f87171;
  }
}
body {
  font: 15px/1.5 system-ui, sans-serif; background: var(--back); color: var(--text);
  max-width: 1100px; margin: 2rem auto; padding: 0 1rem;
}
h1 { font-size: 1.3rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
.summary, .small { display: grid; gap: 0.75rem; grid-template-columns: repeat(auto-fit, minmax(115px, 1fr)); }
.small { grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); }
.summary div, figure { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 0.5rem; }
.summary b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.summary span, figcaption span, .unit { color: var(--quiet); font-size: 0.85rem; }
figure { margin: 0.75rem 0 0; }
figcaption { display: flex; justify-content: space-between; gap: 1rem; }
.read { font-variant-numeric: tabular-nums; text-align: right; }
svg { width: 100%; height: auto; display: block; touch-action: pan-y; }
text { font-size: 11px; fill: var(--quiet); }
.y { text-anchor: end; } .x { text-anchor: middle; }
path { fill: none; }
.grid, .axis { stroke: var(--rule); } .axis { stroke: var(--quiet); }
.raw { stroke: var(--train); opacity: 0.25; } .line { stroke: var(--train); stroke-width: 1.8; }
.raw, .line { stroke-linejoin: round; stroke-linecap: round; }
path.validation { stroke: var(--validation); stroke-width: 1.4; }
circle { fill: var(--train); } circle.validation { fill: var(--validation); }
.skipped { stroke: var(--skipped); stroke-width: 1.8; }
.cursor { stroke: var(--quiet); stroke-dasharray: 3 3; visibility: hidden; }
.key::before {
  content: ""; display: inline-block; width: 0.9em; height: 0.25em; margin: 0 0.35em 0.2em 0.9em; background: var(--c);
}
table { border-collapse: collapse; font-size: 0.9rem; margin-top: 0.5rem; }
td { border-top: 1px solid var(--rule); padding: 0.15rem 1.5rem 0.15rem 0; vertical-align: top; }
td:last-child { overflow-wrap: anywhere; }
td:first-child { color: var(--quiet); white-space: nowrap; }
details { margin: 1.5rem 0; }
summary { cursor: pointer; }
</style>
</head>
<body>
<h1>$name</h1>
<div class="summary">$summary</div>
$loss
<div class="small">$small</div>
$settings
<script>
"use strict";
const data = $data;
// the row whose step is nearest to `step`: steps ascend, so halve the range
function nearest(rows, step) {
  let low = 0, high = rows.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] < step) { low = middle + 1; } else { high = middle; }
  }
  return low > 0 && step - rows[low - 1][0] < rows[low][0] - step ? rows[low - 1] : rows[low];
}
function number(v) {
  if (v === null) { return "not finite"; }
  if (v !== 0 && Math.abs(v) < 0.001) { return v.toExponential(2); }
  return Math.abs(v) >= 1e5 ? Math.round(v).toLocaleString("en") : v.toPrecision(5);
}
// a line in every diagram at this fraction of the way through the steps, and the numbers there; null hides it all
function show(fraction) {
  if (!data.rows.length) { return; }
  const row = nearest(data.rows, data.first + fraction * (data.last - data.first));
  document.querySelectorAll("svg").forEach((svg, i) => {
    const read = svg.parentNode.querySelector(".read"), cursor = svg.querySelector(".cursor");
    if (fraction === null) {
      cursor.style.visibility = "hidden";
      read.textContent = "";
      return;
    }
    const along = (row[0] - data.first) / (data.last - data.first);
    const x = data.left + along * (svg.viewBox.baseVal.width - data.left - data.right);
    cursor.style.visibility = "visible";
    cursor.setAttribute("transform", "translate(" + x + ")");
    const v = i === 0 && data.validations.length ? nearest(data.validations, row[0]) : null;
    read.textContent = (i === 0 ? "step " + row[0] + ": " : "") + number(row[i + 1])
                     + (v ? ", validation " + number(v[1]) + " at " + v[0] : "");
  });
}
document.querySelectorAll("svg").forEach(svg => {
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), width = svg.viewBox.baseVal.width;
    const x = (event.clientX - box.left) / box.width * width;
    show(Math.min(1, Math.max(0, (x - data.left) / (width - data.left - data.right))));
  });
  svg.addEventListener("pointerleave", () => show(null));
});
</script>
</body>
</html>
""")


def figure_html(panel, steps, width, height):
    shown = [("train", "training, faint: each step")] if panel.dots else []
    shown += [("validation", "validation")] if panel.dots else []
    shown += [("skipped", "skipped")] if panel.crosses else []
    keys = "".join(f'<span class="key" style="--c: var(--{color})">{text}</span>' for color, text in shown)
    return (f'<figure><figcaption><div><b>{panel.name}</b> <span class="unit">{panel.unit}</span>{keys}</div>'
            f'<span class="read"></span></figcaption>\n{svg_panel(panel, steps, width, height)}\n</figure>')


def write_html(path, name, panels, steps, pairs, settings):
    stride = math.ceil(len(panels[0].steps) / 4000) or 1  # rows the pointer can find

    def rounded(value):
        return value if value is None else float(f"{value:.6g}")

    rows = [[row[0], *map(rounded, row[1:])] for row in zip(panels[0].steps, *(panel.raw for panel in panels))]
    data = {"first": steps[0], "last": steps[1], "left": MARGIN_LEFT, "right": MARGIN_RIGHT, "rows": rows[::stride],
            "validations": [(step, rounded(value)) for step, value in panels[0].dots]}
    figures = [figure_html(panels[0], steps, 1066, 400)]
    figures += [figure_html(panel, steps, 350, 220) for panel in panels[1:]]
    table = "".join(f"<tr><td>{html.escape(key)}</td><td>{html.escape(value)}</td></tr>" for key, value in settings)
    page = PAGE.substitute(
        name=html.escape(name), train=TRAIN_COLOR, validation=VALIDATION_COLOR, skipped=SKIPPED_COLOR,
        summary="".join(f"<div><span>{key}</span><b>{value}</b></div>" for key, value in pairs),
        loss=figures[0], small="\n".join(figures[1:]), data=json.dumps(data, separators=(",", ":")),
        settings=f"<details><summary>settings</summary><table>{table}</table></details>" if settings else "")
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)


def main(arguments):
    if arguments in (["--help"], ["-h"]):
        print(__doc__.strip())
        return 0
    if len(arguments) != 1:
        raise InputError("expected the folder of one run: plot.py RUNDIR (--help tells more)")
    folder = arguments[0]
    updates, validations = read_metrics(os.path.join(folder, "metrics.jsonl"))
    settings = read_settings(os.path.join(folder, "settings.json"))
    name = os.path.basename(os.path.abspath(folder))
    panels, pairs = make_panels(updates, validations), summary(updates, validations)
    every = [record["step"] for record in updates + validations]
    steps = min(every), max(max(every), min(every) + 1)
    path = os.path.join(folder, "loss.html")
    try:
        write_html(path, name, panels, steps, pairs, settings)
        print(f"wrote {path}")
        path = os.path.join(folder, "loss.png")
        drawn = write_png(path, name, panels, steps, pairs)
        missing = f"{path} was not drawn: it needs matplotlib (python3 -m pip install matplotlib)"
        print(f"wrote {path}" if drawn else missing)
    except OSError as error:
        print(f"plot: {path}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        print(f"plot: {error}", file=sys.stderr)
        sys.exit(2)
