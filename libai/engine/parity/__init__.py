"""Proof that eager and graph mode train alike, or the place where they diverge."""
