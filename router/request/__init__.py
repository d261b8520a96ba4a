"""What a client may say, and its checks."""
