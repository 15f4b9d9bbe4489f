"""Another SGLang than the pinned one, to be read: a tree on disk, or a release's wheel."""

import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os.path import commonpath
from pathlib import Path

from .errors import EnvironmentFailure
from .pin import Pin
from .source import released_wheel
from .symbols import Symbol, find_symbol
from .tree import open_tree

_MOST_PLACES = 3


@dataclass(frozen=True)
class Release:
    """``read`` takes a checkout's path, ``None`` is no such file; ``modules`` are all Python
    files; ``holds`` says whether this layout has a place for a path at all."""

    name: str
    read: Callable[[str], bytes | None]
    holds: Callable[[str], bool]
    list_modules: Callable[[], Iterable[str]]

    @cached_property
    def modules(self) -> dict[str, bytes]:
        """Every Python file below ``python/``."""
        return {path: self.read(path) or b"" for path in self.list_modules()}

    def likely(self, path: str, symbol: Symbol) -> list[str]:
        """``file:line`` of where ``symbol`` of ``path`` probably went: the nearest folders first.

        The longest end of the dotted name that is defined anywhere decides. Without one, a
        file of the same name does.
        """
        for names in (symbol[start:] for start in range(len(symbol))):
            pattern = re.compile(rb"\b(?:def|class)\s+%s\b" % re.escape(names[-1].encode()))
            candidates = [p for p, text in self.modules.items() if pattern.search(text)]
            lines = {p: find_symbol(self.modules[p], names) for p in candidates}
            found = [p for p in candidates if lines[p] and not re.fullmatch("__.*__", names[0])]
            if found:
                return [f"{p}:{lines[p]}" for p in _nearest(found, path)]
        named = [p for p in self.modules if Path(p).name == Path(path).name and p != path]
        return _nearest(named, path)


def _nearest(paths: list[str], path: str) -> list[str]:
    paths = sorted(paths, key=lambda p: (-commonpath([p, path]).count("/"), p))
    return paths[:_MOST_PLACES]


def open_release(sglang_dir: Path) -> Release:
    """The SGLang at ``sglang_dir``. Raises as ``open_tree`` does."""
    tree = open_tree(sglang_dir)

    def list_modules() -> Iterable[str]:
        package = tree.locate("python/sglang")
        assert package is not None
        return (f"python/sglang/{file.relative_to(package)}" for file in package.rglob("*.py"))

    holds = lambda path: tree.locate(path) is not None  # noqa: E731
    return Release(tree.version() or str(sglang_dir), tree.read, holds, list_modules)


@contextmanager
def _whole(file: Path) -> Iterator[None]:
    """Turn what a damaged wheel raises into ``EnvironmentFailure``, and remove the ``file``."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        file.unlink(missing_ok=True)
        raise EnvironmentFailure(
            f"{file}: no whole wheel ({error}); the file was removed", "run the same command again"
        ) from error
    except OSError as error:
        raise EnvironmentFailure(f"{file}: {error.strerror or error}") from error


def released(version: str, pin: Pin) -> Release:
    """SGLang ``version`` from the package index.

    Raises ``EnvironmentFailure`` when it cannot be had or is no whole wheel; ``read`` does so
    too. Such a file is removed.
    """
    file = released_wheel(version, pin)
    with _whole(file):
        wheel = zipfile.ZipFile(file)
    names = set(wheel.namelist())

    def read(path: str) -> bytes | None:
        name = path.removeprefix("python/")
        with _whole(file):
            return wheel.read(name) if name != path and name in names else None

    def list_modules() -> Iterable[str]:
        return (f"python/{name}" for name in names if name.endswith(".py"))

    return Release(version, read, lambda path: path.startswith("python/"), list_modules)
