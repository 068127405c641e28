"""Endpoints: sessions, models, capabilities."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rlkit.backends.trainer import Worker
from rlkit.server._checkpoints import KnownRun
from rlkit.server._state import ClientSession, Line, ServerState, TrainingRun, endpoint, post
from rlkit.server._wire import ApiError, Fields, Request, Response
from rlkit.types import Lora

__all__ = ["checked_optimizer", "ended", "metadata_of", "new_run", "page"]

_DEDUPLICATES = "X-Rlkit-Deduplicates"  # tells rlkit's client that a call sent twice is carried out once
_ARCH = "rlkit"  # identifies the server to rlkit's own clients


@post("client/config")
def client_config(state: ServerState, request: Request) -> Response:
    """Return flags for the client; for rlkit's, whether a call sent twice is executed once."""
    answer = Response.json(dict(state.config))
    return answer._replace(headers={**answer.headers, _DEDUPLICATES: "1"}) if state.futures.dedupe else answer


@post("client/dynamic_config")
def dynamic_config(state: ServerState, request: Request) -> Response:
    """Return flags that may change: abandoned samples are cancelled."""
    return Response.json({"sample_cancel_enabled": True})


@endpoint("GET", "healthz")
def health(state: ServerState, request: Request) -> Response:
    """Report that the server answers."""
    return Response.json({"status": "ok"})


@post("telemetry")
def telemetry(state: ServerState, request: Request) -> Response:
    """Accept telemetry and discard it."""
    return Response.json({"status": "accepted"})


@endpoint("GET", "get_server_capabilities")
def capabilities(state: ServerState, request: Request) -> Response:
    """Return the base models."""
    each = {"max_context_length": state.models.max_length, "trainable": True, "sampleable": True}
    return Response.json({"supported_models": [{"model_name": name, **each} for name in state.names]})


@post("create_session")
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


@post("session_heartbeat")
def session_heartbeat(state: ServerState, request: Request) -> Response:
    """Record that the client is alive."""
    state.session(request.fields().text("session_id"))
    return Response.json({"type": "session_heartbeat"})


@post("sessions/{session_id}/finish")
def finish_session(state: ServerState, request: Request, session_id: str) -> Response:
    """End a session and free its models and samplers. Saved states stay."""
    _finish(state, state.find_session(session_id))
    return Response.json({"session_id": session_id})


@endpoint("GET", "sessions")
def list_sessions(state: ServerState, request: Request) -> Response:
    """Return all sessions of this process, newest first."""
    ids = [session.session_id for session in reversed(state.sessions.values())]
    offset, limit = page(request, 20)
    return Response.json({"sessions": ids[offset:][:limit]})


@endpoint("GET", "sessions/{session_id}")
def get_session(state: ServerState, request: Request, session_id: str) -> Response:
    """Return the models and samplers of a session."""
    session = state.find_session(session_id)
    shown = {
        "training_run_ids": [name for name, run in state.runs.items() if run.session_id == session_id],
        "sampler_ids": [name for name, sampler in state.samplers.items() if sampler.session_id == session_id],
        "user_metadata": session.metadata,
    }
    return Response.json(shown)


def page(request: Request, size: int) -> tuple[int, int]:
    """Return the (offset, limit) of a list."""
    try:
        offset, limit = int(request.query.get("offset", 0)), int(request.query.get("limit", size))
    except ValueError as error:
        raise ApiError(422, f"{request.path}: offset and limit are integers: {error}") from error
    return max(offset, 0), max(limit, 0)


@post("unload_model")
def unload_model(state: ServerState, request: Request) -> Response:
    """Free a model after its earlier requests; its samplers and saved states stay."""
    model_id = request.fields().text("model_id")
    key = ("unload_model", model_id)
    if (known := state.futures.known(key)) is not None:
        return known.answer
    run = state.run(model_id)
    run.unloaded = True
    done = Response.json({"model_id": model_id, "type": "unload_model"})
    answer = state.futures.accept(key, "unload_model", run.worker.submit, lambda: done, model_id=model_id)
    ended(run)
    return answer


def _finish(state: ServerState, session: ClientSession) -> None:
    session.finished = True
    for run in state.runs.values():
        if run.session_id == session.session_id:
            ended(run)
    for sampler in [s for s in state.samplers.values() if s.session_id == session.session_id]:
        del state.samplers[sampler.sampler_id]


def _end_idle(state: ServerState) -> None:
    """End the sessions whose clients have disappeared."""
    for session in state.sessions.values():
        if not session.finished and time.monotonic() - session.last_seen > state.idle:
            _finish(state, session)


def ended(run: TrainingRun) -> None:
    """Finish a model's requests, free it, and end its thread."""

    def job() -> None:
        if run.model is not None:
            run.model.close()
            run.model = None
        run.worker.close()  # from its own thread: it ends after this job

    run.worker.submit(job)


@post("create_model")
def create_model(state: ServerState, request: Request) -> Response:
    """Make a new model to train."""
    fields = request.fields()
    session = state.session(fields.text("session_id"))
    number = fields.integer("model_seq_id", low=0)
    key = ("create_model", session.session_id, number)
    if (known := state.futures.known(key)) is not None:
        return known.answer
    name = state.base(fields.text("base_model"))
    checked_optimizer(fields.object("optimizer_config", None))
    lora = _lora(state, fields.object("lora_config", None))
    run = new_run(state, session, number, name, lora, metadata_of(fields))

    def job() -> Response:
        run.model = state.models.create(lora)
        state.done("create_model", run.model_id, None)
        return Response.json({"model_id": run.model_id, "type": "create_model"})

    return state.futures.accept(key, "create_model", run.worker.submit, job, model_id=run.model_id)


def metadata_of(fields: Fields) -> Mapping[str, object] | None:
    """Return the user's metadata of a run or a state."""
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
    """Make a model's record, before the model is made."""
    model_id = f"{session.session_id}:train:{number}"
    if model_id in state.runs:  # requested twice, and repeats are not recognised
        ended(state.runs[model_id])
    worker = Worker(f"serve-{model_id}")
    run = TrainingRun(model_id, base_model, lora, worker, Line(worker.submit), metadata=metadata)
    state.runs[model_id] = run
    state.checkpoints.note(KnownRun(model_id, base_model, lora, metadata))
    return run


@post("get_info")
def get_info(state: ServerState, request: Request) -> Response:
    """Return the description of a model."""
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
        return Lora(train_unembed=True)  # the API's default
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
