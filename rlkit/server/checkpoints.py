"""Saved states by name: ``tinker://<run>/<kind>/<name>``."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from rlkit.server.requests import ApiError
from rlkit.types import Lora

__all__ = ["KINDS", "Checkpoint", "Checkpoints", "Kind"]

Kind = Literal["weights", "sampler_weights"]
KINDS: Mapping[str, str] = {"weights": "training", "sampler_weights": "sampler"}
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_INDEX = "tinker.json"


@attrs.frozen(eq=False)
class Checkpoint:
    """A saved state.

    Attributes:
        path: ``tinker://...``.
        handle: what the model's ``save`` returned.
        base_model, lora: of the run that saved it.
        made, expires: seconds since the epoch; None: never.
        metadata: the user's.
    """

    path: str
    handle: Any
    base_model: str
    lora: Lora
    made: float
    expires: float | None = None
    metadata: Mapping[str, str] | None = None

    @property
    def kind(self) -> str:
        """Whether it was saved to train from, "weights", or to sample from, "sampler_weights"."""
        return self.path.split("/")[3]

    @property
    def run(self) -> str:
        """The run that saved it."""
        return self.path.split("/")[2]


class Checkpoints:
    """All saved states of a service.

    Args:
        folder: where the index is kept, so that another service on the same folder knows them; None: in memory. With
            a folder, handles are paths.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._lock = threading.RLock()
        self._reserved: set[str] = set()
        self._all: dict[str, Checkpoint] = {}
        self._index = None if folder is None else folder / _INDEX
        if self._index is not None and self._index.exists():
            for item in json.loads(self._index.read_text("utf-8")):
                self._all[item["path"]] = Checkpoint(**{**item, "lora": Lora(**item["lora"])})

    def reserve(self, run: str, kind: Kind, name: str, *, overwrite: bool = False) -> str:
        """The path of a state that is about to be saved.

        Raises:
            ApiError: 400, the name can not stand in a path; 409, it is taken.
        """
        if not _NAME.fullmatch(name):
            expected = "1 to 100 letters, digits, '.', '_' or '-', not starting with a dot"
            raise ApiError(400, f"the name {name!r} of a checkpoint: expected {expected}")
        path = f"tinker://{run}/{kind}/{name}"
        with self._lock:
            if (path in self._all and not overwrite) or path in self._reserved:
                raise ApiError(409, f"the checkpoint {path} exists; names are used once, or overwritten on demand")
            self._reserved.add(path)
        return path

    def keep(self, checkpoint: Checkpoint) -> None:
        """A reserved state was saved."""
        with self._lock:
            self._reserved.discard(checkpoint.path)
            self._all[checkpoint.path] = checkpoint
            self._write()

    def release(self, path: str) -> None:
        """A reserved state could not be saved."""
        with self._lock:
            self._reserved.discard(path)

    def find(self, path: str, kind: Kind | None = None) -> Checkpoint:
        """The state at ``path``.

        Raises:
            ApiError: 400, it is of another kind or no such path; 404, nothing is there.
        """
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS:
            raise ApiError(400, f"{path!r} is no checkpoint; expected tinker://<run>/weights|sampler_weights/<name>")
        with self._lock:
            found = self._all.get(path)
            if found is not None and found.expires is not None and found.expires < time.time():
                self.delete(path)
                found = None
        if found is None:
            raise ApiError(404, f"there is no checkpoint {path}")
        if kind is not None and found.kind != kind:
            use = "training" if found.kind == "weights" else "sampling; they cannot be trained from"
            raise ApiError(400, f"{path} holds weights saved for {use}")
        return found

    def change(self, path: str, *, expires: float | None) -> None:
        """Sets when the state at ``path`` is dropped."""
        with self._lock:
            self._all[path] = attrs.evolve(self.find(path), expires=expires)
            self._write()

    def delete(self, path: str) -> None:
        """Forgets the state at ``path``."""
        with self._lock:
            del self._all[path]
            self._write()

    def all(self, run: str | None = None) -> list[Checkpoint]:
        """All states, of one run or of all, oldest first."""
        with self._lock:
            return [x for x in self._all.values() if run is None or x.run == run]

    def _write(self) -> None:
        if self._index is None:
            return
        items = [{**attrs.asdict(x, recurse=True), "handle": str(x.handle)} for x in self._all.values()]
        self._index.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._index.with_suffix(".partial")
        temporary.write_text(json.dumps(items, indent=1), "utf-8")
        temporary.replace(self._index)


def checked_ttl(ttl: int | None) -> float | None:
    """When a state saved now expires.

    Raises:
        ApiError: 400, outside of 1 hour to 10 years.
    """
    if ttl is None:
        return None
    if not 3600 <= ttl <= 10 * 366 * 86400:
        raise ApiError(400, f"ttl_seconds is {ttl}; expected 3600 (an hour) to ten years")
    return time.time() + ttl
