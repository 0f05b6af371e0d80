// Shows what a file or folder is and what is in it, and compares two of them; `inspect --help` and doc/tools.md tell more.
// Build: make tools
#include "dev/tools/source.h"  // Source, source_open: what a path is and holds
#include "dev/tools/report.h"  // report_facts, report_table
#include "llmc/core/fp4.h"     // fp4_widen, fp8_widen, e8m0_widen
#include "llmc/test/test.h"    // float_ulps

static const char* const usage = "usage: inspect PATH [PATH2 ...] [--stats] [--json]";
static const char* const help =
    "Shows what is in a file or folder, told apart by its content, or how two of them\n"
    "differ:\n"
    "    a run, several         its checkpoints, each read and verified, and where\n"
    "                           training stands; a line for each run of a folder\n"
    "    a checkpoint           state, options, checksums, tensors\n"
    "    a Hugging Face folder  config and tensors, also of several shards; an\n"
    "                           adapter of PEFT's\n"
    "    a file                 .safetensors; llm.c's .bin (model, state, tokenizer,\n"
    "                           tokens, evaluation); tokenizer.json, metrics.jsonl,\n"
    "                           config.json\n"
    "Of two, the tensors of one name are compared, and config, state and options; a\n"
    "run stands for its newest checkpoint. Of adapters, two or more, also rank,\n"
    "targets and the size of A and B by kind of module.\n"
    "    --stats  smallest, largest, mean and standard deviation of every tensor, and\n"
    "             how many NaN and infinities; of fp8 and fp4 times their scales\n"
    "    --json   one JSON object with the same content\n"
    "Exit status: 0 sound, or equal tensors; 1 two that differ; 2 broken, or nothing\n"
    "that is known.\n";

// ---- 1. numbers in tensors ----

// an element as a double; exact but for 64-bit integers past 2^53
static double element(Dtype dtype, const unsigned char* from) {
    union {
        float f;
        double d;
        int8_t i8;
        int16_t i16;
        uint16_t u16;
        int32_t i32;
        uint32_t u32;
        int64_t i64;
        uint64_t u64;
    } x;
    memcpy(&x, from, dtype_size(dtype));
    switch (dtype) {
        case DTYPE_F32: return (double)x.f;
        case DTYPE_F64: return x.d;
        case DTYPE_F16: return (double)safetensors_f16_(x.u16);
        case DTYPE_BF16: return (double)float_from_bits((uint32_t)x.u16 << 16);
        case DTYPE_I8: return x.i8;
        case DTYPE_I16: return x.i16;
        case DTYPE_U16: return x.u16;
        case DTYPE_I32: return x.i32;
        case DTYPE_U32: return x.u32;
        case DTYPE_I64: return (double)x.i64;
        case DTYPE_U64: return (double)x.u64;
        case DTYPE_F8_E4M3: return (double)fp8_widen(*from);
        case DTYPE_F8_E8M0: return (double)e8m0_widen(*from);
        default: return from[0];  // bytes and truth values
    }
}

// other forms of FP8, FP4 without scales and complex numbers are compared as bytes
static int has_numbers(Dtype dtype) {
    if (dtype >= DTYPE_I16) { return dtype != DTYPE_C64; }
    return dtype == DTYPE_BOOL || dtype == DTYPE_U8 || dtype == DTYPE_I8 || dtype == DTYPE_F8_E4M3 ||
           dtype == DTYPE_F8_E8M0;
}

// the tensor's bytes as on disk; what has to be turned first is made in *owned, for the caller to free
static const unsigned char* item_bytes(const Source* s, const Item* item, unsigned char** owned) {
    *owned = NULL;
    if (!item->row) { return (const unsigned char*)item->t.data; }
    const Tensor* row = item->row;
    size_t width = dtype_size(item->t.dtype), rows = (size_t)row->disk_rows, columns = (size_t)row->columns;
    size_t first = (size_t)item->slice * tensor_slice_elements(row);
    for (const Tensor* t = s->table; t < row; t++) { first += tensor_elements(t); }
    const unsigned char* from = s->file.bytes + BIN_HEADER_BYTES + width * first;
    if (row->on_disk != TRANSPOSED) { return from; }
    *owned = (unsigned char*)malloc_check(item->t.n_bytes, "buffer of a tensor");
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < columns; c++) {
            memcpy(*owned + (c * rows + r) * width, from + (r * columns + c) * width, width);
        }
    }
    return *owned;
}

// smallest, largest, mean and standard deviation of the finite elements; how many are not finite
static void add_stats(json_t* entry, Dtype dtype, const unsigned char* bytes, size_t n) {
    double low = INFINITY, high = -INFINITY, sum = 0.0, squares = 0.0;
    json_int_t n_nan = 0, n_inf = 0;
    size_t width = dtype_size(dtype);
    for (size_t i = 0; i < n; i++) {
        double x = element(dtype, bytes + i * width);
        n_nan += isnan(x) != 0;
        n_inf += isinf(x) != 0;  // it may be -1 of -infinity
        if (!isfinite(x)) { continue; }
        low = x < low ? x : low;
        high = x > high ? x : high;
        sum += x;
    }
    double n_finite = (double)n - (double)(n_nan + n_inf), mean = sum / n_finite;
    for (size_t i = 0; i < n; i++) {
        double d = element(dtype, bytes + i * width) - mean;
        squares += isfinite(d) ? d * d : 0.0;
    }
    json_object_set_new(entry, "min", n_finite > 0 ? json_real(low) : json_null());
    json_object_set_new(entry, "max", n_finite > 0 ? json_real(high) : json_null());
    json_object_set_new(entry, "mean", n_finite > 0 ? json_real(mean) : json_null());
    json_object_set_new(entry, "std", n_finite > 0 ? json_real(sqrt(squares / n_finite)) : json_null());
    json_object_set_new(entry, "nan", json_integer(n_nan));
    json_object_set_new(entry, "inf", json_integer(n_inf));
}

