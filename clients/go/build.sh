#!/usr/bin/env bash
# Builds build/driver and build/example without a network: in GOPATH mode, with the packages that Debian has.
# With access to Go modules, `go build ./...` works as well.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
mkdir -p "$here/build/gopath/src"
ln -sfn "$here" "$here/build/gopath/src/tidegate"
export GO111MODULE=off GOPATH="$here/build/gopath:/usr/share/gocode" GOFLAGS=
cd "$here/build/gopath/src/tidegate"
go build -o "$here/build/driver" tidegate/conformance
go build -o "$here/build/example" tidegate/examples/stream
