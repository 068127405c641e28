"""Where a fake takes the place of the SDK's HTTP transport: three names of private modules, all replaced here.

Clients of other base URLs are not touched. tests/testing/test_faketinker.py says when an SDK has moved the names.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlkit.backends.protocol import Tokenizer
from rlkit.errors import UnsupportedError

if TYPE_CHECKING:
    import httpx

__all__ = ["NAMES", "Fake", "SdkTokenizer", "add", "remove"]

_HOLDER = "tinker.lib.internal_client_holder"
_SAMPLING = "tinker.lib.public_interfaces.sampling_client"
_TRAINING = "tinker.lib.public_interfaces.training_client"
NAMES = (
    (_HOLDER, "AsyncTinker"),
    (_HOLDER, "init_telemetry"),
    (_SAMPLING, "_load_tokenizer_from_model_info"),
    (_TRAINING, "_load_tokenizer_from_model_info"),
)

_lock = threading.Lock()
_live: dict[str, Fake] = {}
_originals: dict[tuple[str, str], Any] = {}


class Fake(Protocol):
    """What takes the transport's place: ``FakeTinker``."""

    base_url: str
    names: tuple[str, ...]
    telemetry: bool
    tokenizer: Tokenizer

    def respond(self, request: httpx.Request) -> Coroutine[None, None, httpx.Response]:
        """Return the answer to a request."""


def add(fake: Fake) -> None:
    """Has clients of the fake's base URL talk to it.

    Raises:
        UnsupportedError: the package tinker is missing or of another shape.
    """
    with _lock:
        if not _live:
            _install()
        _live[fake.base_url] = fake


def remove(fake: Fake) -> None:
    """Unregister a fake; restore the SDK when none are left."""
    with _lock:
        _live.pop(fake.base_url, None)
        if not _live:
            for (module, name), original in _originals.items():
                setattr(importlib.import_module(module), name, original)
            _originals.clear()


class SdkTokenizer:
    """A tokenizer of rlkit in the shape that users of the SDK know: lists of ids."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.eos_token_id = inner.eos_ids[0]
        self.vocab_size = inner.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``; nothing is added."""
        del add_special_tokens
        return [int(x) for x in self.inner.encode(text)]

    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return str(self.inner.decode(np.asarray(tokens, np.int64), skip_special=skip_special_tokens))

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Return the ids of messages in the model's template."""
        variables.pop("tokenize", None)
        ids = self.inner.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **variables)
        return [int(x) for x in ids]


def _install() -> None:
    for module, name in NAMES:
        try:
            _originals[module, name] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            _originals.clear()
            message = f"FakeTinker needs tinker 0.38 or a later one with {module}.{name}: {error}"
            raise UnsupportedError(message) from error
    replacements = (_client, _telemetry, _tokenizer, _tokenizer)
    for (module, name), replacement in zip(NAMES, replacements, strict=True):
        setattr(importlib.import_module(module), name, replacement)


def _client(**options: Any) -> Any:
    """``AsyncTinker``, with the fake's transport where the base URL is a fake's."""
    fake = _live.get(str(options.get("base_url")).rstrip("/"))
    if fake is not None:
        httpx = importlib.import_module("httpx")
        transport = httpx.MockTransport(fake.respond)
        options["http_client"] = httpx.AsyncClient(transport=transport, base_url=fake.base_url)
    return _original(_HOLDER, "AsyncTinker")(**options)


def _telemetry(provider: Any, session_id: str | None) -> Any:
    fake = _live.get(getattr(provider, "_base_url", ""))
    if fake is not None and not fake.telemetry:
        return None
    return _original(_HOLDER, "init_telemetry")(provider, session_id)


def _tokenizer(model_name: str, tokenizer_id: str | None = None) -> Any:
    for fake in list(_live.values()):
        if model_name in fake.names:
            return SdkTokenizer(fake.tokenizer)
    return _original(_SAMPLING, "_load_tokenizer_from_model_info")(model_name, tokenizer_id)


def _original(module: str, name: str) -> Any:
    original = _originals.get((module, name))
    return original if original is not None else getattr(importlib.import_module(module), name)
