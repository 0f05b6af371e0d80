# What the tests of trainers share, beside promises.sh: runs, their files and options. The script sets `start`, the options of a short run,
# and calls write_texts.
#     write_texts                                         `text`, and `documents`, a folder of short ones
#     columns, sums, same_run, same_model, value, below   runs and their numbers
#     examples, batch, rows, answers                      files of a probe, of HellaSwag
#     tensors, rename, cut_to_bf16                        what a safetensors file holds; the same under other names, in bf16
#     numbers, shapes                                     of a folder the tensors' types, shapes and sums
#     same_tensors                                        of two folders, in whatever types
#     rewrite, like                                       a folder whose tensors have been through Python; its probe is that of `hf`
#     edit, changed, becomes                              config.json with other values; those are refused; what a run makes of them
#     run_parts                                           the parts of a script, each in a folder of its own
#     hellaswag_beside                                    answers on examples beside a training are those of --eval-only
#     any_width, router_keys, tied_heads                  a build for any x86-64; what routers record; a tied head in files
#     frozen                                              --freeze: which tensors keep every bit
#     boxed                                               a line of the box
#     nothing_counts                                      steps in which nothing counts for a loss beside that of the next token
#     searched                                            a dry run that does not fit, whose line names what would (llmc/run/remedy.h)
#     flag, same, other, config                           an option: what it does, and a value that is refused
#     killed, vary                                        kill -9 at random instants, and --resume with other options
#     resumed_bits, documents_bits, talks_bits            what has no influence on the bits of a run
#     adapter_resumes                                     an adapter's run that goes on is the one that never stopped
#     greedy, book_writes, rounded_loss                   a text is what its probe says, also of rounded weights and in other groups
#     likeliest, at_once                                  is a text what its probe says? Do several side by side say what each says alone?
#     write_configs, write_glm5, write_prompts            small models of all kinds, for runs on several ranks; conversations; prompts
#     on_ranks, kib, sends, refused                       the same bytes on several ranks; what they send; what they refuse

# ---- runs ----

# the records of metrics.jsonl without what depends on time and machine
columns() { sed -E 's/"(ms|tok_per_s|peak|time|data_wait_ms|rss_mb)": [^,}]+//g' "$1/metrics.jsonl"; }
sums() { (cd "$(last "$1")" && sha256sum {model,adapter_model,optimizer,ema,trainer}.safetensors config.json 2>/dev/null); }

