"""``VllmClient``: vLLM's wire format, tokens in and tokens out, which the gateway serves too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import attrs

from rlkit._lazy import missing
from rlkit.errors import BackendError, BackendTimeout, ConfigError, UnsupportedError

if TYPE_CHECKING:
    import httpx

__all__ = ["Json", "Model", "ServerLost", "Unreachable", "VllmClient"]

Json: TypeAlias = Mapping[str, object]

_SHORT = 30.0  # seconds that an answer may take which needs no model
_SHOWN = 600  # characters of a server's refusal
_KIND = (
    "expected a server that has vLLM's /inference/v1/generate: vLLM >= 0.32 started with --enable-scale-out (and, for "
    "adapters, with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora), or, to sample what is not trained, "
    "`rlkit serve --openai`"
)
_PLAIN = ("/health", "/v1/models", "/tokenize")  # which are there, or not, whatever is asked for
_ADAPTERS = {  # what it says of adapters that it does not load, and what helps
    "No adapter found": "it does not see that folder: give Vllm(folder=) on a file system that both machines have; "
    "vLLM takes adapters by folder alone",
    "max_lora_rank": "start it with a --max-lora-rank of the policy's rank at least, or train a lower rank",
    "LoRA is not enabled": "start it with --enable-lora",
    "target modules": "start it with these modules in --lora-target-modules, or train others",
}


class ServerLost(BackendError):
    """A server cannot be reached, or broke off: whoever knows how may start it again, and ask once more."""


class Unreachable(ServerLost):
    """Nobody listens there, or nobody who speaks HTTP, or its host is not known."""


@attrs.frozen
class Model:
    """What a server can be asked for: the base model, or one of its adapters.

    Attributes:
        name: what requests call it.
        max_length: tokens at most of a prompt and its completion; None: the server does not say.
        parent: of an adapter, the name of its base model.
        root: the folder or hub id that it was read from, as the server says.
    """

    name: str
    max_length: int | None
    parent: str | None
    root: str | None = None


class VllmClient:
    """Asks one server. Its coroutines belong to one event loop; connections are kept between requests.

    Args:
        url: where the server listens, without "/v1"; a gateway's session is named by its URL, too.
        key: its API key.
        deadline: seconds that the answer to a request may take.

    Raises:
        MissingPackageError: httpx is not installed.
    """

    def __init__(self, url: str, *, key: str | None = None, deadline: float = 1800.0) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise missing("asking a server of vLLM", "httpx", "vllm") from error
        self.url = url.rstrip("/").removesuffix("/v1")
        self._deadline = deadline
        self._http: httpx.AsyncClient = httpx.AsyncClient(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,  # no proxy stands between
        )

    async def generate(self, body: Json) -> Json:
        """Return what the server answers to ``POST /inference/v1/generate``. Cancelled, the request is ended there."""
        return await self._json("POST", "/inference/v1/generate", body, self._deadline)

    async def abort(self, request: str) -> None:
        """Have it end a request, which is then answered with what was drawn so far; "" for none.

        Raises:
            UnsupportedError: it has no such endpoint.
        """
        ids = [request] if request else []
        await self._ask("POST", "/inference/v1/abort_requests", {"request_ids": ids}, _SHORT)

    async def models(self) -> list[Model]:
        """Return what it serves."""
        answer = await self._json("GET", "/v1/models", None, _SHORT)
        cards = answer.get("data")
        if not isinstance(cards, Sequence) or not all(isinstance(card, Mapping) for card in cards):
            raise BackendError(f"{self.url}/v1/models: no list of models; {_KIND}")
        models = []
        for card in cast("Sequence[Json]", cards):
            length, parent, root = card.get("max_model_len"), card.get("parent"), card.get("root")
            models.append(
                Model(
                    str(card.get("id")),
                    length if isinstance(length, int) else None,
                    parent if isinstance(parent, str) else None,
                    root if isinstance(root, str) else None,
                )
            )
        return models

    async def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, without those that a tokenizer would add."""
        answer = await self._json("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}, _SHORT)
        return integers(answer.get("tokens"), f"{self.url}/tokenize: tokens")

    async def load_adapter(self, name: str, folder: str) -> None:
        """Have it load an adapter from a folder that it can read.

        Raises:
            ConfigError: it cannot read it, or was started for other adapters or none.
            BackendError: as for all requests.
        """
        try:
            await self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, self._deadline)
        except ServerLost:
            raise
        except BackendError as error:
            for words, remedy in _ADAPTERS.items():
                if words in str(error):
                    raise ConfigError(f"{error}; {remedy}") from error
            raise

    async def unload_adapter(self, name: str) -> None:
        """Have it forget an adapter; requests that run go on."""
        await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, _SHORT)

    async def check_health(self, within: float = _SHORT) -> None:
        """Raise unless it answers, and says that it works.

        Raises:
            Unreachable: it cannot be asked.
            ServerLost: it says that it does not work, or not yet.
            BackendTimeout: it is silent.
            BackendError, UnsupportedError: it is something else, or refuses.
        """
        await self._ask("GET", "/health", None, within)

    async def check_kind(self, model: str) -> None:
        """Have it sample one token, which vLLM and the gateway do by tokens alone.

        Raises:
            UnsupportedError: it is another kind of server.
        """
        how = {"max_tokens": 1, "top_k": 1}
        answer = await self.generate({"model": model, "token_ids": [0], "sampling_params": how})
        choices = answer.get("choices")
        if not (isinstance(choices, list) and choices and isinstance(choices[0], dict) and "token_ids" in choices[0]):
            raise UnsupportedError(f"{self.url}/inference/v1/generate: answered without token ids; {_KIND}")

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def _json(self, method: str, path: str, body: Json | None, within: float) -> Json:
        text = await self._ask(method, path, body, within)
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise BackendError(f"{self.url}{path}: answered with what is no JSON: {text[:100]!r}; {_KIND}") from error
        if not isinstance(answer, dict):
            raise BackendError(f"{self.url}{path}: answered {text[:100]!r}; expected a JSON object")
        return answer

    async def _ask(self, method: str, path: str, body: Json | None, within: float) -> str:
        import httpx

        where = f"{self.url}{path}"
        connect = min(_SHORT, 0.8 * within)  # so that it is known what took so long
        limits = httpx.Timeout(within, connect=connect)
        try:
            async with asyncio.timeout(within):
                response = await self._http.request(method, where, json=body, timeout=limits)
        except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout) as error:
            what = f"{where}: no answer within {within:g} s; the server hangs, or has too much to do"
            raise BackendTimeout(what) from error
        except httpx.ConnectTimeout as error:
            what = f"{where}: the server cannot be reached: no connection within {connect:g} s"
            raise Unreachable(what) from error
        except (httpx.ConnectError, httpx.ProtocolError, httpx.ReadError) as error:
            raise Unreachable(f"{where}: the server cannot be reached: {_reason(error)}") from error
        except httpx.HTTPError as error:
            raise ServerLost(f"{where}: the server cannot be reached: {type(error).__name__}: {error}") from error
        if response.is_success:
            return response.text
        if response.is_redirect:
            target = response.headers.get("Location")
            raise BackendError(f"{where}: redirects to {target}; give the URL of the server itself")
        raise _refusal(where, path, response.status_code, response.text)


