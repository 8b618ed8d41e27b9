"""Tiny random models that see or hear; their processors need torchvision."""
from pathlib import Path

from lightrft.tests.support.tiny_family import TinyFamily
from lightrft.tests.support.tiny_grids import GRIDS, PICTURE
from lightrft.tests.support.tiny_sound import SOUNDS
from lightrft.tests.support.tiny_towers import TOWERS

__all__ = ["FAMILIES", "PICTURE", "save_model"]
FAMILIES: dict[str, TinyFamily] = GRIDS | TOWERS | SOUNDS


def save_model(folder: Path | str, family: str, tied: bool) -> Path:
    """Write a tiny model of ``family`` and its processor to ``folder``, as a download would look; returns it."""
    return FAMILIES[family].save(folder, tied)
