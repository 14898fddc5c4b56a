# ruff: noqa: F401
"""Import everything that a run needs, for processes of tests that are forked.

The modules are hidden from the garbage collector: a run collects after each encoder that it
releases, and scanning torch would take longer than the rest of a tiny run.
"""

import gc
import os
from pathlib import Path

errors = os.dup(2)
with Path(os.devnull).open("w") as nowhere:
    # Libraries warn of parts that cannot be loaded.
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

# Every run writes a report and the program in it: their templates are compiled here, once.
for template in ("page.html.jinja", "pieces.html.jinja", "report.html.jinja"):
    _environment().get_template(template)
_template()
os.fsync = lambda fd: None  # as in tests/conftest.py
gc.collect()
gc.freeze()
