"""What ``report.html`` shows in a browser, of samples that are hard to show; test_examples.py opens a trained run's."""
import json

import pytest

from lightrft.tests.support.browser import opened
from lightrft.utils.report import write_report
from lightrft.utils.trajectory_saver import json_line

HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)> <b>é 😀</b>"


def sample(index, reward, text, **more):
    values = {"index": index, "reward": reward, "parts": {}, "error": None, "finish": "stop",
              "tokens": len(text), "text": text, "logprobs": [-0.5] * len(text),
              "advantages": index / 4}  # yapf: disable
    return values | more


def groups(step):
    rows = [sample(0, 0.0, [HOSTILE, f" step {step}"]), sample(1, 1.0, ["right"]),
            sample(2, None, ["late"], error="timeout", advantages=0.0),
            sample(3, 0.5, ["a", "b", "y", "z"], tokens=1000, cut=[2, 996], finish="length",
                   logprobs=[-4.5, None, 0.0, -2.0], advantages=[1.0, 0.0, -1.0, 0.5]),
            sample(4, 0.75, ["call", f" 62 {HOSTILE}", "!", "62", "."], logprobs=[-0.5, None, None, -1.0, -3.0],
                   entropies=[1.0, None, None, 0.5, 4.0], given=[[1, 3, "tool"]], rewards=[[0, 0.25], [4, 0.5]],
                   environment={"turns": 2, "calls": 1, "wait_s": 0.5, "ended": "max_turns"})]  # yapf: disable
    return [{"uid": f"0:{uid}", "prompt": f"{HOSTILE} {uid}", "reference": {"answer": 5}, "samples": rows}
            for uid in (0, step)]  # yapf: disable


@pytest.fixture(name="page", scope="module")
def fixture_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a & <b>"
    folder.mkdir()
    lines = [{"step": step, "reward/mean": step / 10, "time/step_s": 1.0, "policy/kl_ref": 0.0, "odd/one": -step}
             for step in (1, 2, 3)]  # yapf: disable
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    records = [{"step": step, "kind": "training", "groups": groups(step)} for step in (1, 2, 3)]
    (folder / "samples.jsonl").write_text("".join(map(json_line, records)), encoding="utf-8")
    file = write_report(folder)
    with opened(file) as (tab, requests):
        yield tab
        assert all(request.endswith("/report.html") for request in requests), "the page asks for nothing else"


@pytest.fixture(name="tab")
def fixture_tab(page):
    """As it was opened."""
    page.goto(page.url.partition("#")[0])
    page.reload()
    return page


def texts(tab, selector):
    return tab.locator(selector).all_inner_texts()


def test_without_scripts_the_page_says_what_it_needs(page):
    blind = page.context.browser.new_context(java_script_enabled=False)
    tab = blind.new_page()
    tab.goto(page.url.partition("#")[0])
    assert "JavaScript, which is off here" in tab.locator("body").inner_text()
    blind.close()
    assert page.locator("noscript").count() == 1 and not page.locator("noscript").is_visible()


def test_texts_are_shown_and_not_run(tab):
    assert tab.title() == "a & <b> – lightrft" and tab.locator("h1").inner_text() == "a & <b>"
    assert tab.locator("article img, article script, article pre b").count() == 0
    assert texts(tab, "article pre.prompt")[0] == f"{HOSTILE} 0"
    assert texts(tab, ".sample >> nth=0 >> .token") == [HOSTILE, " step 3"]
    assert 'reference: {"answer":5}' in tab.locator("article").first.inner_text()


def test_unscored_and_cut_samples_say_so(tab):
    shown = texts(tab, "article >> nth=0 >> .sample")
    assert shown[2].startswith("unscored: timeout") and "cut off at the length limit" in shown[3]
    assert texts(tab, ".cut")[0] == "996 of 1000 tokens are not shown"
    pieces = tab.locator("article >> nth=0 >> .sample >> nth=3 >> pre > span")
    assert pieces.all_inner_texts() == ["a", "b", "996 of 1000 tokens are not shown", "y", "z"]


def colors(tab):
    shown = tab.locator("article >> nth=0 >> .sample >> nth=3 >> .token")
    return [shown.nth(i).evaluate("each => getComputedStyle(each).backgroundColor") for i in range(4)]


def test_tokens_have_the_colour_that_is_chosen(tab):
    nothing = "rgba(0, 0, 0, 0)"
    assert colors(tab) == ["rgba(208, 110, 0, 0.75)", nothing, "rgba(208, 110, 0, 0)", "rgba(208, 110, 0, 0.376)"]
    tab.get_by_label("advantage").check()
    assert colors(tab) == ["rgba(0, 125, 220, 0.65)", nothing, "rgba(215, 60, 40, 0.65)", "rgba(0, 125, 220, 0.325)"]
    tab.get_by_label("none").check()
    assert colors(tab) == [nothing] * 4 and tab.locator("#scale").inner_text() == ""
    title = tab.locator("article >> nth=0 >> .sample >> nth=3 >> .token").first.get_attribute("title")
    assert title == '"a"\nlog-prob -4.5 (probability 0.01111)\nadvantage 1'


