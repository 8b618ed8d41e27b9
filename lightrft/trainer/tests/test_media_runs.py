"""Whole runs on prompts with pictures and without: what they compute, record and resume."""
import base64
import copy
import io
import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import current_thread, Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from lightrft.cli.generate import generate
from lightrft.cli.train import train
from lightrft.config.cli import parse_config
from lightrft.config.evaluate_schema import EvaluateConfig
from lightrft.config.generate_schema import GenerateConfig
from lightrft.config.rm_schema import RMConfig
from lightrft.config.schema import Config
from lightrft.config.sft_schema import SFTConfig
from lightrft.datasets.media import find_medium, MediaRules
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.rows import DataError, hold_rows
from lightrft.models.actor_modality import MediaModality
from lightrft.strategy.strategy import SingleProcessStrategy
from lightrft.tests.support import media_runs, tiny, tiny_vision
from lightrft.tests.support.media_rig import ProcessedMedia
from lightrft.tests.support.processes import POLL_S
from lightrft.tests.support.runs import config_of, no_picture, run, strategy_of, trainer_of, weights  # noqa: F401
from lightrft.trainer.checks.gradient_invariance import SelfTestError
from lightrft.trainer.checks.parity import _compare_grids, _grids_of, _one_of_each, ROWS
from lightrft.trainer.offline.train_rows import train_rows
from lightrft.trainer.offline.rm_trainer import RMTrainer
from lightrft.trainer.sample_recorder import SampleRecorder
from lightrft.trainer.session import check
from lightrft.trainer.offline.sft_trainer import SFTTrainer
from lightrft.trainer.trial import TrialContext, try_inputs
from lightrft.types import Experience, Prompt
from lightrft.utils.errors import UserError

pytest.importorskip("torchvision")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model that sees, with a template that renders pictures."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def options(home):
    return media_runs.write_home(home, "qwen2_5_vl")


@pytest.fixture(scope="module")
def straight(home, options, tmp_path_factory):
    return run(home, tmp_path_factory.mktemp("run"), **options, disable_ckpt=False, save_steps=1, async_save=False)


def test_engine_and_trainer_agree_on_pictures(straight):
    """At the first step the policy is the one that generated: ratios, KL and canaries show it."""
    first = straight.lines[0]
    assert first["rollout/mismatch/tokens"] > 0 and first["rollout/mismatch/abs_logp_max"] < 1e-4
    assert first["rollout/canary_gap"] < 1e-5
    assert all(np.isfinite(line["policy/loss"]) for line in straight.lines)


def test_towers_are_trained(straight, home, options, tmp_path):
    before = run(home, tmp_path, **options | {"actor_learning_rate": 0.0}).weights
    moved = {name for name, weight in straight.weights.items() if not torch.equal(weight, before[name])}
    assert any(".visual.blocks." in name for name in moved) and any("language_model" in name for name in moved)


def test_passes_run_the_tower_once_per_picture(straight, home, options, tmp_path):
    """Of a micro-batch, in which the responses to one prompt are together. A pass without gradients, which sees no
    picture, runs no tower."""
    assert straight.trainer.maker.media.decoded == 3 + 2 * 4, "for the data set, and for two records of the report"
    config = config_of(home, tmp_path, **options)
    trainer, seen = trainer_of(config, strategy_of(config)), []
    maker, prompts = trainer.maker, next(trainer.loader)
    tower = maker.logprobs.actor.model.hf_model.model.visual
    hook = tower.register_forward_pre_hook(lambda module, args, given: seen.append(len(given["grid_thw"])),
                                           with_kwargs=True)
    rollout = maker.make(prompts, 0)
    hook.remove()
    generated, passes = seen[0], seen[1:]
    assert generated == 3, "one prefill for three pictures"
    parts = [part for mini in rollout.plan.epoch(0) for part in mini.micro_batches]
    unique = [len({key for i in part for key in rollout.exp.media[i]}) for part in parts]
    assert passes == [count for count in unique if count], "old log-probs; the reference is another model"
    assert sum(unique) < sum(map(len, rollout.exp.media)) / 2 == 8
    assert maker.media.decoded == 3
    trainer.engine.shutdown()


