"""The environment that options name: its workers, its tools, and what plays episodes with it."""
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
from transformers import PreTrainedTokenizerBase

from lightrft.config.engines import EngineConfig
from lightrft.datasets.media_store import MediaStore
from lightrft.environments.base import ENVIRONMENTS, EnvironmentSpec
from lightrft.environments.chat_format import ChatFormat
from lightrft.environments.loading import check_file
from lightrft.environments.play import Player
from lightrft.environments.pool import EnvironmentPool
from lightrft.models.config_json import read_config
from lightrft.utils.errors import did_you_mean, first_line, meant_path, UserError


def spec_of(entry: str, objects: Mapping[str, Any]) -> EnvironmentSpec:
    """Return what a worker loads for ``--environment``.

    Args:
        objects: of this program, by the names under which options select them.

    Raises:
        UserError: the file is missing or no Python, or nothing has this name.
    """
    path, _, name = entry.partition(".py:") if ".py:" in entry else (entry, "", "")
    if entry not in objects and (name or entry.endswith(".py")):
        file = Path(path if path.endswith(".py") else f"{path}.py").expanduser().resolve()
        check_file(file)
        return EnvironmentSpec(str(file), name)
    if entry not in objects and entry not in ENVIRONMENTS:
        near = did_you_mean(entry, ENVIRONMENTS) or meant_path(Path(entry).with_suffix(".py"))
        raise UserError(f"unknown environment {entry!r}{near}; give a file path.py[:name], or a name that a plugin "
                        "registers")
    made = objects[entry] if entry in objects else ENVIRONMENTS.get(entry)
    try:
        return EnvironmentSpec(name=entry, pickled=cloudpickle.dumps(made))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(f"--environment {entry} cannot be sent to a worker process: {first_line(error)}. Open files, "
                        "models and locks inside of reset()") from error


def open_pool(cfg: EngineConfig, objects: Mapping[str, Any] = {}) -> EnvironmentPool | None:
    """Start a worker that loads the environment of the options; None without one."""
    if cfg.environment is None:
        return None
    return EnvironmentPool(spec_of(cfg.environment, objects), cfg.env_workers, cfg.env_timeout_s)


def tools_of(pool: EnvironmentPool | None) -> Sequence[dict[str, Any]]:
    """Return the schemas of the tools of an environment, which prompts show."""
    return () if pool is None else pool.info.tools


def player_of(pool: EnvironmentPool | None, cfg: EngineConfig, tokenizer: PreTrainedTokenizerBase, path: str,
              media: MediaStore | None = None) -> Player | None:
    """Return what plays episodes in the environment of ``pool`` with the model of ``path``, whose media are in
    ``media``; None without one."""
    if pool is None:
        return None
    form = None if pool.info.writes_marks else ChatFormat(tokenizer, read_config(path).model_type, pool.info.tools)
    return Player(pool, tokenizer, form, cfg.max_turns, cfg.prompt_max_len, media, cfg.env_images)
