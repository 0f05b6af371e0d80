/*
Promises of llmc/ranks/pipeline_schedule.h, counted out for every pipeline of up to 16 ranks, 4 chunks and 64
micro-batches: nobody waits for ever, what an operation reads was made before, and time and memory are as said.
*/
#include "llmc/ranks/pipeline_ranks.h"
#include "llmc/ranks/pipeline_schedule.h"
#include "llmc/test/test.h"

enum { MOST_RANKS = 16, MOST_CHUNKS = 4, MOST_MICRO = 64, MOST_STAGES = MOST_RANKS * MOST_CHUNKS };

typedef void Examine(Test* t, const PpSchedule* x);

static const char* named(const PpShape* s) {
    static char text[64];
    static PpShape last;  // millions of checks ask, and all of them of one shape after the other
    if (s->p != last.p || s->v != last.v || s->m != last.m) {
        snprintf(text, sizeof text, "p %d, v %d, m %d", s->p, s->v, s->m);
        last = *s;
    }
    return text;
}

// returns how many there were
static int each_pipeline(Test* t, Examine* examine) {
    int n = 0;
    for (int p = 1; p <= MOST_RANKS; p++) {
        for (int v = 1; v <= MOST_CHUNKS; v++) {
            for (int m = 1; m <= MOST_MICRO; m++) {
                const PpShape shape = {p, v, m};
                PpSchedule x;
                if (pp_check(&shape)) { continue; }
                pp_open(&x, shape);
                examine(t, &x);
                pp_free(&x);
                n++;
            }
        }
    }
    return n;
}

static const PpOp* ops_of(const PpSchedule* x, int rank) { return x->ops + (size_t)rank * x->n_ops; }

// ---- the order of a rank ----

// each chunk of a rank: every micro-batch once forward, then once backward; both directions ascend
static void examine_order(Test* t, const PpSchedule* x) {
    const PpShape* s = &x->shape;
    check(t, x->n_ops == 2 * s->v * s->m, "%s: found %d operations", named(s), x->n_ops);
    for (int rank = 0; rank < s->p; rank++) {
        int next[2][MOST_CHUNKS] = {{0}};
        for (int i = 0; i < x->n_ops; i++) {
            const PpOp op = ops_of(x, rank)[i];
            const int expected = next[op.is_backward][op.chunk]++;
            check(t, op.micro == expected, "%s, rank %d, operation %d: expected micro-batch %d, found %d", named(s),
                  rank, i, expected, op.micro);
            check(t, !op.is_backward || op.micro < next[0][op.chunk], "%s, rank %d: backward of %d before forward",
                  named(s), rank, op.micro);
        }
        for (int chunk = 0; chunk < s->v; chunk++) {
            check(t, next[0][chunk] == s->m && next[1][chunk] == s->m, "%s, rank %d, chunk %d: %d and %d of %d",
                  named(s), rank, chunk, next[0][chunk], next[1][chunk], s->m);
        }
    }
}

static void test_order(Test* t) {
    const int n = each_pipeline(t, examine_order);
    check(t, n > 1000, "expected more than 1000 pipelines, found %d", n);
}

// ---- ticks: written down by operation, and read again by what each needs ----

typedef struct { int forward[MOST_MICRO][MOST_STAGES], backward[MOST_MICRO][MOST_STAGES]; } Ticks;

static void note_ticks(Ticks* ticks, const PpSchedule* x) {
    for (int rank = 0; rank < x->shape.p; rank++) {
        for (int i = 0; i < x->n_ops; i++) {
            const PpOp op = ops_of(x, rank)[i];
            (op.is_backward ? ticks->backward : ticks->forward)[op.micro][op.chunk * x->shape.p + rank] = op.tick;
        }
    }
}

