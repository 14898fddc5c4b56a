"""From the entries of a dataset file to batches; free of torch but for the loader. To be read in this order:

| question                                      | files                                              |
|-----------------------------------------------|----------------------------------------------------|
| what the user and the run ask for             | `entries`                                          |
| what is there                                 | `files`, `discovery`, `captions`, `remote` (annex) |
| what a file shows                             | `media`, `clips`, `readers`, `masks`               |
| which size, crop and length is trained        | `buckets`, `clips`                                 |
| what becomes of a file                        | `sample`, `dataset`, `build`                       |
| in which order                                | `chance`, `sampler`, `loader`                      |
"""
