/*
A file being written: short writes go on, errors name the path, every byte is hashed on its way to the disk, and a
closed file is durable (fsync). Checkpoints keep the sum of each file in their manifest, so that reading can prove what
it reads.
    path_lies_in, path_overwrites   would an output take the place of an input?
    outfile_check    can the file be written? Asked before a run that ends with it
    outfile_open     creates the file, in the place of an old one; a link is refused
    outfile_write    any number of bytes; small ones are gathered in a buffer
    outfile_close    flush, fsync, close; returns name, size and XXH3 (64 bits) of what was written
    hex_text         such a sum as 16 hexadecimal digits
    make_folder, path_sync, parent_sync   folders and names that survive a power cut
    temporary_path, file_publish          a file that is whole before it has its name
    temporary_begin, temporary_publish    the same for a name that two processes may want: one writes, the other is
                                          told; outfile_open_temporary: an OutFile of this kind
    file_lock                             one writer at a time, and no lock outlives its process
    file_open, file_create, file_append   descriptors of files in a run, that no link leads elsewhere
    disk_free        bytes that a disk can still take
A failed fsync is not tried again: the kernel may have dropped the pages, and a second call would say that all is well.
Cost:   one copy for pieces below 1 MiB, none above; XXH3 at about 10 GB/s.
Errors: fail_run with path and errno text, and on a full disk what the file takes and what is free.
Source: XXH3 of libxxhash (Collet); Rebello et al. 2020, Can Applications Recover from fsync Failures?
*/
#ifndef LLMC_OUTFILE_H
#define LLMC_OUTFILE_H
#include "print.h"    // format_bytes
#include "mapfile.h"  // fail.h, fcntl.h, unistd.h
#include <glob.h>
#include <limits.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <xxhash.h>

enum { PATH_BYTES = 4096 };

// path = folder/name, or a message when that is too long
static inline const char* path_join(char path[PATH_BYTES], const char* folder, const char* name) {
    if (snprintf(path, PATH_BYTES, "%s/%s", folder, name) >= PATH_BYTES) {
        fail_input("%s/%s: this path is too long", folder, name);
    }
    return path;
}

static inline int path_exists(const char* path) { return access(path, F_OK) == 0; }

