"use strict";
/*
Draws the runs that dashboard.py serves. Every two seconds it asks which runs there are (/runs) and fetches the records
that are new (/columns, doubles); a diagram has every one of them: where several fall on a column of pixels, the line
goes from the lowest to the highest. Text of runs enters the page by append and textContent only: none of it is HTML.

    Run       records, by key a column of doubles; NaN is null. One with tokens is an update, one without a validation
    Curve     what is drawn of a run: x, y of the records that have the key
    Panel     a diagram: its curves, axes, what the pointer reads
*/

// ---- helpers ----

const $ = id => document.getElementById(id);

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) { element.className = className; }
  element.append(...children);  // a string becomes text
  return element;
}

// 25000 -> 25k, 1200000 -> 1.2M; at most so many digits
function short(n, most = 4) {
  const size = Math.abs(n);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit && size < 1e16) { return Number((n / unit).toPrecision(most)) + letter; }
  }
  const isPlain = size === 0 || size >= 0.001 && size < 1e16;
  return isPlain ? String(Number(n.toPrecision(most))) : n.toExponential(2).replace(/\.?0+e/, "e");
}

const count = (n, thing) => n + " " + thing + (n === 1 ? "" : "s");

// all digits that the number needs to read back to the same bits
const digits = n => Number.isNaN(n) ? "not finite" : String(n);

function duration(seconds) {
  const s = Math.round(seconds);
  if (s < 60) { return s + " s"; }
  if (s < 3600) { return Math.floor(s / 60) + "m" + (s < 600 ? " " + s % 60 + "s" : ""); }
  if (s < 86400) { return Math.floor(s / 3600) + "h " + Math.floor(s % 3600 / 60) + "m"; }
  return Math.floor(s / 86400) + "d " + Math.floor(s % 86400 / 3600) + "h";
}

// index of the number nearest to x; they ascend, so halve the range
function nearest(xs, x) {
  const i = lowerBound(xs, x);
  return i > 0 && (i === xs.length || x - xs[i - 1] < xs[i] - x) ? i - 1 : i;
}
// index of the first number that is not below x
function lowerBound(xs, x) {
  let low = 0, high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) { low = middle + 1; } else { high = middle; }
  }
  return low;
}

// a key or frame in the colour and dashes of a run or curve
function mark(element, {color, dash}) {
  element.style.setProperty("--c", color);
  element.dataset.dash = dash;
  return element;
}

// a place in the browser to remember what was chosen; where it is switched off, nothing is remembered
function recall(name, otherwise) {
  try { return JSON.parse(localStorage.getItem("llmc-" + name)) ?? otherwise; } catch { return otherwise; }
}
function remember(name, value) {
  try { localStorage.setItem("llmc-" + name, JSON.stringify(value)); } catch { /* not remembered */ }
}

// ---- runs ----

const runs = [];      // Run, by number
let server = null;    // the last answer to /runs
let hidden = new Set(recall("hidden", []));  // paths of the runs that are not drawn

class Run {
  constructor(info) {
    this.info = info;
    this.forget(0);
    this.settings = this.samples = null;  // {version, ...} of /settings and /samples
    this.shownStep = null;                // the step of the sample that is shown; null: the last
    this.card = null;
  }
  forget(generation) {
    this.generation = generation;
    this.rows = 0;
    this.columns = new Map();
    this.derived = new Map();  // curves and positions, until there are more records
  }
  get shown() { return !hidden.has(this.info.path); }
  get color() { return palette(this.info.id); }
  get dash() { return Math.floor(this.info.id / server.colors.length) % server.dashes.length; }  // of server.dashes

