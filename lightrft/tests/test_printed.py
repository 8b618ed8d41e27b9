"""Every block of README, the docs and the examples is executed as it is printed, or is named with the test that does.

Programs and commands run in a folder that looks like a checkout, beside a tiny model. Those for more than two processes
or for a network are planned: ``--dry_run`` and ``--plan_gpus`` are appended. A block that no rule knows fails.
"""
import json
import math
import re
import shlex
import shutil
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

import lightrft
from lightrft.cli import doctor
from lightrft.cli.offline import OFFLINE
from lightrft.preflight import engine_rules
from lightrft.preflight.checks import packages
from lightrft.tests.support import tiny, tiny_task
from lightrft.tests.support.printed import Block, Program, ROOT, Workplace, blocks, commands, pages
from lightrft.tests.support.runs import no_picture  # noqa: F401  (a fixture)
from lightrft.tests.support.scorers import save_scorer
from lightrft.tests.test_gpu_start import QWEN, SHAPES
from lightrft.tests.test_packaging import lists_in_setup

if not (ROOT / "docs").exists():
    pytest.skip("installed without its repository", allow_module_level=True)
pytestmark = [pytest.mark.dist, pytest.mark.slow]

# blocks of other tests: page, language, beginning of the block -> the test that executes it or compares it
ELSEWHERE = {
    ("docs/contributing.md", "python", ""): "tests/test_contributing.py",
    ("docs/contributing.md", "diff", ""): "tests/test_contributing.py",
    ("docs/contributing.md", "bash", "python"): "tests/test_contributing.py",
    ("docs/contributing.md", "markdown", ""): "tests/test_contributing.py",
    ("docs/data.md", "text", "data: "): "datasets/tests/test_columns.py",
    ("docs/data.md", "json", ""): "tests/test_docs.py",
    ("docs/sft.md", "json", ""): "tests/test_docs.py",
    ("docs/environments.md", "bash", "pip install -e '.[agents]'"): "tests/test_agent_examples.py",
    ("docs/environments.md", "bash", "lightrft train"): "environments/tests/test_tutorial.py",
    ("docs/environments.md", "python", "from lightrft"): "environments/tests/test_tutorial.py",
    ("docs/environments.md", "json", '{"prompt"'): "environments/tests/test_tutorial.py",
    ("docs/environments.md", "json", ""): "inference/tests/test_turns_of_rows.py",
    ("docs/environments.md", "python", "import gymnasium"): "environments/tests/test_adapters.py",
    ("docs/preferences.md", "json", ""): "trainer/offline/tests/test_dpo_trainer.py",
    ("examples/preferences/README.md", "bash", ""): "tests/test_examples.py",
    ("examples/raft/README.md", "bash", ""): "tests/test_rounds.py",
    ("examples/iterative_dpo/README.md", "bash", ""): "tests/test_rounds.py",
    ("examples/conditional_sft/README.md", "bash", ""): "tests/test_rounds.py",
    ("examples/openrlhf/README.md", "bash", ""): "tests/test_openrlhf_loops.py",
    ("docs/gpu.md", "bash", "pip download"): "tests/test_gpu_runner.py",
    ("docs/gpu.md", "bash", "python3 -m benchmarks.gpu"): "tests/test_gpu_runner.py",
    ("examples/trainers/README.md", "bash", ""): "tests/test_trainer_examples.py",
    ("docs/rewards.md", "python", ""): "tests/test_docs.py",
    ("docs/extending.md", "python", "from lightrft.config.engines"): "tests/test_docs.py",
    ("docs/extending.md", "python", '"""Rows of a quiz'): "tests/test_docs.py",
    ("docs/coming_from.md", "python", "import argparse\n"): "tests/test_from_lightrft.py",
    ("docs/python.md", "python", "from lightrft import GRPO\n\nrun = "): "tests/test_ten_lines.py",
    ("docs/quickstart.md", "python", "import io\n"): "tests/test_quickstart_vl.py",
    ("docs/architecture.md", "text", "12 api.py"): "tests/test_docs.py",
    ("docs/architecture.md", "text", " rows"): "tests/test_docs.py",
    ("docs/gpu_start.md", "bash", "python -m lightrft.cli.train"): "tests/test_gpu_start.py",
    ("docs/gpu_start.md", "bash", "torchrun"): "tests/test_gpu_start.py",
    ("docs/safety.md", "text", "self-test: "): "trainer/tests/test_gradient_invariance.py",
    ("docs/safety.md", "text", "WARNING: "): "trainer/tests/test_resumed_options.py",
    ("docs/weight_sync.md", "text", "weight sync 2: "): "rollout/tests/test_verify.py",
}


