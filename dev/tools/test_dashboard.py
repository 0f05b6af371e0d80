#!/usr/bin/env python3
"""
Promises of dashboard.py and of the reading in runs.py, on made-up runs and without a browser: what is served and to
whom, how files are read while they grow, and that nothing outside the folders is ever read.

    python dev/tools/test_dashboard.py      ends with "N passed, N failed", status 1 if one failed; two seconds
"""
import http.client
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import dashboard  # noqa: E402  (found by the line above)
import runs  # noqa: E402

SCHEMA = b'{"schema": {"step": "updates done", "loss": "training loss", "rss_mb": "memory, 10^6 bytes"}}\n'
NO_UPDATE = dict.fromkeys(runs.KEYS)


def update(step, **other):
    record = dict(NO_UPDATE, step=step, loss=3.0 - step / 100, norm=1.0, lr=1e-3, ms=20.0, tokens=step * 100,
                  tok_per_s=5e3, peak=0.5, skipped=False, time=1e9 + step)
    return (json.dumps({**record, **other}) + "\n").encode()


def validation(step, loss):
    return (json.dumps({**NO_UPDATE, "step": step, "val_loss": loss, "time": 1e9}) + "\n").encode()


def write(path, data, mode="wb"):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, mode) as file:
        file.write(data if isinstance(data, bytes) else data.encode())


