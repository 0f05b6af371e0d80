"""
What moe.py checks before it writes golden files: the functions that make them run in float64 against numbers computed
elsewhere and against finite differences, and in float32 against those. NumPy and the standard library only.
"""
from dataclasses import replace

import numpy as np

import exact
import trainer
from exact import F4, F8, tree_sum
from moe import (MODEL, RUNS, Config, backward, base_run, bias_run, expert_rows, forward, level_biases, numbers,
                 parameter_table, rope, rope_backward, rope_tables, router_backward, router_forward, router_statistics)


def close(found, expected, relative, absolute=0.0):
    return np.allclose(np.reshape(found, -1), np.reshape(expected, -1), rtol=relative, atol=absolute)


def same_bits(a, b):
    return a.tobytes() == b.tobytes()


# ---------------------------------------------------------------------------------------------------------------------
# The router alone: two positions, four experts, two of them chosen. Numbers with nine digits.
# ---------------------------------------------------------------------------------------------------------------------
def router_promises():
    z, dw = np.array([[0.5, -1, 2, 1], [1, 0, -0.5, 0.25]]), np.array([[0.3, -0.2], [0.1, 0.4]])
    p, lse, experts, weights = router_forward(z, 2, True)
    counts, balance, z_mean = router_statistics(p, lse, experts)

    def slope(dw, balance_weight, z_weight):
        return router_backward(dw, p, lse, experts, weights, True, counts, balance_weight, z_weight)
    path = [[0, 0, 0.098305967, -0.098305967], [-0.065368498, 0, 0, 0.065368498]]
    levelling = [[-0.000131817, -0.000181129, -0.000590764, 0.000903709],
                 [-0.000122709, -0.000936592, -0.000027380, 0.001086681]]
    scores = [[0.135989, 0.030343, 0.609460, 0.224208], [0.484643, 0.178290, 0.108138, 0.228929]]
    restricted = np.exp(np.take_along_axis(z, experts, axis=-1))  # softmax of the chosen logits alone
    ties = np.zeros((1, 5), F4)
    return [
        ("router: scores", close(p, scores, 0, 5e-7)),
        ("router: chosen experts in ascending order", experts.tolist() == [[2, 3], [0, 3]]),
        ("router: weights", close(weights, [0.731059, 0.268941, 0.679179, 0.320821], 0, 5e-7)),
        ("router: weights are a softmax of the chosen", close(weights, restricted / restricted.sum(1)[:, None], 1e-15)),
        ("router: counts", counts.tolist() == [1, 0, 1, 2]),
        ("router: loss of balance", close(0.01 * balance, 0.0112225175, 1e-8)),
        ("router: z-loss", close(0.001 * z_mean, 0.0045996466, 0, 1e-10)),
        ("router: gradient of the weights", close(slope(dw, 0, 0), path, 0, 5e-10)),
        ("router: gradient of balance", close(slope(0 * dw, 0.01, 0), levelling, 0, 5e-10)),
        ("router: gradient of z", close(slope(0 * dw, 0, 0.001), 0.001 * lse[:, None] * p, 1e-14)),
        ("router: ties go to the lower index, NaN counts as -infinity",
         router_forward(ties, 3, True)[2].tolist() == [[0, 1, 2]] and
         router_forward(ties, 4, True, np.array([np.nan, -np.inf, 0, 1, 0], F4))[2].tolist() == [[0, 2, 3, 4]]),
        ("router: the bias moves the choice, not the weights",
         same_bits(router_forward(z, 1, False, np.array([0, 9, 0, 0]))[3], p[:, 1:2].copy())),
    ]


def row_promises():
    """Rows of the experts for several kinds of routing: a stable sort, and its inverse"""
    rng, kept = np.random.default_rng(5), []
    for N, k, E in ((1, 1, 1), (1, 3, 7), (9, 2, 4), (40, 8, 8), (33, 1, 5)):
        experts = np.sort(np.argsort(rng.random((N, E)))[:, :k])
        pair, slot, ranges = expert_rows(experts, E)
        order = sorted((e, n, j) for (n, j), e in np.ndenumerate(experts))
        kept += [pair.tolist() == [n * k + j for _, n, j in order],
                 all(pair[slot[n, j]] == n * k + j for n, j in np.ndindex(N, k)),
                 all((experts.reshape(-1)[pair[r]] == e).all() for e, r in enumerate(ranges)),
                 ranges[-1].stop == N * k]
    return [("rows: sorted by (expert, n, j), and back", all(kept))]


