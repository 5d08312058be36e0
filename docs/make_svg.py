"""Draw docs/generate.svg, what `selfjudge generate --color` shows, from a run that is made for it.

    python docs/make_svg.py > docs/generate.svg

Every target pass appears at once, evenly over `SECONDS`: the picture says how many tokens a pass gives, not how fast it was.
"""

from __future__ import annotations

import argparse
from html import escape

COLUMNS, LINE, WIDTH = 98, 22, 8.43
"""Characters of a line, its height, and the width of a character."""
SECONDS = 9.0
STYLE = """
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; fill: #1f2328 }
.draft { fill: #1a7f37 } text.judge { fill: #1f2328 } rect.judge { fill: #f2cc60 } rect.page { fill: #f6f8fa } .small { font-size: 12px; fill: #59636e }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .draft { fill: #56d364 } rect.page { fill: #161b22 } .small { fill: #9198a1 } }
@media (prefers-reduced-motion: no-preference) { .pass { opacity: 0; animation: show .1s linear forwards } }
@keyframes show { to { opacity: 1 } }
"""
Piece = tuple[str, str]
"""Text and origin."""


def passes(pieces: list[Piece]) -> list[list[Piece]]:
    """The pieces of each target pass: it ends with a token of the target's own."""
    grouped: list[list[Piece]] = [[]]
    for text, origin in pieces:
        grouped[-1].append((text, origin))
        if origin == "target":
            grouped.append([])
    return [group for group in grouped if group]


def draw(prompt: str, pieces: list[Piece], caption: str) -> str:
    """The picture; still where motion is not wanted."""
    x, y, groups = 0, 3, []
    grouped = passes(pieces)
    for number, group in enumerate(grouped):
        marks = []
        for text, origin in group:
            for part in _runs(text):
                wraps = x + len(part) > COLUMNS
                if part == "\n" or wraps:
                    x, y = 0, y + 1
                part = part.strip("\n") if not wraps else part.strip()  # a line of its own keeps its indentation
                at, below = 20 + x * WIDTH, y * LINE
                if origin == "judge":
                    box = f'x="{at:.1f}" y="{below - 15}" width="{len(part) * WIDTH:.1f}" height="20" rx="3"'
                    marks.append(f'<rect class="judge" {box}/>')
                marks.append(f'<text class="{origin}" x="{at:.1f}" y="{below}">{escape(part)}</text>')
                x += len(part)
        delay = 0.6 + SECONDS * number / len(grouped)
        groups.append(f'<g class="pass" style="animation-delay:{delay:.2f}s">{"".join(marks)}</g>')
    width, height = round(40 + COLUMNS * WIDTH), (y + 3) * LINE
    relaxed = any(origin == "judge" for _, origin in pieces)
    judged = "black on yellow: accepted against the target's choice · " if relaxed else ""
    legend = f"green: drafted, a pass saved · {judged}plain: written by the target itself"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(caption)}">',
            f'<style>{STYLE}</style><rect class="page" width="{width}" height="{height}" rx="8"/>',
            f'<text x="20" y="{LINE + 4}">$ {escape(prompt)}</text>',
            *groups,
            f'<text class="small" x="20" y="{height - 30}">{escape(legend)}</text>',
            f'<text class="small" x="20" y="{height - 12}">{escape(caption)}</text></svg>',
        ]
    )


def _runs(text: str) -> list[str]:
    """A text cut at its line breaks, which stand alone."""
    lines = text.split("\n")
    return [part for i, line in enumerate(lines) for part in (["\n"] if i else []) + ([line] if line else [])]


def main() -> None:
    from selfjudge import Pair, stream

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pair", default="qwen2.5-coder-1.5b")
    options.add_argument("--prompt", default="Why do leaves change colour in autumn?")
    options.add_argument("--quality", type=float, help="relax by the judge, instead of `exact`")
    options.add_argument("--gamma", type=int, default=5)
    options.add_argument("--max-new-tokens", type=int, default=150)
    given = options.parse_args()
    pair = Pair.load(given.pair)
    rule = {"rule": "exact"} if given.quality is None else {"rule": "judged", "quality": given.quality}
    answer = stream(pair, given.prompt, gamma=given.gamma, max_new_tokens=given.max_new_tokens, **rule)
    pieces = [(piece.text, piece.origin) for piece in answer]
    made = answer.generation
    relaxed = "" if given.quality is None else f" --quality {given.quality}"
    command = f'selfjudge generate "{given.prompt}"{relaxed} --gamma {given.gamma} --color'
    cost = f"{len(made.judged_tokens)} tokens against the target's choice" if relaxed else "the words of plain decoding"
    passes = f"{len(made.tokens)} tokens from {made.cycles} passes of the target after the prompt's"
    print(draw(command, pieces, f"{pair.name}, {pair.dtype}: {passes}; {cost}"))


if __name__ == "__main__":
    main()
