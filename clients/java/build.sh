#!/usr/bin/env bash
# Builds build/tidegate-client.jar, the example and the conformance driver with javac and the jars that Debian has.
# Generated code is made here, not committed: it is large, and tied to the protobuf-java of its own protoc.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here"
protos="$here/../../protos"
stamp=build/.made
[ -n "$(find . "$protos/tidegate/inference" -path ./build -prune -o -newer $stamp \( -name '*.java' -o -name '*.sh' -o -name '*.proto' \) -type f -print -quit 2>&1)" ] || exit 0

jars=/usr/share/java
classpath="$(printf ":$jars/%s.jar" grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite \
  grpc-stub guava failureaccess perfmark-api protobuf protobuf-util gson geronimo-annotation-1.3-spec netty-buffer \
  netty-codec netty-codec-http netty-codec-http2 netty-common netty-handler netty-handler-proxy netty-resolver \
  netty-transport netty-transport-native-unix-common)"
google="$("${PYTHON:-python3}" -c 'import google.rpc; print(list(google.rpc.__path__)[0].removesuffix("google/rpc"))')"

rm -rf build && mkdir -p build/gen build/google build/classes build/google-classes build/programs
protoc -I "$protos" --java_out=build/gen --grpc-java_out=build/gen \
  --plugin=protoc-gen-grpc-java="$(command -v grpc_java_plugin)" tidegate/inference/v1/inference.proto
# Debian's proto-google-common-protos is older than ErrorInfo, so google.rpc is made here too, but stays out of the
# jar: who builds with current jars has it from there.
protoc -I "$google" --java_out=build/google google/rpc/status.proto google/rpc/error_details.proto

compile() { # OUTPUT CLASSPATH FOLDER...
  local output="$1" path="$2"
  shift 2
  find "$@" -name '*.java' -print0 | xargs -0 javac -nowarn --release 17 -Xlint:-options -XDignore.symbol.file \
    -cp "$path" -d "$output"
}
compile build/google-classes "$classpath" build/google 2>&1 | { grep -v '^Note:' || true; }
compile build/classes "build/google-classes$classpath" build/gen src 2>&1 | { grep -v '^Note:' || true; }
jar --create --file build/tidegate-client.jar -C build/classes .
compile build/programs "build/tidegate-client.jar:build/google-classes$classpath" examples conformance

for program in driver:dev.tidegate.conformance.Driver example:dev.tidegate.examples.Stream; do
  printf '#!/bin/sh\nexec java -Xshare:auto -XX:TieredStopAtLevel=1 -cp "%s" %s "$@"\n' \
    "$here/build/programs:$here/build/tidegate-client.jar:$here/build/google-classes$classpath" "${program#*:}" \
    > "build/${program%%:*}"
  chmod +x "build/${program%%:*}"
done
touch $stamp
