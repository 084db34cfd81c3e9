"""The plug-ins of vLLM: offloading spec and manager, secondary tier, cache policy."""