# two runs have the same model, moments, what else the trainer keeps, and records
same_run() { [ "$(sums "$1")" = "$(sums "$2")" ] && cmp -s <(columns "$1") <(columns "$2"); }
same_model() { cmp -s "$(last "$1")"/*model.safetensors "$(last "$2")"/*model.safetensors; }  # or adapter
value() { grep "^{\"step\": $2, " "$1/metrics.jsonl" | sed -n "s/.*\"$3\": \([-0-9.e]*\)[,}].*/\1/p" | tail -n 1; }  # RUN STEP KEY
below() { awk -v x="$1" -v y="$2" 'BEGIN { exit !(x != "" && x < y) }'; }

# A run of an adapter, of which the second half is computed again by --resume. Its checkpoints hold no config.json: what options made of
# the model, and of its loss, is in their settings alone
adapter_resumes() {  # PROMISE OPTION...
    local promise=$1
    shift
    rm -rf unbroken halved
    go --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 4 --save-every 2 --keep 9 --lora-rank 2 --run unbroken "$@" &&
        cp -r unbroken halved && rm -r halved/step_000004 && go --run halved --resume && same_run unbroken halved
    verdict $? "--resume of an adapter, begun with $promise: the bytes of a run that never stopped" "$(head -n 3 err)"
}

# On a machine that is busy with other things the search may run out of its time, and then the line has an estimate: once more
searched() {  # COMMAND...
    local i
    for i in {1..6}; do
        timeout 60 "$@" >out 2>err </dev/null
        grep -q 'what W ranks take' err || return 0
    done
}

# Documents of one byte, begin and byte: nothing has a token after the next. The named losses have no number, the others have
nothing_counts() {  # "NAME NAME" "OTHER OTHER" OPTION...
    local i name none=$1 others=$2 good=0
    shift 2
    rm -rf bytes nothing && mkdir bytes && for i in {1..9}; do printf $i >bytes/$i; done
    go --train bytes --doc-reset 1 --seq-len 4 --batch-size 1 --steps 2 --lr 1e-3 --run nothing "$@" || good=1
    for name in $none; do [ "$(grep -cE "^step .*\| $name -( |$)" out) $(grep -c "\"${name}_loss\": null" nothing/metrics.jsonl)" = "2 2" ] || good=1; done
    for name in $others; do [ "$(grep -cE "^step .*\| $name [0-9]" out) $(grep -c "\"${name}_loss\": [0-9]" nothing/metrics.jsonl)" = "2 2" ] || good=1; done
    verdict $good "nothing counts for${none:+ $none}: - in the line of a step, null in its record" "$(grep '^step' out) $(<err)"
}

# ---- files ----

write_texts() {
    local i
    for i in {1..120}; do echo "line $i: the plain loop is the law, and $i times $i is $((i * i))."; done >text
    for i in {1..60}; do head -c $((20 + i * 7 % 50)) text | tail -c 30 >doc_$i; done
    mkdir documents && mv doc_* documents
}

# examples or a probe: rows of T inputs and T targets
examples() {  # ROWS T INPUTS TARGETS
    local n_bytes=$((4 * $1 * $2)) header
    header="{\"inputs\":{\"dtype\":\"I32\",\"shape\":[$1,$2],\"data_offsets\":[0,$n_bytes]},"
    header+="\"targets\":{\"dtype\":\"I32\",\"shape\":[$1,$2],\"data_offsets\":[$n_bytes,$((2 * n_bytes))]}}"
    le 8 ${#header}
    printf '%s' "$header"
    le 4 $3 $4
}

# 2 rows of so many positions; every seventh target is not counted
rows() { examples 2 $1 "$(seq $((2 * $1)) | awk '{ print $1 * 37 % 257 }')" "$(seq 2 $((2 * $1 + 1)) | awk '{ print NR % 7 ? $1 * 37 % 257 : -1 }')"; }  # > in
batch() { examples 2 9 "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18" "2 3 4 5 -1 7 8 9 10 11 12 13 14 15 16 17 18 19"; }  # > in

# examples in HellaSwag's form: the right completion is what follows in FILE, the others are bytes that no text has
answers() {  # N FILE
    "$python" - "$1" "$2" <<'PYTHON'
import struct, sys
n, text = int(sys.argv[1]), open(sys.argv[2], "rb").read()
records = []
for e in range(n):
    at, label = 40 * e, e % 4
    words = [label, 4, 8, *text[at:at + 8]]
    for c in range(4):
        words += [4 + c, *(text[at + 8:at + 12 + c] if c == label else [200 + c] * (4 + c))]
    records.append(struct.pack(f"<{3 + len(words)}H", 65535, 2 * (3 + len(words)), e, *words))
sys.stdout.buffer.write(struct.pack("<IIII", 20240522, 1, n, max(map(len, records))).ljust(1024, b"\0") + b"".join(records))
PYTHON
}

# what a safetensors file holds: a line for each tensor, "name bits bits ..."
tensors() {  # FILE PATTERN
    "$python" - "$1" "$2" <<'PYTHON'
import json, re, signal, struct, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
data = open(sys.argv[1], "rb").read()
n = struct.unpack("<Q", data[:8])[0]
for name, t in sorted(json.loads(data[8:8 + n]).items()):
    if name != "__metadata__" and re.search(sys.argv[2], name):
        begin, end = t["data_offsets"]
        print(name, *struct.unpack(f"<{(end - begin) // 4}i", data[8 + n + begin:8 + n + end]))
PYTHON
}

# of a folder's model, or of another of its files, a line for each tensor: its name, type, shape and sum; without the sum
numbers() {  # FOLDER [NAME]
    "$python" - "$1/${2-model}.safetensors" <<'PYTHON'
import hashlib, json, struct, sys
data = open(sys.argv[1], "rb").read()
n = struct.unpack("<Q", data[:8])[0]
for name, t in sorted(json.loads(data[8:8 + n]).items()):
    if name == "__metadata__": continue
    begin, end = (8 + n + x for x in t["data_offsets"])
    print(name, t["dtype"], *t["shape"], hashlib.md5(data[begin:end]).hexdigest())
PYTHON
}
shapes() { numbers "$@" | sed 's/ [^ ]*$//'; }

# the same file, in which other names stand: PATTERN of Python and what takes its place
rename() {  # FILE PATTERN NEW
    "$python" - "$@" <<'PYTHON'
import json, re, struct, sys
data = open(sys.argv[1], "rb").read()
n = struct.unpack("<Q", data[:8])[0]
header = json.dumps({re.sub(sys.argv[2], sys.argv[3], name): t for name, t in json.loads(data[8:8 + n]).items()}).encode()
header += b" " * (-len(header) % 8)
open(sys.argv[1], "wb").write(struct.pack("<Q", len(header)) + header + data[8 + n:])
PYTHON
}

# a model all of whose numbers are bf16's
cut_to_bf16() {  # RUN FOLDER
    rm -rf "$2"
    cp -r "$(last "$1")" "$2" && rm "$2/manifest.json"
    "$python" - "$2/model.safetensors" <<'PYTHON'
import struct, sys
data = bytearray(open(sys.argv[1], "rb").read())
first = 8 + struct.unpack("<Q", data[:8])[0]
data[first::4] = data[first + 1::4] = bytes((len(data) - first) // 4)
open(sys.argv[1], "wb").write(data)
PYTHON
}

# A folder like another, whose model.safetensors has been through this Python: `t` is {name: (dtype, shape, bytes)}. bf16() and cut() store
# floats as bf16 and cut them to what it holds, fuse() makes the experts of a layer one tensor
rewrite() {  # FOLDER NEW PYTHON
    rm -rf "$2"
    cp -r "$1" "$2" && rm -f "$2/manifest.json"
    "$python" - "$2/model.safetensors" "$3" <<'PYTHON'
import json, re, struct, sys
data = open(sys.argv[1], "rb").read()
n = struct.unpack("<Q", data[:8])[0]
t = {name: (x["dtype"], x["shape"], data[8 + n + x["data_offsets"][0]:8 + n + x["data_offsets"][1]])
     for name, x in json.loads(data[8:8 + n]).items() if name != "__metadata__"}
E, H = "model.embed_tokens.weight", "lm_head.weight"
def bf16():
    for name, (_, shape, x) in t.items():
        t[name] = "BF16", shape, b"".join(x[i + 2:i + 4] for i in range(0, len(x), 4))
def cut():
    for name, (_, shape, x) in t.items():
        t[name] = "F32", shape, b"".join(b"\0\0" + x[i + 2:i + 4] for i in range(0, len(x), 4))
def fuse():
    for e in sorted({name.split(".experts.")[0] for name in t if re.search(r"\.experts\.\d", name)}):
        parts, n, e = {}, 0, e + ".experts"
        while f"{e}.{n}.up_proj.weight" in t:
            parts[n] = [t.pop(f"{e}.{n}.{w}_proj.weight") for w in ("gate", "up", "down")]
            n += 1
        (F, D) = parts[0][0][1]
        t[e + ".gate_up_proj"] = "F32", [n, 2 * F, D], b"".join(parts[i][0][2] + parts[i][1][2] for i in range(n))
        t[e + ".down_proj"] = "F32", [n, D, F], b"".join(parts[i][2][2] for i in range(n))
exec(sys.argv[2])
header, body = {}, b""
for name, (dtype, shape, x) in t.items():
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(x)]}
    body += x
header = json.dumps(header).encode()
header += b" " * (-len(header) % 8)
open(sys.argv[1], "wb").write(struct.pack("<Q", len(header)) + header + body)
PYTHON
}

# the probe `in` of a rewritten folder is `before`, that of `hf`, and this is said
like() {  # PROMISE LINES PYTHON
    rewrite hf other "$3"
    go --from other --probe in --probe-out after && cmp before after && [ "$(wc -l <err)" = $2 ]
    verdict $? "$1" "$(<err)"
}

# every tensor of folder A is in B with the same type, shape and bytes, but what REGEX finds, which is BF16 there
same_tensors() {  # A B REGEX
    "$python" - "$root/dev/ref" "$@" <<'PYTHON'
import re, sys
sys.path.insert(0, sys.argv[1])
import folders
a, b = folders.read_folder(sys.argv[2]), folders.read_folder(sys.argv[3])
found = sorted(x for x in a if re.search(sys.argv[4], x))
apart = [x for x in a if x not in found and (x not in b or a[x][0] != b[x][0] or a[x][1].shape != b[x][1].shape or a[x][1].tobytes() != b[x][1].tobytes())]
missing = [x for x in found if not x.endswith("scale") and not x.endswith("_scale_inv") and b.get(x, "?")[0] != "BF16"]
more = [x for x in b if x not in a or (x in found and re.search("scale(_inv)?$", x))]
print("apart", apart[:3], "not bf16", missing[:3], "more", more[:3])
sys.exit(bool(apart or missing or more))
PYTHON
}

# a config.json with other values
edit() {  # FILE NEW KEY VALUE...: the key gets this value; VALUE -: it goes away
    "$python" - "$@" <<'PYTHON'
import json, sys
config = json.load(open(sys.argv[1]))
for key, value in zip(sys.argv[3::2], sys.argv[4::2]):
    config.pop(key, None)
    if value != "-":
        config[key] = json.loads(value)
json.dump(config, open(sys.argv[2], "w"))
PYTHON
}

# of a model whose config.json ties the head, what files may have of it: `in` is a probe's batch
tied_heads() {  # CONFIG
    rm -rf hf own_head && go --config $1 --export-hf hf --probe in --probe-out before
    check "no tensor of its own" test "$(tensors hf/model.safetensors lm_head | wc -l)" = 0
    like "stored twice, the same bytes: one matrix, not a word" 0 't[H] = t[E]'
    like "stored as the head alone: the embedding is that" 0 't[H] = t.pop(E)'
    rewrite hf other 't[H] = "F32", t[E][1], t[E][2][64:] + t[E][2][:64]'
    go --from other --probe in --probe-out after --export-hf own_head
    check "stored twice, with other bytes: not tied, which a line says" test "$(wc -l <err) $(grep -c '"lm_head.weight" is not "model.embed_tokens.weight", to which config.json ties it: not tied, as in transformers$' err)" = "1 1"
    check "... two gradients; the export says tie_word_embeddings false" \
        test "$(tensors after 'grad.*(lm_head|embed)' | wc -l) $(grep -c '"tie_word_embeddings": false' own_head/config.json) $(tensors own_head/model.safetensors lm_head | wc -l)" = "2 1 1"
    check "... and is read without a word" eval 'go --from own_head --probe in --probe-out third && [ ! -s err ] && cmp after third'
}

# ---- what scripts of trainers do alike ----

# each part in a folder of its own, with the files that the script has written
run_parts() {  # PART...
    local part
    for part; do
        mkdir "$work/in_$part" && cp -r text documents *.json "$work/in_$part" && cd "$work/in_$part" || exit 1
        $part
        cd "$work" || exit 1
    done
    finish
}

# more and shorter rows than the batches that are trained on
hellaswag_beside() {  # OPTIONS...: each of a run, in one word
    local options value
    answers 60 text >many
    for options; do
        rm -rf with
        go "${start[@]}" --seq-len 40 --batch-size 8 --hellaswag many --eval-every 2 --steps 2 --run with $options && value=$(grep "^step 2 | HellaSwag" out) &&
            go --from with --eval-only --seq-len 40 --batch-size 3 --hellaswag many && [ "${value#*|}" = "$(grep HellaSwag out | sed "s/^[^|]*|//")" ]
        verdict $? "--hellaswag beside training ($options): the answers of --eval-only" "$value $(grep HellaSwag out) $(<err)"
    done
}

# the bytes of a build for any x86-64
any_width() {  # TRAINER CONFIG...: names of config.json
    local name old
    need_build old "ARCH=x86-64 CPU=1" $1
    for name in "${@:2}"; do
        rm -rf whole other
        go "${mixed[@]}" --config $name.json --run whole
        timeout 60 "$old" "${mixed[@]}" --config $name.json --run other >out 2>err </dev/null
        check "ARCH=x86-64, $name: the bytes of the native build" same_run whole other
    done
}

# in `run`: one that has been trained and validated with experts, --ema and --tensorboard
router_keys() {
    local key missing=""
    for key in cross_entropy balance load idle_experts; do
        grep -q "\"$key\": [0-9]" run/metrics.jsonl && grep -q "train/$key" run/events.out.* || missing+=" $key"
    done
    check "metrics.jsonl and TensorBoard's events have the routers' keys (not:$missing)" test -z "$missing"
}

book_writes() { go --from book --max-new-tokens 40 --temperature 0 "$@" && cat out; }
rounded_loss() { go --from rounded --eval-only --val text --seq-len 15 --batch-size 3 --eval-batches 2 --seed 1 "$@" && grep "val loss" out; }

# `book`, a model that has learned `text`, writes what its probe says; its text comes back as $one
greedy() {  # CONFIG WHAT IT KEEPS
    local i tokens
    rm -rf book && go "${start[@]}" --config $1.json --steps 300 --lr 3e-2 --batch-size 8 --seq-len 48 --schedule constant --run book
    one=$(book_writes --generate "line 7")
    tokens=($(printf '%s' "$one" | od -An -v -tu1))
    examples 1 $((${#tokens[@]} + 1)) "256 ${tokens[*]}" "${tokens[*]} 256" >in
    go --from book --probe in --probe-out out.safetensors && likeliest out.safetensors 7 256 "${tokens[@]}"
    verdict $? "$1: $2: each of ${#tokens[@]} tokens is the likeliest by the probe of the whole text" "$(<err)"
    for i in 6 17 31; do
        check "... a prompt of $i bytes of that text goes on as it does" test "$one" = "$(book_writes --generate "${one:0:i}" --max-new-tokens $((46 - i)))"
    done
    cut_to_bf16 book rounded
    check "... --weights bf16 of numbers that bf16 holds: the text that floats give" \
        test "$(go --from rounded --generate "line 7" --temperature 0 && cat out)" = "$(go --from rounded --weights bf16 --generate "line 7" --temperature 0 && cat out)"
    check "... and the loss of validation" test "$(rounded_loss)" = "$(rounded_loss --weights bf16)"
}

# ---- options and settings ----

# $base with other values is refused
changed() {  # PROMISE TEXT KEY VALUE...
    edit "${base:-tiny.json}" bad.json "${@:3}"
    refuse "$1" "bad.json: $2" --config bad.json --train text
}

# what a config.json makes of itself: the settings in the folder that a run writes
becomes() {  # PROMISE PATTERN COUNT CONFIG KEY VALUE...
    edit $4.json some.json "${@:5}"
    rm -rf with
    go "${start[@]}" --config some.json --steps 1 --run with
    check "$1" test "$(grep -cE "\"($2)" with/step_000001/config.json)" = $3
}

boxed() { grep -cE "^\| *$1 *\| $2 *\|$" out; }

declare -A tried
# The run without the flag is made once for each context. Then the command HOW must succeed, in which $plain and with are the
# runs without and with it; and the value BAD is refused by a line that names the flag, or has what stands behind => in BAD
flag() {  # HOW BAD FLAG VALUE CONTEXT...
    local how=$1 bad=$2 flag=$3 value=$4 plain names
    shift 4
    plain=plain_$(md5sum <<<"$*" | cut -c1-12)
    tried[$flag]=1
    [ -d "$plain" ] || go "${start[@]}" "$@" --run "$plain"
    rm -rf with
    go "${start[@]}" "$@" "$flag" "$value" --run with && eval "$how"
    verdict $? "$flag $value${*:+ (with $*)}: $how" "$(tail -n 1 out) $(<err)"
    names=$flag
    if [[ $bad == *"=>"* ]]; then names=${bad#*=>}; fi
    if [ -n "$bad" ]; then refuse "$flag ${bad%%=>*}" "$names" "${start[@]}" "$@" "$flag" "${bad%%=>*}"; fi
}
same() { same_run "$plain" with; }
other() { ! same_model "$plain" with; }  # other parameters
config() { grep -q "^ *\"$1\": $2\(,\|\$\)" "$(last with)/config.json" && ! grep -q "^ *\"$1\": $2\(,\|\$\)" "$(last "$plain")/config.json"; }

frozen() {  # CONFIG PATTERN REGEX: exactly these tensors keep every bit
    rm -rf with begun
    go "${start[@]}" --config $1.json --export-hf begun --train "" && go "${start[@]}" --config $1.json --freeze "$2" --run with
    comm -12 <(tensors begun/model.safetensors .) <(tensors "$(last with)/model.safetensors" .) | cut -d' ' -f1 >found
    tensors begun/model.safetensors "$3" | cut -d' ' -f1 >expected
    verdict "$([ -s expected ] && cmp -s expected found; echo $?)" "--freeze '$2' ($1): these keep every bit, all others move" "$(diff expected found)"
}

# ---- the same bytes, whatever a run is interrupted by and whatever stands beside a text ----

steady=(--ema 0.9 --schedule constant --warmup 0)  # the first steps do not depend on how many there are

resumed_bits() {  # NAME OPTION...: NAME.json is the model
    local name=$1
    shift
    rm -rf whole leg
    go "$@" "${steady[@]}" --config $name.json --run whole
    go "$@" "${steady[@]}" --config $name.json --steps 4 --threads 3 --run leg && go --resume --run leg --steps 8 --threads 2 --recompute 3 --head-rows 5
    verdict "$(same_run leg whole && cmp -s {whole,leg}/samples.txt; echo $?)" \
        "$name: stopped after 4 of 8 updates, resumed with other --threads, --recompute, --head-rows: the same bytes" "$(<err)"
}

documents_bits() {  # OPTION...
    local run=("$@" "${steady[@]}" --doc-reset 1 --train documents)
    rm -rf whole leg
    go "${run[@]}" --run whole && go "${run[@]}" --steps 4 --threads 3 --run leg && go --resume --run leg --steps 8 --threads 2 --recompute 2
    verdict "$(same_run leg whole; echo $?)" "documents: the same bytes" "$(<err)"
}

talks_bits() {  # STEPS WHAT: begins anew with each conversation
    local i run=(--config long.json --train talks.jsonl --chat-template chatml --batch-size 1 --lr 3e-2 --steps $1 --shuffle 0)
    edit tiny.json long.json max_position_embeddings 256
    for i in {1..20}; do echo "{\"messages\":[{\"role\":\"user\",\"content\":\"$i\"},{\"role\":\"assistant\",\"content\":\"$((i * i * i))\"}]}"; done >talks.jsonl
    rm -rf whole leg
    go "${run[@]}" --seq-len 96 --run whole && go "${run[@]}" --seq-len 112 --run leg && [ "$(sums whole)" = "$(sums leg)" ]
    verdict $? "conversations in rows that are longer than they: whatever stands behind a conversation, the same model and moments" "$(<err)"
    spoken() { go --from whole --eval-only --val talks.jsonl --chat-template chatml --batch-size 2 --seq-len "$@" && grep -o 'val loss [0-9.]*' out; }
    check "... several in a row have the loss of each in a row of its own: $2 begin with each" test -n "$(spoken 96)" -a "$(spoken 96 --pack 0)" = "$(spoken 250)"
}

# ---- kill -9 and --resume ----

# what a resumed run has otherwise, beside the number of threads: it changes no byte
vary() { varied=(--recompute $((RANDOM % 4)) --head-rows $((1 + RANDOM % 40))); }

# A run of 120 steps, killed after a random number of lines and resumed with another number of threads and other options;
# each whole run has the bytes of one that nobody touched
killed() {  # KILLS PROMISE OPTION...
    local most=$1 promise=$2 n=0 runs=0 wrong=0 lines option pid
    local long=("${start[@]}" --steps 120 --save-every 7 --keep-every 20 --val-fraction 0.1 --eval-every 30 --eval-batches 2 --sample-every 40 \
        --max-new-tokens 8 "${@:3}")
    rm -rf whole leg
    go "${long[@]}" --run whole
    while (((n < most || runs == 0) && wrong < 3)); do
        option=(--resume --run leg --threads $((1 + RANDOM % 3)))
        vary
        option+=("${varied[@]}")
        compgen -G 'leg/step_*[0-9]/manifest.json' >/dev/null || { rm -rf leg; option=("${long[@]}" "${option[@]:1}"); }
        lines=$((n < most ? 20 + RANDOM % 110 : 1000))
        exec 3< <(exec "$trainer" "${option[@]}" 2>err </dev/null)
        pid=$!
        while ((lines > 0)) && read -r _ <&3; do lines=$((lines - 1)); done
        if [ $lines = 0 ]; then
            kill -9 $pid 2>/dev/null
            n=$((n + 1))
        fi
        wait $pid 2>/dev/null
        status=$?
        exec 3<&-
        [ ! -s err ] || { wrong=$((wrong + 1)); echo "      after $n kills: $(<err)"; }
        [ $status = 137 ] && continue
        runs=$((runs + 1))
        { [ $status = 0 ] && same_run whole leg && cmp -s {whole,leg}/samples.txt; } || { wrong=$((wrong + 1)); echo "      after $n kills: status $status, $(ls leg | tr '\n' ' ')"; }
        rm -rf leg
    done
    check "$promise: $n kills, $runs runs, the bytes of one that nobody touched" test $wrong = 0
}

# ---- text ----

# is each token behind the first N what the logits of a probe of all of them say is likeliest?
likeliest() {  # PROBE N TOKEN...
    "$python" - "$@" <<'PYTHON'
import json, struct, sys
data, n_prompt, tokens = open(sys.argv[1], "rb").read(), int(sys.argv[2]), [int(x) for x in sys.argv[3:]]
n = struct.unpack("<Q", data[:8])[0]
t = json.loads(data[8:8 + n])["logits"]
(_, T, V), (begin, end) = t["shape"], t["data_offsets"]
logits = struct.unpack(f"<{T * V}f", data[8 + n + begin:8 + n + end])
best = [max(range(V), key=lambda v: (logits[t * V + v], -v)) for t in range(T)]
assert T == len(tokens) and tokens[n_prompt:] == best[n_prompt - 1:-1], (tokens[n_prompt:], best[n_prompt - 1:-1])
PYTHON
}

# texts of prompts of 1 to 46 tokens, which outgrow 48 positions: answers of --generate-batch 1, 2, 3 and 8
write_prompts() {  # > short.jsonl
    "$python" -c 'import json
for i in range(11): print(json.dumps({"prompt": "line %d: " % i * (1 + i * i % 5) if i % 3 else "a"}))'
}
say() { go "$@" --generate-file short.jsonl --samples 2 --max-new-tokens 30 --stop 'a1\|e'; }
at_once() {  # OPTION...: of the model
    local n
    say "$@" --generate-batch 1 && mv out alone
    for n in 2 3 8; do
        say "$@" --generate-batch $n
        check "${*:1:2} ${*:3}: $n texts side by side say what each says alone" cmp out alone
    done
    rm -f cut && say "$@" --generate-out cut && truncate -s $(($(wc -c <cut) * 2 / 3)) cut && say "$@" --generate-out cut
    check "... and go on where a file was cut" cmp cut alone
    go "$@" --generate "line 7" --samples 5 --max-new-tokens 60 && mv out several && go "$@" --generate "line 7" --samples 5 --max-new-tokens 60 --generate-batch 1
    check "... --samples, too" cmp several out
}

# ---- several ranks ----

# GLM-5: layers 0, 1 and 3 choose, 2 and 4 see what these have chosen; glm_taught: all that learns beside the model
write_glm5() {
    echo '{"model_type":"glm_moe_dsa","vocab_size":257,"hidden_size":16,"num_hidden_layers":5,"max_position_embeddings":96,"num_attention_heads":4,
"q_lora_rank":12,"kv_lora_rank":12,"qk_nope_head_dim":6,"qk_rope_head_dim":4,"v_head_dim":5,"index_n_heads":3,"index_head_dim":6,"index_topk":6,
"indexer_types":["full","full","shared","full","shared"],"intermediate_size":24,"moe_intermediate_size":8,"n_routed_experts":4,
"num_experts_per_tok":2,"first_k_dense_replace":1,"routed_scaling_factor":1.5,"pad_token_id":140,"rope_parameters":{"rope_theta":10000}}' >glm.json
    edit glm.json glm_taught.json num_nextn_predict_layers 1 mtp_weight 0.5 seq_balance_coef 0.1 bias_update_rate 0.01 indexer_train '"kl"' \
        attention_bias true
}


# sparse.json: Qwen3 with experts in all layers but these; experts.json: Mixtral
write_configs() {  # LAYERS EXPERTS LAYERS_WITHOUT_EXPERTS
    local i heads="\"vocab_size\":257,\"num_hidden_layers\":$1,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":6,"
    heads+='"max_position_embeddings":96,"rope_theta":10000,"hidden_size":20'
    echo "{\"model_type\":\"qwen3\",$heads,\"intermediate_size\":28}" >dense.json
    echo "{\"model_type\":\"gpt2\",\"activation_function\":\"gelu_new\",\"vocab_size\":257,\"n_layer\":$1,\"n_head\":4,\"n_embd\":20,\"n_positions\":96,\"layer_norm_epsilon\":1e-5}" >gpt2.json
    edit dense.json tied.json tie_word_embeddings true
    edit dense.json bias.json model_type '"qwen2"' use_sliding_window true sliding_window 5 max_window_layers 1
    edit dense.json sparse.json model_type '"qwen3_moe"' num_experts $2 num_experts_per_tok 2 moe_intermediate_size 10 norm_topk_prob true \
        mlp_only_layers "$3" output_router_logits true router_aux_loss_coef 0.02
    echo "{\"model_type\":\"mixtral\",$heads,\"intermediate_size\":12,\"num_local_experts\":$2,\"num_experts_per_tok\":2}" >experts.json
    for i in {1..40}; do echo "{\"messages\":[{\"role\":\"user\",\"content\":\"$i\"},{\"role\":\"assistant\",\"content\":\"$((i * i))\"}]}"; done >talks.jsonl
}

# The run of `run` and these options alone, then on RANKS with DIVIDED, --pp or --tp, SIZE and MORE,OPTIONS: the bytes of one rank
on_ranks() {  # TRAINER DIVIDED PROMISE "RANKS/SIZE[/MORE] ..." OPTION...
    local program=${!1} divided=$2 promise=$3 grids=$4 grid ranks size more status
    shift 4
    in_turn || return
    rm -rf one
    timeout 60 "$program" "${run[@]}" "$@" --run one >out 2>err || verdict 1 "$promise: alone" "$(tail -n 1 err)"
    for grid in $grids; do
        IFS=/ read -r ranks size more <<<"$grid"
        rm -rf several
        timeout 60 "$launch" -n $ranks "$program" "${run[@]}" "$@" $divided $size ${more//,/ } --run several >out 2>err </dev/null
        status=$?
        same_run one several && cmp -s {one,several}/samples.txt
        verdict $? "$promise, $ranks ranks, $divided $size ${more//,/ }: the bytes of one rank" "status $status: $(tail -n 1 err)"
    done
}

# of a row of the box or a line of `out`, the last such
kib() { sed -nE "s/.*$1 ([0-9.]+) ([KM])iB.*/\1 \2/p" out | tail -n 1 | awk '{ print $1 * ($2 == "M" ? 1024 : 1) }'; }

# What RANKS of TRAINER and these options send is what the box has said, within 1%; --plan says it without ranks, ROWS of the box, too
sends() {  # TRAINER "ROW|ROW" RANKS OPTION...
    local program=${!1} ranks=$3 rows="memory: parameters|  gradients, moments|  activations|  workspace, rest|  sent per update|$2"
    shift 3
    in_turn || return
    local all=("${run[@]}" --eval-every 0 --sample-every 0 --save-every 0 "$@")
    rm -rf sent
    COMM_CHECK=0 timeout 60 "$launch" -n $ranks "$program" "${all[@]}" --run sent >out 2>err </dev/null
    check "$ranks ranks $*: rank 0 sends what the box has said, within 1%" \
        awk -v a="$(kib 'sent per update *\| *')" -v b="$(kib 'rank 0 sent')" 'BEGIN { exit !(a > 0 && b > 0 && a / b < 1.01 && b / a < 1.01) }'
    timeout 60 "$program" "${all[@]}" --plan $ranks >plan 2>err
    check "... and --plan $ranks says it, too" test "$? $(grep -E "^\| ($rows)" out)" = "0 $(grep -E "^\| ($rows)" plan)" -a "$(grep -cE "^\| ($rows)" plan)" = 7
}

# status 2, one line that has the text, and no folder
refused() {  # PROMISE TEXT COMMAND...
    local promise=$1 text=$2
    shift 2
    timeout 60 "$@" --run refused >out 2>err </dev/null
    check "refused: $promise" test "$? $(grep -c . err) $(grep -cF -- "$text" err) $([ -e refused ] && echo written)" = "2 1 1 "
}
