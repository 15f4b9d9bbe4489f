"""Keys and passwords are used, and neither stored nor printed."""

import base64
import json
import sys
from pathlib import Path

import pytest

from sglang_overlay.cli import main
from sglang_overlay.measure import secret
from sglang_overlay.measure.experiment import load
from sglang_overlay.measure.store import open_store

from .failing import serving

SECRETS = ("s3cret-key", "s3cret-admin", "s3cret-token", "s3cret-word")
FILE = f"""\
name = "locked"
[values]
key = "s3cret-key"
[server]
command = ["{sys.executable}", "-c", "import os, sys; sys.exit(f'{{sys.argv}} {{os.environ}}')",
    "--admin-api-key=s3cret-admin"]
environ = {{ MY_PASSWORD = "s3cret-word" }}
[[experiment]]
name = "one"
args = {{ "--api-key" = "$key", "--speculative-num-draft-tokens" = 4 }}
environ = {{ HF_TOKEN = ["s3cret-token", "s3cret-other"] }}
"""


def test_the_secrets_of_a_sweep_stand_in_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "locked.toml", tmp_path / "out"
    file.write_text(FILE)
    told = ""
    for more in (["--dry-run"], ["--dry-run", "--json"], ["--json"], []):
        assert main(["sweep", str(file), "--out", str(out), *more]) == 0
        said = capsys.readouterr()
        told += said.out + said.err
    store = out / "results.sqlite"
    assert main(["report", str(store), "--out", str(tmp_path / "r.html")]) == 0
    assert main(["bench", "list", "--store", str(store), "--json"]) == 0
    told += capsys.readouterr().out + (tmp_path / "r.html").read_text()
    told += store.read_bytes().decode(errors="replace")
    assert "s3cret" not in told
    (log, _) = sorted(out.glob("*.log"))
    assert all(word in log.read_text() for word in SECRETS)  # the server has them
    with open_store(store) as kept:
        first, second = kept.load()
    assert first.name == "locked/one HF_TOKEN=<redacted> 1"
    assert second.name == "locked/one HF_TOKEN=<redacted> 2"
    assert first.labels == {
        "--api-key": "<redacted>",
        "--speculative-num-draft-tokens": "4",
        "HF_TOKEN": "<redacted> 1",
    }


def test_another_secret_is_another_experiment(tmp_path: Path) -> None:
    file = tmp_path / "locked.toml"
    file.write_text(FILE)
    one, other = (load(file, {"key": key}) for key in ("a-key", "b-key"))
    assert one.experiments[0].settings == other.experiments[0].settings
    assert one.digest(one.experiments[0]) != other.digest(other.experiments[0])


@pytest.mark.parametrize(
    ("words", "shown", "hidden"),
    [
        (["--api-key", "a"], ["--api-key", "<redacted>"], ["a"]),
        (["--admin-api-key=a=b"], ["--admin-api-key=<redacted>"], ["a=b"]),
        (["--worker-env", "HF_TOKEN=a"], ["--worker-env", "HF_TOKEN=<redacted>"], ["a"]),
        (["--ssl-keyfile-password", "a"], ["--ssl-keyfile-password", "<redacted>"], ["a"]),
        (["--api-key"], ["--api-key"], []),
        (["--tokenizer-path", "a", "--speculative-token-map", "b"], None, []),
        (["--speculative-num-draft-tokens", "4", "--x=y"], None, []),
    ],
)
def test_a_command_line_is_shown_without_secrets(
    words: list[str], shown: list[str] | None, hidden: list[str]
) -> None:
    assert secret.words(words) == (shown or words)
    assert list(secret.of_words(words)) == hidden


def test_user_and_password_of_an_address_are_sent_and_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "b.sqlite"
    few = ["--runs", "1", "--warmup", "0", "--tokens", "4", "--store", str(store)]
    with serving("ok", "500") as (url, server):
        secretly = url.replace("//", "//bob:s3cret@")
        assert main(["bench", "--url", secretly, "--json", *few]) == 0
        told = capsys.readouterr().out
        assert json.loads(told)["url"] == url
        assert main(["bench", "--url", secretly, *few]) == 4
        asked = f"Basic {base64.b64encode(b'bob:s3cret').decode()}"
        assert {head["authorization"] for head in server.heads} == {asked}
    for wrong in (secretly, "bob:s3cret@host", "http://bob:s3cret/s3cret@host"):
        assert main(["bench", "--url", wrong, *few]) in (2, 4)
        assert main(["profile", "--url", wrong, "--out", str(tmp_path)]) in (2, 4)
    said = capsys.readouterr()
    told += said.out + said.err + store.read_bytes().decode(errors="replace")
    assert "s3cret" not in told and "bob" not in told
