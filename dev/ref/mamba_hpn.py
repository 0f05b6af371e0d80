"""
The reference that train_mamba_hpn.c must equal bit for bit. The model is in mamba.py; here are the golden runs and the
checks of the mathematics. NumPy and the standard library only.

    python dev/ref/mamba_hpn.py [--out DIR]     check the reference, then write the golden files (default: dev/golden)
    python dev/ref/mamba_hpn.py --check         check only
    python dev/ref/mamba_hpn.py --from DIR --probe IN --probe-out OUT
                                                logits (head hpn: cosines), loss and gradients of one batch for a folder

The golden files have the layout that trainer.py describes. Names of parameters are Hugging Face's, and hpn.prototypes
(V, Dp) and hpn.proj.weight (Dp, M); the gradient of fixed prototypes is 0. Activations:
    layers      norm, norm_rstd, xz, conv (before silu), u, dbc (dt, B, C), delta (after softplus), y, gated, out,
                residual (after)
    outside     encoded, normf, normf_rstd, losses; z_unit (heads on prototypes); logits (scaled) and probs (ce and
                hpn-softmax) or cosines to the own target, 0 where it is not counted (hpn)
"""
import sys
from dataclasses import replace

import numpy as np

import exact
import trainer
from exact import F4, F8
from mamba import (MODEL, Config, backward, carry_after, draw_parameters, forward, hpn_backward, hpn_forward,
                   parameter_table, scan_backward, scan_forward, softplus, softplus_backward,
                   sum_channels, unit_backward, unit_forward)
from ops import linear_forward, rows, silu, silu_slope

# ---------------------------------------------------------------------------------------------------------------------
# The golden runs. Together they have all heads, both kinds of prototypes, every optional bias, targets that are not
# counted, several leaves, an active clip, delta above softplus's threshold, and channels beyond one group of 64.
# ---------------------------------------------------------------------------------------------------------------------
CE = Config(vocab_size=61, num_hidden_layers=2, hidden_size=20, state_size=4, conv_kernel=4, batch=2, seq_len=11,
            leaves=2, lr=3e-3, schedule="cosine", warmup=3, final_lr=0.1, beta2=0.95, clip=0.5)
HPN = Config(vocab_size=37, num_hidden_layers=3, hidden_size=18, state_size=5, conv_kernel=3, expand=3, use_bias=True,
             use_conv_bias=False, layer_norm_epsilon=1e-3, head="hpn", proto_dim=12, batch=3, seq_len=7, lr=2e-3,
             schedule="linear", warmup=2, final_lr=0.05, clip=0.25, leaves=2)
SOFTMAX = Config(vocab_size=43, num_hidden_layers=2, hidden_size=36, state_size=3, conv_kernel=4, time_step_rank=2,
                 head="hpn-softmax", proto="learn", batch=2, seq_len=8, leaves=3, schedule="wsd", clip=2.0)


def ce_run():
    inputs, targets = trainer.draw_data(CE)
    return CE, draw_parameters(CE, matrix_spread=0.75, vector_spread=0.5), inputs, targets


def hpn_run():
    inputs, targets = trainer.draw_data(HPN)
    trainer.ignore_targets(targets)
    targets[0, 0, 1] = -1  # a row without a counted target
    targets[4, 1] = -1     # a leaf without one
    p = draw_parameters(HPN, matrix_spread=0.75, vector_spread=0.5)
    p["dt_proj_bias"][1, 3] = 21  # above softplus's threshold
    return HPN, p, inputs, targets


def softmax_run():
    inputs, targets = trainer.draw_data(SOFTMAX)
    trainer.ignore_targets(targets)
    return SOFTMAX, draw_parameters(SOFTMAX, matrix_spread=0.5, vector_spread=0.5), inputs, targets


RUNS = {"mamba_ce": ce_run, "mamba_hpn": hpn_run, "mamba_softmax": softmax_run}


def write_golden(folder):
    for name, run in RUNS.items():
        trainer.write_golden(folder, name, MODEL, *run())


# ---------------------------------------------------------------------------------------------------------------------
# Fixtures: numbers computed elsewhere in double precision, with 8 digits. The functions that make the golden files run
# on float64 here.
# ---------------------------------------------------------------------------------------------------------------------
def close(found, expected, relative=1e-6):
    return np.allclose(np.reshape(found, -1), np.reshape(expected, -1), rtol=relative, atol=0)


def numbers(text):
    return [float(word) for word in text.split()]