static void examine_ticks(Test* t, const PpSchedule* x) {
    static Ticks ticks;
    const PpShape* s = &x->shape;
    const int last = s->p * s->v - 1;
    note_ticks(&ticks, x);
    for (int micro = 0; micro < s->m; micro++) {
        const int *forward = ticks.forward[micro], *backward = ticks.backward[micro];
        for (int stage = 0; stage <= last; stage++) {
            check(t, stage == 0 || forward[stage] > forward[stage - 1],
                  "%s: forward of %d at stage %d before its input", named(s), micro, stage);
            check(t, backward[stage] > (stage == last ? forward[last] : backward[stage + 1]),
                  "%s: backward of %d at stage %d before its gradient", named(s), micro, stage);
        }
    }
    for (int rank = 0; rank < s->p; rank++) {
        for (int i = 1; i < x->n_ops; i++) {
            check(t, ops_of(x, rank)[i].tick > ops_of(x, rank)[i - 1].tick, "%s, rank %d: two operations in tick %d",
                  named(s), rank, ops_of(x, rank)[i].tick);
        }
    }
}

static void test_ticks(Test* t) { each_pipeline(t, examine_ticks); }

static void examine_time(Test* t, const PpSchedule* x) {
    const PpShape* s = &x->shape;
    const int expected = 2 * (s->v * s->m + s->p - 1);
    check(t, x->n_ticks == expected, "%s: expected %d ticks, found %d", named(s), expected, x->n_ticks);
    const double idle = 1.0 - (double)x->n_ops / x->n_ticks;
    check(t, fabs(idle - pp_idle(s)) < 1e-12, "%s: %g of it is idle, expected %g", named(s), idle,
          pp_idle(s));
}

static void test_time(Test* t) {
    const PpShape published[2] = {{8, 1, 32}, {8, 4, 32}};  // 17.9% and 5.2%: parallel.md 8.3
    each_pipeline(t, examine_time);
    check(t, fabs(pp_idle(&published[0]) - 0.179) < 5e-4, "found %g", pp_idle(&published[0]));
    check(t, fabs(pp_idle(&published[1]) - 0.052) < 5e-4, "found %g", pp_idle(&published[1]));
}

// ---- memory ----

// the operation of a rank that is this pass of this micro-batch through this chunk
static const PpOp* find_op(const PpSchedule* x, int rank, PpOp like) {
    const PpOp* op = ops_of(x, rank);
    while (op->micro != like.micro || op->chunk != like.chunk || op->is_backward != like.is_backward) { op++; }
    return op;
}

// of how many micro-batches a rank keeps activations at once, at most; each chunk counts
static int held_by_rank(const PpSchedule* x, int rank) {
    const PpOp* op = x->ops + (size_t)rank * x->n_ops;
    int held = 0, most = 0;
    for (int i = 0; i < x->n_ops; i++) {
        held += op[i].is_backward ? -1 : 1;
        most = held > most ? held : most;
    }
    return most;
}

// where the input of a rank's operation is made: 1, and by which rank in which operation; 0: it needs none from others
static int source_of(const PpShape* s, int rank, const PpOp* op, int* from, PpOp* made) {
    const int stage = pp_stage(s, rank, op), source = op->is_backward ? stage + 1 : stage - 1;
    if (source < 0 || source == s->p * s->v || s->p == 1) { return 0; }
    const PpOp there = {op->micro, source / s->p, op->is_backward, -1};
    *from = source % s->p;
    *made = there;
    return 1;
}

// forward's outputs, or gradients: those that another rank has made in an earlier tick and this one uses in a later
static int waiting_inputs(const PpSchedule* x, int rank, int is_backward) {
    const PpOp* ops = ops_of(x, rank);
    int change[2 * (MOST_STAGES * MOST_MICRO + MOST_RANKS)] = {0}, waiting = 0, most = 0;
    for (int i = 0; i < x->n_ops; i++) {
        int from;
        PpOp made;
        if (ops[i].is_backward != is_backward || !source_of(&x->shape, rank, &ops[i], &from, &made)) { continue; }
        change[find_op(x, from, made)->tick + 1]++;
        change[ops[i].tick + 1]--;
    }
    for (int tick = 0; tick <= x->n_ticks; tick++) {
        waiting += change[tick];
        most = waiting > most ? waiting : most;
    }
    return most;
}

