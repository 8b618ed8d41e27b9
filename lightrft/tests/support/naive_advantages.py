"""Naive estimators of the outcomes of a batch: loops over samples, written from the papers."""
from itertools import combinations
from statistics import fmean, pstdev, stdev


def peers(exp, b):
    """The scored samples of the group of ``b``."""
    return [i for i in range(exp.num_seqs) if exp.group_ids[i] == exp.group_ids[b] and exp.scored[i]]


def alive(values, cfg):
    """True if a group with these values has a gradient."""
    return len(values) > 1 and max(values) - min(values) > cfg.zero_spread


def per_group(shape):
    """An estimator that looks at one live group: ``shape(reward, rewards, samples, exp, b, cfg)``."""

    def outcomes(exp, cfg):
        out, live = [0.0] * exp.num_seqs, [False] * exp.num_seqs
        for b in range(exp.num_seqs):
            samples = peers(exp, b)
            rewards = [float(exp.rewards[i]) for i in samples]
            if exp.scored[b] and alive(rewards, cfg):
                out[b], live[b] = shape(float(exp.rewards[b]), rewards, samples, exp, b, cfg), True
        return out, live

    return outcomes


def centred(reward, rewards, *_):
    return reward - fmean(rewards)


def opo(reward, rewards, samples, exp, b, cfg):
    starts = exp.cu_seqlens.tolist()
    lengths = [int(exp.loss_mask[starts[i]:starts[i + 1]].sum()) for i in samples]
    return reward - sum(n * r for n, r in zip(lengths, rewards)) / max(sum(lengths), 1)


def passk(reward, rewards, samples, exp, b, cfg):
    """Every subset in turn."""
    others = [float(exp.rewards[i]) for i in samples if i != b]
    k = min(cfg.pass_k or len(rewards), len(rewards))
    return fmean(max(reward, *subset) - max(subset) for subset in combinations(others, k - 1))


def maxrl(reward, rewards, *_):
    return (reward - fmean(rewards)) / fmean(rewards) if fmean(rewards) > 0 else 0.0


def gpg(exp, cfg):
    out, live = per_group(centred)(exp, cfg)
    return [a * int(exp.scored.sum()) / max(sum(live), 1) for a in out], live


def remax(exp, cfg):
    live = [bool(exp.scored[b]) and float(exp.baseline_rewards[b]) == float(exp.baseline_rewards[b])
            for b in range(exp.num_seqs)]  # yapf: disable
    return [float(exp.rewards[b] - exp.baseline_rewards[b]) if live[b] else 0.0 for b in range(exp.num_seqs)], live


def gdpo(exp, cfg):
    total, live = [0.0] * exp.num_seqs, [False] * exp.num_seqs
    for b in range(exp.num_seqs):
        for k in range(exp.reward_parts.shape[1]):
            of = {i: float(exp.reward_parts[i, k]) for i in peers(exp, b)}
            of = {i: value for i, value in of.items() if value == value}
            if b in of and alive(of.values(), cfg):
                score = (of[b] - fmean(of.values())) / (stdev(of.values()) + cfg.std_eps)
                total[b], live[b] = total[b] + float(exp.part_weights[b, k]) * score, True
    batch = [total[b] for b in range(exp.num_seqs) if exp.scored[b]]
    if not batch:
        return total, live
    scale = (pstdev(batch)**2 + 1e-8)**0.5
    return [(total[b] - fmean(batch)) / scale if live[b] else 0.0 for b in range(exp.num_seqs)], live


NAIVE = {
    "rloo": per_group(lambda r, rewards, *_: r - (sum(rewards) - r) / (len(rewards) - 1)),
    "group_norm": per_group(lambda r, rewards, *rest: (r - fmean(rewards)) / (stdev(rewards) + rest[-1].std_eps)),
    "dr_grpo": per_group(centred),
    "reinforce_baseline": per_group(centred),
    "cpgd": per_group(centred),
    "opo": per_group(opo),
    "grpo_passk": per_group(passk),
    "maxrl": per_group(maxrl),
    "gpg": gpg,
    "remax": remax,
    "gdpo": gdpo,
}
"""Name -> ``(exp, cfg) -> (outcome of each sample, whether it is alive)``; those not here take the reward as it is."""
NAIVE["grpo"] = NAIVE["group_norm"]
