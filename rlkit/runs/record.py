"""Checkpoints of runs: folders that exist whole or not at all, and list what belongs to them.

Objects that a loop keeps between steps, as JSON and back, bit for bit.

Floats are written so that reading gives the same float, infinities and NaN too; arrays as base64 of their bytes.
"""

from __future__ import annotations

import base64
import contextlib
import math
import os
import random
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import attrs
import numpy as np

from rlkit import _check
from rlkit._check import checked
from rlkit._files import from_json, to_json
from rlkit._runtime import warn
from rlkit.backends import saves
from rlkit.errors import BackendError, CheckpointError, ConfigError, RlkitError

__all__ = ["Record", "Retention", "Stateful", "decode", "encode", "newest", "records"]

_ARRAY, _SCALAR, _TUPLE, _PAIRS, _FLOAT = "__array__", "__scalar__", "__tuple__", "__pairs__", "__float__"
_KINDS = "biufcmMSU"  # of arrays that their bytes describe completely


@runtime_checkable
class Stateful(Protocol):
    """An object that can save its state as plain data, and restore it."""

    def state(self) -> object:
        """Return numbers, texts, arrays, and lists and dicts of them."""

    def restore(self, state: Any) -> None:
        """Restore the object from ``state``."""


def capture(where: str, kept: object) -> object:
    """Return the state of ``kept`` as JSON, for ``restore``.

    Args:
        where: its name, for messages.
        kept: a numpy Generator, a ``random.Random``, an instance of a class made with ``attrs.define``, something with
            ``state`` and ``restore``, or a dict or list of plain data. Fields of an attrs object may be any of these.

    Raises:
        ConfigError: it is none of these, or holds a value that cannot be written and read back exactly.
    """
    kind = type(kept)
    if isinstance(kept, np.random.Generator):
        return encode(where, kept.bit_generator.state)
    if isinstance(kept, random.Random):
        return encode(where, kept.getstate())
    if isinstance(kept, Stateful):
        return encode(where, kept.state())
    if attrs.has(kind):
        return {field.name: _field(where, kept, field.name) for field in attrs.fields(kind)}
    if isinstance(kept, (dict, list)):
        return encode(where, kept)
    expected = "a generator, an attrs object, a dict, a list, or something with state() and restore()"
    raise ConfigError(where, f"got {_check.describe(kept)}", expected)


def _in_place(value: object) -> bool:
    """Return whether a field holds something that is itself restored in place."""
    return isinstance(value, (np.random.Generator, random.Random, Stateful)) or attrs.has(type(value))


def _field(where: str, kept: object, name: str) -> object:
    value = getattr(kept, name)
    if _in_place(value):
        return capture(f"{where}.{name}", value)
    try:
        setattr(kept, name, value)
    except attrs.exceptions.FrozenError as error:
        what = "is frozen, so a checkpoint could not be restored into it"
        raise ConfigError(where, what, "a class made with attrs.define") from error
    return encode(f"{where}.{name}", value)


def restore(where: str, kept: object, state: Any) -> None:
    """Restore ``kept`` in place to its captured ``state``.

    Raises:
        CheckpointError: the state is of another kind of object.
    """
    kind = type(kept)
    try:
        plain = decode(state)
        if isinstance(kept, np.random.Generator):
            kept.bit_generator.state = plain
        elif isinstance(kept, random.Random):
            kept.setstate(plain)
        elif isinstance(kept, Stateful):
            kept.restore(plain)
        elif attrs.has(kind):
            names = {field.name for field in attrs.fields(kind)}
            if not isinstance(plain, dict) or plain.keys() != names:
                raise ValueError(f"it has the fields {sorted(plain)}, expected {sorted(names)}")
            for name, value in plain.items():
                if _in_place(getattr(kept, name)):
                    restore(f"{where}.{name}", getattr(kept, name), state[name])
                else:
                    setattr(kept, name, value)
        elif isinstance(kept, dict):
            fresh = dict(plain)
            kept.clear()
            kept.update(fresh)
        else:
            cast("list[object]", kept)[:] = list(plain)
    except CheckpointError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{where}: the saved value does not fit {_check.describe(kept)}: {error}") from error


