"""Families with videos and towers of their own on two ranks that differ; started by test_media_families_on_ranks."""
import gc
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support.media_rig import MediaRig
from lightrft.tests.support.media_strategies import KINDS, MediaCase, same_gradients, variants
from lightrft.tests.support.tiny_vision import FAMILIES

NAMES = ("internvl", "smolvlm", "gemma4")
KINDS["apart"] = [(0, 4), (1, )]  # picture and video on rank 0, text on rank 1


def main(folder: Path) -> None:
    """Compare the gradients of every family under FSDP2 and ZeRO-3 with those of one process."""
    holder = get_strategy(StrategyConfig(strategy="fsdp"))
    holder.setup()  # both strategies share this group
    rigs = [MediaRig(folder / name, FAMILIES[name].placeholders, FAMILIES[name]) for name in NAMES]
    found = {name: each for name, each in variants(holder.world_size).items() if name != "zero2"}
    for name, (cfg, sizes) in found.items():
        strategy = get_strategy(cfg)
        setattr(strategy, "wrap" if name == "fsdp" else "sizes", sizes)
        strategy.setup()
        for rig in rigs:
            case = MediaCase(strategy, folder / name, rig=rig)
            assert [key.partition(":")[0] for row in (0, 4) for key in rig.keys[row]] == ["image", "video"]
            same_gradients(replace(case, data="apart"))
        strategy.teardown()
    holder.teardown()
    print(json.dumps({"passed": list(found)}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # DeepSpeed looks for garbage again and again; in what is imported there is none
    main(Path(sys.argv[1]))
