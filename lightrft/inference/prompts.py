"""Generates scored responses to prompts and writes them to disk: shared by batch inference and evaluation."""
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

from lightrft.config.inference_schema import ScoreConfig
from lightrft.config.schema import Config
from lightrft.config.tree import flatten, options
from lightrft.datasets.rows import place_of
from lightrft.datasets.template_variables import check_read
from lightrft.environments.opening import spec_of
from lightrft.inference.generation import BatchGenerator, score_again
from lightrft.inference.loading import check_positions, LoadedModel
from lightrft.inference.media_columns import MediaColumns
from lightrft.inference.row_files import refuse_other_run, Row, RowFiles
from lightrft.models.vocabulary import check_rows
from lightrft.rewards.correctness import check_accuracy_part
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.placement import ScorerSetup
from lightrft.rewards.spec import parse_entry, parse_models
from lightrft.rewards.validation import check_references, check_turns, score_answers
from lightrft.trainer.samples import reward_input
from lightrft.types import Prompt
from lightrft.utils.errors import UserError
from lightrft.utils.hub import model_digest
from lightrft.utils.logging import get_logger


def content_of(prompts: Sequence[Prompt]) -> list[Any]:
    """Return what identifies prompts."""
    return [(prompt.uid, prompt.token_ids, prompt.media) for prompt in prompts]


def identity(config: Any, later: Sequence[str], content: Sequence[Any], used: Config) -> dict[str, Any]:
    """Collect what the rows of a run depend on: its options, except for the free ones and ``later``, its data, and the
    contents of the files and models that ``used`` names, its options in the tree of the RL trainer."""
    known, values = options(type(config)), flatten(config)
    found = {f"--{name}": values[name] for name, one in known.items() if not one.free and name not in later}
    checksum = crc32(json.dumps(content, default=str).encode())
    return found | {"the data": f"{len(content)} rows, {checksum:08x}"} | _contents(used)


def _contents(used: Config) -> dict[str, str]:
    """Return a digest of each file and model that makes, answers or scores responses."""
    reward, environment = used.reward, used.rollout.environment
    files = {entry: parse_entry(entry).path for entry in reward.reward} | {
        "--judge_template": reward.judge_template,
        "--environment": environment and spec_of(environment, {}).path}  # yapf: disable
    models = [used.model.pretrain, *parse_models(reward.reward_pretrain).values()]
    return {f"the content of {name}": sha256(Path(path).expanduser().read_bytes()).hexdigest()[:16]
            for name, path in files.items() if path} | {
                f"the files of {path}": model_digest(path, quick=True) for path in models if path}  # yapf: disable


def check_rewards(rewards: RewardManager, prompts: Sequence[Prompt], accuracy_part: str | None = None) -> None:
    """Raise if the rewards cannot read the references of prompts, or do not give ``accuracy_part``."""
    check_references(rewards, (reward_input(prompt, "") for prompt in prompts))
    check_accuracy_part(accuracy_part, rewards.part_names())
    if accuracy_part is not None and accuracy_part not in rewards.part_names() and not rewards.neural:
        scores = score_answers(rewards, reward_input(prompts[0], ""))  # a number that a function returns
        check_accuracy_part(accuracy_part, rewards.part_names(), [score.parts for score in scores])


def rehearse(model: LoadedModel, prompts: Sequence[Prompt], scorers: AbstractContextManager[RewardManager | None],
             folder: Path, identity_of: Mapping[str, Any], accuracy_part: str | None = None) -> None:
    """Build what a run of ``prompts`` builds before it generates, by a strategy of a plan; write nothing.

    Args:
        scorers: opens the rewards, or gives None.
        folder: of the rows of the run, which ``identity_of`` identifies.

    Raises:
        UserError: as the run does.
    """
    check_positions(model.config)
    _check_tokens(model, prompts)
    check_read(model.config.data.chat_template_kwargs, [model.tokenizer])
    model.prepare()
    with model.strategy.init_model_context(), scorers as rewards:
        if rewards is not None:
            check_rewards(rewards, prompts, accuracy_part)
    refuse_other_run(folder, identity_of)


def _check_tokens(model: LoadedModel, prompts: Sequence[Prompt]) -> None:
    """Raise if the model lacks a token of a prompt."""
    check_rows(None, str(model.config.model.pretrain), model.tokenizer,
               ((place_of(prompt.uid, "prompt"), prompt.token_ids) for prompt in prompts))


@contextmanager
def keeping(folder: Path) -> Iterator[None]:
    """Add to errors about the rows that ``folder`` keeps them."""
    try:
        yield
    except UserError as error:
        error.args = (f"{error}. {folder} keeps the responses: the same command resumes from there and scores again "
                      "those whose reward did not answer", *error.args[1:])
        raise


def check_scored(rows: Sequence[Row], name: str) -> None:
    """Warn of the responses of ``name`` that could not be scored.

    Raises:
        UserError: these are all.
    """
    causes = Counter(row["unscored"] for row in rows if row.get("unscored"))
    counts = ", ".join(f"{count} {cause}" for cause, count in causes.most_common())
    text = f"{name}: {causes.total()} of {len(rows)} responses are unscored ({counts})"
    if causes and causes.total() == len(rows):
        raise UserError(text)
    if causes:
        get_logger().warning(text)


def generate(model: LoadedModel, prompts: Sequence[Prompt], files: RowFiles, rewards: RewardManager | None, seed: int,
             media: Path) -> bool:
    """Answer and score the prompts that ``files`` does not have, and score again what it has without a score.

    The engine starts only if a prompt has no answer. A collective.

    Args:
        media: folder for the media that the data holds as bytes.

    Returns:
        False if a stop request has ended it early.
    """
    try:
        return _generated(model, prompts, files, rewards, seed, media)
    finally:
        if model.environment is not None:
            model.environment.shutdown()


def _generated(model: LoadedModel, prompts: Sequence[Prompt], files: RowFiles, rewards: RewardManager | None, seed: int,
               media: Path) -> bool:
    _check_tokens(model, prompts)
    if model.environment is not None:
        model.environment.check(prompts[0])
        if rewards is not None:
            check_turns(rewards, reward_input(prompts[0], ""), model.environment.role)
    sampling, samples = model.sampling, model.config.rollout.n_samples_per_prompt
    going = not files.unscored or score_again(model.strategy, prompts, files, rewards)
    if not going or len(files.done) + len(files.unscored) == len(prompts):
        return going
    engine = model.start()
    try:
        return BatchGenerator(model.strategy, engine, model.tokenizer, sampling, samples, seed,
                              MediaColumns(model.media, media), model.environment).run(prompts, files, rewards)
    finally:
        engine.shutdown()


@contextmanager
def scoring(cfg: ScoreConfig, setup: ScorerSetup) -> Iterator[RewardManager]:
    """Score as ``--score`` says, reward models by ``setup``; workers end afterwards. Errors name rewards by that
    option, which selects them here."""
    rewards: RewardManager | None = None
    try:
        rewards = RewardManager(cfg.as_reward_config(), setup=setup)
        yield rewards
    except UserError as error:
        error.args = (re.sub("--reward(_pretrain)? ", "--score ", str(error)), *error.args[1:])
        raise
    finally:
        if rewards is not None:
            rewards.shutdown()
