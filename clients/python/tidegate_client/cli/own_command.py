"""How this command line is started: what people have to type to start it again."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

_NAME = "tidegate"


def own_command() -> str:
    """Returns `tidegate` where that finds this environment's, else its path, ready for a shell."""
    script = Path(sys.executable).with_name(_NAME)
    if not script.exists():
        return f"{shlex.quote(sys.executable)} -m tidegate_client.cli"
    found = shutil.which(_NAME)
    if found is not None and Path(found).samefile(script):
        return _NAME
    if script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    return shlex.quote(str(script))
