"""Two ranks, forked when all is imported, that let :func:`fetch_once` fetch models and then read each; the hub sees
which rank asks.

    python -m lightrft.tests.support.hub_rank NAME...

ends with the exit code of the first rank that failed.
"""
import os
import sys
from multiprocessing import get_context


def become(rank: int, port: str, names: list[str]) -> None:
    """Do what a rank of two on this machine does."""
    from huggingface_hub import constants
    from transformers import AutoModelForCausalLM

    from lightrft.config.schema import Config, DataConfig, StrategyConfig
    from lightrft.config.tree import build
    from lightrft.models.tokenizer import load_tokenizer
    from lightrft.strategy import get_strategy
    from lightrft.trainer.hub_files import fetch_once
    from lightrft.utils.errors import UserError
    constants.HF_HUB_USER_AGENT_ORIGIN = f"rank-{rank}"
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # yapf: disable
    strategy = get_strategy(StrategyConfig())
    strategy.setup()
    for name in names:
        fetch_once(strategy, build(Config, {"pretrain": name}), DataConfig())
        try:
            load_tokenizer(name, None)
            AutoModelForCausalLM.from_pretrained(name)
        except UserError as error:
            print(f"refused: {error}")
    strategy.teardown()


if __name__ == "__main__":
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401  (a rank would import it)

    from lightrft.strategy import fsdp  # noqa: F401
    from lightrft.tests.support.launch import free_port
    port, context = free_port(), get_context("fork")
    ranks = [context.Process(target=become, args=(rank, port, sys.argv[1:])) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(next((process.exitcode for process in ranks if process.exitcode), 0))
