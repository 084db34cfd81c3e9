"""What a pool tells about itself: events, statistics, metrics."""
