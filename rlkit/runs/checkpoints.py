"""Checkpoints of a run: folders that exist whole or not at all, which of them stay, and what is noted of the run."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlkit import _check
from rlkit._check import checked
from rlkit._files import as_checkpoint_error, plain, replace_file
from rlkit._runtime import warn
from rlkit._secrets import mask
from rlkit._seeds import resolve_seed
from rlkit.backends import saves
from rlkit.backends.protocol import Storage
from rlkit.errors import BackendError, CheckpointError, ConfigError
from rlkit.runs.state import decode

__all__ = ["Record", "Retention", "records"]

POLICIES, CHECKPOINTS = "policies", "checkpoints"
_NAME = re.compile(r"step-(\d{8})-[0-9a-f]{8}")
_LOOKS = 100  # at a folder that changes while it is read
_DAMAGE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_PACKAGES = ("rlkit-lm", "numpy", "torch", "transformers", "peft", "tinker", "reasoning-gym", "gem-llm", "openreward")


def _check_paths(_: object, field: attrs.Attribute[Any], value: Mapping[str, str]) -> None:
    for role, path in value.items():  # within the run, elsewhere on this machine (which stays), or on a service
        parts = Path(path).parts  # a TypeError unless it is text
        if ("://" not in path and not Path(path).is_absolute()) and (len(parts) < 2 or ".." in parts):
            raise ValueError(f"its {role!r} in {field.name} is {path!r}, which is not a path in the run")


_check_dict = attrs.validators.instance_of(dict)


@attrs.frozen
class Record:
    """A checkpoint of a run.

    Attributes:
        path: its folder.
        step: the step that a run resumes with.
        policies: role -> the path that the backend's ``save`` returned; those within the run are relative to it.
        kept: name -> state of a kept object.
        metrics: the argument of ``Run.checkpoint(metrics=)``.
        seed: the run's.
        logged: tracker -> the end of its logs, as its ``sync`` returned it.
    """

    path: Path
    step: int = checked(attrs.NOTHING, _check.integer, low=0, high=10**8 - 1)  # as many digits as in names
    policies: Mapping[str, str] = attrs.field(factory=dict, validator=[_check_dict, _check_paths])
    kept: Mapping[str, Any] = attrs.field(factory=dict, validator=_check_dict)
    metrics: Mapping[str, float] = attrs.field(factory=dict, validator=_check_dict)
    seed: int | None = checked(None, _check.integer, none=True, low=0)
    logged: Mapping[str, object] = attrs.field(factory=dict, validator=_check_dict)

    def policy(self, role: str) -> str | None:
        """Return the path to resume that policy from; None where the checkpoint has none."""
        path = self.policies.get(role)
        return path if path is None or "://" in path else str(self.path.parent.parent / path)


def write(folder: Path, step: int, content: Mapping[str, object]) -> Record:
    """Return a new checkpoint in ``folder``, read back before this returns.

    Raises:
        CheckpointError: it could not be written; no part of it remains.
    """
    state = {"backend": "run", "step": step, **content}
    return read(saves.write(folder / CHECKPOINTS, f"step-{step:08d}", lambda _: state))


def read(path: Path, *, verify: bool = True) -> Record:
    """Return the checkpoint at ``path``; with ``verify``, check the policies that it saved against their checksums.

    Raises:
        CheckpointError: something is missing or damaged.
    """
    _, state = saves.read(path, backend="run")
    fields = {name: state[name] for name in attrs.fields_dict(Record) if name != "path" and name in state}
    try:
        fields["metrics"] = {name: float(value) for name, value in decode(fields.get("metrics", {})).items()}
        record = Record(Path(path), **fields)
    except _DAMAGE as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    for saved in map(record.policy, record.policies if verify else ()):
        if saved and "://" not in saved:
            saves.read(saved, backend=None)
    return record


def paths(folder: Path) -> list[Path]:
    """Return the folders of its checkpoints, including damaged ones, oldest first."""
    found = []
    parent = folder / CHECKPOINTS
    with as_checkpoint_error(folder, "read"):
        for path in parent.iterdir() if parent.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # the run that is writing has removed it
                if _NAME.fullmatch(path.name):
                    found.append((path.name[:13], path.stat().st_mtime_ns, path))
    return [path for _, _, path in sorted(found)]


def records(folder: str | os.PathLike[str], *, verify: bool = True) -> list[Record]:
    """Return the checkpoints of the run in ``folder``, by step, oldest first; another process may be writing to it.

    Damaged ones are left out with a warning; with ``verify=False`` the policies' files are not read.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    whole: list[Record] = []
    damaged: list[CheckpointError] = []
    for _ in range(_LOOKS):
        there, whole, damaged = paths(Path(folder)), [], []
        for path in there:
            try:
                whole.append(read(path, verify=verify))
            except CheckpointError as found:
                damaged.append(found)
        if paths(Path(folder)) == there:
            break  # else some were removed meanwhile, and newer ones are there
    for error in damaged:
        warn(f"skipped a checkpoint: {error}", RuntimeWarning)
    return whole


