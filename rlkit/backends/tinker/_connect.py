"""Connections to the service: key, address, session, models, clients, and the states saved there."""

from __future__ import annotations

import concurrent.futures
import difflib
import importlib
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from rlkit import _check, _runtime
from rlkit._hosts import is_loopback
from rlkit._secrets import redact
from rlkit._seeds import SeedStream, resolve_seed
from rlkit.backends.protocol import Sampler, Tokenizer
from rlkit.backends.tinker._calls import Calls
from rlkit.backends.tinker._failures import (
    deadline_error,
    forbid_resending,
    hide_key,
    status_of,
    translate_error,
)
from rlkit.backends.tinker._paths import SavedState, check_path, read_state
from rlkit.backends.tinker._sampler import TinkerSampler
from rlkit.backends.tokenizers import reason_of, tokenizer_from
from rlkit.backends.trainer import Inner
from rlkit.errors import BackendError, BackendTimeout, CheckpointError, ConfigError, UnsupportedError
from rlkit.types import Lora

if TYPE_CHECKING:
    from tinker import APIFuture, RestClient, SamplingClient, ServiceClient, TrainingClient
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Deadline",
    "close_service",
    "find_models",
    "find_tokenizer",
    "list_models",
    "open_sampler",
    "open_service",
    "open_training_client",
    "resolve_length",
    "rest_client",
]

T = TypeVar("T")
_CONTACT = 60.0  # seconds for the first answer of a service; afterwards it may take as long as the deadline says
_TOKENIZER = 120.0  # and for reading a tokenizer, which may be downloaded
_CLOSING = 30.0  # and for the end of a session
_CONTEXT = 32768  # tokens, where a service does not say


class Deadline:
    """The time that connecting may take, all in all."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def wait(self, call: str, inner: Inner[T], *, path: str | None = None) -> T:
        """Return the result of a future of the SDK, or raise its error translated.

        Raises:
            ConfigError: the service looked at the request, which is about no saved state, and found it wrong.
        """
        concurrent.futures.wait([inner], max(0.1, self._end - time.monotonic()))
        if not inner.done():
            inner.cancel()  # ends the SDK's own tries
            raise deadline_error(call, self.seconds)
        error = inner.exception()
        if error is None:
            return inner.result()
        translated = translate_error(call, error, path=path)
        category = str(getattr(error, "category", "")).lower()
        if path is None and (status_of(error) in (400, 404, 422) or category.endswith("user")):
            translated = ConfigError(str(translated))
        raise translated from error


def open_service(
    client: ServiceClient | None, base_url: str | None, api_key: str | None, project: str | None, seconds: float
) -> ServiceClient:
    """Open a ``tinker.ServiceClient`` with a session, or return the user's own ``client``.

    Raises:
        ConfigError: no key, a key that cannot be one, or an address that would show it.
        BackendError: nothing listens at an address on this machine.
        BackendTimeout: the service does not answer.
    """
    for name, value in (("base_url", base_url), ("api_key", api_key), ("project", project)):
        if value is not None and client is not None:
            raise ConfigError(f"{name} cannot be combined with client=, which already has a connection")
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"{name}: expected a non-empty string, or None to read the environment")
    tinker = import_sdk()
    address = base_url or os.environ.get("TINKER_BASE_URL") or None
    if client is None:
        made = _make_client(tinker, address, api_key, project)
    else:
        _check.require(hasattr(client, "create_lora_training_client"), "client", client, "a tinker.ServiceClient")
        made = client
    seconds = min(seconds, _CONTACT)
    try:
        run_within(seconds, lambda: _open_session(made, resends=client is not None or _is_hosted(address)))
    except BackendTimeout as error:
        raise deadline_error(f"connect to {redact(address or 'the Tinker service')}", seconds) from error
    except Exception as error:
        if isinstance(error, tinker.TinkerError) and "The api_key client option must be set" in str(error):
            how = "set TINKER_API_KEY, give api_key=, or store one with `tinker auth login`"
            raise ConfigError(f"connect: no API key; {how}") from error
        raise translate_error("connect", error) from error
    return made


def _open_session(client: ServiceClient, *, resends: bool) -> None:
    """Open the session, which is where a wrong key or address shows."""
    holder = client.holder
    hide_key(holder._api_key)  # noqa: SLF001  # it may come from where only the SDK looks
    if not resends:
        forbid_resending(holder)


def _make_client(tinker: ModuleType, address: str | None, api_key: str | None, project: str | None) -> ServiceClient:
    local = address is not None and check_address(address)
    key = api_key or os.environ.get("TINKER_API_KEY") or ("tml-none" if local else None)  # the SDK wants one
    if key is not None and not key.startswith(("tml-", "eyJ")):
        raise ConfigError("api_key (or TINKER_API_KEY): expected a key that starts with 'tml-'; this one does not")
    hide_key(key)
    if address is not None and local:
        _check_listening(address)
    client: ServiceClient = tinker.ServiceClient(base_url=address, api_key=key, project_id=project)
    return client


def import_sdk() -> ModuleType:
    """Return the package tinker. Raises ConfigError: it is not installed."""
    try:
        return importlib.import_module("tinker")
    except ImportError as error:
        raise ConfigError(f"connect('tinker') needs the package tinker: {_runtime.command('tinker')}") from error


def check_address(address: str) -> bool:
    """Return whether it is on this machine; raise ConfigError where the key would travel in clear."""
    if "@" in address:
        raise ConfigError("base_url: holds a user name or password; give the key as api_key= or TINKER_API_KEY")
    wrong = ConfigError("base_url", f"is {redact(address)!r}", "https://host, or http://127.0.0.1:port")
    try:
        parts = urllib.parse.urlsplit(address)
        _ = parts.port  # raises where it is none
    except ValueError as error:
        raise wrong from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong
    local = is_loopback(parts.hostname)
    if parts.scheme == "http" and not local:
        what = f"plain http would send the key to {parts.hostname} unencrypted"
        raise ConfigError(f"base_url: {what}; use https (http is only for this machine)")
    return local


def _check_listening(address: str) -> None:
    """Raise BackendError where nothing listens on this machine, which the SDK would wait for."""
    parts = urllib.parse.urlsplit(address)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=5.0).close()
    except OSError as error:
        what = f"no answer from {redact(address)} ({error.strerror or error})"
        raise BackendError(f"connect: {what}; is the server running?") from error


def _is_hosted(address: str | None) -> bool:
    """Return whether it is the service that the SDK is made for, which recognises repeated calls."""
    host = "" if address is None else urllib.parse.urlsplit(address).hostname or ""
    return address is None or host.endswith((".thinkingmachines.dev", ".thinkingmachines.ai"))


def run_within(seconds: float, function: Callable[[], T]) -> T:
    """Return ``function()``, or raise BackendTimeout after ``seconds``: the SDK waits without a limit in places."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  # raised to the caller below
            future.set_exception(error)

    threading.Thread(target=run, name="rlkit-tinker-connect", daemon=True).start()
    concurrent.futures.wait([future], seconds)
    if not future.done():
        raise BackendTimeout(f"no answer within {seconds:g} s")
    return future.result()