class Served:
    """A dashboard of a new folder, and requests to it."""

    def __init__(self, *below):
        self.root = tempfile.mkdtemp()
        self.runs = os.path.join(self.root, "runs")
        os.makedirs(self.runs)
        self.dashboard = dashboard.Dashboard([os.path.join(self.runs, name) for name in below] or [self.runs])
        self.server = dashboard.Server(0, self.dashboard)
        self.port = self.server.server_port
        self.errors = []
        self.server.handle_error = lambda *_: self.errors.append(sys.exc_info()[1])
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        shutil.rmtree(self.root)
        for error in self.errors:
            if not isinstance(error, ConnectionError):
                raise error

    def metrics(self, run, data, mode="wb"):
        write(os.path.join(self.runs, run, "metrics.jsonl"), data, mode)

    def request(self, path, host=None, method="GET"):
        """(status, headers, body)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.putrequest(method, path, skip_host=True)
        for name in [f"localhost:{self.port}"] if host is None else [host] if isinstance(host, str) else host:
            connection.putheader("Host", name)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, answer.headers, body

    def json(self, path):
        status, _, body = self.request(path)
        assert status == 200, (status, body)
        return json.loads(body)

    def listed(self):
        """{name: what /runs says of it}, new runs too"""
        self.dashboard.scanned = None
        return {run["name"]: run for run in self.json("/runs")["runs"]}

    def columns(self, number=0, generation=0, first=0):
        """(head, {key: values})"""
        status, _, body = self.request(f"/columns?run={number}&generation={generation}&from={first}")
        assert status == 200, body
        end = body.index(b"\n") + 1
        assert end % 8 == 0
        head = json.loads(body[:end])
        n = head["rows"]
        values = struct.unpack(f"={n * len(head['keys'])}d", body[end:])
        return head, {key: list(values[k * n:(k + 1) * n]) for k, key in enumerate(head["keys"])}

    def losses(self):
        self.listed()
        return self.columns()[1].get("loss", [])


# ---- reading ----


def test_columns():
    """every record as the doubles that are written, null as NaN, a new key with NaN before"""
    with Served() as s:
        s.metrics("a", SCHEMA + update(1, loss=0.100000001) + validation(1, 2.5) + update(2, rss_mb=12.5, kind="train"))
        assert s.listed()["a"]["rows"] == 3
        head, columns = s.columns()
        assert columns["step"] == [1, 1, 2] and columns["loss"][::2] == [0.100000001, 2.98]
        assert columns["rss_mb"][2] == 12.5
        assert columns["loss"][1] != columns["loss"][1] and columns["rss_mb"][0] != columns["rss_mb"][0]
        assert columns["val_loss"][1] == 2.5 and "kind" not in head["keys"]
        assert s.listed()["a"]["meanings"]["rss_mb"] == "memory, 10^6 bytes"


def test_growing():
    """only what has been added is read and sent; the rest of a line is waited for"""
    with Served() as s:
        s.metrics("a", SCHEMA + update(1))
        s.listed()
        head, _ = s.columns()
        line = update(2)
        s.metrics("a", line[:40], "ab")
        listed = s.listed()["a"]
        assert listed["rows"] == 1 and listed["half_line"] and not listed["problems"]
        n_read, real = [], os.pread
        os.pread = lambda *arguments: n_read.append(len(real(*arguments))) or real(*arguments)
        try:
            s.metrics("a", line[40:] + update(3), "ab")
            assert s.listed()["a"]["rows"] == 3
        finally:
            os.pread = real
        assert sum(n_read) < len(line) * 2 + runs.N_REMEMBERED + 1, n_read
        more, columns = s.columns(0, head["generation"], 1)
        assert more["from"] == 1 and more["generation"] == head["generation"] and columns["step"] == [2, 3]


def test_shrunk():
    """a file that was cut is read anew"""
    with Served() as s:
        s.metrics("a", SCHEMA + update(1) + update(2) + update(3))
        assert len(s.losses()) == 3
        before = s.columns()[0]["generation"]
        s.metrics("a", SCHEMA + update(1, loss=9.0))
        assert s.losses() == [9.0]
        head, columns = s.columns(0, before, 3)
        assert head["generation"] != before and head["from"] == 0 and columns["loss"] == [9.0]


def test_replaced():
    """and one that was replaced, as by --resume, or written anew in place, though it is longer"""
    with Served() as s:
        s.metrics("a", SCHEMA + update(1) + update(2))
        s.losses()
        s.metrics("b", SCHEMA + b"".join(update(i, loss=7.0) for i in range(1, 9)))
        os.replace(os.path.join(s.runs, "b", "metrics.jsonl"), os.path.join(s.runs, "a", "metrics.jsonl"))
        assert s.losses() == [7.0] * 8
        with open(os.path.join(s.runs, "a", "metrics.jsonl"), "r+b") as file:
            file.write(SCHEMA + b"".join(update(i, loss=6.0) for i in range(1, 20)))
        assert s.losses() == [6.0] * 19


def test_gone():
    """a run that goes away says so in its card, and may come again"""
    with Served() as s:
        s.metrics("a", SCHEMA + update(1))
        s.listed()
        shutil.rmtree(os.path.join(s.runs, "a"))
        assert s.listed()["a"]["problems"] == ["the folder: No such file or directory"]
        s.metrics("a", SCHEMA + update(1) + update(2))
        assert s.listed()["a"]["problems"] == [] and s.listed()["a"]["rows"] == 2


def test_broken():
    """broken lines are named in the card, the others are shown"""
    with Served() as s:
        nested, no_loss = b"[" * 9999 + b"\n", update(3, loss=float("nan"))
        s.metrics("a", SCHEMA + nested + update(1) + b'{"step": 2}\n' + no_loss + b"\xff\n")
        listed = s.listed()["a"]
        assert listed["rows"] == 2 and len(listed["problems"]) == 1
        assert listed["problems"][0].startswith("metrics.jsonl:2: expected a JSON object")
        assert "(and 2 lines more)" in listed["problems"][0]
        s.metrics("long", b"x" * (runs.LONGEST_LINE + 2))
        assert "expected a line" in s.listed()["long"]["problems"][0]
        s.metrics("huge", SCHEMA + update(1, loss=10**400, rss_mb=10**400) + update(2**53) + update(2**60))
        listed = s.listed()["huge"]
        assert listed["rows"] == 2 and "expected an integer 0..2^53" in listed["problems"][0]
        s.metrics("empty", b"")
        s.metrics("keys", update(1, **{f"k{i}": i for i in range(999)}))
        assert s.listed()["empty"]["rows"] == 0 and s.listed()["empty"]["problems"] == []
        assert len(s.columns(s.listed()["keys"]["id"])[0]["keys"]) == dashboard.MOST_KEYS


def test_order():
    """records are given in the order of their steps, also of a file put together by hand"""
    with Served() as s:
        s.metrics("a", SCHEMA + update(5) + update(6))
        s.listed()
        before = s.columns()[0]["generation"]
        s.metrics("a", update(1) + update(2), "ab")
        s.listed()
        head, columns = s.columns(0, before, 2)
        assert columns["step"] == [1, 2, 5, 6] and head["generation"] != before


def test_budget():
    """a long file is read in pieces, one for each request, and others need not wait for it"""
    with Served() as s:
        s.metrics("b", SCHEMA + update(1))
        s.metrics("a", SCHEMA + b"".join(update(i) for i in range(1, 15001)))
        seconds, dashboard.READ_SECONDS = dashboard.READ_SECONDS, 1e-4
        try:
            listed = s.listed()
            first = listed["a"]
            assert first["reading"] and 0 < first["rows"] < 15000 and listed["b"]["rows"] == 1, listed
            while s.listed()["a"]["reading"]:
                pass
        finally:
            dashboard.READ_SECONDS = seconds
        head, columns = s.columns()
        assert columns["step"] == list(range(1, 15001))


def test_old():
    """metrics.old-1.jsonl of an earlier start is not shown, checkpoints are no runs, runs are found below folders"""
    with Served() as s:
        s.metrics("sweep/a", SCHEMA + update(1))
        write(os.path.join(s.runs, "sweep/a/metrics.old-1.jsonl"), update(1))
        write(os.path.join(s.runs, "sweep/a/step_000001/metrics.jsonl"), update(1))
        write(os.path.join(s.runs, "begun/settings.json"), "{}")
        write(os.path.join(s.runs, "hf/config.json"), "{}")
        assert sorted(s.listed()) == ["begun", "sweep/a"]


def test_settings_and_samples():
    """settings as rows of text; the last samples, by step and prompt; a half one, and none"""
    with Served() as s:
        s.metrics("a", SCHEMA + update(1))
        s.listed()
        assert s.json("/settings?run=0") == {"rows": []} and s.json("/samples?run=0") == {}
        write(os.path.join(s.runs, "a/settings.json"), '{"trainer": "gpt2", "options": {"steps": 7, "lr": 0.001}}')
        write(os.path.join(s.runs, "a/summary.json"), '{"final_step": 5}')
        texts = ("--- sample after step 3\none\ntwo\n---\n"
                 '--- sample after step 6, prompt 1 of 2: "a\\n: b"\nfour\n---\n'
                 '--- sample after step 6, prompt 2 of 2: "<i>"\n<b>three')
        write(os.path.join(s.runs, "a/samples.txt"), texts)
        listed = s.listed()["a"]
        assert (listed["steps"], listed["final"]) == (7, 5)
        rows = [["trainer", "gpt2"], ["options.steps", "7"], ["options.lr", "0.001"]]
        assert s.json("/settings?run=0") == {"rows": rows}
        samples = s.json("/samples?run=0")
        two = [{"prompt": 'prompt 1 of 2: "a\\n: b"', "text": "four"},
               {"prompt": 'prompt 2 of 2: "<i>"', "text": "<b>three"}]
        assert samples["samples"] == [{"step": 6, "texts": two},
                                      {"step": 3, "texts": [{"prompt": "", "text": "one\ntwo"}]}], samples
        assert not samples["earlier"]
        write(os.path.join(s.runs, "a/samples.txt"), b"x" * 300000 + b"\n--- sample after step 9\n\xff\n---\n")
        samples = s.json("/samples?run=0")
        assert samples["earlier"] and [sample["step"] for sample in samples["samples"]] == [9]
        for broken in ("{", "[" * 9999, '{"a":' * 900 + "1" + "}" * 900, "[1]", "7", '{"options": {"steps": "9e9"}}'):
            write(os.path.join(s.runs, "a/settings.json"), broken)
            write(os.path.join(s.runs, "a/summary.json"), broken)
            assert s.listed()["a"]["rows"] == 1
            s.json("/settings?run=0")
        write(os.path.join(s.runs, "a/settings.json"), "{")
        assert "settings.json: expected a JSON object" in s.listed()["a"]["problems"][0]
        assert "settings.json: expected a JSON object" in s.listed()["a"]["problems"][0], "as long as it is so"


# ---- to whom, and what ----


def test_hosts():
    """a page of another name (DNS rebinding) reads nothing; this machine's names do, also through ssh -L"""
    with Served() as s:
        s.metrics("a", SCHEMA + update(1))
        for host in ("localhost", "localhost:9", f"127.0.0.1:{s.port}", f"[::1]:{s.port}"):
            assert s.request("/runs", host)[0] == 200, host
        for host in ("evil.example", f"evil.example:{s.port}", "localhost.evil.example", "127.0.0.1.evil.example", "",
                     "localhost:x", [], ["localhost", "evil.example"], "localhost:1\tx", "localhost@evil.example"):
            for path in ("/", "/runs", "/dashboard.js", "/columns?run=0"):
                status, _, body = s.request(path, host)
                assert status == 403 and b"answers this machine only" in body, (host, path, status)


