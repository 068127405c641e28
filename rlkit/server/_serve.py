"""``serve``: any backend as a running server of the Tinker API."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit import _check
from rlkit._runtime import is_loopback
from rlkit._web import WebServer
from rlkit.backends import connect, registry
from rlkit.backends.protocol import TrainerBackend
from rlkit.errors import ConfigError
from rlkit.server._app import Service

__all__ = ["Server", "serve"]

_PATIENCE = 5  # seconds that running requests have when the server closes
_CLIENTS = {"lora", "init_from", "resume_from"}  # options of a backend that each client gives
_ARGUMENTS = {"models", "names", "key", "folder", "tokenizer_id", "config", "dedupe"}  # of Service, no options here


class Server(WebServer):
    """A service that listens. A context manager.

    Attributes:
        service: the service that answers.
        url: its address.
        names: the base models that clients may name.
    """

    def __init__(self, service: Service, host: str, port: int) -> None:
        self.service, self.names = service, service.names
        super().__init__(service.app, host, port, name="serve", patience=_PATIENCE)

    def close(self) -> None:
        """Stop listening, finish accepted requests, and free the models. May be called twice."""
        if not self.connections.closed:
            self.stop()
            self.service.close()
        super().close()


def serve(
    backend: str | Callable[..., TrainerBackend],
    *,
    model: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
    names: Sequence[str] | None = None,
    folder: str | Path | None = None,
    tokenizer_id: str | None = None,
    **options: object,
) -> Server:
    """Start a server of the Tinker API; programs reach it with ``TINKER_BASE_URL=<its url>``.

    Args:
        backend: a name for ``rlkit.connect``, or a function that makes a backend for each client, called with ``lora=``
            and with ``resume_from=`` or ``init_from=``: ``functools.partial(rlkit.connect, ...)``.
        model: with a name: the model to train.
        host: the address to listen on. Any but loopback needs ``key``, and TLS in front of it.
        port: 0 for a free one.
        key: the API key that clients must send, beginning "tml-"; None lets any in.
        names: base models that clients may name; None: ``model`` and the last part of it, or the backend's name, or
            "model".
        folder: where the list of saved states is kept, and with a name the states; None forgets them with the server.
        tokenizer_id: what clients load the tokenizer by; None: the source of the model's.
        options: ``seed``, ``max_rank``, ``max_samplers``, ``idle``, ``patience`` as for ``Service``; with a backend's
            name also those of ``rlkit.connect`` with that name.

    Raises:
        ConfigError: a setting is out of range, or ``host`` is not loopback and there is no key.
        MissingPackageError: a package of the extra ``serve`` is not installed.
        BackendError: the port is taken.

    >>> with serve("toy") as server:
    ...     server.names, server.url.startswith("http://127.0.0.1:")
    (('toy',), True)
    """
    _check_address(host, port, key)
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names or ()):
        raise ConfigError("serve(names)", f"got {_check.describe(names)}", "a list of texts")
    of_backend, of_service = _split_options(backend, options)
    service = Service(
        _bind_backend(backend, model, folder, of_backend),
        names=tuple(names or _default_names(backend, model)),
        key=key,
        folder=None if folder is None else Path(folder),
        tokenizer_id=tokenizer_id,
        **of_service,
    )
    try:
        return Server(service, host, port)
    except BaseException:
        service.close()
        raise


def _check_address(host: str, port: int, key: str | None) -> None:
    _check.integer("serve(port)", port, low=0, high=65535)
    if key is not None and (not isinstance(key, str) or not key.startswith("tml-") or len(key) < 12):
        raise ConfigError("serve(key): expected at least 12 characters that begin with 'tml-', which clients require")
    _check.require(isinstance(host, str) and host, "serve(host)", host, "a name or an address")
    if key is None and not is_loopback(host):
        remedy = "give a key= (rlkit serve: in RLKIT_SERVER_KEY)"
        raise ConfigError(f"serve(host={host!r}) can be reached from other machines; {remedy}")


def _default_names(backend: object, model: str | None) -> list[str]:
    if model is not None:
        return list(dict.fromkeys([Path(model).name or model, model]))
    return [backend] if isinstance(backend, str) else ["model"]


def _bind_backend(
    backend: Any, model: str | None, folder: str | Path | None, options: Mapping[str, Any]
) -> Callable[..., TrainerBackend]:
    """Return the function that makes a backend for each client."""
    if isinstance(backend, str):
        settings = {"model": model, "folder": folder}
        known = {name: value for name, value in settings.items() if value is not None}
        return functools.partial(connect, backend, **options, **known)
    if model is not None:
        raise ConfigError("serve(model): requires a backend's name; a function that makes backends sets its model")
    if isinstance(backend, type) or not callable(backend):
        expected = (
            "a backend's name, or a function that makes one for each client: functools.partial(rlkit.connect, ..)"
        )
        raise ConfigError("serve(backend)", f"got {_check.describe(backend)}", expected)
    return backend  # type: ignore[no-any-return]  # what it returns shows when it is called


def _split_options(backend: object, options: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Split options into (the backend's, the service's); raise ConfigError for others."""
    service = inspect.signature(Service).parameters.keys() - _ARGUMENTS
    there = set()
    if isinstance(backend, str):
        there = inspect.signature(registry.resolve(backend)).parameters.keys() - _CLIENTS - service
    if unknown := options.keys() - service - there:
        takes = ", ".join(sorted(service | there))
        raise ConfigError(f"serve: no option {min(unknown)!r}; besides its arguments it takes: {takes}")
    own, others = ({name: options[name] for name in options if name in known} for known in (there, service))
    return own, others