def rest_client(service: ServiceClient) -> RestClient:
    """Return a REST client over the session's connections."""
    tinker = import_sdk()
    client: RestClient = tinker.RestClient(service.holder)
    return client


def find_models(service: ServiceClient, deadline: Deadline) -> dict[str, int | None]:
    """Return the longest context, or None where the service does not say, by the name of each of its models."""
    found = deadline.wait("connect", rest_client(service).get_server_capabilities().future())
    return {model.model_name: model.max_context_length for model in found.supported_models if model.model_name}


def list_models(seconds: float) -> list[str]:
    """Return the models of the service that the environment names, or raise an RlkitError within ``seconds``."""
    deadline = Deadline(seconds)
    service = open_service(None, None, None, None, seconds)
    try:
        return sorted(find_models(service, deadline))
    finally:
        close_service(service, seconds)


def open_training_client(
    service: ServiceClient,
    deadline: Deadline,
    models: Mapping[str, int | None],
    *,
    model: str | None,
    lora: Lora | None,
    seed: int | None,
    path: str | None,
    resumes: bool,
) -> tuple[TrainingClient, SavedState]:
    """Open a training client, new or from a saved state, and return what is known of that state.

    Args:
        service, deadline, models: see above.
        model, lora, seed: of the adapter; for a saved state they may be None, and have to agree with it.
        path: of the saved state, or None.
        resumes: whether the optimizer is loaded as well.
    """
    if path is None:
        if not isinstance(model, str) or not model:
            known = f"; the service has: {', '.join(sorted(models))}" if models else ""
            raise ConfigError(f"model: got {_check.describe(model)}; expected a model of the service{known}")
        _check_model(model, models)
        return deadline.wait("connect", _create_client(service, model, lora or Lora(), seed).future()), SavedState()
    where = "resume_from" if resumes else "init_from"
    run = check_path(where, path, "weights")
    saved = SavedState()
    opened: APIFuture[TrainingClient]
    if resumes:
        listed = deadline.wait(where, rest_client(service).list_checkpoints(run).future(), path=path).checkpoints
        saved = read_state(path, next((each.user_metadata for each in listed if each.tinker_path == path), None))
        if not saved.optimizer:
            what = "was saved without its optimizer; use init_from= for the weights alone"
            raise CheckpointError(f"resume_from: {path} {what}")
        opened = service.create_training_client_from_state_with_optimizer(path)
    else:
        opened = service.create_training_client_from_state(path)
    client = deadline.wait(where, opened.future(), path=path)
    info = client.get_info()
    name = info.model_data.model_name
    if model is not None and name is not None and model != name:
        raise ConfigError(f"model: got {model!r}, but the saved state belongs to {name!r}")
    if lora is not None and info.lora_rank is not None and lora.rank != info.lora_rank:
        raise ConfigError(f"lora.rank: got {lora.rank}, but the saved state has rank {info.lora_rank}")
    return client, saved


