"""The GPUs of a host; a value that NVML cannot read (container, old driver) is None."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance of it, that a lane could use, as a receipt records it."""

    name: str
    compute_capability: str  # such as ``9.0``

    @property
    def target(self) -> str:
        """Its architecture as a target, with the suffix from sm_90 on."""
        major, _, minor = self.compute_capability.partition(".")
        return f"sm_{major}{minor}" + ("a" if int(major) >= 9 else "")  # noqa: PLR2004 - the rule's own number


@dataclass(frozen=True)
class Device:
    """One GPU of the pool."""

    token: str  # its name in CUDA_VISIBLE_DEVICES: NVML's number, or the UUID in the host's own variable
    number: str  # for people: NVML's number, else its place in the pool, since no output holds a UUID
    gpu: Gpu
    handle: Any  # NVML's
    events: Any  # NVML's set of its critical Xid events; None if NVML has none
    is_instance: bool = False  # whether it is a MIG instance; a process can use only one of these
    memory_gib: float = 0.0  # 0 if NVML does not state it


def place_name(*devices: Device) -> str:
    """Return the name of a lane's place in every output: ``gpu 0``, ``gpus 0,1`` or ``cpu``."""
    numbers = ",".join(device.number for device in devices)
    return f"gpu{'s' if len(devices) > 1 else ''} {numbers}" if numbers else "cpu"


@dataclass(frozen=True)
class GpuPool:
    """The GPUs that lanes may use, the driver, and why other GPUs of this host cannot be used."""

    devices: list[Device]
    driver: str
    lost: list[str]


@dataclass(frozen=True)
class Reading:
    """One look at a GPU: bytes in use, processes, uncorrected ECC errors, failed row remappings, new Xid events."""

    lost: str = ""
    memory: int | None = None
    processes: frozenset[int] = frozenset()
    uncorrected: int | None = None
    remap_failed: bool = False
    xids: tuple[int, ...] = ()
