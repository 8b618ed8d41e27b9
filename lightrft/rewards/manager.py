"""Scores responses: rules in this process, what is slow or foreign in workers and on servers."""
import logging
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from lightrft.config.schema import RewardConfig
from lightrft.rewards.base import Outcome, RewardInput, Score
from lightrft.rewards.parts import Part, file_part, named_part, parse_entry, remote_part
from lightrft.rewards.pool import WorkerPool
from lightrft.rewards.probe import probe
from lightrft.rewards.recipes import recipe_for
from lightrft.rewards.remote import RemoteReward
from lightrft.utils.errors import UserError

logger = logging.getLogger(__name__)

Weighted = list[tuple[Part, float]]


@dataclass
class Job:
    """The responses of one submission that one part has to judge outside this process."""
    part: str
    rows: list[int]
    futures: "list[Future[list[Outcome]]]"


@dataclass
class Handle:
    """A submission: what is decided already (``outcomes[row][part]``) and what is under way."""
    weights: list[dict[str, float]]  # of each row's parts; one dict for all rows of a recipe
    outcomes: list[dict[str, Outcome]]
    jobs: list[Job] = field(default_factory=list)


class RewardManager:
    """Rewards of a run, one instance per rank. ``total = sum(weight * part)``, unscored if any part is.

    Raises ``ValueError`` (with the remedy) for an unknown reward, a bad weight or an unfit file.
    ``counters`` holds how many responses were left unscored, by cause (metrics ``reward/unscored/<cause>``).
    """

    def __init__(self, cfg: RewardConfig) -> None:
        self.cfg = cfg
        self.counters: Counter[str] = Counter()
        self.pool = WorkerPool(max(1, cfg.reward_workers), cfg.reward_timeout_s)
        self.remote = RemoteReward(cfg.remote_rm_url, cfg.reward_timeout_s) if cfg.remote_rm_url else None
        self._named: dict[str, Part] = {}
        self._recipes: dict[tuple[str, str], Weighted] = {}
        self._logged: set[str] = set()
        try:
            self._fixed = self._configured()
        except ValueError:
            self.shutdown()
            raise

    def submit(self, inputs: list[RewardInput]) -> Handle:
        """Start scoring and return at once. ``ValueError`` for a row whose reward is not known."""
        recipes = [self.parts_of(item) for item in inputs]
        weights = {id(recipe): {part.name: weight for part, weight in recipe} for recipe in recipes}
        handle = Handle([weights[id(recipe)] for recipe in recipes], [{} for _ in inputs])
        rows: dict[str, tuple[Part, list[int]]] = {}
        for row, recipe in enumerate(recipes):
            for part, _ in recipe:
                rows.setdefault(part.name, (part, []))[1].append(row)
        for part, members in rows.values():
            self._start(handle, part, members, inputs)
        return handle

    def collect(self, handle: Handle) -> list[Score]:
        """Wait for a submission; scores in its order. Each cause of unscored responses is counted, and logged once."""
        scores = self.wait(handle)
        self.counters.update(score.error for score in scores if score.error is not None)
        return scores

    def probe(self, rows: list[RewardInput]) -> None:
        """Resolve every row's reward and try each kind on a known-good and a known-bad answer; see ``probe.probe``."""
        probe(self, rows)

    def parts_of(self, item: RewardInput) -> Weighted:
        """The weighted parts that judge a row: those of ``--reward`` and the servers, else its recipe."""
        if self._fixed:
            return self._fixed
        key = (item.label, item.data_source)
        if key not in self._recipes:
            self._recipes[key] = [(self._part(name), weight) for name, weight in recipe_for(item)]
        return self._recipes[key]

    def wait(self, handle: Handle) -> list[Score]:
        """``collect`` without counting."""
        for job in handle.jobs:
            outcomes = [outcome for future in job.futures for outcome in future.result()]
            for row, outcome in zip(job.rows, outcomes, strict=True):
                handle.outcomes[row][job.part] = outcome
        handle.jobs = []
        return [
            self._total(weights, outcomes) for weights, outcomes in zip(handle.weights, handle.outcomes, strict=True)
        ]

    def shutdown(self) -> None:
        """Kill the workers and stop asking the servers. What is under way comes back unscored."""
        self.pool.shutdown()
        if self.remote is not None:
            self.remote.shutdown()

    def _configured(self) -> Weighted:
        parts: Weighted = []
        for entry in map(parse_entry, self.cfg.reward):
            part = file_part(entry, self.pool) if entry.path else self._part(entry.name)
            if entry.path and part.name in [known.name for known, _ in parts]:
                part = replace(part, name=f"{entry.name}.{part.name}")
            if part.name in [known.name for known, _ in parts]:
                raise UserError(f"--reward names {part.name!r} twice. Remedy: name it once, with the weight you want")
            parts.append((part, entry.weight))
        return parts + ([(remote_part(self.remote), 1.0)] if self.remote is not None else [])

    def _part(self, name: str) -> Part:
        if name not in self._named:
            part = self._named[name] = named_part(name, self.pool)
            if part.warm is not None:
                part.warm()
        return self._named[name]

    def _start(self, handle: Handle, part: Part, rows: list[int], inputs: list[RewardInput]) -> None:
        left = []
        for row in rows:
            outcome = part.fast(inputs[row]) if part.fast is not None else None
            if outcome is None:
                left.append(row)
            else:
                handle.outcomes[row][part.name] = outcome
        if left and part.submit is not None:
            handle.jobs.append(Job(part.name, left, part.submit([inputs[row] for row in left])))

    def _total(self, weights: dict[str, float], outcomes: dict[str, Outcome]) -> Score:
        parts: dict[str, float | None] = {}
        error, total = None, 0.0
        for name, weight in weights.items():
            outcome = outcomes[name]
            parts[name] = outcome.value
            parts |= {f"{name}/{key}": value for key, value in outcome.extra.items()}
            if outcome.value is None:
                error = error or outcome.error or "none"
                self._log_once(name, outcome)
            else:
                total += weight * outcome.value
        return Score(None if error else total, parts, error, weights)

    def _log_once(self, name: str, outcome: Outcome) -> None:
        cause = f"{name}: {outcome.error}"
        if cause not in self._logged:
            self._logged.add(cause)
            logger.warning(
                "a response was left unscored by reward %s (further ones of this cause are only counted)\n%s", cause,
                outcome.detail)
