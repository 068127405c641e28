"""Weights that are there only while they are used: gathered before a module computes, and before its backward pass.

A model whose weights are sharded over processes (``distributed/sharding.py``) has tensors as any other, but their
memory is there only between ``gather`` and ``release``; an operation that reads them outside raises. Gradients go
through a frozen weight without one of its own, so that nothing has to be scattered back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

__all__ = ["Upcast", "Weights", "call_gathered", "gather_around", "gathered", "shape_of", "weights_of"]

_NAME = "_rlkit_weights"


class Weights(Protocol):
    """Some tensors of a model. Both calls may be nested."""

    def gather(self) -> None:
        """Have them in memory until ``release``."""

    def release(self) -> None:
        """Need them no more."""


class Upcast:
    """A float32 copy of a weight that is gathered, there while it is used.

    Args:
        source: the weight.
        weights: what gathers it.

    Attributes:
        tensor: the copy.
    """

    def __init__(self, source: torch.Tensor, weights: Weights) -> None:
        self._source, self._weights, self._uses = source, weights, 0
        self.tensor = torch.empty(source.shape, dtype=torch.float32, device=source.device)
        self.tensor.untyped_storage().resize_(0)

    def gather(self) -> None:
        """See ``Weights``; the weight itself is released at once."""
        self._uses += 1
        if self._uses == 1:
            with gathered(self._weights):
                self.tensor.untyped_storage().resize_(4 * self.tensor.numel())
                self.tensor.data.copy_(self._source)  # past autograd, which may have saved it

    def release(self) -> None:
        """See ``Weights``."""
        self._uses -= 1
        if self._uses == 0:
            self.tensor.untyped_storage().resize_(0)


def weights_of(module: nn.Module) -> Weights | None:
    """Return what ``gather_around`` attached; None for a module whose weights are always there."""
    weights: Weights | None = vars(module).get(_NAME)
    return weights


def shape_of(weight: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the weight's shape, layout and dtype on "meta": the weight may go at any time."""
    return torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")


@contextlib.contextmanager
def gathered(weights: Weights | None) -> Iterator[None]:
    """While open, the weights are in memory."""
    if weights is None:
        yield
        return
    weights.gather()
    try:
        yield
    finally:
        weights.release()


def call_gathered(
    weights: Weights | None, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """Return ``function(x)``, which reads the weights, also in the backward pass."""
    if weights is None:
        return function(x)
    with gathered(weights):
        y = function(x)
    _gather_for_backward(weights, [x], [y])
    return y


def gather_around(module: nn.Module, weights: Weights) -> None:
    """Gather the weights whenever the module is called, and for its backward pass. Copies of the module do so too."""
    vars(module)[_NAME] = weights

    def before(_: nn.Module, __: tuple[object, ...]) -> None:
        weights.gather()

    def after(_: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], output: object) -> None:
        weights.release()
        _gather_for_backward(weights, _tensors([*args, *kwargs.values()]), _tensors([output]))

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, with_kwargs=True, always_call=True)


class _Hold:
    """Weights that are gathered for a backward pass: from the first gradient of an output to the last of an input.

    Args:
        weights: what is gathered.
        inputs, outputs: tensors of autograd, of one call.
    """

    _open: ClassVar[list[_Hold]] = []

    def __init__(self, weights: Weights, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self._weights = weights
        self._inputs, self._outputs = ({_place(x) for x in tensors} for tensors in (inputs, outputs))
        register_multi_grad_hook(outputs, self._begin, mode="any")
        if inputs:
            register_multi_grad_hook(inputs, lambda _: self._end(), mode="all")

    def _begin(self, _: torch.Tensor) -> None:
        if self in self._open:
            return
        for other in [hold for hold in self._open if hold._inputs and hold._inputs <= self._outputs]:  # noqa: SLF001
            other._end()  # noqa: SLF001  # their hooks on the same tensors were registered later, and so run later
        self._weights.gather()
        self._open.append(self)
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # noqa: SLF001  # as torch's FSDP does

    def _end(self) -> None:
        if self in self._open:
            self._open.remove(self)
            self._weights.release()


def _gather_for_backward(weights: Weights, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    above = [y for y in outputs if y.requires_grad]
    if above and torch.is_grad_enabled():
        _Hold(weights, [x for x in inputs if x.requires_grad], above)


def _place(x: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor is in the graph of autograd, without keeping that."""
    node = x.grad_fn
    return (-id(x), 0) if node is None else (node._sequence_nr(), x.output_nr)  # noqa: SLF001  # no public number


def _tensors(values: Iterable[object]) -> list[torch.Tensor]:
    """Return the tensors among them, also in tuples, lists and mappings."""
    flat: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            flat.append(value)
        elif isinstance(value, Mapping):
            flat += _tensors(value.values())
        elif isinstance(value, (tuple, list)):
            flat += _tensors(value)
    return flat
