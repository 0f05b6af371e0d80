#!/usr/bin/env bash
# The worst mistakes of users and what they are told: each is made for real and compared with its line of doc/mistakes.md.
#     dev/mistakes.sh           compare: one promise for each line of the table. About 25 s after the builds.
#     dev/mistakes.sh --write   write doc/mistakes.md anew
# A line holds the mistake, the command (`...` stands for the options of a small training run), the last line on stderr
# and the exit status. Beside that each row promises: nothing else is on stderr, it takes less than 5 s, a status of 2
# leaves no file or folder behind, a status of 1 no unfinished one. Sizes of memory and disk, ports and process ids become N.
. "$(dirname "$0")/promises.sh"
export OMP_NUM_THREADS=1
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
need_build trainer "" train_gpt2
need_build launch "" launch
need_build inspect "" tools/inspect
need_build tokenize "" tools/tokenize
need_build moe_trainer "CPU=1" train_moe
need_build qwen_trainer "CPU=1" train_qwen3
need_build glm_trainer "CPU=1" train_glm5
need_build faults "" train_gpt2_faults
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export PATH=$(dirname "$moe_trainer"):$(dirname "$qwen_trainer"):$(dirname "$glm_trainer"):$(dirname "$inspect"):$PATH
table=$(mktemp -p "$work" .table.XXXXXX)
writing=$([ "${1-}" = --write ] && echo 1 || echo 0)

# ---- a row ----

heading() { printf '\n## %s\n\n| mistake | command | what is printed | status |\n|---|---|---|---|\n' "$1" >>"$table"; }

