"""CPU kernels of our own for OneFlow 0.9.0: C++ that is compiled once, and takes the place of OneFlow's slow kernels in
eager operations and compiled graphs alike. docs/decisions/0015-native-kernels.md tells why, and what was measured.

`build` compiles and caches, `check` is the test that a library must pass first, `library` loads it, `layer_norm` is
the one change to OneFlow's Python. Who asks for them: libai/kernels.py.
"""
