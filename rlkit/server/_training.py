"""Endpoints: gradients and optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from rlkit._check import HIGHEST
from rlkit.server import _wire
from rlkit.server._adapter import LossRow
from rlkit.server._graph import read_loss
from rlkit.server._losses import Loss, hosted
from rlkit.server._state import ServerState, TrainingRun, endpoint, post
from rlkit.server._wire import ApiError, Fields, Request, Response
from rlkit.types import Adam

__all__ = ["Job", "of_model", "queued"]

Job: TypeAlias = Callable[[], Mapping[str, object]]
Check: TypeAlias = Callable[[ServerState, TrainingRun, Fields], Job]
_ADAM = Adam(eps=1e-12)  # the API's defaults


def submitted(
    state: ServerState,
    run: TrainingRun,
    operation: str,
    seq_id: int | None,
    prepare: Callable[[], Callable[[], Response]],
) -> Response:
    """Accept a request of a model in training.

    Args:
        seq_id: the client's number of it.
        prepare: checks the request and returns the job. A request that it refuses still uses up its turn.
    """
    key = (run.model_id, seq_id) if seq_id is not None else object()
    if (known := state.futures.known(key)) is not None:
        if known.operation != operation:
            raise ApiError(400, f"{operation}: seq_id {seq_id} already belongs to a {known.operation}")
        return known.answer
    if state.futures.dedupe and run.line.had(seq_id):
        raise ApiError(410, f"{operation}: seq_id {seq_id} was carried out, but its result is no longer kept")
    try:
        job = prepare()
    except Exception:
        run.line.skip(seq_id)
        raise

    def carried_out() -> Response:
        answer = job()
        state.done(operation, run.model_id, seq_id)
        return answer

    entry = state.futures.add(key, operation, model_id=run.model_id)
    run.line.enter(seq_id, entry, carried_out)
    return entry.answer


def queued(state: ServerState, fields: Fields, operation: str, check: Check) -> Response:
    """Accept a request whose job, which ``check`` returns, is executed in the model's order; the answer is JSON."""
    run, seq_id = state.run(fields.text("model_id")), fields.integer("seq_id", None, low=0)

    def prepare() -> Callable[[], Response]:
        job = check(state, run, fields)
        return lambda: Response.json(job())

    return submitted(state, run, operation, seq_id, prepare)


def of_model(operation: str) -> Callable[[Check], Check]:
    """Decorate the check of a request of a model in training, which is POSTed to ``operation``. See ``queued``."""

    def add(check: Check) -> Check:
        answer = endpoint("POST", operation, operation)
        answer(lambda state, request: queued(state, request.fields(), operation, check))
        return check

    return add


@post("forward_backward")
def forward_backward(state: ServerState, request: Request) -> Response:
    """Compute logprobs, the loss, and unless ``forward_only`` its gradient, which is accumulated."""
    call = _wire.read_forward_backward(request.body)
    run = state.run(call.model_id)
    operation = "forward" if call.forward_only else "forward_backward"

    def prepare() -> Callable[[], Response]:
        loss = _loss(state, run, call)
        if not call.data:
            raise ApiError(400, "forward_backward: data is empty")
        rows = [_row(f"data[{i}].loss_fn_inputs", *call.datum(i), loss) for i in range(len(call.data))]

        def job() -> Response:
            arrays, metrics = run.ready().run(rows, loss, backward=not call.forward_only)
            return Response.proto(_wire.write_outputs(arrays, metrics))

        return job

    return submitted(state, run, operation, call.seq_id or None, prepare)


@of_model("optim_step")
def optim_step(state: ServerState, run: TrainingRun, fields: Fields) -> Job:
    """Take one step of AdamW."""
    params = _adam(fields)
    return lambda: {"metrics": dict(run.ready().step(params))}


@post("create_custom_loss")
def create_custom_loss(state: ServerState, request: Request) -> Response:
    """Keep a traced loss for the session."""
    fields = request.fields()
    session = state.session(fields.text("session_id"))
    number = fields.integer("custom_loss_seq_id", low=0)
    key = ("create_custom_loss", session.session_id, number)
    if (known := state.futures.known(key)) is not None:
        return known.answer
    loss_id = f"{session.session_id}:loss:{number}"

    def job() -> Response:
        state.losses[session.session_id, loss_id] = read_loss(fields)
        return Response.json({"loss_id": loss_id, "type": "create_custom_loss"})

    return state.futures.accept(key, "create_custom_loss", lambda carry_out: carry_out(), job)


def _loss(state: ServerState, run: TrainingRun, call: _wire.ForwardBackward) -> Loss:
    if call.loss != "custom":
        return hosted(call.loss, call.config)
    loss_id = call.config.get("loss_id")
    loss = state.losses.get((run.session_id, str(loss_id)))
    if loss is None or set(call.config) != {"loss_id"}:
        raise ApiError(400, f"loss_fn 'custom' with loss_fn_config {call.config}: expected the loss_id of this session")
    return loss


