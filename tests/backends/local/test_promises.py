"""Promises about the local backend that concern all of its parts at once."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest

import rlkit

pytest.importorskip("peft")

PARAMS = rlkit.SamplingParams(max_tokens=2, stop=())


def checksum(policy):
    """Of every parameter and buffer of the base, whatever is wrapped around it."""
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.base.model.state_dict().items()):
        if "lora_" not in name:
            digest.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("merge", [True, False])
def test_base_weights_after_1000_snapshots(tiny, tmp_path, merge):
    """A thousand snapshots, each sampled from, with steps between: the base's checksum is what it was."""
    options = {
        "lora": rlkit.Lora(rank=2, train_unembed=True),
        "merge": merge,
        "seed": 0,
        "device": "cpu",
        "folder": tmp_path,
    }
    data = [rlkit.Datum([5, 6, 7], [0, 1, 1])]
    with rlkit.connect("local", model=tiny("llama"), **options) as policy:  # tied embeddings
        before, tokens = checksum(policy), set()
        for i in range(1000):
            if i % 10 == 0:
                policy.forward_backward(data, "cross_entropy")
                policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
            sampler = policy.sampler().result()
            if i % 5 == 0:
                tokens |= {sample.tokens.tobytes() for sample in sampler.sample([5, 6], PARAMS, n=2, seed=i).result()}
            sampler.close()
        assert checksum(policy) == before
        assert len(tokens) > 10
        assert policy.version == 100


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_padding_side_and_pad_that_is_eos(tiny, tmp_path, temperature):
    """Rows of other lengths beside one change neither side's logprobs, wherever padding would stand, whatever its id.

    The first and the last of a row are looked at: what is padded on the left moves the one, on the right the other.
    """
    options = {"lora": rlkit.Lora(rank=4, train_unembed=True), "seed": 0, "device": "cpu", "folder": tmp_path}
    rows = [[5, 6, 7], list(range(3, 30)), [9, 2], [2, 2, 2, 2, 2, 2]]  # 2 may be padding's
    with rlkit.connect("local", model=tiny("llama"), **options) as policy:
        eos = policy.tokenizer.eos_ids[0]
        rows.append([5, eos, 6, eos, eos])
        sampler = policy.sampler().result()
        data = [rlkit.Datum(row, [0] + [1] * (len(row) - 1), temperature=temperature) for row in rows]
        together = policy.forward(data).result().logprobs
        scored = [sampler.logprobs(row, temperature=temperature) for row in rows]
        for datum, row, both, alone in zip(data, rows, together, scored, strict=True):
            single = policy.forward([datum]).result().logprobs[0]
            assert np.abs(both - single).max() < 2**-18  # 8 last places of a logprob
            assert np.abs(both - alone.result()).max() < 1e-4
            assert both[1:].max() < 0.0  # of every token, the first and the last too
            assert both.size == len(row)
        gradient = policy.forward_backward([data[-1]], "cross_entropy").result().metrics["loss:sum"]
        assert gradient > 0.0  # an end token that is trained on counts
        policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()
        after = policy.forward([data[-1]]).result().logprobs[0]
        assert (after - together[-1])[np.array(rows[-1]) == eos].max() > 0.0


def test_saved_files_do_not_depend_on_the_hash_seed(tiny, tmp_path):
    """Two processes with other seeds for the order of sets save the same bytes."""
    options = f"model={tiny('llama')!r}, lora=rlkit.Lora(rank=2), seed=0, device='cpu', folder=sys.argv[1]"
    code = f"import sys, rlkit; print(rlkit.connect('local', {options}).save('x').result())"
    started, found = [], []
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / seed)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**environment, "HOME": "/"}))
    for process in started:
        path = process.communicate()[0].strip().splitlines()[-1]
        found.append(json.loads((tmp_path / path / "state.json").read_text())["sha256"])
    assert found[0] == found[1]
    assert "adapter_config.json" in found[0]
