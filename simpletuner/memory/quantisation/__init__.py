"""Quantised frozen linear layers.

A library computes levels and scales once, when weights are loaded. `QuantisedLinear` stores them as
plain buffers, so they can be moved, streamed, compiled and saved like any tensor.

layers        quantised layers, and the quantisation of a model in place
formats       the interface of packed weights
scaled_rows   int8 and float8 with a scale per row, and products that do not unpack them
quanto        optimum-quanto: int8, float8, and groups of 2 or 4 bits
torchao       torchao's own tensors
nf4           bitsandbytes' NF4
"""