def bias_promises():
    cfg = replace(bias_run()[0], num_local_experts=4)
    p = level_biases({"selection_bias": np.zeros((1, 4), F4)}, {"counts": np.array([[1, 2, 3, 6]])}, cfg)
    steps = np.array([0.75, 0.75, -0.25, -1.25])  # 1, 1, 0, -1 without their mean
    return [("biases: a step to less load, none at the mean", close(p["selection_bias"], cfg.bias_rate * steps, 1e-6))]


def rope_promises():
    F8_TYPE = np.dtype(F8)
    x = np.array([1.0, 3, 2, 4]).reshape(1, 1, 1, 4)  # pairs (1, 2) and (3, 4)
    tables = [table[3:] for table in rope_tables(4, 4, 10000.0, F8_TYPE)]
    turned = rope(x, *tables)
    theta = replace(base_run()[0], head_dim=64, rope_alpha=8.0).rope_theta
    frequencies = np.arccos(rope_tables(2, 64, theta, F8_TYPE)[0][1])[[0, 1]]
    slow = np.arcsin(rope_tables(2, 64, theta, F8_TYPE)[1][1])[[16, 31]]
    return [
        ("RoPE: (1, 2), (3, 4) at position 3", close(turned, [-1.27223251, 2.87866810, -1.83886499, 4.08818664], 5e-9)),
        ("RoPE: backward turns back", close(rope_backward(turned, *tables), x, 1e-15)),
        ("RoPE: the base with alpha 8", close(theta, 85550.376, 1e-8)),
        ("RoPE: frequencies with alpha 8",
         close([*frequencies, *slow], [1, 0.701242234, 3.41892079e-3, 1.66690179e-5], 5e-9)),
        ("RoPE: in float32 close to float64", all(
            close(a, b, 0, 2e-6) for a, b in zip(rope_tables(40, 64, theta, np.dtype(F4)),
                                                 rope_tables(40, 64, theta, F8_TYPE)))),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# A run of ten updates, computed elsewhere in double precision with ten digits; its parameters come in another order.
# ---------------------------------------------------------------------------------------------------------------------
TABLE = Config(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
               head_dim=8, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, aux_alpha=0.01, batch=2,
               seq_len=8, beta2=0.95, clip=1.0)
TABLE_STEPS = [  # cross entropy, loss of balance, norm
    (4.728169281, 0.021669228, 2.839612564), (4.769843456, 0.020656642, 3.458990563),
    (4.848270064, 0.021513913, 3.398819651), (4.680104018, 0.023345349, 4.727297070),
    (4.590840084, 0.020204625, 3.140629411), (4.608644119, 0.020443105, 3.151365805),
    (4.770165911, 0.020149184, 3.314341113), (4.645094788, 0.022312014, 2.588278330),
    (4.723501875, 0.022619651, 2.970785025), (4.428233951, 0.021497705, 3.074335405)]
TABLE_COUNTS = {0: [[12, 7, 6, 7], [1, 14, 7, 10]], 7: [None, [16, 0, 13, 3]], 9: [[2, 4, 14, 12], [10, 10, 3, 9]]}


def table_parameters():
    stream, shapes = exact.Xorshift(1337), {row.name: row.shape for row in parameter_table(TABLE)}
    p, (L, E, F2, D) = {name: np.ones(shape, F4) for name, shape in shapes.items()}, shapes["gate_up"]

    def draw(x):
        x[...] = (stream.floats(x.size).reshape(x.shape) - F4(0.5)) * F4(0.25)
    draw(p["embed_tokens"])
    for l in range(L):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "router"):
            draw(p[name][l])
        for name in ("q_proj", "k_proj"):  # drawn with pairs of neighbours
            p[name][l] = p[name][l].reshape(-1, TABLE.head_dim // 2, 2, D).swapaxes(1, 2).reshape(-1, D)
        for e in range(E):
            draw(p["gate_up"][l, e])  # gate, then up
            draw(p["down"][l, e])
    draw(p["lm_head"])
    return p


def double_updates(p, inputs, targets):
    """trainer.train with every number in float64: yields activations, gradients, numbers and norm."""
    p = {name: x.astype(F8) for name, x in p.items()}
    m, v = ({name: np.zeros_like(x) for name, x in p.items()} for _ in range(2))
    for step in range(TABLE.steps):
        acts = forward(p, inputs[step, 0], targets[step, 0], TABLE)
        g = backward(p, acts, inputs[step, 0], targets[step, 0], targets[step].size, TABLE)
        norm = np.sqrt(exact.sum_of_squares(g.values()))
        yield acts, g, numbers([acts], targets[step].size, TABLE), norm
        corrections = (1 - 0.9 ** (step + 1), 1 - 0.95 ** (step + 1))
        for row in parameter_table(TABLE):
            name, decay = row.name, 0.1 if row.is_decayed else 0.0
            clipped = g[name] * min(1.0, 1.0 / norm)
            p[name], m[name], v[name] = exact.adamw(p[name], clipped, m[name], v[name], 1e-3, 0.9, 0.95, 1e-8, decay,
                                                    corrections)


def table_values(numbers, norm):
    return [numbers["cross_entropy"], 0.01 * numbers["balance"].sum(), norm]


def first_step_promises(p, acts, g, inputs, targets):
    gate, up = np.split(g["gate_up"][0], 2, axis=1)
    block, scaled = acts["blocks"][0], replace(TABLE, rope_alpha=8.0, z_lambda=0.001)
    wide = {name: x.astype(F8) for name, x in p.items()}
    found = numbers([forward(wide, inputs[0, 0], targets[0, 0], scaled)], 16, scaled)
    elements = {"input_layernorm": -0.00172669253, "q_proj": -0.00422645171, "k_proj": 0.0186830606,
                "v_proj": 0.107219669, "o_proj": 0.0252353623, "post_attention_layernorm": 0.00750720668,
                "router": 0.00392441419, "lm_head": -0.0106487973}
    return [
        ("table: first tokens and last target",
         inputs[0, 0, 0, :3].tolist() == [19, 83, 68] and targets[0, 0, -1, -1] == 36),
        ("table: experts and weights of the first token", block["experts"][0, 0].tolist() == [0, 3] and
         close(block["weights"][0, 0], [0.449275902, 0.550724098], 2e-9)),
        ("table: gradient of the first token's row", close(g["embed_tokens"][19, 0], 0.0779134007, 1e-8)),
        ("table: first elements of gradients",
         all(close(g[name].reshape(-1)[0], x, 1e-8) for name, x in elements.items())),
        ("table: norms of gradients of layer 0", close(
            [np.linalg.norm(x) for x in (gate, up, g["down"][0], g["router"][0])],
            [0.350008395, 0.368284504, 0.381357501, 0.103005944], 2e-9)),
        ("table: with alpha 8 and a z-loss", close([found["loss"], found["cross_entropy"]],
                                                   [4.752906082767, 4.726845874253], 1e-12)),
    ]


def table_promises():
    p, (inputs, targets) = table_parameters(), trainer.draw_data(TABLE)
    promises, counts, float_kept, same_experts = [], True, [], []
    updates = trainer.train(MODEL, TABLE, p, inputs, targets)
    for step, ((acts, g, told, norm), r) in enumerate(zip(double_updates(p, inputs, targets), updates)):
        if step == 0:
            promises += first_step_promises(p, acts, g, inputs, targets)
        promises.append((f"table: step {step} in float64",
                         close(table_values(told, norm), TABLE_STEPS[step], 0, 5.1e-10)))
        float_kept.append(close(table_values(r.numbers, r.norm), TABLE_STEPS[step], 1e-4))
        same_experts += [np.array_equal(a["experts"], b["experts"]) for a, b in zip(acts["blocks"], r.acts["blocks"])]
        for l, expected in enumerate(TABLE_COUNTS.get(step, ())):
            counts &= expected is None or told["counts"][l].tolist() == expected
        if step == 7:
            idle = [g[name][1, 1] for name in ("gate_up", "down")]
            promises.append(("table: the expert without rows has no gradient", not any(x.any() for x in idle)))
    return promises + [("table: counts", counts), ("table: all steps in float32", all(float_kept)),
                       ("table: the same experts in float32", all(same_experts))]


# ---------------------------------------------------------------------------------------------------------------------
# Invariants of the golden runs: to the bit in float32, and finite differences in float64.
# ---------------------------------------------------------------------------------------------------------------------
def slope_promises(name, run, **changes):
    """Gradients of the training loss, over leaves, against central differences; one random direction per tensor"""
    cfg, p, inputs, targets = run()
    cfg, inputs, targets, rng = replace(cfg, **changes), inputs[0], targets[0], np.random.default_rng(3)
    p = {row.name: p[row.name].astype(F8) if row.name in p else 0.3 * rng.normal(size=row.shape)
         for row in parameter_table(cfg)}
    p["router"] = 2 * rng.normal(size=p["router"].shape)  # no ties
    count = int((targets >= 0).sum())

    def leaves(p):
        return [forward(p, *batch, cfg) for batch in zip(inputs, targets)]

    def loss(p):
        return numbers(leaves(p), count, cfg)["loss"]
    grads = [backward(p, acts, *batch, count, cfg) for acts, *batch in zip(leaves(p), inputs, targets)]
    g, worst, h = {key: tree_sum([leaf[key] for leaf in grads]) for key in p}, 0.0, 1e-6
    for key in (row.name for row in parameter_table(cfg) if row.kind != "selection"):
        direction = rng.normal(size=p[key].shape)
        slope = (loss({**p, key: p[key] + h * direction}) - loss({**p, key: p[key] - h * direction})) / (2 * h)
        size = np.linalg.norm(g[key]) * np.linalg.norm(direction)
        worst = max(worst, abs(slope - (g[key] * direction).sum()) / size)
    return [(f"{name}: gradients agree with differences of the loss", worst < 1e-7)]


def all_slope_promises():
    out = []
    for name, run in RUNS.items():
        out += slope_promises(name, run)
    for k in (1, 2, 3, 4):
        out += slope_promises(f"moe_base, k {k}, tied, alpha 4, z", base_run, num_experts_per_tok=k, rope_alpha=4.0,
                              tie_word_embeddings=True, z_lambda=0.1, aux_alpha=0.3)
    return out + slope_promises("moe_bias, all experts", bias_run, num_experts_per_tok=6, z_lambda=0.1)


def disk_promises(name, cfg, p):
    """Experts on disk"""
    disk = trainer.to_disk(MODEL, p, cfg)
    experts = "model.layers.1.block_sparse_moe.experts.2.w{}.weight"
    gate, up = np.split(p["gate_up"][1, 2], 2)
    back = trainer.from_disk(MODEL, disk, cfg)
    return [
        (f"{name}: w1, w3, w2 are gate, up, down", all(
            np.array_equal(disk[experts.format(w)], x) for w, x in ((1, gate), (3, up), (2, p["down"][1, 2])))),
        (f"{name}: to disk and back", all(same_bits(x, p[key]) for key, x in back.items())),
    ]


def run_promises(name, run):
    cfg, p, inputs, targets = run()
    acts = forward(p, inputs[0, 0], targets[0, 0], cfg)
    g = backward(p, acts, inputs[0, 0], targets[0, 0], targets[0].size, cfg)
    pairs = cfg.batch * cfg.seq_len * cfg.num_experts_per_tok
    idle = [(l, e) for l, a in enumerate(acts["blocks"]) for e in np.flatnonzero(a["counts"] == 0)]
    earlier = forward(p, inputs[0, 0][:, :-1], targets[0, 0][:, :-1], cfg)["logits"]
    promises = disk_promises(name, cfg, p) + [
        (f"{name}: every pair is counted", all(a["counts"].sum() == pairs for a in acts["blocks"])),
        (f"{name}: a position does not see later ones", same_bits(earlier, acts["logits"][:, :-1].copy())),
        (f"{name}: a loss is 0 where the target is negative", np.array_equal(acts["losses"] == 0, targets[0, 0] < 0)),
        (f"{name}: experts without rows have no gradient, others have",
         all(np.any(g[key][l, e]) == ((l, e) not in idle) for key in ("gate_up", "down")
             for l, e in np.ndindex(g["down"].shape[:2]))),
    ]
    if name != "moe_odd":
        promises.append((f"{name}: there is an expert without rows", bool(idle)))
    return promises


def promises():
    """What must hold before a golden file is written, as (promise, kept) pairs."""
    out = router_promises() + row_promises() + bias_promises() + rope_promises() + table_promises()
    for name, run in RUNS.items():
        out += run_promises(name, run)
    return out + all_slope_promises()
