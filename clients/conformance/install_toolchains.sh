#!/usr/bin/env bash
# Installs what the clients in Node, Go, C++, Java and Ruby are built with, from Debian and npm alone.
# Idempotent: packages that are there are left alone. Needs root, or sudo without a password.
#
#   install_toolchains.sh            all languages
#   install_toolchains.sh go ruby    only these
set -euo pipefail

clients="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

declare -A packages=(
  [go]="golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev golang-google-protobuf-dev
        golang-google-genproto-dev protobuf-compiler protoc-gen-go protoc-gen-go-grpc"
  [cpp]="g++ make pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc"
  [java]="default-jdk-headless make libgrpc-java libprotobuf-java libnetty-java libguava-java libgoogle-common-protos-java
          libperfmark-java libgeronimo-annotation-1.3-spec-java libgoogle-gson-java protobuf-compiler
          protobuf-compiler-grpc-java-plugin"
  [ruby]="ruby ruby-grpc ruby-grpc-tools ruby-google-protobuf protobuf-compiler protobuf-compiler-grpc"
  [node]="nodejs npm"
)

languages=("$@")
[ ${#languages[@]} -gt 0 ] || languages=(node go cpp java ruby)

missing=()
for language in "${languages[@]}"; do
  [ -n "${packages[$language]:-}" ] || { echo "unknown language: $language (know: ${!packages[*]})" >&2; exit 2; }
  # A Node, JDK or compiler that came from elsewhere is as good as Debian's.
  for package in ${packages[$language]}; do
    case "$package" in
      nodejs) command -v node >/dev/null && continue ;;
      npm) command -v npm >/dev/null && continue ;;
      default-jdk-headless) command -v javac >/dev/null && continue ;;
      g++) command -v g++ >/dev/null && continue ;;
    esac
    dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
  done
done

if [ ${#missing[@]} -gt 0 ]; then
  as_root=()
  [ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
fi

for language in "${languages[@]}"; do
  if [ "$language" = node ]; then
    modules="$clients/node/node_modules"
    if [ "$clients/node/package-lock.json" -nt "$modules/.package-lock.json" ]; then
      (cd "$clients/node" && npm ci --no-audit --no-fund --loglevel=error)
    fi
  fi
done
