#!/usr/bin/env python3
"""Strangers at the ports of a run: 1,000 connections while its ranks meet and 200 later, none of which may be taken for a rank, delay
one, or change a bit of the result. Four ranks are started by hand, with a secret; rank 2 comes through a proxy that records what it
says, rank 3 comes late, while the strangers are at it. What they do:
    noise      random bytes
    silence    nothing, until the other side closes
    half       reads the banner, says the first half of a hello, and no more
    slow       a hello without the right proof, a byte a second
    another    the hello that a rank has said to another run with the same secret
    replay     the hello that rank 2 has said to this run
    secret     a hello that is right in all but the secret
    dev/faults/strangers.py [--connections 1000] [--seconds 6]   ends with "N passed, N failed"
"""
import argparse, asyncio, hashlib, hmac, json, os, random, struct, subprocess, sys, tempfile, time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAGIC, VERSION, BANNER, HELLO, ANSWER, WELCOME = 0x4C4D4332, 2, 24, 80, 40, 0  # llmc/ranks/comm_tcp.h
KINDS = ["noise", "silence", "half", "slow", "another", "replay", "secret"]
SECRET = "%032x" % random.SystemRandom().getrandbits(128)
passed = failed = 0


def check(promise, good, detail=""):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    print(f"{'ok   ' if good else 'FAIL '} {promise}{'' if good else ': ' + str(detail)}", flush=True)


def free_port():
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(rank, size, port, folder, run, options):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment |= {"LLMC_SECRET": SECRET, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with open(folder / f"{run}.out{rank}", "w") as out, open(folder / f"{run}.err{rank}", "w") as err:
        ranks = ["--rank", f"{rank}/{size}@127.0.0.1:{port}"] if size > 1 else []
        return subprocess.Popen([trainer, *options, "--run", run, *ranks], cwd=folder, stdout=out, stderr=err, stdin=subprocess.DEVNULL,
                                env=environment)


def sums(run):
    last = sorted(run.glob("step_*[0-9]"))[-1:]
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for d in last for f in sorted(d.glob("*.safetensors"))}


def listening(pid):
    """ports at which this process listens"""
    try:
        inodes = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    except OSError:
        return []
    rows = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
    return [int(r[1].split(":")[1], 16) for r in rows if r[3] == "0A" and f"socket:[{r[9]}]" in inodes]


