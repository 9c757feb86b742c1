#!/usr/bin/env bash
# Writes src/gen from the protos with protoc and protoc-gen-es. google.rpc comes from the Python package
# googleapis-common-protos, which Tidegate depends on. The result is committed: it is small, and so the package
# builds with npm alone.
#   generate.sh [FOLDER]   writes there instead
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
out="${1:-$here/src/gen}"
google="$("${PYTHON:-python3}" -c 'import google.rpc; print(list(google.rpc.__path__)[0].removesuffix("google/rpc"))')"
mkdir -p "$out"
protoc -I "$here/../../protos" -I "$google" \
  --plugin="$here/node_modules/.bin/protoc-gen-es" --es_out="$out" --es_opt=target=ts,import_extension=js \
  tidegate/inference/v1/inference.proto google/rpc/status.proto google/rpc/error_details.proto
