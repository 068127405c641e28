"""``VllmClient``: vLLM's ``/v1/completions`` with token ids in and token ids out, which the gateway serves too."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

import attrs
import numpy as np

from rlkit import _check
from rlkit._check import HIGHEST
from rlkit._runtime import missing
from rlkit.backends.protocol import Tokenizer
from rlkit.errors import BackendError, BackendTimeout, ConfigError, RlkitError, UnsupportedError
from rlkit.types import Sample, SamplingParams

if TYPE_CHECKING:
    import httpx

__all__ = [
    "Json",
    "Model",
    "ModelMissing",
    "ServerLost",
    "VllmClient",
    "check_key",
    "check_url",
    "read_samples",
    "read_scores",
    "sample_request",
    "score_request",
    "server_seed",
    "submit",
]

T = TypeVar("T")
Json: TypeAlias = Mapping[str, object]

_HOTTEST = 2.0
_COLDEST = 0.01  # vLLM takes a lower temperature for this one
_TEXTS = ("Hello, world! 12345 + 67.89 = ?\n\tdef f(x):\n        return x\n", "Übergröße, naïve café 你好世界")


def server_seed(seed: int) -> int:
    """Return the number that a server's generator starts from.

    vLLM gives sample i of a request the seed + i, so that requests with seeds 1 and 2 would have all samples but one
    in common; these numbers are far apart.
    """
    word = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
    return word >> 2  # and below 2**63 with every i


def sample_request(
    prompt: np.ndarray, params: SamplingParams, n: int, seed: int, max_tokens: int, tokenizer: Tokenizer
) -> dict[str, object]:
    """Return the body of a request for completions, without the model.

    Args:
        prompt: int64 [P].
        params: how they are drawn.
        n: how many.
        seed: of the request.
        max_tokens: that fit.
        tokenizer: for the end tokens.

    Raises:
        UnsupportedError: vLLM would sample otherwise than the params say.
    """
    if 0 < params.temperature < _COLDEST:
        raise UnsupportedError(f"sample(params): temperature={params.temperature}: vLLM supports 0 and >= {_COLDEST}")
    if params.temperature > _HOTTEST:
        raise UnsupportedError(f"sample(params): temperature={params.temperature}: vLLM supports at most {_HOTTEST:g}")
    body: dict[str, object] = {
        "prompt": prompt.tolist(),
        "n": n,
        "seed": server_seed(seed),
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logprobs": 0,  # of the sampled tokens, and no alternatives
        "return_token_ids": True,
        "skip_special_tokens": False,  # stop texts may have them
        "ignore_eos": params.stop == (),
    }
    if params.truncates:
        body |= {"top_p": params.top_p, "top_k": max(params.top_k, 0), "min_p": params.min_p}
    if params.stop != ():
        ids = [x for x in params.stop or () if isinstance(x, int)]
        body["stop_token_ids"] = list(dict.fromkeys([*ids, *tokenizer.eos_ids]))
        body["stop"] = [x for x in params.stop or () if isinstance(x, str)]
    return body


def score_request(tokens: np.ndarray, top: int) -> dict[str, object]:
    """Return the body of a request for the logprobs of ``tokens`` [T] themselves, and of the ``top`` best."""
    how = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}  # one token is always sampled
    return {"prompt": tokens.tolist(), **how}


def read_samples(
    answer: Json, where: str, prompt: np.ndarray, params: SamplingParams, n: int, version: int, vocab_size: int
) -> list[Sample]:
    """Return the completions that an answer holds.

    Raises:
        BackendError: it is not the answer to such a request.
    """
    choices = _read_choices(answer, where, n)
    samples: list[Sample | None] = [None] * n
    for choice in choices:
        index, reason = choice.get("index"), choice.get("finish_reason")
        tokens = _read_ids(choice.get("token_ids"), f"{where}: token_ids")
        if max(tokens, default=0) >= vocab_size:
            raise BackendError(f"{where}: token {max(tokens)} of another model; the tokenizer has {vocab_size} tokens")
        if not 0 < len(tokens) <= params.max_tokens:
            raise BackendError(f"{where}: a completion of {len(tokens)} tokens; expected 1 to {params.max_tokens}")
        listed = choice.get("logprobs")
        values = listed.get("token_logprobs") if isinstance(listed, Mapping) else None
        logprobs = [_read_logprob(value, where) for value in values] if isinstance(values, list) else []
        if not isinstance(index, int) or not 0 <= index < n or len(logprobs) != len(tokens):
            raise BackendError(f"{where}: choice {index!r} has {len(tokens)} tokens and {len(logprobs)} logprobs")
        if reason not in ("stop", "length"):
            raise BackendError(f"{where}: a completion has the finish reason {reason!r}; expected 'stop' or 'length'")
        samples[index] = Sample(prompt, tokens, logprobs, reason, **params.sampling_options, version=version)
    if any(sample is None for sample in samples):
        raise BackendError(f"{where}: two choices have the same index")
    return cast("list[Sample]", samples)


def read_scores(answer: Json, where: str, tokens: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logprobs float32 [T] of the tokens themselves, and ids int64 and logprobs float32 [T, top] of the best.

    Raises:
        BackendError: it is not the answer to such a request.
    """
    (choice,) = _read_choices(answer, where, 1)
    rows = choice.get("prompt_logprobs")
    if not isinstance(rows, list) or len(rows) != tokens.size:
        raise BackendError(f"{where}: prompt_logprobs do not cover each of {tokens.size} tokens")
    logprobs, ids = np.zeros(tokens.size, np.float32), np.zeros((tokens.size, top), np.int64)
    best = np.zeros((tokens.size, top), np.float32)
    for i, row in enumerate(rows[1:], 1):
        if not isinstance(row, Mapping) or not all(isinstance(entry, Mapping) for entry in row.values()):
            raise BackendError(f"{where}: prompt_logprobs[{i}] is {str(row)[:100]}; expected token ids with logprobs")
        found = {token: _read_logprob(entry.get("logprob"), where) for token, entry in row.items()}
        if not all(token.isdecimal() for token in found):
            raise BackendError(f"{where}: prompt_logprobs[{i}] is {str(row)[:100]}; expected token ids with logprobs")
        if str(tokens[i]) not in found:
            raise BackendError(f"{where}: prompt_logprobs[{i}] lacks token {tokens[i]} of the prompt")
        logprobs[i] = found[str(tokens[i])]
        ranked = sorted(((value, int(token)) for token, value in found.items()), key=lambda x: -x[0])
        if len(ranked) < top:
            raise BackendError(f"{where}: prompt_logprobs[{i}] has {len(ranked)} alternatives; expected {top}")
        for k, (value, token) in enumerate(ranked[:top]):
            best[i, k], ids[i, k] = value, token
    return logprobs, ids, best


