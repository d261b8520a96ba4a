"""The decode worker: block reservation, continuous-batching scheduler, token outlet. Thin on
purpose."""
