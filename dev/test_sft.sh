#!/usr/bin/env bash
# Conversations as their user meets them, in train_moe: data, packing, ranks, resuming, answers while training, prompts in files,
# --chat. About 25 s of one core after the build.
#     dev/test_sft.sh                   all parts
#     dev/test_sft.sh data chat         some of them: data refused bits resume answers chat
# Each run happens in a folder that goes away again. Runs are tiny, and compared byte by byte.
. "$(dirname "$0")/promises.sh"
export OMP_NUM_THREADS=1  # of a tiny model: more threads wait for each other
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
parts=${*:-data refused bits resume answers chat}

need_build trainer "CPU=1" train_moe
need_build launch "" launch
limit=120  # seconds of a run
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# ---- promises ----

boxed() { grep -cE "^\| *$1 *\| $2 *\|$" out; }
columns() { sed -E 's/"(ms|tok_per_s|peak|time)": [^,}]+//g' "$1/metrics.jsonl"; }
sums() { (cd "$(last "$1")" && sha256sum {model,optimizer}.safetensors); }
same_run() { [ "$(sums "$1")" = "$(sums "$2")" ] && cmp -s <(columns "$1") <(columns "$2"); }
same_model() { cmp -s "$(last "$1")/model.safetensors" "$(last "$2")/model.safetensors"; }
loss() { grep -o 'val loss [0-9.]*' out | tail -n 1; }

# ---- files ----

# letters and their capitals; every third conversation has a second question. The last line has no answer
"$python" - <<'PYTHON'
import json
def turn(role, text): return {"role": role, "content": text}
talks = []
for a in range(6):
    for b in range(6):
        talk = [turn("user", f"{'abcdef'[a]}{b}?"), turn("assistant", f"{'ABCDEF'[a]}.")]
        if (6 * a + b) % 3 == 0: talk += [turn("user", "Sure?"), turn("assistant", "Yes.")]
        talks.append(talk)
with open("talks.jsonl", "w") as out:
    for talk in talks: print(json.dumps({"messages": talk}), file=out)
    print(json.dumps({"messages": [turn("user", "9?"), turn("assistant", " ")]}), file=out)
