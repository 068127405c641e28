"""The base model, read once and never written, and the trees of modules that share its tensors."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
import weakref
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np
import torch
from torch import nn

from rlkit.backends.local.gemm import mixed
from rlkit.backends.local.gemm.lora_linear import upcast
from rlkit.backends.local.gemm.prepacked import PrepackedCopies, Weight
from rlkit.backends.local.model.device import device_of, to_device
from rlkit.backends.local.model.gathering import Upcast, Weights, weights_of
from rlkit.backends.local.model.hub import located, model_path
from rlkit.backends.local.model.kv_account import KVAccount
from rlkit.backends.local.model.lengths import context
from rlkit.backends.local.model.llama import Llama, fuse_layers, is_llama
from rlkit.backends.local.model.output_head import Unembedding
from rlkit.backends.local.model.probe import FAILURES, SLOTS, Probe, causal, logits_at, probe_of, trainable_linears
from rlkit.backends.local.model.tree_attention import Segment, TreeAttention
from rlkit.backends.local.model.windows import layer_windows, shorten
from rlkit.backends.transformers_tokenizer import LocalTokenizer
from rlkit.errors import ConfigError

if TYPE_CHECKING:
    from rlkit.backends.local.distributed.sharding import ShardedWeights

__all__ = ["COPIED_UNDER", "PROCESS_WIDE", "Base", "check_dtype", "load_base", "use_attention"]

READ_FROM = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja"}  # config, weights, tokenizer
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COPIED_UNDER = 2 * 10**9  # bytes of a model that has a second copy for sampling; beyond, it takes longer than it saves
PROCESS_WIDE = threading.RLock()  # filters of warnings, and the random state


@attrs.frozen(eq=False, weakref_slot=True)
class Base:
    """A frozen model and its tokenizer; every backend and sampler of this process on the same model shares it.

    Attributes:
        max_length: tokens at most of a sequence that is trained or sampled.
        probe: tokens that ways to compute it are compared on.
        llama: whether ``Llama`` computes what the library does.
        linear: names of the linear modules that an adapter on has its effect.
        known: what was found out about it once, by whoever asked first.
        kv_account: who holds keys and values of it.
        shards: of its weights, where ranks share them out.
        copies: of weights that sampling multiplies by; see ``packed``.
    """

    path: str
    model: nn.Module
    tokenizer: LocalTokenizer
    max_length: int
    device: torch.device
    probe: Probe
    llama: bool
    linear: frozenset[str]
    known: dict[str, Any] = attrs.field(factory=dict)
    kv_account: KVAccount = attrs.field(factory=KVAccount)
    shards: ShardedWeights | None = None
    copies: PrepackedCopies = attrs.field(factory=PrepackedCopies)

    def tree(self, attention: str | None = None) -> nn.Module:
        """Return a copy of the module tree whose tensors are the base's own, so that it costs no memory.

        Args:
            attention: name of the attention implementation that its forward uses; None is the library's choice.
        """
        shared = {id(x): x for x in [*self.model.parameters(), *self.model.buffers()]}
        tree = copy.deepcopy(self.model, shared)
        if attention is not None:
            use_attention(tree, attention)
        return tree.eval()

    def trial(self, attention: str | None = None) -> nn.Module:
        """Return a ``tree`` for comparisons on the probe, whose windows are not longer than that says."""
        tree: Any = self.tree(attention)
        if self.probe.window is not None:
            shorten(tree.config.get_text_config(), self.probe.window)
        return cast("nn.Module", tree)

    @property
    def head(self) -> torch.Tensor:
        """The output embedding, see ``output_embedding``; made once, as a copy takes as long as 100 rows' logits."""
        return self._head[0]

    @property
    def head_weights(self) -> Weights | None:
        """What gathers ``head``."""
        return self._head[1]

    @cached_property
    def _head(self) -> tuple[torch.Tensor, Weights | None]:
        return output_embedding(self.model)

    @property
    def small(self) -> bool:
        """Whether there is a second copy of its weights for sampling, see ``packed``."""
        return self.shards is None and self.nbytes < COPIED_UNDER

    def packed(self, weight: torch.Tensor) -> Weight:
        """Return a weight of this model prepacked, one copy for all who sample; itself if the model is not small."""
        return self.copies.of(weight) if self.small else weight

    @property
    def plain(self) -> bool:
        """Whether it may do as a mask and positions say: nothing speaks against it, and whatever may can be tried."""
        model: Any = self.model
        config = model.config.get_text_config()
        tried = self.probe.beyond and (self.probe.exact or config.model_type in SLOTS)
        return tried and layer_windows(config) is not None

    @property
    def nbytes(self) -> int:
        """Size of the weights, each counted once."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())


def use_attention(model: Any, attention: str) -> None:
    """Let a model that nobody shares compute by this attention implementation."""
    model.config._attn_implementation = attention  # noqa: SLF001  # no public switch for one tree


def output_embedding(model: Any) -> tuple[torch.Tensor, Weights | None]:
    """Return [V, hidden] in float32 at least, or the model's own in bfloat16 where products with it are in float32.

    And what gathers it, where it is not always there.
    """
    module = model.get_output_embeddings()
    weight, weights = module.weight.detach(), weights_of(module)
    if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and mixed.works(weight.device)):
        return weight, weights
    if weights is None:
        return upcast(weight), None
    copied = Upcast(weight, weights)
    return copied.tensor, copied


_Key = tuple[str, tuple[tuple[str, int, int], ...], str, str]

_bases: weakref.WeakValueDictionary[_Key, Base] = weakref.WeakValueDictionary()
_loading = threading.Lock()


def check_dtype(dtype: str) -> None:
    """Raise ConfigError where a model cannot be loaded in ``dtype``."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: got {dtype!r}; expected one of {', '.join(map(repr, DTYPES))}")


