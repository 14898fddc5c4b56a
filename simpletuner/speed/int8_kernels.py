"""Kernels of int8 products that scale their sums, chosen by inductor's measurements.

torch's own int8 product writes sums of 4 bytes, which the next kernel reads again to scale them.
Kernels that inductor writes can scale sums where they are added up. With `max_autotune_gemm`, it
writes some and times both ways, together with the operations that follow.

This module imports inductor, so it is imported only by runs that use such kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.select_algorithm import ExternKernelChoice
from torch._inductor.virtualized import V

from simpletuner.models.adapter import Compiler, Forward

OPTIONS: Mapping[str, Any] = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "ATEN,TRITON",
    "autotune_num_choices_displayed": 0,  # else a table of every product goes to stderr
}


class Int8Kernels(InductorChoices):
    """Choices of inductor in which only int8 products are tuned.

    Integer sums are exact in every kernel. Sums of other products are not, so they keep the kernel
    of torch that they have without tuning, and do not depend on measurements.
    """

    def get_template_configs(
        self, kernel_inputs: Any, templates: list[Any], op_name: str, *others: Any, **named: Any
    ) -> list[Any]:
        """The kernels to choose from for a product.

        Args:
            templates: kernels of torch, which come first, and of inductor.
            op_name: `int_mm` for int8, `mm`, `addmm` and others.
        """
        if op_name != "int_mm":
            own = [template for template in templates if isinstance(template, ExternKernelChoice)]
            templates = own[:1]
        return super().get_template_configs(kernel_inputs, templates, op_name, *others, **named)


KERNELS = Int8Kernels()


def tuning_int8(compiler: Callable[..., Forward]) -> Compiler:
    """A compiler that tunes int8 products; like `torch.compile`, it does so in the first call.

    Args:
        compiler: `torch.compile` with all but its options.
    """

    def compile_tuned(function: Forward) -> Forward:
        compiled = compiler(function, options=dict(OPTIONS))

        def call(*inputs: Any) -> Any:
            # Choices are per thread, and on a GPU autograd recomputes checkpoints in threads of
            # its own.
            with V.set_choices_handler(KERNELS):
                return compiled(*inputs)

        return call

    return compile_tuned
