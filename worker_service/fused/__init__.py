"""The fused CPU decoder: the Llama family's forward as one compiled call over packed weights."""
