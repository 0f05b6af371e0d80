#!/usr/bin/env python3
"""
Shows all runs of a folder in a web page, live:    make dashboard RUN=runs
    dashboard.py FOLDER...             runs in these folders and below them; a FOLDER may also be one run
    dashboard.py FOLDER --port 8080    at this port; 0: any free one

Standard library only, no network: it answers at the loopback address, and the page (dashboard.html, .css, .js beside
this file) loads nothing from elsewhere. It only reads: metrics.jsonl as far as it has grown, samples.txt,
settings.json, summary.json. A file that was cut or replaced is read anew; a last line without its end waits. What a run
is called and what it has generated is text, never HTML. A request names a run by a number, never by a path; links below
FOLDER are not followed.

    GET /           /dashboard.css   /dashboard.js
    GET /runs       JSON: the runs, how far each is read, what is wrong with it
    GET /columns?run=0&generation=1&from=500
                    records of a run from number 500 on: a line of JSON, padded to 8 bytes, with rows and keys; then the
                    columns, doubles as this machine has them. null is NaN. Another generation (the file was read
                    anew, or sorted) begins at 0
    GET /settings?run=0    JSON: [name, value as text], inner names joined by dots
    GET /samples?run=0     JSON: the last samples of the run, newest first: step, and for each prompt of it name and text

Exit status: 0 ended by Ctrl-C, 1 the port is not to be had, 2 wrong input, in one line.
"""
import argparse
import array
import errno
import http.server
import json
import math
import os
import re
import stat
import sys
import threading
import time
import urllib.parse

from runs import (COLORS, DARK_COLORS, DASHES, MOST_KEYS, SAME_IN_NONE, TITLES, GrowingFile, InputError, flatten,
                  is_finite, meanings_of, open_file, parse_json, parse_record, split_folders)

HERE = os.path.dirname(os.path.abspath(__file__))
PORT = 8765
LOOPBACK = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "[::1]")  # what a browser of this machine asks for, at any port: ssh -L has its own
PAGES = {"/": ("dashboard.html", "text/html"), "/dashboard.css": ("dashboard.css", "text/css"),
         "/dashboard.js": ("dashboard.js", "text/javascript")}
