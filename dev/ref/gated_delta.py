"""
The gated delta rule and what surrounds it in Qwen3.6, in NumPy: forward, backward, both of its laws.

Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks", arXiv:2412.06464. A head has a state S (dk, dv), a memory from
keys to values. A position lets it fade, reads what its key k finds there, corrects that towards its value v, and
answers its query q:
    S~ = exp(g) S     u = v - S~^T k     delta = beta u     S = S~ + k delta^T     o = S^T q        g <= 0, 0 < beta < 1
Shapes: q, k (B, T, Hk, dk), normalised, q scaled too (unit_heads); v, o (B, T, Hv, dv); g, beta (B, T, Hv); states
(B, Hv, dk, dv). Value head h reads key head h // R, R = Hv / Hk. starts (B, T) or None: 1 where a document begins,
where the state is 0. Arrays are float32, then every bit is defined (exact.py), or float64, for checks of the formulas.

Two laws:
    steps    the recurrence as above, position by position: the law of generation
    chunks   the law of training. A chunk is up to 64 positions of one document: chunks begin where a row and where a
             document begins, and the last one of a document is as short as it is; nothing is padded. Hence a packed row
             has the bits of its documents alone, and windows of a multiple of 64 positions, each with the state that
             the one before it left, have the bits of the whole.
They are the same function and round differently. Outputs, states and gradients of random data (dk 16 and 64, up to 300
positions), relative to the largest number of each, are off the float64 values by at most 8e-7 in steps; in chunks by
1.7e-6 where the mean of g is above -0.7, by 6e-6 where it is -2.7: differences of G there have the rounding errors of a
G of -170; by 1.3e-5 where single g are -60. Promised is 1e-5, of both laws from the truth and from each other, where
no g is below -20.

Chunk form. Within a chunk, with G_i = g_0 + ... + g_i, the state at its start S, and rows i and j:
    delta_i = beta_i u_i     u_i = v_i - exp(G_i) S^T k_i - sum over j < i of A_ij delta_j
    o_i = exp(G_i) S^T q_i + sum over j <= i of P_ij delta_j
    A_ij = (k_i . k_j) exp(G_i - G_j)     P_ij = (q_i . k_j) exp(G_i - G_j)
    S+ = exp(G_last) S + sum over i of exp(G_last - G_i) k_i delta_i^T
The paper's W and U are not formed: the triangular system is solved for delta itself, from the residual v - S^T k. That
takes fewer products, rounds better, and leaves one triangular system in backward too. Everything multiplied by is an
exponential of a difference that is at most 0.

The order, which defines the bits. A chain is acc = madd(a, b, acc), ascending; "on" means the same accumulator goes on;
-ab in a chain is madd(-a, b, acc). What is not in the stated range is no term. last is the chunk's last row.
    G_i             G_{i-1} + g_i, from 0
    eG, fG, Gam     exp(G_i), exp(G_last - G_i), exp(G_i - G_j); on the diagonal Gam is 1
    A, P            a chain over c, times Gam
    qg, kg, kf      q_i eG_i, k_i eG_i, k_i fG_i
    u_i             from v_i over c of -kg S, on over j < i of -A delta; delta_i = beta_i u_i
    o_i             from 0 over c of qg S, on over j <= i of P delta
    S+              from eG_last S over i of kf delta
    ddelta_j        from 0 over c of kf dS+, on over i >= j of P dO, on over i > j DESCENDING of -A du;
                    du_j = beta_j ddelta_j
    dv, dbeta       du; chain over d of ddelta u
    dS              from eG_last dS+ over i of qg dO, on over i of -kg du
    dP, dA          chains over d of dO_i delta_j, of -du_i delta_j; M, N: times Gam
    B, X, Z         chains over d of S dO_i, S du_i, dS+ delta_i, each (C, dk)
    dq_i            from eG_i B_i over j <= i of M_ij k_j
    dk_i            from fG_i Z_i, one -eG_i X_i, on over j < i of N_ij k_j, over j > i of N_ji k_j, over j >= i of
                    M_ji q_j
    dG_i            eG_i (chain over c of q B) - eG_i (chain over c of k X); on over j < i of dP_ij P_ij and dA_ij A_ij
                    in turn, over j > i of -dP_ji P_ji and -dA_ji A_ji in turn; minus z_i = fG_i (chain over c of k Z);
                    for the last: plus the sum of z, ascending, plus eG_last (for each d a chain over c of S dS+; their
                    sum, d ascending)
    dg_i            dg_{i+1} + dG_i, descending, from 0
    dq, dk          of a key head: the sum over its value heads, ascending, from 0
"""
import argparse
import os

