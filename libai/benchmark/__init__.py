"""Compare the speed of training variants.

Their blocks are interleaved, so machine drift affects all of them equally.

A variant is a command that implements the line protocol in `protocol.py`. `variants.py` lists the
variants of a config, `measure.py` runs them block by block, and `report.py` computes statistics and
builds report.json and report.md.
"""
