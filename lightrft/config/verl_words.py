"""Options of verl and of Skywork-OR1, given as dotted words (``actor_rollout_ref.rollout.n=8``) or as trees of YAML."""
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightrft.config.compat import refusal
from lightrft.config.foreign_values import MANAGERS, nearest_value, remedies, synonym
from lightrft.config.options import ConfigError, Option

# beginnings of verl's names that no option of ours shares; below data, algorithm and critic both have some
ROOTS = ("actor_rollout_ref", "actor", "rollout", "ref", "reward_model", "reward", "trainer", "critic", "data",
         "algorithm", "custom_reward_function", "distillation", "sandbox_fusion", "global_profiler", "transfer_queue",
         "ray_kwargs", "ray_init", "skip", "model_engine")
_NO_RAY = "there is no Ray, torchrun starts the processes"
# trees of options of which none is here -> the reason
_TREES = {"ray_kwargs": _NO_RAY, "ray_init": _NO_RAY,
          "megatron": "layers are not divided, use --strategy fsdp, or deepspeed with --zero_stage 3"}  # yapf: disable

# option -> what means never here, where -1 or 0 does in verl
_NEVER = {"save_steps": "--disable_ckpt", "eval_steps": "--eval_steps 0"}


def refusal_of_verl(name: str, value: Any, known: Mapping[str, Option]) -> str | None:
    """Explain the option ``name`` of verl: the option here, with the value where it is the same in both.

    Args:
        known: options of the tree, by name.

    Returns:
        None for a name that is neither verl's nor that of another trainer.
    """
    parts = name.split(".")
    reason = next((_TREES[part] for part in parts if part in _TREES), "")
    answer = None if reason else refusal(name, known)
    if answer is None and (reason or len(parts) > 1 and parts[0] in ROOTS):
        return f"{name} is an option of verl without a counterpart here; {f'{reason}; ' * bool(reason)}drop it"
    return answer and _with_value(answer, str(value), known)


def _with_value(text: str, value: str, known: Mapping[str, Option]) -> str:
    """Add to an explanation that ends with one flag the value, in the words here, if its option takes that value, or
    why it does not."""
    flag = re.search(r"here: --(\w+)$", text)
    value = value.strip("[]'\"")
    if not flag or not re.fullmatch(r"[\w.+,/:~-]+", value) or value.lower() in ("none", "null"):
        return text
    if flag[1] in _NEVER and value in ("-1", "0"):
        return f"{text.removesuffix(flag[0])}here: {_NEVER[flag[1]]}, which means never"
    if flag[1] == "reward":
        return text.removesuffix("--reward") + MANAGERS.get(value, "--reward")
    meant = value.lower() if value in ("True", "False") else synonym(flag[1], value)
    if flag[1] not in known:
        return text
    option = known[flag[1]]
    return f"{text} {meant}" if _takes(option, meant) else text + nearest_value(flag[1], meant, option.choices or ())


def _takes(option: Option, value: str) -> bool:
    """Return True if an option has a value. Names of algorithms are known after torch is imported: those of the field
    that nothing here has are refused before."""
    if value in ("true", "false") and option.kind is not bool:  # a switch there, another kind of value here
        return False
    if not remedies(option.name).get(value, "--").startswith("--"):
        return False
    try:
        read = option.convert(value)
    except ConfigError:
        return False
    return not any(option.range_problems(read))


def leaves(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each option below ``prefix``."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", value
