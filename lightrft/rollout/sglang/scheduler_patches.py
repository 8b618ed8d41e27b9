"""Patches of SGLang's scheduler processes, for the trainer's sampling and for fingerprints of the weights."""
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.weight_sync.sync import WeightManifest, under_checkpoint_names
from lightrft.rollout.sampling import sample, uniforms_at
from lightrft.rollout.weight_sync.weight_map import WeightMap

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_PLAIN = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")  # compute with unchanged weights


def run_scheduler(weights: WeightManifest, parent: int, last_words: Connection, *args: Any) -> None:
    """Run a scheduler process from its start to its end, for a trainer in the process ``parent`` that sends
    ``weights``. An error that ends the scheduler is reported there.

    SGLang's own sampler ignores seeds unless all its kernels are deterministic, and its log-probs are those before
    top-k, top-p and min-p; its checksums are those of fused tensors. Its features of media outlive an update.
    """
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers import scheduler
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.utils.common import kill_itself_when_parent_died
    from sglang.srt.utils.weight_checker import WeightChecker
    kill_itself_when_parent_died()
    if os.getppid() != parent:  # the trainer died before
        return
    scheduler.get_exception_traceback = _reporting(last_words)
    scheduler.Scheduler.get_init_info = _with_window(scheduler.Scheduler.get_init_info)
    scheduler.Scheduler.flush_cache = _with_features(scheduler.Scheduler.flush_cache)
    Sampler.forward = _draw
    SamplingBatchInfo.from_schedule_batch = staticmethod(_seeded(SamplingBatchInfo.from_schedule_batch))
    WeightChecker._compute_checksum = _checksums(weights)
    WeightUpdater.update_weights_from_tensor = _waited(WeightUpdater.update_weights_from_tensor)
    scheduler.run_scheduler_process(*args)


def _reporting(last_words: Connection) -> Callable[[], str]:
    """Replace SGLang's formatting of the error that it is about to log, so that the error is also sent."""

    def formatted() -> str:
        last_words.send("".join(traceback.format_exception_only(sys.exc_info()[1])).strip())
        return traceback.format_exc()

    return formatted


def _with_window(info: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Add, to ``info`` of a scheduler that is ready, how far back its model's attention reaches at most, or None."""
    return lambda one: info(one) | {"window": one.tp_worker.model_runner.sliding_window_size}


def _draw(sampler: nn.Module, output: Any, info: "SamplingBatchInfo", return_logprob: bool, top_logprobs_nums: Any,
          token_ids_logprobs: Any, positions: Tensor, **_: Any) -> Tensor:
    """Replace SGLang's sampler; return tokens int32 [n]. Greedy requests have a seed below 0. What else SGLang passes
    is for watermarks, which the trainer never asks for."""
    logits, seeds = output.next_token_logits.float(), info.sampling_seed
    noise, tokens, logprobs = uniforms_at(seeds, positions), torch.zeros_like(seeds), logits.new_zeros(len(seeds))
    for params, rows in _restrictions(info):
        tokens[rows], logprobs[rows] = sample(logits[rows] / info.temperatures[rows], noise[rows], params)
    if info.is_any_greedy:
        best, scores = sample(logits, None, SamplingParams(1, 0.0))
        tokens, logprobs = torch.where(seeds < 0, best, tokens), torch.where(seeds < 0, scores, logprobs)
    output.next_token_logprobs = logprobs
    return tokens.to(torch.int32)


def _restrictions(info: "SamplingBatchInfo") -> Iterator[tuple[SamplingParams, Any]]:
    """Yield each top-p, top-k and min-p of the requests that are not greedy, with their rows."""
    if not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling):
        yield SamplingParams(1), slice(None)
        return
    values = torch.stack([info.top_ps.double(), info.top_ks.double(), info.min_ps.double()], 1)
    distinct, kinds = values.masked_fill(info.sampling_seed[:, None] < 0, 0.0).unique(dim=0, return_inverse=True)
    for kind, (top_p, top_k, min_p) in enumerate(distinct.tolist()):
        if top_p:
            rows = slice(None) if len(distinct) == 1 else kinds == kind
            yield SamplingParams(1, 1.0, top_p, int(top_k), min_p), rows


def _seeded(build: Callable[..., "SamplingBatchInfo"]) -> Callable[..., "SamplingBatchInfo"]:
    """Add to ``build`` the seeds of the requests, which SGLang merges and filters with the batch."""

    def seeded(batch: Any, vocab_size: int) -> "SamplingBatchInfo":
        info = build(batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device, non_blocking=True)
        return info

    return seeded


def _checksums(weights: WeightManifest) -> Callable[..., dict[str, Any]]:
    """Replace SGLang's checksums by dtype and fingerprint of each weight of the trainer that can be read; the entry of
    the empty name says what is wrong with the others."""
    found: list[WeightMap] = []

    def checksums(checker: Any, _: Any = None, *, role: str) -> dict[str, Any]:
        if not found:
            found.append(_weight_map(checker._get_model(), weights))
        dtypes, values = found[0].dtypes, found[0].fingerprints(list(found[0].dtypes)).tolist()
        entries = {name: f"{str(dtype)[6:]} {value}" for (name, dtype), value in zip(dtypes.items(), values)}
        if fault := found[0].fault("SGLang"):
            entries[""] = fault
        parallelism = checker._parallelism_info(role=role).model_dump()
        return {"checksums": entries, "per_gpu_checksum": "", "parallelism_info": parallelism}

    return checksums


def _waited(load: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``load`` return only when the weights have arrived: the trainer then reuses the memory that held them."""

    def loaded(*args: Any, **kwargs: Any) -> Any:
        answer = load(*args, **kwargs)
        torch.get_device_module().synchronize()
        return answer

    return loaded


def _with_features(flush: Callable[..., bool]) -> Callable[..., bool]:
    """Let ``flush``, which drops the prefixes that old weights made, drop the features of media too."""
    from sglang.srt.managers import mm_schedule

    def flushed(one: Any, *args: Any, **kwargs: Any) -> bool:
        mm_schedule.embedding_cache.clear()
        return flush(one, *args, **kwargs)

    return flushed


def _weight_map(model: Any, weights: WeightManifest) -> WeightMap:
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.runtime_context import get_parallel
    group = get_parallel().tp_group.cpu_group
    device = next(model.parameters()).device

    def load(stream: Iterator[tuple[str, Tensor]]) -> None:
        model.load_weights(under_checkpoint_names(stream, weights.names))

    def reload(stream: Iterator[tuple[str, Tensor]]) -> None:
        DefaultModelLoader.restore_weights_before_loading(model, device)
        load(stream)
        DefaultModelLoader.postprocess_weights(model, device)

    methods = {layer: type(getattr(layer, "quant_method", None)).__name__ for layer in model.modules()}
    experts = [layer for layer, method in methods.items() if method == "UnquantizedFusedMoEMethod"]
    derived = [layer for layer, method in methods.items() if layer not in experts and method not in _PLAIN]
    return WeightMap(load, weights.shapes, group if dist.get_world_size(group) > 1 else None, derived, experts, reload,
                     model)
