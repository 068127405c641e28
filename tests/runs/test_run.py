"""What a run keeps, refuses and removes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import warnings

import attrs
import numpy as np
import pytest

import rlkit
from rlkit.advantages import RunningBaseline
from rlkit.backends import saves
from rlkit.runs import Retention, Run, records
from rlkit.tracking.surroundings import Settings
from tests.models.build import build

FEW = rlkit.SamplingParams(max_tokens=4)
DATA = [rlkit.Datum([65, 66, 67], [0, 1, 1])]


def some_steps(folder, steps, **options):
    """A run of plain steps; returns the run, closed."""
    with Run(folder, seed=0, trackers=(), **options) as run:
        policy = run.connect("toy")
        for step in run.steps(steps):
            policy.forward_backward(DATA, "cross_entropy")
            policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
            run.checkpoint(policy, metrics={"score": float(-abs(step - 4))})
    return run


def contents(folder):
    """The bytes of each file, but for the lock, which names the process that opened the run last."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


class Counter:
    """Kept by its own ``state`` and ``restore``."""

    def __init__(self):
        self.count = 0

    def state(self):
        return self.count

    def restore(self, state):
        self.count = state


class TestKeeping:
    def test_every_kind_comes_back(self, tmp_path):
        def made():
            return {
                "generator": np.random.default_rng(3),
                "random": random.Random(3),
                "baseline": RunningBaseline(decay=0.5),
                "own": Counter(),
                "dict": {"a": np.float32([1.5, 2.5]), ("x", 2): [1, (2, 3)]},
                "list": [1, None, True, "text", 0.1],
            }

        def used(things):
            things["baseline"].update([1.0, 2.0], ["a", ("b", 3)])
            things["own"].count += 5
            things["dict"]["n"] = np.arange(6, dtype=np.int64).reshape(2, 3)
            things["list"].append(1e-320)
            return things["generator"].normal(), things["random"].random()

        with Run(tmp_path, seed=0, trackers=()) as run:
            kept = {name: run.keep(name, x) for name, x in made().items()}
            used(kept)
            run.connect("toy")
            run.checkpoint()
            follow = used(kept)
        with Run(tmp_path, trackers=()) as run:
            again = {name: run.keep(name, x) for name, x in made().items()}
            assert again["list"] == [1, None, True, "text", 0.1, 1e-320]
            assert again["dict"]["n"].dtype == np.int64
            assert used(again) == follow
            assert again["baseline"] == kept["baseline"]
            assert again["own"].count == 10
            assert again["dict"]["x", 2] == [1, (2, 3)]

    @pytest.mark.parametrize(
        "kept",
        [
            *(3, "text", None, object(), {"a": object()}, [b"bytes"], {"a": np.array([object()])}),
            rlkit.Adam(),  # frozen
            {"baseline": RunningBaseline()},  # it would come back as a dict
        ],
    )
    def test_what_can_not_be_kept(self, tmp_path, kept):
        with Run(tmp_path, trackers=()) as run, pytest.raises(rlkit.ConfigError, match="kept"):
            run.keep("kept", kept)

    @pytest.mark.parametrize("backend", ["toy", "local"])
    def test_a_policy_that_is_not_finite_is_never_saved(self, tmp_path, backend):
        """Whatever made it so: the checkpoint before stays, and is what the next run goes on from."""
        options = {}
        if backend == "local":
            pytest.importorskip("peft")
            options = {"model": str(build("llama", tmp_path / "model")), "lora": rlkit.Lora(rank=2)}
        with Run(tmp_path / "run", seed=0, trackers=(), retention=Retention(last=1)) as run:
            policy = run.connect(backend, **options)
            run.checkpoint(policy)
            for rate in (3e38, 3e38):
                with contextlib.suppress(rlkit.BackendError):  # a step that sees it refuses
                    policy.forward_backward([rlkit.Datum([5, 6, 7], [0, 1, 1])], "cross_entropy").result()
                    policy.optim_step(rlkit.Adam(learning_rate=rate)).result()
            if backend == "toy":  # in float64 there is room for more
                policy._weights.value[0] = np.inf
            with pytest.raises(rlkit.CheckpointError, match="not finite"):
                run.checkpoint(policy)
        with Run(tmp_path / "run", trackers=()) as run:
            assert run.connect(backend, **options).version == 0
        assert not [path for path in (tmp_path / "run").rglob("*") if path.name.startswith(".")]

    def test_another_object_under_the_name(self, tmp_path):
        with Run(tmp_path, trackers=()) as run:
            run.connect("toy")
            run.keep("x", Counter())
            run.checkpoint()
        with Run(tmp_path, trackers=()) as run:
            with pytest.raises(rlkit.CheckpointError, match="x: "):
                run.keep("x", np.random.default_rng(0))
            with pytest.warns(RuntimeWarning, match="'new'"):
                run.keep("new", {})
            with pytest.raises(rlkit.ConfigError, match="an unused name"):
                run.keep("new", {})

    def test_what_is_not_asked_for_stays(self, tmp_path):
        """A value that one version of the script does not keep is there for the next."""
        with Run(tmp_path, trackers=()) as run:
            run.connect("toy")
            run.keep("old", {"a": 1})
            run.checkpoint()
        with Run(tmp_path, trackers=()) as run:
            run.connect("toy")
            run.checkpoint()
        with Run(tmp_path, trackers=()) as run:
            assert run.keep("old", {}) == {"a": 1}

    def test_batches_cover_the_data(self, tmp_path):
        with Run(tmp_path, seed=3, trackers=()) as run:
            items, seen = list(range(10)), []
            for _ in run.steps(10):
                seen += run.batch(items, 3)
            assert all(sorted(seen[k : k + 10]) == items for k in range(0, 30, 10))
            assert seen[:10] != seen[10:20]
            for bad in (0, -1, 1.5, None):
                with pytest.raises(rlkit.ConfigError, match="size"):
                    run.batch(items, bad)
            with pytest.raises(rlkit.ConfigError, match="is empty"):
                run.batch([], 2)

    @pytest.mark.parametrize("order", [{}, {"order": 1}])
    def test_a_run_of_an_earlier_version_is_refused(self, tmp_path, order):
        """With what to do, whatever came after; no file is changed, and its weights can begin another run."""
        some_steps(tmp_path / "old", 2)
        newest = max((tmp_path / "old" / "checkpoints").iterdir())
        policy = records(tmp_path / "old")[-1].policy("policy")
        _, state = saves.read(newest, backend="run")
        shutil.rmtree(newest)
        saves.write(newest.parent, "step-00000002", lambda _: {k: v for k, v in state.items() if k != "order"} | order)
        before = contents(tmp_path / "old")
        said = f"of an earlier rlkit.*finish the run with that version, or start .*init_from={re.escape(repr(policy))}"
        for _ in range(2):
            with pytest.raises(rlkit.CheckpointError, match=said):
                Run(tmp_path / "old", trackers=["jsonl"], config={"other": 1})
        assert contents(tmp_path / "old") == before
        with Run(tmp_path / "new", trackers=()) as run:
            assert run.connect("toy", init_from=policy).version == 0


