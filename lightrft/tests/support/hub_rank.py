"""One rank that lets :func:`fetch_once` fetch models, and then reads each; the hub sees which rank asks."""
import os
import sys

os.environ["HF_HUB_USER_AGENT_ORIGIN"] = f"rank-{os.environ['RANK']}"

if __name__ == "__main__":
    from transformers import AutoModelForCausalLM

    from lightrft.config.schema import Config, DataConfig, StrategyConfig
    from lightrft.config.tree import build
    from lightrft.models.tokenizer import load_tokenizer
    from lightrft.strategy import get_strategy
    from lightrft.trainer.hub_files import fetch_once
    from lightrft.utils.errors import UserError
    strategy = get_strategy(StrategyConfig())
    strategy.setup()
    for name in sys.argv[1:]:
        fetch_once(strategy, build(Config, {"pretrain": name}), DataConfig())
        try:
            load_tokenizer(name, None)
            AutoModelForCausalLM.from_pretrained(name)
        except UserError as error:
            print(f"refused: {error}")
    strategy.teardown()