def scan_promises():
    """Selective scan with bias, softplus, D and gate: E = NS = 2, one row of 4. Arrays as [e][t], [n][t], [e][n]"""
    e, n, t = np.arange(2.0)[:, None], np.arange(2.0)[:, None], np.arange(4.0)

    def positions(x):  # [channel][t] -> (1, T, channel)
        return x.T[None]

    u, ssm_B, ssm_C = (positions(x) for x in (np.sin(0.7 * e + 0.9 * t + 0.1), np.cos(0.4 * n + 0.6 * t),
                                              np.sin(0.8 * n - 0.5 * t + 0.2)))
    z, dout = positions(0.6 * np.sin(0.3 * e - 0.7 * t + 0.5)), positions(np.cos(0.2 * e + 0.4 * t))
    A_log, D = np.log((n.T + 1) * (1 + 0.25 * e)), np.array([0.5, 0.3])
    delta = softplus(positions(0.2 * np.cos(0.5 * e + 0.3 * t)) + np.array([-0.4, -0.1]))
    y = scan_forward(u, delta, A_log, ssm_B, ssm_C, D)
    dy, dz = dout * silu(z), dout * y * silu_slope(z)
    du, ddelta, dA_log, dssm_B, dssm_C, dD, _ = scan_backward(dy, u, delta, A_log, ssm_B, ssm_C, D)
    dq = softplus_backward(ddelta, delta)
    found = {"out": y * silu(z), "du": du, "ddelta": dq, "dB": dssm_B, "dC": dssm_C, "dz": dz}
    found = {name: x[0].T for name, x in found.items()}  # back to [channel][t]
    found.update({"dbias": dq.sum(axis=(0, 1)), "dA": dA_log / -np.exp(A_log), "dD": dD})
    return [(f"scan fixture: {name}", close(found[name], numbers(text))) for name, text in SCAN_FIXTURE.items()]


SCAN_FIXTURE = {
    "out": "0.01776233 -0.023911787 -0.027357782 -0.0011036122 0.18941773 0.0087472444 0.025366455 0.088258359",
    "du": "0.20386672 0.011210631 -0.035196721 -0.060305441 0.26680192 0.02544081 -0.0055664842 -0.022283756",
    "ddelta": "0.0091425493 0.022487663 0.0044155983 -0.014501057 0.096722531 0.0082968897 -0.008507845 -0.0014832851",
    "dbias": "0.021544754 0.09502829",
    "dA": "0.031650623 0.00090711445 0.024123131 0.0010819538",
    "dD": "-0.17201374 0.18174017",
    "dB": "0.0362561 0.060103803 0.097744584 0.0061548974 0.12189478 -0.0014730997 0.0077306222 0.003062415",
    "dC": "0.14397251 -0.0026674834 -0.092024271 -0.02540233 0.13260746 -0.0030148255 -0.014763111 0.0014419434",
    "dz": "0.069361203 0.17309676 0.028824857 0.00040861227 0.50445869 0.12402594 -0.032452351 -0.016337041",
}

IDS, NEXT = np.array([[0, 3, 1, 5, 2]]), np.array([[3, 1, 5, 2, 4]])
MODEL_FIXTURE = Config(vocab_size=6, num_hidden_layers=2, hidden_size=4, state_size=3, conv_kernel=4, batch=1,
                       seq_len=5)

# tensor, layer, then L2 norm and first element of the gradient with head ce, and with head hpn
MODEL_GRADIENTS = """
embeddings 0 0.98744029 0.24283932 0.08088612 -0.054937174
norm 0 0.043178546 -0.029544001 0.045746062 0.015172788
in_proj 0 0.2317935 -0.010660648 0.047486709 0.0073548077
conv1d 0 0.17357133 0.0010503629 0.09083548 -0.00035664952
conv1d_bias 0 0.11945793 0.015060013 0.037068301 0.0039371818
x_proj 0 0.010553585 -0.0015111986 0.014138473 0.0011436726
dt_proj 0 0.015767268 -0.0030768607 0.014727223 0.0049646876
dt_proj_bias 0 0.0056548528 0.00022594057 0.0033883982 0.00037178624
A_log 0 0.0011373986 0.00039027795 0.0035047914 -0.0020099054
D 0 0.093031629 0.017592404 0.019973787 -0.0052811759
out_proj 0 0.81010241 0.041626387 0.33920102 -0.01943787
norm 1 0.22310038 0.004143492 0.089717265 -0.0019716513
in_proj 1 0.1911171 -0.010157513 0.1219636 -0.0093904922
conv1d 1 0.36729229 0.036371671 0.12336206 -0.027613043
conv1d_bias 1 0.17362492 0.099428162 0.054532597 -0.038023039
x_proj 1 0.076261032 0.019405364 0.035123613 -0.014521287
dt_proj 1 0.10183971 0.060428784 0.056953203 -0.049845563
dt_proj_bias 1 0.074881993 0.045118196 0.028447262 -0.023782627
A_log 1 0.0070458342 0.0039231781 0.0075023829 -0.0040641201
D 1 0.075916603 -0.012116841 0.015356077 0.0026509969
out_proj 1 1.3767813 0.29298943 0.88724237 0.16384479
norm_f 0 0.80489645 0.4881706 0.26648209 -0.080655714
"""

