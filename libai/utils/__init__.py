"""Helpers that do not depend on the rest of libai: ranks, files, logging, seeds, errors."""