def integers(value: object, where: str) -> list[int]:
    """Return a list of token ids that a server sent.

    Raises:
        BackendError: it is none.
    """
    if not isinstance(value, list) or not all(isinstance(x, int) and x >= 0 for x in value):
        raise BackendError(f"{where}: is {str(value)[:100]}; expected token ids")
    return value


def _reason(error: BaseException) -> str:
    """Return why there is no connection, in the system's words, which stand at the end of the chain of errors."""
    name, last = type(error).__name__, error
    while (earlier := last.__cause__ or last.__context__) is not None:
        last = earlier
    if isinstance(last, BaseExceptionGroup):  # of a host with several addresses
        last = last.exceptions[0]
    said = last.strerror if isinstance(last, OSError) and last.strerror else str(last)
    if isinstance(last, ConnectionRefusedError):
        said = "connection refused: nobody listens there"
    return f"{name}: {said}"


def _refusal(where: str, path: str, status: int, text: str) -> BackendError | UnsupportedError:
    """Return the error of an answer that is none: in the server's words, which may stand in a JSON object."""
    said = text
    try:
        value = json.loads(text)
        error = value.get("error", value) if isinstance(value, dict) else value
        said = str(error.get("message") or error.get("detail") or error) if isinstance(error, dict) else str(error)
    except ValueError:
        pass
    said = said[:_SHOWN] or "without a word"
    lacks = path in _PLAIN or (path == "/inference/v1/generate" and "does not exist" not in said)
    lacks = lacks or "no such endpoint" in said or said in ("Not Found", "Method Not Allowed")
    if (status in (404, 405) and lacks) or (status == 403 and "--enable-scale-out" in said):  # it has it, turned off
        return UnsupportedError(f"{where}: the server has no such endpoint (status {status}: {said[:100]}); {_KIND}")
    if status in (401, 403):
        remedy = "where it wants an API key, give that: sampler=Vllm(urls=..., key=...), or rlkit.sampler(url, key=...)"
        return BackendError(f"{where}: refused with status {status}: {said}; {remedy}")
    # vLLM's EngineCore died under its server
    if status in (502, 503, 504) or (status == 500 and ("Engine" in said or path == "/health")):
        return ServerLost(f"{where}: answered with status {status}: {said}")
    return BackendError(f"{where}: refused with status {status}: {said}")