static void examine_memory(Test* t, const PpSchedule* x) {
    const PpShape* s = &x->shape;
    const int n = s->v * s->m;
    for (int rank = 0; rank < s->p; rank++) {
        const int warmup = pp_warmup(s, rank), expected = warmup < n ? warmup + 1 : n;
        const int held = held_by_rank(x, rank);
        check(t, held == expected, "%s, rank %d: expected %d held, found %d", named(s), rank, expected, held);
        check(t, s->v > 1 || held <= s->p - rank, "%s, rank %d: more than p - rank: %d", named(s), rank, held);
        for (int back = 0; back < 2; back++) {
            const int waiting = waiting_inputs(x, rank, back), rooms = pp_rooms(s, back);
            check(t, waiting <= rooms, "%s, rank %d: %d inputs wait in %d rooms", named(s), rank, waiting, rooms);
        }
    }
}

static void test_memory(Test* t) { each_pipeline(t, examine_memory); }

// what one rank sends another in one direction is used in the order in which it was made: a ring of rooms will do
static void examine_queues(Test* t, const PpSchedule* x) {
    const PpShape* s = &x->shape;
    for (int rank = 0; rank < s->p; rank++) {
        int made_before[2] = {-1, -1};
        for (int i = 0; i < x->n_ops; i++) {
            const PpOp* op = &ops_of(x, rank)[i];
            int from;
            PpOp made;
            if (!source_of(s, rank, op, &from, &made)) { continue; }
            const int expected = (rank + (op->is_backward ? 1 : s->p - 1)) % s->p;
            check(t, from == expected, "%s, rank %d: expected an input of rank %d, found %d", named(s), rank, expected,
                  from);
            const int tick = find_op(x, from, made)->tick;
            check(t, tick > made_before[op->is_backward], "%s, rank %d: uses what was made in tick %d after tick %d",
                  named(s), rank, tick, made_before[op->is_backward]);
            made_before[op->is_backward] = tick;
        }
    }
}

static void test_queues(Test* t) { each_pipeline(t, examine_queues); }

// ---- messages ----

// a rank on its way through its operations and messages
typedef struct {
    const PpOp* ops;
    PpMessage* messages;
    int n_messages, op, message, held[MOST_CHUNKS], most_unsent;
    int came[2][MOST_CHUNKS], done[2][MOST_CHUNKS];  // inputs of each chunk, and operations: forward, backward
    int waiting, unsent;                             // gradients that have come, and no operation has taken; outputs
} Walker;

// NULL: an operation is next
static const PpMessage* next_message(const Walker* w, const PpSchedule* x) {
    const PpMessage* next = &w->messages[w->message];
    const int is_next = w->message < w->n_messages && (w->op == x->n_ops || next->time < w->ops[w->op].tick);
    return is_next ? next : NULL;
}

