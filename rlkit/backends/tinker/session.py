"""A session on the service: its clients, its models, and the states saved there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from rlkit import _check
from rlkit._seeds import SeedStream, resolve_seed
from rlkit.backends.protocol import Sampler, Tokenizer
from rlkit.backends.tinker import _requests, connection, guard
from rlkit.backends.tinker._sampler import TinkerSampler
from rlkit.backends.tinker.connection import Saved, checked_path, late, not_offered, read, run_of, status_of, translate
from rlkit.backends.tinker.guard import add_secret, clean, watch_logs
from rlkit.backends.trainer import Inner
from rlkit.errors import BackendError, BackendTimeout, CheckpointError, ConfigError, RlkitError, UnsupportedError
from rlkit.futures import Future
from rlkit.types import Lora

if TYPE_CHECKING:
    from tinker import APIFuture, RestClient, SamplingClient, ServiceClient, TrainingClient, types
    from transformers import PreTrainedTokenizerBase

__all__ = ["Session", "open_sampler"]

T = TypeVar("T")
U = TypeVar("U")
T_co = TypeVar("T_co", covariant=True)
_CONTEXT = 32768  # where a service does not say


class Answer(Protocol[T_co]):
    """A future of the SDK."""

    def result(self) -> T_co: ...


class Session:
    """An SDK service client, rlkit's own or the user's.

    Attributes:
        service: the ``tinker.ServiceClient``.
        link: the guard of its connections; None for the user's own.
        seconds: that a call may take.
        models: longest context (or None) by name; empty where the service does not say.
    """

    def __init__(self, service: ServiceClient, *, link: guard.Link | None, seconds: float, until: float) -> None:
        self.service = service
        self.link = link  # None: the client is the user's, and so are its connections
        self.seconds = seconds
        self._until = until  # connecting may take until then
        self.models: dict[str, int | None] = {}

    @classmethod
    def open(cls, client: ServiceClient | None, address: connection.Address, seconds: float) -> Session:
        """Open a session of the user's client, or a new one."""
        _check.optional(_check.flag, "resend", address.resend)
        until = time.monotonic() + seconds
        if client is None:
            made, link = connection.service_client(address, seconds)
            return cls(made, link=link, seconds=seconds, until=until).ready()
        options = ("base_url", "api_key", "project", "resend")
        if misplaced := [name for name in options if getattr(address, name) is not None]:
            raise ConfigError(f"{misplaced[0]} cannot be combined with client=, which already has a connection")
        _check.require(hasattr(client, "create_lora_training_client"), "client", client, "a tinker.ServiceClient")
        connection.sdk()
        add_secret(os.environ.get("TINKER_API_KEY"))
        add_secret(getattr(client, "_api_key", None))
        watch_logs()
        return cls(client, link=None, seconds=seconds, until=until).ready()

    def training(
        self,
        model: str | None,
        lora: Lora | None,
        path: str | None,
        *,
        resumes: bool,
        seed: int | None,
        optimizer: types.OptimizerConfig | None,
    ) -> tuple[TrainingClient, Saved]:
        """Open a training client, new or from a saved state, and what is known of that state."""
        if path is None:
            if not isinstance(model, str) or not model:
                known = f"; the service has: {', '.join(sorted(self.models))}" if self.models else ""
                raise ConfigError(f"model: got {_check.describe(model)}; expected a model of the service{known}")
            connection.check_model(model, self.models)
            client: TrainingClient = self._client("connect", lambda: self._created(model, lora, seed, optimizer))
            return client, Saved()
        where = "resume_from" if resumes else "init_from"
        checked_path(where, path)
        saved = read(path, self._metadata(path))
        service = self.service
        if not resumes:
            saved = Saved()
            make = partial(service.create_training_client_from_state, path, optimizer=optimizer)
        elif saved.optimizer:
            make = partial(service.create_training_client_from_state_with_optimizer, path, user_metadata=None)
        else:
            raise CheckpointError(
                f"resume_from: {path} was saved without its optimizer; use init_from= for the weights alone"
            )
        client = self._client(where, make, path)
        _check_same(client.get_info(), model, lora)
        return client, saved

    def max_length(self, model: str | None, given: int | None) -> int:
        """Return the longest sequence: what the user says, but no more than what the service says."""
        _check.optional(_check.integer, "max_length", given, low=2)
        known = self.models.get(model or "")
        if known is None:
            return given or _CONTEXT
        return known if given is None else min(known, given)

    def weighs(self, info: types.GetInfoResponse) -> bool:
        """Return whether a cross entropy is a sum with weights of any sign: on the hosted service, and on rlkit's.

        Others are known to divide by the weights' sum. ``info`` is the model's ``get_info``.
        """
        return self.hosted or getattr(info.model_data, "arch", None) == "rlkit"

    @property
    def hosted(self) -> bool:
        """Return whether it is the service that the SDK is made for."""
        return connection.hosted(getattr(self.service.holder, "_base_url", None))

    def offers_losses(self) -> bool:
        """Return whether the service runs losses that are sent to it."""
        try:
            return bool(self.service.holder.get_client_config().custom_loss_server_side)
        except AttributeError:  # an SDK that does not say: then losses run here
            return False

    def saved(self, run: str) -> Future[list[str]]:
        """Return the paths of a run's saved states, oldest first."""
        asked: Inner[types.CheckpointsListResponse] = self._rest().list_checkpoints(run).future()
        return self._future(
            "saved", asked, lambda found: [c.tinker_path for c in sorted(found.checkpoints, key=lambda c: c.time)]
        )

    def delete(self, path: str) -> Future[None]:
        """Remove a saved state."""
        _checked_any("delete", path)
        asked = self._rest().delete_checkpoint_from_tinker_path(path).future()
        return self._future("delete", asked, _nothing, path=path)

    def expire(self, path: str, seconds: int | None) -> Future[None]:
        """Schedule the removal of a saved state in ``seconds``."""
        _checked_any("expire", path)
        _check.optional(_check.integer, "expire(seconds)", seconds, low=3600, why="an hour or more")
        asked = self._rest().set_checkpoint_ttl_from_tinker_path(path, seconds).future()
        return self._future("expire", asked, _nothing, path=path)

    def sampling(self, *, model: str | None, path: str | None) -> SamplingClient:
        """Open a sampling client of a base model or of saved sampler weights."""
        make = self.service.create_sampling_client
        return self._client("sampler", lambda: make(base_model=model, model_path=path), path)

    def close(self) -> None:
        """End the session if it is rlkit's own; nothing is sent after that. May be called twice."""
        if self.link is None or self.link.closed:
            return
        closing: list[APIFuture[object]] = []

        def finish() -> None:
            closing.append(self.service.close("success"))
            closing[0].result()

        try:
            connection.bounded(finish, min(self.seconds, 30.0))
        except Exception as error:  # noqa: BLE001  # the service ends silent sessions anyway
            clean(error)
            for future in closing:
                future.future().cancel()  # ends the SDK's own tries, and closes its connections
        self.link.close()

    def _created(
        self, model: str, lora: Lora | None, seed: int | None, optimizer: types.OptimizerConfig | None
    ) -> APIFuture[TrainingClient]:
        lora = Lora() if lora is None else lora
        if lora.alpha != 32.0:
            raise UnsupportedError(
                f"lora.alpha: got {lora.alpha}; the service fixes it at 32; scale the learning rate instead"
            )
        if lora.target_modules is not None:
            raise UnsupportedError("lora.target_modules: the service takes only train_mlp, train_attn, train_unembed")
        start = lora.seed if lora.seed is not None else seed
        if start is not None and start >= 2**31:
            start = SeedStream(start).next() % 2**31
        return self.service.create_lora_training_client(
            model,
            rank=lora.rank,
            seed=start,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
            train_unembed=lora.train_unembed is not False,
            optimizer=optimizer,
        )

    def _client(self, call: str, make: Callable[[], Answer[T]], path: str | None = None) -> T:
        """Return the client that a future of the SDK's gives."""
        try:
            return connection.bounded(lambda: make().result(), self._left())
        except BackendTimeout as error:
            raise late(call, self.seconds, link=self.link) from error
        except RlkitError:
            raise
        except Exception as error:
            translated = translate(call, error, path=path)
            if path is None and isinstance(translated, BackendError) and _refused(error):
                raise ConfigError(f"{translated}") from error
            raise translated from error

    def ready(self) -> Session:
        """Return itself, knowing the service's models."""
        try:
            capabilities = self._asked("connect", lambda: self._rest().get_server_capabilities())
        except BaseException:
            self.close()
            raise
        if capabilities is not None:
            self.models = {m.model_name: m.max_context_length for m in capabilities.supported_models if m.model_name}
        return self

    def _metadata(self, path: str) -> Mapping[str, str] | None:
        """Return the metadata of a saved state; None where the service keeps none."""
        listed = self._asked("resume_from", lambda: self._rest().list_checkpoints(run_of(path)))
        return next((c.user_metadata for c in listed.checkpoints if c.tinker_path == path), None) if listed else None

    def _asked(self, call: str, ask: Callable[[], Answer[T]]) -> T | None:
        """Return the answer to a question that some servers do not know; None from those.

        Raises:
            BackendError: the service is in trouble: its answer is not guessed.
        """
        try:
            return connection.bounded(lambda: ask().result(), self._left())
        except BackendTimeout as error:
            raise late(call, self.seconds, link=self.link) from error
        except Exception as error:
            if isinstance(error, UnsupportedError) or not_offered(error):
                clean(error)
                return None
            raise translate(call, error) from error

    def _left(self) -> float:
        """Return the seconds that connecting may still take."""
        return max(0.1, self._until - time.monotonic())

    def _rest(self) -> RestClient:
        """Return a REST client with the same address and key."""
        make = getattr(self.service, "_rest_client", None)
        if make is None:
            raise UnsupportedError("this SDK's service client has no REST client; use tinker.RestClient")
        return make()

    def _future(self, call: str, inner: Inner[T], finish: Callable[[T], U], path: str | None = None) -> Future[U]:
        return Future.wrap(_requests.within(self.seconds, call, inner, finish, path=path, link=self.link))


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
        path = checked_path("path", path.replace("/weights/", "/sampler_weights/"), kind="sampler_weights")
    elif not isinstance(model, str) or not model:
        raise ConfigError("rlkit.sampler: give model= or path=")
    session = Session.open(client, connection.Address(base_url, api_key, project), seconds)
    try:
        if model is not None:
            connection.check_model(model, session.models)
        sampling = session.sampling(model=model if path is None else None, path=path)
    except BaseException:
        session.close()
        raise
    return TinkerSampler(
        sampling,
        SeedStream(resolve_seed(seed)),
        tokenizer=connection.tokenizer_of(tokenizer, sampling, seconds),
        max_length=session.max_length(model, max_length),
        version=0 if path is None else read(path, None).version,
        session=session,
        off_temperature="raise",
    )


def _nothing(_: object) -> None:
    return None


def _checked_any(where: str, path: object) -> None:
    kind = "sampler_weights" if isinstance(path, str) and "/sampler_weights/" in path else "weights"
    checked_path(where, path, kind=kind)


def _refused(error: BaseException) -> bool:
    """Return whether the service looked at the request and found it wrong."""
    category = str(getattr(error, "category", "")).lower()
    return status_of(error) in (400, 404, 422) or category.endswith("user")


def _check_same(info: types.GetInfoResponse, model: str | None, lora: Lora | None) -> None:
    """Raise ConfigError where the options contradict the saved state, from which model and adapter come."""
    name = info.model_data.model_name
    if model is not None and name is not None and model != name:
        raise ConfigError(f"model: got {model!r}, but the saved state belongs to {name!r}")
    if lora is not None and info.lora_rank is not None and lora.rank != info.lora_rank:
        raise ConfigError(f"lora.rank: got {lora.rank}, but the saved state has rank {info.lora_rank}")
