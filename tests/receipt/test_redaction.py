"""Nothing private gets out."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
from pathlib import Path
from urllib.parse import quote

import pytest

from harness.core import errors
from harness.core.errors import HarnessError
from harness.receipt import redaction
from harness.receipt.redaction import PrivateTextError, Scrubber
from testing import toys
from testing.workbench import Workbench

#: What must never get out, by what it is. Built from pieces, so that no scanner takes this file for a leak.
PLANTS = {
    "a GitHub token": "ghp_" + "A1b2C3d4" * 5,
    "an NGC key": "nvapi-" + "A1b2C3d4" * 5,
    "a Hugging Face token": "hf_" + "A1b2C3d4" * 4,
    "a private key": "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    "an e-mail address": "ada.lovelace@" + "example.org",
    "a home folder": "/home/" + "ada/checkout/scale.py",
    "root's home": "/root/" + ".cache/huggingface",
    "a home on Windows": "C:\\Users\\" + "ada\\checkout",
    "a temporary path": "/var/folders/" + "zz/abcdef0123/T/x.cu",
    "a cloud host": "ip-10-" + "1-2-3",
    "an internal host": "gpu17.cluster." + "internal",
    "an IPv4 address": "master=10.1." + "2.3:29500",
    "an IPv4 address at an end": "refused by 10.1." + "2.3.",
    "an IPv6 address": "2001:db8" + "::8a2e:370:7334",
    "a link-local address": "fe80" + "::1ff:fe23:4567:890a%eth0",
    "an AWS key": "AKIA" + "ABCD1234EFGH5678",
    "a temporary AWS key": "ASIA" + "ABCD1234EFGH5678",
    "a live payment key": "sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc",
    "a lower-case authorization": "authorization: bearer " + "abcdefghijklmnop",
    "a basic authorization": "authorization: basic " + "YWRhOmNvcnJlY3Q1",
    "a password in a URL": "https://ada:" + "pw@git.example.org/x",
    "an escaped password in a URL": "https:\\/\\/ada:" + "pw@git.example.org/x",
    "a token before a host": "https://" + "0123456789abcdef0123@git.example.org/x",
    "a token in a query": "https://git.example.org/x?private_" + "token=abcd1234",
    "a MAC address": "ether 52:54:" + "00:ab:cd:ef",
    "a MAC address with dashes": "52-54-" + "00-AB-CD-EF",
    "a GPU UUID": "GPU-" + "3f2a9c11-0b7e-4a52-9d8c-0123456789ab",
    "a MIG UUID": "MIG-" + "3f2a9c11-0b7e-4a52-9d8c-0123456789ab",
}


def _written_text(folder: Path) -> str:
    """Join everything that was written for others to read: all but the lanes' own raw logs in the cache."""
    files = [path for path in folder.rglob("*") if path.is_file() and "cache" not in path.relative_to(folder).parts]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_planted_is_scrubbed_or_refused(plant: str) -> None:
    scrubber = redaction.host_scrubber({})
    for text in (PLANTS[plant], f"RuntimeError: {PLANTS[plant]}", f"a={PLANTS[plant]}", f"({PLANTS[plant]}), and more"):
        scrubbed = scrubber.scrub(text)
        assert PLANTS[plant] not in scrubbed or list(scrubber.findings(scrubbed)), text


@pytest.mark.parametrize(
    ("channel", "plant"),
    [
        ("log", "a Hugging Face token"),
        ("standard error", "an internal host"),
        ("figure", "a GPU UUID"),
        ("check", "an IPv4 address"),
        ("exception", "an e-mail address"),
    ],
)
def test_a_run_refuses_what_a_script_repeats(workbench: Workbench, channel: str, plant: str) -> None:
    workbench.lay("38_repeats_what_it_was_given")
    completed = workbench.run("run", "--lane", "unpatched", NCCL_PLANT=PLANTS[plant], NCCL_PLANT_IN=channel)
    assert (completed.returncode, "refused to write" in completed.stdout) == (1, True), completed.stdout
    assert PLANTS[plant] not in completed.stdout + completed.stderr + _written_text(workbench.folder)


