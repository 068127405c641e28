"""Endpoints: saving, loading, and listing saved states."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import time
import urllib.parse
from collections.abc import Callable

from rlkit.server._checkpoints import KINDS, Checkpoint, Kind, KnownRun, checked_ttl
from rlkit.server._sampling import new_sampler
from rlkit.server._sessions import checked_optimizer, metadata_of, new_run, page
from rlkit.server._state import ServerState, TrainingRun, endpoint, post
from rlkit.server._training import Job, of_model, queued
from rlkit.server._wire import ApiError, Fields, Request, Response

__all__ = ["saved", "signed"]

_SECONDS = 3600  # that an address is good for
_FILES = "/api/v1/external_weights/"


@of_model("save_weights_external")
def save_weights_external(state: ServerState, run: TrainingRun, fields: Fields) -> Job:
    """Save a model's adapter for download."""
    if fields.items("age_encryption_recipients", None):
        raise ApiError(400, "age_encryption_recipients: this server does not encrypt; the files stay on its machine")
    save = saved(state, run, fields, "external_weights", fields.text("path"))
    return lambda: {"path": save(), "type": "save_weights_external"}


@endpoint("GET", "training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls")
def external_weights_urls(state: ServerState, request: Request, run_id: str, name: str) -> Response:
    """Return an address for each file, on this server, with the host name that the client used."""
    checkpoint = state.checkpoints.find(f"tinker://{run_id}/external_weights/{name}", "external_weights")
    expires = int(time.time()) + _SECONDS
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else "http"
    base = f"{scheme}://{request.headers.get('host', 'localhost')}"
    urls = {}
    for file in state.models.files(checkpoint.handle):
        path = f"{_FILES}{run_id}/{name}/{file}"
        query = urllib.parse.urlencode({"expires": expires, "signature": _signature(state, path, expires)})
        urls[file] = f"{base}{urllib.parse.quote(path)}?{query}"
    return Response.json({"urls": urls, "expires": dt.datetime.fromtimestamp(expires, dt.UTC).isoformat()})


@endpoint("GET", "external_weights/{run_id}/{name}/{file:path}")
def download(state: ServerState, request: Request, run_id: str, name: str, file: str) -> Response:
    """Send one file."""
    if not signed(state, request):
        raise ApiError(
            403, "the address of this file has no signature of this server or has expired; request a new one"
        )
    checkpoint = state.checkpoints.find(f"tinker://{run_id}/external_weights/{name}", "external_weights")
    place = state.models.files(checkpoint.handle).get(file)
    if place is None:
        raise ApiError(404, f"{checkpoint.path} has no file {file!r}")
    return Response(200, {"content-type": "application/octet-stream"}, b"", place)


def signed(state: ServerState, request: Request) -> bool:
    """Return whether the request is for a file, at a valid address made by this server."""
    expires, signature = request.query.get("expires", ""), request.query.get("signature", "")
    if not request.path.startswith(_FILES) or not (expires.isascii() and expires.isdecimal()) or len(expires) > 12:
        return False
    good = hmac.compare_digest(signature.encode(), _signature(state, request.path, int(expires)).encode())
    return good and time.time() <= int(expires)


def _signature(state: ServerState, path: str, expires: int) -> str:
    return hmac.new(state.secret, f"{expires} {path}".encode(), hashlib.sha256).hexdigest()


@of_model("save_weights")
def save_weights(state: ServerState, run: TrainingRun, fields: Fields) -> Job:
    """Save a model with its optimizer."""
    name = fields.text("path", f"{fields.integer('seq_id', None) or 0:06d}")
    save = saved(state, run, fields, "weights", name, overwrite=fields.flag("overwrite", False))
    return lambda: {"path": save(), "type": "save_weights"}


