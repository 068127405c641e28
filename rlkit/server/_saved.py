"""Saved states by name, ``tinker://<run>/<kind>/<name>``: their index on disk, and the lists of them and of runs."""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import pydantic
from filelock import BaseFileLock, FileLock, Timeout
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tinker import types

from rlkit._files import replace_file
from rlkit.errors import CheckpointError, DataError, RlkitError
from rlkit.server._wire import answer, read
from rlkit.types import Lora

if TYPE_CHECKING:
    from rlkit.server._app import Service
    from rlkit.server._training import TrainingRun

__all__ = ["ENDPOINTS", "Kind", "SavedState", "SavedStates", "expiry_of"]

_log = logging.getLogger(__name__)

Kind = Literal["weights", "sampler_weights"]
_TYPES = {"weights": "training", "sampler_weights": "sampler"}
_USES = {"weights": "training", "sampler_weights": "sampling; training cannot start from them"}
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_INDEX = "tinker.json"
_FORMAT = 3


@attrs.frozen(eq=False)
class SavedState:
    """A saved state.

    Attributes:
        path: ``tinker://...``.
        handle: the result of the model's ``save``.
        base_model, lora: of the run that saved it.
        made, expires: seconds since the epoch; None: never.
        metadata, run_metadata: the user's, of the state and of the run.
    """

    path: str
    handle: str
    base_model: str
    lora: Lora
    made: float
    expires: float | None = None
    metadata: Mapping[str, str] | None = None
    run_metadata: Mapping[str, Any] | None = None

    @property
    def kind(self) -> str:
        """Its purpose: "weights" to train from, or "sampler_weights"."""
        return self.path.split("/")[3]

    @property
    def run(self) -> str:
        """The run that saved it."""
        return self.path.split("/")[2]


class SavedStates:
    """All saved states of a service.

    A state that is deleted or expired is first deleted, then removed from the index. After a crash in between, the next
    service on the folder finds nothing there, and drops the entry.

    Args:
        folder: where the index is kept, so that another service on the same folder knows them; None: in memory. With
            a folder, handles are paths.
        remove: deletes the state of a handle.

    Raises:
        CheckpointError: another server uses the folder, it cannot be written, or its index is damaged.
    """

    def __init__(self, folder: Path | None, remove: Callable[[str], None]) -> None:
        self._lock = threading.RLock()  # jobs of models save in their own threads
        self._remove = remove
        self._reserved: set[str] = set()
        self._all: dict[str, SavedState] = {}
        self._held = None if folder is None else _acquire_folder(folder)
        self._index = None if folder is None else folder / _INDEX
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        if (index := self._index) is not None and index.exists():
            states = _read_index(index)
            self._all = {x.path: x for x in states if "://" in x.handle or Path(x.handle).exists()}
            if len(self._all) < len(states):
                _log.warning("%s: %d states whose files are gone are forgotten", index, len(states) - len(self._all))
                self._write()
            self._prune()

    def reserve(self, run: str, kind: Kind, name: str, *, overwrite: bool = False) -> str:
        """Return the path of a state that is about to be saved.

        Raises:
            DataError: the name is not valid in a path, or is taken: a 400, since the SDK would retry a 409 for minutes.
        """
        if not _NAME.fullmatch(name):
            expected = "1 to 100 letters, digits, '.', '_' or '-', not starting with a dot"
            raise DataError(f"the name {name!r} of a checkpoint: expected {expected}")
        path = f"tinker://{run}/{kind}/{name}"
        with self._lock:
            if (path in self._all and not overwrite) or path in self._reserved:
                raise DataError(f"the checkpoint {path} exists; use another name, or ask to overwrite it")
            self._reserved.add(path)
        return path

    def cancel_reservation(self, path: str) -> None:
        """Record that a reserved state could not be saved."""
        with self._lock:
            self._reserved.discard(path)

    def add(self, state: SavedState) -> None:
        """Record that a reserved state was saved; the one that it overwrites is deleted."""
        with self._lock:
            self._reserved.discard(state.path)
            old = self._all.pop(state.path, None)
            self._all[state.path] = state
            self._write()
            if old is not None:
                self._delete_files(old)

    def find(self, path: str, kind: Kind | None = None) -> SavedState:
        """Return the state at ``path``.

        Raises:
            DataError: it has another kind or an invalid path.
            HTTPException: 404, there is no such state.
        """
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in _TYPES:
            raise DataError(f"{path!r} is not a checkpoint; expected tinker://<run>/{'|'.join(_TYPES)}/<name>")
        with self._lock:
            self._prune()
            state = self._all.get(path)
        if state is None:
            raise HTTPException(404, f"the checkpoint {path} does not exist")
        if kind is not None and state.kind != kind:
            raise DataError(f"{path} holds weights saved for {_USES[state.kind]}")
        return state

    def set_expiry(self, path: str, expires: float | None) -> None:
        """Set the time when the state at ``path`` is dropped."""
        with self._lock:
            self._all[path] = attrs.evolve(self.find(path), expires=expires)
            self._write()

    def delete(self, path: str) -> None:
        """Remove the state at ``path``."""
        with self._lock:
            self._drop([self.find(path)])

    def list(self, run: str | None = None) -> list[SavedState]:
        """Return all states, of one run or of all, oldest first."""
        with self._lock:
            self._prune()
            return [x for x in self._all.values() if run in (None, x.run)]

    def close(self) -> None:
        """Leave the folder to another service."""
        if self._held is not None:
            self._held.release()

    def _prune(self) -> None:
        now = time.time()
        self._drop([x for x in self._all.values() if x.expires is not None and x.expires < now])

    def _drop(self, states: Sequence[SavedState]) -> None:
        for state in states:
            self._delete_files(state)
            del self._all[state.path]
        if states:
            self._write()

    def _delete_files(self, state: SavedState) -> None:
        try:
            self._remove(state.handle)
        except (RlkitError, OSError) as error:
            _log.warning("the files of %s could not be removed: %s", state.path, error)

    def _write(self) -> None:
        if self._index is not None:
            folder = self._index.parent.absolute()
            states = [{**attrs.asdict(x), "handle": _inside(folder, x.handle)} for x in self._all.values()]
            with replace_file(self._index) as temporary:
                temporary.write_text(json.dumps({"format": _FORMAT, "states": states}, indent=1), encoding="utf-8")


