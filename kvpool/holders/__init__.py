"""What a pool lends and must get back: leases of readers, reservations of loaders, imports."""
