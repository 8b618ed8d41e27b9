"""Commands that train on fixed data, one row each: ``lightrft NAME``, ``torchrun -m lightrft.cli.train_NAME``."""
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightrft.cli.command_line import parse_command
from lightrft.config.cli import ParsedConfig
from lightrft.config.offline_schema import OfflineConfig
from lightrft.config.preference_schema import DPOConfig, KTOConfig
from lightrft.config.rm_schema import GRMConfig, PRMConfig, RMConfig
from lightrft.config.sft_schema import KDConfig, SFTConfig

if TYPE_CHECKING:
    from lightrft.trainer.offline.offline_trainer import OfflineTrainer


@dataclass(frozen=True)
class OfflineCommand:
    """A command that trains on fixed data.

    Attributes:
        name: as in ``lightrft NAME``; the module ``lightrft.cli.train_NAME`` runs :meth:`main`.
        tree: its options.
        trainer: module and class of the trainer, below ``lightrft.trainer``.
        summary: its line in ``lightrft --help``.
        description: the first lines of its own ``--help``.
    """
    name: str
    tree: type[OfflineConfig]
    trainer: str
    summary: str
    description: str

    @property
    def module(self) -> str:
        """Name of the module that ``python -m`` and torchrun run."""
        return f"lightrft.cli.train_{self.name}"

    def main(self, argv: Sequence[str] | None = None) -> None:
        """Run the command line: every option of the tree, ``--config`` and ``--dry_run``."""
        self.train(parse_command(argv, f"lightrft {self.name}", self.description, self.tree))

    def train(self, parsed: ParsedConfig, exits: bool = True) -> None:
        """Train with parsed options; ``exits`` as in :func:`lightrft.trainer.session.training_session`."""
        # imported after the command line is read: --help and mistakes do not wait for torch
        from lightrft.trainer.offline.train_rows import train_rows
        train_rows(parsed, exits, self.trainer_class())

    def trainer_class(self) -> "type[OfflineTrainer[Any]]":
        """Import the trainer."""
        module, _, name = self.trainer.partition(".")
        return getattr(import_module(f"lightrft.trainer.offline.{module}"), name)


OFFLINE = {
    row.name: row for row in (
        OfflineCommand("sft", SFTConfig, "sft_trainer.SFTTrainer", "supervised fine-tuning",
                       "Supervised fine-tuning on conversations; the loss covers assistant turns only."),
        OfflineCommand("rm", RMConfig, "rm_trainer.RMTrainer", "training of reward models",
                       "Training of a scalar reward model on pairs of a better and a worse answer."),
        OfflineCommand("grm", GRMConfig, "grm_trainer.GRMTrainer", "training of judges that say which answer is better",
                       "Training of a generative judge on pairs of candidates, in a random order."),
        OfflineCommand("prm", PRMConfig, "prm_trainer.PRMTrainer",
                       "training of process reward models, which judge steps",
                       "Training of a process reward model on solutions with a label for every step."),
        OfflineCommand("dpo", DPOConfig, "dpo_trainer.DPOTrainer",
                       "training on pairs of answers: DPO, IPO, SimPO, ORPO ...",
                       "Training on pairs of a better and a worse answer: DPO and its relatives."),
        OfflineCommand("kto", KTOConfig, "kto_trainer.KTOTrainer", "training on answers that are good or bad",
                       "Training on answers that are desirable or not, each on its own: KTO."),
        OfflineCommand("kd", KDConfig, "kd_trainer.KDTrainer", "distillation of a teacher into a student",
                       "Distillation of a teacher into a student, on conversations."),
    )
}
