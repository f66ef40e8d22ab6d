"""Dumps what PyTorch computes for AdamW on spectrally filtered gradients, for test_gpt to compare with.

    python3 dev/reference/dump_spectral.py data/fixtures

Needs torch and safetensors. Writes spectral.safetensors with, per matrix NAME (tall, wide, square) and step t from 1:
    NAME.start                 parameters before the first step
    NAME.fast.t, NAME.anchor.t gradients of the fast and of the anchor circuit
    NAME.after.t               parameters after the step, computed in float64
Gradients are sums of rank-one terms whose sizes fall tenfold every few terms, so that singular values lie on both sides
of tau, as a trained model's do.
"""
import os
import sys

import torch
from safetensors.torch import save_file

SHAPES = dict(tall=(37, 22), wide=(22, 37), square=(29, 29))
STEPS = 5
TAU, ALPHA, BETA_ANCHOR = 1e-3, 0.3, 0.9
ADAMW = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


def gradient(m, n, generator, base):
    """A drifting matrix: the base's singular vectors, and noise over all directions."""
    noise = torch.randn(m, n, generator=generator)
    return base * (1 + 0.3 * torch.randn(1, generator=generator)) + 1e-4 * noise


def filtered(g, momentum):
    u, s, vt = torch.linalg.svd(momentum, full_matrices=False)
    d = torch.diag(s / (s + TAU))
    return ALPHA * g + (1 - ALPHA) * (u @ d @ (u.T @ g @ vt.T) @ d @ vt)


def dump_matrix(out, name, m, n, generator):
    k = min(m, n)
    sizes = 10.0 ** (-torch.arange(k) / 6.0)
    left = torch.linalg.qr(torch.randn(m, k, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(n, k, generator=generator)).Q
    base = left @ torch.diag(sizes) @ right.T
    start = torch.randn(m, n, generator=generator) * 0.1
    out[f"{name}.start"] = start
    param = torch.nn.Parameter(start.double())
    optimizer = torch.optim.AdamW([param], **ADAMW)
    momentum = torch.zeros(m, n, dtype=torch.float64)
    for t in range(1, STEPS + 1):
        fast, anchor = gradient(m, n, generator, base), gradient(m, n, generator, base)
        momentum = BETA_ANCHOR * momentum + (1 - BETA_ANCHOR) * anchor.double()
        param.grad = filtered(fast.double(), momentum)
        optimizer.step()
        out[f"{name}.fast.{t}"], out[f"{name}.anchor.{t}"] = fast, anchor
        out[f"{name}.after.{t}"] = param.detach().float().clone()


def main():
    out = {}
    generator = torch.Generator().manual_seed(5)
    for name, (m, n) in SHAPES.items():
        dump_matrix(out, name, m, n, generator)
    path = os.path.join(sys.argv[1], "spectral.safetensors")
    save_file({k: v.contiguous() for k, v in out.items()}, path)
    print(path, os.path.getsize(path), "bytes, torch", torch.__version__)


if __name__ == "__main__":
    main()
