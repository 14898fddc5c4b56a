"""From the entries of a dataset file to batches; only the loader imports torch. Read the modules in this order:

| question                                      | files                                              |
|-----------------------------------------------|----------------------------------------------------|
| what the user and the run ask for             | `entries`                                          |
| which files exist, and their captions         | `files`, `discovery`, `captions`, `remote` (annex) |
| how a file is decoded                         | `media`, `clips`, `clip_frames`, `masks`           |
| which size, crop and length is trained        | `buckets`, `clips`                                 |
| whether a file is trained or left out         | `sample`, `dataset`, `build`                       |
| in which order samples are drawn              | `chance`, `sampler`, `loader`                      |
"""
