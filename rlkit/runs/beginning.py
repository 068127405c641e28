"""What a run began with, kept beside its checkpoints: the seed, which stays, and the settings, which may change.

A run that is refused before its first step takes its folder back.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from rlkit import _check
from rlkit.backends.sampling import entropy_of
from rlkit.errors import CheckpointError, ConfigError

__all__ = ["missing", "note_config", "seed_of", "withdraw"]


def missing(folder: Path) -> list[Path]:
    """``folder`` and those above it that are not there yet, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def withdraw(made: list[Path]) -> None:
    """Removes folders that a run has made, unless there is more in them than every run begins with."""
    if not made:
        return
    always = {made[0] / name for name in ("lock", "run.json", "config.json")}
    if not any(path.is_file() and path.stat().st_size for path in {*made[0].rglob("*")} - always):
        shutil.rmtree(made[0], ignore_errors=True)
        with contextlib.suppress(OSError):  # something else is in it by now
            for folder in made[1:]:
                folder.rmdir()


def seed_of(folder: Path, seed: int | None) -> int:
    """The seed that the run in ``folder`` began with, or ``seed`` (None: a fresh one), written down.

    Raises:
        ConfigError: ``seed`` is another one than it began with.
        CheckpointError: it can not be read or written.
    """
    path = folder / "run.json"
    if path.exists():
        try:
            found = int(json.loads(path.read_text("utf-8"))["seed"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        if seed is not None and seed != found:
            raise ConfigError(f"seed: got {seed}, but the run in {folder} began with {found}")
        return found
    chosen = entropy_of(seed)
    _write(path, {"format": 1, "seed": chosen})
    return chosen


def note_config(folder: Path, config: Any, *, stacklevel: int) -> None:
    """Writes ``config`` down without what looks like a key, and warns of each setting that has changed.

    Raises:
        ConfigError: it is no mapping and no attrs object.
        CheckpointError: it can not be written.
    """
    from rlkit.tracking import masked

    if config is None:
        return
    plain = attrs.asdict(config) if attrs.has(type(config)) else config
    if not isinstance(plain, Mapping):
        raise ConfigError(_check.problem("Run(config)", f"got {_check.shown(config)}", "a mapping or an attrs object"))
    plain = json.loads(json.dumps(masked(plain), default=str))
    path = folder / "config.json"
    if path.exists():
        try:
            changed = ", ".join(_changes(json.loads(path.read_text("utf-8")), plain))
            text = f"the config of {folder} has changed: {changed}" if changed else ""
        except ValueError as error:  # nothing goes on from it, so it is written anew
            text = f"{path} is damaged, so whether the config has changed is not known: {error}"
        if text:
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)
    _write(path, plain)


def _changes(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """What differs, by its full key."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted(before.keys() | now.keys()):
            yield from _changes(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif before != now:
        yield f"{where} from {before!r} to {now!r}"


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"could not write {path}: {error}") from error
