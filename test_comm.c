/*
Promises of llmc/ranks/comm.h, comm_tcp.h, comm_nccl.h, comm_launch.h, data_parallel.h and evaluate.h. Ranks are forked
processes that talk over TCP on this machine, with COMM_CHECK=1; every call is compared with what one process computes.
*/
#include "llmc/run/evaluate.h"
#include "llmc/run/ranks.h"
#include "llmc/test/ranks.h"
#include "llmc/test/test.h"
#include "llmc/test/testfiles.h"
#include "llmc/ranks/data_parallel.h"
#include "llmc/ranks/model_collect.h"
#include "llmc/ranks/moments.h"
#include <limits.h>
#include <sys/resource.h>

static void on_all_sizes(Test* t, RankFunction f) {
    const int sizes[] = {1, 2, 3, 4, 5, 8};
    for (int i = 0; i < 6; i++) { run_ranks(t, sizes[i], f, 0); }
}

// ---- calls against what one process computes ----

// element i of rank r, small enough for every type and for sums in it
static double element(int rank, size_t i) { return (double)((i * 7 + (size_t)rank * 3) % 11 + (size_t)rank); }

static void store(void* array, CommType type, size_t i, double x) {
    switch (type) {
        case DT_F32: ((float*)array)[i] = (float)x; break;
        case DT_F64: ((double*)array)[i] = x; break;
        case DT_I32: ((int32_t*)array)[i] = (int32_t)x; break;
        case DT_I64: ((int64_t*)array)[i] = (int64_t)x; break;
        case DT_U8: ((uint8_t*)array)[i] = (uint8_t)x; break;
    }
}

static double load(const void* array, CommType type, size_t i) {
    switch (type) {
        case DT_F32: return (double)((const float*)array)[i];
        case DT_F64: return ((const double*)array)[i];
        case DT_I32: return (double)((const int32_t*)array)[i];
        case DT_I64: return (double)((const int64_t*)array)[i];
        default: return (double)((const uint8_t*)array)[i];
    }
}

static void* rank_array(int rank, CommType type, size_t n) {
    void* array = new_array(n, 8);
    for (size_t i = 0; i < n; i++) { store(array, type, i, element(rank, i)); }
    return array;
}

static double reduced(int size, CommOp op, size_t i) {
    double x = element(0, i);
    for (int r = 1; r < size; r++) {
        double y = element(r, i);
        x = op == OP_SUM ? x + y : op == OP_MAX ? fmax(x, y) : fmin(x, y);
    }
    return x;
}

static const size_t lengths[] = {0, 1, 7, 33, 1000};

static void ranks_reduce(Test* t, Comm* c, int number) {
    (void)number;
    for (int k = 0; k < 5 * 5 * 3; k++) {
        const CommType type = (CommType)(k % 5);
        const CommOp op = (CommOp)(k / 5 % 3);
        const size_t n = lengths[k / 15];
        void* x = rank_array(c->rank, type, n);
        comm_all_reduce(c, x, n, type, op, HERE);
        int good = 1;
        for (size_t i = 0; i < n; i++) { good &= load(x, type, i) == reduced(c->size, op, i); }
        check(t, good, "all_reduce of %zu, type %d, op %d, %d ranks", n, (int)type, (int)op, c->size);
        free(x);
    }
}

// floats whose sum depends on the order: 0 + 1 + 2 + ..., whatever the cut
static void ranks_order(Test* t, Comm* c, int number) {
    (void)number;
    float *x = hard_array(501, (uint64_t)c->rank), *want = hard_array(501, 0);
    for (int r = 1; r < c->size; r++) {
        float* y = hard_array(501, (uint64_t)r);
        for (int i = 0; i < 501; i++) { want[i] += y[i]; }
        free(y);
    }
    comm_all_reduce(c, x, 501, DT_F32, OP_SUM, HERE);
    check_bits(t, "sum", x, want, 501);
    free(x);
    free(want);
}

// counts with zeros; rank a sends (3a + 5b) mod 7 elements to rank b
static size_t count(int a, int b) { return (size_t)(3 * a + 5 * b) % 7; }

static void ranks_exchange(Test* t, Comm* c, int number) {
    (void)number;
    for (int type = 0; type < 5; type++) {
        CommPiece pieces[MAX_TEST_RANKS];
        const size_t bytes = comm_type_bytes((CommType)type);
        size_t n_in = 0, n_out = 0, at = 0;
        for (int r = 0; r < c->size; r++) { n_in += count(c->rank, r), n_out += count(r, c->rank); }
        char *in = (char*)rank_array(c->rank, (CommType)type, n_in), *out = (char*)new_array(n_out, 8);
        for (size_t r = 0, from = 0, to = 0; r < (size_t)c->size; r++) {
            const CommPiece piece = {in + from, out + to, count(c->rank, (int)r) * bytes, count((int)r, c->rank) * bytes};
            pieces[r] = piece;
            from += piece.n_send, to += piece.n_recv;
        }
        comm_wait(c, comm_exchange(c, pieces, HERE));
        for (int r = 0; r < c->size; r++) {
            size_t first = 0;
            for (int b = 0; b < c->rank; b++) { first += count(r, b); }
            for (size_t i = 0; i < count(r, c->rank); i++, at++) {
                check(t, load(out, (CommType)type, at) == element(r, first + i),
                      "exchange: type %d, from %d, element %zu", type, r, i);
            }
        }
        free(in);
        free(out);
    }
}

static void ranks_gather(Test* t, Comm* c, int number) {
    (void)number;
    for (int k = 0; k < 25; k++) {
        const CommType type = (CommType)(k % 5);
        const size_t n = lengths[k / 5], bytes = comm_type_bytes(type);
        void *in = rank_array(c->rank, type, n), *out = new_array(n * (size_t)c->size, 8), *shares = new_array(n, 8);
        comm_wait(c, comm_all_gather(c, in, out, n, type, HERE));
        for (size_t i = 0; i < n * (size_t)c->size; i++) {
            check(t, load(out, type, i) == element((int)(i / n), i % n), "all_gather of %zu, type %d", n, (int)type);
        }
        memmove((char*)out + (size_t)c->rank * n * bytes, in, n * bytes);
        comm_wait(c, comm_all_gather(c, (char*)out + (size_t)c->rank * n * bytes, out, n, type, HERE));  // in place
        int64_t last = comm_share((int64_t)n, c->rank + 1, c->size);
        for (int64_t i = comm_share((int64_t)n, c->rank, c->size); i < last; i++) {
            store(shares, type, (size_t)i, element(1, (size_t)i));
        }
        comm_all_gather_shares(c, shares, (int64_t)n, type, HERE);
        for (size_t i = 0; i < n; i++) {
            check(t, load(shares, type, i) == element(1, i), "all_gather_v of %zu, type %d", n, (int)type);
            check(t, load(out, type, i) == element(0, i), "all_gather in place");
        }
        free(in);
        free(out);
        free(shares);
    }
}

static void ranks_send(Test* t, Comm* c, int number) {
    (void)number;
    const int next = (c->rank + 1) % c->size, before = (c->rank + c->size - 1) % c->size;
    float out[33], in[33];
    for (int i = 0; i < 33; i++) { out[i] = (float)element(c->rank, (size_t)i); }
    comm_wait(c, comm_send_recv(c, out, 33, next, in, 33, before, DT_F32, HERE));
    for (int i = 0; i < 33; i++) { check(t, in[i] == (float)element(before, (size_t)i), "send_recv round the ring"); }
    const int to = c->rank == 0 && c->size > 1 ? 1 : -1, from = c->rank == 1 ? 0 : -1;
    comm_wait(c, comm_send_recv(c, out, 7, to, in, 7, from, DT_F32, HERE));
    for (int i = 0; from == 0 && i < 7; i++) { check(t, in[i] == (float)element(0, (size_t)i), "send_recv of two"); }
    for (int root = 0; root < c->size; root++) {
        for (int i = 0; i < 33; i++) { in[i] = c->rank == root ? (float)element(root, (size_t)i) : -1.0f; }
        comm_wait(c, comm_broadcast(c, in, 33, DT_F32, root, HERE));
        for (int i = 0; i < 33; i++) { check(t, in[i] == (float)element(root, (size_t)i), "broadcast from %d", root); }
    }
    comm_barrier(c, HERE);
}

static void ranks_groups(Test* t, Comm* c, int number) {
    (void)number;
    const int n_even = (c->size + 1) / 2, n = c->rank % 2 ? c->size - n_even : n_even;
    Comm* group = comm_every(c, c->rank % 2, 2, n, HERE);  // odd and even
    check(t, group->size == n, "group of %d ranks, expected %d", group->size, n);
    check(t, group->rank == c->rank / 2, "rank %d has rank %d of its group", c->rank, group->rank);
    int32_t who = c->rank, all[MAX_TEST_RANKS];
    comm_wait(group, comm_all_gather(group, &who, all, 1, DT_I32, HERE));
    for (int i = 0; i < n; i++) {
        check(t, all[i] == 2 * i + c->rank % 2, "member %d of the group is rank %d", i, all[i]);
    }
    int64_t sum = 1;
    comm_all_reduce(c, &sum, 1, DT_I64, OP_SUM, HERE);  // the world still works
    check(t, sum == c->size, "sum over the world beside groups");
    Comm* part = c->rank % 2 ? comm_every(group, group->rank, 1, 1, HERE) : NULL;  // odd ranks have made one more
    Comm* again = comm_every(c, 0, 1, c->size, HERE);
    comm_barrier(again, HERE);  // COMM_CHECK compares the numbers of the group
    comm_free(again);
    if (part) { comm_free(part); }
    comm_free(group);
}

// more calls under way than there are places, megabytes each way, waited for from the last to the first
static void ranks_async(Test* t, Comm* c, int number) {
    (void)number;
    enum { N_CALLS = 100, N = 20000 };
    CommTicket tickets[N_CALLS];
    float *in = (float*)new_array(N, sizeof(float)),
          *out = (float*)new_array((size_t)N * N_CALLS * (size_t)c->size, sizeof(float));
    for (int i = 0; i < N; i++) { in[i] = (float)element(c->rank, (size_t)i); }
    for (int k = 0; k < N_CALLS; k++) {
        tickets[k] = comm_all_gather(c, in, out + (size_t)k * N * (size_t)c->size, N, DT_F32, HERE);
    }
    for (int k = N_CALLS - 1; k >= 0; k--) { comm_wait(c, tickets[k]); }
    int good = 1;
    for (size_t i = 0; i < (size_t)N * N_CALLS * (size_t)c->size; i++) {
        good &= out[i] == (float)element((int)(i / N) % c->size, i % N);
    }
    check(t, good, "100 gathers of %d floats on %d ranks", N, c->size);
    free(in);
    free(out);
}

static void ranks_count(Test* t, Comm* c, int number) {
    (void)number;
    const size_t P = (size_t)c->size, n = 840;  // divisible by all sizes
    float* x = (float*)new_array(n * P, sizeof(float));
    c->link->check = 0;  // the comparison also sends
    uint64_t before = c->link->bytes_sent;
    comm_all_reduce(c, x, n, DT_F32, OP_SUM, HERE);
    uint64_t sent = c->link->bytes_sent - before;
    check(t, sent == 2 * 4 * n * (P - 1) / P, "all_reduce sent %llu bytes", (unsigned long long)sent);
    before = c->link->bytes_sent;
    comm_wait(c, comm_all_gather(c, x, x, n, DT_F32, HERE));
    sent = c->link->bytes_sent - before;
    check(t, sent == 4 * n * (P - 1), "all_gather sent %llu bytes", (unsigned long long)sent);
    comm_barrier(c, HERE);
    free(x);
}

static void test_reduce(Test* t) { on_all_sizes(t, ranks_reduce); }
static void test_order(Test* t) { on_all_sizes(t, ranks_order); }
static void test_exchange(Test* t) { on_all_sizes(t, ranks_exchange); }
static void test_gather(Test* t) { on_all_sizes(t, ranks_gather); }
static void test_send(Test* t) { on_all_sizes(t, ranks_send); }
static void test_groups(Test* t) { on_all_sizes(t, ranks_groups); }
static void test_async(Test* t) { run_ranks(t, 1, ranks_async, 0), run_ranks(t, 3, ranks_async, 0); }
static void test_count(Test* t) { on_all_sizes(t, ranks_count); }

// ---- calls that do not match ----

static void ranks_mismatch(Test* t, Comm* c, int number) {
    float x[8] = {0};
    int64_t y[8] = {0};
    (void)t;
    comm_barrier(c, HERE);
    if (number == 0) {  // other calls
        if (c->rank == 0) {
            comm_all_reduce(c, x, 8, DT_F32, OP_SUM, "here.c:1");
        } else {
            comm_barrier(c, "there.c:2");
        }
    } else if (number == 1) {  // other types
        comm_all_reduce(c, y, 8, c->rank ? DT_F32 : DT_I64, OP_SUM, "same.c:3");
    } else if (number == 2) {  // other counts
        comm_all_reduce(c, x, c->rank ? 7 : 8, DT_F32, OP_SUM, "same.c:4");
    } else if (number == 3) {  // more is sent than the other expects
        const size_t n_recv = c->rank ? 4 : 8;
        const CommPiece pieces[] = {{x, x + 4, 8, n_recv}, {x + 2, x + 6, 8, n_recv}};
        comm_wait(c, comm_exchange(c, pieces, "same.c:5"));
    } else {  // other operations
        comm_all_reduce(c, x, 8, DT_F32, c->rank ? OP_MAX : OP_SUM, "same.c:6");
    }
}

