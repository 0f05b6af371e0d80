/*
What op_main promises of every table (op.h), each where the table has what it needs, and shapes to show it:
    forward, backward   the plain loop's bits at every shape, for 1, 2, 3 and 7 threads, wherever arrays may lie;
                        nothing is left unwritten, what is only given stays as it is. Fast kernels: within `apart`
    ... special         the same with cancellation, subnormals, -0, then with a few, then with many Inf and NaN
    asked               every choice of gradients, NULL for the others and for what only those need: the same bits
    rows apart          Inf or NaN in a row reaches no other row
    bf16                fast kernels on bf16 are within `apart` and 2^-8 of the result
    forward double      the plain loop is within `error` of its formula in double
    backward differences   and its gradients of the finite differences of that
*/
#ifndef LLMC_OP_PROMISES_H
#define LLMC_OP_PROMISES_H
#include "op.h"  // Op, OpProblem, op_check

enum { OP_PROMISES = 96 };  // of one test program, at most

// ---- bits at every shape; t->about is the op ----

static inline int op_larger_(const OpProblem* p, size_t most) {
    for (int i = 0; i < p->n; i++) {
        if (op_length(p, i) > most) { return 1; }
    }
    return 0;
}

// all arrays between two packs of a kernel, then one of them elsewhere than the others
static inline void op_check_shifted_(Test* t, const OpProblem* p, int backward) {
    OpRun r = op_run_of_(backward, 0);
    Device dev = test_device(2);
    for (r.shift = 1; r.shift < 2 + p->n; r.shift++) {
        if (r.shift == 1 || backward || !op_is_(p, r.shift - 2, GRADIENT)) { op_check_run_(t, p, &r, &dev); }
    }
    device_free(&dev);
}

// kernels meet hard numbers in small problems only: large ones would take dev/simt minutes
static inline void op_check_shapes_(Test* t, int backward, int first_kind, int last_kind, int as_bf16) {
    const Op* op = (const Op*)t->about;
    int n_tried = 0, n_shifted = !(op->traits & ANYWHERE) || first_kind != EASY;
    for (int i = 0; op->shapes[i][0]; i++) {
        for (int kind = first_kind; kind <= last_kind; kind++) {
            OpProblem p = op_problem(op, op->shapes[i], kind, as_bf16);
            int too_large = N_TEST_THREADS == 1 && kind != EASY && op_larger_(&p, 3000);
            int shifts = op->traits & ANYWHERE && kind == EASY && !op_larger_(&p, 4096);
            if (shifts) { op_check_shifted_(t, &p, backward); }
            n_shifted += shifts, n_tried += !too_large;
            for (int j = 0; j < N_TEST_THREADS && !too_large; j++) {
                Device dev = test_device(test_threads(j));
                op_check(t, &p, backward, &dev);
                device_free(&dev);
            }
            op_problem_free(&p);
        }
    }
    check(t, n_tried > 0 && n_shifted > 0, "no shape is small enough");
}

static inline void op_test_forward_(Test* t) { op_check_shapes_(t, 0, EASY, EASY, 0); }
static inline void op_test_backward_(Test* t) { op_check_shapes_(t, 1, EASY, EASY, 0); }
static inline void op_test_forward_special_(Test* t) { op_check_shapes_(t, 0, HARD, MANY_SPECIALS, 0); }
static inline void op_test_backward_special_(Test* t) { op_check_shapes_(t, 1, HARD, MANY_SPECIALS, 0); }

static inline void op_test_bf16_(Test* t) {
    const Op* op = (const Op*)t->about;
    if (op->forward_ref) { op_check_shapes_(t, 0, EASY, EASY, 1); }
    if (op->backward_ref) { op_check_shapes_(t, 1, EASY, EASY, 1); }
}

// ---- asked ----

