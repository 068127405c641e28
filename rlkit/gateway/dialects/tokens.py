"""Tokens in, tokens out: vLLM's generate endpoint, and its two for the tokenizer."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, Self

import attrs
import numpy as np

from rlkit.gateway.dialects import openai
from rlkit.gateway.dialects.body import Body, refuse, wrong
from rlkit.gateway.dialects.call import Call, Event, Json
from rlkit.gateway.dialects.chat import chat_request
from rlkit.gateway.dialects.drawing import draw
from rlkit.gateway.dialects.logprobs import chat_logprobs, prompt_logprobs
from rlkit.gateway.dialects.spelling import matched_stop, spell
from rlkit.gateway.types import Answerer, Choice, GatewayError, Reply, Request

__all__ = ["GenerateCall", "detokenize", "tokenize", "tokenizer_info"]

_UNSUPPORTED: Final = {"features": (), "content_parts": (), "kv_transfer_params": (), "ec_transfer_params": ()}
_MOST_EVENTS: Final = 32


@attrs.frozen(eq=False)
class GenerateCall(Call):
    """One call of ``POST /inference/v1/generate``.

    ``logprobs: 1``, which clients that train always send, gives the logprob of each sampled token and no alternative
    to it: that would be one more pass over the sequence. 2 and more give alternatives.
    """

    request_id: str = ""
    logprobs: bool = False
    text: bool = False  # output_mode "text"
    token_ids: bool = False  # return_token_ids
    include_usage: bool = False

    @classmethod
    def parse(cls, value: Mapping[str, object], answerer: Answerer) -> Self:
        """Read a request. Raises GatewayError."""
        body = Body(value)
        refuse(body, _UNSUPPORTED)
        mode: Literal["tokens", "text"] = body.choice("output_mode", ("tokens", "text")) or "tokens"
        tokens = body.tokens("token_ids")
        if not tokens:
            raise GatewayError(
                400, "token_ids: is missing or empty; expected the tokens of a prompt", param="token_ids"
            )
        how = body.body("sampling_params")
        if how is None:
            raise GatewayError(400, "sampling_params: is missing", param="sampling_params")
        top = how.integer("logprobs", low=0, high=20)
        max_tokens = how.integer("max_tokens", low=1)
        request = Request(
            prompt=np.array(tokens, np.int64),
            draw=draw(how, answerer, max_tokens, tokens_only=mode == "tokens"),
            n=how.integer("n", low=1, high=128) or 1,
            top_logprobs=0 if top == 1 else top,
            prompt_logprobs=how.integer("prompt_logprobs", low=0, high=20),
            model=body.text("model") or "",
        )
        options = body.body("stream_options")
        return cls(
            answerer=answerer,
            requests=[request],
            stream=body.flag("stream"),
            request_id=body.text("request_id") or secrets.token_hex(16),
            logprobs=top is not None,
            text=mode == "text",
            token_ids=body.flag("return_token_ids"),
            include_usage=options is not None and options.flag("include_usage"),
        )

    def body(self, replies: Sequence[Reply]) -> Json:
        (reply,) = replies
        return {
            **self._head(reply),
            "model": reply.model,
            "created": reply.created,
            "choices": [part for i, choice in enumerate(reply.choices) for part in self._parts(i, choice, 1)],
            "usage": openai.usage(replies),
            "prompt_logprobs": prompt_logprobs(reply, self.answerer.tokenizer),
            "kv_transfer_params": None,
        }

    def events(self, replies: Sequence[Reply]) -> Iterator[Event]:
        (reply,) = replies
        head = self._head(reply)
        for index, choice in enumerate(reply.choices):
            for part in self._parts(index, choice, _MOST_EVENTS):
                yield None, {**head, "choices": [part]}
                head.pop("prompt_token_ids", None)
        if self.include_usage:
            yield None, {**head, "choices": [], "usage": openai.usage(replies)}
        yield None, "[DONE]"

    def _head(self, reply: Reply) -> Json:
        head: Json = {"request_id": self.request_id, "output_mode": "text" if self.text else "tokens"}
        return head | ({"prompt_token_ids": reply.prompt.tolist()} if self.token_ids else {})

    def _parts(self, index: int, choice: Choice, most: int) -> list[Json]:
        """Return a choice in parts, at most as many; the last has the text and says why it ended."""
        tokenizer, tokens = self.answerer.tokenizer, choice.sample.tokens.tolist()
        entries = chat_logprobs(choice, tokenizer, as_ids=not self.text, ids=True) if self.logprobs else None
        cuts = sorted({len(tokens) * i // most for i in range(most)})  # 0 is always there
        made: list[Json] = []
        for start, end in zip(cuts, [*cuts[1:], len(tokens)], strict=True):
            logprobs = None if entries is None else {"content": entries[start:end]}
            part: Json = {"index": index, "token_ids": tokens[start:end], "logprobs": logprobs, "finish_reason": None}
            made.append(part | ({"text": ""} if self.text else {}))
        made[-1] |= {
            "finish_reason": "stop" if choice.finish == "tool_calls" else choice.finish,
            "stop_reason": matched_stop(choice, tokenizer, self.requests[0].draw.stop),
            **({"text": choice.text} if self.text else {}),
            "routed_experts": None,
        }
        return made


async def tokenize(value: Mapping[str, object], answerer: Answerer) -> Json:
    """Answer ``POST /tokenize``: of a text, or of messages as they would be sampled from. Raises GatewayError."""
    body = Body(value)
    refuse(body, {"add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": ()})
    text = body.text("prompt")
    if text is not None:
        tokens = answerer.tokenizer.encode(text, special=True)
    elif body.get("messages") is None:
        raise GatewayError(400, "prompt: is missing; expected it, or messages", param="prompt")
    else:
        tokens = await answerer.render(chat_request(body))
    strings = spell(answerer.tokenizer, tokens) if body.flag("return_token_strs") else None
    ids = tokens.tolist()
    return {"count": len(ids), "max_model_len": answerer.max_length, "tokens": ids, "token_strs": strings}


async def detokenize(value: Mapping[str, object], answerer: Answerer) -> Json:
    """Answer ``POST /detokenize``. Raises GatewayError."""
    body = Body(value)
    tokens, vocabulary = body.tokens("tokens"), answerer.tokenizer.vocab_size
    for i, token in enumerate(tokens):
        if token >= vocabulary:
            raise wrong(f"tokens[{i}]", token, f"less than {vocabulary}", "the size of the vocabulary")
    return {"prompt": answerer.tokenizer.decode(tokens, skip_special=False)}


def tokenizer_info(answerer: Answerer, _: Mapping[str, str], __: Mapping[str, str]) -> Json:
    """Answer ``GET /tokenizer_info``: what clients need to write prompts themselves."""
    tokenizer = answerer.tokenizer
    named: Mapping[str, str] = getattr(tokenizer, "named_tokens", {})
    end = tokenizer.decode(list(tokenizer.eos_ids[:1]), skip_special=False) if tokenizer.eos_ids else None
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "bos_token": named.get("bos_token"),
        "eos_token": named.get("eos_token", end),
        "pad_token": named.get("pad_token"),
        "model_max_length": answerer.max_length,
        "chat_template": tokenizer.chat_template,
    }
