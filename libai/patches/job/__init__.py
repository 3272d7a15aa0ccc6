"""Changes to a compiled job before OneFlow plans it: what it would compute wrongly or slowly."""
