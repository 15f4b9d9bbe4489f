"""The command itself: what it prints, its exit code, the page and the bundle that it writes."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from sglang_overlay.doctor import bundle
from sglang_overlay.doctor.bundle import redact
from sglang_overlay.patchset.pin import load_pins, patches_folder
from sglang_overlay.patchset.series import read_names

from .test_nvml import libraries  # noqa: F401

Libraries = dict[str, Path]


def doctor(
    library: Path, *args: object, machine: str = "two", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the command on a machine whose driver library lies in ``library``."""
    return subprocess.run(
        [sys.executable, "-m", "sglang_overlay", "doctor", *map(str, args)],
        env={
            **{n: v for n, v in os.environ.items() if not n.startswith(("NCCL_", "CUDA_"))},
            "LD_LIBRARY_PATH": str(library),
            "MACHINE": machine,
            **env,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return {f["id"]: f["state"] for f in json.loads(done.stdout)["findings"]}


def test_without_a_driver_all_is_said_that_can_be_and_no_error_made(
    libraries: Libraries,  # noqa: F811
) -> None:
    done = doctor(libraries["new"], "--json", "--deep", machine="broken")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["counts"]["error"] == 0
    unknown = [f for f in result["findings"] if f["state"] == "unknown"]
    assert {"gpus", "driver", "topology", "copies"} <= {f["id"] for f in unknown}
    assert all(f["evidence"] for f in unknown)
    assert result["facts"]["pins"] == {
        pin.version: [*read_names(pin)] for pin in load_pins(patches_folder())
    }


@pytest.mark.parametrize(
    ("machine", "args", "code", "expected"),
    [
        ("two", [], 0, {"gpus": "ok", "link-width": "warning", "link-speed": "warning"}),
        ("two", ["--", "--tp", "8"], 1, {"gpus": "error"}),
        ("mig", [], 1, {"mig": "error", "compute-mode": "error", "peer-access": "warning"}),
        ("nvlink", [], 0, {"topology": "ok", "all-reduce": "ok"}),
        ("pairs", [], 0, {"topology": "warning", "all-reduce": "warning"}),
        ("eight", [], 0, {"topology": "warning", "link-width": "warning", "peer-access": "ok"}),
        ("old", [], 0, {"peer-access": "ok", "all-reduce": "unknown", "bar1": "unknown"}),
    ],
)
def test_cards_and_the_exit_code(
    libraries: Libraries,  # noqa: F811
    machine: str,
    args: list[str],
    code: int,
    expected: dict[str, str],
) -> None:
    done = doctor(libraries["new"], "--json", *args, machine=machine)
    assert done.returncode == code, done.stderr
    found = findings(done)
    assert {id: found.get(id, "ok") for id in expected} == expected


def test_what_is_wrong_is_printed_first_and_with_its_fix(
    libraries: Libraries,  # noqa: F811
) -> None:
    done = doctor(libraries["new"], machine="mig", NCCL_P2P_DISABLE="1")
    lines = done.stdout.splitlines()
    heads = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    marks = [head for head in heads if head in ("ERROR", "WARN", "?", "ok")]
    assert marks == sorted(marks, key=["ERROR", "WARN", "?", "ok"].index)
    assert lines[0] == "ERROR mig: MIG is on"
    assert "      fix: sudo nvidia-smi -i 0,1 -mig 0" in lines
    assert any(line.startswith("WARN  nccl-p2p") for line in lines)
    assert lines[-1].endswith(" ok")


def test_a_secret_is_never_printed(libraries: Libraries) -> None:  # noqa: F811
    secret = {"SGLANG_API_KEY": "s3cret-value", "HF_TOKEN": "s3cret-value"}
    done = doctor(libraries["new"], "--json", **secret)
    assert "s3cret-value" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--bundle", "there.tar.gz"], 2, "is there already"),
        (["--bundle", "nowhere/b.tar.gz"], 2, "is no folder"),
        (["--bundle", "b.tar.gz", "--log", "none.log"], 2, "none.log: cannot be read"),
        (["--tp", "8"], 2, "No such option"),
        (["--html", "nowhere/page.html"], 4, "No such file"),
        (["--bundle", f"{'b' * 300}.tar.gz"], 2, "name too long"),
        # Listed first, and then the writing fails.
        (["--bundle", "/proc/b.tar.gz"], 4, "/proc/b.tar.gz will hold:\n  doctor.json ("),
    ],
)
def test_what_cannot_be_done(
    libraries: Libraries,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    code: int,
    message: str,
) -> None:
    (tmp_path / "there.tar.gz").touch()
    monkeypatch.chdir(tmp_path)
    done = doctor(libraries["new"], *args)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_page_without_jinja2_names_the_command(
    libraries: Libraries,  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "jinja2.py").write_text("raise ImportError('not here')")
    done = doctor(libraries["new"], "--html", tmp_path / "p.html", PYTHONPATH=str(tmp_path))
    assert done.returncode == 4
    assert "next: pip install jinja2" in done.stderr


