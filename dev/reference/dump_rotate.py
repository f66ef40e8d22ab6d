"""Dumps what NumPy computes in float64 for the rotated Adam, Muon and Nesterov, for test_gpt to compare with.

    python3 dev/reference/dump_rotate.py data/fixtures

Needs numpy. Writes rotate.safetensors with, per matrix NAME (tall, wide, square) and step t from 1:
    NAME.start, NAME.grad.t      parameters before the first step, gradients
    NAME.M, NAME.L, NAME.R       moments before the first step
    NAME.SOURCE.GEOMETRY.t       parameters after the step, SOURCE 1st or 2nd, GEOMETRY uni or bi
    NAME.SOURCE.GEOMETRY.order   how often a refresh has changed the order of basis vectors
    NAME.nesterov.t, NAME.muon.t parameters after the step
Moments do not start from zero: a first gradient alone leaves null spaces, in which any basis is as good as another but
gives other parameters. So that all is of one solution the script stops if two keys of a sort are close.
"""
import json
import os
import struct
import sys

import numpy as np

SHAPES = dict(tall=(12, 7), wide=(7, 12), square=(9, 9))
STEPS, EVERY = 7, 3
LR, B1, B2, EPS, WD = 1e-2, 0.9, 0.95, 1e-8, 0.1
NESTEROV_B1 = 0.99
SEED = 48
MUON = (3.4445, -4.7750, 2.0315)


def order(keys):
    """Indices of descending keys, which must be well apart."""
    at = np.argsort(-keys, kind="stable")
    if np.any(keys[at][:-1] < 1.003 * keys[at][1:]):
        sys.exit(f"keys too close: {keys[at]}; take another seed")
    return at


def renew(q, columns, keys, v, axis):
    """The basis that `columns` make in the order of their keys, the rest of q's behind them; v along its axis."""
    at = order(keys)
    k = len(at)
    moved = int(np.any(at != np.arange(k)))
    rest = np.arange(k, q.shape[0])
    v = np.take(v, np.concatenate([at, rest]), axis)
    return np.linalg.qr(np.hstack([columns[:, at], q[:, k:]]))[0], v, moved


def complete(vectors):
    return np.linalg.qr(vectors, mode="complete")[0]


def refresh_1st(ql, qr, mom, v, moved):
    k = min(mom.shape)
    if ql is not None and qr is not None:
        left, right = mom @ qr[:, :k], mom.T @ ql[:, :k]
    elif ql is not None:
        left, right = mom @ (mom.T @ ql), None
    else:
        left, right = None, mom.T @ (mom @ qr)
    if ql is not None:
        ql, v, changed = renew(ql, left, np.linalg.norm(left, axis=0), v, 0)
        moved += changed
    if qr is not None:
        qr, v, changed = renew(qr, right, np.linalg.norm(right, axis=0), v, 1)
        moved += changed
    return ql, qr, v, moved


def power(q, second, v, axis):
    return renew(q, second @ q, np.diag(q.T @ second @ q), v, axis)


def eigenvectors(second):
    w, q = np.linalg.eigh(second)
    order(w)
    return q[:, ::-1]


def rotate(start, grads, moments, source, geometry):
    """Parameters after each step, and how often an order changed."""
    w, (mom, left, right) = start.copy(), [x.copy() for x in moments]
    m, n = w.shape
    rows, cols = geometry == "bi" or m <= n, geometry == "bi" or n < m
    v, ql, qr, moved, out = np.zeros_like(w), None, None, 0, []
    for t, g in enumerate(grads, 1):
        mom = B1 * mom + (1 - B1) * g
        left, right = B2 * left + (1 - B2) * g @ g.T, B2 * right + (1 - B2) * g.T @ g
        if t == 1 and source == "1st":
            u, s, vt = np.linalg.svd(mom, full_matrices=False)
            order(s)
            ql, qr = complete(u) if rows else None, complete(vt.T) if cols else None
        elif t == 1:
            ql, qr = eigenvectors(left) if rows else None, eigenvectors(right) if cols else None
        elif t % EVERY == 0 and source == "1st":
            ql, qr, v, moved = refresh_1st(ql, qr, mom, v, moved)
        elif t % EVERY == 0:
            if rows:
                ql, v, changed = power(ql, left, v, 0)
                moved += changed
            if cols:
                qr, v, changed = power(qr, right, v, 1)
                moved += changed
        a, b = np.eye(m) if ql is None else ql, np.eye(n) if qr is None else qr
        turned, mean = a.T @ g @ b, a.T @ mom @ b
        v = B2 * v + (1 - B2) * turned**2
        step = mean / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS)
        w = (1 - LR * WD) * w - LR * a @ step @ b.T
        out.append(w.copy())
    return out, moved


