"""What a model gives is taken as it is: tensors of any floating dtype, with or without a gradient, in any form."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from rlkit import advantages, corrections, credit, evaluation, filters, metrics, rewards
from rlkit.backends.toy import ByteTokenizer
from rlkit.errors import DataError
from rlkit.trajectory import Group, Trajectory, Turn
from tests.each import for_each

torch = pytest.importorskip("torch")

VALUES = [-0.5, -1.5, -1.0, -0.25]  # exact in every dtype below, and logprobs as well
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]


def forms(dtype):
    """One row of numbers in every form in which a model may give them."""
    tensor = torch.tensor(VALUES).to(dtype)
    yield tensor
    yield list(tensor)
    yield tensor.repeat_interleave(2)[::2]
    if dtype.itemsize > 1:
        yield tensor.clone().requires_grad_()
        yield list(tensor.clone().requires_grad_())


def sample():
    return rlkit.Sample([65], [66, 67, 68, 69], [-1.0] * 4)


def episodes(rows):
    critic = rlkit.critic("toy", tokenizer=ByteTokenizer())
    groups, given = [Group([Trajectory([Turn(sample())])])], {"critic": critic, "rewards": rows, "normalize": False}
    (datum,) = credit.assign(groups, "gae", level="token", config={"lam": 0.95}, **given).data
    return datum.inputs["advantages"]


USES = {
    "estimators": advantages.grpo,
    "estimators of a list": lambda x: advantages.grpo([x, x])[1],
    "Datum.inputs": lambda x: sample().datum(x).inputs["advantages"],
    "weights of a datum": lambda x: sample().datum(1.0, weights=x).inputs["weights"],
    "select": lambda x: sample().datum(1.0).expand(x),
    "corrections": lambda x: corrections.token_tis(trainer_logprobs=x, sampling_logprobs=-np.ones(4)),
    "filters": lambda x: filters.unscored(x).keep,
    "metrics": lambda x: metrics.kl_k3(trainer_logprobs=x, sampling_logprobs=-np.ones(4)),
    "rewards": lambda x: rewards.clamp(x, low=-1.0, high=1.0),
    "evaluation": lambda x: evaluation.score([x], k=[1]).mean,
    "critics": lambda x: episodes([x]),
}


@for_each("dtype", DTYPES, ids=str)
@for_each("use", USES)
def test_tensors_are_arrays(use, dtype):
    """The same numbers as from an array of float64."""
    expected = USES[use](np.array(VALUES))
    for given in forms(dtype):
        np.testing.assert_array_equal(USES[use](given), expected)


@for_each("dtype", DTYPES, ids=str)
def test_one_number_is_a_number(dtype):
    """A reward model's score of one text, numpy's scalars alike; more than one is none."""
    score = torch.tensor(0.5).to(dtype)
    assert Turn(sample(), reward=score).reward == Turn(sample(), reward=np.array(0.5)).reward == 0.5
    assert float(sample().datum(score).inputs["advantages"][1]) == 0.5
    with pytest.raises(DataError, match="a finite number"):
        Turn(sample(), reward=torch.tensor([0.5]).to(dtype))
