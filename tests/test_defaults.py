"""Default numbers are part of the API: of corrections, filters, metrics, rewards and schedules, in one table."""

from __future__ import annotations

import inspect

from rlkit import corrections, filters, metrics, rewards, schedules

DEFAULTS = """
corrections.clamp bound=20.0
corrections.clip_b mu=2.5
corrections.clip_v mu=8.5 max_fraction=0.0001
corrections.divergence_rejection level='token' estimator='k3'
corrections.geometric_sequence_mask clip_low_threshold=0.999 clip_high_threshold=1.002
corrections.icepop clip_low_threshold=0.5 clip_high_threshold=5.0
corrections.outlier_veto clip_low_threshold=0.0001 clip_high_threshold=100.0
corrections.sequence_mask clip_low_threshold=0.5 clip_high_threshold=2.0
corrections.sequence_tis clip_low_threshold=0.0 clip_high_threshold=2.0
corrections.token_mask clip_low_threshold=0.5 clip_high_threshold=2.0
corrections.token_tis clip_low_threshold=0.0 clip_high_threshold=2.0
corrections.top_entropy fraction=0.2
filters.difficulty_band low=0.1 high=0.95
filters.dynamic_sampling correct=1.0 needed=None keep_when_insufficient=False
filters.zero_variance threshold=0.0
metrics.chi2 level='token'
metrics.clip_fraction clip_low_threshold=0.8 clip_high_threshold=1.2
metrics.group_informativeness low=0.0 high=1.0
rewards.affine scale=1.0 bias=0.0
rewards.clamp low=None high=None
rewards.cosine_length right=(1.0, 0.5) wrong=(-1.0, -0.5) exceeded=None
rewards.length_cost coef=1.0
rewards.mapping default=None
rewards.nonterminal_override value=0.0
rewards.nonterminal_reward value=0.0
rewards.overlong_penalty factor=1.0
rewards.reduction how='sum'
rewards.repetition_penalty ngram=3 factor=1.0
rewards.stop_properly coef=0.0
rewards.think_format tags=('<think>', '</think>') opened=False
rewards.whitening ddof=1 eps=1e-06
schedules.chord_schedule peak=0.9 valley=0.05
schedules.cosine end=0.0
schedules.lr_for lora=True
schedules.wsd warmup_steps=0 end=0.0
"""


def test_defaults_are_pinned():
    """All public names have an example, and corrections take everything by name."""
    found = []
    for module in (corrections, filters, metrics, rewards, schedules):
        for name in module.__all__:
            public = getattr(module, name)
            assert ">>>" in public.__doc__, name
            if inspect.isfunction(public):
                parameters = inspect.signature(public).parameters.values()
                assert module is not corrections or all(p.kind is p.KEYWORD_ONLY for p in parameters), name
                pairs = [f"{p.name}={p.default!r}" for p in parameters if p.default is not p.empty]
                found += [f"{module.__name__.removeprefix('rlkit.')}.{name} {' '.join(pairs)}"] if pairs else []
    assert found == DEFAULTS.strip().splitlines()
