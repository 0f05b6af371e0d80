#!/usr/bin/env bash
# dev/tools as a user meets them: inspect, tokenize and plot on a tiny run and on broken files. About 20 s after the builds.
#     dev/test_tools.sh                      the normal build
#     ASAN=1 OPT=-Og dev/test_tools.sh       the Makefile's variables choose another
# Everything happens in a folder that goes away again.
. "$(dirname "$0")/promises.sh"

# exit status and a text on standard output: shows STATUS TEXT PROMISE ARGUMENT...
shows() {
    local expected=$1 text=$2 promise=$3 status good=1
    shift 3
    timeout 30 "$inspect" "$@" >out 2>err
    status=$?
    if [ $status = "$expected" ] && grep -qE -- "$text" out; then good=0; fi
    verdict $good "$promise" "inspect $*: status $status, expected \"$text\" in: $(tail -n 5 out err)"
}

# status 2 and one line on stderr that holds TEXT
refuses() {  # PROGRAM TEXT PROMISE ARGUMENT...
    local program=$1 text=$2 promise=$3 status good=1
    shift 3
    timeout 30 $program "$@" >out 2>err
    status=$?
    if [ $status = 2 ] && [ "$(wc -l <err)" = 1 ] && [[ $(<err) == *"$text"* ]]; then good=0; fi
    verdict $good "refused: $promise" "$program $*: status $status, stderr: $(<err)"
}

need_build trainer "" train_gpt2
need_build inspect "" tools/inspect
need_build tokenize "" tools/tokenize
plot="$python $root/dev/tools/plot.py"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# ---- a run to look at, and files of every kind ----

for i in {1..200}; do echo "line $i: the plain loop is the law, and $i times $i is $((i * i))."; done >text.txt
echo '{"model_type":"gpt2","n_positions":25,"vocab_size":257,"n_layer":2,"n_head":3,"n_embd":33}' >n_positions.json
echo '{"model_type":"gpt2","n_positions":24,"vocab_size":257,"n_layer":2,"n_head":3,"n_embd":33}' >tiny.json
train() {  # RUN OPTION...
    "$trainer" --config tiny.json --train text.txt --val-fraction 0.2 --seq-len 16 --eval-batches 2 --run "$@" >log 2>&1 || cat log
}
train runs/a --steps 5 --save-every 2 --eval-every 2 --lr 1e-2 --export-hf hf --export-bin model.bin
train runs/b --steps 9 --eval-every 3 --seed 7
train averaged8 --steps 3 --eval-every 2 --ema 0.8
train averaged9 --steps 3 --eval-every 2 --ema 0.9
train sampled --steps 3 --seed 7 --batch-size 2 --grad-accum 2 --noise-scale 1 --sample-every 2 --max-new-tokens 2

cat >make_files.py <<'PYTHON'
import json, os, shutil, struct

def read(path):
    """[(name, dtype, shape, bytes)] of a .safetensors file in the order of its data."""
    data = open(path, "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    entries = sorted((entry["data_offsets"], name, entry) for name, entry in json.loads(data[8:8 + n]).items() if name != "__metadata__")
    return [(name, entry["dtype"], entry["shape"], data[8 + n + begin:8 + n + end]) for (begin, end), name, entry in entries]

def write(path, tensors):
    header, at = {}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in tensors))

tensors = sorted(read("hf/model.safetensors"), key=lambda tensor: tensor[0] != "transformer.wte.weight")  # that one first
os.makedirs("shards"), os.makedirs("outside"), os.makedirs("lost"), os.makedirs("misplaced")
half = {"model-00001-of-00002.safetensors": tensors[:9], "model-00002-of-00002.safetensors": tensors[9:]}
places = {tensor[0]: file for file, some in half.items() for tensor in some}
for folder in ("shards", "outside", "lost", "misplaced"):
    shutil.copy("hf/config.json", folder)
    for file, some in list(half.items())[:1 if folder == "lost" else 2]:
        write(f"{folder}/{file}", some)
    wrong = dict(places)
    if folder == "outside": wrong[tensors[0][0]] = "shards/../../hf/model.safetensors"
    if folder == "misplaced": wrong[tensors[0][0]] = "model-00002-of-00002.safetensors"
    json.dump({"metadata": {}, "weight_map": wrong}, open(f"{folder}/model.safetensors.index.json", "w"))

def floats(data): return list(struct.unpack(f"<{len(data) // 4}f", data))
def changed(i, f): return [(n, d, s, f(data) if k == i else data) for k, (n, d, s, data) in enumerate(tensors)]
def one_ulp(data): return data[:4 * 40] + struct.pack("<I", struct.unpack("<I", data[160:164])[0] + 1) + data[164:]
def negated(data): return data[:163] + bytes([data[163] ^ 128]) + data[164:]
def nan(data): return struct.pack("<2f", float("nan"), float("inf")) + data[8:]
write("ulp.safetensors", changed(0, one_ulp))
write("sign.safetensors", changed(0, negated))
write("nan.safetensors", changed(0, nan))
write("infinite.safetensors", [("x", "F32", [4, 4], struct.pack("<16f", float("inf"), float("-inf"), *[1] * 14))])
write("fewer.safetensors", tensors[1:])
write("turned.safetensors", [(n, d, s[::-1] if k == 0 else s, data) for k, (n, d, s, data) in enumerate(tensors)])
bf16 = lambda data: b"".join(data[i + 2:i + 4] for i in range(0, len(data), 4))
write("bf16.safetensors", [(n, "BF16", s, bf16(data)) for n, d, s, data in tensors])
write("kinds.safetensors", [("f64", "F64", [2], struct.pack("<2d", -1.5, 2.5)), ("i64", "I64", [2], struct.pack("<2q", -7, 9)),
                            ("f16", "F16", [2], struct.pack("<2e", 0.5, -2)), ("fp8", "F8_E4M3", [3], b"abc"), ("u8", "U8", [0], b"")])

header = lambda *numbers: struct.pack("<256i", *numbers, *[0] * (256 - len(numbers)))
open("tokens.bin", "wb").write(header(20240520, 1, 1000) + struct.pack("<1000H", *range(1000)))
open("tokens2.bin", "wb").write(header(20240520, 1, 900) + struct.pack("<900H", *range(800), *[7] * 100))
open("tokens32.bin", "wb").write(header(20240801, 7, 3) + struct.pack("<3I", 1, 128000, 2))
open("tokenizer.bin", "wb").write(header(20240328, 2, 3, 2) + b"\x01a\x03bcd\x01e")
example = lambda i: [65535, 30, i, 2, 4, 1, 5] + [1, 6] * 4
open("eval.bin", "wb").write(header(20240522, 1, 2, 30) + struct.pack("<30H", *example(0), *example(1)))
state = header(20240527, 1, 1, 0, 1, 0, 0, 0, 0, 0, 77)
open("state.bin", "wb").write(state + struct.pack("<6f", *range(6)))
json.dump({"version": "1.0", "added_tokens": [{"id": 2}], "pre_tokenizer": {"type": "ByteLevel"},
           "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<e>": 2}, "merges": ["a b"]}}, open("tokenizer.json", "w"))
