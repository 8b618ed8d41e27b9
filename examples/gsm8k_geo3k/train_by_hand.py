"""RL with a script that builds its run step by step, with the calls of LightRFT's train_colocate.py.

    torchrun --nproc-per-node 8 examples/gsm8k_geo3k/train_by_hand.py --pretrain MODEL --prompt_data TRAIN \\
        --advantage_estimator group_norm --n_samples_per_prompt 8 --length_cost 0.1

The options of the trainer work beside those of the script.
"""
import argparse
from functools import partial

from lightrft.models import ActorVL
from lightrft.strategy import get_strategy
from lightrft.trainer import SPMDPPOTrainerVL
from lightrft.utils import add_arguments


def short_and_right(model_reward_list, labels, queries, refs, label_map, cost):
    """1 for a response that ends with the reference answer, less ``cost`` per 1,000 characters."""
    right = [float(query.rstrip().endswith(str(ref))) for query, ref in zip(queries, refs)]
    return [value - cost * len(query) / 1000 for value, query in zip(right, queries)], {"accuracy_reward": right}


def main() -> None:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--length_cost", type=float, default=0.1, help="cost of 1,000 characters")
    add_arguments(parser)
    args = parser.parse_args()

    strategy = get_strategy(args)
    actor = ActorVL(args.pretrain)  # takes text models too, and is the same as ActorLanguage
    trainer = SPMDPPOTrainerVL(strategy, actor, reward_fn=partial(short_and_right, cost=args.length_cost))
    trainer.fit()


if __name__ == "__main__":
    main()
