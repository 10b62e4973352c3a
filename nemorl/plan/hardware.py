"""Rates of accelerators as their makers publish them; what of these is attained are `costs.Attained`.

Operations are dense (without sparsity), bytes per second are in one direction. Memory is the total that
`nvidia-smi` reports, in MiB, since data sheets round it in either unit. Sources, read in 2026:

    h20    NVIDIA's H20 as resellers list it (NVIDIA publishes no data sheet)
    h100   NVIDIA H100 Tensor Core GPU data sheet (SXM5); DGX H100 user guide: 8 ConnectX-7 of 400 Gb/s
    h200   NVIDIA H200 Tensor Core GPU data sheet (SXM5); DGX H200 user guide
    b200   DGX B200 data sheet, per GPU: 8 ConnectX-7 of 400 Gb/s
    gb200  GB200 NVL72 data sheet, per GPU; NVLink-C2C of a Grace CPU shared by two GPUs

To the host: PCIe 5.0 x16, 128 GB/s in both directions together (H100, H200 and B200 data sheets); NVLink-C2C
of a Grace CPU, 900 GB/s in both directions together (Transformer Engine's documentation, "CPU Offloading").
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Hardware:
    """One device, and the links from it. A machine without accelerators is one device, and its processes
    share it."""

    name: str
    device_name: str  # by the driver
    operations: float  # per second in bfloat16
    operations_fp8: float  # per second
    multiprocessors: int
    memory_bytes: int
    memory_rate: float  # bytes per second
    domain: int  # devices that NVLink connects
    domain_rate: float  # bytes per second to them
    network_rate: float  # bytes per second to other domains
    host_rate: float  # bytes per second to the host's memory
    operations_float32: float = 0.0  # per second; 0 where it is not known
    cores: int = 0  # of a machine without accelerators; 0 for an accelerator
    tile: int = (
        128  # rows and columns of a matrix that a multiprocessor computes together; also half the rows
    )
    element_bytes: int = 2  # of activations and weights in matrix products

    @property
    def usable_bytes(self) -> int:
        """Without the margin."""
        return int(self.memory_bytes * (1 - MARGIN))

    def in_precision(self, precision: str) -> "Hardware":
        """As it computes in `bfloat16`, which is unchanged, or in `float32`, whose rate has to be known."""
        if precision == "bfloat16":
            return self
        return replace(self, operations=self.operations_float32, element_bytes=4)

    def shared_by(self, processes: int, threads: int | None = None) -> "Hardware":
        """What one of the processes of a machine has, with at most this number of threads.

        Accelerators are not shared.
        """
        if not self.cores:
            return self
        share = 1 / max(1, processes)
        cores = min(share, (threads or self.cores) / self.cores)
        return replace(
            self,
            operations=self.operations * cores,
            operations_fp8=self.operations_fp8 * cores,
            operations_float32=self.operations_float32 * cores,
            multiprocessors=max(1, round(self.multiprocessors * cores)),
            memory_bytes=int(self.memory_bytes * share),
            memory_rate=self.memory_rate * share,
        )

    def while_busy(self, processes: int, busy: int) -> "Hardware":
        """What one of these processes of a machine has while only `busy` work: more of its bandwidth."""
        if not self.cores or busy >= processes:
            return self
        return replace(self, memory_rate=self.memory_rate * processes / busy)

    def link_rate(self, span: int) -> float:
        """Bytes per second between devices of a group that lies over `span` neighboring ones."""
        return self.domain_rate if span <= self.domain else self.network_rate


_MIB = 2**20
MARGIN = 0.1  # of the memory, for CUDA, NCCL, workspaces of kernels and fragments, which are not planned

HARDWARE = {
    device.name: device
    for device in (
        Hardware("h20", "NVIDIA H20", 148e12, 296e12, 78, 97871 * _MIB, 4.0e12, 8, 450e9, 50e9, 64e9),
        Hardware(
            "h100", "NVIDIA H100 80GB HBM3", 989e12, 1979e12, 132, 81559 * _MIB, 3.35e12, 8, 450e9, 50e9, 64e9
        ),
        Hardware("h200", "NVIDIA H200", 989e12, 1979e12, 132, 143771 * _MIB, 4.8e12, 8, 450e9, 50e9, 64e9),
        Hardware("b200", "NVIDIA B200", 2250e12, 4500e12, 148, 183359 * _MIB, 8.0e12, 8, 900e9, 50e9, 64e9),
        Hardware(
            "gb200", "NVIDIA GB200", 2500e12, 5000e12, 148, 189471 * _MIB, 8.0e12, 72, 900e9, 50e9, 225e9
        ),
    )
}


def known_hardware(device_name: str | None) -> Hardware | None:
    """The hardware of a GPU's name, as its driver says it; None for another one."""
    return next((device for device in HARDWARE.values() if device.device_name == device_name), None)
