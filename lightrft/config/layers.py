"""Precedence of option values (default < script < semantics < recipe < YAML < flags) and the source of each."""
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any, NamedTuple

from lightrft.config.options import ConfigError, show
from lightrft.config.presets import RECIPES, SEMANTICS
from lightrft.config.schema import AlgorithmConfig
from lightrft.config.stages import stage_options
from lightrft.config.tree import flatten, options
from lightrft.utils.logging import get_logger

DIRECT = ("flag", "keyword")  # sources that the user has just written


class Layer(NamedTuple):
    """Option values by name, all from one source."""
    source: str
    values: dict[str, Any]


def preset_layers(values: dict[str, Any]) -> list[Layer]:
    """Collect the values that the presets named in ``values`` set; a later layer wins."""
    recipe, semantics = values.get("recipe"), SEMANTICS[values.get("semantics", "default")]
    method = RECIPES[recipe].options if recipe else {}
    choices = vars(AlgorithmConfig()) | method | values
    layers = [Layer(f"semantics {values.get('semantics')}", semantics.values(choices))]
    if recipe:
        layers.append(Layer(f"recipe {recipe}", method | semantics.recipes.get(recipe, {})))
    if values.get("stages"):
        layers.append(Layer("stages", stage_options(values["stages"])))
    return layers


def preset_values(values: dict[str, Any]) -> dict[str, Any]:
    """Merge the values that the presets named in ``values`` set, by option name."""
    return {name: value for layer in preset_layers(values) for name, value in layer.values.items()}


def changed(config: Any, names: Iterable[str]) -> list[tuple[str, Any]]:
    """Select the options in ``names`` that the tree ``config`` has and that were set explicitly, with their values:
    neither the default nor the value that a chosen preset gives."""
    values, known = flatten(config), options(config)
    others = {name: values[name] for name in names if name in known and values[name] != known[name].default}
    preset = preset_values(values) if others else {}
    return [(name, value) for name, value in others.items() if name not in preset or value != preset[name]]


