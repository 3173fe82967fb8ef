"""Notes each file of the tree that a process of a lane loads, with the sha256 of the bytes that are executed.

The folder of this file is the head of a lane's PYTHONPATH, so that Python imports it in every process of the lane:
after spawn, after fork (which inherits it) and in a subprocess. REPRODUCER_LOADED names the file that takes a JSON line
for each module that lies in REPRODUCER_TREE or is in REPRODUCER_MODULES.
"""

import hashlib
import json
import os
from importlib.machinery import ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader

_TREE = os.environ.get("REPRODUCER_TREE", "") + os.sep
_MODULES = set(os.environ.get("REPRODUCER_MODULES", "").split(","))
_LOADED = os.environ.get("REPRODUCER_LOADED", "")


def _is_under_test(name, path):
    return name.partition(".")[0] in _MODULES or str(path).startswith(_TREE)


def _note(name, path, data):
    if _is_under_test(name, path):
        line = json.dumps({"module": name, "file": str(path), "sha256": hashlib.sha256(data).hexdigest()}) + "\n"
        descriptor = os.open(_LOADED, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, line.encode())  # one write, so that lines of two processes do not mix
        os.close(descriptor)


def _noting(compile_source):
    def source_to_code(self, data, path, *arguments, **options):
        if isinstance(data, bytes):
            _note(self.name, path, data)
        return compile_source(self, data, path, *arguments, **options)

    return source_to_code


def _without_bytecode(path_stats):
    """Hide bytecode of the tree: its source is compiled, and so noted, each time."""

    def stats(self, path):
        if _is_under_test(self.name, path):
            raise OSError("the source is compiled anew")
        return path_stats(self, path)

    return stats


def _noting_file(load):
    def loading(self, *arguments):
        if _is_under_test(self.name, self.path):
            with open(self.path, "rb") as file:
                _note(self.name, self.path, file.read())
        return load(self, *arguments)

    return loading


if _LOADED:
    SourceFileLoader.source_to_code = _noting(SourceFileLoader.source_to_code)
    SourceFileLoader.path_stats = _without_bytecode(SourceFileLoader.path_stats)
    SourcelessFileLoader.get_code = _noting_file(SourcelessFileLoader.get_code)
    ExtensionFileLoader.create_module = _noting_file(ExtensionFileLoader.create_module)
