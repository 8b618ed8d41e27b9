"""The reinforcement-learning step: rollout, update, weight sync."""
from typing import Any

from lightrft.algorithms.base import ADVANTAGES
from lightrft.config.stages import Stages
from lightrft.datasets.loader import PromptLoader
from lightrft.ops.rounding import has_experts, RunArithmetic
from lightrft.rollout.weight_sync.verify import get_weight_sync_verifier
from lightrft.rollout.weight_sync.sync import sync_weights
from lightrft.strategy.base import Prepared
from lightrft.trainer.base_trainer import BaseTrainer
from lightrft.trainer.controllers import get_entropy_controller, get_kl_controller
from lightrft.trainer.evaluator import Evaluator
from lightrft.trainer.fast_exp_maker import FastExperienceMaker
from lightrft.trainer.optimizer_step import none_applied
from lightrft.trainer.prompt_source import get_group_source
from lightrft.trainer.ppo_update import PolicyUpdate
from lightrft.trainer.run_log import RolloutLog
from lightrft.trainer.sample_recorder import SampleRecorder
from lightrft.trainer.checks.parity import check_parity
from lightrft.trainer.checks.first_step import check_step_facts, facts_are_measured
from lightrft.trainer.checks.tripwires import Tripwires, UnscoredTraining
from lightrft.utils.logging import get_logger


