"""Verification that the engine samples from the trainer's weights, after every weight sync.

Stale or half-loaded weights are silent: responses still look right. So after each sync a fingerprint of every weight is
computed where it is stored: of the trainer's on the ranks that hold its parts (not of what was sent), of the engine's
in the engine. Both must be equal bit for bit once the trainer's is rounded to the engine's dtype. At intervals canaries
compare log-probs: a few real prompts that the engine continues and the trainer scores. They cover caches that outlive
an update, layouts and quantization, and the engine's arithmetic itself. All ranks see all verdicts and stop together.
"""
import math
import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lightrft.config.schema import RolloutConfig
from lightrft.ops.fingerprint import fingerprints, Piece
from lightrft.ops.rounding import Arithmetic
from lightrft.rollout.engine import ChangesWeights, KeepsWeights, RolloutEngine, SamplingParams
from lightrft.rollout.scheduler import generate
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.strategy.mixed_precision import compute_weights
from lightrft.strategy.sharding import ParamSlice
from lightrft.types import Batch, Episode, Prompt
from lightrft.utils.errors import ExpectedError
from lightrft.utils.logging import get_logger
from lightrft.utils.timer import Timer

Named = Iterator[tuple[str, Tensor]]
REMEDY = ("Nothing was learnt from these weights: --load_checkpoint resumes from the newest checkpoint. If this "
          "happens again, this engine does not load this model correctly: see lightrft doctor for the versions "
          "that fit together, or choose another --engine_type")


class WeightSyncError(ExpectedError, RuntimeError):
    """Error: the engine does not hold, or does not compute with, the trainer's weights."""