def _read_choices(answer: Json, where: str, n: int) -> list[Json]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != n:
        raise BackendError(f"{where}: {len(choices) if isinstance(choices, list) else 'no'} choices; expected {n}")
    if not all(isinstance(choice, Mapping) for choice in choices):
        raise BackendError(f"{where}: choices are {str(choices)[:100]}; expected objects")
    return choices


def _read_ids(value: object, where: str) -> list[int]:
    if not isinstance(value, list) or not all(type(x) is int and x >= 0 for x in value):
        raise BackendError(f"{where}: is {str(value)[:100]}; expected token ids")
    return value


def _read_logprob(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e30 < value <= HIGHEST:
        what = f"{str(value)[:100]} is not a logprob, which is a number of at most 0"
        raise BackendError(f"{where}: {what}; start the server with --logprobs-mode processed_logprobs")
    return min(float(value), 0.0)


_SHORT = 30.0  # seconds that an answer may take which needs no model
_LOADS = 300.0  # and that an adapter may take
_SHOWN = 600  # characters of a server's refusal
_JSON = ("/v1/completions", "/v1/models")  # what answers with an object
_KIND = "expected vLLM >= 0.10.2, or, to sample without training, `rlkit serve --openai`"


class ServerLost(BackendError):
    """A server cannot be reached, or broke off: another one may be asked, or this one again."""


class ModelMissing(BackendError):
    """A server does not have that model, or adapter: it may have been started again."""


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, in a thread of its own, in which all requests of this process wait."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rlkit-vllm", daemon=True).start()
    return loop


_opening = threading.RLock()  # one loop, whichever thread asks first


def submit(work: Coroutine[object, object, T]) -> concurrent.futures.Future[T]:
    """Run requests in the loop of all clients; cancelling the future cancels them."""
    with _opening:
        loop = _event_loop()
    return asyncio.run_coroutine_threadsafe(work, loop)


