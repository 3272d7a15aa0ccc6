"""Custom C++ CPU kernels for OneFlow 0.9.0.

They are compiled once and replace OneFlow's slow kernels, both in eager operations and in compiled
graphs (docs/dev/decisions/0012-native-kernels.md). `kernels` finds and loads the library. `build`
compiles it, runs the test in `check` and caches it. `symbol_table` replaces OneFlow's C functions.
`layer_norm` is the only change to OneFlow's Python code.
"""
