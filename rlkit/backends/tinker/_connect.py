"""Connections to the service: key, address, session, models and clients."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from rlkit import _check
from rlkit._runtime import is_loopback, missing
from rlkit._secrets import redact
from rlkit._seeds import SeedStream, resolve_seed
from rlkit.backends.protocol import Sampler, Tokenizer
from rlkit.backends.tinker._calls import Calls
from rlkit.backends.tinker._failures import deadline_error, forbid_resending, hide_key, status_of, translate_error
from rlkit.backends.tinker._paths import SavedState, check_path, read_state
from rlkit.backends.tinker._sampler import TinkerSampler
from rlkit.backends.tokenizers import reason_of, tokenizer_from
from rlkit.errors import BackendError, CheckpointError, ConfigError, RlkitError, UnsupportedError
from rlkit.types import Lora

if TYPE_CHECKING:
    from tinker import RestClient, SamplingClient, ServiceClient, TrainingClient
    from transformers import PreTrainedTokenizerBase

__all__ = ["list_models", "open_sampler"]

T = TypeVar("T")
Models: TypeAlias = Mapping[str, int | None]  # the longest context by name, None where the service does not say
_CONTACT = 60.0  # seconds for the first answer of a service; afterwards it may take as long as the deadline says
_TOKENIZER = 120.0  # and for reading a tokenizer, which may be downloaded
_CLOSING = 30.0  # and for the end of a session
_CONTEXT = 32768  # tokens, where a service does not say


@contextlib.contextmanager
def connect(
    client: ServiceClient | None, base_url: str | None, api_key: str | None, project: str | None, deadline: float
) -> Iterator[tuple[ServiceClient, Calls, Models]]:
    """Open a session with the user's ``client``, or a new one, and list the models; a block that fails closes it.

    Raises:
        ConfigError: no key, a key that cannot be one, or an address that would show it.
        BackendError: nothing listens at an address on this machine.
        BackendTimeout: the service does not answer.
    """
    seconds = _check.real("deadline", deadline, above=0.0, why="seconds")
    address = base_url or os.environ.get("TINKER_BASE_URL") or None
    _check_texts(client, base_url=base_url, api_key=api_key, project=project)
    service = _make_client(address, api_key, project) if client is None else client
    _check.require(hasattr(service, "create_lora_training_client"), "client", service, "a tinker.ServiceClient")

    def open_session() -> Calls:
        hide_key(service.holder._api_key)  # noqa: SLF001  # it may come from where only the SDK looks
        if client is None and not _is_hosted(address):
            forbid_resending(service.holder)
        return Calls(service.holder, seconds)

    try:
        calls = run_within(
            f"connect to {redact(address or 'the Tinker service')}", min(seconds, _CONTACT), open_session
        )
    except RlkitError:
        raise
    except Exception as error:
        if "The api_key client option must be set" in str(error):
            how = "set TINKER_API_KEY, give api_key=, or store one with `tinker auth login`"
            raise ConfigError(f"connect: no API key; {how}") from error
        raise translate_error("connect", error) from error

    async def ask() -> Models:
        found = await rest_client(service).get_server_capabilities()
        return {model.model_name: model.max_context_length for model in found.supported_models if model.model_name}

    try:
        yield service, calls, calls.request("connect", ask).result()
    except BaseException:
        if client is None:
            close_service(service, seconds)
        raise


def _check_texts(client: object, **options: object) -> None:
    for name, value in options.items():
        if value is not None and client is not None:
            raise ConfigError(f"{name} cannot be combined with client=, which already has a connection")
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"{name}: expected a non-empty string, or None to read the environment")


def _make_client(address: str | None, key: str | None, project: str | None) -> ServiceClient:
    """Return a client for ``address``, where something listens."""
    try:
        import tinker
    except ImportError as error:
        raise missing("connect('tinker')", "the package tinker", "tinker") from error
    local = address is not None and check_address(address)
    key = key or os.environ.get("TINKER_API_KEY") or ("tml-none" if local else None)  # the SDK wants one
    if key is not None and not key.startswith(("tml-", "eyJ")):
        raise ConfigError("api_key (or TINKER_API_KEY): expected a key that starts with 'tml-'; this one does not")
    hide_key(key)
    if address is not None and local:  # the SDK would wait for it
        parts = urllib.parse.urlsplit(address)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((str(parts.hostname), port), timeout=5.0).close()
        except OSError as error:
            what = f"no answer from {redact(address)} ({error.strerror or error})"
            raise BackendError(f"connect: {what}; is the server running?") from error
    return tinker.ServiceClient(base_url=address, api_key=key, project_id=project)


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


def _is_hosted(address: str | None) -> bool:
    """Return whether it is the service that the SDK is made for, which recognises repeated calls."""
    host = "" if address is None else urllib.parse.urlsplit(address).hostname or ""
    return address is None or host.endswith((".thinkingmachines.dev", ".thinkingmachines.ai"))


def run_within(call: str, seconds: float, function: Callable[[], T]) -> T:
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
        raise deadline_error(call, seconds)
    return future.result()


def rest_client(service: ServiceClient) -> RestClient:
    """Return a REST client over the session's connections."""
    import tinker

    return tinker.RestClient(service.holder)


