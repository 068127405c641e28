"""Checks of numbers: the local backend on a device against transformers and peft there, and against itself.

Each returns the measured distance and its bound. In bfloat16 the other side computes in float32 on the same rounded
weights, so that the bounds are those of the rounding.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from rlkit.backends import connect
from rlkit.backends.local.model.base import quiet
from rlkit.backends.protocol import TrainerBackend
from rlkit.errors import ConfigError
from rlkit.types import Adam, Datum, Lora, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["COMPARISONS", "KINDS", "SHAPES", "Comparison", "Setup", "build", "check_shape"]

SHAPES: dict[str, dict[str, int | bool]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1024,
        "tie_word_embeddings": False,
    },
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}

# Each runs other code: rlkit's own forward, the library's modules with windows, and with its cache.
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "Qwen3": ("qwen3", {}),
    "Gemma 3, windows": (
        "gemma3_text",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Qwen3.5, hybrid": (
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
}


def build(shape: str, folder: Path, *, kind: str = "Qwen3", layers: int | None = None) -> Path:
    """Write a model with random weights, and a tokenizer of bytes.

    Args:
        shape: a key of ``SHAPES``.
        folder: where to write it; it is created.
        kind: of architecture, a key of ``KINDS``.
        layers: another number of them.

    Raises:
        ConfigError: no such shape.
    """
    import transformers

    check_shape(shape)
    family, special = KINDS[kind]
    settings = SHAPES[shape] | special | ({} if layers is None else {"num_hidden_layers": layers})
    ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 2}
    config = transformers.AutoConfig.for_model(family, **settings, max_position_embeddings=4096, **ids)
    small = settings["hidden_size"] == SHAPES["tiny"]["hidden_size"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).to(
            torch.float32 if small else torch.bfloat16
        )
        if small:
            with torch.no_grad():
                for parameter in model.parameters():  # far from uniform
                    parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    with quiet():
        model.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
    return folder


def check_shape(shape: str) -> None:
    """Raise ConfigError where ``SHAPES`` has no shape of that name."""
    if shape not in SHAPES:
        raise ConfigError("shape", f"got {shape!r}", "one of " + ", ".join(SHAPES))


def _tokenizer() -> PreTrainedTokenizerFast:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|begin|>", "<|unknown|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=special[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"bos_token": special[0], "unk_token": special[1], "eos_token": special[2], "pad_token": special[2]}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


PROMPT = 12
LOGPROBS = {"float32": 1e-4, "bfloat16": 0.03}  # bounds by dtype
GRADIENTS = {"float32": 1e-4, "bfloat16": 0.1}  # as part of the gradient's norm
STEP = Adam(learning_rate=0.01)
# AdamW without moments, whose step is lr g / (|g| + eps): so two saves of an adapter tell the gradient between them.
TELLING = Adam(learning_rate=1e4, beta1=0.0, beta2=0.0, eps=1e4)


@attrs.frozen
class Setup:
    """A model's folder, a folder for saves, a device and a dtype."""

    model: Path
    folder: Path
    device: str
    dtype: str

    def connect(self, **options: object) -> TrainerBackend:
        """Make a backend with an adapter."""
        new = {} if {"resume_from", "init_from"} & options.keys() else {"lora": Lora(rank=4), "seed": 0}
        settings: dict[str, Any] = {"dtype": self.dtype, "device": self.device, **new, **options}
        return connect("local", model=str(self.model), folder=self.folder, **settings)


@attrs.frozen
class Comparison:
    """A comparison of two ways to compute the same numbers.

    Attributes:
        title: what is compared with what.
        otherwise: what it means for a user if they differ.
        distance: measures how far apart they are.
        bounds: dtype -> the largest distance that is right.
    """

    title: str
    otherwise: str
    distance: Callable[[Setup], float]
    bounds: Mapping[str, float] = LOGPROBS


COMPARISONS: list[Comparison] = []


def _compares(
    title: str, otherwise: str, bounds: Mapping[str, float] = LOGPROBS
) -> Callable[[Callable[[Setup], float]], Callable[[Setup], float]]:
    def add(distance: Callable[[Setup], float]) -> Callable[[Setup], float]:
        COMPARISONS.append(Comparison(title, otherwise, distance, bounds))
        return distance

    return add


def _data() -> list[Datum]:
    """Return two groups of completions of unequal lengths, each after its own prompt."""
    rng = np.random.default_rng(0)
    data = []
    for size in (PROMPT, 5):
        prompt = rng.integers(3, 250, size)
        data += [Datum.supervised(prompt, rng.integers(3, 250, n)) for n in (20, 7, 33)]
    return data


def _trained(policy: TrainerBackend) -> None:
    """Take one step, after which no factor of the adapter is zero."""
    policy.forward_backward(_data(), "cross_entropy").result()
    policy.optim_step(STEP).result()


def _gradients(policy: TrainerBackend) -> dict[str, torch.Tensor]:
    """Return the gradient of ``_data`` by every parameter of the adapter, from what a step changes."""
    before = policy.save("before", optimizer=False).result()
    policy.forward_backward(_data(), "cross_entropy").result()
    policy.optim_step(TELLING).result()
    after = _tensors(policy.save("after", optimizer=False).result())
    gradients = {}
    for name, tensor in _tensors(before).items():
        change = tensor.double() - after[name].double()
        gradients[name] = TELLING.eps * change / (TELLING.learning_rate - change.abs())
    return gradients


