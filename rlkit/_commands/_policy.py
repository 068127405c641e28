"""A policy on a command line: a run's folder, what ``save`` returned, a model, or the URL of one that is served."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkit.backends import Sampler

__all__ = ["KINDS", "add_options", "asked_for", "check", "is_run", "is_url", "opened"]

KINDS = "a run's folder, what save() returned, a model, or the URL of a server of vLLM"
_TOY = "toy"  # the backend of one model alone, which has no name


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which policy of a run."""
    parser.add_argument("--step", type=int, help="which checkpoint of a run (default: the newest that is whole)")
    parser.add_argument("--role", default="policy", help="which policy of it (default: policy)")


def check(where: str, policy: str, backend: str, tokenizer: str | None = None) -> None:
    """Raise ConfigError for a policy that looks like a path and is not there, or one that has its own tokenizer."""
    from rlkit.errors import ConfigError

    if tokenizer is not None and not is_url(policy):
        raise ConfigError("--tokenizer", "is given", "it with a URL", f"{policy} has its own")

    elsewhere = "://" in policy or backend != "local"
    if not elsewhere and policy != "smollm2-135m-instruct" and policy.count("/") != 1 and not Path(policy).exists():
        known = "a run's folder, what save() returned, a hub id (owner/name) or smollm2-135m-instruct"
        raise ConfigError(f"{where}: {policy}: there is no such folder; give {known}")


def is_run(policy: str) -> bool:
    """Return whether it is a run's folder."""
    return (Path(policy) / "checkpoints").is_dir()


def is_url(policy: str | None) -> bool:
    """Return whether it is served."""
    return policy is not None and policy.startswith(("http://", "https://"))


def asked_for(options: argparse.Namespace, policy: str) -> Sampler:
    """Return the policy that ``rlkit eval`` was asked to score, frozen."""
    tokenizer = {} if options.tokenizer is None else {"tokenizer": options.tokenizer}
    return opened(policy, options.backend, role=options.role, step=options.step, **tokenizer)


def opened(policy: str | None, backend: str, *, role: str, step: int | None, **options: object) -> Sampler:
    """Return the policy, frozen.

    Args:
        policy: None: the backend's own model.
        backend: of a model; what was saved is opened by the backend that saved it.
        role, step: which policy of a run.
        options: of the backend.
    """
    import rlkit

    if policy is not None and is_url(policy):
        return rlkit.sampler(policy, model=None, path=None, **options)
    if policy is not None and ("://" in policy or (Path(policy) / "state.json").is_file() or is_run(policy)):
        return rlkit.runs.sampler(policy, role=role, step=step, **options)
    return rlkit.sampler(backend, model=None if backend == _TOY else policy, path=None, **options)
