"""The series: which patches a pin has, in which order, and what each one changes."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from .diff import FileDiff, parse_diff
from .errors import DamagedPatchSet, Usage
from .header import Header, split_mail
from .pin import Pin
from .weave import Change, Weave

#: What a patch may be called.
NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")


@dataclass(frozen=True)
class Patch:
    """One patch file. ``requires`` holds, besides ``Depends-On``, what that needs."""

    name: str
    sha256: str
    header: Header
    diffs: tuple[FileDiff, ...]
    requires: frozenset[str]


@dataclass(frozen=True)
class Series:
    """The patches of ``pin`` in the order in which they are applied."""

    pin: Pin
    patches: tuple[Patch, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every patch's name, in order."""
        return tuple(patch.name for patch in self.patches)

    @cached_property
    def by_name(self) -> dict[str, Patch]:
        """Every patch, by its name."""
        return {patch.name: patch for patch in self.patches}

    @cached_property
    def module_patches(self) -> frozenset[str]:
        """The patches that an overlay wheel carries."""
        return frozenset(p.name for p in self.patches if p.header.overlay == "module")

    @cached_property
    def weaves(self) -> dict[str, Weave]:
        """The weave of every file that a patch touches, by path."""
        changes: dict[str, list[Change]] = {}
        for patch in self.patches:
            for diff in patch.diffs:
                earlier = changes.setdefault(diff.path, [])
                requires = patch.requires & {change.patch for change in earlier}
                earlier.append(Change(patch.name, requires, diff))
        return {path: Weave(path, tuple(found)) for path, found in sorted(changes.items())}

    def select(self, names: Iterable[str]) -> frozenset[str]:
        """``names``, checked. Raises ``Usage`` for one that is not in the series."""
        chosen = frozenset(names)
        for name in sorted(chosen - set(self.names)):
            raise Usage(f"no patch {name} in {self.pin.name}; there is {', '.join(self.names)}")
        return chosen

    def needed_by(self, names: frozenset[str]) -> frozenset[str]:
        """``names`` and everything that they require."""
        return names.union(*(p.requires for p in self.patches if p.name in names))

    def needing(self, names: frozenset[str]) -> frozenset[str]:
        """``names`` and everything that requires one of them."""
        return names | {p.name for p in self.patches if p.requires & names}


def load_series(pin: Pin) -> Series:
    """Read ``pin``'s series and every patch in it. Raises ``DamagedPatchSet``."""
    names = read_names(pin)
    patches: dict[str, Patch] = {}
    for name in names:
        patches[name] = parse_patch(name, read_mail(pin, name), patches)
    return Series(pin, tuple(patches.values()))


def read_names(pin: Pin) -> list[str]:
    """The names of ``pin``'s patches, in their order. Raises ``DamagedPatchSet``."""
    file = pin.folder / "series"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedPatchSet(f"{file}: {error}") from error
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    there = {path.stem for path in pin.folder.glob("*.patch")}
    for name in names:
        if not NAME.fullmatch(name):
            raise DamagedPatchSet(f"{file}: {name!r} is not a patch name (a-z, 0-9, '-')")
        if names.count(name) > 1:
            raise DamagedPatchSet(f"{file}: names {name} twice")
        if name not in there:
            raise DamagedPatchSet(f"{file}: names {name}, but there is no {name}.patch")
    for name in sorted(there - set(names)):
        raise DamagedPatchSet(f"{file}: does not name {name}.patch, which lies beside it")
    return names


def read_mail(pin: Pin, name: str) -> bytes:
    """The file of ``pin``'s patch ``name``. Raises ``DamagedPatchSet`` when it cannot be read."""
    try:
        return (pin.folder / f"{name}.patch").read_bytes()
    except OSError as error:
        raise DamagedPatchSet(f"patch {name}: {error}") from error


def parse_patch(name: str, mail: bytes, earlier: Mapping[str, Patch]) -> Patch:
    """The patch that ``mail`` is, after ``earlier`` ones. Raises ``DamagedPatchSet``."""
    header, diff = split_mail(mail, name)
    for other in header.depends_on:
        if other not in earlier:
            raise DamagedPatchSet(f"patch {name}: depends on {other}, which is not before it")
    requires = frozenset(header.depends_on).union(
        *(earlier[other].requires for other in header.depends_on)
    )
    digest = hashlib.sha256(mail).hexdigest()
    return Patch(name, digest, header, parse_diff(diff, name), requires)