static void test_mismatch(Test* t) {
    const char* named[][2] = {
        {"here.c:1", "there.c:2"}, {"8 i64", "8 f32"}, {"of 8 f32", "of 7 f32"}, {"8 bytes to the other", "4 bytes"},
        {"op 0", "op 1"},
    };
    for (int i = 0; i < 5; i++) {
        Ranks r;
        r.n = 0;
        int port = free_port(), found = 0;
        for (int rank = 0; rank < 2; rank++) { start_rank(&r, place_at(rank, 2, port), 5.0, 20.0, ranks_mismatch, i); }
        end_ranks(&r);
        for (int rank = 0; rank < 2; rank++) {
            const char* text = r.text[rank];
            found |= strstr(text, "COMM_CHECK") && strstr(text, named[i][0]) && strstr(text, named[i][1]);
        }
        check(t, r.status[0] == 1 && r.status[1] == 1 && found, "case %d: status %d and %d: %s%s", i, r.status[0],
              r.status[1], r.text[0], r.text[1]);
    }
}

// ---- what a false peer may send ----

// Rank 1 is not what it seems. 0..2: other calls, and nobody compares them first (COMM_CHECK=0); 3: descriptions that
// are none; 4: a text of 2^63 bytes; 5: one without an end; 6: last words of a rank that does not exist; 7: noise
static void ranks_false(Test* t, Comm* c, int number) {
    unsigned char x[1000] = {0};
    CommDescription noise[2];
    char text[8] = "{}";
    size_t n = number == 4 ? SIZE_MAX - 3 : 8;
    TcpNote note = {1000000, 1, 0, ""};
    (void)t;
    comm_barrier(c, HERE);
    c->link->check = number == 3 && c->rank == 0;
    memset(noise, 0xff, sizeof noise);
    memset(note.text, 'x', sizeof note.text);
    if (c->rank == 0 && (number == 4 || number == 5)) { ranks_compare_text_(c, text); }
    if (c->rank == 0 || number == 0) {
        comm_wait(c, comm_all_gather(c, x, x + 100, c->rank == 0 ? 100 : 50, DT_U8, "same.c:1"));
    } else if (number == 1) {
        comm_wait(c, comm_broadcast(c, x, 100, DT_U8, 1, "other.c:2"));
    } else if (number == 2) {
        comm_wait(c, comm_all_gather(c, x, x + 100, 50, DT_I64, "other.c:3"));
    } else if (number == 3) {
        c->piece[0].send = noise;
        c->piece[0].recv = noise;
        c->piece[0].n_send = c->piece[0].n_recv = sizeof noise[0];
        comm_finish_(c->link, comm_begin_(c, "noise", tcp_hash_("COMM_CHECK"), HERE));
    } else if (number == 4 || number == 5) {
        comm_wait(c, comm_all_gather(c, &n, x, 1, DT_I64, HERE));
        size_t counts[2] = {3, 8};
        memset(x, '{', 100);
        comm_wait(c, comm_all_gather_v(c, x, counts, DT_U8, HERE));
    } else if (number == 6) {
        tcp_leave_note(&c->link->tcp, &note);
        _exit(0);
    } else {
        check(t, write(c->link->tcp.data[0], noise, sizeof noise) == sizeof noise, "noise");
    }
    comm_barrier(c, HERE);
    comm_barrier(c, HERE);
}

static void test_false(Test* t) {
    const char* said[] = {"rank 0 expects 100 bytes of all_gather (same.c:1) from rank 1, but found 50 of it",
                          "rank 0 expects 100 bytes of all_gather (same.c:1) from rank 1, but found 100 of another call",
                          "but found 400 of it", "COMM_CHECK: rank 0", "rank 1: expected 1 to 1048576 bytes of options",
                          "rank 1: another set of options", "rank 1 is gone", "of another call"};
    for (int i = 0; i < (int)(sizeof said / sizeof said[0]); i++) {
        Ranks r;
        r.n = 0;
        const int port = free_port(), status = i == 5 ? 2 : 1;
        for (int rank = 0; rank < 2; rank++) { start_rank(&r, place_at(rank, 2, port), 2.0, 20.0, ranks_false, i); }
        end_ranks(&r);
        const char* end = strchr(r.text[0], '\n');
        check(t, r.status[0] == status && strstr(r.text[0], said[i]) && end && end[1] == '\0',
              "case %d: expected status %d and \"%s\"; found %d: %s", i, status, said[i], r.status[0], r.text[0]);
    }
}

// ---- faults ----

// rank 2 leaves the ranks to themselves, in the middle of a stream of calls
static void ranks_fault(Test* t, Comm* c, int number) {
    float x[1000] = {0};
    (void)t;
    Device dev;
    CommPiece pieces[MAX_TEST_RANKS];
    float* memory = NULL;
    if (number == 6) {
        dev = rank_device(c);
        memory = to_device(x, 1000, &dev);
        comm_device_open(c);
    }
    for (int r = 0; r < c->size; r++) {  // from rank to rank in a buffer that nobody reads
        CommPiece piece = {memory, memory ? memory + 100 * (r + 1) : NULL, 400, 400};
        pieces[r] = piece;
    }
    c->link->check = 0;  // as users run it: one line
    comm_note(c, "after step 7; newest checkpoint: run/step_000005");
    for (int k = 0; k < 50; k++) {
        if (number == 6) {
            comm_wait_device(c, comm_exchange_device(c, pieces, &dev, HERE), &dev);
            comm_sync_device(c, &dev, HERE);
        } else {
            comm_all_reduce(c, x, 1000, DT_F32, OP_SUM, HERE);
        }
        for (int i = 0; number == 5 && k == 20 && i < 500 && c->rank != 2; i++) {
            usleep(10000);
            comm_watch(c, HERE);
        }
        if (c->rank != 2 || k != 20) { continue; }
        if (number == 0 || number == 5 || number == 6) { raise(SIGKILL); }
        if (number == 1) { raise(SIGSTOP); }
        if (number == 2) { fail_run("the disk of rank 2 is full"); }
        if (number == 3) { fail_input("rank 2 was given a wrong file"); }
    }
}

static void check_fault(Test* t, int number, int status, const char* text) {
    Ranks r;
    r.n = 0;
    int port = free_port();
    double start = seconds_now(CLOCK_MONOTONIC);
    for (int rank = 0; rank < 4; rank++) { start_rank(&r, place_at(rank, 4, port), 1.0, 20.0, ranks_fault, number); }
    for (int rank = 0; number == 1 && rank < 4; rank++) {
        siginfo_t info;
        if (rank != 2) { waitid(P_PID, (id_t)r.pid[rank], &info, WEXITED | WNOWAIT); }
    }
    if (number == 1) { kill(r.pid[2], SIGKILL); }  // it would stay stopped for ever
    end_ranks(&r);
    check(t, seconds_now(CLOCK_MONOTONIC) - start < 8.0, "case %d took %.1f s", number,
          seconds_now(CLOCK_MONOTONIC) - start);
    for (int rank = 0; rank < 4; rank++) {
        if (rank == 2) { continue; }
        // where the run stands, once
        const char *message = r.text[rank],
                   *where = rank == 0 ? " after step 7; newest checkpoint: run/step_000005\n" : ")\n";
        const char* exchange = DEVICE_MEETS ? "in its own work (" : "in exchange (";
        const char* call = number == 5 ? "in its own work (" : number == 6 ? exchange : "in all_reduce (";
        int named = strncmp(message, "test_comm: rank 2 ", 18) == 0 && strstr(message, text) && strstr(message, call) &&
                    strstr(message, "test_comm.c:") && strstr(message, where) && strchr(message, '\n')[1] == '\0';
        int silent = status == 2 && !*message;  // rank 2 has said it
        check(t, r.status[rank] == status && (silent || named),
              "case %d, rank %d: expected status %d and \"%s\", found status %d: %s", number, rank, status, text,
              r.status[rank], r.text[rank]);
    }
}

static void test_killed(Test* t) { check_fault(t, 0, 1, "is gone (killed"), check_fault(t, 5, 1, "is gone (killed"); }
static void test_killed_device(Test* t) {
    if (device_ranks(t, 4) == 4) { check_fault(t, 6, 1, "is gone (killed"); }
}
static void test_stopped(Test* t) { check_fault(t, 1, 1, "has not answered for 1 s"); }
static void test_failed(Test* t) {
    check_fault(t, 2, 1, "stopped with status 1 (its own message says why)");
    check_fault(t, 3, 2, "");
}

// ---- one line for one error of the user ----

typedef struct {
    const char* finds;   // for each rank: the error that it finds, '.' none
    const char* speaks;  // the ranks that say theirs
    int late;            // a rank that finds it, or goes on, 0.2 s after the others; -1: none
    int is_busy;         // and does not come back before it is killed
} SaidCase;

static const SaidCase said_cases[] = {
    {"aaaa", "a...", -1, 0}, {"aaaa", "a...", 0, 0}, {"aaaa", "a...", 2, 0},     // a bad file
    {"..a.", "..a.", -1, 0}, {"..a.", "..a.", 0, 0}, {"...a", "...a", 1, 0},     // missing on one machine
    {".aaa", ".a..", -1, 0}, {".a.a", ".a..", 1, 0}, {"..aa", "..a.", 3, 0},     // on several
    {"abab", "ab..", -1, 0}, {"a.b.", "a.b.", -1, 0}, {"a.b.", "a.b.", 0, 0},    // two errors
    {"..a.", "..a.", 0, 1}, {".aaa", ".a..", 0, 1},                              // rank 0 computes and does not answer
};

static void ranks_said(Test* t, Comm* c, int number) {
    const SaidCase* k = &said_cases[number];
    float x[1000] = {0};
    (void)t;
    c->link->check = 0;
    c->link->patience = k->is_busy ? 0.3 : 5.0;
    comm_all_reduce(c, x, 1000, DT_F32, OP_SUM, HERE);
    if (c->rank == k->late) { usleep(k->is_busy ? 20000000 : 200000); }
    if (k->finds[c->rank] != '.') { fail_input("error %c", k->finds[c->rank]); }
    for (int i = 0; i < 20; i++) { comm_all_reduce(c, x, 1000, DT_F32, OP_SUM, HERE); }
}

static void test_said(Test* t) {
    for (int number = 0; number < (int)(sizeof said_cases / sizeof said_cases[0]); number++) {
        const SaidCase* k = &said_cases[number];
        const double start = seconds_now(CLOCK_MONOTONIC);
        Ranks r;
        r.n = 0;
        int port = free_port();
        for (int rank = 0; rank < 4; rank++) {
            start_rank(&r, place_at(rank, 4, port), 20.0, 20.0, ranks_said, number);
        }
        for (int rank = 0; k->is_busy && rank < 4; rank++) {
            siginfo_t info;
            if (rank != k->late) { waitid(P_PID, (id_t)r.pid[rank], &info, WEXITED | WNOWAIT); }
        }
        if (k->is_busy) { kill(r.pid[k->late], SIGKILL); }
        end_ranks(&r);
        for (int rank = 0; rank < 4; rank++) {
            char want[64] = "";
            if (k->speaks[rank] != '.') { snprintf(want, sizeof want, "test_comm: error %c\n", k->speaks[rank]); }
            const int status = k->is_busy && rank == k->late ? 128 + SIGKILL : 2;
            check(t, r.status[rank] == status && strcmp(r.text[rank], want) == 0,
                  "%s, rank %d: expected status %d and \"%s\", found %d: %s", k->finds, rank, status, want,
                  r.status[rank], r.text[rank]);
        }
        const double seconds = seconds_now(CLOCK_MONOTONIC) - start;
        check(t, seconds < 4.0, "%s took %.1f s: somebody waited for a rank that does not speak", k->finds, seconds);
    }
}

static void ranks_nothing(Test* t, Comm* c, int number) {
    (void)t, (void)number;
    comm_barrier(c, HERE);
}

// one message that must be on the stderr of rank 0, nothing on that of others, and the statuses of all
static void check_start(Test* t, const char* what, Ranks* r, int status, const char* text) {
    int found = 0, right = 1;
    end_ranks(r);
    for (int i = 0; i < r->n; i++) {
        found |= i == 0 && strstr(r->text[i], text) != NULL;
        right &= r->status[i] == status && (i == 0 || !*r->text[i]);
    }
    check(t, found && right, "%s: expected status %d and \"%s\"; found %d: %s / %d: %s", what, status, text,
          r->status[0], r->text[0], r->status[1], r->text[1]);
}

static void test_meeting(Test* t) {
    Ranks r;
    int port = free_port();
    r.n = 0;
    start_rank(&r, place_at(0, 4, port), 5.0, 0.6, ranks_nothing, 0);
    start_rank(&r, place_at(2, 4, port), 5.0, 0.6, ranks_nothing, 0);
    check_start(t, "two ranks missing", &r, 2, "these of 4 ranks have not come: 1, 3");
    r.n = 0;
    port = free_port();
    start_rank(&r, place_at(0, 3, port), 5.0, 10.0, ranks_nothing, 0);
    start_rank(&r, place_at(1, 3, port), 5.0, 10.0, ranks_nothing, 0);
    start_rank(&r, place_at(1, 3, port), 5.0, 10.0, ranks_nothing, 0);
    check_start(t, "a rank twice", &r, 2, "two processes say that they are rank 1 of 3");
    r.n = 0;
    port = free_port();
    start_rank(&r, place_at(0, 3, port), 5.0, 10.0, ranks_nothing, 0);
    start_rank(&r, place_at(1, 2, port), 5.0, 10.0, ranks_nothing, 0);
    check_start(t, "another number of ranks", &r, 2, "rank 0 was started for 3 ranks, rank 1 for 2");
    r.n = 0;
    start_rank(&r, place_at(1, 2, free_port()), 5.0, 0.4, ranks_nothing, 0);
    end_ranks(&r);
    check(t, r.status[0] == 1 && strstr(r.text[0], "rank 0 did not answer at 127.0.0.1:"), "no rank 0: status %d: %s",
          r.status[0], r.text[0]);
}

