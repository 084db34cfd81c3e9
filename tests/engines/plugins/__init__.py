"""Tests with the code of SGLang and of LMCache, without their engines."""
