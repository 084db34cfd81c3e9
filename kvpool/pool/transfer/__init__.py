"""From decisions to copies: the queue of batches, what they wait for, and what the device has taken."""
