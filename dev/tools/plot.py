#!/usr/bin/env python3
"""
Draws how a run went, or several beside each other:
    make plot RUN=runs/a    make plot RUN="runs/a runs/b"

    plot.py RUN           writes RUN/loss.png and RUN/loss.html: loss (of a
                          mixture without what its routers add to it) with
                          validation, learning rate, gradient norm, speed; where
                          they are recorded the share of targets found (acc1),
                          HellaSwag's accuracy, the load of the busiest expert
                          and the gradient noise scale too, and each further
                          number that the trainer explains in the first line of
                          metrics.jsonl, unless it never changes or repeats the
                          loss or the tokens
    plot.py RUN RUN...    writes compare.png and compare.html next to the first
                          run: the same, a colour for each run; the validation
                          of different tokenizers in bits per byte

The PNG needs matplotlib. The HTML needs nothing but Python and no network:
point at a diagram to read its numbers; it also shows the settings (of several
runs: those that differ). Bold lines are means over a fiftieth of the longest
run, faint ones are each step. A step that computed no loss has no point. A RUN
may also be several folders with blanks between, as make hands them on; a name
with blanks is found as it is.

Runs may still go on: a last line of metrics.jsonl without its end is left out
with a note. Updates that were skipped and numbers that are not finite leave
gaps. The time axis is time spent in updates, so pauses before a resume don't
count.
Exit status: 0 drawn (without matplotlib a line says that the PNG is not),
1 cannot write, 2 wrong input, in one line.
"""
import argparse
import bisect
import glob
import html
import json
import math
import os
import statistics
import string
import sys
import textwrap

from runs import (COLORS, DARK_COLORS, DASHES, KEYS, SAME_IN_NONE, TITLES, InputError, is_finite, read_metrics,
                  read_settings, split_folders)

ACCURACY = "acc1"  # keys that not every run has
EXAMPLES = "accuracy"  # of a test on examples, which has a record of its own
CROSS_ENTROPY = "cross_entropy"  # the loss without what routers of a mixture add to it
LOAD = "load"  # of the busiest expert of a mixture
NOISE_SCALE = "noise_scale"
AVERAGED_LOSS = "val_loss_ema"
MORE_KEYS = (ACCURACY, EXAMPLES, CROSS_ENTROPY, LOAD, NOISE_SCALE, AVERAGED_LOSS)
DRAWN_ELSEWHERE = KEYS + MORE_KEYS  # not as a further key of the trainer
MOST_OWN = 12  # diagrams of further keys
MOST_IN_ROW = 4  # of small diagrams
FEW = 2  # up to so many steps are drawn as points too: a line through one is nothing
NAME_LENGTH = 40
MARGIN_LEFT, MARGIN_RIGHT = 56, 14  # of a diagram in the page, in its own units
LARGEST = 1e100  # room for sums, differences and margins of what is drawn; no number of a sound run comes near


# ---- runs ----


def printable(text):
    """Without the halves of characters that stand for bytes which are no UTF-8, in the name of a folder."""
    return text.encode(errors="replace").decode()