def test_loopback():
    """the socket listens at the loopback address only"""
    with Served() as s:
        assert s.server.socket.getsockname()[0] == "127.0.0.1"
        others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
        for address in [a for a in others if not a.startswith("127.")][:1]:
            try:
                socket.create_connection((address, s.port), timeout=1).close()
                raise AssertionError(f"{address} answers")
            except OSError:
                pass


def test_headers():
    """every answer forbids what the page does not need"""
    with Served() as s:
        for path in ("/", "/dashboard.css", "/dashboard.js", "/runs", "/nothing", "/columns?run=x"):
            _, headers, _ = s.request(path)
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy, path
            assert "unsafe" not in policy, path
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert not headers["Access-Control-Allow-Origin"]


def test_requests():
    """anything else than the documented requests is refused, and the server goes on"""
    with Served() as s:
        write(os.path.join(s.root, "secret"), "secret")
        s.metrics("a", SCHEMA + update(1))
        s.listed()
        for path in ("/../secret", "/..%2fsecret", "/runs/a/metrics.jsonl", "/dashboard.py", "//etc/passwd", "/samples",
                     "/samples?run=9", "/settings?run=../..", "/samples?run=-1", "/samples?run=0x0",
                     "/columns?run=" + "9" * 5000, "/columns?run=0&from=1e9", "/samples?run=%EF%BC%90",
                     "/columns?" + "a=1&" * 50, "/dashboard.html", "/metrics.jsonl?run=0", "http://[", "/\0"):
            try:
                status, _, body = s.request(path)
            except (http.client.InvalidURL, http.client.BadStatusLine):
                continue
            assert status in (400, 404) and b"secret" not in body, (path, status, body[:80])
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
            assert s.request("/runs", method=method)[0] == 501, method
        assert s.request("/", method="HEAD")[2] == b""
        many_headers, long_path = b"GET /runs HTTP/1.1\r\n" + b"a: b\r\n" * 200, b"GET /" + b"a" * 70000
        for data in (b"\r\n\r\n", b"GET\r\n\r\n", many_headers + b"\r\n", long_path + b"\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", s.port), timeout=5) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                try:
                    connection.recv(100)
                except ConnectionResetError:
                    pass
        head, columns = s.columns(0, 77, 10**14)
        assert head["from"] == 0 and columns["step"] == [1]


