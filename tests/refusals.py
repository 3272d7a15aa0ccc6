"""The errors for users that tests expect."""

import pytest

from libai.utils.errors import UserError


def refused(text):
    """Expect an error for the user that matches `text`."""
    return pytest.raises(UserError, match=text)