def _after_fork() -> None:
    global _opening  # noqa: PLW0603  # somebody may have held it
    _opening = threading.RLock()
    _event_loop.cache_clear()  # a child has no such thread


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@attrs.frozen
class Model:
    """What a server can be asked for: the base model, or one of its adapters.

    Attributes:
        name: what requests call it.
        max_length: tokens at most of a prompt and its completion; None: the server does not say.
        parent: of an adapter, the name of its base model.
        root: the folder or hub id that it was read from, as the server says.
        least: tokens that a request has to draw at least: vLLM refuses 0, a gateway's session records what is drawn.
    """

    name: str
    max_length: int | None
    parent: str | None
    root: str | None = None
    least: int = 1

    @classmethod
    def read(cls, card: Json) -> Model:
        """Return the model of a server's card; what has another type than it should counts as not said."""
        length, parent, root = card.get("max_model_len"), card.get("parent"), card.get("root")
        parent, root = (text if isinstance(text, str) else None for text in (parent, root))
        known = length if type(length) is int and length > 0 else None
        return cls(str(card.get("id")), known, parent, root, least=int(card.get("owned_by") != "rlkit"))

    def lengths(self, limit: int) -> tuple[int, int]:
        """Return the most tokens of a sample and of a text that is scored, after which one token is sampled."""
        most = self.max_length or limit + 1
        return min(limit, most), min(limit, most - 1)


class VllmClient:
    """Asks one server. Its coroutines run in the event loop of ``submit``; connections are kept between requests.

    Args:
        url: where the server listens, without "/v1"; a gateway's session is named by its URL, too.
        key: its API key.
        deadline: seconds that the answer to a request may take.

    Attributes:
        breaks: how often a connection broke off: there may be another process since.

    Raises:
        MissingPackageError: httpx is not installed.
    """

    breaks = 0

    def __init__(self, url: str, *, key: str | None = None, deadline: float = 1800.0) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise missing("a request to a vLLM server", "httpx", "vllm") from error
        self._root = url.rstrip("/").removesuffix("/v1")
        self.url = re.sub("//[^/@]*@", "//", self._root)  # without a password, for messages
        self._deadline = deadline
        self._http: httpx.AsyncClient | None = httpx.AsyncClient(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,  # no proxy in between
        )
        self._running: set[asyncio.Task[object] | None] = set()
        self._process = os.getpid()

    async def generate(self, body: Json) -> Json:
        """Return what the server answers to ``POST /v1/completions``. Cancelled, the request is ended there.

        Raises:
            ModelMissing: it has no such model.
        """
        return await self._ask("POST", "/v1/completions", body)

    async def models(self) -> list[Model]:
        """Return what it serves."""
        cards = (await self._ask("GET", "/v1/models", within=_SHORT)).get("data")
        if not isinstance(cards, Sequence) or not all(isinstance(card, Mapping) for card in cards):
            raise BackendError(f"{self.url}/v1/models: no list of models; {_KIND}")
        return [Model.read(card) for card in cast("Sequence[Json]", cards)]

    async def find_model(self, name: str | None) -> Model:
        """Return the model of that name, or the first that is not an adapter.

        Raises:
            ConfigError: there is none.
        """
        models = await self.models()
        for model in models:
            if model.name == name or (name is None and model.parent is None):
                base = next((other for other in models if other.name == model.parent), model)
                return attrs.evolve(model, max_length=model.max_length or base.max_length)
        have = ", ".join(model.name for model in models) or "none"
        raise ConfigError(f"{self.url}: has no model {name!r}; it has {have}")

    async def check_tokenizer(self, model: Model, tokenizer: Tokenizer) -> None:
        """Raise unless it makes the tokens of some texts that ``tokenizer`` makes, by a sample of one token each.

        Raises:
            ConfigError: it does not.
            UnsupportedError: it is another kind of server, which does not say the token ids.
        """
        how = {"max_tokens": model.least, "top_k": 1, "add_special_tokens": False, "return_token_ids": True}
        where = f"{self.url}/v1/completions"
        for text in _TEXTS:
            (choice,) = _read_choices(await self.generate({"model": model.name, "prompt": text, **how}), where, 1)
            if choice.get("prompt_token_ids") is None or choice.get("token_ids") is None:
                raise UnsupportedError(f"{where}: answered without token ids; {_KIND}")
            theirs = _read_ids(choice["prompt_token_ids"], f"{where}: prompt_token_ids")
            ours = tokenizer.encode(text).tolist()
            if ours != theirs:
                pairs = enumerate(zip(ours, theirs, strict=False))
                at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
                raise ConfigError(
                    f"{self.url}: it has another tokenizer: in {text!r}, tokens {at}... are {theirs[at : at + 3]} "
                    f"there and {ours[at : at + 3]} here; serve the model that is trained, or set tokenizer= to its own"
                )

    async def load_adapter(self, name: str, folder: str) -> None:
        """Make it load an adapter from a folder that it can read.

        Raises:
            ConfigError: it does not.
        """
        try:
            await self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, _LOADS)
        except (ServerLost, BackendTimeout):
            raise
        except (BackendError, UnsupportedError) as error:
            if name in {
                model.name for model in await self.models()
            }:  # sent twice: a connection broke before the answer
                return
            raise ConfigError(
                f"{error}; a server has to see the folder of adapters (Vllm(folder=) on a shared file system), and to "
                "be started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora, --max-lora-rank of at least the "
                "policy's rank, and the policy's modules in --lora-target-modules"
            ) from error

    async def unload_adapter(self, name: str) -> None:
        """Make it forget an adapter; running requests go on, and one that it does not know is not an error."""
        with contextlib.suppress(BackendError, UnsupportedError):
            await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, within=_SHORT)

    async def check_health(self, within: float = _SHORT) -> None:
        """Raise unless it answers, and says that it works.

        Raises:
            ServerLost: it cannot be reached, or does not work, or not yet.
            BackendTimeout: it is silent.
            BackendError, UnsupportedError: it is something else, or refuses.
        """
        await self._ask("GET", "/health", within=within)

    async def close(self) -> None:
        """Cancel its requests, and close its connections."""
        if os.getpid() != self._process:  # its loop's selector is the parent's, too
            return
        http, self._http = self._http, None
        for task in self._running:
            if task is not None:
                task.cancel()
        if http is not None:
            await http.aclose()

    async def _ask(self, method: str, path: str, body: Json | None = None, within: float | None = None) -> Json:
        """Return the JSON object of an answer; {} where it is empty, or text as that of some endpoints."""
        import httpx

        where, within = f"{self.url}{path}", min(within or self._deadline, self._deadline)
        if self._http is None or os.getpid() != self._process:
            raise BackendError(f"{where}: it is closed, or was opened before this process was forked")
        connect = min(_SHORT, 0.8 * within)  # so that it is known what took so long
        self._running.add(task := asyncio.current_task())
        try:
            async with asyncio.timeout(within):
                limits = httpx.Timeout(within, connect=connect)
                request = partial(self._http.request, method, f"{self._root}{path}", json=body, timeout=limits)
                try:
                    answer = await request()
                except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                    self.breaks += 1  # a connection that was kept may be closed just when it is used
                    answer = await request()
        except httpx.ConnectTimeout as error:
            what = f"{where}: the server cannot be reached: no connection within {connect:g} s"
            raise ServerLost(what) from error
        except (TimeoutError, httpx.TimeoutException) as error:
            what = f"{where}: no answer within {within:g} s; the server hangs or is overloaded"
            raise BackendTimeout(what) from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # the last: of a name that is none
            raise ServerLost(f"{where}: the server cannot be reached: {type(error).__name__}: {error}") from error
        finally:
            self._running.discard(task)
        if not answer.is_success:
            raise _refusal(where, answer.status_code, answer.headers.get("Location") or answer.text)
        try:
            value = answer.json() if answer.content and path in _JSON else {}
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise BackendError(f"{where}: answered {answer.text[:100]!r}; expected a JSON object: {_KIND}")
        return value


