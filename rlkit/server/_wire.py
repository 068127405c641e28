"""Requests and answers on the SDK's own types: JSON by pydantic, training data and results by protocol buffers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import pydantic
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from tinker.proto import tinker_public_pb2 as pb

from rlkit.errors import DataError
from rlkit.types import Sample

__all__ = ["answer", "read", "read_datum", "read_turn", "write_outputs", "write_samples", "write_tensor", "write_top"]

_Kind = TypeVar("_Kind", bound=pydantic.BaseModel)
_DTYPES: Mapping[int, type[np.generic]] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}
_DENSE_LIMIT = 64 * 2**20  # elements of an array; a sparse one can ask for any number in a few bytes
_NO_LOGPROB = -99999.0  # the API's mark of an empty cell


async def read(request: Request, kind: type[_Kind]) -> _Kind:
    """Return the body as one of the SDK's types; fields of newer SDKs are ignored, in nested objects, too.

    Raises:
        HTTPException: 422, naming the first field that is missing or wrong.
    """
    try:
        call = kind.model_validate_json(await request.body(), strict=True, extra="ignore")
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, (request.url.path.rpartition("/")[2], *first["loc"])))
        raise HTTPException(422, f"{where}: {first['msg']}") from None
    for name, value in call:
        if name.endswith("seq_id") and value is not None and value < 0:
            raise HTTPException(422, f"{name} is {value}; expected an integer >= 0")
    return call


def answer(value: pydantic.BaseModel | pb.SampleResponse | pb.ForwardBackwardOutput) -> Response:
    """Return one of the SDK's types as an answer: in JSON, or in protocol buffers."""
    if isinstance(value, pydantic.BaseModel):
        return Response(value.model_dump_json(), media_type="application/json")
    return Response(value.SerializeToString(), media_type="application/x-protobuf")


class _Turn(pydantic.BaseModel):
    model_id: str
    seq_id: int


def read_turn(body: bytes) -> tuple[str, int] | None:
    """Return the model and the seq_id of a request, whatever it asks for; None where it names none."""
    try:
        turn = _Turn.model_validate_json(body, strict=True)
    except pydantic.ValidationError:
        try:
            call = pb.ForwardBackwardRequest.FromString(body)
        except DecodeError:
            return None
        return (call.model_id, call.seq_id) if call.seq_id else None
    return turn.model_id, turn.seq_id


def read_datum(where: str, datum: pb.Datum) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return tokens int64 [N] and inputs of a datum. Raises DataError, naming the field."""
    parts = [np.zeros(0, np.int64)]
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise DataError(f"{where}.model_input has a chunk of {kind or 'no kind'}; this model reads text only")
        parts.append(_read_array(f"{where}.model_input", chunk.encoded_text.tokens, np.int32).astype(np.int64))
    inputs = {name: _read_tensor(f"{where}.loss_fn_inputs[{name!r}]", x) for name, x in datum.loss_fn_inputs.items()}
    return np.concatenate(parts), inputs


def _read_tensor(where: str, tensor: pb.Tensor) -> np.ndarray:
    # Not by the SDK: it takes the bits of bfloat16 for integers, and the indices of a sparse tensor as they are.
    if tensor.dtype not in _DTYPES:
        raise DataError(f"{where} has dtype {tensor.dtype}; expected float32 or int64")
    dtype, shape = _DTYPES[tensor.dtype], list(tensor.shape)
    if tensor.HasField("sparse_csr"):
        csr = tensor.sparse_csr
        rows, columns = (_read_array(where, x, np.int64) for x in (csr.crow_indices, csr.col_indices))
        return _densify(where, _read_array(where, csr.values, dtype), rows, columns, shape)
    array = _read_array(where, tensor.dense, dtype)
    if shape and (len(shape) > 2 or min(shape) < 0 or math.prod(shape) != array.size):
        raise DataError(f"{where} has {array.size} values for the shape {shape}; expected as many, [N] or [N, K]")
    return array.reshape(shape or -1)


def _densify(where: str, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: list[int]) -> np.ndarray:
    """Return a matrix of the listed cells, as the SDK sends mostly empty matrices of torch; the others are 0."""
    if len(shape) != 2 or min(shape) < 0 or math.prod(shape) > _DENSE_LIMIT:
        raise DataError(f"{where} is sparse with shape {shape}; expected two dimensions of bounded size")
    good = rows.size == shape[0] + 1 and rows[0] == 0 and rows[-1] == values.size == columns.size
    if not good or (np.diff(rows) < 0).any() or (columns < 0).any() or (columns >= shape[1]).any():
        raise DataError(f"{where}: the sparse indices do not fit the shape {shape}")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def _read_array(where: str, data: bytes, dtype: type[np.generic]) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise DataError(f"{where} has {len(data)} bytes; expected a multiple of {size}")
    return np.frombuffer(data, dtype).copy()


def write_outputs(arrays: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> pb.ForwardBackwardOutput:
    """Return the result of a training call; neighbours whose arrays have the same width share a record."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for width, neighbours in itertools.groupby(arrays, lambda row: row["logprobs"].shape[1:]):
        rows = list(neighbours)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(rows))
        for name in rows[0]:
            parts = [row[name].astype(np.float32).tobytes() for row in rows]
            offsets = np.cumsum([0, *map(len, parts)]).astype(np.int64).tobytes()
            batch = pb.BatchedTensor(
                dtype=pb.DTYPE_FLOAT32, data=b"".join(parts), offsets=offsets, trailing_shape=width
            )
            record.fields[name].CopyFrom(batch)
    return message


def write_samples(samples: Sequence[Sample]) -> pb.SampleResponse:
    """Return the answer with completions."""
    message = pb.SampleResponse()
    for sample in samples:
        message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sample.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=sample.tokens.astype(np.int32).tobytes(),
            logprobs=sample.logprobs.astype(np.float32).tobytes(),
        )
    return message


def write_top(message: pb.TopkLogprobs, ids: np.ndarray, logprobs: np.ndarray) -> None:
    """Fill in ids and logprobs [n, k] of the most likely tokens; rows of NaN are positions without any."""
    empty = np.isnan(logprobs)
    message.length, message.k = ids.shape
    message.token_ids = np.where(empty, 0, ids).astype(np.int32).tobytes()
    message.logprobs = np.where(empty, _NO_LOGPROB, logprobs).astype(np.float32).tobytes()


def write_tensor(message: pb.Tensor, array: np.ndarray) -> None:
    """Fill in a float32 tensor."""
    message.dtype, message.dense = pb.DTYPE_FLOAT32, array.astype(np.float32).tobytes()
    message.shape.extend(array.shape)
