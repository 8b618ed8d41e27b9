"""Every policy loss as a Python loop over the action tokens of one sequence, written from its paper.

``NAIVE[name](new, old, adv, cfg, chosen) -> [loss of each token]``: lists of scalars, ``new`` differentiable.
"""
import math


def bounds(cfg):
    return cfg.eps_clip, cfg.eps_clip if cfg.eps_clip_high is None else cfg.eps_clip_high


def smaller(x, limit, a):
    """The smaller of ``x * a`` and ``clip(x) * a``, negated; a clipped one is a constant."""
    clipped = min(max(x.item(), limit[0]), limit[1])
    return -x * a if x.item() * a <= clipped * a else x.detach() * 0 - clipped * a


def ppo(new, old, adv, cfg, chosen, dual=True):
    low, high = bounds(cfg)
    losses = []
    for n, o, a in zip(new, old, adv):
        loss = smaller((n - o).exp(), (1 - low, 1 + high), a)
        if dual and cfg.dual_clip is not None and a < 0 and loss.item() > -cfg.dual_clip * a:
            loss = n.detach() * 0 - cfg.dual_clip * a
        losses.append(loss)
    return losses


def gspo(new, old, adv, cfg, chosen):
    low, high = bounds(cfg)
    ratio = (sum(n - o for n, o in zip(new, old)) / len(new)).exp()
    return [smaller(ratio, (1 - low, 1 + high), a) for a in adv]


def gspo_token(new, old, adv, cfg, chosen):
    low, high = bounds(cfg)
    ratio = (sum(n - o for n, o in zip(new, old)) / len(new)).exp().detach()
    return [smaller(ratio * n.exp() / n.exp().detach(), (1 - low, 1 + high), a) for n, a in zip(new, adv)]


def gmpo(new, old, adv, cfg, chosen):
    """The product of the clipped ratios to the power 1 / length, times the advantage."""
    low, high = bounds(cfg)
    product = new[0] * 0 + 1
    for n, o, a in zip(new, old, adv):
        ratio = (n - o).exp()
        if (a > 0 and (n - o).item() > high) or (a < 0 and (n - o).item() < -low):
            ratio = math.exp(high if a > 0 else -low)
        product = product * ratio
    return [-(product**(1 / len(new))) * a for a in adv]


def cispo(new, old, adv, cfg, chosen):
    low, high = bounds(cfg)
    limit = (0, high) if cfg.cispo_absolute else (1 - low, 1 + high)
    return [-min(max(math.exp(n.item() - o), limit[0]), limit[1]) * a * n for n, o, a in zip(new, old, adv)]


def cpgd(new, old, adv, cfg, chosen):
    low, high = bounds(cfg)
    limit = (math.log(1 - low), math.log(1 + high))
    return [
        smaller(n - o, limit, a) + cfg.policy_drift_coef * ((n - o).exp() - 1 - (n - o))
        for n, o, a in zip(new, old, adv)
    ]


def sapo(new, old, adv, cfg, chosen):
    losses = []
    for n, o, a in zip(new, old, adv):
        tau = cfg.sapo_tau_pos if a > 0 else cfg.sapo_tau_neg
        losses.append(-4 / tau / (1 + (-tau * ((n - o).exp() - 1)).exp()) * a)
    return losses


def dppo(divergence, default):

    def loop(new, old, adv, cfg, chosen):
        delta, losses = default if cfg.dppo_delta is None else cfg.dppo_delta, []
        for n, o, a in zip(new, old, adv):
            leaves = (a > 0 and n > o) or (a < 0 and n < o)
            stop = leaves and divergence(math.exp(o), math.exp(n.item())) > delta
            ratio = (n - o).exp()
            if cfg.dppo_ratio_max is not None and ratio > cfg.dppo_ratio_max:  # a constant weight of the score function
                ratio = cfg.dppo_ratio_max * (1 + n - n.detach())
            losses.append(n * 0 if stop else -ratio * a)
        return losses

    return loop


def clip_cov(new, old, adv, cfg, chosen):
    return [n * 0 if c else x for n, c, x in zip(new, chosen, ppo(new, old, adv, cfg, chosen, dual=False))]


def kl_cov(new, old, adv, cfg, chosen):
    losses = []
    for n, o, a, c in zip(new, old, adv, chosen):
        penalty = abs(n - o) if cfg.kl_cov_abs else (n - o).exp() - 1 - (n - o)
        losses.append(-(n - o).exp() * a + c * cfg.kl_cov_coef * penalty)
    return losses


def gpg(new, old, adv, cfg, chosen):
    return [-a * n for n, a in zip(new, adv)]


NAIVE = {
    "ppo": ppo, "gspo": gspo, "gspo_token": gspo_token, "gmpo": gmpo, "cispo": cispo, "cpgd": cpgd, "sapo": sapo,
    "dppo_tv": dppo(lambda p, q: abs(p - q), 0.15), "dppo_kl":
    dppo(lambda p, q: p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), 0.05), "clip_cov": clip_cov,
    "kl_cov": kl_cov, "gpg": gpg, "reinforce": gpg
}  # yapf: disable


def covariances(new, adv):
    """``(log pi - mean) * (A - mean)`` of every token of the mini-batch."""
    mean, mean_adv = sum(new) / len(new), sum(adv) / len(adv)
    return [(n - mean) * (a - mean_adv) for n, a in zip(new, adv)]