  // /columns: a line of JSON, then doubles
  take(buffer) {
    const bytes = new Uint8Array(buffer), end = bytes.indexOf(10) + 1;
    const head = JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)));
    if (head.generation !== this.generation || head.from !== this.rows) { this.forget(head.generation); }
    if (head.from !== this.rows) { return 0; }  // asked again, from the start
    head.keys.forEach((key, k) => {
      const values = new Float64Array(buffer, end + 8 * k * head.rows, head.rows);
      this.columns.set(key, grown(this.columns.get(key), this.rows, values));
    });
    this.rows += head.rows;
    this.derived.clear();
    return head.rows;
  }
  // the routers of a mixture add a loss of their own; without it runs compare, and training with validation
  get addsLoss() { return this.columns.has("cross_entropy"); }
  column(key) { return this.columns.get(key === "loss" && this.addsLoss ? "cross_entropy" : key)?.subarray(0, this.rows); }
  once(name, compute) {
    if (!this.derived.has(name)) { this.derived.set(name, compute()); }
    return this.derived.get(name);
  }
  // rows that are updates, and those that are not
  get updates() { return this.once("updates", () => this.rowsWhere(tokens => !Number.isNaN(tokens))); }
  get checks() { return this.once("checks", () => this.rowsWhere(Number.isNaN)); }
  rowsWhere(test) {
    const tokens = this.column("tokens"), found = [];
    for (let i = 0; i < this.rows; i++) { if (test(tokens ? tokens[i] : NaN)) { found.push(i); } }
    return found;
  }
  // x of every row. A validation stands at the update before it. Tokens or times that go back stand still: x ascends
  get x() {
    return this.once("x " + options.axis, () => {
      const steps = this.column("step"), tokens = this.column("tokens"), ms = this.column("ms");
      const xs = new Float64Array(this.rows);
      let x = 0;
      for (let i = 0; i < this.rows; i++) {
        if (options.axis === "step") { x = steps[i]; }
        else if (!tokens || Number.isNaN(tokens[i])) { /* no update */ }
        else if (options.axis === "tokens") { x = Math.max(x, tokens[i]); }
        else { x += Math.max(0, ms?.[i] || 0) / 1000; }
        xs[i] = x;
      }
      return xs;
    });
  }
  // the records that have the key, of updates or of checks; an update that was skipped leaves a gap
  curve(key, ofUpdates) {
    return this.once(options.axis + " " + ofUpdates + " " + key, () => {
      const column = this.column(key), skipped = this.column("skipped"), x = this.x;
      const rows = !column ? [] : (ofUpdates ? this.updates : this.checks)
        .filter(i => !Number.isNaN(column[i]) || ofUpdates && skipped?.[i] === 1);
      const y = Float64Array.from(rows, i => column[i]);
      return {rows, x: Float64Array.from(rows, i => x[i]), y, any: y.some(v => !Number.isNaN(v))};
    });
  }
  last(key) {
    const {y} = this.curve(key, true);
    return y.length ? y[y.length - 1] : NaN;
  }
  // mean of the last fiftieth
  recent(key) {
    const {y} = this.curve(key, true), n = Math.max(1, Math.floor(y.length / 50));
    const values = y.slice(-n).filter(v => !Number.isNaN(v));
    return values.reduce((sum, v) => sum + v / values.length, values.length ? 0 : NaN);
  }
  // median of as many, of 20 at least: a save or another program slows a single step
  recentMedian(key) {
    const {y} = this.curve(key, true), n = Math.max(20, Math.floor(y.length / 50));
    const values = y.slice(-n).filter(v => !Number.isNaN(v)).sort(), half = values.length >> 1;  // Float64Array: as numbers
    return values.length % 2 ? values[half] : (values[half - 1] + values[half]) / 2;  // of none: NaN
  }
}

// old (of which n count) and values in one array with room to grow; a key that is new has no values before
function grown(old, n, values) {
  const needed = n + values.length;
  let data = old;
  if (!data || data.length < needed) {
    data = new Float64Array(Math.max(needed, 2 * n)).fill(NaN);
    if (old) { data.set(old.subarray(0, n)); }
  }
  data.set(values, n);
  return data;
}

// mean over `half` values before and after each, as plot.py's smooth; missing values (NaN) are left out
function smooth(y, half) {
  const n = y.length, length = 2 * half + 1, room = n + 2 * half;
  const until = new Float64Array(room), since = new Float64Array(room);
  const counts = new Float64Array(n + 1), means = new Float64Array(n);
  for (let i = 0; i < n; i++) {
    until[i + half] = since[i + half] = Number.isNaN(y[i]) ? 0 : y[i] / length;  // divided first: no sum overflows
    counts[i + 1] = counts[i] + (Number.isNaN(y[i]) ? 0 : 1);
  }
  for (let i = 0; i < room; i++) { if (i % length) { until[i] += until[i - 1]; } }
  for (let i = room - 2; i >= 0; i--) { if ((i + 1) % length) { since[i] += since[i + 1]; } }
  for (let i = 0; i < n; i++) {
    const count = counts[Math.min(n, i + half + 1)] - counts[Math.max(0, i - half)];
    means[i] = count ? (until[i + 2 * half] + (i % length ? since[i] : 0)) * (length / count) : NaN;
  }
  return means;
}

// ---- what is chosen in the controls ----

const options = {axis: recall("axis", "step"), smooth: recall("smooth", "auto"), scale: recall("scale", "auto"),
                 theme: recall("theme", "auto")};
let zoom = null;  // [first, last] of x, or null: all

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => options.theme === "auto" ? systemIsDark.matches : options.theme === "dark";
function palette(i) {
  const colors = isDark() ? server.dark_colors : server.colors;
  return colors[i % colors.length];
}
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name);
const chosen = () => runs.filter(run => run.shown && run.rows > 0);

function halfWindow(drawn) {
  if (options.smooth !== "auto") { return Number(options.smooth); }
  return Math.floor(Math.max(0, ...drawn.map(run => run.updates.length)) / 100);
}

function wholeRange(drawn) {
  const ends = drawn.flatMap(run => [run.x[0], run.x[run.rows - 1]]);
  const first = Math.min(...ends), last = Math.max(...ends);
  return ends.length ? [first, last > first ? last : first + 1] : [0, 1];
}

function axisText(x) {
  if (options.axis === "time") { return duration(x) + " of training"; }
  return options.axis === "step" ? "step " + Math.round(x) : Math.round(x).toLocaleString("en") + " tokens";
}

// ---- diagrams ----

const inPercent = (v, most) => short(100 * v, most);

// log: the ratio of largest and smallest from which the scale is logarithmic unless chosen otherwise
const PANELS = [
  {key: "loss", name: "loss", place: "large", log: 20},
  {key: "val_loss", name: "validation loss", place: "large", log: 20},
  {key: "norm", name: "gradient norm", place: "small", log: 10},
  {key: "lr", name: "learning rate", place: "small"},
  {key: "tok_per_s", name: "speed", unit: "tokens/s", place: "small"},
  {key: "peak", name: "speed", unit: "% of the machine's peak", place: "small", format: inPercent},
  {key: "load", name: "expert load", unit: "busiest expert, multiple of the mean", place: "small"},
  {key: "acc1", name: "accuracy", unit: "% of targets", place: "small", format: inPercent},
  {key: "accuracy", name: "HellaSwag accuracy", unit: "% of examples", place: "small", format: inPercent},
];

