"""SGLang as the rollout engine: its schedulers are children of this process, or of the first of a group of ranks."""
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.config.schema import RolloutConfig
from lightrft.models.actor_language import ActorLanguage
from lightrft.ops.rounding import has_experts
from lightrft.rollout.sglang import weights as sglang_weights
from lightrft.rollout.partwise import Part, PartwiseEngine
from lightrft.rollout.tp_group import parts_of_first, object_of_first, tensor_of_first, world_of
from lightrft.rollout.hf.engine import eos_ids
from lightrft.rollout.sglang.launch import check_window, engine_arguments
from lightrft.rollout.sglang.media import refuse_families, SGLangMedia
from lightrft.rollout.sglang.client import SGLangNative
from lightrft.rollout.sglang.parts import SGLangParts
from lightrft.rollout.weight_sync.sync import (WeightManifest, checked, checkpoint_names, manifest,
                                               under_checkpoint_names)
from lightrft.strategy.base import StrategyBase
from lightrft.utils.errors import UserError


class SGLangEngine(PartwiseEngine):
    """A rollout engine on SGLang, whose weights are random until the first update.

    Asleep it holds neither weights nor cache (on CUDA); graphs and contexts stay. They return in the order weights,
    update, cache, so that the cache is never in memory together with a bucket of the trainer's weights.

    Args:
        native: SGLang; None on the ranks that another rank generates for.
        weights: manifest of an update; SGLang takes the weights under their names in checkpoints.
        eos_token_ids: tokens that end every response.
        vocabulary: tokens of the model.
        longest: most tokens of a prompt and its response.
        bucket_bytes: most bytes of weights that are sent at once (or one weight).
        sleeps: whether :meth:`sleep` frees memory (CUDA).
        keeps: an update may bring only some weights. Not with experts: SGLang lays them all out again at its end.
        group: CPU process group of the ranks that share the engine, which lives on its first; None: this rank alone.
        media: makes SGLang's inputs of the media of requests; None: they take text only.
    """

    title = "SGLang"

    def __init__(self, native: SGLangNative | None, weights: WeightManifest, eos_token_ids: Iterable[int],
                 vocabulary: int, longest: int, bucket_bytes: int, sleeps: bool = False, keeps: bool = True,
                 group: dist.ProcessGroup | None = None, media: SGLangMedia | None = None) -> None:
        super().__init__()
        self.native, self.weights, self.eos_token_ids = native, weights, frozenset(eos_token_ids)
        self.vocabulary, self.longest, self.bucket_bytes = vocabulary, longest, bucket_bytes
        self.sleeps, self.keeps, self.group, self.takes_media = sleeps, keeps, group, media is not None
        self.drawer = SGLangParts(native, self.stop_ids, media) if native else None
        try:
            self._dtypes = object_of_first({name: dtype for name, (dtype, _) in self._held().items()}, group)
        except UserError:
            self.shutdown()
            raise

    def _held(self) -> dict[str, tuple[torch.dtype, int]]:
        """Dtype and fingerprint of every weight that can be read; empty on a rank without SGLang."""
        if self.native is None:
            return {}
        from sglang.srt.managers.io_struct import CheckWeightsReqInput
        asked, manager = CheckWeightsReqInput(action="checksum", selector="target"), self.native.manager
        success, message, ranks, _ = self.native.run(lambda: manager.check_weights(asked))
        if not success:
            raise RuntimeError(f"SGLang does not show its weights: {message}")
        first, *others = (rank["checksums"] for rank in ranks)
        if "" in first:
            raise UserError(first[""])
        wrong = {name for name in first if any(other[name] != first[name] for other in others)}  # copies that differ,
        entries = {name: text.split() for name, text in first.items()}  # shown by a number that no copy has
        return {name: (getattr(torch, dtype), ~int(value) if name in wrong else int(value))
                for name, (dtype, value) in entries.items()}  # yapf: disable

    def shared_storage(self) -> set[int]:
        """Implement :meth:`~lightrft.rollout.engine.RolloutEngine.shared_storage`: none."""
        return set()

    @property
    def apart(self) -> bool:
        """Return False: adapters come merged."""
        return False

    @property
    def holds_weights(self) -> bool:
        """Return True while the server has kept the frozen weights."""
        return self._holds and bool(self.weights.frozen) and self.keeps

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes of the weights that the server can read."""
        return self._dtypes

    def fingerprints(self, names: list[str]) -> Tensor:
        """Implement :meth:`~lightrft.rollout.engine.RolloutEngine.fingerprints`. A collective of ``group``."""
        held = self._held()
        return tensor_of_first(torch.tensor([held[name][1] for name in names if held], dtype=torch.int64), self.group)

    def _shared(self, parts: list[Part]) -> list[Part]:
        return parts_of_first(parts, self.group)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load full weights under their HF names and drop every cached prefix; while it has weights, only those that
        training changes.

        Raises:
            RuntimeError: while asleep, or SGLang refuses or has ended.
            ValueError: a name is unknown, missing or has another shape; the engine then refuses to generate.
        """
        if self._asleep:
            raise RuntimeError("the SGLang engine is asleep: call wake() before update_weights()")
        self._pause()
        kept, self._ready, self._holds = self.holds_weights, False, False
        stream = checked(named_tensors, self.weights.changing if kept else self.weights.shapes)
        if self.native is not None:
            names = self.weights.names
            dtypes = {part: dtype for name, dtype in self._dtypes.items() for part, *_ in names.get(name, [(name, )])}
            sglang_weights.load(self.native, under_checkpoint_names(stream, names), dtypes, self.bucket_bytes)
        for _ in stream:  # gathering them takes all ranks
            pass
        self._ready, self._holds, self.weight_version = True, True, version

    def sleep(self) -> None:
        """Drop weights and cache; their device memory is free afterwards (CUDA)."""
        self._pause()
        if self.sleeps and not self._asleep:
            if self.native is not None:
                self.native.come_to_rest()
            self._occupy("Release", ["kv_cache"] * (not self._cache_asleep) + ["weights"])
            self._holds = False
        self._asleep, self._ready, self._cache_asleep = True, False, self.sleeps

    def wake(self) -> None:
        """Allocate the weights again; :meth:`update_weights` fills them, the cache returns with the next request."""
        if self.sleeps and self._asleep:
            self._occupy("Resume", ["weights"])
        self._asleep = False

    def _wake_cache(self) -> None:
        if self._cache_asleep:
            self._occupy("Resume", ["kv_cache"])
            self._cache_asleep = False

    def _occupy(self, what: str, tags: list[str]) -> None:
        """Release or resume memory. (SGLang ends when what it did not release is to be resumed.)"""
        if what == "Resume" and torch.cuda.is_available():  # it is another process: what torch keeps is not free for it
            torch.cuda.empty_cache()
            torch.cuda.ipc_collect()
        if self.native is None:
            return
        from sglang.srt.managers import io_struct
        request = getattr(io_struct, f"{what}MemoryOccupationReqInput")(tags=tags)
        call = getattr(self.native.manager, f"{what.lower()}_memory_occupation")
        self.native.run(lambda: call(request))

    def shutdown(self) -> None:
        """End SGLang's processes, and no others."""
        self._asleep, self._ready = True, False
        self._forget()
        if self.native is not None:
            self.native.shutdown()
            self.native = self.drawer = None


