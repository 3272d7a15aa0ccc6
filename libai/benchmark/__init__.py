"""Measure contenders against each other: processes that take turns, so that drift of the machine hits all alike.

A contender is a command that speaks the line protocol of `protocol.py`. `session.py` starts the contenders and passes
the turn, `statistics.py` says what the numbers mean, `report.py`, `plots.py` and `compare.py` show it. `worker.py` is
the contender for a config of ours. The command line is tools/benchmark.py; `docs_page.py` writes pages from
reports, and tools/benchmark_docs.sh measures all that the pages in docs/ show.
"""
