"""Several processes of a run, which a run of one process never needs.

| file      | answers                                                                             |
|-----------|-------------------------------------------------------------------------------------|
| launching | how are they started, and how do they fail together                                 |
| agreement | do all have the same plan                                                           |
| joining   | how do they find each other, and gather values and counts: the `World` of several   |
| watch     | who is alive                                                                        |

The command `train` opens it. The core sees only the `World` that it makes.
"""
