"""Training data and results as protocol buffers.

The message classes are the SDK's own (``tinker.proto``), so that this module needs the package ``tinker``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import attrs
import numpy as np

from rlkit import _install
from rlkit.errors import UnsupportedError
from rlkit.server.requests import ApiError

__all__ = [
    "ForwardBackward",
    "Matrix",
    "Sampled",
    "TopLogprobs",
    "WireDatum",
    "read_forward_backward",
    "write_outputs",
    "write_samples",
]

_FLOAT32: np.dtype[Any] = np.dtype(np.float32)
_INT64: np.dtype[Any] = np.dtype(np.int64)
_DENSE_LIMIT = 64 * 2**20  # elements of one array; a sparse one can ask for any number in a few bytes
_NO_LOGPROB = -99999.0  # the API's mark of an empty cell


@cache
def messages() -> Any:
    """Return the module of message classes.

    Raises:
        UnsupportedError: the package tinker is not installed.
    """
    try:
        from tinker.proto import tinker_public_pb2
    except ImportError as error:
        raise UnsupportedError(f"rlkit.server needs the package tinker: {_install.command('tinker')}") from error
    return tinker_public_pb2


@attrs.frozen(eq=False)
class WireDatum:
    """A datum as it came: tokens int64 [N], inputs by name."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@attrs.frozen(eq=False)
class ForwardBackward:
    """A training call as it came."""

    model_id: str
    seq_id: int
    forward_only: bool
    loss: str
    config: Mapping[str, float | str]
    data: Sequence[Any]  # messages, decoded by ``datum``

    def datum(self, index: int) -> WireDatum:
        """Decode datum ``index``. Raises ApiError: 400, naming the datum and the field."""
        message, where = self.data[index], f"data[{index}]"
        parts = []
        for chunk in message.model_input:
            kind = chunk.WhichOneof("chunk")
            if kind != "encoded_text":
                raise ApiError(
                    400, f"{where}.model_input has a chunk of {kind or 'no kind'}; this model reads text only"
                )
            parts.append(_array(f"{where}.model_input", chunk.encoded_text.tokens, np.dtype(np.int32)))
        tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
        return WireDatum(
            tokens, {k: _tensor(f"{where}.loss_fn_inputs[{k!r}]", t) for k, t in message.loss_fn_inputs.items()}
        )


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Return the training call in ``body``. Raises ApiError: 422, it is none."""
    decode_error = importlib.import_module("google.protobuf.message").DecodeError
    message = messages().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except decode_error as error:
        raise ApiError(422, f"forward_backward: the body is not a ForwardBackwardRequest: {error}") from error
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    return ForwardBackward(
        message.model_id, message.seq_id, message.forward_only, message.loss_fn, config, message.data
    )


def write_outputs(arrays: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput; neighbours whose arrays have the same width share a record."""
    message = messages().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for key, value in metrics.items():
        message.metrics[key] = value
    start = 0
    while start < len(arrays):
        width = {name: x.shape[1:] for name, x in arrays[start].items()}
        end = start
        while end < len(arrays) and {name: x.shape[1:] for name, x in arrays[end].items()} == width:
            end += 1
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=end - start)
        for name, shape in width.items():
            _write_batched(record.fields[name], [x[name] for x in arrays[start:end]], shape)
        start = end
    return bytes(message.SerializeToString())


