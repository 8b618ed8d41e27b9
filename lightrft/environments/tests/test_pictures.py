"""Observations with pictures: the whole path through a worker, the HF engine and the passes of the trainer."""
import asyncio
import base64
import gc
import io
import json
import pickle
from copy import copy
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from lightrft.config.cli import parse_config
from lightrft.config.evaluate_schema import EvaluateConfig
from lightrft.config.options import ConfigError
from lightrft.datasets.known_media import KnownMedia
from lightrft.datasets.media import find_medium, MediaError, MediaRules
from lightrft.datasets.rows import DataError, hold_rows
from lightrft.environments.answers import PendingAnswer
from lightrft.environments.base import Step, Task, ToolCall, Turn, UnreadMedia
from lightrft.environments.games import GymnasiumGame
from lightrft.environments.observations import check_size, encoded, MAX_SHOWN_BYTES, parts_of, plain_messages
from lightrft.environments.tools import ToolBox, ToolEnvironment
from lightrft.environments.worker import plain
from lightrft.inference.conversation import Conversation
from lightrft.inference.loading import LoadedModel
from lightrft.preflight.validate import validate
from lightrft.rollout.scheduler import generate
from lightrft.tests.support import media_runs, runs, tiny
from lightrft.tests.support.environment_ranks import gradients, ready
from lightrft.tests.support.invariants import largest_gap
from lightrft.trainer.sample_recorder import SampleRecorder
from lightrft.trainer.samples import reward_input
from lightrft.types import Batch, Branch, Episode
from lightrft.utils.errors import UserError
from lightrft.utils.play import Play, Shown

pytest.importorskip("torchvision")
no_picture = runs.no_picture


def keys_shown(done):
    return {one.key for pictures in done.exp.shown for one in pictures}


def shut(made):
    made.environment.shutdown()
    made.maker.rewards.shutdown()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "smolvlm", "gemma3"])
def test_the_policy_reads_and_learns_from_what_it_is_shown(family, tmp_path):
    options = media_runs.write_shown(tmp_path, family)
    made = ready(tmp_path, tmp_path / "run", "Painter", **options)
    done = made.maker.make(next(made.loader), 0)
    assert all(episode.play.turns == 3 and not episode.play.failure for episode in done.episodes)
    for episode in done.episodes:
        begins = "picture" in str(episode.prompt.columns.get("hint"))
        assert len(episode.media_spans) == 2 and len(episode.play.shown) == 2 + begins
        assert [span.keys for span in episode.media_spans] == [(one.key, ) for one in episode.play.shown[begins:]]
        roles = [(message["role"], type(message["content"])) for message in episode.play.messages]
        assert roles == [("assistant", str), ("user", list)] * 2 + [("assistant", str)]
    assert done.metrics["env/images/mean"] == 2.5
    assert (done.exp.rollout_logprobs - done.exp.old_logprobs).abs().max() < 1e-5
    it_is_one_prompt_and_the_picture_matters(made, done)
    branches_see_their_own_pictures(made, *done.episodes[-2:])
    a_history_shows_pictures(made, next(episode for episode in done.episodes if episode.prompt.media))
    it_resumes_without_its_row(made, done.episodes[0])
    it_is_recorded(made, done, tmp_path)
    if family != "gemma3":  # some of whose weights have no gradient
        whole, parts = (gradients(made, done, rows) for rows in (8, 4))
        assert largest_gap(whole, parts) < 2e-6
    shut(made)


@torch.no_grad()
def it_is_one_prompt_and_the_picture_matters(made, done):
    """Log-probs of all tokens are those of one prompt with the same conversation; a drawn token of a medium is text in
    turns alone, so it is replaced."""
    actor, store, mask = made.prepared["actor"].model, made.maker.media, done.exp.positions > 0
    ids, tokens = done.exp.token_ids.clone(), torch.tensor([*actor.modality.tokens.values()])
    ids[done.exp.loss_mask & torch.isin(ids, tokens)] = 5
    exp = replace(done.exp, token_ids=ids, loss_mask=torch.ones_like(mask), weight_versions=None)
    turns = actor(exp)[0][mask]
    whole = actor(replace(exp, prompt_lens=exp.lens, media_spans=None))[0][mask]
    assert (turns - whole).abs().max() < 5e-6
    right, shown, noise = store.tensors, keys_shown(done), torch.Generator().manual_seed(0)
    store.tensors = lambda key: right(key) if key not in shown else replace(
        right(key), tensors={name: torch.randn(tensor.shape, generator=noise) if tensor.is_floating_point() else tensor
                             for name, tensor in right(key).tensors.items()})  # yapf: disable
    assert (turns - actor(exp)[0][mask]).abs().max() > 1e-2
    store.tensors = right


