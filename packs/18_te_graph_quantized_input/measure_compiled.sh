#!/usr/bin/env bash
# Run script and contract of this pack with the compiled extension of Transformer Engine, without and with fix.patch.
#
#   measure_compiled.sh FILES SITE PYTHON      Linux, a GPU, nvcc and g++, and a PYTHON with torch for CUDA 13
#
# FILES has transformer_engine and transformer_engine_cu13 as wheels, transformer_engine_torch as an sdist, all of one
# release, and their dependencies as wheels. SITE is made: both libraries lie in transformer_engine/wheel_lib.
# summarise_compiled.py makes data/compiled.json of the output.
set -eu
files=$(realpath "$1") python=$3
mkdir -p "$2"
site=$(realpath "$2") work=$(mktemp -d) pack=$(realpath "$(dirname "$0")")
for wheel in "$files"/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
tar xzf "$files"/transformer_engine_torch-*.tar.gz -C "$work"
cd "$work"/transformer_engine_torch-*
headers=$("$python" -c 'import pathlib, torch
print(*sorted(pathlib.Path(torch.__file__).parents[1].glob("nvidia/*/include")), sep=":")')
frontend=$(find "$site" -name cudnn_frontend.h -printf '%h:')
NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=$(nproc) PYTHONPATH=$site CPLUS_INCLUDE_PATH=$headers:$frontend \
    "$python" setup.py build_ext --inplace > build.log 2>&1 || { tail -30 build.log; exit 1; }
cp transformer_engine_torch*.so "$site"/transformer_engine/wheel_lib/
cp -r "$site" "$work/patched"
patch -p1 -d "$work/patched" -i "$pack/fix.patch"
for tree in "$site" "$work/patched"; do
    export PYTHONPATH=$tree PYTHONDONTWRITEBYTECODE=1
    echo "=== $([ "$tree" = "$site" ] && echo unpatched || echo patched)"
    "$python" -c 'from importlib.metadata import version
import torch, transformer_engine.pytorch, transformer_engine_torch
print("transformer-engine", version("transformer-engine"), "torch", torch.__version__, torch.cuda.get_device_name())'
    "$python" "$pack/reproduce.py" || echo "exit status $?"
    PYTHONPATH=$tree:$pack/../.. REPRODUCER_TREE=$tree REPRODUCER_MODULES=transformer_engine \
        "$python" -m pytest -q --tb=line -p kit.plugin -p no:cacheprovider -c /dev/null --rootdir "$pack" \
        "$pack/contract.py" || echo "exit status $?"
done
