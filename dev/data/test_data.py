#!/usr/bin/env python3
"""
Promises of the scripts of this folder, on small made-up inputs and without a network beyond this machine: the bytes of the
shards and records they write, and one line with exit status 2 for what they cannot use.

    python dev/data/test_data.py            ends with "N passed, N failed", status 1 if one failed

Needs NumPy. Promises on tokenizer.json, Parquet and the digits are skipped where `tokenizers`, `pyarrow` or `sklearn` is not
installed.
"""
import csv
import functools
import gzip
import http.server
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import traceback
from contextlib import redirect_stdout
from unittest import mock

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import common  # noqa: E402  (found by the line above)
import digits  # noqa: E402
import fineweb  # noqa: E402
import header_questions  # noqa: E402
import hellaswag  # noqa: E402
import mmlu  # noqa: E402
import synthetic  # noqa: E402
import tinyshakespeare  # noqa: E402
import tinystories  # noqa: E402

EOT = 256


def have(module):
    return importlib.util.find_spec(module) is not None


def write(path, content):
    content = content if isinstance(content, bytes) else content.encode()
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
    return path


def run(script, *arguments):
    """the script's main, silent"""
    with redirect_stdout(io.StringIO()):
        script.main(list(arguments))


def refusal(script, *arguments):
    """the line with which the script stops"""
    try:
        run(script, *arguments)
    except common.InputError as error:
        assert "\n" not in str(error), error
        return str(error)
    raise AssertionError(f"{script.__name__} {arguments}: accepted")


def read_shard(path):
    """tokens of a shard, after a look at every byte of its header"""
    with open(path, "rb") as file:
        content = file.read()
    header = np.frombuffer(content[:1024], dtype="<i4")
    kinds = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
    tokens = np.frombuffer(content[1024:], dtype=kinds[tuple(header[:2])])
    assert header[2] == len(tokens) and not header[3:].any(), header[:4]
    return tokens


def documents(*texts):
    """as bytes tokens, end of text before each"""
    return np.concatenate([np.array([EOT, *text.encode()]) for text in texts])


def same(found, expected):
    assert np.array_equal(found, expected), f"expected {expected}, found {found}"


def no_leftovers(folder):
    names = [name for _, _, names in os.walk(folder) for name in names if name.endswith(".tmp")]
    assert not names, names


# ---- the scripts on bytes ----


def test_tinyshakespeare():
    pieces = [f"Speaker {i}:\n{'word ' * (i % 7)}{i}" for i in range(3000)]
    text = "\n\n".join(pieces)
    run(tinyshakespeare, "--input", write("in.txt", text), "--tokenizer", "bytes", "--out", "out")
    expected = documents(*[piece + "\n\n" for piece in pieces[:-1]], pieces[-1])
    val, train = (read_shard(f"out/tiny_shakespeare_{name}.bin") for name in ("val", "train"))
    assert len(val) == 32768
    same(np.concatenate([val, train]), expected)
    assert sorted(os.listdir("out")) == ["tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"]
    assert "expected more than 32,768 tokens, found 10" in refusal(
        tinyshakespeare, "--input", write("short.txt", "a\n\nb\n\nc"), "--tokenizer", "bytes")
    assert "expected one file" in refusal(tinyshakespeare, "--input", "a", "b")


