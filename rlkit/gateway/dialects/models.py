"""Which models there are: the policy, in OpenAI's form and in Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping

from rlkit.backends.transformers_tokenizer import source_of
from rlkit.gateway.dialects.call import Json
from rlkit.gateway.types import Answerer, GatewayError

__all__ = ["list_models", "retrieve_model"]

_UNKNOWN = "1970-01-01T00:00:00Z"  # readers want a date


def list_models(answerer: Answerer, _: Mapping[str, str], headers: Mapping[str, str]) -> Json:
    """Return the answer of ``GET /v1/models``."""
    if "anthropic-version" in headers:
        name = answerer.model
        return {"data": [_anthropic(answerer)], "first_id": name, "last_id": name, "has_more": False}
    return {"object": "list", "data": [_openai(answerer)]}


def retrieve_model(answerer: Answerer, path: Mapping[str, str], headers: Mapping[str, str]) -> Json:
    """Return the answer of ``GET /v1/models/{model}``."""
    if path["model"] != answerer.model:
        what = f"the model {path['model'][:100]!r} does not exist; there is {answerer.model!r}"
        raise GatewayError(404, what, param="model", code="model_not_found")
    return _anthropic(answerer) if "anthropic-version" in headers else _openai(answerer)


def _openai(answerer: Answerer) -> Json:
    name = answerer.model
    card: Json = {"id": name, "object": "model", "created": 0, "owned_by": "rlkit"}
    # As vLLM's: where the model was read from, so that whoever samples here can read its tokenizer.
    card["root"] = source_of(answerer.tokenizer) or name
    return {**card, "parent": None, "max_model_len": answerer.max_length}


def _anthropic(answerer: Answerer) -> Json:
    name = answerer.model
    card: Json = {"type": "model", "id": name, "display_name": name, "created_at": _UNKNOWN}
    return {**card, "lifecycle": "active", "max_input_tokens": answerer.max_length, "max_tokens": answerer.max_length}