@torch.no_grad()
def branches_see_their_own_pictures(made, first, second):
    """An episode that went on behind another prompt has the log-probs of both branches, each alone."""
    actor, forked = made.prepared["actor"].model, replace(second, closed=[Branch(first.prompt, first.segments)])
    whole, alone = Batch.of([forked]), Batch.of([first, second])
    assert whole.num_seqs == 1 and whole.media == [alone.media[0] + alone.media[1]]
    assert (actor(whole)[0] - actor(alone)[0]).abs().max() < 5e-6


@torch.no_grad()
def a_history_shows_pictures(made, episode):
    """One of the row, for which a part without content stands, and one of the environment: engine and trainer have the
    same log-probs behind them. There is no video of the row."""
    data, = plain(Step(text="", images=[Image.new("RGB", (56, 56), "green")]))["images"]
    told = [({"type": "image"}, "what?"), ({"type": "image", "data": data}, "and this?"), ({"type": "video"}, "gone?")]
    said = [{"role": "user", "content": [part, {"type": "text", "text": text}]} for part, text in told]
    found = []
    for history in (said[:2], said):
        forked = replace(episode, play=Play(), segments=[*episode.segments], closed=[], role="history")
        answer = Future()
        answer.set_result(Step(history=history))
        prompt = PendingAnswer(made.environment, forked, answer, 0.0, drawn=1, room=150, cut=False).result()
        found.append((forked, prompt))
    (forked, prompt), (lost, ended) = found
    assert ended is None and lost.play.failure == "exception" and not lost.play.shown
    assert prompt.media == (episode.prompt.media[0], forked.play.shown[0].key)
    forked.fork(prompt)
    made.engine.wake()
    generate(made.engine, [forked], made.maker.sampling)
    made.engine.sleep()
    exp = Batch.of([forked])
    apart = made.prepared["actor"].model(exp)[0] - exp.rollout_logprobs
    assert exp.loss_mask.sum() > episode.drawn_len and apart[exp.loss_mask].abs().max() < 1e-5
    shown, answer = [*forked.play.shown], Future()
    answer.set_result(Step(history=said[1:2]))
    prompt = PendingAnswer(made.environment, forked, answer, 0.0, drawn=1, room=150, cut=False).result()
    assert prompt.media == (shown[0].key, ) and forked.play.shown == shown, "one that is shown again counts once"


def it_resumes_without_its_row(made, episode):
    """Also from the values of a checkpoint, as whatever forgot the rows of the engine resumes it."""
    last = len(episode.segments) - 1
    state = json.loads(json.dumps(episode.state()))
    again = Episode.load(episode.prompt, episode.group_id, episode.index, state)
    assert (again.segments, again.media_spans, again.media) == (episode.segments, episode.media_spans, episode.media)
    assert [vars(one) for one in again.play.shown] == [vars(one) for one in episode.play.shown]
    again.segments, again.finish_reason, again.role = again.segments[:last], "abort", "again"
    made.engine.wake()
    generate(made.engine, [again], made.maker.sampling)
    made.engine.sleep()
    assert again.token_ids == episode.token_ids
    assert again.logprobs == pytest.approx(episode.logprobs, abs=1e-5)


def it_is_recorded(made, done, folder):
    """In the report; and the picture is known to whoever has it, also after it went to another process."""
    recorder = SampleRecorder(folder, made.strategy, made.tokenizer, True, made.maker.media)
    recorder.rollout(1, 1, done)
    (line, ) = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    for group in json.loads(line)["groups"]:
        prompt = next(each.prompt for each in done.episodes if each.prompt.uid == group["uid"])
        pictures = [group["media"], *(sample["media"] for sample in group["samples"])]
        assert [*map(len, pictures)] == [len(prompt.media), *(2 for _ in group["samples"])], "each is shown once"
        assert all(one.startswith("data:image/jpeg;base64,") for shown in pictures for one in shown)


def test_pictures_have_a_limit_and_are_forgotten_after_their_step(tmp_path):
    """The prompts that begin with one may have none behind it."""
    options = media_runs.write_shown(tmp_path, "smolvlm") | {"env_images": 1}
    made, keys = ready(tmp_path, tmp_path / "run", "Painter", **options), []
    store, prompts = made.maker.media, next(made.loader)
    for step in range(2):
        made.engine.wake()
        done = made.maker.make(prompts, step)
        for episode in done.episodes:
            begins = bool(episode.prompt.columns.get("hint"))
            assert (episode.play.turns, episode.play.limit) == (1 if begins else 2, "no_room")
            assert episode.finish_reason == "stop", "there was room for tokens"
            (one, ) = episode.play.shown
            assert one.key in (episode.prompt.media if begins else episode.media_spans[0].keys)
            assert episode.shown == ([] if begins else [one])
            scored = reward_input(episode.prompt, episode.text, episode.play).play
            assert scored.turns == episode.play.turns and not scored.shown, "no pixels go to reward workers"
        keys.append(keys_shown(done))
    it_leaves_a_response_unscored_whose_text_has_no_place_for_a_picture(made.environment, done.episodes[0])
    a_chat_with_an_environment_of_text_is_refused(made)
    shut(made)
    gone, here = keys[0] - keys[1], keys[1]
    gc.collect()
    assert gone and all(store.media[key].kind == "image" for key in here)
    for key in gone:
        with pytest.raises(UserError, match="no environment of this rank has shown"):
            store.media[key]


