"""``serve``: any backend as a running server of the Tinker API."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rlkit
from rlkit import _check
from rlkit._hosts import is_loopback
from rlkit.backends.protocol import TrainerBackend
from rlkit.backends.transformers_tokenizer import source_of
from rlkit.errors import ConfigError
from rlkit.server.adapter import BackendModels
from rlkit.server.http import Server
from rlkit.server.service import Service

__all__ = ["serve"]

_CLIENTS = {"lora", "init_from", "resume_from"}  # options of a backend that each client gives


def serve(
    backend: str | Callable[..., TrainerBackend] | BackendModels,
    *,
    model: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
    names: Sequence[str] | None = None,
    folder: str | Path | None = None,
    tokenizer_id: str | None = None,
    **options: Any,
) -> Server:
    """Start a server of the Tinker API; programs reach it with ``TINKER_BASE_URL=<its url>``.

    Args:
        backend: a name for ``rlkit.connect``, a function that makes backends (see ``BackendModels``), or models.
        model: with a name: what is trained.
        host: where it listens. Anything but loopback needs ``key``, and TLS in front of it.
        port: 0 for a free one.
        key: what clients must give as their API key, beginning "tml-"; None lets any in.
        names: base models that clients may name; None: ``model`` and the last part of it, or the backend's name, or
            "model".
        folder: where the list of saved states is kept, and with a name the states; None forgets them with the server.
        tokenizer_id: what clients load the tokenizer by; None: where the model's was read from.
        options: as for ``Service``; with a backend's name also those of ``rlkit.connect`` with that name.

    Raises:
        ConfigError: a setting is out of range, or ``host`` is not loopback and there is no key.
        BackendError: the port is taken.

    >>> with serve("toy") as server:
    ...     server.names, server.url.startswith("http://127.0.0.1:")
    (('toy',), True)
    """
    _check.integer("serve(port)", port, low=0, high=65535)
    if key is not None and (not isinstance(key, str) or not key.startswith("tml-") or len(key) < 12):
        raise ConfigError(
            "serve(key): expected a text of at least 12 characters that begins 'tml-'; clients insist on that"
        )
    _check.require(isinstance(host, str) and host, "serve(host)", host, "a name or an address")
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"serve(host={host!r}) can be reached from other machines; give a key= (rlkit serve: in RLKIT_SERVER_KEY)"
        )
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names or ()):
        raise ConfigError("serve(names)", f"got {_check.shown(names)}", "a list of texts")
    of_backend, options = _options(backend, options)
    names = tuple(names or _names(backend, model))
    made = _models(backend, model, folder, of_backend)
    if tokenizer_id is None:  # clients on this machine can read a directory
        tokenizer_id = source_of(made.tokenizer)
    service = Service(
        made,
        names=names,
        keys=None if key is None else [key],
        folder=None if folder is None else Path(folder),
        tokenizer_id=tokenizer_id,
        **options,
    )
    try:
        return Server(service, host, port, names)
    except BaseException:
        service.close()
        raise


def _names(backend: object, model: str | None) -> tuple[str, ...]:
    """Return what clients call the base model where nobody said."""
    if model is not None:
        return tuple(dict.fromkeys([Path(model).name or model, model]))
    return (backend,) if isinstance(backend, str) else ("model",)


def _models(
    backend: object, model: str | None, folder: str | Path | None, options: Mapping[str, object]
) -> BackendModels:
    if isinstance(backend, str):
        settings = {"model": model, "folder": folder}
        connecting = {**options, **{name: value for name, value in settings.items() if value is not None}}
        return BackendModels(functools.partial(rlkit.connect, backend, **connecting))
    if model is not None:
        raise ConfigError("serve(model): goes with a backend's name; a function that makes backends knows its model")
    if isinstance(backend, BackendModels):
        return backend
    if isinstance(backend, type) or not callable(backend):
        expected = "a backend's name, or a function that makes one backend for each client: "
        expected += "functools.partial(rlkit.connect, ...)"
        raise ConfigError("serve(backend)", f"got {_check.shown(backend)}", expected)
    return BackendModels(backend)


def _options(backend: object, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into (the backend's, the service's); raise ConfigError for others."""
    service = inspect.signature(Service).parameters.keys() - {"models", "names", "keys", "folder", "tokenizer_id"}
    there = set()
    if isinstance(backend, str):
        there = inspect.signature(rlkit.backends.registry.resolve(backend)).parameters.keys() - _CLIENTS - service
    for name in options.keys() - service - there:
        known = ", ".join(sorted(service | there))
        raise ConfigError(f"serve: no option {name!r}; beside its own arguments there are: {known}")
    own = {name: value for name, value in options.items() if name in there}
    return own, {name: value for name, value in options.items() if name in service}