# -- commands ---------------------------------------------------------------------------------------------------------
def ran(command: str, place: Workplace) -> None:
    """A script, as it is printed."""
    place.shell(command)


def exported(command: str, place: Workplace) -> None:
    """The export or the report, as it is printed, in this process."""
    program = Program.of(shlex.split(command))
    program.run(program.words)


def trained(command: str, place: Workplace) -> None:
    """A command that trains, generates or evaluates: as it is printed if a CPU can run it, else its dry run."""
    program = Program.of([word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)])
    if program.runs_here:
        print(place.shell(command))
    else:
        program.plan()


def swept(command: str, place: Workplace) -> None:
    """The sweep of families, over one that trains and one that is refused."""
    assert re.search(r"`llama` \| equal .*\n\| `falcon` \| refused", place.shell(f"{command} llama falcon"))


def talked(command: str, place: Workplace) -> None:
    """A chat of one message."""
    place.shell(command, said="hello\n")


def served(command: str, place: Workplace) -> None:
    """A server, as it is printed, until it has scored a text."""
    asked = Request("http://127.0.0.1:5000/get_reward", b'{"query": ["1+1=2"]}', {"Content-Type": "application/json"})
    with place.server(command) as process:
        while True:
            try:
                with urlopen(asked, timeout=30) as answer:
                    assert math.isfinite(json.load(answer)["rewards"][0])
                return
            except URLError:
                assert process.poll() is None, "the server has ended"
                time.sleep(0.1)


def examined(command: str, place: Workplace) -> None:
    """The doctor, on one rank. Its imports in other processes have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (doctor, packages):
            patch.setattr(module, "check_import", lambda name: ())
        program = Program.of(shlex.split(command))
        program.run(program.words, (0, 1))  # 1: something fails on this machine


def started(command: str, place: Workplace) -> None:
    """A script that launches ranks."""
    place.script(command)


def made(command: str, place: Workplace) -> None:
    """A target of the Makefile, without its work; the options of ``ARGS`` are planned."""
    words = shlex.split(command)
    place.shell(f"make -n VENV={place.folder}/none {shlex.join(words[1:])}")
    for word in words:
        if word.startswith("ARGS="):
            files = ["--pretrain", "MODEL", "--prompt_data", "DATA", "--eval_data", "DATA"]
            options = shlex.split(word.removeprefix("ARGS="))
            Program("examples/quickstart/train_colocate.py", [*files, *options], 2).plan()


def installed(command: str, place: Workplace) -> None:
    """pip: files, extras and checkout exist. What the sets resolve to is tested in test_installs.py."""
    words, extras = shlex.split(command), lists_in_setup()[1]
    for flag, name in zip(words, words[1:]):
        assert flag not in ("-c", "-r") or (ROOT / name).is_file(), name
        named = re.fullmatch(r"\.(?:\[([\w,]+)\])?", name)
        assert flag != "-e" or named and set((named[1] or "").split(",")) - {""} <= extras.keys(), name
    of_cpus = [words[2], "--index-url", "https://download.pytorch.org/whl/cpu"]
    if words[2:] == of_cpus:
        assert all(f"\n{words[2]}\n" in (ROOT / name).read_text()
                   for name in ("requirements.txt", "constraints/core.txt"))
        return
    assert "-e" in words or "-r" in words, "the index has another project called lightrft"


def looked_at(command: str, place: Workplace) -> None:
    """TensorBoard, which prints what it finds in place of serving."""
    assert "reward/mean" in place.shell(command.replace("--logdir", "--inspect --logdir"))


def in_the_image(command: str, place: Workplace) -> None:
    """docker: the image is the one that ``make dbuild`` builds."""
    assert f"--tag {shlex.split(command)[-1]} " in place.shell("make -n dbuild")


def environment(command: str, place: Workplace) -> None:
    """The checkout and its environment, which is the Makefile's; they are not made here."""
    assert "VENV ?= .venv\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


