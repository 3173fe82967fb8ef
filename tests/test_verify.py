"""Bundles and receipts from strangers: sound, forged and broken ones, and the two lines that rerun a bundle."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness.pack import load
from harness.receipt import receipt, staleness
from testing import forgeries, toys
from testing.forgeries import Bundle, Sent
from testing.workbench import REPOSITORY, Workbench, confirmed, empty

NAME = "01_confirmed"
RECEIPT = "receipts/cpu.traced.json"
#: Random changes of a receipt and of a bundle; VERIFY_EXAMPLES sets another number.
EXAMPLES = int(os.environ.get("VERIFY_EXAMPLES", "300"))
#: What a pack that went on leaves of its receipts: they were made with an older probe, patch, or set.
STALE = ("probe: it was made with another", "fix: it was made with another", "dependencies.", "title: ")


def _load(repository: Path) -> ModuleType:
    """Load the verify.py of a repository."""
    spec = importlib.util.spec_from_file_location("verify_of_a_copy", repository / "verify.py")
    assert spec, "verify.py is there"
    assert spec.loader, "and is Python"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _verify(repository: Path, file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-W", "error", str(repository / "verify.py"), str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what verify.py reads of this repository, with pack 09's receipts as if its probe had just been run."""
    folder = tmp_path_factory.mktemp("repository")
    shutil.copy(REPOSITORY / "verify.py", folder)
    shutil.copytree(REPOSITORY / "harness" / "report", folder / "harness" / "report")
    for name in (forgeries.LIGER.name, "14_sparse_mla_precision"):
        shutil.copytree(REPOSITORY / "packs" / name, folder / "packs" / name)
    receipts = folder / "packs" / forgeries.LIGER.name / "receipts"
    shutil.rmtree(receipts)
    (receipts / "head").mkdir(parents=True)
    forgeries.on_cpu().write(receipts)
    forgeries.on_gpu().write(receipts)
    forgeries.of_head().write(receipts / "head")
    return folder


@pytest.fixture(scope="module")
def verify(repository: Path) -> ModuleType:
    """Load that repository's verify.py."""
    return _load(repository)


