/*
A run on several ranks, beside what one rank does (main.h): who speaks, and whether all were started alike.
    ranks_open       the world of this process; rank 0 speaks, the others write errors only, under "name [rank 2]"
    ranks_compare    options, state, program and data are the same everywhere, or status 2 on all ranks and one line
    ranks_same       the same for any sum
    ranks_same_of    for the sum of what only some ranks have, such as parameters
    ranks_threads    without --threads, the ranks of one machine divide its cores
    ranks_box, ranks_print_cost   what is exchanged: planned, and counted; ranks_warn_of_idle
    ranks_goes_on    does --continue mean --resume?
    ranks_restore    the checkpoint with which --resume goes on
    ranks_agree      asked before each step: stop? save?
    ranks_run_name   the folder of the run, which rank 0 may just have named
Errors: fail_input on rank 0; the others leave without another word.
*/
#ifndef LLMC_RANKS_H
#define LLMC_RANKS_H
#include "../ranks/comm.h"           // Comm, comm_world
#include "../ranks/model_gradients.h"  // Model, model_plan, model_gradient_bytes, model_stage_bytes
#include "checkpoints.h"             // RunOptions, RunState, run_restore
#include "rundata.h"                 // RunData, data_sums
#include "signals.h"                 // stop_flag

// ---- the world ----

static inline Comm* ranks_open(const RankPlace* place, const RunOptions* o) {
    Comm* world = comm_world(place, (double)o->comm_timeout, (double)o->init_timeout);
    failure_()->follows = place->rank > 0;
    if (place->rank > 0) {
        char* name = (char*)malloc_check(300, "name");
        snprintf(name, 300, "%.250s [rank %d]", program_invocation_short_name, place->rank);
        program_invocation_short_name = name;
        if (!freopen("/dev/null", "w", stdout)) { fail_run("/dev/null: %s", strerror(errno)); }
    }
    return world;
}

