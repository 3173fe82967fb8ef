"""The sentinel on a script's last line, and whether its exit status agrees."""

import re
from dataclasses import dataclass

from harness.core.terminal import visible
from harness.core.words import LaneVerdict

#: The exit status with each sentinel of a script; ``git bisect run`` reads them as bad, good and skip.
STATUS = {LaneVerdict.BUG_REPRODUCED: 10, LaneVerdict.FIX_VALIDATED: 0, LaneVerdict.UNSUPPORTED: 125}
#: The reason of a lane whose script printed no sentinel; the script's exception follows, if there is one.
NO_SENTINEL = "the last line of the script is no sentinel"
#: Characters of the last line that are kept.
LONGEST_LINE = 4096
#: Bytes of the whole output that are kept, and the mark for omitted lines.
MOST_PRINTED, CUT = 4096, "[... more was printed ...]"
#: The line of a traceback that names the exception; torch.distributed puts the rank before each line of one.
EXCEPTION = re.compile(r"(?m)^(?:\[rank\d+\]: )?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*)$")


def last_line(output: str) -> str:
    """Return the last line that is not blank, without spaces at its ends."""
    return next((line.strip()[:LONGEST_LINE] for line in reversed(output.split("\n")) if line.strip()), "")


def printed(output: str) -> str:
    """Return an output for a report: the whole, or of more than MOST_PRINTED bytes, the beginning and the last line."""
    head = output[: MOST_PRINTED + 1]
    text = visible(head).strip()
    if max(len(head.encode()), len(text.encode())) <= MOST_PRINTED:
        return text
    end = f"\n{CUT}\n{visible(last_line(output)).encode()[: MOST_PRINTED // 2].decode(errors='ignore')}"
    return text.encode()[: MOST_PRINTED - len(end.encode())].decode(errors="ignore").rpartition("\n")[0] + end


@dataclass(frozen=True)
class Script:
    """The sentinel of a script."""

    verdict: LaneVerdict  # ERROR if there is no sentinel, or if the exit status does not agree
    reason: str = ""  # of UNSUPPORTED and ERROR, and of BUG_REPRODUCED if the line has one

    @property
    def text(self) -> str:
        return f"{self.verdict}: {self.reason}" if self.reason else str(self.verdict)


def read(last_line: str, status: int) -> Script:
    """Read the sentinel of a script that exited by itself with `status`."""
    word, separator, reason = last_line.partition(":")
    verdict = next((verdict for verdict in STATUS if verdict == word), None)
    if verdict is None or (separator and verdict == LaneVerdict.FIX_VALIDATED):
        return Script(LaneVerdict.ERROR, NO_SENTINEL)
    if (verdict == LaneVerdict.UNSUPPORTED or separator) and not reason.strip():
        return Script(LaneVerdict.ERROR, f"the script says {verdict} without a reason")
    expected = STATUS[verdict]
    if status != expected:
        return Script(LaneVerdict.ERROR, f"the script says {verdict}, its exit status is {status}, not {expected}")
    return Script(verdict, reason.strip())


def last_exception(text: str, of: str = "") -> str:
    """Return the line of the last exception in a log; a line that holds `of` goes before others; empty if none."""
    exceptions = EXCEPTION.findall(text)
    matching = [line for line in exceptions if of in line] or exceptions
    return matching[-1].strip() if matching else ""
