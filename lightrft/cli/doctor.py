"""Check the machine, the packages and a planned run, and report problems with their remedies.

    lightrft doctor [--pretrain MODEL ...]
"""
import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

from lightrft.config.schema import Config
from lightrft.preflight.checks import VERDICTS, Finding, examine, worst
from lightrft.preflight.checks.machine import (check_devices, check_groups, check_save_path, check_shm, check_threads)
from lightrft.preflight.checks.packages import check_engine, check_import, check_media, check_versions
from lightrft.preflight.checks.run_plan import check_disk, check_memory, check_model
from lightrft.preflight.cost import count_parameters, is_gated
from lightrft.preflight.hardware import devices, Machine
from lightrft.strategy.optimizers import OPTIMIZERS

PROG = "lightrft doctor"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 1 if anything fails, else 0."""
    own, flags = _parser().parse_known_args(argv)
    config = _config(flags, own.plan_gpus)
    findings = []
    for found in diagnose(config, own.ranks):
        findings.append(found)
        if not own.json:
            print(found, flush=True)
    verdict = worst(findings)
    if not findings:  # another rank reports
        return 0
    if own.json:
        print(json.dumps({"verdict": verdict, "findings": [asdict(found) for found in findings]}, indent=1))
    else:
        counts = (f"{sum(found.verdict == one for found in findings)} {one}" for one in VERDICTS)
        print(f"verdict: {verdict} ({', '.join(counts)})")
    return int(verdict == "fail")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG, allow_abbrev=False, usage="%(prog)s [--json] [--ranks N] [--pretrain MODEL] [--option value ...]",
        description="Check packages, devices, process groups, engines, shared memory and disk: one verdict per line, "
        "exit code 1 if one of them is 'fail'.",
        epilog="Every option of lightrft train is understood. With --pretrain there is a memory plan for "
        "that model and batch; --engine_type, --use_wandb and the like make their packages required.")
    parser.add_argument("--json", action="store_true", help="print JSON: the worst verdict and the list of findings")
    parser.add_argument("--ranks", type=_positive, metavar="N",
                        help="processes of the planned run (default: those of torchrun, or the GPUs here, or 1)")
    parser.add_argument("--plan_gpus", default="", help=argparse.SUPPRESS)  # refused
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 1")
    return int(text)


def _config(flags: list[str], plan_gpus: str) -> Config:
    """Parse the options of the planned run, which is one on this machine.

    Raises:
        SystemExit: 2, if they cannot be read.
    """
    if not flags and not plan_gpus:
        return Config()  # works without PyYAML too
    from lightrft.config.cli import exit_on_config_error, parse_config
    from lightrft.config.options import ConfigError
    from lightrft.config.tree import check_ranges
    from lightrft.preflight.shared_rules import chosen_problems
    with exit_on_config_error(PROG):
        if plan_gpus:
            raise ConfigError(f"--plan_gpus {plan_gpus}: the doctor examines this machine; lightrft train "
                              "--dry_run plans for another one")
        parsed = parse_config(flags, PROG)
        if problems := [*check_ranges(parsed.config), *chosen_problems(parsed.config, "optim", OPTIMIZERS)]:
            raise ConfigError(problems)
        if parsed.dry_run:
            raise ConfigError("--dry_run: belongs to lightrft train, which then also checks that the "
                              "options fit together; drop it")
    return parsed.config


def asked_extras(config: Config) -> set[str]:
    """Collect the extras that these options need."""
    flags = {"wandb": config.log.use_wandb, "trackio": config.log.use_trackio, "liger": bool(config.model.use_liger),
             "bitsandbytes": bool(OPTIMIZERS.get(config.train.optim).coded)}  # yapf: disable
    return {extra for extra, asked in flags.items() if asked} | {config.rollout.engine_type, config.strategy.strategy}


def diagnose(config: Config, ranks: int | None = None) -> Iterator[Finding]:
    """Yield every finding as soon as it is known.

    Under torchrun the first rank of each machine reports; the others join the process group and report only failures.

    Args:
        ranks: of the planned run; None: those of torchrun, or the GPUs of this machine, or 1.
    """
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "versions": partial(check_versions, asked_extras(config)),
        "devices": lambda: check_devices(bool(config.model.bf16), local_ranks(ranks)),
        "threads": lambda: check_threads(local_ranks(ranks)),
        "process group": check_groups,
        "transformers": partial(check_import, "transformers"),
        "engine": partial(check_engine, config.rollout.engine_type),
        "/dev/shm": check_shm,
        "--save_path": partial(check_save_path, config),
        "media": partial(check_media, config),
        "model": partial(plan, config, ranks),
    }
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for name, check in checks.items():
            yield from examine(name, check)
    else:
        yield from (found for found in examine("process group", check_groups) if found.verdict != "ok")


def local_ranks(ranks: int | None) -> int:
    """Count the processes of the run on this machine; of ``ranks`` in all, at most one per GPU where there are GPUs."""
    here = devices(1)
    most = len(here) if here[0].name != "cpu" else ranks or 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", min(ranks or most, most)))


def plan(config: Config, ranks: int | None) -> Iterator[Finding]:
    """Check the model, if there is one, and the disk and memory that its run takes."""
    if not config.model.pretrain:
        return
    from lightrft.models.config_json import model_shape, parameter_shapes
    from lightrft.preflight.algorithm_rules import trains_critic
    from lightrft.preflight.planned import settle, settle_recomputation
    critic = trains_critic(config)
    shapes = parameter_shapes(config.model.pretrain)
    size, shape = count_parameters(shapes), model_shape(config.model.pretrain) if is_gated(shapes) else None
    here = devices(1)
    count = ranks or int(os.environ.get("WORLD_SIZE", "1" if here[0].name == "cpu" else len(here)))
    machine = Machine.here(count, local_ranks=local_ranks(ranks))
    settle(config, {}, machine)
    settle_recomputation(config, {}, machine)
    yield from examine("model", partial(check_model, config, size))
    yield from check_disk(config, size, critic)
    yield from check_memory(config, count, size, devices(count)[:local_ranks(ranks)], shape)


if __name__ == "__main__":
    raise SystemExit(main())
