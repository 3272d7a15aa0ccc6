"""All settings of libai: their names, types, limits and meaning, and the errors that report
mistakes in them.
"""
