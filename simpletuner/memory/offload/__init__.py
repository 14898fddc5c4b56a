"""Group offload: frozen weights live in host memory and are copied to the device when needed.

Used for training, sampling and caching.

image          packs the frozen tensors of a group of blocks into one flat host buffer: pinned, or a memory-mapped file
streamer       the ring of device slots: prefetches groups, evicts groups, and copies them
attach         applies group offload to a model
beside         the side stream for copies between host and device during computation
block_inputs   offloads activations instead of weights: the inputs of checkpointed blocks
"""
