"""
GPT-2 in NumPy: the reference that train_gpt2.c must equal bit for bit. NumPy and the standard library only.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": a decoder-only transformer with LayerNorm
before each half of a block, learned positions, GELU and an output projection tied to the token embedding. Dropout is that of
the embeddings and of each half of a block, not of attention's weights.

    python dev/ref/gpt2.py [--out DIR]     check the reference, then write the golden files (default: dev/golden)
    python dev/ref/gpt2.py --upstream      run with karpathy/llm.c's laws; compare with fingerprints of its C program
    python dev/ref/gpt2.py --from DIR --probe IN --probe-out OUT
                                           logits, loss and gradients of one batch for a Hugging Face folder

The golden files have the layout that trainer.py describes, with the names and layouts of Hugging Face: c_attn, c_proj
and c_fc are (in, out), wte has V rows; att and preatt are (L, B, NH, T, T) with 0 after the diagonal.

How a number comes about, in one sentence: float32, each + - * / rounded once, every sum a chain with ascending index,
products in it by fused multiply-add, functions correctly rounded (exact.py). In shapes N = B*T positions, C channels,
HS = C / NH, Vp = V rounded up to 128.
"""
import ctypes
import ctypes.util
import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np

import exact
import trainer
from exact import F4, fnv1a
from ops import (attention_backward, attention_scale, attention_value_backward, attention_weights, classifier_backward,
                 classifier_forward, embedding_backward, embedding_forward, layernorm_backward, layernorm_forward,
                 linear_backward, linear_forward, merge_heads, over_keys, split_heads)
from trainer import Row, from_disk, to_disk


