"""Group offload: frozen weights live in host memory and are copied to the device when needed.

Used for training, sampling and caching.

image          packs the frozen tensors of a group of blocks into one flat host buffer
streamer       the ring of device slots: prefetches and evicts groups
copiers        copies images into slots, on a side stream, in line, or from disk
attach         applies group offload to a model
side_stream    the stream beside the compute stream, and its events
block_inputs   offloads activations instead of weights: the inputs of checkpointed blocks
"""
