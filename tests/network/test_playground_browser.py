"""The playground in a real browser: before our own server, and before one that answers as vLLM's does."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from browser import CHROMIUM, Browser
from playground_page import ask, cards, hint, visit
from selfjudge.integrations.server.playground import FACTS, Playground
from servers import Server

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine (Debian: apt-get install chromium)"
)
HOSTILE = "</script><img src=x onerror='window.hacked=1'>\u202e<script>window.hacked=1</script>"


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], endless: list[str]) -> Server:
    return start(*endless, "--max-tokens", "2000", "--theta", "F", "--strict-start", "0")


@pytest.fixture
def opened(browser: Browser, server: Server) -> Browser:
    return visit(browser, server.url)


def told(server: Server, question: str, **how: Any) -> Any:
    return server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": question}], max_tokens=40, temperature=0,
        extra_body={"selfjudge": {**how, "judged_tokens": not how.get("off", False)}},
    )  # fmt: skip


def test_two_answers_at_once(opened: Browser, server: Server) -> None:
    """Each is what the API says, coloured by origin; both are marked where they part."""
    about = opened.run("document.getElementById('server').textContent")
    assert about.startswith("tiny · judged, threshold (θ) 0.4, drafted per step (γ) 3 · cpu")
    assert opened.run("document.getElementById('recipe').hidden")
    ask(opened, "w1 w2 w3")
    lossless, relaxed = cards(opened)
    exact, judged = told(server, "w1 w2 w3", off=True), told(server, "w1 w2 w3")
    assert lossless["text"] == exact.choices[0].message.content
    assert relaxed["text"] == judged.choices[0].message.content
    assert lossless["text"] != relaxed["text"]
    assert f"{exact.selfjudge['mean_accepted_length']:.2f} tokens per pass (m)" in lossless["figures"]
    assert f"{judged.selfjudge['mean_accepted_length']:.2f} tokens per pass (m) (" in relaxed["figures"]
    assert "tokens/s" in lossless["figures"]
    assert ("cut off" in lossless["figures"]) == (exact.choices[0].finish_reason == "length")
    assert "% judged" in relaxed["figures"]
    assert set(lossless["origins"]) == {"draft", "target"}
    marked = [i for i, origin in enumerate(relaxed["origins"]) if origin == "judge"]
    assert marked == [token["index"] for token in judged.selfjudge["judged_tokens"]]
    words = [card["text"].split() for card in (lossless, relaxed)]
    first = next(i for i, (a, b) in enumerate(zip(*words, strict=False)) if a != b)
    assert lossless["parts"] == relaxed["parts"] == first
    assert f"same for {first} tokens" in relaxed["figures"]
    styles = opened.run(
        "['draft', 'judge', 'target'].map(o => getComputedStyle(document.querySelector('.text .' + o)))"
        ".map(s => s.borderBottomColor === 'rgba(0, 0, 0, 0)' ? 'none' : s.borderBottomStyle)"
    )
    assert styles == ["dashed", "solid", "none"]  # told apart without colour, too


def reshow(opened: Browser, change: str) -> list[dict[str, Any]]:
    """The last answers once more, after a change to what is known about `all` of them."""
    opened.run(
        "{ const all = [...document.querySelectorAll('.turn:last-child .card')].map(node => cards.get(node));"
        f" {change}; all.forEach(card => showFigures(card, all)); }}"
    )
    return cards(opened)


@pytest.mark.slow
def test_speeds_of_a_busy_machine_are_not_compared(opened: Browser) -> None:
    ask(opened, "w1 w2 w3")
    busy, idle = (
        reshow(opened, f"all[0].statistics.busy = {json.dumps(said)}; all[1].statistics.busy = ''")
        for said in ("this machine is busy: speeds are not reliable", "")
    )
    assert all("tokens/s (" not in card["figures"] for card in busy)
    assert "tokens/s (" in idle[1]["figures"]
    assert {card["verdict"] for card in busy} == {"Speed not compared: this machine is busy."}
    assert "× exact here" in idle[1]["verdict"]
    assert "tokens per pass (m) (" in busy[1]["figures"]  # no matter of the clock
    unlike = reshow(opened, "all[0].statistics.gamma_mean = all[1].statistics.gamma_mean + 1")[1]["figures"]
    assert "tokens per pass (m)" in unlike
    assert "tokens per pass (m) (" not in unlike  # of rules that draft as much alone
    reshow(opened, "all[1].statistics.busy = 'why'")
    assert opened.run("document.querySelector('.card:last-child .verdict').title") == "why"


def test_a_token_says_why_it_is_there(opened: Browser, server: Server) -> None:
    """To the mouse and to the keyboard."""
    ask(opened, "w4 w5")
    tokens = told(server, "w4 w5").selfjudge["judged_tokens"]
    opened.point(".card:last-child .token.judge")
    about = {
        "about": "drafted, accepted against the target’s choice",
        "target’s choice": f"{tokens[0]['target_text'].replace(' ', '␣')}, p {tokens[0]['target_probability']:.3f}",
        "judge’s score": f"{tokens[0]['score']:.3f}",
    }
    found = hint(opened)
    assert {key: found[key] for key in about} == about
    assert tokens[0]["text"].replace(" ", "␣") in found["token"]
    assert found["token"].endswith(f", p {tokens[0]['probability']:.3f}")
    opened.run("document.querySelector('.card:last-child .token').focus()")
    assert hint(opened)["pass"] == "0, reading the prompt: no rule is asked"
    opened.press("n")
    here = "Number(document.activeElement.dataset.i)"
    assert opened.run(here) == tokens[0]["index"] or tokens[0]["index"] == 0
    opened.press("ArrowRight")
    opened.press("p")
    assert "judge" in opened.run("document.activeElement.className")
    opened.press("End")
    opened.press("ArrowRight")
    assert opened.run(here) == opened.run("document.querySelectorAll('.card:last-child .token').length") - 1
    assert opened.run("document.querySelectorAll('.card:last-child .token[tabindex=\"0\"]').length") == 1
    opened.press("Escape")
    assert opened.run("document.getElementById('hint').hidden")


def test_settings_apply_to_the_next_answer(opened: Browser, server: Server) -> None:
    opened.choose("#compare", "")
    opened.choose("#gamma", "5")
    opened.run("document.querySelector('[value=quality]').click()")
    opened.run(
        "const a = document.getElementById('amount'); a.value = 0.9; a.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    ask(opened, "w7 w8")
    (card,) = cards(opened)
    wanted = told(server, "w7 w8", quality=0.9, gamma=5)
    assert card["text"] == wanted.choices[0].message.content
    assert card["name"] == "Relaxed" + "judged, threshold (θ) 0.8, drafted per step (γ) 5"
    opened.choose("#rule", "margin")
    opened.run("document.getElementById('settings').dispatchEvent(new Event('input'))")
    assert opened.run("document.querySelector('[value=quality]').disabled")
    opened.run("document.querySelector('[value=price]').click()")
    opened.run("document.getElementById('amount').value = 0.5")
    opened.run("document.getElementById('new').click()")
    ask(opened, "w7 w8")
    (card,) = cards(opened)
    assert card["text"] == told(server, "w7 w8", rule="margin", price=0.5, gamma=5).choices[0].message.content
    opened.choose("#rule", "exact")
    opened.choose("#compare", "exact")
    opened.run("document.getElementById('settings').dispatchEvent(new Event('input'))")
    ask(opened, "w9")
    assert [card["name"] for card in cards(opened)] == [
        "Lossless" + "exact, drafted per step (γ) 5"
    ]  # nothing to put beside it
    assert opened.run("messagesBefore([]).map(m => m.role)") == ["user", "assistant"] * 2


@pytest.mark.slow
def test_gamma_says_what_the_chosen_rule_is_decoded_with(
    browser: Browser, start: Callable[..., Server], endless: list[str]
) -> None:
    opened = visit(browser, start(*endless[: endless.index("--gamma")], "--rule", "exact").url)

    def said() -> str:
        opened.run("document.getElementById('settings').dispatchEvent(new Event('input'))")
        return opened.run("document.getElementById('gamma').selectedOptions[0].textContent")

    assert said() == "the server’s: auto"  # what the server does is preset
    ask(opened, "w7 w8")
    (name,) = (card["name"] for card in cards(opened))
    assert re.fullmatch(
        r"Losslessexact, drafted per step \(γ\) auto( \(mean \d\.\d\))?", name
    )  # no mean where nothing was drafted
    opened.choose("#rule", "margin")
    opened.run("document.getElementById('rule').dispatchEvent(new Event('input', {bubbles: true}))")
    assert said() == "the server’s: auto"
    ask(opened, "w7 w8")
    lossless, relaxed = (card["name"] for card in cards(opened))
    assert lossless.startswith("Losslessexact, drafted per step (γ) auto")
    assert re.search(r"\(γ\) \d$", relaxed)  # fixed when the request entered
    opened.choose("#compare", "")
    opened.choose("#gamma", "5")
    assert said() == "5"


@pytest.mark.slow
def test_plain_decoding_beside_exact_shows_the_gain(
    browser: Browser, start: Callable[..., Server], endless: list[str]
) -> None:
    opened = visit(browser, start(*endless[: endless.index("--gamma")], "--rule", "exact").url)
    opened.choose("#compare", "plain")
    ask(opened, "w1 w2 w3")
    plain, exact = cards(opened)
    assert plain["name"] == "Plain decodingno draft"
    assert exact["name"].startswith("Losslessexact, drafted per step (γ) auto")
    assert plain["text"] == exact["text"]
    assert "same text" in exact["figures"]
    assert "1.00 tokens per pass (m)" in plain["figures"]
    assert set(plain["origins"]) == {"target"}
    assert re.search(r"^\d+ passes instead of 40 · ", exact["figures"])
    busy, idle = (
        reshow(opened, f"all[0].statistics.busy = {json.dumps(said)}; all[1].statistics.busy = ''")
        for said in ("this machine is busy: speeds are not reliable", "")
    )
    assert plain["verdict"] == "One pass for each token."
    rates = opened.run("[...document.querySelectorAll('.card')].map(card => rate(cards.get(card)))")
    assert idle[1]["verdict"].startswith(f"{rates[1] / rates[0]:.1f} × plain here")
    bar = "document.querySelector('.card:last-child .speed').getAttribute('aria-label')"
    assert opened.run(bar) == f"speed: {rates[1] / rates[0]:.2f}, plain decoding: 1"
    assert busy[1]["verdict"] == "Speed not compared: this machine is busy."  # and no factor
    assert "passes instead of" in busy[1]["figures"]
    m = reshow(opened, "all[0].statistics.busy = 'b'")[1]["figures"].split(" tokens per pass")[0].split()[-1]
    assert opened.run(bar) == f"tokens per pass: {m}, plain decoding: 1"  # the bar has what can be trusted
    said = opened.run(
        "[{}, {busy: 'b'}, {speed_over_plain: 2}, {speed_over_plain: 0.9}, {gamma_mean: 0, speed_over_plain: 1}]"
        ".map(more => { state.plain = null; const statistics = {tokens_per_second: 9, mean_accepted_length: 1.5, ...more};"
        " return paceOf({tokens: [], statistics}).said; })"
    )
    assert said == [
        "Not compared with plain decoding: “Compare with” does that.",
        "Speed not compared: this machine is busy.",
        "About 2.0 × plain here.",
        "About 0.9 × plain here: too few drafts were accepted.",
        "About 1.0 × plain here: drafts did not pay, so none were made.",
    ]


def test_copies_run_as_they_are(opened: Browser) -> None:
    opened.run("document.querySelector('[value=quality]').click()")
    ask(opened, 'w1 "w2" it\'s\nw3')
    card = cards(opened)[1]
    opened.run("document.querySelectorAll('.card')[1].querySelectorAll('.actions button')[2].click()")
    opened.wait("window.copied")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(opened.run("window.copied"), {})
    assert printed.getvalue().rstrip("\n") == card["text"]
    opened.run("document.querySelectorAll('.card')[1].querySelectorAll('.actions button')[1].click()")
    words = shlex.split(opened.wait("window.copied.startsWith('curl') && window.copied"))
    assert words[:2] == ["curl", f"{opened.run('location.origin')}/v1/chat/completions"]
    assert json.loads(words[-1])["messages"] == [{"role": "user", "content": 'w1 "w2" it\'s\nw3'}]
    assert json.loads(words[-1])["selfjudge"] == {"rule": "judged", "quality": 0.9}


STOP_EARLY = """
const watcher = new MutationObserver(() => {
  if (document.querySelectorAll(".card .token").length <= 20) return;
  watcher.disconnect();
  window.focused = document.activeElement.id;
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
});
watcher.observe(document.body, { childList: true, subtree: true });
"""  # in the page: a busy machine would press the key when the answers have ended


@pytest.mark.slow
def test_stop(opened: Browser, server: Server) -> None:
    """What was said stays, the server gives the answers up, and the next question is welcome."""
    before = server.metric("generations_total", finish="cancelled")
    opened.run(STOP_EARLY)
    ask(opened, "w1", tokens=2000, wait=False)
    opened.wait("window.focused && state.running === null")
    assert opened.run("window.focused") == "question"  # the next question can be typed meanwhile
    for card in cards(opened):
        assert (card["problem"], card["busy"]) == ("stopped", None)
        assert card["text"]
    server.wait_until_idle()
    assert server.metric("generations_total", finish="cancelled") > before  # one may be done before the page shows it
    ask(opened, "w2")
    assert [card["problem"] for card in cards(opened)] == [None, None]
    assert opened.run("document.activeElement.id") == "question"


def test_an_error_is_one_line(browser: Browser, start: Callable[..., Server], endless: list[str]) -> None:
    server = start(*endless)
    visit(browser, server.url)
    browser.choose("#rule", "other")
    browser.run("document.getElementById('other').value = 'nonsense:1'")
    ask(browser, "w1")
    lossless, relaxed = cards(browser)
    assert lossless["problem"] is None
    assert [card["parts"] for card in (lossless, relaxed)] == [-1, -1]  # an answer that failed parts from none
    assert relaxed["problem"].startswith("unknown rule 'nonsense'; rules are:")
    assert browser.run("document.querySelector('.error').getAttribute('role')") == "alert"
    assert browser.run("messagesBefore([])") == []  # the next question does not follow one without an answer
    server.process.kill()
    server.process.wait()
    ask(browser, "w1")
    assert [card["problem"] for card in cards(browser)] == ["the server cannot be reached"] * 2
    assert any("400" in line for line in browser.complaints)  # the browser's own line about the refused request
    browser.complaints.clear()


def test_hostile_questions_are_text(opened: Browser) -> None:
    ask(opened, HOSTILE)
    assert opened.run("document.querySelector('.bubble').textContent") == HOSTILE
    assert opened.run("document.querySelectorAll('#chat img, #chat script').length") == 0


def test_the_key_stays_in_the_tab(browser: Browser, start: Callable[..., Server], endless: list[str]) -> None:
    server = start(*endless, SELFJUDGE_API_KEY="right")
    status, head, text = server.send("GET", "/")
    assert (status, head["x-content-type-options"]) == (200, "nosniff")
    assert "tiny" not in text  # the page itself says nothing about the server
    browser.open(f"{server.url}/")
    for key in ("wrong", "right"):
        browser.wait("document.getElementById('key').open && !document.getElementById('key-input').value")  # asked anew
        browser.run(f"document.getElementById('key-input').value = '{key}'")
        browser.run("document.querySelector('#key button').click()")
    browser.wait("document.getElementById('server').textContent.startsWith('tiny')")
    ask(browser, "w1 w2")
    assert all(card["text"] and card["problem"] is None for card in cards(browser))
    assert browser.run("[localStorage.length, document.cookie, location.href]") == [0, "", f"{server.url}/"]
    assert browser.run("sessionStorage.getItem('selfjudge-key')") == "right"
    copies = browser.run("[curl, python].map(f => f(cards.get(document.querySelector('.card'))))")
    assert all("right" not in text and "SELFJUDGE_API_KEY" in text for text in copies)
    visit(browser, server.url)  # a reload does not ask again
    assert browser.run("state.model") == "tiny"
    assert all("401" in line for line in browser.complaints)  # the browser's own lines about the refused requests
    browser.complaints.clear()


@pytest.mark.quick("360")
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_no_width_makes_the_page_scroll_sideways(browser: Browser, server: Server, width: int) -> None:
    visit(browser, server.url, width)
    fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert browser.run(fits)
    aside = "document.getElementById('side').checkVisibility({visibilityProperty: true})"
    assert browser.run(aside) == (width > 960)  # else it is a drawer
    if width <= 960:
        browser.run("document.getElementById('menu').click()")
        assert browser.run(f"{aside} && document.activeElement.id") == "side"
        assert browser.run(fits)
        browser.press("Escape")
        assert not browser.run(aside)
    ask(browser, "w1 " * 30 + "w" * 200)
    assert browser.run(fits)
    tops = browser.run("[...document.querySelectorAll('.card')].map(c => c.getBoundingClientRect().top)")
    assert (tops[0] == tops[1]) == (width > 700)  # beside each other, or one below the other
    browser.run("document.querySelector('.card:last-child .token:last-child').focus()")
    box = browser.run("(({left, right}) => [left, right])(document.getElementById('hint').getBoundingClientRect())")
    assert 0 <= box[0] < box[1] <= width


@pytest.mark.quick("light")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_told_from_what_is_behind_it(opened: Browser, scheme: str) -> None:
    """Contrast of 4.5 : 1 (WCAG AA); nothing moves for those who want no motion; everything has a name."""
    opened.call(
        "Emulation.setEmulatedMedia",
        media="",
        features=[
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ],
    )
    ask(opened, "w1 w2 w3")
    opened.point(".card:last-child .token.judge")
    poor = opened.run(
        """(() => {
          const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
          const over = (colours) => { colours.forEach(c => { canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); });
            return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
          const light = rgb => { const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const behind = e => e ? [...behind(e.parentElement), getComputedStyle(e).backgroundColor] : [];
          return ['#server', '.bubble', '.card h2', '.card h2 small', '.figures', '.verdict', '.bar-row small', '.text .draft', '.text .judge', '.text .target',
                  '#legend small', '#settings label', '#hint dt', '#hint dd', '.actions button', '#send'].filter(s => {
            const e = document.querySelector(s), back = behind(e);
            const [a, b] = [light(over([...back, getComputedStyle(e).color])), light(over(back))];
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5; });
        })()"""
    )
    assert poor == []
    assert opened.run("getComputedStyle(document.querySelector('.text .token')).animationName") == "none"
    nameless = opened.run(
        "[...document.querySelectorAll('select, input, textarea, button')].filter(e => !(e.labels?.length"
        " || e.textContent.trim() || e.getAttribute('aria-label'))).map(e => e.outerHTML)"
    )
    assert nameless == []


def vllm_chunks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What vLLM streams: texts with the target's own log-probabilities, an end token without text, the finish."""
    off = json.loads(body.get("vllm_xargs", {}).get("selfjudge", "{}")).get("off", False)
    second = ("b", [("b", -0.1), ("c", -2.5)]) if off else (HOSTILE, [(HOSTILE, -2.0), ("b", -0.1)])
    for texts in ([("a", [("a", -0.2), ("x", -3.0)])], [second, (" d", [(" d", 0.0)])], [("<end>", [("<end>", 0.0)])]):
        content = [
            {"token": text, "logprob": top[0][1], "top_logprobs": [{"token": t, "logprob": p} for t, p in top]}
            for text, top in texts
        ]
        shown = "".join(text for text, _ in texts if text != "<end>")
        finish = "stop" if texts[0][0] == "<end>" else None
        choice = {"index": 0, "delta": {"content": shown}, "logprobs": {"content": content}, "finish_reason": finish}
        yield {"choices": [choice]}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that answers as vLLM's does, with our middleware in front."""
    recipe = {"name": HOSTILE, "finding": "margin (γ = 5): certified ≤ 3.", "claim": "On prompts like these."}
    facts = {"backend": "vllm", "rule": "judged", "theta": None, "price": None, "gamma": 5, "judge": True}
    monkeypatch.setenv(FACTS, json.dumps({**facts, "recipe": recipe}))
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [{"id": HOSTILE}]})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        if "vllm_xargs" in body:  # the server's own rule is asked for by saying nothing
            asked = json.loads(body["vllm_xargs"]["selfjudge"])
            assert asked
            assert "gamma" not in asked

        async def events() -> AsyncIterator[str]:
            for chunk in vllm_chunks(body):
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    app.add_middleware(Playground)
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=lambda: running.run(sockets=[listener]), daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.should_exit = True
    thread.join(20)


