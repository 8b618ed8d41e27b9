"""Files of the hub on several ranks: one rank of each machine downloads them, the others read its cache."""
from collections.abc import Iterable
from pathlib import Path

from lightrft.config.schema import DataConfig
from lightrft.config.shared_schema import Tree
from lightrft.config.tree import flatten, options
from lightrft.datasets.pair_sources import parse_source
from lightrft.datasets.rows import fetch_entry, fetch_hub, has_no_file
from lightrft.datasets.suites import parse_suite, SUITES
from lightrft.rewards.spec import parse_models
from lightrft.strategy.base import StrategyBase
from lightrft.utils.errors import UserError
from lightrft.utils.hub import download_model, looks_local, prefer_cache_without_network, read_cache_only


def fetch_once(strategy: StrategyBase, config: Tree, data: DataConfig) -> None:
    """Let the first rank of each machine download what a run reads from the hub; the others wait for it, and then read
    the cache without asking.

    After a failed download no rank is switched to the cache: the part that reads the file raises, with the remedy.

    Args:
        config: all options of the run, for its models.
        data: its data.
    """
    values = flatten(config)
    models, entries, suites = _models(config), _entries(data, values.get("pretrain_data") or []), _suites(data)
    if strategy.world_size == 1 or not (models or entries or suites):
        return
    fetched = strategy.local_rank > 0 or _fetch(models, entries, suites)
    if all(strategy.all_gather_object(fetched)) and strategy.local_rank > 0:
        read_cache_only()


def _fetch(models: list[str], entries: list[str], suites: list[str]) -> bool:
    """Fill the cache; return True if everything is there."""
    prefer_cache_without_network()
    try:
        for name in models:
            download_model(name)
        for spec in entries:
            fetch_entry(spec)
        for name in suites:
            fetch_hub(SUITES[name].hub, SUITES[name].config)
    except (OSError, ValueError, UserError):
        return False
    return True


def _on_hub(name: str) -> bool:
    return not looks_local(name) and not has_no_file(name) and not Path(name).exists()


def _models(config: Tree) -> list[str]:
    """Models on the hub that options name."""
    values, known = flatten(config), options(config)
    names = [value for name, value in values.items() if known[name].path == "model"]
    names += parse_models(values.get("reward_pretrain") or []).values()
    return [name for name in dict.fromkeys(names) if name and _on_hub(name)]


def _entries(data: DataConfig, more: Iterable[str] = ()) -> list[str]:
    """Entries of the training and of the evaluation data, and of ``more``, that are on the hub."""
    paths = [parse_source(spec)[1] for spec in [*data.prompt_data, *data.eval_data, *more]]
    return [spec for spec in dict.fromkeys(paths)
            if _on_hub(spec) and _on_hub(spec.rpartition("@")[0] or spec)]  # yapf: disable


def _suites(data: DataConfig) -> list[str]:
    return [name for name, path in map(parse_suite, data.eval_suite) if not path]
