"""The playground as a chat, in a real browser: what is sent, what is kept, links, colours, tools and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from browser import CHROMIUM, Browser
from playground_page import ask, cards, visit
from servers import Server
from spelling import save_spellers

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine (Debian: apt-get install chromium)"
)
TEMPLATE = "{% if tools %}<tool_call> {% endif %}{% for m in messages %}{{ m['content'] }} {% endfor %}-"
CITY = {"type": "object", "properties": {"city": {"enum": ["rome", "oslo"]}}, "required": ["city"], "additionalProperties": False}  # fmt: skip
TOOLS = [{"name": "weather", "description": "the weather", "parameters": CITY}]


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], endless: list[str]) -> Server:
    return start(*endless, "--max-tokens", "2000", "--theta", "F", "--strict-start", "0")


@pytest.fixture(scope="module")
def speller(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    target, draft = save_spellers(tmp_path_factory.mktemp("spellers"), TEMPLATE)
    return start("--target", target, "--draft", draft, "--name", "tiny", "--gamma", "3", "--max-context", "500")


def watch(browser: Browser, server: Server) -> Browser:
    """The page, with a note of what it sends."""
    visit(browser, server.url)
    browser.run(
        "window.sent = []; window.real = fetch;"
        " window.fetch = (path, how) => { if (how.body) sent.push(JSON.parse(how.body)); return real(path, how); }; null"
    )
    return browser


@pytest.fixture
def opened(browser: Browser, server: Server) -> Browser:
    return watch(browser, server)


def put(browser: Browser, **values: Any) -> None:
    """Fill fields of the settings in."""
    for name, value in values.items():
        browser.run(f"document.getElementById('{name}').value = {json.dumps(str(value))}")
    browser.run("document.getElementById('settings').dispatchEvent(new Event('input'))")


def title(browser: Browser) -> list[str]:
    return browser.run("[...document.querySelectorAll('#chats li button:first-child')].map(e => e.textContent)")


def test_history_system_prompt_and_temperature_are_sent(opened: Browser) -> None:
    put(opened, system="be brief", temperature=0.7, compare="")
    ask(opened, "w1 w2", tokens=8)
    (first,) = cards(opened)
    put(opened, temperature=0)
    ask(opened, "w3", tokens=8)
    before, after = opened.run("sent")
    system, question = {"role": "system", "content": "be brief"}, {"role": "user", "content": "w1 w2"}
    assert (before["messages"], before["temperature"], before["max_tokens"]) == ([system, question], 0.7, 8)
    answer = {"role": "assistant", "content": first["text"]}
    assert after["messages"] == [system, question, answer, {"role": "user", "content": "w3"}]
    assert after["temperature"] == 0


def test_asking_again_replaces_the_last_answer(opened: Browser) -> None:
    put(opened, compare="")
    ask(opened, "w1", tokens=8)
    put(opened, rule="exact", length=12)
    opened.run("document.querySelector('.again').click()")
    opened.wait("state.running === null")
    assert opened.run("sent.map(body => body.messages.length)") == [1, 1]
    assert opened.run("document.querySelectorAll('.turn').length") == 1
    assert cards(opened)[0]["name"].startswith("Lossless")


def test_chats_of_the_tab_are_kept_until_they_are_deleted(opened: Browser, server: Server) -> None:
    ask(opened, "w1 w2", tokens=20)
    first = cards(opened)
    opened.run("document.getElementById('new').click()")
    assert opened.run("[document.querySelectorAll('.turn').length, document.getElementById('welcome').hidden]") == [0, False]  # fmt: skip
    ask(opened, "w5", tokens=8)
    assert title(opened) == ["w5", "w1 w2"]
    assert opened.run("sent.at(-1).messages.length") == 1  # a new chat knows nothing of the other
    watch(opened, server)
    assert title(opened) == ["w5", "w1 w2"]  # after a reload
    opened.run("document.querySelectorAll('#chats li button:first-child')[1].click()")
    assert cards(opened) == first
    opened.run("document.getElementById('length').value = 8; document.getElementById('question').focus()")
    ask(opened, "w6", tokens=8)
    assert [one["content"] for one in opened.run("sent.at(-1).messages")] == ["w1 w2", first[-1]["text"], "w6"]
    for _ in range(2):
        opened.run("document.querySelector('#chats [aria-label^=Delete]').click()")
    assert title(opened) == []
    assert opened.run("sessionStorage.getItem('selfjudge-chats')") == "[]"


def test_stop_cancels_on_the_server(opened: Browser, server: Server) -> None:
    """By the button, too; what was said stays, also for the next question."""
    before = server.metric("generations_total", finish="cancelled")
    put(opened, compare="")
    ask(opened, "w1", tokens=2000, wait=False)
    opened.wait("document.querySelectorAll('.card .token').length > 20")
    place = """(() => { const one = document.getElementById('{}'), {x, y, width, height} = one.getBoundingClientRect(),
      around = one.parentElement.getBoundingClientRect(); return [x - around.x, y - around.y, width, height]; })()"""
    where = opened.run(place.replace("{}", "stop"))
    opened.point("#stop", click=True)
    opened.wait("state.running === null")
    now = opened.run(place.replace("{}", "send"))
    assert now == pytest.approx(where, abs=1)  # in the composer, which a scroll bar that comes with the text may move
    server.wait_until_idle()
    assert server.metric("generations_total", finish="cancelled") == before + 1
    (card,) = cards(opened)
    assert (card["problem"], card["verdict"]) == ("stopped", "Not finished: its speed is not known.")
    ask(opened, "w2", tokens=8)
    assert opened.run("sent.at(-1).messages[1].content") == card["text"]


def test_a_busy_server_says_so_and_can_be_asked_again(opened: Browser) -> None:
    put(opened, compare="")
    opened.run(
        "window.fetch = async () => new Response(JSON.stringify({error: {message: 'too many requests wait'}}),"
        " {status: 429}); null"
    )
    ask(opened, "w1")
    assert cards(opened)[0]["problem"] == "too many requests wait"
    assert not opened.run("document.querySelector('.card .bar-row').checkVisibility()")
    opened.run("window.fetch = real; null")
    assert opened.run("document.querySelector('.again').textContent") == "Try again"
    opened.run("document.querySelector('.again').click()")
    opened.wait("state.running === null")
    assert cards(opened)[0]["problem"] is None


def test_a_link_restores_the_settings_and_never_holds_the_key(
    browser: Browser, start: Callable[..., Server], endless: list[str]
) -> None:
    server = start(*endless, SELFJUDGE_API_KEY="right-key")
    browser.open(f"{server.url}/")
    browser.wait("document.getElementById('key').open")
    browser.run("document.getElementById('key-input').value = 'right-key'")
    browser.run("document.querySelector('#key button').click()")
    browser.wait("state.model")
    browser.run(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async t => { window.copied = t; }}})"
    )
    tools = json.dumps(TOOLS)
    put(browser, rule="judged", gamma=5, system="be brief & <b>kind</b>", temperature=0.3, length=77, tools=tools)
    browser.run("document.querySelector('[value=quality]').click()")
    put(browser, amount=0.75, question="w1 #2 & more?")
    browser.run("document.getElementById('share').click()")
    link = browser.wait("window.copied")
    assert link.startswith(f"{server.url}/#")
    assert "right-key" not in link
    before = browser.run("[describeSettings(document.getElementById('question').value), JSON.stringify(chosen())]")
    browser.run("sessionStorage.removeItem('selfjudge-settings')")
    browser.open("about:blank")
    browser.open(link)
    browser.wait("state.model")
    assert browser.run("[describeSettings(document.getElementById('question').value), JSON.stringify(chosen())]") == before  # fmt: skip
    assert json.loads(before[1]) == {"rule": "judged", "quality": 0.75, "gamma": 5}
    assert browser.run("document.querySelectorAll('.turn').length") == 0  # nothing is sent by following a link
    assert browser.run("document.getElementById('tools-group').open")
    assert not any("%22" in url or "brief" in url for url in (url.split("#")[0] for url in browser.requests))
    browser.run(
        "location.hash = 'rule=exact&gamma=99&compare=%3Cscript%3E&measure=none'"
    )  # what is no option is left out
    browser.wait("document.getElementById('rule').value === 'exact'")
    assert browser.run("document.getElementById('gamma').value") == "5"
    assert all("401" in line for line in browser.complaints)
    browser.complaints.clear()


def test_dark_mode_follows_the_system_and_the_switch(opened: Browser, server: Server) -> None:
    def wait_for(dark: bool) -> None:
        opened.wait(f"document.getElementById('theme').getAttribute('aria-pressed') === '{json.dumps(dark)}'")
        paper = opened.run("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(20, 23, 27)") is dark

    wait_for(dark=False)
    opened.media("", "dark")
    wait_for(dark=True)
    opened.point("#theme", click=True)
    wait_for(dark=False)
    visit(opened, server.url)
    wait_for(dark=False)  # the switch's word stands
    opened.point("#theme", click=True)
    wait_for(dark=True)
    opened.media("", "light")  # back with the system, it follows it again
    wait_for(dark=False)


def test_tools_are_called_and_their_results_sent(browser: Browser, speller: Server) -> None:
    opened = watch(browser, speller)
    put(opened, tools=json.dumps(TOOLS), choice="one")
    ask(opened, "weather?", tokens=200)
    assert opened.run("sent[0].tools") == [{"type": "function", "function": TOOLS[0]}]
    assert (opened.run("sent[0].tool_choice"), opened.run("sent[0].parallel_tool_calls")) == ("required", False)
    (call,) = opened.run("state.chat.turns[0].cards.at(-1).calls")
    assert opened.run("document.querySelector('.call h3').textContent") == call["function"]["name"] == "weather"
    shown = json.loads(opened.run("document.querySelector('.call pre').textContent"))
    assert shown == json.loads(call["function"]["arguments"])
    assert shown["city"] in ("rome", "oslo")
    assert "<tool_call>" in cards(opened)[0]["text"]  # and how it was decoded, token by token
    opened.run("document.querySelector('.results input').focus()")
    opened.run("document.querySelector('.results input').value = '20 degrees'")
    opened.press("Enter")
    opened.wait("state.running === null && sent.length === 2")
    again = opened.run("sent[1]")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "20 degrees"}
    assert again["messages"][1:] == [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert "tool_choice" not in again  # it may answer now
    assert cards(opened)[0]["problem"] is None
    assert opened.run("document.querySelectorAll('.results').length") == opened.run("sent.length") - 2 + bool(
        opened.run("state.chat.turns[1].cards[0].calls.length && !state.chat.turns[1].cards[0].cutOff")
    )


@pytest.mark.slow
def test_a_call_without_a_result_says_so(browser: Browser, speller: Server) -> None:
    opened = watch(browser, speller)
    put(opened, tools=json.dumps(TOOLS), choice="one")
    ask(opened, "weather?", tokens=200)
    (call,) = opened.run("state.chat.turns[0].cards.at(-1).calls")
    ask(opened, "or not", tokens=60)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "no result"}
    assert opened.run("sent[1].messages").pop(2) == result
    assert cards(opened)[0]["problem"] is None


def test_json_by_a_schema(browser: Browser, speller: Server) -> None:
    opened = watch(browser, speller)
    put(opened, format="json_schema")
    assert json.loads(opened.run("document.getElementById('schema').value"))["type"] == "object"  # an example
    put(opened, schema='{"type": ')
    ask(opened, "city?")
    assert opened.run("sent.length") == 0  # what is no JSON is not sent, and the page says where it is
    assert opened.run("document.getElementById('schema').getAttribute('aria-invalid')") == "true"
    opened.run("document.getElementById('question').focus()")
    put(opened)
    assert "JSON" in opened.run("document.getElementById('schema-problem').textContent")
    assert opened.run("document.getElementById('schema-problem').checkVisibility()")
    put(opened, schema=json.dumps(CITY))
    ask(opened, "city?", tokens=200)
    assert opened.run("sent[0].response_format.json_schema") == {"name": "answer", "schema": CITY, "strict": True}
    assert json.loads(cards(opened)[0]["text"])["city"] in ("rome", "oslo")


@pytest.mark.slow
def test_the_hint_covers_no_figures(opened: Browser) -> None:
    """At any token, in two widths."""
    for width in (390, 1280):
        opened.size(width, 800)
        opened.run("document.getElementById('new').click()")
        ask(opened, "w1 w2 w3", tokens=60)
        covered = opened.run(
            """[...document.querySelectorAll('.card .token')].filter(cell => {
              cell.scrollIntoView({block: 'center', behavior: 'instant'}); cell.focus({preventScroll: true});
              const hint = document.getElementById('hint').getBoundingClientRect();
              return [...document.querySelectorAll('.measures')].map(e => e.getBoundingClientRect()).some(box =>
                hint.left < box.right && hint.right > box.left && hint.top < box.bottom && hint.bottom > box.top); }).length"""
        )
        assert covered == 0


@pytest.mark.slow
def test_nothing_above_moves_while_an_answer_grows(opened: Browser) -> None:
    put(opened, compare="")
    ask(opened, "w1 w2", tokens=120, wait=False)
    opened.wait("document.querySelectorAll('.card .token').length > 3")
    where = "(e => [e.getBoundingClientRect().top, e.getBoundingClientRect().left])(document.querySelector('{}'))"
    parts = (".bubble", ".card h2", ".token", "#ask")
    before = [opened.run(where.replace("{}", part)) for part in parts]
    opened.wait("state.running === null")
    assert [opened.run(where.replace("{}", part)) for part in parts] == before


@pytest.mark.slow
def test_accepted_drafts_stand_out_more_than_the_targets_own(opened: Browser) -> None:
    ask(opened, "w1 w2 w3")
    draft, own = opened.run(
        "['draft', 'target'].map(o => getComputedStyle(document.querySelector('.text .' + o)))"
        ".map(s => [s.backgroundColor, s.color])"
    )
    ink = opened.run("getComputedStyle(document.body).color")
    assert draft[1] == ink != own[1]
    assert draft[0] != own[0] == "rgba(0, 0, 0, 0)"


def test_examples_bring_their_settings(opened: Browser) -> None:
    opened.run("document.getElementById('length').value = 8")
    opened.run("document.querySelector('#examples [data-compare]').click()")
    opened.wait("state.running === null && document.querySelectorAll('.card').length === 2")
    assert cards(opened)[0]["name"].startswith("Plain decoding")
    assert opened.run("document.getElementById('question').value") == ""