# a command as it is typed: quotes where they are needed, the usual options as `...`
typed() {
    local word text=""
    for word; do
        case $word in
            *[\ \*\"]*) text+=" '$word'" ;;
            *) text+=" $word" ;;
        esac
    done
    text=${text# }
    text=${text//train_gpt2_faults/train_gpt2}
    text=${text//"${train[*]}"/train_gpt2 ...}
    text=${text//"train_gpt2 ${train[*]:1}"/train_gpt2 ...}
    text=${text//"${moe[*]}"/train_moe ...}
    text=${text//"${dense[*]}"/train_qwen3 ...}
    text=${text//"${lora[*]}"/train_qwen3 --lora-rank 4 ...}
    text=${text//"${glm[*]}"/train_glm5 ...}
    printf '%s' "${text//|/\\|}"
}

# what differs from machine to machine, and what would end a cell of the table
steady() {
    sed -E -e "s#train_gpt2_faults#train_gpt2#g" -e 's/^[a-z_0-9]+: //' -e 's/[|*]/\\&/g' -e 's/</\&lt;/g' -e "s/\`/'/g" \
        -e 's/[0-9.]+ [KMGT]iB of memory, [0-9.]+ [KMGT]iB are free/N GiB of memory, N GiB are free/' \
        -e 's/the disk has [0-9.]+ [KMGT]iB free/the disk has N GiB free/' -e 's/process \([0-9]+\)/process (N)/' \
        -e 's/, [0-9.]+ [KMGT]iB are free: make room/, N GiB are free: make room/' -e 's/-nan/nan/g' -e 's/on [0-9]+ machines/on N machines/' \
        -e 's/\(at most [0-9]+; [0-9]+ with --recompute 3\)/(at most N; N with --recompute 3)/' \
        -e 's/stops in .* after step [0-9]+; newest checkpoint: .*/stops in ... after step N; newest checkpoint: .../'
}

# One mistake and its command. Variables: `as` is shown instead of the command; `lines` on stderr when it is not one, as
# where a warning comes first.
row() {  # MISTAKE COMMAND...
    local mistake=$1 status line expected problem="" start=${EPOCHREALTIME/./} before after
    shift
    before=$(find . ! -name '.*' | sort)
    timeout 20 "$@" >.out 2>.err <"${input:-/dev/null}"
    status=$?
    if [ "$(wc -l <.err)" != "${lines:-1}" ]; then problem+="expected ${lines:-1} line(s) on stderr, found: $(<.err)"$'\n'; fi
    if ((${EPOCHREALTIME/./} - start > 5000000)); then problem+="took longer than 5 s"$'\n'; fi
    after=$(comm -13 <(echo "$before") <(find . ! -name '.*' | sort))
    if [ $status = 2 ] && [ -n "$after" ]; then problem+="left behind: $after"$'\n'; fi
    if [[ $after == *.tmp* ]]; then problem+="left unfinished: $after"$'\n'; fi
    line="| $mistake | \`${as:-$(typed "$@")}\` | $(tail -n 1 .err | steady) | $status |"
    line=$(sed -E 's/(127\.0\.0\.1):[0-9]+/\1:N/g' <<<"$line")
    printf '%s\n' "$line" >>"$table"
    if [ $writing = 0 ] && ! grep -qxF -- "$line" "$root/doc/mistakes.md"; then
        expected=$(grep -F -- "| $mistake |" "$root/doc/mistakes.md" || echo "a line in doc/mistakes.md")
        problem+="expected $expected"$'\n'"found    $line"
    fi
    verdict "$([ -z "$problem" ]; echo $?)" "$mistake" "$problem"
}

# ---- the files they have ----

mkdir text empty_folder
for i in {1..250}; do echo "line $i: the plain loop is the law, and $i times $i is $((i * i))."; done >text/a.txt
head -c 12 text/a.txt >short.txt
: >nothing.txt
config() { echo "{\"model_type\":\"gpt2\",\"n_positions\":${2:-24},\"vocab_size\":257,\"n_layer\":1,\"n_head\":2,\"n_embd\":$1}"; }
config 16 >tiny.json
train=(train_gpt2 --config tiny.json --train text --seq-len 16)
"${train[@]}" --steps 4 --save-every 2 --run run --export-hf model --export-bin model.bin >/dev/null || exit 1
shard() { le 4 20240520 1 $#; head -c 1012 /dev/zero; le 2 "$@"; }  # TOKEN...
html='<!DOCTYPE html><html><head><title>Sign in</title></head></html>'
lfs=$'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 548105171\n'
shard $(seq 0 300 50000) >gpt2.bin
echo "$html" >login.bin
printf %s "$lfs" >pointer.bin
gzip -c text/a.txt >book.txt.gz
printf 'PK\003\004\024\000\000\000\010\000%0100d' 0 >book.zip
head -c 1100 gpt2.bin >half.bin
printf 'caf\351 cr\350me\n%0100d' 0 >latin1.txt
head -c 4000 "$faults" >program
yes '{"prompt": "2+2", "completion": "4"}' | head -n 50 >chat.jsonl
mkdir mixed && cp text/a.txt gpt2.bin mixed

experts() {
    echo "{\"model_type\":\"mixtral\",\"max_position_embeddings\":24,\"vocab_size\":257,\"num_hidden_layers\":1,\"num_attention_heads\":2,\"num_key_value_heads\":1,\"hidden_size\":16,\"intermediate_size\":8,\"num_local_experts\":4,\"num_experts_per_tok\":2$1}"
}
experts "" >experts.json
experts "" | sed 's/mixtral/mistral/' >mistral.json
moe=(train_moe --config experts.json --train text --seq-len 16)
lora=(train_qwen3 --from base --lora-rank 4 --train text --seq-len 16)
train_moe --config experts.json --export-hf mixtral >/dev/null || exit 1

qwen3() {
    echo "{\"model_type\":\"qwen3\",\"max_position_embeddings\":24,\"vocab_size\":257,\"num_hidden_layers\":2,\"num_attention_heads\":2,\"num_key_value_heads\":1,\"hidden_size\":16,\"head_dim\":8,\"intermediate_size\":8$1}"
}
qwen3 "" >dense.json
dense=(train_qwen3 --config dense.json --train text --seq-len 16)
train_qwen3 --config dense.json --export-hf qwen3 >/dev/null || exit 1

echo '{"model_type":"glm_moe_dsa","max_position_embeddings":24,"vocab_size":257,"num_hidden_layers":2,"hidden_size":16,"num_attention_heads":2,"q_lora_rank":8,"kv_lora_rank":8,"qk_nope_head_dim":4,"qk_rope_head_dim":4,"v_head_dim":4,"index_n_heads":2,"index_head_dim":8,"index_topk":4,"indexer_types":["full","shared"],"mlp_layer_types":["dense","sparse"],"intermediate_size":16,"n_routed_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":8,"rope_parameters":{"rope_theta":10000}}' >chosen.json
glm=(train_glm5 --config chosen.json --train text --seq-len 16)
train_glm5 --config chosen.json --export-hf glm5 >/dev/null || exit 1

folder() { cp -r model "$1" && rm "$1/model.safetensors"; }  # a model's folder without its weights
for name in html lfs pickle gguf none; do folder $name; done
echo "$html" >html/model.safetensors
printf %s "$lfs" >lfs/model.safetensors
printf 'PK\003\004%0100d' 0 >pickle/pytorch_model.bin
printf 'GGUF\003\000\000\000%0100d' 0 >gguf/model-q4_k_m.gguf
cp gguf/model-q4_k_m.gguf .
echo '{"model_type":"qwen3","vocab_size":257}' >qwen.json
folder other && config 32 >other/config.json && cp model/model.safetensors other
folder llama && echo '{"model_type":"llama"}' >llama/config.json && cp model/model.safetensors llama
folder lora && cp model/model.safetensors lora/adapter_model.safetensors
cp -r model nan_config && sed -i 's/"n_layer": 1/"n_layer": 2/' nan_config/config.json && mv nan_config deeper
cp -r model cut && truncate -s -100 cut/model.safetensors
train_gpt2 --from model --export-hf shards --shard-gb 2e-5 >/dev/null
cp -r shards lacking && rm lacking/model-00002-of-*
cp -r shards outside && sed -i 's#"model-00002-of#"../model-00002-of#' outside/model.safetensors.index.json

tokenizer() { echo "{\"model\":{\"type\":\"$1\",\"vocab\":{\"a\":0}},\"added_tokens\":[]}"; }
tokenizer WordPiece >bert.json
tokenizer Unigram >t5.json
le 4 20240328 2 3 2 >gpt2_tokenizer.bin
head -c 1008 /dev/zero >>gpt2_tokenizer.bin
echo '{"model":{"type":"BPE","vocab":{"?":0,"a":1},"merges":[],"unk_token":"?"},"added_tokens":[{"id":2,"content":"</s>","special":true}]}' >small.json
printf '\001a\001b\001c' >>gpt2_tokenizer.bin
tensor_file() {  # DTYPE: inputs and targets (1, 2)
    local header="{\"inputs\":{\"dtype\":\"$1\",\"shape\":[1,2],\"data_offsets\":[0,8]},\"targets\":{\"dtype\":\"$1\",\"shape\":[1,2],\"data_offsets\":[8,16]}}"
    le 8 ${#header}
    printf %s "$header"
    le 4 1 2 2 3
}
tensor_file F32 >batch.safetensors
printf 'lr = 3e-4\nlerning-rate = 1\n' >options.txt

# ---- the mistakes ----

heading "Paths"
row "a path that does not exist" "${train[@]}" --train boks.txt
row "a pattern that matches nothing" "${train[@]}" --train 'shards/train_*.bin'
row "an empty folder" "${train[@]}" --train empty_folder
row "nothing to train on" train_gpt2 --model tiny
row "no model named" train_gpt2 --train text
row "two models named" train_gpt2 --from model --model tiny --train text
row "a preset given to \`--from\`" train_gpt2 --from d12 --train text
row "a folder given to \`--model\`" train_gpt2 --model ./model --train text

heading "Data"
row "a web page saved instead of a shard" "${train[@]}" --train login.bin
row "a Git LFS pointer instead of a shard" "${train[@]}" --train pointer.bin
row "compressed text" "${train[@]}" --train book.txt.gz
row "a zip archive" "${train[@]}" --train book.zip
row "an empty file" "${train[@]}" --train nothing.txt
row "text too short for one row" "${train[@]}" --train short.txt
row "too little text for a validation" "${train[@]}" --val short.txt
row "too little left for \`--val-fraction\`" "${train[@]}" --val-fraction 0.0001
row "text in Latin-1" "${train[@]}" --train latin1.txt
row "a binary" "${train[@]}" --train program
row "JSON lines of a chat" "${train[@]}" --train chat.jsonl
row "text and shards in one pattern" "${train[@]}" --train 'mixed/*'
row "shards of a larger vocabulary than the model's" "${train[@]}" --train gpt2.bin
row "a shard copied in part" "${train[@]}" --train half.bin
row "a HellaSwag file that is a token shard" "${train[@]}" --hellaswag gpt2.bin
row "HellaSwag's own file" "${train[@]}" --hellaswag chat.jsonl
row "a probe with numbers that are not I32" train_gpt2 --from model --probe batch.safetensors

heading "Models"
row "a folder with PyTorch's pickle" train_gpt2 --from pickle --train text
row "the pickle itself" train_gpt2 --from pickle/pytorch_model.bin --train text
row "a folder with a GGUF file" train_gpt2 --from gguf --train text
row "the GGUF file itself" train_gpt2 --from model-q4_k_m.gguf --train text
row "a web page as model.safetensors" train_gpt2 --from html --train text
row "a Git LFS pointer as model.safetensors" train_gpt2 --from lfs --train text
row "a LoRA adapter" train_gpt2 --from lora --train text
mkdir runs && cp -r run runs/hello && cp gpt2.bin runs
row "a folder above the runs" train_gpt2 --from runs --generate hi
row "no weights beside config.json" train_gpt2 --from none --train text
row "a token shard" train_gpt2 --from gpt2.bin --train text
row "config.json of another architecture" train_gpt2 --from llama --train text
row "config.json of a model with other sizes" train_gpt2 --from other --train text
row "config.json of a model with more layers" train_gpt2 --from deeper --train text
row "model.safetensors downloaded in part" train_gpt2 --from cut --train text
row "one of several shards is missing" train_gpt2 --from lacking --train text
row "an index that points out of its folder" train_gpt2 --from outside --train text
row "\`--config\` of another architecture" train_gpt2 --config qwen.json --train text

heading "Tokenizers"
row "a tokenizer that is not the model's" train_gpt2 --from model --tokenizer small.json --generate hi
config 16 | sed 's/257/500/' >500.json && train_gpt2 --config 500.json --export-hf big >/dev/null
row "text for a model whose tokenizer is not there" train_gpt2 --from big --train text
row "a WordPiece tokenizer" train_gpt2 --model tiny --tokenizer bert.json --train text
row "a Unigram tokenizer" train_gpt2 --model tiny --tokenizer t5.json --train text
row "gpt2_tokenizer.bin, which only decodes, asked to encode" train_gpt2 --model tiny --tokenizer gpt2_tokenizer.bin --train text
row "another JSON file" train_gpt2 --model tiny --tokenizer tiny.json --train text
row "a misspelt tokenizer" train_gpt2 --model tiny --tokenizer byte --train text
row "tokenize: a binary among the files" tokenize --out book.bin text/a.txt program
echo "104 105 300" >ids.txt
input=ids.txt as="tokenize --decode <ids.txt" row "tokenize: ids that the tokenizer does not have" tokenize --decode

heading "Conversations"
cp small.json llama/tokenizer.json
echo "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{% endfor %}" >llama/chat_template.jinja
say() { printf '%s\n' "$1" | sed "s/'/\"/g" >"$2"; }  # TEXT FILE: with ' for "
say "{'instruction': 'Add 2 and 2', 'output': '4'}" good.jsonl
say "[{'instruction': 'Add 2 and 2', 'output': '4'}]" list.json
say "{'messages': [{'role': 'user', 'content': 'Hi'}]}" asks.jsonl
say "{'messages': [{'role': 'developer', 'content': 'Hi'}]}" developer.jsonl
say "{'conversations': [{'from': 'human', 'value': 'Hi'}, {'from': 'gpt', 'value': ''}]}" silent.jsonl
say "{'conversations': [{'from': 'human', 'value': 'Hi'}, {'from': 'bot', 'value': 'Hello'}]}" bot.jsonl
say "{'instruction': 'Say hello', 'output': 'Hello<|im_end|>'}" ends.jsonl
say "{'messages': [{'role': 'user', 'content': [{'type': 'image'}]}, {'role': 'assistant', 'content': 'A cat'}]}" image.jsonl
say "{'messages': [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}], 'tools': [{'name': 'f'}]}" tools.jsonl
say "{'messages': [{'role': 'system', 'content': 'Be kind'}, {'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]}" system.jsonl
say "{'messages': [{'role': 'user', 'content': 'Hi'}, {'role': 'user', 'content': 'Hello?'}, {'role': 'assistant', 'content': 'Hi'}]}" twice.jsonl
say "{'text': 'A text to learn.'}" texts.jsonl
{ cat good.jsonl; echo '{"prompt": "Hi'; } >mixed.jsonl
gzip -c good.jsonl | head -c 40 >cut.jsonl.gz
look=(tokenize --chat --chat-template)
row "a model without a chat template" tokenize --chat --tokenizer small.json good.jsonl
row "a chat template that is not known" tokenize --chat --tokenizer llama good.jsonl
row "a chat template misspelt" "${look[@]}" qwen good.jsonl
row "a tokenizer that only decodes" "${look[@]}" chatml --tokenizer gpt2_tokenizer.bin good.jsonl
row "texts for conversations" "${look[@]}" chatml texts.jsonl
row "prompts and completions" "${look[@]}" chatml chat.jsonl
row "a JSON list for JSON Lines" "${look[@]}" chatml list.json
row "questions without an answer" "${look[@]}" chatml asks.jsonl
row "empty answers" "${look[@]}" chatml silent.jsonl
row "a role that is none" "${look[@]}" chatml developer.jsonl
row "a name of ShareGPT that is none" "${look[@]}" chatml bot.jsonl
row "pictures in a conversation" "${look[@]}" chatml image.jsonl
row "a special token in an answer" "${look[@]}" chatml ends.jsonl
row "tools for a template without tools" "${look[@]}" chatml tools.jsonl
row "a system text for a template without one" "${look[@]}" mistral-v0.1 system.jsonl
row "two questions in a row for Mistral" "${look[@]}" mistral-v1 twice.jsonl
row "conversations longer than the limit" "${look[@]}" chatml --max-length 8 good.jsonl
row "... and without an answer before their end" "${look[@]}" chatml --max-length 8 --truncate end good.jsonl
row "an archive that is cut short" "${look[@]}" chatml cut.jsonl.gz
row "weights for conversations" "${look[@]}" chatml good.jsonl:2
row "an empty file of conversations" "${look[@]}" chatml nothing.txt
row "a folder without conversations" "${look[@]}" chatml text
row "--chat without files" tokenize --chat
sft=("${moe[@]}" --chat-template chatml)
sed 's/{/{"text": "a", /' good.jsonl >both.jsonl
say "{'question': 'How are you?'}" question.jsonl
row "conversations, and nobody says how to write them" "${moe[@]}" --train good.jsonl
row "lines that are texts and conversations" "${sft[@]}" --train both.jsonl
row "one list of conversations for lines" "${sft[@]}" --train list.json
row "validation of another kind" "${sft[@]}" --train good.jsonl --val text
row "texts and conversations in one list" "${sft[@]}" --train good.jsonl,texts.jsonl
row "rows too short for any conversation" "${sft[@]}" --train good.jsonl
row "\`--doc-reset\` for conversations" "${sft[@]}" --train good.jsonl --doc-reset 1
row "conversations for a trainer without them" "${train[@]}" --train good.jsonl
asks=(train_moe --from mixtral --chat-template chatml --generate-file)
row "a prompt that is none" "${asks[@]}" question.jsonl
row "a prompt longer than the model's positions" "${asks[@]}" good.jsonl
row "a file of answers that is something else" train_moe --model tiny "${asks[@]:3}" good.jsonl --generate-out bot.jsonl
row "\`--chat\` with a model that has no template" train_moe --from mixtral --chat
row "\`--chat\` while training" train_moe --from mixtral --chat --train text
row "--max-length without --chat" tokenize --max-length 64 text/a.txt

heading "Adapters"
echo '{"model_type":"qwen3","vocab_size":257,"hidden_size":16,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":4,"intermediate_size":12,"max_position_embeddings":192}' >qwen_tiny.json
sed 's/"hidden_size":16/"hidden_size":24/' qwen_tiny.json >wider.json
sed 's/"num_hidden_layers":2/"num_hidden_layers":1/' qwen_tiny.json >shallow.json
for name in qwen_tiny:base wider:wider shallow:shallow; do train_qwen3 --config ${name%:*}.json --export-hf ${name#*:} >/dev/null || exit 1; done
"${lora[@]}" --steps 4 --run adapted --export-lora adapter >/dev/null || exit 1
variant() {  # NEW PYTHON: the adapter, whose config `c` or tensors `t`, {name: (dtype, shape, bytes)}, have been changed
    cp -r adapter "$1"
    "$python" - "$1" "$2" <<'PYTHON'
import json, struct, sys
path = sys.argv[1] + "/adapter_model.safetensors"
c, data = json.load(open(sys.argv[1] + "/adapter_config.json")), open(path, "rb").read()
n = struct.unpack("<Q", data[:8])[0]
t = {name: (x["dtype"], x["shape"], data[8 + n + x["data_offsets"][0]:8 + n + x["data_offsets"][1]])
     for name, x in json.loads(data[8:8 + n]).items() if name != "__metadata__"}
first = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
exec(sys.argv[2])
header, body = {}, b""
for name, (dtype, shape, x) in t.items():
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(x)]}
    body += x
header = json.dumps(header).encode()
header += b" " * (-len(header) % 8)
open(path, "wb").write(struct.pack("<Q", len(header)) + header + body)
json.dump(c, open(sys.argv[1] + "/adapter_config.json", "w"))
PYTHON
}
variant dora 'c["use_dora"] = True'
variant ia3 'c["peft_type"] = "IA3"'
variant with_bias 'c["bias"] = "all"'
variant saved 'c["modules_to_save"] = ["lm_head"]'
variant ranked 'c["r"] = 8'
variant rankless 'del c["r"]'
variant patterned 'c["rank_pattern"] = {"q_proj": "four"}'
variant unpaired 't.pop(first + "B.weight")'
variant head 't["base_model.model.lm_head.lora_A.weight"] = "F32", [4, 16], bytes(256)'
variant named 't = {name.removeprefix("base_model.model."): x for name, x in t.items()}'
variant integers 't[first + "A.weight"] = "I32", *t[first + "A.weight"][1:]'
variant short 't[first + "A.weight"] = "F32", [4, 12], bytes(192)'
variant sick 't[first + "B.weight"] = "F32", t[first + "B.weight"][1], struct.pack("<f", float("nan")) + t[first + "B.weight"][2][4:]'
mkdir alone_config alone_weights && cp adapter/adapter_config.json alone_config && cp adapter/adapter_model.safetensors alone_weights
cp -r adapter partial && truncate -s -100 partial/adapter_model.safetensors
cp -r adapter page && echo "$html" >page/adapter_model.safetensors
cp -r adapter no_json && echo '{"r": 4,' >no_json/adapter_config.json
mkdir peft && cp adapter/adapter_config.json adapter/adapter_model.safetensors peft
with=(train_qwen3 --from base --generate hi --lora)
row "an adapter given to \`--from\`" train_qwen3 --from adapter --generate hi
row "a run that trained an adapter given to \`--from\`" train_qwen3 --from adapted --generate hi
row "an adapter without its model" train_qwen3 --lora adapter --generate hi
row "a model given to \`--lora\`" "${with[@]}" base
row "an adapter that is not there" "${with[@]}" adaptor
row "its file given to \`--lora\`" "${with[@]}" adapter/adapter_model.safetensors
row "a run that trained a whole model given to \`--lora\`" "${with[@]}" run
row "an adapter without adapter_model.safetensors" "${with[@]}" alone_config
row "an adapter without adapter_config.json" "${with[@]}" alone_weights
row "an adapter downloaded in part" "${with[@]}" partial
row "a web page as adapter_model.safetensors" "${with[@]}" page
row "adapter_config.json cut short" "${with[@]}" no_json
row "an adapter of a wider model" train_qwen3 --from wider --generate hi --lora adapter
row "an adapter of a model with more layers" train_qwen3 --from shallow --generate hi --lora adapter
row "DoRA" "${with[@]}" dora
row "another method of PEFT" "${with[@]}" ia3
row "an adapter that learns biases" "${with[@]}" with_bias
row "an adapter with whole layers" "${with[@]}" saved
row "a rank that is not the tensors'" "${with[@]}" ranked
row "a config without a rank" "${with[@]}" rankless
row "a pattern of ranks that are words" "${with[@]}" patterned
row "an A without its B" "${with[@]}" unpaired
row "an adapter of the head" "${with[@]}" head
row "tensors under other names" "${with[@]}" named
row "tensors of integers" "${with[@]}" integers
row "a tensor of another shape" "${with[@]}" short
row "NaN in an adapter" train_qwen3 --from base --lora sick --train text --seq-len 16
row "a layer that no model has" "${lora[@]}" --lora-targets query
row "an expression that is none" "${lora[@]}" --lora-targets 'layers.(0'
row "experts of a model without them" "${lora[@]}" --lora-parameters mlp.experts.down_proj
row "a rank above the width of the layers" "${lora[@]}" --lora-rank 64
row "a pattern without its rank" "${lora[@]}" --lora-rank-pattern q_proj
row "a pattern of ranks that no layer has" "${lora[@]}" --lora-rank-pattern zproj=2
row "\`--lora-rank\` where nothing is trained" train_qwen3 --from base --lora-rank 4 --generate hi
row "\`--lora-rank\` for an adapter that has one" "${lora[@]}" --lora adapter
row "\`--lora-alpha\` without an adapter" train_qwen3 --from base --train text --lora-alpha 8
row "\`--merge\` without a folder for the model" train_qwen3 --from base --lora adapter --merge 1
row "\`--export-hf\` of an adapter" "${lora[@]}" --export-hf tuned
row "\`--export-lora\` without an adapter" train_qwen3 --from base --train text --export-lora tuned
row "\`--export-lora\` over the model" "${lora[@]}" --export-lora base
row "\`--export-lora\` over PEFT's files" "${lora[@]}" --export-lora peft
row "a merged model over the adapter" train_qwen3 --from base --lora adapter --merge 1 --export-hf adapter
row "training a whole model in bf16" train_qwen3 --from base --train text --weights bf16
row "a tensor of the model frozen beside an adapter" "${lora[@]}" --freeze model.norm.weight
cp -r base huge && "$python" - huge/model.safetensors <<'PYTHON'
import json, struct, sys
data = bytearray(open(sys.argv[1], "rb").read())
n = struct.unpack("<Q", data[:8])[0]
at = 8 + n + json.loads(data[8:8 + n])["model.layers.0.mlp.up_proj.weight"]["data_offsets"][0]
data[at:at + 4] = struct.pack("<f", 1e5)
open(sys.argv[1], "wb").write(data)
PYTHON
row "a weight that fp8 has no number for" train_qwen3 --from huge --lora-rank 4 --train text --base-dtype fp8
row "another \`--base-dtype\` on \`--resume\`" train_qwen3 --resume --run adapted --base-dtype fp8
row "every part of an adapter frozen" "${lora[@]}" --freeze '*lora_A*,*lora_B*'
row "another rank on \`--resume\`" train_qwen3 --resume --run adapted --lora-rank 8
mv base elsewhere
row "the model has moved since the adapter's run began" train_qwen3 --resume --run adapted --steps 8
mv elsewhere base
train_qwen3 --config qwen_tiny.json --seed 9 --export-hf stranger >/dev/null
row "another model for a resumed adapter" train_qwen3 --resume --run adapted --steps 8 --from stranger
row "... for one that shall write" train_qwen3 --from stranger --lora adapted --generate hi
row "averages of a run without \`--ema\`" train_qwen3 --from base --lora adapted --ema-weights 1 --generate hi
train_qwen3 --from base --export-hf pieces --shard-gb 4e-6 >/dev/null
for name in lost twisted escaped untold; do cp -r pieces $name; done
rm lost/model-00002-of-*
sed -i 's/"model.norm.weight": "model-[0-9]*/"model.norm.weight": "model-00001/' twisted/model.safetensors.index.json
sed -i 's#"model-00002-of#"/tmp/model-00002-of#' escaped/model.safetensors.index.json
sed -i 's/"weight_map"/"weights"/' untold/model.safetensors.index.json
for name in "lost:a shard of the base is missing" "twisted:an index that names the wrong shard" "escaped:an index with an absolute path" "untold:an index without weight_map"; do
    row "${name#*:}" train_qwen3 --from ${name%%:*} --lora adapter --generate hi
done
tune=("${lora[@]}" --chat-template chatml --seq-len 160)
row "a system prompt in place of a template" "${lora[@]}" --train good.jsonl --chat-template "You are kind."
row "an adapter that shall chat without a template" train_qwen3 --from base --lora adapter --chat
row "answers while training, but never" "${tune[@]}" --train good.jsonl --eval-generate good.jsonl --eval-every 0
row "answers to a file that is no JSON Lines" "${tune[@]}" --train good.jsonl --eval-generate text/a.txt
answer=(train_qwen3 --from base --chat-template chatml --generate-file good.jsonl --max-new-tokens 4 --generate-out answered.jsonl)
"${answer[@]}" --lora adapter >/dev/null || exit 1
row "a file of answers that an adapter has begun, without it" "${answer[@]}"
row "... with another seed" "${answer[@]}" --lora adapter --seed 7
as="train_qwen3 ... --generate-out answered.jsonl" row "two processes that write answers to one file" flock answered.jsonl "${answer[@]}" --lora adapter
row "one broken line among the prompts" train_qwen3 --from base --lora adapter --chat-template chatml --generate-file mixed.jsonl

heading "Options"
row "an option misspelt" train_gpt2 --model tiny --train text --batch_size 8
row "a number with letters" "${train[@]}" --batch-size 4x
row "not a number" "${train[@]}" --lr nan
row "a number out of range" "${train[@]}" --lr 20
row "an option without its value" "${train[@]}" --run --resume
row "a word too many" "${train[@]}" --steps 10 20
row "a context longer than the model's" "${train[@]}" --seq-len 2048
row "\`--batch-tokens\` that is no multiple" "${train[@]}" --batch-tokens 100
row "a warm-up longer than the run" "${train[@]}" --steps 10 --warmup 100
row "\`--early-stop\` without validation" "${train[@]}" --early-stop 3
row "\`--freeze\` that matches nothing" "${train[@]}" --freeze 'wte*'
row "\`--eval-only\` without data" train_gpt2 --from model --eval-only
row "a wrong line in a file of options" "${train[@]}" --args options.txt

heading "Runs and checkpoints"
row "the folder of another run" "${train[@]}" --run run
row "\`--resume\` of nothing" train_gpt2 --resume --run rum
row "\`--resume\` without \`--run\`" train_gpt2 --resume
row "an export of a run without \`--from\`" train_gpt2 --run run --export-hf out
mkfifo .pp
"${train[@]}" --steps 1000000 --save-every 2 --run held >.pp 2>/dev/null &
writer=$!
exec 3<.pp
until compgen -G 'held/step_*[0-9]/manifest.json' >/dev/null; do read -r -N 4096 -t 0.1 <&3; done
kill -STOP $writer
row "two processes write to one run" train_gpt2 --resume --run held
disown $writer
kill -9 $writer
exec 3<&-
cp -r text changing
"${train[@]}" --train changing --steps 2 --run changed >/dev/null
echo "one line more" >>changing/a.txt
row "the data has changed since" train_gpt2 --resume --run changed --steps 4
row "another model for a resumed run" train_gpt2 --resume --run run --model tiny
cp -r run hurt
printf x | dd of=hurt/step_000004/model.safetensors bs=1 seek=9000 conv=notrunc 2>/dev/null
row "the newest checkpoint is damaged (a warning)" train_gpt2 --resume --run hurt
rm -r hurt && cp -r run hurt
for step in 2 4; do truncate -s -1 hurt/step_00000$step/model.safetensors; done
lines=3 row "all checkpoints are damaged" train_gpt2 --resume --run hurt
row "a damaged checkpoint named to \`--from\`" train_gpt2 --from hurt/step_000004 --generate hi
row "an export over a folder of somebody else's" train_gpt2 --from model --export-hf text
mkdir download && cp tiny.json download/config.json
row "an export over a downloaded model" train_gpt2 --from model --export-hf download
row "an export over the model that is read" train_gpt2 --from model --export-hf model --export-dtype bf16

row "\`--export-bin\` into a folder that is not there" "${train[@]}" --export-bin models/gpt2.bin
{ head -c 1008 model.bin; head -c 16 /dev/zero; tail -c +1025 model.bin; } >gpt2_124M.bin
row "\`--export-bin\` over a downloaded model" train_gpt2 --from model --export-bin gpt2_124M.bin
row "an output over what the run reads" train_gpt2 --from model.bin --export-bin model.bin
row "an output over a file of the model it starts from" train_gpt2 --from model --export-bin model/model.safetensors
row "an output over a file of the data" "${train[@]}" --export-bin text/a.txt
row "an output among the run's files" train_gpt2 --from run --run run --export-bin run/metrics.jsonl
row "the model's own folder for the run" train_gpt2 --from model --train text --run model
row "\`--export-dtype\` without an export" "${train[@]}" --export-dtype bf16
row "an output among another run's files" train_gpt2 --from model --export-hf run/mine
row "two outputs of one name" train_gpt2 --from model --export-hf out --export-bin out

heading "Experts"
row "a preset in capitals" train_moe --model 6.9B --train text
row "a model of another trainer" train_moe --from model --train text
row "llm.c's file, which has no experts" train_moe --from model.bin --generate A
row "config.json of a Mistral without experts" train_moe --config mistral.json --train text
experts ',"sliding_window":4096' >window.json
row "config.json with a sliding window" train_moe --config window.json --train text
experts ',"rope_scaling":{"type":"linear","factor":4}' >scaled.json
row "config.json with another scaling of positions" train_moe --config scaled.json --train text
experts ',"num_experts_per_tok":8' | sed 's/,"num_experts_per_tok":2//' >eight.json
row "more experts for a token than a layer has" train_moe --config eight.json --train text
row "the weight of a loss that is switched off" "${moe[@]}" --balance none --aux-alpha 0.1
row "how fast biases move, without biases" "${moe[@]}" --bias-rate 0.01
row "\`--tied\` beside a config.json, which says it" "${moe[@]}" --tied 1
row "names of another model's tensors" "${moe[@]}" --freeze '*.mlp.*'
row "a text longer than the model was trained for" train_moe --from mixtral --train text --seq-len 96
row "a batch that fits in no memory" train_moe --model small --dry-run --batch-size 65536
experts "" | sed -E 's/("hidden_size":|"intermediate_size":)[0-9]*/\165536/g; s/("num_local_experts":)4/\1256/' >huge.json
lines=2 row "experts that fit in no memory" train_moe --config huge.json --dry-run
experts "" | sed 's/"num_experts_per_tok":2/"num_experts_per_tok":1/' >switch.json
train_moe --config switch.json --export-hf switch >/dev/null 2>&1 || exit 1
sed -i '/written_by/d' switch/config.json
row "another program's model with one expert a token (a warning)" train_moe --from switch --generate A --max-new-tokens 1
row "biases of routers for transformers (a warning)" train_moe --from mixtral --balance bias --export-hf biased

heading "Qwen, Mistral and Llama"
row "a preset misspelt" train_qwen3 --model qwen3-0.6 --train text
row "a model of another architecture" train_qwen3 --from mixtral --train text
qwen3 "" | sed 's/"model_type":"qwen3",//' >nameless.json
row "config.json without model_type" train_qwen3 --config nameless.json --train text
qwen3 ',"rope_scaling":{"rope_type":"yarn","factor":4.0}' >yarn.json
row "config.json with YaRN" train_qwen3 --config yarn.json --train text
qwen3 ',"rope_scaling":{"rope_type":"llama3","factor":8.0}' | sed 's/qwen3/llama/' >llama3.json
row "Llama 3.1's scaling of positions" train_qwen3 --config llama3.json --train text
qwen3 ',"quantization_config":{"quant_method":"awq","bits":4}' >awq.json
row "quantized weights" train_qwen3 --config awq.json --train text
qwen3 ',"layer_types":["full_attention","sliding_attention"],"sliding_window":8' >slides.json
row "layers that slide over a window that is off" train_qwen3 --config slides.json --train text
qwen3 ',"use_sliding_window":true,"sliding_window":8' >which.json
row "a window, but not in which layers" train_qwen3 --config which.json --train text
qwen3 ',"num_experts":4' | sed 's/qwen3/qwen3_moe/' >sparse.json
row "experts, but not how many a token takes" train_qwen3 --config sparse.json --train text
qwen3 "" | sed 's/"num_key_value_heads":1,//' >keys.json
row "config.json without its heads of keys" train_qwen3 --config keys.json --train text
cp -r qwen3 renamed && sed -i 's/"qwen3"/"qwen2"/' renamed/config.json
row "a Qwen3 folder as a Qwen2" train_qwen3 --from renamed --train text
cp -r qwen3 untied && sed -i 's/lm_head.weight/lm_head.wrong_/' untied/model.safetensors
row "an untied head that is not in the file" train_qwen3 --from untied --train text
cp -r qwen3 twice && sed -i 's/"tie_word_embeddings": false/"tie_word_embeddings": true/' twice/config.json
row "a head that config.json ties, but another matrix (a warning)" train_qwen3 --from twice --generate A --max-new-tokens 1
row "experts shared by ranks, of a model that has none" "${dense[@]}" --ep 2
row "matrices shared by ranks that were not started" "${dense[@]}" --tp 2
row "positions shared by ranks that were not started" "${dense[@]}" --cp 2
row "a balance loss without experts" "${dense[@]}" --aux-alpha 0.01
row "training in half the memory of floats" "${dense[@]}" --weights bf16
row "names of another model's tensors" "${dense[@]}" --freeze '*.experts.*'
row "\`--tied\` beside a config.json, which says it" "${dense[@]}" --tied 1
row "a text longer than the model was trained for" train_qwen3 --from qwen3 --train text --seq-len 96

heading "GLM-5"
row "a preset with a letter too many" train_glm5 --model glm5.2 --train text
sed 's/"full","shared"/"shared","full"/' chosen.json >first.json
row "a first layer that shares a choice" train_glm5 --config first.json --train text
sed 's/"full","shared"/"full"/' chosen.json >fewer.json
row "indexers of other layers than there are" train_glm5 --config fewer.json --train text
sed 's/"index_head_dim":8/"index_head_dim":2/' chosen.json >narrow.json
row "an indexer that is narrower than what turns" train_glm5 --config narrow.json --train text
sed 's/"rope_theta":10000/"rope_type":"yarn","rope_theta":10000,"factor":4/' chosen.json >stretched.json
row "config.json with YaRN, of GLM-5" train_glm5 --config stretched.json --train text
row "a warm-up of indexers that do not learn" "${glm[@]}" --indexer-alone
row "... with early stopping, where rows are so short that all is chosen" "${glm[@]}" --seq-len 4 --indexer dense --indexer-alone --val-fraction 0.1 --early-stop 2
row "an indexer that learns beside an adapter" train_glm5 --from glm5 --train text --seq-len 16 --lora-rank 2 --indexer kl
row "an adapter of an indexer" train_glm5 --from glm5 --train text --seq-len 16 --lora-rank 2 --lora-targets indexer.wk
row "a weight of the token after the next, of a model without that module" "${glm[@]}" --mtp-weight 0.3
row "... beside an adapter, where there would be none" train_glm5 --from glm5 --train text --seq-len 16 --lora-rank 2 --mtp-weight 0.3
sed 's/"sparse"/"dense"/' chosen.json >alike.json
row "a balance of experts where there are none" train_glm5 --config alike.json --train text --seq-balance 0.01
row "choices of another program, beside training" "${glm[@]}" --inject theirs.safetensors
row "more stages than layers with an indexer" launch -n 2 "${glm[@]}" --grad-accum 2 --pp 2
cp -r glm5 blind && sed -i 's/indexer.wk.weight/indexer.wx.weight/' blind/model.safetensors
row "a folder whose indexer has no key" train_glm5 --from blind --train text
sed 's/"full","shared"/"full","full"/' chosen.json >both.json && cp -r glm5 lacks && cp both.json lacks/config.json
row "config.json of GLM-5 with an indexer where the files have none" train_glm5 --from lacks --train text

heading "The machine"
row "a path to \`--run\` below a file" "${train[@]}" --steps 1 --run text/a.txt/run
mkdir locked && chmod a-w locked
nobody=()
if [ "$(id -u)" = 0 ]; then
    chmod a+rx .
    mkdir .bin && cp "$trainer" .bin
    nobody=(setpriv --reuid 65534 --regid 65534 --clear-groups .bin/train_gpt2)
fi
as="train_gpt2 ... --run locked/run" row "a folder without the permission to write" "${nobody[@]:-train_gpt2}" "${train[@]:1}" --steps 1 --run locked/run
full=0  # the last call at which a full disk hits the model's file
for ((call = 200; call > 0 && full == 0; call--)); do
    FAULT=enospc:$call train_gpt2_faults "${train[@]:1}" --steps 1 --run disk >.out 2>.err
    if grep -q 'model.safetensors: cannot be written' .err; then full=$call; fi
    rm -rf disk
done
as="train_gpt2 ... --run disk" row "the disk is full while a checkpoint is written" env FAULT=enospc:$full train_gpt2_faults "${train[@]:1}" --steps 1 --run disk
as="ulimit -f 20; train_gpt2 ... --run limited" row "a limit on the size of files" bash -c 'ulimit -f 20; exec "$@"' - "${train[@]}" --steps 1 --run limited
lines=2 row "a model too large for the memory" train_gpt2 --model gpt3:c12288 --dry-run
as="train_gpt2 ... \\| head -n 1" lines=0 row "a closed pipe" bash -c '"$@" | head -n 1 >/dev/null; exit ${PIPESTATUS[0]}' - "${train[@]}" --steps 500 --run piped
as="train_gpt2 --from model --generate hi >/dev/full" row "a full disk behind standard output" bash -c 'exec "$@" >/dev/full' - train_gpt2 --from model --generate hi

heading "Numbers"
row "a learning rate that is far too high" "${train[@]}" --steps 200 --lr 10 --weight-decay 10 --clip 0 --max-skips 2 --run burnt
head -c 1100 model.bin >nan.bin && le 4 $((0x7fc00000)) >>nan.bin && tail -c +1105 model.bin >>nan.bin
row "NaN in a model" train_gpt2 --from nan.bin --train text --steps 9 --max-skips 1 --run nan

heading "Ranks"
qwen3 ',"num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":8' | sed 's/"qwen3"/"qwen3_moe"/' >experts3.json
port=$((20000 + RANDOM % 12000))
row "mpirun, but a build without MPI" env OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 "${train[@]}"
row "a rank above the number of ranks" "${train[@]}" --rank 4/4@127.0.0.1:29500
row "no port" "${train[@]}" --rank 0/2@127.0.0.1
row "rank 0 was not started" "${train[@]}" --rank 1/2@127.0.0.1:$port --init-timeout 1
row "rank 0 was not started, and its file does not come" "${train[@]}" --rank 1/2@./meet --init-timeout 1
row "a file to meet by that is something else" "${train[@]}" --rank 0/2@text/a.txt
row "rank 1 was not started" "${train[@]}" --rank 0/2@127.0.0.1:$port --init-timeout 1
"${train[@]}" --rank 1/2@127.0.0.1:$port --lr 0.25 >/dev/null 2>&1 &
row "another option on one rank" "${train[@]}" --rank 0/2@127.0.0.1:$port
wait
two=("${train[@]}" --batch-tokens 128 --steps 100000)
as="launch -n 2 train_gpt2 --generate hi" row "several ranks for what one does" launch -n 2 train_gpt2 --from model --generate hi
row "a plan that ranks are started for" launch -n 3 "${dense[@]}" --plan 2
row "fewer ranks than \`--tp\` and \`--cp\` take" launch -n 2 "${dense[@]}" --tp 2 --cp 2
row "heads that \`--tp\` does not divide" launch -n 3 "${dense[@]}" --tp 3
row "\`--ep\` that is no power of two" launch -n 6 train_qwen3 --config experts3.json --train text --seq-len 16 --ep 3
row "\`--graph\` in a program for CPUs" "${dense[@]}" --graph 1
cat >.kill_one <<'SCRIPT'
launch -n 2 "$@" >.ranks 2>.ranks_err &
until grep -qs '^step 5/' .ranks; do sleep 0.02; done
kill -9 "$(pgrep -P $! | tail -n 1)"
wait $!
status=$?
grep '^train_gpt2' .ranks_err >&2
exit $status
SCRIPT
as="launch -n 2 train_gpt2 ..." row "a rank is killed" bash .kill_one "${two[@]}" --run several
row "\`launch\` without a program" launch -n 2
as="launch -n 2 --restarts 3 train_gpt2 ..." row "restarts of a run without a name" launch -n 2 --restarts 3 train_gpt2 "${train[@]:1}"
row "a host that is named twice" launch --hosts node1,node2,node1 -n 4 train_gpt2
row "a command in place of a host" launch --hosts "-oProxyCommand=id" train_gpt2
row "a file of hosts that is not there" launch --hosts ./machines train_gpt2

if [ $writing = 1 ]; then
    cat - "$table" >"$root/doc/mistakes.md" <<'PAGE'
# Mistakes, and what they are told

What goes wrong most often when a model is trained, each made for real: the command, the line it prints on stderr after
the program's name, and the exit status (2: what you gave is wrong, and nothing was changed; 1: the run could not go on; 0: it
did). `...` stands for `--config tiny.json --train text --seq-len 16`, of train_moe for the same with `experts.json`, of train_glm5
with `chosen.json`, of train_qwen3 with `dense.json`, with `--lora-rank 4` for `--from base --train text --seq-len 16`, N for numbers that
differ from machine to machine. [dev/mistakes.sh](../dev/mistakes.sh) writes this page and, with every commit, makes all of them again.
PAGE
else
    check "doc/mistakes.md has these lines and no other" cmp <(grep '^[|#] *' "$table") <(grep '^[|#] *' "$root/doc/mistakes.md" | tail -n +2)
fi
finish
