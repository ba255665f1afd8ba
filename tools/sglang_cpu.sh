#!/usr/bin/env bash
# An environment in which SGLang 0.5.23 runs without a GPU: 2.5 minutes, 2.7 GB. Usage: PYTHON=python3.11 tools/sglang_cpu.sh [DIR]
#
# SGLang's own requirements are a GPU's (CUDA kernels, another torch), and metadata cannot leave them out for one package:
# so it is installed alone, and what it imports here is listed in sglang_cpu.txt. The kernels' package has no CPU build; the
# tests bring a stand-in (tests/standins). Safe to repeat: pip finds what stands; the stamp .ready is written last.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-.venv-sglang}
rm -f "$dir/.ready"
"${PYTHON:-python3}" -m venv "$dir"
pip=("$dir/bin/python" -m pip install -qq --disable-pip-version-check)
"${pip[@]}" torch==2.13.0
"${pip[@]}" --no-deps sglang==0.5.23 torchvision==0.28.0
# pip ends by listing what SGLang's metadata asks for and this environment leaves out: expected, and not an error.
"${pip[@]}" -r tools/sglang_cpu.txt
"${pip[@]}" --no-deps -e .
touch "$dir/.ready"
