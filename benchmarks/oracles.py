"""Compare every algorithm that verl or TRL has under the same name, under its preset, with their own code.

    make oracles

The table has the largest difference over 50 random ragged batches (several turns, flat groups, float64), relative to
the largest number that is compared: advantages, or a loss and its gradient. Rows marked "differs" show what no option
covers, with its size; ``docs/coming_from.md`` says why. Exits with 1 where another row is above 1e-6.

Where verl has a gradient only (its dppo_* weigh log pi, ours is a ratio of the same gradient) the loss is left out.
"""
import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrft.config.cli import parse_config
from lightrft.config.schema import Config
from lightrft.models.loss import PolicyLoss, ValueLoss
from lightrft.ops.aggregate import MODES, count
from lightrft.trainer.advantage_calculator import get_advantage_calculator
from lightrft.types import Experience

LIMIT, KL_COEF = 1e-6, 0.1
NORM = 12  # tokens of the longest response, the constant of seq-mean-token-sum-norm


@dataclass
class Batch:
    """B responses of at most L tokens, padded on the right; everything is float64 and [B, L] unless said otherwise."""
    lens: Tensor  # [B]
    groups: Tensor  # [B]
    mask: Tensor  # bool: the action tokens
    rewards: Tensor  # [B]
    parts: Tensor  # [B, 2], whose weighted sum a reward may be
    baseline: Tensor  # [B], of a greedy response
    advantages: Tensor  # one number per response
    new: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor
    entropy: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    per_group: int
    part_weights = torch.tensor([1.0, 0.5])

    @property
    def inside(self) -> Tensor:
        """bool: tokens, not padding."""
        return torch.arange(self.mask.shape[1]) < self.lens[:, None]

    @property
    def last(self) -> Tensor:
        """[B]: index of the last token."""
        return self.lens - 1

    @classmethod
    def draw(cls, seed: int) -> "Batch":
        """Two to four groups of equal size; every third one is flat, and some tokens are far from the reference."""
        g = torch.Generator().manual_seed(seed)
        groups, per_group = (int(torch.randint(2, high, (), generator=g)) for high in (5, 6))
        n = groups * per_group
        lens, owner = torch.randint(1, NORM + 1, (n, ), generator=g), torch.arange(groups).repeat_interleave(per_group)
        lens[0] = NORM
        mask = (torch.arange(NORM) < lens[:, None]) & (torch.rand(n, NORM, generator=g) > 0.2)
        mask[torch.arange(n), lens - 1] = True
        mask[n - 1] &= seed % 3 > 0  # in every third batch one response is left out of the loss

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=g)

        flat = owner % 3 == 2
        old = -normal(n, NORM).abs() - 0.1
        far = (torch.rand(n, NORM, generator=g) > 0.95) * 4.0
        parts = torch.where(flat[:, None], 0.5, (4 * normal(n, 2)).round() / 4)  # verl takes them as float32
        advantages = (normal(n, 1) * (torch.rand(n, 1, generator=g) > 0.1)).expand(n, NORM).contiguous()
        values = normal(n, NORM)
        return cls(lens, owner, mask, torch.where(flat, 1.0, normal(n)), parts,
                   normal(groups)[owner], advantages, old + 0.4 * normal(n, NORM), old, old + 0.2 * normal(n, NORM),
                   old + 0.3 * normal(n, NORM) + far,
                   normal(n, NORM).abs(), values, values + 0.3 * normal(n, NORM), normal(n, NORM), per_group)

    def with_single(self) -> "Batch":
        """Copy the batch with the first response of the first group alone."""
        rows = torch.cat([torch.zeros(1).long(), torch.arange(self.per_group, len(self.lens))])
        tensors = {name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    def pack(self, padded: Tensor) -> Tensor:
        """Pack [B, L] -> [T]: every response after a prompt of one token."""
        return torch.cat([torch.cat([row.new_zeros(1), row[:n]]) for row, n in zip(padded, self.lens.tolist())])

    def unpack(self, packed: Tensor) -> Tensor:
        """Unpack [T] -> [B, L], 0 on padding."""
        out = torch.zeros(self.mask.shape)
        for row, part, n in zip(out, packed.split((self.lens + 1).tolist()), self.lens.tolist()):
            row[:n] = part[1:]
        return out * self.mask

    def experience(self) -> Experience:
        """Convert the batch to an Experience."""
        n = len(self.lens)
        cu = torch.cat([torch.zeros(1).long(), (self.lens + 1).cumsum(0)]).int()
        return Experience(token_ids=torch.zeros(int(cu[-1])).long(), cu_seqlens=cu, loss_mask=self.pack(self.mask),
                          group_ids=self.groups, rewards=self.rewards.clone(), scored=torch.ones(n).bool(),
                          truncated=torch.zeros(n).bool(), reward_parts=self.parts,
                          part_weights=self.part_weights.expand(n, 2), baseline_rewards=self.baseline.clone(),
                          baseline_lengths=torch.ones(n), old_logprobs=self.pack(self.old),
                          rollout_logprobs=self.pack(self.rollout), values=self.pack(self.values))


Found = tuple[Tensor, ...]  # advantages [B, L]; or the gradient [B, L] and, where it is compared, the loss


@dataclass(frozen=True)
class Case:
    """One algorithm of a peer, and the flags that mean the same here."""
    peer: str
    theirs: str
    flags: str
    run: Callable[[Any, Batch], Found]
    ours: Callable[[Batch, Config], Found]
    differs: bool = False

    def difference(self, peer: Any, seeds: range) -> float:
        """Compute the largest difference over ``seeds``, relative to the largest number."""
        config = parse_config(f"--semantics {self.peer} --zero_spread 0 {self.flags}".split()).config
        worst = 0.0
        for batch in map(Batch.draw, seeds):
            for theirs, ours in zip(self.run(peer, batch), self.ours(batch, config), strict=True):
                worst = max(worst, ((theirs - ours).abs().max() / theirs.abs().max().clamp_min(1)).item())
        return worst


def our_advantage(batch: Batch, config: Config) -> Found:
    """[B, L]: advantages by the estimator and its normalisation, with the KL in the reward if there is one."""
    exp = batch.experience()
    exp.ref_logprobs = batch.pack(batch.ref) if config.algorithm.init_kl_coef else None
    get_advantage_calculator(config.algorithm, config.reward, NORM)(exp, config.algorithm.init_kl_coef)
    return (batch.unpack(exp.advantages), )


def our_loss(batch: Batch, config: Config) -> Found:
    """Compute the gradient [B, L] and the loss, with entropy and KL terms if they have a coefficient."""
    cfg, exp = config.algorithm, batch.experience()
    exp.advantages = batch.pack(batch.advantages)
    exp.ref_logprobs = batch.pack(batch.ref) if cfg.init_kl_coef else None
    module, new = PolicyLoss(cfg, NORM), batch.pack(batch.new).requires_grad_()
    loss_entry = _selected(cfg, new.detach(), exp)
    denominators = module.denominators(count(exp.loss_mask, exp.cu_seqlens, cfg.loss_agg_all_seqs))
    loss, _ = module(new, batch.pack(batch.entropy) + 0 * new, loss_entry, denominators, cfg.init_kl_coef)
    return batch.unpack(torch.autograd.grad(loss, new)[0]), loss.detach()


def _selected(cfg: Any, new: Tensor, exp: Experience) -> Experience:
    from lightrft.algorithms.base import POLICY_LOSSES
    selects = POLICY_LOSSES.get(cfg.policy_loss).selects
    exp.selected = None if selects is None else selects(new, exp, cfg, 0)
    return exp


def gradient_of_ours(batch: Batch, config: Config) -> Found:
    """Compute :func:`our_loss` without the loss."""
    return our_loss(batch, config)[:1]


def our_value_loss(batch: Batch, config: Config) -> Found:
    """Compute the gradient [B, L] and the loss of the critic."""
    exp, values = batch.experience(), batch.pack(batch.values).requires_grad_()
    exp.values, exp.returns = batch.pack(batch.old_values), batch.pack(batch.returns)
    module = PolicyLoss(config.algorithm, NORM)
    loss, _ = ValueLoss(config.algorithm.value_clip)(values, exp,
                                                     module.denominators(count(exp.loss_mask, exp.cu_seqlens)))
    return batch.unpack(torch.autograd.grad(loss, values)[0]), loss.detach()


def _both(found: tuple[Tensor, Tensor], batch: Batch) -> Found:
    loss, gradient = found
    return gradient * batch.mask, loss


def verl_advantages() -> Iterator[Case]:
    """Yield the estimators, alone and with the KL in the reward."""
    names = {"gae": "gae", "grpo": "dr_grpo", "rloo": "rloo", "rloo_vectorized": "rloo", "opo": "opo",
             "reinforce_plus_plus": "reinforce++", "reinforce_plus_plus_baseline": "reinforce_baseline",
             "grpo_passk": "grpo_passk", "remax": "remax"}  # yapf: disable
    std = dict(norm_adv_by_std_in_grpo=True)
    for kl in ("", "k1", "k3"):
        extra = f" --init_kl_coef {KL_COEF} --kl_estimator {kl}" * bool(kl)
        suffix = f", use_kl_in_reward ({kl})" * bool(kl)
        for theirs, ours in names.items():
            own = {"norm_adv_by_std_in_grpo": False} if theirs == "grpo" else {}
            yield Case("verl", theirs + ", norm_adv_by_std_in_grpo=False" * bool(own) + suffix,
                       f"--advantage_estimator {ours}{extra}", lambda p, b, n=theirs, k=kl, o=own:
                       (p.advantage(b, n, k, KL_COEF, config=std, **o), ), our_advantage)
        yield Case("verl", "grpo" + suffix, f"--advantage_estimator group_norm{extra}", lambda p, b, k=kl:
                   (p.advantage(b, "grpo", k, KL_COEF, **std), ), our_advantage)
    for theirs, ours in (("gae", "gae"), ("reinforce_plus_plus", "reinforce++"), ("rloo", "rloo")):
        config = {"gamma": 0.9}
        yield Case("verl", f"{theirs}, gamma=0.9", f"--advantage_estimator {ours} --gamma 0.9",
                   lambda p, b, n=theirs, c=config: (p.advantage(b, n, config=c, **c), ), our_advantage,
                   differs=ours == "rloo")
    single = {"reinforce_plus_plus_baseline": "reinforce_baseline", "grpo": "group_norm", "rloo": "rloo"}
    for theirs, ours in single.items():
        yield Case("verl", f"{theirs}, a group of one sample", f"--advantage_estimator {ours}", lambda p, b, n=theirs:
                   (p.advantage(b.with_single(), n, config=std), ), lambda b, c: our_advantage(b.with_single(), c),
                   differs=True)
    yield Case("verl", "gdpo", "--advantage_estimator gdpo", lambda p, b: (p.gdpo(b), ), our_advantage)
    yield Case("verl", "gdpo, use_kl_in_reward (k1)", f"--advantage_estimator gdpo --init_kl_coef {KL_COEF}",
               lambda p, b: (p.gdpo(b), ), our_advantage, differs=True)
    yield Case("verl", "gpg", "--advantage_estimator gpg", lambda p, b: (p.advantage(b, "gpg"), ), our_advantage,
               differs=True)


def verl_losses() -> Iterator[Case]:
    """Yield policy losses under every mean, corrections, KL terms and the critic."""
    high = "--eps_clip 0.2 --eps_clip_high 0.28"
    names = {
        "vanilla": "ppo", "gspo": "gspo_token", "gpg": "reinforce", "cispo": "cispo", "sapo": "sapo", "geo_mean":
        "gmpo", "kl_cov": "kl_cov --kl_cov_ratio 0.2", "clip_cov":
        "clip_cov --clip_cov_ratio 1 --clip_cov_low 0.05 --clip_cov_high 5"
    }
    tuned = {
        "vanilla": high, "gspo": high, "cispo": high, "geo_mean": "--eps_clip 0.2 --eps_clip_high 0.28", "clip_cov":
        high, "gpg": "", "sapo": "", "kl_cov": ""
    }
    cov = dict(clip_cov_ratio=1.0, clip_cov_lb=0.05, clip_cov_ub=5.0, kl_cov_ratio=0.2, ppo_kl_coef=1.0)
    for theirs, ours in names.items():
        fixed = theirs in ("sapo", "geo_mean")
        for mode in MODES[1:2] if fixed else MODES:
            yield Case("verl", f"{theirs}, {mode}",
                       f"--policy_loss {ours} {tuned[theirs]}" + f" --loss_agg_mode {mode}" * (not fixed),
                       lambda p, b, n=theirs, m=mode: _both(p.loss(b, n, m, clip_ratio_high=0.28, **cov), b), our_loss)
    for name in ("dppo_tv", "dppo_kl"):
        yield Case("verl", f"{name}, token-mean", f"--policy_loss {name} --dppo_delta 0.1",
                   lambda p, b, n=name: _both(p.loss(b, n, MODES[0], clip_ratio_low=0.1, clip_ratio_high=0.1), b)[:1],
                   gradient_of_ours)
    levels = {("token", 1.3): "tis --correction_high 1.3", ("sequence", 1.3): "seq_tis --correction_high 1.3",
              ("token", "0.8_1.2"): "icepop --correction_low 0.8 --correction_high 1.2",
              ("sequence", "0.4_2.5"): "seq_mis --correction_low 0.4 --correction_high 2.5"}  # yapf: disable
    for (level, bound), ours in levels.items():
        yield Case("verl", f"vanilla, rollout_is={level}, threshold {bound}", f"--rollout_correction {ours}",
                   lambda p, b, a=level, t=bound: _both(p.loss(b, "vanilla", "token-mean", p.correction(b, a, t)), b),
                   our_loss)
    for kind in ("k2", "k3", "k3+", "k1+"):
        for mode in MODES[:2]:
            yield Case(
                "verl", f"kl_loss_type={kind}, {mode}",
                f"--use_kl_loss --init_kl_coef 1 --kl_estimator {kind} --loss_agg_mode {mode} --policy_loss "
                "reinforce", lambda p, b, k=kind, m=mode: _sum(p.kl_loss(b, k, m), p.loss(b, "gpg", m), b), our_loss)
    for mode in MODES:
        yield Case("verl", f"entropy_coeff=0.1, {mode}",
                   f"--policy_loss reinforce --entropy_coef 0.1 --loss_agg_mode {mode}",
                   lambda p, b, m=mode: _both(p.loss(b, "gpg", m, entropy_coeff=0.1), b), our_loss)
        yield Case("verl", f"value_loss, cliprange_value=0.2, {mode}",
                   f"--advantage_estimator gae --loss_agg_mode {mode}",
                   lambda p, b, m=mode: _both(p.value_loss(b, 0.2, m), b), our_value_loss, differs=mode != MODES[0])


def _sum(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], batch: Batch) -> Found:
    return _both((left[0] + right[0], left[1] + right[1]), batch)


