"""Measure variants of a training run against each other, interleaved, so that drift of the machine hits all alike.

A variant is a command that speaks the line protocol of `protocol.py`. `cases.py` says what is measured, `measure.py`
lets the variants run block by block, `variants.py` is what runs for a config of ours. `statistics.py` says what block
times mean, `report.py` makes report.json of them, `tables.py` shows it.
"""