// a rank does what is next for it alone; returns 0 where this is a message, or nothing is left
static int walk_operation(Test* t, const PpSchedule* x, Walker* all, int rank) {
    const PpShape* s = &x->shape;
    Walker *w = &all[rank], *last = &all[s->p - 1];
    if (w->op == x->n_ops || next_message(w, x)) { return 0; }
    const PpOp op = w->ops[w->op];
    const int back = op.is_backward, stage = pp_stage(s, rank, &op), has_input = stage != (back ? s->p * s->v - 1 : 0);
    if (back && stage == 0) {  // the tie is part of it
        const PpMessage* tie = next_message(last, x);
        if (!tie || tie->kind != PP_TIE || tie->micro != op.micro) { return 0; }
        check(t, last->done[1][s->v - 1] > op.micro, "%s: the tie of %d goes before it is made", named(s), op.micro);
        last->message++;
    }
    check(t, !has_input || w->came[back][op.chunk] > op.micro, "%s, rank %d: %s of %d, chunk %d, without its input",
          named(s), rank, back ? "backward" : "forward", op.micro, op.chunk);
    w->waiting -= back && has_input;
    w->op++, w->done[back][op.chunk]++;
    w->unsent += !back && stage < s->p * s->v - 1;
    check(t, w->unsent <= w->most_unsent, "%s, rank %d: %d outputs in %d rooms", named(s), rank, w->unsent,
          w->most_unsent);
    const int ties = rank == s->p - 1 && back && op.chunk == s->v - 1 ? op.micro + 1 - all[0].done[1][0] : 0;
    check(t, ties <= pp_tie_rooms(x), "%s: %d ties in %d rooms", named(s), ties, pp_tie_rooms(x));
    return 1;
}

// rows from the first rank to the last, while its backward pass is next; or back, while the first one keeps them
static int walk_rows(Test* t, const PpSchedule* x, Walker* all, const PpMessage* a) {
    const PpShape* s = &x->shape;
    const int back = a->kind == PP_ROWS_BACK;
    Walker *first = &all[0], *last = &all[s->p - 1], *to = back ? first : last;
    const PpMessage* b = next_message(to, x);
    if (!b || b->sends || b->kind != a->kind || b->micro != a->micro) { return 0; }
    check(t, first->done[0][0] > a->micro && first->done[1][0] <= a->micro, "%s: rows of %d, which the first has not",
          named(s), a->micro);
    check(t, last->done[0][s->v - 1] == a->micro + 1 && last->done[1][s->v - 1] == a->micro + back,
          "%s: rows of %d%s at another time", named(s), a->micro, back ? " back" : "");
    first->message++, last->message++;
    return 1;
}

// a message goes where both ranks have come to it
static int walk_message(Test* t, const PpSchedule* x, Walker* all, int rank) {
    const PpShape* s = &x->shape;
    const PpMessage *a = next_message(&all[rank], x), *b = NULL;
    if (!a || a->kind == PP_TIE || !a->sends) { return 0; }
    if (a->kind == PP_ROWS || a->kind == PP_ROWS_BACK) { return walk_rows(t, x, all, a); }
    const int back = a->kind == PP_GRADIENT;
    Walker *from = &all[rank], *to = &all[back ? a->edge : (a->edge + 1) % s->p];
    b = next_message(to, x);
    if (!b || b->sends || a->kind != b->kind || a->edge != b->edge || a->number != b->number) { return 0; }
    check(t, a->time == b->time && a->micro == b->micro, "%s, edge %d, message %d: two of them", named(s), a->edge,
          a->number);
    check(t, from->done[back][a->chunk] > a->micro, "%s, edge %d: %d goes before it is made", named(s), a->edge,
          a->micro);
    check(t, to->came[back][b->chunk]++ == b->micro, "%s, edge %d: %d is not the next", named(s), a->edge, b->micro);
    to->waiting += back;
    from->unsent -= !back;
    const int held = back ? 0 : to->came[0][b->chunk] - to->done[1][b->chunk];
    check(t, to->waiting <= pp_rooms(s, 1), "%s: %d gradients in %d rooms", named(s), to->waiting, pp_rooms(s, 1));
    check(t, held <= to->held[b->chunk], "%s: %d micro-batches in %d slots", named(s), held, to->held[b->chunk]);
    from->message++, to->message++;
    return 1;
}