def test_links():
    """links below the folder lead nowhere: a run, a file of it, a folder between; pipes are not waited for"""
    with Served() as s:
        outside = os.path.join(s.root, "outside")
        write(os.path.join(outside, "metrics.jsonl"), SCHEMA + update(1))
        write(os.path.join(outside, "samples.txt"), "secret")
        s.metrics("a", SCHEMA + update(1))
        s.metrics("piped", b"")
        os.symlink(outside, os.path.join(s.runs, "linked"))
        os.symlink(os.path.join(s.runs, "a"), os.path.join(s.runs, "latest"))
        os.symlink(s.runs, os.path.join(s.runs, "loop"))
        os.symlink("itself", os.path.join(s.runs, "itself"))
        for name in ("samples.txt", "settings.json", "summary.json"):
            os.symlink(os.path.join(outside, "samples.txt"), os.path.join(s.runs, "a", name))
        os.remove(os.path.join(s.runs, "piped/metrics.jsonl"))
        os.mkfifo(os.path.join(s.runs, "piped/metrics.jsonl"))
        os.mkfifo(os.path.join(s.runs, "piped/samples.txt"))
        os.makedirs(os.path.join(s.runs, "b"))
        os.symlink(os.path.join(outside, "metrics.jsonl"), os.path.join(s.runs, "b/metrics.jsonl"))
        listed = s.listed()
        assert sorted(listed) == ["a", "b", "linked", "piped"], sorted(listed)
        assert "a link out of the folder" in listed["linked"]["problems"][0] and listed["linked"]["rows"] == 0
        assert "links are not followed" in listed["b"]["problems"][0] and listed["b"]["rows"] == 0
        for _ in range(2):
            assert s.listed()["piped"]["problems"] == ["metrics.jsonl: expected a file, found a folder, pipe or device"]
        for run in listed.values():
            for path in ("/samples", "/settings"):
                assert b"secret" not in s.request(f"{path}?run={run['id']}")[2]
        os.remove(os.path.join(s.runs, "piped/metrics.jsonl"))
        s.metrics("piped", SCHEMA + update(1))
        assert s.listed()["piped"]["problems"] == [] and s.listed()["piped"]["rows"] == 1
        shutil.rmtree(os.path.join(s.runs, "a"))  # a run that becomes a link afterwards
        os.symlink(outside, os.path.join(s.runs, "a"))
        before = listed["a"]["id"]
        assert b"secret" not in s.request(f"/samples?run={before}")[2]
        assert s.listed()["a"]["problems"]