// --threads; without it and without OMP_NUM_THREADS the ranks of one machine share its cores, unless each is bound to
// its own
static inline int ranks_threads(const RankPlace* place, int asked) {
#ifdef _OPENMP
    // of this process, of the machine
    const int n_cores = omp_get_num_procs(), bound = n_cores < (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (asked == 0 && place->local_size > 1 && !bound && !getenv("OMP_NUM_THREADS")) {
        return n_cores > place->local_size ? n_cores / place->local_size : 1;
    }
#else
    (void)place;
#endif
    return asked;
}

// ---- are all alike? ----

// "1, 3" of the ranks that are marked
static inline ShortText ranks_list(const int* marked, int size) {
    ShortText out = {""};
    size_t used = 0;
    for (int i = 0; i < size; i++) {
        if (!marked[i] || used + 16 > sizeof out.s) { continue; }
        used += (size_t)snprintf(out.s + used, sizeof out.s - used, "%s%d", used ? ", " : "", i);
    }
    return out;
}

// all ranks come here together: one speaks, and its exit takes the others along
__attribute__((noreturn, format(printf, 2, 3)))
static inline void ranks_fail_input(Comm* c, const char* format, ...) {
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (c->rank == 0) { fail_input("%s", text); }
    comm_barrier(c, HERE);  // rank 0's last words arrive here
    exit(2);
}

typedef struct {
    uint64_t sum, group;
    int rank;
} RankSum_;

static inline int rank_sum_order_(const void* a, const void* b) {
    const RankSum_ *x = (const RankSum_*)a, *y = (const RankSum_*)b;
    return x->group != y->group ? (x->group < y->group ? -1 : 1) : x->rank - y->rank;
}

// A number that must be the same on all ranks of a group, which is any number that they have in common. All ranks of c
// call. Of the groups in which some differ from their first rank the one whose first rank comes first is named
static inline void ranks_same_of(Comm* c, const char* what, uint64_t sum, uint64_t group) {
    const uint64_t own[2] = {sum, group};
    if (c->size == 1) { return; }
    const size_t P = (size_t)c->size;
    uint64_t* all = (uint64_t*)malloc_check(sizeof own * P, "sums");
    RankSum_* ranks = (RankSum_*)malloc_check(sizeof(RankSum_) * P, "sums");
    int *firsts = (int*)malloc_check(sizeof(int) * P, "sums"), named = c->size, n = 0;
    comm_wait(c, comm_all_gather(c, own, all, 2, DT_I64, HERE));
    for (int i = 0; i < c->size; i++) {
        const RankSum_ of_rank = {all[2 * i], all[2 * i + 1], i};
        ranks[i] = of_rank;
    }
    qsort(ranks, P, sizeof *ranks, rank_sum_order_);  // group by group, ranks ascending
    for (size_t i = 0, first = 0; i < P; i++) {
        if (ranks[i].group != ranks[first].group) { first = i; }
        const int from = ranks[first].rank, differs = ranks[i].sum != ranks[first].sum;
        firsts[ranks[i].rank] = differs ? from : -1;
        if (differs && from < named) { named = from; }
    }
    for (int i = 0; i < c->size && named < c->size; i++) { n += firsts[i] = firsts[i] == named; }
    if (n > 0) {
        ranks_fail_input(c, "rank%s %s: other %s than rank %d: start all ranks with the same", n > 1 ? "s" : "",
                         ranks_list(firsts, c->size).s, what, named);
    }
    free(all);
    free(ranks);
    free(firsts);
}

// a number that must be the same everywhere
static inline void ranks_same(Comm* c, const char* what, uint64_t sum) { ranks_same_of(c, what, sum, 0); }

// the first option in which rank i differs from rank 0; the texts are JSON
static inline void ranks_name_option_(Comm* c, int i, const char* ours, const char* theirs) {
    json_t *a = json_loads(ours, 0, NULL), *b = json_loads(theirs, 0, NULL), *value;
    const char* key;
    json_object_foreach(a, key, value) {
        const json_t* other = json_object_get(b, key);
        if (other && json_equal(value, other)) { continue; }
        const size_t as_typed = JSON_ENCODE_ANY | JSON_REAL_PRECISION(9);  // 0.0003, not 0.00029999999999999997
        char *here = json_dumps(value, as_typed), *there = other ? json_dumps(other, as_typed) : NULL;
        ranks_fail_input(c, "rank %d: %s is %s there, but %s on rank 0: start all ranks with the same options", i, key,
                         there ? there : "nothing", here ? here : "something else");
    }
    ranks_fail_input(c, "rank %d: another set of options than on rank 0: start all ranks with the same program", i);
}

enum { RANKS_TEXT_BYTES = 1 << 20 };  // of options; they take a few KB

// everybody's text to everybody; compares each with rank 0's
static inline void ranks_compare_text_(Comm* c, char* text) {
    size_t *counts = (size_t*)malloc_check(sizeof(size_t) * (size_t)c->size, "options"), total = 0, first = 0,
           n = strlen(text) + 1;
    comm_wait(c, comm_all_gather(c, &n, counts, 1, DT_I64, HERE));
    for (int i = 0; i < c->size; i++) {
        if (counts[i] < 1 || counts[i] > RANKS_TEXT_BYTES) {
            fail_run("rank %d: expected 1 to %d bytes of options, found %zu", i, RANKS_TEXT_BYTES, counts[i]);
        }
        first += i < c->rank ? counts[i] : 0;
        total += counts[i];
    }
    char* all = (char*)malloc_check(total, "options");
    memcpy(all + first, text, n);
    comm_wait(c, comm_all_gather_v(c, all, counts, DT_U8, HERE));
    char* theirs = all;
    for (int i = 0; i < c->size; theirs += counts[i], i++) {
        theirs[counts[i] - 1] = '\0';
        if (strcmp(all, theirs) != 0) { ranks_name_option_(c, i, all, theirs); }
    }
    free(all);
    free(counts);
}

static inline void ranks_compare(Comm* c, const Option* table, int n, const RunState* s, RunData* data) {
    if (c->size == 1 || comm_is_plan(c)) { return; }
    MappedFile program;
    json_t *options = options_to_json(table, n), *state = run_state_to_json(s);
    json_object_update(options, state);
    json_object_del(options, "rank");  // these two may differ
    json_object_del(options, "threads");
    char* text = json_dumps(options, JSON_SORT_KEYS | JSON_REAL_PRECISION(9));
    if (!text) { fail_run("options: no memory"); }
    file_map(&program, "/proc/self/exe");
    ranks_same(c, "program", XXH3_64bits(program.bytes, program.n_bytes));
    ranks_compare_text_(c, text);
    data_sums(data);
    ranks_same(c, "training data", data->train_sum);
    ranks_same(c, "validation data", data->val_sum);
    ranks_same(c, "images of the training data", token_images_stamps(&data->train.images, 0));
    ranks_same(c, "images of the validation data", token_images_stamps(&data->val.images, 0));
    file_unmap(&program);
    free(text);
    json_decref(options);
    json_decref(state);
}

// ---- the box at the start, the last line, the folder ----

// bytes of memory, and of what a rank sends in an update
typedef struct {
    double gradients;      // and what leaves count, of the rank where they take most
    double moment;         // each
    double data, streams;  // sent for gradients and parameters; because there are stages
    double most_data, most_streams;  // of a plan, by the rank that has most micro-batches
} RanksCost;

// of this rank
static inline double ranks_gradients_(Model* m, Comm* c, int n_leaves, int zero) {
    model_plan(m, c, n_leaves, zero);
    const double n_bytes = dp_gradient_bytes(&m->dp) + (model_has_ep(m) ? dp_gradient_bytes(&m->dp_experts) : 0.0) +
                           dp_numbers_bytes(&m->dp) + model_shared_bytes(m);
    model_plan_free(m);
    return n_bytes;
}

// the rank whose micro-batches wait for each other in most arenas; of equal ones one that has most of them
static inline int ranks_deepest_(int size, int n_leaves) {
    int deepest = 0, depth = 0, n = 0;
    for (int rank = 0; rank < size; rank++) {
        const int first = (int)comm_share(n_leaves, rank, size), end = (int)comm_share(n_leaves, rank + 1, size);
        const int own = leaf_tree_depth(first, end);
        if (own > depth || (own == depth && end - first > n)) { deepest = rank, depth = own, n = end - first; }
    }
    return deepest;
}

// --zero 2: the rank that keeps most of the sums of gradients
static inline int ranks_fullest_(Model* m, Comm* c, int n_leaves) {
    size_t most = 0;
    int fullest = 0;
    model_plan(m, c, n_leaves, 2);
    for (int rank = 0; rank < m->dp.size; rank++) {
        size_t n = 0;
        for (int i = 0; i < m->dp.n_stretches; i++) { n += dp_part(&m->dp, rank, i).n; }
        if (n > most) { fullest = rank, most = n; }
    }
    model_plan_free(m);
    return fullest;
}

// Of the ranks that share micro-batches with this one. The first of some are in the midst of the tree of all: they need
// more arenas than others, and so do those that have one more
static inline double ranks_most_gradients_(Model* m, Comm* c, int n_leaves, int zero) {
    Comm* sharing = model_sharing(m, c);
    double most = ranks_gradients_(m, c, n_leaves, zero);
    if (comm_is_plan(c)) {
        const int own = sharing->rank;
        sharing->rank = zero == 2 ? ranks_fullest_(m, c, n_leaves) : ranks_deepest_(sharing->size, n_leaves);
        most = fmax(most, ranks_gradients_(m, c, n_leaves, zero));
        sharing->rank = own;
    }
    comm_all_reduce(sharing, &most, 1, DT_F64, OP_MAX, HERE);
    return most;
}

// and rows of the box. all: every gradient is asked for, as by a probe; stream: bytes of that of a micro-batch, for
// --pp; more: bytes sent besides, with --ep, --tp and --cp; at_most: "" where they are known, else these words
static inline RanksCost ranks_box(Comm* c, const Model* m, int all, int n_leaves, int zero, double stream,
                                  double more, const char* at_most) {
    Model plan = *m;  // sizes only
    if (all) {
        plan.frozen = NULL;
        model_freeze_base(&plan);
        model_find_lowest(&plan);
    }
    const double gradients = ranks_most_gradients_(&plan, c, n_leaves, zero);
    model_plan(&plan, c, n_leaves, zero);
    const double data = model_gradient_bytes(&plan), streams = model_stage_bytes(&plan, stream);
    RanksCost cost = {gradients, sizeof(float) * (double)plan.n_kept, data, streams, data, streams};
    model_plan_free(&plan);
    if (comm_is_plan(c)) {
        Comm* sharing = model_sharing(&plan, c);
        const int own = sharing->rank;
        sharing->rank = sharing->size - 1;  // comm_share
        model_plan(&plan, c, n_leaves, zero);
        cost.most_data = fmax(data, model_gradient_bytes(&plan));
        cost.most_streams = fmax(streams, model_stage_bytes(&plan, stream));
        model_plan_free(&plan);
        sharing->rank = own;
    }
    if (all) { free(plan.frozen); }
    if (c->size > 1) {
        if (comm_is_plan(c)) { box_row("ranks", "%d, planned by this process, --zero %d", c->size, zero); }
        else {
            box_row("ranks", "%d over %s%s (%s), --zero %d", c->size, comm_device_kind(), comm_kind_name(c),
                    c->link->source, zero);
        }
        box_row("  sent per update", "%s%s by rank 0", at_most, format_bytes(cost.data + cost.streams + more).s);
    }
    return cost;
}

// in training
static inline void ranks_warn_of_idle(const Comm* c, const Model* m, int n_leaves) {
    const int each = m->pp.size * m->tp.size * m->cp.size;  // ranks that compute one together
    const int n_idle = c->size - n_leaves * each;
    if (n_idle <= 0 || c->rank > 0) { return; }
    warn_line("%d ranks, but %d micro-batch%s in an update: %d rank%s nothing to compute (--batch-tokens or "
              "--grad-accum, --batch-size)",
              c->size, n_leaves, n_leaves > 1 ? "es" : "", n_idle, n_idle > 1 ? "s have" : " has");
}

// what the ranks cost in the last n_steps, in whose updates rank 0 sent so many bytes; with 0 the count begins
static inline void ranks_print_cost(Comm* c, int n_steps, uint64_t bytes_sent) {
    CommLink* l = c->link;
    double now = seconds_now(CLOCK_MONOTONIC);
    if (n_steps > 0 && c->size > 1) {
        printf("ranks: rank 0 sent %s per update", format_bytes((double)bytes_sent / n_steps).s);
        if (!l->nccl) {
            printf(" and waited %.0f%% of the time", 100.0 * l->seconds_waited / (now - l->counted_since));
        }
        printf("\n");
    }
    l->seconds_waited = 0.0;
    l->counted_since = now;
}

// rank 0 looks whether --continue finds a checkpoint; begins: a run begins where there is none
static inline int ranks_goes_on(Comm* c, const RunOptions* o, int begins) {
    int goes_on = c->rank == 0 ? run_has_checkpoint(o, begins) : 0;
    comm_wait(c, comm_broadcast(c, &goes_on, 1, DT_I32, 0, HERE));
    return goes_on;
}

// which file of which machine it is
static inline uint64_t ranks_file_(const char* path) {
    struct {
        char boot[64];  // of the machine
        uint64_t device, inode;
    } id;
    struct stat status;
    memset(&id, 0, sizeof id);
    FILE* file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file && !fgets(id.boot, sizeof id.boot, file)) { id.boot[0] = '\0'; }
    if (file) { fclose(file); }
    if (stat(path, &status) == 0) { id.device = (uint64_t)status.st_dev, id.inode = (uint64_t)status.st_ino; }
    return XXH3_64bits(&id, sizeof id);
}

