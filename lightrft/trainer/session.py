"""Session around a run: checks before any process group exists, strategy, watchdog, signals, clean end."""
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from lightrft.config.cli import ParsedConfig, exit_on_config_error
from lightrft.config.files import save_config
from lightrft.config.layers import with_sources
from lightrft.config.options import ConfigError
from lightrft.config.tree import flatten
from lightrft.preflight.base import preflight
from lightrft.preflight.hardware import Machine, unlike_gpus
from lightrft.preflight.planned import (chosen_by_machine, known_positions, limit_rows, recomputed,
                                        refuse_emulated_bf16, refuse_lengths, refuse_together, refuse_unlike_ranks,
                                        refuse_what_does_not_fit, settle, settle_recomputation)
from lightrft.preflight.report import report
from lightrft.preflight.validate import validate, warnings
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.distributed import gather_early
from lightrft.strategy.strategy import get_strategy
from lightrft.trainer.trial import DEFAULT, TrialContext, try_inputs
from lightrft.utils.env import frozen_objects, seed_everything, used_memory_gib, World
from lightrft.utils.errors import (absent_packages_are_expected, at_prompt, disk_full_is_expected, ExpectedError,
                                   leave_error, UserError)
from lightrft.utils.gpu import rank_device
from lightrft.utils.logging import get_logger
from lightrft.utils.timer import Timer
from lightrft.utils.watchdog import (Watchdog, clear_stop_request, connect_store, signal_handlers, stop_exit_code,
                                     stop_requested)


@dataclass
class Session:
    """Handles of a running session for a script."""
    strategy: StrategyBase
    timer: Timer


@contextmanager
def training_session(parsed: ParsedConfig, exits: bool = True, trial: TrialContext = DEFAULT,
                     strategy: StrategyBase | None = None) -> Iterator[Session]:
    """Check the configuration, set it up on all ranks, and tear it down cleanly.

    ``--dry_run`` prints the configuration and exits with 0; an impossible configuration exits with 2, both before any
    process group exists, and on all ranks if one of them finds it so. Inside the
    session an error that the user can fix (:class:`lightrft.utils.errors.UserError`) ends in one line and exit code 2,
    another expected error in one line and exit code 1, and any other error with a traceback and a report of all ranks
    (:mod:`lightrft.utils.watchdog`). A run that receives a stop request exits with 143 (SIGTERM) or 130 (Ctrl-C) after
    it has saved.

    With ``exits`` False, as in a notebook, errors are raised as they are, and a stop request becomes a
    ``KeyboardInterrupt``. ``trial`` says what a dry run tries (:func:`lightrft.trainer.trial.try_inputs`). ``strategy``
    is one that the program has made, by default that of the options; the session sets it up.
    """
    with exit_on_config_error(parsed.prog) if exits else nullcontext(), parsed.own_words():
        check_together(parsed, trial)
    with signal_handlers():
        yield from _session(parsed, exits, strategy)
    if exits and stop_exit_code():
        raise SystemExit(stop_exit_code())
    if stop_exit_code():
        clear_stop_request()
        raise KeyboardInterrupt


def _session(parsed: ParsedConfig, exits: bool, made: StrategyBase | None) -> Iterator[Session]:
    config, world, timer = parsed.config, World.from_env(), Timer()
    with exit_on_config_error(parsed.prog) if exits else nullcontext():
        strategy = get_strategy(config.placement, bf16=bool(config.model.bf16))
        strategy = strategy if made is None else _settled_as(strategy, made)
        strategy.setup()
    timer.gauge = partial(used_memory_gib, strategy.device)
    if strategy.device.type == "cuda":
        timer.follow(partial(torch.cuda.Event, enable_timing=True))
    store, limits, folder = connect_store(world), config.placement, str(config.folder)
    watchdog = Watchdog(world.rank, world.world_size, timer.phase, limits.dist_timeout_s, store,
                        started=lambda: timer.steps > 0, silence_s=limits.silence_timeout_s)
    with _one_line(watchdog) if exits else nullcontext(), watchdog, parsed.own_words(), disk_full_is_expected(folder), \
            absent_packages_are_expected():
        refuse_unlike_ranks(strategy.all_gather_object(chosen_by_machine(config)))
        seed_everything(config.seed + strategy.mesh.data.index)
        _announce(parsed, strategy)
        with frozen_objects():
            yield Session(strategy, timer)
    strategy.teardown()


def _settled_as(strategy: StrategyBase, made: StrategyBase) -> StrategyBase:
    """Give ``made`` the options of ``strategy``, which are settled for this machine, and return it."""
    if type(made) is not type(strategy):
        raise UserError(
            f"the strategy is a {type(made).__name__}, and the options ask for a {type(strategy).__name__}. "
            "Remedy: get_strategy(args)")
    made.cfg, made.bf16 = strategy.cfg, strategy.bf16
    return made


@contextmanager
def _one_line(watchdog: Watchdog) -> Iterator[None]:
    """Turn an expected error into one line and its exit code; only one rank reports it. At a prompt it is raised."""
    try:
        yield
    except ExpectedError as error:
        if at_prompt():
            raise
        if not leave_error(str(error), watchdog.speaks, stop_requested) and watchdog.speaks:
            get_logger().error(str(error))
        raise SystemExit(error.exit_code) from None


