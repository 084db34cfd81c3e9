// In the place of CuPy's, which needs a compiler for GPUs: complex numbers of C++, for twins.
#pragma once
#include <complex>
using std::complex;
