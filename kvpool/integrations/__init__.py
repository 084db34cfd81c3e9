"""Plug-ins for engines that own their device's blocks. Each imports its engine, and only its engine imports it."""
