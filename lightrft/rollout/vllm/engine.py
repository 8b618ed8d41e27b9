"""vLLM as the rollout engine, in this process (one engine per rank, or per group of ranks with tensor parallelism)."""
import ctypes
import gc
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from lightrft.config.schema import RolloutConfig
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.towers import config_value
from lightrft.rollout.vllm import weights as vllm_weights
from lightrft.rollout.engine import SamplingParams, refuse_media
from lightrft.rollout.hf.engine import eos_ids
from lightrft.rollout.weight_sync.sync import WeightManifest, checked, manifest
from lightrft.rollout.partwise import PartwiseEngine
from lightrft.rollout.scheduler import generate
from lightrft.rollout.tp_group import world_of
from lightrft.rollout.vllm.weights import Adapters, adapter_arguments, bare
from lightrft.rollout.weight_sync.weight_map import WeightMap
from lightrft.rollout.vllm.launch import NativeStream, engine_arguments, process_state_kept, start_engine
from lightrft.rollout.vllm.media import VLLMMedia
from lightrft.rollout.vllm.parts import VLLMParts
from lightrft.rollout.vllm.states import limit_time_steps, state_arguments, stored_forms
from lightrft.strategy.base import StrategyBase
from lightrft.types import Episode, MediaSource, Prompt
from lightrft.utils.errors import UserError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_HALF_MINUTE = 1500  # positions of the tower for a window of 30 s, for whose tokens alone vLLM keeps room
_OTHERWISE = {
    "glm46v": "vLLM has no own code for GLM-4.6V",
    "qwen2_5_omni_thinker": "vLLM runs no thinker without its talker",
    "voxtral": "vLLM reads the prompts of Voxtral with Mistral's own tokenizer",
}
# families whose videos are for vLLM what they are for the trainer
WITH_VIDEOS = ("gemma4", "glm4v", "internvl", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


def refuse_states(config: PretrainedConfig, cuda: bool, bf16: bool) -> None:
    """Refuse models with layers with state that vLLM computes otherwise than the trainer, as its arguments do."""
    state_arguments(config, cuda, bf16)


def refuse_families(config: PretrainedConfig, most: Mapping[str, int], causal: bool) -> None:
    """Refuse models whose media vLLM computes in another way than the trainer; ``most``: media of a kind in a prompt,
    ``causal``: it attends backwards alone.

    Raises:
        UserError: with the engine that takes them.
    """
    if reason := _OTHERWISE.get(config.model_type):
        refuse_media("vllm", most, reason)
    if config.model_type not in WITH_VIDEOS:
        reason = "vLLM has pictures of SmolVLM alone" if config.model_type == "smolvlm" else (
            "videos of this model were never compared")
        refuse_media("vllm", {*most} & {"video"}, reason)
    if config.model_type == "glm4v" and most.get("video", 0) > 1:
        refuse_media("vllm", ["video"], f"vLLM takes one video of GLM-4.1V in a prompt, a row has {most['video']}")
    ear: Any = config_value(config, "audio_config", None)
    if config.model_type == "qwen2_audio" and ear.max_source_positions > _HALF_MINUTE:
        refuse_media("vllm", most, "vLLM takes windows of at most 30 s for sounds of Qwen2-Audio")
    if causal:
        refuse_media("vllm", most, "on a CPU vLLM hides the later tokens of a picture from the earlier ones")


class VLLMEngine(PartwiseEngine):
    """A rollout engine on ``native``, vLLM's own engine, whose weights are random until the first update.

    Asleep it holds neither weights nor cache (on CUDA); graphs stay. They return in the order weights, update, cache,
    so that the cache is never in memory together with a bucket of the trainer's weights.

    Args:
        weights: manifest of an update.
        eos_token_ids: tokens that end every response.
        sleeps: whether :meth:`sleep` frees memory (CUDA).
        group: CPU process group of the ranks that run this engine together; None: this rank alone.
        owns_world: torch's process group was created by vLLM, and is destroyed with it.
        adapters: LoRA adapters stored apart from the base weights; None: updates bring merged weights.
        media: source of the media of prompts; None: they are text only.
        unused: prefixes of weights that nothing is computed with.
        buffers: of checkpoints, by HF name; every update brings them too (Gemma-4 scales its layers with them).
        stream: the CUDA stream that vLLM chose when it started.

    Raises:
        UserError: vLLM skips a weight, or has no own code for the model.
    """

    title = "vLLM"

    def __init__(self, native: "LLMEngine", weights: WeightManifest, eos_token_ids: Iterable[int], sleeps: bool = False,
                 group: dist.ProcessGroup | None = None, owns_world: bool = False, adapters: Adapters | None = None,
                 media: MediaSource | None = None, unused: tuple[str, ...] = (),
                 buffers: Mapping[str, Tensor] | None = None, stream: NativeStream | None = None) -> None:
        super().__init__()
        self.unused, self.buffers = unused, buffers or {}
        self.media = None if media is None else VLLMMedia(native, media)
        self.native, self.weights, self.eos_token_ids = native, weights, frozenset(eos_token_ids)
        self.vocabulary, self.longest = native.model_config.get_vocab_size(), native.model_config.max_model_len
        self.sleeps, self.group, self.owns_world, self.takes_media = sleeps, group, owns_world, media is not None
        self.adapters = adapters
        self.drawer = VLLMParts(native, self.stop_ids, adapters and adapters.request, self.media, stream)
        if vllm_weights.is_borrowed(self.model):
            raise UserError(
                "vLLM does not implement this model. It would run the transformers code, and patch it in this "
                "process for the trainer too: use --engine_type hf")
        if not any(name.endswith("lm_head.weight") for name in weights.shapes):
            vllm_weights.tie_head(self.model)
        vllm_weights.keep_expert_layout(self.model)
        with bare(self.model):
            self._derived = vllm_weights.derived_layers(self.model)
        if adapters and self._derived:
            raise UserError(f"vLLM keeps the weights of {type(self._derived[0]).__name__} in a layout that was "
                            "never tested with adapters: use --lora_sync merged")  # yapf: disable
        self.weight_map, self.stored_forms = self._map_weights(), stored_forms(self.model, weights.shapes)

    @property
    def model(self) -> nn.Module:
        """The module that vLLM runs on this rank: fused, and with tensor parallelism this rank's part of it."""
        return self.native.model_executor.driver_worker.worker.get_model()

    def _map_weights(self) -> WeightMap:
        """Find where every weight of the trainer is stored; vLLM fills the same tensors at every update. Nothing is
        known of layers that compute with values derived from their weights, except for experts."""
        known = vllm_weights.are_experts(self._derived)
        with bare(self.model):
            shapes = self.weights.shapes
            if not known:
                shapes = vllm_weights.in_plain_layers(self.model, self._derived, shapes)
            found = WeightMap(
                lambda stream: vllm_weights.load_plain(self.native, self.model, self._without_adapters(stream)),
                shapes, self.group, rearranged=self._derived if known else (),
                reload=lambda stream: vllm_weights.load_layerwise(self.native, self.model, stream),
                model=self.model if known else None)  # yapf: disable
        found.lost = {name: size for name, size in found.lost.items() if not name.startswith(self.unused)}
        if fault := found.fault("vLLM"):
            raise UserError(fault)
        return found

    @property
    def apart(self) -> bool:
        """Return True if vLLM applies the adapters itself."""
        return self.adapters is not None

    @property
    def holds_weights(self) -> bool:
        """Implement :attr:`~lightrft.rollout.engine.KeepsWeights.holds_weights`. Layers with derived values are built
        again at every update, from all of their weights."""
        return self._holds and bool(self.weights.frozen) and not self._derived

    def _without_adapters(self, stream: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return stream if self.adapters is None else self.adapters.take(stream)

    def shared_storage(self) -> set[int]:
        """Implement :meth:`~lightrft.rollout.engine.RolloutEngine.shared_storage`: none."""
        return set()

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        """Implement :meth:`~lightrft.rollout.engine.RolloutEngine.weight_dtypes`. A collective of ``group``."""
        return self.weight_map.dtypes

    def fingerprints(self, names: list[str]) -> Tensor:
        """Implement :meth:`~lightrft.rollout.engine.RolloutEngine.fingerprints`. A collective of ``group``."""
        return self.weight_map.fingerprints(names)

    def _wake_cache(self) -> None:
        if self._cache_asleep:
            self.native.wake_up(["kv_cache"])
            self._cache_asleep = False

    def positions(self, prompt: Prompt) -> Tensor | None:
        """Implement :meth:`~lightrft.rollout.engine.ShowsPositions.positions`, by drawing a token."""
        model: Any = self.model
        if not hasattr(model, "get_mrope_input_positions"):
            return None
        found, right = list[Tensor](), model.get_mrope_input_positions

        def noted(*args: Any, **kwargs: Any) -> Any:
            positions, delta = right(*args, **kwargs)
            found.append(positions)
            return positions, delta

        vars(model)["get_mrope_input_positions"] = noted
        try:
            generate(self, [Episode(prompt, 0, 0, role="positions")], SamplingParams(1))
        finally:
            del vars(model)["get_mrope_input_positions"]
        return found[0].long().cpu()

    def media_tensors(self, prompt: Prompt) -> dict[str, list[Tensor]]:
        """Return what vLLM's processor makes of each medium."""
        with process_state_kept():
            return {} if self.media is None else self.media.tensors(prompt)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load full weights under their HF names and drop every cached prefix and picture; while it has weights, only
        those that training changes.

        Raises:
            RuntimeError: while asleep.
            ValueError: a name is unknown, missing or has another shape; the engine then refuses to generate.
        """
        if self._asleep:
            raise RuntimeError("the vLLM engine is asleep: call wake() before update_weights()")
        self._pause()
        kept, self._ready, self._holds = self.holds_weights, False, False
        stream = checked(named_tensors, self.weights.changing if kept else self.weights.shapes)
        with bare(self.model):
            base = chain(self._without_adapters(stream), self.buffers.items())
            vllm_weights.load(self.native, self.model, base, plain=not self._derived, whole=not kept)
        self._holds = True
        self.native.reset_encoder_cache()
        if not self.native.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, which holds results of the old weights")
        self._ready, self.weight_version = True, version

    def sleep(self) -> None:
        """Drop weights and cache; their device memory is free afterwards (CUDA). Next to adapters the base weights are
        kept in host memory."""
        self._pause()
        if self.sleeps and not self._asleep:
            self.native.sleep(level=1 if self.adapters else 2)
            self._holds = self._holds and self.adapters is not None
        self._asleep, self._ready, self._cache_asleep = True, False, self.sleeps

    def wake(self) -> None:
        """Allocate the weights again; :meth:`update_weights` fills them, the cache returns with the next request."""
        if self.sleeps and self._asleep:
            self.native.wake_up(["weights"])
        self._asleep = False

    def shutdown(self) -> None:
        """End vLLM and its process groups; the trainer's stay (vLLM's own shutdown would end them too)."""
        self._asleep, self._ready = True, False
        self._forget()
        self.adapters = self.media = self.drawer = None
        for name in ("weight_map", "_derived"):  # vLLM frees its memory, which nothing may use then
            vars(self).pop(name, None)
        end_native(self.native, self.owns_world)


def end_native(native: "LLMEngine", owns_world: bool) -> None:
    """End vLLM's own engine and its process groups, once; ``owns_world``: torch's group is vLLM's too."""
    from vllm.distributed import parallel_state
    client: Any = native.engine_core
    if client._finalizer.detach() is None:
        return
    keep_unmapped_pools()
    client.engine_core.model_executor.shutdown()
    client.engine_core.scheduler.shutdown()
    parallel_state.destroy_model_parallel()
    if owns_world:
        parallel_state.destroy_distributed_environment()
    gc.unfreeze()


def keep_unmapped_pools() -> None:
    """Keep, for the life of the process, the pools of what sleeps: addresses without memory.

    Their end would have vLLM unmap again what its sleep has unmapped. CUDA refuses, and from then on vLLM's allocator
    refuses every allocation. To wake them first could need memory that the trainer has.
    """
    from vllm.device_allocator.cumem import CuMemAllocator
    allocator = CuMemAllocator.instance
    if allocator is None:  # nothing sleeps
        return
    asleep = {address: one.tag for address, one in allocator.pointer_to_data.items() if one.is_asleep}
    for tag in set(asleep.values()):
        for pool in allocator.allocator_and_pools.pop(tag, ()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))  # the end of Python does not drop it either
    for address in asleep:
        del allocator.pointer_to_data[address]


