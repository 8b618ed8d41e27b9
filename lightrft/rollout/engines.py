"""Builds rollout engines by name, importing only the chosen one, and estimates the device memory that they take."""
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from math import ceil
from typing import TYPE_CHECKING, Any

from lightrft.config.engines import ENGINES, HF_CACHE_PART, host_cache, LARGE_DEVICE, MOST_SEQUENCES, SEQUENCES
from lightrft.config.schema import Config, RolloutConfig
from lightrft.models.activations import ModelShape
from lightrft.strategy.memory import ModelSize
from lightrft.utils.errors import UserError

if TYPE_CHECKING:
    from lightrft.rollout.engine import RolloutEngine

MIB = 1 << 20
PHASES = ("generation", "log-probs", "backward", "optimizer", "weight sync")  # of a step; backward: and its forward
ByPhase = tuple[float, float, float, float, float]  # bytes in each of PHASES


def get_engine(cfg: RolloutConfig, actor: Any, strategy: Any, tokenizer: Any, bf16: bool = False) -> "RolloutEngine":
    """Build the engine ``cfg.engine_type`` for ``actor``, an :class:`~lightrft.models.actor_language.ActorLanguage`
    already placed by ``strategy``. Its weights are those of ``actor`` after the first ``sync_weights``.

    Raises:
        UserError: there is no such engine, it cannot be built, or it lacks methods.
    """
    name, build = cfg.engine_type, builder_of(cfg.engine_type)
    check_rope(cfg, actor.hf_model.config)
    check_states(cfg, actor.hf_model.config)
    if strategy.plans:
        check_layers(cfg, actor.hf_model.config)  # an engine finds it out when it generates
        return import_module("lightrft.rollout.planned").PlannedEngine()
    engine = build(cfg, actor, strategy, tokenizer, bf16)
    if missing := sorted(name for name in members() if not hasattr(engine, name)):
        raise UserError(f"--engine_type {name}: the engine has no {', '.join(missing)}; lightrft.rollout.engine."
                        "RolloutEngine says what each is (docs/contributing.md, An engine)")
    check_own_weights(cfg, actor, engine)
    return engine


def builder_of(name: str) -> Callable[..., "RolloutEngine"]:
    """Return the builder of the engine NAME, ``build_NAME_engine`` of ``lightrft.rollout.NAME.engine``, or of the
    module that its capabilities name. No package of an engine is needed.

    Raises:
        UserError: there is no such engine, module or function, or this has other parameters.
    """
    if name not in ENGINES:
        raise UserError(f"unknown engine_type {name!r}; known: {', '.join(ENGINES)}")
    module = _module_of(name)
    if not (find_spec(module.rpartition(".")[0] or module) and find_spec(module)):
        raise UserError(f"--engine_type {name}: there is no module {module}, in which its builder build_{name}_engine "
                        "is to be (docs/contributing.md, An engine)")
    build: Any = vars(import_module(module)).get(f"build_{name}_engine")
    where = f"--engine_type {name}: build_{name}_engine of {module}"
    if not callable(build):
        raise UserError(f"{where} is not there; write it, as docs/contributing.md (An engine) shows")
    try:
        signature(build).bind(*range(5))
    except TypeError as error:
        raise UserError(f"{where} is called as (cfg, actor, strategy, tokenizer, bf16), and takes "
                        f"{signature(build)}: {error}") from error
    return build


def check_own_weights(cfg: RolloutConfig, actor: Any, engine: "RolloutEngine") -> None:
    """Refuse an engine that does not have the weights that its capabilities say: memory and syncs depend on them.

    Raises:
        UserError: it computes with the trainer's weights, or with others, and should not.
    """
    from lightrft.strategy.sharding import is_whole  # imports torch
    shares = not cfg.caps.own_weights and all(map(is_whole, actor.hf_model.parameters()))
    if bool(held := engine.shared_storage()) != shares:
        raise UserError(f"--engine_type {cfg.engine_type}: shared_storage() of the engine names {len(held)} weights of "
                        f"the trainer, and its EngineCaps have own_weights={cfg.caps.own_weights}; make them agree "
                        "(lightrft/config/engines.py)")


def members() -> set[str]:
    """Return the names that every engine has: those of its protocols."""
    from lightrft.rollout.engine import RolloutEngine, SteppedEngine
    names = (name for protocol in (SteppedEngine, RolloutEngine)
             for name in (*vars(protocol), *protocol.__annotations__))
    return {name for name in names if not name.startswith("_")}


def check_rope(cfg: RolloutConfig, config: Any) -> None:
    """Refuse an engine whose frequencies of long sequences are not those of the trainer.

    vLLM decides once, as the trainer does, for ``longrope``; of ``dynamic`` it always has those of short sequences, and
    SGLang changes the frequencies of a response on its way.

    Raises:
        UserError: sequences may be longer than ``cfg.engine_type`` has right frequencies for.
    """
    from lightrft.models import rope
    if (right := cfg.caps.rope) is None:
        return
    for kind, most in rope.limits(config.get_text_config()):
        if cfg.longest > most and kind not in right:
            raise UserError(
                f"--engine_type {cfg.engine_type}: this model has other frequencies for sequences of more than {most} "
                f"tokens (RoPE type {kind}), which this engine does not choose as transformers does. Lower "
                f"--prompt_max_len {cfg.prompt_max_len} plus --generate_max_len {cfg.generate_max_len} to {most}, or "
                "take --engine_type hf")


def has_states(config: Any) -> bool:
    """True for a model with layers that keep a state."""
    from lightrft.models.stateful import KINDS  # these import torch, which the doctor does without
    from lightrft.models.towers import config_value
    return not KINDS.isdisjoint(config_value(config.get_text_config(), "layer_types", None) or ())


