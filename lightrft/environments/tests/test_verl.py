"""Tools and interactions of verl, played as their users wrote them."""
from types import SimpleNamespace

import pytest

from lightrft.environments.adapters import adapter_of
from lightrft.environments.base import EnvironmentSpec, ToolCall, Turn, UnreadMedia
from lightrft.environments.loading import load
from lightrft.environments.observations import plain_messages
from lightrft.environments.tests.test_adapters import in_session, play, ROOT
from lightrft.tests.support import foreign_environments as foreign
from lightrft.utils.errors import UserError


def test_an_error_of_a_tool_of_verl_is_told(monkeypatch):
    """As verl does."""

    async def execute(self, instance_id, parameters, **kwargs):
        raise ValueError(parameters["answer"])

    monkeypatch.setattr(foreign.VerlTool, "execute", execute)
    row = {"extra_info": {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "3"}}}}}
    call = ToolCall("check", {"answer": "3"})
    _, first, last = in_session(foreign.VerlTool, Turn("", (call, )), Turn("x"), columns=row)
    assert first["messages"][0]["content"] == "Error executing tool 'check': 3"
    assert first["metrics"] == {"wrong_calls": 1}
    assert last["reward"] == 1.0


def test_methods_of_a_tool_of_verl_have_keywords_of_the_row():
    """Those of its other methods than ``create``, as verl 0.5 documents them. A video is told."""

    class Kept(foreign.VerlTool):
        seen = []

        async def execute(self, instance_id, parameters, **kwargs):
            self.seen.append(("execute", {name: value for name, value in kwargs.items() if name != "agent_data"}))
            return SimpleNamespace(text="", image=[None], video=[1] if parameters["answer"] == "video" else None), 0, {}

        async def calc_reward(self, instance_id, **kwargs):
            self.seen.append(("calc_reward", kwargs))
            return 0.5

        async def release(self, instance_id, **kwargs):
            self.seen.append(("release", kwargs))

    names = ("execute", "calc_reward", "release")
    given = {"create_kwargs": {"ground_truth": "3"}} | {f"{name}_kwargs": {"of": name} for name in names}
    row = {"extra_info": {"tools_kwargs": {"check": given}}}
    call, video = (Turn("", (ToolCall("check", {"answer": answer}), )) for answer in ("3", "video"))
    _, _, first, last = play(Kept, call, Turn("x"), columns=row)
    assert Kept.seen == [(name, {"of": name}) for name in names] and first.messages[0]["content"] == ""
    assert last.reward == 0.5
    with pytest.raises(UnreadMedia, match="answered with video"):
        in_session(Kept, video, columns=row)


def test_a_tool_of_verl_has_an_instance_of_the_row():
    row = {"extra_info": {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "3"}}}}}
    turns = [Turn("", (ToolCall("check", {"answer": "3"}), ToolCall("check", {"answer": "4"}))),
             Turn("", (ToolCall("check", {"answer": 3}), )), Turn("3")]  # yapf: disable
    info, opened, first, wrong, last = play(foreign.VerlTool, *turns, columns=row)
    assert opened is None and [tool["function"]["name"] for tool in info.tools] == ["check"]
    assert [message["content"] for message in first.messages] == ["right: True", "right: False"]
    assert first.reward == 0.25 and first.metrics == {"wrong_calls": 0, "checked": 2.0}
    assert wrong.messages[0]["content"].startswith("Error: the argument answer of check is 3")
    assert last.done and last.reward == 1.0


def test_tools_of_verl_share_what_verl_gives_them(monkeypatch):
    """Its loop passes ``agent_data``, with the messages so far; a video of an answer is refused and not lost."""
    seen = []

    async def execute(self, instance_id, parameters, *, agent_data):
        kept = agent_data.extra_fields.setdefault("kept", [])
        kept.append(parameters["answer"])
        seen.append(([message["role"] for message in agent_data.messages], [*agent_data.tool_rewards], [*kept],
                     agent_data.tools_kwargs["check"]["create_kwargs"]["ground_truth"]))  # yapf: disable
        return SimpleNamespace(text="", video=["clip.mp4"] * (len(kept) > 1)), 0.5, {}

    monkeypatch.setattr(foreign.VerlTool, "execute", execute)
    row = {"extra_info": {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "3"}}}}}
    turns = [Turn("", (ToolCall("check", {"answer": "3"}), ), {"role": "assistant"})] * 2
    _, _, first, second = play(foreign.VerlTool, *turns, columns=row)
    assert seen == [(["user", "assistant"], [], ["3"], "3"),
                    (["user", "assistant", "tool", "assistant"], [0.5], ["3", "3"], "3")]  # yapf: disable
    assert first.messages[0]["content"] == ""
    with pytest.raises(UnreadMedia, match="video"):
        plain_messages(second.messages)


def test_a_tool_of_verl_without_a_schema_is_told_where_to_give_one():
    bare = type("Bare", (foreign.VerlTool, ), {"get_openai_tool_schema": lambda self: None})
    with pytest.raises(UserError, match=r"Bare of verl .* tools = \[Bare\(config, tool_schema\)\]"):
        adapter_of(bare)


def test_tools_of_verl_in_a_list_are_tools(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"import sys\nsys.path.append({str(ROOT)!r})\nfrom lightrft.tests.support import "
                    "foreign_environments\n\n\nclass Check(foreign_environments.VerlTool):\n    pass\n\n\n"
                    "tools = [Check({}, None)]\n")  # yapf: disable
    made, info = load(EnvironmentSpec(str(file)))
    assert info.kind == "verl tools" and made().box.tools.keys() == {"check"}


def test_an_interaction_of_verl_answers_as_a_user():
    row = {"extra_info": {"interaction_kwargs": {"name": "sums", "ground_truth": "3"}}}
    _, opened, first, last = play(foreign.VerlInteraction, Turn("4"), Turn("3"), columns=row)
    assert opened is None and first.messages == "Wrong, after 2 messages." and first.metrics == {"asked": 1.0}
    assert (first.reward, first.done, last.reward, last.done) == (0.0, False, 1.0, True)


def test_an_interaction_of_verl_may_keep_the_end_of_its_base_class(monkeypatch):
    """Which takes no instance."""

    async def finalize_interaction(self):
        self.truths.clear()

    monkeypatch.setattr(foreign.VerlInteraction, "finalize_interaction", finalize_interaction)
    *_, last = play(foreign.VerlInteraction, Turn("3"), columns={"extra_info": {"interaction_kwargs": {}}})
    assert not last.done
