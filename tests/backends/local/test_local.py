"""The local backend conforms, on four architectures."""

from __future__ import annotations

import pytest

import rlkit
from rlkit.testing import BackendConformance

pytest.importorskip("peft")


class _Local(BackendConformance):
    kind = ""
    options: dict = {}

    @pytest.fixture(autouse=True)
    def _model(self, tiny):
        self.model = tiny(self.kind)

    def make(self, folder, **options):
        if "resume_from" not in options and "init_from" not in options:
            options["lora"] = rlkit.Lora(rank=4, train_unembed=True)
        return rlkit.connect("local", model=self.model, folder=folder, device="cpu", **self.options, **options)


class TestLlama(_Local):
    kind = "llama"


class TestLlamaUnmerged(_Local):
    kind = "llama"
    options = {"merge": False, "micro_batch_tokens": 16}


@pytest.mark.slow  # the same laws once more
class TestQwen3(_Local):
    kind = "qwen3"


@pytest.mark.slow  # the same laws once more
class TestGPT2(_Local):
    kind = "gpt2"


@pytest.mark.slow  # the same laws once more
class TestMistral(_Local):
    """A sliding window."""

    kind = "mistral"


@pytest.mark.slow  # the same laws once more
class TestFalcon(_Local):
    """Positions as a bias of the scores: sampled through the library's own cache."""

    kind = "falcon"
    exact = False
