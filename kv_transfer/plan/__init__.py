"""Pure parts of the hand-off: resharding, coverage, block grants, checksums, handoff state."""
