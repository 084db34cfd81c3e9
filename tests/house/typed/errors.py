"""What a user reads of exceptions, right and wrong."""

import kvpool
from kvpool.errors import DeviceError, InsufficientMemory, StoreBusy

try:
    pass
except kvpool.OutOfBlocks as error:
    missing: int = error.needed - error.free
    tier: str = error.tier
    print(error.blocks)  # wrong
except InsufficientMemory as error:
    lacking: int = error.requested - error.available
    print(error.needed)  # wrong
except StoreBusy as error:
    queued: int = error.queued
    print(error.queue)  # wrong
except DeviceError as error:
    if error.sticky:
        raise

kvpool.OutOfBlocks("gpu", 1, 0)  # wrong
