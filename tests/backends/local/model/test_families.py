"""Every architecture of the table: the numbers of transformers and of plain peft in its layout, or a refusal."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import attrs
import numpy as np
import pytest

import rlkit
from tests.backends.local import white_box
from tests.float64 import distance, wide_floats, widen
from tests.models import measure
from tests.models.families import FAMILIES
from tests.models.family import LENGTH, build

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from rlkit.backends.local.export import save_merged  # noqa: E402
from rlkit.backends.local.model.probe import PACKED, PADDED, UNCACHED  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning"),  # the adapter is on the head alone
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),  # peft finds it out by itself
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # peft asks transformers for it
    pytest.mark.filterwarnings("ignore:model .* its context is limited to:UserWarning"),  # longrope, sparse attention
]
ROOT = Path(__file__).parents[4]
RIGHT = [name for name, family in FAMILIES.items() if family.layout != "refused"]
PROMPTS = (3, 17, 30)  # tokens; with 40 more they go beyond every window
PARAMS = rlkit.SamplingParams(max_tokens=40, stop=())
MOST = 8  # times peft's own distance to float64; 0.9 to 1.6 were seen
LEAST = 2**-20  # a distance of 8 float32 epsilons is luck where it is less


@attrs.frozen(eq=False)
class Made:
    """A policy of one family, with an adapter that changes its numbers."""

    family: object
    folder: str
    path: str
    policy: rlkit.TrainerBackend
    samples: list[rlkit.Sample]
    data: list[rlkit.Datum]
    logprobs: list[np.ndarray]
    gradient: dict[str, torch.Tensor]
    plain: tuple[list[np.ndarray], dict[str, torch.Tensor]]  # logprobs and gradient of peft
    exact: tuple[list[np.ndarray], dict[str, torch.Tensor]]  # in float64

    def check_logprobs(self, found, of=slice(None)):
        """Of some of the samples they are about as near to those in float64 as peft's are."""
        exact = self.exact[0][of]
        assert distance(found, exact) <= MOST * max(LEAST, distance(self.plain[0][of], exact))

    def check_gradient(self, found):
        """So is the gradient."""
        plain, exact = ([gradient[name] for name in found] for gradient in (self.plain[1], self.exact[1]))
        assert distance(found.values(), exact) <= MOST * max(LEAST, distance(plain, exact))


