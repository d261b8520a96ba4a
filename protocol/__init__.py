"""What every process of a Baton cluster agrees on. Pure values: no torch, no ray, no I/O."""