def wave(j, shape, base, amplitude):
    """The element rule of the fixtures; j numbers the tensors."""
    i = np.arange(np.prod(shape)).reshape(shape)
    return base + amplitude * np.sin(0.37 * (i + 1) + 1.3 * j)


def wave_parameters(cfg, order, prototypes):
    """order: name -> (base, amplitude), of one layer; it is numbered after the embedding, layer by layer."""
    table = {row.name: row.shape for row in parameter_table(cfg)}
    p, j = {"embeddings": wave(0, table["embeddings"], 0, 1)}, 1
    layers = []
    for _ in range(cfg.num_hidden_layers):
        layers.append({})
        for name, (base, amplitude) in order.items():
            layers[-1][name] = wave(j, table[name][1:], base, amplitude)
            j += 1
    p.update({name: np.stack([layer[name] for layer in layers]) for name in order})
    p["A_log"] = p["A_log"] + np.log(np.arange(1, cfg.state_size + 1))
    p["norm_f"] = wave(j, table["norm_f"], 1, 0.1)
    p["prototypes"] = wave(j + 1, (cfg.vocab_size, cfg.hidden_size), *prototypes)
    return p


def step_of(p, cfg):
    """Activations, loss and gradients of the fixtures' sentence"""
    acts = forward(p, IDS, NEXT, cfg)
    return acts, trainer.loss_of([acts["losses"]], NEXT.size), backward(p, acts, IDS, NEXT, NEXT.size, cfg)


def gradient_promises(label, lines, gradients, column):
    """The L2 norm and the first element of every gradient"""
    promises = []
    for line in lines.strip().split("\n"):
        name, l, *values = line.split()
        g = gradients[name] if name in ("embeddings", "norm_f") else gradients[name][int(l)]
        expected = [float(value) for value in values[2 * column:2 * column + 2]]
        found = [np.linalg.norm(g), g.reshape(-1)[0]]
        promises.append((f"{label}: gradient of {name}, layer {l}", close(found, expected)))
    return promises


def model_promises():
    p = wave_parameters(MODEL_FIXTURE, {
        "norm": (1, 0.1), "in_proj": (0, 0.9), "conv1d": (0, 0.8), "conv1d_bias": (0, 0.1), "x_proj": (0, 1),
        "dt_proj": (0, 1), "dt_proj_bias": (-1, 0.5), "A_log": (0, 0.1), "D": (1, 0.1), "out_proj": (0, 0.4)}, (0, 1))
    acts, loss, g = step_of(p, MODEL_FIXTURE)
    promises = [
        ("model fixture: hidden states", close(acts["normf"][0, [0, 4]], numbers(
            "0.62507385 0.80206773 1.1046051 1.2701888 -1.2680766 1.0907525 -0.93678008 0.68756809"))),
        ("model fixture: logits", close(acts["logits"][0, 4], numbers(
            "0.12258839 -0.71685683 -0.25258553 0.67105215 0.37427631 -0.60317966"))),
        ("model fixture: loss and norm", close([loss, exact.global_norm(g.values())], [2.7220862, 2.1360439])),
    ] + gradient_promises("model fixture, ce", MODEL_GRADIENTS, g, 0)
    acts, loss, g = step_of(p, replace(MODEL_FIXTURE, head="hpn"))
    cosines = linear_forward(acts["z_unit"], unit_forward(p["prototypes"])[0])
    return promises + [
        ("model fixture: loss and norm of hpn", close([loss, exact.global_norm(g.values())], [0.85559601, 1.0204504])),
        ("model fixture: cosines", close(acts["cosines"], numbers(
            "0.67585519 0.3548236 -0.27491934 -0.015550865 -0.04875864"))),
        ("model fixture: nearest prototypes", list(cosines[0].argmax(axis=-1)) == [2, 1, 3, 3, 1]),
    ] + gradient_promises("model fixture, hpn", MODEL_GRADIENTS, g, 1)


