"""The house rules, read from the source. What a linter can say is ruff's; this is the rest."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvstore.settings import settings

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX = 420
FUNCTION_LINES_MAX = 65
LINE_CHARACTERS_MAX = 100
CLOCK_AND_CHANCE = {"kvstore/clock.py"}
"""Where product code may read the wall clock; `kvstore/testing/` may too."""
PRINTS = {"kvstore/cli.py", "kvstore/cli_blocks.py"}
INVARIANTS = [f"I{number}" for number in range(1, 12)]


def is_generated(path: Path) -> bool:
    return "_pb2" in path.name or "out" in path.relative_to(ROOT).parts


def sources(*folders: str) -> list[str]:
    """Our own Python files below `folders`, as paths from the root."""
    return sorted(
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not is_generated(path)
    )


PRODUCT = sources("kvstore", "engine_adapter")
EVERYTHING = sources("kvstore", "engine_adapter", "tests", "bench", "docs", "proto")


@cache
def text_of(source: str) -> str:
    return (ROOT / source).read_text(encoding="utf-8")


@cache
def tree_of(source: str) -> ast.Module:
    return ast.parse(text_of(source), source)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("source", PRODUCT)
def test_a_file_holds_one_idea(source: str) -> None:
    assert len(text_of(source).splitlines()) <= FILE_LINES_MAX


@pytest.mark.parametrize("source", EVERYTHING)
def test_functions_and_lines_are_short(source: str) -> None:
    for function in functions(tree_of(source)):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        assert lines <= FUNCTION_LINES_MAX, f"{source}:{function.lineno} {function.name}"
    for number, line in enumerate(text_of(source).splitlines(), 1):
        assert len(line) <= LINE_CHARACTERS_MAX, f"{source}:{number}"


@pytest.mark.parametrize("source", [source for source in PRODUCT if text_of(source).strip()])
def test_a_file_says_what_it_is_for(source: str) -> None:
    assert ast.get_docstring(tree_of(source)), f"{source} has no docstring"


@pytest.mark.parametrize("source", EVERYTHING)
def test_no_error_is_swallowed_and_nothing_left_for_later(source: str) -> None:
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{source}:{node.lineno} bare except"
            is_broad = isinstance(node.type, ast.Name) and node.type.id.endswith("Exception")
            does_nothing = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
            assert not (is_broad and does_nothing), f"{source}:{node.lineno} swallows everything"
    for number, line in enumerate(text_of(source).splitlines(), 1):
        left = re.search(r"# *(TODO|FIXME|XXX)\b(?!\(Q\d+\))", line)
        assert left is None, f"{source}:{number}: write TODO(Qn), n an open question"


@pytest.mark.parametrize("source", [source for source in PRODUCT if source not in PRINTS])
def test_product_code_does_not_print(source: str) -> None:
    for node in ast.walk(tree_of(source)):
        is_print = isinstance(node, ast.Name) and node.id == "print"
        assert not is_print, f"{source}:{getattr(node, 'lineno', 0)}"


def is_test_kit(source: str) -> bool:
    return source.startswith("kvstore/testing/") or source in CLOCK_AND_CHANCE


@pytest.mark.parametrize("source", [source for source in PRODUCT if not is_test_kit(source)])
def test_time_and_chance_come_in_as_arguments(source: str) -> None:
    for node in ast.walk(tree_of(source)):
        where = f"{source}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            assert "random" not in [alias.name for alias in node.names], where
        if isinstance(node, ast.ImportFrom):
            assert node.module != "random", where
            assert node.module != "time" or "time" not in [a.name for a in node.names], where
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("time", "time"), where
            assert (node.value.id, node.attr) != ("datetime", "now"), where


@pytest.mark.parametrize("key", list(settings()))
def test_a_setting_is_described_and_used(key: str) -> None:
    setting = settings()[key]
    assert setting.description.endswith("."), "one sentence or more"
    users = [s for s in PRODUCT if not s.startswith(("kvstore/config", "kvstore/settings"))]
    assert any(re.search(rf"\b{setting.name}\b", text_of(user)) for user in users), (
        "nobody reads it"
    )


def test_the_architecture_names_every_module() -> None:
    text = text_of("ARCHITECTURE.md")
    modules = {Path(source).parts[1].removesuffix(".py") for source in sources("kvstore")}
    missing = [name for name in modules if not re.search(rf"\b{name}\b", text)]
    assert set(missing) == {"__init__"}


@cache
def asserted_invariants() -> set[str]:
    """Ids in the law texts of `check(...)` and `InvariantViolated(...)`."""
    found: set[str] = set()
    for source in PRODUCT:
        for node in ast.walk(tree_of(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
                "check",
                "InvariantViolated",
            ):
                text = " ".join(
                    part.value
                    for argument in node.args
                    for part in ast.walk(argument)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                )
                found |= set(re.findall(r"\bI\d+\b", text))
    return found


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_every_invariant_of_the_architecture_is_asserted(invariant: str) -> None:
    architecture = ROOT / "ARCHITECTURE.md"
    assert re.search(rf"\b{invariant}\b", architecture.read_text(encoding="utf-8"))
    assert invariant in asserted_invariants(), f"no check(..., '{invariant}: ...') in kvstore/"
