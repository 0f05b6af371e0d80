/*
A file being written: short writes go on, errors name the path, every byte is hashed on its way to the disk, and a closed
file is durable (fsync). Checkpoints keep the sum of each file in their manifest, so that reading can prove what it reads.
    outfile_open     creates the file, or empties it
    outfile_write    any number of bytes; small ones are gathered in a buffer
    outfile_close    flush, fsync, close; returns name, size and XXH3 (64 bits) of what was written
A failed fsync is not tried again: the kernel may have dropped the pages, and a second call would say that all is well.
Cost:   one copy for pieces below 1 MiB, none above; XXH3 at about 10 GB/s.
Errors: fail_run with path and errno text.
Source: XXH3 of libxxhash (Collet); Rebello et al. 2020, Can Applications Recover from fsync Failures?
*/
#ifndef LLMC_OUTFILE_H
#define LLMC_OUTFILE_H
#include "mapfile.h"  // fail.h, fcntl.h, unistd.h
#include <xxhash.h>

enum { PATH_BYTES = 4096 };

// path = folder/name, or a message when that is too long
static inline const char* path_join(char path[PATH_BYTES], const char* folder, const char* name) {
    if (snprintf(path, PATH_BYTES, "%s/%s", folder, name) >= PATH_BYTES) { fail_input("%s/%s: this path is too long", folder, name); }
    return path;
}

static inline int path_exists(const char* path) { return access(path, F_OK) == 0; }

// the folder and those above it
static inline void make_folder(const char* path) {
    char parent[PATH_BYTES];
    snprintf(parent, sizeof parent, "%s", path);
    for (char* c = parent + 1; *c; c++) {
        if (*c == '/') {
            *c = '\0';
            mkdir(parent, 0777);  // what is wrong with a parent shows in the last mkdir
            *c = '/';
        }
    }
    if (mkdir(path, 0777) != 0 && errno != EEXIST) { fail_run("%s: this folder cannot be made: %s", path, strerror(errno)); }
}

// the names in a folder survive a power cut
static inline void folder_sync(const char* path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) != 0) { fail_run("%s: cannot be made durable (fsync): %s", path, strerror(errno)); }
    close(fd);
}

// what a written file is known by
typedef struct {
    char name[256];  // without the folder
    size_t n_bytes;
    uint64_t xxh3;
} FileSum;

typedef struct {
    char* path;
    int fd;
    size_t n_bytes;         // written so far, the buffer included
    XXH3_state_t* hash;
    unsigned char* buffer;  // OUTFILE_BUFFER bytes, of which n_buffered are waiting
    size_t n_buffered;
} OutFile;

enum { OUTFILE_BUFFER = 1 << 20 };

static inline void outfile_open(OutFile* f, const char* path) {
    memset(f, 0, sizeof *f);
    f->path = string_copy(path);
    f->hash = XXH3_createState();
    f->buffer = (unsigned char*)malloc_check(OUTFILE_BUFFER, "buffer of a file");
    if (!f->hash) { fail_run("%s: no memory for its checksum", path); }
    XXH3_64bits_reset(f->hash);
    f->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (f->fd < 0) { fail_run("%s: cannot be created: %s", path, strerror(errno)); }
}

// hand bytes to the system
static inline void outfile_send_(OutFile* f, const unsigned char* data, size_t n_bytes) {
    XXH3_64bits_update(f->hash, data, n_bytes);
    while (n_bytes > 0) {
        ssize_t n = write(f->fd, data, n_bytes);
        if (n < 0 && errno == EINTR) { continue; }
        if (n <= 0) { fail_run("%s: cannot be written: %s", f->path, n < 0 ? strerror(errno) : "nothing was accepted"); }
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
    if (fsync(f->fd) != 0) { fail_run("%s: cannot be made durable (fsync): %s", f->path, strerror(errno)); }
    if (close(f->fd) != 0) { fail_run("%s: cannot be closed: %s", f->path, strerror(errno)); }
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
