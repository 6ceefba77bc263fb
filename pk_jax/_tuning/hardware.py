"""The measured numbers of a machine, as plain data.

The cost model reads nothing else, so a threshold is changed here and nowhere else.
"""

import dataclasses

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# From here on a reduction crosses hosts in parts, each rank of a host carrying its own: two more
# calls inside, for 1/n of the bytes across. Assumed, for want of a measurement on several hosts.
ACROSS_IN_PARTS_BYTES = MIB

# (x, bytes per second) points of a measured curve, x rising: blocks (SMs) that move the data, or
# bytes of one copy.
Curve = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of GPU and its links.

    Attributes:
        device_kind: what jax.Device.device_kind says of it.
        num_sms: SMs on the chip.
        hbm_bandwidth: bytes per second, reads and writes together.
        link_bandwidth: the fastest any mechanism has moved bytes to a peer, one direction.
        store_peak: the fastest SMs have moved bytes to a peer, one direction.
        flag_latency: seconds from a release on one GPU to the acquire on another.
        launch_overhead: host cost of one call captured in a CUDA graph.
        store_bandwidth: mechanism -> bytes per second by number of blocks, idle chip, both
            directions at once.
        loaded_store_bandwidth: the same beside a chip-filling GEMM.
        copy_engine_bandwidth: bytes per second by bytes of one copy, idle chip.
        loaded_copy_engine_bandwidth: the same beside a chip-filling GEMM.
        ll_min_bytes: what a rank may send to one peer by the ll protocol, whose mailboxes have a
            fixed size, in a group of any size.
        ll_shared_bytes: what the peers of a small group share of the mailboxes' room.
        ll_bandwidth: bytes of payload per second by the ll protocol (half of the words is epoch).
        reduce_bandwidth: the fastest SMs have moved bytes to a peer that sums them.
        tma_alignment: bulk copies move multiples of this many bytes.
        tma_full_rate_bytes: the shortest bulk copies that reach the rate of long ones.
        block_overhead: seconds that a further block adds to a call (its launch and its flag).
        copy_overhead: seconds between one copy and the next, flags included.
        copy_setup: seconds of a copy-engine call beyond its copies: forks, joins, the last drain.
    """

    device_kind: str
    num_sms: int
    hbm_bandwidth: float
    link_bandwidth: float
    store_peak: float
    flag_latency: float
    launch_overhead: float
    store_bandwidth: dict[str, Curve]
    loaded_store_bandwidth: dict[str, Curve]
    copy_engine_bandwidth: Curve
    loaded_copy_engine_bandwidth: Curve
    ll_min_bytes: int
    ll_shared_bytes: int
    ll_bandwidth: float
    reduce_bandwidth: float
    tma_alignment: int
    tma_full_rate_bytes: int
    block_overhead: float
    copy_overhead: float
    copy_setup: float

    def ll_max_bytes(self, num_ranks: int) -> int:
        """The most bytes that a rank of a group may send to one peer by the ll protocol."""
        return max(self.ll_min_bytes, self.ll_shared_bytes // num_ranks // 128 * 128)


H200 = Hardware(
    device_kind="NVIDIA H200",
    num_sms=132,
    hbm_bandwidth=4.8e12,
    link_bandwidth=396e9,
    store_peak=370e9,
    flag_latency=1.2e-6,
    launch_overhead=2.4e-6,
    store_bandwidth={
        "register": (
            (1, 25e9),
            (2, 50e9),
            (4, 91e9),
            (8, 180e9),
            (16, 341e9),
            (64, 344e9),
            (132, 356e9),
        ),
        "tma": (
            (1, 23e9),
            (8, 187e9),
            (16, 306e9),
            (32, 321e9),
            (64, 347e9),
            (132, 360e9),
        ),
    },
    loaded_store_bandwidth={
        "register": ((16, 329e9),),
        "tma": ((4, 96e9), (8, 279e9), (16, 334e9)),
    },
    copy_engine_bandwidth=(
        (64 * KIB, 25e9),
        (MIB, 225e9),
        (4 * MIB, 310e9),
        (16 * MIB, 366e9),
        (64 * MIB, 388e9),
        (GIB, 396e9),
    ),
    loaded_copy_engine_bandwidth=(
        (2 * MIB, 86e9),
        (8 * MIB, 155e9),
        (128 * MIB, 192e9),
    ),
    ll_min_bytes=128 * KIB,
    ll_shared_bytes=MIB,
    ll_bandwidth=175e9,
    reduce_bandwidth=350e9,
    tma_alignment=16,
    tma_full_rate_bytes=2 * KIB,
    block_overhead=10e-9,
    copy_overhead=4e-6,
    copy_setup=15e-6,
)
"""Two H200 (141 GB) joined by NV18, driver 580.159, CUDA 13.0, measured 2026-11.

Stores: all_gather of 256 MiB a rank itself (1 MiB up to 8 blocks), both GPUs sending; the one-block
tma point is an eighth of the eight-block one. Copies: one direction, idle chip. Flags: half of a
2.44 us round trip by st.release.sys and ld.acquire.sys. Launch: an empty kernel with the
command-buffer trait in a chain of 60. Loaded: both GPUs run a bf16 GEMM that fills the chip.
ll_bandwidth is half of the register rate. reduce_bandwidth is that of large psums and
psum_scatters. hbm_bandwidth is the data sheet's. copy_overhead and copy_setup are fitted to
all_gather by copy engine at 2 MiB to 1 GiB. block_overhead is not measured: it is small enough to
matter only where the message is.
"""

_BY_KIND = {H200.device_kind: H200}


def lookup(device_kind: str | None = None) -> Hardware:
    """The record of a device kind; the H200's where there is none of its own."""
    return _BY_KIND.get(device_kind or "", H200)
