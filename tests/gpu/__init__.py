"""What is confirmed on a GPU, or on real CuPy over the emulated driver (``--emulated``)."""
