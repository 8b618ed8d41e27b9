"""Options of the commands that generate without training: the groups and the base that they share, and a chat."""
import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightrft.config.engines import EngineConfig
from lightrft.config.options import NON_NEGATIVE, option, POSITIVE
from lightrft.config.reward_schema import RewardConfig, ScoringConfig
from lightrft.config.run_folders import model_of, named_model_of
from lightrft.config.schema import Config, DataConfig, ModelConfig, RolloutConfig
from lightrft.config.shared_schema import LaunchConfig, StrategyConfig, Tree
from lightrft.config.tree import group

RECIPE = "recipe"  # a --score that is no reward: each row has its own


@dataclass
class InferenceModelConfig:
    """The model that generates."""
    pretrain: str | None = option(None, "HF folder or hub id of the model that generates", common=True, path="model")
    bf16: bool | None = option(None, "compute in bfloat16 (default: on CUDA, from Ampere on)")


@dataclass
class ScoreConfig(ScoringConfig):
    """Scoring of the responses."""
    score: list[str] = option(
        [], "rewards of the responses: 'name' or 'name=weight', a python file 'path.py[:function][=weight]', a reward "
        "model '[name=]path[=weight]', the URL of a reward server, or 'recipe' for the recipe of each row's label or "
        "data source; several are added", common=True)

    @property
    def urls(self) -> list[str]:
        """Reward servers among the entries of ``score``."""
        return [entry for entry in self.score if "://" in entry]

    @property
    def models(self) -> dict[str, tuple[str, str]]:
        """Entries of ``score`` that are reward models -> ``path`` or ``name=path``, and the weight."""
        return {entry: found for entry in self.score if (found := _model_of(entry))}

    def as_reward_config(self) -> RewardConfig:
        """Convert to the reward group of the RL trainer, which the reward manager reads."""
        names = [entry for entry in self.score if "://" not in entry and entry not in {RECIPE, *self.models}]
        models = [*self.models.values()]
        parts = ["rm" if len(models) == 1 else f"rm{i}" for i in range(1, len(models) + 1)]  # of those without a name
        weights = [f"{path.rpartition('=')[0] or part}={weight}" for (path, weight), part in zip(models, parts)]
        return RewardConfig(**shared(ScoringConfig, self), reward=names + weights,
                            reward_pretrain=[named_model_of(path) for path, _ in models], remote_rm_url=self.urls)


def _model_of(entry: str) -> tuple[str, str] | None:
    """Split ``path``, ``name=path`` or either with ``=weight`` into the model and its weight; None for no model."""
    path, equals, weight = entry.rpartition("=")
    if not equals or _is_model(weight):
        path, weight = entry, "1"
    return (path, weight) if _is_model(path.rpartition("=")[2]) else None


def _is_model(path: str) -> bool:
    """Return True for a folder or hub id, not for the name of a reward, a file or a URL."""
    file, folder = re.fullmatch(r".+\.py(:\w+)?", path), Path(model_of(path)).expanduser()
    return "://" not in path and not file and ("/" in path or (folder / "config.json").is_file())


def shared(group: type, values: Any) -> dict[str, Any]:
    """Collect the values of the options that ``values``, of a group derived from ``group``, shares with it."""
    return {field.name: vars(values)[field.name] for field in fields(group)}


@dataclass
class WishConfig:
    """The prompts of a model of conditional SFT."""
    enable_csft: bool = option(False, "conditional SFT: append --csft_prompt to every prompt")
    csft_prompt: str = option("<rm_score>: 5.00", "text with the desired reward, at the end of every prompt",
                              needs="enable_csft")

    @property
    def wish(self) -> str:
        """Text at the end of every prompt."""
        return f" {self.csft_prompt.strip()} " if self.enable_csft else ""


@dataclass
class DrawingConfig(EngineConfig):
    """The engine, and the sampling of texts that are not trained on."""
    repetition_penalty: float = option(
        1.0,
        "hf, vllm: divide positive logits of the tokens that prompt and response have by this, and multiply negative "
        "ones; 1 is off", within=POSITIVE)


class InferenceTree(Tree):
    """Base of the option trees of commands that generate."""
    strategy: LaunchConfig  # type: ignore[assignment]  # nothing is trained, so the placement has no options
    model: InferenceModelConfig  # type: ignore[assignment]
    engine: DrawingConfig
    LENGTHS = ("prompt_max_len", "generate_max_len")

    @property
    @abstractmethod
    def folder(self) -> Path | None:
        """Folder of what an unfinished run has generated; None: it writes nothing."""

    @property
    def generates(self) -> bool:
        """True if the responses are generated, and not those of the rows."""
        return True

    def missing(self) -> Iterator[str]:
        """Yield one sentence per option that is not set and without which nothing runs."""
        yield from super().missing()
        if self.generates and not self.model.pretrain:
            yield "--pretrain is missing: give an HF folder or hub id of the model"

    @property
    @abstractmethod
    def seed(self) -> int:
        """Seed of everything random."""

    @property
    def placement(self) -> StrategyConfig:
        """Distribution of the model over the ranks: with several, each holds a part until the engine has it."""
        return StrategyConfig(**vars(self.strategy))

    @abstractmethod
    def as_config(self) -> Config:
        """Convert to the tree of the RL trainer, whose groups models, engines, data sets and rewards read."""

    def _as_config(self, pretrain: str | None, data: DataConfig, samples: int, temperature: float,
                   reward: RewardConfig) -> Config:
        rollout = RolloutConfig(**shared(EngineConfig, self.engine), n_samples_per_prompt=samples,
                                temperature=temperature)
        model = ModelConfig(pretrain=pretrain, bf16=self.model.bf16)
        return Config(model=model, strategy=self.placement, rollout=rollout, data=data, reward=reward)


@dataclass
class ChatEngineConfig(DrawingConfig):
    """The engine, and the sampling of the answers."""
    temperature: float = option(0.7, "sampling temperature; 0 is greedy", within=NON_NEGATIVE, common=True)


@dataclass
class ConversationConfig:
    """The conversation."""
    system_prompt: str | None = option(None, "system message of the conversation", common=True)
    chat_template: str | None = option(
        None, "a Jinja file, one of the built-in template names, or the text of a template with {{, in place of the "
        "tokenizer's own", path="template")
    chat_template_kwargs: dict[str, Any] = option(
        {}, "variables of the chat template, as a JSON object, e.g. '{\"enable_thinking\": false}'")
    max_pixels: int = option(0, "shrink larger pictures to this many pixels; 0: no limit", within=NON_NEGATIVE)
    seed: int = option(1234, "seed of the answers", within="[0, 4294967295]")


@dataclass
class ChatConfig(InferenceTree):
    """The whole option tree of ``lightrft.cli.chat``."""
    model: InferenceModelConfig = group(InferenceModelConfig)
    strategy: LaunchConfig = group(LaunchConfig, free=True)
    engine: ChatEngineConfig = group(ChatEngineConfig)
    chat: ConversationConfig = group(ConversationConfig)

    PREFLIGHT = "lightrft.preflight.inference.ChatPreflight"
    SYNONYMS = {"max_new_tokens": "generate_max_len", "greedy_sampling": "temperature=0"}
    GRANTS = {"apply_chat_template": ("(?i)true", "a chat always uses the chat template of the model")}

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
                          chat_template_kwargs=c.chat_template_kwargs, max_pixels=c.max_pixels, media_root="/")
        return self._as_config(self.model.pretrain, data, 1, self.engine.temperature, RewardConfig())
