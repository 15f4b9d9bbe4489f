"""The manifest: the blob of every version of every file, computed once and kept.

It makes a tree's state a matter of looking up blob ids: nothing is parsed,
searched or tried on a user's tree to learn what is applied there.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .blobs import blob_id, short
from .errors import DamagedPatchSet
from .series import Series
from .weave import Subset

_MOST_PATCHES_PER_FILE = 8  # 256 versions; more want a look at how they are cut


@dataclass(frozen=True)
class Manifest:
    """``versions[path][blob]`` is the subset that gives ``blob``; ``patches`` holds sha256 sums."""

    patches: dict[str, str]
    versions: dict[str, dict[str, Subset]]

    def blob(self, path: str, subset: Subset) -> str:
        """The blob of ``path`` with ``subset`` applied."""
        return next(blob for blob, held in self.versions[path].items() if held == subset)


def compute(series: Series, read: Callable[[str], bytes | None]) -> Manifest:
    """The manifest of ``series`` over the pristine files that ``read`` gives.

    Every version is made, and every patch's index line is held against it.
    Raises ``DamagedPatchSet`` when one of them is not as the patch says.
    """
    versions: dict[str, dict[str, Subset]] = {}
    for path, weave in series.weaves.items():
        if len(weave.changes) > _MOST_PATCHES_PER_FILE:
            raise DamagedPatchSet(
                f"{path}: {len(weave.changes)} patches change it; "
                f"{_MOST_PATCHES_PER_FILE} at most, so merge some"
            )
        pristine = read(path)
        found = {s: blob_id(weave.forward(pristine, s)) for s in weave.subsets()}
        for change in weave.changes:
            base = weave.restrict(change.requires)
            after = weave.restrict(change.requires | {change.patch})
            for said, subset in ((change.diff.before, base), (change.diff.after, after)):
                if said != found[subset]:
                    raise DamagedPatchSet(
                        f"patch {change.patch}: {path}: its index line says {short(said)}, "
                        f"but the file with {' + '.join(subset) or 'no patch'} "
                        f"is {short(found[subset])}"
                    )
        versions[path] = {blob: subset for subset, blob in found.items()}
        if len(versions[path]) != len(found):
            raise DamagedPatchSet(f"{path}: two sets of patches give the same content")
    return Manifest({patch.name: patch.sha256 for patch in series.patches}, versions)


def write(manifest: Manifest, folder: Path) -> None:
    """Write ``manifest.json`` into a pin's folder."""
    table = {
        "patches": manifest.patches,
        "versions": {
            path: {blob: list(subset) for blob, subset in versions.items()}
            for path, versions in manifest.versions.items()
        },
    }
    (folder / "manifest.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def load(series: Series) -> Manifest:
    """Read the manifest of ``series`` and check that it belongs to these patches."""
    file = series.pin.folder / "manifest.json"
    repair = "sglang-overlay lint --write"
    try:
        table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        manifest = Manifest(
            dict(table["patches"]),
            {
                path: {blob: tuple(subset) for blob, subset in versions.items()}
                for path, versions in table["versions"].items()
            },
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedPatchSet(f"{file}: {error!r}", repair) from error
    for patch in series.patches:
        if manifest.patches.get(patch.name) != patch.sha256:
            raise DamagedPatchSet(
                f"patch {patch.name}: sha256 {patch.sha256[:12]} is not the manifest's "
                f"{manifest.patches.get(patch.name, 'none')[:12]}: cut short, or edited",
                repair,
            )
    if set(manifest.patches) != set(series.names) or set(manifest.versions) != set(series.weaves):
        raise DamagedPatchSet(f"{file}: its patches or files are not the series's", repair)
    for path, weave in series.weaves.items():
        if sorted(manifest.versions[path].values()) != sorted(weave.subsets()):
            raise DamagedPatchSet(f"{file}: {path}: versions are missing", repair)
    return manifest
