"""Saved states by name, ``tinker://<run>/<kind>/<name>``, and the runs that saved them."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import attrs

from rlkit._files import replace_file
from rlkit.errors import CheckpointError, RlkitError
from rlkit.server._wire import ApiError
from rlkit.types import Lora

__all__ = ["KINDS", "Checkpoint", "Checkpoints", "Kind", "KnownRun", "checked_ttl"]

_log = logging.getLogger(__name__)

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: Mapping[str, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_USES = {
    "weights": "training",
    "sampler_weights": "sampling; training cannot start from them",
    "external_weights": "download; neither training nor sampling can use them",
}
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_INDEX = "tinker.json"
_FORMAT = 2
_RUNS = 1000  # how many runs without a saved state are remembered


@attrs.frozen(eq=False)
class Checkpoint:
    """A saved state.

    Attributes:
        path: ``tinker://...``.
        handle: the result of the model's ``save``.
        base_model, lora: of the run that saved it.
        made, expires: seconds since the epoch; None: never.
        metadata: the user's.
    """

    path: str
    handle: str
    base_model: str
    lora: Lora
    made: float
    expires: float | None = None
    metadata: Mapping[str, object] | None = None

    @property
    def kind(self) -> str:
        """Its purpose: "weights" to train from, "sampler_weights", or "external_weights" to download."""
        return self.path.split("/")[3]

    @property
    def run(self) -> str:
        """The run that saved it."""
        return self.path.split("/")[2]


@attrs.frozen(eq=False)
class KnownRun:
    """The record of a run whose model is gone: the fields of ``TrainingRun`` that are plain data."""

    model_id: str
    base_model: str
    lora: Lora
    metadata: Mapping[str, object] | None = None
    last_request: float = attrs.field(factory=time.time)


class Checkpoints:
    """All saved states of a service, and its runs.

    A state that is deleted, overwritten or expired is first removed from the index, then deleted. After a crash in
    between, the next service on the folder deletes it.

    Args:
        folder: where the index is kept, so that another service on the same folder knows them; None: in memory. With
            a folder, handles are paths.
        remove: deletes the state of a handle.

    Raises:
        CheckpointError: the folder's index is damaged.
    """

    def __init__(self, folder: Path | None = None, remove: Callable[[str], None] = lambda _: None) -> None:
        self._lock = threading.RLock()
        self._remove = remove
        self._reserved: set[str] = set()
        self._all: dict[str, Checkpoint] = {}
        self._runs: dict[str, KnownRun] = {}
        self._unwanted: list[str] = []  # handles of states that are off the index and not removed yet
        self._index = None if folder is None else folder / _INDEX
        if self._index is not None and self._index.exists():
            self._read(self._index)
            if self._unwanted:
                self._clear()
            self.prune()

    def reserve(self, run: str, kind: Kind, name: str, *, overwrite: bool = False) -> str:
        """Return the path of a state that is about to be saved.

        Raises:
            ApiError: 400, the name is not valid in a path, or is taken: the SDK would retry a 409 for minutes.
        """
        if not _NAME.fullmatch(name):
            expected = "1 to 100 letters, digits, '.', '_' or '-', not starting with a dot"
            raise ApiError(400, f"the name {name!r} of a checkpoint: expected {expected}")
        path = f"tinker://{run}/{kind}/{name}"
        with self._lock:
            if (path in self._all and not overwrite) or path in self._reserved:
                raise ApiError(400, f"the checkpoint {path} exists; use another name, or ask to overwrite it")
            self._reserved.add(path)
        return path

    def keep(self, checkpoint: Checkpoint) -> None:
        """Record that a reserved state was saved."""
        with self._lock:
            self._reserved.discard(checkpoint.path)
            old = self._all.get(checkpoint.path)
            self._all[checkpoint.path] = checkpoint
            if checkpoint.run in self._runs:
                self._runs[checkpoint.run] = attrs.evolve(self._runs[checkpoint.run], last_request=time.time())
            self._drop([] if old is None else [old])

    def release(self, path: str) -> None:
        """Record that a reserved state could not be saved."""
        with self._lock:
            self._reserved.discard(path)

    def find(self, path: str, kind: Kind | None = None) -> Checkpoint:
        """Return the state at ``path``.

        Raises:
            ApiError: 400, it has another kind or an invalid path; 404, there is no such state.
        """
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS:
            raise ApiError(400, f"{path!r} is not a checkpoint; expected tinker://<run>/{'|'.join(KINDS)}/<name>")
        with self._lock:
            self.prune()
            checkpoint = self._all.get(path)
        if checkpoint is None:
            raise ApiError(404, f"the checkpoint {path} does not exist")
        if kind is not None and checkpoint.kind != kind:
            raise ApiError(400, f"{path} holds weights saved for {_USES[checkpoint.kind]}")
        return checkpoint

    def change(self, path: str, *, expires: float | None) -> None:
        """Set the time when the state at ``path`` is dropped."""
        with self._lock:
            self._all[path] = attrs.evolve(self.find(path), expires=expires)
            self._write()

    def delete(self, path: str) -> None:
        """Remove the state at ``path``."""
        with self._lock:
            self._drop([self._all.pop(path)])

    def prune(self) -> None:
        """Remove expired states."""
        with self._lock:
            now = time.time()
            over = [x for x in self._all.values() if x.expires is not None and x.expires < now]
            for checkpoint in over:
                del self._all[checkpoint.path]
            if over:
                self._drop(over)

    def note(self, run: KnownRun) -> None:
        """Record a new run."""
        with self._lock:
            self._runs[run.model_id] = run
            saved = {x.run for x in self._all.values()}
            without = [name for name in self._runs if name not in saved]
            for name in without[: max(0, len(without) - _RUNS)]:
                del self._runs[name]
            self._write()

    def runs(self) -> list[KnownRun]:
        """Return the recorded runs, oldest first."""
        with self._lock:
            return list(self._runs.values())

    def all(self, run: str | None = None) -> list[Checkpoint]:
        """Return all states, of one run or of all, oldest first."""
        with self._lock:
            self.prune()
            return [x for x in self._all.values() if run is None or x.run == run]

    def _drop(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Write the index without them, then delete them."""
        self._unwanted += [x.handle for x in checkpoints]
        self._write()
        if self._unwanted:
            self._clear()

    def _clear(self) -> None:
        left = []
        for handle in self._unwanted:
            try:
                self._remove(handle)
            except (RlkitError, OSError) as error:
                _log.warning("a saved state without a name could not be removed: %s", error)
                left.append(handle)
        self._unwanted = left
        self._write()

    def _read(self, index: Path) -> None:
        try:
            record = json.loads(index.read_text("utf-8"))
            if isinstance(record, list):  # format 1, which knew of no runs
                record = {"format": _FORMAT, "states": record, "runs": [], "unwanted": []}
            if record["format"] != _FORMAT:
                raise ValueError(f"format {record['format']}")
            states = [Checkpoint(**{**item, "lora": _lora(item["lora"])}) for item in record["states"]]
            runs = [KnownRun(**{**item, "lora": _lora(item["lora"])}) for item in record["runs"]]
            self._unwanted = [str(handle) for handle in record["unwanted"]]
        except (OSError, ValueError, TypeError, KeyError) as error:
            message = f"{index} is damaged, or not an index of saved states that this version reads: {error!r}"
            raise CheckpointError(message) from error
        self._all = {x.path: x for x in states}
        self._runs = {x.model_id: x for x in runs}

    def _write(self) -> None:
        if self._index is None:
            return
        states = [{**attrs.asdict(x, recurse=True), "handle": str(x.handle)} for x in self._all.values()]
        runs = [attrs.asdict(x, recurse=True) for x in self._runs.values()]
        text = json.dumps(
            {"format": _FORMAT, "states": states, "runs": runs, "unwanted": [str(x) for x in self._unwanted]}, indent=1
        )
        self._index.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(self._index) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _lora(fields: dict[str, object]) -> Lora:
    targets = fields.get("target_modules")
    return Lora(**{**fields, "target_modules": tuple(targets) if isinstance(targets, list) else targets})  # type: ignore[arg-type]  # JSON


def checked_ttl(ttl: int | None) -> float | None:
    """Return when a state saved now expires. Raises ApiError: 400, outside of 1 hour to 10 years."""
    if ttl is None:
        return None
    if not 3600 <= ttl <= 10 * 366 * 86400:
        raise ApiError(400, f"ttl_seconds is {ttl}; expected 3600 (an hour) to ten years")
    return time.time() + ttl
