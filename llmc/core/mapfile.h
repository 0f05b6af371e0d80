/*
A file read as memory: opened read-only, checked to be a regular file, mapped whole. Every parser of this project reads
from such a mapping, so that sizes are known before anything is believed and big files cost no copy.
    file_map         fail_input with path and errno text when it cannot be opened, or is a folder, a pipe or a device;
                     file_map_or_not returns 0 with that text instead
    file_ahead, file_here, file_behind   of a large file that is read once, piece by piece: fetch these bytes meanwhile;
                     have them in memory; they were read, and no longer count as memory of this process
    file_looks_like  what a file that is not what it should be really is: a Git LFS pointer, an HTML page, an archive
    file_changed     somebody wrote to the file since it was mapped: its size or the time of its last change is another
    file_touched     neither, but what the kernel knows of it has changed: its mode, a link to it, or its bytes, where
                     the time of the last change was put back; only the bytes can tell
    file_replaced    another file stands under its name, or none; what is mapped is what it was
Cut short by somebody while it is mapped, a file would kill the reader with SIGBUS; file_map installs a handler that
names the file on one line and stops with status 1.
*/
#ifndef LLMC_MAPFILE_H
#define LLMC_MAPFILE_H
#include "fail.h"
#include <ctype.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdint.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "every file format here is little-endian and read by memcpy: this machine would need byte swaps"
#endif

// ---- what is wrong with a file, as text: parsers return it, so that tests and fuzzers call them without an exit ----

typedef struct { char text[480]; } ErrorText;

// always 0, for `return error_set(...)`
__attribute__((format(printf, 2, 3)))
static inline int error_set(ErrorText* error, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error->text, sizeof error->text, format, args);
    va_end(args);
    plain_text(error->text);  // names out of a file may hold anything
    return 0;
}

// a file that this project reads, given to the wrong option; whole headers only, for one that is cut short has its own
// message
static inline const char* file_of_ours_(const char* s, size_t n_bytes) {
    int32_t magic = 0;
    uint64_t n_header = 0;
    if (n_bytes < 1024) { return NULL; }
    memcpy(&magic, s, sizeof magic);
    memcpy(&n_header, s, sizeof n_header);
    if (magic == 20240520 || magic == 20240801) { return "a token shard (--train and --val take it)"; }
    if (magic == 20240522) { return "evaluation records (--hellaswag takes them)"; }
    if (magic == 20240326) { return "llm.c's model file (--from takes it)"; }
    if (magic == 20240328) { return "llm.c's tokenizer file (--tokenizer takes it)"; }
    if (magic == 20240527) { return "llm.c's optimizer state (--from takes the model file beside it)"; }
    if (n_header < n_bytes - 8 && s[8] == '{') { return "a safetensors file (--from takes a model's)"; }
    return NULL;
}

// "found ..." for a file that is something else, with what to do; NULL when nothing is recognised
static inline const char* file_looks_like(const void* bytes, size_t n_bytes) {
    const char* s = (const char*)bytes;
    const char* ours = file_of_ours_(s, n_bytes);
    if (ours) { return ours; }
    while (n_bytes > 0 && isspace((unsigned char)*s)) { s++; n_bytes--; }
    if (n_bytes >= 23 && memcmp(s, "version https://git-lfs", 23) == 0) {
        return "a Git LFS pointer instead of the file (run `git lfs pull`)";
    }
    if ((n_bytes >= 9 && strncasecmp(s, "<!doctype", 9) == 0) || (n_bytes >= 5 && strncasecmp(s, "<html", 5) == 0)) {
        return "an HTML page (the download went wrong: use the link to the raw file, log in if it asks to)";
    }
    if (n_bytes >= 5 && memcmp(s, "<?xml", 5) == 0) { return "an XML page (a failed download: it says why)"; }
    if (n_bytes >= 4 && memcmp(s, "PK\3\4", 4) == 0) { return "a zip archive (unpack it; PyTorch's: convert it)"; }
    if (n_bytes >= 2 && memcmp(s, "\x1f\x8b", 2) == 0) { return "a gzip archive (unpack it with gunzip)"; }
    if (n_bytes >= 4 && memcmp(s, "GGUF", 4) == 0) {
        return "a GGUF file, llama.cpp's format (take the safetensors it was made from)";
    }
    if (n_bytes >= 4 && memcmp(s, "PAR1", 4) == 0) {
        return "a Parquet table (dev/data has scripts that write shards)";
    }
    return NULL;
}

// ---- the mapping ----

typedef struct {
    char* path;
    const unsigned char* bytes;  // n_bytes of them, "" for an empty file
    size_t n_bytes;
    struct stat opened;          // as it was when it was mapped
} MappedFile;

// The path mapped at an address, from /proc/self/maps by system calls only: no lock, no allocation. "" when unknown.
static inline void file_at_address_(char* path, size_t n_path, const void* address) {
    char line[PATH_MAX + 128], c;
    size_t n = 0;
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    path[0] = '\0';
    while (fd >= 0 && path[0] == '\0' && read(fd, &c, 1) == 1) {
        if (c != '\n') {
            if (n < sizeof line - 1) { line[n++] = c; }
            continue;
        }
        line[n] = '\0';  // 7f12a000-7f12b000 r--p 00000000 08:01 1234   /data/shard.bin
        n = 0;
        char* rest = line;
        uintptr_t begin = strtoul(rest, &rest, 16), end = strtoul(rest + 1, &rest, 16);
        char* name = strchr(rest, '/');
        if (name && (uintptr_t)address >= begin && (uintptr_t)address < end) {
            strncpy(path, name, n_path - 1);
            path[n_path - 1] = '\0';
        }
    }
    if (fd >= 0) { close(fd); }
}