def check_together(parsed: ParsedConfig, trial: TrialContext = DEFAULT) -> None:
    """Check the run on every rank, before they form a group; an error on one rank is an error on all.

    Otherwise ranks of other machines would wait for the one that ended.
    """
    try:
        refusal: UserError | None = None
        check(parsed, trial)
    except UserError as error:
        if parsed.dry_run:  # there other ranks do not wait
            raise
        refusal = error
    refuse_together(gather_early(str(refusal or "")), refusal)


def check(parsed: ParsedConfig, trial: TrialContext = DEFAULT) -> None:
    """Validate the configuration; exit after a dry run, else create the folder of the run.

    GPUs that cannot run it, a rank without a GPU of its own, and a folder that cannot be created, are errors.
    """
    machine = settled(parsed)
    if parsed.dry_run:
        _dry_run(parsed, machine, trial)
    refuse_emulated_bf16(parsed.config, machine)
    refuse_what_does_not_fit(parsed.config, machine)
    if parsed.config.folder is not None:
        _make_folder(parsed.config.folder, "save_path" if "save_path" in flatten(parsed.config) else "output_path")


def _dry_run(parsed: ParsedConfig, machine: Machine, trial: TrialContext) -> NoReturn:
    """Print the lines of :func:`planned`, and exit; only one rank prints and runs the trial."""
    is_main = World.from_env().is_main
    for line in planned(parsed, machine, trial if is_main else None):
        sys.stdout.write(f"{line}\n" if is_main else "")
    raise SystemExit(0)


def planned(parsed: ParsedConfig, machine: Machine, trial: TrialContext | None = DEFAULT) -> Iterator[str]:
    """Yield the report on a run, refuse one that does not fit, then yield a line for everything that is tried.

    Args:
        machine: that the run is for, of :func:`settled`.
        trial: what is tried; None: nothing.
    """
    yield report(parsed.config, parsed.provenance, machine)
    refuse_emulated_bf16(parsed.config, machine)
    refuse_what_does_not_fit(parsed.config, machine)
    if trial is not None:
        yield from try_inputs(parsed.config, replace(trial, cuda=machine.device.cuda, elsewhere=bool(parsed.plan_gpus)))


def settled(parsed: ParsedConfig) -> Machine:
    """Give options the defaults of the machine that the run is for, validate them, and return the machine.

    Raises:
        UserError: torch cannot use the GPU of this machine, or there are more ranks than GPUs.
        ConfigError: with every problem, and the preset, script or file that set an option if no flag did.
    """
    elsewhere = parsed.plan_gpus
    machine = _other_machine(elsewhere) if elsewhere else _this_machine()
    settle(parsed.config, parsed.provenance, machine)
    positions = known_positions(parsed.config)
    limit_rows(parsed.config, parsed.provenance, positions)
    try:
        validate(parsed.config, machine.ranks, machine.device.cuda, bool(elsewhere), machine.local_ranks)
    except ConfigError as error:
        raise ConfigError(with_sources(error.problems, parsed.provenance)) from None
    if not elsewhere:
        refuse_lengths(parsed.config, positions)  # problems of options come first
    settle_recomputation(parsed.config, parsed.provenance, machine)
    return machine


def _other_machine(gpus: str) -> Machine:
    """Read ``--plan_gpus``; refuse it if the processes of this run are not one per GPU of it."""
    machine, ranks = Machine.planned(gpus), World.from_env().local_world_size
    if "LOCAL_WORLD_SIZE" in os.environ and ranks != machine.local_ranks:
        raise ConfigError(
            f"--plan_gpus {gpus} has {machine.local_ranks} GPUs on a machine, and --nproc (torchrun's "
            f"--nproc-per-node) starts {ranks} processes there, one per GPU: plan without --nproc, or for "
            f"{ranks} GPUs")
    return machine


def _this_machine() -> Machine:
    """Describe this machine after every rank has its GPU, so that the plan is not made for the CPU."""
    world = World.from_env()
    rank_device(world.local_rank, world.local_world_size)
    return Machine.here(world.world_size, world.local_rank, world.local_world_size)


def _make_folder(path: Path, option: str) -> None:
    """Create the folder of the run, which ``option`` names; early, so that a failure does not cost hours of
    training."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--{option} {path}: cannot be created ({error.strerror}); give a folder that can be "
                        "written to") from error


def _announce(parsed: ParsedConfig, strategy: StrategyBase) -> None:
    """Save the configuration in the folder of the run, and log the contents of a step."""
    if strategy.is_main and parsed.config.folder is not None:
        save_config(parsed.config, parsed.config.folder / "config.yaml", parsed.plugins)
    for line in (*preflight(parsed.config).summary(strategy.world_size), *recomputed(parsed.config, parsed.provenance)):
        get_logger().info(line)
    gpu = torch.cuda.get_device_name(strategy.device) if strategy.device.type == "cuda" else ""
    unlike = unlike_gpus(strategy.all_gather_object(gpu))
    for text in (*warnings(parsed.config), *unlike) if strategy.is_main else ():
        get_logger().warning(text)
