"""Which pass, option, repair or module makes two modes diverge, as a small program to report."""
