"""No-grad forward passes that a rollout needs between generation and update."""
from lightrft.config.schema import Config


def bypasses(c: Config) -> bool:
    """Return True if the engine's log-probs replace those of the old policy."""
    return c.algorithm.rollout_correction == "bypass"


def wanted_passes(c: Config, num_samples: int, critic: bool) -> list[str]:
    """List the names of the passes over a rollout of ``num_samples`` samples, in order.

    The pass of the old policy is left out if nothing reads its log-probs before the update and the update makes a
    single optimizer step. The first forward pass of the update then provides them.

    Args:
        critic: a critic is trained.
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
