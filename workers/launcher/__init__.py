"""A torchrun that waits for its order, confined before it starts ranks."""
