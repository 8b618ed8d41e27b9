"""Models beside the policy that get its tokens and its media."""
import json
import shutil

import pytest

from lightrft.models.tokenizer import load_tokenizer
from lightrft.tests.support import media_runs
from lightrft.tests.support.runs import config_of, strategy_of, trainer_of
from lightrft.trainer.frozen_model import check_media
from lightrft.trainer.model_media import open_media
from lightrft.utils.errors import UserError

pytest.importorskip("torchvision")


@pytest.fixture(name="home", scope="module")
def fixture_home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(name="options", scope="module")
def fixture_options(home):
    return media_runs.write_home(home, "qwen2_5_vl")


@pytest.mark.parametrize("option, more", [("ref_pretrain", {}), ("teacher_model", {}),
                                          ("critic_pretrain", {"advantage_estimator": "gae"})])
def test_models_that_read_other_media_are_refused(option, more, home, options, tmp_path, capfd):
    """Another normalisation gives every picture other pixels; the policy's go to all models."""
    other = shutil.copytree(home / "model", tmp_path / "other")
    config = config_of(home, tmp_path, **options | {option: str(other)} | more)
    tokenizer = load_tokenizer(str(other))
    store = open_media(str(other), tokenizer, config.data)
    store.media.most = {"image": 1}
    asked = option, str(other), "policy", tokenizer, store
    check_media(*asked)
    settings = json.loads((other / "processor_config.json").read_text())
    settings["image_processor"]["image_std"] = [0.5, 0.5, 0.5]
    (other / "processor_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=f"--{option} .*other: its processor makes other pixel_values of media of kind"):
        trainer_of(config, strategy_of(config))
    store.media.most = {"audio": 1}
    with pytest.raises(UserError, match="takes no media of kind audio, which the rows have"):
        check_media(*asked)
    store.media.most = {"image": 1}
    (other / "processor_config.json").unlink()
    check_media(*asked)
    assert f"--{option} {other}: it is not known whether it reads the media as --pretrain" in capfd.readouterr().err
