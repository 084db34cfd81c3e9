"""What every room uses: arrays, compilation, argument checks, errors, sizes, progress."""
