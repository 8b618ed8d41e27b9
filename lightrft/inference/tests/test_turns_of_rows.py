"""Responses of several turns as rows: messages for other tools, and training rows that learn the policy's turns only.
"""
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lightrft.config.offline_schema import PairDataConfig
from lightrft.config.schema import DataConfig
from lightrft.datasets.preferences import PairDataset
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.inference.accuracy import drawn_text
from lightrft.inference.post_processing import post_process
from lightrft.tests.support import tool_models
from lightrft.trainer.scores import log_row, trajectory
from lightrft.types import Episode, Prompt, Segment
from lightrft.utils.errors import UserError
from lightrft.utils.play import Play
from lightrft.utils.score import Score

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}]
ASKED = [{"role": "user", "content": "3+4?"}]
DRAWN = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'


def episode(last, reward, asked=ASKED):
    """One call of a tool and an answer, with rewards of both turns."""
    told = {"role": "tool", "content": "7"}
    segments = [Segment([7, 8], [-1.0] * 2), Segment.given([9, 9]), Segment([10], [-1.0])]
    play = Play([{"role": "assistant", "content": DRAWN}, told, {"role": "assistant", "content": last}],
                [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "assistant", "content": last}],
                [(2, 0.25), (5, reward)], turns=2, calls=1, wait_s=0.5, metrics={"odd": 1.0})  # yapf: disable
    text = f"{DRAWN}<|im_end|>\n7\n{last}"
    return Episode(Prompt("0:0", [5], "3+4?", asked, template_kwargs={"tools": TOOLS}), 0, 0, segments, "stop", text,
                   score=Score(reward), play=play)  # yapf: disable


def row(last, reward):
    made = episode(last, reward)
    return {"input": made.prompt.text, "output": made.text, "reward": reward, "finish_reason": "stop",
            **trajectory(made), "play": asdict(made.play)}  # yapf: disable


def test_a_saved_rollout_has_the_turns_as_messages_with_calls_and_rewards():
    saved = json.loads(json.dumps(log_row(episode("It is 7.", 1.0))))
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")
    assert {"messages": saved["messages"]} == json.loads(page.split("```json\n")[2].split("```")[0])
    assert saved["tools"] == TOOLS
    assert saved["environment"] == {"turns": 2, "calls": 1, "wait_s": 0.5, "metrics": {"odd": 1.0}}
    begun = episode("It is 7.", 1.0, [*ASKED, {"role": "assistant", "content": "Well, "}])
    assert [turn["content"] for turn in log_row(begun)["messages"]] == ["3+4?", "Well, ", "7", "It is 7."]
    begun.segments, begun.play = begun.segments[1:], Play(begun.play.messages[1:])
    assert [turn["role"] for turn in log_row(begun)["messages"]][1:] == ["tool", "assistant"]
    begun.play = None
    assert not {"messages", "tools", "environment"} & log_row(begun).keys(), "a run without an environment"


def test_a_fork_has_the_messages_of_each_branch():
    """What was said behind the last turn of a branch is in the prompt of the next one, as the environment wrote it."""
    made = episode("It is 7.", 1.0)
    plain = log_row(made)
    assert "branches" not in plain and "branches" not in trajectory(made)
    call, told, answer = plain["messages"][1:]
    *before, last = made.segments
    made.segments, made.play.rewards = before[:1], [(2, 0.25), (6, 1.0)]
    summary = [*ASKED, {"role": "user", "content": "add said 7"}]
    made.fork(replace(made.prompt, token_ids=[5, 6, 4], messages=summary))
    made.add([last], "stop")
    assert log_row(made)["messages"] == [*ASKED, call, told, answer], "one conversation"
    assert log_row(made)["branches"] == [[*ASKED, call], [*summary, answer]] and answer["reward"] == 1.0
    made.segments = []
    assert made.branches == made.closed, "one that ended before it drew anything is none"


def shown(example, tokenizer):
    """The text that is in the loss."""
    return tokenizer.decode([token for token, keep in zip(example.token_ids, example.loss_mask) if keep])


def test_the_best_responses_and_pairs_train_without_conversion_and_never_on_what_a_tool_wrote(tmp_path):
    tokenizer, rows = tool_models.tokenizer(), [row("It is 7.", 1.0), row("It is 8.", 0.0)]
    for name in ("rs", "iter_dpo"):
        found, _ = post_process(name, rows, "")
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found), encoding="utf-8")
    (tmp_path / "step_1.jsonl").write_text(json.dumps(log_row(episode("It is 7.", 1.0))) + "\n", encoding="utf-8")
    for name, key in (("rs", "prompt"), ("step_1", "messages")):
        (best, ) = SFTDataset(DataConfig(prompt_data=[str(tmp_path / f"{name}.jsonl")], input_key=key), tokenizer, 500)
        whole = tokenizer.decode(best.token_ids)
        assert "# Tools" in whole and "<tool_response>\n7\n</tool_response>" in whole
        assert shown(best, tokenizer) == f"{DRAWN}<|im_end|>It is 7.<|im_end|>"
    (pair, ) = PairDataset(PairDataConfig(train_data=[str(tmp_path / "iter_dpo.jsonl")], max_len=500), tokenizer)
    assert [shown(side, tokenizer) for side in (pair.chosen, pair.rejected)] == [
        f"{DRAWN}<|im_end|>It is {number}.<|im_end|>" for number in (7, 8)]  # yapf: disable
    assert "# Tools" in tokenizer.decode(pair.rejected.token_ids)


def test_texts_of_several_turns_are_refused_where_messages_are_needed():
    with pytest.raises(UserError, match="csft: .* chats of several turns; use rs or iter_dpo"):
        post_process("csft", [row("7", 1.0)], "{input}")
    made = row("7", 1.0)
    made["messages"][2] = {"role": "environment", "content": "\n7\n"}
    with pytest.raises(UserError, match="rs: .* writes text"):
        post_process("rs", [made], "")


def test_the_answer_of_a_row_is_what_the_policy_drew():
    assert drawn_text(row("It is 7.", 1.0)) == f"{DRAWN}\nIt is 7." and drawn_text({"output": "7"}) == "7"
