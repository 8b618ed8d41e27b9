"""Python names of LightRFT that are other ones here: what an import of one of them does or says."""
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

# package, class, or call with keywords there -> name -> what does its work here
NAMES: dict[str, dict[str, str]] = {
    "lightrft.models": {
        "ScalarRewardModelVL": "lightrft.models.reward_model.RewardModel",
        "ScalarRewardModelAL": "lightrft.models.reward_model.RewardModel",
        "GenerativeRewardModelVL": "lightrft.rewards.generative.ComparingJudge",
        "get_llm_for_sequence_regression": "lightrft.models.loader.load_critic, load_reward_model",
        "get_vlm_for_sequence_regression": "lightrft.models.loader.load_critic, load_reward_model",
        "LogSigmoidLoss": "lightrft.trainer.offline.rm_trainer.RMTrainer, --loss sigmoid",
        "LogExpLoss": "lightrft.trainer.offline.rm_trainer.RMTrainer, --loss logexp",
        "HPSLoss": "lightrft.trainer.offline.rm_trainer.RMTrainer, --loss hps",
        "DPOLoss": "lightrft.trainer.offline.dpo_trainer.DPOTrainer",
        "KTOLoss": "lightrft.trainer.offline.kto_trainer.KTOTrainer",
        "KDLoss": "lightrft.trainer.offline.kd_trainer.KDTrainer",
        "PRMLoss": "lightrft.trainer.offline.prm_trainer.PRMTrainer",
        "PairWiseLoss": "lightrft.trainer.offline.rm_trainer.RMTrainer, --loss sigmoid",
        "VanillaKTOLoss": "lightrft.trainer.offline.kto_trainer.KTOTrainer",
        "ListMLELoss": "lightrft.trainer.offline.rm_trainer.RMTrainer",
        "RankNetLoss": "lightrft.trainer.offline.rm_trainer.RMTrainer",
        "ListCELoss": "lightrft.trainer.offline.rm_trainer.RMTrainer",
        "apply_lora_configuration": "lightrft.models.lora.add_lora",
        "find_all_linear_modules": "lightrft.models.lora.find_targets, --target_modules",
        "log_probs_from_logits": "lightrft.ops.logprobs.chunked_logprobs",
        "entropy_from_logits": "lightrft.ops.logprobs.chunked_logprobs",
        "create_high_entropy_mask": "lightrft.ops.selection.largest, --high_entropy_token_ratio",
        "reset_position_ids": "lightrft.ops.segment.position_ids",
        "masked_mean": "lightrft.ops.segment.masked_mean",
        "compute_approx_kl": "lightrft.ops.divergence.kl_estimate",
        "compute_reward": "lightrft.trainer.advantage_calculator.token_rewards",
        "unpacking_samples": "lightrft.types.Experience",
    },
    "lightrft.datasets": {
        "DatasetConfig": "lightrft.config.schema.DataConfig",
        "DatasetLoader": "lightrft.datasets.prompts_dataset.PromptsDataset",
        "RFTDatasetVL": "lightrft.datasets.prompts_dataset.PromptsDataset",
        "SFTDataset": "lightrft.datasets.sft_dataset.SFTDataset",
        "SFTDatasetVL": "lightrft.datasets.sft_dataset.SFTDataset",
        "RankDatasetVL": "lightrft.datasets.preferences.PairDataset",
        "RankDatasetAL": "lightrft.datasets.preferences.PairDataset",
        "GRMDataset": "lightrft.datasets.judgements.JudgementDataset",
        "ProcessRewardDataset": "lightrft.datasets.steps.StepDataset",
        "MathReasoningDataset": "lightrft.datasets.suites.load_suite, --eval_suite",
        "BaseDataHandler": "lightrft.datasets.pair_sources.PairSource",
        "load_multimodal_content": "lightrft.datasets.media_store.MediaStore",
        "extract_answer": "lightrft.utils.marked_answers.extract_answer",
        "zero_pad_sequences": "lightrft.types.Experience",
    },
    "lightrft.trainer": {
        "Experience": "lightrft.types.Experience",
        "ExperienceVL": "lightrft.types.Experience",
        "NaiveExperienceMakerVL": "lightrft.trainer.FastExperienceMaker",
        "MultimodalDataProcessor": "lightrft.datasets.media_store.MediaStore",
        "RewardComputationEngine": "lightrft.rewards.manager.RewardManager",
        "GAECalculator": "lightrft.trainer.advantage_calculator.AdvantageCalculator, --advantage_estimator",
        "REINFORCECalculator": "lightrft.trainer.advantage_calculator.AdvantageCalculator, --advantage_estimator",
        "REINFORCEBaselineCalculator":
        "lightrft.trainer.advantage_calculator.AdvantageCalculator, --advantage_estimator",
        "RLOOCalculator": "lightrft.trainer.advantage_calculator.AdvantageCalculator, --advantage_estimator",
        "GroupNormCalculator": "lightrft.trainer.advantage_calculator.AdvantageCalculator, --advantage_estimator",
        "CPGDCalculator": "lightrft.trainer.advantage_calculator.AdvantageCalculator, --advantage_estimator",
        "Samples": "lightrft.types.Sample",
        "SamplesVL": "lightrft.types.Sample",
        "BufferItem": "lightrft.types.Experience",
        "BufferItemVL": "lightrft.types.Experience",
        "fire_sampling": "lightrft.rollout.sampling.sample, --use_fire",
        "NaiveReplayBuffer": "lightrft.trainer.batch_plan.BatchPlan",
        "NaiveReplayBufferVL": "lightrft.trainer.batch_plan.BatchPlan",
        "make_experience_batch": "lightrft.trainer.batch_plan.MiniBatch",
        "split_experience_batch": "lightrft.trainer.batch_plan.select_micro_batch",
        "AdaptiveKLController": "lightrft.trainer.controllers.KLController, --kl_target",
        "FixedKLController": "lightrft.trainer.controllers.KLController",
        "PPOTrainerVL": "lightrft.trainer.PPOTrainer",
        "GRMTrainerVL": "lightrft.trainer.offline.grm_trainer.GRMTrainer",
        "SRMTrainerVL": "lightrft.trainer.RMTrainer",
        "SRMTrainerAL": "lightrft.trainer.RMTrainer",
    },
    "lightrft.strategy": {
        "get_fake_strategy": "lightrft.strategy.FakeStrategy",
        "BroadcastManager": "lightrft.rollout.weight_sync.sync.sync_weights",
        "get_vllm_engine": "lightrft.rollout.get_engine, --engine_type",
        "get_vllm_engine_for_rollout": "lightrft.rollout.get_engine, --engine_type",
        "get_sglang_engine": "lightrft.rollout.get_engine, --engine_type",
        "get_sglang_engine_for_rollout": "lightrft.rollout.get_engine, --engine_type",
        "EngineStatus": "lightrft.rollout.RolloutEngine",
        "is_engine": "lightrft.rollout.RolloutEngine",
        "is_actor": "lightrft.models.ActorLanguage",
        "GenLenAnalyser": "lightrft.trainer.metric_sums.response_metrics",
    },
    "lightrft.utils": {
        "get_strategy": "lightrft.strategy.get_strategy",
        "TrajectorySaver": "lightrft.utils.trajectory_saver.save_rollout, --save_trajectories",
        "create_trajectory_saver": "lightrft.utils.trajectory_saver.save_rollout, --save_trajectories",
        "remote_rm_fn": "lightrft.rewards.remote.RemoteReward, --remote_rm_url",
        "get_tokenizer": "lightrft.models.tokenizer.load_tokenizer",
        "get_tokenizer_processor_vl": "lightrft.models.tokenizer.load_tokenizer",
        "blending_datasets": "lightrft.datasets.loader.MixedDataset, --prompt_data_probs",
        "DistributedSampler": "lightrft.datasets.loader.PromptLoader",
        "init_logger": "lightrft.utils.logging.get_logger",
        "print_rank_0": "lightrft.utils.logging.get_logger",
        "get_current_device": "lightrft.utils.gpu.rank_device",
        "get_torch_profiler": "lightrft.utils.timer.Timer",
        "get_processor": "lightrft.models.tokenizer.load_tokenizer",
        "reward_normalization": "lightrft.inference.post_processing.normalise_rewards, --normalize_reward",
        "all_gather_and_flatten": "lightrft.strategy.StrategyBase.all_gather_object",
        "all_reduce_dict": "lightrft.strategy.StrategyBase.all_reduce",
    },
    "SPMDPPOTrainer": {
        "ppo_train": "lightrft.trainer.ppo_update.PolicyUpdate.run",
        "training_step": "lightrft.trainer.PPOTrainer.train_step",
        "save_logs_and_checkpoints": "lightrft.trainer.PPOTrainer.save",
    },
    "FastExperienceMaker": {
        "make_experience_list": "lightrft.trainer.FastExperienceMaker.make",
        "generate_samples": "lightrft.trainer.FastExperienceMaker.generate",
        "_get_return_advs": "lightrft.trainer.FastExperienceMaker.complete",
        "get_advantages_and_returns": "lightrft.trainer.FastExperienceMaker.complete",
    },
    "StrategyBase": {
        "setup_distributed": "lightrft.strategy.StrategyBase.setup",
        "prepare_models_and_optimizers": "lightrft.strategy.StrategyBase.prepare",
        "prepare_model": "lightrft.strategy.StrategyBase.prepare",
        "setup_inference_engine": "lightrft.rollout.get_engine",
        "gather_and_generate": "lightrft.rollout.generate",
        "update_engine_weights": "lightrft.rollout.weight_sync.sync.sync_weights",
        "maybe_sleep_inference_engine": "lightrft.rollout.RolloutEngine.sleep",
        "wakeup_inference_engine": "lightrft.rollout.RolloutEngine.wake",
        "offload_model": "lightrft.strategy.StrategyBase.offload",
        "reload_model": "lightrft.strategy.StrategyBase.reload",
        "save_ckpt": "lightrft.strategy.checkpoint.CheckpointManager.save",
        "load_ckpt": "lightrft.strategy.checkpoint.CheckpointManager.load",
        "all_gather": "lightrft.strategy.StrategyBase.all_gather_object",
        "is_rank_0": "lightrft.strategy.StrategyBase.is_main",
        "print": "lightrft.utils.logging.get_logger",
        "report_memory": "lightrft.utils.env.peak_memory_gib",
        "inference_engine": "lightrft.rollout.get_engine",
        "unwrap_model": "lightrft.strategy.base.Prepared",
        "get_rank": "lightrft.strategy.StrategyBase.rank",
        "config": "lightrft.strategy.get_strategy",
        "set_seed": "lightrft.config.schema.Config, --seed",
        "create_optimizer": "lightrft.strategy.StrategyBase.prepare",
        "get_ds_train_config": "lightrft.strategy.DeepspeedStrategy, --zero_stage",
        "get_ds_eval_config": "lightrft.strategy.DeepspeedStrategy, --zero_stage",
        "setup_dataloader": "lightrft.datasets.loader.PromptLoader",
        "prepare_reward_model": "lightrft.strategy.StrategyBase.prepare",
        "engine_generate_local": "lightrft.rollout.generate",
        "sync_and_clear_cache": "lightrft.strategy.StrategyBase.barrier",
        "maybe_offload_optimizer": "lightrft.strategy.StrategyBase.offload",
        "maybe_load_optimizer": "lightrft.strategy.StrategyBase.reload",
    },
    "StrategyConfig": {
        "get_extra_arg": "lightrft.strategy.get_strategy",
    },
    "StrategyConfig()": {
        "fsdp": "lightrft.config.schema.StrategyConfig.strategy",
    },
    "FastExperienceMaker()": {
        "prompt_max_len": "lightrft.config.schema.Config, --prompt_max_len",
        "kl_controller": "lightrft.trainer.controllers.KLController",
        "packing_samples": "lightrft.types.Experience",
        "processor": "lightrft.datasets.media_store.MediaStore",
    },
}
for _home, _ours, _names in (
    ("lightrft.datasets", "lightrft.datasets.pair_sources.PAIR_SOURCES, --train_data",
     "HPDv3Handler HPDv3PairHandler HPDv3GRMHandler ImageGenCoTRewardHandler ImageRewardDBHandler "
     "OmniRewardBenchT2IHandler OmniRewardBenchT2IPairHandler OmniRewardBenchT2IGRMHandler "
     "OmniRewardBenchT2VHandler OmniRewardBenchT2AHandler RapidataT2VHandler RapidataI2VHandler "
     "VideoGenRewardBenchPairHandler AudioAlpacaHandler GenAIBenchPairHandler GenAIBenchVideoPairHandler "
     "VideoDPOPairHandler RejectionSamplingT2VHandler"),
    ("StrategyConfig()", "lightrft.config.schema.Config",
     "seed max_norm micro_train_batch_size train_batch_size bf16 engine_type engine_tp_size enable_engine_sleep "
     "actor_learning_rate critic_learning_rate adam_betas l2 lr_warmup_ratio critic_pretrain remote_rm_url "
     "pretrain_data reward_running_norm reward_running_norm_minus_mean advantages_norm advantage_clip reward_clip "
     "micro_rollout_batch_size n_samples_per_prompt overlong_buffer overlong_buffer_len overlong_buffer_penalty_factor "
     "dynamic_sampling advantage_estimator use_kl_loss kl_estimator use_tensorboard"),
    ("StrategyConfig()", "lightrft.strategy.get_strategy",
     "grad_accum_dtype local_rank sp_size fused_linear_logprob dynamic_sampling_metric max_num_gen_batches "
     "mixed_mm_data use_mp_opt plot_every extra_args"),
    ("FastExperienceMaker()", "lightrft.trainer.logprob_pass.LogprobPass", "actor critic initial_model"),
    ("FastExperienceMaker()", "lightrft.rewards.manager.RewardManager",
     "reward_model remote_rm_url reward_fn reward_fn_label_map reward_recipe"),
):  # yapf: disable
    NAMES[_home].update(dict.fromkeys(_names.split(), _ours))

