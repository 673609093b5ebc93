"""Make the files for a training on your own data: samples with labels, a text, and a tokenizer for it.

The script writes these files into the folder ``own_data``, or into the folder named by its argument:

    wine.npz         scikit-learn's 178 wines: 13 measurements, of 3 classes, in random order
    text.txt         source text of Python's standard library
    tokenizer.json   512 byte pairs that are frequent in it
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_wine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 512


def save_wine(path: Path) -> None:
    """Write inputs of mean 0 and deviation 1, and the class of each, in random order."""
    inputs, targets = load_wine(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(inputs))
    scaled = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
    np.savez(path, inputs=scaled[order].astype(np.float32), targets=targets[order].astype(np.int64))


def tokenizer(text: str) -> Tokenizer:
    """Return byte pairs learned from a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def main(folder: Path) -> None:
    """Write the files into a folder, and print their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    save_wine(folder / "wine.npz")
    text = "\n".join(Path(str(module.__file__)).read_text() for module in (argparse, ast))
    (folder / "text.txt").write_text(text)
    tokenizer(text).save(str(folder / "tokenizer.json"))
    print(*sorted(str(path) for path in folder.iterdir()), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("own_data"))