def _row(where: str, tokens: np.ndarray, inputs: dict[str, np.ndarray], loss: Loss) -> LossRow:
    """Return a datum with the inputs of ``loss`` in the right shapes."""
    targets = _targets(where, inputs.pop("target_tokens", None), tokens.size, loss)
    if loss.ranks is not None:
        inputs["target_tokens"] = targets
        return LossRow(tokens, targets, _ranked(where, inputs, targets, loss.ranks))
    for name, default in {**dict.fromkeys(loss.inputs), **loss.optional}.items():
        if name not in inputs and default is not None:  # its inputs were checked before
            made = default(inputs["advantages"]) if callable(default) else np.full(targets.shape, default, np.float32)
            inputs[name] = made
        if name not in inputs:
            raise ApiError(400, f"{where} lacks {name!r}, which {loss.name} needs")
        _check_input(where, name, inputs[name], targets.shape)
    extra = inputs.keys() - {*loss.inputs, *loss.optional}
    if extra:
        raise ApiError(400, f"{where} has {min(extra)!r}, which {loss.name} does not read")
    return LossRow(tokens, targets, inputs)


def _targets(where: str, targets: np.ndarray | None, size: int, loss: Loss) -> np.ndarray:
    if targets is None:
        raise ApiError(400, f"{where} lacks 'target_tokens'")
    if targets.dtype != np.int64 or targets.shape[:1] != (size,) or not size or (targets.ndim == 2 and not loss.matrix):
        shapes = f"({size},)" + (f" or ({size}, K)" if loss.matrix else "")
        what = f"has dtype {targets.dtype} and shape {targets.shape}"
        raise ApiError(
            400, f"{where}['target_tokens'] {what}; expected int64 {shapes}, one row per token of model_input"
        )
    return targets


def _check_input(where: str, name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    where = f"{where}[{name!r}]"
    if array.dtype != np.float32 or array.shape != shape:
        what = f"has dtype {array.dtype} and shape {array.shape}"
        raise ApiError(400, f"{where} {what}; expected float32 {shape}, as target_tokens")
    bad = np.argwhere(~np.isfinite(array))
    if bad.size:
        index = "".join(f"[{k}]" for k in bad[0])
        raise ApiError(400, f"{where}{index} is {array[tuple(bad[0])]}; expected a finite number")
    if name.endswith("logprobs"):
        _check_logprobs(where, array)


def _check_logprobs(where: str, array: np.ndarray) -> None:
    if (array > HIGHEST).any():  # NaN is not
        raise ApiError(400, f"{where} has an entry of {np.nanmax(array)}; expected logprobs, which are at most 0")


def _ranked(
    where: str, inputs: Mapping[str, np.ndarray], targets: np.ndarray, ranks: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Return the inputs of a custom loss: those it declares, with the ranks it declares; others are left out.

    Each is a number or shaped like the targets, or [N] beside targets [N, K]; logprobs are shaped like the targets.
    """
    ranked: dict[str, np.ndarray] = {}
    for name, rank in ranks.items():
        array = targets if name == "logprobs" else inputs.get(name)
        if array is None:
            raise ApiError(400, f"{where} lacks {name!r}, which the custom loss reads")
        if rank == 0 and array.size == 1:
            array = array.reshape(())
        if array.ndim != rank:
            raise ApiError(400, f"{where}[{name!r}] has {array.ndim} dimensions; the custom loss declared {rank}")
        if name == "logprobs":
            continue
        logprobs = name.endswith("logprobs")
        shapes = (
            [targets.shape] if logprobs else [(), targets.shape[:1], targets.shape[: 1 if name == "weights" else 2]]
        )
        if array.shape not in shapes:
            expected = " or ".join(map(str, dict.fromkeys(shapes)))
            raise ApiError(400, f"{where}[{name!r}] has shape {array.shape}; expected {expected}, as target_tokens")
        if logprobs:
            _check_logprobs(f"{where}[{name!r}]", array)
        ranked[name] = array
    return ranked


def _adam(fields: Fields) -> Adam:
    params = fields.object("adam_params", None)
    if params is None:
        kind = fields.object("optimizer_params", Fields("", {})).text("type", "none")
        raise ApiError(400, f"optim_step has parameters of the optimizer {kind!r}; this model's is adamw: adam_params")
    names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    values: dict[str, float] = {}
    for name in names:
        if name in params.values and params.get(name) is None:  # the encoding of NaN
            raise ApiError(400, f"optim_step: adam_params.{name} is not a finite number")
        values[name] = float(params.real(name, getattr(_ADAM, name)))
    return Adam(**values)