def test_the_self_test_compares_with_a_tower_pass_per_response(home, options, tmp_path, monkeypatch):
    """Here, features of a picture that several responses share get the gradient of one of them on average."""
    right = MediaModality._features

    def wrong(self, hf, kind, keys):
        found = right(self, hf, kind, keys)
        uses = self.uses / max(1, len(keys))
        return replace(found, each=[each.detach() + (each - each.detach()) / uses for each in found.each])

    def counted(self, embeddings, exp, hf, known):
        self.uses = max(1, sum(map(len, exp.media)))
        return right_way(self, embeddings, exp, hf, known)

    right_way = MediaModality._with_media
    monkeypatch.setattr(MediaModality, "_features", wrong)
    monkeypatch.setattr(MediaModality, "_with_media", counted)
    with pytest.raises(SelfTestError, match="depends on how the batch is cut"):
        run(home, tmp_path, **options | {"max_steps": 1, "share_prompts": False})


def test_the_report_shows_the_pictures(straight):
    records = [json.loads(line) for line in (straight.folder / "samples.jsonl").read_text().splitlines()]
    shown = {group["uid"]: group["media"] for record in records for group in record["groups"]}
    assert shown and any(shown.values())
    for urls in shown.values():
        for url in urls:
            small = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))))
            assert small.size == (84, 56)
    assert "img-src data:" in (straight.folder / "report.html").read_text(encoding="utf-8")


def test_a_picture_that_is_gone_costs_its_thumbnail_alone(straight, tmp_path, caplog):
    trainer, store, file = straight.trainer, straight.trainer.maker.media, tmp_path / "a.png"
    Image.new("RGB", (84, 56)).save(file)
    (key, ) = store.register([find_medium(str(file), "image", MediaRules(root=tmp_path), "row 1")])
    recorder = SampleRecorder(tmp_path, trainer.strategy, trainer.tokenizer, True, store)
    assert recorder._shown(key).startswith("data:image/jpeg")
    (video, ) = store.register([find_medium([str(file)] * 2, "video", MediaRules(root=tmp_path), "row 1")])
    assert recorder._shown(video) == recorder._shown(key), "of a video its first frame"
    file.unlink()
    assert recorder._shown(key) == "image" and f"no picture for {key}: row 1: " in caplog.text


def test_a_run_on_videos_and_pictures_is_evaluated_and_resumes(home, options, tmp_path):
    """PPO, whose critic sees what the policy sees. From the checkpoint of its first step on it is the same run, bit for
    bit."""
    given = options | {"prompt_data": [hold_rows(media_runs.with_videos())], "prompt_max_len": 200, "eval_steps": 1,
                       "eval_data": [hold_rows(media_runs.with_videos()[2:])], "disable_ckpt": False, "save_steps": 1,
                       "async_save": False, "advantage_estimator": "gae"}  # yapf: disable
    straight = run(home, tmp_path / "straight", **given)
    assert all(line["critic/loss"] > 0 for line in straight.lines)
    critics_see(straight.trainer)
    media = straight.trainer.maker.media
    assert media.most == {"image": 1, "video": 2} and len(straight.trainer.loader.dataset) == 4
    assert straight.lines[1]["rollout/canary_gap"] < 1e-5 and straight.lines[1]["rollout/mismatch/abs_logp_max"] < 1e-4
    shutil.copytree(tmp_path / "straight" / "checkpoints" / "step_000001",
                    tmp_path / "resumed" / "checkpoints" / "step_000001")
    resumed = run(home, tmp_path / "resumed", **given, load_checkpoint=True)
    (again, ) = (line for line in resumed.lines if line["step"] == 2)
    assert again["eval/all/reward@1"] == straight.metrics["eval/all/reward@1"] >= 0
    for model in ("actor", "critic"):
        again = weights(resumed.trainer, model)
        for name, weight in weights(straight.trainer, model).items():
            assert torch.equal(weight, again[name]), (model, name)


@torch.no_grad()
def critics_see(trainer):
    """The values after prompts with media change with these; that after text alone does not."""
    critic, prompts = trainer.prepared["critic"].model, [*trainer.loader.dataset]
    exp = Experience.pack([one.token_ids + [5] for one in prompts],
                          [[False] * len(one.token_ids) + [True] for one in prompts],
                          prompt_lens=[len(one.token_ids) for one in prompts], media=[one.media for one in prompts])
    with pytest.MonkeyPatch.context() as patch:
        right, before = critic.modality.media.tensors, critic(exp.to("cpu"))[exp.loss_mask]
        patch.setattr(
            critic.modality.media, "tensors", lambda key: replace(made := right(key), tensors={
                name: -one if one.is_floating_point() else one for name, one in made.tensors.items()}))  # yapf: disable
        gaps = (critic(exp.to("cpu"))[exp.loss_mask] - before).abs()
    assert [len(one.media) for one in prompts] == [1, 0, 2, 2], "videos; the last has a picture too"
    assert gaps[1] == 0 and all(gaps[i] > 1e-4 * before.abs().max() for i in (0, 2, 3)), (gaps, before)