// Ranks may have copies of the checkpoint that rank 0 has verified: of each copy the first rank that has it verifies
// it, and what a machine reads from a shared file system counts as a copy
static inline void ranks_check_copies_(Comm* c, const char* folder) {
    char path[PATH_BYTES];
    ErrorText error = {""};
    const uint64_t own = ranks_file_(path_join(path, folder, "manifest.json"));
    uint64_t* all = (uint64_t*)malloc_check(sizeof own * (size_t)c->size, "copies of the checkpoint");
    int *bad = (int*)malloc_check(sizeof(int) * (size_t)c->size, "copies of the checkpoint"), is_first = c->rank > 0;
    comm_wait(c, comm_all_gather(c, &own, all, 1, DT_I64, HERE));
    for (int i = 0; i < c->rank; i++) { is_first = is_first && all[i] != own; }
    const int is_bad = is_first && !checkpoint_verify(folder, &error);
    comm_wait(c, comm_all_gather(c, &is_bad, bad, 1, DT_I32, HERE));
    for (int i = 0; i < c->size; i++) {
        if (!bad[i]) { continue; }
        char words[sizeof error.text];
        memcpy(words, error.text, sizeof words);
        comm_wait(c, comm_broadcast(c, words, sizeof words, DT_U8, i, HERE));
        ranks_fail_input(c, "rank %d: its copy of %s: %.300s: give all machines the same checkpoint", i, folder, words);
    }
    json_t *manifest = json_read(path), *files = json_object_get(manifest, "files");  // their sizes and sums
    char* text = files ? json_dumps(files, JSON_SORT_KEYS) : NULL;
    ranks_same(c, "checkpoint", text ? XXH3_64bits(text, strlen(text)) : 0);
    json_decref(manifest);
    free(text);
    free(all);
    free(bad);
}

