"""``--import MODULE``: import a user's own module, so that commands know what it registers."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.errors import ConfigError

if TYPE_CHECKING:
    from rlkit.backends import Sampler

__all__ = [
    "KINDS",
    "add_option",
    "add_options",
    "asked_for",
    "check",
    "imported",
    "is_run",
    "is_url",
    "opened",
    "settings",
]


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--import``, which may be given several times."""
    text = "a module in this folder or installed that registers your environments, rewards, algorithms or losses"
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE", help=text)


def imported(options: argparse.Namespace) -> None:
    """Import the named modules, also from the folder that the program was started in."""
    if options.modules and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for name in options.modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):  # something that it imports itself
                raise
            raise ConfigError(f"--import {name}: no such module in this folder or installed") from error


def settings(option: str, texts: Sequence[str], taken: Collection[str] = ()) -> dict[str, object]:
    """Return values by name; JSON is parsed, everything else is text.

    Args:
        option: for messages.
        texts: as given.
        taken: names that have their own option.

    >>> settings("--set", ["size=3", "name=a b", "deep=true"])
    {'size': 3, 'name': 'a b', 'deep': True}
    """
    values: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(option, f"is {text!r}", "KEY=VALUE")
        if name in taken:
            raise ConfigError(f"{option} {text}: use the option --{name}")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


KINDS = "a run's folder, a path that save() returned, a model, or the URL of a vLLM server"
_TOY = "toy"  # the backend of one model alone, which has no name


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a policy of a run."""
    parser.add_argument("--step", type=int, help="the checkpoint of a run (default: the newest complete one)")
    parser.add_argument("--role", default="policy", help="the policy of the run (default: policy)")


def check(where: str, policy: str, backend: str, tokenizer: str | None = None) -> None:
    """Raise ConfigError for a policy that looks like a path and does not exist, or one that has its own tokenizer."""
    from rlkit.errors import ConfigError

    if tokenizer is not None and not is_url(policy):
        raise ConfigError("--tokenizer", "is given", "the option only with a URL", f"{policy} has its own tokenizer")

    elsewhere = "://" in policy or backend != "local"
    if not elsewhere and policy != "smollm2-135m-instruct" and policy.count("/") != 1 and not Path(policy).exists():
        known = "a run's folder, a path that save() returned, a hub id (owner/name) or smollm2-135m-instruct"
        raise ConfigError(f"{where}: {policy}: no such folder; expected {known}")


def is_run(policy: str) -> bool:
    """Return whether it is a run's folder."""
    return (Path(policy) / "checkpoints").is_dir()


def is_url(policy: str | None) -> bool:
    """Return whether it is the URL of a server."""
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
    from rlkit.backends import sampler
    from rlkit.runs import sampler as saved_sampler

    if policy is not None and is_url(policy):
        return sampler(policy, model=None, path=None, **options)
    if policy is not None and ("://" in policy or (Path(policy) / "state.json").is_file() or is_run(policy)):
        return saved_sampler(policy, role=role, step=step, **options)
    return sampler(backend, model=None if backend == _TOY else policy, path=None, **options)