def _create_client(service: ServiceClient, model: str, lora: Lora, seed: int | None) -> APIFuture[TrainingClient]:
    if lora.alpha != 32.0:
        what = f"got {lora.alpha}; the service fixes it at 32; scale the learning rate instead"
        raise UnsupportedError(f"lora.alpha: {what}")
    if lora.target_modules is not None:
        raise UnsupportedError("lora.target_modules: the service takes only train_mlp, train_attn, train_unembed")
    start = lora.seed if lora.seed is not None else seed
    if start is not None and start >= 2**31:
        start = SeedStream(start).next() % 2**31
    return service.create_lora_training_client(
        model,
        rank=lora.rank,
        seed=start,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
        train_unembed=lora.train_unembed is not False,
    )


def _check_model(model: str, models: Mapping[str, object]) -> None:
    """Raise ConfigError where the service lists its models and this is none of them."""
    if models and model not in models:
        close = difflib.get_close_matches(model, models, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"model: the service has no {model!r}; {hint}it has: {', '.join(sorted(models))}")


def resolve_length(models: Mapping[str, int | None], model: str | None, given: int | None) -> int:
    """Return the longest sequence: what the user says, but no more than what the service says."""
    _check.optional(_check.integer, "max_length", given, low=2)
    known = models.get(model or "")
    if known is None:
        return given or _CONTEXT
    return known if given is None else min(known, given)


def find_tokenizer(
    given: str | os.PathLike[str] | Tokenizer | PreTrainedTokenizerBase | None,
    client: TrainingClient | SamplingClient,
    seconds: float,
) -> Tokenizer:
    """Return a tokenizer of a directory, a hub name, an object, or of None: the SDK's own choice.

    Raises:
        ConfigError: there is none, or it cannot be read within ``seconds``.
    """
    if given is None:
        try:
            given = run_within(min(seconds, _TOKENIZER), client.get_tokenizer)
        except Exception as error:
            raise ConfigError(
                "tokenizer: the SDK finds none for this model on the hub; set tokenizer= to a directory or a "
                f"tokenizer ({redact(reason_of(error)).partition(chr(10))[0]})"
            ) from error
    inner = None if isinstance(given, Tokenizer) else getattr(given, "inner", None)
    if isinstance(inner, Tokenizer):  # what FakeTinker gives
        return inner
    return tokenizer_from(given)


def close_service(service: ServiceClient, seconds: float) -> None:
    """End the session, within ``seconds`` and whatever becomes of it: the service ends silent ones anyway."""
    closing = service.close("success").future()
    concurrent.futures.wait([closing], min(seconds, _CLOSING))
    closing.cancel()  # ends the SDK's own tries


def open_sampler(
    *,
    model: str | None = None,
    path: str | None = None,
    seed: int | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    project: str | None = None,
    client: ServiceClient | None = None,
    tokenizer: str | os.PathLike[str] | Tokenizer | PreTrainedTokenizerBase | None = None,
    max_length: int | None = None,
    deadline: float = 1800.0,
) -> Sampler:
    """Open a base model, or what ``save(sampler=True)`` left; the session ends with the process.

    Args:
        model: of the service.
        path: ``tinker://<run>/sampler_weights/<name>``; of a state saved with ``sampler=True`` also the path that
            ``save`` returned.
        seed, base_url, api_key, project, client, tokenizer, max_length, deadline: as for ``TinkerBackend``.
    """
    seconds = _check.real("deadline", deadline, above=0.0, why="seconds")
    if path is not None:
        path = path.replace("/weights/", "/sampler_weights/")
        check_path("path", path, "sampler_weights")
    elif not isinstance(model, str) or not model:
        raise ConfigError("rlkit.sampler: give model= or path=")
    until = Deadline(seconds)
    service = open_service(client, base_url, api_key, project, seconds)
    try:
        models = find_models(service, until)
        if path is None:
            _check_model(str(model), models)
        opened = service.create_sampling_client(base_model=None if path else model, model_path=path)
        sampling = until.wait("sampler", opened.future(), path=path)
        tokens = find_tokenizer(tokenizer, sampling, seconds)
    except BaseException:
        if client is None:
            close_service(service, seconds)
        raise
    return TinkerSampler(
        sampling,
        SeedStream(resolve_seed(seed)),
        Calls(service.holder, seconds),
        tokenizer=tokens,
        max_length=resolve_length(models, model, max_length),
        version=0 if path is None else read_state(path, None).version,
        off_temperature="raise",
    )
