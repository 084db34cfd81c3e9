"""What a pool tells to monitoring: metrics for Prometheus."""
