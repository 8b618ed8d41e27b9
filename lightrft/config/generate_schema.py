"""Options of batch inference: prompts or responses in, responses, scores and training rows out."""
from dataclasses import dataclass, replace
from pathlib import Path

from lightrft.config.inference_schema import (DrawingConfig, InferenceModelConfig, InferenceTree, ScoreConfig, shared,
                                              WishConfig)
from lightrft.config.options import COUNT, NON_NEGATIVE, option
from lightrft.config.prompt_schema import PromptDataConfig
from lightrft.config.schema import Config, DataConfig
from lightrft.config.shared_schema import LaunchConfig
from lightrft.config.tree import group

TASKS = ("generate", "generate_vllm", "rm")
POST_PROCESSORS = ("rs", "csft", "iter_dpo")


@dataclass
class SampledEngineConfig(DrawingConfig):
    """The engine, and the sampling of the responses."""
    temperature: float = option(1.0, "sampling temperature; 0 is greedy", within=NON_NEGATIVE, common=True)
    best_of_n: int = option(1, "responses per prompt", within=COUNT, common=True)


@dataclass
class GenerateDataConfig(WishConfig, PromptDataConfig):
    """Sources of the prompts or responses, and the conversion of a row."""
    output_key: str = option("output", "--eval_task rm: column that holds the response")
    iter: int | None = option(
        None, "iteration, counted from 0: use only the ROLLOUT_BATCH_SIZE rows from row ITER * ROLLOUT_BATCH_SIZE on",
        within=NON_NEGATIVE)
    rollout_batch_size: int = option(2048, "--iter: rows of an iteration", within=COUNT)


@dataclass
class PostProcessConfig(ScoreConfig):
    """Scoring of the responses, and what is made of them."""
    post_processor: str | None = option(
        None, "rows to write: rs the best response to each prompt (rejection sampling), csft every response with its "
        "reward in the prompt (conditional SFT), iter_dpo the best and the worst response to each prompt (default: "
        "every response)", POST_PROCESSORS, common=True)
    normalize_reward: bool = option(False, "normalize the rewards of all responses to mean 0 and standard deviation 1")
    max_len: int = option(
        0,
        "--eval_task rm: longest text of prompt and response in tokens; a reward model leaves a longer one unscored; "
        "0: the context length of the model", within=NON_NEGATIVE)
    value_head_prefix: str | None = option(
        None, "name of the head of a reward model in its files (default: as the model says, or its only head)")
    reward_template: str = option("{input} <rm_score>: {reward} ", "csft: prompt with the reward in it",
                                  needs="post_processor csft")
    min_reward_gap: float = option(
        0.0,
        "iter_dpo: no pair of a prompt whose best and worst reward differ by less; those of a reward model that no "
        "longer tells the responses apart are noise", within=NON_NEGATIVE, needs="post_processor iter_dpo")
    keep_truncated: bool = option(False, "rs: a response that was cut off at the length limit may be the best one too",
                                  needs="post_processor rs")


@dataclass
class OutputConfig:
    """Task, output and reproducibility."""
    output_path: str = option(
        "./generated.jsonl", "jsonl file of the result; OUTPUT_PATH.parts holds the results of "
        "an unfinished run, which the same command resumes", common=True)
    eval_task: str = option(
        "generate", "generate: answer prompts; generate_vllm: the same, by vLLM unless --engine_type is set; rm: score "
        "existing responses with --score and, as a reward model, --pretrain", TASKS, common=True)
    seed: int = option(1234, "random seed; a response depends only on the seed, its prompt and its number",
                       within="[0, 4294967295]")


@dataclass
class GenerateConfig(InferenceTree):
    """The whole option tree of ``lightrft.cli.generate``."""
    model: InferenceModelConfig = group(InferenceModelConfig)
    strategy: LaunchConfig = group(LaunchConfig, free=True)
    engine: SampledEngineConfig = group(SampledEngineConfig)
    data: GenerateDataConfig = group(GenerateDataConfig)
    score: PostProcessConfig = group(PostProcessConfig)
    output: OutputConfig = group(OutputConfig)

    PREFLIGHT = "lightrft.preflight.inference.GeneratePreflight"
    SYNONYMS = {
        "dataset": "prompt_data",
        "dataset_probs": "prompt_data_probs",
        "max_new_tokens": "generate_max_len",
        "tp_size": "engine_tp_size",
        "max_num_seqs": "engine_max_seqs",
        "greedy_sampling": "temperature=0",
    }
    GRANTS = {
        "zero_stage": ("[0-3]", "nothing is trained; a process holds the whole model, and --engine_tp_size divides it "
                       "in vLLM and SGLang"),
        "micro_batch_size": (r"[1-9]\d*", "the engine decides how many sequences it runs at once (--engine_max_seqs), "
                             "and a reward model reads texts up to a number of tokens in a pass"),
    }

    @property
    def out(self) -> Path:
        """File of the result."""
        return Path(self.output.output_path)

    @property
    def folder(self) -> Path:
        """Folder of what an unfinished run has made."""
        return self.out.with_name(f"{self.out.name}.parts")

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        return self.output.seed

    @property
    def generates(self) -> bool:
        """True if the responses are generated, and not those of the rows."""
        return self.output.eval_task != "rm"

    @property
    def scoring(self) -> PostProcessConfig:
        """Options of scoring; where nothing is generated, with the reward model of ``--pretrain``."""
        if self.generates or not self.model.pretrain:
            return self.score
        return replace(self.score, score=[*self.score.score, self.model.pretrain])

    def as_config(self) -> Config:
        """Convert to the tree of the RL trainer."""
        data = DataConfig(**shared(PromptDataConfig, self.data), shuffle=False)
        return self._as_config(self.model.pretrain, data, self.engine.best_of_n, self.engine.temperature,
                               self.scoring.as_reward_config())
