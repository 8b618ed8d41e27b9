"""Flags of other trainers that are not options here: translated, accepted with a notice, or refused with the remedy."""
import re
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Any

from lightrft.config.counterparts import ELSEWHERE, SIBLINGS
from lightrft.utils.errors import did_you_mean
from lightrft.utils.logging import get_logger

CUTOFF = 0.75  # likeness of a typing error; options share words, and less alike ones mean something else
# flag -> (option, value)
ALIASES: dict[str, tuple[str, Any]] = {
    "fsdp": ("strategy", "fsdp"),
    "disable_ds_ckpt": ("disable_ckpt", True),
    "enable_engine_sleep": ("engine_sleep", True),
    "disable_engine_sleep": ("engine_sleep", False),
    "trajectory_analysis": ("mark_high_entropy_tokens", True),
}


def of_alias(name: str, value: Any) -> tuple[str, Any]:
    """Return the option and the value that a flag of ``ALIASES`` means where it is True; any other pair as it is."""
    return ALIASES[name] if name in ALIASES and value is True else (name, value)


_ALWAYS_PACKED = "batches are always packed, without padding"
_SEQUENCES = "sequence parallelism is not part of this release; use --max_tokens_per_micro_batch to bound memory"
_FLASH = "packed attention is always on and uses flash-attn when it is installed"
_ONE_RANK = "a sequence and a layer are always whole on one rank"
_NEVER_READ = "LightRFT never reads it; --advantage_estimator and --advantages_norm say what is normalised"
_RM_ENGINE = "reward models in an engine are not part of this release; serve the model and use --remote_rm_url"
_MULTIMODAL = "the modality follows from the model, and rows with and without media may be mixed"
_ADVANTAGE = "it never had an effect; use --advantage_estimator, and --advantages_norm to whiten"
_LENGTHS = "response lengths are in metrics.jsonl under rollout/response_len/*; drop the flag"
_CARD = "the model card is written from the run; drop the flag"
_WORKERS = "data are prepared ahead of time in background threads; drop the flag"
_OWN_ENGINE = "the engine shares the GPUs of training and is started with it; use --engine_type"
_REENTRANT = "checkpointing is always non-reentrant; use --gradient_checkpointing"
_AVERAGE = "an averaged copy of the weights is not part of this release; use --best_metric to keep the best one"
_AGENT = "use --environment FILE, which takes such a file as it is (docs/environments.md)"
_SHARED = "all models share the GPUs of training, which torchrun starts: --nproc-per-node, --nnodes"
_BUCKETS = "weights are sent to the engine in buckets of --sync_bucket_mib; drop the flag"
_DIVISIONS = ("pipeline_model_parallel_size", "pipeline_parallel_size", "tensor_model_parallel_size",
              "context_parallel_size", "expert_model_parallel_size", "expert_parallel_size", "pp_size", "cp_size",
              "ep_size", "ulysses_sequence_parallel_size")
_UNDIVIDED = ("training divides the parameters of all layers, not single layers, experts or sequences; use --strategy "
              "fsdp, or deepspeed with --zero_stage 3")
_ANY_RANKS = "a checkpoint loads on any number of ranks and with any --strategy"
_PREFIXES = "vLLM and SGLang keep the prefixes that prompts share"
_MUON = "the optimizer is --optim adamw, adamw_8bit or sgd; drop the flag"
_SAMPLED = "the teacher gives the log-prob of each token that the student has drawn"
_STUDENT = "distillation on the student's own answers is reinforcement learning: lightrft train with --teacher_model"

