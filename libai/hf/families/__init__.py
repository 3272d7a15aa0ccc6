"""The kinds of Hugging Face models that are known: names and settings as data."""
