"""Options of distillation: a student learns the distributions of a teacher on fixed conversations."""
from dataclasses import dataclass

from lightrft.config.options import NON_NEGATIVE, option, SHARE
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.tree import group


@dataclass
class TeacherConfig:
    """The teacher, and how the student follows it."""
    teacher_model: str | None = option(None, "HF folder or hub id of the teacher, with the student's vocabulary",
                                       common=True)
    teacher_offload: bool = option(False, "keep the teacher in host memory except while it computes", free=True)
    kd_coef: float = option(0.4, "share of the divergence from the teacher in the loss; the rest is the NLL",
                            within=SHARE, common=True)
    divergence: str = option("forward", "forward: KL(teacher || student); reverse: KL(student || teacher); js: "
                             "Jensen-Shannon", ("forward", "reverse", "js"), common=True)
    js_mix: float = option(0.5, "share of the teacher in the mixture of --divergence js", within="(0, 1)")
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

    TRAINING = "distillation"
    METRICS = ("kd", "eval")
