// llmc/run/tensorboard.h: checksums, records and events byte by byte; dev/ref/check_tensorboard.py reads them with
// TensorBoard.
//     test_tensorboard write FOLDER [RESUME_STEP]   writes the file that check_tensorboard.py reads
#include "llmc/core/mapfile.h"     // MappedFile, file_map
#include "llmc/run/tensorboard.h"  // what is tested
#include "llmc/test/test.h"        // Test, check, check_exit
#include "llmc/test/testfiles.h"   // temp_folder, temp_remove

// ---- a reader of its own ----

static uint32_t u32_at(const unsigned char* bytes) {
    uint32_t u;
    memcpy(&u, bytes, 4);
    return u;
}

// the event of the next record, or NULL at the end, after a cut and at a wrong checksum
static const unsigned char* next_event(const MappedFile* f, size_t* at, size_t* n_bytes) {
    uint64_t n;
    if (f->n_bytes - *at < 16) { return NULL; }
    const unsigned char* record = f->bytes + *at;
    memcpy(&n, record, 8);
    if (n > f->n_bytes - *at - 16 || u32_at(record + 8) != crc32c_masked_(record, 8)) { return NULL; }
    if (u32_at(record + 12 + n) != crc32c_masked_(record + 12, n)) { return NULL; }
    *at += 16 + n;
    *n_bytes = n;
    return record + 12;
}

static int count_events(const char* path) {
    MappedFile f;
    size_t at = 0, n_bytes;
    int n = 0;
    file_map(&f, path);
    while (next_event(&f, &at, &n_bytes)) { n++; }
    file_unmap(&f);
    return n;
}

// ---- promises ----

static void test_crc32c(Test* t) {
    unsigned char zeros[32] = {0}, ones[32], rising[32], falling[32];
    for (int i = 0; i < 32; i++) {
        ones[i] = 0xff;
        rising[i] = (unsigned char)i;
        falling[i] = (unsigned char)(31 - i);
    }
    const struct { const char* name; const void* bytes; size_t n; uint32_t want; } vectors[] = {
        {"32 zeros", zeros, 32, 0x8a9136aa}, {"32 ones", ones, 32, 0x62a8ab43}, {"rising", rising, 32, 0x46dd794e},
        {"falling", falling, 32, 0x113fdb5c}, {"digits", "123456789", 9, 0xe3069283}, {"nothing", "", 0, 0},
    };
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        uint32_t got = crc32c(vectors[i].bytes, vectors[i].n);
        check(t, got == vectors[i].want, "%s: found %08x, expected %08x", vectors[i].name, got, vectors[i].want);
    }
}

// TensorFlow's files begin with a record of 24 bytes, so those 12 bytes are well known; the events are written out by
// hand from event.proto.
static void test_bytes(Test* t) {
    const unsigned char length[12] = {24, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22};
    const char event[] = "\x09\0\0\0\0\0\0\xf8\x3f\x10\xac\x02"               // wall time 1.5, step 300
                         "\x2a\x13\x0a\x08\x0a\x01" "a\x15\0\0\0\x40"         // summary: "a" = 2
                         "\x0a\x07\x0a\0\x15\0\0\xc0\xff";                    // "" = NaN, its sign kept
    TempPath folder = temp_folder();
    MappedFile f;
    TensorBoard w;
    size_t at = 24 + 2 + 16, n_bytes = 0, first = 0;
    uint32_t nan_bits = 0xffc00000;
    TensorBoardScalar two[2] = {{"a", 2.0f}, {"", 0.0f}};
    memcpy(&two[1].value, &nan_bits, 4);
    tensorboard_open(&w, folder.s, -1);
    tensorboard_scalars(&w, 300, 1.5, two, 2);
    file_map(&f, w.path);
    const unsigned char* version = next_event(&f, &first, &n_bytes);
    check(t,
          version && n_bytes == 26 &&
              memcmp(version + 9,
                     "\x10\0\x1a\x0d"
                     "brain.Event:2",
                     17) == 0,
          "no file version");
    const unsigned char* found = next_event(&f, &at, &n_bytes);
    check(t, crc32c_masked_(length, 8) == u32_at(length + 8), "the checksum of 24 is another");
    check(t, found && n_bytes == sizeof event - 1 && memcmp(found, event, n_bytes) == 0, "the event differs, %zu bytes",
          n_bytes);
    check(t, at == f.n_bytes, "%zu bytes follow", f.n_bytes - at);
    file_unmap(&f);
    tensorboard_close(&w);
    temp_remove(&folder);
}

// the numbers of a trainer's own, each an event; no text, nothing that is not known
static void test_extra(Test* t) {
    const char *tags[] = {"train/load", "train/idle"}, *absent[] = {"train/z", "train/kind"};
    TempPath folder = temp_folder();
    MappedFile f;
    TensorBoard w;
    json_t* extra = json_pack("{s:f, s:i, s:n, s:s}", "load", 1.5, "idle", 3, "z", "kind", "train");
    tensorboard_open(&w, folder.s, -1);
    tensorboard_extra(&w, 7, extra);
    tensorboard_extra(&w, 8, NULL);
    check(t, count_events(w.path) == 3, "expected the version and 2 events, found %d", count_events(w.path));
    file_map(&f, w.path);
    for (int i = 0; i < 2; i++) {
        check(t, memmem(f.bytes, f.n_bytes, tags[i], strlen(tags[i])) != NULL, "no %s", tags[i]);
        check(t, memmem(f.bytes, f.n_bytes, absent[i], strlen(absent[i])) == NULL, "%s, which is no number", absent[i]);
    }
    file_unmap(&f);
    json_decref(extra);
    tensorboard_close(&w);
    temp_remove(&folder);
}