def it_leaves_a_response_unscored_whose_text_has_no_place_for_a_picture(player, episode):
    picture = plain(Step(text="", images=[Image.new("RGB", (8, 8))]))["images"]
    for text, failure in [("none", "exception"), ("<image> <image>", "exception"), ("see <image>", "")]:
        again, answer = replace(episode, play=Play()), Future()
        answer.set_result(Step(text=text, images=picture))
        given = PendingAnswer(player, again, answer, 0.0, drawn=1, room=150, cut=False).result()
        assert (given is None, again.play.failure) == (bool(failure), failure)
    with pytest.raises(MediaError, match="the text of a step has 2 <image> for 1 images: 'a<image><image>'"):
        player.pictures.written("a<image><image>", [Shown("image:a", *picture)])


def a_chat_with_an_environment_of_text_is_refused(made):
    model = LoadedModel(made.config, made.strategy, made.tokenizer, made.maker.media, 1.0, copy(made.environment))
    Conversation.check(model)
    model.environment.form = None
    with pytest.raises(UserError, match="--env_images 1: a chat keeps pictures in messages, and --environment .*Paint"):
        Conversation.check(model)


def test_a_picture_is_known_as_long_as_somebody_has_it():
    media, picture = KnownMedia(), Shown("image:a", base64.b64encode(b"content").decode())
    sent = pickle.loads(pickle.dumps(picture))
    assert media.show(picture) is picture and media.show(sent) is picture, "equal pictures are one"
    assert media["image:a"].source == b"content" and "image:a" not in media, "no medium of a row"
    del picture
    with pytest.raises(UserError, match="no environment of this rank has shown"):
        media["image:a"]
    assert media.show(sent) is sent and media["image:a"].key == "image:a"


def test_what_takes_no_pictures_is_refused_at_the_start(tmp_path):
    tiny.save_model(tmp_path / "model", num_hidden_layers=1)
    rows = [{"prompt": [{"role": "user", "content": "one"}]}]
    with pytest.raises(UserError, match="--env_images 1: the model takes no pictures"):
        ready(tmp_path, tmp_path / "run", "Painter", prompt_data=[hold_rows(rows)], apply_chat_template=True,
              chat_template="chatml", rollout_batch_size=1, train_batch_size=2, env_images=1)  # yapf: disable
    options = {"pretrain": "m", "prompt_data": ["d"], "environment": "e.py", "env_images": 1}
    read_none = "the reward model {} reads no pictures of an environment; drop --{} or --env_images, or score with"
    for more, match in [({"engine_type": "sglang"}, "--env_images 1: has no effect with --engine_type sglang"),
                        ({"reward_pretrain": "rm"}, read_none.format("rm", "reward_pretrain"))]:  # yapf: disable
        with pytest.raises(ConfigError, match=match):
            validate(parse_config([], defaults=runs.BASE | options | more).config, 1)
    model, others = str(tmp_path / "model"), {name: options[name] for name in ("environment", "env_images")}
    asked = parse_config(["--pretrain", model, "--eval_data", "d", "--score", model], defaults=others,
                         tree=EvaluateConfig).config  # yapf: disable
    with pytest.raises(ConfigError, match=read_none.format(model, "score")):
        validate(asked, 1)


def message(part):
    return [{"role": "tool", "name": "look", "content": [{"type": "text", "text": "see"}, part]}]


