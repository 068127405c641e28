"""Checkpoints of runs: folders that are there whole or not at all, and say what belongs to them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from rlkit._warn import warn
from rlkit.backends import saves
from rlkit.errors import CheckpointError, RlkitError
from rlkit.runs.state import decode

__all__ = ["Record", "check", "is_run", "latest", "newest", "records", "remove", "write"]

_NAME = re.compile(r"step-(\d{8})-[0-9a-f]{8}")
POLICIES, CHECKPOINTS = "policies", "checkpoints"
_STEPS = 10**8  # as many as names have digits for
_LOOKS = 100  # at a folder that changes while it is read


@contextlib.contextmanager
def typed(what: str) -> Iterator[None]:
    """Turn what the system refuses within into a CheckpointError."""
    try:
        yield
    except RlkitError:  # a timeout of theirs is an OSError
        raise
    except OSError as error:
        raise CheckpointError(f"{what}: {error}") from error


@attrs.frozen
class Record:
    """A checkpoint of a run.

    Attributes:
        path: its folder.
        step: the step that a run goes on with.
        policies: role -> the path that the backend's ``save`` returned; those within the run are relative to it.
        kept: name -> state of what the loop keeps.
        metrics: what ``Run.checkpoint(metrics=)`` was given.
        seed: the run's.
        logged: tracker -> where its logs ended, as its ``sync`` said.
        order: which order of data the run has: 2, that of task sets; 1, the one of runs begun before it.
    """

    path: Path
    step: int
    policies: Mapping[str, str] = attrs.field(factory=dict)
    kept: Mapping[str, Any] = attrs.field(factory=dict)
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    seed: int | None = None
    logged: Mapping[str, Any] = attrs.field(factory=dict)
    order: int = 1

    def policy(self, role: str) -> str | None:
        """Return the path to resume that policy from; None where the checkpoint has none."""
        path = self.policies.get(role)
        if path is None or "://" in path or Path(path).is_absolute():
            return path
        return str(self.path.parent.parent / path)


def write(folder: Path, step: int, content: Mapping[str, Any]) -> Record:
    """Return a new checkpoint in ``folder``, read back before this returns.

    Raises:
        CheckpointError: it could not be written; nothing is left behind.
    """
    path = saves.write(folder / CHECKPOINTS, f"step-{step:08d}", lambda _: {"backend": "run", "step": step, **content})
    record = read(path)
    check(record)
    return record


def read(path: Path) -> Record:
    """Return the checkpoint at ``path``.

    Raises:
        CheckpointError: it is damaged.
    """
    _, state = saves.read(path, backend="run")
    step: Any = state.get("step")
    parts: list[Any] = [state.get(name, {}) for name in ("policies", "kept", "metrics", "logged")]
    seed: Any = state.get("seed")
    order: Any = state.get("order", 1)
    numbers = [step, order] if seed is None else [step, order, seed]
    if (
        not all(type(x) is int and x >= 0 for x in numbers)
        or numbers[0] >= _STEPS
        or not all(isinstance(each, dict) for each in parts)
    ):
        raise CheckpointError(f"{path} is not a run's checkpoint")
    policies, kept, metrics, logged = parts
    for role, policy in policies.items():
        if not isinstance(policy, str) or ("://" not in policy and not _inside(policy)):
            raise CheckpointError(f"{path} is damaged: its {role!r} is {policy!r}, which is no path in its run")
    try:
        metrics = {name: float(value) for name, value in decode(metrics).items()}
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its metrics are no numbers: {error}") from error
    return Record(Path(path), step, policies, kept, metrics, seed, logged, order)


def _inside(path: str) -> bool:
    """Return whether it is a folder in a folder of the run, or one elsewhere, which is never removed."""
    return Path(path).is_absolute() or (len(Path(path).parts) > 1 and ".." not in Path(path).parts)


def check(record: Record) -> None:
    """Read what the checkpoint refers to within its run against its checksums.

    Raises:
        CheckpointError: something is missing or damaged.
    """
    for role in record.policies:
        path = record.policy(role)
        if path is not None and "://" not in path:
            saves.read(path, backend=None)


def paths(folder: Path) -> list[Path]:
    """Return the folders of its checkpoints, damaged ones too, oldest first."""
    folders = []
    parent = folder / CHECKPOINTS
    with typed(f"{folder} cannot be read"):
        for path in parent.iterdir() if parent.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # the run that is writing has removed it
                if _NAME.fullmatch(path.name):
                    folders.append((path.name[:13], path.stat().st_mtime_ns, path))
    return [path for _, _, path in sorted(folders)]


def records(folder: str | os.PathLike[str], *, verify: bool = True) -> list[Record]:
    """Return the checkpoints of the run in ``folder``, by step, oldest first; another process may be writing to it.

    Those that are damaged are left out with a warning; with ``verify=False`` the policies' files are not read.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    there, whole, damaged = _looked(Path(folder), verify)
    for _ in range(_LOOKS):
        if paths(Path(folder)) == there:
            break  # else some were removed meanwhile, and newer ones are there
        there, whole, damaged = _looked(Path(folder), verify)
    for error in damaged:
        warn(f"skipped a checkpoint: {error}", RuntimeWarning)
    return whole