def build_vllm_engine(cfg: RolloutConfig, actor: ActorLanguage, strategy: StrategyBase, tokenizer: Any,
                      bf16: bool) -> VLLMEngine:
    """Start vLLM on the folder that ``actor`` was loaded from. Every rank of ``strategy`` calls it.

    Raises:
        UserError: vLLM cannot be this model's engine; it is ended again.
    """
    device, owns_world, rank = strategy.device, not dist.is_initialized(), actor.lora_rank
    if strategy.mesh.group is not None:
        raise UserError(f"--engine_type vllm: makes its groups of all ranks, and this strategy runs on the ranks "
                        f"{list(strategy.mesh.ranks)} alone; use --engine_type hf or sglang")
    apart = cfg.lora_sync == "adapter" and rank > 0
    media = actor.modality.media
    refuse_families(actor.hf_model.config, media.most if media else {}, device.type == "cpu"
                    and actor.modality.both_ways)
    arguments = engine_arguments(cfg, actor.hf_model.config, device, bf16, world_of(strategy.mesh),
                                 strategy.cfg.collective_limit_s, media.most if media else None)
    group, stream = None, NativeStream()
    native = start_engine(arguments | (adapter_arguments(rank) if apart else {}), device,
                          actor.hf_model.config.model_type, stream)
    if cfg.engine_tp_size > 1:
        from vllm.distributed.parallel_state import get_tp_group
        group = get_tp_group().cpu_group
    try:
        limit_time_steps(native.model_executor.driver_worker.worker.get_model(), actor.hf_model)
        return VLLMEngine(native, manifest(actor, not apart), eos_ids(actor.hf_model, tokenizer),
                          arguments["enable_sleep_mode"], group, owns_world,
                          Adapters(native, rank) if apart else None, media,
                          vllm_weights.unused_prefixes(actor.hf_model.config),
                          vllm_weights.saved_buffers(actor.hf_model), stream)
    except UserError:
        end_native(native, owns_world)
        raise