# ---------------------------------------------------------------------------------------------------------------------
# Config and the parameter table. Everything about a parameter is on its line.
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config(trainer.Run):
    vocab_size: int            # V
    n_positions: int           # maxT, rows of the position table
    n_layer: int               # L
    n_head: int                # NH
    n_embd: int                # C
    dropout: float = 0.0       # share of the elements that are left out, with this seed
    seed: int = 0
    place: tuple = (0, 0)      # step and leaf that are computed

    @property
    def padded_vocab_size(self):
        return -(-self.vocab_size // 128) * 128


def parameter_table(cfg):
    """Kinds: embeddings and linear layers are decayed, gains and biases are not; a gain starts around 1."""
    Vp, L, C = cfg.padded_vocab_size, cfg.n_layer, cfg.n_embd
    block = "transformer.h.{}."
    return [
        Row("wte",      (Vp, C),              "embedding", "transformer.wte.weight"),  # rows V.. are zero
        Row("wpe",      (cfg.n_positions, C), "embedding", "transformer.wpe.weight"),
        Row("ln1w",     (L, C),               "gain",      block + "ln_1.weight"),
        Row("ln1b",     (L, C),               "bias",      block + "ln_1.bias"),
        Row("qkvw",     (L, 3 * C, C),        "linear",    block + "attn.c_attn.weight"),
        Row("qkvb",     (L, 3 * C),           "bias",      block + "attn.c_attn.bias"),
        Row("attprojw", (L, C, C),            "linear",    block + "attn.c_proj.weight"),
        Row("attprojb", (L, C),               "bias",      block + "attn.c_proj.bias"),
        Row("ln2w",     (L, C),               "gain",      block + "ln_2.weight"),
        Row("ln2b",     (L, C),               "bias",      block + "ln_2.bias"),
        Row("fcw",      (L, 4 * C, C),        "linear",    block + "mlp.c_fc.weight"),
        Row("fcb",      (L, 4 * C),           "bias",      block + "mlp.c_fc.bias"),
        Row("fcprojw",  (L, C, 4 * C),        "linear",    block + "mlp.c_proj.weight"),
        Row("fcprojb",  (L, C),               "bias",      block + "mlp.c_proj.bias"),
        Row("lnfw",     (C,),                 "gain",      "transformer.ln_f.weight"),
        Row("lnfb",     (C,),                 "bias",      "transformer.ln_f.bias"),
    ]


def draw_parameters(cfg, matrix_spread, vector_spread):
    """Start values from one xorshift* stream, tensors in order: spread * (u - 1/2), plus 1 for gains."""
    stream, p = exact.Xorshift(1337), {}
    for row in parameter_table(cfg):
        shape = (cfg.vocab_size, cfg.n_embd) if row.name == "wte" else row.shape  # padding draws nothing
        noise = stream.floats(math.prod(shape)).reshape(shape) - F4(0.5)
        noise = noise * F4(matrix_spread if row.is_decayed else vector_spread)
        p[row.name] = F4(1) + noise if row.kind == "gain" else noise
    padding = np.zeros((cfg.padded_vocab_size - cfg.vocab_size, cfg.n_embd), F4)
    p["wte"] = np.concatenate([p["wte"], padding])
    return p


def to_file(row, x, cfg):
    """One tensor as Hugging Face has it: matrices of linear layers (in, out), wte without padding."""
    if row.name == "wte":
        return x[:cfg.vocab_size]
    return x.T if row.kind == "linear" else x


def from_file(row, x, cfg):
    """The inverse of to_file."""
    if row.name == "wte":
        return np.concatenate([x, zeros(cfg.padded_vocab_size - cfg.vocab_size, cfg.n_embd)])
    return x.T if row.kind == "linear" else x


# ---------------------------------------------------------------------------------------------------------------------
# The operations that are GPT-2's own, each forward with its backward. x, dout and their kin are (B, T, channels).
# ---------------------------------------------------------------------------------------------------------------------
def zeros(*shape):
    return np.zeros(shape, F4)


GELU_K = np.sqrt(F4(2 / math.pi))  # the square root in float32: in float64 it would come out one unit higher
GELU_CUBE = F4(0.044715)


def gelu_forward(x, laws):
    cube = ((GELU_CUBE * x) * x) * x
    return (F4(0.5) * x) * (F4(1) + laws.tanh(GELU_K * (x + cube)))


def gelu_backward(dout, x, laws):
    u = GELU_K * (x + ((GELU_CUBE * x) * x) * x)
    cosh_u = laws.cosh(u)
    sech2 = F4(1) / (cosh_u * cosh_u)  # cosh may overflow to infinity, sech2 is then 0, its limit
    slope = F4(1) + ((F4(3) * GELU_CUBE) * x) * x
    local = F4(0.5) * (F4(1) + laws.tanh(u)) + (((x * F4(0.5)) * sech2) * GELU_K) * slope
    return local * dout


def split_qkv(qkv, NH):
    """(B, T, 3C) -> q, k, v, each (B, NH, T, HS)"""
    return [split_heads(x, NH) for x in np.split(qkv, 3, axis=-1)]


# Sites of dropout: the embeddings, then both halves of each block.
EMBEDDING, ATTENTION, MLP = 0, 1, 2


def drop(x, cfg, site):
    """Forward of activations, backward of their gradients: x (B, T, C) without what this leaf leaves out."""
    step, leaf = cfg.place
    return exact.dropout(x, cfg.dropout, cfg.seed, step, site, leaf * x.size)


# ---------------------------------------------------------------------------------------------------------------------
# Laws: what differs between this project and karpathy/llm.c. Ours need no C library; upstream's stand at the end.
# ---------------------------------------------------------------------------------------------------------------------
EXACT = SimpleNamespace(exp=exact.exp, log=exact.log, tanh=exact.tanh, cosh=exact.cosh,
                        attention_backward=attention_backward, bias_corrections=exact.bias_corrections)


# ---------------------------------------------------------------------------------------------------------------------
# The model. One micro-batch, forward and backward.
# ---------------------------------------------------------------------------------------------------------------------
def forward(p, inputs, targets, cfg, laws=EXACT):
    """Every activation of one micro-batch; those of the blocks in acts["blocks"][l]."""
    NH, V = cfg.n_head, cfg.vocab_size
    acts, blocks = {}, []
    residual = acts["encoded"] = drop(embedding_forward(p["wte"], p["wpe"], inputs), cfg, EMBEDDING)
    for l in range(cfg.n_layer):
        a = {}
        a["ln1"], a["ln1_mean"], a["ln1_rstd"] = layernorm_forward(residual, p["ln1w"][l], p["ln1b"][l])
        a["qkv"] = linear_forward(a["ln1"], p["qkvw"][l], p["qkvb"][l])
        q, k, v = split_qkv(a["qkv"], NH)
        preatt, att, _, _ = attention_weights(q, k, laws)
        a["atty"], a["preatt"], a["att"] = merge_heads(over_keys(att, v)), preatt, att
        a["attproj"] = linear_forward(a["atty"], p["attprojw"][l], p["attprojb"][l])
        a["residual2"] = residual + drop(a["attproj"], cfg, ATTENTION + 2 * l)
        a["ln2"], a["ln2_mean"], a["ln2_rstd"] = layernorm_forward(a["residual2"], p["ln2w"][l], p["ln2b"][l])
        a["fch"] = linear_forward(a["ln2"], p["fcw"][l], p["fcb"][l])
        a["fch_gelu"] = gelu_forward(a["fch"], laws)
        a["fcproj"] = linear_forward(a["fch_gelu"], p["fcprojw"][l], p["fcprojb"][l])
        residual = a["residual3"] = a["residual2"] + drop(a["fcproj"], cfg, MLP + 2 * l)
        blocks.append(a)
    acts["blocks"] = blocks
    acts["lnf"], acts["lnf_mean"], acts["lnf_rstd"] = layernorm_forward(residual, p["lnfw"], p["lnfb"])
    acts["logits"] = linear_forward(acts["lnf"], p["wte"])
    acts["probs"], acts["losses"] = classifier_forward(acts["logits"], targets, V, laws)
    return acts


def backward(p, acts, inputs, targets, count, cfg, laws=EXACT):
    """Parameter gradients of one micro-batch: forward upside down. `count`: counted targets of the whole update."""
    g = {row.name: zeros(*row.shape) for row in parameter_table(cfg)}
    blocks = acts["blocks"]
    dlogits = classifier_backward(acts["probs"], targets, cfg.vocab_size, count)
    dlnf, g["wte"], _ = linear_backward(dlogits, acts["lnf"], p["wte"])
    residual = blocks[-1]["residual3"]
    dx, g["lnfw"], g["lnfb"] = layernorm_backward(dlnf, residual, p["lnfw"], acts["lnf_mean"], acts["lnf_rstd"])
    dresidual = zeros(*dx.shape) + dx
    for l in reversed(range(cfg.n_layer)):
        a = blocks[l]
        residual = blocks[l - 1]["residual3"] if l > 0 else acts["encoded"]
        dfcproj = drop(dresidual, cfg, MLP + 2 * l)
        dfch_gelu, g["fcprojw"][l], g["fcprojb"][l] = linear_backward(dfcproj, a["fch_gelu"], p["fcprojw"][l])
        dfch = gelu_backward(dfch_gelu, a["fch"], laws)
        dln2, g["fcw"][l], g["fcb"][l] = linear_backward(dfch, a["ln2"], p["fcw"][l])
        dx, g["ln2w"][l], g["ln2b"][l] = layernorm_backward(dln2, a["residual2"], p["ln2w"][l],
                                                            a["ln2_mean"], a["ln2_rstd"])
        dresidual = dresidual + dx
        dattproj = drop(dresidual, cfg, ATTENTION + 2 * l)
        datty, g["attprojw"][l], g["attprojb"][l] = linear_backward(dattproj, a["atty"], p["attprojw"][l])
        heads = (*split_qkv(a["qkv"], cfg.n_head), a["att"])
        dheads = laws.attention_backward(split_heads(datty, cfg.n_head), *heads)
        dqkv = np.concatenate([merge_heads(d) for d in dheads], axis=-1)
        dln1, g["qkvw"][l], g["qkvb"][l] = linear_backward(dqkv, a["ln1"], p["qkvw"][l])
        dx, g["ln1w"][l], g["ln1b"][l] = layernorm_backward(dln1, residual, p["ln1w"][l],
                                                            a["ln1_mean"], a["ln1_rstd"])
        dresidual = dresidual + dx
    embedding_backward(g["wte"], g["wpe"], drop(dresidual, cfg, EMBEDDING), inputs)
    return g


def config_metadata(cfg):
    values = {"vocab_size": cfg.vocab_size, "padded_vocab_size": cfg.padded_vocab_size, **trainer.metadata(cfg)}
    unused = ("place",) if cfg.dropout else ("place", "dropout", "seed")
    return {key: value for key, value in values.items() if key not in unused}


def read_config(hf, path, batch, seq_len):
    settings = [hf.get(key) for key in ("activation_function", "layer_norm_epsilon", "n_inner")]
    if settings[:2] != ["gelu_new", 1e-5] or settings[2] not in (None, 4 * hf["n_embd"]):
        raise SystemExit(f"{path}: expected gelu_new, epsilon 1e-5 and n_inner null, found {settings}")
    return Config(hf["vocab_size"], hf["n_positions"], hf["n_layer"], hf["n_head"], hf["n_embd"], batch=batch,
                  seq_len=seq_len)


MODEL = trainer.Model(parameter_table, forward, backward, read_config, config_metadata, to_file, from_file,
                      lambda cfg, step, leaf: replace(cfg, place=(step, leaf)))


# ---------------------------------------------------------------------------------------------------------------------
# The golden runs. "base" is the self-contained run that llm.c's fingerprints below are for. "odd" has sizes that divide
# nothing, several leaves, targets that are not counted, an active clip and attention that is far from uniform. "dropout" leaves
# out three elements in ten, others in each leaf of each update.
# ---------------------------------------------------------------------------------------------------------------------
BASE = Config(vocab_size=97, n_positions=32, n_layer=2, n_head=2, n_embd=32, batch=4, seq_len=16)
ODD = Config(vocab_size=131, n_positions=19, n_layer=3, n_head=3, n_embd=33, batch=3, seq_len=13, leaves=3, lr=2e-3,
             schedule="cosine", warmup=3, final_lr=0.1, beta2=0.95, clip=0.5)
DROPOUT = Config(vocab_size=61, n_positions=11, n_layer=2, n_head=2, n_embd=20, batch=2, seq_len=9, leaves=3, dropout=0.3,
                 seed=5)


def base_run():
    inputs, targets = trainer.draw_data(BASE)
    return BASE, draw_parameters(BASE, matrix_spread=0.25, vector_spread=0.125), inputs, targets


def odd_run():
    inputs, targets = trainer.draw_data(ODD)
    trainer.ignore_targets(targets)
    targets[0, 0, 1] = -1  # a row without a counted target
    targets[4, 2] = -1     # a leaf without one
    return ODD, draw_parameters(ODD, matrix_spread=1.0, vector_spread=0.5), inputs, targets


def dropout_run():
    return DROPOUT, draw_parameters(DROPOUT, matrix_spread=0.5, vector_spread=0.25), *trainer.draw_data(DROPOUT)


def write_golden(folder):
    for name, run in (("gpt2_base", base_run), ("gpt2_odd", odd_run), ("gpt2_dropout", dropout_run)):
        trainer.write_golden(folder, name, MODEL, *run())
    settings = {"steps": 50, "lr": 3e-4, "warmup": 7, "final_lr": 0.1}
    tables = {schedule: np.array([exact.learning_rate(schedule, s, 50, 3e-4, 7, 0.1) for s in range(50)], F4)
              for schedule in ("constant", "linear", "cosine", "wsd")}
    trainer.write_file(folder, "schedules", tables, settings)


# ---------------------------------------------------------------------------------------------------------------------
# Checks against fingerprints of karpathy/llm.c (gcc -O3 -ffp-contract=off, glibc 2.36, x86-64) on the base run. Those
# in BASE_HASHES use no library function and no chain of products, so every law must reproduce them; the others are for
# upstream's laws only.
# ---------------------------------------------------------------------------------------------------------------------
BASE_HASHES = {"parameters": 0x43e1fefdbaaeedc0, "encoded": 0x16a3a16914174782}
UPSTREAM_HASHES = {"ln1": 0x5f58d7c9fb5f5a25, "qkv": 0x13ae4dd74a280ee5, "preatt": 0x5f0d13d93f71efbd,
                   "atty": 0xa668c8b034323973, "fch_gelu": 0x081d15a82bde98c6, "logits": 0xeb9b6576c6692898,
                   "probs": 0x453f28ad13c74206}
UPSTREAM_GRADIENTS = [
    0x2b3299c5826aa8bd, 0x3ef4557b02838f59, 0x8f2746a755fb927d, 0x6064d73bdb35d438, 0x9bbe7fdc1c57fa8b,
    0x8a035b7382bb03aa, 0xb780eda4be8ab823, 0xd1c7af19e224bc98, 0x6b189977bfb504cf, 0x59f5b35784e788cd,
    0x2dddcf4a4ee6e38d, 0x4703b0cfdaeaf2fe, 0x0bb0d906ab035c4a, 0x2ec2aec90b1850da, 0xd6bc3a5e530c5c74,
    0x7f013d8010a402b6]
UPSTREAM_STEPS = {  # step: bits of the loss, hash of the parameters after the update
    0: (0x40990aa9, 0xfa60f63cc0590a75), 1: (0x409788b1, 0xc1f8f7ee65385c55), 2: (0x4094bb51, 0x827ff46bb29f5e7d),
    3: (0x40957dcc, 0x8f02a8a213a66b88), 4: (0x40953165, 0x275962bd3abeeb2a), 9: (0x40956d0d, 0x815f6be84059319e),
    14: (0x40953822, 0x357381d3a8ad1057), 19: (0x409197f6, 0xd3805a375ff9f25c)}


def base_promises():
    """What must hold before a golden file is written, as (promise, kept) pairs."""
    cfg, p, inputs, targets = base_run()
    acts = forward(p, inputs[0, 0], targets[0, 0], cfg)
    block = acts["blocks"][0]
    found = {"parameters": fnv1a(*p.values()), "encoded": fnv1a(acts["encoded"])}
    n_activations = sum(x.size for key, x in acts.items() if key != "blocks")
    n_activations += sum(x.size for a in acts["blocks"] for x in a.values())
    first, last = inputs[0, 0].reshape(-1)[:4], targets[0, 0, -1, -1]
    gelu_bits = [exact.bits(GELU_K), exact.bits(F4(3) * GELU_CUBE)]
    promises = [
        ("first parameters", [exact.bits(x) for x in p["wte"][0, :2]] == [0xbd8a13dc, 0xbd9e7464]),
        ("tokens of step 0", list(first) == [82, 85, 62, 39] and last == 1),
        ("number of activations", n_activations == 103104),
        ("constants of GELU", gelu_bits == [0x3f4c4229, 0x3e095d4e]),
        ("disk layout and back", all(np.array_equal(x, p[name])
                                     for name, x in from_disk(MODEL, to_disk(MODEL, p, cfg), cfg).items())),
    ]
    return promises + [(f"hash of {key}", found[key] == value) for key, value in BASE_HASHES.items()]


# Upstream's laws: libm's functions, the quadratic form of softmax backward, the scale on each term, powf, decay of all.
def upstream_attention_backward(dout, q, k, v, att):
    T, HS = q.shape[2:]
    scale = attention_scale(q)
    datt, dv = attention_value_backward(dout, v, att)
    dpre = np.zeros_like(att)
    for u in range(T):  # rows t >= u; columns w > t have att = 0 and get only zeros
        is_u = (np.arange(T) == u).astype(F4)
        dpre[:, :, u:] += (att[:, :, u:, u, None] * (is_u - att[:, :, u:])) * datt[:, :, u:, u, None]
    dq, dk = np.zeros_like(q), np.zeros_like(k)
    for u in range(T):
        dq[:, :, u:] += (k[:, :, u, None, :] * dpre[:, :, u:, u, None]) * scale
    for t in range(T):
        dk[:, :, :t + 1] += (q[:, :, t, None, :] * dpre[:, :, t, :t + 1, None]) * scale
    return dq, dk, dv


def upstream_laws():
    libm = ctypes.CDLL(ctypes.util.find_library("m"))

    def elementwise(name):
        function = getattr(libm, name)
        function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
        return lambda x: np.array([function(value) for value in x.reshape(-1).tolist()], F4).reshape(x.shape)

    libm.powf.restype, libm.powf.argtypes = ctypes.c_float, [ctypes.c_float, ctypes.c_float]
    return SimpleNamespace(
        exp=elementwise("expf"), log=elementwise("logf"), tanh=elementwise("tanhf"), cosh=elementwise("coshf"),
        attention_backward=upstream_attention_backward,
        bias_corrections=lambda beta1, beta2, t: tuple(F4(1) - F4(libm.powf(beta, t)) for beta in (beta1, beta2)))


LIBM_PROBE = 0xa866aa94a68f5419  # of glibc 2.36, x86-64


def libm_probe(laws):
    """A hash of the library's results on arguments of the sizes that occur in the base run."""
    x = np.arange(-4000, 4001, dtype=F4) / F4(1024)
    powers = np.array([laws.bias_corrections(0.9, 0.999, t) for t in range(1, 41)], F4)
    return fnv1a(laws.exp(x), laws.log(abs(x) + F4(1e-3)), laws.tanh(x), laws.cosh(x), powers)


def upstream_promises(laws):
    exact.FUSED = False
    base, p, _, _ = base_run()
    cfg = replace(base, steps=20, decay_all=True)
    model = replace(MODEL, forward=partial(forward, laws=laws), backward=partial(backward, laws=laws))
    promises = []
    for r in trainer.train(model, cfg, p, *trainer.draw_data(cfg), bias_corrections=laws.bias_corrections):
        if r.step == 0:
            block = r.acts["blocks"][0]
            found = {"ln1": block["ln1"], "qkv": block["qkv"], "preatt": block["preatt"][0, 0, 15],
                     "atty": block["atty"], "fch_gelu": block["fch_gelu"], "logits": r.acts["logits"],
                     "probs": r.acts["probs"]}
            promises += [(f"hash of {key}", fnv1a(found[key]) == value) for key, value in UPSTREAM_HASHES.items()]
            promises += [(f"hash of gradient {name}", fnv1a(g + F4(0)) == value)  # -0 + 0 = +0
                         for (name, g), value in zip(r.grads.items(), UPSTREAM_GRADIENTS)]
        if r.step in UPSTREAM_STEPS:
            loss, parameters = UPSTREAM_STEPS[r.step]
            promises.append((f"loss of step {r.step}", exact.bits(r.loss) == loss))
            promises.append((f"hash of parameters after step {r.step}", fnv1a(*r.params.values()) == parameters))
    return promises


def check_upstream():
    laws = upstream_laws()
    found = libm_probe(laws)
    if found != LIBM_PROBE:
        print(f"skipped: another libm (probe {found:016x}, of glibc 2.36 {LIBM_PROBE:016x})")
        return 0
    return exact.report(base_promises() + upstream_promises(laws))


if __name__ == "__main__":
    sys.exit(trainer.main(MODEL, "GPT-2", base_promises, write_golden,
                          ("--upstream", "compare with the fingerprints of karpathy/llm.c", check_upstream)))
