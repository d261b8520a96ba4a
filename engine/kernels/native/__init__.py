"""CPU kernels in C++, built on the machine that runs them."""
