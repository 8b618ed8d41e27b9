"""One line of the doctor: the subject, the verdict and the remedy."""
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lightrft.utils.errors import UserError, first_line

VERDICTS = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """Result of one check. ``verdict`` is one of :data:`VERDICTS`; ``remedy`` is empty if nothing has to be done."""
    verdict: str
    name: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:<5} {self.name:<16} {self.text}" + (f"; {self.remedy}" if self.remedy else "")


def examine(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of ``check``. Its refusals and failing packages or system calls become findings too."""
    try:
        yield from check()
    except UserError as error:
        yield Finding("fail", name, str(error))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        yield Finding("fail", name, f"cannot be checked: {type(error).__name__}: {first_line(error)}",
                      "fix the failures above, or reinstall: pip install -e . in the checkout of lightrft")


def worst(findings: Iterable[Finding]) -> str:
    """The worst verdict."""
    return max((found.verdict for found in findings), key=VERDICTS.index, default="ok")
