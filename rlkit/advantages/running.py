"""Baselines that outlive a batch: small objects with ``update``, whose fields are their whole state."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import attrs
import numpy as np

from rlkit import _check
from rlkit._rows import LARGEST, Labels, Rows, RowsLike, check_settings, fill_missing, list_labels, read_labels
from rlkit.advantages.group import register
from rlkit.errors import ConfigError


@attrs.define
class RunningBaseline:
    """An exponential moving average of the rewards of each role, as their baseline (role-conditioned advantages).

    A = R - b of the role, then b <- decay b + (1 - decay) R; b starts at 0

    Args:
        decay: in [0, 1].
        baselines: role -> b, finite; all that a checkpoint needs to hold. It is copied.

    Raises:
        ConfigError: a field is out of range.

    >>> baseline = RunningBaseline(decay=0.5)
    >>> baseline.update([1.0, 3.0], ["white", "black"])
    array([1., 3.])
    >>> baseline.update([1.0, 3.0], ["white", "black"])
    array([0.5, 1.5])
    >>> baseline.baselines
    {'white': 0.75, 'black': 2.25}

    Source: SPIRAL, arXiv:2506.24119. Peers: prime-rl lets a reward move the baseline of the next one in the same
    batch; here a batch is scored against one baseline, so that its advantages do not depend on its order.
    """

    decay: float = 0.95
    baselines: dict[Hashable, float] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.decay = _check.real("decay", self.decay, low=0.0, high=1.0)
        if not isinstance(self.baselines, Mapping):
            raise ConfigError("baselines", f"got {_check.describe(self.baselines)}", "a mapping of roles to numbers")
        self.baselines = {role: _read_number(f"baselines[{role!r}]", b) for role, b in self.baselines.items()}

    def update(self, rewards: RowsLike, roles: Labels | None = None) -> np.ndarray:
        """Return advantages [N] of flat ``rewards`` [N], which then move the baselines of their ``roles`` [N] in order.

        Without ``roles`` there is one baseline, under the name "". Unscored rewards (NaN) get 0 and change no baseline.
        """
        x = Rows.vector("rewards", rewards, nan=True).flat
        roles = [""] * x.size if roles is None else roles
        read_labels("roles", roles, x.size)
        names = list_labels(roles)
        advantages = x - np.array([self.baselines.get(name, 0.0) for name in names])
        for name, reward in zip(names, x.tolist(), strict=True):
            if reward == reward:  # noqa: PLR0124 - NaN does not
                self.baselines[name] = self.decay * self.baselines.get(name, 0.0) + (1.0 - self.decay) * reward
        return fill_missing(advantages)


@attrs.define
class RunningNormalization:
    """A normalisation of rewards by the mean and the deviation of all rewards seen so far, those of the call included.

    A = (R - mean) / (standard deviation + eps)

    Args:
        ddof: 1 divides squares by count - 1 (unbiased), 0 by count.
        eps: >= 0.
        count, mean, squares, lowest, highest: of what has been seen (squares: the sum of squared deviations); all
            that a checkpoint needs to hold.

    Raises:
        ConfigError: a field is out of range, or what has been seen contradicts itself.

    >>> normalization = RunningNormalization(eps=0.0)
    >>> normalization.update([5.0, 5.0])
    array([0., 0.])
    >>> normalization.update([2.0])  # 5, 5, 2: mean 4, deviation sqrt 3
    array([-1.15470054])

    Source: Welford (1962), merged as by Chan et al. (1979). Peers: ROLL's norm_mean_type and norm_std_type "running".
    """

    ddof: int = 1
    eps: float = 1e-6
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    lowest: float = np.inf
    highest: float = -np.inf

    def __attrs_post_init__(self) -> None:
        check_settings(ddof=self.ddof, eps=self.eps)
        self.ddof, self.eps = int(self.ddof), float(self.eps)
        self.count = _check.integer("count", self.count, low=0)
        self.mean = _read_number("mean", self.mean)
        self.squares = _check.real("squares", self.squares, low=0.0)
        if self.count == 0:
            seen = (self.mean, self.squares, self.lowest, self.highest)
            if seen != (0.0, 0.0, np.inf, -np.inf):
                raise ConfigError("count", "is 0, but the other fields hold observations", "the saved fields unchanged")
            return
        self.lowest, self.highest = _read_number("lowest", self.lowest), _read_number("highest", self.highest)
        slack = 1e-9 * max(abs(self.lowest), abs(self.highest))  # a merged mean may be off in its last digits
        if not self.lowest - slack <= self.mean <= self.highest + slack:
            what = f"is {self.mean}, not between lowest={self.lowest} and highest={self.highest}"
            raise ConfigError("mean", what, "the saved fields unchanged")

    def update(self, rewards: RowsLike) -> np.ndarray:
        """Return advantages [N] of flat ``rewards`` [N]; unscored ones (NaN) get 0 and do not count."""
        x = Rows.vector("rewards", rewards, nan=True).flat
        new = x[~np.isnan(x)]
        if new.size:
            batch = Rows("rewards", new, np.array([new.size]), "row")
            centred, lowest = batch.centre(new), new.min().item()
            total, mean = self.count + new.size, lowest + (new - lowest).sum().item() / new.size
            step = mean - self.mean
            self.squares += float(centred @ centred) + step * step * self.count * new.size / total
            self.mean = self.mean + step * new.size / total if self.count else mean
            self.count = total
            self.lowest, self.highest = min(self.lowest, lowest), max(self.highest, new.max().item())
        divisor = np.sqrt(self.squares / max(self.count - self.ddof, 1)) + self.eps
        if self.lowest >= self.highest or divisor == 0:
            return np.zeros(x.size)
        return fill_missing((x - self.mean) / divisor)


@register("running_baseline")
def running_baseline(*, decay: float = 0.95) -> RunningBaseline:
    """Return a fresh moving-average baseline per role (see ``RunningBaseline``).

    >>> running_baseline(decay=0.9).update([2.0])
    array([2.])
    """
    return RunningBaseline(decay=decay)


@register("running_normalization")
def running_normalization(*, ddof: int = 1, eps: float = 1e-6) -> RunningNormalization:
    """Return a fresh running normalisation (see ``RunningNormalization``).

    >>> running_normalization().update([2.0])
    array([0.])
    """
    return RunningNormalization(ddof=ddof, eps=eps)


def _read_number(where: str, value: object) -> float:
    return _check.real(where, value, low=-LARGEST, high=LARGEST)