def test_engine_and_trainer_are_compared_at_the_start(home, options, tmp_path, capfd):
    """A line for the first row with one picture, and one for that with two; wrong positions of an engine that has its
    own, and a wrong weight, name the row."""
    config = config_of(home, tmp_path, **options)
    trainer = trainer_of(config, strategy_of(config))
    trainer.before_loop(True)
    said = [line for line in capfd.readouterr().err.splitlines() if "engine and trainer agree on row" in line]
    wanted = ["1 media of 1x4x6, positions", "2 media of 1x4x6, 1x4x6, positions"]
    assert [line.partition(" for ")[2].partition(" to ")[0] for line in said] == wanted, said
    engine, actor = trainer.engine, trainer.prepared["actor"].model
    engine.positions = lambda request: actor.modality.prompt_positions(actor.hf_model, request.token_ids, request.media
                                                                       ).flip(0)
    with pytest.raises(UserError, match=r"row 0:0: the position of token \d+ is \[.*\] for the engine and"):
        trainer.before_loop(True)
    engine.positions = lambda request: torch.zeros(3, len(request.token_ids) + 2, dtype=torch.long)
    with pytest.raises(UserError, match=r"row 0:0: the prompt has (\d+) positions for the engine and \d+ for the"):
        trainer.before_loop(True)
    del engine.positions
    engine.model = copy.deepcopy(engine.model)
    with torch.no_grad():
        engine.model.model.visual.merger.mlp[2].weight.mul_(1.5)
    trainer.proof = None
    with pytest.raises(UserError, match="row 0:0: the log-prob of the first token .* do not see the same media"):
        trainer.before_loop(True)
    engine.shutdown()


def test_one_row_with_each_combination_is_compared():
    """All sets of kinds, however many numbers of pictures come first; then other numbers, up to the bound."""
    media = [*(("image:a", ) * count for count in (1, 1, *range(2, 30))), (), ("audio:a", ), ("image:a", "audio:b")]
    found = _one_of_each([Prompt(str(i), [1], "", media=keys) for i, keys in enumerate(media)])
    assert [one.uid for one in found] == ["0", "31", "32", *map(str, range(2, 15))] and len(found) == ROWS


@pytest.mark.parametrize("family", ["llava_next", "llava_pixtral"])
def test_sizes_of_pictures_are_compared(family, tmp_path):
    """With those that an engine's processor keeps, and with pictures that it cuts to them."""
    rig = tiny_vision.FAMILIES[family]
    rig.save(tmp_path, True)
    source = ProcessedMedia(tmp_path, rig.placeholders)
    prompt = Prompt("", [5], "", media=("image:0", "image:2"))
    ours = _grids_of(SimpleNamespace(modality=SimpleNamespace(media=source)), prompt)
    assert list(ours) == ["image_sizes"] and len({*map(tuple, ours["image_sizes"])}) == 2
    sizes = ours["image_sizes"]
    kept = {"image_sizes": torch.tensor(sizes).unbind()}
    shown = kept if family == "llava_next" else {"any name": [torch.zeros(3, *size) for size in sizes]}
    engine = SimpleNamespace(media_tensors=lambda prompt: shown)
    _compare_grids(engine, prompt, ours)
    shown = {name: some[::-1] for name, some in shown.items()}
    first, second = sizes
    with pytest.raises(UserError, match=re.escape(f"image_sizes is {[second, first]} for the engine and {sizes} for")):
        _compare_grids(engine, prompt, ours)


def prefetched(trainer):
    """Media that would be processed ahead for the next step."""
    maker, found = trainer.maker, []
    maker.media.prefetch = found.extend
    maker.prefetch(trainer.loader.ahead())
    return found


def threads_of(patch, name):
    """Threads in which the stores of the test call their method ``name``, by the medium."""
    work, found = getattr(MediaStore, name), {}

    def noted(store, key):
        found.setdefault(key, []).append(current_thread().name)
        return work(store, key)

    patch.setattr(MediaStore, name, noted)
    return found


