"""Every option of the RL trainer: one line each (name, type, default, help, range ...), in one tree of dataclasses.

The flat ``--flags`` (:mod:`lightrft.config.cli`), the YAML keys, the checks of single options and the option tables of
the docs are generated from these lines, so an option that is in no tree does not exist. A part of the library receives
only its own group. The groups that other trainers have too are in :mod:`lightrft.config.shared_schema`.
"""
from dataclasses import dataclass, replace
from math import ceil

from lightrft.config.engines import EngineConfig
from lightrft.config.log_schema import LogConfig
from lightrft.config.options import ANY, COUNT, NON_NEGATIVE, POSITIVE, PROBABILITY, SHARE, option
from lightrft.config.presets import RECIPES, SEMANTICS
from lightrft.config.prompt_schema import HeldOutConfig, PromptDataConfig
from lightrft.config.reward_schema import AccuracyConfig, RewardConfig
from lightrft.config.shared_schema import (BalanceConfig, CheckpointConfig, LogprobModelConfig, OptimConfig,
                                           StrategyConfig, Tree)
from lightrft.config.tree import extended_in, group


@dataclass
class ModelConfig(LogprobModelConfig):
    """The policy, the reference, the teacher and the critic: weights, precision and adapters."""
    ref_pretrain: str | None = option(None, "HF folder or hub id of the reference policy (default: --pretrain)",
                                      needs="init_kl_coef 0.01", path="model")
    initial_model_shard_size: int = option(0, "ranks that share one copy of the reference model; 0: all ranks",
                                           within=NON_NEGATIVE, needs="init_kl_coef 0.01", free=True)
    teacher_model: str | None = option(
        None, "HF folder or hub id of a teacher with the policy's vocabulary, for on-policy distillation "
        "(--kd_coef)", path="model")
    teacher_offload: bool = option(False, "keep the teacher in host memory except while it computes",
                                   needs="teacher_model PATH", free=True)
    critic_pretrain: str | None = option(
        None, "HF folder or hub id the critic starts from (default: --pretrain; only used by gae)",
        read_by=("critic", ), path="model")
    value_head_prefix: str = option("score", "name of the critic's value head in its checkpoint")
    save_value_network: bool = option(False, "also export the critic in HF format at the end", read_by=("critic", ),
                                      free=True)