# flag -> the fact that it asks for, which always holds
GRANTED: dict[str, str] = {
    "packing_samples": _ALWAYS_PACKED,
    "use_remove_padding": _ALWAYS_PACKED,
    "packing": _ALWAYS_PACKED,
    "padding_free": _ALWAYS_PACKED,
    "flash_attn": _FLASH,
    "attn_implementation": _FLASH,
    "attn_impl": _FLASH,
    "enable_prefix_caching": _PREFIXES,
    "vllm_enable_prefix_caching": _PREFIXES,
    "fused_linear_logprob": "log-probs are always fused with the head, in chunks of --logprob_chunk_mib",
    "compute_fp32_loss": "scores and losses are always float32",
    "use_mp_opt": "master weights and optimizer state are always float32; --bf16 is the dtype of computing",
    "disable_dropout": "dropout is off in every model, but for --lora_dropout",
    "meta_init": "models are always built without a spare copy",
    "actor_init_on_gpu": "models are placed by the strategy",
    "gc_collect_after_offload": "memory is handed back whenever it is offloaded",
    "colocate_all": _SHARED,
    "colocate_all_models": _SHARED,
    "colocate_actor_ref": _SHARED,
    "colocate_critic_reward": _SHARED,
    "text_only": _MULTIMODAL,
    "mixed_mm_data": _MULTIMODAL,
    "no_shard_vit": _MULTIMODAL,
    "use_ds_universal_ckpt": _ANY_RANKS,
    "use_universal_ckpt": _ANY_RANKS,
    "use_hf": "a hub id is one of Hugging Face, or of its mirror in HF_ENDPOINT",
    "unpaired_preference": "lightrft kto always reads single answers, each with its label",
    "margin_loss": "the loss of a reward model reads the column margin where rows have it",
}
_ROLES = [f"{role}_num_{unit}" for role in ("actor", "critic", "ref", "reward") for unit in ("nodes", "gpus_per_node")]
# flag -> the form of its values that ask for what always holds, and the fact; other values are refused
GRANTED_VALUES: dict[str, tuple[str, str]] = {
    "sp_size": ("1", _ONE_RANK),
    "ring_attn_size": ("1", _ONE_RANK),
    "ring_head_stride": ("1", _ONE_RANK),
    "ring_attn_head_stride": ("1", _ONE_RANK),
    "sequence_parallel_size": ("1", _ONE_RANK),
    "ds_tensor_parallel_size": ("1", _ONE_RANK),
    **dict.fromkeys(_DIVISIONS, ("1", _ONE_RANK)),
    "grad_accum_dtype": ("(?i)fp32|float32|none", "gradients are always accumulated in float32"),
    "chunk_size": (r"[1-9]\d*", "log-probs do not depend on it; --logprob_chunk_mib bounds their memory"),
    "repetition_penalty": (r"1(\.0*)?", "1 is no penalty; in training responses are drawn from the model's own "
                           "distribution"),
    "opd_topk": ("0", _SAMPLED),
    "opd_kl_estimator":
    ("k[123]", "it changes no gradient; reward/teacher_kl is the mean of log p_student - log p_teacher"),
    "rollout_tasks_per_gpu": (r"\d+", _SHARED),
    "vllm_sync_backend": ("(?i)nccl|gloo|hccl", "training and engine share their devices; weights pass in buckets of "
                          "--sync_bucket_mib"),
    "normalize_advantages": ("(?i)true", _NEVER_READ),
    "use_sequence_rewards": ("(?i)true", _NEVER_READ),
    "print_replay_buffer_stats": ("(?i)true", "rollout statistics are in the step table and metrics.jsonl"),
    "disable_logprobs_flashattn": ("(?i)true", "log-probs come from one fused, chunked kernel, without flash-attn"),
    **dict.fromkeys(_ROLES, (r"\d+", _SHARED)),
}
# flag -> (the option without which it asks for nothing, why that is so)
GRANTED_WITHOUT: dict[str, tuple[str, str]] = {
    "rm_use_engine": ("reward_pretrain", "there is no reward model"),
    "rm_engine_cudagraph": ("reward_pretrain", "there is no reward model"),
    "rm_engine_tp": ("reward_pretrain", "there is no reward model"),
}
_DENIED = ("false", "0", "no", "off", "none", "eager")  # values that ask for the opposite