class Fingerprints:
    """Comparison of every weight that the engine can read with the trainer's.

    An engine that computes with the trainer's own tensors cannot hold other values: there the addresses are compared,
    and where both compute with one bfloat16 copy of the weights, this copy with the weights.
    With LoRA most engines get weights that the trainer never holds (merged ones); their fingerprints are taken from the
    stream on its way to the engine (:meth:`watch`), on rank 0.
    """

    def __init__(self, strategy: StrategyBase, prepared: Prepared, engine: RolloutEngine, timer: Timer) -> None:
        self.strategy, self.prepared, self.engine, self.timer = strategy, prepared, engine, timer
        self.shared, self.dtypes = bool(engine.shared_storage()), engine.weight_dtypes()
        self.forms = engine.stored_forms if isinstance(engine, ChangesWeights) else {}
        apart = isinstance(engine, KeepsWeights) and engine.apart
        self.merges = prepared.model.merges and not self.shared and not apart
        self.trainer: dict[str, int] = {}  # of the last sync
        self._seen: dict[str, Tensor] = {}  # of the last time that each weight was sent
        self._ended = self._announced = False

    def watch(self, stream: Named) -> Named:
        """Return ``stream``; its fingerprints are taken on the way where they cannot be computed afterwards."""
        self._ended = False
        return self._watched(stream) if self.merges else stream

    def _watched(self, stream: Named) -> Named:
        for name, tensor in stream:
            with self.timer("sync_proof"):
                own = self._stored(name, tensor if self.strategy.is_main else tensor[:0])
                self._seen[name] = fingerprints([Piece(own, self.dtypes.get(name), tensor.shape)])[0]
            yield name, tensor
        self._ended = True

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        """Return the weight, or a part of it, as the engine stores it."""
        return self.forms[name](tensor) if name in self.forms else tensor

    def _readable(self, names: Iterable[str]) -> list[str]:
        """Return the ``names`` that can be compared; log once how many cannot."""
        unread = [name for name in names if name not in self.dtypes]
        if unread and not self._announced:
            get_logger().info(f"sync proof: {len(unread)} weights of the engine (the first: {unread[0]}) are in a form "
                              "that cannot be compared; only canaries cover them (--sync_proof both)")
        self._announced = True
        return [name for name in names if name in self.dtypes]

    def _mine(self) -> tuple[list[str], Tensor | None]:
        """Return the names that are compared, and this rank's part of the trainer's fingerprints: int64 [names]."""
        if self.merges:
            names = self._readable(self._seen)
            return names, torch.stack([self._seen[name] for name in names]) if names else None
        parts = dict(self.strategy.own_slices(self.prepared.model))
        names = self._readable(parts)
        return names, self._of_parts([parts[name] for name in names], names) if names else None

    def _of_parts(self, parts: list[ParamSlice], names: list[str]) -> Tensor:
        """Fingerprints of ``parts``, int64 [parts], each in the dtype in which the engine holds it."""
        pieces = [(index, piece._replace(tensor=self._stored(name, piece.tensor), dtype=self.dtypes[name]))
                  for index, (part, name) in enumerate(zip(parts, names)) for piece in part.pieces]  # yapf: disable
        if not pieces:
            return torch.zeros(len(parts), dtype=torch.int64)
        values = fingerprints([piece for _, piece in pieces])
        owners = torch.tensor([index for index, _ in pieces], device=values.device)
        return values.new_zeros(len(parts)).index_add_(0, owners, values)

    def fault(self) -> str | None:
        """Describe what is wrong with the engine's weights, naming the first; the same on all ranks (a collective)."""
        if self.shared:
            return self._elsewhere()
        if self.merges and self.strategy.any_rank(not self._ended):
            return "the engine did not read the stream of weights to its end"
        names, mine = self._mine()
        if mine is None:
            return None
        table = torch.zeros(self.strategy.world_size + 1, len(names), dtype=torch.int64)
        table[0], table[self.strategy.rank + 1] = mine.cpu(), self.engine.fingerprints(names)
        table = self.strategy.all_reduce(table)
        before, self.trainer = self.trainer, dict(zip(names, table[0].tolist()))
        wrong = table[1:] != table[0]
        return self._report(names, table[1:], wrong, before) if wrong.any() else None

    def _report(self, names: list[str], held: Tensor, wrong: Tensor, before: dict[str, int]) -> str:
        """Describe the first column of ``wrong`` [ranks, names], where the engines' fingerprints ``held`` are not the
        trainer's."""
        first = int(wrong.any(0).nonzero()[0])
        ranks = wrong[:, first].nonzero()[:, 0].tolist()
        likely = self._likely(names[first], int(held[ranks[0], first]), before)
        return (f"{_with_layer(names[first])} differs between engine and trainer on rank {', '.join(map(str, ranks))}: "
                f"{likely}. {int(wrong.any(0).sum())} of {len(names)} weights differ")

    def _elsewhere(self) -> str | None:
        """Describe the first of the trainer's weights that the engine should share but does not compute with."""
        addresses = self.engine.shared_storage()
        for name, weight in compute_weights(self.prepared.model):
            if weight.data_ptr() not in addresses:
                return f"{_with_layer(name)} is not shared: the engine computes with another tensor"
        stale = self.prepared.copy.stale() if self.prepared.copy else []
        return f"{_with_layer(stale[0])} was not rounded again: both compute with older weights" if stale else None

    def _likely(self, name: str, value: int, before: dict[str, int]) -> str:
        if before.get(name) == value:
            return "it still has the values of the previous sync"
        others = [other for other, fingerprint in self.trainer.items() if fingerprint == value]
        if others:
            return f"it has the values of {others[0]}"
        return ("it has neither its previous values nor those of another weight (transposed, scaled, truncated or "
                "mixed?)")


def _with_layer(name: str) -> str:
    found = re.search(r"layers\.(\d+)\.", name)
    return f"{name} (layer {found[1]})" if found else name


class WeightSyncVerifier:
    """Verifier of the weights after every sync of one engine, as ``--sync_proof`` configures it.

    Args:
        cfg: the options.
        prompts: of the training data; canaries are the first few.
        arithmetic: of engine and trainer, whose rounding canaries may show.
        timer: counts the time as ``sync_proof``.
    """

    def __init__(self, cfg: RolloutConfig, strategy: StrategyBase, prepared: Prepared, engine: RolloutEngine,
                 prompts: Sequence[Prompt], arithmetic: Arithmetic, timer: Timer) -> None:
        self.every, self.timer = cfg.sync_canary_every, timer
        self.wants_fingerprints = cfg.sync_proof in ("fingerprint", "both")
        self.wants_canary = cfg.sync_proof in ("canary", "both")
        self.fingerprints = Fingerprints(strategy, prepared, engine, timer)
        self.canary = Canary(strategy, prepared, engine, prompts, cfg.generate_max_len, arithmetic)

    def watch(self, stream: Named) -> Named:
        """Wrap the stream of weights; see :meth:`Fingerprints.watch`."""
        return self.fingerprints.watch(stream) if self.wants_fingerprints else stream

    def check(self, version: int) -> dict[str, float]:
        """Verify that the engine has the weights of ``version``; a collective. Return the metrics.

        Raises:
            WeightSyncError: on all ranks, naming the first weight that differs.
        """
        with self.timer("sync_proof"):
            fault, metrics = self.fingerprints.fault() if self.wants_fingerprints else None, {}
            if fault is None and self._canary_due(version):
                gaps, limit = self.canary.measure(), self.canary.limit
                metrics = {"rollout/canary_gap": max(gaps)}
                if not max(gaps) <= limit:
                    fault = self._canary_fault(gaps, limit)
        if fault is not None:
            raise WeightSyncError(f"weight sync {version}: {fault}. {REMEDY}")
        return metrics

    def _canary_due(self, version: int) -> bool:
        """True at the first sync, which sets the band, at the first that brings trained weights, then regularly: by the
        version, so that a resumed run measures when an uninterrupted one does."""
        return self.wants_canary and (self.canary.band is None or version == 1 or version % self.every == 0)

    def _canary_fault(self, gaps: list[float], limit: float) -> str:
        large = ", ".join(f"rank {rank} {gap:.3g}" for rank, gap in enumerate(gaps) if not gap <= limit)
        named = self.fingerprints.fault()
        return (
            f"log-probs of canaries differ between engine and trainer by more than {limit:.3g} nats (mean: {large}); " +
            (named or "every comparable weight equals the one that was sent, so either a cache survived the update "
             "(prefixes, keys and values), or the engine computes differently (dtype, attention, quantization)" +
             (", or adapters were gathered or merged wrongly" if self.fingerprints.merges else "")))


