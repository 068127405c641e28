"""Requests and responses as plain data, and training data and results as protocol buffers.

The message classes are the SDK's own (``tinker.proto``), so that this module needs the package ``tinker``.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import EllipsisType, ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar, cast

import attrs
import numpy as np

from rlkit._runtime import missing

if TYPE_CHECKING:
    from tinker.proto import tinker_public_pb2 as proto

__all__ = ["ApiError", "Fields", "ForwardBackward", "Request", "Response", "read_forward_backward", "write_outputs"]

K = TypeVar("K")
T = TypeVar("T")
Array: TypeAlias = list[object]


class ApiError(Exception):
    """An HTTP error in answer to a request.

    Args:
        status: 400 refused, 401 key, 404 unknown, 408 not yet, 409 taken, 410 gone, 422 malformed.
        message: one sentence.
        extra: further keys of the answer's body.
    """

    def __init__(self, status: int, message: str, **extra: object) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.extra = extra


class Response(NamedTuple):
    """An answer: status, headers, body, or a file that is the body."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    file: Path | None = None

    @classmethod
    def json(cls, value: object, status: int = 200) -> Response:
        """Return an answer in JSON."""
        return cls(status, {"content-type": "application/json"}, json.dumps(value).encode())

    @classmethod
    def proto(cls, body: bytes) -> Response:
        """Return an answer in protocol buffers."""
        return cls(200, {"content-type": "application/x-protobuf"}, body)

    @classmethod
    def error(cls, error: ApiError) -> Response:
        """Return the answer to a refused request."""
        return cls.json({"detail": error.message, **error.extra}, error.status)


@attrs.frozen
class Request:
    """An HTTP request: method, path without the query, query, headers in lower case, body."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    def fields(self) -> Fields:
        """Return the body's JSON object. Raises ApiError: 422, it is not one."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise ApiError(422, f"{self.path}: the body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ApiError(422, f"{self.path}: the body is a JSON {type(value).__name__}; expected an object")
        return Fields(self.path, value)


@attrs.frozen
class Fields:
    """A JSON object whose members are read by type; null counts as absent.

    Each method raises an ApiError 422 that names the field where it is missing without a default, or of another type.
    """

    where: str
    values: Mapping[str, object]

    def get(self, name: str) -> object:
        """Return the member as it is, or None."""
        return self.values.get(name)

    def text(self, name: str, default: T | EllipsisType = ...) -> str | T:
        """Read a string."""
        return self._read(name, str, "a string", default)

    def integer(
        self, name: str, default: T | EllipsisType = ..., *, low: int | None = None, high: int | None = None
    ) -> int | T:
        """Read an integer in [low, high]."""
        value = self._read(name, int, "an integer", default)
        if (
            isinstance(value, int)
            and value is not default
            and ((low is not None and value < low) or (high is not None and value > high))
        ):
            raise self._wrong(name, f"is {value}", f"an integer in [{low}, {'...' if high is None else high}]")
        return value

    def real(self, name: str, default: T | EllipsisType = ...) -> float | T:
        """Read a finite number."""
        value = self._read(name, float, "a finite number", default)
        if (
            isinstance(value, (int, float)) and value is not default and not (abs(value) <= sys.float_info.max)
        ):  # NaN, too, and integers of any length
            raise self._wrong(name, "is not, or too large", "a finite number")
        return value

    def flag(self, name: str, default: T | EllipsisType = ...) -> bool | T:
        """Read a boolean."""
        return self._read(name, bool, "true or false", default)

    def object(self, name: str, default: T | EllipsisType = ...) -> Fields | T:
        """Read a nested object, as Fields."""
        value = self._read(name, dict, "an object", default)
        return Fields(f"{self.where}.{name}", value) if isinstance(value, dict) else value

    def items(self, name: str, default: T | EllipsisType = ...) -> Array | T:
        """Read an array."""
        return self._read(name, list, "an array", default)

    def _read(self, name: str, kind: type[K], expected: str, default: T | EllipsisType) -> K | T:
        value = self.values.get(name)
        if value is None:
            if isinstance(default, EllipsisType):
                raise self._wrong(name, "is missing", expected)
            return default
        kinds = (int, float) if kind is float else kind
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            raise self._wrong(name, f"is a JSON {type(value).__name__}", expected)
        return cast("K", value)

    def _wrong(self, name: str, what: str, expected: str) -> ApiError:
        return ApiError(422, f"{self.where}: {name!r} {what}; expected {expected}")


_DENSE_LIMIT = 64 * 2**20  # elements of one array; a sparse one can ask for any number in a few bytes
_NO_LOGPROB = -99999.0  # the API's mark of an empty cell


