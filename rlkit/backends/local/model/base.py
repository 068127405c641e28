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
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import attrs
import numpy as np
import torch

from rlkit._runtime import warn
from rlkit.backends.early import device_of
from rlkit.backends.hub import hub_source
from rlkit.backends.local.attention.tree import Window, announced, context, layer_windows
from rlkit.backends.local.model.hub import hub_id, located, model_path
from rlkit.backends.local.model.memory import KVAccount
from rlkit.backends.local.model.probe import (
    LLAMA,
    PACKED,
    PADDED,
    is_causal,
    padding_leaks,
    short_text,
    trainable_linears,
)
from rlkit.backends.local.products import prepacked
from rlkit.backends.local.products.linear import fuse_weights
from rlkit.backends.local.products.prepacked import OneDNNWeight, PrepackedCopies, Weight, can_prepack, upcast
from rlkit.backends.tokenizers import BRINGS_CODE, LocalTokenizer, reason_of
from rlkit.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

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
        text: int64 [N], some ordinary tokens.
        linear: names of the linear modules that an adapter on has its effect.
        kv_account: who holds keys and values of it.
        copies: of weights that sampling multiplies by; see ``prepacked``.
    """

    path: str
    model: PreTrainedModel
    tokenizer: LocalTokenizer
    max_length: int
    device: torch.device
    text: np.ndarray
    linear: frozenset[str]
    kv_account: KVAccount = attrs.field(factory=KVAccount)
    copies: PrepackedCopies = attrs.field(factory=PrepackedCopies)

    def tree(self, attention: str | None = None) -> PreTrainedModel:
        """Return a copy of the module tree that shares the base's tensors, so that it costs no memory.

        Args:
            attention: name of the attention implementation that its forward uses; None is the library's choice.
        """
        shared = {id(x): x for x in [*self.model.parameters(), *self.model.buffers()]}
        tree: PreTrainedModel = copy.deepcopy(self.model, shared)
        if attention is not None:
            use_attention(tree, attention)
        return tree.eval()

    @cached_property
    def head(self) -> torch.Tensor:
        """Return the output embedding (``output_embedding``); made once: a copy takes as long as 100 rows' logits."""
        return output_embedding(self.model)

    @property
    def small(self) -> bool:
        """Return whether there is a second copy of its weights for sampling, see ``prepacked``."""
        return self.nbytes < COPIED_UNDER

    def prepacked(self, weight: torch.Tensor) -> Weight:
        """Return a weight of this model prepacked, one copy for all who sample; as it is if the model is not small."""
        if self.small:
            return self.copies.of(weight)
        return OneDNNWeight(weight, copy=False) if can_prepack(weight) else weight

    @property
    def kind(self) -> str:
        """Name of the architecture that reads text, as transformers has it."""
        return str(self.model.config.get_text_config().model_type)

    @property
    def windows(self) -> list[Window | None] | None:
        """Return ``layer_windows`` of the part that reads text."""
        return layer_windows(self.model.config.get_text_config())

    @property
    def layout(self) -> Literal["packed", "padded", "equal"]:
        """Return how the tokens of several sequences are computed together, as tests show of its architecture.

        "packed": training computes once what sequences begin with, and rows are decoded in slots. Else each sequence is
        a row: "padded" on the left while it is decoded, or only beside rows of "equal" length.
        """
        if self.kind in PACKED and self.windows is not None:
            return "packed"
        return "padded" if self.kind in PADDED and not padding_leaks(self.model) else "equal"

    @property
    def wide(self) -> bool:
        """Return whether its residual stream, norms and head are computed in float32 although it is in bfloat16."""
        return self.kind in LLAMA and self.model.dtype == torch.bfloat16

    @property
    def nbytes(self) -> int:
        """Return the size of the weights, each counted once."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())


def use_attention(model: PreTrainedModel, attention: str) -> None:
    """Make a model that is not shared compute with this attention implementation."""
    model.config._attn_implementation = attention  # noqa: SLF001  # no public switch for one tree


def output_embedding(model: PreTrainedModel) -> torch.Tensor:
    """Return [V, hidden] in float32 at least, or the model's own in bfloat16 where products with it are in float32."""
    weight: torch.Tensor = model.get_output_embeddings().weight.detach()
    if weight.dtype == torch.bfloat16 and prepacked.works(weight.device):
        return weight
    return upcast(weight)