static json_t* shape_of(const SafeTensor* t) {
    json_t* shape = json_array();
    for (int i = 0; i < t->n_dims; i++) { json_array_append_new(shape, json_integer((json_int_t)t->shape[i])); }
    return shape;
}

// {"name": its number among the items} of what is listed
static json_t* numbers_of_names(const Source* s) {
    json_t* numbers = json_object();
    for (int i = 0; i < s->n_items; i++) {
        if (s->items[i].is_listed) { json_object_set_new(numbers, s->items[i].t.name, json_integer(i)); }
    }
    return numbers;
}

// those of fp8, and of I8 that is two fp4 in a byte; NULL: there are none of the right shape
static const SafeTensor* scales_of(const Source* s, const json_t* numbers, const SafeTensor* t) {
    const json_t* number = NULL;
    const int is_fp4 = t->dtype == DTYPE_I8;
    if ((t->dtype != DTYPE_F8_E4M3 && !is_fp4) || t->n_dims < 2) { return NULL; }
    if (is_fp4 && t->shape[t->n_dims - 1] % (FP4_GROUP / 2) != 0) { return NULL; }
    for (int form = 0; form < SCALE_NAMES && !number; form++) {
        char name[2 * NAME_BYTES];
        number = json_object_get(numbers, scale_name(name, t->name, form));
    }
    if (!number) { return NULL; }
    const SafeTensor* scales = &s->items[json_integer_value(number)].t;
    int64_t shape[SAFETENSORS_MAX_DIMS];  // that scales have
    scales_shape_(shape, t, is_fp4 ? STORED_FP4 : STORED_FP8);
    const int fits = scales->n_dims == t->n_dims && memcmp(shape, scales->shape, sizeof shape[0] * (size_t)t->n_dims) == 0;
    return fits && has_numbers(scales->dtype) && (!is_fp4 || scales->dtype == DTYPE_F8_E8M0) ? scales : NULL;
}

// what share a scale, "128 x 128" or "fp4: 1 x 32"
static ShortText scaled_text(const SafeTensor* t, const SafeTensor* scales) {
    ShortText text = {""};
    if (scales && t->dtype == DTYPE_I8) { snprintf(text.s, sizeof text.s, "fp4: 1 x %d", FP4_GROUP); }
    else if (scales) { snprintf(text.s, sizeof text.s, "%d x %d", FP8_BLOCK, FP8_BLOCK); }
    return text;
}

// A tensor with scales as a product has it: t becomes one of floats, which the caller frees
static unsigned char* widen(SafeTensor* t, const SafeTensor* scales) {
    const int is_fp4 = t->dtype == DTYPE_I8, last = t->n_dims - 1;
    const uint8_t* bytes = (const uint8_t*)t->data;
    const size_t width = dtype_size(scales->dtype), block = is_fp4 ? FP4_GROUP : FP8_BLOCK;
    t->n *= is_fp4 ? 2 : 1;
    t->shape[last] *= is_fp4 ? 2 : 1;
    const size_t rows = (size_t)t->shape[last - 1], C = (size_t)t->shape[last], of_row = (C + block - 1) / block;
    const size_t of_column = is_fp4 ? rows : (rows + block - 1) / block;
    float* floats = (float*)malloc_check(sizeof(float) * t->n, "numbers of a tensor");
    for (size_t i = 0; i < t->n; i++) {
        const size_t c = i % C, row = i / C, r = row % rows;
        const size_t at = (row / rows * of_column + (is_fp4 ? r : r / block)) * of_row + c / block;
        const double scale = element(scales->dtype, (const unsigned char*)scales->data + width * at);
        floats[i] = (is_fp4 ? fp4_widen(fp4_code(bytes + row * C / 2, (int)c)) : fp8_widen(bytes[i])) * (float)scale;
    }
    t->dtype = DTYPE_F32;
    t->n_bytes = sizeof(float) * t->n;
    t->data = floats;
    return (unsigned char*)floats;
}

static void add_to(json_t* object, const char* key, json_int_t n) {
    json_object_set_new(object, key, json_integer(json_integer_value(json_object_get(object, key)) + n));
}

static void count_tensor(json_t* totals, const SafeTensor* t) {
    add_to(totals, "tensors", 1);
    add_to(totals, "elements", (json_int_t)t->n);
    add_to(totals, "bytes", (json_int_t)t->n_bytes);
}