static void examine_messages(Test* t, const PpSchedule* x) {
    Walker all[MOST_RANKS];
    int n_left = 0, moved = 1;
    if (x->shape.p == 1) { return; }
    memset(all, 0, sizeof all);
    for (int rank = 0; rank < x->shape.p; rank++) {
        all[rank].ops = ops_of(x, rank);
        all[rank].messages = pp_messages(x, rank, &all[rank].n_messages);
        pp_held_by(x, rank, all[rank].held);
        all[rank].most_unsent = pp_unsent(x, rank);
    }
    while (moved) {
        moved = 0;
        for (int rank = 0; rank < x->shape.p; rank++) {
            while (walk_operation(t, x, all, rank) || walk_message(t, x, all, rank)) { moved = 1; }
        }
    }
    for (int rank = 0; rank < x->shape.p; rank++) {
        n_left += x->n_ops - all[rank].op + all[rank].n_messages - all[rank].message;
        free(all[rank].messages);
    }
    check(t, n_left == 0, "%s: ranks wait for each other, %d operations and messages are left", named(&x->shape),
          n_left);
}

static void test_messages(Test* t) { each_pipeline(t, examine_messages); }

static void examine_rows(Test* t, const PpSchedule* x) {
    PpSchedule with_rows = *x;
    with_rows.has_rows = 1;
    examine_messages(t, &with_rows);
}

static void test_rows(Test* t) { each_pipeline(t, examine_rows); }

// ---- by hand ----

// several chunks have letters
static void draw(char* text, const PpSchedule* x, int rank) {
    const int width = x->shape.v > 1 ? 4 : 3;
    for (int tick = 0; tick < x->n_ticks; tick++) { memcpy(text + width * tick, width == 4 ? "... " : ".. ", width); }
    for (int i = 0; i < x->n_ops; i++) {
        const PpOp op = ops_of(x, rank)[i];
        char* at = text + width * op.tick;
        at[0] = "FB"[op.is_backward], at[1] = (char)('0' + op.micro);
        if (width == 4) { at[2] = (char)('a' + op.chunk); }
    }
    text[width * x->n_ticks - 1] = '\0';
}

// as doc/ranks.md has them
static void test_picture(Test* t) {
    const char* const expected[] = {
        "F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3", ".. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..",
        ".. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..",
        "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a ... B2b ... B3b B2a B3a",
        "... F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a ..."};
    const PpShape shapes[] = {{3, 1, 4}, {2, 2, 4}};
    for (int i = 0, row = 0; i < 2; i++) {
        PpSchedule x;
        pp_open(&x, shapes[i]);
        for (int rank = 0; rank < shapes[i].p; rank++, row++) {
            char text[256];
            draw(text, &x, rank);
            check(t, strcmp(text, expected[row]) == 0, "%s, rank %d: expected\n%s\nfound\n%s", named(&shapes[i]), rank,
                  expected[row], text);
        }
        pp_free(&x);
    }
}

static void test_sizes(Test* t) {
    const PpShape wrong[] = {{0, 1, 1}, {1, 0, 1}, {1, 1, 0}, {1, 2, 4}, {4, 2, 6}};
    const PpShape right[] = {{1, 1, 1}, {4, 1, 6}, {4, 2, 8}, {3, 4, 3}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        check(t, pp_check(&wrong[i]) != NULL, "%s passed", named(&wrong[i]));
    }
    for (size_t i = 0; i < sizeof right / sizeof right[0]; i++) {
        const char* why = pp_check(&right[i]);
        check(t, !why, "%s: %s", named(&right[i]), why ? why : "");
    }
}

// ranks that wait for each other are found out
static void test_stuck(Test* t) {
    PpSchedule x;
    pp_open(&x, (PpShape){2, 1, 2});
    const PpOp first = x.ops[0];
    int ticks[2 * 2 * 2];
    x.ops[0] = x.ops[1], x.ops[1] = x.ops[2], x.ops[2] = first;  // its backward of micro-batch 0 before the forward
    memset(ticks, -1, sizeof ticks);
    const int n = pp_time_(&x, ticks);
    check(t, n == -1, "expected -1, found %d ticks", n);
    pp_free(&x);
}

// ---- stages ----

