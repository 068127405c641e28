"""What scripts for the plain SDK write: nothing here knows of rlkit."""

from __future__ import annotations

import numpy as np


def prompt(tokens):
    from tinker import types

    return types.ModelInput.from_ints([int(x) for x in tokens])


def datum(tokens, start=1, **inputs):
    """Tokens [T] as a datum: every token after the first is a target, inputs are 0 before token ``start``."""
    from tinker import types

    tokens = np.asarray(tokens, np.int64)
    size = tokens.size - 1
    arrays = {}
    for name, value in inputs.items():
        array = np.zeros(size, np.float32)
        array[start - 1 :] = value
        arrays[name] = array
    return types.Datum(prompt(tokens[:-1]), {"target_tokens": tokens[1:], **arrays})


def supervised(service, model, steps=15):
    """Teaches one line; returns its loss before each step."""
    from tinker import types

    training = service.create_lora_training_client(model, rank=8).result()
    tokenizer = training.get_tokenizer()
    ids = tokenizer.encode("the cat sat on the mat")
    data = [datum(ids, start=3, weights=1.0)]
    losses = []
    for _ in range(steps):
        fb = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=0.05))
        losses.append(fb.result().metrics["loss:sum"])
        step.result()
    return training, losses


def grpo(service, model, steps=10, group=16, letter="e"):
    """Rewards a letter; returns the mean reward before each step."""
    from tinker import types

    training = service.create_lora_training_client(model, rank=8).result()
    tokenizer = training.get_tokenizer()
    params = types.SamplingParams(max_tokens=12, stop=[])
    rewards = []
    for step in range(steps):
        sampler = training.save_weights_and_get_sampling_client().result()
        futures = []
        for k, text in enumerate(("ab", "hello")):
            ids = tokenizer.encode(text)
            options = types.SamplingParams(**{**params.model_dump(), "seed": 100 * step + k})
            futures.append((ids, sampler.sample(prompt(ids), group, options)))
        data, found = [], []
        for ids, future in futures:
            sequences = future.result().sequences
            r = np.array([np.mean([t == ord(letter) for t in s.tokens]) for s in sequences])
            found.append(r.mean())
            data += [
                datum([*ids, *s.tokens], start=len(ids), logprobs=s.logprobs, advantages=a)
                for s, a in zip(sequences, r - r.mean(), strict=True)
            ]
        fb = training.forward_backward(data, "importance_sampling")
        op = training.optim_step(types.AdamParams(learning_rate=0.05))
        fb.result(), op.result()
        rewards.append(float(np.mean(found)))
    return rewards


def resumed(service, model):
    """(losses of a run, losses of a run that was saved in its middle and resumed)."""
    from tinker import types

    curves = []
    for interrupt in (False, True):
        training = service.create_lora_training_client(model, rank=8).result()
        ids = training.get_tokenizer().encode("resume from here")
        data, losses = [datum(ids, weights=1.0)], []
        for step in range(8):
            fb = training.forward_backward(data, "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=0.02, weight_decay=0.01)).result()
            losses.append(fb.result().metrics["loss:sum"])
            if interrupt and step == 3:
                path = training.save_state("middle").result().path
                training = service.create_training_client_from_state_with_optimizer(path).result()
        curves.append(losses)
    return curves


def custom(service, model, steps=6):
    """A client-side loss that wants every logprob at -1; returns the loss before each step."""
    from tinker import types

    def near(data, logprobs):
        loss = sum(((lp + 1.0) ** 2).sum() for lp in logprobs)
        return loss, {"near:sum": loss.item()}

    training = service.create_lora_training_client(model, rank=8).result()
    ids = training.get_tokenizer().encode("custom")
    data, losses = [datum(ids, weights=1.0)], []
    for _ in range(steps):
        fb = training.forward_backward_custom(data, near)
        training.optim_step(types.AdamParams(learning_rate=0.05)).result()
        losses.append(fb.result().metrics["near:sum"])
    return losses
