"""Text: tokenizers, token files and samples of them."""
