"""Compiles every Triton kernel for GPUs that need not be there, and tells what it takes of their registers.

`python -m tidegate_kernels.check` prints a table of variants with registers, shared memory and spilled bytes
for each architecture. It exits with 1 when one spills, needs more shared memory than there is, or does not
compile.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tidegate_kernels.check_variants import VARIANTS, Variant

# Bytes of shared memory that a block may have, by architecture (CUDA programming guide, table of compute
# capabilities).
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}


@dataclass(frozen=True, slots=True)
class Usage:
    """What a compiled variant takes."""

    variant: str
    architecture: int
    registers: int
    shared_bytes: int
    spilled_bytes: int  # of local memory for each thread
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether it runs as it should."""
        return not (self.error or self.spilled_bytes or self.shared_bytes > SHARED_BYTES[self.architecture])


def measure(variant: Variant, architecture: int) -> Usage:
    """Compiles a variant for an architecture, such as 90 for sm_90."""
    signature = dict(variant.signature) | dict.fromkeys(variant.constants, "constexpr")
    pointers = [i for i, name in enumerate(variant.kernel.arg_names) if signature[name].startswith("*")]
    strides = [
        i
        for i, name in enumerate(variant.kernel.arg_names)
        if signature[name] == "i32" and name.endswith("stride") and not name.startswith("table")
    ]
    source = ASTSource(
        variant.kernel,
        signature=signature,
        constexprs=dict(variant.constants),
        # torch's memory is aligned, and so are whole heads and blocks.
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers + strides},
    )
    options = {"num_warps": variant.warps, "num_stages": 2, "enable_fp_fusion": True}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    except Exception as error:  # whatever the compiler has to say goes into the table
        return Usage(variant.name, architecture, 0, 0, 0, f"{type(error).__name__}: {error}")
    registers, spilled = _resources(compiled.asm["cubin"])
    return Usage(variant.name, architecture, registers, compiled.metadata.shared, spilled)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack and local memory, which hold what was spilled."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump told no resource usage: {text[:200]!r}")
    return int(found[1]), int(found[2]) + int(found[3])


def main(arguments: list[str]) -> int:
    """Prints the table for the variants whose names contain all arguments. 1 if any of them is bad."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.stderr.write("unset TRITON_INTERPRET: under the interpreter nothing is compiled\n")
        return 1
    chosen = [variant for variant in VARIANTS if all(word in variant.name for word in arguments)]
    if not chosen:
        sys.stderr.write(f"no variant's name contains {arguments}\n")
        return 1
    sys.stdout.write(f"{'variant':<52} {'arch':>5} {'registers':>9} {'shared B':>9} {'spilled B':>9}\n")
    good = True
    for variant in chosen:
        for architecture in variant.architectures:
            usage = measure(variant, architecture)
            good = good and usage.good
            verdict = "" if usage.good else f"  BAD {usage.error}"
            sys.stdout.write(
                f"{usage.variant:<52} sm_{usage.architecture} {usage.registers:>9} {usage.shared_bytes:>9} "
                f"{usage.spilled_bytes:>9}{verdict}\n"
            )
            sys.stdout.flush()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
