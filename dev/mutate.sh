#!/bin/bash
# Tests of the tests: breaks a copy of the tree in one place at a time, as a careless optimiser might, and requires that
# a test turns red. "passed" is a mutation that was caught, or a test that is green before any. A mutation whose old text
# is no longer there exactly once, or whose result does not compile, fails: rewrite it with the code it speaks of.
#     dev/mutate.sh          all
#     dev/mutate.sh softmax  only those whose description contains "softmax"
set -u
cd "$(dirname "$0")/.." || exit 1
only=${1:-}
flags="-std=gnu11 -D_GNU_SOURCE -O1 -march=native -fno-math-errno -fno-trapping-math -fopenmp"  # -O1 compiles twice as fast
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_WAIT_POLICY=passive  # seven threads on few cores must not spin
n=0

build() {  # folder, test, flags
    ${CC:-gcc} $3 "$1/$2.c" -o "$1/$2" -ljansson -lxxhash -lpcre2-8 -lm 2> "$1/errors" && return
    echo "does not compile: $(grep -m 1 error "$1/errors")"
    return 1
}

# run the promises that match; 0: red, as it must be
turns_red() {  # folder, test, filter, flags
    build "$1" "$2" "$4" || return
    if timeout 60 "$1/$2" "$3" > "$1/output" 2>&1; then echo "survived $2 \"$3\""; return 1; fi
}

# a test that is red anyway would catch everything
is_green() {  # folder, test, flags
    build "$1" "$2" "$3" || return
    if ! timeout 120 "$1/$2" > "$1/output" 2>&1; then echo "$(tail -1 "$1/output")"; return 1; fi
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
    [[ $1 == *"$only"* ]] || return
    n=$((n + 1))
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
    verdict "$@" &
}

