"""The two workflows for a maintainer's repository: their own shell steps, over a local one and recorded events."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from testing import clones, histories
from testing.histories import STATES, git
from testing.workbench import REPOSITORY, Workbench

GITHUB = REPOSITORY / "deploy/github"
JUDGE, COMMENT = GITHUB / "reproducer-packs.yml", GITHUB / "reproducer-packs-comment.yml"
NIGHTLY = REPOSITORY / ".github/workflows/nightly-sweep.yml"
RESOURCES = REPOSITORY / "tests/resources"
#: What these fetch comes from networks that a test has not; the bench lays it out.
FETCHED = {"Get the packs", "Set up"}
SCALE = "src/toykernel/scale.py"
MARKER = "<!-- reproducer-packs: pr-verdict -->"

needs_jq = pytest.mark.skipif(shutil.which("jq") is None, reason="no jq here; apt-get install jq")


def _workflow(path: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("ruamel.yaml").YAML(typ="safe")
    return dict(yaml.load(path.read_text(encoding="utf-8")))


def _job(path: Path) -> dict[str, Any]:
    (job,) = _workflow(path)["jobs"].values()
    return dict(job)


@dataclass
class Machine:
    """Runs the shell steps of a workflow as GitHub would: environment, conditions, outputs.

    `contexts` are what expressions read; `environment` is that of every step.
    """

    folder: Path
    contexts: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    failed: str = ""
    output: str = ""

    def value(self, path: str) -> Any:  # noqa: ANN401 - whatever an event holds
        """Look a dotted path up; what is not there is empty, as GitHub has it."""
        found: Any = self.contexts
        for name in path.split("."):
            found = found.get(name, "") if isinstance(found, dict) else ""
        return found

    def text(self, template: str) -> str:
        """Fill in the expressions of a text."""
        return re.sub(r"\$\{\{ *([\w.]+) *\}\}", lambda match: str(self.value(match[1])), template)

    def holds(self, condition: str) -> bool:
        """Evaluate `a.b == 'text'`, the one form that the steps use; no condition holds."""
        match = re.fullmatch(r"([\w.]+) == '(\w+)'", condition)
        return not condition or (match is not None and self.value(match[1]) == match[2])

    def run(self, job: dict[str, Any]) -> None:
        """Run the shell steps of a job until one fails; what is uploaded goes to `artifact`."""
        for step in job["steps"]:
            if str(step.get("uses", "")).startswith("actions/upload-artifact"):
                shutil.copytree(self.folder / step["with"]["path"], self.folder / "artifact")
            if "run" not in step or step["name"] in FETCHED or not self.holds(step.get("if", "")):
                continue
            if not self._step(step):
                self.failed = step["name"]
                return

    def _step(self, step: dict[str, Any]) -> bool:
        places = {name: str(self.folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        given = {name: self.text(str(value)) for name, value in step.get("env", {}).items()}
        shell = ["bash", "-eo", "pipefail", "-c"] if step.get("shell") == "bash" else ["bash", "-e", "-c"]
        ended = subprocess.run(
            [*shell, self.text(step["run"])],
            cwd=self.folder,
            env=os.environ | self.environment | places | given,
            capture_output=True,
            text=True,
            check=False,
        )
        self.output += ended.stdout + ended.stderr
        said = Path(places["GITHUB_OUTPUT"])
        lines = said.read_text(encoding="utf-8").splitlines() if said.exists() else []
        outputs = dict(line.split("=", 1) for line in lines)
        self.contexts.setdefault("steps", {})[step.get("id", "")] = {"outputs": outputs}
        said.unlink(missing_ok=True)
        return ended.returncode == 0


def _event(name: str, **values: str) -> dict[str, Any]:
    text = (RESOURCES / f"events/{name}.json").read_text(encoding="utf-8")
    for word, value in values.items():
        text = text.replace(f"@{word}@", value)
    return dict(json.loads(text))


def _pull_request(workbench: Workbench, files: dict[str, str], base: str = "wrong") -> Machine:
    """Lay out what actions/checkout does: the merge commit of a pull request that writes these files."""
    origin = workbench.folder / "origin"
    before = histories.commits(origin, [base])[0]
    git(origin, "checkout", "-q", "-b", "weights")
    for name, text in files.items():
        (origin / name).parent.mkdir(parents=True, exist_ok=True)
        (origin / name).write_text(text, encoding="utf-8")
    git(origin, "add", "-A")
    git(origin, "commit", "-qm", "a change")
    head = git(origin, "rev-parse", "HEAD")
    git(origin, "checkout", "-q", "main")
    git(origin, "merge", "-q", "--no-ff", "-m", "merge", "weights")
    machine = workbench.folder / "machine"
    machine.mkdir()
    git(machine, "clone", "-q", "--depth", "2", origin.as_uri(), "project")
    clones.lay(workbench, "machine/packs")
    event = _event("pull_request", HEAD=head, BASE=before)
    return Machine(machine, {"github": {"event": event}})


def _verdict(machine: Machine) -> str:
    return (machine.folder / "artifact/verdict.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [JUDGE, COMMENT, NIGHTLY], ids=lambda path: path.name)
def test_each_is_a_workflow_for_github(path: Path) -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_what_runs_the_code_can_only_read_and_what_can_write_runs_none() -> None:
    judge, comment = _workflow(JUDGE), _workflow(COMMENT)
    assert judge["permissions"] == {"contents": "read"}
    assert comment["permissions"] == {"actions": "read", "pull-requests": "write"}
    assert comment["on"]["workflow_run"]["workflows"] == [judge["name"]]
    assert "pull_request_target" not in JUDGE.read_text(encoding="utf-8") + COMMENT.read_text(encoding="utf-8")
    assert not any("uses" in step for step in _job(COMMENT)["steps"]), "it checks nothing out"
    assert "secrets." not in JUDGE.read_text(encoding="utf-8") + COMMENT.read_text(encoding="utf-8")
    for path in (JUDGE, COMMENT):
        for step in _job(path)["steps"]:
            assert "${{" not in step.get("run", ""), "what an event holds reaches a shell as a variable alone"
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/x@v1"))
    (checkout,) = [step for step in _job(JUDGE)["steps"] if step.get("uses", "").startswith("actions/checkout")]
    assert checkout["with"]["persist-credentials"] is False
    assert {step.get("name") for step in _job(JUDGE)["steps"]} >= FETCHED


def test_a_pull_request_that_fixes_it_is_green(workbench: Workbench) -> None:
    machine = _pull_request(workbench, {SCALE: STATES["right"], "README.md": "new"})
    clones.address(machine.folder / "packs", "https://example.org/us/packs")
    machine.run(_job(JUDGE))
    assert machine.failed == "", machine.output
    text = _verdict(machine)
    assert "**this change fixes it**" in text
    base, head = (git(machine.folder / "project", "rev-parse", name)[:12] for name in ("HEAD^1", "HEAD"))
    assert f"base is commit {base}, head is commit {head}" in text
    assert "(https://example.org/us/packs/blob/main/packs/01_confirmed/reproduce.py)" in text
    assert (machine.folder / "artifact/number").read_text() == "17\n"
    assert (machine.folder / "GITHUB_STEP_SUMMARY").read_text() == text


@pytest.mark.parametrize(
    ("base", "head", "failed", "sentence"),
    [
        ("right", "wrong", "Say how it ended", "this change brings it in"),
        ("wrong", "unimportable", "", "what this change does is open"),
    ],
)
def test_it_is_red_where_the_change_makes_it_worse(
    workbench: Workbench, base: str, head: str, failed: str, sentence: str
) -> None:
    machine = _pull_request(workbench, {SCALE: STATES[head]}, base)
    machine.run(_job(JUDGE))
    assert machine.failed == failed, machine.output
    assert sentence in (machine.folder / "GITHUB_STEP_SUMMARY").read_text()
    assert (sentence in _verdict(machine)) == (failed != ""), "where nothing can be said there is no comment"


def test_other_files_set_nothing_up_and_leave_no_text(workbench: Workbench) -> None:
    machine = _pull_request(workbench, {"docs/caf\u00e9 $(touch evil).md": "x"})
    machine.run(_job(JUDGE))
    assert machine.failed == "", machine.output
    assert _verdict(machine) == ""
    assert not (machine.folder / "base").exists()
    assert not list(machine.folder.rglob("evil"))


HEAD = "c" * 40


@pytest.fixture
def desk(tmp_path: Path) -> Machine:
    """Return a machine whose `gh` records, with a run before that left a text on pull request 17."""
    (tmp_path / "bin").mkdir()
    gh = tmp_path / "bin/gh"
    gh.write_text(f'#!/bin/sh\nexec {sys.executable} {RESOURCES / "gh.py"} "$@"\n')
    gh.chmod(0o755)
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact/number").write_text("17\n")
    (tmp_path / "artifact/verdict.md").write_text("three lines\n")
    (tmp_path / "head").write_text(HEAD)
    (tmp_path / "comments.json").write_text("[]")
    contexts = {"github": {"token": "a token", "event": _event("workflow_run", HEAD=HEAD)}}
    return Machine(tmp_path, contexts, {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "GH_FOLDER": str(tmp_path)})


def _comments(desk: Machine) -> list[dict[str, Any]]:
    shutil.rmtree(desk.folder / "from-run", ignore_errors=True)
    desk.run(_job(COMMENT))
    return list(json.loads((desk.folder / "comments.json").read_text()))


def _foreign(desk: Machine) -> list[dict[str, Any]]:
    """Put the comments of others there: a person who writes the marker, and another workflow."""
    others = [
        {"id": 1, "user": {"login": "somebody"}, "body": f"{MARKER}\nmine"},
        {"id": 2, "user": {"login": "github-actions[bot]"}, "body": f"other\n{MARKER}"},
    ]
    (desk.folder / "comments.json").write_text(json.dumps(others))
    return others


@needs_jq
def test_it_comments_once_and_then_updates_that_comment(desk: Machine) -> None:
    others = _foreign(desk)
    *same, own = _comments(desk)
    assert same == others
    assert own["body"].startswith(f"{MARKER}\nthree lines\n")
    assert (
        f"<sub>{HEAD}, merged into its base; from a [run](https://example.org/toykernel/actions/runs/4242)"
        in own["body"]
    )
    (desk.folder / "artifact/verdict.md").write_text("other lines\n")
    *same, after = _comments(desk)
    assert (same, after["id"]) == (others, own["id"])
    assert after["body"].startswith(f"{MARKER}\nother lines\n")
    (desk.folder / "artifact/verdict.md").write_text("")
    *same, after = _comments(desk)
    assert (same, after["id"]) == (others, own["id"])
    assert after["body"].startswith(f"{MARKER}\nNo reproducer pack judged what this pull request changes now.\n")
    assert desk.failed == ""


@needs_jq
def test_where_there_is_nothing_to_say_it_writes_nothing(desk: Machine) -> None:
    others = _foreign(desk)
    (desk.folder / "artifact/verdict.md").write_text("")
    assert _comments(desk) == others
    assert desk.failed == ""


@needs_jq
@pytest.mark.hostile("text that comes to life")
def test_a_text_mentions_nobody_and_has_an_end(desk: Machine) -> None:
    said = b"@everybody $(touch evil) `touch evil` &#64;ada &#x40;ada &commat;ada &lt; \xff" + b"@" * 90_000
    (desk.folder / "artifact/verdict.md").write_bytes(said)
    (own,) = _comments(desk)
    assert "(at)everybody $(touch evil)" in own["body"]
    assert "(and)#64;ada (and)#x40;ada (at);ada &lt;" in own["body"]
    assert not re.search("@|&#|&commat", own["body"])
    assert len(own["body"]) < 60_000
    assert not (desk.folder / "evil").exists()


@needs_jq
@pytest.mark.parametrize("number", ["", "17; touch evil", "../../17", "-1", "1" * 30 + "x", "17\n18 19"])
def test_a_number_that_is_none_is_refused(desk: Machine, number: str) -> None:
    (desk.folder / "artifact/number").write_text(number)
    assert _comments(desk) == []
    assert (desk.failed, (desk.folder / "evil").exists()) == ("Comment", False)


@needs_jq
def test_a_number_of_another_pull_request_is_refused(desk: Machine) -> None:
    (desk.folder / "head").write_text("d" * 40)
    assert _comments(desk) == []
    assert "pull request 17 is at another commit by now" in desk.output


@needs_jq
def test_a_link_in_the_artifact_is_not_followed(desk: Machine) -> None:
    (desk.folder / "artifact/verdict.md").unlink()
    (desk.folder / "artifact/verdict.md").symlink_to("/proc/self/environ")
    assert _comments(desk) == []
    assert desk.failed == "Comment"


@needs_jq
def test_a_list_of_comments_that_cannot_be_had_is_not_an_empty_one(desk: Machine) -> None:
    (desk.folder / "down").touch()
    assert _comments(desk) == []
    assert desk.failed == "Comment"
