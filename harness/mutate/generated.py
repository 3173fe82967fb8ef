"""Generated mutants: parts of the fix are left out, and operators edit the functions that it touches."""

import ast
import functools
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from harness.core import files
from harness.mutate import changes, operators
from harness.mutate.changes import Change
from harness.mutate.operators import Source
from harness.pack import Pack, patch_text
from harness.receipt.strength import Mutant, Origin
from harness.upstream.tree import Tree

#: The first operators of a sample: they leave a file or a hunk of the fix out, the likeliest mistakes.
PARTS = ("file", "hunk")


@dataclass(frozen=True)
class Candidate:
    """A mutant that can be made."""

    name: str
    operator: str
    path: str  # of the file that differs from the fixed one, in the upstream repository
    text: Callable[[], str | None] = field(compare=False, repr=False)  # makes that file; None: the mutant lacks it
    added: bool = True  # whether it changes a line that the patch adds


@dataclass(frozen=True)
class Fix:
    """The files that a patch changes, by their paths; the text of a missing file is None."""

    old: dict[str, str | None]  # without the patch
    new: dict[str, str | None]  # with it
    runs: Mapping[str, list[Change]] = field(default_factory=dict)

    @property
    def changed(self) -> dict[str, str | None]:
        """The new texts of the files that differ."""
        return {path: text for path, text in self.new.items() if text != self.old[path]}


def fix_of(pack: Pack, pristine: Tree) -> Fix:
    """Read what fix.patch does to the pinned tree. ValueError: it does not fit."""
    return read(pack.patch.read_text(encoding="utf-8"), pack, pristine)


def read(text: str, pack: Pack, pristine: Tree, base: Fix | None = None) -> Fix:
    """Read what a patch makes of the pinned tree of a pack.

    A patch on top of another one has that as its `base`; the result is of both together. ValueError is raised where the
    patch does not fit, or its index lines name other files.
    """
    parsed, index_lines = changes.parse(text), {file.path: file for file in patch_text.parse(text)}
    base, root = base or Fix({}, {}), pack.definition.upstream.source_root
    pinned = {path: pristine.folder / pristine.path_here(path, root) for path in parsed}
    old = {path: file.read_bytes().decode() if file.is_file() else None for path, file in pinned.items()} | base.old
    new = old | base.new
    for path, runs in parsed.items():
        old_text, header = new[path], f"diff --git a/{path} b/{path}\n"
        if old_text is not None and f"{header}new file" in text:
            raise ValueError(f"{path}: it is there already")
        new_text = None if f"{header}deleted file" in text else changes.apply(old_text or "", runs)
        index_line, blobs = index_lines.get(path), (patch_text.blob(old_text), patch_text.blob(new_text))
        if index_line and index_line.after and (index_line.before, index_line.after) != blobs:
            which = "that it changes" if index_line.before != blobs[0] else "that it makes"
            raise ValueError(f"{path}: its index line names another file {which}")
        new[path] = new_text
    return Fix(old, new, parsed)


def effect(mutant: Mutant, pack: Pack, pristine: Tree, fix: Fix) -> Fix:
    """Read what a mutant makes of the pinned tree. ValueError: it does not fit."""
    if not patch_text.result_hash(mutant.patch):  # its context would not be compared with the tree
        raise ValueError("its index line is abbreviated; use git diff --full-index")
    return read(mutant.patch, pack, pristine, None if mutant.is_whole else fix)


def candidates(fix: Fix, loads: tuple[str, ...]) -> list[Candidate]:
    """List every candidate of a fix, in the files that a target loads, or else in all.

    `made` finds those that do not parse, or are the fix itself: parsing all of them would take too long.
    """
    paths = [path for path in fix.runs if path in loads] or list(fix.runs)
    counts: Counter[str] = Counter()
    unique = []
    for candidate in itertools.chain.from_iterable(_file_candidates(fix, path) for path in paths):
        counts[candidate.name] += 1
        number = counts[candidate.name]
        unique.append(candidate if number == 1 else replace(candidate, name=f"{candidate.name} ({number})"))
    return unique


def _file_candidates(fix: Fix, path: str) -> Iterator[Candidate]:
    old, new, runs = fix.old[path], fix.new[path], fix.runs[path]
    if len(fix.runs) > 1:
        yield Candidate(f"{path} file: left out", "file", path, lambda: old)
    for part, left_out, remaining in _parts(runs):
        name = f"{path}:{left_out.start + 1} {part} left out"
        yield Candidate(name, part.partition(":")[0], path, functools.partial(changes.apply, old or "", remaining))
    if new is None or not path.endswith(".py"):
        return
    try:
        source = Source(new)
    except SyntaxError:
        return
    added = changes.lines_in_new(runs)
    for edit in operators.edits(source, operators.touched_lines(source.tree, added)):
        name = f"{path}:{edit.line} {edit.operator}: {edit.description}"
        yield Candidate(name, edit.operator, path, functools.partial(source.edited, edit), edit.line in added)


