/*
SHA-256, and HMAC with it: who knows a secret can prove it without saying it, for HMAC(secret, question) tells nobody
the secret and answers no other question. XXH3, which sums our files, would not do: it is made to find accidents, and
who has seen some of its sums can make others. A library would be one more thing to install for everyone who trains on
one machine, for these 100 lines.
    hmac_begin, hmac_add, hmac_end   the 32 bytes of HMAC-SHA256(key, everything added)
    hmac_is_equal                    in a time that does not tell how many bytes are right
Errors: none. Cost: about 200 MB/s; a few hundred bytes for each connection of a start.
Source: FIPS 180-4 section 6.2; RFC 2104; the values of test_comm.c are those of RFC 4231.
*/
#ifndef LLMC_HMAC_H
#define LLMC_HMAC_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SHA256_BYTES = 32, SHA256_BLOCK = 64 };

typedef struct {
    uint32_t state[8];
    uint64_t n_bytes;  // added so far
    uint8_t block[SHA256_BLOCK];
} Sha256;

static inline uint32_t sha256_rotate_(uint32_t x, int n) { return x >> n | x << (32 - n); }

static inline void sha256_block_(Sha256* s) {
    static const uint32_t k[64] = {  // fractions of the cube roots of the first 64 primes
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t w[64], x[8];  // the message, stretched; a..h of the standard
    for (int i = 0; i < 16; i++) {
        const uint8_t* b = s->block + 4 * i;
        w[i] = (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
    }
    for (int i = 16; i < 64; i++) {
        const uint32_t near = w[i - 15], far = w[i - 2];
        const uint32_t s0 = sha256_rotate_(near, 7) ^ sha256_rotate_(near, 18) ^ near >> 3;
        const uint32_t s1 = sha256_rotate_(far, 17) ^ sha256_rotate_(far, 19) ^ far >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    memcpy(x, s->state, sizeof x);
    for (int i = 0; i < 64; i++) {
        const uint32_t a = x[0], e = x[4];
        const uint32_t s1 = sha256_rotate_(e, 6) ^ sha256_rotate_(e, 11) ^ sha256_rotate_(e, 25);
        const uint32_t s0 = sha256_rotate_(a, 2) ^ sha256_rotate_(a, 13) ^ sha256_rotate_(a, 22);
        const uint32_t t1 = x[7] + s1 + ((e & x[5]) ^ (~e & x[6])) + k[i] + w[i];
        const uint32_t t2 = s0 + ((a & x[1]) ^ (a & x[2]) ^ (x[1] & x[2]));
        memmove(x + 1, x, 7 * sizeof x[0]);
        x[4] += t1;
        x[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) { s->state[i] += x[i]; }
}

static inline void sha256_begin(Sha256* s) {
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(s->state, start, sizeof start);
    s->n_bytes = 0;
}

static inline void sha256_add(Sha256* s, const void* data, size_t n) {
    for (size_t i = 0; i < n; i++) {
        s->block[s->n_bytes++ % SHA256_BLOCK] = ((const uint8_t*)data)[i];
        if (s->n_bytes % SHA256_BLOCK == 0) { sha256_block_(s); }
    }
}

static inline void sha256_end(Sha256* s, uint8_t sum[SHA256_BYTES]) {
    const uint64_t n_bits = 8 * s->n_bytes;
    const uint8_t one = 0x80, zero = 0;
    sha256_add(s, &one, 1);
    while (s->n_bytes % SHA256_BLOCK != SHA256_BLOCK - 8) { sha256_add(s, &zero, 1); }
    for (int i = 7; i >= 0; i--) {
        const uint8_t byte = (uint8_t)(n_bits >> 8 * i);
        sha256_add(s, &byte, 1);
    }
    for (int i = 0; i < SHA256_BYTES; i++) { sum[i] = (uint8_t)(s->state[i / 4] >> (24 - 8 * (i % 4))); }
}

typedef struct {
    Sha256 inner, outer;
} Hmac;

static inline void hmac_begin(Hmac* h, const void* key, size_t n) {
    uint8_t inner[SHA256_BLOCK] = {0}, outer[SHA256_BLOCK];
    if (n > SHA256_BLOCK) {  // a long key counts by its sum
        sha256_begin(&h->inner);
        sha256_add(&h->inner, key, n);
        sha256_end(&h->inner, inner);
    } else {
        memcpy(inner, key, n);
    }
    for (int i = 0; i < SHA256_BLOCK; i++) {
        outer[i] = inner[i] ^ 0x5c;
        inner[i] ^= 0x36;
    }
    sha256_begin(&h->inner);
    sha256_add(&h->inner, inner, sizeof inner);
    sha256_begin(&h->outer);
    sha256_add(&h->outer, outer, sizeof outer);
}

static inline void hmac_add(Hmac* h, const void* data, size_t n) { sha256_add(&h->inner, data, n); }

static inline void hmac_end(Hmac* h, uint8_t sum[SHA256_BYTES]) {
    sha256_end(&h->inner, sum);
    sha256_add(&h->outer, sum, SHA256_BYTES);
    sha256_end(&h->outer, sum);
}

static inline int hmac_is_equal(const uint8_t* a, const uint8_t* b) {
    uint8_t differs = 0;
    for (int i = 0; i < SHA256_BYTES; i++) { differs |= a[i] ^ b[i]; }
    return differs == 0;
}
#endif  // LLMC_HMAC_H
