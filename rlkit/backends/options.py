"""The options of the local backend and critic, each declared, checked and described in one place.

Signatures, ``help``, the documentation's table and what a resumed run keeps come from there. Importing this imports
no torch, so ``connect`` refuses a wrong option at once.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import attrs
import numpy as np

from rlkit import _check
from rlkit.backends.samplers import SamplingEngine
from rlkit.backends.trainer import check_start_options
from rlkit.types import Lora

if TYPE_CHECKING:
    from rlkit.backends.local.distributed.settings import Processes
    from rlkit.backends.vllm.settings import Vllm

__all__ = ["LocalOptions", "ModelOptions", "describe", "takes"]

F = TypeVar("F", bound=Callable[..., object])


def _validator(check: Callable[[str, object], object]) -> Callable[[object, attrs.Attribute[Any], object], None]:
    """Return a validator of attrs that calls ``check`` with the name and the value, unless that is the default."""

    def validate(_: object, field: attrs.Attribute[Any], value: object) -> None:
        if value is not field.default:
            check(field.name, value)

    return validate


def _check_merge(name: str, merge: object) -> None:
    _check.require(isinstance(merge, (bool, np.bool_)) or merge == "auto", name, merge, "True, False or 'auto'")


DTYPES = ("float32", "bfloat16")  # of a base
_DTYPE = _validator(lambda where, value: _check.choice(where, value, DTYPES))
_COUNT = _validator(partial(_check.integer, low=1))
_AMOUNT = _validator(partial(_check.integer, low=0))
_FLAG = _validator(_check.flag)
_KEPT = {"kept": True}  # by a saved state: a run that is resumed has its value, where the user gives none


@attrs.frozen(kw_only=True)
class ModelOptions:
    """Options of language models trained in this process: those of the local backend and of the local critic.

    Args:
        model: "smollm2-135m-instruct", a directory, or a hub id; None is the one that a saved path was trained on.
        lora: the adapter; None is ``Lora()``, or the saved one's shape with ``resume_from`` or ``init_from``.
        seed: for adapter initialisation and sampling; None for a fresh one.
        folder: where ``save`` writes; None is ``rlkit-saves``.
        resume_from: a saved path: weights, optimizer, version and the stream of sampling seeds.
        init_from: a saved path: weights only.
        dtype: of the base, "float32" or "bfloat16"; the adapter and the logprobs are float32. "bfloat16" halves the
            memory, and is faster where the processor computes it. None is that of the run with ``resume_from``, else
            "bfloat16" on a GPU of CUDA that computes it and "float32" elsewhere.
        device: "cpu", "cuda", ...; None is "cuda" where there is one.
        micro_batch_tokens: tokens computed at once in training. A datum of more is a micro-batch of its own, which
            keeps only what goes into each layer, and computes layers again in the backward pass. None is that of the
            run with ``resume_from``, else 1,024 on a CPU, and on a GPU as many as fit into 40 % of the free memory,
            at most 16,384.

    Raises:
        ConfigError: an option is of the wrong type or out of range, or both saved paths are given.
    """

    opener: ClassVar[str] = "critic"  # what the user calls

    model: str | None = None
    lora: Lora | None = None
    seed: int | None = attrs.field(default=None, validator=_AMOUNT)
    folder: str | Path | None = None
    resume_from: str | None = None
    init_from: str | None = None
    dtype: str | None = attrs.field(default=None, validator=_DTYPE, metadata=_KEPT)
    device: str | None = None
    micro_batch_tokens: int | None = attrs.field(default=None, validator=_COUNT, metadata=_KEPT)

    def __attrs_post_init__(self) -> None:
        self.start()

    def start(self) -> tuple[str | None, bool]:
        """Return the saved path to start from, None for a new state; and whether its optimizer is resumed."""
        return check_start_options(self.opener, self.model, self.lora, self.folder, self.resume_from, self.init_from)

    def kept(self) -> dict[str, object]:
        """Return those that a saved state keeps."""
        return {x.name: getattr(self, x.name) for x in attrs.fields(type(self)) if "kept" in x.metadata}

    def resumed(self, state: Mapping[str, Any]) -> Self:
        """Return those of a run that goes on from a saved ``state``: where none was given, its own."""
        defaults = {x.name: x.default for x in attrs.fields(type(self))}
        missing = [name for name, value in self.kept().items() if value is defaults[name] and name in state]
        return attrs.evolve(self, **{name: state[name] for name in missing})


@attrs.frozen(kw_only=True)
class LocalOptions(ModelOptions):
    """The options of ``connect("local")``.

    Args:
        merge: sample with the adapter merged into a copy of its modules (True), added to their outputs (False), or
            merged for float32 models under 2 GB ("auto"). Merging into bfloat16 loses most of a small step.
        merged_copies: how many samplers of different weights have such a copy at once, each as large as the model's
            weights. If more take turns, copies are computed again, with a warning; samples stay the same.
            None is that of the run with ``resume_from``, else 1.
        max_rows: completions of one snapshot decoded at once at most; None is 256 on a GPU of CUDA and 64 elsewhere.
        prefix_mb: megabytes at most of the keys and values of earlier prompts and completions, from which prompts that
            begin like them are continued, as the turns of an episode do; 0 for none.
        cuda_graphs: on an NVIDIA GPU, launch decoding steps as recorded graphs; keys and values then keep their memory
            between requests. None is True there.
        sampler: what samples instead of this process, closed with the backend: "vllm", which starts a server in an
            environment of its own (``rlkit.backends.vllm.Vllm`` says which), the URL of one that runs, several, or an
            engine of yours. merge, merged_copies, max_rows, prefix_mb and cuda_graphs are of this process's sampling,
            and are refused with it.
        processes: how many train and sample together, this one included, each with the model; ``Processes`` has more
            options. None is as many as torchrun started, else 1. In torchrun's other processes this call serves the
            first one, and ends the program with it.
        shard: have each of ``processes`` hold a part of the base's weights, and gather a layer while it is used, for
            those that do not fit. Samples then need ``sampler``.
    """

    opener: ClassVar[str] = "connect"

    merge: bool | Literal["auto"] = attrs.field(default="auto", validator=_validator(_check_merge), metadata=_KEPT)
    merged_copies: int | None = attrs.field(default=None, validator=_COUNT, metadata=_KEPT)
    max_rows: int | None = attrs.field(default=None, validator=_COUNT)
    prefix_mb: int = attrs.field(default=512, validator=_AMOUNT)
    cuda_graphs: bool | None = attrs.field(default=None, validator=_FLAG)
    sampler: SamplingEngine | Vllm | str | Sequence[str] | None = None
    processes: int | Processes | None = None
    shard: bool = attrs.field(default=False, validator=_FLAG)

    def for_ranks(self) -> dict[str, object]:
        """Return what other processes open the same policy with, as JSON holds it."""
        here = ("seed", "folder", "resume_from", "init_from", "device", "sampler", "processes")
        return attrs.asdict(self, filter=lambda field, _: field.name not in here)


def takes(kind: type[ModelOptions]) -> Callable[[F], F]:
    """Decorate a function of ``**options``: its signature and its docstring have the fields of ``kind`` instead."""

    def add(function: F) -> F:
        signature, told = inspect.signature(function), []
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters += inspect.signature(kind).parameters.values()
        for name, text in describe(kind).items():
            told.append(textwrap.fill(f"{name}: {text}", 112, initial_indent=" " * 4, subsequent_indent=" " * 8))
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__doc__ = "\n".join([inspect.getdoc(function) or "Take these options.", "", "Args:", *told])
        return function

    return add


def describe(kind: type[ModelOptions]) -> dict[str, str]:
    """Return what the docstrings of the class, and of those that it extends, say about each field.

    >>> describe(LocalOptions)["device"]
    '"cpu", "cuda", ...; None is "cuda" where there is one.'
    """
    found: dict[str, str] = {}
    name = ""
    for each in reversed(kind.__mro__[:-1]):
        section = inspect.cleandoc(each.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
        for line in textwrap.dedent(section).splitlines():
            if line.startswith(" "):
                found[name] += f" {line.strip()}"
            else:
                name, _, text = line.partition(": ")
                found[name] = text
    return found
