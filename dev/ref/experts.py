"""
The mixture of experts of DeepSeek V4 and of GLM-5: a router whose scores are no softmax, experts, a shared one that
sees every position, and what keeps their loads alike. NumPy and the standard library only.

DeepSeek-AI 2024, arXiv:2412.19437: sigmoid scores, groups, bias, balance of a sequence; llmc/ops/router.h.

N positions, E experts, k of them chosen, F their width, D channels. Of a position's logits z (E):
    score      sigmoid(z), or sqrt(softplus(z)), softplus(z) = log1p(exp(z)), z above 20
    choice     c = s + bias, a NaN is less than all. Of several groups, of E / groups neighbours each, first the
               top_groups of the largest scores stay, a group's score being its largest c + its second. Then the k of
               the largest c. Ties go to the lower number, chosen ones are ascending. Or k experts are given: in their
               order, twice the same is two
    weights    w = (s / (chain of the chosen s + 1e-20)) factor; not renormalised: s factor
    experts    sum: a chain over a position's experts of weight * output, then + the shared one's
    dw         of a pair the chain over f of (dout Wd) * hidden
    ds         of a chosen one ((dw - dot) / (sum + 1e-20)) factor, dot the chain of (w / factor) dw; not renormalised:
               dw factor. An expert that stands twice adds both to 0
    balance    of a row of the batch, T positions: c_e, how often e stands in it, t = the chain of a position's s
               + 1e-20, P_e = (chain over positions of s / t) / T; balance = E * chain of (c_e / (T k)) P_e
               its gradient, of a weight: q = ((weight E) (c / (T k))) / T, ds_e += (q_e - chain of q (s / t)) / t
    dz         ds times the slope: s (1 - s), or sigmoid(z) / (2 s), z below -20: s / 2
    dx         a chain over the router's outputs, on over the shared expert's gate and up; rows of the position's
               experts are added to it, ascending
    bias       after an update, of c over all leaves: bias += rate sign((sum of c) / E - c)
A Config has for it `router`, n_routed_experts, swiglu_limit, seq_balance_coef, bias_update_rate, batch, leaves.
"""
from typing import NamedTuple

import numpy as np

from exact import F4, chain_dot, chain_sum, tree_sum
from gated_delta import softplus
from ops import combine, expert_rows, load_share, rows, sigmoid, swiglu_backward, swiglu_forward

TINY = 1e-20
SIGMOID, SQRT_SOFTPLUS = "sigmoid", "sqrtsoftplus"


class Router(NamedTuple):
    score: str
    k: int
    factor: float
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1


# ---------------------------------------------------------------------------------------------------------------------
# The router.
# ---------------------------------------------------------------------------------------------------------------------
def scores_of(z, router):
    return sigmoid(z) if router.score == SIGMOID else np.sqrt(softplus(z))


def slope_of(z, s, router):
    """ds / dz"""
    one, half, two = (z.dtype.type(x) for x in (1, 0.5, 2))
    if router.score == SIGMOID:
        return s * (one - s)
    return np.where(z < -20, half * s, sigmoid(z) / (two * np.where(z < -20, half, s)))


def no_nan(c):
    return np.where(np.isnan(c), -np.inf, c).astype(c.dtype)


def largest(c, k, may=True):
    """(N, k): the places of the k largest of c (N, E), of those that may be chosen, ascending; ties go to the lower"""
    order = np.lexsort((-no_nan(c), np.broadcast_to(np.logical_not(may), c.shape)))  # stable
    return np.sort(order[:, :k], axis=-1)


