"""A simulated accelerator: the device `sim`, defined in Python (torch's PrivateUse1). To import it is to have it.

Its tensors hold real numbers, computed by the CPU's kernels, so a run on it must give the CPU's bits. What CUDA
refuses, it refuses: an operation on tensors of host and device, a generator of another device. Fresh memory is NaN.
What it cannot show: streams and their races, kernels that round differently, limits of memory.
With SIMULATED_FLOAT64=no in the environment it has no float64, like MPS.
"""

from simulated.attention import OWN, register_attention
from simulated.autocast import register_autocast
from simulated.kernels import register

register(OWN)
register_attention()
register_autocast()
