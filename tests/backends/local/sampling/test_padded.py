"""Rows of models that are not decoded in slots: together what they are alone, and no more computed than need be."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

import rlkit
from tests.backends.local import white_box
from tests.models.families import FAMILIES
from tests.models.family import build

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
from rlkit.backends.local.model import base as base_module  # noqa: E402
from rlkit.backends.local.model.base import load_base  # noqa: E402
from rlkit.backends.local.model.memory import kv_bytes  # noqa: E402
from rlkit.backends.local.sampling import _padded  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*its experts get no adapter")
# Recurrences, convolutions and biases of positions that are padded; what is not; what has no cache.
KINDS = ["qwen3_5_text", "falcon_h1", "bloom", "gpt_neo", "mamba", "llama4_text", "recurrent_gemma", "minimax", "xlstm"]
ONE = rlkit.SamplingParams(max_tokens=1, stop=())
MORE = rlkit.SamplingParams(max_tokens=6, stop=())


@pytest.fixture
def connect(folders):
    """A policy of a kind, which has a decoder."""
    opened = []

    def connected(kind):
        lora = rlkit.Lora(rank=2, train_unembed=True)
        opened.append(rlkit.connect("local", model=folders(kind), lora=lora, seed=0, device="cpu"))
        opened[-1].sampler().result().sample([5], ONE).result()
        return opened[-1]

    yield connected
    for policy in opened:
        policy.close()


def computed(policy):
    """The shapes of tokens that are sent through the model, call by call from now on."""
    decoder, shapes = white_box.decoder(policy), []
    logits = decoder._logits
    decoder._logits = lambda batch, tokens: shapes.append(tokens.shape) or logits(batch, tokens)
    return shapes


def sample_all(policy, prompts, params=MORE, n=1):
    """Samples of prompts that are asked for at once."""
    sampler = policy.sampler().result()
    futures = [sampler.sample(prompt, params, n=n, seed=i) for i, prompt in enumerate(prompts)]
    return [sample for future in futures for sample in future.result()]


@pytest.mark.parametrize("kind", [*KINDS, "llama"])  # and one in slots
def test_rows_enter_and_leave(kind, connect):
    """Requests that come while others run, and that end early, get the tokens that they get alone."""
    policy = connect(kind)
    decoder, rng = white_box.decoder(policy), np.random.default_rng(0)
    sampler = policy.sampler().result()
    asked = [
        (rng.integers(3, 290, size), rlkit.SamplingParams(max_tokens=tokens, stop=tuple(range(3, stop))), n, seed)
        for seed, (size, tokens, stop, n) in enumerate(
            [(6, 30, 15, 3), (9, 20, 15, 2), (19, 12, 3, 2), (33, 40, 20, 2), (2, 9, 3, 4)]
        )
    ]
    futures, together, step = {}, [], decoder.step

    def ask():
        prompt, params, n, seed = asked[len(futures)]
        futures[seed] = sampler.sample(prompt, params, n=n, seed=seed)

    def entering():
        together.append(len({id(row.request) for row in decoder.rows}))
        if len(futures) < len(asked):
            ask()
        step()

    decoder.step = entering
    ask()
    ask()
    futures[0].result()
    samples = [futures[seed].result() for seed in range(len(asked))]
    decoder.step = step
    assert max(together) > 2
    for (prompt, params, n, seed), several in zip(asked, samples, strict=True):
        alone = sampler.sample(prompt, params, n=n, seed=seed).result()
        assert [s.tokens.tolist() for s in several] == [s.tokens.tolist() for s in alone]
        assert max(np.abs(a.logprobs - b.logprobs).max() for a, b in zip(several, alone, strict=True)) < 1e-5
    every = [sample for several in samples for sample in several]
    expected = policy.forward([sample.datum(1.0) for sample in every]).result().selected
    assert not decoder.rows  # the thread that decodes has done something else since
    assert max(np.abs(s.logprobs - lp).max() for s, lp in zip(every, expected, strict=True)) < 1e-4


@pytest.mark.parametrize(
    ("kind", "begun"),
    [
        ("bloom", [(3, 12)]),
        ("mamba", [(1, 12), (2, 8)]),
        ("recurrent_gemma", [(1, 12), (2, 8)]),
        ("minimax", [(1, 12), (2, 8)]),
    ],
)
def test_what_is_computed(kind, begun, connect):
    """A prompt once for all its rows; prompts of other lengths with it only where they may be padded."""
    policy = connect(kind)
    shapes = computed(policy)
    prompts = [np.arange(5 + i, 5 + i + size) for i, size in enumerate((8, 12, 8))]
    sample_all(policy, [*prompts, prompts[0]], rlkit.SamplingParams(max_tokens=2, stop=()), n=3)
    assert sorted(shapes[: len(begun)]) == begun
    rows = {12: 3, 8: 9} if len(begun) > 1 else {12: 12}
    cached = kind in ("bloom", "mamba")
    assert sorted(shapes[len(begun) :]) == sorted((n, 1 if cached else size + 1) for size, n in rows.items())


def test_prompts_of_one_batch_are_bounded(connect, monkeypatch):
    """By the tokens computed at once, padding included; a longer prompt is one by itself."""
    policy = connect("bloom")
    prompts = [np.arange(5, 5 + size) for size in (3, 4, 9, 11, 30)]
    expected = sample_all(policy, prompts)
    shapes = computed(policy)
    monkeypatch.setattr(_padded, "TOKENS", 22)
    assert [s.tokens.tolist() for s in sample_all(policy, prompts)] == [s.tokens.tolist() for s in expected]
    assert shapes[:3] == [(2, 4), (2, 11), (1, 30)]


def test_an_architecture_that_no_test_has(connect, monkeypatch):
    """It is right with rows of one length, and so is one whose layers have windows that the config does not tell."""
    expected = sample_all(connect("bloom"), [np.arange(5, 5 + n) for n in (3, 9, 9)])
    monkeypatch.setattr(base_module, "PADDED", frozenset())
    policy = connect("bloom")
    assert policy.base.layout == "equal"
    found = sample_all(policy, [np.arange(5, 5 + n) for n in (3, 9, 9)])
    assert [s.tokens.tolist() for s in found] == [s.tokens.tolist() for s in expected]
    gpt2 = connect("gpt2").base
    monkeypatch.setattr(gpt2.model.config, "layer_types", ["attention", "convolution"], raising=False)
    assert gpt2.layout == "equal"


def test_biases_before_convolutions(tmp_path):
    """Padding would be no padding behind them, and so it is not used; the same models without them are padded."""
    names = ("conv_bias", "mamba_proj_bias", "use_bias", "add_bias_linear", "attention_bias")
    kinds = ["lfm2", "lfm2_moe", "lfm3", "falcon_h1", "bamba", "mamba2", "granitemoehybrid", "nemotron_h", "zamba2"]
    found = {}
    for kind in [*kinds, "zamba", "jamba", "zaya"]:
        for bias in (False, True):
            family = FAMILIES[kind]
            family = attrs.evolve(family, settings=family.settings | dict.fromkeys(names, bias))
            base = load_base(str(build(family, tmp_path / f"{kind}{bias}")), "float32", "cpu")
            found[kind, bias] = base.layout
    wrong = {key: layout for key, layout in found.items() if layout != ("equal" if key[1] else "padded")}
    assert wrong == {}


def test_rows_that_ended_take_no_place(connect):
    """Nor memory: the cache has the others alone, and what they will take is known."""
    policy = connect("qwen3_5_text")
    decoder, sizes, room = white_box.decoder(policy), [], []
    step, each = decoder.step, kv_bytes(policy.base)

    def noted():
        room.append((decoder.held // each, decoder.reserved // each))
        step()
        sizes.append([(len(batch.rows), len(batch.cache.layers[1].keys)) for batch in decoder._batches])

    decoder.step = noted
    sampler = policy.sampler().result()
    futures = [
        sampler.sample(np.arange(5, 9 + n), rlkit.SamplingParams(max_tokens=n, stop=()), n=2) for n in (4, 6, 10)
    ]
    for future in futures:
        future.result()
    policy.sampler().result()  # and so the last step has ended
    assert [rows for batches in sizes for rows, _ in batches] == [6, 6, 4, 4, 2, 2, 2, 2]
    assert all(rows == cached for batches in sizes for rows, cached in batches)
    assert room[0] == (6 * 14, 6 * 24)
    assert room[-1] == (2 * 22, 2 * 24)


def test_nothing_is_left_of_what_failed(connect):
    """The next request is computed alone."""
    policy = connect("bloom")
    decoder = white_box.decoder(policy)
    logits = decoder._logits

    def broken(batch, tokens):
        if batch.columns:
            decoder._logits = logits
            raise RuntimeError("no memory")
        return logits(batch, tokens)

    decoder._logits = broken
    with pytest.raises(RuntimeError, match="no memory"):
        sample_all(policy, [[5, 6, 7]])
    shapes = computed(policy)
    sample_all(policy, [[5, 6]], n=2)
    assert shapes == [(1, 2)] + [(2, 1)] * 5
