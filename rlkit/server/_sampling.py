"""Frozen policies, and what is asked of them: samples, and logprobs of prompts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import numpy as np
import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from tinker import types

from rlkit.backends.protocol import Sampler, TargetLogprobs, TopK
from rlkit.errors import DataError, UnsupportedError
from rlkit.server._losses import UNPUBLISHED
from rlkit.server._models import Snapshot
from rlkit.server._wire import answer, read, write_samples, write_tensor, write_top
from rlkit.types import OPTIONAL_OPTIONS, Sample, SamplingParams

if TYPE_CHECKING:
    from rlkit.server._app import Job, Service

__all__ = ["ENDPOINTS", "SamplerSession", "add_sampler"]


@attrs.define(eq=False)
class SamplerSession:
    """A frozen policy that a client samples from.

    Attributes:
        number: distinguishes its seeds from another sampler's.
        load: opens the policy, at its first use and when it was dropped; None for one that exists only here.
        base: it is the base model, which costs nothing.
        snapshot: the policy, if it is loaded.
    """

    sampler_id: str
    base_model: str
    model_path: str | None
    number: int
    load: Callable[[], Snapshot] | None
    base: bool
    snapshot: Snapshot | None
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    @property
    def session_id(self) -> str:
        """The session that made it."""
        return self.sampler_id.partition(":sample:")[0]

    def open(self) -> Snapshot:
        """Return the policy, loaded if it is not."""
        with self._lock:
            snapshot = self.snapshot  # another thread may drop it
            if snapshot is None and self.load is not None:
                snapshot = self.snapshot = self.load()
            if snapshot is None:
                raise DataError(_dropped(self.sampler_id))
            return snapshot


def _dropped(sampler_id: str) -> str:
    kept = "this server keeps the ones used last; save it under a name to have it loaded again"
    return f"sampler {sampler_id!r} is unknown or was dropped: {kept}"


def add_sampler(
    service: Service,
    sampler_id: str,
    base_model: str,
    path: str | None = None,
    *,
    load: Callable[[], Snapshot] | None = None,
    snapshot: Snapshot | None = None,
) -> None:
    """Keep a sampler under ``sampler_id``, with a function that opens its policy, or with the policy itself."""
    session_id, _, number = sampler_id.partition(":sample:")
    word = int(number) * 2**20 + service.find_session(session_id).number  # it may have ended since it was asked for
    base = load is not None and path is None
    service.samplers[sampler_id] = SamplerSession(sampler_id, base_model, path, word, load, base, snapshot)
    _drop_others(service)


def _drop_others(service: Service) -> None:
    """Drop the policies that were used longest ago, if there are too many."""
    loaded = [x for x in list(service.samplers.values()) if x.snapshot is not None and not x.base]
    for sampler in loaded[: max(len(loaded) - service.max_samplers, 0)]:
        sampler.snapshot = None
        if sampler.load is None:
            service.samplers.pop(sampler.sampler_id, None)


def _find_sampler(service: Service, sampler_id: str) -> SamplerSession:
    service.find_session(sampler_id.partition(":sample:")[0])
    sampler = service.samplers.pop(sampler_id, None)  # in one step: another thread may drop it
    if sampler is None:
        raise HTTPException(404, _dropped(sampler_id))
    service.samplers[sampler_id] = sampler  # the last one used
    return sampler


async def create_sampling_session(service: Service, request: Request) -> Response:
    """Make a sampler of a base model or of saved weights."""
    call = await read(request, types.CreateSamplingSessionRequest)
    sampler_id = f"{service.find_session(call.session_id).session_id}:sample:{call.sampling_session_seq_id}"
    if sampler_id not in service.samplers:
        base, handle = call.base_model, None
        if call.model_path is not None:
            state = service.saved.find(call.model_path, "sampler_weights")
            base, handle = state.base_model, state.handle
        elif base is None:
            raise DataError("create_sampling_session has neither model_path nor base_model")
        else:
            service.check_name(base)
        load = functools.partial(service.models.frozen, handle)
        add_sampler(service, sampler_id, base, call.model_path, load=load)
    return answer(types.CreateSamplingSessionResponse(sampling_session_id=sampler_id))


async def get_sampler(service: Service, request: Request) -> Response:
    """Return the description of a sampler."""
    sampler = _find_sampler(service, request.path_params["sampler_id"])
    about = {"base_model": sampler.base_model, "model_path": sampler.model_path}
    return answer(types.GetSamplerResponse(sampler_id=sampler.sampler_id, **about))


_Count = Annotated[int, pydantic.Field(ge=0)]
_OPTIONS: dict[str, Any] = {name: (float, value) for name, value in OPTIONAL_OPTIONS.items()}
_OPTIONS["seed"] = (Annotated[int, pydantic.Field(ge=0, lt=2**64)] | None, None)


class _SampleRequest(types.SampleRequest):  # type: ignore[misc]  # the SDK's types are not read
    """A request for samples, with rlkit's options, for which the SDK's type has no fields, and with bounds."""

    sampling_params: pydantic.create_model(  # type: ignore[valid-type]
        "SamplingParams", __base__=types.SamplingParams, **_OPTIONS
    )
    num_samples: Annotated[int, pydantic.Field(ge=1, le=4096)] = 1
    topk_prompt_logprobs: _Count = 0
    topk_sample_logprobs: _Count = 0


async def asample(service: Service, request: Request) -> Response:
    """Sample completions of a prompt, and compute the scores of it that are asked for."""
    call = await read(request, _SampleRequest)
    sampler = _find_sampler(service, call.sampling_session_id or "")
    key = (sampler.sampler_id, call.seq_id)

    def prepare() -> Job:
        params, prompt, targets = _check_sample_request(service, call)
        given = call.sampling_params.seed
        seed = service.derive_seed(1, sampler.number, call.seq_id or 0) if given is None else given

        def job() -> Response:
            snapshot = sampler.open()
            _drop_others(service)
            return _sample(call, snapshot.sampler, prompt, params, seed, targets)

        return job

    ids = [f"{sampler.sampler_id}:{call.seq_id}:{i}" for i in range(call.num_samples)]
    submit = lambda accepted: service.pool.submit(accepted.carry_out)  # noqa: E731
    return service.accept(key, "sample", prepare, submit, sample_sequence_ids=ids)


def _check_sample_request(
    service: Service, call: types.SampleRequest
) -> tuple[SamplingParams, np.ndarray, np.ndarray | None]:
    """Return how to sample, the prompt, and the ids whose logprobs are asked for [P, K]."""
    if call.record_stability_info:
        raise UnsupportedError(f"record_stability_info is for the loss 'stable_reinforce', which {UNPUBLISHED}")
    if call.prompt_alt_tokens_k:
        raise UnsupportedError("asample: prompt_alt_tokens_k is not offered by this server; use topk_prompt_logprobs")
    if any(chunk.type != "encoded_text" for chunk in call.prompt.chunks):
        raise DataError("asample: prompt has a chunk that is not encoded_text; this model reads text only")
    ids, last = call.prompt.to_ints(), call.prompt_logprobs_last_n
    if not ids or not all(0 <= x < 2**31 for x in ids):
        raise DataError(f"asample: prompt has {len(ids)} tokens; expected at least one, each an id >= 0")
    if last is not None and not (call.prompt_logprobs and 1 <= last <= len(ids) - 1):
        raise DataError(f"prompt_logprobs_last_n is {last}; expected 1 to {len(ids) - 1}, with prompt_logprobs")
    options = dict(call.sampling_params)
    del options["seed"]
    if isinstance(options["stop"], str):
        options["stop"] = [options["stop"]]
    if options["max_tokens"] is None:
        options["max_tokens"] = service.models.max_length
    return SamplingParams(**options), np.array(ids, np.int64), _read_targets(call.target_prompt_logprobs, len(ids))


def _read_targets(tensor: types.TensorData | None, size: int) -> np.ndarray | None:
    """Return int64 [P, K], -1 where nothing is asked for, as for the first token."""
    if tensor is None:
        return None
    where, shape = "asample: target_prompt_logprobs", tensor.shape or []
    if tensor.sparse_crow_indices is not None:
        raise UnsupportedError(f"{where} is sparse; expected a dense tensor: TensorData.from_numpy(ids)")
    values = np.array(tensor.data, np.int64) if all(-1 <= x < 2**31 for x in tensor.data) else np.zeros(0, np.int64)
    if len(shape) != 2 or shape[0] != size - 1 or values.size != np.prod(shape) or not (values >= 0).any():
        raise DataError(f"{where} has shape {shape}; expected [{size - 1}, K] ids, -1 for none, at least one")
    return np.concatenate([np.full((1, shape[1]), -1), values.reshape(shape)])


def _sample(
    call: types.SampleRequest,
    sampler: Sampler,
    prompt: np.ndarray,
    params: SamplingParams,
    seed: int,
    targets: np.ndarray | None,
) -> Response:
    size, last = prompt.size, call.prompt_logprobs_last_n
    unscored = 1 if last is None else size - last
    scored = sampler.logprobs(prompt) if call.prompt_logprobs else None
    if size < sampler.max_length or scored is None:
        samples = sampler.sample(prompt, params, n=call.num_samples, seed=seed).result()
    else:  # the prompt fills the context: it can be scored, and nothing can follow
        nothing = Sample(prompt, np.zeros(0, np.int64), np.zeros(0, np.float32), stop_reason="length")
        samples = [nothing] * call.num_samples
    message = write_samples(samples)
    if scored is not None:
        logprobs = np.array(scored.result(), np.float32)
        logprobs[:unscored] = np.nan
        message.prompt_logprobs = logprobs.tobytes()
    if call.topk_sample_logprobs:
        for sample, sequence in zip(samples, message.sequences, strict=True):
            ids, logprobs = _find_top(sampler, np.concatenate([prompt, sample.tokens]), call.topk_sample_logprobs)
            write_top(sequence.topk_sampled_logprobs, ids[size:], logprobs[size:])
    if call.topk_prompt_logprobs:
        ids, logprobs = _find_top(sampler, prompt, call.topk_prompt_logprobs)
        logprobs[:unscored] = np.nan
        write_top(message.topk_prompt_logprobs, ids, logprobs)
    if targets is not None:
        if not isinstance(sampler, TargetLogprobs):
            raise UnsupportedError(_NO_SCORES)
        write_tensor(message.target_prompt_logprobs, sampler.target_logprobs(prompt, targets).result()[1:])
    return answer(message)


_NO_SCORES = "this server's model gives only logprobs of the tokens, not top-k or target ones"


def _find_top(sampler: Sampler, tokens: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(sampler, TopK):
        raise UnsupportedError(_NO_SCORES)
    ids, logprobs = sampler.top_logprobs(tokens, min(k, sampler.tokenizer.vocab_size)).result()
    return ids, np.array(logprobs)


ENDPOINTS = {
    "POST create_sampling_session": create_sampling_session,
    "GET samplers/{sampler_id}": get_sampler,
    "POST asample": asample,
}