// --resume: rank 0 finds the checkpoint and keeps other runs away
static inline RunState ranks_restore(Comm* c, Option* table, int n, const RunOptions* o) {
    char folder[PATH_BYTES];
    int step = c->rank == 0 ? run_find_checkpoint(o) : 0;
    comm_wait(c, comm_broadcast(c, &step, 1, DT_I32, 0, HERE));
    if (c->size > 1 && !comm_is_plan(c)) { ranks_check_copies_(c, checkpoint_folder(folder, o->run, step)); }
    return run_restore(table, n, o, step);
}

// Before each step: was any rank told to stop? Is it time to save, and which checkpoint is whole? (rank 0 knows both)
// The last goes into the last words of ranks that lose another.
static inline void ranks_agree(Comm* c, const RunOptions* o, int step, int newest, int* stop, int* save) {
    char folder[PATH_BYTES];
    int known[3] = {*stop_flag(), *save, newest};
    comm_all_reduce(c, known, 3, DT_I32, OP_MAX, HERE);
    comm_note(c, "after step %d; newest checkpoint: %s", step,
              known[2] < 0 ? "none" : checkpoint_folder(folder, o->run, known[2]));
    *stop = known[0];
    *save = known[1];
}

static inline void ranks_run_name(Comm* c, Option* table, int n, const RunOptions* o) {
    char name[PATH_BYTES];
    if (c->size == 1) { return; }
    snprintf(name, sizeof name, "%s", o->run);
    comm_wait(c, comm_broadcast(c, name, sizeof name, DT_U8, 0, HERE));
    name[sizeof name - 1] = '\0';
    options_set(table, n, "run", name);
}
#endif  // LLMC_RANKS_H
