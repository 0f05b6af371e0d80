/*
Promises of llmc/text/prefetch.h: batches that threads make ahead are those that one would make oneself, whatever the
timing.
    make build/gcc-native-O3/test_prefetch && build/gcc-native-O3/test_prefetch
*/
#include "llmc/text/prefetch.h"
#include "llmc/test/test.h"
#include "llmc/test/testfiles.h"

enum { T = 5, B = 3, N_ROWS = 40 };

// what first_row knows, and what it has seen
typedef struct {
    uint64_t delay;            // seed of the pauses; 0: none
    pthread_mutex_t lock;
    int64_t largest;           // of the numbers that were asked for
    int n_calls;
    int calls_of[4096];        // of each number below 4096
} Plan;

// micro-batch k of an invented run: every third is skipped, as by another rank
static int64_t plan_row(void* context, int64_t k) {
    Plan* plan = (Plan*)context;
    pthread_mutex_lock(&plan->lock);
    plan->largest = k > plan->largest ? k : plan->largest;
    plan->n_calls++;
    if (k < 4096) { plan->calls_of[k]++; }
    pthread_mutex_unlock(&plan->lock);
    if (plan->delay) { usleep((useconds_t)(permute_mix_(plan->delay + (uint64_t)k) % 300)); }
    return (k + k / 2) * B;
}

static void plan_init(Plan* plan, uint64_t delay) {
    memset(plan, 0, sizeof *plan);
    plan->delay = delay;
    plan->largest = -1;
    pthread_mutex_init(&plan->lock, NULL);
}

// tokens in memory: no two of them alike
typedef struct {
    uint16_t tokens[N_ROWS * T + 1];
    TokenShard shard;
    TokenData data;
    DataLoader rows;
} Source;

static void source_init(Source* s) {
    memset(s, 0, sizeof *s);
    for (int i = 0; i <= N_ROWS * T; i++) { s->tokens[i] = (uint16_t)(7 * i); }
    s->shard.path = s->data.path = (char*)"memory";
    s->shard.tokens = s->tokens;
    s->shard.n_tokens = s->data.n_tokens = N_ROWS * T + 1;
    s->data.shards = &s->shard;
    s->data.n_shards = 1;
    s->data.token_bytes = 2;
    s->data.vocab_size_needed = s->data.classes_needed = 65536;
    dataloader_init(&s->rows, &s->data, T, ORDER_ROWS, 5);
}

// what the ring gives as number k against a batch made here
static int is_batch(const Source* s, int64_t k, const int* inputs, const int* targets) {
    int own_inputs[B * T], own_targets[B * T];
    dataloader_batch(&s->rows, (k + k / 2) * B, B, own_inputs, own_targets);
    return memcmp(inputs, own_inputs, sizeof own_inputs) == 0 && memcmp(targets, own_targets, sizeof own_targets) == 0;
}

static void test_sequence(Test* t) {
    const int workers[] = {0, 1, 2, 3, 7}, ahead[] = {1, 2, 5, 16};
    Source s;
    source_init(&s);
    for (int i = 0; i < 5 * 4 * 2; i++) {
        const int n_workers = workers[i % 5], n_ahead = ahead[i / 5 % 4], is_slow = i / 20, n = is_slow ? 40 : 300;
        Plan plan;
        Prefetch p;
        const int *inputs, *targets;
        plan_init(&plan, is_slow ? 17 + (uint64_t)i : 0);
        prefetch_start(&p, &s.rows, B, n_workers, n_ahead, 1 + i % 3, plan_row, &plan);
        for (int64_t k = 100; k < 100 + n; k++) {
            prefetch_batch(&p, k, &inputs, &targets);
            check(t, is_batch(&s, k, inputs, targets), "%d workers, %d ahead, %s: batch %lld is another one", n_workers,
                  n_ahead, is_slow ? "slow" : "fast", (long long)k);
        }
        prefetch_stop(&p);
        for (int k = 100; k < 100 + n; k++) {
            // without workers also for its pages, one batch before
            const int n_calls = n_workers == 0 && k > 100 ? 2 : 1;
            check(t, plan.calls_of[k] == n_calls, "%d workers, %d ahead: batch %d was made %d times", n_workers,
                  n_ahead, k, plan.calls_of[k]);
        }
    }
}

// the last n_kept batches are not touched, also when the run goes back; no worker runs further ahead than it may
static void check_in_use(Test* t, const Source* s, int n_workers, int n_ahead, int n_kept) {
    enum { N = 20 };
    const int64_t numbers[N] = {0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7, 7, 8, 40, 41, 0, 1, 2, 3};
    const int *inputs[N], *targets[N];
    Plan plan;
    Prefetch p;
    plan_init(&plan, 0);
    prefetch_start(&p, &s->rows, B, n_workers, n_ahead, n_kept, plan_row, &plan);
    check(t, prefetch_bytes(n_workers, n_ahead, n_kept, B, T) == 8.0 * p.n_slots * B * T,
          "the memory is another than announced");
    for (int i = 0; i < N; i++) {
        const int64_t last = n_workers > 0 ? numbers[i] + n_ahead - 1 : numbers[i] + 1;  // one more for its pages
        prefetch_batch(&p, numbers[i], &inputs[i], &targets[i]);
        usleep(1000);  // long enough for all that workers may do
        for (int j = i; j >= 0 && j > i - n_kept; j--) {
            check(t, is_batch(s, numbers[j], inputs[j], targets[j]),
                  "%d workers, %d ahead, %d kept: call %d was written over after %d", n_workers, n_ahead, n_kept, j, i);
        }
        pthread_mutex_lock(&plan.lock);
        check(t, plan.largest <= last, "%d workers, %d ahead: batch %lld while %lld is in use", n_workers, n_ahead,
              (long long)plan.largest, (long long)numbers[i]);
        plan.largest = -1;
        pthread_mutex_unlock(&plan.lock);
    }
    prefetch_stop(&p);
}

