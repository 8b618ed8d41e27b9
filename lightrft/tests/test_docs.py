"""The README and the docs say what the code does: generated tables, commands, examples."""
import json
import pydoc
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from lightrft.algorithms import ADVANTAGES, POLICY_LOSSES, table
from lightrft.config.compat import ALIASES, GRANTED, REFUSED
from lightrft.config.engines import ENGINES
from lightrft.config.openrlhf_words import OPENRLHF
from lightrft.config.options import ConfigError
from lightrft.config.prompt_schema import MediaConfig
from lightrft.config.schema import AlgorithmConfig, Config, DataConfig
from lightrft.config.tree import build, extended, options
from lightrft.datasets import prompt_rows, sft_dataset
from lightrft.datasets.decoding import VIDEO_PIXELS
from lightrft.datasets.media import MediaRules
from lightrft.datasets.media_rows import COLUMNS, find_row_media
from lightrft.datasets.pair_sources import load_entry, PAIR_SOURCES
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.rows import DataError
from lightrft.datasets.waveform import MOST_CHANNELS, MOST_RATE
from lightrft.models.loss import PolicyLoss
from lightrft.ops.aggregate import Denominators
from lightrft.ops.divergence import BINS, gap_metrics, SUMS, mismatch_metrics
from lightrft.rewards.base import RewardInput
from lightrft.rewards.spec import RECIPES
from lightrft.rewards.workers.user_file import SIGNATURES, load, signature_of
from lightrft.rollout.engine import RolloutEngine
from lightrft.rollout.engines import builder_of
from lightrft.tests.support import tiny
from lightrft.tests.support.lightrft_flags import FLAGS
from lightrft.tests.test_layering import LAYERS
from lightrft.trainer.checks.first_step import FIRST_KL, FIRST_RATIO
from lightrft.trainer.checks.tripwires import PATIENCE
from lightrft.trainer.optimizer_step import StepResult, step_metrics
from lightrft.types import Experience

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="installed without its repository")


def test_the_layer_picture_is_the_enforced_one():
    picture = {}
    for number, names in re.findall(r"^(\d+) (.+?)  ", doc("architecture.md"), re.MULTILINE):
        picture.update({name.strip().removesuffix(".py"): int(number) for name in names.split("|")})
    assert picture == LAYERS


def test_the_objects_of_the_architecture_are_in_their_files_and_in_its_picture():
    page = doc("architecture.md")
    picture = page[page.index("```text\n rows"):page.index("`PPOTrainer.train_step`")]
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(\S+)` \|$", page, re.MULTILINE)
    assert len(rows) == 9, "six objects and three records"
    for name, path in rows:
        assert f"\nclass {name}" in (ROOT / path).read_text(encoding="utf-8"), (name, path)
        assert name in picture or name == "StrategyBase", "it is below all others"
    methods = re.search(r"`RolloutEngine` \|[^|]*: (.*?) \|", page)
    assert methods and all(hasattr(RolloutEngine, name) for name in re.findall(r"`(\w+)`", methods[1]))


@pytest.mark.parametrize("page", [
    "README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name != "contributing.md")
])  # its files are new, see its test
def test_flags_modules_and_files_that_are_named_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    plugins = (path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("my_*.py"))
    sources = sources_of("config", "preflight", "cli", "algorithms", "strategy/optimizers") + "".join(plugins)
    others = ("--standalone", "--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--shutdown-timeout",
              "--logdir", "--gpus", "--node-rank", "--master-addr", "--local_save_dir", "--repo-type", "--local-dir",
              "--no-build-isolation", "--index-url", "--only-binary", "--python-version", "--first_step",
              "--one_question", "--minutes", "--wheels")
    for flag in set(re.findall(r"--[a-z][\w-]+", text)) - set(others):
        assert re.search(rf"\b(no_)?{flag.removeprefix('--').removeprefix('no_')}\b", sources), f"{page}: {flag}"
    for path in re.findall(r"\b(?:lightrft|examples|benchmarks)/[\w/.]+\.\w+", text):
        assert (ROOT / path).exists(), f"{page}: {path}"
    for module in re.findall(r"-m (lightrft[\w.]+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), f"{page}: {module}"
    for name in re.findall(r"\blightrft(?:\.\w+)+", text):
        assert pydoc.locate(name) is not None, f"{page}: {name}"


def test_the_index_links_every_page_on_a_forge_too():
    """Where no toctree is rendered."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[[^]]+\]\((\w+)\.md\): .", index, re.MULTILINE)
    trees = re.findall(r"^```\{toctree\}\n(?::.*\n)+\n((?:.+\n)+?)```", index, re.MULTILINE)
    assert listed == [page for tree in trees for page in tree.split() if page != "generated/api"]
    assert {*listed, "index"} == {path.stem for path in (ROOT / "docs").glob("*.md")}


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for target in set(re.findall(r"\bmake ([a-z-]+)", text)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_example_of_the_docs_is_an_algorithm(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import my_algorithm  # noqa: F401
    cu, mask = torch.tensor([0, 2, 5, 6, 8, 9]), torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 1]).bool()
    for unscored in (0.0, float("nan")):  # the second sample; group 7 without it is negative
        exp = Experience(token_ids=torch.arange(9), cu_seqlens=cu, loss_mask=mask, token_rewards=torch.zeros(9),
                         group_ids=torch.tensor([7, 7, 9, 7, 8]), scored=torch.tensor([1, 0, 1, 1, 0]).bool(),
                         rewards=torch.tensor([-1.0, unscored, 2.0, -0.5, unscored]))
        exp.token_rewards[[1, 5, 7]] = exp.rewards[[0, 2, 3]]
        advantages = ADVANTAGES.get("group_max").fn(exp, AlgorithmConfig())
        assert advantages.tolist() == [0, -0.5, 0, 0, 0, 0, 0, 0, 0] and "`group_max`" in table()
    del ADVANTAGES._entries["group_max"]


def doc(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def code_blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```", doc(name), re.MULTILINE | re.DOTALL)