// "tensors" and "totals" of the report; what is not listed only with --stats, and then alone
static void describe_tensors(Source* s, int stats) {
    json_t *rows = json_array(), *totals = json_object(), *by_dtype = json_object(), *numbers = numbers_of_names(s);
    int has_scaled = 0;
    for (int i = 0; i < s->n_items; i++) {
        const Item* item = &s->items[i];
        SafeTensor copy = item->t, *t = &copy;
        unsigned char* owned = NULL;
        if (!item->is_listed) { continue; }
        const SafeTensor* scales = scales_of(s, numbers, t);
        const ShortText scaled = scaled_text(t, scales);
        t->n *= scales && t->dtype == DTYPE_I8 ? 2 : 1;
        const char* dtype = dtype_name(t->dtype);
        json_t* row = json_pack("{s:s, s:s, s:o, s:I, s:I}", "name", t->name, "dtype", dtype, "shape", shape_of(t),
                                "elements", (json_int_t)t->n, "bytes", (json_int_t)t->n_bytes);
        if (json_object_get(facts_of(s), "shards")) { json_object_set_new(row, "file", json_string(item->file)); }
        if (*scaled.s) { json_object_set_new(row, "scaled", json_string(scaled.s)); }
        has_scaled |= *scaled.s != '\0';
        SafeTensor wide = item->t;
        if (stats && scales) { owned = widen(&wide, scales); }
        if (stats && has_numbers(wide.dtype)) {
            add_stats(row, wide.dtype, owned ? owned : item_bytes(s, item, &owned), wide.n);
        }
        free(owned);
        json_array_append_new(rows, row);
        if (!json_object_get(by_dtype, dtype)) { json_object_set_new(by_dtype, dtype, json_object()); }
        count_tensor(json_object_get(by_dtype, dtype), t);
        count_tensor(totals, t);
    }
    json_object_set_new(totals, "by_dtype", by_dtype);
    json_decref(numbers);
    if (json_array_size(rows) > 0) {
        json_object_set_new(totals, "scaled", json_boolean(has_scaled));
        json_object_set(s->report, "tensors", rows);
        json_object_set(s->report, "totals", totals);
    }
    json_decref(rows);
    json_decref(totals);
}

// ---- 2. two of them ----

typedef struct {
    size_t n_differ, first;
    int is_of_bytes;          // what differs are bytes: the rest is not known
    double max_abs, max_rel;  // a NaN against a number makes them NaN
    int64_t max_ulp;          // of F32 against F32
} Difference;

static int both_f32(const SafeTensor* a, const SafeTensor* b) { return a->dtype == DTYPE_F32 && b->dtype == DTYPE_F32; }

static void difference_add(Difference* d, size_t i, double a, double b, int64_t ulp) {
    double apart = fabs(a - b), larger = fabs(a) > fabs(b) ? fabs(a) : fabs(b);
    double relative = apart == 0.0 ? 0.0 : apart / larger;
    if (d->n_differ++ == 0) { d->first = i; }
    if (!(apart <= d->max_abs) && !isnan(d->max_abs)) { d->max_abs = apart; }
    if (!(relative <= d->max_rel) && !isnan(d->max_rel)) { d->max_rel = relative; }
    d->max_ulp = ulp > d->max_ulp ? ulp : d->max_ulp;
}

// Tensors of the same shape; of one dtype they are equal when their bytes are, of two when their values are.
static Difference compare_tensors(const SafeTensor* a, const unsigned char* bytes_a, const SafeTensor* b,
                                  const unsigned char* bytes_b) {
    Difference d = {0, 0, 0, 0.0, 0.0, 0};
    int same_dtype = a->dtype == b->dtype, numbers = has_numbers(a->dtype) && has_numbers(b->dtype);
    if (same_dtype && (a->n_bytes == 0 || memcmp(bytes_a, bytes_b, a->n_bytes) == 0)) { return d; }
    if (!numbers) {  // the bytes differ, or their meaning does
        d.n_differ = a->n;
        d.is_of_bytes = 1;
        return d;
    }
    size_t width_a = dtype_size(a->dtype), width_b = dtype_size(b->dtype);
    for (size_t i = 0; i < a->n; i++) {
        const unsigned char *at_a = bytes_a + i * width_a, *at_b = bytes_b + i * width_b;
        if (same_dtype && memcmp(at_a, at_b, width_a) == 0) { continue; }
        double x = element(a->dtype, at_a), y = element(b->dtype, at_b);
        int equal = !same_dtype && (x == y || (isnan(x) && isnan(y)));
        int has_ulp = both_f32(a, b) && !isnan(x) && !isnan(y);
        if (!equal) { difference_add(&d, i, x, y, has_ulp ? float_ulps((float)x, (float)y) : 0); }
    }
    return d;
}

// "(3, 5)" of the element with this number, in a tensor's shape
static json_t* index_of(const SafeTensor* t, size_t i) {
    json_t* index = json_array();
    for (int k = t->n_dims - 1; k >= 0; k--) {
        json_array_insert_new(index, 0, json_integer((json_int_t)(i % (size_t)t->shape[k])));
        i /= (size_t)t->shape[k];
    }
    return index;
}

// base models leave "transformer." out of their names
static const char* short_name(const char* name) { return strncmp(name, "transformer.", 12) == 0 ? name + 12 : name; }

// AdamW's, averages and what a trainer keeps of its own: only checkpoints have them
static int is_state(const Item* item) { return !item->is_listed && *item->file; }

// tokens, records, bytes: one after the other, so two of different lengths can be compared as far as both go
static int is_series(const Item* item) { return !item->is_listed && !*item->file; }

