#!/usr/bin/env bash
# Installs arize-phoenix, a receiver of traces, for tests/telemetry/test_phoenix.py: into a virtual environment of its
# own, since it pins many packages. Prints the environment's interpreter.
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
environment="$root/.cache/phoenix"
if [ ! -x "$environment/bin/phoenix" ]; then
  "${PYTHON:-$root/.venv/bin/python}" -m venv "$environment"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "arize-phoenix>=12"
fi
echo "$environment/bin/python"
