"""Group offload: frozen weights live in host memory and are copied to the device when needed.

It serves training, sampling and caching alike.

image          the frozen tensors of a group of blocks in one flat host buffer: page-locked, or a memory-mapped file
streamer       the ring of device slots: which group comes next, into which slot, and how it is copied there
attach         applies all of it to a model
beside         the stream on which host and device exchange tensors while the device computes
block_inputs   offloads activations instead of weights: the inputs of checkpointed blocks
"""
