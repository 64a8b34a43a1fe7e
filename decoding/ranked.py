"""Bridge to `decoding.verification.unread`. To be deleted with it."""

from decoding.device_tree import DeviceTree as RankedTree

__all__ = ["RankedTree"]
