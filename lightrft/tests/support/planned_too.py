"""Plans every run that the suite refuses: its dry run has to refuse it too, in the same words."""
import io
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from typing import Any

from lightrft.utils.env import World
from lightrft.utils.errors import ExpectedError, UserError

UNPLANNED = {
    r"^rank \d+: ": "another rank found it, perhaps on another machine",
    "the server sent other bytes to rank": "a plan is made by one rank",
    "responses are unscored|no row is left": "the scores of responses decide",
    "could be scored: unreachable": "a server of rewards need not run yet",
    r"^(vLLM|SGLang)|engine (cannot load|was started for)|HF engine needs|--engine_args|key-value cache":
    "engines are not started",
}  # yapf: disable
"""Refusals that no plan can know -> why."""


def plan_refusals() -> None:
    """Let sessions of this process, once their module is imported, plan what they refuse."""
    module: Any = sys.modules.get("lightrft.trainer.session")
    if module is None or hasattr(module.training_session, "unplanned"):
        return
    run = module.training_session

    @contextmanager
    def training_session(parsed: Any, exits: bool = True, trial: Any = module.DEFAULT, *strategy: Any) -> Iterator[Any]:
        asked = deepcopy(parsed)  # a session adds the defaults of the machine
        try:
            with run(parsed, exits, trial, *strategy) as session:
                yield session
        except (SystemExit, UserError) as end:
            refusal = end.__context__ if isinstance(end, SystemExit) else end
            by_hand = bool(strategy)  # a script with objects of its own, which no command line shows
            if isinstance(refusal, UserError) and not (asked.dry_run or by_hand) and World.from_env().is_main:
                compare(str(refusal), lambda: planned(module, asked, trial))
            raise

    training_session.unplanned = run  # type: ignore[attr-defined]
    module.training_session = training_session


def compare(refusal: str, plan: Callable[[], str]) -> None:
    """Fail where the plan of a run says another thing than the run, which ended with ``refusal``."""
    if not any(re.search(pattern, refusal) for pattern in UNPLANNED):
        said = plan()
        assert said == refusal, f"the run: {refusal}\nits dry run: {said or 'nothing is wrong'}"


def planned(module: Any, parsed: Any, trial: Any) -> str:
    """Return the refusal of the dry run of a command; empty if it refuses nothing. It writes no line."""
    level = logging.root.manager.disable
    logging.disable()
    try:
        with redirect_stdout(io.StringIO()), parsed.own_words():
            module.check(parsed._replace(dry_run=True), trial)
    except ExpectedError as error:
        return str(error)
    except SystemExit:
        return ""
    finally:
        logging.disable(level)
    raise AssertionError("a dry run ends")
