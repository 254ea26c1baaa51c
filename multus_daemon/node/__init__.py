"""Long loops beside the requests."""