def _tensors(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(Path(path) / "adapter_model.safetensors")
    return tensors


def _plain(at: Setup, path: str) -> torch.nn.Module:
    """Load the same adapter in peft alone, in float32, on weights that are rounded to the dtype."""
    import peft

    with quiet() as transformers, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of one library about the other
        load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, trust_remote_code=False)
        model = at.model if at.dtype == "float32" else at.folder / f"rounded-{at.dtype}"
        if not model.exists():
            load(at.model, dtype=getattr(torch, at.dtype)).save_pretrained(model)
        base = load(model, dtype=torch.float32)
        plain: torch.nn.Module = peft.PeftModel.from_pretrained(
            base, path, is_trainable=True, trust_remote_code=False
        ).to(at.device)
    return plain


def _plain_logprobs(plain: torch.nn.Module, datum: Datum, device: str) -> torch.Tensor:
    tokens = torch.from_numpy(np.array(datum.tokens)).to(device)
    logprobs = torch.log_softmax(plain(input_ids=tokens[None, :-1]).logits[0].float(), -1)
    chosen = logprobs.gather(1, tokens[1:, None])[:, 0]
    return chosen[torch.from_numpy(datum.mask[1:].copy()).to(device)]


def _apart(a: Iterable[np.ndarray], b: Iterable[np.ndarray], dtype: str) -> float:
    """Return the largest distance of logprobs; in bfloat16 the mean, as a few rare tokens have the largest."""
    distances = np.abs(np.concatenate(list(a)).astype(np.float64) - np.concatenate(list(b)).astype(np.float64))
    return float(distances.max() if dtype == "float32" else distances.mean())


def _off(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the distance of all gradients together, relative to their norm."""
    names = sorted(expected)
    a, b = (torch.cat([x[name].double().cpu().flatten() for name in names]) for x in (found, expected))
    return float((a - b).norm() / b.norm())


@_compares(
    "logprobs of the trainer, against those of transformers with the same adapter in peft",
    "losses and rewards belong to another model than the saved one",
)
def _forward(at: Setup) -> float:
    with at.connect() as policy:
        _trained(policy)
        found = policy.forward(_data()).result().selected
        plain = _plain(at, policy.save("plain", optimizer=False).result())
    with torch.no_grad():
        expected = [_plain_logprobs(plain, datum, at.device).cpu().numpy() for datum in _data()]
    return _apart(found, expected, at.dtype)


@_compares(
    "gradient of a batch, against plain peft's, one text at a time",
    "training differs from that of other libraries",
    GRADIENTS,
)
def _gradient(at: Setup) -> float:
    with at.connect() as policy:
        _trained(policy)
        path = policy.save("plain", optimizer=False).result()
        found = _gradients(policy)
    plain = _plain(at, path)
    for datum in _data():
        (-_plain_logprobs(plain, datum, at.device).sum()).backward()
    expected = {name.replace(".default.", "."): p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return _off(found, expected)


@_compares(
    "logprobs of samples, against the trainer's of the same tokens", "ratios differ from 1 before the first step"
)
def _sampler(at: Setup) -> float:
    params = SamplingParams(max_tokens=24, stop=())
    with at.connect() as policy:
        _trained(policy)
        with policy.sampler().result() as sampler:
            futures = [sampler.sample(range(3, 3 + n), params, n=4, seed=n) for n in (PROMPT, 3, 40)]
            samples = [sample for future in futures for sample in future.result()]
        found = policy.forward([sample.datum(1.0) for sample in samples]).result().selected
    return _apart(found, [sample.logprobs for sample in samples], at.dtype)


@_compares(
    "gradient in micro-batches of 30 tokens, against one micro-batch", "results depend on micro_batch_tokens", GRADIENTS
)
def _micro_batches(at: Setup) -> float:
    with at.connect() as policy:
        _trained(policy)
        path = policy.save("trained", optimizer=False).result()
    results = []
    for tokens in (30, 1024):
        with at.connect(micro_batch_tokens=tokens, init_from=path) as policy:
            results.append(_gradients(policy))
    return _off(*results)


@_compares(
    "logprobs of a sampler after an optimizer step, against its own before the step",
    "a step changes the snapshot that is sampled",
)
def _snapshot(at: Setup) -> float:
    with at.connect() as policy:
        before = policy.sampler().result()
        scores = [before.logprobs(range(3, 60)).result()]
        _trained(policy)
        scores.append(before.logprobs(range(3, 60)).result())
        after = policy.sampler().result().logprobs(range(3, 60)).result()
    if np.allclose(after, scores[0], atol=1e-6):
        raise AssertionError("the sampler after a step gives the same as the one before it")
    return _apart(scores[:1], scores[1:], at.dtype)


@_compares(
    "logprobs after save, resume and a step, against those after the same step without a break",
    "a resumed run gives other results",
)
def _resumed(at: Setup) -> float:
    with at.connect() as policy:
        _trained(policy)
        path = policy.save("resumed").result()
        _trained(policy)
        expected = policy.forward(_data()).result().selected
    with at.connect(resume_from=path) as policy:
        _trained(policy)
        found = policy.forward(_data()).result().selected
    return _apart(found, expected, at.dtype)


@_compares(
    "logprobs of a sample drawn while others are decoded, against the same sample drawn alone",
    "samples depend on concurrent requests",
)
def _company(at: Setup) -> float:
    """Compare the scores of one text alone and while others are decoded."""
    params = SamplingParams(max_tokens=40, stop=())
    with at.connect() as policy, policy.sampler().result() as sampler:
        alone = sampler.sample(range(3, 30), params, seed=1).result()[0]
        others = [sampler.sample(range(4, 4 + n), params, n=3, seed=n) for n in (5, 50, 90)]
        beside = sampler.sample(range(3, 30), params, seed=1).result()[0]
        for other in others:
            other.result()
    same = alone.tokens == beside.tokens
    begin = same.size if np.all(same) else int(np.argmin(same))  # rounding may choose another token, and go on from it
    if begin == 0:
        return 0.0
    return _apart([alone.logprobs[:begin]], [beside.logprobs[:begin]], at.dtype)
