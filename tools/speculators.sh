#!/usr/bin/env bash
# speculators 0.9.0 for the training benchmark: 40 MB in a folder of its own. Usage: tools/speculators.sh [PYTHON] [DIR]
#
# Beside .venv, not in it: its own requirements would bring torchvision's CUDA build, which breaks Transformers here, and
# another `datasets`. The benchmark puts the folder on that one contestant's PYTHONPATH, so all run on the same torch and
# Transformers. Installed without requirements: these packages are what its EAGLE-3 model imports beyond .venv's.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
dir=${2:-.cache/speculators}
rm -rf "$dir" "$dir.partial"
"$python" -m pip install -qq --disable-pip-version-check --no-deps --target "$dir.partial" \
  speculators==0.9.0 hs-connectors==0.9.0 datasets==5.1.0 dill multiprocess openai sniffio
mv "$dir.partial" "$dir"