class PPOTrainer(BaseTrainer):
    """Trains a policy with any registered algorithm.

    Args:
        prepared: models with an optimizer, by name.
        maker: makes experience of prompts, with an engine that generates.
        loader: of the training prompts.
        evaluator: None without held-out prompts.
    """
    log: RolloutLog

    def __init__(self, prepared: dict[str, Prepared], maker: FastExperienceMaker, update: PolicyUpdate,
                 loader: PromptLoader, evaluator: Evaluator | None, total_steps: int) -> None:
        config, strategy, tokenizer, timer = maker.config, maker.strategy, maker.tokenizer, maker.timer
        log = RolloutLog(config, strategy)
        super().__init__(config.checkpoint, strategy, prepared, log, tokenizer, timer, total_steps,
                         config.eval.eval_steps)
        self.config, self.engine, self.maker, self.update = config, maker.engine, maker, update
        self.loader, self.evaluator, self.kl = loader, evaluator, get_kl_controller(config.algorithm)
        self.offloader = maker.logprobs.offloader
        self.entropy = get_entropy_controller(config.algorithm)
        self.source = get_group_source(config, maker, loader, total_steps)
        self.arithmetic = RunArithmetic.of(config.rollout, bool(config.model.bf16), strategy.device.type,
                                           has_experts(prepared["actor"].model))
        self.proof = get_weight_sync_verifier(config.rollout, strategy, prepared["actor"], maker.engine, loader.dataset,
                                              self.arithmetic.engine, timer)
        self.stages = Stages(config.rollout.stages, config.rollout.generate_max_len)
        grouped = ADVANTAGES.get(config.algorithm.advantage_estimator).needs_group
        self.tripwires = Tripwires(grouped, config.reward.max_unscored_steps, config.model.teacher_model is not None)
        self.recorder = SampleRecorder(log.folder, strategy, tokenizer, config.log.report, maker.media)
        self.fresh = self.facts_due = True

    def before_loop(self, fresh: bool) -> None:
        """Send the weights to the engine; evaluate the untrained policy when asked for."""
        self.fresh = fresh
        if self.maker.media is not None:
            self.maker.prefetch(self.loader.ahead())  # while the engine gets weights, is compared and evaluated
        self.recorder.start(self.step)
        self.engine.sleep()  # its cache and a bucket of weights must not share memory
        self._wake_engine(self.step)
        if self.maker.media is not None:
            check_parity(self.strategy, self.prepared["actor"], self.engine, self.loader.dataset,
                         self.arithmetic.engine)
        if fresh and self.config.eval.eval_at_start:
            self.log.evaluation(self.step, self.evaluate())

    def train_step(self) -> dict[str, float]:
        """Run one rollout and all optimizer steps on it; the engine has the new weights afterwards."""
        coef, length = self.kl.value, self._begin_stage()
        self.prepared["actor"].model.eval()
        self.offloader.offload()
        rollout = self.source.make(self.step, coef)
        if self.maker.media is not None:
            self.maker.prefetch(self.loader.ahead())  # while the models train
        self.engine.sleep()  # both have happened already, except in a step without a rollout
        self.offloader.reload()
        with self.timer("update_other"):
            metrics = rollout.metrics | (self.update.run(rollout, self.step, coef, self.entropy.coef)
                                         if rollout.shards.size else {})
        metrics |= self._wake_engine(self.step + 1)
        if self.facts_due and facts_are_measured(metrics):
            check_step_facts(metrics, self.config, self.fresh, self.arithmetic)
            self.facts_due = False
        self._end_with_the_data(self.step + 1)
        with self.timer("log"):
            self.log.rollout(self.step + 1, rollout, self.step + 1 == self.total_steps)
            self.recorder.rollout(self.step + 1, self.total_steps, rollout)
        metrics |= {"rollout/generate_max_len": length} | self._adapt_kl(metrics) | self._adapt_entropy(metrics)
        return metrics | self._report(*self.tripwires.step(metrics))

    def _end_step(self, metrics: dict[str, float]) -> None:
        """End the step as :class:`BaseTrainer` does; save and end a run whose responses stay unscored.

        Raises:
            UnscoredTraining: ``max_unscored_steps`` steps in a row had no scored response.
        """
        super()._end_step(metrics)
        if reason := self.tripwires.fatal(metrics):
            self.save()
            raise UnscoredTraining(f"{reason}; {self.resume_hint}")

    def _finish(self) -> None:
        """Extend :meth:`BaseTrainer._finish`: a run that has changed nothing is none; one that has learnt nothing says
        why."""
        if (done := self.step >= self.total_steps) and self.tripwires.only_bad_steps:
            raise none_applied(self.step)
        super()._finish()
        nothing = self.tripwires.nothing_learnt() if done else None
        self._report({}, [nothing] if nothing else [])

    def _report(self, values: dict[str, float], news: list[str]) -> dict[str, float]:
        """Log the ``news`` of the tripwires as warnings, on one rank; return their metrics ``values``."""
        for text in news if self.strategy.is_main else ():
            get_logger().warning(text)
        return values

    def _begin_stage(self) -> int:
        """Set the limit on the response length of this step in all parts that depend on it; return the limit."""
        length, news = self.stages.length(self.step), self.stages.boundary(self.step)
        if news:
            get_logger().info(news)
        self.maker.limit_responses(length)
        self.update.limit_responses(length)
        return length

    def _end_with_the_data(self, step: int) -> None:
        """Make ``step`` the last one when dynamic sampling has used up its prompts before ``total_steps``."""
        if self.source.exhausted and step < self.total_steps:
            get_logger().info(f"the data is used up after step {step}; at most {self.total_steps} were possible")
            self.total_steps = step

    def _wake_engine(self, version: int) -> dict[str, float]:
        """Wake the engine and sync the weights; return the metrics of the verification."""
        with self.timer("weight_sync"):
            self.engine.wake()
            return self.sync_weights(version)

    def sync_weights(self, version: int) -> dict[str, float]:
        """Copy the weights from the strategy to the engine and verify them; return the metrics of the verification."""
        sync_weights(self.strategy, self.prepared["actor"], self.engine, version, self.config.rollout.sync_bucket_mib,
                     self.proof)
        return self.proof.check(version) if self.proof else {}

    def evaluate(self) -> dict[str, float]:
        """Return pass@k and mean reward of the engine's weights on the held-out prompts."""
        if self.evaluator is None:
            return {}
        self.prepared["actor"].model.eval()
        self.offloader.offload()
        metrics, answers = self.evaluator.run()
        if self.offloader.offloaded:  # no memory for both
            self.engine.sleep()
            self.offloader.reload()
            self._wake_engine(self.step)
        self.recorder.evaluation(self.step, self.total_steps, answers)
        if self.step in (0, self.total_steps):
            self.log.solutions(self.step, [answer.sample for answer in answers if answer.sample])
        return metrics | self._report(*self.tripwires.evaluation(metrics))

    def export(self, name: str) -> None:
        """Export the policy, and at the end the critic when asked for."""
        super().export(name)
        if name == "hf" and "critic" in self.prepared and self.config.model.save_value_network:
            self.strategy.save_model(self.prepared["critic"], self.log.folder / "hf_critic")

    def extra_state(self) -> dict[str, Any]:
        """Return sampler position, carried groups, coefficients, reward normalisation, bad steps, tripwires
        and which parts of the reward have graded."""
        return {
            "loader": self.loader.state_dict(), "groups": self.source.state_dict(), "kl": self.kl.state_dict(),
            "entropy": self.entropy.state_dict(), "calculator": self.maker.calculator.state_dict(),
            "update": self.update.state_dict(), "tripwires": self.tripwires.state_dict(),
            "correctness": None if self.evaluator is None else self.evaluator.correctness.state_dict()
        }  # yapf: disable

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`extra_state`."""
        self.loader.load_state_dict(state["loader"])
        self.source.load_state_dict(state["groups"])
        self._end_with_the_data(state["step"])
        self.kl.load_state_dict(state["kl"])
        self.entropy.load_state_dict(state["entropy"])
        self.maker.calculator.load_state_dict(state["calculator"])
        self.update.load_state_dict(state["update"])
        self.tripwires.load_state_dict(state["tripwires"])
        if self.evaluator is not None and state.get("correctness") is not None:  # older checkpoints have none
            self.evaluator.correctness.load_state_dict(state["correctness"])

    def _adapt_kl(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adapt the KL coefficient after the step that used it; return the coefficient that was used.

        Only samples whose KL was measured count: a batch that keeps none leaves it unchanged, and so does a step in
        which the policy is frozen and the KL is in its loss.
        """
        if self.config.algorithm.init_kl_coef == 0:
            return {}
        used, kl = self.kl.value, metrics.get("reward/kl", metrics.get("policy/kl_ref"))
        if kl is not None:
            self.kl.update(kl, int(metrics["rollout/kept_samples"]))
        return {"policy/kl_coef": used}

    def _adapt_entropy(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adapt the coefficient of the entropy bonus; an update that measured no entropy leaves it unchanged."""
        if not self.entropy.target and not self.entropy.value:
            return {}
        used = self.entropy.coef
        if "policy/entropy" in metrics and metrics["rollout/kept_samples"]:
            self.entropy.update(metrics["policy/entropy"])
        return {"policy/entropy_coef": used}
