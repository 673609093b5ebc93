"""All use of undocumented PyTorch, one file per concern, each with a fallback where one exists."""
