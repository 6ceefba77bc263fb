"""How a grouped matrix product is cut into tiles. Pure functions; `ffi/ragged_dot.cc` reads them.

The sizes of the groups are known on the device alone, so that blocks find their tiles there, and
the plan goes by the mean: `m / num_groups` rows a group.
"""

import dataclasses
from collections.abc import Iterator

from pk_jax._tuning.matmul_model import TILES

# From this many rows of a group on, a tile of 128 of them: below it is half empty more often than
# it saves half of the reads of rhs.
WIDE_ROWS = 96


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call is told.

    Attributes:
        tile: name of the tile; one of a group's last rows is not shared with the next group.
        num_blocks: thread blocks, one for each SM: how many tiles there will be is not known.
    """

    tile: str
    num_blocks: int


def choose(m: int, num_groups: int, num_sms: int, shape: tuple[int, int] | None = None) -> Plan:
    """The plan for m rows in so many groups on so many SMs, with tiles of a shape if one is given.

    128x256 where groups have 96 rows or more in the mean, else 64x256.
    """
    if shape is None:
        shape = (128 if m >= WIDE_ROWS * num_groups else 64, 256)
    return Plan(next(t.name for t in TILES if (t.rows, t.cols) == shape), num_sms)


def candidates(num_sms: int) -> Iterator[Plan]:
    """The plans there are, whatever the sizes."""
    for tile in TILES:
        yield Plan(tile.name, num_sms)
