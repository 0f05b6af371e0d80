/*
Promises of llmc/files/checkpoint.h and of the part of llmc/run/checkpoints.h that saves and chooses: no byte changes unseen,
the newest good one is found, what an interruption left goes away, the right ones are kept, one process writes.
dev/test_faults.sh is the same with a real trainer.
    cc -std=gnu11 -D_GNU_SOURCE -O2 -ffp-contract=off -I. test_checkpoint.c -o build/test_checkpoint -ljansson -lxxhash
    -lm FLIPS=1000000 build/test_checkpoint random
*/
#include "llmc/files/extras.h"    // extras_save, extras_load
#include "llmc/run/folder.h"      // run_summary; checkpoints.h: run_save_begin, run_save_end, RunState
#include "llmc/ranks/moments.h"   // moments_save, moments_load_layers
#include "llmc/run/snapshot.h"    // snapshot_save
#include "llmc/test/test.h"       // check, check_exit, test_main
#include "llmc/test/testfiles.h"  // temp_folder, temp_file

enum { N_FILES = 4 };
static const char* const names[N_FILES] = {"config.json", "model.safetensors", "optimizer.safetensors",
                                           "manifest.json"};

// ---- small checkpoints ----

static void write_random(const char* folder, const char* name, size_t n_bytes, uint64_t seed, SavedFiles* files) {
    char path[PATH_BYTES];
    OutFile file;
    uint64_t s = seeded_stream(seed);
    outfile_open(&file, path_join(path, folder, name));
    for (size_t i = 0; i < n_bytes; i++) {
        unsigned char c = (unsigned char)xorshift_u32(&s);
        outfile_write(&file, &c, 1);
    }
    saved_files_add(files, outfile_close(&file));
}

static RunOptions options_of(const char* run) {
    RunOptions o;
    memset(&o, 0, sizeof o);
    o.run = run;
    o.keep = 1000;
    return o;
}

static void save_with(const RunOptions* o, int step, int best_step) {
    char temporary[PATH_BYTES];
    RunState s = run_state_start(1);
    SavedFiles files;
    s.step = step;
    s.best_step = best_step;
    files.n = 0;
    run_save_begin(temporary, o, &s, 0.0);
    write_random(temporary, "config.json", 300, (uint64_t)step, &files);
    write_random(temporary, "model.safetensors", 3000, 100 + (uint64_t)step, &files);
    write_random(temporary, "optimizer.safetensors", 6000, 200 + (uint64_t)step, &files);
    run_save_end(temporary, &files, NULL, 0, o, &s, NULL);
}

static void save(const char* run, int step) {
    RunOptions o = options_of(run);
    save_with(&o, step, 0);
}

// a folder with checkpoints of steps 1 .. n
static TempPath new_run(int n) {
    TempPath run = temp_folder();
    for (int step = 1; step <= n; step++) { save(run.s, step); }
    return run;
}

static int is_good(const char* run, int step, ErrorText* error) {
    char folder[PATH_BYTES];
    return checkpoint_verify(checkpoint_folder(folder, run, step), error);
}

static int exists(const TempPath* run, const char* name) {
    char path[PATH_BYTES];
    return path_exists(path_join(path, run->s, name));
}

// stderr to nowhere, and back: every damaged checkpoint is a line there
static int quiet(void) {
    int kept = dup(2), nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, 2);
    close(nowhere);
    return kept;
}

static void loud(int kept) {
    dup2(kept, 2);
    close(kept);
}

// ---- damage ----

typedef struct {
    int fd;
    off_t n_bytes;
} OpenFile;

static OpenFile open_saved(const char* run, int step, const char* name) {
    char path[PATH_BYTES];
    struct stat status;
    OpenFile f;
    f.fd = open(checkpoint_path(path, run, step, name), O_RDWR);
    if (f.fd < 0 || fstat(f.fd, &status) != 0) { fail_run("%s: %s", path, strerror(errno)); }
    f.n_bytes = status.st_size;
    return f;
}

static void flip(const OpenFile* f, off_t at, int mask) {
    unsigned char c;
    if (pread(f->fd, &c, 1, at) != 1) { fail_run("pread: %s", strerror(errno)); }
    c ^= (unsigned char)mask;
    if (pwrite(f->fd, &c, 1, at) != 1) { fail_run("pwrite: %s", strerror(errno)); }
}

static void must_be_found(Test* t, const TempPath* run, const char* what, const char* name, off_t at) {
    ErrorText error;
    check(t, !is_good(run->s, 2, &error), "%s %s at %lld: not noticed", name, what, (long long)at);
    check(t, strncmp(error.text, name, strlen(name)) == 0, "%s %s at %lld: the reason does not name it: %s", name, what,
          (long long)at, error.text);
    check(t, checkpoint_newest_good(run->s) == 1, "%s %s at %lld: the checkpoint before is not used", name, what,
          (long long)at);
}

static void test_flips(Test* t) {
    TempPath run = new_run(2);
    ErrorText error;
    int kept = quiet();
    for (int i = 0; i < N_FILES; i++) {
        OpenFile f = open_saved(run.s, 2, names[i]);
        for (off_t at = 0; at < f.n_bytes; at++) {
            int mask = 1 << (at % 8);
            flip(&f, at, mask);
            must_be_found(t, &run, "with a flipped bit", names[i], at);
            flip(&f, at, mask);
        }
        close(f.fd);
    }
    loud(kept);
    check(t, is_good(run.s, 2, &error), "flipped back, it is not good: %s", error.text);
    temp_remove(&run);
}

