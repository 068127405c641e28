"""Checks of numbers: the local backend on a device against transformers and peft there, and against itself.

Each returns what was found and what it may be, a distance in both cases. In bfloat16 the other side computes in float32
on the same rounded weights, so that the bounds are those of the rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np
import torch

import rlkit
from rlkit.backends.local.model.base import quiet
from rlkit.backends.protocol import TrainerBackend

__all__ = ["Comparison", "comparisons"]

Number: TypeAlias = tuple[float, float]
Checked: TypeAlias = Callable[[Path, Path, str, str], Number]

PROMPT = 12
BOUNDS = {"float32": (1e-4, 1e-4), "bfloat16": (0.03, 0.1)}  # of a logprob, and of a gradient as part of its norm
STEP = rlkit.Adam(learning_rate=0.01)
# AdamW without moments, whose step is lr g / (|g| + eps): so an adapter that is saved twice tells the gradient between.
TELLING = rlkit.Adam(learning_rate=1e4, beta1=0.0, beta2=0.0, eps=1e4)


@attrs.frozen
class Comparison:
    """Two ways to compute the same.

    Attributes:
        title: what is compared with what.
        otherwise: what it means for a user if they differ.
        check: from a model's folder, one for what is saved, a device and a dtype to a distance and what it may be.
    """

    title: str
    otherwise: str
    check: Checked


def comparisons() -> list[Comparison]:
    """Return what is compared."""
    return [
        Comparison(
            "logprobs of the trainer, against transformers' own with the same adapter in peft",
            "losses and rewards are of another model than the one that is saved",
            _forward,
        ),
        Comparison(
            "gradient of a batch, against plain peft's, one text at a time",
            "training goes another way than everywhere else",
            _gradient,
        ),
        Comparison(
            "logprobs that samples come with, against the trainer's of the same tokens",
            "ratios are off 1 before the first step",
            _sampler,
        ),
        Comparison(
            "gradient in micro-batches of 30 tokens, against one micro-batch",
            "results depend on micro_batch_tokens",
            _micro_batches,
        ),
        Comparison(
            "logprobs of a sampler after an optimizer step, against its own before the step",
            "a step changes the snapshot that is being sampled from",
            _snapshot,
        ),
        Comparison(
            "logprobs after save, resume and a step, against those after the same step without a break",
            "a resumed run goes another way",
            _resumed,
        ),
        Comparison(
            "logprobs of a sample drawn while others are decoded, against the same sample drawn alone",
            "samples depend on what is asked beside them",
            _company,
        ),
    ]


def _connect(model: Path, folder: Path, device: str, dtype: str, **options: object) -> TrainerBackend:
    settings: dict[str, Any] = {"lora": rlkit.Lora(rank=4), "seed": 0, "dtype": dtype, "device": device, **options}
    if {"resume_from", "init_from"} & settings.keys():
        del settings["lora"], settings["seed"]
    return rlkit.connect("local", model=str(model), folder=folder, **settings)


def _data() -> list[rlkit.Datum]:
    """Two groups of completions behind a prompt each, of unequal lengths."""
    rng = np.random.default_rng(0)
    data = []
    for size in (PROMPT, 5):
        prompt = rng.integers(3, 250, size)
        data += [rlkit.Datum.supervised(prompt, rng.integers(3, 250, n)) for n in (20, 7, 33)]
    return data


def _trained(policy: TrainerBackend) -> None:
    """One step, after which no factor of the adapter is zero."""
    policy.forward_backward(_data(), "cross_entropy").result()
    policy.optim_step(STEP).result()


def _gradients(policy: TrainerBackend) -> dict[str, torch.Tensor]:
    """The gradient of ``_data`` by every parameter of the adapter, from what a step changes."""
    before = policy.save("before", optimizer=False).result()
    policy.forward_backward(_data(), "cross_entropy").result()
    policy.optim_step(TELLING).result()
    after = _tensors(policy.save("after", optimizer=False).result())
    gradients = {}
    for name, tensor in _tensors(before).items():
        change = tensor.double() - after[name].double()
        gradients[name] = TELLING.eps * change / (TELLING.learning_rate - change.abs())
    return gradients


def _tensors(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(Path(path) / "adapter_model.safetensors")
    return tensors


def _plain(model: Path, path: str, device: str) -> torch.nn.Module:
    """The same adapter in peft alone, in float32."""
    import peft

    with quiet() as transformers, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of one library about the other
        base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        plain: torch.nn.Module = peft.PeftModel.from_pretrained(base, path, is_trainable=True).to(device)
    return plain


def _plain_logprobs(plain: Any, datum: rlkit.Datum, device: str) -> torch.Tensor:
    tokens = torch.from_numpy(np.array(datum.tokens)).to(device)
    logprobs = torch.log_softmax(plain(input_ids=tokens[None, :-1]).logits[0].float(), -1)
    chosen = logprobs.gather(1, tokens[1:, None])[:, 0]
    return chosen[torch.from_numpy(datum.mask[1:].copy()).to(device)]


def _apart(a: Iterable[Any], b: Iterable[Any], dtype: str) -> float:
    """Largest distance of logprobs in float32; in bfloat16 their mean, as the largest is that of a few rare tokens."""
    distances = np.abs(np.concatenate(list(a)).astype(np.float64) - np.concatenate(list(b)).astype(np.float64))
    return float(distances.max() if dtype == "float32" else distances.mean())


def _off(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Distance of all gradients together, as part of their norm."""
    names = sorted(expected)
    a, b = (torch.cat([x[name].double().cpu().flatten() for name in names]) for x in (found, expected))
    return float((a - b).norm() / b.norm())


