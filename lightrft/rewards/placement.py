"""Placement of reward models: on the device all the time, in host memory between passes, or sharded over the ranks."""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast, Generic, TypeVar

import torch

from lightrft.config.prompt_schema import MediaConfig
from lightrft.config.schema import Config, RewardConfig
from lightrft.datasets.media_store import MediaStore
from lightrft.models.packed_model import PackedModel
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.strategy.host_buffers import VisitingWeights
from lightrft.strategy.mixed_precision import round_frozen


@dataclass(frozen=True)
class ScorerSetup:
    """Setup of reward models.

    Attributes:
        device, bf16: where they compute, and whether in bfloat16.
        max_tokens: most tokens of one pass.
        max_len: longest text; 0: the positions of the model.
        strategy: of the run, by which ranks divide models.
        media: store of the pictures, videos and sounds of the prompts; None: models read text alone.
        data: limits on media.
        shard_size: ranks that share one copy of a divided model; 0: all.
        head: name of the heads that score; None: the models tell it.
    """
    device: torch.device = torch.device("cpu")
    bf16: bool = False
    max_tokens: int = 16384
    max_len: int = 0
    strategy: StrategyBase | None = None
    media: MediaStore | None = None
    data: MediaConfig = field(default_factory=MediaConfig)
    shard_size: int = 0
    head: str | None = None

    @classmethod
    def of(cls, config: Config, device: torch.device, strategy: StrategyBase | None = None,
           media: MediaStore | None = None) -> "ScorerSetup":
        """Return the setup that the options ask for."""
        return cls(device, bool(config.model.bf16), config.train.max_tokens_per_micro_batch, strategy=strategy,
                   media=media, data=config.data, shard_size=config.strategy.fsdp_shard_size)


Model = TypeVar("Model", bound=PackedModel)
Load = Callable[..., Model]  # with deferred=True it leaves the weights in their files


class Placement(Generic[Model]):
    """A frozen reward model where ``cfg`` puts it.

    Attributes:
        prepared: the model as the strategy divides it; None: each rank holds it whole.
    """

    def __init__(self, load: Load[Model], cfg: RewardConfig, setup: ScorerSetup) -> None:
        self.offloads, self.setup = cfg.reward_offload, setup
        self.prepared: Prepared | None = None
        self.weights: VisitingWeights | None = None
        if cfg.reward_shard and setup.strategy is not None:
            self.model = self._divided(load, setup.strategy)
        else:
            self.model = self._whole(load())

    def _whole(self, model: Model) -> Model:
        if self.setup.bf16:
            round_frozen(model)
        if self.offloads:
            self.weights = VisitingWeights(model)
        else:
            model.to(self.setup.device)
        return model.eval()

    def _divided(self, load: Load[Model], strategy: StrategyBase) -> Model:
        """Shard the model over the ranks; each of its passes is then a collective."""
        self.prepared = strategy.prepare(lambda: load(deferred=True), shard_size=self.setup.shard_size)
        model = cast(Model, self.prepared.model.eval())
        model.modality.passes = self.most
        if self.offloads:
            strategy.offload(self.prepared)
        return model

    def most(self, count: int) -> int:
        """Return the largest ``count`` of any rank with which this one computes; a collective of a divided model."""
        if self.prepared is None or self.setup.strategy is None:
            return count
        return int(self.setup.strategy.all_reduce(torch.tensor(count), "max"))

    @contextmanager
    def here(self) -> Iterator[Model]:
        """Context in which the weights, or this rank's part of them, are on the device."""
        if self.weights is not None:
            self.weights.to(self.setup.device)
        if self.prepared is not None and self.setup.strategy is not None and self.offloads:
            self.setup.strategy.reload(self.prepared)
        yield self.model
        if self.weights is not None:
            self.weights.to(torch.device("cpu"))
        if self.prepared is not None and self.setup.strategy is not None:
            self._rest(self.prepared, self.setup.strategy)

    def _rest(self, prepared: Prepared, strategy: StrategyBase) -> None:
        """Free gathered parts of other ranks; for an offloaded model also this rank's part."""
        if self.offloads:
            strategy.offload(prepared)
        else:
            strategy.free_full(prepared.model)