// strangers, ranks of another run and late ranks do not disturb a meeting
static void test_strangers(Test* t) {
    Ranks r;
    r.n = 0;
    int port = free_port();
    RankPlace other = place_at(1, 2, port);
    other.run_id = "another run";
    start_rank(&r, place_at(0, 2, port), 5.0, 10.0, ranks_nothing, 0);
    start_rank(&r, other, 5.0, 10.0, ranks_nothing, 0);
    usleep(100000);
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0), reached = connect(fd, (struct sockaddr*)&address, sizeof address) == 0;
    const char text[] = "GET / HTTP/1.1\r\nHost: rank 0\r\nAccept: text/html\r\n\r\n";
    check(t, reached && write(fd, text, sizeof text) == sizeof text, "rank 0 does not listen");
    usleep(300000);
    start_rank(&r, place_at(1, 2, port), 5.0, 10.0, ranks_nothing, 0);
    end_ranks(&r);
    close(fd);
    check(t, r.status[0] == 0 && r.status[2] == 0, "the two of this run: status %d: %s / %d: %s", r.status[0],
          r.text[0], r.status[2], r.text[2]);
    check(t, r.status[1] == 2 && strstr(r.text[1], "another run's rank 0"), "the other run: status %d: %s", r.status[1],
          r.text[1]);
    r.n = 0;
    port = free_port();
    fd = socket(AF_INET, SOCK_STREAM, 0);
    address.sin_port = htons((uint16_t)port);
    check(t, bind(fd, (struct sockaddr*)&address, sizeof address) == 0 && listen(fd, 1) == 0,
          "the port cannot be taken");
    start_rank(&r, place_at(0, 2, port), 5.0, 5.0, ranks_nothing, 0);
    end_ranks(&r);
    close(fd);
    check(t, r.status[0] == 2 && strstr(r.text[0], "rank 0 cannot listen there: Address already in use"),
          "port in use: status %d: %s", r.status[0], r.text[0]);
}

// the secret that must be known, and a time that tells nothing about it
static void test_hmac(Test* t) {
    const struct { const char *key, *text, *sum; } cases[] = {  // RFC 4231, cases 2, 1 and 6; the sum's first 8 bytes
        {"Jefe", "what do ya want for nothing?", "5bdcc146bf60754e"},
        {"\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b", "Hi There", "b0344c61d8db3853"},
        {NULL, "Test Using Larger Than Block-Size Key - Hash Key First", "60e431591ee0b67f"}};
    for (int i = 0; i < 3; i++) {
        char key[132], found[17];
        uint8_t sum[SHA256_BYTES], other[SHA256_BYTES];
        Hmac h;
        memset(key, 0xaa, sizeof key);
        key[131] = '\0';
        if (cases[i].key) { strcpy(key, cases[i].key); }
        hmac_begin(&h, key, strlen(key));
        for (const char* p = cases[i].text; *p; p++) { hmac_add(&h, p, 1); }
        hmac_end(&h, sum);
        for (int k = 0; k < 8; k++) { snprintf(found + 2 * k, 3, "%02x", sum[k]); }
        check(t, strcmp(found, cases[i].sum) == 0, "case %d: %s, expected %s", i, found, cases[i].sum);
        memcpy(other, sum, sizeof other);
        check(t, hmac_is_equal(sum, other), "equal sums");
        other[SHA256_BYTES - 1] ^= 1;
        check(t, !hmac_is_equal(sum, other), "sums that differ in the last bit");
    }
}

// ranks with another secret than rank 0, or none, are turned away, and told why; rank 0 waits for its own
static void test_secret(Test* t) {
    const char* secrets[] = {"another secret of sixteen", ""};
    for (int i = 0; i < 2; i++) {
        Ranks r;
        r.n = 0;
        const int port = free_port();
        RankPlace other = place_at(1, 2, port);
        other.secret = secrets[i];
        start_rank(&r, place_at(0, 2, port), 5.0, 10.0, ranks_nothing, 0);
        start_rank(&r, other, 5.0, 10.0, ranks_nothing, 0);
        siginfo_t info;
        waitid(P_PID, (id_t)r.pid[1], &info, WEXITED | WNOWAIT);
        start_rank(&r, place_at(1, 2, port), 5.0, 10.0, ranks_nothing, 0);
        end_ranks(&r);
        check(t, r.status[1] == 2 && strstr(r.text[1], "rank 0 has another secret than rank 1"),
              "\"%s\": status %d: %s", secrets[i], r.status[1], r.text[1]);
        check(t, r.status[0] == 0 && r.status[2] == 0, "the two that know it: status %d: %s / %d: %s", r.status[0],
              r.text[0], r.status[2], r.text[2]);
        r.n = 0;
        start_rank(&r, place_at(0, 2, other.port = free_port()), 5.0, 0.5, ranks_nothing, 0);
        start_rank(&r, other, 5.0, 10.0, ranks_nothing, 0);
        end_ranks(&r);
        check(t, r.status[0] == 2 && strstr(r.text[0], "have not come: 1 (1 that came had another secret, LLMC_SECRET"),
              "nobody else: status %d: %s", r.status[0], r.text[0]);
    }
}

static int connect_to(int port) {
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr*)&address, sizeof address) == 0) { return fd; }
    close(fd);
    return -1;
}

enum { N_STRANGERS = 200 };

