"""The closure of a dependency set, resolved by pip from an index on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from harness.core.errors import UnavailableError
from harness.upstream import closure
from testing import toys
from testing.package_index import Shelf, served


def _wheel(folder: Path, name: str, version: str, tag: str = "py3-none-any", requires: tuple[str, ...] = ()) -> Path:
    info = f"{name}-{version}.dist-info"
    lines = "".join(f"Requires-Dist: {one}\n" for one in requires)
    members = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: more\n{lines}",
        f"{info}/RECORD": "",
    }
    members[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: toys\nRoot-Is-Purelib: true\nTag: {tag}\n"
    return toys.wheel(folder, f"{name}-{version}-{tag}.whl", members)[0]


def _resolved(
    monkeypatch: pytest.MonkeyPatch,
    wheels: list[Path],
    wanted: list[str],
    pythons: list[str],
    fixed: tuple[str, ...] = (),
) -> closure.Closure:
    files: dict[str, dict[str, bytes]] = {}
    for path in wheels:
        files.setdefault(path.name.partition("-")[0], {})[path.name] = path.read_bytes()
    with served(Shelf(files)) as url:
        for name, value in (
            ("INDEX_URL", url),
            ("EXTRA_INDEX_URL", ""),
            ("FIND_LINKS", ""),
            ("CONFIG_FILE", "/dev/null"),
        ):
            monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv("PIP_RETRIES", "0")
        return closure.resolve([Requirement(one) for one in wanted], pythons, lambda _: None, fixed)


def test_torch_and_what_only_it_needs_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheels = [
        _wheel(tmp_path, "a", "1", requires=("torch", "b", 'c; extra == "more"', 'd; python_version < "3"')),
        _wheel(tmp_path, "b", "1", requires=("e[more]",)),
        _wheel(tmp_path, "e", "1", requires=('f; extra == "more"',)),
        _wheel(tmp_path, "f", "1"),
        _wheel(tmp_path, "c", "1"),
        _wheel(tmp_path, "torch", "2", requires=("c",)),
    ]
    found = _resolved(monkeypatch, wheels, ["a", "torch"], ["3.12"])
    assert list(found.members) == ["a", "b", "e", "f"]
    assert list(found.members["a"].sha256) == ["any"]


def test_the_first_python_decides_the_version_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tag = "cp3{}-cp3{}-manylinux2014_x86_64"
    wheels = [_wheel(tmp_path, "a", "1", tag.format(n, n)) for n in (11, 12)] + [
        _wheel(tmp_path, "a", "2", tag.format(12, 12))
    ]
    found = _resolved(monkeypatch, wheels, ["a"], ["3.11", "3.12", "3.13"])
    assert (found.members["a"].version, list(found.members["a"].sha256)) == ("1", ["cp311", "cp312"])
    assert list(found.left_out) == ["3.13"]


@pytest.mark.parametrize(
    ("tag", "kept"),
    [
        ("cp38-abi3-manylinux2014_x86_64", "any"),
        ("py3-none-manylinux2014_x86_64", "any"),
        ("py2.py3-none-any", "any"),
        ("cp312-abi3-manylinux2014_x86_64", "cp312"),
        ("cp312-cp312-manylinux2014_x86_64", "cp312"),
    ],
)
def test_a_wheel_for_every_python_is_pinned_for_any(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tag: str, kept: str
) -> None:
    found = _resolved(monkeypatch, [_wheel(tmp_path, "a", "1", tag)], ["a"], ["3.12"])
    assert list(found.members["a"].sha256) == [kept]


def test_a_limit_holds_and_what_has_no_wheel_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheels = [_wheel(tmp_path, "a", "1"), _wheel(tmp_path, "a", "2")]
    assert _resolved(monkeypatch, wheels, ["a"], ["3.12"], ("a<2",)).members["a"].version == "1"
    with pytest.raises(UnavailableError, match=r"no wheels for Python 3.12: .* Next: name other versions, or --python"):
        _resolved(monkeypatch, wheels, ["a>=3"], ["3.12"])


def test_nothing_wanted_is_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _resolved(monkeypatch, [_wheel(tmp_path, "a", "1")], ["torch", "Triton"], ["3.12"]).members == {}
