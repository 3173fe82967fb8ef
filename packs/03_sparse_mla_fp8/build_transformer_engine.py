"""Build what `executed` needs of Transformer Engine: an environment in which its compiled parts are found.

    python build_transformer_engine.py [--files DIR] [--cache DIR]
    python ../../runner.py run 03 --target sm_90a [--cache DIR]

Run it with the interpreter that has torch (for CUDA 13), on a machine with g++ and nvcc. The core library is a wheel of
the index, pinned in pack.toml's set `library` too, from which a lane gets it. The PyTorch extension is an sdist, since
it depends on torch's ABI: it is built here (about a minute on 16 cores), and put into a new virtual environment that
also sees this interpreter's packages, as transformer_engine/wheel_lib/ there, where Transformer Engine looks for it
next after its own folder. The environment is apart because that folder would make `import transformer_engine` succeed
for everybody else: it stands in the runner's cache, under the name that pack.toml gives to the target, and the runner
uses its interpreter for this target's lanes alone. A JSON file beside the extension says what it was made from.

--files names a folder that holds the wheel and the sdist (whole, or in parts NAME.aa, NAME.ab, ... as `split` makes
them), for machines without network; --cache is the runner's. Both archives are checked by their sha256.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from harness.core import cache, files
from harness.host import nvml
from harness.lane import environment as lane_environment
from harness.pack import load
from harness.upstream import download

VERSION = "2.12.0"
NAME = "transformer-engine"  # pack.toml's word for the environment
PINNED = load.load_pack(Path(__file__).resolve().parent).definition.environments[NAME].files
CORE, EXTENSION = ((name, PINNED[name]) for name in ("transformer-engine-cu13", "transformer-engine-torch"))
CUDA_MAJOR = "13"  # what the core library was compiled for


def archive(store, given, package, digest):
    """Return the path of an archive in the runner's cache, put together from the folder `given` where that holds it."""
    name = package.replace("-", "_")
    parts = sorted(path for path in given.iterdir() if path.name.startswith(f"{name}-{VERSION}")) if given else []

    def join(folder):
        target = folder / (parts[0].name if parts[0].suffix in (".whl", ".gz") else parts[0].stem)
        with target.open("wb") as file:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file)
        if files.sha256_file(target) != digest:
            sys.exit(f"{target.name}: wrong sha256 after joining {len(parts)} files, pinned is {digest}")

    if parts:
        return next(store.populate("downloads", digest, join).iterdir())
    return download.fetch(store, package, None, digest)


def build(sdist, folder):
    """Compile the extension with this interpreter's torch, and return its path."""
    with tarfile.open(sdist) as packed:
        packed.extractall(folder, filter="data")
    source = next(folder.iterdir())
    packages = Path(torch.__file__).parents[1]
    headers = os.pathsep.join(str(path) for path in sorted(packages.glob("nvidia/*/include")))
    settings = {"NVTE_PYTORCH_FORCE_BUILD": "TRUE", "CPLUS_INCLUDE_PATH": headers, "MAX_JOBS": str(os.cpu_count())}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(command, cwd=source, env=os.environ | settings, check=True, stdout=subprocess.DEVNULL)
    return next(source.glob("transformer_engine_torch*.so"))


def environment(folder):
    """Make a virtual environment over this interpreter's packages, and return its own folder of packages."""
    venv.create(folder, symlinks=True, with_pip=False)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    packages = Path(torch.__file__).parents[1]
    (own / "packages_below.pth").write_text(f"{packages}\n", encoding="utf-8")
    if (packages / "nvidia").is_dir():  # Transformer Engine looks for cuDNN and others in the environment's own folder
        (own / "nvidia").symlink_to(packages / "nvidia")
    return own


def main():
    """Place both parts, and say where."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=Path, help="a folder with the two archives, whole or in parts")
    parser.add_argument("--cache", type=Path, default=cache.default_root(), help="the runner's cache")
    options = parser.parse_args()
    if (torch.version.cuda or "").split(".")[0] != CUDA_MAJOR:
        sys.exit(f"this torch is for CUDA {torch.version.cuda}, and the pinned core library for CUDA {CUDA_MAJOR}")
    store = cache.Cache(options.cache.resolve())
    core = archive(store, options.files, *CORE)
    sdist = archive(store, options.files, *EXTENSION)

    def make(folder):
        place = environment(folder) / "transformer_engine" / "wheel_lib"
        place.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as work:
            extension = Path(shutil.copy(build(sdist, Path(work)), place))
        record = {"sdist": sdist.name, "sdist_sha256": EXTENSION[1], "extension_sha256": files.sha256_file(extension)}
        record |= {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
        record |= {"core": core.name, "core_sha256": CORE[1]}
        text = json.dumps(record, indent=2) + "\n"
        (place / "transformer_engine_torch.json").write_text(text, encoding="utf-8")
        print(text)

    print(
        lane_environment.interpreter(
            store.populate(lane_environment.BUILT, lane_environment.environment_key(nvml.detect(), NAME), make)
        )
    )


if __name__ == "__main__":
    main()
