"""A fake worker service for tests."""
