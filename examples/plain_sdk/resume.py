"""Save a run halfway and resume it with another client, with the plain Tinker SDK.

TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python examples/plain_sdk/resume.py MODEL

With a key of the hosted service and no address, it runs there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker
from tinker import types


def train(training: Any, steps: int, learning_rate: float) -> list[float]:
    """Train some steps on one line; return the loss before each."""
    tokens = np.array(training.get_tokenizer().encode("To be continued", add_special_tokens=False))
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(tokens.size - 1, np.float32)}
    data = [types.Datum(types.ModelInput.from_ints(tokens[:-1].tolist()), inputs)]
    losses = []
    for _ in range(steps):
        loss = training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=learning_rate)).result()
        losses.append(loss.result().metrics["loss:sum"])
    return losses


def main(arguments: Sequence[str] | None = None) -> tuple[list[float], list[float]]:
    """Train twice, once with an interruption; return the losses of both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a base model of the server")
    parser.add_argument("--steps", type=int, default=4, help="before and after the interruption")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    args = parser.parse_args(arguments)

    service = tinker.ServiceClient()
    training = service.create_lora_training_client(args.model, rank=8, seed=0).result()
    first = train(training, args.steps, args.learning_rate)
    path = training.save_state("middle", ttl_seconds=86400).result().path
    whole = first + train(training, args.steps, args.learning_rate)
    service.close("success").result()
    print(f"saved: {path}", flush=True)

    service = tinker.ServiceClient()  # another day
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    again = first + train(resumed, args.steps, args.learning_rate)
    service.close("success").result()
    print(f"whole:   {' '.join(f'{x:.6f}' for x in whole)}")
    print(f"resumed: {' '.join(f'{x:.6f}' for x in again)}")
    return whole, again


if __name__ == "__main__":
    main()
