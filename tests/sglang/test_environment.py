"""The environment that these tests run in is made by ``ci/sglang_env.py``."""

from pathlib import Path

import pytest

from ci import sglang_env


def test_a_disk_that_is_too_small_is_named_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_OVERLAY_CACHE", str(tmp_path))
    monkeypatch.setattr(sglang_env, "_NEEDS", 2**62)  # more than any disk has
    with pytest.raises(SystemExit, match=r"SGLang needs 4294967296\n  next: set SGLANG_OVERLAY"):
        sglang_env.sglang_python()
    assert [path.suffix for path in (tmp_path / "envs").iterdir()] == [".lock"]
