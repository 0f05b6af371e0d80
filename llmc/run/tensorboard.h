/*
TensorBoard's event files, written without its library: `tensorboard --logdir runs` then shows all runs side by
side.
    tensorboard_open(&w, "runs/a", -1);                     // -1: a new run; or the step at which one resumes
    tensorboard_step(&w, &record);                          // train/loss, train/norm, train/lr, train/tokens_per_second
    tensorboard_extra(&w, step, log.extra);                 // train/<key>: the numbers of a trainer's own
    tensorboard_average(&w, step, loss);                    // validation/loss_ema
    tensorboard_validation(&w, step, loss, bits_per_byte);  // validation/loss, validation/bits_per_byte
    tensorboard_close(&w);
A file events.out.tfevents.SECONDS.llmc is a row of records, little-endian:
    offset   size   meaning
    0        8      n, bytes of the event
    8        4      checksum of the 8 bytes before: CRC-32C turned right by 15 bits, plus 0xa282ead8
    12       n      the event: a protocol buffer
    12 + n   4      checksum of the event
Fields of an event, by number: 1 wall time (double, seconds since 1970), 2 step (integer) and one of 3 file_version
(text, "brain.Event:2", the first event of a file), 5 summary (values of a tag and a float32 each), 7 session log
(status 1: START).
Resume: a new file is begun, whose name sorts behind the older ones, with a START at resume_step + 1. The readers drop
what they have of that step and later ones, which come again: what a killed run wrote after its checkpoint.
Each event is one write to the system: a kill costs at most the one being written, and readers skip a record cut short.
Cost:   about 200 bytes and 3 microseconds a step.
Errors: what cannot be written ends the run (status 1) with the path and the system's reason.
Source: tensorflow/tensorboard, event.proto and summary.proto; record_writer.h of TensorFlow; CRC-32C: RFC 3720, 12.1.
*/
#ifndef LLMC_TENSORBOARD_H
#define LLMC_TENSORBOARD_H
#include "../core/fail.h"  // fail_run, malloc_check
#include "log.h"           // StepRecord, seconds_now
#include <assert.h>
#include <dirent.h>
#include <fcntl.h>

typedef struct {
    char* path;  // NULL: nothing is written (the option is off, ranks other than 0)
    int fd;
} TensorBoard;

typedef struct {
    const char* tag;  // "train/loss": what stands before the slash groups diagrams
    float value;      // NaN and infinity are shown as such
} TensorBoardScalar;

// ---- records ----

// reflected polynomial 0x1edc6f41, bit by bit: an event is short
static inline uint32_t crc32c(const void* bytes, size_t n_bytes) {
    const unsigned char* s = (const unsigned char*)bytes;
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < n_bytes; i++) {
        crc ^= s[i];
        for (int bit = 0; bit < 8; bit++) { crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0); }
    }
    return ~crc;
}

