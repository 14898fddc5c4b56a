"""The processes of a run, one or many.

| file     | answers                                                           |
|----------|-------------------------------------------------------------------|
| world    | which rank is this process, and how do processes exchange values? |
| requests | what has a running session been asked to do, such as to stop?     |

`annexes/processes` launches and connects several processes.
"""
