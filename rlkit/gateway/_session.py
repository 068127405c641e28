"""One episode of an agent: its requests, the samples, and the trajectories made of them."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import attrs
import numpy as np

from rlkit import _check
from rlkit._interaction import Message
from rlkit._runtime import Resource
from rlkit.backends.protocol import Sampler, Tokenizer
from rlkit.chat import Chat
from rlkit.errors import BackendError, DataError, UnsupportedError
from rlkit.futures import Future
from rlkit.gateway._choices import read_choice
from rlkit.gateway._limits import Limits, Usage
from rlkit.gateway._logprobs import add_logprobs
from rlkit.gateway._recording import Branch, Credit, Node, Prompt, Recording, make_turns, weigh_nodes
from rlkit.gateway._types import Choice, GatewayError, Reply, Request, Sampling
from rlkit.trajectory import Trajectory, Turn
from rlkit.types import SAMPLING_OPTIONS, Sample, SamplingParams

if TYPE_CHECKING:
    import httpx

    from rlkit.gateway._gateway import Gateway

__all__ = ["SampleFunction", "Session", "check_settings"]

SampleFunction: TypeAlias = Callable[[np.ndarray, SamplingParams, int, int], Awaitable[Sequence[Sample]]]
"""(prompt int64 [P], how to draw, completions, seed) -> the samples."""
_log = logging.getLogger(__name__)
_SEEDS = 2**31 - 2**16  # below it every backend takes a seed as it is


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
        responses: of the responses API, by id, the conversation that ends with each; None if they are not recorded.
        error: the sampler's first exception, or None.
        cut: the newest turn was cut at its number of tokens, and clients fail at that: those of the responses API, and
            those that read JSON.
    """

    def __init__(
        self,
        gateway: Gateway,
        sampler: Sampler,
        ask: SampleFunction | None = None,
        *,
        params: SamplingParams | None = None,
        limits: Limits | None = None,
        seed: int = 0,
        record: bool = True,
    ) -> None:
        self._gateway, self._sampler, self._given = gateway, sampler, ask
        self.id = secrets.token_hex(12)
        self.api_key = f"rlkit-{secrets.token_hex(16)}"
        self._seed = _check.integer("session(seed)", seed, low=0)
        check_settings("session", params, limits)
        _check.require(ask is None or callable(ask), "session(ask)", ask, "an async function")
        self.params = params
        self.limits = Limits() if limits is None else limits
        self.error: Exception | None = None
        self.cut = False
        self._usage = Usage(self.limits)
        self._recording = Recording()
        self._record = record
        self.responses: dict[str, Sequence[Message]] | None = {} if record else None

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
        return self._usage.ended

    @property
    def metrics(self) -> Mapping[str, float]:
        """Counts: requests, turns, tokens, branches, and those of failures.

        refused: by a limit, or not valid; cancelled: the client went away; errors: of the sampler; rewritten: a
        conversation that had turns of the policy, none of them as they were recorded, and began anew; unforced: a turn
        without a required call, or that is not the requested JSON.
        """
        return {**self._usage.counts, "branches": len(self.branches)}

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
        branches = self.branches
        messages = max(branches, key=lambda branch: branch.last.number).messages if branches else []
        nodes = [node for branch in branches for node in branch.fresh]
        return self._make(make_turns(nodes, weigh_nodes(branches, credit), reward), messages, fields)

    def trajectories(self, reward: float = 0.0, *, credit: Credit = "every", **fields: object) -> list[Trajectory]:
        """Return a trajectory for each branch that counts, each with the reward.

        A turn that several branches share is in the first of them; the others have its tokens in their prompts.

        Args:
            reward, credit, fields: as for ``trajectory``.
        """
        branches = self.branches
        weights = weigh_nodes(branches, credit)
        turns = [make_turns(branch.fresh, weights, reward) for branch in branches]
        return [self._make(each, branch.messages, fields) for each, branch in zip(turns, branches, strict=True) if each]

    def _make(self, turns: Sequence[Turn], messages: Sequence[Message], fields: Mapping[str, object]) -> Trajectory:
        ends = {"terminated": not self.ended, "truncated": bool(self.ended), "ended": self.ended or "terminated"}
        return Trajectory(turns, **{**ends, "messages": messages, **fields})  # type: ignore[arg-type]

    # Answering.

    async def answer(self, request: Request) -> Reply:
        """Sample the completions of a request, and record them.

        Raises:
            GatewayError: a limit (429), a prompt that is too long or that the policy cannot take (400), or the
                sampler's failure (503).
        """
        try:
            with self._usage.request(request.n):
                return await self._answer(request)
        except asyncio.CancelledError:
            self._usage.count("cancelled")
            raise
        except DataError as error:  # of the prompt, which is the client's
            self._usage.count("refused")
            raise GatewayError(400, str(error)) from error
        except GatewayError as error:
            self._usage.count("errors" if error.status >= 500 else "refused")
            raise

    async def render(self, request: Request) -> np.ndarray:
        """Return the prompt int64 [P] that ``answer`` would sample from; nothing is recorded.

        Raises:
            GatewayError: 400, messages that the policy cannot take.
        """
        try:
            self._check_count(request)
            chat = self._gateway.chat_with(request.template)
            return (await asyncio.to_thread(self._recording.render, chat, request)).tokens
        except DataError as error:
            raise GatewayError(400, str(error)) from error

    def refuse(self) -> None:
        """Count a request that was not valid, and so was not answered."""
        self._usage.count("requests")
        self._usage.count("refused")

    def _check_count(self, request: Request) -> None:
        """Refuse prompts that are too long in any template before rendering, which cannot be interrupted."""
        if len(request.messages or ()) > self.max_length:
            raise self._too_long(f"there are {len(request.messages or ())} messages")

    def _too_long(self, found: str) -> GatewayError:
        self._usage.note_limit("context")
        what = f"this model's maximum context length is {self.max_length} tokens, but {found}"
        return GatewayError(400, what, param="messages", code="context_length_exceeded")

    async def _answer(self, request: Request) -> Reply:
        self._check_count(request)
        if field := request.sampling.json_field:
            _warn_that_formats_are_free(field)
        chat = self._gateway.chat_with(request.template)
        prompt = await asyncio.to_thread(self._recording.prompt, chat, request)  # a template takes its time
        if prompt.rewritten:
            self._usage.count("rewritten")
        created = int(time.time())
        if request.sampling.max_tokens == 0:
            samples: Sequence[Sample] = [Sample(prompt.tokens, [], [], "length")] * request.n
        else:
            samples = await self._draw(request, prompt)
        choices = await asyncio.to_thread(self._record_choices, request, prompt, samples)
        self.cut = (request.fails_when_cut or bool(field)) and any(choice.finish == "length" for choice in choices)
        reply_id = hashlib.blake2b(f"{self.id}/{prompt.place}".encode(), digest_size=12).hexdigest()
        reply = Reply(reply_id, created, request.model or self.model, prompt.tokens, choices)
        return await add_logprobs(self._sampler, request, reply)

    async def _draw(self, request: Request, prompt: Prompt) -> Sequence[Sample]:
        room = self.max_length - prompt.tokens.size
        if room <= 0:
            raise self._too_long(f"the prompt has {prompt.tokens.size}")
        seed = request.sampling.seed if self.params is None else None
        seed = derive_seed(self._seed, prompt.digest, prompt.repeat) if seed is None else seed
        wanted = sampling_params(prompt.chat, request.sampling, self.params, room)
        left = self._usage.seconds_left()
        try:
            async with asyncio.timeout(None if left == float("inf") else left):
                async with self._usage.tokens(request.n, wanted.max_tokens) as share:
                    params = attrs.evolve(wanted, max_tokens=share)
                    ask = self._given or self._ask_sampler
                    samples = await ask(prompt.tokens, params, request.n, seed)
                    if self._given:
                        _check_samples(samples, prompt.tokens, params, request.n, self.tokenizer.vocab_size)
                    self._count(samples, cut=share < wanted.max_tokens)
                    return samples
        except (DataError, GatewayError):
            raise
        except Exception as error:
            if isinstance(error, UnsupportedError) and self.params is None:  # an option that the client asked for
                raise GatewayError(400, str(error)) from error
            if self._usage.seconds_left() == 0.0:
                raise self._usage.late() from error
            self.error = self.error or error
            what = f"the policy cannot be sampled ({type(error).__name__})"
            raise GatewayError(503, what, code="sampler") from error

    def _count(self, samples: Sequence[Sample], *, cut: bool) -> None:
        """Count completions; ``cut``: they might have been longer without the session's limit."""
        if self._record:
            for sample in samples:
                self._usage.count_turn(int(sample.tokens.size))
        if cut and any(sample.stop_reason == "length" for sample in samples):
            self._usage.note_limit("max_total_tokens")

    async def _ask_sampler(self, prompt: np.ndarray, params: SamplingParams, n: int, seed: int) -> Sequence[Sample]:
        submitted, given_up = [], threading.Event()

        def submit() -> Future[list[Sample]]:
            submitted.append(self._sampler.sample(prompt, params, n=n, seed=seed))
            if given_up.is_set():  # in the meantime
                submitted[0].cancel()
            return submitted[0]

        try:
            return await (await asyncio.to_thread(submit))
        except asyncio.CancelledError:
            given_up.set()
            for future in submitted:  # no one waits for it any more; tell the service
                future.cancel()
            raise

    def _record_choices(self, request: Request, prompt: Prompt, samples: Sequence[Sample]) -> list[Choice]:
        tools = () if request.tool_choice == "none" else request.tools
        stop = stop_list(request.sampling, self.params) or ()
        choices = []
        for i, sample in enumerate(samples):
            choice, action = read_choice(prompt.chat, sample, tools, stop, f"{self.id}/{prompt.place}/{i}")
            choices.append(choice)
            no_call = tools and request.tool_choice != "auto"
            no_json = request.sampling.json_field and not _is_json(choice.content)
            if not choice.calls and (no_call or no_json):
                self._usage.count("unforced")
            if self._record and request.sampling.max_tokens != 0:
                self._recording.add(prompt, choice, action)
        return choices

    def use(self, sampler: Sampler) -> None:
        """Sample from another policy from now on."""
        self._sampler = sampler

    def close(self) -> None:
        """End the session: later requests are refused. Its samples stay."""
        self._usage.closed = True
        self._gateway.forget(self)