def is_run(folder: object) -> bool:
    """Return whether it is the path of a folder that a run keeps its checkpoints in."""
    if not isinstance(folder, (str, os.PathLike)):
        return False
    return os.path.isdir(Path(folder) / CHECKPOINTS)  # noqa: PTH112  # False for what cannot be a path, too


def newest(folder: str | os.PathLike[str], *, role: str = "policy", step: int | None = None) -> Record:
    """Return a run's newest checkpoint that has the policy, or the one of ``step``.

    Raises:
        CheckpointError: no checkpoint that is whole has one.
    """
    saved = [record for record in records(folder) if step in (None, record.step) and record.policy(role) is not None]
    if not saved:
        which = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{folder} has no whole checkpoint{which} with a {role!r}")
    return saved[-1]


def _looked(folder: Path, verify: bool) -> tuple[list[Path], list[Record], list[CheckpointError]]:
    there, whole, damaged = paths(folder), [], []
    for path in there:
        try:
            record = read(path)
            if verify:
                check(record)
        except CheckpointError as error:
            damaged.append(error)
        else:
            whole.append(record)
    return there, whole, damaged


def latest(folder: Path) -> Record | None:
    """Return the newest checkpoint that is whole, skipping damaged ones with a warning; None without any.

    Raises:
        CheckpointError: there are some, and none of them is whole: the run does not begin anew by itself.
    """
    there = paths(folder)
    for path in reversed(there):
        try:
            record = read(path)
            check(record)
        except CheckpointError as error:
            warn(f"skipped a checkpoint, going on from the one before: {error}", RuntimeWarning)
            continue
        return record
    if there:
        raise CheckpointError(
            f"none of the {len(there)} checkpoints in {folder} is whole; begin anew in another folder"
        )
    return None


def remove(record: Record) -> list[str]:
    """Remove a checkpoint and the policies in its run; returns those on a service, which a backend has to remove.

    What lies in other folders of this machine stays.
    """
    _discard(record.path)  # first, so that no checkpoint ever refers to what is gone
    for path in record.policies.values():
        if "://" not in path and not Path(path).is_absolute():
            _discard(record.path.parent.parent / path)
    return [path for path in record.policies.values() if "://" in path]


def tidy(folder: Path, kept: list[Record]) -> None:
    """Remove what writing was cut off left behind: partial folders, and policies of steps that no checkpoint has."""
    used = {Path(p) for record in kept for role in record.policies if (p := record.policy(role)) is not None}
    unread = {path.name[:13] for path in set(paths(folder)) - {record.path for record in kept}}  # their policies stay
    for parent in (folder / POLICIES, folder / CHECKPOINTS):
        for path in parent.iterdir() if parent.is_dir() else ():
            orphan = parent.name == POLICIES and path.name.startswith("step-") and path not in used
            if (orphan and path.name[:13] not in unread) or path.name.startswith("."):
                _discard(path)


def _discard(path: Path) -> None:
    """Remove it, renamed first, so that nothing half removed looks whole."""
    trash = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.gone")
    try:
        path.rename(trash)
    except OSError:
        return
    with contextlib.suppress(OSError):  # of closing a folder, which ignore_errors does not ignore
        shutil.rmtree(trash, ignore_errors=True)
