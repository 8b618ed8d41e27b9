"""A class of ``environment_factory`` in the hands of TRL's own trainer: ``python trl_environment.py MODEL FOLDER``.

For a process where TRL is (``make oracles``). It trains two steps, and prints a line of JSON: the steps that the calls
of each response asked for, what ``get_reward`` gave, and the means that TRL logs of that.
"""
import json
import sys

import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from lightrft.tests.support.foreign_environments import Counter

ROWS = [{"prompt": [{"role": "user", "content": "sum"}], "difficulty": 2}] * 4
OPTIONS = dict(num_generations=4, per_device_train_batch_size=8, max_steps=2, max_completion_length=60, beta=0.0,
               temperature=1.0, bf16=False, gradient_checkpointing=False, save_strategy="no", report_to="none",
               logging_steps=1, disable_tqdm=True, use_cpu=True)  # yapf: disable


def main() -> None:
    """Train, and print what happened."""
    model, folder = sys.argv[1:]
    seen: list[tuple[list[int], float]] = []

    def watched(completions, environments, **columns):
        for messages, environment in zip(completions, environments):
            calls = [call["function"]["arguments"]["step"] for message in messages
                     for call in message.get("tool_calls") or ()]  # yapf: disable
            seen.append((calls, environment.get_reward()))
        return [0.0] * len(completions)

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template  # how its parser reads calls
    trainer = GRPOTrainer(transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32"), watched,
                          GRPOConfig(output_dir=folder, **OPTIONS), Dataset.from_list(ROWS),
                          processing_class=tokenizer, environment_factory=Counter)  # yapf: disable
    trainer.train()
    logged = [line["rewards/Counter/mean"] for line in trainer.state.log_history if "rewards/Counter/mean" in line]
    print(json.dumps({"seen": seen, "logged": logged}))


if __name__ == "__main__":
    main()
