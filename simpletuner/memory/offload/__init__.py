"""Frozen weights live in host memory and visit the device block by block, in training, sampling and caching.

image          the frozen tensors of a group of blocks in one flat host buffer, and what points at it
host           that buffer: page-locked, or a file mapped into memory
lane           how a buffer gets to the device: in line with the compute, or beside it
streamer       the ring of device slots: what comes next, and which slot it takes
saved_tensors  weights that autograd saves, remembered by their place instead of their value
attach         puts all of it around a model
block_inputs   activations instead of weights: the inputs of checkpointed blocks wait in host memory
"""
