"""Training on pairs: direct preference optimization and related losses."""
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.config.offline_schema import PairConfig
from lightrft.config.preference_schema import DPOConfig
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.preferences import Pair, PairDataset
from lightrft.datasets.rows import DataError, place_of
from lightrft.ops.preference import match_by_rank, ordered_rightly, PAIR_LOSSES, Pairs, token_mean_weights
from lightrft.ops.segment import segment_sum
from lightrft.trainer.offline.offline_trainer import Loss, LossBatch
from lightrft.trainer.offline.preference_trainer import pairs_of, PairTrainer, PreferenceTrainer
from lightrft.trainer.offline.reference import response_sums, summed
from lightrft.types import Experience
from lightrft.utils.logging import warn_of_all


def policy_pairs(sums: Tensor, exp: Experience) -> Pairs:
    """Join log-probs [B] of the policy with those of the reference and with lengths, by pair."""
    lens = segment_sum(exp.drawn, exp.cu_seqlens)
    matched = None if exp.matched is None else pairs_of(exp.matched)[0]
    return Pairs(*pairs_of(sums), *pairs_of(exp.ref_sums), *pairs_of(lens), matched)


class DPOTrainer(PreferenceTrainer[Pair], PairTrainer):
    """Trains on a loss of pairs (:mod:`lightrft.ops.preference`), averaged over the pairs of the batch of all ranks."""
    config: DPOConfig

    @classmethod
    def read(cls, config: PairConfig, tokenizer: PreTrainedTokenizerBase, split: str,
             media: MediaStore | None) -> PairDataset:
        """Read pairs, without ties.

        Raises:
            DataError: answers that hold different media; a tie, unless ``--pair_policy skip`` leaves it out.
        """
        rows = super().read(config, tokenizer, split, media)
        drawn = [row.uid for row in rows if row.shown and row.chosen.media != row.rejected.media]
        if drawn:
            raise DataError(
                f"{place_of(drawn[0], split)}: its answers hold different media, from which a policy that writes text "
                "learns nothing. Train a reward model on such rows: lightrft rm or lightrft grm")
        ties = [row.uid for row in rows if row.tie]
        if ties and config.data.pair_policy == "error":
            raise DataError(f"{place_of(ties[0], split)}: a tie: neither answer is better. Remove {len(ties)} such "
                            "rows, or use --pair_policy skip")
        if ties:
            warn_of_all(f"{len(ties)} of {len(rows)} pairs are ties: left out")
            rows.leave_out(lambda row: row.tie)
        return rows

    @property
    def needs_reference(self) -> bool:
        """True for a loss with a reference."""
        return self.config.preference.needs_reference

    def fill(self, batch: LossBatch, parts: list[list[int]]) -> None:
        """Add log-probs of the reference, those of the matched pairs for a loss that compares pairs with each other,
        and the weights of a NLL that is a mean over tokens."""
        exp = batch.exp
        with self.timer("ref"):
            exp.ref_sums = self.reference.sums(exp, parts)
        if self.config.preference.nll_token_mean:
            chosen_lens = pairs_of(segment_sum(exp.drawn, exp.cu_seqlens))[0]
            exp.nll_weights = token_mean_weights(chosen_lens).repeat_interleave(2)
        if PAIR_LOSSES.get(self.config.preference.chosen_loss).matches:
            self.actor.model.eval()
            pairs = policy_pairs(response_sums(self.strategy, self.actor.model, exp, parts), exp)
            matched = match_by_rank(pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected)
            exp.matched = matched.repeat_interleave(2)

    def loss_of(self, exp: Experience, total: float) -> Loss:
        """Return the loss of the pairs, and their implicit rewards."""
        cfg = self.config.preference
        loss = PAIR_LOSSES.get(cfg.chosen_loss)
        pairs = policy_pairs(summed(self.actor.model(exp)[0], exp), exp)
        losses = loss.fn(pairs, **{name: vars(cfg)[name] for name in loss.reads})
        nll = -pairs.means[0] * (1 if exp.nll_weights is None else pairs_of(exp.nll_weights)[0])
        chosen, rejected = (cfg.beta * ratio.detach() for ratio in loss.ratios(pairs))
        metrics = {
            "rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margin": chosen - rejected, "accuracy":
            ordered_rightly(chosen - rejected), "logps/chosen": pairs.chosen, "logps/rejected": pairs.rejected, "nll":
            nll
        }
        return ((losses + cfg.nll_loss_coef * nll).sum() / total).float(), metrics
