"""``import lightrft`` is light, and every public name and every module loads without any optional package."""
import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

import lightrft
from lightrft.cli.command_line import parse_command

HEAVY = ("torch", "transformers", "numpy", "deepspeed", "vllm", "sglang", "matplotlib", "datasets")
OPTIONAL = ("deepspeed", "vllm", "sglang", "flash_attn", "liger_kernel", "wandb", "trackio", "torchvision",
            "qwen_vl_utils", "bitsandbytes")
LATE = ("peft", )  # imported where adapters are made


def run(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr


def test_importing_the_package_loads_nothing_heavy():
    run(f"import sys, lightrft, lightrft.config.schema\nassert not set({HEAVY}) & set(sys.modules), 'heavy'")


@pytest.mark.parametrize("script,flag", [("train", "--policy_loss"), ("train_sft", "--train_data"),
                                         ("train_dpo", "--ipo"), ("train_kto", "--beta"), ("train_kd", "--kd_coef"),
                                         ("train_prm", "--reward_tokens")])
def test_help_loads_nothing_heavy(script, flag):
    """Nor does a mistake in the command line."""
    for word, code in ((flag + "x", 2), ("--help", 0)):
        run(f"import sys\nfrom lightrft.cli.{script} import main\ntry:\n    main([{word!r}])\n"
            f"except SystemExit as end:\n    assert end.code == {code} and not set({HEAVY}) & set(sys.modules)")


MISTAKES = ("train", "train --pretrain ./no --prompt_data DATA", "train --pretrain DATA --prompt_data no.jsonl",
            "train --pretrain DATA --prompt_data DATA --reward no.py", "sft --pretrain DATA --train_data no.jsonl",
            "train --pretrain DATA --prompt_data DATA --reward accuracy --gamma 1", "prm --pretrain ./no",
            "train --pretrain DATA --prompt_data DATA --gamma 2", "kd --pretrain DATA --train_data DATA",
            "generate --prompt_data DATA", "evaluate --pretrain DATA", "evaluate --pretrain ./no --eval_suite gsm8k",
            "chat", "serve_rm --reward_pretrain a=./no", "export ./no OUT", "convert ./no OUT")


def test_a_mistake_in_the_value_of_an_option_does_not_wait_for_torch(tmp_path, monkeypatch):
    """Each command ends with the error; what does not need torch is known before it is imported."""
    (tmp_path / "DATA").mkdir()
    monkeypatch.chdir(tmp_path)
    run("import sys\nfrom lightrft.cli.main import main\n"
        f"for command in {MISTAKES}:\n    try:\n        main(command.split())\n"
        "    except SystemExit as end:\n        assert end.code == 2, command\n"
        "    else: assert False, command\n    assert 'torch' not in sys.modules, command")


def test_ranks_on_several_machines_find_a_missing_file_out_together(monkeypatch):
    """One that ended at once would leave those of the other machine waiting."""
    words = ["--pretrain", "./no", "--prompt_data", "no.jsonl"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert parse_command(words, "lightrft train", "").config.model.pretrain == "./no"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        parse_command(words, "lightrft train", "")


def test_a_mistake_in_a_program_does_not_wait_for_torch():
    heavy = set(HEAVY) - {"numpy"}
    run("import sys\nfrom lightrft import GRPO\ntry:\n    GRPO('model', 'exact', [{'prompt': '1'}], gama=1)\n"
        f"except Exception as error: assert 'gamma' in str(error) and not {heavy} & set(sys.modules), error\n"
        "else: assert False")


def test_every_module_and_public_name_loads_without_the_optional_packages():
    modules = [info.name for info in pkgutil.walk_packages(lightrft.__path__, "lightrft.") if ".tests" not in info.name]
    assert len(modules) > 60, "modules are missing"
    run(f"import sys\nfrom importlib import import_module\nfor name in {OPTIONAL + LATE}: sys.modules[name] = None\n"
        f"for name in {modules}: import_module(name)\n"
        "import lightrft\nfor name in lightrft.__all__: getattr(lightrft, name)")


SURFACE = {
    "lightrft.trainer": "SPMDPPOTrainer SPMDPPOTrainerVL PPOTrainer FastExperienceMaker NaiveExperienceMaker "
    "get_advantage_calculator SFTTrainer",
    "lightrft.trainer.spmd_ppo_trainer": "SPMDPPOTrainer SPMDPPOTrainerVL",
    "lightrft.trainer.ppo_trainer": "PPOTrainer",
    "lightrft.trainer.fast_exp_maker": "FastExperienceMaker",
    "lightrft.trainer.advantage_calculator": "get_advantage_calculator",
    "lightrft.strategy": "FakeStrategy DeepspeedStrategy FSDPV2Strategy StrategyBase StrategyConfig get_strategy",
    "lightrft.models.loss": "PolicyLoss ValueLoss GPTLMLoss",
    "lightrft.models": "ActorLanguage ActorVL ActorAL",
    "lightrft.models.actor_language": "ActorLanguage ActorVL ActorAL",
    "lightrft.datasets": "PromptDataset PromptDatasetVL",
    "lightrft.utils.cli_args": "add_arguments",
}


@pytest.mark.parametrize("module", SURFACE)
def test_the_surface_of_the_original_imports(module):
    home = import_module(module)
    for name in SURFACE[module].split():
        assert callable(getattr(home, name)), name
    assert not hasattr(home, "Konfig")


def test_public_names():
    assert set(lightrft.__all__) <= set(dir(lightrft))
    assert lightrft.Config().train.seed == 42
    missing = "Konfig"
    assert not hasattr(lightrft, missing), "an unknown name must raise AttributeError"