@of_model("save_weights_for_sampler")
def save_weights_for_sampler(state: ServerState, run: TrainingRun, fields: Fields) -> Job:
    """Save a model to sample from: under a name, or for one sampler of this session."""
    name = fields.text("path", None)
    if name is not None:
        save = saved(state, run, fields, "sampler_weights", name)
        return lambda: {"type": "save_weights_for_sampler", "path": save()}
    number = fields.integer("sampling_session_seq_id", low=0)

    def job() -> dict[str, object]:
        snapshot = run.ready().snapshot()
        sampler_id = f"{run.session_id}:sample:{number}"
        new_sampler(state, sampler_id, run.base_model, None, lambda: snapshot, again=False)
        state.samplers[sampler_id].snapshot()  # counted from now on
        state.trim()
        return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

    return job


@post("load_weights")
def load_weights(state: ServerState, request: Request) -> Response:
    """Make a model from a saved one, or load another state into an existing model."""
    fields = request.fields()
    if fields.get("model_id") is not None:
        return queued(state, fields, "load_weights", _loaded_over)
    session = state.session(fields.text("session_id"))
    number = fields.integer("model_seq_id", low=0)
    key = ("create_model", session.session_id, number)
    if (known := state.futures.known(key)) is not None:
        return known.answer
    checkpoint, optimizer = _found(state, fields), fields.flag("optimizer")
    base = state.base(fields.text("base_model", checkpoint.base_model))
    run = new_run(state, session, number, base, checkpoint.lora, metadata_of(fields))

    def job() -> Response:
        run.model = state.models.load(checkpoint.handle, optimizer=optimizer)
        state.done("load_weights", run.model_id, None)
        return Response.json({"path": checkpoint.path, "model_id": run.model_id, "type": "load_weights"})

    return state.futures.accept(key, "load_weights", run.worker.submit, job, model_id=run.model_id)


def _loaded_over(state: ServerState, run: TrainingRun, fields: Fields) -> Job:
    checkpoint, optimizer = _found(state, fields), fields.flag("optimizer")

    def job() -> dict[str, object]:
        old, run.model = run.model, state.models.load(checkpoint.handle, optimizer=optimizer)
        if old is not None:
            old.close()
        return {"path": checkpoint.path, "model_id": run.model_id, "type": "load_weights"}

    return job


@post("weights_info")
def weights_info(state: ServerState, request: Request) -> Response:
    """Return the description of the state at a path."""
    checkpoint = state.checkpoints.find(request.fields().text("tinker_path"))
    lora = checkpoint.lora
    flags = {name: getattr(lora, name) for name in ("train_unembed", "train_mlp", "train_attn")}
    return Response.json({"base_model": checkpoint.base_model, "is_lora": True, "lora_rank": lora.rank, **flags})


@endpoint("GET", "checkpoints")
def list_checkpoints(state: ServerState, request: Request) -> Response:
    """Return all saved states, newest first."""
    return _page(request, "checkpoints", [_shown(x) for x in reversed(state.checkpoints.all())])


@endpoint("GET", "training_runs")
def list_training_runs(state: ServerState, request: Request) -> Response:
    """Return all models that were trained here, newest first."""
    return _page(request, "training_runs", [_run_shown(state, run) for run in reversed(_runs(state).values())])


@endpoint("PUT", "training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl")
def set_ttl(state: ServerState, request: Request, run_id: str, checkpoint_id: str) -> Response:
    """Set the time when a saved state is dropped."""
    expires = checked_ttl(request.fields().integer("ttl_seconds", None))
    state.checkpoints.change(f"tinker://{run_id}/{checkpoint_id}", expires=expires)
    return Response.json({})


@post("training_runs/{run_id}/checkpoints/{checkpoint_id:path}/publish")
def publish(state: ServerState, request: Request, run_id: str, checkpoint_id: str) -> Response:
    """Do nothing: no one else sees this server."""
    del state, request, run_id, checkpoint_id
    raise ApiError(400, "publishing: this server has only one user and does not publish")