static inline void file_bus_error_(int signal_number, siginfo_t* info, void* context) {
    static int said;  // by one of several threads that meet the same hole; a state of the process, as its end is
    char path[PATH_MAX];
    (void)signal_number;
    (void)context;
    while (__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED)) { pause(); }
    file_at_address_(path, sizeof path, info->si_addr);
    const char* parts[] = {program_invocation_short_name, ": ", path[0] ? path : "a mapped file",
                           ": cut short by another program, or its disk failed, while it was in use\n"};
    struct iovec line[4];
    for (int i = 0; i < 4; i++) {
        line[i].iov_base = (void*)parts[i];
        line[i].iov_len = strlen(parts[i]);
    }
    ssize_t written = writev(2, line, 4);
    (void)written;
    _exit(1);
}

// 1, or 0 with the reason: for readers that have another file to go on with
static inline int file_map_or_not(MappedFile* f, const char* path, ErrorText* error) {
    memset(f, 0, sizeof *f);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // O_NONBLOCK: do not wait for a pipe's writer
    if (fd < 0) { return error_set(error, "cannot be opened: %s", strerror(errno)); }
    void* mapped = NULL;
    int failed = fstat(fd, &f->opened) != 0;
    if (failed) { error_set(error, "cannot be examined: %s", strerror(errno)); }
    if (!failed && !S_ISREG(f->opened.st_mode)) {
        failed = 1;
        error_set(error, "expected a file, found a %s", S_ISDIR(f->opened.st_mode) ? "folder" : "pipe or device");
    }
    f->n_bytes = failed ? 0 : (size_t)f->opened.st_size;
    if (f->n_bytes > 0) {  // mmap refuses 0 bytes
        mapped = mmap(NULL, f->n_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        failed = mapped == MAP_FAILED;
        if (failed && errno == ENOMEM) { fail_run("%s: no memory to map its %zu bytes", path, f->n_bytes); }
        if (failed) { error_set(error, "cannot be mapped (%zu bytes): %s", f->n_bytes, strerror(errno)); }
    }
    close(fd);
    if (failed) { return 0; }
    f->path = string_copy(path);
    f->bytes = mapped ? (const unsigned char*)mapped : (const unsigned char*)"";
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = file_bus_error_;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, NULL);
    return 1;
}

static inline void file_map(MappedFile* f, const char* path) {
    ErrorText error;
    if (!file_map_or_not(f, path, &error)) { fail_input("%s: %s", path, error.text); }
}

// ---- a large file, read once ----

enum { FILE_FAULT = 2 << 20 };  // bytes that a page fault maps at most: where they are in memory, those around it too

// Advice on n_bytes from `from` on, in whole pages of this size, as far as the file goes. A kernel may refuse: then the
// reader gets the same bytes, later
static inline void file_advise_(const MappedFile* f, const void* from, size_t n_bytes, uintptr_t page, int advice) {
    const uintptr_t first = (uintptr_t)f->bytes, last = first + f->n_bytes, at = (uintptr_t)from;
    if (at >= last) { return; }
    const uintptr_t down = at / page * page, up = (at + n_bytes + page - 1) / page * page;
    const uintptr_t begin = down > first ? down : first, end = up < last ? up : last;
    madvise((void*)begin, end - begin, advice);
}

static inline void file_ahead(const MappedFile* f, const void* from, size_t n_bytes) {
    file_advise_(f, from, n_bytes, (uintptr_t)sysconf(_SC_PAGESIZE), MADV_WILLNEED);
}

// in one call, not fault by fault
static inline void file_here(const MappedFile* f, const void* from, size_t n_bytes) {
    const int populate_read = 22;  // MADV_POPULATE_READ: Linux 5.14 has it, older headers do not
    file_advise_(f, from, n_bytes, (uintptr_t)sysconf(_SC_PAGESIZE), populate_read);
}

// They stay in the kernel's cache, and may be read again
static inline void file_behind(const MappedFile* f, const void* from, size_t n_bytes) {
    file_advise_(f, from, n_bytes, FILE_FAULT, MADV_DONTNEED);
}

// a new file moved over the old name does not touch our mapping
static inline int file_replaced(const MappedFile* f) {
    struct stat now;
    return stat(f->path, &now) != 0 || now.st_dev != f->opened.st_dev || now.st_ino != f->opened.st_ino;
}

static inline int file_times_differ_(struct timespec a, struct timespec b) {
    return a.tv_sec != b.tv_sec || a.tv_nsec != b.tv_nsec;
}

// the same file, written to since file_map
static inline int file_changed(const MappedFile* f) {
    struct stat now;
    if (file_replaced(f) || stat(f->path, &now) != 0) { return 0; }
    return now.st_size != f->opened.st_size || file_times_differ_(now.st_mtim, f->opened.st_mtim);
}

// The time of the last change can be put back by whoever may write, st_ctim by nobody; but chmod and a backup that
// makes a hard link move it too. Says so once for each such event: the caller compares bytes then
static inline int file_touched(MappedFile* f) {
    struct stat now;
    if (file_replaced(f) || stat(f->path, &now) != 0) { return 0; }
    if (!file_times_differ_(now.st_ctim, f->opened.st_ctim)) { return 0; }
    f->opened.st_ctim = now.st_ctim;  // of before the bytes are read: a later write is another event
    return 1;
}

static inline void file_unmap(MappedFile* f) {
    if (f->n_bytes > 0) { munmap((void*)f->bytes, f->n_bytes); }
    free(f->path);
    memset(f, 0, sizeof *f);
}
#endif  // LLMC_MAPFILE_H
