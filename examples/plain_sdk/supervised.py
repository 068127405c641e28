"""Teach a model one line, with the plain Tinker SDK: cross entropy, and a sample before and after.

TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python examples/plain_sdk/supervised.py MODEL

With a key of the hosted service and no address, it runs there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import tinker
from tinker import types

PROMPT, LINE = "The cat sat", " on the mat."


def main(arguments: Sequence[str] | None = None) -> tuple[list[float], str]:
    """Train; return the loss before each step, and a sample after the last."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a base model of the server")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    args = parser.parse_args(arguments)

    service = tinker.ServiceClient()
    training = service.create_lora_training_client(args.model, rank=8, seed=0).result()
    tokenizer = training.get_tokenizer()
    prompt, line = (tokenizer.encode(text, add_special_tokens=False) for text in (PROMPT, LINE))
    tokens = np.array([*prompt, *line])
    weights = np.zeros(tokens.size - 1, np.float32)
    weights[len(prompt) - 1 :] = 1.0  # position i predicts token i + 1: only the line is learned
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )

    def say() -> str:
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=len(line), temperature=0.0, stop=[])
        answer = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result()
        return tokenizer.decode(answer.sequences[0].tokens)

    print(f"before: {PROMPT}{say()!r}")
    losses = []
    for step in range(args.steps):
        loss = training.forward_backward([datum], "cross_entropy")
        update = training.optim_step(types.AdamParams(learning_rate=args.learning_rate))  # before the loss is read
        losses.append(loss.result().metrics["loss:sum"])
        print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
        update.result()
    said = say()
    print(f"after: {PROMPT}{said!r}")
    service.close("success").result()
    return losses, said


if __name__ == "__main__":
    main()
