"""The page at /, in a real browser: a chat that streams, stops and fails in sentences, and the engine at work."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import fastapi
import pytest
import uvicorn
from chromium import chromium
from playwright.sync_api import expect
from scripted_engine import scripted

from llmfromscratch import LLM, SamplingParams
from llmfromscratch.server import ServerSettings, create_app, serve
from llmfromscratch.server import page as page_package
from llmfromscratch.server.running import address, bind

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
FILES = Path(page_package.__file__).parent
# what a page that took it for HTML would run, load, or make bold
HOSTILE = (
    '<b>bold</b> <img src=x onerror="document.title=1"> <script>document.title=2</script> '
    "&amp; ďábel 🧪\n\n  two  spaces"
)
WIDE, PHONE, SMALL_PHONE = (1280, 860), (390, 844), (320, 568)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium() as browser:
        yield browser


@pytest.fixture
def start(tmp_path) -> Iterator[Callable]:
    """Starts a server on an engine that says `text`; gives both."""
    with ExitStack() as stack:

        def start_it(text: str = HOSTILE, seconds: float = 0.0, settings: ServerSettings | None = None, **arguments):
            llm = scripted(tmp_path / "model", text, seconds, **arguments)
            stack.callback(go_on, llm)
            return llm, stack.enter_context(serve(llm, settings=settings))

        yield start_it


def go_on(llm: LLM) -> None:
    llm.core.model.stopped = False
    llm.core.model.seconds = 0.0


@pytest.fixture
def visit(browser, tmp_path) -> Iterator[Callable]:
    """Opens the page. Nothing may fail in it, and nothing may be loaded from elsewhere."""
    with ExitStack() as stack:

        def visit_it(url: str, size: tuple[int, int] = WIDE, theme: str = "light", failing: bool = False):
            page = stack.enter_context(
                browser.new_page(viewport=dict(zip(("width", "height"), size, strict=True)), color_scheme=theme)
            )
            page.set_default_timeout(20_000)
            stack.callback(page.screenshot, path=tmp_path / "last_view.png")  # to look at when a test has failed
            page.faults, page.loaded = [], []
            page.on("pageerror", lambda error: page.faults.append(str(error)))
            page.on("console", lambda said: failing or said.type != "error" or page.faults.append(said.text))
            page.on("request", lambda request: page.loaded.append(request.url))
            page.goto(url + "/")
            origin = re.match(r"https?://[^/]+", url)[0]
            stack.callback(lambda: check(page, origin))
            return page

        def check(page, origin: str) -> None:
            assert page.faults == []
            assert all(address.startswith((origin, "data:")) for address in page.loaded)

        yield visit_it


def ask(page, question: str) -> None:
    page.get_by_label("Your question").fill(question)
    page.get_by_role("button", name="Send").click()


def done(page) -> None:
    """Waits until the answer under way has ended, however it did."""
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=60_000)


def answers(page):
    return page.locator("#log .model .words")


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def sent_bodies(page) -> list[dict]:
    bodies: list[dict] = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    return bodies


# ---- the chat


def test_an_answer_comes_as_text_whatever_it_says(start, visit):
    _, server = start()
    page = visit(server.url)
    ask(page, "Who <i>are</i> you?")
    done(page)
    assert answers(page).text_content() == HOSTILE
    assert page.locator("#log .words *").count() == 0  # neither the question nor the answer has become elements
    assert page.title() == "llmfromscratch"
    expect(page.locator("#log .user .words")).to_have_text("Who <i>are</i> you?")
    expect(page.locator("#log .model .note")).to_contain_text(f"{len(HOSTILE.encode()) + 1} tokens · first after")


def test_an_answer_is_shown_while_it_comes(start, visit):
    llm, server = start("one two three " * 15, seconds=0.02)
    page = visit(server.url)
    ask(page, "Count.")
    page.wait_for_function("() => document.querySelector('#log .model .words').textContent.includes('two')")
    assert len(answers(page).text_content()) < 200
    assert page.locator("#log .model").get_attribute("aria-busy") == "true"  # a screen reader waits for the whole
    go_on(llm)
    done(page)
    assert answers(page).text_content() == "one two three " * 15
    assert page.locator("#log .model").get_attribute("aria-busy") == "false"
    expect(page.get_by_role("status").first).to_contain_text("Answer complete")


@pytest.mark.parametrize("how", ["button", "key"])
def test_stopping_keeps_what_has_come_and_frees_the_engine(how, start, visit):
    llm, server = start("and " * 300, seconds=0.02)
    page = visit(server.url)
    ask(page, "Go on.")
    page.wait_for_function("() => document.querySelector('#log .model .words').textContent.length > 20")
    page.get_by_role("button", name="Stop").click() if how == "button" else page.keyboard.press("Escape")
    done(page)
    until(lambda: llm.metrics.aborted == 1 and llm.metrics.blocks_used == 0, "the engine still works for nobody")
    text = answers(page).text_content()
    assert "and and" in text and len(text) < 1200
    expect(page.locator("#log .note")).to_have_text("Stopped.")
    bodies = sent_bodies(page)
    go_on(llm)
    ask(page, "And now?")
    done(page)
    assert bodies[0]["messages"] == [
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And now?"},
    ]


def test_the_settings_and_the_conversation_are_sent(start, visit):
    _, server = start("Yes.")
    page = visit(server.url)
    bodies = sent_bodies(page)
    page.locator("summary").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Max tokens").fill("33")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Seed").fill("0")
    expect(page.locator("#summary")).to_have_text("33 tokens at most, temperature 0.7, seed 0, own system prompt")
    ask(page, "One?")
    done(page)
    ask(page, "Two?")
    done(page)
    assert bodies[1] == {
        "model": "llmfromscratch",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Two?"},
        ],
        "max_tokens": 33,
        "temperature": 0.7,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#log li")).to_have_count(0)
    expect(page.get_by_label("Your question")).to_be_focused()
    ask(page, "Three?")
    done(page)
    assert [message["content"] for message in bodies[2]["messages"]] == ["Be brief.", "Three?"]
    page.reload()  # the settings of a tab stay
    expect(page.locator("#summary")).to_contain_text("33 tokens at most, temperature 0.7, seed 0")


def test_a_new_conversation_in_the_middle_of_an_answer_begins_empty(start, visit):
    llm, server = start("and " * 300, seconds=0.02)
    page = visit(server.url)
    bodies = sent_bodies(page)
    ask(page, "Go on.")
    page.wait_for_function("() => document.querySelector('#log .model .words').textContent.length > 20")
    page.get_by_role("button", name="New conversation").click()
    done(page)
    expect(page.locator("#log li")).to_have_count(0)
    go_on(llm)
    ask(page, "Anew.")
    done(page)
    assert [message["content"] for message in bodies[1]["messages"]] == ["Anew."]


@pytest.mark.parametrize(
    ("label", "value"),
    [("Max tokens", "0"), ("Max tokens", ""), ("Temperature", "-1"), ("Seed", "1.5")],
)
def test_a_setting_that_cannot_be_meant_is_shown_and_nothing_is_sent(label, value, start, visit):
    _, server = start("Yes.")
    page = visit(server.url)
    bodies = sent_bodies(page)
    page.locator("summary").click()
    page.get_by_label(label).fill(value)
    page.locator("summary").click()
    ask(page, "Well?")
    expect(page.get_by_label(label)).to_be_focused()
    assert page.get_by_label(label).evaluate("field => field.validationMessage")
    assert bodies == [] and page.get_by_label("Your question").input_value() == "Well?"


def test_an_answer_that_was_cut_off_says_so(start, visit):
    _, server = start("abcdefgh" * 100)
    page = visit(server.url)
    ask(page, "Go on.")
    done(page)
    expect(page.locator("#log .note")).to_contain_text("Cut off: the tokens allowed are used up")
    expect(page.locator("#log .note")).to_contain_text("256 tokens")


def test_one_who_has_scrolled_up_is_left_where_they_are(start, visit):
    llm, server = start("line\n" * 60, seconds=0.01)
    page = visit(server.url, PHONE)
    below = "box => box.scrollHeight - box.scrollTop - box.clientHeight"
    ask(page, "Go on.")
    page.wait_for_function("() => document.querySelector('#log .model .words').textContent.split('\\n').length > 40")
    assert page.locator("#scroll").evaluate(below) < 40  # the newest line is in view
    page.locator("#scroll").evaluate("box => box.scrollTop = 0")
    page.wait_for_timeout(100)
    go_on(llm)
    done(page)
    assert page.locator("#scroll").evaluate("box => box.scrollTop") == 0


def test_all_of_it_works_from_the_keyboard(start, visit):
    _, server = start("Yes.", seconds=0.01)
    page = visit(server.url)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the question")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("One line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and another")
    page.keyboard.press("Enter")
    done(page)
    expect(page.locator("#log .user .words")).to_have_text("One line\nand another", use_inner_text=True)
    expect(page.get_by_label("Your question")).to_be_focused()
    reached = []
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"SUMMARY", "scroll", "theme"} <= set(reached)


# ---- what goes wrong is said in a sentence


def test_a_refusal_is_shown_with_the_servers_own_sentence(start, visit):
    _, server = start("Yes.", settings=ServerSettings(max_prompt_tokens=40))
    page = visit(server.url, failing=True)
    ask(page, "x" * 100)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("40")
    text = alert.text_content()
    assert text[0].isupper() and text.endswith(".") and re.search(r"1\d\d tokens", text)
    done(page)
    bodies = sent_bodies(page)
    ask(page, "short")
    done(page)
    assert [message["content"] for message in bodies[0]["messages"]] == ["short"]  # what failed is no part of it


def test_a_full_queue_says_when_to_come_again(start, visit):
    llm, server = start("Yes.", max_requests=1, settings=ServerSettings(max_queue=0))
    llm.core.model.stopped = True
    first, second = visit(server.url), visit(server.url, failing=True)
    ask(first, "One?")
    until(lambda: llm.metrics.running or llm.core.scheduler.running, "the first question does not arrive")
    ask(second, "Two?")
    expect(second.get_by_role("alert")).to_contain_text(re.compile(r"It asks to wait \d+ seconds?\."))
    go_on(llm)
    done(first)
    second.get_by_role("button", name="Ask again").click()
    done(second)
    assert answers(second).all_text_contents() == ["Yes."]
    expect(second.locator("#log .user .words")).to_have_text("Two?")


def test_a_key_is_asked_for_and_then_used(start, visit):
    _, server = start("Yes.", settings=ServerSettings(api_keys={"open-sesame": 0}))
    page = visit(server.url, failing=True)
    ask(page, "One?")
    expect(page.get_by_role("alert")).to_contain_text("The key's place is in the settings.")
    page.locator("summary").click()
    page.get_by_label("API key").fill("open-sesame")
    page.get_by_role("button", name="Ask again").click()
    done(page)
    assert answers(page).all_text_contents() == ["Yes."]
    expect(page.locator("#model")).to_have_text("llmfromscratch")
    assert page.get_by_label("API key").get_attribute("type") == "password"
    assert page.evaluate("localStorage.length") == 0  # nothing of it outlives the tab


def test_a_key_that_no_header_can_carry_is_named(start, visit):
    _, server = start("Yes.", settings=ServerSettings(api_keys={"open-sesame": 0}))
    page = visit(server.url, failing=True)
    page.locator("summary").click()
    page.get_by_label("API key").fill("sésame…")
    ask(page, "One?")
    expect(page.get_by_role("alert")).to_contain_text("The API key holds a character that no key can have")


def test_a_server_that_is_away_is_said_to_be_and_its_return_is_seen(start, visit, tmp_path):
    llm, server = start("Yes.")
    page = visit(server.url, failing=True)
    expect(page.locator("#glance")).to_contain_text("0 running")
    server.stop()
    expect(page.locator("#away")).to_contain_text("The server does not answer.")
    expect(page.locator("#glance")).to_have_text("engine out of reach")
    ask(page, "One?")
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer.")
    page.screenshot(path=tmp_path / "away.png")
    other = ServerSettings(model_name="another")
    with serve(llm, port=int(server.url.rpartition(":")[2]), settings=other):
        expect(page.locator("#away")).to_be_hidden()
        expect(page.locator("#model")).to_have_text("another")
        page.get_by_role("button", name="Ask again").click()
        done(page)
        assert answers(page).all_text_contents() == ["Yes."]


def test_a_step_that_fails_ends_the_answer_with_the_reason(start, visit):
    llm, server = start("and " * 100, seconds=0.02)
    page = visit(server.url, failing=True)
    ask(page, "Go on.")
    page.wait_for_function("() => document.querySelector('#log .model .words').textContent.length > 20")
    llm.core.model.script = None  # the next step cannot be computed
    expect(page.get_by_role("alert")).to_contain_text("the model failed in a step of this request")
    assert answers(page).text_content().startswith("and and")
    done(page)


def test_a_connection_that_breaks_is_said_to_have(start, visit):
    _, server = start("and " * 300, seconds=0.02)
    page = visit(server.url, failing=True)
    ask(page, "Go on.")
    page.wait_for_function("() => document.querySelector('#log .model .words').textContent.length > 20")
    server._server.begin_stop()
    server._server.begin_stop()  # at once
    expect(page.get_by_role("alert")).to_contain_text(re.compile("connection broke|given up"))
    done(page)
    assert answers(page).text_content().startswith("and and")


def test_a_stream_that_ends_early_without_an_error_is_no_whole_answer(start, visit):
    _, server = start("Yes.")
    page = visit(server.url)
    early = 'data: {"choices": [{"index": 0, "delta": {"content": "Ye"}, "finish_reason": null}]}\n\n'
    page.route("**/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=early))
    ask(page, "Well?")
    expect(page.get_by_role("alert")).to_have_text("The connection broke before the answer was complete.")
    assert answers(page).text_content() == "Ye"
    page.unroute("**/chat/completions")
    page.get_by_role("button", name="Ask again").click()
    done(page)
    assert answers(page).all_text_contents() == ["Yes."]


BYTE_BY_BYTE = """(text) => {
  const bytes = new TextEncoder().encode(text), real = window.fetch;
  const slow = new ReadableStream({ start(out) { bytes.forEach((b) => out.enqueue(Uint8Array.of(b))); out.close(); } });
  window.fetch = (path, options) => path.includes('chat') ? Promise.resolve(new Response(slow)) : real(path, options);
}"""


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_events_may_be_cut_anywhere_on_their_way(end, start, visit):
    """A network delivers the bytes of one character, and of one end of line, as it likes."""
    _, server = start("Yes.")
    page = visit(server.url)
    pieces = ["dá", "bel 🧪", "\n", "."]
    events = [
        f"data: {json.dumps({'choices': [{'delta': {'content': piece}}]}, ensure_ascii=False)}" for piece in pieces
    ]
    page.evaluate(BYTE_BY_BYTE, end.join([*events, ": a comment", "data: [DONE]", ""]))
    ask(page, "Well?")
    done(page)
    assert answers(page).text_content() == "".join(pieces)


# ---- the engine


def test_the_engine_is_drawn_as_it_stands(start, visit, tmp_path):
    llm, server = start("a" * 900, max_requests=3, max_batch_tokens=48)
    for number in range(5):
        llm.core.add(llm.request("x" * (60 + 40 * number), SamplingParams(max_tokens=100)))
    for _ in range(6):
        llm.core.step()
    page = visit(server.url)
    rows = page.locator("#requests li")
    expect(rows).to_have_count(5)
    shown = [row.locator(".state").text_content() for row in rows.all()]
    running = sorted(llm.core.scheduler.running, key=lambda request: request.request_id)
    expected = [*running, *llm.core.scheduler.waiting]
    assert shown == [request.state.value for request in expected] and set(shown) >= {"decoding", "waiting"}
    for row, request in zip(rows.all(), expected, strict=True):
        whole = len(request.prompt_token_ids) + 100
        computed = min(llm.cache.length(request.request_id), len(request.prompt_token_ids))
        bar = row.get_by_role("progressbar", name=f"Request {request.request_id}")
        share = round(100 * (computed + len(request.token_ids)) / whole)
        assert abs(int(bar.get_attribute("aria-valuenow")) - share) <= 1
        box, prompt, answer = (part.bounding_box() for part in (bar, bar.locator(".prompt"), bar.locator(".answer")))
        page.wait_for_timeout(500)  # bars move
        prompt, answer = bar.locator(".prompt").bounding_box(), bar.locator(".answer").bounding_box()
        assert prompt["width"] / box["width"] == pytest.approx(computed / whole, abs=0.01)
        assert answer["width"] / box["width"] == pytest.approx(len(request.token_ids) / whole, abs=0.01)
    expect(page.locator("#counts")).to_have_text("3 running, 2 waiting")
    used, total = llm.metrics.blocks_used, llm.metrics.blocks_total
    expect(page.locator("#held")).to_have_text(f"{used} of {total:,}")
    each = -(-total // 200)
    expect(page.locator("#grid i")).to_have_count(-(-total // each))
    expect(page.locator("#grid i.held")).to_have_count(-(-used // each))
    expect(page.locator("#scale")).to_contain_text(f"A square stands for {each} blocks of 16 tokens")
    page.screenshot(path=tmp_path / "engine.png")


def test_the_picture_moves_with_the_engine(start, visit):
    llm, server = start("a" * 900, kv_cache_memory=100 * 16 * 2 * 3 * 3 * 4 * 4)
    page = visit(server.url)
    expect(page.locator("#no-requests")).to_be_visible()
    expect(page.locator("#grid i")).to_have_count(100)
    requests = [llm.request("x" * 40, SamplingParams(max_tokens=200)) for _ in range(2)]
    for request in requests:
        llm.core.add(request)
    llm.core.step()
    expect(page.locator("#requests .state")).to_have_text(["decoding"] * 2)
    expect(page.locator("#grid i.held")).to_have_count(llm.metrics.blocks_used)
    while not all(request.ended for request in requests):
        llm.core.step()
    expect(page.locator("#requests li")).to_have_count(0)
    expect(page.locator("#grid i.held")).to_have_count(0)
    expect(page.locator("#grid i.kept")).to_have_count(len(llm.cache.allocator.kept))
    expect(page.locator('[data-total="tokens"]')).to_have_text("400")
    expect(page.locator('[data-total="finished"]')).to_have_text("2")
    page.wait_for_function("() => (document.getElementById('curve').getAttribute('d') ?? '').split('L').length > 3")
    peak = page.locator("#line").get_attribute("aria-label")
    assert float(re.search(r"at most ([\d.]+)", peak)[1]) > 10
    assert float(page.locator("#top").text_content()) >= float(re.search(r"at most ([\d.]+)", peak)[1])


def test_a_cache_without_blocks_has_no_card(start, visit):
    _, server = start("Yes.", kv_cache="concat", kv_cache_memory=None)
    page = visit(server.url)
    expect(page.locator("#glance")).to_contain_text("0 running")
    expect(page.locator("#blocks-card")).to_be_hidden()


def test_nothing_is_asked_while_nobody_looks(start, visit):
    _, server = start("Yes.")
    page = visit(server.url)
    expect(page.locator("#glance")).to_contain_text("0 running")
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_for_timeout(700)
    before = len(page.loaded)
    page.wait_for_timeout(1500)
    assert len(page.loaded) == before
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    until(lambda: page.wait_for_timeout(50) or len(page.loaded) > before, "the picture stands still")


# ---- how it looks


CONTRASTS = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const box = element.getBoundingClientRect();
    if (!own || box.width < 2 || getComputedStyle(element).visibility !== 'visible'
      || !element.checkVisibility({opacityProperty: true})) continue;
    const [a, b] = [luminance(rgb(getComputedStyle(element).color)), luminance(ground(element))];
    found.push([element.textContent.trim().slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
  }
  return found;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE, SMALL_PHONE], ids=["wide", "phone", "small phone"])
def test_it_fits_and_can_be_read(theme, size, start, visit, tmp_path):
    """Contrast as in WCAG 2.2 AA (4.5:1 for text), controls at least 24 pixels high, nothing wider than the window."""
    llm, server = start("A long answer with averyverylongwordthatdoesnotendforawhile" * 3 + "\n" + "words " * 30)
    page = visit(server.url, size, theme, failing=True)
    ask(page, "What do you see?")
    done(page)
    ask(page, "x" * 4000)  # more than the context
    done(page)
    for number in range(4):
        llm.core.add(llm.request(str(number) * 300, SamplingParams(max_tokens=200, priority=number)))
    for _ in range(3):
        llm.core.step()
    expect(page.locator("#requests li")).to_have_count(4)
    page.locator("summary").click()
    for view in ("Chat", "Engine"):
        switch = page.get_by_role("button", name=view)
        if switch.is_visible():
            switch.click()
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 10 and [entry for entry in contrasts if entry[1] < 4.5] == []
        for part in ("html", "#scroll", "#engine"):
            assert page.locator(part).evaluate("part => part.scrollWidth - part.clientWidth") <= 0
        for control in page.locator("button:visible, input:visible, select:visible, textarea:visible").all():
            box = control.bounding_box()
            assert box["height"] >= 24 and box["x"] >= 0 and box["x"] + box["width"] <= size[0] + 0.5
        question = page.get_by_label("Your question")
        assert view == "Engine" or question.bounding_box()["y"] + question.bounding_box()["height"] <= size[1]
        page.screenshot(path=tmp_path / f"{theme} {size[0]} {view}.png")  # to look at


@pytest.mark.parametrize(("system", "chosen"), [("light", "dark"), ("dark", "light")])
def test_the_colours_can_be_chosen_and_stay(system, chosen, start, visit):
    _, server = start("Yes.")
    page = visit(server.url, theme=system)
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)
    page.get_by_label("Colours").select_option(chosen)
    after = page.evaluate(ground)
    page.reload()
    assert before != after == page.evaluate(ground)
    expect(page.get_by_label("Colours")).to_have_value(chosen)


def test_everything_that_can_be_used_has_a_name(start, visit):
    _, server = start("Yes.")
    page = visit(server.url)
    ask(page, "One?")
    done(page)
    page.locator("summary").click()
    tree = page.locator("body").aria_snapshot()
    for role in ("button", "textbox", "spinbutton", "combobox", "progressbar", "img", "region", "link"):
        for line in re.findall(rf"^\s*- {role}\b(.*)$", tree, flags=re.MULTILINE):
            assert re.match(r' "\S', line), f"a {role} without a name:\n{tree}"
    assert 'heading "llmfromscratch" [level=1]' in tree
    assert re.search(r'log "Messages"', tree) or re.search(r'list "Messages"', tree)


def test_behind_a_path_of_a_proxy_it_is_the_same_page(start, visit):
    llm, _ = start("Yes.")
    outer = fastapi.FastAPI()
    outer.mount("/models/small", create_app(llm))
    taken = bind("127.0.0.1", 0)
    runner = uvicorn.Server(uvicorn.Config(outer, log_level="warning"))
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [taken]})
    thread.start()
    try:
        until(lambda: runner.started, "the outer app does not start")
        page = visit(address(taken) + "/models/small")
        ask(page, "One?")
        done(page)
        assert answers(page).text_content() == "Yes."
        expect(page.locator('[data-total="finished"]')).to_have_text("1")
    finally:
        runner.should_exit = True
        thread.join(30)


# ---- what it is made of


def test_text_never_goes_through_a_parser_of_html():
    scripts = {file.name: file.read_text(encoding="utf-8") for file in FILES.glob("*.js")}
    assert set(scripts) == {"app.js", "chat.js", "server.js", "watch.js"}
    parsing = r"innerHTML|outerHTML|AdjacentHTML|document\.write|DOMParser|ContextualFragment|\beval\b|setHTML"
    for name, script in scripts.items():
        assert not re.search(parsing, script), name


def test_the_page_is_served_so_that_nothing_foreign_can_run_in_it(start):
    _, server = start("Yes.")
    with urllib.request.urlopen(server.url + "/", timeout=20) as answer:
        policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["Content-Security-Policy"].split(";"))
        text = answer.read().decode()
    assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'" and policy["style-src"] == "'self'"
    assert not re.search(r"https?://(?!www\.w3\.org)", text)  # the namespace of SVG is no address
    assert not re.search(r"<script[^>]*>[^<]|\bon\w+=|<style|style=", text)


def test_every_file_of_the_page_is_served_and_no_other(start):
    _, server = start("Yes.")
    files = {file.name for file in FILES.iterdir() if file.suffix in (".js", ".css")}
    assert files == set(page_package.FILES)
    for name in files:
        with urllib.request.urlopen(f"{server.url}/page/{name}", timeout=20) as answer:
            assert answer.read() == (FILES / name).read_bytes()
            assert answer.headers["Content-Type"].startswith("text/css" if name.endswith("css") else "text/javascript")
    for name in ("__init__.py", "../app.py", "%2e%2e/app.py", "index.html"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{server.url}/page/{name}", timeout=20)