OWN = r"(\w+=\S* )*(torchrun (--?[\w-]+ (?!-m )\S+ )*-m lightrft\.cli\.|python -m lightrft\.cli\.|lightrft )"
RULES: dict[str, Callable[[str, Workplace], None]] = {
    OWN + r"(train(_\w+)?|" + "|".join(OFFLINE) + r"|generate|evaluate) ": trained,
    OWN + "chat ": talked,
    OWN + "serve_rm ": served,
    OWN + r"doctor\b": examined,
    OWN + r"(export|report) ": exported,
    r"python examples/\S+\.py ": ran,
    r"python -m benchmarks\.families": swept,
    r"(\w+=\S* )*bash examples/\S+\.sh": started,
    r"make [a-z-]+": made,
    r"pip install ": installed,
    r"tensorboard --logdir ": looked_at,
    r"docker run ": in_the_image,
    r"((python3 -m venv|source|\.) \.venv|git clone REPOSITORY |cd lightrft$)": environment,
}


def rule_of(command: str) -> Callable[[str, Workplace], None]:
    """The way to execute a command.

    Raises:
        AssertionError: no rule knows it.
    """
    found = next((rule for start, rule in RULES.items() if re.match(start, command)), None)
    assert found, f"no rule executes the command {command!r}"
    return found


# -- blocks -----------------------------------------------------------------------------------------------------------
def shell(block: Block, place: Workplace) -> None:
    """Each command by its rule."""
    for command in commands(block.text):
        rule_of(command)(command, place)


def program(block: Block, place: Workplace) -> None:
    """A Python program, in this process."""
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


def output(block: Block, place: Workplace) -> None:
    """What a command prints: every line, but for its numbers."""
    printed = StringIO()
    with redirect_stdout(printed):
        rule_of(OUTPUTS[block.page])(OUTPUTS[block.page], place)
    for line in block.text.splitlines():
        assert alike(line) in alike(printed.getvalue()), line


def alike(text: str) -> str:
    return re.sub(r"\d[\d.,]*", "#", re.sub(r"[^\S\n]+", " ", text))


def citation(block: Block, place: Workplace) -> None:
    """BibTeX: braces match, and the version is this one."""
    assert re.fullmatch(r"@software\{lightrft,\n(  \w+ = \{.+\},?\n)+\}\n", block.text)
    assert block.text.count("{") == block.text.count("}") and f"version = {{{lightrft.__version__}}}" in block.text


def directive(block: Block, place: Workplace) -> None:
    """Of Sphinx, which checks it in ``make docs``."""
    assert re.match(r"\{(include|literalinclude|toctree)\}", block.language)


OUTPUTS = {
    "docs/recipes.md": "lightrft train --pretrain MODEL --prompt_data DATA --recipe dapo --eps_clip_high 0.3 --dry_run",
    "docs/doctor.md": "lightrft doctor --pretrain Qwen/Qwen2.5-7B-Instruct --prompt_max_len 32768 --ranks 8",
}
KINDS: dict[str, Callable[[Block, Workplace], None]] = {
    "bash": shell, "python": program, "text": output, "bibtex": citation
}  # yapf: disable


def kind_of(block: Block) -> Callable[[Block, Workplace], None]:
    """The way to execute a block.

    Raises:
        AssertionError: there is none.
    """
    kind = directive if block.language.startswith("{") else KINDS.get(block.language)
    assert kind and (kind is not output or block.page in OUTPUTS), f"{block}: no rule executes this block"
    return kind


