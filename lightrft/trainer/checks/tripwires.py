"""Warnings about runs that continue but learn nothing, or the wrong thing. They depend only on metrics."""
from collections.abc import Mapping
from math import inf, isnan, nan
from typing import Any

from lightrft.utils.errors import ExpectedError
from lightrft.utils.tables import unscored_causes

# steps (evaluations for held_out) in a row until the warning
PATIENCE = {
    "zero_spread": 5,
    "constant_reward": 20,
    "unscored": 1,
    "partly_unscored": 5,
    "entropy_collapse": 5,
    "kl_explosion": 3,
    "ratio_explosion": 3,
    "length_limit": 5,
    "held_out": 2,
}
ENTROPY, ENTROPY_SHARE = 0.001, 0.05  # nats per token; share of the run's first entropy. Solved tasks were at 0.008
KL_OLD, KL_REF = 0.5, 2.0  # nats per token
RATIO, RATIO_MAX = 2.0, 1e4  # the mean is 1 in expectation; single tokens of a large batch reach hundreds
TRUNCATED = 0.9
UNSCORED = 0.1
HELD_OUT = 0.02  # total fall, so that one prompt more or less does not count

_FLAT = (
    "The prompts are too hard or too easy for this policy, the reward always says the same, or wrong responses have "
    "none (unscored): look at a few rollouts (--save_trajectories), take other prompts, raise "
    "--n_samples_per_prompt or --temperature")
IDLE = {
    "equal": f"every advantage was 0, because the rewards that are compared did not differ. {_FLAT}",
    "unscored": "no response could be scored (the summary has the causes). Look at the reward and its server",
    "masked": "every response was left out of the loss, as --mask_truncated does with those at the length limit. Raise "
              "--generate_max_len, or check the end-of-text token and --stop",
    "bad": "the loss or the gradient was not finite. Lower --actor_learning_rate, or look for broken weights",
}  # yapf: disable
"""Reasons why a step teaches the policy nothing."""
WORDS = {
    "zero_spread":
    "in none of the last {steps} steps have the rewards of a group differed (mean reward now {reward:.3g}), so "
    f"every advantage is 0. {_FLAT}",
    "constant_reward":
    "every response of the last {steps} steps got the same reward, {m[reward/mean]:.3g}. If it is the best one, the "
    "task is solved and the run can stop; if not, the reward does not depend on the response: check it on a few "
    "rollouts (--save_trajectories)",
    "unscored":
    "no response of this step could be scored ({causes}), so the step trains on nothing. Check the reward and its "
    "server; --reward_timeout_s is the time one response may take",
    "partly_unscored":
    "in each of the last {steps} steps at least {limit:.0%} of the responses could not be scored (now {unscored:.0%}: "
    "{causes}). They are left out, so the run learns only from the others, which may be easier. Check the reward and "
    "its server; --reward_timeout_s is the time one response may take",
    "entropy_collapse":
    "the entropy has been low for {steps} steps: {entropy:.3g} nats per token, {start:.3g} in the first "
    "step. The policy hardly explores: unless the reward is already good enough, lower --actor_learning_rate, raise "
    "--eps_clip_high or --temperature, or add --entropy_coef 0.001",
    "kl_explosion":
    "the policy has moved far for {steps} steps: KL {kl} (nats per token). Lower --actor_learning_rate or "
    "--max_epochs, or restrain it with --init_kl_coef",
    "ratio_explosion":
    "the probability ratios have been far from 1 for {steps} steps (mean {m[policy/ratio]:.3g}, largest "
    "{m[policy/ratio_max]:.3g}). Lower --actor_learning_rate or --max_epochs, or raise --train_batch_size",
    "length_limit":
    "for {steps} steps nearly all responses have hit the length limit ({truncated:.0%}), so their "
    "answers are cut off. Raise --generate_max_len, check the end-of-text token and --stop, or use --overlong_buffer",
    "held_out":
    "over the last {steps} evaluations the training reward has risen and the held-out score has fallen ({scores}). The "
    "policy learns the training prompts or a weakness of the reward: read a few rollouts, stop at the best evaluation "
    "(--best_metric), use more prompts or raise --init_kl_coef",
}


class UnscoredTraining(ExpectedError, RuntimeError):
    """No response could be scored for several steps in a row."""


