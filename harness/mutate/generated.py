"""Generated mutants: parts of the fix left out, and the operators on what it adds and on the functions it touches."""

from __future__ import annotations

import ast
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from harness.core import files, python_ast
from harness.mutate import changes, operators
from harness.mutate.changes import Change
from harness.mutate.mutants import Mutant, Origin
from harness.mutate.operators import Source
from harness.pack.model import Pack
from harness.upstream import patch
from harness.upstream.tree import Tree

#: Parts of the fix left out: few, and the likeliest mistakes, so that a sample has them all first.
PARTS = ("file", "hunk")


@dataclass(frozen=True)
class Candidate:
    """A mutant that can be made."""

    name: str
    operator: str
    path: str  # of the file that differs from the fixed one, in the upstream repository
    text: Callable[[], str | None] = field(compare=False, repr=False)  # makes that file; None where it is not there
    added: bool = True  # whether it changes a line that the patch adds


@dataclass(frozen=True)
class Fix:
    """The files that a patch changes: as they were, as they are with it, and the runs of lines that it changes."""

    old: Mapping[str, str | None]
    new: Mapping[str, str | None]
    runs: Mapping[str, tuple[Change, ...]]

    @property
    def changed(self) -> dict[str, str | None]:
        """The files that differ, as they are with it."""
        return {path: text for path, text in self.new.items() if text != self.old[path]}


def fix_of(pack: Pack, pristine: Tree) -> Fix:
    """Read what the pack's patch does to its pinned tree.

    Raises:
        ValueError: it does not fit the tree.

    """
    return read(pack.patch.read_text(encoding="utf-8"), pack, pristine)


def read(text: str, pack: Pack, pristine: Tree, under: Fix | None = None) -> Fix:
    """Read what a patch makes of the pinned tree of a pack.

    Args:
        text: the patch.
        pack: whose upstream it is for.
        pristine: the pinned tree.
        under: what the tree has already that the patch is made for; what comes out is both together.

    Raises:
        ValueError: it does not fit the tree, or its index lines tell of other files.

    """
    parsed, stated = changes.parse(text), {file.path: file for file in patch.parse(text)}
    old, new = (dict(under.old), dict(under.new)) if under else ({}, {})
    for path, runs in parsed.items():
        if path not in old:
            file = pristine.folder / pristine.path_here(path, pack.definition.upstream.source_root)
            old[path] = new[path] = file.read_bytes().decode() if file.is_file() else None
        before, header = new[path], f"diff --git a/{path} b/{path}\n"
        if before is not None and f"{header}new file" in text:
            raise ValueError(f"{path}: it is there already")
        after = None if f"{header}deleted file" in text else changes.applied(before or "", runs)
        said = stated.get(path)
        if said and said.after and (said.before, said.after) != (patch.blob(before), patch.blob(after)):
            which = "that it changes" if said.before != patch.blob(before) else "that it makes"
            raise ValueError(f"{path}: its index line names another file {which}")
        new[path] = after
    return Fix(old, new, {path: tuple(runs) for path, runs in parsed.items()})


def on_release(one: Mutant, pack: Pack, pristine: Tree, fix: Fix) -> Mutant:
    """Return a mutant with the patch that takes fix.patch's place in a lane, or with why there is none."""
    if one.on_release:
        return one
    if not patch.outcome(one.patch):  # its context would not be compared with the tree
        return replace(one, misfit="its index line is abbreviated. Next: runner.py mutate --rebase")
    try:
        made = read(one.patch, pack, pristine, None if one.is_whole else fix)
    except ValueError as error:
        return replace(one, misfit=str(error))
    return replace(one, on_release=changes.written(one.why, made.old, made.new))


def candidates(fix: Fix, loads: tuple[str, ...]) -> list[Candidate]:
    """List every mutant that can be made of a fix: in the files that a target claims to load, or else in all.

    What does not parse, and what is the fix itself, is told apart only when one is taken: parsing takes long.
    """
    chosen = [path for path in fix.runs if path in loads] or list(fix.runs)
    found = list(itertools.chain.from_iterable(_of_file(fix, path) for path in chosen))
    names: dict[str, int] = {}
    unique = []
    for one in found:
        names[one.name] = number = names.get(one.name, 0) + 1
        name = one.name if number == 1 else f"{one.name} ({number})"
        unique.append(Candidate(name, one.operator, one.path, one.text, one.added))
    return unique


def _of_file(fix: Fix, path: str) -> Iterator[Candidate]:
    old, new, runs = fix.old[path], fix.new[path], fix.runs[path]
    if len(fix.runs) > 1:
        yield Candidate(f"{path} file: left out", "file", path, lambda: old)
    hunks = sorted({run.hunk for run in runs})
    for hunk in hunks if len(hunks) > 1 else []:
        yield _without(path, old, runs, [run for run in runs if run.hunk == hunk], f"hunk: {hunk} left out")
    for hunk in hunks:
        for said, left_out in _halves([run for run in runs if run.hunk == hunk]):
            yield _without(path, old, runs, left_out, f"half: {said} of hunk {hunk} left out")
    if new is None or not path.endswith(".py"):
        return
    try:
        source = Source(new)
    except SyntaxError:
        return
    added = changes.lines_in_new(runs)
    for edit in operators.edits(source, operators.touched_lines(source.tree, added)):
        name = f"{path}:{edit.line} {edit.operator}: {edit.what}"

        def made(edit: operators.Edit = edit) -> str:
            return source.edited(edit)

        yield Candidate(name, edit.operator, path, made, edit.line in added)


