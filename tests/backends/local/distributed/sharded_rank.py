"""One of two ranks that share out the weights of a model, for ``test_sharding.py``: run with a JSON of its settings."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import attrs
import numpy as np
import torch
import torch.distributed as dist

import rlkit
from rlkit.backends import local
from rlkit.backends.local import load_policy
from rlkit.backends.local.distributed.sharding import ShardedWeights, shard_groups
from rlkit.backends.local.model.base import load_base

PARAMS = rlkit.SamplingParams(max_tokens=10, stop=())


def connect(settings, shards=None):
    """Return a policy with an adapter that changes its numbers, whose weights are ``shards``'s, as a replica's are."""
    with mock.patch.object(local, "load_policy", lambda checked, _: load_policy(checked, shards)):
        policy = rlkit.connect(
            "local",
            model=settings["model"],
            dtype=settings["dtype"],
            lora=rlkit.Lora(rank=4, train_unembed=True),
            seed=0,
            device="cpu",
            micro_batch_tokens=100,
            merge=False,
            folder=settings["folder"],
        )
    rng = np.random.default_rng(7)
    for name, parameter in policy._trainer.parameters.items():
        if "lora_B" in name:
            parameter.data.copy_(torch.from_numpy(0.02 * rng.standard_normal(parameter.shape)))
    return policy


def samples(policy, rank):
    """Return samples of prompts that the other rank does not have."""
    rng = np.random.default_rng(5 + rank)
    with policy.sampler().result() as sampler:
        futures = [sampler.sample(rng.integers(3, 290, n), PARAMS, n=2, seed=n) for n in (3, 17 + rank, 30)]
        return [sample for future in futures for sample in future.result()]


def trained(policy, data, want):
    """Return logprobs and gradients."""
    logprobs = policy.forward_backward(data, "cross_entropy", want=want).result().selected
    gradients = [p.grad.clone() for p in policy._trainer.parameters.values()]
    policy.discard().result()
    return np.concatenate(logprobs), torch.cat([g.flatten() for g in gradients]).numpy()


def compare(settings, rank, shards):
    """Return how far the numbers of sharded weights are from those of whole ones, for work that differs by rank."""
    policies = connect(settings), connect(settings, shards)
    drawn = [samples(policy, rank) for policy in policies]
    rng = np.random.default_rng(rank)
    supervised = [
        rlkit.Datum.supervised(rng.integers(3, 290, 20), rng.integers(3, 290, 60)) for _ in range(1 + 2 * rank)
    ]  # of which the last rank has micro-batches more
    together = rlkit.Datum.supervised(rng.integers(3, 290, 5), rng.integers(3, 290, 25))
    off, scale = 0.0, 0.0
    for data in ([sample.datum(1.0) for sample in drawn[0]], supervised, [together]):
        for want in ((), ("entropy",)):
            (logprobs, gradient), (other_logprobs, other_gradient) = (trained(p, data, want) for p in policies)
            off = max(off, float(np.abs(logprobs - other_logprobs).max()))
            scale = max(scale, float(np.abs(gradient - other_gradient).max() / np.abs(gradient).max()))
    saved = [Path(policy.save(f"{rank}{i}").result()) for i, policy in enumerate(policies)]
    bodies = [(path / "adapter_model.safetensors").read_bytes() for path in saved]
    whole, sharded = (policy.base for policy in policies)
    result = {
        "logprobs": off,
        "gradient": scale,
        "same_tokens": [s.tokens.tolist() for s in drawn[0]] == [s.tokens.tolist() for s in drawn[1]],
        "sampled": max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in zip(*drawn, strict=True)),
        "largest": max(float(np.abs(sample.logprobs).max()) for sample in drawn[0]),
        "layers": whole.model.config.num_hidden_layers,
        "same_saves": bodies[0] == bodies[1],
        "same_path": (whole.llama, attrs.evolve(whole.known, cache=None))
        == (sharded.llama, attrs.evolve(sharded.known, cache=None)),
        "held": shards.nbytes / sharded.nbytes,
        "peak": shards.peak / sharded.nbytes,
    }
    dist.barrier()
    for policy in policies:
        policy.close()
    return result


def killed(settings, rank, shards):
    """Return what the first rank gets, and in how many seconds, once the second one is killed."""
    policy = connect(settings, shards)
    data = [rlkit.Datum.supervised(np.arange(3, 20), np.arange(3, 60))]
    policy.forward_backward(data, "cross_entropy").result()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        while True:
            policy.forward_backward(data, "cross_entropy").result()
    except rlkit.BackendError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}


def refused(settings, rank, shards):
    """Return the error of a model that lacks a weight."""
    del rank
    try:
        load_base(settings["model"], "float32", "cpu", shards)
    except rlkit.ConfigError as error:
        return {"text": str(error)}
    return {}


def main() -> None:
    settings = json.loads(sys.argv[1])
    rank, results = settings["rank"], []
    torch.set_num_threads(1)
    store = dist.FileStore(settings["store"], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for job in settings["jobs"]:
        shards = ShardedWeights(torch.device("cpu"), *shard_groups(timedelta(seconds=60)), patience=60)
        results.append(globals()[job["run"]]({**job, "folder": settings["folder"]}, rank, shards))
        Path(settings["results"]).write_text(json.dumps(results))
        shards.close()
    os._exit(0)  # groups whose other end was killed are not taken apart


if __name__ == "__main__":
    main()
