"""A policy that is updated while its requests run, in every way in which a model is decoded."""

from __future__ import annotations

import inspect
import time

import attrs
import numpy as np
import pytest

import rlkit
from rlkit.backends.protocol import LiveSampler, LiveSampling
from tests.backends.live import PROMPT, Updating, step
from tests.backends.local import white_box

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
import transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*its experts get no adapter")
ONE = rlkit.SamplingParams(max_tokens=1, stop=())
LONG = rlkit.SamplingParams(max_tokens=60, stop=())
BEGINNING = np.arange(20, 60)  # of three blocks of the prefix cache, less a token
WAYS = ["llama", "mistral, window", "gemma2", "bloom", "mamba", "qwen3_5_text", "minimax_m3_vl_text", "openai-gpt"]


def connected(folder, **options):
    return rlkit.connect(
        "local", model=folder, lora=rlkit.Lora(rank=4, train_unembed=True), seed=0, device="cpu", **options
    )


def begun(policy, at, *, recompute=False):
    """A live sampler whose decoder is there, and what updates it."""
    live = policy.live_sampler(recompute=recompute).result()
    updating = Updating(policy, live, at)
    live.sample([5], ONE).result()
    decoder = white_box.decoder(policy)
    decoder.step = updating(decoder.step)
    return live, updating


def wide(folder, snapshot):
    """The library's own model in float64, with the snapshot's adapter in its weights.

    Experts compute in float32. So does RecurrentGemma: its recurrence takes sqrt(1 - a^2) of an a close to 1, which
    loses digits, and the library's own logprobs in float32 and in float64 are up to 3e-3 apart.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if model.config.model_type != "recurrent_gemma" and not any("expert" in name for name, _ in model.named_modules()):
        model = model.double()
    for name, (a, b) in snapshot.adapter.items():
        module = model.get_submodule(name)
        delta = b.double() @ a.double() * snapshot.scale
        weight = module.weight + (delta if isinstance(module, torch.nn.Linear) else delta.T).to(module.weight.dtype)
        module.weight = torch.nn.Parameter(weight)  # a tied head is untied by that
    return model


@torch.no_grad()
def one_cache(models, sample):
    """Logprobs of the tokens, each by its version's model, over one cache that all of them go on with."""
    cache, out = None, []
    ids = torch.tensor(sample.prompt.tolist())[None]
    for token, version in zip(sample.tokens, sample.token_versions, strict=True):
        model = models[version]
        name = "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"
        output = model(input_ids=ids, use_cache=True, **({} if cache is None else {name: cache}))
        cache = output[name]
        out.append(float(output.logits[0, -1].log_softmax(-1)[token]))
        ids = torch.tensor([[token]])
    return np.array(out)


@torch.no_grad()
def anew(models, sample):
    """Logprobs of the tokens, each by its version's model, which computes the whole text."""
    text = torch.from_numpy(np.concatenate([sample.prompt, sample.tokens]))[None]
    rows = {v: model(input_ids=text, use_cache=False).logits[0].log_softmax(-1) for v, model in models.items()}
    first = sample.prompt.size
    pairs = zip(sample.tokens, sample.token_versions, strict=True)
    return np.array([float(rows[v][first + i - 1, token]) for i, (token, v) in enumerate(pairs)])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", WAYS)
def test_tokens_and_their_versions(folders, kind, recompute):
    """Two updates in one request: each token has the logprob of the weights, and the cache, that drew it.

    With ``recompute`` these are the version's own; a cache that is kept holds what older weights computed.
    """
    with connected(folders(kind)) as policy:
        live, updating = begun(policy, {4: 1, 20: 2}, recompute=recompute)
        assert isinstance(policy, LiveSampling)
        assert isinstance(live, LiveSampler)
        group = live.sample(PROMPT, LONG, n=3, seed=3)
        other = live.sample(BEGINNING, LONG, seed=4)
        samples = [*group.result(), *other.result()]
        frozen = {v: s if v == 1 else s.result() for v, s in updating.frozen.items()}
        models = {v: wide(folders(kind), s.snapshot) for v, s in frozen.items()}
        whole = kind in ("openai-gpt", "minimax_m3_vl_text")  # which have no cache from which rows can be taken
        for sample in samples:
            assert {*sample.token_versions.tolist()} == {1, 2, 4}
            own = anew(models, sample)
            expected = own if recompute or whole else one_cache(models, sample)
            np.testing.assert_allclose(sample.logprobs, expected, atol=3e-3)
            if recompute:
                updating.check(sample, atol=3e-3)
            elif not whole:
                assert np.abs(expected - own).max() > 1e-2


