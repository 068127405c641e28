"""The losses once more, as loops over Python floats.

Each function takes ``x``, the driver's numbers; ``at``, the same numbers where a stop-gradient stands; the datum's
inputs by name as ``d`` and the settings as ``s``. Calling it with ``x`` moved and ``at`` in place gives, by
differences, the gradient that the loss must have. At level "datum" ``x`` is one sequence, else a list of them, and so
are the inputs.
"""

from __future__ import annotations

import math

from tests.losses.calls import PAIRS


def weight(d, t):
    w = d.get("weights", 1.0)
    return w if isinstance(w, float) else w[t]


def mean(values):
    return math.fsum(values) / len(values)


def clip(value, low, high):
    return low if value < low else min(value, high)


def sigmoid(z):
    return 1 / (1 + math.exp(-z)) if z > 0 else math.exp(z) / (1 + math.exp(z))


def softplus(z):
    return max(z, 0.0) + math.log1p(math.exp(-abs(z)))


def tokens(term):
    """A loss over one datum from the loss of one token."""

    def total(x, at, d, s):
        return math.fsum(weight(d, t) * term(t, x, at, d, s) for t in range(len(x)))

    return total


def ratio(lp, d, t, anchor="sampling_logprobs"):
    return math.exp(lp - d[anchor][t])


def clipped(r, a, s):
    return -min(r * a, clip(r, s["clip_low_threshold"], s["clip_high_threshold"]) * a)


def dual_clipped(r, a, s):
    return min(clipped(r, a, s), -s["dual_clip"] * a) if s["dual_clip"] and a < 0 else clipped(r, a, s)


reinforce = tokens(lambda t, x, at, d, s: -d["advantages"][t] * x[t])
opmd = tokens(lambda t, x, at, d, s: -d["advantages"][t] * x[t] / (1 + s["tau"]))
importance_sampling = tokens(lambda t, x, at, d, s: -ratio(x[t], d, t) * d["advantages"][t])
ppo = tokens(lambda t, x, at, d, s: dual_clipped(ratio(x[t], d, t), d["advantages"][t], s))


@tokens
def decoupled_ppo(t, x, at, d, s):
    b = math.exp(d["old_logprobs"][t] - d["sampling_logprobs"][t])
    b = b if s["behaviour_cap"] is None else min(b, s["behaviour_cap"])
    return b * clipped(ratio(x[t], d, t, "old_logprobs"), d["advantages"][t], s)


def opsm(x, at, d, s):
    drift = mean([d["sampling_logprobs"][t] - at[t] for t in range(len(x))])
    return math.fsum(
        weight(d, t) * dual_clipped(ratio(x[t], d, t), d["advantages"][t], s)
        for t in range(len(x))
        if d["advantages"][t] >= 0 or drift <= s["delta"]
    )


@tokens
def cispo(t, x, at, d, s):
    r, a, low, high = ratio(at[t], d, t), d["advantages"][t], s["clip_low_threshold"], s["clip_high_threshold"]
    if s["unified_mask"] and ((a > 0 and r > high) or (a < 0 and r < low)):
        return 0.0
    return -clip(r, low, high) * a * x[t]


def gspo(x, at, d, s):
    r = math.exp(mean([x[t] - d["sampling_logprobs"][t] for t in range(len(x))]))
    return math.fsum(weight(d, t) * clipped(r, d["advantages"][t], s) for t in range(len(x)))


luspo = gspo


def gspo_token(x, at, d, s):
    r = math.exp(mean([at[t] - d["sampling_logprobs"][t] for t in range(len(x))]))
    return math.fsum(weight(d, t) * clipped(r * math.exp(x[t] - at[t]), d["advantages"][t], s) for t in range(len(x)))


def gmpo(x, at, d, s):
    logs = []
    for t in range(len(x)):
        r = ratio(x[t], d, t)
        positive = d["advantages"][t] >= 0
        logs.append(math.log(min(r, s["clip_high_threshold"]) if positive else max(r, s["clip_low_threshold"])))
    product = math.prod(math.exp(value) for value in logs) ** (1 / len(x))
    return -product * math.fsum(weight(d, t) * d["advantages"][t] for t in range(len(x)))


@tokens
def sapo(t, x, at, d, s):
    a = d["advantages"][t]
    tau = s["tau_pos"] if a > 0 else s["tau_neg"]
    if s["detached"]:
        return -4 / tau * sigmoid(tau * (ratio(at[t], d, t) - 1)) * a * x[t]
    return -4 / tau * sigmoid(tau * (ratio(x[t], d, t) - 1)) * a


@tokens
def vespo(t, x, at, d, s):
    a = d["advantages"][t]
    w = math.prod(ratio(at[u], d, u) for u in range(len(x)))
    k, lam = (s["k_pos"], s["lambda_pos"]) if a >= 0 else (s["k_neg"], s["lambda_neg"])
    return -(w**k) * math.exp(lam * (1 - w)) * a * x[t]