def code_words(cell):
    return re.findall(r"`([^`]+)`", cell)


def sources_of(*folders):
    found = [path for folder in folders for path in (ROOT / "lightrft" / folder).rglob("*.py")]
    return "".join(path.read_text(encoding="utf-8") for path in found if "tests" not in path.parts)


def test_the_sample_rows_are_understood():
    rows = [json.loads(text) for text in code_blocks("data.md", "json")][:4]
    found = [prompt_rows.to_prompt(row, DataConfig(), "row") for row in rows]
    assert [(record.reference, record.label) for record in found] == [("5", "gsm8k_rule"), ("5", ""), ("5", ""),
                                                                      ("5", "math_rule")]
    assert all("2+3" in str(record.asked) for record in found) and found[1].columns["difficulty"] == 1
    assert {record.label for record in found} - {""} <= RECIPES.keys()


def test_the_sample_rows_with_media_are_understood(tmp_path):
    for folder, name in (("circles", "7.png"), ("beeps", "7.wav")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(b"encoded")
    kinds = []
    for row in [json.loads(text) for text in code_blocks("data.md", "json")][-3:]:
        chat = prompt_rows.to_prompt(row, DataConfig(), "row").asked
        (turn, ), media = find_row_media(row, MediaConfig(), chat, MediaRules(root=tmp_path), "row")
        assert [part["type"] for part in turn["content"]] == [media[0].kind, "text"] and len(media) == 1
        kinds.append(media[0].kind)
    assert kinds == ["image", "image", "audio"]


def test_the_limits_of_media_are_those_of_the_code():
    page, rules = doc("data.md"), MediaRules()
    names = {kind: f"`--{kind}s_key`, then {', '.join(f'`{name}`' for name in its)} |" for kind, its in COLUMNS.items()}
    assert all(text in page for text in names.values()), names
    assert (rules.max_bytes, rules.max_seconds, rules.max_frames) == (512 << 20, 3600, 256)
    assert "512 MiB" in page and "more than 256, the rate is halved" in page
    assert "an hour of sound (above 48 kHz: the" in page
    assert f"samples of an hour at {MOST_RATE // 1000} kHz), {MOST_CHANNELS} channels" in page
    assert rules.max_image_pixels == 64_000_000 and VIDEO_PIXELS == 10 and "64 million pixels (a video: 640" in page


def test_the_columns_that_are_looked_up():
    looked_up = dict(re.findall(r"^\| (prompt|reference answer) \| (.*) \|$", doc("data.md"), re.MULTILINE))
    assert tuple(code_words(looked_up["prompt"])[1:]) == prompt_rows.PROMPT_COLUMNS
    assert tuple(code_words(
        looked_up["reference answer"])[-len(prompt_rows.ANSWER_COLUMNS):]) == prompt_rows.ANSWER_COLUMNS
    prompts, answers = re.search(r"looked up in (.*?); the answer in (.*?)\.", doc("sft.md"), re.DOTALL).groups()
    assert tuple(code_words(prompts)) == prompt_rows.PROMPT_COLUMNS
    assert tuple(code_words(answers)) == sft_dataset.ANSWER_COLUMNS


def test_the_recipes_are_those_of_the_code():
    for name, recipe in RECIPES.items():
        parts = " + ".join(f"{weight:g} `{part}`" for part, weight in recipe)
        assert f"| `{name}` | {parts} |" in doc("data.md"), name
    rows = doc("data.md").split("| label or data source |")[1].split("\n\n")[0].count("\n| `")
    assert rows == len(RECIPES), "docs/data.md has recipes that are gone"


def test_the_sample_demonstrations_are_understood():
    renderer = Renderer(DataConfig(), tiny.tokenizer())
    rows = [json.loads(line) for line in code_blocks("sft.md", "json")[0].splitlines()]
    chats = [sft_dataset.to_conversation(row, renderer, "row") for row in rows]
    assert [chat.messages is None for chat in chats] == [False, False, True, True, False, False]
    assert [chat.first for chat in chats] == [0, 1, 0, 0, 0, 0] and chats[2] == chats[3]
    assert chats[5] == chats[0] and chats[4].messages[0]["content"] == "Add the numbers.\n2+3"


def test_the_reward_files_of_the_docs_score(tmp_path):
    blocks, message = code_blocks("rewards.md", "python"), []
    chat = [{"role": "user", "content": "2+3?"}]
    columns = {"answer": "5", "extra_info": {"index": 0}}
    rows = [RewardInput("2+3?", text, reference="5", columns=columns) for text in (r"\boxed{5}", "6")]
    chats = [RewardInput(row.prompt, row.response, chat, reference="5", columns=columns) for row in rows]
    for number, text in enumerate(blocks):
        path = tmp_path / f"reward_{number}.py"
        path.write_text(text, encoding="utf-8")
        scorer, name, *_ = load(str(path))
        namespace = {}
        exec(text, namespace)
        message.append(signature_of(namespace[name]))
        for batch in (rows, chats):
            outcomes = list(scorer(batch))
            assert [outcome.value for outcome in outcomes] == [1.0, 0.0], name
        extra = {"model_rewards": {"accuracy_reward": 1.0}, "reward_func": {"length": 9.0},
                 "compute_score": {"boxed": 1.0}, "compute_scores": {}, "completions": {}}  # yapf: disable
        assert outcomes[0].extra == extra[message[-1]]
    assert message == list(SIGNATURES)


def test_the_engine_of_a_plugin_can_be_chosen_and_is_built_by_its_file(tmp_path, monkeypatch):
    block, = (text for text in code_blocks("extending.md", "python") if "EngineCaps" in text)
    builder = "def build_plain_engine(cfg, actor, strategy, tokenizer, bf16):\n    pass\n"
    (tmp_path / "own_engine.py").write_text(f"{block}\n\n{builder}", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    chosen = options(Config)["engine_type"]
    with pytest.raises(ConfigError, match="--engine_type: expected one of hf, vllm, sglang, got 'plain'"):
        chosen.convert("plain")
    monkeypatch.setitem(ENGINES, "plain", None)  # it is taken back after the test
    module = import_module("own_engine")
    assert build(Config, {"engine_type": chosen.convert("plain")}).rollout.caps.title == "the plain engine"
    assert builder_of("plain") is module.build_plain_engine


def test_the_form_of_rows_of_the_docs_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(PAIR_SOURCES, "_entries", {})
    block, = (text for text in code_blocks("extending.md", "python") if "PAIR_SOURCES" in text)
    exec(block, {})
    rows = [{"q": "2+3?", "a": "5"}, {"q": "1+1?"}]
    for count in (1, 2):
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]), encoding="utf-8")
    prompt, = load_entry(f"quiz:{tmp_path}/1.jsonl").rows
    assert prompt_rows.to_prompt(prompt, DataConfig(), "row").reference == "5"
    with pytest.raises(DataError, match=r"2.jsonl, row 2: quiz: the row has no a \(it has q\)"):
        load_entry(f"quiz:{tmp_path}/2.jsonl")