# module there -> the module here, which an import of it reads
MODULES = {
    "lightrft.models.actor_vl": "lightrft.models.actor_language",
    "lightrft.models.actor_al": "lightrft.models.actor_language",
    "lightrft.models.srm_vl": "lightrft.models.reward_model",
    "lightrft.models.srm_al": "lightrft.models.reward_model",
    "lightrft.models.grm_vl": "lightrft.rewards.generative",
    "lightrft.models.monkey_patch": "lightrft.models.attention",
    "lightrft.models.critic_language": "lightrft.models.loader",
    "lightrft.models.critic_vl": "lightrft.models.loader",
    "lightrft.models.utils": "lightrft.models.loader",
    "lightrft.models.monkey_patch.hf_generate_patch": "lightrft.rollout.hf",
    "lightrft.datasets.prompts_dataset_vl": "lightrft.datasets.prompts_dataset",
    "lightrft.datasets.rft_dataset": "lightrft.datasets.prompts_dataset",
    "lightrft.datasets.srm_dataset": "lightrft.datasets.preferences",
    "lightrft.datasets.grm_dataset": "lightrft.datasets.judgements",
    "lightrft.datasets.process_reward_dataset": "lightrft.datasets.steps",
    "lightrft.datasets.audio_alpaca": "lightrft.datasets.pair_sources",
    "lightrft.datasets.genai_bench": "lightrft.datasets.pair_sources",
    "lightrft.datasets.hpdv3": "lightrft.datasets.pair_sources",
    "lightrft.datasets.image_reward_db": "lightrft.datasets.pair_sources",
    "lightrft.datasets.imagegen_cot_reward": "lightrft.datasets.pair_sources",
    "lightrft.datasets.omnirewardbench": "lightrft.datasets.pair_sources",
    "lightrft.datasets.rapidata": "lightrft.datasets.pair_sources",
    "lightrft.datasets.rejection_sampling_t2v": "lightrft.datasets.pair_sources",
    "lightrft.datasets.videodpo": "lightrft.datasets.pair_sources",
    "lightrft.datasets.videogen_rewardbench": "lightrft.datasets.pair_sources",
    "lightrft.datasets.utils": "lightrft.datasets.pair_sources",
    "lightrft.datasets.sft_dataset_vl": "lightrft.datasets.sft_dataset",
    "lightrft.datasets.math_reasoning_benchmarks": "lightrft.datasets.suites",
    "lightrft.datasets.config": "lightrft.config.schema",
    "lightrft.trainer.ppo_trainer_vl": "lightrft.trainer.ppo_trainer",
    "lightrft.trainer.experience_maker": "lightrft.trainer.fast_exp_maker",
    "lightrft.trainer.experience_maker_vl": "lightrft.trainer.fast_exp_maker",
    "lightrft.trainer.replay_buffer": "lightrft.trainer.batch_plan",
    "lightrft.trainer.replay_buffer_vl": "lightrft.trainer.batch_plan",
    "lightrft.trainer.kl_controller": "lightrft.trainer.controllers",
    "lightrft.trainer.srm_trainer_vl": "lightrft.trainer.offline.rm_trainer",
    "lightrft.trainer.srm_trainer_al": "lightrft.trainer.offline.rm_trainer",
    "lightrft.trainer.grm_trainer_vl": "lightrft.trainer.offline.grm_trainer",
    "lightrft.trainer.audio_utils": "lightrft.datasets.waveform",
    "lightrft.trainer.fast_exp_maker_partial": "lightrft.trainer.partial_rollout",
    "lightrft.trainer.filter_weight": "lightrft.trainer.dynamic_sampling",
    "lightrft.trainer.filter_weight.filters": "lightrft.trainer.dynamic_sampling",
    "lightrft.trainer.filter_weight.manager": "lightrft.trainer.dynamic_sampling",
    "lightrft.trainer.filter_weight.metrics": "lightrft.trainer.dynamic_sampling",
    "lightrft.trainer.filter_weight.weights": "lightrft.trainer.dynamic_sampling",
    "lightrft.trainer.modality_utils": "lightrft.models.actor_modality",
    "lightrft.trainer.opd_utils": "lightrft.trainer.frozen_model",
    "lightrft.trainer.replay_buffer_utils": "lightrft.trainer.batch_plan",
    "lightrft.trainer.utils": "lightrft.trainer.advantage_calculator",
    "lightrft.reward": "lightrft.rewards",
    "lightrft.reward.base": "lightrft.rewards.base",
    "lightrft.reward.manager": "lightrft.rewards.manager",
    "lightrft.reward.model": "lightrft.rewards.neural",
    "lightrft.reward.rule": "lightrft.rewards.rules",
    "lightrft.evaluation": "lightrft.inference",
    "lightrft.evaluation.math_eval_utils": "lightrft.inference.accuracy",
    "lightrft.strategy.config": "lightrft.config.schema",
    "lightrft.strategy.fake_strategy": "lightrft.strategy.strategy",
    "lightrft.strategy.fsdp.fsdpv2": "lightrft.strategy.fsdp",
    "lightrft.strategy.deepspeed.deepspeed": "lightrft.strategy.deepspeed.deepspeed_strategy",
    "lightrft.strategy.vllm_utils": "lightrft.rollout.vllm",
    "lightrft.strategy.sglang_utils": "lightrft.rollout.sglang",
    "lightrft.strategy.strategy_base": "lightrft.strategy.base",
    "lightrft.strategy.deepspeed.deepspeed_utils": "lightrft.strategy.deepspeed.deepspeed_strategy",
    "lightrft.strategy.fsdp.fsdp_optimizer": "lightrft.strategy.optimizer",
    "lightrft.strategy.fsdp.fsdp_utils": "lightrft.strategy.fsdp",
    "lightrft.strategy.utils": "lightrft.strategy.base",
    "lightrft.strategy.utils.broadcast_utils": "lightrft.rollout.weight_sync.sync",
    "lightrft.strategy.utils.distributed_util": "lightrft.strategy.collectives",
    "lightrft.strategy.utils.statistic": "lightrft.trainer.metric_sums",
    "lightrft.strategy.utils.data_utils": "lightrft.datasets.loader",
    "lightrft.strategy.utils.parallel_utils": "lightrft.strategy.distributed",
    "lightrft.strategy.utils.optimizer_utils": "lightrft.strategy.optimizer",
    "lightrft.strategy.utils.ckpt_utils": "lightrft.strategy.checkpoint",
    "lightrft.strategy.vllm_utils.vllm_worker_wrap_no_ray": "lightrft.rollout.vllm.weights",
    "lightrft.strategy.sglang_utils.sglang_engine": "lightrft.rollout.sglang.engine",
    "lightrft.strategy.sglang_utils.sgl_model_saver": "lightrft.rollout.sglang.weights",
    "lightrft.utils.remote_rm_utils": "lightrft.rewards.remote",
    "lightrft.utils.distributed_sampler": "lightrft.datasets.loader",
    "lightrft.utils.logging_utils": "lightrft.utils.logging",
    "lightrft.utils.processor": "lightrft.models.tokenizer",
    "lightrft.utils.ckpt_scripts": "lightrft.cli.export",
    "lightrft.utils.utils": "lightrft.utils",
    "lightrft.utils.distributed_util": "lightrft.strategy.collectives",
    "lightrft.utils.profile_recorder": "lightrft.utils.timer",
    "lightrft.utils.ckpt_scripts.ds2hf": "lightrft.cli.export",
    "lightrft.utils.ckpt_scripts.fsdp2hf": "lightrft.cli.export",
}