def find_latest(folder: Path) -> Record | None:
    """Return the newest whole checkpoint, skipping damaged ones with a warning; None without any.

    Raises:
        CheckpointError: all checkpoints are damaged, so that the run could not resume: it does not restart by itself.
    """
    there = paths(folder)
    for path in reversed(there):
        try:
            return read(path)
        except CheckpointError as error:
            warn(f"skipped a checkpoint, resuming from the previous one: {error}", RuntimeWarning)
    if there:
        raise CheckpointError(
            f"none of the {len(there)} checkpoints in {folder} is complete; start a new run in another folder"
        )
    return None


@attrs.frozen
class Retention:
    """A policy that keeps the latest ``last`` checkpoints, every ``every``-th step's, and the ``best`` by a metric.

    Args:
        last: >= 1.
        every: >= 1, or None for none besides the last ones.
        best: how many of those with the best ``metric``, >= 0; NaN is never one.
        metric: its name, as given to ``Run.checkpoint(metrics=)``.
        lowest: whether the lowest is the best.

    >>> Retention(last=2, every=100, best=1, metric="eval/mean").last
    2
    """

    last: int = checked(2, _check.integer, low=1, why="a run resumes from the latest")
    every: int | None = checked(None, _check.integer, none=True, low=1)
    best: int = checked(0, _check.integer, low=0)
    metric: str | None = None
    lowest: bool = checked(False, _check.flag)

    def __attrs_post_init__(self) -> None:
        _check.require(self.metric is None or isinstance(self.metric, str), "Retention.metric", self.metric, "a name")
        if self.best and not self.metric:
            raise ConfigError("Retention.best: needs a metric; set metric=")

    def expired(self, records: Sequence[Record]) -> list[Record]:
        """Return those of ``records``, oldest first, that need not be kept."""
        staying = {record.path for record in records[-self.last :]}
        if self.every is not None:
            staying |= {record.path for record in records if record.step % self.every == 0}
        if self.best and self.metric is not None:
            values = [(record.metrics.get(self.metric, math.nan), record) for record in records]
            scored = [pair for pair in values if not math.isnan(pair[0])]
            scored.sort(key=lambda pair: (pair[0] if self.lowest else -pair[0], -pair[1].step))
            staying |= {record.path for _, record in scored[: self.best]}
        return [record for record in records if record.path not in staying]


def prune(folder: Path, retention: Retention, service: Storage | None) -> None:
    """Remove what retention does not keep, here and on a service; a failed removal does not end the run."""
    try:
        there = records(folder, verify=False)
        expired = retention.expired(there)
        for record in expired:
            for path in delete_checkpoint(record):
                if service is not None:
                    service.delete(path)
        remove_leftovers(folder, [record for record in there if record not in expired])
    except (OSError, BackendError) as error:
        warn(f"an old checkpoint could not be removed: {error}", RuntimeWarning)


def delete_checkpoint(record: Record) -> list[str]:
    """Delete a checkpoint and the policies in its run; return those on a service, which a backend has to delete.

    Files in other folders of this machine stay.
    """
    _discard(record.path)  # first, so that no checkpoint ever refers to what is gone
    for path in record.policies.values():
        if "://" not in path and not Path(path).is_absolute():
            _discard(record.path.parent.parent / path)
    return [path for path in record.policies.values() if "://" in path]


def remove_leftovers(folder: Path, kept: Sequence[Record]) -> None:
    """Remove the remains of interrupted writes: partial folders, and policies of steps that no checkpoint has."""
    used = {Path(p) for record in kept for role in record.policies if (p := record.policy(role)) is not None}
    unread = {path.name[:13] for path in set(paths(folder)) - {record.path for record in kept}}  # their policies stay
    for parent in (folder / POLICIES, folder / CHECKPOINTS):
        for path in parent.iterdir() if parent.is_dir() else ():
            orphan = parent.name == POLICIES and path.name.startswith("step-") and path not in used
            if (orphan and path.name[:13] not in unread) or path.name.startswith("."):
                _discard(path)