def test_cached_features_are_those_of_the_plain_run_and_resume(home, options, tmp_path, monkeypatch):
    """The towers of policy and reference, which are one; after a resume features are computed again, bit for bit.

    In the plain run, whose data set reads headers alone, workers process all media ahead of the step that needs them.
    """
    frozen = options | {"freeze_prefix": ["visual"], "disable_ckpt": False, "save_steps": 1, "async_save": False}
    asked, work = [], MediaStore.prefetch
    with monkeypatch.context() as patch:
        processed = threads_of(patch, "_processed")
        patch.setattr(MediaStore, "prefetch", lambda store, keys: asked.append([*keys]) or work(store, asked[-1]))
        plain = run(home, tmp_path / "plain", **frozen, media_check="header")
    assert [len(keys) for keys in asked] == [4] * 3, "before the steps and in each, the four pictures of four prompts"
    assert len(processed) == 3 and all(len(some) == 1 and some[0].startswith("media") for some in processed.values())
    kept = run(home, tmp_path / "kept", **frozen, cache_features=True)
    assert [line["media/features_computed"] for line in kept.lines] == [3, 0], "three pictures, for two models"
    assert all(line["media/features_reused"] > 3 for line in kept.lines)
    assert not any("media/features_computed" in line for line in plain.lines)
    ahead = [prefetched(each.trainer) for each in (plain, kept)]
    assert ahead[0] and not ahead[1], "media are processed whose features are kept"
    maker = kept.trainer.maker
    maker.config = replace(maker.config, rollout=replace(maker.config.rollout, engine_type="vllm"))
    keys = [key for prompt in kept.trainer.loader.ahead() for key in prompt.media]
    with monkeypatch.context() as patch:
        opened = threads_of(patch, "_open")
        maker.prefetch(kept.trainer.loader.ahead())
        assert all(maker.media.open(key) is maker.media.open(key) for key in keys), "vLLM asks for pictures again"
    assert len(opened) == 3 and all(len(some) == 1 and some[0].startswith("media") for some in opened.values())
    for name, weight in plain.weights.items():
        torch.testing.assert_close(weight, kept.weights[name], atol=1e-5, rtol=0)
    run(home, tmp_path / "cut", **frozen | {"max_steps": 1}, cache_features=True)
    resumed = run(home, tmp_path / "cut", **frozen, cache_features=True, load_checkpoint=True)
    for name, weight in kept.weights.items():
        assert torch.equal(weight, resumed.weights[name]), name
    with pytest.raises(UserError, match="--cache_features: .* is trained"):
        run(home, tmp_path / "trained", **options, cache_features=True)


def test_a_dry_run_reads_the_pictures(home, options, tmp_path):
    rows = media_runs.rows("image")
    config = config_of(home, tmp_path, **options, reward=["format"])
    assert any(line.startswith("media: image of memory:") and "can be read" in line for line in try_inputs(config))
    named = [{"prompt": row["prompt"], "picture": row["images"], "reference": "1"} for row in rows]
    config.data.prompt_data = [hold_rows(named)]
    assert any("<image> in 3 of 4 rows is read as plain words" in line for line in try_inputs(config))
    broken = rows[0] | {"images": [{"bytes": rows[0]["images"][0]["bytes"][:100], "path": None}]}
    with pytest.raises(UserError, match="row 1: image of 100 bytes"):
        options = options | {"prompt_data": [hold_rows([broken])]}
        list(try_inputs(config_of(home, tmp_path, **options, reward=["format"])))