typedef struct {
    json_t *only_a, *only_b, *shapes, *differing, *settings;
    int n_both;
    double max_abs;
    int64_t max_ulp;
    const char* where;  // of max_abs
    int has_bytes;      // some differ of which bytes alone are known
    json_t *numbers_a, *numbers_b;  // numbers_of_names
} Comparison;

static void compare_items(Comparison* c, const Source* a, const Item* x, const Source* b, const Item* y) {
    SafeTensor copy_a = x->t, copy_b = y->t, *t = &copy_a, *u = &copy_b;
    const SafeTensor *scales_a = scales_of(a, c->numbers_a, t), *scales_b = scales_of(b, c->numbers_b, u);
    const int same_dtype = t->dtype == u->dtype, has_ulp = both_f32(t, u);
    json_t *shape_a = shape_of(t), *shape_b = shape_of(u);
    unsigned char *owned_a, *owned_b;
    const unsigned char *bytes_a = item_bytes(a, x, &owned_a), *bytes_b = item_bytes(b, y, &owned_b);
    const int is_same = same_dtype && t->n_bytes == u->n_bytes && memcmp(bytes_a, bytes_b, t->n_bytes) == 0;
    if (scales_a && !is_same) { bytes_a = owned_a = widen(t, scales_a); }
    if (scales_b && !is_same) { bytes_b = owned_b = widen(u, scales_b); }
    const size_t shape_bytes = sizeof(int64_t) * (size_t)t->n_dims;
    const int same_shape = t->n_dims == u->n_dims && memcmp(t->shape, u->shape, shape_bytes) == 0;
    if (!same_shape || !same_dtype) {
        json_t* row = json_pack("{s:s, s:s, s:O, s:s, s:O}", "name", t->name, "a_dtype", dtype_name(x->t.dtype),
                                "a_shape", shape_a, "b_dtype", dtype_name(y->t.dtype), "b_shape", shape_b);
        json_array_append_new(c->shapes, row);
    }
    json_decref(shape_a);
    json_decref(shape_b);
    Difference d = {0, 0, 0, 0.0, 0.0, 0};
    if (same_shape || is_series(x)) {
        t->n = u->n = t->n < u->n ? t->n : u->n;
        t->n_bytes = t->dtype == u->dtype && is_series(x) ? t->n * dtype_size(t->dtype) : t->n_bytes;
        d = compare_tensors(t, bytes_a, u, bytes_b);
    }
    free(owned_a);
    free(owned_b);
    if (d.n_differ == 0) { return; }
    json_t* row = json_pack("{s:s, s:I, s:I, s:o, s:o, s:o, s:o}", "name", t->name, "elements", (json_int_t)t->n, "differ",
                            (json_int_t)d.n_differ, "max_abs", d.is_of_bytes ? json_null() : report_number(d.max_abs),
                            "max_rel", d.is_of_bytes ? json_null() : report_number(d.max_rel), "max_ulp",
                            has_ulp ? json_integer(d.max_ulp) : json_null(), "first",
                            d.is_of_bytes ? json_null() : index_of(t, d.first));
    json_array_append_new(c->differing, row);
    c->has_bytes |= d.is_of_bytes;
    if (!d.is_of_bytes && !(d.max_abs <= c->max_abs) && !isnan(c->max_abs)) {
        c->max_abs = d.max_abs;
        c->where = t->name;
    }
    c->max_ulp = has_ulp && d.max_ulp > c->max_ulp ? d.max_ulp : c->max_ulp;
}

// What two JSON values say differently, members by their path "options.lr"; two kinds of file need not have the same
// members.
static void compare_json(json_t* rows, const char* name, const json_t* a, const json_t* b, int same_kind) {
    const char* key;
    json_t* value;
    if (!json_is_object(a) || !json_is_object(b)) {
        int missing = !a || !b, differ = missing ? same_kind : !json_equal((json_t*)a, (json_t*)b);
        if (differ) {
            json_array_append_new(rows, json_pack("{s:s, s:O?, s:O?}", "name", name, "a", (json_t*)a, "b", (json_t*)b));
        }
        return;
    }
    json_t* keys = json_copy((json_t*)a);
    json_object_update_missing(keys, (json_t*)b);
    json_object_foreach(keys, key, value) {
        char inner[512];
        snprintf(inner, sizeof inner, "%s.%s", name, key);
        compare_json(rows, inner, json_object_get(a, key), json_object_get(b, key), same_kind);
    }
    json_decref(keys);
}

static void compare(Comparison* c, const Source* a, const Source* b) {
    json_t* places = json_object();  // name -> number in b
    c->numbers_a = numbers_of_names(a);
    c->numbers_b = numbers_of_names(b);
    int same_kind = json_equal(json_object_get(a->report, "kind"), json_object_get(b->report, "kind"));
    for (int i = 0; i < b->n_items; i++) {
        if (!same_kind && is_state(&b->items[i])) { continue; }
        json_object_set_new(places, short_name(b->items[i].t.name), json_integer(i));
    }
    for (int i = 0; i < a->n_items; i++) {
        if (!same_kind && is_state(&a->items[i])) { continue; }
        const char* name = short_name(a->items[i].t.name);
        json_t* place = json_object_get(places, name);
        if (!place) {
            json_array_append_new(c->only_a, json_string(a->items[i].t.name));
            continue;
        }
        compare_items(c, a, &a->items[i], b, &b->items[json_integer_value(place)]);
        c->n_both++;
        json_object_del(places, name);
    }
    const char* name;
    json_t* place;
    json_object_foreach(places, name, place) {
        json_array_append_new(c->only_b, json_string(b->items[json_integer_value(place)].t.name));
    }
    json_decref(places);
    json_decref(c->numbers_a);
    json_decref(c->numbers_b);
    const char* const sections[] = {"config", "state", "options"};
    for (int i = 0; i < 3; i++) {
        const json_t *x = json_object_get(a->report, sections[i]), *y = json_object_get(b->report, sections[i]);
        if (x && y) { compare_json(c->settings, sections[i], x, y, same_kind); }
    }
}

