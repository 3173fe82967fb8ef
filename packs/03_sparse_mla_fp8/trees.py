"""What the measure_*.py scripts that compare trees share: their arguments, and a child for each tree."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = str(Path(__file__).resolve().parents[2])  # contracts import its kit


def parser(title):
    """Return a parser of the arguments that name the trees."""
    made = argparse.ArgumentParser(description=title)
    made.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER")
    made.add_argument("--dependencies", default="")
    made.add_argument("--one", action="store_true", help="measure the tree on the path")
    return made


def results(script, options):
    """Run the script with --one for each tree; map its name to the JSON in the last line that it prints."""
    found = {}
    for name, folder in (text.split("=", 1) for text in options.tree):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([folder, options.dependencies, REPOSITORY])}
        command = [sys.executable, script, "--one"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            sys.exit(f"{name}: {ended.stderr[-1500:]}")
        found[name] = json.loads(ended.stdout.splitlines()[-1])
    return found
