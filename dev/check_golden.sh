#!/usr/bin/env bash
# The golden files in dev/golden are, byte for byte, what the NumPy references write today.
set -eu
cd "$(dirname "$0")/.."
python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
if ! $python -c 'import numpy' 2>/dev/null; then
    echo "0 passed, 0 failed, 1 skipped"  # no NumPy: dev/setup.sh names the package
    exit 0
fi
$python dev/ref/gpt2.py --out "$new" >/dev/null
$python dev/ref/mamba_hpn.py --out "$new" >/dev/null
$python dev/ref/moe.py --out "$new" >/dev/null
$python dev/ref/qwen.py --out "$new" >/dev/null
$python dev/ref/gated_delta.py --out "$new" >/dev/null
$python dev/ref/qwen36.py --out "$new" >/dev/null
$python dev/ref/qwen36_vision.py --out "$new" >/dev/null
$python dev/ref/deepseek_v4.py --out "$new" >/dev/null
$python dev/ref/glm5.py --out "$new" >/dev/null
$python dev/ref/lora.py --out "$new" >/dev/null
$python dev/ref/muon.py --out "$new" >/dev/null
$python dev/ref/fp8_rows.py --out "$new" >/dev/null
$python dev/ref/rows.py --out "$new" >/dev/null
passed=0
failed=0
for file in dev/golden/*.safetensors; do
    if cmp "$file" "$new/$(basename "$file")"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
