"""Public data sets by name: conversion of raw rows, as their authors publish them, to rows in our schema."""
from collections.abc import Callable

from lightrft.datasets.loading import Row
from lightrft.utils.registry import Registry

Source = Callable[[Row, str, int], Row]
SOURCES: Registry[Source] = Registry("data source")
"""Name -> ``(raw row, split, index) -> row``. Plugins may add entries."""

from lightrft.datasets.sources import gsm8k  # noqa: E402, F401
