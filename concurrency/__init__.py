"""Tasks, timers, bounded maps and threads that the other packages share."""