// a checksum stored beside what it covers is masked, so that data which holds its own checksum does not verify by
// chance
static inline uint32_t crc32c_masked_(const void* bytes, size_t n_bytes) {
    uint32_t crc = crc32c(bytes, n_bytes);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

typedef struct {
    unsigned char bytes[4096];
    size_t n;
} EventBytes;

static inline void event_raw_(EventBytes* e, const void* bytes, size_t n_bytes) {
    assert(n_bytes <= sizeof e->bytes - e->n);
    memcpy(e->bytes + e->n, bytes, n_bytes);
    e->n += n_bytes;
}

// seven bits a byte, lowest first, the top bit says that more follow
static inline void event_varint_(EventBytes* e, uint64_t x) {
    for (; x > 127; x >>= 7) {
        unsigned char low = (unsigned char)(x | 128);
        event_raw_(e, &low, 1);
    }
    unsigned char last = (unsigned char)x;
    event_raw_(e, &last, 1);
}

// a protocol buffer's field begins with its number and how its value is stored
enum { PROTO_VARINT = 0, PROTO_64_BITS = 1, PROTO_BYTES = 2, PROTO_32_BITS = 5 };

static inline void event_field_(EventBytes* e, int number, int stored) {
    event_varint_(e, (uint64_t)(number << 3 | stored));
}

static inline void event_bytes_(EventBytes* e, int number, const void* bytes, size_t n_bytes) {
    event_field_(e, number, PROTO_BYTES);
    event_varint_(e, n_bytes);
    event_raw_(e, bytes, n_bytes);
}

// an event of the given time and step, whose field `number` is still to come
static inline void event_begin_(EventBytes* e, double wall_time, int64_t step) {
    e->n = 0;
    event_field_(e, 1, PROTO_64_BITS);
    event_raw_(e, &wall_time, 8);
    event_field_(e, 2, PROTO_VARINT);
    event_varint_(e, (uint64_t)step);
}

__attribute__((noreturn))
static inline void tensorboard_fail_(const TensorBoard* w) {
    fail_run("%s: cannot be written: %s", w->path, strerror(errno));
}

static inline void tensorboard_record_(const TensorBoard* w, const EventBytes* e) {
    unsigned char record[sizeof e->bytes + 16];
    uint64_t n = e->n;
    uint32_t of_length = crc32c_masked_(&n, 8), of_event = crc32c_masked_(e->bytes, e->n);
    memcpy(record, &n, 8);
    memcpy(record + 8, &of_length, 4);
    memcpy(record + 12, e->bytes, e->n);
    memcpy(record + 12 + e->n, &of_event, 4);
    for (size_t done = 0; done < e->n + 16;) {  // in one write, unless a signal or a full disk comes between
        ssize_t written = write(w->fd, record + done, e->n + 16 - done);
        if (written < 0 && errno != EINTR) { tensorboard_fail_(w); }
        done += written > 0 ? (size_t)written : 0;
    }
}

// ---- files ----

// the seconds in the name of the newest event file of a folder, -1 when there is none
static inline long long tensorboard_newest_(const char* folder) {
    long long newest = -1;
    DIR* entries = opendir(folder);
    if (!entries) { fail_run("%s: cannot be listed: %s", folder, strerror(errno)); }
    for (struct dirent* entry; (entry = readdir(entries));) {
        long long seconds = -1;
        if (sscanf(entry->d_name, "events.out.tfevents.%10lld", &seconds) == 1 && seconds > newest) {
            newest = seconds;
        }
    }
    closedir(entries);
    return newest;
}

// a new event file in the folder of a run; folder NULL: none, and every call does nothing
static inline void tensorboard_open(TensorBoard* w, const char* folder, int resume_step) {
    EventBytes e;
    memset(w, 0, sizeof *w);
    w->fd = -1;
    if (!folder) { return; }
    double now = seconds_now(CLOCK_REALTIME);
    long long newest = tensorboard_newest_(folder);
    // readers go by the names, clocks can go back
    long long seconds = (long long)now > newest ? (long long)now : newest + 1;
    size_t n_path = strlen(folder) + 64;
    w->path = (char*)malloc_check(n_path, "path");
    snprintf(w->path, n_path, "%s/events.out.tfevents.%010lld.llmc", folder, seconds);
    w->fd = open(w->path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    if (w->fd < 0) { fail_run("%s: cannot be created: %s", w->path, strerror(errno)); }
    event_begin_(&e, now, 0);
    event_bytes_(&e, 3, "brain.Event:2", 13);
    tensorboard_record_(w, &e);
    if (resume_step >= 0 || newest > 0) {  // what a file before has of these steps is no longer true
        event_begin_(&e, now, resume_step >= 0 ? (int64_t)resume_step + 1 : 0);
        event_bytes_(&e, 7, "\x08\x01", 2);  // status (field 1) = START
        tensorboard_record_(w, &e);
    }
}

// one event with n values of the same step
static inline void tensorboard_scalars(TensorBoard* w, int64_t step, double wall_time, const TensorBoardScalar* scalars,
                                       int n) {
    EventBytes e, summary, value;
    if (!w->path) { return; }
    summary.n = 0;
    for (int i = 0; i < n; i++) {
        value.n = 0;
        event_bytes_(&value, 1, scalars[i].tag, strlen(scalars[i].tag));
        event_field_(&value, 2, PROTO_32_BITS);
        event_raw_(&value, &scalars[i].value, 4);
        event_bytes_(&summary, 1, value.bytes, value.n);
    }
    event_begin_(&e, wall_time, step);
    event_bytes_(&e, 5, summary.bytes, summary.n);
    tensorboard_record_(w, &e);
}

static inline void tensorboard_close(TensorBoard* w) {
    if (w->path && close(w->fd) != 0) { tensorboard_fail_(w); }
    free(w->path);
    memset(w, 0, sizeof *w);
}

// ---- what a trainer calls beside log_step and log_validation ----

static inline void tensorboard_step(TensorBoard* w, const StepRecord* r) {
    const TensorBoardScalar scalars[] = {
        {"train/loss", r->loss}, {"train/norm", r->norm}, {"train/lr", r->lr}, {"train/tokens_per_second",
                                                                                (float)r->tok_per_s},
    };
    tensorboard_scalars(w, r->step, seconds_now(CLOCK_REALTIME), scalars, 4);
}

// what log_extra has for the record of this step, such as train/load; NULL: nothing. Texts and null have no diagram
static inline void tensorboard_extra(TensorBoard* w, int step, const json_t* extra) {
    const double now = seconds_now(CLOCK_REALTIME);
    for (void* at = json_object_iter((json_t*)extra); at; at = json_object_iter_next((json_t*)extra, at)) {
        char tag[128];
        const json_t* value = json_object_iter_value(at);
        const TensorBoardScalar scalar = {tag, (float)json_number_value(value)};
        snprintf(tag, sizeof tag, "train/%s", json_object_iter_key(at));
        if (json_is_number(value)) { tensorboard_scalars(w, step, now, &scalar, 1); }
    }
}

static inline void tensorboard_average(TensorBoard* w, int step, float val_loss) {
    const TensorBoardScalar scalar = {"validation/loss_ema", val_loss};
    tensorboard_scalars(w, step, seconds_now(CLOCK_REALTIME), &scalar, 1);
}

// bits_per_byte negative: unknown
static inline void tensorboard_validation(TensorBoard* w, int step, float val_loss, double bits_per_byte) {
    const TensorBoardScalar scalars[] = {{"validation/loss", val_loss}, {"validation/bits_per_byte",
                                                                         (float)bits_per_byte}};
    tensorboard_scalars(w, step, seconds_now(CLOCK_REALTIME), scalars, bits_per_byte >= 0.0 ? 2 : 1);
}
#endif  // LLMC_TENSORBOARD_H
