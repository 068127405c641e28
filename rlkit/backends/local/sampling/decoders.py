"""What decodes a model: slots where tests show that its architecture is right in them, else the library's own cache."""

from __future__ import annotations

import logging
from functools import partial

from rlkit.backends.local.cache.kv_cache import ATTENTION
from rlkit.backends.local.cache.prefix_cache import Together
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.forward import SamplingForward
from rlkit.backends.local.model.probe import LLAMA
from rlkit.backends.local.sampling._batching import ContinuousBatching, CudaGraphs
from rlkit.backends.local.sampling._padded import PaddedDecoder
from rlkit.backends.local.sampling.scheduler import Decoder

__all__ = ["make_decoder"]

_log = logging.getLogger(__name__)


def make_decoder(base: Base, merge: bool, prefix_bytes: int, cuda_graphs: bool, together: Together) -> Decoder:
    """Return a decoder of the base's layout.

    Args:
        base: the model.
        merge: whether adapters are merged into copies of its weights.
        prefix_bytes: bytes kept of the keys and values of earlier sequences.
        cuda_graphs: whether decoding steps are CUDA graphs, on such a device.
        together: the prefix caches of other decoders, with which it shares those bytes.
    """
    decoder: Decoder
    if base.layout == "packed":
        forward, graphs = SamplingForward(base, base.tree(ATTENTION)), None
        if cuda_graphs and base.device.type == "cuda" and base.kind in LLAMA:
            graphs = partial(CudaGraphs, forward, base)
        decoder = ContinuousBatching(forward, base, prefix_bytes, merge=merge, beside=together, graphs=graphs)
    else:
        decoder = PaddedDecoder(base, merge=merge)
    base.kv_account.add(decoder)
    _log.info("decoding on %s: %s", base.device, type(decoder).__name__)
    return decoder
