"""Runs the command line as `python -m tidegate_client.cli`."""

from tidegate_client.cli import main

main()
