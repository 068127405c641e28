"""Plays episodes of a verifiers environment; run by an interpreter that has verifiers, which rlkit need not have there.

Lines of JSON, answered with the same ``"id"``. The first on stdin is ``{"id": 0, "config": ..., "size": ..., "folder":
...}``, answered by ``{"size": n, "name": ..., "answers": [...]}`` or ``{"failed": text}``. Then ``{"id": k, "index": i,
"url": ..., "model": ...}`` begins an episode, answered by ``{"reward": ..., ...}`` or ``{"failed": text}``, and
``{"cancel": k}`` ends one. The process ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import verifiers.v1 as vf


def main() -> None:
    """Serve requests from stdin on the original stdout; environments print to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asyncio.run(_serve(out))


def _tell(out: TextIO, **fields: object) -> None:
    out.write(json.dumps(fields, default=str) + "\n")
    out.flush()


async def _serve(out: TextIO) -> None:
    first = json.loads(sys.stdin.readline())
    sys.path[0] = first["folder"]  # in place of this file's own
    try:
        env, tasks = _environment(first["config"], first["size"])
    except BaseException as error:  # noqa: BLE001  # SystemExit too
        _tell(out, id=first["id"], failed=f"{type(error).__name__}: {error}")
        return
    playing: dict[int, asyncio.Task[None]] = {}
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.run_in_executor(None, _read, loop, lines)
    async with env.serving():
        _tell(out, id=first["id"], size=len(tasks), name=env.config.env_id, answers=[_answer(task) for task in tasks])
        while line := await lines.get():
            asked = json.loads(line)
            if "cancel" in asked:
                if asked["cancel"] in playing:
                    playing[asked["cancel"]].cancel()
                continue
            playing[asked["id"]] = task = asyncio.create_task(_play(out, env, tasks[asked["index"]], asked))
            task.add_done_callback(functools.partial(lambda number, _: playing.pop(number), asked["id"]))
        for task in list(playing.values()):
            task.cancel()
        await asyncio.gather(*playing.values(), return_exceptions=True)


def _read(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str]) -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(lines.put_nowait, line)
    loop.call_soon_threadsafe(lines.put_nowait, "")


def _environment(config: Mapping[str, object], size: int | None) -> tuple[vf.Env, list[vf.Task]]:
    """Return the environment, and its tasks; agents run here, unless the config says where."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields

    resolved = vf.resolve_env_config(config)
    for spec in agent_config_fields(resolved).values():
        if "runtime" not in spec.model_fields_set:
            spec.runtime = vf.SubprocessConfig()
    env = vf.load_environment(resolved)
    if size is None and not env.taskset.bounded:
        raise ValueError("the taskset is infinite: set the number of tasks with size=")
    return env, list(itertools.islice(env.taskset, size))


def _answer(task: vf.Task) -> object:
    answer = getattr(task.data, "answer", None)
    return answer if isinstance(answer, (str, int, float)) else None


async def _play(out: TextIO, env: vf.Env, task: vf.Task, asked: Mapping[str, object]) -> None:
    import verifiers.v1 as vf

    try:
        client = vf.EvalClientConfig(base_url=asked["url"], api_key_var="RLKIT_NO_KEY")  # the URL names the session
        context = vf.ModelContext(model=asked["model"], client=client, sampling=vf.SamplingConfig())
        _tell(out, id=asked["id"], **_outcome(await env.run_episode(task, context)))
    except asyncio.CancelledError:
        _tell(out, id=asked["id"], failed="was stopped")
    except Exception as error:  # noqa: BLE001  # a fault of this episode alone
        _tell(out, id=asked["id"], failed=f"{type(error).__name__}: {error}")


def _outcome(episode: vf.Episode) -> dict[str, object]:
    """Return what an episode came to."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        told = f"{errors[-1].type}: {errors[-1].message}" if errors else "it did not complete"
        return {"failed": told}
    for trace in episode.traces:
        if not trace.agent.trainable and trace.calls and trace.calls[-1].model == "policy":
            why = "is not trained, but the policy played it: give it a model and client"
            return {"failed": f"the seat {trace.agent.name!r} {why}"}
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        return {"failed": f"{len(trained)} agents of the episode have a reward and would be trained; expected one"}
    return _report(trained[0])


def _report(trace: Any) -> dict[str, object]:
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {
        "reward": trace.reward if rewards else None,
        "metrics": {**metrics, **{f"reward/{name}": value for name, value in rewards.items()}},
        "stop": trace.stop_condition,
    }


if __name__ == "__main__":
    main()
