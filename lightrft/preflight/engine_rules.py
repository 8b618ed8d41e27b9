"""Checks of the options of generation against each other, the machine and the engine."""
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from itertools import pairwise

import yaml

from lightrft.algorithms import ADVANTAGES
from lightrft.config.engines import EngineConfig, EngineCaps, ENGINES, native_arguments
from lightrft.config.layers import changed
from lightrft.config.options import ConfigError
from lightrft.config.schema import Config
from lightrft.config.stages import Stages
from lightrft.config.tree import options
from lightrft.preflight.algorithm_rules import trains_critic
from lightrft.preflight.batches import nearest_divisors
from lightrft.preflight.shared_rules import divides, if_set, triton_kernels, unread


def engine_problems(c: Config, world_size: int, cuda: bool) -> Iterator[str]:
    """Yield one sentence per problem with the engine and its options."""
    engine = c.rollout.engine_type
    if any(not text for text in c.rollout.stop):
        yield f"--stop {c.rollout.stop}: an empty string would stop every response at once; drop it"
    for option, value in unread(c, engine, options(c)["engine_type"].choices or ()):
        yield (f"{option.flag} {_text(value)}: has no effect with --engine_type {engine}; add --engine_type "
               f"{option.read_by[0]} or drop {option.flag}")
    if c.rollout.use_fire and not c.rollout.caps.first_temperature:
        yield (f"--use_fire: --engine_type {engine} draws the first token at the temperature of the others; drop it or "
               "use --engine_type hf")
    if c.rollout.caps.install:
        yield from _native_engine(c, engine, cuda)
    elif c.rollout.fused_decode:
        yield from triton_kernels("fused_decode", cuda)
    if not (c.rollout.caps.buckets or c.strategy.divides_weights(world_size)):
        yield from if_set(
            c, ["sync_bucket_mib"], f"has no effect with --engine_type {engine} if every rank holds all weights, "
            "because nothing is gathered; add --strategy fsdp or drop it")
    if c.rollout.lora_sync == "adapter":
        yield from _adapters(c, engine)
    if c.rollout.offload_during_rollout:
        yield from _offload(c, world_size, cuda)


def missing_engine(c: Config) -> Iterator[str]:
    """Yield the problem of an engine that is not installed here."""
    engine = c.rollout.engine_type
    if ENGINES[engine].install and find_spec(engine) is None:
        yield (f"--engine_type {engine}: the package {engine} is not installed; run: {ENGINES[engine].install} "
               "or use the built-in engine: --engine_type hf")


def _adapters(c: Config, engine: str) -> Iterator[str]:
    if not c.rollout.caps.adapters:
        yield (f"--lora_sync adapter: --engine_type {engine} takes only merged weights; add --engine_type vllm or drop "
               "it")
    if c.rollout.engine_quantization != "none":
        yield (f"--lora_sync adapter: is not possible with --engine_quantization {c.rollout.engine_quantization}, "
               "which quantizes the base weights again at every sync; drop one")


def _offload(c: Config, world_size: int, cuda: bool) -> Iterator[str]:
    flag = "--offload_during_rollout true: "
    if not cuda:
        yield flag + "has no effect without CUDA, because there is only host memory; drop it"
    elif not (c.rollout.caps.own_weights or c.strategy.divides_weights(world_size)):
        yield flag + "the hf engine generates with the trainer's own weights if a rank holds all of them; drop it"
    if c.strategy.fsdp_cpu_offload:
        yield flag + "has no effect with --fsdp_cpu_offload, which keeps everything off the device; drop one"


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _native_engine(c: Config, engine: str, cuda: bool) -> Iterator[str]:
    r, caps = c.rollout, c.rollout.caps
    if r.engine_kv_mib and changed(c, ["engine_mem_util"]):
        yield (f"--engine_mem_util {r.engine_mem_util:g}: has no effect with --engine_kv_mib {r.engine_kv_mib}, which "
               "sets the size of the cache; drop one")
    for name, value in (("temperature", r.temperature), ("eval_temperature", c.eval.eval_temperature),
                        ("first_token_temperature", r.first_token_temperature)):
        if 0 < value < caps.coldest:
            yield (f"--{name} {value:g}: {caps.title} does not sample below {caps.coldest:g}; nearest valid value: "
                   f"{caps.coldest:g}")
    if caps.min_p_first and r.top_p < 1 and r.min_p > 0:
        yield (f"--min_p {r.min_p:g}: {caps.title} applies it before --top_p {r.top_p:g}, the hf and sglang engines "
               "after it, so the distributions differ; drop one of the two")
    for entry in r.engine_args:
        yield from _argument(entry, caps)
    for name, count in Counter(entry.partition("=")[0] for entry in r.engine_args).items():
        if count > 1:
            yield f"--engine_args {name}: is given {count} times; keep one of them"
    if not cuda:
        yield from _needs_cuda(c, engine)


