"""A run that is cut off and run again is bit for bit the run that was not."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from rlkit import losses
from rlkit.advantages import grpo
from rlkit.runs import Run
from tests.models.build import build

pytest.importorskip("torch")
PROMPTS = ["ab", "hello 12", "Call ", "1 + 2", "zz", "Dial ", "x"]


class Stopped(Exception): ...


def train(folder, steps, *, name="toy", cut=None, seen=None, every=1, **options):
    """Run until ``steps``, or until the middle of step ``cut``; return what each step saw, and logprobs at the end."""
    seen = {} if seen is None else seen
    with Run(folder, seed=7, trackers=()) as run:
        policy = run.connect(name, **options)
        kl = run.keep("kl", losses.kl.adaptive_coefficient(coef=0.1, target=0.01, horizon=10))
        noise = run.rng("noise")
        reference = policy.base_sampler().result()
        for step in run.steps(steps):
            prompts = run.batch(PROMPTS, 2)
            sampler = policy.sampler().result()
            params = rlkit.SamplingParams(max_tokens=4, stop=())
            groups = [sampler.sample(policy.tokenizer.encode(text), params, n=3) for text in prompts]
            data, rewards = [], []
            for group in groups:
                samples = group.result()
                r = np.array([float(np.mean(s.tokens % 3 == 0)) for s in samples]) + 0.01 * noise.normal(size=3)
                rewards.append(float(r.mean()))
                for sample, a in zip(samples, grpo(r), strict=True):
                    tokens = np.concatenate([sample.prompt, sample.tokens])
                    lp = reference.logprobs(tokens).result()
                    data.append(sample.datum(a, reference_logprobs=lp, kl_coef=kl.coef))
            order = noise.permutation(len(data))
            metrics = []
            for half in np.array_split(order, 2):
                fb = policy.forward_backward([data[i] for i in half], losses.with_kl("ppo", "kl_coef"))
                op = policy.optim_step(rlkit.Adam(learning_rate=0.02))
                if cut == step:
                    raise Stopped
                metrics += [fb.result().metrics["loss:sum"], op.result()["grad_norm:mean"]]
            kl.update(abs(metrics[0]), len(data))
            seen[step] = (prompts, rewards, metrics, kl.coef, [d.tokens.tolist() for d in data])
            run.checkpoint(policy, every=every)
        probe = policy.forward([rlkit.Datum([65, 66, 67, 68], [0, 1, 1, 1])]).result().logprobs[0]
    return seen, probe.tolist()


@pytest.fixture
def fake():
    pytest.importorskip("tinker", reason="needs the extra tinker")
    from rlkit.testing import FakeTinker

    with FakeTinker(seed=0) as fake:
        yield fake


@pytest.fixture(params=["toy", "local", "tinker"])
def options(request, tmp_path):
    if request.param == "toy":
        return {"name": "toy"}
    if request.param == "local":
        pytest.importorskip("peft")
        return {"name": "local", "model": str(build("llama", tmp_path / "model")), "lora": rlkit.Lora(rank=4)}
    fake = request.getfixturevalue("fake")
    return {"name": "tinker", "model": "toy", "base_url": fake.base_url, "api_key": fake.api_key}


def test_cut_off(tmp_path, options, request):
    """Between the two minibatches of any step; with a checkpoint every fourth step, those since are done again."""
    total, cases = (20, {1: range(20), 4: (10, 18)}) if options["name"] == "toy" else (6, {1: (2, 4)})
    whole = train(tmp_path / "whole", total, **options)
    for every, cuts in cases.items():
        seen = {}
        for cut in cuts:
            with pytest.raises(Stopped):
                train(tmp_path / str(every), total, cut=cut, seen=seen, every=every, **options)
            assert sorted(seen) == list(range(cut))
        assert train(tmp_path / str(every), total, seen=seen, every=every, **options) == whole
    if options["name"] == "tinker":  # whose paths the checkpoints hold; spent ones are removed there
        left = request.getfixturevalue("fake").rest_client().list_user_checkpoints().result().checkpoints
        assert len(left) <= 2 * 2 + 2


def test_stages(tmp_path, options):
    """A stage takes another's weights, with a fresh optimizer or its own, and is resumed as itself, reference too."""
    data = [rlkit.Datum.supervised([65], [66, 67])]

    def step(policy):
        policy.forward_backward(data, "cross_entropy")
        policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()
        return policy.forward(data).result().selected[0]

    with Run(tmp_path / "sft", seed=1, trackers=()) as run:
        policy = run.connect(**options)
        for _ in run.steps(3):
            taught = step(policy)
            record = run.checkpoint(policy)
        further = step(policy)
    path = record.policy("policy")
    where = {name: value for name, value in options.items() if name not in ("lora", "model")}
    own = {name: value for name, value in where.items() if name != "name"}
    with rlkit.runs.sampler(tmp_path / "sft", **own) as newest, rlkit.runs.sampler(path, **own) as saved:
        assert np.allclose(saved.logprobs(data[0].tokens).result()[1:], taught, atol=1e-5)
        assert np.allclose(newest.logprobs(data[0].tokens).result()[1:], taught, atol=1e-5)
    Run(tmp_path / "empty", trackers=()).close()
    with pytest.raises(rlkit.CheckpointError, match="empty has no complete checkpoint with a 'policy'"):
        rlkit.runs.sampler(tmp_path / "empty", **own)
    with pytest.raises(rlkit.ConfigError, match=r"is the folder of a run; expected .* rlkit.runs.sampler opens"):
        rlkit.sampler(**where, path=str(tmp_path / "sft"))

    with Run(tmp_path / "further", seed=2, trackers=()) as run:
        policy = run.connect(**options, resume_from=path)
        assert policy.version == 3
        assert np.array_equal(step(policy), further)  # the optimizer's moments came with the weights

    for again in (False, True):  # the second time it goes on from its own
        with Run(tmp_path / "rl", seed=3, trackers=()) as run:
            policy = run.connect(**options, init_from=path)
            assert policy.version == (2 if again else 0)
            before = policy.forward(data).result().selected[0]
            assert np.array_equal(before, taught) == (not again)
            kept = run.value("reference", lambda p=policy: p.save("reference", sampler=True).result())
            with rlkit.sampler(**where, path=kept) as reference:
                assert np.allclose(reference.logprobs(data[0].tokens).result()[1:], taught, atol=1e-5)
            for _ in run.steps(2):
                moved = step(policy)
                if run.step == 0 and not again:
                    assert not np.array_equal(moved, further)  # its optimizer began anew
                run.checkpoint(policy)


def test_what_a_policy_can_take_comes_back(tmp_path):
    """The longest sequence is that of the policy, however it is opened; another one can be asked for."""
    with rlkit.Run(tmp_path, seed=0, trackers=()) as run:
        run.checkpoint(run.connect("toy", max_length=2048))
    with rlkit.Run(tmp_path, trackers=()) as run:
        assert run.connect("toy").max_length == 2048
    with rlkit.runs.sampler(tmp_path) as sampler, rlkit.runs.sampler(tmp_path, max_length=512) as short:
        prompt = [1] * 1500
        assert sampler.max_length == 2048
        assert sampler.sample(prompt, rlkit.SamplingParams(max_tokens=1), n=1).result()[0].prompt.size == 1500
        assert short.max_length == 512
    (saved,) = (tmp_path / "policies").iterdir()
    with rlkit.connect("toy", init_from=str(saved)) as begun:
        assert begun.max_length == 2048
