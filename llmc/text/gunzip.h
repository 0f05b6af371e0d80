/*
A file whole in memory, unpacked if it is a gzip archive.
    plain_file_open   the bytes of a file, or of what gzip packed; its name does not matter, its first two bytes do
    plain_file_close
An archive may have several members, one behind the other, as `cat a.gz b.gz` makes them; zeros may follow the last. The
checksum and the length that end each member are compared.
Memory: of an archive as much as is in it, up to half of it more while it grows; of another file none, it is mapped.
Errors: fail_input for an archive that is cut short or damaged, with what to do; fail_run where memory is not enough.
Source: RFC 1952; zlib.
*/
#ifndef LLMC_GUNZIP_H
#define LLMC_GUNZIP_H
#include "../core/mapfile.h"  // MappedFile, file_map
#include "../core/print.h"    // progress
#include "unicode.h"          // ByteBuffer, buffer_reserve
#include <zlib.h>

typedef struct {
    MappedFile file;
    ByteBuffer unpacked;         // of an archive
    const unsigned char* bytes;  // n_bytes of them
    size_t n_bytes;
} PlainFile;

#define GUNZIP_BYTES ((uInt)1 << 20)  // at once, in and out: zlib counts in 32 bits

// one member from packed[*at] on, which goes behind it; 1, or 0 with the reason
static inline int gunzip_member_(ByteBuffer* out, const unsigned char* packed, size_t n_packed, size_t* at,
                                 const char* path, ErrorText* error) {
    z_stream z;
    int status = Z_OK;
    memset(&z, 0, sizeof z);
    const int gzip = 16 + MAX_WBITS;  // with gzip's header
    if (inflateInit2(&z, gzip) != Z_OK) { fail_run("%s: no memory to unpack it", path); }
    while (status == Z_OK) {
        const size_t n_left = n_packed - *at;
        const uInt n = n_left < GUNZIP_BYTES ? (uInt)n_left : GUNZIP_BYTES;
        progress("unpacking", (int64_t)*at, (int64_t)n_packed);
        buffer_reserve(out, GUNZIP_BYTES);
        z.next_in = (Bytef*)packed + *at;  // zlib does not write there
        z.avail_in = n;
        z.next_out = out->bytes + out->n;
        z.avail_out = GUNZIP_BYTES;
        status = inflate(&z, Z_NO_FLUSH);
        *at += n - z.avail_in;
        out->n += GUNZIP_BYTES - z.avail_out;
    }
    const char* why = z.msg ? z.msg : "unknown";
    int ok = status == Z_STREAM_END;
    if (status == Z_MEM_ERROR) { fail_run("%s: no memory to unpack it", path); }
    if (status == Z_BUF_ERROR) {
        ok = error_set(error, "expected the end of the gzip archive, found the end of the file at byte %zu: it is cut "
                              "short, copy or download it again", *at);
    } else if (!ok) {
        ok = error_set(error, "expected a gzip archive, found a damaged one (%s at byte %zu): copy or download it "
                              "again", why, *at);
    }
    inflateEnd(&z);
    return ok;
}

// All members, without an exit for what is in them: 1, or 0 with the reason. path: for messages
static inline int gunzip(ByteBuffer* out, const unsigned char* packed, size_t n_packed, const char* path,
                         ErrorText* error) {
    size_t at = 0;
    do {
        if (!gunzip_member_(out, packed, n_packed, &at, path, error)) { return 0; }
        size_t zeros = at;
        while (zeros < n_packed && packed[zeros] == 0) { zeros++; }
        at = zeros == n_packed ? zeros : at;
    } while (at < n_packed);
    progress("unpacking", (int64_t)n_packed, (int64_t)n_packed);
    return 1;
}

static inline int gunzip_is_packed(const unsigned char* bytes, size_t n_bytes) {
    return n_bytes >= 2 && bytes[0] == 0x1f && bytes[1] == 0x8b;
}

static inline void plain_file_open(PlainFile* f, const char* path) {
    ErrorText error;
    memset(f, 0, sizeof *f);
    file_map(&f->file, path);
    f->bytes = f->file.bytes;
    f->n_bytes = f->file.n_bytes;
    if (!gunzip_is_packed(f->bytes, f->n_bytes)) { return; }
    if (!gunzip(&f->unpacked, f->bytes, f->n_bytes, path, &error)) { fail_input("%s: %s", path, error.text); }
    f->bytes = f->unpacked.bytes;
    f->n_bytes = f->unpacked.n;
}

static inline void plain_file_close(PlainFile* f) {
    buffer_free(&f->unpacked);
    file_unmap(&f->file);
    memset(f, 0, sizeof *f);
}
#endif  // LLMC_GUNZIP_H
