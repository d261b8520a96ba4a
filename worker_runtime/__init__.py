"""What the prefill and the decode worker share: inbox, step loop, token outlet, control shell,
ranks."""
