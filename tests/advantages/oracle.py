"""The estimators once more, as plain loops over Python floats that follow the formulas letter by letter.

Group functions take a list of groups, each a list of floats with NaN for unscored, and return the same nesting.
"""

from __future__ import annotations

import itertools
import math
import statistics


def scored(group):
    return [r for r in group if not math.isnan(r)]


def std(values, ddof):
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof))


def by_group(groups, one):
    """``one(scored rewards, reward, its place among them)`` gives the advantage of a reward in a group that varies."""
    result = []
    for group in groups:
        kept, places = scored(group), itertools.count()
        varies = len(kept) > 1 and max(kept) > min(kept)
        result.append([one(kept, r, next(places)) if varies and not math.isnan(r) else 0.0 for r in group])
    return result


def grpo(groups, scale="group", ddof=1, eps=1e-6):
    batch = [r for group in groups for r in scored(group)]

    def one(kept, r, _):
        divisor = 1.0 if scale == "none" else std(kept if scale == "group" else batch, ddof) + eps
        return (r - statistics.fmean(kept)) / divisor

    return by_group(groups, one)


def dr_grpo(groups):
    return grpo(groups, "none")


def rloo(groups):
    return by_group(groups, lambda kept, r, i: r - statistics.fmean(kept[:i] + kept[i + 1 :]))


def loo_std(groups, eps=1e-6):
    def one(kept, r, i):
        rest = kept[:i] + kept[i + 1 :]
        divided = len(rest) > 1 and max(rest) > min(rest)
        return (r - statistics.fmean(rest)) / (std(rest, 1) + eps if divided else 1.0)

    return by_group(groups, one)


def maxrl(groups):
    mean = statistics.fmean
    return by_group(groups, lambda kept, r, _: (r - mean(kept)) / mean(kept) if mean(kept) > 0 else 0.0)


def gpg(groups, count="rewards", f_norm=1.0):
    if count == "rewards":
        batch = [r for group in groups for r in scored(group)]
        total, signal = len(batch), sum(r != 0 for r in batch)
    else:
        kept = [scored(group) for group in groups if scored(group)]
        total, signal = len(kept), sum(max(group) > min(group) for group in kept)
    alpha = total / signal if signal else 1.0
    return [[alpha * a / f_norm for a in row] for row in grpo(groups, "none")]


def opmd(groups, baseline="mean", tau=1.0):
    if baseline == "mean":
        return grpo(groups, "none")
    return by_group(groups, lambda kept, r, _: r - tau * math.log(statistics.fmean([math.exp(x / tau) for x in kept])))


def asymre(groups, shift=-0.1):
    result = []
    for group in groups:
        kept = scored(group)
        mean = statistics.fmean(kept) if kept else 0.0
        result.append([0.0 if math.isnan(r) or len(kept) < 2 else r - (mean + shift) for r in group])
    return result


def rec(groups, normalize=False):
    return grpo(groups, "group" if normalize else "none", ddof=0)


def reinforce(groups, normalize=False):
    batch = [r for group in groups for r in scored(group)]
    if normalize and (len(batch) < 2 or max(batch) == min(batch)):
        return [[0.0 for _ in group] for group in groups]
    mean, divisor = (statistics.fmean(batch), std(batch, 1) + 1e-6) if normalize else (0.0, 1.0)
    return [[0.0 if math.isnan(r) else (r - mean) / divisor for r in group] for group in groups]


def opo(groups, lengths):
    result = []
    for group, counts in zip(groups, lengths, strict=True):
        pairs = [(r, n) for r, n in zip(group, counts, strict=True) if not math.isnan(r)]
        total = sum(n for _, n in pairs)
        base = math.fsum(r * n for r, n in pairs) / total if total else 0.0
        single = len(pairs) < 2 or not total
        result.append([0.0 if math.isnan(r) or single else r - base for r in group])
    return result


def whiten_repeated(values, counts):
    everything = [v for v, n in zip(values, counts, strict=True) for _ in range(n)]
    if len(everything) < 2 or max(everything) == min(everything):
        return [0.0] * len(values)
    mean, divisor = statistics.fmean(everything), std(everything, 1) + 1e-6
    return [(v - mean) / divisor for v in values]