def test_samples_are_filtered_by_reward(tab):

    def heads():
        return texts(tab, "article >> nth=0 >> .sample b")

    assert heads() == ["reward 0", "reward 1", "unscored: timeout", "reward 0.5", "reward 0.75"]
    tab.locator("#low").fill("0.5")
    assert heads() == ["reward 1", "unscored: timeout", "reward 0.5", "reward 0.75"]
    tab.get_by_label("unscored").uncheck()
    tab.locator("#high").fill("0.7")
    assert heads() == ["reward 0.5"] and tab.locator("#count").inner_text() == "2 of 10 samples"
    tab.locator("#low").fill("2")
    assert tab.locator("article").count() == 0 and tab.locator("#count").inner_text() == "0 of 10 samples"


def test_who_wrote_a_token_and_the_rewards_of_turns_are_marked(tab):
    shown = tab.locator("article >> nth=0 >> .sample >> nth=4")
    assert [box.get_attribute("data-role") for box in shown.locator(".given").all()] == ["tool"]
    assert texts(shown, ".given .token") == [f" 62 {HOSTILE}", "!"]
    pieces = shown.locator("pre > span").all_inner_texts()
    assert pieces == ["call", "0.25", f" 62 {HOSTILE}!", "62", ".", "0.5"]
    assert all(fact in shown.inner_text() for fact in ("2 turns", "1 call", "waited 0.5 s", "ended by max_turns"))
    titles = [token.get_attribute("title") for token in shown.locator(".token").all()]
    assert titles[2] == '"!"\nnot drawn by the policy\nwritten by: tool'
    assert titles[3] == '"62"\nlog-prob -1 (probability 0.3679)\nadvantage 1\nentropy 0.5'
    tab.get_by_label("entropy").check()
    colors = [
        token.evaluate("each => getComputedStyle(each).backgroundColor") for token in shown.locator(".token").all()
    ]
    assert colors == ["rgba(0, 140, 125, 0.25)", *["rgba(0, 0, 0, 0)"] * 2, "rgba(0, 140, 125, 0.125)",
                      "rgba(0, 140, 125, 0.75)"]  # yapf: disable
    assert "3 nats and above" in tab.locator("#scale").inner_text()


def test_a_prompt_is_followed_over_the_steps_with_the_keyboard(tab):
    slider = tab.locator("#step")
    assert tab.locator("#at").inner_text() == "3 (3 of 3)", "the newest record comes first"
    assert texts(tab, "article h3") == ["prompt 0:0", "prompt 0:3"]
    tab.locator("#prompt").select_option("0:0")
    for step in (3, 2, 1):
        assert tab.locator("#at").inner_text() == f"{step} ({step} of 3)"
        assert texts(tab, "article h3") == ["prompt 0:0"]
        assert texts(tab, ".token")[1] == f" step {step}"
        slider.press("ArrowLeft")
    tab.reload()  # as while the run is under way
    assert tab.locator("#at").inner_text() == "1 (1 of 3)" and texts(tab, "article h3") == ["prompt 0:0"]
    tab.locator("#prompt").select_option("0:2")
    assert tab.locator("#at").inner_text() == "2 (1 of 1)" and slider.is_disabled()


def test_curves_are_read_with_the_keyboard_and_other_metrics_can_be_drawn(tab):
    figures = tab.locator("figure")
    assert texts(tab,
                 "figcaption")[0].startswith("reward") and "policy/kl_ref" not in tab.locator("#panels").inner_text()
    curve = figures.first.locator("svg")
    assert curve.get_attribute("aria-label") == "reward: sampled from 0.1 to 0.3"
    curve.press("ArrowLeft")
    assert "sampled 0.2" in figures.first.inner_text() and "at step 2" in figures.first.inner_text()
    before = figures.count()
    tab.locator("#metric").select_option("odd/one")
    assert figures.count() == before + 1
    labels = [each.text_content() for each in figures.last.locator("text").all()]
    assert {"0", "-3", "1", "3", "step"} <= set(labels), "the axis goes from the lowest value to 0"


def test_a_run_without_samples_says_so(tab, tmp_path):
    """Such as supervised fine-tuning."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "sft/loss": 2.0}\n', encoding="utf-8")
    tab.goto(write_report(tmp_path).as_uri())
    assert tab.locator("#nothing").is_visible() and not tab.locator("#controls").is_visible()
    assert tab.locator("#changes tr").count() == 2 and tab.locator("figure").count() == 1


@pytest.mark.parametrize("ci, outcome", [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_without_a_browser_the_tests_fail_in_ci_and_are_skipped_elsewhere(tmp_path, monkeypatch, ci, outcome):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="make browser"):
        with opened(tmp_path / "report.html"):
            pass