// the arrays that are NULL where bit k of `asked` is not set: the k-th ASKED one, and what is needed for no other
static inline int op_null_(const OpProblem* p, int asked) {
    int null = 0;
    for (int i = 0, k = 0; i < p->n; i++) {
        if (op_is_(p, i, ASKED)) { null |= !(asked >> k++ & 1) << i; }
    }
    for (int i = 0; i < p->n; i++) {
        int needed = !p->op->arrays[i].needed;
        for (int j = 0; j < p->n; j++) {
            needed |= op_listed_(p->op->arrays[i].needed, p->op->arrays[j].name) && !(null >> j & 1);
        }
        null |= !needed << i;
    }
    return null;
}

// against the call that is asked for everything: of fast kernels too the bits are the same
static inline void op_check_asked_(Test* t, const OpProblem* p, int plain, const Device* dev) {
    float *all[OP_ARRAYS] = {NULL}, *some[OP_ARRAYS] = {NULL};
    char title[256];
    int n_asked = 0;
    OpRun r = op_run_of_(1, plain);
    for (int i = 0; i < p->n; i++) { n_asked += op_is_(p, i, ASKED); }
    op_run_(t, all, p, &r, dev);
    for (int asked = 0; asked < 1 << n_asked; asked++) {
        r.null = op_null_(p, asked);
        op_run_(t, some, p, &r, dev);
        for (int i = 0; i < p->n; i++) {
            if (some[i]) { check_bits(t, op_title_(title, p, i, &r, dev), some[i], all[i], op_length(p, i)); }
        }
        op_free_(some);
    }
    op_free_(all);
}

static inline void op_test_asked_(Test* t) {
    const Op* op = (const Op*)t->about;
    Device dev = test_device(3);
    int n_tried = 0;
    for (int i = 0; op->shapes[i][0]; i++) {
        OpProblem p = op_problem(op, op->shapes[i], HARD, 0);
        for (int plain = 0; plain < 2 && !op_larger_(&p, 10000); plain++, n_tried++) {
            op_check_asked_(t, &p, plain, &dev);
        }
        op_problem_free(&p);
    }
    check(t, n_tried > 0, "no shape is small enough");
    device_free(&dev);
}

// ---- rows apart ----

static inline int op_has_rows_(const OpProblem* p, int i) { return p->op->arrays[i].extents[0] == p->op->dims[0]; }

// p with an infinity or a NaN in one element of `row` of each array that has rows; those are copies
static inline OpProblem op_spoilt_(const OpProblem* p, int row) {
    OpProblem q = *p;
    for (int i = 0; i < p->n; i++) {
        size_t width = op_length(p, i) / (size_t)p->d[(int)p->op->dims[0]];
        if (!op_has_rows_(p, i) || !op_is_(p, i, GIVEN) || op_is_(p, i, INDEX) || width == 0) { continue; }
        q.a[i] = copied_array(p->a[i], op_length(p, i));
        q.a[i][(size_t)row * width + (size_t)(7 * i + 3 * row) % width] = row % 2 ? INFINITY : NAN;
    }
    return q;
}

static inline void op_check_rows_(Test* t, const OpProblem* p, int backward, const Device* dev) {
    const int N = p->d[(int)p->op->dims[0]], step = N_TEST_THREADS > 1 ? 5 : N / 3 + 1;
    float *want[OP_ARRAYS] = {NULL}, *got[OP_ARRAYS] = {NULL};
    OpRun r = op_run_of_(backward, 0);
    op_run_(t, want, p, &r, dev);
    for (int spoilt = 0; spoilt < N; spoilt += step) {
        OpProblem q = op_spoilt_(p, spoilt);
        op_run_(t, got, &q, &r, dev);
        for (int i = 0; i < p->n; i++) {
            size_t width = op_length(p, i) / (size_t)N;
            for (int n = 0; got[i] && op_has_rows_(p, i) && op_writes_(p, i, &r) && n < N; n++) {
                size_t row = (size_t)n * width;
                int same = memcmp(got[i] + row, want[i] + row, sizeof(float) * width) == 0;
                check(t, same || n == spoilt, "%s %s: Inf or NaN in row %d of %d reaches row %d", p->op->name,
                      p->op->arrays[i].name, spoilt, N, n);
            }
            if (q.a[i] != p->a[i]) { free(q.a[i]); }
        }
        op_free_(got);
    }
    op_free_(want);
}