def _forward(model: Path, folder: Path, device: str, dtype: str) -> Number:
    with _connect(model, folder, device, dtype) as policy:
        _trained(policy)
        found = policy.forward(_data()).result().selected
        plain = _plain(_as_rounded(model, folder, dtype), policy.save("plain", optimizer=False).result(), device)
    with torch.no_grad():
        expected = [_plain_logprobs(plain, datum, device).cpu().numpy() for datum in _data()]
    return _apart(found, expected, dtype), BOUNDS[dtype][0]


def _gradient(model: Path, folder: Path, device: str, dtype: str) -> Number:
    with _connect(model, folder, device, dtype) as policy:
        _trained(policy)
        path = policy.save("plain", optimizer=False).result()
        found = _gradients(policy)
    plain = _plain(_as_rounded(model, folder, dtype), path, device)
    for datum in _data():
        (-_plain_logprobs(plain, datum, device).sum()).backward()
    expected = {name.replace(".default.", "."): p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return _off(found, expected), BOUNDS[dtype][1]


def _sampler(model: Path, folder: Path, device: str, dtype: str) -> Number:
    params = rlkit.SamplingParams(max_tokens=24, stop=())
    with _connect(model, folder, device, dtype) as policy:
        _trained(policy)
        with policy.sampler().result() as sampler:
            futures = [sampler.sample(range(3, 3 + n), params, n=4, seed=n) for n in (PROMPT, 3, 40)]
            samples = [sample for future in futures for sample in future.result()]
        found = policy.forward([sample.datum(1.0) for sample in samples]).result().selected
    return _apart(found, [sample.logprobs for sample in samples], dtype), BOUNDS[dtype][0]


def _micro_batches(model: Path, folder: Path, device: str, dtype: str) -> Number:
    with _connect(model, folder, device, dtype) as policy:
        _trained(policy)
        path = policy.save("trained", optimizer=False).result()
    results = []
    for tokens in (30, 1024):
        with _connect(model, folder, device, dtype, micro_batch_tokens=tokens, init_from=path) as policy:
            results.append(_gradients(policy))
    return _off(*results), BOUNDS[dtype][1]


def _snapshot(model: Path, folder: Path, device: str, dtype: str) -> Number:
    with _connect(model, folder, device, dtype) as policy:
        before = policy.sampler().result()
        scores = [before.logprobs(range(3, 60)).result()]
        _trained(policy)
        scores.append(before.logprobs(range(3, 60)).result())
        after = policy.sampler().result().logprobs(range(3, 60)).result()
    if np.allclose(after, scores[0], atol=1e-6):
        raise AssertionError("the sampler after a step gives what the one before it gave")
    return _apart(scores[:1], scores[1:], dtype), BOUNDS[dtype][0]


def _resumed(model: Path, folder: Path, device: str, dtype: str) -> Number:
    with _connect(model, folder, device, dtype) as policy:
        _trained(policy)
        path = policy.save("resumed").result()
        _trained(policy)
        expected = policy.forward(_data()).result().selected
    with _connect(model, folder, device, dtype, resume_from=path) as policy:
        _trained(policy)
        found = policy.forward(_data()).result().selected
    return _apart(found, expected, dtype), BOUNDS[dtype][0]


def _company(model: Path, folder: Path, device: str, dtype: str) -> Number:
    """Scores of one text alone, and while others are decoded."""
    params = rlkit.SamplingParams(max_tokens=40, stop=())
    with _connect(model, folder, device, dtype) as policy, policy.sampler().result() as sampler:
        alone = sampler.sample(range(3, 30), params, seed=1).result()[0]
        others = [sampler.sample(range(4, 4 + n), params, n=3, seed=n) for n in (5, 50, 90)]
        beside = sampler.sample(range(3, 30), params, seed=1).result()[0]
        for other in others:
            other.result()
    same = alone.tokens == beside.tokens
    begin = same.size if np.all(same) else int(np.argmin(same))  # rounding may choose another token, and go on from it
    if begin == 0:
        return 0.0, BOUNDS[dtype][0]
    return _apart([alone.logprobs[:begin]], [beside.logprobs[:begin]], dtype), BOUNDS[dtype][0]


def _as_rounded(model: Path, folder: Path, dtype: str) -> Path:
    """The model with weights rounded to ``dtype``, to be read in float32."""
    if dtype == "float32":
        return model
    there = folder / f"rounded-{dtype}"
    if not there.exists():
        with quiet() as transformers:
            rounded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
            rounded.save_pretrained(there)
    return there
