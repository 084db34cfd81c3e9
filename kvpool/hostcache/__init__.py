"""A host tier for engines that keep their own device blocks. It has an index, the memory, and copies; each can be used
alone."""
