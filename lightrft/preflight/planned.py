"""Plan of a run on its machine: the defaults that depend on it, and the refusal of a run that does not fit."""
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from lightrft.config.options import ConfigError, show
from lightrft.config.shared_schema import Tree
from lightrft.config.tree import flatten, groups
from lightrft.preflight.base import preflight
from lightrft.preflight.hardware import AMPERE, Machine
from lightrft.utils.errors import UserError
from lightrft.utils.logging import warn_of_all

RECOMPUTED = "gradient_checkpointing"


def settle(config: Tree, provenance: dict[str, str], machine: Machine) -> None:
    """Give the options whose default depends on the machine the value for this one, and name the reason as its source.

    A tree that was never settled, as of a library user, has None there, which is off.
    """
    options = vars(config.model)
    for name, choose in BY_MACHINE.items():
        if name in options and options[name] is None:
            options[name], reason = choose(config, machine)
            provenance[name] = f"default: {reason}"


def _bf16(config: Tree, machine: Machine) -> tuple[bool, str]:
    cuda = machine.device.cuda
    return cuda and machine.bf16, "no GPU" if not cuda else "CUDA" if machine.bf16 else "GPU before Ampere"


def _use_liger(config: Tree, machine: Machine) -> tuple[bool, str]:
    chosen = machine.device.cuda and find_spec("liger_kernel") is not None
    return chosen, "no GPU" if not machine.device.cuda else "installed" if chosen else "not installed"


BY_MACHINE: dict[str, Callable[[Tree, Machine], tuple[bool, str]]] = {
    "bf16": _bf16,
    "use_liger": _use_liger,
}
"""Options of the model whose default is the machine's -> the choice and its reason."""


def settle_recomputation(config: Tree, provenance: dict[str, str], machine: Machine) -> None:
    """Give ``--gradient_checkpointing`` the value that the memory plan chooses, if it has none: after all others have
    theirs and are valid, because the plan depends on them."""
    options = vars(config.model)
    if RECOMPUTED in options and options[RECOMPUTED] is None:
        options[RECOMPUTED], reason = preflight(config).recomputation(machine)
        provenance[RECOMPUTED] = f"default: {reason}"


def recomputed(config: Tree, provenance: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for the start of a run whose backward pass computes activations again, with the reason."""
    value = vars(config.model).get(RECOMPUTED)
    if value:
        yield f"--{RECOMPUTED} {show(value)} ({provenance.get(RECOMPUTED, 'default')})"


def chosen_by_machine(config: Tree) -> dict[str, bool | str]:
    """Return the values of the options that depend on the machine, where nothing sets them."""
    return {name: vars(config.model)[name] for name in (*BY_MACHINE, RECOMPUTED) if name in vars(config.model)}


def known_positions(config: Tree) -> int:
    """Read the positions of the model of a run, if that is in a folder of this machine.

    Returns:
        0 if they are unknown: several models, or one that is not here, are compared when they are opened, and a
        config.json that cannot be read is refused where the model is loaded.
    """
    path = getattr(config.model, "pretrain", None)
    if not isinstance(path, str) or not (Path(path).expanduser() / "config.json").is_file():
        return 0
    from lightrft.models.config_json import context_of
    try:
        return context_of(path)
    except UserError:
        return 0


def refuse_lengths(config: Tree, positions: int) -> None:
    """Refuse prompts and responses that are longer together than the ``positions`` of the model; 0: unknown."""
    if "generate_max_len" in config.LENGTHS and getattr(config, "generates", True):
        from lightrft.models.config_json import check_positions
        values = flatten(config)
        check_positions(str(config.model.pretrain), positions, {name: values[name] for name in config.LENGTHS})


def limit_rows(config: Tree, provenance: dict[str, str], positions: int) -> None:
    """Lower the limits of rows to the ``positions`` of the model, with a notice; longer rows follow
    ``--overlong_prompt``.

    A row shows its length before it is trained, so a limit beyond the model does no harm. A response does not.
    """
    for options, name in ((vars(vars(config)[group]), name) for group in groups(type(config))
                          for name in config.ROW_LIMITS):
        if positions and options.get(name) and options[name] > positions:
            warn_of_all(f"--{name} {options[name]}: the model has {positions} positions (max_position_embeddings), so "
                        f"longer rows follow --overlong_prompt {flatten(config).get('overlong_prompt')}")
            options[name] = positions
            provenance[name] = f"positions of {config.model.pretrain}"


def refuse_emulated_bf16(config: Tree, machine: Machine) -> None:
    """Raise an error if ``--bf16`` was set for GPUs that lack it: their attention kernels do not run in it."""
    if config.model.bf16 and machine.device.cuda and not machine.bf16:
        raise ConfigError(f"--bf16 true: {machine.gpu} has no bfloat16 in hardware (compute capability below "
                          f"{AMPERE}.0); compute in float32 with --bf16 false")


def refuse_together(refusals: Sequence[str], own: UserError | None = None) -> None:
    """Raise the first of the errors (empty: none) that the ranks have found, on every rank; ``own``: that of this rank,
    which is raised as it is if all have one."""
    for rank, text in enumerate(refusals):
        if text:
            raise own if own and all(refusals) else UserError(f"rank {rank}: {text}")


def refuse_unlike_ranks(chosen: Sequence[Mapping[str, bool | str]]) -> None:
    """Raise an error if the machines of the ranks have led to different values; ``chosen``: by rank and option."""
    for name, first in chosen[0].items():
        for rank, values in enumerate(chosen):
            if values[name] != first:
                raise UserError(
                    f"--{name}: the machines differ, so the default is {show(first)} on rank 0 and "
                    f"{show(values[name])} on rank {rank}; set it for all: --{name} {show(name == RECOMPUTED)}")


def refuse_what_does_not_fit(config: Tree, machine: Machine) -> None:
    """Raise an error if a run does not fit into the GPUs of ``machine``.

    Only what is counted for certain can refuse a run, and on a CPU nothing does: the system may swap.
    """
    found = preflight(config).verdict(machine)
    if found and found.verdict == "fail":
        raise ConfigError(f"the run {found.text}; {found.remedy}")
