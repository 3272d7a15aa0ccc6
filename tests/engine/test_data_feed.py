"""Micro-batches stay in order if they are read ahead, and the position counts the batches that
iterations have used.
"""

import pytest

from libai.engine.data_feed import DataFeed


class Counting:
    """Yields 0, 1, 2, ... and has a position. Raises an error at `broken_at`."""

    def __init__(self, broken_at=None):
        self.next, self.broken_at = 0, broken_at

    def __iter__(self):
        while self.next != self.broken_at:
            self.next += 1
            yield self.next - 1
        raise OSError("planted")

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_the_position_counts_peeked_batches_as_unread():
    feed = DataFeed(Counting(), 2)
    feed.take()
    assert feed.peek() == [2, 3]
    assert feed.position() == {"next": 2}
    feed.go_to({"next": 7}, iteration=1)
    assert feed.take() == [7, 8]


def test_peeked_batches_are_not_kept_if_they_can_be_read_again():
    """A learning-rate finder of many updates would otherwise keep all of its batches in memory."""
    loader = Counting()
    feed = DataFeed(loader, 2)
    for micro_batches in feed.look_ahead(1000):
        assert loader.next == micro_batches[-1] + 1
        if loader.next == 20:
            break
    assert feed.position() == {"next": 0} and feed.take() == [0, 1]


@pytest.mark.parametrize("broken_at, is_ahead", [(2, False), (3, True)])
def test_a_partly_read_iteration_is_ahead_of_the_weights(broken_at, is_ahead):
    feed = DataFeed(Counting(broken_at), 2)
    feed.take()
    assert feed.is_ahead
    feed.is_ahead = False  # as the trainer does after its update
    with pytest.raises(OSError, match="planted"):
        feed.take()
    assert feed.is_ahead == is_ahead


def test_a_loader_may_use_its_memory_again():
    def loader():
        batch = [0]
        yield batch
        batch[0] = 1
        yield batch

    assert DataFeed(loader, 2).take() == [[0], [1]]
