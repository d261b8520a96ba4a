"""Load generators and reports. Nothing of Baton imports this package, nor the reverse."""