def as_number(value):
    """A finite number that is no truth value, else None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and is_finite(value)
    return float(value) if is_number else None


class Run:
    """What is recorded of one run; `x` is its horizontal axis, one number for each update."""

    def __init__(self, folder):
        self.folder = folder
        self.name = printable(os.path.basename(os.path.abspath(folder)))
        records, self.meanings = read_metrics(os.path.join(folder, "metrics.jsonl"))
        self.drawable(records)
        self.updates = [record for record in records if record["tokens"] is not None]
        self.validations = [record for record in records if record["tokens"] is None and record["val_loss"] is not None]
        self.tests = [record for record in records if record["tokens"] is None and record[EXAMPLES] is not None]
        self.settings = read_settings(os.path.join(folder, "settings.json"))
        self.x, self.validation_x, self.test_x = [], [], []
        self.adds_loss = any(record[CROSS_ENTROPY] is not None for record in self.updates)
        if self.adds_loss:  # to that of the targets, with which alone runs compare, and validation
            for record in self.updates:
                record["loss"] = record[CROSS_ENTROPY]

    def drawable(self, records):
        """Takes numbers for which no diagram has room out of the records, and says so."""
        n_lost, further = 0, {*MORE_KEYS, *self.meanings} - set(KEYS)
        for record in records:
            for key in further:
                record[key] = as_number(record.get(key))
            for key in (*KEYS[1:], *further):
                if record[key] is not None and abs(record[key]) > LARGEST:
                    record[key] = 0 if key == "tokens" else None  # null tokens would make it a validation
                    n_lost += 1
        if n_lost:
            print(f"{os.path.join(self.folder, 'metrics.jsonl')}: {n_lost} number{'s' * (n_lost > 1)} beyond {LARGEST:g} not drawn")

    def place(self, axis, unit):
        """Sets the positions of updates and validations; seconds of time count in units of `unit`."""
        position, positions = 0, {0: 0}
        for record in self.updates:
            if axis == "time":
                position += (record["ms"] or 0.0) / 1000 / unit
            else:
                position = record[axis]
            positions[record["step"]] = position
            self.x.append(position)
        steps = sorted(positions)  # 0 is one of them
        for records, places in ((self.validations, self.validation_x), (self.tests, self.test_x)):
            for record in records:
                if axis == "step":
                    places.append(record["step"])
                else:  # at the last update before it
                    places.append(positions[steps[bisect.bisect(steps, record["step"]) - 1]])

    def computed(self, key):
        """Positions and records of the updates that computed this; a skipped one did, even if the number is not finite."""
        pairs = [(x, record) for x, record in zip(self.x, self.updates) if record[key] is not None or record["skipped"]]
        return [x for x, _ in pairs], [record for _, record in pairs]

    def checked(self, key):
        """Positions and values of the validations that have this."""
        pairs = [(x, record[key]) for x, record in zip(self.validation_x, self.validations) if record[key] is not None]
        return [x for x, _ in pairs], [value for _, value in pairs]

    def seconds(self):
        return sum(record["ms"] or 0.0 for record in self.updates) / 1000

    def column(self, key):
        return [record[key] for record in self.updates]


def runs_inside(folder):
    """Of a folder that is no run itself: those it holds, as make run-lora leaves them."""
    if os.path.exists(os.path.join(folder, "metrics.jsonl")):
        return []
    found = glob.glob(os.path.join(glob.escape(folder), "*", "metrics.jsonl"))
    return sorted(printable(os.path.dirname(path)) for path in found)


def read_runs(folders):
    """The runs that have records; a new one without is left out with a note when there are others."""
    for folder in folders:
        inside = runs_inside(folder)
        if inside:
            raise InputError(f"{folder}: expected a run, found a folder of runs: choose {' or '.join(inside)}")
    runs = [Run(folder) for folder in folders]
    drawn = [run for run in runs if run.updates or run.validations or run.tests]
    for run in runs:
        if run not in drawn:
            note = f"{os.path.join(run.folder, 'metrics.jsonl')}: no steps are recorded yet"
            if not drawn:
                raise InputError(note)
            print(f"{note}: left out")
    names = [run.name for run in drawn]
    for run in drawn:
        if names.count(run.name) > 1:  # the same name in two places
            run.name = printable(os.path.normpath(run.folder))
        if len(run.name) > NAME_LENGTH:
            half = (NAME_LENGTH - 3) // 2
            run.name = f"{run.name[:half]}...{run.name[-half:]}"
    return drawn


def place_runs(runs, axis):
    """Horizontal positions for all; returns what the axis is called and its range."""
    seconds = max(run.seconds() for run in runs)
    unit, unit_name = next(pair for pair in ((1, "seconds"), (60, "minutes"), (3600, "hours"))
                           if seconds < 180 * pair[0] or pair[0] == 3600)
    for run in runs:
        run.place(axis, unit)
    every = [x for run in runs for x in run.x + run.validation_x + run.test_x]
    first, last = min(every), max(every)
    name = f"{unit_name} of training" if axis == "time" else axis
    return name, (first, last if last > first else first + 1)


# ---- what is drawn: the same panels for both files ----


def smooth(values, half):
    """
    Mean over `half` steps before and after each one, so that the curve does not lag; None where no value is. A window is the
    end of one block of its length and the beginning of the next. Nothing is subtracted, so what is rounded away beside an
    outlier comes back behind it.
    """
    window, terms = 2 * half + 1, [0.0] * half + [value or 0.0 for value in values] + [0.0] * half
    until, since = terms[:], terms[:]  # sums from the beginning of a block, and to its end
    for i in range(len(terms)):
        until[i] += until[i - 1] if i % window else 0.0
    for i in reversed(range(len(terms) - 1)):
        since[i] += since[i + 1] if (i + 1) % window else 0.0
    counts = [0]
    for value in values:
        counts.append(counts[-1] + (value is not None))
    means = []
    for i in range(len(values)):
        n = counts[min(len(values), i + half + 1)] - counts[max(0, i - half)]
        total = until[i + 2 * half] + (since[i] if i % window else 0.0)
        means.append(total / n if n else None)
    return means


class Series:
    """One curve: `line` bold, `raw` faint behind it where it is another list; `dots` marks each point."""

    def __init__(self, name, color, x, raw, line, dots=False):
        self.name, self.color, self.x, self.raw, self.line = name, color, x, raw, line
        self.dots = dots or len(x) <= FEW


class Panel:
    """One diagram: its series, and crosses (x, value or None, colour) for skipped updates; `id` is its key in the page."""

    def __init__(self, key, name, unit, page_id=None):
        self.key, self.name, self.unit, self.id = key, name, unit, page_id or key
        self.series, self.crosses = [], []
        self.log = self.clipped = False

    def values(self):
        return [value for series in self.series for value in series.raw if value is not None]

    def spreads(self, ratio):
        values = self.values() or [0]
        return min(values) > 0 and max(values) > ratio * min(values)

    def limits(self):
        values = sorted(self.values()) or [0.0, 1.0]
        cut = len(values) // 50 if self.clipped else 0  # a pause makes one step slow, that is not what the diagram is for
        low, high = values[cut], values[-1 - cut]
        if self.log:
            return low / 1.2, high * 1.2
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return (low - margin if low - margin > 0 or low < 0 else 0.0), high + margin


def loss_unit(runs):
    """What the losses are: of Mamba's head hpn a squared cosine distance, of all others nats."""
    kinds = set()
    for run in runs:
        options = dict(run.settings)
        head, loaded = options.get("options.head", ""), "options.head" in options and options.get("options.from", "") != ""
        kinds.add("(1 - cosine)^2" if head == "hpn" else "nats" if head or not loaded else "")  # "": the head came with the model
    what = "cross entropy, " if any(run.adds_loss for run in runs) else ""
    return what + f"{kinds.pop()} per target".strip() if len(kinds) == 1 else "per target"


