"""Completions of texts and of tokens: OpenAI's older API, with what vLLM adds to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Self

import attrs
import numpy as np

from rlkit.gateway.dialects import openai
from rlkit.gateway.dialects.body import Body, refuse, wrong
from rlkit.gateway.dialects.call import Call, Event, Json
from rlkit.gateway.dialects.drawing import draw
from rlkit.gateway.dialects.logprobs import prompt_logprobs, text_logprobs
from rlkit.gateway.dialects.spelling import matched_stop, parts
from rlkit.gateway.types import Answerer, Choice, GatewayError, Reply, Request

__all__ = ["CompletionCall"]

_UNSUPPORTED: Final = {"suffix": ()}
_DEFAULT_MAX_TOKENS: Final = 16  # of the API
_MOST_PROMPTS: Final = 4096


@attrs.frozen(eq=False)
class CompletionCall(Call):
    """One call of ``POST /v1/completions``: one request for each prompt."""

    logprobs: int | None = None
    echo: bool = False
    include_usage: bool = False
    token_ids: bool = False  # return_token_ids
    as_ids: bool = False  # return_tokens_as_token_ids

    @classmethod
    def parse(cls, value: Mapping[str, object], answerer: Answerer) -> Self:
        """Read a request. Raises GatewayError."""
        body = Body(value)
        n = body.integer("n", low=1, high=128) or 1
        refuse(body, {**_UNSUPPORTED, "best_of": (n,)})
        echo = body.flag("echo")
        max_tokens = body.integer("max_tokens", low=0)
        max_tokens = _DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
        if max_tokens == 0 and not echo:
            raise wrong("max_tokens", 0, "at least 1", "0 is of use with echo alone")
        logprobs = body.integer("logprobs", low=0, high=20)
        of_prompt = body.integer("prompt_logprobs", low=0, high=20)
        shared = Request(
            text="",
            draw=draw(body, answerer, max_tokens),
            n=n,
            top_logprobs=logprobs,
            prompt_logprobs=logprobs if echo and of_prompt is None else of_prompt,
            model=body.text("model") or "",
        )
        options = body.body("stream_options")
        return cls(
            answerer=answerer,
            requests=[_with_prompt(shared, prompt) for prompt in _prompts(body)],
            stream=body.flag("stream"),
            logprobs=logprobs,
            echo=echo,
            include_usage=options is not None and options.flag("include_usage"),
            token_ids=body.flag("return_token_ids"),
            as_ids=body.flag("return_tokens_as_token_ids"),
        )

    def body(self, replies: Sequence[Reply]) -> Json:
        choices: list[Json] = []
        for request, reply in zip(self.requests, replies, strict=True):
            for choice in reply.choices:
                written = {
                    "index": len(choices),
                    "text": (self._prompt_text(request) if self.echo else "") + choice.text,
                    "logprobs": self._logprobs(reply, choice),
                    **self._end(choice),
                }
                if self.token_ids:
                    written |= {"prompt_token_ids": reply.prompt.tolist(), "token_ids": choice.sample.tokens.tolist()}
                if reply.prompt_logprobs is not None and not self.echo:
                    written["prompt_logprobs"] = prompt_logprobs(reply, self.answerer.tokenizer)
                choices.append(written)
        return {**_head(replies), "choices": choices, "usage": openai.usage(replies)}

    def events(self, replies: Sequence[Reply]) -> Iterator[Event]:
        head = _head(replies) | ({"usage": None} if self.include_usage else {})
        index = 0
        for request, reply in zip(self.requests, replies, strict=True):
            for choice in reply.choices:
                for delta in self._deltas(request, reply, choice):
                    yield None, {**head, "choices": [{"index": index, **delta}]}
                index += 1
        if self.include_usage:
            yield None, {**head, "choices": [], "usage": openai.usage(replies)}
        yield None, "[DONE]"

    def _deltas(self, request: Request, reply: Reply, choice: Choice) -> Iterator[Json]:
        """Yield what is added to a choice, and at the end why it ended."""
        whole = attrs.evolve(choice, content=choice.text, reasoning=None, calls=())
        logprobs = self._logprobs(reply, choice)
        behind = reply.prompt.size if self.echo else 0  # where the sampled tokens begin
        for i, part in enumerate(parts(whole, self.answerer.tokenizer, ())):
            span = slice(behind + part.tokens.start if i else 0, behind + part.tokens.stop)
            delta: Json = {
                "text": (self._prompt_text(request) if self.echo and i == 0 else "") + part.text,
                "logprobs": None if logprobs is None else {name: x and x[span] for name, x in logprobs.items()},
                "finish_reason": None,
                "stop_reason": None,
            }
            if self.token_ids:
                delta["token_ids"] = choice.sample.tokens[part.tokens].tolist()
                delta |= {"prompt_token_ids": reply.prompt.tolist()} if i == 0 else {}
            yield delta
        yield {"text": "", "logprobs": None, **self._end(choice)}

    def _logprobs(self, reply: Reply, choice: Choice) -> dict[str, list[object] | None] | None:
        """Return the logprobs of a choice, with ``echo`` behind those of the prompt."""
        if self.logprobs is None:
            return None
        ids, values, top = choice.sample.tokens, choice.sample.logprobs, [*(choice.top or ())]
        if self.echo:
            if reply.prompt_logprobs is None:
                raise GatewayError(400, "echo: this policy gives no logprobs of prompts", param="echo")
            ids = np.concatenate([reply.prompt, ids])
            values = np.concatenate([reply.prompt_logprobs, values])
            top = [*(reply.prompt_top or ()), *top]
        asked = top if self.logprobs else None
        return text_logprobs(self.answerer.tokenizer, ids, values, asked, first=int(self.echo), as_ids=self.as_ids)

    def _prompt_text(self, request: Request) -> str:
        if request.prompt is None:
            return request.text or ""
        return self.answerer.tokenizer.decode(request.prompt)

    def _end(self, choice: Choice) -> Json:
        finish = "stop" if choice.finish == "tool_calls" else choice.finish
        stops = self.requests[0].draw.stop
        return {"finish_reason": finish, "stop_reason": matched_stop(choice, self.answerer.tokenizer, stops)}


def _head(replies: Sequence[Reply]) -> Json:
    first = replies[0]
    return {"id": f"cmpl-{first.id}", "object": "text_completion", "created": first.created, "model": first.model}


def _with_prompt(request: Request, prompt: str | list[int]) -> Request:
    if isinstance(prompt, str):
        return attrs.evolve(request, text=prompt)
    return attrs.evolve(request, text=None, prompt=np.array(prompt, np.int64))


def _prompts(body: Body) -> list[str] | list[list[int]]:
    """Return ``prompt``, which is a text, tokens, or a list of either."""
    value = body.get("prompt")
    if isinstance(value, str):
        value = [value]
    expected = "a text, a list of token ids, or a list of either, none of them empty"
    if not isinstance(value, list) or not value or len(value) > _MOST_PROMPTS:
        raise wrong("prompt", value, expected)
    if isinstance(value[0], int):
        return [body.tokens("prompt")]
    if all(isinstance(each, str) and each for each in value):
        return list(value)
    if all(isinstance(each, list) and each for each in value):
        return [Body({f"prompt[{i}]": each}).tokens(f"prompt[{i}]") for i, each in enumerate(value)]
    raise wrong("prompt", value, expected)