async def proxy(to, recorded):
    """passes connections on to that port, and keeps what the first of them has said"""
    async def pump(reader, writer, keep):
        try:
            while data := await reader.read(65536):
                if keep is not None:
                    keep.append(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    async def serve(reader, writer):
        while True:
            try:
                back, forth = await asyncio.open_connection("127.0.0.1", to)
                break
            except OSError:
                await asyncio.sleep(0.05)
        said = []
        recorded.append(said)
        await asyncio.gather(pump(reader, forth, said), pump(back, writer, None))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


def forged(banner, run_number, secret):
    """a hello of rank 3, right but for its secret"""
    hello = struct.pack("=IIQiiIi16s", MAGIC, 0, run_number, 4, 3, 9, 0, os.urandom(16))
    proof = hmac.new(secret.encode(), struct.pack("=I", 100) + banner + hello, hashlib.sha256).digest()
    return hello + proof


async def stranger(kind, port, known, count):
    async def answer(reader, seconds):
        """what comes back: an answer by which a rank would be welcome?"""
        try:
            data = await asyncio.wait_for(reader.readexactly(ANSWER), seconds)
        except asyncio.TimeoutError:
            count["open"] += 1
            return
        except (asyncio.IncompleteReadError, OSError):
            count["closed"] += 1
            return
        count["welcome" if struct.unpack("=II", data[:8]) == (MAGIC, WELCOME) else "turned away"] += 1

    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        count["nobody listens"] += 1
        return
    count["connected"] += 1
    try:
        if kind == "noise":
            writer.write(os.urandom(random.randrange(1, 3000)))
        try:
            banner = await asyncio.wait_for(reader.readexactly(BANNER), 7)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, OSError):
            count["closed"] += 1
            return
        if kind == "half":
            writer.write(forged(banner, known["number"], "wrong wrong wrong wrong")[:HELLO // 2])
        elif kind == "secret":
            writer.write(forged(banner, known["number"], "wrong wrong wrong wrong"))
        elif kind in ("another", "replay"):
            writer.write(known[kind])
        elif kind == "slow":
            for byte in forged(banner, known["number"], "wrong wrong wrong wrong"):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1)
                if reader.at_eof():
                    break
        await answer(reader, 8)
    except OSError:
        count["closed"] += 1
    finally:
        writer.close()


async def meet(folder, run, options, strangers, seconds, another):
    """four ranks, of which the last comes late; returns their statuses, what strangers saw, seconds from then to the first step"""
    port, recorded, counts = free_port(), [], {k: dict.fromkeys(
        ["connected", "nobody listens", "closed", "turned away", "open", "welcome"], 0) for k in KINDS}
    server, through = await proxy(port, recorded)
    ranks = [start(r, 4, through if r == 2 else port, folder, run, options) for r in range(3)]
    while not (recorded and sum(map(len, recorded[0])) >= HELLO and all(listening(p.pid) for p in ranks)):
        await asyncio.sleep(0.05)
    hello = b"".join(recorded[0])[:HELLO]
    known = {"another": another or hello, "replay": hello, "number": struct.unpack("=Q", hello[8:16])[0]}
    ports = [p for r in ranks for p in listening(r.pid)]
    tasks = []

    async def crowd():
        for i in range(strangers + strangers // 5):  # the last of them while the last rank comes, and later
            kind = KINDS[i % len(KINDS)]
            tasks.append(asyncio.create_task(stranger(kind, ports[0] if i % 2 else random.choice(ports), known, counts[kind])))
            await asyncio.sleep(seconds / strangers)

    crowding = asyncio.create_task(crowd()) if strangers else None
    await asyncio.sleep(0)
    while len(tasks) < strangers:
        await asyncio.sleep(0.01)
    late = time.monotonic()
    ranks.append(start(3, 4, port, folder, run, options))
    while ranks[0].poll() is None and not (folder / f"{run}.out0").read_text().count("\nstep "):
        await asyncio.sleep(0.02)
    began = time.monotonic() - late
    if crowding:
        await crowding
        await asyncio.gather(*tasks)
    while any(p.poll() is None for p in ranks):
        await asyncio.sleep(0.05)
    server.close()
    return [p.returncode for p in ranks], counts, began, hello


def main():
    global trainer
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=6.0, help="in which they come")
    a = parser.parse_args()
    build = subprocess.run(["make", "-s", "folder"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run(["make", "-s", f"{build}/train_gpt2"], cwd=ROOT, check=True, stdout=sys.stderr)
    trainer = str(ROOT / build / "train_gpt2")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").write_text("".join(f"line {i}: {i} times {i} is {i * i}.\n" for i in range(400)))
        config = {"model_type": "gpt2", "n_positions": 24, "vocab_size": 257, "n_layer": 2, "n_head": 3, "n_embd": 33}
        (folder / "tiny.json").write_text(json.dumps(config))
        options = ["--config", "tiny.json", "--train", "text", "--seq-len", "16", "--batch-size", "2", "--batch-tokens", "128", "--steps", "2000",
                   "--eval-every", "0", "--sample-every", "0", "--threads", "1", "--init-timeout", "60", "--comm-timeout", "10"]
        start(0, 1, 0, folder, "one", options).wait()
        status, _, alone, another = asyncio.run(meet(folder, "quiet", options, 0, 1.0, None))
        check(f"4 ranks without strangers: the bytes of one; first step {alone:.2f} s after the last rank has been started",
              status == [0] * 4 and sums(folder / "one") == sums(folder / "quiet"), status)
        status, counts, began, _ = asyncio.run(meet(folder, "crowded", options, a.connections, a.seconds, another))
        print(f"{'':10}" + "".join(f"{k:>16}" for k in counts["noise"]))
        for kind in KINDS:
            print(f"{kind:10}" + "".join(f"{n:16d}" for n in counts[kind].values()))
        total = {k: sum(counts[kind][k] for kind in KINDS) for k in counts["noise"]}
        print(f"{'all':10}" + "".join(f"{n:16d}" for n in total.values()))
        check(f"{total['connected'] + total['nobody listens']} strangers, {total['connected']} while ranks met: none is taken for a rank",
              total["welcome"] == 0 and total["connected"] >= 0.95 * a.connections, total)
        errors = "".join((folder / f"crowded.err{r}").read_text() for r in range(4))
        check("... all ranks end with status 0, and nobody complains", status == [0] * 4 and not errors, (status, errors))
        check("... the bytes of one rank", sums(folder / "one") == sums(folder / "crowded") and sums(folder / "one"))
        check(f"... first step {began:.2f} s after the last rank has been started: not a second later than without",
              began < alone + 0.9, alone)
        check("... nobody can connect once all have met, and the secret is nowhere in the run",
              total["nobody listens"] > 0 and SECRET.encode() not in b"".join(f.read_bytes() for f in folder.rglob("*") if f.is_file()))
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
