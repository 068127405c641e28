"""A service that says what a test tells it to, on a tokenizer of bytes."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict

import attrs
import numpy as np

from rlkit.backends.toy import ByteTokenizer
from rlkit.gateway._types import Choice, GatewayError, Reply
from rlkit.tools import ToolCall
from rlkit.types import Sample


@attrs.define
class Says:
    """One answer of the policy."""

    content: str = ""
    reasoning: str | None = None
    calls: tuple = ()  # (name, arguments)
    length: bool = False  # cut by max_tokens
    stop: str | None = None  # the text that ended it


class FakeService:
    """Every key that begins with "sk-" and every session id that begins with "s" is let in."""

    model = "policy"
    tokenizer = ByteTokenizer()
    max_length = 4096

    def __init__(self, says=("Hello there, Wörld!",)):
        self.says = [Says(x) if isinstance(x, str) else x for x in says]
        self.requests = []
        self.responses = OrderedDict()
        self.admitted = []
        self.raises = None
        self.hold = None  # an asyncio.Event factory is not needed: a threading.Event that answers wait for
        self.running = threading.Semaphore(0)
        self.cancelled = threading.Semaphore(0)
        self.calls = 0

    def admit(self, session, key):
        self.admitted.append((session, key))
        if session is None and not (key or "").startswith("sk-"):
            raise GatewayError(401, "there is no session with this key", code="invalid_api_key")
        if session is not None and not session.startswith("s"):
            raise GatewayError(401, "there is no such session", code="invalid_api_key")
        return self

    def refuse(self):
        self.refused = getattr(self, "refused", 0) + 1

    async def render(self, request):
        if request.prompt is not None:
            return request.prompt
        if request.text is not None:
            return self.tokenizer.encode(request.text)
        return self.tokenizer.apply_chat_template(
            [{"role": m["role"], "content": m["content"]} for m in request.messages]
        )

    async def answer(self, request):
        self.requests.append(request)
        if self.hold is not None:
            self.running.release()
            try:
                while not self.hold.is_set():
                    await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                self.cancelled.release()
                raise
        if self.raises is not None:
            raise self.raises
        prompt = await self.render(request)
        if prompt.size > self.max_length:
            what = f"This model's maximum context length is {self.max_length} tokens, but the prompt has {prompt.size}"
            raise GatewayError(400, what, param="messages", code="context_length_exceeded")
        choices = [self._choice(request, prompt, i) for i in range(request.n)]
        logprobs = top = None
        if request.prompt_logprobs is not None:
            logprobs = -np.arange(prompt.size, dtype=np.float32) / 8
            top = [{65: -0.25, 66: -1.5} for _ in range(prompt.size)]
        return Reply(
            f"{len(self.requests):024x}", 1700000000, request.model or "policy", prompt, choices, logprobs, top
        )

    def _choice(self, request, prompt, i):
        says = self.says[(len(self.requests) - 1 + i) % len(self.says)]
        if request.sampling.max_tokens == 0:
            return Choice(Sample(prompt, [], [], "length"), "", "", finish="length", top=[])
        calls = []
        for name, arguments in says.calls:
            calls.append(ToolCall(name, arguments, f"call{self.calls:05d}"))
            self.calls += 1
        text = says.content
        if says.reasoning is not None:
            text = f"<think>{says.reasoning}</think>{text}"
        for call in calls:
            text += f"<tool_call>{call.name} {call.arguments}</tool_call>"
        tokens = [*text.encode(), *(says.stop or "").encode()]
        if not says.length and says.stop is None:
            tokens.append(257)
        top = None
        if request.top_logprobs is not None:
            top = [{t: -0.125, 33: -2.0} if request.top_logprobs else {} for t in tokens]
        sample = Sample(prompt, tokens, [-0.125] * len(tokens), "length" if says.length else "stop")
        finish = "length" if says.length else "tool_calls" if calls else "stop"
        return Choice(sample, text, says.content, says.reasoning, calls, finish, top)