def load_base(model: str, dtype: str, device: str | torch.device | None, shards: ShardedWeights | None = None) -> Base:
    """Return the base model, from disk or shared with whoever has it already; its weights into ``shards``, if given.

    Raises:
        ConfigError: it cannot be loaded, or computes something else than a causal language model does.
    """
    check_dtype(dtype)
    path, place = model_path(model), device_of(None if device is None else str(device))
    with _loading:
        if shards is not None:
            return _load(model, path, dtype, place, shards)
        key = (*_on_disk(path), dtype, str(place))
        base = _bases.get(key)
        if base is None:
            base = _bases[key] = _load(model, path, dtype, place)
        return base


def _on_disk(path: str) -> tuple[str, tuple[tuple[str, int, int], ...]]:
    """Return what identifies the model behind ``path``: the directory, and size and time of its files."""
    folder = Path(path)
    if not folder.is_dir():
        return path, ()
    files = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.suffix in READ_FROM]
    return str(folder.resolve()), tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)


@contextlib.contextmanager
def quiet() -> Iterator[Any]:
    """Import transformers, with no progress bar while it loads and no warning of missing notebook widgets."""
    with PROCESS_WIDE, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        import transformers

        shown = transformers.utils.logging.is_progress_bar_enabled()
        transformers.utils.logging.disable_progress_bar()
        try:
            yield transformers
        finally:
            if shown:
                transformers.utils.logging.enable_progress_bar()


def _load(name: str, path: str, dtype: str, device: torch.device, shards: ShardedWeights | None = None) -> Base:
    reader = None if shards is None else shards.reader()
    try:
        with quiet() as transformers, contextlib.nullcontext() if reader is None else reader.reading():
            # Read straight to where it stays, but for weights that are shared out.
            place = {} if device.type == "cpu" or shards is not None else {"device_map": {"": device}}
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], **place)
            hf = transformers.AutoTokenizer.from_pretrained(path)
        model.name_or_path = located(path)  # which adapters name as their base: what other libraries can load
        model = model.eval().requires_grad_(False)
        size = model.get_input_embeddings().num_embeddings
        tokenizer = LocalTokenizer(hf, vocab_size=size, eos_ids=_eos_ids(model, hf))
        max_length = context(model.config.get_text_config())
    except Exception as error:  # libraries raise whatever they like
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model {name!r} cannot be loaded as a causal language model: {reason}") from error
    if shards is not None and reader is not None:
        shards.shard(model, reader)
    probe = probe_of(model, set(hf.added_tokens_decoder) | set(hf.all_special_ids), max_length)
    try:
        linear = trainable_linears(model, probe)
        right = causal(model, probe)
    except FAILURES as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model {name!r} cannot compute a text of {probe.tokens.size} tokens: {reason}") from error
    if not right:
        raise ConfigError(
            f"model {name!r} ({model.config.model_type}): what it computes for a token depends on the tokens behind "
            "it, or on other rows beside; expected a causal model, or a sampled token has no logprob to train on"
        )
    base = Base(path, model, tokenizer, max_length, device, probe, False, linear, shards=shards)
    return attrs.evolve(base, llama=is_llama(model) and _llama_agrees(base))


@torch.no_grad()
def _llama_agrees(base: Base) -> bool:
    """Return whether ``Llama`` gives the logits that the model's own forward gives."""
    windows, probe = layer_windows(base.model.config), base.probe
    if windows is None or (any(windows) and not probe.beyond):
        return False
    if base.shards is None:  # which has them so already
        fuse_layers(base.model)
    model: Any = base.trial()
    expected = logits_at(model, probe.tokens[None], probe.places)
    llama = Llama(model, {}, 0.0)
    n = probe.tokens.size
    runs = [Segment(0, n)]
    attentions = [TreeAttention(runs, llama.heads, llama.key_heads, window) for window in llama.windows]
    tokens, positions, places = (to_device(x, model.device) for x in (probe.tokens, np.arange(n), probe.places))
    hidden = llama.hidden(tokens, positions, attentions, places)
    weight, weights = output_embedding(model)
    logits = Unembedding(weight, weights=weights).logits(hidden)
    return probe.agrees(logits, expected, slack=1 if probe.exact else 2)  # it rounds less often than the library does


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    ends: list[int] = []
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        ends += ids if isinstance(ids, list) else [ids] if ids is not None else []
    return sorted(set(ends))