import numpy as np

import exact
from exact import chain_dot, chain_matmul, chain_sum, madd
from ops import rows, sigmoid

CHUNK = 64


# ---------------------------------------------------------------------------------------------------------------------
# Around the recurrence: unit vectors of q and k, beta and g.
# ---------------------------------------------------------------------------------------------------------------------
def unit_forward(x, scale=None):
    """x / sqrt(sum of squares + 1e-6) along the last axis, times the scale; and 1 / that root"""
    one, eps = x.dtype.type(1), x.dtype.type(1e-6)
    r = one / np.sqrt(chain_dot(x, x) + eps)
    y = x * r[..., None]
    return (y if scale is None else y * scale), r


def unit_backward(dout, x, r, scale=None):
    dy = dout if scale is None else dout * scale
    y = x * r[..., None]
    return r[..., None] * (dy - y * chain_dot(dy, y)[..., None])


def query_scale(dk, dtype):
    return dtype.type(1) / np.sqrt(dtype.type(dk))


def softplus(x):
    return np.where(x > 20, x, exact.log1p(exact.exp(np.minimum(x, x.dtype.type(20)))))


def gates_forward(a, b, A_log, dt_bias):
    """g and beta of a, b (B, T, Hv)"""
    return -(exact.exp(A_log) * softplus(a + dt_bias)), sigmoid(b)


def gates_backward(dg, dbeta, a, g, beta, A_log, dt_bias):
    """da, db, dA_log, ddt_bias"""
    one = a.dtype.type(1)
    ds = -(exact.exp(A_log) * dg) * -exact.expm1(-softplus(a + dt_bias))
    return ds, dbeta * (beta * (one - beta)), chain_dot(rows(dg), rows(g), axis=0), chain_sum(rows(ds), axis=0)


# ---------------------------------------------------------------------------------------------------------------------
# Documents and heads.
# ---------------------------------------------------------------------------------------------------------------------
def pieces(starts, T):
    """(first, end) of each document in a row; starts (T) or None"""
    begins = [0] if starts is None else sorted({0, *map(int, np.flatnonzero(starts))})
    return list(zip(begins, [*begins[1:], T]))


def chunks(first, end):
    return [slice(i, min(i + CHUNK, end)) for i in range(first, end, CHUNK)]