class TestFolder:
    def test_modes_and_names(self, tmp_path):
        folder = tmp_path / "run"
        some_steps(folder, 2)
        for path in folder.rglob("*"):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert not mode & 0o077, (path, oct(mode))

    def test_one_writer(self, tmp_path):
        code = f"import rlkit.runs; rlkit.runs.Run({str(tmp_path)!r}, trackers=())"
        with Run(tmp_path, trackers=()):
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            assert done.returncode == 1
            assert f"in use by process {os.getpid()}" in done.stderr
        with Run(tmp_path, trackers=()):
            pass

    def test_a_damaged_config_costs_a_warning(self, tmp_path):
        """Nothing goes on from it: the run does, and writes it anew."""
        with Run(tmp_path, seed=0, config={"a": {"b": 1}}, trackers=()):
            pass
        (tmp_path / "config.json").write_text('{"a": ')
        with (
            pytest.warns(RuntimeWarning, match=r"config\.json is damaged"),
            Run(tmp_path, config={"a": {"b": 2}}, trackers=()) as run,
        ):
            assert run.seed == 0
        with pytest.warns(RuntimeWarning, match=r"has changed: a\.b from 2 to 3$"):
            Run(tmp_path, config={"a": {"b": 3}}, trackers=()).close()

    def test_seed_is_remembered(self, tmp_path):
        with Run(tmp_path, trackers=()) as run:
            seed = run.seed
        with Run(tmp_path, trackers=()) as run:
            assert run.seed == seed
        with pytest.raises(rlkit.ConfigError, match="began with"):
            Run(tmp_path, seed=seed + 1, trackers=())
        with Run(tmp_path, trackers=()):
            pass  # the refused one holds no lock

    def test_config_that_changes(self, tmp_path):
        @attrs.frozen
        class Config:
            rate: float = 1e-4
            api_key: str = "tml-canary-0123456789"

        with Run(tmp_path, config=Config(), trackers=()):
            pass
        assert "canary" not in (tmp_path / "config.json").read_text()
        with pytest.warns(RuntimeWarning, match="rate"), Run(tmp_path, config={"rate": 1e-3}, trackers=()):
            pass
        with pytest.raises(rlkit.ConfigError, match="config"):
            Run(tmp_path, config=3, trackers=())

    @pytest.mark.parametrize(
        "options", [{"grace": -1}, {"retention": 3}, {"seed": -1}, {"seed": "x"}, {"config": 3}, {"trackers": 3}]
    )
    def test_bad_options(self, tmp_path, options):
        with pytest.raises(rlkit.ConfigError):
            Run(tmp_path / "x" / "y", **{"trackers": (), **options})
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("before", "left"),
        [
            (lambda run: None, []),
            (lambda run: run.connect("toy", role="other"), []),
            (lambda run: (run.folder.parent / "mine").mkdir(), ["mine"]),
            (lambda run: run.connect("toy", role="other").save("x").result(), ["run"]),
            (lambda run: run.log({"a": 1.0}), ["run"]),
            (lambda run: next(run.steps(2)), ["run"]),
        ],
    )
    def test_refused_before_the_first_step(self, tmp_path, before, left):
        """The folders that were made for it are gone, unless there is something in them."""
        above = tmp_path / "new" / "above"
        run = Run(above / "run", seed=0, config={"a": 1})
        before(run)
        with pytest.raises(rlkit.UnknownNameError), run:
            run.connect("nothing")
        assert (sorted(path.name for path in above.iterdir()) if left else list(tmp_path.iterdir())) == left

    def test_refused_where_there_was_a_folder(self, tmp_path):
        with pytest.raises(rlkit.UnknownNameError), Run(tmp_path, seed=0) as run:
            run.connect("nothing")
        assert tmp_path.exists()

    def test_closing_ends_the_loop(self, tmp_path):
        """The step in progress is the last one, whatever the total."""
        with Run(tmp_path, trackers=()) as run:
            steps = []
            for step in run.steps(3):
                steps.append(step)
                if step == 1:
                    run.close()
        assert steps == [0, 1]

    def test_bad_calls(self, tmp_path):
        with pytest.raises(rlkit.ConfigError, match="folder"):
            Run("", trackers=())
        with Run(tmp_path, trackers=()) as run:
            run.connect("toy")
            with pytest.raises(rlkit.ConfigError, match=r"a different max_length=.*role="):
                run.connect("toy", max_length=99)
            with pytest.raises(rlkit.ConfigError, match="every"):
                run.checkpoint(every=0)
            with pytest.raises(rlkit.ConfigError, match="total"):
                next(run.steps(-1))

    @pytest.mark.parametrize(
        "name", ["../x", "/etc/x", "a/b", "..", "a\0b", "x" * 300, "~", "$HOME", "a\nb", ".x", "ü"]
    )
    def test_names_are_no_paths(self, tmp_path, name):
        """A name is anything; what is written is in the run's folder, under names of the library's."""
        (tmp_path / "near").mkdir()
        for _ in range(2):
            with Run(tmp_path / "near" / "run", seed=0, trackers=()) as run:
                policy = run.connect("toy", role=name)
                kept = run.keep(name, {"n": run.step})
                assert kept == {"n": 0}
                assert run.value(name, lambda: 7) == 7
                run.rng(name).normal()
                assert run.batch([1, 2], 2, name=name)
                run.checkpoint(**{name: policy})
        assert sorted(p.name for p in tmp_path.rglob("*") if "run" not in p.relative_to(tmp_path).parts) == ["near"]
        assert all(path.name.isascii() and len(path.name) < 50 for path in tmp_path.rglob("*"))

    @pytest.mark.parametrize("name", ["", None, 3, ["x"], b"x", "a\ud800", {}])
    def test_what_is_no_name(self, tmp_path, name):
        with Run(tmp_path, trackers=()) as run:
            for call in (
                lambda: run.connect("toy", role=name),
                lambda: run.keep(name, {}),
                lambda: run.rng(name),
                lambda: run.value(name, int),
                lambda: run.batch([1], 1, name=name),
            ):
                with pytest.raises(rlkit.ConfigError, match="name"):
                    call()

    @pytest.mark.parametrize("path", ["../other", "policies/../../other", "ABSOLUTE", "policies", ".", ""])
    def test_checkpoints_that_name_what_is_not_theirs(self, tmp_path, path):
        """A checkpoint from elsewhere, checksums right, cannot have another folder removed."""
        other = tmp_path / "other"
        some_steps(tmp_path / "source", 1)
        source = next((tmp_path / "source" / "policies").iterdir())
        source.rename(other)
        policy = str(other) if path == "ABSOLUTE" else path
        some_steps(tmp_path / "run", 1)
        for old in (tmp_path / "run" / "checkpoints").iterdir():
            shutil.rmtree(old)
        state = {"backend": "run", "step": 0, "policies": {"policy": policy}, "kept": {}, "metrics": {}, "seed": 0}
        state["order"] = 2
        saves.write(tmp_path / "run" / "checkpoints", "step-00000000", lambda _: state)
        if path != "ABSOLUTE":
            with pytest.warns(RuntimeWarning, match="not a path in the run"), pytest.raises(rlkit.CheckpointError):
                Run(tmp_path / "run", trackers=())
        else:
            some_steps(tmp_path / "run", 4)
            assert [record.step for record in records(tmp_path / "run")] == [3, 4]
        assert (other / "state.json").exists()


