"""Sampling: the scheduler, continuous batching over a KV cache, prefix cache, CUDA graphs, and the sampler itself."""
