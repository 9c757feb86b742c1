"""Runs load tools of others against a real deployment behind the gateway, and checks what they report.

The tools live in environments of their own, since they pin many packages: `install.sh FOLDER` makes them. It
takes about three minutes on two cores, most of which the tools need to start.

    python tests/clients/load_tools/run.py --tools .cache/load-tools
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tidegate_client.cli.demo_model import DEMO, find_model
from tidegate_client.cli.local_cluster import ClusterOptions, LocalCluster
from worker_service.demo_model import prepare

REQUESTS, STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 4, 32, 16

Tool = Callable[[Path, str, str, Path], None]
"""Runs a tool: its environment, the gateway's URL, the model's name, a folder for results."""


def vllm(path: str, backend: str) -> Tool:
    """`vllm bench serve` at a path of the API."""

    def run(environment: Path, url: str, model: str, results: Path) -> None:
        command = [str(environment / "bin/vllm"), "bench", "serve", "--backend", backend]
        command += ["--base-url", url, "--endpoint", path, "--model", model, "--tokenizer", str(prepare())]
        command += ["--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS)]
        command += ["--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(REQUESTS)]
        command += ["--max-concurrency", str(STREAMS), "--ignore-eos", "--temperature", "0"]
        command += ["--save-result", "--result-dir", str(results), "--result-filename", "vllm.json"]
        call(command)
        found = json.loads((results / "vllm.json").read_text())
        check(found, completed=REQUESTS, failed=0, total_output_tokens=REQUESTS * OUTPUT_TOKENS)

    return run


def guidellm(path: str) -> Tool:
    """`guidellm run` at a path of the API."""

    def run(environment: Path, url: str, model: str, results: Path) -> None:
        report = results / "guidellm.json"
        data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
        command = [str(environment / "bin/guidellm"), "run", "--disable-progress"]
        command += ["--backend", f"kind=openai_http,target={url},model={model},request_format={path}"]
        command += ["--profile", f"kind=concurrent,streams={STREAMS}", "--data", data]
        command += ["--tokenizer", f"kind=huggingface_auto,model={prepare()}"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += ["--output", f"kind=json,path={report}", "--output", "kind=console"]
        call(command)
        totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
        check(totals, successful=REQUESTS, errored=0, incomplete=0)

    return run


TOOLS: Mapping[str, tuple[str, Tool]] = {
    "vllm bench serve, completions": ("vllm", vllm("/v1/completions", "openai")),
    "vllm bench serve, chat": ("vllm", vllm("/v1/chat/completions", "openai-chat")),
    "guidellm, chat": ("guidellm", guidellm("/v1/chat/completions")),
    "guidellm, completions": ("guidellm", guidellm("/v1/completions")),
}


def call(command: list[str]) -> None:
    """Runs a tool's command without a network to look models up in."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    subprocess.run(command, check=True, env=os.environ | offline)


def check(found: Mapping[str, Any], **expected: int) -> None:
    """Ends the run unless a tool counted what it should have."""
    wrong = {name: found.get(name) for name, count in expected.items() if found.get(name) != count}
    if wrong:
        raise SystemExit(f"the tool counted {wrong}, and {expected} were right")
    print(f"OK: {expected}", flush=True)


def run_tools(tools: Path, url: str, model: str, only: str) -> None:
    """Runs every tool that is installed."""
    for title, (environment, tool) in TOOLS.items():
        if only not in title:
            continue
        print(f"== {title} ==", flush=True)
        if not (tools / environment).exists():
            print(f"SKIPPED: {tools / environment} is not there; install.sh makes it", flush=True)
            continue
        with tempfile.TemporaryDirectory() as results:
            tool(tools / environment, url, model, Path(results))


def main() -> None:
    """Starts the demo model and the gateway, and runs the tools."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--tools", type=Path, default=Path(".cache/load-tools"), help="folder of environments"
    )
    parser.add_argument("--only", default="", help="part of the name of the tools to run")
    options = parser.parse_args()
    with LocalCluster(ClusterOptions(model=find_model(DEMO), port=0)) as cluster:
        cluster.wait_ready(lambda _: None)
        flags = ["--port=0", f"--address={cluster.address}", "--drain-window=0"]
        gateway = subprocess.Popen([sys.executable, "-m", "openai_gateway", *flags], stderr=subprocess.PIPE)
        try:
            for line in gateway.stderr:
                if found := re.search(r"running on (http://\S+)", line.decode()):
                    run_tools(options.tools, found.group(1), cluster.model_name, options.only)
                    break
        finally:
            gateway.terminate()
            gateway.wait()


if __name__ == "__main__":
    main()