def test_a_dry_run_knows_what_the_model_takes(home, options, tmp_path):
    """Of all rows, also of pairs; a row with sound is not the first here."""
    rows = media_runs.rows("image") + [media_runs.rows("audio")[0] | {"id": "5"}]
    given = options | {"prompt_data": [hold_rows(rows)], "reward": ["format"]}
    with pytest.raises(UserError, match="row 5: the column 'audios' holds .*, and this model takes image, video only"):
        list(try_inputs(config_of(home, tmp_path, **given)))
    said = list(try_inputs(config_of(home, tmp_path, **given, media_policy="skip")))
    assert any(line.startswith("media: at least 1 of 5 rows are left out (the first: ") for line in said)
    text = str(tiny.save_model(tmp_path / "text", num_hidden_layers=1))
    with pytest.raises(UserError, match="row 1: the column 'images' holds .*, and this model takes text only"):
        list(try_inputs(config_of(home, tmp_path, **given | {"pretrain": text})))
    row = {"prompt": "1+1?", "response": "2", "chosen": "2", "rejected": "3", "images": rows[0]["images"]}
    pair = hold_rows([row])
    trees = {RMConfig: {"train_data": [pair]}, SFTConfig: {"train_data": [pair]},
             GenerateConfig: {"prompt_data": [pair]}, EvaluateConfig: {"eval_data": [pair]}}  # yapf: disable
    trainers = {RMConfig: RMTrainer, SFTConfig: SFTTrainer}
    for tree, data in trees.items():
        config = parse_config([], tree=tree, defaults={"pretrain": [text] if tree is EvaluateConfig else text} | data)
        with pytest.raises(UserError, match="row 1: the column 'images' holds .* text only"):
            list(try_inputs(config.config, TrialContext(trainer=trainers.get(tree))))


def test_a_dry_run_knows_what_the_engine_takes(tmp_path, capsys):
    """Training, evaluation and inference; of the engine's package nothing is needed. vLLM lets tokens of a picture of
    Gemma-3 see each other on GPUs alone, also on planned ones."""
    AutoConfig.for_model("gemma3").save_pretrained(tmp_path)
    rows, model = [hold_rows(media_runs.rows("image"))], {"pretrain": str(tmp_path)}
    trees = {Config: {"prompt_data": rows, "reward": ["format"]}, GenerateConfig: {"prompt_data": rows},
             EvaluateConfig: {"eval_data": rows, "pretrain": [str(tmp_path)]}}  # yapf: disable
    for tree, given in trees.items():
        for engine, reason in (("vllm", "on a CPU vLLM hides"), ("sglang", "SGLang hides"), ("hf", "")):
            config = parse_config([], tree=tree, defaults=model | given | {"engine_type": engine}).config
            with pytest.raises(UserError, match=f"--engine_type {engine}: {reason}") if reason else nullcontext():
                list(try_inputs(config, TrialContext(elsewhere=True)))
    parsed = parse_config(["--dry_run", "--plan_gpus", "1x900"],
                          defaults=model | trees[Config] | {"engine_type": "vllm"})
    with pytest.raises(SystemExit) as done:
        check(parsed)
    assert done.value.code == 0 and "can be read" in capsys.readouterr().out


class OnePicture(BaseHTTPRequestHandler):
    """A web server with one picture."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(media_runs.picture(0)["bytes"])

    def log_message(self, *args):
        """Print nothing."""


@pytest.mark.parametrize("command", ["train", "sft", "generate"])
def test_every_command_compares_what_its_ranks_download(command, home, options, tmp_path, monkeypatch):
    """Here, of another rank that has other bytes."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), OnePicture)
    Thread(target=server.serve_forever, args=(POLL_S, ), daemon=True).start()

    def differing(self, value):
        other = value[::-1] if isinstance(value, bytes) else value
        if isinstance(value, list) and value and isinstance(value[0], tuple):
            other = [(key, "other") for key, _ in value]
        return [value, other]

    monkeypatch.setattr(SingleProcessStrategy, "all_gather_object", differing)
    asked = {"role": "user", "content": "<image>?"}
    row = {"prompt": [asked], "output": "1", "images": [f"http://127.0.0.1:{server.server_port}/a.png"]}
    common = {"pretrain": str(home / "model"), "chat_template": options["chat_template"], "media_urls": True}
    rows = [hold_rows([row])]
    short = {"prompt_max_len": 64, "generate_max_len": 8}
    tree, more = {"train": (Config, {"prompt_data": rows, "reward": ["format"], "save_path": str(tmp_path)} | short),
                  "sft": (SFTConfig, {"train_data": rows, "save_path": str(tmp_path), "max_len": 64}),
                  "generate": (GenerateConfig, {"prompt_data": rows, "output_path": str(tmp_path / "out")} | short)
                  }[command]  # yapf: disable
    work = {"train": train, "sft": lambda parsed, exits: train_rows(parsed, exits, SFTTrainer), "generate": generate}
    with pytest.raises(DataError, match="row 1: image '.*a.png': the server sent other bytes to rank 1 than to rank 0"):
        work[command](parse_config([], tree=tree, defaults=common | more), exits=False)
    server.shutdown()