def test_tinystories():
    stories = [[{"story": f" Once {i}.{k} \n", "other": 1} for k in range(i + 1)] for i in range(3)]
    expected = [documents(*[record["story"].strip() for record in part]) for part in stories]
    with tarfile.open("all.tar.gz", "w:gz") as archive:
        for i in (2, 0, 1):  # taken in order of their names
            archive.add(write(f"data0{i}.json", json.dumps(stories[i])))
    run(tinystories, "--input", "all.tar.gz", "--tokenizer", "bytes", "--out", "tar")
    run(tinystories, "--input", "data00.json", "data01.json", "data02.json", "--tokenizer", "bytes", "--out", "json")
    for out in ("tar", "json"):
        same(read_shard(f"{out}/TinyStories_val.bin"), expected[0])
        same(read_shard(f"{out}/TinyStories_train.bin"), np.concatenate(expected[1:]))
    parts = [write(f"{i}.txt", "<|endoftext|>\n".join(record["story"] for record in part)) for i, part in enumerate(stories)]
    run(tinystories, "--input", *parts, "--tokenizer", "bytes", "--out", "text")
    same(read_shard("text/TinyStories_train.bin"), np.concatenate(expected[1:]))
    assert "no stories for train" in refusal(tinystories, "--input", "data00.json", "--tokenizer", "bytes", "--out", "one")
    no_leftovers(".")
    assert not os.path.exists("one/TinyStories_train.bin")


def test_fineweb():
    texts = [f"Document {i} " + "ä" * (i % 11) for i in range(50)] + [""]
    lines = "\n".join(json.dumps({"text": text, "id": i}) for i, text in enumerate(texts))
    expected = documents(*texts)
    run(fineweb, "--input", write("a.jsonl", lines), "--tokenizer", "bytes", "--out", "out", "--shard-tokens", "100")
    names = sorted(os.listdir("out"))
    n = -(-len(expected) // 100)
    assert names == [f"fineweb_train_{i:06d}.bin" for i in range(1, n)] + ["fineweb_val_000000.bin"], names
    shards = [read_shard(f"out/{name}") for name in names[-1:] + names[:-1]]
    same(np.concatenate(shards), expected)
    assert all(len(shard) == 100 for shard in shards[:-1])
    with gzip.open("b.jsonl.gz", "wb") as file:
        file.write(lines.encode())
    run(fineweb, "--input", "b.jsonl.gz", "a.jsonl", "--tokenizer", "bytes", "--out", "edu", "--type", "edu")
    same(read_shard("edu/edu_fineweb_val_000000.bin"), np.concatenate([expected, expected]))
    assert "there are shards in this folder" in refusal(fineweb, "--input", "a.jsonl", "--tokenizer", "bytes", "--out", "out")
    assert "no documents" in refusal(fineweb, "--input", write("none.jsonl", "\n"), "--tokenizer", "bytes", "--out", "none")
    assert "expected 2 .. 2^31 - 1, found 1" in refusal(fineweb, "--input", "a.jsonl", "--tokenizer", "bytes", "--shard-tokens", "1")


def test_exact_shards():
    text = json.dumps({"text": "x" * 9})  # ten tokens a document: shards end where documents do
    run(fineweb, "--input", write("a.jsonl", "\n".join([text] * 6)), "--tokenizer", "bytes", "--out", "out", "--shard-tokens", "20")
    assert [len(read_shard(f"out/{name}")) for name in sorted(os.listdir("out"))] == [20, 20, 20]
    kept, common.BATCH_DOCUMENTS = common.BATCH_DOCUMENTS, 1
    write("b.jsonl", "\n".join([text] * 5 + ["broken"]))
    assert "b.jsonl:6: expected a JSON object" in refusal(fineweb, "--input", "b.jsonl", "--tokenizer", "bytes", "--out", "b",
                                                          "--shard-tokens", "20")
    common.BATCH_DOCUMENTS = kept
    assert [len(read_shard(f"b/{name}")) for name in sorted(os.listdir("b"))] == [20, 20], "the complete ones stay, the last does not"


def test_parquet():
    import pyarrow
    import pyarrow.parquet
    texts = [f"Row {i}" for i in range(3000)]
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(3001)), "text": texts + [None]}), "a.parquet")
    run(fineweb, "--input", "a.parquet", "--tokenizer", "bytes", "--out", "out")
    same(read_shard("out/fineweb_val_000000.bin"), documents(*texts))
    pyarrow.parquet.write_table(pyarrow.table({"id": [1]}), "b.parquet")
    for path in ("b.parquet", write("c.parquet", "not Parquet")):
        assert 'expected Parquet with a column "text"' in refusal(fineweb, "--input", path, "--tokenizer", "bytes", "--out", "b")


