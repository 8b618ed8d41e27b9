"""Oversampling with carry-over: a step does not wait for its longest responses, they go on in the next one."""
from dataclasses import asdict
from math import ceil
from typing import Any

from lightrft.config.schema import Config
from lightrft.datasets.loader import PromptLoader
from lightrft.trainer.experience_maker import Rollout
from lightrft.trainer.groups import tell_dropped
from lightrft.trainer.open_groups import OpenGroup
from lightrft.trainer.partial_exp_maker import PartialExperienceMaker
from lightrft.trainer.rollout_metrics import staleness_metrics
from lightrft.trainer.samples import Rows, pack_samples
from lightrft.utils.logging import get_logger


class OversamplingSource:
    """Partial rollout (Kimi k1.5, arXiv:2501.12599; APRIL, arXiv:2509.18521).

    ``oversample`` batches of groups are under way; generation ends when one batch is finished, which is trained. The
    others are carried over with every token that they have. A group that would become older than ``max_staleness``
    versions is waited for, so nothing is thrown away and long responses are trained as often as short ones. Groups are
    trained in the order of their oldest token. Near the end no more prompts are drawn than are trained.

    Args:
        total_steps: of the run.
    """
    exhausted = False  # every step has a whole batch

    def __init__(self, config: Config, maker: PartialExperienceMaker, loader: PromptLoader, total_steps: int) -> None:
        rollout = config.rollout
        self.maker, self.loader, self.total_steps = maker, loader, total_steps
        self.batch, self.size, self.max_staleness = (rollout.rollout_batch_size, rollout.n_samples_per_prompt,
                                                     rollout.max_staleness)
        self.most = ceil(rollout.oversample * self.batch - 1e-9)  # 1.1 * 10 is 11
        self.groups: list[OpenGroup] = []

    def make(self, step: int, kl_coef: float = 0.0) -> Rollout:
        """The rollout of one step."""
        missing = min(self.most, (self.total_steps - step) * self.batch) - len(self.groups)
        self.groups += [
            OpenGroup.new(number, prompt, self.size) for number, prompt in self.loader.draw(max(0, missing))
        ]
        running = [group for group in self.groups if group.open]
        due = {group.number for group in running if group.oldest(step) + self.max_staleness <= step}
        tokens = -sum(group.tokens for group in running)
        rows_of = self.maker.advance(running, max(0, self.batch - len(self.groups) + len(running)), due)
        tokens += sum(group.tokens for group in running)
        chosen = self._take(step)
        exp = pack_samples([s for place, group in enumerate(chosen) for s in group.samples(place)], self.size)
        rollout = self.maker.complete(exp, lambda: self._rows(rows_of(), chosen), step, kl_coef)
        rollout.metrics |= staleness_metrics(exp, step) | self._metrics(chosen, step) | {
            "rollout/tokens": tokens,
            "rollout/tokens_per_s": tokens / max(self.maker.timer.seconds("rollout"), 1e-9),
            "rollout/partial/due": len(due),
        }
        return rollout

    def _take(self, step: int) -> list[OpenGroup]:
        """The batch of finished groups whose tokens are the oldest; the others stay, in the same order."""
        self.groups.sort(key=lambda group: (group.oldest(step + 1), group.number))
        chosen = [group for group in self.groups if not group.open][:self.batch]
        taken = {group.number for group in chosen}
        self.groups = [group for group in self.groups if group.number not in taken]
        return chosen

    def _rows(self, rows: Rows, chosen: list[OpenGroup]) -> Rows:
        """Give every group its new ``rows``; returns all those of ``chosen``, numbered by place."""
        groups = {group.number: group for group in (*chosen, *self.groups)}
        for row in rows:
            groups[row["group_id"]].rows.append(row)
        return [
            row | {"group_id": place} for place, group in enumerate(chosen)
            for row in sorted(group.rows, key=lambda row: row["index"])
        ]

    def _metrics(self, chosen: list[OpenGroup], step: int) -> dict[str, float]:
        versions = [set(response.weight_versions) for group in chosen for response in group.responses]
        left = [group.responses[j] for group in self.groups for j in group.open if group.responses[j].token_ids]
        return {
            "rollout/partial/groups": sum(group.oldest(step) < step for group in chosen),
            "rollout/partial/samples": sum(len(each) > 1 for each in versions),
            "rollout/partial/left_groups": len(self.groups),
            "rollout/partial/left_samples": len(left),
            "rollout/partial/left_tokens": sum(len(response.token_ids) for response in left),
        }

    def state_dict(self) -> dict[str, Any]:
        """The groups that go on."""
        return {"open": [asdict(group) for group in self.groups], "size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; what this run cannot go on with is told and dropped."""
        carried = [OpenGroup.load(each) for each in state.get("open", ())]
        if carried and (state["size"] != self.size or len(carried) > self.batch):
            get_logger().warning(
                "the %d groups of %d samples under way in the checkpoint are dropped: now there are groups of %d and "
                "%d per batch", len(carried), state["size"], self.size, self.batch)
        else:
            self.groups = carried
        tell_dropped(state, "rows")
