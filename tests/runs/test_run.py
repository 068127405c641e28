"""What a run keeps, refuses and removes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import zlib
from pathlib import Path

import attrs
import numpy as np
import pytest

import rlkit
from rlkit.advantages import RunningBaseline
from rlkit.backends import saves
from rlkit.runs import Retention, Run, checkpoints, records
from tests.models.build import build

DATA = [rlkit.Datum([65, 66, 67], [0, 1, 1])]
PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
HANGS = """
import hashlib, sys, time
from concurrent.futures import ThreadPoolExecutor
import rlkit

def wait():
    try:
        time.sleep(600)
    except BaseException:
        pass

with rlkit.Run(sys.argv[1], seed=0, trackers=("jsonl",)) as run:
    policy = run.connect("toy")
    for step in run.steps(9):
        if step == 2:
            print(flush=True)
            exec(sys.argv[2])
        run.checkpoint(policy)
"""


def some_steps(folder, steps, **options):
    with Run(folder, seed=0, trackers=("jsonl",), **options) as run:
        policy = run.connect("toy")
        for step in run.steps(steps):
            policy.forward_backward(DATA, "cross_entropy")
            policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
            run.log({"train/loss": 1.0})
            run.checkpoint(policy, metrics={"score": float(-abs(step - 4))})


class TestKeeping:
    def test_what_can_not_be_kept(self, tmp_path):
        plain = (3, "text", None, object(), {"a": object()}, [b"bytes"], {"a": np.array([object()])})
        frozen, nested = rlkit.Adam(), {"baseline": RunningBaseline()}  # the second would come back as a dict
        with Run(tmp_path, trackers=()) as run:
            for kept in (*plain, frozen, nested):
                with pytest.raises(rlkit.ConfigError, match="kept"):
                    run.keep("kept", kept)

    def test_a_policy_that_is_not_finite_is_never_saved(self, tmp_path):
        """Whatever made it so: the checkpoint before stays, and is what the next run goes on from."""
        with Run(tmp_path / "run", seed=0, trackers=(), retention=Retention(last=1)) as run:
            policy = run.connect("toy")
            run.checkpoint(policy)
            policy._weights.value[0] = np.inf
            with pytest.raises(rlkit.CheckpointError, match="not finite"):
                run.checkpoint(policy)
        with Run(tmp_path / "run", trackers=()) as run:
            assert run.connect("toy").version == 0
        assert not [path for path in (tmp_path / "run").rglob("*") if path.name.startswith(".")]

    def test_names_of_what_is_kept(self, tmp_path):
        """Another kind of object is refused, a new name is warned of, and what one program does not keep stays."""
        with Run(tmp_path, trackers=()) as run:
            run.connect("toy")
            run.keep("x", {"a": 1})
            run.checkpoint()
        with Run(tmp_path, trackers=()) as run:
            with pytest.raises(rlkit.CheckpointError, match="x: "):
                run.keep("x", np.random.default_rng(0))
            with pytest.warns(RuntimeWarning, match="'new'"):
                run.keep("new", {})
            with pytest.raises(rlkit.ConfigError, match="an unused name"):
                run.keep("new", {})
            run.connect("toy")
            run.checkpoint()
        with Run(tmp_path, trackers=()) as run:
            assert run.keep("x", {}) == {"a": 1}

    def test_what_a_seed_gives_is_data(self, tmp_path):
        """Names and their order in seeds never change, or no run could be repeated."""

        def stream(name):
            return np.random.SeedSequence(5, spawn_key=(zlib.crc32(name),))

        with Run(tmp_path, seed=5, trackers=()) as run:
            assert run.rng("mine").normal() == np.random.default_rng(stream(b"mine")).normal()
            for role in ("policy", "other"):
                expected = stream(f"connect/{role}".encode()).generate_state(1, np.uint32)[0]
                assert run.connect("toy", role=role)._seeds.entropy == expected
            assert run.batch(range(7), 3) == [5, 2, 0]
            assert run.batch(range(7), 3, name="other") == [2, 5, 1]

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


class TestFolder:
    def test_one_writer(self, tmp_path):
        opens = f"import rlkit.runs; run = rlkit.runs.Run({str(tmp_path)!r}, trackers=())"
        with subprocess.Popen(
            [sys.executable, "-c", f"{opens}; print(flush=True); import time; time.sleep(600)"], **PIPES
        ) as holder:
            holder.stdout.readline()
            with pytest.raises(rlkit.ConfigError, match=f"in use by process {holder.pid}; a run has one writer"):
                Run(tmp_path, trackers=())
            holder.kill()
        run = Run(tmp_path, trackers=())
        refused = subprocess.run([sys.executable, "-c", opens], **PIPES, check=False)
        assert refused.returncode == 1
        assert f"in use by process {os.getpid()}; a run has one writer" in refused.stderr
        thread = threading.Thread(target=run.close)
        thread.start()
        thread.join()
        subprocess.run([sys.executable, "-c", opens], check=True)
        run = Run(tmp_path, trackers=())
        del run
        gc.collect()
        subprocess.run([sys.executable, "-c", opens], check=True)

    @pytest.mark.parametrize("end", ["sys.exit()", "run.close(); os._exit(0)", "del run; gc.collect(); os._exit(0)"])
    def test_the_end_of_a_forked_child_frees_nothing(self, tmp_path, end):
        code = f"""
            import gc, os, subprocess, sys, rlkit.runs
            opens = "import rlkit.runs; rlkit.runs.Run({str(tmp_path)!r}, trackers=())"
            run = rlkit.runs.Run({str(tmp_path)!r}, trackers=())
            child = os.fork()
            if child == 0:
                {end}
            os.waitpid(child, 0)
            print(subprocess.run([sys.executable, "-c", opens], capture_output=True, text=True).stderr)
        """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], **PIPES, check=False)
        assert "in use by process" in done.stdout, done.stderr

    def test_config_that_changes(self, tmp_path):
        @attrs.frozen
        class Config:
            rate: float = 1e-4
            api_key: str = "canary-0123456789"
            inner: object = build

        Run(tmp_path, config=Config(inner=[Config()]), trackers=()).close()
        inner = {"rate": 1e-4, "api_key": "***", "inner": "build"}
        assert json.loads((tmp_path / "config.json").read_text()) == {**inner, "inner": [inner]}
        with pytest.warns(RuntimeWarning, match=r"has changed: a from None to .*, rate from 0.0001 to 1$"):
            Run(tmp_path, config={"rate": 1, "a": {"b": 1}}, trackers=()).close()
        (tmp_path / "config.json").write_text('{"a": ')
        with pytest.warns(RuntimeWarning, match=r"config\.json is damaged"):
            Run(tmp_path, config={"a": {"b": 2}}, trackers=()).close()
        with pytest.warns(RuntimeWarning, match=r"has changed: a\.b from 2 to 3$"):
            Run(tmp_path, config={"a": {"b": 3}}, trackers=()).close()

    def test_bad_options(self, tmp_path):
        wrong = [{"retention": 3}, {"seed": -1}, {"seed": "x"}, {"config": 3}, {"trackers": 3}, {"trackers": "jsonl"}]
        for options in (*wrong, {"folder": ""}):
            with pytest.raises(rlkit.ConfigError):
                Run(**{"folder": tmp_path, "trackers": (), **options})
        for options in ({"last": 0}, {"every": 0}, {"best": 1}, {"best": -1}, {"metric": ["x"]}, {"metric": 3}):
            with pytest.raises(rlkit.ConfigError, match="Retention"):
                Retention(**options)
        with Run(tmp_path, trackers=()) as run:  # the refused ones hold no lock
            run.connect("toy")
            for call, what in ((lambda: run.checkpoint(every=0), "every"), (lambda: next(run.steps(-1)), "total")):
                with pytest.raises(rlkit.ConfigError, match=what):
                    call()
        with pytest.raises(rlkit.CheckpointError, match="cannot be opened as a run"):
            Run(tmp_path / "run.json", trackers=())

    def test_closing_ends_the_loop(self, tmp_path):
        with Run(tmp_path, trackers=()) as run:
            assert [run.close() if step == 1 else step for step in run.steps(3)] == [0, None]

    def test_names_are_no_paths(self, tmp_path):
        for name in ("../x", "/etc/x", "a/b", "..", "a\0b", "x" * 300, "~", "$HOME", "a\nb", ".x", "ü"):
            shutil.rmtree(tmp_path / "near", ignore_errors=True)
            for _ in range(2):
                with Run(tmp_path / "near" / "run", seed=0, trackers=()) as run:
                    policy = run.connect("toy", role=name)
                    assert run.keep(name, {"n": 0}) == {"n": 0}
                    assert run.value(name, lambda: 7) == 7
                    run.rng(name).normal()
                    assert run.batch([1, 2], 2, name=name)
                    run.checkpoint(**{name: policy})
            assert [path.name for path in (*tmp_path.iterdir(), *(tmp_path / "near").iterdir())] == ["near", "run"]
            assert all(path.name.isascii() and len(path.name) < 50 for path in tmp_path.rglob("*")), name

    def test_what_is_no_name(self, tmp_path):
        with Run(tmp_path, trackers=()) as run:
            for name in ("", None, 3, ["x"], b"x", "a\ud800", {}):
                for call in (
                    lambda name: run.connect("toy", role=name),
                    lambda name: run.keep(name, {}),
                    run.rng,
                    lambda name: run.value(name, int),
                    lambda name: run.batch([1], 1, name=name),
                ):
                    with pytest.raises(rlkit.ConfigError, match="name"):
                        call(name)

    def test_checkpoints_that_name_what_is_not_theirs(self, tmp_path):
        """A checkpoint from elsewhere, checksums right, cannot have another folder removed."""
        other, checkpoints = tmp_path / "other", tmp_path / "run" / "checkpoints"
        some_steps(tmp_path / "source", 1)
        next((tmp_path / "source" / "policies").iterdir()).rename(other)
        some_steps(tmp_path / "run", 1)
        for path in ("../other", "policies/../../other", "policies", ".", "", str(other)):
            shutil.rmtree(checkpoints)
            state = {"backend": "run", "step": 0, "policies": {"policy": path}, "kept": {}, "metrics": {}, "seed": 0}
            saves.write(checkpoints, "step-00000000", lambda _, state=state: state)
            if path != str(other):
                with pytest.warns(RuntimeWarning, match="not a path in the run"), pytest.raises(rlkit.CheckpointError):
                    Run(tmp_path / "run", trackers=())
        some_steps(tmp_path / "run", 4)
        assert [record.step for record in records(tmp_path / "run")] == [3, 4]
        assert (other / "state.json").exists()


class TestCheckpoints:
    def test_last_every_and_best(self, tmp_path):
        some_steps(tmp_path, 13, retention=Retention(last=2, every=5, best=1, metric="score"))
        left = records(tmp_path)
        assert [record.step for record in left] == [5, 10, 12, 13]  # 5 is also the best: after the step numbered 4
        policies = {path.name for path in (tmp_path / "policies").iterdir()}
        assert policies == {os.path.basename(record.policy("policy")) for record in left}  # noqa: PTH119

    def test_a_checkpoint_that_is_removed_while_it_is_read(self, tmp_path, monkeypatch):
        some_steps(tmp_path, 1, retention=Retention(last=1))
        real = checkpoints.read

        def read(path, **options):
            monkeypatch.undo()
            some_steps(tmp_path, 2, retention=Retention(last=1))
            return real(path, **options)

        monkeypatch.setattr(checkpoints, "read", read)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [record.step for record in records(tmp_path)] == [2]

    def test_what_was_cut_off_is_tidied(self, tmp_path):
        """Other folders stay, and so does the policy of a checkpoint that a disk fails to read now."""
        some_steps(tmp_path, 2)
        stays = {*(tmp_path / "policies").iterdir(), tmp_path / "policies" / "mine"}
        (records(tmp_path)[0].path / "state.json").write_text("{}")
        for name in ("policies/.step-00000009-x.partial", "policies/step-00000009-000009-deadbeef", "policies/mine"):
            (tmp_path / name).mkdir()
        (tmp_path / "checkpoints" / ".step-00000009-x.partial").mkdir()
        with pytest.warns(RuntimeWarning, match="skipped"):
            checkpoints.prune(tmp_path, Retention(), None)
        assert {*(tmp_path / "policies").iterdir()} == stays
        assert not any(path.name.startswith(".") for path in (tmp_path / "checkpoints").iterdir())

    def test_none_is_whole(self, tmp_path):
        """A run whose checkpoints are all damaged says so; it neither begins anew nor drops what was logged."""
        some_steps(tmp_path, 2)
        logged = (tmp_path / "metrics.jsonl").read_text()
        for record in records(tmp_path):
            (record.path / "state.json").write_text("{}")
        with pytest.warns(RuntimeWarning, match="skipped"), pytest.raises(rlkit.CheckpointError, match="none of the 2"):
            Run(tmp_path)
        assert (tmp_path / "metrics.jsonl").read_text() == logged

    def test_what_can_not_be_removed_is_warned_of(self, tmp_path, monkeypatch):
        def refused(*args):
            raise OSError("read-only")

        monkeypatch.setattr(checkpoints, "remove_leftovers", refused)
        with pytest.warns(RuntimeWarning, match="could not be removed: read-only"):
            some_steps(tmp_path, 1)
        assert [record.step for record in records(tmp_path)] == [1]

    def test_what_the_system_refuses(self, tmp_path, monkeypatch):
        """A file system may have no owners; other failures, and all of syncing, are errors."""
        some_steps(tmp_path, 2)
        assert not any(path.stat().st_mode & 0o077 for path in tmp_path.rglob("*"))  # others read nothing
        no_owners = errno.EPERM, errno.ENOTSUP, errno.ENOSYS
        cases = [*((Path, "chmod", code) for code in (*no_owners, errno.EIO)), (os, "fsync", errno.EIO)]
        for place, name, code in (*cases, (os, "fsync", errno.ENOSPC)):

            def refused(*args, code=code):
                raise OSError(code, os.strerror(code))

            fails = contextlib.nullcontext() if code in no_owners else pytest.raises(rlkit.CheckpointError)
            with monkeypatch.context() as patch, fails:
                patch.setattr(place, name, refused)
                some_steps(tmp_path, records(tmp_path)[-1].step + 1)
        assert [record.step for record in records(tmp_path)] == [4, 5]

    def test_a_policy_that_cannot_be_loaded(self, tmp_path):
        """A policy with right checksums and wrong content raises, and the error names the checkpoint before."""
        some_steps(tmp_path, 2)
        for step, remedy in ((2, "to resume from step 1, remove .*step-00000002"), (1, "use another folder")):
            newest, state = records(tmp_path)[-1], {"backend": "toy", "version": step}
            path = Path(newest.policy("policy"))
            shutil.rmtree(path)
            saves.write(path.parent, "x", lambda at, x=state: (at / "toy.npz").write_bytes(b"x") and x).rename(path)
            with Run(tmp_path, trackers=()) as run, pytest.raises(rlkit.CheckpointError, match=remedy):
                run.connect("toy")
            shutil.rmtree(newest.path)


class TestStopping:
    """The first signal lets a step finish and be saved; the second ends the process, wherever it waits."""

    @pytest.mark.parametrize("late", [False, True])  # whether it comes after the step's own call of checkpoint
    @pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
    def test_the_step_is_finished_and_saved(self, tmp_path, number, raised, late):
        with Run(tmp_path, trackers=()) as run:
            policy, finished = run.connect("toy"), []
            before = signal.getsignal(number)
            with pytest.raises(raised) as ended:  # noqa: PT012
                for step in run.steps(9):
                    if late:
                        run.checkpoint(policy, every=100)
                    if step == 2:
                        os.kill(os.getpid(), number)
                    finished.append(step)
                    if not late:
                        run.checkpoint(policy, every=100)
            assert finished == [0, 1, 2]
            assert signal.getsignal(number) is before
        assert [record.step for record in records(tmp_path)] == [3]
        if raised is SystemExit:
            assert ended.value.code == 143

    @pytest.mark.parametrize(
        ("number", "hangs"),
        [
            (signal.SIGINT, "time.sleep(600)"),
            (signal.SIGTERM, "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"),  # minutes in native code
            (signal.SIGTERM, "ThreadPoolExecutor().submit(time.sleep, 600).result()"),  # Python waits for its thread
            (signal.SIGINT, "[wait() for _ in range(9)]"),  # goes on after an interruption
        ],
    )
    def test_a_second_signal_ends_the_process(self, tmp_path, number, hangs):
        """At once or within 5 s; the folder is free, and its checkpoint whole."""
        with subprocess.Popen([sys.executable, "-c", HANGS, str(tmp_path), hangs], **PIPES) as process:
            process.stdout.readline()
            time.sleep(0.1)
            process.send_signal(number)
            began = time.monotonic()
            process.stderr.readline()
            assert "finishing the step, then saving" in process.stderr.readline()
            assert time.monotonic() - began < 3
            assert process.poll() is None
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
            assert process.wait(60)
            assert time.monotonic() - began < 5 + 5  # the second 5: for a busy machine
        assert "step 2 is abandoned; the run resumes with step 2" in said
        assert "Traceback" not in said
        with Run(tmp_path, trackers=()) as run:
            assert run.step == 2

    @pytest.mark.parametrize("saved", [1, 2])
    def test_the_process_of_a_notebook_stays(self, tmp_path, monkeypatch, saved):
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        monkeypatch.setattr(rlkit.runs.run, "_PATIENCE", 0.0)
        said = f"SIGINT: step 2 is abandoned; the run resumes with step {saved}"
        with Run(tmp_path, trackers=()) as run, pytest.raises(KeyboardInterrupt, match=said):  # noqa: PT012
            policy = run.connect("toy")
            for step in run.steps(9):
                if step == 2:
                    for _ in range(2):
                        os.kill(os.getpid(), signal.SIGINT)
                if step < saved:
                    run.checkpoint(policy)
        with Run(tmp_path, trackers=()) as run:
            assert run.step == saved

    def test_signals_of_a_forked_child_are_not_the_runs(self, tmp_path):
        with Run(tmp_path, trackers=()) as run:
            for _ in run.steps(2):
                begun, tell = os.pipe()
                child = os.fork()
                if child == 0:
                    os.write(tell, b"!")
                    time.sleep(60)
                    os._exit(0)
                os.read(begun, 1)  # before, the child is still being set up
                os.kill(child, signal.SIGTERM)
                assert os.waitpid(child, 0)[1] == signal.SIGTERM
                os.close(begun)
                os.close(tell)
        assert run.step == 2

    def test_an_event_loop_still_gets_its_signals(self, tmp_path):
        async def main():
            told = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
            with Run(tmp_path, trackers=()) as run:
                for _ in run.steps(1):
                    os.kill(os.getpid(), signal.SIGUSR1)
                    await asyncio.wait_for(told.wait(), 60)

        asyncio.run(main())

    def test_a_stop_that_nothing_catches_is_one_line(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(sys, "excepthook", lambda *_: print("a traceback", file=sys.stderr))
        with pytest.raises(KeyboardInterrupt) as stopped, Run(tmp_path, trackers=()) as run:  # noqa: PT012
            for _ in run.steps(9):
                os.kill(os.getpid(), signal.SIGINT)
        capsys.readouterr()
        for error in (stopped.value, KeyboardInterrupt()):
            sys.excepthook(type(error), error, error.__traceback__)
        assert capsys.readouterr().err == "rlkit: stopped before step 1; run again to continue\na traceback\n"


class TestSettings:
    """What a run was made with is kept without being typed into ``config=``."""

    def test_the_policy_and_what_was_last_asked_of_it(self, tmp_path):
        def read_models():
            return json.loads((tmp_path / "run" / "run.json").read_text())["models"]

        with Run(tmp_path / "run", seed=0, config={}, trackers=()) as run:
            policy = run.connect("local", model=str(build("llama", tmp_path / "model")), lora=rlkit.Lora(rank=2))
            run.critic("toy", tokenizer=policy.tokenizer)
            made = read_models()
            assert made["policy"]["options"]["lora"]["rank"] == made["policy"]["lora"]["rank"] == 2
            assert (made["policy"]["dtype"], made["policy"]["device"]) == ("float32", "cpu")
            assert made["critic"]["backend"] == "toy"
            assert "last loss" not in made["policy"]
            for _ in run.steps(1):
                policy.sampler().result().sample([1], rlkit.SamplingParams(max_tokens=3)).result()
                policy.forward_backward(DATA, "cross_entropy")
                policy.optim_step(rlkit.Adam(learning_rate=0.125)).result()
                run.checkpoint()
        last = read_models()["policy"]
        assert last["last optimizer step"]["learning_rate"] == 0.125
        assert last["last sampling"]["max_tokens"] == 3
        assert last["last loss"] == {"name": "cross_entropy"}

    def test_other_options_are_no_reason_to_refuse(self, tmp_path):
        for length in (64, 128):
            with Run(tmp_path, config={}, trackers=()) as run:
                policy = run.connect("toy", max_length=length)
                facts = json.loads((tmp_path / "run.json").read_text())
                assert (facts["seed"], facts["models"]["policy"]["max_length"]) == (run.seed, length)
                assert facts["machine"]["versions"]["numpy"] == np.__version__
                assert {"command", "python", "system", "started"} <= facts["machine"].keys()
                run.checkpoint(policy)
