"""User-facing classes have a limited number of public members, including inherited and instance
members.
"""

import pytest
from toy import make_trainer

MOST_MEMBERS = 39


def public_members(instance):
    """Return the names of attributes, properties and methods without a leading underscore."""
    return {name for name in dir(instance) if not name.startswith("_")}


def test_trainers_show_few_members(mode):
    trainer = make_trainer(mode)
    assert len(public_members(trainer)) <= MOST_MEMBERS, sorted(public_members(trainer))


@pytest.mark.parametrize("part", ["feed", "loop", "parts", "step", "optimizer_state"])
def test_what_a_trainer_is_made_of_shows_few_members(mode, part):
    assert len(public_members(getattr(make_trainer(mode), part))) <= MOST_MEMBERS
