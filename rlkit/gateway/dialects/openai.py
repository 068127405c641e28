"""What OpenAI's APIs, and vLLM's additions to them, have in common."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from rlkit._interaction import Message
from rlkit.gateway.dialects.body import Body, refuse, wrong
from rlkit.gateway.dialects.call import Json, count
from rlkit.gateway.types import Answerer, Draw, GatewayError, Reply
from rlkit.tools import ToolCall

__all__ = ["NAME", "arguments", "draw", "error", "error_type", "function_tool", "usage"]

NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}", re.ASCII)  # of a tool
_UNSUPPORTED: Final = {
    "logit_bias": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "logits_processors": (),
    "min_tokens": (0,),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "prompt_embeds": (),
    "repetition_detection": (),
}


def draw(body: Body, answerer: Answerer, max_tokens: int | None, *, tokens_only: bool = False) -> Draw:
    """Return how to draw.

    Args:
        body: with the fields of the completions APIs and those that vLLM adds.
        answerer: its tokenizer spells the ids of ``stop_token_ids`` where there are texts to stop at, too.
        max_tokens: as the client gave it.
        tokens_only: no text is returned, so that fields about text have no effect.
    """
    text_only = ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
    refuse(body, {name: x for name, x in _UNSUPPORTED.items() if not (tokens_only and name in text_only)})
    temperature = body.number("temperature", 0.0, 1000.0)
    if temperature is not None and 0.0 < temperature < 0.001:
        raise wrong(body.path("temperature"), temperature, "0, or a number in [0.001, 1000]")
    top_p = body.number("top_p", 0.0, 1.0)
    if top_p == 0.0:
        raise wrong(body.path("top_p"), 0, "a number above 0 and at most 1", "temperature 0 is greedy")
    top_k = body.integer("top_k", low=-1, high=2**31 - 1)
    seed = body.integer("seed", low=-(2**63), high=2**64 - 1)
    return Draw(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=-1 if top_k == 0 else top_k,
        min_p=body.number("min_p", 0.0, 1.0),
        repetition_penalty=body.number("repetition_penalty", 0.001, 1000.0),
        presence_penalty=body.number("presence_penalty", -2.0, 2.0),
        frequency_penalty=body.number("frequency_penalty", -2.0, 2.0),
        stop=_stop(body, answerer),
        ignore_eos=body.flag("ignore_eos"),
        seed=None if seed is None else seed % 2**64,
    )


def _stop(body: Body, answerer: Answerer) -> tuple[str, ...] | tuple[int, ...]:
    texts, ids = body.texts("stop"), tuple(body.tokens("stop_token_ids"))
    for i, token in enumerate(ids):
        if token >= answerer.tokenizer.vocab_size:
            raise wrong(f"{body.path('stop_token_ids')}[{i}]", token, f"less than {answerer.tokenizer.vocab_size}")
    if len(texts) + len(ids) > 128:
        raise wrong(body.path("stop"), len(texts) + len(ids), "at most 128 stops")
    if not texts:
        return tuple(dict.fromkeys(ids))
    spelled = [answerer.tokenizer.decode([token], skip_special=False) for token in ids]
    return tuple(dict.fromkeys([*texts, *spelled]))


def function_tool(function: Body) -> Message:
    """Return a tool in the chat form, from an object with its ``name``, ``description`` and ``parameters``."""
    name = function.required("name", function.text("name"))
    if not NAME.fullmatch(name):
        raise wrong(function.path("name"), name, "1 to 128 letters, digits, and _ . : -")
    schema: Json = {"name": name, "description": function.text("description") or ""}
    parameters = function.body("parameters")
    schema["parameters"] = {"type": "object", "properties": {}} if parameters is None else dict(parameters.value)
    if not schema["description"]:
        del schema["description"]
    return {"type": "function", "function": schema}


def distinct(tools: Sequence[Message], where: str) -> tuple[Message, ...]:
    """Return the tools, each of which has a name of its own."""
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in names:
            raise wrong(f"{where}[{i}]", name, "a name that no other tool has")
        names.add(name)
    return tuple(tools)


def known_tool(name: str, tools: Sequence[Message], where: str) -> str:
    """Return the name of a tool that must be called, which must be there."""
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise wrong(where, name, "a name in tools: " + (", ".join(names) or "there are none"))
    return name


def arguments(call: ToolCall) -> str:
    """Return a call's arguments as JSON."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def usage(replies: Sequence[Reply]) -> Json:
    """Return how many tokens were read and written."""
    prompt, completion = count(replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error_type(status: int) -> str:
    """Return the type of an error, by its status."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error(problem: GatewayError) -> Json:
    """Return the JSON of an error."""
    return {
        "error": {
            "message": problem.message,
            "type": error_type(problem.status),
            "param": problem.param,
            "code": problem.code,
        }
    }