for name, alpha, x in (("adapter_a", 4, 0.0), ("adapter_b", 8, 1.0)):
    os.makedirs(name)
    json.dump({"peft_type": "LORA", "r": 2, "lora_alpha": alpha, "target_modules": ["q_proj"]}, open(f"{name}/adapter_config.json", "w"))
    write(f"{name}/adapter_model.safetensors",
          [(f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{which}.weight", "F32", shape, struct.pack("<f", x) * n)
           for layer in range(2) for which, shape, n in (("A", [2, 5], 10), ("B", [10, 2], 20))])
PYTHON
$python make_files.py || { echo "0 passed, 1 failed"; exit 1; }

# ---- inspect: what a path is ----

echo "# inspect"
shows 0 "^  step_000005 +5 +[0-9.]+ KiB  verified  newest" "a run: its checkpoints, verified" runs/a
shows 0 "best val loss +[0-9]\.[0-9]+" "a run: where its training stands" runs/a/
shows 0 "manifest +verified, 6 files" "a checkpoint: checksums" runs/a/step_000005
shows 0 "^  state +step 5, updates 5" "a checkpoint: state" runs/a/step_000005
shows 0 "^  28 tensors, 36,333 parameters, 141.93 KiB, all F32" "a checkpoint: the sum of its parameters" runs/a/step_000005
shows 0 "^  averages +28 tensors, of the weights \(--ema\)" "a checkpoint: averaged weights" averaged8/step_000003
check "... which are no parameters" grep -qE "^  28 tensors, 36,333 parameters" out
shows 0 "^hf: Hugging Face folder" "a Hugging Face folder" hf
shows 0 "^  28 tensors, 36,333 parameters" "shards by their index" shards
shows 0 "^  28 tensors, 36,333 parameters" "shards by the index itself" shards/model.safetensors.index.json
shows 0 "transformer.h.1.mlp.c_fc.bias +F32 +\(132\) +132 +528 B" "a .safetensors file" hf/model.safetensors
shows 0 "f16 +F16 +\(2\) +-2 +0.5 +-0.75 +1.25 +0 +0" "statistics of other dtypes" kinds.safetensors --stats
"$python" - "$root/dev/ref" <<'PYTHON'
import sys
sys.path.insert(0, sys.argv[1])
import folders, numpy as np
def bytes_of(*shape): return np.zeros(shape, np.uint8)
folders.write_file("scaled.safetensors", {"a.weight": ("I8", bytes_of(3, 32)), "a.scale": ("F8_E8M0", bytes_of(3, 2)), "b.weight": ("I8", bytes_of(3, 32)),
    "c.weight": ("F8_E4M3", bytes_of(130, 8)), "c.weight_scale_inv": ("F8_E8M0", bytes_of(2, 1))})
PYTHON
shows 0 "a.weight +I8 +\(3, 32\) +192 +96 B +fp4: 1 x 32$" "two fp4 in a byte, with scales" scaled.safetensors
check "... fp8 with scales, and bytes without" test "$(grep -cE "c.weight +F8_E4M3 .* 128 x 128$|b.weight +I8 +\(3, 32\) +96 +96 B" out)" = 2
"$python" - "$root/dev/ref" <<'PYTHON'
import sys
sys.path.insert(0, sys.argv[1])
import folders, numpy as np
codes, many = np.full((3, 32), 0x2a, np.uint8), np.full((130, 8), 0x38, np.uint8)  # -1, 1; 1
exponents, scales = np.array([[127, 128], [127, 127], [126, 127]], np.uint8), np.array([[0.5], [3]], np.float32)
folders.write_file("as_read.safetensors", {"a.weight": ("I8", codes), "a.scale": ("F8_E8M0", exponents), "b": ("F8_E4M3", many), "b_scale_inv": ("F32", scales)})
a = np.tile(np.array([-1, 1], np.float32), (3, 32)) * np.exp2(exponents.astype(np.float32) - 127).repeat(32, 1)
b = np.full((130, 8), 0.5, np.float32)
b[128:] = 3.25
folders.write_file("as_floats.safetensors", {"a.weight": ("F32", a), "b": ("F32", b)})
folders.write_file("unknown.safetensors", {"x": ("F8_E5M2", many)}), folders.write_file("unknown2.safetensors", {"x": ("F8_E5M2", many + 1)})
PYTHON
shows 0 "a.weight +I8 +\(3, 32\) +-2 +2 +0 +1.173 +0 +0 +fp4: 1 x 32" "statistics of fp4 are those of numbers times scales" as_read.safetensors --stats
check "... of fp8, too, and of e8m0" test "$(grep -cE "^  b +F8_E4M3 +\(130, 8\) +0.5 +3 +0.5385 +0.3077 +0 +0 +128 x 128|^  a.scale +F8_E8M0 +\(3, 2\) +0.5 +2 " out)" = 2
shows 1 "^  b +16 +1,040 +0.25 +0.07692 +- +\(128, 0\)$" "fp8 against floats" as_read.safetensors as_floats.safetensors
check "... and fp4, which has the same" test "$(grep -cE "^  a.weight +I8 +\(3, 32\) +F32 +\(3, 64\)$|2 of another shape or dtype, 1 differs, max .a-b. 0.25 in b$" out)" = 2
shows 1 "^  x +1,040 +1,040 +- +- +- +-$" "a type whose numbers are not known" unknown.safetensors unknown2.safetensors
check "... and why" grep -qx "  -: of numbers in such a type only bytes are compared" out
shows 0 "wte.weight .* 1 +1$" "statistics count NaN and infinity" nan.safetensors --stats
shows 0 "^  x +F32 +\(4, 4\) +1 +1 +1 +0 +0 +2$" "... both infinities, which no mean has" infinite.safetensors --stats
"$inspect" infinite.safetensors --stats --json >out
check "... in --json, too" test "$(tr -d ' \n' <out | grep -c '"mean":1.0,"std":0.0,"nan":0,"inf":2')" = 1
shows 0 "^model.bin: llm.c model" "llm.c's model" model.bin
shows 0 "largest token +999" "llm.c's tokens, GPT-2" tokens.bin
shows 0 "largest token +128,000" "llm.c's tokens, Llama 3" tokens32.bin
shows 0 "end of text +2" "llm.c's tokenizer" tokenizer.bin
shows 0 "examples +2" "llm.c's evaluation" eval.bin
shows 0 "^  state +step 77, rank 0, ranks 1, master_weights true" "llm.c's optimizer state" state.bin
shows 0 "^  model +BPE" "tokenizer.json" tokenizer.json
mkdir tokenizer && cp tokenizer.json tokenizer && echo '{}' >tokenizer/tokenizer_config.json
shows 0 "^tokenizer/tokenizer.json: tokenizer.json, " "a tokenizer's folder" tokenizer/
shows 0 "^  1 series, equal$" "the same folder and its file" tokenizer tokenizer.json
shows 0 "^  a +5 +[0-9.]+ +[0-9.]+ +[0-9.]+  step_000005$" "a folder of runs: a line for each" runs
check "... of which there are two" test "$(grep -cE "^  [ab] +[59] " out)" = 2
shows 0 "last step +9" "metrics.jsonl" runs/b/metrics.jsonl
shows 0 "n_positions 24" "config.json" tiny.json

shows 0 "Exit status" "--help" --help
check "... in 80 columns" test "$(wc -L <out)" -le 80
cat >check_json.py <<'PYTHON'
import json, math, struct, subprocess, sys
from make_files import read
inspect, failed = sys.argv[1], []
for path in sys.argv[2:]:
    report = json.loads(subprocess.run([inspect, "--json", "--stats", path], capture_output=True, check=True).stdout)
    if [key for key in ("path", "kind", "bytes", "facts", "problem") if key not in report] or report["problem"] is not None:
        failed.append(path)
report = json.loads(subprocess.run([inspect, "--json", "--stats", "hf"], capture_output=True, check=True).stdout)
rows = {row["name"]: row for row in report["tensors"]}
for name, dtype, shape, data in read("hf/model.safetensors"):
    row, x = rows.pop(name), struct.unpack(f"<{len(data) // 4}f", data)
    mean = math.fsum(x) / len(x)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in x) / len(x))
    if (row["dtype"], row["shape"], row["elements"], row["bytes"]) != (dtype, shape, len(x), len(data)): failed.append(name)
    if (row["min"], row["max"], row["nan"]) != (min(x), max(x), 0): failed.append(f"{name}: min, max")
    if abs(row["mean"] - mean) > 1e-12 or abs(row["std"] - std) > 1e-12: failed.append(f"{name}: mean, std")
