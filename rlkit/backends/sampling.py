"""What every sampler in this process does alike: requests checked, seeds derived, tokens drawn, ends recognised."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit._forms import TokenIds
from rlkit.backends.protocol import Tokenizer
from rlkit.errors import ConfigError, DataError
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    import torch

__all__ = [
    "SeedStream",
    "Stop",
    "checked_prompt",
    "checked_request",
    "checked_targets",
    "draw",
    "entropy_of",
    "rounded_up",
    "streams",
]

_BLOCK = 256  # tokens
CANDIDATES = (1024, 8192)  # of the most probable tokens, what top_k and top_p keep is looked for among so many first


class SeedStream:
    """Seeds for requests that bring none: a function of the backend's seed and of how many came before."""

    def __init__(self, entropy: int, count: int = 0) -> None:
        self.entropy = entropy
        self.count = count
        self._lock = threading.Lock()

    def next(self) -> int:
        """Return the next request's seed."""
        with self._lock:
            count, self.count = self.count, self.count + 1
        words = np.random.SeedSequence(self.entropy, spawn_key=(1, count)).generate_state(4, np.uint32)
        return int.from_bytes(words.tobytes(), "little")


def entropy_of(seed: int | None) -> int:
    """``seed``, checked, or a fresh one from the system."""
    if seed is not None:
        return _check.integer("seed", seed, low=0)
    return int.from_bytes(np.random.SeedSequence().generate_state(4, np.uint32).tobytes(), "little")


def streams(seed: int, n: int) -> list[np.random.Generator]:
    """One generator per sample: number i draws from SeedSequence([seed, i]), one float64 uniform per token."""
    return [np.random.default_rng(np.random.SeedSequence([seed, i])) for i in range(n)]


def checked_prompt(where: str, tokens: TokenIds, vocab_size: int, max_length: int) -> np.ndarray:
    """int64 [1 <= P <= max_length], or a DataError naming the index."""
    array = _check.token_ids(where, tokens, vocab_size=vocab_size, low_length=1)
    if array.size > max_length:
        raise DataError(
            _check.problem(where, f"has {array.size} tokens", f"at most {max_length}", "the model's context")
        )
    return array


def checked_request(
    prompt: TokenIds, params: SamplingParams, n: int, seed: int | None, *, vocab_size: int, max_length: int
) -> np.ndarray:
    """Return the prompt, after all of ``sample``'s arguments were checked."""
    if not isinstance(params, SamplingParams):
        raise ConfigError(_check.problem("sample(params)", f"got {_check.shown(params)}", "rlkit.SamplingParams(...)"))
    _check.integer("sample(n)", n, low=1, why="how many completions")
    if seed is not None:
        _check.integer("sample(seed)", seed, low=0)
    if params.stop and not isinstance(params.stop[0], str):
        _check.token_ids("SamplingParams.stop", params.stop, vocab_size=vocab_size)
    array = checked_prompt("sample(prompt)", prompt, vocab_size, max_length)
    if array.size == max_length:
        what = f"has {array.size} tokens, all of the model's context"
        raise DataError(_check.problem("sample(prompt)", what, f"at most {max_length - 1}", "one token must fit"))
    return array


def checked_targets(targets: ArrayLike, size: int, vocab_size: int) -> np.ndarray:
    """Return the targets of ``target_logprobs`` as int64 [size, K].

    Raises:
        DataError: another shape, or ids outside of the vocabulary that are not -1.
    """
    where = "target_logprobs(targets)"
    array = _check.as_array(where, targets, "int [T, K]")
    if array.dtype.kind != "i" or array.ndim != 2 or len(array) != size or array.shape[1] == 0:
        raise DataError(_check.problem(where, f"is {_check.shown(array)}", f"int [{size}, K]"))
    if array.max() >= vocab_size or array.min() < -1:
        span = f"spans [{array.min()}, {array.max()}]"
        raise DataError(_check.problem(where, span, "ids of the vocabulary, or -1 for none"))
    return np.ascontiguousarray(array, np.int64)


