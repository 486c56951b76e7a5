"""Moving parameters from the trainer to engines, with proof that they arrived."""

from fledge.weights.local import SharedMemoryTransport

__all__ = ["SharedMemoryTransport"]