def test_versions_withholds_a_reason_that_looks_private(workbench: Workbench) -> None:
    workbench.lay("38_repeats_what_it_was_given")
    versions = [
        {"package": "toykernel", "version": "1.0", "file": "toykernel-1.0.zip", "sha256": workbench.sha256, "date": ""}
    ]
    (workbench.cache / "releases").mkdir()
    (workbench.cache / "releases/toykernel.json").write_text(json.dumps(versions))
    plant = PLANTS["an internal host"]
    for channel, arguments in (("exception", ["--json", "--record"]), ("traceback", [])):
        completed = workbench.run("versions", "38", *arguments, NCCL_PLANT=plant, NCCL_PLANT_IN=channel)
        assert completed.returncode == 5
        assert "refused to write: " in completed.stdout
        assert "holds a host's name" in completed.stdout
        assert plant not in completed.stdout + _written_text(workbench.folder)


def test_a_report_and_a_bundle_refuse_what_lies_in_the_pack(recorded: Workbench) -> None:
    pack = recorded.packs / "01_confirmed"
    sent, plant = recorded.folder / "sent.zip", PLANTS["an e-mail address"]
    (log,) = (path.name for path in pack.glob("receipts/*.log"))
    for name in ("receipts/cpu.traced.json", f"receipts/{log}", "report.in.md", "fix.patch"):
        file, text = pack / name, (pack / name).read_text()
        edited = text.replace('"reason": ""', f'"reason": "{plant}"') if name.endswith(".json") else f"{plant}\n{text}"
        file.write_text(edited)
        bundle = recorded.run("report", "1", "--bundle", str(sent))
        assert (bundle.returncode, "refused to write: " in bundle.stderr, sent.exists()) == (2, True, False)
        report = recorded.run("report", "1", "--full") if name != "receipts/cpu.traced.json" else None
        assert report is None or (report.returncode, report.stdout) == (2, "")
        assert plant not in bundle.stderr + (report.stderr if report else "")
        file.write_text(text)
    assert recorded.run("report", "1", "--bundle", str(sent)).returncode == 0


def test_the_version_of_cudnn_is_no_address(recorded: Workbench) -> None:
    pack = recorded.packs / "01_confirmed"
    file = pack / "receipts/cpu.traced.json"
    file.write_text(re.sub('"cudnn": "[^"]*"', '"cudnn": "9.19.0.56"', file.read_text()))
    assert "9.19.0.56" in file.read_text()
    assert recorded.run("report", "1", "--bundle", str(recorded.folder / "sent.zip")).returncode == 0
    assert recorded.run("report", "1").returncode == 0


def test_what_names_this_host_its_user_or_its_services_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "lovelace7.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "adalovelace")
    monkeypatch.setenv("PIP_INDEX_URL", "https://pypi.engines.example/simple")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.engines.example:3128")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://pypi.org/simple https://download.pytorch.org/whl/cpu")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    scrubber = redaction.host_scrubber({})
    for text in ("lovelace7", "on LOVELACE7.", "adalovelace", "from pypi.engines.example", "0123456789abcdef"):
        assert list(scrubber.findings(text)), text
    assert list(scrubber.findings("via proxy.engines.example:3128"))
    assert not list(scrubber.findings("from pypi.org and download.pytorch.org"))


@pytest.mark.parametrize("home", ["/srv/zo\u00eb", "/srv/\u9b4f b", '/srv/a"b', "/srv/a&b", "/srv/\udce9"])
def test_a_home_folder_is_named_however_it_is_written(home: str) -> None:
    scrubber = Scrubber({home: "$HOME"}, {}, {})
    file = f"{home}/x.py"
    for text in (
        file,
        json.dumps({"file": file}),
        json.dumps({"file": file}, ensure_ascii=False),
        json.dumps({"file": file}).replace("/", "\\/"),
        repr(file),
        ascii(file),
        repr(os.fsencode(file)),
        f"file://{quote(os.fsencode(file))}",
    ):
        assert "srv" not in scrubber.scrub(text), text
        assert "$HOME" in scrubber.scrub(text), text


@pytest.mark.parametrize("name", ["GITHUB_PAT", "REGISTRY_AUTH", "DB_PWD", "MYSQL_PASS", "API_KEY", "PAT"])
def test_the_value_of_a_variable_that_is_named_like_a_secret_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, 'correct"horse/battery')
    scrubber = redaction.host_scrubber({})
    for text in ('correct"horse/battery', json.dumps('correct"horse/battery'), quote('correct"horse/battery', safe="")):
        assert list(scrubber.findings(f"said {text}!")), text


def test_the_folder_of_the_shell_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/srv/checkout")
    assert not list(redaction.host_scrubber({}).findings("in /srv/checkout"))