HEADERS = {
    # nothing from elsewhere, no script or style within the HTML: even text that became HTML by mistake could do nothing
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                               "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
NAN = float("nan")
NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
DEPTH = 5            # folders below folders
MOST_FOLDERS = 2000  # that are looked into
MOST_ROWS = 100_000  # in one answer
MOST_BYTES = 4 << 20       # of settings.json and summary.json
SIDE_FILES = ("settings.json", "summary.json", "samples.txt")
SAMPLE_BYTES = 256 << 10   # of samples.txt, from its end
SAMPLE_LINE = re.compile(r"^--- sample after step ([0-9]{1,15})(?:, (prompt [0-9]+ of [0-9]+: .*))?\n", re.MULTILINE)
READ_SECONDS = 0.5   # of one request; the next reads on
SCAN_SECONDS = 2     # between looks for new runs


# ---- files below a folder, without a way out of it ----


def open_folder(root, parts):
    """A descriptor of root/parts[0]/parts[1]/...; only root itself may be a link."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts:
        try:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | NO_LINK, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    return fd


def read_end(fd, most):
    """The last bytes of a file, and how many there are before them."""
    size = os.fstat(fd).st_size
    before = max(0, size - most)
    return os.pread(fd, size - before, before), before


def why(error, name):
    """What is wrong with a file or folder of a run."""
    if isinstance(error, OSError):
        is_link = error.errno == errno.ELOOP
        return f"{name}: {'a link, and links are not followed here' if is_link else error.strerror}"
    return str(error)


def leads_to_folder(link):
    """A link to itself, or into a folder that nobody may read, leads nowhere."""
    try:
        return link.is_dir()
    except OSError:
        return False


def find_runs(root):
    """[(parts, problem)]: the way from root to each run, a folder with one of a run's files; and a note, or ""."""
    found, n_folders = [], 0

    def look(parts):
        nonlocal n_folders
        n_folders += 1
        if n_folders > MOST_FOLDERS:
            return
        fd = open_folder(root, parts)
        try:
            with os.scandir(fd) as entries:
                entries = sorted(entries, key=lambda entry: entry.name)
            if any(entry.name in ("metrics.jsonl", "settings.json") for entry in entries):
                found.append((parts, ""))
                return  # what is inside are checkpoints
            folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
            links = [entry.name for entry in entries if entry.is_symlink() and leads_to_folder(entry)]
        finally:
            os.close(fd)
        for name in links:
            target, inside = os.path.realpath(os.path.join(root, *parts, name)), os.path.realpath(root)
            if os.path.commonpath([target, inside]) != inside:  # else its target has a card
                problem = "a link out of the folder, which is not followed: name its target in RUN"
                found.append(((*parts, name), problem))
        for name in folders:
            if len(parts) < DEPTH and not name.startswith("."):
                try:
                    look((*parts, name))
                except OSError as error:
                    found.append(((*parts, name), error.strerror))

    look(())
    return found, f"{root}: more than {MOST_FOLDERS} folders: some are left out" if n_folders > MOST_FOLDERS else ""


# ---- a run ----


def as_number(value):
    """A double for a column: NaN for null, text and what is not finite."""
    return float(value) if value is not None and isinstance(value, (int, float)) and is_finite(value) else NAN


class Run:
    """What is known of one run. `generation` counts how often its metrics were read anew."""

    def __init__(self, number, root, parts, name):
        self.number, self.root, self.parts, self.name = number, root, parts, name
        self.generation = 0
        self.problem = self.scan_problem = ""  # of the folder
        self.forget()

    def forget(self):
        self.file, self.columns, self.meanings = GrowingFile(), {}, {}
        self.generation += 1
        self.n_rows = self.n_problems = 0
        self.first_problem, self.is_unreadable = "", False
        self.n_bytes, self.written = 0, None  # of metrics.jsonl, and when
        self.steps = self.final_step = None
        self.versions, self.side_problems = {}, {}  # of the other files

    # -- metrics.jsonl --

    def complain(self, text):
        self.n_problems += 1
        self.first_problem = self.first_problem or text

    def add(self, record):
        for key in [key for key in record if key not in self.columns]:
            if len(self.columns) < MOST_KEYS and not math.isnan(as_number(record[key])):
                self.columns[key] = array.array("d", [NAN]) * self.n_rows
        for key, column in self.columns.items():
            column.append(as_number(record.get(key)))
        self.n_rows += 1

    def sort(self, n_before):
        """Rows are in the order of their steps; a file in which they are not is one put together by hand."""
        steps = self.columns.get("step", ())
        if all(steps[i - 1] <= steps[i] for i in range(max(1, n_before), self.n_rows)):
            return
        order = sorted(range(self.n_rows), key=steps.__getitem__)
        self.columns = {key: array.array("d", [column[i] for i in order]) for key, column in self.columns.items()}
        self.generation += 1

    def read_metrics(self, folder, until):
        """What is new, until this time; its next call goes on."""
        try:
            fd = open_file("metrics.jsonl", NO_LINK, folder)
        except (OSError, InputError) as error:
            if self.file.offset:
                self.forget()
            if not isinstance(error, FileNotFoundError):
                self.problem = why(error, "metrics.jsonl")
            return
        try:
            if self.file.is_another(fd):
                self.forget()
                self.file.is_another(fd)
            status, n_before = os.fstat(fd), self.n_rows
            self.n_bytes, self.written = status.st_size, status.st_mtime
            for number, line in [] if self.is_unreadable else self.file.lines(fd, "metrics.jsonl", until):
                self.read_line(number, line)
        except InputError as error:  # a line without an end
            self.complain(str(error))
            self.is_unreadable = True
        except OSError as error:  # of a disk or a network
            self.problem = why(error, "metrics.jsonl")
        finally:
            os.close(fd)
        self.sort(n_before)

    def read_line(self, number, line):
        if not line.strip():
            return
        try:
            record = parse_record(line, f"metrics.jsonl:{number}")
        except InputError as error:
            self.complain(str(error))
            return
        if "schema" not in record:
            self.add(record)
        else:
            self.meanings = meanings_of(record["schema"])

    # -- the other files --

    def read_small(self, folder, name):
        """The JSON of a file, or None if there is none."""
        try:
            fd = open_file(name, NO_LINK, folder)
        except FileNotFoundError:
            return None
        try:
            data, before = read_end(fd, MOST_BYTES)
        finally:
            os.close(fd)
        try:
            if before:
                raise ValueError(f"more than {MOST_BYTES} bytes")
            return parse_json(data)
        except ValueError as error:
            raise InputError(f"{name}: expected a JSON object: {error}") from None

    def version(self, folder, name):
        """Changes when the file does; null without one."""
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return None
        return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}" if stat.S_ISREG(status.st_mode) else None

    def read_outcome(self, folder):
        """How many steps were asked for, and with which it ended; read when the files change."""
        before, self.versions = self.versions, {name: self.version(folder, name) for name in SIDE_FILES}
        for name, take in (("settings.json", self.take_settings), ("summary.json", self.take_summary)):
            if name not in before or self.versions[name] != before[name]:
                self.side_problems[name] = ""
                try:
                    take(self.read_small(folder, name))
                except (OSError, InputError, ValueError) as error:
                    self.side_problems[name] = why(error, name)

    def take_settings(self, settings):
        steps = dict(flatten(settings or {})).get("options.steps", "")
        self.steps = int(steps) if re.fullmatch("[1-9][0-9]{0,14}", steps) else None  # 0: as many as --epochs need

    def take_summary(self, summary):
        final = summary.get("final_step") if isinstance(summary, dict) else None
        self.final_step = final if type(final) is int and is_finite(final) else None

    def update(self, until):
        try:
            folder = open_folder(self.root, self.parts)
        except OSError as error:
            self.problem = why(error, "the folder")
            return
        self.problem = ""
        try:
            self.read_metrics(folder, until)
            self.read_outcome(folder)
        finally:
            os.close(folder)

    # -- answers --

    def problems(self):
        n = self.n_problems - 1
        more = f" (and {n} line{'s' * (n > 1)} more)" if n > 0 else ""
        lines = [self.first_problem + more] if self.first_problem else []
        return [text for text in (self.problem, *lines, *self.side_problems.values()) if text]

    def is_reading(self):
        return not self.is_unreadable and not self.problem and self.file.offset < self.n_bytes

    def describe(self):
        return {"id": self.number, "name": self.name, "path": os.path.join(self.root, *self.parts),
                "generation": self.generation, "rows": self.n_rows, "bytes": self.n_bytes, "read": self.file.offset,
                "reading": self.is_reading(), "half_line": bool(self.file.rest), "age": self.age(), "steps": self.steps,
                "final": self.final_step, "problems": self.problems(), "meanings": self.meanings,
                "settings": self.versions.get("settings.json"), "samples": self.versions.get("samples.txt")}

    def age(self):
        return None if self.written is None else max(0.0, time.time() - self.written)

    def rows_from(self, generation, first):
        """The answer to /columns."""
        first = first if generation == self.generation and first <= self.n_rows else 0
        n = min(self.n_rows - first, MOST_ROWS)
        head = json.dumps({"generation": self.generation, "from": first, "rows": n, "keys": list(self.columns)})
        head += " " * (-(len(head) + 1) % 8) + "\n"
        return head.encode() + b"".join(column[first:first + n].tobytes() for column in self.columns.values())

    def with_folder(self, answer):
        """answer(descriptor of the folder), or what is wrong."""
        try:
            folder = open_folder(self.root, self.parts)
            try:
                return answer(folder)
            finally:
                os.close(folder)
        except FileNotFoundError:
            return {}
        except (OSError, InputError, ValueError) as error:
            return {"problem": why(error, "the file")}

    def settings(self, folder):
        return {"rows": flatten(self.read_small(folder, "settings.json") or {})}

    def samples(self, folder):
        """As llmc/run/folder.h writes them: a SAMPLE_LINE, the text and `---`."""
        fd = open_file("samples.txt", NO_LINK, folder)
        try:
            data, before = read_end(fd, SAMPLE_BYTES)
        finally:
            os.close(fd)
        text = data.decode(errors="replace")
        pieces = SAMPLE_LINE.split(text)
        samples = []
        for step, prompt, sample in zip(pieces[1::3], pieces[2::3], pieces[3::3]):
            if not samples or samples[-1]["step"] != int(step):
                samples.append({"step": int(step), "texts": []})
            samples[-1]["texts"].append({"prompt": prompt or "", "text": re.sub(r"\n?---\n\Z", "", sample)})
        if not samples and data:
            samples = [{"step": None, "texts": [{"prompt": "", "text": pieces[0]}]}]
        samples.reverse()
        return {"samples": samples, "earlier": before > 0}


