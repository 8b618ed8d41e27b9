"""Tiny random models that see or hear. Their processors need torchvision; without it, modules of tests that import this
are skipped."""
from pathlib import Path

from lightrft.tests.support.tiny_family import TinyFamily
from lightrft.tests.support.tiny_grids import GRIDS, PICTURE, VIDEO
from lightrft.tests.support.tiny_sound import LONG, SOUNDS
from lightrft.tests.support.tiny_towers import TOWERS

__all__ = ["FAMILIES", "LONG", "PICTURE", "SOUNDS", "VIDEO", "save_model"]
FAMILIES: dict[str, TinyFamily] = GRIDS | TOWERS | SOUNDS


def save_model(folder: Path | str, family: str, tied: bool) -> Path:
    """Write a tiny model of ``family`` and its processor to ``folder``, as a download would look; returns it."""
    return FAMILIES[family].save(folder, tied)
