"""The tests that every engine with weights of its own passes."""
import pytest
import torch

from lightrft.rollout import SamplingParams
from lightrft.tests.support import tiny
from lightrft.tests.support.engine_rig import (EXACT, LIMIT, NEW, STOPS, reports_responses_as_they_end, requests,
                                               tokens)
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.stepping import rounds_keep_to_the_protocol


class EngineContract:
    """For a subclass in the tests of an engine, where the fixture ``rig`` is an
    :class:`~lightrft.tests.support.engine_rig.EngineRig` with ``title``, the engine's name in messages, and
    ``unfinished()``, how many responses its native engine has under way."""

    @pytest.mark.parametrize("sampling",
                             [{"temperature": 0.0}, {}, {"temperature": 0.7}, {"top_p": 0.8}, {"min_p": 0.05},
                              {"temperature": 1.3, "top_k": 20}, {"temperature": 0.8, "top_k": 1}])
    def test_logprobs_are_the_trainers_before_and_after_an_update(self, rig, sampling):
        params = SamplingParams(NEW, stop_token_ids=STOPS, **sampling)
        for _ in range(2):
            rig.ready()
            mean, largest = rig.gap(requests(), params)
            assert mean < EXACT and largest < 2e-5, (mean, largest)
            rig.learn()

    def test_greedy_responses_are_those_of_the_hf_engine(self, rig):
        rig.ready()
        params = SamplingParams(NEW, 0.0, stop_token_ids=STOPS)
        assert tokens(generate(rig.engine, requests(1), params)) == tokens(generate(rig.hf, requests(1), params))

    def test_a_response_depends_on_its_seed_alone(self, rig):
        rig.ready()
        params, asked, engine = SamplingParams(NEW, stop_token_ids=STOPS), requests(), rig.engine
        found = tokens(generate(engine, asked, params))
        assert tokens(generate(engine, asked[::-1], params))[::-1] == found
        assert [tokens(generate(engine, [one], params))[0] for one in asked] == found
        swapped = [Group(one.token_ids, one.seeds[::-1]) for one in asked]
        assert [group[::-1] for group in tokens(generate(engine, swapped, params))] == found
        assert len({tuple(ids) for ids, _ in found[0]}) == len(found[0]), "samples of one prompt are all the same"

    def test_the_random_numbers_of_the_trainer_are_left_alone(self, rig):
        rig.ready()
        torch.manual_seed(3)
        state = torch.get_rng_state()
        generate(rig.engine, requests(1), SamplingParams(NEW))
        assert torch.equal(torch.get_rng_state(), state)

    def test_ends(self, rig):
        """Stop tokens and the end token end a response, are its last and only one; else the length does."""
        rig.ready()
        eos, reasons = tiny.tokenizer().eos_token_id, set()
        for group in generate(rig.engine, requests(8), SamplingParams(NEW, 1.0, stop_token_ids=(*STOPS, 10_000))):
            for done in group:
                ending = [i for i, token in enumerate(done.token_ids) if token in (*STOPS, eos)]
                expected = "stop" if ending else "length"
                assert done.finish_reason == expected and len(done.logprobs) == len(done.token_ids)
                assert ending == [len(done.token_ids) - 1] if ending else len(done.token_ids) == NEW
                reasons.add(done.finish_reason)
        assert reasons == {"stop", "length"}

    def test_finished_requests_are_reported_at_once(self, rig):
        rig.ready()
        asked, reported = requests(2), []
        asked[3] = Group(asked[3].token_ids, [])  # no samples are wanted
        found = generate(rig.engine, asked, SamplingParams(NEW, stop_token_ids=tuple(range(4, 40))),
                         lambda i, done: reported.append((i, tokens([done]), rig.unfinished())))
        assert sorted(i for i, *_ in reported) == [0, 1, 2, 3, 4, 5] and found[3] == []
        assert all(done == tokens([found[i]]) for i, done, _ in reported)
        assert reported[0][0] == 3 and reported[1][2] > 0 == reported[-1][2], "they are reported at the end only"

    def test_responses_are_reported_as_soon_as_they_end(self, rig):
        rig.ready()
        asked = [*requests(4), Group([5], [])]
        reports_responses_as_they_end(rig.engine, asked, SamplingParams(NEW, stop_token_ids=tuple(range(4, 40))))

    def test_an_error_in_the_callback_leaves_nothing_behind(self, rig):
        rig.ready()
        params = SamplingParams(NEW)
        expected = tokens(generate(rig.engine, requests(), params))

        def broken(i, completions):
            raise KeyError("reward")

        with pytest.raises(KeyError, match="reward"):
            generate(rig.engine, requests(), params, broken)
        assert not rig.unfinished()
        assert tokens(generate(rig.engine, requests(), params)) == expected

    @pytest.mark.parametrize("temperature", [0.7, 0.0])
    def test_fire(self, rig, temperature):
        """The first token at a temperature of its own, the others at the usual one."""
        rig.ready()
        hot, usual = SamplingParams(NEW, 8.0, top_k=50), SamplingParams(NEW, temperature, top_k=50)
        asked, reasons = requests(4), set()
        params = SamplingParams(NEW, temperature, top_k=50, stop_token_ids=STOPS, first_temperature=8.0)
        for request, group in zip(asked, generate(rig.engine, asked, params)):
            for done in group:
                first, rest = done.token_ids[:1], done.token_ids[1:]
                expected = rig.logprobs(request, first,
                                        hot) + (rig.logprobs(request, rest, usual, first) if rest else [])
                assert done.logprobs == pytest.approx(expected, abs=2e-5)
                reasons.add(done.finish_reason)
            assert len({tuple(done.token_ids[:1]) for done in group}) > 1
        assert reasons == {"stop", "length"} or not temperature, "greedy responses to few prompts may all be long"
        one = SamplingParams(1, temperature, first_temperature=8.0)
        assert all(len(done.token_ids) == 1 for group in generate(rig.engine, asked, one) for done in group)

    def test_rounds(self, rig):
        """Asleep and awake again between two of them."""
        rig.ready()
        rounds_keep_to_the_protocol(rig.engine, requests(), lambda: (rig.engine.sleep(), rig.ready()))
        assert not rig.unfinished()

    def test_asleep_it_neither_generates_nor_learns(self, rig):
        rig.ready()
        rig.engine.sleep()
        with pytest.raises(RuntimeError, match="asleep: call wake"):
            generate(rig.engine, requests(), SamplingParams(NEW))
        with pytest.raises(RuntimeError, match="asleep: call wake"):
            rig.sync()
        rig.engine.wake()
        with pytest.raises(RuntimeError, match="has no weights yet"):
            generate(rig.engine, requests(), SamplingParams(NEW))
        rig.sync()
        assert rig.engine.weight_version == rig.version and generate(rig.engine, [], SamplingParams(NEW)) == []

    def test_requests_that_cannot_be_run(self, rig):
        rig.ready()
        some, none = SamplingParams(NEW), SamplingParams(0)
        long = [Group([5], [1]), Group([5] * (LIMIT - NEW + 1), [1])]
        for asked, params, message in ((long, some, "prompt 1: 45 prompt .* the 64 that .*--prompt_max_len"),
                                       ([Group([], [1])], some, "prompt 0 is empty"),
                                       ([Group([5, 260], [1])], some, "prompt 0 has token 260, .* embeddings of 260"),
                                       ([Group([5], [1])], none, "max_new_tokens must be at least 1"),
                                       ([Group([5], [1], ("cat.png", ))], some, f"{rig.title} engine takes text")):
            with pytest.raises(ValueError, match=message):
                generate(rig.engine, asked, params)

    def test_a_broken_stream_of_weights_is_refused_until_a_good_one_comes(self, rig):
        rig.ready()
        good = dict(rig.strategy.full_params(rig.actor))
        first = next(iter(good))
        for stream, message in (({name: good[name] for name in list(good)[:-1]}, "1 weights did not arrive"),
                                (good | {"model.x": good[first]}, "'model.x' is not one of the model"),
                                (good | {first: good[first][:-1]}, f"'{first}' has shape")):
            with pytest.raises(ValueError, match=message):
                rig.engine.update_weights(stream.items(), 99)
            with pytest.raises(RuntimeError, match="has no weights yet"):
                generate(rig.engine, requests(), SamplingParams(NEW))
        mean, _ = rig.ready().gap(requests(1), SamplingParams(NEW))
        assert mean < EXACT and rig.engine.weight_version == rig.version