def test_before_vllm(browser: Browser, vllm: str) -> None:
    """Judged tokens are those below the target's likeliest; what vLLM cannot say is named; hostile text is text."""
    visit(browser, vllm)
    assert HOSTILE in browser.run("document.getElementById('server').textContent")
    assert browser.run("document.getElementById('recipe-finding').textContent").endswith("certified ≤ 3.")
    assert "m" in browser.run("document.getElementById('missing').innerText")
    assert browser.run("document.getElementById('gamma').disabled")
    ask(browser, "w1")
    lossless, relaxed = cards(browser)
    assert (lossless["text"], relaxed["text"]) == ("ab d", f"a{HOSTILE} d")
    assert relaxed["origins"] == ["unknown", "judge", "unknown"]
    assert "judge" not in lossless["origins"]
    assert relaxed["parts"] == lossless["parts"] == 1
    assert "(m)" not in relaxed["figures"]
    assert browser.run("document.querySelectorAll('#chat img, #chat script, header img').length") == 0
    browser.point(".token.judge")
    found = hint(browser)
    assert (found["target’s choice"], found["judge’s score"]) == ("b, p 0.905", "not told by vLLM")
    copies = browser.run("[...document.querySelectorAll('.card')].map(node => python(cards.get(node)))")
    assert ["vllm_xargs" in copy for copy in copies] == [True, False]


@pytest.mark.slow
def test_before_vllm_tools_that_need_not_be_called_leave_the_rule(browser: Browser, vllm: str) -> None:
    """vLLM has a grammar only for calls that must be made."""
    visit(browser, vllm)
    browser.run("document.getElementById('tools').value = pretty(EXAMPLE_TOOLS)")
    for choice, names, note in (
        ("", ["Lossless", "Relaxed"], "A learned judge also accepts drafts"),
        ("one", ["Lossless"], "Under a schema or tools every rule verifies exactly."),
    ):
        browser.choose("#choice", choice)
        browser.run("document.getElementById('settings').dispatchEvent(new Event('input'))")
        assert browser.run("document.getElementById('rule-note').textContent").startswith(note)
        ask(browser, "w1")
        assert [card["name"] for card in cards(browser)] == names
    results = "requests([{role: 'tool', tool_call_id: '1', content: 'x'}]).map(({name}) => name)"
    assert browser.run(results) == ["Lossless", "Relaxed"]  # after a result the model may answer
