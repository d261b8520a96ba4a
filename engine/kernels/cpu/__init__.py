"""CPU kernels over torch and oneDNN."""
