"""For the server of :mod:`lightrft.tests.support.launch`: ranks fork the schedulers of SGLang, whose imports the server
has made. Started anew, as in :mod:`lightrft.tests.support.sglang_engine`, each would import for ten seconds."""
import multiprocessing
from typing import Any

from torch.distributed import distributed_c10d as groups

from lightrft.rollout.sglang import scheduler_patches
from lightrft.tests.support.sglang_rig import forking, import_models

_OF_RANK: list[Any] = []  # the process groups of the trainer: without the threads that they had, they cannot be closed
_run_scheduler, _set_start_method = scheduler_patches.run_scheduler, multiprocessing.set_start_method


def _forget_groups() -> None:
    """Let this fork of a rank have no process groups, as a process that starts anew."""
    world = groups._world
    _OF_RANK.extend([world.default_pg, *world.pg_map.items()])
    groups._update_default_pg(None)
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag,
                  world.tags_to_pg, world.pg_coalesce_state):  # yapf: disable
        table.clear()
    groups._unregister_all_process_groups()
    world.group_count = 0


def run_alone(*args: Any) -> None:
    """A scheduler in a process that was forked from a rank."""
    _forget_groups()
    _run_scheduler(*args)


def undo() -> None:
    """Let schedulers of this fork start as users' do."""
    multiprocessing.set_start_method = _set_start_method
    scheduler_patches.run_scheduler = _run_scheduler


import_models()
multiprocessing.set_start_method = forking
scheduler_patches.run_scheduler = run_alone
