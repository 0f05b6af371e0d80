/*
rope_theta_parse: the base of RoPE's frequencies in a config.json of Hugging Face's, 0 where it says none.
Errors: 0 with the reason: another kind of RoPE (YaRN, linear, dynamic), two bases that differ.
*/
#ifndef LLMC_ROPE_THETA_H
#define LLMC_ROPE_THETA_H
#include "../core/jsonfile.h"  // json_number, json_agrees, json_refuse_value

#define ROPE_THETA_LEAST 1.0
#define ROPE_THETA_MOST 1e12

// rope_theta stands at the top or, in later files, in rope_parameters, whose other keys belong to other kinds of RoPE
static inline int rope_theta_parse(double* theta, const json_t* json, const char* remedy, ErrorText* error) {
    const json_t* scaling = json_object_get(json, "rope_scaling");
    json_t* later = json_object_get(json, "rope_parameters");
    const char* key;
    json_t* value;
    double top = 0.0;
    if (scaling && !json_is_null(scaling)) {
        return error_set(error, "\"rope_scaling\": expected null; %s", remedy);
    }
    if (later && !json_is_null(later) && !json_is_object(later)) {
        return json_refuse_value(error, "rope_parameters", "an object or null", later);
    }
    if (!json_agrees(later, json_pack("{s:s, s:s}", "rope_type", "default", "type", "default"), error)) { return 0; }
    json_object_foreach(later, key, value) {
        if (!json_is_object(value)) { continue; }
        return json_refuse_value(error, "rope_parameters", "one set for all layers", later);
    }
    if (!json_number(&top, json, "rope_theta", ROPE_THETA_LEAST, ROPE_THETA_MOST, error)) { return 0; }
    *theta = top;
    if (!json_number(theta, later, "rope_theta", ROPE_THETA_LEAST, ROPE_THETA_MOST, error)) { return 0; }
    return top == 0.0 || *theta == top ||
           error_set(error, "\"rope_theta\" %.9g: expected %.9g, as in \"rope_parameters\"", top, *theta);
}
#endif  // LLMC_ROPE_THETA_H