sys.exit(f"{failed}, not shown: {list(rows)}" if failed or rows else 0)
PYTHON
sed -i 's/^tensors = read/if __name__ != "__main__": raise SystemExit\n&/' make_files.py
sed -n '/^import/,/^tensors/p' make_files.py | sed '$d' | grep -v SystemExit >reader.py
sed -i 's/from make_files/from reader/' check_json.py
check "--json: valid, the same keys everywhere; tensors and statistics as Python finds them" $python check_json.py "$inspect" \
    runs/a runs/a/step_000005 hf shards model.bin hf/model.safetensors tokens.bin tokenizer.bin eval.bin state.bin tokenizer.json runs/b/metrics.jsonl tiny.json kinds.safetensors

# ---- inspect: two paths ----

echo "# inspect A B"
shows 0 "84 tensors, all equal" "a checkpoint and itself" runs/a/step_000005 runs/a/step_000005
shows 0 "28 tensors, all equal" "a Hugging Face folder and llm.c's .bin of the same model, turned matrices and padding included" hf model.bin
shows 0 "28 tensors, all equal" "a run's newest checkpoint and its export" runs/a hf
shows 0 "28 tensors, all equal" "shards and one file" shards hf/model.safetensors
shows 1 "28 tensors, 1 differs, max \|a-b\| [0-9.e-]+ in transformer.wte.weight, 1 ulp" "one bit of one element: one ulp" hf/model.safetensors ulp.safetensors
check "and where it is" grep -qE "transformer.wte.weight +1 +8,481 .* 1 +\(1, 7\)$" out
shows 1 "wte.weight +1 +8,481 +[0-9.e-]+ +2 " "one sign: a relative error of 2" hf/model.safetensors sign.safetensors
shows 1 "state.step +4 +5" "two checkpoints: their state" runs/a/step_000004 runs/a/step_000005
check "and every tensor that training moved" grep -qE "^  84 tensors, 84 differ, max .* ulp, [0-9]+ settings differ$" out
shows 1 "^  112 tensors, 2[0-9] differ, max .* in ema\.transformer\." "two checkpoints that differ in their averages only" averaged8 averaged9
shows 0 "^  112 tensors, all equal" "averages and themselves" averaged8 averaged8/step_000003
shows 1 "options.seed +42 +7" "two runs: their options" runs/a runs/b
number="-?[0-9]+\.[0-9]+(e-[0-9]+)?"
shows 1 "^  state.noise +\[0.0, 0.0\] +\[$number, $number\]$" "a list of numbers that are no shape" averaged8 sampled
check "the state of a generator: 64 bits" grep -qE "^  state.sampler +0x[0-9a-f]{16}  0x[0-9a-f]{16}$" out
shows 0 "sampler 0x[0-9a-f]{16}," "the same of one checkpoint" sampled/step_000003
shows 1 " 1 setting differs$" "one of a thing" n_positions.json tiny.json
shows 1 "only in b: transformer.wte.weight" "a tensor that is missing" fewer.safetensors hf/model.safetensors
shows 1 "transformer.wte.weight +F32 +\(257, 33\) +F32 +\(33, 257\)" "another shape" hf/model.safetensors turned.safetensors
shows 1 "transformer.wpe.weight +F32 +\(24, 33\) +BF16 +\(24, 33\)" "another dtype" hf/model.safetensors bf16.safetensors
check "and how far bfloat16 is away" grep -qE "wpe.weight +[0-9]+ +792 +0.000[0-9]+ +0.00[0-9]+ +- " out
shows 1 "max \|a-b\| nan in transformer.wte.weight" "a NaN against a number" hf/model.safetensors nan.safetensors
shows 1 "tokens +100 +900 +892 .*\(800\)" "two token shards, as far as both go" tokens.bin tokens2.bin
shows 1 "loss +5 " "two metrics.jsonl" runs/a/metrics.jsonl runs/b/metrics.jsonl
"$inspect" hf/model.safetensors ulp.safetensors --json >out
check "--json of two: what differs, by name" $python -c "
import json
report = json.load(open('out'))
assert not report['equal'] and report['in_both'] == 28, report
assert [(d['name'], d['differ'], d['max_ulp'], d['first']) for d in report['differing']] == [('transformer.wte.weight', 1, 1, [1, 7])], report"

# ---- inspect: adapters ----

echo "# inspect of adapters"
shows 1 "^  q_proj +b +2 +60 +4.472 +6.325$" "of two the size of A and B by kind of module" adapter_a adapter_b
check "beside what is compared of any two" grep -qE "^  4 tensors, 4 differ, max \|a-b\| 1 in .*, 1 setting differs$" out
shows 0 "^  adapter_b +b +2 +8 +60 +\[\"q_proj\"\] +-$" "of three: rank, alpha, targets" adapter_a adapter_b adapter_a
"$inspect" adapter_a adapter_b adapter_a --json >out
check "--json of three" $python -c "
import json
report = json.load(open('out'))
assert [x['lora_alpha'] for x in report['adapters']] == [4, 8, 4], report
assert [(x['adapter'], round(x['norm_A'] ** 2), round(x['norm_B'] ** 2)) for x in report['kinds']] == [('a', 0, 0), ('b', 20, 40), ('c', 0, 0)], report"
refuses "$inspect" "more than two paths are compared only where all are adapters" "three paths of which one is no adapter" adapter_a adapter_b hf

# ---- inspect: broken files ----