class TestRetention:
    def test_last_every_and_best(self, tmp_path):
        retention = Retention(last=2, every=5, best=1, metric="score")
        some_steps(tmp_path, 13, retention=retention)
        left = records(tmp_path)
        assert [record.step for record in left] == [5, 10, 12, 13]  # 5 is also the best: after the step numbered 4
        policies = {path.name for path in (tmp_path / "policies").iterdir()}
        assert policies == {os.path.basename(record.policy("policy")) for record in left}  # noqa: PTH119

    def test_refusals(self):
        for options in ({"last": 0}, {"every": 0}, {"best": 1}, {"best": -1}, {"metric": ["x"]}, {"metric": 3}):
            with pytest.raises(rlkit.ConfigError, match="Retention"):
                Retention(**options)


class TestDamage:
    def test_falls_back_with_a_warning(self, tmp_path):
        some_steps(tmp_path, 4, retention=Retention(last=4))
        newest = records(tmp_path)[-1]
        (tmp_path / newest.policies["policy"] / "toy.npz").write_bytes(b"")
        with pytest.warns(RuntimeWarning, match="skipped"):
            run = Run(tmp_path, trackers=())
        with run:
            assert run.step == 3
            assert run.connect("toy").version == 3

    def test_every_flip_is_found(self, tmp_path):
        """200 single bits and truncations, in every file of the newest checkpoint: all found."""
        some_steps(tmp_path, 2, retention=Retention(last=2))
        newest = records(tmp_path)[-1]
        files = [
            p
            for folder in (newest.path, tmp_path / newest.policies["policy"])
            for p in folder.rglob("*")
            if p.is_file()
        ]
        rng = np.random.default_rng(0)
        missed = 0
        for k in range(200):
            path = files[k % len(files)]
            whole = path.read_bytes()
            if k % 5 == 4:
                path.write_bytes(whole[: rng.integers(len(whole))])
            else:
                broken = bytearray(whole)
                broken[rng.integers(len(broken))] ^= 1 << int(rng.integers(8))
                path.write_bytes(broken)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                missed += [record.step for record in records(tmp_path)] != [1]
            path.write_bytes(whole)
        assert missed == 0
        assert [record.step for record in records(tmp_path)] == [1, 2]

    def test_what_was_cut_off_is_tidied(self, tmp_path):
        some_steps(tmp_path, 2)
        (tmp_path / "policies" / ".step-00000009-x.partial").mkdir()
        (tmp_path / "policies" / "step-00000009-000009-deadbeef").mkdir()
        (tmp_path / "policies" / "mine").mkdir()
        (tmp_path / "checkpoints" / ".step-00000009-x.partial").mkdir()
        some_steps(tmp_path, 3)
        left = {path.name for path in (tmp_path / "policies").iterdir()}
        assert "mine" in left
        assert not any("00000009" in name for name in left)
        assert not any(p.name.startswith(".") for p in (tmp_path / "checkpoints").iterdir())

    def test_none_is_whole(self, tmp_path):
        """A run whose checkpoints are all damaged says so; it neither begins anew nor drops what was logged."""
        with Run(tmp_path, seed=0) as run:
            policy = run.connect("toy")
            for _ in run.steps(2):
                policy.forward_backward(DATA, "cross_entropy")
                policy.optim_step(rlkit.Adam()).result()
                run.log({"train/loss": 1.0})
                run.checkpoint(policy)
        logged = (tmp_path / "metrics.jsonl").read_text()
        for record in records(tmp_path):
            (record.path / "state.json").write_text("{}")
        with pytest.warns(RuntimeWarning, match="skipped"), pytest.raises(rlkit.CheckpointError, match="none of the 2"):
            Run(tmp_path)
        assert (tmp_path / "metrics.jsonl").read_text() == logged

    def test_what_can_not_be_read_now_keeps_its_policy(self, tmp_path, monkeypatch):
        """A disk that fails a read while spent checkpoints are removed costs nothing that it may give back later."""
        some_steps(tmp_path, 2, retention=Retention(last=1))
        real, failed = saves.read, []

        def read(path, **options):
            name = os.fspath(path)
            if "checkpoints" in name and "step-00000003" in name and len(failed) < 2:
                failed.append(name)
                if len(failed) == 2:  # after what was written was read back
                    raise rlkit.CheckpointError("the disk is asleep")
            return real(path, **options)

        monkeypatch.setattr(saves, "read", read)
        with pytest.warns(RuntimeWarning, match="asleep"):
            some_steps(tmp_path, 3, retention=Retention(last=1))
        assert len(failed) == 2
        assert [record.step for record in records(tmp_path)][-1] == 3

    def test_what_can_not_be_removed_is_warned_of(self, tmp_path, monkeypatch):
        def refused(*args):
            raise OSError("read-only")

        monkeypatch.setattr(rlkit.runs.record, "tidy", refused)
        with pytest.warns(RuntimeWarning, match="could not be removed: read-only"):
            some_steps(tmp_path, 1)
        assert [record.step for record in records(tmp_path)] == [1]

    def test_folders_that_the_system_refuses(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(rlkit.CheckpointError, match="cannot be opened as a run"):
            Run(tmp_path / "file", trackers=())


class TestStopping:
    """The first signal lets a step finish and be saved; what hangs is abandoned, wherever the main thread waits."""

    @pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
    def test_the_step_is_finished_and_saved(self, tmp_path, number, raised):
        with Run(tmp_path, trackers=()) as run:
            policy, finished = run.connect("toy"), []
            before = signal.getsignal(number)
            with pytest.raises(raised) as ended:  # noqa: PT012
                for step in run.steps(9):
                    if step == 2:
                        os.kill(os.getpid(), number)
                    finished.append(step)
                    run.checkpoint(policy, every=100)
            assert finished == [0, 1, 2]
            assert signal.getsignal(number) is before
        assert [record.step for record in records(tmp_path)] == [3]
        if raised is SystemExit:
            assert ended.value.code == 143

    def test_the_first_ctrl_c_gives_a_step_all_its_time_and_says_so(self, tmp_path, capsys):
        """Unlike SIGTERM, whose grace this is."""
        late = threading.Event()
        with Run(tmp_path, trackers=(), grace=0.0) as run, pytest.raises(KeyboardInterrupt, match="before step 2"):  # noqa: PT012
            policy = run.connect("toy")
            for step in run.steps(9):
                if step == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                    threading.Timer(0.1, late.set).start()
                    assert late.wait(60.0)
                run.checkpoint(policy, every=100)
        assert "finishing step 1, then saving; Ctrl-C again to stop now" in capsys.readouterr().err
        assert [record.step for record in records(tmp_path)] == [2]

    def test_a_signal_behind_the_checkpoint_call_saves_the_step_too(self, tmp_path):
        with Run(tmp_path, trackers=()) as run, pytest.raises(KeyboardInterrupt):  # noqa: PT012
            policy = run.connect("toy")
            for _ in run.steps(9):
                run.checkpoint(policy, every=100)
                os.kill(os.getpid(), signal.SIGINT)
        assert [record.step for record in records(tmp_path)] == [1]

    @pytest.mark.parametrize("second", [False, True])
    def test_a_step_that_hangs_is_abandoned(self, tmp_path, second):
        """By a second signal, or after the grace."""
        never = threading.Event()
        late = threading.Timer(60.0, never.set)
        late.start()
        with Run(tmp_path, trackers=(), grace=60.0 if second else 0.1) as run:
            policy = run.connect("toy")
            run.checkpoint(policy)
            with pytest.raises(KeyboardInterrupt, match="last checkpoint: step 0; step 0 will be repeated"):  # noqa: PT012
                for _ in run.steps(9):
                    os.kill(os.getpid(), signal.SIGTERM)
                    if second:
                        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()
                    never.wait()
        assert not never.is_set()
        late.cancel()
        with Run(tmp_path, trackers=()) as run:
            assert run.step == 0
            assert run.record is not None

    @staticmethod
    def drawn(folder, *, twice_at=None, moved=False):
        """Train with samples and numbers that depend on all before; two signals in one step. Returns all of them."""
        numbers = []
        with Run(folder, seed=0, trackers=("jsonl",)) as run:
            policy, rng = run.connect("toy"), run.rng("mine")
            for step in run.steps(3):
                numbers.append(
                    (rng.integers(1000), policy.sampler().result().sample([65], FEW, n=2).result()[0].tokens[0])
                )
                run.log({"x": float(numbers[-1][0])})
                policy.forward_backward(DATA, "cross_entropy")
                if moved:
                    policy.optim_step(rlkit.Adam(learning_rate=0.5)).result()
                if step == twice_at:
                    for _ in range(2):
                        os.kill(os.getpid(), signal.SIGINT)
                if not moved:
                    policy.optim_step(rlkit.Adam(learning_rate=0.5))
                run.checkpoint(policy, every=100)
            return numbers, policy.forward(DATA).result().logprobs[0].tolist()

    @pytest.mark.parametrize("moved", [False, True])
    def test_the_last_whole_step_of_an_abandoned_one_is_saved(self, tmp_path, moved):
        """Where the policy has not moved since; what follows is what would have followed, to the last bit."""
        expected = self.drawn(tmp_path / "through", moved=moved)
        lost = "steps 0-1" if moved else "step 1"
        with pytest.raises(KeyboardInterrupt, match=f"SIGINT: step 1 is abandoned; .*; {lost} will be repeated"):
            self.drawn(tmp_path / "cut", twice_at=1, moved=moved)
        assert [record.step for record in records(tmp_path / "cut")] == ([] if moved else [1])
        numbers, logprobs = self.drawn(tmp_path / "cut", moved=moved)
        assert (numbers, logprobs) == (expected[0][0 if moved else 1 :], expected[1])
        rows = [(row["step"], row["metrics"]["x"]) for row in rlkit.tracking.read_metrics(tmp_path / "cut")]
        assert rows == [(step, float(number)) for step, (number, _) in enumerate(expected[0])]

    def test_a_stop_that_nothing_catches_is_one_line(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr("gc.freeze", lambda: None)  # of a process that ends
        monkeypatch.setattr(sys, "excepthook", lambda *_: print("a traceback", file=sys.stderr))
        with pytest.raises(KeyboardInterrupt) as stopped, Run(tmp_path, trackers=()) as run:  # noqa: PT012
            for _ in run.steps(9):
                os.kill(os.getpid(), signal.SIGINT)
        capsys.readouterr()
        for error in (stopped.value, KeyboardInterrupt()):
            sys.excepthook(type(error), error, error.__traceback__)
        assert capsys.readouterr().err == "rlkit: stopped before step 1; run again to continue\na traceback\n"


def test_a_run_that_is_closed_in_its_loop_gives_no_further_step(tmp_path):
    """As where another cell of a notebook, or a callback, opens the folder again."""
    with Run(tmp_path, trackers=()) as run:
        run.connect("toy")
        done = []
        for step in run.steps(9):
            done.append(step)
            if step == 1:
                run.close()
    assert done == [0, 1]


class TestSettings:
    """What a run was made with is kept without being typed into ``config=``."""

    def test_the_policy_and_what_was_last_asked_of_it(self, tmp_path):
        kept = tmp_path / "run" / "settings.json"
        with Run(tmp_path / "run", seed=0, config={}, trackers=()) as run:
            policy = run.connect("local", model=str(build("llama", tmp_path / "model")), lora=rlkit.Lora(rank=2))
            critic = run.critic("toy", tokenizer=policy.tokenizer)
            made = json.loads(kept.read_text())
            assert made["policy"]["options"]["lora"]["rank"] == made["policy"]["lora"]["rank"] == 2
            assert (made["policy"]["dtype"], made["policy"]["device"]) == ("float32", "cpu")
            assert made["critic"]["backend"] == "toy"
            assert "last loss" not in made["policy"]
            for _ in run.steps(1):
                policy.sampler().result().sample([1], rlkit.SamplingParams(max_tokens=3)).result()
                policy.forward_backward(DATA, "cross_entropy")
                policy.optim_step(rlkit.Adam(learning_rate=0.125)).result()
                run.checkpoint()
        last = json.loads(kept.read_text())["policy"]
        assert last["last loss"]["name"] == "cross_entropy"
        assert last["last optimizer step"]["learning_rate"] == 0.125
        assert last["last sampling"]["max_tokens"] == 3
        assert last["last loss"] == {"name": "cross_entropy"}
        assert critic.version == 0

    def test_other_settings_are_no_reason_to_refuse_and_damaged_ones_are_not_read(self, tmp_path):
        for length, damage in ((64, False), (128, True)):
            with Run(tmp_path, seed=0, config={}, trackers=()) as run:
                policy = run.connect("toy", max_length=length)
                assert json.loads((tmp_path / "settings.json").read_text())["policy"]["max_length"] == length
                run.checkpoint(policy)
            if damage:
                (tmp_path / "settings.json").write_text("[")
                assert run.report().exists()

    def test_keys_are_not_written(self, tmp_path):
        """Neither of an option nor of an object's fields."""

        @attrs.frozen
        class Server:
            url: str
            api_key: str

        Settings(tmp_path).note({"policy": {"api_key": "hush-hush", "sampler": Server("http://a", "hush"), "f": build}})
        written = (tmp_path / "settings.json").read_text()
        assert "hush" not in written
        assert json.loads(written)["policy"]["f"] == "build"
