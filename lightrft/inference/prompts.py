"""From a model and prompts to scored responses on disk: what batch inference and evaluation share."""
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

from lightrft.config.inference_schema import ScoreConfig
from lightrft.config.tree import flatten, options
from lightrft.inference.generation import BatchGenerator
from lightrft.inference.loading import LoadedModel
from lightrft.inference.row_files import RowFiles
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.placement import ScorerSetup
from lightrft.rollout.engine import SamplingParams
from lightrft.trainer.samples import stop_token_ids
from lightrft.types import Prompt
from lightrft.utils.errors import UserError


def content_of(prompts: Sequence[Prompt]) -> list[Any]:
    """Return what identifies prompts."""
    return [(prompt.uid, prompt.token_ids, prompt.media) for prompt in prompts]


def identity(config: Any, later: Sequence[str], content: Sequence[Any]) -> dict[str, Any]:
    """Collect what the rows of a run depend on: its options, except for the free ones and ``later``, and its data."""
    known, values = options(type(config)), flatten(config)
    found = {f"--{name}": values[name] for name, one in known.items() if not one.free and name not in later}
    checksum = crc32(json.dumps(content, default=str).encode())
    return found | {"the data": f"{len(content)} rows, {checksum:08x}"}


def generate(model: LoadedModel, prompts: Sequence[Prompt], files: RowFiles, rewards: RewardManager | None,
             seed: int) -> bool:
    """Answer and score the prompts that ``files`` does not have.

    The engine starts only if a prompt is left. A collective.

    Returns:
        False if a stop request has ended it early.
    """
    rollout, data = model.config.rollout, model.config.data
    sampling = SamplingParams(rollout.generate_max_len, rollout.temperature, rollout.top_p, rollout.top_k,
                              rollout.min_p, stop_token_ids(rollout.stop, model.tokenizer))
    media_columns = (data.images_key, data.videos_key, data.audios_key)
    if len(files.done) == len(prompts):
        return True
    engine = model.start()
    try:
        return BatchGenerator(model.strategy, engine, model.tokenizer, sampling, rollout.n_samples_per_prompt, seed,
                              media_columns).run(prompts, files, rewards)
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
