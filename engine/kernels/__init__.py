"""Operations of a device, behind one Protocol.

base: the Protocol, and a step laid out in rows.
sampling, logprobs: from logits to tokens.
cpu/: torch operators and oneDNN; native/: C++ for AVX-512 bfloat16.
triton/: launches the GPU kernels of jit/.
"""
