"""Options of supervised fine-tuning, and of distillation from a teacher."""
from dataclasses import dataclass

from lightrft.config.offline_schema import OfflineConfig, OfflineDataConfig
from lightrft.config.options import NON_NEGATIVE, option, SHARE
from lightrft.config.tree import group


@dataclass
class SFTDataConfig(OfflineDataConfig):
    """Demonstrations, their rendering, and which of their tokens are learnt."""
    COLUMNS = ("input_key", )
    input_key: str = option("prompt", "column that holds the prompt or the chat (default: prompt, messages or input)",
                            common=True)
    output_key: str | None = option(
        None, "column that holds the answer (default: completion, response, output, answer or solution, the first that "
        "a row has)", common=True)
    multiturn: bool = option(True, "put every assistant turn of a chat into the loss; false: only the last one")
    pretrain_mode: bool = option(
        False, "put every token of a row into the loss, including the prompt, as in pretraining; "
        "a row may be just a text")


@dataclass
class SFTConfig(OfflineConfig):
    """The whole option tree of ``lightrft.cli.train_sft``."""
    data: SFTDataConfig = group(SFTDataConfig)

    PREFLIGHT = "lightrft.preflight.offline.SFTPreflight"
    TRAINING = "supervised fine-tuning"
    METRICS = ("sft", "eval")
    ROWS = "conversations"


@dataclass
class TeacherConfig:
    """The teacher, and how the student follows it."""
    teacher_model: str | None = option(None, "HF folder or hub id of the teacher, with the student's vocabulary",
                                       common=True, path="model", required="give an HF folder or hub id of the teacher")
    teacher_offload: bool = option(False, "keep the teacher in host memory except while it computes", free=True)
    kd_coef: float = option(
        0.4, "weight of the divergence from the teacher in the loss; 1 - kd_coef is the weight "
        "of the NLL", within=SHARE, common=True)
    divergence: str = option("forward", "forward: KL(teacher || student); reverse: KL(student || teacher); js: "
                             "Jensen-Shannon", ("forward", "reverse", "js"), common=True)
    js_mix: float = option(0.5, "weight of the teacher in the mixture of --divergence js", within="(0, 1)",
                           needs="divergence js")
    kd_top_k: int = option(
        0, "keep only the k most probable tokens of the teacher; all others count as one; 0: the whole vocabulary",
        within=NON_NEGATIVE)
    teacher_cache_dir: str | None = option(
        None,
        "cache folder for the tokens of --kd_top_k: computed once before the first step, then the teacher is freed; "
        "later runs on the same teacher and data reuse them", needs="kd_top_k 64", free=True)


@dataclass
class KDConfig(SFTConfig):
    """The whole option tree of ``lightrft.cli.train_kd``."""
    teacher: TeacherConfig = group(TeacherConfig)

    PREFLIGHT = "lightrft.preflight.offline.KDPreflight"
    TRAINING = "distillation"
    METRICS = ("kd", "eval")
