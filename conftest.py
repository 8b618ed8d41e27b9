"""The order of the tests: modules that take long go first, so that none of them is the last thing that a core does."""
from collections import defaultdict

import pytest

LONG = ("timeout", "engine", "slow", "dist")  # markers, of what takes longest first; a limit of its own tells most


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by module; pytest-xdist gives each worker whole modules, whose fixtures are made once."""
    marks = defaultdict(set)
    for item in items:
        marks[item.path].update(mark.name for mark in item.iter_markers())
    items.sort(key=lambda item: [mark not in marks[item.path] for mark in LONG])