def test_the_causes_of_unscored_rewards():
    text = doc("rewards.md").split("| cause |")[1]
    documented = {
        word for line in text.splitlines() if line.startswith("| `") for word in code_words(line.split("|")[1])
    }
    code = sources_of("rewards")
    raised = set(re.findall(r'(?:Outcome\(None|RequestFailed\(), ?"(\w+)"|RequestFailed\("(\w+)"', code))
    raised = {name for pair in raised for name in pair if name}
    assert raised <= documented, raised - documented
    assert all(f'"{name}"' in code for name in documented)


# metrics of a step of a trainer on fixed data, besides those that all have
OFFLINE = {
    "sft": "loss_tokens",
    "grm": "loss_tokens",
    "rm": "pairs rewards/chosen rewards/rejected rewards/margin accuracy",
    "prm": "steps accuracy accuracy_solution accuracy_first_error base_rate",
    "kd": "loss_tokens divergence nll",
    "kto": "answers kl rewards/chosen rewards/rejected logps/chosen logps/rejected",
    "dpo": "pairs rewards/chosen rewards/rejected rewards/margin accuracy logps/chosen logps/rejected nll",
}


def metric_keys():
    """Every key that is spelled out in the code, or that a function returns."""
    code = sources_of("trainer", "rollout")
    keys = set(
        re.findall(r'"((?:rollout|reward|group|advantage|policy|critic|perf|eval|sft|time|media)/[a-z0-9_/]+)"', code))
    keys |= {f"time/{name}_s" for name in re.findall(r'(?:timer|Pass)\("(\w+)"', code)}
    keys |= {"time/step_s", "time/other_s"}
    keys |= {f"{key}_{name}" for key in (FIRST_RATIO, FIRST_KL) for name in gap_metrics(torch.ones(2 + BINS))}
    keys |= {f"rollout/mismatch/{key}" for key in mismatch_metrics(torch.ones(len(SUMS) + 2 * BINS), torch.ones(2))}
    keys |= {key for name in ("policy", "critic", *OFFLINE) for key in step_metrics(name, [StepResult(0.0, 0.0)])}
    keys |= {f"{name}/{key}" for name, own in OFFLINE.items() for key in ("tokens", "aux_loss", *own.split())}
    keys |= {f"tripwire/{name}" for name in PATIENCE}
    cu, ones = torch.tensor([0, 2]), torch.ones(2)
    exp = Experience(token_ids=torch.zeros(2).long(), cu_seqlens=cu, loss_mask=ones.bool(), advantages=ones,
                     old_logprobs=-ones, ref_logprobs=-ones, selected=ones.bool())
    metrics = {}
    for name in POLICY_LOSSES:
        loss = PolicyLoss(extended(AlgorithmConfig)(policy_loss=name, dual_clip=3.0), 1.0)
        metrics |= loss(-ones, ones, exp, Denominators(2, 1), 0.0)[1]
    # what the model card shows, and causes, start with them
    prefixes = {"policy/kl", "reward/unscored/", "reward/generated_unscored/"}
    return (keys | {f"policy/{key}" for key in metrics}) - prefixes


