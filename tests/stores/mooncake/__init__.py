"""Tests of MooncakeStore over a real mooncake_master and several processes on loopback, and over a library that does
wrong on purpose."""
