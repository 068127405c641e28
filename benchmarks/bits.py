"""Compare two commits on one machine bit by bit: what training, sampling, resuming and every formula give.

    python benchmarks/bits.py write BEFORE.npz          # at one commit (PYTHONPATH=its tree)
    python benchmarks/bits.py compare BEFORE.npz AFTER.npz

Parts: ``toy`` (five GRPO steps, the samples, the saved weights), ``local`` (two steps on a random two-layer GPT-2 and
Llama, in float32), ``resume`` (a toy run that stops and resumes, beside one that does not stop), ``golden`` (every
estimator, loss, correction and metric on the inputs of tests/golden, with gradients). ``toy``, ``local`` and ``resume``
are to be equal to the bit. ``golden`` may differ in the last digits where a formula's code was rewritten: the
comparison names the largest relative difference, and every result whose zeros differ.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

Results = dict[str, np.ndarray]
RTOL = 1e-12


def flatten(name: str, value: Any, found: Results) -> None:
    """Add the numbers of a nested value to ``found``, with paths as names."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            flatten(f"{name}.{key}", value[key], found)
    elif hasattr(value, "detach"):
        found[name] = value.detach().double().numpy()
    elif isinstance(value, np.ndarray) or np.isscalar(value):
        found[name] = np.asarray(value)
    elif isinstance(value, Sequence):
        for i, each in enumerate(value):
            flatten(f"{name}.{i}", each, found)
    elif value is not None:
        raise TypeError(f"{name}: {type(value)}")


def train(policy: Any, steps: int, found: Results, name: str, first: int = 0) -> None:
    """Add the samples, outputs and step metrics of some GRPO steps on random rewards."""
    import rlkit

    prompts = [[3, 4, 5], [6, 7]]
    for step in range(first, first + steps):
        sampler = policy.sampler().result()
        futures = [
            sampler.sample(p, rlkit.SamplingParams(max_tokens=6), n=4, seed=9 * step + i) for i, p in enumerate(prompts)
        ]
        groups = [future.result() for future in futures]
        rewards = np.array([[float(sum(s.tokens) % 5) for s in group] for group in groups])
        advantages = rlkit.advantages.grpo(rewards)
        data = [s.datum(a) for g, row in zip(groups, advantages, strict=True) for s, a in zip(g, row, strict=True)]
        loss = ("ppo", "gspo", "importance_sampling")[step % 3]
        output = policy.forward_backward(data, loss, want=("entropy",)).result()
        stepped = policy.optim_step(rlkit.Adam(learning_rate=0.05, grad_clip_norm=1.0)).result()
        samples = [[s.tokens, s.logprobs] for g in groups for s in g]
        flatten(
            f"{name}.{step}", [samples, output.logprobs, dict(output.outputs), dict(output.metrics), stepped], found
        )


def toy(found: Results) -> None:
    """Train the toy, and save it."""
    import rlkit

    with tempfile.TemporaryDirectory() as folder:
        policy = rlkit.connect("toy", seed=3, folder=folder)
        train(policy, 5, found, "toy")
        path = Path(policy.save("end").result())
        weights = [path] if path.is_file() else sorted(path.rglob("*.npz"))
        for file in weights:
            with np.load(file, allow_pickle=False) as saved:
                flatten(
                    f"toy.saved.{file.name}",
                    {key: saved[key] for key in saved.files if saved[key].dtype.kind in "iuf"},
                    found,
                )


def resume(found: Results) -> None:
    """Train two steps, connect again to what they saved, and train two more."""
    import rlkit

    with tempfile.TemporaryDirectory() as folder:
        policy = rlkit.connect("toy", seed=3, folder=folder)
        train(policy, 2, {}, "resume")
        path = policy.save("middle").result()
        policy.close()
        policy = rlkit.connect("toy", seed=3, folder=folder, resume_from=path)
        train(policy, 2, found, "toy", first=2)  # the same names: resumed steps replace those of the run that went on


def local(found: Results) -> None:
    """Train tiny random models with two steps each."""
    import torch

    import rlkit
    from tests.models.build import build

    torch.set_num_threads(1)
    for kind in ("gpt2", "llama"):
        with tempfile.TemporaryDirectory() as folder:
            model = build(kind, Path(folder) / "model")
            lora = rlkit.Lora(rank=4)
            policy = rlkit.connect("local", model=str(model), lora=lora, seed=1, folder=str(Path(folder) / "saved"))
            train(policy, 2, found, f"local.{kind}")
            policy.close()