def head_promises():
    """The hpn loss alone: 6 rows, 5 prototypes"""
    r, c = np.arange(6.0)[:, None], np.arange(8.0)
    z, p = 0.7 * np.sin(0.03 * (8 * r + c)) + 0.1 * c, 0.6 * np.cos(0.02 * (8 * r[:5] + c + 11)) + 0.05 * r[:5]
    targets = np.array([0, 2, 1, 4, 3, 2])
    unit, norm = unit_forward(z)
    prototypes, lengths = unit_forward(p)
    cosines, losses = hpn_forward(unit, prototypes, targets)
    dunit, dp = hpn_backward(cosines, unit, prototypes, targets, 6)
    dz, dp = unit_backward(dunit, unit, norm), unit_backward(dp, prototypes, lengths)
    found = [losses.mean(), np.linalg.norm(dz), np.linalg.norm(dp), dz[0, 1], dp[0, 1]]
    return [("hpn fixture", close(found, [0.0084847212, 0.024325009, 0.023505147, -0.011485483, 0.007459477]))]


def update_promises():
    rates = {0: 1e-4, 4: 5e-4, 9: 1e-3, 10: 1e-3, 32: 8.7370291e-4, 55: 5.5e-4, 99: 1.0027413e-4}
    found = [exact.learning_rate("cosine", s, 100, 1e-3, 10, 0.1) for s in rates]
    p, m, v, values = np.array([0.5]), np.zeros(1), np.zeros(1), []
    for t, g in enumerate((0.1, -0.3, 0.2), 1):
        corrections = exact.bias_corrections(0.9, 0.999, t)
        p, m, v = exact.adamw(p, np.array([g]), m, v, 1e-3, 0.9, 0.999, 1e-8, 0.01, corrections)
        values.append(p[0])
    return [("schedule fixture", close(found, list(rates.values()))),
            ("AdamW fixture", close(values, [0.4989950001, 0.4994842, 0.4994604174]))]


# ---------------------------------------------------------------------------------------------------------------------
# Invariants of the golden runs: to the bit in float32, and finite differences in float64.
# ---------------------------------------------------------------------------------------------------------------------
def same_bits(a, b):
    return a.tobytes() == b.tobytes()


def in_pieces(cfg, p, inputs, targets, starts, cuts):
    """normf of rows that are cut at these positions, each piece from the state that the one before it left"""
    carry, out = None, []
    for piece in np.split(np.arange(inputs.shape[1]), cuts):
        flags = None if starts is None else starts[:, piece]
        acts = forward(p, inputs[:, piece], targets[:, piece], cfg, flags, carry)
        carry = carry_after(p, acts, cfg, flags, carry)
        out.append(acts["normf"])
    return np.concatenate(out, axis=1)


def split_promises(name, run):
    """Rows in pieces give what whole rows give, as in generation; a document sees nothing before it."""
    cfg, p, inputs, targets = run()
    inputs, targets = inputs[0, 0], targets[0, 0]
    starts = np.zeros(inputs.shape, bool)
    starts[0, 2] = starts[1, 1] = starts[1, 5] = True
    promises = []
    for flags, what in ((None, "no documents"), (starts, "documents")):
        whole = forward(p, inputs, targets, cfg, flags)["normf"]
        for cuts in ([1], [3], [4], range(1, cfg.seq_len)):
            found = in_pieces(cfg, p, inputs, targets, flags, cuts)
            promises.append((f"{name}: {what}, cut at {list(cuts)}: the same bits", same_bits(found, whole)))
    alone = forward(p, inputs[1:2, 5:], targets[1:2, 5:], cfg)["normf"]
    promises.append((f"{name}: a document does not see what was before", same_bits(alone, whole[1:2, 5:])))
    carry = [(None, np.ones((1, cfg.E, cfg.state_size), F4))] * cfg.num_hidden_layers
    moved = forward(p, inputs[1:2, 5:], targets[1:2, 5:], cfg, carry=carry)
    promises.append((f"{name}: a carried state is seen", not same_bits(moved["normf"], alone)))
    return promises


def sum_channels_by_element(x):
    """What mamba.sum_channels promises, one number at a time. x (E)"""
    total = F4(0)
    for begin in range(0, len(x), 64):
        lanes = [F4(0)] * 16
        for i, value in enumerate(x[begin:begin + 64]):
            lanes[i % 16] = lanes[i % 16] + value
        pairs = [lanes[l] + lanes[l + 8] for l in range(8)]
        fours = [pairs[l] + pairs[l + 4] for l in range(4)]
        total = total + ((fours[0] + fours[2]) + (fours[1] + fours[3]))
    return total