def encode(where: str, value: object) -> object:
    """Return ``value`` in a form that JSON can hold.

    Raises:
        ConfigError: a value in it cannot be kept; the message names its place.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [encode(f"{where}[{i}]", x) for i, x in enumerate(value)]}
    if isinstance(value, list):
        return [encode(f"{where}[{i}]", x) for i, x in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode(f"{where}[{key!r}]", x) for key, x in value.items()}
        pairs = [[encode(f"a key of {where}", k), encode(f"{where}[{k!r}]", x)] for k, x in value.items()]
        return {_PAIRS: pairs}
    number = _encode_number(value)
    if number is None:
        why = "pass an object with a state under a separate name" if attrs.has(type(value)) else ""
        raise ConfigError(where, f"got {_check.describe(value)}", "numbers, texts, arrays, lists and dicts", why)
    return number


def _encode_number(value: object) -> object:
    """Return a number or an array as JSON holds it; None where it is neither, or has no exact form."""
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, np.timedelta64):
        return int(value)
    if isinstance(value, (float, np.float16, np.float32)):
        number = float(value)
        return number if math.isfinite(number) else {_FLOAT: to_json(number)}
    array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic, complex)) else None
    if array is None or array.dtype.kind not in _KINDS:
        return None
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    name = _ARRAY if isinstance(value, np.ndarray) else _SCALAR
    return {name: array.dtype.str, "shape": list(array.shape), "data": data}


def decode(value: object) -> Any:
    """Return the inverse of ``encode``; tuples and arrays are restored.

    Raises:
        ValueError, KeyError: it is not a result of ``encode``.
    """
    if isinstance(value, list):
        return [decode(x) for x in value]
    if not isinstance(value, dict):
        return value
    if _FLOAT in value:
        number = from_json(value[_FLOAT])
        if number is None:
            raise ValueError(f"a number that is {_check.describe(value[_FLOAT])}")
        return number
    if _ARRAY in value or _SCALAR in value:
        dtype = np.dtype(value.get(_ARRAY, value.get(_SCALAR)))
        if dtype.kind not in _KINDS:
            raise ValueError(f"an array of dtype {dtype}")
        flat = np.frombuffer(base64.b64decode(value["data"], validate=True), dtype)
        array = flat.reshape(value["shape"]).copy()
        return array if _ARRAY in value else array[()]
    if _TUPLE in value:
        return tuple(decode(x) for x in value[_TUPLE])
    if _PAIRS in value:
        return {decode(k): decode(x) for k, x in value[_PAIRS]}
    return {key: decode(x) for key, x in value.items()}


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

    def spent(self, records: Sequence[Record]) -> list[Record]:
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


def prune(folder: Path, retention: Retention, delete: Callable[[Sequence[str]], None]) -> None:
    """Remove what retention does not keep, by ``delete`` on a service; a failed removal does not end the run."""
    try:
        there = records(folder, verify=False)
        spent = retention.spent(there)
        for record in spent:
            delete(remove(record))
        tidy(folder, [record for record in there if record not in spent])
    except (OSError, BackendError) as error:
        warn(f"an old checkpoint could not be removed: {error}", RuntimeWarning)


_NAME = re.compile(r"step-(\d{8})-[0-9a-f]{8}")
POLICIES, CHECKPOINTS = "policies", "checkpoints"
_STEPS = 10**8  # as many as names have digits for
_ORDER = 2  # of data, as rlkit._seeds draws it; checkpoints of early development name none or 1
_LOOKS = 100  # at a folder that changes while it is read


@contextlib.contextmanager
def typed(what: str) -> Iterator[None]:
    """Turn errors of the system inside the block into a CheckpointError."""
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
        step: the step that a run resumes with.
        policies: role -> the path that the backend's ``save`` returned; those within the run are relative to it.
        kept: name -> state of a kept object.
        metrics: the argument of ``Run.checkpoint(metrics=)``.
        seed: the run's.
        logged: tracker -> the end of its logs, as its ``sync`` returned it.
        order: the number of the order in which the run draws data; a run resumes only with the newest.
    """

    path: Path
    step: int
    policies: Mapping[str, str] = attrs.field(factory=dict)
    kept: Mapping[str, Any] = attrs.field(factory=dict)
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    seed: int | None = None
    logged: Mapping[str, object] = attrs.field(factory=dict)
    order: int = _ORDER

    def policy(self, role: str) -> str | None:
        """Return the path to resume that policy from; None where the checkpoint has none."""
        path = self.policies.get(role)
        if path is None or "://" in path or Path(path).is_absolute():
            return path
        return str(self.path.parent.parent / path)


def write(folder: Path, step: int, content: Mapping[str, object]) -> Record:
    """Return a new checkpoint in ``folder``, read back before this returns.

    Raises:
        CheckpointError: it could not be written; no part of it remains.
    """
    head = {"backend": "run", "step": step, "order": _ORDER}
    path = saves.write(folder / CHECKPOINTS, f"step-{step:08d}", lambda _: head | dict(content))
    record = read(path)
    check(record)
    return record


