"""CPU kernels of our own for OneFlow 0.9.0: C++ that is compiled once, and takes the place of OneFlow's slow kernels in
eager operations and compiled graphs alike (docs/dev/decisions/0012-native-kernels.md).

`kernels` asks for them and loads the library, `build` compiles and caches it after the test in `check`, `symbol_table`
puts functions in the place of OneFlow's, `layer_norm` is the one change to OneFlow's Python.
"""
