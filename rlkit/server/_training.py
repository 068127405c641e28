"""One model in training: its requests in the order of their seq_ids, each once."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pydantic
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from rlkit._check import HIGHEST
from rlkit.backends.trainer import Worker
from rlkit.errors import DataError, UnsupportedError
from rlkit.server._losses import Loss, hosted
from rlkit.server._models import Model, Row
from rlkit.server._sampling import add_sampler
from rlkit.server._saved import Kind, SavedState, expiry_of
from rlkit.server._wire import answer, read, read_datum, write_outputs
from rlkit.types import Adam, Lora

if TYPE_CHECKING:
    from rlkit.server._app import Accepted, Endpoint, Job, Service

__all__ = ["ENDPOINTS", "RequestOrder", "TrainingRun"]

_LARGE = 256 * 2**10  # bodies above it are read in another thread, so that short requests are not held up


class RequestOrder:
    """The requests of one model, carried out one after the other in the order of their seq_ids, from 1 on."""

    def __init__(self, submit: Callable[[Callable[[], None]], object]) -> None:
        self._submit = submit
        self._next = 1
        self._held: dict[int, Accepted | None] = {}  # None: refused
        self._refused: set[int] = set()
        self._lock = threading.Lock()

    def add(self, seq_id: int | None, accepted: Accepted) -> None:
        """Carry a request out once its turn has come; without a seq_id, or with an earlier one, at once."""
        with self._lock:
            if seq_id is None or seq_id < self._next:
                self._refused -= {seq_id}
                self._submit(accepted.carry_out)
            else:
                self._held[seq_id], accepted.waits_for = accepted, self._next
                self._go_on()

    def skip(self, seq_id: int) -> None:
        """Skip the turn of a request that was refused."""
        with self._lock:
            if seq_id >= self._next and seq_id not in self._held:
                self._held[seq_id] = None
                self._refused.add(seq_id)
                self._go_on()

    def close(self) -> None:
        """Cancel the requests that wait for one with a lower number."""
        with self._lock:
            for request in filter(None, self._held.values()):
                request.future.cancel()
            self._held.clear()

    def knows(self, seq_id: int | None) -> bool:
        """Return whether a request of that number was carried out, or will be."""
        with self._lock:
            return seq_id is not None and seq_id not in self._refused and (seq_id < self._next or seq_id in self._held)

    def _go_on(self) -> None:
        while self._next in self._held:
            request = self._held.pop(self._next)
            self._next += 1
            if request is not None:
                request.waits_for = None
                self._submit(request.carry_out)
        for request in self._held.values():
            if request is not None:
                request.waits_for = self._next


@attrs.define(eq=False)
class TrainingRun:
    """A model in training, and its thread. The model is made there, by the run's first job."""

    model_id: str
    base_model: str
    lora: Lora
    metadata: Mapping[str, Any] | None
    worker: Worker
    order: RequestOrder
    model: Model | None = None
    last_request: float = attrs.field(factory=time.time)
    unloaded: bool = False

    @property
    def session_id(self) -> str:
        """The session that made it."""
        return self.model_id.partition(":train:")[0]

    def ready(self) -> Model:
        """Return the model. Raises DataError: making it failed."""
        if self.model is None:
            raise DataError(f"model {self.model_id!r} could not be created; see the answer to its first request")
        return self.model

    def close(self) -> None:
        """Finish the model's requests, free it, and end its thread, without waiting for it."""

        def job() -> None:
            if self.model is not None:
                self.model.close()
                self.model = None
            self.worker.close()  # from its own thread: it ends after this job

        self.order.close()
        self.worker.submit(job)


def _find_run(service: Service, model_id: str) -> TrainingRun:
    """Return the model in training of that id.

    Raises:
        HTTPException: 404, there is no such model; 410, its session was finished, or it was unloaded.
    """
    run = service.runs.get(model_id)
    if run is None:
        raise HTTPException(404, f"model {model_id!r} is unknown")
    service.find_session(run.session_id)
    if run.unloaded:
        raise HTTPException(410, f"model {model_id!r} was unloaded")
    run.last_request = time.time()
    return run


