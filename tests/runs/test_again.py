"""What a notebook does again and again, and calls after which training would have been lost without a word."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import rlkit
from rlkit.runs import Run, records
from rlkit.tracking import read_metrics

DATA = [rlkit.Datum([65, 66, 67], [0, 1, 1])]


def train(run, policy, steps):
    for _ in run.steps(steps):
        policy.forward_backward(DATA, "cross_entropy")
        policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
        run.log({"train/loss": 1.0})
        run.checkpoint()


class TestOpenedAgain:
    def test_a_run_takes_over_from_the_one_that_is_open(self, tmp_path):
        first = Run(tmp_path, seed=0, trackers=["jsonl"])
        train(first, first.connect("toy"), 2)
        second = Run(tmp_path, trackers=["jsonl"])
        policy = second.connect("toy")
        assert (first.closed, second.closed, second.step, policy.version) == (True, False, 2, 2)
        train(second, policy, 3)
        second.close()
        assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
        assert [record.step for record in records(tmp_path)] == [2, 3]

    def test_steps_after_the_last_checkpoint_are_warned_of(self, tmp_path):
        run = Run(tmp_path, trackers=())
        train(run, run.connect("toy"), 2)
        assert run.step == run.saved == 2
        for _ in run.steps(4):  # without a checkpoint
            run.log({"train/loss": 1.0})
        words = "was open in this process at step 4.*last checkpoint, step 2, will be repeated"
        with pytest.warns(RuntimeWarning, match=words):
            again = Run(tmp_path, trackers=())
        assert again.step == 2
        again.close()

    def test_an_interrupted_loop_is_no_obstacle(self, tmp_path):
        """A cell that was interrupted, whose loop a traceback keeps alive, and that is run again, goes on."""
        kept = []
        for _ in range(3):
            run = Run(tmp_path, trackers=())
            run.connect("toy")
            with pytest.raises(KeyboardInterrupt) as stopped:  # noqa: PT012
                for _ in run.steps(9):
                    run.checkpoint()
                    raise KeyboardInterrupt
            kept.append(stopped)
        assert [record.step for record in records(tmp_path)] == [2, 3]
        run.close()

    def test_the_old_one_is_of_no_use(self, tmp_path):
        old = Run(tmp_path, trackers=["jsonl"])
        policy = old.connect("toy")
        with Run(tmp_path, trackers=()):
            for call in (
                lambda: old.log({"a": 1.0}),
                lambda: old.log_trajectories([]),
                lambda: old.checkpoint(policy),
                lambda: old.connect("toy"),
                lambda: old.critic("toy", tokenizer=policy.tokenizer),
                lambda: old.keep("x", {}),
                lambda: next(old.steps(3)),
            ):
                with pytest.raises(rlkit.ConfigError, match=r"is closed; open it again: rlkit\.Run\(folder\)"):
                    call()
        assert read_metrics(tmp_path) == []
        assert "closed" in repr(old)

    def test_another_thread_in_its_loop_keeps_it(self, tmp_path):
        there, go = threading.Event(), threading.Event()
        run = Run(tmp_path, trackers=())
        run.connect("toy")

        def loop():
            for _ in run.steps(1):
                there.set()
                go.wait(60)
                run.checkpoint()

        thread = threading.Thread(target=loop)
        thread.start()
        assert there.wait(60)
        with pytest.raises(rlkit.ConfigError, match="another thread of this process"):
            Run(tmp_path, trackers=())
        go.set()
        thread.join(60)
        assert run.saved == 1
        with Run(tmp_path, trackers=()) as again:
            assert again.step == 1


class TestAskedAgain:
    def test_the_same_policy_for_the_same_options(self, tmp_path):
        with Run(tmp_path, trackers=()) as run:
            lora = rlkit.Lora(rank=4)
            policy = run.connect("toy", lora=lora, seed=3)
            assert run.connect("toy", lora=rlkit.Lora(rank=4), seed=3) is policy
            critic = run.critic("toy", tokenizer=policy.tokenizer)
            assert run.critic("toy", tokenizer=policy.tokenizer) is critic
            for options in ({}, {"seed": 4, "lora": lora}, {"seed": 3, "lora": lora, "max_length": 9}):
                with pytest.raises(rlkit.ConfigError, match="opened with a different .*open the run again"):
                    run.connect("toy", **options)
            with pytest.raises(rlkit.ConfigError, match="'policy' was opened with a different backend"):
                run.connect("local", lora=lora, seed=3)

    def test_generators_and_values(self, tmp_path):
        with Run(tmp_path, trackers=(), seed=0) as run:
            assert run.rng("data") is run.rng("data")
            assert run.value("once", lambda: 1) == run.value("once", lambda: 2) == 1
            kept = {"n": 0}
            assert run.keep("kept", kept) is run.keep("kept", kept)
            with pytest.raises(rlkit.ConfigError, match="in a notebook, open the run again"):
                run.keep("kept", {"n": 0})


class TestNothingIsLost:
    def test_a_checkpoint_of_nothing(self, tmp_path):
        """A policy of rlkit.connect that nobody gave to the run is missed at the first checkpoint."""
        with Run(tmp_path, trackers=()) as run, rlkit.connect("toy") as policy:
            says = r"nothing to save.*run\.connect.*run\.checkpoint\(policy\)"
            for _ in run.steps(1):
                with pytest.raises(rlkit.ConfigError, match=says):
                    run.checkpoint()
                run.rng("data")
                with pytest.warns(RuntimeWarning, match="holds no policy"):
                    run.checkpoint()
                assert run.checkpoint(policy).policies
        assert [record.step for record in records(tmp_path)] == [1, 1]

    def test_what_cannot_be_saved_or_logged(self, tmp_path):
        with Run(tmp_path, trackers=()) as run:
            for wrong in ([1.0], None, "loss", 3.0):
                with pytest.raises(rlkit.DataError, match=r"log\(metrics\): got"):
                    run.log(wrong)
            for wrong in (3, "policy", np.zeros(3), object(), run.connect("toy").sampler().result()):
                for role in ("policy", "teacher"):
                    with pytest.raises(rlkit.ConfigError, match=rf"checkpoint\({role}\): got .*; expected a policy"):
                        run.checkpoint(**{role: wrong})
        assert not records(tmp_path)

    def test_a_role_that_the_checkpoint_lacks(self, tmp_path):
        """Going on from a checkpoint without the policy is refused, unless it is said where the policy begins."""
        with Run(tmp_path, trackers=()) as run, rlkit.connect("toy", folder=tmp_path / "saves") as policy:
            policy.forward_backward(DATA, "cross_entropy")
            policy.optim_step(rlkit.Adam())
            path = policy.save("state").result()
            for _ in run.steps(1):
                run.checkpoint(actor=policy)
        with Run(tmp_path, trackers=()) as run:
            with pytest.raises(rlkit.ConfigError, match="step 1 has 'actor', but no 'policy'"):
                run.connect("toy")
            assert run.connect("toy", role="actor").version == 1
            assert run.connect("toy", role="reference", init_from=path).version == 0