static inline int path_is_folder(const char* path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

// the folder in which a path stands
static inline const char* path_parent(char parent[PATH_BYTES], const char* path) {
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') { n--; }
    while (n > 0 && path[n - 1] != '/') { n--; }
    while (n > 1 && path[n - 1] == '/') { n--; }
    snprintf(parent, PATH_BYTES, "%.*s", n > 0 ? (int)n : 1, n > 0 ? path : ".");
    return parent;
}

// The absolute path without links. It need not exist: what is not there yet is no link, so its ".." is what it says
static inline int path_resolve_(char resolved[PATH_BYTES], const char* path) {
    char next[PATH_BYTES];
    if (!realpath(*path == '/' ? "/" : ".", resolved)) { return 0; }
    for (const char* part = path + strspn(path, "/"); *part;) {
        const int n = (int)strcspn(part, "/"), is_dot = n == 1 && *part == '.';
        if (n == 2 && strncmp(part, "..", 2) == 0) {
            memcpy(resolved, path_parent(next, resolved), sizeof next);
        } else if (!is_dot) {
            const char* above = strcmp(resolved, "/") == 0 ? "" : resolved;
            if (snprintf(next, sizeof next, "%s/%.*s", above, n, part) >= PATH_BYTES) { return 0; }
            if (!realpath(next, resolved)) { memcpy(resolved, next, sizeof next); }
        }
        part += n;
        part += strspn(part, "/");
    }
    return 1;
}

// Does a file of this name lie in the folder, at any depth? Both may have still to be made
static inline int path_lies_in(const char* path, const char* folder) {
    char parent[PATH_BYTES], inner[PATH_BYTES], outer[PATH_BYTES];
    if (!path_resolve_(inner, path_parent(parent, path)) || !path_resolve_(outer, folder)) { return 0; }
    const size_t n = strlen(outer);
    return strncmp(inner, outer, n) == 0 && (inner[n] == '/' || inner[n] == '\0' || strcmp(outer, "/") == 0);
}

// do both name one file that there is, or may be?
static inline int path_is_same(const char* a, const char* b) {
    char of_a[PATH_BYTES], of_b[PATH_BYTES];
    struct stat x, y;
    if (stat(a, &x) == 0 && stat(b, &y) == 0) { return x.st_dev == y.st_dev && x.st_ino == y.st_ino; }
    return *a && *b && path_resolve_(of_a, a) && path_resolve_(of_b, b) && strcmp(of_a, of_b) == 0;
}

static inline int path_is_read_(const char* path, const char* input) {
    return path_exists(path) && path_exists(input) &&
           (path_is_same(path, input) || (path_is_folder(input) && path_lies_in(path, input)));
}

// would writing to `output`, under that name or first under output.tmp, take the place of a file that `input` names,
// matches or holds?
static inline int path_overwrites(const char* output, const char* input) {
    char temporary[PATH_BYTES];
    glob_t found;
    int overwrites = path_is_read_(output, input);
    if (!*output || snprintf(temporary, sizeof temporary, "%s.tmp", output) >= PATH_BYTES) { return 0; }
    overwrites |= path_is_read_(temporary, input);
    if (path_exists(input) || glob(input, 0, NULL, &found) != 0) { return overwrites; }
    for (size_t i = 0; i < found.gl_pathc; i++) {
        overwrites |= path_is_read_(output, found.gl_pathv[i]) | path_is_read_(temporary, found.gl_pathv[i]);
    }
    globfree(&found);
    return overwrites;
}

// Somebody's file of another kind is not written over. kind: as file_looks_like calls it, "a token shard"
static inline void outfile_check_kind(const char* option, const char* path, const char* kind) {
    MappedFile file;
    ErrorText reason;
    if (!path_exists(path) || !file_map_or_not(&file, path, &reason)) { return; }
    const unsigned char* bytes = (const unsigned char*)file.bytes;
    const char* found = file_looks_like(bytes, file.n_bytes);
    const int is_short = file.n_bytes > 8 && file.n_bytes < 1024 && bytes[8] == '{';  // too short for file_looks_like
    const int is_kind = (found && strncmp(found, kind, strlen(kind)) == 0) ||
                        (is_short && strcmp(kind, "a safetensors file") == 0);
    if (file.n_bytes > 0 && !is_kind) {
        fail_input("--%s: %s: is there already, and not %s: give another name, or remove it", option, path, kind);
    }
    file_unmap(&file);
}

// A file that is written at the end of a long run: can it be? Asked before the run begins. An earlier one of its kind
// is replaced
static inline void outfile_check(const char* option, const char* path, const char* kind) {
    char parent[PATH_BYTES], inside[PATH_BYTES];
    struct stat status;
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode)) {  // its name would be taken from a device, too
        fail_input("--%s: %s: expected a file, found a %s", option, path,
                   S_ISDIR(status.st_mode) ? "folder" : "device or pipe");
    }
    path_join(inside, path_parent(parent, path), ".");  // a file is no parent, though it may be written
    if (access(inside, W_OK) != 0) { fail_input("--%s: %s: %s: %s", option, path, parent, strerror(errno)); }
    outfile_check_kind(option, path, kind);
}

// what a file holds, or the names in a folder, survives a power cut
static inline void path_sync(const char* path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // O_NONBLOCK: do not wait for a pipe's writer
    if (fd < 0 || fsync(fd) != 0) { fail_run("%s: cannot be made durable (fsync): %s", path, strerror(errno)); }
    close(fd);
}

static inline void parent_sync(const char* path) {
    char parent[PATH_BYTES];
    path_sync(path_parent(parent, path));
}

