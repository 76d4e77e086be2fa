"""Size, shape and comments of source trees, side by side: ``python -m benchmarks.source_metrics [DIR ...]``.

Without arguments it measures this project's three packages together. Tests and generated code do not count.
Other trees can be compared with them, such as the folder ``site-packages/hivemind``.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LEFT_OUT = ("/tests/", "/test/", "/pb/", "/proto/", "_pb2", "/.venv/", "/build/")
_LONG_CLASS = 200


@dataclass(frozen=True)
class SourceMetrics:
    """Figures of one tree. Lengths in lines; ratios in lines of docstrings or comments per line of code."""

    name: str
    files: int
    lines: int
    file_median: float
    file_longest: int
    function_median: float
    function_p90: float
    function_longest: int
    docstrings_per_code: float
    comments_per_code: float
    long_classes: int


def measure(name: str, paths: Iterable[Path]) -> SourceMetrics:
    """Measure the files `paths`. Raises SyntaxError if one is not Python."""
    file_lengths, functions, long_classes = [], [], 0
    docstring_lines = comment_lines = code_lines = 0
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(text)
        file_lengths.append(len(text.splitlines()))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(_length(node))
            elif isinstance(node, ast.ClassDef):
                long_classes += _length(node) > _LONG_CLASS
        docstrings = _docstring_lines(tree)
        comments, code = _comments_and_code(text)
        docstring_lines += len(docstrings)
        comment_lines += len(comments)
        code_lines += len(code - docstrings)
    return SourceMetrics(
        name,
        len(file_lengths),
        sum(file_lengths),
        statistics.median(file_lengths),
        max(file_lengths),
        statistics.median(functions),
        statistics.quantiles(functions, n=10)[-1],
        max(functions),
        docstring_lines / code_lines,
        comment_lines / code_lines,
        long_classes,
    )


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _docstring_lines(tree: ast.AST) -> set[int]:
    """Line numbers of docstrings: strings that are a whole statement."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _comments_and_code(text: str) -> tuple[set[int], set[int]]:
    """Line numbers of comments, and of all other lines except blank ones."""
    comments: set[int] = set()
    code: set[int] = set()
    blank = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in blank:
            code |= set(range(token.start[0], token.end[0] + 1))
    return comments, code


def _sources(folders: Sequence[Path]) -> list[Path]:
    found = ((folder, path) for folder in folders for path in folder.rglob("*.py"))
    return sorted(
        path
        for folder, path in found
        if not any(part in f"/{path.relative_to(folder)}" for part in _LEFT_OUT)
    )


def table(columns: Sequence[SourceMetrics]) -> str:
    """The figures as a Markdown table, a column for each tree."""
    rows = [
        ("files / lines", [f"{each.files} / {each.lines:,}" for each in columns]),
        ("file median / longest", [f"{each.file_median:.0f} / {each.file_longest}" for each in columns]),
        (
            "function median / p90 / longest",
            [
                f"{each.function_median:.0f} / {each.function_p90:.0f} / {each.function_longest}"
                for each in columns
            ],
        ),
        (
            "docstrings / code, comments / code",
            [f"{each.docstrings_per_code:.2f}, {each.comments_per_code:.3f}" for each in columns],
        ),
        (f"classes over {_LONG_CLASS} lines", [str(each.long_classes) for each in columns]),
    ]
    head = ["| | " + " | ".join(each.name for each in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join([*head, *(f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="other trees to compare with")
    folders = parser.parse_args().folders
    own = [ROOT / package for package in ("node", "coordinator", "protocol", "hetnode")]
    trees = [("this tree", own), *((folder.name, [folder]) for folder in folders)]
    print(table([measure(name, _sources(parts)) for name, parts in trees]))


if __name__ == "__main__":
    main()
