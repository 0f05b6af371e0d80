/*
Promises of llmc/models/image_splice.h: where the rows of images and frames of videos stand in a text, which positions
their tokens have on three axes, and that a batch whose placeholders are not those of its images is refused.
dev/ref/qwen36_vision_checks.py compares positions with transformers'.
    cc -O2 -fopenmp test_image_splice.c -o build/test_image_splice -ljansson -lxxhash -lm && build/test_image_splice
*/
#include "llmc/models/image_splice.h"
#include "llmc/test/test.h"

enum { MERGE = 2, IMAGE = 90, VIDEO = 91, MOST = 64 };

typedef struct {
    const char* text;   // "t" a token, "i" a placeholder of an image, "v" of a video's frame, "|" a segment ends
    const char* grids;  // of images, then of frames behind a "+", "1x4x6": frames, rows, columns of patches
    const char *time, *row, *column;  // a digit for each position
    const char* stands; // of each of the images' rows the position, in letters from a
} Case;

static const Case cases[] = {
    {"ttt", "", "012", "012", "012", ""},
    {"tiiiiiit", "1x4x6", "01111114", "01112224", "01231234", "bcdefg"},
    {"iit", "1x4x2", "002", "012", "002", "ab"},
    {"tiiiit", "2x2x4", "011223", "011113", "012123", "bcde"},              // two frames in a run: time counts
    {"tvvtvvt", "+1x2x4+1x2x4", "0113446", "0113446", "0123456", "bcef"},   // a video: each frame by itself
    {"vtiit", "1x2x4+1x2x2", "01224", "01224", "01234", "cda"},             // images come first in the tower
    {"tiit|tiit", "1x2x4 1x2x4", "01130113", "01130113", "01230123", "bcfg"},
};

static int read_grids(int* grids, int* n_frames, const char* text) {
    int n = 0;
    *n_frames = 0;
    for (const char* p = text; *p; p += strcspn(p, " +")) {
        *n_frames += *p == '+';
        p += *p == '+' || *p == ' ';
        sscanf(p, "%dx%dx%d", &grids[3 * n], &grids[3 * n + 1], &grids[3 * n + 2]);
        n++;
    }
    return n;
}

// the arguments of image_positions_ from the text of a case; returns its length
static int read_text(int* inputs, Segment* at, Segments* segments, const char* text) {
    int N = 0;
    segments->at = at;
    segments->n = 1;
    at[0].first = 0, at[0].rows = 1, at[0].T = 0;
    for (; *text; text++) {
        if (*text == '|') {
            at[segments->n].first = (size_t)N, at[segments->n].rows = 1, at[segments->n++].T = 0;
            continue;
        }
        inputs[N++] = *text == 'i' ? IMAGE : *text == 'v' ? VIDEO : 1;
        at[segments->n - 1].T++;
    }
    return N;
}

static int positions_of(int* N, int positions[3 * MOST], int to[MOST], int from[MOST], const char* text,
                        const char* grids_text, ErrorText* error) {
    int grids[3 * MOST], n_frames, inputs[MOST];
    Segment at[MOST];
    Segments segments;
    const int n = read_grids(grids, &n_frames, grids_text);
    const ImageRows x = {n, grids, NULL, 0, n_frames};
    const ImageText how = {{IMAGE, VIDEO}, MERGE, 0, 1.0, NULL, 0};
    *N = read_text(inputs, at, &segments, text);
    return image_positions_(positions, to, from, inputs, *N, &segments, &x, &how, error);
}

static void test_positions(Test* t) {
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        const Case* c = &cases[k];
        const char* axes[3] = {c->time, c->row, c->column};
        int N, positions[3 * MOST], to[MOST], from[MOST];
        ErrorText error;
        if (!check(t, positions_of(&N, positions, to, from, c->text, c->grids, &error), "%s: refused", c->text)) {
            continue;
        }
        for (int axis = 0; axis < 3; axis++) {
            for (int i = 0; i < N; i++) {
                check(t, positions[axis * N + i] == axes[axis][i] - '0', "%s: axis %d of %d is %d, expected %c", c->text,
                      axis, i, positions[axis * N + i], axes[axis][i]);
            }
        }
        const int n = (int)strlen(c->stands);
        int n_images = 0;
        for (int i = 0; i < N; i++) {
            n_images += to[i] >= 0;
            check(t, to[i] < 0 || from[to[i]] == i, "%s: to and from disagree at %d", c->text, i);
        }
        check(t, n_images == n, "%s: %d rows of images, expected %d", c->text, n_images, n);
        for (int i = 0; i < n; i++) { check(t, from[i] == c->stands[i] - 'a', "%s: row %d at %d", c->text, i, from[i]); }
    }
}

