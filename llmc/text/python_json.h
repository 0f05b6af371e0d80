/*
JSON as Python writes it: json.dumps(value, ensure_ascii=False), which is what `tojson` means in a chat template.
    python_json   appends the text of a value
    {"a": [1, 2.5, true, null], "é": "\n"}       blanks behind , and :, keys in their order, no character escaped but
                                                " \ and those below U+0020: \b \f \n \r \t, others as \u001f
Numbers: integers as they are; a float has the fewest digits that read back as it, 0.1, and looks as Python's repr:
1.0, 0.0001, 1e-05, 1234567890123456.0, 1e+16.
Cost:   linear; a float is written up to 17 times.
Source: CPython 3.13, Lib/json/encoder.py, Python/pystrtod.c (format code 'r').
*/
#ifndef LLMC_PYTHON_JSON_H
#define LLMC_PYTHON_JSON_H
#include "unicode.h"  // ByteBuffer, buffer_append
#include <jansson.h>

static inline void python_json_string_(ByteBuffer* out, const char* s, size_t n) {
    static const char names[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    size_t plain = 0;  // where the characters begin that stand for themselves and are not written yet
    buffer_append_text(out, "\"");
    for (size_t i = 0; i < n; i++) {
        const unsigned char c = (unsigned char)s[i];
        char escape[8];
        const char* named = c ? strchr(names, c) : NULL;
        if (!named && c >= ' ') { continue; }
        if (named) { snprintf(escape, sizeof escape, "\\%c", letters[named - names]); }
        else { snprintf(escape, sizeof escape, "\\u%04x", c); }
        buffer_append(out, s + plain, i - plain);
        buffer_append_text(out, escape);
        plain = i + 1;
    }
    buffer_append(out, s + plain, n - plain);
    buffer_append_text(out, "\"");
}

// d.ddde-05 as digits with a point where Python puts one: everywhere from 1e-4 to below 1e16
static inline void python_json_real_(ByteBuffer* out, double x) {
    char shortest[40], digits[40], text[80];
    int n_digits = 0, exponent;
    for (int n = 0; n < 17; n++) {
        snprintf(shortest, sizeof shortest, "%.*e", n, x);
        if (strtod(shortest, NULL) == x) { break; }
    }
    char* e = strchr(shortest, 'e');
    exponent = atoi(e + 1);
    for (const char* c = shortest; c < e; c++) {
        if (*c >= '0' && *c <= '9') { digits[n_digits++] = *c; }
    }
    digits[n_digits] = '\0';
    if (signbit(x)) { buffer_append_text(out, "-"); }
    if (exponent < -4 || exponent >= 16) {
        snprintf(text, sizeof text, "%.1s%s%se%c%02d", digits, n_digits > 1 ? "." : "", digits + 1,
                 exponent < 0 ? '-' : '+', abs(exponent));
    } else if (exponent < 0) {
        snprintf(text, sizeof text, "0.%.*s%s", -exponent - 1, "000", digits);
    } else if (n_digits <= exponent + 1) {
        snprintf(text, sizeof text, "%s%.*s.0", digits, exponent + 1 - n_digits, "0000000000000000");
    } else {
        snprintf(text, sizeof text, "%.*s.%s", exponent + 1, digits, digits + exponent + 1);
    }
    buffer_append_text(out, text);
}

static inline void python_json(ByteBuffer* out, const json_t* value);

static inline void python_json_object_(ByteBuffer* out, const json_t* object) {
    const char* key;
    json_t* value;
    const char* between = "{";
    json_object_foreach((json_t*)object, key, value) {
        buffer_append_text(out, between);
        python_json_string_(out, key, strlen(key));
        buffer_append_text(out, ": ");
        python_json(out, value);
        between = ", ";
    }
    buffer_append_text(out, json_object_size(object) > 0 ? "}" : "{}");
}

static inline void python_json(ByteBuffer* out, const json_t* value) {
    char number[32];
    switch (json_typeof(value)) {
        case JSON_OBJECT: python_json_object_(out, value); break;
        case JSON_ARRAY:
            buffer_append_text(out, "[");
            for (size_t i = 0; i < json_array_size(value); i++) {
                if (i > 0) { buffer_append_text(out, ", "); }
                python_json(out, json_array_get(value, i));
            }
            buffer_append_text(out, "]");
            break;
        case JSON_STRING: python_json_string_(out, json_string_value(value), json_string_length(value)); break;
        case JSON_INTEGER:
            snprintf(number, sizeof number, "%lld", (long long)json_integer_value(value));
            buffer_append_text(out, number);
            break;
        case JSON_REAL: python_json_real_(out, json_real_value(value)); break;
        case JSON_TRUE: buffer_append_text(out, "true"); break;
        case JSON_FALSE: buffer_append_text(out, "false"); break;
        default: buffer_append_text(out, "null"); break;
    }
}
#endif  // LLMC_PYTHON_JSON_H
