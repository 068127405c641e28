"""Requests and responses as plain data, and the checks of a request's JSON fields."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple, TypeVar, cast

import attrs

__all__ = ["ApiError", "Fields", "Request", "Response"]

K = TypeVar("K")
T = TypeVar("T")


class ApiError(Exception):
    """A request that is answered with an HTTP error.

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
    """A request: method, path without the query, query, headers in lower case, body."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    def fields(self) -> Fields:
        """Return the body's JSON object. Raises ApiError: 422, it is something else."""
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
    values: Mapping[str, Any]

    def get(self, name: str) -> Any:
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

    def items(self, name: str, default: T | EllipsisType = ...) -> list[Any] | T:
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
