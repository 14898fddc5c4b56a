"""Kernels of Triton run in its interpreter (TRITON_INTERPRET=1), mended for bfloat16.

The interpreter holds bfloat16 as its 16 bits, and adds and multiplies them as integers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def mend_bfloat16() -> None:
    """Let operations of two bfloat16 operands compute in float32."""
    import numpy as np

    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    bfloat16 = importlib.import_module("triton.language").bfloat16
    in_bits = interpreter.InterpreterBuilder.binary_op

    def widened(bits: Any) -> Any:
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def narrowed(numbers: Any) -> Any:
        """Rounded to the nearest, and to even between two."""
        bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    def binary_op(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> Any:
        if left.dtype.scalar != bfloat16:
            return in_bits(self, left, right, operation)
        result = operation(widened(left.data), widened(right.data))
        if result.dtype == np.bool_:
            return interpreter.TensorHandle(result, left.dtype.scalar)
        return interpreter.TensorHandle(narrowed(result), left.dtype.scalar)

    def get_bf16(self: Any, value: float) -> Any:
        return interpreter.TensorHandle(narrowed(np.array([value])), bfloat16)

    interpreter.InterpreterBuilder.binary_op = binary_op
    interpreter.InterpreterBuilder.get_bf16 = get_bf16