def _acquire_folder(folder: Path) -> BaseFileLock:
    """Return the lock of a folder, which is free after its release or the end of the process, however that comes."""
    lock = FileLock(folder / "tinker.lock", blocking=False, mode=0o600, thread_local=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise CheckpointError(f"{folder} is in use by another server; give each server its own folder") from error
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    return lock


def _read_index(index: Path) -> Sequence[SavedState]:
    try:
        record = json.loads(index.read_text("utf-8"))
        if record["format"] != _FORMAT:
            raise ValueError(f"format {record['format']}")
        states = [SavedState(**{**item, "lora": Lora(**item["lora"])}) for item in record["states"]]
        folder = index.parent.absolute()
        return [x if "://" in x.handle else attrs.evolve(x, handle=str(folder / x.handle)) for x in states]
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"{index} is damaged, or not an index of saved states that this version reads: {error!r}"
        raise CheckpointError(message) from error


def _inside(folder: Path, handle: str) -> str:
    """Return a path as seen from the folder, which may be moved with what is in it."""
    path = Path(handle).absolute()
    return handle if "://" in handle else str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def expiry_of(ttl: int | None) -> float | None:
    """Return when a state saved now expires. Raises DataError outside of 1 hour to 10 years."""
    if ttl is None:
        return None
    if not 3600 <= ttl <= 10 * 366 * 86400:
        raise DataError(f"ttl_seconds is {ttl}; expected 3600 (an hour) to ten years")
    return time.time() + ttl


def _describe_state(state: SavedState) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id="/".join(state.path.split("/")[3:]),
        checkpoint_type=_TYPES[state.kind],
        time=_time(state.made),
        tinker_path=state.path,
        user_metadata=state.metadata,
        expires_at=None if state.expires is None else _time(state.expires),
    )


def _time(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)


