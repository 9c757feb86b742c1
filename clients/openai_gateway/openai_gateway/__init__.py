"""An OpenAI-compatible HTTP service in front of Tidegate: HTTP in, gRPC out by `tidegate_client`.

Knows nothing of schedulers, workers or models but what the public API says.
"""
