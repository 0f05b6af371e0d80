#!/usr/bin/env bash
# Installs what is missing, and says so: one line per thing done. Nothing is missing: one line, in well under a second.
#     dev/setup.sh           to build, run, test: C compiler, make, jansson, xxHash, PCRE2, zlib, libpng, libjpeg; NumPy and
#                            matplotlib in .venv
#     dev/setup.sh ci        also clang, g++, libomp, valgrind, Open MPI and, in .venv, tokenizers and scikit-learn: what else .ci/run
#                            uses
#     dev/setup.sh examples  as the first, and in .venv scikit-learn, which brings the images of `make run-digits`
#     dev/setup.sh cuda      as the first, and in .venv cuBLAS and NCCL where nvcc finds none: `make cuda` (1 GB; nvcc itself
#                            comes from NVIDIA: https://developer.nvidia.com/cuda-downloads). `ci` has them too where nvcc is
#     dev/setup.sh checks    also MPFR, OpenBLAS and, in .venv, PyTorch and transformers: dev/ref/check_hf.py, dev/bench
#                            (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu: PyTorch without its GBs of CUDA)
# Debian packages come by apt-get, as root or through a sudo that asks no password; otherwise the command is named. Python
# packages only draw plots, write references and measure, so the rest goes on without them.
# Status: 0 everything is there that the C programs need (for `examples`, `cuda` and `checks`: everything), 1 something of it is
# missing.
set -u
cd "$(dirname "$0")/.." || exit 1
wanted=${1-base}
case $wanted in
    base | ci | examples | cuda | checks) ;;
    *) echo "setup.sh: expected nothing, ci, examples, cuda or checks, found \"$wanted\"" >&2; exit 2 ;;
esac
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# ---- what is missing: asked of the compiler and of Python, not of the package manager, so it holds on any system ----

# compiles COMPILER CODE FLAGS...: can it build this program?
compiles() {
    local compiler=$1 code=$2
    shift 2
    printf '%s\nint main(void) { return 0; }\n' "$code" | "$compiler" -x c - -o /dev/null "$@" >/dev/null 2>&1
}

library() { compiles cc "$1" "$2"; }  # library CODE -lNAME

missing_packages() {
    if ! compiles cc '#include <stdio.h>'; then echo gcc libc6-dev; fi
    command -v make >/dev/null || echo make
    if ! compiles cc $'#include <jansson.h>\n#include <xxhash.h>\n#include <zlib.h>\n#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>' \
        -ljansson -lxxhash -lz -lpcre2-8; then
        library '#include <jansson.h>' -ljansson || echo libjansson-dev
        library '#include <xxhash.h>' -lxxhash || echo libxxhash-dev
        library '#include <zlib.h>' -lz || echo zlib1g-dev
        library $'#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>' -lpcre2-8 || echo libpcre2-dev
    fi
    if ! compiles cc $'#include <png.h>\n#include <stdio.h>\n#include <jpeglib.h>' -lpng -ljpeg; then
        library '#include <png.h>' -lpng || echo libpng-dev
        library $'#include <stdio.h>\n#include <jpeglib.h>' -ljpeg || echo libjpeg-dev  # on Debian libjpeg62-turbo-dev, on Ubuntu its own
    fi
    if [ "$wanted" = base ] || [ "$wanted" = examples ]; then return; fi
    command -v g++ >/dev/null || echo g++
    [ "$wanted" != cuda ] || return
    command -v clang >/dev/null || echo clang
    compiles clang '#include <omp.h>' -fopenmp || echo libomp-dev
    command -v valgrind >/dev/null || echo valgrind
    command -v mpicc >/dev/null || echo libopenmpi-dev openmpi-bin
    [ "$wanted" = checks ] || return
    library '#include <mpfr.h>' -lmpfr || echo libmpfr-dev
    library '#include <cblas.h>' -lopenblas || echo libopenblas-dev
}

