"""All contact with what PyTorch does not document, one file per concern, each with a fallback where one exists."""