def staying(c, router):
    """(N, E): is the expert's group one of those that stay?"""
    first, second = np.moveaxis(np.sort(no_nan(c).reshape(len(c), router.groups, -1))[..., :-3:-1], -1, 0)
    stays = np.zeros(first.shape, bool)
    np.put_along_axis(stays, largest(first + second, router.top_groups), True, axis=-1)
    return np.repeat(stays, c.shape[1] // router.groups, axis=-1)


def choose(c, router):
    """(N, k)"""
    return largest(c, router.k, staying(c, router) if router.groups > 1 else True)


def router_forward(z, router, bias=None, given=None):
    """scores (N, E), experts and weights (N, k). given (N, k): nothing is chosen"""
    s = scores_of(z, router)
    if given is None:
        given = choose(s if bias is None else s + bias, router)
    chosen = np.take_along_axis(s, given, axis=-1)
    share = chosen / below(chosen) if router.renormalize else chosen
    return s, given.astype(np.int32), share * z.dtype.type(router.factor)


def below(s):
    """What scores are divided by (N, 1)"""
    return (chain_sum(s) + s.dtype.type(TINY))[:, None]


def router_backward(dw, s, experts, weights, router):
    """ds (N, E) of the weights' gradient"""
    factor, ds, d = s.dtype.type(router.factor), np.zeros_like(s), dw
    if router.renormalize:
        dot = chain_dot(weights / factor, dw)[:, None]
        d = (dw - dot) / below(np.take_along_axis(s, experts, axis=-1))
    d = d * factor
    for j in range(experts.shape[1]):
        ds[np.arange(len(s)), experts[:, j]] += d[:, j]
    return ds


# ---------------------------------------------------------------------------------------------------------------------
# Alike loads: a loss for each row of the batch, and a bias that no gradient reaches.
# ---------------------------------------------------------------------------------------------------------------------
def sequence_load(s, experts):
    """f (E), the share of a sequence's pairs that each expert has; s / t (T, E). Of one row of the batch"""
    counts = np.bincount(experts.reshape(-1), minlength=s.shape[-1])
    return load_share(counts, experts.shape, s.dtype), s / below(s)


def sequence_balance(s, experts):
    """E times the sum of f P: 1 where all experts have as much to do"""
    f, share = sequence_load(s, experts)
    P = chain_sum(share, axis=0) / s.dtype.type(len(s))
    return s.dtype.type(len(f)) * chain_dot(f, P)


def sequence_balance_backward(s, experts, weight):
    """ds (T, E) of weight * balance"""
    f, share = sequence_load(s, experts)
    q = ((s.dtype.type(weight) * s.dtype.type(len(f))) * f) / s.dtype.type(len(s))
    return (q - chain_dot(np.broadcast_to(q, share.shape), share)[:, None]) / below(s)


def balance_weight(cfg, scalar):
    return scalar(cfg.seq_balance_coef) * (scalar(1) / scalar(cfg.batch * cfg.leaves))


def balance_of(a):
    """Of one layer of a leaf: the mean over its rows"""
    balances = [sequence_balance(s, e) for s, e in zip(a["scores"], a["experts"])]
    return chain_sum(np.stack(balances)) / a["scores"].dtype.type(len(balances))


def balance_of_layers(acts, layers):
    """Means over the leaves, summed over layers"""
    means = [tree_sum([balance_of(leaf["blocks"][l]) for leaf in acts]) / acts[0]["losses"].dtype.type(len(acts))
             for l in layers]
    return chain_sum(np.stack(means))


def level_biases(bias, counts, cfg):
    """An expert with less load than the mean gets a step up, others down. bias (L, E) of layers with these counts"""
    counts = counts.astype(F4)
    return bias + F4(cfg.bias_update_rate) * np.sign((chain_sum(counts) / F4(counts.shape[-1]))[..., None] - counts)


# ---------------------------------------------------------------------------------------------------------------------
# The experts of one layer: x is the normed input.
# ---------------------------------------------------------------------------------------------------------------------
def moe_forward(x, layer, cfg, a, given=None):
    """given (B, T, k): experts that the token decided on, or None"""
    w, k, positions, limit = layer.w, cfg.router.k, x.shape[:2], cfg.swiglu_limit
    a["router_logits"] = layer.linear("router", x)
    s, experts, weights = router_forward(rows(a["router_logits"]), cfg.router, w.get("selection_bias"),
                                         None if given is None else rows(given))
    a["scores"] = s.reshape(a["router_logits"].shape)
    a["experts"], a["weights"] = experts.reshape(*positions, k), weights.reshape(*positions, k)
    a["counts"] = np.bincount(experts.reshape(-1), minlength=cfg.n_routed_experts).astype(np.int32)
    pair, slot, ranges = expert_rows(experts, cfg.n_routed_experts)
    a["expert_gate_up"] = layer.linear("expert_gate_up", rows(x)[pair // k], ranges)
    a["expert_hidden"] = swiglu_forward(a["expert_gate_up"], limit)
    a["expert_out"] = layer.linear("expert_down", a["expert_hidden"], ranges)
    a["shared_gate_up"] = layer.linear("shared_gate_up", x)
    a["shared_hidden"] = swiglu_forward(a["shared_gate_up"], limit)
    a["shared_out"] = layer.linear("shared_down", a["shared_hidden"])
    a["moe"] = combine(a["expert_out"], slot, weights).reshape(x.shape) + a["shared_out"]


def moe_backward(dout, x, layer, cfg, a, has_balance):
    """dx"""
    k, limit, scalar = cfg.router.k, cfg.swiglu_limit, x.dtype.type
    flat, experts, weights = rows(x), rows(a["experts"]), rows(a["weights"])
    pair, slot, ranges = expert_rows(experts, cfg.n_routed_experts)
    token, weight = pair // k, weights.reshape(-1)[pair][:, None]
    dhidden = layer.linear_backward("expert_down", rows(dout)[token], a["expert_hidden"], None, ranges, weight)
    dweights = chain_dot(dhidden, a["expert_hidden"])[slot]
    dpre = swiglu_backward(weight * dhidden, a["expert_gate_up"], limit)
    drows = layer.linear_backward("expert_gate_up", dpre, flat[token], None, ranges)
    z, s = rows(a["router_logits"]), rows(a["scores"])
    ds = router_backward(dweights, s, experts, weights, cfg.router)
    if has_balance:
        ds = ds + np.concatenate([sequence_balance_backward(row, e, balance_weight(cfg, scalar))
                                  for row, e in zip(a["scores"], a["experts"])])
    dx = layer.linear_backward("router", ds * slope_of(z, s, cfg.router), flat)
    dhidden = layer.linear_backward("shared_down", dout, a["shared_hidden"])
    dpre = swiglu_backward(dhidden, a["shared_gate_up"], limit)
    dx = layer.linear_backward("shared_gate_up", rows(dpre), flat, dx)
    for j in range(k):
        dx = dx + drows[slot[:, j]]
    return dx.reshape(x.shape)
