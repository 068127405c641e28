"""Sampling: the scheduler, continuous batching and its decoders, CUDA graphs, scoring, and the sampler itself."""
