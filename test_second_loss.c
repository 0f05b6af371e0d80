/*
Promises of llmc/ranks/second_loss.h, with an invented table: tensors of the model, of each layer, of some layers, and
experts. Which parameters two losses share, how their gradients become one there and nowhere else, and a step on the
second loss alone. How one gradient is made of two is in test_gradient_surgery.c, on ranks in dev/test_mamba.sh.
*/
#include "llmc/ranks/second_loss.h"
#include "llmc/test/test.h"

enum { L = 4, N_EXPERTS = 3 };
enum { EMBEDDING, NORM, EXPERTS, OUT, N_ROWS };

typedef struct {
    Model model;
    SecondLoss second;
    Device dev;
    float *grads, *other;  // gradients of the first loss, of the second
    size_t n;              // floats of each
} Subject;

// layers 0 and 2 have experts; frozen_layer -1: none
static void subject_open(Subject* s, SurgeryMethod method, int frozen_layer) {
    memset(s, 0, sizeof *s);
    Model* m = &s->model;
    Tensor* t = m->table;
    s->dev = test_device(2);
    t[EMBEDDING] = tensor("embedding", 0, 0, 5, 3, INIT_ZEROS, 0.0f, DECAY, AS_IS);
    t[NORM] = tensor("%d.norm", 8, L, 1, 3, INIT_ZEROS, 0.0f, NO_DECAY, VECTOR);
    t[EXPERTS] = tensor("%d.%d.up", 16, L, 2, 3, INIT_ZEROS, 0.0f, DECAY, AS_IS);
    tensor_in_kinds(&t[EXPERTS], "EFEF", "E");
    tensor_experts(&t[EXPERTS], N_EXPERTS, APART);
    t[OUT] = tensor("%d.out", 24, L, 3, 3, INIT_ZEROS, 0.0f, DECAY, AS_IS);
    model_layout(m, N_ROWS);
    m->frozen = (int*)new_array((size_t)m->n_slices, sizeof(int));
    for (int i = 0, slice = 0; i < N_ROWS; i++) {
        for (int k = 0; k < tensor_slices(&t[i]); k++, slice++) {
            m->frozen[slice] = t[i].layers > 0 && tensor_slice_layer(&t[i], k) == frozen_layer;
        }
    }
    model_init(m, sizeof(float));
    model_init_training(m, NULL, 1, 0, 0);
    SurgeryConfig config = {method, 0.0f, 0.4f, 0.2f, {0, 0}, 1};
    second_loss_open(&s->second, m, NULL, 2);
    second_loss_join(&s->second, m, L, &config, &t[OUT]);
    s->n = m->dp.n_reduced;
    s->grads = random_array(s->n, 1.0f, 1);
    s->other = random_array(s->n, 1.0f, 2);
}

static void subject_close(Subject* s) {
    second_loss_free(&s->second);
    model_free(&s->model);
    device_free(&s->dev);
    free(s->grads);
    free(s->other);
}

// a slice that learns: its layer (-1: the model's), its gradients, its parameters
typedef struct { int layer; size_t gradient, parameter, n; } Slice;
enum { MOST_SLICES = 1 + L + 2 * N_EXPERTS + L };

static int learning(const Subject* s, Slice slices[MOST_SLICES]) {
    const Model* m = &s->model;
    int n = 0;
    for (int i = 0; i < N_ROWS; i++) {
        const Tensor* t = &m->table[i];
        for (int k = 0; k < tensor_slices(t); k++) {
            if (dp_stretch(&m->dp, i, k) < 0) { continue; }
            const size_t each = tensor_slice_elements(t);
            const Slice slice = {t->layers > 0 ? tensor_slice_layer(t, k) : -1, dp_gradient_at(&m->dp, i, k),
                                 t->offset + each * (size_t)k, each};
            slices[n++] = slice;
        }
    }
    return n;
}

