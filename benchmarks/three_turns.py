"""RL with an environment of three turns, driven through Python; ``same_numbers.py`` runs it on two commits.

    python benchmarks/three_turns.py --pretrain MODEL --prompt_data DATA --reward REWARD
"""
from typing import TYPE_CHECKING

from lightrft.config.cli import parse_config
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.models.tokenizer import load_tokenizer
from lightrft.trainer.session import training_session
from lightrft.trainer.spmd_ppo_trainer import build_models, SPMDPPOTrainer

if TYPE_CHECKING:  # it lies elsewhere in older commits
    from lightrft.types import Prompt

TURNS = 3


class Counter:
    """Answers each of the first turns with the number of characters so far, in brackets."""

    def turn(self, prompt: "Prompt", response: str) -> str | None:
        """Return the answer to ``response``; None after the last turn."""
        return f"[{len(response)}]" if response.count("[") < TURNS - 1 else None


def main() -> None:
    """Run the command line: every option of the trainer."""
    parsed = parse_config(prog="three_turns.py")
    config, data = parsed.config, parsed.config.data
    with training_session(parsed) as session:
        tokenizer = load_tokenizer(config.model.pretrain, data.chat_template)
        prompts = PromptsDataset(data, tokenizer, config.rollout.prompt_max_len)
        models = build_models(config, session.strategy)
        SPMDPPOTrainer(config, session.strategy, models, tokenizer, prompts, timer=session.timer,
                       environment=Counter()).fit()


if __name__ == "__main__":
    main()