def records(path):
    """(context, completions, label) of each record as text, after a look at every number that is not a token"""
    with open(path, "rb") as file:
        content = file.read()
    header = np.frombuffer(content[:1024], dtype="<i4")
    words, at, found, longest = np.frombuffer(content[1024:], dtype="<u2"), 0, [], 0
    while at < len(words):
        start, lists = at, []
        mark, n_bytes, index, label, n = (int(word) for word in words[at:at + 5])
        assert (mark, index, n) == (65535, len(found), 4)
        at += 5
        for _ in range(5):
            length = int(words[at])
            lists.append(bytes(words[at + 1:at + 1 + length].astype(np.uint8)).decode())
            at += 1 + length
        assert n_bytes == 2 * (at - start)
        longest = max(longest, n_bytes)
        found.append((lists[0], lists[1:], label))
    assert list(header[:4]) == [20240522, 1, len(found), longest] and not header[4:].any(), header[:5]
    return found


def test_hellaswag():
    examples = [{"ctx": f"A man {i}", "endings": [f"does {i}{c}" + "!" * c for c in "0123" for c in [int(c)]], "label": i % 4, "ind": i}
                for i in range(9)]
    examples[3]["label"] = "3"  # as text, as Hugging Face has it
    lines = "\n".join(map(json.dumps, examples))
    run(hellaswag, "--input", write("a.jsonl", lines), "--tokenizer", "bytes", "--out", "out")
    expected = [(e["ctx"], [" " + ending for ending in e["endings"]], int(e["label"])) for e in examples]
    assert records("out/hellaswag_val.bin") == expected
    for change, message in [({"label": 4}, 'expected a "label" 0..3, found 4'), ({"label": ""}, '"label"'), ({"ctx": 1}, 'the text "ctx"'),
                            ({"label": True}, '"label"'), ({"endings": ["a"] * 3}, "four texts"),
                            ({"endings": ["a", "b", "c", 4]}, "four texts"),
                            ({"ctx": ""}, "example 1: expected a context"), ({"ctx": "x" * 40000}, "at most 65,535 bytes, this one 80,")]:
        bad = write("bad.jsonl", json.dumps(examples[0]) + "\n\n" + json.dumps({**examples[1], **change}))
        line = refusal(hellaswag, "--input", bad, "--tokenizer", "bytes", "--out", "out")
        assert message in line and ("bad.jsonl:3" in line or "example 1" in line), line
    assert records("out/hellaswag_val.bin") == expected, "a failure must leave the file that is there"
    assert "the input holds no examples" in refusal(hellaswag, "--input", write("no.jsonl", ""), "--tokenizer", "bytes", "--out", "out")
    no_leftovers(".")


def test_mmlu():
    rows = [[f'What is "{i}",\nthen?', "one", "None", "", f"4{i}", "ABCD"[i % 4]] for i in range(6)]
    expected = [(f"Question: {row[0]}\n\nAnswer:", [" " + answer for answer in row[1:5]], "ABCD".index(row[5])) for row in rows]
    for name, part in (("data/test/a_test.csv", rows[:4]), ("data/test/b_test.csv", rows[4:]), ("data/dev/a_dev.csv", rows[:1])):
        table = io.StringIO(newline="")
        csv.writer(table).writerows(part)
        write(name, table.getvalue())
    with tarfile.open("data.tar", "w") as archive:
        archive.add("data")
    run(mmlu, "--input", "data.tar", "--tokenizer", "bytes", "--out", "tar")
    run(mmlu, "--input", "data/test/a_test.csv", "data/test/b_test.csv", "--tokenizer", "bytes", "--out", "csv")
    assert records("tar/mmlu_test.bin") == expected and records("csv/mmlu_test.bin") == expected
    for bad in ("a,b,c,d,A\n", "q,a,b,c,d,E\n", "q,a,b,c,d,AB\n"):
        assert "row 1: expected a question" in refusal(mmlu, "--input", write("bad.csv", bad), "--tokenizer", "bytes")


