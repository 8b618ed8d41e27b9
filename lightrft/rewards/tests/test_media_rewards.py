"""Reward models that see or hear, in a run and in batch inference: their own processor, template and numbers."""
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightrft.cli.generate import generate
from lightrft.config.cli import parse_config
from lightrft.config.generate_schema import GenerateConfig
from lightrft.config.rm_schema import JudgeDataConfig, RMConfig
from lightrft.config.schema import DataConfig, RewardConfig
from lightrft.datasets.judgements import judge_format, JudgementDataset
from lightrft.datasets.media import find_medium
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.rows import hold_rows
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.inference.media_columns import MediaColumns
from lightrft.models.loader import load_scorer
from lightrft.models.reward_model import JUDGE
from lightrft.models.tokenizer import load_tokenizer
from lightrft.preflight.report import report
from lightrft.preflight.hardware import Machine
from lightrft.rewards.base import RewardInput
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.placement import ScorerSetup
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import media_runs, runs, tiny
from lightrft.trainer.model_media import open_media
from lightrft.trainer.offline.rm_trainer import RMTrainer
from lightrft.trainer.samples import reward_input
from lightrft.trainer.trial import try_inputs
from lightrft.utils.errors import UserError

pytest.importorskip("torchvision")
no_picture = runs.no_picture


def pairs(kind, answers=("a", "bb")):
    """The prompts of :func:`media_runs.rows` with two answers."""
    return [{**row, "chosen": answers[0], "rejected": answers[1]} for row in media_runs.rows(kind)]


def train(folder, family, kind):
    """A reward model of ``family`` after two steps on pairs, and its trainer."""
    options = media_runs.write_home(folder, family)
    given = {"pretrain": str(folder / "model"), "train_data": [hold_rows(pairs(kind))], "max_steps": 2,
             "chat_template": options["chat_template"], "save_path": str(folder / "run"), "train_batch_size": 4,
             "learning_rate": 1e-2, "lr_warmup_ratio": 0.0, "disable_ckpt": True}  # yapf: disable
    config = parse_config([], defaults=given, tree=RMConfig).config
    strategy = get_strategy(config.strategy)
    strategy.setup()
    tokenizer = load_tokenizer(config.model.pretrain, config.data.chat_template)
    media = open_media(config.model.pretrain, tokenizer, config.data.as_data_config())
    rows = RMTrainer.read(config, tokenizer, "train", media)
    trainer = RMTrainer(config, strategy, lambda: RMTrainer.load(config), tokenizer, rows, media=media)
    trainer.fit()
    return trainer, media


@torch.no_grad()
def evaluated(trainer, media, rows):
    """Rewards of the chosen answers as the trainer's own evaluation has them, by the exported model, one at a time."""
    trainer.config.data.train_data = [hold_rows(rows)]
    read = RMTrainer.read(trainer.config, trainer.tokenizer, "train", media)
    exp, model = trainer.pack(read).exp, load_scorer(f"{trainer.config.folder}/hf").eval()
    model.modality.media = media
    return [model(exp.select([2 * i])).item() for i in range(len(rows))]


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    return train(tmp_path_factory.mktemp("sees"), "qwen3_vl", "image")


def test_a_run_has_the_numbers_of_the_evaluation(sees, tmp_path):
    """The policy is of another family, with another processor. A prompt has one picture, two, or none."""
    trainer, media = sees
    options = media_runs.write_home(tmp_path, "qwen2_5_vl") | {
        "max_steps": 1, "self_test": False, "init_kl_coef": 0.0, "use_kl_loss": False, "generate_max_len": 6,
        "sync_proof": "fingerprint", "sync_canary_every": 50}  # yapf: disable
    path = f"{trainer.config.folder}/hf"
    done = runs.run(tmp_path, tmp_path / "run", reward_pretrain=[path], save_trajectories=True, **options)
    asked = {f"0:{row['id']}": row for row in media_runs.rows("image")}
    made = [row | {"uid": row["prompt_id"], "response": row["output"]} for row in answers(tmp_path, path, options)]
    check_media_columns(tmp_path, made, options)
    rollout, batch = ([row for row in rows if row["reward"] is not None and row["response"].strip()]
                      for rows in (done.rollout(1), made))
    assert len(rollout) >= 12 and len(batch) >= 6, "a response may have drawn the token of a picture"
    rollout += batch
    answered = [{**asked[row["uid"]], "id": str(i), "chosen": row["response"], "rejected": "never"}
                for i, row in enumerate(rollout)]  # yapf: disable
    wanted = evaluated(trainer, media, answered)
    assert [row["reward"] for row in rollout] == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert len({round(value, 4) for value in wanted}) > 8
    config = runs.config_of(tmp_path, tmp_path / "run", reward_pretrain=[path], **options)
    assert f"reward model rm: {path} scores responses with its head, " in report(config, {}, Machine.here(1, 0, 1))
    assert any(line.startswith("rewards: ") and "rm " in line for line in try_inputs(config))


