"""One episode of an agent: its requests, the samples, and the trajectories made of them."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs
import numpy as np

from rlkit import _check
from rlkit._interaction import Message
from rlkit._runtime import Resource
from rlkit.backends.protocol import Sampler, Tokenizer
from rlkit.errors import DataError
from rlkit.gateway import _history
from rlkit.gateway._history import Branch, Credit, Node, Prompt, Recording
from rlkit.gateway._limits import Limits, Meter
from rlkit.gateway._turns import add_scores, params_for, read, seed_for, stops
from rlkit.gateway.types import Choice, GatewayError, Reply, Request
from rlkit.trajectory import Trajectory
from rlkit.types import Sample, SamplingParams

if TYPE_CHECKING:
    import httpx

    from rlkit.gateway._gateway import Gateway

__all__ = ["Ask", "Session", "check_settings"]

Ask: TypeAlias = Callable[[np.ndarray, SamplingParams, int, int], Awaitable[Sequence[Sample]]]
"""(prompt int64 [P], how to draw, completions, seed) -> the samples."""
_log = logging.getLogger(__name__)


def check_settings(where: str, params: object, limits: object) -> None:
    """Raise ConfigError for settings of a wrong type."""
    expected = "rlkit.SamplingParams(...)"
    _check.require(params is None or isinstance(params, SamplingParams), f"{where}(params)", params, expected)
    _check.require(limits is None or isinstance(limits, Limits), f"{where}(limits)", limits, "gateway.Limits(...)")


class Session(Resource):
    """One episode. Made by ``Gateway.session``.

    Calls may come at the same time, from any thread and any event loop. Each completion becomes a turn; turns whose
    prompts continue each other are a branch.

    Attributes:
        id: its id in the URL.
        api_key: identifies the session where the URL does not.
        params: how turns are drawn, whatever clients ask; None: as they ask.
        limits: its limits.
        formats: how requests for JSON are handled.
        error: the sampler's first exception, or None.
        cut: the newest turn was cut at its number of tokens, and clients fail at that: those of the responses API, and
            those that read JSON.
    """

    def __init__(
        self,
        gateway: Gateway,
        sampler: Sampler,
        ask: Ask | None = None,
        *,
        params: SamplingParams | None = None,
        limits: Limits | None = None,
        seed: int = 0,
        formats: Literal["free", "refuse"] = "free",
        record: bool = True,
    ) -> None:
        self._gateway = gateway
        self._sampler = sampler
        self._asked = ask
        self.id = secrets.token_hex(12)
        self.api_key = f"rlkit-{secrets.token_hex(16)}"
        self._seed = _check.integer("session(seed)", seed, low=0)
        check_settings("session", params, limits)
        _check.require(ask is None or callable(ask), "session(ask)", ask, "an async function")
        self.params = params
        self.formats = _check.choice("session(formats)", formats, ("free", "refuse"))
        self.limits = Limits() if limits is None else limits
        self.error: Exception | None = None
        self.cut = False
        self._meter = Meter(self.limits)
        self._recording = Recording()
        self._record = record
        self._responses: dict[str, Sequence[Message]] = {}

    # What a client needs to be told.

    @property
    def model(self) -> str:
        """The policy's name."""
        return self._gateway.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's."""
        return self._sampler.tokenizer

    @property
    def max_length(self) -> int:
        """The longest prompt and completion, in tokens."""
        return self._sampler.max_length

    @property
    def responses(self) -> MutableMapping[str, Sequence[Message]] | None:
        """Of the responses API, by id, the conversation that ends with each; None if they are not recorded."""
        return self._responses if self._record else None

    @property
    def root_url(self) -> str:
        """The base URL of the session's endpoints, without ``/v1``; the first use opens the gateway's socket."""
        return f"{self._gateway.url}/s/{self.id}"

    @property
    def base_url(self) -> str:
        """The base URL with ``/v1``, as clients of OpenAI's API expect it."""
        return f"{self.root_url}/v1"

    def environment(self) -> dict[str, str]:
        """Return the environment variables from which agents read their model's address."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.root_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "RLKIT_MODEL": self.model,
        }

    def client(self, package: Literal["httpx", "httpx2"] = "httpx") -> httpx.AsyncClient:
        """Return a client that reaches the session without a socket; SDKs take it as ``http_client``.

        Args:
            package: the package of the ``AsyncClient``; each SDK documents which one it takes.
        """
        return self._gateway.client(self.id, self.api_key, package)

    # What was sampled.

    @property
    def ended(self) -> str:
        """The limit that was reached: "max_turns", "max_total_tokens", "deadline" or "context"; "" while none was."""
        return self._meter.ended

    @property
    def metrics(self) -> Mapping[str, float]:
        """Counts: requests, turns, tokens, branches, and those of failures.

        refused: by a limit, or not valid; cancelled: the client went away; errors: of the sampler; rewritten: a
        conversation that had turns of the policy, none of them as they were recorded, and began anew; unforced: a turn
        without a required call, or that is not the requested JSON.
        """
        return {**self._meter.counts, "branches": len(self.branches)}

    @property
    def turns(self) -> list[Node]:
        """The turns, in the order in which they ended."""
        return self._recording.nodes

    @property
    def branches(self) -> list[Branch]:
        """The branches, in the order of their last turns."""
        return self._recording.branches

    def trajectory(self, reward: float = 0.0, *, credit: Credit = "every", **fields: object) -> Trajectory:
        """Return the whole session as one trajectory.

        Every turn that counts is in it once, branch after branch, so ``datums(..., split="allow")`` makes a datum of
        each branch, and the turns that branches share are in the first of them.

        Args:
            reward: of the episode; the last turn has it.
            credit: "every" branch, the "last" one, or a function from branches to weights, one number >= 0 for each,
                which become the turns' ``weight``; turns of branches with weight 0 alone are left out.
            fields: of ``Trajectory``; ``messages`` are those of the branch that ended last.

        Raises:
            ConfigError: ``credit`` is none of these.

        >>> import asyncio, rlkit
        >>> from rlkit.gateway import Gateway, Request
        >>> with Gateway(rlkit.connect("toy", seed=0).sampler().result()) as gateway, gateway.session() as session:
        ...     for question in ("1 + 1?", "2 + 2?"):
        ...         _ = asyncio.run(session.answer(Request(messages=[{"role": "user", "content": question}])))
        ...     len(session.trajectory(1.0).turns), len(session.trajectory(1.0, credit="last").turns)
        (2, 1)
        """
        branches, weights = self._weigh(credit)
        messages = max(branches, key=lambda branch: branch.last.number).messages if branches else []
        nodes = [node for branch in branches for node in branch.fresh]
        about = {**self._ends(), "messages": messages, **fields}
        return Trajectory(_history.turns(nodes, weights, reward), **about)  # type: ignore[arg-type]

    def trajectories(self, reward: float = 0.0, *, credit: Credit = "every", **fields: object) -> list[Trajectory]:
        """Return a trajectory for each branch that counts, each with the reward.

        A turn that several branches share is in the first of them; the others have its tokens in their prompts.

        Args:
            reward, credit, fields: as for ``trajectory``.
        """
        branches, weights = self._weigh(credit)
        made = []
        for branch in branches:
            about = {**self._ends(), "messages": branch.messages, **fields}
            if turns := _history.turns(branch.fresh, weights, reward):
                made.append(Trajectory(turns, **about))  # type: ignore[arg-type]
        return made

    def _weigh(self, credit: Credit) -> tuple[list[Branch], dict[int, float]]:
        branches = self.branches
        return branches, _history.node_weights(branches, _history.branch_weights(branches, credit))

    def _ends(self) -> dict[str, object]:
        return {"terminated": not self.ended, "truncated": bool(self.ended), "ended": self.ended or "terminated"}

    # Answering.

    async def answer(self, request: Request) -> Reply:
        """Sample the completions of a request, and record them.

        Raises:
            GatewayError: a limit (429), a prompt that is too long or that the policy cannot take (400), or the
                sampler's failure (503).
        """
        try:
            with self._meter.request(request.n):
                return await self._answered(request)
        except asyncio.CancelledError:
            self._meter.count("cancelled")
            raise
        except DataError as error:  # of the prompt, which is the client's
            self._meter.count("refused")
            raise GatewayError(400, str(error)) from error
        except GatewayError as error:
            if error.status != 429:  # those are counted already
                self._meter.count("errors" if error.status >= 500 else "refused")
            raise

    async def render(self, request: Request) -> np.ndarray:
        """Return the prompt int64 [P] that ``answer`` would sample from; nothing is recorded.

        Raises:
            GatewayError: 400, messages that the policy cannot take.
        """
        try:
            self._check_count(request)
            chat = self._gateway.chat_with(request.template)
            return await asyncio.to_thread(self._recording.render, chat, request)
        except DataError as error:
            raise GatewayError(400, str(error)) from error

    def _check_count(self, request: Request) -> None:
        """Refuse prompts that are too long in any template before rendering, which cannot be interrupted."""
        if len(request.messages or ()) > self.max_length:
            raise self._too_long(f"there are {len(request.messages or ())} messages")

    def _check_format(self, field: str) -> None:
        if self.formats == "refuse":
            what = f"{field}: the gateway does not constrain samples to a format, so this session refuses the request"
            raise GatewayError(400, what, param=field)
        _say_that_formats_are_free(field)

    def _too_long(self, found: str) -> GatewayError:
        self._meter.reach("context")
        what = f"this model's maximum context length is {self.max_length} tokens, but {found}"
        return GatewayError(400, what, param="messages", code="context_length_exceeded")

    async def _answered(self, request: Request) -> Reply:
        self._check_count(request)
        if request.draw.json_field:
            self._check_format(request.draw.json_field)
        chat = self._gateway.chat_with(request.template)
        prompt = await asyncio.to_thread(self._recording.prompt, chat, request)  # a template takes its time
        if prompt.rewritten:
            self._meter.count("rewritten")
        created, model = int(time.time()), request.model or self.model
        if request.draw.max_tokens == 0:
            samples: Sequence[Sample] = [Sample(prompt.tokens, [], [], "length")] * request.n
        else:
            samples = await self._sampled(request, prompt)
        choices = await asyncio.to_thread(self._recorded, request, prompt, samples)
        fails = request.fails_when_cut or bool(request.draw.json_field)
        self.cut = fails and any(choice.finish == "length" for choice in choices)
        reply_id = hashlib.blake2b(f"{self.id}/{prompt.place}".encode(), digest_size=12).hexdigest()
        reply = Reply(reply_id, created, model, prompt.tokens, choices)
        return await add_scores(self._sampler, request, reply)

    async def _sampled(self, request: Request, prompt: Prompt) -> Sequence[Sample]:
        context, size = self.max_length, prompt.tokens.size
        if size >= context:
            raise self._too_long(f"the prompt has {size}")
        seed = request.draw.seed if self.params is None else None
        seed = seed_for(self._seed, prompt.digest, prompt.repeat) if seed is None else seed
        wanted = params_for(prompt.chat, request.draw, self.params, context - size)
        left = self._meter.left()
        try:
            async with asyncio.timeout(None if left == float("inf") else left):
                async with self._meter.tokens(request.n, wanted.max_tokens) as share:
                    params = attrs.evolve(wanted, max_tokens=share)
                    samples = await self._ask(prompt.tokens, params, request.n, seed)
                    self._count(samples, cut=share < wanted.max_tokens)
                    return samples
        except (DataError, GatewayError):
            raise
        except Exception as error:
            if self._meter.left() == 0.0:
                self._meter.reach("deadline")
                raise GatewayError(429, self._meter.over, code="limit_reached") from error
            self.error = self.error or error
            what = f"the policy cannot be sampled ({type(error).__name__})"
            raise GatewayError(503, what, code="sampler") from error

    def _count(self, samples: Sequence[Sample], *, cut: bool) -> None:
        """Count completions; ``cut``: they might have been longer without the session's limit."""
        if self._record:
            for sample in samples:
                self._meter.turn(int(sample.tokens.size))
        if cut and any(sample.stop_reason == "length" for sample in samples):
            self._meter.reach("max_total_tokens")

    def refused(self) -> None:
        """Count a request that was not valid, and so was not answered."""
        self._meter.count("requests")
        self._meter.count("refused")

    async def _ask(self, prompt: np.ndarray, params: SamplingParams, n: int, seed: int) -> Sequence[Sample]:
        if self._asked is not None:
            return await self._asked(prompt, params, n, seed)
        future = await asyncio.to_thread(self._sampler.sample, prompt, params, n=n, seed=seed)
        try:
            return await future
        except asyncio.CancelledError:
            future.cancel()  # no one waits for it any more; tell the service
            raise

    def _recorded(self, request: Request, prompt: Prompt, samples: Sequence[Sample]) -> list[Choice]:
        tools = () if request.tool_choice == "none" else request.tools
        stop = stops(request.draw, self.params) or ()
        choices = []
        for i, sample in enumerate(samples):
            choice, action = read(prompt.chat, sample, tools, stop, f"{self.id}/{prompt.place}/{i}")
            choices.append(choice)
            no_call = not choice.calls and tools and request.tool_choice != "auto"
            no_json = not choice.calls and request.draw.json_field and not _is_json(choice.content)
            if no_call or no_json:
                self._meter.count("unforced")
            if self._record and request.draw.max_tokens != 0:
                self._recording.add(request, prompt, choice, action)
        return choices

    def use(self, sampler: Sampler) -> None:
        """Sample from another policy from now on."""
        self._sampler = sampler

    def close(self) -> None:
        """End the session: later requests are refused. Its samples stay."""
        self._meter.close()
        self._gateway.forget(self.id, self.api_key)


@functools.cache
def _say_that_formats_are_free(field: str) -> None:
    """Log how requests for JSON are handled, once per process."""
    what = "turns that are not JSON reach the client; metrics['unforced'] of their session counts them"
    _log.warning("a client asks for JSON (%s), but the gateway does not constrain samples to JSON: %s", field, what)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
