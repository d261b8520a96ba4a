"""Model configurations, how they are split over ranks, and the forward pass."""
