"""The coder of places: what it works out in integers is exact."""

import numpy as np
import pytest

from rl_core.delta import hazards

PIECES = len(hazards._SLOPES) - 1


@pytest.mark.parametrize("piece", range(PIECES))
def test_a_way_into_a_piece_is_the_quotient_by_its_slope(piece):
    """At each multiple of the slope and just below it, between which the quotient stays."""
    slope, length = int(hazards._SLOPES[piece]), 1 << hazards._PIECE_BITS
    for way in [*range(1, length, 97), length]:
        assert hazards.inside_piece(np.uint64(way * slope - 1), piece) == way - 1
        if way < length:
            assert hazards.inside_piece(np.uint64(way * slope), piece) == way
    assert slope < 1 << 10
