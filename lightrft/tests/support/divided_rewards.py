"""Program of test_divided for two ranks: reward models divided by FSDP2 and ZeRO-3 score as whole ones do."""
import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.schema import RewardConfig, StrategyConfig
from lightrft.rewards.base import RewardInput
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.placement import ScorerSetup
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.deepspeed import Sizes
from lightrft.strategy.fsdp import WrapPolicy
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import runs

KINDS = {"fsdp": (StrategyConfig(strategy="fsdp"), "wrap", WrapPolicy(one_unit=0, keep_full=0)),
         "zero3": (StrategyConfig(strategy="deepspeed", zero_stage=3), "sizes", Sizes(reduce=3000, persist=0))
         }  # yapf: disable


def item(response: str, prompt: str = "3") -> RewardInput:
    """A response with its chat."""
    return RewardInput(prompt, response, [{"role": "user", "content": prompt}])


BY_RANK = [[item("a"), item("b\nb"), item("aaa"), item("a" * 90, "4"), item("b", "4")], [item("bb", "5")]]


def options_of(home: Path, paths: list[str]) -> dict[str, Any]:
    """Options of a whole run with these reward models."""
    return {"reward_pretrain": paths, "judge_max_len": 60, "step_reward": "mean", "generate_max_len": 4,
            "apply_chat_template": True, "prompt_max_len": 64, "eval_data": [str(home / "test.jsonl")],
            "eval_steps": -1}  # yapf: disable


def manager_of(paths: list[str], strategy: StrategyBase, bf16: bool = False, **options: Any) -> RewardManager:
    """All reward models of a run, in passes that hold one of the longer responses."""
    judge = {"judge_max_len": 60} if len(paths) > 2 else {}
    cfg = RewardConfig(reward_pretrain=paths, step_reward="mean", **judge, **options)
    return RewardManager(cfg, setup=ScorerSetup(strategy.device, bf16, 150, strategy=strategy))


def check(strategy: StrategyBase, paths: list[str], **options: bool) -> None:
    """A rank with fewer responses, and then with none, takes part in the passes of the other."""
    whole, divided = (manager_of(paths, strategy, reward_shard=shard, **options) for shard in (False, True))
    mine = BY_RANK[strategy.rank]
    expected, found = whole.score(mine), divided.score(mine)
    assert [each.error for each in found] == [each.error for each in expected]
    for one, other in zip(found, expected):
        known = {name: value for name, value in other.parts.items() if value is not None}
        assert {name: one.parts[name] for name in known} == pytest.approx(known, rel=2e-2 if strategy.bf16 else 1e-5,
                                                                          abs=1e-6), (one, other)
    more = mine[:2] if strategy.rank == 0 else []
    assert [each.parts["rm1"]
            for each in divided.score(more)] == pytest.approx([each.parts["rm1"] for each in expected[:len(more)]],
                                                              rel=1e-2)
    for name, model in divided.neural.items():
        held = sum(piece.tensor.numel() for weight in model.place.model.parameters()
                   for piece in strategy.own_slice(weight).pieces)
        total = sum(weight.numel() for weight in whole.neural[name].place.model.parameters())
        assert 0.4 * total < held < 0.6 * total, (name, held, total)
    if strategy.rank == 0:
        with pytest.raises(RuntimeError, match="call flush.. on all ranks before collect"):
            divided.collect(divided.submit(mine[:1]))
    strategy.barrier()


def main(home: Path, folder: Path, paths: list[str]) -> None:
    """Check both strategies, then leave the metrics of a whole run in FOLDER/run."""
    holder = get_strategy(StrategyConfig(strategy="fsdp"))
    holder.setup()  # all share this group
    runs.run(home, folder / "run", strategy="fsdp", reward_shard=True, **options_of(home, paths))
    for cfg, name, sizes in KINDS.values():
        for bf16 in (False, True) if cfg.strategy == "deepspeed" else (False, ):
            strategy = get_strategy(cfg, bf16=bf16)
            setattr(strategy, name, sizes)
            strategy.setup()
            check(strategy, paths[:-1] if bf16 else paths, bf16=bf16, reward_offload=bf16)
            gc.collect()
    holder.barrier()
    holder.teardown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
