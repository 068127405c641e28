"""The losses once more, as loops over Python floats.

Each function takes ``x``, the driver's numbers; ``at``, the same numbers where a stop-gradient stands; the datum's
inputs by name as ``d`` and the settings as ``s``. Calling it with ``x`` moved and ``at`` in place gives, by
differences, the gradient that the loss must have. At level "datum" ``x`` is one sequence, else a list of them, and so
are the inputs.
"""

from __future__ import annotations

import math

from tests.losses.calls import PAIRS


def mean(values):
    return math.fsum(values) / len(values)


def clip(value, low, high):
    return low if value < low else min(value, high)


def sigmoid(z):
    return 1 / (1 + math.exp(-z)) if z > 0 else math.exp(z) / (1 + math.exp(z))


def softplus(z):
    return max(z, 0.0) + math.log1p(math.exp(-abs(z)))


def entry(d, i):
    """Return the inputs of a datum's token, or of a batch's datum."""
    return {"weights": 1.0} | {name: value[i] if isinstance(value, list) else value for name, value in d.items()}


def tokens(term):
    """Return a loss over one datum from the loss of one token, whose inputs are numbers."""

    def total(x, at, d, s):
        each = [entry(d, t) for t in range(len(x))]
        return math.fsum(own["weights"] * term(x[t], at[t], own, s) for t, own in enumerate(each))

    return total


def ratio(lp, d):
    return math.exp(lp - d["sampling_logprobs"])


def clipped(r, a, s):
    return -min(r * a, clip(r, s["clip_low_threshold"], s["clip_high_threshold"]) * a)


def dual_clipped(r, a, s):
    return min(clipped(r, a, s), -s["dual_clip"] * a) if s["dual_clip"] and a < 0 else clipped(r, a, s)


reinforce = tokens(lambda lp, at, d, s: -d["advantages"] * lp)
opmd = tokens(lambda lp, at, d, s: -d["advantages"] * lp / (1 + s["tau"]))
importance_sampling = tokens(lambda lp, at, d, s: -ratio(lp, d) * d["advantages"])
ppo = tokens(lambda lp, at, d, s: dual_clipped(ratio(lp, d), d["advantages"], s))
topr = tokens(
    lambda lp, at, d, s: -d["advantages"] * lp * (1 if d["advantages"] > s["threshold"] else min(ratio(at, d), 1))
)
dro = tokens(lambda lp, at, d, s: -d["advantages"] * lp + s["beta"] / 2 * (lp - d["sampling_logprobs"]) ** 2)
cross_entropy = tokens(lambda lp, at, d, s: -lp)
sft_is = tokens(lambda lp, at, d, s: -math.exp(at) * lp)
sft_phi = tokens(lambda lp, at, d, s: -math.exp(at) * (1 - math.exp(at)) * lp)


@tokens
def decoupled_ppo(lp, at, d, s):
    b = math.exp(d["old_logprobs"] - d["sampling_logprobs"])
    b = b if s["behaviour_cap"] is None else min(b, s["behaviour_cap"])
    return b * clipped(math.exp(lp - d["old_logprobs"]), d["advantages"], s)


@tokens
def cispo(lp, at, d, s):
    r, a, low, high = ratio(at, d), d["advantages"], s["clip_low_threshold"], s["clip_high_threshold"]
    if s["unified_mask"] and ((a > 0 and r > high) or (a < 0 and r < low)):
        return 0.0
    return -clip(r, low, high) * a * lp


def log_ratios(x, d):
    return [lp - q for lp, q in zip(x, d["sampling_logprobs"], strict=True)]


def opsm(x, at, d, s):
    near = -mean(log_ratios(at, d)) <= s["delta"]
    weights = [entry(d, t)["weights"] * (near or a >= 0) for t, a in enumerate(d["advantages"])]
    return ppo(x, at, {**d, "weights": weights}, s)


def gspo(x, at, d, s):
    r = math.exp(mean(log_ratios(x, d)))
    return tokens(lambda lp, at, d, s: clipped(r, d["advantages"], s))(x, at, d, s)


