"""Where a local backend keeps its parts, for tests that look inside."""

from __future__ import annotations

import torch

from rlkit.backends import options
from rlkit.backends.local.model import base


def decoder(policy):
    """What decodes, of the snapshot that had its turn last; there once something was sampled."""
    return decoders(policy)[-1]


def decoders(policy):
    """One for each of the snapshots used last."""
    return policy._scheduler.decoders


def waiting(policy):
    """Requests that wait for the scheduler."""
    return policy._scheduler.waiting


def weights(policy):
    """The weights that samples are computed with: of the layers, and of the output embedding."""
    return decoder(policy).forward.weights()


def parameters(policy):
    """What is trained, by name."""
    return policy._trainer.parameters


def trained(policy):
    """The peft model."""
    return policy._trainer.model


def forwards(policy):
    """The forward that trains, and the library's on every datum by itself; each one in its place while it is used."""
    from rlkit.backends.local.model.forward import LibraryForward

    trainer = policy._trainer
    forward = trainer.forward
    for used in (forward, LibraryForward(trainer.model, trees=False)):
        trainer.forward = used
        yield used
    trainer.forward = forward


def allow_float64(monkeypatch):
    """Let ``dtype="float64"`` through, in which errors of rounding vanish."""
    monkeypatch.setitem(base.DTYPES, "float64", torch.float64)
    monkeypatch.setattr(options, "DTYPES", (*options.DTYPES, "float64"))
