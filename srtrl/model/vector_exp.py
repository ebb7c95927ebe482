"""An exponential for Numba kernels that vectorises and gives the same bits in vector and scalar code."""

import numba
import numpy as np


@numba.njit(inline="always")
def exp_parts(x: np.float32) -> tuple[np.float32, np.int32]:
    """e**x for x <= 0 as (mantissa, bits of the float32 power of two); about 1e-7 relative, at least 1e-38.

    Cody-Waite reduction and a degree-5 polynomial (the coefficients of Cephes' `expf`), in plain multiplications and
    additions. The two parts are multiplied by the caller, who keeps the bits in an int32 array and reads it as float32.
    """
    x = max(x, np.float32(-87.0))
    power = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    rest = (x - power * np.float32(0.693359375)) + power * np.float32(2.12194440e-4)
    poly = np.float32(1.9875691500e-4)
    poly = poly * rest + np.float32(1.3981999507e-3)
    poly = poly * rest + np.float32(8.3334519073e-3)
    poly = poly * rest + np.float32(4.1665795894e-2)
    poly = poly * rest + np.float32(1.6666665459e-1)
    poly = poly * rest + np.float32(5.0000001201e-1)
    return poly * rest * rest + rest + np.float32(1.0), (np.int32(power) + np.int32(127)) << np.int32(23)