def resolve(tree: type, script: dict[str, Any], given: list[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge all layers into values and provenance by option name.

    A preset that ``given`` names wins over the script; one that the script names loses to the script's own values.

    Args:
        script: the defaults of the script.
        given: YAML files, then the command line.

    Raises:
        ConfigError: a stage that does not parse, or a ``--recipe`` that sets nothing.
    """
    named = {name: value for layer in (Layer("script", script), *given) for name, value in layer.values.items()}
    theirs = {name for layer in given for name in layer.values}
    presets = preset_layers(named)
    above = [layer for layer in presets if layer.source.split()[0] in theirs]
    below = [layer for layer in presets if layer not in above]
    values: dict[str, Any] = {}
    provenance = dict.fromkeys(options(tree), "default")
    for source, found in (*below, Layer("script", script), *above, *given):
        values |= found
        provenance |= dict.fromkeys(found, source)
    _check_recipe(values, provenance)
    for source, found in _following(tree, values, provenance):
        values |= found
        provenance |= dict.fromkeys(found, source)
    return values, provenance | _outvoted(values, provenance, presets)


def _following(tree: type, values: dict[str, Any], provenance: dict[str, str]) -> Iterator[Layer]:
    """Yield the values that follow from other options, as other trainers mean them."""
    if provenance.get("train_batch_size") == "default" and (batch := _small_rollout(tree, values)):
        yield Layer("samples of a rollout", {"train_batch_size": batch})
    if provenance.get("eval_split") in DIRECT and (held_out := _split_of_folders(tree, values)):
        yield Layer("--eval_split", {"eval_data": held_out})
        get_logger().info("--eval_split without --eval_data: that split of --prompt_data is held out")
    if provenance.get("strategy") == "default" and provenance.get("zero_stage", "default") != "default":
        yield Layer("--zero_stage", {"strategy": "deepspeed"})
        get_logger().info("--zero_stage without --strategy means --strategy deepspeed")
    if _freezes_what_adapters_leave(tree, values):
        yield Layer("--lora_rank", {"freeze_prefix": []})
        get_logger().info("--freeze_prefix without a part has no effect with --lora_rank: only adapters are trained")
    if values.get("eval_task") == "generate_vllm":
        if provenance["engine_type"] == "default":
            yield Layer("--eval_task generate_vllm", {"engine_type": "vllm"})
        elif values["engine_type"] != "vllm":
            get_logger().info(f"--eval_task generate_vllm means --eval_task generate, because --engine_type "
                              f"{values['engine_type']} is set")
    urls = values.get("remote_rm_url", [])
    if files := [url for url in urls if url.endswith(".py")]:
        servers = [url for url in urls if url not in files]
        yield Layer(provenance["remote_rm_url"] if servers else "default", {"remote_rm_url": servers})
        yield Layer("--remote_rm_url", {"reward": [*values.get("reward", []), *files]})
        get_logger().info(f"--remote_rm_url with a Python file means --reward {' '.join(files)}")


def _freezes_what_adapters_leave(tree: type, values: dict[str, Any]) -> bool:
    """Return True if ``--freeze_prefix`` has no value, and LoRA no adapters in the part that it then stands for."""
    if not values.get("lora_rank") or not values.get("freeze_prefix"):
        return False
    part = options(tree)["freeze_prefix"].bare
    return values["freeze_prefix"] == [part] and part.removesuffix("?") not in values.get("target_modules", [])


def _split_of_folders(tree: type, values: dict[str, Any]) -> list[str]:
    """Return the folders and hub ids of ``--prompt_data``, which have splits, if no held-out data is named."""
    known, entries = options(tree), values.get("prompt_data", [])
    if "eval_suite" not in known or any(values.get(name) for name in ("eval_data", "eval_suite")):
        return []
    return entries if not any(PurePath(entry.partition("@")[0]).suffix for entry in entries) else []


def _small_rollout(tree: type, values: dict[str, Any]) -> int | None:
    """Count the samples of a rollout that has fewer than the default ``--train_batch_size``; else None."""
    known = options(tree)
    if "n_samples_per_prompt" not in known:
        return None
    prompts, samples = (values.get(name, known[name].default)
                        for name in ("rollout_batch_size", "n_samples_per_prompt"))
    return prompts * samples if 0 < prompts * samples < known["train_batch_size"].default else None


def with_sources(problems: list[str], provenance: dict[str, str]) -> list[str]:
    """Add to each problem the source of the option it begins with, unless that is a flag or the default."""
    return [_with_source(problem, provenance) for problem in problems]


def _with_source(problem: str, provenance: dict[str, str]) -> str:
    named = re.match(r"--(\w+)", problem)
    source = provenance.get(named[1], "flag").partition("; ")[0] if named else "flag"
    if source in DIRECT or source.startswith("default"):
        return problem
    if source == "script":
        return f"{problem} (the script itself sets it as a default, which a flag replaces)"
    return f"{problem} (it is {'in' if source.startswith('yaml:') else 'from'} {source.removeprefix('yaml:')})"


def _outvoted(values: dict[str, Any], provenance: dict[str, str], presets: list[Layer]) -> dict[str, str]:
    """Extend the provenance of the options to which a preset would give another value."""
    return {
        name: f"{provenance[name]}; {source}: {show(value)}"
        for source, found in presets for name, value in found.items()
        if source != provenance[name] and value != values[name]
    }  # yapf: disable


def _check_recipe(values: dict[str, Any], provenance: dict[str, str]) -> None:
    """Raise an error if files (the ``config.yaml`` of a run) override every option of a recipe on the command line."""
    if provenance.get("recipe") not in DIRECT or not values["recipe"]:
        return
    recipe = RECIPES[values["recipe"]].options
    if f"recipe {values['recipe']}" not in provenance.values() and any(values[k] != v for k, v in recipe.items()):
        files = sorted({provenance[name].removeprefix("yaml:") for name in recipe}.difference(DIRECT))
        raise ConfigError(f"--recipe {values['recipe']}: has no effect, because every option it sets is also set "
                          f"elsewhere{' in ' + ', '.join(files) if files else ''}; drop it, or drop those options")
