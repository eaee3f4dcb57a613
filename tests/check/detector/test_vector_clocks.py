"""Vector clocks: joining and size."""

import numpy as np

from weft.check.detector.vector_clocks import ORDER, at, fit, joined, new_clock, receive


def known(slot, time):
    clock = fit(new_clock(), slot)
    clock[:, slot] = time
    return clock


def test_a_clock_knows_what_it_has_joined_whichever_is_wider():
    for first, second in ((3, 700), (700, 3), (63, 64), (5, 5)):
        clock = joined(known(first, 4), known(second, 9))
        assert at(clock, second) == 9 and at(clock, first) == (9 if first == second else 4)
        heard = receive(known(first, 4), known(second, 9))
        assert at(heard, second, ORDER) == (4 if first == second else 0)
        assert np.all(heard[1:] >= clock[1:])


def test_clocks_that_learn_from_one_another_in_turn_do_not_grow():
    """A regression: clocks joined in turn doubled in size, to 12 GB for 16 launches of two kernels."""
    one, other = known(600, 1), known(1000, 2)
    for _ in range(8):
        one = joined(one, other)
        other = joined(other, fit(one, 1023))
    assert one.shape == other.shape == (3, 1024)