// the folder and those above it, durably
static inline void make_folder(const char* path) {
    char part[PATH_BYTES];
    for (const char* end = path; *end;) {
        end += strspn(end, "/");
        end += strcspn(end, "/");
        snprintf(part, sizeof part, "%.*s", (int)(end - path), path);
        if (path_exists(part)) { continue; }
        if (mkdir(part, 0777) == 0) { parent_sync(part); }
        else if (errno != EEXIST) { fail_run("%s: this folder cannot be made: %s", part, strerror(errno)); }
    }
}

// bytes that may still be written where `path` stands, or will stand; negative: the file system does not say
static inline double disk_free(const char* path) {
    char folder[PATH_BYTES];
    struct statvfs disk;
    snprintf(folder, sizeof folder, "%s", path);
    while (!path_exists(folder) && strlen(folder) > 1) {
        char below[PATH_BYTES];
        memcpy(below, folder, sizeof below);
        path_parent(folder, below);
    }
    if (statvfs(folder, &disk) != 0 || disk.f_blocks == 0) { return -1.0; }
    return (double)disk.f_frsize * (double)(geteuid() == 0 ? disk.f_bfree : disk.f_bavail);
}

// where a file is written before it is whole: "path.tmp"; file_publish then gives it its name, durably
static inline const char* temporary_path(char temporary[PATH_BYTES], const char* path) {
    if (snprintf(temporary, PATH_BYTES, "%s.tmp", path) >= PATH_BYTES) {
        fail_input("%s: this path is too long", path);
    }
    return temporary;
}

static inline void file_publish(const char* temporary, const char* path) {
    if (rename(temporary, path) != 0) { fail_run("%s: cannot be renamed to %s: %s", temporary, path, strerror(errno)); }
    parent_sync(path);
}

// A descriptor of a file that nobody else has under another name: links lead elsewhere and are refused. O_NONBLOCK: not
// to wait for a pipe's reader
static inline int file_open(const char* path, int flags) {
    struct stat status;
    const int fd = open(path, O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | flags, 0666);
    if (fd < 0 && errno == ELOOP) { fail_run("%s: expected a file, found a symbolic link: remove it", path); }
    if (fd < 0 && errno == EEXIST) { fail_run("%s: another process writes it now", path); }
    if (fd < 0) { fail_run("%s: cannot be created: %s", path, strerror(errno)); }
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink > 1) {
        fail_run("%s: expected a file with one name, found %d (hard links): put a copy in its place", path,
                 (int)status.st_nlink);
    }
    return fd;
}

// a new file in the place of an old one, whose other names keep what it held; a device stays what it is and is written
// to
static inline int file_create(const char* path) {
    struct stat status;
    const int there = lstat(path, &status) == 0, replaces = there && S_ISREG(status.st_mode);
    if (replaces && unlink(path) != 0) { fail_run("%s: cannot be replaced: %s", path, strerror(errno)); }
    return file_open(path, O_WRONLY | (there && !replaces ? 0 : O_CREAT | O_EXCL));
}

// the same file, to go on at its end
static inline int file_append(const char* path) { return file_open(path, O_WRONLY | O_CREAT | O_APPEND); }

// ---- one writer at a time ----

// 1: nobody else has it locked, and from now on we have; 0: another process has; -1 with errno: the file system has no
// locks. The lock is the kernel's and goes with the descriptor. A second's patience: a process that was killed a moment
// ago may still be on its way out
static inline int file_lock(int fd) {
    const struct timespec pause = {0, 50000000};
    for (int i = 0; flock(fd, LOCK_EX | LOCK_NB) != 0; i++) {
        if (errno != EWOULDBLOCK) { return -1; }
        if (i == 20) { return 0; }
        nanosleep(&pause, NULL);
    }
    return 1;
}

__attribute__((noreturn))
static inline void file_is_locked_(const char* path) {
    fail_run("%s: another process writes it: wait for its end, or choose another name", path);
}

