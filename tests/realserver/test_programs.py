"""The programs for the plain SDK that run on rlkit's own server run on this one too."""

from __future__ import annotations

import concurrent.futures

import numpy as np
import pytest

from tests.server.test_serve import program

pytest.importorskip("tinker")


def test_programs_at_once(summing, monkeypatch):
    """Supervised, GRPO, resume and a loss of one's own, four clients at the same time. They learn less than on rlkit's
    server, since this one leaves the head of the model alone."""
    monkeypatch.setenv("TINKER_BASE_URL", summing.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-any-key-is-let-in")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        names = ("supervised", "grpo", "resume", "custom_loss")
        options = {"grpo": ["--steps", "24", "--samples", "32", "--learning-rate", "3e-2"]}
        started = {name: pool.submit(program(name), [summing.model, *options.get(name, ())]) for name in names}
        found = {name: future.result() for name, future in started.items()}
    losses, said = found["supervised"]
    assert losses[-1] < 0.8 * losses[0]
    assert said == " on the mat."
    assert np.mean(found["grpo"][12:]) > np.mean(found["grpo"][:4])  # by 0.05 or more, five times its deviation
    whole, again = found["resume"]
    assert again == whole
    assert whole[-1] < 0.9 * whole[0]
    margins = found["custom_loss"]
    assert margins[0] == pytest.approx(0.0, abs=1e-5)
    assert margins[-1] > 1.0