def build_sglang_engine(cfg: RolloutConfig, actor: ActorLanguage, strategy: StrategyBase, tokenizer: Any,
                        bf16: bool) -> SGLangEngine:
    """Start SGLang on the folder that ``actor`` was loaded from. Every rank of ``strategy`` calls it.

    The limit of collectives holds for those of the ranks. SGLang's own processes keep its limit: between two rollouts
    they wait for each other as long as an update takes.

    Raises:
        UserError: SGLang cannot be this model's engine.
    """
    device, mesh = strategy.device, strategy.mesh
    config, source = actor.hf_model.config, actor.modality.media if actor.modality.kinds else None
    refuse_families(config, actor.modality.kinds)
    weights = manifest(actor)
    weights = weights._replace(names=checkpoint_names(actor.hf_model, weights.shapes))
    group, native = mesh.neighbours(cfg.engine_tp_size, strategy.cfg.collective_limit_s), None
    arguments = engine_arguments(cfg, config, device, bf16, world_of(mesh))
    longest = cfg.longest
    if mesh.engines.index % cfg.engine_tp_size == 0:
        native = _native(arguments, weights, device, config, longest)
    return SGLangEngine(native, weights, eos_ids(actor.hf_model, tokenizer),
                        config.get_text_config().vocab_size, longest, cfg.sync_bucket_mib << 20,
                        arguments["enable_memory_saver"], not has_experts(actor), group,
                        SGLangMedia(actor, source, tokenizer) if source else None)


def _native(arguments: dict[str, Any], weights: WeightManifest, device: torch.device, config: Any,
            longest: int) -> SGLangNative:
    """Start SGLang; check that it has room for ``longest`` tokens and attends as the model of ``config`` does."""
    native = SGLangNative(arguments, weights, device)
    try:
        check_window(config, longest, native.info["window"])
        if (room := native.info["max_total_num_tokens"]) <= longest:
            raise UserError(f"SGLang's cache holds {room} tokens, but prompt and response may have {longest}; raise "
                            "--engine_mem_util or --engine_kv_mib")
    except UserError:
        native.shutdown()
        raise
    return native
