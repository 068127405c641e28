"""Saved states on disk: a folder that is there whole or not at all, with a checksum for each file in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlkit import _check
from rlkit._files import make_private, sync
from rlkit.errors import CheckpointError, ConfigError, RlkitError

__all__ = ["check_label", "read", "remove", "restoring", "write"]

_LABEL = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_STATE = "state.json"
_FORMAT = 1


def check_label(name: object) -> str:
    """Return ``name`` if a file name can contain it, else raise a ConfigError."""
    if not isinstance(name, str) or not _LABEL.fullmatch(name):
        expected = "1 to 100 letters, digits, '.', '_' or '-', not starting with a dot"
        raise ConfigError("save(name)", f"got {_check.describe(name)}", expected)
    return name


def write(parent: Path, label: str, fill: Callable[[Path], Mapping[str, object]]) -> Path:
    """Write a new folder ``parent/label-xxxxxxxx``: under another name first, then renamed.

    Args:
        parent: created if missing.
        label: the beginning of the folder's name.
        fill: writes files into the given folder, and returns the fields of ``state.json``.

    Raises:
        CheckpointError: the system refused; no partial state stays.
    """
    unique = f"{label}-{uuid.uuid4().hex[:8]}"
    final, temporary = parent / unique, parent / f".{unique}.partial"
    try:
        temporary.mkdir(parents=True, mode=0o700)
        state: dict[str, object] = {"format": _FORMAT, **fill(temporary)}
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        state["sha256"] = {str(path.relative_to(temporary)): _digest(path) for path in files}
        state["state_sha256"] = _own_digest(state)
        (temporary / _STATE).write_text(_text(state))
        for path in (*files, temporary / _STATE):
            make_private(path)
            sync(path)
        sync(temporary)
        temporary.rename(final)
        sync(parent)
    except OSError as error:
        raise CheckpointError(f"save: could not write {final}: {error}") from error
    finally:
        with contextlib.suppress(OSError):  # of closing a folder, which ignore_errors does not ignore
            shutil.rmtree(temporary, ignore_errors=True)
    return final.absolute()


def read(path: str | os.PathLike[str], *, backend: str | None) -> tuple[Path, dict[str, Any]]:
    """Return (folder, state) that ``write`` wrote, every file checked against its checksum.

    Args:
        path: the folder.
        backend: the one that must have saved it; None for any.

    Raises:
        CheckpointError: nothing is there, it is damaged, or it is another backend's.
    """
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise ConfigError("resume_from or init_from", f"got {_check.describe(path)}", "the path that save() returned")
    folder = Path(path)
    try:
        state = _verify(folder)
    except (OSError, ValueError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{folder} holds no complete saved state: {error}") from error
    if backend is not None and state.get("backend") != backend:
        raise CheckpointError(f"{folder} was saved by the {state.get('backend')!r} backend; this is {backend!r}")
    return folder, state


@contextlib.contextmanager
def restoring(folder: Path) -> Iterator[None]:
    """Turn an error within, while a state that was read is restored, into a CheckpointError.

    A state with the right checksum may still have the wrong content, if another version or program wrote it.
    """
    try:
        yield
    except (RlkitError, MemoryError):
        raise
    except Exception as error:  # numpy's, zipfile's and safetensors' have no class in common
        raise CheckpointError(f"{folder} is damaged: {type(error).__name__}: {error}") from error


def _verify(folder: Path) -> dict[str, Any]:
    """Return the content of state.json, once it and every file that it names have the checksums in it."""
    file = folder / _STATE
    _check_file(file)
    text = file.read_text("utf-8")
    state = json.loads(text)
    if not isinstance(state, dict) or state.get("format") != _FORMAT or not isinstance(state.get("sha256"), dict):
        raise CheckpointError(f"{file} is not a saved state of format {_FORMAT}")
    written = _text(state)  # another text of the same content, such as 1E5 for 1e5, is damage too
    if state.pop("state_sha256", None) != _own_digest(state) or text != written:
        raise CheckpointError(f"{file} is damaged: its SHA-256 differs from the recorded one")
    for name, expected in state["sha256"].items():
        file = folder / name
        if folder.resolve() not in file.resolve().parents:
            raise CheckpointError(f"{folder / _STATE} names a file outside its folder: {name!r}")
        _check_file(file)
        try:
            digest = _digest(file)
        except OSError as error:
            raise CheckpointError(f"{folder} lacks {name}: {error}") from error
        if digest != expected:
            found = f"{digest[:12]}..., expected {str(expected)[:12]}..."
            raise CheckpointError(f"{file} is damaged: its SHA-256 is {found}")
    return state


def _check_file(path: Path) -> None:
    if path.exists() and not path.is_file():  # a pipe or a device has no end
        raise CheckpointError(f"{path} is not a file")


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a folder that ``write`` wrote; do nothing where it is gone already.

    Raises:
        CheckpointError: the folder is not a saved state, or the system refused.
    """
    folder = Path(path)
    if not folder.exists():
        return
    if folder.is_symlink() or not (folder / _STATE).is_file():
        raise CheckpointError(f"delete: {folder} is not a saved state; nothing was removed")
    gone = folder.with_name(f".{folder.name}.partial")  # renamed first, so that half of it is never found
    try:
        folder.rename(gone)
        shutil.rmtree(gone)
    except OSError as error:
        raise CheckpointError(f"delete: could not remove {folder}: {error}") from error


def _text(state: Mapping[str, object]) -> str:
    return json.dumps(state, indent=1, allow_nan=False) + "\n"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own_digest(state: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