def _argument(entry: str, caps: EngineCaps) -> Iterator[str]:
    name, _, value = entry.partition("=")
    if not value.strip() or not name.isidentifier():
        yield f"--engine_args {entry}: expected name=value, e.g. {caps.example}"
    elif name in caps.decided:
        yield f"--engine_args {entry}: set {caps.decided[name]} instead"
    elif any(fnmatchcase(name, pattern) for pattern in caps.fixed):
        yield f"--engine_args {entry}: training depends on the default of this argument; drop it"
    else:
        yield from _unreadable(entry)


def _unreadable(entry: str) -> Iterator[str]:
    try:
        native_arguments([entry])
    except (yaml.YAMLError, ValueError) as error:  # ValueError: e.g. dates that do not exist
        reason = getattr(error, "problem", None) or str(error)
        yield (f"--engine_args {entry}: the value is not YAML ({reason}); put text in quotes, and write a comma inside "
               "a value as \\,")


def _needs_cuda(c: Config, engine: str) -> Iterator[str]:
    if c.rollout.engine_quantization != "none":
        yield (f"--engine_quantization {c.rollout.engine_quantization}: {ENGINES[engine].title} has its kernels for "
               "CUDA only, and this machine has none; drop it")
    if not c.rollout.engine_sleep:
        yield "--no_engine_sleep: has no effect without CUDA, where the engine never sleeps; drop it"


def oversample_problems(c: Config) -> Iterator[str]:
    """Yield one sentence per problem with ``--oversample``."""
    r, flag = c.rollout, f"--oversample {c.rollout.oversample:g}"
    if r.oversample == 1:
        yield from if_set(c, ["max_staleness"], "has no effect without --oversample; add --oversample 1.25 or drop it")
        return
    if r.dynamic_sampling:
        yield (f"{flag}: generation would stop when enough groups are finished, but --dynamic_sampling accepts or "
               "rejects groups only after their rewards; drop one of them")
    if c.train.max_steps == 1:
        yield f"{flag}: has no effect in a run of one step; set --max_steps 2 or drop it"
    yield from _shorter_stages(r.stages, flag)


def _shorter_stages(entries: list[str], flag: str) -> Iterator[str]:
    try:
        lengths = Stages(entries).lengths
    except ConfigError:
        return  # reported by length_problems
    if any(after < before for before, after in pairwise(lengths)):
        yield (f"{flag}: --stages {','.join(entries)} gets shorter, and an unfinished response could be longer than "
               "the next stage allows; use rising lengths, or drop --oversample")


def shared_engine(engine: EngineConfig, world_size: int, local_ranks: int) -> Iterator[str]:
    """Yield the problems of ranks that share an engine: they divide the ranks of the run, and those of each machine."""
    tp_size, count = engine.engine_tp_size, engine.engine_count or 0
    if count * tp_size > world_size > 0:
        yield (f"--engine_count {count}: {count} engines of --engine_tp_size {tp_size} need {count * tp_size} ranks, "
               f"and the run has {world_size}; start more (torchrun --nproc-per-node), or nearest valid value: "
               f"{max(world_size // tp_size, 1)}")
    if tp_size > 0 and world_size % tp_size == 0 and local_ranks % tp_size:
        yield (f"--engine_tp_size {tp_size}: the ranks of an engine have to be on one machine, and each machine has "
               f"{local_ranks} of the run; nearest valid value: {nearest_divisors(local_ranks, tp_size)}, or another "
               "--nproc-per-node")
    yield from divides("engine_tp_size", tp_size, world_size)


def overlap_problems(c: Config, world_size: int) -> Iterator[str]:
    """Yield one sentence per problem with ``--overlap_passes``."""
    r, flag = c.rollout, "--overlap_passes true: "
    if not r.overlap_passes:
        return
    for name, carries in (("dynamic_sampling", r.dynamic_sampling), ("oversample", r.oversample > 1)):
        if carries:
            yield (f"{flag}--{name} carries groups over to later steps, where the old log-probs belong to other "
                   "weights; drop one of them")
    if r.offload_during_rollout:
        yield f"{flag}the passes need the models that --offload_during_rollout takes off the device; drop one of them"
    if c.model.teacher_offload:
        yield f"{flag}the passes need the teacher that --teacher_offload takes off the device; drop one of them"
    if r.engine_tp_size > 1:
        yield (f"{flag}ranks that share an engine (--engine_tp_size {r.engine_tp_size}) wait for each other in "
               "generation and in the passes, in different orders, and would deadlock; drop one of them")
    if c.data.cache_features and c.strategy.divides_weights(world_size):
        yield (f"{flag}ranks with a sharded tower run it together for --cache_features, but start their passes in "
               "different orders; drop one of them")
    shared = not (r.caps.own_weights or c.strategy.divides_weights(world_size))
    if shared and c.model.lora_rank and c.algorithm.init_kl_coef:
        yield (f"{flag}the reference is the policy without its adapters (--lora_rank {c.model.lora_rank}), with which "
               "the hf engine, which has no copy of its own, generates meanwhile; add --engine_type vllm or drop it")
    critic = c.algorithm.advantage_estimator in ADVANTAGES and trains_critic(c)
    if not c.forward_passes(r.samples, critic):
        yield f"{flag}has no effect, because nothing is computed between rollout and update; drop it"