static inline void op_test_rows_apart_(Test* t) {
    const Op* op = (const Op*)t->about;
    Device dev = test_device(2);
    int n_tried = 0;
    for (int i = 0; op->shapes[i][0]; i++) {
        OpProblem p = op_problem(op, op->shapes[i], EASY, 0);
        int small = !op_larger_(&p, 3000);
        if (op->forward_ref && small) { op_check_rows_(t, &p, 0, &dev); }
        if (op->backward_ref && small) { op_check_rows_(t, &p, 1, &dev); }
        n_tried += small && p.d[(int)op->dims[0]] > 1;
        op_problem_free(&p);
    }
    check(t, n_tried > 0, "no shape of several rows is small enough");
    device_free(&dev);
}

// ---- double ----

typedef struct {
    const OpProblem* p;
    double* x[OP_ARRAYS];
} OpDouble;

// the array of that name, if it has one of those roles; else -1
static inline int op_find_(const OpProblem* p, const char* name, int role) {
    for (int i = 0; i < p->n; i++) {
        if (strcmp(p->op->arrays[i].name, name) == 0 && op_is_(p, i, role)) { return i; }
    }
    return -1;
}

// x of dx
static inline int op_of_(const OpProblem* p, int i, int role) {
    const char* name = p->op->arrays[i].name;
    return name[0] == 'd' ? op_find_(p, name + 1, role) : -1;
}

// sum of x * dx over what is MADE; x: one of the arrays of arg
static inline double op_loss_(const double* x, void* arg) {
    const OpDouble* o = (const OpDouble*)arg;
    double loss = 0.0;
    (void)x;
    o->p->op->in_double(o->x, o->p->d);
    for (int i = 0; i < o->p->n; i++) {
        int made = op_is_(o->p, i, GIVEN) ? op_of_(o->p, i, MADE) : -1;
        for (size_t j = 0; made >= 0 && j < op_length(o->p, i); j++) { loss += o->x[i][j] * o->x[made][j]; }
    }
    return loss;
}

// array i of the plain loop: what is MADE against the formula, a gradient against finite differences
static inline int op_check_double_(Test* t, OpDouble* o, int i, int role) {
    const OpProblem* p = o->p;
    int of = role == GRADIENT ? op_of_(p, i, GIVEN) : i;
    double error = op_is_(p, i, role) ? p->op->error(i, p->d) : -1.0;
    if (error < 0.0) { return 0; }
    if (of < 0) { fail_run("%s: %s is the gradient of no GIVEN array", p->op->name, p->op->arrays[i].name); }
    double* want = role == GRADIENT ? finite_differences(op_loss_, o->x[of], op_length(p, of), o) : o->x[i];
    for (size_t j = 0; op_is_(p, i, ADDED) && j < op_length(p, i); j++) { want[j] += (double)p->before[i][j]; }
    check_close(t, p->op->arrays[i].name, p->a[i], want, op_length(p, i), error);
    if (role == GRADIENT) { free(want); }
    return 1;
}

static inline void op_judge_(Test* t, int role) {
    const Op* op = (const Op*)t->about;
    int n_judged = 0;
    for (int k = 0; k < OP_JUDGED && op->judged[k][0]; k++) {
        OpProblem p = op_problem(op, op->judged[k], EASY, 0);
        OpDouble o = {&p, {NULL}};
        for (int i = 0; i < p.n; i++) {
            o.x[i] = double_array(p.a[i], op_length(&p, i));
            for (size_t j = 0; op_is_(&p, i, INDEX) && j < op_length(&p, i); j++) { o.x[i][j] = ((int*)p.a[i])[j]; }
        }
        op->in_double(o.x, p.d);
        for (int i = 0; i < p.n; i++) { n_judged += op_check_double_(t, &o, i, role); }
        for (int i = 0; i < p.n; i++) { free(o.x[i]); }
        op_problem_free(&p);
    }
    check(t, n_judged > 0, "nothing is judged");
}

