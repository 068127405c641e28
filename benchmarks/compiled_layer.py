"""A decoder layer with a LoRA by rlkit's pieces, by the same mathematics in plain torch, and that compiled.

    python benchmarks/compiled_layer.py [--tokens 512] [--dtype float32] [--rounds 10]

Attention is left out: every token gets its key and its value added. CPU seconds of one thread, the sides taking turns
after a warm-up, and how many kernels each is beside its products.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch._inductor import metrics

from rlkit.backends.local.model.llama import Layer, _Adding
from rlkit.backends.local.products.lora_linear import LoraLinear
from tests.backends.local.meta import Launches

WIDTH, INNER, HEADS, KEY_HEADS, HEAD, RANK, SCALE = 512, 1536, 8, 4, 64, 8, 0.5
PRODUCTS = [([HEADS * HEAD, KEY_HEADS * HEAD, KEY_HEADS * HEAD], WIDTH), ([WIDTH], HEADS * HEAD)]
PRODUCTS += [([INNER, INNER], WIDTH), ([WIDTH], INNER)]


class Sides:
    """The layer's weights, and the ways to compute it."""

    def __init__(self, tokens: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(0), dtype
        self.weights = [self.random(sum(sizes), width) for sizes, width in PRODUCTS]
        self.pairs = [
            [(self.random(RANK, width).float(), self.random(size, RANK).float()) for size in sizes]
            for sizes, width in PRODUCTS
        ]
        self.norms = [1 + self.random(n).float() for n in (WIDTH, WIDTH, HEAD, HEAD)]
        products = [
            LoraLinear(weight, None, sizes, pairs, SCALE)
            for (sizes, _), weight, pairs in zip(PRODUCTS, self.weights, self.pairs, strict=True)
        ]
        for product in products:
            product.prepare()
        shape = {"heads": HEADS, "key_heads": KEY_HEADS, "head_dim": HEAD, "scaling": HEAD**-0.5, "eps": 1e-6}
        self.layer = Layer(*products, *self.norms[:2], (self.norms[2], self.norms[3]), **shape)
        angles = torch.rand(tokens, HEAD // 2, generator=self.generator).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.rope = self.layer.rope_tables(self.cos, self.sin)
        self.x, self.grad = (self.random(tokens, WIDTH).float() for _ in range(2))
        self.adapter = [x for pairs in self.pairs for pair in pairs for x in pair]

    def random(self, *shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.generator) / shape[-1] ** 0.5).to(self.dtype)

    def pieces(self, *, backward: bool) -> None:
        attention = _Adding()
        with torch.no_grad():
            _, saved = self.layer.forward(self.x, self.rope, attention)
            if backward:
                self.layer.backward(self.grad, saved, self.rope, attention, inputs=True)

    def plain(self, x: torch.Tensor, *adapter: torch.Tensor) -> torch.Tensor:
        factors = iter(adapter)
        pairs = [[(next(factors), next(factors)) for _ in sizes] for sizes, _ in PRODUCTS]

        def product(i: int, x: torch.Tensor) -> torch.Tensor:
            low = torch.cat([(x.float() @ a.T) @ b.T for a, b in pairs[i]], -1)
            return (x @ self.weights[i].T + SCALE * low).to(self.dtype)

        def norm(x: torch.Tensor, i: int) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norms[i]

        def rotated(x: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2, -1)
            return (x * self.cos[:, None] + torch.cat([-b, a], -1) * self.sin[:, None]).to(self.dtype)

        heads = product(0, norm(x, 0).to(self.dtype)).view(x.shape[0], -1, HEAD)
        q, k, v = heads.split([HEADS, KEY_HEADS, KEY_HEADS], 1)
        q, k = rotated(norm(q.float(), 2)) * HEAD**-0.5, rotated(norm(k.float(), 3))
        x = x + product(1, (q + (k + v).repeat_interleave(HEADS // KEY_HEADS, 1)).flatten(1))
        gate, up = product(2, norm(x, 1).to(self.dtype)).chunk(2, -1)
        return x + product(3, F.silu(gate) * up)

    def autograd(self, layer: Callable[..., torch.Tensor], *, backward: bool) -> None:
        if not backward:
            with torch.no_grad():
                layer(self.x, *self.adapter)
            return
        leaves = [x.detach().requires_grad_() for x in (self.x, *self.adapter)]
        torch.autograd.grad(layer(*leaves), leaves, self.grad)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sides = Sides(options.tokens, getattr(torch, options.dtype))
    for backward in (False, True):
        compiled = torch.compile(sides.plain, dynamic=False, fullgraph=True)
        jobs: dict[str, Callable[[], None]] = {
            "pieces": lambda: sides.pieces(backward=backward),  # noqa: B023
            "plain": lambda: sides.autograd(sides.plain, backward=backward),  # noqa: B023
            "compiled": lambda: sides.autograd(compiled, backward=backward),  # noqa: B023
        }
        metrics.reset()
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(options.rounds + 1):
            for name, job in jobs.items():
                began = time.process_time()
                job()
                seconds[name].append(time.process_time() - began)
        watch = Launches(torch.device("cpu"))
        with watch:
            jobs["pieces"]()
        products = sum(name in ("mm", "addmm", "bmm", "baddbmm") for name in watch.names)
        print("forward and backward" if backward else "forward", options.dtype, options.tokens, "tokens")
        kernels = f"pieces {len(watch.names) - products}, compiled {metrics.generated_kernel_count}"
        print(f"  kernels beside products: {kernels}")
        for name, taken in seconds.items():
            print(f"  {name}: {1e3 * statistics.median(taken[1:]):.2f} ms, first {taken[0]:.1f} s")


if __name__ == "__main__":
    main()