def gspo_token(x, at, d, s):
    r = math.exp(mean(log_ratios(at, d)))
    return tokens(lambda lp, at, d, s: clipped(r * math.exp(lp - at), d["advantages"], s))(x, at, d, s)


def gmpo(x, at, d, s):
    low, high = math.log(s["clip_low_threshold"]), math.log(s["clip_high_threshold"])
    pairs = zip(log_ratios(x, d), d["advantages"], strict=True)
    r = math.exp(mean([min(log, high) if a >= 0 else max(log, low) for log, a in pairs]))
    return tokens(lambda lp, at, d, s: -r * d["advantages"])(x, at, d, s)


def vespo(x, at, d, s):
    r = math.prod(map(math.exp, log_ratios(at, d)))
    up, down = (r ** s[f"k_{side}"] * math.exp(s[f"lambda_{side}"] * (1 - r)) for side in ("pos", "neg"))
    return tokens(lambda lp, at, d, s: -(up if d["advantages"] >= 0 else down) * d["advantages"] * lp)(x, at, d, s)


@tokens
def sapo(lp, at, d, s):
    tau = s["tau_pos"] if d["advantages"] > 0 else s["tau_neg"]
    gate = 4 / tau * sigmoid(tau * (ratio(at if s["detached"] else lp, d) - 1))
    return -gate * d["advantages"] * (lp if s["detached"] else 1.0)


@tokens
def dppo_tv(lp, at, d, s):
    a, moved = d["advantages"], math.exp(at) - math.exp(d["sampling_logprobs"])
    pull = s["squared_coef"] * (lp - d["sampling_logprobs"]) ** 2
    if (a > 0 and moved > s["divergence_high"]) or (a <= 0 and -moved > s["divergence_low"]):
        return pull
    return pull - min(ratio(at, d), s["ratio_cap"]) * a * lp


@tokens
def dppo_kl(lp, at, d, s):
    a, p, q = d["advantages"], math.exp(at), math.exp(d["sampling_logprobs"])
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if (a > 0 and p > q and kl > s["divergence_high"]) or (a <= 0 and p < q and kl > s["divergence_low"]):
        return 0.0
    return -min(p / q, s["ratio_cap"]) * a * lp


@tokens
def sppo(lp, at, d, s):
    inside = s["clip_low_threshold"] <= ratio(at, d) <= s["clip_high_threshold"]
    return -d["advantages"] * (lp - d["sampling_logprobs"]) if inside else 0.0


@tokens
def rec(lp, at, d, s):
    a, r, low, high = d["advantages"], ratio(at, d), s["clip_low_threshold"], s["clip_high_threshold"]
    far = (a >= 0 and r <= s["ring_low_threshold"]) or (a <= 0 and r >= s["ring_high_threshold"])
    kept = {
        "none": True,
        "two-side": low <= r <= high,
        "one-side": (a >= 0 and r <= high) or (a <= 0 and r >= low),
        "ring": low <= r <= high or far,
    }[s["clip_mode"]]
    factor = {"none": 1.0, "importance_sampling": r, "advantage": math.exp(a / s["temperature"])}[s["weight"]]
    pull = {"none": 0.0, "k2": (lp - d["sampling_logprobs"]) ** 2, "forward-kl": -lp}[s["regularizer"]]
    return -kept * factor * a * lp + s["regularizer_coef"] * pull


def flat(x, at, d):
    """Return (weight, ratio at x, ratio at ``at``, advantage, covariance) of every token of a batch."""
    each = [(lp, at[i][t], entry(entry(d, i), t)) for i, row in enumerate(x) for t, lp in enumerate(row)]
    mean_a, mean_lp = mean([own["advantages"] for _, _, own in each]), mean([fixed for _, fixed, _ in each])
    return [
        (own["weights"], ratio(lp, own), ratio(fixed, own), a := own["advantages"], (a - mean_a) * (fixed - mean_lp))
        for lp, fixed, own in each
    ]


def clip_cov(x, at, d, s):
    """Hold only where every candidate is left out (fraction 1), or there is none."""
    total = 0.0
    for w, r, fixed, a, c in flat(x, at, d):
        if s["cov_low"] < c < s["cov_high"] and clipped(fixed, a, s) == -fixed * a:
            assert s["fraction"] == 1.0
        else:
            total += w * clipped(r, a, s)
    return total


