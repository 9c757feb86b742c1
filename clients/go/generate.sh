#!/usr/bin/env bash
# Writes inference/v1/*.pb.go from the proto. Needs protoc, protoc-gen-go and protoc-gen-go-grpc.
# The result is committed, as Go packages are used straight from their source.
#   generate.sh [FOLDER]   writes there instead
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
out="${1:-$here}"
mkdir -p "$out"
protoc -I "$here/../../protos" \
  --go_out="$out" --go_opt=module=tidegate \
  --go-grpc_out="$out" --go-grpc_opt=module=tidegate \
  tidegate/inference/v1/inference.proto
