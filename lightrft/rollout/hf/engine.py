"""The embedded rollout engine: continuous batching on a ``transformers`` causal language model, in this process."""
import contextlib
import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lightrft.config.engines import HF_CACHE_PART, HF_FUSED_PART, HF_KEPT_PART, HF_MERGED_PART
from lightrft.config.schema import RolloutConfig
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.actor_modality import ActorModality
from lightrft.models.cpu_layers import packed_weights, use_onednn
from lightrft.models.rope import adapt, fixed_length, ropes
from lightrft.ops.fingerprint import Piece, fingerprints
from lightrft.ops.logprobs import full_logits
from lightrft.rollout.engine import SamplingParams, check_episodes, stop_ids
from lightrft.rollout.hf.continuous_batching import Generation
from lightrft.rollout.hf.decode_graph import padded_width, StepGraphs
from lightrft.rollout.hf.fused_layers import find_fused, FusedCalls
from lightrft.rollout.hf.cache_plan import check_decoder, KVPlan, KVSpec, probe_spec
from lightrft.rollout.hf.kv_cache import KVCache
from lightrft.rollout.hf.module_calls import find_decode_pass, Forward
from lightrft.rollout.hf.response_queue import ResponseQueue
from lightrft.rollout.hf.workspace import covering, Sizes, Workspace
from lightrft.rollout.open_responses import OpenResponse
from lightrft.rollout.weight_sync.sync import checked
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.mixed_precision import compute_weights
from lightrft.strategy.sharding import is_whole
from lightrft.types import Episode, Key, Segment
from lightrft.utils.env import World, total_memory
from lightrft.utils.errors import UserError

_MIB = 1 << 20
_ANY = 1 << 62  # tokens: no limit


