"""The error that means: the user asked for something that cannot be, and here is what to change."""


class UserError(ValueError):
    """A mistake in config, arguments, data or model contract.

    The tools print its text alone, without a traceback, and exit with code 2. The text says what was asked,
    what was found, why it cannot be and what to change.
    """
