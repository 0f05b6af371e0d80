#!/bin/bash
# Tests of the tests: breaks a copy of the tree in one place at a time, as a careless optimiser might, and requires that
# a test turns red: status 1, or a signal. "passed" is a mutation that was caught, or a test that is green
# before any. A mutation that no longer finds its place or its promise, or whose result does not compile, fails: rewrite
# it with the code it speaks of.
#     dev/mutate.sh          all
#     dev/mutate.sh softmax  only those whose description contains "softmax"
#     dev/mutate.sh --places  in seconds: nothing is compiled, "passed" is a mutation that finds its place
#     dev/mutate.sh --sixth N  those whose number leaves N, 0 to 5, when divided by 6
# About 18 minutes of one core: each mutation compiles its test.
set -u
cd "$(dirname "$0")/.." || exit 1
places=0 sixth=-1 only=
while [ $# -gt 0 ]; do
    case "$1 ${2-}" in
        "--places "*) places=1 ;;
        "--sixth "[0-5]) sixth=$2 && shift ;;
        --*) echo "mutate.sh: $1: expected --places, --sixth N with N 0 to 5, or words of a description" >&2 && exit 2 ;;
        *) only=$1 ;;
    esac
    shift
done
# -O0 compiles ten times as fast as -O3, and the few promises that a mutation is to break are soon run
flags="-std=gnu11 -D_GNU_SOURCE -O0 -march=native -fno-math-errno -fno-trapping-math -fopenmp"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_WAIT_POLICY=passive  # seven threads on few cores must not spin
n=0
n_read=0
declare -A tests=()  # that some mutation must turn red
declare -A kernel_tests=()  # the same of kernels: test and filter
kernels=0  # 1: the mutation is one of kernels, which dev/simt runs
simt_flags="-std=gnu++17 -D_GNU_SOURCE -O0 -march=native -fno-math-errno -fno-trapping-math -ffp-contract=off -fopenmp
    -x c++ -w -include cuda_runtime.h -D__CUDACC__ -DSIMT -Idev/simt/include"

