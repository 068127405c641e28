"""What a run began with, kept beside its checkpoints: the seed, which stays, and the settings, which may change.

A run that is refused before its first step takes its folder back.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from rlkit import _check
from rlkit._disk import replacing
from rlkit._json import plain
from rlkit._warn import warn
from rlkit.backends.sampling import entropy_of
from rlkit.config import SECRET
from rlkit.errors import CheckpointError, ConfigError
from rlkit.runs.record import CHECKPOINTS, POLICIES, Record

__all__ = ["changes", "make_folders", "note_config", "seed_of", "withdraw"]


def make_folders(folder: Path) -> list[Path]:
    """Make a run's folders; return ``folder`` and those above it that were not there before, the innermost first."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in (POLICIES, CHECKPOINTS):
        (folder / name).mkdir(exist_ok=True, mode=0o700)
    return new


def withdraw(made: list[Path]) -> None:
    """Remove folders that a run has made, unless there is more in them than every run begins with."""
    if not made:
        return
    known = ("lock", "lock.held", "run.json", "config.json", "surroundings.jsonl")
    always = {made[0] / name for name in known}
    if not any(path.is_file() and path.stat().st_size for path in {*made[0].rglob("*")} - always):
        shutil.rmtree(made[0], ignore_errors=True)
        with contextlib.suppress(OSError):  # something else is in it by now
            for folder in made[1:]:
                folder.rmdir()


def seed_of(folder: Path, seed: int | None, record: Record | None) -> int:
    """Return the seed that the run in ``folder`` began with, or ``seed`` (None: a fresh one), written down.

    A checkpoint has it too: where run.json is gone or damaged it is taken from there, with a warning.

    Raises:
        ConfigError: ``seed`` is another one than it began with.
        CheckpointError: it cannot be read or written, or run.json is not that of the checkpoint.
    """
    path = folder / "run.json"
    saved = None if record is None else record.seed
    noted, problem = _noted(path)
    if problem and saved is None and path.exists():
        raise CheckpointError(f"{path} {problem}")
    if problem and saved is not None:
        warn(f"{path} {problem}; the seed is the checkpoint's", RuntimeWarning)
        _write(path, {"format": 1, "seed": saved})
        noted = saved
    if noted is None:
        noted = entropy_of(seed)
        _write(path, {"format": 1, "seed": noted})
    elif saved is not None and saved != noted:
        text = f"{path} has the seed {noted}, but the checkpoint of step {record.step if record else 0} has {saved}"
        raise CheckpointError(f"{text}: it is another run's; without it, the run goes on with the checkpoint's")
    if seed is not None and seed != noted:
        raise ConfigError(f"seed: got {seed}, but the run in {folder} began with {noted}")
    return noted


def _noted(path: Path) -> tuple[int | None, str]:
    """Return the seed in run.json, and what is wrong with it, if anything."""
    if path.exists() and not path.is_file():  # a pipe or a device has no end
        return None, "is damaged: it is no file"
    try:
        seed = json.loads(path.read_text("utf-8"))["seed"]
    except FileNotFoundError:
        return None, "is missing"
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        return None, f"is damaged: {type(error).__name__}"
    return (seed, "") if type(seed) is int and seed >= 0 else (None, "is damaged: its seed is no integer >= 0")


def note_config(folder: Path, config: object) -> None:
    """Write ``config`` down without what looks like a key, and warns of each setting that has changed.

    Raises:
        ConfigError: it is no mapping and no attrs object.
        CheckpointError: it cannot be written.
    """
    if config is None:
        return
    plain = _plain(config)
    path = folder / "config.json"
    if path.is_file():
        try:
            changed = ", ".join(_changes(_before(path), plain))
            text = f"the config of {folder} has changed: {changed}" if changed else ""
        except (ValueError, RecursionError) as error:  # nothing goes on from it, so it is written anew
            text = f"{path} is damaged, so whether the config has changed is not known: {error}"
        if text:
            warn(text, RuntimeWarning)
    _write(path, plain)


def changes(folder: Path, config: object) -> list[str]:
    """Return which settings of ``config`` differ from what the run in ``folder`` noted; [] where that is not known."""
    path = folder / "config.json"
    try:
        return list(_changes(_before(path), _plain(config)))
    except (OSError, ValueError, RecursionError):
        return []


def _before(path: Path) -> object:
    """Return the config that was written down."""
    return plain(json.loads(path.read_text("utf-8")))


def _plain(config: Any) -> Any:
    """Return ``config`` as it is written down, without what looks like a key."""
    from rlkit.tracking import masked

    plain_config = attrs.asdict(config, filter=_no_secret) if attrs.has(type(config)) else config
    _check.require(isinstance(plain_config, Mapping), "Run(config)", config, "a mapping or an attrs object")
    return plain(masked(plain_config))


def _no_secret(field: Any, value: Any) -> bool:
    """Leave out what ``rlkit.config.secret`` took from the environment."""
    del value
    return SECRET not in field.metadata


def _changes(before: object, now: object, where: str = "") -> Iterator[str]:
    """Yield what differs, by its full key."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted(before.keys() | now.keys()):
            yield from _changes(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif before != now:
        yield f"{where} from {before!r} to {now!r}"


def _write(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON, whole or not at all."""
    try:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1, allow_nan=False), "utf-8")
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error}") from error
