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
    params = None

    def __init__(self, says=("Hello there, Wörld!",)):
        self.says = [Says(x) if isinstance(x, str) else x for x in says]
        self.requests = []
        self.responses = OrderedDict()
        self.admitted = []
        self.raises = None
        self.hold = None  # a threading.Event that answers wait for
        self.running = threading.Semaphore(0)
        self.cancelled = threading.Semaphore(0)
        self.calls = self.refused = 0

    def admit(self, session, key):
        self.admitted.append((session, key))
        if not ((key or "").startswith("sk-") if session is None else session.startswith("s")):
            raise GatewayError(401, "there is no such session", code="invalid_api_key")
        return self

    def begin(self):
        """Begin anew to count requests and calls, from which ids are made."""
        self.requests.clear()
        self.calls = 0

    def refuse(self):
        self.refused += 1

    async def render(self, request):
        if request.prompt is not None:
            return request.prompt
        if request.text is not None:
            return self.tokenizer.encode(request.text)
        plain = [{"role": message["role"], "content": message["content"]} for message in request.messages]
        return self.tokenizer.apply_chat_template(plain)

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
        choices = [self._choice(request, prompt, i) for i in range(request.n)]
        logprobs = top = None
        if request.prompt_logprobs is not None:
            logprobs = -np.arange(prompt.size, dtype=np.float32) / 8
            top = [{65: -0.25, 66: -1.5} for _ in range(prompt.size)]
        name = f"{len(self.requests):024x}"
        return Reply(name, 1700000000, request.model or "policy", prompt, choices, logprobs, top)

    def _choice(self, request, prompt, i):
        says = self.says[(len(self.requests) - 1 + i) % len(self.says)]
        if request.sampling.max_tokens == 0:
            return Choice(Sample(prompt, [], [], "length"), "", "", finish="length", top=[])
        calls = []
        for name, arguments in says.calls:
            calls.append(ToolCall(name, arguments, f"call{self.calls:05d}"))
            self.calls += 1
        text = says.content if says.reasoning is None else f"<think>{says.reasoning}</think>{says.content}"
        text += "".join(f"<tool_call>{call.name} {call.arguments}</tool_call>" for call in calls)
        tokens = [*text.encode(), *(says.stop or "").encode(), *([257] if not says.length and not says.stop else [])]
        top = None
        if request.top_logprobs is not None:
            top = [{t: -0.125, 33: -2.0} if request.top_logprobs else {} for t in tokens]
        sample = Sample(prompt, tokens, [-0.125] * len(tokens), "length" if says.length else "stop")
        finish = "length" if says.length else "tool_calls" if calls else "stop"
        return Choice(sample, text, says.content, says.reasoning, calls, finish, top)
