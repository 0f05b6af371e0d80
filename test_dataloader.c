/*
Promises of llmc/text/dataloader.h, examples.h, numbers.h, rundata.h and tokenizer.h: which token stands where in which
row, in which order rows come, and what is said about data that cannot be used.
    make check, or cc -O2 -I. test_dataloader.c -o build/test_dataloader -ljansson -lxxhash -lpcre2-8 -lm &&
    build/test_dataloader
*/
#include "llmc/text/dataloader.h"
#include "llmc/run/rundata.h"
#include "llmc/test/golden.h"
#include "llmc/test/test.h"
#include "llmc/test/testfiles.h"

enum { GPT2 = 20240520, LLAMA3 = 20240801 };

// ---- shards for tests: token i of shard s is a hash, so that no two places look alike ----

static uint32_t test_token(int s, int64_t i, uint32_t vocab) {
    return (uint32_t)(permute_mix_((uint64_t)i * 1000 + (uint64_t)s) % vocab);
}

// header and n tokens; the caller frees
static unsigned char* shard_bytes(size_t* n_bytes, int s, int magic, int n, uint32_t vocab) {
    int width = magic == GPT2 ? 2 : 4;
    int32_t header[256] = {magic, magic == GPT2 ? 1 : 7, n};
    *n_bytes = sizeof header + (size_t)n * (size_t)width;
    unsigned char* bytes = (unsigned char*)malloc_check(*n_bytes, "shard of a test");
    memcpy(bytes, header, sizeof header);
    for (int i = 0; i < n; i++) {
        uint32_t token = test_token(s, i, vocab);
        memcpy(bytes + sizeof header + (size_t)i * (size_t)width, &token, (size_t)width);
    }
    return bytes;
}

static TempPath shard_file(const TempPath* folder, const char* name, int s, int magic, int n, uint32_t vocab) {
    size_t n_bytes;
    unsigned char* bytes = shard_bytes(&n_bytes, s, magic, n, vocab);
    TempPath path = temp_file(folder, name, bytes, n_bytes);
    free(bytes);
    return path;
}

// ---- the permutation ----

static int is_permutation(uint64_t key, uint64_t epoch, int64_t n) {
    unsigned char* seen = (unsigned char*)calloc((size_t)n, 1);
    int good = 1;
    for (int64_t i = 0; i < n && good; i++) {
        int64_t j = permute_index(key, epoch, i, n);
        good = j >= 0 && j < n && !seen[j]++;
    }
    free(seen);
    return good;
}

static void test_bijection(Test* t) {
    const int64_t large[] = {1023, 1024, 1025, 4095, 4097, 65536, 65537, 100003, 1000000};
    for (int64_t n = 1; n <= 300; n++) {
        for (int epoch = 0; epoch < 10; epoch++) {
            uint64_t key = 7919 * (uint64_t)epoch;
            check(t, is_permutation(key, (uint64_t)epoch, n), "n %lld, epoch %d", (long long)n, epoch);
        }
    }
    for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
        check(t, is_permutation(UINT64_MAX, i, large[i]), "n %lld", (long long)large[i]);
    }
    const int64_t huge[] = {((int64_t)1 << 40) + 1, ((int64_t)1 << 62) + 1, INT64_MAX};
    for (int h = 0; h < 3; h++) {  // too many to list: in range, and no two of 1000 alike
        int64_t seen[1000];
        int n_bad = 0;
        for (int i = 0; i < 1000; i++) {
            seen[i] = permute_index(5, 6, i < 500 ? i : huge[h] - 1 - i, huge[h]);
            n_bad += seen[i] < 0 || seen[i] >= huge[h];
            for (int j = 0; j < i; j++) { n_bad += seen[j] == seen[i]; }
        }
        check(t, n_bad == 0, "n %lld: %d out of range or twice", (long long)huge[h], n_bad);
    }
}

// Where an index goes, averaged over E epochs, has mean (n-1)/2 and standard deviation sqrt((n^2-1)/12/E): 5 allowed.
static void test_mean_rank(Test* t) {
    const int sizes[] = {2, 3, 9, 64, 100, 257};
    for (int s = 0; s < 6; s++) {
        int n = sizes[s], E = 4000;
        double middle = (n - 1) / 2.0, allowed = 5.0 * sqrt(((double)n * n - 1.0) / 12.0 / E);
        for (int i = 0; i < n; i++) {
            double sum = 0.0;
            for (int epoch = 0; epoch < E; epoch++) { sum += (double)permute_index(42, (uint64_t)epoch, i, n); }
            check(t, fabs(sum / E - middle) < allowed, "n %d: index %d goes to %.3f on average, expected %.1f +- %.3f",
                  n, i, sum / E, middle, allowed);
        }
    }
}

// All 24 orders of 4 rows come equally often: chi-square with 23 degrees of freedom, mean 23, standard deviation 6.8.
static void test_all_orders(Test* t) {
    int count[256] = {0}, n_orders = 0;
    double chi = 0.0;
    for (uint64_t epoch = 0; epoch < 24000; epoch++) {
        int order = 0;
        for (int i = 0; i < 4; i++) { order = order * 4 + (int)permute_index(7, epoch, i, 4); }
        count[order]++;
    }
    for (int order = 0; order < 256; order++) {
        n_orders += count[order] > 0;
        chi += count[order] > 0 ? (count[order] - 1000.0) * (count[order] - 1000.0) / 1000.0 : 0.0;
    }
    check(t, n_orders == 24 && chi < 23.0 + 5.0 * 6.8, "%d orders, chi-square %.1f", n_orders, chi);
}

// neighbours do not stay neighbours, and the same index goes elsewhere under another key or in another epoch
static void test_mixing(Test* t) {
    enum { N = 10000 };
    int n_neighbours = 0, n_same_epoch = 0, n_same_key = 0, n_fixed = 0;
    for (int64_t i = 0; i < N; i++) {
        int64_t here = permute_index(1, 0, i, N);
        n_neighbours += i + 1 < N && llabs(permute_index(1, 0, i + 1, N) - here) == 1;
        n_same_epoch += permute_index(1, 1, i, N) == here;
        n_same_key += permute_index(2, 0, i, N) == here;
        n_fixed += here == i;
    }
    // Poisson with mean 2 and 1: more than 12 has a probability below 1e-6
    check(t, n_neighbours <= 12, "%d of %d neighbours stay together", n_neighbours, N);
    check(t, n_same_epoch <= 12, "%d of %d are at the same place in the next epoch", n_same_epoch, N);
    check(t, n_same_key <= 12, "%d of %d are at the same place under another key", n_same_key, N);
    check(t, n_fixed <= 12, "%d of %d stay where they were", n_fixed, N);
}

// The order is part of a checkpoint: resumed with another version of this file, a run must go on with the same rows.
static void test_order_is_fixed(Test* t) {
    const int64_t want[3][8] = {  // by a Python program written from the definition
        {4, 0, 2, 7, 1, 5, 3, 8},
        {993, 825, 523, 93, 376, 902, 811, 760},
        {1977682919, 995971524, 2140404605, 2151402192, 4359919448, 2334876663, 1594214844, 3332370239},
    };
    const int64_t sizes[3] = {9, 1000, 5000000000};
    for (int s = 0; s < 3; s++) {
        for (int i = 0; i < 8; i++) {
            int64_t found = permute_index(1234567890123456789u + (uint64_t)s, (uint64_t)s, i, sizes[s]);
            check(t, found == want[s][i], "n %lld: index %d goes to %lld, expected %lld", (long long)sizes[s], i,
                  (long long)found, (long long)want[s][i]);
        }
    }
}

// ---- rows ----

// row r of a file of shard tokens, read again with fseek and fread
static void read_row(int* tokens, const char* path, int width, int T, int64_t r) {
    FILE* file = fopen(path, "rb");
    if (!file || fseek(file, (long)(1024 + r * T * width), SEEK_SET) != 0) {
        fail_run("%s: %s", path, strerror(errno));
    }
    for (int i = 0; i <= T; i++) {
        uint32_t token = 0;
        if (fread(&token, (size_t)width, 1, file) != 1) { fail_run("%s: no row %lld in the file", path, (long long)r); }
        tokens[i] = (int)token;
    }
    fclose(file);
}

// all rows of two shards in file order, against the files
static void check_rows(Test* t, int magic, int n0, int n1, int T) {
    int width = magic == GPT2 ? 2 : 4, plain[256], inputs[256], targets[256];
    uint32_t vocab = magic == GPT2 ? 50257 : 2000000000;
    TempPath folder = temp_folder(), pattern = temp_path(&folder, "part_*.bin");
    TempPath path0 = shard_file(&folder, "part_0.bin", 0, magic, n0, vocab);
    TempPath path1 = shard_file(&folder, "part_1.bin", 1, magic, n1, vocab);
    int64_t rows0 = (n0 - 1) / T, rows1 = (n1 - 1) / T;
    size_t n_bytes = sizeof(int) * (size_t)T;
    TokenData d;
    DataLoader l;
    tokens_open(&d, pattern.s, NULL);
    dataloader_init(&l, &d, T, ORDER_FILE, 0);
    check(t, d.n_shards == 2 && d.n_tokens == n0 + n1 && d.token_bytes == width, "shards, tokens, bytes of a token");
    check(t, l.n_rows == rows0 + rows1, "T %d: %lld rows, not %lld", T, (long long)l.n_rows,
          (long long)(rows0 + rows1));
    for (int64_t index = 0; index < 2 * l.n_rows; index++) {  // two epochs: file order again
        int64_t row = index % l.n_rows;
        read_row(plain, row < rows0 ? path0.s : path1.s, width, T, row < rows0 ? row : row - rows0);
        dataloader_row(&l, index, inputs, targets);
        check(t, memcmp(inputs, plain, n_bytes) == 0, "T %d, row %lld: inputs", T, (long long)index);
        check(t, memcmp(targets, plain + 1, n_bytes) == 0, "T %d, row %lld: targets", T, (long long)index);
    }
    tokens_close(&d);
    temp_remove(&folder);
}

static void test_rows(Test* t) {
    const int lengths[] = {1, 2, 3, 7, 32, 100};
    for (int i = 0; i < 6; i++) {
        int T = lengths[i];
        check_rows(t, GPT2, 3 * T + 1, 2 * T + 1, T);   // the last target is the last token
        check_rows(t, GPT2, 3 * T, 2 * T + 2, T);       // one too few, one too many
        check_rows(t, GPT2, 1, 4 * T + 1, T);           // a shard too short for a row gives none
        check_rows(t, LLAMA3, 5 * T + 1, T + 1, T);
    }
}

static void test_shuffled_rows(Test* t) {
    enum { T = 4, N = 50 };
    TempPath folder = temp_folder(), path = shard_file(&folder, "one.bin", 0, GPT2, N * T + 1, 50257);
    TokenData d;
    DataLoader in_order, l, other;
    int plain[T], plain_targets[T], inputs[T], targets[T], again[T], n_same = 0, n_same_epoch = 0;
    tokens_open(&d, path.s, NULL);
    dataloader_init(&in_order, &d, T, ORDER_FILE, 0);
    dataloader_init(&l, &d, T, ORDER_ROWS, 99);
    dataloader_init(&other, &d, T, ORDER_ROWS, 98);
    for (int epoch = 0; epoch < 3; epoch++) {
        int seen[N] = {0};
        for (int i = 0; i < N; i++) {
            dataloader_row(&l, epoch * N + i, inputs, targets);
            for (int r = 0; r < N; r++) {  // which row is it? tokens are hashes, so at most one fits
                dataloader_row(&in_order, r, plain, plain_targets);
                seen[r] += memcmp(plain, inputs, sizeof plain) == 0 &&
                           memcmp(plain_targets, targets, sizeof plain) == 0;
            }
            dataloader_row(&other, epoch * N + i, again, targets);
            n_same += memcmp(inputs, again, sizeof again) == 0;
            dataloader_row(&l, (epoch + 1) * N + i, again, targets);
            n_same_epoch += memcmp(inputs, again, sizeof again) == 0;
        }
        for (int r = 0; r < N; r++) { check(t, seen[r] == 1, "epoch %d: row %d came %d times", epoch, r, seen[r]); }
    }
    check(t, n_same < 15, "%d of 150 rows are the same under another key", n_same);
    check(t, n_same_epoch < 15, "%d of 150 rows are the same in the next epoch", n_same_epoch);
    dataloader_row(&l, 77, inputs, targets);
    for (int64_t index = 149; index >= 77; index--) { dataloader_row(&l, index, again, targets); }
    check(t, memcmp(inputs, again, sizeof again) == 0, "row 77 depends on which rows were asked for before");
    tokens_close(&d);
    temp_remove(&folder);
}

// One run, several ranks, and one that is stopped anywhere and resumed must see the same rows: rank r of R computes the
// micro-batches [n*r/R, n*(r+1)/R) of an update, and a checkpoint holds the number of rows only.
static void test_ranks(Test* t) {
    enum { T = 3, N = 23, B = 2, LEAVES = 6, STEPS = 5, ROWS = B * LEAVES * STEPS };
    TempPath folder = temp_folder(), path = shard_file(&folder, "one.bin", 0, GPT2, N * T + 1, 50257);
    TokenData d;
    DataLoader l, again;
    int plain[ROWS][T], plain_targets[ROWS][T], inputs[B][T], targets[B][T];
    tokens_open(&d, path.s, NULL);
    dataloader_init(&l, &d, T, ORDER_ROWS, 7);
    for (int i = 0; i < ROWS; i++) { dataloader_row(&l, i, plain[i], plain_targets[i]); }  // over two epochs
    for (int R = 1; R <= LEAVES; R++) {
        for (int i = 0; i < R * STEPS; i++) {
            int rank = i % R, step = i / R;
            dataloader_init(&again, &d, T, ORDER_ROWS, 7);  // a process of its own, resumed at this step
            for (int leaf = LEAVES * rank / R; leaf < LEAVES * (rank + 1) / R; leaf++) {
                int row = (step * LEAVES + leaf) * B;
                dataloader_batch(&again, row, B, inputs[0], targets[0]);
                check(t, memcmp(inputs, plain[row], sizeof inputs) == 0, "rank %d of %d, row %d: inputs", rank, R, row);
                check(t, memcmp(targets, plain_targets[row], sizeof targets) == 0, "rank %d of %d, row %d: targets",
                      rank, R, row);
            }
        }
    }
    tokens_close(&d);
    temp_remove(&folder);
}