def _start_run(
    service: Service,
    call: types.CreateModelRequest | types.LoadWeightsRequest,
    base: str,
    lora: Lora,
    job: Callable[[TrainingRun], Response],
) -> Response:
    """Accept a request that makes a model, of that base and with that adapter."""
    session = service.find_session(call.session_id or "")
    model_id = f"{session.session_id}:train:{call.model_seq_id}"
    if call.optimizer_config is not None and call.optimizer_config.type != "adamw":
        raise UnsupportedError(f"optimizer {call.optimizer_config.type!r} is not offered by this server; it has: adamw")

    def prepare() -> Job:
        if model_id in service.runs:  # asked for twice, and repeats are not recognised
            service.runs[model_id].close()
        worker = Worker(f"serve-{model_id}")
        order = RequestOrder(worker.submit)
        run = TrainingRun(model_id, service.check_name(base), lora, call.user_metadata, worker, order)
        service.runs[model_id] = run
        return functools.partial(job, run)

    start = lambda accepted: service.runs[model_id].worker.submit(accepted.carry_out)  # noqa: E731
    return service.accept((model_id, 0), call.type, prepare, start, model_id=model_id)


async def create_model(service: Service, request: Request) -> Response:
    """Make a new model to train."""
    call = await read(request, types.CreateModelRequest)
    lora = Lora(**({"train_unembed": True} if call.lora_config is None else dict(call.lora_config)))
    _check_rank(service, "lora_config.rank", lora)

    def job(run: TrainingRun) -> Response:
        run.model = service.models.create(lora)
        return answer(types.CreateModelResponse(model_id=run.model_id))

    return _start_run(service, call, call.base_model, lora, job)


def _check_rank(service: Service, what: str, lora: Lora) -> None:
    if lora.rank > service.max_rank:
        raise DataError(f"{what} is {lora.rank}; this server's limit is {service.max_rank}")


async def load_weights(service: Service, request: Request) -> Response:
    """Make a model from a saved one, or load another state into an existing model."""
    call = await read(request, types.LoadWeightsRequest)
    state = service.saved.find(call.path, "weights")
    _check_rank(service, f"the rank of {call.path}", state.lora)

    def job(run: TrainingRun) -> Response:
        old, run.model = run.model, service.models.load(state.handle, optimizer=call.optimizer)
        run.lora = state.lora
        if old is not None:
            old.close()
        return answer(types.LoadWeightsResponse(path=state.path, model_id=run.model_id, type="load_weights"))

    if call.model_id is None:
        return _start_run(service, call, call.base_model or state.base_model, state.lora, job)
    run = _find_run(service, call.model_id)
    return _accept_in_order(service, run, call, lambda: functools.partial(job, run))


async def get_info(service: Service, request: Request) -> Response:
    """Return the description of a model."""
    run = _find_run(service, (await read(request, types.GetInfoRequest)).model_id)
    data = types.ModelData(arch="rlkit", model_name=run.base_model, tokenizer_id=service.tokenizer_id)
    about = {"model_id": run.model_id, "is_lora": True, "lora_rank": run.lora.rank, "model_name": run.base_model}
    return answer(types.GetInfoResponse(type="get_info", model_data=data, **about))


async def unload_model(service: Service, request: Request) -> Response:
    """Free a model after its earlier requests; its samplers and saved states stay."""
    model_id = (await read(request, types.UnloadModelRequest)).model_id

    def prepare() -> Job:
        _find_run(service, model_id).unloaded = True
        return lambda: answer(types.UnloadModelResponse(model_id=model_id, type="unload_model"))

    def start(accepted: Accepted) -> None:
        service.runs[model_id].worker.submit(accepted.carry_out)
        service.runs[model_id].close()

    return service.accept((f"{model_id}:unload", 0), "unload_model", prepare, start, model_id=model_id)