def refuse_name(home: str, name: str, module: str = "") -> None:
    """Raise an ``ImportError`` that names ours, for a name that LightRFT has in the package ``home``, or in ``module``
    of it, and that is another one here.

    An ``AttributeError`` would lose its message in ``from HOME import NAME``.
    """
    if ours := NAMES.get(home, {}).get(name):
        raise ImportError(f"cannot import name {name!r} from {module or home!r}, a name of LightRFT; here: {ours}",
                          name=name)


class Elsewhere:
    """Attribute of a class of LightRFT that is another one here: its use is an ``AttributeError`` that names ours."""

    def __init__(self, name: str, ours: str) -> None:
        self.name, self.ours = name, ours

    def __get__(self, instance: object, owner: type) -> None:
        message = f"{owner.__name__}.{self.name} is a name of LightRFT; here: {self.ours}"
        raise AttributeError(message, name=self.name, obj=None)  # with an object, Python suggests another such name


def answers_names(cls: type[T]) -> type[T]:
    """Let ``cls`` answer the attributes and keywords of the class of its name in LightRFT that are other ones here."""
    for name, ours in NAMES[cls.__name__].items():
        setattr(cls, name, Elsewhere(name, ours))
    if keywords := NAMES.get(f"{cls.__name__}()"):
        setattr(cls, "__init__", _answers_keywords(cls.__name__, vars(cls)["__init__"], keywords))
    return cls


