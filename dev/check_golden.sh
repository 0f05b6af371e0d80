#!/usr/bin/env bash
# The golden files in dev/golden are, byte for byte, what the NumPy references write today.
#     dev/check_golden.sh              all of them
#     dev/check_golden.sh names        whose there are
#     dev/check_golden.sh gpt2 moe     those of dev/ref/gpt2.py and dev/ref/moe.py
set -eu
cd "$(dirname "$0")/.."
python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
references=(gpt2 mamba_hpn moe qwen gated_delta qwen36 qwen36_vision deepseek_v4 glm5 lora muon fp8_rows rows)
if [ "${1-}" = names ]; then echo "${references[@]}"; exit; fi
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
if ! $python -c 'import numpy' 2>/dev/null; then
    echo "0 passed, 0 failed, 1 skipped"  # no NumPy: dev/setup.sh names the package
    exit 0
fi
if [ $# -gt 0 ]; then references=("$@"); fi
for reference in "${references[@]}"; do $python dev/ref/$reference.py --out "$new" >/dev/null; done
passed=0
failed=0
for file in dev/golden/*.safetensors; do
    if [ $# -gt 0 ] && [ ! -e "$new/$(basename "$file")" ]; then continue; fi
    if cmp "$file" "$new/$(basename "$file")"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
