"""Which no-grad forward passes a rollout needs between generation and update."""
from lightrft.config.schema import Config


def bypasses(c: Config) -> bool:
    """Whether the log-probs of the engine stand for those of the old policy."""
    return c.algorithm.rollout_correction == "bypass"


def wanted_passes(c: Config, num_samples: int, critic: bool) -> list[str]:
    """Names of the passes over a rollout of that many samples, in order.

    The old policy's is left out where nothing reads its log-probs before the update, and the update can take its own
    first forward pass for it, because it makes a single optimizer step.

    Args:
        critic: there is one.
    """
    algorithm, train = c.algorithm, c.train
    again = train.max_epochs > 1 or num_samples > train.train_batch_size
    read = algorithm.high_entropy_token_ratio > 0 or algorithm.init_kl_coef > 0 and not algorithm.use_kl_loss
    wanted = {
        "old_logprobs": not bypasses(c) and (again or read),
        "ref": algorithm.init_kl_coef > 0,
        "values": critic,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]
