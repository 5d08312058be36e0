"""What the layout promises: a class name means one thing, a file has one idea, and the whole stays readable."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "selfjudge"
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def test_a_class_name_is_defined_in_one_module() -> None:
    places = defaultdict(set)
    for file in FILES:
        for node in parse(file).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].add(str(file.relative_to(SOURCE)))
    assert not {name: sorted(files) for name, files in places.items() if len(files) > 1}


def test_no_file_is_longer_than_an_idea() -> None:
    lengths = {str(file.relative_to(SOURCE)): len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert not {name: n for name, n in lengths.items() if n > 500 and "kernels" not in name}
    assert sum(lengths.values()) < 30_000


def count_branches(function: ast.AST) -> int:
    """How many ways lead through a function: conditions, loops, handlers, comprehensions, `and` and `or`."""
    ways = 0
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            ways += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            ways += 1 + len(node.ifs)
        else:
            ways += isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.IfExp | ast.ExceptHandler)
    return ways


def test_no_function_has_more_than_15_branches() -> None:
    found = {}
    for file in FILES:
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and count_branches(node) > 15:
                found[f"{file.relative_to(SOURCE)}:{node.lineno} {node.name}"] = count_branches(node)
    assert not found
