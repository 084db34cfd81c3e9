"""Tests with engines that have plug-ins of kvpool's, each in an environment of its own. See README.md."""
