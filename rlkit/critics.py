"""Critics: value models for GAE and PPO, independent of the policy's backend."""

from __future__ import annotations

from rlkit import _check
from rlkit.backends.early import resolve_class
from rlkit.backends.options import ModelOptions
from rlkit.backends.protocol import Critic, Tokenizer
from rlkit.registry import Registry

__all__ = ["Critic", "critic", "registry"]

registry = Registry("critic", entry_point_group="rlkit.critics")
registry.update(toy="rlkit.backends.toy:ToyCritic", local="rlkit.backends.local.critic:LocalCritic")


def critic(name: str, *, tokenizer: Tokenizer, **options: object) -> Critic:
    """Open a value model: ``"toy"``, ``"local"``, or one that a package adds to the group ``rlkit.critics``.

    It runs in this process with any backend of the policy, Tinker included; only the tokens are common to the two.
    Untrained, its values are 0.

    Args:
        name: "toy": a linear model over fixed features of the tokens before, which needs no files. "local": a
            language model of transformers with a value head and its own LoRA.
        tokenizer: the policy's; the critic has to read the same tokens.
        options: ``model=``, ``lora=``, ``seed=``, ``folder=``, ``resume_from=``, ``init_from=`` as for
            ``rlkit.connect``, and further options of the class.

    Raises:
        UnknownNameError: no such critic.
        ConfigError: an option is unknown, of the wrong type or out of range, or the model has another tokenizer.

    >>> import rlkit
    >>> policy = rlkit.connect("toy", seed=0)
    >>> value = rlkit.critic("toy", tokenizer=policy.tokenizer)
    >>> datum = rlkit.Datum([65, 66, 67], [0, 1, 1], {"returns": [1.0, 1.0], "old_values": [0.0, 0.0]})
    >>> for _ in range(200):
    ...     loss = value.forward_backward([datum], config={"clip": 10.0})
    ...     step = value.optim_step(rlkit.Adam(learning_rate=0.05))
    >>> [float(v.round(1)) for v in value.values([datum]).result()[0]]
    [0.0, 1.0, 1.0]
    """
    make = resolve_class(registry, name, options, ModelOptions, "critic")
    _check.check_keywords(f"critic({name!r})", make, options)
    made: Critic = make(tokenizer=tokenizer, **options)
    return made
