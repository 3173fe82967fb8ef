"""Stands for `gh` in the tests of the workflows: records each call, and answers as GitHub would.

The folder $GH_FOLDER holds `artifact/`, `head`, and `comments.json`, the list of comments; calls go to `calls.jsonl`.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path


def answer(document: object, arguments: list[str]) -> None:
    """Print a document through the filter that the call names, as gh does."""
    query = arguments[arguments.index("--jq") + 1]
    subprocess.run(["jq", "-r", query], input=json.dumps(document), text=True, check=True)


def body(arguments: list[str]) -> str:
    """Return the text that a call sends."""
    field = arguments[arguments.index("--field") + 1]
    return Path(field.removeprefix("body=@")).read_text(encoding="utf-8", errors="replace")


def main() -> int:
    """Answer one call."""
    folder, arguments = Path(os.environ["GH_FOLDER"]), sys.argv[1:]
    with (folder / "calls.jsonl").open("a", encoding="utf-8") as calls:
        calls.write(json.dumps(arguments) + "\n")
    if not os.environ.get("GH_TOKEN"):
        return 4
    if arguments[:2] == ["run", "download"]:
        shutil.copytree(folder / "artifact", arguments[arguments.index("--dir") + 1], symlinks=True)
        return 0
    path = folder / "comments.json"
    comments = json.loads(path.read_text(encoding="utf-8"))
    method = arguments[arguments.index("--method") + 1] if "--method" in arguments else "GET"
    endpoint = next(one for one in arguments if one.startswith("repos/"))
    if method == "POST":
        author = {"login": "github-actions[bot]"}
        comments.append({"id": 100 + len(comments), "user": author, "body": body(arguments)})
    elif method == "PATCH":
        (one,) = [one for one in comments if endpoint.endswith(f"/comments/{one['id']}")]
        one["body"] = body(arguments)
    elif "/comments" in endpoint:
        if (folder / "down").exists():
            return 1
        answer(comments, arguments)
    else:
        answer({"number": 17, "head": {"sha": (folder / "head").read_text(encoding="utf-8").strip()}}, arguments)
    path.write_text(json.dumps(comments), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