def _module_of(name: str) -> str:
    return ENGINES[name].module or f"lightrft.rollout.{name}.engine"


def check_states(cfg: RolloutConfig, config: Any) -> None:
    """Refuse an engine whose layers with state nobody has compared with the trainer's, for a model that has some.

    Raises:
        UserError: with the engines that take them.
    """
    if has_states(config) and not cfg.caps.states:
        others = ", ".join(name for name, caps in ENGINES.items() if caps.states)
        raise UserError(f"--engine_type {cfg.engine_type}: model type {config.model_type!r} has layers with state, and "
                        f"{cfg.caps.title} runs them with kernels that were never compared with the trainer's. Take "
                        f"one of {others}")


def check_family_with_states(cfg: RolloutConfig, config: Any, cuda: bool, bf16: bool) -> None:
    """Refuse an engine that computes layers with state of the model of ``config`` in another way than the trainer, as
    ``refuse_states`` of ``lightrft.rollout.NAME.engine`` knows. No package of an engine is needed."""
    refuse = getattr(import_module(_module_of(cfg.engine_type)), "refuse_states", None)
    if refuse is not None and has_states(config):
        refuse(config, cuda, bf16)


def check_layers(cfg: RolloutConfig, config: Any) -> None:
    """Refuse an engine whose cache has no place for what the layers of the model of ``config`` keep, as
    ``refuse_layers`` of ``lightrft.rollout.NAME.engine`` knows. No package of an engine is needed."""
    refuse = getattr(import_module(_module_of(cfg.engine_type)), "refuse_layers", None)
    if refuse is not None:
        refuse(config)


def check_media(cfg: RolloutConfig, config: Any, most: Mapping[str, int], causal: bool) -> None:
    """Refuse an engine that computes media of the model of ``config`` in another way than the trainer, as
    ``refuse_families`` of ``lightrft.rollout.NAME.engine`` knows. No package of an engine is needed.

    Args:
        most: media of each kind in a prompt.
        causal: the engine attends backwards alone, and the model does not.
    """
    refuse = getattr(import_module(_module_of(cfg.engine_type)), "refuse_families", None)
    if refuse is not None:
        refuse(config, most, causal)


def engine_memory(config: Config, world_size: int, size: ModelSize, total: float, cuda: bool) -> dict[str, ByPhase]:
    """Return the bytes of the engine by purpose and phase.

    Asleep, engines keep neither weights nor cache, except that those other than hf do on a CPU. The engine sleeps from
    the end of generation to the weight sync, where canaries run a short generation. That takes little with hf, whose
    cache is only as large as needed. ``lightrft.preflight.overhead`` has CUDA graphs, which stay.

    Args:
        total: memory of the device in bytes; ``cuda``: it is a GPU.
    """
    passing, canary = config.rollout.overlap_passes, config.rollout.sync_proof in ("canary", "both")
    weights, cache = engine_weights(config, world_size, size), engine_cache(config, world_size, size, total, cuda)
    if not config.rollout.caps.own_weights:
        awake = cached = canary = False
    else:
        awake = cached = not (cuda and config.rollout.engine_sleep)
    return {
        "copy in the rollout engine": (weights, weights * (awake or passing), *(weights * awake, ) * 2, weights),
        "key-value cache": (cache, cache * (cached or passing), *(cache * cached, ) * 2, cache * (cached or canary)),
    }


def engine_weights(config: Config, world_size: int, size: ModelSize) -> float:
    """Return the bytes of an engine's own weights; 8-bit quantization leaves the embeddings and the head as they are.
    """
    r, width = config.rollout, config.model.itemsize
    if not r.caps.own_weights:
        return width * size.total if config.strategy.divides_weights(world_size) else 0
    inside = size.total - size.outside
    return (width * size.outside + inside * (width if r.engine_quantization == "none" else 1)) / r.engine_tp_size


def engine_cache(config: Config, world_size: int, size: ModelSize, total: float, cuda: bool) -> float:
    """Return the bytes of the key-value cache that are allocated in advance; 0 for hf without ``--engine_kv_mib``."""
    r = config.rollout
    if r.engine_kv_mib or not r.caps.own_weights:
        return r.engine_kv_mib * MIB
    if not cuda:
        return host_cache(r.engine_mem_util, total)
    return max(0.0, r.engine_mem_util * total - engine_weights(config, world_size, size))


def largest_hf_cache(config: Config, world_size: int, shape: ModelShape | None, total: float) -> float:
    """Return the bytes up to which the cache of the hf engine grows without ``--engine_kv_mib``: a quarter of the
    memory of the device, or all sequences of a rank at the length limits if they take less (for a known ``shape``)."""
    r, quarter = config.rollout, total / HF_CACHE_PART
    if shape is None:
        return quarter
    longest = shape.cache_bytes(r.longest, config.model.itemsize)
    return min(quarter, ceil(r.most_samples / world_size) * longest)


def sequences_at_once(cfg: RolloutConfig, world_size: int, memory: int) -> int:
    """Number of sequences that an engine other than hf runs at once: ``--engine_max_seqs``, or its part of a rollout.

    Args:
        memory: of the device of one rank, in bytes; 0 on a CPU.
    """
    engines = max(world_size // cfg.engine_tp_size, 1)
    batch = ceil(cfg.most_samples / engines)
    most = MOST_SEQUENCES if memory >= LARGE_DEVICE else SEQUENCES
    return cfg.engine_max_seqs or min(max(batch, SEQUENCES), most)
