"""A checkpoint becomes the model that the run itself would have written."""
import logging
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer

from lightrft import GRPO, SFT
from lightrft.cli.convert import main as convert
from lightrft.cli.export import export, main
from lightrft.strategy import checkpoint
from lightrft.strategy.checkpoint import read_global
from lightrft.tests.support import tiny, tiny_task, tiny_vision
from lightrft.tests.support.runs import no_picture  # noqa: F401  (a fixture)
from lightrft.tests.support.tiny_vision import FAMILIES
from lightrft.trainer.model_card import _is_written, _task
from lightrft.utils.errors import UserError

SMALL = {
    "rollout_batch_size": 4, "n_samples_per_prompt": 2, "train_batch_size": 8, "prompt_max_len": 64,
    "generate_max_len": 8, "engine_kv_mib": 1, "self_test": False, "save_steps": 1, "max_steps": 2
}  # yapf: disable


@pytest.fixture(name="home", scope="module")
def fixture_home(tmp_path_factory):
    return tiny_task.write_home(tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2, "lora_alpha": 4}], ids=["full", "lora"])
def test_the_model_of_a_checkpoint_is_that_of_the_run(home, tmp_path, options, no_picture, monkeypatch):  # noqa: F811
    """Also on a CPU that of a run on a GPU, which has Liger's kernels by default."""
    run = GRPO(home / "model", lambda completions: [len(text) for text in completions], tiny_task.rows(8),
               save_path=str(tmp_path / "run"), **SMALL, **options).train()
    on_gpu = {"use_liger": True}
    monkeypatch.setattr(checkpoint, "read_global", lambda path: {"options": read_global(path)["options"] | on_gpu})
    main([str(run.folder), str(tmp_path / "last")])  # the newest checkpoint of the run
    convert([str(run.folder / "checkpoints" / "step_000001"), str(tmp_path / "first")])  # which knows these, too
    own, last, first = (load_file(path / "model.safetensors")
                        for path in (run.folder / "hf", tmp_path / "last", tmp_path / "first"))
    assert all(own[name].equal(last[name]) for name in own) and own.keys() == last.keys()
    assert any(not own[name].equal(first[name]) for name in own), "another step is another model"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "first").config.vocab_size
    assert AutoTokenizer.from_pretrained(tmp_path / "first").eos_token_id is not None
    card = (tmp_path / "first" / "README.md").read_text()
    assert "after 1 step of" in card and "| reward/mean |" in card and "step 1 |" in card
    assert "| reward/mean |" in (tmp_path / "last" / "README.md").read_text().split("step 1 -> 2")[0]
    assert (tmp_path / "last" / "adapter").exists() == bool(options)


def test_a_supervised_run_is_exported_too_and_its_model_may_have_moved(home, tmp_path, no_picture):  # noqa: F811
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4
    moved = tmp_path / "moved"
    (home / "model").rename(moved)
    run = SFT(moved, rows, train_batch_size=4, max_steps=1, max_len=64, chat_template="chatml",
              save_path=str(tmp_path / "run")).train()
    moved.rename(home / "model")
    export(run.folder, tmp_path / "out", str(home / "model"))
    own, found = (load_file(path / "model.safetensors") for path in (run.folder / "hf", tmp_path / "out"))
    assert all(own[name].equal(found[name]) for name in own)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert card == (run.folder / "hf" / "README.md").read_text(encoding="utf-8").replace(
        repr(str(run.folder / "hf")), repr(str(tmp_path / "out"))).replace(str(moved), str(home / "model"))
    with warnings_of("transformers") as told:
        exec(card.split("```python\n")[1].split("```")[0], {})
    assert not told, "the model and its tokenizer load and generate without a warning"


@contextmanager
def warnings_of(name):
    """The messages that a logger gets from WARNING on."""
    told, logger, handler = [], logging.getLogger(name), logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


@pytest.mark.parametrize("family, kind, task, auto", [
    ("qwen2_5_vl", "image", "image-text-to-text", "AutoModelForImageTextToText"),
    ("qwen2_audio", "audio", "audio-text-to-text", "AutoModelForMultimodalLM"),
])
def test_models_that_see_or_hear_are_written_with_their_processors(family, kind, task, auto, tmp_path, capsys,
                                                                   no_picture):  # noqa: F811
    """By the run and from its checkpoint; the code on its card loads both, and answers to a medium."""
    pytest.importorskip("torchvision")
    base, mark = tiny_vision.save_model(tmp_path / "base", family, tied=False), FAMILIES[family].placeholders[kind]
    template = ("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
                "{{ p.text if p.type == 'text' else '" + mark + "' }}{% endfor %}{% endif %}{% endfor %}")
    (tmp_path / "template.jinja").write_text(template, encoding="utf-8")
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4
    run = SFT(base, rows, train_batch_size=4, max_steps=1, max_len=64, chat_template=str(tmp_path / "template.jinja"),
              save_path=str(tmp_path / "run")).train()
    export(run.folder, tmp_path / "out")
    media = {"images": [Image.new("RGB", (56, 84), "red")]} if kind == "image" else {"audio": [np.zeros(16000)]}
    asked, files = media | {"text": [f"x {mark}"], "return_tensors": "pt"}, {path.name for path in base.iterdir()}
    expected = AutoProcessor.from_pretrained(base)(**asked)
    for folder in (run.folder / "hf", tmp_path / "out"):
        assert {path.name for path in folder.iterdir()} >= files - {"README.md"} | {"chat_template.jinja"}
        card = (folder / "README.md").read_text(encoding="utf-8")
        capsys.readouterr()
        exec(card.split("```python\n")[1].split("```")[0], found := {})
        assert found["output"].shape[1] > found["inputs"]["input_ids"].shape[1] and capsys.readouterr().out
        assert str(folder) in card and f" {auto}," in card and f"\npipeline_tag: {task}\n" in card
        inputs = found["processor"](**asked)
        assert inputs.keys() == expected.keys() and all(inputs[name].equal(expected[name]) for name in expected)
        assert found["processor"].chat_template == template


def test_a_card_shows_no_medium_that_the_template_drops():
    tokenizer = tiny.tokenizer()
    for template, written in (("{{ messages[0].content }}", False), ("{{ messages[0].content[0].type }}", True),
                              ("{{ messages[0].content[-1].text }}", False), ("{{ messages.nothing.at.all }}", False)):
        tokenizer.chat_template = template
        assert _is_written("image", tokenizer) is written
    assert [_task(kinds) for kinds in ((), ("image", "audio"))] == ["text-generation", "any-to-any"]


def test_what_is_no_checkpoint_is_an_error(home, tmp_path, capsys):
    with pytest.raises(UserError, match="no complete checkpoint is there"):
        export(tmp_path, tmp_path / "out")
    (tmp_path / "step_000001").mkdir()
    with pytest.raises(SystemExit) as done:
        main([str(tmp_path / "step_000001"), str(tmp_path / "out")])
    assert done.value.code == 2 and "COMPLETE.json is missing" in capsys.readouterr().err
