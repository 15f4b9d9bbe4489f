"""The table of docs/eagle-graphs.md is what the pinned source says."""

from pathlib import Path

import pytest

import sglang_overlay.doctor.checks as checks
from ci.spec_graph_survey import SurveyError, as_json, markdown, survey
from sglang_overlay.cli import main
from sglang_overlay.patchset.pin import Pin

from .conftest import PINS

WORKER = "python/sglang/srt/speculative/eagle_worker_v2.py"


def test_the_tables_of_docs_and_doctor_are_read_from_the_source(
    fetched: Path, checkout: Path, pin: Pin
) -> None:
    assert main(["apply", "--sglang-dir", str(checkout)]) == 0
    stock, patched = survey(fetched / "python/sglang"), survey(checkout / "python/sglang")
    file = Path(checks.__file__).parent / f"eagle_graphs/{pin.version}.json"
    assert file.read_text() == as_json(stock, patched)  # made by python -m ci.spec_graph_survey
    table = markdown(stock, patched)
    text = (Path(__file__).parents[2] / "docs/eagle-graphs.md").read_text()
    whole, others = text.split("## Other pins\n")
    if pin == PINS[-1]:
        assert table in whole
    else:  # the rows that differ from the newest pin's
        rows = [row for row in table.splitlines() if row not in whole.splitlines()]
        section = others.split(f"SGLang {pin.version}")[1].split("\n\nSGLang ")[0]
        assert rows == [line for line in section.splitlines() if line.startswith("|")][2:]
    assert "| flashinfer, MLA | captured | captured | eager, **captured when patched** |" in table


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
