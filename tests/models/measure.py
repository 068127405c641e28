"""Measure which layout computes each family of the table, and write families.toml: ``make families``.

python -m tests.models.measure [NAME ...]     # prints what differs from the file, of some families only
python -m tests.models.measure --write        # measures all of them in float32 and writes the file
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
import warnings
from collections import defaultdict
from pathlib import Path
from textwrap import fill
from unittest import mock

import numpy as np

import rlkit
from tests.models.families import FAMILIES
from tests.models.family import build

FILE = Path(__file__).parents[2] / "rlkit" / "backends" / "local" / "model" / "families.toml"
HEAD = """\
# Written by `make families`: what small random models of each architecture gave in float32 with transformers {version}.
"""
LISTS = {  # of model types
    "packed": "decoded in slots, trained as a tree",
    "padded": "decoded in rows that are padded on the left",
    "uncached": "decoded without a cache, in rows of one length: the library's fails",
}
LAYOUTS = "packed", "padded", "equal", "uncached"
PROMPTS = ((3, 40), (17, 10), (17, 40), (30, 40))  # tokens, and those of completions: rows of one length end early
BOUND = 1e-3  # of logprobs; differences of 1e-4 are rounding here


def layout_of(name):
    """The first layout in which a family is right."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = str(build(FAMILIES[name], Path(folder) / "model"))
        return next(layout for layout in LAYOUTS if difference(model, layout) < BOUND)


def difference(model, layout):
    """How far sampled and trained logprobs are at most from transformers' own, in a layout; inf where it fails."""
    import transformers

    from rlkit.backends.local.model import base
    from rlkit.backends.local.sampling import _padded

    kind = transformers.AutoConfig.from_pretrained(model).get_text_config().model_type
    lists = {"PACKED": (base, "packed"), "PADDED": (base, "padded"), "UNCACHED": (_padded, "uncached")}
    patches = [mock.patch.object(where, x, {kind} if own == layout else set()) for x, (where, own) in lists.items()]
    with patches[0], patches[1], patches[2]:
        try:
            policy = rlkit.connect("local", model=model, lora=rlkit.Lora(rank=2, train_unembed=True), device="cpu")
            with policy:
                return _compare(policy) if policy.base.layout == layout.replace("uncached", "equal") else np.inf
        except Exception as error:  # whatever a library raises for a layout that it does not know
            print(f"{kind} is not {layout}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            return np.inf


def _compare(policy):
    from rlkit.backends.local.model.probe import logits_at

    rng, params = np.random.default_rng(0), [rlkit.SamplingParams(max_tokens=n, stop=()) for _, n in PROMPTS]
    with policy.sampler().result() as sampler:
        prompts = [rng.integers(3, 290, size) for size, _ in PROMPTS]
        futures = [sampler.sample(x, params[i], n=2, seed=i) for i, x in enumerate(prompts)]
        samples = [sample for future in futures for sample in future.result()]
        samples += sampler.sample(prompts[2], params[2], seed=2).result()  # alone
    trained = policy.forward([sample.datum(1.0) for sample in samples]).result().selected
    worst = 0.0
    for sample, found in zip(samples, trained, strict=True):
        tokens = np.concatenate([sample.prompt, sample.tokens])
        logits = logits_at(policy.base.model, tokens[None], np.arange(sample.prompt.size - 1, tokens.size - 1))
        logprobs = logits.log_softmax(-1).numpy()[np.arange(sample.tokens.size), sample.tokens]
        worst = max(worst, *(float(np.abs(x - logprobs).max()) for x in (sample.logprobs, found)))
    return worst if np.isfinite(worst) else np.inf


def measure(names):
    """The model types of each list: the layout in which all of their families are right."""
    found = defaultdict(set)
    for name in names:
        found[FAMILIES[name].model_type].add(layout_of(name))
    last = {kind: max(layouts, key=LAYOUTS.index) for kind, layouts in found.items()}
    return {key: {kind for kind, layout in last.items() if layout == key} for key in LISTS}


def compare(names):
    """The model types of these families about which the file and a measurement disagree, by list."""
    kinds, found, said = {FAMILIES[name].model_type for name in names}, measure(names), tomllib.loads(FILE.read_text())
    different = {key: sorted(kinds.intersection(said[key]) ^ found[key]) for key in LISTS}
    return {key: some for key, some in different.items() if some}


def write(lists):
    """The text of the file."""
    import transformers

    parts = [HEAD.format(version=transformers.__version__)]
    for key, meaning in LISTS.items():
        kinds = fill(", ".join(f'"{kind}"' for kind in sorted(lists[key])), 118, break_on_hyphens=False)
        parts.append(f"# {meaning}\n{key} = [\n{kinds}\n]\n")
    return "\n".join(parts)


if __name__ == "__main__":
    names = [x for x in sys.argv[1:] if x != "--write"] or [x for x in FAMILIES if FAMILIES[x].layout != "refused"]
    if "--write" in sys.argv:
        FILE.write_text(write(measure(names)), "utf-8")
    elif different := compare(names):
        sys.exit(f"families.toml is not what is measured: {different}; run: make families")
