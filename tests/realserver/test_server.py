"""rlkit's Tinker backend, and the plain SDK, on a real server of the API."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import rlkit
from rlkit.testing import BackendConformance
from tests.realserver.conftest import URL
from tests.realserver.server import PAGE
from tests.server import sdk

tinker = pytest.importorskip("tinker", reason="needs the extra tinker")

WAIT = 1200.0  # seconds; the first calls compile
here = pytest.mark.skipif(bool(URL), reason="asks SkyRL's server on this machine")
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft
]
NO_SCORES = "its JAX engine answers 400 to topk_prompt_logprobs, and takes one target for each token"
SKYRL = {
    "test_snapshots_never_change": "sampling loads a snapshot into the place of the policy that it was taken of",
    "test_live_samplers": "as before: it asks an older snapshot",
    "test_resume_is_exact": "no metadata is kept with a saved state, and with it no seeds; test_the_page resumes",
    "test_truncation_renormalises": "logprobs under top_k and top_p are those of the whole distribution",
    "test_top_logprobs_are_the_largest": NO_SCORES,
    "test_targets_of_minus_one_are_none": NO_SCORES,
    "test_a_teacher_of_the_top_k_is_imitated": NO_SCORES,
    "test_targets_of_minus_one_count_nothing": NO_SCORES,
    "test_gradient_is_that_of_the_loss[topk_forward_kl-1.0]": NO_SCORES,
}


class TestConformance(BackendConformance):
    """On SkyRL's server but for what it does otherwise, on any other address all of it."""

    recovers = False  # a policy ends with a call that failed
    tempered = False  # the API has the logprobs of temperature 1 alone
    offers = ()  # and neither min_p nor penalties
    exact = False  # sums may depend on the shape of the batch
    skips = {} if URL else SKYRL

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server

    def make(self, folder, **options):
        if "resume_from" not in options and "init_from" not in options:
            options |= {"model": self.server.model, "lora": rlkit.Lora(rank=4)}
        return rlkit.connect("tinker", base_url=self.server.url, max_length=128, deadline=WAIT, **options)


@here
def test_logprobs_are_those_of_transformers(server, tmp_path):
    """By the plain SDK: every verb; trainer, sampler, and transformers with the adapter that was saved, to 1e-5."""
    import peft
    import torch
    import transformers
    from safetensors.torch import load_file

    service = tinker.ServiceClient(base_url=server.url)
    training, losses = sdk.supervised(service, server.model, steps=4)
    assert losses[-1] < losses[0]
    training.forward_backward_custom([sdk.datum([5, 6, 7], weights=1.0)], lambda data, lps: (lps[0].sum(), {}))
    training.optim_step(tinker.types.AdamParams(learning_rate=1e-3)).result(timeout=WAIT)
    sampler = training.save_weights_and_get_sampling_client().result(timeout=WAIT)
    folder = server.adapter(training.save_weights_for_sampler("peft").result(timeout=WAIT).path, tmp_path)
    tensors, settings = (
        load_file(folder / "adapter_model.safetensors"),
        json.loads((folder / "adapter_config.json").read_text()),
    )
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = peft.LoraConfig(r=settings["r"], lora_alpha=settings["lora_alpha"], target_modules=modules)
    model = transformers.AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
    model = peft.get_peft_model(model, config)
    assert not peft.set_peft_model_state_dict(model, tensors).unexpected_keys
    params = tinker.types.SamplingParams(max_tokens=8, seed=7, temperature=1.0, stop=[])
    first, again = (sampler.sample(sdk.prompt([9, 8, 7]), 3, params).result(timeout=WAIT).sequences for _ in range(2))
    assert [s.tokens for s in first] == [s.tokens for s in again]
    assert len({tuple(s.tokens) for s in first}) == 3
    for sequence in first:
        whole = [9, 8, 7, *sequence.tokens]
        logits = model(input_ids=torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(whole[1:])[:, None])[:, 0].detach().numpy()
        scored = sampler.compute_logprobs(sdk.prompt(whole)).result(timeout=WAIT)
        output = training.forward([sdk.datum(whole, weights=1.0)], "cross_entropy").result(timeout=WAIT)
        np.testing.assert_allclose(scored[1:], expected, atol=1e-5)
        np.testing.assert_allclose(output.loss_fn_outputs[0]["logprobs"].to_numpy(), expected, atol=1e-5)
        np.testing.assert_allclose(sequence.logprobs, expected[2:], atol=1e-5)
    service.close("success").result(timeout=WAIT)


@here
def test_the_page(server, monkeypatch, capsys):
    """docs/how-to/servers.md: its GRPO of three steps, two more on what it saved as on the policy itself."""
    blocks = re.findall(r"^```python(?: no-run)?\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    names = {"__name__": "page"}
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    exec(compile(blocks[0].rpartition("\n\n\n")[0], "servers.md", "exec"), names)  # noqa: S102  # our own page
    exec(compile(blocks[2].replace("Qwen/Qwen3-0.6B", server.model), "servers.md", "exec"), names)  # noqa: S102
    policy, data = names["policy"], [rlkit.Datum.supervised([5, 6], [7, 8, 9])]
    with policy, rlkit.connect("tinker", resume_from=names["path"], max_length=128, deadline=WAIT) as resumed:
        after = []
        for each in (policy, resumed):
            before = each.forward(data).result().selected[0]
            for _ in range(2):
                each.forward_backward(data, "cross_entropy")
                each.optim_step(rlkit.Adam(learning_rate=1e-3)).result()
            after.append((before.tolist(), each.forward(data).result().selected[0].tolist()))
        assert after[0] == after[1]
        assert after[0][0] != after[0][1]
        assert resumed.sampler().result().version == 5
        names["train"](resumed, 2, 1e-3)
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if re.match(r"\d ", line)]
    assert lines == ["0", "1", "2", "0", "1"]
