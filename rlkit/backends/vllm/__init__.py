"""vLLM as the sampler: a client of its wire format, and samplers over it."""

from __future__ import annotations

from rlkit.backends.vllm.client import VllmClient
from rlkit.backends.vllm.opening import open_sampler
from rlkit.backends.vllm.sampler import VllmSampler
from rlkit.backends.vllm.settings import Vllm

__all__ = ["Vllm", "VllmClient", "VllmSampler", "open_sampler"]
