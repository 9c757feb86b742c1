#!/usr/bin/env bash
# Builds the library, the example and the conformance driver.
set -euo pipefail
exec make -C "$(dirname "$0")" --no-print-directory -s all