def _refusal(where: str, status: int, text: str) -> RlkitError:
    """Return the error of an answer that is none, in the server's own words."""
    what = f"{where}: refused with status {status}: {text[:_SHOWN] or 'no message'}"
    if status == 404 and "does not exist" in text:
        return ModelMissing(what)
    if status in (404, 405):
        return UnsupportedError(f"{what}; {_KIND}")
    if status in (401, 403):
        return BackendError(
            f"{what}; its API key is set by sampler=Vllm(urls=..., key=...), or rlkit.sampler(url, key=...)"
        )
    if status in (502, 503, 504) or (status == 500 and ("Engine" in text or where.endswith("/health"))):
        return ServerLost(what)  # vLLM's EngineCore died under its server, among others
    return BackendError(what)


def check_url(where: str, url: object, expected: str = "a URL") -> None:
    """Check that a URL names a server.

    Raises:
        ConfigError: it does not.

    >>> check_url("connect(sampler)", "https://")
    Traceback (most recent call last):
    rlkit.errors.ConfigError: connect(sampler): got 'https://' (str); expected a URL (such as http://127.0.0.1:8000)
    """
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        good = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, brackets that do not close
        good = False
    plain = isinstance(url, str) and url.isprintable() and not any(char in " ?#" for char in url)
    _check.require(good and plain, where, url, expected, "such as http://127.0.0.1:8000")


def check_key(where: str, key: object) -> None:
    """Check that an API key can be sent. Raises ConfigError: it cannot."""
    good = key is None or (isinstance(key, str) and key.isascii() and key.isprintable() and bool(key.strip()))
    if not good:  # and not shown
        raise ConfigError(where, "it cannot be sent in a header", "a string of printable ASCII characters, or None")