def _discard(path: Path) -> None:
    """Delete a folder, renamed first, so that a half-deleted one never looks whole."""
    trash = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.gone")
    with contextlib.suppress(OSError):
        path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def read_facts(folder: Path, seed: int | None, record: Record | None) -> dict[str, Any]:
    """Return what run.json is to hold: the seed that the run began with or a new one, the machine, and its models.

    The seed is the checkpoint's where there is one.

    Raises:
        ConfigError: ``seed`` is not the seed that the run began with.
        CheckpointError: run.json is damaged, and no checkpoint has the seed.
    """
    path, models = folder / "run.json", {}
    noted = None if record is None else record.seed
    if path.exists():
        try:
            facts = _read_json(path)
            found, models = _check.integer("seed", facts["seed"], low=0), dict(facts.get("models", {}))
            noted = found if noted is None else noted
        except (OSError, *_DAMAGE) as error:
            if noted is None:
                raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
            warn(f"{path} is damaged, and written again with the checkpoint's seed: {error}", RuntimeWarning)
    noted = resolve_seed(seed) if noted is None else noted
    if seed is not None and seed != noted:
        raise ConfigError(f"seed: got {seed}, but the run in {folder} began with {noted}")
    started = {"started": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")}
    return {"format": 1, "seed": noted, "machine": started | describe_machine(), "models": models}


@functools.cache
def describe_machine() -> dict[str, object]:
    """Return the command, the system, versions, and the commit that is checked out in the current folder."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    command = mask([Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv and sys.argv[0] else ["python"])
    facts: dict[str, object] = {
        "command": " ".join(map(str, command)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(git, capture_output=True, text=True, timeout=5, check=True)  # noqa: S603  # no shell
        facts["git commit"] = done.stdout.strip()
    return facts


def write_json(path: Path, content: object) -> None:
    """Write a file of plain JSON without what looks like a key, whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    text = json.dumps(as_plain(content), indent=1, allow_nan=False)
    with as_checkpoint_error(path, "written"), replace_file(path) as temporary:
        temporary.write_text(text, "utf-8")


def write_config(folder: Path, config: object) -> None:
    """Write ``config`` to config.json without what looks like a key, and warn of each setting that has changed.

    Raises:
        ConfigError: it is neither a mapping nor an attrs object.
        CheckpointError: it cannot be written.
    """
    if config is None:
        return
    expected = "a mapping or an attrs object"
    _check.require(isinstance(config, Mapping) or attrs.has(type(config)), "Run(config)", config, expected)
    changed = find_changes(folder, config)
    if changed:
        warn(f"the config of {folder} has changed: {', '.join(changed)}", RuntimeWarning)
    write_json(folder / "config.json", config)


def find_changes(folder: Path, config: object) -> list[str]:
    """Return which settings differ from those in the run's config.json; [] where it is missing or, warned, damaged."""
    path = folder / "config.json"
    try:
        before = plain(_read_json(path)) if path.exists() else None
    except (OSError, *_DAMAGE) as error:  # no run resumes from it
        warn(f"{path} is damaged, so rlkit cannot tell whether the config has changed: {error}", RuntimeWarning)
        return []
    return [] if before is None else list(_differences(before, as_plain(config)))


def _differences(before: object, now: object, where: str = "") -> Iterator[str]:
    """Yield the differences by their full keys."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted(before.keys() | now.keys()):
            yield from _differences(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif before != now:
        yield f"{where} from {before!r} to {now!r}"


def _read_json(path: Path) -> Any:
    if not path.is_file():  # a pipe or a device has no end
        raise ValueError("it is not a file")
    return json.loads(path.read_text("utf-8"))


def as_plain(value: object) -> object:
    """Return plain JSON without what looks like a key."""
    return plain(mask(_unpack(value)))


def _unpack(value: Any) -> object:
    """Return attrs objects as dicts, and functions by name."""
    if attrs.has(type(value)):
        return {field.name: _unpack(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        return {str(name): _unpack(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_unpack(each) for each in value]
    return getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else value
