"""Endpoints: saving, loading, and what was saved."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable

from rlkit.server.checkpoints import KINDS, Checkpoint, Kind, KnownRun, checked_ttl
from rlkit.server.requests import ApiError, Fields, Request, Response
from rlkit.server.sampling import new_sampler
from rlkit.server.sessions import checked_optimizer, metadata_of, new_run, page
from rlkit.server.state import Endpoints, ServerState, TrainingRun
from rlkit.server.training import Job, of_model, queued

__all__ = ["endpoints", "saved"]

endpoints = Endpoints()


@of_model(endpoints, "save_weights")
def save_weights(state: ServerState, run: TrainingRun, fields: Fields) -> Job:
    """Save a model with its optimizer."""
    name = fields.text("path", f"{fields.integer('seq_id', None) or 0:06d}")
    save = saved(state, run, fields, "weights", name, overwrite=fields.flag("overwrite", False))
    return lambda: {"path": save(), "type": "save_weights"}


@of_model(endpoints, "save_weights_for_sampler")
def save_weights_for_sampler(state: ServerState, run: TrainingRun, fields: Fields) -> Job:
    """Save a model to sample from: under a name, or for one sampler of this session."""
    name = fields.text("path", None)
    if name is not None:
        save = saved(state, run, fields, "sampler_weights", name)
        return lambda: {"type": "save_weights_for_sampler", "path": save()}
    number = fields.integer("sampling_session_seq_id", low=0)

    def job() -> dict[str, object]:
        snapshot = run.ready().snapshot()
        sampler_id = f"{run.model_id.split(':train:')[0]}:sample:{number}"
        new_sampler(state, sampler_id, run.base_model, None, lambda: snapshot, again=False)
        state.samplers[sampler_id].snapshot()  # counted from now on
        state.trim()
        return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

    return job


@endpoints.post("load_weights")
def load_weights(state: ServerState, request: Request) -> Response:
    """Make a model from a saved one, or load another state into a model that is there."""
    fields = request.fields()
    if fields.get("model_id") is not None:
        return queued(state, fields, "load_weights", _loaded_over)
    session = state.session(fields.text("session_id"))
    number = fields.integer("model_seq_id", low=0)
    key = ("create_model", session.session_id, number)
    known = state.futures.known(key)
    if known is not None:
        return Response.json(known.accepted)
    checkpoint, optimizer = _found(state, fields), fields.flag("optimizer")
    base = state.base(fields.text("base_model", checkpoint.base_model))
    run = new_run(state, session, number, base, checkpoint.lora, metadata_of(fields))
    entry = state.futures.add(key, "load_weights", model_id=run.model_id)

    def job() -> Response:
        run.model = state.models.load(checkpoint.handle, optimizer=optimizer)
        state.done("load_weights", run.model_id, None)
        return Response.json({"path": checkpoint.path, "model_id": run.model_id, "type": "load_weights"})

    run.worker.submit(lambda: entry.carry_out(job))
    return Response.json(entry.accepted)


def _loaded_over(state: ServerState, run: TrainingRun, fields: Fields) -> Job:
    checkpoint, optimizer = _found(state, fields), fields.flag("optimizer")

    def job() -> dict[str, object]:
        old, run.model = run.model, state.models.load(checkpoint.handle, optimizer=optimizer)
        if old is not None:
            old.close()
        return {"path": checkpoint.path, "model_id": run.model_id, "type": "load_weights"}

    return job


@endpoints.post("weights_info")
def weights_info(state: ServerState, request: Request) -> Response:
    """Return what stands at a path."""
    checkpoint = state.checkpoints.find(request.fields().text("tinker_path"))
    lora = checkpoint.lora
    flags = {name: getattr(lora, name) for name in ("train_unembed", "train_mlp", "train_attn")}
    return Response.json({"base_model": checkpoint.base_model, "is_lora": True, "lora_rank": lora.rank, **flags})


@endpoints.add("GET", "checkpoints")
def list_checkpoints(state: ServerState, request: Request) -> Response:
    """All that was saved, newest first."""
    return _page(request, "checkpoints", [_shown(x) for x in reversed(state.checkpoints.all())])


@endpoints.add("GET", "training_runs")
def list_training_runs(state: ServerState, request: Request) -> Response:
    """All models that were trained here, newest first."""
    return _page(request, "training_runs", [_run_shown(state, run) for run in reversed(_runs(state).values())])


@endpoints.add("PUT", "training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl")
def set_ttl(state: ServerState, request: Request, run_id: str, checkpoint_id: str) -> Response:
    """Set when a saved state is dropped."""
    expires = checked_ttl(request.fields().integer("ttl_seconds", None))
    state.checkpoints.change(f"tinker://{run_id}/{checkpoint_id}", expires=expires)
    return Response.json({})


@endpoints.post("training_runs/{run_id}/checkpoints/{checkpoint_id:path}/publish")
def publish(state: ServerState, request: Request, run_id: str, checkpoint_id: str) -> Response:
    """Nobody else sees this server."""
    del state, request, run_id, checkpoint_id
    raise ApiError(400, "publishing: this server has one user, and nobody to publish to")


@endpoints.add("DELETE", "training_runs/{run_id}/checkpoints/{checkpoint_id:path}/publish")
def unpublish(state: ServerState, request: Request, run_id: str, checkpoint_id: str) -> Response:
    """Nothing was published."""
    return publish(state, request, run_id, checkpoint_id)


@endpoints.add("DELETE", "training_runs/{run_id}/checkpoints/{checkpoint_id:path}")
def delete_checkpoint(state: ServerState, request: Request, run_id: str, checkpoint_id: str) -> Response:
    """Forgets a saved state."""
    state.checkpoints.delete(state.checkpoints.find(f"tinker://{run_id}/{checkpoint_id}").path)
    return Response.json({})


@endpoints.add("GET", "training_runs/{run_id}/checkpoints")
def list_run_checkpoints(state: ServerState, request: Request, run_id: str) -> Response:
    """Return what one model saved, oldest first."""
    return Response.json({"checkpoints": [_shown(x) for x in state.checkpoints.all(run_id)]})


@endpoints.add("GET", "training_runs/{run_id}")
def get_training_run(state: ServerState, request: Request, run_id: str) -> Response:
    """One model that is or was trained here."""
    return Response.json(_run_shown(state, _run(state, run_id)))


def _runs(state: ServerState) -> dict[str, TrainingRun | KnownRun]:
    """Those of this process, and those of earlier ones on the folder."""
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
