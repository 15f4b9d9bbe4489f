"""The functions and classes of a Python file, by their dotted names and lines."""

import ast
from collections.abc import Iterator

#: The names of a function or class, outermost first.
Symbol = tuple[str, ...]


def symbols(source: bytes) -> list[tuple[Symbol, int, int]]:
    """Every function and class with its first and last line, from 1, decorators counted.

    Empty for what is no Python that this interpreter reads.
    """
    try:
        return list(_walk(ast.parse(source), ()))
    except (SyntaxError, ValueError):
        return []


def _walk(node: ast.AST, around: Symbol) -> Iterator[tuple[Symbol, int, int]]:
    for child in ast.iter_child_nodes(node):
        inside = around
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*around, child.name)
            first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
            yield inside, first, child.end_lineno or first
        yield from _walk(child, inside)


def enclosing(source: bytes, first: int, last: int) -> Symbol:
    """The innermost function or class that holds the lines ``first`` to ``last``, from 1."""
    around = [s for s, start, end in symbols(source) if start <= first and last <= end]
    return max(around, key=len, default=())


def find_symbol(source: bytes, symbol: Symbol) -> int | None:
    """The line of ``symbol``, or of one whose dotted name ends in it; ``None`` without one."""
    lines = [line for names, line, _ in symbols(source) if names[-len(symbol) :] == symbol]
    return lines[0] if lines else None