echo "# inspect: broken files"
flipped() {  # FROM FOLDER FILE OFFSET: a copy of a folder with another byte at an offset of one file
    cp -r "$1" "$2"
    printf "$(printf '\\x%02x' $((255 ^ $(od -An -tu1 -j"$4" -N1 "$2/$3"))))" | dd of="$2/$3" bs=1 seek="$4" conv=notrunc status=none
}
for file in config.json model.safetensors optimizer.safetensors manifest.json; do
    flipped runs/a/step_000005 "flipped_$file" $file 100
    refuses "$inspect" "flipped_$file: $file: " "a checkpoint with another byte in $file" "flipped_$file"
done
"$inspect" flipped_optimizer.safetensors >out 2>/dev/null
check "what can be read of it is shown" grep -qE "^  28 tensors, 36,333 parameters" out
cp -r runs/a broken
rm broken/step_000005/model.safetensors
refuses "$inspect" "broken: step_000005: model.safetensors: cannot be opened" "a run with a broken checkpoint" broken
check "its other checkpoint is shown as good" grep -qE "step_000004 .* verified" out
check "and the broken one as broken" grep -qE "step_000005 .* model.safetensors: cannot be opened" out
mkdir begun && cp runs/a/metrics.jsonl runs/a/settings.json begun/ && "$inspect" begun >out 2>/dev/null
check "a run without a checkpoint says so" grep -qE "^  checkpoints +none yet$" out
cp -r runs/a stopped
mv stopped/step_000005 stopped/step_000005.tmp
shows 0 "unfinished +step_000005.tmp" "what an interrupted save has left is no error" stopped
shows 0 "84 tensors, all equal" "and a run is compared by the newest that is whole" stopped runs/a/step_000004
refuses "$inspect" "expected the name of a file in this folder" "an index that leads out of its folder" outside
refuses "$inspect" "model-00002-of-00002.safetensors: cannot be opened" "an index whose shard is not there" lost
refuses "$inspect" 'tensor "transformer.wte.weight" is not in "model-00002' "an index that names the wrong shard" misplaced
refuses "$inspect" "cannot be examined: No such file" "a path that is not there" nowhere
mkdir pipes && cp -r hf pipes/config.json && cp -r shards pipes/model.safetensors.index.json && cp -r runs/a pipes/settings.json
cp -r runs/a/step_000005 pipes/manifest.json && cp -r adapter_a pipes/adapter_config.json
for file in config.json model.safetensors.index.json settings.json manifest.json adapter_config.json; do
    rm pipes/$file/$file && mkfifo pipes/$file/$file
    refuses "$inspect" "pipes/$file: $file: expected a file, found a pipe" "a folder whose $file is a pipe" pipes/$file
done
mkdir empty && echo text >empty/file
refuses "$inspect" "found none of them in this folder" "a folder of something else" empty
refuses "$inspect" "runs: expected a run, a checkpoint or a file to compare, found a folder of runs" "a folder of runs to compare" runs runs/a
cp -r runs many && mkdir many/c many/.hidden && sed '3s/"step"/"stop"/' runs/a/metrics.jsonl >many/c/metrics.jsonl
refuses "$inspect" "many: c: metrics.jsonl: line 3: expected a record" "a folder of runs one of which is broken" many
check "the others are shown" grep -qE "^  b +9 .* step_000009$" out
check "and the broken one too" grep -qE "^  c +- .* none yet$" out
refuses "$inspect" "found something else" "a file of something else" text.txt
sed '3s/"step"/"stop"/' runs/a/metrics.jsonl >stop.jsonl
refuses "$inspect" "stop.jsonl: line 3: expected a record" "a line of metrics.jsonl without a step" stop.jsonl
refuses "$inspect" "unknown option" "an option that is none" hf --statistics
refuses "$inspect" "expected one path or two" "no path"
refuses "$inspect" "more than two paths are compared only where all are adapters" "three paths" hf hf hf
printf '{"step": 6' | cat runs/a/metrics.jsonl - >unfinished.jsonl
shows 0 "the last line is not complete" "a run that still writes is no error" unfinished.jsonl

n_bad=0
for file in hf/model.safetensors model.bin tokens.bin tokenizer.bin eval.bin state.bin tokenizer.json; do
    for length in 0 1 4 8 9 40 1023 1024 1030; do
        [ $length -lt "$(wc -c <$file)" ] || continue
        head -c $length $file >cut
        timeout 30 "$inspect" cut >out 2>err
        if [ $? != 2 ] || [ "$(wc -l <err)" != 1 ]; then n_bad=$((n_bad + 1)); echo "      $file cut to $length: $(<err)"; fi
    done
done
check "refused: every kind of file cut short, at nine lengths" test $n_bad = 0

# ---- tokenize ----

echo "# tokenize"
golden=$root/dev/golden/tokenizers
cat >check_tokenize.py <<'PYTHON'
"""tokenize against files of the library's ids (every 15th line), and sample.txt there and back: what differs, if anything."""
import json, subprocess, sys, unicodedata

def run(path, text, *options):
    return subprocess.run([tool, "-t", path, *options], input=text, capture_output=True, check=True).stdout

tool, golden, style = sys.argv[1:]
path = f"{golden}/{style}.json"
for number, line in list(enumerate(open(f"{golden}/{style}.expected.jsonl"), 1))[::15]:
    line = json.loads(line)
    ids = " ".join(map(str, line["ids"]))
    if run(path, line["text"].encode()).decode() != ids + "\n": sys.exit(f"{style}, line {number}: other ids")
    if run(path, ids.encode(), "--decode").decode() != line["decoded"]: sys.exit(f"{style}, line {number}: another text")
sample = open(f"{golden}/sample.txt", encoding="utf-8", newline="").read()
if style.startswith("qwen"): sample = unicodedata.normalize("NFC", sample)
if style == "gpt2-prefix": sample = " " + sample
back = run(path, run(path, sample.encode(), "--template", "0"), "--decode").decode()
if back != sample: sys.exit(f"{style}: sample.txt came back changed")
PYTHON
for style in gpt2 gpt2-prefix qwen2 qwen3.5 mistral-v0.1 mistral-v0.3; do
    $python check_tokenize.py "$tokenize" "$golden" $style >out 2>&1
    verdict $? "$style: ids and texts of Hugging Face tokenizers, and sample.txt there and back" "$(tail -n 1 out)"
done

# expects ID LIST or TEXT on standard output for TEXT on standard input: gives EXPECTED PROMISE INPUT ARGUMENT...
gives() {
    local expected=$1 promise=$2 input=$3 good=1
    shift 3
    if printf '%b' "$input" | timeout 30 "$tokenize" "$@" >out 2>err && [ "$(<out)" = "$expected" ]; then good=0; fi
    verdict $good "$promise" "tokenize $*: expected \"$expected\", found \"$(<out)\" $(<err)"
}
gives "104 105 10" "bytes: the default" 'hi\n'
gives "" "an empty text: an empty line" ''
gives "1 392" "the template's <s> in front" 'a' -t "$golden/mistral-v0.1.json"
gives "392" "--template 0: without" 'a' -t "$golden/mistral-v0.1.json" --template 0
gives "775" "a special token in the text is one" '<|im_start|>' -t "$golden/qwen2.json"
gives "27 91 72 76 62 302 310 83 91 29" "--added-tokens 0: it is text" '<|im_start|>' -t "$golden/qwen2.json" --added-tokens 0
gives "hi<|im_end|>" "--decode: ids with any white space between them" ' 71\n\t72 776 ' -t "$golden/qwen2.json" -d
gives "hi" "--skip-special" '71 72 776' -t "$golden/qwen2.json" -d --skip-special
gives "bcda" "--decode with llm.c's gpt2_tokenizer.bin" '1 0' -t tokenizer.bin -d