def reinforce_pp_baseline(groups, lengths):
    flat = [a for row in grpo(groups, "none") for a in row]
    seen = [not math.isnan(r) for group in groups for r in group]
    counts = [n * ok for n, ok in zip([n for row in lengths for n in row], seen, strict=True)]
    white = iter(whiten_repeated(flat, counts))
    return [[0.0 if math.isnan(r) else a for r, a in [(r, next(white)) for r in group]] for group in groups]


def gdpo(components, weights):
    parts = [grpo(groups) for groups in components]
    total, known = [], []
    for g, group in enumerate(components[0]):
        for i in range(len(group)):
            total.append(math.fsum(w * part[g][i] for w, part in zip(weights, parts, strict=True)))
            known.append(any(not math.isnan(groups[g][i]) for groups in components))
    white = whiten_repeated(total, [int(k) for k in known])
    flat = iter([a * k for a, k in zip(white, known, strict=True)])
    return [[next(flat) for _ in group] for group in components[0]]


def pass_at_k(groups, scale="group", method="max_second", k=0):
    def lead(kept, _r, i):
        first, second = sorted(kept, reverse=True)[:2]
        divisor = std(kept, 1) + 1e-6 if scale == "group" else 1.0
        return (first - second) / divisor if i == kept.index(first) else 0.0

    def average(kept, _r, i):
        """Average GRPO over the subsets of size k that hold a sample; each subset is worth its best sample."""
        subsets = list(itertools.combinations(range(len(kept)), k))
        best = [max(kept[j] for j in subset) for subset in subsets]
        if len(set(best)) < 2:
            return 0.0
        mean, deviation = statistics.fmean(best), std(best, 0)
        return statistics.fmean([(b - mean) / deviation for b, s in zip(best, subsets, strict=True) if i in s])

    return by_group(groups, average if method == "analytic" else lead)


def pkpo(groups, k, baseline="loo_minus_one"):
    result = []
    for group in groups:
        kept = [i for i, r in enumerate(group) if not math.isnan(r)]
        row = [0.0] * len(group)
        if len(kept) >= max(k, 2):
            for subset in itertools.combinations(kept, k):
                for i in subset:
                    rest = [group[j] for j in subset if j != i]
                    row[i] += max(group[j] for j in subset) - (max(rest) if baseline != "none" else 0.0)
            row = [a / math.comb(len(kept), k) for a in row]
        result.append(row)
    return result


def returns(rewards, gamma, bootstrap=0.0):
    result, g = [], bootstrap
    for r in reversed(rewards):
        g = r + gamma * g
        result.append(g)
    return result[::-1]


def gae(rewards, values, gamma, lam, bootstrap=0.0):
    """Return advantages and lambda-returns."""
    advantages, a, after = [], 0.0, bootstrap
    for r, v in zip(reversed(rewards), reversed(values), strict=True):
        a = r + gamma * after - v + gamma * lam * a
        advantages.append(a)
        after = v
    advantages.reverse()
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def n_step_returns(rewards, values, n, gamma, bootstrap):
    length, following, result = len(rewards), [*values, bootstrap], []
    for t in range(length):
        end = min(t + n, length)
        g = math.fsum(gamma ** (s - t) * rewards[s] for s in range(t, end))
        result.append(g + gamma ** (end - t) * following[end])
    return result


def vtrace(rewards, values, log_ratios, gamma, lam, clip_rho, clip_pg_rho, bootstrap):
    length = len(rewards)
    v, targets, advantages, above = [*values, bootstrap], [0.0] * length + [bootstrap], [0.0] * length, 0.0
    for t in reversed(range(length)):
        ratio = math.exp(log_ratios[t])
        delta = min(ratio, clip_rho) * (rewards[t] + gamma * v[t + 1] - v[t])
        above = delta + gamma * lam * min(ratio, 1.0) * above
        targets[t] = v[t] + above
        follow = (1 - lam) * v[t + 1] + lam * targets[t + 1]
        advantages[t] = min(ratio, clip_pg_rho) * (rewards[t] + gamma * follow - v[t])
    return advantages, targets[:length]
