"""What scripts for the plain SDK write: nothing here knows of rlkit. Without the SDK the tests that import it skip."""

from __future__ import annotations

import numpy as np
import pytest

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402


def prompt(tokens):
    return types.ModelInput.from_ints([int(x) for x in tokens])


def datum(tokens, start=1, **inputs):
    """Tokens [T] as a datum: every token after the first is a target, inputs are 0 before token ``start``."""
    tokens = np.asarray(tokens, np.int64)
    arrays = {name: np.zeros(tokens.size - 1, np.float32) for name in inputs}
    for name, value in inputs.items():
        arrays[name][start - 1 :] = value
    return types.Datum(prompt(tokens[:-1]), {"target_tokens": tokens[1:], **arrays})


def supervised(service, model, steps=15):
    """Teaches one line; returns its loss before each step."""
    training = service.create_lora_training_client(model, rank=8).result()
    data = [datum(training.get_tokenizer().encode("the cat sat on the mat"), start=3, weights=1.0)]
    losses = []
    for _ in range(steps):
        fb = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=0.05))
        losses.append(fb.result().metrics["loss:sum"])
        step.result()
    return training, losses