def _parts(runs: list[Change]) -> Iterator[tuple[str, Change, list[Change]]]:
    """Yield each part of a file's patch that can be left out: its name, its first run, and all remaining runs.

    A part is a hunk, where there are several, or half a hunk. A hunk of several runs is halved between them, and a hunk
    of one run between the lines that it adds.
    """
    hunks = [list(group) for _, group in itertools.groupby(runs, lambda run: run.hunk)]
    for hunk in hunks if len(hunks) > 1 else []:
        yield f"hunk: {hunk[0].hunk}", hunk[0], [run for run in runs if run not in hunk]
    for hunk in hunks:
        run, middle = hunk[0], len(hunk) // 2
        upper, lower = hunk[:middle], hunk[middle:]
        if len(hunk) == 1:
            middle = len(run.added) // 2
            if run.added[:middle] == run.added[len(run.added) - middle :]:
                continue
            upper, lower = [replace(run, added=run.added[:middle])], [replace(run, added=run.added[middle:])]
        outside = [other_run for other_run in runs if other_run not in hunk]
        yield f"half: first half of hunk {run.hunk}", upper[0], [*outside, *lower]
        yield f"half: second half of hunk {run.hunk}", lower[0], [*outside, *upper]


def _ranking(pool: list[Candidate], seed: int) -> list[Candidate]:
    """Order candidates for a sample: `PARTS` first, then the operators in turn.

    Within an operator, added lines come before the other lines of their functions. Then a hash of the seed and the
    candidate's own name decides, so that another candidate changes nothing in the order.
    """
    groups: dict[str, list[Candidate]] = {}
    for candidate in sorted(pool, key=lambda candidate: (not candidate.added, files.key_of(seed, candidate.name))):
        groups.setdefault(candidate.operator, []).append(candidate)
    parts = [candidate for name in PARTS for candidate in groups.pop(name, [])]
    turns = itertools.zip_longest(*(groups[name] for name in sorted(groups)))
    return [*parts, *(candidate for turn in turns for candidate in turn if candidate is not None)]


def made(fix: Fix, pool: Iterable[Candidate]) -> Iterator[Mutant]:
    """Make mutants of candidates: only those that parse and are not the pristine tree, and none under two names."""
    keys: set[tuple[str, str]] = set()
    for candidate in pool:
        path, head = candidate.path, f"{candidate.name}: generated\n"
        try:
            text = candidate.text()
            syntax, code = _code(path, text)
        except (SyntaxError, ValueError):
            continue
        new = {**fix.new, path: text}
        if new == fix.old or (path, syntax) in keys:
            continue
        keys.add((path, syntax))
        fix_syntax, fix_code = _code(path, fix.new[path])
        equivalence = "the same bytecode as the fix" if code is not None and code == fix_code else ""
        equivalence = "the same syntax tree as the fix" if syntax == fix_syntax else equivalence
        small, whole = (changes.format_patch(head, base, new) for base in (fix.new, fix.old))
        yield Mutant(
            candidate.name,
            Origin.GENERATED,
            candidate.operator,
            small,
            patch_text.result_hash(whole),
            equivalence,
            release_patch=whole,
        )


@functools.lru_cache(maxsize=8)  # each mutant is compared with the same fix
def _code(path: str, text: str | None) -> tuple[str, types.CodeType | None]:
    """Return the hash of a file's syntax tree, and its bytecode; without bytecode the hash of its text."""
    if text is None or not path.endswith(".py"):
        return files.key_of(text), None
    tree = ast.parse(text)
    return files.key_of(ast.dump(tree)), _without_lines(compile(text, "mutant", "exec", dont_inherit=True))


def _without_lines(code: types.CodeType) -> types.CodeType:
    """Return code without line numbers, to compare it."""
    consts = (_without_lines(const) if isinstance(const, types.CodeType) else const for const in code.co_consts)
    return code.replace(co_consts=tuple(consts), co_firstlineno=1, co_linetable=b"")


def sample(fix: Fix, pool: list[Candidate], number: int, seed: int) -> list[Mutant]:
    """Make a number of mutants of candidates. The same seed gives the same mutants."""
    return list(itertools.islice(made(fix, _ranking(pool, seed)), number))
