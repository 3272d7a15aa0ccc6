"""Shifts and mirrors move pixels where they should."""

import numpy as np

from libai.data.vision.images import random_flip, random_shift


def test_a_shift_moves_every_image_by_its_own_numbers():
    images = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4) + 1
    # With one pixel there are three positions per axis: 0 moves content down or right, the last one up or left.
    moved = random_shift(images, np.array([[0.0, 0.5], [0.99, 0.99]]), max_pixels=1)
    assert np.array_equal(moved[0, :, 1:], images[0, :, :-1]) and not moved[0, :, 0].any()
    assert np.array_equal(moved[1, :, :-1, :-1], images[1, :, 1:, 1:])
    assert not moved[1, :, -1].any() and not moved[1, :, :, -1].any()


def test_the_middle_position_changes_nothing():
    images = np.random.default_rng(0).random((3, 1, 5, 5))
    assert np.array_equal(random_shift(images, np.full((3, 2), 0.5), max_pixels=2), images)


def test_all_shifts_are_equally_likely():
    uniform = np.random.default_rng(0).random((9000, 2))
    image = np.zeros((1, 1, 3, 3))
    image[..., 1, 1] = 1
    moved = random_shift(np.repeat(image, 9000, axis=0), uniform, max_pixels=1)
    assert np.abs(moved.mean(0) - 1 / 9).max() < 0.02  # six standard deviations


def test_a_flip_mirrors_the_images_below_one_half():
    images = np.arange(12.0).reshape(2, 1, 2, 3)
    flipped = random_flip(images, np.array([0.4, 0.6]))
    assert np.array_equal(flipped[0], images[0, :, :, ::-1])
    assert np.array_equal(flipped[1], images[1])
