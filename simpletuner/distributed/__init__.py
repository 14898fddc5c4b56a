"""The processes of a run.

| file          | answers                                                           |
|---------------|-------------------------------------------------------------------|
| world         | who am I, as a launcher says, and what can I ask the others       |
| exchange      | how are values gathered and counted                               |
| joining       | how do the processes find each other                              |
| watch         | who is alive                                                      |
| requests      | what was a running session asked for, such as to stop             |
| launching     | how are processes started, and how do they fail together          |
| sharing       | who does which part of the work between the steps                 |
| sharding      | which part of a weight is here                                    |
| sharded_state | how are the parts of moments and averages saved                   |

The first five lie below all rooms but `errors`; the others need options and events, and lie above `reporting`.
"""