static void test_lengths(Test* t) {
    TempPath run = new_run(2);
    ErrorText error;
    int kept = quiet();
    for (int i = 0; i < N_FILES; i++) {
        char path[PATH_BYTES], bytes[16384];
        OpenFile f = open_saved(run.s, 2, names[i]);
        ssize_t n = pread(f.fd, bytes, sizeof bytes, 0);
        for (off_t length = f.n_bytes - 1; length >= 0; length--) {
            if (ftruncate(f.fd, length) != 0) { fail_run("ftruncate: %s", strerror(errno)); }
            must_be_found(t, &run, "cut", names[i], length);
        }
        unlink(checkpoint_path(path, run.s, 2, names[i]));
        if (strcmp(names[i], "manifest.json") != 0) { must_be_found(t, &run, "removed", names[i], 0); }
        FILE* again = fopen(path, "w");
        fwrite(bytes, 1, (size_t)n, again);
        fputc(0, again);
        fclose(again);
        must_be_found(t, &run, "with a byte more", names[i], 0);
        check(t, truncate(path, n) == 0 && is_good(run.s, 2, &error), "%s as it was, not good: %s", names[i],
              error.text);
        close(f.fd);
    }
    loud(kept);
    temp_remove(&run);
}

// one to eight bits anywhere; FLIPS of them
static void test_random_damage(Test* t) {
    const char* wanted = getenv("FLIPS");
    const long n_flips = wanted ? atol(wanted) : 5000;
    TempPath run = new_run(1);
    OpenFile f[N_FILES];
    ErrorText error;
    uint64_t s = seeded_stream(7);
    for (int i = 0; i < N_FILES; i++) { f[i] = open_saved(run.s, 1, names[i]); }
    for (long i = 0; i < n_flips; i++) {
        const OpenFile* file = &f[xorshift_u32(&s) % N_FILES];
        off_t at[8];
        int mask[8], n = 1 + (int)(xorshift_u32(&s) % 8), changed = 0;
        for (int j = 0; j < n; j++) {
            at[j] = (off_t)(xorshift_u32(&s) % (uint32_t)file->n_bytes);
            mask[j] = 1 << (xorshift_u32(&s) % 8);
            int same = 0;
            for (int k = 0; k < j; k++) { same += at[k] == at[j] && mask[k] == mask[j]; }
            changed += same % 2 ? -1 : 1;
            flip(file, at[j], mask[j]);
        }
        if (changed > 0) {
            check(t, !is_good(run.s, 1, &error), "flip %ld: %d bits near %lld are not noticed", i, n, (long long)at[0]);
        }
        for (int j = 0; j < n; j++) { flip(file, at[j], mask[j]); }
    }
    check(t, is_good(run.s, 1, &error), "flipped back, it is not good: %s", error.text);
    for (int i = 0; i < N_FILES; i++) { close(f[i].fd); }
    temp_remove(&run);
}

static void test_mixed(Test* t) {
    TempPath run = new_run(3);
    char from[PATH_BYTES], to[PATH_BYTES];
    ErrorText error;
    check(t,
          rename(checkpoint_path(from, run.s, 2, "model.safetensors"),
                 checkpoint_path(to, run.s, 3, "model.safetensors")) == 0,
          "rename");
    check(t, !is_good(run.s, 3, &error) && strstr(error.text, "model.safetensors"),
          "the model of another step is not noticed");
    check(t, rename(checkpoint_folder(from, run.s, 1), checkpoint_folder(to, run.s, 9)) == 0, "rename");
    check(t, !is_good(run.s, 9, &error) && strstr(error.text, "of step 1"),
          "a folder with another step's name is not noticed");
    temp_remove(&run);
}