def _check_samples(samples: object, prompt: np.ndarray, params: SamplingParams, n: int, vocab_size: int) -> None:
    """Raise BackendError unless a user's function gave what a sampler gives."""
    listed = samples if isinstance(samples, Sequence) else ()
    if len(listed) != n or not all(isinstance(each, Sample) for each in listed):
        raise BackendError("session(ask)", f"returned {_check.describe(samples)}", f"{n} samples")
    for i, sample in enumerate(listed):
        if sample.tokens.size > params.max_tokens:
            what = f"sample {i} has {sample.tokens.size} tokens"
            raise BackendError("session(ask)", what, f"at most {params.max_tokens}")
        if not np.array_equal(sample.prompt, prompt):
            raise BackendError(f"session(ask): sample {i} has another prompt than the one that was asked for")
        if sample.tokens.max(initial=0) >= vocab_size:
            what = f"sample {i} has the token {sample.tokens.max()}"
            raise BackendError("session(ask)", what, f"ids below {vocab_size}")


def sampling_params(chat: Chat, asked: Sampling, own: SamplingParams | None, room: int) -> SamplingParams:
    """Return the sampling settings.

    Args:
        chat: of the conversation.
        asked: the client's settings.
        own: the session's settings, which override the client's; None: the client's are used.
        room: the most tokens that fit, >= 1.
    """
    base = own or SamplingParams(max_tokens=2**31 - 1)
    most = min(room, base.max_tokens, room if asked.max_tokens is None else asked.max_tokens)
    names = SAMPLING_OPTIONS if own is None else ()
    given = {name: value for name in names if (value := getattr(asked, name)) is not None}
    return chat.params(attrs.evolve(base, max_tokens=most, stop=stop_list(asked, own), **given))


