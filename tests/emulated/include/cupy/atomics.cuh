// In the place of CuPy's, which are made of a GPU's: twin.h has those that run on a CPU.
#pragma once