static const TensorBoardScalar one_loss = {"train/loss", 1.0f};

static void test_kill(Test* t) {
    TempPath folder = temp_folder();
    TensorBoard w;
    tensorboard_open(&w, folder.s, -1);
    TempPath path;
    snprintf(path.s, sizeof path.s, "%s", w.path);
    if (fork() == 0) {
        for (int step = 1; step <= 5; step++) { tensorboard_scalars(&w, step, 1.0, &one_loss, 1); }
        _exit(0);  // nothing is flushed
    }
    wait(NULL);
    int n = count_events(path.s);
    check(t, n == 6, "expected the version and 5 events, found %d", n);
    tensorboard_close(&w);
    temp_remove(&folder);
}

static void test_resume(Test* t) {
    TempPath folder = temp_folder(), alone = temp_folder();
    TensorBoard first, second, third;
    tensorboard_open(&first, alone.s, -1);
    check(t, count_events(first.path) == 1, "a START in a folder that had no file");
    tensorboard_close(&first);
    temp_remove(&alone);
    temp_file(&folder, "events.out.tfevents.9999999990.llmc", "", 0);  // of a clock that went wrong
    tensorboard_open(&first, folder.s, -1);
    tensorboard_open(&second, folder.s, 200);
    tensorboard_open(&third, folder.s, 300);
    check(t, strcmp(first.path, second.path) < 0 && strcmp(second.path, third.path) < 0,
          "names do not ascend: %s, %s, %s", first.path, second.path, third.path);
    MappedFile f;
    size_t at = 0, n_bytes = 0;
    file_map(&f, second.path);
    next_event(&f, &at, &n_bytes);
    const unsigned char* start = next_event(&f, &at, &n_bytes);
    check(t, start && n_bytes == 16 && memcmp(start + 9, "\x10\xc9\x01\x3a\x02\x08\x01", 7) == 0,
          "no START at step 201");
    check(t, count_events(first.path) == 2, "no START where older files stand: their steps would be shown too");
    file_unmap(&f);
    tensorboard_close(&first);
    tensorboard_close(&second);
    tensorboard_close(&third);
    temp_remove(&folder);
}

static void test_none(Test* t) {
    TensorBoard w;
    StepRecord r = {1, 1, 1.0f, 1.0f, 1.0f, 1.0, 1, 1.0, 0.5, 0};
    tensorboard_open(&w, NULL, -1);
    tensorboard_step(&w, &r);
    tensorboard_validation(&w, 1, 1.0f, 1.0);
    check(t, !w.path, "there is a file");
    tensorboard_close(&w);
}

static void write_full(void* arg) {
    TensorBoard w = {string_copy("/dev/full"), open("/dev/full", O_WRONLY)};
    (void)arg;
    tensorboard_scalars(&w, 1, 1.0, &one_loss, 1);
}

static void open_missing(void* arg) {
    TensorBoard w;
    (void)arg;
    tensorboard_open(&w, "/nonexistent/run", -1);
}

static void test_errors(Test* t) {
    check_exit(t, "full disk", write_full, NULL, 1, "/dev/full: cannot be written: No space left on device");
    check_exit(t, "no folder", open_missing, NULL, 1, "/nonexistent/run: cannot be listed: No such file or directory");
}

// steps 1..N with floats of every kind; check_tensorboard.py makes the same numbers
static int write_file(const char* folder, int resume_step) {
    TensorBoard w;
    tensorboard_open(&w, folder, resume_step);
    for (int step = resume_step < 0 ? 1 : resume_step + 1; step <= 100; step++) {
        uint32_t bits = 2654435761u * (uint32_t)step;
        StepRecord r = {step, 100, 0.0f, 0.1f * (float)step, 1.0f / (float)step, 1.0, 64 * step, 1e6 / step, 0.5, 0};
        r.loss = isfinite(float_from_bits(bits)) ? float_from_bits(bits) : 1.0f;
        tensorboard_step(&w, &r);
        json_t* extra = json_pack("{s:f, s:i, s:n, s:s}", "load", 1.0 / step, "idle", step, "z", "kind", "train");
        tensorboard_extra(&w, step, extra);
        json_decref(extra);
        if (step % 10 == 0) { tensorboard_validation(&w, step, r.lr, step % 20 == 0 ? 0.3 * step : -1.0); }
    }
    tensorboard_close(&w);
    return 0;
}

int main(int argc, char** argv) {
    if (argc >= 3 && strcmp(argv[1], "write") == 0) { return write_file(argv[2], argc > 3 ? atoi(argv[3]) : -1); }
    const Promise promises[] = {
        {"crc32c", "gives the published checksums (RFC 3720, B.4)", test_crc32c},
        {"bytes", "a record and an event are the format's to the last byte", test_bytes},
        {"extra", "the numbers of a trainer's own have tags of their own", test_extra},
        {"kill", "an event written is with the system, also when the process ends at once", test_kill},
        {"resume", "begins a file whose name sorts last, with a START behind the checkpoint's step", test_resume},
        {"none", "without a folder every call does nothing", test_none},
        {"errors", "a full disk and a missing folder end the run on one line", test_errors},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