def list_models(seconds: float) -> list[str]:
    """Return the models of the service that the environment names; raise an RlkitError where it cannot be used."""
    with connect(None, None, None, None, seconds) as (service, _, models):
        close_service(service, seconds)
        return sorted(models)


def open_training_client(
    service: ServiceClient, calls: Calls, models: Models, model: str | None, lora: Lora | None, seed: int | None
) -> TrainingClient:
    """Open a new training client.

    Raises:
        ConfigError: the service has no such model, or refuses the adapter.
        UnsupportedError: no service has such an adapter.
    """
    name = _check_model(model, models)
    lora = lora or Lora()
    if lora.alpha != 32.0:
        what = f"got {lora.alpha}; the service fixes it at 32; scale the learning rate instead"
        raise UnsupportedError(f"lora.alpha: {what}")
    if lora.target_modules is not None:
        raise UnsupportedError("lora.target_modules: the service takes only train_mlp, train_attn, train_unembed")
    start = lora.seed if lora.seed is not None else seed
    if start is not None and start >= 2**31:
        start = SeedStream(start).next() % 2**31
    train = {"train_mlp": lora.train_mlp, "train_attn": lora.train_attn}
    train["train_unembed"] = lora.train_unembed is not False

    async def ask() -> TrainingClient:
        try:
            return await service.create_lora_training_client(name, rank=lora.rank, seed=start, **train)
        except Exception as error:
            category = str(getattr(error, "category", "")).lower()
            if status_of(error) in (400, 404, 422) or category.endswith("user"):  # it looked, and found it wrong
                raise ConfigError(str(translate_error("connect", error))) from error
            raise

    return calls.request("connect", ask).result()


def load_training_client(
    service: ServiceClient, calls: Calls, path: str, model: str | None, lora: Lora | None, *, resumes: bool
) -> tuple[TrainingClient, SavedState]:
    """Open a training client from a saved state, and return what is known of it: all, if the optimizer is loaded too.

    Raises:
        CheckpointError: there is no such state, or it has no optimizer.
        ConfigError: the model or the adapter that is asked for is another one.
    """
    where = "resume_from" if resumes else "init_from"
    run = check_path(where, path, "weights")

    async def ask() -> tuple[TrainingClient, SavedState]:
        if not resumes:
            return await service.create_training_client_from_state(path), SavedState()
        listed = (await rest_client(service).list_checkpoints(run)).checkpoints
        saved = read_state(path, next((each.user_metadata for each in listed if each.tinker_path == path), None))
        if not saved.optimizer:
            what = "was saved without its optimizer; use init_from= for the weights alone"
            raise CheckpointError(f"resume_from: {path} {what}")
        return await service.create_training_client_from_state_with_optimizer(path), saved

    client, saved = calls.request(where, ask, path=path).result()
    info = client.get_info()
    name = info.model_data.model_name
    if model is not None and name is not None and model != name:
        raise ConfigError(f"model: got {model!r}, but the saved state belongs to {name!r}")
    if lora is not None and info.lora_rank is not None and lora.rank != info.lora_rank:
        raise ConfigError(f"lora.rank: got {lora.rank}, but the saved state has rank {info.lora_rank}")
    return client, saved


def _check_model(model: object, models: Models) -> str:
    """Return the name of a model that the service has, as far as it lists them."""
    if not isinstance(model, str) or not model:
        known = f"; the service has: {', '.join(sorted(models))}" if models else ""
        raise ConfigError(f"model: got {_check.describe(model)}; expected a model of the service{known}")
    if models and model not in models:
        raise ConfigError(f"model: the service has no {model!r}{_check.suggest(model, sorted(models))}")
    return model


def resolve_length(models: Models, model: str | None, given: int | None) -> int:
    """Return the longest sequence: what the user says, but no more than what the service says."""
    _check.optional(_check.integer, "max_length", given, low=2)
    known = models.get(model or "")
    return min(known or given or _CONTEXT, given or known or _CONTEXT)


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
            given = run_within("tokenizer", min(seconds, _TOKENIZER), client.get_tokenizer)
        except Exception as error:
            why = redact(reason_of(error)).partition("\n")[0]
            what = f"the SDK finds none for this model on the hub ({why})"
            raise ConfigError(f"tokenizer: {what}; set tokenizer= to a directory or a tokenizer") from error
    inner = None if isinstance(given, Tokenizer) else getattr(given, "inner", None)
    return inner if isinstance(inner, Tokenizer) else tokenizer_from(given)  # the former is FakeTinker's


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
    if path is not None:
        path = path.replace("/weights/", "/sampler_weights/")
        check_path("path", path, "sampler_weights")
    elif model is None:
        raise ConfigError("rlkit.sampler: give model= or path=")
    with connect(client, base_url, api_key, project, deadline) as (service, calls, models):
        base = _check_model(model, models) if path is None else None

        async def ask() -> SamplingClient:
            return await service.create_sampling_client(base_model=base, model_path=path)

        sampling = calls.request("sampler", ask, path=path).result()
        return TinkerSampler(
            sampling,
            SeedStream(resolve_seed(seed)),
            calls,
            tokenizer=find_tokenizer(tokenizer, sampling, calls.seconds),
            max_length=resolve_length(models, model, max_length),
            version=0 if path is None else read_state(path, None).version,
            off_temperature="raise",
        )
