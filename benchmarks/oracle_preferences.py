"""Losses of pairs, reward models, KTO and distillation by TRL's trainers, called with tensors, and the same ones here.

The rows of :mod:`oracles` for offline losses. The methods are TRL's own; the forward pass, which they call, returns the
log-probs of the batch. Its ORPO computes in float32.
"""
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightrft.ops.divergence import divergence
from lightrft.ops.preference import kto, kto_kl, pair_loss, PAIR_LOSSES, Pairs, token_mean_weights

BETA, GAMMA, WEIGHT, SMOOTHING, NLL = 0.3, 0.7, 1.33, 0.1, 0.5
NAMES = {
    "sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo_mean", "robust": "robust", "sppo_hard": "sppo", "aot": "aot",
    "apo_zero": "apo_zero", "apo_down": "apo_down", "exo_pair": "exo"
}
Losses = tuple[Tensor, Tensor]  # the loss, and its gradient by the log-probs


def draw(seed: int, count: int = 8) -> Pairs:
    """Draw random pairs of responses of 1 to 12 tokens."""
    rng = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 13, (2, count), generator=rng)
    policy, ref = (-(0.1 + 2 * torch.rand(2, count, generator=rng)) * lens for _ in range(2))
    return Pairs(*policy, *ref, *lens)