// 5e9 tokens of 4 bytes, of which only the pages that are touched exist
static void test_far_rows(Test* t) {
    const int64_t n = 5000000000, T = 1000, rows = (n - 1) / T, last = rows - 1;
    const size_t n_bytes = (size_t)n * sizeof(uint32_t);
    uint32_t* tokens = (uint32_t*)mmap(NULL, n_bytes, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (tokens == MAP_FAILED) { skip(t, "20 GB of addresses are not to be had"); return; }
    TokenShard shard = {"far", tokens, n, 0, NULL};
    TokenData d;
    DataLoader l;
    int inputs[1000], targets[1000];
    memset(&d, 0, sizeof d);
    d.path = string_copy("far");
    d.shards = &shard;
    d.n_shards = 1;
    d.n_tokens = n;
    d.token_bytes = 4;
    d.vocab_size_needed = INT_MAX;
    const int64_t wanted[] = {0, ((int64_t)1 << 31) / T, ((int64_t)1 << 32) / T, last};
    for (int i = 0; i < 4; i++) {
        tokens[wanted[i] * T] = (uint32_t)(1000 + i);
        tokens[wanted[i] * T + T] = (uint32_t)(2000 + i);
    }
    dataloader_init(&l, &d, (int)T, ORDER_FILE, 0);
    check(t, l.n_rows == rows, "%lld rows", (long long)l.n_rows);
    for (int i = 0; i < 4; i++) {
        for (int64_t epoch = 0; epoch < 4000000000; epoch += 3999999999) {
            dataloader_row(&l, epoch * rows + wanted[i], inputs, targets);
            check(t, inputs[0] == 1000 + i && targets[T - 1] == 2000 + i, "row %lld: %d .. %d", (long long)wanted[i],
                  inputs[0], targets[T - 1]);
        }
    }
    l.order = ORDER_ROWS;
    for (int64_t index = 0; index < 1000; index++) {
        int64_t first;
        dataloader_find_(&l, index * rows + index, &first);
        check(t, first % T == 0 && first >= 0 && first / T < rows, "shuffled: token %lld", (long long)first);
    }
    munmap(tokens, n_bytes);
    free(d.path);
}

// every page asked for lies in the mapping and holds a token of the row; the kernel agrees; rows stay as they were
static void test_prefetch(Test* t) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const int n_tokens[] = {2, 1536, 1537, 5000, 40000};  // 1536: the file ends with a page
    int inputs[100], targets[100], before[100];
    TempPath folder = temp_folder();
    for (int i = 0; i < 5; i++) {
        TokenData d;
        DataLoader l;
        TempPath path = shard_file(&folder, "s.bin", i, GPT2, n_tokens[i], 50257);
        tokens_open(&d, path.s, NULL);
        const char *mapping = (const char*)d.files[0].bytes,
                   *end = mapping + ceil_div((int64_t)d.files[0].n_bytes, (int64_t)page) * (int64_t)page;
        dataloader_init(&l, &d, n_tokens[i] < 100 ? 1 : 100, ORDER_ROWS, 3);
        for (int64_t row = 0; row < l.n_rows; row++) {
            int64_t first;
            const char* token = (const char*)dataloader_find_(&l, row, &first)->tokens + 2 * first;
            PageRange ranges[2] = {{NULL, 0}, {NULL, 0}}, pages;
            check(t, dataloader_pages_(&l, row, page, ranges) == 1, "row %lld: more ranges than one", (long long)row);
            pages = ranges[0];
            check(t, pages.begin >= mapping && pages.begin + pages.n_bytes <= end, "row %lld: beyond the mapping",
                  (long long)row);
            check(t, pages.begin <= token && token + 2 * l.T + 2 <= pages.begin + pages.n_bytes,
                  "row %lld: not all of it", (long long)row);
            check(t, pages.n_bytes <= page * 2, "row %lld: %zu bytes", (long long)row, pages.n_bytes);
            check(t, madvise(pages.begin, pages.n_bytes, MADV_WILLNEED) == 0, "row %lld: %s", (long long)row,
                  strerror(errno));
        }
        dataloader_row(&l, 0, before, targets);
        dataloader_ask_pages_(&l, 0, 64);
        dataloader_ask_pages_(&l, l.n_rows - 1, 3);  // on into the next epoch
        dataloader_row(&l, 0, inputs, targets);
        check(t, memcmp(inputs, before, (size_t)l.T * sizeof(int)) == 0, "the row has changed");
        tokens_close(&d);
    }
    TempPath text = temp_file(&folder, "x.txt", "some text", 9);
    Tokenizer bytes;
    TokenData d;
    DataLoader l;
    PageRange none[2];
    tokenizer_bytes_init(&bytes);
    tokens_open(&d, text.s, &bytes);
    dataloader_init(&l, &d, 2, ORDER_FILE, 0);
    check(t, dataloader_pages_(&l, 0, page, none) == 0, "text needs no pages");
    dataloader_ask_pages_(&l, 0, 4);
    tokens_close(&d);
    tokenizer_free(&bytes);
    temp_remove(&folder);
}

// the same tokens before and after, cut where the fraction says, over two shards; no token copied
static void test_split(Test* t) {
    TempPath folder = temp_folder();
    const struct { float fraction; int64_t n_val; int train_shards, val_shards; } cuts[] = {
        {0.0f, 0, 2, 0}, {0.1f, 15, 2, 1}, {0.25f, 37, 2, 1},
        {1.0f / 3.0f, 50, 1, 1}, {0.5f, 75, 1, 2}, {0.99f, 148, 1, 2},
    };
    shard_file(&folder, "a.bin", 0, GPT2, 100, 50257);
    shard_file(&folder, "b.bin", 1, GPT2, 50, 50257);
    for (size_t c = 0; c < sizeof cuts / sizeof cuts[0]; c++) {
        TokenData train, val;
        tokens_open(&train, folder.s, NULL);
        tokens_split(&train, &val, cuts[c].fraction);
        check(t, val.n_tokens == cuts[c].n_val && train.n_tokens == 150 - cuts[c].n_val, "%g: %lld and %lld tokens",
              (double)cuts[c].fraction, (long long)train.n_tokens, (long long)val.n_tokens);
        check(t, train.n_shards == cuts[c].train_shards && val.n_shards == cuts[c].val_shards, "%g: %d and %d shards",
              (double)cuts[c].fraction, train.n_shards, val.n_shards);
        int64_t at = 0;
        for (int i = 0; i < train.n_shards + val.n_shards; i++) {
            const TokenShard* s = i < train.n_shards ? &train.shards[i] : &val.shards[i - train.n_shards];
            for (int64_t j = 0; j < s->n_tokens; j++, at++) {
                uint32_t want = at < 100 ? test_token(0, at, 50257) : test_token(1, at - 100, 50257);
                check(t, tokens_at_(s->tokens, 2, j) == want, "%g: token %lld", (double)cuts[c].fraction,
                      (long long)at);
            }
        }
        check(t, at == 150, "expected 150 tokens in both, found %lld", (long long)at);
        tokens_close(&val);
        tokens_close(&train);
    }
    temp_remove(&folder);
}

// XXH3 of the tokens in one piece, however they are cut into shards and whatever stands in headers
static void test_checksum(Test* t) {
    enum { N = (1 << 25) + 100000 };  // more than one piece of 2^26 bytes
    uint16_t* tokens = (uint16_t*)new_array(N, sizeof(uint16_t));
    for (int i = 0; i < N; i += i < 1000 ? 1 : 999) { tokens[i] = (uint16_t)test_token(0, i, 50257); }
    uint64_t want = XXH3_64bits(tokens, N * sizeof(uint16_t)), lengths = 0;
    // around the 240 bytes up to which XXH3 has another formula
    const int64_t cuts[] = {0, 1, 119, 120, 121, 50000, N};
    TokenData d;
    memset(&d, 0, sizeof d);
    d.token_bytes = 2;
    d.n_tokens = N;
    for (int i = 0; i < 7; i++) {
        TokenShard shards[2] = {{"x", tokens, cuts[i], 0, NULL}, {"y", tokens + cuts[i], N - cuts[i], 0, NULL}};
        d.shards = shards;
        d.n_shards = 2;
        check(t, tokens_checksum(&d) == want, "cut at %lld", (long long)cuts[i]);
        check(t, i == 0 || tokens_checksum_lengths(&d) != lengths, "the lengths are the same, cut at %lld",
              (long long)cuts[i]);
        d.examples_T = 1;
        lengths = tokens_checksum_lengths(&d);
        d.examples_T = 0;
        check(t, tokens_checksum_lengths(&d) != lengths, "the positions of examples do not matter");
        lengths = tokens_checksum_lengths(&d);
    }
    // by xxhash 0.8.1; runs keep such values, so every version must give it
    TokenShard letters = {"x", "foobar", 3, 0, NULL};
    d.shards = &letters;
    d.n_shards = 1;
    check(t, tokens_checksum(&d) == 0xd78fda63144c5c84u, "found %llx", (unsigned long long)tokens_checksum(&d));
    d.n_shards = 0;
    check(t, tokens_checksum(&d) == 0x2d06800538d394c2u, "of nothing: found %llx",
          (unsigned long long)tokens_checksum(&d));
    tokens[N - 1] ^= 1;
    check(t, XXH3_64bits(tokens, N * sizeof(uint16_t)) != want, "the last bit does not matter");
    free(tokens);
}

// ---- orders of rows ----

// the tokens of all shards of `folder` are their place in the data set: the input of a row tells which row it is
static void counting_shards(const TempPath* folder, const int* n_tokens, int n_shards) {
    int token = 0;
    for (int s = 0; s < n_shards; s++) {
        int32_t header[256] = {LLAMA3, 7, n_tokens[s]}, shard[256 + 1000];
        char name[32];
        memcpy(shard, header, sizeof header);
        for (int i = 0; i < n_tokens[s]; i++) { shard[256 + i] = token++; }
        snprintf(name, sizeof name, "s%02d.bin", s);
        temp_file(folder, name, shard, 1024 + 4 * (size_t)n_tokens[s]);
    }
}

// the first token of row `index`, with a look at all others
static int row_start(Test* t, const DataLoader* l, int64_t index) {
    int inputs[64] = {-1}, targets[64];  // where T may be 0 for all that gcc knows
    dataloader_row(l, index, inputs, targets);
    for (int i = 0; i < l->T; i++) {
        check(t, inputs[i] == inputs[0] + i && targets[i] == inputs[i] + 1, "row %lld: position %d", (long long)index,
              i);
    }
    return inputs[0];
}

static void test_shuffled_shards(Test* t) {
    enum { T = 4, N = 6 };
    const int n_tokens[N] = {13, 5, 2, 30, 9, 21}, n_rows[N] = {3, 1, 0, 7, 2, 5};
    int begin[N] = {0}, n_same = 0, orders[20][N];
    TempPath folder = temp_folder();
    TokenData d;
    DataLoader l;
    counting_shards(&folder, n_tokens, N);
    for (int s = 1; s < N; s++) { begin[s] = begin[s - 1] + n_tokens[s - 1]; }
    tokens_open(&d, folder.s, NULL);
    dataloader_init(&l, &d, T, ORDER_SHARDS, 11);
    check(t, l.n_rows == 18, "%lld rows", (long long)l.n_rows);
    for (int epoch = 0; epoch < 20; epoch++) {
        int64_t index = (int64_t)epoch * l.n_rows;
        for (int place = 0; place < N; place++) {
            int s = (int)permute_index(11, (uint64_t)epoch, place, N);
            orders[epoch][place] = s;
            for (int r = 0; r < n_rows[s]; r++, index++) {
                int start = row_start(t, &l, index);
                check(t, start == begin[s] + r * T, "epoch %d, index %lld: found token %d, expected row %d of shard %d",
                      epoch, (long long)index, start, r, s);
            }
        }
        n_same += epoch > 0 && memcmp(orders[epoch], orders[epoch - 1], sizeof orders[0]) == 0;
    }
    check(t, n_same <= 1, "%d of 19 epochs have the order of the one before", n_same);
    tokens_close(&d);
    temp_remove(&folder);
}

// stride T+1: each row has T+1 tokens of its own
static void test_separate_rows(Test* t) {
    TempPath folder = temp_folder();
    TokenData d;
    for (int T = 1; T <= 5; T++) {
        for (int n = T + 1; n <= 5 * (T + 1); n++) {
            DataLoader l;
            counting_shards(&folder, &n, 1);
            tokens_open(&d, folder.s, NULL);
            dataloader_init_rows(&l, &d, T, T + 1, ORDER_FILE, 1, 0);
            check(t, l.n_rows == n / (T + 1), "%d tokens, T %d: %lld rows", n, T, (long long)l.n_rows);
            for (int64_t r = 0; r < l.n_rows; r++) {
                int start = row_start(t, &l, r);
                check(t, start == r * (T + 1), "T %d: row %lld begins with token %d", T, (long long)r, start);
            }
            tokens_close(&d);
        }
    }
    temp_remove(&folder);
}