def trl_cases() -> Iterator[Case]:
    """Yield advantages, loss types, importance sampling and the terms of GRPOTrainer; RLOOTrainer."""
    for scale, ours in (("group", "group_norm"), ("none", "dr_grpo")):
        yield Case("trl", f"GRPO, scale_rewards={scale}", f"--advantage_estimator {ours}", lambda p, b, s=scale:
                   (p.advantage(b, scale_rewards=s), ), our_advantage)
    yield Case(
        "trl", "GRPO, normalize_then_sum", "--advantage_estimator gdpo", lambda p, b:
        (p.advantage(b, reward_weights=b.part_weights, multi_objective_aggregation="normalize_then_sum"), ),
        our_advantage, differs=True)
    for beta in (0.0, KL_COEF):
        yield Case("trl", f"RLOO, beta={beta}", f"--advantage_estimator rloo --init_kl_coef {beta} --kl_estimator k1",
                   lambda p, b, c=beta: (p.advantage(_one_turn(b), "rloo", beta=c), ),
                   lambda b, c: our_advantage(_one_turn(b), c))
    means = {"grpo": MODES[1], "bnpo": MODES[0], "dapo": MODES[0], "dr_grpo": MODES[3]}
    terms = {"": {}, f"--use_kl_loss --init_kl_coef {KL_COEF} --kl_estimator k3": {"beta": KL_COEF},
             "--entropy_coef 0.1": {"entropy_coef": 0.1}}  # yapf: disable
    for loss_type, mode in means.items():
        for flags, options in terms.items():
            yield Case("trl", f"loss_type={loss_type}" + "".join(f", {k}={v}" for k, v in options.items()),
                       f"--policy_loss ppo --eps_clip_high 0.28 --loss_agg_mode {mode} {flags}",
                       lambda p, b, t=loss_type, o=options: _both(p.loss(b, loss_type=t, epsilon_high=0.28, **o), b),
                       our_loss)
    yield Case("trl", "loss_type=grpo, importance_sampling_level=sequence",
               f"--policy_loss gspo --loss_agg_mode {MODES[1]}",
               lambda p, b: _both(p.loss(b, loss_type="grpo", importance_sampling_level="sequence"), b), our_loss)
    yield Case("trl", "loss_type=sapo", "--policy_loss sapo", lambda p, b: _both(p.loss(b, loss_type="sapo"), b),
               our_loss)
    yield Case("trl", "loss_type=cispo", "--policy_loss cispo --eps_clip_high 1.5",
               lambda p, b: _both(p.loss(b, loss_type="cispo", epsilon_high=1.5), b), our_loss)
    yield Case("trl", "loss_type=dapo, delta=1.5", "--policy_loss ppo --dual_clip 1.5",
               lambda p, b: _both(p.loss(b, delta=1.5), b), our_loss)
    modes = {"token_truncate": "tis", "token_mask": "icepop", "sequence_truncate": "seq_tis",
             "sequence_mask": "seq_mis"}  # yapf: disable
    for theirs, ours in modes.items():
        own = {"use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": theirs,
               "vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.2}  # yapf: disable
        yield Case("trl", f"vllm_importance_sampling_mode={theirs}",
                   f"--rollout_correction {ours} --correction_low 0.8 --correction_high 1.2",
                   lambda p, b, o=own: _both(p.loss(b, **o), b), our_loss)


def _one_turn(batch: Batch) -> Batch:
    """Copy the batch without gaps in its mask, which TRL's RLOO does not have."""
    return replace(batch, mask=batch.inside)


def rows(peers: dict[str, Any], seeds: range) -> Iterator[tuple[Any, float]]:
    """Yield every case and its largest difference."""
    from oracle_preferences import preference_cases
    for case in (*trl_cases(), *preference_cases(), *verl_advantages(), *verl_losses()):
        yield case, case.difference(peers[case.peer], seeds)


def table(found: list[tuple[Case, float]], versions: dict[str, str]) -> str:
    """Render the rows as Markdown."""
    lines = ["| theirs | here, with `--semantics` and `--zero_spread 0` | largest difference |", "|---|---|---|"]
    for case, gap in found:
        size = f"differs: {gap:.1e}" if case.differs else f"{gap:.1e}"
        flags = " ".join(case.flags.split())
        lines.append(f"| {versions[case.peer]}: {case.theirs} | `{flags}` | {size} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 1 if a row is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", type=Path, default=Path(sys.prefix) / "oracles", help="where verl and trl are")
    parser.add_argument("--batches", type=int, default=50, help="random batches per row")
    args = parser.parse_args(argv)
    if not (args.packages / "verl").is_dir():
        print(f"verl and TRL are not installed in {args.packages}, nothing is compared: run make oracles")
        return 0
    from oracle_peers import Trl, Verl, installed
    from oracle_preferences import TrlPreferences
    torch.set_default_dtype(torch.float64)
    with installed(args.packages):
        peers = {"verl": Verl(), "trl": Trl(), "preferences": TrlPreferences()}
        versions = {key: f"{peer.name} {peer.version}" for key, peer in peers.items()}
        found = list(rows(peers, range(args.batches)))
    print(table(found, versions))
    above = [case.theirs for case, gap in found if not case.differs and not gap <= LIMIT]
    agree = sum(not case.differs and gap <= LIMIT for case, gap in found)
    differ = sum(case.differs for case, _ in found)
    sums = f"{agree} of {len(found)} rows agree to {LIMIT:g}, {differ} differ as documented, {len(above)} are above it"
    print("", sums, *above, sep="\n")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
