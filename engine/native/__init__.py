"""Kernels for x86 CPUs with AVX-512, compiled where they run."""