// ---- 3. several adapters ----

enum { ADAPTERS_MAX = 16 };

static int is_adapter(const Source* s) { return json_object_get(json_object_get(s->report, "config"), "peft_type") != NULL; }

// "q_proj" of "...layers.3.self_attn.q_proj.lora_A.weight", "experts.base_layer" of "...mlp.experts.base_layer.lora_A.weight"
static int kind_of_module(char kind[64], const char* name, char* which) {
    const char *end = strstr(name, ".lora_"), *from = end;
    if (!end || strlen(end) != strlen(".lora_A.weight")) { return 0; }
    while (from > name && from[-1] != '.') { from--; }
    if (strncmp(from, "base_layer.", 11) == 0) {
        for (from--; from > name && from[-1] != '.'; from--) {}
    }
    *which = end[6];
    snprintf(kind, 64, "%.*s", (int)(end - from), from);
    return 1;
}

// the row of a kind of module and an adapter; kinds: {"q_proj": [of a, of b]}
static json_t* kind_row(json_t* kinds, const char* kind, int adapter, int n) {
    json_t* rows = json_object_get(kinds, kind);
    if (!rows) { json_object_set_new(kinds, kind, rows = json_array()); }
    for (int i = (int)json_array_size(rows); i < n; i++) {
        json_array_append_new(rows, json_pack("{s:s, s:s#, s:i, s:i, s:n, s:n}", "name", kind, "adapter",
                                              &"abcdefghijklmnop"[i], 1, "modules", 0, "parameters", 0, "norm_A", "norm_B"));
    }
    return json_array_get(rows, (size_t)adapter);
}

static void add_square(json_t* row, const char* key, double squares) {
    json_object_set_new(row, key, json_real(json_number_value(json_object_get(row, key)) + squares));
}

static void add_adapter(json_t* kinds, const Source* s, int adapter, int n) {
    for (int i = 0; i < s->n_items; i++) {
        const SafeTensor* t = &s->items[i].t;
        char kind[64], which;
        double squares = 0.0;
        if (!kind_of_module(kind, t->name, &which) || !has_numbers(t->dtype)) { continue; }
        json_t* row = kind_row(kinds, kind, adapter, n);
        for (size_t k = 0; k < t->n; k++) {
            const double x = element(t->dtype, (const unsigned char*)t->data + k * dtype_size(t->dtype));
            squares += x * x;
        }
        add_to(row, "modules", which == 'A');
        add_to(row, "parameters", (json_int_t)t->n);
        add_square(row, which == 'A' ? "norm_A" : "norm_B", squares);
    }
}

// rows of all kinds one after the other, without those that an adapter lacks; takes the reference
static json_t* kind_rows(json_t* kinds) {
    json_t *all = json_array(), *rows, *row;
    const char* kind;
    size_t i;
    json_object_foreach(kinds, kind, rows) {
        json_array_foreach(rows, i, row) {
            const char* const norms[] = {"norm_A", "norm_B"};
            for (int k = 0; k < 2; k++) {
                json_object_set_new(row, norms[k], report_number(sqrt(json_number_value(json_object_get(row, norms[k])))));
            }
            if (json_integer_value(json_object_get(row, "parameters")) > 0) { json_array_append(all, row); }
        }
    }
    json_decref(kinds);
    return all;
}

// {"adapters": what each is, "kinds": sizes by kind of module}
static json_t* describe_adapters(const Source* const* s, int n) {
    json_t *adapters = json_array(), *kinds = json_object();
    for (int i = 0; i < n; i++) {
        const json_t *config = json_object_get(s[i]->report, "config"), *totals = json_object_get(s[i]->report, "totals");
        json_t* row = json_pack("{s:s#, s:s, s:O?}", "adapter", &"abcdefghijklmnop"[i], 1, "path", s[i]->path, "parameters",
                                json_object_get(totals, "elements"));
        const char* const keys[] = {"r", "lora_alpha", "target_modules", "target_parameters"};
        for (int k = 0; k < 4; k++) { json_object_set(row, keys[k], json_object_get(config, keys[k])); }
        json_array_append_new(adapters, row);
        add_adapter(kinds, s[i], i, n);
    }
    return json_pack("{s:o, s:o}", "adapters", adapters, "kinds", kind_rows(kinds));
}

// ---- 4. printing ----

static void print_json(json_t* json) {
    int failed = json_dumpf(json, stdout, JSON_INDENT(2)) != 0 || printf("\n") < 0;
    if (failed) { fail_run("standard output: %s", strerror(errno)); }
}

static const char* text_of(const json_t* json, const char* key) { return json_string_value(json_object_get(json, key)); }

