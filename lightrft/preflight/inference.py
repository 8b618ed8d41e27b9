"""Checks of the commands that generate or score without training: models, engine, scoring, post-processing, output."""
from collections.abc import Iterator
from pathlib import Path

from lightrft.config.evaluate_schema import EvaluateConfig
from lightrft.config.generate_schema import GenerateConfig
from lightrft.config.inference_schema import ChatConfig, InferenceTree, RECIPE, ScoreConfig
from lightrft.config.options import show
from lightrft.config.prompt_schema import MediaConfig
from lightrft.config.schema import Config, RolloutConfig
from lightrft.config.serve_schema import ServeConfig
from lightrft.preflight.base import Preflight
from lightrft.preflight.engine_rules import engine_problems, missing_engine, shared_engine
from lightrft.preflight.reward_rules import of_scores, reward_problems, served_problems, written_scores
from lightrft.preflight.shared_rules import if_set, prompts, rendering, writable

NEEDS_BOTH = ("{input}", "{reward}")


class InferencePreflight(Preflight):
    """Checks of a command that generates."""
    config: InferenceTree

    def missing_packages(self) -> Iterator[str]:
        """Yield the missing package of the engine."""
        yield from missing_engine(self.config.as_config())

    def engine_problems(self, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
        """Yield the problems of the engine that runs the models."""
        rl, penalty = self.config.as_config(), self.config.engine.repetition_penalty
        if not rl.rollout.caps.penalizes and penalty != 1:
            yield (f"--repetition_penalty {penalty:g}: has no effect with --engine_type {rl.rollout.engine_type}; add "
                   "--engine_type vllm or drop it")
        yield from engine_problems(rl, world_size, cuda)
        yield from shared_engine(rl.rollout, world_size, local_ranks)


class GeneratePreflight(InferencePreflight):
    """Checks of batch inference."""
    config: GenerateConfig

    def problems(self, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
        """Yield the problems of scoring, output, prompts and engine."""
        c = self.config
        yield from super().problems(world_size, cuda, local_ranks)
        yield from _scores(c.scoring, c.as_config().rollout)
        yield from _output(c)
        yield from prompts(c.as_config().data)
        if c.generates:
            yield from self.engine_problems(world_size, cuda, local_ranks)


class EvaluatePreflight(InferencePreflight):
    """Checks of the evaluation of checkpoints."""
    config: EvaluateConfig

    def problems(self, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
        """Yield the problems of prompts, scoring, numbers and engine."""
        c = self.config
        yield from super().problems(world_size, cuda, local_ranks)
        yield from rendering(c.data)
        yield from _scores(c.score, c.as_config().rollout)
        yield from _evaluation(c)
        yield from self.engine_problems(world_size, cuda, local_ranks)


class ChatPreflight(InferencePreflight):
    """Checks of a chat."""
    config: ChatConfig

    def problems(self, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
        """Yield the problems of the process and the engine."""
        yield from super().problems(world_size, cuda, local_ranks)
        if world_size > 1:
            yield f"lightrft chat runs in one process, not on {world_size} ranks; drop --nproc or torchrun"
        yield from self.engine_problems(world_size, cuda, local_ranks)


class ServePreflight(Preflight):
    """Checks of a server of reward models."""
    config: ServeConfig

    def problems(self, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
        """Yield the problems of the process and of the models."""
        yield from super().problems(world_size, cuda, local_ranks)
        if world_size > 1:
            yield (f"lightrft serve_rm runs in one process, not on {world_size} ranks; start one per GPU, each with a "
                   "--port of its own, and give --remote_rm_url all of them")
        yield from served_problems(self.config)


def _scores(c: ScoreConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Yield the problems of what scores responses, under the name that it has here."""
    yield from written_scores(c)
    yield from map(of_scores, reward_problems(Config(reward=c.as_reward_config(), rollout=rollout)))
    if RECIPE in c.score and len(c.score) > 1:
        yield (f"--score {' '.join(c.score)}: {RECIPE} means the recipe of each row, and cannot be combined with other "
               "rewards; drop one of them")


def _output(c: GenerateConfig) -> Iterator[str]:
    """Yield the problems of the output, and of what is made of the responses."""
    s, out = c.scoring, c.out
    if out.is_dir():
        yield f"--output_path {out}: is a folder; give a file, e.g. {out / 'generated.jsonl'}"
    else:
        yield from writable("output_path", str(c.folder))
    if c.data.iter is None:
        yield from if_set(c, ["rollout_batch_size"], "has no effect without --iter; add --iter 0 or drop it")
    if c.data.prompt_data_probs and len(c.data.prompt_data) > 1:
        yield (f"--prompt_data_probs {show(c.data.prompt_data_probs)}: has no effect, every row of every --prompt_data "
               "is used once; drop it, and name only the data to use")
    if c.generates:
        yield from _sampling(c)
    else:
        yield from _no_sampling(c)
    if s.post_processor and not s.score and c.generates:
        yield (f"--post_processor {s.post_processor}: needs rewards; add --score, e.g. --score math or the URL of a "
               "reward server")
    if not s.models:
        yield from if_set(c, ["value_head_prefix"], "has no effect without a reward model; name one or drop it")
    if s.normalize_reward and not s.score and c.generates:
        yield "--normalize_reward true: has no effect without --score; add it or drop --normalize_reward"
    for part in NEEDS_BOTH if s.post_processor == "csft" else ():
        if part not in s.reward_template:
            yield f"--reward_template {s.reward_template!r}: must hold {part}, e.g. '{{input}} <rm_score>: {{reward}} '"


def _sampling(c: GenerateConfig) -> Iterator[str]:
    e = c.engine
    if e.best_of_n > 1 and e.temperature == 0:
        yield (f"--best_of_n {e.best_of_n}: greedy responses to one prompt are all the same; set --temperature above "
               "0, or --best_of_n 1")
    if c.score.post_processor == "iter_dpo" and e.best_of_n == 1:
        yield "--post_processor iter_dpo: a pair needs two responses to a prompt; nearest valid value: --best_of_n 2"
    for name in ("output_key", "max_len"):
        yield from if_set(c, [name], f"has no effect without --eval_task rm; add it or drop --{name}")


def _no_sampling(c: GenerateConfig) -> Iterator[str]:
    """Yield the options that only generation reads; of the scored rows the prompts are text already, or chats that a
    reward model, here or on a server, renders by its own template, and media are not read."""
    rendering = ("chat_template", "system_prompt", "input_template", "enable_csft", "overlong_prompt", "data_workers")
    bare = () if c.scoring.models or c.scoring.urls else ("apply_chat_template", "chat_template_kwargs")
    if not c.scoring.models:
        yield from if_set(c, ["max_len"],
                          "has no effect without a reward model; give --pretrain or a --score, or drop it")
    read = {*vars(c.engine), *vars(MediaConfig()), *rendering, *bare}
    yield from if_set(c, read, "has no effect with --eval_task rm, which generates nothing; drop it")


def _evaluation(c: EvaluateConfig) -> Iterator[str]:
    """Yield the problems of the models, the prompts and the numbers of an evaluation."""
    e, n = c.evaluation, c.engine.n_samples
    yield from writable("output_path", e.output_path)
    places = [Path(path).expanduser().resolve() for path in c.model.pretrain]
    for place in dict.fromkeys(place for place in places if places.count(place) > 1):
        spelt = dict.fromkeys(path for path, its in zip(c.model.pretrain, places) if its == place)
        yield f"--pretrain {' '.join(spelt)}: is given twice; give each model once"
    if n > 1 and c.engine.temperature == 0:
        yield (f"--n_samples {n}: greedy answers to one prompt are all the same; set --temperature above 0, or "
               "--n_samples 1")
    for name, ks in (("pass_k", e.pass_k), ("maj_k", e.maj_k)):
        for k in ks:
            if k > n:
                yield f"--{name} {k}: needs {k} answers per prompt; nearest valid value: {n}, or --n_samples {k}"