// manifests that are as they were written, but not as we write them: parsed on memory, each with a good sum
static void test_manifests(Test* t) {
    const struct { const char *files, *expected; } cases[] = {
        {"[{\"name\": \"../model\", \"bytes\": 1, \"xxh3\": \"0123456789abcdef\"}]", "plain file names"},
        {"[{\"name\": \".lock\", \"bytes\": 1, \"xxh3\": \"0123456789abcdef\"}]", "plain file names"},
        {"[{\"name\": \"a/b\", \"bytes\": 1, \"xxh3\": \"0123456789abcdef\"}]", "plain file names"},
        {"[{\"name\": 7, \"bytes\": 1, \"xxh3\": \"0123456789abcdef\"}]", "plain file names"},
        {"[{\"name\": \"a\", \"bytes\": -1, \"xxh3\": \"0123456789abcdef\"}]", "expected \"bytes\""},
        {"[{\"name\": \"a\", \"bytes\": 1.5, \"xxh3\": \"0123456789abcdef\"}]", "expected \"bytes\""},
        {"[{\"name\": \"a\", \"bytes\": 1, \"xxh3\": \"0123456789abcde\"}]", "expected \"bytes\""},
        {"[{\"name\": \"a\", \"bytes\": 1, \"xxh3\": \"0123456789abcdeX\"}]", "expected \"bytes\""},
        {"[7]", "plain file names"}, {"{}", "with a list"}, {"[] , \"files\": []", "with a list"}, {"[[[[",
                                                                                                    "with a list"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[1024];
        SavedFiles files;
        ErrorText error;
        int n = snprintf(text, sizeof text, "{\n  \"format\": 2,\n  \"files\": %s,\n%s", cases[i].files, MANIFEST_END);
        memcpy(text + n - MANIFEST_END_BYTES + MANIFEST_HASH_AT, hex_text(manifest_sum_(text, (size_t)n)).s, 16);
        unsigned char* copy = heap_copy(text, (size_t)n);
        json_t* manifest = manifest_parse_((const char*)copy, (size_t)n, &files, &error);
        check(t, !manifest, "accepted: %s", cases[i].files);
        check(t, manifest || strstr(error.text, cases[i].expected), "%s: expected \"%s\", found: %s", cases[i].files,
              cases[i].expected, error.text);
        free(copy);
    }
}

// ---- what an interruption leaves ----

static void test_leftovers(Test* t) {
    TempPath run = new_run(3);
    char path[PATH_BYTES], to[PATH_BYTES];
    ErrorText error;
    temp_file(&run, "step_000007.tmp/model.safetensors", "half", 4);
    temp_file(&run, "step_000007.tmp/chat_template.jinja", "half", 4);
    temp_file(&run, "step_000008.tmp/manifest.json", "half", 4);
    temp_file(&run, "step_000009/notes.txt", "mine", 4);       // no checkpoint, and not empty
    temp_path(&run, "step_000010/x");                          // an empty folder: its last rmdir was missing
    temp_file(&run, "step_000011/manifest.removed", "{", 1);
    temp_file(&run, "step_000011/model.safetensors", "half", 4);
    temp_file(&run, "step_000012.tmp.txt", "mine", 4);
    // set aside
    check(t, rename(checkpoint_folder(path, run.s, 2), temp_path(&run, "step_000002.replaced").s) == 0, "rename");
    // replaced
    temp_file(&run, "step_000003.replaced/model.safetensors", "old", 3);
    temp_file(&run, "step_000003.replaced/manifest.json", "{", 1);
    temp_file(&run, "step_000001.replaced/mine.json", "mine", 4);  // no checkpoint has been that: it has no manifest
    check(t, checkpoint_newest(run.s, -1) == 3, "a leftover is taken for a checkpoint");
    checkpoint_clean(run.s);
    const char* gone[] = {"step_000007.tmp", "step_000008.tmp", "step_000010", "step_000011", "step_000002.replaced",
                          "step_000003.replaced"};
    for (size_t i = 0; i < sizeof gone / sizeof gone[0]; i++) {
        check(t, !exists(&run, gone[i]), "%s is still there", gone[i]);
    }
    check(t, exists(&run, "step_000009/notes.txt") && exists(&run, "step_000012.tmp.txt") &&
                 exists(&run, "step_000001.replaced/mine.json"),
          "a file of the user's is gone");
    for (int step = 1; step <= 3; step++) { check(t, is_good(run.s, step, &error), "step %d: %s", step, error.text); }
    check(t,
          rename(checkpoint_path(path, run.s, 1, "manifest.json"), checkpoint_path(to, run.s, 1, "manifest.removed")) ==
              0,
          "rename");
    checkpoint_clean(run.s);
    check(t, !exists(&run, "step_000001"), "a removal that was interrupted is not finished");
    temp_remove(&run);
}

static void test_replace(Test* t) {
    TempPath run = new_run(2);
    ErrorText error;
    temp_file(&run, "step_000001/notes.txt", "mine", 4);
    OpenFile f = open_saved(run.s, 2, "model.safetensors");
    flip(&f, 5, 1);
    close(f.fd);
    save(run.s, 2);
    check(t, is_good(run.s, 2, &error) && !exists(&run, "step_000002.tmp"), "saved over a damaged one: %s", error.text);
    char folder[PATH_BYTES];
    checkpoint_remove(checkpoint_folder(folder, run.s, 1));
    check(t, exists(&run, "step_000001/notes.txt") && !exists(&run, "step_000001/model.safetensors"),
          "removing takes all but the user's file");
    temp_remove(&run);
}

static void save_too_large(void* run) {
    char temporary[PATH_BYTES];
    checkpoint_begin(temporary, (const char*)run, 5, 1e18);
}

static void save_and_fail(void* run) {
    char temporary[PATH_BYTES];
    SavedFiles files;
    files.n = 0;
    checkpoint_begin(temporary, (const char*)run, 5, 0.0);
    write_random(temporary, "model.safetensors", 10, 1, &files);
    fail_run("the disk is full");
}

static void exit_of(void (*f)(void*), void* arg) {
    if (fork() == 0) {
        quiet();
        f(arg);
    }
    wait(NULL);
}

static void test_failed_save(Test* t) {
    TempPath run = new_run(1);
    TempPath begun = new_run(0);
    check_exit(t, "a checkpoint larger than the disk", save_too_large, run.s, 1,
               "a checkpoint takes 909494.70 TiB, the disk has ");
    check_exit(t, "... behind others", save_too_large, run.s, 1, " free: the checkpoints before are whole; make room, "
               "then --resume");
    check_exit(t, "... the first", save_too_large, begun.s, 1, " free: no checkpoint has been written yet; make room, "
               "then give the command again that began the run");
    temp_remove(&begun);
    exit_of(save_and_fail, run.s);
    check(t, !exists(&run, "step_000005.tmp"), "a save that failed leaves its folder");
    check(t, checkpoint_newest_good(run.s) == 1, "the checkpoint before is gone");
    temp_remove(&run);
}

// ---- what a trainer adds, and a model that has grown ----

typedef struct {
    char path[PATH_BYTES];
    Extra extra;
} WrongExtra;

static void load_wrong_extra(void* wrong) {
    const WrongExtra* w = (const WrongExtra*)wrong;
    extras_load(w->path, &w->extra, 1);
}

static void test_extras(Test* t) {
    int32_t counts[3] = {1, -2, INT32_MAX}, counts_back[3] = {0};
    float weights[2] = {0.25f, -0.0f}, weights_back[2] = {9.0f, 9.0f};
    int64_t state[1] = {INT64_MIN}, state_back[1] = {0};
    const Extra extras[] = {{"state", DTYPE_I64, state, 1}, {"counts", DTYPE_I32, counts, 3}, {"weights", DTYPE_F32,
                                                                                               weights, 2}};
    const Extra back[] = {{"weights", DTYPE_F32, weights_back, 2},
                          {"state", DTYPE_I64, state_back, 1},
                          {"counts", DTYPE_I32, counts_back, 3}};
    const struct { Extra extra; const char* text; } wrong[] = {
        {{"other", DTYPE_I32, counts_back, 3}, "trainer.safetensors: \"other\" is missing: saved by another trainer"},
        {{"counts", DTYPE_I32, counts_back, 2}, "trainer.safetensors: \"counts\": expected I32 of 2, found I32 of 3"},
        {{"counts", DTYPE_F32, counts_back, 3}, "expected F32 of 3, found I32 of 3"}};
    TempPath folder = temp_folder();
    SavedFiles files;
    WrongExtra w;
    files.n = 0;
    extras_save(path_join(w.path, folder.s, "trainer.safetensors"), extras, 3, &files);
    check(t, files.n == 1 && strcmp(files.file[0].name, "trainer.safetensors") == 0,
          "the file is not among those of the manifest");
    extras_load(w.path, back, 3);
    check(t, memcmp(counts, counts_back, sizeof counts) == 0 && state_back[0] == INT64_MIN, "counts and state");
    check_bits(t, "weights", weights_back, weights, 2);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        w.extra = wrong[i].extra;
        check_exit(t, wrong[i].text, load_wrong_extra, &w, 2, wrong[i].text);
    }
    temp_remove(&folder);
}

