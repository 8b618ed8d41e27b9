"""``import lightrft`` is light, and every public name and every module loads without any optional package."""
import json
import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

import lightrft
from lightrft.cli.command_line import parse_command
from lightrft.tests.support.launch import ROOT
from lightrft.tests.support.optional_packages import KERNELS, LATE, OPTIONAL

HEAVY = ("torch", "transformers", "numpy", "deepspeed", "vllm", "sglang", "matplotlib", "datasets")


def run(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr


def test_importing_the_package_loads_nothing_heavy():
    run(f"import sys, lightrft, lightrft.config.schema\nassert not set({HEAVY}) & set(sys.modules), 'heavy'")


@pytest.mark.parametrize("script,flag", [("train", "--policy_loss"), ("train_sft", "--train_data"),
                                         ("train_dpo", "--ipo"), ("train_kto", "--beta"), ("train_kd", "--kd_coef"),
                                         ("train_prm", "--reward_tokens")])
def test_help_loads_nothing_heavy(script, flag):
    """Nor does a mistake in the command line, whose answer has the problems of the rows too: those need numpy."""
    for word, code, heavy in ((flag + "x", 2, set(HEAVY) - {"numpy"}), ("--help", 0, set(HEAVY))):
        run(f"import sys\nfrom lightrft.cli.{script} import main\ntry:\n    main([{word!r}])\n"
            f"except SystemExit as end:\n    assert end.code == {code} and not {heavy} & set(sys.modules)")


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


ROWS = {
    "prompts": {"prompt": "1?", "reference": "1"}, "demos": {"prompt": "1?", "response": "1"},
    "pairs": {"prompt": "1?", "chosen": "1", "rejected": "2"}, "steps": {"input": "1+1=2#", "label": ["+"]}
}  # yapf: disable
BROKEN = "broken.jsonl, line 2: not valid JSON"
NO_COLUMN = "_key 'absent': no row of "
SYNTAX = "bad.py, line 1: invalid syntax"
FEW = "_batch_size 16: a batch cannot be filled, the data has 8 rows; give at most that"
INPUTS = {
    "train --prompt_data prompts.jsonl --reward exact --reference_key absent": NO_COLUMN,
    "train --prompt_data prompts.jsonl --reward exact --train_batch_size 100": "which must be a multiple of it",
    "train --prompt_data prompts.jsonl --reward exact --rollout_batch_size 16": FEW,
    "train --prompt_data prompts.jsonl --reward exact --rollout_batch_size 8 --pretrain_data broken.jsonl": BROKEN,
    "train --prompt_data prompts.jsonl --eval_data broken.jsonl --reward exact": "a batch cannot be filled",
    "train --prompt_data prompts.jsonl --rollout_batch_size 8 --eval_suite gsm8k=prompts.jsonl": "not a row of openai",
    "train --prompt_data prompts.jsonl --reward bad.py": SYNTAX,
    "train --prompt_data broken.jsonl": BROKEN,
    "sft --train_data demos.jsonl --output_key absent": NO_COLUMN,
    "sft --train_data pairs.jsonl": "the row has no answer to train on",
    "sft --train_data demos.jsonl --train_batch_size 16": FEW,
    "sft --train_data demos.jsonl --train_batch_size 8 --eval_data broken.jsonl": BROKEN,
    "kd --train_data demos.jsonl --teacher_model . --input_key absent": NO_COLUMN,
    "dpo --train_data pairs.jsonl --chosen_key absent": NO_COLUMN,
    "rm --train_data demos.jsonl": "the chosen answer is missing or empty",
    "grm --train_data pairs.jsonl --judgement_key absent": NO_COLUMN,
    "kto --train_data demos.jsonl --label_key absent": NO_COLUMN,
    "prm --train_data steps.jsonl --placeholder_token # --label_key absent": NO_COLUMN,
    "evaluate --eval_data prompts.jsonl --input_key absent": NO_COLUMN,
    "evaluate --eval_data prompts.jsonl --score bad.py": SYNTAX,
    "evaluate --eval_data prompts.jsonl --score none.py": "--score none.py: no such file",
    "generate --prompt_data prompts.jsonl --input_key absent": NO_COLUMN,
    "generate --prompt_data prompts.jsonl --score bad.py": SYNTAX,
    "generate --eval_task rm --prompt_data broken.jsonl --score exact": BROKEN,
}
PROGRAM = """
import contextlib, io, itertools, sys
from lightrft import SFT
from lightrft.cli.main import main
for (command, told), ranks in itertools.product({inputs}.items(), ([], ["--nproc", "2"])):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main([*command.split(), "--pretrain", ".", *ranks])
        except SystemExit as end:
            assert end.code == 2, command
    assert told in said.getvalue(), (command, said.getvalue())
    assert "torch" not in sys.modules, command
try:
    SFT(".", [{{"prompt": "1?", "response": "1"}}], output_key="absent").train()
except ValueError as error:
    assert str(error).startswith("output_key 'absent': no row"), error
assert "torch" not in sys.modules
"""


def test_a_mistake_in_rows_batches_or_reward_files_does_not_wait_for_torch(tmp_path, monkeypatch):
    """Of every command that reads them, for several ranks too, and of a Python program."""
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    (tmp_path / "broken.jsonl").write_text('{"prompt": "1?", "response": "1"}\n{"prompt": ')
    (tmp_path / "bad.py").write_text("def score(:")
    monkeypatch.chdir(tmp_path)
    run(PROGRAM.format(inputs=INPUTS))


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
    """Tests of models that see skip without torchvision: they do not fail at their import."""
    names = [info.name for info in pkgutil.walk_packages(lightrft.__path__, "lightrft.")]
    modules = [name for name in names if ".tests" not in name and name not in KERNELS]
    assert len(modules) > 60, "modules are missing"
    files = {name: ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in names if ".test_" in name}
    visual = [name for name, file in files.items() if "tiny_vision" in file.read_text(encoding="utf-8")]
    run(f"import sys\nfrom importlib import import_module\nfor name in {OPTIONAL + LATE}: sys.modules[name] = None\n"
        f"for name in {modules}: import_module(name)\n"
        "import lightrft\nfor name in lightrft.__all__: getattr(lightrft, name)\n"
        f"import pytest\nfor name in {LATE}: del sys.modules[name]\n"
        f"for name in {visual}:\n    try: import_module(name)\n    except pytest.skip.Exception: pass")


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