class Stop:
    """Recognises the end of a completion.

    Args:
        stop: as in ``SamplingParams``.
        tokenizer: for the end tokens and for text.
    """

    def __init__(self, stop: tuple[str, ...] | tuple[int, ...] | None, tokenizer: Tokenizer) -> None:
        ids = [x for x in stop or () if isinstance(x, int)]
        self._ids = frozenset(ids) if stop == () else frozenset([*ids, *tokenizer.eos_ids])
        self._texts = [x for x in stop or () if isinstance(x, str)]
        # A token other than a special one stands for at least one byte; the rest is for tokens that join differently
        # at the start of a text.
        self._window = max((len(x.encode()) for x in self._texts), default=0) + 8
        self._tokenizer = tokenizer

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Whether the last of ``tokens`` ends the completion."""
        if tokens[-1] in self._ids:
            return True
        if not self._texts:
            return False
        text = self._tokenizer.decode(tokens[-self._window :], skip_special=False)
        return any(x in text for x in self._texts)


def draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One token per row, and its logprob under the distribution that it was drawn from.

    Args:
        logits: float tensor [B, V].
        params: one per row.
        uniforms: float64 [B] in [0, 1): row b takes the first token whose cumulated probability exceeds its share.

    Returns:
        int64 [B], float32 [B].

    A row's result depends on that row alone. top_k is applied before top_p, which keeps the smallest set of most
    probable tokens that reaches it, at least one.
    """
    import torch

    greedy = np.array([p.temperature == 0 for p in params])
    logits = logits.float()
    if any(p.temperature not in (0, 1) for p in params):
        logits = logits / torch.tensor([p.temperature or 1.0 for p in params], device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    cut = [b for b, p in enumerate(params) if p.truncates]
    if cut:
        logprobs[cut] = _truncated(logprobs[cut], [params[b].top_k for b in cut], [params[b].top_p for b in cut])
    if greedy.all():
        tokens = logprobs.argmax(-1)
    else:
        tokens = _drawn(logprobs.exp(), torch.from_numpy(uniforms).to(logits.device))
        for row in np.flatnonzero(greedy).tolist():
            tokens[row] = logprobs[row].argmax()
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.cpu().numpy(), chosen.cpu().numpy()


def _drawn(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """int64 [B]: the first token of each row [B, V] at which the cumulated probability exceeds u times its sum.

    The block of tokens is found first, then the place in it, so that little is added up in float64.
    """
    import torch

    blocks = torch.nn.functional.pad(probs, (0, -probs.shape[1] % _BLOCK)).view(len(probs), -1, _BLOCK)
    cumulated = blocks.sum(-1).double().cumsum(-1)
    nothing = torch.zeros_like(uniforms[:, None])
    share = torch.minimum(uniforms[:, None] * cumulated[:, -1:], torch.nextafter(cumulated[:, -1:], nothing))
    block = torch.searchsorted(cumulated, share, right=True)
    before = torch.nn.functional.pad(cumulated, (1, 0)).gather(1, block)
    within = blocks[torch.arange(len(probs), device=probs.device), block[:, 0]].double().cumsum(-1)
    below = torch.nextafter(within[:, -1:], nothing)  # the block's sum above was rounded otherwise
    place = torch.searchsorted(within, torch.minimum(share - before, below), right=True)
    return (block * _BLOCK + place)[:, 0]


def _truncated(logprobs: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """Logprobs [R, V] over what each row keeps, -inf elsewhere.

    The most probable ``CANDIDATES`` are looked at first; rows that may keep more are sorted as a whole. A row gets the
    same bits by either, since sums run from the most probable token on.
    """
    import torch

    size = logprobs.shape[1]
    k = torch.tensor([x if 0 < x < size else size for x in top_k], device=logprobs.device)
    p = torch.tensor([x if x < 1 else np.inf for x in top_p], dtype=torch.float64, device=logprobs.device)
    out, rest = logprobs, torch.arange(len(logprobs), device=logprobs.device)
    for count in [*(x for x in CANDIDATES if x < size), size]:
        found, enough = _kept(logprobs[rest], k[rest], p[rest], count)
        out = out.index_copy(0, rest, found)
        rest = rest[~enough]
        if not len(rest):
            break
    return out


def _kept(logprobs: torch.Tensor, k: torch.Tensor, p: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``_truncated`` of the ``count`` largest of each row, and whether nothing beyond them could be kept."""
    import torch

    size = logprobs.shape[1]
    if count == size:
        values, order = logprobs.sort(dim=-1, descending=True, stable=True)
    else:
        order = logprobs.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values  # of equal ones the first ids
        values, by = logprobs.gather(1, order).sort(dim=-1, descending=True, stable=True)
        order = order.gather(1, by)
    mass = values.double().exp().cumsum(-1)
    total = torch.where(k < size, mass.gather(1, k.clamp(max=count)[:, None] - 1)[:, 0], 1.0)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    keep = (torch.arange(count, device=k.device) < k[:, None]) & (before < (p * total)[:, None])
    keep[:, 0] = True
    last = keep.sum(-1, keepdim=True) - 1
    kept = (values - mass.gather(1, last).log()).to(values.dtype).masked_fill(~keep, -torch.inf)
    beyond = (values.gather(1, last) > values[:, -1:])[:, 0]  # strictly: an equal one may have been left out
    return torch.full_like(logprobs, -torch.inf).scatter_(1, order, kept), beyond & ((k <= count) | (k == size))


def rounded_up(x: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is >= x."""
    return -(-x // multiple) * multiple