def kl_cov(x, at, d, s):
    rows = flat(x, at, d)
    bound = sorted([row[-1] for row in rows], reverse=True)[max(1, math.floor(s["fraction"] * len(rows))) - 1]
    return math.fsum(w * (-r * a + (s["coef"] * abs(math.log(r)) if c >= bound else 0.0)) for w, r, _, a, c in rows)


@tokens
def mix(lp, at, d, s):
    mu = d.get("mu", 0.1)
    if d["expert"]:
        return mu * (sft_phi if s["phi"] else cross_entropy)([lp], [at], {}, s)
    return (1 - mu) * dual_clipped(ratio(lp, d), d["advantages"], s)


def topk(term):
    def total(x, at, d, s):
        result = 0.0
        for n, row in enumerate(x):
            own = entry(d, n)
            for k, lp in enumerate(row):
                if "target_tokens" not in own or own["target_tokens"][k] >= 0:
                    result += own["weights"] * term(math.exp(lp), math.exp(own["teacher_logprobs"][k]), s)
        return result

    return total


topk_forward_kl = topk(lambda p, q, s: q * math.log(q / p))
topk_reverse_kl = topk(lambda p, q, s: p * math.log(p / q))
luspo = gspo


@topk
def topk_jsd(p, q, s):
    m = s["beta"] * q + (1 - s["beta"]) * p
    return s["beta"] * q * math.log(q / m) + (1 - s["beta"]) * p * math.log(p / m)


def pair_weight(d):
    return mean(d["weights"][0]) if "weights" in d else 1.0


def dpo(x, at, d, s):
    chosen, rejected = ([lp - ref for lp, ref in zip(x[i], d["reference_logprobs"][i], strict=True)] for i in (0, 1))
    c, r, e = s["beta"] * sum(chosen), s["beta"] * sum(rejected), s["label_smoothing"]
    value = {
        "sigmoid": (1 - e) * softplus(r - c) + e * softplus(c - r),
        "robust": ((1 - e) * softplus(r - c) - e * softplus(c - r)) / (1 - 2 * e),
        "hinge": max(0.0, 1 - c + r),
        "ipo": (mean(chosen) - mean(rejected) - 1 / (2 * s["beta"])) ** 2,
        "apo_zero": 1 - sigmoid(c) + sigmoid(r),
        "apo_down": sigmoid(c) + 1 - sigmoid(c - r),
    }
    return pair_weight(d) * value[s["form"]]


def kto(x, at, d, s):
    z = s["beta"] * (math.fsum(lp - ref for lp, ref in zip(x, d["reference_logprobs"], strict=True)) - s["kl"])
    value = s["desirable_weight"] * sigmoid(-z) if d["desirable"] else s["undesirable_weight"] * sigmoid(z)
    return mean(d.get("weights", [1.0])) * value


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
def value_clipped(v, at, d, s):
    near = clip(v, d["old_values"] - s["clip"], d["old_values"] + s["clip"])
    return 0.5 * max((v - d["returns"]) ** 2, (near - d["returns"]) ** 2)


@tokens
def value_huber(v, at, d, s):
    e = abs(v - d["returns"])
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


def added(name, base_settings, kl, coef, entropy):
    """Return the oracle of a composed loss; coefficients among the inputs take precedence."""
    base, terms = globals()[name], ("entropy", "kl_coef", "entropy_coef")

    def total(x, at, d, s):
        result = base(x, at, {k: v for k, v in d.items() if k not in terms}, base_settings)
        data = [(row, at[i], entry(d, i)) for i, row in enumerate(x)] if isinstance(x[0], list) else [(x, at, d)]
        for row, fixed, one in data:
            for t, lp in enumerate(row):
                own = entry(one, t)
                w = pair_weight(d) if name in PAIRS else own["weights"]
                if kl:
                    estimate = ESTIMATORS[kl](lp, fixed[t], own["reference_logprobs"], own.get("sampling_logprobs"))
                    result += own.get("kl_coef", coef) * w * estimate
                if "entropy" in own:
                    result -= own.get("entropy_coef", entropy) * w * own["entropy"]
        return result

    return total
