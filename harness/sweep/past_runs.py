"""results.json of earlier sweeps, also as older runners wrote them."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

from harness.core import strict_json, structure
from harness.core.words import Exit
from harness.sweep import run_folder
from harness.sweep.results import SCHEMA, Results


class OtherSchemaError(ValueError):
    """Results of an older or newer schema than was asked for."""


def read(folder: Path, oldest: int = 1) -> Results:
    """Read the results of one finished run, of this schema or an older one down to `oldest`.

    Schema 1 called the run a night. Schema 2 knew neither known deviations nor the day of a version that moves
    nor what a change is about: these stay empty.

    Raises:
        OSError: there are no results, or they cannot be read.
        ValueError: they are damaged, of a newer schema, or those of a run that did not end.

    """
    document = strict_json.loads((folder / run_folder.RESULTS).read_bytes())
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - an error of the file, like every other one
    found = structure.structure(_migrated(document, oldest), Results)
    if not found.finished:
        raise ValueError("the sweep was interrupted")
    names = [cell.name for cell in found.cells]
    if len(set(names)) != len(names):
        raise ValueError("a cell stands there twice")
    if found.status not in set(Exit):
        raise ValueError(f"status {found.status} is none of the runner's")
    started(found)
    return found


def started(results: Results) -> dt.datetime:
    """Return when a run began, in UTC.

    Raises:
        ValueError: it is no date and time with its zone.

    """
    moment = dt.datetime.fromisoformat(results.started)
    if moment.tzinfo is None:
        raise ValueError(f"started {results.started!r} names no time zone")
    try:
        return moment.astimezone(dt.UTC)
    except OverflowError:
        raise ValueError(f"started {results.started!r} is no date in UTC") from None


def _migrated(document: dict[str, Any], oldest: int) -> dict[str, Any]:
    """Return a document of an older schema as one of this schema."""
    schema = document.get("schema")
    if type(schema) is not int or not oldest <= schema <= SCHEMA:
        raise OtherSchemaError(f"schema {schema!r}: this runner reads {oldest} to {SCHEMA}")
    if schema == 1:
        document = {("run" if key == "night" else key): value for key, value in document.items()}
    return document