def by_head(x, n_heads=None):
    """(T, H, n) -> (heads, T, n), (T, H) -> (heads, T); with n_heads, each of H is repeated for its group"""
    x = np.moveaxis(x, 1, 0)
    return x if n_heads is None else np.repeat(x, n_heads // len(x), axis=0)


def sum_groups(x, Hk):
    """(Hv, T, dk) -> (T, Hk, dk): value heads ascending, from 0"""
    return np.moveaxis(chain_sum(x.reshape(Hk, -1, *x.shape[1:]), axis=1), 0, 1)


def each_row(rule, starts, q, k, v, g, beta, state, dout=None, dstate=None):
    """rule(starts, q, k, v, g, beta, state, ...) for each row of the batch, arrays heads first; results stacked"""
    B, Hv = len(q), v.shape[2]
    zeros, out = np.zeros((B, Hv, q.shape[-1], v.shape[-1]), q.dtype), []
    state, dstate = (zeros if x is None else x for x in (state, dstate))
    for b in range(B):
        heads = [by_head(q[b], Hv), by_head(k[b], Hv), by_head(v[b]), by_head(g[b]), by_head(beta[b])]
        gradients = [] if dout is None else [by_head(dout[b]), dstate[b]]
        out.append(rule(None if starts is None else starts[b], *heads, state[b], *gradients))
    return [np.stack(x) for x in zip(*out)]


# ---------------------------------------------------------------------------------------------------------------------
# The recurrence. Arrays of one row, heads first: q, k (H, T, dk), v (H, T, dv), g, beta (H, T), S (H, dk, dv).
# ---------------------------------------------------------------------------------------------------------------------
def outer(a, b, start):
    """start + a b^T"""
    return madd(a[..., :, None], b[..., None, :], start)


def times(S, x):
    """S x (H, dk): chains over d"""
    return chain_dot(S, x[..., None, :])


def transposed_times(x, S, start):
    """start + S^T x (H, dv): chains over c"""
    out = start
    for c in range(S.shape[-2]):
        out = madd(x[..., c, None], S[..., c, :], out)
    return out


def step(S, q, k, v, g, beta):
    """The state after a position, o, and what backward needs: exp(g), the faded state, u. One position, heads first."""
    decay = exact.exp(g)
    faded = decay[..., None, None] * S
    u = transposed_times(-k, faded, v)
    S = outer(k, beta[..., None] * u, faded)
    return S, transposed_times(q, S, np.zeros_like(v)), (decay, faded, u)


def steps_of_row(starts, q, k, v, g, beta, S):
    out, saved = np.zeros_like(v), []
    for t in range(q.shape[1]):
        if starts is not None and starts[t]:
            S = np.zeros_like(S)
        S, out[:, t], kept = step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        saved.append((S, *kept))
    return out, S, saved


def steps_row_backward(starts, q, k, v, g, beta, S, dout, dS):
    dq, dk, dv, dg, dbeta = (np.zeros_like(x) for x in (q, k, v, g, beta))
    saved = steps_of_row(starts, q, k, v, g, beta, S)[2]
    for t in reversed(range(q.shape[1])):
        after, decay, faded, u = saved[t]
        b = beta[:, t, None]
        dS = outer(q[:, t], dout[:, t], dS)
        dq[:, t] = times(after, dout[:, t])
        ddelta = transposed_times(k[:, t], dS, np.zeros_like(u))
        dbeta[:, t] = chain_dot(ddelta, u)
        dv[:, t] = du = b * ddelta
        dk[:, t] = times(dS, b * u)
        for d in range(du.shape[-1]):
            dk[:, t] = madd(-faded[..., d], du[:, d, None], dk[:, t])
        dS = outer(-k[:, t], du, dS)
        dg[:, t] = chain_sum(chain_dot(dS, faded, axis=-2))
        dS = decay[:, None, None] * dS
        if starts is not None and starts[t]:
            dS = np.zeros_like(dS)
    return dq, dk, dv, dg, dbeta, dS


# ---------------------------------------------------------------------------------------------------------------------
# A chunk: arrays of C positions, heads first, as above.
# ---------------------------------------------------------------------------------------------------------------------
class Chunk:
    """What does not depend on the state"""

    def __init__(self, q, k, g, beta):
        C = q.shape[1]
        lower, strict = np.tri(C, dtype=bool), np.tri(C, k=-1, dtype=bool)
        zero, one = q.dtype.type(0), q.dtype.type(1)
        G, total = np.zeros_like(g), np.zeros_like(g[:, 0])
        for i in range(C):
            G[:, i] = total = total + g[:, i]
        difference = np.where(strict, G[:, :, None] - G[:, None, :], zero)
        gam = np.where(strict, exact.exp(difference), np.where(lower, one, zero))
        kk, qk = (chain_matmul(np.zeros((len(q), C, C), q.dtype), x, k.swapaxes(1, 2)) for x in (k, q))
        self.q, self.k, self.beta, self.gam, self.C = q, k, beta[..., None], gam, C
        self.A, self.P = np.where(strict, kk * gam, zero), np.where(lower, qk * gam, zero)
        self.eG, self.fG = exact.exp(G)[..., None], exact.exp(G[:, -1:] - G)[..., None]
        self.last = self.eG[:, -1:]  # (H, 1, 1)
        self.qg, self.kg, self.kf = q * self.eG, k * self.eG, k * self.fG

    def forward(self, v, S):
        """u (H, C, dv), o, the state after"""
        u, delta = chain_matmul(v, -self.kg, S), np.zeros_like(v)
        for j in range(self.C):
            delta[:, j] = self.beta[:, j] * u[:, j]
            u[:, j + 1:] = madd(-self.A[:, j + 1:, j, None], delta[:, j, None, :], u[:, j + 1:])
        o = chain_matmul(np.zeros_like(v), self.qg, S)
        for j in range(self.C):
            o[:, j:] = madd(self.P[:, j:, j, None], delta[:, j, None, :], o[:, j:])
        return u, o, chain_matmul(self.last * S, self.kf.swapaxes(1, 2), delta)

    def backward(self, u, S, dout, dS):
        """dq, dk, dv, dg, dbeta and the gradient of the state before; dS is that of the state after"""
        delta, du = self.beta * u, np.zeros_like(u)
        ddelta = chain_matmul(np.zeros_like(u), self.kf, dS)
        for i in range(self.C):
            ddelta[:, :i + 1] = madd(self.P[:, i, :i + 1, None], dout[:, i, None, :], ddelta[:, :i + 1])
        for i in reversed(range(self.C)):
            du[:, i] = self.beta[:, i] * ddelta[:, i]
            ddelta[:, :i] = madd(-self.A[:, i, :i, None], du[:, i, None, :], ddelta[:, :i])
        before = chain_matmul(self.last * dS, self.qg.swapaxes(1, 2), dout)
        before = chain_matmul(before, -self.kg.swapaxes(1, 2), du)
        dq, dk, dG = self.inner_backward(S, dS, delta, dout, du)
        dg, total = np.zeros_like(dG), np.zeros_like(dG[:, 0])
        for i in reversed(range(self.C)):
            dg[:, i] = total = total + dG[:, i]
        return dq, dk, du, dg, chain_dot(ddelta, u), before

    def inner_backward(self, S, dS, delta, dout, du):
        """dq, dk and dG: what no other chunk waits for"""
        C, q, k, zero = self.C, self.q, self.k, np.zeros_like(self.A)
        dP, dA = (chain_matmul(zero, x, delta.swapaxes(1, 2)) for x in (dout, -du))
        M, N = dP * self.gam, dA * self.gam
        B, X, Z = (chain_matmul(np.zeros_like(q), x, s.swapaxes(1, 2)) for x, s in ((dout, S), (du, S), (delta, dS)))
        dq, dk = self.eG * B, madd(-self.eG, X, self.fG * Z)
        for j in range(C):
            dq[:, j:] = madd(M[:, j:, j, None], k[:, j, None, :], dq[:, j:])
            dk[:, j + 1:] = madd(N[:, j + 1:, j, None], k[:, j, None, :], dk[:, j + 1:])  # j < i
            dk[:, :j] = madd(N[:, j, :j, None], k[:, j, None, :], dk[:, :j])              # j > i
        for j in range(C):
            dk[:, :j + 1] = madd(M[:, j, :j + 1, None], q[:, j, None, :], dk[:, :j + 1])
        eG, fG, last = self.eG[..., 0], self.fG[..., 0], self.last[:, 0, 0]
        dG = eG * chain_dot(q, B) - eG * chain_dot(k, X)
        for j in range(C):
            for d, x in ((dP, self.P), (dA, self.A)):
                dG[:, j + 1:] = madd(d[:, j + 1:, j], x[:, j + 1:, j], dG[:, j + 1:])
                dG[:, :j] = madd(-d[:, j, :j], x[:, j, :j], dG[:, :j])
        z = fG * chain_dot(k, Z)
        dG = dG - z
        dG[:, -1] = (dG[:, -1] + chain_sum(z)) + last * chain_sum(chain_dot(S, dS, axis=-2))
        return dq, dk, dG


def chunks_of_row(starts, q, k, v, g, beta, S):
    """o, the last state, and of each chunk (where, Chunk, u, the state before, does it begin a document?)"""
    out, saved = np.zeros_like(v), []
    for first, end in pieces(starts, q.shape[1]):
        for at in chunks(first, end):
            begins = starts is not None and bool(starts[at.start])
            S = np.zeros_like(S) if begins else S
            chunk = Chunk(q[:, at], k[:, at], g[:, at], beta[:, at])
            u, out[:, at], after = chunk.forward(v[:, at], S)
            saved.append((at, chunk, u, S, begins))
            S = after
    return out, S, saved


def chunks_row_backward(starts, q, k, v, g, beta, S, dout, dS):
    dq, dk, dv, dg, dbeta = (np.zeros_like(x) for x in (q, k, v, g, beta))
    for at, chunk, u, before, begins in reversed(chunks_of_row(starts, q, k, v, g, beta, S)[2]):
        dq[:, at], dk[:, at], dv[:, at], dg[:, at], dbeta[:, at], dS = chunk.backward(u, before, dout[:, at], dS)
        dS = np.zeros_like(dS) if begins else dS
    return dq, dk, dv, dg, dbeta, dS


# ---------------------------------------------------------------------------------------------------------------------
# Both laws for a batch.
# ---------------------------------------------------------------------------------------------------------------------
STEPS, CHUNKS = (steps_of_row, steps_row_backward), (chunks_of_row, chunks_row_backward)


def delta_forward(q, k, v, g, beta, state=None, starts=None, law=CHUNKS):
    """o (B, T, Hv, dv) and the states after the rows; state: those before them, None for 0"""
    def rule(*args):
        return law[0](*args)[:2]
    out, after = each_row(rule, starts, q, k, v, g, beta, state)
    return np.moveaxis(out, 1, 2), after


def delta_backward(dout, q, k, v, g, beta, state=None, starts=None, dstate=None, law=CHUNKS):
    """dq, dk, dv, dg, dbeta and the gradient of the states before the rows; dstate: of those after them, None for 0"""
    dq, dk, dv, dg, dbeta, before = each_row(law[1], starts, q, k, v, g, beta, state, dout, dstate)
    Hk = q.shape[2]
    dq, dk = (np.stack([sum_groups(row, Hk) for row in x]) for x in (dq, dk))
    return dq, dk, np.moveaxis(dv, 1, 2), np.moveaxis(dg, 1, 2), np.moveaxis(dbeta, 1, 2), before


# ---------------------------------------------------------------------------------------------------------------------
# The golden file of the op alone, for implementations that have no model yet: python dev/ref/gated_delta.py [--out DIR]
# ---------------------------------------------------------------------------------------------------------------------
GOLDEN = {"B": 1, "T": 130, "Hk": 2, "Hv": 4, "DK": 8, "DV": 6}
NAMES = ["dq", "dk", "dv", "dg", "dbeta", "dstate"]


def numbers(shape, key):
    """Multiples of 1/128 in -1 .. 1, without any library's random numbers"""
    x = (np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(key << 20)) * np.uint64(0x9E3779B97F4A7C15)
    return ((x >> np.uint64(40)) % np.uint64(257)).astype(np.float32).reshape(shape) / np.float32(128) - np.float32(1)


def write_golden(folder):
    """Inputs; o, the state after, and all gradients in steps and in chunks, without and with documents"""
    B, T, Hk, Hv, DK, DV = GOLDEN.values()
    q, k = (unit_forward(numbers((B, T, Hk, DK), i))[0] for i in (1, 2))
    v, dout = (numbers((B, T, Hv, DV), i) for i in (3, 4))
    g, beta = (numbers((B, T, Hv), i) - np.float32(1) for i in (5, 6))
    beta = beta * np.float32(-0.5)
    state, dstate = (numbers((B, Hv, DK, DV), i) for i in (7, 8))
    starts = np.zeros((B, T), np.int32)
    starts[0, [7, 72, 73]] = 1
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "dout": dout, "state": state, "dstate": dstate,
               "starts": starts}
    for law, name in ((STEPS, "steps"), (CHUNKS, "chunks")):
        for of, where in (("row", None), ("documents", starts)):
            prefix = f"{name}.{of}."
            o, after = delta_forward(q, k, v, g, beta, state, where, law)
            tensors |= {prefix + "o": o, prefix + "state": after}
            gradients = delta_backward(dout, q, k, v, g, beta, state, where, dstate, law)
            tensors |= {prefix + name: x for name, x in zip(NAMES, gradients)}
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    path = os.path.join(folder, "gated_delta.safetensors")
    exact.write_safetensors(path, tensors, GOLDEN)
    print(f"{path}  {len(tensors)} tensors, {os.path.getsize(path)} bytes")


def main():
    parser = argparse.ArgumentParser(description="The gated delta rule; writes its golden file.")
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("--out", metavar="DIR", default=os.path.join(here, "..", "golden"), help="for the golden file")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    write_golden(os.path.normpath(args.out))


if __name__ == "__main__":
    main()
