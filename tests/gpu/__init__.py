"""What is confirmed on a GPU; where there is none, on the stand-in for CuPy, as far as that can tell."""
