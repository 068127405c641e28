"""What a training step costs on a cluster: operations, seconds, and bytes that travel, as functions of its sizes.

    python benchmarks/cost_model.py [--model 7B] [--prompts 64] [--group 8] [--prompt 512] [--completion 512]
                                    [--lora-rank 32] [--ranks 1 2 4 8] [--samplers 1]

Bytes are exact where arrays travel (tests/test_cost_model.py counts them); JSON is an average. Seconds are a roofline:
products reach ``products``, memory is read at ``memory``, and nothing else takes time. What is measured takes longer;
docs/how-to/scale.md says by how much.
"""

from __future__ import annotations

import argparse
import math

import attrs

FLOAT = 4  # bytes of what is trained, of gradients and of logprobs
TOKEN_BYTES = 6.0  # of a token's id in a JSON list
SAMPLED_BYTES = 36.0  # of a sampled token with its logprob, in the answer of /v1/completions


@attrs.frozen
class Model:
    """A decoder with grouped-query attention and a gated MLP.

    Attributes:
        layers, width, inner, heads, kv_heads, head_dim, vocab: as transformers' config has them.
        tied: the head is the embedding.
        width_bytes: of a weight: 4 in float32, 2 in bfloat16.
    """

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    width_bytes: int = 2

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each linear module of a layer: q, k, v, o, gate, up, down."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = ((self.width, q), (self.width, kv), (self.width, kv), (q, self.width))
        return (*attention, (self.width, self.inner), (self.width, self.inner), (self.inner, self.width))

    @property
    def body(self) -> int:
        """Weights of the layers' linear modules.

        >>> MODELS["SmolLM2-135M"].body  # 106 million
        106168320
        """
        return self.layers * sum(n * m for n, m in self.linears)

    @property
    def head(self) -> int:
        """Weights of the head."""
        return self.width * self.vocab

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, and of the embedding; norms are left out."""
        return self.width_bytes * (self.body + self.head * (1 if self.tied else 2))

    @property
    def cached_bytes(self) -> int:
        """Bytes of keys and values of a token."""
        return 2 * self.width_bytes * self.layers * self.kv_heads * self.head_dim

    def lora(self, rank: int, *, unembed: bool = False) -> int:
        """Return how many numbers an adapter on every linear module has, and on the head with ``unembed``."""
        of_layers = self.layers * sum(n + m for n, m in self.linears)
        return rank * (of_layers + (self.width + self.vocab if unembed else 0))


@attrs.frozen
class Work:
    """A step: ``prompts`` groups of ``group`` completions.

    Attributes:
        prompt, completion: tokens of each.
        lora_rank, unembed: the adapter.
        ranks: that train, data parallel.
        samplers: servers that sample.
        gathers: micro-batches of each rank, where weights are sharded: each gathers them twice. 0: they are not.
    """

    prompts: int = 64
    group: int = 8
    prompt: int = 512
    completion: int = 512
    lora_rank: int = 32
    unembed: bool = False
    ranks: int = 1
    samplers: int = 1
    gathers: int = 0

    @property
    def completions(self) -> int:
        """How many datums there are."""
        return self.prompts * self.group

    @property
    def chosen(self) -> int:
        """Tokens that were sampled."""
        return self.completions * self.completion

    @property
    def computed(self) -> int:
        """Tokens that a model computes in training: a group's prompt once."""
        return self.prompts * self.prompt + self.chosen


@attrs.frozen
class Device:
    """What each rank and each sampler has; per second."""

    products: float  # operations
    memory: float  # bytes read
    link: float  # bytes to another rank


MODELS = {
    "SmolLM2-135M": Model(30, 576, 1536, 9, 3, 64, 49152, tied=True, width_bytes=4),
    "0.6B": Model(28, 1024, 3072, 16, 8, 128, 151936, tied=True),
    "7B": Model(28, 3584, 18944, 28, 4, 128, 152064),
    "32B": Model(64, 5120, 27648, 40, 8, 128, 152064),
}
DEVICES = {
    "a core of this machine": Device(90e9, 10e9, 1e9),
    "H100": Device(500e12, 2.5e12, 50e9),  # about half of the data sheet's products; none was measured here
}


