#!/usr/bin/env bash
# Makes the generated code and the starters build/driver and build/example.
# Generated code is made here, not committed: that of protoc before 4.22 does not load with google-protobuf 4.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
protos="$here/../../protos"
mkdir -p "$here/build/gen"
if [ "$protos/tidegate/inference/v1/inference.proto" -nt "$here/build/gen/.made" ]; then
  grpc_tools_ruby_protoc -I "$protos" --ruby_out="$here/build/gen" --grpc_out="$here/build/gen" \
    tidegate/inference/v1/inference.proto
  touch "$here/build/gen/.made"
fi
for program in driver:conformance/driver example:examples/stream; do
  printf '#!/bin/sh\nexec ruby -I "%s" -I "%s" "%s" "$@"\n' "$here/lib" "$here/build/gen" "$here/${program#*:}.rb" \
    > "$here/build/${program%%:*}"
  chmod +x "$here/build/${program%%:*}"
done