// each stream is contiguous, and together they are the rows from the first on, each once in an epoch
static void test_streams(Test* t) {
    enum { T = 3, N = 2 };
    const int n_tokens[N] = {3 * 20 + 1, 3 * 13 + 1};
    TempPath folder = temp_folder();
    TokenData d;
    counting_shards(&folder, n_tokens, N);
    tokens_open(&d, folder.s, NULL);
    for (int S = 1; S <= 33; S += S < 7 ? 1 : 13) {
        DataLoader l;
        const int W = 33 / S;
        dataloader_init_rows(&l, &d, T, T, ORDER_STREAMS, S, 77);
        check(t, l.n_rows == W * S, "%d streams: %lld rows", S, (long long)l.n_rows);
        for (int64_t index = 0; index < 2 * l.n_rows; index++) {
            const int64_t i = index % l.n_rows, stream = i % S, window = i / S, row = stream * W + window;
            const int64_t expected = row * T + (row >= 20);  // the last token of shard 0 begins no row
            int start = row_start(t, &l, index);
            check(t, start == expected, "%d streams: index %lld begins with %d, expected %lld", S, (long long)index,
                  start, (long long)expected);
            check(t, dataloader_stream_begins(&l, index) == (window == 0), "%d streams: does %lld begin one?", S,
                  (long long)index);
        }
    }
    DataLoader l;
    dataloader_init(&l, &d, T, ORDER_FILE, 0);
    for (int64_t index = 0; index < 40; index++) {
        check(t, dataloader_stream_begins(&l, index), "a row without streams begins");
    }
    tokens_close(&d);
    temp_remove(&folder);
}

// ---- examples ----

// a safetensors file: header, blanks that put the data at any address, inputs, targets; the caller frees
static unsigned char* example_bytes(size_t* n_bytes, const char* header, int n_blanks, const int* inputs,
                                    const int* targets, size_t n) {
    char text[1024];
    uint64_t n_header = (uint64_t)snprintf(text, sizeof text, "%s%*s", header, n_blanks, "");
    *n_bytes = 8 + (size_t)n_header + 8 * n;
    unsigned char* bytes = (unsigned char*)malloc_check(*n_bytes, "examples of a test");
    memcpy(bytes, &n_header, 8);
    memcpy(bytes + 8, text, n_header);
    memcpy(bytes + 8 + n_header, inputs, 4 * n);
    memcpy(bytes + 8 + n_header + 4 * n, targets, 4 * n);
    return bytes;
}

static TempPath example_file(const TempPath* folder, const char* name, int n, int T, int n_blanks, const int* inputs,
                             const int* targets) {
    char header[512];
    size_t n_bytes, n_ids = (size_t)n * (size_t)T;
    snprintf(header, sizeof header,
             "{\"inputs\":{\"dtype\":\"I32\",\"shape\":[%d,%d],\"data_offsets\":[0,%zu]},"
             "\"targets\":{\"dtype\":\"I32\",\"shape\":[%d,%d],\"data_offsets\":[%zu,%zu]}}",
             n, T, 4 * n_ids, n, T, 4 * n_ids, 8 * n_ids);
    unsigned char* bytes = example_bytes(&n_bytes, header, n_blanks, inputs, targets, n_ids);
    TempPath path = temp_file(folder, name, bytes, n_bytes);
    free(bytes);
    return path;
}

enum { EXAMPLES = 20, EXAMPLE_T = 6 };

// some targets count: those that are a multiple of 3
static void make_examples(int inputs[EXAMPLES][EXAMPLE_T], int targets[EXAMPLES][EXAMPLE_T], int s) {
    for (int i = 0; i < EXAMPLES * EXAMPLE_T; i++) {
        inputs[i / EXAMPLE_T][i % EXAMPLE_T] = (int)test_token(s, i, 100000);
        targets[i / EXAMPLE_T][i % EXAMPLE_T] = i % 3 ? -1 - 99 * (i % 2) : (int)test_token(s, i, 10);
    }
    inputs[EXAMPLES - 1][EXAMPLE_T - 1] = 100000 + s;
}

static void test_examples(Test* t) {
    static int in[2][EXAMPLES][EXAMPLE_T], out[2][EXAMPLES][EXAMPLE_T];
    int inputs[EXAMPLE_T], targets[EXAMPLE_T];
    for (int blanks = 0; blanks < 8; blanks++) {  // data at every address modulo 8
        TempPath folder = temp_folder();
        TokenData d;
        DataLoader l;
        for (int s = 0; s < 2; s++) {
            make_examples(in[s], out[s], s);
            example_file(&folder, s ? "b.safetensors" : "a.safetensors", EXAMPLES, EXAMPLE_T, blanks, in[s][0],
                         out[s][0]);
        }
        tokens_open(&d, folder.s, NULL);
        check(t, d.examples_T == EXAMPLE_T && d.n_shards == 2 && d.n_tokens == 2 * EXAMPLES * EXAMPLE_T,
              "%lld positions", (long long)d.n_tokens);
        check(t, d.vocab_size_needed == 100002 && d.classes_needed == 10, "%d tokens, %d classes", d.vocab_size_needed,
              d.classes_needed);
        dataloader_init(&l, &d, EXAMPLE_T, blanks % 2 ? ORDER_ROWS : ORDER_FILE, 3);
        check(t, l.n_rows == 2 * EXAMPLES, "%lld rows", (long long)l.n_rows);
        int64_t n_counted = 0;
        for (int64_t index = 0; index < 4 * EXAMPLES; index++) {
            int64_t row = index % l.n_rows;
            if (l.order == ORDER_ROWS) { row = permute_index(3, (uint64_t)(index / l.n_rows), row, l.n_rows); }
            int s = row >= EXAMPLES, r = (int)(row % EXAMPLES);
            dataloader_row(&l, index, inputs, targets);
            check(t, memcmp(inputs, in[s][r], sizeof inputs) == 0 && memcmp(targets, out[s][r], sizeof targets) == 0,
                  "row %lld", (long long)index);
            for (int i = 0; i < EXAMPLE_T; i++) { n_counted += targets[i] >= 0; }
            check(t, dataloader_counted(&l, 0, index + 1) == n_counted, "rows 0..%lld: %lld counted", (long long)index,
                  (long long)n_counted);
        }
        check(t, dataloader_counted(&l, 5, 0) == 0, "no rows count nothing");
        dataloader_ask_pages_(&l, 0, 2 * EXAMPLES);
        tokens_close(&d);
        temp_remove(&folder);
    }
}

// a split is by whole examples; the checksum knows inputs and targets, not where files are cut
static void test_example_split(Test* t) {
    static int in[EXAMPLES][EXAMPLE_T], out[EXAMPLES][EXAMPLE_T];
    TempPath folder = temp_folder();
    make_examples(in, out, 0);
    TempPath whole = example_file(&folder, "whole", EXAMPLES, EXAMPLE_T, 0, in[0], out[0]);  // told by its content
    example_file(&folder, "parts/a", 7, EXAMPLE_T, 0, in[0], out[0]);
    example_file(&folder, "parts/b", EXAMPLES - 7, EXAMPLE_T, 0, in[7], out[7]);
    TempPath parts = temp_path(&folder, "parts/*");
    TokenData d, val;
    DataLoader l;
    int inputs[EXAMPLE_T], targets[EXAMPLE_T];
    tokens_open(&d, whole.s, NULL);
    uint64_t checksum = tokens_checksum(&d);
    tokens_close(&d);
    tokens_open(&d, parts.s, NULL);
    check(t, tokens_checksum(&d) == checksum, "the checksum depends on how examples are cut into files");
    tokens_split(&d, &val, 0.73f);  // 14.6 of 20
    check(t, d.n_tokens == 6 * EXAMPLE_T && val.n_tokens == 14 * EXAMPLE_T, "%lld and %lld", (long long)d.n_tokens,
          (long long)val.n_tokens);
    check(t, val.examples_T == EXAMPLE_T && val.classes_needed == d.classes_needed, "the part is no examples");
    dataloader_init(&l, &val, EXAMPLE_T, ORDER_FILE, 0);
    for (int r = 0; r < 14; r++) {
        dataloader_row(&l, r, inputs, targets);
        check(t, memcmp(inputs, in[6 + r], sizeof inputs) == 0 && memcmp(targets, out[6 + r], sizeof targets) == 0,
              "row %d", r);
    }
    tokens_close(&val);
    tokens_close(&d);
    out[19][0] ^= 1;
    whole = example_file(&folder, "whole", EXAMPLES, EXAMPLE_T, 0, in[0], out[0]);
    tokens_open(&d, whole.s, NULL);
    check(t, tokens_checksum(&d) != checksum, "a target does not count in the checksum");
    tokens_close(&d);
    temp_remove(&folder);
}

static const struct {
    const char* header;
    int input, target;  // what stands at [1, 1] of (2, 2)
    const char* expected;
} broken_examples[] = {
    {"{\"inputs\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]},"
     "\"targets\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[16,32]}}",
     5, 6, NULL},
    {NULL, -1, 6, "inputs[1, 1]: expected an id 0..2147483646, found -1"},
    {NULL, INT_MAX, 6, "inputs[1, 1]: expected an id 0..2147483646, found 2147483647"},
    {NULL, 5, INT_MAX, "targets[1, 1]: expected an id up to 2147483646, found 2147483647"},
    {NULL, 5, INT_MIN, "all targets are negative: there is nothing to learn"},
    {"{\"inputs\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]},"
     "\"target\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[16,32]}}",
     5, 6, "tensors \"inputs\" and \"targets\", I32 of shape (n, T), found no \"targets\" (a model goes to --from)"},
    {"{\"input\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]},"
     "\"targets\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[16,32]}}",
     5, 6, "found no \"inputs\""},
    {"{\"inputs\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]},"
     "\"targets\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[16,32]}}",
     5, 6, "tensor \"inputs\": expected I32 of shape (n, T), found F32 of 2 dimensions"},
    {"{\"inputs\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]},"
     "\"targets\":{\"dtype\":\"I32\",\"shape\":[4],\"data_offsets\":[16,32]}}",
     5, 6, "tensor \"targets\": expected I32 of shape (n, T), found I32 of 1 dimension"},
    {"{\"inputs\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]},"
     "\"targets\":{\"dtype\":\"I32\",\"shape\":[4,1],\"data_offsets\":[16,32]}}",
     5, 6, "expected targets of the shape of inputs, (2, 2), found (4, 1)"},
    {"{\"inputs\":{\"dtype\":\"I32\",\"shape\":[2,0],\"data_offsets\":[0,0]},"
     "\"targets\":{\"dtype\":\"I32\",\"shape\":[2,4],\"data_offsets\":[0,32]}}",
     5, 6, "tensor \"inputs\": expected 1 row or more of 1..16777216 positions, found (2, 0)"},
    {"{\"inputs\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]},"
     "\"targets\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[16,36]}}",
     5, 6, "the file holds 32 bytes of data: it is cut short"},
};

static void test_broken_examples(Test* t) {
    const char* header = NULL;
    size_t n_bytes;
    for (size_t i = 0; i < sizeof broken_examples / sizeof broken_examples[0]; i++) {
        int inputs[4] = {0, 1, 2, broken_examples[i].input}, targets[4] = {-1, -1, -100, broken_examples[i].target};
        ErrorText error = {""};
        Examples e;
        header = broken_examples[i].header ? broken_examples[i].header : header;
        unsigned char* bytes = example_bytes(&n_bytes, header, 0, inputs, targets, 4);
        int accepted = examples_parse(&e, bytes, n_bytes, &error);
        const char* expected = broken_examples[i].expected;
        check(t,
              expected ? !accepted && strstr(error.text, expected) != NULL
                       : accepted && e.n == 2 && e.T == 2 && e.n_counted == 1,
              "case %zu: expected \"%s\", found \"%s\"", i, expected ? expected : "no error", error.text);
        for (size_t n = 0; i == 0 && n < n_bytes; n++) {
            unsigned char* cut = heap_copy(bytes, n);
            check(t, !examples_parse(&e, cut, n, &error) && error.text[0], "accepted, cut to %zu bytes", n);
            free(cut);
        }
        free(bytes);
    }
}

static void check_classes_of(void* path) {
    TokenData d;
    tokens_open(&d, (const char*)path, NULL);
    tokens_check_classes(&d, 7, "the model");
    tokens_check_classes(&d, 6, "the model");
}

static void split_all_examples(void* path) {
    TokenData d, val;
    DataLoader l;
    tokens_open(&d, (const char*)path, NULL);
    tokens_split(&d, &val, 0.1f);
    dataloader_init(&l, &val, 2, ORDER_FILE, 0);
}

static void open_path(void* path) {
    TokenData d;
    tokens_open(&d, (const char*)path, NULL);
}

// the target of the last example changes on disk
static void change_example(void* path) {
    TokenData d;
    DataLoader l;
    int inputs[2], targets[2];
    const int large = 1000;
    tokens_open(&d, (const char*)path, NULL);
    dataloader_init(&l, &d, 2, ORDER_FILE, 0);
    FILE* file = fopen((const char*)path, "r+b");
    fseek(file, -4, SEEK_END);
    fwrite(&large, sizeof large, 1, file);
    fclose(file);
    dataloader_row(&l, 1, inputs, targets);
}

static void test_example_stops(Test* t) {
    const int inputs[4] = {0, 1, 2, 3}, targets[4] = {-1, 4, -1, 6};
    TempPath folder = temp_folder(), path = example_file(&folder, "x.safetensors", 2, 2, 0, inputs, targets);
    check_exit(t, "classes", check_classes_of, path.s, 2,
               "x.safetensors: expected targets below 6, the classes of the model, found 6 at position 1 of example 1");
    check_exit(t, "split", split_all_examples, path.s, 2, "the part of --val-fraction: no examples are left for it");
    check_exit(t, "changed", change_example, path.s, 1,
               "x.safetensors: changed while in use: target 1000 after a check that found ids below 7");
    example_file(&folder, "mixed/a.safetensors", 2, 2, 0, inputs, targets);
    example_file(&folder, "mixed/b.safetensors", 4, 1, 0, inputs, targets);
    check_exit(t, "two lengths", open_path, temp_path(&folder, "mixed").s, 2,
               "b.safetensors: expected rows of 2 positions as in");
    shard_file(&folder, "mixed/c.bin", 0, GPT2, 20, 50000);
    check_exit(t, "two kinds", open_path, temp_path(&folder, "mixed/[ac]*").s, 2,
               "c.bin: expected examples like the files before, found a token shard: give shards or examples, not "
               "both");
    temp_file(&folder, "page.safetensors", "<!doctype html>", 15);
    check_exit(t, "a page", open_path, temp_path(&folder, "page.safetensors").s, 2,
               "expected safetensors, found an HTML page");
    temp_remove(&folder);
}