@contextlib.contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    """Context of evaluation mode, in which the logits are those of the trainer: not rounded to bfloat16. Afterwards
    every submodule has its former mode again, and the head computes as before."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    training, before = [module for module in model.modules() if module.training], vars(head).get("forward")
    for module in training:
        module.training = False
    vars(head)["forward"] = partial(full_logits, weight=head.weight, bias=head.bias)
    try:
        yield
    finally:
        vars(head).pop("forward", None)
        vars(head).update({} if before is None else {"forward": before})
        for module in training:
            module.training = True


def _resized(tensor: Tensor, size: int) -> int:
    """Give the storage of ``tensor`` ``size`` bytes, of unknown content; return its size before."""
    storage = tensor.untyped_storage()
    before = storage.nbytes()
    storage.resize_(size)
    return before


def _longest(opened: list[OpenResponse]) -> int:
    """Most tokens that a prompt and its response may have."""
    return max(response.prompt.length + response.params.max_new_tokens for response in opened)


class HFEngine:
    """A rollout engine that runs ``hf_model`` itself, with the "packed" attention.

    Args:
        hf_model: a causal language model whose attention implementation is "packed".
        eos_token_ids: tokens that end every response.
        kv_bytes: most bytes of key-value cache; 0 takes ``1 / share`` of a quarter of the device's memory (of all of
            it, not of what is free: a resumed run then batches as the first one did, to the last bit).
        owns_model: the model is this engine's own copy, filled by :meth:`update_weights`; else it is the trainer's.
        share: engines that share this device's memory.
        max_seqs: most sequences at once; 0: as many as the cache holds.
        modality: of the model; text by default.
        longest: most tokens of a prompt and its response, on which the frequencies of some rotary embeddings depend
            (:mod:`lightrft.models.rope`); 0: those of a call.
        one_kernel: the attention of a decode step is one kernel in Triton; for CUDA.
    """

    group: dist.ProcessGroup | None = None  # every rank has an engine of its own

    def __init__(self, hf_model: nn.Module, eos_token_ids: Iterable[int], kv_bytes: int = 0, owns_model: bool = False,
                 share: int = 1, max_seqs: int = 0, modality: ActorModality | None = None, longest: int = 0,
                 one_kernel: bool = False) -> None:
        config: Any = hf_model.config
        attention = config.get_text_config()._attn_implementation
        if attention != "packed":
            raise ValueError(f"the HF engine needs a model with attn_implementation='packed', not {attention!r}")
        self.modality = modality or ActorModality()
        self.model: Any = hf_model
        adapt(self.modality.body(cast(PreTrainedModel, hf_model)))
        self.eos_token_ids = frozenset(eos_token_ids)
        self.kv_bytes, self.owns_model, self.share = kv_bytes, owns_model, share
        self.weight_version, self.max_seqs, self.longest, self.one_kernel = 0, max_seqs, longest, one_kernel
        self._device = next(hf_model.parameters()).device
        self._ready, self._asleep = not owns_model, False
        self._sizes: dict[Tensor, int] = {}  # of the weights that sleep freed, in bytes
        self._probed: tuple[KVSpec, Forward] | None = None
        self._space: Workspace | None = None
        self._graphs = StepGraphs(self._device)
        self._queue, self._aborted = ResponseQueue(), list[OpenResponse]()
        self._generation: Generation | None = None  # of the open responses, while its session lasts
        self._session, self._unplanned, self._length = contextlib.ExitStack(), False, 0
        self.fuses = self._device.type == "cuda"  # decode steps take fused layers; on CPUs launches cost little

    def submit(self, episodes: Mapping[Key, Episode], params: SamplingParams, waits: bool = False) -> None:
        """Implement :meth:`~lightrft.rollout.engine.SteppedEngine.submit`.

        Raises:
            RuntimeError: while asleep, or before the first weights of an engine that owns its model.
            ValueError: for an episode that cannot be run.
        """
        self._check_ready()
        check_episodes(episodes.values(), params, "HF", self.vocabulary, takes_media=self.modality.media is not None)
        self._queue.submit(episodes, params, waits)
        self._unplanned = True

    def step(self) -> dict[Key, Episode]:
        """Implement :meth:`~lightrft.rollout.engine.SteppedEngine.step`.

        Raises:
            ValueError: for a cache budget that does not hold one sequence.
        """
        if self._aborted or not self._queue.open:
            ended, self._aborted = self._aborted, []
        else:
            with torch.no_grad():
                ended = self._running().step()
            if not self._queue.open:
                self._pause()
        return {response.key: response.episode for response in ended}

    def resume(self, key: Key, segment: Segment, params: SamplingParams | None = None) -> None:
        """Append an answer to a parked response."""
        self._queue.resume(key, segment, params)
        self._unplanned |= params is not None

    def abort(self, keys: Iterable[Key]) -> None:
        """End responses, and free their slots."""
        self._aborted += self._generation.abort(keys) if self._generation else self._queue.abort(keys)
        if not self._queue.open:
            self._pause()

    def reset(self) -> None:
        """Implement :meth:`~lightrft.rollout.engine.SteppedEngine.reset`; the cache is freed."""
        self._queue, self._aborted, self._generation = ResponseQueue(), [], None
        self._session.close()
        self._release()

    def _check_ready(self) -> None:
        if self._asleep:
            raise RuntimeError("the HF engine is asleep: call wake() before generate()")
        if not self._ready:
            raise RuntimeError("the HF engine has no weights yet: call update_weights() before generate()")

    # -- the running generation ---------------------------------------------------------------------------------------
    def _running(self) -> Generation:
        """Return the generation of the open responses, in a new workspace if the last one does not suit them."""
        generation = self._generation
        if generation is None or self._unplanned:
            self._check_ready()
            opened = list(self._queue.open.values())
            if generation is None or not self._suits(opened):
                self._pause()
                self._generation = generation = self._begin(opened)
            self._unplanned = False
        return generation

    def _suits(self, opened: list[OpenResponse]) -> bool:
        """Return True if the workspace takes all of ``opened``, and another would have less than twice its slots."""
        space, plan = cast(Workspace, self._space), self._plan(opened)
        params, present = covering(response.params for response in opened), space.cache.plan
        return (space.takes(params) and plan.prompt_len <= present.prompt_len and plan.slots < 2 * present.slots
                and plan.prompts < 2 * present.prompts and (self.longest > 0 or _longest(opened) <= self._length))

    def _begin(self, opened: list[OpenResponse]) -> Generation:
        """Bring the model into the state of generation, and give ``opened`` a workspace."""
        params, self._length = covering(response.params for response in opened), self.longest or _longest(opened)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_inference(self.model))
            stack.enter_context(fixed_length(self.model, self._length))
            spec, decode_pass = self._probe()
            joined = decode_pass.refresh() if isinstance(decode_pass, FusedCalls) else ()
            space = self._space_for(self._plan(opened), spec, params, joined)
            stack.enter_context(packed_weights(self.modality.body(self.model)))
            self._session = stack.pop_all()
        return Generation(self.model, self.modality, decode_pass, space, params, self._stop_mask, self._graphs,
                          self._queue, self.weight_version)

    def _pause(self) -> None:
        """Take all slots away, and let the model train; the next step fills the slots again."""
        if self._generation is not None and self._queue.open:
            self._generation.evict_all()
        self._generation = None
        self._session.close()

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the model."""
        return len(self.model.get_input_embeddings().weight)

    def _stop_mask(self, params: SamplingParams) -> Tensor:
        mask = torch.zeros(self.model.get_output_embeddings().weight.shape[0], dtype=torch.bool)
        mask[stop_ids(self.eos_token_ids, params, len(mask))] = True
        return mask

    def _probe(self) -> tuple[KVSpec, Forward]:
        """The size of the cache and the pass of a decode step, which are those of the architecture."""
        if self._probed is None:
            calls = find_decode_pass(self.model, self.modality)
            fused = find_fused(calls, self._device, self._most_joined) if self.fuses else None
            self._probed = probe_spec(self.model, self.modality), fused or calls
        return self._probed

    @property
    def _most_joined(self) -> int:
        """Bytes that copies of weights may take, of fused layers."""
        adapted = any(".lora_" in name for name, _ in self.model.named_parameters())
        return total_memory(self._device) // (HF_MERGED_PART if adapted else HF_FUSED_PART)

    def _plan(self, opened: list[OpenResponse]) -> KVPlan:
        """Plan a cache of as many slots as are needed and affordable; on a GPU for prompts that are somewhat longer, if
        that takes no slot."""
        sizes = Counter(response.prompt for response in opened)
        new = max(response.params.max_new_tokens for response in opened)
        if not self.kv_bytes:
            self.kv_bytes = total_memory(self._device) // HF_CACHE_PART // self.share
        prompt, token = max(prompt.length for prompt in sizes), (spec := self._probe()[0]).bytes_per_token
        fit = partial(KVPlan.fit, self.kv_bytes // token, list(sizes.values()), length=max(1, new - 1),
                      most=self.max_seqs, state=spec.tokens_per_sequence)
        plan = fit(prompt)
        if plan.slots < 1:
            raise UserError(
                f"one sequence of {prompt} prompt + {new} new tokens needs "
                f"{(prompt + new - 1 + 2 * spec.tokens_per_sequence) * token / _MIB:.1f} MiB of key-value cache, the "
                f"budget is {self.kv_bytes / _MIB:.1f} MiB: raise --engine_kv_mib or lower "
                f"--generate_max_len")
        padded = fit(padded_width(prompt, _ANY)) if self._device.type == "cuda" else plan
        return padded if padded.slots == plan.slots else plan

    def _space_for(self, plan: KVPlan, spec: KVSpec, params: SamplingParams, joined: tuple[int, ...]) -> Workspace:
        """The tensors of the last call when they fit, with the graphs that use them, else new ones; ``joined``: the
        addresses of joined weights."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        model = *joined, *(tensor.data_ptr() for tensor in tensors), *map(attrgetter("fixed"), ropes(self.model))
        sizes = Sizes(replace(params, stop_token_ids=()), len(self._stop_mask(params)), model)
        if self._space is None or not self._space.fits(plan, sizes):
            cache = self._cache if self._cache is not None and self._cache.plan == plan else None
            self._forget()  # freed before the new one is allocated
            self._space = Workspace(cache or KVCache(spec, plan, self._device), sizes, self.one_kernel)
        return self._space

    @property
    def _cache(self) -> KVCache | None:
        return self._space.cache if self._space else None

    @property
    def _fused(self) -> FusedCalls | None:
        calls = self._probed[1] if self._probed else None
        return calls if isinstance(calls, FusedCalls) else None

    def _release(self) -> None:
        """Free all that a generation holds."""
        self._forget()
        if self._fused:
            self._fused.release()

    def _forget(self) -> None:
        """Free the cache, and the graphs that use it."""
        self._space = None
        self._graphs.free()

    @torch.no_grad()
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load full weights under their HF names; an engine on the trainer's model only stores the version.

        Raises:
            ValueError: a name is unknown, missing or has another shape; the engine then refuses to generate.
        """
        self._pause()
        if self.owns_model:
            self._ready = False
            weights = dict(self.model.named_parameters())
            for name, tensor in checked(named_tensors, {name: weight.shape for name, weight in weights.items()}):
                weights[name].copy_(tensor)
            self._ready = True
        self.weight_version = version

    def shared_storage(self) -> set[int]:
        """Return the addresses of the trainer's weights; of an own copy none."""
        return set() if self.owns_model else {weight.data_ptr() for _, weight in compute_weights(self.model)}

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        """Implement :meth:`~lightrft.rollout.engine.RolloutEngine.weight_dtypes`; every weight can be read."""
        return {name: weight.dtype for name, weight in compute_weights(self.model)}

    def fingerprints(self, names: list[str]) -> Tensor:
        """Compute the fingerprints of weights that the model computes with."""
        weights = dict(compute_weights(self.model))
        return fingerprints([Piece(weights[name]) for name in names]).cpu()

    def sleep(self) -> None:
        """Free the key-value cache, and the weights if they are a copy: :meth:`update_weights` overwrites them all. On
        a GPU both stay if they take a small part of its memory, and so do the graphs; then torch keeps its own too."""
        self._pause()
        if not self._small:
            self._release()
            if self.owns_model and not self._asleep:
                self._sizes = {weight: _resized(weight, 0) for weight in self.model.parameters()}
            self._give_back()
        self._ready &= not self.owns_model
        self._asleep = True

    def _give_back(self) -> None:
        """Give memory that is free to the device: what an update keeps must not lie in that of the next cache."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _small(self) -> bool:
        weights = sum(weight.nbytes for weight in self.model.parameters()) if self.owns_model else 0
        others = (self._space.nbytes if self._space else 0) + (self._fused.nbytes if self._fused else 0)
        return self._device.type == "cuda" and (weights + others) * HF_KEPT_PART <= total_memory(self._device)

    def wake(self) -> None:
        """Allocate the weights of a copy again; :meth:`update_weights` fills them."""
        for weight, size in self._sizes.items():
            _resized(weight, size)
        self._sizes, self._asleep = {}, False
        self._graphs.retry()

    def shutdown(self) -> None:
        """Free the cache, and the model if it is the engine's own."""
        self._pause()
        self._release()
        self._sizes, self._ready, self._asleep, self._probed = {}, False, True, None
        if self.owns_model:
            self.model = nn.Module()
        self._give_back()