# ---- made-up data and digits ----


def read_examples(path):
    """inputs and targets, after a look at every byte of the header"""
    with open(path, "rb") as file:
        content = file.read()
    n = int.from_bytes(content[:8], "little")
    header = json.loads(content[8:8 + n])
    assert n % 8 == 0 and sorted(header) == ["inputs", "targets"] and all(t["dtype"] == "I32" for t in header.values()), header
    assert header["inputs"]["data_offsets"][0] == 0 and header["targets"]["data_offsets"][1] == len(content) - 8 - n, header
    tensors = [np.frombuffer(content[8 + n:][slice(*header[name]["data_offsets"])], dtype="<i4").reshape(header[name]["shape"])
               for name in ("inputs", "targets")]
    assert tensors[0].shape == tensors[1].shape and tensors[0].min() >= 0 and tensors[1].min() >= -1
    return tensors


def output(script, *arguments):
    """what the script prints"""
    with redirect_stdout(io.StringIO()) as text:
        script.main(list(arguments))
    return text.getvalue()


def test_counter():
    run(synthetic, "counter", "--vocab-size", "7", "--tokens", "1000", "--out", "out")
    tokens = np.concatenate([read_shard(f"out/counter_{name}.bin") for name in ("train", "val")])
    same(tokens, np.arange(1000) % 7)
    assert len(read_shard("out/counter_val.bin")) == 100
    run(synthetic, "counter", "--vocab-size", "65537", "--tokens", "70000", "--out", "out")
    tokens = read_shard("out/counter_train.bin")
    assert tokens.dtype.itemsize == 4 and tokens[62999] == 62999


def test_markov():
    V, noise, n = 11, 0.3, 60000
    text = output(synthetic, "markov", "--vocab-size", str(V), "--noise", str(noise), "--tokens", str(n), "--out", "out")
    tokens = np.concatenate([read_shard(f"out/markov_{name}.bin") for name in ("train", "val")])
    pairs = np.zeros((V, V))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    best = pairs.argmax(axis=1)
    assert sorted(best) == list(range(V)), "each token has one successor, and is one"
    right, expected = (best[tokens[:-1]] == tokens[1:]).mean(), 1 - noise + noise / V
    assert abs(right - expected) < 5 * (expected * (1 - expected) / n) ** 0.5, (right, expected)
    p = pairs / pairs.sum(axis=1, keepdims=True)  # a bigram table learnt from all of it: its loss cannot be far off the best
    loss = -(pairs * np.log(p)).sum() / pairs.sum()
    assert f"at best {100 * expected:.2f}%" in text, text
    assert abs(loss - float(text.split("loss of ")[1].split()[0])) < 0.02, (loss, text)
    for noise, printed in (("0", "at best 100.00% of the tokens right, a mean loss of 0.0000"), ("1", "9.09%")):
        assert printed in output(synthetic, "markov", "--vocab-size", str(V), "--noise", noise, "--tokens", "100", "--out", "edge")


def test_copy():
    run(synthetic, "copy", "--vocab-size", "9", "--examples", "200", "--length", "20", "--memory", "5", "--out", "out")
    for name, n in (("train", 180), ("val", 20)):
        inputs, targets = read_examples(f"out/copy_{name}.safetensors")
        assert inputs.shape == (n, 26)
        for row, answer in zip(inputs, targets):
            same(row[:20][row[:20] > 0], answer[21:])
            assert row[20] == 8 and not row[21:].any() and (answer[:21] == -1).all() and 1 <= answer[21:].min() <= answer[21:].max() <= 7
    run(synthetic, "copy", "--vocab-size", "3", "--examples", "10", "--length", "4", "--memory", "4", "--out", "full")
    same(read_examples("full/copy_val.safetensors")[0], [[1, 1, 1, 1, 2, 0, 0, 0, 0]])


