"""What the names and the metadata of saved states say: version, optimizer, and the stream of seeds."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

import attrs

from rlkit import _check
from rlkit.backends import saves
from rlkit.errors import CheckpointError, ConfigError

__all__ = ["SavedState", "check_label", "check_path", "make_name", "metadata_of", "read_state"]

_PATH = re.compile(r"tinker://(?P<run>[^/\s]+)/(?P<kind>weights|sampler_weights)/(?P<name>[^/\s]+)")
_NAME = re.compile(r".*-(?P<version>\d{6,})-(?P<optimizer>[ow])[0-9a-f]{8}")
_LABEL = 80


@attrs.frozen
class SavedState:
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


def make_name(label: str, version: int, *, optimizer: bool) -> str:
    """Return a name that is used once: reusing one has the SDK try again for minutes."""
    return f"{label}-{version:06d}-{'o' if optimizer else 'w'}{uuid.uuid4().hex[:8]}"


def metadata_of(seed: int, requests: int) -> dict[str, str]:
    """Return the metadata that the service keeps with a state: what makes resuming exact."""
    return {"rlkit.seed": str(seed), "rlkit.requests": str(requests)}


def check_path(where: str, path: object, *kinds: str) -> str:
    """Return the run that saved ``path``, which is of one of ``kinds``: "weights" or "sampler_weights".

    Raises:
        ConfigError: it is not text.
        CheckpointError: it is not a path of the service, or one of another kind.
    """
    if not isinstance(path, str) or not path:
        raise ConfigError(where, f"got {_check.describe(path)}", "the path that save() returned")
    match = _PATH.fullmatch(path)
    if match is None:
        raise CheckpointError(
            f"{where}: {path!r} is not a saved state of the service; expected tinker://<run>/{kinds[0]}/<name>"
        )
    if match["kind"] not in kinds:
        use = "sampled from; use rlkit.sampler(path=)" if "weights" in kinds else "trained from; use init_from="
        raise CheckpointError(f"{where}: {path} can only be {use}")
    return match["run"]


def read_state(path: str, metadata: Mapping[str, str] | None) -> SavedState:
    """Return what its name and its metadata say; a state that rlkit did not save is at version 0."""
    match = _NAME.fullmatch(path.rpartition("/")[2])
    version, optimizer = (0, True) if match is None else (int(match["version"]), match["optimizer"] == "o")
    metadata = metadata or {}
    seed, requests = metadata.get("rlkit.seed", ""), metadata.get("rlkit.requests", "")
    if not (seed.isdecimal() and requests.isdecimal()):
        return SavedState(version, optimizer)
    return SavedState(version, optimizer, int(seed), int(requests))
