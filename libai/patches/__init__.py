"""Repairs of OneFlow 0.9.0 and uses of its private parts, each with the decision that tells why."""