// does the name lead to what the descriptor has open, by no link?
static inline int file_has_name(int fd, const char* name) {
    struct stat held, found;
    return fstat(fd, &held) == 0 && lstat(name, &found) == 0 && held.st_dev == found.st_dev &&
           held.st_ino == found.st_ino;
}

// what stands under a temporary name, locked: a process that was killed has left it. -1: nothing that can be locked
static inline int temporary_take(const char* temporary, const char* path, int flags) {
    for (int i = 0; i < 20; i++) {
        const int fd = open(temporary, O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | flags);
        if (fd < 0) { return -1; }
        if (!file_lock(fd)) { break; }
        if (file_has_name(fd, temporary)) { return fd; }
        close(fd);  // its writer was done meanwhile
    }
    file_is_locked_(path);
}

// A file under path.tmp, locked until its descriptor, which is the caller's to close, is closed
typedef struct Temporary {
    char path[PATH_BYTES], name[PATH_BYTES];  // name: "" once the file has its own, or is gone
    int fd;                                   // to write and to read
    struct Temporary* before;
} Temporary;

// those that this process has begun; the list only grows. A state of the process, as its end is
static inline Temporary** temporaries_(void) {
    static Temporary* last;
    return &last;
}

// Done at exit, so that what a full disk has cut short does not keep it full; a handler of signals may call it
static inline void temporaries_remove(void) {
    for (Temporary* t = *temporaries_(); t; t = t->before) {
        if (*t->name && file_has_name(t->fd, t->name)) { unlink(t->name); }
    }
}

// Only who has locked what is there may remove it; O_EXCL then lets one of several create
static inline int temporary_create_(const char* temporary, const char* path) {
    struct stat status;
    const int left = temporary_take(temporary, path, O_WRONLY), is_new = left < 0 && errno == ENOENT;
    const int is_file = left >= 0 && fstat(left, &status) == 0 && S_ISREG(status.st_mode);
    if (is_file && unlink(temporary) != 0) { fail_run("%s: cannot be replaced: %s", temporary, strerror(errno)); }
    const int fd = file_open(temporary, O_RDWR | (is_new || is_file ? O_CREAT | O_EXCL : 0));
    if (!file_lock(fd) || !file_has_name(fd, temporary)) { file_is_locked_(path); }  // another one was quicker
    if (left >= 0) { close(left); }
    return fd;
}

static inline Temporary* temporary_begin(const char* path) {
    Temporary* t = (Temporary*)malloc_check(sizeof *t, "path");
    sigset_t all, before;
    snprintf(t->path, PATH_BYTES, "%s", path);
    temporary_path(t->name, path);
    if (!*temporaries_()) { atexit(temporaries_remove); }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // a file that was made is in the list before a signal comes
    t->fd = temporary_create_(t->name, path);
    t->before = *temporaries_();
    *temporaries_() = t;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return t;
}

static inline void temporary_drop(Temporary* t) {
    if (unlink(t->name) != 0) { fail_run("%s: cannot be removed: %s", t->name, strerror(errno)); }
    *t->name = '\0';
}

// what was written, and is durable, takes its name
static inline void temporary_publish(Temporary* t) {
    if (!file_has_name(t->fd, t->name)) {
        fail_run("%s: another process has removed or replaced it: %s is not written", t->name, t->path);
    }
    file_publish(t->name, t->path);
    *t->name = '\0';
}

// ---- a file with its checksum ----

// what a written file is known by
typedef struct {
    char name[256];  // without the folder
    size_t n_bytes;
    uint64_t xxh3;
} FileSum;

typedef struct { char s[17]; } HexText;

// a sum as files show it: hex_text(xxh3).s
static inline HexText hex_text(uint64_t xxh3) {
    HexText out;
    snprintf(out.s, sizeof out.s, "%016llx", (unsigned long long)xxh3);
    return out;
}