def test_hostile_names():
    """names and texts are handed on as JSON text, never as HTML, whatever they are"""
    with Served() as s:
        names = ["<img src=x onerror=alert(1)>", "a\nb", "\udcff", "a b", "'\"&", "\u202eabc", "$x^"]
        for name in names:
            s.metrics(name, SCHEMA + update(1))
        assert sorted(s.listed()) == sorted(names)
        assert s.request("/runs")[1]["Content-Type"].startswith("application/json")


def test_page():
    """the page loads its own two files, and its script never makes HTML of a text"""
    with Served() as s:
        html, script = s.request("/")[2].decode(), s.request("/dashboard.js")[2].decode()
        links = set(re.findall(r'(?:src|href)="([^"]*)"', html))
        assert links == {"data:,", "#controls", "dashboard.css", "dashboard.js"}
        makes_html = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser"
        assert not re.search(makes_html, script)
        assert not re.search(r"\bstyle=|\bon\w+=", html)
        assert not re.search(r"https?:", script + s.request("/dashboard.css")[2].decode())
        ids = set(re.findall(r'id="([^"]+)"', html))
        assert set(re.findall(r'\$\("([^"]+)"\)', script)) <= ids


def test_speed():
    """the speed of a card is a median of recent updates, of 20 at least (where node runs the script)"""
    if not shutil.which("node"):
        return
    with open(os.path.join(HERE, "dashboard.js"), encoding="utf-8") as file:
        method = re.search(r"^  recentMedian\(key\) \{.*?^  \}", file.read(), re.MULTILINE | re.DOTALL)
    assert method, "recentMedian"
    steady, slowed, slower = [20.0] * 2000 + [30.0] * 30 + [2.8], [9.0] * 500 + [20.0, 21.0, 22.0, 2.8], [1.0] * 30
    for values, median in ((steady, 30.0), (slowed + slower[:5], 9.0), ([20.0, 2.0, 100.0], 20.0), ([8.0, 10.0], 9.0),
                           ([], "NaN"), (slower, 1.0)):
        script = "const run = {curve: () => ({y: Float64Array.from(%s)}), %s}; console.log(run.recentMedian('a'))"
        found = subprocess.run(["node", "-e", script % (values, method[0])], capture_output=True, text=True, timeout=20)
        assert found.stdout == f"{median:g}\n" if median != "NaN" else found.stdout == "NaN\n", (values[-9:], found)


