"""Options of supervised fine-tuning, and of distillation, in which a student learns a teacher's distributions."""
from dataclasses import dataclass

from lightrft.config.offline_schema import OfflineConfig, OfflineDataConfig, OfflineTrainConfig
from lightrft.config.options import NON_NEGATIVE, option, SHARE
from lightrft.config.shared_schema import BalanceConfig
from lightrft.config.tree import group


@dataclass
class SFTTrainConfig(BalanceConfig, OfflineTrainConfig):
    """The optimizer, its batches, the length of the run, and the load of experts."""


@dataclass
class SFTDataConfig(OfflineDataConfig):
    """Demonstrations, their rendering, and which of their tokens are learnt."""
    COLUMNS = ("input_key", )
    input_key: str = option("prompt", "column that holds the prompt or the chat; without it, prompt, messages or input")
    output_key: str | None = option(
        None, "column that holds the answer (default: completion, response, output, answer or solution, the first that "
        "a row has)")
    multiturn: bool = option(True, "learn every assistant turn of a chat; false: only the last one")
    pretrain_mode: bool = option(
        False, "learn every token of a row, prompts included, as in pretraining; a row may be "
        "a text alone")


@dataclass
class SFTConfig(OfflineConfig):
    """The whole option tree of ``lightrft.cli.train_sft``."""
    data: SFTDataConfig = group(SFTDataConfig)
    train: SFTTrainConfig = group(SFTTrainConfig)

    PREFLIGHT = "lightrft.preflight.offline.SFTPreflight"
    TRAINING = "supervised fine-tuning"
    METRICS = ("sft", "eval")
    ROWS = "conversations"


@dataclass
class TeacherConfig:
    """The teacher, and how the student follows it."""
    teacher_model: str | None = option(None, "HF folder or hub id of the teacher, with the student's vocabulary",
                                       common=True, model=True)
    teacher_offload: bool = option(False, "keep the teacher in host memory except while it computes", free=True)
    kd_coef: float = option(0.4, "share of the divergence from the teacher in the loss; the rest is the NLL",
                            within=SHARE, common=True)
    divergence: str = option("forward", "forward: KL(teacher || student); reverse: KL(student || teacher); js: "
                             "Jensen-Shannon", ("forward", "reverse", "js"), common=True)
    js_mix: float = option(0.5, "share of the teacher in the mixture of --divergence js", within="(0, 1)",
                           needs="divergence js")
    kd_top_k: int = option(
        0, "tokens of the teacher per position that count one by one, all others together; 0: the whole vocabulary",
        within=NON_NEGATIVE)
    teacher_cache_dir: str | None = option(
        None,
        "folder in which the tokens of --kd_top_k are kept: computed once, before the first step, after which the "
        "teacher is freed; a later run on the same teacher and data reads them", needs="kd_top_k 64", free=True)


@dataclass
class KDConfig(SFTConfig):
    """The whole option tree of ``lightrft.cli.train_kd``."""
    teacher: TeacherConfig = group(TeacherConfig)

    PREFLIGHT = "lightrft.preflight.offline.KDPreflight"
    TRAINING = "distillation"
    METRICS = ("kd", "eval")
