"""Scores responses: rules in this process, slow or foreign rewards in workers and on servers."""
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast, NamedTuple

from lightrft.config.reward_schema import RewardConfig, SUITE_LABEL
from lightrft.rewards.base import JudgedRow, Outcome, RewardInput, Score
from lightrft.rewards.judge import judge_reward
from lightrft.rewards.spec import (add_recipe, file_part, function_part, named_part, parse_entry, parse_models, RECIPES,
                                   RewardPart, RewardRecipe, recipe_for, remote_part, Submit)
from lightrft.rewards.timeouts import GroupBudget, RewardBudget
from lightrft.rewards.workers.pool import WorkerPool
from lightrft.rewards.remote import RemoteReward
from lightrft.utils.errors import UserError

if TYPE_CHECKING:  # torch is imported with the first reward model
    from lightrft.rewards.neural import QueuedReward
    from lightrft.rewards.placement import ScorerSetup

logger = logging.getLogger(__name__)

WARN_S = 60.0  # seconds of waiting for rewards until a warning

Weighted = list[tuple[RewardPart, float]]


@dataclass
class Job:
    """Job of one part outside this process: some responses of a handle and the futures of their outcomes."""
    part: str
    rows: list[int]
    futures: "list[Future[list[Outcome]]]"


class Row(NamedTuple):
    """One response, the parts that judge it, and their outcomes so far."""
    item: RewardInput
    recipe: Weighted
    outcomes: dict[str, Outcome]


@dataclass
class Handle:
    """Handle on numbered responses to one or more prompts, and on the state of their scoring.

    ``rows`` are by number; ``jobs`` are under way; ``together`` waits for whole groups.
    """
    rows: dict[int, Row] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    together: dict[str, tuple[RewardPart, list[int]]] = field(default_factory=dict)
    budgets: dict[str, GroupBudget] = field(default_factory=dict)  # by part

    @property
    def ready(self) -> bool:
        """True once the scores can be collected without waiting."""
        return all(future.done() for job in self.jobs for future in job.futures)