static void test_refused(Test* t) {
    const struct { const char *text, *grids, *reason; } bad[] = {
        {"tii", "1x4x4", "position 1: expected 4 placeholders for an image of 2 x 2 tokens, found 2"},
        {"tiiit", "1x4x4", "expected 4 placeholders for an image of 2 x 2 tokens, found 3"},
        {"tiit|iit", "1x2x6", "expected 3 placeholders for an image of 1 x 3 tokens, found 2"},
        {"tiii", "1x2x4", "position 3: expected no more placeholders than the images have tokens, found one"},
        {"tv", "", "position 1: expected no more placeholders than the videos have tokens, found one"},
        {"tiit", "1x2x4 1x2x4", "expected placeholders for all images, found none for the last 1"},
        {"tiit", "1x2x4+1x2x4", "expected placeholders for all frames of videos, found none for the last 1"},
        {"tivt", "1x2x4", "expected 2 placeholders for an image of 1 x 2 tokens, found 1"},
        {"tiiit", "2x2x4", "an image of 1 x 2 tokens in several frames, found 3"}};
    for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++) {
        int N, positions[3 * MOST], to[MOST], from[MOST];
        ErrorText error;
        error.text[0] = '\0';
        const int good = positions_of(&N, positions, to, from, bad[k].text, bad[k].grids, &error);
        check(t, !good && strstr(error.text, bad[k].reason), "%s: expected \"%s\", found \"%s\"", bad[k].text,
              bad[k].reason, error.text);
    }
}

// rows go where they stand, and come back from there
static void test_rows(Test* t) {
    enum { D = 3, N = 7 };
    const int inputs[N] = {5, IMAGE, IMAGE, 6, VIDEO, 7, 8}, grids[] = {1, 2, 4, 1, 2, 2}, axis[2] = {0, 1};
    const float pixels[12] = {0};
    const ImageRows x = {2, grids, pixels, 12, 1};
    const ImageText how = {{IMAGE, VIDEO}, MERGE, 4, 1e4, axis, 0};
    Segment at = {0, 1, N};
    const Segments segments = {NO_RESET, 1, &at};
    Device dev = test_device(1);
    ImageSplice s;
    ErrorText error;
    float images[3 * D], encoded[N * D], back[3 * D];
    memset(&s, 0, sizeof s);
    for (int i = 0; i < 3 * D; i++) { images[i] = 1.0f + (float)i; }
    for (int i = 0; i < N * D; i++) { encoded[i] = -1.0f - (float)i; }
    check(t, image_splice_take(&s, inputs, &segments, 1, N, &x, &how, &dev, &error), "taken");
    image_splice_forward(encoded, images, &s, D, &dev);
    const int expected[N] = {-1, 0, 1, -1, 2, -1, -1};
    for (int i = 0; i < N * D; i++) {
        const int row = expected[i / D];
        const float value = row < 0 ? -1.0f - (float)i : images[row * D + i % D];
        check(t, encoded[i] == value, "element %d is %g, expected %g", i, (double)encoded[i], (double)value);
        check(t, s.tokens[i / D] == (row < 0 ? inputs[i / D] : -1), "token %d", i / D);
    }
    image_splice_backward(back, encoded, &s, D, &dev);
    check(t, memcmp(back, images, sizeof back) == 0, "rows come back");
    image_splice_free(&s);
    device_free(&dev);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"positions", "three axes of texts, images, frames and segments; where rows stand", test_positions},
        {"refused", "placeholders that are not those of the images", test_refused},
        {"rows", "images stand in the text, and their gradients come back", test_rows},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