$python - "$golden" <<'PYTHON'
import json, os, sys
os.makedirs("documents/deeper"), os.makedirs("model"), os.makedirs("binary")
for path, text in {"b.txt": b"ab", "a.txt": b"hi", "deeper/c.md": b"<|endoftext|>", "image.png": b"\x89PNG\0\0", "empty.txt": b""}.items():
    open(f"documents/{path}", "wb").write(text)
open("binary/x", "wb").write(b"\0\1")
open("lines.jsonl", "w").write('{"text": "a"}\n{"text": "b"}\n')
small = json.load(open(f"{sys.argv[1]}/qwen2.json"))
json.dump(small, open("model/tokenizer.json", "w"))
json.dump({**small, "padding": {"strategy": "BatchLongest"}, "truncation": {"max_length": 8}}, open("padding.json", "w"))
json.dump({**small, "added_tokens": []}, open("no_eot.json", "w"))
large = {**small, "model": {**small["model"], "merges": [], "vocab": dict(small["model"]["vocab"])}}
vocab = large["model"]["vocab"]
for i in range(len(vocab), 65536): vocab[f"token{i}"] = i
large["added_tokens"] = []
json.dump({**large, "added_tokens": [{"id": 65536, "content": "<|endoftext|>", "normalized": False}]}, open("large.json", "w"))
del vocab["token65535"]
json.dump({**large, "added_tokens": [{"id": 65535, "content": "<|endoftext|>", "normalized": False}]}, open("narrow.json", "w"))
PYTHON
cat >check_shard.py <<'PYTHON'
"""a shard's header and all of its tokens, against those given"""
import struct, sys
path, letter, *ids = sys.argv[1:]
header = [20240520, 1] if letter == "H" else [20240801, 7]
expected = struct.pack(f"<256i{len(ids)}{letter}", *header, len(ids), *[0] * 253, *map(int, ids))
sys.exit(open(path, "rb").read() != expected)
PYTHON
shard() {  # PROMISE LETTER TOKENS ARGUMENT...: a shard with exactly these
    local promise=$1 letter=$2 tokens=$3 good=1
    shift 3
    rm -f made.bin
    # shellcheck disable=SC2086
    if timeout 30 "$tokenize" "$@" --out made.bin >out 2>err && $python check_shard.py made.bin $letter $tokens; then good=0; fi
    verdict $good "$promise" "tokenize $*: expected $tokens, found $(od -An -v -j 1024 -t u2 -w64 made.bin) $(<out) $(<err)"
}
shard "a shard of one file: end of text, then its tokens" H "774 71 72" -t model documents/a.txt
shard "of a folder: every text in order, end of text before each" H "774 71 72 774 64 65 774 774" -t model/ documents
check "what is no text is left out and counted" grep -q "^3 documents, 17 bytes, 8 tokens with end of text, .*, 2 files left out: empty or binary, made.bin: uint16$" out
shard "of files, patterns and folders together, as they were typed" H "774 64 65 774 71 72 774 774" -t model documents/b.txt 'documents/*a.txt' documents/deeper
shard "of JSON Lines: each a document" H "774 64 774 65" -t model lines.jsonl
mkdir mixed && cp lines.jsonl documents/a.txt mixed/
shard "... beside other files too" H "774 71 72 774 64 774 65" -t model mixed
shard "65,536 tokens: uint16" H "65535 71 72" -t narrow.json documents/a.txt
shard "65,537 tokens: uint32" I "65536 71 72" -t large.json documents/a.txt
shows 0 "largest token +65,536" "inspect reads it" made.bin
shard "of bytes: end of text is 256" H "256 104 105" documents/a.txt
rm made.bin
"$tokenize" documents/a.txt >out 2>err
check "one document is no documents" grep -q "^1 document, 2 bytes, 3 tokens with" out
"$tokenize" -t model documents >out 2>err
check "without --out: only counted, to the same numbers" grep -q "^3 documents, 17 bytes, 8 tokens with end of text, .* left out: empty or binary$" out
"$tokenize" -t padding.json documents/a.txt >out 2>err
check "a file that asks for truncation and padding: one line of warning" grep -qx "tokenize: padding.json: its truncation and padding will not be applied: a text is never cut or filled up" err

no() { refuses "$tokenize" "$@" </dev/null; }
no "nowhere: cannot be opened: No such file" "a tokenizer that is not there" -t nowhere
no "expected an object as \"model\", found nothing" "another JSON file as tokenizer" -t tiny.json
no "which only decodes" "text for llm.c's gpt2_tokenizer.bin" -t tokenizer.bin documents
no "the tokenizer has no end of text" "documents without an end of text" -t no_eot.json documents
no "documents/none.txt: expected a file, a folder or a pattern, found nothing of that name" "a file that is not there" documents/none.txt
no "documents/image.png: " "a file that is no text" documents/image.png
no "documents/empty.txt: " "an empty file" documents/empty.txt
no "expected text, found only files that are empty or binary" "a folder without text" binary
echo '[{"text": "a"}]' >mixed/list.jsonl
no "mixed/list.jsonl:1: expected a JSON object such as {\"text\": \"...\"}, found a list" "a JSON list named .jsonl" mixed
echo '{"messages": []}' >chat.jsonl
no "chat.jsonl:1: expected an object with the key \"text\", found \"messages\"" "JSON Lines of another kind" chat.jsonl
no "--out: expected files to read, found none" "--out alone" --out x.bin
no "--decode: expected ids on standard input and no files" "--decode with files" --decode text.txt
no "unknown option" "an option that is none" --outt x.bin
for ids in 257 -1 x 1x 99999999999999999999 1,2; do
    echo "$ids" >ids
    refuses "$tokenize" "--decode: expected ids 0..256, found \"$ids\" at byte 0" "--decode of \"$ids\"" --decode <ids
done
no "no*such: expected a file, a folder or a pattern" "a pattern that nothing has, beside a good file" --out made.bin text.txt 'no*such'
check "a shard that was not finished leaves nothing behind" test -z "$(ls made.bin* 2>/dev/null)"
timeout 30 "$tokenize" --out text.txt/x.bin text.txt >out 2>err
check "a folder that cannot be made: status 1, one line" test "$? $(wc -l <err)" = "1 1"
no "--out: expected the name of a shard, found that of a folder" "a folder as --out" --out documents text.txt
no "--shard-tokens: needs --out" "--shard-tokens without --out" --shard-tokens 5 text.txt
no "--val-fraction: of 3 tokens none are left for validation" "a text too short for its fraction" --out short --val-fraction 0.1 documents/a.txt