@endpoint("DELETE", "training_runs/{run_id}/checkpoints/{checkpoint_id:path}/publish")
def unpublish(state: ServerState, request: Request, run_id: str, checkpoint_id: str) -> Response:
    """Do nothing: states are never published."""
    return publish(state, request, run_id, checkpoint_id)


@endpoint("DELETE", "training_runs/{run_id}/checkpoints/{checkpoint_id:path}")
def delete_checkpoint(state: ServerState, request: Request, run_id: str, checkpoint_id: str) -> Response:
    """Delete a saved state."""
    state.checkpoints.delete(state.checkpoints.find(f"tinker://{run_id}/{checkpoint_id}").path)
    return Response.json({})


@endpoint("GET", "training_runs/{run_id}/checkpoints")
def list_run_checkpoints(state: ServerState, request: Request, run_id: str) -> Response:
    """Return the saved states of one model, oldest first."""
    return Response.json({"checkpoints": [_shown(x) for x in state.checkpoints.all(run_id)]})


@endpoint("GET", "training_runs/{run_id}")
def get_training_run(state: ServerState, request: Request, run_id: str) -> Response:
    """Return one model that is or was trained here."""
    return Response.json(_run_shown(state, _run(state, run_id)))


def _runs(state: ServerState) -> dict[str, TrainingRun | KnownRun]:
    """Return the runs of this process, and those of earlier ones on the folder."""
    return {**{run.model_id: run for run in state.checkpoints.runs()}, **state.runs}


def _run(state: ServerState, run_id: str) -> TrainingRun | KnownRun:
    run = _runs(state).get(run_id)
    if run is None:
        raise ApiError(404, f"training run {run_id!r} is unknown")
    return run


def saved(
    state: ServerState, run: TrainingRun, fields: Fields, kind: Kind, name: str, *, overwrite: bool = False
) -> Callable[[], str]:
    """Reserve a name; return the function that saves under it and returns the path."""
    expires = checked_ttl(fields.integer("ttl_seconds", None))
    metadata = metadata_of(fields)
    path = state.checkpoints.reserve(run.model_id, kind, name, overwrite=overwrite)

    def save() -> str:
        try:
            handle = run.ready().save(name, optimizer=kind == "weights")
        except BaseException:
            state.checkpoints.release(path)
            raise
        state.checkpoints.keep(Checkpoint(path, handle, run.base_model, run.lora, time.time(), expires, metadata))
        return path

    return save


def _found(state: ServerState, fields: Fields) -> Checkpoint:
    checked_optimizer(fields.object("optimizer_config", None))
    return state.checkpoints.find(fields.text("path"), "weights")


def _shown(checkpoint: Checkpoint) -> dict[str, object]:
    return {
        "checkpoint_id": "/".join(checkpoint.path.split("/")[3:]),
        "checkpoint_type": KINDS[checkpoint.kind],
        "time": _time(checkpoint.made),
        "tinker_path": checkpoint.path,
        "user_metadata": checkpoint.metadata,
        "expires_at": None if checkpoint.expires is None else _time(checkpoint.expires),
    }


def _run_shown(state: ServerState, run: TrainingRun | KnownRun) -> dict[str, object]:
    checkpoints = state.checkpoints.all(run.model_id)
    last = {kind: next((_shown(x) for x in reversed(checkpoints) if x.kind == kind), None) for kind in KINDS}
    return {
        "training_run_id": run.model_id,
        "base_model": run.base_model,
        "model_owner": "local",
        "is_lora": True,
        "lora_rank": run.lora.rank,
        "last_request_time": _time(run.last_request),
        "last_checkpoint": last["weights"],
        "last_sampler_checkpoint": last["sampler_weights"],
        "user_metadata": run.metadata,
    }


def _page(request: Request, name: str, items: list[object]) -> Response:
    offset, limit = page(request, 100)
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return Response.json({name: items[offset:][:limit], "cursor": cursor})


def _time(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat()