@pytest.fixture(scope="module")
def honest(repository: Path) -> Path:
    """Bundle pack 09 with the runner."""
    path = repository / "honest.zip"
    command = [sys.executable, "-W", "error", str(REPOSITORY / "runner.py"), "bundle", forgeries.LIGER.name]
    command += ["--packs", str(repository / "packs"), "-o", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    return path


def _opened(bundle: Path) -> Bundle:
    """Return a bundle to lie in, without its manifest: that follows the members."""
    with zipfile.ZipFile(bundle) as opened:
        members = {name.partition("/")[2]: opened.read(name) for name in opened.namelist()}
    del members["MANIFEST.json"]
    return Bundle(members)


def _written(sent: Sent, folder: Path) -> Path:
    folder.mkdir()
    return sent.write(folder)


def _forged_receipts(folder: Path, wanted: tuple[str, ...] | None = None) -> dict[str, tuple[Path, str]]:
    """Write the forged receipts, or those wanted; map the lie to its file and to the words that give it away."""
    found = {}
    for forgery in (one for one in forgeries.RECEIPTS if wanted is None or one.name in wanted):
        sent = forgery.base()
        honest = json.dumps([sent.document, sent.log])
        forgery.tell(sent)
        assert json.dumps([sent.document, sent.log]) != honest, f"{forgery.name} lies about nothing"
        found[forgery.name] = (_written(sent, folder / forgery.name), forgery.gives_away)
    for forged in (one for one in forgeries.TEXTS if wanted is None or one.name in wanted):
        path = _written(forgeries.on_cpu(), folder / forged.name)
        honest = path.read_text(encoding="utf-8")
        text = forged.tell(honest)
        assert text != honest, f"{forged.name} lies about nothing"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        found[forged.name] = (path, forged.gives_away)
    return found


def _forged_bundles(folder: Path, honest: Path, wanted: tuple[str, ...] | None = None) -> dict[str, tuple[Path, str]]:
    """Write the forged bundles, likewise."""
    found = {}
    for forgery in (one for one in forgeries.BUNDLES if wanted is None or one.name in wanted):
        bundle = _opened(honest)
        forgery.tell(bundle)
        found[forgery.name] = (bundle.write(folder / f"{forgery.name}.zip"), forgery.gives_away)
    for forged in (one for one in forgeries.ZIPS if wanted is None or one.name in wanted):
        path = folder / f"{forged.name}.zip"
        path.write_bytes(forged.tell(honest.read_bytes()))
        found[forged.name] = (path, forged.gives_away)
    return found


def test_what_the_forgeries_are_made_of_is_accepted(repository: Path, honest: Path, tmp_path: Path) -> None:
    files = [honest, _opened(honest).write(tmp_path / "again.zip")]
    files += [
        _written(one(), tmp_path / one.__name__) for one in (forgeries.on_cpu, forgeries.on_gpu, forgeries.of_head)
    ]
    for file in files:
        ended = _verify(repository, file)
        assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
        assert ended.stdout.endswith("all that can be checked from here holds\n")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_every_forgery_is_refuted_by_the_field_that_lies(
    verify: ModuleType, honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = _forged_receipts(tmp_path) | _forged_bundles(tmp_path, honest)
    missed = []
    for name, (path, gives_away) in forged.items():
        errors = verify.errors_of(path)
        if not any(gives_away.lower() in error.lower() for error in errors):
            missed.append(f"{name}: {gives_away!r} is not in {errors}")
    with capsys.disabled():
        sys.stdout.write(
            f"\nverify.py refuted {len(forged) - len(missed)} of {len(forged)} forged receipts and bundles\n"
        )
    assert not missed, "\n".join(missed)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_refusal_is_lines_and_never_a_traceback_or_a_terminal_escape(
    repository: Path, honest: Path, tmp_path: Path
) -> None:
    wanted = (
        "a_terminal_escape_in_the_title",
        "a_member_with_a_control_character",
        "a_value_that_is_nested_100000_deep",
        "an_integer_of_5000_digits",
        "a_lone_surrogate",
        "half_a_bundle",
        "an_encrypted_bundle",
    )
    forged = _forged_receipts(tmp_path, wanted) | _forged_bundles(tmp_path, honest, wanted)
    assert forged.keys() == {*wanted}
    for name in wanted:
        ended = _verify(repository, forged[name][0])
        assert (ended.returncode, ended.stderr) == (1, ""), name
        assert "\x1b" not in ended.stdout
        *wrong, last = ended.stdout.splitlines()
        assert wrong
        assert all(line.startswith("WRONG: ") for line in wrong)
        assert last.endswith("not to be trusted")


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:  # noqa: ANN401 - any JSON value
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, one in inside for found in _places(one, (*place, key)))]


VALUES = (
    None,
    True,
    False,
    0,
    -1,
    1,
    10**30,
    0.5,
    -1.5,
    "",
    "x",
    "$TREE/../x",
    [],
    [[]],
    {},
    {"x": 1},
    "0" * 64,
    [None],
)


def _mutated(text: str, chance: random.Random) -> str:
    """Change one value of a receipt, or leave it out, or put it elsewhere."""
    document = json.loads(text)
    place = chance.choice([one for one in _places(document) if one])
    inside = document
    for key in place[:-1]:
        inside = inside[key]
    kind = chance.randrange(3)
    if kind == 0:
        del inside[place[-1]]
    elif kind == 1 and isinstance(inside, dict):
        inside[f"{place[-1]}x"] = inside.pop(place[-1])
    else:
        inside[place[-1]] = chance.choice(VALUES)
    return json.dumps(document, indent=1)


#: Values that nothing in the repository or the log speaks of: another one is a lie only if the sender was there.
FREE = re.compile(
    r"(?m)^\s*\"(?:seconds|waited|peak_memory|left_behind|started|python|torch|triton|cuda|driver|system|cudnn|nccl"
    r"|command|strength|acknowledged|ranks|sha256|tree|repeats|agreeing|of)\":"
)


def _means_the_same(text: str, changed: str) -> bool:
    """Whether two texts are the same JSON: a space in it may have become a tab or a line end."""
    try:
        return bool(json.loads(text) == json.loads(changed))
    except ValueError:
        return False


def _only_free(old: str, new: str) -> bool:
    """Whether two receipts differ only in lines that are free."""
    first, second = old.splitlines(), new.splitlines()
    differing = {*first} ^ {*second}
    return all(FREE.match(line) for line in differing)