# series of shards, in a folder that is made: the tokens of the one shard, and aside what tokens_split takes of each word
cat >check_series.py <<'PYTHON'
"""the shards of NAME against one shard of each word: what stands where, how long, and that nothing else lies there"""
import glob, struct, sys
most, fraction, name, *words = sys.argv[1:]
most, fraction = int(most), struct.unpack("<f", struct.pack("<f", float(fraction)))[0]
def tokens(path):
    data = open(path, "rb").read()
    magic, version, n = struct.unpack("<3i", data[:12])
    assert (magic, version, len(data)) == (20240520, 1, 1024 + 2 * n), path
    return struct.unpack(f"<{n}H", data[1024:])
expected = {"train": (), "val": ()}
for word in words:
    all = tokens(word)
    n_val = int(fraction * len(all))
    expected["train"] += all[:len(all) - n_val]
    expected["val"] += all[len(all) - n_val:]
n_files = 0
for kind, first in (("train", 1), ("val", 0)):
    parts = [expected[kind][i:i + most] for i in range(0, len(expected[kind]), most)]
    for i, part in enumerate(parts): assert tokens(f"{name}_{kind}_{first + i:06d}.bin") == part, (kind, i)
    n_files += len(parts)
assert len(glob.glob(name + "*")) == n_files, "other files"
PYTHON
series() {  # PROMISE SHARD-TOKENS FRACTION WORD...
    local promise=$1 most=$2 fraction=$3 good=1 words=() i=0
    shift 3
    rm -rf new words.*
    for word; do "$tokenize" --out words.$i "$word" >out 2>err && words+=(words.$i) && i=$((i + 1)); done
    if timeout 30 "$tokenize" --out new/deep/x --shard-tokens $most --val-fraction $fraction "$@" >out 2>err &&
        $python check_series.py $((most > 0 ? most : 1 << 30)) $fraction new/deep/x "${words[@]}" 2>err; then good=0; fi
    verdict $good "$promise" "tokenize --shard-tokens $most --val-fraction $fraction $*: $(<out) $(tail -n 1 err) $(ls new/deep)"
}
head -c 3000 "$root/README.md" >long.txt
series "shards of 1000 tokens, the last of what remains" 1000 0 long.txt
series "a tenth for validation, in one shard each" 0 0.1 long.txt
series "both, of several words: the last part of each" 333 0.25 long.txt documents text.txt
series "a part that reaches back over many shards" 100 0.9 long.txt long.txt
series "a part that ends with a shard" 50 0.5 documents long.txt
series "shards of one token" 1 0.5 documents
check "... and the line that says where they are" grep -q ", new/deep/x_train_000001.bin to 0*[0-9]* ([0-9]* tokens), new/deep/x_val_000000.bin to 0*[0-9]* ([0-9]* tokens): uint16$" out
no "--out: new/deep/x_train_000001.bin is there already" "shards of another run under the same name" --out new/deep/x --shard-tokens 5 text.txt
rm new/deep/x_train*
no "--out: new/deep/x_val_000000.bin is there already" "... and those for validation, before any work" --out new/deep/x.bin --val-fraction 0.5 text.txt
rm -r new
head -c 60000000 /dev/zero | tr '\0' 'a' >slow.txt
"$tokenize" --tokenizer "$golden/qwen2.json" --out new/x --shard-tokens 100 long.txt slow.txt >out 2>err &
for _ in {1..200}; do [ -e new/x_train_000001.bin.tmp ] && break; sleep 0.02; done
kill -TERM $!
wait $!
check "stopped while it works: no shard, and no part of one" test $? = 143 -a -z "$(ls new)"
rm -r new slow.txt
timeout 30 "$tokenize" text.txt <<<x >/dev/full 2>err
check "a full disk behind standard output: status 1" test $? = 1

# ---- tokenize --chat ----

