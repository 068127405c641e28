"""Measure which paths compute the families of the table, and write families.toml: ``make families``.

python -m tests.models.measure [NAME ...]     # prints what differs from the file, of some families only
python -m tests.models.measure --write        # measures all of them in float32 and writes the file
"""

from __future__ import annotations

import gc
import sys
import tempfile
import tomllib
import warnings
from collections import defaultdict
from pathlib import Path
from textwrap import fill

import attrs

from tests.models.families import FAMILIES
from tests.models.family import build

FILE = Path(__file__).parents[2] / "rlkit" / "backends" / "local" / "model" / "families.toml"
HEAD = """\
# Written by `make families`: what small random models of each architecture gave in float32 with transformers {version}.
# In bfloat16 a small difference looks like rounding, so paths are tried there for these architectures alone.
"""
LISTS = {  # of model types, by what is found out about one
    "slots": ("decoded in slots, trained as a tree", lambda found: found["decoding"] == "slots"),
    "batched": ("decoded in batches with the library's cache", lambda found: found["decoding"] == "cache"),
    "whole": (
        "decoded without a cache: the library's is wrong or not there",
        lambda found: found["decoding"] == "whole",
    ),
    "not_continued": ("several tokens at once do not continue a cache", lambda found: not found.get("continues", True)),
}


def find_paths(folder):
    """What is found out about a model when it is sampled from in float32."""
    from rlkit.backends.local.model.base import load_base
    from rlkit.backends.local.sampling.decoders import decoder_for

    base = load_base(str(folder), "float32", "cpu")
    decoder_for(base, merge=False, prefix_bytes=0, cuda_graphs=False)
    found = attrs.asdict(base.known)
    return {name: found[name] for name in ("decoding", "continues") if found[name] is not None}


def measure(names):
    """The model types of each list, as these families have them."""
    from rlkit.backends.local.model import probe

    lists = defaultdict(set)
    for name in names:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "model .* its context is limited to")
            before, probe.checks_folder = probe.checks_folder, lambda: None
            try:
                found = find_paths(build(FAMILIES[name], Path(folder) / "model"))
            finally:
                probe.checks_folder = before
        for key, (_, belongs) in LISTS.items():
            if belongs(found):
                lists[key].add(FAMILIES[name].model_type)
        gc.collect()
    return lists


def compare(names):
    """The model types of these families about which the file and a measurement disagree, by list."""
    kinds, found, said = {FAMILIES[name].model_type for name in names}, measure(names), tomllib.loads(FILE.read_text())
    different = {key: sorted(kinds.intersection(said[key]) ^ found[key]) for key in LISTS}
    return {key: some for key, some in different.items() if some}


def write(lists):
    """The text of the file."""
    import transformers

    parts = [HEAD.format(version=transformers.__version__)]
    for key, (meaning, _) in LISTS.items():
        kinds = fill(", ".join(f'"{kind}"' for kind in sorted(lists[key])), 118, break_on_hyphens=False)
        parts.append(f"# {meaning}\n{key} = [\n{kinds}\n]\n")
    return "\n".join(parts)


if __name__ == "__main__":
    names = [x for x in sys.argv[1:] if x != "--write"] or [x for x in FAMILIES if FAMILIES[x].path != "refused"]
    if "--write" in sys.argv:
        FILE.write_text(write(measure(names)), "utf-8")
    elif different := compare(names):
        sys.exit(f"families.toml is not what is measured: {different}; run: make families")