def get_weight_sync_verifier(cfg: RolloutConfig, strategy: StrategyBase, prepared: Prepared, engine: RolloutEngine,
                             prompts: Sequence[Prompt], arithmetic: Arithmetic,
                             timer: Timer) -> WeightSyncVerifier | None:
    """Build the verifier that ``--sync_proof`` asks for; None where it is off."""
    return None if cfg.sync_proof == "off" else WeightSyncVerifier(cfg, strategy, prepared, engine, prompts, arithmetic,
                                                                   timer)


PROMPTS, NEW_TOKENS = 4, 4
SLACK = 10.0  # the first gap, with the weights that were loaded, sets the band of the later ones: this times itself


class Canary:
    """Measurement of the gap between engine and trainer, and the band that it may not exceed.

    Args:
        prompts: the first few are used, the same on every rank; ``new_tokens``: most tokens of each response.
        arithmetic: of engine and trainer; it limits the first gap, and is the least band of the later ones.

    Attributes:
        band: largest gap that is no fault; None before the first measurement.
    """

    def __init__(self, strategy: StrategyBase, prepared: Prepared, engine: RolloutEngine, prompts: Sequence[Prompt],
                 new_tokens: int, arithmetic: Arithmetic) -> None:
        self.strategy, self.prepared, self.engine = strategy, prepared, engine
        self.at_start, self.least = arithmetic.canary_limits()
        self.prompts = [prompts[i] for i in range(min(PROMPTS, len(prompts)))]
        self.params = SamplingParams(min(NEW_TOKENS, new_tokens))
        self.band: float | None = None

    def measure(self) -> list[float]:
        """Measure the gap on every rank; a collective. The first call sets the band, if its gap allows."""
        scored, reported = self.scores()
        gaps = self.of_all_ranks((scored - reported).abs().mean().item())
        if self.band is None and max(gaps) <= self.at_start:
            self.band = max(self.least, SLACK * max(gaps))
        return gaps

    @property
    def limit(self) -> float:
        """The band, or the bound of the first gap."""
        return self.at_start if self.band is None else self.band

    def of_all_ranks(self, gap: float) -> list[float]:
        """Return the gap of every rank, in nats; infinite where it is not a number. A collective."""
        mine = torch.zeros(self.strategy.world_size, dtype=torch.float64)
        mine[self.strategy.rank] = gap if math.isfinite(gap) else math.inf
        return self.strategy.all_reduce(mine).tolist()

    @torch.no_grad()
    def scores(self) -> tuple[Tensor, Tensor]:
        """Log-probs of the tokens that the engine draws, by the trainer and by the engine: float64 [drawn] on the CPU.
        The model's mode is restored."""
        episodes = [Episode(prompt, i, 0, role="canary", seed=i) for i, prompt in enumerate(self.prompts)]
        generate(self.engine, episodes, self.params)
        exp, model = Batch.of(episodes), self.prepared.model
        training = model.training
        model.eval()
        scored = model(exp.to(self.strategy.device))[0].cpu()[exp.loss_mask].double()
        model.train(training)
        self.strategy.free_full(model)
        return scored, exp.rollout_logprobs[exp.loss_mask].double()
