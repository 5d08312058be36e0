"""The playground as its user meets it: open it, ask, look at the answers."""

from __future__ import annotations

import json
from typing import Any

from browser import Browser


def visit(browser: Browser, url: str, width: int = 1280) -> Browser:
    browser.open(f"{url}/", width)
    browser.wait("document.getElementById('server').textContent !== 'connecting …'")
    browser.run(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async t => { window.copied = t; }}})"
    )
    return browser


def ask(browser: Browser, question: str, *, tokens: int = 40, wait: bool = True) -> None:
    """As a user would: type, Enter, and look until the answers are there."""
    browser.run(f"document.getElementById('length').value = {tokens}")
    browser.run(f"document.getElementById('question').value = {json.dumps(question)}")
    browser.run("document.getElementById('question').focus()")
    browser.press("Enter")
    if wait:
        browser.wait("state.running === null")


def cards(browser: Browser) -> list[dict[str, Any]]:
    """The answers of the last turn, as the page shows them."""
    return browser.run(
        """[...document.querySelector('.turn:last-child').querySelectorAll('.card')].map(card => ({
          name: card.querySelector('h2').textContent, figures: card.querySelector('.figures').textContent,
          verdict: card.querySelector('.verdict').textContent,
          text: card.querySelector('.text').textContent, busy: card.getAttribute('aria-busy'),
          origins: [...card.querySelectorAll('.token')].map(t => t.classList[1]),
          parts: [...card.querySelectorAll('.token')].findIndex(t => t.classList.contains('parts')),
          problem: card.querySelector(':is(.error, .stopped):not([hidden])')?.textContent ?? null }))"""
    )


def hint(browser: Browser) -> dict[str, str]:
    return browser.run(
        "Object.fromEntries([['about', document.querySelector('#hint p').textContent],"
        " ...[...document.querySelectorAll('#hint dt')].map(t => [t.textContent, t.nextElementSibling.textContent])])"
    )