def golden(found: Results) -> None:
    """Call every function that has golden values, and differentiate the losses."""
    import torch

    from rlkit import advantages, corrections, losses, metrics, rewards
    from rlkit.losses import kl

    homes = [("advantages", advantages), ("token_weights", advantages), ("corrections", corrections)]
    homes += [("losses", losses), ("kl", kl), ("metrics", metrics), ("rewards", rewards)]
    for file in sorted((ROOT / "tests" / "golden").glob("*.json")):
        home = next(module for prefix, module in homes if file.stem.startswith(prefix))
        for i, case in enumerate(json.loads(file.read_text())["cases"]):
            name = f"golden.{file.stem}.{case['function']}.{i}"
            module = importlib.import_module(case["module"]) if case.get("module") else home
            function = getattr(module, case["function"], None)
            if function is None:
                continue
            inputs, settings = _nan(case["inputs"]), case["settings"]
            if case["function"] in ("running_baseline", "adaptive_coefficient"):
                object_ = function(**settings)
                result: Any = [object_.update(*each) for each in zip(*inputs.values(), strict=True)]
            elif module is losses or (module is kl and "logprobs" in inputs):
                if case["function"] == "with_kl":
                    function = losses.with_kl(settings["loss"], settings["coef"], settings["estimator"])
                    settings = {}
                result = _differentiate(torch, function, inputs, settings)
            else:
                result = function(**inputs, **settings)
            flatten(name, result, found)


def _differentiate(torch: Any, function: Any, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    from rlkit.losses import prepare

    driver = next(name for name in ("logprobs", "target_logprobs", "values") if name in inputs)
    rows = {n: [torch.tensor(np.asarray(v), dtype=torch.float64) for v in values] for n, values in inputs.items()}
    rows[driver] = [row.requires_grad_() for row in rows[driver]]
    level = "datum" if "rlkit.losses.kl" in function.__module__ else prepare(function).level
    count = len(rows[driver])
    size = {"datum": 1, "pair": 2, "batch": count}[level]
    total = torch.zeros((), dtype=torch.float64)
    values = []
    for k in range(0, count, size):
        part = {n: v[k] if level == "datum" else v[k : k + size] for n, v in rows.items()}
        result = function(**{n: tuple(v) if level == "pair" else v for n, v in part.items()}, **settings)
        result = result[0] if isinstance(result, tuple) else result
        values.append(result)
        total = total + result.sum()
    return values, torch.autograd.grad(total, rows[driver], allow_unused=True)


def _nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_nan(each) for each in value]
    if isinstance(value, dict):
        return {key: _nan(each) for key, each in value.items()}
    return float("nan") if value is None else value


def compare(before: Path, after: Path) -> int:
    """Print what differs; return 1 if anything does that must not."""
    with np.load(before, allow_pickle=False) as old, np.load(after, allow_pickle=False) as new:
        gone, added = sorted(set(old.files) - set(new.files)), sorted(set(new.files) - set(old.files))
        wrong, largest, close = [], 0.0, 0
        for name in sorted(set(old.files) & set(new.files)):
            a, b = old[name], new[name]
            if a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes():
                continue
            if not name.startswith("golden") or a.shape != b.shape or not np.array_equal(a == 0, b == 0):
                wrong.append(name)
                continue
            scale = np.maximum(np.abs(a), 1e-300)
            difference = float(np.nanmax(np.where(a == b, 0.0, np.abs(a - b) / scale), initial=0.0))
            largest, close = max(largest, difference), close + 1
            if difference > RTOL or not np.array_equal(np.isnan(a), np.isnan(b)):
                wrong.append(f"{name} by {difference:.1e}")
    print(
        f"{len(set(old.files) & set(new.files))} results; {close} differ by at most {largest:.1e}; {len(wrong)} wrong"
    )
    for title, names in (("wrong", wrong), ("gone", gone), ("new", added)):
        for name in names[:40]:
            print(f"  {title}: {name}")
        if len(names) > 40:
            print(f"  {title}: and {len(names) - 40} more")
    return int(bool(wrong))


def main() -> int:
    """Write results, or compare two files of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("files", nargs="+", type=Path)
    given = parser.parse_args()
    if given.action == "compare":
        return compare(*given.files)
    found: Results = {}
    toy(found)
    uninterrupted = {name: value for name, value in found.items() if name.startswith(("toy.2.", "toy.3."))}
    resume(found)
    for name, value in uninterrupted.items():
        if value.tobytes() != found[name].tobytes():
            print(f"a resumed run differs: {name}")
    local(found)
    golden(found)
    np.savez(given.files[0], **found)
    print(f"{len(found)} results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