@tokens
def dppo_tv(t, x, at, d, s):
    a, p, q = d["advantages"][t], math.exp(at[t]), math.exp(d["sampling_logprobs"][t])
    pull = s["squared_coef"] * (x[t] - d["sampling_logprobs"][t]) ** 2
    if (a > 0 and p - q > s["divergence_high"]) or (a <= 0 and q - p > s["divergence_low"]):
        return pull
    return pull - min(p / q, s["ratio_cap"]) * a * x[t]


@tokens
def dppo_kl(t, x, at, d, s):
    a, p, q = d["advantages"][t], math.exp(at[t]), math.exp(d["sampling_logprobs"][t])
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if (a > 0 and p > q and kl > s["divergence_high"]) or (a <= 0 and p < q and kl > s["divergence_low"]):
        return 0.0
    return -min(p / q, s["ratio_cap"]) * a * x[t]


dro = tokens(
    lambda t, x, at, d, s: -(d["advantages"][t] * x[t] - s["beta"] / 2 * (x[t] - d["sampling_logprobs"][t]) ** 2)
)


@tokens
def topr(t, x, at, d, s):
    a = d["advantages"][t]
    return -(1.0 if a > s["threshold"] else clip(ratio(at[t], d, t), 0, 1)) * a * x[t]


@tokens
def sppo(t, x, at, d, s):
    inside = s["clip_low_threshold"] <= ratio(at[t], d, t) <= s["clip_high_threshold"]
    return -d["advantages"][t] * (x[t] - d["sampling_logprobs"][t]) if inside else 0.0


@tokens
def rec(t, x, at, d, s):
    a, r, low, high = d["advantages"][t], ratio(at[t], d, t), s["clip_low_threshold"], s["clip_high_threshold"]
    kept = {
        "none": True,
        "two-side": low <= r <= high,
        "one-side": (a >= 0 and r <= high) or (a <= 0 and r >= low),
        "ring": low <= r <= high
        or (a >= 0 and r <= s["ring_low_threshold"])
        or (a <= 0 and r >= s["ring_high_threshold"]),
    }[s["clip_mode"]]
    factor = {"none": 1.0, "importance_sampling": r, "advantage": math.exp(a / s["temperature"])}[s["weight"]]
    pull = {"none": 0.0, "k2": (x[t] - d["sampling_logprobs"][t]) ** 2, "forward-kl": -x[t]}[s["regularizer"]]
    return -kept * factor * a * x[t] + s["regularizer_coef"] * pull


def flat(x, at, d):
    """(x, at, weight, one dict of inputs) of every token of a batch."""
    rows = []
    for i, row in enumerate(x):
        inputs = {name: values[i] for name, values in d.items()}
        rows += [
            (row[t], at[i][t], weight(inputs, t), {k: v[t] for k, v in inputs.items() if not isinstance(v, float)})
            for t in range(len(row))
        ]
    return rows


def covariances(rows):
    mean_a, mean_lp = mean([row[3]["advantages"] for row in rows]), mean([row[1] for row in rows])
    return [(row[3]["advantages"] - mean_a) * (row[1] - mean_lp) for row in rows]


def clip_cov(x, at, d, s):
    """Only where every candidate is left out (fraction 1), or there is none."""
    rows = flat(x, at, d)
    total = 0.0
    for (lp, fixed, w, own), c in zip(rows, covariances(rows), strict=True):
        a, r = own["advantages"], math.exp(fixed - own["sampling_logprobs"])
        untouched = clipped(r, a, s) == -r * a
        if not (s["cov_low"] < c < s["cov_high"] and untouched):
            total += w * clipped(math.exp(lp - own["sampling_logprobs"]), a, s)
        else:
            assert s["fraction"] == 1.0
    return total


def kl_cov(x, at, d, s):
    rows = flat(x, at, d)
    c = covariances(rows)
    bound = sorted(c, reverse=True)[max(1, math.floor(s["fraction"] * len(rows))) - 1]
    return math.fsum(
        w
        * (
            -math.exp(lp - own["sampling_logprobs"]) * own["advantages"]
            + (s["coef"] * abs(lp - own["sampling_logprobs"]) if value >= bound else 0.0)
        )
        for (lp, _, w, own), value in zip(rows, c, strict=True)
    )


cross_entropy = tokens(lambda t, x, at, d, s: -x[t])
sft_is = tokens(lambda t, x, at, d, s: -math.exp(at[t]) * x[t])
sft_phi = tokens(lambda t, x, at, d, s: -math.exp(at[t]) * (1 - math.exp(at[t])) * x[t])


@tokens
def mix(t, x, at, d, s):
    if d["expert"]:
        return d.get("mu", 0.1) * (sft_phi if s["phi"] else cross_entropy)([x[t]], [at[t]], {}, s)
    return (1 - d.get("mu", 0.1)) * dual_clipped(ratio(x[t], d, t), d["advantages"][t], s)


def topk(term):
    def total(x, at, d, s):
        result = 0.0
        for n, row in enumerate(x):
            for k, lp in enumerate(row):
                if "target_tokens" in d and d["target_tokens"][n][k] < 0:
                    continue
                result += weight(d, n) * term(math.exp(lp), math.exp(d["teacher_logprobs"][n][k]), s)
        return result

    return total


