import json
import logging
import shutil

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

from lightrft.models.tokenizer import CHAT_TEMPLATES, load_tokenizer
from lightrft.tests.support import tiny
from lightrft.utils.errors import UserError

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "two"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("base"), "qwen2")


@pytest.fixture
def broken(path, tmp_path):
    return shutil.copytree(path, tmp_path / "copy")


def test_the_tokenizer_and_its_own_template(path):
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.pad_token == "<pad>" and tokenizer.eos_token == "<|im_end|>"
    text = "a  b\n<|im_end|>é"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(path).chat_template


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_built_in_templates_mark_what_the_assistant_wrote(path, name):
    tokenizer = load_tokenizer(str(path), name)
    out = tokenizer.apply_chat_template(MESSAGES, return_dict=True, return_assistant_tokens_mask=True)
    kept = [i for i, keep in zip(out["input_ids"], out["assistant_masks"]) if keep]
    assert tokenizer.decode(kept) == "two<|im_end|>"
    prompt = tokenizer.apply_chat_template(MESSAGES[:2], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert whole.startswith(prompt) and "be kind" in prompt


def test_a_template_file(path, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }}!")
    tokenizer = load_tokenizer(str(path), str(tmp_path / "own.jinja"))
    assert tokenizer.apply_chat_template(MESSAGES[1:], tokenize=False) == "1+1?!"
    typed = load_tokenizer(str(path), "{% for message in messages %}<{{ message.content }}>{% endfor %}")
    assert typed.apply_chat_template(MESSAGES[1:], tokenize=False) == "<1+1?><two>"
    (tmp_path / "bad.jinja").write_text("{% for m in %}")
    with pytest.raises(ValueError, match="bad.jinja.*does not render"):
        load_tokenizer(str(path), str(tmp_path / "bad.jinja"))
    with pytest.raises(ValueError, match="unknown chat template 'chatlm'.*chatml, plain, raw"):
        load_tokenizer(str(path), "chatlm")


def test_the_template_of_a_processor(path, tmp_path):
    """Older folders of models that see have it in a JSON file of its own, and none in the tokenizer's."""
    folder = tmp_path / "model"
    shutil.copytree(path, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(str(folder)).chat_template is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "its own"}))
    assert load_tokenizer(str(folder)).chat_template == "its own"
    assert load_tokenizer(str(folder), "raw").chat_template == CHAT_TEMPLATES["raw"]
    assert load_tokenizer(str(path), str(folder / "chat_template.json")).chat_template == "its own"
    with pytest.raises(UserError, match="no JSON with the key 'chat_template'. Give a Jinja file"):
        load_tokenizer(str(path), str(folder / "tokenizer.json"))


def test_a_tokenizer_without_eos_or_pad(broken, path):
    tiny.change_json(broken / "tokenizer_config.json", pad_token=None)
    assert load_tokenizer(str(broken)).pad_token_id is not None
    config = json.loads((broken / "tokenizer_config.json").read_text())
    llama = tiny.config("llama")
    llama.save_pretrained(broken)
    tiny.change_json(broken / "tokenizer_config.json", eos_token=None, pad_token=None,
                     tokenizer_class="PreTrainedTokenizerFast")
    with pytest.raises(ValueError, match="no eos token.*tokenizer_config.json"):
        load_tokenizer(str(broken))
    tiny.change_json(broken / "tokenizer_config.json", **(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer = load_tokenizer(str(broken))
    assert tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"


def test_a_mistyped_folder_that_may_be_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "runs" / "warm").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"'runs/wram': no such folder \(did you mean runs/warm\?\), and on the hub: "):
        load_tokenizer("runs/wram")


def test_no_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"holds no model: no config.json is there; give the folder"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"no config.json is there \(did you mean {tmp_path}/base\?\)"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path / "base"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot load the tokenizer"):
        load_tokenizer(str(tmp_path))


def test_end_tokens_that_the_model_does_not_have(broken, caplog, monkeypatch):
    """That of the tokenizer is refused, one of the generation config warned of; the last token is one."""
    monkeypatch.setattr(logging.getLogger("lightrft"), "propagate", True)
    eos = load_tokenizer(str(broken)).eos_token_id
    for declared, told in ((eos, ""), ([eos, 259], ""), ([eos, 260], "names the end token 260, which the model with")):
        tiny.change_json(broken / "generation_config.json", eos_token_id=declared)
        caplog.clear()
        load_tokenizer(str(broken))
        assert told in caplog.text and bool(told) is bool(caplog.text)
    tiny.change_json(broken / "config.json", vocab_size=eos)
    with pytest.raises(UserError, match=f"token {eos}, which the model with its {eos} tokens can neither draw"):
        load_tokenizer(str(broken))