// ---- numbers ----

static void check_numbers(Test* t, const char* path, const char* extension, const int64_t* want, int n, int n_shards,
                          int token_bytes) {
    TokenData d;
    int64_t at = 0;
    tokens_open_numbers(&d, path, extension);
    check(t, d.n_tokens == n && d.n_shards == n_shards && d.token_bytes == token_bytes,
          "%s: %lld tokens of %d bytes in %d shards", path, (long long)d.n_tokens, d.token_bytes, d.n_shards);
    int64_t largest = 0;
    for (int s = 0; s < d.n_shards; s++) {
        for (int64_t i = 0; i < d.shards[s].n_tokens && at < n; i++, at++) {
            check(t, tokens_at_(d.shards[s].tokens, d.token_bytes, i) == want[at], "%s: token %lld", path,
                  (long long)at);
            largest = want[at] > largest ? want[at] : largest;
        }
    }
    check(t, at == n && d.vocab_size_needed == largest + 1, "%s: vocabulary of %d", path, d.vocab_size_needed);
    check(t, d.text == NULL, "%s: numbers are no text", path);
    tokens_close(&d);
}

static void test_numbers(Test* t) {
    TempPath folder = temp_folder();
    const int64_t few[] = {12, 0, 7, 65535}, wide[] = {65536, 0, 1}, most[] = {2147483646, 7}, both[] = {5, 6, 12, 0, 7,
                                                                                                         65535};
    const char a[] = "\n12 0\t007\r\n65535", b[] = "65536 0\v1\f", c[] = "  2147483646\n\n00000000000000000000007 ";
    TempPath file = temp_file(&folder, "b.txt", a, sizeof a - 1);
    check_numbers(t, file.s, NULL, few, 4, 1, 2);
    check_numbers(t, temp_file(&folder, "wide.ids", b, sizeof b - 1).s, NULL, wide, 3, 1, 4);
    check_numbers(t, temp_file(&folder, "most.ids2", c, sizeof c - 1).s, NULL, most, 2, 1, 4);
    temp_file(&folder, "a-b.txt", "5 6", 3);
    temp_file(&folder, ".txt", "no", 2);
    temp_file(&folder, "a.txt.bak", "no", 2);
    temp_file(&folder, "atxt", "no", 2);
    temp_file(&folder, "sub/c.txt", "no", 2);
    check_numbers(t, folder.s, "txt", both, 6, 2, 2);
    check_numbers(t, temp_path(&folder, "").s, "txt", both, 6, 2, 2);
    TempPath shards = temp_folder();
    int64_t tokens[50];
    for (int i = 0; i < 50; i++) { tokens[i] = test_token(i / 20, i % 20, 100); }
    tokens[10] = 99;
    TempPath first = shard_file(&shards, "a.txt", 0, GPT2, 20, 100);
    shard_file(&shards, "b.txt", 1, GPT2, 20, 100);
    shard_file(&shards, "c.txt", 2, GPT2, 10, 100);
    tokens[10] = test_token(0, 10, 100);
    check_numbers(t, shards.s, "txt", tokens, 50, 3, 2);
    check_numbers(t, first.s, NULL, tokens, 20, 1, 2);
    temp_remove(&shards);
    temp_remove(&folder);
}

// longer than the first room for numbers, every width of digits
static void test_long_numbers(Test* t) {
    enum { N = 300000 };
    char* text = (char*)malloc_check(N * 7, "numbers");
    Numbers list;
    ErrorText error = {""};
    size_t n_bytes = 0, n_wrong = 0;
    int token_bytes;
    memset(&list, 0, sizeof list);
    for (int i = 0; i < N; i++) {
        n_bytes += (size_t)sprintf(text + n_bytes, "%u ", test_token(1, i, 65536) >> i % 16);
    }
    unsigned char* exact = heap_copy(text, n_bytes - 1);
    check(t, numbers_parse(&list, exact, n_bytes - 1, &error) && list.n == N, "%lld numbers: %s", (long long)list.n,
          error.text);
    uint16_t* tokens = (uint16_t*)numbers_take(&list, &token_bytes);
    for (int i = 0; i < N; i++) { n_wrong += tokens[i] != test_token(1, i, 65536) >> i % 16; }
    check(t, token_bytes == 2 && n_wrong == 0, "%zu are wrong", n_wrong);
    free(tokens);
    free(exact);
    free(text);
}

static void open_number_file(void* path) {
    TokenData d;
    tokens_open_numbers(&d, (const char*)path, NULL);
}

static void open_number_folder(void* path) {
    TokenData d;
    tokens_open_numbers(&d, (const char*)path, "txt");
}

static void test_number_stops(Test* t) {
    const struct { const char *text, *expected;
    } cases[] = {
        {"", "x.txt: expected token ids in decimal, found an empty file"},
        {" \n\t", "x.txt: expected token ids in decimal, found an empty file"},
        {"1 2\n3 four 5",
         "x.txt:2: expected token ids in decimal with blanks between, found \"four\" (text goes to --train)"},
        {"1,2", "x.txt:1: expected token ids in decimal with blanks between, found \"1,2\""},
        {"1\n\n-5", "x.txt:3: expected token ids of 0 or more, found -5"},
        {"-", "found \"-\""},
        {"1.5", "found \"1.5\""},
        {"+1", "found \"+1\""},
        {"0x10", "found \"0x10\""},
        {"7a", "found \"7a\""},
        {"2147483647", "x.txt:1: expected token ids below 2147483647, found 2147483647"},
        {"1 99999999999999999999999", "x.txt:1: expected token ids below 2147483647, found 99999999999999999999999"},
        {"99999999999999999999999999999999999999999999999", "found 9999999999999999999999999999999999999999..."},
        {"2147483647x", "found \"2147483647x\""},
        {"<!doctype html>", "x.txt:1: expected token ids in decimal, found an HTML page"},
    };
    TempPath folder = temp_folder();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        TempPath path = temp_file(&folder, "x.txt", cases[i].text, strlen(cases[i].text));
        check_exit(t, cases[i].text, open_number_file, path.s, 2, cases[i].expected);
        check_exit(t, cases[i].text, open_number_folder, folder.s, 2, cases[i].expected);
    }
    check_exit(t, "a folder", open_number_file, folder.s, 2, "expected a file, found a folder");
    check_exit(t, "no folder", open_number_folder, temp_path(&folder, "x.txt").s, 2,
               "x.txt: cannot be listed: Not a directory");
    temp_file(&folder, "x.txt", "1", 1);
    shard_file(&folder, "y.txt", 0, GPT2, 20, 50000);
    check_exit(t, "mixed", open_number_folder, folder.s, 2,
               "y.txt: expected text like the files before, found a token shard");
    temp_file(&folder, "empty/x.ids", "1", 1);
    check_exit(t, "no files", open_number_folder, temp_path(&folder, "empty").s, 2,
               "empty: expected files that end in .txt, found none");
    temp_remove(&folder);
}

// ---- sources and mixtures ----

// sources of so many rows of T tokens, as shards of at most 8 rows whose tokens nobody reads
static void fake_sources(TokenData* d, const int64_t* n_rows, const double* weights, int n, int T) {
    static uint16_t tokens[8 * 4 + 1];
    memset(d, 0, sizeof *d);
    d->path = string_copy("sources");
    d->token_bytes = 2;
    for (int s = 0; s < n; s++) {
        tokens_add_source_(d, "source", weights[s]);
        for (int64_t first = 0; first < n_rows[s]; first += 8) {
            int64_t rows = n_rows[s] - first < 8 ? n_rows[s] - first : 8;
            TokenShard shard = {"source", tokens, rows * T + 1, 0, NULL};
            d->n_tokens += tokens_add_shard_(d, &shard)->n_tokens;
        }
        tokens_end_source_(d);
    }
    d->text = malloc_check(1, "text");  // no part of a split
}

// the source and the row in it, as dev/ref/rows.py counts
static int64_t place_of(const DataLoader* l, int64_t index, int* source) {
    int64_t first;
    const int shard = (int)(dataloader_find_(l, index, &first) - l->data->shards);
    for (*source = 0;; ++*source) {
        const TokenSource* s = &l->data->sources[*source];
        if (shard < s->first_shard + s->n_shards) { return (shard - s->first_shard) * 8 + first / l->T; }
    }
}

static void test_mixture_order(Test* t) {
    enum { T = 4 };
    Golden g;
    golden_open(&g, "dev/golden/rows.safetensors");
    const json_t* mixtures = json_object_get(g.config, "mixtures");
    check(t, json_array_size(mixtures) == 5, "%zu mixtures", json_array_size(mixtures));
    for (size_t k = 0; k < json_array_size(mixtures); k++) {
        const json_t *m = json_array_get(mixtures, k), *rows = json_object_get(m, "rows");
        const int n = (int)json_array_size(rows), epochs = (int)json_integer_value(json_object_get(m, "epochs"));
        int64_t n_rows[8];
        double weights[8];
        for (int s = 0; s < n; s++) {
            n_rows[s] = json_integer_value(json_array_get(rows, (size_t)s));
            weights[s] = json_real_value(json_array_get(json_object_get(m, "weights"), (size_t)s));
        }
        char name[64];
        TokenData d;
        DataLoader l;
        const int shuffle = (int)json_integer_value(json_object_get(m, "shuffle"));
        const uint64_t key = (uint64_t)json_integer_value(json_object_get(m, "key"));
        snprintf(name, sizeof name, "mixture%zu.rows", k);
        const SafeTensor* want = golden_tensor(&g, name, DTYPE_I32);
        const int* at = (const int*)want->data;
        fake_sources(&d, n_rows, weights, n, T);
        dataloader_init(&l, &d, T, shuffle ? ORDER_ROWS : ORDER_FILE, key);
        check(t, (int64_t)want->n == 2 * epochs * l.n_rows, "%s: %zu numbers of %lld rows", name, want->n,
              (long long)l.n_rows);
        for (int64_t index = epochs * l.n_rows - 1; index >= 0; index--) {  // backwards: a function of the index alone
            int source;
            int64_t row = place_of(&l, index, &source);
            check(t, source == at[2 * index] && row == at[2 * index + 1],
                  "%s, index %lld: source %d, row %lld, expected %d, %d", name, (long long)index, source,
                  (long long)row, at[2 * index], at[2 * index + 1]);
        }
        tokens_close(&d);
    }
    golden_close(&g);
}

// without weights several sources are one data set, whose rows come as those of one source do
static void test_concatenation(Test* t) {
    enum { T = 4 };
    const int64_t n_rows[] = {20, 3, 77}, all = 100;
    const double none[] = {0.0, 0.0, 0.0};
    TokenData d;
    DataLoader l;
    fake_sources(&d, n_rows, none, 3, T);
    for (int order = ORDER_FILE; order <= ORDER_ROWS; order++) {
        dataloader_init(&l, &d, T, (RowOrder)order, 7);
        check(t, l.n_rows == all, "%lld rows", (long long)l.n_rows);
        for (int64_t index = 0; index < 2 * all; index++) {
            int source;
            int64_t row = place_of(&l, index, &source), want = index % all;
            if (order == ORDER_ROWS) { want = permute_index(7, (uint64_t)(index / all), want, all); }
            row += source > 1 ? 23 : source > 0 ? 20 : 0;
            check(t, row == want, "index %lld: row %lld, expected %lld", (long long)index, (long long)row,
                  (long long)want);
        }
    }
    tokens_close(&d);
}

static void test_path_list(Test* t) {
    TempPath folder = temp_folder();
    const char* names[] = {"a.txt", "b.txt", "c,d.txt", "e:1", "f:x/g.txt", "h.bin"};
    for (int i = 0; i < 6; i++) { temp_file(&folder, names[i], "x", 1); }
    const struct { const char* text; int n; const char* paths[3]; double weights[3]; } cases[] = {
        {"a.txt", 1, {"a.txt"}, {0}},
        {"c,d.txt", 1, {"c,d.txt"}, {0}},
        {"c,*", 1, {"c,*"}, {0}},
        {"[a,b].txt", 1, {"[a,b].txt"}, {0}},
        {"e:1", 1, {"e:1"}, {0}},
        {"nothing", 1, {"nothing"}, {0}},
        {"a.txt,b.txt", 2, {"a.txt", "b.txt"}, {0, 0}},
        {" a.txt , b.txt ", 2, {"a.txt", "b.txt"}, {0, 0}},
        {"a.txt,a.txt", 2, {"a.txt", "a.txt"}, {0, 0}},
        {"a.txt:3", 1, {"a.txt"}, {3}},
        {"a.txt:3,b.txt:0.25,*.bin:1e2", 3, {"a.txt", "b.txt", "*.bin"}, {3, 0.25, 100}},
        {"e:1,b.txt", 2, {"e:1", "b.txt"}, {0, 0}},
        {"e:1:2,b.txt:3", 2, {"e:1", "b.txt"}, {2, 3}},
        {"f:x/g.txt,a.txt", 2, {"f:x/g.txt", "a.txt"}, {0, 0}},
        {"f:x/g.txt:2,a.txt:.5", 2, {"f:x/g.txt", "a.txt"}, {2, 0.5}},
        {"c\\,d.txt:4,a.txt:1", 2, {"c,d.txt", "a.txt"}, {4, 1}},
        {"e\\:1,\\*", 2, {"e:1", "\\*"}, {0, 0}},
    };
    char before[4096];
    if (!getcwd(before, sizeof before) || chdir(folder.s) != 0) { fail_run("%s: %s", folder.s, strerror(errno)); }
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        PathList list;
        path_list_make(&list, cases[i].text);
        check(t, list.n == cases[i].n, "\"%s\": %d paths", cases[i].text, list.n);
        for (int k = 0; k < list.n && k < cases[i].n; k++) {
            check(t, strcmp(list.of[k].path, cases[i].paths[k]) == 0 && list.of[k].weight == cases[i].weights[k],
                  "\"%s\": path %d is \"%s\", weight %g", cases[i].text, k, list.of[k].path, list.of[k].weight);
        }
        path_list_free(&list);
    }
    if (chdir(before) != 0) { fail_run("%s: %s", before, strerror(errno)); }
    temp_remove(&folder);
}