python_packages="numpy matplotlib"
if [ "$wanted" = examples ] || [ "$wanted" = ci ]; then python_packages="$python_packages scikit-learn"; fi
if [ "$wanted" = ci ] || [ "$wanted" = checks ]; then python_packages="$python_packages tokenizers==0.23.3"; fi  # ours has its Unicode tables
if [ "$wanted" = checks ]; then python_packages="$python_packages torch==2.13.0 transformers safetensors pillow mambapy scikit-learn"; fi

# of $python_packages; all of them without a .venv
missing_python() {
    # shellcheck disable=SC2086
    .venv/bin/python - $python_packages 2>/dev/null <<'PYTHON' || echo "$python_packages"
import sys
from importlib.metadata import PackageNotFoundError, version
for wish in sys.argv[1:]:
    name, _, wanted = wish.partition("==")
    try:
        found = version(name).split("+")[0]  # 2.13.0+cpu is 2.13.0
    except PackageNotFoundError:
        found = None
    if found is None or wanted not in ("", found):
        print(wish, end=" ")
PYTHON
}

# wheels of the CUDA libraries that nvcc does not find; they hold headers as well
missing_wheels() {
    local name
    [ "$wanted" = cuda ] || [ "$wanted" = ci ] || return
    for name in $(dev/cuda_flags.sh missing 2>/dev/null); do
        case $name in
            cublasLt) echo "nvidia-cublas==13.1.0.3" ;;  # for which llmc/ops/gemm_algorithms.h has rows; goes with CUDA 13.0 and later
            nccl) echo nvidia-nccl-cu13 ;;
        esac
    done
}

# ---- installing ----

# does COMMAND..., silent unless it fails: then the last line it wrote is shown
quietly() {
    "$@" >"$log" 2>&1 && return
    echo "setup: failed: $(grep . "$log" | tail -n 1)"
    return 1
}

apt_get() {
    local root=()
    [ "$(id -u)" = 0 ] || root=(sudo -n)
    quietly "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -q -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=120 \
        -o Acquire::Retries=1 -o Acquire::http::Timeout=20 "$@"
}

# all at once; failing that with a fresh package list; failing that one by one, so that a single bad name costs only itself
install_packages() {
    if ! command -v apt-get >/dev/null; then
        echo "setup: no apt-get on this system; install what Debian calls: $*"
    elif [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
        echo "setup: needs root; run: sudo apt-get install $*"
    else
        echo "setup: apt-get install $*"
        apt_get install "$@" && return
        echo "setup: apt-get update, then again"
        apt_get update --error-on=any || return
        apt_get install "$@" || for package; do apt_get install "$package"; done
    fi
}

venv_works() { .venv/bin/python -c 'import pip' 2>/dev/null; }
venv_possible() { venv_works || python3 -c 'import ensurepip, venv' 2>/dev/null; }

install_python() {
    if ! venv_works; then
        echo "setup: python3 -m venv .venv"
        quietly python3 -m venv --clear .venv || return
    fi
    echo "setup: .venv/bin/pip install $*"
    quietly .venv/bin/python -m pip install --disable-pip-version-check --retries 1 "$@"
}

# shellcheck disable=SC2086  # from here on: lists of words
packages=$(missing_packages)
python=$(missing_python; missing_wheels)
if [ "$wanted" = cuda ]; then dev/cuda_flags.sh nvcc >/dev/null || exit 1; fi
if [ -z "$packages$python" ]; then
    echo "setup: nothing to do, everything for \"$wanted\" is there"
    exit 0
fi
venv_package=$([ -z "$python" ] || venv_possible || echo python3-venv)
[ -z "$packages$venv_package" ] || install_packages $packages $venv_package
if [ -n "$python" ] && venv_possible; then install_python $python; fi

packages=$(missing_packages)
python=$(missing_python; missing_wheels)
if [ -z "$packages$python" ]; then echo "setup: done"; exit 0; fi
[ -z "$packages" ] || echo "setup: still missing, packages:" $packages
[ -z "$python" ] || echo "setup: still missing in .venv:" $python
case $wanted in
    examples | cuda | checks) exit 1 ;;
    *) [ -z "$packages" ] ;;
esac
