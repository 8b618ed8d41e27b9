"""What must hold at the first step of every run, or the numbers that follow mean nothing."""
from lightrft.config.passes import bypasses
from lightrft.config.schema import Config
from lightrft.trainer.logprob_pass import on_update_packs
from lightrft.trainer.same_policy import SamePolicy
from lightrft.utils.errors import ExpectedError
from lightrft.utils.logging import get_logger

# nats (mean) and probability (largest), without and with bfloat16. The mean is what stale weights move; the largest gap
# is a rounding of one token: two exact float32 evaluations of a sharp model were measured to differ by up to 1.1e-5.
LIMITS = {"abs_logp_mean": (1e-5, 0.05), "abs_dp_max": (1e-4, 0.5)}
REPACKED = (1e-3, 0.5)  # ratio and nats, largest over tokens: the same weights on other packs


class StepFactError(ExpectedError, RuntimeError):
    """Engine, trainer or reference disagree before anything was learned."""


def facts_are_measured(metrics: dict[str, float]) -> bool:
    """Whether the policy was trained on something that the facts can be checked on."""
    return bool(
        metrics.get("policy/optimizer_steps", 0) and metrics["policy/trained_tokens"]
        and metrics.get("rollout/same_policy/tokens", 1))


def check_step_facts(metrics: dict[str, float], config: Config, fresh: bool) -> None:
    """Check the first step in which a process trains the policy.

    Engine and trainer agree on the tokens that were sampled as they are trained (:data:`LIMITS`, :class:`SamePolicy`);
    the ratio of the first optimizer step is 1 (exactly, when old log-probs ran on the same packs, which is not so where
    samples were dropped; not with dropout); in a ``fresh`` run with a reference the KL to it is 0 as well.

    Raises:
        StepFactError: naming the number, its limit and what to look at.
    """
    repacked = not on_update_packs(config) or metrics.get("rollout/dropped_samples", 0) > 0
    exact = 0.0 if not repacked else REPACKED[config.model.bf16]
    dropout = config.model.lora_dropout > 0  # the update then sees other numbers than the passes before it
    full_support = config.rollout.top_p == 1 and not config.rollout.top_k and not config.rollout.min_p
    facts = []
    if not dropout and not bypasses(config):  # else the ratio is the mismatch
        facts += [("policy/first_ratio_gap", exact, "the old log-probs and the update see different numbers")]
    if full_support and not dropout:
        measured = "same_policy" if SamePolicy(config).apart else "mismatch"
        facts += [(f"rollout/{measured}/{key}", limit[config.model.bf16],
                   "the engine does not sample from the weights that are trained") for key, limit in LIMITS.items()]
    if fresh and config.algorithm.init_kl_coef > 0 and config.model.ref_pretrain in (None, config.model.pretrain):
        facts.append(("policy/first_kl_ref", exact, "the reference is not the model that training starts from"))
    for key, limit, meaning in facts:
        if key not in metrics:
            raise StepFactError(f"step 1: {key} was not measured")
        if not metrics[key] <= limit:
            raise StepFactError(f"step 1: {key} is {metrics[key]:.3g}, not within {limit:g}: {meaning}")
    get_logger().info("step-1 facts hold: " + ", ".join(f"{key} {metrics[key]:.3g}" for key, _, _ in facts))