# ---- all runs ----


class Dashboard:
    """The runs below some folders; requests come from several threads, one at a time is answered."""

    def __init__(self, roots):
        self.roots, self.lock = roots, threading.Lock()
        self.runs, self.by_place = [], {}  # a run keeps its number
        self.notes, self.scanned = [], None
        self.started = str(time.time_ns())  # tells the page one server from the next

    def name_of(self, root, parts):
        base = os.path.basename(os.path.realpath(root)) or root
        several = len(self.roots) > 1
        return "/".join(([base] if several or not parts else []) + list(parts))

    def scan(self):
        """New runs get a number; one that has gone keeps its card, which says so, as long as the page is served."""
        if self.scanned is not None and time.monotonic() - self.scanned < SCAN_SECONDS:
            return
        self.notes = []
        for root in self.roots:
            try:
                found, note = find_runs(root)
            except OSError as error:
                found, note = [], f"{root}: {error.strerror}"
            self.notes += [note] if note else []
            for parts, problem in found:
                place = os.path.join(os.path.realpath(root), *parts)  # of a run below two of the folders
                if place not in self.by_place:
                    self.by_place[place] = Run(len(self.runs), root, parts, self.name_of(root, parts))
                    self.runs.append(self.by_place[place])
                self.by_place[place].scan_problem = problem
        self.scanned = time.monotonic()

    def update(self):
        self.scan()
        until = time.monotonic() + READ_SECONDS
        for run in self.runs:
            if run.scan_problem:
                run.problem = run.scan_problem
            else:
                run.update(until)

    def describe(self):
        self.update()
        return {"started": self.started, "roots": self.roots, "notes": self.notes, "titles": TITLES,
                "runs": [run.describe() for run in self.runs],
                "colors": COLORS, "dark_colors": DARK_COLORS, "dashes": DASHES, "same_in_none": SAME_IN_NONE}