@cache
def messages() -> ModuleType:
    """Return the module of message classes.

    Raises:
        MissingPackageError: the package tinker is not installed.
    """
    try:
        from tinker.proto import tinker_public_pb2
    except ImportError as error:
        raise missing("rlkit.server", "the package tinker", "serve") from error
    return tinker_public_pb2


@attrs.frozen(eq=False)
class ForwardBackward:
    """A received training call."""

    model_id: str
    seq_id: int
    forward_only: bool
    loss: str
    config: Mapping[str, float | str]
    data: Sequence[proto.Datum]  # decoded by ``datum``

    def datum(self, index: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return tokens int64 [N] and inputs of datum ``index``. Raises ApiError: 400, naming datum and field."""
        message, where = self.data[index], f"data[{index}]"
        parts = []
        for chunk in message.model_input:
            kind = chunk.WhichOneof("chunk")
            if kind != "encoded_text":
                raise ApiError(
                    400, f"{where}.model_input has a chunk of {kind or 'no kind'}; this model reads text only"
                )
            parts.append(_array(f"{where}.model_input", chunk.encoded_text.tokens, np.int32))
        tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
        return tokens, {k: _tensor(f"{where}.loss_fn_inputs[{k!r}]", t) for k, t in message.loss_fn_inputs.items()}


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Return the training call in ``body``. Raises ApiError: 422, it is not one."""
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
    for width, neighbours in itertools.groupby(arrays, lambda row: {name: x.shape[1:] for name, x in row.items()}):
        rows = list(neighbours)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(rows))
        for name, shape in width.items():
            _write_batched(record.fields[name], [x[name] for x in rows], shape)
    return bytes(message.SerializeToString())


@attrs.frozen(eq=False)
class Sampled:
    """One completion: tokens [n], logprobs [n], and the most likely alternatives of each where requested."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stop: bool
    top: TopLogprobs | None = None


@attrs.frozen(eq=False)
class TopLogprobs:
    """Ids [n, k] and logprobs [n, k]; rows of NaN are positions without any."""

    ids: np.ndarray
    logprobs: np.ndarray

    def write(self, message: proto.TopkLogprobs) -> None:
        """Fill a TopkLogprobs message."""
        empty = np.isnan(self.logprobs)
        message.length, message.k = self.ids.shape
        message.token_ids = np.where(empty, 0, self.ids).astype(np.int32).tobytes()
        message.logprobs = np.where(empty, _NO_LOGPROB, self.logprobs).astype(np.float32).tobytes()


@attrs.frozen(eq=False)
class Matrix:
    """A matrix and its encoding: all of it, or the cells that a CSR layout lists."""

    values: np.ndarray
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None

    @classmethod
    def sparse(
        cls, where: str, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: Sequence[int], fill: int = 0
    ) -> Matrix:
        """Build a matrix from the listed cells; the others are ``fill``.

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

    def write(self, values: np.ndarray, message: proto.Tensor) -> None:
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
        targets: the requested ids, and their logprobs.
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


def _tensor(where: str, message: proto.Tensor) -> np.ndarray:
    pb = messages()
    dtypes: Mapping[object, type[np.generic]] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}
    dtype = dtypes.get(message.dtype)
    if dtype is None:
        raise ApiError(400, f"{where} has dtype {message.dtype}; expected float32 or int64")
    shape = list(message.shape)
    if message.HasField("sparse_csr"):
        csr = message.sparse_csr
        rows, columns = (_array(where, x, np.int64) for x in (csr.crow_indices, csr.col_indices))
        return Matrix.sparse(where, _array(where, csr.values, dtype), rows, columns, shape).values
    array = _array(where, message.dense, dtype)
    shape = shape or [array.size]
    if len(shape) > 2 or min(shape) < 0 or int(np.prod(shape)) != array.size:
        raise ApiError(400, f"{where} has {array.size} values for the shape {shape}; expected as many, [N] or [N, K]")
    return array.reshape(shape)


def _array(where: str, data: bytes, dtype: type[np.generic]) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise ApiError(400, f"{where} has {len(data)} bytes; expected a multiple of {size}")
    return np.frombuffer(data, dtype=dtype)


def _write_tensor(message: proto.Tensor, array: np.ndarray) -> None:
    pb = messages()
    message.dtype = pb.DTYPE_FLOAT32 if array.dtype == np.float32 else pb.DTYPE_INT64
    message.shape.extend(array.shape)
    message.dense = np.ascontiguousarray(array).tobytes()


def _write_batched(message: proto.BatchedTensor, arrays: Sequence[np.ndarray], trailing: Sequence[int]) -> None:
    parts = [np.ascontiguousarray(x, dtype=np.float32).tobytes() for x in arrays]
    message.dtype = messages().DTYPE_FLOAT32
    message.data = b"".join(parts)
    message.offsets = np.cumsum([0, *map(len, parts)]).astype(np.int64).tobytes()
    message.trailing_shape.extend(trailing)
