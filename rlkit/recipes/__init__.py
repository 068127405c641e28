"""Whole training runs from one YAML file, whose keys are those of Trinity-RFT's configurations.

    from rlkit import recipes

    recipes.run(recipes.load("grpo.yaml", ["buffer.batch_size=16"]))

``rlkit train grpo.yaml buffer.batch_size=16`` does the same. An algorithm is a row of ``algorithms.registry``, an
environment a function in ``environments``, a reward one in ``rewards``. Needs the extra ``config``.
"""

from __future__ import annotations

from rlkit.recipes import algorithms
from rlkit.recipes.algorithms import Recipe
from rlkit.recipes.settings import Settings, Taskset, load
from rlkit.recipes.stages import Outcome, check, run
from rlkit.recipes.tasks import environments, rewards

__all__ = ["Outcome", "Recipe", "Settings", "Taskset", "algorithms", "check", "environments", "load", "rewards", "run"]

for _public in (Outcome, Recipe, check, load, run):
    _public.__module__ = __name__  # where users import them from