static void make_path_list(void* text) {
    PathList list;
    path_list_make(&list, (const char*)text);
}

static void test_path_list_stops(Test* t) {
    const char* const cases[][2] = {
        {"x:0", "x:0: expected a weight above 0, at most 1e9, after the colon, as in books.txt:3, found \"0\""},
        {"x:-1,y:2", "found \"-1\""},
        {"x:nan", "found \"nan\""},
        {"x:inf", "found \"inf\""},
        {"x:1.001e9", "found \"1.001e9\""},
        {"x:1e400", "found \"1e400\""},
        {"x:1e-400", "found \"1e-400\""},
        {"x:0x3", "found \"0x3\""},
        {"x:1-", "found \"1-\""},
        {"x:", "found \"\""},
        {"x: 3", "found \" 3\""},
        {"x:3,y", "y: expected a weight, as other paths have one, found none (y:1)"},
        {"x,y:3", "x: expected a weight, as other paths have one, found none (x:1)"},
        {":3", ":3: expected a path before the colon, found nothing"},
        {",x", ",x: expected a path on each side of a comma, found nothing"},
        {"x,", "x,: expected a path on each side of a comma, found nothing"},
        {"x, ,y", "x, ,y: expected a path on each side of a comma, found nothing"},
        {",", ",: expected a path on each side of a comma, found nothing"},
    };
    char many[512] = "", *too_long = (char*)memset(malloc_check(6000, "path"), 'x', 6000);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        check_exit(t, cases[i][0], make_path_list, (void*)cases[i][0], 2, cases[i][1]);
    }
    for (int i = 0; i < 65; i++) { strcat(many, i ? ",x" : "x"); }
    check_exit(t, "65 paths", make_path_list, many, 2, "expected at most 64 paths, found more");
    too_long[5000] = ',', too_long[5999] = '\0';
    check_exit(t, "long", make_path_list, too_long, 2, "xxxxx...: this path is too long");
    free(too_long);
}

// text, a folder and shards side by side; each gives its last part; the sums are those of the whole and of each
static void test_several_sources(Test* t) {
    TempPath folder = temp_folder();
    char typed[4096];
    Tokenizer bytes;
    TokenData d, val;
    tokenizer_bytes_init(&bytes);
    temp_file(&folder, "a.txt", "0123456789", 10);
    shard_file(&folder, "b.bin", 0, GPT2, 30, 200);
    shard_file(&folder, "c.bin", 1, GPT2, 20, 200);
    temp_file(&folder, "text/d.txt", "abcd", 4);
    temp_file(&folder, "text/e.txt", "efghi", 5);
    const char* f = folder.s;
    snprintf(typed, sizeof typed, "%s/a.txt,%s/[bc].bin,%s/text,%s/a.txt", f, f, f, f);
    tokens_open(&d, typed, &bytes);
    const int64_t n_tokens[] = {11, 50, 11, 11}, n_documents[] = {1, 0, 2, 1};
    check(t, d.n_sources == 4 && d.n_shards == 5 && d.n_tokens == 83 && d.n_text == 33 && d.vocab_size_needed == 257,
          "%d sources, %d shards, %lld tokens, %lld of text", d.n_sources, d.n_shards, (long long)d.n_tokens,
          (long long)d.n_text);
    for (int s = 0; s < d.n_sources; s++) {
        const TokenSource* source = &d.sources[s];
        check(t, source->n_tokens == n_tokens[s] && source->n_documents == n_documents[s],
              "source %d: %lld tokens, %lld documents", s, (long long)source->n_tokens, (long long)source->n_documents);
    }
    const uint16_t in_text[] = {256, 'a', 'b', 'c', 'd', 256, 'e', 'f', 'g', 'h', 'i'};
    check(t, memcmp(d.shards[3].tokens, in_text, sizeof in_text) == 0, "the folder's tokens");
    check(t, tokens_checksum_source(&d, &d.sources[2]) == XXH3_64bits(in_text, sizeof in_text), "its checksum");
    check(t, tokens_checksum_source(&d, &d.sources[0]) == tokens_checksum_source(&d, &d.sources[3]), "the same twice");
    tokens_split(&d, &val, 0.2f);
    check(t, val.n_sources == 4 && val.n_shards == 4 && val.n_tokens == 2 + 10 + 2 + 2 && d.n_tokens == 67,
          "%d shards, %lld tokens for validation", val.n_shards, (long long)val.n_tokens);
    check(t, d.n_shards == 5 && d.sources[1].n_shards == 2 && d.sources[2].first_shard == 3, "what train keeps");
    check(t, tokens_at_(val.shards[2].tokens, 2, 0) == 'h' && val.shards[2].n_tokens == 2, "the folder's last part");
    check(t, tokens_at_(val.shards[1].tokens, 2, 0) == test_token(1, 10, 200), "the shards' last part");
    tokens_close(&val);
    tokens_close(&d);
    tokenizer_free(&bytes);
    temp_remove(&folder);
}

// ---- what names the data ----

typedef struct {
    const char* words[12];
    char folder[512];
    int T;
    RunData data;
    RunOptions o;
    RunDataOptions x;
    Option table[MAX_OPTIONS];
} MoreRun;

// options as typed, with % for the folder, up to the rows of an epoch
static void run_more(void* arg) {
    MoreRun* r = (MoreRun*)arg;
    static char typed[12][1024];
    char* argv[13] = {(char*)"test"};
    int argc = 1;
    Tokenizer bytes;
    for (int i = 0; i < 12 && r->words[i]; i++) {
        const char *word = r->words[i], *at = strchr(word, '%');
        if (at) { snprintf(typed[i], sizeof typed[i], "%.*s%s%s", (int)(at - word), word, r->folder, at + 1); }
        else { snprintf(typed[i], sizeof typed[i], "%s", word); }
        argv[argc++] = typed[i];
    }
    int n = run_options(r->table, &r->o, "");
    n = data_options(r->table, n, &r->x);
    options_parse(r->table, n, argc, argv, "");
    tokenizer_bytes_init(&bytes);
    memset(&r->data, 0, sizeof r->data);
    data_open_more(&r->data, &r->o, &r->x, r->table, n, &bytes);
    r->T = data_seq_len(&r->data, &r->o, r->table, n, 4);
    data_check_documents(&r->data, &r->o, data_separator(&r->data, &r->o, bytes.eot));
    data_plan(&r->data, &r->o, r->T, 257, 257, 1);
    tokenizer_free(&bytes);
    options_free(r->table, n);
}

// a.txt: 0 .. 99; dir/a.txt, dir/b.txt: 0 .. 29 and 30 .. 79; x.safetensors: 5 examples of 6; text
static TempPath more_folder(void) {
    TempPath folder = temp_folder();
    static int in[EXAMPLES][EXAMPLE_T], out[EXAMPLES][EXAMPLE_T];
    char text[4096];
    int n = 0, begin = 0, length_a = 0;
    for (int i = 0; i < 100; i++) {
        n += sprintf(text + n, "%d\n", i);
        if (i == 29) { length_a = n; }
        if (i == 79) { begin = n; }
    }
    temp_file(&folder, "a.txt", text, (size_t)n);
    temp_file(&folder, "dir/a.txt", text, (size_t)length_a);
    temp_file(&folder, "dir/b.txt", text + length_a, (size_t)(begin - length_a));
    for (int i = 0; i < 5 * EXAMPLE_T; i++) {
        in[i / EXAMPLE_T][i % EXAMPLE_T] = i, out[i / EXAMPLE_T][i % EXAMPLE_T] = i % 5;
    }
    example_file(&folder, "x.safetensors", 5, EXAMPLE_T, 0, in[0], out[0]);
    example_file(&folder, "y.safetensors", 6, EXAMPLE_T - 1, 0, in[0], out[0]);
    temp_file(&folder, "text", "some text\n", 10);
    return folder;
}

static void test_sources(Test* t) {
    const struct { const char* words[12]; int64_t n_train, n_val, n_rows; int T, stride; RowOrder order; } cases[] = {
        {{"--token-file=%/a.txt"}, 100, 0, 24, 4, 4, ORDER_ROWS},
        {{"--token-file=%/a.txt", "--shuffle", "0"}, 100, 0, 24, 4, 4, ORDER_FILE},
        {{"--token-file=%/a.txt", "--packed-sequences", "0"}, 100, 0, 20, 4, 5, ORDER_ROWS},
        {{"--token-dir=%/dir", "--shuffle-shards", "1"}, 80, 0, 7 + 12, 4, 4, ORDER_SHARDS},
        {{"--token-dir=%/dir", "--shard-ext", ".txt", "--seq-len", "7"}, 80, 0, 4 + 7, 7, 7, ORDER_ROWS},
        {{"--token-file=%/a.txt", "--val-token-dir=%/dir"}, 100, 80, 24, 4, 4, ORDER_ROWS},
        {{"--token-file=%/a.txt", "--val-fraction=0.2"}, 80, 20, 19, 4, 4, ORDER_ROWS},
        {{"--token-file=%/a.txt", "--val=%/text"}, 100, 11, 24, 4, 4, ORDER_ROWS},
        {{"--token-file=%/a.txt", "--carry-state", "1", "--batch-size", "5"}, 100, 0, 20, 4, 4, ORDER_STREAMS},
        {{"--token-file=%/a.txt", "--doc-sep", "99"}, 100, 0, 24, 4, 4, ORDER_ROWS},
        {{"--train=%/x.safetensors"}, 30, 0, 5, 6, 6, ORDER_ROWS},
        {{"--train=%/x.safetensors", "--seq-len=6", "--val-fraction=0.4"}, 18, 12, 3, 6, 6, ORDER_ROWS},
        {{"--train=%/text", "--shuffle=0"}, 11, 0, 2, 4, 4, ORDER_FILE},
    };
    TempPath folder = more_folder();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        static MoreRun r;
        memset(&r, 0, sizeof r);
        memcpy(r.words, cases[i].words, sizeof r.words);
        memcpy(r.folder, folder.s, sizeof r.folder);
        run_more(&r);
        const DataLoader* l = &r.data.train_rows;
        check(t, r.data.train.n_tokens == cases[i].n_train && r.data.val.n_tokens == cases[i].n_val,
              "case %zu: %lld and %lld tokens", i, (long long)r.data.train.n_tokens, (long long)r.data.val.n_tokens);
        check(t,
              l->n_rows == cases[i].n_rows && l->T == cases[i].T && l->stride == cases[i].stride &&
                  l->order == cases[i].order,
              "case %zu: %lld rows of %d, stride %d, order %d", i, (long long)l->n_rows, l->T, l->stride,
              (int)l->order);
        data_close(&r.data);
    }
    temp_remove(&folder);
}

static void test_source_conflicts(Test* t) {
    const struct { const char *words[12], *expected; } cases[] = {
        {{"--token-file=%/a.txt", "--train=%/text"},
         "--token-file: expected one source of data, found --train too: give one of them"},
        {{"--token-dir=%/dir", "--token-file=%/a.txt"},
         "--token-dir: expected one source of data, found --token-file too"},
        {{"--train=%/text", "--val=%/text", "--val-token-dir=%/dir"},
         "--val-token-dir: expected one source of data, found --val too"},
        {{"--token-file=%/a.txt", "--carry-state", "1", "--shuffle", "1"},
         "--carry-state: needs rows in file order, found --shuffle"},
        {{"--token-file=%/a.txt", "--carry-state", "1", "--shuffle-shards"},
         "--carry-state: needs rows in file order, found --shuffle-shards"},
        {{"--token-file=%/a.txt", "--carry-state", "1", "--packed-sequences=0"},
         "--carry-state: needs rows that go on where the one before ended"},
        {{"--token-file=%/a.txt", "--shuffle-shards", "1", "--shuffle", "1"},
         "--shuffle-shards: expected one order, found --shuffle too"},
        {{"--train=%/x.safetensors", "--carry-state"}, "--carry-state: is for tokens, found examples in"},
        {{"--train=%/x.safetensors", "--packed-sequences=0"}, "--packed-sequences: is for tokens, found examples in"},
        {{"--train=%/x.safetensors", "--seq-len=5"}, "--seq-len: expected the 6 positions of the examples in"},
        {{"--train=%/x.safetensors", "--val=%/text"}, "text: expected examples as in"},
        {{"--train=%/text", "--val=%/x.safetensors"}, "x.safetensors: expected tokens as in"},
        {{"--train=%/x.safetensors", "--val=%/y.safetensors"}, "y.safetensors: expected examples of 6 positions as in"},
        {{"--token-dir=%/dir", "--shard-ext=a.b"},
         "--shard-ext: expected the end of a name, such as txt, found \"a.b\""},
        {{"--train=%/text:2", "--carry-state"}, "--train: expected paths without weights, found"},
        {{"--train=%/text:2", "--shuffle-shards"}, "text:2: --shuffle-shards takes each shard once"},
        {{"--train=%/text", "--val=%/text:2"}, "text:2: validation takes all of each source, once"},
        {{"--train=%/text,text"}, "text: expected a file, a folder or a pattern, found nothing of that name"},
        {{"--token-dir=%/dir", "--shard-ext="}, "--shard-ext: expected the end of a name"},
        {{"--token-file=%/a.txt", "--doc-sep=100"},
         "--doc-sep: expected documents that begin with token 100, found none in"},
        {{"--token-file=%/a.txt", "--carry-state", "--batch-size=25"},
         "a.txt: too short: 25 streams side by side need 25 rows of --seq-len 4, found 24"},
    };
    TempPath folder = more_folder();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        static MoreRun r;
        memset(&r, 0, sizeof r);
        memcpy(r.words, cases[i].words, sizeof r.words);
        memcpy(r.folder, folder.s, sizeof r.folder);
        check_exit(t, cases[i].expected, run_more, &r, 2, cases[i].expected);
    }
    temp_remove(&folder);
}