def validation_key(runs):
    """Runs of different tokenizers have targets of different lengths: only their bits per byte can be compared."""
    differ = len({dict(run.settings).get("options.tokenizer") for run in runs}) > 1
    records = [record for run in runs for record in run.validations]
    return "val_bpb" if differ and records and all(record["val_bpb"] is not None for record in records) else "val_loss"


def says_something(key, runs):
    """Of a further key: do its numbers change, and are they neither the loss's nor the tokens in another unit?"""
    numbers, is_loss, is_count = [], True, True
    for run in runs:
        first = None
        for record in run.updates + run.validations if key in run.meanings else []:
            value, loss = record[key], record["val_loss" if record["tokens"] is None else "loss"]
            if value is not None:
                numbers.append(value)
                # the same float32 has 9 digits in one place and 17 in another
                is_loss = is_loss and loss is not None and math.isclose(value, loss, rel_tol=1e-6)
                of_a_token = value / record["tokens"] if record["tokens"] else math.nan  # which is close to nothing
                first = of_a_token if first is None else first
                is_count = is_count and math.isclose(of_a_token, first)
    return len(numbers) == 1 or len(set(numbers)) > 1 and not is_loss and not is_count


def own_panels(runs):
    """Without curves yet: one for each further key that says something, as many as there is room for."""
    meanings = {}
    for run in runs:
        meanings.update((key, meaning) for key, meaning in run.meanings.items() if key not in meanings)
    known = list(TITLES)
    keys = sorted((key for key in meanings if key not in DRAWN_ELSEWHERE and says_something(key, runs)),
                  key=lambda key: known.index(key) if key in TITLES else len(known))
    if len(keys) > MOST_OWN:
        left_out = ", ".join(map(printable, keys[MOST_OWN:]))
        print(f"of {len(keys)} further keys {MOST_OWN} are drawn: make dashboard has {left_out} too")
    return [Panel(key, TITLES.get(key) or printable(key), printable(meanings[key]), f"own{i}")
            for i, key in enumerate(keys[:MOST_OWN])]


