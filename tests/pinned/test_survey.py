"""The table of the README is what the pinned source says."""

from pathlib import Path

import pytest

import sglang_overlay.doctor.checks as checks
from ci.spec_graph_survey import (
    ALIASES,
    ELSEWHERE,
    SUBJECTS,
    SurveyError,
    as_json,
    choices,
    markdown,
    survey,
)
from sglang_overlay.cli import main
from sglang_overlay.patchset.pin import Pin

from ..pins import PINS

ROOT = Path(__file__).parents[2]
WORKER = "python/sglang/srt/speculative/eagle_worker_v2.py"


def test_the_tables_of_docs_and_doctor_are_read_from_the_source(
    fetched: Path, checkout: Path, pin: Pin
) -> None:
    assert main(["apply", "--sglang-dir", str(checkout)]) == 0
    stock, patched = survey(fetched / "python/sglang"), survey(checkout / "python/sglang")
    file = Path(checks.__file__).parent / f"eagle_graphs/{pin.version}.json"
    assert file.read_text() == as_json(stock, patched)  # made by python -m ci.spec_graph_survey
    table = markdown(stock, patched)
    newest = (ROOT / "README.md").read_text()
    if pin == PINS[-1]:
        assert table in newest
    else:  # the rows that differ from the newest pin's
        rows = [row for row in table.splitlines() if row not in newest.splitlines()]
        others = (ROOT / "docs/eagle-graphs.md").read_text().split("## Other pins\n")[1]
        section = others.split(f"SGLang {pin.version}")[1].split("\n\nSGLang ")[0]
        assert rows == [line for line in section.splitlines() if line.startswith("|")][2:]
    assert "| flashinfer, MLA | captured | captured | eager, **captured when patched** |" in table


def test_every_attention_backend_has_a_row_or_a_reason(fetched: Path) -> None:
    rows = {key for _, key, _ in SUBJECTS} - {"hybrid_linear_attn"}  # chosen by the model
    assert choices(fetched / "python/sglang") == rows | ALIASES | ELSEWHERE


@pytest.mark.parametrize(
    ("old", "new", "backend", "verdict"),
    [
        ("            TritonAttnBackend,\n", "", "triton", "eager"),
        ("graph_supported_backend_types = [", "renamed = [", "triton", None),
    ],
)
def test_a_change_upstream_turns_the_survey(
    checkout: Path, old: str, new: str, backend: str, verdict: str | None
) -> None:
    file = checkout / WORKER
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new).replace("graph_supported_backend_types.", "gone."))
    if verdict is None:
        with pytest.raises(SurveyError):
            survey(checkout / "python/sglang")
        return
    rows = {(row.backend, row.step): row for row in survey(checkout / "python/sglang")}
    assert rows[backend, "draft-extend"].verdict == verdict