def stacked(pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, those of the reference and lengths of all responses, [2 P]: the chosen ones first."""
    return torch.cat(pairs[:2]), torch.cat(pairs[2:4]), torch.cat(pairs[4:6])


def with_gradient(loss_of: Callable[[Tensor], Tensor], logprobs: Tensor) -> Losses:
    """Return the loss and its gradient."""
    leaf = logprobs.clone().requires_grad_()
    loss = loss_of(leaf)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


class _Face:
    """Attributes that the methods of TRL's trainers read from ``self``."""

    def __init__(self, **options: Any) -> None:
        from accelerate import Accelerator
        self.accelerator, self._metrics = Accelerator(cpu=True), defaultdict(lambda: defaultdict(list))
        self.ld_alpha, self.f_divergence_type, self.use_weighting = None, "reverse_kl", False
        self.aux_loss_enabled, self.precompute_ref_logps, self.calculate_KL = False, True, True
        self._total_train_tokens, self._tp_size, self.alpha, self.beta = 0, 1, 0.0, BETA
        self.is_encoder_decoder, self.pad_token_id, self.padding_value = False, 0, 0
        self.desirable_weight, self.undesirable_weight = 1.0, WEIGHT
        vars(self).update(options)

    def _compute_kl_logps(self, model: Any, batch: Any) -> Tensor:
        return self.mismatched


def outputs(logprobs: Tensor, lens: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """Return a model whose forward pass has these summed log-probs [N], and the inputs that count their tokens."""
    mask = torch.arange(14) <= lens[:, None]
    mask[:, 0] = False  # the prompt
    per_token = torch.nn.functional.pad(logprobs[:, None], (0, 12))
    found = SimpleNamespace(log_probs=per_token, entropy=per_token.detach(), mean_logits=per_token.detach(),
                            is_top1=mask[:, 1:])
    model = type("Model", (), {"training": True, "__call__": lambda self, **kwargs: found})()
    return model, {"input_ids": torch.ones_like(mask).long(), "completion_mask": mask.long(), "attention_mask": mask}


def unpadded_batch(lens: Tensor) -> dict[str, Tensor]:
    """Return the inputs of CPOTrainer and ORPOTrainer: the token 1 in prompts of one token and in all responses."""
    seen = (torch.arange(14) <= lens[:, None]).long()
    labels = torch.where(torch.arange(14) > 0, torch.where(seen > 0, 1, -100), -100)
    values = {"input_ids": seen, "attention_mask": seen, "labels": labels}
    return {f"{side}_{name}": rows
            for name, value in values.items() for side, rows in zip(("chosen", "rejected"), value.chunk(2))
            }  # yapf: disable


def logits_model(means: Tensor) -> Callable[..., Any]:
    """Return a model with two tokens whose second one has the log-prob ``means`` [N] everywhere in a sequence."""
    odds = means - torch.log(-torch.expm1(means))
    logits = torch.stack([torch.zeros_like(odds), odds], -1)[:, None].expand(-1, 14, -1)
    return lambda *args, **kwargs: SimpleNamespace(logits=logits)


class TrlPreferences:
    """TRL's DPO, CPO, ORPO, KTO, GKD and reward trainers on random pairs."""
    name = "TRL"

    def __init__(self) -> None:
        import trl
        from trl.experimental.cpo.cpo_trainer import CPOTrainer
        from trl.experimental.gkd.gkd_trainer import GKDTrainer
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer
        from trl.trainer.dpo_trainer import DPOTrainer
        from trl.trainer.kto_trainer import KTOTrainer
        from trl.trainer.reward_trainer import RewardTrainer
        self.version, self.jsd = trl.__version__, GKDTrainer.generalized_jsd_loss
        trainers = {"cpo": CPOTrainer, "orpo": ORPOTrainer, "dpo": DPOTrainer, "kto": KTOTrainer, "rm": RewardTrainer}
        self.faces = {name: type(name, (_Face, trainer), {}) for name, trainer in trainers.items()}

    def dpo(self, weights: dict[str, float], pairs: Pairs, smoothing: float = 0.0) -> Losses:
        """Compute a sum of losses of DPOTrainer with ``weights``."""
        face = self.faces["dpo"](loss_types=[*weights], loss_weights=[*weights.values()], label_smoothing=smoothing)
        logprobs, ref, lens = stacked(pairs)

        def loss(leaf: Tensor) -> Tensor:
            face.model, inputs = outputs(leaf, lens)
            chosen, rejected = ref.chunk(2)
            return face._compute_loss(face.model, inputs | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected},
                                      False)

        return with_gradient(loss, logprobs)

    def cpo(self, name: str, pairs: Pairs) -> Losses:
        """Compute a loss of CPOTrainer, with label smoothing; that of SimPO takes log-probs per token."""
        face = self.faces["cpo"](loss_type=name, simpo_gamma=GAMMA, label_smoothing=SMOOTHING)
        logprobs, _, lens = stacked(pairs)
        lens = lens if name == "simpo" else torch.ones_like(lens)
        return with_gradient(lambda leaf: face.cpo_loss(*(leaf / lens).chunk(2))[0].mean(), logprobs)

    def odds_ratio(self, pairs: Pairs) -> Losses:
        """Compute ORPO's odds ratio loss."""
        face = self.faces["orpo"]()
        logprobs, _, lens = stacked(pairs)
        return with_gradient(lambda leaf: -face.odds_ratio_loss(*(leaf / lens).chunk(2))[0].mean(), logprobs)

    def whole(self, trainer: str, pairs: Pairs, **options: Any) -> Losses:
        """Compute the whole loss of CPOTrainer ("cpo") or ORPOTrainer ("orpo"), its NLL included."""
        face = self.faces[trainer](**options)
        logprobs, _, lens = stacked(pairs)
        return with_gradient(
            lambda leaf: face.get_batch_loss_metrics(logits_model(leaf / lens), unpadded_batch(lens))[0], logprobs)

    def kto(self, pairs: Pairs) -> Losses:
        """Compute the loss of KTOTrainer: the chosen ones are desirable, and the KL comes from them reversed."""
        logprobs, ref, lens = stacked(pairs)
        face = self.faces["kto"](loss_type="kto", mismatched=mismatched(pairs))

        def loss(leaf: Tensor) -> Tensor:
            face.model, inputs = outputs(leaf, lens)
            label = torch.arange(len(lens)) < len(lens) // 2
            inputs |= {"label": label, "ref_logps": ref, "ref_KL_logps": ref.flip(0)}
            return face._compute_loss(face.model, inputs, False)

        return with_gradient(loss, logprobs)

    def reward(self, pairs: Pairs, margins: bool) -> Losses:
        """Compute the loss of RewardTrainer; its scores are the numbers of the pairs."""
        scores, _, lens = stacked(pairs)
        face = self.faces["rm"](args=SimpleNamespace(center_rewards_coefficient=None), state=SimpleNamespace())
        face.state.num_input_tokens_seen, face.model = 0, SimpleNamespace(training=True)
        inputs = outputs(scores, lens)[1] | ({"margin": margins_of(pairs)} if margins else {})
        return with_gradient(
            lambda leaf: face.compute_loss(lambda **kwargs: SimpleNamespace(logits=leaf[:, None]), inputs), scores)


def margins_of(pairs: Pairs) -> Tensor:
    """Return a margin for each pair."""
    return (pairs.ref_chosen - pairs.ref_rejected).abs()


def mismatched(pairs: Pairs) -> Tensor:
    """Return log-probs of mismatched pairs, [2 P]."""
    return torch.cat(pairs[:2]).flip(0) + 1.0


def without_reference(pairs: Pairs) -> Pairs:
    """Copy the pairs with a reference of 0, as in CPO."""
    return pairs._replace(ref_chosen=0 * pairs.ref_chosen, ref_rejected=0 * pairs.ref_rejected)


def ours(name: str, pairs: Pairs, smoothing: float = SMOOTHING, nll: Tensor | float = 0.0) -> Losses:
    """Compute a loss of this package, with the chosen responses' NLL per token times ``nll``, [P] or for all."""
    loss = PAIR_LOSSES.get(name)
    options = {"beta": BETA, "label_smoothing": smoothing, "simpo_gamma": GAMMA}
    read = {key: options[key] for key in loss.reads}

    def mean(leaf: Tensor) -> Tensor:
        chosen, rejected = leaf.chunk(2)
        moved = pairs._replace(chosen=chosen, rejected=rejected)
        return (loss.fn(moved, **read) - nll * moved.means[0]).mean()

    return with_gradient(mean, torch.cat(pairs[:2]))


def of_tokens(pairs: Pairs) -> Tensor:
    """Weight the NLL as ``--nll_loss_coef`` with ``--nll_token_mean`` does, [P]."""
    return NLL * token_mean_weights(pairs.chosen_lens)


def our_reward(pairs: Pairs, margins: bool) -> Losses:
    """Compute the loss of reward models of this package."""
    margin = margins_of(pairs) if margins else 0.0

    def mean(leaf: Tensor) -> Tensor:
        chosen, rejected = leaf.chunk(2)
        return pair_loss(chosen, rejected, torch.ones_like(chosen), margin).mean()

    return with_gradient(mean, torch.cat(pairs[:2]))


def our_kto(pairs: Pairs) -> Losses:
    """Compute KTO of this package."""
    logprobs, ref, _ = stacked(pairs)
    desirable = torch.arange(len(ref)) < len(ref) // 2
    kl = kto_kl(mismatched(pairs), ref.flip(0))
    return with_gradient(lambda leaf: kto(leaf, ref, desirable, kl, BETA, 1.0, WEIGHT).mean(), logprobs)


def logits(seed: int) -> Tensor:
    """Draw logits of a student and a teacher, [2, 6, 11]."""
    return torch.randn(2, 6, 11, generator=torch.Generator().manual_seed(seed)) * 2


@dataclass(frozen=True)
class PreferenceCase:
    """One loss of TRL and the flags that mean the same here; the face of ``oracles.Case``."""
    theirs: str
    flags: str
    run: Callable[[TrlPreferences, int], Losses]
    ours: Callable[[int], Losses]
    peer: str = "preferences"
    differs: bool = False

    def difference(self, peer: TrlPreferences, seeds: range) -> float:
        """Compute the largest difference over ``seeds``, relative to the largest number."""
        worst = 0.0
        for seed in seeds:
            for theirs, own in zip(self.run(peer, seed), self.ours(seed), strict=True):
                worst = max(worst, ((theirs - own).abs().max() / theirs.abs().max().clamp_min(1)).item())
        return worst


def case(theirs: str, flags: str, run: Callable[[TrlPreferences, Pairs], Losses], own: Callable[[Pairs], Losses],
         differs: bool = False) -> PreferenceCase:
    """Return the case of two functions of the same random pairs."""
    return PreferenceCase(theirs, flags, lambda peer, seed: run(peer, draw(seed)), lambda seed: own(draw(seed)),
                          differs=differs)


def pair_case(theirs: str, name: str, smoothing: float) -> PreferenceCase:
    """Return the case of a loss of DPOTrainer."""
    told, flag = (f", label_smoothing={smoothing}", f" --label_smoothing {smoothing}") if smoothing else ("", "")
    return case(f"DPO, {theirs}{told}", f"dpo --loss {name}{flag}",
                lambda peer, pairs: peer.dpo({theirs: 1.0}, pairs, smoothing),
                lambda pairs: ours(name, pairs, smoothing))


def divergence_case(beta: float, flags: str) -> PreferenceCase:
    """Return the case of a divergence of GKDTrainer."""

    def theirs(peer: TrlPreferences, seed: int) -> Losses:
        student, teacher = logits(seed)
        labels = torch.zeros(1, len(student)).long()
        return with_gradient(lambda leaf: peer.jsd(leaf[None], teacher[None], labels, beta), student)

    def own(seed: int) -> Losses:
        student, teacher = logits(seed)
        kind, target = flags.split()[0], teacher.log_softmax(-1)
        return with_gradient(lambda leaf: divergence(leaf.log_softmax(-1), target, kind, beta).mean(), student)

    return PreferenceCase(f"GKD, beta={beta}", f"kd --divergence {flags}", theirs, own)


def nll_cases() -> Iterator[PreferenceCase]:
    """Yield losses with the NLL of the chosen responses."""
    both = {"sigmoid": 1.0, "sft": NLL}
    for flags, weight in ((f"--rpo_alpha {NLL}", of_tokens), (f"--nll_loss_coef {NLL}", lambda pairs: NLL)):
        yield case(f"DPO, sigmoid and sft, loss_weights=1.0 {NLL}", f"dpo --loss sigmoid {flags}",
                   lambda peer, pairs: peer.dpo(both, pairs),
                   lambda pairs, w=weight: ours("sigmoid", pairs, 0.0, w(pairs)), differs=weight is not of_tokens)
    yield case(f"CPO, simpo, cpo_alpha={NLL}", f"dpo --loss simpo --simpo_gamma {GAMMA} --cpo_alpha {NLL}",
               lambda peer, pairs: peer.whole("cpo", pairs, loss_type="simpo", simpo_gamma=GAMMA, cpo_alpha=NLL,
                                              label_smoothing=0.0),
               lambda pairs: ours("simpo", pairs, 0.0, of_tokens(pairs)))  # yapf: disable
    yield case("ORPO, prompts of one token", "dpo --loss orpo", lambda peer, pairs: peer.whole("orpo", pairs),
               lambda pairs: ours("orpo", pairs), differs=True)
    yield case("ORPO, the odds ratio alone", "dpo --loss orpo", TrlPreferences.odds_ratio,
               lambda pairs: ours("orpo", pairs, nll=-1.0))


def preference_cases() -> Iterator[PreferenceCase]:
    """Yield the losses of pairs, with label smoothing where TRL has it, reward models, KTO and distillation."""
    for theirs, name in NAMES.items():
        if not PAIR_LOSSES.get(name).needs_smoothing:
            yield pair_case(theirs, name, 0.0)
        if theirs in ("robust", "aot", "exo_pair"):
            yield pair_case(theirs, name, 0.1)
    smooth = "--label_smoothing 0.1"
    yield case("CPO, label_smoothing=0.1", f"dpo --loss sigmoid {smooth}, reference 0",
               lambda peer, pairs: peer.cpo("sigmoid", pairs), lambda pairs: ours("sigmoid", without_reference(pairs)))
    yield case("CPO, simpo, label_smoothing=0.1", f"dpo --loss simpo --simpo_gamma {GAMMA} {smooth}",
               lambda peer, pairs: peer.cpo("simpo", pairs), lambda pairs: ours("simpo", pairs))
    yield from nll_cases()
    for margins, told in ((False, ""), (True, ", margin")):
        yield case(f"RewardTrainer{told}", f"rm{told and ', rows with margin'}",
                   partial(TrlPreferences.reward, margins=margins), partial(our_reward, margins=margins))
    yield case("KTO", f"kto --undesirable_loss_weight {WEIGHT}", TrlPreferences.kto, our_kto)
    for beta, flags in ((0.0, "forward"), (1.0, "reverse"), (0.3, "js --js_mix 0.3")):
        yield divergence_case(beta, flags)
