"""What ranks say to one another: a header of JSON, and tensors as they lie in memory. Nothing is pickled."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
import torch

from rlkit._seeds import streams
from rlkit.backends.local.attention.tree import Segment
from rlkit.backends.local.sampling.sampler import SampleRequest, ScoreRequest, Snapshot
from rlkit.backends.local.training.micro_batches import MicroBatch
from rlkit.backends.local.training.trainer import Inputs
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.requests import Stop
from rlkit.types import Sample, SamplingParams

__all__ = [
    "IDLE",
    "Part",
    "Request",
    "describe_error",
    "pack",
    "pack_inputs",
    "pack_request",
    "pack_result",
    "unpack",
    "unpack_inputs",
    "unpack_request",
    "unpack_result",
]

Part: TypeAlias = tuple[Mapping[str, Any], Sequence[torch.Tensor]]  # a header, and what belongs to it
IDLE: Part = ({}, [])
Request: TypeAlias = SampleRequest | ScoreRequest

_DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float32, torch.float64, torch.int64, torch.bool)}


def pack(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 [2], the bytes of the head and of the tensors, and uint8 [all of them].

    >>> sizes, flat = pack(({"order": "tick"}, [torch.arange(3)]))
    >>> unpack(sizes, flat)
    ({'order': 'tick'}, [tensor([0, 1, 2])])
    """
    header, tensors = part
    kinds = [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in tensors]
    head = torch.frombuffer(bytearray(json.dumps([header, kinds], default=np.generic.item).encode()), dtype=torch.uint8)
    bodies = [x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in tensors if x.numel()]
    flat = torch.cat([head, *bodies])
    return torch.tensor([head.numel(), flat.numel() - head.numel()]), flat


def unpack(sizes: torch.Tensor, flat: torch.Tensor) -> Part:
    """Return what was packed. Raises KeyError: a tensor of another dtype."""
    begin = int(sizes[0])
    header, kinds = json.loads(flat[:begin].numpy().tobytes())
    tensors = []
    for name, shape in kinds:
        end = begin + math.prod(shape) * _DTYPES[name].itemsize
        tensors.append(flat[begin:end].clone().view(_DTYPES[name]).reshape(shape))
        begin = end
    return header, tensors


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an error.

    >>> describe_error(ValueError("3 is too large")), describe_error(KeyboardInterrupt())
    ('ValueError: 3 is too large', 'KeyboardInterrupt')
    """
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def pack_inputs(inputs: Inputs) -> Part:
    """Return a micro-batch and what is to be read off it."""
    batch = inputs.batch
    runs = [[run.begin, run.end, [[x.start, x.stop] for x in run.before]] for run in batch.runs]
    given = [name for name, ids in inputs.wanted.items() if ids is not None]
    header = {"runs": runs, "wanted": list(inputs.wanted), "given": given, "warm": inputs.temperatures is not None}
    tensors = [_tensor(x) for x in (batch.tokens, batch.positions, batch.index)]
    tensors += [ids for ids in inputs.wanted.values() if ids is not None]
    return header, tensors if inputs.temperatures is None else [*tensors, inputs.temperatures]


def unpack_inputs(part: Part, device: torch.device) -> Inputs:
    """Return what ``pack_inputs`` was given; the members of the micro-batch stay where they are known."""
    header, (tokens, positions, index, *rest) = part
    runs = [Segment(begin, end, tuple(slice(*x) for x in before)) for begin, end, before in header["runs"]]
    batch = MicroBatch([], tokens.numpy(), positions.numpy(), runs, index.numpy())
    ids = dict(zip(header["given"], (x.to(device) for x in rest), strict=False))
    wanted = {name: ids.get(name) for name in header["wanted"]}
    return Inputs(batch, wanted, rest[-1].to(device) if header["warm"] else None)


def pack_request(request: Request) -> Part:
    """Return a request without its snapshot."""
    if isinstance(request, ScoreRequest):
        header = {"temperature": request.temperature, "top": request.top}
        return header, [_tensor(request.tokens), _tensor(request.ids)]
    shape = {"seed": request.seed, "n": len(request.rngs), "limit": request.limit}
    return {"params": attrs.asdict(request.params), **shape}, [_tensor(request.prompt)]


def unpack_request(part: Part, snapshot: Snapshot, tokenizer: Tokenizer) -> Request:
    """Return the request."""
    header, tensors = part
    first, *more = (x.numpy() for x in tensors)
    if "params" not in header:
        return ScoreRequest(snapshot, first, more[0], header["temperature"], header["top"])
    params = SamplingParams(**header["params"])
    stop, rngs = Stop(params.stop, tokenizer), streams(header["seed"], header["n"])
    return SampleRequest(snapshot, first, params, stop, rngs, header["limit"], header["seed"])


def pack_result(request: Request) -> Part:
    """Return what a request that has ended drew or scored, or its error."""
    error = request.future.exception()
    if error is not None:
        return {"error": describe_error(error)}, []
    if isinstance(request, ScoreRequest):
        return {}, [_tensor(x) for x in request.future.result()]
    samples = request.future.result()
    arrays = [x for sample in samples for x in (sample.tokens, sample.logprobs, sample.token_versions)]
    return {"reasons": [sample.stop_reason for sample in samples]}, [_tensor(x) for x in arrays]


def unpack_result(request: Request, part: Part) -> Any:
    """Return what the request's future is to hold."""
    header, tensors = part
    arrays = [x.numpy() for x in tensors]
    if isinstance(request, ScoreRequest):
        return tuple(arrays)
    samples = []
    for reason, tokens, logprobs, versions in zip(
        header["reasons"], arrays[::3], arrays[1::3], arrays[2::3], strict=True
    ):
        mixed = versions if (versions != versions[0]).any() else None
        drawn = request.params.sampling_options
        sample = Sample(request.prompt, tokens, logprobs, reason, version=int(versions[0]), versions=mixed, **drawn)
        samples.append(sample)
    return samples


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array))  # a copy: torch warns of arrays that nobody may write to
