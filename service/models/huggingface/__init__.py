"""Llama-style checkpoints as Hugging Face's libraries lay them out: reading and writing."""

from service.models.huggingface.reading import load
from service.models.huggingface.writing import write

__all__ = ["load", "write"]