static void test_grown_moments(Test* t) {
    const int old_layer[3] = {1, -1, 0};
    static Model model;
    Tensor* table = model.table;
    table[0] = tensor("w", 0, 0, 2, 5, INIT_ZEROS, 0.0f, DECAY, AS_IS);
    table[1] = tensor("l.%d", 0, 2, 3, 7, INIT_ZEROS, 0.0f, DECAY, TRANSPOSED);
    TempPath folder = temp_folder(), path = temp_path(&folder, "optimizer.safetensors");
    Device dev;
    device_init(&dev, 1);
    model_layout(&model, 2);
    float *m = random_array(model.n, 1.0f, 1), *v = random_array(model.n, 1.0f, 2);
    model_plan(&model, NULL, 1, 0);
    moments_save(path.s, &model, m, v, NULL);
    model_plan_free(&model);
    table[1].layers = 3;
    model_layout(&model, 2);
    float *m_large = filled_array(model.n, 7.0f), *v_large = filled_array(model.n, 7.0f), zeros[21] = {0};
    model_plan(&model, NULL, 1, 0);
    moments_load_layers(path.s, &model, m_large, v_large, old_layer, &dev);
    check_bits(t, "of no layer", v_large, v, 10);
    for (int l = 0; l < 3; l++) {
        const size_t at = table[1].offset + 21 * (size_t)l,
                     from = table[1].offset + 21 * (size_t)(old_layer[l] < 0 ? 0 : old_layer[l]);
        check_bits(t, "first moments", m_large + at, old_layer[l] < 0 ? zeros : m + from, 21);
        check_bits(t, "second moments", v_large + at, old_layer[l] < 0 ? zeros : v + from, 21);
    }
    model_plan_free(&model);
    device_free(&dev);
    free(m), free(v), free(m_large), free(v_large);
    temp_remove(&folder);
}

// ---- options of a run, and how it ended ----

// the names of rust_trainer's options
static void test_other_names(Test* t) {
    const char* argv[] = {"t",
                          "--out-dir",
                          "a",
                          "--val-ratio=0.25",
                          "--val-every",
                          "7",
                          "--early-stopping-patience",
                          "3",
                          "--grad-clip-norm",
                          "2",
                          "--lr-warmup-steps",
                          "5",
                          "--lr-min-scale",
                          "0.5",
                          "--adam-eps",
                          "1e-6",
                          "--base-ckpt",
                          "b"};
    Option table[MAX_OPTIONS];
    RunOptions o;
    const int n = run_options(table, &o, "presets");
    options_parse(table, n, (int)(sizeof argv / sizeof argv[0]), (char**)argv, "");
    check(t,
          !strcmp(o.run, "a") && !strcmp(o.from, "b") && o.val_fraction == 0.25f && o.eval_every == 7 &&
              o.early_stop == 3,
          "--run, --from, --val-fraction, --eval-every, --early-stop");
    check(t, o.clip == 2.0f && o.warmup.n == 5 && o.final_lr == 0.5f && o.eps == 1e-6f,
          "--clip, --warmup, --final-lr, --eps");
    options_free(table, n);
}

static void plan_in_child(void* options) { run_plan_steps((RunOptions*)options, 100, 1); }

