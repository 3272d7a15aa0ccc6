"""Which mesh a model should train on, from its memory and traffic."""
