"""Endpoints: sessions, models, what the server has."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rlkit.backends.tinker.guard import DEDUPLICATES
from rlkit.backends.worker import Worker
from rlkit.server.checkpoints import KnownRun
from rlkit.server.futures import Line
from rlkit.server.requests import ApiError, Fields, Request, Response
from rlkit.server.state import ClientSession, Endpoints, ServerState, TrainingRun
from rlkit.types import Lora

__all__ = ["checked_optimizer", "ended", "endpoints", "metadata_of", "new_run", "page"]

endpoints = Endpoints()
_ARCH = "rlkit"  # what rlkit's own clients know the server by


@endpoints.post("client/config")
def client_config(state: ServerState, request: Request) -> Response:
    """Return flags for the client; for rlkit's, whether a call that it sends twice is carried out once."""
    answer = Response.json(dict(state.config))
    return answer._replace(headers={**answer.headers, DEDUPLICATES: "1"}) if state.futures.dedupe else answer


@endpoints.post("client/dynamic_config")
def dynamic_config(state: ServerState, request: Request) -> Response:
    """Return flags that may change: abandoned samples are cancelled."""
    return Response.json({"sample_cancel_enabled": True})


@endpoints.add("GET", "healthz")
def health(state: ServerState, request: Request) -> Response:
    """Say that the server answers."""
    return Response.json({"status": "ok"})


@endpoints.post("telemetry")
def telemetry(state: ServerState, request: Request) -> Response:
    """Taken and thrown away."""
    return Response.json({"status": "accepted"})


@endpoints.add("GET", "get_server_capabilities")
def capabilities(state: ServerState, request: Request) -> Response:
    """Return the base models."""
    each = {"max_context_length": state.models.max_length, "trainable": True, "sampleable": True}
    return Response.json({"supported_models": [{"model_name": name, **each} for name in state.names]})


@endpoints.post("create_session")
def create_session(state: ServerState, request: Request) -> Response:
    """Begin a session; a repeat under the same idempotency key gets the first one's answer."""
    fields = request.fields()
    _end_idle(state)
    key = request.headers.get("x-idempotency-key")
    if key is not None and key in state.answers and state.futures.dedupe:
        return state.answers[key]
    known = {x.run for x in state.checkpoints.all()} | {x.model_id for x in state.checkpoints.runs()}
    taken = {*state.sessions, *(run.split(":train:")[0] for run in known)}
    number = len(state.sessions)
    while (session_id := f"{state.seed(0, number):016x}") in taken:
        number += 1
    state.sessions[session_id] = ClientSession(session_id, number, metadata=metadata_of(fields))
    answer = Response.json({"type": "create_session", "session_id": session_id})
    if key is not None:
        state.answers[key] = answer
    return answer


@endpoints.post("session_heartbeat")
def session_heartbeat(state: ServerState, request: Request) -> Response:
    """Note that the client lives."""
    state.session(request.fields().text("session_id"))
    return Response.json({"type": "session_heartbeat"})


@endpoints.post("sessions/{session_id}/finish")
def finish_session(state: ServerState, request: Request, session_id: str) -> Response:
    """End a session and free its models and samplers. What was saved stays."""
    if session_id not in state.sessions:
        raise ApiError(404, f"session {session_id!r} is unknown")
    _finish(state, state.sessions[session_id])
    return Response.json({"session_id": session_id})


@endpoints.add("GET", "sessions")
def list_sessions(state: ServerState, request: Request) -> Response:
    """All of this process, newest first."""
    ids = [session.session_id for session in reversed(state.sessions.values())]
    offset, limit = page(request, 20)
    return Response.json({"sessions": ids[offset:][:limit]})


@endpoints.add("GET", "sessions/{session_id}")
def get_session(state: ServerState, request: Request, session_id: str) -> Response:
    """Return what belongs to a session."""
    if session_id not in state.sessions:
        raise ApiError(404, f"session {session_id!r} is unknown")
    shown = {
        "training_run_ids": [x for x in state.runs if x.split(":train:")[0] == session_id],
        "sampler_ids": [x for x in state.samplers if x.split(":sample:")[0] == session_id],
        "user_metadata": state.sessions[session_id].metadata,
    }
    return Response.json(shown)


def page(request: Request, size: int) -> tuple[int, int]:
    """(offset, limit) of a list."""
    try:
        offset, limit = int(request.query.get("offset", 0)), int(request.query.get("limit", size))
    except ValueError as error:
        raise ApiError(422, f"{request.path}: offset and limit are integers: {error}") from error
    return max(offset, 0), max(limit, 0)


