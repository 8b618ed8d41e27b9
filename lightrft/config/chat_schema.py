"""Options of a chat in the terminal."""
from dataclasses import dataclass

from lightrft.config.engine_schema import EngineConfig
from lightrft.config.inference_schema import InferenceModelConfig, InferenceTree
from lightrft.config.options import NON_NEGATIVE, option
from lightrft.config.reward_schema import RewardConfig
from lightrft.config.schema import Config, DataConfig
from lightrft.config.shared_schema import LaunchConfig
from lightrft.config.tree import group


@dataclass
class ChatEngineConfig(EngineConfig):
    """The engine, and the sampling of the answers."""
    temperature: float = option(0.7, "sampling temperature; 0 is greedy", within=NON_NEGATIVE, common=True)


@dataclass
class ConversationConfig:
    """The conversation."""
    system_prompt: str | None = option(None, "system message of the conversation", common=True)
    chat_template: str | None = option(
        None, "a Jinja file, or one of the built-in template names, that replaces the tokenizer's own")
    max_pixels: int = option(0, "shrink larger pictures to this many pixels; 0: no limit", within=NON_NEGATIVE)
    seed: int = option(1234, "seed of the answers", within="[0, 4294967295]")


@dataclass
class ChatConfig(InferenceTree):
    """The whole option tree of ``lightrft.cli.chat``."""
    model: InferenceModelConfig = group(InferenceModelConfig)
    strategy: LaunchConfig = group(LaunchConfig, free=True)
    engine: ChatEngineConfig = group(ChatEngineConfig)
    chat: ConversationConfig = group(ConversationConfig)

    SYNONYMS = {"max_new_tokens": "generate_max_len", "greedy_sampling": "temperature=0"}

    @property
    def folder(self) -> None:
        """None: a chat writes nothing."""
        return None

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        return self.chat.seed

    def as_config(self) -> Config:
        """Convert to the tree of the RL trainer. Pictures are files that the user names, wherever they are."""
        c = self.chat
        data = DataConfig(apply_chat_template=True, system_prompt=c.system_prompt, chat_template=c.chat_template,
                          max_pixels=c.max_pixels, media_root="/")
        return self._as_config(self.model.pretrain, data, 1, self.engine.temperature, RewardConfig())
