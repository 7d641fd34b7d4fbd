"""The Spyre card and its number formats, as data.

Sources: torch-spyre's public documentation and constants of 2026; where it measured a rate and
also published a peak, both stand here.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

#: IBM. The card shows a physical function, and virtual ones where it is shared.
PCI_VENDOR = "0x1014"
PCI_DEVICES = ("0x06a7", "0x06a8")

#: A stick: what device memory moves at once. The last dim of every device tensor is one.
STICK_BYTES = 128


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip: what is public of it.

    Attributes:
        name: as users write it.
        arch: architecture; there is one generation.
        cores: cores of a card.
        scratchpad_bytes: LX, the memory of one core that its two corelets share.
        scratchpad_reserve: share of LX that the compiler keeps for itself.
        memory_bytes: device memory beyond what error correction takes: seven segments of 16 GiB.
        span_bytes: how far apart one core's first and last byte of one tensor may lie.
        native_formats: dtypes with device arithmetic, by torch's names.
        peak_dl16_flops: of a card, in the 16-bit format.
        peak_bytes_per_second: of device memory.
        measured_bytes_per_second: one direction; measured by others, not here.
        burst_bytes: largest transfer of device memory.
        loop_limit: highest trip count of a loop in a generated program.
    """

    name: str
    arch: str
    cores: int
    scratchpad_bytes: int
    scratchpad_reserve: float
    memory_bytes: int
    span_bytes: int
    native_formats: tuple[str, ...]
    peak_dl16_flops: float
    peak_bytes_per_second: float
    measured_bytes_per_second: float
    burst_bytes: int
    loop_limit: int


SPYRE = Chip(
    name="spyre",
    arch="spyre",
    cores=32,
    scratchpad_bytes=2 << 20,
    scratchpad_reserve=0.2,
    memory_bytes=7 * (16 << 30),
    span_bytes=256 << 20,
    native_formats=("float16", "float32", "float8_e4m3fn"),
    peak_dl16_flops=98.304e12,
    peak_bytes_per_second=204.8e9,
    measured_bytes_per_second=150e9,
    burst_bytes=4096,
    loop_limit=65535,
)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """How the card keeps one dtype.

    Attributes:
        name: the device's name of the format.
        bytes: of one element.
        loss: what a round trip through the device loses; empty where it loses nothing.
    """

    name: str
    bytes: int
    loss: str = ""

    @property
    def elems_per_stick(self) -> int:
        """Elements in one stick."""
        return STICK_BYTES // self.bytes


#: Host dtype → what the card keeps. A dtype that isn't here can't go to the card.
STORED = MappingProxyType(
    {
        "float16": Stored(name="SEN169_FP16", bytes=2, loss="one of 10 mantissa bits"),
        "bfloat16": Stored(name="SEN169_FP16", bytes=2, loss="two of 8 exponent bits"),
        "bool": Stored(name="SEN169_FP16", bytes=2),
        "float32": Stored(name="IEEE_FP32", bytes=4),
        "int64": Stored(name="IEEE_INT32", bytes=4, loss="the upper 32 bits"),
        "int32": Stored(name="IEEE_INT32", bytes=4),
        "int16": Stored(name="SENINT16", bytes=2),
        "int8": Stored(name="SENINT8", bytes=1),
        "uint8": Stored(name="SENUINT32", bytes=4),
        "float8_e4m3fn": Stored(name="SEN143_FP8", bytes=1),
    }
)

#: Order of the elements within sticks → what leaves it. All inputs of one op must agree.
ARRANGEMENTS = MappingProxyType(
    {
        "STANDARD": "elements in order",
        "DL16_TO_FP32": "groups of four alternate between two sticks: widened on the device",
        "FP32_TO_DL16": "the inverse within one stick: narrowed on the device",
        "QFP8CH": "order of the fp8 quantisation by channel",
        "QFP8WT": "order of the fp8 quantisation of weights",
        "EXX2": "two values a stick: mean and second moment of a reduction",
    }
)