def test_induction():
    run(synthetic, "induction", "--vocab-size", "9", "--examples", "300", "--length", "12", "--out", "out")
    inputs, targets = read_examples("out/induction_train.safetensors")
    assert inputs.shape == (270, 12) and (targets[:, :-1] == -1).all()
    places = [np.flatnonzero(row == 8) for row in inputs]
    assert all(len(place) == 2 and place[1] == 11 for place in places)
    same(targets[:, -1], [row[place[0] + 1] for row, place in zip(inputs, places)])
    assert {int(place[0]) for place in places} == set(range(10)), "every place but the last two before the end"


def test_seeds():
    for kind, name in (("markov", "markov_val.bin"), ("copy", "copy_val.safetensors"), ("induction", "induction_val.safetensors")):
        sizes = ("--tokens", "1000", "--examples", "100")
        for out, seed in (("a", "1"), ("b", "1"), ("c", "2")):
            run(synthetic, kind, "--out", out, "--seed", seed, *sizes)
        a, b, c = (open(f"{out}/{name}", "rb").read() for out in "abc")
        assert a == b and a != c and len(a) == len(c), kind
    for arguments, message in [(("copy", "--memory", "65"), "--memory: expected an integer 1..64, found 65"),
                               (("markov", "--noise", "1.5"), "--noise: expected a probability 0..1, found 1.5"),
                               (("markov", "--noise", "nan"), "found nan"),
                               (("counter", "--vocab-size", "2"), "--vocab-size: expected an integer 3..2147483647, found 2"),
                               (("induction", "--length", "2"), "--length: expected an integer 3..1048576, found 2"),
                               (("nonsense",), "invalid choice"), ((), "required: kind")]:
        line = refusal(synthetic, *arguments)
        assert message in line, line


def test_digits():
    import sklearn.datasets
    images = sklearn.datasets.load_digits()
    text = output(digits, "--out", "out")
    parts = [read_examples(f"out/digits_{name}.safetensors") for name in ("train", "val")]
    assert [len(part[0]) for part in parts] == [1438, 359] and "1,438 examples" in text, text
    inputs, targets = (np.concatenate(tensors) for tensors in zip(*parts))
    assert inputs.max() == 16 and (targets[:, :-1] == -1).all()
    found = sorted(zip(map(bytes, inputs.astype(np.uint8)), targets[:, -1]))
    assert found == sorted(zip(map(bytes, images.images.reshape(-1, 64).astype(np.uint8)), images.target)), "each image once"
    for digit in range(10):
        n, n_val = (targets[:, -1] == digit).sum(), (parts[1][1][:, -1] == digit).sum()
        assert abs(n_val - 0.2 * n) <= 0.5, (digit, n, n_val)
    run(digits, "--out", "again")
    run(digits, "--out", "other", "--seed", "2")
    a, b, c = (open(f"{out}/digits_val.safetensors", "rb").read() for out in ("out", "again", "other"))
    assert a == b and a != c
    assert "--seed: expected an integer of 0 or more, found -1" in refusal(digits, "--seed", "-1")
    run(digits, "--out", "nudged", "--nudge")
    nudged, labels = read_examples("nudged/digits_train.safetensors")
    plain, digit = (tensor[0] for tensor in (parts[0][0].reshape(-1, 8, 8), parts[0][1][:, -1:]))
    left = np.concatenate([plain[:, 1:], np.zeros((8, 1), np.int32)], axis=1)
    down = np.concatenate([np.zeros((1, 8), np.int32), plain[:-1]])
    assert nudged.shape == (5 * 1438, 64) and open("nudged/digits_val.safetensors", "rb").read() == a
    for k, image in ((0, plain), (1, left), (4, down)):
        assert (nudged[1438 * k].reshape(8, 8) == image).all() and (labels[1438 * k, -1:] == digit).all(), k


