"""Record docs/playground.webp: the playground of a real server, in a headless Chromium, while it answers.

    python docs/make_playground.py docs/playground.webp

A frame is taken whenever tokens have come, and shown for a fixed time: the picture says how many tokens come at once, not how fast.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "tests"))
if TYPE_CHECKING:
    from browser import Browser

SIZE, FRAME, LAST = (940, 860), 200, 3500
"""Pixels of the page, and milliseconds of a frame and of the last one."""
COUNT = "document.querySelectorAll('.card .token').length"


def wait_for_server(url: str, process: subprocess.Popen[bytes]) -> None:
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()  # noqa: S310
            return
        except OSError:
            if process.poll() is not None:
                raise SystemExit("the server ended") from None
            time.sleep(0.5)


def record(browser: Browser, question: str, tokens: int) -> list[Image.Image]:
    """The page as the question stands there and as both answers come: plain decoding, and `exact` beside it.

    It ends with the first answer, before the page says how fast it was, which is a matter of the machine.
    """
    frames: list[Image.Image] = []

    def take() -> None:
        with tempfile.NamedTemporaryFile(suffix=".png") as file:
            browser.screenshot(Path(file.name))
            frames.append(Image.open(io.BytesIO(Path(file.name).read_bytes())).convert("RGB"))

    browser.choose("#compare", "plain")
    browser.run(f"document.getElementById('length').value = {tokens}")
    browser.run(f"document.getElementById('question').value = {json.dumps(question)}")
    browser.run("document.getElementById('question').focus()")
    take()
    browser.press("Enter")
    shown = 0
    while browser.run("[...document.querySelectorAll('.card')].every(card => card.hasAttribute('aria-busy'))"):
        if (now := browser.run(COUNT)) > shown + 2:
            take()
            shown = now
        time.sleep(0.05)
    return frames


def main() -> None:
    from browser import Browser

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("out", type=Path)
    options.add_argument("--question", default="Why do leaves change colour in autumn?")
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--port", type=int, default=8765)
    options.add_argument("--serve", nargs="*", default=[], help="further options of `selfjudge serve`")
    given = options.parse_args()
    url = f"http://127.0.0.1:{given.port}"
    server = subprocess.Popen([sys.executable, "-m", "selfjudge", "serve", "--port", str(given.port), *given.serve])
    try:
        wait_for_server(url, server)
        with tempfile.TemporaryDirectory() as profile:
            browser = Browser(Path(profile))
            try:
                browser.open(url, *SIZE)
                browser.wait("state.model")
                frames = record(browser, given.question, given.tokens)
            finally:
                browser.close()
    finally:
        server.terminate()
        server.wait(30)
    times = [FRAME] * (len(frames) - 1) + [LAST]
    frames[0].save(given.out, save_all=True, append_images=frames[1:], duration=times, loop=0, quality=45, method=4)
    print(f"{len(frames)} frames, {given.out.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