@pytest.fixture(scope="module", params=RIGHT)
def made(request, tmp_path_factory):
    """The model is built, adapted, sampled from at prompts of unequal lengths together, and saved."""
    family, root = FAMILIES[request.param], tmp_path_factory.mktemp("family")
    folder = str(build(family, root / "model"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy = rlkit.connect(
            "local",
            model=folder,
            lora=rlkit.Lora(rank=4, train_unembed=True),
            seed=0,
            device="cpu",
            micro_batch_tokens=200,
            folder=root,
        )
    said = [str(w.message) for w in caught if "its experts get no adapter" in str(w.message)]
    assert {w.filename for w in caught if str(w.message) in said} <= {__file__}  # the line of whoever connects
    assert len(said) == ("experts" in family.note)
    assert any("nor do" in text for text in said) == ("dense layers" in family.note)
    rng = np.random.default_rng(0)
    for name, parameter in white_box.parameters(policy).items():
        if "lora_B" in name:
            parameter.data.copy_(torch.from_numpy(0.02 * rng.standard_normal(parameter.shape)))
    path = policy.save("x").result()
    with policy.sampler().result() as sampler:
        futures = [sampler.sample(rng.integers(3, 290, size), PARAMS, n=2, seed=size) for size in PROMPTS]
        samples = [sample for future in futures for sample in future.result()]
    data = [sample.datum(1.0) for sample in samples]
    found = policy.forward_backward(data, "cross_entropy").result().selected
    gradient = {name: p.grad.clone() for name, p in white_box.parameters(policy).items()}
    policy.discard().result()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = peft.PeftModel.from_pretrained(base, path, is_trainable=True).eval()
    wide = widen(model)
    plain = compute_with_peft(model, samples)
    with wide_floats():
        exact = compute_with_peft(wide, samples)
    yield Made(family, folder, path, policy, samples, data, list(found), gradient, plain, exact)
    policy.close()


def logprobs_of(model, sample):
    """[n] of a sample's tokens, by a model's own forward on that sample alone; with its gradient."""
    tokens = torch.from_numpy(np.concatenate([sample.prompt, sample.tokens]))
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[sample.prompt.size - 1 :, 0]


def compute_with_peft(model, samples):
    """Logprobs of samples, each alone, and the gradient of the adapter, by name."""
    logprobs = [logprobs_of(model, sample) for sample in samples]
    (-sum(x.sum() for x in logprobs)).backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return [x.detach().numpy() for x in logprobs], gradient


def test_trainer(made):
    """Logprobs and gradient are those of plain peft, which reads the saved adapter, on one sequence at a time."""
    made.check_logprobs(made.logprobs)
    assert made.gradient.keys() == made.plain[1].keys()
    made.check_gradient(made.gradient)
    assert all(g.any() for g in made.gradient.values())  # an adapter without a gradient is on a module that is not read


def test_sampler(made):
    """Sampled logprobs and scores are the trainer's, merged or not, and requests do not change one another's."""
    made.check_logprobs([sample.logprobs for sample in made.samples])
    with made.policy.sampler().result() as sampler:
        whole = np.concatenate([made.samples[-1].prompt, made.samples[-1].tokens])
        scored = sampler.logprobs(whole).result()[-made.samples[-1].tokens.size :]
        made.check_logprobs([scored], slice(-1, None))
        alone = sampler.sample(made.samples[0].prompt, PARAMS, n=2, seed=PROMPTS[0]).result()
        assert [s.tokens.tolist() for s in alone] == [s.tokens.tolist() for s in made.samples[:2]]
    with rlkit.sampler("local", path=made.path, merge=False, device="cpu") as sampler:
        again = sampler.sample(made.samples[0].prompt, PARAMS, n=2, seed=PROMPTS[0]).result()
    made.check_logprobs([sample.logprobs for sample in again], slice(2))


def test_layout(made):
    """It is computed in the layout that docs/models.md names, up to the context that its positions allow."""
    base = made.policy.base
    assert base.layout == ("equal" if made.family.layout == "uncached" else made.family.layout)
    settings = made.family.settings
    picked = settings.get("index_topk") or settings.get("keep_window_size") or LENGTH
    assert base.max_length == (48 if "longrope" in str(settings) else picked) or base.max_length == 2**20


def test_export_and_greedy(made, tmp_path):
    """The merged model has the policy's logprobs by itself, and no token likelier than greedy ones."""
    model = transformers.AutoModelForCausalLM.from_pretrained(save_merged(made.path, str(tmp_path / "merged"))).eval()
    greedy = rlkit.SamplingParams(max_tokens=30, temperature=0.0, stop=())
    with made.policy.sampler().result() as sampler:
        (sample,) = sampler.sample(made.samples[2].prompt, greedy).result()
    tokens = torch.from_numpy(np.concatenate([sample.prompt, sample.tokens]))
    with torch.no_grad():
        found = logprobs_of(model, made.samples[-1]).numpy()
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, sample.prompt.size - 1 : -1]
    made.check_logprobs([found], slice(-1, None))
    chosen = logits.gather(1, tokens[sample.prompt.size :, None])[:, 0]
    assert (logits.amax(1) - chosen).max() < 1e-3  # rounding parts no two tokens that are farther apart


def test_resume(made, tmp_path):
    """A step after a save is, to the bit, the step of a policy that was resumed from it."""
    options = {"device": "cpu", "folder": tmp_path, "micro_batch_tokens": 200}
    with rlkit.connect("local", resume_from=made.path, **options) as first:
        step(first, made.data)
        path = first.save("later").result()
        with rlkit.connect("local", resume_from=path, **options) as second:
            states = [step(policy, made.data) for policy in (first, second)]
    assert all(torch.equal(p, states[1][name]) for name, p in states[0].items())


def step(policy, data):
    """The adapter after one step on ``data``."""
    policy.forward_backward(data, "cross_entropy")
    policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
    return {name: p.detach().clone() for name, p in white_box.parameters(policy).items()}


def test_lists():
    """The file has the model types of the table."""
    for layout, known in {"packed": PACKED, "padded": PADDED, "uncached": UNCACHED}.items():
        assert known == {family.model_type for family in FAMILIES.values() if family.layout == layout}


@pytest.mark.parametrize("name", ["gpt2", "doge", "xlstm"])
def test_the_file_is_what_is_measured(name, tmp_path, monkeypatch):
    """And a file that says something else is found out."""
    assert measure.compare([name]) == {}
    other = measure.FILE.read_text("utf-8").replace(f'"{name}"', '"other"')
    (tmp_path / "families.toml").write_text(other, "utf-8")
    monkeypatch.setattr(measure, "FILE", tmp_path / "families.toml")
    different = measure.compare([name])
    assert different
    assert all(kinds == [name] for kinds in different.values())


def test_the_file_is_as_it_is_written():
    """By ``make families``, which nobody edits by hand."""
    text = measure.FILE.read_text("utf-8")
    assert measure.write(tomllib.loads(text)).partition("\n")[2] == text.partition("\n")[2]  # without the version


def test_page():
    """docs/models.md is what ``python docs/models.py`` writes."""
    found = subprocess.run([sys.executable, "docs/models.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("name", ["llama, rope longrope", "phi3, rope longrope", "llama, rope dynamic"])
def test_positions_that_change_with_the_length(name, tmp_path):
    """Up to the context a long companion changes nothing, nor does it write into the base; beyond it is refused."""
    folder = str(build(FAMILIES[name], tmp_path))
    options = {"device": "cpu", "lora": rlkit.Lora(rank=2, train_unembed=True), "seed": 0, "micro_batch_tokens": 400}
    with rlkit.connect("local", model=folder, **options) as policy:
        length, rng = policy.max_length, np.random.default_rng(0)
        kept = {name: x.clone() for name, x in policy.base.model.named_buffers()}
        short, long = (
            rlkit.Datum.supervised(rng.integers(3, 290, 5), rng.integers(3, 290, n)) for n in (9, length - 5)
        )
        alone = policy.forward([short]).result().logprobs[0]
        beside = policy.forward([short, long]).result().logprobs[0]
        assert np.abs(alone - beside).max() < 1e-5
        params = rlkit.SamplingParams(max_tokens=1000, stop=())
        with policy.sampler().result() as sampler:
            futures = [sampler.sample(rng.integers(3, 290, n), params, seed=n) for n in (4, length - 4)]
            samples = [future.result()[0] for future in futures]
        found = policy.forward([s.datum(1.0) for s in samples]).result().selected
        assert samples[0].tokens.size == length - 4
        assert max(np.abs(lp - s.logprobs).max() for lp, s in zip(found, samples, strict=True)) < 1e-4
        assert all(torch.equal(x, kept[name]) for name, x in policy.base.model.named_buffers())
        too_long = rlkit.Datum.supervised([5] * length, [6])
        with pytest.raises(rlkit.DataError, match=f"{length}"):
            policy.forward([too_long])


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in RIGHT])
def test_refused(name, tmp_path):
    """What cannot be computed rightly is refused when it is connected, with the reason."""
    folder = build(FAMILIES[name], tmp_path)
    with pytest.raises(rlkit.ConfigError, match=f"{FAMILIES[name].model_type}.*depends on later tokens"):
        rlkit.connect("local", model=str(folder), device="cpu")
