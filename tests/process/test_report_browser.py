"""The report in a real browser: it loads in silence, filters, and its viewer answers to mouse and keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import CHROMIUM, Browser
from fake_certificate import certificate, example
from fake_eval import HOSTILE, demo_result, write_eval
from selfjudge.report.certificate import certificate_page
from selfjudge.report.demo import demo_page
from selfjudge.report.page import report

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    report([write_eval(folder / "eval", ("gsm8k", "mmlu", "arithmetic"), n=12)], folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture
def opened(browser: Browser, page: Path) -> Iterator[Browser]:
    """The page, freshly loaded; afterwards it must not have complained, loaded anything or been taken over."""
    browser.complaints.clear()
    browser.requests.clear()
    browser.media("", "light")
    browser.open(page)
    browser.run("localStorage.clear()")
    browser.run("document.querySelectorAll('.fold').forEach(fold => { fold.open = true; })")
    yield browser
    assert browser.run("window.hacked") is None
    assert browser.complaints == []
    assert [url for url in browser.requests if url != page.as_uri()] == []


def visible_rows(browser: Browser) -> list[dict[str, Any]]:
    return browser.run(
        "[...document.querySelectorAll('tr[data-row]')].filter(r => r.offsetParent !== null).map(r => ({task: r.dataset.task, rule: r.dataset.rule, method: r.dataset.method}))"
    )


def details(browser: Browser) -> dict[str, str]:
    return browser.run(
        "Object.fromEntries([['title', document.querySelector('#details h3').textContent], ...[...document.querySelectorAll('#details dt')].map(t => [t.textContent, t.nextElementSibling.textContent])])"
    )


def data(browser: Browser) -> list[dict[str, Any]]:
    return json.loads(browser.run("document.getElementById('data').textContent"))["runs"]


def shown(browser: Browser) -> dict[str, Any]:
    """The example in the viewer, as the data has it."""
    run, example = browser.run(
        "[document.getElementById('pick-rule').value, document.getElementById('pick-example').value].map(Number)"
    )
    return data(browser)[run]["examples"][example]


def test_the_filter_hides_other_rows_and_charts(opened: Browser) -> None:
    everything = visible_rows(opened)
    assert len({r.get("task") for r in everything}) > 3
    opened.choose("#filter-task", "mmlu")
    rows = visible_rows(opened)
    assert 0 < len(rows) < len(everything)
    assert {r["task"] for r in rows if r.get("task")} == {"mmlu"}
    assert opened.run(
        "[...document.querySelectorAll('#trade-off figure')].filter(f => f.offsetParent).map(f => f.dataset.task)"
    ) == ["mmlu"]
    assert opened.run("document.getElementById('filter-said').textContent") == f"{len(rows)} of {len(everything)} rows"
    opened.choose("#filter-rule", "m:judged@selfjudge")
    assert {r["method"] for r in visible_rows(opened) if r.get("rule")} == {"judged@selfjudge"}
    opened.choose("#filter-rule", "r:judged:F@selfjudge")
    assert {r["rule"] for r in visible_rows(opened) if r.get("rule")} == {"judged:F@selfjudge"}
    assert (
        opened.run("document.getElementById('task-gsm8k-table').offsetParent") is None
    )  # a table without rows is not shown
    opened.point("#filter-clear", click=True)
    assert len(visible_rows(opened)) == len(everything)


def test_the_first_screen_is_the_verdict(opened: Browser, page: Path) -> None:
    """All else is folded, opens where a link leads, and is there on paper."""
    opened.open(page, 1200, 900)
    folds = "[...document.querySelectorAll('.fold')].map(f => f.open)"
    assert not any(opened.run(folds))
    assert opened.run("document.querySelectorAll('.verdict p').length") == 2  # so few prompts that no loss is judged
    assert "prompts are scored" in opened.run("document.querySelector('#verdict .warning').textContent")
    assert opened.run("document.querySelector('#verdict figure').getBoundingClientRect().bottom") < 900
    opened.point("nav a[href='#task']", click=True)
    opened.wait("document.querySelector('#task .fold').open")
    assert opened.run(folds).count(True) == 1
    opened.run("dispatchEvent(new Event('beforeprint'))")
    assert all(opened.run(folds))


def test_an_answer_stands_beside_that_of_exact(opened: Browser) -> None:
    example = shown(opened)
    group = opened.run("document.getElementById('pick-task').value")
    (exact,) = [r for r in data(opened) if r["group"] == group and r["name"] == "exact, γ = 10"]
    same = next(e for e in exact["examples"] if e["id"] == example["id"])
    assert opened.run("document.getElementById('exact-tokens').textContent") == "".join(t[0] for t in same["tokens"])
    value = opened.run(
        "[...document.getElementById('pick-rule').options].find(o => o.textContent.startsWith('exact')).value"
    )
    opened.choose("#pick-rule", value)
    assert opened.run("document.getElementById('beside').hidden")


def test_pointing_at_a_token_shows_its_details(opened: Browser) -> None:
    tokens = shown(opened)["tokens"]
    chosen = next(i for i, t in enumerate(tokens) if t[1] == "judge" and t[0].strip())
    opened.point(f".token[data-i='{chosen}']")
    text, _, choice, p, best, judge, cycle = tokens[chosen]
    assert details(opened) == {
        "title": f"Token {chosen + 1} of {len(tokens)}", "token": text.replace(" ", "␣"), "origin": "draft, accepted against the target's choice",
        "target's choice": json.dumps(choice, ensure_ascii=False)[1:-1].replace('\\"', '"').replace(" ", "␣"),
        "p of the token": f"{p:.3f}", "p of the choice": f"{best:.3f}", "judge's score": f"{judge:.3f}", "cycle": str(cycle),
    }  # fmt: skip
    together = opened.run("[...document.querySelectorAll('.token.together')].map(t => Number(t.dataset.i))")
    assert together == [i for i, t in enumerate(tokens) if t[6] == cycle]


def test_the_keyboard_alone_is_enough(opened: Browser) -> None:
    """Tab from the example's select leads to the tokens, arrows walk them, n and p jump between judged ones."""
    tokens = shown(opened)["tokens"]
    opened.run("document.getElementById('pick-example').focus()")
    for _ in range(6):
        opened.press("Tab")
        if opened.run("document.activeElement.classList.contains('token')"):
            break
    here = "Number(document.activeElement.dataset.i)"
    assert opened.run(here) == 0
    assert opened.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    opened.press("ArrowRight")
    opened.press("ArrowRight")
    assert opened.run(here) == 2
    assert details(opened)["title"] == f"Token 3 of {len(tokens)}"
    opened.press("ArrowLeft")
    assert opened.run(here) == 1
    judged = [i for i, t in enumerate(tokens) if t[1] == "judge"]
    assert len(judged) > 2
    opened.press("Home")
    opened.press("n")
    first = opened.run(here)
    assert first == next(i for i in judged if i > 0)
    opened.press("n")
    opened.press("p")
    assert opened.run(here) == first
    opened.press("End")
    assert opened.run(here) == len(tokens) - 1
    opened.press("ArrowRight")
    assert opened.run(here) == len(tokens) - 1
    top = "document.activeElement.getClientRects()[0].top"
    before = opened.run(top)
    opened.press("ArrowUp")
    assert opened.run(top) < before or opened.run(here) < len(tokens) - 1
    above = opened.run(here)
    opened.press("ArrowDown")
    assert opened.run(here) > above
    assert opened.run("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1  # one stop in the tab order
    assert opened.run("document.querySelectorAll('.token[aria-selected=true]').length") == 1


def test_task_rule_and_example_can_be_picked(opened: Browser) -> None:
    opened.choose("#pick-task", "arithmetic")
    rules = opened.run("[...document.getElementById('pick-rule').options].map(o => o.textContent)")
    assert "exact, γ = 10" in rules
    assert "judged:F@selfjudge, γ = 10" in rules
    opened.choose("#pick-example", "2")
    before = shown(opened)["id"]
    value = opened.run(
        "[...document.getElementById('pick-rule').options].find(o => o.textContent.startsWith('exact')).value"
    )
    opened.choose("#pick-rule", value)
    assert shown(opened)["id"] == before  # the same example under another rule
    said = "".join(t[0] for t in shown(opened)["tokens"])
    drawn = opened.run("document.getElementById('tokens').textContent")
    assert drawn.replace("⏎", "").replace("∅", "") == said
    assert opened.run("document.querySelectorAll('.token.judge[data-i]').length") == 0


def test_hostile_answers_are_text(opened: Browser) -> None:
    opened.choose("#pick-example", "3")
    assert shown(opened)["id"] == HOSTILE[1]
    assert opened.run("document.getElementById('prompt').textContent") == HOSTILE[0]
    assert opened.run("document.querySelector('.token[data-i=\"0\"]').textContent") == HOSTILE[0]
    assert opened.run("document.querySelectorAll('#token-viewer img, #token-viewer script').length") == 0
    opened.point(".token[data-i='1']")
    assert details(opened)["token"].startswith("<img␣src=x␣onerror=")


def test_light_dark_and_the_toggle(opened: Browser) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    line = "getComputedStyle(document.querySelector('.chart [id*=marks] path')).stroke"
    light = opened.run(paper), opened.run(line)
    opened.media("", "dark")
    dark = opened.run(paper), opened.run(line)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    opened.point("#theme", click=True)  # auto → light
    assert (opened.run(paper), opened.run("document.getElementById('theme').textContent")) == (light[0], "Theme: light")
    opened.press("Enter")  # it has the focus: light → dark
    opened.media("", "light")
    assert opened.run(paper) == dark[0]
    opened.media("print", "dark")  # paper is white whatever is chosen
    assert opened.run(line) == light[1]
    assert opened.run("getComputedStyle(document.querySelector('nav')).display") == "none"


@pytest.mark.quick("390")
@pytest.mark.parametrize("width", [390, 768, 1400])
def test_no_width_makes_the_page_scroll_sideways(opened: Browser, width: int) -> None:
    opened.size(width, 800)
    assert opened.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_everything_that_can_be_used_has_a_name(opened: Browser) -> None:
    nameless = opened.run(
        "[...document.querySelectorAll('select, button, [role=region], [role=listbox], [role=img], section, nav')]"
        ".filter(e => !(e.labels?.length || e.textContent.trim() && e.tagName === 'BUTTON' || e.getAttribute('aria-label')"
        " || (e.getAttribute('aria-labelledby') || '').split(' ').some(i => document.getElementById(i)?.textContent))).map(e => e.outerHTML.slice(0, 80))"
    )
    assert nameless == []
    assert opened.run(
        "[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.getAttribute('href')))"
    )


@pytest.mark.quick("light")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_told_from_what_is_behind_it(opened: Browser, scheme: str) -> None:
    """Contrast of 4.5 : 1 (WCAG AA) for text, and on the tints of tokens."""
    opened.media("", scheme)
    found = opened.run(
        """(() => {
          const lum = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c) && c !== 'transparent') return c; } };
          return ['p', '.lead', 'td', 'td small', 'thead th', '.note', 'a', '.token.judge', '.token.target', '.token.draft', '#details dt', 'button'].map(s => {
            const e = document.querySelector(s); const [a, b] = [lum(getComputedStyle(e).color), lum(behind(e))];
            return [s, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]; });
        })()"""
    )
    assert [s for s, ratio in found if ratio < 4.5] == []


@pytest.mark.quick("light")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_demo_page(browser: Browser, tmp_path: Path, scheme: str) -> None:
    """Tokens are coloured by origin, and one shows what the target wanted when it is pointed at or focused."""
    result, page = demo_result(), tmp_path / "demo.html"
    result["rows"][0]["tokens"] *= 200 // len(result["rows"][0]["tokens"]) + 1  # as long as a real answer
    page.write_text(demo_page(result), encoding="utf-8")
    browser.complaints.clear()
    browser.media("", scheme)
    browser.open(page, 390)
    boxes = "[...document.querySelectorAll('.marked')]"
    assert browser.run(f"{boxes}.every(e => e.scrollHeight <= e.clientHeight + 2)")  # no answer runs over the next
    judged = "[...document.querySelectorAll('.marked')].at(-1).querySelectorAll('.token.judge')"
    tokens = result["rows"][-1]["tokens"]
    assert browser.run(f"{judged}.length") == sum(token["origin"] == "judge" for token in tokens)
    paper = "getComputedStyle(document.body).backgroundColor"
    assert browser.run(f"getComputedStyle({judged}[0]).backgroundColor") != browser.run(paper)
    wanted = f"getComputedStyle({judged}[0], '::after').content"
    assert browser.run(wanted) == "none"
    browser.run(f"{judged}[0].focus()")
    assert browser.run(wanted) == '"target wanted “␣grass” (p 0.62); judge’s score 0.81"'
    assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    shown = browser.run("[...document.querySelectorAll('.marked')].at(-1).textContent")
    assert shown == "".join(token["text"] for token in tokens).replace("\ud800", "?").replace("\x00", "")
    assert browser.run("window.hacked") is None
    assert browser.complaints == []


def test_what_the_demo_gained_stands_out(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    page.write_text(demo_page({"rows": []}), encoding="utf-8")
    browser.open(page)
    assert browser.run("document.querySelector('.lead .finding').textContent").startswith("The demo was stopped")
    weights = "['.lead .finding', '.lead'].map(s => Number(getComputedStyle(document.querySelector(s)).fontWeight))"
    strong, usual = browser.run(weights)
    assert strong > usual


@pytest.mark.quick("light")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_certificate(browser: Browser, tmp_path: Path, scheme: str) -> None:
    """It loads in silence, shows both answers beside each other, and says what the target wanted."""
    page = tmp_path / "certificate.html"
    page.write_text(certificate_page(certificate(), [example(), *map(example, HOSTILE)]), encoding="utf-8")
    browser.complaints.clear()
    browser.requests.clear()
    browser.media("", scheme)
    browser.open(page)
    tried = [row for row in certificate()["candidates"] if row["n_used"]]
    assert browser.run("document.querySelectorAll('#rules tbody tr').length") == len(tried)
    assert browser.run("document.querySelector('#rules .untried summary').textContent") == "1 rule was not tried"
    assert "topk:5" in browser.run("document.querySelector('#rules .untried p').textContent")
    assert browser.run("document.querySelector('#evidence svg path') !== null")
    boxes = browser.run("[...document.querySelectorAll('.beside')[0].children].map(e => e.getBoundingClientRect().top)")
    assert len(boxes) == 2
    assert boxes[0] == boxes[1]
    assert "compared with exact on 4,000 prompts" in browser.run("document.querySelector('.lead').textContent")
    assert "19 times out of 20" in browser.run("document.querySelector('#verdict .finding').textContent")
    assert "certified ≤ 3" in browser.run("document.querySelector('#verdict').textContent")
    assert browser.run("document.querySelectorAll('pre.commands').length") == 1
    browser.point(".beside .token.judge")
    shown = browser.run("getComputedStyle(document.querySelector('.beside .token.judge'), '::after').content")
    assert "five" in shown
    browser.size(360, 800)
    assert browser.run("document.documentElement.scrollWidth <= 360")
    assert browser.run("window.hacked") is None
    assert browser.complaints == []
    assert [url for url in browser.requests if url != page.as_uri()] == []