def test_a_bundle_is_listed_and_holds_findings_versions_and_logs_without_secrets(
    libraries: Libraries,  # noqa: F811
    tmp_path: Path,
) -> None:
    log, target = tmp_path / "server.log", tmp_path / "b.tar.gz"
    log.write_text(
        "server_args=ServerArgs(api_key='topsecret', tp_size=8)\nfrom abcdef-in-a-path\n"
    )
    done = doctor(libraries["new"], "--bundle", target, "--log", log, MY_TOKEN="abcdef-in-a-path")
    assert done.returncode == 0, done.stderr
    with tarfile.open(target) as archive:
        names = archive.getnames()
        texts = {m.name: archive.extractfile(m).read().decode() for m in archive}  # type: ignore[union-attr]
    assert names == [f"doctor/{n}" for n in ("doctor.json", "versions.json", "logs/0-server.log")]
    listed = done.stderr.partition("will hold:\n")[2].split("\n")
    assert [line.split()[0] for line in listed if line] == [n.partition("/")[2] for n in names]
    assert texts["doctor/logs/0-server.log"] == (
        "server_args=ServerArgs(api_key='<redacted>', tp_size=8)\nfrom <redacted>\n"
    )
    assert json.loads(texts["doctor/doctor.json"])["command"] == "doctor"
    assert "sglang-overlay" in json.loads(texts["doctor/versions.json"])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("HF_TOKEN=hf_x tp=8", "HF_TOKEN=<redacted> tp=8"),
        ("--api-key abc --port 1", "--api-key <redacted> --port 1"),
        ('{"api_key": "a\\"b secret"}', '{"api_key": "<redacted>"}'),
        ('{"admin_api_key": "a b c", "tp": 8}', '{"admin_api_key": "<redacted>", "tp": 8}'),
        (
            "f(a=g(api_key='x', b=1), url=h?token=x&c=2)",
            "f(a=g(api_key='<redacted>', b=1), url=h?token=<redacted>",
        ),
        ("['--api-key', 'x', '--tp', '8']", "['--api-key', '<redacted>', '--tp', '8']"),
        ("DB_PASSWORD=a)b,c'd e", "DB_PASSWORD=<redacted> e"),
        (
            "#token: 35, token usage: 0.00, (token/s): 12.3,",
            "#token: 35, token usage: 0.00, (token/s): 12.3,",
        ),
        ("api_key=None, PGPASSWORD: x", "api_key=None, PGPASSWORD: <redacted>"),
        ("max_total_tokens=4096 #token: 12", "max_total_tokens=4096 #token: 12"),
        ("the key idea is a token of speed", "the key idea is a token of speed"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer <redacted>"),
        ("pulled hf_abcdefgh1234 and sk-12345678abc", "pulled <redacted> and <redacted>"),
        ("https://me:pass@host/x", "https://me:<redacted>@host/x"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----\n", "<redacted>\n"),
        ("MYSQL_PWD=x PWD=/srv OLDPWD=/tmp", "MYSQL_PWD=<redacted> PWD=/srv OLDPWD=/tmp"),
        (
            "db_passwd: x, PGPASS=y DB_PASS=z",
            "db_passwd: <redacted>, PGPASS=<redacted> DB_PASS=<redacted>",
        ),
        ("verify pass: 3 ms, bypass=on", "verify pass: 3 ms, bypass=on"),
        ("AWS_CREDENTIALS='a b' x", "AWS_CREDENTIALS='<redacted>' x"),
        (
            "PASSWORD=1234 secret: 5, api_key=678",
            "PASSWORD=<redacted> secret: <redacted>, api_key=<redacted>",
        ),
        ('Cookie: sid=a; other="b"\nnext', "Cookie: <redacted>\nnext"),
        ("{'set-cookie': 'sid=a; b', 'tp': 8}", "{'set-cookie': '<redacted>', 'tp': 8}"),
        ("(b'cookie', b'sid=a'), 8", "(b'cookie', b'<redacted>'), 8"),
        ("Authorization: abc def", "Authorization: <redacted>"),
        ("authorization=Token abc", "authorization=Token <redacted>"),
        (
            '{"Authorization": "Digest a=b", "tp": 8}',
            '{"Authorization": "Digest <redacted>", "tp": 8}',
        ),
        ("no authorization, no cookie here", "no authorization, no cookie here"),
        ("curl -u me:pass http://h:80/x", "curl -u <redacted> http://h:80/x"),
        ("curl --user 'me:a b' -ume:x h", "curl --user <redacted> -u<redacted> h"),
        ("['curl', '-u', 'me:pass', 'h']", "['curl', '-u', <redacted>, 'h']"),
        ("redis://:pass@host:6379/0", "redis://:<redacted>@host:6379/0"),
        ("https://abcdef@host/x", "https://<redacted>@host/x"),
        ("postgres://me:a@b/c@host", "postgres://me:<redacted>@host"),
        ("http://10.0.0.1:30000/v1/models", "http://10.0.0.1:30000/v1/models"),
        ("is eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJ-_s, ok", "is <redacted>, ok"),
        ("nvapi-abcdefgh12 xoxb-12345678-ab", "<redacted> <redacted>"),
        ("AIzaSyA1234567 gsk_abcdefgh12", "<redacted> <redacted>"),
        (
            f"say\n{'MIIx' * 16}\n{'+/Az' * 16}\nAb=\n-----END RSA PRIVATE KEY-----\nend",
            "say\n<redacted>\nend",
        ),
        (f"{'MIIx' * 16}\n-----END PRIVATE KEY-----\n", "<redacted>\n"),
        ("of 'MIIx\\nAb=\\n-----END PRIVATE KEY-----\\n'", "of '<redacted>\\n'"),
        ("at /srv/abcdef-in-a-path/x", "at /srv/<redacted>/x"),
    ],
)
def test_what_is_redacted(text: str, shown: str) -> None:
    assert redact(text, {"abcdef-in-a-path"}) == shown


def test_of_a_long_log_the_end_is_kept_from_a_whole_line_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "_LIMIT", 40)
    log = tmp_path / "server.log"
    log.write_text(f"{'x' * 1000}\nHF_TOKEN=abcdefghijklmnopqrstuvwxyz\nthe last line\n")
    found = bundle.files({"facts": {}, "version": "1"}, [log])
    assert found["logs/0-server.log"] == b"the last line\n"
    log.write_text("all of it\n")
    assert bundle.files({"facts": {}, "version": "1"}, [log])["logs/0-server.log"] == b"all of it\n"