def refuse_layers(config: PretrainedConfig) -> None:
    """Refuse models whose layers the cache has no place for, as a small copy of their decoder shows."""
    check_decoder(config.get_text_config())


def build_hf_engine(cfg: RolloutConfig, actor: ActorLanguage, strategy: StrategyBase, tokenizer: Any,
                    bf16: bool) -> HFEngine:
    """Build the engine of this rank, which shares it with no other."""
    return engine_on(actor, strategy.device, cfg, tokenizer, bf16)


def engine_on(actor: ActorLanguage, device: torch.device, cfg: RolloutConfig, tokenizer: Any, bf16: bool,
              fixed: bool = True) -> HFEngine:
    """Build an engine on the actor's own model when that is not sharded, else on a full copy built from its config.

    ``fixed``: all sequences have the frequencies of the longest that ``cfg`` allows; else those of each call.
    """
    source = actor.hf_model
    sharded = not all(map(is_whole, source.parameters()))
    model = _empty_copy(actor, device, torch.bfloat16 if bf16 else torch.float32) if sharded else source
    share = World.from_env().local_world_size if device.type == "cpu" else 1
    return HFEngine(model, eos_ids(source, tokenizer), cfg.engine_kv_mib * _MIB, owns_model=sharded, share=share,
                    max_seqs=cfg.engine_max_seqs, modality=actor.modality.of_a_copy() if sharded else actor.modality,
                    longest=cfg.longest if fixed else 0, one_kernel=cfg.fused_decode)


def eos_ids(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """Tokens that end a response: the tokenizer's and those of the model's generation config."""
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = declared if isinstance(declared, list) else [declared]
    return {i for i in (*ids, tokenizer.eos_token_id) if i is not None}


def _empty_copy(actor: ActorLanguage, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model of the same architecture, whose weights are still random; the random state does not change."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        config = copy.deepcopy(actor.hf_model.config)
        model = actor.modality.auto_class.from_config(config, attn_implementation=actor.modality.attention(config),
                                                      dtype=dtype, trust_remote_code=False)
    for name, buffer in actor.hf_model.named_buffers():  # the trainer's are not rounded
        model.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer.clone()
    actor.modality.adapt(model)
    use_onednn(model)
    return model.to(device).requires_grad_(False)