_Key = tuple[str, tuple[tuple[str, int, int], ...], str, str]

_bases: weakref.WeakValueDictionary[_Key, Base] = weakref.WeakValueDictionary()
_loading = threading.Lock()


def check_dtype(dtype: str) -> None:
    """Raise ConfigError where a model cannot be loaded in ``dtype``."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: got {dtype!r}; expected one of {', '.join(map(repr, DTYPES))}")


def load_base(model: str, dtype: str, device: str | torch.device | None) -> Base:
    """Return the base model, from disk or shared with whoever has it already.

    Raises:
        ConfigError: it cannot be loaded, or computes something else than a causal language model does.
    """
    check_dtype(dtype)
    place = device_of(None if device is None else str(device))
    path = hub_source(model_path(model), "model", "config.json")
    with _loading:
        key = (*_on_disk(path), dtype, str(place))
        base = _bases.get(key)
        if base is None:
            base = _bases[key] = _load(model, path, dtype, place)
        return base


def _on_disk(path: str) -> tuple[str, tuple[tuple[str, int, int], ...]]:
    """Return what identifies the model at ``path``: the directory, and size and time of its files."""
    folder = Path(path)
    if not folder.is_dir():
        return path, ()
    files = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.suffix in READ_FROM]
    return str(folder.resolve()), tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)


@contextlib.contextmanager
def quiet() -> Iterator[ModuleType]:
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


def _load(name: str, path: str, dtype: str, device: torch.device) -> Base:
    try:
        with quiet() as transformers:
            place = {} if device.type == "cpu" else {"device_map": {"": device}}  # read straight to where it stays
            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
            _check_attention(config)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, config=config, trust_remote_code=False, dtype=DTYPES[dtype], **place
            )
            hf = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model.name_or_path = hub_id(located(path))  # which adapters name as their base: what other libraries can load
        model = model.eval().requires_grad_(False)
        fuse_weights(model)
        size = model.get_input_embeddings().num_embeddings
        tokenizer = LocalTokenizer(hf, vocab_size=size, eos_ids=_eos_ids(model, hf))
        max_length = context(model.config.get_text_config())
    except Exception as error:  # libraries raise whatever they like
        raise ConfigError(f"model {name!r} cannot be loaded as a causal language model: {reason_of(error)}") from error
    whole = announced(model.config.get_text_config())
    if whole is not None and max_length < whole:
        why = "beyond that, a token's logprob would depend on later tokens (longrope positions, sparse attention)"
        warn(f"model {name!r}: its context is limited to {max_length} tokens instead of {whole}; {why}")
    text = short_text(model, set(hf.added_tokens_decoder) | set(hf.all_special_ids), max_length)
    try:
        linear, causal = trainable_linears(model, text), is_causal(model, text)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model {name!r} cannot compute a text of {text.size} tokens: {reason}") from error
    if not causal:
        raise ConfigError(
            f"model {name!r} ({model.config.model_type}): its output for a token depends on later tokens or on other "
            "rows of the batch; expected a causal model, or a sampled token has no logprob to train on"
        )
    return Base(path, model, tokenizer, max_length, device, text, linear)


def _check_attention(config: PreTrainedConfig) -> None:
    """Raise ValueError where the model's files name a kernel on a hub, which is code, as their attention."""
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if "/" in str(getattr(each, "_attn_implementation", None)):
            raise ValueError(f"{BRINGS_CODE}: attn_implementation {each._attn_implementation!r}")  # noqa: SLF001


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ends: list[int] = []
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        ends += ids if isinstance(ids, list) else [ids] if ids is not None else []
    return sorted(set(ends))