typedef struct {
    char* path;
    int fd;
    Temporary* temporary;   // NULL: the file has its name already
    size_t n_bytes;         // written so far, the buffer included
    size_t n_expected;      // what the whole file will take, for the message of a full disk; 0: not known
    XXH3_state_t* hash;
    unsigned char* buffer;  // OUTFILE_BUFFER bytes, of which n_buffered are waiting
    size_t n_buffered;
} OutFile;

enum { OUTFILE_BUFFER = 1 << 20 };

static inline void outfile_init_(OutFile* f, const char* path) {
    memset(f, 0, sizeof *f);
    f->path = string_copy(path);
    f->hash = XXH3_createState();
    f->buffer = (unsigned char*)malloc_check(OUTFILE_BUFFER, "buffer of a file");
    if (!f->hash) { fail_run("%s: no memory for its checksum", path); }
    XXH3_64bits_reset(f->hash);
}

static inline void outfile_open(OutFile* f, const char* path) {
    outfile_init_(f, path);
    f->fd = file_create(path);
}

// one that has its name when outfile_close returns, and does not exist if the program ends before
static inline void outfile_open_temporary(OutFile* f, const char* path) {
    Temporary* t = temporary_begin(path);
    outfile_init_(f, t->name);
    f->temporary = t;
    f->fd = t->fd;
}

__attribute__((noreturn))
static inline void outfile_fail_(const OutFile* f, const char* what) {
    const char* reason = strerror(errno);
    if (f->n_expected == 0 || (errno != ENOSPC && errno != EDQUOT)) { fail_run("%s: %s: %s", f->path, what, reason); }
    double n_free = disk_free(f->path);
    fail_run("%s: %s: %s: the file takes %s, %s were written, %s are free: make room", f->path, what, reason,
             format_bytes((double)f->n_expected).s, format_bytes((double)(f->n_bytes - f->n_buffered)).s,
             n_free < 0.0 ? "?" : format_bytes(n_free).s);
}

// hand bytes to the system
static inline void outfile_send_(OutFile* f, const unsigned char* data, size_t n_bytes) {
    XXH3_64bits_update(f->hash, data, n_bytes);
    while (n_bytes > 0) {
        ssize_t n = write(f->fd, data, n_bytes);
        if (n < 0 && errno == EINTR) { continue; }
        if (n == 0) { errno = EIO; }  // no file system should do that
        if (n <= 0) { outfile_fail_(f, "cannot be written"); }
        data += n;
        n_bytes -= (size_t)n;
    }
}

static inline void outfile_write(OutFile* f, const void* data, size_t n_bytes) {
    f->n_bytes += n_bytes;
    if (n_bytes > OUTFILE_BUFFER - f->n_buffered) {
        outfile_send_(f, f->buffer, f->n_buffered);
        f->n_buffered = 0;
    }
    if (n_bytes > OUTFILE_BUFFER) {
        outfile_send_(f, (const unsigned char*)data, n_bytes);
    } else if (n_bytes > 0) {
        memcpy(f->buffer + f->n_buffered, data, n_bytes);
        f->n_buffered += n_bytes;
    }
}

static inline FileSum outfile_close(OutFile* f) {
    FileSum sum;
    const char* slash = strrchr(f->path, '/');
    outfile_send_(f, f->buffer, f->n_buffered);
    if (fsync(f->fd) != 0) { outfile_fail_(f, "cannot be made durable (fsync)"); }
    if (f->temporary) { temporary_publish(f->temporary); }
    if (close(f->fd) != 0) { outfile_fail_(f, "cannot be closed"); }
    snprintf(sum.name, sizeof sum.name, "%s", slash ? slash + 1 : f->path);
    sum.n_bytes = f->n_bytes;
    sum.xxh3 = XXH3_64bits_digest(f->hash);
    XXH3_freeState(f->hash);
    free(f->buffer);
    free(f->path);
    memset(f, 0, sizeof *f);
    return sum;
}
#endif  // LLMC_OUTFILE_H
