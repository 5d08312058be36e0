"""Headless Chromium by its DevTools protocol over two pipes: the standard library is all it needs."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PATIENCE = 180
"""Seconds until a browser that says nothing counts as broken."""
KEYS = {
    "ArrowRight": 39,
    "ArrowLeft": 37,
    "ArrowDown": 40,
    "ArrowUp": 38,
    "Home": 36,
    "End": 35,
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
}


class Browser:
    """One page of one browser. What the page logs or throws is collected in `complaints`."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe", f"--user-data-dir={profile}"]  # fmt: skip

        def pipes() -> None:  # the browser reads from 3 and writes to 4
            reading, writing = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *flags, "about:blank"], close_fds=False, preexec_fn=pipes, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest, self._number, self._session = b"", 0, None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.loaded = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self._number += 1
        message = {
            "id": self._number,
            "method": method,
            "params": parameters,
            **({"sessionId": self._session} if self._session else {}),
        }
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            got = self._next()
            if got.get("id") == self._number:
                assert "error" not in got, (method, got)
                return got["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], PATIENCE)[0], "the browser does not answer"
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser has gone"
            self._rest += piece
        whole, _, self._rest = self._rest.partition(b"\0")
        got = json.loads(whole)
        said = got.get("params", {})
        match got.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if said["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(said["args"]))
            case "Log.entryAdded" if said["entry"]["level"] in ("error", "warning"):
                self.complaints.append(said["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(said["request"]["url"])
            case "Page.loadEventFired":
                self.loaded += 1
        return got

    def open(self, page: Path | str, width: int = 1200, height: int = 900) -> None:
        self.size(width, height)
        before = self.loaded
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while self.loaded == before:
            self._next()

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, kind: str = "", scheme: str = "light") -> None:
        """Screen or print, and the colours the reader prefers."""
        self.call(
            "Emulation.setEmulatedMedia", media=kind, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The value of an expression as soon as it is true."""
        deadline = time.monotonic() + PATIENCE
        while not (value := self.run(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.02)
        return value

    def press(self, key: str) -> None:
        """A real key, to whatever has the focus."""
        plain = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0].upper()))}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **plain)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def point(self, selector: str, click: bool = False) -> None:
        """Move the mouse onto the middle of an element."""
        where = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center', behavior: 'instant'}});"
            " const r = e.getClientRects()[0]; return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased") if click else ("mouseMoved",):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], **button)

    def choose(self, selector: str, value: str) -> None:
        """Pick an option of a select, as a user's choice would."""
        self.run(
            f"(() => {{ const s = document.querySelector({json.dumps(selector)}); s.value = {json.dumps(value)};"
            " s.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def screenshot(self, file: Path, whole: bool = False) -> None:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))

    def pdf(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))

    def close(self) -> None:
        self._session = None
        os.write(self._out, b'{"id": 0, "method": "Browser.close"}\0')
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)


class Page(HTMLParser):
    """Collects what a browser would act upon."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, *pair) for pair in attrs]