def elsewhere(block: Block) -> str | None:
    """The test that executes a block, if it is not this one."""
    return next((test for (page, language, start), test in ELSEWHERE.items()
                 if (page, language) == (block.page, block.language) and block.text.startswith(start)), None)


def blocks_of(page: str) -> list[Block]:
    return list(blocks(page, (ROOT / page).read_text(encoding="utf-8")))


# -- the place --------------------------------------------------------------------------------------------------------
def save_brief_model(folder: Path) -> None:
    """A tiny model with room for long prompts, whose responses end after a few tokens."""
    tiny.save_model(folder, max_position_embeddings=32768, initializer_range=0.1, tie_word_embeddings=False)
    brief = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():  # one large feature in every state, which the end token alone reads
        brief.model.embed_tokens.weight[:, 0] = 2.0
        brief.lm_head.weight[:, 0] = 0.0
        brief.lm_head.weight[brief.config.eos_token_id, 0] = 1.0
    brief.save_pretrained(folder)


def save_models(folder: Path) -> None:
    """``MODEL``, and hub ids as folders: the smallest trains, the others have only the configuration."""
    for name, shape in SHAPES.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(QWEN | shape), encoding="utf-8")
    for name in ("MODEL", min(SHAPES)):
        save_brief_model(folder / name)
    save_scorer(folder / "RM", seed=1, mean=0.5, std=2.0)
    save_scorer(folder / "OTHER_RM", seed=2, mean=0.5, std=2.0)


def save_senses(place: Workplace) -> None:
    """A model that sees and one that hears, under their hub ids, and the raw data of their examples."""
    for example, name in (("vl", "Qwen/Qwen2.5-VL-7B-Instruct"), ("audio", "Qwen/Qwen2-Audio-7B-Instruct")):
        made = place.folder / "made" / example
        few = "--train_rows 6 --test_rows 2 --sft_rows 2"
        place.shell(f"python examples/quickstart_{example}/prepare.py --out {made} {few}")
        shutil.copytree(made / "base", place.folder / name)
        config = json.loads((made / "base" / "config.json").read_text())
        config["text_config"]["max_position_embeddings"] = 32768
        (place.folder / name / "config.json").write_text(json.dumps(config))
    seen, heard = (pq.read_table(place.folder / "made" / example / "data" / "train.parquet").to_pylist()
                   for example in ("vl", "audio"))
    tiny_task.write_geo3k(place.folder / "hiyouga" / "geometry3k", seen)
    tiny_task.write_avqa(place.folder / "RAW", place.folder / "home" / "data" / "avqa" / "audio", heard)


def save_data(folder: Path) -> None:
    """Rows under the names in commands, a batch of each, and what the hub has as ``openai/gsm8k``."""
    asked = [(f"{n}+1=", str(n + 1), str(n)) for n in range(128)]
    answers = [{"prompt": prompt, "reference": right, "response": right, "data_source": "openai/gsm8k"}
               for prompt, right, _ in asked]  # yapf: disable
    pairs = [{"prompt": prompt, "chosen": right, "rejected": wrong} for prompt, right, wrong in asked]
    solutions = [{"prompt": prompt, "completions": [right], "labels": [True]} for prompt, right, _ in asked]
    judged = [{"prompt": prompt, "completion": right, "label": True} for prompt, right, _ in asked]
    answered = [{"input": prompt, "output": text} for prompt, *texts in asked[:4] for text in texts]
    files = {"DATA/train": answers, "DATA/test": answers[:8], "train": answers, "test": answers[:8], "demos": answers,
             "held_out": answers[:8], "pairs": pairs, "held_out_pairs": pairs[:8], "steps": solutions,
             "held_out_steps": solutions[:8], "judged": judged, "answered": answered,
             "rows": [{"q": prompt, "a": right} for prompt, right, _ in asked]}  # yapf: disable
    (folder / "DATA").mkdir()
    for name, rows in files.items():
        tiny_task.write_rows(folder / f"{name}.jsonl", rows)
    (hub := folder / "openai" / "gsm8k" / "main").mkdir(parents=True)
    for split in ("train", "test"):
        shutil.copy(ROOT / "examples" / "gsm8k_geo3k" / "data" / "raw_200.jsonl", hub / f"{split}.jsonl")
    for name in ("my_algorithm.py", "my_loss.py"):
        shutil.copy(ROOT / "docs" / name, folder)
    (folder / "quiz.py").write_text(next(it.text for it in blocks_of("docs/extending.md") if "PAIR_SOURCES" in it.text))


