"""Options of the rewards of the RL trainer, and of the scoring of responses in other commands."""
from dataclasses import dataclass

from lightrft.config.options import COUNT, NON_NEGATIVE, POSITIVE, option

SUITE_LABEL = "suite/"  # with the name of its suite the label of a row: its own reward recipe, whatever --reward is


@dataclass
class ScoringConfig:
    """Judge, workers and time limits of scoring."""
    judge_url: list[str] = option(
        [], "base URL of an OpenAI-compatible server for --reward judge, e.g. http://host:8000/v1; requests are "
        "balanced over several")
    judge_model: str | None = option(None, "name of the judge's model on its server", needs="judge_url URL")
    judge_template: str | None = option(
        None, "text file with the request to the judge: {response} and optionally {prompt}, {reference} or a {COLUMN} "
        "of the row (default: asks for a score from 0 to 10). Also required for a language model in --reward_pretrain")
    judge_score: str = option(
        r"(?i)score\W{0,5}(-?\d+(?:\.\d+)?)", "regular expression whose group is the score; the last match in the "
        "judge's answer counts")
    judge_max_len: int = option(512, "longest answer of a generative reward model, in tokens", within=COUNT)
    judge_key_env: str = option("OPENAI_API_KEY", "environment variable with the judge's API key, if it needs one",
                                needs="judge_url URL", free=True)
    judge_args: list[str] = option(
        [], "further fields of the request, name=value, e.g. temperature=0.7 max_tokens=4096; null removes a field",
        needs="judge_url URL")
    judge_concurrency: int = option(16, "requests to the judge in flight, per rank", within=COUNT,
                                    needs="judge_url URL", free=True)
    judge_timeout_s: float = option(60.0, "seconds that the judge may take for one response; a later one is left "
                                    "unscored", within=POSITIVE, needs="judge_url URL", free=True)
    reward_workers: int = option(1, "worker processes per rank that score responses", within=COUNT, free=True)
    reward_timeout_s: float = option(
        10.0, "seconds that scoring one response (or one batch of a file or server) may take; later ones are unscored",
        within=POSITIVE, free=True)
    response_faults: list[str] = option(
        [], "failures in a worker process for which the response is to blame: its reward is then 0 instead of none, as "
        "for a function that raises ResponseFault. timeout: it alone took all of --reward_timeout_s; worker_died: it "
        "alone ended the process", ("timeout", "worker_died"))


@dataclass
class AccuracyConfig:
    """Option that says which answers are right on held-out rows."""
    accuracy_part: str | None = option(
        None, "reward part, or number that a function returns (part/key), whose value 1 means that an answer is right "
        "(default: a part accuracy, a number acc, math, exact, choice or answer, else the only part that gives 0 and 1 "
        "alone); without one there is no accuracy")


@dataclass
class RewardConfig(ScoringConfig):
    """Rewards of the responses: sources, workers and shaping."""
    reward: list[str] = option(
        [], "reward parts 'name' or 'name=weight', a python file 'path.py[:function][=weight]'; default: the recipe of "
        "each row's label or data source", common=True, card="rewards")
    remote_rm_url: list[str] = option(
        [], "reward servers (POST {query, prompts, labels} -> {rewards}); requests are balanced over them")
    reward_pretrain: list[str] = option(
        [],
        "reward models, PATH or NAME=PATH: trained by lightrft rm, prm or grm, sequence classifiers with one score, "
        "or language models with --judge_template. Each is a reward part NAME (rm; several: rm1, rm2 ...) with weight "
        "1, or the weight in --reward or --reward_recipe", path="models")
    reward_recipe: list[str] = option(
        [], "SOURCE:part=weight+part=weight: reward parts for the rows with this label or data source, instead of all "
        "others")
    normalize_reward: bool = option(
        False, "normalize the scores of a reward model by mean and std of the rewards that its training measured",
        needs="reward_pretrain PATH")
    reward_offload: bool = option(False, "keep reward models in host memory except while they score",
                                  needs="reward_pretrain PATH", free=True)
    reward_shard: bool = option(False, "shard reward models over the ranks, as --strategy shards the policy",
                                needs="reward_pretrain PATH", free=True)
    step_reward: str = option(
        "min",
        "reward of a process reward model, computed from the probabilities that the steps are good; per_step: each is "
        "the reward of the last token of its step, and the reward of the response is their sum",
        ("min", "mean", "product", "last", "per_step"), needs="reward_pretrain PATH")
    step_separator: str | None = option(
        None, "text that separates the steps of a response for process reward models (default: as in their training)",
        needs="reward_pretrain PATH")
    reward_probe: bool = option(
        True, "before training, score one known-good and one known-bad answer; stop if their rewards do not differ",
        free=True)
    max_unscored_steps: int = option(
        3, "stop after this many steps in a row in which no response could be scored; 0: never", within=NON_NEGATIVE,
        free=True)
    reward_clip: float = option(0.0, "clip rewards to [-x, x] after shaping; 0 is off", within=NON_NEGATIVE)
    reward_running_norm: bool = option(False, "divide rewards by their running standard deviation")
    reward_running_norm_minus_mean: bool = option(False, "also subtract the running mean", needs="reward_running_norm")
    overlong_buffer: bool = option(False, "DAPO's soft penalty on responses close to --generate_max_len")
    overlong_buffer_len: int = option(
        0, "length of the penalty zone before --generate_max_len, in tokens; 0: a fifth of that length, as in DAPO",
        within=NON_NEGATIVE, needs="overlong_buffer")
    overlong_buffer_penalty_factor: float = option(1.0, "penalty at the limit (subtracted from the reward)",
                                                   within=POSITIVE, needs="overlong_buffer")
    mask_truncated: bool = option(False, "leave responses that reach the length limit out of the loss")