REFUSED: dict[str, str] = {
    # rollout engines
    "rm_use_engine": _RM_ENGINE,
    "rm_engine_cudagraph": _RM_ENGINE,
    "rm_engine_tp": _RM_ENGINE,
    "max_len": "use --prompt_max_len and --generate_max_len",
    "micro_batch_size": "the engine decides how many sequences it runs at once; --engine_max_seqs bounds them",
    "repetition_penalty": "in training responses are drawn from the model's own distribution; drop the flag",
    # attention, packing, log-probs
    "disable_logprobs_flashattn":
    "log-probs come from one fused, chunked kernel; use --logprob_chunk_mib to bound its memory",
    "chunk_size": "use --logprob_chunk_mib",
    # distribution
    "sp_size": _SEQUENCES,
    "ring_attn_size": _SEQUENCES,
    "ring_head_stride": _SEQUENCES,
    "ring_attn_head_stride": _SEQUENCES,
    "sequence_parallel_size": _SEQUENCES,
    "ds_tensor_parallel_size": "tensor parallelism is not part of training here; to shard parameters use --strategy "
    "deepspeed with --zero_stage 3",
    **dict.fromkeys(_DIVISIONS, _UNDIVIDED),
    "deepcompile": "graphs are not compiled; drop the flag",
    "grad_accum_dtype": "gradients are always accumulated in float32; drop the flag",
    "move_model_batches": _BUCKETS,
    "vllm_sync_backend": _BUCKETS,
    "vllm_sync_with_ray": _BUCKETS,
    "experts_implementation": "experts are computed by the model's own code; drop the flag",
    "full_determinism":
    "--seed fixes data, samples and dropout; GPU kernels may still round differently; drop the flag",
    # models
    "load_in_4bit": "4-bit weights are not part of this release; use --bf16, and --lora_rank to train",
    "gradient_checkpointing_use_reentrant": _REENTRANT,
    "gradient_checkpointing_reentrant": _REENTRANT,
    "enable_ema": _AVERAGE,
    "ema_beta": _AVERAGE,
    "muon_lr": _MUON,
    "muon_momentum": _MUON,
    "muon_ns_steps": _MUON,
    "muon_nesterov": _MUON,
    "muon_no_nesterov": _MUON,
    "adam_eps": "Adam's epsilon is 1e-8; drop the flag",
    "disable_fast_tokenizer": "only fast tokenizers are supported; drop the flag",
    "use_ms": "download the model first and give its folder to --pretrain",
    "model_author": _CARD,
    "model_name": _CARD,
    # data
    "system_prompt_path": "use --system_prompt \"$(cat FILE)\"",
    "streaming": "rows are tokenized once, at the start; --max_samples bounds them",
    "load_from_cache_file": "rows are tokenized at every start; drop the flag",
    "dataset_num_proc": _WORKERS,
    "dataloader_num_workers": _WORKERS,
    "truncation_strategy": "rows beyond the limit are left out and counted, never cut; drop the flag",
    # preferences
    "vanilla_loss": "the KL of lightrft kto always comes from mismatched pairs; drop the flag",
    # reward and algorithm
    "center_rewards_coefficient": "--normalize_reward centres the rewards of a trained model; drop the flag",
    "normalize_reward_for_critic": "it never had an effect; use --reward_running_norm",
    "vf_coef": "the critic is a separate model; use --critic_learning_rate",
    "missing_eos_penalty": "use --mask_truncated or --overlong_buffer",
    "stop_properly_penalty_coef": "use --mask_truncated or --overlong_buffer",
    "agent_func_path": _AGENT,
    "sync_ref_model": "the reference stays as it is; use --ref_pretrain to choose it",
    "num_sample_generations": "use --print_samples and --save_trajectories",
    "async_generate": _OWN_ENGINE,
    "vllm_server_host": _OWN_ENGINE,
    "vllm_server_port": _OWN_ENGINE,
    "lmbda": _STUDENT,
    "seq_kd": _STUDENT,
    "opd_topk": f"{_SAMPLED}; drop the flag",
    "opd_kd_temperature": f"{_SAMPLED}; drop the flag",
    "use_cpg_loss": "use --policy_loss cpgd, which has the drift term, or --recipe cpgd",
    "use_gspo": "it never had an effect; use --policy_loss gspo, or --recipe gspo",
    "use_gmpo": "use --policy_loss gmpo, or --recipe gmpo",
    "normalize_advantages": _ADVANTAGE,
    "use_sequence_rewards": _ADVANTAGE,
    # output
    "save_only_model": "the model is always exported at the end; --disable_ckpt writes no checkpoints",
    "log_dir": "everything is written below --save_path; use that",
    "ckpt_path_local": "use --ckpt_path",
    "plot_every": _LENGTHS,
    "print_replay_buffer_stats": "rollout statistics are in the step table and metrics.jsonl; use --logging_steps",
}

_granted: ContextVar[dict[str, list[str]] | None] = ContextVar("granted", default=None)


