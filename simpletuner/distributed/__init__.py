"""The processes of a run.

| file          | answers                                                            |
|---------------|--------------------------------------------------------------------|
| world         | who am I, as a launcher says, and what can I ask the others       |
| joining       | how do the processes find each other, and gather values and counts |
| watch         | who is alive                                                      |
| requests      | what was a running session asked for, such as to stop             |
| launching     | how are processes started, and how do they fail together          |
| sharing       | who does which part of the work between the steps                 |
| sharding      | which part of a weight is here, and how is it saved               |

The first four lie below all rooms but `errors`; the others need options and events, and lie above `reporting`.
"""
