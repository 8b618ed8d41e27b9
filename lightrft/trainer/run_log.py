"""Logs and files of a run for people: metrics, curve, report, model card, summary; for RL also rollouts, solutions."""
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.files import plugins_of, to_yaml
from lightrft.config.schema import Config
from lightrft.config.shared_schema import Tree
from lightrft.models.tokenizer import save_tokenizer
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.fast_exp_maker import Rollout
from lightrft.trainer.model_card import model_card, steps_of
from lightrft.trainer.scores import log_row
from lightrft.types import Episode
from lightrft.utils.curve import plot_curve, read_metrics
from lightrft.utils.errors import optional_output
from lightrft.utils.env import peak_memory_gib
from lightrft.utils.gpu import gpu_name, peak_flops
from lightrft.utils.logging import get_logger
from lightrft.utils.report import first_prompt, Report
from lightrft.utils.run_summary import RunSummary, summary_lines
from lightrft.utils.sinks import MetricSinks, backup_path
from lightrft.utils.timer import Throttle, Timer
from lightrft.utils.trajectory_saver import print_samples, save_rollout

ROWS = 64  # samples whose texts are gathered at once
DRAW_S, DRAW_SHARE = 30.0, 50  # seconds between two drawings of the curve, and how many times what one takes
UPDATE_PARTS = ("forward", "backward", "optimizer", "update_other")


def mfu(parameters: int, tokens: float, seconds: float, peak_flops: float) -> float:
    """Return the model FLOPs utilisation of training: 6 N per token over the peak of all ranks.

    See PaLM, arXiv:2204.02311, appendix B. Recomputed activations do not count, and a shared prompt counts once.
    """
    return 6 * parameters * tokens / (max(seconds, 1e-9) * peak_flops)


