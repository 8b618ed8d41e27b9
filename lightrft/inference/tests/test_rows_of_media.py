"""Rows of prompts with media keep what the template of the prompt was given."""
from types import SimpleNamespace

from lightrft.inference.generation import BatchGenerator
from lightrft.types import Episode, Prompt, Segment


def test_tools_and_variables_are_columns_beside_the_media():
    given = {"tools": [{"type": "function"}], "enable_thinking": False}
    prompt = Prompt("u", [1], "t", messages=[{"role": "user", "content": "q"}], media=("image:1", ),
                    template_kwargs=given)  # yapf: disable
    sample = Episode.of(prompt, 0, 0, Segment([2], [-0.5]), "stop")
    writer = SimpleNamespace(media=SimpleNamespace(of=lambda keys: {"images": ["a"]}))
    row = BatchGenerator.row(writer, sample)
    assert row["tools"] == given["tools"] and row["chat_template_kwargs"] == {"enable_thinking": False}