@attrs.frozen(eq=False)
class Sampled:
    """One completion: tokens [n], logprobs [n], and the most likely tokens beside each where asked for."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stop: bool
    top: TopLogprobs | None = None


@attrs.frozen(eq=False)
class TopLogprobs:
    """Ids [n, k] and logprobs [n, k]; rows of NaN stand for positions without."""

    ids: np.ndarray
    logprobs: np.ndarray

    def write(self, message: Any) -> None:
        """Fill a TopkLogprobs."""
        empty = np.isnan(self.logprobs)
        message.length, message.k = self.ids.shape
        message.token_ids = np.where(empty, 0, self.ids).astype(np.int32).tobytes()
        message.logprobs = np.where(empty, _NO_LOGPROB, self.logprobs).astype(np.float32).tobytes()


@attrs.frozen(eq=False)
class Matrix:
    """A matrix and how it travels: all of it, or the cells that a CSR layout lists."""

    values: np.ndarray
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None

    @classmethod
    def sparse(
        cls, where: str, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: Sequence[int], fill: int = 0
    ) -> Matrix:
        """From the listed cells; the others are ``fill``.

        Raises:
            ApiError: 400, the indices do not fit the shape.
        """
        if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] > _DENSE_LIMIT:
            raise ApiError(400, f"{where} is sparse with shape {list(shape)}; expected two dimensions of bounded size")
        good = rows.size == shape[0] + 1 and rows[0] == 0 and rows[-1] == values.size == columns.size
        if not good or (np.diff(rows) < 0).any() or (columns < 0).any() or (columns >= shape[1]).any():
            raise ApiError(400, f"{where}: the sparse indices do not fit the shape {list(shape)}")
        out = np.full(tuple(shape), fill, values.dtype)
        out[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
        return cls(out, rows, columns)

    def write(self, values: np.ndarray, message: Any) -> None:
        """Fill a Tensor with ``values`` in this layout."""
        values = values.astype(np.float32)
        if self.rows is None or self.columns is None:
            _write_tensor(message, values)
            return
        message.dtype = messages().DTYPE_FLOAT32
        message.shape.extend(values.shape)
        listed = values[np.repeat(np.arange(len(values)), np.diff(self.rows)), self.columns]
        message.sparse_csr.values = listed.tobytes()
        message.sparse_csr.crow_indices = self.rows.astype(np.int64).tobytes()
        message.sparse_csr.col_indices = self.columns.astype(np.int64).tobytes()


def write_samples(
    samples: Sequence[Sampled],
    prompt_logprobs: np.ndarray | None = None,
    prompt_top: TopLogprobs | None = None,
    targets: tuple[Matrix, np.ndarray] | None = None,
    alternatives: tuple[np.ndarray, np.ndarray] | None = None,
) -> bytes:
    """Return a SampleResponse.

    Args:
        samples: the completions.
        prompt_logprobs: [P], NaN where the prompt was not scored.
        prompt_top: [P, k], rows of NaN there.
        targets: the ids that were asked about, and their logprobs.
        alternatives: ids and logprobs [P - 1, k].
    """
    pb = messages()
    message = pb.SampleResponse()
    for sample in samples:
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sample.stop else pb.STOP_REASON_LENGTH,
            tokens=sample.tokens.astype(np.int32).tobytes(),
            logprobs=sample.logprobs.astype(np.float32).tobytes(),
        )
        if sample.top is not None:
            sample.top.write(sequence.topk_sampled_logprobs)
    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    if prompt_top is not None:
        prompt_top.write(message.topk_prompt_logprobs)
    if targets is not None:
        targets[0].write(targets[1], message.target_prompt_logprobs)
    if alternatives is not None:
        _write_tensor(message.prompt_alt_tokens.tokens, alternatives[0].astype(np.int64))
        _write_tensor(message.prompt_alt_tokens.logprobs, alternatives[1].astype(np.float32))
    return bytes(message.SerializeToString())


def _tensor(where: str, message: Any) -> np.ndarray:
    pb = messages()
    dtype = {pb.DTYPE_FLOAT32: _FLOAT32, pb.DTYPE_INT64: _INT64}.get(message.dtype)
    if dtype is None:
        raise ApiError(400, f"{where} has dtype {message.dtype}; expected float32 or int64")
    shape = list(message.shape)
    if message.HasField("sparse_csr"):
        csr, index = message.sparse_csr, _INT64
        rows, columns = (_array(where, x, index) for x in (csr.crow_indices, csr.col_indices))
        return Matrix.sparse(where, _array(where, csr.values, dtype), rows, columns, shape).values
    array = _array(where, message.dense, dtype)
    shape = shape or [array.size]
    if len(shape) > 2 or min(shape) < 0 or int(np.prod(shape)) != array.size:
        raise ApiError(400, f"{where} has {array.size} values for the shape {shape}; expected as many, [N] or [N, K]")
    return array.reshape(shape)


def _array(where: str, data: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ApiError(400, f"{where} has {len(data)} bytes; expected a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype=dtype)


def _write_tensor(message: Any, array: np.ndarray) -> None:
    pb = messages()
    message.dtype = pb.DTYPE_FLOAT32 if array.dtype == np.float32 else pb.DTYPE_INT64
    message.shape.extend(array.shape)
    message.dense = np.ascontiguousarray(array).tobytes()


def _write_batched(message: Any, arrays: Sequence[np.ndarray], trailing: Sequence[int]) -> None:
    parts = [np.ascontiguousarray(x, dtype=np.float32).tobytes() for x in arrays]
    message.dtype = messages().DTYPE_FLOAT32
    message.data = b"".join(parts)
    message.offsets = np.cumsum([0, *map(len, parts)]).astype(np.int64).tobytes()
    message.trailing_shape.extend(trailing)
