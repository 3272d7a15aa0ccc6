"""Edit a compiled job before OneFlow plans it, to fix operations that would be wrong or slow."""
