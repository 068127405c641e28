"""A local trainer whose policy is sampled elsewhere: by transformers and peft alone, behind ``SamplingEngine``."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import rlkit
from rlkit import _check
from rlkit._seeds import SeedStream, streams
from rlkit.backends.requests import Stop, check_prompt, check_request
from rlkit.backends.samplers import SamplingEngine
from rlkit.futures import Future
from rlkit.testing.conformance import SamplingTests

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from rlkit.backends._drawing import draw  # noqa: E402
from rlkit.backends.local.model.base import load_base  # noqa: E402

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
ONE = rlkit.SamplingParams(max_tokens=1, stop=())


class Engine:
    """Saves adapters as vLLM would be given them, and loads the folders with peft; keeps the newest version alone."""

    def __init__(self, model, folder, seed=0):
        self.model, self.folder = model, folder
        self.tokenizer = load_base(model, "float32", "cpu").tokenizer
        self.seeds = SeedStream(seed)
        self.models, self.calls, self.closed = {}, [], False

    def load_adapter(self, adapter, version):
        self.calls.append(version)
        adapter.save(self.folder / f"v{version}")
        self.models = {version: peft.PeftModel.from_pretrained(self.read(), self.folder / f"v{version}").eval()}

    def sampler(self, version):
        return Sampler(self, self.models[version], version) if version in self.models else None

    def base_sampler(self):
        return Sampler(self, self.read(), 0)

    def close(self):
        self.closed = True

    def read(self):
        return transformers.AutoModelForCausalLM.from_pretrained(self.model).eval()


class Sampler(contextlib.AbstractContextManager):
    """Every token by a forward of the whole text."""

    def __init__(self, engine, model, version):
        self.tokenizer, self.version, self.max_length = engine.tokenizer, version, 128
        self.model, self.seeds = model, engine.seeds

    @torch.no_grad()
    def sample(self, prompt, params, *, n=1, seed=None):
        sizes = {"vocab_size": self.tokenizer.vocab_size, "max_length": self.max_length}
        array = check_request(prompt, params, n, seed, **sizes, lacks=PENALTIES)
        self.check_open()
        rngs, stop = streams(self.seeds.next() if seed is None else seed, n), Stop(params.stop, self.tokenizer)
        rows, logprobs, ended = [[] for _ in rngs], [[] for _ in rngs], [False] * n
        while not all(ended) and len(rows[0]) < min(params.max_tokens, self.max_length - array.size):
            texts = torch.tensor([[*array.tolist(), *row] for row in rows])
            logits = self.model(input_ids=texts).logits[:, -1]
            tokens, lps = draw(logits, [params] * n, np.array([rng.random() for rng in rngs]))
            for i in range(n):
                rows[i].append(int(tokens[i]))
                if not ended[i]:
                    logprobs[i].append(float(lps[i]))
                    ended[i] = stop(rows[i])
        how = params.sampling_options
        parts = zip(rows, logprobs, ended, strict=True)
        return Future.of(
            [
                rlkit.Sample(array, row[: len(lp)], lp, "stop" if end else "length", **how, version=self.version)
                for row, lp, end in parts
            ]
        )

    @torch.no_grad()
    def logprobs(self, tokens, *, temperature=1.0):
        array = check_prompt("logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        _check.temperature("logprobs(temperature)", temperature, zero=False)
        self.check_open()
        logits = self.model(input_ids=torch.tensor(array.tolist())[None]).logits[0, :-1] / temperature
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(array[1:].tolist(), dtype=torch.int64)[:, None])
        return Future.of(np.append(np.float32(0), chosen[:, 0].numpy()))

    def check_open(self):
        if self.model is None:
            raise rlkit.BackendError("this sampler is closed")

    def close(self):
        self.model = None

    def __exit__(self, *exc):
        self.close()


@pytest.fixture
def policy(tiny, tmp_path):
    engine = Engine(tiny("llama"), tmp_path / "engine")
    options = {"lora": rlkit.Lora(rank=4, train_unembed=True), "seed": 0, "device": "cpu", "folder": tmp_path}
    with rlkit.connect("local", model=tiny("llama"), sampler=engine, **options) as policy:
        policy.engine = engine
        yield policy


def step(policy):
    policy.forward_backward([rlkit.Datum.supervised([5, 6], [7, 8, 9])], "cross_entropy")
    policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()


pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning"),  # the adapter is on the head alone
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # peft asks transformers for it
]


class TestSampling(SamplingTests):
    """All that a sampler is held to."""

    exact = False  # rows are computed together
    offers = frozenset({"min_p"})

    @pytest.fixture(autouse=True)
    def _model(self, tiny):
        self.model = tiny("llama")

    def make(self, folder, **options):
        engine = Engine(self.model, folder / "engine", options.get("seed", 0))
        return rlkit.connect(
            "local",
            model=self.model,
            sampler=engine,
            lora=rlkit.Lora(rank=4, train_unembed=True),
            device="cpu",
            folder=folder,
            **options,
        )


def test_what_is_trained_is_what_is_sampled(policy):
    """After each step; an adapter is loaded once per version, and earlier samplers stay what they were."""
    assert isinstance(policy.engine, SamplingEngine)
    text = np.arange(3, 20)
    datum = rlkit.Datum.supervised(text[:1], text[1:])
    found, samplers = [], []
    for version in range(3):
        samplers += [policy.sampler().result(), policy.sampler().result()]
        found.append(samplers[-1].logprobs(text).result()[1:])
        assert np.abs(policy.forward([datum]).result().selected[0] - found[-1]).max() < 1e-4
        assert samplers[-1].version == version
        step(policy)
    assert policy.engine.calls == [0, 1, 2]
    assert np.abs(found[0] - found[2]).max() > 1e-2
    for version in (0, 1, 2):
        assert np.array_equal(samplers[2 * version].logprobs(text).result()[1:], found[version])
    base = policy.base_sampler().result()
    assert np.abs(base.logprobs(text).result()[1:] - found[0]).max() < 1e-5


def test_a_version_that_was_dropped_is_loaded_again(policy):
    """The engine decides what it keeps."""
    policy.sampler().result()
    policy.engine.models.clear()
    assert policy.sampler().result().sample([5], ONE).result()
    assert policy.engine.calls == [0, 0]


def test_an_engine_that_fails_leaves_training_as_it_was(policy, monkeypatch):
    """Its error is the future's; what comes back is checked; the next call is served."""
    with monkeypatch.context() as patch:
        patch.setattr(policy.engine, "load_adapter", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            policy.sampler().result()
    for name, call in (("sampler", policy.sampler), ("base_sampler", policy.base_sampler)):
        with monkeypatch.context() as patch:
            patch.setattr(policy.engine, name, lambda *_: "no sampler")
            with pytest.raises(rlkit.ConfigError, match=rf"{name}\(.*has no .*logprobs.*expected a Sampler"):
                call().result()
    step(policy)
    assert policy.sampler().result().version == 1


def test_what_belongs_to_own_sampling_is_refused_beside_an_engine(policy, tiny):
    """Options that would do nothing, saved samplers, and what is no engine; the engine is closed with the backend."""
    for option in ({"merge": True}, {"max_rows": 3}, {"prefix_mb": 0}, {"cuda_graphs": False}):
        with pytest.raises(rlkit.ConfigError, match="have no effect with sampler="):
            rlkit.connect("local", model=tiny("llama"), sampler=policy.engine, **option)
    with pytest.raises(rlkit.ConfigError, match="has no .*load_adapter.*expected a SamplingEngine"):
        rlkit.connect("local", model=tiny("llama"), sampler=policy.base_sampler().result())
    with pytest.raises(rlkit.ConfigError, match="which is a class; expected a SamplingEngine"):
        rlkit.connect("local", model=tiny("llama"), sampler=type(policy.engine))
    with pytest.raises(rlkit.UnsupportedError, match="sampler="):
        policy.saved_sampler(policy.save("x").result())
    assert policy.capabilities()["batch_invariant"] is False
    policy.close()
    assert policy.engine.closed