static void print_title(const char* before, const json_t* report) {
    char* path = report_text("", json_object_get(report, "path"));
    double n_bytes = (double)json_integer_value(json_object_get(report, "bytes"));
    printf("%s%s: %s, %s\n", before, path, text_of(report, "kind"), format_bytes(n_bytes).s);
    free(path);
}

// 148 tensors, 124,439,808 parameters, 474.70 MiB, all F32
static void print_totals(const json_t* totals) {
    const char *dtype, *comma = ":";
    json_t *of_dtype, *by_dtype = json_object_get(totals, "by_dtype");
    char* n = report_text("elements", json_object_get(totals, "elements"));
    const json_int_t n_tensors = json_integer_value(json_object_get(totals, "tensors"));
    printf("\n  %lld tensor%s, %s parameter%s, %s", (long long)n_tensors, n_tensors == 1 ? "" : "s", n,
           strcmp(n, "1") == 0 ? "" : "s", format_bytes((double)json_integer_value(json_object_get(totals, "bytes"))).s);
    json_object_foreach(by_dtype, dtype, of_dtype) {
        double n_bytes = (double)json_integer_value(json_object_get(of_dtype, "bytes"));
        if (json_object_size(by_dtype) == 1) { printf(", all %s", dtype); }
        else { printf("%s %s of %s", comma, format_bytes(n_bytes).s, dtype); }
        comma = ",";
    }
    printf("\n");
    free(n);
}

static void print_tensors(const json_t* report) {
    const json_t *rows = json_object_get(report, "tensors"), *first = json_array_get(rows, 0);
    ReportColumn columns[REPORT_COLUMNS_MAX] = {{"name", "tensor", 0}, {"dtype", "dtype", 0}, {"shape", "shape", 0},
                                                {"elements", "elements", 1}, {"bytes", "size", 1}};
    const ReportColumn stats[] = {{"min", "min", 1}, {"max", "max", 1}, {"mean", "mean", 1},
                                  {"std", "std", 1}, {"nan", "nan", 1}, {"inf", "inf", 1}};
    const ReportColumn file = {"file", "file", 0}, scaled = {"scaled", "scales", 0};
    const int has_scaled = json_is_true(json_object_get(json_object_get(report, "totals"), "scaled"));
    int with_stats = json_object_get(first, "min") != NULL;
    int n = with_stats ? 3 : 5;  // then the shape has to stand for the size
    for (int i = 0; i < 6 && with_stats; i++) { columns[n++] = stats[i]; }
    if (has_scaled) { columns[n++] = scaled; }
    if (json_object_get(first, "file")) { columns[n++] = file; }
    report_table(rows, columns, n);
    if (rows) { print_totals(json_object_get(report, "totals")); }
}

static void print_report(const json_t* report) {
    const char* const sections[] = {"config", "state", "options", "metadata"};
    const ReportColumn checkpoints[] = {{"name", "checkpoint", 0}, {"step", "step", 1}, {"bytes", "size", 1},
                                        {"state", "state", 0}, {"mark", "mark", 0}};
    const ReportColumn runs[] = {{"name", "run", 0}, {"last_step", "step", 1}, {"last_loss", "loss", 1},
                                 {"last_val_loss", "val loss", 1}, {"best_val_loss", "best", 1},
                                 {"checkpoint", "checkpoint", 0}};
    const ReportColumn files[] = {{"name", "file", 0}, {"bytes", "size", 1}};
    print_title("", report);
    report_facts(json_object_get(report, "facts"));
    for (int i = 0; i < 4; i++) {
        json_t* section = json_object_get(report, sections[i]);
        json_t* fact_of_it = section ? json_pack("{s:O}", sections[i], section) : NULL;
        if (section) { report_facts(fact_of_it); }
        json_decref(fact_of_it);
    }
    report_table(json_object_get(report, "checkpoints"), checkpoints, 5);
    report_table(json_object_get(report, "runs"), runs, 6);
    report_table(json_object_get(report, "files"), files, 2);
    print_tensors(report);
}

enum { NUMBERS_MAX = 8, DIGITS_MAX = 9 };  // of a name; of a number

// the numbers in names that are else the same: the smallest and largest at each place
typedef struct {
    int n, low[NUMBERS_MAX], high[NUMBERS_MAX];
} NumberRanges;

// is a part of a name, up to the next dot, a number?
static int is_number(const char* part, size_t n) {
    return n > 0 && n <= DIGITS_MAX && strspn(part, "0123456789") >= n;
}

// does `name` differ from `like` in numbers between dots alone? Then they widen the ranges
static int widen_ranges(NumberRanges* r, const char* name, const char* like) {
    NumberRanges wider = *r;
    for (int k = 0;;) {
        const size_t n = strcspn(name, "."), n_like = strcspn(like, ".");
        if (k < NUMBERS_MAX && is_number(name, n) && is_number(like, n_like)) {
            const int number = atoi(name), is_first = k == wider.n;
            wider.n += is_first;
            wider.low[k] = is_first || number < wider.low[k] ? number : wider.low[k];
            wider.high[k] = is_first || number > wider.high[k] ? number : wider.high[k];
            k++;
        } else if (n != n_like || memcmp(name, like, n) != 0) { return 0; }
        if (name[n] != like[n_like]) { return 0; }
        if (!name[n]) { break; }
        name += n + 1;
        like += n_like + 1;
    }
    *r = wider;
    return 1;
}