def bytes_moved(model: Model, work: Work) -> dict[str, float]:
    """Return the bytes of a step, by what travels.

    - "gradient": an adapter's, in float32, summed in rank 0; after a step as many bytes of the adapter go back.
    - "datums": tokens that other ranks compute, with positions, and chosen ones with their places: int64 each.
    - "logprobs": of chosen tokens to the loss, and the gradient back: 2 float32 each.
    - "weights, received by each rank": where they are sharded: gathered in the forward and in the backward pass.
    - "adapter": a file for each sampler, without the names in it.
    - "prompts", "samples": JSON to and from samplers; a group is one request.

    >>> moved = bytes_moved(MODELS["7B"], Work(ranks=8))
    >>> round(moved["gradient"] / 1e6), round(moved["logprobs"] / 1e6, 1)
    (323, 1.8)
    """
    elsewhere = (work.ranks - 1) / work.ranks
    adapter = FLOAT * model.lora(work.lora_rank, unembed=work.unembed)
    return {
        "gradient": adapter if work.ranks > 1 else 0.0,
        "datums": elsewhere * 16 * (work.computed + work.chosen),
        "logprobs": elsewhere * 2 * FLOAT * work.chosen,
        "weights, received by each rank": 2 * work.gathers * elsewhere * model.nbytes,
        "adapter": adapter * work.samplers,
        "prompts": TOKEN_BYTES * work.prompts * work.prompt,
        "samples": SAMPLED_BYTES * work.chosen + TOKEN_BYTES * work.completions * work.prompt,  # with the prompts' ids
    }


def operations(model: Model, work: Work) -> dict[str, float]:
    """Return the operations of sampling and of training a step, attention's products left out.

    A weight costs 2 operations for a token forward and 2 backward, which a frozen one needs for the gradient of what
    comes before; an adapter's 6. The head is computed where tokens were chosen.
    """
    adapter = model.lora(work.lora_rank)
    head = 4 * model.head + (6 * work.lora_rank * (model.width + model.vocab) if work.unembed else 0)
    return {
        "sampling": 2.0 * (model.body * work.computed + model.head * work.chosen),
        "training": float((4 * model.body + 6 * adapter) * work.computed + head * work.chosen),
    }


def seconds(model: Model, work: Work, device: Device) -> dict[str, float]:
    """Return the seconds that a step takes at least, by part, and "tokens per second" of them together.

    Sampling: every step of a sampler reads the weights and all keys and values, or computes; whichever is longer.
    Training: the products, shared by ranks; "gradient": to rank 0, and the adapter back; sharded weights are not in it.

    >>> one, eight = (seconds(MODELS["7B"], Work(ranks=n, samplers=n), DEVICES["H100"]) for n in (1, 8))
    >>> round(eight["tokens per second"] / one["tokens per second"], 1)
    4.3
    """
    work_of, rows = operations(model, work), math.ceil(work.completions / work.samplers)
    read = work.completion * (model.nbytes + rows * model.cached_bytes * (work.prompt + work.completion / 2))
    found = {
        "sampling": max(read / device.memory, work_of["sampling"] / work.samplers / device.products),
        "training": work_of["training"] / work.ranks / device.products,
        "gradient": 2 * bytes_moved(model, work)["gradient"] / device.link,
    }
    return {**found, "tokens per second": work.chosen / sum(found.values())}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="7B")
    parser.add_argument("--device", choices=DEVICES, default="H100")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--samplers", type=int, help="as many as ranks, where it is not said")
    for name in ("prompts", "group", "prompt", "completion", "lora-rank"):
        default = getattr(Work(), name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    model, device = MODELS[options.model], DEVICES[options.device]
    sizes = {name: getattr(options, name) for name in ("prompts", "group", "prompt", "completion", "lora_rank")}
    for ranks in options.ranks:
        work = Work(**sizes, ranks=ranks, samplers=options.samplers or ranks)
        parts = ", ".join(f"{name} {value:.3g}" for name, value in seconds(model, work, device).items())
        moved = ", ".join(f"{name} {value / 1e6:.3g}" for name, value in bytes_moved(model, work).items() if value)
        print(f"{ranks} ranks: seconds: {parts}; MB: {moved}")


if __name__ == "__main__":
    main()
