"""Endpoints: frozen policies, samples, logprobs of prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol, cast

import attrs
import numpy as np

from rlkit.backends.protocol import Sampler, TargetLogprobs, TopK
from rlkit.errors import UnsupportedError
from rlkit.server import _wire
from rlkit.server._adapter import BackendSnapshot
from rlkit.server._losses import UNKNOWN
from rlkit.server._state import SamplerSession, ServerState, endpoint, post
from rlkit.server._wire import ApiError, Fields, Request, Response
from rlkit.types import OPTIONAL_OPTIONS, SamplingParams

__all__ = ["new_sampler"]


@post("create_sampling_session")
def create_sampling_session(state: ServerState, request: Request) -> Response:
    """Make a sampler of a base model or of saved weights."""
    fields = request.fields()
    session = state.session(fields.text("session_id"))
    number = fields.integer("sampling_session_seq_id", low=0)
    path, base = fields.text("model_path", None), fields.text("base_model", None)
    sampler_id = f"{session.session_id}:sample:{number}"
    if sampler_id not in state.samplers:
        if path is not None:
            checkpoint = state.checkpoints.find(path, "sampler_weights")
            new_sampler(state, sampler_id, checkpoint.base_model, path, lambda: state.models.frozen(checkpoint.handle))
        elif base is not None:
            new_sampler(state, sampler_id, state.base(base), None, lambda: state.models.frozen(None), base=True)
        else:
            raise ApiError(400, "create_sampling_session has neither model_path nor base_model")
    return Response.json({"type": "create_sampling_session", "sampling_session_id": sampler_id})


def new_sampler(
    state: ServerState,
    sampler_id: str,
    base_model: str,
    path: str | None,
    read: Callable[[], BackendSnapshot],
    *,
    again: bool = True,
    base: bool = False,
) -> None:
    """Keep a sampler under ``sampler_id``, and free the least recently used ones."""
    session_id, _, number = sampler_id.partition(":sample:")
    with state.lock:
        word = int(number) * 2**20 + state.sessions[session_id].number
        state.samplers[sampler_id] = SamplerSession(sampler_id, base_model, path, word, read, again, base)
        of_session = [s for s in state.samplers.values() if s.session_id == session_id]
        for old in of_session[: max(len(of_session) - state.max_samplers, 0)]:
            state.let_go(old)


@endpoint("GET", "samplers/{sampler_id}")
def get_sampler(state: ServerState, request: Request, sampler_id: str) -> Response:
    """Return the description of a sampler."""
    sampler = _sampler(state, sampler_id)
    shown = {"sampler_id": sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}
    return Response.json(shown)


@post("asample")
def asample(state: ServerState, request: Request) -> Response:
    """Sample completions of a prompt, and compute the requested scores of it."""
    fields = request.fields()
    sampler = _sampler(state, fields.text("sampling_session_id"))
    state.session(sampler.session_id)
    seq_id = fields.integer("seq_id", low=0)
    key = (sampler.sampler_id, seq_id)
    if (known := state.futures.known(key)) is not None:
        return known.answer
    asked = _asked(state, fields, sampler, seq_id)
    ids = [f"{sampler.sampler_id}:{seq_id}:{i}" for i in range(asked.n)]

    def job() -> Response:
        snapshot = sampler.snapshot()
        state.trim()
        body = asked.answer(snapshot, raw=state.raw_logprobs)
        state.done("sample", sampler.sampler_id, seq_id)
        return Response.proto(body)

    return state.futures.accept(key, "sample", state.pool.submit, job, sample_sequence_ids=ids)


@attrs.frozen(eq=False)
class _Asked:
    """A checked sample request."""

    prompt: np.ndarray
    params: SamplingParams
    n: int
    seed: int
    prompt_logprobs: bool
    last: int | None
    prompt_top: int
    sample_top: int
    targets: _wire.Matrix | None
    alternatives: int

    def answer(self, snapshot: BackendSnapshot, *, raw: bool) -> bytes:
        """Return the SampleResponse."""
        sampler, size = snapshot.sampler, self.prompt.size
        scored = sampler.logprobs(self.prompt) if self.prompt_logprobs else None
        if size < sampler.max_length or scored is None:
            drawn = sampler.sample(self.prompt, self.params, n=self.n, seed=self.seed).result()
            samples = [_wire.Sampled(s.tokens, s.logprobs, s.stop_reason == "stop") for s in drawn]
        else:  # the prompt fills the context: it can be scored, and nothing can follow
            samples = [_wire.Sampled(np.zeros(0), np.zeros(0), stop=False)] * self.n
        if raw or self.sample_top:
            samples = [self._with_more(snapshot, s, raw=raw) for s in samples]
        logprobs = None
        if scored is not None:
            logprobs = np.array(scored.result(), np.float32)
            logprobs[: self._unscored] = np.nan
        prompt_top, targets, alternatives = None, None, None
        if self.prompt_top:
            prompt_top = _top(sampler, self.prompt, self.prompt_top)
            prompt_top.logprobs[: self._unscored] = np.nan
        if self.targets is not None:
            none = np.full((1, self.targets.values.shape[1]), -1)  # for the first token
            asked = np.concatenate([none, self.targets.values])
            targets = (self.targets, _scores(sampler).target_logprobs(self.prompt, asked).result()[1:])
        if self.alternatives:
            alternatives = self._alternatives(_top(sampler, self.prompt, sampler.tokenizer.vocab_size))
        return _wire.write_samples(samples, logprobs, prompt_top, targets, alternatives)

    @property
    def _unscored(self) -> int:
        return 1 if self.last is None else self.prompt.size - self.last

    def _with_more(self, snapshot: BackendSnapshot, sample: _wire.Sampled, *, raw: bool) -> _wire.Sampled:
        whole = np.concatenate([self.prompt, sample.tokens]).astype(np.int64)
        if raw:
            logprobs = snapshot.sampler.logprobs(whole).result()[self.prompt.size :]
            sample = attrs.evolve(sample, logprobs=logprobs)
        if not self.sample_top:
            return sample
        top = _top(snapshot.sampler, whole, self.sample_top)
        return attrs.evolve(
            sample, top=_wire.TopLogprobs(top.ids[self.prompt.size :], top.logprobs[self.prompt.size :])
        )

    def _alternatives(self, whole: _wire.TopLogprobs) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, 2**32]))
        rows = whole.logprobs[1:]
        cooled = rows.astype(np.float64) / (self.params.temperature or 1e-6)
        cumulated = np.exp(cooled - cooled.max(-1, keepdims=True)).cumsum(-1)
        shares = rng.random((len(rows), self.alternatives)) * cumulated[:, -1:]
        drawn = (cumulated[:, None, :] <= shares[:, :, None]).sum(-1)
        return np.take_along_axis(whole.ids[1:], drawn, 1), np.take_along_axis(rows, drawn, 1)


class _Scores(TopK, TargetLogprobs, Protocol):
    """A sampler with scores of more than the tokens themselves."""


def _scores(sampler: Sampler) -> _Scores:
    if not isinstance(sampler, TopK) or not isinstance(sampler, TargetLogprobs):
        what = "only logprobs of the tokens, not top-k, target or alternative ones"
        raise UnsupportedError(f"this server's model gives {what}")
    return cast("_Scores", sampler)


def _top(sampler: Sampler, tokens: np.ndarray, k: int) -> _wire.TopLogprobs:
    ids, logprobs = _scores(sampler).top_logprobs(tokens, min(k, sampler.tokenizer.vocab_size)).result()
    return _wire.TopLogprobs(ids, np.array(logprobs))


def _sampler(state: ServerState, sampler_id: str) -> SamplerSession:
    sampler = state.samplers.get(sampler_id)
    if sampler is None:
        state.session(sampler_id.partition(":sample:")[0])
        what = (
            f"is unknown or was dropped: this server keeps the {state.max_samplers} last used samplers of a session, "
            f"and {state.sampler_bytes // 10**6} MB of all sessions; save it under a name to have it loaded again"
        )
        raise ApiError(404, f"sampler {sampler_id!r} {what}")
    state.samplers.move_to_end(sampler_id)
    return sampler


def _asked(state: ServerState, fields: Fields, sampler: SamplerSession, seq_id: int) -> _Asked:
    prompt = _tokens(fields)
    params = fields.object("sampling_params")
    seed = params.integer("seed", None, low=0, high=2**64 - 1)
    if fields.flag("record_stability_info", False):
        raise ApiError(400, f"record_stability_info is for the loss 'stable_reinforce', which {UNKNOWN}")
    last = fields.integer("prompt_logprobs_last_n", None)
    prompt_logprobs = fields.flag("prompt_logprobs", False)
    if last is not None and not (prompt_logprobs and 1 <= last <= prompt.size - 1):
        raise ApiError(400, f"prompt_logprobs_last_n is {last}; expected 1 to {prompt.size - 1}, with prompt_logprobs")
    return _Asked(
        prompt=prompt,
        params=_params(params, state.models.max_length),
        n=fields.integer("num_samples", 1, low=1, high=4096),
        seed=state.seed(1, sampler.number, seq_id) if seed is None else seed,
        prompt_logprobs=prompt_logprobs,
        last=last,
        prompt_top=fields.integer("topk_prompt_logprobs", 0, low=0),
        sample_top=fields.integer("topk_sample_logprobs", 0, low=0),
        targets=_targets(fields, prompt.size),
        alternatives=fields.integer("prompt_alt_tokens_k", 0, low=0),
    )


def _tokens(fields: Fields) -> np.ndarray:
    ids: list[int] = []
    for chunk in fields.object("prompt").items("chunks"):
        if (
            not isinstance(chunk, dict)
            or chunk.get("type") != "encoded_text"
            or not isinstance(chunk.get("tokens"), list)
        ):
            raise ApiError(400, "asample: prompt has a chunk that is not encoded_text; this model reads text only")
        ids += chunk["tokens"]
    if not ids or not all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**31 for x in ids):
        raise ApiError(400, f"asample: prompt has {len(ids)} tokens; expected at least one, each an id >= 0")
    return np.array(ids, np.int64)


def _params(fields: Fields, max_length: int) -> SamplingParams:
    stop = fields.get("stop")
    if isinstance(stop, str):
        stop = (stop,)
    try:
        return SamplingParams(
            max_tokens=fields.integer("max_tokens", max_length),
            temperature=float(fields.real("temperature", 1.0)),
            top_p=float(fields.real("top_p", 1.0)),
            top_k=fields.integer("top_k", -1),
            stop=None if stop is None else tuple(cast("Iterable[str]", stop)),
            **{name: float(fields.real(name, neutral)) for name, neutral in OPTIONAL_OPTIONS.items()},
        )
    except (ValueError, TypeError) as error:
        raise ApiError(400, f"asample: sampling_params: {error}") from error


def _targets(fields: Fields, size: int) -> _wire.Matrix | None:
    tensor = fields.object("target_prompt_logprobs", None)
    if tensor is None:
        return None
    where = "asample: target_prompt_logprobs"
    values, shape = _ints(where, tensor.items("data")), _ints(where, tensor.items("shape")).tolist()
    rows, columns = tensor.items("sparse_crow_indices", None), tensor.items("sparse_col_indices", None)
    if rows is not None and columns is not None:
        matrix = _wire.Matrix.sparse(where, values, _ints(where, rows), _ints(where, columns), shape, fill=-1)
    elif min(shape, default=-1) >= 0 and values.size == math.prod(shape):
        matrix = _wire.Matrix(values.reshape(shape))
    else:
        raise ApiError(400, f"{where} has {values.size} values for the shape {shape}")
    values = matrix.values
    if values.ndim != 2 or values.shape[0] != size - 1 or not (values >= 0).any() or values.min(initial=0) < -1:
        raise ApiError(400, f"{where} has shape {shape}; expected [{size - 1}, K] ids, -1 for none, at least one")
    return matrix


def _ints(where: str, values: list[object]) -> np.ndarray:
    if not all(isinstance(x, int) and not isinstance(x, bool) and abs(x) < 2**62 for x in values):
        raise ApiError(400, f"{where}: expected lists of integers")
    return np.array(values, np.int64)
