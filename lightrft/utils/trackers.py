"""Trackers of a run: TensorBoard, W&B and trackio, and further ones through accelerate."""
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TYPE_CHECKING

from lightrft.utils.errors import install_command
from lightrft.utils.trajectory_saver import format_samples

if TYPE_CHECKING:
    import pandas as pd

WANDB_ID = "wandb_run_id"
ACCELERATE = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab")  # trackers that accelerate brings


class Sink(ABC):
    """One destination of the metrics."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of ``step``."""

    def table(self, step: int, name: str, frame: "pd.DataFrame") -> None:
        """Write a table of samples; a destination without tables does nothing."""

    def close(self) -> None:
        """Write what is still buffered; where nothing is, do nothing."""


def require(package: str, extra: str) -> ModuleType:
    try:
        return import_module(package)
    except ImportError as error:
        remedy = install_command(extra) if extra else f"pip install {package}"
        raise ImportError(f"{package} is not installed or does not load ({error}); {remedy}") from error


class TensorboardSink(Sink):
    """Scalars in ``folder/tensorboard``; events of an earlier run from ``first_step`` on are hidden."""

    def __init__(self, folder: Path, first_step: int) -> None:
        require("tensorboard", "")
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter
        self._summary: Any = Summary
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one point per metric, all in one event (``add_scalar`` writes one event each, in milliseconds)."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.file_writer.add_summary(self._summary(value=values), step)

    def table(self, step: int, name: str, frame: "pd.DataFrame") -> None:
        """Add the samples as one text."""
        blocks = (f"    {line}" for line in format_samples(frame.to_dict("records")).splitlines())
        self._writer.add_text(name, "\n".join(blocks), step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class WandbSink(Sink):
    """One W&B run per folder: a run resumes under the same id. ``step`` is the x-axis of every metric."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], run_config: Mapping[str, Any]) -> None:
        wandb = require("wandb", "wandb")
        known = folder / WANDB_ID
        identity = known.read_text(encoding="utf-8").strip() if known.exists() else None
        self._run = wandb.init(dir=str(folder), id=identity, resume="allow", config=dict(run_config), **settings)
        known.write_text(self._run.id, encoding="utf-8")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one point (a step that is repeated after a resume adds a second, equal point)."""
        self._run.log({"step": step, **metrics})

    def table(self, step: int, name: str, frame: "pd.DataFrame") -> None:
        """Log the table of this step."""
        import wandb
        self._run.log({"step": step, name: wandb.Table(dataframe=frame)})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def tracker_refusal(option: str, cause: str) -> str:
    """Return the error of a tracker that cannot start."""
    remedy = "; WANDB_MODE=offline needs no account" if option == "use_wandb" else ""
    return (f"--{option}: the tracker cannot start: {cause} (its address and its key are environment "
            f"variables{remedy})")


def wandb_problem(environment: Mapping[str, str]) -> str | None:
    """Return what W&B finds wrong with the form of the key in ``WANDB_API_KEY``, None where it reads none."""
    if not environment.get("WANDB_API_KEY") or environment.get("WANDB_MODE", "online") not in ("online", "shared"):
        return None
    try:
        from wandb.sdk.lib.wbauth import check_api_key
    except ImportError:  # of another version, which will check it when it starts
        return None
    return check_api_key(environment["WANDB_API_KEY"])


class TrackioSink(Sink):
    """A local trackio run, resumed if it exists."""

    def __init__(self, settings: Mapping[str, Any], run_config: Mapping[str, Any]) -> None:
        self._trackio = require("trackio", "trackio")
        self._trackio.init(config=dict(run_config), resume="allow", **settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one point."""
        self._trackio.log(dict(metrics), step=step)

    def table(self, step: int, name: str, frame: "pd.DataFrame") -> None:
        """Log the table of this step."""
        self._trackio.log({name: self._trackio.Table(dataframe=frame)}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


class AccelerateSink(Sink):
    """A tracker of :mod:`accelerate.tracking`, under its name there; a resumed run is a new run of the tracker.

    TensorBoard, W&B and trackio have sinks of their own, because those resume a run and take tables of samples.

    Args:
        name: one of ``ACCELERATE``; its own settings come from its environment variables, such as
            ``MLFLOW_TRACKING_URI``.
        project: project or experiment.
        run: name of the run, where the tracker takes one.
        folder: for trackers that write files.
        run_config: options of the run, flat.
    """

    def __init__(self, name: str, project: str, run: str | None, folder: Path, run_config: Mapping[str, Any]) -> None:
        require(name, "")
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS
        PartialState()  # what logs in accelerate needs it; it takes up the process group of the run
        named = {"run_name": run} if name == "mlflow" else {}
        needs_folder = LOGGER_TYPE_TO_CLASS[name].requires_logging_directory
        settings: dict[str, Any] = named | ({"logging_dir": str(folder)} if needs_folder else {})
        self._tracker = LOGGER_TYPE_TO_CLASS[name](project, **settings)
        self._tracker.start()
        self._tracker.store_init_configuration({key: _plain(value) for key, value in run_config.items()})
        self._at = "_at_" if name == "mlflow" else "@"  # MLflow refuses the @ of pass@1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one point per metric."""
        self._tracker.log({name.replace("@", self._at): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._tracker.finish()


def _plain(value: Any) -> str | float | bool:
    return value if isinstance(value, (str, int, float, bool)) else str(value)
