"""The shapes of `make bench` in PyTorch, and the ratio to ours, measured in one run.

    python3 dev/bench_pytorch.py [--steps 3] [--seq 256 1024] [--only bf16 fp32]

Needs torch (the official wheel); build/bench is built first by `make build/bench`. PyTorch runs the same model (RMSNorm,
RoPE, scaled_dot_product_attention, SwiGLU, own head), the same 4,096 tokens a step in the micro-batch that suits it
best of two sizes, fused AdamW, fp32 and bf16 autocast, eager and compiled. A line a variant: median tokens/s. The ratio
is ours over PyTorch's best of the same precision.
"""
import argparse
import os
import re
import statistics
import subprocess
import time

import torch
import torch.nn.functional as F

D, LAYERS, HEADS, FFN, VOCAB, TOKENS = 768, 12, 12, 2048, 32000, 4096


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.RMSNorm(D, eps=1e-5), torch.nn.RMSNorm(D, eps=1e-5)
        self.qkv = torch.nn.Linear(D, 3 * D, bias=False)
        self.o = torch.nn.Linear(D, D, bias=False)
        self.gate_up = torch.nn.Linear(D, 2 * FFN, bias=False)
        self.down = torch.nn.Linear(FFN, D, bias=False)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(att.transpose(1, 2).reshape(B, T, D))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Llama(torch.nn.Module):
    def __init__(self, T):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, D)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = torch.nn.RMSNorm(D, eps=1e-5)
        self.head = torch.nn.Linear(D, VOCAB, bias=False)
        half = D // HEADS // 2
        angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def bench(T, micro, bf16, compiled, steps):
    """Median tokens/s of whole steps (forward, backward, clip, AdamW)."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Llama(T)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    forward = torch.compile(model) if compiled else model
    tokens = torch.randint(0, VOCAB, (TOKENS // T, T))
    targets = torch.randint(0, VOCAB, (TOKENS // T, T))
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for b in range(0, TOKENS // T, micro):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = forward(tokens[b:b + micro], targets[b:b + micro]) * (micro * T / TOKENS)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - start)
    return TOKENS / statistics.median(times[1:])  # the first step compiles and allocates


def ours():
    """{(precision, T): (tokens/s, peak GFLOP/s)} from build/bench."""
    subprocess.run(["make", "-s", "build/bench"], check=True)
    text = subprocess.run(["build/bench", "124m"], check=True, capture_output=True, text=True).stdout
    print(text, end="", flush=True)
    found = re.findall(r"T (\d+)\s+(\w+)\s+([\d.]+) tok/s.*?of\s+([\d.]+)", text)
    return {(precision, int(T)): (float(rate), float(peak)) for T, precision, rate, peak in found}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seq", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--only", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--eager-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count())
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    before = ours()
    best = {}
    for precision in args.only:
        for T in args.seq:
            for compiled in ([False] if args.eager_only else [False, True]):
                for micro in {1024 // T or 1, 4096 // T}:
                    rate = bench(T, micro, precision == "bf16", compiled, args.steps)
                    best[precision, T] = max(best.get((precision, T), 0.0), rate)
                    print(f"torch T {T:<5} {precision} {'compiled' if compiled else 'eager':<9} micro-batch {micro:<3}"
                          f" {rate:9.1f} tok/s", flush=True)
    after = ours()
    for key, rate in best.items():
        mine = statistics.mean((before[key][0], after[key][0]))
        print(f"T {key[1]:<5} {key[0]}  ours {mine:8.1f}  PyTorch's best {rate:8.1f} tok/s  ratio {mine / rate:.2f}")


if __name__ == "__main__":
    main()
