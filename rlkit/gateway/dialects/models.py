"""The list of models: the policy, in OpenAI's form and in Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlkit.backends.tokenizers import source_of
from rlkit.gateway.dialects.body import Json
from rlkit.gateway.types import GatewayError

if TYPE_CHECKING:
    from rlkit.gateway._session import Session

__all__ = ["list_models", "retrieve_model"]

_UNKNOWN = "1970-01-01T00:00:00Z"  # clients require a date


def list_models(session: Session, _: Mapping[str, str], headers: Mapping[str, str]) -> Json:
    """Return the answer of ``GET /v1/models``."""
    if "anthropic-version" in headers:
        name = session.model
        return {"data": [_anthropic(session)], "first_id": name, "last_id": name, "has_more": False}
    return {"object": "list", "data": [_openai(session)]}


def retrieve_model(session: Session, path: Mapping[str, str], headers: Mapping[str, str]) -> Json:
    """Return the answer of ``GET /v1/models/{model}``."""
    if path["model"] != session.model:
        what = f"the model {path['model'][:100]!r} does not exist; this gateway serves {session.model!r}"
        raise GatewayError(404, what, param="model", code="model_not_found")
    return _anthropic(session) if "anthropic-version" in headers else _openai(session)


def _openai(session: Session) -> Json:
    name = session.model
    card: Json = {"id": name, "object": "model", "created": 0, "owned_by": "rlkit"}
    # As in vLLM: the model's source, so that clients can load its tokenizer.
    card["root"] = source_of(session.tokenizer) or name
    return {**card, "parent": None, "max_model_len": session.max_length}


def _anthropic(session: Session) -> Json:
    name = session.model
    card: Json = {"type": "model", "id": name, "display_name": name, "created_at": _UNKNOWN}
    return {**card, "lifecycle": "active", "max_input_tokens": session.max_length, "max_tokens": session.max_length}
