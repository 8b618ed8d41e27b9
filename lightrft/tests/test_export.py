"""A checkpoint becomes the model that the run itself would have written."""
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft import GRPO, SFT
from lightrft.cli.export import export, main
from lightrft.strategy import checkpoint
from lightrft.strategy.checkpoint import read_global
from lightrft.tests.support import tiny_task
from lightrft.tests.support.runs import no_picture  # noqa: F401  (a fixture)
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
    main([str(run.folder / "checkpoints" / "step_000001"), str(tmp_path / "first")])
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
    exec(card.split("```python\n")[1].split("```")[0], {})


def test_what_is_no_checkpoint_is_an_error(home, tmp_path, capsys):
    with pytest.raises(UserError, match="no complete checkpoint is there"):
        export(tmp_path, tmp_path / "out")
    (tmp_path / "step_000001").mkdir()
    with pytest.raises(SystemExit) as done:
        main([str(tmp_path / "step_000001"), str(tmp_path / "out")])
    assert done.value.code == 2 and "COMPLETE.json is missing" in capsys.readouterr().err