@pytest.mark.parametrize("kind", ["llama", "bloom", "qwen3_5_text"])
def test_computed_anew_without_the_longest_row(folders, kind):
    """Which the others were padded to."""
    with connected(folders(kind)) as policy:
        live, updating = begun(policy, {10: 1}, recompute=True)
        futures = [live.sample(x, attrs.evolve(LONG, max_tokens=n), seed=n) for x, n in ((BEGINNING, 5), (PROMPT, 40))]
        short, sample = (future.result()[0] for future in futures)
        assert {*short.token_versions.tolist()} == {1}
        assert {*sample.token_versions.tolist()} == {1, 2}
        updating.check(sample, atol=2e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mamba"])
@pytest.mark.parametrize("merge", [True, False])
def test_merged_and_unmerged(folders, kind, merge):
    with connected(folders(kind), merge=merge) as policy:
        live, updating = begun(policy, {4: 1, 9: 1}, recompute=True)
        for sample in live.sample(BEGINNING, LONG, n=2, seed=1).result():
            assert {*sample.token_versions.tolist()} == {1, 2, 3}
            updating.check(sample, atol=2e-4)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_what_is_cached_is_the_newest_policys(folders, kind, recompute):
    """Prompts that begin alike, before an update, during it, and behind it: as without any cache."""
    with connected(folders(kind)) as policy:
        live, updating = begun(policy, {4: 1}, recompute=recompute)
        live.sample(BEGINNING, ONE).result()  # its blocks are kept, under version 1
        updating.calls = 0
        params = rlkit.SamplingParams(max_tokens=50, stop=())
        (mixed,) = live.sample(BEGINNING, params, seed=0).result()
        assert {*mixed.token_versions.tolist()} == {1, 2}
        text = np.concatenate([mixed.prompt, mixed.tokens])  # of which the older weights computed a part
        frozen = updating.frozen[2].result()
        for prompt in (BEGINNING, text[:70], text, text[:-1]):
            for mine, theirs in zip(
                *(s.sample(prompt, ONE, n=2, seed=2).result() for s in (live, frozen)), strict=True
            ):
                assert (mine.version, mine.versions) == (2, None)
                assert mine.tokens.tolist() == theirs.tokens.tolist()
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=2e-5)


def test_rows_that_share_a_prompt_across_an_update(tmp_path):
    """Attention reads what rows share once: those with the older keys and values apart from those with the newer."""
    from tests.models.build import build as plain

    folder = str(plain("llama", tmp_path, max_length=512))
    prompt = np.random.default_rng(0).integers(3, 250, 300)
    params = rlkit.SamplingParams(max_tokens=80, stop=())
    with connected(folder, prefix_mb=0) as policy:
        live, updating = begun(policy, {3: 1})
        behind = []
        updating.then = lambda: behind.append(live.sample(prompt, params, n=2, seed=2))
        older = live.sample(prompt, params, n=2, seed=1).result()
        newer = behind[0].result()
        models = {1: wide(folder, updating.frozen[1].snapshot), 2: wide(folder, updating.frozen[2].result().snapshot)}
        for sample in (*older, *newer):
            np.testing.assert_allclose(sample.logprobs, one_cache(models, sample), atol=2e-3)
        assert all(s.versions is not None for s in older)
        assert all((s.version, s.versions) == (2, None) for s in newer)


def test_rows_of_a_group_that_wait(folders):
    """Members of a group that had no room before the update begin under the newer policy."""
    with connected(folders("llama"), max_rows=2) as policy:
        live, updating = begun(policy, {3: 1}, recompute=True)
        samples = live.sample(PROMPT, LONG, n=5, seed=0).result()
        assert [s.version for s in samples] == [1, 1, 2, 2, 2]
        for sample in samples:
            updating.check(sample, atol=2e-4)