def nesterov(start, grads):
    """torch.optim.NAdam(betas=(0.99, B2), decoupled_weight_decay=True), by its documentation's formula."""
    w, m, v, product, out = start.copy(), 0.0, 0.0, 1.0, []
    for t, g in enumerate(grads, 1):
        mu, following = (NESTEROV_B1 * (1 - 0.5 * 0.96 ** (0.004 * s)) for s in (t, t + 1))
        product *= mu
        m, v = NESTEROV_B1 * m + (1 - NESTEROV_B1) * g, B2 * v + (1 - B2) * g**2
        mean = following * m / (1 - product * following) + (1 - mu) * g / (1 - product)
        w = w - LR * WD * w
        w = w - LR * mean / (np.sqrt(v / (1 - B2**t)) + EPS)
        out.append(w.copy())
    return out


def muon(start, grads):
    """Singular values through the polynomial, not matrices through products: the same in exact arithmetic."""
    w, momentum, out = start.copy(), np.zeros_like(start), []
    for g in grads:
        momentum = 0.95 * momentum + g
        u, s, vt = np.linalg.svd(g + 0.95 * momentum, full_matrices=False)
        s = s / np.linalg.norm(s)
        for _ in range(5):
            s = MUON[0] * s + MUON[1] * s**3 + MUON[2] * s**5
        w = (1 - LR * WD) * w - LR * 0.2 * np.sqrt(max(w.shape)) * (u * s) @ vt
        out.append(w.copy())
    return out


def dump_matrix(out, name, m, n, rng):
    def as_float(x):
        return x.astype(np.float32)

    def spread(k):  # a matrix (k,k) whose directions differ in size
        q = np.linalg.qr(rng.standard_normal((k, k)))[0]
        return q @ np.diag(1.2 ** -np.arange(k)) @ q.T

    start = as_float(0.1 * rng.standard_normal((m, n)))
    grads = [as_float(spread(m) @ rng.standard_normal((m, n)) @ spread(n)) for _ in range(STEPS)]
    moments = [as_float(0.2 * spread(m) @ rng.standard_normal((m, n)) @ spread(n))]
    moments += [as_float(0.3 * spread(k) @ spread(k).T) for k in (m, n)]
    moments[1:] = [(x + x.T) / 2 for x in moments[1:]]
    out[f"{name}.start"] = start
    for key, value in zip("MLR", moments):
        out[f"{name}.{key}"] = value
    exact = [g.astype(np.float64) for g in grads]
    exact_moments = [x.astype(np.float64) for x in moments]
    results, moves = {}, 0
    for source in ("1st", "2nd"):
        for geometry in ("uni", "bi"):
            key = f"{source}.{geometry}"
            results[key], moved = rotate(start.astype(np.float64), exact, exact_moments, source, geometry)
            out[f"{name}.{key}.order"] = np.array([moved], np.float32)
            moves += moved
    results["nesterov"] = nesterov(start.astype(np.float64), exact)
    results["muon"] = muon(start.astype(np.float64), exact)
    for t in range(1, STEPS + 1):
        out[f"{name}.grad.{t}"] = grads[t - 1]
        for key, values in results.items():
            out[f"{name}.{key}.{t}"] = as_float(values[t - 1])
    return moves


def save(out, path):
    """safetensors: the header's length, the header, the values."""
    header, at = {}, 0
    for name, value in out.items():
        header[name] = dict(dtype="F32", shape=list(value.shape), data_offsets=[at, at + value.nbytes])
        at += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for value in out.values():
            file.write(np.ascontiguousarray(value).tobytes())


def main():
    out, rng = {}, np.random.default_rng(SEED)
    moves = {name: dump_matrix(out, name, m, n, rng) for name, (m, n) in SHAPES.items()}
    if not all(moves.values()):
        sys.exit(f"no refresh changes an order: {moves}; take another seed")
    path = os.path.join(sys.argv[1], "rotate.safetensors")
    save(out, path)
    print(path, os.path.getsize(path), "bytes, numpy", np.__version__, "changed orders", moves)


if __name__ == "__main__":
    main()