// restored from a checkpoint, a source gives way to one that is typed
static void test_source_of_resume(Test* t) {
    static MoreRun r;
    char* typed[] = {(char*)"test", (char*)"--token-dir=new", NULL};  // as argv ends
    json_t* settings = json_pack("{s:s}", "train", "old");
    for (int is_typed = 0; is_typed < 2; is_typed++) {
        int n = run_options(r.table, &r.o, "");
        n = data_options(r.table, n, &r.x);
        options_parse(r.table, n, 1 + is_typed, typed, "");
        options_from_json(r.table, n, settings);
        const Option* source = data_source_(r.table, n, OPTION_TRAINS);
        check(t, source && strcmp(source->name, is_typed ? "token-dir" : "train") == 0, "found source %s",
              source ? source->name : "none");
        options_free(r.table, n);
    }
    json_decref(settings);
}

// ---- shards that are not right ----

static int refused(const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    TokenShard shard;
    int token_bytes, vocab_size;
    unsigned char* exact = heap_copy(bytes, n_bytes);
    int accepted = tokens_parse_shard_(&shard, &token_bytes, &vocab_size, exact, n_bytes, error);
    free(exact);
    return !accepted;
}

static void test_broken_shards(Test* t) {
    const struct { int32_t magic, version, count; size_t n_bytes; const char* expected; } cases[] = {
        {20240521, 1, 10, 1044, "magic number 20240520 (GPT-2) or 20240801 (Llama 3), found 20240521"},
        {0x08d63401, 1, 10, 1044, "magic number 20240520 (GPT-2) or 20240801 (Llama 3), found 148255745"},
        {GPT2, 2, 10, 1044, "expected version 1 of token shards, found 2"},
        {GPT2, 7, 10, 1044, "expected version 1 of token shards, found 7"},
        {LLAMA3, 1, 10, 1064, "expected version 7 of token shards, found 1"},
        {GPT2, 1, -1, 1044, "expected a number of tokens below 2^31 at offset 8, found -1"},
        {GPT2, 1, INT32_MIN, 1044, "found -2147483648"},
        {GPT2, 1, 10, 1043, "expected 1044 bytes for the header's 10 tokens, found a file of 1043"},
        {GPT2, 1, 10, 1045, "expected 1044 bytes for the header's 10 tokens, found a file of 1045"},
        {GPT2, 1, 10, 1024, "expected 1044 bytes for the header's 10 tokens, found a file of 1024"},
        {GPT2, 1, INT32_MAX, 1044,
         "expected 4294968318 bytes for the header's 2147483647 tokens, found a file of 1044"},
        {LLAMA3, 7, INT32_MAX, 1044, "expected 8589935612 bytes for the header's 2147483647 tokens, found a file of"},
        {LLAMA3, 7, 10, 1044, "expected 1064 bytes for the header's 10 tokens, found a file of 1044"},
        {GPT2, 1, 10, 1023, "a header of 1024 bytes, found a file of 1023 bytes"},
        {GPT2, 1, 10, 4, "a header of 1024 bytes, found a file of 4 bytes"},
        {GPT2, 1, 10, 0, "a header of 1024 bytes, found a file of 0 bytes"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t header[300] = {cases[i].magic, cases[i].version, cases[i].count};
        ErrorText error = {""};
        check(t, refused((unsigned char*)header, cases[i].n_bytes, &error) && strstr(error.text, cases[i].expected),
              "case %zu: expected \"%s\", found \"%s\"", i, cases[i].expected, error.text);
    }
    const char* other[][2] = {
        {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "found a Git LFS pointer"},
        {"<!doctype html>\n<html lang=\"en\">", "found an HTML page"},
        {"<HTML>", "found an HTML page"},
        {"<?xml version=\"1.0\"?><Error><Code>AccessDenied", "found an XML page"},
        {"\x1f\x8b\x08", "found a gzip archive"},
    };
    for (size_t i = 0; i < sizeof other / sizeof other[0]; i++) {
        ErrorText error = {""};
        const unsigned char* bytes = (const unsigned char*)other[i][0];
        check(t, refused(bytes, strlen(other[i][0]), &error) && strstr(error.text, other[i][1]),
              "expected \"%s\", found \"%s\"", other[i][1], error.text);
    }
}

// cut anywhere: refused; one header byte changed: refused, or the entry is not used
static void test_damaged_shards(Test* t) {
    for (int kind = 0; kind < 2; kind++) {
        size_t n_bytes;
        ErrorText error;
        unsigned char* bytes = shard_bytes(&n_bytes, 0, kind ? LLAMA3 : GPT2, 20, 50257);
        check(t, !refused(bytes, n_bytes, &error), "the whole shard: %s", error.text);
        for (size_t n = 0; n < n_bytes; n++) { check(t, refused(bytes, n, &error), "accepted, cut to %zu bytes", n); }
        for (size_t at = 0; at < 1024; at++) {
            unsigned char kept = bytes[at];
            for (int value = 0; value < 256; value++) {
                bytes[at] = (unsigned char)value;
                int found = refused(bytes, n_bytes, &error), expected = at < 12 && value != kept;
                check(t, found == expected, "byte %zu = %d: %s", at, value, found ? error.text : "accepted");
            }
            bytes[at] = kept;
        }
        free(bytes);
    }
}

static void test_token_ids(Test* t) {
    int32_t shard[256 + 3] = {LLAMA3, 7, 3};
    ErrorText error = {""};
    shard[256 + 1] = INT_MAX - 1;
    check(t, !refused((unsigned char*)shard, sizeof shard, &error), "2^31 - 2 is a token: %s", error.text);
    shard[256 + 1] = INT_MAX;
    const char* want = "expected token ids below 2^31 - 1, found 2147483647 at offset 1028";
    check(t, refused((unsigned char*)shard, sizeof shard, &error) && strstr(error.text, want), "\"%s\"", error.text);
    shard[256 + 1] = 0;
    shard[256 + 2] = -1;
    want = "found 4294967295 at offset 1032";
    check(t, refused((unsigned char*)shard, sizeof shard, &error) && strstr(error.text, want), "\"%s\"", error.text);
}

// ---- text ----

// the tokens of what tokens_open makes of a path, as text: end of text is shown as |
static void check_text(Test* t, const char* path, const char* want, int n_documents) {
    Tokenizer bytes;
    TokenData d;
    tokenizer_bytes_init(&bytes);
    tokens_open(&d, path, &bytes);
    char* found = (char*)calloc((size_t)d.n_tokens + 1, 1);
    for (int64_t i = 0; i < d.n_tokens; i++) {
        uint32_t token = tokens_at_(d.text, 2, i);
        found[i] = token == 256 ? '|' : (char)token;
    }
    check(t, strcmp(found, want) == 0, "expected %s, found %s", want, found);
    check(t, d.n_documents == n_documents, "expected %d documents, found %lld", n_documents, (long long)d.n_documents);
    check(t, d.n_shards == 1 && d.token_bytes == 2, "%d shards of %d-byte tokens", d.n_shards, d.token_bytes);
    check(t, d.vocab_size_needed == 257, "vocabulary of %d", d.vocab_size_needed);
    free(found);
    tokens_close(&d);
    tokenizer_free(&bytes);
}

static void test_text(Test* t) {
    TempPath folder = temp_folder();
    TempPath file = temp_file(&folder, "input.txt", "To be, \xc3\xa4\n", 10);
    check_text(t, file.s, "|To be, \xc3\xa4\n", 1);
    temp_file(&folder, "zero.txt", "", 0);
    temp_file(&folder, "b.c", "b.c", 3);
    temp_file(&folder, "a/2.h", "2", 1);
    temp_file(&folder, "a/10.h", "10", 2);
    temp_file(&folder, "a/b/c/deep.txt", "deep", 4);
    temp_file(&folder, "a-b", "a-b", 3);  // '-' < '/' < 'b': names are compared, not paths
    temp_file(&folder, "B", "B", 1);
    temp_file(&folder, ".hidden", "no", 2);
    temp_file(&folder, ".git/config", "no", 2);
    temp_file(&folder, "build/out.txt", "no", 2);
    temp_file(&folder, "a/runs/log.txt", "no", 2);
    temp_file(&folder, "__pycache__/x.py", "no", 2);
    temp_file(&folder, "node_modules/x.js", "no", 2);
    temp_file(&folder, "builds/yes.txt", "yes", 3);
    temp_file(&folder, "c/build", "a file", 6);
    temp_file(&folder, "binary.o", "ELF\0no", 6);
    temp_file(&folder, "latin1.txt", "caf\xe9 no", 7);
    temp_file(&folder, "cut.txt", "no\xc3", 3);
    temp_file(&folder, "weights.bin", "\0\0", 2);
    temp_file(&folder, "rows.jsonl", "{\"text\": \"row\"}\n", 16);
    temp_file(&folder, "zero.jsonl", "", 0);
    temp_file(&folder, "pointer", "version https://git-lfs.github.com/spec/v1\n", 43);
    TempPath link = temp_path(&folder, "link.txt"), loop = temp_path(&folder, "a/loop");
    check(t, symlink(file.s, link.s) == 0 && symlink(folder.s, loop.s) == 0, "links: %s", strerror(errno));
    const char* want = "|B|10|2|deep|a-b|b.c|yes|a file|To be, \xc3\xa4\n|row";
    check_text(t, folder.s, want, 10);
    TempPath slashes = temp_path(&folder, "");
    check_text(t, slashes.s, want, 10);
    TempPath pattern = temp_path(&folder, "[a-b]*[bc]");  // a-b and b.c
    check_text(t, pattern.s, "|a-b|b.c", 2);
    TempPath through_link = temp_path(&folder, "link.txt");
    check_text(t, through_link.s, "|To be, \xc3\xa4\n", 1);  // named directly, a link is followed
    temp_remove(&folder);
}

// each line a document, in a folder too, whatever stands beside it
static void test_json_lines(Test* t) {
    const char text[] = "{\"text\": \"one\", \"id\": 1}\r\n\n"
                        "  {\"id\": [\"text\"], \"text\": \"t\\u00e4\\u0000o\\n\"}  \n"
                        "{\"text\": \"\"}\n{\"text\": \"\\ud83d\\ude00\"}";
    const unsigned char want[] = "|one|t\xc3\xa4\0o\n|\xf0\x9f\x98\x80";
    TempPath folder = temp_folder(), path = temp_file(&folder, "d/x.jsonl", text, strlen(text));
    TempPath inner = temp_path(&folder, "d");
    Tokenizer bytes;
    tokenizer_bytes_init(&bytes);
    for (int k = 0; k < 2; k++) {
        TokenData d;
        tokens_open(&d, k ? inner.s : path.s, &bytes);
        check(t, d.n_documents == 3 && d.n_tokens == sizeof want - 1, "%lld documents, %lld tokens",
              (long long)d.n_documents, (long long)d.n_tokens);
        for (int64_t i = 0; i < d.n_tokens && i < (int64_t)sizeof want - 1; i++) {
            const uint32_t token = tokens_at_(d.text, 2, i), expected = want[i] == '|' ? 256 : want[i];
            check(t, token == expected, "token %lld: %u", (long long)i, token);
        }
        tokens_close(&d);
    }
    tokenizer_free(&bytes);
    TempPath mixed = temp_path(&folder, "mixed");
    temp_file(&folder, "mixed/a.json", "[1]\n", 4);  // text, as ever
    temp_file(&folder, "mixed/x.jsonl", "{\"text\": \"one\"}\n{\"text\": \"two\"}\n", 32);
    temp_file(&folder, "mixed/y.txt", "b", 1);
    check_text(t, mixed.s, "|[1]\n|one|two|b", 4);
    const char marked[] = "\xef\xbb\xbf\n \n{\"text\": \"a\"}\n{\"text\": \"b\"}\n";
    TempPath capitals = temp_file(&folder, "MARKED.JSONL", marked, strlen(marked));
    check_text(t, capitals.s, "|a|b", 2);
    temp_remove(&folder);
}

// longer than a piece of encoding and than what is looked at to tell text from binary
static void test_long_text(Test* t) {
    enum { N = 3000001 };
    char* text = (char*)malloc_check(N, "text");
    for (int i = 0; i < N; i++) { text[i] = (char)('a' + test_token(0, i, 26)); }
    memcpy(text + 65535, "\xc3\xa4", 2);  // a character across the first 64 KiB
    text[70000] = '\xff';                 // after them, any byte
    TempPath folder = temp_folder(), path = temp_file(&folder, "long.txt", text, N);
    Tokenizer bytes;
    TokenData d;
    int64_t n_wrong = 0;
    tokenizer_bytes_init(&bytes);
    tokens_open(&d, path.s, &bytes);
    check(t, d.n_tokens == N + 1 && tokens_at_(d.text, 2, 0) == 256, "%lld tokens", (long long)d.n_tokens);
    for (int64_t i = 0; i < N; i++) { n_wrong += tokens_at_(d.text, 2, i + 1) != (unsigned char)text[i]; }
    check(t, n_wrong == 0, "%lld bytes are wrong", (long long)n_wrong);
    tokens_close(&d);
    tokenizer_free(&bytes);
    temp_remove(&folder);
    free(text);
}

// a tokenizer whose ids are large: byte b is token large_first + b
static int large_first;
static void large_encode(TokenizerWork* w, const char* text, size_t n_bytes, int choices) {
    tokenizer_bytes_encode_(w, text, n_bytes, choices);
    for (size_t i = 0; i < n_bytes; i++) { w->tokens[i] += large_first; }
}

static void open_without_eot(void* path) {
    Tokenizer k;
    TokenData d;
    tokenizer_bytes_init(&k);
    k.eot = -1;
    tokens_open(&d, (const char*)path, &k);
}

static void test_large_vocabulary(Test* t) {
    const int sizes[] = {65536, 65537, 151936, INT_MAX};
    TempPath folder = temp_folder(), path = temp_file(&folder, "abc.txt", "abc", 3);
    for (int i = 0; i < 4; i++) {
        Tokenizer k;
        TokenData d;
        DataLoader l;
        int inputs[3], targets[3];
        tokenizer_bytes_init(&k);
        k.n_tokens = sizes[i];
        k.eot = sizes[i] - 1;
        k.encode = large_encode;
        large_first = sizes[i] - 300;
        tokens_open(&d, path.s, &k);
        check(t, d.token_bytes == (i == 0 ? 2 : 4), "%d tokens: %d bytes each", sizes[i], d.token_bytes);
        check(t, d.vocab_size_needed == sizes[i], "%d tokens: %d needed", sizes[i], d.vocab_size_needed);
        check(t, tokens_memory(&d) == 4.0 * d.token_bytes, "%g bytes", tokens_memory(&d));
        dataloader_init(&l, &d, 3, ORDER_FILE, 0);
        dataloader_row(&l, 0, inputs, targets);
        check(t, inputs[0] == k.eot && inputs[1] == k.n_tokens - 300 + 'a' && targets[2] == k.n_tokens - 300 + 'c',
              "%d tokens: found %d %d .. %d", sizes[i], inputs[0], inputs[1], targets[2]);
        tokens_close(&d);
        k.n_tokens = 257;  // what tokenizer_free knows
        tokenizer_free(&k);
    }
    check_exit(t, "no end of text", open_without_eot, path.s, 2,
               "abc.txt: text needs a tokenizer with an end of text, which stands before each document: this one "
               "(bytes) has");
    temp_remove(&folder);
}

// what one .gitignore in folder /f says of a path; a path that ends in / is a folder
static void test_gitignore(Test* t) {
    const struct { const char *rules, *path; int ignored; } cases[] = {
        {"", "/f/a", 0}, {"\n\n", "/f/a", 0}, {"# a\n#a", "/f/a", 0}, {"#a", "/f/#a", 0}, {"\\#a", "/f/#a", 1},
        {"a", "/f/a", 1}, {"a", "/f/x/y/a", 1}, {"a", "/f/ab", 0}, {"a", "/f/a/", 1}, {"a  \r\n", "/f/a", 1},
        {"a\\ ", "/f/a ", 1}, {"*.log", "/f/x/err.log", 1}, {"*.log", "/f/x.log/", 1}, {"*.log", "/f/x.logs", 0},
        {"[a-c]?", "/f/b1", 1}, {"[a-c]?", "/f/d1", 0}, {"a/", "/f/a", 0}, {"a/", "/f/a/", 1}, {"a/", "/f/x/a/", 1},
        {"/a", "/f/a", 1}, {"/a", "/f/x/a", 0}, {"/*.c", "/f/x.c", 1}, {"/*.c", "/f/x/x.c", 0}, {"x/a", "/f/x/a", 1},
        {"x/a", "/f/y/x/a", 0}, {"x/*.c", "/f/x/a.c", 1}, {"x/*.c", "/f/x/y/a.c", 0}, {"/x/y/", "/f/x/y/", 1},
        {"/x/y/", "/f/x/y", 0}, {"**/a", "/f/x/y/a", 1}, {"**/a", "/f/a", 1}, {"x/**", "/f/x/a", 1}, {"x/**", "/f/x/",
                                                                                                      0},
        {"*\n!a", "/f/a", 0}, {"*\n!a", "/f/b", 1}, {"!a\n*", "/f/a", 1}, {"*.c\n!/keep.c\n", "/f/keep.c", 0},
        {"*.c\n!/keep.c\n", "/f/x/keep.c", 1}, {"\\!a", "/f/!a", 1}, {"/", "/f/a", 0}, {"!", "/f/a", 0}, {" ", "/f/a",
                                                                                                          0},
        {"\\", "/f/a", 0}, {"*a*a*a*a*a*a*a*a*a*a*a*a*b", "/f/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        IgnoreFile f;
        char path[64];
        size_t n = strlen(cases[i].rules), n_path = strlen(cases[i].path);
        int is_folder = cases[i].path[n_path - 1] == '/';
        memset(&f, 0, sizeof f);
        f.n_folder = 2;
        memcpy(path, cases[i].path, n_path + 1);
        path[n_path - (size_t)is_folder] = '\0';
        unsigned char* rules = heap_copy(cases[i].rules, n);
        ignore_parse_(&f, rules, n);
        check(t, ignore_says_(&f, path, is_folder) == cases[i].ignored, "case %zu: \"%s\" and %s: expected %s", i,
              cases[i].rules, cases[i].path, cases[i].ignored ? "ignored" : "taken");
        ignore_free_(&f);
        free(rules);
    }
}

static void test_ignored_files(Test* t) {
    TempPath folder = temp_folder();
    const char top[] = "# what is made\n*.log\nout/\n/only_here\n!keep.log\n", below[] = "!*.log\nsecret\n";
    temp_file(&folder, ".gitignore", top, sizeof top - 1);
    temp_file(&folder, "a.txt", "a", 1);
    temp_file(&folder, "b.log", "no", 2);
    temp_file(&folder, "keep.log", "k", 1);
    temp_file(&folder, "only_here", "no", 2);
    temp_file(&folder, "out/x.txt", "no", 2);
    temp_file(&folder, "sub/.gitignore", below, sizeof below - 1);
    temp_file(&folder, "sub/again.log", "l", 1);
    temp_file(&folder, "sub/deep/secret", "no", 2);
    temp_file(&folder, "sub/only_here", "o", 1);
    temp_file(&folder, "sub/out", "f", 1);
    temp_file(&folder, "zsub/.gitignore/x", "no", 2);  // a folder of that name is only hidden
    temp_file(&folder, "zsub/z", "z", 1);
    check_text(t, folder.s, "|a|k|l|o|f|z", 6);
    check_text(t, temp_path(&folder, "sub").s, "|l|o|f", 3);
    check_text(t, temp_path(&folder, "b.log").s, "|no", 1);  // named directly
    temp_remove(&folder);
}

static void test_utf8(Test* t) {
    const struct { const char* bytes; int length; } cases[] = {
        {"a", 1}, {"\x7f", 1}, {"\x80", 0}, {"\xbf", 0}, {"\xc0\x80", 0}, {"\xc1\xbf", 0}, {"\xff", 0},
        {"\xc2\x80", 2}, {"\xdf\xbf", 2}, {"\xe0\x9f\xbf", 0}, {"\xe0\xa0\x80", 3}, {"\xed\x9f\xbf", 3},
        {"\xed\xa0\x80", 0}, {"\xef\xbf\xbf", 3}, {"\xf0\x8f\xbf\xbf", 0}, {"\xf0\x90\x80\x80", 4},
        {"\xf4\x8f\xbf\xbf", 4}, {"\xf4\x90\x80\x80", 0}, {"\xf5\x80\x80\x80", 0}, {"\xc3(", 0},
        {"\xc3", -1}, {"\xe2\x82", -1}, {"\xf0\x9f\x98", -1}, {"\xe2\x28\xa1", 0}, {"\xe2\x82\x28", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t code;
        int cut, length = utf8_decode((const unsigned char*)cases[i].bytes, strlen(cases[i].bytes), &code, &cut);
        int found = length > 0 ? length : cut ? -1 : 0;
        check(t, found == cases[i].length, "case %zu: expected %d, found %d", i, cases[i].length, found);
    }
}

// ---- what stops a run, with its line ----

typedef struct {
    const char* path;
    int T;        // 0: stop after opening
    int changed;  // overwrite the token ids after opening
} Run;

static void run_loader(void* arg) {
    const Run* run = (const Run*)arg;
    Tokenizer bytes;
    TokenData d;
    DataLoader l;
    int inputs[64], targets[64];
    tokenizer_bytes_init(&bytes);
    tokens_open(&d, run->path, &bytes);
    if (run->T == 0) { return; }
    dataloader_init(&l, &d, run->T, ORDER_ROWS, 1);
    if (run->changed) {
        FILE* file = fopen(run->path, "r+b");
        fseek(file, 1024, SEEK_SET);
        for (int i = 0; i < 40; i++) { fputc(0xff, file); }
        fclose(file);
        dataloader_row(&l, 0, inputs, targets);
    }
}

static void check_stop(Test* t, const char* path, int T, int status, const char* line) {
    Run run = {path, T, status == 1};
    check_exit(t, line, run_loader, &run, status, line);
}

// a file given as --train
static const struct {
    const char *name, *content;
    size_t n_bytes;
    const char* expected;
} unusable[] = {
    {"0.txt", "", 0, "0.txt: expected text, found an empty file"},
    {"nul.txt", "ab\0", 3, "nul.txt: expected UTF-8 text, found byte 0x00 at offset 2"},
    {"latin.txt", "\xe9t\xe9", 3, "found byte 0xe9 at offset 0: binary, or text in another encoding (convert"},
    {"cut.txt", "ab\xc3", 3, "found byte 0xc3 at offset 2"},
    {"lfs.txt", "version https://git-lfs.github.com/spec/v1\n", 43, "lfs.txt: expected text, found a Git LFS pointer"},
    {"chat.jsonl", "{\"messages\": [], \"n\": 1}\n{}\n", 28,
     "chat.jsonl:1: expected an object with the key \"text\", found \"messages\", \"n\""},
    {"empty.jsonl", "{\"text\": \"a\"}\n\n{}\n", 18,
     "empty.jsonl:3: expected an object with the key \"text\", found an empty one"},
    {"list.jsonl", "{\"text\": \"a\"}\n[1]\n", 18,
     "list.jsonl:2: expected a JSON object such as {\"text\": \"...\"}, found a list"},
    {"begins.jsonl", "[\n{\"text\": \"a\"}\n]\n", 18,
     "begins.jsonl:1: expected a JSON object such as {\"text\": \"...\"}, found a list: JSON Lines have an object on"},
    {"words.jsonl", "To be,\n", 7, "words.jsonl:1: expected a JSON object such as {\"text\": \"...\"}: '[' or '{' expected"},
    {"value.jsonl", "null\n", 5, "value.jsonl:1: expected a JSON object such as {\"text\": \"...\"}"},
    {"TEXT.JSONL", "\xef\xbb\xbf\n\nplain\n", 11, "TEXT.JSONL:3: expected a JSON object such as {\"text\": \"...\"}"},
    {"twice.jsonl", "{\"text\": \"a\", \"text\": \"b\"}\n", 26,
     "twice.jsonl:1: expected a JSON object such as {\"text\": \"...\"}: duplicate object key near '\"text\"'"},
    {"number.jsonl", "{\"text\": 1}\n", 12, "number.jsonl:1: expected a text as \"text\", found another value"},
    {"cut.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b", 25,
     "cut.jsonl:2: expected a JSON object such as {\"text\": \"...\"}: premature end of input"},
    {"half.jsonl", "{\"text\": \"\\ud800\"}\n", 19, "half.jsonl:1: expected a JSON object such as"},
    {"none.jsonl", "{\"text\": \"\"}\n", 13, "none.jsonl: expected text or token shards, found 1 file, all empty or"},
    {"page.bin", "<!DOCTYPE html>", 15, "page.bin: expected a token shard, found an HTML page"},
    {"text.bin", "just text", 9, "text.bin: expected a token shard, a header of 1024 bytes, found a file of 9 bytes"},
    {"short.txt", "12345678", 8,
     "short.txt: too short: a row of --seq-len 9 needs 10 tokens in one piece, the longest piece has 9: give more text "
     "or a smaller --seq-len"},
};

static void test_stops(Test* t) {
    TempPath folder = temp_folder(), nothing = temp_path(&folder, "none_*.bin"), empty = temp_path(&folder, "empty/x");
    *strrchr(empty.s, '/') = '\0';
    for (size_t i = 0; i < sizeof unusable / sizeof unusable[0]; i++) {
        TempPath path = temp_file(&folder, unusable[i].name, unusable[i].content, unusable[i].n_bytes);
        check_stop(t, path.s, 9, 2, unusable[i].expected);
    }
    check_stop(t, nothing.s, 0, 2, "none_*.bin: expected a file, a folder or a pattern, found nothing of that name");
    check_stop(t, "", 0, 2, ": expected a file, a folder or a pattern, found nothing of that name");
    check_stop(t, empty.s, 0, 2, "/empty: expected text or token shards, found a folder without a file that counts");
    check_stop(t, "/dev/zero", 0, 2, "/dev/zero: expected a file, found a pipe or device");
    TempPath shard = shard_file(&folder, "gpt2.bin", 0, GPT2, 20, 50000);
    check_stop(t, shard.s, 20, 2, "gpt2.bin: too short: a row of --seq-len 20 needs 21 tokens in one piece");
    check_stop(t, shard.s, 19, 1, "gpt2.bin: changed while in use: token 65535 after a check that found ids below");
    TempPath no_tokens = shard_file(&folder, "no_tokens.bin", 0, GPT2, 0, 1);
    check_stop(t, no_tokens.s, 1, 2, "a row of --seq-len 1 needs 2 tokens in one piece, the longest piece has 0");
    temp_remove(&folder);
}

static void test_mixed(Test* t) {
    TempPath folder = temp_folder();
    shard_file(&folder, "kinds/a.bin", 0, GPT2, 20, 50000);
    shard_file(&folder, "kinds/b.bin", 0, LLAMA3, 20, 100000);
    shard_file(&folder, "both/a", 0, GPT2, 20, 50000);  // a shard by its first bytes
    temp_file(&folder, "both/b.txt", "text", 4);
    shard_file(&folder, "both/c.bin", 0, GPT2, 20, 50000);
    temp_file(&folder, "folders/sub/a.txt", "text", 4);
    check_stop(t, temp_path(&folder, "kinds//").s, 0, 2, "kinds/b.bin: expected 2-byte tokens as in");
    check_stop(t, temp_path(&folder, "both/*").s, 0, 2, "b.txt: expected a token shard like the files before, found");
    check_stop(t, temp_path(&folder, "both/[bc]*").s, 0, 2,
               "c.bin: expected text like the files before, found a token");
    check_stop(t, temp_path(&folder, "folders/*").s, 0, 2, "sub: expected a file, found a folder");
    check_text(t, temp_path(&folder, "both").s, "|text", 1);  // in a folder, binary files are passed over
    temp_remove(&folder);
}

static void check_vocab_of(void* path) {
    TokenData d;
    tokens_open(&d, (const char*)path, NULL);
    tokens_check_vocab(&d, 50257, "the model");
    tokens_check_vocab(&d, 257, "--tokenizer bytes");
}

static void split_badly(void* fraction) {
    TokenData d, val;
    memset(&d, 0, sizeof d);
    tokens_split(&d, &val, *(float*)fraction);
}

static void test_vocab(Test* t) {
    TempPath folder = temp_folder();
    uint16_t shard[512 + 4] = {0};
    int32_t header[3] = {GPT2, 1, 4};
    float one = 1.0f, negative = -0.1f, nan = NAN;
    memcpy(shard, header, sizeof header);
    shard[512 + 1] = 256;
    shard[512 + 2] = 50256;
    TempPath path = temp_file(&folder, "x.bin", shard, sizeof shard);
    TokenData d;
    tokens_open(&d, path.s, NULL);
    check(t, d.vocab_size_needed == 50257, "expected 50257, found %d", d.vocab_size_needed);
    tokens_close(&d);
    check_exit(t, "vocabulary", check_vocab_of, path.s, 2,
               "x.bin: expected token ids below 257, the vocabulary of --tokenizer bytes, found 50256 at token 2");
    check_exit(t, "1", split_badly, &one, 2, "--val-fraction: expected a number from 0 to below 1, found 1");
    check_exit(t, "-0.1", split_badly, &negative, 2, "--val-fraction: expected a number from 0 to below 1, found -0.1");
    check_exit(t, "NaN", split_badly, &nan, 2, "--val-fraction: expected a number from 0 to below 1, found nan");
    temp_remove(&folder);
}

// ---- tokenizer ----

static void test_byte_tokenizer(Test* t) {
    Tokenizer k;
    char text[300];
    int *tokens, n_bytes;
    tokenizer_bytes_init(&k);
    for (int i = 0; i < 300; i++) { text[i] = (char)(i * 7); }  // every byte, NUL too
    check(t, k.n_tokens == 257 && k.eot == 256 && strcmp(k.kind, "bytes") == 0, "%d tokens", k.n_tokens);
    check(t, tokenizer_encode(&k, text, 300, &tokens) == 300, "one token for each byte");
    for (int i = 0; i < 300; i++) {
        const char* bytes = tokenizer_bytes_of(&k, tokens[i], &n_bytes);
        check(t, tokens[i] == (unsigned char)text[i] && n_bytes == 1 && bytes[0] == text[i], "byte %d", i);
    }
    free(tokens);
    check(t, tokenizer_encode(&k, "", 0, &tokens) == 0, "no text, no tokens");
    free(tokens);
    const int others[] = {256, 257, -1, INT_MAX, INT_MIN};
    for (int i = 0; i < 5; i++) {
        tokenizer_bytes_of(&k, others[i], &n_bytes);
        check(t, n_bytes == 0, "token %d has %d bytes", others[i], n_bytes);
    }
    tokenizer_free(&k);
}

// "a", " the", end of text, "\x1b[2J", "\x07" as gpt2_tokenizer.bin
static const unsigned char small_table[] = "\1a\4 the\15<|endoftext|>\4\x1b[2J\1\7";

static unsigned char* tokenizer_file(size_t* n_bytes, int version, int n_tokens, int eot) {
    int32_t header[256] = {20240328, version, n_tokens, eot};
    *n_bytes = 1024 + sizeof small_table - 1;
    unsigned char* bytes = (unsigned char*)malloc_check(*n_bytes, "tokenizer of a test");
    memcpy(bytes, header, 1024);
    memcpy(bytes + 1024, small_table, sizeof small_table - 1);
    return bytes;
}

static void print_token(const Tokenizer* k, int id, FILE* out) {
    int n_bytes;
    const char* bytes = tokenizer_bytes_of(k, id, &n_bytes);
    text_print_safe(bytes, (size_t)n_bytes, out);
}

static void encode_with_bin(void* path) {
    Tokenizer k;
    int* tokens;
    tokenizer_open(&k, (const char*)path);
    tokenizer_encode(&k, "a", 1, &tokens);
}

static void test_tokenizer_bin(Test* t) {
    Tokenizer k;
    size_t n_file;
    int n_bytes;
    char printed[64] = "";
    unsigned char* file = tokenizer_file(&n_file, 2, 5, 2);
    TempPath folder = temp_folder(), path = temp_file(&folder, "gpt2_tokenizer.bin", file, n_file);
    free(file);
    tokenizer_open(&k, path.s);
    check(t, k.n_tokens == 5 && k.eot == 2, "%d tokens, end of text %d", k.n_tokens, k.eot);
    check(t, memcmp(tokenizer_bytes_of(&k, 1, &n_bytes), " the", 4) == 0 && n_bytes == 4, "token 1");
    tokenizer_bytes_of(&k, 2, &n_bytes);
    check(t, n_bytes == 13, "end of text has %d bytes", n_bytes);
    tokenizer_bytes_of(&k, 5, &n_bytes);
    check(t, n_bytes == 0, "there is no token 5");
    FILE* out = fmemopen(printed, sizeof printed, "w");
    for (int id = -1; id < 6; id++) { print_token(&k, id, out); }
    fclose(out);
    check(t, strcmp(printed, "a the<|endoftext|>[2J") == 0, "printed \"%s\"", printed);  // neither bell nor escape
    tokenizer_free(&k);
    check_exit(t, "encode", encode_with_bin, path.s, 2,
               "--tokenizer: expected bytes or a tokenizer.json to encode text, found llm.c's gpt2_tokenizer.bin");
    temp_remove(&folder);
}

static void test_print_safe(Test* t) {
    Tokenizer k;
    char printed[300] = "", want[300] = "\t\n\v\f\r";
    tokenizer_bytes_init(&k);
    for (int c = ' '; c <= 255; c++) {
        if (c != 127) { want[strlen(want)] = (char)c; }
    }
    FILE* out = fmemopen(printed, sizeof printed, "w");
    for (int id = 0; id <= 256; id++) { print_token(&k, id, out); }
    fclose(out);
    check(t, strcmp(printed, want) == 0, "printed \"%s\"", printed);
    tokenizer_free(&k);
}

static int tokenizer_refused(const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    Tokenizer k;
    unsigned char* exact = heap_copy(bytes, n_bytes);
    int accepted = tokenizer_parse_bin_(&k, exact, n_bytes, error), n, total = 0;
    for (int i = 0; accepted && i < k.n_tokens; i++) {
        const char* token = tokenizer_bytes_of(&k, i, &n);
        total += n + token[n - 1];  // touch every token's end
    }
    if (accepted) { tokenizer_free(&k); }
    free(exact);
    return !accepted || total == INT_MIN;
}

static void test_broken_tokenizers(Test* t) {
    const struct { int at; int32_t value; const char* expected; } cases[] = {  // one header entry changed
        {0, 20240327, "magic number 20240328, found 20240327"},
        {1, 3, "expected tokenizer version 1 or 2, found 3"},
        {1, 1, "end of text is token 50256, expected 0..4"},
        {2, 0, "tokens in a file of 1052 bytes, found 0 in the header"},
        {2, -5, "found -5 in the header"},
        {2, INT32_MAX, "expected 1..14 tokens in a file of 1052 bytes, found 2147483647 in the header"},
        {2, 6, "token 5 of 6 at offset 1052: expected a length of 1..255, found the end of the file"},
        {2, 4, "2 bytes follow the last of 4 tokens, expected none"},
        {3, 5, "end of text is token 5, expected 0..4"},
        {3, -1, "end of text is token -1, expected 0..4"},
        {256, 0x04006101, "token 1 of 5 at offset 1026: expected a length of 1..255, found 0"},
        {256, 0x20ff6101, "token 1 at offset 1026: 255 bytes long, but only 25 follow: the file is cut short"},
    };
    size_t n_bytes;
    ErrorText error;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        unsigned char* bytes = tokenizer_file(&n_bytes, 2, 5, 2);
        memcpy(bytes + 4 * cases[i].at, &cases[i].value, 4);
        int as_expected = tokenizer_refused(bytes, n_bytes, &error) && strstr(error.text, cases[i].expected);
        check(t, as_expected, "case %zu: expected \"%s\", found \"%s\"", i, cases[i].expected, error.text);
        free(bytes);
    }
    unsigned char* bytes = tokenizer_file(&n_bytes, 2, 5, 2);
    for (size_t n = 0; n < n_bytes; n++) { check(t, tokenizer_refused(bytes, n, &error), "cut to %zu bytes", n); }
    for (size_t i = 0; i < n_bytes * 256; i++) {  // each byte changed to each other, watched by a sanitizer
        size_t at = i / 256;
        unsigned char kept = bytes[at];
        bytes[at] = (unsigned char)i;
        tokenizer_refused(bytes, n_bytes, &error);
        bytes[at] = kept;
    }
    tokenizer_refused((const unsigned char*)"<!doctype html>", 15, &error);
    check(t, strstr(error.text, "found an HTML page") != NULL, "an HTML page: \"%s\"", error.text);
    free(bytes);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"permutation", "visits each of n = 1..300 and larger n once, in every epoch", test_bijection},
        {"mean rank", "sends each index to the middle on average", test_mean_rank},
        {"all orders", "makes all 24 orders of 4 rows equally often", test_all_orders},
        {"mixing", "parts neighbours, and differs between epochs and keys", test_mixing},
        {"fixed order", "gives the order that checkpoints rely on", test_order_is_fixed},
        {"rows", "equal the tokens at their place in the files, to the last one", test_rows},
        {"shuffled rows", "come once in each epoch, as a function of key and index alone", test_shuffled_rows},
        {"split", "cuts a data set in two without losing or copying a token", test_split},
        {"checksum", "is XXH3 of the tokens, wherever shards are cut", test_checksum},
        {"order", "resumes at any index, and is the same for any number of ranks", test_ranks},
        {"far rows", "beyond 2^31 tokens and 2^34 bytes are the right ones", test_far_rows},
        {"shuffled shards", "come in another order in each epoch, their rows as they lie", test_shuffled_shards},
        {"separate rows", "share no token", test_separate_rows},
        {"streams", "are contiguous parts of the rows, side by side", test_streams},
        {"examples", "come as they are in their files, at any address and in any order", test_examples},
        {"example split", "is by whole examples; inputs and targets make the checksum", test_example_split},
        {"broken examples", "are refused, each with its own message", test_broken_examples},
        {"example stops", "status and one line for examples that cannot be used", test_example_stops},
        {"numbers", "are the ids that stand in a file or in a folder's files", test_numbers},
        {"long numbers", "of every width keep their value", test_long_numbers},
        {"number stops", "file, line and what was found", test_number_stops},
        {"sources", "give the tokens, rows and order that the options say", test_sources},
        {"source conflicts", "end in one line", test_source_conflicts},
        {"source of a resume", "is what is typed, else what the checkpoint knows", test_source_of_resume},
        {"mixture order", "is that of the Python reference, for every index by itself", test_mixture_order},
        {"concatenation", "of sources without weights has the rows of one source", test_concatenation},
        {"several paths", "are cut at commas and colons that stand in no name", test_path_list},
        {"several paths stop", "in one line when they cannot be meant", test_path_list_stops},
        {"several sources", "of text and shards keep their tokens, parts and sums", test_several_sources},
        {"prefetch", "asks for the pages of its rows, never beyond the mapping", test_prefetch},
        {"broken shards", "are refused, each with its own message", test_broken_shards},
        {"damaged shards", "are refused when cut anywhere or with another header", test_damaged_shards},
        {"token ids", "of 2^31 - 1 and more are refused", test_token_ids},
        {"text", "takes files in order of name and leaves out what is no text", test_text},
        {"JSON Lines", "are a document each, whatever else their objects hold", test_json_lines},
        {"long text", "is the same in pieces", test_long_text},
        {"large vocabulary", "keeps ids beyond 65535 whole, and small ones in two bytes", test_large_vocabulary},
        {"gitignore", "leaves out what git would, line by line", test_gitignore},
        {"ignored files", "are not in a folder's text", test_ignored_files},
        {"UTF-8", "is told from other bytes at every edge of the definition", test_utf8},
        {"stops", "status and one line for everything that cannot be used", test_stops},
        {"mixed data", "text and shards, or two kinds of shards, are refused", test_mixed},
        {"vocabulary", "is what the data needs, and too small a one is refused", test_vocab},
        {"byte tokenizer", "loses nothing", test_byte_tokenizer},
        {"tokenizer file", "decodes llm.c's tokenizer", test_tokenizer_bin},
        {"print safe", "keeps control characters from the terminal", test_print_safe},
        {"broken tokenizers", "are refused, each with its own message", test_broken_tokenizers},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
