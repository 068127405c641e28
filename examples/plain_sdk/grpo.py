"""GRPO with the plain Tinker SDK: groups of samples, rewards minus their group's mean, importance sampling.

TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python examples/plain_sdk/grpo.py MODEL

With a key of the hosted service and no address, it runs there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import tinker
from tinker import types

PROMPTS = ("Call ", "Dial ", "Count: ")


def reward(text: str) -> float:
    """Return the share of letters."""
    return sum(c.isalpha() for c in text) / max(1, len(text))


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; return the mean reward before each step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a base model of the server")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--samples", type=int, default=16, help="of each prompt")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    args = parser.parse_args(arguments)

    service = tinker.ServiceClient()
    training = service.create_lora_training_client(args.model, rank=8, seed=0).result()
    tokenizer = training.get_tokenizer()
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    curve = []
    for step in range(args.steps):
        sampler = training.save_weights_and_get_sampling_client().result()  # the policy, frozen now
        futures = []
        for i, prompt in enumerate(prompts):
            params = types.SamplingParams(max_tokens=8, stop=[], seed=1000 * step + 100 * i)
            futures.append(sampler.sample(types.ModelInput.from_ints(prompt), args.samples, params))
        data, means = [], []
        for prompt, future in zip(prompts, futures, strict=True):
            sequences = future.result().sequences
            rewards = np.array([reward(tokenizer.decode(s.tokens)) for s in sequences])
            means.append(rewards.mean())
            for sequence, advantage in zip(sequences, rewards - rewards.mean(), strict=True):
                tokens = np.array([*prompt, *sequence.tokens])
                logprobs, advantages = np.zeros((2, tokens.size - 1), np.float32)  # 0 on the prompt: no gradient
                logprobs[len(prompt) - 1 :] = sequence.logprobs
                advantages[len(prompt) - 1 :] = advantage / len(sequences)
                inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages}
                data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1].tolist()), inputs))
        loss = training.forward_backward(data, "importance_sampling")
        update = training.optim_step(types.AdamParams(learning_rate=args.learning_rate))
        loss.result(), update.result()
        curve.append(float(np.mean(means)))
        print(f"step {step}: reward {curve[-1]:.4f}", flush=True)
    service.close("success").result()
    return curve


if __name__ == "__main__":
    main()
