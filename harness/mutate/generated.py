"""Generated mutants: parts of the fix left out, and the operators on what it adds and on the functions it touches."""

from __future__ import annotations

import ast
import functools
import itertools
import types
from collections import Counter
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

    old: dict[str, str | None]
    new: dict[str, str | None]
    runs: Mapping[str, list[Change]] = field(default_factory=dict)

    @property
    def changed(self) -> dict[str, str | None]:
        """The files that differ, as they are with it."""
        return {path: text for path, text in self.new.items() if text != self.old[path]}


def fix_of(pack: Pack, pristine: Tree) -> Fix:
    """Read what the pack's patch does to its pinned tree; ValueError is raised where it does not fit."""
    return read(pack.patch.read_text(encoding="utf-8"), pack, pristine)


def on_pinned(path: str, pack: Pack, pristine: Tree) -> str | None:
    """Return the text of a file of the pinned tree by its path upstream; None where it is not there."""
    file = pristine.folder / pristine.path_here(path, pack.definition.upstream.source_root)
    return file.read_bytes().decode() if file.is_file() else None


def read(text: str, pack: Pack, pristine: Tree, base: Fix | None = None) -> Fix:
    """Read what a patch makes of the pinned tree of a pack.

    `base` is what the tree that it is made for has already; what comes out is both together. ValueError is raised where
    it does not fit, or its index lines tell of other files.
    """
    parsed, stated = changes.parse(text), {file.path: file for file in patch.parse(text)}
    old = {path: on_pinned(path, pack, pristine) for path in parsed} | (base.old if base else {})
    new = old | (base.new if base else {})
    for path, runs in parsed.items():
        before, header = new[path], f"diff --git a/{path} b/{path}\n"
        if before is not None and f"{header}new file" in text:
            raise ValueError(f"{path}: it is there already")
        after = None if f"{header}deleted file" in text else changes.applied(before or "", runs)
        said = stated.get(path)
        if said and said.after and (said.before, said.after) != (patch.blob(before), patch.blob(after)):
            which = "that it changes" if said.before != patch.blob(before) else "that it makes"
            raise ValueError(f"{path}: its index line names another file {which}")
        new[path] = after
    return Fix(old, new, parsed)


def made_by(one: Mutant, pack: Pack, pristine: Tree, fix: Fix) -> Fix:
    """Read what a mutant makes of the pinned tree; ValueError is raised where it does not fit."""
    if not patch.outcome(one.patch):  # its context would not be compared with the tree
        raise ValueError("its index line is abbreviated; use git diff --full-index")
    return read(one.patch, pack, pristine, None if one.is_whole else fix)


def on_release(one: Mutant, pack: Pack, pristine: Tree, fix: Fix) -> Mutant:
    """Return a mutant with the patch that takes fix.patch's place in a lane, or with why there is none."""
    if one.on_release:
        return one
    try:
        made = made_by(one, pack, pristine, fix)
    except ValueError as error:
        return replace(one, misfit=str(error))
    return replace(one, on_release=changes.written(f"{one.why}\n", made.old, made.new))


def candidates(fix: Fix, loads: tuple[str, ...]) -> list[Candidate]:
    """List every mutant that can be made of a fix: in the files that a target claims to load, or else in all.

    What does not parse, and what is the fix itself, is told apart only when one is taken: parsing takes long.
    """
    chosen = [path for path in fix.runs if path in loads] or list(fix.runs)
    names: Counter[str] = Counter()
    unique = []
    for one in itertools.chain.from_iterable(_of_file(fix, path) for path in chosen):
        names[one.name] += 1
        number = names[one.name]
        unique.append(one if number == 1 else replace(one, name=f"{one.name} ({number})"))
    return unique