def test_the_glossary_has_the_metrics_of_the_code():
    documented = {
        word for line in doc("metrics.md").splitlines() if line.startswith("| `")
        for word in code_words(line.split("|")[1])
    }
    keys = metric_keys()
    assert keys <= documented, sorted(keys - documented)
    assert {key for key in documented - keys if "<" not in key} == set(), "not in the code"


def tables_of(trainer):
    """Cells of the rows of tables in the section of a trainer."""
    section = doc("coming_from.md").split(f"## {trainer}\n")[1].split("\n## ")[0]
    return [row.split("|") for row in section.splitlines() if row.startswith("| `")]


def test_flags_of_openrlhf_that_are_read():
    said = {flag: set(re.findall(r"--(\w+)", row[2])) for row in tables_of("OpenRLHF")
            for flag in re.findall(r"`--(\w+)", row[1])}  # yapf: disable
    assert said.keys() == {*OPENRLHF, "remote_rm_url", "vllm_sync_backend", "enable_prefix_caching"} - {
        "vllm_enforce_eager", "ds_enable_sleep", "fsdp_enable_sleep", "train_micro_batch_size", "reward_remote_url"
    }, "spellings of newer versions have no rows of their own"  # yapf: disable
    for flag in said.keys() & OPENRLHF.keys():
        assert re.split(r"\W", OPENRLHF[flag].split()[-1])[0] in said[flag], flag


def test_flags_of_the_original_that_are_translated():
    flags = {flag for row in tables_of("LightRFT") for flag in re.findall(r"`--(\w+)`", row[1])}
    assert ALIASES.keys() <= flags <= {*REFUSED, *GRANTED} | {asked.name for asked in FLAGS}
