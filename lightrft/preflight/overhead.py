"""Memory on CUDA besides the tensors that a plan counts, estimated: contexts, NCCL, CUDA graphs, passes of the engine.

The figures are published ones, with their sources; ``make gpu`` measures the memory in use on a device. So they
can warn of a run, and refuse none.
"""
from math import ceil

from lightrft.config.engines import HF_FUSED_PART, HF_GRAPHS, HF_KEPT_PART, HF_MERGED_PART, native_arguments
from lightrft.config.schema import Config, RolloutConfig
from lightrft.config.shared_schema import Tree
from lightrft.models.activations import Activations, ModelShape
from lightrft.preflight.base import preflight
from lightrft.preflight.cost import MIB
from lightrft.preflight.hardware import Device
from lightrft.rollout.engines import ByPhase, largest_hf_cache, sequences_at_once

# Of a process: the driver and the kernels that it has loaded. About 300 MB with lazy loading (pytorch issue 107667),
# 200 to 700 MB before (28113); it grows with the GPU and with the libraries.
CONTEXT = 512 * MIB
# Of a communicator of NCCL: 24 channels to two neighbours of a ring, with a buffer of 4 MiB (NCCL_BUFFSIZE) and 2 MiB
# for its two other protocols. Topologies with more connections take more (NCCL issues 864, 986).
COMMUNICATOR = 24 * 2 * 6 * MIB
# Of a CUDA graph of vLLM, per layer: vLLM's pull request 22897 logs 26 MiB per batch size, for 32 layers; 11349 has
# half of that for 16.
GRAPH_LAYER, USUAL_LAYERS = 0.8 * MIB, 32
LOGIT = 16  # bytes: in float32 the logit, the scaled one and its probability; in vLLM also a count of the token
PREFILL = 8192  # tokens of prompts in a pass of an engine
_UNGRAPHED = ("enforce_eager", "disable_cuda_graph")  # --engine_args of vLLM and SGLang


def overhead(config: Tree, world_size: int, device: Device, shape: ModelShape | None = None) -> dict[str, ByPhase]:
    """Estimate the bytes by purpose and phase; none on a CPU. Passes are counted where the ``shape`` is known."""
    if not device.cuda:
        return {}
    trained = (world_size > 1) + (0 < config.strategy.fsdp_shard_size < world_size)
    plan, rows = preflight(config), dict[str, ByPhase]()
    for name, size in (("CUDA context, estimated", CONTEXT), ("NCCL buffers, estimated", trained * COMMUNICATOR)):
        rows[name] = (size * plan.has_rollout, size, size, size, size * plan.has_rollout)
    for name, values in plan.of_engine(world_size, device, shape).items():
        rows[name] = tuple(map(sum, zip(values, rows.get(name, (0, ) * 5))))  # type: ignore[assignment]  # five again
    return {name: values for name, values in rows.items() if any(values)}


def engine_rows(config: Config, world_size: int, device: Device, shape: ModelShape | None) -> dict[str, ByPhase]:
    """Return the rows of a rollout engine, while and between it generates."""
    r = config.rollout
    if not r.caps.own_weights:
        rows = hf_rows(config, world_size, device, shape)
        graphs, kept = hf_graph_bytes(config, rows, shape, device)
        return {"engine graphs, estimated": (graphs, *(graphs * (kept > 0) + kept, ) * 4),
                "joined weights of the engine, estimated": (joined_bytes(config, shape, device), 0, 0, 0, 0),
                "engine passes, estimated": (pass_bytes(config, rows, shape), 0, 0, 0, 0)}  # yapf: disable
    sequences = sequences_at_once(r, world_size, device.total)
    graphs = graph_bytes(r, sequences, shape.layers if shape else USUAL_LAYERS)
    within = r.caps.measures_work and not r.engine_kv_mib
    awake, canary = not r.engine_sleep, r.sync_proof in ("canary", "both")
    inside = [within and there for there in (True, awake or r.overlap_passes, awake, awake, awake or canary)]
    first, *others = (graphs * (not counted) for counted in inside)
    passes, own = 0.0 if within else pass_bytes(config, sequences, shape), r.caps.own_process
    return {"engine graphs, estimated": (first, *others),  # type: ignore[dict-item]  # five
            "engine passes, estimated": (passes, 0, 0, 0, passes * canary),
            "CUDA context, estimated": (CONTEXT * own, ) * 5,
            "NCCL buffers, estimated": (2 * COMMUNICATOR * (r.engine_tp_size > 1), ) * 5}  # yapf: disable


def graph_bytes(cfg: RolloutConfig, sequences: int, layers: int) -> float:
    """Return the bytes of the graphs of an engine other than hf: at the batch sizes that vLLM captures, of 1, 2, 4,
    every 8 to 256 and every 16 from there. They stay while the engine sleeps."""
    if any(native_arguments(cfg.engine_args).get(name) for name in _UNGRAPHED):
        return 0.0
    most = min(2 * sequences, max(512, sequences))
    return (3 + ceil(min(most, 256) / 8) + ceil(max(0, most - 256) / 16)) * layers * GRAPH_LAYER


def hf_graph_bytes(config: Config, rows: int, shape: ModelShape | None, device: Device) -> tuple[float, float]:
    """Return the bytes of the graphs of the hf engine, and of what stays with them while it sleeps: nothing, or a cache
    and the logits of a step that are small."""
    graphs = HF_GRAPHS * (shape.layers if shape else USUAL_LAYERS) * GRAPH_LAYER
    longest = shape.cache_bytes(config.rollout.longest, config.model.itemsize) if shape else 0
    kept = rows * (longest + LOGIT * (shape.vocabulary if shape else 0))
    return graphs, kept * (kept * HF_KEPT_PART <= device.total)


def joined_bytes(config: Config, shape: ModelShape | None, device: Device) -> float:
    """Return the bytes of the copies of weights for the fused layers of the hf engine, as if its layers could be."""
    if shape is None:
        return 0.0
    merged = config.model.lora_rank > 0
    sizes = shape.queries + 2 * shape.keys + 2 * shape.mlp + (shape.queries + shape.mlp) * merged
    joined = shape.layers * shape.hidden * sizes * config.model.itemsize
    return joined * (joined * (HF_MERGED_PART if merged else HF_FUSED_PART) <= device.total)


def pass_bytes(config: Config, sequences: int, shape: ModelShape | None) -> float:
    """Return the bytes of the passes of an engine without its cache: of prompts, and of a step of ``sequences``, whose
    logits the GPU keeps in the graph of the hf engine."""
    if shape is None:
        return 0.0
    return Activations(shape, PREFILL, config.model.itemsize).forward + sequences * shape.vocabulary * LOGIT


def hf_rows(config: Config, world_size: int, device: Device, shape: ModelShape | None) -> int:
    """Return how many sequences the hf engine runs at once: those of a rank, as far as its cache has room."""
    r = config.rollout
    rows = ceil(r.most_samples / world_size)
    if shape is not None:
        cache = r.engine_kv_mib * MIB or largest_hf_cache(config, world_size, shape, device.total)
        longest = shape.cache_bytes(r.longest, config.model.itemsize)
        rows = min(rows, max(1, int(cache / longest)))
    return min(rows, r.engine_max_seqs or rows)