static inline void op_test_double_(Test* t) { op_judge_(t, MADE); }
static inline void op_test_differences_(Test* t) { op_judge_(t, GRADIENT); }

// ---- the promises of a program ----

typedef struct {
    Promise promises[OP_PROMISES];
    char names[OP_PROMISES][48], texts[OP_PROMISES][128];
    int n;
} OpPromises;

// the text begins with the names of the arrays of that role
static inline void op_add_(OpPromises* o, const Op* op, const char* name, void (*run)(Test*), int role,
                           const char* text) {
    size_t used = 0;
    if (o->n == OP_PROMISES) { fail_run("%s: more than %d promises", op->name, OP_PROMISES); }
    char *whole = o->texts[o->n], *title = o->names[o->n];
    for (int i = 0; i < op_n_arrays_(op); i++) {
        const OpArray* r = &op->arrays[i];
        if (!(r->role & role) || used > 60) { continue; }
        used += (size_t)snprintf(whole + used, 128 - used, "%s%s%s", used ? ", " : "", r->name,
                                 r->role & ADDED ? " (added)" : "");
    }
    snprintf(whole + used, 128 - used, "%s%s", used ? ": " : "", text);
    snprintf(title, 48, "%s %s", op->name, name);
    Promise promise = {title, whole, run, op};
    o->promises[o->n++] = promise;
}

static inline void op_add_all_(OpPromises* o, const Op* op) {
    op_check_table_(op);
    const char* bits = FAST_KERNELS ? "what fast kernels may be apart from the plain loop, at odd shapes"
                                    : "the plain loop's bits at odd shapes";
    const char* special = "the same with cancellation, subnormals, -0, Inf, NaN";
    int has_special = !FAST_KERNELS || op->traits & SPECIAL_KERNELS, asked = 0;
    for (int i = 0; i < OP_ARRAYS; i++) { asked |= op->arrays[i].role & ASKED; }
    if (op->forward_ref) {
        op_add_(o, op, "forward", op_test_forward_, MADE, bits);
        if (has_special) { op_add_(o, op, "forward special", op_test_forward_special_, 0, special); }
    }
    if (op->backward_ref) {
        op_add_(o, op, "backward", op_test_backward_, GRADIENT, bits);
        if (has_special) { op_add_(o, op, "backward special", op_test_backward_special_, 0, special); }
    }
    if (asked) {
        op_add_(o, op, "asked", op_test_asked_, 0,
                "gradients that nobody asks for are NULL: the others keep their bits");
    }
    if (op->traits & ROWS) {
        op_add_(o, op, "rows apart", op_test_rows_apart_, 0, "Inf or NaN in a row reaches no other row");
    }
    if (FAST_KERNELS) { op_add_(o, op, "bf16", op_test_bf16_, MADE | GRADIENT, "within the rounding of bf16"); }
    if (op->in_double && op->forward_ref) {
        op_add_(o, op, "forward double", op_test_double_, 0, "the plain loop agrees with double");
    }
    if (op->in_double && op->backward_ref) {
        op_add_(o, op, "backward differences", op_test_differences_, 0,
                "the plain loop agrees with finite differences of it");
    }
}

// the promises of a file's own come first: where they fork, the program must not have threads yet
static inline int op_main(int argc, char** argv, const Op* const* ops, size_t n_ops, const Promise* own, size_t n_own) {
    OpPromises o;
    o.n = 0;
    for (size_t i = 0; i < n_own; i++) { o.promises[o.n++] = own[i]; }
    for (size_t i = 0; i < n_ops; i++) { op_add_all_(&o, ops[i]); }
    return test_main(argc, argv, o.promises, (size_t)o.n);
}
#endif  // LLMC_OP_PROMISES_H