def make_panels(runs):
    """
    In rows, the first of large ones, the loss before all others. Validation is drawn into the diagram of the loss when there
    is one run, else into one of its own.
    """
    several = len(runs) > 1
    half = max(len(run.updates) for run in runs) // 100  # of the longest, so that all are smoothed alike
    loss, rate = Panel("loss", "loss", loss_unit(runs)), Panel("lr", "learning rate", "")
    key = validation_key(runs)
    unit = loss_unit(runs) if key == "val_loss" else "bits per byte: the tokenizers differ"
    validation = Panel(key, "validation loss", unit)
    examples = Panel(EXAMPLES, "HellaSwag accuracy", "share of examples")
    norm, speed = Panel("norm", "gradient norm", ""), Panel("tok_per_s", "speed", "tokens/s")
    accuracy = Panel(ACCURACY, "accuracy", "share of targets found")
    load = Panel(LOAD, "expert load", "busiest expert, multiple of the mean")
    noise, own = Panel(NOISE_SCALE, "gradient noise scale", "targets"), own_panels(runs)
    for color, run in enumerate(runs):
        name = run.name if several else "training (faint: each step)"
        of_all, of_some = (loss, norm, speed), [accuracy, load] + [panel for panel in own if panel.key in run.meanings]
        for panel in (*of_all, *of_some):
            x, records = run.computed(panel.key)
            raw = [record[panel.key] for record in records]
            # without skipped updates, whose outliers would bend the line
            made = [None if record["skipped"] else record[panel.key] for record in records]
            if panel in of_all or any(value is not None for value in raw):
                panel.series.append(Series(name, color, x, raw, smooth(made, half)))
        measured = [(x, record[NOISE_SCALE]) for x, record in zip(run.x, run.updates) if record[NOISE_SCALE] is not None]
        if measured:
            x, scales = [list(column) for column in zip(*measured)]
            noise.series.append(Series(run.name if several else "smoothed over 100 measurements", color, x, scales, scales))
        rates = run.column("lr")
        rate.series.append(Series(name, color, run.x, rates, rates))
        norm.crosses += [(x, record["norm"], color) for x, record in zip(run.x, run.updates) if record["skipped"]]
        for panel in of_some:
            x, found = run.checked(panel.key)
            if found:
                label = f"{name}, validation" if several else "validation"
                panel.series.append(Series(label, color if several else 1, x, found, found, dots=len(found) < 60))
        tested = [record[EXAMPLES] for record in run.tests]
        if tested:
            line = Series(run.name if several else "HellaSwag", color, run.test_x, tested, tested, dots=len(tested) < 60)
            examples.series.append(line)
        checked = [record[key] for record in run.validations]
        if checked:
            target, label = (validation, name) if several else (loss, "validation")
            line = Series(label, color if several else 1, run.validation_x, checked, checked, dots=len(checked) < 60)
            target.series.append(line)
        x, losses = run.checked(AVERAGED_LOSS)
        if losses and not several:  # beside its own validation; of several runs this would be too much
            loss.series.append(Series("validation, averaged weights", 2, x, losses, losses, dots=len(losses) < 60))
    loss.log, validation.log, norm.log, speed.clipped = loss.spreads(20), validation.spreads(20), norm.spreads(10), True
    noise.log = noise.spreads(10)
    for panel in own:
        panel.log = panel.spreads(20)
    large, small, own = [[panel for panel in some if panel.series] for some in (
        (loss, validation, accuracy, examples, load), (rate, norm, noise, speed), own)]
    apart, together = in_rows(small) + in_rows(own), in_rows(small + own)
    return [large] + min(apart, together, key=len)


def in_rows(panels):
    """Rows of nearly the same length."""
    n_rows, rows, at = math.ceil(len(panels) / MOST_IN_ROW), [], 0
    for row in range(n_rows):
        n = math.ceil((len(panels) - at) / (n_rows - row))
        rows.append(panels[at:at + n])
        at += n
    return rows


