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

__all__ = ["Json", "Model", "ServerLost", "VllmClient"]

Json: TypeAlias = Mapping[str, object]

_SHORT = 30.0  # seconds that an answer may take which needs no model
_SHOWN = 600  # characters of a server's refusal
_ADAPTERS = {  # what it says of adapters that it does not load, and what helps
    "No adapter found": "it does not see that folder: give Vllm(folder=) on a file system that both machines have; "
    "vLLM takes adapters by folder alone",
    "max_lora_rank": "start it with a --max-lora-rank of the policy's rank at least, or train a lower rank",
    "LoRA is not enabled": "start it with --enable-lora",
    "target modules": "start it with these modules in --lora-target-modules, or train others",
}


class ServerLost(BackendError):
    """A server cannot be reached, or broke off: whoever knows how may start it again, and ask once more."""


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
            timeout=httpx.Timeout(deadline, connect=_SHORT),
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
            raise BackendError(f"{self.url}/v1/models: no list of models; is it a server of vLLM?")
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

    async def healthy(self, within: float = _SHORT) -> bool:
        """Return whether it answers, and says that it works."""
        try:
            await self._ask("GET", "/health", None, within)
        except BackendError:
            return False
        return True

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def _json(self, method: str, path: str, body: Json | None, within: float) -> Json:
        text = await self._ask(method, path, body, within)
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise BackendError(f"{self.url}{path}: answered with what is no JSON: {text[:100]!r}") from error
        if not isinstance(answer, dict):
            raise BackendError(f"{self.url}{path}: answered {text[:100]!r}; expected a JSON object")
        return answer

    async def _ask(self, method: str, path: str, body: Json | None, within: float) -> str:
        import httpx

        where = f"{self.url}{path}"
        try:
            async with asyncio.timeout(within):
                response = await self._http.request(method, where, json=body)
        except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise BackendTimeout(
                f"{where}: no answer within {within:g} s; the server hangs, or has too much to do"
            ) from (error)
        except httpx.HTTPError as error:
            raise ServerLost(f"{where}: the server cannot be reached: {type(error).__name__}: {error}") from error
        if response.is_success:
            return response.text
        raise _refusal(where, response.status_code, response.text)


def integers(value: object, where: str) -> list[int]:
    """Return a list of token ids that a server sent.

    Raises:
        BackendError: it is none.
    """
    if not isinstance(value, list) or not all(isinstance(x, int) and x >= 0 for x in value):
        raise BackendError(f"{where}: is {str(value)[:100]}; expected token ids")
    return value


def _refusal(where: str, status: int, text: str) -> BackendError | UnsupportedError:
    """Return the error of an answer that is none: in the server's words, which may stand in a JSON object."""
    said = text
    try:
        value = json.loads(text)
        error = value.get("error", value) if isinstance(value, dict) else value
        said = str(error.get("message") or error.get("detail") or error) if isinstance(error, dict) else str(error)
    except ValueError:
        pass
    said = said[:_SHOWN] or "without a word"
    if status in (404, 405) and ("no such endpoint" in said or said in ("Not Found", "Method Not Allowed")):
        return UnsupportedError(
            f"{where}: the server has no such endpoint; start it with --enable-scale-out and, for adapters, with "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
        )
    if status in (502, 503, 504) or (status == 500 and "Engine" in said):  # vLLM's EngineCore died under its server
        return ServerLost(f"{where}: answered with status {status}: {said}")
    return BackendError(f"{where}: refused with status {status}: {said}")