def read(path: Path) -> Record:
    """Return the checkpoint at ``path``.

    Raises:
        CheckpointError: it is damaged.
    """
    _, state = saves.read(path, backend="run")
    parts = [state.get(name, {}) for name in ("policies", "kept", "metrics", "logged")]
    step, order, seed = state.get("step", -1), state.get("order", 1), state.get("seed")
    fits = all(type(x) is int and x >= 0 for x in ([step, order] if seed is None else [step, order, seed]))
    if not fits or step >= _STEPS or not all(isinstance(each, dict) for each in parts):
        raise CheckpointError(f"{path} is not a run's checkpoint")
    policies, kept, metrics, logged = parts
    for role, policy in policies.items():
        if not isinstance(policy, str) or ("://" not in policy and not _inside(policy)):
            raise CheckpointError(f"{path} is damaged: its {role!r} is {policy!r}, which is not a path in the run")
    try:
        metrics = {name: float(value) for name, value in decode(metrics).items()}
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its metrics are not numbers: {error}") from error
    return Record(Path(path), step, policies, kept, metrics, seed, logged, order)


def _inside(path: str) -> bool:
    """Return whether it is a folder in a folder of the run, or one elsewhere, which is never removed."""
    return Path(path).is_absolute() or (len(Path(path).parts) > 1 and ".." not in Path(path).parts)


def check(record: Record) -> None:
    """Check the files that the checkpoint refers to within its run against its checksums.

    Raises:
        CheckpointError: something is missing or damaged.
    """
    for role in record.policies:
        path = record.policy(role)
        if path is not None and "://" not in path:
            saves.read(path, backend=None)


def paths(folder: Path) -> list[Path]:
    """Return the folders of its checkpoints, including damaged ones, oldest first."""
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

    Damaged ones are left out with a warning; with ``verify=False`` the policies' files are not read.

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
    """Return whether it is the path of a run's folder of checkpoints."""
    if not isinstance(folder, (str, os.PathLike)):
        return False
    return os.path.isdir(Path(folder) / CHECKPOINTS)  # noqa: PTH112  # False for what cannot be a path, too


def newest(folder: str | os.PathLike[str], *, role: str = "policy", step: int | None = None) -> Record:
    """Return a run's newest checkpoint that has the policy, or the one of ``step``.

    Raises:
        CheckpointError: no whole checkpoint has one.
    """
    saved = [record for record in records(folder) if step in (None, record.step) and record.policy(role) is not None]
    if not saved:
        which = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{folder} has no complete checkpoint{which} with a {role!r}")
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
    """Return the newest whole checkpoint, skipping damaged ones with a warning; None without any.

    Raises:
        CheckpointError: all checkpoints are damaged, or the newest is of an earlier rlkit, so that the run could not
            resume exactly: it does not restart by itself.
    """
    there = paths(folder)
    for path in reversed(there):
        try:
            record = read(path)
            check(record)
        except CheckpointError as error:
            warn(f"skipped a checkpoint, resuming from the previous one: {error}", RuntimeWarning)
            continue
        if record.order != _ORDER:
            raise CheckpointError(
                f"{path} is of an earlier rlkit, which drew data in another order; finish the run with that version, "
                f"or start a new run in another folder from its weights: init_from={record.policy('policy')!r}"
            )
        return record
    if there:
        raise CheckpointError(
            f"none of the {len(there)} checkpoints in {folder} is complete; start a new run in another folder"
        )
    return None


def remove(record: Record) -> list[str]:
    """Remove a checkpoint and the policies in its run; return those on a service, which a backend has to remove.

    Files in other folders of this machine stay.
    """
    _discard(record.path)  # first, so that no checkpoint ever refers to what is gone
    for path in record.policies.values():
        if "://" not in path and not Path(path).is_absolute():
            _discard(record.path.parent.parent / path)
    return [path for path in record.policies.values() if "://" in path]


def tidy(folder: Path, kept: list[Record]) -> None:
    """Remove the remains of interrupted writes: partial folders, and policies of steps that no checkpoint has."""
    used = {Path(p) for record in kept for role in record.policies if (p := record.policy(role)) is not None}
    unread = {path.name[:13] for path in set(paths(folder)) - {record.path for record in kept}}  # their policies stay
    for parent in (folder / POLICIES, folder / CHECKPOINTS):
        for path in parent.iterdir() if parent.is_dir() else ():
            orphan = parent.name == POLICIES and path.name.startswith("step-") and path not in used
            if (orphan and path.name[:13] not in unread) or path.name.startswith("."):
                _discard(path)


def _discard(path: Path) -> None:
    """Remove it, renamed first, so that a half-removed folder never looks whole."""
    trash = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.gone")
    try:
        path.rename(trash)
    except OSError:
        return
    with contextlib.suppress(OSError):  # of closing a folder, which ignore_errors does not ignore
        shutil.rmtree(trash, ignore_errors=True)