build() {  # folder, test, flags
    if [ $kernels = 1 ]; then
        (cd "$1" && "$OLDPWD/dev/simt/rewrite.py" src "$2.c" llmc/*/*.h) 2> "$1/errors" &&
            g++ $simt_flags "-I$1/src" "$1/src/$2.c" -o "$1/$2" -ljansson -lxxhash -lpcre2-8 -lz -lm 2> "$1/errors" &&
            return
        echo "does not compile: $(grep -m 1 error "$1/errors")"
        return 1
    fi
    ${CC:-gcc} $3 "$1/$2.c" -o "$1/$2" -lpng -ljpeg -ljansson -lxxhash -lpcre2-8 -lz -lm 2> "$1/errors" && return
    echo "does not compile: $(grep -m 1 error "$1/errors")"
    return 1
}

# run the promises that match; 0: red, as it must be
turns_red() {  # folder, test, filter, flags
    local status
    build "$1" "$2" "$4" || return
    timeout 300 "$1/$2" "$3" > "$1/output" 2>&1
    status=$?
    if [ $status = 1 ] || [ $status -gt 128 ]; then return; fi
    # 2: no promise has the filter in its name; 124: it hung, or the machine is too busy
    echo "survived $2 \"$3\", status $status: $(tail -n 1 "$1/output")"
    return 1
}

# a test that is red anyway would catch everything: that of `make test`, where it is built, is asked
is_green() {  # program
    if ! timeout 120 "$1" > "$work/${1##*/}.output" 2>&1; then tail -1 "$work/${1##*/}.output"; return 1; fi
}

# the same of kernels, of what mutations ask for
kernels_are_green() {  # folder, test, filter
    build "$1" "$2" "" || return
    if ! timeout 300 "$1/$2" "$3" > "$1/output" 2>&1; then tail -1 "$1/output"; return 1; fi
}

# run "$@" (which explains a failure on stdout) beside at most one job per core, and print its verdict
verdict() {  # description, command...
    local description=$1 reason
    shift
    if reason=$("$@"); then
        echo "ok    $description"
    else
        echo "FAIL  $description: $reason"
        touch "$work/failed.$n"
    fi
}

start() {  # description, command...
    n=$((n + 1))
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
    verdict "$@" &
}

# replaces what a pattern matches; it must match exactly once, in the file or in one of its functions
edit() {  # file, function or "", pattern, replacement
    local lines="" pattern=${3// /[[:space:]]*} found
    if [ -n "$2" ]; then lines="/^[a-zA-Z_].*[ *]$2\\(/,/^[}]/"; fi
    found=$(sed -nE "${lines}p" "$1" | grep -oE -- "$pattern" | wc -l)
    if [ "$found" != 1 ]; then echo "${1#"$work"/*/}${2:+, $2}: $found matches of: $3"; return 1; fi
    sed -i -E "$lines"$'s\x01'"$pattern"$'\x01'"$4"$'\x01' "$1"
}

change() {  # folder, test, filter, file[:function], pattern, replacement, pattern, replacement, ...
    local folder=$1 test=$2 filter=$3 function="" file
    [[ $4 != *:* ]] || function=${4#*:}
    mkdir -p "$folder/llmc"
    cp -r llmc/. "$folder/llmc/" && cp "$test.c" train_*.c* "$folder/"
    file=$(echo "$folder"/llmc/*/"${4%%:*}")
    [ -e "$file" ] || file=$folder/${4%%:*}
    shift 4
    while [ $# -gt 0 ]; do
        edit "$file" "$function" "$1" "$2" || return
        shift 2
    done
    [ $places = 0 ] || return 0
    turns_red "$folder" "$test" "$filter" "$flags -ffp-contract=off"
}

# Patterns are extended regular expressions within one line; a blank in them stands for any blanks, or none. A pattern
# that stands in several functions is sought in the one named behind the file: attention.h:attention_softmax_.
#     mutation DESCRIPTION TEST FILTER FILE[:FUNCTION] PATTERN REPLACEMENT [PATTERN REPLACEMENT ...]
mutation() {
    local description=$1
    shift
    [[ $description == *"$only"* ]] || return
    n_read=$((n_read + 1))
    [ "$sixth" = -1 ] || [ $((n_read % 6)) = "$sixth" ] || return
    if [ $kernels = 1 ]; then kernel_tests["$1 $2"]=1; else tests[$1]=1; fi
    start "$description" change "$work/$((n + 1))" "$@"
}

# The same of kernels in bf16
kernel_mutation() { kernels=1 mutation "$@"; }

# ---- matrix products: where a chain begins, its order, its rims ----
mutation "gemm: each k block starts at 0 and is added later" test_matmul gemm gemm.h:gemm_vectors_ \
    'sum\[m\]\[v\] = v_load\(start .*VLANES\);' 'sum[m][v] = v_fill(0.0f);' \
    'v_store\(o, sum\[m\]\[v\]\);' 'v_store(o, v_load(o) + sum[m][v]);'
mutation "gemm: a later k block of a panel forgets the earlier ones" test_matmul "gemm blocks" gemm.h \
    'k > 0 \? out : start, k > 0 \? out_stride : start_stride, a_packed' 'start, start_stride, a_packed'
mutation "gemm: k descends" test_matmul "gemm shapes" gemm.h:gemm_vectors_ \
    'vfloat bk' 'const int last = 2 * (left + k - gemm_min_(left, GEMM_PREFETCH_K)) - K - 1; vfloat bk' \
    'v_load\(b \+ v' 'v_load(b + last * TILE_N + v' 'v_fill\(a\[m\]\)' 'v_fill(a[m + last * TILE_M])'
mutation "gemm: a rim tile leaves out its last vector" test_matmul "gemm shapes" gemm.h:gemm_tile_ \
    'N > VLANES\)' 'N > 2 * VLANES)'
mutation "gemm: a product rounds before it is added" test_matmul rounding gemm.h:gemm_vectors_ \
    'v_madd\(am, bk\[v\], sum\[m\]\[v\]\)' 'am * bk[v] + sum[m][v]'
mutation "thin gemm: terms beyond the first visit begin anew" test_matmul "gemm thin" thin_gemm.h:thin_tile_ \
    'start = k > 0 \? out : p->start' 'start = p->start' 'start_stride = k > 0 \? p->out_stride : p->start' \
    'start_stride = p->start'
mutation "thin gemm: a product rounds before it is added" test_matmul "gemm thin" thin_gemm.h:thin_tile_rows_ \
    'v_madd\(v_fill\(at\[m\]\[k\]\), bk, sum\[m\]\)' 'v_fill(at[m][k]) * bk + sum[m]'
mutation "madd: rounds twice" test_matmul "gemm shapes" madd.h 'return fmaf\(a, b, c\);' 'return a * b + c;'
mutation "gemm: a rim tile is copied out whole" test_matmul "gemm shapes" gemm.h \
    'memcpy\(out \+ m \* out_stride, tile \+ m \* TILE_N, sizeof\(float\) \* N\)' \
    'memcpy(out + m * out_stride, tile + m * TILE_N, sizeof(float) * (N + 1))'
mutation "vec: v_fill loses the sign of zero" test_matmul "signed zero" vec.h 'return x - zero;' 'return x + zero;'
mutation "matmul: dweight is added to" test_matmul backward matmul.h 'gemm\(dweight, C, add \? dweight : NULL' \
    'gemm(dweight, C, dweight'
mutation "matmul: dbias takes rows descending" test_matmul backward matmul.h \
    'x \+ n \* OC \+ first' 'x + (N - 1 - n) * OC + first'
mutation "matmul: the plain dinp reads the weight turned" test_matmul "backward differences" \
    matmul.h:matmul_backward_input_ref 'weight\[oc \* C \+ c\]' 'weight[c * OC + oc]'

# ---- hyper-connections ----
mutation "hyper: comb is contracted over its second index" test_hyper_connections obvious \
    hyper_connections.h:hyper_expand_ 'comb\[j \* hc \+ k\]' 'comb[k * hc + j]'
mutation "hyper: Sinkhorn begins with rows" test_hyper_connections sinkhorn hyper_connections.h:hyper_sinkhorn_ \
    'step % 2, hc' '1 - step % 2, hc'
mutation "hyper: the first step of Sinkhorn has no gradient" test_hyper_connections "site backward" \
    hyper_connections.h:hyper_sinkhorn_backward_ 'step >= 0' 'step > 0'
mutation "hyper: r does not depend on the streams" test_hyper_connections "site backward" \
    hyper_connections.h:hyper_dx_end_ ' - hyper_load_\(row->X \+ i, n - i\) \* row->t' ''
mutation "hyper: dfn begins anew in each block of positions" test_hyper_connections "site backward" \
    hyper_connections.h:hyper_dfn_panel_ 't == 0, HYPER_PIECE' '1, HYPER_PIECE'
mutation "hyper: r takes the epsilon of Sinkhorn" test_hyper_connections "site forward" \
    hyper_connections.h:hyper_mix_ 'eps_n' 'eps_h'
mutation "hyper: the plain loop mixes by the transpose" test_hyper_connections "expand forward double" \
    hyper_connections.h:hyper_expand_forward_ref 'comb\[\(t \* hc \+ j\) \* hc \+ k\]' 'comb[(t * hc + k) * hc + j]'

# ---- a base in fp8 ----
mutation "fp8: ties go away from zero" test_fp8 nearest fp8.h:fp8_nearest '\(bits >> 20 & 1\)' '1'
mutation "fp8: below the smallest normal number mantissas have all 4 digits" test_fp8 nearest fp8.h:fp8_nearest \
    'at_most < 0x1p-6f \?' 'at_most < 0x1p-9f ?'
mutation "fp8: what is too large becomes NaN" test_fp8 nearest fp8.h:fp8_nearest 'size < FP8_LARGEST \? size : FP8_LARGEST' 'size'
mutation "fp8: a block of 448 gets twice the scale" test_fp8 scale fp8.h:fp8_scale 'mantissa > 0.875f' 'mantissa >= 0.875f'
mutation "fp8 rows: a group of 448 gets twice the scale" test_fp8_rows scale fp8.h:fp8_row_scale '> 0x600000' '>= 0x600000'
mutation "fp8 rows: groups near 0 have scales as small" test_fp8_rows golden fp8.h:fp8_row_scale \
    'largest > FP8_LEAST_ROW \? largest : FP8_LEAST_ROW' 'largest'
mutation "fp8 rows: a row has one scale" test_fp8_rows golden fp8_rows.h:fp8_row_ref 'c \+= FP8_BLOCK' 'c += C'
mutation "fp8: up's blocks go on where gate's end" test_matmul stored stored.h:stored_row_scales \
    'row % m->part_rows / m->block_rows' 'row % m->block_rows / m->part_rows'
mutation "fp8: rows that are turned together have the scale of the first" test_matmul stored gemm.h:gemm_scales_ \
    's.are_one = s.row\[0\] == s.row\[VLANES - 1\]' 's.are_one = 1'
mutation "fp8: a column keeps the scale of its first row" test_matmul stored gemm.h:gemm_pack_straight_ \
    'gemm_alike_\(row, left, b->weight.block_rows, kind\)' 'left'
mutation "fp8: blocks of a part are as wide as those of the whole" test_matmul stored gemm.h:gemm_factor_ \
    'column / s->block_columns' 'column / FP8_BLOCK'
mutation "fp8: ... read straight" test_matmul stored gemm.h:gemm_column_factors_ '/ w->block_columns' '/ FP8_BLOCK'
mutation "fp8: the last elements of a block are left out" test_matmul stored gemm.h:gemm_few_columns_ \
    'gemm_few_term_\(sum, a, gemm_widen_\(last' 'if (kind == STORED_F32) gemm_few_term_(sum, a, gemm_widen_(last'
mutation "fp8: experts share the scales of the first" test_grouped_matmul stored stored.h:stored_next \
    'if \(m.scales\)' 'if (0 \&\& n_scales)'
# ---- and in fp4 ----
mutation "fp4: the halves of a byte are swapped" test_fp4 codes fp4.h:fp4_code '4 \* \(column % 2\)' '4 * (1 - column % 2)'
mutation "fp4: ties go away from zero" test_fp4 nearest fp4.h:fp4_nearest '\(at_most \+ rounder - rounder\) / unit' \
    'floorf(at_most / unit + 0.5f)'
mutation "fp4: e8m0 without its bias at 0" test_fp4 scales fp4.h:e8m0_widen '0x00400000u' '0u'
mutation "fp4: in vectors, too" test_fp4 weights vec.h:v_part_e8m0 '& 0x00400000u' '\& 0u'
mutation "fp4: a group of 6 gets twice the scale" test_fp4 groups fp4.h:fp4_scale 'mantissa > 0.75f' 'mantissa >= 0.75f'
mutation "fp4: groups keep the scale of the first" test_matmul stored gemm.h:gemm_pack_turned_ \
    'gemm_group_factor_\(&exponents, b->column \+ k \+ i\)' 'gemm_group_factor_(\&exponents, b->column + k)'
mutation "fp4: k blocks that are no whole groups" test_matmul stored gemm.h:gemm_k_block_ \
    'ceil_div\(ceil_div\(K, n_blocks\), FP4_GROUP\) \* FP4_GROUP' 'ceil_div(K, n_blocks)'
mutation "fp4: scales of the first groups alone" test_matmul stored gemm.h:gemm_load_exponents_ \
    'stored_row_exponents\(x->weight, x->r\) \+ group' 'stored_row_exponents(x->weight, x->r) + 0 * group'
mutation "fp4: experts share the scales of the first" test_grouped_matmul fp4 stored.h:stored_next \
    'm.kind == STORED_FP4 \? stored_exponents\(m.rows, m.columns\)' 'm.kind == STORED_FP4 ? (size_t)(0 * m.rows)'
mutation "fp4: scales overlap the next tensor" test_tables fp4 tensor.h:tensor_scale_bytes \
    'stored_exponents\(tensor_part_rows\(t\), t->columns\)' 'stored_exponents(1, t->columns)'
mutation "fp4: fused experts have the scales of the first" test_hf_folder fp4 tensorfile.h:scales_of_slice_ \
    '\(size_t\)k % n_joined' '0 * (size_t)k'
mutation "fp4: scales alone are passed over" test_hf_folder fp4 tensorfile.h:check_scales_ 'if \(!owner\)' 'if (!owner) { continue; } if (!owner)'
mutation "fp4: scales of 255 are numbers" test_hf_folder fp4 tensorfile.h:read_exponents_ '<= FP4_LARGEST_SCALE' '<= 255'
mutation "fp8: the last band of a matrix is whole" test_tables bands tensor.h:tensor_band \
    'left < FP8_BLOCK \? left : FP8_BLOCK' 'FP8_BLOCK'
mutation "fp8: scales lie over the next tensor" test_tables bands tensor.h:tensors_store \
    'tensor_slices\(t\)' '0'
mutation "fp8: experts of one tensor have the scales of the first" test_hf_folder fp8 tensorfile.h:scales_of_slice_ \
    '\(size_t\)k % n_joined' '0 * (size_t)k'
mutation "fp8: later rows have the scales of the first 128" test_hf_folder fp8 tensorfile.h:read_fp8_rows_ \
    '\(r / FP8_BLOCK\)' '(r / FP8_BLOCK * 0)'
mutation "fp8: a file's NaN is a number" test_hf_folder fp8 tensorfile.h:read_fp8_rows_ '== 0x7f' '== 0x80'
mutation "fp8: padding rows of bytes keep what was there" test_hf_folder fp8 tensorfile.h:read_scaled_ \
    'if \(bytes\) \{ memset\(bytes \+ n_there, 0, n - n_there\); \}' ''
mutation "parts: columns begin with the first" test_hf_folder parts tensorfile.h:read_columns_ '\+ \(size_t\)w->column' ''
mutation "parts: a window of fp4 begins with the first column" test_hf_folder parts tensorfile.h:read_fp4_rows_ \
    '\+ \(size_t\)w->column, to' ', to'
mutation "parts: scales of columns are those of the first" test_hf_folder parts tensor.h:tensor_take_scales \
    '\(w->column \+ b \* part->block_columns\)' '(b * part->block_columns)'
mutation "parts: a band has the scales of the first" test_hf_folder parts tensor.h:tensor_take_scales \
    '\(r - first\) / FP8_BLOCK' '0 * (r - first)'
mutation "parts: blocks are cut for the first section alone" test_shared_matrices shared tensor.h:tensor_cut_blocks_ \
    'k < part->n && !is_columns' 'k < 1 \&\& !is_columns'
mutation "parts: blocks of rows are not cut for the turned matrix" test_shared_matrices shared tensor.h:tensor_cut_blocks_ \
    't->split != SPLIT_VOCABULARY' 'is_columns'
mutation "tp: scales stay where they were when rows are turned" test_shared_matrices shared linear.h:linear_turned_rows_ \
    'blocks.of\[s\] /= linear_scale_rows_\(m\)' 'blocks.of[s] /= 1'
mutation "tp: scales of a turned matrix lie over its data" test_shared_matrices shared linear.h:linear_room_scales_ \
    '\(n_bytes \+ 15\) / 16 \* 16' 'n_bytes / 2'
mutation "tp: the plan counts floats where less is stored" test_shared_matrices sent linear.h:linear_sends \
    '\(double\)tensor_matrix_bytes\(&m->held\[i\], sizeof\(floatX\)\)' 'sizeof(floatX) * C * OC / T'
mutation "fp8: padding rows keep what was in the buffer" test_hf_folder bands tensorfile.h:read_bands_ \
    'memset\(room \+ n_read, 0, sizeof\(float\) \* \(end - first - n_read\)\);' ''
mutation "fp8: later bands are read from the file's first rows" test_hf_folder bands tensorfile.h:read_bands_ \
    'tensor_read_part_\(file, found, first,' 'tensor_read_part_(file, found, 0,'

# ---- attention ----
mutation "grouped: a part that goes on with a chain begins at 0" test_grouped_matmul "rows forward" \
    grouped_matmul.h:grouped_add_ 'k > 0 \|\| plan->add \? o' 'plan->add ? o'
mutation "grouped: experts gather the rows of the first" test_grouped_matmul "gathered forward" \
    grouped_matmul.h:grouped_rows_ 'gemm_gathered\(x, index \+ s' 'gemm_gathered(x, index'
mutation "grouped: an expert without rows keeps its gradient" test_grouped_matmul "no rows" \
    grouped_matmul.h:grouped_add_ 'k < K \|\| k == 0' 'k < K'
mutation "grouped: the panel of another part is taken" test_grouped_matmul "rows forward" gemm.h:gemm_block_ \
    'gemm_columns_\(p->b, n, n_end, p->K\)' 'gemm_columns_(block->part->b, n, n_end, p->K)'
if [ $places = 1 ] || grep -qm1 avx512f /proc/cpuinfo; then  # else panels are whole tiles: it would change nothing
mutation "gemm: a panel ends where the next one has begun" test_matmul "gemm shapes" gemm.h:gemm_block_ \
    'n_end = gemm_panel_begin_\(block, panel \+ 1\)' 'n_end = gemm_min_(n + TILE_N, block->N)'
fi
mutation "grouped: a tile that is stored past the caches leaves out its last vector" test_grouped_matmul past \
    gemm.h:gemm_vectors_ 'if \(past\) \{ v_store_past' 'if (past) { if (v + 1 < V) v_store_past'
mutation "grouped: a product that goes on begins at 0" test_lora "experts forward" grouped_matmul.h:grouped_add_ \
    'k > 0 \|\| plan->add \? o' 'k > 0 ? o'
mutation "lora: neither u nor du is scaled" test_lora "one forward" lora.h:lora_into_rank_ \
    'scales = lora_product_' 'scales = 0 * lora_product_'
mutation "lora: rows of outputs have nothing between them" test_lora "one forward" lora.h:lora_forward \
    'lora_out_of_rank_\(out, s->out_row' 'lora_out_of_rank_(out, (size_t)s->n_out'
mutation "lora: dinp is written" test_lora "one backward" lora.h:lora_backward \
    'lora_out_of_rank_\(dinp, \(size_t\)own.n, 1' 'lora_out_of_rank_(dinp, (size_t)own.n, 0'
mutation "lora: the gradient of what dropout left out" test_lora "one backward" lora.h:lora_add_dropped_ \
    'to\[c\] \+= dropout_element_\(from\[c\], site, first \+ \(uint64_t\)c\)' '(void)site, (void)first; to[c] += from[c]'
mutation "lora: what is left out of some columns goes by their own numbers" test_lora columns lora.h:lora_add_dropped_ \
    ' \+ \(uint64_t\)own.first' ''
mutation "lora: dA of some columns is that of the first" test_lora columns lora.h:lora_backward 'x \+ learning.first' 'x'
mutation "lora: dA is that of the input before dropout" test_lora "one backward" lora.h:lora_backward \
    'dA \|\| dB \? dropout' 'dB \&\& !dA ? dropout'
mutation "lora: u of dB is without its row's weight" test_lora "experts backward" lora.h:lora_backward \
    'A, 1, is_weighted, s' 'A, 1, 0, s'
mutation "lora: weights lie where their rows do" test_lora copied lora.h:lora_weight_ \
    'experts->weight_index \?' '0 ?'
mutation "lora: a weight multiplies du in place of x" test_lora "experts backward" lora.h \
    'LORA_WEIGHS_INPUT = 1 \};  // weight multiplies x in dA' 'LORA_WEIGHS_INPUT = 0 };'
mutation "lora: weighted rows are gathered twice" test_lora "experts backward" lora.h:lora_backward \
    'x = wide, inp_index = NULL;' 'x = wide;'
mutation "lora: the plain dB forgets the weight" test_lora weights lora.h:lora_gradient_ref \
    'if \(experts->weight\)' 'if (0)'
mutation "lora: the plain dinp reads A turned" test_lora "backward differences" lora.h:lora_backward_ref \
    'du, A \+ own.first, 1, C, s' 'du, A + own.first, r, 1, s'
mutation "blocks: all groups read the inputs of the first" test_block_matmul "blocks forward" \
    block_matmul.h:block_matmul_forward_stored 'gemm_matrix\(inp \+ g \* Cg, C\)' 'gemm_matrix(inp, C)'
mutation "blocks: dinp goes by the block of the next group" test_block_matmul "blocks backward" \
    block_matmul.h:block_matmul_backward_input_stored 'gemm_stored\(weight\), g \* R' 'gemm_stored(weight), (g + 1) % G * R'
mutation "blocks: the plain dweight reads the inputs of the first group" test_block_matmul "blocks backward differences" \
    block_matmul.h:block_matmul_backward_weight_ref 'oc / R \* Cg \+ c\]' 'c]'
mutation "blocks: adapters share the B of the first group" test_block_matmul "adapter forward" \
    block_lora.h:block_lora_forward 'gemm_transposed\(B \+ g \* R \* r, r\)' 'gemm_transposed(B, r)'
mutation "block lora: a rank's dropout counts its own groups" test_block_matmul shared \
    block_lora.h:block_lora_columns_ 's->all_groups > 0 \? s->all_groups : G' 'G'
mutation "blocks: du of an adapter is not scaled" test_block_matmul "adapter backward" \
    block_lora.h:block_lora_backward 's->scale, NULL, rows.N' '1.0f, NULL, rows.N'
mutation "blocks: dropout counts the inputs of one group" test_block_matmul linear linear.h:linear_blocks_adapter_ \
    'shape\.dropout\.first \*= \(uint64_t\)shape\.all_groups;' ''
mutation "attention: the softmax sum over descending u" test_attention forward attention.h:attention_softmax_ \
    'sum\[j\] \+= w\[j\];' '(void)w;' 'for \(int j = 0; j < TILE_N; j\+\+\) \{ sum\[j\] = sum' \
    'for (int i = (t1 + n) * TILE_N - 1; i >= 0; i--) { sum[i % TILE_N] += weights[i]; } &'
mutation "attention: the maximum sees later keys" test_attention causality attention.h:attention_softmax_ \
    'for \(int j = attention_first_\(u, t1\); j < TILE_N; j\+\+\) \{ m\[j\]' 'for (int j = 0; j < TILE_N; j++) { m[j]'
mutation "attention: a query does not see itself" test_attention obvious attention.h:attention_gather_ \
    'u <= t1 \+ j && u < n_keys; u\+\+' 'u < t1 + j \&\& u < n_keys; u++'
mutation "few attention: the softmax sum over descending keys" test_attention grouped few_attention.h \
    'for \(int u = first; u <= t; u\+\+\) \{ sum \+= w\[u\]; \}' 'for (int u = t; u >= first; u--) { sum += w[u]; }'
mutation "few attention: a key that the window hides" test_attention grouped few_attention.h \
    'const int first = attention_first_key\(s, t\), last' 'const int first = 0, last'
mutation "few attention: backward forgets D" test_attention grouped few_attention.h \
    'att\[u\] \* \(ds\[u\] - D\)' 'att[u] * ds[u]'
mutation "attention: divides by the sum" test_attention backward attention.h 'fm_exp\(w\[j\] - m\[j\]\) \* r\[j\]' \
    'fm_exp(w[j] - m[j]) / (1.0f / r[j])'
mutation "attention: dk is not started" test_attention backward attention.h:attention_backward_group_ \
    'memset\(dk \+ kv.*HS\);' ';'
mutation "attention: the plain loop forgets D" test_attention "backward differences" \
    attention.h:attention_backward_row_ref \
    'att\[u\] \* \(ds\[u\] - D\)' 'att[u] * ds[u]'
mutation "attention: a window is one key too long" test_attention "double" attention_shape.h \
    't - s->window \+ 1' 't - s->window + (t == s->window)'
mutation "attention: heads of a group read different keys" test_attention "grouped" \
    attention.h:attention_forward_head_ \
    'h / \(shape->NH / shape->NKV\)' 'h % shape->NKV'

mutation "attention: a block sees keys that do not exist" test_attention block \
    attention.h:attention_strip_keys_ 'gemm_min_\(t1 \+ n, s->keys\)' 't1 + n'
mutation "attention: a block takes its own D" test_attention block attention.h:attention_dscores_ \
    'if \(given\) \{ memcpy\(D, given, sizeof\(float\) \* n\); \}' ''
mutation "sparse: the sink takes no share" test_sparse_attention "sparse_attention forward" \
    sparse_attention.h:sparse_softmax_lanes_ '\(total\[j\] \+ fm_exp\(sinks\[j\] - top\[j\]\)\)' 'total[j]'
mutation "sparse: a window is one key too long" test_sparse_attention double sparse_shape.h:sparse_window_keys \
    '\+ 1 < s->window \? places->t\[n\] \+ 1 : s->window' '< s->window ? places->t[n] + 1 : s->window + 1'
mutation "sparse: a position sees an entry before it ends" test_sparse_attention obvious entry_windows.h \
    '\(\(\(t\) \+ 1\) / \(r\)\)' '(((t) + 2) / (r))'
mutation "sparse: keys of a window end with their document" test_sparse_attention "sparse_attention backward" \
    sparse_attention.h:sparse_tile_ 't\.is_stairs &= t\.end\[m\] ==' 't.is_stairs \&= 1 | t.end[m] =='
mutation "sparse: heads behind the first ones begin dkey anew" test_sparse_attention "sparse_attention backward" \
    sparse_attention.h:sparse_add_ 'to - from, 1, t->stair' 'to - from, b->first_head == 0, t->stair'
mutation "sparse: entries of a later piece are left out" test_sparse_attention "more_heads backward" \
    sparse_attention.h:sparse_add_heads_ 'entries\.first \+ i / n_channels \* of_task' 'i / n_channels * of_task'
mutation "sparse: lists are read from their first position" test_sparse_attention "sparse_attention backward" \
    sparse_attention.h:sparse_add_lists_ 'place\[e - first\] = l\.end;' ''
mutation "sparse: mass takes heads descending" test_sparse_attention "mass forward" \
    sparse_attention.h:sparse_attention_mass 'lanes\[k \* stride \+ h\]' 'lanes[k * stride + n_heads - 1 - h]'
mutation "sparse: mass begins anew" test_sparse_attention "mass forward" \
    sparse_attention.h:sparse_attention_mass 'goes_on \? length : 0' '0'
mutation "merge: the block before keeps its weight" test_attention_merge "merge forward" \
    attention_merge.h:attention_merged_ 's \* r, more_s \* r' 'r, more_s * r'
mutation "ring: the next turn has the keys of the next place" test_context ring segment_ring.h:segment_ring_rows_ \
    'cp->place - turn \+ cp->size' 'cp->place + turn'
mutation "halo: what the second rank behind asks is lost" test_context halo halo.h:halo_collect \
    'p = h->ranks->place \+ 1; p < h->ranks->size' 'p = h->ranks->place + 1; p < h->ranks->size \&\& p < h->ranks->place + 2'
mutation "halo: the rows of a farther rank lie where the nearest has its own" test_context halo halo.h:halo_row_ \
    '\(h->ranks->place - from - 1\) \* h->n' '0'
mutation "ring: late queries have no share in dk" test_context ring segment_ring.h:segment_ring_backward \
    'segment_ring_swap_\(&r, RING_SUMS, RING_EARLY\);' 'segment_ring_swap_(\&r, RING_SUMS, RING_LATE);'
mutation "heads: shares of a head of keys are not added" test_context heads context_parallel.h:cp_to_positions \
    'residual_forward\(sum, sum, landing \+ n \* \(size_t\)end, n, dev\);' ';'

# ---- the other ops ----
mutation "layernorm: dweight and dbias take rows descending" test_layernorm backward \
    layernorm.h:layernorm_backward_channels_ \
    'for \(int n = 0; n < N; n\+\+\)' 'for (int n = N - 1; n >= 0; n--)'
mutation "layernorm: both loops forget the mean of g * xhat" test_layernorm "backward differences" layernorm.h \
    '- mean_g - \(inp\[c\] - mean\) \* rstd \* mean_gx\) \* rstd' '- mean_g) * rstd + 0 * mean_gx' \
    '- mg - \(inp\[c\] - m\) \* s \* mgx\) \* s' '- mg) * s + 0 * mgx'
mutation "gelu: k is one unit too large" test_gelu obvious gelu.h '0\.797884524f' '0.797884583f'
mutation "softmax: columns of a square descend" test_crossentropy shapes crossentropy.h \
    'for \(int i = 0; i < VLANES; i\+\+\) \{ sum \+= columns\[i\]; \}' \
    'for (int i = VLANES - 1; i >= 0; i--) { sum += columns[i]; }'
mutation "softmax: the padding counts" test_crossentropy shapes crossentropy.h \
    'crossentropy_exponentials_\(probs, logits, max, sums, V, Vp\)' 'crossentropy_exponentials_(probs, logits, max, sums, Vp, Vp)'
mutation "crossentropy: both loops have the wrong sign" test_crossentropy "backward differences" crossentropy.h \
    'probs\[i\] - \(v == targets\[n\]' 'probs[i] + (v == targets[n]' 'dtarget = \(p\[target\] - 1\.0f\)' \
    'dtarget = (p[target] + 1.0f)'
mutation "embedding: positions descend" test_embedding embedding embedding.h:embedding_backward \
    'for \(int n = 0; n < B \* T; n\+\+\)' 'for (int n = B * T - 1; n >= 0; n--)'
mutation "scan: rows and groups are added descending" test_selective_scan bits selective_scan.h:scan_chain_ \
    'sum\[i\] \+= parts\[i\]' 'sum[i] += parts[i + (n_parts - 1 - 2 * p) * (ptrdiff_t)step]'
mutation "window pool: the first entry of a document reads the one before" test_window_pool "window_pool forward" \
    window_pool.h:window_pool_slots_ 'w->number\[entry\] > 0 \?' 'w->token[entry] >= before ?'
mutation "window pool: the halves of a token are swapped" test_window_pool obvious window_pool.h:window_pool_half_ \
    'slot >= w->r \? d : 0' 'slot < w->r ? d : 0'
mutation "window pool: the last window of a document keeps what was there" test_window_pool "window_pool backward" \
    window_pool.h:window_pool_zeros_ref 'read & 1 \? d : 0' 'd'
mutation "window pool: a weight times the value rounds before it is added" test_window_pool "window_pool forward" \
    window_pool.h:window_pool_entry_ 'madd\(row\[c\] / total\[c\], value\[c\], out\[c\]\)' \
    'row[c] / total[c] * value[c] + out[c]'
mutation "window pool: dape takes entries descending" test_window_pool "window_pool backward" \
    window_pool.h:window_pool_dape_ 'int i = 0; i < w->W; i\+\+' 'int i = w->W - 1; i >= 0; i--'
mutation "entry windows: they go on from one document to the next" test_window_pool windows \
    entry_windows.h:entry_windows_of_batch 'number\[at\] = w;' 'number[at] = at;'
mutation "entry windows: a rank has those that begin in its positions" test_window_pool pieces \
    entry_windows.h:entry_windows_of_batch 'last < d\.from \|\| last >= d\.to' 'begin < d.from || begin >= d.to'
mutation "rope: what has no place turns by the first row" test_rope placed rope.h:rope_turn_ \
    'if \(row < 0\) \{ continue; \}' '' '\(size_t\)row' '(size_t)(row < 0 ? 0 : row)'
mutation "rope: YaRN mixes from the wrong side" test_rope yarn rope.h:rope_yarn_frequencies \
    'frequencies\[i\] / yarn->factor \* slow \+ frequencies\[i\] \* fast' \
    'frequencies[i] / yarn->factor * fast + frequencies[i] * slow'
mutation "rmsnorm: without a weight dinp has one of 0" test_rmsnorm without rmsnorm.h:rmsnorm_weight_ ': 1\.0f' \
    ': 0.0f'
mutation "hpn: a prototype learns of rows descending" test_hpn "hpn backward" hpn.h:hpn_backward_channels_ \
    'for \(int n = 0; n < N; n\+\+\)' 'for (int n = N - 1; n >= 0; n--)'
mutation "surgery: pcgrad tests the task's own gradient" test_gradient_surgery "pcgrad three" gradient_surgery.h \
    'if \(dot < 0\.0\)' 'if (dots[i * n + j] < 0.0)'

# ---- the update ----
mutation "adamw: eps inside the root" test_adamw lengths adamw.h \
    'sqrtf\(v_new / a\.correction2\) \+ a\.eps' 'sqrtf(v_new / a.correction2 + a.eps)'
mutation "adamw: lr is distributed" test_adamw lengths adamw.h '\+ weight_decay \* p\);' \
    ') - a.lr * (weight_decay * p);'
mutation "muon: a moment as Nesterov has it not" test_muon shapes muon.h:muon_momentum \
    'u.momentum \* moment \+ grad' 'moment'
mutation "muon: small singular values stay small" test_muon polynomials muon.h:muon_polynomial \
    'step < MUON_FAST_STEPS' 'step < 0'
mutation "muon: what is above the diagonal is left as it was" test_muon large muon.h:muon_symmetric_ \
    'muon_mirror_\(out, s\);' ''
mutation "muon: the size of the smaller side" test_muon size muon.h:muon_size 'rows > columns' 'rows < columns'
mutation "muon: gate and up are one matrix" test_comm "dp muon" tensor.h:tensor_muon_rows 'tensor_names\(t\)' '1'
mutation "muon: ranks have no whole matrices" test_comm "dp muon" data_parallel.h:dp_update_muon_ 's->zero == 1' '0'
mutation "rounding: a random number has 15 bits" test_adamw rounding rng.h 'noise \& 0xffffu' 'noise \& 0x7fffu'
mutation "global norm: low digits are not carried" test_adamw "norm order" global_norm.h \
    'high \+= low >> NORM_BITS;' 'high += 0;'
mutation "global norm: any exponent is the expected one" test_adamw "norm expected" global_norm.h:norm_is_done \
    'norm_exponent_\(sum->largest\) == norm_exponent_\(sum->expected\)' '1'
mutation "global norm: a second pass goes on with the digits of the first" test_adamw "norm expected" \
    global_norm.h:norm_restart 'memset\(sum->digit, 0, sizeof sum->digit\);' '(void)sum;'
mutation "global norm: units are rounded to the nearest" test_adamw "norm order" global_norm.h \
    '\(int32_t\)\(\(square - \(double\)high\) \* 0x1p31\)' '(int32_t)((square - (double)high) * 0x1p31 + 0.5)'

# ---- ranks and leaves ----
mutation "pipeline: the first backward comes a forward too early" test_pipeline_schedule "" pipeline_schedule.h \
    'const int behind = s->p - 1 - rank,' 'const int behind = s->p - 2 - rank + (rank == s->p - 1),'
mutation "pipeline: backward takes chunks as forward does" test_pipeline_schedule "" pipeline_schedule.h \
    'is_backward \? s->v - 1 - chunk : chunk, is_backward' 'chunk, is_backward'
mutation "pipeline: what a tick makes is used in the same tick" test_pipeline_schedule "" pipeline_schedule.h \
    'needs && \(\*needs < 0 \|\| \*needs == tick\)' 'needs \&\& *needs < 0'
mutation "pipeline: an output does not wait for a free place" test_pipeline_schedule "" pipeline_schedule.h:pp_streams_ \
    'time = is_free > time \? is_free : time;' '(void)is_free;'
mutation "pipeline: a tie has one room too few" test_pipeline_schedule "" pipeline_schedule.h:pp_tie_rooms \
    'most = k \+ 1 - sent > most \? k \+ 1 - sent : most;' 'most = k - sent > most ? k - sent : most;'
mutation "pipeline: rows reach the last stage behind its backward pass" test_pipeline_schedule "" pipeline_schedule.h:pp_rows_ \
    's->p \* s->v - 1, back\)' 's->p * s->v - 1, 1)'
mutation "leaf tree: leaves are added from left to right" test_tensor "leaf tree" leaf_tree.h \
    'left_size == right_size \&\& ' 'left_size > 0 || '
mutation "tp: a rank rounds its columns with the noise of others" test_tensor parts tensor.h:tensor_hold_part \
    '\(size_t\)n, \(size_t\)t->columns\)' '(size_t)n, (size_t)n)'
mutation "tp: values have the noise of the keys behind which they lie" test_tensor parts tensor.h:tensor_part_numbers_ \
    '\(size_t\)\(gap - skipped\)' '(size_t)(k == 1 ? gap : 0)'
mutation "tp: rows of up are taken where gate's lie" test_tensor parts tensor.h:tensor_part \
    'tensor_names\(t\) > 1 \? 1 : tensor' '1 > 0 ? 1 : tensor'
mutation "comm: the first rank is added last" test_comm "reductions order" comm.h \
    'comm_combine_\(got, got \+ \(size_t\)i \* n_own' 'comm_combine_(got, got + (size_t)(c->size - i) * n_own'
mutation "zero: the norm forgets the other ranks" test_comm "dp train" data_parallel.h \
    'return world \? dp_norm_join_' 'return 0 ? dp_norm_join_'
mutation "zero: new parameters stay with their owner" test_comm "dp train" data_parallel.h:dp_update \
    's->zero > 0\) \{ dp_gather\(' '0) { dp_gather('
mutation "zero 2: nodes that wait for the next round are lost" test_comm "dp train" data_parallel.h \
    'if \(stack\[i\] != s->tree' 'if (s->zero < 2 \&\& stack[i] != s->tree'

# ---- data order, checkpoints, generation ----
mutation "data: every epoch has the order of the first" test_dataloader "shuffled rows" dataloader.h:dataloader_find_ \
    'permute_index\(l->key, \(uint64_t\)epoch, row' 'permute_index(l->key, 0, row'
mutation "data: a source of a mixture begins anew in each epoch" test_dataloader "mixture order" dataloader.h:dataloader_mixed_row_ \
    'draw = epoch \* source->n_places' 'draw = 0 * source->n_places'
mutation "data: an input is its own target" test_dataloader "rows" dataloader.h:dataloader_row \
    'if \(t > 0\) \{ targets\[t - 1\]' 'if (t < l->T) { targets[t]'
mutation "checkpoint: a file of the right length is whole" test_checkpoint flips checkpoint.h:checkpoint_verify_file_ \
    'found\.xxh3 != sum->xxh3' '0'
mutation "carried: a pass goes on from the one before the last" test_mamba_hpn generation carried.h \
    'carried_part\(s, s->now, kind, l\),' 'carried_part(s, s->next, kind, l),'
mutation "sampler: equal ones change their order" test_tensor sampler sampler.h:sample_sort_ \
    'for \(int i = 0; i < n; i\+\+\) \{ other' 'for (int i = n; i-- > 0;) { other'
mutation "sampler: of equal ones the last is the likeliest" test_tensor sampler sampler.h:sample_candidates \
    'weight > max' 'weight >= max'
mutation "sampler: min-p is a share of all, not of the likeliest" test_tensor sampler sampler.h:sample_keep_min_p_ \
    'weight < min_p\)' 'weight < min_p * (float)n)'
mutation "sampler: a penalized logit may rise" test_tensor sampler sampler.h:sample_penalized_ 'logit \* penalty' \
    'logit / penalty'
mutation "stop: what may be the beginning of a stop text is not held back" test_stop stop stop.h:stop_stream_put \
    's->held\.n - stop_begun_\(s\)' 's->held.n'
mutation "stop: the shortest of two that end together" test_stop stop stop.h:stop_found_ \
    'text->n > longest' 'longest == 0'

# ---- conversations ----
mutation "chat: what is learned begins with the header's line end" test_chat_template golden \
    chat_render.h:chatml_answer_ 'out->text\.n \+ 1;' 'out->text.n;'
mutation "chat: a token with the first byte of an answer and one before it is not learned" test_chat_template golden \
    chat_render.h 'next > low && at < high' 'at >= low \&\& at < high'
mutation "chat: thoughts before the last question stay" test_chat_template read chat_render.h 'i > last_query &&' '1 \&\&'
mutation "chat: a template may have any words" test_chat_template signs chat_template.h:chat_find_kind_ \
    'chat_words_known_\(signs, canonical, n\) &&' ''
mutation "chat: of GLM-5 nothing ends the last answer" test_chat_template learned chat_render.h:glm_render_ 'chat_mark_\(out, GLM_USER\);' ''
mutation "chat: thoughts of GLM-5 stay before the last question" test_chat_template glm chat_render.h:glm_render_ 'm, i > last' 'm, 1'
mutation "chat: of an empty think block, which the prompt has, its end is learned" test_chat_template learned \
    chat_render.h:qwen35_answer_ 'chat_learn_\(out, begin\)' 'chat_learn_(out, begin - (thinks \&\& reasoning.n == 0))'
mutation "chat: an image that was thought away keeps its place in the list" test_chat_template images \
    chat_render.h:chat_put_of_ 'if \(at < first' 'if (0 \&\& at < first'
mutation "images: placeholders in an answer are learned" test_conversations images \
    conversations.h:conversations_expand_ '!is_pad && sample->learned' 'sample->learned'
mutation "images: a cut goes through one" test_conversations "cut images" conversations.h:conversations_add_row_ \
    '!conversations_whole_images_\(c, n, whole\)' '0'
mutation "images: they stand where the first sample begins" test_conversations pack pack.h:pack_images_ \
    'image->at - c->starts\[sample\]' 'image->at - begin'
mutation "images: a time that was put back hides other bytes" test_conversations touched \
    row_images.h:token_images_touched 'file_times_differ_\(now\.st_ctim' '0 \&\& file_times_differ_(now.st_ctim'
mutation "images: a run goes on with others" test_chat images same_data.h:data_is_other_ \
    'data_differs_\(old_images, images, "xxh3"\)' '0'
mutation "images: what has other times is another" test_chat images same_data.h:data_sum_images_ \
    'sum = token_images_checksum\(images\)' 'sum = token_images_stamps(images, 1)'
mutation "conversations: a special token in what somebody says" test_conversations special conversations.h \
    '!p->added\[found\]\.special' '1'
mutation "pack: a sample goes where one position is missing" test_conversations pack pack.h:pack_tree_take_ \
    'tree->room\[2 \* i\] < n\)' 'tree->room[2 * i] < n - 1)'
mutation "pack: padding belongs to the last sample" test_conversations pack pack.h 'if \(end % T > 0\)' 'if (0)'
mutation "documents: the mark of targets begins nothing" test_conversations pack documents.h 'eot == NO_RESET' 'eot < 0'
mutation "conversations: the first answer is learned where the last was asked for" test_conversations last \
    conversations.h:conversations_add_row_ 'learned\[c->text\.n_learned - 1\]' 'learned[0]'
mutation "pack: without sharing rows samples share them" test_conversations alone pack.h:pack_places_ \
    'if \(!shares\)' 'if (0)'
mutation "talk: marks in the targets are not looked at" test_moe conversations documents.h:segments_find_marked \
    's->document_start < NO_RESET && targets' '0'
mutation "talk: lines that could be texts are conversations" test_chat data chat_data.h:chat_data_line_kind_ \
    'if \(!is_text\)' 'if (1)'
mutation "talk: the oldest question goes without its answer" test_chat overflow chat.h:chat_drop_oldest_ \
    'i < n; i\+\+' 'i < 1; i++'
mutation "talk: an answer may fill more than the window" test_chat overflow questions.h:asker_most \
    'n_prompt \+ 1' 'n_prompt + 40'
mutation "talk: what the user said is not looked at" test_chat commands chat.h:chat_say_ \
    '!chat_may_say_\(c, \"user\", content, &error\)' '0'
mutation "talk: the marker that ends an answer is a part of it" test_chat turns questions.h:asker_open \
    'stop_texts_add\(&a->stop, chat_end_text\(&a->t\)\);' ''
mutation "talk: an answer depends on those before it" test_chat goes questions.h:answers_ask_ \
    '\(uint64_t\)i\), \(uint64_t\)\(k' '(uint64_t)x->g->rows[0].n), (uint64_t)(k'
mutation "side by side: what another row has of a prompt is not brought" test_chat side side_by_side.h:side_begin_ \
    'g->share_text\(g->model, r, from, n_shared\);' ''
mutation "side by side: a text goes out before its turn" test_chat side side_by_side.h:side_take_ 'x->i == s->due' '1'
mutation "side by side: of a window's newer half one position is computed" test_chat side \
    generate.h:generator_drop_older_half_ 'n_cached = 0' 'n_cached = keep - 1'
mutation "side by side: a row waits for the others when its text has ended" test_chat side side_by_side.h:side_prepare_ \
    's->begun == s->end' 's->begun > s->due'
mutation "talk: half a line stays before the next answer" test_chat goes questions.h:questions_done_ \
    'is_half && truncate\(path, \(off_t\)n_whole\) != 0' '0'

# ---- train_qwen3, and what it shares with train_moe ----
mutation "qwen: of dinp the chain through q, k and v begins anew at v" test_qwen3 "golden dense" \
    linear.h:linear_chain_backward 'chain->n\+\+ > 0' 'chain->n++ == 1'
mutation "qwen: a tied embedding forgets the gradient of the head" test_qwen3 "golden window" \
    vocabulary.h:vocabulary_embedding_share '!tied && dweight' 'dweight'
mutation "qwen: the balance is not k times ours" test_qwen3 "golden experts" pooled_routers.h:pooled_weight \
    'balance \* \(float\)k' 'balance'
mutation "qwen: new keys stand where the first did" test_qwen3 cache rotary_attention.h:rotary_attention_cached \
    'device_copy\(at\.k \+ t0 \* HK' 'device_copy(at.k'
mutation "qwen: texts side by side have one row of the cache" test_qwen3 texts \
    rotary_attention.h:rotary_attention_cached '\(size_t\)texts\[i\]\.row' '0'
mutation "qwen: up stands in front of gate" test_qwen3 "golden dense" qwen.h:parameter_table \
    '"mlp\.\{gate,up\}_proj\.weight",' '"mlp.{up,gate}_proj.weight",'
mutation "qwen: every layer has the window" test_qwen3 "golden window" qwen.h:config_window \
    'c->slides\[l\] == SLIDING_ATTENTION' '1'
mutation "qwen: up's adapter adds to gate" test_qwen3 "golden adapters" linear.h:linear_adapt \
    'a->first = p->first;' 'a->first = 0;'
mutation "qwen: up's adapter learns what gate's should" test_qwen3 "golden adapters" linear.h:linear_adapt_gradients \
    'd->B\[n\+\+\]' 'd->B[n]'
mutation "qwen: adapters of experts read the first rows" test_qwen3 "adapters of experts" \
    linear.h:linear_grouped_forward '\{E, offsets, index' '{E, offsets, NULL'
mutation "qwen: no window is looked at" test_qwen3 "golden window" segment_spans.h:segment_shape \
    'x->window < s->T \? x->window : 0' '0'
mutation "qwen: the gradient of keys turns on" test_qwen3 "golden dense" \
    rotary_attention.h:rotary_turn_all_ 'NULL, x->of\.NKV, back' 'NULL, x->of.NKV, 0'
mutation "qwen: experts have the rows of the layer that was computed last" test_qwen3 "golden experts" \
    train_qwen3.cu:recompute_block 'if \(!has_rows\)' 'if (0)'
mutation "qwen: every layer finds what the last one has left" test_qwen3 recompute layer.h:layer_is_fresh \
    'acts->fresh == l' 'acts->fresh >= 0'
mutation "qwen: dB of an expert forgets the weight of its row" test_qwen3 "adapters of experts" \
    expert_layer.h:expert_products_backward_ 'weights, p->down,' 'NULL, p->down,'
mutation "scan: what is asked of the last state is not looked at" test_selective_scan "split backward" selective_scan.h \
    'if \(dstate\) \{ scan_tile_' 'if (0) { scan_tile_'
mutation "scan: what is asked of the first state is not handed on" test_selective_scan "split backward" selective_scan.h \
    'if \(dstate\) \{ scan_untile_' 'if (0) { scan_untile_'
mutation "conv1d: what follows the window is not looked at" test_causal_conv1d "windows back" causal_conv1d.h \
    '\} else if \(w->ahead\) \{' '} else if (0) {'
mutation "conv1d: a start does not hide what follows" test_causal_conv1d "windows back" causal_conv1d.h \
    'if \(j >= end\) \{' 'if (j >= T + K) {'
mutation "qwen: a piece of the head forgets the pieces before" test_qwen3 recompute lm_head.h \
    'w, goes_on, n, dev\)' 'w, 0, n, dev)'
mutation "qwen: a piece of the head has the targets of the first" test_qwen3 recompute lm_head.h \
    'targets \+ first' 'targets'
mutation "qwen: conversations see those before them in their row" test_qwen3 conversations token_batch.h \
    'tokens, targets, B, T\)' 'tokens, NULL, B, T)'

# ---- train_qwen36 ----
mutation "qwen36: the gain of a zero-centred norm is its weight" test_qwen36 "golden text" rmsnorm.h:rmsnorm_gain \
    '1\.0f \+ ' '0.0f + '
mutation "qwen36: MTP reads the hidden state where the embedding belongs" test_qwen36 "golden MTP, forward" mtp.h:mtp_join \
    'device_copy_strips\(joined, 2 \* width, next' 'device_copy_strips(joined, 2 * width, hidden'
mutation "qwen36: the gradient of the head begins anew with MTP" test_qwen36 "golden MTP" mtp_module.h:mtp_head 'goes_on = 1' 'goes_on = 0'
mutation "qwen36: MTP adds nothing to what the trunk learns" test_qwen36 "golden MTP" mtp_module.h:mtp_module_part_ \
    'fields\.hidden_norm, 0, !x->is_apart' 'fields.hidden_norm, 0, 0'
mutation "vision: patches see those before them alone" test_qwen36 "golden vision, forward" vision_tower.h:vision_attention_shape_ \
    's\.T = 2 \* f->n, s\.t0 = f->n, s\.keys = f->n;' ''
mutation "vision: rows and columns turn the same pairs" test_qwen36 "golden vision, forward" vision_tower.h:vision_take_angles_ \
    'axis\[k\] = k / quarter;' 'axis[k] = k % 2;'
mutation "vision: a placeholder's embedding learns" test_qwen36 "golden vision" train_qwen36.cu:embed_backward \
    'has_images\(qwen\) \? qwen->images\.tokens : ' ''
mutation "vision: an image is a line of text for RoPE" test_qwen36 "golden vision, forward" image_splice.h:image_place_ \
    'now \+ k % \(h \* w\) / w' 'now + 0 * w'
mutation "vision: videos go on with the images' rows" test_image_splice positions image_splice.h:image_positions_ \
    'queues\[1\]\.row \+= ' 'queues[1].row += 0 * '
mutation "vision: the module that guesses ahead asks nothing of images" test_qwen36 "golden vision" mtp_module.h:mtp_module_share_ \
    'if \(x->images\) \{ image_splice_next_backward\(x->images, x->dresidual, x->C, dev\); \}' ''
mutation "vision: a text goes on behind its image as behind one token" test_qwen36 sights text_sight.h:text_sight_place \
    'now \+= h > w \? h : w;' 'now++;'
mutation "MTP guesses from one document about another" test_documents "the token after the next" mtp_tokens.h:mtp_tokens \
    'after\[first - 2\] = -1;' ''
mutation "MTP guesses about the document behind a row" test_documents "the token after the next" mtp_tokens.h:mtp_tokens \
    'is_last \|\| is_other' 'is_last'
mutation "qwen36: all channels of a head turn" test_qwen36 "golden text" gqa_layer.h:layer_gqa \
    'size->rotated, &acts->rope' 'size->HS, \&acts->rope'
mutation "qwen36: the shared expert weighs 1 in backward" test_qwen36 "golden text" train_qwen36.cu:shared_backward \
    's\.shared_weight, N, FS' 'NULL, N, FS'
mutation "qwen36: keys of the linear layers have the convolution of the queries" test_qwen36 "golden text, forward" \
    delta_layer.h:delta_convolve_ 'p->conv \+ c\.at \* \(size_t\)K' 'p->conv'
mutation "qwen36: a text begins with the state of the one before it" test_qwen36 texts token_batch.h:token_batch_texts \
    'texts\[i\]\.n_cached == 0' '0'
mutation "qwen36: documents share a state" test_qwen36 documents delta_layer.h:delta_batch_rows_ \
    'token_batch_starts\(p->batch, 0\)' 'NULL'
mutation "qwen36: what is never kept is not made again" test_qwen36 recompute train_qwen36.cu:recompute_block \
    'mixer_again\(qwen, acts, l, N, dev\);' ''
mutation "qwen36: the gradient of the gate is that of the query" test_qwen36 "golden text" \
    gqa_layer.h:gqa_queries_backward_ 'head_gate_join\(p->a\.q_proj, dq, p->N, s->NH, s->HS, dev\);' ''
mutation "images: rows are resized first, whatever the shape" test_image "resize Pillow" image_resize.h:image_resize_columns_first \
    'out_height < height &&' '0 \&\&'
mutation "images: weights of a shrinking image look at four pixels" test_image "resize Pillow" image_resize.h:image_resize_weights \
    'scale < 1\.0 \? 1\.0 : scale' '1.0'
mutation "images: halves of a square go up" test_image sizes image_processor.h:image_processor_fit_ \
    'rint\(height / square\)' 'floor(height / square + 0.5)'
mutation "images: patches stand row by row" test_image "patches order" patch_order.h:patch_place \
    'across \* merge \+ inside % merge' 'across * merge + inside \/ merge'
mutation "images: the second frame of a still image is left out" test_image "patches order" image_processor.h:image_processor_patches \
    'p->temporal - i % p->temporal' '1'
mutation "images: 255 is one" test_image "patches values" image_processor.h:image_processor_values_ \
    'byte \* p->rescale\)' 'byte * (float)p->rescale)'
mutation "images: held to the left is held to the right" test_image orientation orientation.h:orientation_apply \
    'from_below \? height - 1 - row : row' 'from_right ? height - 1 - row : row'
mutation "images: an animation is read to its end" test_image "png animated" image_png.h:image_png_next_frame_ \
    'return is_frame && f->n > 0' 'return 0 \&\& f->n > 0'
mutation "images: a JPEG without its end is taken" test_image "image cut" image_jpeg.h:image_jpeg_read_pixels_ \
    'jpeg_finish_decompress\(jpeg\);' ''

# ---- the indexer of DeepSeek V4 ----
mutation "indexer: heads are summed before their ReLU" test_indexer "index_choose forward" indexer.h:index_add_heads_ \
    'index_relu_\(v_load\(tile \+ m \* TILE_N \+ v\)\)' 'v_load(tile + m * TILE_N + v)'
mutation "indexer: an entry is seen before its last token" test_indexer reference entry_windows.h \
    '\(\(\(t\) \+ 1\) / \(r\)\)' '((t) / (r))'
mutation "indexer: a NaN comes first" test_indexer obvious indexer.h:index_keys_ 'v_fill\(-INFINITY\)' 'v_fill(INFINITY)'
mutation "indexer: of equal scores more are taken than there is room for" test_indexer choice \
    indexer.h:index_choose_row_ ' && equals > 0' ''
mutation "indexer: a head that is closed learns" test_indexer "index_loss backward" indexer.h:index_list_slopes_ \
    '\(vint\)\(a \* dscore\) & is_open' '(vint)(a * dscore)'
mutation "indexer: dk of a stretch has the positions of the first" test_indexer "index_loss backward" \
    indexer.h:index_dk_ 'const int begin = n > 0 \? at\[e\] : lists->offsets\[e\];' \
    'const int begin = lists->offsets[e];'
mutation "inverse lists: a thread writes where another one does" test_indexer "lists random" \
    inverse_lists.h:inverse_lists_scan_ 'place \+= count;' 'place += part < n_parts - 1 ? count : 0;'

# ---- attention of GLM-5 from short vectors ----
mutation "absorbed: no score of the channels that turn" test_glm5 absorbed latent_layer.h:latent_absorb_ \
    'latent_move_\(a->asked \+ s->r' 'latent_move_(a->by_head + s->r'
mutation "absorbed: heads ask of values" test_glm5 absorbed latent_layer.h:latent_absorb_ 'a->q, Q, s->dn, NH' \
    'a->q, Q, s->dn + s->dr, NH'
mutation "absorbed: every head has a sink" test_glm5 absorbed latent_layer.h:latent_no_sinks_ '-INFINITY' '0.0f'

# ---- kernels ----
kernel_mutation "sparse attention by wgmma: both halves of ds have the place of the first" test_sparse_attention \
    Hopper flash_sparse_hopper.h 'flash_sparse_hopper_write_\(ds_tile, row, part \* N, operands\)' \
    'flash_sparse_hopper_write_(ds_tile, row, 0, operands)'
kernel_mutation "latent attention by wgmma: no rescaling when the maximum grows" test_latent_attention \
    Hopper flash_latent_hopper.h 'if \(__any_sync\(ALL_LANES, grew\)\)' 'if (0)'
kernel_mutation "latent attention on tensor cores: D of backward is 0" test_latent_attention "tensor cores" \
    flash_rows.h 'log2f\(inv\), D\}' 'log2f(inv), 0.0f}'
kernel_mutation "attention by wgmma: a tile on the diagonal is taken as one that all queries see" test_attention \
    "bf16 Hopper" flash_hopper.h 'if \(!all\.has_all\(u, KEYS\)\)' 'if (0)'
kernel_mutation "products of experts by wgmma: tiles are multiplied before they have arrived" test_grouped_matmul \
    "hopper bits" grouped_hopper.h 'wide_tile_arrived<GROUPED_AHEAD - 1>\(\)' 'wide_tile_arrived<GROUPED_AHEAD>()'
kernel_mutation "gated delta on Hopper: a document goes on with the state before it" test_gated_delta "hopper bits" \
    flash_delta_hopper.h 'if \(c\.fresh\) \{ tile_set_zero\(S\); \}' ''

# ---- the tests as they are are green; a compiler that fuses multiply and add is found out ----
unchanged() {  # folder, test
    mkdir -p "$1"
    cp "$2.c" train_*.c* "$1/" && ln -sfn "$PWD/llmc" "$1/llmc"
}

if [ $places = 0 ] && [ $n -gt 0 ]; then
    folder=$(make -s folder OPT=-Og)
    wait
    [ ${#tests[@]} = 0 ] || make -s -k -j"$(nproc)" OPT=-Og $(printf "$folder/%s " "${!tests[@]}")
    for test in "${!tests[@]}"; do start "$test: green before any mutation" is_green "$folder/$test"; done
    for asked in "${!kernel_tests[@]}"; do
        unchanged "$work/kernels_${asked// /_}" "${asked%% *}"
        kernels=1 start "$asked: green before any mutation" \
            kernels_are_green "$work/kernels_${asked// /_}" "${asked%% *}" "${asked#* }"
    done
fi
can_fuse() { ${CC:-gcc} -march=native -dM -E - < /dev/null | grep -q __FP_FAST_FMAF; }
if [ $places = 0 ] && [[ "-ffp-contract=fast" == *"$only"* ]] && can_fuse; then
    for test in test_{layernorm,adamw}; do
        unchanged "$work/fused_$test" $test
        start "$test: -ffp-contract=fast" turns_red "$work/fused_$test" $test "" "$flags -O2 -ffp-contract=fast"
    done
fi

wait
if [ "$n" = 0 ]; then echo "mutate.sh: no mutation has \"$only\" in its description" >&2 && exit 2; fi
n_failed=$(find "$work" -name 'failed.*' | wc -l)
echo "$((n - n_failed)) passed, $n_failed failed"
[ "$n_failed" -eq 0 ] && [ "$n" -gt 0 ]
