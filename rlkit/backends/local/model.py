"""The base model, read once and never written, and the trees of modules that share its tensors."""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from functools import cached_property
from typing import Any

import attrs
import torch
from torch import nn

from rlkit.backends.local.hub import model_path
from rlkit.backends.local.linear import wide
from rlkit.backends.local.llama import Llama, fuse_layers, is_llama, plain_attention
from rlkit.backends.local.logprobs import Unembedding
from rlkit.backends.local.tokenizer import LocalTokenizer
from rlkit.backends.local.tree import Run, TreeAttention
from rlkit.errors import ConfigError, UnsupportedError
from rlkit.types import Lora

__all__ = ["Base", "load_base", "lora_targets", "with_adapter"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@attrs.frozen(eq=False, weakref_slot=True)
class Base:
    """A frozen model and its tokenizer; every backend and sampler of this process on the same model shares it."""

    path: str
    model: nn.Module
    tokenizer: LocalTokenizer
    max_length: int
    device: torch.device
    llama: bool  # whether ``Llama`` computes what the library does

    def tree(self, attention: str | None = None) -> nn.Module:
        """A copy of the module tree whose tensors are the base's own, so that it costs no memory.

        Args:
            attention: name of the attention implementation that its forward uses; None is the library's choice.
        """
        shared = {id(x): x for x in [*self.model.parameters(), *self.model.buffers()]}
        tree = copy.deepcopy(self.model, shared)
        config: Any = tree.config
        if attention is not None:
            config._attn_implementation = attention  # noqa: SLF001  # no public switch for one tree
        config.pad_token_id = None  # rows are padded on the right and read by length; no warning about it
        return tree.eval()

    @cached_property
    def head(self) -> torch.Tensor:
        """The output embedding [V, hidden] in float32 at least; made once, as it takes as long as 100 rows' logits."""
        model: Any = self.model
        weight: torch.Tensor = model.get_output_embeddings().weight
        return wide(weight.detach())

    @property
    def nbytes(self) -> int:
        """Size of the weights, each counted once."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())


_bases: weakref.WeakValueDictionary[tuple[str, str, str], Base] = weakref.WeakValueDictionary()
_loading = threading.Lock()


def load_base(model: str, dtype: str, device: str) -> Base:
    """The base model, from disk or shared with whoever has it already."""
    import transformers

    if dtype not in DTYPES:
        raise ConfigError(f"dtype: got {dtype!r}; expected one of {', '.join(map(repr, DTYPES))}")
    path = model_path(model)
    with _loading:
        found = _bases.get((path, dtype, device))
        if found is not None:
            return found
        try:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype])
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model {model!r} can not be loaded as a causal language model: {error}") from error
        loaded = loaded.to(device).eval().requires_grad_(False)
        config = loaded.config.get_text_config()
        embedding = loaded.get_input_embeddings()
        base = Base(
            path=path,
            model=loaded,
            tokenizer=LocalTokenizer(
                tokenizer, vocab_size=embedding.num_embeddings, eos_ids=_eos_ids(loaded, tokenizer)
            ),
            max_length=int(getattr(config, "max_position_embeddings", None) or 2**20),
            device=torch.device(device),
            llama=_computes_alike(loaded),
        )
        _bases[path, dtype, device] = base
        return base


@torch.no_grad()
def _computes_alike(model: Any) -> bool:
    """Whether ``Llama`` gives the logits that the model's own forward gives, on a short probe."""
    if not (is_llama(model) and plain_attention(model.config)):
        return False
    device = model.device
    tokens = torch.arange(9, device=device) * (model.config.vocab_size // 9)
    expected = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    fuse_layers(model)
    llama = Llama(model, {}, 0.0)
    attention = TreeAttention([Run(0, 9)], llama.heads, llama.key_heads)
    hidden = llama.normed(llama.hidden(tokens, torch.arange(9, device=device), attention))
    gap = Unembedding(wide(model.get_output_embeddings().weight)).logits(hidden) - expected
    return bool(gap.norm() < expected.norm() * (1e-4 if model.dtype == torch.float32 else 0.1))


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    ends: list[int] = []
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        ends += found if isinstance(found, list) else [found] if found is not None else []
    return sorted(set(ends))


def lora_targets(model: nn.Module, lora: Lora) -> list[str]:
    """Full names of the linear modules that get an adapter.

    The output embedding is "unembed"; of the others, those on a path with "attn" or "attention" are attention, the
    rest is MLP.

    Raises:
        UnsupportedError: nothing matches.
    """
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linear = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and name}
    names = []
    for name, module in linear.items():
        if lora.target_modules is not None:
            wanted = any(name == t or name.endswith(f".{t}") for t in lora.target_modules)
        elif module is head:
            wanted = lora.train_unembed
        elif _unusable(model, name):
            wanted = False
        elif any("attn" in part or "attention" in part for part in name.split(".")):
            wanted = lora.train_attn
        else:
            wanted = lora.train_mlp
        if wanted:
            names.append(name)
    if not names:
        there = sorted({name.rpartition(".")[2] for name in linear})
        raise UnsupportedError(f"{lora}: the model has no such linear modules; it has: {', '.join(there)}")
    return names


def _unusable(model: nn.Module, name: str) -> bool:
    """A state-space mixer's kernel reads this weight past its module, and so past an adapter; peft refuses it."""
    parent, _, last = name.rpartition(".")
    return last == "out_proj" and hasattr(model.get_submodule(parent), "A_log")


def with_adapter(tree: nn.Module, lora: Lora, seed: int) -> Any:
    """``tree`` with a fresh LoRA as a peft model; the global random state is left as it was.

    A is uniform in +-1/sqrt(d_in) from ``seed``, B is zero, both float32. The head of a model with tied embeddings
    gets its adapter on the head alone.
    """
    import peft

    names = lora_targets(tree, lora)
    short = {name.rpartition(".")[2] for name in names}
    unambiguous = lora_targets(tree, Lora(target_modules=tuple(short))) == names
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(short) if unambiguous else names,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tied heads and Conv1D layers, both meant and both tested
        model = peft.get_peft_model(tree, config).eval()
    generator = torch.Generator().manual_seed(seed % 2**63)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if "lora_A" in name:
            bound = parameter.shape[1] ** -0.5
            drawn = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            parameter.data.copy_(drawn)
        else:
            parameter.data.zero_()
    return model
