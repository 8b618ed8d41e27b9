"""Python names of LightRFT that are other ones here: what an import of one of them does or says."""
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# package or class there -> name -> what does its work here
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
        "apply_lora_configuration": "lightrft.models.lora.add_lora",
        "log_probs_from_logits": "lightrft.ops.logprobs.chunked_logprobs",
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
    },
    "lightrft.trainer": {
        "Experience": "lightrft.types.Experience",
        "ExperienceVL": "lightrft.types.Experience",
        "NaiveExperienceMakerVL": "lightrft.trainer.FastExperienceMaker",
        "NaiveReplayBuffer": "lightrft.trainer.replay_buffer.ReplayBuffer",
        "NaiveReplayBufferVL": "lightrft.trainer.replay_buffer.ReplayBuffer",
        "AdaptiveKLController": "lightrft.trainer.controllers.KLController, --kl_target",
        "FixedKLController": "lightrft.trainer.controllers.KLController",
        "PPOTrainerVL": "lightrft.trainer.PPOTrainer",
        "GRMTrainerVL": "lightrft.trainer.offline.grm_trainer.GRMTrainer",
        "SRMTrainerVL": "lightrft.trainer.RMTrainer",
        "SRMTrainerAL": "lightrft.trainer.RMTrainer",
    },
    "lightrft.strategy": {
        "get_fake_strategy": "lightrft.strategy.FakeStrategy",
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
        "gather_and_generate": "lightrft.rollout.RolloutEngine.generate",
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
    },
}

# module there -> the module here, which an import of it reads
MODULES = {
    "lightrft.models.actor_vl": "lightrft.models.actor_language",
    "lightrft.models.actor_al": "lightrft.models.actor_language",
    "lightrft.models.srm_vl": "lightrft.models.reward_model",
    "lightrft.models.srm_al": "lightrft.models.reward_model",
    "lightrft.models.grm_vl": "lightrft.rewards.generative",
    "lightrft.models.monkey_patch": "lightrft.models.attention",
    "lightrft.datasets.prompts_dataset_vl": "lightrft.datasets.prompts_dataset",
    "lightrft.datasets.rft_dataset": "lightrft.datasets.prompts_dataset",
    "lightrft.datasets.srm_dataset": "lightrft.datasets.preferences",
    "lightrft.datasets.grm_dataset": "lightrft.datasets.judgements",
    "lightrft.datasets.process_reward_dataset": "lightrft.datasets.steps",
    "lightrft.trainer.ppo_trainer_vl": "lightrft.trainer.ppo_trainer",
    "lightrft.trainer.experience_maker": "lightrft.trainer.fast_exp_maker",
    "lightrft.trainer.experience_maker_vl": "lightrft.trainer.fast_exp_maker",
    "lightrft.trainer.replay_buffer_vl": "lightrft.trainer.replay_buffer",
    "lightrft.trainer.kl_controller": "lightrft.trainer.controllers",
    "lightrft.trainer.srm_trainer_vl": "lightrft.trainer.offline.rm_trainer",
    "lightrft.trainer.srm_trainer_al": "lightrft.trainer.offline.rm_trainer",
    "lightrft.trainer.grm_trainer_vl": "lightrft.trainer.offline.grm_trainer",
    "lightrft.reward": "lightrft.rewards",
    "lightrft.evaluation": "lightrft.inference",
    "lightrft.evaluation.math_eval_utils": "lightrft.inference.accuracy",
    "lightrft.strategy.config": "lightrft.config.schema",
    "lightrft.strategy.fake_strategy": "lightrft.strategy.strategy",
    "lightrft.strategy.fsdp.fsdpv2": "lightrft.strategy.fsdp",
    "lightrft.strategy.deepspeed.deepspeed": "lightrft.strategy.deepspeed.deepspeed_strategy",
    "lightrft.strategy.vllm_utils": "lightrft.rollout.vllm",
    "lightrft.strategy.sglang_utils": "lightrft.rollout.sglang",
    "lightrft.utils.remote_rm_utils": "lightrft.rewards.remote",
    "lightrft.utils.distributed_sampler": "lightrft.datasets.loader",
    "lightrft.utils.logging_utils": "lightrft.utils.logging",
    "lightrft.utils.processor": "lightrft.models.tokenizer",
    "lightrft.utils.ckpt_scripts": "lightrft.cli.export",
}


def refuse_name(home: str, name: str) -> None:
    """Raise an ``ImportError`` that names ours, for a name that LightRFT has in ``home`` and that is another one here.

    An ``AttributeError`` would lose its message in ``from HOME import NAME``.
    """
    if ours := NAMES.get(home, {}).get(name):
        raise ImportError(f"cannot import name {name!r} from {home!r}, a name of LightRFT; here: {ours}", name=name)


class MovedModules(MetaPathFinder, Loader):
    """Importer of the modules of LightRFT that have another path here: each has the names of ours, read at their use;
    a name that is another one here raises the error of :func:`refuse_name`."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in MODULES else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        theirs, ours = module.__name__, MODULES[module.__name__]

        def load(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            for home in NAMES:
                if theirs.startswith(f"{home}."):
                    refuse_name(home, name)
            try:
                return getattr(import_module(ours), name)
            except AttributeError:
                raise ImportError(f"cannot import name {name!r} from {theirs!r}, a module of LightRFT; here: {ours}",
                                  name=name) from None

        setattr(module, "__getattr__", load)


def ensure_video_input_available() -> None:
    """Do nothing: LightRFT's scripts call this before they import; the versions of transformers here need no change."""


sys.meta_path.append(MovedModules())
