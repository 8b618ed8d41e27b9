"""Option groups that every trainer has, and the base of the option trees."""
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lightrft.config.openrlhf_words import OPENRLHF
from lightrft.config.options import COUNT, NON_NEGATIVE, POSITIVE, SHARE, option
from lightrft.config.tree import extended_in, flatten, group_from_args, options
from lightrft.utils.lightrft_names import answers_names

_WATCHDOG_FIRST_S = 10  # more than the watchdog waits on a rank that is in a collective


@dataclass
class PolicyModelConfig:
    """The trained model, its precision and its adapters."""
    pretrain: str | None = option(None, "HF folder or hub id of the policy to train", common=True, path="model",
                                  required="give an HF folder or hub id of the model to train")
    bf16: bool | None = option(
        None, "compute in bfloat16; master weights, log-probs and Adam's moments stay float32. With false, "
        "matrices are multiplied in float32 without TF32 (default: on CUDA, from Ampere on)")
    gradient_checkpointing: bool | str | None = option(
        None, "activations of every layer (towers included) that the backward pass computes again, to save memory: "
        "true all of them, selective all but the results of matrix products and of attention, false none (default: on "
        "CUDA the fastest that fits into the GPU by the plan)", ("selective", ), free=True)
    lora_rank: int = option(0, "rank of the LoRA adapters; 0 trains every weight", within=NON_NEGATIVE, common=True,
                            card="LoRA rank")
    lora_alpha: int = option(16, "LoRA scale numerator (the update is multiplied by alpha / rank)", within=COUNT,
                             needs="lora_rank 16")
    lora_dropout: float = option(0.0, "dropout on the LoRA input, in [0, 1)", within="[0, 1)", needs="lora_rank 16")
    target_modules: list[str] = option(
        ["all-linear"], "modules with LoRA adapters: the linear layers of parts of the model (all-linear or language: "
        "the decoder; visual, audio, projector), or modules by the end of their names, such as q_proj",
        needs="lora_rank 16")
    freeze_prefix: list[str] = option(
        [], "weights that are not trained: parts of the model (visual, audio, projector, language), or words of "
        "parameter names; a word that ends with ? is left out where the model has no such part, and the flag alone is "
        "visual?", hint="name the parts to freeze, e.g. visual or embed_tokens", bare="visual?")
    use_liger: bool | None = option(
        None, "replace RMSNorm, rotary and MLP kernels by Liger's (needs CUDA and the liger extra; default: on if both "
        "are available)", free=True)
    logprob_chunk_mib: int = option(
        0, "MiB of float32 logits in memory at once while log-probs are computed; 0: 1/64 of the memory of a GPU, at "
        "least 256, and 256 on a CPU", within=NON_NEGATIVE, free=True)

    @property
    def itemsize(self) -> int:
        """Bytes of a number in passes."""
        return 2 if self.bf16 else 4

    def chunk_mib(self, gpu_bytes: int) -> int:
        """Return ``logprob_chunk_mib``, with 0 resolved for a GPU of ``gpu_bytes`` of memory in all, or a CPU (0)."""
        return self.logprob_chunk_mib or max(256, (gpu_bytes >> 20) // 64)


@dataclass
class LogprobModelConfig(PolicyModelConfig):
    """A model that is trained on log-probs of tokens."""
    fused_logprobs: bool = option(
        False,
        "compute log-probs and entropy, and the gradient of the logits, in one pass over a chunk of logits each, "
        "by Triton kernels of this library; heads with a bias or a soft cap take the usual way. Off until a GPU has "
        "shown it right and faster (docs/gpu.md)", free=True)


@dataclass
class LaunchConfig:
    """The ranks of a run."""
    dist_timeout_s: int = option(1800, "seconds after which an unfinished collective stops the run", within=COUNT)
    silence_timeout_s: int = option(
        15, "seconds after which a rank that shows no sign of life, dead or standing still, stops the run; before its "
        "first step at least 60", within=COUNT)

    @property
    def collective_limit_s(self) -> int:
        """Seconds after which a collective raises; the watchdog names the rank that hangs before that."""
        return self.dist_timeout_s + _WATCHDOG_FIRST_S


@answers_names
@dataclass
class StrategyConfig(LaunchConfig):
    """Distribution of the models over the ranks."""
    strategy: str = option("auto", "auto: deepspeed with --zero_stage, else fsdp for more than one rank, else single",
                           ("auto", "single", "fsdp", "deepspeed"))
    fsdp_shard_size: int = option(
        0, "ranks that share one copy of the weights (HSDP when smaller than the world); 0: all ranks",
        within=NON_NEGATIVE, read_by=("fsdp", ))
    fsdp_cpu_offload: bool = option(
        False, "keep sharded parameters, gradients and optimizer state in host memory (FSDP CPUOffloadPolicy)",
        read_by=("fsdp", ))
    grad_sync: str = option(
        "auto", "fsdp: ranks sum gradients in every micro-batch, or only in the last one of an optimizer step; until "
        "then each rank holds full float32 gradients. auto: last if they take at most an eighth of the device's memory",
        ("auto", "every", "last"), read_by=("fsdp", ))
    zero_stage: int = option(
        2, "deepspeed: state that is sharded over the ranks: 1 the optimizer state, 2 also the gradients, 3 also the "
        "weights; 0 nothing. Written without --strategy, it selects deepspeed", within="[0, 3]",
        read_by=("deepspeed", ))
    zpg: int = option(
        1, "deepspeed with --zero_stage 3: number of neighbouring ranks that together hold a second copy of the "
        "weights for the backward pass (hpZ); 1: none", within=COUNT, read_by=("deepspeed", ))
    overlap_comm: bool = option(False,
                                "deepspeed: reduce gradients and gather weights during computation, in extra buffers",
                                read_by=("deepspeed", ))
    adam_offload: bool = option(
        False, "keep the optimizer state in host memory; a step moves it to the device in parts (deepspeed: the update "
        "runs on the host)")

    def resolved(self, world_size: int) -> str:
        """Return ``strategy`` for a run of ``world_size`` ranks, with "auto" resolved."""
        return self.strategy if self.strategy != "auto" else ("fsdp" if world_size > 1 else "single")

    def divides_weights(self, world_size: int) -> bool:
        """Return True if a rank holds only its part of the weights."""
        chosen = self.resolved(world_size)
        return chosen == "fsdp" or chosen == "deepspeed" and self.zero_stage == 3

    @classmethod
    def from_args(cls, args: Any) -> "StrategyConfig":
        """Build the group from an ``argparse.Namespace`` made with :func:`lightrft.utils.cli_args.add_arguments`."""
        return group_from_args(cls, args)


@extended_in("strategy/optimizers")
@dataclass
class OptimConfig:
    """The optimizer and its batches."""
    train_batch_size: int = option(128, "samples per optimizer step, over all ranks", within=COUNT, common=True,
                                   card="samples per optimizer step")
    micro_train_batch_size: int = option(
        0, "samples per forward / backward pass and rank, at most; 0: limited only by --max_tokens_per_micro_batch",
        within=NON_NEGATIVE, free=True)
    max_tokens_per_micro_batch: int = option(
        16384, "tokens per forward pass, at most (a longer sample gets its own pass); "
        "lower it to save memory", within=COUNT, free=True, common=True)
    max_steps: int = option(0, "stop after this many steps; 0: after all passes over the data", within=NON_NEGATIVE,
                            free=True, common=True)
    lr_scheduler: str = option("cosine_with_min_lr", "learning-rate schedule after warm-up",
                               ("constant", "linear", "cosine_with_min_lr"))
    lr_warmup_ratio: float = option(0.03, "share of the optimizer steps spent warming up", within=SHARE)
    lr_min_ratio: float = option(0.1, "floor of the cosine schedule, as a share of the peak", within=SHARE,
                                 needs="lr_scheduler cosine_with_min_lr")
    optim: str = option(
        "adamw", "optimizer: adamw, adamw_8bit, sgd, or the name that a --plugin registers. adamw_8bit stores Adam's "
        "moments in 8 bits, in blocks within the rows of matrices (needs the bitsandbytes extra); vectors, and rows "
        "that are not a multiple of 64, stay float32")
    adam_betas: list[float] = option([0.9, 0.95], "Adam's betas", within="[0, 1)")
    l2: float = option(0.0, "weight decay (norms and biases are excluded)", within=NON_NEGATIVE)
    max_norm: float = option(1.0, "clip the global gradient norm at this; 0 is off", within=NON_NEGATIVE)
    max_bad_steps: int = option(3, "stop after this many optimizer steps in a row with a non-finite loss or gradient",
                                within=COUNT, free=True)
    seed: int = option(42, "random seed", within="[0, 4294967295]", card="seed")


@dataclass
class BalanceConfig:
    """The load of the experts of a mixture."""
    aux_loss_coef: float = option(
        0.0,
        "mixtures of experts: weight of the routers' load-balancing loss, over the whole batch of an optimizer step; "
        "with several micro-batches per rank it costs one more forward pass; 0 is off", within=NON_NEGATIVE)


@dataclass
class CheckpointConfig:
    """Outputs of the run, checkpoints and resuming."""
    save_path: str = option("./ckpt", "folder of the run: metrics, curve, rollouts, checkpoints and the final model",
                            common=True)
    ckpt_path: str | None = option(None, "folder of the resumable checkpoints (default: SAVE_PATH/checkpoints)")
    save_steps: int = option(-1, "rollout steps between checkpoints; -1: only when stopped or done", within="[-1, inf)",
                             common=True)
    max_ckpt_num: int = option(3, "keep at most this many checkpoints (plus the best one, with --best_metric)",
                               within=COUNT)
    max_ckpt_mem: float = option(1e8, "keep at most this many GiB of checkpoints", within=POSITIVE)
    best_metric: str | None = option(None, "metric whose best checkpoint is always kept, e.g. eval/all/pass@1")
    async_save: bool = option(True, "write checkpoints in the background")
    load_checkpoint: bool = option(False, "resume from the newest complete checkpoint in --ckpt_path", common=True)
    save_hf_ckpt: bool = option(False, "also write an HF copy of the policy with every checkpoint")
    disable_ckpt: bool = option(False, "write no resumable checkpoints")


@dataclass
class SinkConfig:
    """Destinations of the metrics."""
    logging_steps: int = option(1, "steps between lines of the step table", within=COUNT)
    report: bool = option(True, "write SAVE_PATH/report.html during the run: curves and sampled solutions as one page")
    use_tensorboard: bool = option(False, "write TensorBoard events to SAVE_PATH/tensorboard",
                                   hint="the flag takes no folder: events go to SAVE_PATH/tensorboard")
    use_wandb: bool = option(False, "log to Weights & Biases (needs the wandb extra)",
                             hint="files and Python take no key: set WANDB_API_KEY in the environment")
    wandb_project: str = option("lightrft", "project of W&B and the other trackers")
    wandb_run_name: str | None = option(None, "run name of W&B and the other trackers")
    wandb_group: str | None = option(None, "W&B group")
    wandb_org: str | None = option(None, "W&B entity")
    use_trackio: bool = option(False, "log to trackio (needs the trackio extra)")
    trackers: list[str] = option([], "further trackers, through accelerate; each needs its package. Project and run "
                                 "name come from the options of W&B, the rest from environment variables",
                                 ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab"))


class Tree:
    """Base of the option trees: the groups that every trainer has, and facts that its checks depend on."""
    model: PolicyModelConfig
    strategy: StrategyConfig
    train: OptimConfig
    checkpoint: CheckpointConfig
    log: SinkConfig
    PREFLIGHT: ClassVar[str]  # class of its checks and estimates, derived from lightrft.preflight.base.Preflight
    BATCH: ClassVar[str]  # option that sets the size of the batches drawn from the data
    METRICS: ClassVar[tuple[str, ...]]  # first parts of the names of the metrics that a checkpoint has
    TRAINING: ClassVar[str]  # kind of the training, in words
    TAG: ClassVar[str] = ""  # of the hub, for the kind of the training; empty: the first of METRICS
    TASK: ClassVar[str] = ""  # of the hub, that a trained model does; empty: it answers with text
    LENGTHS: ClassVar[tuple[str, ...]] = ()  # options that bound the tokens of a sequence together
    ROW_LIMITS: ClassVar[tuple[str, ...]] = ()  # options that bound the tokens of a row of text that is trained
    SEQUENCES: ClassVar[int] = 1  # of a sample, which stay in one micro-batch
    # flags of other manuals -> OPTION, OPTION=VALUE or OPTION+=ITEM; before it other options that follow, unless they
    # are written too, and OPTION?OTHER where OTHER is written
    SYNONYMS: ClassVar[dict[str, str]] = OPENRLHF
    GRANTS: ClassVar[dict[str, tuple[str, str]]] = {  # flags of theirs -> values that ask for what holds, and that
        "local_rank": (r"-?\d+", "the launcher (torchrun, deepspeed) sets the rank in the environment"),
    }

    @property
    def folder(self) -> Path | None:
        """Folder of the run; None: it writes nothing."""
        return Path(self.checkpoint.save_path)

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        return self.train.seed

    @property
    def placement(self) -> StrategyConfig:
        """Distribution of the models over the ranks."""
        return self.strategy

    @property
    def sequence_len(self) -> int:
        """Most tokens of a sequence in training."""
        values = flatten(self)
        return sum(values[name] for name in self.LENGTHS)

    @property
    def held_out(self) -> list[str]:
        """Entries of ``eval_data`` and, where the tree has it, ``eval_suite``; empty: nothing is held out."""
        values = flatten(self)
        return [*values["eval_data"], *values.get("eval_suite", ())]

    def missing(self) -> Iterator[str]:
        """Yield one sentence per option that is not set and without which nothing runs."""
        values = flatten(self)
        for name, known in options(self).items():
            if known.required and not values[name]:
                yield f"--{name} is missing: {known.required}"

    def pass_tokens(self, samples: int) -> int:
        """Return the most tokens that a forward pass over ``samples`` computes."""
        return samples * self.sequence_len * self.SEQUENCES


def grants(tree: type) -> dict[str, tuple[str, str]]:
    """Merge ``GRANTS`` of a tree and its bases; a script's own tree has those of all trees."""
    bases = reversed(tree.__mro__ if issubclass(tree, Tree) else Tree.__mro__)
    return {name: held for base in bases for name, held in vars(base).get("GRANTS", {}).items()}