class _Numbers(dict[str, float]):
    """Metrics by name, nan for a missing one."""

    def __missing__(self, key: str) -> float:
        return nan


class Tripwires:
    """Watches the metrics of every step and evaluation; each wire warns once, and its metric shows when it is on.

    Args:
        grouped: advantages compare the samples of a group, so groups without spread have no gradient.
        max_unscored_steps: number of steps in a row without a scored response that ends the run; 0: never.
        taught: a teacher rewards every token, so equal rewards of responses are no fault.
    """

    def __init__(self, grouped: bool, max_unscored_steps: int, taught: bool = False) -> None:
        self.grouped, self.max_unscored_steps, self.taught = grouped and not taught, max_unscored_steps, taught
        self.counts = dict.fromkeys(PATIENCE, 0)  # bad steps in a row
        self.learnt, self.idle = False, dict.fromkeys(IDLE, 0)  # a step has taught the policy; steps that have not
        self.reported: list[str] = []
        self.entropy, self.reward = 0.0, nan  # entropy of the first step, reward of the last one
        self.rewards: list[float] = []  # mean rewards since the last evaluation
        self.evaluations: list[list[float]] = []  # the last ones: [mean training reward before it, score]

    def step(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """Return the metrics ``tripwire/<name>`` (0 or 1) of a training step, and its new warnings."""
        m = _Numbers(metrics)
        unscored = _unscored(m)
        found = {
            "zero_spread": self.grouped and not unscored and (m["group/zero_spread_frac"] == 1
                                                              or m["rollout/samples"] == 0),
            "constant_reward": not (unscored or self.taught) and m["reward/min"] == m["reward/max"] == self.reward,
            "unscored": unscored,
        }  # yapf: disable
        if not isnan(_unscored_share(m)):  # a wire without a measurement keeps its count
            found["partly_unscored"] = UNSCORED <= _unscored_share(m) and not unscored
        if not isnan(_truncated(m)):
            found["length_limit"] = _truncated(m) >= TRUNCATED
        if not isnan(_entropy(m)):
            self.entropy = self.entropy or _entropy(m)
            found["entropy_collapse"] = _entropy(m) < max(ENTROPY, ENTROPY_SHARE * self.entropy)
        if not isnan(m["policy/kl_old"]):
            found["kl_explosion"] = m["policy/kl_old"] > KL_OLD or _kl_ref(m) > KL_REF
            found["ratio_explosion"] = _ratio_explodes(m)
        self.reward = m["reward/max"]
        self._count_idle(m)
        if not unscored and m["rollout/rounds"] != 0:
            self.rewards.append(_reward(m))
        for name, bad in found.items():
            self.counts[name] = self.counts[name] + 1 if bad else 0
        return self._report([name for name in PATIENCE if name != "held_out"], m)

    def fatal(self, metrics: Mapping[str, float]) -> str | None:
        """Return the reason why the step with these ``metrics`` ends the run (``max_unscored_steps``), or None."""
        if not 0 < self.max_unscored_steps <= self.counts["unscored"]:
            return None
        return (f"no response could be scored for {self.counts['unscored']} steps in a row "
                f"({_causes(_Numbers(metrics))}). Repair the reward or its server, or allow more such steps "
                "(--max_unscored_steps)")

    def _count_idle(self, m: _Numbers) -> None:
        """Count a step that has taught the policy nothing, unless it is frozen (``--freezing_actor_steps``)."""
        if m["policy/optimizer_steps"] > 0 and not m["advantage/min"] == m["advantage/max"] == 0:
            self.learnt = True
        elif m["policy/skipped_steps"] > 0:
            self.idle["bad"] += 1
        elif _unscored(m):
            self.idle["unscored"] += 1
        elif m["rollout/samples"] > 0 and m["rollout/kept_samples"] == 0:
            self.idle["masked"] += 1
        elif m["rollout/samples"] == 0 or "policy/optimizer_steps" in m:
            self.idle["equal"] += 1

    @property
    def only_bad_steps(self) -> bool:
        """Return True if nothing was learnt, because no step was finite."""
        return not self.learnt and 0 < self.idle["bad"] == sum(self.idle.values())

    def nothing_learnt(self) -> str | None:
        """Return why the run has taught the policy nothing; None if it has, or was not meant to."""
        steps, cause = sum(self.idle.values()), max(self.idle, key=lambda name: self.idle[name])
        if self.learnt or not steps:
            return None
        found = "" if self.idle[cause] == steps else f"{self.idle[cause]} of "
        return f"the run has learnt nothing: in {found}{steps} step{'s' * (steps > 1)} {IDLE[cause]}"

    def evaluation(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """Return ``tripwire/held_out`` of an evaluation, and its new warnings."""
        names = [name for name in metrics if name.startswith("eval/all/reward@")]
        if not names:
            return {}, []
        reward = sum(self.rewards) / len(self.rewards) if self.rewards else -inf
        self.evaluations, self.rewards = [*self.evaluations, [reward,
                                                              metrics[names[0]]]][-PATIENCE["held_out"] - 1:], []
        pairs = list(zip(self.evaluations, self.evaluations[1:]))
        down = self.evaluations[0][1] - self.evaluations[-1][1]
        apart = len(pairs) == PATIENCE["held_out"] and down > HELD_OUT
        apart = apart and all(new[0] > old[0] and new[1] < old[1] for old, new in pairs)
        self.counts["held_out"] = PATIENCE["held_out"] if apart else 0
        return self._report(["held_out"], _Numbers(metrics))

    def _report(self, names: list[str], m: _Numbers) -> tuple[dict[str, float], list[str]]:
        on = [name for name in names if self.counts[name] >= PATIENCE[name]]
        news = [name for name in on if name not in self.reported]
        self.reported += news
        values = {f"tripwire/{name}": float(name in on) for name in names}
        return values, [f"tripwire {name}: {self._words(name, m)}" for name in news]

    def _words(self, name: str, m: _Numbers) -> str:
        scores = ", ".join(f"{score:.3g}" for _, score in self.evaluations)
        return WORDS[name].format(m=m, steps=PATIENCE[name], start=self.entropy, kl=_kls(m), reward=_reward(m),
                                  entropy=_entropy(m), truncated=_truncated(m), causes=_causes(m), scores=scores,
                                  unscored=_unscored_share(m), limit=UNSCORED)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {
            name: value for name, value in vars(self).items() if name not in ("grouped", "max_unscored_steps", "taught")
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a wire that an older release did not have starts, and its steps may have
        taught something."""
        vars(self).update({"learnt": True} | state | {"counts": self.counts | state["counts"]})


def _unscored(m: _Numbers) -> bool:
    """Return True if no generated response is scored (dynamic sampling: accepted or not)."""
    if m["rollout/rounds"] > 0:
        return m["reward/generated_scored"] == 0
    return m["rollout/samples"] > 0 and m["reward/unscored"] == m["rollout/samples"]


def _unscored_share(m: _Numbers) -> float:
    """Return the share of unscored responses among all generated ones; NaN without any."""
    unscored = sum(unscored_causes(m).values())
    generated = unscored + m["reward/generated_scored"] if m["rollout/rounds"] > 0 else m["rollout/samples"]
    return unscored / generated if generated else nan


def _truncated(m: _Numbers) -> float:
    """Return the truncated share of all generated responses."""
    return m.get("rollout/generated_truncated_frac", m["rollout/truncated_frac"])


def _entropy(m: _Numbers) -> float:
    """Return the entropy of the update, or of the rollout without an update: a collapsed policy has flat groups."""
    return m["rollout/entropy_estimate"] if isnan(m["policy/entropy"]) else m["policy/entropy"]


def _ratio_explodes(m: _Numbers) -> bool:
    return m["policy/ratio"] > RATIO or m["policy/ratio"] < 1 / RATIO or m["policy/ratio_max"] > RATIO_MAX


def _reward(m: _Numbers) -> float:
    """Return the mean reward of all generated responses."""
    return m.get("reward/generated_mean", m["reward/mean"])


def _kls(m: _Numbers) -> str:
    """Return the measured KLs as text."""
    found = {"policy of the rollout": m["policy/kl_old"], "reference": _kl_ref(m)}
    return ", ".join(f"{value:.3g} from the {name}" for name, value in found.items() if not isnan(value))


def _kl_ref(m: _Numbers) -> float:
    return m["reward/kl"] if "reward/kl" in m else m["policy/kl_ref"]


def _causes(m: _Numbers) -> str:
    """Return the causes of unscored responses among all generated ones as text, most frequent first."""
    return ", ".join(f"{name}: {count:.0f}" for name, count in unscored_causes(m).items()) or "no cause given"