# ---- HTTP ----


def small_number(text):
    """An integer that is not negative; ValueError for all else."""
    if not re.fullmatch("[0-9]{1,15}", text):
        raise ValueError(text)
    return int(text)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "llmc", ""
    timeout = 30  # a silent connection ends

    def log_message(self, *_):
        pass

    def send(self, status, kind, body):
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8" if kind != "application/octet-stream" else kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, text):
        self.send(status, "text/plain", f"{text}\n".encode())

    def send_error(self, code, message=None, explain=None):
        """What the library refuses by itself, without its page of HTML."""
        self.close_connection = True
        self.refuse(code, message or "not a request that is answered here")

    def do_GET(self):
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or re.sub(r":\d+\Z", "", hosts[0]) not in HOSTS:
            # a page of elsewhere whose name was made to lead here would read the runs (DNS rebinding)
            return self.refuse(403, f"answers this machine only: open http://{LOOPBACK}:{self.server.server_port}/")
        if self.path in PAGES:
            name, kind = PAGES[self.path]
            with open(os.path.join(HERE, name), "rb") as file:
                return self.send(200, kind, file.read())
        try:
            url = urllib.parse.urlsplit(self.path)
            query = {key: small_number(value) for key, value in urllib.parse.parse_qsl(url.query, max_num_fields=9)}
        except ValueError:
            return self.refuse(400, "expected a path and numbers after a ?")
        dashboard = self.server.dashboard
        with dashboard.lock:
            answer = self.answer(dashboard, url.path, query)
        if answer is None:
            return self.refuse(404, "nothing of this name")
        if isinstance(answer, bytes):
            return self.send(200, "application/octet-stream", answer)
        return self.send(200, "application/json", json.dumps(answer).encode())

    do_HEAD = do_GET

    def answer(self, dashboard, path, query):
        """Bytes, something for JSON, or None."""
        if path == "/runs":
            return dashboard.describe()
        number = query.get("run", -1)
        run = dashboard.runs[number] if 0 <= number < len(dashboard.runs) else None
        if run is None:
            return None
        if path == "/columns":
            return run.rows_from(query.get("generation", 0), query.get("from", 0))
        if path in ("/settings", "/samples"):
            return run.with_folder(run.settings if path == "/settings" else run.samples)
        return None


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port, dashboard):
        self.dashboard = dashboard
        super().__init__((LOOPBACK, port), Handler)

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):  # a page that was closed is no error
            super().handle_error(request, client_address)


# ---- main ----


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(f"{message} (--help tells more)")


def port_number(text):
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port 0..65535, found \"{text}\"")
    return int(text)


def parse_arguments(arguments):
    parser = Parser(prog="dashboard.py", description=__doc__.strip(),
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a folder with runs, or a run")
    parser.add_argument("--port", type=port_number, metavar="N",
                        help=f"0: any free one ({PORT}, or if it is taken any free one)")
    options = parser.parse_args(arguments)
    options.folders = [folder for text in options.folders for folder in split_folders(text) or [text]]
    for folder in options.folders:
        if not os.path.isdir(folder):
            raise InputError(f"{folder}: expected a folder with runs (--run of a trainer, `make run`), found none")
    return options


def listen(port, dashboard):
    """The server at that port; None: at PORT, or another if it is taken."""
    try:
        return Server(PORT if port is None else port, dashboard)
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            print(f"port {PORT} is taken, by another dashboard perhaps")
            return Server(0, dashboard)
        raise


def main(arguments):
    sys.stdout.reconfigure(errors="surrogateescape")  # names of folders need not be UTF-8
    options = parse_arguments(arguments)
    dashboard = Dashboard([os.path.normpath(folder) for folder in options.folders])
    try:
        server = listen(options.port, dashboard)
    except OSError as error:
        print(f"dashboard: port {options.port}: {error.strerror}: choose another --port, or 0 for any free one",
              file=sys.stderr)
        return 1
    dashboard.scan()
    n, where = len(dashboard.runs), ", ".join(options.folders)
    print(f"{n} run{'s' * (n != 1)} in {where}: http://{LOOPBACK}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        print(f"dashboard: {error}", file=sys.stderr)
        sys.exit(2)
