"""Policies that decide iteration by iteration, over tokens and blocks of the KV cache."""
