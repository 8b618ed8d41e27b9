"""A model in a rollout engine, for commands that generate without training."""
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import Config
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.template_variables import check_read
from lightrft.environments.opening import open_pool, player_of, tools_of
from lightrft.environments.play import Player
from lightrft.models.config_json import check_context
from lightrft.models.loader import load_actor
from lightrft.models.tokenizer import load_tokenizer
from lightrft.ops.rounding import has_experts, RunArithmetic
from lightrft.rollout.engine import RolloutEngine, SamplingParams
from lightrft.rollout.engines import get_engine
from lightrft.rollout.weight_sync.sync import sync_weights
from lightrft.rollout.weight_sync.verify import get_weight_sync_verifier
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.trainer.model_media import connect_media, open_media
from lightrft.trainer.samples import sampling_params
from lightrft.utils.timer import Timer


def check_positions(config: Config) -> None:
    """Raise if the model has not enough positions for a prompt and its response."""
    lengths = config.rollout
    check_context(str(config.model.pretrain), prompt_max_len=lengths.prompt_max_len,
                  generate_max_len=lengths.generate_max_len)


@dataclass
class LoadedModel:
    """A model that is ready to be loaded into an engine: its tokenizer, the source of its media, and the environment
    that answers it."""
    config: Config
    strategy: StrategyBase
    tokenizer: PreTrainedTokenizerBase
    media: MediaStore | None
    repetition_penalty: float = 1.0
    environment: Player | None = None

    @classmethod
    def open(cls, config: Config, strategy: StrategyBase, repetition_penalty: float = 1.0) -> "LoadedModel":
        """Read the tokenizer and the processor of ``config.model.pretrain``; the weights are left to :meth:`start`.

        Raises:
            UserError: there is no such model, it has not enough positions, or its template does not read a variable of
                ``--chat_template_kwargs``.
        """
        path = str(config.model.pretrain)
        check_positions(config)
        tokenizer = load_tokenizer(path, config.data.chat_template)
        check_read(config.data.chat_template_kwargs, [tokenizer])  # a chat has no rows yet
        media = open_media(path, tokenizer, config.data, strategy)
        player = player_of(open_pool(config.rollout), config.rollout, tokenizer, path, media)
        return cls(config, strategy, tokenizer, media, repetition_penalty, player)

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """Schemas of the tools of the environment, which prompts show."""
        return tools_of(None if self.environment is None else self.environment.pool)

    @property
    def sampling(self) -> SamplingParams:
        """Parameters with which responses are drawn."""
        return replace(sampling_params(self.config.rollout, self.tokenizer), repetition_penalty=self.repetition_penalty)

    def prepare(self) -> Prepared:
        """Load the model, and connect it to its media."""
        prepared = self.strategy.prepare(partial(load_actor, self.config.model, train=False, deferred=True))
        connect_media(prepared.model, self.media, self.strategy)
        prepared.model.eval()
        return prepared

    def start(self) -> RolloutEngine:
        """Start the engine, give it the weights and compare them with those of the file; a collective.

        With media, call it after the data is read: engines limit the media of a prompt to the most of any row.
        """
        config, strategy = self.config, self.strategy
        rollout = replace(config.rollout, engine_sleep=False, sync_proof="fingerprint")
        prepared = self.prepare()
        bf16 = bool(config.model.bf16)
        engine = get_engine(rollout, prepared.model, strategy, self.tokenizer, bf16)
        arithmetic = RunArithmetic.of(rollout, bf16, strategy.device.type, has_experts(prepared.model)).engine
        proof = get_weight_sync_verifier(rollout, strategy, prepared, engine, (), arithmetic, Timer())
        sync_weights(strategy, prepared, engine, 0, rollout.sync_bucket_mib, proof)
        if proof is not None:
            proof.check(0)
        if not engine.shared_storage():
            strategy.offload(prepared)
        return engine