// --lr-horizon: the schedule of so many steps, whatever the run has; then its last value
static void test_horizon(Test* t) {
    RunOptions o = options_of("");
    o.schedule = SCHEDULE_COSINE;
    o.lr = 1e-3f;
    o.final_lr = 0.1f;
    o.warmup.n = 10;
    o.steps = 200;
    for (int step = 0; step < 200; step++) {
        o.lr_horizon = 0;
        check(t, run_lr(&o, step) == schedule_lr(SCHEDULE_COSINE, step, 200, 10, (double)1e-3f, (double)0.1f),
              "step %d", step);
        o.lr_horizon = 100;
        float found = run_lr(&o, step), want = (float)((double)1e-3f * (double)0.1f);
        if (step < 100) { want = schedule_lr(SCHEDULE_COSINE, step, 100, 10, (double)1e-3f, (double)0.1f); }
        check_bits(t, "a horizon of 100", &found, &want, 1);
    }
    o.lr_horizon = 10;
    check_exit(t, "a horizon within warm-up", plan_in_child, &o, 2,
               "--warmup: expected less than the 10 steps of --lr-horizon, found 10");
}

// --warmup 5%: of --steps or --lr-horizon, as they are now
static void test_warmup_share(Test* t) {
    const struct { int steps, horizon, want; } cases[] = {{1000, 0, 50}, {9000, 0, 450}, {19, 0, 0}, {9000, 300, 15}};
    for (int i = 0; i < 4; i++) {
        RunOptions o = options_of("");
        o.warmup.percent = 5.0f;
        o.lr = 1.0f;
        o.steps = cases[i].steps;
        o.lr_horizon = cases[i].horizon;
        run_plan_steps(&o, 1000, 1);
        const int want = cases[i].want;
        check(t, run_lr(&o, 0) == (want > 0 ? 1.0f / (float)want : 1.0f) && run_lr(&o, want) == 1.0f,
              "%d steps, horizon %d: rates %g and %g", o.steps, o.lr_horizon, (double)run_lr(&o, 0),
              (double)run_lr(&o, want));
    }
    RunOptions o = options_of("");
    o.warmup.n = 10;
    o.steps = 10;
    check_exit(t, "a warm-up of all steps", plan_in_child, &o, 2,
               "--warmup: expected less than the 10 steps of the run, found 10");
}

static void test_early_stop(Test* t) {
    const float losses[] = {5.0f, 4.5f, 4.25f, 4.0f, 4.5f}, deltas[] = {0.0f, 0.5f};
    const char* want[] = {"11110", "10100"};  // 4.5 is not lower than 5 by more than 0.5
    for (int d = 0; d < 2; d++) {
        RunOptions o = options_of("");
        RunState s = run_state_start(1);
        o.early_stop_delta = deltas[d];
        for (int i = 0; i < 5; i++) {
            s.step = i;
            int best = run_state_validated(&s, &o, losses[i]);
            check(t, best == want[d][i] - '0', "delta %g, loss %g: best %d", (double)deltas[d], (double)losses[i],
                  best);
        }
        check(t, s.best_val == losses[3 - d] && s.best_step == 3 - d && s.evals_since_best == 1 + d,
              "delta %g: best %g at %d", (double)deltas[d], (double)s.best_val, s.best_step);
    }
}

static void test_summary(Test* t) {
    char path[PATH_BYTES], checkpoint[PATH_BYTES];
    TempPath run = new_run(2);
    RunOptions o = options_of(run.s);
    RunState s = run_state_start(1);
    s.step = 2;
    for (int i = 0; i < 2; i++) {  // without a validation; with one at a step whose checkpoint is gone
        s.best_val = i == 0 ? INFINITY : 1.5f;
        s.best_step = i == 0 ? 0 : 7;
        run_summary(&o, &s, i, i == 0 ? NULL : json_pack("{s:i}", "layers", 6));
        json_t* summary = json_read(path_join(path, run.s, "summary.json"));
        json_t* want = json_pack("{s:i, s:b, s:o, s:o, s:i, s:i, s:s, s:n, s:s}", "final_step", 2, "stopped_early", i,
                                 "best_val_loss", i == 0 ? json_null() : json_real(1.5), "best_step",
                                 i == 0 ? json_null() : json_integer(7), "updates", 0, "tokens", 0, "checkpoint",
                                 checkpoint_folder(checkpoint, run.s, 2), "best_checkpoint", "metrics",
                                 path_join(path, run.s, "metrics.jsonl"));
        if (i == 1) { json_object_set_new(want, "layers", json_integer(6)); }
        char* text = json_dumps(summary, 0);
        check(t, json_equal(summary, want), "found %s", text);
        free(text);
        json_decref(summary);
        json_decref(want);
    }
    temp_remove(&run);
}

// ---- a writer in the background ----

static int writer_has_begun;  // atomic

static void write_slowly(void* run) {
    const struct timespec pause = {0, 200000000};
    char temporary[PATH_BYTES];
    RunOptions o = options_of((const char*)run);
    RunState s = run_state_start(1);
    SavedFiles files;
    s.step = 1;
    files.n = 0;
    run_save_begin(temporary, &o, &s, 0.0);
    __atomic_store_n(&writer_has_begun, 1, __ATOMIC_RELEASE);
    nanosleep(&pause, NULL);  // the main thread is in exit() by now
    write_random(temporary, "config.json", 300, 1, &files);
    run_save_end(temporary, &files, NULL, 0, &o, &s, NULL);
}

