"""A policy that says what it is told to, and helpers to talk to a session."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np

from rlkit import Future, Sample
from rlkit.gateway import Request, Sampling


class Scripted:
    """A sampler whose i-th request is answered with the i-th text, or by a function of the prompt's text.

    With ``stops`` the stop texts and ids of a request end what is said.
    """

    def __init__(self, tokenizer, say, *, max_length=65536, version=3, stops=False):
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.version = version
        self.requests = []
        self._say = say
        self._stops = stops
        self._lock = threading.Lock()

    def sample(self, prompt, params, *, n=1, seed=None):
        prompt = np.asarray(prompt)
        with self._lock:
            number = len(self.requests)
            self.requests.append((prompt, params, n, seed))
        text = self.tokenizer.decode(prompt, skip_special=False)
        said = self._say(text) if callable(self._say) else self._say[number]
        texts = [said] * n if isinstance(said, str) else said
        return Future.of([self._sample(prompt, text, params, i) for i, text in enumerate(texts)])

    def _sample(self, prompt, text, params, i):
        ids = np.append(self.tokenizer.encode(text, special=True), self.tokenizer.eos_ids[-1])
        stops = params.stop if self._stops and params.stop else ()
        texts = [text for text in stops if isinstance(text, str)]
        stopped = (
            ids[k - 1] in stops or any(x in self.tokenizer.decode(ids[:k]) for x in texts) for k in range(1, ids.size)
        )
        ends = (k for k, ended in enumerate(stopped, 1) if ended)
        ids = ids[: next(ends, ids.size)]
        stop = "stop" if ids.size <= params.max_tokens else "length"
        ids = ids[: params.max_tokens]
        logprobs = -0.001 - 0.001 * (np.arange(ids.size) + i)
        return Sample(prompt, ids, logprobs, stop, version=self.version, **params.sampling_options)

    def logprobs(self, tokens, *, temperature=1.0):
        return Future.of(np.zeros(len(tokens), np.float32))

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def user(text):
    return {"role": "user", "content": text}


def said(choice):
    """Return a choice as a client sends it back."""
    turn = {"role": "assistant", "content": choice.content}
    functions = [(c.id, {"name": c.name, "arguments": json.dumps(dict(c.arguments))}) for c in choice.calls]
    calls = [{"id": id_, "type": "function", "function": function} for id_, function in functions]
    return turn | ({"tool_calls": calls} if calls else {})


def ask(session, messages, **fields):
    return asyncio.run(session.answer(Request(messages=messages, **fields)))


def short(n=16):
    return Sampling(max_tokens=n)
