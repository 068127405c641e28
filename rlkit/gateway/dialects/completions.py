"""Completions of texts and of tokens: OpenAI's older API, and vLLM's generate endpoint."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, Self

import attrs
import numpy as np

from rlkit.gateway.dialects import openai
from rlkit.gateway.dialects._logprobs import chat_logprobs, parts, prompt_logprobs, spell, text_logprobs
from rlkit.gateway.dialects.body import Body, Event, Json, draw, refuse, wrong
from rlkit.gateway.dialects.chat import chat_request
from rlkit.gateway.types import Choice, GatewayError, Reply, Request

if TYPE_CHECKING:
    from rlkit.gateway._session import Session

__all__ = ["CompletionCall", "GenerateCall", "detokenize", "tokenize", "tokenizer_info"]

_UNSUPPORTED_HERE: Final = {"features": (), "content_parts": (), "kv_transfer_params": (), "ec_transfer_params": ()}
_MOST_EVENTS: Final = 32


@attrs.frozen(eq=False)
class GenerateCall(openai.CompletionsCall):
    """One call of ``POST /inference/v1/generate``.

    ``logprobs: 1``, which clients that train always send, gives the logprob of each sampled token and no alternatives,
    which would need one more pass over the sequence. 2 and more give alternatives.
    """

    request_id: str = ""
    logprobs: bool = False
    text: bool = False  # output_mode "text"

    @classmethod
    def parse(cls, value: Mapping[str, object], session: Session) -> Self:
        """Read a request. Raises GatewayError."""
        body = Body(value)
        refuse(body, _UNSUPPORTED_HERE)
        mode: Literal["tokens", "text"] = body.choice("output_mode", ("tokens", "text")) or "tokens"
        tokens = body.tokens("token_ids")
        if not tokens:
            raise body.missing("token_ids", " or empty; expected the tokens of a prompt")
        how = body.body("sampling_params")
        if how is None:
            raise body.missing("sampling_params")
        top = how.integer("logprobs", low=0, high=20)
        max_tokens = how.integer("max_tokens", low=1)
        request = Request(
            prompt=np.array(tokens, np.int64),
            draw=draw(how, session, max_tokens, tokens_only=mode == "tokens"),
            n=how.integer("n", low=1, high=128) or 1,
            top_logprobs=0 if top == 1 else top,
            prompt_logprobs=how.integer("prompt_logprobs", low=0, high=20),
            model=body.text("model") or "",
        )
        return cls(
            session=session,
            requests=[request],
            **openai.read_stream_options(body),
            request_id=body.text("request_id") or secrets.token_hex(16),
            logprobs=top is not None,
            text=mode == "text",
        )

    def body(self, replies: Sequence[Reply]) -> Json:
        (reply,) = replies
        return {
            **self._head(reply),
            "model": reply.model,
            "created": reply.created,
            "choices": [part for i, choice in enumerate(reply.choices) for part in self._parts(i, choice, 1)],
            "usage": openai.usage(replies),
            "prompt_logprobs": prompt_logprobs(reply, self.session.tokenizer),
            "kv_transfer_params": None,
        }

    def events(self, replies: Sequence[Reply]) -> Iterator[Event]:
        (reply,) = replies
        head = self._head(reply)
        for index, choice in enumerate(reply.choices):
            for part in self._parts(index, choice, _MOST_EVENTS):
                yield None, {**head, "choices": [part]}
                head.pop("prompt_token_ids", None)
        yield from self.finish_stream(head, replies)

    def _head(self, reply: Reply) -> Json:
        head: Json = {"request_id": self.request_id, "output_mode": "text" if self.text else "tokens"}
        return head | ({"prompt_token_ids": reply.prompt.tolist()} if self.token_ids else {})

    def _parts(self, index: int, choice: Choice, most: int) -> list[Json]:
        """Return a choice in parts, at most as many; the last has the text and the finish reason."""
        tokenizer, tokens = self.session.tokenizer, choice.sample.tokens.tolist()
        entries = chat_logprobs(choice, tokenizer, as_ids=not self.text, ids=True) if self.logprobs else None
        cuts = sorted({len(tokens) * i // most for i in range(most)})  # 0 is always present
        made: list[Json] = []
        for start, end in zip(cuts, [*cuts[1:], len(tokens)], strict=True):
            logprobs = None if entries is None else {"content": entries[start:end]}
            part: Json = {"index": index, "token_ids": tokens[start:end], "logprobs": logprobs, "finish_reason": None}
            made.append(part | ({"text": ""} if self.text else {}))
        made[-1] |= {**self.write_end(choice), **({"text": choice.text} if self.text else {}), "routed_experts": None}
        return made


async def tokenize(value: Mapping[str, object], session: Session) -> Json:
    """Answer ``POST /tokenize`` for a text, or for messages as they would be sampled from. Raises GatewayError."""
    body = Body(value)
    refuse(body, {"add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": ()})
    text = body.text("prompt")
    if text is not None:
        tokens = session.tokenizer.encode(text, special=True)
    elif body.get("messages") is None:
        raise body.missing("prompt", "; expected prompt or messages")
    else:
        tokens = await session.render(chat_request(body))
    strings = spell(session.tokenizer, tokens) if body.flag("return_token_strs") else None
    ids = tokens.tolist()
    return {"count": len(ids), "max_model_len": session.max_length, "tokens": ids, "token_strs": strings}


async def detokenize(value: Mapping[str, object], session: Session) -> Json:
    """Answer ``POST /detokenize``. Raises GatewayError."""
    body = Body(value)
    tokens, vocabulary = body.tokens("tokens"), session.tokenizer.vocab_size
    for i, token in enumerate(tokens):
        if token >= vocabulary:
            raise wrong(f"tokens[{i}]", token, f"less than {vocabulary}", "the size of the vocabulary")
    return {"prompt": session.tokenizer.decode(tokens, skip_special=False)}


def tokenizer_info(session: Session, _: Mapping[str, str], __: Mapping[str, str]) -> Json:
    """Answer ``GET /tokenizer_info``: the data that clients need to render prompts themselves."""
    tokenizer = session.tokenizer
    named: Mapping[str, str] = getattr(tokenizer, "named_tokens", {})
    end = tokenizer.decode(list(tokenizer.eos_ids[:1]), skip_special=False) if tokenizer.eos_ids else None
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "bos_token": named.get("bos_token"),
        "eos_token": named.get("eos_token", end),
        "pad_token": named.get("pad_token"),
        "model_max_length": session.max_length,
        "chat_template": tokenizer.chat_template,
    }


_UNSUPPORTED: Final = {"suffix": ()}
_DEFAULT_MAX_TOKENS: Final = 16  # of the API
_MOST_PROMPTS: Final = 4096


@attrs.frozen(eq=False)
class CompletionCall(openai.CompletionsCall):
    """One call of ``POST /v1/completions``: one request for each prompt."""

    logprobs: int | None = None
    echo: bool = False

    @classmethod
    def parse(cls, value: Mapping[str, object], session: Session) -> Self:
        """Read a request. Raises GatewayError."""
        body = Body(value)
        n = body.integer("n", low=1, high=128) or 1
        refuse(body, {**_UNSUPPORTED, "best_of": (n,)})
        echo = body.flag("echo")
        max_tokens = body.integer("max_tokens", low=0)
        max_tokens = _DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
        if max_tokens == 0 and not echo:
            raise wrong("max_tokens", 0, "at least 1", "0 is only useful with echo")
        logprobs = body.integer("logprobs", low=0, high=20)
        of_prompt = body.integer("prompt_logprobs", low=0, high=20)
        shared = Request(
            text="",
            draw=draw(body, session, max_tokens),
            n=n,
            top_logprobs=logprobs,
            prompt_logprobs=logprobs if echo and of_prompt is None else of_prompt,
            model=body.text("model") or "",
        )
        return cls(
            session=session,
            requests=[_with_prompt(shared, prompt) for prompt in _prompts(body)],
            **openai.read_stream_options(body),
            logprobs=logprobs,
            echo=echo,
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
                    **self.write_end(choice),
                }
                if self.token_ids:
                    written |= {"prompt_token_ids": reply.prompt.tolist(), "token_ids": choice.sample.tokens.tolist()}
                if reply.prompt_logprobs is not None and not self.echo:
                    written["prompt_logprobs"] = prompt_logprobs(reply, self.session.tokenizer)
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
        yield from self.finish_stream(head, replies)

    def _deltas(self, request: Request, reply: Reply, choice: Choice) -> Iterator[Json]:
        """Yield the additions to a choice, and at the end its finish reason."""
        whole = attrs.evolve(choice, content=choice.text, reasoning=None, calls=())
        logprobs = self._logprobs(reply, choice)
        behind = reply.prompt.size if self.echo else 0  # where the sampled tokens begin
        for i, part in enumerate(parts(whole, self.session.tokenizer, ())):
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
        yield {"text": "", "logprobs": None, **self.write_end(choice)}

    def _logprobs(self, reply: Reply, choice: Choice) -> dict[str, list[object] | None] | None:
        """Return the logprobs of a choice, with ``echo`` after those of the prompt."""
        if self.logprobs is None:
            return None
        ids, values, top = choice.sample.tokens, choice.sample.logprobs, [*(choice.top or ())]
        if self.echo:
            if reply.prompt_logprobs is None:
                raise GatewayError(400, "echo: this policy does not support logprobs of prompts", param="echo")
            ids = np.concatenate([reply.prompt, ids])
            values = np.concatenate([reply.prompt_logprobs, values])
            top = [*(reply.prompt_top or ()), *top]
        asked = top if self.logprobs else None
        return text_logprobs(self.session.tokenizer, ids, values, asked, first=int(self.echo), as_ids=self.as_ids)

    def _prompt_text(self, request: Request) -> str:
        if request.prompt is None:
            return request.text or ""
        return self.session.tokenizer.decode(request.prompt)


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
