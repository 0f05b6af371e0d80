#!/usr/bin/env bash
# Where CUDA is on this machine. The compiler is asked, by compiling and linking a few lines, so the answer holds for a
# toolkit, for Python wheels (dev/setup.sh cuda) and for half of each.
#     dev/cuda_flags.sh nvcc       the compiler: $CUDA_HOME/bin/nvcc, or nvcc on the PATH, or /usr/local/cuda/bin/nvcc
#     dev/cuda_flags.sh flags      what nvcc must be given to find cuBLASLt, NCCL, jansson, xxHash, PCRE2, libpng, libjpeg and
#                                  zlib, and to link them
#     dev/cuda_flags.sh missing    those of them that are nowhere; nothing when all are found
#     dev/cuda_flags.sh arch       sm_90 for an H100 or H200: that of this machine's GPU; sm_90 where there is none
# A library is looked for where nvcc looks by itself, then in the wheels of .venv's Python and of python3, then in .gpu/, which
# `dev/gpu_check.sh pack` fills for a machine without a network. Status 1: something is not there, named on stderr.
set -u
cd "$(dirname "$0")/.." || exit 1

find_nvcc() {
    local candidate
    for candidate in ${CUDA_HOME:+"$CUDA_HOME/bin/nvcc"} "$(command -v nvcc)" /usr/local/cuda/bin/nvcc; do
        if [ -x "$candidate" ]; then echo "$candidate"; return; fi
    done
    echo "cuda_flags.sh: expected nvcc of CUDA 12 or newer in \$CUDA_HOME/bin, on the PATH or in /usr/local/cuda/bin, found none" >&2
    return 1
}

# folders that hold include/ and lib/, one per line; wheels keep theirs in site-packages/nvidia/*
prefixes() {
    local python
    for python in "$PWD/.venv/bin/python" python3; do
        "$python" -c 'import glob, nvidia; print(*(d for p in nvidia.__path__ for d in sorted(glob.glob(p + "/*"))), sep="\n")' 2>/dev/null
    done
    [ ! -d .gpu ] || echo "$PWD/.gpu"
}

# links CODE FLAGS...: does this expression compile and link?
links() {
    local code=$1
    shift
    printf '%s\n' "$code" >"$work/probe.cpp"
    "$nvcc" -x c++ -cudart none "$work/probe.cpp" -o "$work/probe" "$@" >/dev/null 2>&1
}

# of library NAME whose HEADER and CODE a program uses; wheels have no libNAME.so, only libNAME.so.VERSION
flags_of() {
    local name=$1 code="#include <$2>"$'\n'"int main() { return (int)(size_t)$3; }" prefix file flags
    [ "$name" != pcre2-8 ] || code=$'#define PCRE2_CODE_UNIT_WIDTH 8\n'$code
    [ "$name" != jpeg ] || code=$'#include <stdio.h>\n'$code
    if links "$code" "-l$name"; then echo "-l$name"; return; fi
    while read -r prefix; do
        [ -e "$prefix/include/$2" ] || continue
        for file in "$prefix"/lib*/lib"$name".{a,so,so.*}; do
            [ -e "$file" ] || continue
            flags="-isystem $prefix/include -L${file%/*} -l:${file##*/}"
            [[ $file == *.a ]] || flags+=" -Xlinker -rpath -Xlinker ${file%/*}"
            # shellcheck disable=SC2086
            if links "$code" $flags "-L${file%/*}" -lz; then echo "$flags"; return; fi  # libpng.a stands on zlib
        done
    done < <(prefixes)
    return 1
}

# all of them: flags on stdout, names of what is missing in `missing`
flags_of_all() {
    local found
    while read -r name header code; do
        if found=$(flags_of "$name" "$header" "$code"); then echo "$found"; else missing+=" $name"; fi
    done <<'LIBRARIES'
cublasLt cublasLt.h &cublasLtCreate
nccl nccl.h &ncclGetUniqueId
jansson jansson.h &json_loads
xxhash xxhash.h &XXH3_64bits
pcre2-8 pcre2.h &pcre2_compile
png png.h &png_create_read_struct
jpeg jpeglib.h &jpeg_read_header
z zlib.h &inflate
LIBRARIES
}

missing=""
case ${1-} in
    nvcc) find_nvcc ;;
    arch)
        capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -dc 0-9)
        echo "sm_${capability:-90}"
        ;;
    flags | missing)
        nvcc=$(find_nvcc) || exit 1
        work=$(mktemp -d)
        trap 'rm -rf "$work"' EXIT
        flags_of_all >"$work/flags"
        if [ "$1" = flags ]; then
            # without a .venv or .gpu, headers of our own compiler first: wheels may bring those of another CUDA
            cat "$work/flags"
            [ -z "$missing" ] || { echo "cuda_flags.sh: not found:$missing; run: make setup-cuda" >&2; exit 1; }
        else
            echo "${missing# }"
        fi
        ;;
    *) echo "cuda_flags.sh: expected nvcc, flags, missing or arch, found \"${1-}\"" >&2; exit 2 ;;
esac