static void test_in_use(Test* t) {
    Source s;
    source_init(&s);
    for (int i = 0; i < 4 * 4 * 2; i++) { check_in_use(t, &s, i % 2 * 3, 1 + i / 2 % 4, 1 + i / 8); }
}

// back, far ahead, the same again, while slow workers are in the middle of something
static void test_jumps(Test* t) {
    Source s;
    source_init(&s);
    for (int n_workers = 0; n_workers <= 4; n_workers++) {
        Plan plan;
        Prefetch p;
        const int *inputs, *targets;
        uint64_t random = 3;
        int64_t k = 0;
        plan_init(&plan, 99);
        prefetch_start(&p, &s.rows, B, n_workers, 1 + n_workers, 1 + n_workers % 2, plan_row, &plan);
        for (int i = 0; i < 150; i++) {
            uint32_t what = xorshift_u32(&random) % 8;
            k = what == 0 ? xorshift_u32(&random) % 1000 : what == 1 ? k : what == 2 && k > 2 ? k - 2 : k + 1;
            prefetch_batch(&p, k, &inputs, &targets);
            check(t, is_batch(&s, k, inputs, targets), "%d workers: batch %lld is another one", n_workers,
                  (long long)k);
        }
        prefetch_stop(&p);
    }
}

static void test_stop(Test* t) {
    Source s;
    Prefetch none;
    source_init(&s);
    memset(&none, 0, sizeof none);
    prefetch_stop(&none);
    for (int i = 0; i < 60; i++) {
        Plan plan;
        Prefetch p;
        const int *inputs, *targets;
        plan_init(&plan, i % 2 ? 5 : 0);
        prefetch_start(&p, &s.rows, B, 1 + i % 4, 1 + i % 3, 1 + i % 2, plan_row, &plan);
        for (int64_t k = 0; k < i % 5; k++) { prefetch_batch(&p, k, &inputs, &targets); }
        prefetch_stop(&p);
        int n_calls = plan.n_calls;
        check(t, i % 5 > 0 || n_calls == 0, "%d batches were made, none was asked for", n_calls);
        check(t, p.inputs == NULL && p.threads == NULL, "something is left");
    }
}

// ---- a worker that fails ----

typedef struct {
    const char* path;
    int cut;  // the file is cut short; else its tokens change
    int n_workers, stop_only;
} Damage;

static void spoil(const Damage* damage) {
    FILE* file = fopen(damage->path, "r+b");
    fseek(file, 1024 + 2 * 4096, SEEK_SET);  // the first two pages stay
    for (int i = 0; i < 8192; i++) { fputc(0xff, file); }
    fclose(file);
    if (damage->cut && truncate(damage->path, 1024) != 0) { fail_run("truncate: %s", strerror(errno)); }
}

static int64_t next_rows(void* context, int64_t k) {
    (void)context;
    return k * B;
}

// a second line if another thread than the main one ends the process
static void check_thread(void) {
    if (gettid() != getpid()) { fprintf(stderr, "a worker ended the process\n"); }
}

static void run_damaged(void* arg) {
    atexit(check_thread);
    const Damage* damage = (const Damage*)arg;
    TokenData d;
    DataLoader l;
    Prefetch p;
    const int *inputs, *targets;
    tokens_open(&d, damage->path, NULL);
    dataloader_init(&l, &d, 100, ORDER_FILE, 0);
    prefetch_start(&p, &l, B, damage->n_workers, 4, 2, next_rows, NULL);
    prefetch_batch(&p, 0, &inputs, &targets);
    spoil(damage);
    for (int64_t k = 1; k < 1000 && !damage->stop_only; k++) { prefetch_batch(&p, k, &inputs, &targets); }
    prefetch_batch(&p, 30, &inputs, &targets);
    prefetch_stop(&p);
}

static void test_failure(Test* t) {
    static uint16_t shard[512 + 10000];
    const int32_t header[3] = {20240520, 1, 10000};
    memcpy(shard, header, sizeof header);
    for (int i = 0; i < 10000; i++) { shard[512 + i] = (uint16_t)(i % 300); }
    for (int i = 0; i < 12; i++) {
        TempPath folder = temp_folder(), path = temp_file(&folder, "x.bin", shard, sizeof shard);
        Damage damage = {path.s, i % 2, i % 3, i % 4 == 3};
        check_exit(t, "a worker", run_damaged, &damage, 1,
                   damage.cut ? "x.bin: cut short by another program" : "x.bin: changed while in use: token 65535");
        temp_remove(&folder);
    }
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"sequence", "is the same for any number of workers and slots, however slow they are; each batch is made once",
         test_sequence},
        {"in use", "a batch stays for the calls that it was promised, and workers stay within the ring", test_in_use},
        {"jumps", "any number can be asked for at any time", test_jumps},
        {"stop", "ends workers that wait, work or never began", test_stop},
        {"failure", "of a worker ends the process in one line, status 1", test_failure},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
