"""vLLM as the sampler: a client of its ``/v1/completions``, and samplers over it."""

from __future__ import annotations

from rlkit.backends.vllm._client import VllmClient
from rlkit.backends.vllm._sampler import VllmSampler, open_sampler
from rlkit.backends.vllm.settings import Vllm

__all__ = ["Vllm", "VllmClient", "VllmSampler", "open_sampler"]