# replace text in one header, or a trainer, of a fresh copy; then the test must turn red
change() {  # folder, test, filter, header, old, new, old, new, ...
    local folder=$1 test=$2 filter=$3 header text before
    header=$(echo llmc/*/"$4")
    [ -e "$header" ] || header=$4
    shift 4
    mkdir -p "$folder/llmc"
    cp -r llmc/. "$folder/llmc/" && cp "$test.c" train_*.c "$folder/"
    text=$(< "$header")
    while [ $# -gt 0 ]; do
        before=$text
        text=${text/"$1"/"$2"}
        if [ "$text" == "$before" ]; then echo "$header no longer contains: $1"; return 1; fi
        before=${before#*"$1"}
        if [ "$before" != "${before/"$1"/}" ]; then echo "$header contains twice: $1"; return 1; fi
        shift 2
    done
    printf '%s\n' "$text" > "$folder/$header"
    turns_red "$folder" "$test" "$filter" "$flags -ffp-contract=off"
}

# mutation DESCRIPTION TEST FILTER HEADER OLD NEW [OLD NEW ...]
mutation() {
    local description=$1
    shift
    start "$description" change "$work/$((n + 1))" "$@"
}

# a folder that sees the tree as it is
unchanged() {  # folder, test
    mkdir -p "$1"
    cp "$2.c" train_*.c "$1/" && ln -sfn "$PWD/llmc" "$1/llmc"
}

# ---- the tree as it is; then the compiler is allowed to fuse multiply and add, where this processor can ----
for test in test_{matmul,attention,layernorm,gelu,crossentropy,embedding,adamw,tensor,tables,comm,causal_conv1d,selective_scan,hpn,mamba_hpn}; do
    unchanged "$work/$test" $test
    start "$test: green before any mutation" is_green "$work/$test" $test "$flags -ffp-contract=off"
done
if ${CC:-gcc} -march=native -dM -E - < /dev/null | grep -q __FP_FAST_FMAF; then
    for test in test_{matmul,attention,layernorm,gelu,adamw}; do
        unchanged "$work/fused_$test" $test
        start "$test: -ffp-contract=fast" turns_red "$work/fused_$test" $test "" "$flags -O2 -ffp-contract=fast"
    done
fi

# ---- gemm.h, vec.h, matmul.h ----
mutation "gemm: each k block starts at 0 and is added later" test_matmul gemm gemm.h \
    'sum[m][v] = v_load(start + m * start_stride + v * VLANES);' 'sum[m][v] = v_fill(0.0f);' \
    'v_store(out + m * out_stride + v * VLANES, sum[m][v]);' \
    'v_store(out + m * out_stride + v * VLANES, v_load(start + m * start_stride + v * VLANES) + sum[m][v]);'
mutation "gemm: a later k block of a panel forgets the earlier ones" test_matmul "gemm blocks" gemm.h \
    'k > 0 ? out : start, k > 0 ? out_stride : start_stride, a_packed' 'start, start_stride, a_packed'
mutation "gemm: a later long k block forgets the earlier ones" test_matmul "gemm blocks" gemm.h \
    'k > 0 ? o : start ? start + m * start_stride : NULL, k > 0 ? out_stride : start_stride' \
    'start ? start + m * start_stride : NULL, start_stride'
mutation "gemm: k blocks descend" test_matmul "gemm blocks" gemm.h \
    'for (int k = 0; k < K || k == 0; k += GEMM_K) {  //' \
    'const int last = K > 0 ? (K - 1) / GEMM_K * GEMM_K : 0;
    for (int k = last; k >= 0; k -= GEMM_K) {  //' \
    'k > 0 ? out : start, k > 0 ? out_stride : start_stride, a_packed' \
    'k < last ? out : start, k < last ? out_stride : start_stride, a_packed'
mutation "gemm: the last two products swapped" test_matmul "gemm shapes" gemm.h \
    'bk[v] = v_load(b + v * VLANES);' \
    'bk[v] = v_load(b + (K < 2 ? 0 : k == K - 2 ? TILE_N : k == K - 1 ? -TILE_N : 0) + v * VLANES);' \
    'am = v_fill(a[m]);' 'am = v_fill(a[m + (K < 2 ? 0 : k == K - 2 ? TILE_M : k == K - 1 ? -TILE_M : 0)]);'
mutation "gemm: k descends" test_matmul "gemm shapes" gemm.h \
    'bk[v] = v_load(b + v * VLANES);' 'bk[v] = v_load(b + (K - 1 - 2 * k) * TILE_N + v * VLANES);' \
    'am = v_fill(a[m]);' 'am = v_fill(a[m + (K - 1 - 2 * k) * TILE_M]);'
mutation "gemm: the third k block takes the second of a" test_matmul "gemm blocks" gemm.h \
    'a_packed + M_whole * k' 'a_packed + M_whole * (k > 0 ? GEMM_K : 0)'
mutation "gemm: the panels of b lie over the end of a" test_matmul "gemm blocks" gemm.h \
    'b_packed = workspace + a_floats +' 'b_packed = workspace + a_floats - 16 * GEMM_K +'
mutation "gemm: a rim tile is copied out whole" test_matmul "gemm shapes" gemm.h \
    'memcpy(out + m * out_stride, tile + m * TILE_N, sizeof(float) * N)' \
    'memcpy(out + m * out_stride, tile + m * TILE_N, sizeof(float) * (N + 1))'
mutation "vec: v_fill loses the sign of zero" test_matmul "signed zero" vec.h 'return x - zero;' 'return x + zero;'
mutation "matmul: the bias is dropped" test_matmul forward matmul.h 'gemm(out, OC, bias, 0,' 'gemm(out, OC, NULL, 0,'
mutation "matmul: dweight is added to" test_matmul backward matmul.h \
    'add ? dweight : NULL, C, transposed' 'dweight, C, transposed'
mutation "matmul: dbias takes rows descending" test_matmul backward matmul.h \
    'x + n * OC + first' 'x + (N - 1 - n) * OC + first'
mutation "matmul: the plain loop starts at 0 and adds the bias last" test_matmul forward matmul.h \
    'float sum = bias ? bias[oc] : 0.0f;' 'float sum = 0.0f;' \
    'out[n * OC + oc] = sum;' 'out[n * OC + oc] = sum + (bias ? bias[oc] : 0.0f);'
mutation "matmul: the plain dinp reads the weight turned" test_matmul "backward differences" matmul.h \
    'sum += dout[n * OC + oc] * weight[oc * C + c]' 'sum += dout[n * OC + oc] * weight[c * OC + oc]'

# ---- attention.h ----
mutation "attention: divides by the sum" test_attention backward attention.h \
    'fm_exp(w[j] - m[j]) * r[j]' 'fm_exp(w[j] - m[j]) / (1.0f / r[j])'
mutation "attention: scores are divided by the root" test_attention forward attention.h \
    's->weights[i] *= shape->scale' 's->weights[i] /= sqrtf((float)shape->HS)'
mutation "attention: the scale goes into q" test_attention forward attention.h \
    's->weights[i] *= shape->scale; }' '(void)i; }' \
    'gemm_panel_(s->weights, TILE_N' 'for (int i = 0; i < TILE_N * shape->HS; i++) { s->q_strip[i] *= shape->scale; }
    gemm_panel_(s->weights, TILE_N'
mutation "attention: D over descending u" test_attention backward attention.h \
    'for (int u = 0; u < t1 + n; u++) {
        const float *w = weights + (size_t)u * TILE_N, *datt' \
    'for (int u = t1 + n - 1; u >= 0; u--) {
        const float *w = weights + (size_t)u * TILE_N, *datt'
mutation "attention: the softmax sum over descending u" test_attention forward attention.h \
    'for (int u = 0; u < t1 + n; u++) {
        float* w = weights + (size_t)u * TILE_N;
        #pragma omp simd
        for (int j = 0; j < TILE_N; j++) { w[j] = fm_exp(w[j] - m[j]); }' \
    'for (int u = t1 + n - 1; u >= 0; u--) {
        float* w = weights + (size_t)u * TILE_N;
        #pragma omp simd
        for (int j = 0; j < TILE_N; j++) { w[j] = fm_exp(w[j] - m[j]); }'
mutation "attention: the maximum sees later keys" test_attention causality attention.h \
    'for (int j = attention_first_(u, t1); j < TILE_N; j++) { m[j] = w[j] > m[j] ? w[j] : m[j]; }' \
    'for (int j = 0; j < TILE_N; j++) { m[j] = w[j] > m[j] ? w[j] : m[j]; }'
mutation "attention: a query does not see itself" test_attention obvious attention.h \
    'for (int u = t1; u <= t1 + j; u++) {
            float w = weights[(size_t)u * TILE_N + j];
            const float* x_u' \
    'for (int u = t1; u < t1 + j; u++) {
            float w = weights[(size_t)u * TILE_N + j];
            const float* x_u'
mutation "attention: later keys are gathered with weight 0" test_attention causality attention.h \
    'for (int u = t1; u <= t1 + j; u++) {
            float w = weights[(size_t)u * TILE_N + j];
            const float* x_u' \
    'for (int u = t1; u < t1 + n; u++) {
            float w = weights[(size_t)u * TILE_N + j];
            const float* x_u'
mutation "attention: later queries scatter with weight 0" test_attention special attention.h \
    'for (int u = t1; u <= t1 + j; u++) {
            float w = weights[(size_t)u * TILE_N + j];
            float* dx_u' \
    'for (int u = t1; u < t1 + n; u++) {
            float w = weights[(size_t)u * TILE_N + j];
            float* dx_u'
mutation "attention: the maximum starts at -inf" test_attention "far scores" attention.h \
    '{ m[j] = -10000.0f; }' '{ m[j] = -INFINITY; }'
mutation "attention: a sum of 0 is inverted" test_attention "far scores" attention.h \
    'sum[j] == 0.0f ? 0.0f : 1.0f / sum[j]' '1.0f / sum[j]'
mutation "attention: ds is scaled before the difference" test_attention backward attention.h \
    'w[j] * (d[j] - D[j]) * scale' 'w[j] * scale * (d[j] - D[j])'
mutation "attention: dk is not started" test_attention backward attention.h \
    'memset(dk + kv + u * stride, 0, sizeof(float) * HS);' ''
mutation "attention: with t0, statistics of every strip go to the first" test_attention cache attention.h \
    'size_t row = attention_at_row(shape, b, h, t1);' 'size_t row = attention_at_row(shape, b, h, shape->t0 ? shape->t0 : t1);'
mutation "attention: the workspace is one strip too small" test_attention forward attention.h \
    's.turned = p;' 's.turned = p - TILE_N * HS_up - TILE_N * T_up;'
mutation "attention: the plain loop forgets D" test_attention "backward differences" attention.h \
    'ds[u] = att[u] * (ds[u] - D) * s->scale' 'ds[u] = att[u] * ds[u] * s->scale'
mutation "attention: the plain loop sees one key too many" test_attention "double" attention.h \
    'if (u < first || u > t) { continue; }' 'if (u < first || u > t + 1) { continue; }' \
    'for (int u = first; u <= t; u++) {
        att[u] = fm_exp' 'for (int u = first; u <= t + (t + 1 < s->T); u++) {
        att[u] = fm_exp'
mutation "attention: a window is one key too long" test_attention "double" attention_shape.h \
    't - s->window + 1' 't - s->window + (t == s->window)'
mutation "attention: heads of a group read different keys" test_attention "grouped" attention.h \
    'b, h / (shape->NH / shape->NKV), 0)' 'b, h % shape->NKV, 0)'
mutation "attention: a group ends with its first head" test_attention "grouped" attention.h \
    'h < (g + 1) * group; h++) {
        attention_backward_head_' 'h < g * group + 1; h++) {
        attention_backward_head_'

# ---- layernorm.h ----
mutation "layernorm: dweight and dbias take rows descending" test_layernorm backward layernorm.h \
    '{ dweight[c] = dbias[c] = 0.0f; }
    for (int n = 0; n < N; n++) {
        const float* x = inp + (size_t)n * C;
        const float* d = dout + (size_t)n * C;
        float m' \
    '{ dweight[c] = dbias[c] = 0.0f; }
    for (int n = N - 1; n >= 0; n--) {
        const float* x = inp + (size_t)n * C;
        const float* d = dout + (size_t)n * C;
        float m'
mutation "layernorm: the mean starts at the first channel" test_layernorm forward layernorm.h \
    'float sum = 0.0f, sum2 = 0.0f;' 'float sum = x[0], sum2 = 0.0f;'
mutation "layernorm: the mean is multiplied by 1/C" test_layernorm forward layernorm.h \
    'm = sum / v_fill((float)C)' 'm = sum * v_fill(1.0f / (float)C)'
mutation "layernorm: eps is 1e-4" test_layernorm "forward double" layernorm.h \
    'LAYERNORM_EPS 1e-5f' 'LAYERNORM_EPS 1e-4f'
mutation "layernorm: dinp is written, not added to" test_layernorm backward layernorm.h \
    'dinp[c] += (weight[c] * dout[c] - mg' 'dinp[c] = (weight[c] * dout[c] - mg'
mutation "layernorm: xhat * mean is regrouped" test_layernorm backward layernorm.h \
    '(inp[c] - m) * s * mgx' '(inp[c] - m) * (s * mgx)'
mutation "layernorm: rstd is applied after the weight" test_layernorm forward layernorm.h \
    'y[c] = s * (x[c] - m) * weight[c] + bias[c]' 'y[c] = (x[c] - m) * weight[c] * s + bias[c]'
mutation "layernorm: dweight is added to" test_layernorm backward layernorm.h \
    'for (int c = first; c < last; c++) { dweight[c] = dbias[c] = 0.0f; }' ''
mutation "layernorm: both loops forget the mean of g * xhat" test_layernorm "backward differences" layernorm.h \
    '- mean_g - (inp[c] - mean) * rstd * mean_gx) * rstd' '- mean_g) * rstd + 0 * mean_gx' \
    '- mg - (inp[c] - m) * s * mgx) * s' '- mg) * s + 0 * mgx'

# ---- gelu.h ----
mutation "gelu: k is one unit too large" test_gelu obvious gelu.h '0.797884524f' '0.797884583f'
mutation "gelu: the cube is regrouped" test_gelu frozen gelu.h \
    'float cube = 0.044715f * x * x * x;
    return' 'float cube = 0.044715f * (x * x * x);
    return'
mutation "gelu: the slope is regrouped" test_gelu known gelu.h \
    'x * 0.5f * sech2 * GELU_K' 'x * 0.5f * (sech2 * GELU_K)'
mutation "gelu: the slope forgets tanh'" test_gelu double gelu.h '+ x * 0.5f * sech2' '+ 0 * x * 0.5f * sech2'
mutation "gelu: dinp is added to" test_gelu lengths gelu.h \
    '#pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) { dinp[i] =' '#pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) { dinp[i] +='

# ---- crossentropy.h ----
mutation "softmax: multiplies by the reciprocal" test_crossentropy shapes crossentropy.h \
    '{ p[v] /= sum; }' '{ p[v] *= 1.0f / sum; }'
mutation "softmax: columns of a square descend" test_crossentropy shapes crossentropy.h \
    'for (int i = 0; i < VLANES; i++) { sum += columns[i]; }' \
    'for (int i = VLANES - 1; i >= 0; i--) { sum += columns[i]; }'
mutation "softmax: the padding counts" test_crossentropy shapes crossentropy.h \
    'softmax_exponentials_(probs, logits, sums, V, Vp)' 'softmax_exponentials_(probs, logits, sums, Vp, Vp)'
mutation "softmax: the maximum starts at the first logit" test_crossentropy huge crossentropy.h \
    '{ lane[i] = -10000.0f; }' '{ lane[i] = logits[0]; }'
mutation "softmax: the padding of probs keeps what was there" test_crossentropy "not counted" crossentropy.h \
    'memset(p + V, 0, sizeof(float) * (Vp - V));' ''
mutation "crossentropy: the padding of dlogits keeps what was there" test_crossentropy shapes crossentropy.h \
    'memset(d + V, 0, sizeof(float) * (Vp - V));' ''
mutation "crossentropy: divides by 1 / dloss" test_crossentropy shapes crossentropy.h \
    'd[v] = p[v] * dloss' 'd[v] = p[v] / (1.0f / dloss)'
mutation "crossentropy: the target is read after it was overwritten" test_crossentropy shapes crossentropy.h \
    'd[target] = dtarget;' 'd[target] = (p[target] - 1.0f) * dloss; (void)dtarget;'
mutation "crossentropy: a row that is not counted has a loss" test_crossentropy "not counted" crossentropy.h \
    'losses[r] = target < 0 ? 0.0f : -fm_log(p[target])' 'losses[r] = -fm_log(p[target < 0 ? 0 : target])'
mutation "crossentropy: the loss alone overwrites the logits" test_crossentropy shapes crossentropy.h \
    'float* probs = scratch + thread_number() * n_scratch;' \
    'float* probs = logits + (size_t)first * Vp; (void)scratch; (void)n_scratch;'
mutation "crossentropy: both loops have the wrong sign" test_crossentropy "backward differences" crossentropy.h \
    'probs[i] - (v == targets[n] ? 1.0f : 0.0f)' 'probs[i] + (v == targets[n] ? 1.0f : 0.0f)' \
    '(p[target] - 1.0f) * dloss;  //' '(p[target] + 1.0f) * dloss;  //'

# ---- embedding.h ----
mutation "embedding: positions descend" test_embedding embedding embedding.h \
    'for (int n = 0; n < B * T; n++) {
            const float* d' 'for (int n = B * T - 1; n >= 0; n--) {
            const float* d'
mutation "embedding: t0 is ignored" test_embedding embedding embedding.h 'C, t0 + n % T' 'C, n % T'
mutation "embedding: a thread's last channel is left out" test_embedding embedding embedding.h \
    'first + width < C ? first + width : C;
        for (int n = 0; n < B * T' 'first + width < C ? first + width - 1 : C;
        for (int n = 0; n < B * T'

# ---- adamw.h, global_norm.h ----
mutation "adamw: eps inside the root" test_adamw lengths adamw.h \
    'sqrtf(v_new / a.correction2) + a.eps' 'sqrtf(v_new / a.correction2 + a.eps)'
mutation "adamw: both loops square the gradient first" test_adamw frozen adamw.h \
    '(1.0f - a->beta2) * grad * grad' '(1.0f - a->beta2) * (grad * grad)' \
    '(1.0f - a.beta2) * grad * grad' '(1.0f - a.beta2) * (grad * grad)'
mutation "adamw: both loops ignore grad_scale" test_adamw double adamw.h \
    'g[i] * a->grad_scale' 'g[i]' 'g * a.grad_scale' 'g'
mutation "adamw: corrections are rounded twice" test_adamw corrections adamw.h \
    '(float)(1.0 - fm_powi((double)beta2, t))' '1.0f - (float)fm_powi((double)beta2, t)'
mutation "adamw: lr is distributed" test_adamw lengths adamw.h \
    '+ weight_decay * p);' ') - a.lr * (weight_decay * p);'
mutation "rounding: a random number has 15 bits" test_adamw rounding rng.h 'noise & 0xffffu' 'noise & 0x7fffu'
mutation "rounding: a NaN may become an infinity" test_adamw rounding rng.h \
    'u & 0x007fffffu ? 0x40u : 0u' '0u'
mutation "global norm: chunks of 2048" test_adamw "norm order" global_norm.h 'NORM_CHUNK = 4096' 'NORM_CHUNK = 2048'
mutation "global norm: 8 lanes" test_adamw "norm order" global_norm.h 'NORM_LANES = 16' 'NORM_LANES = 8'
mutation "global norm: squares are floats" test_adamw "norm obvious" global_norm.h \
    '{ lane[j] += (double)a[i + j] * (double)b[i + j]; }
    }' '{ lane[j] += (double)(a[i + j] * b[i + j]); }
    }'
mutation "global norm: chunks are added descending" test_adamw "norm order" global_norm.h \
    '{ sum += on_host[chunk]; }' '{ sum += on_host[n_chunks - 1 - chunk]; }'
mutation "global norm: threads forget the total before" test_adamw "norm obvious" global_norm.h \
    'double* sums = (double*)dev' 'sum = 0; double* sums = (double*)dev'

# ---- gradient_surgery.h, forward_forward.h ----
mutation "surgery: pcgrad tests the task's own gradient" test_gradient_surgery "pcgrad three" gradient_surgery.h \
    'if (dot < 0.0) {' 'if (dots[i * n + j] < 0.0) {'
mutation "surgery: pcgrad takes the same order in every step" test_gradient_surgery "pcgrad three" gradient_surgery.h \
    'splitmix64(seed, 0), step)' 'splitmix64(seed, 0), 0)'
mutation "surgery: cagrad stops halving too early" test_gradient_surgery "cagrad best" gradient_surgery.h 'i < 60' 'i < 20'
mutation "surgery: gradnorm learns from a NaN" test_gradient_surgery "gradnorm steps" gradient_surgery.h \
    'isfinite(dots[k * n + k]) ?' '1 ?'
mutation "surgery: blocks of a range overlap" test_gradient_surgery bits gradient_surgery.h 'first += BLOCK' 'first += BLOCK - 1'
mutation "surgery: rust_trainer's formulas see the first range only" test_gradient_surgery "rt ranges" gradient_surgery.h \
    'dots + (size_t)r * 4, &s' 'dots, &s'
mutation "forward-forward: a row may stay real" test_forward_forward "corrupt rows" forward_forward.h 'if (n_replaced == 0)' 'if (0)'
mutation "forward-forward: goodness adds columns backwards" test_forward_forward "goodness bits" forward_forward.h \
    'for (int i = 0; i < VLANES; i++) { sum += columns' 'for (int i = VLANES - 1; i >= 0; i--) { sum += columns'
mutation "forward-forward: the complete gradient lacks a length" test_forward_forward "rt gradient" forward_forward.h \
    '/ length / l / l' '/ length / l'
mutation "forward-forward: the hinge hides a NaN" test_forward_forward "rt edges" forward_forward.h \
    'hinge <= 0.0f) {' '!(hinge > 0.0f)) {'

# ---- comm.h, data_parallel.h ----
mutation "comm: the first rank is added last" test_comm "reductions order" comm.h \
    'comm_combine_(got, got + (size_t)i * n_own' 'comm_combine_(got, got + (size_t)(c->size - i) * n_own'
mutation "comm: last words are not heard" test_comm "fault: failed" comm.h '        blamed = note;' ''
mutation "comm: COMM_CHECK does not compare counts" test_comm mismatched comm.h 'mine[i].count = count;' ''
mutation "comm: a call is done when all is sent" test_comm async comm.h 'call->n_open = 2 * (l->size - 1);' 'call->n_open = l->size - 1;'
mutation "zero: what is left at the end is not joined" test_comm "tree plan" data_parallel.h 'lo == s->n_leaves || ' ''
mutation "zero: the norm forgets the other ranks" test_comm "dp train" data_parallel.h \
    'if (s->size > 1) { comm_all_gather_shares(s->comm, s->chunk_sums' 'if (0) { comm_all_gather_shares(s->comm, s->chunk_sums'
mutation "zero: losses are joined from the last" test_comm "dp train" data_parallel.h \
    'sorted[dp_leaf_of_(s, rank, k)]' 'sorted[s->n_leaves - 1 - dp_leaf_of_(s, rank, k)]'
mutation "zero: a round overwrites one that is pending" test_comm "dp train" data_parallel.h \
    '    dp_finish_half_(s, s->half, dev);
    memset' '    memset'
mutation "zero: new parameters stay with their owner" test_comm "dp train" data_parallel.h \
    'if (s->zero > 0) { dp_gather(s, w->stored, w->stored_bytes, NULL, dev); }
}

// arena: of what' '}

// arena: of what'
mutation "zero 2: both layers in one place" test_comm "dp train" data_parallel.h \
    'first % s->leaf[tensor].n' 'first % tensor_layer_elements(&s->table[tensor])'
mutation "zero 2: nodes that wait for the next round are lost" test_comm "dp train" data_parallel.h \
    'if (stack[i] != s->tree.arena[i] + at) {' 'if (s->zero < 2 && stack[i] != s->tree.arena[i] + at) {'
mutation "zero 2: nodes of earlier rounds are forgotten" test_comm "dp train" data_parallel.h 'while (top + 1 < s->n_open)' 'while (0)'
mutation "zero: who has no leaf does not take part" test_comm "dp train" data_parallel.h \
    'if (s->n_joined < s->n_nodes) { dp_idle_round_(s, dev); }' ''
mutation "zero: the last leaf is sent before it has joined" test_comm "dp train" data_parallel.h 'if (s->zero < 2 && has_leaf) {' 'if (0 && has_leaf) {'
mutation "zero 2: leaves as with the others" test_comm "dp train" data_parallel.h \
    'return s->zero == 2 ? k * s->size + rank' 'return s->zero == 3 ? k * s->size + rank'
mutation "zero: frozen experts beside others count in the norm" test_comm "dp frozen" data_parallel.h 'dp_clear_frozen_(s, grads, dev);
    return' 'return'
mutation "zero: a chunk covered in part begins where a stretch does" test_comm "dp frozen" data_parallel.h \
    's->edge + (part.first - begin)' 's->edge'
mutation "zero: a chunk of two stretches is the first's alone" test_comm "dp frozen" data_parallel.h \
    's->stretches[i].tensor == tensor; i++) {' 's->stretches[i].tensor == tensor; i = s->n_stretches) {'
mutation "zero: a chunk of two stretches counts twice" test_comm "dp frozen" data_parallel.h \
    'before->whole.n - 1) / NORM_CHUNK == first) { x.chunk--; }' 'before->whole.n - 1) / NORM_CHUNK == first) { }'
mutation "zero: what is frozen is updated" test_comm "dp frozen" data_parallel.h 'dp_is_frozen_(s, slice) ? 0 : ' ''
mutation "zero: what learns anew takes its moments from elsewhere" test_comm "dp resume" moments.h 'file = is_new ? -1 : file;' \
    'file = is_new ? 0 : file;'
mutation "zero: slices are corrected as often as the run" test_comm "dp slices" data_parallel.h 'o->eps, scale, count);' 'o->eps, scale, t);'
mutation "zero: slices without an update decay" test_comm "dp slices" data_parallel.h 'part.n == 0 || count == 0' 'part.n == 0'
mutation "zero: neighbours go together whatever their counts" test_comm "dp slices" data_parallel.h 'slice + end, t) == count' 'slice + end, t) > 0'
mutation "evaluate: the mean is over all targets" test_comm evaluate evaluate.h 'e->targets[n] >= 0; }' '1; }'
mutation "evaluate: scores of the other ranks are forgotten" test_comm evaluate evaluate.h \
    'comm_all_reduce(e->comm, scores, (size_t)n_batches' 'if (0) comm_all_reduce(e->comm, scores, (size_t)n_batches'

# ---- leaf_tree.h, rng.h, tensor.h, layers.h, sampler.h ----
mutation "leaf tree: leaves are added from left to right" test_tensor "leaf tree" leaf_tree.h \
    'left_size == right_size && ' 'left_size > 0 || '
mutation "leaf tree: the loss takes another way" test_tensor "leaf tree" leaf_tree.h \
    'x[top - 1] = x[top - 1] + x[top]' 'x[0] += x[top]'
mutation "leaf tree: one arena too many" test_tensor "leaf tree" leaf_tree.h 'depth = 1;' 'depth = 2;'
mutation "rng: the float takes other bits" test_tensor rng rng.h 'mt19937_u32(mt) & 0xffffff' 'mt19937_u32(mt) >> 8'
mutation "rng: the low word comes first" test_tensor rng rng.h \
    'high << 32 | mt19937_u32(mt)' 'high | (uint64_t)mt19937_u32(mt) << 32'
mutation "rng: the last group is not drawn anew" test_tensor "rng normal" rng.h \
    'for (size_t i = n - 16; i < n; i++) { x[i] = mt19937_float(mt); }' ''
mutation "tensor: tensors start at multiples of 32 bytes" test_tensor tensor tensor.h '+ 15) / 16 * 16' '+ 7) / 8 * 8'
mutation "tensor: the padding is drawn too" test_tensor "tensor init" tensor.h \
    'normal_fill(&mt, x, n_disk' 'normal_fill(&mt, x, n_slice'
mutation "tensor: a uniform number is rounded twice" test_tensor "rng uniform" rng.h \
    '(float)((double)mt19937_float(mt) * width + (double)low)' 'mt19937_float(mt) * (float)width + low'
mutation "layers: one layer stands for all" test_tensor freeze layers.h \
    'tensor_name(name, sizeof name, &table[i])' 'tensor_slice_name(name, sizeof name, &table[i], 0)'
mutation "layers: slices are counted as layers" test_tables freeze layers.h 'begin = tensor_slice(&table[i], l);' 'begin = l;'
mutation "tensor: a row hides another of its field" test_tables point tensor.h 'if (slice < 0) { continue; }' ''
mutation "tensorfile: experts are turned as one matrix" test_tables files tensorfile.h \
    'const int n_matrices = tensor_experts_fused_(t) ? t->experts : 1;' 'const int n_matrices = 1;'
mutation "layers: new ones stand one further" test_tensor placement layers.h 'first = first < base ? first : base;' 'first = first < base ? first + 1 : base;'
mutation "sampler: ties go to the higher index" test_tensor sampler sampler.h \
    'x->token - y->token' 'y->token - x->token'
mutation "sampler: greedy takes the last of equals" test_tensor "sampler greedy" sampler.h \
    'logits[v] > logits[best]' 'logits[v] >= logits[best]'
mutation "sampler: a coin of 0 takes an impossible token" test_tensor "sampler possible" sampler.h \
    'coin * total < sum' 'coin * total <= sum'
mutation "sampler: top-p goes one token further" test_tensor "sampler shares" sampler.h \
    'sum < top_p * total' 'sum <= top_p * total'
mutation "sampler: top-k is applied to unsorted candidates" test_tensor "sampler shares" sampler.h \
    'if (top_k > 0 || top_p < 1.0f) { qsort' 'if (top_p < 1.0f) { qsort'
mutation "sampler: multiplies by the temperature" test_tensor "sampler shares" sampler.h \
    '/ temperature);' '* temperature);'

# ---- causal_conv1d.h, selective_scan.h, hpn.h, mamba.h, train_mamba_hpn.c ----
mutation "conv: a document sees the one before" test_causal_conv1d documents causal_conv1d.h \
    'return t - (w->K - 1) > begin ? t - (w->K - 1) : begin;' 'const int least = w->history ? -(w->K - 1) : 0;
    return t - (w->K - 1) > least ? t - (w->K - 1) : least + 0 * begin;'
mutation "conv: dinp adds taps descending" test_causal_conv1d shapes causal_conv1d.h \
    'for (int q = conv1d_last_(w, b, t); q >= t; q--) {
        conv1d_pair_' 'for (int q = t; q <= conv1d_last_(w, b, t); q++) {
        conv1d_pair_'
mutation "scan: a document passes its gradient on to the one before" test_selective_scan documents selective_scan.h \
    'if (s->starts && s->starts[bt]) { scan_zero_(k->lambda, tile); }' ''
mutation "scan: rows and groups are added descending" test_selective_scan bits selective_scan.h \
    'for (int p = 0; p < n_parts; p++, parts += step) {' 'parts += step * (size_t)(n_parts - 1);
    for (int p = 0; p < n_parts; p++, parts -= step) {'
mutation "hpn: a prototype learns of rows descending" test_hpn shapes hpn.h \
    'for (int n = 0; n < N; n++) {
        if (targets[n] < 0) { continue; }' 'for (int n = N - 1; n >= 0; n--) {
        if (targets[n] < 0) { continue; }'
mutation "hpn: a unit row's gradient keeps its own direction" test_hpn differences hpn.h \
    'out[c] = (d[c] - u[c] * dot) / length' 'out[c] = (d[c] - 0.0f * u[c] * dot) / length'
mutation "mamba: A begins at 0" test_mamba_hpn "start values" mamba.h '(float)(i % c->NS + 1)' '(float)(i % c->NS + 2)'
mutation "mamba: new layers are not silent" test_mamba_hpn expansion mamba.h 'if (old && old[l] < 0) { memset' 'if (0) { memset'
mutation "train_mamba_hpn: carried states begin anew with each piece" test_mamba_hpn generation train_mamba_hpn.c \
    'memcpy(carried_state(s, c, s->next, l), carried_state(s, c, s->now, l)' 'memset(carried_state(s, c, s->next, l), 0'
mutation "train_mamba_hpn: a layer computed again forgets its gate" test_mamba_hpn "chunks" train_mamba_hpn.c \
    'if (acts->room.recompute == RECOMPUTE_LAYER) { layer_forward' 'if (0) { layer_forward'

wait
n_failed=$(find "$work" -name 'failed.*' | wc -l)
echo "$((n - n_failed)) passed, $n_failed failed"
[ "$n_failed" -eq 0 ] && [ "$n" -gt 0 ]