// for `seconds`: connections that say nothing, garbage, a hello that somebody else has said, and a byte now and then
static pid_t start_strangers(int port, double seconds) {
    pid_t child = fork();
    if (child != 0) { return child; }
    int fd[N_STRANGERS];
    TcpMesh m;
    memset(fd, 0xff, sizeof fd);
    memset(&m, 0, sizeof m);
    m.run = tcp_hash_("run");
    m.size = 2;
    m.rank = 1;
    TcpBanner banner = {TCP_MAGIC, TCP_VERSION, {0}};
    TcpHello hello = tcp_hello_(&m, &banner, 1, TCP_MEETING, 0);
    signal(SIGPIPE, SIG_IGN);
    for (double end = tcp_now_() + seconds; tcp_now_() < end; usleep(10000)) {
        for (int i = 0; i < N_STRANGERS; i++) {
            unsigned char noise[200];
            memset(noise, i, sizeof noise);
            if (fd[i] >= 0 && tcp_is_closed_(fd[i])) {
                close(fd[i]);
                fd[i] = -1;
            }
            const int is_new = fd[i] < 0;
            if (is_new) { fd[i] = connect_to(port); }
            if (fd[i] < 0) { break; }
            const void* text = i % 4 == 1 ? (const void*)noise : &hello;
            const size_t n = i % 4 == 0 ? 0 : i % 4 == 1 ? sizeof noise : i % 4 == 2 ? sizeof hello : 1;
            if (n > 0 && (is_new || n == 1) && send(fd[i], text, n, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) { continue; }
        }
    }
    _exit(0);
}

static double cpu_of_children(void) {
    struct rusage u;
    getrusage(RUSAGE_CHILDREN, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

// 200 strangers at a time: two ranks meet as if there were none, and rank 0 alone gives up when its time is over; also
// without a descriptor for any of them
static void test_crowd(Test* t) {
    for (int kind = 0; kind < 3; kind++) {
        Ranks r;
        r.n = 0;
        const int port = free_port(), is_alone = kind > 0;
        struct rlimit few, usual;
        getrlimit(RLIMIT_NOFILE, &usual);
        few = usual;
        const int next = dup(0);
        close(next);
        if (kind == 2) { few.rlim_cur = (rlim_t)next + 4; }  // rank 0's listener, and next to nothing
        setrlimit(RLIMIT_NOFILE, &few);
        const double used = cpu_of_children();
        const double start = tcp_now_();
        start_rank(&r, place_at(0, 2, port), 5.0, is_alone ? 1.0 : 20.0, ranks_nothing, 0);
        setrlimit(RLIMIT_NOFILE, &usual);
        const pid_t strangers = start_strangers(port, is_alone ? 1.5 : 1.0);
        usleep(500000);
        if (!is_alone) { start_rank(&r, place_at(1, 2, port), 5.0, 20.0, ranks_nothing, 0); }
        end_ranks(&r);
        const double seconds = tcp_now_() - start;
        check(t, cpu_of_children() - used < 0.5, "kind %d: %.1f s of computing", kind, cpu_of_children() - used);
        kill(strangers, SIGKILL);
        waitpid(strangers, NULL, 0);
        const char* text = kind == 2 ? "(connections could not be taken: Too many open files)"
                                     : is_alone ? "have not come: 1" : "";
        check(t, r.status[0] == (is_alone ? 2 : 0) && strstr(r.text[0], text) && (is_alone || r.status[1] == 0),
              "kind %d: status %d: %s / %s", kind, r.status[0], r.text[0], is_alone ? "" : r.text[1]);
        check(t, seconds < 2.5, "kind %d took %.1f s", kind, seconds);
    }
}

static RankPlace place_by(int rank, int size, const char* path) {
    RankPlace p = place_at(rank, size, 0);
    snprintf(p.host, sizeof p.host, "%s", path);
    return p;
}

// Ranks 1 and 2 find a file that an earlier run has left: nobody listens there, somebody who never answers, or another
// run's rank 0. They wait for their own rank 0, which comes late.
static void test_stale_file(Test* t) {
    const char* what[] = {"nobody", "a silent program", "another run's rank 0"};
    TempPath folder = temp_folder(), path = temp_path(&folder, "meet");
    for (int kind = 0; kind < 3; kind++) {
        Ranks r;
        char text[100];
        int port = free_port(), fd = socket(AF_INET, SOCK_STREAM, 0), n;
        struct sockaddr_in address;
        memset(&address, 0, sizeof address);
        address.sin_family = AF_INET;
        address.sin_port = htons((uint16_t)port);
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        int listens = kind != 1 || (bind(fd, (struct sockaddr*)&address, sizeof address) == 0 && listen(fd, 9) == 0);
        check(t, listens, "the port cannot be taken");
        n = snprintf(text, sizeof text, "ranks meet at 127.0.0.1 port %d run 00000000000000ab secret 12\n", port);
        temp_file(&folder, "meet", text, (size_t)n);
        r.n = 0;
        if (kind == 2) { start_rank(&r, place_at(0, 2, port), 5.0, 10.0, ranks_nothing, 0); }
        start_rank(&r, place_by(1, 3, path.s), 5.0, 10.0, ranks_nothing, 0);
        start_rank(&r, place_by(2, 3, path.s), 5.0, 10.0, ranks_nothing, 0);
        usleep(300000);
        start_rank(&r, place_by(0, 3, path.s), 5.0, 10.0, ranks_nothing, 0);
        if (kind == 2) { start_rank(&r, place_at(1, 2, port), 5.0, 10.0, ranks_nothing, 0); }
        end_ranks(&r);
        close(fd);
        for (int i = 0; i < r.n; i++) {
            check(t, r.status[i] == 0, "%s, process %d: status %d: %s", what[kind], i, r.status[i], r.text[i]);
        }
        check(t, access(path.s, F_OK) != 0, "%s: the file is still there after the meeting", what[kind]);
    }
    temp_remove(&folder);
}

// what cannot be a meeting: one line each, and files of the user stay as they are
static void test_bad_file(Test* t) {
    const struct {
        const char* name;
        int rank, status;
        const char* text;
    } cases[] = {
        {"never", 1, 1, "rank 0 has not written this file within 0 s"},
        {"stale", 1, 1, "at 127.0.0.1:1, as says "},
        {"nowhere/meet", 0, 2, "nowhere: No such file or directory"},
        {"nowhere/meet", 1, 2, "nowhere: No such file or directory"},
        {"book.txt", 0, 2, "expected a file by which ranks meet"},
        {"book.txt", 1, 2, "expected a file by which ranks meet"},
        {"folder", 0, 2, "expected a file by which ranks meet"},
        {"book.txt/meet", 0, 2, "Not a directory"},
    };
    TempPath folder = temp_folder(), book = temp_file(&folder, "book.txt", "call me\n", 8);
    temp_file(&folder, "folder/a", "", 0);
    temp_file(&folder, "stale", "ranks meet at 127.0.0.1 port 1 run ab secret 12\n", 48);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Ranks r;
        char path[1024];
        r.n = 0;
        snprintf(path, sizeof path, "%s/%s", folder.s, cases[i].name);
        start_rank(&r, place_by(cases[i].rank, 2, path), 5.0, 0.4, ranks_nothing, 0);
        end_ranks(&r);
        const char* end = strchr(r.text[0], '\n');
        check(t, r.status[0] == cases[i].status && strstr(r.text[0], cases[i].text) && end && end[1] == '\0',
              "%s, rank %d: expected status %d and \"%s\"; found %d: %s", cases[i].name, cases[i].rank, cases[i].status,
              cases[i].text,
              r.status[0], r.text[0]);
    }
    char text[9] = "";
    FILE* file = fopen(book.s, "r");
    check(t, file && fread(text, 1, 8, file) == 8 && strcmp(text, "call me\n") == 0,
          "a file of the user has changed: %s", text);
    if (file) { fclose(file); }
    temp_remove(&folder);
}

// while one run meets by a file, only its user can read it, and another run keeps off
static void test_file_taken(Test* t) {
    TempPath folder = temp_folder(), path = temp_path(&folder, "meet");
    struct stat status = {0};
    Ranks r;
    r.n = 0;
    const mode_t mask = umask(0);
    start_rank(&r, place_by(0, 2, path.s), 5.0, 10.0, ranks_nothing, 0);
    umask(mask);
    for (int i = 0; i < 500 && (stat(path.s, &status) != 0 || status.st_size == 0); i++) { usleep(10000); }
    check(t, (status.st_mode & 0777) == 0600, "mode %o", (unsigned)status.st_mode & 0777);
    start_rank(&r, place_by(0, 2, path.s), 5.0, 10.0, ranks_nothing, 0);
    siginfo_t info;
    waitid(P_PID, (id_t)r.pid[1], &info, WEXITED | WNOWAIT);
    start_rank(&r, place_by(1, 2, path.s), 5.0, 10.0, ranks_nothing, 0);
    end_ranks(&r);
    check(t, r.status[1] == 2 && strstr(r.text[1], "the ranks of another run are meeting by this file"),
          "the second rank 0: status %d: %s", r.status[1], r.text[1]);
    check(t, r.status[0] == 0 && r.status[2] == 0, "the first run: status %d: %s / %d: %s", r.status[0], r.text[0],
          r.status[2], r.text[2]);
    temp_remove(&folder);
}

// rank 0 listens at its own address alone; there everybody comes by, so one without a secret hears of it
static void test_addresses(Test* t) {
    char own[64];
    tcp_own_address_(own);
    if (strcmp(own, "127.0.0.1") == 0) {
        skip(t, "no network");
        return;
    }
    for (int is_secret = 0; is_secret < 2; is_secret++) {
        Ranks r;
        r.n = 0;
        RankPlace at = place_at(0, 2, free_port());
        snprintf(at.host, sizeof at.host, "%s", own);
        if (!is_secret) { at.secret = ""; }
        start_rank(&r, at, 5.0, 10.0, ranks_nothing, 0);
        usleep(200000);
        check(t, connect_to(at.port) < 0, "rank 0 listens at 127.0.0.1, too");
        at.rank = 1;
        start_rank(&r, at, 5.0, 10.0, ranks_nothing, 0);
        end_ranks(&r);
        const int warned = strstr(r.text[0], "set LLMC_SECRET to the same random text") != NULL;
        check(t, r.status[0] == 0 && r.status[1] == 0 && warned == !is_secret && !*r.text[1], "status %d: %s / %d: %s",
              r.status[0], r.text[0], r.status[1], r.text[1]);
    }
}

static void test_ipv6(Test* t) {
    const char* hosts[] = {"::1", "localhost"};
    for (int i = 0; i < 2; i++) {
        Ranks r;
        r.n = 0;
        int port = free_port();
        for (int rank = 0; rank < 3; rank++) {
            RankPlace place = place_at(rank, 3, port);
            strcpy(place.host, hosts[i]);
            start_rank(&r, place, 5.0, 10.0, ranks_nothing, 0);
        }
        end_ranks(&r);
        if (i == 0 && strstr(r.text[0], "Cannot assign requested address")) {
            skip(t, "no IPv6 on this machine");
            continue;
        }
        check(t, r.status[0] == 0 && r.status[1] == 0 && r.status[2] == 0, "%s: status %d: %s", hosts[i], r.status[0],
              r.text[0]);
    }
}

// ---- who am I? ----

typedef struct {
    const char* variables;  // "RANK=1 WORLD_SIZE=4"
    const char* typed;
    int status, rank, size;
    const char* text;       // source, or part of the message
} PlaceCase;

static void find_place(void* p) {
    const PlaceCase* k = (const PlaceCase*)p;
    char copy[512], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", k->variables);
    for (char* s = strtok_r(copy, " ", &rest); s; s = strtok_r(NULL, " ", &rest)) {
        char* value = strchr(s, '=');
        *value = '\0';
        setenv(s, value + 1, 1);
    }
    RankPlace found = rank_place(k->typed);
    if (getenv("LLMC_SECRET")) { fail_run("programs that we start would find the secret"); }
    if (found.rank != k->rank || found.size != k->size || strcmp(found.source, k->text) != 0) {
        fail_run("found rank %d of %d by \"%s\"", found.rank, found.size, found.source);
    }
}

static void test_place(Test* t) {
    PlaceCase cases[] = {
        {"RANK=1 WORLD_SIZE=4", "", 0, 1, 4, "RANK and WORLD_SIZE"},
        {"OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3", "", 0, 2, 3, "mpirun"},
        {"PMI_RANK=0 PMI_SIZE=2", "", 0, 0, 2, "PMI"},
        {"SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_STEP_ID=0", "", 0, 5, 8, "Slurm"},
        {"SLURM_PROCID=0 SLURM_NTASKS=8", "", 0, 0, 1, ""},  // a batch script, not srun
        {"", "3/4@host:29500", 0, 3, 4, "--rank"},
        {"", "3/4@[::1]:29500", 0, 3, 4, "--rank"},
        {"", "3/4@./meet:1@x", 0, 3, 4, "--rank"},
        {"RANK=1 WORLD_SIZE=4 MASTER_ADDR=/shared/meet", "", 0, 1, 4, "RANK and WORLD_SIZE"},
        {"RANK=3 WORLD_SIZE=16 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_ID=0", "", 0, 3, 16, "RANK and WORLD_SIZE"},
        {"RANK=0 WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4", "", 2, 0, 0,
         "says rank 0 of 1, but mpirun says rank 2 of 4"},
        {"RANK=1 WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4", "", 2, 0, 0, "unset one of them"},
        {"RANK=1 WORLD_SIZE=4", "2/4@host:1", 2, 0, 0, "--rank says rank 2 of 4"},
        {"RANK=1", "", 2, 0, 0, "found only one of RANK and WORLD_SIZE"},
        {"RANK=4 WORLD_SIZE=4", "", 2, 0, 0, "expected a rank below WORLD_SIZE=4"},
        {"RANK=x WORLD_SIZE=4", "", 2, 0, 0, "RANK: expected an integer 0..65535, found \"x\""},
        {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=host", "", 2, 0, 0, "MASTER_PORT: expected a port"},
        {"", "4/4@host:1", 2, 0, 0, "--rank: expected R/P@HOST:PORT"},
        {"", "1/4", 2, 0, 0, "--rank: expected R/P@HOST:PORT"},
        {"", "4/4@./meet", 2, 0, 0, "--rank: expected R/P@HOST:PORT or R/P@PATH"},
        {"", "1/4@host:70000", 2, 0, 0, "--rank: expected R/P@HOST:PORT"},
        {"RANK=1 WORLD_SIZE=4 LLMC_SECRET=0123456789abcdef", "", 0, 1, 4, "RANK and WORLD_SIZE"},
        {"RANK=1 WORLD_SIZE=4 LLMC_SECRET=0123456789abcde", "", 2, 0, 0, "expected 16 to 255 characters, found 15"},
        {"LLMC_SECRET=short", "", 0, 0, 1, ""},  // nobody to prove it to
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        check_exit(t, cases[i].variables, find_place, &cases[i], cases[i].status, cases[i].text);
    }
}

// ---- device memory ----

// elements that rank a sends to rank b, for a length of `lengths_device`
static size_t device_count(size_t n, int a, int b) { return n > 0 ? n + (size_t)(a + b) % 3 : 0; }

// n elements from each member of a group to each, in two exchanges under way at once; a rank's part for itself is
// copied
static void check_device_exchange(Test* t, Comm* c, size_t n, const Device* dev) {
    const size_t most = 100003;
    const int me = c->members[c->rank];
    float *x = (float*)rank_array(me, DT_F32, most), *in = to_device(x, most, dev);
    float *out[2], *got = (float*)new_array(most * (size_t)c->size, sizeof(float));
    CommTicket tickets[2];
    for (int call = 0; call < 2; call++) {
        CommPiece pieces[MAX_TEST_RANKS];
        out[call] = to_device(got, most * (size_t)c->size, dev);
        for (int i = 0; i < c->size; i++) {
            const int r = c->members[i];
            CommPiece piece = {in, out[call] + (size_t)i * most, 4 * device_count(n, me, r),
                               4 * device_count(n, r, me)};
            pieces[i] = piece;
        }
        tickets[call] = comm_exchange_device(c, pieces, dev, HERE);
    }
    for (int call = 1; call >= 0; call--) {
        comm_wait_device(c, tickets[call], dev);
        comm_sync_device(c, dev, HERE);
        from_device(got, out[call], most * (size_t)c->size, dev);
        for (size_t i = 0; i < most * (size_t)c->size; i++) {
            const int r = c->members[i / most];
            const float want = i % most < device_count(n, r, me) ? (float)element(r, i % most) : 0.0f;
            check(t, got[i] == want, "%zu elements from rank %d: [%zu] is %g, expected %g", n, r, i % most,
                  (double)got[i], (double)want);
        }
        memset(got, 0, sizeof(float) * most * (size_t)c->size);
    }
    device_drop(in);
    free(x);
    free(got);
}

// in the world; with `in_groups` also among the odd and the even ranks, both groups at once
static void ranks_device(Test* t, Comm* world, int in_groups) {
    const size_t lengths_device[] = {0, 1, 7, 33, 100000};
    Device dev = rank_device(world);
    comm_device_open(world);
    Comm* group = in_groups ? comm_every(world, world->rank % 2, 2, world->size / 2, HERE) : NULL;
    for (int k = 0; k < 5; k++) {
        check_device_exchange(t, world, lengths_device[k], &dev);
        if (group) { check_device_exchange(t, group, lengths_device[k], &dev); }
    }
    if (group) { comm_free(group); }
    device_free(&dev);
}

static void test_device_exchange(Test* t) {
    const int most = device_ranks(t, 3);
    for (int P = 1; P <= most; P++) { run_ranks(t, P, ranks_device, 0); }
}

static void test_device_groups(Test* t) {
    if (device_ranks(t, 4) == 4) { run_ranks(t, 4, ranks_device, 1); }
}

#ifdef SIMT
// rank 1 expects fewer bytes than rank 0 sends, and nobody compares beforehand
static void ranks_device_mismatch(Test* t, Comm* c, int number) {
    (void)t, (void)number;
    float x[8] = {0};
    Device dev = rank_device(c);
    float *in = to_device(x, 8, &dev), *out = to_device(x, 8, &dev);
    c->link->check = 0;
    comm_device_open(c);
    const size_t n_bytes = c->rank == 0 ? 32 : 16;
    CommPiece pieces[2] = {{in, out, n_bytes, n_bytes}, {in, out, n_bytes, n_bytes}};
    comm_wait_device(c, comm_exchange_device(c, pieces, &dev, HERE), &dev);
}

static void test_device_mismatch(Test* t) {
    Ranks r;
    r.n = 0;
    int port = free_port(), found = 0;
    for (int rank = 0; rank < 2; rank++) {
        start_rank(&r, place_at(rank, 2, port), 5.0, 20.0, ranks_device_mismatch, 0);
    }
    end_ranks(&r);
    for (int rank = 0; rank < 2; rank++) {
        found |= strstr(r.text[rank], "ncclRecv: rank 0 sends 32 bytes, rank 1 expects 16") != NULL;
    }
    for (int rank = 0; rank < 2; rank++) {
        found |= strstr(r.text[rank], "ncclRecv: rank 1 sends 16 bytes, rank 0 expects 32") != NULL;
    }
    check(t, found && r.status[0] == 1 && r.status[1] == 1, "status %d: %s / %d: %s", r.status[0], r.text[0],
          r.status[1], r.text[1]);
}
#endif

// ---- the tree, and a training step, on several ranks ----

enum { LEAF_N = 5, MAX_LEAVES = 64 };

static void leaf_values(float* g, int leaf) {
    float* x = random_array(LEAF_N, 1.0f, (uint64_t)leaf + 100);
    memcpy(g, x, sizeof(float) * LEAF_N);
    free(x);
}

static void small_tree(LeafTree* tree, int first, int last, const float* leaves, const Device* dev) {
    const float loss = 1.0f;
    leaf_tree_init(tree, LEAF_N, first, last, 1);
    for (int leaf = first; leaf < last; leaf++) {
        device_upload(leaf_tree_next(tree), leaves + leaf * LEAF_N, sizeof(float) * LEAF_N, dev);
        device_upload(leaf_tree_numbers(tree), &loss, sizeof loss, dev);
        leaf_tree_push(tree, dev);
    }
}

// what P ranks end with, joined as the plan says, is the root of one rank
static void check_plan(Test* t, int S, int P, const float* leaves, const float* want, const Device* dev) {
    LeafTree trees[16];
    float *stack[LEAF_TREE_MAX] = {NULL}, root[LEAF_N];
    DataParallel s;
    Comm c;
    int top = -1;
    memset(&c, 0, sizeof c);
    c.size = P;
    dp_init(&s, &c, NULL, 0, NULL, S, 0);
    for (int r = 0; r < P; r++) {
        const int first = (int)comm_share(S, r, P), last = (int)comm_share(S, r + 1, P);
        small_tree(&trees[r], first, last, leaves, dev);
        check(t, trees[r].n_nodes == s.first_node[r + 1] - s.first_node[r] && trees[r].n_nodes <= 10,
              "S %d, P %d, rank %d: %d nodes", S, P, r, trees[r].n_nodes);
    }
    for (int j = 0; j < s.n_nodes; j++) {
        stack[++top] = trees[s.nodes[j].rank].arena[s.nodes[j].k];
        for (int i = 0; i < s.nodes[j].n_joins; i++, top--) {
            residual_forward(stack[top - 1], stack[top - 1], stack[top], LEAF_N, dev);
        }
    }
    check(t, top == 0, "S %d, P %d: %d nodes are left", S, P, top + 1);
    device_download(root, stack[0], sizeof root, dev);
    check_bits(t, "root", root, want, LEAF_N);
    for (int r = 0; r < P; r++) { leaf_tree_free(&trees[r]); }
    dp_free(&s);
}

static void ranks_plan(Test* t, Comm* c, int number) {
    Device dev = rank_device(c);
    (void)number;
    float leaves[MAX_LEAVES * LEAF_N], want[LEAF_N], loss;
    for (int leaf = 0; leaf < MAX_LEAVES; leaf++) { leaf_values(leaves + leaf * LEAF_N, leaf); }
    for (int S = 1; S <= MAX_LEAVES; S++) {
        LeafTree one;
        small_tree(&one, 0, S, leaves, &dev);
        device_download(want, leaf_tree_finish(&one, &loss, &dev), sizeof want, &dev);
        check(t, loss == (float)S, "%d leaves, sum of losses %g", S, (double)loss);
        leaf_tree_free(&one);
        for (int P = 1; P <= 16; P++) { check_plan(t, S, P, leaves, want, &dev); }
    }
    device_free(&dev);
}

static void test_plan(Test* t) { run_ranks(t, device_ranks(t, 1), ranks_plan, 0); }

enum { MAX_ROWS = 8, MAX_SLICES = 55 };

typedef enum { SMALL, SMALL_FROZEN, ODD, ODD_FROZEN, N_TEST_TABLES } TestTable;

static int small_table(Tensor* table) {
    table[0] = tensor("a", 0 * sizeof(float*), 0, 100, 97, INIT_NORMAL, 1.0f, DECAY, AS_IS);       // three chunks, the last not full
    table[1] = tensor("b.%d", 1 * sizeof(float*), 3, 1, 33, INIT_ONES, 0.0f, NO_DECAY, VECTOR);
    // two chunks exactly
    table[2] = tensor("c.%d", 2 * sizeof(float*), 2, 64, 64, INIT_NORMAL, 1.0f, DECAY, TRANSPOSED);
    table[3] = tensor("d", 3 * sizeof(float*), 0, 1, 1, INIT_ONES, 0.0f, NO_DECAY, VECTOR);
    table[4] = tensor("e", 4 * sizeof(float*), 0, 200, 101, INIT_NORMAL, 1.0f, DECAY, AS_IS);
    return 5;
}

// tensors in some of six layers, experts apart and fused
static int odd_table(Tensor* table) {
    const char* kinds = "LLFLLF";
    table[0] = tensor("a", 0 * sizeof(float*), 0, 30, 31, INIT_NORMAL, 1.0f, DECAY, AS_IS);
    table[1] = tensor("b.%d", 1 * sizeof(float*), 6, 1, 33, INIT_ONES, 0.0f, NO_DECAY, VECTOR);
    table[2] = tensor("c.%d", 2 * sizeof(float*), 6, 64, 64, INIT_NORMAL, 1.0f, DECAY, TRANSPOSED);
    tensor_in_layers(&table[2], 2, 3);
    table[3] = tensor("d.%d", 3 * sizeof(float*), 6, 50, 41, INIT_NORMAL, 1.0f, DECAY, AS_IS);
    tensor_in_kinds(&table[3], kinds, "L");
    table[4] = tensor("d.%d", 4 * sizeof(float*), 6, 20, 41, INIT_NORMAL, 1.0f, DECAY, AS_IS);
    tensor_in_kinds(&table[4], kinds, "F");
    table[5] = tensor("e.%d.%d.{g,u}", 5 * sizeof(float*), 6, 24, 35, INIT_NORMAL, 1.0f, DECAY, AS_IS);
    tensor_in_layers(&table[5], 1, 1);
    tensor_experts(&table[5], 3, APART);
    table[6] = tensor("f.%d", 6 * sizeof(float*), 6, 8, 40, INIT_NORMAL, 1.0f, DECAY, AS_IS);
    tensor_in_layers(&table[6], 3, 1);
    tensor_experts(&table[6], 3, FUSED);
    table[7] = tensor("g", 7 * sizeof(float*), 0, 1, 1, INIT_ONES, 0.0f, NO_DECAY, VECTOR);
    return 8;
}

static int test_table(Tensor* table, TestTable which) {
    return which == SMALL || which == SMALL_FROZEN ? small_table(table) : odd_table(table);
}

// Which slices are frozen. Small: a tensor with all its layers. Odd: a; of b, whose layers lie in one chunk, 1, 3 and
// 4; the first c, which is a chunk, and the second d; all experts of layer 1, the second of layer 2; the second f, of three experts
static const int* test_frozen(TestTable which) {
    static const int small[MAX_SLICES] = {0, 0, 0, 0, 1, 1};
    static const int odd[MAX_SLICES] = {
        1, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0};
    return which == SMALL_FROZEN ? small : which == ODD_FROZEN ? odd : NULL;
}

typedef struct {
    float *params, *m, *v;  // on the device; moments as DataParallel.kept says
    float loss, norm;
    int numbers;            // the other numbers of leaves were summed as the losses
} Trained;

// a tensor's gradients, as far as they belong to this layer, or all of a tensor of no layer
static void upload_gradient(const DataParallel* s, int i, float* to, const float* g, int layer, const Device* dev) {
    const Tensor* t = &s->table[i];
    const int slice = tensor_slice(t, layer);
    if (slice < 0 || !to) { return; }  // nobody asks
    device_upload(to, g + t->offset + (size_t)slice * tensor_slice_elements(t),
                  sizeof(float) * tensor_layer_elements(t), dev);
}

// backward of one leaf, as a trainer does it: from the last layer to the first, then what belongs to no layer
static void leaf_backward(DataParallel* s, const float* g, const Device* dev) {
    float* d[MAX_ROWS];  // test_table says which is which
    for (int l = s->n_layers - 1; l >= 0; l--) {
        dp_point(s, d, l);
        for (int i = 0; i < s->n_tensors; i++) {
            if (s->table[i].layers > 0) { upload_gradient(s, i, d[i], g, l, dev); }
        }
        dp_layer_done(s, l, dev);
    }
    for (int i = 0; i < s->n_tensors; i++) {
        if (s->table[i].layers == 0) { upload_gradient(s, i, d[i], g, 0, dev); }
    }
    dp_leaf_done(s, dev);
}

// all leaves of this rank; gradients are small multiples of the parameters and noise, the same for every number of
// ranks
static void leaves_backward(DataParallel* s, const float* params, size_t n, int step, const Device* dev) {
    float* g = (float*)new_array(n, sizeof(float));
    for (int k = 0; k < dp_n_leaves(s); k++) {
        float* x = random_array(n, 1.0f, (uint64_t)(1000 * step + dp_leaf(s, k)));
        const float loss = x[0] * (float)(1 + 1000 * (dp_leaf(s, k) % 3));  // sums depend on the order
        for (size_t i = 0; i < n; i++) { g[i] = x[i] + 0.1f * params[i]; }
        const float numbers[] = {-4.0f * loss, 0.5f * loss};
        device_upload(dp_loss(s), &loss, sizeof loss, dev);
        if (s->n_numbers == 3) { device_upload(dp_numbers(s), numbers, sizeof numbers, dev); }
        leaf_backward(s, g, dev);
        free(x);
    }
    free(g);
}

enum { N_TENSORS = 5, N_SMALL_SLICES = 8 };  // of small_table
enum { MUON_ROOM = 1 << 17 };               // bytes, enough for matrices of 64 x 64

// three updates of S leaves on this rank's part of the world
typedef struct {
    int S, zero;           // S = 5 is verified too
    const int* frozen;     // of each slice, NULL: none
    const int* counts;     // updates of each slice before the first; NULL: all alike
    const int* discarded;  // slices of which the gradients are made 0 and the updates left out; NULL: none
    int muon;              // matrices of layers by Muon
} TestWay;

// of an arena of whole tensors
static void discard(DataParallel* s, float* grads, const int* discarded, const Device* dev) {
    for (int i = 0, slice = 0; i < s->n_tensors; i++) {
        const size_t n = tensor_slice_elements(&s->table[i]);
        for (int k = 0, n_slices = tensor_slices(&s->table[i]); k < n_slices; k++, slice++) {
            if (discarded[slice]) { device_zero(grads + s->table[i].offset + n * (size_t)k, sizeof(float) * n, dev); }
        }
    }
}

static Trained train_slices(DataParallel* s, Comm* c, Tensor* table, int n_tensors, TestWay way, const Device* dev) {
    const size_t n = tensors_layout(table, n_tensors);
    Trained out = {(float*)device_alloc(4 * n, "p"), NULL, NULL, 0.0f, 0.0f, 0};
    float* params = (float*)new_array(n, sizeof(float));
    dp_init(s, c, table, n_tensors, way.frozen, way.S, way.zero);
    dp_want_numbers(s, 2);
    dp_open(s);
    const size_t n_buffer = s->n_buffer;
    if (way.S % 2) { s->n_buffer = 2 * (size_t)s->n_round * 1000; }  // too small for a layer: it goes in several rounds
    out.m = (float*)device_alloc(4 * s->n_kept, "m");
    out.v = (float*)device_alloc(4 * s->n_kept, "v");
    tensors_init(table, n_tensors, params, 42);
    device_upload(out.params, params, 4 * n, dev);
    const Weights w = weights_of(out.params, sizeof(float), NULL, out.m, out.v);
    Verify verify;
    if (way.S == 5) { dp_verify(s, &verify, &w); }
    void* room = way.muon ? device_alloc(MUON_ROOM, "room") : NULL;
    for (int step = 0; step < 3; step++) {
        device_download(params, out.params, 4 * n, dev);
        leaves_backward(s, params, n, step, dev);
        float* grads = dp_reduce(s, &out.loss, dev);
        out.numbers = dp_sums(s)[0] == -4.0f * out.loss && dp_sums(s)[1] == 0.5f * out.loss;
        if (way.discarded) { discard(s, grads, way.discarded, dev); }
        out.norm = dp_norm(s, grads, dev);
        int updates[MAX_SLICES];
        for (int i = 0; i < MAX_SLICES; i++) {
            const int count = way.counts ? way.counts[i] : 1, is_out = way.discarded && way.discarded[i];
            updates[i] = count > 0 && !is_out ? count + step : 0;
        }
        Optimizer o = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 0, way.S == 5 ? &verify : NULL, updates, 0.95f, room};
        if (!way.counts && !way.discarded) { o.slice_updates = NULL; }
        dp_update(s, &w, grads, out.norm, &o, step + 1, dev);
    }
    if (way.S == 5) { verify_free(&verify); }
    if (room) { device_release(room, MUON_ROOM); }
    s->n_buffer = n_buffer;
    free(params);
    return out;
}

static void trained_free(Trained* x, DataParallel* s, size_t n) {
    device_release(x->params, 4 * n);
    device_release(x->m, 4 * s->n_kept);
    device_release(x->v, 4 * s->n_kept);
    dp_free(s);
}

// loss, norm, parameters and moments of what learns, of all ranks, against those of one
static void check_same(Test* t, Comm* c, DataParallel* s, const Trained* got, DataParallel* alone, const Trained* one,
                       const Device* dev) {
    check_bits(t, "loss", &got->loss, &one->loss, 1);
    check_bits(t, "norm", &got->norm, &one->norm, 1);
    check(t, got->numbers && one->numbers, "the other numbers of leaves are summed otherwise than losses");
    const Tensor *table = s->table, *last = &table[s->n_tensors - 1];
    const size_t n = last->offset + tensor_elements(last), most = 200 * 101;  // of the largest slice
    float *params = (float*)new_array(n, sizeof(float)), *want = (float*)new_array(n, sizeof(float));
    float *room = (float*)new_array(most, sizeof(float)), *other = (float*)new_array(most, sizeof(float));
    device_download(params, got->params, 4 * n, dev);
    device_download(want, one->params, 4 * n, dev);
    for (int i = 0; i < s->n_tensors; i++) {
        const size_t at = table[i].offset, n_slice = tensor_slice_elements(&table[i]);
        check_bits(t, table[i].name, params + at, want + at, tensor_elements(&table[i]));
        for (int k = 0; k < tensor_slices(&table[i]); k++) {
            if (dp_stretch(s, i, k) < 0) { continue; }
            const float* m = dp_slice(s, got->m, i, k, room, dev);
            check(t, (m != NULL) == (c->rank == 0), "slice %d of %s on rank %d", k, table[i].name, c->rank);
            if (m) { check_bits(t, "first moments", m, dp_slice(alone, one->m, i, k, other, dev), n_slice); }
            const float* v = dp_slice(s, got->v, i, k, room, dev);
            if (v) { check_bits(t, "second moments", v, dp_slice(alone, one->v, i, k, other, dev), n_slice); }
        }
    }
    float* arrays[] = {params, want, room, other};
    for (int i = 0; i < 4; i++) { free(arrays[i]); }
}

// number: 100 S + 10 table + zero
static void ranks_train(Test* t, Comm* c, int number) {
    const int S = number / 100, zero = number % 10;
    const TestTable which = (TestTable)(number / 10 % 10);
    const TestWay by_one = {S, 0, test_frozen(which), NULL, NULL, 0};
    const TestWay by_all = {S, zero, test_frozen(which), NULL, NULL, 0};
    Tensor table[MAX_ROWS];
    DataParallel s, alone;
    const int n_tensors = test_table(table, which);
    const size_t n = tensors_layout(table, n_tensors);
    Device dev = rank_device(c);
    Trained one = train_slices(&alone, NULL, table, n_tensors, by_one, &dev);
    c->link->check = number % 3 == 0;
    uint64_t before = c->link->bytes_sent;
    Trained got = train_slices(&s, c, table, n_tensors, by_all, &dev);
    uint64_t sent = c->link->bytes_sent - before, planned = (uint64_t)(3.0 * (dp_bytes(&s) + dp_norm_bytes(c)));
    const int met = c->size > 1 && DEVICE_MEETS;  // beside the gradients an id was sent
    // the first norm has two passes, the others one where they find what they expect
    const uint64_t pass = (uint64_t)dp_norm_bytes(c), more = sent - planned;
    const int is_planned = sent >= planned && more <= 3 * pass && (pass == 0 || more % pass == 0);
    check(t, c->link->check || c->size == 1 || met || is_planned, "sent %llu bytes, planned %llu",
          (unsigned long long)sent, (unsigned long long)planned);
    check_same(t, c, &s, &got, &alone, &one, &dev);
    trained_free(&got, &s, n);
    trained_free(&one, &alone, n);
    device_free(&dev);
}

static void test_train(Test* t) {
    const int leaves[] = {1, 3, 4, 8, 11};
    const int most = device_ranks(t, 4);
    for (int P = 1; P <= most; P++) {
        for (int k = 0; k < 5; k++) {
            if (DEVICE_MEETS && (P + k) % 3 != 0) { continue; }  // a third of them, for kernels take their time on a CPU
            const int number = 100 * leaves[k] + 10 * ((P + k) % N_TEST_TABLES);
            for (int zero = 0; zero < 3; zero++) { run_ranks(t, P, ranks_train, number + zero); }
        }
    }
}

// number: 100 S + 10 table + zero; the second of two updates is measured
static void ranks_squares(Test* t, Comm* c, int number) {
    const int S = number / 100;
    const int* frozen = test_frozen((TestTable)(number / 10 % 10));
    Tensor table[MAX_ROWS];
    DataParallel s;
    const int n_tensors = test_table(table, (TestTable)(number / 10 % 10));
    const size_t n = tensors_layout(table, n_tensors);
    Device dev = rank_device(c);
    float loss, *params = random_array(n, 1.0f, 7);
    double* found = (double*)new_array((size_t)S, sizeof(double));
    double* want = (double*)new_array((size_t)S, sizeof(double));
    dp_init(&s, c, table, n_tensors, frozen, S, number % 10);
    dp_open(&s);
    for (int step = 0; step < 2; step++) {
        dp_measure(&s, step == 1, &dev);
        leaves_backward(&s, params, n, step, &dev);
        dp_reduce(&s, &loss, &dev);
    }
    dp_leaf_squares(&s, found);
    for (int leaf = 0; leaf < S; leaf++) {
        float* g = random_array(n, 1.0f, (uint64_t)(1000 + leaf));
        for (size_t i = 0; i < n; i++) { g[i] = g[i] + 0.1f * params[i]; }
        for (int i = 0, slice = 0; i < n_tensors; i++) {
            const size_t n_slice = tensor_slice_elements(&table[i]);
            for (int k = 0; k < tensor_slices(&table[i]); k++, slice++) {
                const float* first = g + table[i].offset + n_slice * (size_t)k;
                if (slice_is_frozen(frozen, slice)) { continue; }
                NormSum square = norm_sum_init();
                norm_see_ref(&square, first, n_slice);
                norm_add_ref(&square, first, n_slice);
                want[leaf] += norm_value(&square);
            }
        }
        free(g);
    }
    check(t, memcmp(found, want, sizeof(double) * (size_t)S) == 0,
          "%d leaves on %d ranks: first %.17g, expected %.17g", S, c->size, found[0], want[0]);
    free(params), free(found), free(want);
    dp_free(&s);
    device_free(&dev);
}

static void test_squares(Test* t) {
    const int most = device_ranks(t, 4);
    for (int P = 1; P <= most; P++) {
        for (int zero = 0; zero < 3; zero++) {
            run_ranks(t, P, ranks_squares, 100 * (P + 2) + 10 * ODD_FROZEN + zero);
            run_ranks(t, P, ranks_squares, 200 + 10 * SMALL + zero);
        }
    }
}

// b has three layers, c two, cut by no boundary of a chunk: layer 1 of b is frozen, layer 0 of c has had one update more than the
// run, layer 1 came four later, e stays as it is. What the table says element by element is what ranks and parts must give.
static const int small_frozen[MAX_SLICES] = {0, 0, 1}, small_counts[MAX_SLICES] = {1, 1, 1, 1, 2, 5, 1, 0};

// three updates of one rank by the definition: gradients of one leaf, the norm without frozen slices, AdamW slice by
// slice
static void train_by_slices(float* params, float* m, float* v, const Tensor* table, size_t n) {
    float *g = (float*)new_array(n, sizeof(float)), norm;
    for (int step = 0; step < 3; step++) {
        float* x = random_array(n, 1.0f, (uint64_t)(1000 * step));
        NormSum sum = norm_sum_init();
        for (size_t i = 0; i < n; i++) { g[i] = x[i] + 0.1f * params[i]; }
        memset(g + table[1].offset + 33, 0, 33 * sizeof(float));
        for (int i = 0; i < N_TENSORS; i++) {
            norm_see_ref(&sum, g + table[i].offset, tensor_elements(&table[i]));
        }
        for (int i = 0; i < N_TENSORS; i++) {
            norm_add_ref(&sum, g + table[i].offset, tensor_elements(&table[i]));
        }
        norm = (float)sqrt(norm_value(&sum));
        for (int i = 0, slice = 0; i < N_TENSORS; i++) {
            const size_t n_slice = tensor_slice_elements(&table[i]);
            for (int l = 0; l < tensor_slices(&table[i]); l++, slice++) {
                const size_t at = table[i].offset + n_slice * (size_t)l;
                const AdamW a = adamw_step(1e-2f, 0.9f, 0.95f, 1e-8f, 1.0f / norm, small_counts[slice] + step);
                const int stays = small_frozen[slice] || small_counts[slice] == 0;
                const float decay = table[i].decay == DECAY ? 0.1f : 0.0f;
                if (!stays) { adamw_update_ref(params + at, m + at, v + at, g + at, n_slice, decay, &a); }
            }
        }
        free(x);
    }
    free(g);
}

// number: 10 S + zero. With one leaf also against the definition
static void ranks_slices(Test* t, Comm* c, int number) {
    const int S = number / 10, zero = number % 10;
    Tensor table[MAX_ROWS];
    DataParallel s, alone;
    const int n_tensors = test_table(table, SMALL);
    const size_t n = tensors_layout(table, n_tensors);
    Device dev = rank_device(c);
    const TestWay by_one = {S, 0, small_frozen, small_counts, NULL, 0};
    const TestWay by_all = {S, zero, small_frozen, small_counts, NULL, 0};
    Trained one = train_slices(&alone, NULL, table, n_tensors, by_one, &dev);
    Trained got = train_slices(&s, c, table, n_tensors, by_all, &dev);
    check_same(t, c, &s, &got, &alone, &one, &dev);
    if (S == 1 && !FAST_KERNELS) {
        float *params = (float*)new_array(n, sizeof(float)), *found = (float*)new_array(n, sizeof(float));
        float *m = (float*)new_array(n, sizeof(float)), *v = (float*)new_array(n, sizeof(float));
        tensors_init(table, n_tensors, params, 42);
        train_by_slices(params, m, v, table, n);
        device_download(found, one.params, 4 * n, &dev);
        check_bits(t, "parameters by the definition", found, params, n);
        for (int i = 0, slice = 0; i < n_tensors; i++) {
            const size_t n_slice = tensor_slice_elements(&table[i]);
            for (int k = 0; k < tensor_slices(&table[i]); k++, slice++) {
                if (small_frozen[slice]) { continue; }
                const float* want = v + table[i].offset + n_slice * (size_t)k;
                check_bits(t, "second moments by the definition", dp_slice(&alone, one.v, i, k, found, &dev), want,
                           n_slice);
            }
        }
        float* arrays[] = {params, found, m, v};
        for (int i = 0; i < 4; i++) { free(arrays[i]); }
    }
    trained_free(&got, &s, n);
    trained_free(&one, &alone, n);
    device_free(&dev);
}

// the same of updates with Muon, of odd_table's tensors: each matrix by itself, gate and up of each expert apart
static void train_by_matrices(float* params, float* m, float* v, const Tensor* table, int n_tensors, size_t n) {
    enum { MOST = 64 * 64 };
    float *g = (float*)new_array(n, sizeof(float)), *x = (float*)new_array(MOST, sizeof(float));
    float* room = (float*)new_array(MUON_ROOM, 1);
    for (int step = 0; step < 3; step++) {
        float* noise = random_array(n, 1.0f, (uint64_t)(1000 * step));
        NormSum sum = norm_sum_init();
        for (size_t i = 0; i < n; i++) { g[i] = noise[i] + 0.1f * params[i]; }
        for (int i = 0; i < n_tensors; i++) { norm_see_ref(&sum, g + table[i].offset, tensor_elements(&table[i])); }
        for (int i = 0; i < n_tensors; i++) { norm_add_ref(&sum, g + table[i].offset, tensor_elements(&table[i])); }
        const float scale = 1.0f / (float)sqrt(norm_value(&sum));
        const AdamW a = adamw_step(1e-2f, 0.9f, 0.95f, 1e-8f, scale, step + 1);
        const Muon u = {1e-2f, 0.95f, scale};
        for (int i = 0; i < n_tensors; i++) {
            const int is_matrix = i >= 2 && i <= 6, rows = i == 5 ? table[i].rows / 2 : table[i].rows;
            const size_t all = tensor_elements(&table[i]), each = is_matrix ? (size_t)(rows * table[i].columns) : all;
            const float decay = table[i].decay == DECAY ? 0.1f : 0.0f;
            for (size_t at = table[i].offset; at < table[i].offset + all; at += each) {
                if (is_matrix) {
                    muon_update_ref(params + at, m + at, g + at, rows, table[i].columns, decay, &u, x, room);
                } else { adamw_update_ref(params + at, m + at, v + at, g + at, all, decay, &a); }
            }
        }
        free(noise);
    }
    free(g), free(x), free(room);
}

// number: 100 S + 10 table + zero. With one leaf of odd_table also against the definition; `one` is on all ranks the
// same, so rank 0 alone takes that time
static void ranks_muon(Test* t, Comm* c, int number) {
    const int S = number / 100, zero = number % 10;
    const TestTable which = (TestTable)(number / 10 % 10);
    const TestWay by_one = {S, 0, test_frozen(which), NULL, NULL, 1};
    const TestWay by_all = {S, zero, test_frozen(which), NULL, NULL, 1};
    Tensor table[MAX_ROWS];
    DataParallel s, alone;
    const int n_tensors = test_table(table, which);
    const size_t n = tensors_layout(table, n_tensors);
    Device dev = rank_device(c);
    Trained one = train_slices(&alone, NULL, table, n_tensors, by_one, &dev);
    Trained got = train_slices(&s, c, table, n_tensors, by_all, &dev);
    check_same(t, c, &s, &got, &alone, &one, &dev);
    if (S == 1 && which == ODD && zero == 0 && c->rank == 0 && !FAST_KERNELS) {
        float *params = (float*)new_array(n, sizeof(float)), *found = (float*)new_array(n, sizeof(float));
        float *m = (float*)new_array(n, sizeof(float)), *v = (float*)new_array(n, sizeof(float));
        tensors_init(table, n_tensors, params, 42);
        train_by_matrices(params, m, v, table, n_tensors, n);
        device_download(found, one.params, 4 * n, &dev);
        check_bits(t, "parameters by the definition", found, params, n);
        device_download(found, one.m, 4 * n, &dev);
        check_bits(t, "moments by the definition", found, m, n);
        device_download(found, one.v, 4 * n, &dev);
        check_bits(t, "second moments, those of matrices 0", found, v, n);
        float* arrays[] = {params, found, m, v};
        for (int i = 0; i < 4; i++) { free(arrays[i]); }
    }
    trained_free(&got, &s, n);
    trained_free(&one, &alone, n);
    device_free(&dev);
}

// kernels take their time on a CPU: each table once
static void test_muon(Test* t) {
    const int most = device_ranks(t, 4);
    for (int P = 1; P <= most; P++) {
        for (int zero = 0; zero < 2 && (!DEVICE_MEETS || P == 2); zero++) {
            if (!DEVICE_MEETS || zero == 0) { run_ranks(t, P, ranks_muon, 100 + 10 * ODD + zero); }
            if (!DEVICE_MEETS || zero == 1) { run_ranks(t, P, ranks_muon, 500 + 10 * ODD_FROZEN + zero); }
        }
    }
}

static void test_slices(Test* t) {
    const int most = device_ranks(t, 4);
    for (int P = 1; P <= most; P++) {
        for (int zero = 0; zero < 3 && (!DEVICE_MEETS || P == 2); zero++) {
            run_ranks(t, P, ranks_slices, 10 + zero);
            run_ranks(t, P, ranks_slices, 50 + zero);
        }
    }
}

// arena: of what this rank keeps; whole: a whole arena, on the host
static void deal(const DataParallel* s, float* arena, const float* whole, const Device* dev) {
    for (int i = 0; i < s->n_stretches; i++) {
        const Part kept = s->kept[i];
        device_upload(arena + kept.at, whole + kept.tensor->offset + kept.first, sizeof(float) * kept.n, dev);
    }
    device_sync(dev);
}

#ifdef __CUDACC__
// the stored parameters anew from the masters that the ranks keep, with the bits of update t; frozen ones stay
static void round_anew(DataParallel* s, const Weights* w, int t, const Device* dev) {
    for (int i = 0; i < s->n_stretches; i++) {
        for (int k = 0; k < s->stretches[i].n_slices; k++) {
            Weights own;
            const Part part = dp_kept_weights_(s, w, i, k, &own);
            const ElementNumbers numbers = tensor_numbers(part.tensor, part.first);
            if (part.n > 0) { weights_round(&own, part.n, (uint32_t)t, numbers, dev); }
        }
    }
    if (s->zero > 0) { dp_gather(s, w->stored, NULL, dev); }
}

// bf16 parameters, rounded from float masters of which each rank keeps its part, after two updates, as bits
static void train_stored(uint16_t* bits, Comm* c, Tensor* table, size_t n, int zero, Test* t, const Device* dev) {
    const size_t n_bytes = sizeof(__nv_bfloat16) * n;
    DataParallel s;
    float *params = (float*)new_array(n, sizeof(float)), loss;
    uint16_t* again = (uint16_t*)new_array(n, sizeof(uint16_t));
    const int frozen[N_SMALL_SLICES] = {0, 0, 1};  // of b
    tensors_store(table, N_TENSORS, sizeof(__nv_bfloat16));
    dp_init(&s, c, table, N_TENSORS, frozen, 3, zero);
    dp_open(&s);
    float *master = (float*)device_alloc(4 * s.n_kept, "masters"), *m = (float*)device_alloc(8 * s.n_kept, "moments");
    const Weights w = weights_of(device_alloc(n_bytes, "bf16"), sizeof(__nv_bfloat16), master, m, m + s.n_kept);
    tensors_init(table, N_TENSORS, params, 42);
    deal(&s, master, params, dev);
    for (size_t i = 0; i < n; i++) { bits[i] = (uint16_t)(float_bits(params[i]) >> 16); }  // of what is frozen they stay
    device_upload(w.stored, bits, n_bytes, dev);
    device_sync(dev);
    round_anew(&s, &w, 0, dev);
    for (int step = 0; step < 2; step++) {
        const Optimizer o = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 0, NULL, NULL, 0.0f, NULL};
        device_download(bits, w.stored, n_bytes, dev);
        for (size_t i = 0; i < n; i++) { params[i] = float_from_bits((uint32_t)bits[i] << 16); }
        leaves_backward(&s, params, n, step, dev);
        const float* grads = dp_reduce(&s, &loss, dev);
        dp_update(&s, &w, grads, dp_norm(&s, grads, dev), &o, step + 1, dev);
    }
    device_download(bits, w.stored, n_bytes, dev);
    for (size_t i = 0; i < n; i++) { again[i] = i < table[1].offset + 33 || i >= table[1].offset + 66 ? 0 : bits[i]; }
    device_upload(w.stored, again, n_bytes, dev);
    device_sync(dev);
    round_anew(&s, &w, 2, dev);
    device_download(again, w.stored, n_bytes, dev);
    check(t, memcmp(again, bits, n_bytes) == 0, "--zero %d: other parameters from the masters than from the update",
          zero);
    device_release(w.stored, n_bytes);
    device_release(master, 4 * s.n_kept);
    device_release(m, 8 * s.n_kept);
    dp_free(&s);
    free(params);
    free(again);
}

static void ranks_stored(Test* t, Comm* c, int zero) {
    Tensor table[MAX_ROWS];
    const size_t n = tensors_layout(table, test_table(table, SMALL));
    Device dev = rank_device(c);
    uint16_t *want = (uint16_t*)new_array(n, sizeof(uint16_t)), *got = (uint16_t*)new_array(n, sizeof(uint16_t));
    train_stored(want, NULL, table, n, 0, t, &dev);
    train_stored(got, c, table, n, zero, t, &dev);
    check(t, memcmp(got, want, sizeof(uint16_t) * n) == 0, "--zero %d on %d ranks: other parameters than on one", zero,
          c->size);
    free(want);
    free(got);
    device_free(&dev);
}

static void test_stored(Test* t) {
    const int most = device_ranks(t, 3);
    for (int zero = 0; zero < 3 && most >= 2; zero++) { run_ranks(t, zero == 1 ? most : 2, ranks_stored, zero); }
}
#endif

// ---- validation ----

enum { EVAL_T = 7, EVAL_B = 3 };

typedef struct {
    int* targets;  // the Evaluator's
    float losses[EVAL_B * EVAL_T];
    int n_masked;  // of the targets one in so many does not count, 0: all count
} EvalModel;

static const float* eval_losses(void* model, const int* inputs, const int* targets, int B, int T) {
    EvalModel* e = (EvalModel*)model;
    (void)targets;
    for (int n = 0; n < B * T; n++) {
        if (e->n_masked > 0 && inputs[n] % e->n_masked == 0) { e->targets[n] = -1; }
        e->losses[n] = e->targets[n] < 0 ? 0.0f : 0.1f * (float)(inputs[n] + 3 * e->targets[n]);
    }
    return e->losses;
}

// how many targets count, and a sum that depends on the order of batches
static void eval_scores(void* model, const int* targets, int B, int T, double* scores) {
    const EvalModel* e = (const EvalModel*)model;
    for (int n = 0; n < B * T; n++) {
        scores[0] += targets[n] >= 0;
        scores[1] += targets[n] >= 0 ? (double)e->losses[n] * 1e-3 : 0.0;
    }
}

// number: n_masked
static void ranks_evaluate(Test* t, Comm* c, int number) {
    int inputs[EVAL_B * EVAL_T], targets[EVAL_B * EVAL_T];
    EvalModel model = {targets, {0}, number};
    RunOptions o;
    Tokenizer tokenizer;
    TokenData data;
    DataLoader rows;
    double scores[2] = {NAN, NAN}, bits, want_bits, sum = 0.0, want_scores[2] = {0.0, 0.0};
    int64_t n_counted = 0;
    memset(&o, 0, sizeof o);
    o.batch_size = EVAL_B;
    o.eval_batches = 100;
    tokenizer_open(&tokenizer, "bytes");
    tokens_open(&data, "dev/hello.txt", &tokenizer);
    dataloader_init(&rows, &data, EVAL_T, ORDER_FILE, 0);
    const Evaluator e = {&o, c, &tokenizer, EVAL_T, inputs, targets, eval_losses, &model, NULL, eval_scores, 2, scores, 1, 0, 0, 0};
    const float loss = evaluate_loss(&e, &rows, &bits);
    for (int64_t first = 0; first < rows.n_rows && first < 100 * EVAL_B; first += EVAL_B) {
        const int B = rows.n_rows - first < EVAL_B ? (int)(rows.n_rows - first) : (int)EVAL_B;
        double batch[2] = {0.0, 0.0};
        float batch_sum = 0.0f;
        dataloader_batch(&rows, first, B, inputs, targets);
        eval_losses(&model, inputs, targets, B, EVAL_T);
        for (int n = 0; n < B * EVAL_T; n++) { batch_sum += model.losses[n]; }
        eval_scores(&model, targets, B, EVAL_T, batch);
        for (int k = 0; k < 2; k++) { want_scores[k] += batch[k]; }
        sum += (double)batch_sum;
    }
    n_counted = (int64_t)want_scores[0];  // each of a byte
    const float want = (float)(sum / (double)n_counted);
    want_bits = sum / log(2.0) / (double)n_counted;
    check(t, rows.n_rows > 2 * EVAL_B && rows.n_rows % EVAL_B > 0, "%lld rows: several batches, the last not full",
          (long long)rows.n_rows);
    check_bits(t, "loss", &loss, &want, 1);
    check(t, bits == want_bits, "bits per byte: found %.17g, expected %.17g", bits, want_bits);
    check(t, memcmp(scores, want_scores, sizeof scores) == 0, "scores %.17g and %.17g, expected %.17g and %.17g",
          scores[0], scores[1], want_scores[0], want_scores[1]);
    tokens_close(&data);
    tokenizer_free(&tokenizer);
}

static void test_evaluate(Test* t) {
    for (int P = 1; P <= 4; P++) {
        run_ranks(t, P, ranks_evaluate, 0);
        run_ranks(t, P, ranks_evaluate, 2);
    }
}

// ---- what is frozen costs nothing ----

// The bits of a run that computes all gradients, makes those of frozen slices 0 and leaves out their updates. number:
// 100 S + zero
static void ranks_frozen(Test* t, Comm* c, int number) {
    const int S = number / 100, zero = number % 10, *frozen = test_frozen(ODD_FROZEN);
    const TestWay discarding = {S, 0, NULL, NULL, frozen, 0}, freezing = {S, zero, frozen, NULL, NULL, 0};
    Tensor table[MAX_ROWS];
    DataParallel s, alone;
    const int n_tensors = test_table(table, ODD_FROZEN);
    const size_t n = tensors_layout(table, n_tensors);
    Device dev = rank_device(c);
    Trained one = train_slices(&alone, NULL, table, n_tensors, discarding, &dev);
    Trained got = train_slices(&s, c, table, n_tensors, freezing, &dev);
    check_same(t, c, &s, &got, &alone, &one, &dev);
    trained_free(&got, &s, n);
    trained_free(&one, &alone, n);
    device_free(&dev);
}

static void test_frozen_bits(Test* t) {
    const int most = device_ranks(t, 4);
    for (int P = 1; P <= most; P++) {
        for (int zero = 0; zero < 3 && (!DEVICE_MEETS || P == 2); zero++) {
            for (int S = 3; S <= 5; S++) { run_ranks(t, P, ranks_frozen, 100 * S + zero); }
        }
    }
}

// 0 where a layer's field is NULL, else 1, from the last row to the first: "10010101"
static const char* fields_text(DataParallel* s, int layer) {
    static char out[MAX_ROWS + 1];
    float* d[MAX_ROWS];
    dp_point(s, d, layer);
    for (int i = 0; i < s->n_tensors; i++) { out[i] = d[i] ? '1' : '0'; }
    out[s->n_tensors] = '\0';
    return out;
}

static void check_fields(Test* t, DataParallel* s, int layer, const char* expected) {
    const char* found = fields_text(s, layer);
    check(t, strcmp(found, expected) == 0, "layer %d: fields %s, expected %s", layer, found, expected);
}

// arenas hold what learns, at multiples of 16; fields of what does not learn are NULL
static void ranks_frozen_memory(Test* t, Comm* alone, int number) {
    (void)alone, (void)number;
    const size_t b = 33 + 33 + 33, c = 4096, d = 3 * 2050, e = 2 * 820, experts = 4 * 2520, f = 2 * 960;
    const size_t learning = 3 * 48 + c + 2064 + 4112 + 1648 + 10080 + 2 * 960 + 16;
    Tensor table[MAX_ROWS];
    DataParallel s;
    tensors_layout(table, test_table(table, ODD_FROZEN));
    dp_init(&s, NULL, table, 8, test_frozen(ODD_FROZEN), 3, 0);
    check(t, s.n_kept == learning && s.n_reduced == learning, "one rank keeps %zu and %zu elements, expected %zu",
          s.n_kept, s.n_reduced, learning);
    check(t, dp_gradient_bytes(&s) == 8.0 * (double)learning, "two arenas: %.0f bytes", dp_gradient_bytes(&s));
    dp_open(&s);
    check_fields(t, &s, 0, "01010001");  // b and the first d; g is of no layer
    check_fields(t, &s, 1, "00000001");
    check_fields(t, &s, 2, "01001101");
    check_fields(t, &s, 3, "00010111");
    check_fields(t, &s, 4, "00010101");
    check_fields(t, &s, 5, "01101111");
    dp_free(&s);
    for (int P = 2; P <= 4; P++) {  // all ranks together keep each element once
        size_t n = 0;
        for (int rank = 0; rank < P; rank++) {
            Comm comm;
            memset(&comm, 0, sizeof comm);
            comm.size = P;
            comm.rank = rank;
            dp_init(&s, &comm, table, 8, test_frozen(ODD_FROZEN), 3, 2);
            for (int i = 0; i < s.n_stretches; i++) { n += s.kept[i].n; }
            dp_free(&s);
        }
        check(t, n == b + c + d + e + experts + f + 1, "%d ranks keep %zu elements", P, n);
    }
}

static void test_frozen_memory(Test* t) { run_ranks(t, 1, ranks_frozen_memory, 0); }  // a process that may begin with CUDA

// nothing learns at all
static void ranks_all_frozen(Test* t, Comm* c, int zero) {
    int frozen[MAX_SLICES];
    for (int i = 0; i < MAX_SLICES; i++) { frozen[i] = 1; }
    const TestWay way = {4, zero, frozen, NULL, NULL, 0};
    Tensor table[MAX_ROWS];
    DataParallel s;
    Device dev = rank_device(c);
    const int n_tensors = test_table(table, ODD);
    const size_t n = tensors_layout(table, n_tensors);
    float *params = (float*)new_array(n, sizeof(float)), *found = (float*)new_array(n, sizeof(float));
    Trained got = train_slices(&s, c, table, n_tensors, way, &dev);
    check(t, s.n_kept == 0 && s.n_reduced == 0 && got.norm == 0.0f, "%zu moments, norm %g", s.n_kept, (double)got.norm);
    tensors_init(table, n_tensors, params, 42);
    device_download(found, got.params, 4 * n, &dev);
    check_bits(t, "parameters", found, params, n);
    free(params), free(found);
    trained_free(&got, &s, n);
    device_free(&dev);
}

static void test_all_frozen(Test* t) {
    const int most = device_ranks(t, 2);
    for (int P = 1; P <= most; P++) {
        for (int zero = 0; zero < 3; zero++) { run_ranks(t, P, ranks_all_frozen, zero); }
    }
}

// a model of these tensors, its sizes and plan alone
static void plan_model(Model* m, Comm* c, TestTable which, int zero) {
    const int* frozen = test_frozen(which);
    memset(m, 0, sizeof *m);
    model_layout(m, test_table(m->table, which));
    const size_t n_bytes = sizeof(int) * (size_t)m->n_slices;
    m->frozen = frozen ? (int*)memcpy(new_array((size_t)m->n_slices, sizeof(int)), frozen, n_bytes) : NULL;
    model_plan(m, c, 4, zero);
}

static void unplan_model(Model* m) {
    model_plan_free(m);
    free(m->frozen);
}

// the file of the moments of what learns, each of them a number of its slice
static void write_moments(const char* path, TestTable which) {
    Model model;
    plan_model(&model, NULL, which, 0);
    float *m = (float*)new_array(model.n_kept, sizeof(float)), *v = (float*)new_array(model.n_kept, sizeof(float));
    for (int i = 0, slice = 0; i < model.n_table; i++) {
        for (int k = 0; k < tensor_slices(&model.table[i]); k++, slice++) {
            const Part kept = model_kept(&model, i, k);
            for (size_t j = kept.at; j < kept.at + kept.n; j++) {
                m[j] = (float)(1 + slice);
                v[j] = (float)(100 + slice);
            }
        }
    }
    moments_save(path, &model, m, v, NULL);
    free(m), free(v);
    unplan_model(&model);
}

// A run goes on with other frozen slices than the file was written with. number: 100 then + 10 now + zero
static void ranks_resume(Test* t, Comm* c, int number) {
    const TestTable then = (TestTable)(number / 100), now = (TestTable)(number / 10 % 10);
    const int *before = test_frozen(then), *frozen = test_frozen(now);
    Model model;
    Device dev = rank_device(c);
    TempPath folder = temp_folder(), path = temp_path(&folder, "optimizer.safetensors");
    write_moments(path.s, then);
    plan_model(&model, c, now, number % 10);
    float *m = (float*)device_alloc(4 * model.n_kept, "m"), *v = (float*)device_alloc(4 * model.n_kept, "v");
    float* room = (float*)new_array(200 * 101, sizeof(float));
    moments_load_layers(path.s, &model, m, v, NULL, &dev);
    for (int i = 0, slice = 0; i < model.n_table; i++) {
        const size_t n = tensor_slice_elements(&model.table[i]);
        for (int k = 0; k < tensor_slices(&model.table[i]); k++, slice++) {
            if (slice_is_frozen(frozen, slice)) { continue; }
            const int was_frozen = before && before[slice];
            for (int of_v = 0; of_v < 2; of_v++) {
                const float want = was_frozen ? 0.0f : (float)((of_v ? 100 : 1) + slice);
                const float* found = model_slice(&model, of_v ? v : m, i, k, room, &dev);
                check(t, !found || (found[0] == want && found[n - 1] == want), "slice %d begins with %g, expected %g",
                      slice, found ? (double)found[0] : 0.0, (double)want);
            }
        }
    }
    temp_remove(&folder);
    free(room);
    device_release(m, 4 * model.n_kept);
    device_release(v, 4 * model.n_kept);
    unplan_model(&model);
    device_free(&dev);
}

static void check_resume(Test* t, int P, int number, const char* warning) {
    const int port = free_port();
    Ranks r;
    r.n = 0;
    for (int k = 0; k < P; k++) { start_rank(&r, place_at(k, P, port), 20.0, 20.0, ranks_resume, number); }
    end_ranks(&r);
    for (int k = 0; k < P; k++) {
        const char* line = k == 0 ? warning : "";
        const int said = *line ? strstr(r.text[k], line) != NULL : !*r.text[k];
        check(t, r.status[k] == 0 && said, "rank %d of %d: status %d: %s", k, P, r.status[k], r.text[k]);
    }
}

// a checkpoint with the moments of everything is one from before what is frozen cost nothing
static void test_resume(Test* t) {
    const struct { TestTable then, now; const char* warning; } cases[] = {
        {ODD, ODD_FROZEN, ""}, {ODD_FROZEN, ODD_FROZEN, ""},
        {ODD_FROZEN, ODD, ": 15 tensors that learn now were frozen or not there: their moments begin with 0"}};
    const int most = device_ranks(t, 3);
    for (int i = 0; i < 3; i++) {
        for (int P = 1; P <= most; P++) {
            for (int zero = 0; zero < 3; zero++) {
                check_resume(t, P, 100 * (int)cases[i].then + 10 * (int)cases[i].now + zero, cases[i].warning);
            }
        }
    }
}

// masters, dealt out and collected again; what is frozen comes from the stored weights
static void ranks_masters(Test* t, Comm* c, int zero) {
    Model model;
    Device dev = rank_device(c);
    plan_model(&model, c, ODD_FROZEN, zero);
    const size_t n = model.n;
    float *expected = random_array(n, 1.0f, 3), *master = (float*)device_alloc(4 * model.n_kept, "masters");
    uint16_t* bits = (uint16_t*)new_array(n, sizeof(uint16_t));
    for (size_t i = 0; i < n; i++) { bits[i] = (uint16_t)(float_bits(expected[i]) >> 16); }
    void* stored = device_alloc(2 * n, "weights");
    model_layout_stored(&model, 2);
    model.w = weights_of(stored, 2, master, NULL, NULL);
    device_upload(stored, bits, 2 * n, &dev);
    deal(&model.dp, master, expected, &dev);
    const float* whole = model_whole(&model, master, &dev, &dev);
    check(t, (whole != NULL) == (c->rank == 0), "rank 0 gets them, and no other");
    for (int i = 0, slice = 0; i < model.n_table && whole; i++) {
        const size_t n_slice = tensor_slice_elements(&model.table[i]);
        for (int k = 0; k < tensor_slices(&model.table[i]); k++, slice++) {
            const size_t at = model.table[i].offset + n_slice * (size_t)k;
            for (size_t j = at; j < at + n_slice && slice_is_frozen(model.frozen, slice); j++) {
                expected[j] = float_from_bits((uint32_t)bits[j] << 16);
            }
            check_bits(t, model.table[i].name, whole + at, expected + at, n_slice);
        }
    }
    if (whole) { model_whole_free(&model, whole, NULL); }
    device_release(stored, 2 * n);
    device_release(master, 4 * model.n_kept);
    free(expected), free(bits);
    unplan_model(&model);
    device_free(&dev);
}

static void test_masters(Test* t) {
    const int most = device_ranks(t, 3);
    for (int P = 1; P <= most; P++) {
        for (int zero = 0; zero < 3; zero++) { run_ranks(t, P, ranks_masters, zero); }
    }
}

// chunks are dealt out without a hole, and nearly evenly
static void test_parts(Test* t) {
    Tensor table[MAX_ROWS];
    const int n_tensors = test_table(table, ODD_FROZEN);
    tensors_layout(table, n_tensors);
    for (int P = 1; P <= 16; P++) {
        size_t next[MAX_SLICES] = {0};
        int n_stretches = 0;
        for (int r = 0; r < P; r++) {
            DataParallel s;
            Comm c;
            memset(&c, 0, sizeof c);
            c.size = P;
            c.rank = r;
            dp_init(&s, &c, table, n_tensors, test_frozen(ODD_FROZEN), 1, 1);
            n_stretches = s.n_stretches;
            for (int i = 0; i < s.n_stretches; i++) {
                const Part part = dp_part(&s, r, i), whole = s.stretches[i].whole;
                check(t, part.n == 0 || part.first - whole.first == next[i],
                      "%d ranks, rank %d, stretch %d begins at %zu", P, r, i, part.first);
                next[i] += part.n;
                check(t, r < P - 1 || next[i] == whole.n, "%d ranks: stretch %d ends after %zu elements", P, i,
                      next[i]);
            }
            dp_free(&s);
        }
        check(t, n_stretches == 3 + 1 + 2 + 1 + 1 + 2 + 1, "%d stretches", n_stretches);
    }
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"reductions",
         "all_reduce: every type and operation, 0..1000 elements, in place, 1..8 ranks",
         test_reduce},
        {"reductions order", "floats are added in the order of ranks", test_order},
        {"exchange", "every type, counts 0..6, 1..8 ranks", test_exchange},
        {"gathers", "all_gather, all_gather_v: every type, 0..1000 elements, in place, 1..8 ranks", test_gather},
        {"send_recv, broadcast, barrier", "round the ring, between two, from every root", test_send},
        {"groups", "every second rank, groups of groups, and the world beside them", test_groups},
        {"async", "100 calls under way at once, waited for in any order", test_async},
        {"counters", "bytes sent are those of the formulas", test_count},
        {"mismatched calls", "COMM_CHECK=1 names both call sites", test_mismatch},
        {"false peer", "counts, descriptions, last words and noise of a false rank: one line, nothing out of bounds",
         test_false},
        {"fault: killed rank",
         "all others stop at once, also between calls, and name it, the call, the step and the checkpoint",
         test_killed},
        {"fault: killed rank, device memory", "all others stop at once and name it", test_killed_device},
        {"fault: stopped rank", "is named when the time limit is over", test_stopped},
        {"fault: failed rank", "its status and reason reach the others", test_failed},
        {"user's error", "is said once: by the lowest rank that has it, whoever is late; two errors are said both",
         test_said},
        {"meeting", "missing and double ranks and wrong sizes are named", test_meeting},
        {"meeting strangers", "strangers and other runs are sent away, a late rank is welcome, a taken port is refused",
         test_strangers},
        {"HMAC", "values of RFC 4231, and sums that differ in a bit", test_hmac},
        {"meeting secrets", "another secret or none: turned away and told why, rank 0 goes on waiting", test_secret},
        {"meeting crowds", "200 strangers that say nothing, noise, others' words or a byte at a time delay nobody",
         test_crowd},
        {"meeting by IPv6 and name", "::1 and localhost", test_ipv6},
        {"meeting by a taken file", "another run keeps off, and only the user can read its secret", test_file_taken},
        {"meeting at an address", "rank 0 listens there alone, and warns when it has no secret", test_addresses},
        {"meeting by a file", "of an earlier run, whatever listens there now: replaced, and removed when all have met",
         test_stale_file},
        {"meeting by a bad file",
         "missing, in no folder, something else: a line each, and no file of the user is touched", test_bad_file},
        {"rank and size", "24 environments: found, or refused with a reason", test_place},
        {"device exchange", "bytes of device memory, 0..100000 elements, two exchanges at once, 1..3 ranks",
         test_device_exchange},
        {"device exchange, groups", "members of two groups of two ranks, beside the world of four", test_device_groups},
#ifdef SIMT
        {"device exchange, mismatched", "the stand-in for NCCL refuses counts that differ", test_device_mismatch},
#endif
        {"tree plan", "S <= 64 leaves on P <= 16 ranks: the root of one rank, bit for bit", test_plan},
        {"evaluate", "mean loss, bits per byte and scores over the targets that count: one rank's bits on 1..4",
         test_evaluate},
        {"dp parts", "chunks are dealt out without a hole", test_parts},
        {"dp train", "loss, norm, parameters, moments: one rank's bits on 1..4, S = 1..11, --zero 0, 1, 2, frozen, with experts", test_train},
        {"squares of leaves", "|g|^2 of every leaf: chunks of slices in table order, on 1 to 4 ranks, with any --zero",
         test_squares},
        {"dp frozen", "the bits of a run that leaves out those updates, on 1..4 ranks, --zero 0, 1, 2",
         test_frozen_bits},
        {"dp frozen memory", "arenas hold what learns, fields of the rest are NULL", test_frozen_memory},
        {"dp frozen all", "a model of which nothing learns stays as it is", test_all_frozen},
        {"dp resume", "moments with other frozen slices, or of all: 0 for what learns anew, and a line", test_resume},
        {"dp masters", "dealt out and collected; what is frozen comes from the stored weights", test_masters},
        {"dp slices", "layers that are frozen, or had other counts of updates: the definition's bits, on 1..4 ranks, --zero 0, 1, 2", test_slices},
        {"dp muon", "matrices that learn by Muon have the bits of one rank, --zero 0 and 1, and those of the definition", test_muon},
#ifdef __CUDACC__
        {"dp stored",
         "bf16 parameters and float masters: one rank's bits on 2 and 3, and the masters give the parameters again",
         test_stored},
#endif
    };
    setenv("COMM_CHECK", "1", 1);
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
