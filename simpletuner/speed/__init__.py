"""Compiled blocks, attention kernels, activation checkpointing."""
