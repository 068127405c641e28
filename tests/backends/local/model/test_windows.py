"""Sliding windows and chunks: right beyond their length, and as the config says."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from tests.models.families import FAMILIES
from tests.models.family import WINDOW, build

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from rlkit.backends.local.attention.tree import Window, layer_windows  # noqa: E402

NAMES = ["gemma3_text", "phi3, window", "mistral, window", "qwen3, window"]


def connect(name, folder):
    return rlkit.connect("local", model=build(FAMILIES[name], folder), lora=rlkit.Lora(rank=2), seed=0, device="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_numbers_beyond_the_window(name, tmp_path):
    """Those of the library, for rows behind one prompt that is longer than the window."""
    with connect(name, tmp_path) as policy:
        assert policy.base.layout == "packed"
        rng = np.random.default_rng(0)
        prompt, params = rng.integers(3, 290, 2 * WINDOW), rlkit.SamplingParams(max_tokens=2 * WINDOW - 1, stop=())
        sampler = policy.sampler().result()
        futures = [sampler.sample(prompt[:n], params, n=2, seed=n) for n in (3, WINDOW, 2 * WINDOW)]
        samples = [sample for future in futures for sample in future.result()]
        found = policy.forward([sample.datum(1.0) for sample in samples]).result().selected
        model = transformers.AutoModelForCausalLM.from_pretrained(policy.base.path).eval()
        for sample, logprobs in zip(samples, found, strict=True):
            tokens = torch.from_numpy(np.concatenate([sample.prompt, sample.tokens]))
            with torch.no_grad():
                every = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
            expected = every.gather(1, tokens[1:, None])[sample.prompt.size - 1 :, 0].numpy()
            assert np.abs(sample.logprobs - expected).max() < 1e-4
            assert np.abs(logprobs - expected).max() < 1e-4


def test_windows_of_configs():
    """As the config says, for the layers that it says; layers of other kinds make none of it."""
    made = transformers.AutoConfig.for_model
    shape = {"num_hidden_layers": 3, "max_position_embeddings": 64}
    assert layer_windows(made("mistral", sliding_window=8, **shape)) == [Window(8)] * 3
    assert layer_windows(made("mistral", sliding_window=64, **shape)) == [None] * 3
    assert layer_windows(made("mistral", sliding_window=None, **shape)) == [None] * 3
    assert layer_windows(made("qwen2", sliding_window=8, use_sliding_window=False, **shape)) == [None] * 3
    qwen = made("qwen3", sliding_window=8, use_sliding_window=True, max_window_layers=1, **shape)
    assert layer_windows(qwen) == [None, Window(8), Window(8)]
    llama4 = made("llama4_text", attention_chunk_size=8, no_rope_layer_interval=2, **shape)
    assert set(layer_windows(llama4)) == {Window(8, chunks=True), None}
    assert layer_windows(made("gpt2")) == [None] * 12
    assert layer_windows(made("lfm2", layer_types=["conv", "full_attention"], num_hidden_layers=2)) is None
