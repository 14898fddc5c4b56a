"""Runs with several processes. A run of one process imports nothing from here.

| file      | contents                                                                      |
|-----------|-------------------------------------------------------------------------------|
| launching | starting the processes                                                        |
| group     | failing together                                                              |
| agreement | checking that all processes have the same plan                                |
| joining   | rendezvous, and the `World` of several processes: gathering values and counts |
| watch     | liveness                                                                      |

The command `train` uses it. The core sees only the resulting `World`.
"""
