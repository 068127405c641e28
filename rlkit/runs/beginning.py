"""The start of a run, kept next to its checkpoints: the seed, which stays, and the settings, which may change.

A run that is refused before its first step takes its folder back.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar, cast

import attrs

from rlkit import _check
from rlkit._files import plain, replace_file
from rlkit._runtime import warn
from rlkit._seeds import resolve_seed
from rlkit.errors import CheckpointError, ConfigError
from rlkit.runs.record import CHECKPOINTS, POLICIES, Record, Stateful, capture, encode, restore

__all__ = ["Kept", "changes", "check_name", "make_folders", "note_config", "seed_of", "withdraw"]

T = TypeVar("T")


class Kept:
    """The objects that a run keeps."""

    def __init__(self) -> None:
        self.objects: dict[str, object] = {}

    def add(self, name: str, kept: T, record: Record | None) -> T:
        """Keep an object, and restore it from ``record``; see ``Run.keep``."""
        if check_name("keep(name)", name) in self.objects:
            if self.objects[name] is kept:
                return kept
            why, what = "in a notebook, open the run again to redefine it", f"got {_check.describe(name)}"
            raise ConfigError("keep(name)", what, "an unused name", why)
        capture(name, kept)
        if record is not None:
            if name in record.kept:
                restore(name, kept, record.kept[name])
            else:
                warn(f"the checkpoint has no {name!r}, which starts from its initial state", RuntimeWarning)
        self.objects[name] = kept
        return kept

    def value(self, name: str, make: Callable[[], T], record: Record | None) -> T:
        """Return the result of the first ``make()``; see ``Run.value``."""
        key = f"value/{check_name('value(name)', name)}"
        box = cast("dict[str, T]", self.objects[key] if key in self.objects else self.add(key, {}, record))
        if "value" not in box:
            box["value"] = make()
            encode(name, box["value"])
        return box["value"]

    def state(self, record: Record | None) -> dict[str, object]:
        """Return the state of every object, and of those in ``record`` that were not requested since."""
        before = {} if record is None else record.kept
        return {**before, **{name: capture(name, kept) for name, kept in self.objects.items()}}

    def now(self, record: Record | None) -> dict[str, object] | None:
        """Return ``state`` where that is immediate and without effect; None if an object with its own methods is kept.

        What has ``state()`` may have to wait for something, as batches do that are sampled ahead; of these ``_idle()``,
        where there is such, returns a state or None.
        """
        states = dict[str, object]({} if record is None else record.kept)
        for name, kept in self.objects.items():
            if isinstance(kept, Stateful):
                idle = getattr(kept, "_idle", None)
                state = idle() if callable(idle) else None
                if state is None:
                    return None
                states[name] = encode(name, state)
            else:
                states[name] = capture(name, kept)
        return states

    def restore(self, record: Record) -> None:
        """Restore every object from ``record``."""
        for name, kept in self.objects.items():
            if name in record.kept:
                restore(name, kept, record.kept[name])


def check_name(where: str, name: object) -> str:
    """Return ``name`` if it is a text that is not empty and can be written.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(name, str) or not name or name.encode("utf-8", "replace").decode() != name:
        raise ConfigError(where, f"got {_check.describe(name)}", "a name: a non-empty string")
    return name


def make_folders(folder: Path) -> list[Path]:
    """Make a run's folders; return ``folder`` and its new parents, the innermost first."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in (POLICIES, CHECKPOINTS):
        (folder / name).mkdir(exist_ok=True, mode=0o700)
    return new


def withdraw(made: list[Path]) -> None:
    """Remove folders that a run has made, unless they hold more than a new run's files."""
    if not made:
        return
    known = ("lock", "lock.held", "run.json", "config.json", "settings.json", "surroundings.jsonl")
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
        noted = resolve_seed(seed)
        _write(path, {"format": 1, "seed": noted})
    elif saved is not None and saved != noted:
        text = f"{path} has the seed {noted}, but the checkpoint of step {record.step if record else 0} has {saved}"
        raise CheckpointError(f"{text}: it belongs to another run; remove it to continue with the checkpoint's seed")
    if seed is not None and seed != noted:
        raise ConfigError(f"seed: got {seed}, but the run in {folder} began with {noted}")
    return noted


def _noted(path: Path) -> tuple[int | None, str]:
    """Return the seed in run.json, and what is wrong with it, if anything."""
    if path.exists() and not path.is_file():  # a pipe or a device has no end
        return None, "is damaged: it is not a file"
    try:
        seed = json.loads(path.read_text("utf-8"))["seed"]
    except FileNotFoundError:
        return None, "is missing"
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        return None, f"is damaged: {type(error).__name__}"
    return (seed, "") if type(seed) is int and seed >= 0 else (None, "is damaged: its seed is not an integer >= 0")


def note_config(folder: Path, config: object) -> None:
    """Write ``config`` down without what looks like a key, and warn of each setting that has changed.

    Raises:
        ConfigError: it is neither a mapping nor an attrs object.
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
        except (ValueError, RecursionError) as error:  # no run resumes from it, so it is rewritten
            text = f"{path} is damaged, so rlkit cannot tell whether the config has changed: {error}"
        if text:
            warn(text, RuntimeWarning)
    _write(path, plain)


def changes(folder: Path, config: object) -> list[str]:
    """Return which settings of ``config`` differ from what the run in ``folder`` noted; [] where unknown."""
    path = folder / "config.json"
    try:
        return list(_changes(_before(path), _plain(config)))
    except (OSError, ValueError, RecursionError):
        return []


def _before(path: Path) -> object:
    """Return the config that was written down."""
    return plain(json.loads(path.read_text("utf-8")))


def _plain(config: object) -> Mapping[str, object]:
    """Return ``config`` as it is written down, without what looks like a key."""
    from rlkit.tracking import mask

    settings = attrs.asdict(cast("attrs.AttrsInstance", config)) if attrs.has(type(config)) else config
    _check.require(isinstance(settings, Mapping), "Run(config)", config, "a mapping or an attrs object")
    return cast("Mapping[str, object]", plain(mask(settings)))


def _changes(before: object, now: object, where: str = "") -> Iterator[str]:
    """Yield the differences by their full keys."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted(before.keys() | now.keys()):
            yield from _changes(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif before != now:
        yield f"{where} from {before!r} to {now!r}"


def _write(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON, whole or not at all."""
    try:
        with replace_file(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1, allow_nan=False), "utf-8")
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error}") from error
