"""Saved states on the service: what their names say, and what is kept beside them."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

import attrs

from rlkit import _check
from rlkit.backends import saves
from rlkit.errors import CheckpointError, ConfigError

__all__ = ["Saved", "checked_path", "name_of", "read", "run_of"]

_PATH = re.compile(r"tinker://(?P<run>[^/\s]+)/(?P<kind>weights|sampler_weights)/(?P<name>[^/\s]+)")
_NAME = re.compile(r".*-(?P<version>\d{6,})-(?P<optimizer>[ow])[0-9a-f]{8}")
_LABEL = 80


@attrs.frozen
class Saved:
    """What is known of a saved state: optimizer steps, whether its optimizer counts, and the stream of seeds."""

    version: int = 0
    optimizer: bool = True
    seed: int | None = None
    requests: int = 0


def check_label(name: object) -> str:
    """Return a label that a saved state's name can begin with, or raise a ConfigError."""
    label = saves.check_label(name)
    if len(label) > _LABEL:
        raise ConfigError("save(name)", f"has {len(label)} characters", f"at most {_LABEL}")
    return label


def name_of(label: str, version: int, *, optimizer: bool) -> str:
    """Return a name that is used once: reusing one has the SDK try again for minutes."""
    return f"{label}-{version:06d}-{'o' if optimizer else 'w'}{uuid.uuid4().hex[:8]}"


def notes(saved: Saved) -> dict[str, str]:
    """Return what is kept beside the state, as the service's metadata."""
    return {"rlkit.seed": str(saved.seed), "rlkit.requests": str(saved.requests)}


def checked_path(where: str, path: object, *, kind: str = "weights") -> str:
    """Return ``path`` if it can be one.

    Raises:
        ConfigError: it is no text.
        CheckpointError: it is no path of the service, or one of the other kind.
    """
    if not isinstance(path, str) or not path:
        raise ConfigError(where, f"got {_check.shown(path)}", "the path that save() returned")
    match = _PATH.fullmatch(path)
    if match is None:
        raise CheckpointError(
            f"{where}: {path!r} is no saved state of the service; expected tinker://<run>/{kind}/<name>"
        )
    if match["kind"] != kind:
        use = "sampled from, with rlkit.sampler(path=)" if kind == "weights" else "trained from, with init_from="
        raise CheckpointError(f"{where}: {path} can only be {use}")
    return path


def run_of(path: str) -> str:
    """Return the run that saved it."""
    match = _PATH.fullmatch(path)
    return "" if match is None else match["run"]


def read(path: str, metadata: Mapping[str, str] | None) -> Saved:
    """Return what its name and its metadata say; a state that rlkit did not save is at version 0."""
    match = _NAME.fullmatch(path.rpartition("/")[2])
    version, optimizer = (0, True) if match is None else (int(match["version"]), match["optimizer"] == "o")
    metadata = metadata or {}
    seed, requests = metadata.get("rlkit.seed", ""), metadata.get("rlkit.requests", "")
    if not (seed.isdecimal() and requests.isdecimal()):
        return Saved(version, optimizer)
    return Saved(version, optimizer, int(seed), int(requests))