@dataclass
class RolloutConfig(EngineConfig):
    """Generation of responses: batches, sampling and engine."""
    rollout_batch_size: int = option(128, "prompts per rollout batch, over all ranks", within=COUNT, common=True,
                                     card="prompts per step")
    n_samples_per_prompt: int = option(8, "responses per prompt (group size)", within=COUNT, common=True,
                                       card="responses per prompt")
    dynamic_sampling: bool = option(
        False, "replace groups whose rewards differ by at most --zero_spread by groups of new prompts (DAPO)")
    max_gen_rounds: int = option(
        10, "limit on rounds of generation per step with --dynamic_sampling; then the step trains on the groups it has",
        within=COUNT, needs="dynamic_sampling")
    oversample: float = option(
        1.0, "generate this many batches of prompts at once; a step trains on the first finished batch, and the rest "
        "continue in the next step (use --rollout_correction with it); 1 is off", within="[1, 2]",
        why="above 2 more than one batch would be left over, too much to train on within --max_staleness")
    max_staleness: int = option(
        1, "--oversample: limit on the age of a token when it is trained on, in weight versions (one per step); a step "
        "waits for groups that would exceed it", within=COUNT,
        why="a response that continues in the next step is one version old there")
    stages: list[str] = option(
        [], "train in stages of response length, LENGTH:STEPS each, e.g. 8k:200,16k:200,32k (k: 1024 tokens; "
        "STEPS: rollout steps, optional in the last). Evaluation always uses the longest length", preset=True)
    temperature: float = option(
        1.0, "sampling temperature. Log-probs and entropy are computed at this temperature", within=POSITIVE,
        why="greedy responses to one prompt are all the same, so there is nothing to learn from")
    use_fire: bool = option(
        False, "FIRE sampling: sample the first token of a response at --first_token_temperature (best with --top_k)")
    first_token_temperature: float = option(10.0, "temperature of the first token with --use_fire", within=POSITIVE,
                                            needs="use_fire")
    engine_sleep: bool = option(True, "vllm, sglang: free the engine's weights and cache on the device during training",
                                read_by=("vllm", "sglang"), free=True)
    offload_during_rollout: bool = option(
        False, "keep models, gradients and optimizer states in host memory while the engine generates (CUDA)")
    micro_rollout_batch_size: int = option(
        0, "samples per no-grad forward pass, at most; 0: use the micro-batches of the update", within=NON_NEGATIVE,
        free=True)
    overlap_passes: bool = option(
        False, "run the no-grad passes (old and reference log-probs, values) on finished responses in a thread, while "
        "the engine generates the others; useful if a core or the GPU is partly idle during generation")
    sync_bucket_mib: int = option(512, "MiB of weights that a weight sync gathers at once", within=COUNT, free=True)
    lora_sync: str = option(
        "merged", "weights that LoRA sends to the engine. merged: all weights, adapters merged into them; adapter "
        "(vllm): the base weights once, then only the adapters", ("merged", "adapter"), needs="lora_rank 16")
    sync_proof: str = option(
        "both", "verification of weight syncs; a mismatch stops the run. fingerprint: compares every weight after "
        "every sync; canary: compares log-probs of a few prompts every --sync_canary_every steps",
        ("off", "fingerprint", "canary", "both"), free=True)
    sync_canary_every: int = option(50, "steps between canaries; one always runs at the start and after the first step",
                                    within=COUNT, needs="sync_proof both|canary", free=True)

    @property
    def samples(self) -> int:
        """Samples of a rollout batch, over all ranks."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def most_samples(self) -> int:
        """Samples under way at once, over all ranks: those of a batch, and the surplus of ``--oversample``."""
        return ceil(self.samples * max(self.oversample, 1.0))


@dataclass
class DataConfig(PromptDataConfig, HeldOutConfig):
    """Sources of the prompts, and the conversion of a row to a prompt."""
    difficulty_key: str | None = option(
        None, "column, or key of extra_info, with a number for --difficulty_min and _max, e.g. the model's pass rate")
    difficulty_min: float | None = option(None, "train only on rows whose difficulty is at least this", within=ANY,
                                          needs="difficulty_key pass_rate")
    difficulty_max: float | None = option(None, "train only on rows whose difficulty is at most this", within=ANY,
                                          needs="difficulty_key pass_rate")
    shuffle: bool = option(True, "draw prompts in a new seeded order in each episode")


@extended_in("algorithms")
@dataclass
class AlgorithmConfig:
    """Advantage, loss and regularisation."""
    recipe: str | None = option(None, "set the options of a paper's method at once; flags and YAML keys win",
                                tuple(RECIPES), free=True, preset=True, common=True)
    semantics: str = option(
        "default", "trainer whose formulas are used for names that mean different formulas in different trainers",
        tuple(SEMANTICS), free=True, preset=True)
    advantage_estimator: str = option("group_norm", "advantage estimator; see the table of algorithms", common=True,
                                      card="advantages")
    policy_loss: str = option("ppo", "policy loss; see the table of algorithms", card="loss")
    rollout_correction: str = option(
        "none", "importance weights for the train / rollout mismatch; see the table of algorithms")
    correction_low: float | None = option(
        None, "lower bound of the correction weight (default: 0; icepop: 0.5, geo_mis: 0.999)", within=SHARE)
    correction_high: float | None = option(
        None, "upper bound of the correction weight (default: 2; icepop: 5, geo_mis: 1.001)", within=COUNT)
    correction_veto: float = option(
        0.0, "drop a response from the loss if the weight of one of its tokens is below this; 0 is off", within="[0, "
        "1)")
    loss_agg_mode: str = option(
        "token-mean", "aggregation of token losses; denominators are global over the mini-batch",
        ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"))
    loss_agg_norm: int = option(
        0, "constant that divides the loss of a sequence with seq-mean-token-sum-norm (Dr.GRPO); 0: --generate_max_len",
        within=NON_NEGATIVE, needs="loss_agg_mode seq-mean-token-sum-norm")
    loss_agg_norm_seqs: bool = option(
        True, "seq-mean-token-sum-norm also divides by the number of sequences; off: only by the constant",
        needs="loss_agg_mode seq-mean-token-sum-norm")
    loss_agg_all_seqs: bool = option(
        False, "in the seq-mean modes, also count sequences of the mini-batch without a token in the loss",
        needs="loss_agg_mode seq-mean-token-mean|seq-mean-token-sum|seq-mean-token-sum-norm")
    eps_clip: float = option(
        0.2, "lower clip of the ratio: 1 - eps_clip. Values of the papers: 0.2, gspo 3e-4, gmpo 0.4 (bound exp(-0.4)), "
        "cispo 1 (no lower bound)", within=PROBABILITY)
    eps_clip_high: float | None = option(
        None, "upper clip of the ratio: 1 + eps_clip_high (default: --eps_clip). Papers: gspo 4e-4, gmpo 0.4 "
        "(exp(0.4))", within=POSITIVE)
    dual_clip: float | None = option(None,
                                     "bound on the ratio for negative advantages (dual-clip PPO, > 1); off by default",
                                     within="(1, inf)", why="the bound is a ratio above 1 + eps_clip_high")
    cispo_absolute: bool = option(
        False, "cispo: --eps_clip_high bounds the ratio itself, not its distance from 1, and there is no lower bound")
    policy_drift_coef: float = option(0.01, "cpgd: weight of the drift term KL(rollout policy || policy)",
                                      within=NON_NEGATIVE)
    sapo_tau_pos: float = option(1.0, "sapo: temperature of the gate for positive advantages", within=POSITIVE)
    sapo_tau_neg: float = option(1.05, "sapo: temperature of the gate for other advantages", within=POSITIVE)
    dppo_delta: float | None = option(
        None, "dppo_tv, dppo_kl: divergence beyond which a token that moves away gets no gradient (default: 0.15, "
        "0.05)", within=NON_NEGATIVE)
    dppo_ratio_max: float | None = option(
        None, "dppo_tv, dppo_kl: upper bound of a token's weight (its ratio, without a gradient); off by default",
        within=COUNT)
    clip_cov_ratio: float = option(2e-4, "clip_cov: share of the mini-batch's tokens that get no gradient",
                                   within=PROBABILITY)
    clip_cov_low: float = option(1.0, "clip_cov: smallest covariance of tokens that may lose their gradient",
                                 within=NON_NEGATIVE)
    clip_cov_high: float = option(5.0, "clip_cov: largest covariance of tokens that may lose their gradient",
                                  within=POSITIVE)
    kl_cov_ratio: float = option(2e-3, "kl_cov: share of the mini-batch's tokens that get the KL penalty",
                                 within=PROBABILITY)
    kl_cov_coef: float = option(1.0, "kl_cov: weight of the penalty KL(rollout policy || policy)", within=POSITIVE)
    kl_cov_abs: bool = option(False, "kl_cov: the penalty is |log-ratio|, not the k3 estimate of the KL")
    value_clip: float = option(0.2, "clip of the value update; 0 is off", within=NON_NEGATIVE, read_by=("critic", ))
    gamma: float = option(1.0, "discount per action token", within=PROBABILITY)
    lambd: float = option(0.95, "lambda of GAE", within=SHARE)
    std_eps: float = option(1e-6, "epsilon added to a group's standard deviation before dividing", within=NON_NEGATIVE)
    norm_group_std: bool = option(False, "cpgd, grpo_passk: divide by the group's standard deviation as well")
    pass_k: int = option(0, "grpo_passk: optimise the best of k responses to a prompt; 0: of all scored responses",
                         within=NON_NEGATIVE)
    zero_spread: float = option(1e-3, "groups whose rewards differ by at most this have advantage 0 and are counted",
                                within=NON_NEGATIVE)
    advantages_norm: bool = option(
        False, "whiten advantages over the whole rollout batch (refused if the estimator already does)")
    whiten_unbiased: bool = option(False,
                                   "whiten with the Bessel-corrected standard deviation instead of the population's")
    whiten_flat_groups: bool = option(
        False, "reinforce_baseline, gdpo: whiten groups without spread too, which shifts them by the batch mean; off: "
        "their advantage is 0")
    gdpo_whiten_tokens: bool = option(False, "gdpo: whiten over the action tokens of the batch instead of its samples")
    advantage_clip: float = option(
        0.0, "clip advantages to [-x, x], after everything else; the clipped fraction is "
        "reported; 0 is off", within=NON_NEGATIVE)
    init_kl_coef: float = option(0.0, "weight of the KL to the reference model; 0 loads no reference",
                                 within=NON_NEGATIVE, common=True, card="KL coefficient")
    kl_estimator: str | None = option(
        None, "KL estimator; with +, its value with the gradient of k2 (only --use_kl_loss). Default: k1 in the "
        "reward, where only k1 gives an unbiased gradient; k3 in the loss", ("k1", "k2", "k3", "k1+", "k3+"),
        needs="init_kl_coef 0.01")
    k3_max: float = option(
        10.0, "limit on the k3 estimate of one token, in nats; beyond it the token has no KL gradient; 0 is off",
        within=NON_NEGATIVE, needs="init_kl_coef 0.01")
    use_kl_loss: bool = option(False, "add the KL to the loss instead of subtracting it from the reward",
                               needs="init_kl_coef 0.01")
    kl_in_outcome: bool = option(
        False, "subtract the KL, summed over the response, from its reward before the group statistics; off: subtract "
        "it from each token after them", needs="init_kl_coef 0.01")
    kl_target: float | None = option(None, "adapt the KL coefficient towards this KL (nats per token); off by default",
                                     within=POSITIVE, needs="init_kl_coef 0.01")
    kl_horizon: int = option(10000, "samples over which the adaptive KL coefficient reacts", within=COUNT,
                             needs="kl_target 0.1")
    kd_coef: float = option(1.0, "weight of (log p_teacher - log p_policy) of a token, which is added to its advantage",
                            within=POSITIVE, needs="teacher_model PATH")
    kd_gamma: float = option(
        0.0, "discount per action token of the teacher's term of later tokens; 0: only the token's "
        "own term", within=SHARE, needs="teacher_model PATH")
    entropy_coef: float = option(
        0.0, "weight of the entropy bonus, at the sampling temperature; with --entropy_target the initial weight",
        within=NON_NEGATIVE)
    entropy_token_mean: bool = option(False,
                                      "aggregate the entropy bonus as a mean over tokens; off: by --loss_agg_mode",
                                      needs="entropy_coef 0.001 or entropy_target 0.2")
    entropy_target: float | None = option(
        None, "adapt the weight of the entropy bonus to keep the entropy (nats per token) at this; off by default",
        within=POSITIVE)
    entropy_step: float = option(1e-4, "change of the adaptive entropy weight after each rollout step", within=POSITIVE,
                                 needs="entropy_target 0.2")
    entropy_coef_max: float = option(0.005, "upper limit of the adaptive entropy weight", within=POSITIVE,
                                     needs="entropy_target 0.2")
    high_entropy_token_ratio: float = option(
        0.0, "share of a rollout batch's action tokens with a policy gradient, those of highest entropy; 0: all tokens",
        within="[0, 1)")

    @property
    def kl_kind(self) -> str:
        """The KL estimator in use: ``kl_estimator``, or the default for the KL in the loss or in the reward."""
        return self.kl_estimator or ("k3" if self.use_kl_loss else "k1")


@dataclass
class TrainConfig(BalanceConfig, OptimConfig):
    """The optimizer, its batches and the length of the run."""
    num_episodes: int = option(1, "passes over the training prompts", within=COUNT, free=True, common=True)
    max_epochs: int = option(1, "training passes over each rollout batch", within=COUNT)
    actor_learning_rate: float = option(1e-6, "peak learning rate of the policy", within=NON_NEGATIVE, common=True,
                                        card="learning rate")
    critic_learning_rate: float = option(9e-6, "peak learning rate of the critic", within=NON_NEGATIVE,
                                         read_by=("critic", ))
    drop_zero_advantage: bool = option(
        True,
        "skip samples that would add exactly 0 to the gradient of the policy (no advantage, no KL or entropy in the "
        "loss); the denominators of the loss still count them", free=True)
    share_prompts: bool = option(
        True,
        "compute a prompt once for all its samples in a forward pass (not with --lora_dropout, whose masks differ by "
        "sample); off: once per sample, with the same result up to rounding", free=True)
    freezing_actor_steps: int = option(0, "rollout steps at the start in which only the critic learns",
                                       within=NON_NEGATIVE, read_by=("critic", ))
    self_test: bool = option(
        True, "before the first update, stop if the gradient of a few samples depends on the cut into micro-batches",
        free=True)


@dataclass
class PtxConfig:
    """Language-modelling loss on rows of other data, alongside the loss of the policy."""
    pretrain_data: list[str] = option(
        [], "texts or demonstrations whose language-modelling loss is added to the policy loss (PPO-ptx): file, folder "
        "or hub id, 'path@data_dir'; several are mixed", needs="ptx_coef 0.05", path="rows")
    pretrain_data_probs: list[float] = option([],
                                              "mixing probability of each --pretrain_data entry (default: concatenate)",
                                              within=PROBABILITY, needs="pretrain_data A,B")
    pretrain_split: str = option("train", "split of --pretrain_data to use", needs="pretrain_data PATH")
    pretrain_max_len: int = option(
        0, "longest row of --pretrain_data in tokens; longer ones follow --overlong_prompt; 0: --prompt_max_len plus "
        "--generate_max_len", within=NON_NEGATIVE, needs="pretrain_data PATH")
    pretrain_mode: bool = option(
        True, "put every token of a row of --pretrain_data into the loss; false: only the answers of demonstrations",
        needs="pretrain_data PATH")
    ptx_coef: float = option(0.05, "weight of the loss on --pretrain_data, in nats per token", within=NON_NEGATIVE,
                             needs="pretrain_data PATH")
    ptx_batch_size: int = option(
        0, "rows of --pretrain_data in each optimizer step of the policy, over all ranks; 0: --train_batch_size",
        within=NON_NEGATIVE, needs="pretrain_data PATH")

    def as_data_config(self, prompts: DataConfig) -> DataConfig:
        """Return the data group of the rows: rendered and read as ``prompts``, without what wraps or filters those."""
        return replace(prompts, prompt_data=self.pretrain_data, prompt_data_probs=self.pretrain_data_probs,
                       prompt_split=self.pretrain_split, max_samples=0, difficulty_key=None, difficulty_min=None,
                       difficulty_max=None, input_template=None, system_prompt=None)


@dataclass
class EvalConfig(AccuracyConfig):
    """Held-out evaluation; touches no training state."""
    eval_steps: int = option(-1, "rollout steps between evaluations; -1: at the end only; 0: never", within="[-1, inf)",
                             common=True)
    eval_at_start: bool = option(False, "evaluate before the first step as well",
                                 needs="eval_data PATH or eval_suite math500")
    eval_n_samples: int = option(1, "responses per held-out prompt", within=COUNT)
    eval_temperature: float = option(0.0, "sampling temperature of the evaluation; 0 is greedy", within=NON_NEGATIVE)
    eval_top_p: float = option(1.0, "nucleus sampling of the evaluation", within=PROBABILITY)
    eval_pass_k: list[int] = option([1], "k of the pass@k estimates (k <= --eval_n_samples)", within=COUNT)


@dataclass
class Config(Tree):
    """The whole option tree of the RL trainer."""
    model: ModelConfig = group(ModelConfig)
    strategy: StrategyConfig = group(StrategyConfig, free=True)
    rollout: RolloutConfig = group(RolloutConfig)
    data: DataConfig = group(DataConfig)
    reward: RewardConfig = group(RewardConfig)
    algorithm: AlgorithmConfig = group(AlgorithmConfig)
    train: TrainConfig = group(TrainConfig)
    ptx: PtxConfig = group(PtxConfig)
    eval: EvalConfig = group(EvalConfig, free=True)
    checkpoint: CheckpointConfig = group(CheckpointConfig, free=True)
    log: LogConfig = group(LogConfig, free=True)

    PREFLIGHT = "lightrft.preflight.rl.RLPreflight"
    BATCH = "rollout_batch_size"
    TRAINING = "reinforcement fine-tuning"
    TAG = "reinforcement-learning"
    METRICS = ("reward", "group", "advantage", "policy", "critic", "rollout", "eval")
    LENGTHS = ("prompt_max_len", "generate_max_len")
    ROW_LIMITS = ("pretrain_max_len", )

    @property
    def bypasses(self) -> bool:
        """Return True if the engine's log-probs replace those of the old policy."""
        return self.algorithm.rollout_correction == "bypass"

    @property
    def shares_prompts(self) -> bool:
        """Return True if a forward pass computes a prompt once for all its samples."""
        return self.train.share_prompts and not self.model.lora_dropout

    @property
    def pretrain_len(self) -> int:
        """Longest row of the pretraining data in tokens."""
        return self.ptx.pretrain_max_len or self.sequence_len

    @property
    def pretraining_rows(self) -> int:
        """Rows of the pretraining data in each optimizer step of the policy."""
        return self.ptx.ptx_batch_size or self.train.train_batch_size

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps on one rollout batch."""
        return ceil(self.rollout.samples / self.train.train_batch_size) * self.train.max_epochs

    def pass_tokens(self, samples: int) -> int:
        """Override :meth:`Tree.pass_tokens`: a prompt counts once for its samples, where a mini-batch has them all."""
        r, size = self.rollout, self.rollout.n_samples_per_prompt
        together = self.shares_prompts and self.train.train_batch_size >= r.samples
        return (ceil(samples / size) if together else samples) * r.prompt_max_len + samples * r.generate_max_len

    @property
    def reads_entropies(self) -> bool:
        """True if something reads the entropies of tokens before the update."""
        return self.algorithm.high_entropy_token_ratio > 0 or self.log.mark_high_entropy_tokens

    def forward_passes(self, num_samples: int, critic: bool) -> list[str]:
        """List the no-grad passes over a rollout of ``num_samples`` samples before its update, in order.

        The pass of the old policy is left out if nothing reads its log-probs before the update and the update makes a
        single optimizer step. The first forward pass of the update then provides them.

        Args:
            critic: a critic is trained.
        """
        a = self.algorithm
        again = self.train.max_epochs > 1 or num_samples > self.train.train_batch_size
        taught = self.model.teacher_model is not None
        read = self.reads_entropies or taught or a.init_kl_coef > 0 and not a.use_kl_loss
        wanted = {
            "old_logprobs": not self.bypasses and (again or read),
            "ref": a.init_kl_coef > 0,
            "teacher": taught,
            "values": critic,
        }
        return [name for name, is_wanted in wanted.items() if is_wanted]
