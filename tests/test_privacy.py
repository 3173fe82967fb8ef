"""Nothing private gets out."""

from __future__ import annotations

import pytest
from conftest import Workbench

from harness.privacy import PrivateTextError, Scrubber


def test_a_probe_that_prints_a_token_gets_no_receipt(workbench: Workbench) -> None:
    pack = workbench.lay("32_prints_secrets")
    value = "correct-horse-battery"
    ended = workbench.run("run", "--lane", "pristine", "--receipts", str(workbench.folder / "out"), MY_TOKEN=value)
    assert ended.returncode == 2
    assert "error: 32_prints_secrets cpu: refused to write: log holds a token" in ended.stderr
    assert "ghp_" not in ended.stderr
    assert not list(workbench.folder.glob("out/**/*"))
    assert not list(pack.glob("receipts/*"))
    (log,) = workbench.cache.glob("runs/*/*.log")
    assert value not in log.read_text(), "a lane does not even inherit it"


SCRUBBER = Scrubber({"/srv/ada": "$HOME"}, {"lovelace7": "the host's name"}, {"s3cr3t-value": "MY_TOKEN"})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("on lovelace7:", "the host's name"),
        ("token hf_" + "a" * 30, "a token"),
        ("Authorization: Bearer " + "x" * 24, "an authorization header"),
        ("https://ada:pw@example.org/simple", "a password in a URL"),
        ("GPU-3f2a9c11-0b7e-4a52-9d8c-0123456789ab", "a GPU UUID"),
        ("connect to 10.1.2.3 failed", "an IP address"),
        ("listening on fe80::1ff:fe23:4567:890a", "an IP address"),
        ("by ada@example.org", "an e-mail address"),
        ("in /home/ada/checkout", "a home folder"),
        ("got s3cr3t-value", "the value of MY_TOKEN"),
    ],
)
def test_what_looks_private_is_refused_by_field_and_not_repeated(text: str, what: str) -> None:
    with pytest.raises(PrivateTextError) as caught:
        SCRUBBER.document({"lanes": {"pristine": {"reason": text}}})
    assert f"receipt.lanes.pristine.reason holds {what}" in str(caught.value)
    assert text not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1", "nvidia-cublas==13.0.2.14", "std::vector<int>", "/srv/ada/x.py", "12:34:56", "a @ b.T"],
)
def test_what_only_resembles_it_is_not(text: str) -> None:
    assert "ada" not in str(SCRUBBER.document(text))


def test_a_version_that_pack_toml_states_is_no_address() -> None:
    stated = Scrubber({}, {}, {}, frozenset({"4.15.4.0"}))
    assert not list(stated.findings("z3-solver 4.15.4.0"))
    assert list(stated.findings("z3-solver 4.15.4.1")) == ["an IP address"]