// runs of different tokenizers have targets of different lengths: only their bits per byte can be compared
function validationKey(drawn) {
  const checked = drawn.filter(run => run.curve("val_loss", false).any);
  const names = new Set(drawn.map(run => run.settings?.map?.get("options.tokenizer")));
  const inBytes = names.size > 1 && checked.length > 0 && checked.every(run => run.curve("val_bpb", false).any);
  return inBytes ? "val_bpb" : "val_loss";
}

const NO_PANEL = new Set(["step", "tokens", "time", "skipped", "cross_entropy"]);
const SMOOTH_ALREADY = new Set(["lr", "epoch"]);
const MEMORY = /^rss_mb$|memory|_bytes$/;

const LEFT = 60, RIGHT = 12, TOP = 8, BOTTOM = 24;  // margins, in CSS pixels
const FEW_DOTS = 60;

// round numbers inside the range, at most about so many: 1, 2, 5 times a power of ten
function ticks(low, high, log, most) {
  const found = [];
  if (log) {
    const decades = Math.log10(high) - Math.log10(low), stride = Math.max(1, Math.ceil(decades / most));
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += stride) {
      for (const factor of decades < 3 ? [1, 2, 5] : [1]) { found.push(factor * 10 ** power); }
    }
  } else {
    const rough = high / most - low / most, power = 10 ** Math.floor(Math.log10(rough));
    const size = power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999);
    const first = Math.ceil(low / size);
    for (let i = 0; i <= most + 1; i++) { found.push((first + i) * size); }
  }
  const seen = found.filter(value => value >= low && value <= high);
  return log && seen.length < 3 ? ticks(low, high, false, most) : seen;  // a part of a decade
}

// as many as neighbours need to differ
function digitsOf(values) {
  const size = Math.min(...values.slice(1).map((value, i) => value - values[i]));
  const largest = Math.max(...values.map(Math.abs));
  return values.length < 2 ? 4 : Math.max(4, Math.min(15, Math.ceil(Math.log10(largest / size)) + 1));
}

