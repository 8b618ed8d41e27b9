"""Program of test_strategies for two ranks: the same training with every way to spread models over two ranks."""
import json
import sys
from pathlib import Path
from typing import Any

import torch

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import runs

KINDS: dict[str, dict[str, Any]] = {
    "models": {  # policy and reference are mixtures of experts, the critic is dense
        "pretrain": "{home}/experts", "critic_pretrain": "{home}/model", "advantage_estimator": "gae",
        "init_kl_coef": 0.1, "aux_loss_coef": 0.5},
    "states": {  # policy, reference (mixtures too) and critic have layers with state
        "pretrain": "{home}/qwen3_5_moe", "critic_pretrain": "{home}/bamba", "advantage_estimator": "gae",
        "init_kl_coef": 0.1, "aux_loss_coef": 0.5},
    "adapters": {"lora_rank": 2, "init_kl_coef": 0.1, "pretrain_data": ["train.jsonl"], "ptx_batch_size": 5},
}  # yapf: disable
STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "zero2": {"strategy": "deepspeed", "zero_stage": 2},
    "zero3": {"strategy": "deepspeed", "zero_stage": 3},
}
RESUMED = "states"
MICRO = {"fsdp": 8, "zero2": 1}  # sequences at once in runs of models whose layers have state; else as by default
SAVING = {"disable_ckpt": False, "save_steps": 1}


def options_of(kind: str, home: Path) -> dict[str, Any]:
    """Return the options of a kind; its models are in ``home``."""
    return {name: value.format(home=home) if isinstance(value, str) else value for name, value in KINDS[kind].items()}


def main(home: Path, folder: Path) -> None:
    """Leave the metrics of every run in FOLDER/lines.json, and those of one that resumes with another strategy."""
    holder = get_strategy(StrategyConfig(strategy="fsdp"))
    holder.setup()  # all runs share this group
    found = {}
    for kind in KINDS:
        for name, strategy in STRATEGIES.items():
            micro = {"micro_train_batch_size": MICRO[name]} if kind == RESUMED and name in MICRO else {}
            done = runs.run(home, folder / kind / name, max_steps=2, **options_of(kind, home), **micro, **strategy)
            holder.barrier()
            found[f"{kind} {name}"] = done.lines
    models, save = options_of(RESUMED, home), folder / "resumed"
    runs.run(home, save, max_steps=1, **models, **STRATEGIES["fsdp"], **SAVING)
    done = runs.run(home, save, max_steps=2, load_checkpoint=True, **models, **STRATEGIES["zero3"], **SAVING)
    holder.barrier()
    found["resumed"] = done.lines
    if holder.is_main:
        (folder / "lines.json").write_text(json.dumps(found), encoding="utf-8")
    holder.barrier()
    holder.teardown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
