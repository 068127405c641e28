"""Where a local backend keeps its parts, for tests that look inside."""

from __future__ import annotations

import contextlib

import pytest
import torch

from rlkit.backends import options
from rlkit.backends.local.model import base


def decoder(policy):
    """What decodes, of the snapshot that had its turn last; there once something was sampled."""
    return decoders(policy)[-1]


def decoders(policy):
    """One for each of the snapshots used last."""
    return policy._scheduler.decoders


def is_invariant(policy):
    """Whether a sample is said to have the same bits in any company, as it has to be with AVX-512 for most models."""
    said = policy.capabilities()["batch_invariant"]
    assert said or torch.backends.cpu.get_cpu_capability() != "AVX512"
    return said


def require_invariance(policy):
    """Skip the test where this processor's products hang on their shapes, which is said then."""
    if not is_invariant(policy):
        pytest.skip("capabilities() says that samples depend on their company here")


def waiting(policy):
    """Requests that wait for the scheduler."""
    return policy._scheduler.waiting


def weights(policy):
    """The weights that samples are computed with, by the first name of the modules that have them."""
    products = decoder(policy).forward._products
    return {next(iter(p.modules)): [p.weight, *(p._low_rank or ())] for p in products}


def parameters(policy):
    """What is trained, by name."""
    return policy._trainer.parameters


def trained(policy):
    """The peft model."""
    return policy._trainer.model


def forwards(policy):
    """The forward that trains, and peft's own modules on every datum by itself; each in its place while it is used."""
    from rlkit.backends.local.training.forward import TrainingForward

    trainer = policy._trainer
    forward = trainer.forward
    yield forward
    with plain_modules(trainer.model):
        trainer.forward = TrainingForward(trainer.model, 10**9, windows=None)
        yield trainer.forward
    trainer.forward = forward


@contextlib.contextmanager
def plain_modules(model):
    """A peft model that is trained, as peft and transformers compute it."""
    attention, model.config._attn_implementation = model.config._attn_implementation, "eager"
    installed = [(m, vars(m).pop("forward")) for m in model.modules() if "forward" in vars(m)]
    yield
    model.config._attn_implementation = attention
    for module, compute in installed:
        module.forward = compute


def allow_float64(monkeypatch):
    """Let ``dtype="float64"`` through, in which errors of rounding vanish."""
    monkeypatch.setitem(base.DTYPES, "float64", torch.float64)
    monkeypatch.setattr(options, "DTYPES", (*options.DTYPES, "float64"))
