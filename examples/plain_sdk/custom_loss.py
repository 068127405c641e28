"""A custom loss with the plain Tinker SDK: direct preference optimisation of one answer over another.

TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python examples/plain_sdk/custom_loss.py MODEL

With a key of the hosted service and no address, it runs there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types

PROMPT, CHOSEN, REJECTED = "Is it 3 or 4? It is ", "4", "3"
BETA = 0.5


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; return the margin of the chosen answer before each step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a base model of the server")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    args = parser.parse_args(arguments)

    service = tinker.ServiceClient()
    training = service.create_lora_training_client(args.model, rank=8, seed=0).result()
    tokenizer = training.get_tokenizer()
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False)
    data, starts = [], len(prompt) - 1
    for answer in (CHOSEN, REJECTED):
        tokens = np.array([*prompt, *tokenizer.encode(answer, add_special_tokens=False)])
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(tokens.size - 1, np.float32)}
        data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1].tolist()), inputs))

    outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs  # the reference is the initial policy
    chosen, rejected = (float(x["logprobs"].to_numpy()[starts:].sum()) for x in outputs)
    reference = chosen - rejected

    def preference(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        margin = logprobs[0][starts:].sum() - logprobs[1][starts:].sum() - reference
        return -torch.nn.functional.logsigmoid(BETA * margin), {"margin:mean": margin.item()}

    margins = []
    for step in range(args.steps):
        loss = training.forward_backward_custom(data, preference)
        training.optim_step(types.AdamParams(learning_rate=args.learning_rate)).result()
        margins.append(loss.result().metrics["margin:mean"])
        print(f"step {step}: margin {margins[-1]:.4f}", flush=True)
    service.close("success").result()
    return margins


if __name__ == "__main__":
    main()
