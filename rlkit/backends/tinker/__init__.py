"""``TinkerBackend``: the hosted Tinker service, or any server of its API, as a backend.

Calls are sent as they are made and read in order (``_calls``); a loss takes the cheapest way that is exact
(``_losses``); errors of the SDK are raised as rlkit's (``_failures``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import attrs

from rlkit import _check
from rlkit._seeds import SeedStream, resolve_seed
from rlkit.backends.protocol import Config, LiveSampler, LossLike, Route, Sampler, Tokenizer
from rlkit.backends.samplers import SuccessiveSampler
from rlkit.backends.tinker import _connect
from rlkit.backends.tinker._losses import find_route, send
from rlkit.backends.tinker._paths import SavedState, check_label, check_path, make_name, metadata_of
from rlkit.backends.tinker._sampler import OffTemperature, TinkerSampler
from rlkit.backends.trainer import BaseTrainer, CallQueue, Checked, Inner, Job, PendingResult, check_start_options
from rlkit.errors import UnsupportedError
from rlkit.futures import Future
from rlkit.metrics.names import with_ending
from rlkit.types import OPTIONAL_OPTIONS, SAMPLING_OPTIONS, Adam, Datum, ForwardBackwardOutput, Lora

if TYPE_CHECKING:
    from tinker import APIFuture, RestClient, SamplingClient, ServiceClient, types
    from transformers import PreTrainedTokenizerBase

    from rlkit.losses.prepare import PreparedLoss

__all__ = ["TinkerBackend", "TinkerSampler", "list_models"]

list_models = _connect.list_models
T = TypeVar("T")


class TinkerBackend(BaseTrainer):
    """A LoRA policy that a Tinker service trains and samples.

    Args:
        model: a model of the service, such as "Qwen/Qwen3-8B".
        lora: rank, seed and which layers; None for the defaults. The service's alpha is 32.
        seed: of samples that are asked for without one, and of the adapter's start; None for a fresh one.
        folder: accepted, as for other backends; states are saved on the service.
        resume_from: a ``tinker://`` path that ``save`` returned: weights, optimizer, version and the stream of seeds.
        init_from: a ``tinker://`` path: weights only, a fresh optimizer.
        base_url, api_key, project: None for what the SDK finds in the environment or its credentials.
        client: a ``tinker.ServiceClient`` to use instead; it stays open, and its connections are its owner's.
        tokenizer: a directory, a hub name, a transformers tokenizer or one of rlkit's; None for the SDK's choice,
            which needs a network.
        max_length: longest sequence in tokens; None for what the service says, else 32768.
        deadline: seconds that a call may take, from when the one before it is done (a sample: from when it is asked
            for). Each step of connecting may take as long, the first answer a minute.
        off_temperature: data sampled at a temperature other than 1, which the service cannot train at: "raise" an
            error; "rescore": a sampler gives such samples their untempered logprobs, for one more pass over each;
            "keep" the logprobs as they are, which leaves the ratio off 1.

    A training call that fails, or has no answer within the deadline, ends the policy: what was sent after it may have
    been carried out. Connect anew with ``resume_from=``. A mistake in a loss of your own that shows on dummy values
    raises in the call and leaves everything unsent; one that shows only on the model's logprobs ends the policy too.

    ``save``: the service always saves the optimizer; with ``optimizer=False`` the path cannot be given to
    ``resume_from=``. ``sampler=True`` saves weights to sample from as well, under the same name: their path has
    ``sampler_weights`` for ``weights``, and ``rlkit.sampler("tinker", path=...)`` takes it. ``optim_step`` raises
    ``StepOutcomeUnknown`` where the step may or may not have been applied (when the future is read).

    Attributes:
        service_client, training_client: the SDK's own, for what rlkit does not cover.
    """

    _name = "tinker"
    _seeds: SeedStream

    def __init__(
        self,
        *,
        model: str | None = None,
        lora: Lora | None = None,
        seed: int | None = None,
        folder: str | Path | None = None,
        resume_from: str | None = None,
        init_from: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        project: str | None = None,
        client: ServiceClient | None = None,
        tokenizer: str | Path | Tokenizer | PreTrainedTokenizerBase | None = None,
        max_length: int | None = None,
        deadline: float = 1800.0,
        off_temperature: OffTemperature = "raise",
    ) -> None:
        path, resumes = check_start_options("connect", model, lora, folder, resume_from, init_from)
        _check.choice("off_temperature", off_temperature, ("raise", "rescore", "keep"))
        self._own_service = client is None
        saved = SavedState()
        with _connect.connect(client, base_url, api_key, project, deadline) as (service, calls, models):
            if path is None:
                training = _connect.open_training_client(service, calls, models, model, lora, seed)
            else:
                training, saved = _connect.load_training_client(service, calls, path, model, lora, resumes=resumes)
            self.tokenizer = _connect.find_tokenizer(tokenizer, training, calls.seconds)
            info = training.get_info()
            self.max_length = _connect.resolve_length(models, info.model_data.model_name, max_length)
        self.service_client, self.training_client = service, training
        self._calls, self._models = calls, models
        rank = f"LoRA r={info.lora_rank}, " if info.lora_rank else ""
        self.about = f"{info.model_data.model_name}, {rank}{training.model_id}"
        self._off_temperature: OffTemperature = off_temperature
        entropy = resolve_seed(seed) if saved.seed is None or seed is not None else saved.seed
        self._seeds = SeedStream(entropy, 0 if seed is not None else saved.requests)
        self.version = saved.version
        self._steps = saved.version  # as they were sent; ``version`` as they were carried out
        self._snapshot: tuple[int, Inner[SamplingClient]] | None = None
        self._queue = CallQueue("tinker", calls)

    open_sampler = staticmethod(_connect.open_sampler)

    def sampler(self) -> Future[Sampler]:
        """Take a snapshot; those between two steps share one on the service. See ``TrainerBackend.sampler``."""
        return self._queue.enqueue("sampler", lambda: self._take_snapshot(lambda sampler: sampler))

    def live_sampler(self, *, recompute: bool = False) -> Future[LiveSampler]:
        """Return a sampler whose later requests take the newer policy. See ``LiveSampling``.

        The service has no way to change the weights of a request that runs: ``switches`` is "request".
        """
        _check.flag("live_sampler(recompute)", recompute)

        def update(live: SuccessiveSampler) -> Future[int]:
            return self._queue.enqueue("update", lambda: self._take_snapshot(live.switch_to))

        return self._queue.enqueue(
            "live_sampler", lambda: self._take_snapshot(lambda sampler: SuccessiveSampler(sampler, update))
        )

    def _take_snapshot(self, use: Callable[[Sampler], T]) -> PendingResult[T]:
        """Have the service keep the present weights, and use their sampler."""
        steps = self._steps
        if self._snapshot is None or self._snapshot[0] != steps or _has_failed(self._snapshot[1]):
            self._snapshot = (steps, self.training_client.save_weights_and_get_sampling_client().future())
        return PendingResult([self._snapshot[1]], lambda results: use(self._sampler(results[0], steps)))

    def base_sampler(self) -> Future[Sampler]:
        """Return a sampler of the base model. See ``TrainerBackend.base_sampler``."""
        model = self.training_client.get_info().model_data.model_name

        def send() -> PendingResult[Sampler]:
            sent = self.service_client.create_sampling_client(base_model=model).future()
            return PendingResult([sent], lambda results: self._sampler(results[0], 0))

        return self._queue.enqueue("base_sampler", send)

    def discard(self) -> Future[None]:
        """Accept calls again after a failure in which nothing was sent.

        Raises:
            BackendError: a gradient is on the service, which cannot be told to drop it.
        """
        return self._queue.discard(None)

    def route(self, data: Sequence[Datum], loss: LossLike, *, config: Config | None = None) -> Route:
        """Return the way that ``forward_backward`` takes. See ``Routes``."""
        data, prepared, _ = self._check_call(data, loss, config, (), backward=True)
        return find_route(data, cast("PreparedLoss", prepared))

    def saved(self) -> Future[list[str]]:
        """Return the paths of this run's saved states, oldest first. See ``Storage``."""

        async def ask() -> list[str]:
            found = await _connect.rest_client(self.service_client).list_checkpoints(self.training_client.model_id)
            return [each.tinker_path for each in sorted(found.checkpoints, key=lambda each: each.time)]

        return self._calls.request("saved", ask, cancels=False)

    def delete(self, path: str) -> Future[None]:
        """Remove a saved state. See ``Storage``."""
        return self._change(path, "delete", lambda rest: rest.delete_checkpoint_from_tinker_path(path))

    def expire(self, path: str, seconds: int | None) -> Future[None]:
        """Schedule the removal of a saved state in ``seconds``, an hour or more. See ``Storage``."""
        _check.optional(_check.integer, "expire(seconds)", seconds, low=3600, why="an hour or more")
        return self._change(path, "expire", lambda rest: rest.set_checkpoint_ttl_from_tinker_path(path, seconds))

    def _change(self, path: str, call: str, send: Callable[[RestClient], APIFuture[None]]) -> Future[None]:
        """Change a saved state."""
        check_path(call, path, "weights", "sampler_weights")

        async def ask() -> None:
            await send(_connect.rest_client(self.service_client))

        return self._calls.request(call, ask, path=path, cancels=False)

    def capabilities(self) -> Mapping[str, object]:
        """Return what the service offers. See ``Capabilities``.

        Returns:
            "models": names with their longest contexts. "sampling_options": those of ``SamplingParams``.
        """
        options = tuple(x for x in (*SAMPLING_OPTIONS, "stop") if x not in OPTIONAL_OPTIONS)
        return {"models": dict(self._models), "sampling_options": options}

    def close(self) -> None:
        """Finish the calls made so far, each within its deadline, and end the session. May be called twice."""
        super().close()
        if self._own_service:
            _connect.close_service(self.service_client, self._calls.seconds)

    def _run(
        self, data: Sequence[Datum], loss: PreparedLoss | None, want: Sequence[str], *, backward: bool
    ) -> PendingResult[ForwardBackwardOutput]:
        del want  # there is nothing but logprobs
        return send(self.training_client, data, loss, backward=backward)

    def _optimize(self, params: Adam) -> Job[Mapping[str, float]]:
        _check.require(isinstance(params, Adam), "optim_step(params)", params, "rlkit.Adam(...)")

        def send() -> PendingResult[Mapping[str, float]]:
            from tinker import types

            sent = self.training_client.optim_step(types.AdamParams(**attrs.asdict(params))).future()
            self._steps += 1

            def finish(results: list[types.OptimStepResponse]) -> Mapping[str, float]:
                self.version += 1
                return {with_ending(key): float(x) for key, x in (results[0].metrics or {}).items()}

            return PendingResult([sent], finish)

        return send

    def _save(self, name: str, *, optimizer: bool, sampler: bool) -> Job[str]:
        check_label(name)
        metadata = metadata_of(self._seeds.entropy, self._seeds.count)

        def send() -> PendingResult[str]:
            unique = make_name(name, self._steps, optimizer=optimizer)
            sent = [self.training_client.save_state(unique, user_metadata=metadata).future()]
            if sampler:
                both = self.training_client.save_weights_for_sampler(unique, user_metadata=metadata)
                sent.append(both.future())
            return PendingResult(sent, lambda results: str(results[0].path))

        return send

    def _check_call(
        self,
        data: Sequence[Datum],
        loss: LossLike | None,
        config: Config | None,
        want: Sequence[str],
        *,
        backward: bool,
    ) -> Checked:
        if loss == "stable_reinforce":
            raise UnsupportedError(
                "the loss 'stable_reinforce' needs provenance spans, which a Datum does not have; send it with "
                "policy.training_client, or use 'importance_sampling' with rlkit.corrections"
            )
        checked = super()._check_call(data, loss, config, want, backward=backward)
        if self._off_temperature == "raise":
            for i, datum in enumerate(checked[0]):
                if datum.temperature not in (0.0, 1.0):
                    raise UnsupportedError(
                        f"data[{i}] was sampled at temperature {datum.temperature}, but the service trains only at 1; "
                        "sample at 1, or connect with off_temperature='rescore' (untempered logprobs) or 'keep'"
                    )
        return checked

    def _sampler(self, client: SamplingClient, version: int) -> TinkerSampler:
        return TinkerSampler(
            client,
            self._seeds,
            self._calls,
            tokenizer=self.tokenizer,
            max_length=self.max_length,
            version=version,
            off_temperature=self._off_temperature,
        )


def _has_failed(future: Inner[SamplingClient]) -> bool:
    """Return whether a shared snapshot failed, so that it is asked for anew."""
    return bool(future.done() and (future.cancelled() or future.exception() is not None))