def _of_file(fix: Fix, path: str) -> Iterator[Candidate]:
    old, new, runs = fix.old[path], fix.new[path], fix.runs[path]
    if len(fix.runs) > 1:
        yield Candidate(f"{path} file: left out", "file", path, lambda: old)
    for said, left_out, rest in _parts(runs):
        name = f"{path}:{left_out.start + 1} {said} left out"
        yield Candidate(name, said.partition(":")[0], path, functools.partial(changes.applied, old or "", rest))
    if new is None or not path.endswith(".py"):
        return
    try:
        source = Source(new)
    except SyntaxError:
        return
    added = changes.lines_in_new(runs)
    for edit in operators.edits(source, operators.touched_lines(source.tree, added)):
        name = f"{path}:{edit.line} {edit.operator}: {edit.what}"
        yield Candidate(name, edit.operator, path, functools.partial(source.edited, edit), edit.line in added)


def _parts(runs: list[Change]) -> Iterator[tuple[str, Change, list[Change]]]:
    """Yield each part of a patch that can be left out: its words, its first run, and all that is left.

    A hunk is left out where there are several. It is halved between its runs where it has several, else between the
    lines that it adds.
    """
    hunks = [list(some) for _, some in itertools.groupby(runs, lambda run: run.hunk)]
    for hunk in hunks if len(hunks) > 1 else []:
        yield f"hunk: {hunk[0].hunk}", hunk[0], [run for run in runs if run not in hunk]
    for hunk in hunks:
        run, middle = hunk[0], len(hunk) // 2
        first, second = hunk[:middle], hunk[middle:]
        if len(hunk) == 1:
            middle = len(run.added) // 2
            if run.added[:middle] == run.added[len(run.added) - middle :]:
                continue
            first, second = [replace(run, added=run.added[:middle])], [replace(run, added=run.added[middle:])]
        others = [other for other in runs if other not in hunk]
        yield f"half: first half of hunk {run.hunk}", first[0], [*others, *second]
        yield f"half: second half of hunk {run.hunk}", second[0], [*others, *first]


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


@dataclass(frozen=True)
class Maker:
    """Makes mutants of a fix: only what parses, and nothing twice."""

    fix: Fix
    _seen: set[tuple[str, str]] = field(default_factory=set)

    def make(self, one: Candidate) -> Mutant | None:
        """Make a mutant; None where it does not parse, is the pristine tree, or was made before under another name."""
        try:
            text = one.text()
            said, code = _code(one.path, text)
        except (SyntaxError, ValueError):
            return None
        new = {**self.fix.new, one.path: text}
        if new == self.fix.old or (one.path, said) in self._seen:
            return None
        self._seen.add((one.path, said))
        of_fix = _code(one.path, self.fix.new[one.path])
        same = "the same bytecode as the fix" if code is not None and code == of_fix[1] else ""
        same = "the same syntax tree as the fix" if said == of_fix[0] else same
        head = f"{one.name}: generated\n"
        small, whole = (changes.written(head, base, new) for base in (self.fix.new, self.fix.old))
        sha256 = patch.outcome(whole)
        return Mutant(one.name, Origin.GENERATED, one.operator, small, sha256, same, on_release=whole)


@functools.lru_cache(maxsize=8)  # that of the fix is compared with each of its mutants
def _code(path: str, text: str | None) -> tuple[str, types.CodeType | None]:
    """Return what a file says, without its layout, and its code; of what is no Python its text.

    Kernels are not lowered to compare their IR: that takes as long as the lane that judges them.
    """
    if text is None or not path.endswith(".py"):
        return files.key_of(text), None
    tree = python_ast.parse(text)
    return files.key_of(ast.dump(tree)), _without_lines(compile(text, "mutant", "exec", dont_inherit=True))


def _without_lines(code: types.CodeType) -> types.CodeType:
    """Return code that is equal to any other that does the same, wherever their lines stand."""
    consts = (_without_lines(one) if isinstance(one, types.CodeType) else one for one in code.co_consts)
    return code.replace(co_consts=tuple(consts), co_firstlineno=1, co_linetable=b"")


def sample(fix: Fix, found: list[Candidate], wanted: int, seed: int) -> list[Mutant]:
    """Make so many mutants of candidates: the same seed gives the same ones."""
    made = filter(None, map(Maker(fix).make, ranked(found, seed)))
    return list(itertools.islice(made, wanted))
