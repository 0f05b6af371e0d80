/*
Promises of --verify-every, llmc/ranks/verify.h, through the trainer's own train_step: a bit that flips in parameters, moments,
gradients or the update ends the run with step, tensor and element; without one nothing changes.
The flips are planted by wrapping three functions of the trainer, which is otherwise the one that ships.
    cc -std=gnu11 -D_GNU_SOURCE -O2 -ffp-contract=off -I. test_verify.c -o build/test_verify -ljansson -lxxhash -lm
    FLIPS=1000 build/test_verify flips
*/
#include "llmc/ops/adamw.h"       // what is wrapped, before the wrappers have its names
#include "llmc/text/prefetch.h"
#include "llmc/ranks/leaf_tree.h"
#include "llmc/test/test.h"       // check, check_exit, test_main
#include "llmc/test/testfiles.h"  // temp_folder, temp_file

typedef enum { NO_FLIP, FLIP_PARAMETERS, FLIP_MOMENTS_1, FLIP_MOMENTS_2, FLIP_FIRST_GRADIENTS, FLIP_SECOND_GRADIENTS, FLIP_UPDATE, N_PLACES } Place;

static struct {
    Place place;
    uint32_t element, bit;  // which of the arena or tensor, modulo its size
    int call;               // of adamw_update_stored
    int n_batches, n_pushes, n_updates;
    float* arena[3];        // parameters and moments
    const void* model;      // Model*, which is known below
} plant;

static void flip_element(float* x, size_t n) {
    uint32_t u = float_bits(x[plant.element % n]) ^ 1u << plant.bit;
    x[plant.element % n] = float_from_bits(u);
}

static void flip_in_tensors(float* arena);  // below, where the table of tensors is known

// the second call in a step begins the second computation
static void planted_batch(Prefetch* p, int64_t k, const int** inputs, const int** targets) {
    if (++plant.n_batches == 2 && plant.place >= FLIP_PARAMETERS && plant.place <= FLIP_MOMENTS_2) {
        flip_in_tensors(plant.arena[plant.place - FLIP_PARAMETERS]);
    }
    prefetch_batch(p, k, inputs, targets);
}

static void planted_push(LeafTree* tree, const Device* dev) {
    int second = ++plant.n_pushes == 2;
    if (plant.place == (second ? FLIP_SECOND_GRADIENTS : FLIP_FIRST_GRADIENTS)) { flip_in_tensors(leaf_tree_next(tree)); }
    leaf_tree_push(tree, dev);
}

static void planted_update(float* p, float* master, float* m, float* v, const float* g, size_t n, float weight_decay, const AdamW* step,
                           uint32_t noise_key, ElementNumbers numbers, const Device* dev) {
    float* out[3] = {p, m, v};
    adamw_update_stored(p, master, m, v, g, n, weight_decay, step, noise_key, numbers, dev);
    if (plant.place == FLIP_UPDATE && plant.n_updates++ == plant.call) { flip_element(out[plant.element % 3], n); }
}

#define prefetch_batch planted_batch
#define leaf_tree_push planted_push
#define adamw_update_stored planted_update
#define main trainer_main  // this test has a main of its own
#include "train_gpt2.c"

static void flip_in_tensors(float* arena) {
    const Model* model = (const Model*)plant.model;
    size_t i = plant.element % tensors_count(model->table, N_PARAMETERS);
    for (int k = 0; k < N_PARAMETERS; k++) {
        const Tensor* t = &model->table[k];
        if (i < tensor_elements(t)) {
            plant.element = (uint32_t)i;
            flip_element(arena + t->offset, tensor_elements(t));
            return;
        }
        i -= tensor_elements(t);
    }
}

