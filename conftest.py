"""The order of the tests (slow modules run first, so that no core ends with one of them), and what none may leave."""
import gc
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module

import pytest

pytest_plugins = ["lightrft.tests.support.growth"]
LONG = ("timeout", "engine", "slow", "dist")  # markers of slow tests, the slowest first
OF_MAKE = ("MAKEFLAGS", "VENV", "PYTEST_ARGS", "ARGS")  # of the make that runs the tests, not of those in tests
ALLOCATIONS = 50_000  # container objects between two garbage collections
MODULES, SEARCHED = pytest.StashKey[int](), 10  # modules that are over; between two searches for garbage
FREEZES = ExitStack()  # a run in a test counts no frozen objects, which takes it 60 ms
for _name in OF_MAKE:
    os.environ.pop(_name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by module; pytest-xdist gives each worker whole modules, whose fixtures are made once."""
    marks = defaultdict(set)
    for item in items:
        marks[item.path].update(mark.name for mark in item.iter_markers())
    items.sort(key=lambda item: [mark not in marks[item.path] for mark in LONG])


def pytest_collection_finish() -> None:
    """Spare each run in a test a second: the garbage collector does not search what is imported, no curve is drawn, and
    a configuration of transformers prints its name alone.

    Tests of the curve restore ``plot_curve``.
    """
    if log := sys.modules.get("lightrft.trainer.run_log"):
        vars(log)["plot_curve"] = lambda *args: None
    if configs := sys.modules.get("transformers.configuration_utils"):  # logs and validators write each as JSON
        configs.PreTrainedConfig.__repr__ = lambda self: type(self).__name__
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])
    if env := sys.modules.get("lightrft.utils.env"):
        FREEZES.enter_context(env.frozen_objects())


def pytest_unconfigure() -> None:
    """Close what the session has opened while its modules are still there."""
    FREEZES.close()


@pytest.fixture(autouse=True, scope="module")
def _what_is_used_no_longer_is_garbage(pytestconfig: pytest.Config) -> Iterator[None]:
    """Runs leave frozen objects, and engines unfreeze all; every few modules all of them are searched once."""
    yield
    modules = pytestconfig.stash[MODULES] = pytestconfig.stash.get(MODULES, 0) + 1
    if modules % SEARCHED == 0:
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _what_is_refused_is_planned() -> None:
    """A dry run refuses what the run does, whichever test looks at it."""
    if "lightrft.trainer.session" in sys.modules:
        import_module("lightrft.tests.support.planned_too").plan_refusals()


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_is_left() -> Iterator[None]:
    """A group, or the number that a failed one took, breaks later tests: torch caches meshes by the name of a group."""
    yield
    if groups := sys.modules.get("torch.distributed.distributed_c10d"):
        alive, numbers = groups.is_initialized(), groups._world.group_count
        if alive:
            groups.destroy_process_group()
        groups._world.group_count = 0  # only this module is blamed
        assert not alive and numbers == 0, "this module left a process group"
