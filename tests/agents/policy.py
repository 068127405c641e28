"""A policy that says what it is told to, with the logprobs that a real one gives to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

import rlkit
from rlkit.backends.protocol import Sampler, Tokenizer

Say = Callable[[str], str]
"""From a prompt, as text with its control tokens, to what is said."""


class Told:
    """A sampler whose texts are told and whose logprobs are those of another.

    Attributes:
        samples: that were drawn.
    """

    def __init__(self, sampler: Sampler, say: Say | None) -> None:
        self.tokenizer: Tokenizer = sampler.tokenizer
        self.max_length: int = sampler.max_length
        self.version: int = sampler.version
        self.samples: list[rlkit.Sample] = []
        self._sampler = sampler
        self._say = say
        self._lock = threading.Lock()

    def sample(self, prompt, params, *, n=1, seed=None):
        """Return n times what is told, up to the end of the first stop text; without ``say`` what the other draws."""
        prompt = np.asarray(prompt)
        if self._say is None:
            samples = self._sampler.sample(prompt, params, n=n, seed=seed).result()
            with self._lock:
                self.samples += samples
            return rlkit.Future.of(samples)
        before = self.tokenizer.decode(prompt, skip_special=False)
        text = self._say(before).removeprefix(before.rpartition("assistant\n")[2])  # a required call has begun
        ids, stop = self._ids(text, params.stop or ())
        stop, ids = "length" if ids.size > params.max_tokens else stop, ids[: params.max_tokens]
        whole = np.concatenate([prompt, ids])
        logprobs = self._sampler.logprobs(whole, temperature=params.temperature).result()[prompt.size :]
        sample = rlkit.Sample(prompt, ids, logprobs, stop, version=self.version, **params.sampling_options)
        with self._lock:
            self.samples += [sample] * n
        return rlkit.Future.of([sample] * n)

    def _ids(self, text: str, stops: Sequence[str | int]) -> tuple[np.ndarray, str]:
        ids = np.append(self.tokenizer.encode(text, special=True), self.tokenizer.eos_ids[-1])
        texts = [stop for stop in stops if isinstance(stop, str)]
        for size in range(1, ids.size):
            if any(stop in self.tokenizer.decode(ids[:size]) for stop in texts):
                return ids[:size], "stop"
        return ids, "stop"

    def logprobs(self, tokens, *, temperature=1.0):
        """Return the real ones."""
        return self._sampler.logprobs(tokens, temperature=temperature)

    def top_logprobs(self, tokens, k):
        """Return the real ones."""
        return self._sampler.top_logprobs(tokens, k)

    def target_logprobs(self, tokens, targets):
        """Return the real ones."""
        return self._sampler.target_logprobs(tokens, targets)

    def close(self) -> None:
        """Leave the other sampler open."""

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def messages(prompt: str) -> list[tuple[str, str]]:
    """Return role and text of what was said, in a conversation of <|im_start|> and <|im_end|>."""
    parts = [part.removesuffix("\n").removesuffix("<|im_end|>") for part in prompt.split("<|im_start|>")[1:-1]]
    return [tuple(part.split("\n", 1)) for part in parts]


def turns(*texts: str) -> Say:
    """Say the i-th text in the i-th turn of a conversation, and the last one from then on."""
    return lambda prompt: texts[min(sum(role == "assistant" for role, _ in messages(prompt)), len(texts) - 1)]


def call(name: str, arguments: str) -> str:
    """Return a call of a tool as the policy writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