class Panel {
  constructor(definition) {
    Object.assign(this, definition);
    this.canvas = make("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.caption = make("figcaption");
    this.cursor = make("div", "cursor");
    this.shade = make("div", "zoom");
    this.figure = make("figure", "", this.caption, this.canvas, this.cursor, this.shade);
    $(this.place).append(this.figure);
    this.curves = [];
    listen(this);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  // which curves, of the runs that are drawn
  choose(drawn) {
    const single = drawn.length === 1;
    this.curves = [];
    for (const run of drawn) {
      const training = run.curve(this.key, true);
      const key = this.key === "val_loss" ? validationKey(drawn) : this.key;
      const check = run.curve(single && this.key === "loss" ? "val_loss" : key, false);
      const own = {run, color: run.color, dash: run.dash, key: this.key, label: run.info.name};
      if (training.any || training.rows.length && this.key === "norm") {
        this.curves.push({...own, ...training, isTraining: true, label: single ? "training" : own.label});
      }
      if (check.any && !(single && this.key === "val_loss" && run.curve("loss", true).any)) {
        const both = training.any && !single;
        this.curves.push({...own, ...check, isTraining: false, color: single ? palette(run.info.id + 1) : run.color,
                          label: single ? "validation" : both ? own.label + ", validation" : own.label});
      }
    }
    this.figure.hidden = this.curves.length === 0;
    const half = halfWindow(drawn);
    for (const curve of this.curves) {
      const smoothed = curve.isTraining && half > 0 && !SMOOTH_ALREADY.has(this.key);
      curve.line = smoothed ? this.smoothed(curve, half) : curve.y;
    }
    this.drawn = drawn;
    this.draw();
  }
  // without skipped updates, whose outliers would bend the line
  smoothed(curve, half) {
    return curve.run.once(["smooth", options.axis, half, this.key].join(" "), () => {
      const skipped = curve.run.column("skipped");
      return smooth(skipped ? curve.y.map((v, i) => skipped[curve.rows[i]] === 1 ? NaN : v) : curve.y, half);
    });
  }

  // range of y where it is seen: everything that is drawn has a place
  limits() {
    let low = Infinity, high = -Infinity, positive = Infinity;
    this.below = 0;
    for (const {x, y} of this.curves) {
      for (let i = lowerBound(x, this.range[0]); i < x.length && x[i] <= this.range[1]; i++) {
        if (y[i] < low) { low = y[i]; }
        if (y[i] > high) { high = y[i]; }
        if (y[i] > 0) { positive = Math.min(positive, y[i]); } else if (y[i] <= 0) { this.below++; }
      }
    }
    const spreads = low > 0 && high / low > this.log;
    this.isLog = positive < Infinity && (options.scale === "log" || options.scale === "auto" && spreads);
    if (!this.isLog) { this.below = 0; }
    if (low > high) { [low, high] = [0, 1]; }
    if (this.isLog) { return [Math.max(Number.MIN_VALUE, positive / 1.1), Math.min(Number.MAX_VALUE, high * 1.1)]; }
    const margin = 0.05 * (high / 2 - low / 2) * 2 || 0.05 * Math.abs(high) || 1;
    const least = low - margin > 0 || low < 0 ? low - margin : 0;
    return [Math.max(-Number.MAX_VALUE, least), Math.min(Number.MAX_VALUE, high + margin)];
  }

  toX(x) { return LEFT + (x - this.range[0]) / (this.range[1] - this.range[0]) * (this.width - LEFT - RIGHT); }
  fromX(px) {
    const along = Math.min(1, Math.max(0, (px - LEFT) / (this.width - LEFT - RIGHT)));
    return this.range[0] + along * (this.range[1] - this.range[0]);
  }
  toY(y) {
    const [low, high] = this.yRange;
    const up = this.isLog ? (Math.log(y) - Math.log(low)) / (Math.log(high) - Math.log(low))
      : (y / 2 - low / 2) / (high / 2 - low / 2);  // halves: the difference of two large numbers may have no room
    return this.height - BOTTOM - up * (this.height - TOP - BOTTOM);
  }

  draw() {
    if (this.figure.hidden || !this.canvas.clientWidth) { return; }
    const scale = devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.range = zoom ?? wholeRange(this.drawn);
    this.yRange = this.limits();
    const ctx = this.canvas.getContext("2d");
    ctx.scale(scale, scale);
    this.drawAxes(ctx);
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT - 3, TOP - 4, this.width - LEFT - RIGHT + 6, this.height - TOP - BOTTOM + 8);
    ctx.clip();
    ctx.lineJoin = ctx.lineCap = "round";
    const faint = Math.max(0.08, Math.min(0.3, 1.2 / this.curves.length));
    for (const curve of this.curves) { if (curve.line !== curve.y) { this.trace(ctx, curve, curve.y, faint, 1); } }
    for (const curve of this.curves) {
      this.trace(ctx, curve, curve.line, 1, 1.8);
      const n = lowerBound(curve.x, this.range[1]) - lowerBound(curve.x, this.range[0]);
      if (n <= (curve.isTraining ? 2 : FEW_DOTS)) { this.dots(ctx, curve); }
    }
    if (this.key === "norm") { this.crosses(ctx); }
    ctx.restore();
    this.describe();
  }

  drawAxes(ctx) {
    ctx.font = "12px system-ui, sans-serif";
    ctx.fillStyle = style("--quiet");
    ctx.strokeStyle = style("--rule");
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    const bottom = this.height - BOTTOM;
    ctx.beginPath();
    const values = ticks(...this.yRange, this.isLog, Math.floor(this.height / 32));
    for (const value of values) {
      const y = Math.round(this.toY(value)) + 0.5;
      ctx.moveTo(LEFT, y);
      ctx.lineTo(this.width - RIGHT, y);
      ctx.fillText((this.format ?? short)(value, digitsOf(values)), LEFT - 6, y);
    }
    ctx.stroke();
    ctx.textAlign = "center";
    ctx.textBaseline = "top";
    for (const {x, text} of this.xTicks()) { ctx.fillText(text, this.toX(x), bottom + 6); }
    ctx.strokeStyle = style("--quiet");
    ctx.beginPath();
    ctx.moveTo(LEFT, bottom + 0.5);
    ctx.lineTo(this.width - RIGHT, bottom + 0.5);
    ctx.stroke();
  }
  xTicks() {
    const most = Math.max(2, Math.floor((this.width - LEFT) / 75));
    const units = options.axis === "time" ? [[3600, " h"], [60, " min"], [1, " s"]] : [[1, ""]];
    const [size, unit] = units.find(([size]) => this.range[1] >= 3 * size || size === 1);
    return ticks(this.range[0] / size, this.range[1] / size, false, most)
      .filter(x => options.axis !== "step" || Number.isInteger(x)).map(x => ({x: x * size, text: short(x) + unit}));
  }

  // a line through all points. It enters a column of pixels at the first, sees lowest and highest, leaves at the last
  trace(ctx, curve, ys, alpha, width) {
    const {x: xs} = curve, [start, stop] = this.range;
    // pixels of the screen in 1 of x
    const pixels = (this.width - LEFT - RIGHT) / (stop - start) * this.canvas.width / this.width;
    let column = NaN, px = 0, low = 0, high = 0, last = 0, isUp = true;
    const leave = () => {
      if (low < high) { for (const y of [low, high, last]) { ctx.lineTo(px, this.toY(y)); } }
      low = high = 0;
    };
    ctx.beginPath();
    const first = Math.max(0, lowerBound(xs, start) - 1), end = Math.min(xs.length, lowerBound(xs, stop) + 2);
    for (let i = first; i < end; i++) {
      const y = ys[i];
      if (Number.isNaN(y) || this.isLog && y <= 0) { leave(); isUp = true; column = NaN; continue; }
      const here = Math.floor((xs[i] - start) * pixels);
      if (here !== column) {
        leave();
        column = here; px = this.toX(xs[i]); low = high = y;
        if (isUp) { ctx.moveTo(px, this.toY(y)); ctx.lineTo(px, this.toY(y)); } else { ctx.lineTo(px, this.toY(y)); }
        isUp = false;
      }
      if (y < low) { low = y; } else if (y > high) { high = y; }
      last = y;
    }
    leave();
    ctx.globalAlpha = alpha;
    ctx.lineWidth = width;
    ctx.strokeStyle = curve.color;
    ctx.setLineDash(server.dashes[curve.dash].split(" ").filter(Boolean).map(Number));
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.globalAlpha = 1;
  }
  dots(ctx, curve) {
    ctx.fillStyle = curve.color;
    for (let i = lowerBound(curve.x, this.range[0]); i < curve.x.length && curve.x[i] <= this.range[1]; i++) {
      if (Number.isNaN(curve.y[i]) || this.isLog && curve.y[i] <= 0) { continue; }
      ctx.beginPath();
      ctx.arc(this.toX(curve.x[i]), this.toY(curve.y[i]), 3, 0, 7);
      ctx.fill();
    }
  }
  // updates that were skipped
  crosses(ctx) {
    this.skipped = 0;
    for (const {run, x, y, rows, color, isTraining} of this.curves) {
      const skipped = isTraining && run.column("skipped");
      for (let i = 0; skipped && i < rows.length; i++) {
        if (skipped[rows[i]] !== 1 || x[i] < this.range[0] || x[i] > this.range[1]) { continue; }
        const px = this.toX(x[i]), py = Number.isNaN(y[i]) ? this.height - BOTTOM : this.toY(y[i]);
        ctx.beginPath();
        ctx.moveTo(px - 4, py - 4); ctx.lineTo(px + 4, py + 4); ctx.moveTo(px + 4, py - 4); ctx.lineTo(px - 4, py + 4);
        ctx.strokeStyle = color;
        ctx.lineWidth = 2;
        ctx.stroke();
        this.skipped++;
      }
    }
  }

  describe() {
    const parts = [make("b", "", this.name)];
    const inBytes = this.key === "val_loss" && validationKey(this.drawn) === "val_bpb";
    const ofLoss = inBytes ? "bits per byte: the tokenizers differ" : lossUnit(this.drawn);
    const unit = ["loss", "val_loss"].includes(this.key) ? ofLoss : this.unit;
    if (unit) { parts.push(make("span", "", unit)); }
    if (this.drawn.length === 1 && this.curves.length > 1) {
      for (const curve of this.curves) {
        parts.push(mark(make("span", "key", curve.label), curve));
      }
    }
    if (this.skipped) { parts.push(make("span", "", "x: skipped")); }
    if (this.below) { parts.push(make("span", "", count(this.below, "point") + " at 0 or below: not on this scale")); }
    this.caption.replaceChildren(...parts);
    this.canvas.setAttribute("aria-label", this.name + ": " + this.curves.map(curve =>
      curve.label + " " + (curve.y.length ? short(curve.y[curve.y.length - 1]) : "")).join(", "));
  }
}

// what the schema of a run says of a key
function meaningOf(key, drawn) {
  return drawn.map(run => run.info.meanings[key]).find(Boolean);
}

// Mamba's head hpn has a loss of its own
function lossUnit(drawn) {
  const isHpn = run => run.settings?.map?.get("options.head") === "hpn";
  const kinds = new Set(drawn.map(run => isHpn(run) ? "(1 - cosine)^2 per target" : "nats per target"));
  const what = drawn.some(run => run.addsLoss) ? "cross entropy, " : "";
  return kinds.size === 1 ? what + [...kinds][0] : "per target";
}

// ---- what the pointer reads ----

const panels = new Map();  // by key

// x: where in all diagrams, null: nowhere; of `panel` the numbers are shown
function point(panel, x, speak) {
  for (const other of panels.values()) {
    if (other.figure.hidden || !other.range) { continue; }
    const canvas = other.canvas, isIn = x !== null && x >= other.range[0] && x <= other.range[1];
    other.cursor.style.visibility = isIn ? "visible" : "hidden";
    if (isIn) {
      other.cursor.style.left = canvas.offsetLeft + other.toX(x) + "px";
      other.cursor.style.top = canvas.offsetTop + TOP + "px";
      other.cursor.style.height = other.height - TOP - BOTTOM + "px";
    }
  }
  panel.at = x;
  $("reading").hidden = x === null;
  if (x === null) { return; }
  const table = make("table"), said = [];
  for (const curve of panel.curves) {
    if (!curve.x.length) { continue; }
    const i = nearest(curve.x, x), value = digits(curve.y[i]), step = curve.run.column("step")[curve.rows[i]];
    const place = options.axis === "step" && step === Math.round(x) ? "" : "step " + step;
    const name = mark(make("td", "key", curve.label), curve);
    table.append(make("tr", "", name, make("td", "", value), make("td", "", place)));
    said.push(curve.label + " " + value + " " + place);
  }
  $("reading").replaceChildren(make("b", "", axisText(x)), table);
  if (speak) { $("spoken").textContent = axisText(x) + ": " + said.join("; "); }
  const box = panel.canvas.getBoundingClientRect(), own = $("reading").getBoundingClientRect();
  const at = box.left + panel.toX(x);
  const left = at + 14 + own.width < innerWidth ? at + 14 : at - 14 - own.width;
  $("reading").style.left = Math.max(4, left) + "px";
  $("reading").style.top = Math.max(4, Math.min(box.top + 10, innerHeight - own.height - 4)) + "px";
}

// with one run the cursor stands on its records
function snap(panel, x) {
  const curve = panel.curves[0];
  return panel.drawn.length === 1 && curve.x.length ? curve.x[nearest(curve.x, x)] : x;
}

function listen(panel) {
  const canvas = panel.canvas;
  let from = null;
  const position = event => event.clientX - canvas.getBoundingClientRect().left;
  canvas.addEventListener("pointerdown", event => {
    if (event.button === 0) { from = position(event); canvas.setPointerCapture(event.pointerId); }
  });
  canvas.addEventListener("pointermove", event => {
    const to = position(event);
    panel.shade.style.visibility = from !== null && Math.abs(to - from) > 4 ? "visible" : "hidden";
    if (from !== null) {
      const [left, right] = [Math.min(from, to), Math.max(from, to)].map(px => panel.toX(panel.fromX(px)));
      Object.assign(panel.shade.style, {
        left: canvas.offsetLeft + left + "px", width: right - left + "px",
        top: canvas.offsetTop + TOP + "px", height: panel.height - TOP - BOTTOM + "px"});
    }
    point(panel, snap(panel, panel.fromX(to)));
  });
  canvas.addEventListener("pointerup", event => {
    const to = position(event), start = from;
    from = null;
    panel.shade.style.visibility = "hidden";
    if (start === null || Math.abs(to - start) <= 4) { return; }
    zoomTo(panel.fromX(Math.min(start, to)), panel.fromX(Math.max(start, to)));
  });
  canvas.addEventListener("pointercancel", () => { from = null; panel.shade.style.visibility = "hidden"; });
  canvas.addEventListener("pointerleave", () => point(panel, null));
  canvas.addEventListener("blur", () => point(panel, null));
  canvas.addEventListener("dblclick", () => zoomTo(null));
  canvas.addEventListener("keydown", event => {
    if (event.ctrlKey || event.altKey || event.metaKey || !panel.curves.length) { return; }
    const xs = panel.curves[0].x, [first, last] = panel.range, middle = panel.at ?? (first + last) / 2;
    const move = by => point(panel, xs[Math.min(xs.length - 1, Math.max(0, nearest(xs, panel.at ?? last) + by))], true);
    const stride = event.shiftKey ? 10 : 1;
    const keys = {
      ArrowLeft: () => move(-stride), ArrowRight: () => move(stride),
      Home: () => move(-Infinity), End: () => move(Infinity),
      "+": () => zoomTo(middle - (middle - first) / 2, middle + (last - middle) / 2),
      "-": () => zoomTo(middle - (middle - first) * 2, middle + (last - middle) * 2),
      Escape: () => { point(panel, null); zoomTo(null); },
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
}

function zoomTo(first, last) {
  const whole = wholeRange(chosen());
  const range = [Math.max(first ?? whole[0], whole[0]), Math.min(last ?? whole[1], whole[1])];
  zoom = first === null || range[0] === whole[0] && range[1] === whole[1] || !(range[1] > range[0]) ? null : range;
  $("whole").hidden = zoom === null;
  for (const panel of panels.values()) { panel.draw(); }
}

// ---- cards ----

function stateOf(run) {
  const {info} = run, step = run.rows ? run.column("step")[run.rows - 1] : null, age = info.age;
  if (info.reading) { return ["reading " + Math.floor(100 * info.read / info.bytes) + "%", false]; }
  if (info.final !== null && (step === null || info.final >= step)) { return ["done", false]; }
  if (info.steps !== null && step >= info.steps) { return ["done", false]; }
  if (age === null) { return [info.problems.length ? "" : "not begun", false]; }
  const isLive = age < Math.max(60, 5 * (run.last("ms") || 0) / 1000);
  if (step === null) { return [isLive ? "starts" : "no steps, " + duration(age) + " old", isLive]; }
  return [isLive ? "trains" : "silent for " + duration(age), isLive];
}

function makeCard(run) {
  const box = make("input"), only = make("button", "", "only");
  box.type = "checkbox";
  only.type = "button";
  only.title = "draw this run alone";
  box.addEventListener("change", () => { choose(other => other === run ? box.checked : other.shown); });
  only.addEventListener("click", () => choose(other => other === run));
  run.card = {box, only, label: make("bdi"), state: make("div", "state"), progress: make("div"),
              figures: make("div", "figures"), problems: make("div")};
  const label = make("label", "", box, run.card.label);
  run.card.root = make("div", "card framed", make("div", "name", label, only), run.card.state,
                       make("div", "progress", run.card.progress), run.card.figures, run.card.problems);
  $("cards").append(run.card.root);
}

function figure(name, value, format, title) {
  const known = value !== null && !Number.isNaN(value), b = make("b", "", known ? format(value) : "-");
  b.title = title ?? (known ? digits(value) : "");
  return make("div", "", make("span", "", name), b);
}

function fillCard(run) {
  const {card, info} = run, [state, isLive] = stateOf(run), checks = run.curve("val_loss", false);
  const step = run.rows ? run.column("step")[run.rows - 1] : null;
  let best = -1;
  checks.y.forEach((v, i) => { if (best < 0 || v < checks.y[best]) { best = i; } });
  mark(card.root, run);
  card.root.classList.toggle("off", !run.shown);
  card.box.checked = run.shown;
  card.label.textContent = info.name;
  card.label.title = info.path;
  card.only.hidden = card.box.hidden = runs.length === 1;
  const seconds = isLive && step !== null && info.steps > step ? (info.steps - step) * run.recent("ms") / 1000 : NaN;
  const left = seconds > 0 ? ", " + duration(seconds) + " left" : "";
  const reached = step === null ? "" : "step " + step + (info.steps ? " / " + info.steps : "");
  card.state.replaceChildren(make("span", isLive ? "live" : "", state + left), make("span", "", reached));
  card.progress.parentElement.hidden = step === null;
  card.progress.style.width = (info.steps && step !== null ? Math.min(100, 100 * step / info.steps) : 0) + "%";
  const memory = [...run.columns.keys()].find(key => MEMORY.test(key));
  const four = v => Math.abs(v) < 1e4 ? v.toFixed(4) : short(v), percent = v => (100 * v).toFixed(0) + "%";
  card.figures.replaceChildren(...run.rows === 0 ? [] : [
    figure("loss", run.recent("loss"), four, "mean of the last fiftieth; the last is " + digits(run.last("loss"))),
    figure("validation", checks.y.at(-1) ?? null, four),
    best < 0 ? figure("best", null)
      : figure("best at " + short(run.column("step")[checks.rows[best]]), checks.y[best], four),
    figure("tokens/s", run.recentMedian("tok_per_s"), short),
    figure("of peak", run.recentMedian("peak"), percent),
    memory ? figure("memory", run.last(memory), v => short(/_mb$/.test(memory) ? v * 1e6 : v) + "B")
      : figure("tokens", run.last("tokens"), short)]);
  const half = info.half_line && !isLive ? ["metrics.jsonl: its last line has no end: it waits for the rest"] : [];
  card.problems.replaceChildren(...info.problems.concat(half).map(text => make("p", "problem", text)));
}

function choose(test) {
  const paths = runs.filter(run => !test(run)).map(run => run.info.path);
  hidden = new Set(paths);
  remember("hidden", paths);
  zoom = null;
  $("whole").hidden = true;
  render();
  fetchTexts().then(render, noAnswer);
}

function filterCards() {
  const text = $("filter").value.toLowerCase();
  for (const run of runs) { run.card.root.hidden = !run.info.name.toLowerCase().includes(text); }
}
const isListed = run => !run.card.root.hidden;

// ---- samples and settings ----

function renderSamples() {
  const blocks = runs.filter(run => run.shown && (run.samples?.problem || run.samples?.samples?.length)).map(run => {
    const {samples = [], earlier, problem, version} = run.samples;
    // as it is, for it may be scrolled
    if (run.block?.version === version && run.block.color === run.color) { return run.block.root; }
    const select = make("select"), texts = make("section");
    select.setAttribute("aria-label", "sample of " + run.info.name);
    for (const [i, {step}] of samples.entries()) {  // the newest is the first
      select.append(new Option(step === null ? "all" : "after step " + step, String(i)));
    }
    const show = i => {
      select.value = String(i);
      const found = samples[i]?.texts ?? [{prompt: "", text: problem}];
      texts.replaceChildren(...found.flatMap(({prompt, text}) =>
        prompt ? [make("h3", "", make("bdi", "", prompt)), make("pre", "", text)] : [make("pre", "", text)]));
    };
    show(Math.max(0, samples.findIndex(({step}) => step === run.shownStep)));
    select.addEventListener("change", () => {
      const i = Number(select.value);
      run.shownStep = i === 0 ? null : samples[i].step;
      show(i);
    });
    const title = make("div", "", make("b", "", make("bdi", "", run.info.name)), select);
    const root = make("div", "sample framed", title, texts);
    if (earlier) { root.append(make("p", "quiet", "Earlier ones are in samples.txt.")); }
    run.block = {version, root, color: run.color};
    return mark(root, run);
  });
  $("samples").hidden = blocks.length === 0;
  const now = $("texts").children;
  const isSame = blocks.length === now.length && blocks.every((block, i) => block === now[i]);
  if (!isSame) { $("texts").replaceChildren(...blocks); }
}

let tableOf = "";  // what the table was made of

function renderSettings() {
  const shown = runs.filter(run => run.shown && (run.settings?.map?.size || run.settings?.problem));
  const isSeveral = shown.length > 1, onlyDiffering = isSeveral && $("differ").checked;
  $("settings").hidden = shown.length === 0;
  $("differing").hidden = !isSeveral;
  const made = JSON.stringify([isDark(), onlyDiffering, shown.map(run => [run.info.id, run.settings.version])]);
  if (made === tableOf) { return; }
  tableOf = made;
  const names = new Set(shown.flatMap(run => [...run.settings.map.keys()]));
  const head = make("tr", "", make("th"));
  for (const run of shown) {
    const {problem} = run.settings, text = make("bdi", "", run.info.name);
    const name = make("th", "key", text, problem ? ": " + problem : "");
    head.append(mark(name, run));
  }
  const rows = [];
  for (const name of names) {
    const values = shown.map(run => run.settings.map.get(name) ?? "-");
    const differs = new Set(values).size > 1 && !server.same_in_none.includes(name);
    if (onlyDiffering && !differs) { continue; }
    const title = make("th", "", name);
    title.scope = "row";
    rows.push(make("tr", "", title, ...values.map(value => make("td", "", value))));
  }
  if (onlyDiffering && rows.length === 0) { rows.push(make("tr", "", make("th", "", "none differs"))); }
  $("table").replaceChildren(make("thead", "", head), make("tbody", "", ...rows));
}

// ---- all of the page ----

function panelOf(definition) {
  if (!panels.has(definition.key)) { panels.set(definition.key, new Panel(definition)); }
  return panels.get(definition.key);
}

function renderCards() {
  runs.forEach(fillCard);
  filterCards();
  const live = runs.filter(run => stateOf(run)[1]).length;
  $("status").textContent = count(runs.length, "run") + (live ? ", " + live + (live > 1 ? " train" : " trains") : "");
  $("count").textContent = runs.filter(run => run.shown).length + " of " + runs.length + " drawn";
}

function render() {
  if (!server) { return; }
  isStale = false;
  document.documentElement.classList.toggle("dark", isDark());
  const drawn = chosen();
  renderCards();
  $("choice").hidden = runs.length < 2;
  $("nothing").hidden = drawn.length > 0;
  $("nothing").textContent = runs.length === 0
    ? "There is no run here yet: start a trainer with --run in this folder, and its card appears."
    : runs.some(run => run.shown) ? "No step is recorded yet." : "No run is chosen.";
  const keys = new Set(drawn.flatMap(run => [...run.columns.keys()]));
  const others = [...keys].filter(key => !NO_PANEL.has(key) && !PANELS.some(panel => panel.key === key))
    .map(key => MEMORY.test(key) ? {key, name: "memory", unit: meaningOf(key, drawn), place: "small"}
                                 : {key, name: server.titles[key] ?? key, unit: meaningOf(key, drawn), place: "others"});
  for (const definition of PANELS.filter(panel => keys.has(panel.key)).concat(others)) { panelOf(definition); }
  for (const panel of panels.values()) { panel.choose(drawn); }
  for (const place of ["large", "small", "others"]) {
    const n = [...panels.values()].filter(panel => panel.place === place && !panel.figure.hidden).length;
    $(place).style.setProperty("--columns", n <= 4 ? n : n % 4 === 0 || n % 4 === 3 ? 4 : 3);  // no row with one alone
  }
  $("more").hidden = ![...panels.values()].some(panel => panel.place === "others" && !panel.figure.hidden);
  renderSamples();
  renderSettings();
  drawnAt = Date.now();
}

async function ask(path, isBinary) {
  const answer = await fetch(path);
  if (!answer.ok) { throw new Error(await answer.text()); }
  return isBinary ? answer.arrayBuffer() : answer.json();
}

// samples and settings of the runs that are drawn, when they have changed
async function fetchTexts() {
  let changed = false;
  for (const run of runs.filter(run => run.shown)) {
    for (const kind of ["settings", "samples"]) {
      const version = run.info[kind];
      if ((run[kind]?.version ?? null) === version) { continue; }
      const answer = version === null ? {} : await ask("/" + kind + "?run=" + run.info.id);
      run[kind] = {...answer, version, map: new Map(answer.rows)};
      changed = true;
    }
  }
  return changed;
}

async function fetchRecords(run) {
  let changed = false;
  for (let n = 1; n > 0 && (run.generation !== run.info.generation || run.rows < run.info.rows);) {
    const query = "run=" + run.info.id + "&generation=" + run.generation + "&from=" + run.rows;
    n = run.take(await ask("/columns?" + query, true));
    changed = true;
  }
  return changed;
}

let lost = null;  // since when the server doesn't answer
let isStale = true, drawnAt = 0;  // are there records that the diagrams don't show? When were they drawn?
const isReading = () => server.runs.some(info => info.reading);

function noAnswer(error) {
  lost = lost ?? Date.now();
  const since = duration((Date.now() - lost) / 1000);
  showNotes(["No answer from the server for " + since + ": does make dashboard still run? (" + error.message + ")"]);
}
function showNotes(notes) {
  $("notes").hidden = notes.length === 0;
  $("notes").textContent = notes.join("; ");
}

async function poll() {
  try {
    let changed = server === null;
    const answer = await ask("/runs");
    if (server && answer.started !== server.started) {  // another server numbers runs in its own way
      runs.length = 0;
      $("cards").replaceChildren();
    }
    server = answer;
    lost = null;
    showNotes(server.notes);
    for (const info of server.runs) {
      if (!runs[info.id]) {
        runs[info.id] = new Run(info);
        makeCard(runs[info.id]);
        changed = true;
      }
      runs[info.id].info = info;
    }
    $("title").textContent = server.roots.join(", ");
    document.title = server.roots.join(", ");
    for (const run of runs) { changed = await fetchRecords(run) || changed; }
    changed = await fetchTexts() || changed;
    isStale = isStale || changed;
    // while long files are read, drawing should not take the time
    if (isStale && (!isReading() || Date.now() - drawnAt > 3000)) { render(); } else { renderCards(); }
  } catch (error) {
    noAnswer(error);
  }
  setTimeout(poll, lost === null && isReading() ? 20 : document.hidden ? 10000 : 2000);
}

for (const name of ["axis", "smooth", "scale", "theme"]) {
  $(name).value = options[name];
  if ($(name).selectedIndex < 0) {  // remembered by another version
    $(name).selectedIndex = 0;
    options[name] = $(name).value;
  }
  $(name).addEventListener("change", () => {
    options[name] = $(name).value;
    remember(name, options[name]);
    if (name === "axis") { zoom = null; $("whole").hidden = true; }
    render();
  });
}
systemIsDark.addEventListener("change", render);
$("whole").addEventListener("click", () => zoomTo(null));
$("filter").addEventListener("input", filterCards);
$("all").addEventListener("click", () => choose(run => isListed(run) || run.shown));
$("none").addEventListener("click", () => choose(run => !isListed(run) && run.shown));
$("differ").addEventListener("change", renderSettings);
document.documentElement.classList.toggle("dark", isDark());
poll();
