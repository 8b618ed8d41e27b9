"""Loop of every training run: start or resume, step, evaluate, log, checkpoint, stop, export."""
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import CheckpointConfig
from lightrft.config.tree import flatten
from lightrft.models.packed_model import PackedModel
from lightrft.preflight.validate import changes, lost_length
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.strategy.checkpoint import CheckpointManager, read_global
from lightrft.strategy.sharding import full_shape
from lightrft.trainer.run_log import RunLog
from lightrft.utils.env import freed_memory_is_kept, rare_garbage_collection, rng_state, set_rng_state
from lightrft.utils.errors import ExpectedError, UserError
from lightrft.utils.logging import get_logger, warn_of_all
from lightrft.utils.progress import progress
from lightrft.utils.timer import Timer
from lightrft.utils.watchdog import clear_stop_request, stop_requested


class BaseTrainer(ABC):
    """Runs ``total_steps`` steps; a stop request (SIGTERM, Ctrl-C) saves a checkpoint and ends the run early.

    A subclass defines one step, the evaluation, and the state besides weights and optimizers that the next step needs.
    """

    def __init__(self, cfg: CheckpointConfig, strategy: StrategyBase, prepared: dict[str, Prepared], log: RunLog,
                 tokenizer: PreTrainedTokenizerBase, timer: Timer, total_steps: int, eval_steps: int) -> None:
        self.cfg, self.strategy, self.prepared, self.log = cfg, strategy, prepared, log
        self.tokenizer, self.timer, self.total_steps, self.eval_steps = tokenizer, timer, total_steps, eval_steps
        folder = Path(cfg.ckpt_path) if cfg.ckpt_path else Path(cfg.save_path) / "checkpoints"
        self.checkpoints = None if cfg.disable_ckpt else CheckpointManager(
            strategy, folder, cfg.max_ckpt_num, cfg.max_ckpt_mem, cfg.best_metric, cfg.async_save)
        self.step = 0  # steps done
        log.parameters = sum(map(torch.Size.numel, map(full_shape, prepared["actor"].model.parameters())))
        self._saved = 0  # the step of the newest checkpoint of this run
        self._metrics: dict[str, float] = {}  # of the last step

    @abstractmethod
    def train_step(self) -> dict[str, float]:
        """Run one step on the next batch; return its metrics."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return held-out metrics; empty without held-out data."""

    @abstractmethod
    def extra_state(self) -> dict[str, Any]:
        """Return the state of everything except weights, optimizers and random generators."""

    @abstractmethod
    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`extra_state`."""

    def before_loop(self, fresh: bool) -> None:
        """Prepare the run once the weights are loaded; ``fresh``: nothing was resumed."""

    def fit(self) -> None:
        """Train to the last step, or until a stop request."""
        try:
            self._run()
        except ExpectedError:
            if self.checkpoints is not None:
                self.checkpoints.wait()  # the checkpoint being written is still useful
            raise

    def _run(self) -> None:
        fresh = not self.resume()
        if self.step >= self.total_steps:
            get_logger().info(f"already at step {self.step} of {self.total_steps}: nothing to do")
        if self.step > self.total_steps:  # the resumed model has had more steps: keep it unchanged
            clear_stop_request()
            self.log.close()
            return
        self.before_loop(fresh)
        self.timer.metrics()
        bar = progress(self.total_steps, "training", unit="step", initial=self.step)
        with rare_garbage_collection(), freed_memory_is_kept(self.strategy.device):
            while self.step < self.total_steps and not self.strategy.any_rank(stop_requested()):
                metrics = self.train_step() | self._feature_counts()
                self.step += 1
                self._end_step(metrics)
                bar.update(1)
        bar.close()
        self._finish()

    def _feature_counts(self) -> dict[str, float]:
        """Count the media of the step whose features a tower computed and those whose features were kept."""
        cache = cast(PackedModel, self.prepared["actor"].model).modality.cache
        if cache is None:
            return {}
        computed, reused = self.strategy.sum_data_ranks(torch.tensor(cache.take_counts())).tolist()
        return {"media/features_computed": computed, "media/features_reused": reused}

    def _end_step(self, metrics: dict[str, float]) -> None:
        """Evaluate when due, write the metrics of the step, then save when due."""
        last = self.step == self.total_steps
        evaluate_now = self.eval_steps and (last or (self.eval_steps > 0 and self.step % self.eval_steps == 0))
        if evaluate_now:
            with self.timer("eval"):
                metrics = metrics | self.evaluate()
        self.log.step(self.step, metrics, self.timer)
        self._metrics = metrics
        save_now = self.cfg.save_steps > 0 and self.step % self.cfg.save_steps == 0
        if save_now or last:
            self.save()

    def save(self) -> None:
        """Save a resumable checkpoint of this step, and its HF copy when asked for; do nothing if it is saved."""
        if self.step == self._saved:
            return
        self._saved = self.step
        with self.timer("checkpoint"):
            if self.checkpoints is not None:
                state = {"step": self.step, "options": flatten(self.log.config), **self.extra_state()}
                self.checkpoints.save(self.step, self.prepared, state, rng_state(), self._metrics)
            if self.cfg.save_hf_ckpt and self.step < self.total_steps:
                self.export(f"hf_step_{self.step}")

    @property
    def resume_hint(self) -> str:
        """Return the hint on how to resume a run that ends early."""
        return "nothing was saved" if self.checkpoints is None else "--load_checkpoint resumes from there"

    def _finish(self) -> None:
        if self.step < self.total_steps:
            self.save()
            get_logger().info(f"stopped after step {self.step} of {self.total_steps}; {self.resume_hint}")
        if self.checkpoints is not None:
            self.checkpoints.wait()
        done = self.step >= self.total_steps
        if done:
            clear_stop_request()
            self.export("hf")
        self.log.close()
        failed = self.checkpoints.failures if self.checkpoints else 0
        self.log.summary(done, self.checkpoints.folder if self.checkpoints else None, failed)

    def export(self, name: str) -> None:
        """Write the model in Hugging Face format, with tokenizer and model card, to SAVE_PATH/``name``."""
        folder = Path(self.cfg.save_path) / name
        self.strategy.save_model(self.prepared["actor"], folder)
        if self.strategy.is_main:
            self.log.model_files(folder, self.tokenizer, self.step)
        self.strategy.barrier()
        get_logger().info(f"model written: {folder}")

    def resume(self) -> bool:
        """Resume from the newest complete checkpoint, if asked for; return False for a fresh start."""
        resumed = self.load_newest()
        if self.checkpoints and not self.cfg.load_checkpoint:
            self.checkpoints.back_up()
        self.log.start(self.step)
        return resumed

    def load_newest(self) -> bool:
        """Load the newest complete checkpoint, if asked for; return False without one."""
        path = self.checkpoints.latest() if self.cfg.load_checkpoint and self.checkpoints else None
        if self.checkpoints is None or path is None:
            if self.cfg.load_checkpoint:
                warn_of_all("--load_checkpoint: no complete checkpoint found; starting from step 0")
            return False
        state, ranks = self._load(self.checkpoints, path)
        self._compare_options(state)
        self.step = self._saved = state["step"]
        self.load_extra_state(state)
        if self.strategy.rank < len(ranks):
            set_rng_state(ranks[self.strategy.rank])
        get_logger().info(f"resumed from {path} at step {self.step}")
        return True

    def _load(self, checkpoints: CheckpointManager, path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Load a checkpoint as :meth:`CheckpointManager.load` does; its error also names the options that differ."""
        try:
            return checkpoints.load(path, self.prepared)
        except UserError as error:
            changed = ", ".join(changes(read_global(path)["options"], self.log.config))
            found = f". Options differ from those of the checkpoint: {changed}" if changed else ""
            raise UserError(f"{error}{found}. Resume with the options and the model of the checkpoint, or start a new "
                            "run without --load_checkpoint") from error

    def _compare_options(self, state: dict[str, Any]) -> None:
        """Report the options that have changed since the checkpoint, where the change affects training.

        Raises:
            UserError: the run no longer has a length.
        """
        if problem := lost_length(state["options"], self.log.config):
            raise UserError(problem)
        changed = changes(state["options"], self.log.config)
        if changed:
            warn_of_all(f"options differ from those of the checkpoint: {', '.join(changed)}")
