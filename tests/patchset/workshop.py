"""Makes small patch sets and trees to try them on, with real git."""

import hashlib
import io
import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from sglang_overlay.cli import main
from sglang_overlay.patchset.source import cache_folder

from ..conftest import EXPORT, git

Files = dict[str, bytes | None]
TRAILERS = """Origin: vendor
Upstream-Status: Pending
Remove-When: the test is over
Overlay: module
Switch: unset it
Signed-off-by: A Tester <tester@example.org>
"""
BODY = "Why: so that a test has a patch to work with, one whose body is long enough to pass lint.\n"


def numbered(count: int, **changed: str) -> bytes:
    """``count`` lines; ``l5="x"`` makes the fifth ``x`` (several lines if it holds newlines)."""
    lines = [changed.get(f"l{n}", f"line {n}") for n in range(1, count + 1)]
    return ("\n".join(lines) + "\n").encode()


def lay_out(folder: Path, files: Files, prefix: str = "") -> Path:
    """Write ``files`` under ``folder``, less ``prefix``; ``None`` deletes."""
    for path, content in files.items():
        if not path.startswith(prefix):
            continue
        place = folder / path.removeprefix(prefix)
        if content is None:
            place.unlink()
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
    return folder


def snapshot(folder: Path) -> dict[str, tuple[int, bytes] | None]:
    """Every file below ``folder`` with mode and bytes, and every folder; git's own left out."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes())
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
        if ".git" not in path.relative_to(folder).parts
    }


@dataclass
class Workshop:
    """A pin with its patches under ``root/patches``, and its pristine source in git."""

    root: Path
    files: Files
    version: str = "1.0.0"
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        skeleton: Files = {"python/sglang/__init__.py": b"", "python/sglang/srt/x.py": b"x = 1\n"}
        self.files = {**skeleton, **self.files}
        self.source = self.root / "source"
        lay_out(self.source, self.files)
        git(self.source, "init", "-q", "-b", "main")
        git(self.source, "add", "-A")
        git(self.source, "commit", "-q", "-m", "pristine")
        git(self.source, "tag", "pin")
        self.folder = self.root / "patches" / f"v{self.version}"
        self.folder.mkdir(parents=True)
        tree = git(self.source, "rev-parse", "HEAD^{tree}").decode().strip()
        name = f"sglang-{self.version}-cp311-cp311-manylinux_2_34_x86_64.whl"
        wheel = self._wheel()
        digest = hashlib.sha256(wheel).hexdigest()
        pin = {"version": self.version, "wheel": name, "sha256": digest, "tree": tree}
        self.wheel = cache_folder() / "wheels" / digest / name
        self.wheel.parent.mkdir(parents=True, exist_ok=True)
        self.wheel.write_bytes(wheel)
        text = "".join(f'{key} = "{value}"\n' for key, value in pin.items())
        (self.folder / "pin.toml").write_text(text)

    def _wheel(self) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for path, content in self.files.items():
                archive.writestr(path.removeprefix("python/"), content or b"")
        return buffer.getvalue()

    def patch(self, name: str, edits: Files, *depends: str, executable: bool = False) -> None:
        """Add a patch that makes ``edits`` on the pristine source plus ``depends``."""
        git(self.source, "checkout", "-q", "pin")
        for other in depends:
            git(self.source, "cherry-pick", f"refs/tags/{other}")
        lay_out(self.source, edits)
        if executable:
            for path in edits:
                (self.source / path).chmod(0o755)
        needs = f"Depends-On: {', '.join(depends)}\n" if depends else ""
        message = f"test: make {name}\n\n{BODY}\n{needs}{TRAILERS}"
        git(self.source, "add", "-A")
        git(self.source, "commit", "-q", "-F", "-", data=message.encode())
        git(self.source, "tag", name)
        (self.folder / f"{name}.patch").write_bytes(git(self.source, *EXPORT))
        git(self.source, "checkout", "-q", "pin")
        self.names.append(name)

    def seal(self) -> None:
        """Write the series, and have lint write the manifest."""
        (self.folder / "series").write_text("".join(f"{name}\n" for name in self.names))
        assert self.run("lint", "--write") == 0

    def tree(self, layout: str) -> Path:
        """A fresh pristine tree: ``checkout``, ``folder`` or ``site-packages``."""
        place = self.root / layout
        shutil.rmtree(place, ignore_errors=True)
        if layout == "checkout":
            git(self.root, "clone", "-q", str(self.source), str(place))
            git(place, "checkout", "-q", "-B", "main", "pin")
        else:
            lay_out(place, self.files, "python/" if layout == "site-packages" else "")
        return place

    def run(self, *args: str | Path) -> int:
        """Run a command on these patches; the exit code."""
        return main([*map(str, args), "--patches", str(self.folder.parent)])

    def on(self, place: Path, *args: str) -> int:
        """Run a command on the tree at ``place``."""
        return self.run(*args, "--sglang-dir", place)

    def expected(self, *names: str) -> dict[str, bytes]:
        """What git makes of the pristine source and ``names``: every file's bytes."""
        git(self.source, "checkout", "-q", "pin")
        for name in names:
            git(self.source, "cherry-pick", f"refs/tags/{name}")
        held = {
            path: (self.source / path).read_bytes()
            for path in git(self.source, "ls-files").decode().split()
        }
        git(self.source, "checkout", "-q", "pin")
        return held


def contents(place: Path) -> dict[str, bytes]:
    """Every file's bytes below ``place``, git's own left out."""
    return {path: entry[1] for path, entry in snapshot(place).items() if entry}
