"""The prefill worker: admission, chunked-prefill scheduler, hand-off. Thin on purpose."""