def answers(folder, scorer, options):
    """Rows of batch inference on the prompts of a run, scored."""
    given = {name: options[name] for name in ("prompt_data", "chat_template", "generate_max_len", "prompt_max_len",
                                              "apply_chat_template") if name in options}  # yapf: disable
    given |= {"pretrain": str(folder / "model"), "score": [scorer], "best_of_n": 2, "engine_kv_mib": 4}
    generate(parse_config([], defaults=given | {"output_path": str(folder / "out.jsonl")}, tree=GenerateConfig),
             exits=False)
    return runs.read_lines(folder / "out.jsonl")


def check_media_columns(folder, made, options):
    """Training on the output reads the media of the prompts, which the data held as bytes, without an option."""
    asked = {f"0:{row['id']}": len(row["images"]) for row in media_runs.rows("image")}
    assert [len(row.get("images", ())) for row in made] == [asked[row["prompt_id"]] for row in made]
    whole, store, cfg = read_prompts(folder / "model", media_runs.rows("image"), options["chat_template"])
    output = replace(cfg, prompt_data=[str(folder / "out.jsonl")], apply_chat_template=False)
    again = SFTDataset(output, load_tokenizer(str(folder / "model"), options["chat_template"]), 500, media=store)
    assert [row.media for row in again][::2] == [prompt.media for prompt in whole] and whole[0].media
    for row, prompt in zip([*again][::2], whole):
        assert row.token_ids[:len(prompt.token_ids)] == prompt.token_ids
    assert len([*(folder / "out.jsonl.media").iterdir()]) == 3, "one file for each content"
    columns = MediaColumns(store, folder / "other")
    found = columns.of(whole[0].media)["images"]
    assert [Path(one).is_absolute() for one in found] == [True] and not columns.folder.exists()
    video = find_medium([media_runs.picture(0)], "video", store.rules, "row 1")
    assert columns.of(store.register([video])) == {"videos": [[f"other/{video.source[0].key.replace(':', '_')}"]]}


def test_sounds_are_heard(tmp_path):
    trainer, media = train(tmp_path / "rm", "qwen2_audio", "audio")
    options = media_runs.write_home(tmp_path / "policy", "qwen2_audio")
    rows = media_runs.rows("audio")
    prompts, store, cfg = read_prompts(tmp_path / "policy" / "model", rows, options["chat_template"])
    manager = RewardManager(RewardConfig(reward_pretrain=[f"{trainer.config.folder}/hf"]),
                            setup=ScorerSetup(media=store, data=cfg))
    found = [score.total for score in manager.score([reward_input(prompt, "a") for prompt in prompts])]
    wanted = evaluated(trainer, media, pairs("audio"))
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4) and len({round(value, 4) for value in wanted}) > 2


def read_prompts(path, rows, template):
    """Prompts for the policy at ``path``, and the store of their media."""
    cfg = DataConfig(prompt_data=[hold_rows(rows)], apply_chat_template=True, chat_template=template)
    tokenizer = load_tokenizer(str(path), template)
    store = open_media(str(path), tokenizer, cfg)
    data = PromptsDataset(cfg, tokenizer, 500, media=store)
    return [data[i] for i in range(len(rows))], store, cfg


def test_a_judge_reads_what_it_was_trained_on(sees, tmp_path):
    """Its requests are those of the data set, with the pictures of the prompt; then it generates. A response with the
    token of a picture is left out, and so is a model of texts."""
    trainer, media = sees
    own, template, folder = media_runs.write_home(tmp_path,
                                                  "qwen3_vl"), trainer.config.data.chat_template, tmp_path / "model"
    trainer.tokenizer.save_pretrained(folder)
    data = JudgeDataConfig(train_data=[hold_rows(pairs("image"))], chat_template=template, task_instruction="{prompt} "
                           "{first} or {second}")
    tiny.change_json(folder / "config.json", **{JUDGE: vars(judge_format(data))})
    prompts, store, cfg = read_prompts(folder, media_runs.rows("image"), own["chat_template"])
    manager = RewardManager(RewardConfig(reward_pretrain=[str(folder)], judge_max_len=3),
                            setup=ScorerSetup(media=store, data=cfg))
    group = [[reward_input(prompt, text) for text in ("a", "bb")] for prompt in prompts]
    scores = [score for items in group for score in manager.score(items)]
    assert {score.error for score in scores} == {"no_answer"}
    judge = manager.neural["rm"]
    asked = [judge.encoded(judge.ask(items)) for items in group]
    for i, row in enumerate(JudgementDataset(data, trainer.tokenizer, media=media)):
        assert row.token_ids[:row.loss_mask.index(True)] in asked[i], i
        assert len(asked[i]) == 2 and asked[i][0] != asked[i][1]
    mark = judge.reader.store.tokens[0]
    (drawn, ) = manager.score([reward_input(prompts[0], f"x{mark}")])
    assert drawn.error == "media_token"
    heard = RewardInput("", "a", [{"role": "user", "content": [{"type": "audio"}]}])
    with pytest.raises(UserError, match="reads image, video only, and a prompt has audio"):
        manager.score([heard])
