#!/usr/bin/env python3
"""
TensorBoard reads what llmc/run/tensorboard.h writes: python dev/ref/check_tensorboard.py PROGRAM

PROGRAM is the built test_tensorboard. It writes 100 steps; TensorBoard's own reader must give back every float to the last
bit. Then the file is cut inside its last record, as a kill does, and the run resumed from step 60: every step must be there
once, from 61 on out of the new file. Needs the package tensorboard; without it this is skipped.
Ends with "N passed, N failed".
"""
import glob
import os
import struct
import subprocess
import sys
import tempfile

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    print("TensorBoard is not installed (python3 -m pip install tensorboard)")
    print("0 passed, 0 failed, 1 skipped")
    sys.exit(0)

verdicts = []


def check(promise, ok, found=""):
    verdicts.append(ok)
    print(f"{'ok  ' if ok else 'FAIL'}  {promise}{'' if ok else f': {found}'}")


def f32(x):
    """Rounded to a float32, as bits."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def expected(step):
    """The numbers of test_tensorboard.c's write_file as bits of float32, by tag."""
    bits = 2654435761 * step & 0xFFFFFFFF
    loss = bits if bits & 0x7F800000 != 0x7F800000 else f32(1.0)
    step32 = struct.unpack("<f", struct.pack("<f", 0.1))[0] * step  # a double holds the product of two floats: rounded once
    made = {"train/loss": loss, "train/norm": f32(step32), "train/lr": f32(1.0 / step),
            "train/tokens_per_second": f32(1e6 / step), "train/load": f32(1.0 / step), "train/idle": f32(step)}
    if step % 10 == 0:
        made["validation/loss"] = made["train/lr"]
    if step % 20 == 0:
        made["validation/bits_per_byte"] = f32(0.3 * step)
    return made


def compare(folder, promise):
    reader = EventAccumulator(folder, size_guidance={"scalars": 0})
    reader.Reload()
    wanted = {}
    for step in range(1, 101):
        for tag, bits in expected(step).items():
            wanted.setdefault(tag, []).append((step, bits))
    found = {tag: [(event.step, f32(event.value)) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    differ = [tag for tag in sorted(set(wanted) | set(found)) if wanted.get(tag) != found.get(tag)]
    check(promise, not differ, f"{differ}")
    return reader


def main(program):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([program, "write", folder], check=True)
        path, = glob.glob(f"{folder}/*tfevents*")
        reader = compare(folder, "a run: every float comes back to the last bit")
        written = reader.Scalars("train/loss")[0].wall_time
        check("and the time it was written", abs(written - os.path.getmtime(folder)) < 60, written)
        os.truncate(path, os.path.getsize(path) - 30)
        subprocess.run([program, "write", folder, "60"], check=True)
        check("a resumed run has a second file", len(glob.glob(f"{folder}/*tfevents*")) == 2)
        compare(folder, "killed while writing, resumed: every step once, none of the killed run's later ones")
    failed = verdicts.count(False)
    print(f"{len(verdicts) - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("check_tensorboard: expected one argument, the program test_tensorboard", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(os.path.abspath(sys.argv[1])))