def test_no_digits():
    with mock.patch.dict(sys.modules, {"sklearn": None, "sklearn.datasets": None}):
        assert "needs Python's scikit-learn, which brings the images (pip install scikit-learn)" in refusal(digits, "--out", "out")
    assert not os.path.exists("out")


# ---- tokenizers ----


def make_tokenizer(n_words, path="tokenizer.json", special="<|endoftext|>"):
    """words w0, w1, ... and one special token; id 0 is for all else"""
    import tokenizers
    vocabulary = {"?": 0, **{f"w{i}": i + 1 for i in range(n_words)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([special])
    eot = tokenizer.token_to_id(special)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=f"{special} $A", special_tokens=[(special, eot)])
    tokenizer.enable_truncation(2)
    tokenizer.save(path)
    return eot


def test_library_tokenizer():
    eot = make_tokenizer(100)
    lines = [{"text": "w1 w2 w3"}, {"text": "w9 <|endoftext|> w9"}, {"text": "\ud800 w4"}]
    write("a.jsonl", "\n".join(map(json.dumps, lines)))
    run(fineweb, "--input", "a.jsonl", "--tokenizer", "tokenizer.json", "--out", "out")
    # neither cut off nor with a second end of text; a document that writes <|endoftext|> does not end there
    same(read_shard("out/fineweb_val_000000.bin"), [eot, 2, 3, 4, eot, 10, 0, 10, eot, 0, 5])
    os.mkdir("gpt2")
    os.rename("tokenizer.json", "gpt2/tokenizer.json")
    run(fineweb, "--input", "a.jsonl", "--out", "folder")  # the default, where there is a folder of that name
    same(read_shard("folder/fineweb_val_000000.bin"), read_shard("out/fineweb_val_000000.bin"))
    make_tokenizer(100, "other.json", "<stop>")
    assert "has no token <|endoftext|> or" in refusal(fineweb, "--input", "a.jsonl", "--tokenizer", "other.json", "--out", "b")
    assert "has no token <no> to stand" in refusal(fineweb, "--input", "a.jsonl", "--tokenizer", "other.json", "--out", "b",
                                                   "--eot", "<no>")
    run(fineweb, "--input", "a.jsonl", "--tokenizer", "other.json", "--eot", "<stop>", "--out", "b")
    assert "expected a tokenizer.json" in refusal(fineweb, "--input", "a.jsonl", "--tokenizer", write("bad.json", "{}"), "--out", "c")
    assert "expected a tokenizer.json" in refusal(fineweb, "--input", "a.jsonl", "--tokenizer", "none.json", "--out", "c")


def test_widths():
    write("a.jsonl", json.dumps({"text": "w0 w65533"}))
    for n_words, size in ((65534, 2), (65535, 4)):  # and two more tokens: 65,536 fit into two bytes
        eot = make_tokenizer(n_words)
        run(fineweb, "--input", "a.jsonl", "--tokenizer", "tokenizer.json", "--out", str(size))
        tokens = read_shard(f"{size}/fineweb_val_000000.bin")
        same(tokens, [eot, 1, 65534])
        assert tokens.dtype.itemsize == size and eot == n_words + 1
    line = refusal(hellaswag, "--input", "a.jsonl", "--tokenizer", "tokenizer.json")
    assert "records hold tokens below 65,535" in line, line


# ---- what goes wrong ----


def test_broken_inputs():
    for content, message in [('{"text": "a"}\n{"text": 5}', 'a.jsonl:2: expected an object with the text "text"'),
                             ('{"text": "a"}\n[1]', "a.jsonl:2: expected a JSON object, found '[1]'"),
                             ('{"text": "a"', "a.jsonl:1: expected a JSON object: "), (b"\xff\xfe", "a.jsonl:1: expected a JSON object: "),
                             ("<!DOCTYPE html>", "an HTML page instead"),
                             ("version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer")]:
        line = refusal(fineweb, "--input", write("a.jsonl", content), "--tokenizer", "bytes", "--out", "out")
        assert message in line, line
    packed = gzip.compress(b'{"text": "abc"}\n' * 9999)
    for content in (packed[:-9], packed[:60] + b"garbage" + packed[67:], b"no gzip at all"):
        refusal(fineweb, "--input", write("a.jsonl.gz", content), "--tokenizer", "bytes", "--out", "out")
    for content, message in [("{}", "expected a list of objects"), ("[1]", "object 0: expected an object"), ("[", "expected JSON")]:
        assert message in refusal(tinystories, "--input", write("a.json", content), "--tokenizer", "bytes", "--out", "out")
    assert "expected a tar archive" in refusal(tinystories, "--input", write("a.tar.gz", "x"), "--tokenizer", "bytes", "--out", "out")
    assert "expected UTF-8 text" in refusal(tinyshakespeare, "--input", write("a.txt", b"\xff"), "--tokenizer", "bytes")
    assert "none.txt: No such file" in refusal(tinyshakespeare, "--input", "none.txt", "--tokenizer", "bytes")
    assert not os.path.exists("out") or not os.listdir("out"), os.listdir("out")


def test_without_library():
    write("lacks/tokenizers.py", "raise ImportError")
    command = [sys.executable, os.path.join(HERE, "train_tokenizer.py")]
    there = {**os.environ, "PYTHONPATH": "lacks"}
    helped = subprocess.run([*command, "--help"], env=there, capture_output=True, text=True)
    assert helped.returncode == 0 and "--vocab-size" in helped.stdout, helped.stderr
    arguments = ["x.txt", "--style", "gpt2", "--vocab-size", "300", "--out", "tok"]
    failed = subprocess.run([*command, *arguments], env=there, capture_output=True, text=True)
    in_venv = sys.prefix != sys.base_prefix
    pip = os.path.relpath(os.path.join(sys.prefix, "bin/pip")) if in_venv else "pip"
    expected = f"train_tokenizer.py: needs the Python package tokenizers: {pip} install tokenizers\n"
    assert failed.returncode == 1 and failed.stderr == expected, failed.stderr


def test_exit_status():
    def status(script, *arguments):
        done = subprocess.run([sys.executable, os.path.join(HERE, script), *arguments], capture_output=True, text=True)
        assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 1, done.stderr
        return done.returncode, done.stderr

    assert status("fineweb.py", "--nonsense") == (2, "fineweb: unrecognized arguments: --nonsense\n")
    assert status("fineweb.py", "--version", "9B")[0] == 2
    assert status("mmlu.py", "--tokenizer", "bytes", "--input", "none.csv") == (2, "mmlu: none.csv: No such file or directory\n")
    write("a.jsonl", '{"text": "abc"}')
    write("file", "")
    assert status("fineweb.py", "--input", "a.jsonl", "--tokenizer", "bytes", "--out", "file/out")[0] == 1  # no folder there
    assert status("fineweb.py", "--input", "a.jsonl", "--tokenizer", "bytes", "--out", "out") == (0, "")


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_GET(self):
        if self.path == "/short":  # says more than it sends
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"only this")
            self.close_connection = True
        else:
            super().do_GET()


