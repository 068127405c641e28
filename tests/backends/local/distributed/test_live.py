"""A live sampler, some of whose requests another process draws."""

from __future__ import annotations

import threading

import pytest

import rlkit

pytest.importorskip("peft")

STEP = rlkit.Adam(learning_rate=1e-3)
SHORT = rlkit.SamplingParams(max_tokens=4, stop=())


def test_no_answer_is_newer_than_its_sampler(connect):
    """Nor older than the sampler was when it was asked for, while updates go on."""
    policy = connect()
    live = policy.live_sampler().result()
    ended = threading.Event()
    answers, errors = [], []

    def ask():
        try:
            while not ended.is_set():
                oldest = live.version
                (sample,) = live.sample([65, 66, 67], SHORT).result(60)
                answers.append((oldest, sample.version, int(sample.token_versions.max()), live.version))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(15):
            policy.forward_backward([rlkit.Datum.supervised([65, 66], [67, 68])], "cross_entropy")
            policy.optim_step(STEP)
            live.update().result(60)
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)
    assert not errors
    assert {newest for *_, newest in answers} > {0}
    assert [x for x in answers if not x[0] <= x[1] <= x[2] <= x[3]] == []
