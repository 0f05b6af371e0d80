#!/usr/bin/env bash
# The Makefile, in a repository of its own with one small trainer: of which commit a program says it is, and what make
# builds anew.
. "$(dirname "$0")/promises.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/dev"
cp Makefile "$work/"
cp dev/cuda_flags.sh "$work/dev/"
cd "$work" || exit 1
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b GIT_CONFIG_GLOBAL=/dev/null
export GIT_CEILING_DIRECTORIES=${work%/*}
printf '#include <stdio.h>\nint main(void) { return puts(COMMIT) < 0; }\n' >train_small.c
printf 'int main(void) { return 0; }\n' >test_small.c
printf '%s\n' build before out err >.gitignore
program=build/small/train_small

# `new` is what make has built anew of trainer and test, `says` the commit that the trainer names
made() {
    touch before && sleep 0.01
    make -s BUILD=build/small LIBS= $program build/small/test_small "$@" >out 2>err
    new=$(cd build/small && find . -type f -perm -u+x -newer ../../before -printf '%f ' | tr ' ' '\n' | sort | xargs)
    says=$(./$program)
}

made
check "no repository: commit unknown" test "$says" = unknown
git init -q . && git add . && git commit -qm first
first=$(git rev-parse --short HEAD)
made
check "a clean tree: the commit; only the trainer is built anew" test "$says: $new" = "$first: train_small"
made
check "nothing has changed: nothing is built" test "$says: $new" = "$first: "
echo "// a word" >>test_small.c
made
check "a changed file that git knows: -dirty" test "$says" = "$first-dirty"
made
check "still dirty: nothing is built" test "$says: $new" = "$first-dirty: "
git checkout -q test_small.c && echo word >notes
made
check "a file that git does not know makes no tree dirty" test "$says" = "$first"
git tag -a -m release v1 && git commit -q --allow-empty -m second && git tag -a -m release v2
made
second=$(git rev-parse --short HEAD)
check "another commit, with a tag: its hash, and the trainer is built anew" test "$says: $new" = "$second: train_small"

# the compiler removes the list of headers when it fails: the program of before must go as well
printf '#include "small.h"\nint main(void) { return SMALL; }\n' >test_small.c
echo '#define SMALL 0' >small.h && made
echo '#error unfinished' >small.h && made
check "a header that does not compile: no program is left" test ! -e build/small/test_small
echo '#define SMALL 0' >small.h && made
check "and mended, it is built anew" test "$new" = test_small

rm -f build/libraries build/small/test_small
make -s BUILD=build/small LIBS= HEADERS=nowhere build/small/test_small >out 2>err
check "a library that is not there: one line names dev/setup.sh" \
    test "$? $(head -n 1 err)" = "2 make: nowhere.h is not on this machine: run dev/setup.sh, which installs what is missing, then make again" -a ! -e build/small/test_small
make -s BUILD=build/small LIBS= build/small/test_small >out 2>err
check "... and once it is there, all is built" test $? = 0 -a -e build/small/test_small -a ! -s err

cp train_small.c train_small.cu
flags_for() { make -n CUDA_ARCH="$1" "build/nvcc-$1-bf16/train_smallcu" 2>/dev/null | grep -oE -- '-(arch|gencode)=[a-z0-9_,=]+'; }
check "sm_90: -arch" test "$(flags_for sm_90)" = -arch=sm_90
check "sm_90a: the instructions of sm_90a need -gencode" test "$(flags_for sm_90a)" = -gencode=arch=compute_90a,code=sm_90a

rm train_small.cu && made && mv train_small.c train_small.cu && echo >>train_small.cu && made
check "train_NAME.c that has become train_NAME.cu is built from there" test "$new $(wc -c <err)" = "train_small 0"

mkdir -p runs/other && touch runs/other/metrics.jsonl && make -s plot >out 2>err
check "make plot without RUN and without runs/hello: names the runs there are" \
    test "$(<out)" = "plot: there is no runs/hello: choose a run, RUN=runs/other"
finish