def test_download():
    write("served/a.bin", b"abc" * 1000000)
    write("served/page.bin", "\n<html><body>log in</body></html>")
    write("served/empty.bin", "")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory="served"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    os.environ["no_proxy"] = "127.0.0.1"
    try:
        path = common.download(url + "/a.bin", "got")
        assert open(path, "rb").read() == b"abc" * 1000000
        write("served/a.bin", "other")
        assert os.path.getsize(common.download(url + "/a.bin", "got")) == 3000000, "a file that is there is kept"
        for name, message in [("page.bin", "an HTML page instead of the file"), ("none.bin", "cannot be downloaded (File not found)"),
                              ("short", ""), ("empty.bin", "expected 0 bytes, 0 came")]:
            try:
                common.download(f"{url}/{name}", "got")
                raise AssertionError(f"{name}: accepted")
            except common.InputError as error:
                assert message in str(error) and name in str(error), error
    finally:
        server.shutdown()
        server.server_close()
    try:
        common.download(url + "/b.bin", "got", "--tokenizer")
        raise AssertionError("downloaded from nobody")
    except common.InputError as error:
        assert "cannot be downloaded" in str(error) and "give it with --tokenizer" in str(error), error
    assert os.listdir("got") == ["a.bin"], os.listdir("got")