static void begin_writer(void (*write)(void* run), void* run) {
    static Snapshot snapshot;
    static Device dev;  // it lives until the process ends
    device_init(&dev, 1);
    const float arena[16] = {0};
    const void* arenas[SNAPSHOT_ARENAS] = {arena, arena, arena};
    const size_t n_bytes[SNAPSHOT_ARENAS] = {sizeof arena, sizeof arena, sizeof arena};
    RunState s = run_state_start(1);
    snapshot_save(&snapshot, arenas, n_bytes, SNAPSHOT_ARENAS, &s, 1, 0, write, run, &dev);
    while (!__atomic_load_n(&writer_has_begun, __ATOMIC_ACQUIRE)) { sched_yield(); }
}

enum { MANY = SNAPSHOT_ARENAS_MAX };

typedef struct {
    Snapshot snapshot;
    float arena[MANY][8 * MANY];
    int n_right, may_write;  // atomic
} ManyArenas;

// the arena of number a has 8 (a + 1) elements a, 2a, 3a, ...
static void count_arenas(void* many) {
    ManyArenas* x = (ManyArenas*)many;
    while (!__atomic_load_n(&x->may_write, __ATOMIC_ACQUIRE)) { sched_yield(); }
    for (int a = 0; a < MANY; a++) {
        const float* found = (const float*)x->snapshot.arena[a];
        int right = 1;
        for (int i = 0; i < 8 * (a + 1); i++) { right &= found[i] == (float)(a * (i + 1)); }
        x->n_right += right;
    }
}

static void test_snapshot(Test* t) {
    static ManyArenas x;
    const void* arenas[MANY];
    size_t n_bytes[MANY];
    RunState s = run_state_start(1);
    Device dev;
    device_init(&dev, 1);  // children of later promises are forked: no other threads
    for (int a = 0; a < MANY; a++) {
        arenas[a] = x.arena[a];
        n_bytes[a] = sizeof(float) * 8 * (size_t)(a + 1);
        for (int i = 0; i < 8 * MANY; i++) { x.arena[a][i] = (float)(a * (i + 1)); }
    }
    snapshot_save(&x.snapshot, arenas, n_bytes, MANY, &s, 1, 0, count_arenas, &x, &dev);
    memset(x.arena, 0, sizeof x.arena);  // the next step
    __atomic_store_n(&x.may_write, 1, __ATOMIC_RELEASE);
    background_wait(&x.snapshot.writer);
    check(t, x.n_right == MANY, "%d of %d arenas as they were", x.n_right, MANY);
    snapshot_free(&x.snapshot);
    device_free(&dev);
}

static void fail_beside_writer(void* run) {
    begin_writer(write_slowly, run);
    fail_run("lost rank");
}

static void test_background(Test* t) {
    TempPath run = temp_folder();
    check_exit(t, "a failure of the main thread", fail_beside_writer, run.s, 1, "lost rank");
    check(t, checkpoint_newest_good(run.s) == 1, "the checkpoint that was being written is lost");
    temp_remove(&run);
}

// both threads fail, so many milliseconds after both are on their way
typedef struct {
    TempPath run;
    int writer_fails, main_fails;  // main_fails < 0: it works on, and asks once a step
} TwoFailures;

static void pause_ms(int ms) {
    const struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    if (ms > 0) { nanosleep(&pause, NULL); }
}

static void write_and_fail(void* two) {
    const TwoFailures* f = (const TwoFailures*)two;
    char temporary[PATH_BYTES];
    checkpoint_begin(temporary, f->run.s, 5, 0.0);
    for (int i = 0; i < 8; i++) {  // removing them takes a while
        char name[32];
        SavedFiles files;
        files.n = 0;
        snprintf(name, sizeof name, "model-%d.safetensors", i);
        write_random(temporary, name, 100, 1, &files);
    }
    __atomic_store_n(&writer_has_begun, 1, __ATOMIC_RELEASE);
    pause_ms(f->writer_fails);
    fail_input("the disk is full: %s", "writer");
}

static void fail_twice(void* two) {
    const TwoFailures* f = (const TwoFailures*)two;
    begin_writer(write_and_fail, two);
    pause_ms(f->main_fails);
    if (f->main_fails >= 0) { fail_input("the disk is full: %s", "main thread"); }
    Log log = {0};
    Snapshot none;
    StepRecord record = {1, 2, 4.5f, 1.0f, 1e-3f, 100.0, 64, 1000.0, -1.0, 0};
    memset(&none, 0, sizeof none);
    log_open(&log, f->run.s, -1, 0);
    for (int i = 0; i < 100000; i++) {
        log_step(&log, &record, 0);
        snapshot_newest(&none, -1);
    }
}

static int ends_with_newline(const char* path) {
    char last = '\0';
    FILE* file = fopen(path, "r");
    int found = file && fseek(file, -1, SEEK_END) == 0 && fread(&last, 1, 1, file) == 1 && last == '\n';
    if (file) { fclose(file); }
    return found;
}

