"""The Python client of Tidegate."""
