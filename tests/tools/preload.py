# ruff: noqa: F401
"""What processes of tests are forked with: everything that a run imports, out of the garbage
collector's sight.

A run collects after each encoder that it releases; looking through torch takes longer than the rest
of a tiny run.
"""

import gc
import os
from pathlib import Path

errors = os.dup(2)
with Path(os.devnull).open(
    "w"
) as nowhere:  # for what libraries say of their parts that cannot be loaded
    os.dup2(nowhere.fileno(), 2)
    import diffusers.guiders
    import PIL.ImageDraw
    import PIL.ImageFont
    import torch.profiler

    import simpletuner.annexes.fitting.ready
    import simpletuner.run.train
    import tests.conftest
    import tests.tools.sharded_run
    import tests.tools.torch_settings
    from simpletuner.annexes.report.html import _environment
    from simpletuner.models.usage import _template
os.dup2(errors, 2)
os.close(errors)

for template in ("page.html.jinja", "pieces.html.jinja", "report.html.jinja"):
    _environment().get_template(template)  # compiled here, for the report that every run writes
os.fsync = lambda fd: None  # as in tests/conftest.py
_template()  # and this for the program in the report
gc.collect()
gc.freeze()