class RunLog:
    """Log of a run's metrics. It writes on rank 0; on the other ranks every call is a no-op."""

    def __init__(self, config: Tree, strategy: StrategyBase, aliases: str = "none") -> None:
        self.config, self.strategy, self.aliases = config, strategy, aliases
        self.folder = Path(config.checkpoint.save_path)
        self.sinks: MetricSinks | None = None
        self.report: Report | None = None
        self.parameters = 0  # parameters of the trained model; set by the trainer
        self._throttle = Throttle(DRAW_S, DRAW_SHARE, waits=True)

    def start(self, step: int) -> None:
        """Open the sinks; remove lines of an earlier run beyond ``step``, and load the last line left."""
        if self.strategy.is_main:
            self.sinks = MetricSinks.from_config(self.config, self.folder, self.aliases)
            self.sinks.truncate_after(step)
            self.sinks.open(step + 1)  # a tracker that cannot start does not cost a step
            self.report = Report(self.folder) if self.config.log.report else None

    def written(self) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl``."""
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def step(self, step: int, metrics: dict[str, float], timer: Timer) -> None:
        """Write one line of metrics, with the times, the speed and the memory of the step."""
        times = timer.metrics()
        times["time/update_s"] = sum(times.get(f"time/{name}_s", 0.0) for name in UPDATE_PARTS)
        tokens = metrics.get("rollout/tokens", metrics.get(f"{self.config.METRICS[0]}/tokens", 0.0))
        line = metrics | times | self._utilisation(metrics, times["time/update_s"])
        untrained = times.get("time/eval_s", 0.0) + times.get("time/checkpoint_s", 0.0)
        line["perf/tokens_per_s"] = tokens / max(times["time/step_s"] - untrained, 1e-9)
        line["perf/peak_mem_gib"] = peak_memory_gib(self.strategy.device)
        if self.sinks is not None:
            self.sinks.log(step, line)
            self._throttle(self._draw)
        if self.report is not None:
            self.report.refresh()

    def _draw(self) -> None:
        """Draw the curve of the run so far."""
        with optional_output("learning_curve.png"):
            plot_curve(self.folder / "metrics.jsonl", self.folder / "learning_curve.png")

    @cached_property
    def peak(self) -> float | None:
        """FLOP/s of the GPU; None on a CPU, and, with a log line, for a GPU that no table has."""
        if self.strategy.device.type != "cuda":
            return None
        found = peak_flops(name := gpu_name())
        if found is None and self.strategy.is_main:
            get_logger().info(f"perf/mfu is left out: no table has the speed of {name}")
        return found

    def _utilisation(self, metrics: dict[str, float], seconds: float) -> dict[str, float]:
        """Return ``perf/mfu`` of the update, on GPUs whose peak is known."""
        trained = metrics.get("perf/forward_tokens", metrics.get(f"{self.config.METRICS[0]}/tokens", 0.0))
        if self.peak is None or not self.parameters:
            return {}
        return {"perf/mfu": mfu(self.parameters, trained, seconds, self.peak * self.strategy.world_size)}

    def model_files(self, folder: Path, tokenizer: PreTrainedTokenizerBase, step: int,
                    metrics: dict[str, float] | None = None) -> None:
        """Write the tokenizer (processor) and the model card of an exported model (call it on rank 0).

        Args:
            step: of the model.
            metrics: of that step, where ``metrics.jsonl`` is gone.
        """
        save_tokenizer(tokenizer, folder, self.config.model.pretrain or "")
        rows = [row for row in self.written() if row["step"] <= step] or [(metrics or {}) | {"step": step}]
        saved = self.folder / "config.yaml"  # of the session; it alone knows the plugins
        options = to_yaml(self.config, plugins_of(saved) if saved.is_file() else None)
        card = model_card(self.config, folder,
                          self.folder.resolve().name, rows, options, tokenizer, first_prompt(self.folder))
        (folder / "README.md").write_text(card, encoding="utf-8", errors="replace")

    def close(self) -> None:
        """Close the sinks and draw the curve."""
        if self.sinks is not None:
            self.sinks.close()
            self._draw()
        if self.report is not None:
            self.report.write()

    def summary(self, done: bool, checkpoints: Path | None, failed: int = 0) -> None:
        """Print the result of the run on rank 0: metrics before and after, time, tokens, and paths of the outputs.

        Args:
            done: the last step is done and the model is written.
            checkpoints: folder of the checkpoints, if there are any.
            failed: number of checkpoints that could not be written.
        """
        rows = self.written() if self.strategy.is_main else []
        if not rows:
            return
        get_logger().info(f"summary of {self.folder}, {steps_of(rows[-1]['step'])}")
        remedy = "not written, for the run was stopped" + (f"; lightrft export {checkpoints} OUT"
                                                           if checkpoints else "")
        files = {"report": "report.html", "metrics": "metrics.jsonl", "curve": "learning_curve.png",
                 "trajectories": "rollouts", "samples": "samples.jsonl"}  # yapf: disable
        places = {"model": self.folder / "hf" if done else remedy}
        places |= {name: self.folder / file for name, file in files.items() if (self.folder / file).exists()}
        there = [str(checkpoints)] if checkpoints and checkpoints.exists() else []
        lost = [f"{failed} could not be written (warnings above)"] if failed else []
        places |= {"checkpoints": "; ".join(there + lost)} if there or lost else {}
        for line in summary_lines(RunSummary.of(rows), places):
            get_logger().info(line, extra={"plain": True})


class RolloutLog(RunLog):
    """Log of an RL run: it also saves rollouts and shows samples."""
    config: Config

    def __init__(self, config: Config, strategy: StrategyBase) -> None:
        super().__init__(config, strategy, config.log.metric_aliases)
        self.options = config.log
        self.rollouts = self.folder / "rollouts"

    def start(self, step: int) -> None:
        """Start as :class:`RunLog` does; a new run moves the rollouts of an earlier one to a backup path."""
        super().start(step)
        if self.strategy.is_main and step == 0:
            backup_path(self.rollouts)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Write metrics that belong to no training step."""
        if self.sinks is not None and metrics:
            self.sinks.log(step, metrics)

    def solutions(self, step: int, samples: list[Episode]) -> None:
        """Show a few held-out solutions."""
        first = [log_row(sample) for sample in samples if not sample.index]
        self._show(step, "held-out", f"held-out solutions after step {step}", first)

    def rollout(self, step: int, rollout: Rollout, last: bool) -> None:
        """Write the rollout as jsonl and show a few of its samples, when asked for; ``last``: of the last step."""
        size, options = rollout.shards.size, self.options
        if options.save_trajectories:
            rows = self._rows(rollout, range(min(size, options.num_trajectories_to_save or size)))
            if self.strategy.is_main:
                save_rollout(self.rollouts, step, rows)
            else:
                deque(rows, maxlen=0)
        if options.print_samples and self._due(step, last):
            first = rollout.shards.first_of_groups
            shown = list(self._rows(rollout, first[:options.print_samples]))
            self._show(step, "training", f"responses to training prompts of step {step}", shown)

    def _due(self, step: int, last: bool) -> bool:
        every = self.options.print_steps
        return (step == 1 or last) and not self.config.held_out if every < 0 else every > 0 and step % every == 0

    def _show(self, step: int, name: str, title: str, rows: list[dict[str, Any]]) -> None:
        """Print rows, and add them to the tables of the trackers."""
        wanted = rows[:self.options.print_samples]
        if self.sinks is not None and wanted:
            print_samples(wanted, title)
            self.sinks.table(step, f"samples/{name}", wanted)

    def _rows(self, rollout: Rollout, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield one row per sample of ``indices``, of all ranks, with its mean advantage and its length in tokens
        (prompt included).

        A collective: every rank iterates to the end. Texts are gathered a few at a time.
        """
        if not rollout.shards.size:
            return
        advantages, lens = rollout.shards.advantages.tolist(), rollout.shards.lens.tolist()
        episodes = dict(zip(rollout.shards.numbers.tolist(), rollout.episodes))
        for start in range(0, len(indices), ROWS):
            here = [(i, log_row(episodes[i])) for i in indices[start:start + ROWS] if i in episodes]
            for i, row in sorted(chain.from_iterable(self.strategy.all_gather_object(here)), key=itemgetter(0)):
                yield row | {"tokens": lens[i], "advantage": advantages[i]}