def _accept_in_order(
    service: Service, run: TrainingRun, call: Any, prepare: Callable[[], Job], operation: str = ""
) -> Response:
    """Accept a request whose job is carried out in the model's order. Raises HTTPException 410: it was, long ago."""
    operation, seq_id = operation or call.type, call.seq_id or None

    def prepare_once() -> Job:
        if service.dedupe and run.order.knows(seq_id):
            gone = f"{operation}: seq_id {seq_id} was carried out, but its result is no longer kept"
            raise HTTPException(410, gone)
        return prepare()

    start = functools.partial(run.order.add, seq_id)
    return service.accept((run.model_id, seq_id), operation, prepare_once, start, model_id=run.model_id)


async def forward_backward(service: Service, request: Request) -> Response:
    """Compute logprobs, the loss, and unless ``forward_only`` its gradient, which is accumulated."""
    body = await request.body()
    call, loss, rows = await asyncio.to_thread(_parse, body) if len(body) > _LARGE else _parse(body)
    run = _find_run(service, call.model_id)

    def job() -> Response:
        return answer(write_outputs(*run.ready().run(rows, loss, backward=not call.forward_only)))

    return _accept_in_order(service, run, call, lambda: job, "forward" if call.forward_only else "forward_backward")


def _parse(body: bytes) -> tuple[pb.ForwardBackwardRequest, Loss, list[Row]]:
    try:
        call = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise HTTPException(422, f"forward_backward: the body is not a ForwardBackwardRequest: {error}") from error
    config = {**call.loss_fn_config, **{k: x.text or x.number for k, x in call.loss_fn_config_v2.items()}}
    loss = hosted(call.loss_fn, config)
    if not call.data:
        raise DataError("forward_backward: data is empty")
    return call, loss, [_read_row(f"data[{i}]", datum, loss) for i, datum in enumerate(call.data)]


def _read_row(where: str, datum: pb.Datum, loss: Loss) -> Row:
    """Return a datum with the inputs of ``loss``, all of them in the right shapes."""
    tokens, inputs = read_datum(where, datum)
    where += ".loss_fn_inputs"
    for name in ("target_tokens", *loss.inputs):
        if name not in inputs:
            raise DataError(f"{where} lacks {name!r}, which {loss.name} needs")
    targets = inputs.pop("target_tokens")
    shape = (tokens.size, *targets.shape[1:]) if loss.matrix and targets.ndim == 2 else (tokens.size,)
    if not tokens.size:
        raise DataError(f"{where}['target_tokens']: there are no tokens; expected one row per token of model_input")
    _check_array(f"{where}['target_tokens']", targets, np.int64, shape, "one row per token of model_input")
    for name, array in inputs.items():
        if name not in loss.inputs and name not in loss.optional:
            raise DataError(f"{where} has {name!r}, which {loss.name} does not read")
        _check_array(f"{where}[{name!r}]", array, np.float32, targets.shape, "as target_tokens")
        _check_numbers(f"{where}[{name!r}]", array, high=HIGHEST if name == "logprobs" else np.inf)
    for name, default in loss.optional.items():
        if name not in inputs:
            inputs[name] = default(inputs["advantages"]) if callable(default) else np.full(shape, default, np.float32)
    return Row(tokens, targets, inputs)


def _check_array(where: str, array: np.ndarray, dtype: type[np.generic], shape: tuple[int, ...], why: str) -> None:
    if array.dtype != dtype or array.shape != shape:
        found = f"has dtype {array.dtype} and shape {array.shape}"
        raise DataError(f"{where} {found}; expected {dtype.__name__} {shape}, {why}")


def _check_numbers(where: str, array: np.ndarray, *, high: float) -> None:
    bad = np.argwhere(~np.isfinite(array))
    if bad.size:
        index = "".join(f"[{k}]" for k in bad[0])
        raise DataError(f"{where}{index} is {array[tuple(bad[0])]}; expected a finite number")
    if (array > high).any():
        raise DataError(f"{where} has an entry of {array.max()}; expected logprobs, which are at most 0")


