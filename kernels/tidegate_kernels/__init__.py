"""Attention, KV cache and sampling kernels over torch tensors. Imports nothing else of Tidegate."""