def test_header_questions():
    with redirect_stdout(io.StringIO()):
        header_questions.main(["--out", "asked"])
    train, prompts = (header_questions.read_lines(f"asked/{name}.jsonl") for name in ("train", "prompts"))
    assert [prompt in train for prompt in prompts] == [True] * 5 + [False] * 5
    answers = {line["messages"][1]["content"] for line in train}
    assert all(prompt["messages"][1]["content"] in answers for prompt in prompts)  # nothing is asked that was never told
    page = "| [a.h](ops/a.h) | the sum; more |\n| [b.h](ops/b.h), [c.h](ops/c.h) | two |\n| [d.h](ops/d.h) | it is a clause |\n"
    assert header_questions.facts(page) == [("the sum", "a.h")]


PROMISES = [  # what, what it keeps, test, what it needs
    ("tinyshakespeare", "is cut as llm.c cuts it: end of text, piece, two newlines", test_tinyshakespeare, None),
    ("tinystories", "takes the archive, its files or text; the first is for validation", test_tinystories, None),
    ("fineweb", "fills shards to the token, wherever a document ends", test_fineweb, None),
    ("exact shards", "leave no empty one behind", test_exact_shards, None),
    ("parquet", "gives the rows in order", test_parquet, "pyarrow"),
    ("hellaswag", "records hold what the lines say", test_hellaswag, None),
    ("mmlu", "records hold questions and answers of the test folder", test_mmlu, None),
    ("counter", "counts", test_counter, None),
    ("markov", "has one likely successor for each token, and the Bayes rate that is printed", test_markov, None),
    ("copy", "asks for the tokens among the blanks, in their order", test_copy, None),
    ("induction", "asks for the token after the sign's first place", test_induction, None),
    ("seeds", "give the same bytes again; sizes without sense are refused", test_seeds, None),
    ("header questions", "five that are learned, five in new words about what is", test_header_questions, None),
    ("digits", "are scikit-learn's, each once, a fifth of each digit for validation", test_digits, "sklearn"),
    ("no digits", "where scikit-learn is missing, in one line that names it", test_no_digits, None),
    ("tokenizer.json", "encodes the text alone: no special tokens, not cut off", test_library_tokenizer, "tokenizers"),
    ("widths", "two bytes up to 65,536 tokens, four beyond", test_widths, "tokenizers"),
    ("broken inputs", "are refused in one line that says where", test_broken_inputs, None),
    ("no library", "is needed for --help, and its absence one line", test_without_library, None),
    ("exit status", "is 2 for the user's mistakes, 1 for the system's, 0 when done", test_exit_status, None),
    ("download", "is whole or refused; pages and stumps leave nothing behind", test_download, None),
]


def main():
    passed = failed = skipped = 0
    for name, promise, test, needed in PROMISES:
        if needed and not have(needed):
            skipped += 1
            print(f"skip  {name}: {promise}: skipped, no {needed} here")
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                test()
                passed += 1
                print(f"ok    {name}: {promise}")
            except Exception:
                failed += 1
                print(f"FAIL  {name}: {promise}\n{traceback.format_exc()}")
            os.chdir(HERE)
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