echo "# tokenize --chat"
cat >talks.jsonl <<'LINES'
{"messages": [{"role": "user", "content": "Is 7 prime?"}, {"role": "assistant", "content": "<think>\nNo divisor.\n</think>\n\nYes."}]}
{"instruction": "Add", "input": "2, 2", "output": "4"}
{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": ""}]}
{"text": "no conversation"}
LINES
printf '<|im_start|>user\nIs 7 prime?<|im_end|>\n<|im_start|>assistant\n[[<think>\nNo divisor.\n</think>\n\nYes.<|im_end|>]]\n' >want
chat=("$tokenize" --chat --tokenizer "$golden/qwen2.json" --chat-template qwen3)
"${chat[@]}" talks.jsonl >out 2>err
check "what is learned stands between brackets" cmp -s <(sed -n '2,/]]$/p' out) want
check "and the counts follow" grep -q "^2 of 4 samples are used: .* of them learned" out
check "with the first samples of each kind that are left out" test "$(grep -c '^1 left out, no ' out) $(grep -c '^    talks.jsonl:[34]: expected\|^    talks.jsonl:3: message 2' out)" = "2 2"
check "nothing on standard error" test ! -s err
"${chat[@]}" --show 0 --seq-len 64 talks.jsonl >rows 2>err
check "--seq-len: how they fill rows" grep -qE "^in rows of 64 positions: 1 row, 2 samples a row, [0-9.]+% padding$" rows
gzip -c talks.jsonl >packed && "${chat[@]}" packed 2>err | sed 's/ packed:/ talks.jsonl:/' >again
check "an archive says the same" cmp -s out again
"${chat[@]}" --chat-template qwen2.5 talks.jsonl >out 2>err
check "another template: with its system text" test "$(sed -n 2,3p out)" = $'<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>'
echo '{"image": "packed", "instruction": "<image>?", "output": "b"}' >seen.jsonl
"$tokenize" --chat --tokenizer "$golden/qwen3.5.json" --chat-template qwen3.6 seen.jsonl >out 2>err
check "an image stands as one placeholder" test "$(grep -E '^(<.vision|<.im_start.>assistant|\[\[)' out | tr '\n' '|')$(grep -c '^1 image, here of one placeholder each' out)" = \
    '<|vision_start|><|image_pad|><|vision_end|>?<|im_end|>|<|im_start|>assistant|[[b<|im_end|>]]|1'
if script -qc "$(printf '%q ' "${chat[@]}") talks.jsonl" /dev/null >out 2>err </dev/null; then
    check "on a terminal what is learned is coloured" grep -q $'\e\\[1;32m<think>' out
fi
mkdir -p chatty && cp "$golden/qwen2.json" chatty/tokenizer.json
cat >chatty/chat_template.jinja <<'JINJA'
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
JINJA
"$tokenize" --chat --tokenizer chatty talks.jsonl >out 2>err
check "the folder's template is recognised" grep -qx "chat template chatml" out

# ---- plot ----

echo "# plot"
has_matplotlib=$($python -c "import matplotlib" 2>/dev/null && echo 1 || echo 0)
cat >plots.py <<'PYTHON'
"""plot.py, once for each request (arguments that end in NUL each, an empty one behind): its status is the answer. Each is
a process of its own, forked from one that has loaded matplotlib, which takes longer than to draw."""
import os, runpy, sys, traceback
path = sys.argv[1]
sys.path[0] = os.path.dirname(path)
try:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError:
    pass
request = b""
while byte := os.read(0, 1):
    request += byte
    if not request.endswith(b"\0\0"): continue
    if child := os.fork():
        os.write(1, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        request = b""
        continue
    os.dup2(os.open("out", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 1), os.dup2(os.open("err", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 2)
    sys.argv = [path, *map(os.fsdecode, request[:-2].split(b"\0"))]
    status = 1
    try: runpy.run_path(path, run_name="__main__")
    except SystemExit as end: status = end.code
    except BaseException: traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status or 0)
PYTHON
coproc plots { exec $python plots.py "$root/dev/tools/plot.py"; } 2>/dev/null
soon() {  # ARGUMENT...: $plot with these, out and err too
    local status
    printf '%s\0' "$@" "" >&"${plots[1]}" && read -r -t 60 status <&"${plots[0]}" && return "$status"
}
drawn() {  # PROMISE NAME ARGUMENT...: NAME.html and NAME.png are there, with a curve and no number that is none
    local promise=$1 name=$2 good=1
    shift 2
    rm -f "$name.html" "$name.png"
    if soon "$@" && grep -q '<path class="line"' "$name.html" && ! grep -q 'NaN\|nan,\|Infinity' "$name.html"; then good=0; fi
    [ $has_matplotlib = 0 ] || [ "$(head -c 4 "$name.png" | tail -c 3)" = PNG ] || good=1
    verdict $good "$promise" "plot.py $*: $(tail -n 3 out err)"
}
[ $has_matplotlib = 1 ] || { skipped=$((skipped + 1)); echo "skip  PNG: no matplotlib here"; }
COLUMNS=80 $plot --help >out
check "plot --help in 80 columns" test "$(wc -L <out)" -le 80
COLUMNS=80 $python "$root/dev/data/train_tokenizer.py" --help >out
check "... and that of train_tokenizer.py" test "$(wc -L <out)" -le 80
make -s -C "$root" help >out
check "... and of make" test "$(wc -L <out)" -le 80
make -s -C "$root" plot PYTHON="$python" RUN="$work/runs/a" >out 2>err
check "make plot RUN=...: the program itself" test "$(grep -c '^wrote .*/runs/a/loss\.' out) $(wc -c <err)" = "$((1 + has_matplotlib)) 0"
drawn "one run: loss.html and loss.png in its folder" runs/a/loss runs/a
drawn "two runs: compare.html and compare.png beside the first" runs/compare runs/a runs/b
check "with both names and the settings that differ" test "$(grep -cE '>a</td>.*>b</td>' runs/compare.html) $(grep -c 'options.seed</td><td>42</td><td>7' runs/compare.html)" = "1 1"
check "... but not when each was started" test "$(grep -c '<td>starts' runs/compare.html)" = 0
drawn "folders by their whole path" "$PWD/runs/compare" "$PWD/runs/a" "$PWD/runs/b"
check "... are named so" grep -q "wrote $PWD/runs/compare.html" out
drawn "--x tokens and --out" there --x tokens --out there runs/a runs/b
check "the axis is named" grep -q '>tokens</text>' there.html
drawn "--x time" there --x time --out there runs/b
mkdir -p odd/nan odd/blind odd/one odd/start odd/new odd/a
sed '4,5s/"loss": [^,]*, "norm": [^,]*/"loss": null, "norm": null/; 4,5s/"skipped": false/"skipped": true/' runs/b/metrics.jsonl | sed '4s/"loss": null/"loss": NaN/' >odd/nan/metrics.jsonl
grep -v '"tokens": null' runs/b/metrics.jsonl >odd/blind/metrics.jsonl
head -n 3 runs/b/metrics.jsonl >odd/one/metrics.jsonl
head -n 2 runs/b/metrics.jsonl >odd/start/metrics.jsonl
head -n 1 runs/b/metrics.jsonl >odd/new/metrics.jsonl
cp unfinished.jsonl odd/a/metrics.jsonl
drawn "skipped updates and losses that are not finite" odd/nan/loss odd/nan
drawn "no validation" odd/blind/loss odd/blind
drawn "a single step" odd/one/loss odd/one
drawn "only a validation before the first step" odd/start/loss odd/start
mkdir -p odd/own
slow_end='s/"tok_per_s": [0-9][^,]*/"tok_per_s": 20000/; /"step": 9, "loss": [0-9]/s/20000/2806/'
own_keys='s/"loss": \([0-9][^,]*\)/&, "second": 1\1, "again": \1, "still": 2.5, "flag": true, "unexplained": 3\1/
    s/"tokens": \([0-9][0-9]*\)/&, "passes": \1e-3, "balance": 0.\1/; s/"val_loss": \([0-9][^,]*\)/&, "<b>$x": 4\1, "again": \1/
    1s/"time"/"second": "of <i>", "again": "a", "still": "a", "flag": "a", "passes": "a", "balance": "c", "<b>$x": "b $^", "kind": "a", &/'
sed "$slow_end; $own_keys"'; 4,5s/"loss": [^,]*, "norm": [^,]*/"loss": null, "norm": null/; s/"time": [0-9]/"acc1": 0.25, "load": 1.5, "noise_scale": 512.5, "val_loss_ema": 3.5, "kind": "train", &/' runs/b/metrics.jsonl >odd/own/metrics.jsonl
drawn "keys of a trainer's own, and steps without a loss" odd/own/loss odd/own
check "with a diagram of the accuracy" grep -q '<b>accuracy</b>' odd/own/loss.html
check "and the loss of averaged weights" grep -q 'validation, averaged weights' odd/own/loss.html
check "and one of the noise scale" grep -q '<b>gradient noise scale</b>' odd/own/loss.html
check "and one of the load of experts" grep -q "<b>expert load</b>" odd/own/loss.html
titles() { grep -o '<b>[^<]*</b> <span class="unit">[^<]*' "$1.html" | sed 's/<[^>]*>//g' | tail -n +"$2" | tr '\n' '|'; }  # NAME FIRST
check "and of each further number that is explained and says something new, in the same order whatever trainer it was" test "$(titles odd/own/loss 8)" = 'balance of routers c|second of &lt;i&gt;|&lt;b&gt;$x b $^|'
check "... which the pointer reads, too" grep -q '"own1":\[1.*"checks":{"own2":\[4' odd/own/loss.html
height() { od -An -tu1 -j22 -N2 "$1.png"; }  # NAME: of a PNG, two bytes
[ $has_matplotlib = 0 ] || check "the PNG has a row more for them" test "$(height odd/own/loss)" != "$(height runs/a/loss)"
check "the speed above is a median of recent updates, not that of the last" grep -q '<span>tokens/s</span><b>20k</b>' odd/own/loss.html
mkdir -p odd/routers && cp runs/a/settings.json odd/routers
sed 's/"loss": \([0-9.]*\), "norm": \([^,]*\)/"loss": 99, "cross_entropy": \1, "norm": \2/' runs/a/metrics.jsonl >odd/routers/metrics.jsonl
drawn "a run whose routers add to the loss" odd/routers/loss odd/routers
check "... is drawn as one whose routers add nothing, and the axis says so" \
    test "$(grep -o '<path class="line"[^>]*>' odd/routers/loss.html | md5sum) $(grep -c 'cross entropy, nats per target' odd/routers/loss.html runs/a/loss.html | tr '\n' ' ')" = \
    "$(grep -o '<path class="line"[^>]*>' runs/a/loss.html | md5sum) odd/routers/loss.html:1 runs/a/loss.html:0 "
check "a run without experts or accuracy lacks those diagrams" test "$(grep -c '<b>accuracy</b>' runs/a/loss.html)" = 0
mkdir -p odd/tokens && sed 's/"tokenizer": "[^"]*"/"tokenizer": "other.json"/' runs/b/settings.json >odd/tokens/settings.json
{ sed "$slow_end" runs/b/metrics.jsonl; tail -n 1 runs/b/metrics.jsonl | sed 's/"val_loss": [^,]*, "val_bpb": [^,]*, "accuracy": null/"val_loss": null, "val_bpb": null, "accuracy": 0.25/'; } >odd/tokens/metrics.jsonl
drawn "runs of two tokenizers" runs/compare runs/a odd/tokens
check "... whose validation is in bits per byte, which the axis says" grep -q "bits per byte: the tokenizers differ" runs/compare.html
check "... and each run's speed a median too" grep -q 'id="r1-tok_per_s">20k<' runs/compare.html
check "HellaSwag's accuracy has a diagram" grep -q "<b>HellaSwag accuracy</b>" runs/compare.html
drawn "all of these together, one that still writes, one that has not begun, two of one name" odd/compare \
    odd/nan odd/blind odd/one odd/start odd/new odd/own odd/a runs/a
check "what only one of them has is drawn of that one" test "$(titles odd/compare 9)" = 'balance of routers c|second of &lt;i&gt;|&lt;b&gt;$x b $^|'
check "a run that has not begun is left out with a note" grep -q "odd/new/metrics.jsonl: no steps are recorded yet: left out" out
check "two of one name are told apart" grep -q 'odd/a</td>.*runs/a</td>' odd/compare.html
refuses "$plot" "no steps are recorded yet" "a run without steps alone" odd/new
refuses "$plot" "nowhere/metrics.jsonl: No such file" "a run that is not there" runs/a nowhere
refuses "$plot" "runs: expected a run, found a folder of runs: choose runs/a or runs/b" "a folder of runs: they are named" runs
cat >titles.py <<'PYTHON'
import glob, re, sys
root = sys.argv[1]
sys.path.insert(0, root + "/dev/tools")
from plot import DRAWN_ELSEWHERE, TITLES
text = "".join(open(path).read() for path in glob.glob(root + "/llmc/*/*.h"))
schema = open(root + "/llmc/models/mamba_log.h").read().split("json_pack")[1].split(";")[0]
keys = set(re.findall(r'log_add_key\(&r->log, "(\w+)"', text)) | {key for key, _ in re.findall(r'"(\w+)",\s*"([^"]+)"', schema)}
raw = keys - {*TITLES, *DRAWN_ELSEWHERE, "kind", "surgery_method"}  # words
print(len(keys) > 20 and not raw or sorted(raw), *(title for title in TITLES.values() if len(title) > 24))
PYTHON
check "each key that a trainer explains has a title, no wider than its diagram" test "$($python titles.py "$root")" = True
mkdir stop
mv stop.jsonl stop/metrics.jsonl
refuses "$plot" "stop/metrics.jsonl:3: step: expected a number" "a record without a step" stop
refuses "$plot" "invalid choice" "another axis" --x loss runs/a

# names with blanks and what matplotlib takes for a formula, as make hands them on: all runs in one word
mkdir -p "runs/a b" 'runs/$x^ y'
cp runs/b/metrics.jsonl "runs/a b/"
cp runs/b/metrics.jsonl 'runs/$x^ y/'
drawn "a name with blanks" "runs/a b/loss" "runs/a b"
drawn "a name with what begins a formula" 'runs/$x^ y/loss' 'runs/$x^ y'
drawn "several runs in one word, some with blanks" runs/compare "runs/a b  runs/b "'runs/$x^ y'
check "each of them is found" grep -q 'a b</td>.*>b</td>.*x^ y</td>' runs/compare.html
refuses "$plot" "no such/metrics.jsonl: No such file" "one of them that is not there" "runs/a b no such"
make -s -C "$root" plot PYTHON="$python" RUN="$work/runs/a b $work/runs/b" >out 2>err
check "make plot RUN=\"...\" with such a name" grep -q "^wrote .*compare.html" out

# ---- plot: numbers that no sound run has ----

like_b() {  # NAME EDIT...: the records of runs/b, edited by sed
    mkdir -p "odd/$1"
    sed "${@:2}" runs/b/metrics.jsonl >"odd/$1/metrics.jsonl"
}
like_b large '5s/"loss": [^,]*/"loss": 1e308/; 6s/"loss": [^,]*/"loss": -1e308/'
drawn "a loss of 1e308 and one of -1e308" odd/large/loss odd/large
check "are not drawn, in one line" test "$(grep -c '2 numbers beyond 1e+100 not drawn' out) $(wc -l <out)" = "1 $((2 + 1))"
like_b infinite 's/"loss": [^,]*, "norm": [^,]*, "lr": [^,]*/"loss": Infinity, "norm": NaN, "lr": 1e999/'
drawn "no number is finite" odd/infinite/loss runs/b odd/infinite --out odd/infinite/loss
like_b digits -e "s/\"norm\": [^,]*/\"norm\": $(printf '9%.0s' {1..400})/" \
    -e "1s/\"time\"/$(printf '"k%d": "a", ' {0..13})&/; s/\"ms\": \([0-9][^,]*\)/&$(printf ', "k%d": \\1' {0..13})/"
drawn "an integer that no double holds, and fourteen further keys" odd/digits/loss odd/digits
check "of which twelve are drawn, and a line names the others" grep -qx "of 14 further keys 12 are drawn: make dashboard has k12, k13 too" out
like_b spread '5s/"loss": [^,]*/"loss": 1e99/; 6s/"loss": [^,]*/"loss": 5e-324/'
drawn "losses from 5e-324 to 1e99" odd/spread/loss odd/spread
check "with labels that have room" test "$(grep -o '<text class="y"[^<]*' odd/spread/loss.html | grep -c .)" -lt 60
like_b far '$s/"step": [^,]*/"step": 9007199254740992/'
drawn "a step of 2^53" odd/far/loss odd/far
like_b farther '$s/"step": [^,]*/"step": 9007199254740993/'
refuses "$plot" "step: expected an integer 0..2^53, found 9007199254740993" "a step beyond" odd/farther
like_b nested "\$s/.*/$(printf '[%.0s' {1..9999})/"
refuses "$plot" "expected a JSON object" "a record nested 9999 deep" odd/nested
mkdir odd/pipe
mkfifo odd/pipe/metrics.jsonl
refuses "$plot" "expected a file, found a folder, pipe or device" "a pipe" odd/pipe
echo '{"a": "\ud800"}' >"runs/a b/settings.json"
drawn "half a character in the settings" "runs/a b/loss" "runs/a b"

finish
