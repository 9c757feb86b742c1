#!/usr/bin/env bash
# Compiles the package, the example and the conformance driver; build/driver and build/example start them.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
mkdir -p "$here/build"
"$here/node_modules/.bin/tsc" -p "$here"
for program in driver:conformance/driver example:examples/stream; do
  printf '#!/bin/sh\nexec node "%s" "$@"\n' "$here/dist/${program#*:}.js" > "$here/build/${program%%:*}"
  chmod +x "$here/build/${program%%:*}"
done