def test_without_an_update_it_is_a_snapshot(folders):
    """To the bit, whatever runs beside it; an update where nothing was trained does nothing."""
    with connected(folders("llama")) as policy:
        live, frozen = policy.live_sampler().result(), policy.sampler().result()
        assert live.update().result() == 0
        samplers = [live, frozen]
        beside = frozen.sample(BEGINNING, LONG, n=3)
        first, second = (s.sample(PROMPT, LONG, n=3, seed=1) for s in samplers)
        for a, b in zip(first.result(), second.result(), strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.logprobs.tobytes() == b.logprobs.tobytes()
        assert beside.result()


def test_snapshots_beside_it_stay(folders):
    """With requests of their own running while the live sampler's weights are replaced."""
    with connected(folders("llama")) as policy:
        frozen, base = policy.sampler().result(), policy.base_sampler().result()
        texts = [BEGINNING, np.array(PROMPT)]
        before = [s.logprobs(text).result() for s in (frozen, base) for text in texts]
        expected = frozen.sample(PROMPT, LONG, n=2, seed=5).result()
        live, _ = begun(policy, {3: 1, 9: 1})
        running = live.sample(PROMPT, LONG, n=2, seed=5)
        beside = frozen.sample(PROMPT, LONG, n=2, seed=5).result()
        assert {*running.result()[0].token_versions.tolist()} == {1, 2, 3}
        for a, b in zip(beside, expected, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.logprobs.tobytes() == b.logprobs.tobytes()
        after = [s.logprobs(text).result() for s in (frozen, base) for text in texts]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("stop", ["string", "id"])
def test_stops_across_an_update(folders, stop):
    """A stop string or token that is complete behind the update ends the sample there."""
    with connected(folders("llama")) as policy:
        live, _ = begun(policy, {6: 1})
        (free,) = live.sample(PROMPT, LONG, seed=2).result()
        at = int(np.flatnonzero(free.token_versions == 2)[3])
        ends = (int(free.tokens[at]),) if stop == "id" else (policy.tokenizer.decode(free.tokens[at - 1 : at + 1]),)
        params = rlkit.SamplingParams(max_tokens=60, stop=ends)
        (sample,) = live.sample(PROMPT, params, seed=2).result()
        text = policy.tokenizer.decode(sample.tokens, skip_special=False)
        stopped = sample.tokens[-1] == ends[0] if stop == "id" else ends[0] in text
        assert stopped == (sample.stop_reason == "stop")


def test_cancelled_in_an_update(folders):
    """A request that nobody waits for any more when the weights change goes; the others go on."""
    with connected(folders("llama")) as policy:
        live, _ = begun(policy, {})
        gone, stays = live.sample(PROMPT, LONG, n=2), live.sample(PROMPT, LONG, seed=1)
        scheduler_step, updates = white_box.decoder(policy).step, []

        def cancelling():
            if not updates:
                step(policy)
                updates.append(live.update())
                assert gone.cancel()
            elif not updates[0].done():  # training and tokens share the time; the update comes while there are tokens
                time.sleep(0.03)
            scheduler_step()

        white_box.decoder(policy).step = cancelling
        with pytest.raises(rlkit.RequestCancelled):
            gone.result()
        assert stays.result()[0].tokens.size == 60
        assert live.version == 2


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_that_cannot_be_loaded(folders, recompute, again, monkeypatch):
    """A failed update changes nothing; where the older weights cannot be had again either, what runs fails with it."""
    with connected(folders("llama")) as policy:
        live, updating = begun(policy, {4: 1}, recompute=recompute)
        decoder, failures = white_box.decoder(policy), []
        load = decoder.forward.load

        def failing(*args, **options):
            if updating.calls and len(failures) < (1 if again else 2):
                failures.append(args)
                raise MemoryError
            load(*args, **options)

        monkeypatch.setattr(decoder.forward, "load", failing)
        running = live.sample(PROMPT, LONG, seed=1)
        if again:
            (sample,) = running.result()
            assert (sample.version, sample.versions) == (1, None)
            expected = updating.frozen[1].logprobs(np.concatenate([PROMPT, sample.tokens])).result()
            np.testing.assert_allclose(sample.logprobs, expected[len(PROMPT) :], atol=2e-5)
        else:
            with pytest.raises((rlkit.BackendError, MemoryError)):
                running.result()
        with pytest.raises(rlkit.BackendError, match="out of memory: weights to sample from"):
            updating.update.result()
        assert live.version == 1
        assert live.sample(PROMPT, ONE).result()[0].version == 1
        assert live.update().result() == 2
        assert live.sample(PROMPT, ONE).result()[0].version == 2


def test_texts_that_are_scored(folders):
    """In the middle of scoring: logprobs are of one policy."""
    texts = [np.random.default_rng(i).integers(3, 250, 90) for i in range(6)]
    with connected(folders("llama")) as policy:
        white_box.require_invariance(policy)
        live, frozen = policy.live_sampler().result(), [policy.sampler().result()]
        scored = [live.logprobs(text) for text in texts]
        step(policy)
        live.update()
        frozen.append(policy.sampler().result())
        scored += [live.logprobs(text) for text in texts]
        for text, future in zip(texts * 2, scored, strict=True):
            found = future.result()
            assert any(np.array_equal(found, sampler.logprobs(text).result()) for sampler in frozen)
        assert np.array_equal(scored[-1].result(), frozen[1].logprobs(texts[-1]).result())


def test_closed(folders):
    with connected(folders("llama")) as policy:
        live = policy.live_sampler().result()
        running = live.sample(PROMPT, LONG)
        live.close()
        for call in (live.update, lambda: live.sample(PROMPT, ONE)):
            with pytest.raises(rlkit.BackendError, match="sampler is closed"):
                call()
        assert running.result()
        other = policy.live_sampler().result()
    for call in (other.update, lambda: other.sample(PROMPT, ONE), policy.live_sampler):
        with pytest.raises(rlkit.BackendError, match="the local backend is closed"):
            call()