// a run of two layers and one thread (a child of fork has no other), with the given options, about to take its first step
static void start(Run* r, Workplace* place, const TempPath* folder, const char* verify_every) {
    static Trainer trainer;
    trainer = cpu_trainer();
    TempPath config = temp_path(folder, "config.json"), text = temp_path(folder, "text"), run = temp_path(folder, verify_every);
    const char* json = "{\"model_type\":\"gpt2\",\"n_positions\":8,\"vocab_size\":257,\"n_layer\":2,\"n_head\":2,\"n_embd\":16}";
    const char* words = "the plain loop is the law, and 12 times 12 is 144; the fast code has to find the same bits.";
    temp_file(folder, "config.json", json, strlen(json));
    temp_file(folder, "text", words, strlen(words));
    const char* argv[] = {"train_gpt2", "--config", config.s, "--train", text.s, "--steps", "99", "--batch-size", "2", "--threads", "1",
                          "--run", run.s, "--log-every", "1000", "--verify-every", verify_every};
    memset(r, 0, sizeof *r);
    memset(place, 0, sizeof *place);
    r->trainer = &trainer;
    r->model = &place->gpt2.model;
    start_open(r, (int)(sizeof argv / sizeof argv[0]), (char**)argv);
    device_init(&r->dev, r->o.threads);
    r->peak = 1.0;
    save_open_model(r);
    start_training(r, (int)(sizeof argv / sizeof argv[0]), (char**)argv);
    plant.model = r->model;
    plant.arena[0] = model_floats(r->model);
    plant.arena[1] = r->model->w.m;
    plant.arena[2] = r->model->w.v;
}

static void step_without_output(void* run) {
    plant.n_batches = plant.n_pushes = plant.n_updates = 0;
    if (!freopen("/dev/null", "w", stdout)) { fail_run("/dev/null: %s", strerror(errno)); }
    train_step((Run*)run);
}

static void test_flips(Test* t) {
    const char* wanted = getenv("FLIPS");
    const char* expected[N_PLACES] = {"", "two results: parameters of ", "two results: first moments of ", "two results: second moments of ",
                                      "two results: gradients of ", "two results: gradients of ", "two results: new "};
    const int n_flips = wanted ? atoi(wanted) : 100;
    static Run r;
    static Workplace place;
    TempPath folder = temp_folder();
    uint64_t s = seeded_stream(13);
    start(&r, &place, &folder, "1");
    for (int i = 0; i < n_flips; i++) {
        plant.place = (Place)(1 + i % (N_PLACES - 1));
        plant.element = xorshift_u32(&s);
        plant.bit = xorshift_u32(&s) % 32;
        plant.call = (int)(xorshift_u32(&s) % (2 * N_PARAMETERS));
        check_exit(t, "a flipped bit", step_without_output, &r, 1, expected[plant.place]);
    }
    plant.place = NO_FLIP;
    check_exit(t, "no flipped bit", step_without_output, &r, 0, "");
    temp_remove(&folder);
}

// where: 7 is in the first block of the first tensor, the token embedding
static void test_message(Test* t) {
    static Run r;
    static Workplace place;
    TempPath folder = temp_folder();
    start(&r, &place, &folder, "1");
    plant.place = FLIP_MOMENTS_1;
    plant.element = 7;
    plant.bit = 3;
    check_exit(t, "a flipped bit", step_without_output, &r, 1, "step 1: the same computation gave two results: first moments of "
               "transformer.wte.weight, one of the elements 0..63: the hardware (memory, overclocking) or a bug; the checkpoints are from before");
    plant.place = FLIP_UPDATE;
    plant.call = 0;
    plant.element = 9;  // of the parameters, which are updated first
    plant.bit = 30;
    check_exit(t, "a flipped bit", step_without_output, &r, 1, "new parameters of transformer.wte.weight, element 9 (");
    plant.place = NO_FLIP;
    temp_remove(&folder);
}

static void test_same_bits(Test* t) {
    static Run verified, plain;
    static Workplace place, other;
    TempPath folder = temp_folder();
    start(&plain, &place, &folder, "0");
    start(&verified, &other, &folder, "2");
    for (int i = 0; i < 5; i++) {
        train_step(&plain);
        train_step(&verified);
    }
    const size_t n_bytes = sizeof(float) * plain.model->n;
    check(t, memcmp(plain.model->w.stored, verified.model->w.stored, n_bytes) == 0, "parameters differ");
    check(t, memcmp(plain.model->w.v, verified.model->w.v, n_bytes) == 0, "moments differ");
    temp_remove(&folder);
}

#undef main
int main(int argc, char** argv) {
    Promise promises[] = {
        {"flips", "a bit flipped in parameters, moments, gradients or the update is found; none is, where there is none", test_flips},
        {"message", "it names step, tensor and element", test_message},
        {"same bits", "--verify-every 2 changes no bit", test_same_bits},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
