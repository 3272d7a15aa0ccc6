"""Small Hugging Face folders of random weights, with a tokenizer."""

import shutil
from pathlib import Path

FIXTURES = Path(__file__).parent / "hf/fixtures"


def with_tokenizer(name, folder, num_words=90):
    """A copy of a fixture at `folder`, whose tokens are the words `w0`, `w1`, …; others count as
    `w0`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    shutil.copytree(FIXTURES / name, folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(num_words)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
