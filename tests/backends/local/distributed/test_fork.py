"""A process that is forked off one with several ranks, such as a loader of data, leaves them alone."""

from __future__ import annotations

import os

import pytest

from tests.backends.local.distributed.test_lost import BEGIN, run

pytest.importorskip("peft")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

STORY = """
import faulthandler

policy = connect(lora=rlkit.Lora(rank=2), seed=0)
live, sampler = policy.live_sampler().result(), policy.sampler().result()
train(policy)
few = rlkit.SamplingParams(max_tokens=2)

def in_child(ends, why="fork"):
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(30, exit=True)
        for call in (lambda: policy.forward(data), lambda: policy.optim_step(step), lambda: policy.save("x"),
                     policy.sampler, live.update, lambda: [live.sample([5], few) for _ in range(4)],
                     lambda: [sampler.sample([5], few) for _ in range(4)],
                     lambda: connect(lora=rlkit.Lora(rank=2), processes=2 if why else 0)):
            try:
                call()
            except rlkit.RlkitError as error:
                assert why in str(error), error
            else:
                raise AssertionError("accepted")
        ends()
        sys.exit(7)
    began = time.monotonic()
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        assert time.monotonic() < began + 90
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(ended[1]) == 7, ended

in_child(lambda: None)
in_child(policy.close)
assert len(ranks_of(os.getpid())) == 1
assert train(policy)
assert live.update().result() == 2
assert all(x.version == 2 for x in live.sample([5], few, n=4).result())
policy.close()
assert not ranks_of(os.getpid())
in_child(policy.close, "")
"""


def test_a_forked_child_leaves_the_ranks_alone(tiny, tmp_path):
    """Its calls are refused, ``close`` and its end do nothing to them, and the parent goes on."""
    done = run(BEGIN + STORY, tiny("llama"), str(tmp_path))
    assert done.returncode == 0, done.stderr