def test_the_password_of_an_index_is_refused_and_stands_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://ada:correct%2Dhorse@pypi.org/simple")
    scrubber = redaction.host_scrubber({})
    assert list(scrubber.findings("said correct-horse"))
    assert list(scrubber.findings("said correct%2Dhorse"))
    message = str(HarnessError("no https://ada:correct-horse@pypi.org/simple/x?private_token=abcd1234&x=1 here"))
    assert message == "no https://***@pypi.org/simple/x?private_token=***&x=1 here"


def test_the_command_of_a_receipt_names_no_password(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    upstream = f"path:{toys.RESOURCES}/upstream/toykernel-1.0?private_token=abcd1234"
    completed = workbench.run("run", "1", "--lane", "unpatched", "--upstream", upstream)
    assert "abcd1234" not in completed.stdout + completed.stderr
    masked = errors.mask_credentials("--upstream git+https://ada:pw@h.example/x?private_token=abcd1234@main")
    assert masked == "--upstream git+https://***@h.example/x?private_token=***"
    assert not list(Scrubber({}, {}, {}).findings(masked)), "what is masked gets its receipt"


def test_a_private_path_becomes_a_name(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    home = workbench.folder / "home" / "ada"
    shutil.copytree(workbench.packs, home / "packs")
    command = [
        "run",
        "1",
        "--record",
        "--cache",
        str(workbench.cache),
        "--packs",
        str(home / "packs"),
        "--online",
        "--offline",
    ]
    completed = workbench.run(*command, HOME=str(home))
    assert completed.returncode == 0, completed.stderr
    written = "".join(path.read_text() for path in (home / "packs").rglob("receipts/*"))
    assert str(workbench.folder) not in written
    assert "/ada" not in written
    assert "$CACHE" in written


def test_a_script_that_prints_a_token_gets_no_receipt(workbench: Workbench) -> None:
    pack = workbench.lay("32_prints_secrets")
    value = "correct-horse-battery"
    completed = workbench.run("run", "--lane", "unpatched", MY_TOKEN=value)
    assert completed.returncode == 1
    assert "32_prints_secrets cpu: refused to write: log holds a token" in completed.stdout
    assert "ghp_" not in completed.stdout + completed.stderr
    assert "ghp_" not in "".join(path.read_text() for path in workbench.cache.glob("runs/*/receipts/**/*.*"))
    assert not list(pack.glob("receipts/*"))
    (raw,) = workbench.cache.glob("runs/*/raw/*/*.log")
    assert raw.stat().st_mode & 0o777 == 0o600, "whoever runs it can read what was refused, and nobody else"
    assert "ghp_" in raw.read_text()
    assert value not in raw.read_text(), "a lane does not even inherit it"


SCRUBBER = Scrubber({"/srv/ada": "$HOME"}, {"lovelace7": "the host's name"}, {"s3cr3t-value": "MY_TOKEN"})


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("on lovelace7:", "the host's name"),
        ("token hf_" + "a" * 30, "a token"),
        ("got s3cr3t-value", "the value of MY_TOKEN"),
    ],
)
def test_what_looks_private_is_refused_by_field_and_not_repeated(text: str, label: str) -> None:
    with pytest.raises(PrivateTextError) as caught:
        SCRUBBER.document({"lanes": {"pristine": {"reason": text}}})
    assert f"receipt.lanes.pristine.reason holds {label}" in str(caught.value)
    assert text not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1",
        "nvidia-cublas==13.0.2.14",
        "nvidia-cublas>=13.0.2.14",
        "std::vector<int>",
        "c10::cuda::device",
        "/srv/ada/x.py",
        "12:34:56",
        "2026-11-20 12:34:56-01:02",
        "0x12:34:56:78:9a:bc:de",
        "basic reproduction-of-the-bug",
        "git+https://github.com/linkedin/Liger-Kernel@0123456789abcdef0123456789abcdef01234567",
        "https://github.com:443/linkedin/Liger-Kernel",
        "https://example.org/?page=token&sort=auth",
        "2026-11-20T20:28:30+00:00",
        "a @ b.T",
        "q@k.transpose(-1, -2)",
        "torch._inductor.lan",
        "$TREE/root/x.py and {{data:tmp/x}}",
    ],
)
def test_what_only_resembles_it_is_not(text: str) -> None:
    assert "ada" not in str(SCRUBBER.document(text))


def test_a_version_that_pack_toml_states_is_no_address() -> None:
    scrubber = Scrubber({}, {}, {}, frozenset({"4.15.4.0"}))
    assert not list(scrubber.findings("z3-solver 4.15.4.0"))
    assert list(scrubber.findings("z3-solver 4.15.4.1")) == ["an IP address"]
