"""examples/plain_sdk: programs that know nothing of rlkit, on the fake service and on ``rlkit serve``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import rlkit
from tests.examples.programs import FOLDER, load

pytest.importorskip("tinker", reason="needs the extra tinker")

PROGRAMS = sorted(path.stem for path in (FOLDER / "plain_sdk").glob("*.py"))
FAST = {"custom_loss": ["--steps", "4"], "grpo": ["--steps", "6"]}  # enough for the toy at this rate
RATE = ["--learning-rate", "0.1"]


def run_at_once(service, model, monkeypatch, options):
    """What each program returns on the service; they run at the same time, each a client of its own."""
    monkeypatch.setenv("TINKER_BASE_URL", service[0])
    monkeypatch.setenv("TINKER_API_KEY", service[1])
    mains = {name: load(f"plain_sdk/{name}").main for name in PROGRAMS}
    with ThreadPoolExecutor(len(mains)) as pool:
        futures = {name: pool.submit(main, [model, *options.get(name, [])]) for name, main in mains.items()}
    return {name: future.result() for name, future in futures.items()}


def check(found):
    """Each program has learned its own."""
    assert sorted(found) == ["custom_loss", "grpo", "resume", "supervised"]
    losses, said = found["supervised"]
    assert losses[-1] < 0.25 * losses[0]
    assert said.startswith(" on")
    rewards = found["grpo"]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
    whole, again = found["resume"]
    assert again == whole
    assert whole[-1] < 0.5 * whole[0]
    margins = found["custom_loss"]
    assert margins[0] == pytest.approx(0.0, abs=1e-5)
    assert margins == sorted(margins)
    assert margins[-1] > 2.0


def test_they_know_nothing_of_rlkit():
    assert not [name for name in PROGRAMS if "import rlkit" in (FOLDER / f"plain_sdk/{name}.py").read_text("utf-8")]


def test_on_the_fake(monkeypatch):
    options = {name: [*FAST.get(name, []), *RATE] for name in PROGRAMS}
    with rlkit.testing.FakeTinker(seed=0) as fake:
        check(run_at_once((fake.base_url, fake.api_key), "toy", monkeypatch, options))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks transformers for it
def test_on_the_server(tiny, tmp_path, monkeypatch):
    """Over a model of two layers."""
    pytest.importorskip("peft")
    with rlkit.serve("local", model=tiny("llama"), folder=tmp_path, seed=0) as server:
        check(run_at_once((server.url, "tml-local"), server.names[0], monkeypatch, {}))
