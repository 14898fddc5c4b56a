"""The processes of a run, of which there may be one.

| file     | answers                                                                 |
|----------|-------------------------------------------------------------------------|
| world    | which process is this, and what can it ask the others                  |
| requests | what was a running session asked to do, such as to stop                |
| sequence | which tokens are here, where processes share those of a sample         |
| sharing  | who does which part of the work between the steps                      |
| sharding | which part of a weight is here, and how is it saved                    |

`annexes/processes` starts and connects several. The first three lie below all rooms but `errors`; the others need
options and events, and lie above `reporting`.
"""