def _without(path: str, old: str | None, runs: tuple[Change, ...], left_out: list[Change], said: str) -> Candidate:
    """Make the candidate whose file has only the other runs; a run in `left_out` may be a part of one."""
    rest = [part for run in runs for part in _rest(run, left_out)]
    name = f"{path}:{left_out[0].start + 1} {said}"
    return Candidate(name, said.partition(":")[0], path, lambda: changes.applied(old or "", rest))


def _rest(run: Change, left_out: list[Change]) -> list[Change]:
    """Return what is left of a run: nothing, all of it, or the lines that stand in no part that is left out."""
    if run in left_out:
        return []
    cut = next(
        (one for one in left_out if one.start == run.start and one.added and len(one.added) < len(run.added)), None
    )
    if cut is None:
        return [run]
    middle = len(cut.added)
    kept = run.added[middle:] if run.added[:middle] == cut.added else run.added[: len(run.added) - middle]
    return [Change(run.path, run.hunk, run.start, run.removed, kept)]


def _halves(runs: list[Change]) -> list[tuple[str, list[Change]]]:
    """Split a hunk: between its runs of lines where it has several, else between the lines that it adds."""
    if len(runs) > 1:
        middle = len(runs) // 2
        return [("first half", runs[:middle]), ("second half", runs[middle:])]
    run = runs[0]
    middle = len(run.added) // 2
    if not middle or run.added[:middle] == run.added[-middle:]:
        return []
    first, second = run.added[:middle], run.added[middle:]
    return [
        (said, [Change(run.path, run.hunk, run.start, run.removed, part)])
        for said, part in (("first half", first), ("second half", second))
    ]


def ranked(found: list[Candidate], seed: int) -> list[Candidate]:
    """Order candidates for a sample: parts left out first, then the operators in turn, within each as `seed` has it.

    Lines that the patch adds come before the others of the functions it touches. The place of a candidate hangs on
    its own name alone, so that one that comes or goes moves no other.
    """
    groups: dict[str, list[Candidate]] = {}
    for one in sorted(found, key=lambda one: (not one.added, files.key_of(seed, one.name))):
        groups.setdefault(one.operator, []).append(one)
    first = [one for name in PARTS for one in groups.pop(name, [])]
    turns = itertools.zip_longest(*(groups[name] for name in sorted(groups)))
    return [*first, *(one for turn in turns for one in turn if one is not None)]


@dataclass
class Maker:
    """Makes mutants of a fix: only what parses, and nothing twice."""

    fix: Fix
    _seen: set[tuple[str, str]] = field(default_factory=set)
    _codes: dict[str, tuple[str, types.CodeType | None]] = field(default_factory=dict)

    def make(self, one: Candidate) -> Mutant | None:
        """Make a mutant; None where it does not parse, is the pristine tree, or was made before under another name."""
        try:
            text = one.text()
            code = _code(one.path, text)
        except (SyntaxError, ValueError):
            return None
        new = {**self.fix.new, one.path: text}
        if new == self.fix.old or (one.path, code[0]) in self._seen:
            return None
        self._seen.add((one.path, code[0]))
        if one.path not in self._codes:
            self._codes[one.path] = _code(one.path, self.fix.new[one.path])
        same = _same(code, self._codes[one.path])
        why = f"{one.name}: generated"
        small, whole = (changes.written(why, base, new) for base in (self.fix.new, self.fix.old))
        sha256 = patch.outcome(whole)
        return Mutant(one.name, Origin.GENERATED, one.operator, small, sha256, same, on_release=whole)


def _code(path: str, text: str | None) -> tuple[str, types.CodeType | None]:
    """Return what a file says, without its layout, and its code; of what is no Python its text."""
    if text is None or not path.endswith(".py"):
        return files.key_of(text), None
    tree = python_ast.parse(text)
    return files.key_of(ast.dump(tree)), compile(text, "mutant", "exec", dont_inherit=True)


def _same(one: tuple[str, types.CodeType | None], other: tuple[str, types.CodeType | None]) -> str:
    """Say why two files are trivially the same; empty where they are not.

    Kernels are not lowered to compare their IR: that takes as long as the lane that judges them.
    """
    if one[0] == other[0]:
        return "the same syntax tree as the fix"
    if one[1] is not None and other[1] is not None and _same_code(one[1], other[1]):
        return "the same bytecode as the fix"
    return ""


def _same_code(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two code objects do the same, wherever their lines stand."""
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_exceptiontable")
    if any(getattr(one, name) != getattr(other, name) for name in names) or len(one.co_consts) != len(other.co_consts):
        return False
    return all(
        _same_code(left, right)
        if isinstance(left, types.CodeType) and isinstance(right, types.CodeType)
        else repr(left) == repr(right)  # 0 == False == 0.0, and they are not the same
        for left, right in zip(one.co_consts, other.co_consts, strict=True)
    )


def sample(fix: Fix, found: list[Candidate], wanted: int, seed: int, first: tuple[str, ...] = ()) -> list[Mutant]:
    """Make so many mutants.

    Args:
        fix: what they are made of.
        found: the candidates.
        wanted: how many; fewer where there are not so many.
        seed: of the sample: the same one gives the same mutants.
        first: names of those that come first, and besides where the sample has not got them.

    """
    maker, order = Maker(fix), ranked(found, seed)
    made: list[Mutant] = []
    for one in order:
        mutant = maker.make(one) if len(made) < wanted else None
        made += [mutant] if mutant else []
    names = {one.name for one in made}
    besides = (maker.make(one) for one in order if one.name in first and one.name not in names)
    every = [*(one for one in besides if one is not None), *made]
    return sorted(every, key=lambda one: one.name not in first)