// the sum, with half the second: in the layers, not in the embedding, and no frozen layer is looked at
static void check_combine(Test* t, int frozen_layer) {
    Subject s;
    Slice slices[MOST_SLICES];
    const float losses[] = {1.0f, 2.0f};
    subject_open(&s, SURGERY_NONE, frozen_layer);
    float* want = copied_array(s.grads, s.n);
    const int n = learning(&s, slices);
    check(t, n == MOST_SLICES - (frozen_layer < 0 ? 0 : frozen_layer % 2 ? 2 : 2 + N_EXPERTS), "%d slices learn", n);
    for (int j = 0; j < n; j++) {
        for (size_t i = slices[j].gradient; i < slices[j].gradient + slices[j].n && slices[j].layer >= 0; i++) {
            want[i] = (float)((double)s.grads[i] + 0.5 * (double)s.other[i]);
        }
    }
    const float norm = second_loss_combine(&s.second, &s.model, s.grads, s.other, losses, 0.5f, 3, &s.dev);
    check_bits(t, "both gradients", s.grads, want, s.n);
    check(t, norm == dp_norm(&s.model.dp, want, &s.dev), "the norm of both, found %g", (double)norm);
    free(want);
    subject_close(&s);
}

static void test_combine(Test* t) {
    for (int frozen = -1; frozen < L; frozen++) { check_combine(t, frozen); }
}

// layers 1 and 3 are pulled apart, whose dot products are those with the opposite; the others agree
static void test_conflicts(Test* t) {
    for (int frozen = -1; frozen < L; frozen++) {
        Subject s;
        Slice slices[MOST_SLICES];
        const float losses[] = {1.0f, 2.0f};
        subject_open(&s, SURGERY_PCGRAD, frozen);
        for (int j = 0, n = learning(&s, slices); j < n; j++) {
            const float sign = slices[j].layer >= 0 && slices[j].layer % 2 ? -1.0f : 1.0f;
            for (size_t i = slices[j].gradient; i < slices[j].gradient + slices[j].n; i++) {
                s.other[i] = sign * s.grads[i];
            }
        }
        second_loss_combine(&s.second, &s.model, s.grads, s.other, losses, 1.0f, 3, &s.dev);
        const int expected = frozen >= 0 && frozen % 2 ? 1 : 2, found = second_loss_conflicts(&s.second);
        check(t, found == expected, "layer %d frozen: expected %d conflicts, found %d", frozen, expected, found);
        subject_close(&s);
    }
}

// gradnorm finds by itself how much the second loss counts
static void test_scale(Test* t) {
    const float losses[] = {1.0f, 2.0f};
    float* first = NULL;
    for (int i = 0; i < 2; i++) {
        Subject s;
        subject_open(&s, SURGERY_GRADNORM, -1);
        second_loss_combine(&s.second, &s.model, s.grads, s.other, losses, i ? 0.5f : 1.0f, 3, &s.dev);
        if (i == 0) { first = copied_array(s.grads, s.n); }
        check_bits(t, "both gradients", s.grads, first, s.n);
        subject_close(&s);
    }
    free(first);
}

// gradnorm compares the last matrix that learns
static void test_compared(Test* t) {
    for (int frozen = -1; frozen < L; frozen++) {
        Subject s;
        subject_open(&s, SURGERY_GRADNORM, frozen);
        const SurgeryRange range = s.second.surgery.config.norm_range;
        const int last = frozen == L - 1 ? L - 2 : L - 1;
        check(t, range.n == 9 && range.first == dp_gradient_at(&s.model.dp, OUT, last),
              "layer %d frozen: gradients of %zu elements at %zu", frozen, range.n, range.first);
        subject_close(&s);
    }
}

static void test_descend(Test* t) {
    for (int frozen = -1; frozen < L; frozen++) {
        Subject s;
        Slice slices[MOST_SLICES];
        subject_open(&s, SURGERY_NONE, frozen);
        float *params = model_floats(&s.model), *start = random_array(s.model.n, 1.0f, 7);
        memcpy(params, start, sizeof(float) * s.model.n);
        for (int j = 0, n = learning(&s, slices); j < n; j++) {
            for (size_t i = 0; i < slices[j].n && slices[j].layer >= 0; i++) {
                start[slices[j].parameter + i] -= 0.25f * s.other[slices[j].gradient + i];
            }
        }
        second_loss_descend(&s.second, &s.model, s.other, 0.25f);
        check_bits(t, "parameters", params, start, s.model.n);
        free(start);
        subject_close(&s);
    }
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"combine", "both gradients become one in what learns of the layers, experts too, and nowhere else",
         test_combine},
        {"conflicts", "layers in which the losses pull apart are counted, frozen ones not", test_conflicts},
        {"scale", "says nothing to gradnorm", test_scale},
        {"compared", "gradnorm looks at the last layer that learns", test_compared},
        {"descend", "a step on the second loss moves those parameters and no other", test_descend},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