class _OptimStep(pydantic.BaseModel):
    """A step; the SDK's own type takes another optimizer's parameters for AdamW's."""

    model_id: str
    seq_id: int | None = None
    adam_params: types.AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    type: str = "optim_step"


def optim_step(service: Service, run: TrainingRun, call: _OptimStep) -> Job:
    """Take one step of AdamW."""
    if call.adam_params is None:
        kind = (call.optimizer_params or {}).get("type")
        raise UnsupportedError(f"optim_step has parameters of optimizer {kind!r}; expected adam_params of adamw")
    params = Adam(**dict(call.adam_params))
    return lambda: answer(types.OptimStepResponse(metrics=dict(run.ready().step(params))))


def save_weights(service: Service, run: TrainingRun, call: types.SaveWeightsRequest) -> Job:
    """Save a model with its optimizer."""
    save = _reserve(service, run, call, "weights", overwrite=call.overwrite)
    return lambda: answer(types.SaveWeightsResponse(path=save(), type="save_weights"))


def save_weights_for_sampler(service: Service, run: TrainingRun, call: types.SaveWeightsForSamplerRequest) -> Job:
    """Save a model to sample from: under a name, or for one sampler of this session."""
    if call.kind != "snapshot":
        raise UnsupportedError(f"save_weights_for_sampler: kind {call.kind!r} is not offered; use 'snapshot'")
    if call.path is not None:
        save = _reserve(service, run, call, "sampler_weights")
        return lambda: _answer_saved(path=save())
    if call.sampling_session_seq_id is None:
        raise DataError("save_weights_for_sampler has neither path nor sampling_session_seq_id")
    sampler_id = f"{run.session_id}:sample:{call.sampling_session_seq_id}"

    def job() -> Response:
        add_sampler(service, sampler_id, run.base_model, snapshot=run.ready().snapshot())
        return _answer_saved(sampling_session_id=sampler_id)

    return job


def _answer_saved(**fields: str) -> Response:
    return answer(types.SaveWeightsForSamplerResponseInternal(type="save_weights_for_sampler", **fields))


def _reserve(
    service: Service, run: TrainingRun, call: Any, kind: Kind, *, overwrite: bool = False
) -> Callable[[], str]:
    """Reserve a name; return the function that saves under it and returns the path."""
    name, expires = f"{call.seq_id or 0:06d}" if call.path is None else call.path, expiry_of(call.ttl_seconds)
    path = service.saved.reserve(run.model_id, kind, name, overwrite=overwrite)

    def save() -> str:
        try:
            handle = run.ready().save(name, optimizer=kind == "weights")
        except BaseException:
            service.saved.cancel_reservation(path)
            raise
        notes = {"metadata": call.user_metadata, "run_metadata": run.metadata}
        service.saved.add(SavedState(path, handle, run.base_model, run.lora, time.time(), expires, **notes))
        return path

    return save


def _in_order(kind: type[Any], prepare: Callable[[Service, TrainingRun, Any], Job]) -> Endpoint:
    """Return the endpoint of a call of a model: ``prepare`` checks it and returns its job, carried out in its turn."""

    @functools.wraps(prepare)  # faults are asked for by its name
    async def endpoint(service: Service, request: Request) -> Response:
        call = await read(request, kind)
        run = _find_run(service, call.model_id)
        return _accept_in_order(service, run, call, lambda: prepare(service, run, call))

    return endpoint


ENDPOINTS = {
    "POST create_model": create_model,
    "POST load_weights": load_weights,
    "POST get_info": get_info,
    "POST unload_model": unload_model,
    "POST forward_backward": forward_backward,
    "POST optim_step": _in_order(_OptimStep, optim_step),
    "POST save_weights": _in_order(types.SaveWeightsRequest, save_weights),
    "POST save_weights_for_sampler": _in_order(types.SaveWeightsForSamplerRequest, save_weights_for_sampler),
}