@endpoints.post("unload_model")
def unload_model(state: ServerState, request: Request) -> Response:
    """Frees a model, behind the requests before; its samplers and what it saved stay."""
    model_id = request.fields().text("model_id")
    known = state.futures.known(("unload_model", model_id))
    if known is not None:
        return Response.json(known.accepted)
    run = state.run(model_id)
    run.unloaded = True
    entry = state.futures.add(("unload_model", model_id), "unload_model", model_id=model_id)
    answer = Response.json({"model_id": model_id, "type": "unload_model"})
    run.worker.submit(lambda: entry.carry_out(lambda: answer))
    ended(run)
    return Response.json(entry.accepted)


def _finish(state: ServerState, session: ClientSession) -> None:
    session.finished = True
    for model_id, run in state.runs.items():
        if model_id.split(":train:")[0] == session.session_id:
            ended(run)
    for sampler_id in [s for s in state.samplers if s.split(":sample:")[0] == session.session_id]:
        del state.samplers[sampler_id]


def _end_idle(state: ServerState) -> None:
    """End the sessions whose clients have gone without a word."""
    for session in state.sessions.values():
        if not session.finished and time.monotonic() - session.last_seen > state.idle:
            _finish(state, session)


def ended(run: TrainingRun) -> None:
    """Finishes a model's requests, frees it, and has its thread end."""

    def job() -> None:
        if run.model is not None:
            run.model.close()
            run.model = None
        run.worker.close()  # from its own thread: it ends after this job

    run.worker.submit(job)


@endpoints.post("create_model")
def create_model(state: ServerState, request: Request) -> Response:
    """Make a new model to train."""
    fields = request.fields()
    session = state.session(fields.text("session_id"))
    number = fields.integer("model_seq_id", low=0)
    known = state.futures.known(("create_model", session.session_id, number))
    if known is not None:
        return Response.json(known.accepted)
    name = state.base(fields.text("base_model"))
    checked_optimizer(fields.object("optimizer_config", None))
    lora = _lora(state, fields.object("lora_config", None))
    run = new_run(state, session, number, name, lora, metadata_of(fields))
    entry = state.futures.add(("create_model", session.session_id, number), "create_model", model_id=run.model_id)

    def job() -> Response:
        run.model = state.models.create(lora)
        state.done("create_model", run.model_id, None)
        return Response.json({"model_id": run.model_id, "type": "create_model"})

    run.worker.submit(lambda: entry.carry_out(job))
    return Response.json(entry.accepted)


def metadata_of(fields: Fields) -> Mapping[str, Any] | None:
    """Return what the user keeps beside a run or a state."""
    metadata = fields.object("user_metadata", None)
    return None if metadata is None else dict(metadata.values)


def new_run(
    state: ServerState,
    session: ClientSession,
    number: int,
    base_model: str,
    lora: Lora,
    metadata: Mapping[str, object] | None,
) -> TrainingRun:
    """Make a model's place, before the model is made."""
    model_id = f"{session.session_id}:train:{number}"
    if model_id in state.runs:  # asked for twice, and repeats are not recognised
        ended(state.runs[model_id])
    worker = Worker(f"serve-{model_id}")
    run = TrainingRun(model_id, base_model, lora, worker, Line(worker.submit), metadata=metadata)
    state.runs[model_id] = run
    state.checkpoints.note(KnownRun(model_id, base_model, lora, metadata))
    return run


@endpoints.post("get_info")
def get_info(state: ServerState, request: Request) -> Response:
    """Return what a model is."""
    run = state.run(request.fields().text("model_id"))
    data = {"arch": _ARCH, "model_name": run.base_model, "tokenizer_id": state.tokenizer_id}
    return Response.json(
        {
            "type": "get_info",
            "model_data": data,
            "model_id": run.model_id,
            "is_lora": True,
            "lora_rank": run.lora.rank,
            "model_name": run.base_model,
        }
    )


def checked_optimizer(config: Fields | None) -> None:
    """Raise ApiError 400 for an optimizer other than AdamW."""
    if config is not None and config.text("type", "adamw") != "adamw":
        raise ApiError(400, f"optimizer {config.text('type')!r} is not offered by this server; it has: adamw")


def _lora(state: ServerState, fields: Fields | None) -> Lora:
    if fields is None:
        return Lora()
    rank = fields.integer("rank", low=1)
    if rank > state.max_rank:
        raise ApiError(400, f"lora_config.rank is {rank}; this server's limit is {state.max_rank}")
    return Lora(
        rank=rank,
        seed=fields.integer("seed", None, low=0),
        train_mlp=fields.flag("train_mlp", True),
        train_attn=fields.flag("train_attn", True),
        train_unembed=fields.flag("train_unembed", True),
    )
