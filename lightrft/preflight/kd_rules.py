"""Rules of distillation."""
from collections.abc import Iterator

from lightrft.config.kd_schema import KDConfig
from lightrft.preflight.shared_rules import folder


def teacher_problems(c: KDConfig) -> Iterator[str]:
    """Yield the problems of the teacher and of its part in the loss."""
    t = c.teacher
    if not t.teacher_model:
        yield "--teacher_model is missing: give an HF folder or hub id of the teacher"
    yield from folder("teacher_model", t.teacher_model)
    if t.divergence != "js" and t.js_mix != type(t)().js_mix:
        yield f"--js_mix {t.js_mix:g}: has no effect with --divergence {t.divergence}; drop it, or use js"
    if not t.kd_coef:
        yield "--kd_coef 0: the teacher has no effect; use lightrft sft"