def short(n):
    """25000 -> 25k, 1200000 -> 1.2M; small numbers with the digits they need."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size <= abs(n) < 1e16:
            return f"{n / size:.4g}{letter}"
    return f"{n:.4g}"


def recent(run, key):
    """Mean of the last fiftieth of a column, as text."""
    records = run.computed(key)[1]
    values = [record[key] for record in records[-max(1, len(records) // 50):] if record[key] is not None]
    return f"{sum(values) / len(values):.4f}" if values else "not finite" if run.updates else "-"


def recent_speed(run):
    """Median of the last fiftieth of the updates, of 20 at least, as text: a save or another program slows a single one."""
    records = run.updates[-max(20, len(run.updates) // 50):]
    speeds = [record["tok_per_s"] for record in records if record["tok_per_s"] is not None]
    return short(statistics.median(speeds)) if speeds else "-"


def best_validation(run, key="val_loss"):
    return min(run.validations, key=lambda record: record[key])


def summary(run):
    """(name, value) pairs: where the run stands."""
    pairs = []
    if run.updates:
        pairs.append(("step", str(run.updates[-1]["step"])))
        pairs.append(("recent loss", recent(run, "loss")))
    if run.validations:
        best = best_validation(run)
        pairs.append(("validation loss", f"{run.validations[-1]['val_loss']:.4f}"))
        pairs.append((f"best at {short(best['step'])}", f"{best['val_loss']:.4f}"))
        if run.validations[-1][ACCURACY] is not None:
            pairs.append(("validation accuracy", f"{100 * run.validations[-1][ACCURACY]:.1f}%"))
        if run.validations[-1]["val_bpb"] is not None:
            pairs.append(("bits per byte", f"{run.validations[-1]['val_bpb']:.3f}"))
    if run.tests:
        pairs.append(("HellaSwag", f"{100 * run.tests[-1][EXAMPLES]:.1f}%"))
    if run.updates:
        pairs.append(("tokens", short(run.updates[-1]["tokens"])))
        if recent_speed(run) != "-":
            pairs.append(("tokens/s", recent_speed(run)))
        n_skipped = sum(1 for record in run.updates if record["skipped"])
        if n_skipped:
            pairs.append(("skipped", str(n_skipped)))
    return pairs


def differing_settings(runs):
    """Rows (name, value of each run) of the settings that are not the same in all."""
    every = [dict(run.settings) for run in runs]
    names = [name for name, _ in max((run.settings for run in runs), key=len)]
    rows = [(name, [settings.get(name, "-") for settings in every]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1 and name not in SAME_IN_NONE]


# ---- PNG ----


def plain(text):
    """A name for matplotlib, which reads what stands between two $ as a formula."""
    return text.replace("$", r"\$")


def with_gaps(values):
    return [float("nan") if value is None else value for value in values]


def draw_axes(axes, panel, n_letters):
    for series in panel.series:
        dash = DASHES[series.color // len(COLORS) % len(DASHES)]
        style = {"color": COLORS[series.color % len(COLORS)],
                 "linestyle": (0, [float(n) / 1.6 for n in dash.split()]) if dash else "-"}
        if series.line is not series.raw:
            axes.plot(series.x, with_gaps(series.raw), color=style["color"], alpha=0.25, linewidth=0.8)
        axes.plot(series.x, with_gaps(series.line), linewidth=1.7, label=plain(series.name), marker="o" if series.dots else None,
                  markersize=4, **style)
    axes.set_yscale("log" if panel.log else "linear")
    axes.set_ylim(*panel.limits())
    for x, value, color in panel.crosses:
        y = panel.limits()[0] if value is None else value
        axes.plot(x, y, "x", color=COLORS[color % len(COLORS)], markersize=7, clip_on=False)
    title = plain(panel.name) + (" (x: skipped)" if panel.crosses else "")
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    lines = textwrap.wrap(panel.unit, n_letters, max_lines=3, placeholder=" ...")
    axes.set_ylabel(plain("\n".join(lines)), fontsize=10 if len(lines) < 2 else 9)


def tidy_axes(axes, panel, x_name, x_range, ticker):
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=10)
    axes.set_xlabel(x_name, fontsize=10)
    margin = 0.01 * (x_range[1] - x_range[0])
    axes.set_xlim(x_range[0] - margin, x_range[1] + margin)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=x_name == "step"))
    axes.xaxis.set_major_formatter(lambda x, _: short(x))
    if panel.log:
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: short(value))


def write_png(path, runs, rows, x_name, x_range):
    """False if there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")  # a file, also where there is no screen
    from matplotlib import pyplot, ticker

    heights = [4.9] + [3.1] * (len(rows) - 1)
    figure = pyplot.figure(figsize=(13, sum(heights)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    grid = figure.add_gridspec(len(rows), 1, height_ratios=heights)
    for r, row in enumerate(rows):
        places = grid[r].subgridspec(1, len(row))
        for i, panel in enumerate(row):
            axes = figure.add_subplot(places[i])
            draw_axes(axes, panel, 60 if r == 0 else 36)
            tidy_axes(axes, panel, x_name, x_range, ticker)
    first = figure.axes[0]
    if len(runs) > 1:  # one legend above all diagrams, which all have the same colours
        labels = first.get_legend_handles_labels()
        figure.legend(*labels, loc="outside upper left", ncols=min(len(runs), 4), frameon=False, fontsize=11)
    else:
        title = f"{plain(runs[0].name)}:  " + "  |  ".join(f"{key} {value}" for key, value in summary(runs[0]))
        figure.suptitle(title, x=0.01, ha="left", fontsize=min(11, 1850 / len(title)))  # as wide as the picture at most
        if len(rows[0][0].series) > 1:
            first.legend(frameon=False, fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


# ---- HTML: SVG written by hand, a little script for the pointer ----


def ticks(low, high, log, most=6):
    """Round numbers inside the range, at most so many: 1, 2, 5 times a power of ten."""
    if log:
        decades = math.log10(high) - math.log10(low)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1, math.ceil(decades / most))
        factors = (1, 2, 5) if decades < 3 else (1,)
        every = [factor * 10.0**power for power in powers for factor in factors]
    else:
        size = 10.0 ** math.floor(math.log10((high - low) / most))
        size *= next(factor for factor in (1, 2, 5, 10) if factor * size * most >= high - low)
        every = [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]
    return [value for value in every if low <= value <= high]


def thin(xs, values, width):
    """Where steps are closer than pixels, the lowest and the highest of each stretch: looks the same, stays small."""
    size = math.ceil(len(xs) / width)
    if size < 2:
        return list(zip(xs, values))
    points = []
    for first in range(0, len(xs), size):
        stretch = [(value, i) for i, value in enumerate(values[first:first + size], first) if value is not None]
        chosen = sorted({min(stretch)[1], max(stretch)[1]}) if stretch else [first]
        points += [(xs[i], values[i]) for i in chosen]
    return points


class Scale:
    """Positions and values to the pixels of one SVG."""

    def __init__(self, panel, x_range, width, height):
        self.left, self.right, self.top, self.bottom = MARGIN_LEFT, width - MARGIN_RIGHT, 10, height - 36
        self.x_range, (self.low, self.high), self.log = x_range, panel.limits(), panel.log

    def x(self, x):
        first, last = self.x_range
        return self.left + (x - first) / (last - first) * (self.right - self.left)

    def y(self, value):
        low, high, v = (math.log(n) if self.log else n for n in (self.low, self.high, value))
        return self.bottom - (v - low) / (high - low) * (self.bottom - self.top)

    def path(self, points):
        """The d of an SVG path; a missing value lifts the pen."""
        parts, pen = [], "M"
        for x, value in points:
            if value is None:
                pen = "M"
            else:
                parts.append(f"{pen}{self.x(x):.1f} {self.y(value):.1f}")
                pen = "L"
        return "".join(parts)


def color_of(series):
    dash = DASHES[series.color // len(COLORS) % len(DASHES)]
    return f"--c: var(--c{series.color % len(COLORS)})" + (f"; stroke-dasharray: {dash}" if dash else "")


def svg_series(series, scale, width):
    out = []
    if series.line is not series.raw:
        out.append(f'<path class="raw" style="{color_of(series)}" d="{scale.path(thin(series.x, series.raw, width))}"/>')
    out.append(f'<path class="line" style="{color_of(series)}" d="{scale.path(thin(series.x, series.line, width))}"/>')
    if series.dots:
        out += [f'<circle style="{color_of(series)}" cx="{scale.x(x):.1f}" cy="{scale.y(value):.1f}" r="3"/>'
                for x, value in zip(series.x, series.line) if value is not None]
    return out


def svg_panel(panel, x_name, x_range, width, height):
    scale = Scale(panel, x_range, width, height)
    out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(panel.name)}">']
    for value in ticks(scale.low, scale.high, scale.log, height // 40):
        y = scale.y(value)
        out.append(f'<path class="grid" d="M{scale.left} {y:.1f}H{scale.right}"/>')
        out.append(f'<text class="y" x="{scale.left - 7}" y="{y + 4:.1f}">{short(value)}</text>')
    for x in ticks(*x_range, False, width // 70):
        if x == int(x) or x_name != "step":
            out.append(f'<text class="x" x="{scale.x(x):.1f}" y="{scale.bottom + 17}">{short(x)}</text>')
    out.append(f'<path class="axis" d="M{scale.left} {scale.bottom}H{scale.right}"/>')
    out.append(f'<text class="x" x="{(scale.left + scale.right) / 2}" y="{height - 4}">{x_name}</text>')
    box = f'width="{scale.right - scale.left + 8}" height="{scale.bottom - scale.top + 8}"'
    out.append(f'<clipPath id="clip-{panel.id}"><rect x="{scale.left - 4}" y="{scale.top - 4}" {box}/></clipPath>')
    out.append(f'<g clip-path="url(#clip-{panel.id})">')
    for series in panel.series:
        out += svg_series(series, scale, width)
    for x, value, color in panel.crosses:
        x, y = scale.x(x), scale.bottom if value is None else scale.y(value)
        style = f"--c: var(--c{color % len(COLORS)})"
        out.append(f'<path class="skipped" style="{style}" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8"/>')
    out.append(f'</g><path class="cursor" d="M0 {scale.top}V{scale.bottom}"/></svg>')
    return "\n".join(out)


PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$name</title>
<style>
:root { --back: #fff; --card: #f8fafc; --text: #0f172a; --quiet: #566275; --rule: #e2e8f0; $colors }
@media (prefers-color-scheme: dark) {
  :root { --back: #0f172a; --card: #1e293b; --text: #f1f5f9; --quiet: #a5b1c2; --rule: #334155; $dark_colors }
}
body {
  font: 15px/1.5 system-ui, sans-serif; background: var(--back); color: var(--text);
  max-width: 1150px; margin: 2rem auto; padding: 0 1rem;
}
h1 { font-size: 1.3rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
.summary, .large, .small { display: grid; gap: 0.75rem; grid-template-columns: repeat(auto-fit, minmax(115px, 1fr)); }
.large { grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
.small { grid-template-columns: repeat(auto-fit, minmax(min(100%, 240px), 1fr)); }
.summary div, figure { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 0.5rem; }
.summary b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.summary span, figcaption span, .unit { color: var(--quiet); font-size: 0.87rem; }
figure { margin: 0.75rem 0 0; min-width: 0; }
figcaption { display: flex; justify-content: space-between; gap: 1rem; }
.read { font-variant-numeric: tabular-nums; text-align: right; }
svg { width: 100%; height: auto; display: block; touch-action: pan-y; }
text { font-size: 12px; fill: var(--quiet); }
.y { text-anchor: end; } .x { text-anchor: middle; }
path { fill: none; }
.grid, .axis { stroke: var(--rule); } .axis { stroke: var(--quiet); }
.raw { stroke: var(--c); stroke-width: 0.9; opacity: 0.3; } .line { stroke: var(--c); stroke-width: 1.8; }
.raw, .line { stroke-linejoin: round; stroke-linecap: round; }
circle { fill: var(--c); }
.skipped { stroke: var(--c); stroke-width: 2; }
.cursor { stroke: var(--quiet); stroke-dasharray: 3 3; visibility: hidden; }
.key::before {
  content: ""; display: inline-block; width: 0.9em; height: 0.28em; margin: 0 0.35em 0.2em 0.9em; background: var(--c);
}
td.key::before, th.key::before { margin-left: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.93rem; margin-top: 0.5rem; }
td, th { border-top: 1px solid var(--rule); padding: 0.2rem 1.4rem 0.2rem 0; vertical-align: top; text-align: left; }
th { font-weight: 400; }
thead th { border: 0; color: var(--quiet); white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.settings td { overflow-wrap: anywhere; }
.settings td:first-child { color: var(--quiet); white-space: nowrap; }
details { margin: 1.5rem 0; }
summary { cursor: pointer; }
</style>
</head>
<body>
<h1>$name</h1>
$top
$diagrams
$settings
<script>
"use strict";
const data = $data;
// the number whose x is nearest: xs ascend, so halve the range
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) { low = middle + 1; } else { high = middle; }
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}
function number(v) {
  if (v === null) { return "no number"; }
  if (v !== 0 && Math.abs(v) < 0.001) { return v.toExponential(2); }
  return Math.abs(v) >= 1e5 ? Math.round(v).toLocaleString("en") : v.toPrecision(5);
}
// elements "r0-loss" show run 0's loss at the pointer, and what they showed before when it has gone
function write(run, key, text) {
  const place = document.getElementById("r" + run + "-" + key);
  if (!place) { return; }
  if (place.dataset.rest === undefined) { place.dataset.rest = place.textContent; }
  place.textContent = text === null ? place.dataset.rest : text;
}
// x: where the pointer is, between data.first and data.last; null: it has left
function show(x) {
  const along = (x - data.first) / (data.last - data.first);
  document.querySelectorAll("svg").forEach(svg => {
    const cursor = svg.querySelector(".cursor"), width = svg.viewBox.baseVal.width - data.left - data.right;
    cursor.style.visibility = x === null ? "hidden" : "visible";
    cursor.setAttribute("transform", "translate(" + (data.left + along * width) + ")");
  });
  data.runs.forEach((run, r) => {
    const i = nearest(run.x, x), v = nearest(run.vx, x);
    for (const key in run.updates) { write(r, key, x === null ? null : run.x.length ? number(run.updates[key][i]) : "-"); }
    for (const key in run.checks) { write(r, key, x === null ? null : run.vx.length ? number(run.checks[key][v]) : "-"); }
    write(r, "step", x === null ? null : run.x.length ? data.step + run.step[i] : "-");
    write(r, "val_loss", x === null ? null : run.vx.length ? data.validation + number(run.val_loss[v]) : "-");
  });
}
document.querySelectorAll("svg").forEach(svg => {
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), width = svg.viewBox.baseVal.width;
    const along = ((event.clientX - box.left) / box.width * width - data.left) / (width - data.left - data.right);
    show(data.first + Math.min(1, Math.max(0, along)) * (data.last - data.first));
  });
  svg.addEventListener("pointerleave", () => show(null));
});
</script>
</body>
</html>
""")


def key_of(color):
    return f'class="key" style="--c: var(--c{color % len(COLORS)})"'


def figure_html(panel, x_name, x_range, width, height, single):
    """A diagram under its caption; with one run the caption also has the places where the script writes its numbers."""
    keys = ""
    if single and len(panel.series) > 1:
        keys = "".join(f"<span {key_of(series.color)}>{series.name}</span>" for series in panel.series)
    if panel.crosses:
        keys += "<span> x: skipped</span>"
    places = ("step", "loss", "val_loss") if panel.key == "loss" else (panel.id,)
    read = " ".join(f'<span id="r0-{key}"></span>' for key in places) if single else ""
    name, unit = html.escape(panel.name), html.escape(panel.unit)
    return (f'<figure><figcaption><div><b>{name}</b> <span class="unit">{unit}</span>{keys}</div>'
            f'<div class="read">{read}</div></figcaption>\n{svg_panel(panel, x_name, x_range, width, height)}\n</figure>')


def runs_table(runs):
    """A row for each run: where it stands, or what it was at the pointer."""
    rows, checked = [], validation_key(runs)
    for r, run in enumerate(runs):
        last = run.updates[-1] if run.updates else dict.fromkeys(KEYS)
        text = {key: "-" if last[key] is None else short(last[key]) for key in ("step", "lr", "norm", "tokens")}
        text["step"] = "-" if last["step"] is None else str(last["step"])
        text["loss"], text["tok_per_s"] = recent(run, "loss"), recent_speed(run)
        text["val_loss"] = f"{run.validations[-1][checked]:.4f}" if run.validations else "-"
        lowest = best_validation(run, checked) if run.validations else None
        best = f"{lowest[checked]:.4f} at {lowest['step']}" if lowest else "-"
        cells = "".join(f'<td class="number" id="r{r}-{key}">{text[key]}</td>'
                        for key in ("step", "loss", "val_loss", "lr", "norm", "tok_per_s"))
        rows.append(f'<tr><td {key_of(r)}>{html.escape(run.name)}</td>{cells}<td class="number">{best}</td>'
                    f'<td class="number">{text["tokens"]}</td></tr>')
    validation = "validation" if checked == "val_loss" else "validation, bits per byte"
    titles = ("step", "loss", validation, "learning rate", "norm", "tokens/s", f"best {validation}", "tokens in all")
    head = "<th>run</th>" + "".join(f'<th class="number">{title}</th>' for title in titles)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def settings_html(runs):
    if len(runs) == 1:
        title, head, rows = "settings", "", [(name, [value]) for name, value in runs[0].settings]
    else:
        title, rows = "settings that differ", differing_settings(runs)
        names = "".join(f"<th {key_of(r)}>{html.escape(run.name)}</th>" for r, run in enumerate(runs))
        head = f"<thead><tr><th></th>{names}</tr></thead>"
    if not rows:
        return ""
    cells = "".join(f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{html.escape(value)}</td>' for value in values)}</tr>"
                    for name, values in rows)
    opened = " open" if len(runs) > 1 else ""
    table = f'<div class="scroll"><table class="settings">{head}{cells}</table></div>'
    return f"<details{opened}><summary>{title}</summary>{table}</details>"


def pointer_data(run, checked, panels):
    """The columns that the pointer can read: of updates, at most about 4000 rows of them, and what only validations have."""
    stride = math.ceil(len(run.updates) / 4000) or 1

    def rounded(values):
        return [value if value is None else float(f"{value:.6g}") for value in values]

    updates = {key: rounded(run.column(key)[::stride]) for key in ("loss", "lr", "norm", "tok_per_s")}
    checks = {}
    for panel in panels:
        if panel.key in (ACCURACY, LOAD) or panel.id != panel.key:
            if any(record[panel.key] is not None for record in run.updates):
                updates[panel.id] = rounded(run.column(panel.key)[::stride])
            else:
                checks[panel.id] = rounded(record[panel.key] for record in run.validations)
    return {"x": run.x[::stride], "step": run.column("step")[::stride], "updates": updates, "vx": run.validation_x,
            "checks": checks, "val_loss": rounded(record[checked] for record in run.validations)}


def write_html(path, runs, rows, x_name, x_range):
    single = len(runs) == 1
    data = {"first": x_range[0], "last": x_range[1], "left": MARGIN_LEFT, "right": MARGIN_RIGHT,
            "step": "step " if single else "", "validation": "| validation " if single else "",
            "runs": [pointer_data(run, validation_key(runs), sum(rows, []) if single else []) for run in runs]}
    diagrams = []
    for row in rows:
        size, height = ("large", 400) if row is rows[0] else ("small", 230)
        figures = [figure_html(panel, x_name, x_range, 1120 // len(row), height, single) for panel in row]
        diagrams.append(f'<div class="{size}">' + "\n".join(figures) + "</div>")
    cards = "".join(f"<div><span>{key}</span><b>{value}</b></div>" for key, value in summary(runs[0]))
    page = PAGE.substitute(
        name=html.escape(runs[0].name if single else " / ".join(run.name for run in runs)),
        colors=" ".join(f"--c{i}: {color};" for i, color in enumerate(COLORS)),
        dark_colors=" ".join(f"--c{i}: {color};" for i, color in enumerate(DARK_COLORS)),
        top=f'<div class="summary">{cards}</div>' if single else runs_table(runs),
        diagrams="\n".join(diagrams), data=json.dumps(data, separators=(",", ":")),
        settings=settings_html(runs))
    with open(path, "w", encoding="utf-8", errors="replace") as file:  # settings may hold halves of characters
        file.write(page)


# ---- main ----


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(f"{message} (--help tells more)")


def parse_arguments(arguments):
    parser = Parser(prog="plot.py", description=__doc__.strip(), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, with its metrics.jsonl")
    parser.add_argument("--x", choices=("step", "tokens", "time"), default="step", help="horizontal axis (step)")
    parser.add_argument("--out", metavar="NAME", help="write NAME.png and NAME.html instead")
    return parser.parse_args(arguments)


def main(arguments):
    sys.stdout.reconfigure(errors="surrogateescape")  # names of folders need not be UTF-8
    options = parse_arguments(arguments)
    options.runs = [folder for text in options.runs for folder in split_folders(text) or [text]]
    runs = read_runs(options.runs)
    x_name, x_range = place_runs(runs, options.x)
    rows = make_panels(runs)
    first = os.path.normpath(options.runs[0])
    beside = os.path.join(first, "..") if os.path.basename(first) in (".", "..") else os.path.dirname(first)
    compare = os.path.join(beside, "compare")
    name = options.out or (os.path.join(options.runs[0], "loss") if len(options.runs) == 1 else compare)
    path = f"{name}.html"
    try:
        write_html(path, runs, rows, x_name, x_range)
        print(f"wrote {path}")
        path = f"{name}.png"
        drawn = write_png(path, runs, rows, x_name, x_range)
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