def stop_list(asked: Sampling, own: SamplingParams | None) -> tuple[str, ...] | tuple[int, ...] | None:
    """Return the stops of a completion: the session's and the client's; None: the end tokens alone."""
    stop = None if own is None else own.stop
    if not asked.stop:
        return () if asked.ignore_eos and stop is None else stop
    if stop and isinstance(stop[0], str) != isinstance(asked.stop[0], str):
        return stop  # texts and ids cannot be mixed; the session's override the client's
    return cast("tuple[str, ...] | tuple[int, ...]", tuple(dict.fromkeys([*(stop or ()), *asked.stop])))


def derive_seed(session_seed: int, digest: bytes, repeat: int) -> int:
    """Return the seed of a request, in [0, 2^31): a function of its content and repeats, not of their order."""
    words = np.frombuffer(digest, "<u4").tolist()
    state = np.random.SeedSequence(session_seed, spawn_key=(*words, repeat)).generate_state(1, np.uint64)
    return int(state[0]) % _SEEDS


@functools.cache
def _warn_that_formats_are_free(field: str) -> None:
    """Log how requests for JSON are handled, once per process."""
    what = "turns that are not JSON reach the client; metrics['unforced'] of their session counts them"
    _log.warning("a client asks for JSON (%s), but the gateway does not constrain samples to JSON: %s", field, what)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