static void test_two_failures(Test* t) {
    const struct { int writer_fails, main_fails, repeats; const char* line; } cases[] = {
        {100, 0, 1, "the disk is full: main thread"}, {0, 100, 1, "the disk is full: writer"}, {0, 0, 50,
                                                                                                "the disk is full: "},
        {1, 1, 10, "the disk is full: "}, {20, -1, 3, "the disk is full: writer"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int k = 0; k < cases[i].repeats; k++) {
            TwoFailures f = {temp_folder(), cases[i].writer_fails, cases[i].main_fails};
            char path[PATH_BYTES];
            check_exit(t, cases[i].line, fail_twice, &f, 2, cases[i].line);
            check(t, !exists(&f.run, "step_000005.tmp"), "case %zu: the unfinished checkpoint is left", i);
            int whole = f.main_fails >= 0 || ends_with_newline(path_join(path, f.run.s, "metrics.jsonl"));
            check(t, whole, "case %zu: the last line of metrics.jsonl is cut", i);
            temp_remove(&f.run);
        }
    }
}

// ---- what is kept ----

static void list_steps(const TempPath* run, char* text) {
    *text = '\0';
    for (int step = 0; step < 100; step++) {
        char path[PATH_BYTES];
        if (path_exists(checkpoint_folder(path, run->s, step))) { sprintf(text + strlen(text), "%d ", step); }
    }
}

static void test_kept(Test* t) {
    const struct { int keep, keep_every, best; const char* expected;
    } cases[] = {{1, 0, 0, "12 "},      {3, 0, 0, "10 11 12 "}, {1, 5, 0, "5 10 12 "},
                 {2, 0, 3, "3 11 12 "}, {1, 4, 7, "4 7 8 12 "}, {2, 1, 0, "1 2 3 4 5 6 7 8 9 10 11 12 "}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        TempPath run = temp_folder();
        RunOptions o = options_of(run.s);
        char found[256];
        o.keep = cases[i].keep;
        o.keep_every = cases[i].keep_every;
        for (int step = 1; step <= 12; step++) { save_with(&o, step, step >= cases[i].best ? cases[i].best : 0); }
        list_steps(&run, found);
        check(t, strcmp(found, cases[i].expected) == 0, "--keep %d --keep-every %d, best %d: expected %s, found %s",
              cases[i].keep, cases[i].keep_every, cases[i].best, cases[i].expected, found);
        temp_remove(&run);
    }
}

// the newest are damaged, the run went on from step 2: what it saves now must not go for their sake
static void test_kept_after_damage(Test* t) {
    TempPath run = new_run(4);
    RunOptions o = options_of(run.s);
    int kept = quiet();
    for (int step = 3; step <= 4; step++) {
        OpenFile f = open_saved(run.s, step, "model.safetensors");
        flip(&f, 1, 1);
        close(f.fd);
    }
    check(t, checkpoint_newest_good(run.s) == 2, "step 2 is not found behind two damaged ones");
    o.keep = 1;
    save_with(&o, 3, 0);
    check(t, checkpoint_newest_good(run.s) == 3, "step 3, saved anew");
    save(run.s, 20);
    OpenFile f = open_saved(run.s, 20, "config.json");
    flip(&f, 1, 1);
    close(f.fd);
    save_with(&o, 4, 0);
    check(t, checkpoint_newest_good(run.s) == 4, "--keep 1 keeps a damaged later one instead of what was just saved");
    loud(kept);
    temp_remove(&run);
}

// ---- one writer ----

static void lock_it(void* run) { run_lock((const char*)run); }

static void test_lock(Test* t) {
    TempPath run = new_run(1);
    int ready[2];
    char c;
    if (pipe(ready) != 0) { fail_run("pipe: %s", strerror(errno)); }
    pid_t holder = fork();
    if (holder == 0) {
        run_lock(run.s);
        if (write(ready[1], "x", 1) != 1) { _exit(1); }
        pause();
    }
    check(t, read(ready[0], &c, 1) == 1, "the first writer has no lock");
    char expected[64];
    snprintf(expected, sizeof expected, "another process (%d) writes to this run", (int)holder);
    check_exit(t, "a second writer", lock_it, run.s, 2, expected);
    kill(holder, SIGKILL);
    waitpid(holder, NULL, 0);
    check_exit(t, "a writer after kill -9 of the first", lock_it, run.s, 0, "");
    close(ready[0]);
    close(ready[1]);
    temp_remove(&run);
}

// ---- outliers ----

static void test_outliers(Test* t) {
    OutlierWindow w;
    float x[300];
    uint64_t s = seeded_stream(3);
    memset(&w, 0, sizeof w);
    for (int i = 0; i < 300; i++) { x[i] = 2.0f + xorshift_float(&s); }
    x[200] = 9.0f;
    for (int i = 0; i < 300; i++) {
        double z = outlier_z(&w, x[i]), mean = 0.0, square = 0.0;
        check(t, isnan(z) == (i < OUTLIER_WINDOW), "value %d: z %g", i, z);
        if (i < OUTLIER_WINDOW) { continue; }
        for (int j = i - 127; j <= i; j++) { mean += (double)x[j] / 128.0; }
        for (int j = i - 127; j <= i; j++) { square += (double)x[j] * (double)x[j] / 128.0; }
        double expected = ((double)x[i] - mean) / sqrt(square - mean * mean);
        check(t, fabs(z - expected) < 1e-9, "value %d: expected z %.12g, found %.12g", i, expected, z);
        check(t, (z > 8.0) == (i == 200), "value %d: z %g", i, z);
    }
    OutlierWindow before = w, restored;
    check(t, isnan(outlier_z(&w, NAN)) && isnan(outlier_z(&w, INFINITY)) && memcmp(&w, &before, sizeof w) == 0,
          "NaN joins the window");
    char* text = json_text(outliers_to_json(&w), "window");
    json_t* json = json_loads(text, 0, NULL);
    check(t, outliers_from_json(&restored, json) && memcmp(&w, &restored, sizeof w) == 0, "through JSON, other bits");
    json_decref(json);
    free(text);
    for (int i = 0; i < 128; i++) { outlier_z(&w, 0.1f); }
    check(t, outlier_z(&w, 0.1f) == 0.0, "a window of equal values: z is not 0");
}