names = {"user": "human", "assistant": "gpt"}
with open("sharegpt.jsonl", "w") as out:
    for talk in talks: print(json.dumps({"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in talk]}), file=out)
with open("alpaca.jsonl", "w") as out:
    for talk in talks:
        history = [[talk[0]["content"], talk[1]["content"]]] if len(talk) > 2 else []
        print(json.dumps({"instruction": talk[-2]["content"], "input": "", "output": talk[-1]["content"], "history": history}), file=out)
with open("text.jsonl", "w") as out:
    for i in range(60): print(json.dumps({"text": f"line {i}: and {i} times {i} is {i * i}."}), file=out)
with open("prompts.jsonl", "w") as out:
    print(json.dumps({"messages": talks[8]}), file=out)
    print(json.dumps({"instruction": "e7?", "output": "E."}), file=out)
    print(json.dumps({"prompt": "f"}), file=out)
PYTHON
gzip -k talks.jsonl
# a quarter of the work of --model tiny, and these talks it learns as soon
echo '{"model_type":"mixtral","max_position_embeddings":256,"vocab_size":257,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":1,
"head_dim":8,"hidden_size":32,"intermediate_size":64,"num_local_experts":4,"num_experts_per_tok":2}' >model.json
start=(--config "$work/model.json" --chat-template chatml --seq-len 192 --batch-size 2 --lr 6e-3)
talks=("${start[@]}" --train talks.jsonl --steps 6)

# ---- data ----

data() {
    echo "# data"
    go "${talks[@]}" --val-fraction 0.1 --eval-every 3 --run run
    check "the box: conversations, rows, padding" test "$(boxed 'training data' '33 conversations in 19 rows of 192, [0-9.]+% padding')" = 1
    check "... what is learned of them" test "$(boxed '  learned' '[0-9]+ of [0-9]+ tokens .[0-9.]+%., answers')" = 2
    check "... the last tenth of the samples validates, not of the rows" test "$(boxed 'validation data' '3 conversations in [12] rows of 192, .*')" = 1
    check "... what was left out, and which template" test "$(boxed '  left out' '1 of 37 samples') $(boxed 'chat template' 'chatml .--chat-template.')" = "1 1"
    check "below it the line that was left out" test "$(grep -c '^    talks.jsonl:37: message 2: expected an answer, found an empty one$' out)" = 1
    check "settings.json and manifest.json record it" \
        test "$(cat run/settings.json run/step_000006/manifest.json | grep -cE '"(chat-template|learn|truncate|pack|seq-len)": ')" -ge 16
    local form
    for form in sharegpt.jsonl alpaca.jsonl talks.jsonl.gz; do
        rm -rf with && go "${talks[@]}" --train $form --val-fraction 0.1 --eval-every 3 --run with && same_run run with
        verdict $? "$form: the same run" "$(tail -n 2 out)"
    done
    mkdir folder && head -n 20 talks.jsonl >folder/a.jsonl && tail -n +21 talks.jsonl >folder/b.jsonl && echo "Not data." >folder/README.md
    for form in folder folder/a.jsonl,folder/b.jsonl 'folder/*.jsonl'; do
        rm -rf with && go "${talks[@]}" --train "$form" --val-fraction 0.1 --eval-every 3 --run with && same_run run with
        verdict $? "$form: the same run" "$(tail -n 2 out)"
    done
    rm -rf with && go "${start[@]}" --train text.jsonl --steps 2 --run with
    check "JSON Lines with \"text\" are text as ever" test "$(boxed 'training data' '[0-9]+ tokens, [0-9]+ rows of 192') $(grep -c 'chat template' out)" = "1 0"
    sed 's/"instruction"/"text": "a", "instruction"/' alpaca.jsonl >both.jsonl
    rm -rf with && go "${start[@]}" --train both.jsonl --learn text --seq-len 16 --steps 1 --run with
    check "--learn text of lines that have both" test "$(boxed 'training data' '[0-9]+ tokens, .*')" = 1
    rm -rf with && go "${talks[@]}" --train both.jsonl --learn answers --val-fraction 0.1 --eval-every 3 --run with && same_run run with
    verdict $? "--learn answers of them" ""
    rm -rf with && go "${talks[@]}" --learn last --run with
    check "--learn last: of each conversation" test "$(boxed '  learned' '.*, last answers') $(same_model run with; echo $?)" = "1 1"
    rm -rf with && go "${talks[@]}" --seq-len 80 --truncate end --run with && check "--truncate end: 12 lose their end" test "$(boxed '  cut' '12 samples lost their end')" = 1
    rm -rf with && go "${talks[@]}" --seq-len 80 --run with && check "--truncate drop: they are left out, which a line says" \
        test "$(boxed '  left out' '13 of 37 samples') $(grep -c 'expected at most 81 tokens, found [0-9]*: --seq-len takes more, --truncate end drops its end' out)" = "1 3"
    "$python" -c 'import json; print(json.dumps({"messages": [{"role": "user", "content": 2000 * "a"}, {"role": "assistant", "content": "b"}]}))' | cat talks.jsonl - >longer.jsonl
    go "${talks[@]}" --train longer.jsonl --seq-len 256 --dry-run && check "... --seq-len is no remedy where the model has no more positions" \
        test "$(grep -c 'longer.jsonl:38: expected at most 257 tokens, found [0-9]*: --truncate end drops its end$' out)" = 1
    rm -rf with && go "${talks[@]}" --pack 0 --run with && check "--pack 0: one in each row" test "$(boxed 'training data' '36 conversations in 36 rows of 192, .*')" = 1
    check "... whose padding counts among the tokens of a record, as its schema says" \
        test "$(tail -n 1 with/metrics.jsonl | grep -c "\"tokens\": $((6 * 2 * 192)),") $(head -n 1 with/metrics.jsonl | grep -c '"tokens": "positions of rows so far, padding too"')" = "1 1"
    "$python" - <<'PYTHON'
import json
seen = {"role": "user", "content": [{"type": "image", "image": "none.png"}, {"type": "text", "text": "b2?"}]}
with open("seen.jsonl", "w") as out:
    for i, line in enumerate(open("talks.jsonl")):
        talk = json.loads(line)
        if i in (1, 2): talk["messages"][0] = seen
        print(json.dumps(talk), file=out)
PYTHON
    local think=(--train seen.jsonl --chat-template qwen3.6 --seq-len 256) learned
    rm -rf with && go "${talks[@]}" "${think[@]}" --run with && learned=$(grep '  learned' out)
    check "qwen3.6 in a model that reads no images: those with one are left out, by name" \
        test "$(boxed 'chat template' 'qwen3.6 .--chat-template.')$(boxed '  left out' '3 of 37 samples')$(grep -c '^2 left out, images or videos that this model does not read:$' out)$(grep -c 'seen.jsonl:[23]: expected texts, found an image: this model reads none' out)" = "1112"
    rm -rf with && go "${talks[@]}" "${think[@]}" --preserve-thinking 1 --run with
    check "--preserve-thinking 1: earlier answers have their thoughts, of which as much is learned" \
        test "$(grep -o '  learned *| [0-9]*' out) $([ "$(grep '  learned' out)" = "$learned" ]; echo $?)" = "$(grep -o '  learned *| [0-9]*' <<<"$learned") 1"
    timeout $limit "$trainer" --resume --run with --preserve-thinking 0 --steps 8 >out 2>err </dev/null
    check "--resume with the other: refused by name" \
        test "$? $(grep -c 'seen.jsonl: --preserve-thinking has changed and so have the rows of the training data' err)" = "2 1"
    go --model tiny --help
    check "--help: no line is longer than 100 columns" test "$(wc -L <out)" -le 100
    local name missing=""
    for name in $(sed -n '/^conversations$/,/^[a-z]/s/^  --\([a-z0-9-]*\).*/\1/p' out); do
        grep -q -- "--$name\b" "$root/dev/test_sft.sh" || missing+=" $name"
    done
    check "each option of conversations is tried here (not:$missing)" test -z "$missing"
}

# ---- what is refused ----

refused() {
    echo "# refused"
    refuse "a line that could be both" "both.jsonl:1: has \"text\" and \"instruction\": say by --learn text or --learn answers" "${talks[@]}" --train both.jsonl
    refuse "no template" "--tokenizer: expected a chat template, chat_template.jinja or \"chat_template\" in tokenizer_config.json, found none: give --chat-template, one of chatml|" \
        --model tiny --train talks.jsonl
    refuse "a template that nobody knows" "--chat-template: expected chatml|qwen2|" "${talks[@]}" --chat-template llama
    refuse "a choice that the template lacks" "--preserve-thinking: is for the chat template qwen3.6, which leaves the choice, found chatml" "${talks[@]}" --preserve-thinking 1
    refuse "conversations beside text" "--val: expected conversations as in talks.jsonl, found texts or tokens in text.jsonl" "${talks[@]}" --val text.jsonl
    refuse "... the other way round" "--val: expected texts or tokens as in text.jsonl, found conversations in talks.jsonl" "${talks[@]}" --train text.jsonl --val talks.jsonl
    refuse "... in a list" "--train: expected conversations or texts, found both: text.jsonl and talks.jsonl" "${talks[@]}" --train text.jsonl,talks.jsonl
    refuse "weights" "talks.jsonl:2: expected paths without weights, for each sample is taken once" "${talks[@]}" --train talks.jsonl:2
    refuse "--doc-reset" "--doc-reset: is for documents: each conversation begins anew without it" "${talks[@]}" --doc-reset 1
    refuse "rows that hold none" "talks.jsonl: no sample of 37 can be used: talks.jsonl:1: expected at most 17 tokens" "${talks[@]}" --seq-len 16
    refuse "a part without a sample" "the part of --val-fraction: of 36 conversations none is left for it" "${talks[@]}" --val-fraction 0.01
    refuse "answers that are none" "expected a JSON object such as {\"messages\": [...]}" "${start[@]}" --train prompts.txt --learn answers
    refuse "--graph" "--graph: is for GPUs" "${talks[@]}" --graph 1
    refuse "a prompt that is none" "prompts.txt:1: expected a JSON object" "${talks[@]}" --eval-generate prompts.txt
    refuse "--eval-generate without training" "--eval-generate: answers while training: give --train, or the file to --generate-file" --model tiny --eval-generate prompts.jsonl --generate ""
    refuse "--generate-out alone" "--generate-out: is for --generate-file: give that too" "${talks[@]}" --generate-out x
    local other
    for other in "--train talks.jsonl" "--generate x" "--eval-only" "--generate-file prompts.jsonl" "--export-hf x" "--val talks.jsonl"; do
        refuse "--chat $other" "--chat: stands alone: leave out ${other%% *}" --model tiny --chat $other
    done
    refuse "--chat --resume" "--chat: takes a model as it is: give --from PATH" --resume --chat
    refuse "--chat without a template" "expected a chat template" --model tiny --chat
    refuse "--generate-out that is read" "is what --generate-file reads: give another name" --model tiny --generate-file prompts.jsonl --generate-out prompts.jsonl
}

# ---- packing changes nothing, nor do ranks ----

bits() {
    echo "# bits"
    local one=("${talks[@]}" --steps 4 --grad-accum 4) i
    go "${one[@]}" --run one
    for i in 2 4; do
        rm -rf ranks && timeout $limit "$launch" -n $i "$trainer" "${one[@]}" --run ranks >out 2>err </dev/null && same_run one ranks
        verdict $? "$i ranks: the run of one" "$(tail -n 2 err)"
    done
    rm -rf with && go "${one[@]}" --threads 3 --recompute 3 --head-rows 7 --run with && same_run one with
    verdict $? "other threads, less memory: the same run" ""
    # the same samples in other rows: the mean of the same losses, each the same (test_moe holds the bits), in another order
    go --from one --chat-template chatml --val talks.jsonl --seq-len 192 --eval-batches 100 --eval-only && i=$(loss)
    go --from one --chat-template chatml --val talks.jsonl --seq-len 192 --eval-batches 100 --eval-only --pack 0 && [ -n "$i" ] && [ "$i" = "$(loss)" ]
    verdict $? "validation of packed rows is that of one sample a row: $i" "$(loss)"
    go --from one --chat-template chatml --val talks.jsonl --seq-len 256 --eval-batches 100 --eval-only && [ "$i" = "$(loss)" ]
    verdict $? "... and of longer ones" "$(loss)"
}

# ---- going on ----

resume() {
    echo "# going on"
    local run=("${talks[@]}" --steps 12 --epochs 2 --val-fraction 0.1 --eval-every 3 --save-every 4 --keep 9 --eval-generate prompts.jsonl --max-new-tokens 5)
    go "${run[@]}" --run whole
    go "${run[@]}" --run part && rm -r part/step_000008 part/step_000012 && go --resume --run part && same_run whole part
    verdict $? "--resume: the run that was never stopped" "$(tail -n 2 err)"
    check "... its answers too: of 5 validations, three each" eval 'cmp whole/answers.jsonl part/answers.jsonl && [ "$(wc -l <part/answers.jsonl)" = 15 ]'
    for i in "--pack 0" "--learn last" "--seq-len 200" "--seed 7" "--chat-template qwen3"; do
        cp -r whole with
        timeout $limit "$trainer" --resume --run with $i --steps 14 >out 2>err </dev/null
        check "--resume $i is refused, by name" \
            test "$? $(grep -c "talks.jsonl: ${i%% *} has changed and so have the rows of the training data, since the run began: give the old data back, or name the new with --train" err)" = "2 1"
        rm -r with
    done
    cp -r whole with && go --resume --run with --truncate end --steps 14 && check "--truncate end goes on: nothing was too long" test ! -s err
    rm -r with
    cp -r whole with && go --resume --run with --pack 0 --train talks.jsonl --val-fraction 0.1 --steps 14
    check "... but not where the data is named anew" test $? = 0
    mv talks.jsonl kept && tail -n +2 kept >talks.jsonl
    timeout $limit "$trainer" --resume --run whole --steps 14 >out 2>err </dev/null
    check "other data are refused" test "$? $(grep -c 'talks.jsonl: the training data has changed since the run began' err)" = "2 1"
    mv kept talks.jsonl
    cp prompts.jsonl kept && echo '{"prompt": "2"}' >>prompts.jsonl
    timeout $limit "$trainer" --resume --run whole --steps 14 >out 2>err </dev/null
    check "... and other prompts" test "$? $(grep -c 'prompts.jsonl: the prompts have changed since the run began: .*--eval-generate' err)" = "2 1"
    mv kept prompts.jsonl
}

# ---- answers ----

record() { "$python" -c 'import json, sys
print(*(json.loads(line).get(key) for line in open(sys.argv[1]) for key in sys.argv[2:]), sep="|")' "$@"; }

answers() {
    echo "# answers"
    local asks=(--from heart --chat-template chatml --temperature 0 --max-new-tokens 20)
    go "${start[@]}" --train talks.jsonl --steps 260 --eval-generate prompts.jsonl --sample-every 130 --temperature 0 --max-new-tokens 20 --run heart
    check "--eval-generate: what it has learned it answers ($(record heart/answers.jsonl answer | tr '\n' ' '))" \
        test "$(record <(tail -n 3 heart/answers.jsonl) step answer | cut -d'|' -f1-4)" = "260|B.|260|E."
    check "... with the references" test "$(record heart/answers.jsonl reference | cut -d'|' -f1-3)" = "B.|E.|None"
    go "${asks[@]}" --generate-file prompts.jsonl
    check "--generate-file: the same answers, alone on standard output" cmp <(sed 's/,"step".*/}/' heart/answers.jsonl | tail -n 3) out
    go "${asks[@]}" --generate-file prompts.jsonl --generate-out all.jsonl && check "--generate-out: in a file" cmp out <(:) && go "${asks[@]}" --generate-file prompts.jsonl && check "... the same" cmp out all.jsonl
    check "finish: stop or length" test "$(record all.jsonl finish | cut -d'|' -f1-2)" = "stop|stop"
    go "${asks[@]}" --generate-file prompts.jsonl --generate-out many.jsonl --temperature 1 --samples 3
    head -c -20 many.jsonl >cut.jsonl && cp {many,cut}.jsonl.settings.json && go "${asks[@]}" --generate-file prompts.jsonl --generate-out cut.jsonl --temperature 1 --samples 3
    check "a file that was cut: what is missing comes again, the same" eval 'cmp cut.jsonl many.jsonl && [ "$(wc -l <many.jsonl)" = 9 ]'
    check "... which a line says" grep -q 'cut.jsonl: has 8 of 9 answers, the others follow; for new ones remove it' err
    go "${asks[@]}" --generate-file prompts.jsonl --generate-out cut.jsonl --temperature 1 --samples 3
    check "... and when all are there" grep -q 'has 9 of 9 answers, so nothing is left to do' err
    tail -n 2 prompts.jsonl >others.jsonl
    local i
    for i in 1 2 3 8; do
        go "${asks[@]}" --generate-file prompts.jsonl --temperature 1 --samples 3 --generate-batch $i
        check "--generate-batch $i: the same answers" cmp out many.jsonl
    done
    go --from heart --generate a --samples 5 --generate-batch 1 --max-new-tokens 30 && mv out one
    go --from heart --generate a --samples 5 --generate-batch 3 --max-new-tokens 30 && check "... the same --samples" cmp out one
    go --from heart --generate a --samples 2 --max-new-tokens 30 && check "... of which two are the first two of five" cmp <(sed 's/ of 2$/ of 5/' out) <(sed '/^--- sample 3 of 5$/,$d' one)
    go "${start[@]}" --train talks.jsonl --steps 2 --grad-accum 2 --eval-generate prompts.jsonl --sample-every 1 --generate-batch 1 --run alone
    go "${start[@]}" --train talks.jsonl --steps 2 --grad-accum 2 --eval-generate prompts.jsonl --sample-every 1 --generate-batch 2 --run beside
    check "... the same --eval-generate" cmp alone/answers.jsonl beside/answers.jsonl
    timeout $limit "$launch" -n 2 "$trainer" "${start[@]}" --train talks.jsonl --steps 2 --grad-accum 2 --ep 2 --eval-generate prompts.jsonl --sample-every 1 --run ranks >out 2>err </dev/null
    check "... by two ranks that share the experts" cmp alone/answers.jsonl ranks/answers.jsonl
    timeout $limit "$trainer" "${asks[@]}" --generate-file others.jsonl --generate-out all.jsonl >out 2>err </dev/null
    check "answers to other prompts are not added to" test "$? $(grep -c 'all.jsonl:1: expected the answer to a prompt of --generate-file' err)" = "2 1"
    head -n 1 all.jsonl >begun.jsonl && cp all.jsonl.settings.json begun.jsonl.settings.json
    goes_on() {  # PROMISE STATUS TEXT COMMAND...
        timeout $limit "${@:4}" --generate-file prompts.jsonl --generate-out begun.jsonl >out 2>err </dev/null
        status=$?
        [ $status = $2 ] && grep -qF -- "$3" err && [ "$(wc -l <err)" = 1 ]
        verdict $? "$1" "status $status: $(<err)"
    }
    goes_on "nor to those made with another seed" 2 "begun.jsonl: its answers were made with --seed 42, found 7: give another name" "$trainer" "${asks[@]}" --seed 7
    goes_on "... at another temperature" 2 "were made with --temperature 0.0, found 0.5" "$trainer" "${asks[@]}" --temperature 0.5
    go --model tiny --export-hf untrained && goes_on "... by another model" 2 "were made with another model" "$trainer" "${asks[@]}" --from untrained
    goes_on "nor while another process writes them" 1 "begun.jsonl: another process writes it" flock begun.jsonl "$trainer" "${asks[@]}"
    mv begun.jsonl.settings.json kept && goes_on "nor where nobody knows what made them" 2 "no begun.jsonl.settings.json beside it" "$trainer" "${asks[@]}"
    check "... and all this has changed nothing" eval 'cmp begun.jsonl <(head -n 1 all.jsonl) && ! [ -e begun.jsonl.settings.json ]'
    mv kept begun.jsonl.settings.json && goes_on "the same model goes on" 0 "has 1 of 3 answers, the others follow" "$trainer" "${asks[@]}" --threads 2
    check "... to the same file" cmp begun.jsonl all.jsonl
    head -c 30 all.jsonl >begun.jsonl && go "${asks[@]}" --generate-file prompts.jsonl --generate-out begun.jsonl
    check "killed in its first record: that one is made anew" cmp begun.jsonl all.jsonl
}

# ---- --chat ----

talk() { timeout $limit "$trainer" --from heart --chat --temperature 0 --max-new-tokens 20 "$@" >out 2>err; }

chat() {
    echo "# --chat"
    [ -d ../in_answers/heart ] && cp -r ../in_answers/heart . || go "${start[@]}" --train talks.jsonl --steps 260 --run heart
    printf 'b2?\nSure?\n/reset\ne7?' | talk
    check "a pipe: an answer to each line, nothing else" test "$?$(tr '\n' '|' <out)$(wc -c <err)" = "0B.|Yes.|E.|0"
    printf '/think off\n<|im_end|>\n/what\ne7?\n/quit\nb2?\n' | talk
    check "what it does not take it says, and goes on" test "$(tr '\n' '|' <out) $(wc -l <err)" = "E.| 3"
    for i in 1 2 3 4 5 6 7 8; do echo "a$i?"; done | talk
    check "a full window: the oldest turns are forgotten, which a line says" \
        test "$(wc -l <out) $(grep -c 'the oldest turn is forgotten: the conversation no longer fits 256 positions' err)" = "8 5"
    { printf 'b2?\n'; head -c 17M /dev/zero | tr '\0' a; printf '\n/reset\ne7?\n'; } | talk
    check "a line that fits no memory is not kept, which a line says" \
        test "$(tr '\n' '|' <out) $(wc -l <err) $(grep -c 'expected a line of at most 16.00 MiB, found 17.00 MiB: not taken' err)" = "B.|E.| 1 1"
    printf 'b2?\n' | talk --temperature 100 --seed 4 --max-new-tokens 1000
    check "an answer that fills the window is cut, which a line says" \
        test "$(wc -l <err) $(grep -cE 'the answer is cut after 2[0-9]+ tokens: the conversation fills the 256 positions of the window' err)" = "1 1"
    printf 'b2?\n' | talk --think 0 --seq-len 200 && check "--think 0, --seq-len 200" test "$(<out)" = "B."
    go --from heart --export-hf folder
    printf '%s' "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}" \
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}" >folder/chat_template.jinja
    go --from folder --train talks.jsonl --seq-len 192 --lr 1e-5 --steps 1 --run tuned
    check "a folder that has a chat template needs no option" test "$(boxed 'chat template' chatml)" = 1
    for i in folder tuned; do
        check "... nor has --chat from ${i/tuned/the run that it began}" test "$(echo 'b2?' | "$trainer" --from $i --chat --temperature 0 2>err)" = "B."
    done
    local asked=(--from folder --train talks.jsonl --seq-len 192 --lr 1e-5 --steps 1)
    echo "{{ messages }}" >folder/chat_template.jinja
    go "${asked[@]}" --chat-template chatml --run named --export-hf exported
    check "a template that was typed goes along for other programs, not the folder's" cmp -s {named/step_000001,exported}/chat_template.jinja
    check "... which --chat knows without an option" test "$(rm -f exported/manifest.json; echo 'b2?' | "$trainer" --from exported --chat --temperature 0 2>err)" = "B."
    go "${asked[@]}" --chat-template qwen3-2507 --run unsaid
    check "... or a line says that it does not" test "$(grep -c -- '--chat-template qwen3-2507: exports do not say so' err) $(cat unsaid/step_000001/chat_template.jinja)" = "1 {{ messages }}"
    "$python" - "$trainer" --from heart --chat --chat-template chatml --temperature 0 --max-new-tokens 20 >out <<'PYTHON'
import os, pty, select, sys
def screen(keys):  # what a terminal shows; each of the keys is typed when a prompt sign has come
    process, terminal = pty.fork()
    if process == 0: os.execv(sys.argv[1], sys.argv[1:])
    sent, seen = b"", 0
    while select.select([terminal], [], [], 20)[0]:
        try: sent += os.read(terminal, 4096)
        except OSError: break
        if keys and sent.count(b"\n> ") > seen:
            seen += 1
            os.write(terminal, keys.pop(0))
    else: os.kill(process, 9)  # nothing came for so long
    print(sent.decode().replace("\r\n", "\n"), "status", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
screen([b"b2?\n", b"/reset\n", b"\x04"])
screen([b"e7?\n", b"\x03"])
PYTHON
    check "a terminal: how to leave, a prompt sign, the answer; Ctrl-D ends" \
        test "$(grep -c 'Ctrl-C ends an answer, Ctrl-D the chat' out) $(grep -cE '^(> b2\?|B\.|\[forgotten\])$' out) $(grep -c ' status 0$' out)" = "2 3 2"
    check "... and Ctrl-C at the prompt" test "$(grep -cE '^(> e7\?|E\.)$' out)" = 2
}

cp talks.jsonl prompts.txt && sed -i '1s/.*/no JSON/;2,$d' prompts.txt
sed 's/"instruction"/"text": "a", "instruction"/' alpaca.jsonl >both.jsonl
files=(*.jsonl *.gz prompts.txt)
for part in $parts; do  # each in a folder of its own
    mkdir "$work/in_$part" && cp "${files[@]}" "$work/in_$part" && cd "$work/in_$part" || exit 1
    $part
    cd "$work" || exit 1
done
finish