// "layers.{0..3}.w1" for the names that widened the ranges; on the heap
static char* ranges_text(const NumberRanges* r, const char* like) {
    char* text;
    size_t n_bytes;
    FILE* out = open_memstream(&text, &n_bytes);
    if (!out) { fail_run("names of tensors: no memory"); }
    for (int k = 0;;) {
        const size_t n = strcspn(like, ".");
        if (k >= r->n || !is_number(like, n)) { fprintf(out, "%.*s", (int)n, like); }
        else if (r->low[k] == r->high[k]) { fprintf(out, "%.*s", (int)n, like), k++; }
        else { fprintf(out, "{%d..%d}", r->low[k], r->high[k]), k++; }
        if (!like[n]) { break; }
        fputc('.', out);
        like += n + 1;
    }
    fclose(out);
    return text;
}

// a line for each name, one for all that differ in their numbers alone: a layer of experts has hundreds
static void print_only(const char* in, const json_t* names) {
    const size_t n = json_array_size(names);
    char* is_printed = (char*)memset(malloc_check(n + 1, "names"), 0, n + 1);
    for (size_t i = 0; i < n; i++) {
        const char* like = json_string_value(json_array_get(names, i));
        NumberRanges ranges = {0, {0}, {0}};
        int n_alike = 0;
        if (is_printed[i]) { continue; }
        for (size_t k = i; k < n; k++) {
            const char* name = json_string_value(json_array_get(names, k));
            if (is_printed[k] || !widen_ranges(&ranges, name, like)) { continue; }
            is_printed[k] = 1;
            n_alike++;
        }
        char* folded = ranges_text(&ranges, like);
        json_t* name = json_string(folded);
        char* text = report_text("", name);
        printf("  only in %s: %s", in, text);
        if (n_alike > 1) { printf(", %d of them", n_alike); }
        printf("\n");
        free(text);
        json_decref(name);
        free(folded);
    }
    free(is_printed);
}

// Settings that differ, as a table of texts: a number has all the digits that a float has, or two that differ could look
// the same; and what it means stands in its name.
static void print_settings(const json_t* settings) {
    const ReportColumn columns[] = {{"name", "setting", 0}, {"a", "a", 0}, {"b", "b", 0}};
    const char* const sides[] = {"a", "b"};
    json_t *rows = json_array(), *setting;
    size_t i;
    json_array_foreach(settings, i, setting) {
        json_t* row = json_pack("{s:O}", "name", json_object_get(setting, "name"));
        for (int k = 0; k < 2; k++) {
            const json_t* value = json_object_get(setting, sides[k]);
            char* text = report_text(text_of(setting, "name"), value);
            json_object_set_new(row, sides[k], json_is_real(value) ? json_sprintf("%.9g", json_real_value(value))
                                                                   : json_string(text));
            free(text);
        }
        json_array_append_new(rows, row);
    }
    report_table(rows, columns, 3);
    json_decref(rows);
}

static void print_adapters(const json_t* described) {
    const ReportColumn adapters[] = {{"path", "adapter", 0}, {"adapter", "", 0}, {"r", "rank", 1}, {"lora_alpha", "alpha", 1},
                                     {"parameters", "parameters", 1}, {"target_modules", "targets", 0},
                                     {"target_parameters", "target parameters", 0}};
    const ReportColumn kinds[] = {{"name", "module", 0}, {"adapter", "", 0}, {"modules", "of them", 1},
                                  {"parameters", "parameters", 1}, {"norm_A", "norm of A", 1}, {"norm_B", "norm of B", 1}};
    json_t *rows = json_deep_copy(json_object_get(described, "adapters")), *row;
    size_t i;
    json_array_foreach(rows, i, row) {  // all-linear may be a list of every layer's modules
        char* targets = report_text("", json_object_get(row, "target_modules"));
        json_object_set_new(row, "target_modules", json_string(format_text(targets).s));
        free(targets);
    }
    report_table(rows, adapters, 7);
    json_decref(rows);
    report_table(json_object_get(described, "kinds"), kinds, 6);
}

// which of two, how they differ, and last the line that sums it up; adapters: describe_adapters, or empty
static void print_comparison(const Comparison* c, const Source* a, const Source* b, const json_t* adapters) {
    const ReportColumn shapes[] = {{"name", "tensor", 0}, {"a_dtype", "a", 0}, {"a_shape", "shape", 0},
                                   {"b_dtype", "b", 0}, {"b_shape", "shape", 0}};
    const ReportColumn differing[] = {{"name", "tensor", 0}, {"differ", "differ", 1}, {"elements", "of", 1},
                                      {"max_abs", "max |a-b|", 1}, {"max_rel", "relative", 1}, {"max_ulp", "ulp", 1},
                                      {"first", "first at", 1}};
    print_title("a  ", a->report);
    print_title("b  ", b->report);
    print_only("a", c->only_a);
    print_only("b", c->only_b);
    print_settings(c->settings);
    report_table(c->shapes, shapes, 5);
    report_table(c->differing, differing, 7);
    if (c->has_bytes) { printf("\n  -: of numbers in such a type only bytes are compared\n"); }
    print_adapters(adapters);
    size_t n_shapes = json_array_size(c->shapes), n_differing = json_array_size(c->differing);
    size_t n_settings = json_array_size(c->settings);
    const char* kind = a->n_items > 0 && is_series(a->items) ? "series" : c->n_both == 1 ? "tensor" : "tensors";
    printf("\n  %d %s", c->n_both, kind);
    if (n_shapes > 0) { printf(", %zu of another shape or dtype", n_shapes); }
    if (n_differing > 0) { printf(", %zu differ%s", n_differing, n_differing == 1 ? "s" : ""); }
    else if (n_shapes == 0) { printf(c->n_both == 1 ? ", equal" : ", all equal"); }
    if (c->where) { printf(", max |a-b| %.2g in %s", c->max_abs, format_text(c->where).s); }
    if (c->max_ulp > 0) { printf(", %lld ulp", (long long)c->max_ulp); }
    if (n_settings > 0) { printf(", %zu setting%s", n_settings, n_settings == 1 ? " differs" : "s differ"); }
    printf("\n");
}