class RewardManager:
    """Manager of a run's rewards, one instance per rank. ``total = sum(weight * part)``, unscored if any part is.

    ``functions`` of this program are rewards under their names; they have the signatures of a reward file. ``setup``
    says where reward models compute, and in which type.
    Raises ``ValueError`` (with the remedy) for an unknown reward, a bad weight or an unfit file.
    """

    def __init__(self, cfg: RewardConfig, functions: Mapping[str, Callable[..., Any]] | None = None,
                 setup: "ScorerSetup | None" = None) -> None:
        self.cfg, self.functions, self.setup = cfg, functions or {}, setup
        self.own_recipes: dict[str, RewardRecipe] = {}
        for recipe in cfg.reward_recipe:
            add_recipe(recipe, self.own_recipes)
        self.models = parse_models(cfg.reward_pretrain)
        self.neural: dict[str, QueuedReward[Any]] = {}
        self.pool = WorkerPool(max(1, cfg.reward_workers))
        self.remote = RemoteReward(cfg.remote_rm_url, cfg.reward_timeout_s) if cfg.remote_rm_url else None
        self.judge: RemoteReward | None = None
        self._named: dict[str, RewardPart] = {}
        self._recipes: dict[tuple[str, str], Weighted] = {}
        self._logged: set[str] = set()
        self._under_way: "dict[Future[list[Outcome]], str]" = {}  # name of the part
        self._budgets: dict[str, RewardBudget] = {}  # by part, for responses begun since the last wait for scores
        self._waited_s = 0.0
        try:
            if self.models:
                from lightrft.rewards.reward_models import check_models
                check_models(cfg, self.models.values())
            for name in self.models if cfg.reward_shard else ():  # all ranks load them together, in this order
                self._part(name)
            self._fixed = self._configured()
        except ValueError:
            self.shutdown()
            raise

    def submit(self, inputs: list[RewardInput]) -> Handle:
        """Start scoring and return at once. Raises ``ValueError`` for a row without a known reward."""
        handle = Handle()
        self.begin([(handle, row, item) for row, item in enumerate(inputs)])
        self.finish(handle)
        return handle

    def begin(self, responses: list[tuple[Handle, int, RewardInput]]) -> None:
        """Add finished responses, each with its number, and start the parts that judge each response on its own."""
        alone: dict[str, tuple[RewardPart, list[tuple[Handle, int]]]] = {}
        self._waited_s = 0.0
        for handle, row, item in responses:
            begun = handle.rows[row] = Row(item, self.parts_of(item), {})
            for part, _ in begun.recipe:
                outcome = part.fast(item) if part.fast is not None else None
                if outcome is not None:
                    begun.outcomes[part.name] = outcome
                elif part.together:
                    handle.together.setdefault(part.name, (part, []))[1].append(row)
                else:
                    alone.setdefault(part.name, (part, []))[1].append((handle, row))
        for part, members in alone.values():
            for (handle, row), future in zip(members, self._start(part, members), strict=True):
                handle.jobs.append(Job(part.name, [row], [future]))

    def finish(self, handle: Handle) -> None:
        """Start the parts that judge responses together; all responses of the handle are added."""
        self._start_together(handle, [part for part, _ in handle.together.values() if not self._waits(part)])

    def _start_together(self, handle: Handle, parts: list[RewardPart]) -> None:
        for part in parts:
            _, rows = handle.together.pop(part.name)
            rows.sort()
            handle.jobs.append(Job(part.name, rows, self._start(part, [(handle, row) for row in rows])))

    def _waits(self, part: RewardPart) -> bool:
        """Return True if a part reads the scores of reward models."""
        return part.reads_models and bool(self.models)

    def begins_early(self, items: Iterable[JudgedRow]) -> bool:
        """Return True if a slow part judges each response to one of these prompts on its own."""
        return any(part.submit is not None and not part.together and part.name not in self.models
                   for item in items for part, _ in self.parts_of(item))  # yapf: disable

    def compares(self, items: Iterable[JudgedRow]) -> bool:
        """Return True if a part judges all responses to one of these prompts together."""
        return any(part.together for item in items for part, _ in self.parts_of(item))

    def parts_of(self, item: JudgedRow) -> Weighted:
        """Return the weighted parts that judge a row: those of its ``--reward_recipe``, else those of ``--reward``, the
        servers and reward models, else its recipe.

        A row of ``--eval_suite`` is always judged by the recipe of its suite.
        """
        key = (item.label, item.data_source)
        own = next((self.own_recipes[name] for name in key if name in self.own_recipes), None)
        if own is None and self._fixed and not item.label.startswith(SUITE_LABEL):
            return self._fixed
        if key not in self._recipes:
            self._recipes[key] = [(self._part(name), weight) for name, weight in own or recipe_for(item)]
        return self._recipes[key]

    def part_names(self) -> set[str]:
        """Return the names of all parts that may judge a row, those of suites left out."""
        recipes = [*self.own_recipes.values(), *([] if self._fixed else RECIPES.values())]
        return {part.name for part, _ in self._fixed} | {name for recipe in recipes for name, _ in recipe}

    def collect(self, handle: Handle) -> list[Score]:
        """Wait for a submission and return scores in its order; log each cause of unscored responses once.

        Raises:
            RuntimeError: a reward model that the ranks divide has not scored yet, see :meth:`flush`.
        """
        self._budgets = {}  # all of this step is begun: later responses are tried again
        if not self.divided:
            self.flush()
        elif any(model.waiting for model in self.neural.values()):
            raise RuntimeError("the reward models are sharded: call flush() on all ranks before collect()")
        self._await(handle)
        if handle.together:
            for number, row in handle.rows.items():
                scores = {name: row.outcomes[name].value if name in row.outcomes else None for name in self.models}
                handle.rows[number] = row._replace(item=replace(row.item, model_rewards=scores))
            self._start_together(handle, [part for part, _ in handle.together.values()])
            self._await(handle)
        return [self._total(handle.rows[row]) for row in sorted(handle.rows)]

    def _await(self, handle: Handle) -> None:
        """Wait for the jobs of a handle, and store their outcomes."""
        for job in handle.jobs:
            outcomes = [outcome for future in job.futures for outcome in self._answer(future)]
            for row, outcome in zip(job.rows, outcomes, strict=True):
                handle.rows[row].outcomes[job.part] = self._judged(outcome)
        handle.jobs = []

    @property
    def divided(self) -> bool:
        """True if the ranks divide the reward models."""
        return self.cfg.reward_shard and self.setup is not None and self.setup.strategy is not None

    def flush(self) -> None:
        """Let the reward models score what is submitted; a collective where the ranks divide them."""
        for model in self.neural.values():
            model.flush()

    def score(self, items: list[RewardInput]) -> list[Score]:
        """Submit responses and wait for their scores; a collective as :meth:`flush` is."""
        handle = self.submit(items)
        self.flush()
        return self.collect(handle)

    def shutdown(self) -> None:
        """Kill the workers and stop the requests to servers. Responses under way come back unscored."""
        self.pool.shutdown()
        for servers in (self.remote, self.judge):
            if servers is not None:
                servers.shutdown()

    def _configured(self) -> Weighted:
        parts: Weighted = []
        others = [*self.models, *(["remote"] if self.remote is not None else [])]
        for entry in map(parse_entry, self.cfg.reward):
            part = file_part(entry, self.pool) if entry.path else self._part(entry.name)
            if entry.path and part.name in [*others, *(known.name for known, _ in parts)]:
                part = replace(part, name=f"{entry.name}.{part.name}")
            if part.name in [known.name for known, _ in parts]:
                raise UserError(f"--reward names {part.name!r} twice. Remedy: name it once, with the weight you want")
            parts.append((part, entry.weight))
        chosen = {part.name for part, _ in parts} | {name for own in self.own_recipes.values() for name, _ in own}
        others_weight = 0.0 if any(part.reads_models for part, _ in parts) else 1.0  # that part counts their scores
        parts += [(self._part(name), others_weight) for name in self.models if name not in chosen]
        return parts + ([(remote_part(self.remote, "remote"), 1.0)] if self.remote is not None else [])

    def _part(self, name: str) -> RewardPart:
        if name not in self._named:
            part = self._named[name] = self._made(name)
            if part.warm is not None:
                part.warm()
        return self._named[name]

    def _made(self, name: str) -> RewardPart:
        if name in self.functions:
            return function_part(name, self.functions[name], self.pool)
        if name in self.models:
            from lightrft.rewards.placement import ScorerSetup
            from lightrft.rewards.reward_models import reward_model
            model = self.neural[name] = reward_model(self.models[name], self.cfg, self.setup or ScorerSetup())
            return RewardPart(name, submit=model.submit, together=model.together)
        if name == "judge":
            self.judge = judge_reward(self.cfg)
            return remote_part(self.judge, name)
        return named_part(name, self.pool)

    def _start(self, part: RewardPart, members: list[tuple[Handle, int]]) -> "list[Future[list[Outcome]]]":
        limit_s, patient = part.limit_s or self.cfg.reward_timeout_s, "timeout" in self.cfg.response_faults
        budget = self._budgets.setdefault(part.name, RewardBudget(limit_s, patient))
        for handle, _ in members:
            handle.budgets.setdefault(part.name, GroupBudget(budget))
        submit = cast(Submit, part.submit)  # a part without one decides each response at once
        futures = submit([handle.rows[row].item for handle, row in members],
                         [handle.budgets[part.name] for handle, _ in members])
        for future in futures:
            self._under_way[future] = part.name
            future.add_done_callback(self._under_way.pop)
        return futures

    def _answer(self, future: "Future[list[Outcome]]") -> list[Outcome]:
        while not future.done():
            start = time.monotonic()
            wait([future], max(WARN_S - self._waited_s, 0.0))
            self._waited_s += time.monotonic() - start
            left = Counter(list(self._under_way.values()))  # a copy: other threads remove entries
            if self._waited_s >= WARN_S and left:
                self._waited_s = 0.0
                self._warn_of_waiting(left)
        return future.result()

    def _warn_of_waiting(self, left: Counter[str]) -> None:
        logger.warning(
            "waited %.0f s for rewards, which are slower than generation; missing answers: %s. Remedy: more "
            "--reward_workers (%d) or reward servers (%d), or a shorter --reward_timeout_s (%g)",
            WARN_S, ", ".join(f"{count} of {part}" for part, count in left.items()), self.pool.count,
            len(self.cfg.remote_rm_url), self.cfg.reward_timeout_s)

    def _judged(self, outcome: Outcome) -> Outcome:
        """Give 0 for a failure that the response has caused, where ``--response_faults`` says so."""
        if outcome.value is None and outcome.fault in self.cfg.response_faults:
            return replace(outcome, value=0.0, error=None)
        return outcome

    def _total(self, row: Row) -> Score:
        parts: dict[str, float | None] = {}
        weights = {part.name: weight for part, weight in row.recipe}
        play = row.item.play
        error, fault, total = play.failure if play is not None and play.failure else None, None, 0.0
        steps: list[tuple[int, float]] = []
        for name, weight in weights.items():
            outcome = row.outcomes[name]
            parts[name] = outcome.value
            parts |= {f"{name}/{key}": value for key, value in outcome.extra.items()}
            if outcome.value is None:
                if error is None or error != (play and play.failure):  # that is told already
                    self._log_once(name, outcome)
                error = error or outcome.error or "none"
            else:
                if outcome.fault:
                    fault = fault or outcome.fault
                    self._log_once(name, outcome)
                total += weight * outcome.value
                steps += [(end, weight * reward) for end, reward in outcome.steps]
        return Score(None if error else total, parts, error, weights, [] if error else steps, None if error else fault)

    def _log_once(self, name: str, outcome: Outcome) -> None:
        """Log the first response of each part and cause that is unscored, or has 0 by its own fault."""
        cause = f"{name}: {outcome.error or outcome.fault}"
        if cause not in self._logged:
            self._logged.add(cause)
            what = "was left unscored" if outcome.value is None else "is to blame and got 0"
            logger.warning("a response %s by reward %s (further ones of this cause are only counted)\n%s", what, cause,
                           outcome.detail)
