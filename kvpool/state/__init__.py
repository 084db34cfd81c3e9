"""The mind of the pool: all state in arrays, all transitions in jitted functions; never reaches a device."""