// the cost of the most costly of `size` stages of layers first .. L - 1, by trying all
static double least(const double* cost, int first, int L, int size, double behind) {
    double sum = 0.0, best = INFINITY;
    for (int end = first + 1; end <= L; end++) {
        sum += cost[end - 1];
        if (size == 1 && end < L) { continue; }
        const double rest = size > 1 ? least(cost, end, L, size - 1, behind) : 0.0, own = size > 1 ? sum : sum + behind;
        best = fmin(best, fmax(own, rest));
    }
    return best;
}

static void test_cut(Test* t) {
    for (int L = 1; L <= 9; L++) {
        for (int size = 1; size <= L; size++) {
            double cost[9], found = 0.0;
            const double behind = (L * size) % 5;
            int begin[PP_MAX + 1];
            for (int l = 0; l < L; l++) { cost[l] = 1 + (l * 7 + L * 3) % 4; }
            pp_cut(begin, size, cost, L, behind);
            check(t, begin[0] == 0 && begin[size] == L, "%d layers, %d stages: from %d to %d", L, size, begin[0],
                  begin[size]);
            for (int s = 0; s < size; s++) {
                double sum = s == size - 1 ? behind : 0.0;
                check(t, begin[s] < begin[s + 1], "%d layers, %d stages: stage %d has none", L, size, s);
                for (int l = begin[s]; l < begin[s + 1]; l++) { sum += cost[l]; }
                found = fmax(found, sum);
            }
            const double best = least(cost, 0, L, size, behind);
            check(t, found == best, "%d layers, %d stages: the largest costs %g, %g would do", L, size, found, best);
        }
    }
}

// in front of every third layer alone, from the first on: the stages of the groups, each as costly as its layers
static void test_cut_between(Test* t) {
    for (int L = 1; L <= 12; L++) {
        double cost[12], groups[4] = {0};
        char starts[12];
        for (int l = 0; l < L; l++) {
            cost[l] = 1 + (l * 7 + L * 3) % 4;
            starts[l] = l % 3 == 0;
            groups[l / 3] += cost[l];
        }
        const int n = (L + 2) / 3;
        check(t, pp_starts(starts, L) == n && pp_starts(NULL, L) == L, "%d layers: %d and %d starts", L,
              pp_starts(starts, L), pp_starts(NULL, L));
        for (int size = 1; size <= n; size++) {
            int begin[PP_MAX + 1], whole[PP_MAX + 1];
            pp_cut_between(begin, size, cost, starts, L, 2.0);
            pp_cut(whole, size, groups, n, 2.0);
            for (int s = 0; s <= size; s++) {
                const int expected = s < size ? 3 * whole[s] : L;
                check(t, begin[s] == expected, "%d layers, %d stages: stage %d begins at %d, expected %d", L, size, s,
                      begin[s], expected);
            }
        }
    }
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"order", "each chunk has every micro-batch once forward and once backward, ascending", test_order},
        {"ticks", "an operation comes after the one whose result it needs, and a rank has one at a time", test_ticks},
        {"time", "2 (v m + p - 1) ticks, and the idle share is the formula's", test_time},
        {"memory", "activations held are warm-up + 1, p - rank for v 1; inputs that wait are bounded", test_memory},
        {"queues", "inputs come from the neighbour and are used in the order in which they were made", test_queues},
        {"messages", "each goes once it is made and there is room, and before it is needed; no rank waits for ever, "
                     "whoever waits for whom", test_messages},
        {"rows", "of the first stage reach the last one before its backward pass, and their gradient comes back",
                 test_rows},
        {"picture", "three ranks, two ranks with two chunks, four micro-batches, by hand", test_picture},
        {"stuck", "an order in which ranks wait for each other has no time", test_stuck},
        {"cut", "of all ways to cut layers into stages the one whose largest stage costs least", test_cut},
        {"groups", "a stage begins in front of layers that may begin one alone", test_cut_between},
        {"sizes", "several chunks need several ranks and a multiple of them as micro-batches", test_sizes},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
