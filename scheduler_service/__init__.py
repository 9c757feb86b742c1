"""The scheduler service: queues, admission, the prefix cache and the global block table."""