def test_random_changes_of_a_receipt_give_lines_and_no_exception(verify: ModuleType, tmp_path: Path) -> None:
    chance = random.Random(12)  # noqa: S311 - no secret
    path = _written(forgeries.on_gpu(), tmp_path / "sent")
    text, accepted = path.read_text(encoding="utf-8"), []
    for number in range(EXAMPLES):
        if number % 2:
            changed = _mutated(text, chance)
            path.write_text(changed, encoding="utf-8")
        else:
            data = bytearray(text.encode())
            for _ in range(chance.randrange(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            path.write_bytes(data)
            changed = data.decode(errors="replace")
        errors = verify.errors_of(path)
        assert all(isinstance(error, str) and error for error in errors)
        if not errors and not _means_the_same(text, changed) and not _only_free(text, changed):
            accepted.append(sorted({*text.splitlines()} ^ {*changed.splitlines()}))
    assert not accepted, "\n".join(map(str, accepted))


def test_random_changes_of_a_bundle_give_lines_and_no_exception(
    verify: ModuleType, honest: Path, tmp_path: Path
) -> None:
    chance = random.Random(13)  # noqa: S311 - no secret
    path, whole = tmp_path / "sent.zip", honest.read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as opened:
        content = {info.filename: opened.read(info) for info in opened.infolist()}
    for _ in range(EXAMPLES):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data)
        if not verify.errors_of(path):
            with zipfile.ZipFile(path) as opened:
                assert {info.filename: opened.read(info) for info in opened.infolist()} == content


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundle a toy pack in a repository of its own, with verify.py at its root; return that repository."""
    folder = tmp_path_factory.mktemp("sent")
    ended = confirmed(folder).run("bundle", "1", "-o", str(folder / "sent.zip"))
    assert ended.returncode == 0, ended.stderr
    shutil.copy(REPOSITORY / "verify.py", folder)
    shutil.copytree(REPOSITORY / "harness" / "report", folder / "harness" / "report")
    return folder


def test_a_sound_bundle_and_its_receipt_pass_and_the_same_pack_gives_the_same_bytes(sent: Path) -> None:
    for file in (sent / "sent.zip", sent / "packs" / NAME / RECEIPT):
        ended = _verify(sent, file)
        assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    workbench = Workbench(sent, "")
    assert workbench.run("bundle", "1", "-o", str(sent / "again.zip")).returncode == 0
    assert (sent / "again.zip").read_bytes() == (sent / "sent.zip").read_bytes()
    with zipfile.ZipFile(sent / "sent.zip") as opened:
        members = {name.partition("/")[2] for name in opened.namelist()}
    assert members >= {"README.md", "MANIFEST.json", "reproduce.py", "fix.patch", "pack.toml", RECEIPT}
    assert workbench.run("verify", str(sent / "nothing.zip")).returncode == 2


def test_a_bundle_marks_an_unchecked_commit_and_says_what_a_check_raised(tmp_path: Path) -> None:
    workbench = empty(tmp_path)
    pack = workbench.lay(NAME)
    definition, probe, template = (pack / name for name in ("pack.toml", "reproduce.py", "report.in.md"))
    definition.write_text(definition.read_text().replace("\nsource_root", "\ncommit_unchecked = true\nsource_root"))
    probe.write_text(probe.read_text().replace("measured=error,", 'reason="it raised Wrong: 3" if error else "",'))
    template.write_text(f"{template.read_text()}\n{{{{check:cpu:weights}}}}, {{{{check:cpu:weights:patched}}}}\n")
    workbench.recorded("1")
    assert "it raised Wrong: 3, -" in (pack / "REPORT.md").read_text()
    assert workbench.run("bundle", "1", "-o", str(tmp_path / "sent.zip")).returncode == 0
    with zipfile.ZipFile(tmp_path / "sent.zip") as opened:
        assert "0001, unchecked)" in opened.read(f"{NAME}/README.md").decode()
    shutil.copy(REPOSITORY / "verify.py", tmp_path)
    shutil.copytree(REPOSITORY / "harness" / "report", tmp_path / "harness" / "report")
    ended = _verify(tmp_path, tmp_path / "sent.zip")
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    report = REPOSITORY.joinpath("verify.py").read_text().replace(', unchecked"', ', checked"')
    (tmp_path / "verify.py").write_text(report)
    assert "README.md" in _verify(tmp_path, tmp_path / "sent.zip").stdout


def test_an_honest_receipt_of_any_verdict_is_accepted_and_its_deviation_noted(workbench: Workbench) -> None:
    folder = workbench.folder
    shutil.copy(REPOSITORY / "verify.py", folder)
    expected = {
        "03_fix_ineffective": "FIX_INEFFECTIVE",
        "05_patch_changes_an_output": "PATCH_BREAKS",
        "06_patch_needs_an_offset": "PATCH_STALE",
        "30_control_fails": "CONTROL_FAILED",
    }
    for behaviour in expected:
        workbench.lay(behaviour)
    assert workbench.run("run", "--record").returncode == 1
    for name, verdict in expected.items():
        ended = _verify(folder, folder / "packs" / name / RECEIPT)
        assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
        assert ended.stdout.startswith(f"note: its verdict is {verdict}; pack.toml expects CONFIRMED\n")


def test_the_two_lines_of_a_bundle_show_both_sentinels(sent: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(sent / "sent.zip") as opened:
        opened.extractall(tmp_path)
    folder = tmp_path / NAME
    shutil.copytree(toys.RESOURCES / "upstream/toykernel-1.0", folder / "CHECKOUT")
    (block,) = re.findall(r"```sh\n(.*?)\n```", (folder / "README.md").read_text(), re.DOTALL)
    lines = block.replace("uv run", sys.executable).splitlines()
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder)}
    ended = [
        subprocess.run(["sh", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False)
        for line in lines
    ]
    assert [one.returncode for one in ended] == [10, 0], ended
    assert [one.stdout.splitlines()[-1].split()[0] for one in ended] == ["BUG_REPRODUCED", "FIX_VALIDATED"]


@pytest.mark.packs
@pytest.mark.parametrize("name", sorted(path.parent.name for path in (REPOSITORY / "packs").glob("*/receipts")))
def test_the_runners_bundle_of_every_pack_is_accepted(name: str, tmp_path: Path) -> None:
    """As if its probe had just been run; where its report asks for figures that it lacks, there is no bundle yet.

    Nor is there where a receipt is of an older patch: the tree that it saw is not the one that others saw.
    """
    shutil.copy(REPOSITORY / "verify.py", tmp_path)
    shutil.copytree(REPOSITORY / "harness" / "report", tmp_path / "harness" / "report")
    shutil.copytree(REPOSITORY / "packs" / name, tmp_path / "packs" / name)
    receipts = tmp_path / "packs" / name / "receipts"
    shutil.rmtree(receipts)
    pack = load.load_pack(REPOSITORY / "packs" / name)
    for path in filter(receipt.is_receipt, sorted((REPOSITORY / "packs" / name / "receipts").rglob("*.json"))):
        if "the patch changed" in staleness.reasons(pack, receipt.load(path)):
            pytest.skip(f"{path.name} is of an older patch")
        folder = receipts / path.relative_to(REPOSITORY / "packs" / name / "receipts").parent
        folder.mkdir(parents=True, exist_ok=True)
        forgeries.honest(path).write(folder)
    command = [sys.executable, str(REPOSITORY / "runner.py"), "bundle", name, "--packs", str(tmp_path / "packs")]
    made = subprocess.run([*command, "-o", str(tmp_path / "sent.zip")], capture_output=True, text=True, check=False)
    if re.search("no such (figure|number|check)|no receipt for", made.stderr):
        pytest.skip(made.stderr)
    assert made.returncode == 0, made.stderr
    ended = _verify(tmp_path, tmp_path / "sent.zip")
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout


def test_every_committed_receipt_holds_or_was_made_with_what_the_pack_had_then() -> None:
    verify = _load(REPOSITORY)
    paths = sorted(filter(receipt.is_receipt, (REPOSITORY / "packs").glob("*/receipts/**/*.json")))
    assert paths
    wrong = {f"{path}: {error}" for path in paths for error in verify.errors_of(path) if not error.startswith(STALE)}
    assert not wrong, "\n".join(sorted(wrong))


def test_verify_is_one_file_of_the_standard_library() -> None:
    text = (REPOSITORY / "verify.py").read_text(encoding="utf-8")
    imported = set(re.findall(r"(?m)^\s*(?:from|import) (\w+)", text)) - {"__future__"}
    assert imported <= sys.stdlib_module_names


@pytest.mark.packs
def test_another_commit_than_the_pinned_one_is_refuted(tmp_path: Path) -> None:
    one = REPOSITORY / "packs/11_megatron_hybrid_linear_ce/receipts/cpu.traced.json"
    document = json.loads(one.read_text(encoding="utf-8"))
    shutil.copy(one.parent / document["log"]["file"], tmp_path)
    document["upstream"] |= {"version": "commit " + "b" * 40, "commit": "b" * 40}
    (tmp_path / one.name).write_text(json.dumps(document), encoding="utf-8")
    ended = _verify(REPOSITORY, tmp_path / one.name)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "pack.toml pins" in ended.stdout
