"""A fake scheduler service for tests."""
