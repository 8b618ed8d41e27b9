"""What the library of an engine that draws parts may do, and no test can time: with a stand-in for the library."""
import pytest

from lightrft.rollout import SamplingParams
from lightrft.rollout.partwise import Part, PartwiseEngine
from lightrft.tests.support.episodes import Group, keyed, Response
from lightrft.types import Key, Segment

FIRST = Key("sample", 0, 0)
STOP, PARAMS = 9, SamplingParams(4, stop_token_ids=(9, ))


class Library:
    """Draws the seed of a response again and again. ``ends``: what a part is when it is cancelled, by its seed."""

    def __init__(self):
        self.drawing, self.ends, self.empty = {}, {}, False

    def round(self, begun, waiting):
        self.drawing |= {response.key: response for response in begun}
        if self.empty:
            return [Part(key, [], [], "abort") for key in self.drawing]
        ended = [(key, one) for key, one in self.drawing.items() if one.episode.seed < 2]
        for key, _ in ended:
            del self.drawing[key]
        return [self.part(one, "stop" if one.episode.seed else "length") for _, one in ended]

    @staticmethod
    def part(response, reason):
        count = {"stop": 1, "length": 1 if response.begins_hot else response.room, "abort": 1}[reason]
        drawn = [STOP if reason == "stop" else response.episode.seed] * count
        return Part(response.key, drawn, [-1.0] * count, reason)

    def cancel(self, keys=None):
        cancelled = [self.drawing.pop(key) for key in list(self.drawing if keys is None else keys)]
        return [self.part(one, self.ends.get(one.episode.seed, "abort")) for one in cancelled]


class Engine(PartwiseEngine):
    """An engine on that library."""
    title, vocabulary, longest, takes_media, group, eos_token_ids = "the library", 10, 8, False, None, frozenset()

    def __init__(self):
        super().__init__()
        self.drawer, self._ready, self.woken = Library(), True, 0

    def _wake_cache(self):
        self.woken += 1


def submitted(*seeds, params=PARAMS, waits=True):
    engine = Engine()
    engine.submit(keyed([Group([5], list(seeds))]), params, waits)
    return engine


def parts(ended):
    return [(key.index, Response.part(episode).token_ids, episode.finish_reason) for key, episode in ended.items()]


@pytest.mark.parametrize("reason,tokens", [("stop", [STOP]), ("length", [2] * 4), ("abort", [2])])
def test_an_abort_that_comes_after_the_end(reason, tokens):
    """Such a response is finished: to resume it would go on behind its last token. Here nobody hears of its stop token
    in time to answer."""
    engine = submitted(2)
    assert not engine.step()
    engine.drawer.ends[2] = reason
    engine.abort([FIRST] * 2)
    with pytest.raises(KeyError):
        engine.resume(FIRST, Segment.given([]))
    assert parts(engine.step()) == [(0, tokens, reason)]
    assert not engine.step() and not engine._open


@pytest.mark.parametrize("reason,tokens", [("stop", [STOP]), ("length", [2] * 4), ("abort", None)])
def test_a_pause_that_comes_after_the_end(reason, tokens):
    """What has ended is reported by the next step, before a round; what has not draws on."""
    engine = submitted(2)
    engine.step()
    engine.drawer.ends[2] = reason
    engine._pause()
    assert not engine.drawer.drawing
    assert parts(engine.step()) == ([] if tokens is None else [(0, tokens, reason)])
    assert [one.episode.response_len for one in engine.drawer.drawing.values()] == [1] * (tokens is None)
    assert list(engine._parked) == [FIRST] * (reason == "stop")


def test_a_report_tells_tokens_of_two_versions_apart():
    """The weights change after the hot first token, which is not reported yet."""
    engine = submitted(0, params=SamplingParams(4, first_temperature=8.0))
    assert not engine.step()
    engine._pause()
    engine.weight_version = 1
    episode, = engine.step().values()
    assert episode.segments == [Segment([0], [-1.0], version=0), Segment([0] * 3, [-1.0] * 3, version=1)]


def test_a_hot_first_token_is_reported_with_the_rest():
    engine = submitted(0, params=SamplingParams(4, first_temperature=8.0))
    assert not engine.step() and parts(engine.step()) == [(0, [0] * 4, "length")]


def test_what_was_never_begun_is_aborted_too():
    engine = submitted(1, 2)
    engine.abort([Key("sample", 0, 1), Key("sample", 7, 7)])
    assert parts(engine.step()) == [(1, [], "abort")] and parts(engine.step()) == [(0, [STOP], "stop")]


def test_a_reset_ends_all_responses_but_asleep_they_wait():
    engine = submitted(2)
    engine._asleep = True
    with pytest.raises(RuntimeError, match="the library engine is asleep"):
        engine.step()
    engine._asleep = False
    assert not engine.step() and engine.drawer.drawing
    engine.drawer.empty = True
    with pytest.raises(RuntimeError, match=r"has ended response \('sample', 0, 0\) without a token \(abort\)"):
        engine.step()
    engine.reset()
    assert not engine.step() and not engine.drawer.drawing and not engine._open


def test_parameters_of_the_rest_are_checked():
    engine = submitted(1)
    assert parts(engine.step()) == [(0, [STOP], "stop")]
    with pytest.raises(ValueError, match="1 prompt . 8 new tokens are more than the 8 that"):
        engine.resume(FIRST, Segment.given([]), SamplingParams(8))
    with pytest.raises(ValueError, match="has 4 tokens with its answer, of 4"):
        engine.resume(FIRST, Segment.given([3, 3, 3]))
    engine.resume(FIRST, Segment.given([3, 3]), SamplingParams(7))
    assert parts(engine.step()) == [(0, [STOP], "stop")]
