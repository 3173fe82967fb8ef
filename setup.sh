#!/bin/sh
# Makes .venv with everything that the runner, the CPU lanes and the tests import; run again, it does nothing.
# It needs Python 3.11 or newer with venv, and git. On a host with an NVIDIA driver it installs the index's own
# (CUDA) build of PyTorch: 3 GB. Elsewhere it installs the CPU build: 0.2 GB, from a local wheel or the configured index
# where pip finds one there, else from PyTorch's public CPU index.
set -eu
exec 3>&2  # messages of this script, also where pip's first try is silent
cd "$(dirname "$0")"
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $python is older than 3.11. Next: PYTHON=python3.11 sh setup.sh" >&2
    exit 2
}
command -v git >/dev/null || {
    echo "error: git is not installed. Next: apt-get install git" >&2
    exit 2
}
stamp=.venv/.complete-$(cat pyproject.toml setup.sh | cksum | cut -d ' ' -f 1)
[ -e "$stamp" ] && exit 0

[ -x .venv/bin/python ] || "$python" -m venv .venv || {
    echo "error: venv is missing. Next: apt-get install python3-venv" >&2
    exit 2
}
install() {
    echo "setup.sh: pip install $*" >&3
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"
}
if [ -e /proc/driver/nvidia/version ]; then
    install --editable '.[gpu,test]'
else
    torch=$(sed -n 's/^cpu = .*"torch==\([0-9.]*\)".*/\1/p' pyproject.toml)
    if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
        # "+cpu" asks for the CPU build by name: the index's plain build brings gigabytes of CUDA along.
        install "torch==$torch+cpu" 2>/dev/null ||
            install "torch==$torch+cpu" --index-url https://download.pytorch.org/whl/cpu
    fi
    install --editable '.[cpu,test]'
fi
echo "setup.sh: .venv is ready; try .venv/bin/python runner.py list" >&2
touch "$stamp"
