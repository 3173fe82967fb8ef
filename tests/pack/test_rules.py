"""What a pack.toml may state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testing import toys
from testing.workbench import Workbench

SHA256 = "0" * 64


def test_all_errors_of_a_broken_definition_come_at_once(workbench: Workbench) -> None:
    definition = workbench.lay("01_confirmed") / "pack.toml"
    toys.replace(definition, 'kind = "wrong-result"', 'kind = "opinion"\ncolour = "red"')
    toys.replace(definition, 'title = "', "title = 3 #")
    toys.replace(definition, "timeout_s = 60", 'timeout_s = "long"')
    ended = workbench.run("check")
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    for part in (
        "kind: 'opinion' is none of",
        "title: expected str",
        "extra fields found (colour)",
        "timeout_s: expected",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("[targets.cpu]", "[targets.sm_90]", "'sm_90' is not a target such as cpu, sm_80, sm_90a (with the suffix"),
        ('evidence = ["traced"]', 'evidence = ["executed"]', "executed means on a GPU"),
        ('version = "1.0"', 'version = "one"', "upstream.version: 'one' is not a version"),
        ('sha256 = "', 'sha256 = "zz', "not 64 lower-case hexadecimal digits"),
        ('kind = "', 'kind = ""', "not TOML"),
        ("timeout_s = 60", 'loads = ["/src"]', "'/src' is not a relative path"),
        ("timeout_s = 60", "ranks = 0", "ranks: '0' is not between 1 and 1024"),
        ("timeout_s = 60", "ranks = 2000", "ranks: '2000' is not between 1 and 1024"),
        ("timeout_s = 60", 'ranks = "2"', "ranks: expected int"),
        ('kind = "', 'known = 3042\nkind = "', "known: expected str"),
        ('claims = ["BITWISE_IDENTICAL"]', 'claims = ["("]', "claims"),
        ('claims = ["BITWISE_IDENTICAL"]', 'claims = [""]', "claims"),
        ('claims = ["BITWISE_IDENTICAL"]', 'claims = ["FIX_VALIDATED"]', "claims"),
        ('claims = ["BITWISE_IDENTICAL"]', 'claims = "BITWISE_IDENTICAL"', "claims"),
        ("timeout_s = 60", "timeout_s = inf", "timeout_s"),
        ("timeout_s = 60", "timeout_s = nan", "timeout_s"),
        ("timeout_s = 60", "timeout_s = " + "9" * 400, "timeout_s"),
        ("timeout_s = 60", "timeout_s = " + "9" * 5000, "pack.toml: "),
        ("timeout_s = 60", "timeout_s = " + "[" * 900 + "]" * 900, "pack.toml: "),
        ('file = "toykernel-1.0.zip"', 'file = "toykernel\\u0000.zip"', "upstream.file"),
        ('file = "toykernel-1.0.zip"', 'file = "..\\\\toykernel-1.0.zip"', "upstream.file"),
        ('package = "toykernel"', 'package = "../toykernel"', "upstream.package"),
        ("https://example.org/toykernel", "--upload-pack=touch x", "upstream.repository"),
        ('source_root = "src"', 'source_root = "../.."', "upstream.source_root"),
    ],
)
def test_a_definition_that_cannot_be_right_is_refused(tmp_path: Path, old: str, new: str, reason: str) -> None:
    pack = toys.lay(tmp_path, "01_confirmed", SHA256)
    toys.replace(pack / "pack.toml", old, new)
    assert reason in toys.refusal(pack)


ON_A_GPU = '[targets.sm_90a]\nevidence = ["executed"]\nloads = []\n'


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ("gpus = 2\nranks = 2", ""),
        ("gpus = 4", ""),
        ("gpus = 1\nranks = 4", ""),
        ("ranks = 2", "2 on 1 GPU; NCCL wants one GPU a rank (gpus = 2); write gpus = 1 where all ranks share one"),
        ("gpus = 4\nranks = 2", "2 on 4 GPUs; NCCL wants one GPU a rank (gpus = 2)"),
        ("gpus = 2\nranks = 4", "4 on 2 GPUs; NCCL wants one GPU a rank (gpus = 4)"),
    ],
)
def test_ranks_fit_the_gpus_on_which_they_execute(tmp_path: Path, stated: str, reason: str) -> None:
    pack = toys.lay(tmp_path, "01_confirmed", SHA256)
    with (pack / "pack.toml").open("a") as stream:
        stream.write(f"{ON_A_GPU}{stated}\n")
    assert (reason in toys.refusal(pack)) if reason else (toys.refusal(pack) == "")


def test_a_broken_pack_does_not_stop_the_others(workbench: Workbench) -> None:
    broken = workbench.lay("30_control_fails")
    (broken / "pack.toml").write_text("nonsense")
    workbench.lay("01_confirmed")
    status, (row,) = workbench.rows()
    assert (status, row["verdict"]) == (2, "CONFIRMED")


COMMIT = "0123456789" * 4
STATED = f"""
searched = {{ date = 2026-11-21, queries = ["scale first weight"] }}
[[threads]]
url = "https://github.com/example/toykernel/pull/3"
state = "open"
date = 2026-11-20
says = "It gives every value its own weight."
[ask]
patch = "ask.patch"
origin = "git+https://example.org/toykernel@{COMMIT}"
date = 2026-08-21
checks = ["weights", "len*"]
[upstream_tests]
files = ["tests/test_scale.py"]
origin = "git+https://example.org/toykernel@{COMMIT}"
arguments = ["-k", "scale"]
gpu = false
environment = {{ TRITON_INTERPRET = "1" }}
"""
LAST = 'fixed_in = "2.0"\n'  # the last line before the tables


def _stating(folder: Path, stated: str) -> Path:
    """Lay the sound pack, whose pack.toml states this before its tables."""
    pack = toys.lay(folder, "01_confirmed", SHA256)
    for name, package in (("tests", "pytest"), ("other", "nose")):
        toys.pin(pack, package, "9.0", "0" * 64, name=name)
    definition = pack / "pack.toml"
    definition.write_text(re.sub(r"(?m)^searched = .*\n", "", definition.read_text()))
    toys.replace(definition, LAST, LAST + stated)
    return pack


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ('kind = "file"\ntext = "File an issue."', ""),
        ('kind = "filed"\ntext = "An issue: example/toykernel#3."', ""),
        ('kind = "fixed"\ntext = "Fixed by #3."', ""),
        ('kind = "nothing"\ntext = "The size is a choice."', ""),
        ('kind = "ask"\ntext = "File it."', "action.kind: 'ask' is none of file, filed, fixed, nothing"),
        ('text = "File it."', "action.kind"),
        ('kind = "file"', "action.text"),
        ('kind = "file"\ntext = " "', "is not one sentence on one line"),
        ('kind = "file"\ntext = "File it"', "is not one sentence on one line"),
        ('kind = "file"\ntext = """File\nit."""', "is not one sentence on one line"),
        ('kind = "file"\ntext = "File it."\nwhere = "x"', "extra fields found (where)"),
    ],
)
def test_what_is_to_be_done_is_stated(tmp_path: Path, action: str, reason: str) -> None:
    pack = toys.lay(tmp_path, "01_confirmed", SHA256)
    toys.replace(pack / "pack.toml", 'kind = "file"\ntext = "Open an issue."', action)
    assert (reason in toys.refusal(pack)) if reason else (toys.refusal(pack) == "")


def test_prior_art_ask_and_suite_are_stated(tmp_path: Path) -> None:
    assert toys.refusal(_stating(tmp_path, STATED)) == ""


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('state = "open"', 'state = "stale"', "threads[0].state: 'stale' is none of open, merged, closed"),
        ('says = "', 'colour = "red"\nsays = "', "extra fields found (colour)"),
        ("github.com/example", "gitlab.com/example", "is not https://github.com/OWNER/REPO/pull/N"),
        ("/pull/3", "", "is not https://github.com/OWNER/REPO/pull/N"),
        ("date = 2026-11-20", 'date = "2026-11-20"', "threads[0].date: expected date"),
        ("date = 2026-11-20", "date = 2026-11-20T00:00:00", "threads[0].date: expected date"),
        (
            'says = "It gives every value its own weight."',
            'says = " "',
            "threads[0].says: ' ' is not a text on one line",
        ),
        ('["scale first weight"]', "[]", "searched.queries: '()' is not a list or table with at least one entry"),
        ('patch = "ask.patch"\n', "", "ask.patch: the key 'patch' is missing"),
        ('checks = ["weights", "len*"]\n', "", "ask.checks: the key 'checks' is missing"),
        ('patch = "ask.patch"', 'patch = "../ask.patch"', "is not a patch beside fix.patch"),
        ('patch = "ask.patch"', 'patch = "fix.patch"', "is not a patch beside fix.patch"),
        ('patch = "ask.patch"', 'patch = "-R.patch"', "is not a patch beside fix.patch"),
        (f'{COMMIT}"\ndate', 'main"\ndate', "ask.origin: 'git+https://example.org/toykernel@main' is not git+"),
        (f'{COMMIT}"\ndate', f'{COMMIT[:39]}"\ndate', "ask.origin: "),
        ("git+https", "git+ext::https", "ask.origin: "),
        ('patch = "ask.patch"', 'patch = "ask.patch"\nwhy = "x"', "extra fields found (why)"),
        ('files = ["tests/test_scale.py"]', "files = []", "upstream_tests.files: '()' is not a list or table"),
        ('["tests/test_scale.py"]', '["../test_scale.py"]', "'../test_scale.py' is not a relative path"),
        ('["tests/test_scale.py"]', '["--pyargs"]', "'--pyargs' is not a relative path"),
        ('["tests/test_scale.py"]', '["tests/test_scale.py::test_it"]', "is not a relative path"),
        ("[upstream_tests]", "[dependencies.tests]\n[upstream_tests]", "dependencies: they stand in requirements.txt"),
        ("TRITON_INTERPRET", "PYTHONPATH", "'PYTHONPATH' is not a variable that a pack may set"),
        ("TRITON_INTERPRET", "LD_PRELOAD", "'LD_PRELOAD' is not a variable that a pack may set"),
        ("gpu = false", "gpu = 1", "upstream_tests.gpu: expected bool"),
        ("gpu = false", "timeout_s = 0", "upstream_tests.timeout_s: '0' is not between"),
        ("[upstream_tests]", '[upstream_tests]\nlane = "x"', "extra fields found (lane)"),
    ],
)
def test_what_a_pack_states_of_upstream_is_read_strictly(tmp_path: Path, old: str, new: str, reason: str) -> None:
    assert old in STATED
    assert reason in toys.refusal(_stating(tmp_path, STATED.replace(old, new, 1)))


def test_a_list_of_urls_says_nothing_of_the_threads(tmp_path: Path) -> None:
    assert "threads" in toys.refusal(_stating(tmp_path, 'threads = ["https://example.org/toykernel/issues/1"]\n'))
