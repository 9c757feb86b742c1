"""The `tidegate` command line."""

from tidegate_client.cli.app import main

__all__ = ["main"]