def test_pictures_in_every_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture, file = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)), io.BytesIO()
    picture.save(file, "PNG")
    content = file.getvalue()
    (tmp_path / "a.png").write_bytes(content)
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    forms = [content, "a.png", str(tmp_path / "a.png"), tmp_path / "a.png", uri, picture, np.asarray(picture)]
    forms.append(uri.replace("base64,", "base64," + " " * 5000))  # longer than any path
    parts = [{"type": "image", "image": form} for form in forms]
    parts += [{"type": "image_url", "image_url": {"url": uri}}, {"type": "image", "url": uri}]
    for part in parts:
        (found, ) = plain_messages(message(part))
        assert (found["role"], found["name"]) == ("tool", "look")
        assert found["content"][0] == {"type": "text", "text": "see"} and [*found["content"][1]] == ["type", "data"]
        medium = find_medium(base64.b64decode(found["content"][1]["data"]), "image", MediaRules(), "here")
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(medium.source))), np.asarray(picture))
    assert plain(Step(text="<image>",
                      images=[picture]))["images"] == [plain_messages(message(parts[5]))[0]["content"][1]["data"]]
    assert plain_messages([{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}])[0]["content"] == "aa"
    with pytest.raises(ValueError, match="a step has 1 images and no text"):
        plain(Step("see", images=[picture]))
    assert plain(Step(reward=1.0, done=True, images=[picture]))["done"], "nobody reads the pictures of the end"


def test_a_picture_in_base64_is_longer_than_the_name_of_a_file():
    noise, file = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    assert len(text) > 1 << 14 and encoded(text) == encoded(f"data:image/png;base64,{text}") == text
    assert encoded({"type": "image", "image": text}) == text


@pytest.mark.parametrize("part,error,match", [
    ({"type": "image", "image": "none.png"}, DataError, "no such file"),
    ({"type": "image", "image": b"\x89PNG is none"}, DataError, "an observation"),
    ({"type": "image", "image": "https://example.com/a.png"}, DataError, "downloads are off"),
    ({"type": "image", "image": "x" * 5000}, DataError, "base64 of no known format"),
    ({"type": "image"}, DataError, "it is empty"), ({"type": "text"}, TypeError, "a part of a message is"),
    ({"type": "video", "video": "a.mp4"}, UnreadMedia, "answered with video, and observations are texts and pictures"),
    (3, TypeError, "a part of a message is 3")])  # yapf: disable
def test_what_is_no_picture(part, error, match):
    with pytest.raises(error, match=match):
        plain_messages(message(part))


def test_pictures_that_are_too_large():
    with pytest.raises(ValueError, match="pictures of the answer have 8388609 bytes in base64, and at most 8388608"):
        check_size([], ["x" * MAX_SHOWN_BYTES, "y"])
    noise = np.random.default_rng(0).integers(0, 256, (1700, 1700, 3), dtype=np.uint8)
    with pytest.raises(DataError, match="bytes are more than the 8388608 that are allowed"):
        plain_messages(message({"type": "image", "image": noise}))


class Room:
    """A game of gymnasium that shows itself as frames."""
    render_mode = "rgb_array"

    def reset(self, seed):
        self.steps = 0
        return 0, {}

    def act(self, text):
        return text

    def step(self, action):
        self.steps += 1
        return self.steps, 1.0, self.steps == 2, False, {}

    def render(self):
        return np.full((4, 6, 3), 40 * self.steps, np.uint8)


def test_frames_of_a_game_and_pictures_of_tools():
    game, text = GymnasiumGame(Room()), Task("u", "text")
    assert [game.reset(text, 0), game.step(Turn("on")).messages] == ["0", "1"], "nobody has asked for pictures"
    frames = [game.reset(replace(text, env_images=2), 0), game.step(Turn("on")).messages]
    for number, messages in enumerate(frames):
        ((role, content), ) = ((message["role"], message["content"]) for message in plain_messages(messages))
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(content[0]["data"]))))
        assert role == "user" and shown.shape == (4, 6, 3) and (shown == 40 * number).all()

    for shape in [(84, 84), (84, 84, 1), (84, 84, 4)]:
        game.inner.observe = lambda place, shape=shape: np.zeros(shape, np.uint8)
        with pytest.raises(UnreadMedia, match=r"an array uint8 \[84, 84.*Let observe\(\) return it as PIL"):
            game.step(Turn("on"))
    game.inner.observe = lambda place: np.eye(2, dtype=np.uint8)
    assert game.step(Turn("on")).messages == "[[1 0]\n [0 1]]"

    def look(what: str):
        """Show something.

        Args:
            what: the thing.
        """
        picture = Image.new("RGB", (8, 8), what)
        return picture if what == "red" else ["a colour", picture]

    calls = (ToolCall("look", {"what": "red"}), ToolCall("look", {"what": "blue"}))
    step = asyncio.run(ToolEnvironment(ToolBox([look])).step(Turn("", calls)))
    first, second = plain_messages(step.messages)
    assert [part["type"] for part in first["content"]] == ["image"] and first["name"] == "look"
    assert [part["type"] for part in second["content"]] == ["text", "image"] and step.metrics == {"wrong_calls": 0}
    assert not parts_of([{"type": "image", "size": 3}, {"type": "image", "image": None}]), "data without a picture"
