"""Facts and helpers that know nothing of libai: ranks, files, logging, seeds, errors."""