@contextmanager
def one_line_per_fact() -> Iterator[dict[str, list[str]]]:
    """Log what is granted in the block at its end: a line for each fact, with all flags that ask for it, each once.
    Yields these flags by fact."""
    granted: dict[str, list[str]] = {}
    token = _granted.set(granted)
    try:
        yield granted
    finally:
        _granted.reset(token)
    for fact, names in granted.items():
        get_logger().info("%s %s no effect: %s", ", ".join(f"--{name}" for name in names),
                          "has" if len(names) == 1 else "have", fact)


def _tell(name: str, fact: str) -> None:
    """Log that a flag has no effect, or add it to :func:`one_line_per_fact`."""
    if (granted := _granted.get()) is None:
        get_logger().info("--%s has no effect: %s", name, fact)
    elif name not in granted.setdefault(fact, []):
        granted[fact].append(name)


def fact_of(name: str, value: Any, values: Mapping[str, tuple[str, str]] = GRANTED_VALUES) -> str:
    """Return what a flag of another trainer asks for with ``value``, if that always holds; else an empty string.

    Args:
        values: flag -> the form of its values that ask for what always holds, and the fact.
    """
    form, fact = values.get(name, ("", ""))
    if re.fullmatch(form, str(value)):
        return fact
    return "" if str(value).lower() in _DENIED else GRANTED.get(name, "")


def grant(name: str, value: Any, of_tree: Mapping[str, tuple[str, str]]) -> bool:
    """Accept a flag that asks for what always holds (:func:`fact_of`; ``of_tree``: ``GRANTS`` of a tree), and log that;
    else return False."""
    fact = fact_of(name, value, {**GRANTED_VALUES, **of_tree})
    if fact:
        _tell(name, fact)
    return bool(fact)


def grant_without(flags: dict[str, Any]) -> Iterator[str]:
    """Take the flags of :data:`GRANTED_WITHOUT` out of ``flags``; log a notice, or yield the refusal, for each."""
    for name, (option, reason) in GRANTED_WITHOUT.items():
        value = str(flags.pop(name, "false"))
        if value.lower() not in _DENIED and not flags.get(option):
            _tell(name, reason)
        elif value.lower() not in _DENIED:
            yield str(refusal(name))


def refusal(name: str, known: Container[str] = ()) -> str | None:
    """Explain why a flag of another trainer or command, ``name`` (without dashes), is refused, and what to use instead.

    Args:
        known: options of the tree; a counterpart is named if it is one of them.

    Returns:
        None for a name that is not known, or has no counterpart in the tree.
    """
    asked = name.replace("-", "_")
    if asked in GRANTED:
        return f"--{name} is not an option here: {GRANTED[asked]}; drop the flag"
    if asked in REFUSED:
        return f"--{name} is not an option here: {REFUSED[asked]}"
    for names, home in ((ELSEWHERE, "trainer"), (SIBLINGS, "command")):
        for remedy in names.get(asked.removeprefix("actor_rollout_ref."), "").split(" | "):
            flag = re.match(r"--(\w+)", remedy)
            if remedy and (flag is None or flag[1] in known):
                return f"{name} is an option of another {home}; here: {remedy}"
    return _dotted_refusal(asked, known)


def nearest(name: str, known: Collection[str], prefix: str = "") -> str:
    """Return what to add to the error for an unknown ``name``: the nearest option of ``known``, written with
    ``prefix``, else the counterpart of the nearest one of another trainer; an empty string if there is none."""
    asked = name.replace("-", "_")
    theirs = get_close_matches(asked, list(ELSEWHERE), n=1, cutoff=0.9)
    text = refusal(theirs[0], known) if theirs else None
    alike = [option for option in known if option.startswith("no_") == asked.startswith("no_")]  # never the opposite
    return did_you_mean(asked, alike, prefix, CUTOFF) or (f"; {text}" if text else "")


def _dotted_refusal(name: str, known: Container[str]) -> str | None:
    """Explain a flag of OpenRLHF, GROUP.NAME or GROUP.PART.NAME_enable, by the longest end of it that is known."""
    parts = name.removesuffix("_enable").split(".")
    for flat in ("_".join(parts[start:]) for start in range(len(parts) * (len(parts) > 1))):
        if flat in known:
            return f"{name} is an option of another trainer; here: --{flat}"
        if text := refusal(flat, known):
            return text.replace(flat, name, 1)
    return None