@pytest.fixture(name="place", scope="module")
def fixture_place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A checkout with the files that commands name, and the folder of a quickstart of twenty tiny steps."""
    place = Workplace(tmp_path_factory.mktemp("place"))
    save_models(place.folder)
    save_data(place.folder)
    save_senses(place)
    few = "--train_rows 64 --test_rows 16 --sft_rows 8"
    place.shell(f"python examples/quickstart/prepare.py --out runs/quickstart {few}")
    words = ("--pretrain runs/quickstart/base --prompt_data runs/quickstart/data/train.parquet "
             "--save_path runs/quickstart --strategy auto --no_self_test --no_eval_at_start --eval_steps 0 "
             "--print_samples 0 --max_steps 20 --rollout_batch_size 2 --n_samples_per_prompt 2 --train_batch_size 4")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.folder)
        Program("examples/quickstart/train_colocate.py", []).run(words.split())
    return place


@pytest.fixture(autouse=True)
def fixture_inside(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in the place; the engines of GPU machines need not be installed."""
    monkeypatch.chdir(place.folder)
    monkeypatch.setattr(engine_rules, "find_spec", lambda name: name)


# -- tests ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", [page for page in pages() if blocks_of(page)])
def test_the_blocks_of_a_page(page: str, place: Workplace, no_picture: None) -> None:  # noqa: F811
    for block in blocks_of(page):
        if not elsewhere(block):
            kind_of(block)(block, place)


@pytest.mark.parametrize("key", ELSEWHERE, ids=lambda key: " ".join(key[:2]))
def test_a_block_that_another_test_executes_is_there_and_that_test_reads_its_page(key: tuple[str, str, str]) -> None:
    page, language, start = key
    assert any(block.language == language and block.text.startswith(start) for block in blocks_of(page))
    assert Path(page).name in (ROOT / "lightrft" / ELSEWHERE[key]).read_text(encoding="utf-8")


BROKEN = {
    "a command that no rule knows": "```bash\nfrobnicate --now\n```",
    "a fence without a language": "```\nlightrft doctor\n```",
    "lines that are indented": "text\n\n    lightrft doctor\n",
    "a language that nothing executes": "```ruby\nputs 1\n```",
    "an output that nothing prints": "```text\nstep 1\n```",
    "an option that does not exist": "```bash\nlightrft train --pretrain MODEL --prompt_data DATA --no_such 1\n```",
    "a run that fails": "```bash\nlightrft sft --pretrain MODEL --train_data test.jsonl --train_batch_size 64\n```",
    "a plan that is refused": "```bash\ntorchrun --nproc-per-node 8 -m lightrft.cli.train --pretrain MODEL "
                              "--prompt_data DATA --train_batch_size 7\n```",
    "a file that is missing": "```bash\nlightrft export runs/none out\n```",
    "another project's package": "```bash\npip install 'lightrft[vllm]'\n```",
    "an extra that does not exist": "```bash\npip install -e '.[vlm]'\n```",
    "a target that does not exist": "```bash\nmake quickstrat\n```",
    "a program that raises": "```python\nfrom lightrft import GPRO\n```",
}  # yapf: disable


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_block_fails(text: str, place: Workplace) -> None:
    (block, ) = blocks("docs/some.md", text)
    with pytest.raises((AssertionError, ImportError)):
        kind_of(block)(block, place)
