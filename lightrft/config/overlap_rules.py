"""``--overlap_passes`` beside options that it cannot work with, or that leave it nothing to do."""
from collections.abc import Collection, Iterator

from lightrft.config.passes import wanted_passes
from lightrft.config.schema import Config


def overlap_problems(c: Config, world_size: int, critics: Collection[str] = ()) -> Iterator[str]:
    """One sentence per problem; ``critics`` are the advantage estimators that need values."""
    r, flag = c.rollout, "--overlap_passes True: "
    if not r.overlap_passes:
        return
    for name, carries in (("dynamic_sampling", r.dynamic_sampling), ("oversample", r.oversample > 1)):
        if carries:
            yield (f"{flag}--{name} carries groups over to later steps, whose old log-probs are those of other "
                   "weights; drop one of them")
    if r.offload_during_rollout:
        yield f"{flag}the passes need the models that --offload_during_rollout takes off the device; drop one of them"
    if r.engine_tp_size > 1:
        yield (f"{flag}ranks that share an engine (--engine_tp_size {r.engine_tp_size}) wait for each other while they "
               "generate, and would for the passes, in no common order; drop one of them")
    shared = r.engine_type == "hf" and not c.strategy.divides_weights(world_size)
    if shared and c.model.lora_rank and c.algorithm.init_kl_coef:
        yield (f"{flag}the reference is the policy without its adapters (--lora_rank {c.model.lora_rank}), with which "
               "the hf engine, which has no copy of its own, generates meanwhile; add --engine_type vllm or drop it")
    if not wanted_passes(c, r.rollout_batch_size * r.n_samples_per_prompt, c.algorithm.advantage_estimator in critics):
        yield f"{flag}has no effect, for nothing is computed between rollout and update; drop it"
