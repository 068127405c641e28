"""Rows of hybrid and state-space models, decoded together through the library's cache."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from tests.backends.local import white_box
from tests.models.families import FAMILIES
from tests.models.family import build

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
from rlkit.backends.local.cache.prefix_cache import SequenceCache  # noqa: E402
from rlkit.backends.local.model.base import load_base  # noqa: E402
from rlkit.backends.local.model.probe import logits_at  # noqa: E402
from rlkit.backends.local.sampling._library import LibraryBatching  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*its experts get no adapter")
KINDS = ["qwen3_5_text", "falcon_h1", "lfm2", "mamba", "minimax", "bloom", "recurrent_gemma"]
ONE = rlkit.SamplingParams(max_tokens=1, stop=())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made: dict[str, str] = {}

    def folder(kind):
        if kind not in made:
            made[kind] = str(build(FAMILIES[kind], tmp_path_factory.mktemp(kind)))
        return made[kind]

    return folder


@pytest.fixture(params=KINDS)
def policy(request, folders):
    yield from connected(folders(request.param))


@pytest.fixture
def qwen(folders):
    yield from connected(folders("qwen3_5_text"))


def connected(folder, **options):
    with rlkit.connect(
        "local", model=folder, lora=rlkit.Lora(rank=2, train_mlp=True), seed=0, device="cpu", **options
    ) as policy:
        policy.sampler().result().sample([5], ONE).result()
        yield policy


def computed(policy):
    """How many tokens are sent through the model, and in how many rows, call by call from now on."""
    decoder, calls = white_box.decoder(policy), []
    decode = decoder.decode
    decoder.decode = lambda cache, tokens: calls.append(tokens.shape) or decode(cache, tokens)
    return calls


def test_rows_enter_and_leave(policy):
    """Requests that come while others run, and that end early, get the tokens that they get alone."""
    decoder, rng = white_box.decoder(policy), np.random.default_rng(0)
    sampler = policy.sampler().result()
    asked = [
        (rng.integers(3, 290, size), rlkit.SamplingParams(max_tokens=tokens, stop=tuple(range(3, stop))), n, seed)
        for seed, (size, tokens, stop, n) in enumerate([(6, 30, 15, 3), (19, 12, 3, 2), (33, 40, 20, 2), (2, 9, 3, 4)])
    ]
    futures, together, step = {0: sampler.sample(asked[0][0], asked[0][1], n=asked[0][2], seed=0)}, [], decoder.step

    def entering():
        together.append(len({id(row.request) for row in decoder.rows}))
        if len(futures) < len(asked):
            prompt, params, n, seed = asked[len(futures)]
            futures[seed] = sampler.sample(prompt, params, n=n, seed=seed)
        step()

    decoder.step = entering
    first = futures[0].result()
    samples = [first, *(futures[seed].result() for seed in range(1, len(asked)))]
    decoder.step = step
    assert max(together) > 1
    for (prompt, params, n, seed), several in zip(asked, samples, strict=True):
        alone = sampler.sample(prompt, params, n=n, seed=seed).result()
        assert [s.tokens.tolist() for s in several] == [s.tokens.tolist() for s in alone]
        assert max(np.abs(a.logprobs - b.logprobs).max() for a, b in zip(several, alone, strict=True)) < 1e-5
    data = [sample.datum(1.0) for several in samples for sample in several]
    expected = policy.forward(data).result().selected
    every = [sample for several in samples for sample in several]
    assert max(np.abs(s.logprobs - lp).max() for s, lp in zip(every, expected, strict=True)) < 1e-4


def test_a_prompt_is_computed_once(qwen):
    """Whoever asks for it, and how many times."""
    calls, sampler = computed(qwen), qwen.sampler().result()
    prompt = np.arange(5, 25)
    for future in [sampler.sample(prompt, ONE, n=3, seed=i) for i in range(2)]:
        future.result()
    again = sampler.sample(prompt, ONE, n=2, seed=1).result()
    assert calls == [(1, 20)]
    assert again[0].tokens.tolist() == sampler.sample(prompt, ONE, n=3, seed=1).result()[0].tokens.tolist()


def test_turns_continue_their_episode(qwen):
    """The next turn computes what is new in it, to the same numbers; a model that cannot continue computes it all."""
    sampler, rng = qwen.sampler().result(), np.random.default_rng(1)
    params = rlkit.SamplingParams(max_tokens=7, stop=())
    prompt = rng.integers(3, 290, 10)
    (turn,) = sampler.sample(prompt, params, seed=0).result()
    longer = np.concatenate([turn.prompt, turn.tokens, rng.integers(3, 290, 4)])
    calls = computed(qwen)
    (following,) = sampler.sample(longer, params, seed=1).result()
    assert calls[0] == (1, 5)  # the last token of the turn and four new ones
    white_box.decoder(qwen).prefix_cache.clear()
    (cold,) = sampler.sample(longer, params, seed=1).result()
    assert following.tokens.tolist() == cold.tokens.tolist()
    assert np.abs(following.logprobs - cold.logprobs).max() < 1e-5
    white_box.decoder(qwen).continues = False
    calls.clear()
    sampler.sample(np.append(longer, 9), params, seed=1).result()
    assert calls[0] == (1, longer.size + 1)


def test_prompts_of_one_length_are_computed_together(qwen):
    """Recurrences are not padded: others are computed by themselves."""
    calls, sampler = computed(qwen), qwen.sampler().result()
    prompts = [np.arange(5 + i, 5 + i + size) for i, size in enumerate((8, 12, 8, 8))]
    for future in [sampler.sample(prompt, ONE) for prompt in prompts]:
        future.result()
    assert sorted(calls) == [(1, 12), (3, 8)]


def test_memory_of_prefixes(qwen):
    """It is bounded, and given back with the snapshot."""
    decoder, sampler = white_box.decoder(qwen), qwen.sampler().result()
    sampler.sample(np.arange(5, 15), ONE).result()
    size = next(iter(decoder.prefix_cache.entries.values())).nbytes
    decoder.prefix_cache = SequenceCache(3 * size)
    for i in range(6):
        sampler.sample(np.arange(20 + i, 30 + i), ONE).result()
    assert 0 < sum(x.nbytes for x in decoder.prefix_cache.entries.values()) <= 3 * size
    decoder.prefix_cache = SequenceCache(size // 2)
    sampler.sample(np.arange(5, 15), ONE).result()
    assert not decoder.prefix_cache.entries


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_5_text", "zamba2", "falcon, alibi", "gemma2", "jamba"])
def test_rows_that_come_and_go(kind, folders):
    """Any order of rows that enter and leave gives the logits of transformers' own forward on each sequence."""
    base = load_base(folders(kind), "float32", "cpu")
    base.known.cache = None
    rng = np.random.default_rng(0)
    decoder = LibraryBatching(base, 0, merge=False)
    cache, rows, logits, expected = decoder.new_cache(), [], [], []
    for _ in range(40):
        if rows and rng.random() < 0.4:
            slot = int(rng.integers(len(rows)))
            cache.remove(slot)
            rows[slot] = rows[-1]
            rows.pop()
        if len(rows) < 6 and rng.random() < 0.6:
            prompt, count = rng.integers(3, 290, int(rng.integers(1, 40))), int(rng.integers(1, 3))
            begun = decoder.new_cache()
            decoder.decode(begun, prompt[None])
            cache.add(begun, [0] * count)
            rows += [prompt] * count
        if not rows:
            cache = decoder.new_cache()
            continue
        tokens = rng.integers(3, 290, len(rows))
        rows = [np.append(row, token) for row, token in zip(rows, tokens, strict=True)]
        logits.append(decoder.decode(cache, tokens[:, None]))
        expected += [logits_at(base.model, row[None], np.array([row.size - 1])) for row in rows]
    difference = (torch.cat(logits).log_softmax(-1) - torch.cat(expected).log_softmax(-1)).abs()
    assert difference.max() < 1e-3
    assert difference.mean() < 1e-5