def order_promises():
    noise = exact.exp(F4(6) * exact.Xorshift(5).floats(200)) - F4(20)  # of several sizes and both signs
    kept = [sum_channels(noise[None, :n, None], F4(1))[0, 0] == sum_channels_by_element(noise[:n])
            for n in range(1, 201)]
    return [("channels add in groups, lanes and a tree", all(kept))]


def target_promises(name, run):
    """Targets that are not counted"""
    cfg, p, inputs, targets = run()
    losses = forward(p, inputs[0, 0], targets[0, 0], cfg)["losses"]
    return [(f"{name}: a loss is 0 where the target is negative", np.array_equal(losses == 0, targets[0, 0] < 0))]


def inserted_layer_promises():
    """A layer whose out_proj is 0 changes nothing, but learns."""
    cfg, p, inputs, targets = ce_run()
    inputs, targets = inputs[0, 0], targets[0, 0]
    layers = [row.name for row in parameter_table(cfg) if "{}" in row.disk]
    larger = {name: np.insert(x, 1, x[0], axis=0) if name in layers else x for name, x in p.items()}
    larger["out_proj"][1] = 0
    larger_cfg = replace(cfg, num_hidden_layers=3)
    acts = forward(larger, inputs, targets, larger_cfg)
    g = backward(larger, acts, inputs, targets, targets.size, larger_cfg)
    return [("an inserted layer with out_proj 0 changes no logit",
             same_bits(acts["logits"], forward(p, inputs, targets, cfg)["logits"])),
            ("its out_proj has a gradient, its other matrices have none",
             np.all(g["out_proj"][1] != 0) and not np.any(g["in_proj"][1]))]


def slope_promises(name, run, **changes):
    """Gradients in float64 against central differences, one random direction per tensor; with documents and carry."""
    cfg, p, inputs, targets = run()
    cfg, inputs, targets = replace(cfg, **changes), inputs[0, 0], targets[0, 0]
    rng = np.random.default_rng(3)
    p = {key: x.astype(F8) for key, x in p.items()}
    for row in parameter_table(cfg):
        if row.name not in p or p[row.name].shape != row.shape:  # a tensor that the changes bring with them
            p[row.name] = rng.normal(size=row.shape)
    starts = rng.random(inputs.shape) < 0.15
    B, E = len(inputs), cfg.E
    carry = [(rng.normal(size=(B, cfg.conv_kernel - 1, E)), rng.normal(size=(B, E, cfg.state_size)))
             for _ in range(cfg.num_hidden_layers)]
    count = int((targets >= 0).sum())

    def loss(p):
        return trainer.loss_of([forward(p, inputs, targets, cfg, starts, carry)["losses"]], count)
    g = backward(p, forward(p, inputs, targets, cfg, starts, carry), inputs, targets, count, cfg, starts, carry)
    worst, h = 0.0, 1e-5
    for key in (row.name for row in parameter_table(cfg)):
        if key == "prototypes" and cfg.proto == "fixed":
            continue
        direction = rng.normal(size=p[key].shape)
        slope = (loss({**p, key: p[key] + h * direction}) - loss({**p, key: p[key] - h * direction})) / (2 * h)
        size = np.linalg.norm(g[key]) * np.linalg.norm(direction)
        worst = max(worst, abs(slope - (g[key] * direction).sum()) / size)
    return [(f"{name}: gradients agree with differences of the loss", worst < 1e-7)]


def disk_promises(name, run):
    cfg, p, _, _ = run()
    back = trainer.from_disk(MODEL, trainer.to_disk(MODEL, p, cfg), cfg)
    return [(f"{name}: to disk and back", all(same_bits(x, p[key]) for key, x in back.items()))]


def promises():
    """What must hold before a golden file is written, as (promise, kept) pairs."""
    out = order_promises() + scan_promises() + model_promises() + head_promises() + update_promises()
    for name, run in RUNS.items():
        out += disk_promises(name, run) + target_promises(name, run)
        out += split_promises(name, run) + slope_promises(name, run)
    out += slope_promises("untied", ce_run, tie_word_embeddings=False)
    out += slope_promises("hpn, learned prototypes", hpn_run, proto="learn")
    return out + slope_promises("hpn-softmax, projection", softmax_run, proto_dim=7) + inserted_layer_promises()


if __name__ == "__main__":
    sys.exit(trainer.main(MODEL, "Mamba with a choice of heads", promises, write_golden,
                          ("--check", "check the reference and write nothing", lambda: exact.report(promises()))))
