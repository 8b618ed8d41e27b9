"""Options of the evaluation of checkpoints."""
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightrft.config.inference_schema import DrawingConfig, InferenceTree, ScoreConfig, shared, WishConfig
from lightrft.config.options import COUNT, NON_NEGATIVE, option
from lightrft.config.prompt_schema import HeldOutConfig
from lightrft.config.reward_schema import AccuracyConfig
from lightrft.config.schema import Config, DataConfig
from lightrft.config.shared_schema import LaunchConfig
from lightrft.config.tree import group


@dataclass
class ComparedModelsConfig:
    """The models to evaluate."""
    pretrain: list[str] = option([], "HF folders or hub ids of the models to evaluate on the same prompts; the others "
                                 "are compared with the first", common=True, path="model")
    bf16: bool | None = option(None, "compute in bfloat16 (default: on CUDA, from Ampere on)")


@dataclass
class EvaluatedEngineConfig(DrawingConfig):
    """The engine, and the sampling of the answers."""
    temperature: float = option(0.0, "sampling temperature; 0 is greedy", within=NON_NEGATIVE, common=True)
    n_samples: int = option(1, "answers per prompt", within=COUNT, common=True)


@dataclass
class EvaluatedDataConfig(WishConfig, HeldOutConfig):
    """Sources of held-out prompts, and the conversion of a row to a prompt."""


@dataclass
class EvaluationConfig(AccuracyConfig):
    """Numbers, output and reproducibility."""
    pass_k: list[int] = option([1], "k of pass@k, the chance that at least one of k answers is right (k <= "
                               "--n_samples)", within=COUNT, common=True)
    maj_k: list[int] = option([], "k of maj@k, the chance that the most frequent of k answers is right "
                              "(k <= --n_samples)", within=COUNT, common=True)
    output_path: str = option("./evaluation", "folder of the answers and the results; an evaluation that was killed "
                              "resumes from it", common=True)
    seed: int = option(1234, "random seed; an answer depends only on the seed, its prompt and its number",
                       within="[0, 4294967295]")


@dataclass
class EvaluateConfig(InferenceTree):
    """The whole option tree of ``lightrft.cli.evaluate``."""
    model: ComparedModelsConfig = group(ComparedModelsConfig)  # type: ignore[assignment]  # several
    strategy: LaunchConfig = group(LaunchConfig, free=True)
    engine: EvaluatedEngineConfig = group(EvaluatedEngineConfig)
    data: EvaluatedDataConfig = group(EvaluatedDataConfig)
    score: ScoreConfig = group(ScoreConfig)
    evaluation: EvaluationConfig = group(EvaluationConfig)

    PREFLIGHT = "lightrft.preflight.inference.EvaluatePreflight"
    SYNONYMS = {"eval_n_samples": "n_samples", "eval_temperature": "temperature", "eval_pass_k": "pass_k"}

    @property
    def folder(self) -> Path:
        """Folder of the evaluation."""
        return Path(self.evaluation.output_path)

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        return self.evaluation.seed

    def missing(self) -> Iterator[str]:
        """Yield one sentence per option that is not set and without which nothing runs."""
        yield from super().missing()
        if not self.held_out:
            yield "--eval_data is missing: give a file, folder or hub id, or --eval_suite, e.g. math500"

    def as_config(self, pretrain: str | None = None) -> Config:
        """Convert to the tree of the RL trainer, for the model ``pretrain`` (default: the first)."""
        data, first = DataConfig(**shared(HeldOutConfig, self.data)), next(iter(self.model.pretrain), None)
        return self._as_config(pretrain or first, data, self.engine.n_samples, self.engine.temperature,
                               self.score.as_reward_config())
