"""Shifts and mirrors move pixels where they should."""

import numpy as np

from libai.data.vision.images import random_shift


def test_a_shift_moves_every_image_by_its_own_numbers():
    images = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4) + 1
    # With one pixel there are three positions per axis: 0 moves content down or right, the last one up or left.
    moved = random_shift(images, np.array([[0.0, 0.5], [0.99, 0.99]]), max_pixels=1)
    assert np.array_equal(moved[0, :, 1:], images[0, :, :-1]) and not moved[0, :, 0].any()
    assert np.array_equal(moved[1, :, :-1, :-1], images[1, :, 1:, 1:])
    assert not moved[1, :, -1].any() and not moved[1, :, :, -1].any()