def test_folders():
    """several folders, a run itself, one inside another; what is not there is refused in one line"""
    with Served("one", "two/b", "two") as s:
        s.metrics("one/a", SCHEMA + update(1))
        s.metrics("two/b", SCHEMA + update(1))
        assert sorted(s.listed()) == ["b", "one/a"]
        write(os.path.join(s.runs, "two/.lock"), b"1\n")  # left by a start that failed: no run is in two itself
        assert sorted(s.listed()) == ["b", "one/a"]
    with Served() as s:
        assert dashboard.parse_arguments([s.runs]).folders == [s.runs]
        os.makedirs(os.path.join(s.runs, "a b"))
        both = f"{s.runs}/a b {s.runs}"
        assert dashboard.parse_arguments([both]).folders == [f"{s.runs}/a b", s.runs]
        for arguments, text in (([], "required"), (["/no/such"], "/no/such: expected a folder"),
                                ([s.runs, "--port", "x"], "0..65535"), ([s.runs, "--port", "65536"], "0..65535")):
            try:
                dashboard.parse_arguments(arguments)
                raise AssertionError(arguments)
            except runs.InputError as error:
                assert text in str(error) and "\n" not in str(error), error


def test_program():
    """the program prints its address; a port that is taken: status 1 and a remedy; Ctrl-C: status 0"""
    with Served() as s:
        folder = os.path.join(os.fsencode(s.runs), b"\xff")  # no UTF-8
        os.makedirs(folder)
        command = [sys.executable, "-X", "utf8", os.path.join(HERE, "dashboard.py"), folder, "--port"]
        taken = subprocess.run([*command, str(s.port)], capture_output=True, text=True, timeout=20)
        assert taken.returncode == 1 and taken.stderr.count("\n") == 1, taken
        assert "choose another --port" in taken.stderr, taken
        # a shell's background jobs ignore Ctrl-C, and so would what they start
        program = subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   errors="replace", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        try:
            line = program.stdout.readline()
            port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", line)[1])
            connection = http.client.HTTPConnection("localhost", port, timeout=10)
            connection.request("GET", "/")
            assert connection.getresponse().status == 200
            connection.close()
            time.sleep(0.1)
            program.send_signal(2)
            assert program.wait(10) == 0 and program.stderr.read() == ""
        finally:
            program.kill()
            program.communicate()


def main():
    tests = [(name, test) for name, test in globals().items() if name.startswith("test_")]
    n_failed = 0
    for name, test in tests:
        try:
            test()
            print(f"ok    {test.__doc__}")
        except Exception:  # whatever it is, it is a promise that was not kept
            n_failed += 1
            print(f"FAIL  {test.__doc__}\n{traceback.format_exc()}")
    print(f"{len(tests) - n_failed} passed, {n_failed} failed")
    return n_failed > 0


if __name__ == "__main__":
    sys.exit(main())
