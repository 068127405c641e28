"""The tests of ``rlkit doctor --device``: the conformance suite, and two comparisons with transformers and peft.

They train and sample a small random model in float32. ``TestDevice`` also runs in your own test suite::

    from rlkit.testing.device import TestDevice as _TestDevice

    class TestMyGpu(_TestDevice):
        device = "cuda:1"
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest

from rlkit import backends
from rlkit._runtime import ROOT
from rlkit.backends.protocol import TrainerBackend
from rlkit.testing.conformance import BackendConformance
from rlkit.types import Adam, Datum, Lora

if TYPE_CHECKING:
    import torch

__all__ = ["TestDevice", "run_tests", "write_model"]

# AdamW without moments and with an eps far above the gradient subtracts the gradient itself.
_SUBTRACT_GRADIENT = Adam(learning_rate=1e8, beta1=0.0, beta2=0.0, eps=1e8)


def run_tests(device: str) -> bool:
    """Run ``TestDevice`` with pytest, print its report, and return whether all tests passed.

    Args:
        device: a name that torch knows, such as "cuda:1".

    Raises:
        ConfigError: this machine has no such device.
    """
    from rlkit.backends.early import device_of

    TestDevice.device = str(device_of(device))
    # The configuration and the conftest.py of the folder that the user is in are those of other tests.
    options = ["-c", os.devnull, f"--rootdir={ROOT}", "--noconftest", "-p", "no:cacheprovider"]
    status = pytest.main(["--pyargs", __name__, *options, "-q", "--tb=short", "--disable-warnings"])
    return status == pytest.ExitCode.OK


def write_model(folder: Path, **shape: object) -> Path:
    """Write a Qwen3 model with random weights, and a tokenizer of bytes; return the folder.

    Args:
        folder: created if missing.
        shape: fields of ``transformers.Qwen3Config`` that differ from those of a model with two narrow layers.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from rlkit.backends.local.model.base import quiet

    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tiny |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 4096}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = transformers.Qwen3Config(**{**tiny, "tie_word_embeddings": False, **shape, **ids})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)  # logits far from uniform
    special = ["<|begin|>", "<|end|>"]
    vocabulary = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"bos_token": special[0], "eos_token": special[1], "pad_token": special[1]}
    with quiet():
        model.save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


class TestDevice(BackendConformance):
    """The conformance suite of the local backend on ``device``, and comparisons with transformers and peft there."""

    device: ClassVar[str] = "cpu"
    model: ClassVar[Path]

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        if not hasattr(TestDevice, "model"):
            TestDevice.model = write_model(tmp_path_factory.mktemp("model"))
        type(self).exact = self.device == "cpu"  # elsewhere sums depend on how many rows are computed at once

    def make(self, folder: Path, **options: object) -> TrainerBackend:
        """Make a backend with a LoRA on every linear layer and the head."""
        if not {"resume_from", "init_from"} & options.keys():
            options["lora"] = Lora(rank=4, train_unembed=True)
        place = {"model": str(self.model), "folder": folder, "device": self.device, "dtype": "float32"}
        return backends.connect("local", **place, **options)

    def test_logprobs_are_those_of_transformers(self, policy: TrainerBackend) -> None:
        """Otherwise losses and rewards belong to another model than the saved one."""
        data = self._train(policy)
        plain = self._load_plain(policy)
        for datum, found in zip(data, self.logprobs(policy, data), strict=True):
            expected = self._plain_logprobs(plain, datum).detach().cpu().numpy()
            np.testing.assert_allclose(found, expected, rtol=0, atol=self.tolerance)

    def test_gradient_is_that_of_peft(self, policy: TrainerBackend) -> None:
        """Otherwise training differs from that of other libraries. The bound is a part of the gradient's norm."""
        import torch

        data = self._train(policy)
        plain = self._load_plain(policy)
        before = self._read_adapter(policy)
        policy.forward_backward(data, "cross_entropy")
        policy.optim_step(_SUBTRACT_GRADIENT).result()
        after = self._read_adapter(policy)
        for datum in data:
            (-self._plain_logprobs(plain, datum).sum()).backward()
        pairs = [
            (before[key] - after[key], parameter.grad.cpu())
            for name, parameter in plain.named_parameters()
            if (key := name.replace(".default.", ".")) in before
        ]
        assert len(pairs) == len(before)
        found, expected = (torch.cat([x.double().flatten() for x in side]) for side in zip(*pairs, strict=True))
        assert float((found - expected).norm() / expected.norm()) < 1e-4

    def _train(self, policy: TrainerBackend) -> list[Datum]:
        """Take a step, after which no factor of the adapter is zero; return data of several lengths."""
        data = self.data(policy)
        self.trained(policy, data).result()
        return [Datum(datum.tokens, datum.mask) for datum in data]

    def _load_plain(self, policy: TrainerBackend) -> torch.nn.Module:
        """Load the policy with transformers and peft alone."""
        import peft
        import transformers

        path = policy.save("plain", optimizer=False).result()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peft about transformers, and about an adapter on the head
            base = transformers.AutoModelForCausalLM.from_pretrained(
                self.model, dtype="float32", trust_remote_code=False
            )
            plain = peft.PeftModel.from_pretrained(base, path, is_trainable=True, trust_remote_code=False)
        on_device: torch.nn.Module = plain.to(self.device)
        return on_device

    def _plain_logprobs(self, plain: torch.nn.Module, datum: Datum) -> torch.Tensor:
        import torch

        tokens = torch.tensor(datum.tokens.tolist(), device=self.device)
        logprobs = plain(input_ids=tokens[None, :-1]).logits[0].log_softmax(-1)
        mask = torch.tensor(datum.mask[1:].tolist(), device=self.device)
        chosen: torch.Tensor = logprobs.gather(1, tokens[1:, None])[:, 0][mask]
        return chosen

    @staticmethod
    def _read_adapter(policy: TrainerBackend) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        path = policy.save("adapter", optimizer=False).result()
        tensors: dict[str, torch.Tensor] = load_file(Path(path) / "adapter_model.safetensors")
        return tensors
