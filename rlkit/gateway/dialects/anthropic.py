"""Messages: Anthropic's API."""

from __future__ import annotations

from typing import Final

from rlkit.gateway.dialects.call import Json
from rlkit.gateway.types import GatewayError

__all__ = ["error"]

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error(problem: GatewayError) -> Json:
    """Return the JSON of an error."""
    message = problem.message
    if problem.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    fallback = "api_error" if problem.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(problem.status, fallback)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
