"""The order of the tests: slow modules run first, so that no core ends with one of them."""
from collections import defaultdict

import pytest

LONG = ("timeout", "engine", "slow", "dist")  # markers of slow tests, the slowest first


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by module; pytest-xdist gives each worker whole modules, whose fixtures are made once."""
    marks = defaultdict(set)
    for item in items:
        marks[item.path].update(mark.name for mark in item.iter_markers())
    items.sort(key=lambda item: [mark not in marks[item.path] for mark in LONG])