def _answers_keywords(owner: str, init: Callable[..., None], theirs: dict[str, str]) -> Callable[..., None]:
    """Return ``init``, which refuses the keywords ``theirs`` with the name of ours."""

    @wraps(init)
    def answer(self: object, *args: Any, **keywords: Any) -> None:
        for name in keywords:
            if name in theirs:
                raise TypeError(f"{owner}({name}=...) is a keyword of LightRFT; here: {theirs[name]}")
        init(self, *args, **keywords)

    return answer


class ModuleHere(SourceFileLoader):
    """Loader of a module of ours: a name of LightRFT that it lacks raises the error of :func:`refuse_name`."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module. One below which LightRFT has modules gets the path of a package, for their imports."""
        super().exec_module(module)
        home = module.__name__.rpartition(".")[0]

        def missing(name: str) -> Any:
            refuse_name(home, name, module.__name__)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        vars(module).setdefault("__getattr__", missing)
        if any(theirs.startswith(f"{module.__name__}.") for theirs in MODULES):
            vars(module).setdefault("__path__", [])


class MovedModule(Loader):
    """Loader of a module of LightRFT that has another path here: it has the names of ours, read at their use."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Let it read names from ours; a name that is another one here raises the error of :func:`refuse_name`."""
        theirs, ours = module.__name__, MODULES[module.__name__]

        def load(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            refuse_name(".".join(theirs.split(".")[:2]), name, theirs)
            try:
                return getattr(import_module(ours), name)
            except AttributeError:
                raise ImportError(f"cannot import name {name!r} from {theirs!r}, a module of LightRFT; here: {ours}",
                                  name=name) from None

        setattr(module, "__getattr__", load)


class Modules(MetaPathFinder):
    """Finder of the modules of LightRFT that have another path here, and of those of ours in its packages."""

    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname in MODULES:
            return ModuleSpec(fullname, MovedModule(), is_package=True)
        if fullname.rpartition(".")[0] not in NAMES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = ModuleHere(spec.loader.name, spec.loader.path)
        return spec


def ensure_video_input_available() -> None:
    """Do nothing: LightRFT's scripts call this before they import; the versions of transformers here need no change."""


sys.meta_path.insert(sys.meta_path.index(PathFinder), Modules())