topk_forward_kl = topk(lambda p, q, s: q * math.log(q / p))
topk_reverse_kl = topk(lambda p, q, s: p * math.log(p / q))


@topk
def topk_jsd(p, q, s):
    m = s["beta"] * q + (1 - s["beta"]) * p
    return s["beta"] * q * math.log(q / m) + (1 - s["beta"]) * p * math.log(p / m)


def pair_weight(d):
    w = d.get("weights", [1.0])[0]
    return w if isinstance(w, float) else mean(w)


def dpo(x, at, d, s):
    logs = [[lp - ref for lp, ref in zip(x[i], d["reference_logprobs"][i], strict=True)] for i in (0, 1)]
    c, r, beta, e = sum(logs[0]), sum(logs[1]), s["beta"], s["label_smoothing"]
    z = beta * (c - r)
    return (
        pair_weight(d)
        * {
            "sigmoid": (1 - e) * softplus(-z) + e * softplus(z),
            "robust": ((1 - e) * softplus(-z) - e * softplus(z)) / (1 - 2 * e),
            "hinge": max(0.0, 1 - z),
            "ipo": (mean(logs[0]) - mean(logs[1]) - 1 / (2 * beta)) ** 2,
            "apo_zero": 1 - sigmoid(beta * c) + sigmoid(beta * r),
            "apo_down": sigmoid(beta * c) + 1 - sigmoid(z),
        }[s["form"]]
    )


def kto(x, at, d, s):
    z = s["beta"] * (math.fsum(lp - ref for lp, ref in zip(x, d["reference_logprobs"], strict=True)) - s["kl"])
    w = pair_weight({"weights": [d.get("weights", 1.0)]})
    return w * (
        s["desirable_weight"] * (1 - sigmoid(z)) if d["desirable"] else s["undesirable_weight"] * (1 - sigmoid(-z))
    )


def orpo(x, at, d, s):
    p = [math.exp(mean(row)) for row in x]
    odds = (p[0] / (1 - p[0])) / (p[1] / (1 - p[1]))
    return pair_weight(d) * (-s["alpha"] * mean(x[0]) + s["beta"] * math.log(1 + 1 / odds))


def cpo(x, at, d, s):
    z, e = s["beta"] * (sum(x[0]) - sum(x[1])), s["label_smoothing"]
    return pair_weight(d) * ((1 - e) * softplus(-z) + e * softplus(z) - s["alpha"] * mean(x[0]))


def simpo(x, at, d, s):
    return pair_weight(d) * softplus(s["gamma"] - s["beta"] * (mean(x[0]) - mean(x[1])))


@tokens
def value_clipped(t, x, at, d, s):
    v, old, target = x[t], d["old_values"][t], d["returns"][t]
    return 0.5 * max((v - target) ** 2, (clip(v, old - s["clip"], old + s["clip"]) - target) ** 2)


@tokens
def value_huber(t, x, at, d, s):
    e = abs(x[t] - d["returns"][t])
    return e * e / 2 if e <= s["delta"] else s["delta"] * (e - s["delta"] / 2)


ESTIMATORS = {  # of KL at one token: x moves, at stays, ref and q are constants
    "k1": lambda x, at, ref, q: x - ref,
    "abs": lambda x, at, ref, q: abs(x - ref),
    "k2": lambda x, at, ref, q: (x - ref) ** 2 / 2,
    "k3": lambda x, at, ref, q: math.exp(ref) / math.exp(x) - 1 - (ref - x),
    "clamped": lambda x, at, ref, q: clip(k3(clip(x - ref, -20, 20), 0.0), -10, 10),
    "straight_through": lambda x, at, ref, q: k3(at, ref) + ((x - ref) ** 2 - (at - ref) ** 2) / 2,
    "ratio_corrected": lambda x, at, ref, q: math.exp(x - (at if q is None else q)) * k3(x, ref),
}


def k3(x, ref):
    return ESTIMATORS["k3"](x, None, ref, None)


def added(name, base_settings, kl=None, coef=0.0, entropy=0.0):
    """Return the oracle of a composed loss; coefficients among the inputs take precedence."""
    base = globals()[name]

    def total(x, at, d, s):
        result = base(
            x, at, {k: v for k, v in d.items() if k not in ("entropy", "kl_coef", "entropy_coef")}, base_settings
        )
        many = isinstance(x[0], list)
        for i in range(len(x) if many else 1):
            one = {k: v[i] for k, v in d.items()} if many else d
            row, fixed = (x[i], at[i]) if many else (x, at)
            for t in range(len(row)):
                w = pair_weight(d) if name in PAIRS else weight(one, t)
                if kl:
                    q = one["sampling_logprobs"][t] if "sampling_logprobs" in one else None
                    estimate = ESTIMATORS[kl](row[t], fixed[t], one["reference_logprobs"][t], q)
                    result += one.get("kl_coef", coef) * w * estimate
                if "entropy" in one:
                    result -= one.get("entropy_coef", entropy) * w * one["entropy"][t]
        return result

    return total
