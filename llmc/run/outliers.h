/*
Outliers: how far a step's loss or gradient norm lies from those before it, in standard deviations.
    z = (x - mean) / std over a window of the last 128 finite values, x included; NaN before there are 128 others, 0
    when all are equal. A batch of broken text, or a spike that would throw the weights far off, stands out by its z.
The window belongs to the state of a run: it is saved with each checkpoint, so a resumed run judges as the whole one.
Order:  double, chained from the oldest value to the newest; the variance from the mean, never negative.
Source: llm.c's -sl and -sg; doc/checkpoints.md
*/
#ifndef LLMC_OUTLIERS_H
#define LLMC_OUTLIERS_H
#include <jansson.h>
#include <math.h>
#include <string.h>

enum { OUTLIER_WINDOW = 128 };

typedef struct {
    int n;                        // values so far, at most OUTLIER_WINDOW
    float value[OUTLIER_WINDOW];  // the oldest first
} OutlierWindow;

// z of x, which joins the window; a non-finite x has no z and does not
static inline double outlier_z(OutlierWindow* w, float x) {
    if (!isfinite(x)) { return NAN; }
    if (w->n < OUTLIER_WINDOW) {
        w->value[w->n++] = x;
        return NAN;
    }
    memmove(w->value, w->value + 1, sizeof(float) * (OUTLIER_WINDOW - 1));
    w->value[OUTLIER_WINDOW - 1] = x;
    double sum = 0.0, squares = 0.0;
    for (int i = 0; i < OUTLIER_WINDOW; i++) { sum += (double)w->value[i]; }
    const double n = OUTLIER_WINDOW, mean = sum / n;
    for (int i = 0; i < OUTLIER_WINDOW; i++) { squares += ((double)w->value[i] - mean) * ((double)w->value[i] - mean); }
    return squares > 0.0 ? ((double)x - mean) / sqrt(squares / n) : 0.0;
}

// is x above the limit? limit 0: nothing is an outlier, and nothing is recorded
static inline int is_outlier(OutlierWindow* w, float x, float limit) {
    return limit > 0.0f && outlier_z(w, x) > (double)limit;
}

// ---- in the manifest of a checkpoint: the values, the oldest first ----

static inline json_t* outliers_to_json(const OutlierWindow* w) {
    json_t* values = json_array();
    for (int i = 0; i < w->n; i++) { json_array_append_new(values, json_real((double)w->value[i])); }
    return values;
}

// 1, or 0: not such a list
static inline int outliers_from_json(OutlierWindow* w, const json_t* values) {
    w->n = 0;
    if (!json_is_array(values) || json_array_size(values) > OUTLIER_WINDOW) { return 0; }
    for (size_t i = 0; i < json_array_size(values); i++) {
        const json_t* value = json_array_get(values, i);
        if (!json_is_number(value)) { return 0; }
        w->value[w->n++] = (float)json_number_value(value);
    }
    return 1;
}
#endif  // LLMC_OUTLIERS_H