// ---- 5. main ----

static int inspect_one(const char* path, int stats, int as_json) {
    Source s;
    source_open(&s, path);
    describe_tensors(&s, stats);
    json_object_set_new(s.report, "problem", *s.problem ? json_string(s.problem) : json_null());
    if (as_json) { print_json(s.report); } else { print_report(s.report); }
    if (*s.problem) { fail_input("%s: %s", s.path, s.problem); }
    source_close(&s);
    return 0;
}

// a run stands for its newest good checkpoint
static void open_to_compare(Source* s, const char* path) {
    char folder[PATH_BYTES];
    source_open(s, checkpoint_find(folder, path) ? folder : path);
    if (*s->problem) { fail_input("%s: %s", s->path, s->problem); }
    if (json_object_get(s->report, "runs")) {
        fail_input("%s: expected a run, a checkpoint or a file to compare, found a folder of runs: name one of them (inspect "
                   "%s shows them)", s->path, s->path);
    }
}

static int inspect_two(const char* path_a, const char* path_b, int as_json) {
    Source a, b;
    Comparison c = {json_array(), json_array(), json_array(), json_array(), json_array(), 0, 0.0, 0, NULL, 0, NULL, NULL};
    open_to_compare(&a, path_a);
    open_to_compare(&b, path_b);
    compare(&c, &a, &b);
    json_t* parts[] = {c.only_a, c.only_b, c.shapes, c.differing, c.settings};
    int equal = 1;
    const Source* const both[] = {&a, &b};
    describe_tensors(&a, 0);
    describe_tensors(&b, 0);
    json_t* adapters = is_adapter(&a) && is_adapter(&b) ? describe_adapters(both, 2) : json_object();
    for (int i = 0; i < 4; i++) { equal = equal && json_array_size(parts[i]) == 0; }  // settings are said, no more
    if (as_json) {
        json_t* report = json_pack("{s:s, s:s, s:b, s:i, s:O, s:O, s:O, s:O, s:O}", "a", a.path, "b", b.path, "equal", equal,
                                   "in_both", c.n_both, "only_in_a", c.only_a, "only_in_b", c.only_b, "shapes", c.shapes,
                                   "settings", c.settings, "differing", c.differing);
        json_object_update(report, adapters);
        print_json(report);
        json_decref(report);
    } else {
        print_comparison(&c, &a, &b, adapters);
    }
    json_decref(adapters);
    for (int i = 0; i < 5; i++) { json_decref(parts[i]); }
    source_close(&a);
    source_close(&b);
    return !equal;
}

static int inspect_adapters(const char* const* paths, int n, int as_json) {
    Source* s = (Source*)malloc_check(sizeof *s * (size_t)n, "adapters");
    const Source* each[ADAPTERS_MAX];
    for (int i = 0; i < n; i++) {
        each[i] = &s[i];
        open_to_compare(&s[i], paths[i]);
        if (!is_adapter(&s[i])) { fail_input("%s: more than two paths are compared only where all are adapters", s[i].path); }
        describe_tensors(&s[i], 0);
    }
    json_t* described = describe_adapters(each, n);
    if (as_json) { print_json(described); } else { print_adapters(described); }
    json_decref(described);
    for (int i = 0; i < n; i++) { source_close(&s[i]); }
    free(s);
    return 0;
}

int main(int argc, char** argv) {
    standard_files_open();
    const char* paths[ADAPTERS_MAX];
    int n_paths = 0, stats = 0, as_json = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--stats") == 0) { stats = 1; }
        else if (strcmp(argv[i], "--json") == 0) { as_json = 1; }
        else if (strcmp(argv[i], "--help") == 0) { printf("%s\n%s", usage, help); return 0; }
        else if (strncmp(argv[i], "--", 2) == 0) { fail_input("%s: unknown option: %s", format_text(argv[i]).s, usage); }
        else if (n_paths == ADAPTERS_MAX) { fail_input("expected at most %d paths: %s", ADAPTERS_MAX, usage); }
        else { paths[n_paths++] = argv[i]; }
    }
    if (n_paths == 0) { fail_input("expected one path or two, or several adapters: %s", usage); }
    int status = n_paths == 1 ? inspect_one(paths[0], stats, as_json)
               : n_paths == 2 ? inspect_two(paths[0], paths[1], as_json) : inspect_adapters(paths, n_paths, as_json);
    if (fflush(stdout) != 0 || ferror(stdout)) { fail_run("standard output: %s", strerror(errno)); }
    return status;
}
