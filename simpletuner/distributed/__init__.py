"""The processes of a run, one or many.

| file     | answers                                                                  |
|----------|--------------------------------------------------------------------------|
| world    | which rank is this process, and how do processes exchange values?        |
| requests | what has a running session been asked to do, such as to stop?            |
| sequence | which tokens does this process hold in sequence parallelism?             |
| sharing  | which part of the work between steps does this process do?               |
| sharding | which shard of a weight does this process hold, and how is it saved?     |

`annexes/processes` launches and connects several processes. The first three files depend only on `errors`; the last two
need options and events, and lie above `reporting`.
"""
