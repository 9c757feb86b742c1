"""Owns the command `python -m openai_gateway`."""

from __future__ import annotations

import sys

import uvloop

from openai_gateway.config import ConfigError, load_config
from openai_gateway.server import serve, set_up_logs


def main() -> int:
    """Runs the gateway. Returns the exit status: 2 for options that can't be used."""
    try:
        config = load_config(sys.argv[1:])
        set_up_logs(config.log_level)
        uvloop.run(serve(config))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