// Targets' gradients G + noise, |G|^2 = 9 and tr(S) = 3600 in 100 dimensions: the scale is 400 targets. Leaves have
// different numbers of targets, one has none
static void test_noise_scale(Test* t) {
    enum { N = 100, LEAVES = 5 };
    const int64_t counted[LEAVES] = {10, 40, 0, 25, 5};
    uint64_t stream = seeded_stream(5);
    NoiseScale s = {0.0f, 0.0f};
    check(t, isnan(noise_scale_of(&s)), "known before it is measured");
    for (int step = 0; step < 3000; step++) {
        double squares[LEAVES] = {0}, sum[N] = {0}, square = 0.0;
        for (int k = 0; k < LEAVES; k++) {
            for (int i = 0; i < N; i++) {  // the sum of c targets is Gaussian: 12 uniform numbers are near enough
                double x = -6.0;
                for (int j = 0; j < 12; j++) { x += (double)xorshift_float(&stream); }
                const double g = 0.3 * (double)counted[k] + 6.0 * sqrt((double)counted[k]) * x;
                squares[k] += g / 80.0 * (g / 80.0);
                sum[i] += g / 80.0;
            }
        }
        for (int i = 0; i < N; i++) { square += sum[i] * sum[i]; }
        noise_scale_add(&s, squares, counted, LEAVES, square);
    }
    check(t, fabs((double)s.noise - 3600.0) < 100.0, "tr(S) %g", (double)s.noise);
    check(t, fabs((double)s.gradient - 9.0) < 4.0, "|G|^2 %g", (double)s.gradient);  // one step's has a deviation of 10
    check(t, noise_scale_of(&s) > 270.0 && noise_scale_of(&s) < 720.0, "noise scale %g", noise_scale_of(&s));
    const NoiseScale before = s;
    const double bad[2] = {1.0, NAN}, two[2] = {1.0, 1.0};
    const int64_t one[2] = {0, 7};
    noise_scale_add(&s, bad, counted, 2, 1.0);
    noise_scale_add(&s, two, one, 2, 1.0);
    check(t, memcmp(&s, &before, sizeof s) == 0, "NaN, or one leaf alone, adds something");
    RunState state = run_state_start(1);
    state.noise = s;
    char* text = json_text(run_state_to_json(&state), "state");
    json_t* json = json_loads(text, 0, NULL);
    RunState restored = run_state_from_json(json, "state");
    check(t, memcmp(&restored.noise, &s, sizeof s) == 0, "through a manifest: other bits");
    json_object_del(json, "noise");
    restored = run_state_from_json(json, "state");
    check(t, restored.noise.noise == 0.0f, "a manifest without it");
    json_decref(json);
    free(text);
}

int main(int argc, char** argv) {
    Promise promises[] = {  // the first one depends on the order of exit handlers: no checkpoint was saved before it
        {"failing beside a writer", "a run that fails finishes the checkpoint that is being written", test_background},
        {"failing in both threads",
         "one line, one exit, no .tmp left and no line of the log cut, whichever thread fails first",
         test_two_failures},
        {"flips", "a flipped bit in any byte of any file is found, and the checkpoint before is used", test_flips},
        {"lengths", "every shorter length of every file is found, a byte more, and no file", test_lengths},
        {"random damage", "1 to 8 bits anywhere are found", test_random_damage},
        {"mixed files", "files of another step, and a folder with another step's name, are found", test_mixed},
        {"manifests", "no file outside the folder, no wrong type, no list that is none", test_manifests},
        {"leftovers", "what an interrupted save, removal or replacement left goes away; files of the user's stay",
         test_leftovers},
        {"replacing", "a checkpoint of the same step is replaced; removing leaves the user's files", test_replace},
        {"failed saves", "the disk is looked at first; a save that fails leaves nothing", test_failed_save},
        {"keeping", "--keep, --keep-every and the best", test_kept},
        {"keeping after damage", "damaged later checkpoints do not cost a good one", test_kept_after_damage},
        {"extras", "named vectors come back to the bit; missing ones, other types and lengths are refused",
         test_extras},
        {"grown moments", "layers take their moments along, new ones begin with 0", test_grown_moments},
        {"other names", "the options of a run under the names that another trainer gave them", test_other_names},
        {"horizon", "--lr-horizon spans the schedule, whatever --steps is; then the last value stays", test_horizon},
        {"warm-up", "--warmup as a share is one of --steps or --lr-horizon, as they are now", test_warmup_share},
        {"early stop", "--early-stop-delta: by how much a validation must be better", test_early_stop},
        {"summary", "summary.json: how a run ended, and where its checkpoints are", test_summary},
        {"snapshot", "the writer gets each of the most arenas as it was when it began", test_snapshot},
        {"one writer", "a second one is refused with the first one's process id; kill -9 frees the run", test_lock},
        {"outliers", "z against its formula; through JSON the same bits", test_outliers},
        {"noise scale", "the quotient of noise and gradient of a made-up model; through a manifest the same bits",
         test_noise_scale},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