def _describe_run(service: Service, run_id: str) -> types.TrainingRun:
    """Return one run that is in training here, or that saved a state. Raises HTTPException: 404."""
    run, states = service.runs.get(run_id), service.saved.list(run_id)
    if run is None and not states:
        raise HTTPException(404, f"training run {run_id!r} is unknown")
    last = {state.kind: _describe_state(state) for state in states}  # the last of each kind stays
    about: TrainingRun | SavedState = states[-1] if run is None else run
    metadata = states[-1].run_metadata if run is None else run.metadata
    return types.TrainingRun(
        training_run_id=run_id,
        base_model=about.base_model,
        model_owner="local",
        is_lora=True,
        lora_rank=about.lora.rank,
        last_request_time=_time(states[-1].made if run is None else run.last_request),
        last_checkpoint=last.get("weights"),
        last_sampler_checkpoint=last.get("sampler_weights"),
        user_metadata=metadata and {name: str(value) for name, value in metadata.items()},
    )


def _page(request: Request, items: Sequence[Any]) -> tuple[list[Any], types.Cursor]:
    """Return the page of a list that the request asks for, and its description."""
    try:
        offset, limit = (int(request.query_params.get(name, known)) for name, known in (("offset", 0), ("limit", 100)))
    except ValueError as error:
        raise HTTPException(422, f"{request.url.path}: offset and limit are integers: {error}") from error
    offset, limit = max(offset, 0), max(limit, 0)
    return list(items[offset:][:limit]), types.Cursor(offset=offset, limit=limit, total_count=len(items))


def _path(request: Request) -> str:
    return f"tinker://{request.path_params['run_id']}/{request.path_params['checkpoint_id']}"


async def weights_info(service: Service, request: Request) -> Response:
    """Return the description of the state at a path."""

    class WeightsInfoRequest(pydantic.BaseModel):
        tinker_path: str

    state = service.saved.find((await read(request, WeightsInfoRequest)).tinker_path)
    flags = {name: getattr(state.lora, name) for name in ("train_unembed", "train_mlp", "train_attn")}
    about = types.WeightsInfoResponse(base_model=state.base_model, is_lora=True, lora_rank=state.lora.rank, **flags)
    return answer(about)


async def list_checkpoints(service: Service, request: Request) -> Response:
    """Return all saved states, newest first."""
    states, cursor = _page(request, service.saved.list()[::-1])
    return answer(types.CheckpointsListResponse(checkpoints=[_describe_state(x) for x in states], cursor=cursor))


async def list_run_checkpoints(service: Service, request: Request) -> Response:
    """Return the saved states of one model, oldest first."""
    states = service.saved.list(request.path_params["run_id"])
    return answer(types.CheckpointsListResponse(checkpoints=[_describe_state(x) for x in states]))


async def list_training_runs(service: Service, request: Request) -> Response:
    """Return all models that are trained here or saved a state, newest first."""
    earlier = dict.fromkeys(state.run for state in service.saved.list() if state.run not in service.runs)
    runs, cursor = _page(request, [*earlier, *service.runs][::-1])
    return answer(types.TrainingRunsResponse(training_runs=[_describe_run(service, x) for x in runs], cursor=cursor))


async def get_training_run(service: Service, request: Request) -> Response:
    """Return one model that is trained here or saved a state."""
    return answer(_describe_run(service, request.path_params["run_id"]))


async def set_ttl(service: Service, request: Request) -> Response:
    """Set the time when a saved state is dropped."""

    class TtlRequest(pydantic.BaseModel):
        ttl_seconds: int | None = None

    service.saved.set_expiry(_path(request), expiry_of((await read(request, TtlRequest)).ttl_seconds))
    return JSONResponse({})


async def delete_checkpoint(service: Service, request: Request) -> Response:
    """Delete a saved state."""
    service.saved.delete(_path(request))
    return JSONResponse({})


ENDPOINTS = {
    "POST weights_info": weights_info,
    "GET checkpoints": list_checkpoints,
    "GET training_runs": list_training_runs,
    "GET training_runs/{run_id}": get_training_run,
    "GET training_runs/{run_id}/checkpoints": list_run_checkpoints,
    "PUT training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl": set_ttl,
    "DELETE training_runs/{run_id}/checkpoints/{checkpoint_id:path}": delete_checkpoint,
}
