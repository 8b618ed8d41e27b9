"""A chat through stdin: turns, commands, pictures, checkpoints; an answer is the same in one piece and in several."""
import io
import sys

import pytest
from PIL import Image

from lightrft import SFT
from lightrft.cli.chat import main
from lightrft.config.cli import parse_config
from lightrft.config.inference_schema import ChatConfig
from lightrft.config.schema import Config
from lightrft.config.tree import options
from lightrft.inference import conversation
from lightrft.inference.conversation import Conversation, talk
from lightrft.inference.loading import LoadedModel
from lightrft.preflight.planned import settle
from lightrft.preflight.hardware import Machine
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import launch, media_runs, tiny
from lightrft.tests.support.runs import no_picture  # noqa: F401  (a fixture)
from lightrft.utils.errors import UserError

SMALL = {"generate_max_len": 24, "prompt_max_len": 200, "engine_kv_mib": 4}


@pytest.fixture(name="model", scope="module")
def fixture_model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("chat") / "model", initializer_range=0.5, num_hidden_layers=1)


def opened(path, **given):
    """A conversation in this process."""
    parsed = parse_config([], defaults={"pretrain": str(path), **SMALL, **given}, tree=ChatConfig)
    settle(parsed.config, parsed.provenance, Machine.here(1))
    config = parsed.config.as_config()
    strategy = get_strategy(config.strategy)
    strategy.setup()
    model = LoadedModel.open(config, strategy, parsed.config.engine.repetition_penalty)
    return Conversation(model, model.start(), parsed.config.seed)


def said(path, lines, **given):
    """What the conversation writes."""
    out = []
    talk(opened(path, **given), io.StringIO("".join(f"{line}\n" for line in lines)), out.append)
    return "".join(out)


def test_a_chat_is_piped_through_the_command(model, monkeypatch, capsys):
    lines = b"hello\n/reset\nhi \xff\n/image \xff\nhello\n Clear\nhello\nEXIT\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8"))
    main(launch.flags({"pretrain": model, "temperature": 0, **SMALL}))
    out, err = capsys.readouterr()
    first, rest, cleared = out.split("a new conversation\n")
    assert "WARNING" not in err, "a chat needs no reference answers"
    *refused, rest = rest.split("convert the text\n")
    assert refused == ["the line is not UTF-8, and is left out. Set the terminal to UTF-8, or "] * 2
    assert first and rest == cleared == first, "after a reset the same question has the same greedy answer; exit ends"


def test_earlier_turns_are_part_of_the_prompt(model):
    talked = opened(model, temperature=0.0)
    list(talked.ask("one"))
    prompt = talked._prompt([*talked.messages, {"role": "user", "content": "two"}], [])
    assert prompt.text.count("<|im_start|>user") == 2 and "one<|im_end|>" in prompt.text
    assert [turn["role"] for turn in talked.messages] == ["user", "assistant"]


def test_an_answer_in_pieces_is_the_answer(model, monkeypatch):
    pieces = list(opened(model, temperature=1.0).ask("tell me"))
    monkeypatch.setattr(conversation, "PIECE", 100)
    (whole, ) = opened(model, temperature=1.0).ask("tell me")
    assert len(pieces) > 1 and "".join(pieces) == whole


FLIPS = [("temperature", 0.1), ("repetition_penalty", 4.0), ("seed", 5), ("system_prompt", "Be brief.")]


@pytest.mark.parametrize("name,value", FLIPS)
def test_flipping_an_option_changes_the_answer(model, name, value):
    assert said(model, ["a", "b"]) != said(model, ["a", "b"], **{name: value})


def test_variables_of_the_template_are_flipped_in_a_chat(model, tmp_path, caplog):
    """One that it does not read is refused before the first message; a message logs no columns."""
    (file := tmp_path / "brief.jinja").write_text(f"{{{{ 'Be brief.' if brief }}}}{tiny.CHATML}")
    plain, brief = (said(model, ["a", "b"], chat_template=str(file), chat_template_kwargs={"brief": value})
                    for value in (False, True))
    assert plain == said(model, ["a", "b"]) != brief and not caplog.messages
    with pytest.raises(UserError, match="sets brief, which the chat template .* It reads no variable"):
        opened(model, chat_template_kwargs={"brief": True})


def test_every_option_is_shown_here_or_in_training():
    assert set(options(ChatConfig)) <= {*options(Config), *dict(FLIPS)}


def test_what_does_not_fit_is_said_and_the_chat_goes_on(model):
    text = said(model, ["/image none.png", "/what", "x" * 300, "hi", "/exit", "never"], temperature=0.0)
    assert "this model takes text only\n" in text and "/reset or clear: begin again" in text
    assert "all 1 prompts are longer than --prompt_max_len 200" in text and "The message is not kept" in text
    assert text.endswith(said(model, ["hi"], temperature=0.0)), "an overlong message leaves no trace"


def test_pictures_go_with_the_next_message(tmp_path):
    pytest.importorskip("torchvision")
    template = media_runs.write_home(tmp_path, "qwen2_5_vl")["chat_template"]
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (56, 56), colour).save(tmp_path / f"{name}.png")
    talked = opened(tmp_path / "model", temperature=0.0, chat_template=template)
    assert talked.show(str(tmp_path / "c.png")).endswith("no such file")
    assert talked.show(str(tmp_path / "a.png")) == "a.png goes with the next message"
    list(talked.ask("what is it?"))
    list(talked.ask("and now?"))
    assert talked.pictures == [str(tmp_path / "a.png")] and not talked.waiting
    prompt = talked._prompt(talked.messages, talked.pictures)
    assert len(prompt.media) == 1 and prompt.unexpanded_ids
    assert talked.show(str(tmp_path / "b.png")) and list(talked.ask("this one?")) and len(talked.pictures) == 2


def test_a_checkpoint_is_talked_to(model, tmp_path, monkeypatch, capsys, no_picture):  # noqa: F811
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4
    run = SFT(model, rows, train_batch_size=4, max_steps=1, max_len=64, save_path=str(tmp_path / "run")).train()
    answers = []
    for path in (run.folder, run.folder / "hf"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        main(launch.flags({"pretrain": path, "temperature": 0, **SMALL}))
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != ""


def test_what_is_no_model_is_refused(tmp_path, capsys):
    """Of a run that has written a model, that is read."""
    for hint in ("no complete checkpoint is there", f"{tmp_path}/hf"):
        with pytest.raises(SystemExit) as done:
            main(["--pretrain", str(tmp_path)])
        said = capsys.readouterr().err
        assert done.value.code == 2 and hint in said and "Traceback" not in said
        (tmp_path / "hf").mkdir(exist_ok=True)
        (tmp_path / "hf" / "config.json").touch()
