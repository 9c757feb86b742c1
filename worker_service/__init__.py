"""The worker service: KV memory, model forwards and sampling, driven by step plans."""
