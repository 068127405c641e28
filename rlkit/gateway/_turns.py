"""One turn: its sampling settings, the client's answer, and logprobs of given tokens."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

import attrs
import numpy as np

from rlkit._interaction import Action, Message
from rlkit.backends.protocol import PromptLogprobs, Sampler, TopK
from rlkit.chat import Chat
from rlkit.errors import DataError, RlkitError
from rlkit.futures import Future
from rlkit.gateway.types import Choice, Draw, Finish, GatewayError, Reply, Request
from rlkit.tools import Parsed, ToolCall
from rlkit.tools.formats import formats
from rlkit.types import SAMPLING_OPTIONS, Sample, SamplingParams

__all__ = ["add_scores", "params_for", "read", "seed_for", "stops"]

_SEEDS = 2**31 - 2**16  # below it every backend takes a seed as it is


def params_for(chat: Chat, draw: Draw, own: SamplingParams | None, room: int) -> SamplingParams:
    """Return the sampling settings.

    Args:
        chat: of the conversation.
        draw: the client's settings.
        own: the session's settings, which override the client's; None: the client's are used.
        room: the most tokens that fit, >= 1.
    """
    base = own or SamplingParams(max_tokens=2**31 - 1)
    most = min(room, base.max_tokens, room if draw.max_tokens is None else draw.max_tokens)
    asked = {} if own is not None else {name: getattr(draw, name) for name in SAMPLING_OPTIONS}
    said = {name: value for name, value in asked.items() if value is not None}
    return chat.params(attrs.evolve(base, max_tokens=most, stop=stops(draw, own), **said))


def stops(draw: Draw, own: SamplingParams | None) -> tuple[str, ...] | tuple[int, ...] | None:
    """Return the stops of a completion: the session's and the client's; None: the end tokens alone."""
    mine = None if own is None else own.stop
    if not draw.stop:
        return () if draw.ignore_eos and mine is None else mine
    if mine and isinstance(mine[0], str) != isinstance(draw.stop[0], str):
        return mine  # texts and ids cannot be mixed; the session's override the client's
    return cast("tuple[str, ...] | tuple[int, ...]", tuple(dict.fromkeys([*(mine or ()), *draw.stop])))


def seed_for(session_seed: int, digest: bytes, repeat: int) -> int:
    """Return the seed of a request, in [0, 2^31): a function of its content and repeats, not of their order."""
    words = np.frombuffer(digest, "<u4").tolist()
    state = np.random.SeedSequence(session_seed, spawn_key=(*words, repeat)).generate_state(1, np.uint64)
    return int(state[0]) % _SEEDS


_THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


def read(
    chat: Chat, sample: Sample, tools: Sequence[Message], stop: Sequence[str | int], salt: str
) -> tuple[Choice, Action]:
    """Parse a completion.

    Args:
        chat: of the conversation.
        sample: as it was drawn.
        tools: schemas of the tools that may be called; () leaves calls in the text.
        stop: texts or ids of the request that end a completion; they are left out of the client's text.
        salt: makes the calls' ids differ from those of all other completions.
    """
    action = chat.action(sample.tokens, sample.stop_reason, prompt=sample.prompt, tools=tools)
    text = _ended(chat, action, stop)
    if len(text) < len(action):
        action = _cut(chat, action, sample, tools, text)
    parsed = action.parsed or _thought(chat, sample, text)
    calls: tuple[ToolCall, ...] = ()
    content = parsed.text_outside
    if action.parsed is not None and not tools:
        content = text if parsed.reasoning is None else _THOUGHT.sub("", text, count=1)
    elif tools:
        with_calls = parsed if action.parsed is not None else _called(chat, action, content, tools)
        calls = tuple(attrs.evolve(call, id=_id(salt, i)) for i, call in enumerate(with_calls.calls))
        if calls:
            content = with_calls.text_outside
        elif with_calls.errors:  # text that cannot be parsed stays text, as in other model servers
            content = text if parsed.reasoning is None else _THOUGHT.sub("", text, count=1)
    finish: Finish = "length" if sample.stop_reason == "length" else "tool_calls" if calls else "stop"
    return Choice(sample, text, content, parsed.reasoning, calls, finish), action


def _ended(chat: Chat, action: Action, stop: Sequence[str | int]) -> str:
    """Return the text before its stop text."""
    text = str(action)
    if stop and isinstance(stop[0], int):
        if action.tokens.size and int(action.tokens[-1]) in stop and int(action.tokens[-1]) not in chat.ends:
            return chat.prefill + chat.tokenizer.decode(action.tokens[:-1])
        return text
    ends = [at for each in stop if isinstance(each, str) and (at := text.find(each)) >= 0]
    return text[: min(ends)] if ends and action.stop_reason == "stop" else text


def _cut(chat: Chat, action: Action, sample: Sample, tools: Sequence[Message], text: str) -> Action:
    """Return the action as a client reads it: a renderer that reads tokens reads those of the shorter text."""
    if action.parsed is None:
        return Action(text, tokens=action.tokens, raw=action.raw, stop_reason=action.stop_reason)
    ids = chat.tokenizer.encode(text.removeprefix(chat.prefill), special=True)
    parsed = chat.action(ids, "stop", prompt=sample.prompt, tools=tools).parsed
    return Action(text, tokens=action.tokens, raw=action.raw, stop_reason=action.stop_reason, parsed=parsed)


def _thought(chat: Chat, sample: Sample, text: str) -> Parsed:
    """Separate reasoning between <think> and </think>, also where the prompt has opened it."""
    if "</think>" not in text:
        return Parsed(text)
    opened = text.lstrip().startswith("<think>")
    if not opened:
        tail = chat.tokenizer.decode(sample.prompt[-8:], skip_special=False).rstrip()
        opened = tail.endswith("<think>")
    match = _THOUGHT.match(text) if opened else None
    return Parsed(text) if match is None else Parsed(text[match.end() :], reasoning=match[1].strip("\n"))


def _called(chat: Chat, action: Action, content: str, tools: Sequence[Message]) -> Parsed:
    """Read calls by the chat's format.

    The agent checks arguments against the schemas, and the schemas themselves: agents that work elsewhere have some
    that are not valid, such as patterns of another language.
    """
    functions = [tool.get("function", tool) for tool in tools]
    schemas: Mapping[str, Mapping[str, object]] = {each["name"]: each.get("parameters") or {} for each in functions}
    parsed: Parsed = formats.resolve(chat.tool_format)(content, schemas)
    if not parsed.calls and not parsed.errors and action.raw != action:
        raw = formats.resolve(chat.tool_format)(action.raw, schemas)  # some formats begin with a control token
        if raw.calls:
            return Parsed("", raw.calls, raw.errors)
    return parsed


def _id(salt: str, index: int) -> str:
    """Return nine letters and digits, as some templates ask for."""
    return hashlib.blake2b(f"{salt}/{index}".encode(), digest_size=8).hexdigest()[:9]


T = TypeVar("T")


async def add_scores(sampler: Sampler, request: Request, reply: Reply) -> Reply:
    """Return the reply with the requested logprobs and alternatives: the policy's own, at temperature 1.

    If a prompt needs the same number of alternatives as its completions (as in lm-eval's requests), one pass scores
    both.

    Raises:
        GatewayError: 400 where the sampler gives no alternatives or refuses the tokens, 503 where it fails.
    """
    size, k, of_prompt = int(reply.prompt.size), request.top_logprobs or 0, request.prompt_logprobs
    texts = [np.concatenate([reply.prompt, choice.sample.tokens]) for choice in reply.choices if k]
    logprobs: np.ndarray | None = None
    rows = []
    if k and of_prompt == k:
        logprobs, row = await _both(sampler, texts.pop(0), k)
        rows.append(row)
    rows += [await _alternatives(sampler, text, k) for text in texts]
    if k:
        choices = [attrs.evolve(x, top=row[size:]) for x, row in zip(reply.choices, rows, strict=True)]
        reply = attrs.evolve(reply, choices=choices)
    if of_prompt is None:
        return reply
    if logprobs is not None:
        return attrs.evolve(reply, prompt_logprobs=logprobs[:size], prompt_top=rows[0][:size])
    logprobs = await _wait(lambda: sampler.logprobs(reply.prompt))
    top = await _alternatives(sampler, reply.prompt, of_prompt) if of_prompt else None
    return attrs.evolve(reply, prompt_logprobs=logprobs, prompt_top=top)


async def _both(sampler: Sampler, tokens: np.ndarray, k: int) -> tuple[np.ndarray, list[Mapping[int, float]]]:
    """Return each token's own logprob [T] and its alternatives, in one pass where the sampler supports it."""
    if not isinstance(sampler, PromptLogprobs):
        return await _wait(lambda: sampler.logprobs(tokens)), await _alternatives(sampler, tokens, k)
    logprobs, ids, best = await _wait(lambda: sampler.prompt_logprobs(tokens, k))
    return logprobs, _by_id(ids, best)


async def _alternatives(sampler: Sampler, tokens: np.ndarray, k: int) -> list[Mapping[int, float]]:
    """Return ``k`` alternatives for each token, id -> logprob, the most probable first."""
    if not isinstance(sampler, TopK):
        what = "this policy's sampler does not support top_logprobs"
        raise GatewayError(400, f"{what}; ask for logprobs without top_logprobs", param="top_logprobs")
    return _by_id(*await _wait(lambda: sampler.top_logprobs(tokens, k)))


async def _wait(submit: Callable[[], Future[T]]) -> T:
    try:
        return await (await asyncio.to_thread(submit))
    except DataError as error:
        raise GatewayError(400, str(error)) from error
    except RlkitError as error:
        raise GatewayError(503, f"the policy cannot be scored: {error}", code="sampler") from error


def _by_id(ids: np.ndarray, logprobs: np.ndarray) -> list[Mapping[int, float]]:
    return [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs.tolist(), strict=True)]
